"""Attribution of GPU processes to workers, compared with the plan."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.records import GpuProcess, GpuState

# By pid, or inferred from the plan if the GPU's pids are of another pid namespace.
Attribution = Literal["process", "inferred"]

UUID_FORMS = ("GPU-", "MIG-")  # how UUIDs in a device list begin
_NUMBER = re.compile(r"\+?(\d{1,9})")


def parse_visible_devices(text: str) -> tuple[str, ...]:
    """Devices in ``CUDA_VISIBLE_DEVICES`` as CUDA parses it: numbers, or UUIDs and their prefixes.

    Parsing ends at an entry that is not a device (``-1``, ``NoDevFiles``) or whose form differs from the first: number,
    GPU or MIG instance. A duplicate makes the list empty. Text after a number in an entry is ignored.
    """
    entries = [entry.strip() for entry in text.split(",")]
    form = next((form for form in UUID_FORMS if entries[0].startswith(form)), None)
    devices: list[str] = []
    for entry in entries:
        if form is not None:
            device = entry if entry.startswith(form) else None
        else:
            number = _NUMBER.match(entry)
            device = str(int(number[1])) if number else None
        if device is None:
            break
        if device in devices:
            return ()
        devices.append(device)
    return tuple(devices)


def visible_gpu_positions(text: str, uuids: Sequence[str]) -> tuple[int, ...]:
    """Positions in ``uuids`` that ``CUDA_VISIBLE_DEVICES`` gives to a program that starts now.

    The list ends at a device that matches none or several. A duplicate makes it empty.
    """
    found = []
    for at in listed_gpu_positions(text, uuids):
        if at is None:
            break
        found.append(at)
    return tuple(found) if len(set(found)) == len(found) else ()


def listed_gpu_positions(text: str, uuids: Sequence[str]) -> tuple[int | None, ...]:
    """Positions in ``uuids`` of the devices in ``CUDA_VISIBLE_DEVICES``, in its order.

    A number is a position; one out of range ends the list. A UUID may be a prefix. None for a UUID that matches none or
    several, such as a lost GPU, so later devices keep their places. MIG instances are ``MIG-UUID``, or
    ``MIG-GPU-UUID/3/0`` before driver 470.
    """
    found: list[int | None] = []
    for device in parse_visible_devices(text):
        at = _position(device, uuids)
        if at is None and device.isdigit():
            break
        found.append(at)
    return tuple(found)


def _position(device: str, uuids: Sequence[str]) -> int | None:
    if device.isdigit():
        return int(device) if int(device) < len(uuids) else None
    if device in uuids:
        return uuids.index(device)
    fitting = [at for at, uuid in enumerate(uuids) if uuid.startswith(device)]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True, slots=True)
class WorkerAssignment:
    """A worker on this node."""

    rank: int
    positions: tuple[int, ...] = ()  # planned GPUs, as positions among the job's GPUs
    pids: frozenset[int] = frozenset()  # its process and all descendants
    # ``CUDA_VISIBLE_DEVICES`` of its process. Only UUIDs count: numbers may refer to its own device cgroup.
    visible_devices: str | None = None
    is_running: bool = True


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of one GPU by all processes of one worker: memory and share of time, None if unknown."""

    rank: int
    uuid: str
    index: str
    attribution: Attribution
    planned: bool
    memory_bytes: int | None = None
    sm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GpuUsers:
    """Processes on one of the job's GPUs."""

    uuid: str
    index: str
    workers: tuple[int, ...] = ()  # ranks, in order; several share it
    foreign: tuple[GpuProcess, ...] | None = ()  # without those of the display; None if unknown


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """GPUs that a worker uses, compared with its plan."""

    rank: int
    misplaced: bool | None = None  # whether it uses a GPU outside its plan; None if unknown
    text: str = ""  # the GPUs that it uses, if misplaced
    unused: tuple[str, ...] | None = None  # indices of planned GPUs without a process of it; None if unknown


@dataclass(frozen=True)
class NodeGpuUsage:
    """All use of the GPUs of one node."""

    uses: tuple[GpuUse, ...] = ()  # by rank, then in GPU order; also on GPUs of other jobs
    gpus: tuple[GpuUsers, ...] = ()  # the job's GPUs, in the order of the plan's positions
    workers: tuple[WorkerPlacement, ...] = ()


@dataclass(slots=True)
class _GpuOccupants:
    """Processes found on one GPU."""

    by_rank: dict[int, list[GpuProcess]] = field(default_factory=dict)
    attribution: dict[int, Attribution] = field(default_factory=dict)
    foreign: list[GpuProcess] = field(default_factory=list)
    unknown: bool = False  # whether it has processes of unknown owners

    def add(self, rank: int, process: GpuProcess, attribution: Attribution) -> None:
        self.by_rank.setdefault(rank, []).append(process)
        if self.attribution.get(rank) != "process":
            self.attribution[rank] = attribution


class _NodeUsage:
    """GPUs of a node with their processes and MIG instances."""

    def __init__(self, states: Sequence[GpuState], local_pids: Mapping[int, int], ignored: Collection[int]) -> None:
        self.gpus = {state.gpu.uuid: state.gpu for state in states}
        self.occupants = {uuid: _GpuOccupants() for uuid in self.gpus}
        self.instances: dict[str, list[str]] = {}  # UUIDs of the MIG instances of each divided GPU
        for gpu in self.gpus.values():
            if gpu.parent is not None:
                self.instances.setdefault(gpu.parent, []).append(gpu.uuid)
        self.processes = {state.gpu.uuid: _deduplicated(state.processes, local_pids, ignored) for state in states}
        for whole, parts in self.instances.items():
            # The list of a divided GPU repeats the processes of its instances: count them there only.
            inside = {process.pid for part in parts for process in self.processes[part] or ()}
            listed = self.processes.get(whole)
            if listed:
                self.processes[whole] = [process for process in listed if process.pid not in inside]

    def overlaps(self, uuid: str, others: Collection[str]) -> bool:
        """Whether a GPU is among ``others``, or contains or is part of one of them."""
        if uuid in others or not self.instances:
            return uuid in others
        return self.gpus[uuid].parent in others or any(part in others for part in self.instances.get(uuid, ()))

    def overlapping(self, others: Collection[str]) -> list[str]:
        """All GPUs that fit ``others``."""
        if not self.instances:
            return [uuid for uuid in others if uuid in self.gpus]
        return [uuid for uuid in self.gpus if self.overlaps(uuid, others)]

    def used_gpus(self) -> dict[int, list[str]]:
        """GPUs with processes of each rank, in GPU order."""
        found: dict[int, list[str]] = {}
        for uuid, on_it in self.occupants.items():
            for rank in on_it.by_rank:
                found.setdefault(rank, []).append(uuid)
        return found

    def named_gpus(self, worker: WorkerAssignment) -> frozenset[str]:
        """GPUs that the worker's environment names by UUID; empty if it names none."""
        if worker.visible_devices is None or not worker.visible_devices.strip().startswith(UUID_FORMS):
            return frozenset()
        uuids = tuple(self.gpus)
        return frozenset(uuids[at] for at in visible_gpu_positions(worker.visible_devices, uuids))

    def add(
        self,
        uuid: str,
        worker: WorkerAssignment,
        planned: Collection[str],
        process: GpuProcess,
        attribution: Attribution,
    ) -> None:
        """Record a process of a worker on this GPU.

        On a divided GPU without details, it counts for the instance in the worker's plan, if there is exactly one.
        """
        parts = [part for part in self.instances.get(uuid, ()) if part in planned]
        if len(parts) == 1:
            self.occupants[parts[0]].add(worker.rank, process, "inferred")
        else:
            self.occupants[uuid].add(worker.rank, process, attribution)

    def gpu_use(self, uuid: str, rank: int, planned: Collection[str]) -> GpuUse:
        """Use of a GPU by a worker that has processes on it."""
        gpu, found = self.gpus[uuid], self.occupants[uuid]
        memory = [p.memory_bytes for p in found.by_rank[rank] if p.memory_bytes is not None]
        shares = [p.sm_ratio for p in found.by_rank[rank] if p.sm_ratio is not None]
        return GpuUse(
            rank,
            uuid,
            gpu.index,
            found.attribution[rank],
            self.overlaps(uuid, planned),
            sum(memory) if memory else None,
            min(1.0, sum(shares)) if shares else None,
        )

    def gpu_users(self, uuid: str) -> GpuUsers:
        """Processes on this GPU."""
        found, processes = self.occupants[uuid], self.processes[uuid]
        return GpuUsers(
            uuid,
            self.gpus[uuid].index,
            tuple(sorted(found.by_rank)),
            tuple(found.foreign) if processes is not None and not found.unknown else None,
        )

    def placement(self, worker: WorkerAssignment, planned: tuple[str, ...], used: Sequence[str]) -> WorkerPlacement:
        """Compare a worker's GPUs (``used``) with its plan, after all processes have been assigned."""
        if not worker.is_running:
            return WorkerPlacement(worker.rank)
        as_planned = tuple(used) == planned  # the usual case, which skips the comparison
        wrong = [] if as_planned else [uuid for uuid in used if not self.overlaps(uuid, planned)]
        whole = len(planned) == len(set(worker.positions)) and all(uuid in self.gpus for uuid in planned)
        known = whole and all(map(self._is_known, self.overlapping(planned)))
        unused: tuple[str, ...] | None = () if known else None
        if known and not as_planned:
            taken = {uuid for uuid in planned for mine in used if self.overlaps(mine, (uuid,))}
            unused = tuple(self.gpus[uuid].index for uuid in planned if uuid not in taken)
        if wrong:
            uses = ", ".join(self.gpus[uuid].title for uuid in wrong)
            given = ", ".join(self.gpus[uuid].index if uuid in self.gpus else uuid for uuid in planned)
            text = f"uses {uses}, the plan gives it {f'GPU {given}' if given else 'none'}"
            return WorkerPlacement(worker.rank, True, text, unused)
        # Inferred processes always match the plan, so they prove nothing.
        sure = any(self.occupants[uuid].attribution[worker.rank] == "process" for uuid in used) or (
            bool(used) and bool(self.named_gpus(worker))
        )
        nowhere = not used and bool(self.gpus) and all(map(self._is_known, self.gpus))
        return WorkerPlacement(worker.rank, False if sure or nowhere else None, "", unused)

    def _is_known(self, uuid: str) -> bool:
        return self.processes[uuid] is not None and not self.occupants[uuid].unknown


def gpu_usage(
    gpus: Sequence[GpuState],
    job_gpus: Sequence[str],
    workers: Sequence[WorkerAssignment],
    *,
    visible_pids: Collection[int],
    local_pids: Mapping[int, int] | None = None,
    ignored: Collection[int] = (),
) -> NodeGpuUsage:
    """Attribute the processes on GPUs to workers.

    ``job_gpus``: UUIDs of the job's GPUs by position, empty where one is missing. ``visible_pids``: pids of all visible
    processes. ``local_pids``: local pids of processes that the driver reports with another pid. ``ignored``: local pids
    to skip, such as the MPS server and our own.

    A process that is not visible is hidden or in another pid namespace. If any GPU process matches a worker, pids are
    local, and unmatched ones are foreign. Otherwise, on a GPU without visible processes, all belong to the one running
    worker expected there. With several such workers, or none, the owner is unknown.
    """
    node = _NodeUsage(gpus, local_pids or {}, ignored)
    workers = sorted(workers, key=lambda worker: worker.rank)
    owner = {pid: worker for worker in workers for pid in worker.pids}
    planned = {
        worker.rank: tuple(
            dict.fromkeys(job_gpus[at] for at in worker.positions if 0 <= at < len(job_gpus) and job_gpus[at])
        )
        for worker in workers
    }
    belongs = {worker.rank: node.named_gpus(worker) or planned[worker.rank] for worker in workers}
    lists = node.processes.values()
    same_namespace = any(process.pid in owner for processes in lists for process in processes or ())
    for uuid, processes in node.processes.items():
        hidden = not same_namespace and not any(process.pid in visible_pids for process in processes or ())
        heirs = (
            [w for w in workers if w.is_running and node.overlaps(uuid, belongs[w.rank])]
            if hidden and processes
            else []
        )
        for process in processes or ():
            worker = owner.get(process.pid)
            if worker is not None:
                node.add(uuid, worker, planned[worker.rank], process, "process")
            elif hidden and len(heirs) == 1:
                node.add(uuid, heirs[0], planned[heirs[0].rank], process, "inferred")
            elif hidden:
                node.occupants[uuid].unknown = True
            elif process.kind != "graphics":
                node.occupants[uuid].foreign.append(process)
    used = node.used_gpus()
    return NodeGpuUsage(
        uses=tuple(
            node.gpu_use(uuid, worker.rank, planned[worker.rank])
            for worker in workers
            for uuid in used.get(worker.rank, ())
        ),
        gpus=tuple(node.gpu_users(uuid) for uuid in job_gpus if uuid in node.gpus),
        workers=tuple(node.placement(worker, planned[worker.rank], used.get(worker.rank, ())) for worker in workers),
    )


def _deduplicated(
    processes: Sequence[GpuProcess] | None, local_pids: Mapping[int, int], ignored: Collection[int]
) -> list[GpuProcess] | None:
    """Processes with local pids. The driver lists a process twice if it uses the GPU in two ways."""
    if processes is None:
        return None
    found: dict[int, GpuProcess] = {}
    for process in processes:
        pid = local_pids.get(process.pid, process.pid)
        if pid in ignored:
            continue
        other = found.get(pid)
        if other is None:
            found[pid] = process if pid == process.pid else replace(process, pid=pid)
            continue
        memory = [m for m in (process.memory_bytes, other.memory_bytes) if m is not None]
        shares = [s for s in (process.sm_ratio, other.sm_ratio) if s is not None]
        kind = process.kind if other.kind == "graphics" else other.kind
        found[pid] = GpuProcess(pid, max(memory, default=None), max(shares, default=None), kind)
    return list(found.values())
