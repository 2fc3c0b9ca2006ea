"""Whose an error of a GPU is: which of those that the driver and the kernel's log tell are a worker's."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.gpus.analysis.xid import CONTAINED_XIDS, blames_device, xid_meaning

SAME_ERROR_S = 5.0
"""Driver and kernel's log tell of the same error at almost the same time; the one that is read later may be late."""


@dataclass(frozen=True, slots=True)
class GpuError:
    """One error, as the driver or the kernel's log tells it; each leaves out what the other may know."""

    time: float
    xid: int
    uuid: str | None = None
    pci: str | None = None  # where it is on the bus, if its UUID is not told
    pid: int | None = None
    gpu_instance: int | None = None
    """Of a divided GPU the MIG instance that has met it; None where it is the whole's, or nobody tells."""


@dataclass(frozen=True, slots=True)
class WorkerGpuRelation:
    """A GPU or MIG instance, and how a worker stands to it."""

    uuid: str
    index: str
    pci: str | None = None
    parent: str | None = None  # of a MIG instance the UUID of its GPU
    gpu_instance: int | None = None
    own: bool = False  # whether the worker uses it, or is to
    alone: bool = False  # whether nobody else is on it, of the job or not, as far as that is known for sure


def normal_pci_address(pci: str) -> str:
    """A PCI address as the kernel writes it, without a function and with four digits of the domain."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest.partition('.')[0]}"


class FaultAttribution:
    """Judges for one worker. ``pids`` are its processes, ``others`` those of the other workers of its node."""

    def __init__(self, gpus: Sequence[WorkerGpuRelation], pids: Collection[int], others: Collection[int]) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        # the address of a MIG instance is that of its GPU, which is what has the error
        self._places = {normal_pci_address(gpu.pci): gpu for gpu in gpus if gpu.pci is not None and gpu.parent is None}
        self._parts: dict[str, list[WorkerGpuRelation]] = {}
        for gpu in gpus:
            if gpu.parent is not None:
                self._parts.setdefault(gpu.parent, []).append(gpu)
        self._pids, self._others = pids, others

    def errors(self, told: Iterable[GpuError]) -> list[tuple[GpuError, str]]:
        """Those that are the worker's, in order of time and each once, with words."""
        return [(error, self._words(error)) for error in self._each_once(told) if self._is_its(error)]

    def losses(self, lost: Mapping[str, tuple[float, str]]) -> list[tuple[str, float, str]]:
        """Of the GPUs that are lost, by UUID, those that are the worker's: name, since when, and the driver's words.

        The loss of a GPU is that of all its MIG instances, and told once.
        """
        found = []
        for uuid, (since, words) in sorted(lost.items(), key=lambda entry: entry[1]):
            gpu = self._gpus.get(uuid)
            if gpu is None or gpu.parent in lost:
                continue
            if any(unit.own for unit in (gpu, *self._parts.get(uuid, ()))):
                found.append((_name(gpu), since, words))
        return found

    def _each_once(self, told: Iterable[GpuError]) -> list[GpuError]:
        """Errors in order of time; of one that is told twice the entry with the pid, which says more."""
        kept: list[GpuError] = []
        for error in sorted(told, key=lambda error: (error.pid is None, error.time)):
            if not any(self._is_same(error, other) for other in kept):
                kept.append(error)
        return sorted(kept, key=lambda error: error.time)

    def _is_same(self, error: GpuError, other: GpuError) -> bool:
        """Whether an error is another one told again; it may lack the pid that the other has."""
        return (
            error.xid == other.xid
            and abs(error.time - other.time) <= SAME_ERROR_S
            and error.pid in (None, other.pid)
            and (None in (error.gpu_instance, other.gpu_instance) or error.gpu_instance == other.gpu_instance)
            and self._place(error) == self._place(other)
        )

    def _place(self, error: GpuError) -> str | None:
        gpu = self._gpu_of(error)
        if gpu is not None:
            return gpu.uuid
        return error.uuid if error.pci is None else normal_pci_address(error.pci)

    def _gpu_of(self, error: GpuError) -> WorkerGpuRelation | None:
        if error.uuid is not None:
            return self._gpus.get(error.uuid)
        return None if error.pci is None else self._places.get(normal_pci_address(error.pci))

    def _is_its(self, error: GpuError) -> bool:
        """Whether an error is the worker's: it is named, or on the GPU that has it.

        What a program has done, and what only one program has met, is its own only where nobody else can be meant.
        """
        if error.pid is not None and error.pid in self._pids:
            return True
        gpu = self._gpu_of(error)
        if gpu is None:
            return False
        parts = self._parts.get(gpu.uuid, [])
        told = bool(parts) and error.gpu_instance is not None
        has_it = [part for part in parts if part.gpu_instance == error.gpu_instance] if told else [gpu, *parts]
        if not any(unit.own for unit in has_it):
            return False
        if error.xid in CONTAINED_XIDS and told and error.pid is None:
            return True
        if blames_device(error.xid) and error.xid not in CONTAINED_XIDS:
            return True  # whoever is named: the one that has met it first, which may be any program
        alone = all(part.alone for part in has_it) if told else gpu.alone
        return alone and error.pid not in self._others

    def _words(self, error: GpuError) -> str:
        gpu = self._gpu_of(error)
        place = f"the GPU at {error.pci}" if gpu is None else _name(gpu)
        instance = "" if error.gpu_instance is None else f", instance {error.gpu_instance}"
        who = "" if error.pid is None else f", process {error.pid}"
        what = f": {xid_meaning(error.xid)}" if blames_device(error.xid) else ""
        return f"Xid {error.xid} on {place}{instance}{who}{what}"


def _name(gpu: WorkerGpuRelation) -> str:
    return f"GPU {gpu.index} ({gpu.uuid})"
