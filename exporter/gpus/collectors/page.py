"""Series and status entry of one GPU."""

from collections.abc import Mapping

from exporter.collecting.families import Family, SeriesGroup
from exporter.contract.status import GpuDevice, GpuXid
from exporter.gpus.analysis.xid import xid_class, xid_meaning
from exporter.gpus.records import Gpu, GpuActivity, GpuCondition, GpuDriver, GpuEntry

GPU = ("gpu",)

INFO = Family(
    "gpu_info",
    "A GPU of the job, or a MIG instance of one.",
    labels=(
        *("gpu", "uuid", "name", "vendor", "pci_bus_id", "driver_version", "cuda_version"),
        *("persistence_mode", "mig_mode"),
    ),
    kind="info",
)
UP = Family("gpu_up", "Whether the GPU answers: 0 for one that is lost, needs a reset, or hangs.", GPU)
STATE = Family(
    "gpu_state",
    "Failure of a GPU that does not answer: lost, reset_required or hanging.",
    ("gpu", "state"),
)

UTILIZATION = Family("gpu_utilization_ratio", "Share of the driver's last sample in which a kernel ran.", GPU)
MEMORY_UTILIZATION = Family(
    "gpu_memory_utilization_ratio",
    "Share of the driver's last sample in which the GPU's memory was read or written.",
    GPU,
)
MEMORY_USED = Family("gpu_memory_used_bytes", "Memory of the GPU that is in use.", GPU)
MEMORY_TOTAL = Family("gpu_memory_total_bytes", "Memory of the GPU.", GPU)
POWER = Family(
    "gpu_power_watts", "Power draw: the driver's average of about a second, or at this moment.", ("gpu", "kind")
)
POWER_LIMIT = Family("gpu_power_limit_watts", "Power limit that is enforced.", GPU)
ENERGY = Family("gpu_energy_joules_total", "Energy used since the driver was loaded.", GPU, kind="counter")
TEMPERATURE = Family("gpu_temperature_celsius", "Temperature of the GPU and of its memory.", ("gpu", "sensor"))
CLOCK = Family("gpu_clock_hertz", "Present clocks.", ("gpu", "clock"))
THROTTLE = Family(
    "gpu_throttle_seconds_total", "Time with reduced clocks, by reason.", ("gpu", "reason"), kind="counter"
)
SM_ACTIVITY = Family(
    "gpu_sm_activity_ratio", "Share of time in which streaming multiprocessors had work, on Hopper and later.", GPU
)
TENSOR_ACTIVITY = Family("gpu_tensor_activity_ratio", "Share of time in which tensor cores worked.", GPU)
DRAM_ACTIVITY = Family("gpu_dram_activity_ratio", "Share of the memory bandwidth that was used.", GPU)
NVLINK_RATE = Family("gpu_nvlink_bytes_per_second", "NVLink traffic at present.", ("gpu", "direction"))
PCIE_RATE = Family("gpu_pcie_bytes_per_second", "PCIe traffic at present.", ("gpu", "direction"))

ECC = Family("gpu_ecc_errors_total", "Memory errors since the driver was loaded.", ("gpu", "type"), kind="counter")
ECC_JOB = Family("gpu_ecc_job_errors_total", "Memory errors since the job's start.", ("gpu", "type"), kind="counter")
REMAPPED = Family("gpu_remapped_rows_total", "Memory rows that were remapped.", ("gpu", "type"), kind="counter")
REMAP_PENDING = Family("gpu_row_remap_pending", "Whether a row waits for a reset to be remapped.", GPU)
REMAP_FAILURE = Family("gpu_row_remap_failure", "Whether remapping a row has failed: the GPU must be replaced.", GPU)
RETIRED = Family(
    "gpu_retired_pages_total", "Memory pages retired, on GPUs before Ampere.", ("gpu", "type"), kind="counter"
)
PAGES_PENDING = Family("gpu_pages_pending", "Whether a page waits for a reset to be retired.", GPU)
RECOVERY = Family("gpu_recovery_action", "Action that the driver asks for, 1 for the present one.", ("gpu", "action"))
REPLAYS = Family("gpu_pcie_replays_total", "Packets that were resent over PCIe.", GPU, kind="counter")
PCIE_WIDTH = Family("gpu_pcie_link_width_ratio", "Lanes of the PCIe link, as a share of its maximum.", GPU)
PCIE_GENERATION = Family(
    "gpu_pcie_link_generation_ratio",
    "Generation of the PCIe link, as a share of its maximum; idle GPUs lower it to save power.",
    GPU,
)
NVLINK_BYTES = Family(
    "gpu_nvlink_bytes_total",
    "Bytes over NVLink, of GPUs whose driver does not give the traffic at present.",
    ("gpu", "direction"),
    kind="counter",
)
NVLINK_ERRORS = Family("gpu_nvlink_errors_total", "Errors of the GPU's NVLinks.", GPU, kind="counter")
FAN = Family("gpu_fan_ratio", "Fan speed, as a share of its maximum.", GPU)

XID_TIME = Family("gpu_xid_last_timestamp_seconds", "When the GPU last had this error.", ("gpu", "xid"))

FAMILIES = (
    *(INFO, UP, STATE),
    *(UTILIZATION, MEMORY_UTILIZATION, MEMORY_USED, MEMORY_TOTAL, POWER, POWER_LIMIT, ENERGY, TEMPERATURE, CLOCK),
    *(THROTTLE, SM_ACTIVITY, TENSOR_ACTIVITY, DRAM_ACTIVITY, NVLINK_RATE, PCIE_RATE),
    *(ECC, ECC_JOB, REMAPPED, REMAP_PENDING, REMAP_FAILURE, RETIRED, PAGES_PENDING, RECOVERY, REPLAYS),
    *(PCIE_WIDTH, PCIE_GENERATION, NVLINK_BYTES, NVLINK_ERRORS, FAN, XID_TIME),
)


def add_gpu(row: SeriesGroup, entry: GpuEntry, driver: GpuDriver | None, *, readable: bool) -> None:
    """Add all series of a GPU; one that does not answer has only its faults.

    ``readable``: whether the driver answers. If not, ``gpu_up`` is unknown for a GPU that last answered.
    """
    state = entry.state
    _add_info(row, state.gpu, driver)
    if readable or state.state != "ok":
        row.add(UP, int(state.state == "ok"))
    if state.state != "ok":
        row.add(STATE, 1, state=state.state)
    if state.activity is not None:
        _add_activity(row, state.activity)
    if state.condition is not None:
        _add_condition(row, state.condition, entry.job_memory_errors)
        if state.activity is not None and not state.activity.has_nvlink_rate:
            row.add(NVLINK_BYTES, state.condition.nvlink_rx_bytes, direction="rx")
            row.add(NVLINK_BYTES, state.condition.nvlink_tx_bytes, direction="tx")
    for code, xid in entry.xids.items():
        row.add(XID_TIME, xid.last, xid=code)


def _add_info(row: SeriesGroup, gpu: Gpu, driver: GpuDriver | None) -> None:
    row.add(
        INFO,
        1,
        uuid=gpu.uuid,
        name=gpu.name,
        vendor=gpu.vendor,
        pci_bus_id=gpu.pci_bus_id or "",
        driver_version=(driver and driver.version) or "",
        cuda_version=(driver and driver.cuda_version) or "",
        persistence_mode=_on_off(gpu.persistence),
        mig_mode="instance" if gpu.parent is not None else _on_off(gpu.mig),
    )


def _add_activity(row: SeriesGroup, activity: GpuActivity) -> None:
    row.add(UTILIZATION, activity.utilization_ratio)
    row.add(MEMORY_UTILIZATION, activity.memory_utilization_ratio)
    row.add(MEMORY_USED, activity.memory_used_bytes)
    row.add(MEMORY_TOTAL, activity.memory_total_bytes)
    row.add(POWER, activity.power_average_w, kind="average")
    row.add(POWER, activity.power_instant_w, kind="instant")
    row.add(POWER_LIMIT, activity.power_limit_w)
    row.add(ENERGY, activity.energy_j)
    row.add(TEMPERATURE, activity.temperature_c, sensor="gpu")
    row.add(TEMPERATURE, activity.memory_temperature_c, sensor="memory")
    row.add(CLOCK, activity.sm_clock_hz, clock="sm")
    row.add(CLOCK, activity.memory_clock_hz, clock="memory")
    for reason, seconds in activity.throttle_s.items():
        row.add(THROTTLE, seconds, reason=reason)
    row.add(SM_ACTIVITY, activity.sm_activity_ratio)
    row.add(TENSOR_ACTIVITY, activity.tensor_activity_ratio)
    row.add(DRAM_ACTIVITY, activity.dram_activity_ratio)
    row.add(NVLINK_RATE, activity.nvlink_rx_bytes_per_s, direction="rx")
    row.add(NVLINK_RATE, activity.nvlink_tx_bytes_per_s, direction="tx")
    row.add(PCIE_RATE, activity.pcie_rx_bytes_per_s, direction="rx")
    row.add(PCIE_RATE, activity.pcie_tx_bytes_per_s, direction="tx")


def _add_condition(row: SeriesGroup, condition: GpuCondition, job_memory_errors: Mapping[str, int]) -> None:
    """Add the condition; ``job_memory_errors``: memory errors since the start of the job, by type."""
    row.add(ECC, condition.ecc_corrected, type="corrected")
    row.add(ECC, condition.ecc_uncorrected, type="uncorrected")
    for kind, count in job_memory_errors.items():
        row.add(ECC_JOB, count, type=kind)
    row.add(REMAPPED, condition.rows_remapped_corrected, type="corrected")
    row.add(REMAPPED, condition.rows_remapped_uncorrected, type="uncorrected")
    row.add(REMAP_PENDING, _flag(condition.row_remap_pending))
    row.add(REMAP_FAILURE, _flag(condition.row_remap_failure))
    row.add(RETIRED, condition.pages_retired_corrected, type="corrected")
    row.add(RETIRED, condition.pages_retired_uncorrected, type="uncorrected")
    row.add(PAGES_PENDING, _flag(condition.pages_pending))
    if condition.recovery_action is not None:
        row.add(RECOVERY, 1, action=condition.recovery_action)
    row.add(REPLAYS, condition.pcie_replays)
    row.add(PCIE_WIDTH, _share(condition.pcie_width, condition.pcie_width_max))
    row.add(PCIE_GENERATION, _share(condition.pcie_generation, condition.pcie_generation_max))
    row.add(NVLINK_ERRORS, condition.nvlink_errors)
    row.add(FAN, condition.fan_ratio)


def gpu_device(entry: GpuEntry, lost_since: float | None) -> GpuDevice:
    """Status of a GPU. Another collector adds its users."""
    gpu, activity = entry.state.gpu, entry.state.activity or GpuActivity()
    memory = gpu.memory_total_bytes if activity.memory_total_bytes is None else activity.memory_total_bytes
    return GpuDevice(
        gpu=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        pci_bus_id=gpu.pci_bus_id,
        state=entry.state.state,
        words=entry.state.message,
        utilization_ratio=activity.busy_ratio,
        memory_used_bytes=activity.memory_used_bytes,
        memory_total_bytes=memory,
        power_w=activity.power_w,
        power_limit_w=activity.power_limit_w,
        energy_j=activity.energy_j,
        energy_job_j=entry.energy_job_j,
        temperature_c=activity.temperature_c,
        sm_activity_ratio=activity.sm_activity_ratio,
        tensor_activity_ratio=activity.tensor_activity_ratio,
        utilization_mean_ratio=entry.utilization_mean_ratio,
        seen_s=entry.seen_s,
        idle_s=entry.idle_s,
        memory_peak_bytes=entry.memory_peak_bytes,
        xids=tuple(
            GpuXid(xid=code, class_=xid_class(code), count=xid.count, time=xid.last, words=xid_meaning(code))
            for code, xid in entry.xids.items()
        ),
        lost_since=lost_since,
    )


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)


def _share(value: int | None, maximum: int | None) -> float | None:
    return value / maximum if value is not None and maximum else None


def _on_off(value: bool | None) -> str:
    return "" if value is None else "on" if value else "off"
