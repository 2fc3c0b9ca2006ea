"""Lines of a tracking run's log."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from exporter.slurm.accounting import Figures
from exporter.slurm.commands_reader import SlurmUnansweredError
from exporter.slurm.tracking import UNKNOWN, Change, TrackedJob
from launcher.errors import LauncherError
from launcher.track.state import TrackState, count_states
from launcher.watch.text import printable_line
from launcher.words import clock_text, count_text, duration_text

NOT_MEASURED = "not measured"
EXCEEDED = "⚠️ Time limit exceeded — consider increasing eval time limit when re-scaffolding"
CHECKED_STATES = ("PENDING", "RUNNING", "COMPLETED")  # whose counts each poll shows, also 0
SUMMARY_STATES = ("COMPLETED", "FAILED")  # likewise the summary


class GpuUse(NamedTuple):
    """Use of a job's GPUs: the mean utilization, and memory of all together."""

    utilization_ratio: float
    memory_used_bytes: float
    memory_total_bytes: float


def entry(now: float, head: str, *lines: str) -> str:
    """An entry of the log, in lines that no name can break."""
    return "\n".join((f"[{clock_text(now)}] {printable_line(head)}", *map(printable_line, lines)))


def status_check(now: float, jobs: Iterable[TrackedJob]) -> str:
    jobs = list(jobs)
    return entry(
        now,
        "STATUS_CHECK: Polling SLURM",
        f"Result: {count_text(len(jobs), 'job')} found - {_counts_text(count_states(jobs), CHECKED_STATES)}",
    )


def state_change(change: Change, cause: str | None = None) -> str:
    """A change, at the time at which it happened, with the cause of a failure if it is known."""
    job = change.job
    lines = [f"Previous: {change.previous}", f"Current: {job.state}"]
    if job.is_over:
        lines += [f"Completed: {clock_text(job.ended)}"]
        lines += [f"Elapsed: {duration_text(job.ended - job.started)}"] if job.ended and job.started else []
        lines += ["Action: Updated run state"]
        lines += [f"Result log: {job.log}"] if job.log else []
        lines += [f"Cause: {cause}"] if cause is not None and job.state != "COMPLETED" else []
    else:
        lines += [f"Job ID: {job.job_id}", "Action: Updated run state"]
    if job.reason and job.state in ("PENDING", UNKNOWN):
        lines += [f"Reason: {job.reason}"]
    return entry(change.time, f"STATE_CHANGE: {job.name}", *lines)


def compute_metrics(now: float, job: TrackedJob) -> str:
    """What an ended job used of what it asked for."""
    figures = job.figures or Figures()
    time = f"GPU Time: {_clock(figures.elapsed_s)} / {_clock(figures.limit_s, 'no limit')}"
    head = (f"COMPUTE_METRICS: {job.name}", f"Job ID: {job.job_id}")
    if job.state == "TIMEOUT":
        return entry(now, *head, f"{time} (**EXCEEDED**)", EXCEEDED)
    if figures.elapsed_s is not None and figures.limit_s:
        time += f" ({figures.elapsed_s / figures.limit_s:.2%})"
    memory = NOT_MEASURED
    if figures.memory_bytes is not None:
        memory = f"{_size(figures.memory_bytes)} / {_size(figures.memory_requested_bytes)}"
    cpu = NOT_MEASURED if figures.cpu_ratio is None else f"{figures.cpu_ratio:.2%}"
    return entry(now, *head, time, f"Memory: {memory}", f"CPU Efficiency: {cpu}")


def resource_status(now: float, job: TrackedJob, use: GpuUse) -> str:
    used, total = (f"{size / 1024**3:.1f}" for size in (use.memory_used_bytes, use.memory_total_bytes))
    return entry(
        now,
        f"RESOURCE_STATUS: {job.name}",
        f"GPU Utilization: {use.utilization_ratio:.0%} | GPU Memory: {used}/{total} GB",
    )


def query_failed(now: float, error: SlurmUnansweredError, wait_s: float) -> str:
    action = f"Action: No state changed, next try in {wait_s:.0f} s"
    return entry(now, f"QUERY_FAILED: {error.command}", f"Error: {error}", action)


def state_not_saved(now: float, error: LauncherError) -> str:
    """A state file that cannot be written."""
    return entry(now, f"STATE_NOT_SAVED: {error}", "Action: Try again at each poll; the jobs are still followed")


def alert(now: float, command: str, failures: int, known: float | None) -> str:
    """Several failures in a row, with the age of what is known."""
    return entry(
        now,
        f"ALERT: {command} has failed {failures} times in a row",
        "Known: nothing yet" if known is None else f"Known: the states of {clock_text(known)}",
        "Action: Check Slurm; no job counts as ended by this",
    )


def query_recovered(now: float, command: str, failures: int) -> str:
    return entry(now, f"QUERY_RECOVERED: {command}", f"Result: It answers after {count_text(failures, 'failure')}")


def all_complete(now: float, state: TrackState, noun: str) -> str:
    jobs = list(state.jobs.values())
    lines = [
        f"Summary: {len(jobs)} {noun} completed - {_counts_text(count_states(jobs), SUMMARY_STATES)}",
        f"Total time: {_minutes_text(now - state.started)}",
    ]
    for job in jobs:
        if job.state != "COMPLETED":
            what = f"{job.state} ({job.reason})" if job.reason else job.state
            log = f"; log {job.log}" if job.log else ""
            advice = f"; cancel it with `scancel {job.job_id}`" if job.can_never_start else ""
            lines.append(f"Not completed: {job.name} ({job.job_id}): {what}{log}{advice}")
    return entry(now, "ALL_COMPLETE: Monitoring finished", *lines)


def _counts_text(counts: Mapping[str, int], always: Sequence[str]) -> str:
    counts = {**dict.fromkeys(always, 0), **counts}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _clock(seconds: float | None, unknown: str = NOT_MEASURED) -> str:
    """``1-02:03:04`` or ``02:03:04``, as seff writes it."""
    if seconds is None:
        return unknown
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}" if days else f"{hour:02d}:{minute:02d}:{second:02d}"


def _size(count: float | None) -> str:
    """``122.13 MB``, as seff writes it."""
    if count is None:
        return "unknown"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1024 or unit == "TB":
            break
        count /= 1024
    return f"{count:.2f} {unit}"


def _minutes_text(seconds: float) -> str:
    minutes = round(seconds / 60)
    hours, left = divmod(minutes, 60)
    parts = ([count_text(hours, "hour")] if hours else []) + ([count_text(left, "minute")] if left or not hours else [])
    return " ".join(parts)
