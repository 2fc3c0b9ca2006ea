"""Why a worker ended: from evidence to a reason, and never further than the evidence goes."""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.gpus.analysis.xid import BLAMED_ON_PROGRAMS, blames_device, fatal_xid_text, xid_meaning

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
)  # every exit reason, in the order in which the documentation lists them

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
CLOCK_SKEW_S = 5.0  # difference that the clocks of two nodes may have
_ASKS_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL}
_KILLS = _CRASHES | _ASKS_TO_END | {signal.SIGHUP, signal.SIGPIPE, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGALRM}
_KILLS |= {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that a shell tells as 128 and their number; other statuses above 128 are a program's own."""
SIGNAL_COUNTS_S = 600.0
"""How long before an end a signal from outside may be its reason: one that a worker has lived with is none."""
DISK_FULL_BYTES = 1 << 20  # less than this left is a full disk: a log cannot say so, since it could not be written
_LOG_REASONS = ("cuda_oom", "gpu_fault", "nccl_timeout", "disk_full")
"""Log classes that are reasons, those that lead to others first."""
GPU_XID = "gpu_xid"  # log class of what the driver says of a GPU; whether the device is at fault is in the line itself
PEER_LOST = "peer_lost"
"""Log class of a worker that has lost another one: a consequence when there was an earlier failure."""
FAULT_BEFORE_S, FAULT_AFTER_S = 60.0, 10.0
"""How long before an end a GPU fault may be its cause, and how much later the kernel may say so."""
PEER_WINDOW_S = 60.0
"""How long after the failure of a peer a lost connection, or a SIGTERM from nowhere, counts as its consequence."""
LIMIT_OVERRUN_S = 300.0  # how late Slurm may be: it looks every half minute, and sites allow some overrun
TIME_LIMIT_MARGIN_S = 60.0  # Slurm warns, signals and kills around the limit, OverTimeLimit and KillWait included


@dataclass(frozen=True)
class JobStop:
    """The launcher's notice that it is ending the job: the reason that workers inherit, why, and when."""

    reason: str
    cause: str
    time: float
    rank: int | None = None
    """Rank and run of the worker whose end has led to the stop, if one has: its end is no consequence of it."""
    restart: int | None = None
    nodes: tuple[str, ...] = ()
    """Nodes that have failed, if that is why: what ran there failed with them, all else is a consequence."""

    def follows_from(self, rank: int, restart: int) -> bool:
        """Whether this run of a worker is what the job is being stopped for."""
        return (self.rank, self.restart) == (rank, restart)


@dataclass(frozen=True)
class _GpuIncident:
    """Something that has met a GPU of the worker, and when that was told."""

    time: float

    def is_near(self, end: float | None) -> bool:
        """Whether it may be the cause of an end at this moment; of one whose moment is not known it may."""
        return self.is_before(end) and (end is None or end - self.time <= FAULT_BEFORE_S)

    def is_before(self, end: float | None) -> bool:
        """Whether it was there when the worker ended, however long before."""
        return end is None or self.time - end <= FAULT_AFTER_S


@dataclass(frozen=True)
class GpuFault(_GpuIncident):
    """An error that the driver or the kernel reported about a GPU that the worker uses (an NVIDIA Xid)."""

    xid: int
    words: str


@dataclass(frozen=True)
class LostGpu(_GpuIncident):
    """A GPU that the worker uses was seen to be lost, or to need a reset, and still was so when it ended."""

    gpu: str
    words: str  # the driver's

    def told(self, end: float | None) -> str:
        """In words, by the end of the worker."""
        if end is None:
            return f"{self.gpu} was lost: {self.words}"
        if self.time > end:
            return f"{self.gpu} was found lost {self.time - end:.0f} s after its end: {self.words}"
        return f"{self.gpu} was lost {end - self.time:.0f} s before its end: {self.words}"


_DEVICE_WORDS = re.compile(
    r"NVRM: Xid \(PCI:[^)]{1,40}\): (?P<xid>\d{1,4})(?!\d)|fallen off the bus|[Uu]ncorrectable [\w ]{0,40}error"
)


@dataclass(frozen=True)
class LogEvidence:
    """What the end of a worker's log says. ``classes`` are names of error patterns that nothing has followed."""

    classes: tuple[str, ...] = ()
    line: str | None = None  # the decisive line: `RuntimeError: shape mismatch`
    place: str | None = None  # where it stands, for people


@dataclass(frozen=True)
class FailedPeer:
    """Another worker that failed, and when."""

    name: str
    end: float
    reason: str


@dataclass(frozen=True)
class ExitEvidence:
    """What is known about one end. ``code`` and ``signal`` are both None when nobody knows the status."""

    code: int | None = None
    signal: int | None = None
    core: bool = False
    end: float | None = None
    source: str = "wrapper"  # who tells the status: its parent, or the kernel when there is no (more) wrapper
    attached: bool = False  # whether the job was started by others, so that there never was a wrapper
    launch_error: str | None = None
    oom_kills: int | None = None  # kills by the kernel's OOM killer in the worker's own cgroup during its life
    oom_victim: str | None = None  # the kernel log's words when it names a process of the worker as a victim
    forwarded: tuple[int, ...] = ()  # signals that reached the wrapper from outside before the worker ended
    wrapper: str | None = None  # how the wrapper ended that left no record
    log: LogEvidence = LogEvidence()
    gpu_faults: tuple[GpuFault, ...] = ()
    gpu_losses: tuple[LostGpu, ...] = ()
    disk_available_bytes: int | None = None  # space that was left in the run directory when it ended
    stop: JobStop | None = None
    node: str | None = None  # where it ran
    peer: FailedPeer | None = None  # the first other worker that failed
    job_end: float | None = None  # time limit of the job as a moment
    survivors: int = 0  # processes of the worker that were still there after its end
    service: bool = False  # whether it had to serve until it is told to end


@dataclass(frozen=True)
class ExitReason:
    """A reason with the evidence for it, as words."""

    reason: str
    evidence: tuple[str, ...]


def find_exit_reason(evidence: ExitEvidence) -> ExitReason:
    """The reason of one end.

    The order matters: a clean exit is a clean exit whatever else happened; an end that somebody
    above asked for is not the worker's fault; what the kernel says outranks what the log says,
    and the log what the bare status says. A GPU's error outranks the log where no program goes on after it.
    So does the loss of a GPU, which is told whatever the reason of a failure is.
    """
    judged = _reason_with_log(evidence)
    if judged.reason in ("completed", "launch_failed"):
        return judged
    losses = (loss.told(evidence.end) for loss in evidence.gpu_losses if loss.is_before(evidence.end))
    return ExitReason(judged.reason, (*judged.evidence, *(words for words in losses if words not in judged.evidence)))


def needs_log_evidence(evidence: ExitEvidence) -> bool:
    """Whether the verdict asks what the log says: to read the end of one takes some 10 ms, and a job may have 512."""
    return _reason_without_log(evidence) is None


def _reason_without_log(evidence: ExitEvidence) -> ExitReason | None:
    """The verdict on a start that has failed, a clean exit, and an end that was asked for; None for all others."""
    facts = [_status_words(evidence)]
    if evidence.launch_error:
        return ExitReason("launch_failed", (evidence.launch_error,))
    if evidence.code == 0 and evidence.service:
        asking = [signal_name(entry) for entry in evidence.forwarded if entry in _ASKS_TO_END]
        if not asking:
            return None
        if evidence.stop is None:
            return _ended_from_outside(evidence, (*facts, f"{', '.join(asking)} came from outside"))
    if evidence.code == 0:
        if evidence.survivors:
            count = "a process" if evidence.survivors == 1 else f"{evidence.survivors} processes"
            facts.append(f"it had left {count} in the background")
        return ExitReason("completed", tuple(facts))
    asked = _asked_to_end(evidence, bool(_signals_to_end(evidence)))
    return None if asked is None else ExitReason(asked[0], (*facts, asked[1]))


def _number_of(evidence: ExitEvidence) -> int | None:
    """The signal it died of, also where a shell between us and the program says that as 128 and its number."""
    code = evidence.code
    if evidence.signal is None and code is not None and code - 128 in _KILLS:
        return code - 128
    return evidence.signal


def _signals_to_end(evidence: ExitEvidence) -> tuple[int, ...]:
    """Those from outside that ask for the end, whatever status they led to; another one only if it died of it."""
    number = _number_of(evidence)
    return tuple(entry for entry in evidence.forwarded if entry in _ASKS_TO_END or entry == number)


def _reason_with_log(evidence: ExitEvidence) -> ExitReason:
    if (early := _reason_without_log(evidence)) is not None:
        return early
    code, number, facts = evidence.code, _number_of(evidence), [_status_words(evidence)]
    if code == 0:
        return ExitReason("app_error", ("a service ended with code 0 while the job needed it", *_log_words(evidence)))
    forwarded = _signals_to_end(evidence)
    kernel = _kernel_evidence(evidence, killed=number == signal.SIGKILL)
    if kernel is None and (evidence.oom_kills or 0) > 0:
        facts.append("the OOM killer took a process of its control group meanwhile")
    for found in (kernel, _log_evidence(evidence), _disk_evidence(evidence)):
        if found is not None:
            return ExitReason(found[0], (*facts, *found[1:]))
    if forwarded:
        facts.append(f"{', '.join(signal_name(entry) for entry in forwarded)} came from outside")
        return _ended_from_outside(evidence, tuple(facts))
    if number in _CRASHES or (number is None and code is not None):
        fault = _device_fault(evidence) or _program_fault(evidence)
        if fault is not None:
            return ExitReason("gpu_fault", (*facts, *_log_words(evidence), fault))
    if number in _CRASHES:
        return ExitReason("crashed_signal", (*facts, *_log_words(evidence)))
    if number is None and code is not None:
        return ExitReason("app_error", (*facts, *_log_words(evidence)))
    return _unexplained(evidence, number, facts)


def _asked_to_end(evidence: ExitEvidence, forwarded: bool) -> tuple[str, str] | None:
    """The reason of a teardown that reached this worker.

    It goes through the wrapper: that has passed a signal on, or was itself killed at the deadline
    and could not tell the status.
    """
    stop = evidence.stop
    if stop is None or (evidence.end is not None and evidence.end < stop.time - CLOCK_SKEW_S):
        return None  # it had ended long before
    no_record = evidence.source != "wrapper" or (evidence.code is None and evidence.signal is None)
    if forwarded or no_record:
        if evidence.node in stop.nodes:
            return "node_failure", stop.cause
        if stop.reason == "completed":
            return ("completed" if evidence.service else "terminated_peer"), f"the job was over: {stop.cause}"
        # whoever was not ready in time, it was not for those that ran; and a node that could still tell has not failed
        not_its_own = stop.reason == "launch_failed" or (stop.reason == "node_failure" and not no_record)
        reason = "terminated_peer" if not_its_own else stop.reason
        return reason, f"the job was being stopped: {stop.cause}"
    return None


def _kernel_evidence(evidence: ExitEvidence, *, killed: bool) -> tuple[str, str] | None:
    """What the kernel says. A control group may be shared, or a child have been killed long before.

    So its count explains an end by SIGKILL, or one about which the log says nothing else.
    """
    log = evidence.log
    otherwise = _has_reason(log) or (log.line is not None and "kill" not in log.line.lower())
    if (evidence.oom_kills or 0) > 0 and (killed or not otherwise):
        return "host_oom", f"oom_kill rose by {evidence.oom_kills} in the worker's cgroup"
    if evidence.oom_victim:
        return "host_oom", f"the kernel log says: {evidence.oom_victim}"
    for fault in evidence.gpu_faults:
        if fatal_xid_text(fault.xid) and fault.is_near(evidence.end):
            return "gpu_fault", fault.words
    for loss in evidence.gpu_losses:
        if loss.is_near(evidence.end):
            return "gpu_fault", loss.told(evidence.end)
    return None


def _has_reason(log: LogEvidence) -> bool:
    return any(reason in log.classes for reason in _LOG_REASONS)


def _device_fault(evidence: ExitEvidence) -> str | None:
    """An error of a GPU that explains an end about which the log says nothing.

    It need not have ended the program, unless that could not go on after it: then it may also have hung for long.
    """
    if evidence.log.line is not None or _has_reason(evidence.log):
        return None
    near = (f.words for f in evidence.gpu_faults if blames_device(f.xid) and f.is_near(evidence.end))
    return next(near, None) or _earlier_fault(evidence)


def _earlier_fault(evidence: ExitEvidence) -> str | None:
    """An error of a GPU in the worker's life after which no program goes on, or its loss: what hangs ends late."""
    for fault in evidence.gpu_faults:
        if (reason := fatal_xid_text(fault.xid)) and fault.is_before(evidence.end):
            earlier = "" if evidence.end is None else f", {max(0.0, evidence.end - fault.time):.0f} s before its end"
            return f"{fault.words}{earlier}; {reason}"
    losses = (loss.told(evidence.end) for loss in evidence.gpu_losses if loss.is_before(evidence.end))
    return next(losses, None)


def _program_fault(evidence: ExitEvidence) -> str | None:
    """The driver's word for what the program did to a GPU; what only follows from that is left out."""
    for fault in evidence.gpu_faults:
        if fault.xid in BLAMED_ON_PROGRAMS and fault.is_near(evidence.end):
            return f"{fault.words}: {xid_meaning(fault.xid)}, by the program"
    return None


def _log_evidence(evidence: ExitEvidence) -> tuple[str, ...] | None:
    """A reason, and words for it."""
    log, peer = evidence.log, evidence.peer
    after_a_peer = peer is not None and evidence.end is not None and peer.end <= evidence.end
    if PEER_LOST in log.classes and peer is not None and after_a_peer:
        return "terminated_peer", f"it lost {peer.name}, which had ended by {peer.reason}"
    for reason in _LOG_REASONS:
        if reason in log.classes or (reason == "gpu_fault" and _blames_the_device(log)):
            words = "; ".join(_log_words(evidence)) or f"its log says {reason}"
            if reason == "nccl_timeout" and (fault := _earlier_fault(evidence)) is not None:
                return "gpu_fault", fault, words
            return reason, words
    return None


def _blames_the_device(log: LogEvidence) -> bool:
    """Whether the decisive line is of a GPU that is at fault, not of a program at fault on it."""
    found = _DEVICE_WORDS.search(log.line or "") if GPU_XID in log.classes else None
    return found is not None and (found["xid"] is None or blames_device(int(found["xid"])))


def _disk_evidence(evidence: ExitEvidence) -> tuple[str, str] | None:
    available = evidence.disk_available_bytes
    if evidence.code and available is not None and available < DISK_FULL_BYTES:
        return "disk_full", f"{available} bytes were left on the disk of the run directory"
    return None


def _unexplained(evidence: ExitEvidence, number: int | None, facts: list[str]) -> ExitReason:
    """A kill that no evidence of its own explains."""
    peer = evidence.peer
    if (
        evidence.wrapper is None
        and peer is not None
        and evidence.end is not None
        and 0.0 <= evidence.end - peer.end <= PEER_WINDOW_S
    ):
        facts.append(f"{peer.name} had ended by {peer.reason} {evidence.end - peer.end:.1f} s before")
        if number == signal.SIGTERM:
            return ExitReason("terminated_peer", tuple(facts))
    if evidence.attached and number in (signal.SIGTERM, signal.SIGKILL) and _at_the_limit(evidence):
        return ExitReason("time_limit", (*facts, "the time limit was reached"))
    if evidence.wrapper:
        facts.append(f"its wrapper {evidence.wrapper} and left no record: it ended with that")
    elif (number is not None or not evidence.attached) and (fault := _earlier_fault(evidence)) is not None:
        return ExitReason("gpu_fault", (*facts, fault, *_log_words(evidence)))
    if number is not None:
        facts.append("nothing tells who sent it")
    elif evidence.attached:
        facts.append("it was not started by gpujob, and the kernel does not tell its status")
    elif not evidence.wrapper:
        facts.append("no exit record was left")
    return ExitReason("killed_unknown", (*facts, *_log_words(evidence)))


def _ended_from_outside(evidence: ExitEvidence, facts: tuple[str, ...]) -> ExitReason:
    """Somebody has asked it to end, and nobody has said why: the moment may tell."""
    if _at_the_limit(evidence):
        return ExitReason("time_limit", (*facts, "the time limit was reached"))
    return ExitReason("cancelled", facts)


def _at_the_limit(evidence: ExitEvidence) -> bool:
    end, limit = evidence.end, evidence.job_end
    if end is None or limit is None:
        return False
    return limit - TIME_LIMIT_MARGIN_S <= end <= limit + LIMIT_OVERRUN_S  # a job that outlives it was given more time


def _log_words(evidence: ExitEvidence) -> tuple[str, ...]:
    log = evidence.log
    if log.line is None:
        return ()
    return (f"the last error in its log: {log.line}" + (f" ({log.place})" if log.place else ""),)


def _status_words(evidence: ExitEvidence) -> str:
    if evidence.signal is not None:
        return f"killed by {signal_name(evidence.signal)}" + (", core dumped" if evidence.core else "")
    return "exit status unknown" if evidence.code is None else f"exit status {evidence.code}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number as text when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(ends: Sequence[tuple[float, str]]) -> int | None:
    """Index of the first failure in time among (end, reason); the rest are its consequences."""
    failures = [(end, index) for index, (end, reason) in enumerate(ends) if reason not in CONSEQUENCES]
    return min(failures)[1] if failures else None


def parse_job_stop(state: Mapping[str, Any]) -> JobStop | None:
    """The notice in a ``state.json``, or None while the job is not being stopped."""
    stop = state.get("stop")
    if not isinstance(stop, dict):
        return None
    try:
        found = JobStop(
            str(stop["reason"]),
            str(stop["cause"]),
            float(stop["time"]),
            stop.get("rank"),
            stop.get("restart", 0),
            tuple(stop.get("nodes") or ()),
        )
    except (KeyError, TypeError, ValueError):
        return None
    return found if found.reason in REASONS else None


def evidence_of_record(record: Mapping[str, Any], **beside: Any) -> ExitEvidence:
    """The evidence in an exit record, together with what is known ``beside`` it (fields of Evidence)."""
    return ExitEvidence(
        code=record.get("code"),
        signal=record.get("signal"),
        core=bool(record.get("core")),
        end=record.get("end"),
        source=str(record.get("source", "wrapper")),
        launch_error=record.get("error"),
        oom_kills=record.get("oom_kills"),
        forwarded=tuple(_signals_that_count(record, beside.get("stop"))),
        wrapper=record.get("wrapper"),
        disk_available_bytes=record.get("disk_available_bytes"),
        survivors=int(record.get("survivors") or 0),
        service=bool(record.get("service")),
        oom_victim=record.get("oom_victim"),
        gpu_faults=tuple(GpuFault(**fault) for fault in record.get("gpu_faults") or ()),
        gpu_losses=tuple(LostGpu(**loss) for loss in record.get("gpu_lost") or ()),
        **beside,
    )


def _signals_that_count(record: Mapping[str, Any], stop: JobStop | None) -> Iterator[int]:
    """Signals shortly before the end, or since the job was being stopped."""
    end = record.get("end")
    since = float("-inf") if end is None else end - SIGNAL_COUNTS_S
    if stop is not None:
        since = min(since, stop.time - CLOCK_SKEW_S)
    for moment, number, *_ in record.get("signals") or ():
        if moment >= since:
            yield int(number)
