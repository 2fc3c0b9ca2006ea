"""Processes on a GPU through NVML: memory and share of its time."""

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_uint, c_ulonglong
from typing import Any

from exporter.gpus.nvidia.calls import INSUFFICIENT_SIZE, NOT_FOUND, NvmlDevice
from exporter.gpus.records import GpuProcess

# PID_MAX_LIMIT. With a driver whose records are longer, wrong pids appear, such as 0 and 4294967295.
LARGEST_PID = 1 << 22
NOT_AVAILABLE = (1 << 64) - 1
TRIES = 4  # the list may grow between learning its length and reading it
FIRST_LENGTH = 16
FIRST_WINDOW_S = 5.0  # period of the first utilization reading, instead of everything the driver keeps
# Interval for graphics processes on a GPU without any: a list takes the driver milliseconds under its lock.
GRAPHICS_RETRY_S = 60.0


class _NvmlProcessV2(ctypes.Structure):
    """``nvmlProcessInfo_v2_t``, which version 3 also uses."""

    _fields_ = (("pid", c_uint), ("memory", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class _NvmlProcessV1(ctypes.Structure):
    """``nvmlProcessInfo_v1_t``."""

    _fields_ = (("pid", c_uint), ("memory", c_ulonglong))


class _NvmlUtilizationSample(ctypes.Structure):
    """``nvmlProcessUtilizationSample_t``; percent, and microseconds since 1970."""

    _fields_ = (
        ("pid", c_uint),
        ("time", c_ulonglong),
        ("sm", c_uint),
        ("memory", c_uint),
        ("encoder", c_uint),
        ("decoder", c_uint),
    )


class _ProcessList:
    """One list of processes, in the newest version that the driver supports."""

    def __init__(self, device: NvmlDevice, name: str) -> None:
        self._device = device
        forms = (f"{name}_v3", f"{name}_v2", name)
        self._name = next((form for form in forms if device.library.function(form) is not None), forms[0])
        self._record: type[ctypes.Structure] = _NvmlProcessV1 if self._name == name else _NvmlProcessV2
        self._records: Any = (self._record * FIRST_LENGTH)()
        self._count = c_uint()
        self._count_ref = byref(self._count)

    def read(self) -> list[tuple[int, int | None]] | None:
        """Pids and bytes; None if unavailable."""
        device, count = self._device, self._count
        for _ in range(TRIES):
            count.value = len(self._records)
            code = device.call(self._name, device.handle, self._count_ref, self._records)
            if code != INSUFFICIENT_SIZE:
                break
            self._records = (self._record * _next_length(len(self._records), count.value))()
        if code:
            return None
        records = (self._records[position] for position in range(min(count.value, len(self._records))))
        return [(p.pid, None if p.memory == NOT_AVAILABLE else p.memory) for p in records if 0 < p.pid <= LARGEST_PID]


class GpuProcessReader:
    """Processes on one GPU or MIG instance."""

    def __init__(self, device: NvmlDevice, *, shares: bool = True) -> None:
        """``shares``: whether to read shares of time, which MIG instances do not have."""
        self._device = device
        self._shares = shares
        self._compute = _ProcessList(device, "nvmlDeviceGetComputeRunningProcesses")
        self._mps = _ProcessList(device, "nvmlDeviceGetMPSComputeRunningProcesses")
        self._graphics = _ProcessList(device, "nvmlDeviceGetGraphicsRunningProcesses")
        self._graphics_due = float("-inf")
        self._samples = (_NvmlUtilizationSample * FIRST_LENGTH)()
        self._count = c_uint()
        self._last_sample_us: int | None = None

    def read(self, now: float, time: float) -> tuple[GpuProcess, ...] | None:
        """Return processes by pid; None if unavailable. ``now`` is monotonic, ``time`` is epoch seconds."""
        compute = self._compute.read()
        if compute is None:
            return None
        found: dict[int, GpuProcess] = {}
        for pid, memory in self._graphics_processes(now):
            found[pid] = GpuProcess(pid, memory, kind="graphics")
        for pid, memory in compute:
            found[pid] = GpuProcess(pid, _larger_memory(memory, found.get(pid)), kind="compute")
        for pid, memory in self._mps.read() or ():
            found[pid] = GpuProcess(pid, _larger_memory(memory, found.get(pid)), kind="mps")
        ratios = self._sm_ratios(time) if found and self._shares else None
        return tuple(
            GpuProcess(pid, p.memory_bytes, None if ratios is None else ratios.get(pid, 0.0), p.kind)
            for pid, p in sorted(found.items())
        )

    def _graphics_processes(self, now: float) -> list[tuple[int, int | None]]:
        if now < self._graphics_due:
            return []
        found = self._graphics.read() or []
        if not found:
            self._graphics_due = now + GRAPHICS_RETRY_S
        return found

    def _sm_ratios(self, time: float) -> dict[int, float] | None:
        """Shares of time by pid, without idle processes; None if unavailable."""
        device, count = self._device, self._count
        now_us = int(time * 1e6)
        if self._last_sample_us is None or self._last_sample_us > now_us:  # in the future: the clock was set back
            self._last_sample_us = now_us - int(FIRST_WINDOW_S * 1e6)
        seen = self._last_sample_us
        for _ in range(TRIES):
            count.value = len(self._samples)
            code = device.call(
                "nvmlDeviceGetProcessUtilization", device.handle, self._samples, byref(count), c_ulonglong(seen)
            )
            if code != INSUFFICIENT_SIZE:
                break
            self._samples = (_NvmlUtilizationSample * _next_length(len(self._samples), count.value))()
        if code == NOT_FOUND:
            return {}
        if code:
            return None
        newest: dict[int, tuple[int, float]] = {}
        for pid, moment, percent in self._valid_samples(seen):
            if moment >= newest.get(pid, (0, 0.0))[0]:
                newest[pid] = moment, percent / 100
            self._last_sample_us = max(self._last_sample_us, moment)
        return {pid: ratio for pid, (_, ratio) in newest.items()}

    def _valid_samples(self, since_us: int) -> Iterator[tuple[int, int, int]]:
        """Valid samples: some drivers also return old ones, and values above 100."""
        for position in range(min(self._count.value, len(self._samples))):
            sample = self._samples[position]
            if sample.time > since_us and sample.sm <= 100 and 0 < sample.pid <= LARGEST_PID:
                yield sample.pid, sample.time, sample.sm


def _next_length(length: int, needed: int) -> int:
    """New length for a list that was too short, with room for processes that start before the next call."""
    return max(2 * length, min(needed, LARGEST_PID) + FIRST_LENGTH)


def _larger_memory(memory: int | None, other: GpuProcess | None) -> int | None:
    """The larger memory of a process on two lists. Both report all its memory."""
    known = None if other is None else other.memory_bytes
    return memory if known is None else max(known, memory or 0)
