"""NVML calls, and the unsupported calls of each device.

Rare calls are functions of the binding ``pynvml``, which make a structure per call and ask the driver twice for a list.
Frequent calls and lists (``direct``) are the library's own functions, with buffers that are prepared once.
"""

import ctypes
from collections.abc import Callable, Collection, Mapping
from ctypes import byref, c_uint, c_ulonglong
from struct import Struct
from threading import get_ident
from types import ModuleType
from typing import Any, TypeAlias

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

FIELD_VALUES = "nvmlDeviceGetFieldValues"
FIELD = Struct("@24xII8s")  # `nvmlFieldValue_t`: type, return code and value; ctypes attributes are slow
VALUES = {kind: Struct(form) for kind, form in enumerate(("d", "I4x", "L", "Q", "q", "i4x", "H6x"))}
OTHER_VALUE = Struct("Q")  # of types that are not in `nvmlValueType_t`

Handle: TypeAlias = "ctypes._Pointer[ctypes.Structure]"  # of a GPU, a set of events or a sample
Key = str | tuple[str | int, ...]  # a call, with the arguments that select a value


class CallTooLate(Exception):
    """The call returned after another thread had replaced this one."""


class NvmlLibrary:
    """Functions of the library. One thread at a time may call; an abandoned thread may not."""

    def __init__(self, nvml: ModuleType) -> None:
        """``nvml``: the module ``pynvml``, with the library loaded."""
        self.nvml = nvml
        self.functions: dict[str, Callable[..., int] | None] = {}  # functions looked up so far; None for missing ones
        self.thread = get_ident()  # the thread that may call

    def function(self, name: str) -> Callable[..., int] | None:
        """Return the library's own function; None if this version does not have it."""
        if name not in self.functions:
            try:
                self.functions[name] = self.nvml._nvmlGetFunctionPointer(name)
            except self.nvml.NVMLError:
                self.functions[name] = None
        return self.functions[name]

    def direct(self, name: str, *arguments: object) -> int:
        """Return code of the library's own function."""
        function = self.function(name)
        code = FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code in REPLACED:
            self.check_driver()
        return code

    def call(self, name: str, *arguments: object) -> tuple[int, Any]:
        """Return code of a function of the binding, and its value; None if it failed."""
        function = getattr(self.nvml, name, None)
        if function is None:
            return FUNCTION_NOT_FOUND, None  # an older binding
        try:
            return SUCCESS, function(*arguments)
        except self.nvml.NVMLError as error:
            code: int = error.value
        if code in REPLACED:
            self.check_driver()
        return code, None

    def check_driver(self) -> None:
        """Raise GpuDriverReplaced if the whole driver was replaced. Any thread may call this."""
        try:
            self.nvml.nvmlDeviceGetCount()
        except self.nvml.NVMLError as error:
            if error.value in REPLACED:
                raise GpuDriverReplaced(str(error)) from error

    def check_thread(self) -> None:
        """Raise CallTooLate in a thread that was replaced."""
        if self.thread != get_ident():
            raise CallTooLate

    def error_text(self, code: int) -> str:
        """Message for a return code."""
        return str(self.nvml.NVMLError(code))


class NvmlDevice:
    """One GPU or MIG instance: its handle, and the calls that it does not support.

    Known unsupported calls are not made again. A call raises if the whole device failed. Results go into buffers of the
    device, because an abandoned call may still write to them.
    """

    def __init__(self, library: NvmlLibrary, handle: Handle) -> None:
        self.library = library
        self.handle = handle
        self.call_in_progress: str | None = None  # call in progress; seen by another thread, one that may hang
        self.unsupported_calls: dict[Key, int] = {}  # unsupported calls and their return codes
        self.answers = 0  # values returned
        self.failures = 0  # calls that failed, though not permanently
        self.last_failure_code = SUCCESS  # code of the last of those
        self._uint, self._long = c_uint(), c_ulonglong()
        self._uint_ref, self._long_ref = byref(self._uint), byref(self._long)

    def direct(self, name: str, *arguments: object, key: Key | None = None) -> int:
        """Return code of the library's own function. ``key`` identifies the call; default is the name."""
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
        self._record_error(key or name, code)
        return code

    def number(self, name: str, *selectors: int) -> int | None:
        """Value of a call that returns an ``unsigned int``; None if it failed."""
        if self.direct(name, self.handle, *selectors, self._uint_ref, key=(name, *selectors) if selectors else name):
            return None
        return self._uint.value

    def long(self, name: str, *selectors: int) -> int | None:
        """Value of a call that returns an ``unsigned long long``; None if it failed."""
        if self.direct(name, self.handle, *selectors, self._long_ref, key=(name, *selectors) if selectors else name):
            return None
        return self._long.value

    def call(self, name: str, *arguments: object, key: Key | None = None) -> tuple[int, Any]:
        """Return code of a function of the binding, and its value; None if it failed."""
        known = self.unsupported_calls.get(key or name)
        if known is not None:
            return known, None
        self.library.check_thread()
        self.call_in_progress = name
        try:
            code, value = self.library.call(name, *arguments)
        finally:
            self.call_in_progress = None
        if code:
            self._record_error(key or name, code)
        else:
            self.answers += 1
        return code, value

    def value(self, name: str, *selectors: int) -> Any:
        """Value of a function of the binding for this device; None if it failed."""
        return self.call(name, self.handle, *selectors, key=(name, *selectors) if selectors else name)[1]

    def record_failure(self, code: int) -> None:
        """Count a failure that is not permanent; raise GpuFailed if it affects the whole device."""
        self.failures += 1
        self.last_failure_code = code
        if code in LOST:
            raise GpuFailed("lost", self.library.error_text(code))
        if code == RESET_REQUIRED:
            raise GpuFailed("reset_required", self.library.error_text(code))

    def _record_error(self, key: Key, code: int) -> None:
        if code in PERMANENT:
            self.unsupported_calls[key] = code
        else:
            self.record_failure(code)


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
        self._fields: dict[str, tuple[int, int]] = {}
        self._values = self._prepare(())

    def readable_fields(self) -> set[str]:
        """Names of the fields that can be read."""
        if self._untried:
            self._try_fields()
        return set(self._fields)

    def drop(self, name: str) -> None:
        """Stop reading a field."""
        self._fields.pop(name, None)
        self._values = self._prepare(self._fields.values())

    def read(self) -> dict[str, float]:
        """Present values by name."""
        if self._untried:
            self._try_fields()
        device, values = self._device, self._values
        if not self._fields or device.direct(FIELD_VALUES, device.handle, len(values), values):
            return {}
        found: dict[str, float] = {}
        fields = list(self._fields.items())
        for (name, field), (kind, code, value) in zip(fields, FIELD.iter_unpack(values), strict=True):
            if not code:
                found[name] = VALUES.get(kind, OTHER_VALUE).unpack(value)[0]
            elif self._is_permanent_failure(field, code):
                self.drop(name)
        device.answers += len(found)
        return found

    def _try_fields(self) -> None:
        device = self._device
        for name, field in list(self._untried.items()):
            alone = self._prepare((field,))
            code = device.direct(FIELD_VALUES, device.handle, 1, alone, key=_field_key(field))
            if not self._is_permanent_failure(field, code or alone[0].nvmlReturn):
                self._fields[name] = field
            del self._untried[name]
        self._values = self._prepare(self._fields.values())

    def _prepare(self, fields: Collection[tuple[int, int]]) -> ctypes.Array[ctypes.Structure]:
        """Structures for a call about these fields."""
        kind = self._device.library.nvml.c_nvmlFieldValue_t
        values: ctypes.Array[ctypes.Structure] = (kind * len(fields))(*fields)
        return values

    def _is_permanent_failure(self, field: tuple[int, int], code: int) -> bool:
        device, key = self._device, _field_key(field)
        if code in PERMANENT or code == INVALID_ARGUMENT:
            device.unsupported_calls[key] = code
            if not self._report_unsupported:
                del device.unsupported_calls[key]
            return True
        if code:
            device.record_failure(code)
        return False


def _field_key(field: tuple[int, int]) -> Key:
    number, scope = field
    return ("field", number, scope) if scope else ("field", number)
