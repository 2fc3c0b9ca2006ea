"""Activity of a GPU through NVML: cheap calls every second, slow values every five seconds."""

from ctypes import byref, c_uint, c_ulonglong

from exporter.gpus.nvidia.calls import Handle, NvmlDevice, NvmlFieldReader
from exporter.gpus.nvidia.gpm import GpmReader
from exporter.gpus.records import THROTTLE_REASONS, GpuActivity, GpuFailed, ThrottleReason

CLOCK_SM, CLOCK_MEMORY = 1, 2
SENSOR_GPU = 0
MEMORY_V2, TEMPERATURE_V1 = 0x02000028, 0x0100000C  # versions of structures, which contain their sizes
# Longest time between readings of temperature, memory clock and performance monitors. Each needs extra calls.
SLOW_EVERY_S = 5.0
LATE_TOLERANCE_S = 0.3  # tolerance for readings that come late
LIMIT_EVERY_S = 60.0  # the limit changes only by hand
LONGEST_GAP_S = 10.0  # longest gap between readings that is counted with the state at its end

THERMAL_POLICY = "thermal_policy"
FIELDS = {
    "power_average": (185, 0),
    "power_instant": (186, 0),
    "memory_temperature": (82, 0),
    "energy": (83, 0),
    "power_cap": (74, 0),
    "sync_boost": (76, 0),
    "thermal": (269, 0),
    "hw_thermal": (270, 0),
    "hw_power_brake": (271, 0),
    THERMAL_POLICY: (75, 0),
}  # throttle times are in nanoseconds; older drivers have only the thermal policy for heat

HW_SLOWDOWN = 0x8
REASON_BITS: dict[ThrottleReason, int] = {
    "power_cap": 0x4,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
# Compute capability above that of GA100 (8.0), from which ``nvmlDeviceGetPowerUsage`` is an average over a second.
AVERAGES_POWER = (8, 6)


class GpuActivityReader:
    """Activity of one GPU. Values that change slowly are repeated between their readings."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._memory = GpuMemoryReader(device)
        self._utilization = (c_uint * 2)()  # `nvmlUtilization_t`: percent of the GPU and of its memory
        self._utilization_ref = byref(self._utilization)
        self._fields = NvmlFieldReader(device, FIELDS)
        self._is_set_up = False
        self._has_power_fields = False
        self._counters: list[tuple[ThrottleReason, str]] = []  # reasons with a time counter, and its field
        self._states: list[ThrottleReason] = []  # reasons with only a state
        self._capability: tuple[int, int] | None = None
        self._limit_w: float | None = None
        self._limit_due = float("-inf")
        self._throttle_s: dict[ThrottleReason, float] = {}
        self._reasons_read_at: float | None = None
        self._read_at: float | None = None
        self._slow_at: float | None = None  # last complete reading of the slow values; None if the last was incomplete
        self._slow: dict[str, float | None] = {}
        self.gpm = GpmReader(device)

    def read(self, now: float) -> GpuActivity:
        """Return the activity; ``now`` in monotonic seconds. Raises GpuFailed if no call succeeds."""
        device = self._device
        answers, refusals = device.answers, device.failures
        found = self._read(now)
        if device.answers == answers and device.failures > refusals:
            raise GpuFailed("lost", device.library.error_text(device.last_failure_code))
        return found

    def _read(self, now: float) -> GpuActivity:
        device = self._device
        utilization = self._utilization
        used = not device.direct("nvmlDeviceGetUtilizationRates", device.handle, self._utilization_ref)
        memory_used, memory_total = self._memory.read()
        if not self._is_set_up:
            self._find_supported_fields()
        fields = self._fields.read()
        if self._has_power_fields:
            average, instant = _thousandth(fields.get("power_average")), _thousandth(fields.get("power_instant"))
        else:
            average, instant = self._read_power()
        energy = fields.get("energy")
        if energy is None:
            energy = device.long("nvmlDeviceGetTotalEnergyConsumption")
        slow = self._slow_values(now, used=used)
        return GpuActivity(
            utilization_ratio=utilization[0] / 100 if used else None,
            memory_utilization_ratio=utilization[1] / 100 if used else None,
            memory_used_bytes=memory_used,
            memory_total_bytes=memory_total,
            power_average_w=average,
            power_instant_w=instant,
            power_limit_w=self._limit_w if now < self._limit_due else self._read_power_limit(now),
            energy_j=_thousandth(energy),
            memory_temperature_c=fields.get("memory_temperature") or None,  # a GPU in use is never at 0
            sm_clock_hz=_millions(device.number("nvmlDeviceGetClockInfo", CLOCK_SM)),
            throttle_s=self._throttle_times(fields, now),
            has_nvlink_rate=self.gpm.gives("nvlink_rx_bytes_per_s"),
            **slow,
        )

    def _slow_values(self, now: float, *, used: bool) -> dict[str, float | None]:
        """Slow values. If utilization is unavailable (not ``used``), SM activity replaces it and is read each time."""
        before, self._read_at = self._read_at, now
        if before is not None and self._slow_at is not None and used:
            next_look = now + (now - before) - LATE_TOLERANCE_S
            if next_look <= self._slow_at + SLOW_EVERY_S:
                return self._slow
        self._slow, self._slow_at = {}, None
        self._slow = {
            "temperature_c": self._read_temperature(),
            "memory_clock_hz": _millions(self._device.number("nvmlDeviceGetClockInfo", CLOCK_MEMORY)),
            **self.gpm.read(now),
        }
        if not self.gpm.is_warming_up:
            self._slow_at = now
        return self._slow

    def _read_power(self) -> tuple[float | None, float | None]:
        """Average and instant power, for a driver without these fields."""
        watts = _thousandth(self._device.number("nvmlDeviceGetPowerUsage"))
        if watts is None:
            return None, None
        if self._capability is None:
            self._capability = self._device.value("nvmlDeviceGetCudaComputeCapability") or (0, 0)
        return (watts, None) if self._capability >= AVERAGES_POWER else (None, watts)

    def _read_power_limit(self, now: float) -> float | None:
        self._limit_w = _thousandth(self._device.number("nvmlDeviceGetEnforcedPowerLimit"))
        self._limit_due = now + LIMIT_EVERY_S
        return self._limit_w

    def _read_temperature(self) -> float | None:
        if self._device.library.function("nvmlDeviceGetTemperature") is not None:
            return self._device.number("nvmlDeviceGetTemperature", SENSOR_GPU)
        found = (c_uint * 3)(TEMPERATURE_V1, SENSOR_GPU)  # `nvmlTemperature_v1_t`: version, sensor, degrees
        return None if self._device.direct("nvmlDeviceGetTemperatureV", self._device.handle, byref(found)) else found[2]

    def _find_supported_fields(self) -> None:
        """Find out which fields the device supports."""
        readable = self._fields.readable_fields()
        if "thermal" in readable:
            self._fields.drop(THERMAL_POLICY)
        self._has_power_fields = not readable.isdisjoint(("power_average", "power_instant"))
        for reason in THROTTLE_REASONS:
            name = THERMAL_POLICY if reason == "thermal" and reason not in readable else reason
            if name in readable:
                self._counters.append((reason, name))
            else:
                self._states.append(reason)
        self._is_set_up = True

    def _throttle_times(self, fields: dict[str, float], now: float) -> dict[ThrottleReason, float]:
        found = {reason: fields[name] / 1e9 for reason, name in self._counters if name in fields}
        if self._states:
            self._accumulate(self._states, now)
            found.update(self._throttle_s)
        return found

    def _accumulate(self, reasons: list[ThrottleReason], now: float) -> None:
        """Add the time since the last reading to the reasons that are active now."""
        device = self._device
        newer = device.library.function("nvmlDeviceGetCurrentClocksEventReasons") is not None
        mask = device.long(
            "nvmlDeviceGetCurrentClocksEventReasons" if newer else "nvmlDeviceGetCurrentClocksThrottleReasons"
        )
        last_read_at, self._reasons_read_at = self._reasons_read_at, now
        if mask is None:
            return
        elapsed_s = 0.0 if last_read_at is None else min(now - last_read_at, LONGEST_GAP_S)
        if mask & HW_SLOWDOWN and not mask & (REASON_BITS["hw_thermal"] | REASON_BITS["hw_power_brake"]):
            mask |= REASON_BITS["hw_thermal"]  # older drivers do not specify which
        for reason in reasons:
            held = elapsed_s if mask & REASON_BITS[reason] else 0.0
            self._throttle_s[reason] = self._throttle_s.get(reason, 0.0) + held


class MigActivityReader:
    """Activity of one MIG instance: memory and performance monitors. Other values exist only for the whole GPU."""

    def __init__(self, device: NvmlDevice, gpu_handle: Handle, instance: int | None) -> None:
        self._memory = GpuMemoryReader(device)
        self.gpm = None if instance is None else GpmReader(device, gpu_handle, instance)

    def read(self, now: float) -> GpuActivity:
        """Return the activity; ``now`` in monotonic seconds."""
        used, total = self._memory.read()
        parts = {} if self.gpm is None else self.gpm.read(now)
        has_rate = self.gpm is not None and self.gpm.gives("nvlink_rx_bytes_per_s")
        return GpuActivity(
            memory_used_bytes=used, memory_total_bytes=total, throttle_s={}, has_nvlink_rate=has_rate, **parts
        )


class GpuMemoryReader:
    """Used and total memory of a GPU or MIG instance.

    Used is memory of programs, as in ``nvidia-smi``; before driver 510 it includes the driver's own.
    """

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        newer = device.library.function("nvmlDeviceGetMemoryInfo_v2") is not None
        self._name = "nvmlDeviceGetMemoryInfo_v2" if newer else "nvmlDeviceGetMemoryInfo"
        # `nvmlMemory_v2_t`: version, total, reserved, free, used; `nvmlMemory_t`: total, free, used.
        self._memory = (c_ulonglong * 5)(MEMORY_V2) if newer else (c_ulonglong * 3)()
        self._total = 1 if newer else 0
        self._memory_ref = byref(self._memory)

    def read(self) -> tuple[int | None, int | None]:
        """Used and total bytes; None for a device without its own memory."""
        if self._device.direct(self._name, self._device.handle, self._memory_ref):
            return None, None
        return self._memory[-1], self._memory[self._total]


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


def _millions(value: int | None) -> float | None:
    return None if value is None else value * 1e6
