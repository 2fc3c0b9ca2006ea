"""Vendors whose GPUs can be read, in order of search.

To add one:

1. Write ``exporter/gpus/<vendor>/reader.py`` with a ``GpuReader`` (``exporter/gpus/records.py``): base units, None for
   unknown values, the vendor's package imported only in ``open``.
2. Add a function and an entry below, and the package's name in ``tests/test_layers.py``.
3. Add a fake of the package, and a subclass of the tests in ``tests/exporter/gpus/gpu_reader_contract.py``. Then run
   ``pytest tests/exporter/gpus/<vendor> tests/test_layers.py``.

Collectors use only the records, so series, health and findings need no change.
"""

from collections.abc import Callable

from exporter.gpus.records import GpuReader


def open_nvidia() -> GpuReader:
    """Reader for NVIDIA GPUs, through NVML."""
    from exporter.gpus.nvidia.reader import NvmlReader  # lazy: only the installed vendor costs memory

    return NvmlReader()


def open_amd() -> GpuReader:
    """Reader for AMD GPUs, through amdsmi."""
    from exporter.gpus.amd.reader import AmdReader  # lazy: only the installed vendor costs memory

    return AmdReader()


READERS: tuple[Callable[[], GpuReader], ...] = (open_nvidia, open_amd)
