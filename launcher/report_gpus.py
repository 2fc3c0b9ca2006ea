"""The GPUs of a job in the report for people: what they did, what was wrong, and whose they were."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exporter.derive.gpu_account import GIB, NOISE, energy_words, reason_text, xid_text
from launcher.report_words import clock, plain


def gpu_sections(gpus: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown, out of the ``gpus`` and the ``workers`` of a report."""
    yield from ("", "## GPUs", "")
    yield from ("| node | GPU | busy | memory at most | energy | state |", "|---|---|---|---|---|---|")
    for node in gpus["nodes"]:
        count = len(node["gpus"])
        if count != 1:
            state = node["health"] or node["driver_state"]
            yield _row(node["node"], f"all {count}" if count else "none seen", *_amounts(node), state)
        for device in node["gpus"]:
            yield _row(node["node"], device["gpu"], *_amounts(device), device["state"])
    troubles = [line for node in gpus["nodes"] for line in _troubles(node)]
    if troubles:
        yield from ("", *troubles)
    rows = [_whose(worker, device) for worker in workers for device in worker.get("gpu_devices") or ()]
    if rows:
        yield from ("", "## GPUs of workers", "")
        yield from ("| worker | node | GPU | UUID | planned | used |", "|---|---|---|---|---|---|")
        yield from rows
    misplaced = [
        f"- {worker['worker']}: {plain(worker['gpu_misplaced'])}" for worker in workers if worker.get("gpu_misplaced")
    ]
    if misplaced:
        yield from ("", *misplaced)


def _amounts(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """How busy, how full, and how much energy."""
    busy, peak, total = (
        found.get(key) for key in ("utilization_mean_ratio", "memory_peak_bytes", "memory_total_bytes")
    )
    memory = "-" if peak is None else f"{peak / GIB:.1f}{f' of {total / GIB:.0f}' if total else ''} GiB"
    return "-" if busy is None else f"{100 * busy:.0f} %", memory, energy_words(found["energy_j"])


def _troubles(node: Mapping[str, Any]) -> Iterator[str]:
    name = node["node"]
    if node["driver_state"] != "ok":
        yield f"- {name}: GPUs could not be read ({node['driver_state']}): {plain(node['words'] or 'nobody says why')}"
    for reason in node["reasons"] or ():
        yield f"- {name}: {reason['severity']}: {plain(reason_text(reason))}"
    for device in node["gpus"]:
        for xid in device["xids"] or ():
            if xid["class"] != NOISE:
                yield f"- {name} GPU {device['gpu']}: {plain(xid_text(xid))}, last at {clock(xid['time'])}"


def _whose(worker: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    used = {None: "-", False: "no", True: "yes"}[device["used"]]
    if device["memory_bytes"] is not None:
        used = f"{device['memory_bytes'] / GIB:.1f} GiB"
    if device["attribution"] == "inferred":
        used += ", inferred"
    gpu = "-" if device["gpu"] is None else device["gpu"]
    return _row(worker["worker"], worker["node"], gpu, device["uuid"], "yes" if device["planned"] else "no", used)


def _row(*cells: object) -> str:
    return f"| {' | '.join(plain(cell) for cell in cells)} |"
