"""Why a worker ended: from evidence to a reason, and never further than the evidence goes."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONS = (
    "completed",
    "app_error",
    "cuda_oom",
    "host_oom",
    "gpu_fault",
    "nccl_timeout",
    "disk_full",
    "crashed_signal",
    "terminated_peer",
    "time_limit",
    "preempted",
    "cancelled",
    "node_failure",
    "launch_failed",
    "killed_unknown",
)
"""Every exit reason, in the order in which the documentation lists them."""

CONSEQUENCES = frozenset({"completed", "terminated_peer", "time_limit", "preempted", "cancelled"})
"""Reasons that are nobody's fault: not the cause of a job's failure."""

_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}
CLOCK_SKEW_S = 5.0
"""Difference that the clocks of two nodes may have."""
_ORDINARY_SIGNALS = range(1, 32)
_ASKS_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL}
DISK_FULL_BYTES = 1 << 20
"""Less than this left is a full disk: a log cannot say so, since it could not be written."""
_LOG_REASONS = ("cuda_oom", "gpu_fault", "nccl_timeout", "disk_full")


@dataclass(frozen=True)
class Stop:
    """The launcher's notice that it is ending the job: the reason that workers inherit, why, and when."""

    reason: str
    cause: str
    time: float
    rank: int | None = None
    """Rank and run of the worker whose end has led to the stop, if one has: its end is no consequence of it."""
    restart: int | None = None

    def follows_from(self, rank: int, restart: int) -> bool:
        """Whether this run of a worker is what the job is being stopped for."""
        return (self.rank, self.restart) == (rank, restart)


@dataclass(frozen=True)
class Evidence:
    """What is known about one end. ``code`` and ``signal`` are both None when no exit record was left."""

    code: int | None = None
    signal: int | None = None
    end: float | None = None
    launch_error: str | None = None
    oom_kills: int | None = None
    """Kills by the kernel's OOM killer in the worker's own cgroup during its life."""
    forwarded: tuple[int, ...] = ()
    """Signals that reached the wrapper from outside before the worker ended."""
    log_classes: tuple[str, ...] = ()
    """Names of the error patterns found in the last part of the log."""
    disk_available_bytes: int | None = None
    """Space that was left in the run directory when it ended."""
    stop: Stop | None = None
    job_end: float | None = None
    """Time limit of the job as a moment."""


@dataclass(frozen=True)
class Verdict:
    """A reason with the evidence for it, as words."""

    reason: str
    evidence: tuple[str, ...]


def verdict(evidence: Evidence) -> Verdict:
    """The reason of one end.

    The order matters: a clean exit is a clean exit whatever else happened; an end that somebody
    above asked for is not the worker's fault; a kernel OOM kill outranks what the log says.
    """
    code, number = evidence.code, evidence.signal
    facts = [_status_words(code, number)]
    if evidence.launch_error:
        return Verdict("launch_failed", (evidence.launch_error,))
    if code == 0:
        return Verdict("completed", tuple(facts))
    if number is None and code is not None and code - 128 in _ORDINARY_SIGNALS:
        number = code - 128  # a shell between us and the program says it this way
    # a signal that asks for the end counts, whatever status it led to; another one only if the worker died of it
    forwarded = tuple(entry for entry in evidence.forwarded if entry in _ASKS_TO_END or entry == number)
    stop, no_record = evidence.stop, code is None and number is None
    if stop is not None and evidence.end is not None and evidence.end < stop.time - CLOCK_SKEW_S:
        stop = None  # it had ended long before
    if stop is not None and (forwarded or no_record):
        # a teardown goes through the wrapper: it has passed a signal on, or was itself killed at the deadline
        facts.append(f"the job was being stopped: {stop.cause}")
        return Verdict(stop.reason, tuple(facts))
    if evidence.oom_kills:
        facts.append(f"oom_kill rose by {evidence.oom_kills} in the worker's cgroup")
        return Verdict("host_oom", tuple(facts))
    for reason in _LOG_REASONS:
        if reason in evidence.log_classes:
            facts.append(f"its log ends with {reason}")
            return Verdict(reason, tuple(facts))
    available = evidence.disk_available_bytes
    if code and available is not None and available < DISK_FULL_BYTES:
        facts.append(f"{available} bytes were left on the disk of the run directory")
        return Verdict("disk_full", tuple(facts))
    if forwarded:
        names = ", ".join(signal_name(entry) for entry in forwarded)
        facts.append(f"{names} came from outside")
        if evidence.job_end is not None and evidence.end is not None and evidence.end >= evidence.job_end - 60:
            return Verdict("time_limit", (*facts, "the time limit was reached"))
        return Verdict("cancelled", tuple(facts))
    if number in _CRASHES:
        return Verdict("crashed_signal", tuple(facts))
    if number is not None or code is None:
        facts.append("nothing tells who sent it" if number is not None else "no exit record was left")
        return Verdict("killed_unknown", tuple(facts))
    return Verdict("app_error", tuple(facts))


def _status_words(code: int | None, number: int | None) -> str:
    if number is not None:
        return f"killed by {signal_name(number)}"
    return "exit status unknown" if code is None else f"exit status {code}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number as text when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(ends: Sequence[tuple[float, str]]) -> int | None:
    """Index of the first failure in time among (end, reason); the rest are its consequences."""
    failures = [(end, index) for index, (end, reason) in enumerate(ends) if reason not in CONSEQUENCES]
    return min(failures)[1] if failures else None


def parse_stop(state: Mapping[str, Any]) -> Stop | None:
    """The notice in a ``state.json``, or None while the job is not being stopped."""
    stop = state.get("stop")
    if not isinstance(stop, dict):
        return None
    try:
        found = Stop(
            str(stop["reason"]), str(stop["cause"]), float(stop["time"]), stop.get("rank"), stop.get("restart", 0)
        )
    except (KeyError, TypeError, ValueError):
        return None
    return found if found.reason in REASONS else None


def exit_evidence(
    record: Mapping[str, Any], stop: Stop | None, log_classes: Sequence[str], job_end: float | None
) -> Evidence:
    """The evidence in a wrapper's exit record, together with what is known beside it."""
    return Evidence(
        code=record.get("code"),
        signal=record.get("signal"),
        end=record.get("end"),
        launch_error=record.get("error"),
        oom_kills=record.get("oom_kills"),
        forwarded=tuple(int(entry[1]) for entry in record.get("signals") or ()),
        log_classes=tuple(log_classes),
        disk_available_bytes=record.get("disk_available_bytes"),
        stop=stop,
        job_end=job_end,
    )
