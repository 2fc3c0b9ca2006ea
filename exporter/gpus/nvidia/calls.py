"""NVML calls through the binding ``pynvml``, and the unsupported calls of each device."""

from collections.abc import Mapping
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

FIELD_VALUES = "nvmlDeviceGetFieldValues"
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by `nvmlValueType_t`
OTHER_MEMBER = "ullVal"  # for unknown types

Key = str | tuple[str | int, ...]  # a call, with the arguments that select a value


class CallTooLate(Exception):
    """The call returned after another thread had replaced this one."""


class NvmlLibrary:
    """Functions of the library. One thread at a time may call; an abandoned thread may not."""

    def __init__(self, nvml: Any) -> None:
        """``nvml``: the module ``pynvml``, with the library loaded."""
        self.nvml = nvml
        self.thread = get_ident()  # the thread that may call

    def has(self, name: str) -> bool:
        """Whether this version of the library has a function."""
        try:
            self.nvml._nvmlGetFunctionPointer(name)
        except self.nvml.NVMLError:
            return False
        return True

    def call(self, name: str, *arguments: Any, direct: bool = False) -> tuple[int, Any]:
        """Return code of a function and its value; None if it failed.

        ``direct``: call the library's own function, which returns only the code, not that of the binding.
        """
        nvml, code, value = self.nvml, SUCCESS, None
        try:
            if direct:
                code = nvml._nvmlGetFunctionPointer(name)(*arguments)
            elif (function := getattr(nvml, name, None)) is None:
                code = FUNCTION_NOT_FOUND  # an older binding
            else:
                value = function(*arguments)
        except nvml.NVMLError as error:
            code = error.value
        if code in REPLACED:
            self.check_driver()
        return code, value

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
    """One GPU or MIG instance: its handle, and the calls that it does not support."""

    def __init__(self, library: NvmlLibrary, handle: Any) -> None:
        self.library = library
        self.handle = handle
        self.call_in_progress: str | None = None  # call in progress; seen by another thread, one that may hang
        self.unsupported_calls: dict[Key, int] = {}  # unsupported calls and their return codes
        self.answers = 0  # values returned
        self.failures = 0  # calls that failed, though not permanently
        self.last_failure_code = SUCCESS  # code of the last of those

    def call(self, name: str, *arguments: Any, key: Key | None = None, direct: bool = False) -> tuple[int, Any]:
        """As in the library. Known unsupported calls are not made. Raises if the whole device failed.

        ``key`` identifies the call among unsupported ones; default is the name.
        """
        known = self.unsupported_calls.get(key or name)
        if known is not None:
            return known, None
        self.library.check_thread()
        self.call_in_progress = name
        try:
            code, value = self.library.call(name, *arguments, direct=direct)
        finally:
            self.call_in_progress = None
        if not code:
            self.answers += name != FIELD_VALUES  # that call succeeds even if each field fails
        elif code in PERMANENT:
            self.unsupported_calls[key or name] = code
        else:
            self.record_failure(code)
        return code, value

    def value(self, name: str, *selectors: int) -> Any:
        """Value of a function for this device; None if it failed."""
        return self.call(name, self.handle, *selectors, key=(name, *selectors) if selectors else name)[1]

    def record_failure(self, code: int) -> None:
        """Count a failure that is not permanent; raise GpuFailed if it affects the whole device."""
        self.failures += 1
        self.last_failure_code = code
        if code in LOST:
            raise GpuFailed("lost", self.library.error_text(code))
        if code == RESET_REQUIRED:
            raise GpuFailed("reset_required", self.library.error_text(code))


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

    def readable_fields(self) -> set[str]:
        """Names of the fields that can be read."""
        if self._untried:
            self._try_fields()
        return set(self._fields)

    def drop(self, name: str) -> None:
        """Stop reading a field."""
        self._fields.pop(name, None)

    def read(self) -> dict[str, float]:
        """Present values by name."""
        if self._untried:
            self._try_fields()
        if not self._fields:
            return {}
        _, values = self._device.call(FIELD_VALUES, self._device.handle, list(self._fields.values()))
        found: dict[str, float] = {}
        for (name, field), value in zip(list(self._fields.items()), values or (), strict=False):
            if not value.nvmlReturn:
                kind = value.valueType
                found[name] = getattr(value.value, VALUE_MEMBERS[kind] if kind < len(VALUE_MEMBERS) else OTHER_MEMBER)
            elif self._is_permanent_failure(field, value.nvmlReturn):
                self.drop(name)
        self._device.answers += len(found)
        return found

    def _try_fields(self) -> None:
        device = self._device
        for name, field in list(self._untried.items()):
            code, values = device.call(FIELD_VALUES, device.handle, [field], key=_field_key(field))
            if not self._is_permanent_failure(field, code or values[0].nvmlReturn):
                self._fields[name] = field
            del self._untried[name]

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
