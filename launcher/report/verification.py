"""Verify a job that has ended, for its report and again later."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest, read_manifest
from exporter.contract.records import JsonObject
from exporter.contract.report import CheckResult, Report, Verification, WorkerReport
from exporter.contract.status import NodeStatus
from exporter.logs.log_files_reader import log_paths, run_suffix
from exporter.logs.search.findings import UNITS
from exporter.progress.work import counting_workers, job_work
from launcher.plan.plan import BENCHMARK
from launcher.report.inputs import ReportPace
from launcher.report.state import EXIT_STATUS, VERIFIED_STATES, deciding_workers, verification_result
from launcher.rundir.job_records import JobStateRecord, LimitWarning, read_first_start
from launcher.rundir.statuses import read_statuses
from launcher.verify.benchmark import (
    PlannedBenchmark,
    all_report_tokens,
    benchmark_check,
    missing_concurrencies,
    missing_entry,
    read_planned_benchmark,
)
from launcher.verify.benchmark_results import (
    RESULT_FILES,
    ROLE,
    has_benchmark,
    read_benchmark_results,
    with_counted_requests,
)
from launcher.verify.logged_total import short_workers, state_totals
from launcher.verify.timed_reads import ReportProgress
from launcher.verify.verify import FinishedJob, VerificationCheck, verify_results

_FILES_COUNTED = re.compile(r"(\d+) files?, \d+ bytes?")  # start of the detail on existing output files
MOST_SKEW_S = 5.0  # between the clocks of nodes; they differ by less where NTP runs
COMPLETENESS_CHECKS = (
    "outputs",
    "records",
    "tokens",
    BENCHMARK,
)  # file checks for completeness; the others check validity


def benchmark_log(attempt: int) -> str:
    """Name of the file for the output of benchmark launchers."""
    return f"benchmark{run_suffix(attempt, 0)}.out"


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended."""

    manifest: Manifest
    attempt: int
    start: float | None
    statuses: Mapping[str, NodeStatus]  # last statuses of the sidecars, by node
    workers: tuple[WorkerReport, ...]
    incomplete: str | None = None  # why lines of its logs may be missing
    warning: LimitWarning | None = None  # the signal before the time limit that its workers got


@dataclass(frozen=True)
class _EarlierCheck:
    """What an earlier verification of the same files found."""

    files: int  # output files
    files_only: bool  # whether to check only the files now


def verify_ended_job(
    job: EndedJob, state: str, pace: ReportPace, of_workers: CheckResult | None = None
) -> tuple[list[WorkerReport], tuple[JsonObject, ...] | None, str, Verification]:
    """Read the results of a job that ended in ``state``, and verify them if it completed.

    Returns its workers with the requests that its benchmark counted, the benchmark's results (None without one), the
    state, and the verification. The state is INCOMPLETE if a check failed, or TIMEOUT if work is left that the workers
    saved at the warning before the time limit. ``of_workers`` replaces its check of the workers.
    """
    planned, results, workers = _read_benchmark(job)
    checks = [of_workers] if of_workers is not None else []
    if state == "COMPLETED" and not pace.is_quick:
        found = _verify(replace(job, workers=tuple(workers)), pace, planned, results)
        checks += [check.result() for check in found if of_workers is None or check.name != of_workers.name]
        left = [check for check in checks if check.passed is False and check.name in UNITS]
        if left and _last_warning(job) is not None:
            return workers, results, "TIMEOUT", verification_result("TIMEOUT", left)
        if any(check.passed is False for check in checks):
            state = "INCOMPLETE"
    return workers, results, state, verification_result(state, checks)


def _verify(
    job: EndedJob,
    pace: ReportPace,
    planned: PlannedBenchmark | None,
    results: Sequence[JsonObject] | None,
    earlier: _EarlierCheck | None = None,
) -> list[VerificationCheck]:
    """Check an ended job, using its workers and its files. ``results`` are the measurements of the benchmark."""
    manifest, workers = job.manifest, job.workers
    of_files = any(worker.pattern == RESULT_FILES for worker in workers)
    reasons = [worker.exit.reason if worker.exit else None for worker in workers if worker.critical]
    files_only = earlier is not None and earlier.files_only
    of_benchmark = benchmark_check(planned, results or (), manifest.verify.complete_share)
    # the log has only some of the results that are in the files
    counted_by_files = of_benchmark is not None and all_report_tokens(results or ())
    finished = FinishedJob(
        manifest,
        job_work(workers),
        exit_reasons=None if files_only else reasons,
        work_source="the result files" if of_files else "the logs",
        since=_first_start(job),
        idle_ranks=[worker.rank for worker in workers if worker.items_expected == 0],
        busy_ranks=[worker.rank for worker in workers if worker.items_expected or worker.items],
        done_by_rank={worker.rank: worker.items for worker in counting_workers(workers) if worker.items is not None},
        logs=[] if counted_by_files else result_logs(job),
        statuses=job.statuses,
        is_repeated=earlier is not None,
        files_before=earlier.files if earlier is not None else 0,
        incomplete=None if of_files else job.incomplete,
        short=() if manifest.attached else short_workers(workers, manifest.verify.complete_share, _with_epochs(job)),
        has_own_totals=state_totals(workers, _with_epochs(job)),
        warning=_last_warning(job),
    )
    found = verify_results(finished, out_of_time=pace.out_of_time, progress=pace.progress)
    if of_benchmark is None:
        return found
    others = [check for check in found if check.name != "workers" and not check.is_inapplicable]
    return [*(check for check in found if check.name == "workers"), of_benchmark, *others]


def _last_warning(job: EndedJob) -> str | None:
    """The signal before the time limit after which workers ended; None if none did.

    One that ended with 0 then may have saved its state, and not completed its work.
    """
    if job.warning is None:
        return None
    warned = {task.rank for task in job.manifest.tasks if not (task.service or task.later)}
    ends = [worker.exit for worker in deciding_workers(job.workers) if worker.rank in warned]
    times = [end.time for end in ends if end is not None and end.time is not None]
    return job.warning.signal if max(times, default=0.0) >= job.warning.time - MOST_SKEW_S else None


def _with_epochs(job: EndedJob) -> set[int]:
    """Ranks whose logs count epochs: a training may stop early."""
    return {worker.rank for status in job.statuses.values() for worker in status.workers if worker.epoch is not None}


def _unreadable_results(error: Exception) -> tuple[JsonObject, ...]:
    """Entry that replaces results after an error, which must not cost the report."""
    return ({"file": "", "problem": f"the results cannot be read: {type(error).__name__}: {error}"},)


def _read_benchmark(
    job: EndedJob,
) -> tuple[PlannedBenchmark | None, tuple[JsonObject, ...] | None, list[WorkerReport]]:
    """The planned benchmark, its results, and the workers with the requests that it counted.

    The first two are None without a benchmark. Unreadable results never cost the report.
    """
    workers = list(job.workers)
    if not has_benchmark(job.manifest):
        return None, None, workers
    planned = read_planned_benchmark(job.manifest.run_dir)
    results = read_job_results(job.manifest, planned, workers)
    try:
        return planned, results, with_counted_requests(workers, results)
    except Exception as error:  # noqa: BLE001 - results are optional
        return planned, _unreadable_results(error), workers


def read_job_results(
    manifest: Manifest, planned: PlannedBenchmark | None, workers: Iterable[WorkerReport]
) -> tuple[JsonObject, ...]:
    """Results of a benchmark, and those missing if it has run."""
    try:
        results = read_benchmark_results(manifest)
    except Exception as error:  # noqa: BLE001 - results may contain anything
        return _unreadable_results(error)
    ran = any(worker.role == ROLE and worker.start is not None for worker in workers)
    lacking = missing_concurrencies(planned, results) if ran else []
    return (*results, missing_entry(lacking)) if lacking else tuple(results)


def _first_start(job: EndedJob) -> float:
    """Start of the job's first attempt: files since then belong to the job."""
    moments = (job.start, read_first_start(job.manifest) if job.attempt else None)
    return min((moment for moment in moments if moment is not None), default=0.0)


def result_logs(job: EndedJob) -> list[Path]:
    """Logs that may contain benchmark results: of the last runs, and the benchmark's own."""
    run_dir, tasks = job.manifest.run_dir, {task.rank: task for task in job.manifest.tasks}
    paths = [run_dir / benchmark_log(job.attempt)]
    for worker in job.workers:
        task = tasks.get(worker.rank)
        if task is not None and worker.critical:
            paths += map(Path, log_paths(task, run_dir, worker.node, job.attempt, worker.restarts))
    return list(dict.fromkeys(paths))


def verify_again(run_dir: Path, report: Report, progress: ReportProgress | None = None) -> Report:
    """Return the report of an ended job with its files verified again. Writes nothing.

    ``differs`` names the checks whose results changed. A job that did not end well keeps its state. Its files
    are only checked for validity, since its work is known to be incomplete.
    """
    manifest, state = read_manifest(run_dir), report.state
    well = state in VERIFIED_STATES
    before = {check.name: check for check in report.verification.checks}
    planned = read_planned_benchmark(run_dir)
    results = read_job_results(manifest, planned, report.workers) if has_benchmark(manifest) else ()
    counted = _FILES_COUNTED.match(before["outputs"].detail) if "outputs" in before else None
    statuses = read_statuses(run_dir, report.attempt)
    start = report.start
    if start is not None and report.end is not None and report.duration_s is not None:
        start = min(start, report.end - report.duration_s)  # the clock may have been set back during the job
    warning = JobStateRecord.of_attempt(run_dir, report.attempt).warning
    job = EndedJob(manifest, report.attempt, start, statuses, report.workers, report.incomplete, warning)
    earlier = _EarlierCheck(int(counted[1]) if counted else 0, files_only=not well or manifest.attached)
    found = _verify(job, ReportPace(progress=progress), planned, results, earlier)
    checks = [(check if well else _skipped_check(check, state)).result() for check in found]
    if manifest.attached:  # the end of the job has judged unknown ends of workers
        names = {check.name for check in found}
        checks = [check for name, check in before.items() if name not in names] + checks
    elif planned is None and BENCHMARK in before:  # this user may not be able to read the plan
        checks.append(before[BENCHMARK])
    if well:
        state = "INCOMPLETE" if any(check.passed is False for check in checks) else "COMPLETED"
    compared = checks if well else [check for check in checks if check.name in before]
    differs = tuple(
        check.name
        for check in compared
        if check.passed is not (before[check.name].passed if check.name in before else None)
    )
    return report.replace(
        benchmark=results if report.benchmark is not None else None,
        state=state,
        exit_status=EXIT_STATUS.get(state, EXIT_STATUS["UNKNOWN"]),
        verification=verification_result(state, checks).replace(state_before=report.state, differs=differs),
    )


def _skipped_check(check: VerificationCheck, state: str) -> VerificationCheck:
    """Skip a failed check for completeness if the job did not get that far."""
    if check.name not in COMPLETENESS_CHECKS or check.passed is not False:
        return check
    return VerificationCheck(check.name, None, f"{check.detail}; not required, because the job ended as {state}")
