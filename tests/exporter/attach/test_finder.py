"""Search for the workers of an attached job, their start records, and the phase of the job."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exporter.attach.finder import RESTART_S, SETTLE_S, WorkerFinder
from exporter.attach.workers_reader import WorkerCandidate, WorkerSearchResult
from exporter.contract import run_files
from exporter.contract.events import Event
from exporter.contract.status import NodeName, NodeStatus, WorkerEnd, WorkerStatus
from tests.support.exporter import FakeClock, make_context, make_manifest, make_task


class Job:
    """A worker finder with workers that the test starts and ends."""

    def __init__(
        self, run_dir: Path, workers: int = 2, *, nodes: int = 1, node_index: int = 0, attempt: int = 0, **changes: Any
    ) -> None:
        tasks = [make_task(rank, node_index=rank * nodes // workers) for rank in range(workers)]
        manifest = make_manifest(run_dir, *tasks, attached=True, **changes)
        self.clock = FakeClock()
        self.context = make_context(manifest, self.clock, node_index=node_index, attempt=attempt)
        self.final = False
        self.worker_reads = 0
        self.slots: list[Any] = [
            SimpleNamespace(collector=SimpleNamespace(name="workers"), request=self.request_worker_read)
        ]
        self.candidates: list[WorkerCandidate] = []
        self.worker_events: list[Event] = []
        self.gone: dict[int, str] = {}
        self.problems: tuple[str, ...] = ()
        self.ends: dict[int, list[WorkerEnd]] = {task.rank: [] for task in self.context.tasks}
        self.known: set[int] = set()
        self.by_name = True
        self.searches = 0
        for folder in (run_files.WORKERS_DIR, run_files.STATUS_DIR):
            (run_dir / folder).mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.finder = self.make_finder()

    def make_finder(self) -> WorkerFinder:
        search: Any = SimpleNamespace(find=self.find)
        sidecar: Any = self
        return WorkerFinder(sidecar, search)

    def request_worker_read(self) -> None:
        self.worker_reads += 1

    def find(self, known: set[int], *, by_name: bool) -> WorkerSearchResult:
        self.searches += 1
        self.known, self.by_name = set(known), by_name
        visible = [candidate for candidate in self.candidates if by_name or candidate.found_by != "name"]
        found = tuple(candidate for candidate in visible if candidate.pid not in known)
        return WorkerSearchResult(found, self.gone, self.problems)

    def status(self) -> NodeStatus:
        workers = [
            WorkerStatus(worker=f"worker_w{rank}", rank=rank, up=not ends, exits=tuple(ends))
            for rank, ends in self.ends.items()
        ]
        return NodeStatus(workers=tuple(workers), events=tuple(self.worker_events))

    def start_worker(
        self, pid: int, number: int | None, found_by: str = "name", *, age: float = 0.0, directory: str | None = "/a"
    ) -> None:
        self.candidates.append(
            WorkerCandidate(pid, pid, self.clock.now - age, found_by, number, directory, None, f"python {pid}.py")
        )

    def end_worker(self, rank: int, code: int = 0) -> None:
        self.candidates = [s for s in self.candidates if s.pid != self.record(rank)["pid"]]
        reason = "app_error" if code else "completed"
        self.ends[rank].append(WorkerEnd(reason=reason, code=code, time=self.clock.now, restart=len(self.ends[rank])))

    def step(self, seconds: float = 1.0) -> str:
        """Advance the clock, read once, and return the published phase."""
        self.clock.advance(seconds)
        self.events = self.finder.read()
        state = run_files.read_json(self.run_dir / run_files.STATE_FILE) or {}
        return f"{state['phase']}{', ended' if state['workers_ended'] else ''}"

    def record(self, rank: int, restart: int | None = None) -> dict[str, Any]:
        restart = len(self.ends[rank]) if restart is None else restart
        name = run_files.record_name(f"worker_w{rank}", rank, 0, restart)
        return run_files.read_json(self.run_dir / run_files.WORKERS_DIR / f"{name}.start.json") or {}


def test_the_published_phase_is_that_of_its_attempt(tmp_path: Path) -> None:
    job = Job(tmp_path, attempt=1)
    job.step()
    assert (run_files.read_json(tmp_path / run_files.STATE_FILE) or {})["attempt"] == 1


def test_a_job_goes_from_launching_to_finished(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.step() == "launching"
    job.start_worker(101, 1, "pid_file")
    assert job.step() == "launching"
    assert job.record(1) == {
        "schema": 1,
        "worker": "worker_w1",
        "rank": 1,
        "attempt": 0,
        "restart": 0,
        "host": os.uname().nodename,
        "node": "node01",
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
        "pid": 101,
        "start_ticks": 101,
        "start": job.candidates[0].start,
        "found_by": "pid_file",
        "directory": "/a",
        "session": None,
    }
    job.start_worker(100, 0, "slurm_step")
    assert job.step() == "running"
    assert job.known == {101}
    assert job.worker_reads == 2, "new workers are read immediately"
    job.end_worker(0)
    assert job.step() == "running"
    job.end_worker(1)
    assert job.step() == "completing"
    assert job.step(RESTART_S) == "completing, ended"
    assert job.step() == "completing, ended"
    job.final = True
    assert job.step() == "finished, ended"


def test_each_event_is_written_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.worker_events = [
        Event(time=5.0, level="critical", event="worker ended", worker="worker_w1", rank=1, detail="x")
    ]
    job.finder.read()
    job.finder.read()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("phase"), line.get("happened")) for line in lines] == [
        ("worker ended", None, 5.0),
        ("phase", "running", None),
    ]


def test_a_restarted_worker_begins_its_next_run(tmp_path: Path) -> None:
    job = Job(tmp_path, check_interval_s=10)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    assert job.step() == "running"
    searches = job.searches
    job.end_worker(0, 1)
    job.step(5)
    assert job.searches == searches, "searched again before the check interval"
    job.start_worker(200, 0)
    job.step(6)
    assert (job.record(0, 1)["pid"], job.record(0, 1)["restart"]) == (200, 1)
    job.end_worker(0)
    job.end_worker(1)
    assert job.step() == "completing"
    job.start_worker(300, 1)
    assert job.step() == "running"
    assert job.record(1, 1)["pid"] == 300


@pytest.mark.parametrize(
    ("first_found_by", "then_found_by", "directory", "is_next_run"),
    [
        ("pid_file", "pid_file", "/b", True),
        ("pid_file", "slurm_step", "/a", False),
        ("pid_file", "name", "/a", False),
        ("slurm_step", "slurm_step", "/b", True),
        ("slurm_step", "pid_file", "/a", False),
        ("slurm_step", "name", "/a", False),
        ("name", "name", "/a", True),
        ("name", "name", "/b", False),
        ("name", "name", None, False),
        ("name", "pid_file", "/b", True),
        ("name", "slurm_step", "/b", True),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_restart_is_recognized_by_how_the_worker_was_found(
    tmp_path: Path, first_found_by: str, then_found_by: str, directory: str | None, is_next_run: bool, restarted: bool
) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0, "slurm_step")
    job.start_worker(101, 1, first_found_by)
    assert job.step() == "running"
    job.end_worker(1, 1)
    if restarted:
        job.finder = job.make_finder()
    job.step(20)
    job.start_worker(201, 1, then_found_by, directory=directory)
    job.step(20)
    assert job.record(1, 1).get("pid") == (201 if is_next_run else None)
    assert job.by_name == (first_found_by != "pid_file")


def test_worker_ends_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gpujob.finder")
    job = Job(tmp_path)
    common = Event(time=5.0, level="info", event="", rank=1, worker="worker_w1")
    detail = "killed_unknown: killed by SIGKILL; nobody knows by whom"
    job.worker_events = [
        common.replace(event="worker ended", detail=detail),
        common.replace(event="worker daemonised", detail="pid 7 has ended, pid 8 goes on"),
        common.replace(event="worker started", detail="pid 7"),
    ]
    job.step()
    job.step()
    assert [record.getMessage() for record in caplog.records] == [
        f"worker_w1 ended: {detail}",
        "worker_w1 daemonised: pid 7 has ended, pid 8 goes on",
    ]


def test_processes_left_behind_by_a_worker_are_not_its_next_run(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=1)
    job.start_worker(100, 0)
    job.step()
    job.step(60)
    job.end_worker(0)
    job.start_worker(105, 0, age=30)
    job.start_worker(106, None, age=30)
    assert job.step() == "completing"
    assert job.record(0, 1) == {}
    job.start_worker(107, 0, "pid_file", age=30)
    assert job.step() == "running"
    assert job.record(0, 1)["pid"] == 107


def test_unnumbered_processes_get_the_free_ranks_after_the_settling_time(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=3)
    job.start_worker(101, 1)
    job.start_worker(99, None)
    job.start_worker(98, None)
    job.step(SETTLE_S / 2)
    assert (job.record(0), job.record(2)) == ({}, {})
    assert job.step(SETTLE_S) == "running"
    assert (job.record(0)["pid"], job.record(2)["pid"]) == (99, 98)


def test_surplus_processes_are_reported_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for pid, number in ((100, 0), (101, 1), (102, 1), (103, 7)):
        job.start_worker(pid, number)
    job.step()
    assert [event.detail for event in job.events] == [
        "2 more than the 2 workers expected: pid 102 (python 102.py), 103 (python 103.py)"
    ]
    job.end_worker(0)
    job.step(20)
    assert len(job.events) == 1


def test_an_ended_worker_that_is_still_visible_is_not_surplus(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.step()
    candidates = list(job.candidates)
    job.step(60)
    job.end_worker(0)
    job.candidates = candidates
    assert job.step(60) == "running"
    assert job.events == ()


SUGGESTION = (
    "; write their pids to worker_pids.txt in the log directory, or to --pid-file, "
    "or put the job's name into their command lines"
)


def test_missing_workers_are_named_with_their_details(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=4, launch_timeout_s=60.0)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.gone = {3: "pid 1234 from worker_pids.txt is gone"}
    job.problems = ("worker_pids.txt: 'x' is not a process id",)
    assert job.step() == "launching"
    assert job.step(60) == "running"
    message = (
        "found 2 of 4 workers within 60 s; missing: worker_w2, worker_w3 (pid 1234 from worker_pids.txt is gone)"
        f"; worker_pids.txt: 'x' is not a process id{SUGGESTION}"
    )
    assert [event.detail for event in job.events] == [job.problems[0], message]


def test_a_worker_that_is_found_late_is_not_missing(tmp_path: Path) -> None:
    job = Job(tmp_path, launch_timeout_s=10.0)
    job.start_worker(100, 0)
    job.step()
    assert job.step(10) == "running"
    job.start_worker(101, 1)
    job.step(20)
    job.end_worker(0)
    job.end_worker(1)
    job.final = True
    job.step()
    job.step(RESTART_S)
    assert job.step() == "finished, ended"


def test_a_job_without_workers_fails_after_the_launch_timeout(tmp_path: Path) -> None:
    job = Job(tmp_path, launch_timeout_s=10.0)
    assert job.step() == "launching"
    assert job.step(10) == "completing, ended"
    job.final = True
    assert job.step() == "finished, ended"
    message = f"found 0 of 2 workers within 10 s; missing: worker_w0, worker_w1{SUGGESTION}"
    assert [event.detail for event in job.events] == [message]


def test_process_names_are_not_suggested_if_there_is_a_pid_file(tmp_path: Path) -> None:
    job = Job(tmp_path, launch_timeout_s=10.0)
    job.start_worker(100, 0, "pid_file")
    job.step()
    job.step(10)
    assert job.events[-1].detail.endswith(
        "; write their pids to worker_pids.txt in the log directory, or to --pid-file"
    )


def test_a_status_from_before_the_first_worker_read_is_accepted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.status = NodeStatus  # type: ignore[method-assign]
    assert job.step() == "launching"


def test_workers_that_ended_before_the_first_read_are_not_awaited(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0, "pid_file")
    job.gone = {1: "pid 101 from worker_pids.txt is gone"}
    assert job.step() == "launching"
    job.end_worker(0)
    assert job.step() == "launching"
    assert job.step(RESTART_S) == "completing, ended"


def test_a_restarted_finder_keeps_its_records(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.step()
    job.finder = job.make_finder()
    assert job.step() == "running"
    assert job.record(0, 1) == job.record(1, 1) == {}


# -- several nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(2, 3), (0, 1)], ids=["within the job", "within the node"])
def test_numbers_of_workers_count_within_the_job_or_within_the_node(tmp_path: Path, numbers: tuple[int, int]) -> None:
    job = Job(tmp_path, workers=4, nodes=2, node_index=1)
    for pid, number in zip((100, 101), numbers, strict=True):
        job.start_worker(pid, number)
    job.finder.read()
    assert [job.record(rank)["pid"] for rank in (2, 3)] == [100, 101]


def test_only_the_first_node_publishes_phase_and_events(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=4, nodes=2, node_index=1)
    job.worker_events = [Event(time=5.0, level="info", event="worker ended")]
    job.finder.read()
    assert not (tmp_path / run_files.STATE_FILE).exists()
    assert not (tmp_path / run_files.EVENTS_FILE).exists()


def write_status(job: Job, *ends: float | None, attempt: int = 0) -> None:
    """The status of the second of two nodes, with the ends of its workers."""
    workers = [
        WorkerStatus(
            rank=2 + n,
            start=1.0,
            up=end is None,
            exit=None if end is None else WorkerEnd(reason="completed", time=end),
        )
        for n, end in enumerate(ends)
    ]
    events = (Event(time=5.0, level="warning", event="pid file", detail="x"),)
    status = NodeStatus(attempt=attempt, node=NodeName(name="node02", index=1), workers=tuple(workers), events=events)
    run_files.write_json(job.run_dir / run_files.STATUS_DIR / "node02.json", status.to_json())


def test_the_job_is_over_when_the_workers_of_all_nodes_have_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=4, nodes=2)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    write_status(job, None, None, attempt=1)
    assert job.step(5) == "launching", "the status is of another attempt"
    write_status(job, None, None)
    assert job.step(5) == "running"
    job.end_worker(0)
    job.end_worker(1)
    assert job.step(5) == "running"
    write_status(job, 7.0, 8.0)
    assert job.step(5) == "completing"
    assert job.step(RESTART_S) == "completing, ended"
    lines = [json.loads(line) for line in (tmp_path / run_files.EVENTS_FILE).read_text().splitlines()]
    assert [line["node"] for line in lines if line["event"] == "pid file"] == ["node02"]
