"""Direct NVML calls, unsupported calls of each device, and struct layouts.

The binding loads the library and its functions, but its wrappers are slow: they make a struct per call and read it in
Python. Overhead of a wrapper and of a direct call: eight fields 11 and 3 us, four processes 8 (with a second call) and
2 us, a pair of numbers 0.7 and 0.4 us. Wrappers also hide the needed length of a list that was too short.
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

PERMANENT = frozenset(
    {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VGPU_ECC_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)  # permanent while the driver is loaded; calls with other errors are repeated
# Answers after a driver update; a single call may also return them for other reasons.
REPLACED = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
# Without INVALID_ARGUMENT: an unbound device returns it, but so do stale MIG handles.
LOST = frozenset({GPU_IS_LOST, GPU_NOT_FOUND})

TEXT_BYTES = 96
FIELD_VALUES = "nvmlDeviceGetFieldValues"

Key = str | tuple[str | int, ...]  # a call, with the arguments that select a value


class NvmlUtilization(ctypes.Structure):
    """``nvmlUtilization_t``, in percent."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class NvmlMemory(ctypes.Structure):
    """``nvmlMemory_t``; used includes the driver's own memory."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class NvmlMemoryV2(ctypes.Structure):
    """``nvmlMemory_v2_t``; the driver's own memory is separate, as in ``nvidia-smi``."""

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


VALUE_FORMS = ("d", "I4x", "L", "Q", "q", "i4x", "H6x")  # layout of a value in eight bytes, by `nvmlValueType_t`
OTHER_FORM = "Q"  # layout of unknown types


class NvmlFieldValue(ctypes.Structure):
    """``nvmlFieldValue_t``."""

    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp", c_longlong),
        ("latency", c_longlong),
        ("type", c_uint),
        ("code", c_uint),
        ("value", c_ulonglong),  # `nvmlValue_t`, a union
    )


# Bytes before the value, including type and code. All values are unpacked together, because ctypes attributes are slow.
_BEFORE_VALUE = "24xII"
MOST_LAYOUTS = 64


class CallTooLate(Exception):
    """The call returned after another thread had replaced this one."""


class NvmlLibrary:
    """Functions of the library. One thread at a time may call; an abandoned thread may not."""

    def __init__(self, binding: Any) -> None:
        """``binding``: the module ``pynvml``, with the library loaded."""
        self._binding = binding
        self.functions: dict[str, Callable[..., int] | None] = {}  # functions looked up so far; None for missing ones
        self.thread = get_ident()  # the thread that may call

    def function(self, name: str) -> Callable[..., int] | None:
        """Return a function; None if this version of the library does not have it."""
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
        """Return code of a call that is not about a device."""
        self.check_thread()
        function = self.function(name)
        code = FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code in REPLACED:
            self.check_driver()
        return code

    def check_driver(self) -> None:
        """Raise GpuDriverReplaced if the whole driver was replaced. Any thread may call this."""
        function, count = self.function("nvmlDeviceGetCount_v2"), c_uint()
        code = SUCCESS if function is None else function(byref(count))
        if code in REPLACED:
            raise GpuDriverReplaced(self.error_text(code))

    def check_thread(self) -> None:
        """Raise CallTooLate in a thread that was replaced."""
        if self.thread != get_ident():
            raise CallTooLate

    def error_text(self, code: int) -> str:
        """Message for a return code."""
        return str(self._binding.NVMLError(code))


class NvmlDevice:
    """One GPU or MIG instance: its handle, and the calls that it does not support.

    Results go into buffers of its own, because an abandoned call may still write to them.
    """

    def __init__(self, library: NvmlLibrary, handle: c_void_p) -> None:
        self.library = library
        self.handle = handle
        self.call_in_progress: str | None = None  # call in progress; seen by another thread, one that may hang
        self.unsupported_calls: dict[Key, int] = {}  # unsupported calls and their return codes
        self.answers = 0  # values returned
        self.failures = 0  # calls that failed, though not permanently
        self.last_failure_code = SUCCESS  # code of the last of those
        self._uint, self._long = c_uint(), c_ulonglong()
        self._uint_ref, self._long_ref = byref(self._uint), byref(self._long)

    def call(self, name: str, *arguments: Any, key: Key | None = None) -> int:
        """Return code of a call. Known unsupported calls are not made. Raises if the whole device failed.

        ``key`` identifies the call among unsupported ones; default is the name.
        """
        if self.unsupported_calls:
            known = self.unsupported_calls.get(key or name)
            if known is not None:
                return known
        library = self.library
        if library.thread != get_ident():
            library.check_thread()
        function = library.functions.get(name) or library.function(name)
        if function is None:
            code = FUNCTION_NOT_FOUND
        else:
            self.call_in_progress = name
            code = function(*arguments)
            self.call_in_progress = None
            if not code:
                self.answers += name != FIELD_VALUES  # that call succeeds even if each field fails
                return code
            if code in REPLACED:
                library.check_driver()
        if code in PERMANENT:
            self.unsupported_calls[key or name] = code
        else:
            self.record_failure(code)
        return code

    def record_failure(self, code: int) -> None:
        """Count a failure that is not permanent; raise GpuFailed if it affects the whole device."""
        self.failures += 1
        self.last_failure_code = code
        if code in LOST:
            raise GpuFailed("lost", self.library.error_text(code))
        if code == RESET_REQUIRED:
            raise GpuFailed("reset_required", self.library.error_text(code))

    def number(self, name: str, *selectors: int) -> int | None:
        """Value of a call that returns an ``unsigned int``; None if it failed."""
        if self.call(name, self.handle, *selectors, self._uint_ref, key=(name, *selectors)):
            return None
        return self._uint.value

    def long(self, name: str, *selectors: int) -> int | None:
        """Value of a call that returns an ``unsigned long long``; None if it failed."""
        if self.call(name, self.handle, *selectors, self._long_ref, key=(name, *selectors)):
            return None
        return self._long.value

    def text(self, name: str) -> str | None:
        """Text of a call; None if it failed."""
        return self.text_and_code(name)[0]

    def text_and_code(self, name: str) -> tuple[str | None, int]:
        """Text of a call, or None, and the return code."""
        buffer = ctypes.create_string_buffer(TEXT_BYTES)
        code = self.call(name, self.handle, buffer, c_uint(TEXT_BYTES))
        return (None if code else buffer.value.decode("utf-8", "replace")), code


class NvmlFieldReader:
    """Field values, read together in one call.

    Each field is first tried alone, so that one that the driver does not know cannot spoil the call for the others.
    """

    def __init__(
        self, device: NvmlDevice, wanted: Mapping[str, tuple[int, int]], *, report_unsupported: bool = True
    ) -> None:
        """``wanted``: field and scope by our name. ``report_unsupported``: whether to report fields that are absent."""
        self._device = device
        self._report_unsupported = report_unsupported
        self._untried = dict(wanted)
        self._fields: list[tuple[str, int, int]] = []
        self._prepare_buffer()

    def readable_fields(self) -> set[str]:
        """Names of the fields that can be read."""
        if self._untried:
            self._try_fields()
        return {name for name, _, _ in self._fields}

    def drop(self, name: str) -> None:
        """Stop reading a field."""
        self._fields = [field for field in self._fields if field[0] != name]
        self._prepare_buffer()

    def read(self) -> dict[str, float]:
        """Present values by name."""
        if self._untried:
            self._try_fields()
        device, count = self._device, len(self._fields)
        if not count or device.call(FIELD_VALUES, device.handle, count, self._values):
            return {}
        flat = self._layout.unpack(self._values)
        if flat[::3] != self._kinds:
            self._set_layout(flat[::3])
            flat = self._layout.unpack(self._values)
        codes, values = flat[1::3], flat[2::3]
        if any(codes):
            return self._successful_values(codes, values)
        device.answers += count
        return dict(zip(self._names, values, strict=True))

    def _successful_values(self, codes: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """Values, if some fields failed."""
        found: dict[str, float] = {}
        gone = []
        for (name, field, scope), code, value in zip(self._fields, codes, values, strict=True):
            if not code:
                found[name] = value
                self._device.answers += 1
            elif self._is_permanent_failure(field, scope, code):
                gone.append(name)
        for name in gone:
            self.drop(name)
        return found

    def _try_fields(self) -> None:
        device, alone = self._device, (NvmlFieldValue * 1)()
        for name, (field, scope) in list(self._untried.items()):
            alone[0].field, alone[0].scope, alone[0].code = field, scope, SUCCESS
            code = device.call(FIELD_VALUES, device.handle, 1, alone, key=_field_key(field, scope))
            if not self._is_permanent_failure(field, scope, code or alone[0].code):
                self._fields.append((name, field, scope))
            del self._untried[name]
        self._prepare_buffer()

    def _is_permanent_failure(self, field: int, scope: int, code: int) -> bool:
        device = self._device
        key = _field_key(field, scope)
        if code in PERMANENT or code == INVALID_ARGUMENT:
            device.unsupported_calls[key] = code
            if not self._report_unsupported:
                del device.unsupported_calls[key]
            return True
        if code:
            device.record_failure(code)
        return False

    def _prepare_buffer(self) -> None:
        self._names = [name for name, _, _ in self._fields]
        self._values = (NvmlFieldValue * len(self._fields))()
        for value, (_, field, scope) in zip(self._values, self._fields, strict=True):
            value.field, value.scope = field, scope
        self._set_layout((0,) * len(self._fields))

    def _set_layout(self, kinds: tuple[int, ...]) -> None:
        """Expect values of these types. A driver returns a field in the same type each time."""
        self._kinds = kinds
        self._layout = _layout(kinds)


@lru_cache(MOST_LAYOUTS)
def _layout(kinds: tuple[int, ...]) -> struct.Struct:
    """Layout of types, codes and values; shared, as the GPUs of a node are usually of one model."""
    forms = (VALUE_FORMS[kind] if kind < len(VALUE_FORMS) else OTHER_FORM for kind in kinds)
    return struct.Struct("@" + "".join(_BEFORE_VALUE + form for form in forms))


def _field_key(field: int, scope: int) -> Key:
    return ("field", field, scope) if scope else ("field", field)
