"""Jobs that gpujob launched: progress of those in the queue, and jobs of this machine, within a bounded time."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from exporter.contract import run_files
from exporter.contract.manifest import read_manifest
from exporter.contract.records import NOTHING
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.sources.cached_answers_reader import configured_cluster
from exporter.slurm.states import array_of
from launcher.errors import LauncherError
from launcher.registry.bounded_reads import DEADLINE_S, T, V, read_some
from launcher.registry.entries import LOCAL_PREFIX, PIPELINE_PREFIX, JobEntry, read_own_entries

if TYPE_CHECKING:
    from exporter.contract.report import GpuSums
    from exporter.contract.status import EtaEstimate, HealthReason

MOST_RUNS = 64  # directories that one command reads where not all matter: a status takes some milliseconds


class NodeHealth(NamedTuple):
    """Health of a node's GPUs, as a sidecar reports it."""

    health: str
    time: float
    reasons: "tuple[HealthReason, ...]" = ()


class Pipeline(NamedTuple):
    """A pipeline to which a job belongs."""

    run_id: str  # in the index of jobs
    name: str


class RunProgress(NamedTuple):
    """How far a job is, or was at its end."""

    run_dir: str
    items: float | None = None
    items_expected: float | None = None
    unit: str | None = None
    eta: "EtaEstimate | None" = None
    stalled: bool = False  # all its workers
    health: Mapping[str, NodeHealth] = NOTHING  # by node
    gpus: "GpuSums | None" = None  # None without GPUs, or if a sidecar has not seen them
    limit_end: float | None = None  # when the time limit ends it, as last read from Slurm


def run_dir_of(output: str | None) -> Path | None:
    """The run directory in which Slurm writes the output of a job that gpujob launched."""
    folder = None if output is None else Path(output).parent
    try:
        return folder if folder is not None and (folder / run_files.MANIFEST_FILE).is_file() else None
    except OSError:
        return None  # in a directory that we may not search


def read_progress(outputs: Mapping[str, str], now: float) -> dict[str, RunProgress]:
    """Progress of jobs by id, from the files of their standard output. Jobs of others have none."""
    found = read_within(outputs.items(), lambda entry: _read_run(entry[1], now))
    return {job_id: run for (job_id, _), run in found if run is not None}


def _read_run(output: str, now: float) -> RunProgress | None:
    run_dir = run_dir_of(output)
    if run_dir is None:
        return None
    from exporter.gpus.analysis.node_status import account_gpus  # lazy: with the next ones a tenth of `ps`
    from exporter.progress.work import job_eta, job_work, unit_word, with_current_eta  # lazy: as above
    from launcher.rundir.job_records import OrchestratorRecord, read_report  # lazy: as above
    from launcher.rundir.statuses import merge_workers, read_statuses  # lazy: as above

    orchestrator = OrchestratorRecord.read_valid(run_dir / run_files.ORCHESTRATOR_FILE)
    report = read_report(run_dir)
    if report is not None and (orchestrator is None or report.attempt == orchestrator.attempt):
        return RunProgress(str(run_dir), report.items, report.items_expected, unit_word(report.unit), gpus=report.gpus)
    statuses = {} if orchestrator is None else read_statuses(run_dir, orchestrator.attempt)
    workers = [with_current_eta(worker, now) for worker in merge_workers(statuses).values()]
    work, total_items = job_work(workers), read_manifest(run_dir).total_items
    at_work = [worker for worker in workers if worker.up]
    return RunProgress(
        str(run_dir),
        work.done,
        work.expected_total(total_items),
        None if work.done is None else unit_word(work.unit),
        job_eta(workers, total_items),
        bool(at_work) and all(worker.stalled for worker in at_work),
        {
            node: NodeHealth(status.gpus.health, status.time, status.gpus.reasons)
            for node, status in statuses.items()
            if status.gpus is not None and status.gpus.health is not None
        },
        account_gpus(statuses),
        next((status.job.end for status in statuses.values() if status.job.end), None),
    )


def read_idle(environ: Mapping[str, str], job_ids: Collection[str], since: float) -> dict[str, float]:
    """GPU seconds in which sidecars saw idle GPUs, of running jobs of this user that began after ``since``."""
    wanted = {*job_ids, *map(array_of, job_ids)}
    entries = read_own_entries(environ, lambda job_id: job_id in wanted) if wanted else []
    own_cluster = configured_cluster(environ) if entries else None
    run_dirs: dict[str, Path] = {}  # an id may be that of an older job too
    for entry in entries:
        if own_cluster is None or entry.slurm_cluster in (None, own_cluster):
            run_dirs.setdefault(entry.job_id, Path(entry.run_dir))
    known = [
        (job_id, run_dirs[job_id] if job_id in run_dirs else run_dirs[array_of(job_id)] / run_files.TASKS_DIR / job_id)
        for job_id in job_ids
        if {job_id, array_of(job_id)} & run_dirs.keys()
    ]
    found = read_within(known, lambda each: _read_idle(each[1], since))
    return {job_id: idle_s for (job_id, _), idle_s in found if idle_s is not None}


def _read_idle(run_dir: Path, since: float) -> float | None:
    from exporter.gpus.analysis.node_status import account_gpus  # lazy: with the next ones a tenth of `ps`
    from launcher.rundir.job_records import OrchestratorRecord  # lazy: as above
    from launcher.rundir.statuses import read_statuses  # lazy: as above

    orchestrator = OrchestratorRecord.read_valid(run_dir / run_files.ORCHESTRATOR_FILE)
    if orchestrator is None or orchestrator.start is None or orchestrator.start < since:
        return None
    gpus = account_gpus(read_statuses(run_dir, orchestrator.attempt))
    return None if gpus is None else gpus.idle_s


def read_pipelines(environ: Mapping[str, str]) -> dict[str, Pipeline]:
    """The pipelines of this user on the cluster of this machine, by the ids of their jobs and arrays."""
    entries = read_own_entries(environ, lambda run_id: run_id.startswith(PIPELINE_PREFIX))
    if not entries:
        return {}
    import launcher.pipeline.directory  # noqa: F401 - lazy: 100 ms, and few have pipelines

    found: dict[str, Pipeline] = {}
    for entry, (name, job_ids) in read_within(entries, lambda entry: _read_pipeline(Path(entry.run_dir))):
        for job_id in job_ids:
            found.setdefault(job_id, Pipeline(entry.job_id, name))  # an id may be that of an older job too
    return found


def _read_pipeline(directory: Path) -> tuple[str, list[str]]:
    """The name of a pipeline, and the ids of its jobs and arrays on the cluster of this machine."""
    from launcher.pipeline.directory import read_record  # lazy: with the next one 100 ms, and few have pipelines
    from launcher.sweep.directory import read_record as read_sweep  # lazy: as above

    record, job_ids = read_record(directory), list[str]()
    for part in record.parts if record.cluster is None else ():
        job_ids += part.job_ids
        with contextlib.suppress(LauncherError):  # that of its submission is known all the same
            job_ids += [array.job_id for array in read_sweep(Path(part.run_dir)).arrays] if part.arrays else []
    return record.name, job_ids


def read_local_jobs(environ: Mapping[str, str]) -> tuple[list[QueueRow], list[str]]:
    """Jobs and sweeps of this user that ran without Slurm, as rows like those of the queue.

    They are all jobs without a report, and the newest others. Also the ids of those that were not read in time.
    """
    known = read_own_entries(environ, lambda job_id: job_id.startswith(LOCAL_PREFIX))
    if not known:
        return [], []
    entries = list({entry.run_dir: entry for entry in known}.values())  # the first id of a sweep that was resumed
    import launcher.sweep.directory  # lazy: 100 ms; here, so that the deadline is for the reads alone
    import launcher.watch.view  # noqa: F401 - lazy: as above

    unfinished = {entry.run_dir for entry, has_none in read_some(entries, _has_no_report)[0] if has_none}
    entries.sort(key=lambda entry: entry.run_dir not in unfinished)
    rows, late = read_some(entries, _read_local, most=len(unfinished) + MOST_RUNS)
    return [row for _, row in rows], [entry.job_id for entry in late]


def late_text(late: Sequence[str]) -> str:
    """Warning about local jobs that were not read in time."""
    what = f"job {late[0]} is" if len(late) == 1 else f"{len(late)} jobs of this machine are"
    return f"{what} left out: not read within {DEADLINE_S:g} s, since the machine or the file system is slow; try again"


def _has_no_report(entry: JobEntry) -> bool:
    """Whether this is a job without a report. A sweep never has one."""
    run_dir = Path(entry.run_dir)
    return not (run_dir / run_files.REPORT_FILE).exists() and (run_dir / run_files.MANIFEST_FILE).exists()


def _read_local(entry: JobEntry) -> QueueRow:
    from launcher.registry.search import is_sweep  # lazy: with the next ones 100 ms, which few calls need
    from launcher.report.state import UNFINISHED  # lazy: as above
    from launcher.rundir.job_records import OrchestratorRecord, read_report  # lazy: as above
    from launcher.sweep.directory import read_last_end, read_point_states, read_record  # lazy: as above
    from launcher.watch.view import JobClient  # lazy: as above

    run_dir = Path(entry.run_dir)
    if is_sweep(run_dir):
        record = read_record(run_dir)
        states = [state.state for state in read_point_states(run_dir, record)]
        unfinished = next((state for state in reversed(UNFINISHED) if state in states), None)
        worst = next((state for state in states if state != "COMPLETED"), "COMPLETED")
        ended = None if unfinished else read_last_end(run_dir, record)
        return QueueRow(
            entry.job_id, AttemptSnapshot(unfinished or worst, entry.submitted, ended=ended), entry.job_name, None
        )
    manifest, report = read_manifest(run_dir), read_report(run_dir)
    orchestrator = OrchestratorRecord.read_valid(run_dir / run_files.ORCHESTRATOR_FILE) or OrchestratorRecord()
    gpus = sum(len(task.gpus) for task in manifest.tasks)
    return QueueRow(
        entry.job_id,
        AttemptSnapshot(
            JobClient(run_dir).read_state(),
            entry.submitted,
            orchestrator.start,
            None if report is None else report.end,
            limit_s=manifest.time_limit_s,
        ),
        entry.job_name,
        str(run_dir / "log.out"),
        resources=f"gres/gpu={gpus}" if gpus else "",
        user=entry.user,
        node_count=manifest.nodes,
    )


def read_ended_runs(environ: Mapping[str, str], since: float) -> list[QueueRow]:
    """Jobs of this user that have ended since then, from their reports: for a cluster without accounting."""
    entries = [entry for entry in read_own_entries(environ) if not entry.job_id.startswith(LOCAL_PREFIX)]
    return [row for row in read_reported(entries) if row.snapshot.ended is not None and row.snapshot.ended >= since]


def read_reported(entries: Iterable[JobEntry]) -> list[QueueRow]:
    """Those of these jobs that have ended, from their reports."""
    return [row for _, row in read_some(entries, _read_reported)[0] if row is not None]


def _read_reported(entry: JobEntry) -> QueueRow | None:
    from launcher.rundir.job_records import read_report  # lazy: it takes long to load

    report = read_report(Path(entry.run_dir))
    if report is None or report.requeued:
        return None
    snapshot = AttemptSnapshot(report.state, entry.submitted, report.start, report.end, report.attempt)
    gpus = 0 if report.gpus is None else report.gpus.count
    resources = f"gres/gpu={gpus}" if gpus else ""
    output = f"{entry.run_dir}/log.out"
    return QueueRow(entry.job_id, snapshot, entry.job_name, output, resources=resources, user=entry.user)


def read_within(items: Iterable[T], read: Callable[[T], V], deadline_s: float = DEADLINE_S) -> list[tuple[T, V]]:
    """Read the first items in parallel, and return what is known at the deadline, in order.

    What cannot be read is left out. Threads that wait for a mount end with the process.
    """
    return read_some(items, read, deadline_s, most=MOST_RUNS)[0]
