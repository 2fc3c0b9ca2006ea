"""The state of a job in the words of the terminal view, and what it waits for."""

from exporter.contract.view import EarlierAttempt, JobView
from exporter.progress.work import unit_word
from launcher.registry.entries import LOCAL_PREFIX
from launcher.report.state import UNFINISHED
from launcher.watch.text import clock_time_text
from launcher.words import count_text, duration_text

STOPS_JOB = "stops the job"  # what Ctrl-C does to the command that has started it
_STYLE_OF_WORD = {"completed": "green", **dict.fromkeys(("pending", "stopping", "suspended", "unknown"), "yellow")}
_RUNNING_WORDS = {"launching": "starting", "finished": "completing"}  # phases of a running job with other names


def is_pending(view: JobView) -> bool:
    return view.state == "PENDING"


def job_state(view: JobView) -> tuple[str, str]:
    """The state of the job as a word, with the reason if it is unknown, and its style."""
    if view.state != "RUNNING" or view.report is not None:
        is_starting = view.state == "PENDING" and view.job_id.startswith(LOCAL_PREFIX)
        word = "starting" if is_starting else view.state.lower().replace("_", " ")
    elif view.stop is not None:
        word = "stopping"
    elif view.suspended:
        word = "suspended"
    elif (at_work := [worker for worker in view.workers if worker.up]) and all(worker.stalled for worker in at_work):
        return "stalled", "red"
    else:
        word = _RUNNING_WORDS.get(view.phase, view.phase)
    style = _STYLE_OF_WORD.get(word, "cyan" if view.state in UNFINISHED else "red")
    return (f"{word}: {view.unknown_reason}" if view.unknown_reason else word), style


def job_only_serves(view: JobView) -> bool:
    """Whether every started task is a service and none reports a position, so that there is no work to finish."""
    return (
        view.items is None
        and any(worker.service for worker in view.workers)
        and all(worker.service or worker.state in ("waiting", "not_started") for worker in view.workers)
    )


def wait_text(view: JobView) -> str:
    """Why the job has not started, or whether its services are ready; empty if neither applies."""
    if is_pending(view):
        reason = view.pending_reason
        if view.requeued:
            return _requeued_text(view.requeued, view.attempt) + (f": {reason}" if reason else "")
        return f"waiting in the queue: {reason}" if reason else "not started yet"
    found = view.readiness
    if found is None:
        return ""
    if found.ready:
        return f"ready since {clock_time_text(found.since)}"
    since = found.not_ready_since
    text = "not ready" if since is None else f"not ready for {duration_text(max(0.0, view.time - since))}"
    return f"{text}: " + (f"waiting for {found.waiting}" if found.waiting else "no answer yet")


def stop_text(view: JobView, *, interrupt_kills: bool = False) -> str:
    """``stopping: 4 workers have 24 s to save``; empty unless the job is being stopped.

    ``interrupt_kills`` is whether this command owns the job, so that its next Ctrl-C kills the workers.
    """
    if view.stop is None:
        return ""
    up = sum(worker.up for worker in view.workers)
    if not up:
        return "stopping: all workers have ended"
    workers, left = count_text(up, "worker"), None if view.stop.kill_at is None else view.stop.kill_at - view.time
    verb = ("has", "is") if up == 1 else ("have", "are")
    if left is not None and left < 1:
        return f"stopping: {workers} {verb[1]} being killed"
    time_left = "time" if left is None else f"{left:.0f} s"
    return f"stopping: {workers} {verb[0]} {time_left} to save" + (
        f"; Ctrl-C again kills {'it' if up == 1 else 'them'}" if interrupt_kills else ""
    )


def _requeued_text(over: EarlierAttempt, attempt: int) -> str:
    """The attempt that the job is queued for, and how the previous one ended; attempts count from 1."""
    state = f" {over.state}" if over.state else ""
    expected = f"/{over.items_expected}" if over.items_expected else ""
    position = "" if over.items is None else f" at {over.items}{expected} {unit_word(over.unit)}"
    before = f"attempt {over.attempt + 1} ended{state}{position}"
    return f"requeued ({before}), waiting in the queue for attempt {attempt + 1}"
