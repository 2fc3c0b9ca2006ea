"""Diagnosis of a worker that failed or stalled, as JSON and as text."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from exporter.contract.status import NodeGpus, WorkerStatus
from exporter.gpus.analysis.evidence import GpuEvidence, gpu_evidence, gpu_lines, gpu_sample
from exporter.logs.last_error import LogError, last_error, plain_line
from exporter.logs.patterns import Pattern
from exporter.logs.redact import redact, redact_all
from exporter.progress.work import unit_word
from exporter.workers.exit_reason import signal_name

SCHEMA = 1
LOG_LINES = 100
LINE_LENGTH = 2048
STACK_LENGTH = 32 * 1024
MOST_PATHS = 200
MOST_PEERS = 256
MOST_JSON_BYTES = 1 << 20
MOST_TEXT_BYTES = 256 * 1024

RECENT_SAMPLES = 30  # all are kept, about one a second
OLDER_SAMPLES = 54
OLDER_EVERY = 5  # one in five older samples is kept: 5 minutes in all


class LogEndView(Protocol):
    """The end of one log; see ``exporter.workers.diagnosis_reader``."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def text(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def lines_before(self) -> int | None: ...


class RunFilesView(Protocol):
    """Files of one run of a task; see ``exporter.workers.diagnosis_reader``."""

    @property
    def worker(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def restart(self) -> int: ...
    @property
    def start(self) -> Mapping[str, Any]: ...
    @property
    def ended(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> Mapping[str, Any]: ...
    @property
    def logs(self) -> Sequence[LogEndView]: ...


class RecentSamples:
    """Last minutes of one worker: every sample of the last 30 s, and every fifth before that."""

    def __init__(self) -> None:
        self._older: deque[Mapping[str, float]] = deque(maxlen=OLDER_SAMPLES)
        self._recent: deque[Mapping[str, float]] = deque()
        self._aged_out_count = 0

    def __len__(self) -> int:
        return len(self._older) + len(self._recent)

    def add(
        self, now: float, worker: Mapping[str, Any], memory: Mapping[str, Any], gpus: Mapping[str, Any] | None = None
    ) -> None:
        """Add a sample from a worker's entry, the memory and the GPUs of the status."""
        known = {key: value for key, value in worker.items() if key in _WORKER_KEYS and isinstance(value, int | float)}
        sample: dict[str, float] = {
            "time": now,
            **known,
            **gpu_sample(WorkerStatus.from_json(worker), NodeGpus.from_json(gpus) if gpus else None),
        }
        for key in ("used_bytes", "limit_bytes"):
            if memory.get(key) is not None:
                sample[f"cgroup_{key}"] = memory[key]
        self._recent.append(sample)
        if len(self._recent) > RECENT_SAMPLES:
            oldest = self._recent.popleft()
            if self._aged_out_count % OLDER_EVERY == 0:
                self._older.append(oldest)
            self._aged_out_count += 1

    def samples(self) -> list[dict[str, float]]:
        """Samples from the oldest to the latest, with ``cpu_cores`` used since the previous one."""
        found: list[dict[str, float]] = []
        for sample in (*self._older, *self._recent):
            found.append(dict(sample))
            if len(found) > 1:
                before, now = found[-2], found[-1]
                if "cpu_s" in before and "cpu_s" in now and now["time"] > before["time"]:
                    cores = (now["cpu_s"] - before["cpu_s"]) / (now["time"] - before["time"])
                    now["cpu_cores"] = round(max(0.0, cores), 2)
        return found


_WORKER_KEYS = frozenset({"rss_bytes", "threads", "children", "cpu_s", "items"})


@dataclass(frozen=True)
class NodeSituation:
    """Facts of the node's sidecar at the time; a launcher without a sidecar passes what it has."""

    time: float
    status: Mapping[str, Any]  # of the node, as at `/status`
    recent_samples: Sequence[Mapping[str, float]] = ()
    details: Mapping[str, Any] | None = None  # open files and other last known facts of the process
    stacks: Mapping[str, str] | None = None  # of running processes, by description


def build_failure_diagnosis(
    files: RunFilesView, situation: NodeSituation, ended: Mapping[str, Any], errors: Sequence[Pattern]
) -> dict[str, Any]:
    """Build the diagnosis of a failure.

    ``ended`` has the exit reason and evidence as in the status and the report; ``errors`` are the error patterns of all
    jobs.
    """
    return _build("failure", files, situation, {"exit": _exit_facts(files, ended)}, errors)


def build_stall_diagnosis(
    files: RunFilesView, situation: NodeSituation, since: float | None, errors: Sequence[Pattern]
) -> dict[str, Any]:
    """Build the diagnosis of a running worker without progress ``since`` this time."""
    return _build("stall", files, situation, {"since": since}, errors)


def _build(
    kind: str, files: RunFilesView, situation: NodeSituation, facts: Mapping[str, Any], errors: Sequence[Pattern]
) -> dict[str, Any]:
    status = situation.status
    workers = {int(entry["rank"]): entry for entry in status.get("workers", ())}
    own = workers.get(files.rank, {})
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": kind,
        "time": situation.time,
        **{name: getattr(files, name) for name in ("worker", "role", "rank", "ranks", "node", "attempt", "restart")},
        **facts,
        "error": _last_error(files.logs, errors),
        "progress": {key: own[key] for key in _PROGRESS_KEYS if own.get(key) is not None},
        "course": list(situation.recent_samples),
        "gpus": _gpu_evidence(_entry_of_run(own, files), status.get("gpus"), situation.recent_samples),
        "process": _process_facts(own, files, situation.details),
        "memory": status.get("memory") or {},
        "filesystems": list(status.get("filesystems") or ()),
        "peers": [_peer_facts(entry) for rank, entry in sorted(workers.items()) if rank != files.rank][:MOST_PEERS],
        "job": {key: value for key, value in (status.get("job") or {}).items() if key in _JOB_KEYS},
        "stop": files.state.get("stop"),
        "stacks": {name: text[:STACK_LENGTH] for name, text in (situation.stacks or {}).items()},
        "logs": [],
    }
    if "phase" in files.state:
        body["job"]["phase"] = files.state["phase"]
    body = redact_all(body)
    body["logs"] = [_log_facts(log) for log in files.logs]  # redacted as texts, since a secret may span several lines
    return _fit_size(body)


_PROGRESS_KEYS = (
    *("state", "up", "unit", "items", "items_expected", "items_processed", "rate", "last_progress", "stalled"),
    *("values", "log_errors"),
)
_JOB_KEYS = frozenset({"job_id", "job_name", "user", "phase", "stop_reason", "start", "end", "attempt", "nodes"})
_RECORD_KEYS = (
    *("pid", "host", "step", "start", "end", "core", "user_seconds", "system_seconds", "max_rss_bytes"),
    *("oom_kills", "disk_available_bytes", "error"),
)


def _exit_facts(files: RunFilesView, ended: Mapping[str, Any]) -> dict[str, Any]:
    record = {**files.start, **files.ended}
    found = {key: ended.get(key) for key in ("reason", "evidence", "code", "signal")}
    found |= {key: record[key] for key in _RECORD_KEYS if record.get(key) is not None}
    if found.get("end") is None:
        found["end"] = ended.get("time")
    if found.get("start") is not None and found["end"] is not None:
        found["duration_s"] = found["end"] - found["start"]
    received = record.get("signals")
    if isinstance(received, list) and received:
        found["signals_received"] = [
            {"time": entry[0], "signal": signal_name(int(entry[1])), "from_pid": entry[2]} for entry in received[:20]
        ]
    return found


def _gpu_evidence(own: Mapping[str, Any], gpus: object, samples: Sequence[Mapping[str, float]]) -> Any:
    if not own:
        return {}
    found = gpu_evidence(WorkerStatus.from_json(own), NodeGpus.from_json(gpus) if gpus else None, samples)
    return found.to_json() if found is not None else {}


def _entry_of_run(own: Mapping[str, Any], files: RunFilesView) -> dict[str, Any]:
    """Entry of a worker, without the GPU values if they are of a later run."""
    kept = own.get("restarts") == files.restart
    return {key: value for key, value in own.items() if kept or not key.startswith("gpu_") or key == "gpu_plan"}


def _process_facts(own: Mapping[str, Any], files: RunFilesView, details: Mapping[str, Any] | None) -> dict[str, Any]:
    """Last known facts of the process, limited to this run of the worker."""
    found: dict[str, Any] = {}
    if own.get("restarts") == files.restart:
        found |= {key: own[key] for key in ("pid", "gpus", "found_by") if own.get(key) is not None}
    for key, value in (details or {}).items():
        if value is not None:
            found[key] = list(value)[:MOST_PATHS] if isinstance(value, list | tuple) else value
    return found


def _peer_facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    ended = entry.get("exit")
    found = {key: entry.get(key) for key in ("worker", "rank", "up", "state", "restarts", "items", "last_progress")}
    found |= {"unit": entry.get("unit"), "stalled": entry.get("stalled")}
    found["exit"] = {key: ended.get(key) for key in ("reason", "code", "signal", "time")} if ended else None
    return found


def _last_error(logs: Sequence[LogEndView], errors: Sequence[Pattern]) -> dict[str, Any] | None:
    """The most informative last error of all logs.

    A certain error comes first, then one with a traceback, then the later log.
    """
    best: tuple[tuple[bool, bool], LogEndView, LogError] | None = None
    for log in logs:
        error = last_error(log.text, errors)
        if error is not None and (best is None or (error.certain, bool(error.traceback)) >= best[0]):
            best = (error.certain, bool(error.traceback)), log, error
    if best is None:
        return None
    _, log, error = best
    return {
        "kind": error.kind,
        "line": error.line,
        "led_to": error.led_to,
        "source": error.source,
        "traceback": list(error.traceback),
        "file": log.name,
        "line_number": None if log.lines_before is None else log.lines_before + error.line_index + 1,
        "offset": log.start + error.offset,
        "lines_from_end": error.lines_from_end,
        "certain": error.certain,
    }


def _log_facts(log: LogEndView) -> dict[str, Any]:
    text = "\n".join(plain_line(raw, None) for raw in log.text.split(b"\n"))
    lines = redact(text).rstrip("\n").split("\n")
    kept = [line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]} ..." for line in lines[-LOG_LINES:]]
    return {
        "file": redact(log.name),
        "size_bytes": log.size_bytes,
        "lines": kept if text.strip() else [],
        "cut": log.start > 0 or len(lines) > LOG_LINES,
    }


def _fit_size(body: dict[str, Any]) -> dict[str, Any]:
    """The body within `MOST_JSON_BYTES`: stacks, peers and logs are halved until it fits."""
    while len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")) > MOST_JSON_BYTES:
        if not any(log["lines"] for log in body["logs"]) and not body["stacks"] and not body["peers"]:
            break
        body["stacks"] = {name: text[: len(text) // 2] for name, text in body["stacks"].items() if len(text) > 1}
        body["peers"] = body["peers"][: len(body["peers"]) // 2]
        for log in body["logs"]:
            log["lines"] = log["lines"][-(len(log["lines"]) // 2) :] if len(log["lines"]) > 1 else []
            log["cut"] = True
    return body


def render_diagnosis(body: Mapping[str, Any]) -> str:
    """Render the diagnosis for people: the failure first, the log ends last."""
    for lines in (LOG_LINES, 50, 25, 10, 5):
        text = "\n".join(_text_lines(body, lines)) + "\n"
        if len(text.encode("utf-8", "replace")) <= MOST_TEXT_BYTES:
            return text
    return text.encode("utf-8", "replace")[: MOST_TEXT_BYTES - 100].decode("utf-8", "ignore") + "\n... (cut)\n"


def _text_lines(body: Mapping[str, Any], log_lines: int) -> Iterator[str]:
    yield _headline(body)
    yield ""
    yield from _exit_text(body)
    yield from _error_text(body)
    yield from _section("GPUs of the worker", _gpu_text(body))
    yield from _section("Progress", _value_lines(body["progress"]))
    yield from _section("Last minutes", _samples_text(body))
    yield from _section("Process", _value_lines(body["process"]))
    yield from _section("Memory of the job on this node", _value_lines(body["memory"]))
    yield from _section("Disk space", _disk_text(body["filesystems"]))
    yield from _section("Other workers of this node", (_peer_text(peer) for peer in body["peers"]))
    # `end` of the job is when its allocation ends
    job = {"time_limit_at" if key == "end" else key: value for key, value in body["job"].items()}
    yield from _section("Job", _value_lines({**job, **({"stop": body["stop"]} if body["stop"] else {})}))
    for name, stack in body["stacks"].items():
        yield from _section(f"Stack of {name}", stack.split("\n"))
    for log in body["logs"]:
        shown = log["lines"][-log_lines:]
        cut = log["cut"] or len(shown) < len(log["lines"])
        what = "is empty" if not shown else f"the last {len(shown)} lines" if cut else "all of it"
        yield f"== {log['file']} ({_size_text(log['size_bytes'])}): {what}"
        yield from shown
        yield ""


def _headline(body: Mapping[str, Any]) -> str:
    who = f"{body['worker']} (rank {body['rank']}) on {body['node']}"
    run = "".join(
        f", {word} {body[key]}" for key, word in (("attempt", "attempt"), ("restart", "restart")) if body[key]
    )
    if body["kind"] == "stall":
        since = f" since {_time_text(body['since'])}" if body["since"] is not None else ""
        return f"{who}{run} makes no progress{since}"
    return f"{who}{run} failed: {body['exit']['reason']} at {_time_text(body['exit'].get('end'))}"


def _exit_text(body: Mapping[str, Any]) -> Iterator[str]:
    if "exit" in body:
        shown = {key: value for key, value in body["exit"].items() if key != "signals_received"}
        received = [
            f"{entry['signal']} from pid {entry['from_pid']} at {_time_text(entry['time'])}"
            for entry in body["exit"].get("signals_received", ())
        ]
        yield from _section("Exit", _value_lines({**shown, "signals_received": received or None}))


def _error_text(body: Mapping[str, Any]) -> Iterator[str]:
    error = body["error"]
    if error is None:
        yield from _section("Last error in its logs", ["none found"])
        return
    line = f", line {error['line_number']}" if error["line_number"] is not None else ""
    place = f"{error['file']}{line} (byte {error['offset']}), {error['lines_from_end']} lines before the end"
    found = {
        "error" if error["certain"] else "perhaps": error["line"],
        "led_to": error["led_to"],
        "raised_at": error["source"],
        "place": place,
    }
    traceback = ["", *(f"  {line}" for line in error["traceback"])] if error["traceback"] else []
    yield from _section("Last error in its logs", [*_value_lines(found), *traceback])


def _section(title: str, lines: "Iterator[str] | Sequence[str]") -> Iterator[str]:
    shown = list(lines)
    if shown:
        yield f"== {title}"
        yield from shown
        yield ""


def _value_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """One line for each known value or entry."""
    for key, value in values.items():
        if value is None or value == [] or value == {}:
            continue
        entries = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not any(isinstance(entry, str) for entry in value):
            entries = [", ".join(_value_text(key, entry) for entry in value)]
        for at, entry in enumerate(entries):
            yield f"  {key if at == 0 else '':<22} {_value_text(key, entry)}"


def _value_text(key: str, value: Any) -> str:
    """One value in readable form, with the unit that its key implies."""
    if key == "oom_victims" and isinstance(value, Mapping):
        return ", ".join(f"pid {pid} at {_time_text(moment)}" for pid, moment in value.items())
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_value_text(name, entry)}" for name, entry in value.items() if entry is not None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("_bytes"):
        return f"{_size_text(value)}"
    if key in ("start", "end", "time_limit_at", "time", "since", "last_progress"):
        return _time_text(value)
    if key.endswith(("_s", "_seconds")):
        return f"{value:.1f} s"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


_COLUMNS = (
    *(("rss_bytes", "rss"), ("cpu_cores", "cores"), ("threads", "threads"), ("children", "children")),
    *(("cgroup_used_bytes", "cgroup used"), ("cgroup_limit_bytes", "of"), ("items", "items")),
    *(("gpu_utilization_ratio", "GPU busy"), ("gpu_sm_ratio", "own kernels"), ("gpu_memory_bytes", "GPU memory")),
)


def _samples_text(body: Mapping[str, Any]) -> Iterator[str]:
    samples = body["course"]
    if not samples:
        return
    end = body.get("exit", {}).get("end") or body["time"]
    present = {key for sample in samples for key in sample}
    columns = [(key, title) for key, title in _COLUMNS if key in present]
    widths = [max(11, len(title)) for _, title in columns]
    yield "  " + "".join((f"{'time':>8}", *(f"  {t:>{w}}" for (_, t), w in zip(columns, widths, strict=True))))
    for sample in samples:
        cells = [_value_text(key, sample[key]) if key in sample else "-" for key, _ in columns]
        moment = f"{sample['time'] - end:+.0f}s"
        yield "  " + "".join((f"{moment:>8}", *(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))))


def _gpu_text(body: Mapping[str, Any]) -> Iterator[str]:
    end = body.get("exit", {}).get("end") or body["time"]
    for title, text, moment in gpu_lines(GpuEvidence.from_json(body["gpus"]) if body.get("gpus") else None):
        when = ""
        if moment is not None:
            when = f", at {_time_text(moment)}"
            if body["kind"] == "failure":
                when += f" ({abs(end - moment):.0f} s {'before' if moment <= end else 'after'} the end)"
        yield f"  {title:<22} {text}{when}"


def _disk_text(filesystems: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in filesystems:
        free, size = entry.get("available_bytes"), entry.get("size_bytes")
        if isinstance(free, int | float) and isinstance(size, int | float):
            yield f"  {entry.get('group')!s:<22} {_size_text(free)} free of {_size_text(size)}"
        else:
            yield f"  {entry.get('group')!s:<22} does not answer"


def _peer_text(peer: Mapping[str, Any]) -> str:
    ended = peer["exit"]
    texts = [str(peer["state"])]
    if ended:
        texts = [f"ended by {ended['reason']} at {_time_text(ended['time'])}"]
    if peer["stalled"]:
        texts.append("stalled")
    if peer["items"] is not None:
        texts.append(f"{peer['items']} {unit_word(peer.get('unit'))}, last at {_time_text(peer['last_progress'])}")
    return f"  {peer['worker']} (rank {peer['rank']}): {', '.join(texts)}"


def _size_text(count: float) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _time_text(time_s: object) -> str:
    if not isinstance(time_s, int | float):
        return "an unknown time"
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return str(time_s)
