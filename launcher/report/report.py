"""Build the report of a job from its run directory."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest, read_manifest
from exporter.contract.records import JsonObject
from exporter.contract.report import EndCause, LaunchReport, Monitoring, Report, Stop, Verification, WorkerReport
from exporter.contract.status import LoggedValues, NodeStatus, Position, WorkerEnd, WorkerStatus
from exporter.contract.user_state import make_private_folder
from exporter.gpus.analysis.node_status import account_gpus, worker_devices
from exporter.progress.work import job_work
from exporter.workers.exit_reason import CONSEQUENCES, JobStop, parse_job_stop
from launcher.report.exit_reasons import ExitReasonFinder, TaskRun
from launcher.report.gpus import read_gpu_events
from launcher.report.inputs import NOTHING_KNOWN, UNHURRIED, KnownEnds, ReportPace
from launcher.report.restarts import restart_causes, with_earlier_failures
from launcher.report.state import (
    BATCH_LOST,
    EXIT_STATUS,
    end_before_start,
    job_cause,
    job_end_state,
    stop_cause,
    stop_from_slurm,
    tolerated_failures,
)
from launcher.report.workers import (
    add_peer_evidence,
    add_stop_evidence,
    exit_counts,
    is_to_be_restarted,
    last_end,
    last_known_position,
    read_runs,
    restart_limits,
    stalled_s,
    state_of_worker,
    with_earlier_positions,
    with_restart_evidence,
)
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import (
    JobStateRecord,
    OrchestratorRecord,
    read_job_state,
    read_orchestrator,
    report_path_elsewhere,
)
from launcher.rundir.statuses import merge_workers, read_statuses

if TYPE_CHECKING:
    from launcher.report.attached import Judgement

REPORT_TEXT_FILE = "report.md"

Runs = dict[int, list[TaskRun]]  # runs of tasks by rank, oldest first


@dataclass(frozen=True)
class _RunDirContents:
    """Content of a run directory besides the records of its workers."""

    manifest: Manifest
    orchestrator: OrchestratorRecord
    statuses: Mapping[str, NodeStatus]  # last statuses of the sidecars, by node
    job_state: Mapping[str, object]  # content of `state.json`

    @classmethod
    def read(cls, run_dir: Path, known: KnownEnds, next_attempt: int | None = None) -> "_RunDirContents":
        """Read the files of the current attempt; ``next_attempt`` is an attempt that has no files yet."""
        if next_attempt is not None:
            return cls(read_manifest(run_dir), OrchestratorRecord(attempt=next_attempt), {}, {})
        orchestrator = known.orchestrator or read_orchestrator(run_dir) or OrchestratorRecord()
        statuses = read_statuses(run_dir, orchestrator.attempt)
        job_state = read_job_state(run_dir, orchestrator.attempt) if known.job_state is None else known.job_state
        return cls(read_manifest(run_dir), orchestrator, statuses, job_state)

    @cached_property
    def nodes(self) -> dict[int, str]:
        """Node of each task, by rank."""
        hosts = self.orchestrator.hosts
        return {
            task.rank: hosts[task.node_index] if task.node_index < len(hosts) else f"node index {task.node_index}"
            for task in self.manifest.tasks
        }


def build_report(
    run_dir: Path,
    *,
    now: float,
    ended: bool,
    next_attempt: int | None = None,
    known: KnownEnds = NOTHING_KNOWN,
    launch: LaunchReport | None = None,
    pace: ReportPace = UNHURRIED,
) -> Report:
    """Build the report of the job in ``run_dir``; set ``ended`` if nothing of it runs any more.

    ``next_attempt`` selects an attempt that has not begun.
    """
    found = _RunDirContents.read(run_dir, known, next_attempt)
    manifest, orchestrator, start = found.manifest, found.orchestrator, found.orchestrator.start
    finder = known.finder or ExitReasonFinder(manifest, orchestrator.attempt, known.job_end)
    finder = (finder.without_log_reads() if pace.is_quick else finder).with_snapshot()
    runs, stop = _read_all_runs(found, finder, known.slurm_state, pace)
    may_be_published = stop is None and next_attempt is None and known.job_state is None
    if may_be_published and (published := read_job_state(run_dir, orchestrator.attempt)).get("stop"):
        # the stop was published while we read the records, so records may show its effects
        found, finder = replace(found, job_state=published), finder.with_snapshot()
        runs, stop = _read_all_runs(found, finder, known.slurm_state, pace)
    workers = _worker_entries(found, finder, runs, stop, known.ends, ended=ended, quick=pace.is_quick)
    benchmark: tuple[JsonObject, ...] | None = None
    restarted = restart_causes(workers)
    judgement = _judge_attached(found, workers) if ended and manifest.attached else None
    cause = job_cause(judgement.known if judgement else workers) or stop_cause(found.job_state.get("stop"))
    state = job_end_state(workers, cause, stop, ended)
    if state == "FAILED" and cause is None and known.slurm_state == "OUT_OF_MEMORY":
        state = known.slurm_state  # the record of the worker is lost, too
    if state == "COMPLETED":
        cause = None  # a part of gpujob was lost after the work was done
    if cause is not None and not ended and stop is None and is_to_be_restarted(run_dir, cause):
        cause = None
    of_workers = None
    if judgement and judgement.check:
        state, of_workers = judgement.state, judgement.check
    verification, stopped = Verification(), stop
    if ended:
        from launcher.report.verification import EndedJob, verify_ended_job  # lazy: file formats take 50 ms to load

        # if the clock was set back, files of the job are older than its start
        begun = start if start is None or known.elapsed_s is None else min(start, now - known.elapsed_s)
        warning = JobStateRecord.of_content(found.job_state).warning
        contents = EndedJob(
            manifest, orchestrator.attempt, begun, found.statuses, tuple(workers), known.incomplete, warning
        )
        exit_state = state
        workers, benchmark, state, verification = verify_ended_job(contents, state, pace, of_workers)
        if warning is not None and (exit_state, state) == ("COMPLETED", "TIMEOUT"):
            text = f"the workers ended after {warning.signal}, which came before the time limit"
            stopped = JobStop("time_limit", text, warning.time)
    if cause is not None:
        cause = with_earlier_failures(cause, restarted)
        cause = cause.replace(diagnosis=_diagnosis(run_dir, cause, orchestrator.attempt))
    over_at: float | None = now
    if ended and known.is_past:
        over_at = _last_sign_of_life(found, workers, now)
    elif ended and manifest.attached:
        over_at = _last_exit(workers) or now
    end = over_at if ended else None
    duration = max(0.0, over_at - start) if start is not None and over_at is not None else None
    duration = duration if known.elapsed_s is None else known.elapsed_s
    work = job_work(workers)
    rate = work.processed / duration if work.processed is not None and duration else None
    return Report(
        job_id=orchestrator.job_id or job_id_of(run_dir),
        job_name=manifest.job_name,
        attempt=orchestrator.attempt,
        state=state,
        exit_status=EXIT_STATUS[state],
        why=(of_workers.detail,) if of_workers else (),
        cause=cause,
        tolerated=tuple(tolerated_failures(workers)),
        restarted=tuple(restarted),
        stopped=Stop(reason=stopped.reason, cause=stopped.cause, time=stopped.time) if stopped else None,
        start=start,
        end=end,
        duration_s=duration,
        unit=work.unit,
        items=work.done,
        items_expected=work.expected_total(manifest.total_items),
        items_processed=work.processed,
        throughput_items_per_second=rate,
        benchmark=benchmark,
        verification=verification,
        gpus=account_gpus(found.statuses, read_gpu_events(run_dir, start)),
        launch=launch,
        diagnoses=_diagnoses(run_dir, workers),
        monitoring=_monitoring(found, ended),
        nodes=orchestrator.hosts,
        workers=tuple(workers),
        run_dir=str(run_dir),
        incomplete=known.incomplete,
    )


def _last_sign_of_life(found: _RunDirContents, workers: Iterable[WorkerReport], now: float) -> float | None:
    """When the job was last seen, which is its end if nobody saw that; None if it never was."""
    signs: list[object] = [found.orchestrator.start, found.job_state.get("time")]
    signs += [status.time for status in found.statuses.values()]
    signs += [worker.exit.time for worker in workers if worker.exit is not None]
    seen = [float(sign) for sign in signs if isinstance(sign, int | float) and sign]
    return min(now, max(seen)) if seen else None


def _last_exit(workers: Sequence[WorkerReport]) -> float | None:
    """When the last worker ended; None if that is not known of all.

    It is the end of an attached job, whose report comes some seconds later: a script may restart its workers.
    """
    times = [worker.exit.time if worker.exit is not None else None for worker in workers]
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None


def _read_all_runs(
    found: _RunDirContents, finder: ExitReasonFinder, slurm_state: str | None, pace: ReportPace
) -> tuple[Runs, JobStop | None]:
    """Runs of all tasks by rank, and the stop of the job: published, else derived from Slurm's state."""
    manifest, nodes, stop = found.manifest, found.nodes, parse_job_stop(found.job_state)
    tasks, attempt = manifest.tasks, found.orchestrator.attempt
    out_of_time = (lambda: True) if pace.is_quick else pace.out_of_time_for_runs
    runs = read_runs(finder, tasks, attempt, nodes, stop, out_of_time)
    if stop is None and slurm_state is not None:
        failure = end_before_start(manifest.run_dir) if found.orchestrator.start is None else BATCH_LOST
        stop = stop_from_slurm(slurm_state, found.orchestrator.hosts, nodes, runs, failure)
        runs = read_runs(finder, tasks, attempt, nodes, stop, out_of_time)
    add_peer_evidence(finder, manifest, runs, nodes, stop)
    add_stop_evidence(finder, manifest, runs, nodes, stop)
    return runs, stop


def _worker_entries(
    found: _RunDirContents,
    finder: ExitReasonFinder,
    runs: Runs,
    stop: JobStop | None,
    ends: Mapping[int, WorkerEnd],
    *,
    ended: bool,
    quick: bool,
) -> list[WorkerReport]:
    """Entries of all workers, by rank."""
    workers, seen = [], merge_workers(found.statuses)
    for task in found.manifest.tasks:
        node, own = found.nodes[task.rank], runs[task.rank]
        status = seen.get(task.rank) or WorkerStatus(worker=task.worker, rank=task.rank)
        exit_ = last_end(finder, task, node, own, stop, ends.get(task.rank), ended)
        position = Position.of(status)
        if ended and not quick and own and (status.items is None or status.exit is None):
            position = last_known_position(finder, task, node, own[-1], status)
        gpus = found.statuses[node].gpus if node in found.statuses else None
        entry = WorkerReport.join(
            position,
            LoggedValues.of(status),
            worker=task.worker,
            role=task.role,
            rank=task.rank,
            critical=task.critical,
            node=node,
            gpus=tuple(task.gpus),
            up=bool(own) and exit_ is None,
            state=state_of_worker(own, exit_, ended=ended, stalled=bool(status.stalled)),
            start=own[-1].start if own else None,
            restarts=max(own[-1].restart if own else 0, (exit_.restart or 0) if exit_ else 0),
            exit=exit_,
            exits=tuple(run.exit for run in own if run.exit is not None),
            exit_counts=exit_counts(own, status),
            stalled_s=stalled_s(status, exit_, stop),
            cpu_s=status.cpu_s,
            log_errors=status.log_errors,
            gpu_devices=worker_devices(status, gpus),
            gpu_misplaced=status.gpu_misplaced,
        )
        workers.append(entry)
    if ended and not quick and found.orchestrator.attempt:
        workers = with_earlier_positions(found.manifest, found.orchestrator.attempt, workers)
    limits = restart_limits(found.manifest.run_dir, workers) if ended else {}
    return [with_restart_evidence(worker, limits.get(worker.rank, 0)) for worker in workers]


def _judge_attached(found: _RunDirContents, workers: Sequence[WorkerReport]) -> "Judgement":
    """Judge an attached job, some of whose ends may be unknown."""
    from exporter.logs.lexicon_reader import lexicon_of_job  # lazy: only such a job needs the log patterns
    from launcher.report.attached import judge_ends, missing_text  # lazy: loads file formats

    severities = lexicon_of_job(found.manifest).severities
    critical = [name for name, severity in severities.items() if severity == "critical"]
    return judge_ends(found.manifest, workers, critical, missing_text(found.statuses))


def _diagnoses(run_dir: Path, workers: Sequence[WorkerReport]) -> tuple[str, ...]:
    """Diagnoses of failed workers, relative to the run directory."""
    failed = [worker.worker for worker in workers if worker.exit and worker.exit.reason not in CONSEQUENCES]
    names = [f"{run_files.DIAGNOSTICS_DIR}/{name}.txt" for name in dict.fromkeys(failed)]
    return tuple(name for name in names if (run_dir / name).exists())


def _diagnosis(run_dir: Path, cause: EndCause, attempt: int) -> str | None:
    """Path of the diagnosis of this end; None if only an earlier run or attempt has one."""
    place = Path(run_files.DIAGNOSTICS_DIR, f"{cause.worker}.json")
    body = run_files.read_json(run_dir / place) or {}
    same = (body.get("rank"), body.get("restart"), body.get("attempt")) == (cause.rank, cause.restart, attempt)
    return str(place.with_suffix(".txt")) if same else None


def _monitoring(found: _RunDirContents, ended: bool) -> Monitoring:
    """Nodes with and without final values; before the end no values are missing."""
    final = {node for node, status in found.statuses.items() if status.final}
    missing = set(found.orchestrator.hosts) - final if ended else ()
    return Monitoring(nodes_with_final_values=tuple(sorted(final)), nodes_without=tuple(sorted(missing)))


def archive(path: Path, attempt: int) -> None:
    """Number a file or directory of an earlier attempt, if it exists: ``report_a0.json``. Raises OSError."""
    if path.exists():
        path.replace(path.with_name(f"{path.stem}_a{attempt}{path.suffix}"))


def write_report(run_dir: Path, report: Report) -> Path:
    """Write ``report.json`` and ``report.md``; return the path of the first.

    If the run directory has no room, they go to the user's state directory. Raises OSError if that fails too.
    """
    from launcher.report.text import render_report  # lazy: `watch` writes no report

    path, mode = run_dir / run_files.REPORT_FILE, None
    try:
        run_files.write_json(path, report.to_json())
    except OSError:
        earlier, elsewhere = path, report_path_elsewhere(run_dir, os.environ)
        if elsewhere is None:
            raise
        path, mode = elsewhere, 0o600
        make_private_folder(path.parent)
        run_files.write_json(path, report.to_json(), mode=mode)
        for name in (earlier, run_dir / REPORT_TEXT_FILE):
            with contextlib.suppress(OSError):
                name.unlink()  # it would hide this one
    with contextlib.suppress(OSError):  # `gpujob report` renders it again
        text = render_report(report).encode("utf-8", "replace")
        run_files.replace_file(
            path.with_name(REPORT_TEXT_FILE) if mode is None else path.with_suffix(".md"), text, mode=mode
        )
    return path
