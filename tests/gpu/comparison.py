"""Our series beside those of ``nvidia-smi``, and whether they agree."""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exporter.collecting.families import Family
from exporter.gpus.collectors import page as gpu_page
from exporter.gpus.records import ThrottleReason
from tests.exporter.gpus.collectors.gpu_job import Page
from tests.gpu.nvidia_smi import MIB, Answer

Verdict = Literal["agrees", "differs", "we do not tell", "it does not tell", "nobody tells"]
FAULTS: tuple[Verdict, ...] = ("differs", "we do not tell")


@dataclass(frozen=True)
class Pair:
    """One of our series, and where ``nvidia-smi`` has the same: the first source that it knows."""

    family: Family
    sources: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: float = 1.0  # by which its number is multiplied
    per: tuple[str, ...] = ()  # sources of the number by which its number is divided
    within: float = 0.0  # difference that is allowed, in our unit; or that share of its number, if more
    within_ratio: float = 0.0


@dataclass(frozen=True)
class Line:
    """One line of the table; numbers are medians of all samples."""

    series: str
    ours: float | str | None
    theirs: float | str | None
    tolerance: float
    verdict: Verdict

    @property
    def difference(self) -> float | None:
        """Ours less theirs, of numbers."""
        if isinstance(self.ours, str) or isinstance(self.theirs, str) or self.ours is None or self.theirs is None:
            return None
        return self.ours - self.theirs


THROTTLE: dict[ThrottleReason, tuple[str, str]] = {
    "power_cap": ("sw_power_cap", "sw_power_cap"),
    "thermal": ("sw_thermal_slowdown", "sw_therm_slowdown"),
    "hw_thermal": ("hw_thermal_slowdown", "hw_therm_slowdown"),
    "hw_power_brake": ("hw_power_brake_slowdown", "hw_power_brake"),
    "sync_boost": ("sync_boost", "sync_boost"),
}  # what the counters are called as fields, and in the XML
_COUNTERS = "clocks_event_reasons_counters"

PAIRS = (
    Pair(gpu_page.UTILIZATION, ("utilization.gpu",), unit=0.01, within=0.05),
    Pair(gpu_page.MEMORY_UTILIZATION, ("utilization.memory",), unit=0.01, within=0.05),
    Pair(gpu_page.MEMORY_USED, ("memory.used",), unit=MIB, within=2 * MIB),
    Pair(gpu_page.MEMORY_TOTAL, ("memory.total",), unit=MIB, within=MIB),
    Pair(gpu_page.POWER, ("power.draw.average", "power.draw"), {"kind": "average"}, within=5, within_ratio=0.05),
    Pair(gpu_page.POWER, ("power.draw.instant",), {"kind": "instant"}, within=10, within_ratio=0.1),
    Pair(gpu_page.POWER_LIMIT, ("enforced.power.limit",), within=0.01),
    Pair(gpu_page.TEMPERATURE, ("temperature.gpu",), {"sensor": "gpu"}, within=2),
    Pair(gpu_page.TEMPERATURE, ("temperature.memory",), {"sensor": "memory"}, within=2),
    Pair(gpu_page.CLOCK, ("clocks.current.sm", "clocks.sm"), {"clock": "sm"}, unit=1e6, within=3e7, within_ratio=0.03),
    Pair(gpu_page.CLOCK, ("clocks.current.memory", "clocks.mem"), {"clock": "memory"}, unit=1e6, within=1e6),
    *(
        Pair(
            gpu_page.THROTTLE,
            (f"{_COUNTERS}.{name}", f"./{_COUNTERS}/{_COUNTERS}_{path}"),
            {"reason": reason},
            unit=1e-6,
            within=2,
        )
        for reason, (name, path) in THROTTLE.items()
    ),
    Pair(gpu_page.ECC, ("ecc.errors.corrected.volatile.total",), {"type": "corrected"}),
    Pair(gpu_page.ECC, ("ecc.errors.uncorrected.volatile.total",), {"type": "uncorrected"}),
    Pair(gpu_page.REMAPPED, ("remapped_rows.correctable",), {"type": "corrected"}),
    Pair(gpu_page.REMAPPED, ("remapped_rows.uncorrectable",), {"type": "uncorrected"}),
    Pair(gpu_page.REMAP_PENDING, ("remapped_rows.pending",)),
    Pair(gpu_page.REMAP_FAILURE, ("remapped_rows.failure",)),
    Pair(gpu_page.RETIRED, ("retired_pages.single_bit_ecc.count",), {"type": "corrected"}),
    Pair(gpu_page.RETIRED, ("retired_pages.double_bit.count",), {"type": "uncorrected"}),
    Pair(gpu_page.PAGES_PENDING, ("retired_pages.pending",)),
    Pair(gpu_page.REPLAYS, ("./pci/replay_counter",)),
    Pair(gpu_page.PCIE_WIDTH, ("pcie.link.width.current",), per=("pcie.link.width.max",)),
    Pair(gpu_page.PCIE_GENERATION, ("pcie.link.gen.current",), per=("pcie.link.gen.max",)),
    Pair(gpu_page.FAN, ("fan.speed",), unit=0.01, within=0.05),
)
TEXTS: tuple[tuple[Family, str, tuple[str, ...]], ...] = (
    (gpu_page.INFO, "uuid", ("uuid",)),
    (gpu_page.INFO, "name", ("name",)),
    (gpu_page.INFO, "pci_bus_id", ("pci.bus_id",)),
    (gpu_page.INFO, "driver_version", ("driver_version",)),
    (gpu_page.INFO, "cuda_version", ("./cuda_version",)),
    (gpu_page.INFO, "persistence_mode", ("persistence_mode",)),
    (gpu_page.INFO, "mig_mode", ("mig.mode.current",)),
    (gpu_page.RECOVERY, "action", ("gpu_recovery_action", "./gpu_recovery_action")),
)  # Labels, and where the same words are

ELSEWHERE: dict[Family, str] = {
    gpu_page.UP: "of a GPU that answers it is 1",
    gpu_page.STATE: "of a GPU that answers there is none",
    gpu_page.ENERGY: "its rise is held against the power",
    gpu_page.SM_ACTIVITY: "held against what a kernel was made to do",
    gpu_page.TENSOR_ACTIVITY: "held against what a kernel was made to do",
    gpu_page.DRAM_ACTIVITY: "held against what a kernel was made to do",
    gpu_page.NVLINK_RATE: "no field tells it",
    gpu_page.PCIE_RATE: "no field tells it",
    gpu_page.NVLINK_BYTES: "no field tells it",
    gpu_page.NVLINK_ERRORS: "no field tells it",
    gpu_page.ECC_JOB: "the rise of the driver's count, which is compared",
    gpu_page.XID_TIME: "held against an error that is made",
}  # families that are not compared, and why

SOURCES = frozenset(
    source
    for sources in (*(p.sources for p in PAIRS), *(p.per for p in PAIRS), *(text[2] for text in TEXTS))
    for source in sources
)


def compare(gpu: str, pages: Sequence[Page], answers: Sequence[Answer]) -> list[Line]:
    """All series of one GPU, from samples of both that were taken in turn."""
    return [*(_number_line(pair, gpu, pages, answers) for pair in PAIRS), *_text_lines(gpu, pages[-1], answers[-1])]


def faults(lines: Collection[Line]) -> list[str]:
    """Where they do not agree, in words."""
    return [f"{line.series}: {line.verdict}: {line.ours} and {line.theirs}" for line in lines if line.verdict in FAULTS]


def table(lines: Collection[Line]) -> str:
    """For people."""
    rows = [("series", "ours", "nvidia-smi", "difference", "tolerance", "")]
    for line in lines:
        difference = _shown(line.difference)
        rows.append(
            (line.series, _shown(line.ours), _shown(line.theirs), difference, _shown(line.tolerance), line.verdict)
        )
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, the first column to the left, the others to the right, the last as it is."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _number_line(pair: Pair, gpu: str, pages: Sequence[Page], answers: Sequence[Answer]) -> Line:
    ours = _median(page.value(pair.family.name, gpu=gpu, **pair.labels) for page in pages)
    theirs = _median(_told(pair, answer) for answer in answers)
    tolerance = max(pair.within, pair.within_ratio * abs(theirs or 0.0))
    labels = ",".join(f"{name}={value}" for name, value in pair.labels.items())
    series = pair.family.name + (f"{{{labels}}}" if labels else "")
    return Line(series, ours, theirs, tolerance, _verdict(ours, theirs, tolerance))


def _told(pair: Pair, answer: Answer) -> float | None:
    """Its number in our unit."""
    found = answer.number(pair.sources)
    if found is None or not pair.per:
        return None if found is None else found * pair.unit
    most = answer.number(pair.per)
    return found / most if most else None


def _text_lines(gpu: str, page: Page, answer: Answer) -> Iterator[Line]:
    for family, label, sources in TEXTS:
        labels = page.labels(family.name, gpu=gpu) or {}
        ours, theirs = labels.get(label) or None, _word(answer.text(sources), label)
        if label == "action" and theirs is None:
            ours = None  # an older driver has no word for it
        same: Verdict = "agrees" if ours == theirs else "differs"
        if ours is None or theirs is None:
            same = _verdict(None if ours is None else 0, None if theirs is None else 0, 0)
        yield Line(f"{family.name}.{label}", ours, theirs, 0, same)


def _word(text: str | None, label: str) -> str | None:
    """Its word as we write it."""
    if text is None:
        return None
    if label == "pci_bus_id":
        return text.lower()[-len("0000:3b:00.0") :]
    if label.endswith("_mode"):
        return {"Enabled": "on", "Disabled": "off"}.get(text, text)
    return "_".join(text.lower().split()) if label == "action" else text


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _verdict(ours: float | None, theirs: float | None, tolerance: float) -> Verdict:
    if ours is None:
        return "nobody tells" if theirs is None else "we do not tell"
    if theirs is None:
        return "it does not tell"
    return "agrees" if abs(ours - theirs) <= tolerance + 1e-9 * abs(theirs) else "differs"


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.12g}"
