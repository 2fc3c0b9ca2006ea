"""Find the reason of a worker's end, and claim no more than the evidence supports."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.records import RecordError, from_json
from exporter.gpus.analysis.xid import PROGRAM_FAULT_XIDS, fatal_xid_text, is_device_fault, xid_meaning

REASONS = (
    "completed",
    "app_error",
    "cuda_oom",
    "host_oom",
    "gpu_fault",
    "nccl_timeout",
    "disk_full",
    "resource_limit",
    "crashed_signal",
    "terminated_peer",
    "time_limit",
    "preempted",
    "cancelled",
    "node_failure",
    "launch_failed",
    "killed_unknown",
)  # all exit reasons, in the order of the documentation

# Reasons that are not the cause of a job's failure.
CONSEQUENCES = frozenset({"completed", "terminated_peer", "time_limit", "preempted", "cancelled"})

_CRASH_SIGNALS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}
CLOCK_SKEW_S = 5.0  # most that the clocks of two nodes differ
_LIMIT_SIGNALS = {
    signal.SIGXCPU: "its limit of CPU time (ulimit -t)",
    signal.SIGXFSZ: "its limit of file size (ulimit -f)",
}  # which the kernel sends at these limits
_TERMINATION_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL}
_USER_SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}  # they ask a program to save, and end one that does not handle them
_FATAL_SIGNALS = (
    _CRASH_SIGNALS | _TERMINATION_SIGNALS | _LIMIT_SIGNALS.keys() | {signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM}
)
# A shell reports these signals as 128 + number; other statuses above 128 are the program's own.
_FATAL_SIGNALS |= _USER_SIGNALS
SHELL_KILL = 128 + signal.SIGKILL  # exit status by which a shell reports SIGKILL
SIGNAL_WINDOW_S = 600.0  # a signal this long before the end is not its reason: the worker survived it
OOM_BURST_S = 5.0  # a victim takes seconds to free many GiB, and meanwhile the kernel kills others
DISK_FULL_BYTES = 1 << 20  # with less free space the disk is full, and the log could not be written
# Log classes that are reasons, causes before their consequences.
_LOG_REASONS = ("cuda_oom", "host_oom", "gpu_fault", "nccl_timeout", "disk_full", "resource_limit")
GPU_XID = "gpu_xid"  # log class of driver messages about a GPU; the line itself shows whether the device is at fault
LOADER_KILLED = "loader_killed"  # log class of a data-loading process that died, often killed by the kernel
_DEATHS = {"worker_failed", LOADER_KILLED}  # log classes of lines that only say that some process ended
PEER_LOST = "peer_lost"  # log class of a lost peer: a consequence if another worker failed earlier
# A GPU fault may cause an end this much later, and the kernel may report it this much after the end.
FAULT_BEFORE_S, FAULT_AFTER_S = 60.0, 10.0
PEER_WINDOW_S = 60.0  # a lost connection or unexplained SIGTERM this soon after a peer's failure is its consequence
LIMIT_OVERRUN_S = 300.0  # how late Slurm may be: it checks every 30 s, and sites allow some overrun
TIME_LIMIT_MARGIN_S = 60.0  # Slurm warns, signals and kills around the limit, including OverTimeLimit and KillWait


@dataclass(frozen=True)
class JobStop:
    """The launcher's notice that it is ending the job, with the reason that workers inherit."""

    reason: str
    cause: str
    time: float
    rank: int | None = None  # rank and run of the worker that caused the stop; its own end is no consequence
    restart: int = 0
    # Failed nodes, if they are the reason. Their workers failed with them; all other ends are consequences.
    nodes: tuple[str, ...] = ()
    requeue: bool = False  # whether tasks are to save for a requeue, which a cancellation may still prevent

    def was_caused_by(self, rank: int, restart: int) -> bool:
        """Whether this run of a worker caused the stop."""
        return (self.rank, self.restart) == (rank, restart)


@dataclass(frozen=True)
class _GpuIncident:
    """Something that happened to a GPU of the worker, and when it was reported."""

    time: float

    def is_near(self, end: float | None) -> bool:
        """Whether it may have caused an end at this time; true if the time is unknown."""
        return self.is_before(end) and (end is None or end - self.time <= FAULT_BEFORE_S)

    def is_before(self, end: float | None) -> bool:
        """Whether it happened before the end, at any distance."""
        return end is None or self.time - end <= FAULT_AFTER_S


@dataclass(frozen=True)
class GpuFault(_GpuIncident):
    """An NVIDIA Xid that driver or kernel reported for a GPU of the worker."""

    xid: int
    words: str


@dataclass(frozen=True)
class LostGpu(_GpuIncident):
    """A GPU of the worker that was lost, or needed a reset, and still did when the worker ended."""

    gpu: str
    words: str  # from the driver

    def describe(self, end: float | None) -> str:
        """Describe the loss relative to the end of the worker."""
        if end is None:
            return f"{self.gpu} was lost: {self.words}"
        if self.time > end:
            return f"{self.gpu} was found lost {self.time - end:.0f} s after its end: {self.words}"
        return f"{self.gpu} was lost {end - self.time:.0f} s before its end: {self.words}"


_DEVICE_FAULT = re.compile(
    r"NVRM: Xid \(PCI:[^)]{1,40}\): (?P<xid>\d{1,4})(?!\d)|fallen off the bus|GPU is lost"
    r"|[Uu]ncorrectable [\w ]{0,40}error"
)


@dataclass(frozen=True)
class LogEvidence:
    """Evidence from the end of a worker's log; ``classes`` are error patterns with no progress after them."""

    classes: tuple[str, ...] = ()
    line: str | None = None  # decisive line, such as `RuntimeError: shape mismatch`
    place: str | None = None  # its source and file, for people


@dataclass(frozen=True)
class FailedPeer:
    """Another worker that failed, and when."""

    name: str
    end: float
    reason: str
    oom_node: int | None = None  # index of the node on which the kernel killed it for lack of memory


def failed_peer(task: Task, end: float, reason: str, *, killed: bool) -> FailedPeer:
    """Describe an end as evidence for other workers. ``killed``: by SIGKILL, as the kernel does."""
    return FailedPeer(task.worker, end, reason, task.node_index if killed and reason == "host_oom" else None)


@dataclass(frozen=True)
class ExitEvidence:
    """Facts about one end; ``code`` and ``signal`` are both None if the status is unknown."""

    code: int | None = None
    signal: int | None = None
    core: bool = False
    end: float | None = None
    # who reported the status: the wrapper, the kernel if there was none or it was lost, the step if the disk was full
    source: str = "wrapper"
    attached: bool = False  # whether others started the job, so that there was no wrapper
    error: str | None = None  # why it could not be started
    oom_kills: int | None = None  # OOM kills in the worker's own cgroup during this run
    oom_victim: str | None = None  # words of the kernel log, if it names a process of the worker as a victim
    max_rss_bytes: int | None = None  # most memory that one of its processes used
    forwarded: tuple[int, ...] = ()  # signals from outside that reached the wrapper before the end
    wrapper: str | None = None  # how the wrapper ended, if it left no record
    log: LogEvidence = LogEvidence()
    gpu_faults: tuple[GpuFault, ...] = ()
    gpu_lost: tuple[LostGpu, ...] = ()
    disk_available_bytes: int | None = None  # free space in the run directory at the end
    stop: JobStop | None = None
    follows_stop: bool = False  # whether the failure for which the job is stopped explains a lost connection
    node: str | None = None
    peer: FailedPeer | None = None  # the first other worker that failed
    oom_peers: tuple[FailedPeer, ...] = ()  # other workers of its node that the kernel killed for lack of memory
    job_end: float | None = None  # when the job reaches its time limit
    survivors: int = 0  # processes of the worker that outlived it
    service: bool = False  # whether it had to serve until asked to end

    def with_peers(self, peers: Iterable[FailedPeer], node_index: int) -> "ExitEvidence":
        """Add the failures of others that its end may follow from.

        A victim of the OOM killer may end last: its memory is freed first.
        """
        if self.end is None:
            return self
        lately = [peer for peer in peers if self.end - PEER_WINDOW_S <= peer.end <= self.end + OOM_BURST_S]
        before = [peer for peer in lately if peer.end <= self.end]
        return replace(
            self,
            peer=min(before, key=lambda peer: peer.end, default=None),
            oom_peers=tuple(peer for peer in lately if peer.oom_node == node_index),
        )


@dataclass(frozen=True)
class ExitReason:
    """An exit reason, with its evidence in words."""

    reason: str
    evidence: tuple[str, ...]


def find_exit_reason(evidence: ExitEvidence) -> ExitReason:
    """Find the reason of one end.

    The order matters. A clean exit comes first, then an end that was requested from above. The kernel outranks the log,
    and the log outranks the bare status. A GPU error outranks the log if no program survives it, and so does the loss
    of a GPU. A loss is reported as evidence with every failure.
    """
    result = _reason_with_log(evidence)
    if result.reason in ("completed", "launch_failed"):
        return result
    losses = (loss.describe(evidence.end) for loss in evidence.gpu_lost if loss.is_before(evidence.end))
    return ExitReason(result.reason, (*result.evidence, *(text for text in losses if text not in result.evidence)))


def needs_log_evidence(evidence: ExitEvidence) -> bool:
    """Whether the reason depends on the log. Reading one log end takes 10 ms, and a job may have 512."""
    return _reason_without_log(evidence) is None


def awaits_oom_victim(evidence: ExitEvidence) -> bool:
    """Whether a peer whose end is not known yet may be the one that the OOM killer chose.

    A peer notices the loss at once, while the victim still frees its memory.
    """
    if (evidence.oom_kills or 0) <= 0 or evidence.oom_peers or evidence.oom_victim or evidence.code == 0:
        return False
    if _reason_without_log(evidence) is not None:
        return False
    is_its_own = _has_oom_kill_of_its_own(evidence)
    return is_its_own is None or (not is_its_own and PEER_LOST in evidence.log.classes)


def awaits_notice(evidence: ExitEvidence) -> bool:
    """Whether the notice of a stop may still name the failure that explains a lost connection.

    A peer on another node notices the loss at once, and the launcher a moment later.
    """
    if PEER_LOST not in evidence.log.classes or evidence.code == 0 or not _may_follow_peer(evidence.log):
        return False
    return _reason_from_kernel(evidence) is None and _loss_text(evidence) is None


def _reason_without_log(evidence: ExitEvidence) -> ExitReason | None:
    """Reason of a failed start, a clean exit or a requested end; None for all others."""
    facts = [_status_text(evidence)]
    if evidence.error:
        return ExitReason("launch_failed", (evidence.error,))
    if evidence.code == 0 and evidence.service:
        asking = [signal_name(entry) for entry in evidence.forwarded if entry in _TERMINATION_SIGNALS]
        if not asking:
            return None
        if evidence.stop is None:
            return _reason_of_request(evidence, (*facts, f"{', '.join(asking)} sent by another process"))
    if evidence.code == 0:
        if evidence.survivors:
            count = "a process" if evidence.survivors == 1 else f"{evidence.survivors} processes"
            facts.append(f"it had left {count} in the background")
        return ExitReason("completed", tuple(facts))
    if _was_oom_killed_before_stop(evidence):
        return None
    asked = _teardown_reason(evidence, bool(_requests_to_end(evidence)))
    if asked is None:
        return None
    killed = [_oom_of_peer_text(evidence)] if asked[0] == "terminated_peer" and _noticed_oom_of_peer(evidence) else []
    return ExitReason(asked[0], (*facts, asked[1], *killed))


def _noticed_oom_of_peer(evidence: ExitEvidence) -> bool:
    """Whether the kernel had killed a peer of its control group when it ended, by itself or as it was asked."""
    return (evidence.oom_kills or 0) > 0 and bool(evidence.oom_peers)


def _oom_of_peer_text(evidence: ExitEvidence) -> str:
    return f"the kernel had killed {evidence.oom_peers[0].name} of the same control group"


def _was_oom_killed_before_stop(evidence: ExitEvidence) -> bool:
    """Whether the OOM killer had chosen it before the stop reached it: freeing its memory takes seconds."""
    stop, end = evidence.stop, evidence.end
    if stop is None or end is None or end - stop.time > OOM_BURST_S:
        return False
    return evidence.signal == signal.SIGKILL and ((evidence.oom_kills or 0) > 0 or evidence.oom_victim is not None)


def _fatal_signal(evidence: ExitEvidence) -> int | None:
    """Signal that killed it, also if a shell in between reported 128 + number."""
    code = evidence.code
    if evidence.signal is None and code is not None and code - 128 in _FATAL_SIGNALS:
        return code - 128
    return evidence.signal


def _requests_to_end(evidence: ExitEvidence) -> tuple[int, ...]:
    """Signals from outside that request the end, whatever its status, and the signal that killed it."""
    number = _fatal_signal(evidence)
    return tuple(entry for entry in evidence.forwarded if entry in _TERMINATION_SIGNALS or entry == number)


def _reason_with_log(evidence: ExitEvidence) -> ExitReason:
    if (early := _reason_without_log(evidence)) is not None:
        return early
    code, number, facts = evidence.code, _fatal_signal(evidence), [_status_text(evidence)]
    if code == 0:
        return ExitReason("app_error", ("a service ended with code 0 while the job needed it", *_log_text(evidence)))
    forwarded = _requests_to_end(evidence)
    kernel = _reason_from_kernel(evidence)
    if kernel is None and (evidence.oom_kills or 0) > 0:
        facts.append("the OOM killer ended a process of its control group during the run")
    for found in (kernel, _reason_from_log(evidence), _reason_from_disk(evidence)):
        if found is not None:
            return ExitReason(found[0], (*facts, *found[1:]))
    if forwarded:
        facts.append(f"{', '.join(signal_name(entry) for entry in forwarded)} sent by another process")
        return _reason_of_request(evidence, tuple(facts))
    for limit, text in _LIMIT_SIGNALS.items():
        if number == limit:
            return ExitReason("resource_limit", (*facts, f"it reached {text}", *_log_text(evidence)))
    if number in _CRASH_SIGNALS or (number is None and code is not None):
        fault = _device_fault(evidence) or _program_fault(evidence)
        if fault is not None:
            return ExitReason("gpu_fault", (*facts, *_log_text(evidence), fault))
    if number in _CRASH_SIGNALS:
        return ExitReason("crashed_signal", (*facts, *_log_text(evidence)))
    if number is None and code is not None:
        return ExitReason("app_error", (*facts, *_log_text(evidence)))
    return _reason_of_kill(evidence, number, facts)


def _teardown_reason(evidence: ExitEvidence, has_signals: bool) -> tuple[str, str] | None:
    """Reason of a teardown that reached this worker, as (reason, words).

    The wrapper passed a signal on, or was itself killed at the deadline and left no record.
    """
    stop = evidence.stop
    if stop is None or _ended_before_stop(evidence, stop):
        return None
    no_record = evidence.source != "wrapper" or (evidence.code is None and evidence.signal is None)
    if has_signals or no_record:
        if evidence.node in stop.nodes:
            return "node_failure", stop.cause
        if stop.reason == "completed":
            return ("completed" if evidence.service else "terminated_peer"), f"the job was over: {stop.cause}"
        # A service that was not ready in time is not the failure of running workers. A node that still reports has not
        # failed.
        not_its_own = stop.reason == "launch_failed" or (stop.reason == "node_failure" and not no_record)
        reason = "terminated_peer" if not_its_own else stop.reason
        return reason, f"the job was being stopped: {stop.cause}"
    return None


def _ended_before_stop(evidence: ExitEvidence, stop: JobStop) -> bool:
    """Whether it ended so long before the stop that clocks do not explain it."""
    return evidence.end is not None and evidence.end < stop.time - CLOCK_SKEW_S


def _reason_from_kernel(evidence: ExitEvidence) -> tuple[str, str] | None:
    """Reason according to the kernel, as (reason, words).

    A cgroup may be shared, and a child may have been killed long before. So its OOM count explains only a SIGKILL, or
    an end that the log does not explain. A kill of another worker is not its own: it only noticed.
    """
    victims, is_its_own = evidence.oom_peers, _has_oom_kill_of_its_own(evidence)
    if is_its_own or (is_its_own is None and not victims):
        return "host_oom", f"oom_kill rose by {evidence.oom_kills} in the worker's cgroup{_memory_text(evidence)}"
    if evidence.oom_victim:
        return "host_oom", f"the kernel log says: {evidence.oom_victim}{_memory_text(evidence)}"
    if is_its_own is None:
        return "terminated_peer", _oom_of_peer_text(evidence)
    for fault in evidence.gpu_faults:
        if fatal_xid_text(fault.xid) and fault.is_near(evidence.end):
            return "gpu_fault", fault.words
    for loss in evidence.gpu_lost:
        if loss.is_near(evidence.end):
            return "gpu_fault", loss.describe(evidence.end)
    return None


def _has_oom_kill_of_its_own(evidence: ExitEvidence) -> bool | None:
    """Whether the cgroup's count of OOM kills explains the end by itself; None if only its peers can show that.

    The count itself does not: some kernels count a kill twice.
    """
    log = evidence.log
    if (evidence.oom_kills or 0) <= 0:
        return False
    if _fatal_signal(evidence) == signal.SIGKILL or LOADER_KILLED in log.classes:
        return True
    is_explained = _has_reason(log) or (log.line is not None and not _DEATHS.intersection(log.classes))
    return False if is_explained else None


def _has_reason(log: LogEvidence) -> bool:
    return any(reason in log.classes for reason in _LOG_REASONS)


def _device_fault(evidence: ExitEvidence) -> str | None:
    """A GPU error that explains an end without an error in the log.

    A fatal error may be much older than the end, since the program may have hung. Other errors must be near the end.
    """
    if evidence.log.line is not None or _has_reason(evidence.log):
        return None
    near = (f.words for f in evidence.gpu_faults if is_device_fault(f.xid) and f.is_near(evidence.end))
    return next(near, None) or _earlier_fault(evidence)


def _earlier_fault(evidence: ExitEvidence) -> str | None:
    """A GPU loss or a fatal GPU error at any time before the end: a hanging program ends late."""
    for fault in evidence.gpu_faults:
        if (reason := fatal_xid_text(fault.xid)) and fault.is_before(evidence.end):
            earlier = "" if evidence.end is None else f", {max(0.0, evidence.end - fault.time):.0f} s before its end"
            return f"{fault.words}{earlier}; {reason}"
    losses = (loss.describe(evidence.end) for loss in evidence.gpu_lost if loss.is_before(evidence.end))
    return next(losses, None)


def _program_fault(evidence: ExitEvidence) -> str | None:
    """The driver's report of what the program did wrong on a GPU, without follow-up errors."""
    for fault in evidence.gpu_faults:
        if fault.xid in PROGRAM_FAULT_XIDS and fault.is_near(evidence.end):
            return f"{fault.words}: {xid_meaning(fault.xid)}, by the program"
    return None


def _reason_from_log(evidence: ExitEvidence) -> tuple[str, ...] | None:
    """Reason according to the log, with text for it."""
    log = evidence.log
    if PEER_LOST in log.classes and (loss := _loss_text(evidence)) is not None:
        return "terminated_peer", loss
    for reason in _log_reasons(log):
        text = "; ".join(_log_text(evidence)) or f"its log says {reason}"
        if reason == "nccl_timeout" and (fault := _earlier_fault(evidence)) is not None:
            return "gpu_fault", fault, text
        return reason, text
    return None


def _log_reasons(log: LogEvidence) -> list[str]:
    """Reasons that the log gives, causes before their consequences."""
    blames_device = _line_blames_device(log)
    return [reason for reason in _LOG_REASONS if reason in log.classes or (reason == "gpu_fault" and blames_device)]


def _may_follow_peer(log: LogEvidence) -> bool:
    """Whether the failure of a peer that may be later explains all errors of the log.

    A worker of several processes that failed by itself may show a lost connection between them, too.
    """
    return all(reason == "nccl_timeout" for reason in _log_reasons(log))


def _loss_text(evidence: ExitEvidence) -> str | None:
    """Which failure explains a lost connection; None if none is known."""
    peer, stop = evidence.peer, evidence.stop
    if peer is None or evidence.end is None or peer.end > evidence.end:
        peer = next(iter(evidence.oom_peers), None)
    if peer is not None:
        return f"it lost {peer.name}, which had ended by {peer.reason}"
    names_worker = evidence.follows_stop and stop is not None and stop.rank is not None
    names_worker = names_worker and _may_follow_peer(evidence.log)
    if stop is not None and names_worker and not _ended_before_stop(evidence, stop):
        return f"it lost a peer, and the job was being stopped: {stop.cause}"
    return None


def _line_blames_device(log: LogEvidence) -> bool:
    """Whether the decisive line blames the GPU, not the program on it."""
    found = _DEVICE_FAULT.search(log.line or "") if GPU_XID in log.classes else None
    return found is not None and (found["xid"] is None or is_device_fault(int(found["xid"])))


def _reason_from_disk(evidence: ExitEvidence) -> tuple[str, str] | None:
    available = evidence.disk_available_bytes
    if evidence.code and available is not None and available < DISK_FULL_BYTES:
        return "disk_full", f"{available} bytes were left on the disk of the run directory"
    return None


def _reason_of_kill(evidence: ExitEvidence, number: int | None, facts: list[str]) -> ExitReason:
    """Reason of a kill without evidence of its own."""
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
    if evidence.attached and number in (signal.SIGTERM, signal.SIGKILL) and _is_at_time_limit(evidence):
        return ExitReason("time_limit", (*facts, "the time limit was reached"))
    if evidence.wrapper:
        facts.append(f"its wrapper {evidence.wrapper} and left no record, so the worker ended with it")
    elif (number is not None or not evidence.attached) and (fault := _earlier_fault(evidence)) is not None:
        return ExitReason("gpu_fault", (*facts, fault, *_log_text(evidence)))
    if number is not None:
        facts.append("sender unknown")
    elif evidence.attached:
        facts.append("it was not started by gpujob, so its status is unknown")
    elif not evidence.wrapper:
        facts.append("no exit record was left")
    return ExitReason("killed_unknown", (*facts, *_log_text(evidence)))


def _reason_of_request(evidence: ExitEvidence, facts: tuple[str, ...]) -> ExitReason:
    """Reason of an end that an unknown sender requested: its time may show the time limit.

    A signal to save is no request to end.
    """
    if _is_at_time_limit(evidence):
        return ExitReason("time_limit", (*facts, "the time limit was reached"))
    return ExitReason("app_error" if _USER_SIGNALS.issuperset(_requests_to_end(evidence)) else "cancelled", facts)


def _is_at_time_limit(evidence: ExitEvidence) -> bool:
    end, limit = evidence.end, evidence.job_end
    if end is None or limit is None:
        return False
    # A job that outlives this had its limit extended.
    return limit - TIME_LIMIT_MARGIN_S <= end <= limit + LIMIT_OVERRUN_S


def _log_text(evidence: ExitEvidence) -> tuple[str, ...]:
    log = evidence.log
    if log.line is None:
        return ()
    return (f"the last error in its log: {log.line}" + (f" ({log.place})" if log.place else ""),)


def _memory_text(evidence: ExitEvidence) -> str:
    used = evidence.max_rss_bytes
    return f", and its largest process had used {used / 2**20:.0f} MiB" if used else ""


def _status_text(evidence: ExitEvidence) -> str:
    number = _fatal_signal(evidence)
    unhandled = ", which the program did not handle" if number in _USER_SIGNALS else ""
    if evidence.signal is not None:
        return f"killed by {signal_name(evidence.signal)}{unhandled}" + (", core dumped" if evidence.core else "")
    if evidence.code is None:
        return "exit status unknown"
    word = f", a shell's word for {signal_name(number)}{unhandled}" if number else ""
    return f"exit status {evidence.code}{word}"


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGKILL`` for 9, or its number as text if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(ends: Sequence[tuple[float, str]]) -> int | None:
    """Index of the earliest failure among (end, reason), or None; the others are consequences."""
    failures = [(end, index) for index, (end, reason) in enumerate(ends) if reason not in CONSEQUENCES]
    return min(failures)[1] if failures else None


def parse_job_stop(state: Mapping[str, object]) -> JobStop | None:
    """Parse the notice in ``state.json``; None while the job is not being stopped."""
    try:
        found = from_json(JobStop, state.get("stop"))
    except RecordError:
        return None
    return found if found.reason in REASONS else None


_RECORDED = (
    *("code", "signal", "core", "end", "source", "error", "oom_kills", "oom_victim", "max_rss_bytes"),
    *("wrapper", "gpu_faults", "gpu_lost", "disk_available_bytes", "survivors", "service"),
)  # fields of `ExitEvidence` that an exit record has under the same name


def evidence_from_record(record: Mapping[str, object], stop: JobStop | None = None) -> ExitEvidence:
    """Evidence from an exit record, with its signals shortly before the end or after the stop began."""
    try:
        known = from_json(ExitEvidence, {name: record[name] for name in _RECORDED if record.get(name) is not None})
        signals = from_json(tuple[tuple[float, int, int | None], ...], record.get("signals") or ())
    except RecordError:  # a file, in which anything can be
        known, signals = ExitEvidence(), ()
    since = float("-inf") if known.end is None else known.end - SIGNAL_WINDOW_S
    if stop is not None:
        since = min(since, stop.time - CLOCK_SKEW_S)
    return replace(known, stop=stop, forwarded=tuple(number for moment, number, _ in signals if moment >= since))
