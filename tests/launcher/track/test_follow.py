"""A whole tracking run against a scripted Slurm, with a clock that jumps."""

import errno
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.slurm.accounting import Attempt, Figures, Step
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.sources.cached_answers_reader import QueueAnswer
from exporter.slurm.sources.hub_reader import HubJob
from exporter.slurm.sources.shared_accounting_reader import SharedAccounting
from exporter.slurm.tracking import TrackedJob
from launcher.errors import LauncherError
from launcher.track.follow import ACCOUNTING_EACH, HUB_FIGURES_S, Follower, read_cause
from launcher.track.run_log import all_complete
from launcher.track.selection import Selection, read_selected
from launcher.track.state import TrackState, exit_status_of, read_state
from tests.launcher.conftest import Golden
from tests.launcher.sweep.test_directory import ENDED
from tests.support.launcher import read_json

START = datetime(2025, 11, 11, 14, 44, 20, tzinfo=UTC).timestamp()
RUN = "r8_lr1e-5/capitalization"
MIB = 1024.0**2


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2025-11-11 {clock}+00:00").timestamp()


class ScriptedSlurm(SlurmReader):
    """Answers by a script: each job's states with the time from which squeue shows them."""

    def __init__(self, script: dict[str, list[tuple[str, str]]], folder: Path) -> None:
        super().__init__("ada", None, {})
        self.script, self.folder = script, folder
        self.now = START
        self.down: dict[str, tuple[str, str]] = {}  # command: from, to
        self.accounting_from = "14:00:00"
        self.calls: list[tuple[str, float]] = []

    def _call(self, command: str, problem: str) -> None:
        self.calls.append((command, self.now))
        first, last = self.down.get(command, ("00:00:00", "00:00:00"))
        if at(first) <= self.now <= at(last):
            raise SlurmUnansweredError(command, problem)

    def _snapshot(self, states: list[tuple[str, str]]) -> AttemptSnapshot:
        times = {state: at(clock) for state, clock in states if at(clock) <= self.now}
        state = next(reversed(times), "PENDING")
        ended = times[state] if state not in ("PENDING", "RUNNING") else None
        return AttemptSnapshot(state, START - 60, times.get("RUNNING"), ended, 0, None, 600.0)

    def queue(self) -> tuple[QueueRow, ...]:
        self._call("squeue", "did not answer in 30 s")
        names = ("capitalization", "syntax", "words", "numbers", *map(str, range(len(self.script))))
        return tuple(
            QueueRow(job_id, self._snapshot(states), f"r8_lr1e-5/{name}/epoch0", f"{self.folder}/{job_id}/log.out")
            for (job_id, states), name in zip(self.script.items(), names, strict=False)
            if not any(state == "GONE" and at(clock) <= self.now for state, clock in states)
        )

    def accounting(self, job_ids: Sequence[str], since: float) -> tuple[Attempt, ...]:
        self._call("sacct", "exited with 1: Problem talking to the database: Connection refused")
        if self.now < at(self.accounting_from):
            return ()
        found = []
        for job_id in job_ids:
            snapshot = self._snapshot([pair for pair in self.script[job_id] if pair[0] != "GONE"])
            elapsed = (snapshot.ended or self.now) - (snapshot.started or self.now)
            steps = (Step(snapshot.ended, elapsed * 3, 12.5 * 1024 * MIB),)
            found.append(Attempt(job_id, "ada", "x", snapshot, "0:0", elapsed, 4, 64 * 1024 * MIB, steps))
        return tuple(found)


class Run:
    """A tracking run that ends after its jobs, or at a time."""

    def __init__(self, slurm: ScriptedSlurm, folder: Path) -> None:
        self.slurm, self.file = slurm, folder / "run-r8-state.json"
        self.log: list[str] = []
        self.hub: dict[str, str] = {}  # when a hub has the figures of a job; without one no hub runs
        self.asked: list[float] = []  # age of the oldest answer that will do

    def look(self, since: float) -> QueueAnswer:
        self.asked.append(self.slurm.now - since)
        source = "unix:/hub.sock" if self.hub else "squeue"
        return QueueAnswer(cluster="", as_of=self.slurm.now, tried=since, rows=self.slurm.queue(), source=source)

    def jobs_of_hub(self, _: str, job_ids: Iterable[str]) -> list[HubJob]:
        """What a hub has of these jobs; it takes the end of one from the time of its report, as it may."""
        self.slurm.calls.append(("hub", self.slurm.now))
        found = []
        for row in self.slurm.queue():
            if row.job_id in job_ids and row.snapshot.ended is not None:
                has_figures = self.slurm.now >= at(self.hub.get(row.job_id, "23:59:00"))
                job = HubJob(
                    job_id=row.job_id, job_name=row.name, state=row.snapshot.state, ended=row.snapshot.ended - 2.6
                )
                job = job.replace(submitted=row.snapshot.submitted, started=row.snapshot.started)
                found.append(job.replace(figures=Figures(elapsed_s=1.0, cpu_ratio=0.5) if has_figures else None))
        return found

    def follow(self, until: str = "23:00:00") -> TrackState:
        def start(rows: Iterable[QueueRow]) -> TrackState:
            jobs = read_selected(self.slurm, Selection(), "", rows)
            return TrackState(user="ada", started=self.slurm.now, updated=self.slurm.now, jobs=jobs, summary={})

        def sleep(seconds: float) -> None:
            self.slurm.now += seconds
            if self.slurm.now > at(until):
                raise KeyboardInterrupt

        follower = Follower(
            SharedAccounting(self.slurm, {}, 60.0 * ACCOUNTING_EACH, lambda: self.slurm.now),
            self.look,
            self.jobs_of_hub,
            read_state(self.file, (), "ada"),
            start,
            None,
            self.file,
            self.log.append,
            noun="evaluations",
            interval_s=60.0,
            gpu_every=5,
            clock=lambda: self.slurm.now,
            sleep=sleep,
        )
        return follower.run()

    def entries(self, kind: str) -> list[str]:
        return [entry for entry in self.log if f"] {kind}: " in entry]


@pytest.fixture
def run(tmp_path: Path, utc: None) -> Callable[[dict[str, list[tuple[str, str]]]], Run]:
    return lambda script: Run(ScriptedSlurm(script, tmp_path / "eval"), tmp_path)


MakeRun = Callable[[dict[str, list[tuple[str, str]]]], Run]
FOUR = {
    "12345690": [("RUNNING", "14:45:20"), ("COMPLETED", "14:50:12"), ("GONE", "14:55:12")],
    "12345691": [("RUNNING", "14:45:30"), ("FAILED", "14:46:05"), ("GONE", "14:51:05")],
    "12345692": [("RUNNING", "14:46:40"), ("TIMEOUT", "14:56:52")],
    "12345693": [("CANCELLED", "14:47:00")],
}


def test_the_log_of_a_run_is_that_of_the_golden_page(run: MakeRun, golden: Golden) -> None:
    followed = run(FOUR)
    followed.slurm.accounting_from = "14:46:40"  # it lags behind the failure
    followed.slurm.down["squeue"] = ("14:47:00", "14:47:30")
    metrics = followed.slurm.folder / "12345690" / "gpu_metrics.csv"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("time,gpu,gpu_util,mem_used_gb,mem_total_gb\n1,0,3,1,80\n2,0,87,62.5,80\n")
    state = followed.follow()
    page = "\n\n".join(followed.log).replace(str(followed.slurm.folder), "/srv/eval")
    golden("launcher/track.txt", page + "\n")
    assert (state.exit_status, dict(state.summary)) == (1, {"COMPLETED": 1, "FAILED": 1, "CANCELLED": 1, "TIMEOUT": 1})
    assert len([call for call in followed.slurm.calls if call[0] == "squeue"]) == state.polls + 1  # one failed
    saved = json.loads(followed.file.read_text())
    assert [event["state"] for event in saved["jobs"]["12345690"]["history"]] == ["RUNNING", "COMPLETED"]
    assert saved["jobs"]["12345690"]["figures"]["cpu_ratio"] == 0.75


def test_a_restart_goes_on_and_tells_nothing_twice(run: MakeRun) -> None:
    whole, followed = run(FOUR), run(FOUR)
    whole.follow()
    whole.file.unlink()
    for until in ("14:46:00", "14:47:30", "14:51:00"):
        with pytest.raises(KeyboardInterrupt):
            followed.follow(until)
    followed.follow()
    for kind in ("STATE_CHANGE", "COMPUTE_METRICS", "ALL_COMPLETE"):
        assert len(followed.entries(kind)) == len(whole.entries(kind)), kind
    assert sorted(followed.entries("STATE_CHANGE")) == sorted(whole.entries("STATE_CHANGE"))


def test_an_older_answer_of_another_source_undoes_nothing(run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, followed = run(FOUR), run(FOUR)
    whole.follow()
    whole.file.unlink()
    first, look = followed.slurm.queue(), followed.look
    polls = itertools.count()

    def sometimes_old(since: float) -> QueueAnswer:
        found = look(since)  # every third answer is that of a hub before the first poll
        return found.replace(as_of=START - 1, rows=first) if next(polls) % 3 == 2 else found

    monkeypatch.setattr(followed, "look", sometimes_old)
    followed.follow()
    assert sorted(followed.entries("STATE_CHANGE")) == sorted(whole.entries("STATE_CHANGE"))
    assert set(followed.asked) == {0.0, 120.0}  # the first one is of now, later ones may be those of a hub


def test_a_full_home_ends_no_run_but_at_its_start(run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    followed, write = run({"1": [("RUNNING", "14:45:20"), ("COMPLETED", "14:55:00")]}), run_files.write_json
    full = START, START + 1

    def write_if_possible(path: Path, value: object) -> None:
        if full[0] <= followed.slurm.now < full[1]:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        write(path, value)

    monkeypatch.setattr(run_files, "write_json", write_if_possible)
    with pytest.raises(LauncherError, match=r"run-r8-state\.json cannot be written: Disk quota"):
        followed.follow()
    followed.slurm.now, full = START, (START + 60, START + 200)
    assert followed.follow().complete
    assert len(followed.entries("STATE_NOT_SAVED")) == 1
    assert read_json(followed.file)["complete"]


def test_a_stale_answer_is_a_failure(run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = run(FOUR)
    look = followed.look
    stale = "squeue did not answer in 30 s"
    monkeypatch.setattr(
        followed, "look", lambda since: look(since).replace(problem=stale if followed.slurm.now > START + 70 else None)
    )
    with pytest.raises(KeyboardInterrupt):
        followed.follow("14:50:00")
    assert followed.entries("QUERY_FAILED")
    assert followed.entries("ALERT")


def test_a_slurm_that_does_not_answer_ends_no_job(run: MakeRun) -> None:
    followed = run({"12345690": [("RUNNING", "14:45:20"), ("COMPLETED", "15:40:00"), ("GONE", "15:45:00")]})
    followed.slurm.down["squeue"] = ("14:50:00", "15:50:00")
    state = followed.follow()
    assert [entry.split("\n")[2] for entry in followed.entries("STATE_CHANGE")] == [
        "Current: RUNNING",
        "Current: COMPLETED",
    ]
    assert state.jobs["12345690"].ended == at("15:40:00")  # from accounting: squeue had forgotten it
    failed = [moment for command, moment in followed.slurm.calls if command == "squeue" and moment >= at("14:50:00")]
    assert [b - a for a, b in itertools.pairwise(failed)][:4] == [60.0, 120.0, 240.0, 300.0]
    (alert,) = followed.entries("ALERT")
    assert "squeue has failed 3 times in a row\nKnown: the states of 2025-11-11 14:49:20" in alert
    assert len(followed.entries("QUERY_RECOVERED")) == 1


def test_while_jobs_end_all_the_time_there_are_no_more_than_15_commands_in_ten_minutes(run: MakeRun) -> None:
    ends = [f"15:{minute:02}:{second}" for minute in range(60) for second in ("05", "35")]
    script = {f"{7 + number}": [("RUNNING", "14:45:00"), ("COMPLETED", end)] for number, end in enumerate(ends)}
    followed = run(script)
    assert followed.follow().complete
    moments = [now for _, now in followed.slurm.calls]
    assert max(sum(begin <= now < begin + 600.0 for now in moments) for begin in moments) <= 15
    assert len(followed.entries("COMPUTE_METRICS")) == len(ends)


def test_beside_a_hub_accounting_is_asked_only_for_what_the_hub_lacks(run: MakeRun) -> None:
    followed = run({job_id: states[:2] for job_id, states in FOUR.items()})
    followed.hub = {"12345690": "14:50:30", "12345691": "14:46:30"}
    followed.follow()
    assert [call for call, _ in followed.slurm.calls].count("sacct") == 1
    assert ("sacct", at("14:56:52") + HUB_FIGURES_S) in followed.slurm.calls
    metrics = followed.entries("COMPUTE_METRICS")
    assert len(metrics) == 3
    assert ["50.00%" in entry for entry in metrics] == [True, True, False]


def test_beside_a_hub_a_job_whose_end_has_no_time_is_measured_too(
    run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = run({"12345690": [("RUNNING", "14:45:20"), ("FAILED", "14:50:12")]})
    followed.hub = {"1": "14:50:30"}
    known = followed.slurm.queue

    def queue() -> tuple[QueueRow, ...]:
        return tuple(row._replace(snapshot=row.snapshot._replace(ended=None)) for row in known())

    monkeypatch.setattr(followed.slurm, "queue", queue)
    followed.follow()
    assert [call for call, _ in followed.slurm.calls].count("sacct") == 1
    assert len(followed.entries("COMPUTE_METRICS")) == 1


def test_an_accounting_that_does_not_answer_costs_only_figures(run: MakeRun) -> None:
    followed = run({"12345690": [("RUNNING", "14:45:20"), ("COMPLETED", "14:50:12")]})
    followed.slurm.down["sacct"] = ("14:00:00", "23:00:00")
    assert followed.follow().exit_status == 0
    (figures,) = followed.entries("COMPUTE_METRICS")
    assert figures.split("\n")[2:] == [
        "GPU Time: 00:04:52 / 00:10:00 (48.67%)",
        "Memory: not measured",
        "CPU Efficiency: not measured",
    ]
    assert len(followed.entries("QUERY_FAILED")) == 2


def test_the_cause_of_a_failure_is_that_of_the_report_of_this_attempt(tmp_path: Path, run: MakeRun) -> None:
    followed = run({"12345691": [("RUNNING", "14:45:30"), ("FAILED", "14:46:05")]})
    followed.slurm.folder = tmp_path
    run_dir = tmp_path / "12345691"
    run_dir.mkdir()
    (run_dir / "manifest.json").write_text("{}")
    cause = {"worker": "worker_w3", "rank": 3, "node": "cn01", "reason": "cuda_oom", "evidence": []}
    report = {**ENDED, "state": "FAILED", "attempt": 0, "cause": cause}
    (run_dir / "report.json").write_text(json.dumps(report))
    job = followed.follow().jobs["12345691"]
    assert followed.entries("STATE_CHANGE")[-1].endswith(f"Result log: {run_dir}/\nCause: worker_w3 cuda_oom")
    assert read_cause(job.replace(attempt=2)) is None
    (run_dir / "report.json").write_text("{")
    assert read_cause(job) is None


def test_a_job_that_can_never_start_ends_the_waiting_and_not_the_job(utc: None) -> None:
    done = TrackedJob(job_id="7", name="train", state="COMPLETED", ended=START)
    never = TrackedJob(job_id="8", name="eval", reason="DependencyNeverSatisfied")
    waiting = never.replace(reason="Dependency")
    state = TrackState(user="ada", started=START, updated=START, jobs={"7": done, "8": never}, summary={})
    assert state.is_over
    assert not state.replace(jobs={"8": waiting}).is_over
    assert (exit_status_of([done, never]), exit_status_of([done, waiting])) == (1, 10)
    assert all_complete(START + 5400, state, "jobs").split("\n")[1:] == [
        "Summary: 2 jobs completed - 1 COMPLETED, 0 FAILED, 1 PENDING",
        "Total time: 1 hour 30 minutes",
        "Not completed: eval (8): PENDING (DependencyNeverSatisfied); cancel it with `scancel 8`",
    ]
