"""The ``GpuReader`` for NVIDIA GPUs, through NVML.

Devices are identified by UUID and keep their handle. MIG instances are looked up at each listing, because
repartitioning makes their handles stale.
"""

import contextlib
import ctypes
from collections.abc import Mapping
from dataclasses import replace
from threading import get_ident

from exporter.contract.clock import Clock, SystemClock
from exporter.gpus.nvidia.activity import GpuActivityReader, GpuMemoryReader, MigActivityReader
from exporter.gpus.nvidia.calls import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    Handle,
    Key,
    NvmlDevice,
    NvmlLibrary,
)
from exporter.gpus.nvidia.condition import GpuConditionReader
from exporter.gpus.nvidia.events import XidEventSet
from exporter.gpus.nvidia.processes import GpuProcessReader
from exporter.gpus.records import (
    DeviceState,
    DriverState,
    Gpu,
    GpuActivity,
    GpuCondition,
    GpuDriver,
    GpuDriverReplaced,
    GpuEvent,
    GpuFailed,
    GpuProcess,
    GpuUnavailable,
    unsupported_texts,
)

LIBRARY = "libnvidia-ml.so.1"
UNAVAILABLE: dict[int, DriverState] = {
    LIBRARY_NOT_FOUND: "no_library",
    DRIVER_NOT_LOADED: "no_driver",
    NO_PERMISSION: "no_permission",
    LIB_RM_VERSION_MISMATCH: "version_mismatch",
}
# Answers about a GPU that a cgroup hides from us. After any other error its ordinal is kept, even without a UUID, so
# that later GPUs keep theirs.
HIDDEN = frozenset({NO_PERMISSION, OPERATING_SYSTEM, NOT_SUPPORTED})


class _NvmlUnit:
    """One GPU or MIG instance with its readers."""

    def __init__(self, device: NvmlDevice, gpu: Gpu, parent: "_NvmlUnit | None" = None) -> None:
        self.device = device
        self.gpu = gpu
        self.instances: dict[str, _NvmlUnit] = {}
        if parent is None:
            self.activity: GpuActivityReader | MigActivityReader = GpuActivityReader(device)
            self.condition: GpuConditionReader | None = GpuConditionReader(device)
        else:
            self.activity = MigActivityReader(device, parent.device.handle, gpu.gpu_instance)
            self.condition = None
        self.processes = GpuProcessReader(device, shares=parent is None)

    def free(self) -> None:
        """Free its resources in the library."""
        if self.activity.gpm is not None and self.device.call_in_progress is None:
            self.activity.gpm.free()


class NvmlReader:
    """Reads NVIDIA GPUs through the binding ``pynvml``."""

    vendor = "nvidia"

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._library: NvmlLibrary | None = None
        self._events: XidEventSet | None = None
        self._ordinals: dict[int, _NvmlUnit] = {}
        self._units: dict[str, _NvmlUnit] = {}
        self._failed: dict[int, tuple[DeviceState, str]] = {}  # by ordinal: GPUs without a readable UUID
        self._identifying: set[int] = set()
        self._hidden: dict[int, int] = {}  # by ordinal: return codes of hidden GPUs

    def open(self) -> GpuDriver:
        try:
            ctypes.CDLL(LIBRARY)  # first, because the binding costs memory and is useless without the library
        except OSError as error:
            raise GpuUnavailable("no_library", str(error)) from error
        try:
            import pynvml  # lazy: costs time and memory without a GPU
        except ImportError as error:
            raise GpuUnavailable("no_library", f"nvidia-ml-py is not installed ({error})") from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise GpuUnavailable(UNAVAILABLE.get(error.value, "failing"), str(error)) from error
        self._library = NvmlLibrary(pynvml)
        self._events = XidEventSet(self._library, self._clock, self._handles)
        try:
            _, version = self._library.call("nvmlSystemGetDriverVersion")
            _, cuda = self._library.call("nvmlSystemGetCudaDriverVersion_v2")
            cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
            return GpuDriver(self.vendor, version, cuda_version)
        except GpuDriverReplaced as error:
            self.close()
            raise GpuUnavailable("version_mismatch", str(error)) from error

    def gpus(self) -> tuple[Gpu, ...]:
        """See ``GpuReader.gpus``. A GPU that was never readable has a placeholder UUID.

        Raises RuntimeError if the driver does not count its GPUs and none is known: it may have all of them.
        """
        library = self._claim_library()
        code, count = library.call("nvmlDeviceGetCount")
        if count is None and not (self._ordinals or self._failed):
            raise RuntimeError(f"nvmlDeviceGetCount: {library.error_text(code)}")
        for ordinal in range(count or 0):
            if ordinal not in self._ordinals:
                self._identify(library, ordinal)
        if self._events is not None:
            self._events.retry_registration()
        found: list[Gpu] = []
        for ordinal in sorted({*self._ordinals, *self._failed}):
            unit = self._ordinals.get(ordinal)
            if unit is None:
                found.append(Gpu(_placeholder_uuid(ordinal), str(ordinal), self.vendor))
                continue
            self._update_instances(unit)
            found += [unit.gpu, *(instance.gpu for instance in unit.instances.values())]
        self._units = {unit.gpu.uuid: unit for unit in self._ordinals.values()}
        self._units |= {u.gpu.uuid: u for unit in self._ordinals.values() for u in unit.instances.values()}
        return tuple(found)

    def activity(self, gpu: Gpu) -> GpuActivity:
        return self._unit(gpu).activity.read(self._clock.monotonic())

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        unit = self._unit(gpu)
        if unit.gpu.mig:
            return ()  # its instances report them; the full list needs privileges
        return unit.processes.read(self._clock.monotonic(), self._clock.time())

    def condition(self, gpu: Gpu) -> GpuCondition:
        condition = self._unit(gpu).condition
        return GpuCondition() if condition is None else condition.read()

    def wait_event(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        return () if self._events is None else self._events.wait(timeout_s)

    def reports_events(self) -> bool:
        return self._events is not None and self._events.reports_events

    def unsupported_calls(self) -> Mapping[str, str]:
        """See ``GpuReader.unsupported_calls``: by call, the answer and its GPUs."""
        if self._library is None:
            return {}
        units = list(self._units.values())
        found = [
            (_call_name(key), code, unit.gpu.index)
            for unit in units
            for key, code in list(unit.device.unsupported_calls.items())
        ]
        if self._events is not None:
            refused = dict(self._events.gpus_without_events)
            if self._events.unsupported is not None:
                refused = dict.fromkeys(self._handles(), self._events.unsupported)
            found += [(*refused[unit.gpu.uuid], unit.gpu.index) for unit in units if unit.gpu.uuid in refused]
        found += [("nvmlDeviceGetHandleByIndex_v2", code, str(at)) for at, code in list(self._hidden.items())]
        found.sort(key=lambda entry: entry[:2])
        return unsupported_texts((name, self._library.error_text(code), index) for name, code, index in found)

    def close(self) -> None:
        """Close the library. No other thread may be in a call."""
        if self._library is None:
            return
        self._claim_library()
        with contextlib.suppress(GpuDriverReplaced, GpuFailed):  # the driver has already released everything
            if self._events is not None:
                self._events.free()
            for unit in self._units.values():
                unit.free()
        with contextlib.suppress(self._library.nvml.NVMLError):
            self._library.nvml.nvmlShutdown()
        self._library = self._events = None

    def _claim_library(self) -> NvmlLibrary:
        """Make this the thread that may call; a thread still hanging in a call can no longer make others."""
        if self._library is None:
            raise RuntimeError("NVML is not open")
        self._library.thread = get_ident()
        return self._library

    def _unit(self, gpu: Gpu) -> _NvmlUnit:
        """Return the unit of a GPU; raises GpuFailed if it does not answer."""
        self._claim_library()
        unit = self._units.get(gpu.uuid)
        if unit is not None:
            return unit
        for ordinal, (state, text) in self._failed.items():
            if gpu.uuid == _placeholder_uuid(ordinal):
                raise GpuFailed(state, text)
        raise GpuFailed("lost", "the driver no longer lists it")

    def _handles(self) -> Mapping[str, Handle]:
        """Handles of whole GPUs by UUID, for the event thread."""
        return {unit.gpu.uuid: unit.device.handle for unit in list(self._ordinals.values())}

    def _identify(self, library: NvmlLibrary, ordinal: int) -> None:
        """Identify a GPU. The first call to it can take seconds or never return."""
        library.check_thread()
        if ordinal in self._identifying:
            self._failed[ordinal] = ("hanging", "nvmlDeviceGetHandleByIndex_v2 has not returned")
            return
        self._identifying.add(ordinal)
        try:
            code, handle = library.call("nvmlDeviceGetHandleByIndex", ordinal)
            device, uuid = NvmlDevice(library, handle), None
            if code and code not in HIDDEN:
                device.record_failure(code)
            if not code:
                code, uuid = device.call("nvmlDeviceGetUUID", handle)
            if uuid is not None:
                self._ordinals[ordinal] = _NvmlUnit(device, self._read_gpu(device, uuid, ordinal))
            self._failed.pop(ordinal, None)
            self._hidden.pop(ordinal, None)
            if code in HIDDEN:
                self._hidden[ordinal] = code
            elif code:
                self._failed[ordinal] = ("lost", library.error_text(code))
        except GpuFailed as error:
            self._failed[ordinal] = (error.state, str(error))
        finally:
            self._identifying.discard(ordinal)

    def _read_gpu(self, device: NvmlDevice, uuid: str, ordinal: int) -> Gpu:
        gpu = Gpu(uuid, str(ordinal), self.vendor)
        try:
            persistence = device.number("nvmlDeviceGetPersistenceMode")
            return replace(
                gpu,
                name=device.value("nvmlDeviceGetName") or "",
                pci_bus_id=_pci_bus_id(device),
                persistence=None if persistence is None else bool(persistence),
                memory_total_bytes=GpuMemoryReader(device).read()[1],
            )
        except GpuFailed:
            return gpu  # the UUID is enough to identify it

    def _update_instances(self, unit: _NvmlUnit) -> None:
        """Update its MIG instances."""
        device = unit.device
        if device.call_in_progress is not None:
            return  # a call to it hangs
        try:
            mode = device.value("nvmlDeviceGetMigMode")
            if mode is None:
                return
            unit.gpu = replace(unit.gpu, mig=bool(mode[0]))
            most = (device.number("nvmlDeviceGetMaxMigDeviceCount") or 0) if unit.gpu.mig else 0
            found: dict[str, _NvmlUnit] = {}
            for position in range(most):
                handle = device.value("nvmlDeviceGetMigDeviceHandleByIndex", position)
                if handle is None:
                    continue  # instance numbers may have gaps
                instance = self._instance(unit, position, handle)
                if instance is not None:
                    found[instance.gpu.uuid] = instance
            for uuid in unit.instances.keys() - found.keys():
                unit.instances[uuid].free()
            unit.instances = found
        except GpuFailed:
            pass  # keep the known instances; the next reading reports the failure

    def _instance(self, parent: _NvmlUnit, position: int, handle: Handle) -> _NvmlUnit | None:
        device = NvmlDevice(parent.device.library, handle)
        uuid = device.value("nvmlDeviceGetUUID")
        if uuid is None:
            return None
        known = parent.instances.get(uuid)
        if known is not None:
            known.device.handle = handle
            return known
        gpu = Gpu(
            uuid,
            f"{parent.gpu.index}:{position}",
            self.vendor,
            name=device.value("nvmlDeviceGetName") or "",
            pci_bus_id=parent.gpu.pci_bus_id,
            parent=parent.gpu.uuid,
            gpu_instance=device.number("nvmlDeviceGetGpuInstanceId"),
            memory_total_bytes=GpuMemoryReader(device).read()[1],
        )
        return _NvmlUnit(device, gpu, parent)


def _pci_bus_id(device: NvmlDevice) -> str | None:
    info = device.value("nvmlDeviceGetPciInfo_v3")
    return info and f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _placeholder_uuid(ordinal: int) -> str:
    """Name of a GPU whose UUID cannot be read."""
    return f"GPU-unknown-{ordinal}"


def _call_name(key: Key) -> str:
    """Readable name of a call, with its arguments if any."""
    if isinstance(key, str):
        return key
    name, *selectors = (str(part) for part in key)
    return f"{name}({', '.join(selectors)})" if selectors else name
