"""Diagnosis of a worker that failed or stalled: the JSON file in ``diagnostics/``."""

import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import NOTHING, JsonObject, JsonValue, Record, RecordError, from_json, to_json
from exporter.contract.status import (
    FileSystem,
    Memory,
    NodeStatus,
    Position,
    ProcessDetails,
    RunFacts,
    TaskPosition,
    WorkerEnd,
    WorkerStatus,
)
from exporter.gpus.analysis.evidence import GpuEvidence, gpu_evidence, gpu_sample
from exporter.logs.errors.last_error import LogError, last_error
from exporter.logs.errors.lines import plain_line
from exporter.logs.patterns import Pattern
from exporter.logs.redact import redact, redact_all
from exporter.workers.exit_reason import signal_name

LOG_LINES = 100
LINE_LENGTH = 2048
STACK_LENGTH = 32 * 1024
MOST_PATHS = 200
MOST_PEERS = 256
MOST_JSON_BYTES = 1 << 20

RECENT_SAMPLES = 30  # all are kept, about one a second
OLDER_SAMPLES = 54
OLDER_EVERY = 5  # one in five older samples is kept: 5 minutes in all


@dataclass(frozen=True)
class LogEnd:
    """The end of one log, from the start of a line if it has several."""

    name: str  # relative to the run directory, if inside it
    size_bytes: int
    text: bytes
    start: int  # offset of the text in the file
    lines_before: int | None  # lines of the file before the text; None if too large to count


class DiagnosedRun(Record):
    """One run of a task."""

    worker: str
    role: str
    rank: int
    ranks: int  # of its worker
    node: str
    attempt: int
    restart: int


@dataclass(frozen=True)
class RunFiles:
    """Files of one run of a task in the run directory so far."""

    run: DiagnosedRun
    start: Mapping[str, object]  # start record; empty if missing, like the next two
    ended: Mapping[str, object]
    state: Mapping[str, object]
    logs: tuple[LogEnd, ...]


class RecentSamples:
    """Last minutes of one worker: every sample of the last 30 s, and every fifth before that.

    Samples are kept as bytes: as mappings they take four times the memory, scattered among what lives shorter.
    """

    def __init__(self) -> None:
        self._older: deque[bytes] = deque(maxlen=OLDER_SAMPLES)
        self._recent: deque[bytes] = deque()
        self._layouts: list[tuple[tuple[str, bool], ...]] = []  # names of values, and which are whole numbers
        self._aged_out_count = 0

    def __len__(self) -> int:
        return len(self._older) + len(self._recent)

    def add(self, worker: WorkerStatus, status: NodeStatus) -> None:
        """Add a sample of a worker from the status of its node."""
        sample: dict[str, float] = {"time": status.time}
        for name in _SAMPLED:
            value = getattr(worker, name)
            if value is not None:
                sample[name] = value
        if status.gpus is not None:
            sample |= gpu_sample(worker, status.gpus)
        memory = status.memory or Memory()
        if memory.used_bytes is not None:
            sample["cgroup_used_bytes"] = memory.used_bytes
        if memory.limit_bytes is not None:
            sample["cgroup_limit_bytes"] = memory.limit_bytes
        self._recent.append(self._pack(sample))
        if len(self._recent) > RECENT_SAMPLES:
            oldest = self._recent.popleft()
            if self._aged_out_count % OLDER_EVERY == 0:
                self._older.append(oldest)
            self._aged_out_count += 1

    def samples(self) -> list[dict[str, float]]:
        """Samples from the oldest to the latest, with ``cpu_cores`` used since the previous one."""
        found: list[dict[str, float]] = []
        for sample in (*self._older, *self._recent):
            found.append(self._unpack(sample))
            if len(found) > 1:
                before, now = found[-2], found[-1]
                if "cpu_s" in before and "cpu_s" in now and now["time"] > before["time"]:
                    cores = (now["cpu_s"] - before["cpu_s"]) / (now["time"] - before["time"])
                    now["cpu_cores"] = round(max(0.0, cores), 2)
        return found

    def _pack(self, sample: Mapping[str, float]) -> bytes:
        layout = tuple((name, isinstance(value, int)) for name, value in sample.items())
        if layout not in self._layouts:  # one of few
            self._layouts.append(layout)
        return struct.pack(f"{1 + len(layout)}d", self._layouts.index(layout), *sample.values())

    def _unpack(self, packed: bytes) -> dict[str, float]:
        number, *values = struct.unpack(f"{len(packed) // 8}d", packed)
        pairs = zip(self._layouts[int(number)], values, strict=True)
        return {name: int(value) if is_whole else value for (name, is_whole), value in pairs}


_SAMPLED = ("rss_bytes", "cpu_s", "children", "threads", "items")


class RecordedRun(Record):
    """What the wrapper recorded about a run."""

    pid: int | None = None
    host: str | None = None
    step: str | None = None
    start: float | None = None
    end: float | None = None
    core: bool | None = None
    user_seconds: float | None = None
    system_seconds: float | None = None
    max_rss_bytes: int | None = None
    oom_kills: int | None = None
    disk_available_bytes: int | None = None
    error: str | None = None  # why it could not be started


class ReceivedSignal(NamedTuple):
    """A signal that the worker received."""

    time: float
    signal: str
    from_pid: int | None


class ExitCause(Record):
    """Exit reason, with its evidence."""

    reason: str
    evidence: tuple[str, ...] = ()
    code: int | None = None
    signal: str | None = None


class DiagnosedExit(ExitCause, RecordedRun):
    """The end of the run."""

    duration_s: float | None = None
    signals_received: tuple[ReceivedSignal, ...] = ()


class DiagnosedError(Record):
    """The most informative last error of the logs."""

    kind: str
    line: str
    led_to: str | None = None
    source: str | None = None
    traceback: tuple[str, ...] = ()
    file: str
    line_number: int | None = None
    offset: int
    lines_from_end: int
    certain: bool


class Peer(Position):
    """Another worker of the node."""

    worker: str
    rank: int
    up: bool = False
    state: str | None = None
    restarts: int = 0
    last_progress: float | None = None
    stalled: bool | None = None
    exit: WorkerEnd | None = None


class DiagnosedLog(Record):
    """The end of one log."""

    file: str
    size_bytes: int
    lines: tuple[str, ...] = ()
    cut: bool = False  # whether it has earlier lines


class Diagnosis(DiagnosedRun):
    """Everything known about a failure or stall of one run of a worker."""

    SCHEMA: ClassVar[int | None] = 1

    kind: str  # failure or stall
    time: float
    exit: DiagnosedExit | None = None  # of a failure
    since: float | None = None  # last progress before a stall
    error: DiagnosedError | None = None
    progress: JsonObject = NOTHING
    course: tuple[Mapping[str, float], ...] = ()  # samples of the last minutes
    gpus: GpuEvidence | None = None  # None for a worker without GPUs
    process: JsonObject = NOTHING
    memory: Memory = Memory()
    filesystems: tuple[FileSystem, ...] = ()
    peers: tuple[Peer, ...] = ()
    job: JsonObject = NOTHING
    stop: JsonValue = None
    stacks: Mapping[str, str] = NOTHING
    logs: tuple[DiagnosedLog, ...] = ()

    @property
    def end(self) -> float:
        """When the worker ended; else when this was written."""
        return self.exit.end if self.exit is not None and self.exit.end is not None else self.time


@dataclass(frozen=True)
class NodeSituation:
    """Facts of the node's sidecar at the time; a launcher without a sidecar passes what it has."""

    time: float
    status: NodeStatus
    recent_samples: Sequence[Mapping[str, float]] = ()
    details: ProcessDetails | None = None  # open files and other last known facts of the process
    stacks: Mapping[str, str] | None = None  # of running processes, by description


def build_failure_diagnosis(
    files: RunFiles, situation: NodeSituation, ended: WorkerEnd, errors: Sequence[Pattern]
) -> Diagnosis:
    """Build the diagnosis of a failure.

    ``ended`` has the exit reason and evidence as in the status and the report; ``errors`` are the error patterns of all
    jobs.
    """
    return _build("failure", files, situation, errors, ended=_exit(files, ended))


def build_stall_diagnosis(
    files: RunFiles, situation: NodeSituation, since: float | None, errors: Sequence[Pattern]
) -> Diagnosis:
    """Build the diagnosis of a running worker without progress ``since`` this time."""
    return _build("stall", files, situation, errors, since=since)


def _build(
    kind: str,
    files: RunFiles,
    situation: NodeSituation,
    errors: Sequence[Pattern],
    ended: DiagnosedExit | None = None,
    since: float | None = None,
) -> Diagnosis:
    status, run = situation.status, files.run
    workers = {worker.rank: worker for worker in status.workers}
    own = workers.get(run.rank) or WorkerStatus(worker=run.worker, rank=run.rank)
    peers = [_peer(worker) for rank, worker in sorted(workers.items()) if rank != run.rank]
    job = _fields(status.job, _JOB_FIELDS)
    if "phase" in files.state:
        job["phase"] = to_json(files.state["phase"])
    found = Diagnosis.join(
        run,
        kind=kind,
        time=situation.time,
        exit=ended,
        since=since,
        error=_last_error(files.logs, errors),
        progress=_fields(own, _PROGRESS_FIELDS),
        gpus=_gpus(own, files, situation),
        process=_process(own, files, situation.details),
        memory=status.memory or Memory(),
        filesystems=status.filesystems,
        peers=tuple(peers[:MOST_PEERS]),
        job=job,
        stop=to_json(files.state.get("stop")),
        stacks={name: text[:STACK_LENGTH] for name, text in (situation.stacks or {}).items()},
    )
    # Logs are redacted as texts, since a secret may span several lines; samples are numbers, under names of ours.
    redacted = Diagnosis.from_json(redact_all(found.to_json()))
    return _fit_size(redacted.replace(course=tuple(situation.recent_samples), logs=tuple(map(_log, files.logs))))


_PROGRESS_FIELDS = (
    *("state", "up", "unit", "items", "items_expected", "items_processed", "rate", "last_progress", "stalled"),
    *("values", "log_errors"),
)
_JOB_FIELDS = ("job_id", "job_name", "user", "phase", "stop_reason", "start", "end", "attempt", "nodes")


def _fields(record: Record, names: Sequence[str]) -> dict[str, JsonValue]:
    return {name: to_json(getattr(record, name)) for name in names}


def _exit(files: RunFiles, ended: WorkerEnd) -> DiagnosedExit:
    record = {**files.start, **files.ended}
    try:
        run = RecordedRun.from_json(record)
        signals = from_json(tuple[tuple[float, int, int | None], ...], record.get("signals") or ())
    except RecordError:  # a file, in which anything can be
        run, signals = RecordedRun(), ()
    end = run.end if run.end is not None else ended.time
    return DiagnosedExit.join(
        ExitCause(reason=ended.reason, evidence=ended.evidence, code=ended.code, signal=ended.signal),
        run,
        end=end,
        duration_s=end - run.start if end is not None and run.start is not None else None,
        signals_received=tuple(ReceivedSignal(time, signal_name(number), pid) for time, number, pid in signals[:20]),
    )


def _gpus(own: WorkerStatus, files: RunFiles, situation: NodeSituation) -> GpuEvidence | None:
    """Evidence about the GPUs of a worker; use and signals only if they are of this run."""
    if own.restarts != files.run.restart:
        own = WorkerStatus.join(TaskPosition.of(own), RunFacts.of(own), gpu_plan=own.gpu_plan)
    return gpu_evidence(own, situation.status.gpus, situation.recent_samples)


def _process(own: WorkerStatus, files: RunFiles, details: ProcessDetails | None) -> JsonObject:
    """Last known facts of the process, limited to this run of the worker."""
    found = _fields(own, ("pid", "gpus", "found_by")) if own.restarts == files.run.restart else {}
    if details is None:
        return found
    return {**found, **details.replace(paths=details.paths[:MOST_PATHS]).to_json()}


def _peer(worker: WorkerStatus) -> Peer:
    return Peer(**{name: getattr(worker, name) for name in Peer.FIELDS})


def _last_error(logs: Sequence[LogEnd], errors: Sequence[Pattern]) -> DiagnosedError | None:
    """The most informative last error of all logs.

    A certain error comes first, then one with a traceback, then the later log.
    """
    best: tuple[tuple[bool, bool], LogEnd, LogError] | None = None
    for log in logs:
        error = last_error(log.text, errors)
        if error is not None and (best is None or (error.certain, bool(error.traceback)) >= best[0]):
            best = (error.certain, bool(error.traceback)), log, error
    if best is None:
        return None
    _, log, error = best
    return DiagnosedError(
        kind=error.kind,
        line=error.line,
        led_to=error.led_to,
        source=error.source,
        traceback=error.traceback,
        file=log.name,
        line_number=None if log.lines_before is None else log.lines_before + error.line_index + 1,
        offset=log.start + error.offset,
        lines_from_end=error.lines_from_end,
        certain=error.certain,
    )


def _log(log: LogEnd) -> DiagnosedLog:
    text = "\n".join(plain_line(raw, None) for raw in log.text.split(b"\n"))
    lines = redact(text).rstrip("\n").split("\n")
    kept = tuple(line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]} ..." for line in lines[-LOG_LINES:])
    return DiagnosedLog(
        file=redact(log.name),
        size_bytes=log.size_bytes,
        lines=kept if text.strip() else (),
        cut=log.start > 0 or len(lines) > LOG_LINES,
    )


def _fit_size(found: Diagnosis) -> Diagnosis:
    """The diagnosis within `MOST_JSON_BYTES`: stacks, peers and logs are halved until it fits."""
    while len(json.dumps(found.to_json(), ensure_ascii=False).encode("utf-8", "surrogatepass")) > MOST_JSON_BYTES:
        if not any(log.lines for log in found.logs) and not found.stacks and not found.peers:
            break
        found = found.replace(
            stacks={name: text[: len(text) // 2] for name, text in found.stacks.items() if len(text) > 1},
            peers=found.peers[: len(found.peers) // 2],
            logs=tuple(
                log.replace(lines=log.lines[-(len(log.lines) // 2) :] if len(log.lines) > 1 else (), cut=True)
                for log in found.logs
            ),
        )
    return found
