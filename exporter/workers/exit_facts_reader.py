"""What the kernel's log and the GPU driver say of a worker that has ended, as fields of a record."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from exporter.collecting.collector import Board, CollectorContext
from exporter.contract.manifest import Task
from exporter.gpus.analysis.blame import FaultAttribution, GpuError, WorkerGpuRelation
from exporter.gpus.records import GpuState
from exporter.machine.kernel_log import KernelEvent, KernelXid, OomVictim

LAST_LOOK_S = 0.5
"""How long the look at the GPUs may take that an end calls for: one that was lost just now is not known to be yet."""


def oom_exit_facts(context: CollectorContext, pids: Collection[int], since: float) -> dict[str, Any]:
    """Whether one of these processes was killed for lack of memory, as the kernel's log says."""
    victims = [event.what.pid for event in _kernel_events(context, since) if isinstance(event.what, OomVictim)]
    victim = next((pid for pid in reversed(victims) if pid in pids), None)
    return {} if victim is None else {"oom_victim": f"its process {victim} was killed for lack of memory"}


def gpu_exit_facts(context: CollectorContext, task: Task, pids: Collection[int], since: float) -> dict[str, Any]:
    """Errors of a worker's GPUs since a moment, as driver and kernel's log tell them, and which of them are lost.

    The log names a process, often, and is not always to be read. What a program has done wrong is the worker's where
    that is named, or where nobody else was on that GPU.
    """
    told = [
        GpuError(event.time, what.code, pci=what.pci, pid=what.pid, gpu_instance=what.gpu_instance)
        for event in _kernel_events(context, since)
        if isinstance(what := event.what, KernelXid)
    ]
    if context.gpus is not None:
        told += [
            GpuError(event.time, event.xid, uuid=event.uuid, pid=event.pid, gpu_instance=event.gpu_instance)
            for event in context.gpus.events()
            if event.time >= since
        ]
    board = context.board
    others = {pid for rank, theirs in board.pids.items() if rank != task.rank for pid in theirs}
    blame = FaultAttribution(list(_gpus(context, task)), pids, others - set(pids))
    faults = [{"time": error.time, "xid": error.xid, "words": words} for error, words in blame.errors(told)]
    losses = [{"time": time, "gpu": gpu, "words": words} for gpu, time, words in blame.losses(_lost(context, task))]
    return {**({"gpu_faults": faults} if faults else {}), **({"gpu_lost": losses} if losses else {})}


def _lost(context: CollectorContext, task: Task) -> Mapping[str, tuple[float, str]]:
    """GPUs that are lost, by UUID, since when, and what the driver says.

    None at the first look at the workers: an end of before says nothing of GPUs that are lost by now.
    """
    board, host = context.board, context.gpus
    if board.gpus is None or host is None or task.rank not in board.pids:
        return {}
    look = host.look(LAST_LOOK_S)
    gone = [state for state in look.gpus if state.state in ("lost", "reset_required")]
    return {**{state.gpu.uuid: (look.time, state.words or state.state) for state in gone}, **board.gpus_lost}


def _kernel_events(context: CollectorContext, since: float) -> list[KernelEvent]:
    if context.kernel is None:
        return []
    context.kernel.read()
    return [event for event in context.kernel.events if event.time >= since]


def _gpus(context: CollectorContext, task: Task) -> Iterator[WorkerGpuRelation]:
    """The GPUs of this node as the last look has found them."""
    board = context.board
    states = board.gpus.gpus if board.gpus is not None else ()
    planned: dict[str, set[int]] = {}
    """By UUID the ranks to which the plan gives a GPU; to whom it gives a MIG instance it gives a part of its GPU."""
    parents = {state.gpu.uuid: state.gpu.parent for state in states}
    for other in context.tasks:
        for uuid in (board.gpu_positions[at] for at in other.gpus if at in board.gpu_positions):
            for place in filter(None, (uuid, parents.get(uuid))):
                planned.setdefault(place, set()).add(other.rank)
    for state in states:
        gpu, ranks = state.gpu, planned.get(state.gpu.uuid, set()) | board.gpu_users.get(state.gpu.uuid, frozenset())
        yield WorkerGpuRelation(
            gpu.uuid,
            gpu.index,
            pci=gpu.pci_bus_id,
            parent=gpu.parent,
            gpu_instance=gpu.gpu_instance,
            own=task.rank in ranks,
            alone=ranks == {task.rank} and _knows_foreign_processes(state, board) and gpu.uuid not in board.shared_gpus,
        )


def _knows_foreign_processes(state: GpuState, board: Board) -> bool:
    """Whether all that are on a GPU were looked at: on the job's own alone.

    A divided GPU is none of these, and others may have parts of it that are not seen here.
    """
    return state.gpu.uuid in board.own_gpus and state.gpu.uuid in board.gpu_users and state.processes is not None
