"""A trial of the channels: what Alertmanager counts as sent before and after it."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from exporter.alerts.messages import iso
from exporter.contract.records import JsonValue
from launcher.alerts.config import TRIAL

_COUNT = re.compile(
    r"^alertmanager_notification_requests(_failed)?_total\{([^}]*)\} (\d+(?:\.\d+)?(?:e\+?\d{1,3})?)$", re.MULTILINE
)
_INTEGRATION = re.compile(r'integration="(\w+)"')
INTEGRATIONS = {"log": "webhook"}  # of Alertmanager, where it has another name than our kind of channel
PAGE = "https://github.com/gpujob/gpujob/blob/main/docs/how-to/get-alerts.md"
LASTS_S = 300.0  # then Alertmanager ends the alerts by itself
HEARTBEAT_S = 60.0  # from one heartbeat to the next
READ_LATE_S = 2.0  # time for a heartbeat to be counted and read
HEARTBEAT_RECEIVERS = ("gpujob-heartbeat", "heartbeat")  # of our configuration, else of the shipped one


class Sent(NamedTuple):
    """Requests to one kind of service."""

    requests: float = 0.0
    failed: float = 0.0


def parse_counts(text: str) -> dict[str, Sent]:
    """Requests by integration, from the page of Alertmanager."""
    found: dict[str, Sent] = {}
    for failed, labels, value in _COUNT.findall(text):
        if match := _INTEGRATION.search(labels):
            before, number = found.get(match[1], Sent()), float(value)
            key = "failed" if failed else "requests"
            found[match[1]] = before._replace(**{key: getattr(before, key) + number})
    return found


def heartbeat_webhooks(config: object) -> int:
    """Number of webhooks that get the heartbeat, in a configuration of Alertmanager."""
    receivers = config.get("receivers") if isinstance(config, dict) else None
    named = {each["name"]: each for each in receivers or () if isinstance(each, dict) and "name" in each}
    ours = next((named[name] for name in HEARTBEAT_RECEIVERS if name in named), {})
    return len(ours.get("webhook_configs") or ())


def most_heartbeats(elapsed_s: float) -> int:
    """The most heartbeats to one webhook in a time."""
    return 1 + int(max(0.0, elapsed_s - READ_LATE_S) / HEARTBEAT_S)


def trial_alerts(channels: Iterable[str], user: str, now: float) -> list[JsonValue]:
    """One alert for each channel, which the route of `notify` sends there."""
    return [
        {
            "labels": {
                "alertname": TRIAL,
                "severity": "warning",
                "component": "job",
                "job_id": f"trial-{channel}-{now:.0f}",  # an alert like an earlier one would not be sent again
                "job_name": "trial",
                "user": user,
                "notify": channel,
            },
            "annotations": {
                "summary": "A trial of gpujob.",
                "description": f"A trial of the channel {channel} by {user}. Please ignore it.",
                "runbook_url": PAGE,
            },
            "startsAt": iso(now),
            "endsAt": iso(now + LASTS_S),
            "generatorURL": PAGE,  # of the link to the board, which a trial does not have
        }
        for channel in channels
    ]


class Outcome(NamedTuple):
    """What became of the messages to one kind of service."""

    integration: str
    channels: tuple[str, ...]
    delivered: int
    failed: int

    @property
    def is_over(self) -> bool:
        return self.delivered >= len(self.channels) or self.failed > 0

    @property
    def arrived(self) -> bool:
        return self.delivered >= len(self.channels)


def outcomes(
    kinds: Mapping[str, str], before: Mapping[str, Sent], after: Mapping[str, Sent], heartbeats: int = 0
) -> list[Outcome]:
    """The outcome for each kind of service, of channels with their kinds.

    Up to ``heartbeats`` requests to webhooks are none of the trial: Alertmanager counts both together.
    """
    groups: dict[str, list[str]] = {}
    for channel, kind in kinds.items():
        groups.setdefault(INTEGRATIONS.get(kind, kind), []).append(channel)
    found = []
    for integration, channels in groups.items():
        old, new = before.get(integration, Sent()), after.get(integration, Sent())
        failed = round(new.failed - old.failed)
        others = heartbeats if integration == "webhook" else 0
        delivered = max(0, round(new.requests - old.requests) - failed - others)
        found.append(Outcome(integration, tuple(channels), delivered, failed))
    return found
