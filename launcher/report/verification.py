"""Verify a job that has ended, for its report and again later."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, read_manifest
from exporter.logs.log_files_reader import log_paths, run_suffix
from exporter.progress.work import job_work
from launcher.plan.plan import BENCHMARK
from launcher.report.state import EXIT_STATUS, VERIFIED_STATES, verification_entry
from launcher.rundir.statuses import read_statuses
from launcher.verify.benchmark import (
    PlannedBenchmark,
    all_report_tokens,
    benchmark_check,
    missing_concurrencies,
    missing_entry,
    read_planned_benchmark,
)
from launcher.verify.benchmark_results import RESULT_FILES, ROLE, count_requests, has_benchmark, read_benchmark_results
from launcher.verify.timed_reads import OutOfTime, ReportProgress
from launcher.verify.verify import VerificationCheck, verify_results

_FILES_COUNTED = re.compile(r"(\d+) files, \d+ bytes")  # start of the detail on existing output files
COMPLETENESS_CHECKS = (
    "outputs",
    "records",
    "tokens",
    BENCHMARK,
)  # file checks for completeness; the others check validity


def benchmark_log(attempt: int) -> str:
    """Name of the file for the output of benchmark launchers."""
    return f"benchmark{run_suffix(attempt, 0)}.out"


def verify_job(
    manifest: Manifest,
    workers: Iterable[Mapping[str, Any]],
    attempt: int,
    start: object,
    statuses: Mapping[str, Mapping[str, Any]],
    out_of_time: OutOfTime,
    progress: ReportProgress | None,
    *,
    is_repeated: bool = False,
    files_before: int = 0,
    files_only: bool = False,
    planned: PlannedBenchmark | None = None,
    results: Sequence[Mapping[str, Any]] | None = None,
) -> list[VerificationCheck]:
    """Check a job that has ended, using the entries of its workers and its files.

    ``statuses`` are the sidecars' last statuses. ``files_before`` is the number of output files at an earlier
    verification. ``planned`` is the benchmark of the plan, ``results`` are its measurements.
    """
    workers = list(workers)
    work = job_work(workers)
    of_files = any(worker.get("pattern") == RESULT_FILES for worker in workers)
    since = _first_start(manifest, attempt, start)
    idle = [int(worker["rank"]) for worker in workers if worker.get("items_expected") == 0]
    busy = [int(worker["rank"]) for worker in workers if worker.get("items_expected") or worker.get("items")]
    critical = [worker for worker in workers if worker["critical"]]
    reasons = [worker["exit"]["reason"] if worker["exit"] else None for worker in critical]
    of_benchmark = benchmark_check(planned, results or (), manifest.verify.complete_share)
    # the log has only some of the results that are in the files
    counted_by_files = of_benchmark is not None and all_report_tokens(results or ())
    logs = [] if counted_by_files else result_logs(manifest, workers, attempt)
    found = verify_results(
        manifest,
        work=work,
        work_source="the result files" if of_files else "the logs",
        exit_reasons=None if files_only else reasons,
        since=since,
        idle_ranks=idle,
        busy_ranks=busy,
        logs=logs,
        statuses=statuses,
        out_of_time=out_of_time,
        progress=progress,
        is_repeated=is_repeated,
        files_before=files_before,
    )
    if of_benchmark is None:
        return found
    others = [check for check in found if check.name != "workers" and not check.is_inapplicable]
    return [*(check for check in found if check.name == "workers"), of_benchmark, *others]


def unreadable_results(error: Exception) -> list[dict[str, Any]]:
    """Entry that replaces results after an error, which must not cost the report."""
    return [{"file": "", "problem": f"the results cannot be read: {type(error).__name__}: {error}"}]


def read_benchmark(
    run_dir: Path, manifest: Manifest, workers: list[dict[str, Any]]
) -> tuple[PlannedBenchmark | None, list[dict[str, Any]] | None]:
    """The planned benchmark and its results; also sets the request counts of its worker.

    Both are None without a benchmark. Unreadable results never cost the report.
    """
    if not has_benchmark(manifest):
        return None, None
    planned = read_planned_benchmark(run_dir)
    results = read_job_results(manifest, planned, workers)
    try:
        count_requests(workers, results)
    except Exception as error:  # noqa: BLE001 - results are optional
        return planned, unreadable_results(error)
    return planned, results


def read_job_results(
    manifest: Manifest, planned: PlannedBenchmark | None, workers: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Results of a benchmark, and those missing if it has run."""
    try:
        results = read_benchmark_results(manifest)
    except Exception as error:  # noqa: BLE001 - results may contain anything
        return unreadable_results(error)
    ran = any(worker["role"] == ROLE and worker["start"] is not None for worker in workers)
    lacking = missing_concurrencies(planned, results) if ran else []
    return [*results, missing_entry(lacking)] if lacking else results


def _first_start(manifest: Manifest, attempt: int, start: object) -> float:
    """Start of the job's first attempt: files since then belong to the job."""
    moments = [start]
    for task in manifest.tasks[:1] if attempt else ():
        stem = run_files.record_name(task.worker, task.rank, 0, 0)
        moments.append(
            (run_files.read_json(manifest.run_dir / run_files.WORKERS_DIR / f"{stem}.start.json") or {}).get("start")
        )
    return min((float(moment) for moment in moments if isinstance(moment, int | float)), default=0.0)


def result_logs(manifest: Manifest, workers: Iterable[Mapping[str, Any]], attempt: int) -> list[Path]:
    """Logs that may contain benchmark results: of the last runs, and the benchmark's own."""
    tasks = {task.rank: task for task in manifest.tasks}
    paths = [manifest.run_dir / benchmark_log(attempt)]
    for worker in workers:
        task = tasks.get(int(worker["rank"]))
        if task is not None and worker["critical"]:
            paths += log_paths(task, manifest.run_dir, str(worker["node"]), attempt, int(worker["restarts"]))
    return list(dict.fromkeys(paths))


def verify_again(run_dir: Path, report: Mapping[str, Any], progress: ReportProgress | None = None) -> dict[str, Any]:
    """Return the report of an ended job with its files verified again. Writes nothing.

    ``differs`` names the checks whose results changed. A job that did not end well keeps its state. Its files
    are only checked for validity, since its work is known to be incomplete.
    """
    manifest = read_manifest(run_dir)
    attempt, state = int(report.get("attempt") or 0), report["state"]
    well = state in VERIFIED_STATES
    before = {check["name"]: check for check in report["verification"]["checks"]}
    planned = read_planned_benchmark(run_dir)
    results = read_job_results(manifest, planned, report["workers"]) if has_benchmark(manifest) else []
    counted = _FILES_COUNTED.match(str(before.get("outputs", {}).get("detail", "")))
    found = verify_job(
        manifest,
        report["workers"],
        attempt,
        report["start"],
        read_statuses(run_dir, attempt),
        lambda: False,
        progress,
        is_repeated=True,
        files_before=int(counted[1]) if counted else 0,
        files_only=not well or manifest.attached,
        planned=planned,
        results=results,
    )
    checks = [(check if well else _skipped_check(check, state)).to_json() for check in found]
    if manifest.attached:  # the end of the job has judged unknown ends of workers
        names = {check.name for check in found}
        checks = [check for name, check in before.items() if name not in names] + checks
    elif planned is None and BENCHMARK in before:  # this user may not be able to read the plan
        checks.append(before[BENCHMARK])
    if well:
        state = "INCOMPLETE" if any(check["passed"] is False for check in checks) else "COMPLETED"
    compared = checks if well else [check for check in checks if check["name"] in before]
    differs = [
        check["name"] for check in compared if check["passed"] is not before.get(check["name"], {}).get("passed")
    ]
    verification = {**verification_entry(state, checks), "state_before": report["state"], "differs": differs}
    found_now = {"benchmark": results} if "benchmark" in report else {}
    return {**report, **found_now, "state": state, "exit_status": EXIT_STATUS[state], "verification": verification}


def _skipped_check(check: VerificationCheck, state: str) -> VerificationCheck:
    """Skip a failed check for completeness if the job did not get that far."""
    if check.name not in COMPLETENESS_CHECKS or check.passed is not False:
        return check
    return VerificationCheck(check.name, None, f"{check.detail}; not required, because the job ended as {state}")
