"""A bad day: each fault really happens, all side by side, and gives the alerts of the table in the docs, once each.

The jobs are real, as are Prometheus and Alertmanager. The rules are those that we ship, with all durations divided by
FASTER. What the sidecars measure by themselves, such as a stall timeout, is set in the job files.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.endtoend.jobs import ROOT_DIR, JobSpace
from tests.endtoend.jobs import embed_job as slurm_embed_job
from tests.endtoend.test_hub import RealHub
from tests.endtoend.test_track import sbatch
from tests.fakenvml import compiler, profiles
from tests.realstack.cluster import Cluster, slurm_unavailable
from tests.realstack.stack import Stack, prometheus_unavailable
from tests.support.launcher import LocalJob, clean_environment, embed_job, poll, processes_with

pytestmark = pytest.mark.prometheus

FASTER = 15
SIDECAR_S = 36  # waits the alert about a sidecar: longer than one takes to start again where much else runs
NODES = 2  # of the cluster; one of them loses power
DOCS = ROOT_DIR / "docs" / "reference" / "alerts.md"
USE_GPU = ROOT_DIR / "tests" / "fakenvml" / "use_gpu.py"
SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(?<=[\[ ])(\d+)([smh])(?=[\]: \n)]|$)", re.MULTILINE)
# seconds in expressions, but those of collectors and of the hub's own looks
_AGE = re.compile(r"(?<=[<>-] )(600|1800|3600)\b")
_SIDECAR = re.compile(r"(alert: GpuJobNodeSidecarDown\n(?:.*\n)*?\s+for: )\w+")
ONCE = range(100, 101)  # items after which a line is printed
LOGS = """
import sys, time
for done in range(1, 4001):
    print(f"Processed {{done}}/4000 items", flush=True)
    if done in {at!r}:
        print({lines!r}, flush=True)
    time.sleep(0.05)
"""


class Fault(NamedTuple):
    """A fault, and the alerts that are sent because of it, once each."""

    what: str
    alerts: tuple[str, ...]


FAULTS = {
    "segfault": Fault("A worker dies by SIGSEGV.", ("WorkerKilled",)),
    "killed": Fault("A worker is killed by SIGKILL for an unknown reason.", ("WorkerKilled",)),
    "raised": Fault("A worker raises an exception.", ("WorkerCrashed",)),
    "gpu-memory": Fault("A worker runs out of GPU memory.", ("WorkerOutOfMemory",)),
    "gives-up": Fault("A worker fails, is restarted, and fails again.", ("WorkerRestarting", "WorkerCrashed")),
    "hangs": Fault("A worker hangs.", ("NoProgress",)),
    "stopped": Fault("The process of a worker is stopped by SIGSTOP.", ("NoProgress", "WorkerStuck")),
    "no-output": Fault("A worker works and writes no output.", ("OutputStalled",)),
    "bad-checkpoint": Fault("Half of the newest checkpoint is missing.", ("CheckpointInvalid",)),
    "log-errors": Fault("The log of a worker has twelve lines of one warning.", ("LogErrorBurst",)),
    "nan": Fault("The loss of a worker is not a number.", ("NotANumber",)),
    "no-space": Fault("The disk of the output has 64 MB.", ("DiskLow",)),
    "lost-gpu": Fault("A GPU is lost.", ("GpuLost",)),
    "no-sidecar": Fault("A sidecar is killed by SIGKILL. The job starts a new one.", ()),
    "hanging-sidecar": Fault("A sidecar is stopped by SIGSTOP.", ("NodeSidecarDown",)),
    "lost-node": Fault("All processes of a node die at once.", ("NodeSidecarDown",)),
    "broken-rule": Fault("A rule of gpujob fails.", ("RulesFailing",)),
    "broken-targets": Fault("A target file is no JSON.", ("TargetsUnreadable",)),
}
SLURM_FAULTS = {
    "fails": Fault("A job that gpujob has not launched fails.", ("Failed",)),
    "runs-on": Fault("A job reaches its time limit.", ("TimedOut",)),
    "lost-power": Fault("The node of a job loses power.", ("NodeFailed",)),
    "leaks": Fault("A worker uses more memory than its job has.", ("WorkerOutOfMemory",)),
    "dead-hub": Fault("The hub is killed.", ("HubDown",)),
}
WITHOUT_JOB = ("broken-rule", "broken-targets")
FIRING = 'ALERTS{alertstate="firing",alertname!="GpuJobWatchdog"}'
OVER_S, ALL_OVER_S = 240.0, 120.0  # all jobs start at once
UNRESOLVED = {("Watchdog", "Watchdog"), ("gives-up", "WorkerRestarting")}
"""What a worse alert has hidden meanwhile is not reported as resolved."""


def faster(text: str) -> str:
    """A rule file whose durations pass FASTER times as fast."""
    text = _SIDECAR.sub(rf"\g<1>{SIDECAR_S * FASTER}s", text)
    text = _DURATION.sub(lambda found: f"{max(1, int(found[1]) * SECONDS[found[2]] // FASTER)}s", text)
    return _AGE.sub(lambda found: str(int(found[0]) // FASTER), text)


def table() -> str:
    """The faults and their alerts, as the docs show them."""
    rows = [f"| {fault.what} | {', '.join(fault.alerts) or 'none'} |" for fault in (FAULTS | SLURM_FAULTS).values()]
    return "\n".join(("| Fault | Alerts |", "|---|---|", *rows))


class BadDay:
    """The stack, and what each fault needs."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self.folder, self.stack = folder, stack
        (folder / "gpujob.yaml").write_text(
            yaml.safe_dump({"target_dir": str(stack.targets_dir), "cluster": "here", "alerts": {"disk_free": "1MB"}})
        )

    def job(self, fault: str, spec: dict[str, Any], **more: Any) -> LocalJob:
        """Start a job with the name of the fault, which works when this returns."""
        monitoring = {"check_interval": 0.5, "linger": 2, "stall_timeout": 600, **spec.pop("monitoring", {})}
        env = clean_environment(GPUJOB_CONFIG=str(self.folder / "gpujob.yaml"), GPUJOB_HISTORY_DIR="")
        env |= more.pop("env", {})
        return LocalJob(
            self.folder / fault, {**spec, "name": fault, "monitoring": monitoring, **more}, "--quiet", env=env
        )

    def embed(self, fault: str, faults: str = "", *, stall_s: float = 600, **more: Any) -> LocalJob:
        """A job of the example workload with one worker that has these faults."""
        spec = embed_job(f"--at 60 {faults}" if faults else "", items=20000, rate=15, count=1)
        return self.job(fault, {**spec, "monitoring": {"stall_timeout": stall_s}}, **more)

    def prints(self, fault: str, lines: str, at: range = ONCE) -> LocalJob:
        """A job with these lines in its log after some of its items."""
        command = f"python3 -c {shlex.quote(LOGS.format(lines=lines, at=at))}"
        return self.job(fault, {"workers": [{"command": command}], "progress": {"total_items": 4000}})

    def firing(self, fault: str) -> set[str]:
        """Alerts of a fault that were sent so far."""
        found = {alert["labels"]["alertname"] for alert in self.of(fault) if alert["status"] == "firing"}
        return {name.removeprefix("GpuJob") for name in found}

    def of(self, fault: str) -> list[dict[str, Any]]:
        return [alert for alert in self.stack.alerts() if self.fault_of(alert) == fault]

    @staticmethod
    def fault_of(alert: dict[str, Any]) -> str:
        name = alert["labels"]["alertname"].removeprefix("GpuJob")
        by_alert = {alert: fault for fault in WITHOUT_JOB for alert in FAULTS[fault].alerts}
        return str(alert["labels"].get("job_name") or by_alert.get(name, name))

    def until_sent(self, fault: str) -> None:
        """Wait until all alerts of this fault were sent."""
        poll(lambda: self.firing(fault) >= set(FAULTS[fault].alerts), f"{FAULTS[fault].alerts} of {fault}", OVER_S)


Scenario = Callable[[BadDay, str], None]
SCENARIOS: dict[str, Scenario] = {}


def fails_by(faults: str, **more: Any) -> Scenario:
    """A worker that ends by itself, and with it the job."""

    def play(day: BadDay, fault: str) -> None:
        with day.embed(fault, faults, **more) as job:
            day.until_sent(fault)
            job.wait()

    return play


def goes_on(faults: str, **more: Any) -> Scenario:
    """A fault until the job is stopped."""

    def play(day: BadDay, fault: str) -> None:
        with day.embed(fault, faults, **more) as job:
            day.until_sent(fault)
            job.process.send_signal(signal.SIGINT)
            job.wait()

    return play


def prints(lines: str, at: range = ONCE) -> Scenario:
    def play(day: BadDay, fault: str) -> None:
        with day.prints(fault, lines, at) as job:
            day.until_sent(fault)
            job.process.send_signal(signal.SIGINT)
            job.wait()

    return play


def sends(number: int, then: int | None = None, **more: Any) -> Scenario:
    """A signal to a worker that works, and another one when all alerts were sent."""

    def play(day: BadDay, fault: str) -> None:
        with day.embed(fault, **more) as job:
            poll(lambda: job.lines_of(0) >= 60, "some work", OVER_S)
            os.kill(job.worker(0)["pid"], number)
            day.until_sent(fault)
            if then is not None:
                job.process.send_signal(signal.SIGINT)
                time.sleep(3)  # so that no alert ends before the one that hides it
                os.kill(job.worker(0)["pid"], then)
            job.wait()

    return play


def no_space(day: BadDay, fault: str) -> None:
    disk = day.folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "small", disk], check=True)
    try:
        with day.embed(fault, paths={"output_dir": str(disk)}, alerts={"disk_free": "10GB"}) as job:
            day.until_sent(fault)
            job.process.send_signal(signal.SIGINT)
            job.wait()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def bad_checkpoint(day: BadDay, fault: str) -> None:
    with day.prints(fault, "no more checkpoints") as job:
        job.phase("running", OVER_S)
        (job.run_dir / "checkpoint_step_100.json").write_text('{"step": 100, "weights": [0.1, 0.')
        day.until_sent(fault)
        job.process.send_signal(signal.SIGINT)
        job.wait()


def lost_gpu(day: BadDay, fault: str) -> None:
    scenario, path = profiles.h200(1), day.folder / "gpus.scenario"
    scenario.write(path)
    (processes := day.folder / "gpu-processes").mkdir()
    command = shlex.join([sys.executable, str(USE_GPU), "--items", "4000", "--seconds", "400", "--percent", "60"])
    spec = {
        "resources": {"gpus_per_node": 1},
        "workers": [{"gpus": 1, "command": command}],
        "progress": {"total_items": 4000},
    }
    with day.job(fault, spec, env={**scenario.environment(path), "FAKENVML_PROCESSES": str(processes)}) as job:
        job.phase("running", OVER_S)
        poll(lambda: day.stack.query(f'gpujob_gpu_up{{job_name="{fault}"}} == 1'), "the GPU", OVER_S)
        poll(lambda: any(processes.iterdir()), "a worker that has found its GPU", OVER_S)
        scenario.gpus[0].state = "lost"
        scenario.write(path)
        day.until_sent(fault)
        job.process.send_signal(signal.SIGINT)
        job.wait()


def to_sidecar(number: int) -> Scenario:
    """A signal to the sidecar of a job that goes on."""

    def play(day: BadDay, fault: str) -> None:
        with day.embed(fault) as job:
            job.phase("running", OVER_S)
            poll(lambda: day.stack.query(f'up{{job_name="{fault}"}} == 1'), "a scrape", OVER_S)
            sidecar = job.sidecar_pid()
            os.kill(sidecar, number)
            if number == signal.SIGKILL:
                again = f'up{{job_name="{fault}"}} == 1 and timestamp(up{{job_name="{fault}"}}) > {time.time()}'
                poll(lambda: day.stack.query(again), "a scrape of another sidecar", OVER_S)
                time.sleep(SIDECAR_S + 4)  # longer than the alert waits
            day.until_sent(fault)
            if number == signal.SIGSTOP:
                os.kill(sidecar, signal.SIGCONT)
            job.process.send_signal(signal.SIGINT)
            job.wait()

    return play


def lost_node(day: BadDay, fault: str) -> None:
    with day.embed(fault) as job:
        job.phase("running")
        poll(lambda: day.stack.query(f'up{{job_name="{fault}"}} == 1'), "a scrape")
        job.process.send_signal(signal.SIGSTOP)  # first all are stopped: a part that sees another one end acts on it
        stopped = {job.process.pid}
        while found := processes_with(f"{job.folder}/").keys() - stopped:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        day.until_sent(fault)
        for path in day.stack.targets_dir.glob("*.json"):  # as the next job or an operator does
            with contextlib.suppress(FileNotFoundError):  # those of other faults go meanwhile
                if f'"{fault}"' in path.read_text():
                    path.unlink()


def broken_rule(day: BadDay, fault: str) -> None:
    port = day.stack.url().rpartition(":")[2]
    path = day.stack.announce(fault, [f"127.0.0.1:{port}", f"localhost:{port}"], {"name": fault})
    day.until_sent(fault)
    path.unlink()


def broken_targets(day: BadDay, fault: str) -> None:
    path = day.stack.targets_dir / "broken.json"
    path.write_text("[{")
    day.until_sent(fault)
    path.unlink()


CONNECTION = "Connection refused\n" * 12
SCENARIOS |= {
    "segfault": fails_by("--signal SEGV"),
    "killed": sends(signal.SIGKILL),
    "raised": fails_by("--raise"),
    "gpu-memory": fails_by("--cuda-oom"),
    "hangs": goes_on("--stall", stall_s=6),
    "stopped": sends(signal.SIGSTOP, signal.SIGCONT, stall_s=6),
    "no-output": goes_on("--no-output", stall_s=6),
    "bad-checkpoint": bad_checkpoint,
    "log-errors": prints(CONNECTION, range(100, 4000, 1600)),  # again if scrapes were missed the first time
    "nan": prints("loss is NaN, step skipped", range(100, 4000, 50)),
    "no-space": no_space,
    "lost-gpu": lost_gpu,
    "no-sidecar": to_sidecar(signal.SIGKILL),
    "hanging-sidecar": to_sidecar(signal.SIGSTOP),
    "lost-node": lost_node,
    "broken-rule": broken_rule,
    "broken-targets": broken_targets,
}


def gives_up(day: BadDay, fault: str) -> None:
    spec = embed_job("--at 30 --exit-code 3", items=20000, rate=15, count=1)
    spec["workers"][0]["restart"] = {"max": 1, "backoff": 8}
    with day.job(fault, spec) as job:
        day.until_sent(fault)
        job.wait()


SCENARIOS["gives-up"] = gives_up


def write_rules(folder: Path) -> None:
    (folder / "rules").mkdir()
    for path in (ROOT_DIR / "alertmanager" / "rules").glob("*.yml"):
        (folder / "rules" / path.name).write_text(faster(path.read_text()))


@pytest.fixture
def day() -> Iterator[BadDay]:
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    if compiler() is None:
        pytest.skip("no C compiler")
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root (mount)")
    folder = Path(tempfile.mkdtemp(prefix="gpujob-bad-day-", dir="/tmp"))
    (folder / "targets").mkdir()
    write_rules(folder)
    # fails as soon as there are two series; a reload would lose alerts until Alertmanager is found again
    broken = {"record": "broken", "expr": 'vector(1) * on () up{name="broken-rule"}'}
    text = yaml.safe_dump({"groups": [{"name": "gpujob-broken", "rules": [broken]}]})
    (folder / "rules" / "broken.yml").write_text(text)
    rules = [folder / "rules" / "*.yml"]
    with Stack(folder / "stack", rules=rules, targets_dir=folder / "targets", whole=True) as stack:
        yield BadDay(folder, stack)
    if not os.environ.get("GPUJOB_KEEP"):
        shutil.rmtree(folder, ignore_errors=True)


def told(day: BadDay) -> tuple[dict[str, dict[str, set[str]]], set[tuple[str, str]]]:
    """When the alerts of each fault began, by name, and the faults and names of those whose end was not sent."""
    times: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    resolved = Counter[tuple[str, str]]()
    for alert in day.stack.alerts():
        fault, name = day.fault_of(alert), alert["labels"]["alertname"].removeprefix("GpuJob")
        if alert["status"] == "firing":  # Alertmanager also reports the end of what it has hidden
            times[fault][name].add(alert["startsAt"])
            resolved[fault, name] |= 0
        elif name in times[fault]:
            resolved[fault, name] = 1
    return times, {key for key, seen in resolved.items() if not seen}


def test_each_fault_gives_exactly_its_alerts_once_and_they_are_resolved(day: BadDay) -> None:
    assert SCENARIOS.keys() == FAULTS.keys()
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        done = {fault: pool.submit(play, day, fault) for fault, play in SCENARIOS.items()}
    failed = {fault: error for fault, future in done.items() if (error := future.exception()) is not None}
    begun = time.monotonic()
    with contextlib.suppress(AssertionError):  # reported below
        poll(lambda: not day.stack.query(FIRING), "the end", ALL_OVER_S)
        poll(lambda: told(day)[1] == UNRESOLVED, "the last messages", ALL_OVER_S)
    time.sleep(3)  # for what should not come
    print(f"\nall over {time.monotonic() - begun:.0f} s after the last fault")
    times, unresolved = told(day)
    sent = {fault: {name: len(begins) for name, begins in times[fault].items()} for fault in (*FAULTS, *times)}
    print(json.dumps({fault: str(error)[:300] for fault, error in failed.items()}, indent=1))
    wanted = {fault: dict.fromkeys(expected.alerts, 1) for fault, expected in FAULTS.items()}
    wanted["Watchdog"] = {"Watchdog": 1}
    differ = {fault for fault in sent.keys() | wanted if sent.get(fault) != wanted.get(fault)}
    assert {fault: sent.get(fault) for fault in differ} == {fault: wanted.get(fault) for fault in differ}
    assert day.stack.query(FIRING) == []
    assert not failed
    assert unresolved == UNRESOLVED


@pytest.fixture
def cluster(space_dir: Path) -> Iterator[Cluster]:
    if reason := slurm_unavailable():
        pytest.skip(reason)
    with Cluster(space_dir / "bad", nodes=NODES, prefix="bad") as cluster:
        yield cluster


@pytest.fixture
def hub(space_dir: Path, jobs: JobSpace) -> RealHub:
    # without a name for the cluster: hub and sidecars then use Slurm's
    site = {"target_dir": str(space_dir / "targets"), "alerts": {"disk_free": "1MB"}}
    (jobs.directory / "gpujob.yaml").write_text(yaml.safe_dump(site))
    return RealHub(jobs, "--web.listen-address", "127.0.0.1:9420")


@pytest.fixture
def slurm_stack(space_dir: Path, cluster: Cluster, hub: RealHub) -> Iterator[Stack]:
    write_rules(space_dir)
    (targets := space_dir / "targets").mkdir(exist_ok=True)
    targets.chmod(0o777)
    rules = [space_dir / "rules" / "*.yml"]
    token = hub.folder / "token"
    stack = Stack(space_dir / "bad-stack", cluster, rules=rules, targets_dir=targets, whole=True, hub_token=token)
    with stack:
        yield stack


@pytest.mark.slurm
def test_each_fault_of_slurm_gives_exactly_its_alerts_once(jobs: JobSpace, hub: RealHub, slurm_stack: Stack) -> None:
    cluster = jobs.cluster
    sbatch(jobs, "fails", "sleep 3; exit 3", "--mem=50")
    sbatch(jobs, "runs-on", "exec sleep 300", "--time=1", "--mem=50", "--nodelist=bad1")
    lost = int(sbatch(jobs, "lost-power", "exec sleep 300", "--no-requeue", "--nodelist=bad2", "--exclusive"))
    leaks = slurm_embed_job("leaks", faults="--leak 300 --at 20", rate=10, items=40000, nodes=1, count=1)
    leaks["resources"] = {"nodes": 1, "memory_per_node": "400M"}
    leaks["workers"][0]["gpus"] = 0
    jobs.submit(leaks)
    cluster.wait_for(lambda: cluster.job_state(lost) == "RUNNING", 60, "the job that loses its node")
    cluster.kill_node("bad2")

    def sent() -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for alert in slurm_stack.alerts():
            name, job = alert["labels"]["alertname"].removeprefix("GpuJob"), alert["labels"].get("job_name")
            if alert["status"] == "firing" and name != "Watchdog":
                found[job or "dead-hub"][name].add(alert["startsAt"])
        return {fault: {name: len(begins) for name, begins in alerts.items()} for fault, alerts in found.items()}

    wanted = {fault: dict.fromkeys(expected.alerts, 1) for fault, expected in SLURM_FAULTS.items()}
    of_jobs = {fault: alerts for fault, alerts in wanted.items() if fault != "dead-hub"}
    with contextlib.suppress(TimeoutError):  # reported below
        cluster.wait_for(lambda: sent().keys() >= of_jobs.keys(), OVER_S, "the alerts of all jobs")
    print(hub.states(), slurm_stack.query("ALERTS"), slurm_stack.targets())
    assert sent() == of_jobs
    hub.kill()
    # its series end with it, and with them the alerts of jobs
    cluster.wait_for(lambda: "HubDown" in sent().get("dead-hub", {}), OVER_S, "the alert about the hub")
    cluster.wait_for(lambda: len(slurm_stack.query(FIRING)) == 1, ALL_OVER_S, "one alert that is left")
    assert sent() == wanted


def test_the_docs_show_the_table() -> None:
    assert table() in DOCS.read_text(), f"docs/reference/alerts.md should have:\n{table()}"
