"""Comparison of our series with the output of ``nvidia-smi``."""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exporter.collecting.families import Family
from exporter.gpus.collectors import page
from exporter.gpus.records import ThrottleReason
from tests.exporter.gpus.collectors.gpu_job import Page
from tests.gpu.nvidia_smi import MIB, Answer

Outcome = Literal["agrees", "differs", "only nvidia-smi", "only ours", "unknown to both"]
FAULTS: tuple[Outcome, ...] = ("differs", "only nvidia-smi")


@dataclass(frozen=True)
class Pair:
    """One of our series and its sources in ``nvidia-smi``. The first known source counts."""

    family: Family
    sources: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: float = 1.0  # factor from its number to our unit
    per: tuple[str, ...] = ()  # sources of the divisor of its number
    within: float = 0.0  # allowed difference in our unit, or `within_ratio` of its number if that is larger
    within_ratio: float = 0.0


@dataclass(frozen=True)
class Line:
    """One line of the table. Numbers are medians of all samples."""

    series: str
    ours: float | str | None
    theirs: float | str | None
    tolerance: float
    outcome: Outcome

    @property
    def difference(self) -> float | None:
        """Our number minus theirs, or None for texts."""
        if isinstance(self.ours, str) or isinstance(self.theirs, str) or self.ours is None or self.theirs is None:
            return None
        return self.ours - self.theirs


THROTTLE: dict[ThrottleReason, tuple[str, str]] = {
    "power_cap": ("sw_power_cap", "sw_power_cap"),
    "thermal": ("sw_thermal_slowdown", "sw_therm_slowdown"),
    "hw_thermal": ("hw_thermal_slowdown", "hw_therm_slowdown"),
    "hw_power_brake": ("hw_power_brake_slowdown", "hw_power_brake"),
    "sync_boost": ("sync_boost", "sync_boost"),
}  # names of the counters as query fields and in the XML
_COUNTERS = "clocks_event_reasons_counters"

PAIRS = (
    Pair(page.UTILIZATION, ("utilization.gpu",), unit=0.01, within=0.05),
    Pair(page.MEMORY_UTILIZATION, ("utilization.memory",), unit=0.01, within=0.05),
    Pair(page.MEMORY_USED, ("memory.used",), unit=MIB, within=2 * MIB),
    Pair(page.MEMORY_TOTAL, ("memory.total",), unit=MIB, within=MIB),
    Pair(page.POWER, ("power.draw.average", "power.draw"), {"kind": "average"}, within=5, within_ratio=0.05),
    Pair(page.POWER, ("power.draw.instant",), {"kind": "instant"}, within=10, within_ratio=0.1),
    Pair(page.POWER_LIMIT, ("enforced.power.limit",), within=0.01),
    Pair(page.TEMPERATURE, ("temperature.gpu",), {"sensor": "gpu"}, within=2),
    Pair(page.TEMPERATURE, ("temperature.memory",), {"sensor": "memory"}, within=2),
    Pair(page.CLOCK, ("clocks.current.sm", "clocks.sm"), {"clock": "sm"}, unit=1e6, within=3e7, within_ratio=0.03),
    Pair(page.CLOCK, ("clocks.current.memory", "clocks.mem"), {"clock": "memory"}, unit=1e6, within=1e6),
    *(
        Pair(
            page.THROTTLE,
            (f"{_COUNTERS}.{name}", f"./{_COUNTERS}/{_COUNTERS}_{path}"),
            {"reason": reason},
            unit=1e-6,
            within=2,
        )
        for reason, (name, path) in THROTTLE.items()
    ),
    Pair(page.ECC, ("ecc.errors.corrected.volatile.total",), {"type": "corrected"}),
    Pair(page.ECC, ("ecc.errors.uncorrected.volatile.total",), {"type": "uncorrected"}),
    Pair(page.REMAPPED, ("remapped_rows.correctable",), {"type": "corrected"}),
    Pair(page.REMAPPED, ("remapped_rows.uncorrectable",), {"type": "uncorrected"}),
    Pair(page.REMAP_PENDING, ("remapped_rows.pending",)),
    Pair(page.REMAP_FAILURE, ("remapped_rows.failure",)),
    Pair(page.RETIRED, ("retired_pages.single_bit_ecc.count",), {"type": "corrected"}),
    Pair(page.RETIRED, ("retired_pages.double_bit.count",), {"type": "uncorrected"}),
    Pair(page.PAGES_PENDING, ("retired_pages.pending",)),
    Pair(page.REPLAYS, ("./pci/replay_counter",)),
    Pair(page.PCIE_WIDTH, ("pcie.link.width.current",), per=("pcie.link.width.max",)),
    Pair(page.PCIE_GENERATION, ("pcie.link.gen.current",), per=("pcie.link.gen.max",)),
    Pair(page.FAN, ("fan.speed",), unit=0.01, within=0.05),
)
TEXTS: tuple[tuple[Family, str, tuple[str, ...]], ...] = (
    (page.INFO, "uuid", ("uuid",)),
    (page.INFO, "name", ("name",)),
    (page.INFO, "pci_bus_id", ("pci.bus_id",)),
    (page.INFO, "driver_version", ("driver_version",)),
    (page.INFO, "cuda_version", ("./cuda_version",)),
    (page.INFO, "persistence_mode", ("persistence_mode",)),
    (page.INFO, "mig_mode", ("mig.mode.current",)),
    (page.RECOVERY, "action", ("gpu_recovery_action", "./gpu_recovery_action")),
)  # labels and their sources

ELSEWHERE: dict[Family, str] = {
    page.UP: "always 1 for a GPU that answers",
    page.STATE: "no series for a GPU that answers",
    page.ENERGY: "its rise is compared with the power",
    page.SM_ACTIVITY: "compared with the load of a kernel",
    page.TENSOR_ACTIVITY: "compared with the load of a kernel",
    page.DRAM_ACTIVITY: "compared with the load of a kernel",
    page.NVLINK_RATE: "no field reports it",
    page.PCIE_RATE: "no field reports it",
    page.NVLINK_BYTES: "no field reports it",
    page.NVLINK_ERRORS: "no field reports it",
    page.ECC_JOB: "the rise of a driver counter that is compared",
    page.XID_TIME: "compared with a provoked error",
}  # families that are not compared, with the reason

SOURCES = frozenset(
    source
    for sources in (*(p.sources for p in PAIRS), *(p.per for p in PAIRS), *(text[2] for text in TEXTS))
    for source in sources
)


def compare(gpu: str, pages: Sequence[Page], answers: Sequence[Answer]) -> list[Line]:
    """Compare all series of one GPU, from alternating samples of both."""
    return [*(_number_line(pair, gpu, pages, answers) for pair in PAIRS), *_text_lines(gpu, pages[-1], answers[-1])]


def faults(lines: Collection[Line]) -> list[str]:
    """Texts of the lines that do not agree."""
    return [f"{line.series}: {line.outcome}: {line.ours} and {line.theirs}" for line in lines if line.outcome in FAULTS]


def table(lines: Collection[Line]) -> str:
    """The lines as a readable table."""
    rows = [("series", "ours", "nvidia-smi", "difference", "tolerance", "")]
    for line in lines:
        difference = _format(line.difference)
        rows.append(
            (line.series, _format(line.ours), _format(line.theirs), difference, _format(line.tolerance), line.outcome)
        )
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text: the first column left-aligned, the others right-aligned, the last unpadded."""
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
    ours = _median(each.value(pair.family.name, gpu=gpu, **pair.labels) for each in pages)
    theirs = _median(_their_number(pair, answer) for answer in answers)
    tolerance = max(pair.within, pair.within_ratio * abs(theirs or 0.0))
    labels = ",".join(f"{name}={value}" for name, value in pair.labels.items())
    series = pair.family.name + (f"{{{labels}}}" if labels else "")
    return Line(series, ours, theirs, tolerance, _outcome(ours, theirs, tolerance))


def _their_number(pair: Pair, answer: Answer) -> float | None:
    """The number of ``nvidia-smi`` in our unit."""
    found = answer.number(pair.sources)
    if found is None or not pair.per:
        return None if found is None else found * pair.unit
    divisor = answer.number(pair.per)
    return found / divisor if divisor else None


def _text_lines(gpu: str, metrics: Page, answer: Answer) -> Iterator[Line]:
    for family, label, sources in TEXTS:
        labels = metrics.labels(family.name, gpu=gpu) or {}
        ours, theirs = labels.get(label) or None, _our_spelling(answer.text(sources), label)
        if label == "action" and theirs is None:
            ours = None  # an older driver does not report it
        outcome: Outcome = "agrees" if ours == theirs else "differs"
        if ours is None or theirs is None:
            outcome = _outcome(None if ours is None else 0, None if theirs is None else 0, 0)
        yield Line(f"{family.name}.{label}", ours, theirs, 0, outcome)


def _our_spelling(text: str | None, label: str) -> str | None:
    """The text of ``nvidia-smi`` in our spelling."""
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


def _outcome(ours: float | None, theirs: float | None, tolerance: float) -> Outcome:
    if ours is None:
        return "unknown to both" if theirs is None else "only nvidia-smi"
    if theirs is None:
        return "only ours"
    return "agrees" if abs(ours - theirs) <= tolerance + 1e-9 * abs(theirs) else "differs"


def _format(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.12g}"
