"""Owners of GPU processes: workers, found by process tree, environment and pid namespace, or other jobs."""

import os
from collections.abc import Collection, Mapping

from exporter.collecting.collector import CollectorContext
from exporter.collecting.published import WorkerProcesses
from exporter.gpus.analysis.users import NodeGpuUsage, WorkerAssignment, gpu_usage
from exporter.gpus.process_info_reader import GpuProcessInfo, read_gpu_process, read_namespace_pids
from exporter.gpus.records import GpuReading
from exporter.machine.procfs import read_environment

MPS = "nvidia-cuda-mps"  # start of the names of MPS processes, as cut by the kernel; they use GPUs for their clients
DEVICES = "CUDA_VISIBLE_DEVICES"


class GpuProcessOwners:
    """Finds the owners of GPU processes, and remembers which ended processes were the job's."""

    def __init__(self, context: CollectorContext) -> None:
        self._context = context
        self._tasks = context.tasks
        self._is_planned = any(task.gpus for task in context.manifest.tasks)
        # A list in a user's shell gives none of its GPUs to one job alone: other jobs on them are no foreign ones.
        self._may_share_gpus = not self._is_planned and context.identity.first_gpu is not None
        # By rank: pid of the worker and the devices in its environment.
        self._devices: dict[int, tuple[int, str | None]] = {}
        self._outside_processes: dict[int, GpuProcessInfo | None] = {}  # by pid: GPU processes outside all worker trees
        self._job_pids: set[int] = set()  # pids that belonged to the job at the last reading

    @property
    def outside_processes(self) -> Mapping[int, GpuProcessInfo]:
        """Readable GPU processes outside all worker trees, by pid."""
        return {pid: holder for pid, holder in self._outside_processes.items() if holder is not None}

    def usage(self, reading: GpuReading, own: Mapping[int, str], workers: WorkerProcesses) -> NodeGpuUsage:
        """Attribute the GPU processes of this reading. ``own``: UUIDs of the job's GPUs by position in the plan."""
        positions = {-1, *own, *(position for task in self._tasks for position in task.gpus)}
        reported_pids = {process.pid for state in reading.gpus for process in state.processes or ()}
        owners = {pid: rank for rank, pids in workers.pids.items() for pid in pids}
        here = self._local_pids(reported_pids - owners.keys(), owners)
        unowned_pids = {here.get(pid, pid) for pid in reported_pids} - owners.keys()
        self._read_outside_processes(unowned_pids)
        pids = {task.rank: frozenset(workers.pids.get(task.rank, ())) for task in self._tasks}
        ignored = {os.getpid(), *self._former_job_pids(unowned_pids)}
        for pid, holder in self.outside_processes.items():
            if holder.name.startswith(MPS):
                ignored.add(pid)
            elif holder.job_id == self._context.identity.job_id:
                # Background process, in a container, or newer than the last reading of the tree.
                if holder.rank in pids:
                    pids[holder.rank] |= {pid}
                else:
                    ignored.add(pid)
            elif self._may_share_gpus:
                ignored.add(pid)
        self._job_pids = (self._job_pids & unowned_pids).union(owners, *pids.values())
        return gpu_usage(
            reading.gpus,
            [own.get(position, f"{position}, which is missing") for position in range(max(positions) + 1)],
            [
                WorkerAssignment(
                    rank=task.rank,
                    # A job that asks for no GPUs leaves it to its workers which of the given ones they use.
                    positions=task.gpus if self._is_planned else tuple(own),
                    pids=pids[task.rank],
                    visible_devices=self._visible_devices(task.rank, workers.pids.get(task.rank, ())),
                    is_running=bool(pids[task.rank]),
                )
                for task in self._tasks
            ],
            visible_pids={*owners, *self.outside_processes},
            local_pids=here,
            ignored=ignored,
        )

    def _former_job_pids(self, outside_pids: Collection[int]) -> set[int]:
        """Processes that belonged to the job and can no longer be identified.

        Most have ended: the driver's list is some seconds old. Others have left the tree.
        """
        holders = {pid: self._outside_processes[pid] for pid in self._job_pids.intersection(outside_pids)}
        return {pid for pid, holder in holders.items() if holder is None or holder.job_id is None}

    def _local_pids(self, unknown: Collection[int], owners: Collection[int]) -> dict[int, int]:
        """Map unknown pids to workers' processes that have these pids in their own pid namespace."""
        proc = self._context.proc
        unknown = {pid for pid in unknown if not os.path.exists(f"{proc}/{pid}")}
        if not unknown:
            return {}
        inner: dict[int, list[int]] = {}
        for owner in owners:
            for pid in read_namespace_pids(owner, proc)[1:]:
                inner.setdefault(pid, []).append(owner)
        return {pid: inner[pid][0] for pid in unknown if len(inner.get(pid, ())) == 1}

    def _read_outside_processes(self, outside_pids: Collection[int]) -> None:
        """Read each GPU process outside all worker trees once."""
        self._outside_processes = {
            pid: self._outside_processes[pid]
            if self._outside_processes.get(pid) is not None
            else read_gpu_process(pid, self._context.proc)
            for pid in outside_pids
        }

    def _visible_devices(self, rank: int, pids: Collection[int]) -> str | None:
        """Devices in the environment of a worker's process."""
        if not pids:
            return None
        first = min(pids)
        known = self._devices.get(rank)
        if known is None or known[0] != first:
            found = read_environment(first, (DEVICES,), self._context.proc)
            known = (first, None if found is None else found.get(DEVICES))
            if found is not None:
                self._devices[rank] = known
        return known[1]
