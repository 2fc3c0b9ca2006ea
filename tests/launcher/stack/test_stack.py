"""`gpujob stack` with the real Prometheus and Alertmanager, as a user without rights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from exporter.contract.python_flags import ISOLATED
from launcher.alerts.api import Source, ask
from launcher.errors import LauncherError
from launcher.registry.own_stack import StackRecord
from launcher.stack.status import query_values
from launcher.stack.up import locked_folder
from tests.launcher.stack import grafana
from tests.realstack.stack import prometheus_unavailable
from tests.realstack.waiting import wait_for
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(prometheus_unavailable() is not None, reason=str(prometheus_unavailable())),
]

NOBODY = 65534
CHECKOUT = Path(__file__).resolve().parents[3]
FAILING = """
import os, time
for i in range(30):
    print(f"Processed {i}/250 items", flush=True)
    time.sleep(0.1)
os.kill(os.getpid(), 9)
"""


class User(NamedTuple):
    """A user with a home and a stack."""

    home: Path
    variables: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.home / ".local/share/gpujob/stack"

    @property
    def record(self) -> StackRecord:
        record = StackRecord.read(self.folder / "stack.json")
        assert record is not None
        return record

    def popen(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        rights: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.Popen(
            [sys.executable, *ISOLATED, "-m", "launcher", *words],
            cwd=self.home,
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **rights,
        )

    def run(self, *words: str, code: int | None = 0, **variables: str) -> str:
        with self.popen(*words, **variables) as process:
            said, complaint = process.communicate(timeout=120)
        assert code is None or process.returncode == code, said + complaint
        return said + complaint

    def write_cluster_file(self, body: object) -> None:
        (self.home / "gpujob.yaml").write_text(json.dumps(body))
        if os.geteuid() == 0:
            os.chown(self.home / "gpujob.yaml", NOBODY, NOBODY)


@pytest.fixture
def user() -> Iterator[User]:
    """One without a cluster file, whose stack is taken down at the end."""
    home = Path(tempfile.mkdtemp(prefix="gpujob-stack-"))
    if os.geteuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    found = User(home, {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"})
    yield found
    found.run("stack", "down", code=None)
    shutil.rmtree(home)


def status_of(url: str) -> tuple[int, str]:
    """Status and text of an answer, redirects not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    try:
        with urllib.request.build_opener(Stay, urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers) + error.read().decode("utf-8", "replace")


def command_lines(folder: Path) -> dict[int, str]:
    """Command lines and working directories of living processes of a folder."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if words and os.path.realpath(place / "cwd") == str(folder):
                found[int(place.name)] = words
        except OSError:
            continue
    return found


def test_only_the_secret_address_answers_and_nobody_can_see_it(user: User) -> None:
    user.run("stack", "up")
    record = user.record
    assert status_of(f"{record.url}user/dashboards.js")[0] == 200
    assert "<title>" in status_of(f"{record.url}user/?board=gpujob-job")[1]
    assert status_of(f"{record.url}api/v1/rules")[0] == 200
    assert status_of(f"{record.url}alertmanager/api/v2/status")[0] == 200
    for name, port in record.ports.items():
        for path in ("", "user/", f"{record.token[:-1]}x/", "..%2f", "metrics" if name != "receiver" else "gpujob"):
            status, text = status_of(f"http://127.0.0.1:{port}/{path}")
            open_pages = name == "receiver" and path == ""
            assert status in ((200,) if open_pages else (401, 404, 405)), (name, path)
            assert record.token not in text
    lines = command_lines(user.folder)
    assert len(lines) == 4
    assert not [line for line in lines.values() if record.token in line or record.password in line]
    secret = [
        path for path in user.folder.rglob("*") if path.is_file() and record.token in path.read_text("utf-8", "replace")
    ]
    assert {path.name for path in secret} >= {"stack.json", "gate.json", "prometheus.args"}
    assert user.folder.stat().st_mode & 0o777 == 0o700
    assert not [path for path in secret if path.parent == user.folder and path.stat().st_mode & 0o077]


def test_up_is_idempotent_restarts_what_crashed_and_down_leaves_nothing(user: User) -> None:
    first = json.loads(user.run("stack", "up", "--json"))
    before = dict(user.record.programs)
    assert json.loads(user.run("stack", "up", "--json")) == first
    assert user.record.programs == before
    os.kill(before["alertmanager"].pid, signal.SIGKILL)
    wait_for(lambda: before["alertmanager"].pid not in command_lines(user.folder), 10, "the end of Alertmanager")
    said = json.loads(user.run("stack", "status", "--json", code=1))
    assert said["programs"]["alertmanager"] == "down"
    assert not said["sound"]
    assert json.loads(user.run("stack", "up", "--json")) == first
    after = user.record.programs
    assert {name for name in after if after[name] != before[name]} == {"alertmanager"}
    user.run("stack", "status")
    user.run("stack", "down")
    assert command_lines(user.folder) == {}
    assert "down" in user.run("stack", "status", code=1)
    assert json.loads(user.run("stack", "up", "--json"))["url"] == first["url"]


def test_a_killed_worker_reaches_the_log_of_alerts(user: User) -> None:
    said = user.run(
        "run", "--stack", "--quiet", "--workers", "2", "--total", "500", "--", sys.executable, "-c", FAILING, code=1
    )
    assert "board http://127.0.0.1:" in said
    assert "?board=gpujob-job&var-job_id=local-" in said
    log = user.folder / "alerts.log"
    wait_for(lambda: "GpuJobWorkerKilled" in log.read_text(), 90, "the alert", logs=user.folder)
    assert "GpuJobWorkerKilled" in user.run("alerts", "--all-users")
    alerts = json.loads(user.run("alerts", "--json"))["alerts"]
    (job_id,) = {each["labels"]["job_id"] for each in alerts}
    (board,) = {each["dashboard_url"] for each in alerts}
    assert board.startswith(f"{user.record.url}user/?board=gpujob-job&var-cluster=")
    assert board.endswith(f"&var-job_id={job_id}")
    user.run("alerts", "mute", job_id)
    assert json.loads(user.run("watch", job_id, "--once", "--json", code=1))["muted"]
    status = json.loads(user.run("stack", "status", "--json"))
    assert (status["sound"], status["is_silent"]) == (True, False)
    assert status["firing"] >= 1
    # a minute later, if Prometheus evaluated the rule before it knew of Alertmanager
    wait_for(lambda: json.loads(user.run("stack", "status", "--json"))["heartbeat"], 90, "the heartbeat", interval=2)


def test_the_heartbeat_of_the_site_is_left_to_its_own_alertmanager(user: User) -> None:
    url = user.home / "url"
    url.write_text("https://hooks.example.org/heartbeat\n")
    url.chmod(0o000)
    user.write_cluster_file({"notify": {"heartbeat": {"url_file": str(url)}}})
    assert "alerts   " in user.run("stack", "up")
    receivers = yaml.safe_load((user.folder / "alertmanager.yml").read_text())["receivers"]
    (beat,) = next(each for each in receivers if each["name"] == "gpujob-heartbeat")["webhook_configs"]
    assert beat["url"] == f"http://127.0.0.1:{user.record.ports['receiver']}/gpujob"


def test_the_log_has_also_what_a_job_sends_elsewhere(user: User) -> None:
    (user.home / "url").write_text("http://127.0.0.1:9/chat\n")
    (user.home / "url").chmod(0o600)
    if os.geteuid() == 0:
        os.chown(user.home / "url", NOBODY, NOBODY)
    user.write_cluster_file({"notify": {"channels": {"chat": {"slack": {"url_file": str(user.home / "url")}}}}})
    user.run("stack", "up")
    labels = {"alertname": "GpuJobWorkerKilled", "severity": "critical", "user": "ada"}
    jobs = [f"of-{to}" for to in ("none", "chat", "page")]
    alerts: Any = [{"labels": {**labels, "job_id": job, "notify": job.removeprefix("of-")}} for job in jobs]
    ask(Source("alertmanager", f"{user.record.url}alertmanager"), "/api/v2/alerts", alerts)
    log = user.folder / "alerts.log"
    wait_for(lambda: all(f" job {job} " in log.read_text() for job in jobs), 60, "the alerts", logs=user.folder)
    assert log.read_text().count("GpuJobWorkerKilled") == 3


def test_no_mail_goes_through_a_server_whose_password_is_closed(user: User) -> None:
    password = user.home / "password"
    password.write_text("secret\n")
    password.chmod(0o000)
    server = {"smarthost": "smtp.example.org:587", "from": "a@example.org", "password_file": str(password)}
    channels = {"admins": {"email": {"to": "admins@example.org"}}}
    user.write_cluster_file({"notify": {"smtp": server, "owner_domain": "example.org", "channels": channels}})
    said = user.run("stack", "up")
    for key in ("channels.admins", "owner_domain"):
        assert f"notify.{key}: you cannot read its secret, so your stack does not use it" in said
    assert "example.org" not in (user.folder / "alertmanager.yml").read_text()


def test_a_program_that_hangs_makes_the_status_unsound(user: User) -> None:
    user.run("stack", "up")
    receiver = user.record.programs["receiver"]
    os.kill(receiver.pid, signal.SIGSTOP)  # it answers nothing
    try:
        said = json.loads(user.run("stack", "status", "--json", code=1))
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    assert said["programs"]["receiver"] == "does not answer"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Callable[[str], list[str]]]:
    """Another Prometheus, which takes samples: its answers to queries, and its address as text of the query ``url``."""
    (tmp_path / "remote.yml").write_text("global: {}\n")
    port = free_port()
    process = subprocess.Popen(
        [
            *("prometheus", f"--config.file={tmp_path}/remote.yml", f"--storage.tsdb.path={tmp_path}/data"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(query: str) -> list[str]:
        if query == "url":
            return [f"http://127.0.0.1:{port}/api/v1/write"]
        status, text = status_of(f"http://127.0.0.1:{port}/api/v1/query?query={query}")
        return [row["metric"]["job"] for row in json.loads(text)["data"]["result"]] if status == 200 else []

    wait_for(lambda: status_of(f"http://127.0.0.1:{port}/-/ready")[0] == 200, 30, "Prometheus", retry=(OSError,))
    yield ask
    process.terminate()
    process.wait(20)


@pytest.mark.parametrize("agent", [False, True])
def test_samples_go_to_a_remote_server(user: User, remote: Callable[[str], list[str]], agent: bool) -> None:
    user.write_cluster_file({"stack": {"remote_write": remote("url")[0]}})
    user.run("stack", "up", *(["--agent"] if agent else []))
    assert set(user.record.programs) == (
        {"gate", "prometheus"} if agent else {"gate", "prometheus", "alertmanager", "receiver"}
    )
    wait_for(lambda: "prometheus" in remote("up==1"), 60, "samples on the other server", logs=user.folder)
    if not agent:
        assert query_values(user.record, "up==1") is not None


def test_a_grafana_that_is_there_shows_the_boards_behind_the_same_address(user: User) -> None:
    home = user.home / "grafana"
    grafana.install(home)
    path = f"{home / 'bin'}:{user.variables['PATH']}"
    said = user.run("stack", "up", PATH=path)
    record = user.record
    address = f"{record.url}grafana/"
    assert f"grafana 11.2.0 ({home}/bin/grafana)" in said
    assert f"grafana  {address}" in said
    boards = json.loads(status_of(f"{address}api/search")[1])
    assert set(boards) == {"gpujob-fleet", "gpujob-job", "gpujob-node", "gpujob-self"}
    assert status_of(f"{address}api/datasources/uid/gpujob-prometheus/health") == (200, '"7"')
    direct = f"http://127.0.0.1:{record.ports['grafana']}/{record.token}/grafana/api/search"
    assert status_of(direct)[0] == 401
    assert not [line for line in command_lines(user.folder).values() if record.token in line or record.password in line]
    user.run("stack", "status", PATH=path)
    user.write_cluster_file({"stack": {"grafana": False}})
    user.run("stack", "up", PATH=path)
    assert "grafana" not in user.record.programs
    assert len(command_lines(user.folder)) == 4


def test_a_grafana_that_ends_at_its_start_does_not_keep_the_stack_from_it(user: User) -> None:
    home = user.home / "grafana"
    grafana.install(home)
    (home / "bin" / "grafana").write_text("#!/bin/sh\n[ $1 = --version ] && echo grafana version 11.2.0 || exit 1\n")
    said = user.run("stack", "up", PATH=f"{home / 'bin'}:{user.variables['PATH']}")
    assert "grafana has ended" in said
    assert "grafana" not in user.record.programs
    user.run("stack", "status")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_inside_a_job_it_ends_with_the_job_and_keeps_the_data(user: User, number: signal.Signals) -> None:
    assert "SLURM_JOB_ID" in user.run("stack", "up", "--in-job", code=2)
    with user.popen("stack", "up", "--in-job", SLURM_JOB_ID="7") as process:
        wait_for(lambda: (user.folder / "stack.json").exists() and process.stdout is not None, 30, "the stack")
        assert process.stdout is not None
        assert "prometheus 2." in process.stdout.readline()
        assert "-J LOGIN-NODE" in process.stdout.readline() + process.stdout.readline()
        process.send_signal(number)
        process.wait(30)
    wait_for(lambda: not command_lines(user.folder), 20, "the end of all programs")
    assert (user.folder / "data").is_dir()


def test_a_job_that_began_before_the_stack_is_scraped(user: User) -> None:
    job = user.popen("run", "--quiet", "--workers", "1", "--", sys.executable, "-c", "import time; time.sleep(600)")
    try:
        wait_for(lambda: list((user.home / "logs").glob("*/targets.json")), 60, "the targets")
        user.run("stack", "up")
        query = 'up{job="gpujob-sidecar"}==1'
        wait_for(lambda: query_values(user.record, query), 60, "the scrape", logs=user.folder)
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of two users")
def test_a_target_file_of_another_user_is_of_their_jobs(user: User) -> None:
    site = user.home / "site"
    site.mkdir()
    site.chmod(0o1777)
    for owner, port in ((0, 19998), (NOBODY, 19999)):
        target = {"targets": [f"127.0.0.1:{port}"], "labels": {"job": "gpujob-sidecar", "user": "nobody"}}
        (site / f"gpujob-{port}.json").write_text(json.dumps([target]))
        os.chown(site / f"gpujob-{port}.json", owner, owner)
    user.write_cluster_file({"target_dir": str(site)})
    user.run("stack", "up")
    for name, port in (("root", 19998), ("nobody", 19999)):
        query = f'up{{user="{name}",instance="127.0.0.1:{port}"}}'
        wait_for(partial(query_values, user.record, query), 40, "the scrape", logs=user.folder)
    assert len(query_values(user.record, 'up{job="gpujob-sidecar"}') or []) == 2
    assert "targets" in user.run("stack", "status")
    site.chmod(0o755)
    os.chown(site, NOBODY, NOBODY)
    user.run("stack", "up")
    assert "targets" not in user.record.programs, "files that only the user can write are read as they are"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_no_folder_of_a_stack(tmp_path: Path) -> None:
    """In a shared folder it would lead our files to where that user wants them."""
    private, link = tmp_path / "private", tmp_path / "stack"
    private.mkdir(0o700)
    link.symlink_to(private)
    with locked_folder(link):
        pass
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(LauncherError, match="belongs to another user"), locked_folder(link):
        pass
