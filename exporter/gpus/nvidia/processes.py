"""Processes on a GPU through NVML: memory and share of its time."""

from ctypes import byref, c_uint, c_ulonglong, create_string_buffer
from itertools import islice
from struct import Struct

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


# Records, each of which begins with the pid.
PROCESS_V1 = Struct("@IQ")  # `nvmlProcessInfo_v1_t`: bytes of memory
PROCESS_V2 = Struct("@IQ8x")  # `nvmlProcessInfo_v2_t`, which version 3 also uses: bytes of memory
SAMPLE = Struct("@IQI12x")  # `nvmlProcessUtilizationSample_t`: microseconds since 1970, percent of the SMs' time


class _RecordList:
    """Records that one call writes into a buffer, which grows with them."""

    def __init__(self, device: NvmlDevice, name: str, record: Struct) -> None:
        self._device, self._name, self._record = device, name, record
        self._buffer = create_string_buffer(FIRST_LENGTH * record.size)
        self._count = c_uint()
        self._count_ref = byref(self._count)

    def read(self, since_us: int | None = None) -> tuple[int, list[tuple[int, ...]]]:
        """Return code and records. ``since_us``: argument of the call for samples, whose buffer comes first."""
        device, count = self._device, self._count
        for _ in range(TRIES):
            count.value = length = len(self._buffer) // self._record.size
            if since_us is None:
                code = device.direct(self._name, device.handle, self._count_ref, self._buffer)
            else:
                code = device.direct(self._name, device.handle, self._buffer, self._count_ref, c_ulonglong(since_us))
            if code != INSUFFICIENT_SIZE:
                break
            # Room for processes that start before the next call.
            length = max(2 * length, min(count.value, LARGEST_PID) + FIRST_LENGTH)
            self._buffer = create_string_buffer(length * self._record.size)
        records = () if code else islice(self._record.iter_unpack(self._buffer), count.value)
        return code, [record for record in records if 0 < record[0] <= LARGEST_PID]


class _ProcessList:
    """One list of processes, in the newest version that the driver supports."""

    def __init__(self, device: NvmlDevice, name: str) -> None:
        forms = (f"{name}_v3", f"{name}_v2", name)
        form = next((form for form in forms if device.library.function(form) is not None), forms[0])
        self._list = _RecordList(device, form, PROCESS_V1 if form == name else PROCESS_V2)

    def read(self) -> list[tuple[int, int | None]] | None:
        """Pids and bytes; None if unavailable."""
        code, records = self._list.read()
        if code:
            return None
        return [(pid, None if memory == NOT_AVAILABLE else memory) for pid, memory in records]


class GpuProcessReader:
    """Processes on one GPU or MIG instance."""

    def __init__(self, device: NvmlDevice, *, shares: bool = True) -> None:
        """``shares``: whether to read shares of time, which MIG instances do not have."""
        self._shares = shares
        self._compute = _ProcessList(device, "nvmlDeviceGetComputeRunningProcesses")
        self._mps = _ProcessList(device, "nvmlDeviceGetMPSComputeRunningProcesses")
        self._graphics = _ProcessList(device, "nvmlDeviceGetGraphicsRunningProcesses")
        self._graphics_due = float("-inf")
        self._samples = _RecordList(device, "nvmlDeviceGetProcessUtilization", SAMPLE)
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
        now_us = int(time * 1e6)
        if self._last_sample_us is None or self._last_sample_us > now_us:  # in the future: the clock was set back
            self._last_sample_us = now_us - int(FIRST_WINDOW_S * 1e6)
        since_us = self._last_sample_us
        code, samples = self._samples.read(since_us)
        if code == NOT_FOUND:
            return {}
        if code:
            return None
        newest: dict[int, tuple[int, float]] = {}
        for pid, moment, percent in samples:
            if moment <= since_us or percent > 100:
                continue  # some drivers also return old samples, and values above 100
            if moment >= newest.get(pid, (0, 0.0))[0]:
                newest[pid] = moment, percent / 100
            self._last_sample_us = max(self._last_sample_us, moment)
        return {pid: ratio for pid, (_, ratio) in newest.items()}


def _larger_memory(memory: int | None, other: GpuProcess | None) -> int | None:
    """The larger memory of a process on two lists. Both report all its memory."""
    known = None if other is None else other.memory_bytes
    return memory if known is None else max(known, memory or 0)
