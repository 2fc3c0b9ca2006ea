"""Scenarios of the fake driver library: GPUs, their values and their faults.

Numbers are in the units of the driver, which their names contain. None means that the call is "not supported".
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

from .build import library

ALL_LINKS = 0xFFFFFFFF  # scope of a field for the sum over all NVLinks
XID = 8  # type of an Xid event
NO_INSTANCE = 0xFFFFFFFF

CODES = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "OPERATING_SYSTEM": 17,
    "LIB_RM_VERSION_MISMATCH": 18,
    "UNKNOWN": 999,
}
Code = str | int  # a name in `CODES`, or the number

DOUBLE, UINT, ULONG, ULONGLONG, SLONGLONG, SINT, USHORT = range(7)
_UINT_FIELDS = frozenset({1, 2, 29, 30, 31, 82, *range(142, 148), 165, *range(185, 191), 192, 226, 227, 230})


class Rate(NamedTuple):
    """A number that changes: `base` at the start of the scenario, plus `per_second` each second."""

    base: float
    per_second: float


Number = int | float | Rate


class FieldValue(NamedTuple):
    """A field with an unusual type or with an error of its own."""

    value: Number = 0
    type: int = ULONGLONG
    code: Code = 0


@dataclass
class FakeProcess:
    """A process on a GPU. ``memory_bytes`` None means "not available"."""

    pid: int
    memory_bytes: int | None = 0
    sm_percent: int = 0
    memory_percent: int = 0
    kind: Literal["compute", "graphics", "mps"] = "compute"


@dataclass
class FakeSample:
    """A utilization sample that the driver returns each time, however old."""

    pid: int
    sm_percent: int
    memory_percent: int = 0
    age_s: float = 0.0


@dataclass(kw_only=True)
class Values:
    """Plain numbers, one for each name known to the library."""

    pci_device_id: Number | None = None
    memory_total: Number | None = None
    memory_used: Number | None = 0
    memory_reserved: Number | None = None
    utilization: Number | None = None
    memory_utilization: Number | None = None
    temperature_c: Number | None = None
    clock_graphics_mhz: Number | None = None
    clock_sm_mhz: Number | None = None
    clock_memory_mhz: Number | None = None
    clock_video_mhz: Number | None = None
    compute_capability: Number | None = None  # 90 for 9.0
    power_mw: Number | None = None
    power_limit_mw: Number | None = None
    energy_mj: Number | None = None
    event_reasons: Number | None = None
    ecc_corrected: Number | None = None
    ecc_uncorrected: Number | None = None
    rows_corrected: Number | None = None
    rows_uncorrected: Number | None = None
    rows_pending: Number | None = None
    rows_failure: Number | None = None
    pages_single_bit: Number | None = None
    pages_double_bit: Number | None = None
    pages_pending: Number | None = None
    pcie_replays: Number | None = None
    pcie_generation: Number | None = None
    pcie_generation_max: Number | None = None
    pcie_width: Number | None = None
    pcie_width_max: Number | None = None
    pcie_tx_kib_s: Number | None = None
    pcie_rx_kib_s: Number | None = None
    fan_percent: Number | None = None
    persistence: Number | None = None
    mig_mode: Number | None = None
    mig_max: Number | None = None
    event_types: Number | None = None
    gpu_instance: Number | None = None
    compute_instance: Number | None = None


VALUES = tuple(each.name for each in fields(Values))


@dataclass(kw_only=True)
class Unit(Values):
    """A GPU or MIG instance."""

    uuid: str
    name: str = "NVIDIA GPU"
    processes: list[FakeProcess] = field(default_factory=list)
    samples: list[FakeSample] = field(default_factory=list)
    fields: dict[int | tuple[int, int], Number | FieldValue] = field(default_factory=dict)  # by id, or by id and scope
    gpm: dict[int, Number] = field(default_factory=dict)  # metrics by id; without any, GPM is unsupported

    def lines(self) -> list[str]:
        """Lines of the scenario file."""
        found = [f"name {self.name}"]
        for name in VALUES:
            value = getattr(self, name)
            if value is not None:
                found.append(f"{name} {_number(value)}")
        for each in self.processes:
            memory = -1 if each.memory_bytes is None else each.memory_bytes
            found.append(f"process {each.kind} {each.pid} {memory} {each.sm_percent} {each.memory_percent} 0")
        found += [f"sample compute {it.pid} 0 {it.sm_percent} {it.memory_percent} {it.age_s!r}" for it in self.samples]
        for key, value in self.fields.items():
            number, scope = (key, "*") if isinstance(key, int) else key
            plain = value if isinstance(value, FieldValue) else FieldValue(value, _type_of(number, value))
            found.append(f"field {number} {scope} {plain.type} {_code(plain.code)} {_number(plain.value)}")
        found += [f"gpm {metric} * 0 0 {_number(value)}" for metric, value in self.gpm.items()]
        return found


@dataclass(kw_only=True)
class FakeMig(Unit):
    """One MIG instance. ``nvmlDeviceGetMigDeviceHandleByIndex`` finds it by its slot."""

    slot: int


@dataclass(kw_only=True)
class FakeGpu(Unit):
    """One GPU."""

    pci_bus_id: str = "00000000:01:00.0"
    state: Literal["ok", "lost", "reset_required"] = "ok"  # unless ok, every call about the GPU fails
    migs: list[FakeMig] = field(default_factory=list)
    partition: int = 0  # a change makes all instance handles stale, even with the same UUID

    def lines(self) -> list[str]:
        """Lines of the scenario file, including those of its instances."""
        state = {"ok": 0, "lost": CODES["GPU_IS_LOST"], "reset_required": CODES["RESET_REQUIRED"]}[self.state]
        found = [*super().lines(), f"pci {self.pci_bus_id}", f"state {state}", f"partition {self.partition}"]
        for mig in self.migs:
            found += [f"mig {mig.uuid} {mig.slot}", *mig.lines(), f"partition {self.partition}"]
        return found


@dataclass
class Fault:
    """Behaviour of a function for one GPU. ``*`` means all."""

    function: str
    uuid: str = "*"
    code: Code | None = None  # returned without any effect, even if 0 (success)
    slow_ms: int = 0
    hang: bool = False  # hangs until a scenario without this fault
    race: int = 0  # number of calls that find the buffer too small


@dataclass
class FakeEvent:
    """An event, returned once to each set that registered its GPU before the write."""

    sequence: int
    uuid: str
    data: int
    type: int = XID
    gpu_instance: int = NO_INSTANCE
    compute_instance: int = NO_INSTANCE


@dataclass
class Scenario:
    """All values of the library. It may be changed and written again while in use."""

    gpus: list[FakeGpu] = field(default_factory=list)
    driver: str = "570.86.15"
    cuda: tuple[int, int] = (12, 8)
    init: Code = 0  # result of `nvmlInit`
    broken: Code = 0  # result of every call, as after the driver was replaced
    visible: Sequence[int] | None = None  # visible GPUs, which are then numbered from 0
    global_lock: bool = False
    """Whether one call at a time is answered, as the real driver does: one that hangs holds up all."""
    faults: list[Fault] = field(default_factory=list)
    events: list[FakeEvent] = field(default_factory=list)
    field_max: int = 308  # field ids from here on are invalid; lower ids are at least "not supported"
    sample_period_s: float = 1.0  # interval of the process utilization samples
    start: float = field(default_factory=time.time)  # time in epoch seconds from which numbers change
    without: Sequence[str] = ()  # functions missing from the library of this driver

    def text(self) -> str:
        """Text of the scenario file."""
        lines = [
            f"driver {self.driver}",
            f"cuda {self.cuda[0] * 1000 + self.cuda[1] * 10}",
            f"init {_code(self.init)}",
            f"broken {_code(self.broken)}",
            f"global_lock {int(self.global_lock)}",
            f"field_max {self.field_max}",
            f"sample_period {self.sample_period_s!r}",
            f"start {self.start!r}",
        ]
        if self.visible is not None:
            lines.append(f"visible {','.join(map(str, self.visible))}")
        for it in self.faults:
            code = "-" if it.code is None else _code(it.code)
            lines.append(f"fault {it.function} {it.uuid} {code} {it.slow_ms} {int(it.hang)} {it.race}")
        for event in self.events:
            where = f"{event.gpu_instance} {event.compute_instance}"
            lines.append(f"event {event.sequence} {event.uuid} {event.type} {event.data} {where}")
        for gpu in self.gpus:
            lines += [f"gpu {gpu.uuid}", *gpu.lines()]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Replace the scenario file atomically."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(self.text())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)

    def environment(self, path: Path) -> dict[str, str]:
        """Environment variables with which a child process finds this library and scenario."""
        search = filter(None, (str(library(self.without)), os.environ.get("LD_LIBRARY_PATH")))
        return {"LD_LIBRARY_PATH": os.pathsep.join(search), "FAKENVML_SCENARIO": str(path)}

    def fail(self, function: str, code: Code, gpu: Unit | None = None) -> None:
        """Make a function return this code for one GPU, or for all."""
        self.faults.append(Fault(function, gpu.uuid if gpu else "*", code=code))

    def hang(self, function: str, gpu: Unit | None = None) -> None:
        """Make a function hang until ``release`` and a write."""
        self.faults.append(Fault(function, gpu.uuid if gpu else "*", hang=True))

    def release(self) -> None:
        """Remove all hangs."""
        self.faults = [it for it in self.faults if not it.hang]

    def xid(
        self, number: int, gpu: Unit, *, gpu_instance: int = NO_INSTANCE, compute_instance: int = NO_INSTANCE
    ) -> None:
        """Add an Xid event of a GPU."""
        sequence = max((it.sequence for it in self.events), default=0) + 1
        where = {"gpu_instance": gpu_instance, "compute_instance": compute_instance}
        self.events.append(FakeEvent(sequence, gpu.uuid, number, **where))


def calls(folder: Path) -> Counter[str]:
    """Number of calls of each function by the processes with this ``FAKENVML_CALLS``.

    Requested fields and GPM metrics are counted as ``field[185]`` and ``gpm[2]``.
    """
    found: Counter[str] = Counter()
    for name, number, _ in _counts(folder):
        found[name] += number
    return found


def seconds_inside(folder: Path) -> float:
    """CPU time that these processes have spent in the library."""
    return sum(ns for _, _, ns in _counts(folder)) / 1e9


def _counts(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            if not line.startswith("\0"):
                name, number, ns = line.split()
                found.append((name, int(number), int(ns)))
    return found


def _number(value: Number) -> str:
    return f"{value.base!r} {value.per_second!r}" if isinstance(value, Rate) else f"{value!r} 0"


def _code(code: Code) -> int:
    return CODES[code] if isinstance(code, str) else code


def _type_of(number: int, value: Number) -> int:
    if isinstance(value, float):
        return DOUBLE
    return UINT if number in _UINT_FIELDS else ULONGLONG
