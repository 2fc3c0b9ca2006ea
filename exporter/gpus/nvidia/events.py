"""Xid events of the driver through NVML, read on a separate thread."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from ctypes import Structure, byref, c_uint, c_void_p, cast

from exporter.contract.clock import Clock
from exporter.gpus.nvidia.calls import (
    NOT_SUPPORTED,
    PERMANENT,
    SUCCESS,
    TIMEOUT,
    UNKNOWN,
    Handle,
    NvmlLibrary,
)
from exporter.gpus.records import GpuEvent

# ``nvmlEventTypeXidCriticalError``, the only type used: others repeat states, some with each clock change.
XID = 0x8
MOST_AT_ONCE = 100
MOST_SPOILED = 3  # sets that one GPU may spoil; each time, pending events of other GPUs are lost
NO_INSTANCE = 0xFFFFFFFF


class XidEventSet:
    """A set of events, used on one thread only. It does not claim the turn of the thread that makes the other calls."""

    def __init__(self, library: NvmlLibrary, clock: Clock, handles: Callable[[], Mapping[str, Handle]]) -> None:
        """``handles``: handles of the GPUs by UUID."""
        self._library = library
        self._clock = clock
        self._handles = handles
        self._set: Handle | None = None
        self._registered: dict[int, str] = {}  # UUIDs by handle value
        self.gpus_without_events: dict[
            str, tuple[str, int]
        ] = {}  # GPUs without events by UUID: the failed call and its return code
        self.unsupported: tuple[str, int] | None = None  # the same, if it concerns all GPUs
        self.reports_events = True  # whether the set contained a GPU at the last check; True before that
        self._retry_later: set[str] = set()  # UUIDs of GPUs whose registration failed, to be tried again
        self._spoiled_sets: Counter[str] = Counter()
        self._registration_due = True  # whether GPUs were listed since the last registration
        self._pause = threading.Event()

    def wait(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        """Events since the previous call, waiting at most ``timeout_s``.

        Events before the first call are not reported.
        """
        if self._registration_due or not self._registered:
            self._registration_due = False
            self.reports_events = self.unsupported is None and self._register()
        if not self.reports_events:
            self._pause.wait(timeout_s)
            return ()
        found: list[GpuEvent] = []
        event = self._library.nvml.c_nvmlEventData_t()
        while len(found) < MOST_AT_ONCE:
            event.gpuInstanceId = NO_INSTANCE  # older drivers do not set it
            code = self._wait(event, 0 if found else int(timeout_s * 1000))
            if code == TIMEOUT:
                break
            if code:
                # A GPU is lost, and the set would fail every time. The next set is made without it.
                self.free()
                self._pause.wait(0 if found else timeout_s)
                break
            uuid = self._registered.get(_address(event.device), "")
            instance = None if event.gpuInstanceId == NO_INSTANCE else event.gpuInstanceId
            found.append(GpuEvent(uuid, event.eventData, self._clock.time(), gpu_instance=instance))
        return tuple(found)

    def retry_registration(self) -> None:
        """Register failed and new GPUs at the next wait. Any thread may call this."""
        self._retry_later = set()
        self._registration_due = True

    def free(self) -> None:
        """Release the set."""
        if self._set is not None:
            self._library.call("nvmlEventSetFree", self._set)
        self._set = None
        self._registered = {}

    def _wait(self, event: Structure, timeout_ms: int) -> int:
        name = "nvmlEventSetWait_v2"
        if self._library.function(name) is None:
            name = "nvmlEventSetWait"  # the binding lacks it
        return self._library.direct(name, self._set, byref(event), c_uint(timeout_ms))

    def _register(self) -> bool:
        """Add new GPUs to the set; return whether it contains any."""
        known = {*self._registered.values(), *self.gpus_without_events, *self._retry_later}
        new = {uuid: handle for uuid, handle in self._handles().items() if uuid not in known}
        if self._set is None and (new or self._registered):
            name = "nvmlEventSetCreate"
            code, made = self._library.call(name)
            if code:
                self.unsupported = (name, code) if code in PERMANENT else None
                return False
            self._set = made
        for uuid, handle in new.items():
            if not self._add(uuid, handle):
                return self._register()
        return bool(self._registered)

    def _add(self, uuid: str, handle: Handle) -> bool:
        """Add a GPU to the set; return False if the set is no longer usable."""
        name = "nvmlDeviceGetSupportedEventTypes"
        code, types = self._library.call(name, handle)
        if code == SUCCESS and not types & XID:
            code = NOT_SUPPORTED
        if code == SUCCESS:
            name = "nvmlDeviceRegisterEvents"
            code, _ = self._library.call(name, handle, XID, self._set)
            if code == SUCCESS:
                self._registered[_address(handle)] = uuid
                return True
        # The set may now contain anything: make a new one without this GPU.
        spoils = code == UNKNOWN and name == "nvmlDeviceRegisterEvents"
        self._spoiled_sets[uuid] += spoils
        if code in PERMANENT or self._spoiled_sets[uuid] == MOST_SPOILED:
            self.gpus_without_events[uuid] = name, code
        else:
            self._retry_later.add(uuid)
        if spoils:
            self.free()
        return not spoils


def _address(handle: Handle) -> int:
    return cast(handle, c_void_p).value or 0
