"""Users of the job's GPUs on this node: workers, compared with the plan, and foreign processes."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import NamedTuple

from exporter.collecting.collector import (
    WORKER_LABELS,
    CollectorContext,
    StatusParts,
    worker_labels,
)
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import JobProgress, NodeGpuUse, Published, Publisher, WorkerProcesses, WorkerProgress
from exporter.contract import status
from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.gpus.analysis.hang_signatures import ConditionDetector, Finding, GpuSample, WorkerSample
from exporter.gpus.analysis.users import GpuUse, GpuUsers, NodeGpuUsage, WorkerPlacement
from exporter.gpus.collectors.owners_reader import GpuProcessOwners
from exporter.gpus.process_info_reader import GpuProcessInfo
from exporter.gpus.records import GIB, GpuActivity, GpuProcess, GpuState, JobGpus

GPU_OF_WORKER = (*WORKER_LABELS, "gpu")

USE = Family(
    "worker_gpu_info",
    "A GPU that the worker uses; attribution is how that is known: from its processes, or inferred from the plan.",
    labels=(*GPU_OF_WORKER, "attribution"),
    kind="info",
)
MEMORY = Family("worker_gpu_memory_bytes", "Memory of the GPU that the worker and its descendants hold.", GPU_OF_WORKER)
SM = Family(
    "worker_gpu_sm_utilization_ratio",
    "Share of the GPU's time in which a kernel of the worker or its descendants ran.",
    GPU_OF_WORKER,
)
MISPLACED = Family(
    "worker_gpu_misplaced", "Whether the worker uses a GPU that the plan does not give to it.", WORKER_LABELS
)
CONDITION = Family(
    "worker_gpu_condition",
    "Whether the worker shows this sign of hanging on its GPUs, not using them or being slowed down by them; absent "
    "while unknown.",
    labels=(*WORKER_LABELS, "condition"),
)
FULL = Family(
    "worker_gpu_memory_full_timestamp_seconds",
    "When the memory of a GPU of the worker will be full at the present rate of growth.",
    WORKER_LABELS,
)
FOREIGN = Family("gpu_foreign_processes", "Processes on the GPU that are not of this job.", ("gpu",))
WORKERS = Family("gpu_workers", "Workers of the job that use the GPU.", ("gpu",))

LEAST_INTERVAL_S, MOST_INTERVAL_S = 5.0, 15.0  # conditions need readings that are not too far apart
STALE_S = 30.0  # an older GPU reading says nothing about the present
RECENT_USER_S = 60.0  # time for which a worker counts as a user of a GPU, because errors are attributed after its end
MOST_EVENTS = 50
SETTLED_S = 30.0  # programs load before they use a GPU, and the driver's list is some seconds old


class LastGpuUse(NamedTuple):
    """Last known GPU use of a worker, and whether it was misplaced."""

    uses: tuple[GpuUse, ...]
    misplaced: str | None


@dataclass(frozen=True)
class GpuWorkersSnapshot:
    """Users of the GPUs at one reading, with conditions and recent events."""

    usage: NodeGpuUsage = field(default_factory=NodeGpuUsage)
    conditions: Mapping[int, Mapping[str, Finding]] | None = None  # by rank
    planned: Mapping[int, tuple[str, ...]] | None = None  # UUIDs by rank
    outside_processes: Mapping[int, GpuProcessInfo] | None = None  # foreign processes by pid, where they can be read
    ended: Mapping[int, LastGpuUse] = field(default_factory=dict)  # last use by workers that ended, by rank
    starting: frozenset[int] = frozenset()  # ranks that have just started: not using a GPU yet means nothing
    events: tuple[Event, ...] = ()


class GpuWorkersCollector:
    """Combines GPU processes, worker processes, the plan and progress."""

    name = "gpu_workers"
    families = (USE, MEMORY, SM, MISPLACED, CONDITION, FULL, FOREIGN, WORKERS)

    def __init__(
        self,
        context: CollectorContext,
        published: Publisher[NodeGpuUse],
        gpus: Published[JobGpus],
        workers: Published[WorkerProcesses],
        progress: Published[JobProgress],
        job_phase: Published[str],
    ) -> None:
        manifest = context.manifest
        self._clock, self._published = context.clock, published
        self._gpus, self._workers, self._progress, self._job_phase = gpus, workers, progress, job_phase
        self._tasks = {task.rank: task for task in context.tasks}
        self._detector = ConditionDetector(
            stall_timeout_s=manifest.stall_timeout_s, launch_timeout_s=manifest.launch_timeout_s
        )
        self._owners = GpuProcessOwners(context)
        self._recent_users: dict[tuple[str, int], float] = {}  # last time of a worker on a GPU, by UUID and rank
        self._last_uses: dict[int, LastGpuUse] = {}  # by rank
        # By UUID and pid: time of the list that first showed a foreign process.
        self._foreign_since: dict[tuple[str, int], float | None] = {}
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._reported: set[tuple[str, ...]] = set()
        self.interval_s = min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, manifest.check_interval_s))

    def read(self) -> GpuWorkersSnapshot:
        now, gpus, workers = self._clock.time(), self._gpus.value, self._workers.value
        reading, own = gpus.reading, gpus.positions
        if reading is None or not own or now - reading.time > STALE_S:
            self._published.publish(replace(self._published.value, busy={}))
            return GpuWorkersSnapshot(events=tuple(self._events))
        usage = self._owners.usage(reading, own, workers)
        states = {state.gpu.uuid: state for state in reading.gpus}
        held = {(use.rank, use.uuid): use for use in usage.uses}
        uses: dict[int, list[GpuUse]] = {}
        for use in usage.uses:
            uses.setdefault(use.rank, []).append(use)
        shared = {gpu.uuid for gpu in usage.gpus if len(gpu.workers) > 1 or gpu.foreign}
        placements = {placement.rank: placement for placement in usage.workers}
        for task in self._tasks.values():
            planned_or_used = [
                *(use.uuid for use in uses.get(task.rank, ())),
                *(own[at] for at in task.gpus if at in own),
            ]
            samples = tuple(
                _gpu_sample(
                    state,
                    self._uses_gpu(task, state, held, placements),
                    is_exclusive=state.gpu.uuid not in shared,
                    use=held.get((task.rank, state.gpu.uuid)),
                )
                for state in (states[uuid] for uuid in dict.fromkeys(planned_or_used) if uuid in states)
            )
            self._detector.update(now, self._worker_sample(task, samples, workers))
        conditions = self._detector.conditions(now)
        parents = {uuid: state.gpu.parent for uuid, state in states.items()}
        busy = {rank: self._detector.is_busy(rank, now) for rank in self._tasks}
        self._published.publish(
            NodeGpuUse(
                workers=self._recent_users_by_gpu(now, usage, parents),
                shared=frozenset(gpu.uuid for gpu in usage.gpus if gpu.foreign),
                busy={rank: value for rank, value in busy.items() if value is not None},
            )
        )
        self._log_events(now, usage, states, conditions)
        planned = {rank: tuple(own[at] for at in task.gpus if at in own) for rank, task in self._tasks.items()}
        young = frozenset(rank for rank, start in workers.starts.items() if now - start < SETTLED_S)
        for rank, placement in placements.items():
            if rank in uses:
                self._last_uses[rank] = LastGpuUse(tuple(uses[rank]), placement.text if placement.misplaced else None)
            elif rank not in young and placement.unused is not None:
                self._last_uses.setdefault(rank, LastGpuUse((), None))
        ended = {rank: last for rank, last in self._last_uses.items() if not workers.pids.get(rank)}
        return GpuWorkersSnapshot(
            usage, conditions, planned, self._owners.outside_processes, ended, young, tuple(self._events)
        )

    def _recent_users_by_gpu(
        self, now: float, usage: NodeGpuUsage, parents: Mapping[str, str | None]
    ) -> dict[str, frozenset[int]]:
        """Ranks of recent users of each GPU, by UUID. Users of a MIG instance count for its GPU too."""
        self._recent_users |= {(gpu.uuid, rank): now for gpu in usage.gpus for rank in gpu.workers}
        self._recent_users = {key: seen for key, seen in self._recent_users.items() if now - seen <= RECENT_USER_S}
        users: dict[str, set[int]] = {gpu.uuid: set() for gpu in usage.gpus}
        for uuid, rank in self._recent_users:
            for place in (uuid, parents.get(uuid)):
                if place is not None:
                    users.setdefault(place, set()).add(rank)
        return {uuid: frozenset(ranks) for uuid, ranks in users.items()}

    # -- conditions --------------------------------------------------------------------------------

    @staticmethod
    def _uses_gpu(
        task: Task, state: GpuState, uses: Collection[tuple[int, str]], placements: Mapping[int, WorkerPlacement]
    ) -> bool | None:
        """Whether a worker has a process on a GPU; None if unknown."""
        if (task.rank, state.gpu.uuid) in uses:
            return True
        placement = placements.get(task.rank)
        return False if placement and placement.unused and state.gpu.index in placement.unused else None

    def _worker_sample(self, task: Task, gpus: tuple[GpuSample, ...], workers: WorkerProcesses) -> WorkerSample:
        progress = self._progress.value.workers.get(task.rank, WorkerProgress())
        # Logs that cannot be read do not show whether a worker is stalled.
        is_known = task.rank in self._progress.recent.workers
        return WorkerSample(
            rank=task.rank,
            role=task.role,
            start=workers.starts.get(task.rank) if workers.pids.get(task.rank) else None,
            phase=self._job_phase.value,
            last_rise=progress.last_rise,
            stalled=progress.stalled if is_known else None,
            done=progress.done,
            waits_for_requests=progress.waits_for_requests,
            gpus=gpus,
        )

    def _log_events(
        self,
        now: float,
        usage: NodeGpuUsage,
        states: Mapping[str, GpuState],
        conditions: Mapping[int, Mapping[str, Finding]],
    ) -> None:
        """Add an event for each new problem, and again if it returns."""
        present: dict[tuple[str, ...], tuple[str, str, Task | None]] = {}
        for placement in usage.workers:
            if placement.misplaced:
                task = self._tasks[placement.rank]
                present["misplaced", task.worker, placement.text] = ("GPU misplaced", placement.text, task)
        for gpu, process in self._confirmed_foreign(usage, states):
            words = f"GPU {gpu.index} ({gpu.uuid}) is also used by {self._process_text(process)}"
            present["foreign", gpu.uuid, str(process.pid)] = ("GPU foreign process", words, None)
        for rank, found in conditions.items():
            task = self._tasks[rank]
            for name, condition in found.items():
                if condition.state:
                    present["condition", task.worker, name] = ("GPU signature", f"{name}: {condition.text}", task)
        for key, (kind, detail, whose) in present.items():
            if key in self._reported:
                continue
            event = Event(time=now, level="warning", event=kind, detail=detail)
            self._events.append(event if whose is None else event.replace(worker=whose.worker, rank=whose.rank))
        self._reported = set(present)

    def _confirmed_foreign(
        self, usage: NodeGpuUsage, states: Mapping[str, GpuState]
    ) -> list[tuple[GpuUsers, GpuProcess]]:
        """Foreign processes on two of the driver's lists. A child that a worker just started or lost is on one only."""
        found = {(gpu.uuid, process.pid): (gpu, process) for gpu in usage.gpus for process in gpu.foreign or ()}
        times = {key: states[key[0]].processes_time for key in found}
        self._foreign_since = {key: self._foreign_since.get(key, times[key]) for key in found}
        return [whose for key, whose in found.items() if times[key] != self._foreign_since[key]]

    def _process_text(self, process: GpuProcess) -> str:
        holder = self._owners.outside_processes.get(process.pid)
        memory = f", {process.memory_bytes / GIB:.1f} GiB" if process.memory_bytes is not None else ""
        return f"process {process.pid}{f' ({holder.name})' if holder is not None else ''}{memory}, not of this job"

    # -- page and status ---------------------------------------------------------------------------

    def render(self, snapshot: GpuWorkersSnapshot, out: Samples) -> None:
        for use in snapshot.usage.uses:
            row = out.row(**worker_labels(self._tasks[use.rank]))
            row.add(USE, 1, gpu=use.index, attribution=use.attribution)
            row.add(MEMORY, use.memory_bytes, gpu=use.index)
            row.add(SM, use.sm_ratio, gpu=use.index)
        for placement in snapshot.usage.workers:
            if placement.misplaced is not None:
                out.row(**worker_labels(self._tasks[placement.rank])).add(MISPLACED, int(placement.misplaced))
        for rank, conditions in (snapshot.conditions or {}).items():
            row = out.row(**worker_labels(self._tasks[rank]))
            for name, condition in conditions.items():
                if condition.state is not None:
                    row.add(CONDITION, int(condition.state), condition=name)
                row.add(FULL, condition.full_time)
        for gpu in snapshot.usage.gpus:
            row = out.row(gpu=gpu.index)
            row.add(FOREIGN, None if gpu.foreign is None else len(gpu.foreign))
            row.add(WORKERS, None if gpu.foreign is None and not gpu.workers else len(gpu.workers))

    def describe(self, snapshot: GpuWorkersSnapshot, parts: StatusParts) -> None:
        parts.events += snapshot.events
        if snapshot.planned is None:
            return
        for rank in self._tasks:
            parts.add_worker(rank, _worker_status(rank, snapshot))
        if parts.gpus is not None:
            users = {gpu.uuid: gpu for gpu in snapshot.usage.gpus}
            gpus = (self._with_users(gpu, users.get(gpu.uuid), snapshot) for gpu in parts.gpus.gpus)
            parts.gpus = parts.gpus.replace(gpus=tuple(gpus))

    def _with_users(
        self, gpu: status.GpuDevice, users: GpuUsers | None, snapshot: GpuWorkersSnapshot
    ) -> status.GpuDevice:
        if users is None:
            return gpu
        holders = snapshot.outside_processes or {}
        return gpu.replace(
            workers=tuple(self._tasks[rank].worker for rank in users.workers),
            foreign=tuple(_foreign_process(process, holders.get(process.pid)) for process in users.foreign or ()),
        )


def _foreign_process(process: GpuProcess, holder: GpuProcessInfo | None) -> status.ForeignProcess:
    return status.ForeignProcess(
        pid=process.pid,
        memory_bytes=process.memory_bytes,
        name=None if holder is None else holder.name,
        uid=None if holder is None else holder.uid,
    )


def _worker_status(rank: int, snapshot: GpuWorkersSnapshot) -> status.GpuUseStatus:
    placement = next((found for found in snapshot.usage.workers if found.rank == rank), None)
    conditions = (snapshot.conditions or {}).get(rank, {})
    uses: tuple[GpuUse, ...] | None = tuple(use for use in snapshot.usage.uses if use.rank == rank)
    if not uses and (placement is None or placement.unused is None or rank in snapshot.starting):
        uses = None  # unknown
    misplaced = placement.text if placement is not None and placement.misplaced else None
    if not uses and rank in snapshot.ended:
        uses, misplaced = snapshot.ended[rank]
    return status.GpuUseStatus(
        gpu_misplaced=misplaced,
        gpu_conditions={name: condition.text for name, condition in conditions.items() if condition.state},
        gpu_memory_full=next((c.full_time for c in conditions.values() if c.full_time is not None), None),
        gpu_plan=(snapshot.planned or {}).get(rank, ()),
        gpu_use=None if uses is None else tuple(map(_gpu_use, uses)),
    )


def _gpu_use(use: GpuUse) -> status.GpuUse:
    return status.GpuUse(
        gpu=use.index,
        uuid=use.uuid,
        memory_bytes=use.memory_bytes,
        sm_ratio=use.sm_ratio,
        attribution=use.attribution,
    )


def _gpu_sample(state: GpuState, used: bool | None, *, is_exclusive: bool, use: GpuUse | None) -> GpuSample:
    """Reading of one GPU of a worker.

    If the worker is not ``is_exclusive`` on the GPU, only values of its own processes are used.
    """
    activity = state.activity or GpuActivity()
    if is_exclusive:
        utilization, power = activity.utilization_ratio, activity.power_w
    else:
        utilization, power = None if use is None else use.sm_ratio, None
    return GpuSample(
        index=state.gpu.index,
        model=state.gpu.name,
        utilization=utilization,
        memory_used_bytes=activity.memory_used_bytes,
        memory_total_bytes=activity.memory_total_bytes,
        power_w=power,
        power_limit_w=activity.power_limit_w,
        sm_clock_hz=activity.sm_clock_hz,
        throttle_s=dict(activity.throttle_s.items()),
        used=used,
    )
