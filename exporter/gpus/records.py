"""What is read of GPUs, in base units, and who reads it: one ``GpuReader`` for each vendor's library.

None of a value means that this device or driver does not tell it; it is never 0 in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

ThrottleReason = Literal["power_cap", "thermal", "hw_thermal", "hw_power_brake", "sync_boost"]
"""Why clocks are held down: NVML's software power cap, software and hardware thermal slowdown, the power brake of the
board, and the group of boards that run at one clock."""
THROTTLE_REASONS: tuple[ThrottleReason, ...] = ("power_cap", "thermal", "hw_thermal", "hw_power_brake", "sync_boost")

RecoveryAction = Literal["none", "reset", "reboot", "drain_p2p", "drain_and_reset"]
"""What the driver asks for before the GPU can be used again."""

DriverState = Literal["ok", "no_library", "no_driver", "no_permission", "version_mismatch", "failing", "hanging"]
"""Whether GPUs can be read at all. Without a library or a driver there are none, which is ordinary."""

DeviceState = Literal["ok", "lost", "reset_required", "hanging"]
"""Fallen off the bus; readable only after a reset; or a call about it has not come back."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of it: a unit that a process can be given alone."""

    uuid: str  # `GPU-...` or `MIG-...`; never changes, and is the same for everybody
    index: str  # position among those that this process sees; of a MIG instance `0:1`, GPU and MIG device
    vendor: str
    name: str = ""
    pci_bus_id: str | None = None  # `0000:3b:00.0` in lower case; of a MIG instance that of its GPU
    parent: str | None = None  # of a MIG instance the UUID of its GPU
    gpu_instance: int | None = None
    """Of a MIG instance the number of the part of its GPU that it has, alone or with other instances."""
    mig: bool = False  # of a GPU: whether it is divided, and has nothing that processes use but its instances
    persistence: bool | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What a GPU does at one moment: cheap to read, each second; what changes slowly may be some seconds older."""

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
    throttle_s: Mapping[ThrottleReason, float] = field(default_factory=dict)
    """Time with clocks held down since the driver was loaded, or since the reader began where only states are told."""
    sm_activity_ratio: float | None = None
    tensor_activity_ratio: float | None = None
    dram_activity_ratio: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None

    @property
    def busy_ratio(self) -> float | None:
        """Utilization, or of a MIG instance, which tells none, the activity of its multiprocessors."""
        return self.utilization_ratio if self.utilization_ratio is not None else self.sm_activity_ratio


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process on a GPU, its pid as the driver tells it."""

    pid: int
    memory_bytes: int | None = None
    sm_ratio: float | None = None  # share of the GPU's time in which a kernel of it ran, in the last seconds
    kind: Literal["compute", "graphics", "mps"] = "compute"


@dataclass(frozen=True, slots=True)
class GpuCondition:
    """How a GPU is: counters of faults and links, once a minute."""

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded (volatile)
    rows_remapped_corrected: int | None = None
    rows_remapped_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failure: bool | None = None
    pages_retired_corrected: int | None = None
    pages_retired_uncorrected: int | None = None  # Single-bit and double-bit; of GPUs before Ampere
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
    """An error that the driver has told of (NVIDIA's Xid)."""

    uuid: str
    xid: int
    time: float  # epoch seconds at which it was told; the driver gives no time of its own
    pid: int | None = None  # of the process that it names, as the kernel's log does
    gpu_instance: int | None = None
    """Of a GPU that is divided the part that has it (``Gpu.gpu_instance``), where one alone does."""


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """What reads the GPUs: versions as the vendor writes them, CUDA's (ROCm's) as ``12.8``."""

    vendor: str
    version: str | None = None
    cuda_version: str | None = None


class GpuUnavailable(Exception):
    """There is nothing to read GPUs with: why, in the words of ``DriverState`` and of the library."""

    def __init__(self, state: DriverState, words: str) -> None:
        super().__init__(words)
        self.state: DriverState = state


class GpuFailed(Exception):
    """One device cannot be read: it is lost, or needs a reset."""

    def __init__(self, state: DeviceState, words: str) -> None:
        super().__init__(words)
        self.state: DeviceState = state


class GpuDriverReplaced(Exception):
    """The driver was unloaded or replaced under us: the library must be opened anew, if need be by a new process."""


class GpuReader(Protocol):
    """A vendor's library. Every call may block, may never return, and comes from one thread at a time.

    What a device or a driver cannot tell is found out once, and not asked for again. A call about a device raises
    GpuFailed when that device is at fault, DriverReplaced when the library can no longer be used.
    """

    vendor: str

    def open(self) -> GpuDriver:
        """Load the library and begin; raises GpuUnavailable."""
        ...

    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that this process sees, each followed by its MIG instances; one that is lost since stays in the list."""
        ...

    def activity(self, gpu: Gpu) -> GpuActivity: ...

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        """None when the driver does not tell: no list, which is not an empty one."""
        ...

    def condition(self, gpu: Gpu) -> GpuCondition: ...

    def wait_event(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        """Errors since the last call, or none after that time; called on a second thread of its own."""
        ...

    def tells_events(self) -> bool:
        """Whether errors of some GPU at least will be told; True before it was tried. On any thread, without a call."""
        ...

    def absent(self) -> Mapping[str, str]:
        """Calls that are not asked for again and why, by name, for people."""
        ...

    def close(self) -> None:
        """Let go of the library."""
        ...


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one look; of each part the last that was read, and when in epoch seconds where that matters."""

    gpu: Gpu
    state: DeviceState = "ok"
    words: str | None = None  # of a device that is not ok: what the driver says
    activity: GpuActivity | None = None
    processes: tuple[GpuProcess, ...] | None = None  # None: not read yet, or nobody tells
    processes_time: float | None = None
    condition: GpuCondition | None = None
    condition_time: float | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All GPUs that this process sees, at one moment."""

    time: float
    state: DriverState
    words: str | None = None
    driver: GpuDriver | None = None
    gpus: tuple[GpuState, ...] = ()
    events: tuple[GpuEvent, ...] = ()  # all since the reader began, the oldest first; at most the last thousand
    absent: Mapping[str, str] = field(default_factory=dict)
    replaced: bool = False
    """Whether the driver is another one than this process has opened, which a new process may be able to read."""
    ready: bool = True  # false while the driver has not yet told which GPUs there are, nor that there are none
    tells_events: bool = False
    """Whether the driver would tell of an error; False where no GPU of this machine has events."""


GIB = 1 << 30
STATE_WORDS = {"lost": "is lost", "reset_required": "needs a reset", "hanging": "does not answer"}
"""Of a device that is not ok, after its name."""
