"""Reason why a job waits, in the terminal view: Slurm's queue, or services that are not ready."""

from collections.abc import Mapping
from typing import Any

from exporter.progress.work import unit_word
from launcher.watch.text import clock_time_text
from launcher.words import duration_text


def is_pending(view: Mapping[str, Any]) -> bool:
    return bool(view["state"] == "PENDING")


def job_only_serves(view: Mapping[str, Any]) -> bool:
    """Whether every started task is a service and none reports a position, so that there is no work to finish."""
    return (
        view["items"] is None
        and any(worker.get("service") for worker in view["workers"])
        and all(worker.get("service") or worker["state"] in ("waiting", "not_started") for worker in view["workers"])
    )


def wait_text(view: Mapping[str, Any]) -> str:
    """Why the job has not started, or whether its services are ready; empty if neither applies."""
    if is_pending(view):
        reason = view.get("pending_reason")
        if view.get("requeued"):
            return _requeued_text(view) + (f": {reason}" if reason else "")
        return f"waiting in the queue: {reason}" if reason else "not started yet"
    found = view.get("readiness")
    if found is None:
        return ""
    if found["ready"]:
        return f"ready since {clock_time_text(found['since'])}"
    since = found["not_ready_since"]
    text = "not ready" if since is None else f"not ready for {duration_text(max(0.0, view['time'] - since))}"
    return f"{text}: " + (f"waiting for {found['waiting']}" if found["waiting"] else "no answer yet")


def _requeued_text(view: Mapping[str, Any]) -> str:
    """The attempt that the job is queued for, and how the previous one ended; attempts count from 1."""
    over = view["requeued"]
    state = f" {over['state']}" if over["state"] else ""
    done, expected, unit = over["items"], over["items_expected"], unit_word(over)
    stood = "" if done is None else f" at {done}" + (f"/{expected}" if expected else "") + f" {unit}"
    before = f"attempt {over['attempt'] + 1} ended{state}{stood}"
    return f"requeued ({before}), waiting in the queue for attempt {view['attempt'] + 1}"
