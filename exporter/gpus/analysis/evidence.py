"""GPU evidence for a worker's end: activity in its last minute and GPU problems."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from exporter.contract.records import NOTHING, Record
from exporter.contract.report import WorkerGpu
from exporter.contract.status import ForeignProcess, GpuXid, NodeGpus, WorkerStatus
from exporter.gpus.analysis.node_status import find_device, worker_devices, worker_gpu_problems
from exporter.gpus.records import GIB

LAST_S = 60.0


class DeviceEvidence(WorkerGpu):
    """A GPU of a worker, with its present values."""

    name: str | None = None
    state: str | None = None
    words: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    xids: tuple[GpuXid, ...] = ()
    foreign: tuple[ForeignProcess, ...] = ()


class GpuTrouble(Record):
    """A problem with the GPUs of a worker."""

    words: str
    time: float | None = None


class GpuEvidence(Record):
    """Facts about the GPUs of a worker."""

    last_minute: Mapping[str, float] = NOTHING  # of the last minute with readings of the worker
    devices: tuple[DeviceEvidence, ...] = ()  # with present values, although the worker may have ended
    troubles: tuple[GpuTrouble, ...] = ()


def gpu_sample(entry: WorkerStatus, node: NodeGpus | None) -> dict[str, float]:
    """Values of a worker's GPUs at one time, where known: mean shares and total memory."""
    devices = worker_devices(entry, node)
    at_work = [device for device in devices if device.used] or devices
    known = [find_device(device.uuid, node) for device in at_work]
    shares = {
        "gpu_utilization_ratio": [device.utilization_ratio for device in known if device is not None],
        "gpu_sm_ratio": [device.sm_ratio for device in devices if device.used],
    }
    found = {key: fmean(present) for key, values in shares.items() if (present := [v for v in values if v is not None])}
    memory = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    return {**found, "gpu_memory_bytes": sum(memory)} if memory else found


def gpu_evidence(
    entry: WorkerStatus, node: NodeGpus | None, history: Sequence[Mapping[str, float]]
) -> GpuEvidence | None:
    """Facts about a worker's GPUs and their problems; None for a worker without GPUs."""
    devices = worker_devices(entry, node)
    if not devices:
        return None
    problems = worker_gpu_problems(entry, entry.start, devices, node)
    lost = [device for device in (node.gpus if node is not None else ()) if device.lost_since is not None]
    times = {f"{device.state} {device.gpu}": device.lost_since for device in lost}
    return GpuEvidence(
        last_minute=_last_minute(history),
        devices=tuple(_with_present_values(device, node) for device in devices),
        troubles=tuple(
            GpuTrouble(words=problem.text, time=times.get(problem.key, problem.time)) for problem in problems
        ),
    )


def _with_present_values(device: WorkerGpu, node: NodeGpus | None) -> DeviceEvidence:
    known = find_device(device.uuid, node)
    names = [name for name in DeviceEvidence.FIELDS if name not in WorkerGpu.FIELDS]
    return DeviceEvidence.join(device, **{name: getattr(known, name) for name in names if known is not None})


def _last_minute(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean shares, last memory and peak memory; only known values."""
    late = [sample for sample in history if sample["time"] > history[-1]["time"] - LAST_S]
    found = {
        key: fmean(known)
        for key in ("gpu_utilization_ratio", "gpu_sm_ratio")
        if (known := [sample[key] for sample in late if key in sample])
    }
    memory = [sample["gpu_memory_bytes"] for sample in late if "gpu_memory_bytes" in sample]
    return {**found, "gpu_memory_bytes": memory[-1], "gpu_memory_peak_bytes": max(memory)} if memory else found


def gpu_lines(evidence: GpuEvidence | None) -> Iterator[tuple[str, str, float | None]]:
    """Lines of the evidence for people: title, text, and time or None."""
    if evidence is None:
        return
    for problem in evidence.troubles:
        yield "wrong", problem.words, problem.time
    last, texts = evidence.last_minute, []
    if "gpu_utilization_ratio" in last:
        texts.append(f"{100 * last['gpu_utilization_ratio']:.0f} % busy")
    if "gpu_sm_ratio" in last:
        texts.append(f"{100 * last['gpu_sm_ratio']:.0f} % by its own kernels")
    if "gpu_memory_bytes" in last:
        memory, peak = last["gpu_memory_bytes"] / GIB, last["gpu_memory_peak_bytes"] / GIB
        texts.append(f"{memory:.1f} GiB of GPU memory at the end, at most {peak:.1f} GiB")
    if texts:
        yield "last minute", ", ".join(texts), None
    for device in evidence.devices:
        if device.uuid is None:
            continue  # already listed among the problems
        whose = "" if device.planned else ", not of its plan"
        idle = ", not used" if device.planned and device.used is False else ""
        heat = f", {device.temperature_c:.0f} °C" if device.temperature_c is not None else ""
        total = f", {device.memory_total_bytes / GIB:.0f} GiB" if device.memory_total_bytes else ""
        name = f"{device.name or 'unknown'}{total}, {device.uuid}{heat}"
        yield f"GPU {device.gpu if device.gpu is not None else '?'}", f"{name}{whose}{idle}", None
