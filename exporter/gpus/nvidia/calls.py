"""Functions of NVML called straight, what each device cannot tell, and the layouts of what it does tell.

The binding finds the library and its functions; its wrappers are passed over. They make a struct for each call and
read it through a method in Python: beside the time in the library eight fields take 11 us there and 3 here, a list of
four processes 8 (and two calls) and 2, a pair of numbers 0.7 and 0.4. Also they do not tell how long a list that was
too short would have been.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from functools import lru_cache
from threading import get_ident
from typing import Any

from exporter.gpus.records import GpuDriverReplaced, GpuFailed

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
LIB_RM_VERSION_MISMATCH = 18
VGPU_ECC_NOT_SUPPORTED = 22
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

FOR_GOOD = frozenset(
    {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VGPU_ECC_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)  # answers that stay the same as long as the driver is loaded; after any other one the call is made again
REPLACED = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
"""Answers of a driver that was replaced; one call may give them for a reason of its own."""
LOST = frozenset({GPU_IS_LOST, GPU_NOT_FOUND})
"""Invalid argument is not among them, though it is what a device that was unbound answers: so do stale MIG handles."""

TEXT_BYTES = 96
FIELD_VALUES = "nvmlDeviceGetFieldValues"

Key = str | tuple[str | int, ...]  # a call, with what selects a part of what it tells


class NvmlUtilization(ctypes.Structure):
    """``nvmlUtilization_t``, in percent."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class NvmlMemory(ctypes.Structure):
    """``nvmlMemory_t``; what the driver keeps for itself counts as used."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class NvmlMemoryV2(ctypes.Structure):
    """``nvmlMemory_v2_t``; what the driver keeps for itself is apart, as in ``nvidia-smi``."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )
    VERSION = 0x02000028


class NvmlTemperature(ctypes.Structure):
    """``nvmlTemperature_v1_t``."""

    _fields_ = (("version", c_uint), ("sensor", c_uint), ("temperature", c_int))
    VERSION = 0x0100000C


class NvmlPciInfo(ctypes.Structure):
    """``nvmlPciInfo_t``."""

    _fields_ = (
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )


VALUE_FORMS = ("d", "I4x", "L", "Q", "q", "i4x", "H6x")
"""How a value is laid out in its eight bytes, by ``nvmlValueType_t``,"""
OTHER_FORM = "Q"  # and one of a type that is not known


class NvmlFieldValue(ctypes.Structure):
    """``nvmlFieldValue_t``."""

    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp", c_longlong),
        ("latency", c_longlong),
        ("type", c_uint),
        ("code", c_uint),
        ("value", c_ulonglong),  # nvmlValue_t, a union
    )


_BEFORE_VALUE = "24xII"
"""What comes before the value, of which type and code are read. All values of a call are read at once: attributes of
ctypes cost more than the call."""
MOST_LAYOUTS = 64


class CallTooLate(Exception):
    """The call has come back after another thread took the place of this one."""


class NvmlLibrary:
    """The library's functions; a thread asks at a time, and one that was given up asks no more."""

    def __init__(self, binding: Any) -> None:
        """``binding``: the module ``pynvml``, with the library loaded."""
        self._binding = binding
        self.functions: dict[str, Callable[..., int] | None] = {}
        """Those that were asked for, None where there is none; ``function`` looks others up."""
        self.thread = get_ident()
        """Who may ask."""

    def function(self, name: str) -> Callable[..., int] | None:
        """A function; None when this version of the library has none."""
        try:
            return self.functions[name]
        except KeyError:
            pass
        found: Callable[..., int] | None
        try:
            found = self._binding._nvmlGetFunctionPointer(name)
        except self._binding.NVMLError:
            found = None
        self.functions[name] = found
        return found

    def call(self, name: str, *arguments: Any) -> int:
        """What a call about no device returns."""
        self.check_turn()
        function = self.function(name)
        code = FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code in REPLACED:
            self.confirm()
        return code

    def confirm(self) -> None:
        """Raise DriverReplaced where the driver as a whole says so; for any thread, whoever's turn it is."""
        function, count = self.function("nvmlDeviceGetCount_v2"), c_uint()
        code = SUCCESS if function is None else function(byref(count))
        if code in REPLACED:
            raise GpuDriverReplaced(self.words(code))

    def check_turn(self) -> None:
        """Stop a thread that has come back after another one took its place."""
        if self.thread != get_ident():
            raise CallTooLate

    def words(self, code: int) -> str:
        """What a code means, for a person."""
        return str(self._binding.NVMLError(code))


class NvmlDevice:
    """One GPU or MIG instance: its handle, and which calls it does not answer.

    What is read of it goes into buffers of its own: a call that was given up may yet write into them.
    """

    def __init__(self, library: NvmlLibrary, handle: c_void_p) -> None:
        self.library = library
        self.handle = handle
        self.inside: str | None = None
        """The call that is under way; for another thread: that has not come back."""
        self.absent: dict[Key, int] = {}
        """Calls that are not made again, and what they have returned."""
        self.answers = 0
        """Values that it has told."""
        self.refusals = 0
        """Calls that have failed, though not for good."""
        self.refusal = SUCCESS
        """What the last of them has returned."""
        self._uint, self._long = c_uint(), c_ulonglong()
        self._uint_at, self._long_at = byref(self._uint), byref(self._long)

    def call(self, name: str, *arguments: Any, key: Key | None = None) -> int:
        """What a call returns that is not a fault of the whole device; one that is known to fail is not made.

        ``key``: what is found to be absent when it fails for good; the name where none is given.
        """
        if self.absent:
            known = self.absent.get(key or name)
            if known is not None:
                return known
        library = self.library
        if library.thread != get_ident():
            library.check_turn()
        function = library.functions.get(name) or library.function(name)
        if function is None:
            code = FUNCTION_NOT_FOUND
        else:
            self.inside = name
            code = function(*arguments)
            self.inside = None
            if not code:
                self.answers += name != FIELD_VALUES  # which answers even where each field fails
                return code
            if code in REPLACED:
                library.confirm()
        if code in FOR_GOOD:
            self.absent[key or name] = code
        else:
            self.judge(code)
        return code

    def judge(self, code: int) -> None:
        """Note a failure that is not for good; raise where it is about the whole device."""
        self.refusals += 1
        self.refusal = code
        if code in LOST:
            raise GpuFailed("lost", self.library.words(code))
        if code == RESET_REQUIRED:
            raise GpuFailed("reset_required", self.library.words(code))

    def number(self, name: str, *selectors: int) -> int | None:
        """What a call tells through a pointer to an ``unsigned int``."""
        if self.call(name, self.handle, *selectors, self._uint_at, key=(name, *selectors)):
            return None
        return self._uint.value

    def long(self, name: str, *selectors: int) -> int | None:
        """The same of an ``unsigned long long``."""
        if self.call(name, self.handle, *selectors, self._long_at, key=(name, *selectors)):
            return None
        return self._long.value

    def text(self, name: str) -> str | None:
        """The same of a text."""
        return self.told(name)[0]

    def told(self, name: str) -> tuple[str | None, int]:
        """A text, and what the call for it returns."""
        buffer = ctypes.create_string_buffer(TEXT_BYTES)
        code = self.call(name, self.handle, buffer, c_uint(TEXT_BYTES))
        return (None if code else buffer.value.decode("utf-8", "replace")), code


class NvmlFieldReader:
    """Values of fields, which one call brings together.

    Each is asked for alone once, so that one that a driver does not know takes no other one with it.
    """

    def __init__(self, device: NvmlDevice, wanted: Mapping[str, tuple[int, int]], *, noted: bool = True) -> None:
        """``wanted``: by our name, the field and its scope. ``noted``: whether one that is absent is told of."""
        self._device = device
        self._noted = noted
        self._untried = dict(wanted)
        self._asked: list[tuple[str, int, int]] = []
        self._lay_out()

    def known(self) -> set[str]:
        """Those that can be read."""
        if self._untried:
            self._try()
        return {name for name, _, _ in self._asked}

    def drop(self, name: str) -> None:
        """Ask no more for one."""
        self._asked = [field for field in self._asked if field[0] != name]
        self._lay_out()

    def read(self) -> dict[str, float]:
        """By name, those that the device tells now."""
        if self._untried:
            self._try()
        device, count = self._device, len(self._asked)
        if not count or device.call(FIELD_VALUES, device.handle, count, self._values):
            return {}
        flat = self._layout.unpack(self._values)
        if flat[::3] != self._kinds:
            self._expect(flat[::3])
            flat = self._layout.unpack(self._values)
        codes, values = flat[1::3], flat[2::3]
        if any(codes):
            return self._those_told(codes, values)
        device.answers += count
        return dict(zip(self._names, values, strict=True))

    def _those_told(self, codes: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """What ``read`` gives where some fail."""
        found: dict[str, float] = {}
        gone = []
        for (name, field, scope), code, value in zip(self._asked, codes, values, strict=True):
            if not code:
                found[name] = value
                self._device.answers += 1
            elif self._fails_for_good(field, scope, code):
                gone.append(name)
        for name in gone:
            self.drop(name)
        return found

    def _try(self) -> None:
        device, alone = self._device, (NvmlFieldValue * 1)()
        for name, (field, scope) in list(self._untried.items()):
            alone[0].field, alone[0].scope, alone[0].code = field, scope, SUCCESS
            code = device.call(FIELD_VALUES, device.handle, 1, alone, key=_field_key(field, scope))
            if not self._fails_for_good(field, scope, code or alone[0].code):
                self._asked.append((name, field, scope))
            del self._untried[name]
        self._lay_out()

    def _fails_for_good(self, field: int, scope: int, code: int) -> bool:
        device = self._device
        key = _field_key(field, scope)
        if code in FOR_GOOD or code == INVALID_ARGUMENT:
            device.absent[key] = code
            if not self._noted:
                del device.absent[key]
            return True
        if code:
            device.judge(code)
        return False

    def _lay_out(self) -> None:
        self._names = [name for name, _, _ in self._asked]
        self._values = (NvmlFieldValue * len(self._asked))()
        for told, (_, field, scope) in zip(self._values, self._asked, strict=True):
            told.field, told.scope = field, scope
        self._expect((0,) * len(self._asked))

    def _expect(self, kinds: tuple[int, ...]) -> None:
        """Take values to be of these types: a driver tells a field in the same one each time."""
        self._kinds = kinds
        self._layout = _layout(kinds)


@lru_cache(MOST_LAYOUTS)
def _layout(kinds: tuple[int, ...]) -> struct.Struct:
    """Types, codes and values of so many fields in turn; one for all GPUs, which are of a kind as a rule."""
    forms = (VALUE_FORMS[kind] if kind < len(VALUE_FORMS) else OTHER_FORM for kind in kinds)
    return struct.Struct("@" + "".join(_BEFORE_VALUE + form for form in forms))


def _field_key(field: int, scope: int) -> Key:
    return ("field", field, scope) if scope else ("field", field)
