"""GPUs of this machine through NVML: names, memory, driver and MIG instances."""

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.records import Gpu, GpuDriverReplaced, GpuUnavailable


@dataclass(frozen=True)
class InventoryGpu:
    """One GPU at one reading."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int
    uuid: str


@dataclass(frozen=True)
class GpuInventory:
    """GPUs and versions; ``cuda`` is the newest supported version, as (major, minor)."""

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[InventoryGpu, ...]


def read_gpu_inventory() -> GpuInventory | str:
    """Read the inventory; return the reason if there is none."""
    try:
        import pynvml  # lazy: costs time and memory, and most machines that ask have no GPU
    except ImportError as error:
        return f"nvidia-ml-py is not installed ({error})"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                free, total = int(memory.free), int(memory.total)
            except pynvml.NVMLError_NotSupported:
                free = total = 0  # the GPU uses the host's memory
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            gpus.append(InventoryGpu(index, name, free, total, uuid))
        driver = pynvml.nvmlSystemGetDriverVersion()
        return GpuInventory(driver, (version // 1000, version % 1000 // 10), tuple(gpus))
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def read_gpu_units() -> tuple[Gpu, ...]:
    """Undivided GPUs and MIG instances in the order of a plan's positions; empty if the driver does not list them."""
    from exporter.gpus.nvidia.reader import NvmlReader  # lazy: few callers have a GPU

    reader = NvmlReader()
    try:
        reader.open()
        return tuple(gpu for gpu in reader.gpus() if not gpu.mig)
    except (GpuUnavailable, GpuDriverReplaced, RuntimeError):
        return ()
    finally:
        reader.close()
