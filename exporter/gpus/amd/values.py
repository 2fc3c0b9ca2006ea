"""Values of ``amdsmi`` in base units; None for missing values.

A missing value may be ``"N/A"`` or the largest number of its type.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.records import ThrottleReason

# Counters of firmware ticks with reduced clocks: package power limit; heat of socket, regulators or memory; overheating
# signal of the processor (PROCHOT). ``accumulation_counter`` counts all ticks.
THROTTLING: dict[ThrottleReason, tuple[str, ...]] = {
    "power_cap": ("ppt_residency_acc",),
    "thermal": ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
    "hw_thermal": ("prochot_residency_acc",),
}
PCIE_SPEEDS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)  # GT/s of generations 1 to 6


@dataclass(slots=True)
class AmdThrottleTime:
    """Seconds with reduced clocks since the first reading: share of firmware ticks, times our own clock."""

    seconds: dict[ThrottleReason, float] = field(default_factory=dict)
    _ticks: dict[str, int] = field(default_factory=dict)
    _read_at: float = 0.0

    def update(self, metrics: Mapping[str, object], now: float) -> dict[ThrottleReason, float]:
        """Add a reading and return the seconds by known reason. Falling ticks (a GPU reset) add nothing."""
        names = ("accumulation_counter", *(name for group in THROTTLING.values() for name in group))
        counters = {name: count_value(metrics.get(name)) for name in names}
        ticks = {name: number for name, number in counters.items() if number is not None}
        if "accumulation_counter" not in ticks:
            return dict(self.seconds)
        passed = self._tick_increase("accumulation_counter", ticks)
        if passed == 0 and self._ticks:
            return dict(self.seconds)  # the table has not been updated
        for reason, group in THROTTLING.items():
            held = [self._tick_increase(name, ticks) for name in group if name in ticks]
            if held:  # causes of one reason overlap, so the longest counts
                share = min(max(0, *held) / passed, 1.0) if passed > 0 else 0.0
                self.seconds[reason] = self.seconds.get(reason, 0.0) + share * (now - self._read_at)
        self._ticks, self._read_at = ticks, now
        return dict(self.seconds)

    def _tick_increase(self, name: str, ticks: Mapping[str, int]) -> int:
        return ticks[name] - self._ticks.get(name, ticks[name])


def table_value(value: object) -> Mapping[str, object]:
    """Return a mapping unchanged; empty for anything else, such as a text."""
    return value if isinstance(value, Mapping) else {}


def list_value(value: object) -> list[Mapping[str, object]]:
    """Mappings of a list; other entries become empty."""
    return [table_value(entry) for entry in value] if isinstance(value, list | tuple) else []


def bad_pages(value: object) -> list[bool] | None:
    """Whether each bad page is already retired; None if unknown.

    Before ROCm 6.1, a GPU without bad pages has a text here.
    """
    if isinstance(value, str):
        return None if text_value(value) is None else []
    pages = [page.get("status") for page in list_value(value)]
    return [status == 0 for status in pages if status is not None] if isinstance(value, list) else None


def text_value(value: object) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def count_value(value: object) -> int | None:
    """A counter or size; None for the largest number of its type."""
    if not isinstance(value, int) or value < 0 or value in (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF):
        return None
    return value


def gauge_value(value: object) -> float | None:
    """Watts, degrees, percent or megahertz, which never reach 0xFFFF."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 0xFFFF else None


def ratio_value(value: object) -> float | None:
    percent = gauge_value(value)
    return None if percent is None or percent > 100 else percent / 100


def hertz_value(value: object) -> float | None:
    megahertz = gauge_value(value)
    return None if megahertz is None else megahertz * 1e6


def limit_w(value: object) -> float | None:
    """Power limit: watts up to ROCm 7.1, later microwatts. No limit is above 65 kW or below 1 W."""
    limit = count_value(value)
    if limit is None or limit == 0xFFFF:
        return None
    return float(limit) if limit < 0xFFFF else limit / 1e6


def energy_j(table: Mapping[str, object]) -> float | None:
    """Counter times resolution, which is in microjoules."""
    counter, resolution = (
        count_value(table.get("energy_accumulator", table.get("power"))),
        table.get("counter_resolution"),
    )
    return counter * resolution / 1e6 if counter is not None and isinstance(resolution, float) else None


def pcie_generation(speed: object) -> int | None:
    """Generation from the speed of a lane: the present one in MT/s, the maximum in GT/s or MT/s."""
    value = count_value(speed)
    if not value:
        return None
    gigatransfers = value / 1000 if value >= 1000 else value
    return sum(gigatransfers >= known for known in PCIE_SPEEDS) or None


def pcie_lanes(value: object) -> int | None:
    """Number of lanes; None instead of 0."""
    number = gauge_value(value)
    return int(number) if number else None


def link_bytes_total(kilobytes: Iterable[object]) -> int | None:
    """Sum of the known links, from KB."""
    counts = [link for link in map(count_value, kilobytes) if link is not None]
    return sum(counts) * 1024 if counts else None


def fan_ratio(speed: object, max_speed: object) -> float | None:
    now, full = gauge_value(speed), gauge_value(max_speed)
    return min(now / full, 1.0) if now is not None and full else None
