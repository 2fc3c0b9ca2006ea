"""Text of the terminal view: untrusted text, sizes, times, throughput, and how workers ended."""

import time
from typing import TYPE_CHECKING

from exporter.progress.work import speed_text

if TYPE_CHECKING:
    from exporter.contract.report import EndCause
    from exporter.contract.view import JobView, WorkerView
    from exporter.gpus.analysis.node_status import GpuProblem


def printable_line(text: object) -> str:
    """User text in one line, with escapes such as ``\\n`` for characters that move the cursor."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in line
    )


def size_text(count: float | None) -> str:
    """``14.2 GiB``; a dash if unknown."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def clock_time_text(moment: float | None) -> str:
    """``13:22:15``, with the date if it is not today; a dash if unknown."""
    if moment is None:
        return "-"
    try:
        local_time, local_now = time.localtime(moment), time.localtime()
    except (OSError, OverflowError, ValueError):
        return "-"  # out of range
    return time.strftime("%H:%M:%S" if local_time[:3] == local_now[:3] else "%Y-%m-%d %H:%M", local_time)


def token_rate_text(rate: float | None) -> str:
    """``182 tok/s``; empty if unknown."""
    if rate is None:
        return ""
    return f"{rate:.0f} tok/s" if rate == 0 or rate >= 10 else f"{rate:.1f} tok/s"


def throughput_text(worker: "WorkerView") -> str:
    """``37.5`` items per second, ``0.333/h``, or an engine's output ``182 tok/s``, or its input ``2012 tok/s in``.

    A dash if all are unknown.
    """
    if not worker.up:
        return "-"
    if worker.rate:
        return speed_text(worker.rate).removesuffix("/s")
    from launcher.plan.plan import PREFILL  # lazy: a view of jobs needs no plan

    made, read = worker.output_tokens_per_second, worker.input_tokens_per_second
    if read is not None and (made is None or worker.role == PREFILL):
        return f"{token_rate_text(read)} in"
    return token_rate_text(made) or "-"


def not_ready_reasons(view: "JobView") -> dict[int, str]:
    """Exit reason of the job by rank, for workers that were not ready in time."""
    if view.cause is None:
        return {}
    return {entry.rank: view.cause.reason for entry in view.cause.missing if entry.rank is not None}


def end_text(worker: "WorkerView", cause: "EndCause | None") -> str:
    """``ended: app_error (exit status 3)``; ``cause`` is given if the job ended because of this worker."""
    end = worker.exit
    evidence = "; ".join(end.evidence) if end is not None else ""
    if worker.state == "not_started" or end is None:
        return f"was not started ({evidence.removeprefix('never started: ')})"
    if cause is not None:
        return f"ended: {cause.reason} ({cause.evidence[0]}; when asked to end: {evidence})"
    # a worker that exits cleanly when asked to end has not completed its work
    asked = " when asked to end" if end.reason == "completed" and end.asked_to_end else ""
    return f"ended: {end.reason}{asked} ({evidence})"


def worker_state(worker: "WorkerView") -> str:
    """The state of a worker as one word, or its exit reason."""
    if worker.state == "not_started":
        return "not started"
    if worker.state == "not_found" and worker.start is None:
        return "starting"
    if worker.exit:
        return str(worker.exit.reason)
    if worker.stalled and worker.state != "stopped":
        return "stalled"
    if worker.at and worker.state != "stopped":
        return str(worker.at)
    text = {"sleeping": "running", "disk_sleep": "io wait"}.get(worker.state, str(worker.state))
    return f"{text} (run {worker.restarts + 1})" if worker.restarts else text


def problem_text(problem: "GpuProblem") -> str:
    return problem.text + (f" at {clock_time_text(problem.time)}" if problem.time is not None else "")
