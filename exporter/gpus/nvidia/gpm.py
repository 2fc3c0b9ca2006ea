"""Activity of the parts of a GPU, from two samples of its performance monitors (GPM, Hopper and later)."""

import ctypes
from ctypes import byref, c_char_p, c_double, c_uint, c_void_p

from exporter.gpus.nvidia.calls import NOT_SUPPORTED, PERMANENT, SUCCESS, NvmlDevice

LEAST_APART_S = 0.1  # between two samples
PERCENT, MIB = 100.0, 1 / (1 << 20)
METRICS = (
    (2, "sm_activity_ratio", PERCENT),
    (5, "tensor_activity_ratio", PERCENT),
    (10, "dram_activity_ratio", PERCENT),
    (60, "nvlink_rx_bytes_per_s", MIB),
    (61, "nvlink_tx_bytes_per_s", MIB),
    (20, "pcie_tx_bytes_per_s", MIB),
    (21, "pcie_rx_bytes_per_s", MIB),
)  # number, our name, divisor


class _NvmlGpmMetric(ctypes.Structure):
    """``nvmlGpmMetric_t``."""

    _fields_ = (
        ("id", c_uint),
        ("code", c_uint),
        ("value", c_double),
        ("short_name", c_char_p),
        ("long_name", c_char_p),
        ("unit", c_char_p),
    )


class _NvmlGpmMetricsGet(ctypes.Structure):
    """``nvmlGpmMetricsGet_t``. Its array grew over versions, but the library reads only ``count`` metrics."""

    _fields_ = (
        ("version", c_uint),
        ("count", c_uint),
        ("sample1", c_void_p),
        ("sample2", c_void_p),
        ("metrics", _NvmlGpmMetric * len(METRICS)),
    )


class _NvmlGpmSupport(ctypes.Structure):
    """``nvmlGpmSupport_t``."""

    _fields_ = (("version", c_uint), ("supported", c_uint))


class GpmReader:
    """Activity of one GPU or MIG instance between the last two readings."""

    def __init__(self, device: NvmlDevice, gpu_handle: c_void_p | None = None, instance: int | None = None) -> None:
        """``gpu_handle``, ``instance``: for a MIG instance, the handle of its GPU and its number."""
        self._device = device
        self._gpu_handle = gpu_handle or device.handle
        self._instance = instance
        self._samples: list[c_void_p] = []
        self._sampled_at: float | None = None
        self._values: dict[str, float] = {}
        self._metrics: tuple[tuple[int, str, float], ...] = METRICS
        self._request = _NvmlGpmMetricsGet(version=1)
        self._supported: bool | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether there are no values yet, but may be at the next reading."""
        return self._supported is not False and bool(self._metrics) and not self._values

    def read(self, now: float) -> dict[str, float]:
        """Ratios and bytes per second by name; ``now`` in monotonic seconds. Empty at the first reading."""
        if self._supported is None:
            self._set_up()
        if not self._supported:
            return {}
        if self._sampled_at is not None and now - self._sampled_at < LEAST_APART_S:
            return self._values
        before, latest = self._samples
        if self._instance is None:
            failed = self._device.call("nvmlGpmSampleGet", self._gpu_handle, before)
        else:
            failed = self._device.call("nvmlGpmMigSampleGet", self._gpu_handle, self._instance, before)
        if failed:
            self._values = {}
            if failed in PERMANENT:
                self._supported = False
            return {}
        self._samples = [latest, before]
        known = self._sampled_at is not None
        self._sampled_at = now
        self._values = self._activity_between(latest, before) if known else {}
        return self._values

    def _activity_between(self, sample1: c_void_p, sample2: c_void_p) -> dict[str, float]:
        request = self._request
        request.sample1, request.sample2, request.count = sample1, sample2, len(self._metrics)
        for metric, (number, _, _) in zip(request.metrics, self._metrics, strict=False):
            metric.id = number
        if not self._metrics or self._device.call("nvmlGpmMetricsGet", byref(request)):
            return {}
        found: dict[str, float] = {}
        for metric, (number, name, divisor) in zip(request.metrics, self._metrics, strict=False):
            if metric.code == SUCCESS:
                value = metric.value / divisor
                if 0 <= value < float("inf"):  # a sleeping GPU may return NaN
                    found[name] = min(value, 1.0) if divisor == PERCENT else value
            elif metric.code in PERMANENT:
                self._metrics = tuple(other for other in self._metrics if other[0] != number)
                self._device.unsupported_calls["nvmlGpmMetricsGet", number] = metric.code
            else:
                self._device.record_failure(metric.code)
        return found

    def _set_up(self) -> None:
        device, support = self._device, _NvmlGpmSupport(version=1)
        code = device.call("nvmlGpmQueryDeviceSupport", self._gpu_handle, byref(support))
        if code and code not in PERMANENT:
            return  # try again at the next reading
        if code or not support.supported:
            device.unsupported_calls["nvmlGpmQueryDeviceSupport"] = code or NOT_SUPPORTED
            self._supported = False
            return
        while len(self._samples) < 2:
            sample = c_void_p()
            code = device.call("nvmlGpmSampleAlloc", byref(sample))
            if code:
                self._supported = False if code in PERMANENT else None
                return
            self._samples.append(sample)
        self._supported = True

    def free(self) -> None:
        """Free the samples."""
        samples, self._samples, self._supported = self._samples, [], False
        for sample in samples:
            self._device.call("nvmlGpmSampleFree", sample)
