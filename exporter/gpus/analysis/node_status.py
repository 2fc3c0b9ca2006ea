"""GPU part of a node's status, evaluated: assignment, problems and totals."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import Protocol, TypeVar

from exporter.contract.events import LoggedEvent
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.report import GpuDeviceReport, GpuEvent, GpuReport, GpuSums, NodeGpuReport, WorkerGpu
from exporter.contract.status import (
    GpuDevice,
    GpuDriver,
    GpuSignals,
    GpuXid,
    HealthReason,
    NodeGpus,
    NodeStatus,
    WorkerStatus,
)
from exporter.gpus.analysis.xid import LASTING, NOISE
from exporter.gpus.records import GIB, STATE_TEXT

PREFIX = "GPU "  # start of the name of every GPU event
MOST_EVENTS = 200
_RECOVERIES = ("GPU works again", "GPU driver")  # good news, yet reported: they show how long a problem lasted


def gpu_events(events: Iterable[LoggedEvent], node: str | None = None) -> list[GpuEvent]:
    """Return the GPU events in order: warnings, errors and recoveries. ``node`` is used for events that name none."""
    return sorted(
        (
            GpuEvent(
                event.time if event.happened is None else event.happened,  # a line's time is when it was written
                event.node or node,
                event.level,
                event.event,
                event.worker,
                event.detail,
            )
            for event in events
            if event.event.startswith(PREFIX) and (event.level != "info" or event.event in _RECOVERIES)
        ),
        key=lambda event: event.time,
    )


FOREIGN = "foreign"  # start of the key of a problem with processes of another job
JOULES_PER_KWH = 3.6e6
NODES_LISTED = 4
LEAST_IDLE_RATIO = 0.02  # of the time; less is not worth a word


@dataclass(frozen=True)
class GpuProblem:
    """A problem with the GPUs of a worker or a node."""

    key: str  # identifies the problem while its text changes
    text: str
    resolved_text: str  # message when the problem is gone; problems with the same message share one
    time: float | None = None  # time of the last report, for an Xid


class Device(Protocol):
    """A GPU in a status or report."""

    @property
    def gpu(self) -> str: ...


AnyDevice = TypeVar("AnyDevice", bound=Device)


def worker_devices(entry: WorkerStatus, node: NodeGpus | None) -> tuple[WorkerGpu, ...]:
    """GPUs that the plan gives to a worker, then others that it uses; ``node`` are the GPUs of its node.

    ``used`` is None if unknown: before the first reading, without a process list, or if the GPU cannot be read.
    """
    known = {device.uuid: device for device in node.gpus} if node is not None else {}
    uses = {use.uuid: use for use in entry.gpu_use or ()}
    found = []
    for uuid in dict.fromkeys((*entry.gpu_plan, *uses)):
        use, device = uses.get(uuid), known.get(uuid)
        unused = False if entry.gpu_use is not None and device is not None and device.state in (None, "ok") else None
        found.append(
            WorkerGpu(
                gpu=device.gpu if device is not None else use.gpu if use is not None else None,
                uuid=uuid,
                planned=uuid in entry.gpu_plan,
                used=unused if use is None else True,
                memory_bytes=use.memory_bytes if use is not None else None,
                sm_ratio=use.sm_ratio if use is not None else None,
                attribution=use.attribution if use is not None else None,
            )
        )
    return (*found, *(WorkerGpu(gpu=position, planned=True) for position in entry.gpu_missing))


def find_device(uuid: str | None, node: NodeGpus | None) -> GpuDevice | None:
    """The GPU of a node; None if the node does not have it."""
    return next((device for device in node.gpus if device.uuid == uuid), None) if node is not None else None


def worker_gpu_problems(
    signals: GpuSignals, start: float | None, devices: Sequence[WorkerGpu], node: NodeGpus | None
) -> list[GpuProblem]:
    """GPU problems of a worker, from its status and its ``worker_devices``.

    Program errors on a GPU from before ``start``, the start of this run of the worker, do not count.
    """
    found = []
    if signals.gpu_misplaced:
        found.append(GpuProblem("misplaced", signals.gpu_misplaced, "is no longer misplaced"))
    missing = [device.gpu for device in devices if device.uuid is None]
    found += [GpuProblem(f"missing {gpu}", f"GPU {gpu} is missing", f"GPU {gpu} is present again") for gpu in missing]
    for device in _with_parents(devices, node):
        found += device_problems(device, start)
    conditions = signals.gpu_conditions or {}
    found += [GpuProblem(name, f"{name}: {text}", f"{name} is over") for name, text in conditions.items()]
    return found


def device_problems(device: GpuDevice, since: float | None = None) -> Iterator[GpuProblem]:
    """Problems of one GPU: lost, errors from the driver, or foreign processes."""
    gpu, state = device.gpu, device.state or "ok"
    if state != "ok":
        # For a lost device, the library's message only repeats the state.
        text = f": {device.words}" if device.words and state == "hanging" else ""
        yield GpuProblem(f"{state} {gpu}", f"GPU {gpu} {STATE_TEXT.get(state, state)}{text}", f"GPU {gpu} works again")
    for xid in device.xids:
        earlier = since is not None and xid.class_ not in LASTING and (xid.time or since) < since
        if xid.class_ != NOISE and not earlier:
            resolved = f"GPU {gpu}: Xid {xid.xid} is over"
            yield GpuProblem(f"xid {gpu} {xid.xid}", f"GPU {gpu}: {xid_text(xid)}", resolved, xid.time)
    for process in device.foreign:
        memory = process.memory_bytes
        use = f"holds {memory / GIB:.1f} GiB of" if memory is not None else "is on"
        name = "".join(letter if letter.isprintable() else "?" for letter in process.name or "")
        who = f"process {process.pid}{f' ({name})' if name else ''}"
        text = f"{who}, not of this job, {use} GPU {gpu}"
        yield GpuProblem(f"{FOREIGN} {gpu} {process.pid}", text, f"{who} is no longer on GPU {gpu}")


def xid_text(xid: GpuXid) -> str:
    """Text such as ``Xid 79, GPU has fallen off the bus``, with the count if more than one."""
    meaning = f", {xid.words}" if xid.words else ""
    return f"Xid {xid.xid}{meaning}" + (f" ({xid.count} times)" if xid.count > 1 else "")


def reason_text(reason: HealthReason) -> str:
    """Text of a reason, with its GPU if it has one."""
    return reason.words if reason.gpu is None else f"GPU {reason.gpu}: {reason.words}"


def node_gpu_problems(driver: GpuDriver) -> list[GpuProblem]:
    """GPU problems of a node: unreadable, too few, or not healthy."""
    if driver.driver_state not in (None, "ok") and driver.allocated:
        text = f": {driver.words}" if driver.words else ""
        state = driver.driver_state
        return [GpuProblem(f"driver {state}", f"cannot be read ({state}){text}", "can be read again")]
    found = []
    if missing := missing_gpus_text(driver):
        found.append(GpuProblem("missing", missing, "all GPUs of the plan are present"))
    if driver.health not in (None, "healthy"):
        which = ",".join(sorted({str(reason.gpu) for reason in driver.reasons}))
        text = "; ".join(map(reason_text, driver.reasons))
        text = f"{driver.health}: {text}" if text else driver.health
        found.append(GpuProblem(f"health {driver.health} {which}", text, "healthy again"))
    return found


def missing_gpus_text(driver: GpuDriver) -> str | None:
    """Message that the driver shows fewer GPUs than the plan needs on this node; None if there are enough."""
    needed, shown = driver.allocated or 0, driver.visible or 0
    if driver.driver_state != "ok" or needed <= shown:
        return None
    return f"the plan needs {needed} GPU{'s' if needed > 1 else ''} and the driver shows {shown or 'none'}"


def _with_parents(devices: Iterable[WorkerGpu], node: NodeGpus | None) -> list[GpuDevice]:
    """The devices of a node; a MIG instance is followed by its GPU, whose faults affect it."""
    found = {}
    for device in devices:
        known = find_device(device.uuid, node)
        if known is not None and node is not None:
            whole = [other for other in node.gpus if known.gpu.startswith(f"{other.gpu}:")]
            found.update({other.uuid: other for other in (known, *whole)})
    return list(found.values())


def account_gpus(statuses: Mapping[str, NodeStatus], events: Iterable[LoggedEvent] = ()) -> GpuReport | None:
    """Totals and events of a job's GPUs, by node and overall; None for a job without GPUs.

    Sums cover the GPUs with known values. For a divided GPU, its MIG instances count, except that energy is known only
    for the whole GPU. Events without a node belong to the only node.
    """
    nodes = [_node_report(node, status.gpus) for node, status in sorted(statuses.items()) if status.gpus is not None]
    if not nodes:
        return None
    units = [device for node in nodes for device in assignable_gpus(node.gpus)]
    found = gpu_events(events, node=next(iter(statuses)) if len(statuses) == 1 else None)
    return GpuReport.join(
        _sums([device for node in nodes for device in node.gpus], units),
        count=len(units),
        names=dict(Counter(device.name or "GPU" for device in units)),
        nodes=tuple(nodes),
        events=tuple(found[:MOST_EVENTS]),
        events_total=len(found),
    )


def _node_report(node: str, gpus: NodeGpus) -> NodeGpuReport:
    devices = tuple(
        GpuDeviceReport(
            gpu=device.gpu,
            uuid=device.uuid,
            name=device.name,
            state=device.state,
            words=device.words,
            utilization_mean_ratio=device.utilization_mean_ratio,
            seen_s=device.seen_s,
            idle_s=device.idle_s,
            memory_peak_bytes=device.memory_peak_bytes,
            memory_total_bytes=device.memory_total_bytes,
            xids=device.xids,
            energy_j=device.energy_job_j,
        )
        for device in gpus.gpus
    )
    return NodeGpuReport.join(GpuDriver.of(gpus), _sums(devices, assignable_gpus(devices)), node=node, gpus=devices)


def divided_gpus(devices: Iterable[Device]) -> set[str]:
    """Indices of the GPUs that are divided into MIG instances."""
    return {device.gpu.partition(":")[0] for device in devices if ":" in device.gpu}


def assignable_gpus(devices: Sequence[AnyDevice]) -> list[AnyDevice]:
    """GPUs that a worker can get: undivided GPUs and MIG instances."""
    wholes = divided_gpus(devices)
    return [device for device in devices if device.gpu not in wholes]


def _sums(devices: Sequence[GpuSums], units: Sequence[GpuSums]) -> GpuSums:
    busy = [unit.utilization_mean_ratio for unit in units if unit.utilization_mean_ratio is not None]
    energy = [device.energy_j for device in devices if device.energy_j is not None]
    seen = [(unit.seen_s, unit.idle_s or 0.0) for unit in units if unit.seen_s is not None]
    return GpuSums(
        utilization_mean_ratio=fsum(busy) / len(busy) if busy else None,
        seen_s=sum(seen_s for seen_s, _ in seen) if seen else None,
        idle_s=sum(idle_s for _, idle_s in seen) if seen else None,
        memory_peak_bytes=max(
            (unit.memory_peak_bytes for unit in units if unit.memory_peak_bytes is not None), default=None
        ),
        energy_j=sum(energy) if energy else None,
    )


def account_text(account: GpuReport) -> str:
    """Summary such as ``8 x NVIDIA H200, 91 % busy, 12.3 kWh``, with the nodes that could not be read."""
    texts = [", ".join(f"{count} x {name}" for name, count in account.names.items())]
    if account.utilization_mean_ratio is not None:
        texts.append(busy_text(account, "busy"))
    if account.energy_j is not None:
        parts = any(divided_gpus(node.gpus) for node in account.nodes)
        texts.append(energy_text(account.energy_j, includes_all_instances=parts))
    unread = [f"{node.node} ({node.driver_state})" for node in account.nodes if node.driver_state != "ok"]
    if unread:
        more = f" and {len(unread) - NODES_LISTED} more nodes" if len(unread) > NODES_LISTED else ""
        texts.append(f"could not be read on {', '.join(unread[:NODES_LISTED])}{more}")
    return ", ".join(filter(None, texts))


def busy_text(sums: GpuSums, word: str = "") -> str:
    """Mean utilization, and the share of the time without any, such as ``53 % busy (idle 39 % of the time)``."""
    if sums.utilization_mean_ratio is None:
        return "-"
    text = f"{100 * sums.utilization_mean_ratio:.0f} % {word}".strip()
    idle = sums.idle_s / sums.seen_s if sums.idle_s and sums.seen_s else 0.0
    return f"{text} (idle {100 * idle:.0f} % of the time)" if idle >= LEAST_IDLE_RATIO else text


def energy_text(joules: float | None, *, includes_all_instances: bool = False) -> str:
    """Energy in kWh with three significant digits; a dash if unknown.

    ``includes_all_instances``: it covers a GPU with all its MIG instances, including those of other jobs.
    """
    if joules is None:
        return "-"
    amount = joules / JOULES_PER_KWH
    text = f"{amount:.0f} kWh" if amount >= 100 else f"{amount:.1f} kWh" if amount >= 1 else f"{amount:.3f} kWh"
    return f"{text} (whole GPU)" if includes_all_instances else text
