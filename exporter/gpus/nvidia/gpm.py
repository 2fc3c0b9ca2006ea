"""Activity of the parts of a GPU, from two samples of its performance monitors (GPM, Hopper and later)."""

from ctypes import byref
from struct import Struct

from exporter.gpus.nvidia.calls import NOT_SUPPORTED, PERMANENT, SUCCESS, Handle, NvmlDevice

LEAST_APART_S = 0.1  # between two samples
PERCENT, MIB = 100.0, 1 / (1 << 20)
METRIC = Struct("@IId24x")  # `nvmlGpmMetric_t`: number, return code and value; ctypes attributes are slow
METRICS = (
    (2, "sm_activity_ratio", PERCENT),
    (5, "tensor_activity_ratio", PERCENT),
    (10, "dram_activity_ratio", PERCENT),
    (60, "nvlink_rx_bytes_per_s", MIB),
    (61, "nvlink_tx_bytes_per_s", MIB),
    (20, "pcie_tx_bytes_per_s", MIB),
    (21, "pcie_rx_bytes_per_s", MIB),
)  # number, our name, divisor


class GpmReader:
    """Activity of one GPU or MIG instance between the last two readings."""

    def __init__(self, device: NvmlDevice, gpu_handle: "Handle | None" = None, instance: int | None = None) -> None:
        """``gpu_handle``, ``instance``: for a MIG instance, the handle of its GPU and its number."""
        self._device = device
        self._gpu_handle = gpu_handle or device.handle
        self._instance = instance
        self._samples: list[Handle] = []
        self._sampled_at: float | None = None
        self._values: dict[str, float] = {}
        self._metrics: tuple[tuple[int, str, float], ...] = METRICS
        nvml = device.library.nvml
        self._request = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION)
        self._supported: bool | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether there are no values yet, but may be at the next reading."""
        return self._supported is not False and bool(self._metrics) and not self._values

    def gives(self, name: str) -> bool:
        """Whether the GPU has this value, which single readings may lack, like the first."""
        return self._supported is not False and any(known == name for _, known, _ in self._metrics)

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
            failed = self._device.direct("nvmlGpmSampleGet", self._gpu_handle, before)
        else:
            failed = self._device.direct("nvmlGpmMigSampleGet", self._gpu_handle, self._instance, before)
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

    def _activity_between(self, sample1: Handle, sample2: Handle) -> dict[str, float]:
        request = self._request
        request.sample1, request.sample2, request.numMetrics = sample1, sample2, len(self._metrics)
        for place, (number, _, _) in enumerate(self._metrics):
            METRIC.pack_into(request.metrics, place * METRIC.size, number, SUCCESS, 0.0)
        if not self._metrics or self._device.direct("nvmlGpmMetricsGet", byref(request)):
            return {}
        found: dict[str, float] = {}
        answers = METRIC.iter_unpack(request.metrics)
        for (number, name, divisor), (_, code, value) in zip(self._metrics, answers, strict=False):
            if code == SUCCESS:
                if 0 <= value < float("inf"):  # a sleeping GPU may return NaN
                    found[name] = min(value / divisor, 1.0) if divisor == PERCENT else value / divisor
            elif code in PERMANENT:
                self._metrics = tuple(other for other in self._metrics if other[0] != number)
                self._device.unsupported_calls["nvmlGpmMetricsGet", number] = code
            else:
                self._device.record_failure(code)
        return found

    def _set_up(self) -> None:
        device = self._device
        code, support = device.call("nvmlGpmQueryDeviceSupport", self._gpu_handle)
        if code and code not in PERMANENT:
            return  # try again at the next reading
        if code or not support.isSupportedDevice:
            device.unsupported_calls["nvmlGpmQueryDeviceSupport"] = code or NOT_SUPPORTED
            self._supported = False
            return
        while len(self._samples) < 2:
            code, sample = device.call("nvmlGpmSampleAlloc")
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
