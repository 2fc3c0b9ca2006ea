"""Fake of the AMD package ``amdsmi`` without its library: functions, keys, units, enums and exceptions of 7.0.

``FakeAmdGpu.answers`` holds the answers of a GPU by function name. The default is an MI300X. As in the package, an
unknown value is ``"N/A"`` in some places and the largest number of its field in others.
"""

import copy
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
LARGEST_32 = 0xFFFFFFFF
LARGEST_64 = 0xFFFFFFFFFFFFFFFF
STATUSES = {
    1: "AMDSMI_STATUS_INVAL - Invalid parameters",
    2: "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported",
    3: "AMDSMI_STATUS_NOT_YET_IMPLEMENTED - Feature not yet implemented",
    8: "AMDSMI_STATUS_TIMEOUT - Timeout in API call",
    10: "AMDSMI_STATUS_NO_PERM - Permission Denied",
    12: "AMDSMI_STATUS_IO - I/O Error",
    18: "AMDSMI_STATUS_INIT_ERROR - Initialization error",
    30: "AMDSMI_STATUS_BUSY - Device busy",
    32: "AMDSMI_STATUS_NOT_INIT - Device not initialized",
    34: "AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded",
    42: "AMDSMI_STATUS_UNEXPECTED_SIZE - unexpected size of data was read",
}


class AmdSmiException(Exception):
    """Base class of the exceptions of the package."""


class AmdSmiLibraryException(AmdSmiException):
    """A status of the library other than success."""

    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code
        self.err_info = STATUSES.get(err_code, "AMDSMI_STATUS_UNKNOWN_ERROR - An unknown error occurred")

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


class AmdSmiParameterException(AmdSmiException):
    """An argument of the wrong type. The error code is None."""

    def __init__(self, received: object, expected: type) -> None:
        super().__init__()
        self.err_code = None
        self.err_msg = f"Invalid parameter:\nActual type: {type(received)}\nExpected type: {expected}"

    def __str__(self) -> str:
        return self.err_msg


class AmdSmiMemoryType(IntEnum):
    VRAM = 0


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = 1
    VRAM = 2


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiClkType(IntEnum):
    GFX = 0
    MEM = 4


class Handle:
    """``amdsmi_processor_handle``."""


@dataclass
class FakeAmdGpu:
    """One GPU or partition, as the library sees it."""

    position: int = 0
    hip_id: int | str | None = None  # None: the position on the bus
    lost: bool = False  # its files have vanished: every call is "not supported"
    answers: dict[str, Any] = field(default_factory=dict)
    """By function, or by function and first argument (``"amdsmi_get_temp_metric HOTSPOT"``); a ``Refusal`` or an
    exception is raised."""
    handle: Handle = field(default_factory=Handle)

    def __post_init__(self) -> None:
        self.answers = {**mi300x(self.position, self.position if self.hip_id is None else self.hip_id), **self.answers}


class Refusal(int):
    """An error status that the library returns instead of a value."""


NOT_SUPPORTED, NOT_YET_IMPLEMENTED, NO_PERM, BUSY, NOT_INIT, DRIVER_NOT_LOADED, UNEXPECTED_SIZE = map(
    Refusal, (2, 3, 10, 30, 32, 34, 42)
)


NO_BAD_PAGES = "No bad pages found."
"""``amdsmi_get_gpu_bad_page_info`` of a sound GPU from 5.7 to 6.0; since then it is an empty list."""


def process(pid: int, vram: int, name: str = "python3") -> dict[str, Any]:
    """An entry of ``amdsmi_get_gpu_process_list``."""
    memory = {"gtt_mem": 2 * MIB, "cpu_mem": 0, "vram_mem": vram}
    return {"name": name, "pid": pid, "mem": vram, "memory_usage": memory}


def metrics(ticks: int | str, **held: int) -> dict[str, Any]:
    """Throttling counters of ``amdsmi_get_gpu_metrics_info``, such as ``ppt_residency_acc``."""
    names = ("prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
    none: int | str = 0 if isinstance(ticks, int) else ticks
    counters = {f"{name}_residency_acc": held.get(name, none) for name in names}
    return {"accumulation_counter": ticks, "throttle_status": False, "temperature_hotspot": 61, **counters}


def links(read_kb: int, write_kb: int) -> dict[str, Any]:
    """``amdsmi_get_link_metrics`` of a GPU with seven links. The eighth is missing."""
    link = {"bdf": "0000:00:00.0", "bit_rate": 32, "max_bandwidth": 512, "link_type": 2}
    return {
        "num_links": 8,
        "links": [
            *({**link, "read": read_kb, "write": write_kb} for _ in range(7)),
            {**link, "read": LARGEST_64, "write": LARGEST_64},
        ],
    }


def mi300x(position: int, hip_id: int | str) -> dict[str, Any]:
    """All answers of an idle MI300X, version 7.0."""
    return {
        "amdsmi_get_gpu_device_uuid": f"{position:02x}ff74a1-0000-1000-80ff-52c7ee01df8f",
        "amdsmi_get_gpu_device_bdf": f"0000:{0x05 + 0x20 * position:02x}:00.0",
        "amdsmi_get_gpu_enumeration_info": {
            "drm_render": 128 + position,
            "drm_card": position,
            "hsa_id": hip_id + 2 if isinstance(hip_id, int) else hip_id,
            "hip_id": hip_id,
            "hip_uuid": f"GPU-4b2c1a9f8d3e{position:04x}",
        },
        "amdsmi_get_gpu_asic_info": {"market_name": "AMD Instinct MI300X", "num_compute_units": 304},
        "amdsmi_get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.14.14"},
        "amdsmi_get_gpu_activity": {"gfx_activity": 0, "umc_activity": 0, "mm_activity": "N/A"},
        "amdsmi_get_gpu_memory_total": 192 * GIB,
        "amdsmi_get_gpu_memory_usage": 283 * MIB,
        "amdsmi_get_power_info": {
            "socket_power": 142,
            "current_socket_power": 142,
            "average_socket_power": "N/A",
            "power_limit": 750,
        },
        "amdsmi_get_energy_count": {
            "energy_accumulator": 1_000_000_000,
            "counter_resolution": 15.25899982452392578,
        },
        "amdsmi_get_temp_metric EDGE": NOT_SUPPORTED,
        "amdsmi_get_temp_metric HOTSPOT": 41,
        "amdsmi_get_temp_metric VRAM": 33,
        "amdsmi_get_clock_info GFX": {"clk": 132, "min_clk": 132, "max_clk": 2100},
        "amdsmi_get_clock_info MEM": {"clk": 900, "min_clk": 900, "max_clk": 1300},
        "amdsmi_get_gpu_metrics_info": metrics(1000),
        "amdsmi_get_gpu_process_list": [],
        "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 0, "uncorrectable_count": 0, "deferred_count": 0},
        "amdsmi_get_gpu_bad_page_info": [],
        "amdsmi_get_pcie_info": {
            "pcie_static": {"max_pcie_width": 16, "max_pcie_speed": 32},
            "pcie_metric": {"pcie_width": 16, "pcie_speed": 32000, "pcie_replay_count": 0},
        },
        "amdsmi_get_gpu_pci_replay_counter": NOT_SUPPORTED,
        "amdsmi_get_link_metrics": links(1000, 2000),
        "amdsmi_get_gpu_fan_speed": NOT_SUPPORTED,
        "amdsmi_get_gpu_fan_speed_max": NOT_SUPPORTED,
    }


MI210 = {
    "amdsmi_get_power_info": {"current_socket_power": "N/A", "average_socket_power": 39, "power_limit": 300_000_000},
    "amdsmi_get_gpu_metrics_info": metrics("N/A"),
    "amdsmi_get_gpu_enumeration_info": NOT_SUPPORTED,
    "amdsmi_get_link_metrics": NOT_SUPPORTED,
    "amdsmi_get_temp_metric HOTSPOT": NOT_SUPPORTED,
    "amdsmi_get_temp_metric EDGE": 38,
    "amdsmi_get_gpu_fan_speed": 51,
    "amdsmi_get_gpu_fan_speed_max": 255,
}  # differences of an older card: no counters, average power, a fan, a limit in microwatts

ARGUMENTS: dict[str, tuple[type, ...]] = {
    "amdsmi_get_gpu_memory_total": (AmdSmiMemoryType,),
    "amdsmi_get_gpu_memory_usage": (AmdSmiMemoryType,),
    "amdsmi_get_temp_metric": (AmdSmiTemperatureType, AmdSmiTemperatureMetric),
    "amdsmi_get_clock_info": (AmdSmiClkType,),
    "amdsmi_get_gpu_fan_speed": (int,),
    "amdsmi_get_gpu_fan_speed_max": (int,),
}  # types of the arguments after the handle; other functions take only the handle


class FakeAmdSmi(types.ModuleType):
    """The module. Tests put it into ``sys.modules`` as ``amdsmi``."""

    def __init__(self, *gpus: FakeAmdGpu, without: tuple[str, ...] = ()) -> None:
        """``without``: functions and enums missing from this version of the package."""
        super().__init__("amdsmi")
        self.fake_gpus = list(gpus)
        self.fake_calls: Counter[str] = Counter()
        """How often each function was called, with its first argument and the position of the GPU."""
        self.fake_running = 0
        self.fake_init: Refusal | None = None
        self.fake_broken: Refusal | None = None
        """What all functions refuse with."""
        names = {name.partition(" ")[0] for name in mi300x(0, 0)}
        own: dict[str, Any] = {name: self._function(name) for name in names}
        own |= {kind.__name__: kind for kind in (AmdSmiException, AmdSmiLibraryException, AmdSmiParameterException)}
        for enum in (AmdSmiMemoryType, AmdSmiTemperatureType, AmdSmiTemperatureMetric, AmdSmiClkType):
            own[enum.__name__] = enum
        own |= {
            "amdsmi_init": self._init,
            "amdsmi_shut_down": self._shut_down,
            "amdsmi_get_processor_handles": self._handles,
            "amdsmi_get_rocm_version": lambda: (True, "7.0.2"),
        }
        for name, value in own.items():
            if name not in without:
                setattr(self, name, value)

    def _init(self) -> None:
        if self.fake_init is not None:
            raise AmdSmiLibraryException(self.fake_init)
        self.fake_running += 1

    def _shut_down(self) -> None:
        if not self.fake_running:
            raise AmdSmiLibraryException(32)
        self.fake_running -= 1

    def _handles(self) -> list[Handle]:
        if self.fake_broken is not None:
            raise AmdSmiLibraryException(self.fake_broken)
        if not self.fake_running:
            raise AmdSmiLibraryException(32)
        return [gpu.handle for gpu in self.fake_gpus]

    def _function(self, name: str) -> Callable[..., Any]:
        def call(processor_handle: object, *arguments: object) -> Any:
            if not isinstance(processor_handle, Handle):
                raise AmdSmiParameterException(processor_handle, Handle)
            expected = ARGUMENTS.get(name, ())
            if len(arguments) != len(expected):
                raise TypeError(f"{name}() takes {1 + len(expected)} positional arguments")
            for argument, kind in zip(arguments, expected, strict=True):
                if not isinstance(argument, kind):
                    raise AmdSmiParameterException(argument, kind)
            gpu = next(gpu for gpu in self.fake_gpus if gpu.handle is processor_handle)
            first = arguments[0] if arguments else None
            full = f"{name} {first.name}" if isinstance(first, IntEnum) else name
            self.fake_calls[f"{full} {gpu.position}"] += 1
            if not self.fake_running:
                raise AmdSmiLibraryException(32)
            if self.fake_broken is not None:
                raise AmdSmiLibraryException(self.fake_broken)
            answer = NOT_SUPPORTED if gpu.lost else gpu.answers[full if full in gpu.answers else name]
            if isinstance(answer, Refusal):
                raise AmdSmiLibraryException(answer)
            if isinstance(answer, Exception):
                raise answer
            return copy.deepcopy(answer)

        return call
