"""Jobs of the past: from the hub or the user's index, and from accounting only what these do not have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from exporter.hub.index_reader import History, read_history
from exporter.slurm.accounting import Attempt, Figures, gpu_counts, tres
from exporter.slurm.commands_reader import SlurmReader
from exporter.slurm.queue import QueueRow
from exporter.slurm.sources.hub_reader import HubJob
from exporter.slurm.sources.shared_answers_reader import read_shared_history
from exporter.slurm.states import ENDS
from exporter.slurm.tracking import UNKNOWN
from exporter.slurm.usage import UsageRow
from launcher.fleet.jobs_view import ended_rows
from launcher.fleet.own_runs import read_idle

ACCOUNTING = "accounting"
_Ask: TypeAlias = Callable[..., Iterable[tuple[QueueRow, Attempt]]]  # since and until


class Ended(NamedTuple):
    """Jobs that have ended."""

    rows: tuple[tuple[QueueRow, Figures | None], ...]
    source: str  # where they are from


class Used(NamedTuple):
    """What jobs took in a time."""

    rows: tuple[UsageRow, ...]
    source: str


def read_ended(
    slurm: SlurmReader, queue: Sequence[QueueRow], since: float, environ: Mapping[str, str], *, watch: bool = False
) -> Ended:
    """Jobs that ended after ``since``. Raises SlurmUnansweredError.

    Those who ``watch`` share an answer of accounting.
    """
    ask: _Ask = (lambda since, _until=None: read_shared_history(slurm, environ, since)) if watch else slurm.history
    history = read_history(slurm, environ, since)
    if history is None:
        return Ended(tuple(ended_rows(ask(since), queue)), ACCOUNTING)
    rest = _read_rest(ask, history, since)
    in_queue = {row.job_id: row for row in queue}
    found: dict[str, tuple[QueueRow, Figures | None]] = {}
    for row, figures in ended_rows(rest, queue):
        found[row.job_id] = row, figures
    for job in sorted(history.jobs, key=lambda job: job.submitted or 0.0):
        ended, listed = job.ended, in_queue.get(job.job_id)
        is_shown = job.state in ENDS and ended is not None and ended >= max(since, history.covers_since)
        if is_shown and (listed is None or listed.snapshot.ended == ended):
            found[job.job_id] = job.row() if listed is None else listed, job.figures
    return Ended(tuple(found.values()), _source(history, since))


def read_used(slurm: SlurmReader, since: float, until: float, environ: Mapping[str, str]) -> Used:
    """Every attempt after ``since``, with only the time after it. Raises SlurmUnansweredError."""
    history = read_history(slurm, environ, since)
    if history is None:
        return Used(_with_idle(slurm.usage_since(since), since, environ), ACCOUNTING)
    begin, rows = float(int(since)), list[UsageRow]()  # whole seconds, as sacct counts them
    for row, attempt in _read_rest(slurm.history, history, since):
        snapshot = attempt.snapshot
        if snapshot.started is not None:
            cut_s = max(0.0, begin - snapshot.started)
            rows.append(_usage_row(row, attempt.cpus, max(0.0, attempt.elapsed_s - cut_s)))
    for job in history.jobs:
        row = job.row()
        for started, ended, elapsed_s in attempts_of(job, until):
            is_later = not history.is_of_hub and ended >= history.covers_until
            if ended < history.covers_since or is_later:
                continue  # accounting has it
            cut_s = max(0.0, begin - started)
            whole = started == job.started and not cut_s
            idle_s = job.gpu_idle_seconds if whole else None  # of a part of an attempt it is not known
            cpus = int(tres(row.resources, "cpu") or 0)
            rows.append(_usage_row(row, cpus, max(0.0, elapsed_s - cut_s), idle_s))
    return Used(_with_idle(rows, since, environ), _source(history, since))


def _with_idle(rows: Iterable[UsageRow], since: float, environ: Mapping[str, str]) -> tuple[UsageRow, ...]:
    """The attempts, with the idle time so far of jobs of this user that run, by their status files."""
    rows = tuple(rows)
    latest = {row.job_id: number for number, row in enumerate(rows) if row.state == "RUNNING" and row.gpus}
    idle = read_idle(environ, latest, since)
    return tuple(
        row._replace(idle_s=idle[row.job_id]) if latest.get(row.job_id) == number and row.job_id in idle else row
        for number, row in enumerate(rows)
    )


def _usage_row(row: QueueRow, cpus: int, elapsed_s: float, idle_s: float | None = None) -> UsageRow:
    known = (row.job_id, row.user, row.account, row.partition, row.snapshot.state)
    return UsageRow(*known, elapsed_s, cpus, gpu_counts(row.resources), row.name, idle_s)


def attempts_of(job: HubJob, now: float) -> list[tuple[float, float, float]]:
    """Start, end and duration of each attempt of a job that has started; the duration is without suspensions."""
    found, begin = list[tuple[float, float, float]](), None
    for event in job.history:
        moment = event.seen if event.time is None else event.time
        if event.state == "RUNNING":
            begin = moment if begin is None else begin
        elif event.state != UNKNOWN and begin is not None:
            if job.started is None or begin < job.started:
                found.append((begin, moment, max(0.0, moment - begin)))
            begin = None
    if job.started is not None:
        end = now if job.ended is None else job.ended
        measured_s = None if job.figures is None or job.ended is None else job.figures.elapsed_s
        found.append((job.started, end, max(0.0, end - job.started) if measured_s is None else measured_s))
    return found


def _read_rest(ask: _Ask, history: History, since: float) -> list[tuple[QueueRow, Attempt]]:
    """What accounting has and the history has not: ends before it begins, and what happened after it ends."""
    found = list[tuple[QueueRow, Attempt]]()
    if since < history.covers_since:
        pairs = ask(since, history.covers_since)
        found += [pair for pair in pairs if (pair[1].snapshot.ended or history.covers_since) < history.covers_since]
    if not history.is_of_hub:
        pairs = ask(max(since, history.covers_until))
        found += [
            pair for pair in pairs if pair[1].snapshot.ended is None or pair[1].snapshot.ended >= history.covers_until
        ]
    return found


def _source(history: History, since: float) -> str:
    is_whole = history.is_of_hub and since >= history.covers_since
    return history.source if is_whole else f"{history.source} and {ACCOUNTING}"
