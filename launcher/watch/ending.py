"""The end of a job on a terminal: verdict, cause with its log lines, workers by how they ended, next step, places."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from exporter.contract.errors import ManifestError
from exporter.contract.manifest import read_manifest
from exporter.contract.records import Record
from exporter.contract.report import EndCause, Report, Stop, WorkerReport
from exporter.gpus.analysis.node_status import account_text
from exporter.logs.errors.lines import plain_line
from exporter.logs.log_files_reader import log_paths, read_last_bytes
from exporter.logs.redact import redact
from exporter.progress.work import ITEMS, speed_text, unit_word
from launcher.plan.plan import PLAN_FILE, SlurmOptions
from launcher.report.accounting.text import accounting_summary
from launcher.report.report import REPORT_TEXT_FILE
from launcher.report.state import VERIFIED_STATES, verification_words
from launcher.report.text import CHECK_WORDS
from launcher.report.workers import values_text
from launcher.watch.text import printable_line
from launcher.words import clock_text, duration_text, end_line, names_text, worker_text

LOG_LINES = 10  # last lines of the log of the worker that failed
LOG_TAIL_BYTES = 16 * 1024
LOG_GUTTER = "  | "  # before each of them
STOPPED_STATES = ("CANCELLED", "TIMEOUT", "PREEMPTED")  # the stop decides, not a failure before it
NAMES_SHOWN = 4  # workers, files and ends named in one line
NEXT_STEPS = {
    "app_error": "fix the program; if the failure is transient, set `restart` in the job file",
    "cuda_oom": "reduce the batch size or sequence length, or shard the model further",
    "host_oom": "raise `resources.memory_per_node`, or use fewer data-loading processes",
    "gpu_fault": "exclude the node, and report it to its administrators with this line",
    "nccl_timeout": "find the worker without progress, then check the network between the nodes",
    "crashed_signal": "find the stack in the log; PYTHONFAULTHANDLER=1 gives a Python stack",
    "disk_full": "free space, or move `paths.output_dir` and `paths.checkpoint_dir`",
    "resource_limit": "raise this limit with `ulimit`, or split the work or the file",
    "launch_failed": "check the command with `gpujob check`",
    "killed_unknown": "ask the administrators what kills processes on this node",
    "time_limit": "raise `slurm.time_limit`, or set `slurm.requeue: {time_limit: true}`",
    "preempted": "set `slurm.requeue: {preempted: true}`, or use a partition without preemption",
    "node_failure": "submit the job again; Slurm no longer uses a node that is down",
}  # by exit reason; the page of exit reasons has more
STEPS_OF_REQUEUE = {
    "time_limit": "raise `slurm.requeue.max`, or submit the job again with `resume: true`",
    "preempted": "unless Slurm has queued it again, submit it with `resume: true` or without preemption",
}  # the same for a job that asks for a requeue after such an end
STEPS_OF_CHECKS = {
    ITEMS: "run the rest, or lower `verify.complete_share` if this is enough",
    "benchmark": "find the reason in the log of the benchmark",
    "tokens": "find the reason in the log of the benchmark",
}  # after a failed check of the work, which no repaired file passes; by its name


class _RequeuePlan(Record):
    slurm: SlurmOptions = SlurmOptions()


def render_ending(report: Report, width: int = 1 << 20) -> list[str]:
    """Lines for a terminal of this width, without the Markdown of `report.md`."""
    return [part for line in _lines(report) for part in _wrap(printable_line(line), width)]


def decisive_stop(report: Report) -> Stop | None:
    """The stop of a job that ended because of it; None if something else decided."""
    decides = report.state in STOPPED_STATES or (report.state != "COMPLETED" and not report.cause)
    return report.stopped if decides else None


def _lines(report: Report) -> list[str]:
    verdict = f"{report.state}{verification_words(report.state, report.verification)}"
    took = "" if report.duration_s is None else f", took {duration_text(report.duration_s)}"
    lines = [f"{verdict}: job {report.job_id} {report.job_name}{took}"]
    if report.state == "UNKNOWN":
        lines += [f"why: {reason}" for reason in report.why]
    if (stop := decisive_stop(report)) is not None:
        lines.append(f"stopped: {stop.cause}")
    if report.cause:
        lines += _cause_lines(report, report.cause)
    if report.requeued:
        lines.append("requeued: the job continues in its next attempt")
    lines += [f"restarted: {text}" for text in _ends(report.restarted)]
    lines += [f"tolerated: {text}" for text in _ends(report.tolerated)]
    if report.items is not None:
        lines.append(_work_line(report))
    if values := values_text(report.workers):
        lines.append(f"values: {values}")
    if report.gpus:
        lines.append(f"GPUs: {account_text(report.gpus)}")
    if report.accounting:
        lines.append(f"accounting: {accounting_summary(report.accounting)}")
    for check in report.verification.checks:
        if check.passed is False or report.state in VERIFIED_STATES:
            lines.append(f"{check.name}: {CHECK_WORDS[check.passed]}: {check.detail}")
            lines += [f"    {flaw.file}: {flaw.reason}" for flaw in check.files[:NAMES_SHOWN]]
    if report.launch and not report.launch.verified and not report.cause:  # a cause says more
        faults = [check.detail for check in report.launch.checks if check.level == "issue" and not check.passed]
        lines.append(f"launch: not verified: {'; '.join(faults)}")
    lines += _worker_lines(report.workers)
    if report.benchmark:
        lines.append("benchmark: the results are in report.md")
    if step := _next_step(report):
        lines.append(f"next: {step}")
    text = f"{report.run_dir}/{REPORT_TEXT_FILE}"
    has_text = os.path.exists(text)
    lines.append(f"full report: {_shown_path(text)}" if has_text else f"run directory: {_shown_path(report.run_dir)}")
    return lines


def _wrap(line: str, width: int) -> list[str]:
    """The line in lines of whole words. A line of a log keeps its form, and a path stays whole to be copied."""
    if line.startswith(LOG_GUTTER):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    ) or [line]


def _shown_path(path: str | Path) -> str:
    """The path as it can be typed here: relative if it is below the working directory."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def _cause_lines(report: Report, cause: EndCause) -> list[str]:
    who = names_text([worker_text(entry) for entry in cause.missing], NAMES_SHOWN, cause.missing_total)
    first, *rest = cause.evidence or ("no evidence",)
    lines = [f"cause: {who or worker_text(cause)}: {cause.reason} at {clock_text(cause.time)}: {first}"]
    lines += [f"    {text}" for text in rest]
    if cause.diagnosis:
        lines.append(f"diagnosis: {_shown_path(report.run_dir)}/{cause.diagnosis}")
    path, tail = read_log_end(report, cause)
    if path is not None:
        lines.append(f"last lines of {_shown_path(path)}:" if tail else f"its log is empty: {_shown_path(path)}")
    return [*lines, *(f"{LOG_GUTTER}{line}" for line in tail)]


def read_log_end(report: Report, cause: EndCause) -> tuple[Path | None, list[str]]:
    """The last lines of the log with the error of the failed worker, or else of the one that it wrote last.

    (None, []) without a worker or a log.
    """
    try:
        manifest = read_manifest(report.run_dir)
    except ManifestError:
        return None, []  # the run directory has moved since
    task = next((task for task in manifest.tasks if task.rank == cause.rank), None)
    if task is None or cause.node is None:
        return None, []
    paths = map(Path, log_paths(task, manifest.run_dir, cause.node, report.attempt, cause.restart or 0))

    def importance(path: Path) -> tuple[bool, float]:
        return any(path.name in text for text in cause.evidence), path.stat().st_mtime

    files = sorted(filter(Path.is_file, paths), key=importance, reverse=True)
    for path in files:
        text = redact(read_last_bytes(path, LOG_TAIL_BYTES).decode("utf-8", "replace"))
        lines = (plain_line(line.encode(), None).expandtabs().rstrip() for line in text.split("\n"))
        if tail := [line for line in lines if line][-LOG_LINES:]:
            return path, tail
    return next(iter(files), None), []


def _ends(ends: Sequence[EndCause]) -> list[str]:
    lines = [end_line(end) for end in ends[:NAMES_SHOWN]]
    return [*lines, f"{len(ends) - len(lines)} more"] if len(ends) > len(lines) else lines


def _work_line(report: Report) -> str:
    unit, rate = unit_word(report.unit), report.throughput_items_per_second
    expected = f" of {report.items_expected}" if report.items_expected else ""
    return f"{unit}: {report.items}{expected}" + (f", {speed_text(rate, unit)} over the whole job" if rate else "")


def _worker_lines(workers: Sequence[WorkerReport]) -> list[str]:
    """One line for each way in which workers ended."""
    alike: dict[str, list[str]] = {}
    for worker in workers:
        end = worker.exit
        suffix = " when asked to end" if end and end.reason == "completed" and end.asked_to_end else ""
        word = "not started" if worker.state == "not_started" else f"{end.reason}{suffix}" if end else worker.state
        alike.setdefault(word, []).append(worker.worker)
    return [f"{len(names)} {word}: {names_text(names, NAMES_SHOWN)}" for word, names in alike.items()]


def _next_step(report: Report) -> str | None:
    if report.state in ("PENDING", "RUNNING"):
        return f"gpujob watch {report.job_id}"
    if report.state == "INCOMPLETE":
        return _step_after_incomplete(report)
    decisive = report.stopped if report.state in STOPPED_STATES or not report.cause else report.cause
    reason = decisive.reason if decisive else ""
    if reason in STEPS_OF_REQUEUE and _asks_for_requeue(report, reason):
        return f"gpujob watch {report.job_id}" if report.requeued else STEPS_OF_REQUEUE[reason]
    return NEXT_STEPS.get(reason) if report.state != "COMPLETED" else None


def _asks_for_requeue(report: Report, reason: str) -> bool:
    """Whether the job file asks for a requeue after an end for this reason."""
    plan = _RequeuePlan.read_valid(Path(report.run_dir) / PLAN_FILE) or _RequeuePlan()
    requeue = plan.slurm.requeue
    return requeue is not None and (requeue.time_limit if reason == "time_limit" else requeue.preempted)


def _step_after_incomplete(report: Report) -> str:
    failed = [check.name for check in report.verification.checks if check.passed is False]
    if ITEMS in failed and report.items is None:
        return "let a log or a progress file show the items, or remove `progress.total_items`"
    steps = (STEPS_OF_CHECKS[name] for name in failed if name in STEPS_OF_CHECKS)
    return next(steps, f"repair the files, then `gpujob report {report.job_id} --verify`")
