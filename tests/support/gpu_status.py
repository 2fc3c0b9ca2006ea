"""GPU entries of a node status, as the collectors write them."""

from typing import Any

from exporter.contract.status import NodeGpus, WorkerStatus

GIB = 1 << 30
XID_79 = {"xid": 79, "class": "hardware", "count": 1, "time": 1000.0, "words": "GPU has fallen off the bus"}
XID_31 = {"xid": 31, "class": "application", "count": 2, "time": 1000.0, "words": "GPU memory page fault"}
XID_NOISE = {"xid": 43, "class": "noise", "count": 1, "time": 1000.0, "words": "GPU stopped processing"}


def uuid_of(gpu: int | str) -> str:
    """The UUID of a GPU or of a MIG instance, by its index."""
    return f"MIG-0{gpu}" if ":" in str(gpu) else f"GPU-0{gpu}"


def gpu(index: int | str, **over: Any) -> dict[str, Any]:
    """A healthy GPU with one worker."""
    return {
        "gpu": str(index),
        "uuid": uuid_of(index),
        "name": "NVIDIA H200",
        "pci_bus_id": "0000:3b:00.0",
        "state": "ok",
        "words": None,
        "utilization_ratio": 0.95,
        "memory_used_bytes": 20 * GIB,
        "memory_total_bytes": 141 * GIB,
        "power_w": 650.0,
        "power_limit_w": 700.0,
        "energy_j": 9e9,
        "energy_job_j": 3.6e6,
        "temperature_c": 61.0,
        "sm_activity_ratio": 0.8,
        "tensor_activity_ratio": 0.4,
        "utilization_mean_ratio": 0.9,
        "memory_peak_bytes": 30 * GIB,
        "workers": [f"worker_w{index}"],
        "foreign": [],
        "xids": [],
        **over,
    }


def gpus(*devices: dict[str, Any], **over: Any) -> dict[str, Any]:
    """The GPU part of a node status."""
    return {
        "driver_state": "ok",
        "words": None,
        "vendor": "nvidia",
        "driver": "570.86.15",
        "cuda": "12.8",
        "visible": len(devices),
        "allocated": len(devices),
        "health": "healthy",
        "reasons": [],
        "absent": {},
        "gpus": list(devices),
        **over,
    }


def use(index: int | str, **over: Any) -> dict[str, Any]:
    """The use of a GPU by a worker."""
    entry = {"gpu": str(index), "uuid": uuid_of(index), "memory_bytes": 15 * GIB, "sm_ratio": 0.5}
    return {**entry, "attribution": "process", **over}


def of_worker(*indices: int | str, **over: Any) -> dict[str, Any]:
    """The GPU part of a worker entry. The worker uses the GPUs of its plan."""
    return {
        "gpu_plan": [uuid_of(index) for index in indices],
        "gpu_use": [use(index) for index in indices],
        "gpu_misplaced": None,
        "gpu_conditions": {},
        "gpu_memory_full": None,
        **over,
    }


def node_of(body: dict[str, Any]) -> NodeGpus | None:
    """The GPUs of a node as a record; None without any."""
    return NodeGpus.from_json(body) if body else None


def status_of(entry: dict[str, Any]) -> WorkerStatus:
    """A worker's status as a record."""
    return WorkerStatus.from_json({"worker": "worker_w0", "rank": 0, **entry})
