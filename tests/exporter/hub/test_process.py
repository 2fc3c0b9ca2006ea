"""`gpujob-exporter hub` itself, with fake Slurm commands."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.contract.status import GpuDevice, NodeGpus
from exporter.hub.page.series import FAMILIES
from tests.support.exporter import SOON_S, until
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import ROOT
from tests.support.statuses import node_status

SUBMITTED = time.time() + 86400  # after the start of any hub of these tests, also in a run that takes hours


def line(job_id: str, state: str, end: str = "N/A", user: str = "root") -> str:
    start = "N/A" if state == "PENDING" else f"{SUBMITTED + 10:.0f}"
    nodes = "" if state == "PENDING" else "n1"
    return (
        f"{job_id}|{state}|None|{SUBMITTED:.0f}|{start}|{end}|5:00|0|{nodes}|gpu|cpu=4,mem=600M,node=1,gres/gpu=4|"
        f"{job_id}|{user}|lab|normal|1|(null)|/dev/null|a job|\n"
    )


RUNNING = line("7", "RUNNING")
COMPLETED = line("7", "COMPLETED", f"{SUBMITTED + 20:.0f}")


class HubProcess:
    """A hub, and requests to it."""

    def __init__(self, slurm: FakeSlurm, *options: str, runtime: Path | None = None) -> None:
        self.slurm = slurm
        folder = slurm.folder / "state" / "gpujob" / "hub" if runtime is None else runtime / "gpujob"
        self.socket = folder / ("hub-cluster.sock" if "cluster" in options else "hub.sock")
        argv = [sys.executable, "-m", "exporter", "hub", "--interval", "1", *options]
        environment = {**slurm.environment(XDG_RUNTIME_DIR=str(runtime or "")), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)

    def ready(self) -> "HubProcess":
        until(lambda: self.process.poll() is not None or (self.socket.exists() and self._is_ready()), "the hub")
        return self

    def _is_ready(self) -> bool:
        try:
            return self.get("/-/ready")[0] == 200
        except OSError:
            return False

    def get(self, path: str, headers: Mapping[str, str] = {}) -> tuple[int, str]:
        head, body = self.whole(path, headers)
        return int(head.split()[1]), body

    def whole(self, path: str, headers: Mapping[str, str] = {}) -> tuple[str, str]:
        """Head and body of an answer."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(SOON_S * 2)
            client.connect(str(self.socket))
            rest = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n{rest}\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return head.decode(), body.decode()

    def json(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def end(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=SOON_S)[1]


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    fake.say("squeue", "out", RUNNING)
    fake.say("scontrol", "config", "ClusterName = c1\nPrivateData = none\n")
    return fake


@pytest.fixture
def hub(slurm: FakeSlurm) -> Iterator[HubProcess]:
    process = HubProcess(slurm).ready()
    yield process
    if process.process.poll() is None:
        process.end(signal.SIGKILL)


def of_change(change: Mapping[str, Any]) -> tuple[Any, ...]:
    return change["number"], change["job_id"], change["previous"], change["state"], change["time"]


def test_a_change_reaches_who_waits_for_it_and_is_told_once_over_a_kill(slurm: FakeSlurm, hub: HubProcess) -> None:
    first = hub.json("/api/v1/changes?after=0")
    assert list(map(of_change, first["changes"])) == [(1, "7", "PENDING", "RUNNING", round(SUBMITTED) + 10)]
    (job,) = hub.json("/api/v1/jobs")["jobs"]
    assert (job["state"], job["gpus"], job["ended"], job["figures"]) == ("RUNNING", 4, None, None)
    hub.end(signal.SIGKILL)
    slurm.say("squeue", "out", COMPLETED)
    again = HubProcess(slurm).ready()
    answer = again.json(f"/api/v1/changes?after={first['last']}")
    assert list(map(of_change, answer["changes"])) == [(2, "7", "RUNNING", "COMPLETED", round(SUBMITTED) + 20)]
    slurm.say("squeue", "out", COMPLETED + line("8", "PENDING"))
    until(lambda: again.json("/api/v1/jobs?state=pending")["jobs"], "the new job")
    slurm.say("squeue", "out", COMPLETED + line("8", "RUNNING"))
    waited = again.json("/api/v1/changes?after=2")  # answers when it happens
    assert [(each["job_id"], each["state"]) for each in waited["changes"]] == [("8", "RUNNING")]
    assert len(again.json("/api/v1/changes?after=0")["changes"]) == 3
    log = again.end()
    assert again.process.returncode == 0, log
    assert not again.socket.exists()


def test_a_second_hub_names_the_first_one(slurm: FakeSlurm, hub: HubProcess) -> None:
    second = HubProcess(slurm)
    problem = second.process.communicate(timeout=SOON_S)[1]
    assert second.process.returncode == 2
    assert f"already has a hub of the scope 'user': process {hub.process.pid} on " in problem
    assert hub.json("/api/v1/jobs")["jobs"]


def test_a_second_hub_with_another_folder_leaves_the_socket_to_the_first(slurm: FakeSlurm, runtime: Path) -> None:
    first = HubProcess(slurm, runtime=runtime).ready()
    second = HubProcess(slurm, "--state-dir", str(slurm.folder / "other"), runtime=runtime)
    problem = second.process.communicate(timeout=SOON_S)[1]
    assert second.process.returncode == 2
    assert f"another hub listens on {first.socket}: process {first.process.pid} on " in problem
    assert first.json("/api/v1/jobs")["jobs"]
    first.end(signal.SIGKILL)
    HubProcess(slurm, runtime=runtime).ready().end()


def test_a_hub_that_outlives_the_login_is_found_after_the_next_one(slurm: FakeSlurm, runtime: Path) -> None:
    hub = HubProcess(slurm, runtime=runtime).ready()
    shutil.rmtree(runtime)  # as systemd does with the last session of a user
    runtime.mkdir()
    assert hub.ready().json("/api/v1/jobs")["jobs"]
    second = HubProcess(slurm, "--state-dir", str(slurm.folder / "other"), runtime=runtime)
    assert f"another hub listens on {hub.socket}: " in second.process.communicate(timeout=SOON_S)[1]
    hub.end()
    assert not hub.socket.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prices: 3", "prices: 3 has no price for each type of GPU; write as in prices: {currency: EUR"),
        ("prices: {gpu_hour: {h100: -1}}", "has no price for each type of GPU"),
        ("prices: {", "not YAML"),
        ("cluster: [hal]", "cluster: ['hal'] is not a name; write it as in cluster: hal"),
        ("target_dir: 3", "target_dir: 3 is not a directory; write it as in target_dir: /srv/prometheus/gpujob"),
        (
            "budgets: {ada: 3}",
            "budgets.ada: expected an object, not 3; write as in budgets: {",
        ),
        ("budgets: {ada: {gpu_hours: -2}}", "budgets.ada: it has no limit above 0 in gpu_hours or cost"),
        ("budgets: {ada: {hours: 2}}", "budgets.ada: it has no limit above 0 in gpu_hours or cost"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_cluster_file_stops_the_hub_at_its_start(
    slurm: FakeSlurm, tmp_path: Path, text: str | None, problem: str
) -> None:
    path = tmp_path / "site.yaml"
    if text is not None:
        path.write_text(text)
    hub = HubProcess(slurm, "--cluster-file", str(path))
    log = hub.process.communicate(timeout=SOON_S)[1]
    assert (hub.process.returncode, f"{path}: " in log, problem in log) == (2, True, True), log


def test_promtool_accepts_the_page(hub: HubProcess) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    status, page = hub.get("/metrics")
    assert status == 200
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr, checked.stdout) == (0, "", "")
    names = {name.partition("{")[0] for name in page.splitlines() if not name.startswith("#")}
    assert names <= {family.full_name for family in FAMILIES}
    labels = 'cluster="c1",job_id="7",job_name="a_job",user="root",partition="gpu",notify="",state="RUNNING"'
    assert f"gpujob_job_state{{{labels}}} 1" in page


def test_slurm_that_does_not_answer_leaves_the_last_states(slurm: FakeSlurm, hub: HubProcess) -> None:
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller")
    slurm.say("squeue", "status", 1)
    answer = until(lambda: (body := hub.json("/api/v1/jobs"))["problems"] and body, "the problem")
    assert answer["problems"][0].startswith("squeue exited with 1: slurm_load_jobs error")
    assert [job["state"] for job in answer["jobs"]] == ["RUNNING"]
    assert answer["as_of"] < answer["time"]
    log = hub.end()
    assert log.count("slurm_load_jobs error") == 1


@pytest.mark.parametrize(
    ("path", "status", "problem"),
    [
        ("/api/v1/jobs?limit=0", 400, "limit: 0 is not from 1 to 10000"),
        ("/api/v1/jobs?since=yesterday", 400, "neither seconds since 1970 nor an age such as 90m, 12h or 7d"),
        ("/api/v1/jobs?name=x", 400, "name: unknown; known are user, state, since and limit"),
        ("/api/v1/changes?after=-1", 400, "after: '-1' is not a whole number"),
        ("/api/v1/usage?by=state", 400, "by: 'state' is unknown; known are user, account, partition and name"),
        ("/api/v1/usage?state=FAILED", 400, "state: unknown; known are by, since and user"),
        ("/api/v1/jobs/99", 404, "no job '99' is known"),
        ("/targets?kind=all", 400, "kind: 'all' is neither sidecar nor engine"),
        ("/api/v1/nothing", 404, ""),
    ],
)
def test_a_wrong_question_has_an_answer_that_helps(hub: HubProcess, path: str, status: int, problem: str) -> None:
    found = hub.get(path)
    assert found[0] == status
    assert problem in found[1]


def test_runs_nodes_and_usage_are_answered_and_not_sent_twice(slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("cluster: hal\nprices: {currency: EUR, gpu_hour: {default: 3600}}")
    ended = COMPLETED.replace("7|", "6|", 1).replace("|7|", "|6|")
    tasks = line("8_1", "FAILED", f"{SUBMITTED + 20:.0f}") + line("8_[2-3]", "PENDING")
    slurm.say("squeue", "out", RUNNING + ended + tasks)
    slurm.say("sinfo", "out", "n1|mixed|gpu*|gpu:h100:8|gpu:h100:6|4/0/0/4|1000|none|\noops\n")
    hub = HubProcess(slurm, "--interval", "3600", "--cluster-file", str(tmp_path / "site.yaml")).ready()
    runs = {run["job_id"]: run for run in hub.json("/api/v1/runs")["runs"]}
    assert runs.keys() == {"6", "7", "8"}
    assert (runs["8"]["status"], runs["8"]["states"]) == ("PENDING", {"FAILED": 1, "PENDING": 2})
    assert runs["6"]["cost"] == {"amount": 40.0, "currency": "EUR", "source": "list price"}
    (node,) = until(lambda: hub.json("/api/v1/fleet").get("instances"), "the nodes")
    assert (node["instance"], node["gpus"], node["gpus_used"]) == ("n1", [{"name": "h100", "count": 8}], 6)
    assert node["price_per_hour"]["amount"] == 8 * 3600
    assert len(slurm.calls("sinfo")) == 1  # the nodes are new enough for everybody
    (group,) = hub.json("/api/v1/usage?since=0&by=partition")["groups"]
    assert (group["partition"], group["jobs"], group["gpu_seconds"]) == ("gpu", 3, 2 * 4 * 10)
    page = hub.get("/metrics")[1]
    assert 'gpujob_hub_unparsed_lines_total{cluster="hal",command="sinfo"} 1\n' in page
    assert 'cluster="c1"' not in page  # sidecars too have the label of the site, and Slurm's name is another
    assert hub.json("/api/v1/jobs")["scope"]["cluster"] == "c1"
    for path in ("/api/v1/jobs", "/api/v1/runs", "/api/v1/fleet", "/api/v1/usage?since=0"):
        head, _ = hub.whole(path)
        tag = head.lower().partition("etag: ")[2].partition("\r")[0]
        assert hub.get(path, {"If-None-Match": f'"old", {tag}'}) == (304, "")
        assert hub.get(path + ("&" if "?" in path else "?") + "user=root", {"If-None-Match": tag})[0] != 304
    assert f"cluster file: {tmp_path}/site.yaml" in hub.end()


def test_a_hub_only_reads_slurm_and_writes_into_its_own_folder(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir, state = tmp_path / "run", slurm.folder / "state" / "gpujob"
    run_dir.mkdir()
    for folder in (state / "hub", state / "runs"):
        folder.mkdir(0o700, parents=True)
    entry = {"schema": 1, "job_id": "7", "job_name": "a job", "run_dir": str(run_dir), "submitted": SUBMITTED}
    run_files.write_json(state / "runs" / "7.json", entry)

    def others() -> dict[Path, int]:
        """Times of all files but those of the hub and of the fake commands."""
        found = [run_dir, *run_dir.iterdir(), state, *state.iterdir(), *(state / "runs").iterdir()]
        return {path: path.stat().st_mtime_ns for path in found if path != state / "hub"}

    before = others()
    hub = HubProcess(slurm).ready()
    slurm.say("squeue", "out", COMPLETED)
    until(lambda: hub.json("/api/v1/jobs")["jobs"][0]["is_over"], "the end")
    assert hub.json("/api/v1/jobs")["jobs"][0]["run_dir"] == str(run_dir)
    for path in ("/metrics", "/api/v1/usage", "/api/v1/fleet", "/api/v1/index", "/targets"):
        hub.get(path)
    hub.end()
    assert others() == before
    assert [call["argv"] for call in slurm.calls("scontrol")] == [["show", "config"]]
    assert {call["command"] for call in slurm.calls()} <= {"squeue", "sacct", "sinfo", "sdiag", "scontrol"}


def test_idle_gpu_time_of_a_running_job_is_that_of_its_sidecars(slurm: FakeSlurm, hub: HubProcess) -> None:
    run_dir, entries = slurm.folder / "run", slurm.folder / "state" / "gpujob" / "runs"
    devices = tuple(GpuDevice(gpu=str(index), uuid=str(index), seen_s=90.0, idle_s=20.0) for index in range(2))
    for attempt, node in enumerate(("n1", "n2")):  # only the first attempt is the present one
        status = node_status(attempt=attempt, gpus=NodeGpus(gpus=devices))
        (run_dir / run_files.STATUS_DIR).mkdir(parents=True, exist_ok=True)
        run_files.write_json(run_dir / run_files.STATUS_DIR / f"{node}.json", status.to_json())
    entries.mkdir(parents=True)
    entry = {"schema": 1, "job_id": "7", "job_name": "a job", "run_dir": str(run_dir), "submitted": SUBMITTED}
    run_files.write_json(entries / "7.json", entry)
    for path, rows in (("/api/v1/jobs/7", "jobs"), ("/api/v1/usage?since=0", "groups")):

        def idle_s(path: str = path, rows: str = rows) -> float | None:
            (row,) = hub.json(path)[rows]
            found: float | None = row["gpu_idle_seconds"]
            return found

        assert until(idle_s, "the run and its status files") == 40.0


def test_the_index_of_a_running_hub_is_told_by_the_hub(slurm: FakeSlurm, hub: HubProcess) -> None:
    environment = {**slurm.environment(XDG_RUNTIME_DIR=""), "PYTHONPATH": str(ROOT)}
    ask = [sys.executable, "-m", "launcher", "index"]
    shown = subprocess.run([*ask, "--json"], env=environment, capture_output=True, text=True, timeout=SOON_S)
    body = json.loads(shown.stdout)
    assert (body["index"]["jobs"], body["index"]["changes"]) == (1, 1)
    assert body["index"]["hub"].startswith(f"process {hub.process.pid} on ")
    refused = subprocess.run([*ask, "--rebuild"], env=environment, capture_output=True, text=True, timeout=SOON_S)
    assert refused.returncode == 2
    assert f"a hub has the index: process {hub.process.pid} on " in refused.stderr


def test_targets_are_those_of_the_runs_word_for_word(slurm: FakeSlurm, tmp_path: Path) -> None:
    groups = [
        {"targets": ["n1:9410"], "labels": {"job": "gpujob-sidecar", "job_id": "7", "user": "ada"}},
        {"targets": ["n1:8000"], "labels": {"job": "gpujob-engine", "job_id": "7", "__metrics_path__": "/prom"}},
    ]
    run_dir, entries = tmp_path / "run", slurm.folder / "state" / "gpujob" / "runs"
    run_dir.mkdir()
    entries.mkdir(parents=True)
    run_files.write_json(run_dir / run_files.TARGETS_FILE, groups)
    entry = {"schema": 1, "job_id": "7", "job_name": "a job", "run_dir": str(run_dir), "submitted": SUBMITTED}
    run_files.write_json(entries / "7-12345678.json", entry)
    (entries / "8-12345678.json").write_text("damaged")
    hub = HubProcess(slurm).ready()
    assert until(lambda: hub.json("/targets"), "the targets") == groups[:1]
    assert hub.json("/targets?kind=engine") == groups[1:]
    until(lambda: "gpujob_job_monitored{" in hub.get("/metrics")[1], "the run of the job")
    assert 'launched_by="gpujob"' in hub.get("/metrics")[1]
    hub.end()


def ask_as_nobody(path: Path, question: str) -> tuple[int, str]:
    """Status and body of an answer to another user; 0 without one."""
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    ask = ["curl", "-s", "-w", "\n%{http_code}", "--unix-socket", str(path), f"http://hub{question}"]
    done = subprocess.run([*user, *ask], capture_output=True, text=True, timeout=SOON_S)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder that all users may enter."""
    with tempfile.TemporaryDirectory(prefix="hub-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")


@needs_root
def test_a_users_hub_answers_nobody_else(slurm: FakeSlurm, runtime: Path) -> None:
    hub = HubProcess(slurm, runtime=runtime).ready()
    assert (hub.socket.parent.stat().st_mode & 0o777, hub.socket.stat().st_mode & 0o777) == (0o700, 0o600)
    hub.socket.parent.chmod(0o755)
    hub.socket.chmod(0o666)  # by mistake
    assert ask_as_nobody(hub.socket, "/api/v1/jobs") == (0, "")
    hub.end()


@needs_root
@pytest.mark.parametrize("private", ["none", "accounts,jobs"])
def test_users_of_a_cluster_see_what_squeue_would_show(slurm: FakeSlurm, runtime: Path, private: str) -> None:
    slurm.say("scontrol", "config", f"ClusterName = c1\nPrivateData = {private}\n")
    slurm.say("squeue", "out", RUNNING + line("8", "RUNNING", user="nobody"))
    entries = slurm.folder / "state" / "gpujob" / "runs"
    entries.mkdir(parents=True)
    entry = {"schema": 1, "job_id": "7", "job_name": "a job", "run_dir": str(slurm.folder), "submitted": SUBMITTED}
    run_files.write_json(entries / "7.json", entry)
    (slurm.folder / run_files.TARGETS_FILE).write_text("damaged")
    hub = HubProcess(slurm, "--scope", "cluster", runtime=runtime).ready()
    (problem,) = until(lambda: hub.json("/api/v1/jobs")["problems"], "the damaged file")
    assert str(slurm.folder) in problem
    until(lambda: ask_as_nobody(hub.socket, "/api/v1/jobs")[0] != 503, "the name of the user")
    _, body = ask_as_nobody(hub.socket, "/api/v1/jobs")
    changes = ask_as_nobody(hub.socket, "/api/v1/changes?after=0")[1]
    found = ["7", "8"] if private == "none" else ["8"]
    assert json.loads(body)["problems"] == ([problem] if private == "none" else [])
    assert sorted(job["job_id"] for job in json.loads(body)["jobs"]) == found
    assert sorted(change["job_id"] for change in json.loads(changes)["changes"]) == found
    questions = ("/metrics", "/targets", "/api/v1/jobs/7", "/api/v1/jobs?user=root")
    statuses = [ask_as_nobody(hub.socket, question)[0] for question in questions]
    assert statuses == ([200, 200, 200, 200] if private == "none" else [403, 403, 404, 403])
    (queue,) = {tuple(call["argv"][:5]) for call in slurm.calls("squeue")}
    assert queue == ("--local", "-h", "-a", "-t", "all")
    assert sorted(job["job_id"] for job in hub.json("/api/v1/jobs")["jobs"]) == ["7", "8"]  # of root
    hub.end()


def test_over_tcp_a_client_needs_the_token(slurm: FakeSlurm) -> None:
    hub = HubProcess(slurm, "--web.listen-address", "127.0.0.1:0").ready()
    assert hub.process.stderr is not None
    address = next(line for line in hub.process.stderr if "listening on" in line).rpartition(" ")[2].strip()
    token = run_files.read_token(hub.socket.parent)
    ask = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}"]
    for path, code in (("/api/v1/jobs/7", "401"), ("/metrics", "401"), ("/-/healthy", "200")):
        found = subprocess.run([*ask, f"http://{address}{path}"], capture_output=True, text=True, timeout=SOON_S)
        assert (path, found.stdout) == (path, code)
    told = [*ask, "-H", f"Authorization: Bearer {token}", f"http://{address}/api/v1/jobs/7"]
    assert subprocess.run(told, capture_output=True, text=True, timeout=SOON_S).stdout == "200"
    hub.end()


def test_a_user_without_a_name_is_referred_to_the_scope_of_the_cluster() -> None:
    program = "import os; os.geteuid = lambda: 61234; from exporter.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "hub"], capture_output=True, text=True, check=False, timeout=SOON_S, cwd=ROOT
    )
    problem = "user 61234 has no name here (passwd), so its jobs are not found; use --scope cluster"
    assert (done.returncode, done.stderr) == (2, f"gpujob-exporter: {problem}\n")
