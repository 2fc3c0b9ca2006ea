"""The GPUs of this machine, their memory and their driver, by NVML."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InventoryGpu:
    """One GPU at one look."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class GpuInventory:
    """What the driver says. ``cuda`` is the newest version it supports, as (major, minor)."""

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[InventoryGpu, ...]


def read_gpu_inventory() -> GpuInventory | str:
    """The inventory, or why there is none."""
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
                free = total = 0  # memory that is the host's own
            gpus.append(InventoryGpu(index, _text(pynvml.nvmlDeviceGetName(handle)), free, total))
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return GpuInventory(driver, (version // 1000, version % 1000 // 10), tuple(gpus))
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def _text(value: object) -> str:
    """Older versions of the library give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
