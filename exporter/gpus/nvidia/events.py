"""Errors that the driver tells of when they happen (Xid), by NVML, for a thread of their own."""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from ctypes import byref, c_uint, c_ulonglong, c_void_p

from exporter.contract.clock import Clock
from exporter.gpus.nvidia.calls import (
    FOR_GOOD,
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    REPLACED,
    SUCCESS,
    TIMEOUT,
    UNKNOWN,
    NvmlLibrary,
)
from exporter.gpus.records import GpuEvent

XID = 0x8
"""``nvmlEventTypeXidCriticalError``, the only ones that are asked for: what others tell is read as a state, and some
come with each change of clocks."""
MOST_AT_ONCE = 100
MOST_SPOILED = 3  # sets that one GPU may spoil: what others would have told meanwhile is lost each time
NO_INSTANCE = 0xFFFFFFFF


class _NvmlEventData(ctypes.Structure):
    """``nvmlEventData_t``."""

    _fields_ = (
        ("device", c_void_p),
        ("type", c_ulonglong),
        ("data", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class XidEventSet:
    """One set of events. Made on any thread, used on one; it never takes the turn of the thread that asks the rest."""

    def __init__(self, library: NvmlLibrary, clock: Clock, handles: Callable[[], Mapping[str, c_void_p]]) -> None:
        """``handles``: those of the GPUs by UUID."""
        self._library = library
        self._clock = clock
        self._handles = handles
        self._set: c_void_p | None = None
        self._registered: dict[int, str] = {}
        """By the handle's value, the UUID."""
        self.absent: dict[str, tuple[str, int]] = {}
        """By UUID, GPUs whose events are not to be had: the call that says so, and what it has returned."""
        self.unsupported: tuple[str, int] | None = None
        """The same where it is so of all."""
        self.tells = True
        """Whether there was some GPU in the set when it was looked at last; True before that."""
        self._later: set[str] = set()
        """UUIDs of GPUs that may tell events and have failed."""
        self._spoiled: Counter[str] = Counter()
        self._listed = True
        """Whether GPUs were listed since they were put into the set."""
        self._pause = threading.Event()

    def wait(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        """What was told since the last call, or nothing after that time. Only what happens after the first call is."""
        if self._listed or not self._registered:
            self._listed = False
            self.tells = self.unsupported is None and self._register()
        if not self.tells:
            self._pause.wait(timeout_s)
            return ()
        found: list[GpuEvent] = []
        event = _NvmlEventData()
        while len(found) < MOST_AT_ONCE:
            event.gpu_instance = NO_INSTANCE  # older drivers leave it as it is
            code = self._wait(event, 0 if found else int(timeout_s * 1000))
            if code == TIMEOUT:
                break
            if code:
                # A GPU is lost: the set would answer so at once each time. The next one is made without it.
                self.free()
                self._pause.wait(0 if found else timeout_s)
                break
            uuid = self._registered.get(event.device or 0, "")
            instance = None if event.gpu_instance == NO_INSTANCE else event.gpu_instance
            found.append(GpuEvent(uuid, event.data, self._clock.time(), gpu_instance=instance))
        return tuple(found)

    def try_again(self) -> None:
        """Ask those again at the next wait that have failed, and those that are new; on any thread."""
        self._later = set()
        self._listed = True

    def free(self) -> None:
        """Let go of the set."""
        if self._set is not None:
            self._call("nvmlEventSetFree", self._set)
        self._set = None
        self._registered = {}

    def _wait(self, event: _NvmlEventData, timeout_ms: int) -> int:
        name = "nvmlEventSetWait_v2"
        if self._library.function(name) is None:
            name = "nvmlEventSetWait"
        return self._call(name, self._set, byref(event), c_uint(timeout_ms))

    def _register(self) -> bool:
        """Whether there is a set with some GPU in it; GPUs that were not there before are added."""
        known = {*self._registered.values(), *self.absent, *self._later}
        new = {uuid: handle for uuid, handle in self._handles().items() if uuid not in known}
        if self._set is None and (new or self._registered):
            made = c_void_p()
            name = "nvmlEventSetCreate"
            code = self._call(name, byref(made))
            if code:
                self.unsupported = (name, code) if code in FOR_GOOD else None
                return False
            self._set = made
        for uuid, handle in new.items():
            if not self._add(uuid, handle):
                return self._register()
        return bool(self._registered)

    def _add(self, uuid: str, handle: c_void_p) -> bool:
        """Put a GPU into the set; False when the set cannot be used any more."""
        types = c_ulonglong()
        name = "nvmlDeviceGetSupportedEventTypes"
        code = self._call(name, handle, byref(types))
        if code == SUCCESS and not types.value & XID:
            code = NOT_SUPPORTED
        if code == SUCCESS:
            name = "nvmlDeviceRegisterEvents"
            code = self._call(name, handle, c_ulonglong(XID), self._set)
            if code == SUCCESS:
                self._registered[handle.value or 0] = uuid
                return True
        # What is in the set is not known then: it is made anew without this one.
        spoils = code == UNKNOWN and name == "nvmlDeviceRegisterEvents"
        self._spoiled[uuid] += spoils
        if code in FOR_GOOD or self._spoiled[uuid] == MOST_SPOILED:
            self.absent[uuid] = name, code
        else:
            self._later.add(uuid)
        if spoils:
            self.free()
        return not spoils

    def _call(self, name: str, *arguments: object) -> int:
        function = self._library.function(name)
        code = FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code in REPLACED:
            self._library.confirm()
        return code
