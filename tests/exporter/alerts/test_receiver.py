"""The receiver of alerts: its log, its pages, and what it does when the heartbeat stops."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.alerts.log_file import AlertLog
from exporter.alerts.messages import (
    CONFIRMED_WITHIN_S,
    INFO_WITHIN_S,
    Firing,
    Heartbeat,
    Heartbeats,
    log_line,
    make_alert,
    parse_message,
    worst_first,
)
from exporter.alerts.receiver import Options, Receiver
from exporter.contract.records import RecordError
from tests.support.exporter import SOON_S, until

LABELS = {"alertname": "GpuJobWorkerKilled", "severity": "critical", "job_id": "7", "job_name": "embed", "user": "ada"}


def message(*alerts: dict[str, Any], **more: Any) -> str:
    """A webhook of Alertmanager 0.25, cut to what counts."""
    return json.dumps({"version": "4", "receiver": "log", "alerts": alerts, **more})


def alert(status: str = "firing", **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {**LABELS, **labels},
        "annotations": {"description": "Worker w3 was killed.\n\x1b[31mno colour", "runbook_url": "https://r/K.md"},
        "startsAt": "2026-11-20T13:31:07.123456789Z",
        "endsAt": "0001-01-01T00:00:00Z",
    }


def test_a_message_becomes_lines_that_no_text_can_forge() -> None:
    (found,), left_out = parse_message(message(alert(), truncatedAlerts=3))
    assert left_out == 3
    assert log_line(found, 1_800_000_000.0) == (
        "2027-01-15T08:00:00Z FIRING critical GpuJobWorkerKilled job 7 embed (ada): "
        "Worker w3 was killed.  [31mno colour https://r/K.md"
    )
    assert found.since == pytest.approx(1_795_181_467.123456)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"alerts": 3}', '{"alerts": [{"status": 1, "labels": {}}]}', "[" * 9999]
)
def test_what_is_no_message_is_an_error(text: str) -> None:
    with pytest.raises(RecordError):
        parse_message(text)


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00Z", "2026-11-20", "x"])
def test_a_time_that_has_no_place_in_utc_is_unknown(moment: str) -> None:
    (found,), _ = parse_message(message({**alert(), "startsAt": moment}))
    assert found.since is None


def test_an_alert_is_news_when_it_begins_and_when_it_ends() -> None:
    firing, begun = Firing(), make_alert("firing", LABELS, {}, 1.0)
    ended = make_alert("resolved", LABELS, {}, 1.0)
    assert [firing.take(each, 2.0) for each in (begun, begun, ended, ended)] == [True, False, True, False]


def test_a_restarted_receiver_knows_what_fires_and_when_it_ends(tmp_path: Path) -> None:
    def begin(now: float) -> Receiver:
        options = Options("", None, 180.0, None, None, None)
        return Receiver(AlertLog(tmp_path / "alerts.log"), options, lambda: now)

    first, second = (make_alert("firing", LABELS | {"job_id": job}, {}, 100.25) for job in ("7", "8"))
    begin(200.0).take((first, second))
    again = begin(300.0)
    again.take((first, second, first._replace(status="resolved")))
    words = [" ".join(line.split()[1:6]) for line in (tmp_path / "alerts.log").read_text().splitlines()]
    told = (("FIRING", 7), ("FIRING", 8), ("ENDED", 7))
    assert words == [f"{word} critical GpuJobWorkerKilled job {job}" for word, job in told]


def test_an_end_that_came_while_no_receiver_ran_is_found_when_the_alert_is_not_repeated() -> None:
    alerts = [make_alert("firing", LABELS | {"job_id": job}, {}, 100.0) for job in ("7", "8", "9")]
    firing = Firing([*alerts, alerts[2]._replace(status="resolved")], 200.0)
    assert firing.all() == alerts[:2]
    firing.take(alerts[0], 300.0)
    assert firing.lost_ends(200.0 + CONFIRMED_WITHIN_S) == []
    assert firing.lost_ends(201.0 + CONFIRMED_WITHIN_S) == [alerts[1]._replace(status="resolved")]
    assert firing.lost_ends(202.0 + CONFIRMED_WITHIN_S) == []
    assert firing.all() == alerts[:1]


def test_an_end_that_alertmanager_did_not_tell_is_found_when_the_alert_is_not_repeated() -> None:
    """It says nothing of the end of an alert that is muted, or hidden by another one."""
    firing = Firing()
    labels = LABELS | {"job_id": "8", "severity": "info"}
    hidden, info = (make_alert("firing", each, {}, 100.0) for each in (LABELS, labels))
    for alert in (hidden, info):
        firing.take(alert, 100.0)
        firing.take(alert, 200.0)
    assert firing.lost_ends(200.0 + CONFIRMED_WITHIN_S) == []
    assert firing.lost_ends(201.0 + CONFIRMED_WITHIN_S) == [hidden._replace(status="resolved")]
    assert firing.all() == [info]
    assert firing.lost_ends(200.0 + INFO_WITHIN_S) == []
    assert firing.lost_ends(201.0 + INFO_WITHIN_S) == [info._replace(status="resolved")]


def test_the_worst_and_oldest_alert_is_the_first() -> None:
    rows = [("info", 1.0), ("warning", 3.0), ("critical", 9.0), ("warning", 2.0), ("none", 0.0)]
    alerts = [make_alert("firing", {"severity": severity}, {}, since) for severity, since in rows]
    assert [(each.severity, each.since) for each in worst_first(alerts)] == [
        *(("critical", 9.0), ("warning", 2.0), ("warning", 3.0), ("info", 1.0), ("none", 0.0))
    ]


def test_a_silence_is_reported_when_it_is_too_long_and_then_each_hour() -> None:
    beat = Heartbeat(180.0, 3600.0, now=0.0)
    assert beat.silence(180.0) is None  # it need not have begun
    assert beat.silence(181.0) == 181.0
    assert beat.silence(200.0) is None
    assert beat.silence(3781.0) == 3781.0
    assert beat.beat(4000.0)
    assert not beat.beat(4060.0)
    assert beat.silence(4240.0) is None
    assert beat.silence(4241.0) == 181.0


def test_each_cluster_has_a_heartbeat_of_its_own() -> None:
    beats = Heartbeats(180.0, 3600.0, now=0.0)
    assert beats.silences(181.0) == {"": 181.0}
    assert [beats.beat("a", 200.0), beats.beat("b", 200.0), beats.beat("b", 500.0)] == [True, False, False]
    assert beats.silences(500.0) == {"a": 300.0}
    assert (beats.worst.last, beats.worst.is_silent) == (200.0, True)
    assert beats.beat("a", 600.0)
    beats.beat("b", 90_000.0)
    assert beats.silences(90_000.0) == {}  # the Prometheus of a has been removed
    assert beats.worst.last == 90_000.0


class Running:
    """A receiver in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        words = ["receive-alerts", "--state-dir", str(folder), "--web.listen-address", "127.0.0.1:0", *options]
        self.process = subprocess.Popen([sys.executable, "-m", "exporter", *words], stderr=subprocess.PIPE, text=True)
        place = folder / "receiver.json"
        until(place.exists, "the receiver")
        self.url = json.loads(place.read_text(encoding="utf-8"))["url"]

    def get(
        self, path: str, text: str | None = None, *, token: bool = True, content_type: str = "application/json"
    ) -> str:
        key = (self.folder / "token").read_text(encoding="utf-8").strip()
        headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {key}"} if token else {})
        request = urllib.request.Request(f"{self.url}{path}", None if text is None else text.encode(), headers)
        with urllib.request.urlopen(request, timeout=2 * SOON_S) as answer:
            return str(answer.read().decode())

    def log(self) -> str:
        return (self.folder / "alerts.log").read_text(encoding="utf-8")


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    program = tmp_path / "hook"
    program.write_text(f"#!/bin/sh\ncat >> {tmp_path}/said\n", encoding="utf-8")
    program.chmod(0o755)
    return program


@pytest.fixture
def receiver(tmp_path: Path, hook: Path) -> Iterator[Running]:
    running = Running(tmp_path / "state", "--silence-after", "4", "--on-silence", str(hook))
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(SOON_S) == 0


def test_it_logs_alerts_and_reports_a_heartbeat_that_stops(receiver: Running, tmp_path: Path) -> None:
    beat = alert(alertname="GpuJobWatchdog", severity="none", cluster="c1")
    assert receiver.get("/gpujob", message(alert(), beat)) == "ok\n"
    assert "FIRING critical GpuJobWorkerKilled job 7 embed (ada)" in receiver.log()
    assert "Watchdog" not in receiver.log()
    lines = (receiver.folder / "alerts.log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["alert"] for line in lines] == ["GpuJobWorkerKilled"]
    shown = json.loads(receiver.get("/api/v1/alerts"))
    assert [each["alert"] for each in shown["alerts"]] == ["GpuJobWorkerKilled"]

    def is_ok_after_a_heartbeat() -> bool:
        receiver.get("/gpujob", message(beat))
        is_silent = json.loads(receiver.get("/api/v1/alerts"))["heartbeat"]["silent"]
        return not is_silent and "gpujob_alerts_heartbeat_ok 1" in receiver.get("/metrics", token=False)

    until(is_ok_after_a_heartbeat, "two answers within the time after which it is silent")
    until(lambda: "gpujob_alerts_heartbeat_ok 0" in receiver.get("/metrics"), "the silence")
    until(lambda: "ALERTING IS BROKEN: no heartbeat of cluster c1 for " in receiver.log(), "its line")
    until(lambda: (tmp_path / "said").exists() and "ALERTING IS BROKEN" in (tmp_path / "said").read_text(), "the hook")
    receiver.get("/gpujob", message(beat, alert("resolved")))
    assert "alerting works again" in receiver.log()
    assert "ENDED critical GpuJobWorkerKilled" in receiver.log()
    assert json.loads(receiver.get("/api/v1/alerts"))["alerts"] == []
    assert oct(os.stat(receiver.folder / "alerts.log").st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    ("path", "text", "token", "status"),
    [
        ("/gpujob", message(alert()), False, 401),
        ("/api/v1/alerts", None, False, 401),
        ("/gpujob", "no", True, 400),
        ("/gpujob", message(alert(big="x" * 70_000)), True, 413),
    ],
)
def test_it_refuses_strangers_and_what_is_no_message(
    receiver: Running, path: str, text: str | None, token: bool, status: int
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        receiver.get(path, text, token=token)
    assert caught.value.code == status
    assert "GpuJobWorkerKilled" not in receiver.log()


def test_the_encoding_that_a_message_claims_does_not_matter(receiver: Running) -> None:
    assert receiver.get("/gpujob", message(), content_type="text/plain; charset=zlib") == "ok\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--on-silence", "no-such-program-here a"), "is not a program that can be run"),
        (("--on-silence", "mail 'a"), "close the quote"),
        (("--web.listen-address", "nowhere"), "is not host:port"),
        (("--log", "/proc/nowhere/alerts.log"), "/proc/nowhere/alerts.log: No such file or directory"),
        (("--silence-after", "0"), "is not from 1 to 86400"),
    ],
)
def test_a_mistake_is_one_error_before_it_listens(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    words = ["receive-alerts", "--state-dir", str(tmp_path), "--web.listen-address", "127.0.0.1:0", *options]
    done = subprocess.run(
        [sys.executable, "-m", "exporter", *words], capture_output=True, text=True, timeout=2 * SOON_S, check=False
    )
    assert done.returncode == 2
    assert problem in done.stderr.splitlines()[-1]
