"""`gpujob alerts`: what fires, from Alertmanager, Prometheus and the receiver; silences and trials."""

import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from exporter.alerts.messages import iso
from exporter.contract.view import JobView, MutedAlert
from launcher.alerts.api import Source, ask, read_alerts
from launcher.alerts.firing import (
    parse_alertmanager,
    parse_prometheus,
    parse_receiver,
    parse_silences,
    render,
    selected,
)
from launcher.alerts.muted import muted_alerts
from launcher.alerts.trial import Sent, heartbeat_webhooks, most_heartbeats, outcomes, parse_counts
from launcher.cli.main import commands
from launcher.cli.watch import _muting
from launcher.errors import LauncherError
from launcher.rundir.rundir import user_name
from tests.support.alert_services import ALERTMANAGER, CHANNELS, Services, running_alertmanager

NOW = 1_795_181_467.0  # 2026-11-20 13:31:07 UTC
KILLED = {"alertname": "GpuJobWorkerKilled", "severity": "critical", "job_id": "7", "job_name": "embed", "user": "ada"}
SLOW = {**KILLED, "alertname": "GpuJobSlowdown", "severity": "warning"}
HUB = {"alertname": "GpuJobHubDown", "severity": "critical", "cluster": "hal"}
TEXTS = {"description": "Worker w3 was killed.", "runbook_url": "https://r/K.md"}
STATUS = {"state": "active", "silencedBy": [], "inhibitedBy": []}
MUTED = {**STATUS, "silencedBy": ["s1"]}
MANAGER = json.dumps(
    [
        {"labels": SLOW, "annotations": TEXTS, "startsAt": "2026-11-20T13:00:07Z", "status": MUTED},
        {"labels": KILLED, "annotations": TEXTS, "startsAt": "2026-11-20T13:30:07.5Z", "status": STATUS},
        {"labels": {**KILLED, "user": "bob", "job_id": "8_1"}, "startsAt": "2026-11-20T13:30:07Z", "status": STATUS},
        {"labels": HUB, "startsAt": "2026-11-20T13:30:07Z", "status": {**STATUS, "inhibitedBy": ["x"]}},
        {"labels": {"alertname": "GpuJobWatchdog", "severity": "none"}, "status": STATUS},
        {"labels": {"alertname": "DiskOfTheSite", "severity": "critical"}, "status": STATUS},
    ]
)  # fmt: skip
SILENCES = json.dumps(
    [
        {
            "id": "s1",
            "matchers": [{"name": "job_id", "value": "7(_[0-9]+)?", "isRegex": True, "isEqual": True}],
            "endsAt": "2026-11-20T14:31:07Z",
            "createdBy": "ada",
            "status": {"state": "active"},
        },
        {"id": "old", "matchers": [], "status": {"state": "expired"}},
    ]
)


def names(found: Any) -> list[tuple[str, str]]:
    return [(each.alert.name.removeprefix("GpuJob"), each.alert.labels.get("job_id", "")) for each in found]


def test_alerts_are_those_of_the_user_or_of_the_job_the_worst_first() -> None:
    found = parse_alertmanager(MANAGER)
    assert names(selected(found, None, "ada")) == [("HubDown", ""), ("WorkerKilled", "7"), ("Slowdown", "7")]
    assert names(selected(found, "8", "ada")) == [("WorkerKilled", "8_1")]
    assert names(selected(found, "embed", None)) == [("WorkerKilled", "8_1"), ("WorkerKilled", "7"), ("Slowdown", "7")]
    assert names(selected(found, None, None))[-1] == ("Slowdown", "7")


def test_a_line_says_since_when_what_hides_it_and_where_to_read_on() -> None:
    silences = {each.id: each for each in parse_silences(SILENCES)}
    assert list(silences) == ["s1"]
    assert render(selected(parse_alertmanager(MANAGER), None, "ada"), silences, NOW) == [
        "critical GpuJobHubDown for 1m 00s [explained by another alert]",
        "critical GpuJobWorkerKilled job 7 embed (ada) for 1m 00s",
        "         Worker w3 was killed.",
        "         https://r/K.md",
        "warning  GpuJobSlowdown job 7 embed (ada) for 31m 00s [muted for 1h 00m more]",
        "         Worker w3 was killed.",
        "         https://r/K.md",
    ]
    assert render([], {}, NOW) == ["No alert fires."]


def test_prometheus_and_the_receiver_are_read_too() -> None:
    rows = [
        {"labels": KILLED, "annotations": TEXTS, "state": "firing", "activeAt": "2026-11-20T13:30:07Z"},
        {"labels": SLOW, "state": "pending"},
    ]
    assert names(parse_prometheus(json.dumps({"data": {"alerts": rows}}))) == [("WorkerKilled", "7")]
    entry = {"labels": KILLED, "since": "2026-11-20T13:30:07Z", "description": "d"}
    (found,) = parse_receiver(json.dumps({"alerts": [entry]}))
    assert (found.alert.since, found.alert.description) == (NOW - 60, "d")


@pytest.mark.parametrize(
    "text", ["", "{}", '[{"labels": 3}]', '{"data": {"alerts": 1}}', '{"alerts": [1]}', "[" * 9999]
)
def test_another_answer_is_an_error(text: str) -> None:
    for parse in (parse_alertmanager, parse_prometheus, parse_receiver, parse_silences):
        with pytest.raises(ValueError, match=r"."):
            parse(text)


def test_a_view_has_the_silences_of_its_job_that_last() -> None:
    silences = parse_silences(SILENCES)
    until = NOW + 3600.0
    assert muted_alerts(silences, "7", NOW) == (MutedAlert(alert=None, until=until, by="ada"),)
    assert muted_alerts(silences, "7_3", NOW) == muted_alerts(silences, "7", NOW)  # a task of the array
    assert muted_alerts(silences, "8", NOW) == muted_alerts(silences, "7", until) == ()


@pytest.mark.parametrize(
    ("matcher", "place", "is_meant"),
    [
        (("cluster", "hal"), {"cluster": "hal", "user": "ada"}, True),
        (("cluster", "hal"), {"cluster": "sal", "user": "ada"}, False),
        (("cluster", "hal"), {"user": "ada"}, True),  # the cluster file does not name it
        (("user", "bob"), {"cluster": "hal", "user": "ada"}, False),
        (("team", "x"), {"cluster": "hal", "user": "ada"}, True),
    ],
)
def test_a_silence_of_another_cluster_or_user_is_not_that_of_the_job(
    matcher: tuple[str, str], place: dict[str, str], is_meant: bool
) -> None:
    (silence,) = parse_silences(SILENCES)
    other = silence._replace(matchers=(*silence.matchers, matcher))
    assert other.is_of("7", place) is is_meant
    assert bool(muted_alerts([other], "7_3", NOW, place)) is is_meant


def test_a_trial_compares_what_was_sent_before_and_after() -> None:
    page = 'alertmanager_notification_requests{}_total{{integration="{}"}} {}\n'
    before = parse_counts(page.format("", "slack", 3) + page.format("_failed", "slack", 1))
    after = parse_counts(
        page.format("", "slack", 5) + page.format("_failed", "slack", 2) + page.format("", "webhook", 2)
    )
    assert before == {"slack": Sent(3, 1)}
    found = outcomes({"chat": "slack", "hook": "webhook", "log": "log", "mail": "email"}, before, after)
    assert [(each.integration, each.delivered, each.failed, each.arrived) for each in found] == [
        *(("slack", 1, 1, True), ("webhook", 2, 0, True), ("email", 0, 0, False))
    ]


def test_heartbeats_are_not_counted_as_messages_of_a_trial() -> None:
    kinds, before = {"hook": "webhook", "log": "log"}, {"webhook": Sent(100, 0)}
    for sent, delivered in (((101, 0), 0), ((102, 0), 1), ((103, 1), 1), ((103, 0), 2)):
        (found,) = outcomes(kinds, before, {"webhook": Sent(*sent)}, heartbeats=1)
        assert (found.delivered, found.arrived) == (delivered, delivered == 2)
    names: list[list[str]] = [[], ["heartbeat"], ["heartbeat", "gpujob-heartbeat"]]
    configs = [{"receivers": [{"name": name, "webhook_configs": [{}]} for name in found]} for found in names]
    assert list(map(heartbeat_webhooks, configs)) == [0, 1, 1]
    assert [most_heartbeats(elapsed_s) for elapsed_s in (0.0, 59.0, 75.0, 130.0)] == [1, 1, 2, 3]


def gpujob(*words: str) -> Result:
    return CliRunner().invoke(commands, ["alerts", *words])


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a source of alerts."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("GPUJOB_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "no source of alerts: write `alertmanager_url` or `prometheus_url` into the cluster file"),
        (("--alertmanager", "am:9093"), "'am:9093' is not a URL; write for example http://alertmanager:9093"),
        (("--log", "x"), "--log needs --follow"),
        (("mute", "7"), "no source of alerts"),
        (("test",), "no channel in the cluster file"),
        (("test", "--to", "x"), 'unknown channel "x" (known: none)'),
    ],
)
def test_what_is_missing_is_named_with_its_fix(nowhere: Path, words: tuple[str, ...], problem: str) -> None:
    error = gpujob(*words).exception
    assert isinstance(error, LauncherError)
    assert problem in str(error)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("mute", "7", "--for", "2"), "'2' is not a time of at most 30d; write for example 30m, 2h or 1d"),
        (("mute", "7", "--for", "31d"), "'31d' is not a time of at most 30d"),
        (("mute", "7", "--alert", "a b"), "'a b' is not the name of an alert; write for example GpuJobSlow"),
        (("mute", "7", "--alert", "Slowdow"), "'Slowdow' is not the name of an alert; did you mean \"Slowdown"),
        (("mute",), "Missing argument 'JOB'"),
    ],
)
def test_a_wrong_option_of_mute_is_an_error(nowhere: Path, words: tuple[str, ...], problem: str) -> None:
    result = gpujob(*words)
    assert (result.exit_code, problem in result.output) == (2, True)


def test_without_an_answer_the_exit_status_is_9(nowhere: Path) -> None:
    result = gpujob("--alertmanager", "http://127.0.0.1:9")
    assert result.exit_code == 9
    assert "alertmanager at http://127.0.0.1:9 does not answer: " in result.output


def test_a_proxy_of_the_user_is_not_asked(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.0)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        words = [sys.executable, "-m", "launcher", "alerts", "--alertmanager", "http://127.0.0.1:9"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "Connection refused" in done.stderr) == (9, True)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_follow_stays_with_the_server_that_answered(nowhere: Path) -> None:
    answers = {"/api/v2/alerts": MANAGER, "/api/v1/alerts": '{"data": {"alerts": []}}'}

    class Servers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers.get(self.path, "")
            self.send_response(200 if text else 503)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Servers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        (nowhere / "gpujob.yaml").write_text(
            f"{{alertmanager_url: '{url}', prometheus_url: '{url}'}}", encoding="utf-8"
        )
        words = [sys.executable, "-m", "launcher", "alerts", "7", "-f", "--interval", "0.2"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        try:
            assert [" FIRING " in process.stdout.readline() for _ in range(2)] == [True, True]
            del answers["/api/v2/alerts"]
            assert process.stdout.readline().endswith("answered 503: ; the alerts are those of the last answer\n")
            answers["/api/v2/alerts"] = "[]"
            assert "alerts are read again" in process.stdout.readline()
            assert [" ENDED " in process.stdout.readline() for _ in range(2)] == [True, True]
        finally:
            process.kill()
            process.communicate()
        server.shutdown()


class Site:
    """An Alertmanager, and the commands of a user of it."""

    def __init__(self, url: str, services: Services, folder: Path) -> None:
        self.url, self.services, self.folder = url, services, folder

    def fire(self, *labels: dict[str, str]) -> None:
        now = time.time()
        times = {"startsAt": iso(now), "endsAt": iso(now + 600)}
        alerts: Any = [{"labels": each, "annotations": TEXTS, **times} for each in labels]
        ask(Source("alertmanager", self.url), "/api/v2/alerts", alerts)


@pytest.fixture
def site(tmp_path: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    tmp_path.chmod(0o700)
    services, cluster_file = Services(), tmp_path / "gpujob.yaml"
    cluster_file.write_text(services.cluster_file(tmp_path), encoding="utf-8")
    cluster_file.chmod(0o600)
    assert gpujob("config").exit_code == 0
    with running_alertmanager(tmp_path / "alerting" / "alertmanager.yml", tmp_path / "data") as url:
        text = services.cluster_file(tmp_path) + f"alertmanager_url: {url}\n"
        cluster_file.write_text(text, encoding="utf-8")
        yield Site(url, services, tmp_path)
    services.close()


real = [
    pytest.mark.prometheus,
    pytest.mark.skipif(ALERTMANAGER is None, reason="alertmanager is not installed"),
]


@pytest.mark.usefixtures("nowhere")
class TestWithAlertmanager:
    """Commands against a real Alertmanager."""

    pytestmark = real

    def test_a_muted_job_notifies_nobody_until_it_is_heard_again(self, site: Site) -> None:
        mine = {**KILLED, "user": user_name()}
        result = gpujob("mute", "7", "--for", "2h")
        assert result.output.startswith(f"Muted: all alerts of job 7 of {user_name()} until ")
        site.fire(mine, {**mine, "job_id": "7_3"}, {**mine, "job_id": "9"})
        site.services.wait(lambda each: "job 9" in each.body or '"9"' in each.body, len(CHANNELS))
        shown = json.loads(gpujob("--json").output)
        assert [(each["labels"]["job_id"], each["muted"]) for each in shown["alerts"]] == [
            *(("7", True), ("7_3", True), ("9", False))
        ]
        assert "[muted for " in gpujob("7").output
        assert not [each for each in site.services.messages if re.search("job 7(_3)? ", each.body)]

        view = _muting(10.0)(JobView(time=time.time(), job_id="7", job_name="embed", state="RUNNING"))
        assert [(each.alert, each.by) for each in view.muted] == [(None, user_name())]

        assert gpujob("unmute", "7").output == "No longer muted: all alerts of job 7\n"
        assert "muted" not in gpujob("7").output
        site.services.wait(lambda each: "job 7" in each.body, len(CHANNELS) - 2)  # two have labels only
        error = gpujob("unmute", "7").exception
        assert str(error).startswith(f"job 7 of {user_name()} is not muted; `gpujob alerts 7` shows what is")

    def test_a_user_whose_name_is_no_label_has_alerts_too(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("launcher.rundir.rundir.user_name", lambda: "CORP\\ada")
        site.fire({**KILLED, "user": "CORP_ada"})
        assert gpujob().output.startswith("critical GpuJobWorkerKilled job 7 embed (CORP_ada)")

    def test_a_job_with_the_same_id_on_another_cluster_is_not_meant(self, site: Site) -> None:
        with (site.folder / "gpujob.yaml").open("a", encoding="utf-8") as file:
            file.write("cluster: hal\n")
        site.fire(KILLED, {**KILLED, "cluster": "hal"}, {**KILLED, "cluster": "juno"})
        shown = json.loads(gpujob("7", "--json").output)["alerts"]
        assert {each["labels"].get("cluster") for each in shown} == {None, "hal"}

    def test_what_is_muted_for_another_user_stays_so(self, site: Site) -> None:
        said = gpujob("mute", "7", "--user", "somebody-else").output
        assert said.endswith("Hear them again: gpujob alerts unmute 7 --user somebody-else\n")
        assert "job 7 of" in str(gpujob("unmute", "7").exception)
        view = JobView(time=time.time(), job_id="7", job_name="embed", state="RUNNING", user=user_name())
        assert _muting(10.0)(view).muted == ()
        assert gpujob("unmute", "7", "--user", "somebody-else").output == "No longer muted: all alerts of job 7\n"

    def test_one_alert_of_a_job_can_be_muted_alone(self, site: Site) -> None:
        mine = {**KILLED, "user": user_name()}
        assert gpujob("mute", "7", "--alert", "Slowdown", "--json").exit_code == 0
        assert gpujob("mute", "7", "--alert", "WorkerKilled", "--user", "somebody-else", "--json").exit_code == 0
        site.fire(mine, {**SLOW, "user": user_name()})
        found = {each.alert.name: bool(each.silenced_by) for each in read_alerts(Source("alertmanager", site.url))}
        assert found == {"GpuJobWorkerKilled": False, "GpuJobSlowdown": True}

    def test_a_trial_says_what_arrived(self, site: Site) -> None:
        result = gpujob("test", "--json")
        services = {each["integration"]: each for each in json.loads(result.output)["services"]}
        assert result.exit_code == 0
        assert services["webhook"]["channels"] == ["hook", "log"]
        assert all(each["arrived"] for each in services.values())
        assert {each.channel for each in site.services.messages} == set(CHANNELS)
        (hook,) = (json.loads(each.body) for each in site.services.messages if each.channel == "hook")
        assert hook["alerts"][0]["generatorURL"].endswith("/get-alerts.md")  # it has no board to link to

        site.services.refuses = {"slack"}
        result = gpujob("test", "--to", "slack")
        assert result.exit_code == 1
        assert result.output.startswith("slack      FAILED: 0 of 1 (slack); ")

    def test_a_message_that_may_be_a_heartbeat_is_not_taken_for_that_of_a_trial(self, site: Site) -> None:
        site.fire({"alertname": "GpuJobWatchdog", "severity": "none"})
        site.services.wait(lambda each: each.channel == "log", 1)
        result = gpujob("test", "--to", "hook", "--wait", "5")
        assert (result.exit_code, result.output) == (1, "webhook    nothing sent yet: 0 of 1 (hook)\n")
        assert [each.channel for each in site.services.messages] == ["log", "hook"]

    def test_follow_prints_and_logs_what_begins_and_ends_until_ctrl_c(self, site: Site) -> None:
        site.fire({**KILLED, "user": user_name()})
        words = ["alerts", "-f", "--log", "alerts.log", "--interval", "0.2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert " FIRING critical GpuJobWorkerKilled job 7 embed" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
        assert (process.returncode, said) == (130, "")
        assert "FIRING" in (site.folder / "alerts.log").read_text(encoding="utf-8")
        assert (
            json.loads((site.folder / "alerts.log.jsonl").read_text(encoding="utf-8"))["alert"] == "GpuJobWorkerKilled"
        )
