"""The directory of a pipeline: its record, and the states of its jobs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import NOTHING, JsonObject, Record, RecordError
from exporter.contract.report import Report
from exporter.slurm.queue import QueueRow
from exporter.slurm.states import NEVER, array_of, task_ids
from launcher.errors import LauncherError, os_errors
from launcher.report.state import EXIT_STATUS, UNFINISHED
from launcher.rundir.job_records import read_submitted
from launcher.rundir.rundir import PIPELINE_FILE, user_name
from launcher.steps.slurm_queue import is_over, is_own, is_queued_again, read_unfinished
from launcher.sweep.directory import (
    MISSING,
    SweepRecord,
    arrays_in_queue,
    cause_text,
    has_reports,
    own_rows,
    read_last_report,
    read_point_states,
    snapshots_of_tasks,
)
from launcher.sweep.directory import read_record as read_sweep
from launcher.sweep.final_states import FinalStates
from launcher.watch.view import JobClient

NEVER_STATE = "NEVER"  # of a job that waits for what can no longer happen
# states of such a job or sweep that was cancelled, until and after Slurm forgets it
_GONE, _GONE_POINTS = ("CANCELLED", "UNKNOWN", MISSING), {"CANCELLED", MISSING}


class PipelinePart(Record):
    """A job or sweep of a pipeline."""

    name: str
    file: str
    job_id: str
    run_dir: str
    after: Mapping[str, str]  # condition by name of the job before
    arrays: tuple[str, ...] = ()  # job ids of a sweep, whose directory ``run_dir`` then is

    @property
    def job_ids(self) -> tuple[str, ...]:
        return self.arrays or (self.job_id,)


class PipelineRecord(Record):
    """Content of ``pipeline.json``."""

    SCHEMA = 1

    submission: JsonObject  # user, time, directory, state of the source
    cluster: str | None = None  # None for the cluster of this machine
    parts: tuple[PipelinePart, ...]  # each after those it needs

    @property
    def name(self) -> str:
        return str(self.submission.get("job_name", "pipeline"))


@dataclass(frozen=True)
class PartState:
    """The state of a job of a pipeline now."""

    name: str
    job_id: str
    run_dir: str
    state: str
    after: Mapping[str, str]
    reason: str | None = None  # Slurm's, why it waits
    needs: tuple[str, ...] = ()  # jobs because of which it can never start
    duration_s: float | None = None
    cause: str | None = None
    points: Mapping[str, int] = field(default_factory=dict)  # of a sweep: how many are in each state
    arrays: tuple[str, ...] = ()  # job ids of a sweep: those in the queue, else those of its submission

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or can never start."""
        return self.state not in UNFINISHED

    @property
    def has_never_started(self) -> bool:
        """Whether it can never start, or has left the queue without a start, as far as that is known."""
        is_gone = self.state in _GONE and self.duration_s is None and self.points.keys() <= _GONE_POINTS
        return is_gone or self.state == NEVER_STATE


def write_record(directory: Path, record: PipelineRecord) -> None:
    with os_errors(f"{directory / PIPELINE_FILE} cannot be written"):
        run_files.write_json(directory / PIPELINE_FILE, record.to_json())


def read_record(directory: Path) -> PipelineRecord:
    """Read ``pipeline.json``. Raises LauncherError."""
    body = run_files.read_json(directory / PIPELINE_FILE)
    if body is None:
        raise LauncherError(f"{directory / PIPELINE_FILE} is missing or cannot be read; give another pipeline")
    try:
        return PipelineRecord.from_json(body, str(directory / PIPELINE_FILE))
    except RecordError as error:
        raise LauncherError(str(error)) from error


def read_part_states(
    record: PipelineRecord, final_states: Mapping[str, FinalStates] = NOTHING
) -> tuple[PartState, ...]:
    """The states of all jobs, by the known queue unless all have ended. Raises SlurmUnansweredError.

    ``final_states`` keeps what Slurm knows of lost points, by name of the sweep.
    """
    reports = {part.name: read_last_report(Path(part.run_dir)) for part in record.parts if not part.arrays}
    sweeps = {part.name: read_sweep(Path(part.run_dir)) for part in record.parts if part.arrays}
    rows: tuple[QueueRow, ...] = ()
    over = all(map(is_over, reports.values()))
    if not over or not all(has_reports(Path(part.run_dir), sweeps[part.name]) for part in record.parts if part.arrays):
        user, submitted = record.submission.get("user"), record.submission.get("submitted")
        ends = [report.end or 0.0 for report in reports.values() if report is not None]
        resumed = [array.submitted for sweep in sweeps.values() for array in sweep.arrays]
        since = max((submitted if isinstance(submitted, float) else 0.0, *resumed, *ends))  # an end may start a job
        rows = read_unfinished(str(user or user_name()), record.cluster, since)
    found: dict[str, PartState] = {}
    for part in record.parts:
        if part.arrays:  # `--resume` adds the new arrays to the record of the sweep only
            own = own_rows(rows, sweeps[part.name].arrays)
            found[part.name] = _sweep_state(part, sweeps[part.name], own, found, final_states.get(part.name))
        else:
            submitted = read_submitted(Path(part.run_dir)) if rows else None
            own = [row for row in rows if array_of(row.job_id) == part.job_id and is_own(row, submitted)]
            found[part.name] = _part_state(part, reports[part.name], own[0] if own else None, found)
    return tuple(found.values())


def _sweep_state(
    part: PipelinePart,
    record: SweepRecord,
    rows: Sequence[QueueRow],
    before: Mapping[str, PartState],
    final_states: FinalStates | None,
) -> PartState:
    """The state of a sweep: that of its points if it is one, else the first one that matters."""
    queue = snapshots_of_tasks(rows)
    states = [point.state for point in read_point_states(Path(part.run_dir), record, queue, final_states=final_states)]
    never = {task for row in rows if row.snapshot.reason == NEVER for task in task_ids(row.job_id)}
    reason = next((row.snapshot.reason for row in rows if row.snapshot.state == "PENDING"), None)
    failed = next((state for state in states if state not in ("COMPLETED", *UNFINISHED)), None)
    needs: tuple[str, ...] = ()
    if never and never == queue.keys():
        state, needs = NEVER_STATE, unmet_needs(part.after, before)
    elif all(state == "PENDING" for state in states):
        state = "PENDING"
    elif any(state in UNFINISHED for state in states):
        state = "RUNNING"
    else:
        state = failed or "COMPLETED"
    counts = dict(Counter(states))
    return PartState(
        *(part.name, part.job_id, part.run_dir, state, part.after, reason if state == "PENDING" else None, needs),
        points=counts,
        arrays=arrays_in_queue(record, queue) or part.arrays,
    )


def _part_state(
    part: PipelinePart, report: Report | None, row: QueueRow | None, before: Mapping[str, PartState]
) -> PartState:
    if row is not None and (report is None or is_queued_again(row.snapshot, report.attempt, requeued=report.requeued)):
        is_pending = row.snapshot.state == "PENDING"
        state = "RUNNING" if not is_pending else NEVER_STATE if row.snapshot.reason == NEVER else "PENDING"
        needs = unmet_needs(part.after, before) if state == NEVER_STATE else ()
        return PartState(part.name, part.job_id, part.run_dir, state, part.after, row.snapshot.reason, needs)
    found = report or JobClient(Path(part.run_dir)).report()  # Slurm knows ends without a report
    return PartState(
        *(part.name, part.job_id, part.run_dir, found.state, part.after),
        duration_s=found.duration_s,
        cause=cause_text(found),
    )


def unmet_needs(after: Mapping[str, str], before: Mapping[str, PartState]) -> tuple[str, ...]:
    """The jobs whose ends, or whose lack of one, keep a job from starting; all that it waits for if that is unknown."""
    unmet = tuple(name for name, condition in after.items() if name in before and _is_unmet(condition, before[name]))
    return unmet or tuple(after)


def _is_unmet(condition: str, state: PartState) -> bool:
    if not state.has_ended:
        return False
    if state.state == NEVER_STATE:
        return True
    if condition in ("ok", "each"):
        return state.state != "COMPLETED"
    return condition == "notok" and state.state == "COMPLETED"


def pipeline_exit_status(states: Sequence[PartState]) -> int:
    """10 while a job is unfinished, else the status of the first one that did not complete.

    A job that was to run only after a failure, and is not needed, counts as completed, also once it is cancelled.
    """
    if not all(state.has_ended for state in states):
        return EXIT_STATUS["RUNNING"]
    return next((status for state in states if (status := _exit_status(state, states))), 0)


def _exit_status(state: PartState, states: Iterable[PartState]) -> int:
    by_name = {other.name: other for other in states}
    needs = unmet_needs(state.after, by_name) if state.has_never_started else ()
    if needs and all(state.after.get(name) == "notok" and by_name[name].state == "COMPLETED" for name in needs):
        return 0
    return EXIT_STATUS.get("FAILED" if state.state == NEVER_STATE else state.state, EXIT_STATUS["UNKNOWN"])
