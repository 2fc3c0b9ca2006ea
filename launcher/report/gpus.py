"""GPUs of a job in ``report.md``: activity, problems, and use by workers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.events import LoggedEvent
from exporter.contract.report import (
    GpuDeviceReport,
    GpuReport,
    GpuSums,
    NodeGpuReport,
    WorkerGpu,
    WorkerReport,
)
from exporter.gpus.analysis.node_status import (
    PREFIX,
    assignable_gpus,
    busy_text,
    divided_gpus,
    energy_text,
    missing_gpus_text,
    reason_text,
    xid_text,
)
from exporter.gpus.analysis.xid import NOISE
from exporter.gpus.records import GIB
from launcher.words import clock_text, plain_item, plain_text

MOST_LINE_BYTES = 64 * 1024  # of an event; it has less
EVENTS_SHOWN = 20  # events shown in the text; the JSON has more


def read_gpu_events(run_dir: Path, since: float | None) -> Iterator[LoggedEvent]:
    """GPU events since this attempt began, or all events if ``since`` is None."""
    try:
        with run_files.open_regular(run_dir / run_files.EVENTS_FILE) as lines:
            while content := lines.readline(MOST_LINE_BYTES):
                line = content.decode("utf-8", "replace")
                if f'"{PREFIX}' in line and (event := _parse_event(line, since)) is not None:
                    yield event
    except OSError:
        return


def _parse_event(line: str, since: float | None) -> LoggedEvent | None:
    """Parse one line; None if it is truncated or older than ``since``."""
    try:
        event = LoggedEvent.from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return event if since is None or event.time >= since else None


def gpu_sections(gpus: GpuReport, workers: Sequence[WorkerReport]) -> Iterator[str]:
    """Markdown lines of the GPUs and workers of a report."""
    yield from ("", "## GPUs", "")
    yield from ("| node | GPU | busy | peak memory | energy | state |", "|---|---|---|---|---|---|")
    for node in gpus.nodes:
        count, wholes = len(assignable_gpus(node.gpus)), divided_gpus(node.gpus)
        if count != 1:
            state = node.health or node.driver_state
            name = f"all {count}" if count else "none seen"
            yield _row(node.node, name, *_usage_cells(node, None, includes_all_instances=bool(wholes)), state)
        for device in node.gpus:
            amounts = _usage_cells(device, device.memory_total_bytes, includes_all_instances=device.gpu in wholes)
            yield _row(node.node, device.gpu, *amounts, _state_text(device, node))
    problems = [line for node in gpus.nodes for line in _problem_lines(node)]
    if problems:
        yield from ("", *problems)
    yield from _event_lines(gpus)
    rows = [_worker_gpu_row(worker, device) for worker in workers for device in worker.gpu_devices]
    if rows:
        yield from ("", "## GPUs of workers", "")
        yield from ("| worker | node | GPU | UUID | planned | used |", "|---|---|---|---|---|---|")
        yield from rows
    misplaced = [
        f"- {plain_item(worker.worker)}: {plain_text(worker.gpu_misplaced)}"
        for worker in workers
        if worker.gpu_misplaced
    ]
    if misplaced:
        yield from ("", *misplaced)


def _event_lines(gpus: GpuReport) -> Iterator[str]:
    """Markdown lines for the first GPU events."""
    if gpus.events:
        yield from ("", "GPU events:", "")
    for event in gpus.events[:EVENTS_SHOWN]:
        place = " ".join(part for part in (event.node, event.worker) if part)
        text = f"{plain_text(event.event)}: {plain_text(event.detail)}"
        yield f"- {clock_text(event.time)} {plain_text(place)}: {text}"
    more = gpus.events_total - EVENTS_SHOWN
    if more > 0:
        yield f"- and {more} more, in {run_files.EVENTS_FILE}"


def _state_text(device: GpuDeviceReport, node: NodeGpuReport) -> str:
    """State of a GPU, with the reasons if it is not healthy."""
    reasons = [f"{reason.severity}: {reason.words}" for reason in node.reasons if reason.gpu == device.gpu]
    state = device.state or "-"
    return "; ".join(reasons if state == "ok" and reasons else [state, *reasons])


def _usage_cells(sums: GpuSums, memory_bytes: int | None, *, includes_all_instances: bool) -> tuple[str, str, str]:
    """Utilization, peak memory of ``memory_bytes``, and energy, as text."""
    peak = sums.memory_peak_bytes
    total = f" of {memory_bytes / GIB:.0f}" if memory_bytes else ""
    return (
        busy_text(sums),
        "-" if peak is None else f"{peak / GIB:.1f}{total} GiB",
        energy_text(sums.energy_j, includes_all_instances=includes_all_instances),
    )


def _problem_lines(node: NodeGpuReport) -> Iterator[str]:
    name = plain_item(node.node)
    if node.driver_state != "ok":
        driver_problem = plain_text(node.words or "reason unknown")
        yield f"- {name}: GPUs could not be read ({plain_text(node.driver_state)}): {driver_problem}"
    if lacking := missing_gpus_text(node):
        yield f"- {name}: {plain_text(lacking)}"
    shown = {device.gpu for device in node.gpus}  # their reasons are in their table rows
    for reason in node.reasons:
        if reason.gpu not in shown:
            yield f"- {name}: {plain_text(reason.severity)}: {plain_text(reason_text(reason))}"
    for device in node.gpus:
        for xid in device.xids:
            if xid.class_ != NOISE:
                found = plain_text(f"GPU {device.gpu}: {xid_text(xid)}")
                yield f"- {name} {found}, last at {clock_text(xid.time)}"


def _worker_gpu_row(worker: WorkerReport, device: WorkerGpu) -> str:
    used = {None: "-", False: "no", True: "yes"}[device.used]
    if device.memory_bytes is not None:
        used = f"{device.memory_bytes / GIB:.1f} GiB"
    if device.attribution == "inferred":
        used += ", inferred"
    if device.uuid is None:
        used = "missing"
    gpu, uuid = ("-" if name is None else name for name in (device.gpu, device.uuid))
    return _row(worker.worker, worker.node, gpu, uuid, "yes" if device.planned else "no", used)


def _row(*cells: object) -> str:
    return f"| {' | '.join(plain_text(cell) for cell in cells)} |"
