"""Which jobs a tracking run follows: ids, jobs and sweeps of gpujob, names in the queue, or all jobs of the user."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.records import NOTHING
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import MOST_ASKED, SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import QueueRow
from exporter.slurm.states import ENDS, JOB_ID, MOST_TASKS, array_of, is_part_of, task_ids, tells_all_tasks
from exporter.slurm.tracking import TrackedJob
from launcher.errors import LauncherError
from launcher.fleet.own_runs import run_dir_of
from launcher.pipeline.directory import read_record as read_pipeline
from launcher.registry.entries import LOCAL_PREFIX, read_own_entries
from launcher.registry.search import find_job, is_pipeline, is_sweep
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import submitted_cluster
from launcher.sweep.directory import read_record
from launcher.words import count_text

_ID = re.compile(JOB_ID)


class OwnRun(NamedTuple):
    """A job that gpujob launched."""

    name: str
    run_dir: Path


class Selection(NamedTuple):
    """What is wanted, before Slurm has been asked."""

    ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of jobs in the queue
    own_runs: Mapping[str, OwnRun] = NOTHING  # by job id, of those that are named
    cluster: str | None = None  # None for the cluster of this machine
    notices: tuple[str, ...] = ()  # about how jobs of gpujob were found

    @property
    def is_everything(self) -> bool:
        return not (self.ids or self.names)

    @property
    def is_fixed(self) -> bool:
        """Whether it names jobs by their ids alone, which never mean other jobs."""
        return bool(self.ids) and not (self.names or self.own_runs)


def select(words: Sequence[str], environ: Mapping[str, str], workdir: Path) -> Selection:
    """Find what the words mean; of several jobs of gpujob with one name, the newest. Raises LauncherError."""
    own_names = {entry.job_name for entry in read_own_entries(environ)}
    ids, names, own_runs, clusters = list[str](), list[str](), dict[str, OwnRun](), set[str | None]()
    notices = list[str]()
    for word in words:
        if _ID.fullmatch(word):
            try:
                ids += task_ids(word)
            except ValueError as error:
                raise LauncherError(f"{word}: {error}; write it as in 4459_[0-7]") from error
            if not tells_all_tasks(word):
                raise LauncherError(f"{word}: its list is cut, or has more than {MOST_TASKS:,} array indexes")
        elif word in own_names or "/" in word or (workdir / word).is_dir() or word.startswith(LOCAL_PREFIX):
            job = find_job(word, environ, workdir, takes_newest=True)
            notices += job.notices
            found, cluster = runs_of(job.directory)
            own_runs |= found
            clusters.add(cluster)
            ids += found
        else:
            names.append(word)
    if len(clusters) > 1:
        raise LauncherError("these jobs are on several clusters; give those of one cluster")
    return Selection(tuple(dict.fromkeys(ids)), tuple(names), own_runs, next(iter(clusters), None), tuple(notices))


def runs_of(directory: Path) -> tuple[dict[str, OwnRun], str | None]:
    """Jobs of a run directory, sweep or pipeline by id, and their cluster."""
    if is_pipeline(directory):
        pipeline, found = read_pipeline(directory), dict[str, OwnRun]()
        for part in pipeline.parts:
            if part.arrays:
                points, _ = runs_of(Path(part.run_dir))
                found |= {job_id: OwnRun(f"{part.name}/{run.name}", run.run_dir) for job_id, run in points.items()}
            else:
                found[part.job_id] = OwnRun(part.name, Path(part.run_dir))
        return found, pipeline.cluster
    if is_sweep(directory):
        record = read_record(directory)
        if record.local:
            raise _local_error(directory)
        runs = [(point.name, directory / point.runs[-1]) for point in record.points if point.runs]
        return {job_id_of(path): OwnRun(name, path) for name, path in runs}, next(
            (array.cluster for array in record.arrays), None
        )
    job_id = job_id_of(directory)
    if job_id.startswith(LOCAL_PREFIX):
        raise _local_error(directory)
    submission = run_files.read_json(directory / f"{job_id}.json") or {}
    return {job_id: OwnRun(str(submission.get("job_name") or job_id), directory)}, submitted_cluster(directory)


def _local_error(directory: Path) -> LauncherError:
    return LauncherError(f"{directory} ran without Slurm; follow it with `gpujob watch {directory}`")


def read_selected(
    slurm: SlurmReader, selection: Selection, prefix: str, rows: Iterable[QueueRow]
) -> dict[str, TrackedJob]:
    """The wanted jobs, out of the queue and, for ids that are not there, the accounting.

    Tasks of an array may have left the queue. Raises LauncherError and SlurmUnansweredError.
    """
    return selected_jobs(selection, slurm.user or "anybody", prefix, rows, _read_attempts(slurm, selection, rows))


def _read_attempts(slurm: SlurmReader, selection: Selection, rows: Iterable[QueueRow]) -> tuple[Attempt, ...]:
    """What accounting knows of the wanted ids that are not in the queue. Raises SlurmUnansweredError."""
    attempts: tuple[Attempt, ...] = ()
    in_queue = {task for row in rows for task in task_ids(row.job_id)}
    arrays = list(dict.fromkeys(array_of(word) for word in selection.ids if word not in in_queue))
    try:
        for first in range(0, len(arrays), MOST_ASKED):
            attempts += slurm.accounting(arrays[first : first + MOST_ASKED], 0.0)
    except SlurmUnansweredError as error:
        if not error.is_lasting:
            raise
    return attempts


def read_new(
    slurm: SlurmReader, selection: Selection, prefix: str, rows: Iterable[QueueRow], known: Collection[str]
) -> dict[str, TrackedJob]:
    """The wanted jobs that are not ``known`` from an earlier run with the same words, which may be none.

    Those that Slurm does not know are left out: the known ones are followed all the same. Raises SlurmUnansweredError.
    """
    rows = [row for row in rows if any(task not in known for task in task_ids(row.job_id))]
    ids = tuple(word for word in selection.ids if not any(is_part_of(job_id, word) for job_id in known))
    names = tuple(name for name in selection.names if any(row.name == name for row in rows))
    new = selection._replace(ids=ids, names=names)
    if new.is_everything and not selection.is_everything:
        return {}
    found = _wanted_rows(new, rows, _read_attempts(slurm, new, rows))
    return {row.job_id: _tracked(row, new.own_runs.get(row.job_id), prefix) for row in found if row.job_id not in known}


def selected_jobs(
    selection: Selection, user: str, prefix: str, rows: Iterable[QueueRow], attempts: Iterable[Attempt]
) -> dict[str, TrackedJob]:
    """The wanted jobs, out of the first answers of Slurm. Raises LauncherError for those that Slurm does not know."""
    wanted = _wanted_rows(selection, rows, attempts)
    missing = [word for word in selection.ids if not any(is_part_of(row.job_id, word) for row in wanted)]
    missing += [name for name in selection.names if not any(row.name == name for row in wanted)]
    if missing:
        what = count_text(len(missing), "job")
        raise LauncherError(
            f"{', '.join(missing)}: Slurm knows no such job of {user}; give an id that `squeue -u {user}` or `sacct` "
            f"shows, or the owner of the {what} with --user"
        )
    if not wanted:
        raise LauncherError(f"{user} has no job in Slurm's queue that has not ended; give the ids of jobs that have")
    return {row.job_id: _tracked(row, selection.own_runs.get(row.job_id), prefix) for row in wanted}


def _wanted_rows(selection: Selection, rows: Iterable[QueueRow], attempts: Iterable[Attempt]) -> list[QueueRow]:
    """One row for each wanted job, out of the queue or of its last attempt."""
    rows = [row._replace(job_id=task) for row in rows for task in task_ids(row.job_id)]
    in_queue = {row.job_id for row in rows}
    in_order = sorted(attempts, key=lambda attempt: attempt.snapshot.submitted or 0.0)  # earlier jobs may have its id
    last = {task: attempt for attempt in in_order for task in task_ids(attempt.job_id)}
    rows += [QueueRow(task, each.snapshot, each.name, None) for task, each in last.items() if task not in in_queue]
    return [row for row in rows if _is_wanted(row, selection)]


def _is_wanted(row: QueueRow, selection: Selection) -> bool:
    if selection.is_everything:
        return row.snapshot.state not in ENDS
    return row.name in selection.names or any(is_part_of(row.job_id, word) for word in selection.ids)


def _tracked(row: QueueRow, own: OwnRun | None, prefix: str) -> TrackedJob:
    """The job before its first change: every job begins as PENDING."""
    _, mark, part = row.job_id.replace("+", "_").partition("_")
    name = own.name if own is not None else f"{row.name}/{part}" if mark else row.name
    run_dir = own.run_dir if own is not None else run_dir_of(row.output)
    return TrackedJob(
        job_id=row.job_id,
        name=f"{prefix}/{name}" if prefix else name,
        attempt=row.snapshot.restarts + 1,
        restarts=row.snapshot.restarts,
        submitted=row.snapshot.submitted,
        log=row.output if run_dir is None else f"{run_dir}/",
        run_dir=None if run_dir is None else str(run_dir),
    )
