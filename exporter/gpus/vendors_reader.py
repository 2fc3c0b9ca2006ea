"""Vendors whose GPUs can be read, in the order in which they are looked for.

To add one:

1. One file ``exporter/gpus/<vendor>/reader.py`` with a ``GpuReader`` (``exporter/gpus/records.py``): base units,
   None for what is unknown, the vendor's package imported in ``open`` alone.
2. One function and one entry below, and the package's name in ``tests/test_layers.py``.
3. A fake of the package, and a subclass of the tests in ``tests/exporter/gpus/gpu_reader_contract.py``, which every
   reader must pass. Then run ``pytest tests/exporter/gpus/<vendor> tests/test_layers.py``.

Collectors know the records alone, so that series, health and findings need nothing more.
"""

from collections.abc import Callable

from exporter.gpus.records import GpuReader


def open_nvidia() -> GpuReader:
    """NVIDIA's, by NVML."""
    from exporter.gpus.nvidia.reader import NvmlReader  # lazy: only the vendor that is there costs memory

    return NvmlReader()


def open_amd() -> GpuReader:
    """AMD's, by amdsmi."""
    from exporter.gpus.amd.reader import AmdReader  # lazy: only the vendor that is there costs memory

    return AmdReader()


READERS: tuple[Callable[[], GpuReader], ...] = (open_nvidia, open_amd)
