"""Each part of a serving job on a real Slurm is killed: leftover processes, reported cause and time.

Each case is one job on its own two nodes. The cases run in parallel. ``pytest -s`` shows the table.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import JobSpace, JobSpaces
from tests.endtoend.serving import ENOUGH, place_stand_ins, serving_job
from tests.realstack.cluster import FINAL_STATES, ROOT, Cluster, slurm_unavailable
from tests.support.launcher import read_events
from tests.support.scenarios import Results, Scenarios

pytestmark = pytest.mark.slurm

AT_ONCE = 5
GONE_S = 150.0
WAIT_FOR_FILE = f"sh -c 'until [ -e {ENOUGH} ]; do sleep 0.2; done'"


@dataclass
class Row:
    """The result of one job: a row of the table."""

    case: str
    slurm: str  # final state in Slurm
    report: Mapping[str, Any]
    seconds: float  # from the kill to the final state in Slurm and the end of all processes
    left: list[str] = field(default_factory=list)  # leftover processes

    @property
    def cause(self) -> str:
        """Worker, node and reason of the cause, or else the cause of the stop."""
        failed, stopped = self.report.get("cause") or {}, self.report.get("stopped") or {}
        text = f"{failed.get('worker')} on {failed.get('node')}: {failed.get('reason')}" if failed else ""
        return text or str(stopped.get("cause", ""))

    def evidence(self) -> str:
        """Evidence of the cause."""
        return "; ".join((self.report.get("cause") or {}).get("evidence") or ())

    def reasons(self) -> dict[str, str]:
        """Exit reason of each worker."""
        return {worker["worker"]: (worker["exit"] or {}).get("reason", "") for worker in self.report["workers"]}

    def line(self) -> str:
        """The row as text."""
        left = f"{len(self.left)} left" if self.left else "nothing left"
        result = f"{self.report.get('state')}, {self.cause}"
        return f"{self.case:22} {self.slurm:10} {self.seconds:5.1f} s  {left:13} {result}"


class RunningJob:
    """A running serving job on its two nodes."""

    def __init__(self, case: str, space: JobSpace, before: Mapping[str, set[int]]) -> None:
        """``before`` has the processes of the two nodes before the job."""
        self.case, self.cluster, self.before = case, space.cluster, before
        place_stand_ins(space.directory)
        space.own(space.directory)
        spec = serving_job(space.directory, prefill=1, decode=1)
        spec["frontend"]["count"] = 1
        spec["benchmark"] = {"type": "custom", "command": WAIT_FOR_FILE}
        # a job that may be requeued would restart after a node failure
        limits = {"time_limit": "00:10:00", "directives": {"no-requeue": True, "nodelist": ",".join(before)}}
        self.job = space.submit(spec | {"slurm": {"partition": "gpu", **limits}})
        self.job.wait_for_phase("running", 120)
        self.hosts: list[str] = self.job.json("orchestrator.json")["hosts"]
        self.space, self.killed_at = space, 0.0

    def record(self, worker: str, rank: int) -> dict[str, Any]:
        """Start record of the first run of a worker."""
        return self.job.json(f"workers/{worker}_rank{rank}_a0_r0.start.json")

    def find(self, host: str, text: str) -> int:
        """Pid of the process with this text in its command line."""
        found = [pid for pid, command in self.cluster.node_processes(host) if text in command]
        assert found, (text, self.cluster.node_processes(host))
        return min(found)

    def kill(self, host: str, pid: int) -> None:
        """Send SIGKILL."""
        self.killed_at = time.time()
        self.cluster.on(host, ["kill", "-9", str(pid)], user=ROOT, check=True)

    def left(self) -> list[str]:
        """Processes of the job that still run."""
        return [
            f"{host}: {command}"
            for host in self.before
            for pid, command in self.cluster.node_processes(host)
            if pid not in self.before[host]
        ]

    def row(self) -> Row:
        """Wait for the end of the job and all its processes."""

        def gone() -> bool:
            return self.cluster.job_state(int(self.job.job_id)) in FINAL_STATES and not self.left()

        try:
            self.cluster.wait_for(gone, GONE_S, f"the end of {self.job.run_dir}", interval=0.3)
        except TimeoutError:
            pass  # the row has the leftover processes
        seconds, left = time.time() - self.killed_at, self.left()
        report = self.space.gpujob("report", str(self.job.run_dir), "--json")
        state = self.cluster.job_state(int(self.job.job_id))
        return Row(self.case, state, json.loads(report.stdout or "{}"), seconds, left)


scenario = Scenarios[RunningJob, Row]("rows")  # the slowest are first


@scenario
def time_limit(job: RunningJob) -> Row:
    run_dir = job.job.run_dir
    # the job runs by now, so the end time may be sooner than the smallest limit of a minute
    soon = time.strftime("%FT%T", time.localtime(time.time() + 20))
    job.cluster.run(["scontrol", "update", f"JobId={job.job.job_id}", f"EndTime={soon}"], user=ROOT, check=True)

    # Slurm signals workers and batch step together, so the end of a worker may be seen first
    names = ("signal", "job stopping")
    found = job.cluster.wait_for(lambda: read_events(run_dir, *names), 150, f"the time limit of {run_dir}")
    job.killed_at = found[0]["time"]
    return job.row()


@scenario
def slurmd(job: RunningJob) -> Row:
    job.killed_at = time.time()
    job.cluster.stop_slurmd(job.hosts[1])
    return job.row()


@scenario
def slurmd_of_first_node(job: RunningJob) -> Row:
    job.killed_at = time.time()
    job.cluster.stop_slurmd(job.hosts[0])
    return job.row()


@scenario
def power_cut(job: RunningJob) -> Row:
    job.killed_at = time.time()
    job.cluster.kill_node(job.hosts[1])
    return job.row()


@scenario
def power_cut_first_node(job: RunningJob) -> Row:
    job.killed_at = time.time()
    job.cluster.kill_node(job.hosts[0])
    return job.row()


@scenario
def worker(job: RunningJob) -> Row:
    record = job.record("decode_w0", 1)
    job.kill(record["node"], record["pid"])
    return job.row()


@scenario
def wrapper(job: RunningJob) -> Row:
    record = job.record("decode_w0", 1)
    job.kill(record["node"], record["wrapper_pid"])
    return job.row()


@scenario
def sidecar(job: RunningJob) -> Row:
    host = job.hosts[1]
    sidecar = "-m exporter sidecar --run-dir"
    before = {pid for pid, command in job.cluster.node_processes(host) if sidecar in command}
    (pid,) = [
        pid
        for pid, command in job.cluster.node_processes(host)
        if sidecar in command and "launcher.programs.supervisor" not in command
    ]
    job.kill(host, pid)

    def is_restarted() -> bool:
        return any(sidecar in command and pid not in before for pid, command in job.cluster.node_processes(host))

    job.cluster.wait_for(is_restarted, 60, "another sidecar")
    seconds = time.time() - job.killed_at
    (job.space.directory / ENOUGH).touch()
    row = job.row()
    row.seconds = seconds  # until it is restarted; the job continues
    return row


@scenario
def orchestrator(job: RunningJob) -> Row:
    job.kill(job.hosts[0], job.find(job.hosts[0], "-m launcher.run.orchestrator "))
    return job.row()


@scenario
def guard(job: RunningJob) -> Row:
    job.kill(job.hosts[0], job.find(job.hosts[0], "-m launcher.guard "))
    return job.row()


@scenario
def scancel(job: RunningJob) -> Row:
    job.killed_at = time.time()
    job.cluster.run(["scancel", job.job.job_id], user=job.space.user, check=True)
    return job.row()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, space_dir: Path) -> Iterator[Cluster]:
    """Two nodes for each case, so that a power cut affects no other."""
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    nodes = 2 * len(scenario.needed(request))
    with Cluster(space_dir / "kills", nodes=nodes, accounting=False, prefix="kills") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, cluster: Cluster, space_dir: Path) -> Iterator[Results[Row]]:
    """Rows of the table."""
    names, spaces = scenario.needed(request), JobSpaces(cluster, space_dir, space_dir / "nowhere")

    def start_job(name: str) -> RunningJob:
        space = spaces.create(name)
        (space.directory / "gpujob.yaml").unlink()  # no Prometheus scrapes these jobs, so no sidecar lingers
        first = 2 * names.index(name)
        nodes = cluster.node_names[first : first + 2]
        before = {host: {pid for pid, _ in cluster.node_processes(host)} for host in nodes}
        return RunningJob(name, space, before)

    with scenario.run(names, start_job, spaces.close, AT_ONCE) as rows:
        yield rows


FAILED, NODE_FAIL = ("FAILED", "FAILED"), ("NODE_FAIL", "NODE_FAIL")
KILLED = r"decode_w0 on \S+: killed_unknown"
SLURM_S, OWN_S = 120.0, 45.0  # time for Slurm to detect a lost node, and for our own teardown and report
EXPECTED: dict[str, tuple[tuple[str, str], str, float]] = {
    "time_limit": (("TIMEOUT", "TIMEOUT"), "Slurm: the time limit was reached.*", OWN_S),
    "slurmd": (NODE_FAIL, r"decode_w0 on \S+: node_failure", SLURM_S),
    "slurmd_of_first_node": (NODE_FAIL, r"\w+ on \S+: node_failure", SLURM_S),
    "power_cut": (NODE_FAIL, r"decode_w0 on \S+: node_failure", SLURM_S),
    "power_cut_first_node": (NODE_FAIL, r"\w+ on \S+: node_failure", SLURM_S),
    "worker": (FAILED, KILLED, OWN_S),
    "wrapper": (FAILED, KILLED, OWN_S),
    "sidecar": (("COMPLETED", "COMPLETED"), "the benchmark has completed", OWN_S),
    "orchestrator": (FAILED, r"orchestrator on \S+: killed_unknown", OWN_S),
    "guard": (FAILED, r"guard on \S+: killed_unknown|Slurm: FAILED; the batch step ended without a report.*", OWN_S),
    "scancel": (("CANCELLED", "CANCELLED"), "Slurm: cancelled.*", OWN_S),
}  # states in Slurm and report, cause, and time limit in seconds


@pytest.mark.parametrize("name", EXPECTED)
def test_a_killed_job_leaves_no_process_and_reports_the_cause(name: str, rows: Results[Row]) -> None:
    row, (states, cause, seconds) = rows(name), EXPECTED[name]
    print("\n" + row.line(), end="")
    assert row.left == []
    assert (row.slurm, row.report["state"]) == states
    assert re.fullmatch(cause, row.cause)
    assert row.seconds <= seconds
    assert row.reasons().keys() == {"prefill_w0", "decode_w0", "frontend_0", "benchmark"}
    if name == "wrapper":
        assert "its wrapper" in row.evidence()
    if name in ("orchestrator", "guard"):
        assert set(row.reasons().values()) <= {"completed", "terminated_peer"}
