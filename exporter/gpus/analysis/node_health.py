"""How the GPUs of a node are: healthy, warning or failure, and why."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from exporter.gpus.analysis.xid import PAGING_XIDS, blames_device, xid_meaning
from exporter.gpus.records import STATE_WORDS

Health = Literal["healthy", "warning", "failure"]
HEALTHS: tuple[Health, ...] = ("healthy", "warning", "failure")

RATE_WINDOW_S = 600.0
"""Counters of links and memory are read once a minute: over ten readings one that comes late changes little."""
RATE_LEAST_S = 55.0  # a rate is told over at least about two readings
MOST_READINGS = 64
CORRECTED_PER_MINUTE = 10.0  # corrected errors are ordinary one by one; so many are a cell that is about to be remapped
REPLAYS_PER_MINUTE = 8.0  # PCIe repeats what was lost on the way; what NVIDIA's DCGM takes for a bad slot or riser
NVLINK_ERRORS_PER_MINUTE = 1.0
"""NVLink repeats too, and a sound link makes next to none: the threshold of NVIDIA's DCGM."""
LINK_BUSY = 0.5
"""Use from which on the link is at its full speed. Both are read at different moments, so a little is not enough,"""
SLOW_READINGS = 2  # and one reading is not: the GPU may have begun to work, or paused, between the two
XID_LASTS_S = 3600.0
"""For so long an error of the device counts that does not put it out of use: what lasts tells of itself otherwise."""

ACTION_WORDS = {
    "reset": "the driver asks for a reset of it",
    "reboot": "the driver asks for a reboot of the node",
    "drain_p2p": "the driver asks that its peers let go of it",
    "drain_and_reset": "the driver asks that it is drained and reset",
}
DRIVER_WORDS: Mapping[str, tuple[Health, str]] = {
    "hanging": ("failure", "the driver does not answer"),
    "failing": ("failure", "the driver cannot be asked"),
    "version_mismatch": (
        "warning",
        "the driver was replaced: what runs goes on, but no program can begin to use a GPU",
    ),
}  # what a driver's state says of the node. Without one, or without leave to ask it, nothing is known of its GPUs


class HealthReason(NamedTuple):
    """One thing that is wrong; the index of the GPU, or None where it is the driver's."""

    gpu: str | None
    severity: Health
    words: str


class HealthResult(NamedTuple):
    """Health of a node, the worst of its reasons; None where nothing can be known of its GPUs, or there are none."""

    health: Health | None
    reasons: tuple[HealthReason, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuHealthFacts:
    """What is known of one GPU, None where it does not tell; counters are the driver's where nothing else is said."""

    index: str
    state: str = "ok"  # ok, lost, reset_required or hanging
    words: str | None = None  # of one that is not ok: what the driver says
    ecc_corrected: int | None = None  # both since the job's start
    ecc_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failure: bool | None = None
    pages_pending: bool | None = None
    recovery_action: str | None = None
    pcie_replays: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    nvlink_errors: int | None = None
    utilization: float | None = None  # of now. An idle GPU lowers the generation of its link to save power
    condition_time: float | None = None
    """When the counters and the link were read; None where that is not known, or they never were."""
    xids: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """Count since the job's start and last moment, by code."""


def counter_offset(base: int | None, last: int | None, count: int) -> int:
    """What is to be taken off a counter of the driver, so that it counts from the job's start on.

    ``base``: what was taken off so far; None at first sight, from where it counts. ``last``: the counter at the last
    look. One that has fallen began anew, as the driver was loaded again: what it had counted for the job stays.
    """
    if base is None or last is None:
        return count if base is None else base
    return base - last if count < last else base


class _CounterRate:
    """How fast a counter rises, by its readings of the last minutes."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=MOST_READINGS)

    def per_minute(self, now: float, count: int | None) -> float | None:
        """Takes a reading; None before two that are far enough apart, or where the counter or the clock fell."""
        if count is None:
            return None
        readings = self._readings
        if readings and (count < readings[-1][1] or now < readings[-1][0]):
            readings.clear()
        if not readings or now - readings[-1][0] >= RATE_WINDOW_S / MOST_READINGS * 2:
            readings.append((now, count))
        while len(readings) > 1 and now - readings[1][0] >= RATE_WINDOW_S:
            readings.popleft()
        begun, first = readings[0]
        return 60 * (count - first) / (now - begun) if now - begun >= RATE_LEAST_S else None


class _LinkDowngrade:
    """How often in a row the link of a GPU that works was read to run as an older generation."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._slow = 0

    def is_slow(self, gpu: GpuHealthFacts) -> bool:
        """Takes in one look; a reading that was there at the last look says nothing anew."""
        if gpu.condition_time is None:
            self._slow = 0
        elif gpu.condition_time != self._time:
            generation, latest = gpu.pcie_generation, gpu.pcie_generation_max
            busy = gpu.utilization is not None and gpu.utilization >= LINK_BUSY
            self._slow = self._slow + 1 if busy and generation and latest and generation < latest else 0
        self._time = gpu.condition_time
        return self._slow >= SLOW_READINGS


class _GpuCounterHistory:
    """What earlier looks have told of one GPU."""

    def __init__(self) -> None:
        self.ecc, self.pcie, self.nvlink, self.link = _CounterRate(), _CounterRate(), _CounterRate(), _LinkDowngrade()


class NodeHealthTracker:
    """Judges a node by its GPUs at each look; remembers what it takes to know how fast their counters rise."""

    def __init__(self) -> None:
        self._histories: dict[str, _GpuCounterHistory] = {}

    def update(self, now: float, driver: str, gpus: Sequence[GpuHealthFacts], words: str | None = None) -> HealthResult:
        """Health at this look. ``driver``: whether GPUs can be read, ``ok`` and so on; ``words``: what it says."""
        self._histories = {gpu.index: self._histories.get(gpu.index) or _GpuCounterHistory() for gpu in gpus}
        reasons: list[HealthReason] = []
        if driver in DRIVER_WORDS:
            severity, found = DRIVER_WORDS[driver]
            reasons.append(HealthReason(None, severity, f"{found}: {words}" if words else found))
        for gpu in gpus:
            history = self._histories[gpu.index]
            found_here = [*_failures(gpu), *_warnings(now, gpu), *_recent_reasons(now, gpu, history)]
            reasons += sorted(found_here, key=lambda reason: -HEALTHS.index(reason.severity))
        if not reasons and (driver != "ok" or not gpus):
            return HealthResult(None)
        worst = max((HEALTHS.index(reason.severity) for reason in reasons), default=0)
        return HealthResult(HEALTHS[worst], tuple(reasons))


def _recent_reasons(now: float, gpu: GpuHealthFacts, history: _GpuCounterHistory) -> Iterator[HealthReason]:
    """What is only seen over several looks."""
    for rate, count, limit, what in (
        (history.ecc, gpu.ecc_corrected, CORRECTED_PER_MINUTE, "corrected memory errors"),
        (history.pcie, gpu.pcie_replays, REPLAYS_PER_MINUTE, "repeats on PCIe"),
        (history.nvlink, gpu.nvlink_errors, NVLINK_ERRORS_PER_MINUTE, "errors on NVLink"),
    ):
        rise = rate.per_minute(now, count)
        if rise is not None and rise > limit:
            yield HealthReason(gpu.index, "warning", f"{rise:.3g} {what} a minute in the last minutes")
    if history.link.is_slow(gpu):
        words = f"PCIe runs as generation {gpu.pcie_generation} of {gpu.pcie_generation_max} while the GPU works"
        yield HealthReason(gpu.index, "warning", words)


def _failures(gpu: GpuHealthFacts) -> Iterator[HealthReason]:
    def failure(words: str) -> HealthReason:
        return HealthReason(gpu.index, "failure", words)

    if gpu.state != "ok":
        words = f"it {STATE_WORDS.get(gpu.state, f'is {gpu.state}')}"
        yield failure(f"{words}: {gpu.words}" if gpu.words else words)
    if gpu.ecc_uncorrected:
        yield failure(f"{_count(gpu.ecc_uncorrected, 'uncorrectable memory error')} since the job's start")
    if gpu.row_remap_failure:
        yield failure("a row of its memory could not be remapped")
    if gpu.recovery_action not in (None, "none"):
        yield failure(ACTION_WORDS.get(str(gpu.recovery_action), f"the driver asks for {gpu.recovery_action}"))
    for code, (count, _) in sorted(gpu.xids.items()):
        if count > 0 and code in PAGING_XIDS:
            yield failure(_xid(code, count))


def _warnings(now: float, gpu: GpuHealthFacts) -> Iterator[HealthReason]:
    def warning(words: str) -> HealthReason:
        return HealthReason(gpu.index, "warning", words)

    if gpu.row_remap_pending:
        yield warning("a row of its memory is remapped at the next reset")
    if gpu.pages_pending:
        yield warning("a page of its memory is retired once the driver is loaded again")
    for code, (count, last) in sorted(gpu.xids.items()):
        if count > 0 and blames_device(code) and code not in PAGING_XIDS and now - last <= XID_LASTS_S:
            yield warning(_xid(code, count))
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    if width and widest and width < widest:
        yield warning(f"PCIe has {width} lanes of {widest}")


def _xid(code: int, count: int) -> str:
    return f"Xid {code}{'' if count == 1 else f', {count} times'} since the job's start: {xid_meaning(code)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
