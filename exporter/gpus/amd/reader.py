"""AMD GPUs, read through AMD's Python package ``amdsmi`` (ROCm 6 and 7).

Names, keys and units follow the package's Python API reference
(https://rocm.docs.amd.com/projects/amdsmi/en/latest/reference/amdsmi-py-api.html) and ``amdsmi.h``. The reference does
not mention:

- The library reads files of the driver and reports a missing file as "not supported". A GPU that is gone or in a reset
  therefore looks like one without the feature. It counts as lost when all calls fail that succeeded before.
- ``amdsmi_get_violation_status`` waits 100 ms and ``amdsmi_get_gpu_pci_throughput`` a second, so neither is used.
- There are no numbered events like NVIDIA's Xid, and no counts of link errors.
"""

import contextlib
import io
import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import field, replace
from types import ModuleType

from exporter.contract.clock import Clock, SystemClock
from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.amd.values import (
    AmdThrottleTime,
    bad_pages,
    count_value,
    energy_j,
    fan_ratio,
    gauge_value,
    hertz_value,
    limit_w,
    link_bytes_total,
    list_value,
    pcie_generation,
    pcie_lanes,
    ratio_value,
    table_value,
    text_value,
)
from exporter.gpus.records import (
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
    ThrottleReason,
    unsupported_texts,
)

INVAL, NOT_SUPPORTED, NOT_YET_IMPLEMENTED, FAIL_LOAD_MODULE, FAIL_LOAD_SYMBOL = 1, 2, 3, 4, 5
TIMEOUT, RETRY, NO_PERM, INTERRUPT, OUT_OF_RESOURCES, DIRECTORY_NOT_FOUND = 8, 9, 10, 11, 15, 20
BUSY, NOT_INIT, NO_SLOT, DRIVER_NOT_LOADED, FILE_NOT_FOUND = 30, 32, 33, 34, 52
# Permanent statuses (`amdsmi_status_t`): the call is not repeated.
PERMANENT = frozenset(
    {INVAL, NOT_SUPPORTED, NOT_YET_IMPLEMENTED, FAIL_LOAD_SYMBOL, DIRECTORY_NOT_FOUND, FILE_NOT_FOUND}
)
# The driver was unloaded or replaced; a single call may also return them for other reasons.
DRIVER_GONE = frozenset({NOT_INIT, DRIVER_NOT_LOADED})
TRANSIENT = frozenset({TIMEOUT, RETRY, INTERRUPT, OUT_OF_RESOURCES, BUSY, NO_SLOT})  # say nothing about the device
TRIES = 3  # failures before a call that has never succeeded is not repeated, whatever its status

VRAM = "AmdSmiMemoryType.VRAM"
CURRENT_TEMPERATURE = "AmdSmiTemperatureMetric.CURRENT"
PROCESSES = "amdsmi_get_gpu_process_list"
METRICS = "amdsmi_get_gpu_metrics_info"
# The package makes about 700 Python values of this table (0.4 ms). The counters we need accumulate meanwhile.
METRICS_INTERVAL_S = 10.0

_HIP_UUID = re.compile(r"GPU-(?!0+$)[0-9a-fA-F]{8,}")


@dataclass(slots=True)
class _AmdDevice:
    """One handle of the library, with calls that succeeded and calls that never will."""

    library: ModuleType
    handle: object
    succeeded_calls: set[str] = field(default_factory=set)
    failures: dict[str, int] = field(default_factory=dict)
    unsupported_calls: dict[str, str] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] | None = None  # as last reported
    failed_reads: int = 0  # failed reads since then
    throttle_time: AmdThrottleTime = field(default_factory=AmdThrottleTime)
    throttle_due: float = -math.inf


class _AmdCalls:
    """One batch of calls about a device; their failures are evaluated together."""

    def __init__(self, device: _AmdDevice) -> None:
        self._device = device
        self._success_count = 0
        self._new_failures: list[str] = []  # messages of calls that succeeded earlier and fail now
        self._never_succeeded: list[
            tuple[str, str, bool]
        ] = []  # calls that never succeeded: name, message, whether to repeat

    def call(self, name: str, *arguments: str | int) -> object:
        """Result of a function of the package for the device, or None if it failed.

        An argument ``"Enum.MEMBER"`` is looked up in the package, which may not have it.
        """
        device = self._device
        call = f"{name}({', '.join(map(str, arguments))})" if arguments else name
        if call in device.unsupported_calls:
            return None
        try:
            function = getattr(device.library, name)
            found: object = function(device.handle, *(_argument(device.library, argument) for argument in arguments))
        except Exception as error:  # noqa: BLE001 - the package's own Python breaks on values that it does not expect
            self._record_failure(call, error)
            return None
        self._success_count += 1
        device.succeeded_calls.add(call)
        return found

    def evaluate_failures(self) -> None:
        """Mark calls as unsupported, or raise GpuFailed if none of the working calls succeeds any more."""
        device = self._device
        if not self._success_count and (self._new_failures or self._never_succeeded):
            # Every driver supports it, so it fails only if the GPU is gone.
            self.call("amdsmi_get_gpu_memory_usage", VRAM)
        if self._new_failures and not self._success_count:
            raise GpuFailed("lost", self._new_failures[0])
        for call, text, again in self._never_succeeded:
            device.failures[call] = device.failures.get(call, 0) + 1
            # If no call succeeds, the GPU may be in a reset, when it refuses everything.
            if device.failures[call] >= TRIES or (not again and self._success_count):
                device.unsupported_calls[call] = text

    def _check_driver(self) -> None:
        """Raise GpuDriverReplaced if the library is unusable for all GPUs."""
        try:
            self._device.library.amdsmi_get_processor_handles()
        except Exception as error:  # Python code of the package may fail too
            if _code(error) in DRIVER_GONE:
                raise GpuDriverReplaced(_error_text(error)) from error

    def _record_failure(self, call: str, error: Exception) -> None:
        code, text = _code(error), _error_text(error)
        if code in DRIVER_GONE:
            self._check_driver()
        if code in TRANSIENT:
            return
        if call in self._device.succeeded_calls:
            self._new_failures.append(f"{call}: {text}")
        else:
            self._never_succeeded.append((call, text, code not in PERMANENT and not isinstance(error, AttributeError)))


class AmdReader:
    """The ``GpuReader`` for AMD GPUs; each partition counts as a GPU.

    GPUs are in the order of HIP and ``ROCR_VISIBLE_DEVICES`` if known, else in bus order like ``amd-smi``; the two can
    differ. UUIDs are those of HIP and ``ROCR_VISIBLE_DEVICES`` (``GPU-`` and the GPU's unique number) if known, else
    those of ``amd-smi``.
    """

    vendor = "amd"

    def __init__(self, clock: Clock | None = None, driver_folder: str = "/sys/module/amdgpu") -> None:
        self._clock = SystemClock() if clock is None else clock
        self._driver_folder = driver_folder
        self._library: ModuleType | None = None
        self._gpus: tuple[Gpu, ...] = ()
        self._devices: dict[str, _AmdDevice] = {}
        self._closed = threading.Event()

    def open(self) -> GpuDriver:
        """Load the package and list the GPUs; raises GpuUnavailable."""
        self.close()
        library = _load()
        try:
            library.amdsmi_init()
        except Exception as error:  # Python code of the package may fail too
            raise GpuUnavailable(self._state(error), _error_text(error)) from error
        self._library = library
        try:
            devices = [_AmdDevice(library, handle) for handle in library.amdsmi_get_processor_handles()]
            self._set_gpus(devices)
            return self._driver(library, devices)
        except Exception as error:  # as above
            self.close()
            raise GpuUnavailable("failing", _error_text(error)) from error

    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs present when the library was opened; it does not search again."""
        return self._gpus

    def activity(self, gpu: Gpu) -> GpuActivity:
        """Read the activity. Power is an average up to MI200 and on graphics cards, instant from MI300 on."""
        reading = self._calls(gpu)
        use = table_value(reading.call("amdsmi_get_gpu_activity"))
        memory = reading.call("amdsmi_get_gpu_memory_usage", VRAM)
        power = table_value(reading.call("amdsmi_get_power_info"))
        energy = table_value(reading.call("amdsmi_get_energy_count"))
        heat = reading.call("amdsmi_get_temp_metric", "AmdSmiTemperatureType.HOTSPOT", CURRENT_TEMPERATURE)
        if heat is None:
            heat = reading.call("amdsmi_get_temp_metric", "AmdSmiTemperatureType.EDGE", CURRENT_TEMPERATURE)
        memory_heat = reading.call("amdsmi_get_temp_metric", "AmdSmiTemperatureType.VRAM", CURRENT_TEMPERATURE)
        clock = table_value(reading.call("amdsmi_get_clock_info", "AmdSmiClkType.GFX"))
        memory_clock = table_value(reading.call("amdsmi_get_clock_info", "AmdSmiClkType.MEM"))
        throttle = self._throttle(reading, gpu)
        reading.evaluate_failures()
        return GpuActivity(
            utilization_ratio=ratio_value(use.get("gfx_activity")),
            memory_utilization_ratio=ratio_value(use.get("umc_activity")),
            memory_used_bytes=count_value(memory),
            memory_total_bytes=gpu.memory_total_bytes,
            power_average_w=gauge_value(power.get("average_socket_power")),
            power_instant_w=gauge_value(power.get("current_socket_power")),
            power_limit_w=limit_w(power.get("power_limit")),
            energy_j=energy_j(energy),
            temperature_c=gauge_value(heat),
            memory_temperature_c=gauge_value(memory_heat),
            sm_clock_hz=hertz_value(clock.get("clk", clock.get("cur_clk"))),
            memory_clock_hz=hertz_value(memory_clock.get("clk", memory_clock.get("cur_clk"))),
            throttle_s=throttle,
        )

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        """Processes with a compute queue, without shares of time; None if unavailable.

        In older libraries the call fails if a process ends meanwhile or is not readable. The last list is then repeated
        for a few reads.
        """
        device, reading = self._device(gpu), self._calls(gpu)
        entries = reading.call(PROCESSES)
        reading.evaluate_failures()
        if entries is not None:
            found = [_process(entry) for entry in list_value(entries)]
            device.processes, device.failed_reads = tuple(process for process in found if process is not None), 0
        else:
            device.failed_reads += 1
            if device.failed_reads >= TRIES:
                device.processes = None
        return device.processes

    def condition(self, gpu: Gpu) -> GpuCondition:
        """Read the condition. Retired pages are those with uncorrectable errors; AMD retires no others."""
        reading = self._calls(gpu)
        errors = table_value(reading.call("amdsmi_get_gpu_total_ecc_count"))
        pages = bad_pages(reading.call("amdsmi_get_gpu_bad_page_info"))
        link = table_value(reading.call("amdsmi_get_pcie_info"))
        fixed, present = table_value(link.get("pcie_static")), table_value(link.get("pcie_metric"))
        replays = count_value(present.get("pcie_replay_count"))
        if replays is None:
            replays = count_value(reading.call("amdsmi_get_gpu_pci_replay_counter"))
        links = list_value(table_value(reading.call("amdsmi_get_link_metrics")).get("links"))
        fan = reading.call("amdsmi_get_gpu_fan_speed", 0)
        fan_most = None if fan is None else reading.call("amdsmi_get_gpu_fan_speed_max", 0)
        reading.evaluate_failures()
        return GpuCondition(
            ecc_corrected=count_value(errors.get("correctable_count")),
            ecc_uncorrected=count_value(errors.get("uncorrectable_count")),
            pages_retired_uncorrected=None if pages is None else pages.count(True),
            pages_pending=None if pages is None else False in pages,
            pcie_replays=replays,
            pcie_generation=pcie_generation(present.get("pcie_speed")),
            pcie_generation_max=pcie_generation(fixed.get("max_pcie_speed")),
            pcie_width=pcie_lanes(present.get("pcie_width")),
            pcie_width_max=pcie_lanes(fixed.get("max_pcie_width")),
            nvlink_rx_bytes=link_bytes_total([entry.get("read") for entry in links]),
            nvlink_tx_bytes=link_bytes_total([entry.get("write") for entry in links]),
            fan_ratio=fan_ratio(fan, fan_most),
        )

    def wait_event(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        """Wait and return nothing: AMD has no numbered errors."""
        self._closed.wait(timeout_s)
        return ()

    def reports_events(self) -> bool:
        return False

    def unsupported_calls(self) -> Mapping[str, str]:
        """Unsupported calls by name, with reason and GPUs."""
        return unsupported_texts(
            (name, reason, gpu.index)
            for gpu in self._gpus
            for name, reason in list(self._devices[gpu.uuid].unsupported_calls.items())
        )

    def close(self) -> None:
        """Close the library and wake the event thread."""
        library, self._library = self._library, None
        self._gpus, self._devices = (), {}
        self._closed.set()
        self._closed = threading.Event()
        if library is not None:
            with contextlib.suppress(Exception):  # nothing can be done about a failure
                library.amdsmi_shut_down()

    def _state(self, error: Exception) -> DriverState:
        """Driver state for a failed start."""
        states: dict[int | None, DriverState] = {
            DRIVER_NOT_LOADED: "no_driver",
            NO_PERM: "no_permission",
            FAIL_LOAD_MODULE: "no_library",
            FAIL_LOAD_SYMBOL: "version_mismatch",
        }
        other: DriverState = "failing" if os.path.exists(self._driver_folder) else "no_driver"
        return states.get(_code(error), other)

    def _set_gpus(self, devices: list[_AmdDevice]) -> None:
        """Set the GPUs, in HIP's order."""
        found: list[tuple[int | None, Gpu, _AmdDevice]] = []
        for device in devices:
            reading = _AmdCalls(device)
            ids = table_value(reading.call("amdsmi_get_gpu_enumeration_info"))
            bus = text_value(reading.call("amdsmi_get_gpu_device_bdf"))
            uuid = ids.get("hip_uuid")
            if not isinstance(uuid, str) or not _HIP_UUID.fullmatch(uuid):
                uuid = text_value(reading.call("amdsmi_get_gpu_device_uuid")) or f"GPU-{bus or len(found)}"
            if any(uuid == other.uuid for _, other, _ in found):
                uuid = f"{uuid}@{bus or len(found)}"  # partitions of a GPU share its number
            gpu = Gpu(
                uuid,
                "",
                self.vendor,
                name=text_value(table_value(reading.call("amdsmi_get_gpu_asic_info")).get("market_name")) or "",
                pci_bus_id=None if bus is None else bus.lower(),
                memory_total_bytes=count_value(reading.call("amdsmi_get_gpu_memory_total", VRAM)) or None,
            )
            reading.evaluate_failures()
            found.append((count_value(ids.get("hip_id")), gpu, device))
        if all(ordinal is not None for ordinal, _, _ in found):
            found.sort(key=lambda entry: entry[0] or 0)
        self._devices = {gpu.uuid: device for _, gpu, device in found}
        self._gpus = tuple(replace(gpu, index=str(index)) for index, (_, gpu, _) in enumerate(found))

    def _driver(self, library: ModuleType, devices: list[_AmdDevice]) -> GpuDriver:
        """Versions of the driver and of ROCm, if known."""
        version = rocm = None
        if devices:
            facts = table_value(_AmdCalls(devices[0]).call("amdsmi_get_gpu_driver_info"))
            version = text_value(facts.get("driver_version"))
        with contextlib.suppress(Exception):  # it loads another library, which may be missing
            known, release = library.amdsmi_get_rocm_version()
            rocm = ".".join(str(release).split(".")[:2]) if known else None
        return GpuDriver(self.vendor, version, rocm)

    def _device(self, gpu: Gpu) -> _AmdDevice:
        device = self._devices.get(gpu.uuid)
        if device is None:
            raise GpuFailed("lost", f"{gpu.uuid} is no longer present")
        return device

    def _throttle(self, calls: _AmdCalls, gpu: Gpu) -> Mapping[ThrottleReason, float]:
        """Seconds from the firmware's counters, which exist from MI300 on."""
        device, now = self._device(gpu), self._clock.monotonic()
        if now >= device.throttle_due and (metrics := calls.call(METRICS)) is not None:
            device.throttle_due = now + METRICS_INTERVAL_S
            if not device.throttle_time.update(table_value(metrics), now):
                device.unsupported_calls[METRICS] = "it has no throttling counters"
        return dict(device.throttle_time.seconds)

    def _calls(self, gpu: Gpu) -> _AmdCalls:
        return _AmdCalls(self._device(gpu))


def _load() -> ModuleType:
    """Load the package with its library; raises GpuUnavailable."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):  # it prints that its library is missing, and then fails
            import amdsmi  # lazy: costs time and memory, and most machines have no such GPU
    except AttributeError as error:
        raise GpuUnavailable("version_mismatch", f"amdsmi and its library have different versions: {error}") from error
    except (ImportError, OSError, KeyError) as error:
        raise GpuUnavailable("no_library", " ".join(output.getvalue().split()) or _error_text(error)) from error
    found: ModuleType = amdsmi
    return found


def _argument(library: ModuleType, argument: str | int) -> object:
    if isinstance(argument, int):
        return argument
    enum, _, member = argument.partition(".")
    return getattr(getattr(library, enum), member)


def _code(error: Exception) -> int | None:
    """Status of the library; None for exceptions of the package itself."""
    code = getattr(error, "err_code", None)
    return code if isinstance(code, int) else None


def _error_text(error: Exception) -> str:
    """Message of the status or exception."""
    return str(getattr(error, "err_info", None) or f"{type(error).__name__}: {error}")


def _process(entry: Mapping[str, object]) -> GpuProcess | None:
    """Process with its memory according to the driver, else to KFD."""
    pid, memory = entry.get("pid"), table_value(entry.get("memory_usage"))
    if not isinstance(pid, int) or not 0 < pid < 0xFFFFFFFF:
        return None
    return GpuProcess(pid, memory_bytes=count_value(memory.get("vram_mem")) or count_value(entry.get("mem")))
