"""GPU evidence for a worker's end: activity in its last minute and GPU problems."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from exporter.contract.status import NodeGpus, WorkerStatus
from exporter.gpus.analysis.node_status import GpuStatus, find_device, worker_devices, worker_gpu_problems
from exporter.gpus.records import GIB

LAST_S = 60.0

_DEVICE_KEYS = (
    *("name", "state", "words", "utilization_ratio", "memory_used_bytes", "memory_total_bytes", "temperature_c"),
    *("power_w", "power_limit_w", "xids", "foreign"),
)


def gpu_sample(worker: WorkerStatus, gpus: NodeGpus) -> dict[str, float]:
    """Values of a worker's GPUs at one time, where known: mean shares and total memory."""
    uses = worker.gpu_use or ()
    at_work = {use.uuid for use in uses} or set(worker.gpu_plan)
    known = {
        "gpu_utilization_ratio": [gpu.utilization_ratio for gpu in gpus.gpus if gpu.uuid in at_work],
        "gpu_sm_ratio": [use.sm_ratio for use in uses],
    }
    shares = {key: [value for value in values if value is not None] for key, values in known.items()}
    found = {key: fmean(values) for key, values in shares.items() if values}
    memory = [use.memory_bytes for use in uses if use.memory_bytes is not None]
    return {**found, "gpu_memory_bytes": sum(memory)} if memory else found


def gpu_evidence(
    entry: Mapping[str, Any], gpu_status: GpuStatus, history: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Facts about a worker's GPUs and their problems; empty for a worker without GPUs.

    Device values are current, although the worker may have ended. ``last_minute`` covers the last minute with readings
    of the worker.
    """
    devices = worker_devices(entry, gpu_status)
    if not devices:
        return {}
    problems = worker_gpu_problems(entry, devices, gpu_status)
    lost = [device for device in gpu_status.get("gpus") or () if device.get("lost_since") is not None]
    times = {f"{device['state']} {device['gpu']}": device["lost_since"] for device in lost}
    return {
        "last_minute": _last_minute(history),
        "devices": [
            {**device, **{key: find_device(device["uuid"], gpu_status).get(key) for key in _DEVICE_KEYS}}
            for device in devices
        ],
        "troubles": [{"words": problem.text, "time": times.get(problem.key, problem.time)} for problem in problems],
    }


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


def gpu_lines(evidence: Mapping[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """Lines of the evidence for people: title, text, and time or None."""
    if not evidence:
        return
    for problem in evidence["troubles"]:
        yield "wrong", problem["words"], problem["time"]
    last, texts = evidence["last_minute"], []
    if "gpu_utilization_ratio" in last:
        texts.append(f"{100 * last['gpu_utilization_ratio']:.0f} % busy")
    if "gpu_sm_ratio" in last:
        texts.append(f"{100 * last['gpu_sm_ratio']:.0f} % by its own kernels")
    if "gpu_memory_bytes" in last:
        memory, peak = last["gpu_memory_bytes"] / GIB, last["gpu_memory_peak_bytes"] / GIB
        texts.append(f"{memory:.1f} GiB of GPU memory at the end, at most {peak:.1f} GiB")
    if texts:
        yield "last minute", ", ".join(texts), None
    for device in evidence["devices"]:
        if device["uuid"] is None:
            continue  # already listed among the problems
        whose = "" if device["planned"] else ", not of its plan"
        idle = ", not used" if device["planned"] and device["used"] is False else ""
        heat = f", {device['temperature_c']:.0f} °C" if device["temperature_c"] is not None else ""
        memory = f", {device['memory_total_bytes'] / GIB:.0f} GiB" if device["memory_total_bytes"] else ""
        name = f"{device['name'] or 'unknown'}{memory}, {device['uuid']}{heat}"
        yield f"GPU {device['gpu'] if device['gpu'] is not None else '?'}", f"{name}{whose}{idle}", None
