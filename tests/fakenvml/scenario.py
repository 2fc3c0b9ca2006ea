"""What the stand-in for the driver's library tells: GPUs, their values, and what goes wrong with them.

Numbers are in the driver's units (their names say which). None: the call says "not supported".
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

ALL_LINKS = 0xFFFFFFFF  # scope of a field that is summed over all NVLinks
XID = 8  # type of an event that tells of an Xid
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
    """A number that changes: this much at the scenario's start, and so much more each second."""

    base: float
    per_second: float

    def after(self, seconds: float) -> "Rate":
        """The same, with the base that it has reached by then."""
        return Rate(int(self.base + self.per_second * seconds), self.per_second)


Number = int | float | Rate


class FieldValue(NamedTuple):
    """A field of another type than it usually has, or one that fails by itself."""

    value: Number = 0
    type: int = ULONGLONG
    code: Code = 0


@dataclass
class FakeProcess:
    """A process on a GPU. ``memory_bytes`` None is the driver's "not available"."""

    pid: int
    memory_bytes: int | None = 0
    sm_percent: int = 0
    memory_percent: int = 0
    kind: Literal["compute", "graphics", "mps"] = "compute"


@dataclass
class FakeSample:
    """A sample of utilization that the driver tells again each time, however old."""

    pid: int
    sm_percent: int
    memory_percent: int = 0
    age_s: float = 0.0


@dataclass(kw_only=True)
class Values:
    """Plain numbers, one for each name that the library knows."""

    minor: Number | None = None
    pci_device_id: Number | None = None
    memory_total: Number | None = None
    memory_used: Number | None = 0
    memory_reserved: Number | None = None
    bar1_total: Number | None = None
    bar1_used: Number | None = None
    utilization: Number | None = None
    memory_utilization: Number | None = None
    temperature_c: Number | None = None
    clock_graphics_mhz: Number | None = None
    clock_sm_mhz: Number | None = None
    clock_memory_mhz: Number | None = None
    clock_video_mhz: Number | None = None
    max_clock_graphics_mhz: Number | None = None
    max_clock_sm_mhz: Number | None = None
    max_clock_memory_mhz: Number | None = None
    max_clock_video_mhz: Number | None = None
    compute_capability: Number | None = None  # 90 for 9.0
    power_mw: Number | None = None
    power_limit_mw: Number | None = None
    power_management_limit_mw: Number | None = None
    energy_mj: Number | None = None
    event_reasons: Number | None = None
    ecc_mode: Number | None = None
    ecc_corrected: Number | None = None
    ecc_uncorrected: Number | None = None
    ecc_corrected_aggregate: Number | None = None
    ecc_uncorrected_aggregate: Number | None = None
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
    fans: Number | None = None
    persistence: Number | None = None
    mig_mode: Number | None = None
    mig_max: Number | None = None
    event_types: Number | None = None
    gpu_instance: Number | None = None
    compute_instance: Number | None = None
    sm_count: Number | None = None
    gpu_slices: Number | None = None
    compute_slices: Number | None = None


VALUES = tuple(each.name for each in fields(Values))


@dataclass(kw_only=True)
class Unit(Values):
    """What a process can be given: a GPU, or an instance of one."""

    uuid: str
    name: str = "NVIDIA GPU"
    processes: list[FakeProcess] = field(default_factory=list)
    samples: list[FakeSample] = field(default_factory=list)
    fields: dict[int | tuple[int, int], Number | FieldValue] = field(default_factory=dict)  # by id, or by id and scope
    gpm: dict[int, Number] = field(default_factory=dict)  # metrics by id; a GPU without any has no GPM

    def lines(self) -> list[str]:
        """The facts, one each."""
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
    """One MIG instance, in the slot by which ``nvmlDeviceGetMigDeviceHandleByIndex`` finds it."""

    slot: int


@dataclass(kw_only=True)
class FakeGpu(Unit):
    """One GPU."""

    pci_bus_id: str = "00000000:01:00.0"
    state: Literal["ok", "lost", "reset_required"] = "ok"  # not ok: every call about it fails
    migs: list[FakeMig] = field(default_factory=list)
    partition: int = 0  # a change makes handles of instances stale, those of the same UUID too
    violations: dict[int, Number] = field(default_factory=dict)  # nanoseconds by performance policy
    nvlinks: dict[int, int] = field(default_factory=dict)  # whether a link is active, by its number
    nvlink_errors: dict[tuple[int, int], Number] = field(default_factory=dict)  # by link and counter

    def lines(self) -> list[str]:
        """The facts, one each, then those of its instances."""
        state = {"ok": 0, "lost": CODES["GPU_IS_LOST"], "reset_required": CODES["RESET_REQUIRED"]}[self.state]
        found = [*super().lines(), f"pci {self.pci_bus_id}", f"state {state}", f"partition {self.partition}"]
        found += [f"violation {policy} * 0 0 {_number(value)}" for policy, value in self.violations.items()]
        found += [f"nvlink_state {link} * 0 0 {_number(active)}" for link, active in self.nvlinks.items()]
        for (link, counter), value in self.nvlink_errors.items():
            found.append(f"nvlink_error {counter} {link} 0 0 {_number(value)}")
        for mig in self.migs:
            found += [f"mig {mig.uuid} {mig.slot}", *mig.lines(), f"partition {self.partition}"]
        return found


@dataclass
class Fault:
    """What a function does for one GPU; ``*`` stands for all of them."""

    function: str
    uuid: str = "*"
    code: Code | None = None  # returned with nothing done; 0 is success, with nothing done
    slow_ms: int = 0
    hang: bool = False  # does not come back before a scenario without it
    race: int = 0  # the call with a buffer finds it too small so many times


@dataclass
class FakeEvent:
    """An event, told once to each set whose GPU was registered before it was written."""

    sequence: int
    uuid: str
    data: int
    type: int = XID
    gpu_instance: int = NO_INSTANCE
    compute_instance: int = NO_INSTANCE


@dataclass
class Scenario:
    """All that the library tells. Change it and write it again, while it is in use."""

    gpus: list[FakeGpu] = field(default_factory=list)
    driver: str = "570.86.15"
    cuda: tuple[int, int] = (12, 8)
    init: Code = 0  # what `nvmlInit` returns
    broken: Code = 0  # what every call returns: the driver was replaced
    visible: Sequence[int] | None = None  # numbers of the GPUs that are seen, which are then numbered from 0
    global_lock: bool = False
    """Whether one call at a time is answered, as the real driver does: one that hangs holds up all."""
    faults: list[Fault] = field(default_factory=list)
    events: list[FakeEvent] = field(default_factory=list)
    field_max: int = 308  # ids of fields from here on are not those of any; the others are at least not supported
    sample_period_s: float = 1.0  # how often the driver looks at the utilization of processes
    start: float = field(default_factory=time.time)  # moment in epoch seconds from which numbers change
    without: Sequence[str] = ()  # functions that the library of this driver lacks

    def text(self) -> str:
        """What the library reads."""
        lines = [
            f"driver {self.driver}",
            f"nvml {self.cuda[0]}.{self.driver}",
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
        """Put it in place at once, so that no reader sees half of it."""
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(self.text())
        os.chmod(beside, 0o644)
        os.replace(beside, path)

    def environment(self, path: Path) -> dict[str, str]:
        """What a child process needs to find this library and this scenario."""
        search = filter(None, (str(library(self.without)), os.environ.get("LD_LIBRARY_PATH")))
        return {"LD_LIBRARY_PATH": os.pathsep.join(search), "FAKENVML_SCENARIO": str(path)}

    def fail(self, function: str, code: Code, gpu: Unit | None = None) -> None:
        """Make a function return this for one GPU, or for all."""
        self.faults.append(Fault(function, gpu.uuid if gpu else "*", code=code))

    def hang(self, function: str, gpu: Unit | None = None) -> None:
        """Make a function not come back; ``release`` and a write let it."""
        self.faults.append(Fault(function, gpu.uuid if gpu else "*", hang=True))

    def release(self) -> None:
        """Take back everything that hangs."""
        self.faults = [it for it in self.faults if not it.hang]

    def rebase(self) -> None:
        """Take the present values of numbers that change as those they go on from, before their rates are changed."""
        now = time.time()
        for unit in [unit for gpu in self.gpus for unit in (gpu, *gpu.migs)]:
            for name, value in vars(unit).items():
                if isinstance(value, Rate):
                    setattr(unit, name, value.after(now - self.start))
                elif isinstance(value, dict):
                    value.update({key: it.after(now - self.start) for key, it in value.items() if isinstance(it, Rate)})
        self.start = now

    def xid(
        self, number: int, gpu: Unit, *, gpu_instance: int = NO_INSTANCE, compute_instance: int = NO_INSTANCE
    ) -> None:
        """Add an Xid of a GPU after all events there are."""
        sequence = max((it.sequence for it in self.events), default=0) + 1
        where = {"gpu_instance": gpu_instance, "compute_instance": compute_instance}
        self.events.append(FakeEvent(sequence, gpu.uuid, number, **where))


def calls(folder: Path) -> Counter[str]:
    """How often each function was called by the processes that had this ``FAKENVML_CALLS``.

    Fields and GPM metrics that were asked for are counted as ``field[185]`` and ``gpm[2]``.
    """
    found: Counter[str] = Counter()
    for name, number, _ in _counts(folder):
        found[name] += number
    return found


def seconds_inside(folder: Path) -> float:
    """CPU time that those processes have spent in the library."""
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
