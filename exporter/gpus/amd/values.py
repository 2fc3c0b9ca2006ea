"""Values as ``amdsmi`` tells them, in base units; None of what is no value.

What is not told is ``"N/A"`` or the largest number of its field, now one, now the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.gpus.records import ThrottleReason

THROTTLING: dict[ThrottleReason, tuple[str, ...]] = {
    "power_cap": ("ppt_residency_acc",),
    "thermal": ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
    "hw_thermal": ("prochot_residency_acc",),
}
"""Ticks of ``accumulation_counter`` that the firmware spent with clocks held down: by the limit of the package's power,
by the heat of the socket, its regulators or memory, and by the signal of a processor that is too hot."""
PCIE_SPEEDS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)  # GT/s of the generations 1 to 6


@dataclass(slots=True)
class AmdThrottleTime:
    """Seconds with clocks held down since the first reading: the share of the firmware's ticks, times our own time."""

    seconds: dict[ThrottleReason, float] = field(default_factory=dict)
    _ticks: dict[str, int] = field(default_factory=dict)
    _moment: float = 0.0

    def read(self, metrics: Mapping[str, Any], now: float) -> dict[ThrottleReason, float]:
        """The seconds so far, by each reason that is told. Ticks that fall (the GPU was reset) add nothing."""
        names = ("accumulation_counter", *(name for group in THROTTLING.values() for name in group))
        told = {name: count_value(metrics.get(name)) for name in names}
        ticks = {name: number for name, number in told.items() if number is not None}
        if "accumulation_counter" not in ticks:
            return dict(self.seconds)
        passed = self._passed("accumulation_counter", ticks)
        if passed == 0 and self._ticks:
            return dict(self.seconds)  # the table is still the one that was read last
        for reason, group in THROTTLING.items():
            held = [self._passed(name, ticks) for name in group if name in ticks]
            if held:  # the causes of one reason overlap, so the longest of them counts
                share = min(max(0, *held) / passed, 1.0) if passed > 0 else 0.0
                self.seconds[reason] = self.seconds.get(reason, 0.0) + share * (now - self._moment)
        self._ticks, self._moment = ticks, now
        return dict(self.seconds)

    def _passed(self, name: str, ticks: Mapping[str, int]) -> int:
        return ticks[name] - self._ticks.get(name, ticks[name])


def table_value(value: object) -> Mapping[str, Any]:
    """Values by name; none where another form is told, a text as it may be."""
    return value if isinstance(value, Mapping) else {}


def list_value(value: object) -> list[Mapping[str, Any]]:
    """Tables of a list; without what is none."""
    return [table_value(entry) for entry in value] if isinstance(value, list | tuple) else []


def bad_pages(told: object) -> list[bool] | None:
    """Of each page that is bad whether it is retired by now; None where that is not told.

    Before ROCm 6.1 it is a text that says of a sound GPU that there are none.
    """
    if isinstance(told, str):
        return None if text_value(told) is None else []
    pages = [page.get("status") for page in list_value(told)]
    return [status == 0 for status in pages if status is not None] if isinstance(told, list) else None


def text_value(value: object) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def count_value(value: object) -> int | None:
    """A counter or a size; the largest number of its type is no value."""
    if not isinstance(value, int) or value < 0 or value in (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF):
        return None
    return value


def gauge_value(value: object) -> float | None:
    """Watts, degrees, percent, megahertz: none of them reaches 0xFFFF."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 0xFFFF else None


def ratio_value(value: object) -> float | None:
    percent = gauge_value(value)
    return None if percent is None or percent > 100 else percent / 100


def hertz_value(value: object) -> float | None:
    megahertz = gauge_value(value)
    return None if megahertz is None else megahertz * 1e6


def limit_w(value: object) -> float | None:
    """Watts up to ROCm 7.1, microwatts of later libraries; no limit lies between 65 kW and 1 W."""
    limit = count_value(value)
    if limit is None or limit == 0xFFFF:
        return None
    return float(limit) if limit < 0xFFFF else limit / 1e6


def energy_j(told: Mapping[str, Any]) -> float | None:
    """A counter times its resolution in microjoules."""
    counter, resolution = count_value(told.get("energy_accumulator", told.get("power"))), told.get("counter_resolution")
    return counter * resolution / 1e6 if counter is not None and isinstance(resolution, float) else None


def pcie_generation(speed: object) -> int | None:
    """Of PCIe, by the speed of a lane: the one present is in MT/s, the largest in GT/s or MT/s."""
    value = count_value(speed)
    if not value:
        return None
    gigatransfers = value / 1000 if value >= 1000 else value
    return sum(gigatransfers >= known for known in PCIE_SPEEDS) or None


def pcie_lanes(value: object) -> int | None:
    """Of PCIe; a link has one at least."""
    number = gauge_value(value)
    return int(number) if number else None


def link_bytes_total(kilobytes: Iterable[object]) -> int | None:
    """The sum over the links that are there, each in KB."""
    told = [link for link in map(count_value, kilobytes) if link is not None]
    return sum(told) * 1024 if told else None


def fan_ratio(speed: object, most: object) -> float | None:
    now, full = gauge_value(speed), gauge_value(most)
    return min(now / full, 1.0) if now is not None and full else None
