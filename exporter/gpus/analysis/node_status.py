"""GPU part of a node's status, evaluated: assignment, problems and totals."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

from exporter.gpus.analysis.xid import LASTING, NOISE
from exporter.gpus.records import GIB, STATE_TEXT

PREFIX = "GPU "  # start of the name of every GPU event
MOST_EVENTS = 200
_RECOVERIES = ("GPU works again", "GPU driver")  # good news, yet reported: they show how long a problem lasted
_KEYS = ("level", "event", "worker", "detail")


def gpu_events(events: Iterable[Mapping[str, Any]], node: str | None = None) -> dict[str, Any]:
    """Return GPU ``events`` in order, at most `MOST_EVENTS`, and their number as ``events_total``.

    Keeps warnings, errors and recoveries. ``node`` is used for events that name none.
    """
    found: list[dict[str, Any]] = [
        {"time": moment, "node": event.get("node") or node, **{key: event.get(key) for key in _KEYS}}
        for event in events
        if str(event.get("event")).startswith(PREFIX)
        and (event.get("level") != "info" or event.get("event") in _RECOVERIES)
        # In a log line, ``time`` is when it was written.
        and isinstance(moment := event.get("happened", event.get("time")), int | float)
    ]
    found.sort(key=itemgetter("time"))
    return {"events": found[:MOST_EVENTS], "events_total": len(found)}


FOREIGN = "foreign"  # start of the key of a problem with processes of another job
JOULES_PER_KWH = 3.6e6
NODES_LISTED = 4

GpuStatus = Mapping[str, Any]  # `gpus` of a node's status; empty for a job without GPUs


@dataclass(frozen=True)
class GpuProblem:
    """A problem with the GPUs of a worker or a node."""

    key: str  # identifies the problem while its text changes
    text: str
    resolved_text: str  # message when the problem is gone; problems with the same message share one
    time: float | None = None  # time of the last report, for an Xid


_USE_KEYS = ("memory_bytes", "sm_ratio", "attribution")


def worker_devices(entry: Mapping[str, Any], gpu_status: GpuStatus) -> list[dict[str, Any]]:
    """GPUs that the plan gives to a worker, then others that it uses, from its status entry.

    ``used`` is None if unknown: before the first reading, without a process list, or if the GPU cannot be read.
    ``uuid`` is None for a planned position without a GPU.
    """
    known = {device["uuid"]: device for device in gpu_status.get("gpus") or ()}
    plan, use = entry.get("gpu_plan") or (), entry.get("gpu_use")
    uses = {used["uuid"]: used for used in use or ()}
    found: list[dict[str, Any]] = []
    for uuid in dict.fromkeys((*plan, *uses)):
        used = uses.get(uuid, {})
        readable = uuid in known and known[uuid].get("state") in (None, "ok")
        found.append(
            {
                "gpu": known[uuid]["gpu"] if uuid in known else used.get("gpu"),
                "uuid": uuid,
                "planned": uuid in plan,
                "used": True if used else False if use is not None and readable else None,
                **{key: used.get(key) for key in _USE_KEYS},
            }
        )
    unused = {"uuid": None, "planned": True, "used": None, **dict.fromkeys(_USE_KEYS)}
    return [*found, *({"gpu": position, **unused} for position in entry.get("gpu_missing") or ())]


def find_device(uuid: str | None, gpu_status: GpuStatus) -> Mapping[str, Any]:
    """Status entry of one GPU; empty if the node does not have it."""
    return next((device for device in gpu_status.get("gpus") or () if device["uuid"] == uuid), {})


def worker_gpu_problems(
    entry: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], gpu_status: GpuStatus
) -> list[GpuProblem]:
    """GPU problems of a worker, from its status entry and its ``worker_devices``.

    Program errors on a GPU from before this run of the worker do not count.
    """
    found = []
    if entry.get("gpu_misplaced"):
        found.append(GpuProblem("misplaced", str(entry["gpu_misplaced"]), "is no longer misplaced"))
    missing = [device["gpu"] for device in devices if device["uuid"] is None]
    found += [GpuProblem(f"missing {gpu}", f"GPU {gpu} is missing", f"GPU {gpu} is present again") for gpu in missing]
    for device in _with_parents(devices, gpu_status):
        found += device_problems(device, entry.get("start"))
    conditions = entry.get("gpu_conditions") or {}
    found += [GpuProblem(name, f"{name}: {text}", f"{name} is over") for name, text in conditions.items()]
    return found


def device_problems(device: Mapping[str, Any], since: float | None = None) -> Iterator[GpuProblem]:
    """Problems of one GPU: lost, errors from the driver, or foreign processes."""
    gpu, state = device["gpu"], device.get("state") or "ok"
    if state != "ok":
        # For a lost device, the library's message only repeats the state.
        text = f": {device['words']}" if device.get("words") and state == "hanging" else ""
        yield GpuProblem(f"{state} {gpu}", f"GPU {gpu} {STATE_TEXT.get(state, state)}{text}", f"GPU {gpu} works again")
    for xid in device.get("xids") or ():
        earlier = since is not None and xid["class"] not in LASTING and (xid["time"] or since) < since
        if xid["class"] != NOISE and not earlier:
            resolved = f"GPU {gpu}: Xid {xid['xid']} is over"
            yield GpuProblem(f"xid {gpu} {xid['xid']}", f"GPU {gpu}: {xid_text(xid)}", resolved, xid["time"])
    for process in device.get("foreign") or ():
        memory = process.get("memory_bytes")
        use = f"holds {memory / GIB:.1f} GiB of" if memory is not None else "is on"
        name = "".join(letter if letter.isprintable() else "?" for letter in process.get("name") or "")
        who = f"process {process['pid']}{f' ({name})' if name else ''}"
        text = f"{who}, not of this job, {use} GPU {gpu}"
        yield GpuProblem(f"{FOREIGN} {gpu} {process['pid']}", text, f"{who} is no longer on GPU {gpu}")


def xid_text(xid: Mapping[str, Any]) -> str:
    """Text such as ``Xid 79, GPU has fallen off the bus``, with the count if more than one."""
    meaning = f", {xid['words']}" if xid.get("words") else ""
    return f"Xid {xid['xid']}{meaning}" + (f" ({xid['count']} times)" if xid["count"] > 1 else "")


def reason_text(reason: Mapping[str, Any]) -> str:
    """Text of a reason, with its GPU if it has one."""
    return f"GPU {reason['gpu']}: {reason['words']}" if reason.get("gpu") is not None else str(reason["words"])


def node_gpu_problems(gpu_status: GpuStatus) -> list[GpuProblem]:
    """GPU problems of a node: unreadable, too few, or not healthy."""
    state, health = gpu_status.get("driver_state"), gpu_status.get("health")
    if state not in (None, "ok") and gpu_status.get("allocated"):
        text = f": {gpu_status['words']}" if gpu_status.get("words") else ""
        return [GpuProblem(f"driver {state}", f"cannot be read ({state}){text}", "can be read again")]
    found = []
    if missing := missing_gpus_text(gpu_status):
        found.append(GpuProblem("missing", missing, "all GPUs of the plan are present"))
    if health not in (None, "healthy"):
        reasons = gpu_status.get("reasons") or ()
        which = ",".join(sorted({str(reason["gpu"]) for reason in reasons}))
        text = "; ".join(map(reason_text, reasons))
        text = f"{health}: {text}" if text else str(health)
        found.append(GpuProblem(f"health {health} {which}", text, "healthy again"))
    return found


def missing_gpus_text(gpu_status: GpuStatus) -> str | None:
    """Message that the driver shows fewer GPUs than the plan needs on this node; None if there are enough."""
    needed, shown = gpu_status.get("allocated") or 0, gpu_status.get("visible") or 0
    if gpu_status.get("driver_state") != "ok" or needed <= shown:
        return None
    return f"the plan needs {needed} GPU{'s' if needed > 1 else ''} and the driver shows {shown or 'none'}"


def _with_parents(devices: Iterable[Mapping[str, Any]], gpu_status: GpuStatus) -> list[Mapping[str, Any]]:
    """Status entries of GPUs; a MIG instance is followed by its GPU, whose faults affect it."""
    found = {}
    for device in devices:
        known = find_device(device["uuid"], gpu_status)
        if known:
            whole = [other for other in gpu_status["gpus"] if str(known["gpu"]).startswith(f"{other['gpu']}:")]
            found.update({other["uuid"]: other for other in (known, *whole)})
    return list(found.values())


def account_gpus(
    statuses: Mapping[str, Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any] | None:
    """Totals and events of a job's GPUs, by node and overall; None for a job without GPUs.

    Sums cover the GPUs with known values. For a divided GPU, its MIG instances count, except that energy is known only
    for the whole GPU. Events without a node belong to the only node.
    """
    nodes = [_node(node, gpus) for node, status in sorted(statuses.items()) if (gpus := status.get("gpus"))]
    if not nodes:
        return None
    units = [device for node in nodes for device in assignable_gpus(node["gpus"])]
    return {
        "count": len(units),
        "names": dict(Counter(device["name"] or "GPU" for device in units)),
        **_sums([device for node in nodes for device in node["gpus"]], units),
        "nodes": nodes,
        **gpu_events(events, node=next(iter(statuses)) if len(statuses) == 1 else None),
    }


_NODE_KEYS = ("driver_state", "words", "vendor", "driver", "cuda", "allocated", "visible", "health", "reasons")
_DEVICE_KEYS = (
    *("gpu", "uuid", "name", "state", "words", "utilization_mean_ratio"),
    *("memory_peak_bytes", "memory_total_bytes", "xids"),
)


def _node(node: str, gpu_status: GpuStatus) -> dict[str, Any]:
    devices = [
        {**{key: device.get(key) for key in _DEVICE_KEYS}, "energy_j": device.get("energy_job_j")}
        for device in gpu_status.get("gpus") or ()
    ]
    return {
        "node": node,
        **{key: gpu_status.get(key) for key in _NODE_KEYS},
        **_sums(devices, assignable_gpus(devices)),
        "gpus": devices,
    }


def divided_gpus(devices: Iterable[Mapping[str, Any]]) -> set[str]:
    """Indices of the GPUs that are divided into MIG instances."""
    return {str(device["gpu"]).partition(":")[0] for device in devices if ":" in str(device["gpu"])}


def assignable_gpus(devices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """GPUs that a worker can get: undivided GPUs and MIG instances."""
    wholes = divided_gpus(devices)
    return [device for device in devices if device["gpu"] not in wholes]


def _sums(devices: Sequence[Mapping[str, Any]], units: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    busy = [unit["utilization_mean_ratio"] for unit in units if unit["utilization_mean_ratio"] is not None]
    memory = [unit["memory_peak_bytes"] for unit in units if unit["memory_peak_bytes"] is not None]
    energy = [device["energy_j"] for device in devices if device["energy_j"] is not None]
    return {
        "utilization_mean_ratio": fmean(busy) if busy else None,
        "memory_peak_bytes": max(memory, default=None),
        "energy_j": sum(energy) if energy else None,
    }


def account_text(account: Mapping[str, Any]) -> str:
    """Summary such as ``8 x NVIDIA H200, 91 % busy, 12.3 kWh``, with the nodes that could not be read."""
    texts = [", ".join(f"{count} x {name}" for name, count in account["names"].items())]
    if account["utilization_mean_ratio"] is not None:
        texts.append(f"{100 * account['utilization_mean_ratio']:.0f} % busy")
    if account["energy_j"] is not None:
        parts = any(divided_gpus(node["gpus"]) for node in account["nodes"])
        texts.append(energy_text(account["energy_j"], includes_all_instances=parts))
    unread = [f"{node['node']} ({node['driver_state']})" for node in account["nodes"] if node["driver_state"] != "ok"]
    if unread:
        more = f" and {len(unread) - NODES_LISTED} more nodes" if len(unread) > NODES_LISTED else ""
        texts.append(f"could not be read on {', '.join(unread[:NODES_LISTED])}{more}")
    return ", ".join(filter(None, texts))


def energy_text(joules: float | None, *, includes_all_instances: bool = False) -> str:
    """Energy in kWh with three significant digits; a dash if unknown.

    ``includes_all_instances``: it covers a GPU with all its MIG instances, including those of other jobs.
    """
    if joules is None:
        return "-"
    amount = joules / JOULES_PER_KWH
    text = f"{amount:.0f} kWh" if amount >= 100 else f"{amount:.1f} kWh" if amount >= 1 else f"{amount:.3f} kWh"
    return f"{text} (whole GPU)" if includes_all_instances else text
