"""Alerts and silences in the answers of servers, whose they are, and their tables."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from exporter.alerts.messages import FIRING, Alert, alert_json, iso, make_alert, parse_time, printable, worst_first
from exporter.contract.records import NOTHING, JsonValue, Record
from launcher.words import duration_text

SILENT = ("GpuJobWatchdog",)  # the heartbeat is no alert for people
OURS = "GpuJob"  # prefix of our alert names


class Found(NamedTuple):
    """An alert that fires, and the silences and alerts that hide it."""

    alert: Alert
    silenced_by: tuple[str, ...] = ()
    inhibited: bool = False


def job_matcher(job_id: str) -> tuple[str, str]:
    """Name with operator, and value, of the label of a job. The number of an array is for all its tasks too."""
    return ("job_id=~", f"{job_id}(_[0-9]+)?") if job_id.isdigit() else ("job_id", job_id)


class Silence(NamedTuple):
    """A silence that is active."""

    id: str
    matchers: tuple[tuple[str, str], ...]  # only those of equality; of others the name with the operator
    until: float | None
    by: str

    def is_of(self, job_id: str, place: Mapping[str, str]) -> bool:
        """Whether it was made for this job, or this array.

        ``place`` has the labels `cluster` and `user` of the job as far as known: clusters that share an Alertmanager
        may have equal ids.
        """
        named = dict(self.matchers)
        return job_matcher(job_id) in self.matchers and all(named.get(key, text) == text for key, text in place.items())

    def about(self, job_id: str, place: Mapping[str, str]) -> bool:
        """Whether it mutes this job, possibly with all other tasks of its array."""
        return self.is_of(job_id, place) or self.is_of(job_id.partition("_")[0], place)

    @property
    def alert(self) -> str | None:
        return dict(self.matchers).get("alertname")


class _Status(Record):
    state: str = "active"
    silencedBy: tuple[str, ...] = ()  # noqa: N815 - the names are those of Alertmanager
    inhibitedBy: tuple[str, ...] = ()  # noqa: N815


class _ManagerAlert(Record):
    labels: Mapping[str, str]
    annotations: Mapping[str, str] = NOTHING
    startsAt: str = ""  # noqa: N815
    status: _Status = _Status()


class _ServerAlert(Record):
    labels: Mapping[str, str]
    annotations: Mapping[str, str] = NOTHING
    activeAt: str = ""  # noqa: N815
    state: str


class _Matcher(Record):
    name: str
    value: str
    isRegex: bool = False  # noqa: N815
    isEqual: bool = True  # noqa: N815


class _ManagerSilence(Record):
    id: str
    matchers: tuple[_Matcher, ...]
    endsAt: str = ""  # noqa: N815
    createdBy: str = ""  # noqa: N815
    status: _Status = _Status()


def _entries(text: str, *keys: str) -> list[object]:
    try:
        body = json.loads(text)
        for key in keys:
            body = body[key]
    except (RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"no {'.'.join(keys) or 'list'}") from error
    if not isinstance(body, list):
        raise ValueError("no list")
    return body


def parse_alertmanager(text: str) -> list[Found]:
    """Alerts of ``/api/v2/alerts`` of Alertmanager. Raises ValueError."""
    found = []
    for entry in _entries(text):
        given = _ManagerAlert.from_json(entry)
        alert = make_alert(FIRING, given.labels, given.annotations, parse_time(given.startsAt))
        found.append(Found(alert, given.status.silencedBy, bool(given.status.inhibitedBy)))
    return found


def parse_prometheus(text: str) -> list[Found]:
    """Alerts of ``/api/v1/alerts`` of Prometheus, which knows no silences. Raises ValueError."""
    given = [_ServerAlert.from_json(entry) for entry in _entries(text, "data", "alerts")]
    return [
        Found(make_alert(FIRING, each.labels, each.annotations, parse_time(each.activeAt)))
        for each in given
        if each.state == FIRING
    ]


def parse_receiver(text: str) -> list[Found]:
    """Alerts of our receiver. Raises ValueError."""
    found = []
    for entry in _entries(text, "alerts"):
        if not isinstance(entry, dict) or not isinstance(labels := entry.get("labels"), dict):
            raise ValueError("an alert without labels")
        texts = {key: str(entry.get(key) or "") for key in ("summary", "description", "runbook_url", "dashboard_url")}
        names = {str(name): str(value) for name, value in labels.items()}
        found.append(Found(make_alert(FIRING, names, texts, parse_time(str(entry.get("since") or "")))))
    return found


def parse_silences(text: str) -> list[Silence]:
    """The active silences of ``/api/v2/silences`` of Alertmanager. Raises ValueError."""
    given = [_ManagerSilence.from_json(entry) for entry in _entries(text)]
    return [
        Silence(
            each.id,
            tuple((_matched(matcher), printable(matcher.value)) for matcher in each.matchers),
            parse_time(each.endsAt),
            printable(each.createdBy),
        )
        for each in given
        if each.status.state == "active"
    ]


def _matched(matcher: _Matcher) -> str:
    operator = {(False, True): "", (True, True): "=~", (False, False): "!=", (True, False): "!~"}
    return printable(matcher.name) + operator[matcher.isRegex, matcher.isEqual]


def selected(found: Iterable[Found], job: str | None, user: str | None, cluster: str | None = None) -> list[Found]:
    """Alerts of a job by id or name, else those of a user and those of no job; worst first.

    ``cluster`` is that of the job if known: clusters that share an Alertmanager may have equal ids.
    """

    def wanted(alert: Alert) -> bool:
        labels = alert.labels
        if not alert.name.startswith(OURS) or alert.name in SILENT:
            return False
        if job is not None:
            job_id = labels.get("job_id", "")
            is_here = cluster is None or labels.get("cluster") in (cluster, None)
            return is_here and job in (job_id, job_id.partition("_")[0], labels.get("job_name"))
        return user is None or labels.get("user") in (user, None)

    by_alert = {each.alert.key: each for each in found if wanted(each.alert)}
    return [by_alert[alert.key] for alert in worst_first(each.alert for each in by_alert.values())]


def render(found: Sequence[Found], silences: Mapping[str, Silence], now: float) -> list[str]:
    """Lines for people: the alert, about what, since when, and where to read on."""
    lines = []
    for each in found:
        alert = each.alert
        job = alert.labels.get("job_id")
        about = f" job {job} {alert.labels.get('job_name', '')} ({alert.labels.get('user', '')})" if job else ""
        since = "" if alert.since is None else f" for {duration_text(max(0.0, now - alert.since))}"
        lines.append(f"{alert.severity or '-':8} {alert.name}{about}{since}{_hidden(each, silences, now)}")
        lines += [f"         {text}" for text in (alert.description or alert.summary, alert.runbook) if text]
    return lines or ["No alert fires."]


def _hidden(found: Found, silences: Mapping[str, Silence], now: float) -> str:
    ends = [silences[name].until for name in found.silenced_by if name in silences]
    if found.silenced_by:
        left = [end - now for end in ends if end is not None]
        return f" [muted{f' for {duration_text(max(0.0, max(left)))} more' if left else ''}]"
    return " [explained by another alert]" if found.inhibited else ""


def as_json(found: Sequence[Found], silences: Mapping[str, Silence]) -> list[JsonValue]:
    """The same as JSON."""
    return [
        {
            **alert_json(each.alert),
            "muted_until": max((iso(end) or "" for end in _ends(each, silences)), default=None),
            "muted": bool(each.silenced_by),
            "inhibited": each.inhibited,
        }
        for each in found
    ]


def _ends(found: Found, silences: Mapping[str, Silence]) -> list[float | None]:
    return [silences[name].until for name in found.silenced_by if name in silences]


def changes(before: Iterable[Found], after: Iterable[Found], write: Callable[[Alert], None]) -> None:
    """Write each alert that has begun, then each that has ended."""
    old = {each.alert.key: each.alert for each in before}
    new = {each.alert.key: each.alert for each in after}
    for key, alert in new.items():
        if key not in old:
            write(alert)
    for key, alert in old.items():
        if key not in new:
            write(alert._replace(status="resolved"))
