"""The real sidecar: started as the launcher starts it, queried over HTTP, ended by signals."""

import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client import parser as text_parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from exporter import __version__
from exporter.__main__ import HASH_MODULES, SHA2_MODULES
from exporter.collecting.families import OPENMETRICS_TYPE, TEXT_TYPE
from exporter.contract import run_files
from exporter.contract.manifest import read_manifest
from tests.support.exporter import (
    NODE,
    SOON_S,
    Wrappers,
    declared_families,
    make_identity,
    make_manifest,
    make_task,
    until,
    write_manifest,
)
from tests.support.ports import free_port
from tests.support.record_schema import problems, published_schema

EXPORTER = (sys.executable, "-I", "-m", "exporter")
SCRIPT = Path(sys.executable).with_name("gpujob-exporter")
TASKS = (make_task(0), make_task(1))
CAN_AVOID_OPENSSL = all(map(find_spec, HASH_MODULES)) and any(all(map(find_spec, names)) for names in SHA2_MODULES)

parse_text: Callable[[str], Iterable[Metric]] = text_parser.text_string_to_metric_families
parse_openmetrics: Callable[[str], Iterable[Metric]] = openmetrics_parser.text_string_to_metric_families


def environment(**more: str) -> dict[str, str]:
    """The environment of a sidecar, without variables of a surrounding job."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "GPUJOB", "PYTHON"))
    }
    return {**inherited, "GPUJOB_NODE": NODE, "GPUJOB_JOB_ID": "4459", **more}


class SidecarProcess:
    """A running sidecar, and requests to it."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        self.log = run_dir / f"sidecar-{time.monotonic_ns()}.log"
        self._published = run_dir / run_files.SIDECARS_DIR / f"{NODE}.json"
        before = run_files.read_json(self._published)
        with self.log.open("wb") as log:
            argv = [*EXPORTER, "sidecar", "--run-dir", str(run_dir), *options]
            self.process = subprocess.Popen(argv, env=environment(), stdout=log, stderr=log, cwd=run_dir)
        until(lambda: run_files.read_json(self._published) not in (None, before), "the sidecar's address")
        self.record = run_files.read_json(self._published) or {}
        self.port = int(str(self.record["port"]))

    def request(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        token = {"Authorization": f"Bearer {run_files.read_token(self.run_dir)}"}
        connection.request("GET", path, headers={"Accept-Encoding": "identity", **token, **named})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body

    def text(self, path: str, **headers: str) -> str:
        return self.request(path, **headers)[2].decode("utf-8")

    def until_ready(self) -> None:
        until(lambda: self.request("/-/ready")[0] == 200, "the first reads")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A sidecar of a job with one running and one failed worker."""
    run_dir = tmp_path_factory.mktemp("running")
    write_manifest(make_manifest(run_dir, *TASKS, total_items=100, check_interval_s=0.1))
    run_files.write_job_state(str(run_dir), "running")
    wrappers = Wrappers(run_dir)
    wrappers.start(TASKS[0], "sh", "-c", "echo Processed 7/50 items; exec sleep 600")
    wrappers.start(TASKS[1], "sh", "-c", "exit 3").wait()
    wrappers.record(TASKS[0], "start")
    sidecar = SidecarProcess(run_dir, "--web.listen-address", "127.0.0.1:0")
    sidecar.until_ready()
    until(lambda: 'phase="running"} 1' in sidecar.text("/metrics"), "the phase")
    until(lambda: "gpujob_worker_items{" in sidecar.text("/metrics"), "the worker's first line")
    yield sidecar
    sidecar.close()
    wrappers.close()


def test_threads_are_named_after_their_collectors(running: SidecarProcess) -> None:
    names = {path.read_text().strip() for path in Path(f"/proc/{running.process.pid}/task").glob("*/comm")}
    assert {"workers", "logs", "gpus", "gpu_workers"} <= names


def test_a_sidecar_reserves_little_address_space(running: SidecarProcess) -> None:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    peak_kib = int(status.partition("VmPeak:")[2].split()[0])
    assert peak_kib < 150_000  # about 72 MB; with the default stacks and heaps of its threads more than 1 GB


@pytest.mark.skipif(not CAN_AVOID_OPENSSL, reason="this interpreter has no hash functions but those of OpenSSL")
def test_a_sidecar_does_not_load_openssl(running: SidecarProcess) -> None:
    mapped = Path(f"/proc/{running.process.pid}/maps").read_text()
    assert "libpython" in mapped or "/python" in mapped
    assert "libssl" not in mapped
    assert "libcrypto" not in mapped


def test_metrics_are_text_by_default(running: SidecarProcess) -> None:
    status, headers, body = running.request("/metrics")
    assert (status, headers["content-type"]) == (200, TEXT_TYPE)
    assert "content-encoding" not in headers
    samples = [sample for metric in parse_text(body.decode("utf-8")) for sample in metric.samples]
    declared = {family.full_name for family in declared_families()}
    assert {sample.name for sample in samples} <= declared
    assert all(sample.labels["job_id"] == "4459" and sample.labels["node"] == NODE for sample in samples)
    up = {sample.labels["rank"]: sample.value for sample in samples if sample.name == "gpujob_worker_up"}
    assert up == {"0": 1, "1": 0}
    success = {sample.labels["collector"]: sample.value for sample in samples if sample.name.endswith("_success")}
    collectors = (
        *("job", "readiness", "workers", "memory", "gpus", "gpu_workers", "logs", "fom", "outputs", "checkpoints"),
        *("disk", "gpu_metrics", "self", "launch", "publish", "events"),
    )
    assert success == dict.fromkeys(collectors, 1)


def test_metrics_are_openmetrics_for_clients_that_prefer_it(running: SidecarProcess) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    _, headers, body = running.request("/metrics", Accept=accept)
    assert headers["content-type"] == OPENMETRICS_TYPE
    assert headers["vary"] == "Accept, Accept-Encoding"
    assert body.endswith(b"\n# EOF\n")
    assert len(list(parse_openmetrics(body.decode("utf-8")))) > 10


def test_metrics_are_compressed_for_clients_that_accept_gzip(running: SidecarProcess) -> None:
    _, headers, body = running.request("/metrics", Accept_Encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    text = gzip.decompress(body).decode("utf-8")
    assert "gpujob_worker_up{" in text
    assert len(body) < len(text) / 3


@pytest.mark.parametrize("path", ["/metrics", "/status?timeline=1"])
@pytest.mark.parametrize("accepted", ["gzip;q=0", "gzip;q=0, *", "identity, gzip;q=0.0"])
def test_nothing_is_compressed_for_clients_that_refuse_gzip(running: SidecarProcess, path: str, accepted: str) -> None:
    status, headers, body = running.request(path, Accept_Encoding=accepted)
    assert (status, headers.get("content-encoding")) == (200, None)
    assert body.isascii()


def test_the_status_is_a_json_document(running: SidecarProcess) -> None:
    status, headers, body = running.request("/status")
    assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
    document = json.loads(body)
    assert list(problems(document, published_schema("status"))) == []
    assert (document["schema"], document["final"], document["node"]) == (1, False, {"name": NODE, "index": 0})
    first, second = document["workers"]
    assert (first["up"], first["items"], first["exit"]) == (True, 7, None)
    assert (second["up"], second["exit"]["reason"], second["exit"]["code"]) == (False, "app_error", 3)
    events = {event["event"] for event in document["events"]} - {"GPU driver"}  # reported on nodes without a driver
    assert events == {"worker started", "worker ended"}
    assert document["collectors"]["workers"]["success"] is True


def test_the_run_directory_has_the_same_status(running: SidecarProcess) -> None:
    path = running.run_dir / run_files.STATUS_DIR / f"{NODE}.json"
    published = until(lambda: (found := run_files.read_json(path) or {}).get("workers") and found, "a status")
    assert published.keys() == json.loads(running.text("/status")).keys()


def test_the_timeline_has_what_the_page_has(running: SidecarProcess) -> None:
    def timeline(**headers: str) -> Any:
        status, answer, body = running.request("/status?timeline=1", **headers)
        assert (status, answer["content-type"]) == (200, "application/json; charset=utf-8")
        return json.loads(gzip.decompress(body) if answer.get("content-encoding") == "gzip" else body)

    def latest() -> dict[str, float]:
        return {series["series"]: series["values"][-1] for series in timeline(Accept_Encoding="gzip")["series"]}

    steady = re.compile(r"gpujob_worker_(?:up|items\{|last_exit_timestamp_seconds|exits_total)")
    # The first point may be from before the first look at the logs.
    until(lambda: sum(steady.match(name) is not None for name in latest()) == 5, "the steady series")
    values = latest()
    found = timeline()
    assert (found["node"], found["job_id"], found["instance"]) == (NODE, "4459", f"127.0.0.1:{running.port}")
    page = dict(line.rpartition(" ")[::2] for line in running.text("/metrics").splitlines() if line[0] != "#")
    assert {name for name in values if not name.startswith("up{")} <= page.keys()
    for name in filter(steady.match, values):
        assert values[name] == pytest.approx(float(page[name])), name
    assert running.request("/status?timeline=1", Authorization="")[0] == 401


def test_a_sidecar_is_healthy_and_ready(running: SidecarProcess) -> None:
    assert running.request("/-/healthy")[::2] == (200, b"The exporter is healthy.\n")
    assert running.request("/-/ready")[::2] == (200, b"The exporter is ready.\n")


def test_the_landing_page_links_to_the_other_pages(running: SidecarProcess) -> None:
    status, headers, body = running.request("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in ("metrics", "status", "-/healthy", "-/ready"):
        assert f'<a href="{path}">' in body.decode("utf-8")
        assert running.request(f"/{path}")[0] == 200


def test_the_sidecar_listens_at_the_published_address(running: SidecarProcess) -> None:
    assert running.record["address"] == f"127.0.0.1:{running.port}"
    assert running.record["labels"] == make_identity().constant_labels()


def test_a_sidecar_has_a_lower_priority_than_the_job(running: SidecarProcess) -> None:
    pid = running.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text("ascii").strip() == "1000"


def test_a_sidecar_may_open_many_files(running: SidecarProcess) -> None:
    limits = Path(f"/proc/{running.process.pid}/limits").read_text("ascii")
    (soft, hard) = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert int(soft) == min(int(hard), 65536)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Callable[..., SidecarProcess]]:
    """Start sidecars of a job without workers."""
    write_manifest(make_manifest(tmp_path, check_interval_s=60.0, linger_s=60.0))  # longer than any wait of these tests
    run_files.write_job_state(str(tmp_path), "running")
    started: list[SidecarProcess] = []

    def start_sidecar(*options: str) -> SidecarProcess:
        started.append(SidecarProcess(tmp_path, *options))
        return started[-1]

    yield start_sidecar
    for process in started:
        process.close()


def test_sigterm_ends_a_sidecar_immediately_with_a_final_status(sidecar: Callable[..., SidecarProcess]) -> None:
    process = sidecar()
    process.until_ready()
    process.text("/metrics")
    process.process.terminate()
    assert process.process.wait(timeout=SOON_S) == 0
    assert (run_files.read_json(process.run_dir / run_files.STATUS_DIR / f"{NODE}.json") or {})["final"] is True
    assert "Traceback" not in process.log.read_text("utf-8")


def test_a_sidecar_ends_by_itself_when_the_job_has_finished(sidecar: Callable[..., SidecarProcess]) -> None:
    process = sidecar()
    run_files.write_job_state(str(process.run_dir), "finished")
    assert process.process.wait(timeout=SOON_S) == 0
    status = run_files.read_json(process.run_dir / run_files.STATUS_DIR / f"{NODE}.json") or {}
    assert status["final"] is True
    assert "Traceback" not in process.log.read_text("utf-8")


def test_a_sidecar_that_was_killed_continues_its_timeline(sidecar: Callable[..., SidecarProcess]) -> None:
    first = sidecar()
    path = first.run_dir / run_files.STATUS_DIR / f"{NODE}.timeline.json.gz"
    until(path.exists, "the timeline")
    before = json.loads(gzip.decompress(path.read_bytes()))
    first.process.kill()
    first.process.wait()
    restarted = sidecar()
    restarted.until_ready()
    restarted.process.terminate()
    assert restarted.process.wait(timeout=SOON_S) == 0
    after = json.loads(gzip.decompress(path.read_bytes()))
    assert after["times"][: len(before["times"])] == before["times"]
    assert len(after["times"]) > len(before["times"])


def test_a_restarted_sidecar_keeps_its_port_if_it_is_free(sidecar: Callable[..., SidecarProcess]) -> None:
    first = sidecar(
        "--web.listen-address", f"127.0.0.1:{free_port()}"
    )  # outside the range that the kernel gives to clients
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    restarted = sidecar("--web.listen-address", "127.0.0.1:0")
    assert restarted.port == first.port
    restarted.process.kill()
    restarted.process.wait()
    with socket.create_server(("127.0.0.1", first.port)):
        assert sidecar("--web.listen-address", "127.0.0.1:0").port != first.port


def run(*arguments: str, argv: tuple[str, ...] = EXPORTER, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [*argv, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment(**more)
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The only message of a command that exited with 2."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    prefix = "gpujob-exporter: "
    assert done.stderr.startswith(prefix)
    return done.stderr.removeprefix(prefix).rstrip("\n")


def test_a_run_directory_without_a_manifest_is_refused(tmp_path: Path) -> None:
    message = refused(run("sidecar", "--run-dir", str(tmp_path)))
    assert message == f"{tmp_path / 'manifest.json'}: No such file or directory"


def test_a_manifest_with_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": 99}', encoding="ascii")
    message = refused(run("check-config", str(tmp_path)))
    assert message.startswith(f"{tmp_path / 'manifest.json'}: schema_version is 99, this exporter reads 1")


def test_a_run_directory_has_one_sidecar_for_each_node(sidecar: Callable[..., SidecarProcess], tmp_path: Path) -> None:
    first = sidecar("--web.listen-address", "127.0.0.1:0")
    argv = ("sidecar", "--run-dir", str(first.run_dir), "--web.listen-address", "127.0.0.1:0")
    message = refused(run(*argv))
    assert f"already has a sidecar for {NODE}: process {first.process.pid} on {os.uname().nodename} since " in message
    assert run_files.read_json(first.run_dir / run_files.SIDECARS_DIR / f"{NODE}.json") == first.record
    assert run(*argv, GPUJOB_SUPERVISED="1").returncode == 1


@pytest.mark.parametrize("names", [("one", "one", "one"), ("one", "two", "three")], ids=["one job", "three jobs"])
def test_one_of_several_sidecars_of_a_state_directory_wins(tmp_path: Path, names: tuple[str, ...]) -> None:
    argv = [*EXPORTER, "sidecar", "--num-workers", "1", "--output-dir", str(tmp_path), "--log-dir", str(tmp_path)]
    argv += ["--state-dir", str(tmp_path / "state"), "--web.listen-address", "127.0.0.1:0", "--job-name"]
    started = [
        subprocess.Popen([*argv, name], env=environment(), stderr=subprocess.PIPE, cwd=tmp_path, text=True)
        for name in names
    ]
    try:
        until(lambda: sum(process.poll() is not None for process in started) == 2, "the end of two sidecars")
        (winner,) = [process for process in started if process.returncode is None]
        losers = [process for process in started if process is not winner]
        assert [process.returncode for process in losers] == [2, 2]
        for process in losers:
            assert f"is in use: process {winner.pid} on " in (process.stderr.read() if process.stderr else "")
        record = tmp_path / "state" / run_files.SIDECARS_DIR
        until(lambda: list(record.glob("*.json")), "the address of the winner")
        assert read_manifest(tmp_path / "state").job_name == names[started.index(winner)]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_bad_address_is_refused(tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path))
    message = refused(run("sidecar", "--run-dir", str(tmp_path), "--web.listen-address", "9410"))
    assert message.startswith("--web.listen-address: '9410' is not host:port")


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        message = refused(run("sidecar", "--run-dir", str(tmp_path), "--web.listen-address", address))
    assert message.startswith(f"cannot listen on {address}: Address already in use")


def test_a_manifest_can_be_checked(tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path, *TASKS))
    done = run("check-config", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}: job 'embed', 2 worker tasks on 1 nodes, 2 path groups\n"


@pytest.mark.parametrize("arguments", [["--help"], ["sidecar", "--help"], ["check-config", "--help"]])
def test_every_command_has_a_help_text(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: gpujob-exporter" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("arguments", [[], ["sidecar"], ["sidecars"], ["sidecar", "--run-dir"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: gpujob-exporter" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not SCRIPT.exists(), reason="the package is not installed")
def test_packages_with_our_names_in_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("exporter", "launcher", "aiohttp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')", encoding="ascii")
    monkeypatch.chdir(tmp_path)
    write_manifest(make_manifest(tmp_path))
    for arguments, text in (
        (["--version"], f"gpujob-exporter {__version__}\n"),
        (["check-config", "."], "job 'embed'"),
    ):
        done = run(*arguments, argv=(str(SCRIPT),), PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout
