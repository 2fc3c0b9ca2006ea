"""Attribution of GPU errors: which errors from the driver and the kernel log belong to a worker."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.analysis.xid import CONTAINED_XIDS, is_device_fault, xid_meaning
from exporter.gpus.records import Gpu

# Driver and kernel log report an error at almost the same time; this allows for the log being read late.
SAME_ERROR_S = 5.0


@dataclass(frozen=True, slots=True)
class GpuError:
    """One error from the driver or the kernel log; None for fields that the source does not report."""

    time: float
    xid: int
    uuid: str | None = None
    pci: str | None = None  # PCI address, where the UUID is unknown
    pid: int | None = None
    gpu_instance: int | None = None  # MIG instance with the error; None if it affects the whole GPU or is unknown


@dataclass(frozen=True, slots=True)
class WorkerGpuRelation:
    """A GPU or MIG instance, and how it relates to a worker."""

    gpu: Gpu
    is_own: bool = False  # whether the worker uses it or the plan assigns it
    is_exclusive: bool = False  # whether it is certain that no other process, of any job, uses it


def normal_pci_address(pci: str) -> str:
    """PCI address as the kernel writes it: a domain of four digits and no function."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest.partition('.')[0]}"


class FaultAttribution:
    """Attributes errors to one worker.

    ``pids`` are its processes, ``other_pids`` those of other workers on the node.
    """

    def __init__(self, gpus: Sequence[WorkerGpuRelation], pids: Collection[int], other_pids: Collection[int]) -> None:
        self._gpus = {unit.gpu.uuid: unit for unit in gpus}
        # A MIG instance has its GPU's PCI address, and errors are reported for the GPU.
        self._gpus_by_pci = {
            normal_pci_address(unit.gpu.pci_bus_id): unit
            for unit in gpus
            if unit.gpu.pci_bus_id is not None and unit.gpu.parent is None
        }
        self._instances: dict[str, list[WorkerGpuRelation]] = {}
        for unit in gpus:
            if unit.gpu.parent is not None:
                self._instances.setdefault(unit.gpu.parent, []).append(unit)
        self._pids, self._other_pids = pids, other_pids

    def errors(self, reported: Iterable[GpuError]) -> list[tuple[GpuError, str]]:
        """Return the errors of the worker in order of time, without duplicates, each with a description."""
        return [(error, self._error_text(error)) for error in self._deduplicated(reported) if self._is_of_worker(error)]

    def losses(self, lost: Mapping[str, tuple[float, str]]) -> list[tuple[str, float, str]]:
        """Return the worker's lost GPUs: name, time of the loss, and the driver's message.

        ``lost`` maps UUIDs to time and message. A lost GPU takes its MIG instances with it and is reported once.
        """
        found = []
        for uuid, (since, text) in sorted(lost.items(), key=lambda entry: entry[1]):
            unit = self._gpus.get(uuid)
            if unit is None or unit.gpu.parent in lost:
                continue
            if any(part.is_own for part in (unit, *self._instances.get(uuid, ()))):
                found.append((unit.gpu.title, since, text))
        return found

    def _deduplicated(self, reported: Iterable[GpuError]) -> list[GpuError]:
        """Errors in order of time. Of duplicates, keep the entry with a pid."""
        kept: list[GpuError] = []
        for error in sorted(reported, key=lambda error: (error.pid is None, error.time)):
            if not any(self._is_same(error, other) for other in kept):
                kept.append(error)
        return sorted(kept, key=lambda error: error.time)

    def _is_same(self, error: GpuError, other: GpuError) -> bool:
        """Whether both entries report the same error; the first may be missing the pid."""
        return (
            error.xid == other.xid
            and abs(error.time - other.time) <= SAME_ERROR_S
            and error.pid in (None, other.pid)
            and (None in (error.gpu_instance, other.gpu_instance) or error.gpu_instance == other.gpu_instance)
            and self._place_key(error) == self._place_key(other)
        )

    def _place_key(self, error: GpuError) -> str | None:
        unit = self._find_unit(error)
        if unit is not None:
            return unit.gpu.uuid
        return error.uuid if error.pci is None else normal_pci_address(error.pci)

    def _find_unit(self, error: GpuError) -> WorkerGpuRelation | None:
        if error.uuid is not None:
            return self._gpus.get(error.uuid)
        return None if error.pci is None else self._gpus_by_pci.get(normal_pci_address(error.pci))

    def _is_of_worker(self, error: GpuError) -> bool:
        """Whether an error belongs to the worker: its process is named, or the error is on a GPU it uses.

        Program errors and contained errors count only if no other process can be the source.
        """
        if error.pid is not None and error.pid in self._pids:
            return True
        whole = self._find_unit(error)
        if whole is None:
            return False
        parts = self._instances.get(whole.gpu.uuid, [])
        is_instance_known = bool(parts) and error.gpu_instance is not None
        has_it = (
            [part for part in parts if part.gpu.gpu_instance == error.gpu_instance]
            if is_instance_known
            else [whole, *parts]
        )
        if not any(unit.is_own for unit in has_it):
            return False
        if error.xid in CONTAINED_XIDS and is_instance_known and error.pid is None:
            return True
        if is_device_fault(error.xid) and error.xid not in CONTAINED_XIDS:
            return True  # ignore the named process: it is only the first that met the error, which may be any program
        alone = all(part.is_exclusive for part in has_it) if is_instance_known else whole.is_exclusive
        return alone and error.pid not in self._other_pids

    def _error_text(self, error: GpuError) -> str:
        unit = self._find_unit(error)
        place = f"the GPU at {error.pci}" if unit is None else unit.gpu.title
        instance = "" if error.gpu_instance is None else f", instance {error.gpu_instance}"
        who = "" if error.pid is None else f", process {error.pid}"
        what = f": {xid_meaning(error.xid)}" if is_device_fault(error.xid) else ""
        return f"Xid {error.xid} on {place}{instance}{who}{what}"
