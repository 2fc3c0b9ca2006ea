"""Diagnosis of a worker as text for people."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

from exporter.contract.records import JsonObject, JsonValue
from exporter.contract.status import FileSystem
from exporter.gpus.analysis.evidence import gpu_lines
from exporter.progress.work import ITEMS
from exporter.workers.diagnosis import LOG_LINES, DiagnosedError, DiagnosedExit, Diagnosis, Peer

MOST_TEXT_BYTES = 256 * 1024


def render_diagnosis(found: Diagnosis) -> str:
    """Render the diagnosis for people: the failure first, the log ends last."""
    for lines in (LOG_LINES, 50, 25, 10, 5):
        text = "\n".join(_text_lines(found, lines)) + "\n"
        if len(text.encode("utf-8", "replace")) <= MOST_TEXT_BYTES:
            return text
    return text.encode("utf-8", "replace")[: MOST_TEXT_BYTES - 100].decode("utf-8", "ignore") + "\n... (cut)\n"


def _text_lines(found: Diagnosis, log_lines: int) -> Iterator[str]:
    yield _headline(found)
    yield ""
    if found.exit is not None:
        yield from _section("Exit", _value_lines(_exit_values(found.exit)))
    yield from _error_text(found.error)
    yield from _section("GPUs of the worker", _gpu_text(found))
    yield from _section("Progress", _value_lines(found.progress))
    yield from _section("Last minutes", _samples_text(found))
    yield from _section("Process", _value_lines(found.process))
    yield from _section("Memory of the job on this node", _value_lines(found.memory.to_json()))
    yield from _section("Disk space", map(_disk_text, found.filesystems))
    yield from _section("Other workers of this node", map(_peer_text, found.peers))
    # `end` of the job is when its allocation ends
    job = {"time_limit_at" if key == "end" else key: value for key, value in found.job.items()}
    yield from _section("Job", _value_lines({**job, "stop": found.stop}))
    for name, stack in found.stacks.items():
        yield from _section(f"Stack of {name}", [stack])
    for log in found.logs:
        shown = log.lines[-log_lines:]
        cut = log.cut or len(shown) < len(log.lines)
        what = "is empty" if not shown else f"the last {len(shown)} lines" if cut else "all of it"
        yield f"== {log.file} ({_size_text(log.size_bytes)}): {what}"
        yield from shown
        yield ""


def _headline(found: Diagnosis) -> str:
    attempt = f", attempt {found.attempt}" if found.attempt else ""
    restart = f", restart {found.restart}" if found.restart else ""
    who = f"{found.worker} (rank {found.rank}) on {found.node}{attempt}{restart}"
    if found.exit is None:
        since = f" since {_time_text(found.since)}" if found.since is not None else ""
        return f"{who} makes no progress{since}"
    return f"{who} failed: {found.exit.reason} at {_time_text(found.exit.end)}"


def _exit_values(ended: DiagnosedExit) -> JsonObject:
    received: list[JsonValue] = [
        f"{entry.signal} from pid {entry.from_pid} at {_time_text(entry.time)}" for entry in ended.signals_received
    ]
    return ended.to_json() | {"signals_received": received}


def _error_text(error: DiagnosedError | None) -> Iterator[str]:
    if error is None:
        yield from _section("Last error in its logs", ["none found"])
        return
    line = f", line {error.line_number}" if error.line_number is not None else ""
    found: JsonObject = {
        "error" if error.certain else "perhaps": error.line,
        "led_to": error.led_to,
        "raised_at": error.source,
        "place": f"{error.file}{line} (byte {error.offset}), {error.lines_from_end} lines before the end",
    }
    traceback = ["", *(f"  {line}" for line in error.traceback)] if error.traceback else []
    yield from _section("Last error in its logs", [*_value_lines(found), *traceback])


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    shown = list(lines)
    if shown:
        yield f"== {title}"
        yield from shown
        yield ""


def _value_lines(values: JsonObject) -> Iterator[str]:
    """One line for each known value or entry."""
    for key, value in values.items():
        if value is None or value == [] or value == {}:
            continue
        entries: list[JsonValue] = [value]
        if isinstance(value, list):
            has_texts = any(isinstance(entry, str) for entry in value)
            entries = value if has_texts else [", ".join(_value_text(key, entry) for entry in value)]
        for at, entry in enumerate(entries):
            yield f"  {key if at == 0 else '':<22} {_value_text(key, entry)}"


def _value_text(key: str, value: JsonValue) -> str:
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


def _samples_text(found: Diagnosis) -> Iterator[str]:
    if not found.course:
        return
    present = {key for sample in found.course for key in sample}
    columns = [(key, title) for key, title in _COLUMNS if key in present]
    widths = [max(11, len(title)) for _, title in columns]
    yield "  " + "".join((f"{'time':>8}", *(f"  {t:>{w}}" for (_, t), w in zip(columns, widths, strict=True))))
    for sample in found.course:
        cells = [_value_text(key, sample[key]) if key in sample else "-" for key, _ in columns]
        moment = f"{sample['time'] - found.end:+.0f}s"
        yield "  " + "".join((f"{moment:>8}", *(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))))


def _gpu_text(found: Diagnosis) -> Iterator[str]:
    for title, text, moment in gpu_lines(found.gpus):
        when = ""
        if moment is not None:
            when = f", at {_time_text(moment)}"
            if found.exit is not None:
                order = "before" if moment <= found.end else "after"
                when += f" ({abs(found.end - moment):.0f} s {order} the end)"
        yield f"  {title:<22} {text}{when}"


def _disk_text(entry: FileSystem) -> str:
    if entry.available_bytes is None or entry.size_bytes is None:
        return f"  {entry.group:<22} does not answer"
    return f"  {entry.group:<22} {_size_text(entry.available_bytes)} free of {_size_text(entry.size_bytes)}"


def _peer_text(peer: Peer) -> str:
    texts = [str(peer.state)]
    if peer.exit is not None:
        texts = [f"ended by {peer.exit.reason} at {_time_text(peer.exit.time)}"]
    if peer.stalled:
        texts.append("stalled")
    if peer.items is not None:
        texts.append(f"{peer.items} {peer.unit or ITEMS}, last at {_time_text(peer.last_progress)}")
    return f"  {peer.worker} (rank {peer.rank}): {', '.join(texts)}"


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
