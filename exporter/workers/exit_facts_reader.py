"""Facts from the kernel log and the GPU driver about a worker that ended, as fields of its record."""

from collections.abc import Collection, Iterator, Mapping

from exporter.collecting.collector import CollectorContext
from exporter.collecting.published import NodeGpuUse, Published, WorkerProcesses
from exporter.contract.manifest import Task
from exporter.gpus.analysis.attribution import FaultAttribution, GpuError, WorkerGpuRelation
from exporter.gpus.records import JobGpus
from exporter.machine.kernel_log import KernelEvent, KernelXid, OomVictim

LAST_READ_S = 0.5  # time for the read of the GPUs at an end: a GPU lost just now may not be known yet


class NodeFacts:
    """What the node knows about the end of a worker.

    Published values may be old: each is the last that was known of the worker, its processes and its GPUs.
    """

    def __init__(
        self,
        context: CollectorContext,
        processes: Published[WorkerProcesses],
        gpus: Published[JobGpus],
        gpu_use: Published[NodeGpuUse],
    ) -> None:
        self._context = context
        self._processes, self._gpus, self._gpu_use = processes, gpus, gpu_use

    def oom_facts(self, pids: Collection[int], since: float) -> dict[str, str]:
        """Whether the OOM killer killed one of these processes, according to the kernel log."""
        victims = [event.detail.pid for event in self._kernel_events(since) if isinstance(event.detail, OomVictim)]
        victim = next((pid for pid in reversed(victims) if pid in pids), None)
        return {} if victim is None else {"oom_victim": f"its process {victim} was killed for lack of memory"}

    def gpu_facts(self, task: Task, pids: Collection[int], since: float) -> dict[str, list[dict[str, object]]]:
        """GPU errors of a worker since a time, from driver and kernel log, and its lost GPUs.

        The log often names a process, but is not always readable. A program's error is the worker's if it is named, or
        if no other process was on that GPU.
        """
        errors = [
            GpuError(event.time, what.code, pci=what.pci, pid=what.pid, gpu_instance=what.gpu_instance)
            for event in self._kernel_events(since)
            if isinstance(what := event.detail, KernelXid)
        ]
        if self._context.gpus is not None:
            errors += [
                GpuError(event.time, event.xid, uuid=event.uuid, pid=event.pid, gpu_instance=event.gpu_instance)
                for event in self._context.gpus.events()
                if event.time >= since
            ]
        others = {pid for rank, theirs in self._processes.value.pids.items() if rank != task.rank for pid in theirs}
        blame = FaultAttribution(list(self._gpu_relations(task)), pids, others - set(pids))
        facts: dict[str, list[dict[str, object]]] = {
            "gpu_faults": [
                {"time": error.time, "xid": error.xid, "words": text} for error, text in blame.errors(errors)
            ],
            "gpu_lost": [
                {"time": time, "gpu": gpu, "words": text} for gpu, time, text in blame.losses(self._lost_gpus(task))
            ],
        }
        return {name: entries for name, entries in facts.items() if entries}

    def _lost_gpus(self, task: Task) -> Mapping[str, tuple[float, str]]:
        """Lost GPUs by UUID: since when, and the driver's words.

        Empty at the first read of the workers: an end before it has nothing to do with GPUs lost now.
        """
        gpus, host = self._gpus.value, self._context.gpus
        if gpus.reading is None or host is None or task.rank not in self._processes.value.pids:
            return {}
        reading = host.poll(LAST_READ_S)
        gone = [state for state in reading.gpus if state.state in ("lost", "reset_required")]
        return {state.gpu.uuid: (reading.time, state.message or state.state) for state in gone} | dict(gpus.lost)

    def _kernel_events(self, since: float) -> list[KernelEvent]:
        kernel = self._context.kernel
        if kernel is None:
            return []
        kernel.read()
        return [event for event in kernel.events if event.time >= since]

    def _gpu_relations(self, task: Task) -> Iterator[WorkerGpuRelation]:
        """GPUs of this node as of the last read."""
        gpus, use = self._gpus.value, self._gpu_use.value
        states = gpus.reading.gpus if gpus.reading is not None else ()
        own = set(gpus.positions.values())
        planned: dict[str, set[int]] = {}  # ranks the plan gives a GPU, by UUID; a MIG instance counts for its GPU too
        parents = {state.gpu.uuid: state.gpu.parent for state in states}
        for other in self._context.tasks:
            for uuid in (gpus.positions[at] for at in other.gpus if at in gpus.positions):
                for place in filter(None, (uuid, parents.get(uuid))):
                    planned.setdefault(place, set()).add(other.rank)
        for state in states:
            gpu, ranks = state.gpu, planned.get(state.gpu.uuid, set()) | use.workers.get(state.gpu.uuid, frozenset())
            # All processes are read on the job's own GPUs only. Not on a MIG GPU: parts of it may not be visible here.
            has_all_processes = gpu.uuid in own and gpu.uuid in use.workers and state.processes is not None
            is_exclusive = ranks == {task.rank} and has_all_processes and gpu.uuid not in use.shared
            yield WorkerGpuRelation(gpu, is_own=task.rank in ranks, is_exclusive=is_exclusive)
