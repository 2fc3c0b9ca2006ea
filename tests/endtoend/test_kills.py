"""Everything that can be killed of a serving job on a real Slurm: what is left, what is told, and how soon.

Each case is one job on two nodes of its own; they are played side by side. ``pytest -s`` shows the table.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import JobSpace, user_for
from tests.endtoend.serving import ENOUGH, events, place_stand_ins, serving_job
from tests.realstack.cluster import FINAL_STATES, ROOT, Cluster, slurm_unavailable

pytestmark = pytest.mark.slurm

AT_ONCE = 5
GONE_S = 150.0
GOES_ON = f"sh -c 'until [ -e {ENOUGH} ]; do sleep 0.2; done'"


@dataclass
class Row:
    """What came of one job: a line of the table."""

    case: str
    slurm: str  # Slurm's last word on the job
    report: Mapping[str, Any]
    seconds: float  # from the kill until Slurm is done with the job and no process of it is there
    left: list[str] = field(default_factory=list)  # processes that were there after all

    @property
    def cause(self) -> str:
        """Who has failed and why; else why the job was stopped."""
        failed, stopped = self.report.get("cause") or {}, self.report.get("stopped") or {}
        told = f"{failed.get('worker')} on {failed.get('node')}: {failed.get('reason')}" if failed else ""
        return told or str(stopped.get("cause", ""))

    def evidence(self) -> str:
        """Of the failure."""
        return "; ".join((self.report.get("cause") or {}).get("evidence") or ())

    def reasons(self) -> dict[str, str]:
        """Why each worker ended."""
        return {worker["worker"]: (worker["exit"] or {}).get("reason", "") for worker in self.report["workers"]}

    def line(self) -> str:
        """A line of the table."""
        left = f"{len(self.left)} left" if self.left else "nothing left"
        told = f"{self.report.get('state')}, {self.cause}"
        return f"{self.case:22} {self.slurm:10} {self.seconds:5.1f} s  {left:13} {told}"


class Life:
    """A job with its two nodes, from the moment when all of it is up."""

    def __init__(self, space: JobSpace, before: Mapping[str, set[int]]) -> None:
        """``before`` are the processes of the nodes, which are this job's alone."""
        self.cluster, self.before = space.cluster, before
        place_stand_ins(space.directory)
        space.own(space.directory)
        spec = serving_job(space.directory, prefill=1, decode=1)
        spec["frontend"]["count"] = 1
        spec["benchmark"] = {"type": "custom", "command": GOES_ON}
        # a job that may be requeued would begin again when its node fails
        limits = {"time_limit": "00:10:00", "directives": {"no-requeue": True, "nodelist": ",".join(before)}}
        self.job = space.submit(spec | {"slurm": {"partition": "gpu", **limits}})
        self.job.wait_for_phase("running", 120)
        self.hosts: list[str] = self.job.json("orchestrator.json")["hosts"]
        self.space, self.killed_at = space, 0.0

    def record(self, worker: str, rank: int) -> dict[str, Any]:
        """Of the first run of a worker."""
        return self.job.json(f"workers/{worker}_rank{rank}_a0_r0.start.json")

    def find(self, host: str, words: str) -> int:
        """Pid on its node of the process of the job with these words."""
        found = [pid for pid, command in self.cluster.node_processes(host) if words in command]
        assert found, (words, self.cluster.node_processes(host))
        return min(found)

    def kill(self, host: str, pid: int) -> None:
        """kill -9."""
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

    def row(self, case: str) -> Row:
        """Wait for the end of everything."""

        def gone() -> bool:
            return self.cluster.job_state(int(self.job.job_id)) in FINAL_STATES and not self.left()

        try:
            self.cluster.wait_for(gone, GONE_S, f"the end of {self.job.run_dir}", interval=0.3)
        except TimeoutError:
            pass  # the row says so
        seconds, left = time.time() - self.killed_at, self.left()
        told = self.space.gpujob("report", str(self.job.run_dir), "--json")
        state = self.cluster.job_state(int(self.job.job_id))
        return Row(case, state, json.loads(told.stdout or "{}"), seconds, left)


Case = Callable[[Life], Row]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Adds a case; those that take long stand first."""

    def add(play: Case) -> Case:
        CASES[name] = play
        return play

    return add


@case("time limit")
def _(life: Life) -> Row:
    run_dir = life.job.run_dir
    # all of it is up by now, so that the least limit of a minute need not pass
    soon = time.strftime("%FT%T", time.localtime(time.time() + 20))
    life.cluster.run(["scontrol", "update", f"JobId={life.job.job_id}", f"EndTime={soon}"], user=ROOT, check=True)

    # Slurm tells the workers and the batch step at the same moment: the end of a worker may be seen first
    def stopping() -> list[dict[str, Any]]:
        return events(run_dir, "signal", "job stopping")

    told = life.cluster.wait_for(stopping, 150, f"the time limit of {run_dir}")
    life.killed_at = told[0]["time"]
    return life.row("time limit")


@case("slurmd")
def _(life: Life) -> Row:
    life.killed_at = time.time()
    life.cluster.stop_slurmd(life.hosts[1])
    return life.row("slurmd")


@case("slurmd of first node")
def _(life: Life) -> Row:
    life.killed_at = time.time()
    life.cluster.stop_slurmd(life.hosts[0])
    return life.row("slurmd of first node")


@case("power cut")
def _(life: Life) -> Row:
    life.killed_at = time.time()
    life.cluster.kill_node(life.hosts[1])
    return life.row("power cut")


@case("power cut, first node")
def _(life: Life) -> Row:
    life.killed_at = time.time()
    life.cluster.kill_node(life.hosts[0])
    return life.row("power cut, first node")


@case("worker")
def _(life: Life) -> Row:
    record = life.record("decode_w0", 1)
    life.kill(record["node"], record["pid"])
    return life.row("worker")


@case("wrapper")
def _(life: Life) -> Row:
    record = life.record("decode_w0", 1)
    life.kill(record["node"], record["wrapper_pid"])
    return life.row("wrapper")


@case("sidecar")
def _(life: Life) -> Row:
    host = life.hosts[1]
    sidecar = "-m exporter sidecar --run-dir"
    before = {pid for pid, command in life.cluster.node_processes(host) if sidecar in command}
    (pid,) = [
        pid
        for pid, command in life.cluster.node_processes(host)
        if sidecar in command and "launcher.programs.supervisor" not in command
    ]
    life.kill(host, pid)

    def back() -> bool:
        return any(sidecar in command and pid not in before for pid, command in life.cluster.node_processes(host))

    life.cluster.wait_for(back, 60, "another sidecar")
    seconds = time.time() - life.killed_at
    (life.space.directory / ENOUGH).touch()
    row = life.row("sidecar")
    row.seconds = seconds  # until it is back: the job goes on
    return row


@case("orchestrator")
def _(life: Life) -> Row:
    life.kill(life.hosts[0], life.find(life.hosts[0], "-m launcher.run.orchestrator "))
    return life.row("orchestrator")


@case("guard")
def _(life: Life) -> Row:
    life.kill(life.hosts[0], life.find(life.hosts[0], "-m launcher.guard "))
    return life.row("guard")


@case("scancel")
def _(life: Life) -> Row:
    life.killed_at = time.time()
    life.cluster.run(["scancel", life.job.job_id], user=life.space.user, check=True)
    return life.row("scancel")


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    """Cases that collected tests are about, in the order in which they stand here."""
    ours = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = {item.callspec.params["name"] for item in ours if hasattr(item, "callspec")}
    return [name for name in CASES if name in names]


@pytest.fixture(scope="module")
def cluster(asked: list[str], space_dir: Path) -> Iterator[Cluster]:
    """Two nodes for each case: those that lose power are nobody else's."""
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    with Cluster(space_dir / "kills", nodes=2 * len(asked), accounting=False, prefix="kills") as made:
        yield made


@pytest.fixture(scope="module")
def played(asked: list[str], cluster: Cluster, space_dir: Path) -> Iterator[dict[str, Future[Row]]]:
    """The rows of the table, as soon as they are there."""
    user, spaces = user_for(cluster), list[JobSpace]()

    def play(name: str) -> Row:
        space = JobSpace(cluster, Path(tempfile.mkdtemp(prefix="kill-", dir=space_dir)), user, space_dir / "nowhere")
        (space.directory / "gpujob.yaml").unlink()  # nobody scrapes these jobs: no sidecar waits for that
        spaces.append(space)
        first = 2 * asked.index(name)
        nodes = cluster.node_names[first : first + 2]
        before = {host: {pid for pid, _ in cluster.node_processes(host)} for host in nodes}
        return CASES[name](Life(space, before))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = {name: pool.submit(play, name) for name in asked}
        yield rows
        for row in rows.values():
            row.cancel()
        for space in spaces:
            space.close()


FAILED, NODE_FAIL = ("FAILED", "FAILED"), ("NODE_FAIL", "NODE_FAIL")
KILLED = r"decode_w0 on \S+: killed_unknown"
SLURM_S, OWN_S = 120.0, 45.0  # Slurm's time to miss a node, and ours: SIGTERM, its time, SIGKILL, the report
EXPECTED: dict[str, tuple[tuple[str, str], str, float]] = {
    "time limit": (("TIMEOUT", "TIMEOUT"), "Slurm: the time limit was reached.*", OWN_S),
    "slurmd": (NODE_FAIL, r"decode_w0 on \S+: node_failure", SLURM_S),
    "slurmd of first node": (NODE_FAIL, r"\w+ on \S+: node_failure", SLURM_S),
    "power cut": (NODE_FAIL, r"decode_w0 on \S+: node_failure", SLURM_S),
    "power cut, first node": (NODE_FAIL, r"\w+ on \S+: node_failure", SLURM_S),
    "worker": (FAILED, KILLED, OWN_S),
    "wrapper": (FAILED, KILLED, OWN_S),
    "sidecar": (("COMPLETED", "COMPLETED"), "the benchmark has completed", OWN_S),
    "orchestrator": (FAILED, r"orchestrator on \S+: killed_unknown", OWN_S),
    "guard": (FAILED, r"guard on \S+: killed_unknown|Slurm: FAILED; the batch step has ended.*", OWN_S),
    "scancel": (("CANCELLED", "CANCELLED"), "Slurm: cancelled.*", OWN_S),
}  # Slurm's state and the report's, the cause, and seconds that it may take at most


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_of_a_job_and_it_is_told_why(name: str, played: dict[str, Future[Row]]) -> None:
    row, (states, cause, seconds) = played[name].result(600), EXPECTED[name]
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
