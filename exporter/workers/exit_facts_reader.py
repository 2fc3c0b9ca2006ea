"""Facts from the kernel log and the GPU driver about a worker that ended, as fields of its record."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from exporter.collecting.collector import CollectorContext, PublishedValues
from exporter.contract.manifest import Task
from exporter.gpus.analysis.attribution import FaultAttribution, GpuError, WorkerGpuRelation
from exporter.gpus.records import GpuState
from exporter.machine.kernel_log import KernelEvent, KernelXid, OomVictim

LAST_READ_S = 0.5  # time for the read of the GPUs at an end: a GPU lost just now may not be known yet


def oom_exit_facts(context: CollectorContext, pids: Collection[int], since: float) -> dict[str, Any]:
    """Whether the OOM killer killed one of these processes, according to the kernel log."""
    victims = [event.detail.pid for event in _kernel_events(context, since) if isinstance(event.detail, OomVictim)]
    victim = next((pid for pid in reversed(victims) if pid in pids), None)
    return {} if victim is None else {"oom_victim": f"its process {victim} was killed for lack of memory"}


def gpu_exit_facts(context: CollectorContext, task: Task, pids: Collection[int], since: float) -> dict[str, Any]:
    """GPU errors of a worker since a time, from driver and kernel log, and its lost GPUs.

    The log often names a process, but is not always readable. A program's error is the worker's if it is named, or if
    no other process was on that GPU.
    """
    errors = [
        GpuError(event.time, what.code, pci=what.pci, pid=what.pid, gpu_instance=what.gpu_instance)
        for event in _kernel_events(context, since)
        if isinstance(what := event.detail, KernelXid)
    ]
    if context.gpus is not None:
        errors += [
            GpuError(event.time, event.xid, uuid=event.uuid, pid=event.pid, gpu_instance=event.gpu_instance)
            for event in context.gpus.events()
            if event.time >= since
        ]
    board = context.published
    others = {pid for rank, theirs in board.pids.items() if rank != task.rank for pid in theirs}
    blame = FaultAttribution(list(_gpu_relations(context, task)), pids, others - set(pids))
    faults = [{"time": error.time, "xid": error.xid, "words": text} for error, text in blame.errors(errors)]
    losses = [{"time": time, "gpu": gpu, "words": text} for gpu, time, text in blame.losses(_lost_gpus(context, task))]
    return {**({"gpu_faults": faults} if faults else {}), **({"gpu_lost": losses} if losses else {})}


def _lost_gpus(context: CollectorContext, task: Task) -> Mapping[str, tuple[float, str]]:
    """Lost GPUs by UUID: since when, and the driver's words.

    Empty at the first read of the workers: an end before it has nothing to do with GPUs lost now.
    """
    board, host = context.published, context.gpus
    if board.gpu_reading is None or host is None or task.rank not in board.pids:
        return {}
    reading = host.poll(LAST_READ_S)
    gone = [state for state in reading.gpus if state.state in ("lost", "reset_required")]
    return {**{state.gpu.uuid: (reading.time, state.message or state.state) for state in gone}, **board.gpus_lost}


def _kernel_events(context: CollectorContext, since: float) -> list[KernelEvent]:
    if context.kernel is None:
        return []
    context.kernel.read()
    return [event for event in context.kernel.events if event.time >= since]


def _gpu_relations(context: CollectorContext, task: Task) -> Iterator[WorkerGpuRelation]:
    """GPUs of this node as of the last read."""
    board = context.published
    states = board.gpu_reading.gpus if board.gpu_reading is not None else ()
    planned: dict[str, set[int]] = {}  # ranks that the plan gives a GPU, by UUID; a MIG instance counts for its GPU too
    parents = {state.gpu.uuid: state.gpu.parent for state in states}
    for other in context.tasks:
        for uuid in (board.gpu_positions[at] for at in other.gpus if at in board.gpu_positions):
            for place in filter(None, (uuid, parents.get(uuid))):
                planned.setdefault(place, set()).add(other.rank)
    for state in states:
        gpu, ranks = state.gpu, planned.get(state.gpu.uuid, set()) | board.gpu_users.get(state.gpu.uuid, frozenset())
        yield WorkerGpuRelation(
            gpu,
            is_own=task.rank in ranks,
            is_exclusive=ranks == {task.rank}
            and _has_all_processes(state, board)
            and gpu.uuid not in board.shared_gpus,
        )


def _has_all_processes(state: GpuState, board: PublishedValues) -> bool:
    """Whether all processes on a GPU were read, which is so only on the job's own GPUs.

    Not for a MIG GPU: others may use parts that are not visible here.
    """
    return state.gpu.uuid in board.own_gpus and state.gpu.uuid in board.gpu_users and state.processes is not None
