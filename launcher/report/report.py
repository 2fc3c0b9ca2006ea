"""Build the report of a job from its run directory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, read_manifest
from exporter.gpus.analysis.node_status import account_gpus, worker_devices
from exporter.progress.work import job_work
from exporter.workers.exit_reason import CONSEQUENCES, JobStop, parse_job_stop
from launcher.report.exit_reasons import ExitReasonFinder
from launcher.report.gpus import read_gpu_events
from launcher.report.restarts import add_earlier_failures, restart_causes
from launcher.report.state import (
    EXIT_STATUS,
    job_cause,
    job_end_state,
    stop_cause,
    stop_from_slurm,
    tolerated_failures,
    verification_entry,
)
from launcher.report.workers import (
    add_peer_evidence,
    add_restart_evidence,
    last_end,
    read_runs,
    restart_limits,
    worker_entry,
)
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.statuses import merge_workers, read_statuses

if TYPE_CHECKING:
    from launcher.report.attached import Judgement
    from launcher.verify.timed_reads import OutOfTime, ReportProgress
    from launcher.verify.verify import VerificationCheck

REPORT_SCHEMA = 1
REPORT_TEXT_FILE = "report.md"

Runs = dict[int, list[dict[str, Any]]]  # runs of tasks by rank, oldest first


@dataclass(frozen=True)
class _RunDirContents:
    """Content of a run directory besides the records of its workers."""

    manifest: Manifest
    orchestrator: Mapping[str, Any]
    statuses: Mapping[str, Mapping[str, Any]]  # last statuses of the sidecars, by node
    job_state: Mapping[str, Any]  # content of `state.json`

    @classmethod
    def read(cls, run_dir: Path, next_attempt: int | None = None) -> "_RunDirContents":
        """Read the files of the current attempt; ``next_attempt`` is an attempt that has no files yet."""
        if next_attempt is not None:
            return cls(read_manifest(run_dir), {"attempt": next_attempt}, {}, {})
        orchestrator: Any = run_files.read_json(run_dir / run_files.ORCHESTRATOR_FILE) or {}
        statuses = read_statuses(run_dir, int(orchestrator.get("attempt", 0)))
        return cls(read_manifest(run_dir), orchestrator, statuses, _read_job_state(run_dir))

    @property
    def attempt(self) -> int:
        return int(self.orchestrator.get("attempt", 0))

    @cached_property
    def hosts(self) -> list[str]:
        """Host names in the order of the plan."""
        return [str(host) for host in self.orchestrator.get("hosts", ())]

    @cached_property
    def nodes(self) -> dict[int, str]:
        """Node of each task, by rank."""
        hosts = self.hosts
        return {
            task.rank: hosts[task.node_index] if task.node_index < len(hosts) else f"node index {task.node_index}"
            for task in self.manifest.tasks
        }


def _read_job_state(run_dir: Path) -> Mapping[str, Any]:
    return run_files.read_json(run_dir / run_files.STATE_FILE) or {}


def build_report(
    run_dir: Path,
    *,
    now: float,
    ended: bool,
    next_attempt: int | None = None,
    ends: Mapping[int, Mapping[str, Any]] | None = None,
    job_end: float | None = None,
    slurm_state: str | None = None,
    launch: Mapping[str, Any] | None = None,
    finder: ExitReasonFinder | None = None,
    quick: bool = False,
    out_of_time: "OutOfTime" = lambda: False,
    progress: "ReportProgress | None" = None,
) -> dict[str, Any]:
    """Build the report of the job in ``run_dir``; set ``ended`` if nothing of it runs any more.

    ``next_attempt`` selects an attempt that has not begun. ``launch`` is the result of the launch check.
    ``slurm_state`` is Slurm's state of a job whose orchestrator was lost without publishing a reason.

    ``ends`` are the last ends by rank that the orchestrator saw, which may lack records. ``finder`` is the
    finder of their exit reasons, which has already read the logs. A ``quick`` report reads no logs or output
    files and verifies nothing; positions come from the statuses. During verification, ``out_of_time`` is polled
    and ``progress`` is called.
    """
    found = _RunDirContents.read(run_dir, next_attempt)
    manifest, orchestrator, statuses = found.manifest, found.orchestrator, found.statuses
    finder = finder or ExitReasonFinder(manifest, found.attempt, job_end)
    if quick:
        finder = finder.without_log_reads()
    runs, stop = _read_all_runs(found, finder, slurm_state)
    if stop is None and next_attempt is None and (published := _read_job_state(run_dir)).get("stop"):
        # the stop was published while we read the records, so records may show its effects
        found = replace(found, job_state=published)
        runs, stop = _read_all_runs(found, finder, slurm_state)
    workers = _worker_entries(found, finder, runs, stop, ends or {}, ended=ended, quick=quick)
    planned = benchmark = None
    if ended:
        from launcher.report.verification import read_benchmark, verify_job  # lazy: file formats take 50 ms to load

        planned, benchmark = read_benchmark(run_dir, manifest, workers)
    judgement = _judge_attached(found, workers) if ended and manifest.attached else None
    cause = job_cause(judgement.known if judgement else workers) or stop_cause(found.job_state.get("stop"))
    restarted = restart_causes(workers)
    if cause is not None:
        add_earlier_failures(cause, restarted)
        cause["diagnosis"] = _diagnosis(run_dir, cause, found.attempt)
    checks: list[VerificationCheck] = []
    if judgement and judgement.check:
        state, checks = judgement.state, [judgement.check]
    else:
        state = job_end_state(workers, cause, stop.reason if stop else None, ended)
    if state == "COMPLETED" and not quick:
        verified = verify_job(
            manifest,
            workers,
            found.attempt,
            orchestrator.get("start"),
            statuses,
            out_of_time,
            progress,
            planned=planned,
            results=benchmark,
        )
        checks += [check for check in verified if check.name not in [judged.name for judged in checks]]
        if any(check.passed is False for check in checks):
            state = "INCOMPLETE"
    start = orchestrator.get("start")
    end = now if ended else None
    duration = (end or now) - start if isinstance(start, int | float) else None
    return {
        "schema": REPORT_SCHEMA,
        "job_id": orchestrator.get("job_id", job_id_of(run_dir)),
        "job_name": manifest.job_name,
        "attempt": found.attempt,
        "state": state,
        "exit_status": EXIT_STATUS[state],
        "cause": cause,
        "tolerated": tolerated_failures(workers),
        "restarted": restarted,
        "stopped": {"reason": stop.reason, "cause": stop.cause, "time": stop.time} if stop else None,
        "start": start,
        "end": end,
        "duration_s": duration,
        **_work(manifest, workers, duration),
        **({"benchmark": benchmark} if benchmark is not None else {}),
        "verification": verification_entry(state, [check.to_json() for check in checks]),
        "gpus": account_gpus(statuses, read_gpu_events(run_dir, start)),
        "launch": launch,
        "diagnoses": _diagnoses(run_dir, workers),
        "monitoring": _monitoring(found, ended),
        "nodes": found.hosts,
        "workers": workers,
        "run_dir": str(run_dir),
    }


def _read_all_runs(
    found: _RunDirContents, finder: ExitReasonFinder, slurm_state: str | None
) -> tuple[Runs, JobStop | None]:
    """Runs of all tasks by rank, and the stop of the job: published, else derived from Slurm's state."""
    manifest, nodes, stop = found.manifest, found.nodes, parse_job_stop(found.job_state)
    runs = _runs_with_stop(found, finder, stop)
    if stop is None and slurm_state is not None:
        stop = stop_from_slurm(slurm_state, found.hosts, nodes, runs)
        runs = _runs_with_stop(found, finder, stop)
    add_peer_evidence(finder, manifest, runs, nodes, stop)
    return runs, stop


def _runs_with_stop(found: _RunDirContents, finder: ExitReasonFinder, stop: JobStop | None) -> Runs:
    return {
        task.rank: read_runs(finder, found.manifest, task, found.attempt, found.nodes[task.rank], stop)
        for task in found.manifest.tasks
    }


def _worker_entries(
    found: _RunDirContents,
    finder: ExitReasonFinder,
    runs: Runs,
    stop: JobStop | None,
    ends: Mapping[int, Mapping[str, Any]],
    *,
    ended: bool,
    quick: bool,
) -> list[dict[str, Any]]:
    """Entries of all workers, by rank."""
    workers, seen = [], merge_workers(found.statuses)
    for task in found.manifest.tasks:
        node, entry = found.nodes[task.rank], seen.get(task.rank, {})
        exit_ = last_end(finder, task, node, runs[task.rank], stop, ends.get(task.rank), ended)
        devices = worker_devices(entry, found.statuses.get(node, {}).get("gpus") or {})
        worker = worker_entry(
            found.manifest, task, found.attempt, node, runs[task.rank], exit_, entry, ended=ended, quick=quick
        )
        workers.append({**worker, "gpu_devices": devices, "gpu_misplaced": entry.get("gpu_misplaced")})
    if ended:
        add_restart_evidence(workers, restart_limits(found.manifest.run_dir, workers))
    return workers


def _judge_attached(found: _RunDirContents, workers: list[dict[str, Any]]) -> "Judgement":
    """Judge an attached job, some of whose ends may be unknown."""
    from exporter.logs.lexicon_reader import lexicon_of_job  # lazy: only such a job needs the log patterns
    from launcher.report.attached import judge_ends, missing_text  # lazy: loads file formats

    severities = lexicon_of_job(found.manifest).severities
    critical = [name for name, severity in severities.items() if severity == "critical"]
    return judge_ends(found.manifest, workers, critical, missing_text(found.statuses))


def _work(manifest: Manifest, workers: list[dict[str, Any]], duration: float | None) -> dict[str, Any]:
    """Work of the job according to its workers."""
    work = job_work(workers)
    rate = work.processed / duration if work.processed is not None and duration else None
    return {
        "unit": work.unit,
        "items": work.done,
        "items_expected": work.expected_total(manifest.total_items),
        "items_processed": work.processed,
        "throughput_items_per_second": rate,
    }


def _diagnoses(run_dir: Path, workers: list[dict[str, Any]]) -> list[str]:
    """Diagnoses of failed workers, relative to the run directory."""
    failed = [worker["worker"] for worker in workers if worker["exit"] and worker["exit"]["reason"] not in CONSEQUENCES]
    names = [f"{run_files.DIAGNOSTICS_DIR}/{name}.txt" for name in dict.fromkeys(failed)]
    return [name for name in names if (run_dir / name).exists()]


def _diagnosis(run_dir: Path, cause: Mapping[str, Any], attempt: int) -> str | None:
    """Path of the diagnosis of this end; None if only an earlier run or attempt has one."""
    place = Path(run_files.DIAGNOSTICS_DIR, f"{cause['worker']}.json")
    body = run_files.read_json(run_dir / place) or {}
    same = all(body.get(key) == cause[key] for key in ("rank", "restart")) and body.get("attempt") == attempt
    return str(place.with_suffix(".txt")) if same else None


def _monitoring(found: _RunDirContents, ended: bool) -> dict[str, Any]:
    """Nodes with and without final values; before the end no values are missing."""
    statuses = found.statuses
    return {
        "nodes_with_final_values": sorted(node for node, status in statuses.items() if status.get("final")),
        "nodes_without": sorted(node for node in found.hosts if ended and not statuses.get(node, {}).get("final")),
    }


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """Write ``report.json`` and ``report.md``."""
    from launcher.report.text import render_report  # lazy: `watch` writes no report

    run_files.write_json(run_dir / run_files.REPORT_FILE, report)
    temporary = run_dir / f".{REPORT_TEXT_FILE}.tmp"
    temporary.write_text(render_report(report), encoding="utf-8", errors="replace")
    temporary.replace(run_dir / REPORT_TEXT_FILE)
