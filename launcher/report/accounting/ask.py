"""Ask Slurm's accounting about an ended job, and keep the answer in its run directory.

The batch step cannot do so: accounting is complete only after it has ended.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.report import Report
from exporter.contract.slurm_accounting import SlurmAccounting
from exporter.slurm.commands_reader import SlurmUnansweredError, clean_environment, run_reading
from exporter.slurm.job_figures import (
    FORMAT,
    JobAttempt,
    has_ended,
    is_complete,
    job_accounting,
    own_attempts,
    parse_job_accounting,
)
from launcher.plan.plan import PLAN_FILE
from launcher.report.report import REPORT_TEXT_FILE
from launcher.rundir.job_ids import job_id_of

DEADLINE_S = 10.0  # while a person waits: sacct hangs for ever while slurmdbd does
RETRY_S = 1.0  # between two questions: the ends of steps come 1 to 2 s after that of the job
FRESH_S = 60.0  # after the end of the job, in which it is worth to ask again at once
SETTLED_S = 3600.0  # after the end, when what is missing no longer comes
CLOCKS_S = 60.0  # by which clocks of nodes differ, and within which sbatch answers
FILE_MODE = 0o640


def with_accounting(run_dir: Path, report: Report, environ: Mapping[str, str]) -> Report:
    """The report of an ended Slurm job with Slurm's accounting, which is asked once and then kept beside it."""
    path = run_dir / run_files.ACCOUNTING_FILE
    kept = SlurmAccounting.read_valid(path)
    if kept is not None and kept.attempt == report.attempt:
        return report.replace(accounting=kept)
    found, is_final = _ask(run_dir, report, environ)
    if is_final:
        with contextlib.suppress(OSError):  # only shown, of a job of somebody else or on a full disk
            run_files.write_json(path, found.to_json(), mode=FILE_MODE)
            _render_again(run_dir, found)
    return report.replace(accounting=found)


def _ask(
    run_dir: Path, report: Report, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
) -> tuple[SlurmAccounting, bool]:
    """What accounting knows, and whether no more will come."""
    deadline = clock() + DEADLINE_S
    age_s = time.time() - (report.end or 0.0)
    while True:
        try:
            attempts = _read_attempts(run_dir, report, environ, max(deadline - clock(), RETRY_S))
        except SlurmUnansweredError as error:
            return SlurmAccounting(attempt=report.attempt, problem=str(error)), False
        is_final = is_complete(attempts) or (has_ended(attempts) and age_s > SETTLED_S)
        if is_final or age_s > FRESH_S or deadline - clock() < 2 * RETRY_S:
            break
        time.sleep(RETRY_S)
    if not has_ended(attempts):
        problem = "sacct does not know the end of this job" if attempts else "sacct does not know this job"
        return SlurmAccounting(attempt=report.attempt, problem=problem), False
    found = job_accounting(attempts, has_nodes_alone=_has_nodes_alone(run_dir), gpus=report.gpus)
    return found.replace(attempt=report.attempt), is_final


def _read_attempts(
    run_dir: Path, report: Report, environ: Mapping[str, str], deadline_s: float
) -> tuple[JobAttempt, ...]:
    """Attempts of this job, and not of another one that had its id before or got it later."""
    job_id = job_id_of(run_dir)
    submission = run_files.read_json(run_dir / f"{job_id}.json") or {}
    submitted, cluster = submission.get("submitted"), submission.get("cluster")
    since = (submitted if isinstance(submitted, int | float) else report.start or 0.0) - CLOCKS_S
    until = report.end + CLOCKS_S if report.end is not None else float("inf")
    argv = ["sacct", "-n", "-P", "-D", "--noconvert", "-S", f"uts{max(int(since), 0)}", "-j", job_id, "-o", FORMAT]
    if cluster:
        argv.insert(1, f"--clusters={cluster}")
    text = run_reading(argv, clean_environment(environ, "%s"), deadline_s)
    return own_attempts(parse_job_accounting(text), job_id, str(submission.get("user") or ""), since, until)


def _has_nodes_alone(run_dir: Path) -> bool:
    """Whether the job asked for whole nodes, as far as we may read what it asked for."""
    plan = run_files.read_json(run_dir / PLAN_FILE) or {}
    options = plan.get("slurm")
    if not isinstance(options, dict):
        return False
    directives = options.get("directives")
    return bool(options.get("exclusive")) or (isinstance(directives, dict) and directives.get("exclusive") is True)


def _render_again(run_dir: Path, accounting: SlurmAccounting) -> None:
    """Add the figures to ``report.md``. Raises OSError."""
    from launcher.report.text import render_report  # lazy: once for each job

    report, path = Report.read_valid(run_dir / run_files.REPORT_FILE), run_dir / REPORT_TEXT_FILE
    if report is not None and path.exists():
        text = render_report(report.replace(accounting=accounting))
        run_files.replace_file(path, text.encode("utf-8", "replace"))
