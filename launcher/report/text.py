"""Report of a job as Markdown."""

from collections.abc import Sequence

from exporter.contract.report import CheckResult, EndCause, Report, Verification, WorkerReport
from exporter.gpus.analysis.node_status import account_text
from exporter.progress.work import ITEMS, position_units, speed_text, unit_word
from launcher.report.accounting.text import accounting_lines
from launcher.report.gpus import gpu_sections
from launcher.report.restarts import restart_lines
from launcher.report.state import verification_words
from launcher.report.workers import stalled_text, values_text
from launcher.words import clock_text, duration_text, end_line, names_text, plain_item, plain_text, worker_text

FLAWS_SHOWN = 20  # damaged files named in the text; the JSON has all
EARLIER_SHOWN = 8  # earlier reports named in the text
CHECK_WORDS = {True: "ok", False: "FAILED", None: "not checked"}
MISSING_SHOWN = 4  # workers named in the cause when they were not ready in time
TOLERATED_SHOWN = 8  # failures of workers that are not critical in the text; the JSON has all


def _flaw_lines(check: CheckResult) -> list[str]:
    """List damaged files, at most ``FLAWS_SHOWN``."""
    lines = []
    for flaw in check.files[:FLAWS_SHOWN]:
        file_format = f" ({plain_text(flaw.format)})" if flaw.format else ""
        lines.append(f"{plain_item(flaw.file)}{file_format}: {plain_text(flaw.reason)}")
    more = check.files_total - len(lines)
    return [*lines, f"and {more} more"] if more > 0 else lines


def render_report(report: Report) -> str:
    """Render the report as Markdown."""
    lines = _head(report)
    if report.benchmark:
        from launcher.report.benchmark import benchmark_section  # lazy: few jobs have one, and it loads file formats

        lines += benchmark_section(report.benchmark)
    lines += [*_verification(report.verification), *_workers(report.workers)]
    if report.gpus:
        lines += gpu_sections(report.gpus, report.workers)
    if report.accounting:
        lines += ["", "## Slurm's accounting", ""]
        lines += [f"- {plain_item(line)}" for line in accounting_lines(report.accounting)]
    if report.diagnoses:
        lines += ["", "## Diagnoses", "", *(f"- {plain_item(name)}" for name in report.diagnoses)]
    return "\n".join(lines) + "\n"


def _head(report: Report) -> list[str]:
    """Title, and one line per fact about the job."""
    verified = verification_words(report.state, report.verification)
    lines = [
        f"# Job {plain_text(report.job_id)} {plain_text(report.job_name)}: {plain_text(report.state)}{verified}",
        "",
        f"- time: {clock_text(report.start)} to {clock_text(report.end)}, {duration_text(report.duration_s)}",
        f"- nodes: {plain_text(', '.join(report.nodes))}",
    ]
    if report.state == "UNKNOWN":
        lines += [f"- why: {plain_text(reason)}" for reason in report.why]
    if report.attempt:
        earlier = names_text(
            [f"report_a{number}.md" for number in range(min(report.attempt, EARLIER_SHOWN))],
            EARLIER_SHOWN,
            report.attempt,
        )
        lines.append(f"- attempt: {report.attempt + 1}, after {earlier}")
    if report.items is not None:
        lines.append(_work_line(report))
    if values := values_text(report.workers):
        lines.append(f"- values: {plain_text(values)}")
    if report.gpus:
        lines.append(f"- GPUs: {plain_text(account_text(report.gpus))}")
    if report.stopped:
        lines.append(f"- stopped: {plain_text(report.stopped.cause)}")
    if stalled := stalled_text(report.workers):
        lines.append(f"- stalled: {plain_text(stalled)}")
    if report.requeued:
        lines.append("- requeued: the job continues in its next attempt")
    if report.cause:
        lines += _cause_lines(report.cause)
        if report.cause.diagnosis:
            lines.append(f"- diagnosis: {plain_text(f'{report.run_dir}/{report.cause.diagnosis}')}")
    lines += restart_lines(report.restarted, report.workers)
    lines += _tolerated_lines(report.tolerated)
    if report.launch and not report.launch.verified:
        faults = [check.detail for check in report.launch.checks if check.level == "issue" and not check.passed]
        lines.append(f"- launch: not verified: {plain_text('; '.join(faults))}")
    if report.incomplete:
        lines.append(f"- records incomplete: {plain_text(report.incomplete)}")
    if report.monitoring.nodes_without:
        lines.append(f"- no final values from: {plain_text(', '.join(report.monitoring.nodes_without))}")
    return lines


def _work_line(report: Report) -> str:
    expected = f" of {report.items_expected}" if report.items_expected else ""
    rate, unit = report.throughput_items_per_second, plain_item(unit_word(report.unit))
    speed = f", {speed_text(rate, unit)} over the whole job" if rate else ""
    return f"- {unit}: {report.items}{expected}{speed}"


def _cause_lines(cause: EndCause) -> list[str]:
    """Describe the failure. For workers that were not ready in time, add the ends of their logs."""
    if not cause.missing:
        return [f"- cause: {plain_text(end_line(cause))}"]
    names = names_text([worker_text(entry) for entry in cause.missing], MISSING_SHOWN, cause.missing_total)
    first, *rest = cause.evidence
    return [
        f"- cause: {plain_text(f'{names}: {cause.reason} at {clock_text(cause.time)}: {first}')}",
        *(f"    {'    ' if line.startswith(' ') else ''}- {plain_item(line)}" for line in rest),
    ]


def _tolerated_lines(ends: Sequence[EndCause]) -> list[str]:
    """List failures that did not affect the state of the job."""
    lines = [f"- tolerated: {plain_text(end_line(end))}" for end in ends[:TOLERATED_SHOWN]]
    more = len(ends) - len(lines)
    return [*lines, f"- tolerated: {more} more, in report.json"] if more else lines


def _verification(verification: Verification) -> list[str]:
    lines = []
    if verification.checks:
        lines += ["", "## Verification", ""]
        for check in verification.checks:
            lines.append(f"- {plain_item(check.name)}: {CHECK_WORDS[check.passed]}: {plain_text(check.detail)}")
            lines += [f"    - {flaw_line}" for flaw_line in _flaw_lines(check)]
    return lines


def _workers(workers: Sequence[WorkerReport]) -> list[str]:
    units = position_units(workers)
    position = "position" if len(units) > 1 else (*units, ITEMS)[0]
    lines = [
        "",
        "## Workers",
        "",
        f"| worker | rank | node | end | {plain_text(position)} | restarts |",
        "|---|---|---|---|---|---|",
    ]
    for worker in workers:
        items = "-" if worker.items is None else str(worker.items)
        if worker.items is not None and worker.items_expected:
            items += f"/{worker.items_expected}"
        if worker.items is not None and len(units) > 1:
            items += f" {unit_word(worker.unit)}"
        allowed = f" of {worker.restarts_max}" if worker.restarts_max else ""
        cells = (worker.worker, worker.rank, worker.node, _end_text(worker), items)
        lines.append(f"| {' | '.join(map(plain_text, cells))} | {worker.restarts}{allowed} |")
    return lines


def _end_text(worker: WorkerReport) -> str:
    """State of a worker, or how it ended."""
    end = worker.exit
    evidence = "; ".join(end.evidence) if end else ""
    if worker.state == "not_started":
        return f"not started ({evidence.removeprefix('never started: ')})" if evidence else "not started"
    if not end:
        return worker.state or "unknown"
    # exit 0 after SIGTERM does not mean that the work is complete
    suffix = " when asked to end" if end.reason == "completed" and end.asked_to_end else ""
    return f"{end.reason}{suffix} ({evidence})"
