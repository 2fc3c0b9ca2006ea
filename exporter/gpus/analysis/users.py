"""Who uses which GPU: processes on GPUs and those of workers brought together, against what the plan says."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Attribution = Literal["process", "inferred"]
"""By the pid; or since nobody else is planned there, where pids on the GPU are of another pid namespace."""

_UUID_FORMS = ("GPU-", "MIG-")
_NUMBER = re.compile(r"\+?(\d{1,9})")


def parse_visible_devices(text: str) -> tuple[str, ...]:
    """Devices that ``CUDA_VISIBLE_DEVICES`` names, as CUDA reads it: numbers, or UUIDs and their beginnings.

    It ends at the first word that is none, as ``-1`` and ``NoDevFiles`` are, or that is not of the form of the first:
    either numbers, GPUs or MIG instances. A device that comes twice leaves none at all. What follows a number in its
    word does not count.
    """
    words = [word.strip() for word in text.split(",")]
    form = next((form for form in _UUID_FORMS if words[0].startswith(form)), None)
    devices: list[str] = []
    for word in words:
        if form is not None:
            device = word if word.startswith(form) else None
        else:
            number = _NUMBER.match(word)
            device = str(int(number[1])) if number else None
        if device is None:
            break
        if device in devices:
            return ()
        devices.append(device)
    return tuple(devices)


def visible_gpu_positions(text: str, uuids: Sequence[str]) -> tuple[int, ...]:
    """Positions in ``uuids`` of what ``CUDA_VISIBLE_DEVICES`` gives a program that starts now.

    The list ends at what fits none, or several; a GPU that comes twice leaves none at all.
    """
    found = []
    for at in listed_gpu_positions(text, uuids):
        if at is None:
            break
        found.append(at)
    return tuple(found) if len(set(found)) == len(found) else ()


def listed_gpu_positions(text: str, uuids: Sequence[str]) -> tuple[int | None, ...]:
    """Positions in ``uuids`` of what ``CUDA_VISIBLE_DEVICES`` names, in its order; numbers are such positions.

    None for a UUID that fits none of them, or several, as of a GPU that has been lost: those behind it keep their
    places. A number that fits none ends the list. A beginning of a UUID names the one GPU that it fits. MIG instances
    are named as the driver names them, ``MIG-UUID``, or ``MIG-GPU-UUID/3/0`` before version 470.
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
class ProcessOnGpu:
    """One process on a GPU, its pid as the driver tells it."""

    pid: int
    memory_bytes: int | None = None
    sm_ratio: float | None = None
    kind: str = "compute"  # compute, graphics or mps


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A GPU or MIG instance that can be seen here, whether the job's or not."""

    uuid: str
    index: str
    parent: str | None = None  # of a MIG instance the UUID of its GPU
    processes: tuple[ProcessOnGpu, ...] | None = ()  # none where nobody tells


@dataclass(frozen=True, slots=True)
class WorkerAssignment:
    """A worker of this node."""

    rank: int
    positions: tuple[int, ...] = ()  # what the plan gives it, by position among the job's GPUs
    pids: frozenset[int] = frozenset()  # its process and all descendants
    devices: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of its process. Only UUIDs count: numbers may be those of its own device cgroup."""
    up: bool = True


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one worker uses of one GPU: memory and share of time of all its processes; None where none tells."""

    rank: int
    uuid: str
    index: str
    attribution: Attribution
    planned: bool
    memory_bytes: int | None = None
    sm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GpuUsers:
    """Who is on one of the job's GPUs."""

    uuid: str
    index: str
    workers: tuple[int, ...] = ()  # Ranks, in order; several share it
    foreign: tuple[ProcessOnGpu, ...] | None = ()
    """Processes that are not the job's, the display's left out; None where that cannot be told."""


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """How a worker stands to the plan."""

    rank: int
    misplaced: bool | None = None
    """Whether it uses a GPU that the plan does not give to it; None where that cannot be told."""
    words: str = ""  # of a misplaced one what it uses
    unused: tuple[str, ...] | None = None
    """Indices of the GPUs of its plan on which it has no process; None where that cannot be told."""


@dataclass(frozen=True)
class NodeGpuUsage:
    """Everybody on the GPUs of one node."""

    uses: tuple[GpuUse, ...] = ()  # by rank, then in the order of the GPUs; also on GPUs that are not the job's
    gpus: tuple[GpuUsers, ...] = ()  # the job's, in the order of the plan's positions
    workers: tuple[WorkerPlacement, ...] = ()


@dataclass(slots=True)
class _GpuOccupants:
    """What is found on one GPU."""

    by_rank: dict[int, list[ProcessOnGpu]] = field(default_factory=dict)
    attribution: dict[int, Attribution] = field(default_factory=dict)
    foreign: list[ProcessOnGpu] = field(default_factory=list)
    unknown: bool = False  # whether there are processes that may be anybody's

    def add(self, rank: int, process: ProcessOnGpu, attribution: Attribution) -> None:
        self.by_rank.setdefault(rank, []).append(process)
        if self.attribution.get(rank) != "process":
            self.attribution[rank] = attribution


class _NodeUsage:
    """The GPUs of a node, the processes on each, and what belongs to what."""

    def __init__(self, gpus: Sequence[VisibleGpu], here: Mapping[int, int], ignored: Collection[int]) -> None:
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.found = {gpu.uuid: _GpuOccupants() for gpu in gpus}
        self.parts: dict[str, list[str]] = {}
        """UUIDs of its MIG instances, of a GPU that has any."""
        for gpu in gpus:
            if gpu.parent is not None:
                self.parts.setdefault(gpu.parent, []).append(gpu.uuid)
        self.processes: dict[str, list[ProcessOnGpu] | None] = {
            gpu.uuid: _deduplicated(gpu, here, ignored) for gpu in gpus
        }
        for whole, parts in self.parts.items():
            # what is in a MIG instance is on the list of its GPU too, and counts on the instance
            inside = {process.pid for part in parts for process in self.processes[part] or ()}
            listed = self.processes.get(whole)
            if listed:
                self.processes[whole] = [process for process in listed if process.pid not in inside]

    def fits(self, uuid: str, others: Collection[str]) -> bool:
        """Whether a GPU is one of these, or the whole or a part of one."""
        if uuid in others or not self.parts:
            return uuid in others
        return self.gpus[uuid].parent in others or any(part in others for part in self.parts.get(uuid, ()))

    def fitting(self, others: Collection[str]) -> list[str]:
        """All GPUs that are one of these, or the whole or a part of one."""
        if not self.parts:
            return [uuid for uuid in others if uuid in self.gpus]
        return [uuid for uuid in self.gpus if self.fits(uuid, others)]

    def used(self) -> dict[int, list[str]]:
        """By rank the GPUs on which its processes are, in the order of the GPUs."""
        found: dict[int, list[str]] = {}
        for uuid, on_it in self.found.items():
            for rank in on_it.by_rank:
                found.setdefault(rank, []).append(uuid)
        return found

    def told(self, worker: WorkerAssignment) -> frozenset[str]:
        """GPUs that its environment names by UUID; none where it does not."""
        if worker.devices is None or not worker.devices.strip().startswith(_UUID_FORMS):
            return frozenset()
        uuids = tuple(self.gpus)
        return frozenset(uuids[at] for at in visible_gpu_positions(worker.devices, uuids))

    def add(
        self, uuid: str, worker: WorkerAssignment, planned: Collection[str], process: ProcessOnGpu, how: Attribution
    ) -> None:
        """Note a worker's process on the list of this GPU.

        On a divided GPU it is in an instance, and where the list does not say in which, in the one of its plan.
        """
        parts = [part for part in self.parts.get(uuid, ()) if part in planned]
        if len(parts) == 1:
            self.found[parts[0]].add(worker.rank, process, "inferred")
        else:
            self.found[uuid].add(worker.rank, process, how)

    def use(self, uuid: str, rank: int, planned: Collection[str]) -> GpuUse:
        """What a worker uses of a GPU on which it is."""
        gpu, found = self.gpus[uuid], self.found[uuid]
        memory = [p.memory_bytes for p in found.by_rank[rank] if p.memory_bytes is not None]
        shares = [p.sm_ratio for p in found.by_rank[rank] if p.sm_ratio is not None]
        return GpuUse(
            rank,
            uuid,
            gpu.index,
            found.attribution[rank],
            self.fits(uuid, planned),
            sum(memory) if memory else None,
            min(1.0, sum(shares)) if shares else None,
        )

    def users(self, uuid: str) -> GpuUsers:
        """Who is on this GPU."""
        found, processes = self.found[uuid], self.processes[uuid]
        return GpuUsers(
            uuid,
            self.gpus[uuid].index,
            tuple(sorted(found.by_rank)),
            tuple(found.foreign) if processes is not None and not found.unknown else None,
        )

    def standing(self, worker: WorkerAssignment, planned: tuple[str, ...], used: Sequence[str]) -> WorkerPlacement:
        """How a worker stands to the plan, once all processes have their place; ``used``: the GPUs of its own."""
        if not worker.up:
            return WorkerPlacement(worker.rank)
        as_planned = tuple(used) == planned  # so it is as a rule, and nothing need be compared
        wrong = [] if as_planned else [uuid for uuid in used if not self.fits(uuid, planned)]
        whole = len(planned) == len(set(worker.positions)) and all(uuid in self.gpus for uuid in planned)
        known = whole and all(map(self._is_known, self.fitting(planned)))
        unused: tuple[str, ...] | None = () if known else None
        if known and not as_planned:
            taken = {uuid for uuid in planned for mine in used if self.fits(mine, (uuid,))}
            unused = tuple(self.gpus[uuid].index for uuid in planned if uuid not in taken)
        if wrong:
            uses = ", ".join(f"GPU {self.gpus[uuid].index} ({uuid})" for uuid in wrong)
            given = ", ".join(self.gpus[uuid].index if uuid in self.gpus else uuid for uuid in planned)
            words = f"uses {uses}, the plan gives it {f'GPU {given}' if given else 'none'}"
            return WorkerPlacement(worker.rank, True, words, unused)
        # An inference from the plan puts everybody in the right place, and so says nothing of that.
        sure = any(self.found[uuid].attribution[worker.rank] == "process" for uuid in used) or (
            bool(used) and bool(self.told(worker))
        )
        nowhere = not used and bool(self.gpus) and all(map(self._is_known, self.gpus))
        return WorkerPlacement(worker.rank, False if sure or nowhere else None, "", unused)

    def _is_known(self, uuid: str) -> bool:
        return self.processes[uuid] is not None and not self.found[uuid].unknown


def gpu_usage(
    gpus: Sequence[VisibleGpu],
    ours: Sequence[str],
    workers: Sequence[WorkerAssignment],
    *,
    visible: Collection[int],
    pid_here: Mapping[int, int] | None = None,
    ignored: Collection[int] = (),
) -> NodeGpuUsage:
    """Who uses which GPU.

    ``ours``: UUIDs of the job's GPUs by position, empty where there is none. ``visible``: pids of all processes that
    can be seen here. ``pid_here``: the pid here of those that the driver tells by another one. ``ignored``: pids here
    that are nobody's, such as the MPS server and ourselves.

    A process that cannot be seen here is of another pid namespace, or hidden. Where one on any GPU is found to be a
    worker's, pids are those of here, and it is somebody else's. Else, where none on its GPU can be seen, all there are
    those of the one running worker that belongs there; several, or none, leave it open.
    """
    node = _NodeUsage(gpus, pid_here or {}, ignored)
    workers = sorted(workers, key=lambda worker: worker.rank)
    owner = {pid: worker for worker in workers for pid in worker.pids}
    planned = {
        worker.rank: tuple(dict.fromkeys(ours[at] for at in worker.positions if 0 <= at < len(ours) and ours[at]))
        for worker in workers
    }
    belongs = {worker.rank: node.told(worker) or planned[worker.rank] for worker in workers}
    lists = node.processes.values()
    same_namespace = any(process.pid in owner for processes in lists for process in processes or ())
    for uuid, processes in node.processes.items():
        hidden = not same_namespace and not any(process.pid in visible for process in processes or ())
        heirs = [w for w in workers if w.up and node.fits(uuid, belongs[w.rank])] if hidden and processes else []
        for process in processes or ():
            worker = owner.get(process.pid)
            if worker is not None:
                node.add(uuid, worker, planned[worker.rank], process, "process")
            elif hidden and len(heirs) == 1:
                node.add(uuid, heirs[0], planned[heirs[0].rank], process, "inferred")
            elif hidden:
                node.found[uuid].unknown = True
            elif process.kind != "graphics":
                node.found[uuid].foreign.append(process)
    used = node.used()
    return NodeGpuUsage(
        uses=tuple(
            node.use(uuid, worker.rank, planned[worker.rank])
            for worker in workers
            for uuid in used.get(worker.rank, ())
        ),
        gpus=tuple(node.users(uuid) for uuid in ours if uuid in node.gpus),
        workers=tuple(node.standing(worker, planned[worker.rank], used.get(worker.rank, ())) for worker in workers),
    )


def _deduplicated(gpu: VisibleGpu, here: Mapping[int, int], ignored: Collection[int]) -> list[ProcessOnGpu] | None:
    """Processes with their pids here; one that uses a GPU in two ways is on two lists of the driver."""
    if gpu.processes is None:
        return None
    found: dict[int, ProcessOnGpu] = {}
    for process in gpu.processes:
        pid = here.get(process.pid, process.pid)
        if pid in ignored:
            continue
        other = found.get(pid)
        if other is None:
            found[pid] = process if pid == process.pid else replace(process, pid=pid)
            continue
        memory = [m for m in (process.memory_bytes, other.memory_bytes) if m is not None]
        shares = [s for s in (process.sm_ratio, other.sm_ratio) if s is not None]
        kind = process.kind if other.kind == "graphics" else other.kind
        found[pid] = ProcessOnGpu(pid, max(memory, default=None), max(shares, default=None), kind)
    return list(found.values())
