"""Values read from GPUs, in base units, and the ``GpuReader`` protocol for one vendor's library.

None means that the device or driver does not report a value; it is never replaced by 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Literal, Protocol

from exporter.contract.lazy_dataclass import dataclass

# Reasons for reduced clocks. From NVML: software power cap, software and hardware thermal slowdown, power brake of the
# board, and a group of boards that run at one clock.
ThrottleReason = Literal["power_cap", "thermal", "hw_thermal", "hw_power_brake", "sync_boost"]
THROTTLE_REASONS: tuple[ThrottleReason, ...] = ("power_cap", "thermal", "hw_thermal", "hw_power_brake", "sync_boost")

# Action that the driver requests before the GPU can be used again.
RecoveryAction = Literal["none", "reset", "reboot", "drain_p2p", "drain_and_reset"]

# Whether GPUs can be read; no library or driver is ordinary on a machine without GPUs.
DriverState = Literal["ok", "no_library", "no_driver", "no_permission", "version_mismatch", "failing", "hanging"]

# Fallen off the bus; readable only after a reset; or a call hangs.
DeviceState = Literal["ok", "lost", "reset_required", "hanging"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of it."""

    uuid: str  # `GPU-...` or `MIG-...`; never changes and is the same for all processes
    index: str  # position among the visible GPUs; for a MIG instance `0:1`, GPU and MIG device
    vendor: str
    name: str = ""
    pci_bus_id: str | None = None  # such as `0000:3b:00.0`, lower case; a MIG instance has that of its GPU
    parent: str | None = None  # UUID of the GPU of a MIG instance
    gpu_instance: int | None = None  # of a MIG instance; several instances may share one GPU instance
    mig: bool = False  # whether a GPU is divided, so that processes use only its instances
    persistence: bool | None = None
    memory_total_bytes: int | None = None

    @property
    def title(self) -> str:
        """Name of the GPU for people."""
        return f"GPU {self.index} ({self.uuid})"


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """Activity of a GPU, read every second. Slow values may be some seconds older."""

    utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_average_w: float | None = None
    power_instant_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    # Seconds since the driver was loaded, or since the reader started if the driver reports only states.
    throttle_s: Mapping[ThrottleReason, float] = field(default_factory=dict)
    sm_activity_ratio: float | None = None
    tensor_activity_ratio: float | None = None
    dram_activity_ratio: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    has_nvlink_rate: bool = False  # whether the driver gives these two, though perhaps not at this reading
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None

    @property
    def busy_ratio(self) -> float | None:
        """Utilization, or SM activity for a MIG instance, which has no utilization."""
        return self.utilization_ratio if self.utilization_ratio is not None else self.sm_activity_ratio

    @property
    def power_w(self) -> float | None:
        """Average power, or else that of the moment."""
        return self.power_instant_w if self.power_average_w is None else self.power_average_w


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process on a GPU, with the pid that the driver reports."""

    pid: int
    memory_bytes: int | None = None
    sm_ratio: float | None = None  # share of the GPU's time in which a kernel of it ran, in the last seconds
    kind: Literal["compute", "graphics", "mps"] = "compute"


@dataclass(frozen=True, slots=True)
class GpuCondition:
    """Condition of a GPU: counters of faults and links, once a minute."""

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None  # both since the driver was loaded (volatile)
    rows_remapped_corrected: int | None = None
    rows_remapped_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failure: bool | None = None
    pages_retired_corrected: int | None = None
    pages_retired_uncorrected: int | None = None  # single-bit and double-bit, on GPUs before Ampere
    pages_pending: bool | None = None
    recovery_action: RecoveryAction | None = None
    pcie_replays: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlink_rx_bytes: int | None = None
    nvlink_tx_bytes: int | None = None
    nvlink_errors: int | None = None
    fan_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An error that the driver reported (NVIDIA's Xid)."""

    uuid: str
    xid: int
    time: float  # epoch seconds of the report; the driver gives no time
    pid: int | None = None  # from the kernel log, if it names a process
    gpu_instance: int | None = None  # the part with the error (`Gpu.gpu_instance`), if only one is affected


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """Driver of the GPUs, with versions as the vendor writes them; CUDA or ROCm as ``12.8``."""

    vendor: str
    version: str | None = None
    cuda_version: str | None = None


class GpuUnavailable(Exception):
    """No GPUs can be read; carries a ``DriverState`` and the library's message."""

    def __init__(self, state: DriverState, message: str) -> None:
        super().__init__(message)
        self.state: DriverState = state


class GpuFailed(Exception):
    """One device cannot be read: it is lost or needs a reset."""

    def __init__(self, state: DeviceState, message: str) -> None:
        super().__init__(message)
        self.state: DeviceState = state


class GpuDriverReplaced(Exception):
    """The driver was unloaded or replaced. The library must be reopened, possibly by a new process."""


class GpuReader(Protocol):
    """A vendor's library. Every call may block or never return; one thread calls at a time.

    Unsupported calls are found once and not repeated. A call about a device raises GpuFailed if that device is at
    fault. Any call raises GpuDriverReplaced if the library is no longer usable.
    """

    vendor: str

    def open(self) -> GpuDriver:
        """Load the library; raises GpuUnavailable."""
        ...

    def gpus(self) -> tuple[Gpu, ...]:
        """Visible GPUs, each followed by its MIG instances. A GPU lost later stays in the list."""
        ...

    def activity(self, gpu: Gpu) -> GpuActivity: ...

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        """Processes on a GPU; None if the driver does not list them."""
        ...

    def condition(self, gpu: Gpu) -> GpuCondition: ...

    def wait_event(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        """Errors since the previous call, waiting at most ``timeout_s``. Called on a separate thread."""
        ...

    def reports_events(self) -> bool:
        """Whether errors of at least one GPU are reported; True until known.

        Any thread may ask, and it never blocks.
        """
        ...

    def unsupported_calls(self) -> Mapping[str, str]:
        """Unsupported calls by name, with the reason as text."""
        ...

    def close(self) -> None:
        """Close the library."""
        ...


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one reading: the last value of each part, with epoch seconds where they matter."""

    gpu: Gpu
    state: DeviceState = "ok"
    message: str | None = None  # the driver's message if the state is not ok
    activity: GpuActivity | None = None
    processes: tuple[GpuProcess, ...] | None = None  # None if not read yet or unavailable
    processes_time: float | None = None
    condition: GpuCondition | None = None
    condition_time: float | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All GPUs visible to this process, at one time."""

    time: float
    state: DriverState
    message: str | None = None
    driver: GpuDriver | None = None
    gpus: tuple[GpuState, ...] = ()
    events: tuple[GpuEvent, ...] = ()  # since the reader started, oldest first, at most the last thousand
    unsupported_calls: Mapping[str, str] = field(default_factory=dict)
    is_driver_replaced: bool = False  # whether the driver was replaced; a new process may be able to read it
    is_ready: bool = True  # false until the driver has listed its GPUs, or reported that there are none
    reports_events: bool = False  # whether the driver reports errors of at least one GPU


@dataclass(frozen=True, slots=True)
class XidCount:
    """Count of one Xid on a GPU since the start of the job, and its last time."""

    count: int
    last: float


@dataclass(frozen=True, slots=True)
class GpuEntry:
    """One GPU of the job, with values beyond the reading itself."""

    state: GpuState
    job_memory_errors: Mapping[str, int] = field(default_factory=dict)  # since the start of the job, by type
    xids: Mapping[int, XidCount] = field(default_factory=dict)  # by code
    utilization_mean_ratio: float | None = None
    seen_s: float | None = None  # time with a known utilization
    idle_s: float | None = None  # of that time
    memory_peak_bytes: int | None = None
    energy_job_j: float | None = None


@dataclass(frozen=True, slots=True)
class JobGpus:
    """The last reading of all GPUs of the node, and which of them are the job's."""

    reading: GpuReading | None = None  # None before the first, and for a job without GPUs on this node
    positions: Mapping[int, str] = field(default_factory=dict)  # UUIDs of the job's GPUs by position in the plan
    # Lost GPUs, or those that need a reset, by UUID: when first seen, and the driver's text
    lost: Mapping[str, tuple[float, str]] = field(default_factory=dict)


def unsupported_texts(found: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Reasons by call, with the GPUs. ``found``: call, reason and index of a GPU."""
    places: dict[str, dict[str, list[str]]] = {}
    for call, reason, index in found:
        places.setdefault(call, {}).setdefault(reason, []).append(index)
    return {
        call: "; ".join(f"{reason} (GPU {', '.join(indices)})" for reason, indices in reasons.items())
        for call, reasons in places.items()
    }


GIB = 1 << 30
# Phrases that follow the name of a device.
STATE_TEXT = {"lost": "is lost", "reset_required": "needs a reset", "hanging": "does not answer"}
