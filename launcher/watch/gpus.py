"""GPUs in the terminal view: the cells of a worker's row, and the GPU problems."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean

from exporter.contract.report import WorkerGpu
from exporter.contract.status import GpuDevice, NodeGpus
from exporter.contract.view import JobView, NodeGpusView, WorkerView
from exporter.gpus.analysis.node_status import FOREIGN, GpuProblem, find_device, node_gpu_problems, worker_gpu_problems
from exporter.gpus.records import GIB

MOST_GPUS_LISTED = 2  # with more GPUs the cell also shows their number
LEAST_SHARING_WORKERS = 2  # from this many workers on, a foreign process on their GPU is a problem of the node


def has_gpus(view: JobView) -> bool:
    return any(worker.gpus or worker.gpu_devices for worker in view.workers)


def gpu_cells(worker: WorkerView, node: NodeGpus | None) -> tuple[str, str, str]:
    """The GPU, GPU% and GPU GiB cells of a worker; ``node`` are the GPUs of its node.

    Several GPUs give the mean utilization and the sum of the memory. On a GPU that several workers share, the share of
    the worker's own kernels replaces the utilization of the device, if the driver reports it.
    """
    devices = worker.gpu_devices
    at_work = [device for device in devices if device.used] or devices
    names = [device.gpu for device in at_work if device.gpu is not None] or [str(gpu) for gpu in worker.gpus]
    if not worker.up:
        return gpu_index_text(names), "-", "-"
    pairs = [(device, find_device(device.uuid, node)) for device in at_work]
    busy = [share for share in (_utilization(*pair) for pair in pairs) if share is not None]
    used = [held for held in (_memory(*pair) for pair in pairs) if held is not None]
    totals = [known.memory_total_bytes for _, known in pairs if known is not None and known.memory_total_bytes]
    total = f"/{_gib(sum(totals), 0)}" if len(totals) == len(at_work) else ""
    return (
        gpu_index_text(names),
        f"{100 * fmean(busy):.0f}%" if busy else "-",
        f"{_gib(sum(used))}{total}" if used else "-",
    )


def _utilization(device: WorkerGpu, known: GpuDevice | None) -> float | None:
    share = device.sm_ratio if known is not None and len(known.workers) > 1 else None
    return share if share is not None or known is None else known.utilization_ratio


def _memory(device: WorkerGpu, known: GpuDevice | None) -> int | None:
    """Bytes that the worker holds, or that the GPU holds if only this worker uses it. None if unknown."""
    if device.memory_bytes is not None:
        return device.memory_bytes
    if device.used is False:
        return 0
    return known.memory_used_bytes if known is not None and len(known.workers) == 1 and not known.foreign else None


def _gib(count: float, digits: int = 1) -> str:
    amount = count / GIB
    return f"{amount:.{digits}f}" if amount < 100 else f"{amount:.0f}"


def gpu_index_text(names: Iterable[str]) -> str:
    """Format GPU indexes as ``3``, ``1,2`` or ``0-7 (8)``; a dash without any."""
    listed = list(names)
    numbers = sorted({int(name) for name in listed if name.isdigit()})
    runs: list[list[int]] = [[number] for number in numbers[:1]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > MOST_GPUS_LISTED else ",".join(map(str, run)) for run in runs]
    parts += [name for name in listed if not name.isdigit()]
    count = f" ({len(listed)})" if len(listed) > MOST_GPUS_LISTED else ""
    return f"{','.join(parts)}{count}" if parts else "-"


def is_done(worker: WorkerView) -> bool:
    return worker.exit is not None and worker.exit.reason == "completed"


def gpu_problems(view: JobView) -> list[tuple[str, list[GpuProblem]]]:
    """GPU problems with their owner: nodes first, then workers.

    Workers that completed are left out. A foreign process on a GPU of several workers is a problem of their node.
    """
    gpus = gpus_by_node(view)
    nodes = {node: node_gpu_problems(found) for node, found in sorted(gpus.items())}
    found = [
        (worker, worker_gpu_problems(worker, worker.start, worker.gpu_devices, gpus.get(worker.node)))
        for worker in view.workers
    ]
    met = Counter((worker.node, problem.key) for worker, problems in found for problem in problems)
    workers = []
    for worker, problems in found:
        if is_done(worker):
            continue
        own = []
        for problem in problems:
            if not problem.key.startswith(FOREIGN) or met[worker.node, problem.key] < LEAST_SHARING_WORKERS:
                own.append(problem)
            elif problem not in nodes[worker.node]:
                nodes[worker.node].append(problem)
        workers.append((_worker_text(worker), own))
    return [
        (owner, what) for owner, what in [*((_node_text(node), what) for node, what in nodes.items()), *workers] if what
    ]


def clearable_problems(view: JobView) -> set[str]:
    """Owners whose earlier problems are over unless still reported; with unknown GPU state, absence proves nothing."""
    readable = {node: found for node, found in gpus_by_node(view).items() if found.driver_state == "ok"}
    workers = {
        _worker_text(worker)
        for worker in view.workers
        # a worker without a process has no condition, healthy or not
        if worker.up and worker.pid and worker.node in readable and worker.gpu_conditions is not None
    }
    return workers | {_node_text(node) for node, found in readable.items() if found.health is not None}


def _node_text(node: str) -> str:
    return f"GPUs of {node}"


def _worker_text(worker: WorkerView) -> str:
    return f"{worker.worker} on {worker.node}"


def gpus_by_node(view: JobView) -> Mapping[str, NodeGpusView]:
    return {found.node: found for found in view.gpus}


def mean_utilization(view: JobView) -> float | None:
    """Mean utilization of the GPUs that workers use; None if unknown."""
    gpus = gpus_by_node(view)
    shares = {
        gpu.uuid: gpu.utilization_ratio
        for worker in view.workers
        if worker.up
        for device in worker.gpu_devices
        if (gpu := find_device(device.uuid, gpus.get(worker.node))) is not None and gpu.utilization_ratio is not None
    }
    return fmean(shares.values()) if shares else None
