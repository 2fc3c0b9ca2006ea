"""Webhooks of Alertmanager: their alerts as records, lines of a log, and what fires now."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from exporter.contract.records import NOTHING, JsonValue, Record, RecordError

WATCHDOG = "GpuJobWatchdog"
FIRING, ENDED = "firing", "resolved"
SEVERITIES = ("critical", "warning", "info")  # the worst first
MOST_ALERTS = 1000  # of one message, and of those that fire
MOST_CHARACTERS = 1000  # of a text in the log
MOST_HEARTBEATS = 100  # clusters, each with a Prometheus of its own
# In which Alertmanager repeats an alert that fires: each 24 h at most, and a group's 4 h. One of severity info waits
# for office hours, which may be on one day of the week.
CONFIRMED_WITHIN_S, INFO_WITHIN_S = 30 * 3600.0, 8 * 86400.0
FORGOTTEN_S = 86400.0  # of silence of one cluster among others: its Prometheus has been removed


class WebhookAlert(Record):
    """One alert of a message."""

    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str] = NOTHING
    startsAt: str = ""  # noqa: N815 - the names are those of Alertmanager
    endsAt: str = ""  # noqa: N815
    fingerprint: str = ""


class WebhookMessage(Record):
    """What Alertmanager posts (its documentation, `webhook_config`)."""

    alerts: tuple[WebhookAlert, ...]
    receiver: str = ""
    truncatedAlerts: int = 0  # noqa: N815


class Alert(NamedTuple):
    """An alert as the log and `gpujob alerts` show it."""

    status: str
    labels: Mapping[str, str]
    summary: str
    description: str
    runbook: str
    board: str
    since: float | None  # epoch seconds

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")

    @property
    def severity(self) -> str:
        return self.labels.get("severity", "")

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """Identity: equal for messages about the same alert."""
        return tuple(sorted(self.labels.items()))


def parse_message(text: str) -> tuple[tuple[Alert, ...], int]:
    """Alerts of a webhook, and how many more Alertmanager left out. Raises RecordError."""
    try:
        message = WebhookMessage.from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"no message of Alertmanager: {error}") from error
    return tuple(map(_alert, message.alerts[:MOST_ALERTS])), message.truncatedAlerts


def _alert(given: WebhookAlert) -> Alert:
    return make_alert(given.status, given.labels, given.annotations, parse_time(given.startsAt))


def make_alert(status: str, labels: Mapping[str, str], annotations: Mapping[str, str], since: float | None) -> Alert:
    """An alert with texts of one line each, whatever was in them."""
    keys = ("summary", "description", "runbook_url", "dashboard_url")
    summary, description, runbook, board = (printable(annotations.get(key, "")) for key in keys)
    shown = {printable(name): printable(value) for name, value in labels.items()}
    return Alert(status, shown, summary, description, runbook, board, since)


def printable(text: str) -> str:
    """A text without line ends and what a terminal obeys, and not too long."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MOST_CHARACTERS])


def parse_time(text: str) -> float | None:
    """Epoch seconds of a Go timestamp; None for Go's zero time (year 1) or a time out of range."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC).timestamp() if moment.year > 1 and moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def worst_first(alerts: Iterable[Alert]) -> list[Alert]:
    """Alerts by severity, then the oldest first."""

    def rank(alert: Alert) -> tuple[int, float, tuple[tuple[str, str], ...]]:
        known = SEVERITIES.index(alert.severity) if alert.severity in SEVERITIES else len(SEVERITIES)
        return known, alert.since or 0.0, alert.key

    return sorted(alerts, key=rank)


def iso(moment: float | None) -> str | None:
    """Format a time in UTC for logs and JSON."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def log_line(alert: Alert, now: float) -> str:
    """One line for people: when, what, about what, and where to read on."""
    word = "FIRING" if alert.status == FIRING else "ENDED"
    job = alert.labels.get("job_id", "")
    about = f"job {job} {alert.labels.get('job_name', '')} ({alert.labels.get('user', '')}): " if job else ""
    text = alert.description or alert.summary
    return f"{iso(now)} {word} {alert.severity or '-'} {alert.name} {about}{text} {alert.runbook}".rstrip()


def log_json(alert: Alert, now: float) -> str:
    """The same as one line of JSON."""
    return json.dumps({"schema": 1, "time": iso(now), **alert_json(alert)}, ensure_ascii=False)


class LoggedAlert(Record):
    """A line of the log in JSON."""

    status: str
    labels: Mapping[str, str]
    since: str | None = None
    summary: str = ""
    description: str = ""
    runbook_url: str = ""
    dashboard_url: str = ""


def parse_log_json(line: str) -> Alert | None:
    """The alert in a line of ``log_json``; None if it has none."""
    try:
        found = LoggedAlert.from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    texts = (found.summary, found.description, found.runbook_url, found.dashboard_url)
    return Alert(found.status, found.labels, *texts, parse_time(found.since or ""))


def alert_json(alert: Alert) -> dict[str, JsonValue]:
    """An alert as JSON shows it."""
    return {
        "status": alert.status,
        "alert": alert.name,
        "severity": alert.severity,
        "since": iso(alert.since),
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": alert.runbook,
        "dashboard_url": alert.board,
        "labels": dict(alert.labels),
    }


class Firing:
    """The alerts that fire, as far as messages have said, also those before a restart."""

    def __init__(self, logged: Iterable[Alert] = (), now: float = 0.0) -> None:
        # Each with the time of its last message; of those in the log, that of the restart. The oldest message is first
        self._alerts: dict[tuple[tuple[str, str], ...], tuple[Alert, float]] = {}
        for alert in logged:
            self.take(alert, now)

    def take(self, alert: Alert, now: float) -> bool:
        """Note an alert. Returns whether it is news: it has begun or ended."""
        before, _ = self._alerts.pop(alert.key, (None, now))
        if alert.status != FIRING:
            return before is not None
        if len(self._alerts) >= MOST_ALERTS:
            self._alerts.pop(next(iter(self._alerts)))
        self._alerts[alert.key] = alert, now
        return before is None or iso(before.since) != iso(alert.since)  # the log has whole seconds

    def lost_ends(self, now: float) -> list[Alert]:
        """Alerts whose end no message has said, each once.

        Alertmanager says nothing of an alert that ends while it is muted or another one hides it, and nobody hears what
        it says during a restart. What fires it repeats.
        """
        found = [
            alert
            for alert, named_at in self._alerts.values()
            if now - named_at > (INFO_WITHIN_S if alert.severity == "info" else CONFIRMED_WITHIN_S)
        ]
        for alert in found:
            del self._alerts[alert.key]
        return [alert._replace(status=ENDED) for alert in found]

    def all(self) -> list[Alert]:
        """What fires, worst first."""
        return worst_first(alert for alert, _ in self._alerts.values())


class Heartbeat:
    """The alert that always fires: when it last came, and whether the silence is too long."""

    def __init__(self, most_silence_s: float, repeat_s: float, now: float) -> None:
        self._most_silence_s, self._repeat_s = most_silence_s, repeat_s
        self._began, self._due = now, 0.0
        self.last: float | None = None
        self.is_silent = False

    def beat(self, now: float) -> bool:
        """Note a heartbeat. Returns whether it ends a silence."""
        ended, self.last, self.is_silent = self.is_silent, now, False
        return ended

    def silence(self, now: float) -> float | None:
        """Seconds of a silence to report now: when it becomes too long, and then from time to time; else None."""
        lasted = now - (self.last if self.last is not None else self._began)
        if lasted <= self._most_silence_s or (self.is_silent and now < self._due):
            return None
        self.is_silent, self._due = True, now + self._repeat_s
        return lasted


class Heartbeats:
    """The heartbeats of all Prometheus servers that share a receiver, told apart by the label ``cluster``."""

    def __init__(self, most_silence_s: float, repeat_s: float, now: float) -> None:
        self._most_silence_s, self._repeat_s = most_silence_s, repeat_s
        self._first = Heartbeat(most_silence_s, repeat_s, now)  # whose cluster is unknown until it comes
        self._of: dict[str, Heartbeat] = {}

    @property
    def worst(self) -> Heartbeat:
        """The one that came longest ago."""
        return min(self._of.values(), key=lambda beat: beat.last or 0.0, default=self._first)

    def beat(self, cluster: str, now: float) -> bool:
        """Note a heartbeat. Returns whether it ends a silence."""
        if cluster not in self._of:
            if len(self._of) >= MOST_HEARTBEATS:
                return False
            self._of[cluster] = Heartbeat(self._most_silence_s, self._repeat_s, now) if self._of else self._first
        return self._of[cluster].beat(now)

    def silences(self, now: float) -> dict[str, float]:
        """Clusters with a silence to report now, and how long it lasts."""
        for cluster, beat in list(self._of.items()):
            if len(self._of) > 1 and now - (beat.last or 0.0) > FORGOTTEN_S:
                del self._of[cluster]
        found = {cluster: beat.silence(now) for cluster, beat in (self._of or {"": self._first}).items()}
        return {cluster: lasted for cluster, lasted in found.items() if lasted is not None}
