"""The directory of a sweep: its record, the run directories of its points, and their states."""

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonObject, JsonValue, Record, RecordError, to_json
from exporter.contract.report import Report
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.states import array_of, task_ids
from launcher.errors import LauncherError, SlurmError, os_errors
from launcher.report.inputs import KnownEnds
from launcher.report.report import build_report
from launcher.report.state import EXIT_STATUS, REASON_OF_STATE, UNFINISHED
from launcher.report.workers import VALUES_SHOWN
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import STARTING_S, OrchestratorRecord, ProcessRecord, read_report
from launcher.rundir.rundir import SWEEP_FILE, user_name
from launcher.rundir.statuses import CONCLUDING_S
from launcher.steps.slurm_queue import is_over, is_own, is_queued_again, read_unfinished
from launcher.sweep.final_states import FinalStates
from launcher.watch.view import JobClient
from launcher.words import cut_text, duration_text, padded_text, text_width

JOB_FILE = "job.yaml"  # copy of the job file
MISSING = "MISSING"  # state of a point without a run and not in the queue
LEAST_CAUSE_WIDTH = 24  # minimum width of the cause column, on any terminal
LAST_COLUMNS = ("took", "job", "where")  # after the values
LEFT_OUT = ("where", "took", "job", "items")  # columns that a narrow terminal does without, the first one first


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep and its run directories, oldest first."""

    index: int
    name: str
    values: JsonObject
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepArray:
    """An array job that was submitted for some points."""

    job_id: str
    tasks: str  # sbatch's --array: `0-5%2`
    submitted: float  # epoch seconds
    cluster: str | None = None  # None for the cluster of this machine


class SweepRecord(Record):
    """Content of ``sweep.json``."""

    SCHEMA = 1

    submission: JsonObject  # the sweep's submission: user, time, directory, state of the source
    max_parallel: int | None
    local: bool
    points: tuple[SweepPoint, ...]
    arrays: tuple[SweepArray, ...] = ()
    runner: ProcessRecord | None = None  # the process that runs the points on this machine
    waiting: tuple[int, ...] = ()  # points that it has still to start, some of them once more

    def is_run_here(self) -> bool:
        """Whether a process on this machine runs the points now."""
        return self.local and self.runner is not None and self.runner.is_running_here()


@dataclass(frozen=True)
class PointState:
    """The state of a point and the results of its last run."""

    index: int
    name: str
    values: JsonObject
    state: str
    job_id: str | None
    run_dir: str | None
    runs: int
    items: float | None = None
    items_expected: float | None = None
    unit: str | None = None
    results: Mapping[str, float] = field(default_factory=dict)  # values of the first worker that logs any
    best_results: Mapping[str, float] = field(default_factory=dict)
    duration_s: float | None = None
    cause: str | None = None  # why it did not complete, or Slurm's reason why it waits
    nodes: tuple[str, ...] = ()
    exit_status: int = EXIT_STATUS["UNKNOWN"]


def write_record(sweep_dir: Path, record: SweepRecord) -> None:
    with os_errors(f"{sweep_dir / SWEEP_FILE} cannot be written"):
        run_files.write_json(sweep_dir / SWEEP_FILE, record.to_json())


def read_record(sweep_dir: Path) -> SweepRecord:
    """Read ``sweep.json``. Raises LauncherError."""
    body = run_files.read_json(sweep_dir / SWEEP_FILE)
    if body is None:
        raise LauncherError(f"{sweep_dir} is not the directory of a sweep: {SWEEP_FILE} is missing or cannot be read")
    try:
        return SweepRecord.from_json(body, str(sweep_dir / SWEEP_FILE))
    except RecordError as error:
        raise LauncherError(str(error)) from error


def with_runs(record: SweepRecord, runs: Mapping[int, str]) -> SweepRecord:
    points = tuple(
        dataclasses.replace(point, runs=(*point.runs, runs[point.index])) if point.index in runs else point
        for point in record.points
    )
    return record.replace(points=points)


# -- states of the points ------------------------------------------------------------------------


def read_point_states(
    sweep_dir: Path,
    record: SweepRecord,
    queue: Mapping[str, AttemptSnapshot] | None = None,
    *,
    needs_queue: bool = False,
    final_states: FinalStates | None = None,
) -> tuple[PointState, ...]:
    """The state of every point now.

    Without a ``queue``, the known one is read, and only if a point has not ended or may still be requeued. If Slurm
    does not answer, these points are UNKNOWN or PENDING; with ``needs_queue`` SlurmUnansweredError is raised instead.
    ``final_states`` keeps what Slurm knows of points that ended without a report.
    """
    reports = {
        point.index: read_last_report(sweep_dir / point.runs[-1]) if point.runs else None for point in record.points
    }
    if queue is None:
        over = record.local or all(map(is_over, reports.values()))
        ends = [report.end or 0.0 for report in reports.values() if report is not None and not is_over(report)]
        try:
            queue = {} if over else read_shared_queue(record, max(ends, default=0.0))
        except SlurmUnansweredError:
            if needs_queue:
                raise
    run_dirs = {point.index: sweep_dir / point.runs[-1] for point in record.points if point.runs}
    lost: dict[int, str] = {}  # job ids of points without a report that are not in the queue
    if queue is not None and not record.local:
        job_ids = {index: job_id_of(path) for index, path in run_dirs.items() if reports[index] is None}
        lost = {index: job_id for index, job_id in job_ids.items() if job_id not in queue}
    for index in lost:
        with contextlib.suppress(OSError), os.scandir(run_dirs[index]):  # else NFS may have none for another minute
            pass
        reports[index] = read_last_report(run_dirs[index])  # it may have ended between the two looks
    lost = {index: job_id for index, job_id in lost.items() if reports[index] is None}
    arrays = {array.job_id: (array.submitted, array.cluster) for array in record.arrays}
    final = (final_states or FinalStates()).read(set(lost.values()), arrays)
    states = {
        point.index: _point_outcome(record, point, run_dirs[point.index], reports[point.index], queue, final)
        for point in record.points
        if point.runs
    }
    waiting = {point.index for point in record.points if point.index in record.waiting or not point.runs}
    has_runner = waiting and (record.is_run_here() or is_reporting_elsewhere(sweep_dir, record, states.values()))
    for point in record.points:
        if has_runner and point.index in waiting:
            states[point.index] = _point_state(point, "PENDING", None, None, None)
        elif not point.runs:
            states[point.index] = _point_state(point, MISSING, None, None, None)
    return tuple(states[point.index] for point in record.points)


def is_reporting_elsewhere(sweep_dir: Path, record: SweepRecord, states: Iterable[PointState]) -> bool:
    """Whether the sweep cannot be seen from here, and a point of it runs, or has lately begun or ended."""
    if not record.local or record.runner is None or not record.runner.is_hidden():
        return False
    now, began = time.time(), (sweep_dir / SWEEP_FILE).stat().st_mtime  # written when the runner or a point starts
    if now - began < STARTING_S or any(state.state in UNFINISHED for state in states):
        return True
    ended = read_last_end(sweep_dir, record)  # the next point starts when its verification is over
    return ended is not None and now - ended < CONCLUDING_S


def has_reports(sweep_dir: Path, record: SweepRecord) -> bool:
    """Whether every point has ended by its report, so that Slurm's queue says nothing more."""
    return all(is_over(read_last_report(sweep_dir / point.runs[-1]) if point.runs else None) for point in record.points)


def read_last_end(sweep_dir: Path, record: SweepRecord) -> float | None:
    """When the last report of a point ended, or None without any."""
    reports = (read_last_report(sweep_dir / point.runs[-1]) for point in record.points if point.runs)
    return max((report.end for report in reports if report is not None and report.end is not None), default=None)


def read_shared_queue(record: SweepRecord, last_end: float) -> dict[str, AttemptSnapshot]:
    """What the queue says, by task id (``4459_3``), out of a hub or the shared answer. Raises SlurmUnansweredError.

    An answer counts if it is not older than the last submission and the last end of a point that is requeued.
    """
    found: dict[str, AttemptSnapshot] = {}
    since = max((last_end, *(array.submitted for array in record.arrays)))
    for cluster in dict.fromkeys(array.cluster for array in record.arrays):
        rows = read_unfinished(str(record.submission.get("user") or user_name()), cluster, since)
        found |= snapshots_of_tasks(own_rows(rows, record.arrays))
    return found


def read_queue(arrays: Sequence[SweepArray]) -> dict[str, AttemptSnapshot] | None:
    """The queue right now, for commands that submit or cancel tasks; None if squeue does not answer."""
    found: dict[str, AttemptSnapshot] = {}
    for cluster in dict.fromkeys(array.cluster for array in arrays):
        try:
            rows = SlurmReader(None, cluster, os.environ).queue_of(
                [array.job_id for array in arrays if array.cluster == cluster]
            )
        except SlurmUnansweredError:
            return None
        found |= snapshots_of_tasks(own_rows(rows, arrays))
    return found


def own_rows(rows: Iterable[QueueRow], arrays: Iterable[SweepArray]) -> list[QueueRow]:
    """The rows of these arrays, without those of other jobs that have their ids."""
    submitted = {array.job_id: array.submitted for array in arrays}
    return [row for row in rows if (own := array_of(row.job_id)) in submitted and is_own(row, submitted[own])]


def snapshots_of_tasks(rows: Iterable[QueueRow]) -> dict[str, AttemptSnapshot]:
    """What the queue says of each task, also of those that wait together."""
    return {task: row.snapshot for row in rows for task in task_ids(row.job_id)}


def require_queue(sweep_dir: Path, record: SweepRecord) -> dict[str, AttemptSnapshot]:
    """Read the queue for all arrays. Raises SlurmError if squeue does not answer."""
    queue = read_queue(record.arrays)
    if queue is None:
        raise SlurmError(
            f"{sweep_dir}: squeue does not answer, so it is unknown which of its points still run; "
            "resume the sweep when `squeue` answers again"
        )
    return queue


def arrays_in_queue(record: SweepRecord, queue: Iterable[str]) -> tuple[str, ...]:
    """Job ids of the arrays with running or waiting tasks."""
    left = {task.partition("_")[0] for task in queue}
    return tuple(array.job_id for array in record.arrays if array.job_id in left)


def read_last_report(run_dir: Path) -> Report | None:
    """The report of a job; None if its last attempt has not ended."""
    report = read_report(run_dir)
    orchestrator = OrchestratorRecord.read(run_dir / run_files.ORCHESTRATOR_FILE)
    is_earlier = report is not None and orchestrator is not None and report.attempt != orchestrator.attempt
    return None if is_earlier else report


def _point_outcome(
    record: SweepRecord,
    point: SweepPoint,
    run_dir: Path,
    report: Report | None,
    queue: Mapping[str, AttemptSnapshot] | None,
    final: Mapping[str, str],
) -> PointState:
    job_id = job_id_of(run_dir)
    snapshot = (queue or {}).get(job_id)
    waits = queue is None and report is not None and bool(report.requeued)
    if report is not None and not (waits or is_queued_again(snapshot, report.attempt, requeued=report.requeued)):
        return _point_state(point, report.state, job_id, run_dir, report)
    began = (run_dir / run_files.ORCHESTRATOR_FILE).exists()
    if record.local:
        state = JobClient(run_dir).read_view().state
    elif queue is None:
        state = "PENDING" if waits else "UNKNOWN"
    elif snapshot is not None:
        state = "PENDING" if snapshot.state == "PENDING" else "RUNNING"
    else:
        state = "UNKNOWN" if began else MISSING
    slurm_state, has_left = final.get(job_id), state in ("UNKNOWN", MISSING)
    past = KnownEnds(slurm_state=slurm_state, is_past=True)
    found = build_report(run_dir, now=time.time(), ended=has_left, known=past) if began or slurm_state else None
    if found is not None and slurm_state in REASON_OF_STATE:
        state = found.state
    outcome = _point_state(point, state, job_id, run_dir, found)
    if state == "PENDING" and snapshot is not None and snapshot.reason is not None:
        return dataclasses.replace(outcome, cause=snapshot.reason)
    return outcome


def _point_state(
    point: SweepPoint, state: str, job_id: str | None, run_dir: Path | None, report: Report | None
) -> PointState:
    logger = next((worker for worker in report.workers if worker.values), None) if report else None
    return PointState(
        index=point.index,
        name=point.name,
        values=point.values,
        state=state,
        job_id=job_id,
        run_dir=None if run_dir is None else str(run_dir),
        runs=len(point.runs),
        items=report.items if report else None,
        items_expected=report.items_expected if report else None,
        unit=report.unit if report else None,
        results=dict(logger.values) if logger else {},
        best_results=dict(logger.best_values) if logger else {},
        duration_s=report.duration_s if report else None,
        cause=cause_text(report) if report else None,
        nodes=report.nodes if report else (),
        exit_status=EXIT_STATUS.get(state, EXIT_STATUS["UNKNOWN"]),
    )


def cause_text(report: Report) -> str | None:
    """Why a job did not complete: its cause, else the stop reason, else the failed verification."""
    if report.state == "COMPLETED":
        return None  # the cause of its end was that its work was done
    if cause := report.cause:
        rank = f" (rank {cause.rank})" if cause.rank is not None else ""
        evidence = "; ".join(cause.evidence)
        text = f"{cause.worker}{rank} on {cause.node or 'no node'}: {cause.reason}"
        return f"{text}: {evidence}" if evidence else text
    if report.stopped:
        return f"{report.stopped.reason}: {report.stopped.cause}"
    failed = (f"{check.name}: {check.detail}" for check in report.verification.checks if check.passed is False)
    return "; ".join(failed) or None


def sort_by_result(states: Sequence[PointState], name: str) -> tuple[PointState, ...]:
    """The points by their last value of this name, lowest first, those without it last. Raises LauncherError."""
    known = sorted({result for state in states for result in state.results})
    if name not in known:
        raise LauncherError(f"--sort: no point has logged a value {name!r} (known: {', '.join(known) or 'none'})")
    return tuple(sorted(states, key=lambda state: (name not in state.results, state.results.get(name, 0.0))))


def sweep_exit_status(states: Sequence[PointState]) -> int:
    """Exit status of a sweep: 10 while points are unfinished, else that of the first point that did not complete."""
    if any(state.state in UNFINISHED for state in states):
        return EXIT_STATUS["RUNNING"]
    in_order = sorted(states, key=lambda state: state.index)  # they may be sorted by a value
    return next((state.exit_status for state in in_order if state.exit_status), 0)


def points_to_resume(states: Sequence[PointState]) -> tuple[int, ...]:
    """Indexes of points that did not complete, and are neither running nor waiting."""
    return tuple(state.index for state in states if state.state not in ("COMPLETED", *UNFINISHED))


def sweep_json(sweep_dir: Path, record: SweepRecord, states: Sequence[PointState]) -> dict[str, JsonValue]:
    """The states of a sweep as a JSON object."""
    return {
        "schema": SweepRecord.SCHEMA,
        "sweep": record.submission.get("job_name"),
        "job_id": record.submission.get("job_id"),
        "sweep_dir": str(sweep_dir),
        "max_parallel": record.max_parallel,
        "arrays": to_json(record.arrays),
        "states": to_json(Counter(state.state for state in states)),
        "points": to_json(states),
        "exit_status": sweep_exit_status(states),
    }


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join rows into lines with aligned columns."""
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(padded_text, row, widths)).rstrip() for row in rows]


def render_states(
    states: Sequence[PointState], width: int | None = None, height: int | None = None, sorted_by: str | None = None
) -> list[str]:
    """A line per point, and the number of points by state.

    If they do not fit the ``height`` of a terminal, one line stands for the points that matter least.
    Named values such as the loss, and first the one in ``sorted_by``, have a column each if any point logged them.
    To fit the ``width`` of a terminal, causes are cut, though not below ``LEAST_CAUSE_WIDTH`` characters, and then
    some columns are left out.
    """
    names = dict.fromkeys(VALUES_SHOWN if sorted_by is None else (sorted_by, *VALUES_SHOWN))
    results = [name for name in names if any(name in state.results for state in states)]
    head = ("", "point", "state", "items", *results, *LAST_COLUMNS)
    table = [head, *(_row(state, results) for state in states)]
    causes = [" ".join((state.cause or "").split()) for state in states]
    wanted = min(max(map(text_width, causes), default=0), LEAST_CAUSE_WIDTH)
    for name in (None, *LEFT_OUT):
        if name is not None:
            at = table[0].index(name)
            table = [(*row[:at], *row[at + 1 :]) for row in table]
        start = max(map(text_width, align_columns([(*row, "|") for row in table]))) - 1
        if width is None or width - start >= wanted:
            break
    room = None if width is None else max(width - start, LEAST_CAUSE_WIDTH)
    rows = [
        (*row, cause) for row, cause in zip(table, ("cause", *(cut_text(cause, room) for cause in causes)), strict=True)
    ]
    heading, *lines = align_columns(rows)
    if height is not None and len(lines) + 2 > height:  # with the heading and the sums
        ordered = sorted(range(len(states)), key=lambda index: _urgency(states[index]), reverse=True)
        shown, folded = sorted(ordered[: max(1, height - 3)]), ordered[max(1, height - 3) :]
        lines = [lines[index] for index in shown]
        lines.append(f"and {len(folded)} more: {_counts_text([states[index] for index in sorted(folded)])}")
    return [heading, *lines, f"{len(states)} points: {_counts_text(states)}"]


def _urgency(state: PointState) -> int:
    """How much a point matters to who watches: those that failed most, then those that run, then those that wait."""
    return {"COMPLETED": 0, "PENDING": 1, "RUNNING": 2}.get(state.state, 3)


def _counts_text(states: Iterable[PointState]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(state.state for state in states).items())


def _row(state: PointState, results: Sequence[str]) -> tuple[str, ...]:
    return (
        str(state.index),
        state.name,
        state.state,
        _items_text(state),
        *(f"{state.results[name]:.4g}" if name in state.results else "" for name in results),
        "" if state.duration_s is None else duration_text(state.duration_s),
        state.job_id or "",
        ",".join(state.nodes[:2]) + (",..." if len(state.nodes) > 2 else ""),
    )


def _items_text(state: PointState) -> str:
    if state.items is None:
        return ""
    of = f"/{state.items_expected:.0f}" if state.items_expected is not None else ""
    return f"{state.items:.0f}{of}"
