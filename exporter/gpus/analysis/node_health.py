"""Health of a node's GPUs: healthy, warning or failure, with reasons."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from exporter.gpus.analysis.xid import PAGING_XIDS, is_device_fault, xid_meaning
from exporter.gpus.records import STATE_TEXT, GpuActivity, GpuCondition, GpuEntry

Health = Literal["healthy", "warning", "failure"]
HEALTHS: tuple[Health, ...] = ("healthy", "warning", "failure")

RATE_WINDOW_S = 600.0  # counters are read once a minute; over ten readings, a late one changes little
RATE_LEAST_S = 55.0  # shortest period for a rate: about two readings
MOST_READINGS = 64
CORRECTED_PER_MINUTE = 10.0  # single corrected errors are ordinary; at this rate a cell is about to be remapped
REPLAYS_PER_MINUTE = 8.0  # PCIe resends lost packets; NVIDIA's DCGM takes this rate for a bad slot or riser
NVLINK_ERRORS_PER_MINUTE = 1.0  # threshold of NVIDIA's DCGM; NVLink also resends, but a good link hardly ever does
# Utilization at which the link runs at full speed. High, because the two are read at different times.
LINK_BUSY = 0.5
SLOW_READINGS = 2  # one reading is not enough: the GPU may have started or paused in between
# Time for which an error that leaves the device usable counts; a lasting fault shows in other values.
XID_LASTS_S = 3600.0

ACTION_TEXT = {
    "reset": "the driver asks for a reset of the GPU",
    "reboot": "the driver asks for a reboot of the node",
    "drain_p2p": "the driver asks to end peer access to the GPU",
    "drain_and_reset": "the driver asks to drain and reset the GPU",
}
DRIVER_REASONS: Mapping[str, tuple[Health, str]] = {
    "hanging": ("failure", "the driver does not answer"),
    "failing": ("failure", "the driver does not answer"),
    "version_mismatch": (
        "warning",
        "the driver was replaced: running programs continue, but new ones cannot use a GPU",
    ),
}  # without a driver, or without permission to use it, the health is unknown


class HealthReason(NamedTuple):
    """One reason for the health. ``gpu`` is an index, or None if the driver is the problem."""

    gpu: str | None
    severity: Health
    text: str


class HealthResult(NamedTuple):
    """Health of a node: the worst of its reasons. None if it has no GPUs or nothing is known about them."""

    health: Health | None
    reasons: tuple[HealthReason, ...] = ()


def counter_offset(base: int | None, last: int | None, count: int) -> int:
    """Offset to subtract from a driver counter so that it counts from the start of the job.

    ``base``: the previous offset, or None at the first reading, which then counts as 0. ``last``: the previous reading.
    A fall means that the driver was reloaded; errors counted before it are kept.
    """
    if base is None or last is None:
        return count if base is None else base
    return base - last if count < last else base


class _CounterRate:
    """Rate of a counter over its readings of the last minutes."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=MOST_READINGS)

    def per_minute(self, now: float, count: int | None) -> float | None:
        """Add a reading and return the rate.

        None before `RATE_LEAST_S` is covered, or after the counter or the clock fell.
        """
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
    """Consecutive readings in which a working GPU's link ran at an older generation."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._slow = 0

    def is_slow(self, gpu: GpuEntry) -> bool:
        """Add a reading and return whether the link is slow. An unchanged reading does not count again."""
        time, activity = gpu.state.condition_time, gpu.state.activity or GpuActivity()
        if time is None:
            self._slow = 0
        elif time != self._time:
            generation, latest = _condition(gpu).pcie_generation, _condition(gpu).pcie_generation_max
            # An idle GPU lowers its link generation to save power.
            busy = activity.utilization_ratio is not None and activity.utilization_ratio >= LINK_BUSY
            self._slow = self._slow + 1 if busy and generation and latest and generation < latest else 0
        self._time = time
        return self._slow >= SLOW_READINGS


class _GpuCounterHistory:
    """Counter history of one GPU."""

    def __init__(self) -> None:
        self.ecc, self.pcie, self.nvlink, self.link = _CounterRate(), _CounterRate(), _CounterRate(), _LinkDowngrade()


class NodeHealthTracker:
    """Determines the health of a node from its GPUs, keeping the history needed for rates."""

    def __init__(self) -> None:
        self._histories: dict[str, _GpuCounterHistory] = {}

    def update(self, now: float, driver: str, gpus: Sequence[GpuEntry], message: str | None = None) -> HealthResult:
        """Return the health now. ``driver``: driver state, such as ``ok``; ``message``: the driver's message."""
        indices = [gpu.state.gpu.index for gpu in gpus]
        self._histories = {index: self._histories.get(index) or _GpuCounterHistory() for index in indices}
        reasons: list[HealthReason] = []
        if driver in DRIVER_REASONS:
            severity, found = DRIVER_REASONS[driver]
            reasons.append(HealthReason(None, severity, f"{found}: {message}" if message else found))
        for gpu in gpus:
            history = self._histories[gpu.state.gpu.index]
            found_here = [*_failures(gpu), *_warnings(now, gpu), *_recent_reasons(now, gpu, history)]
            reasons += sorted(found_here, key=lambda reason: -HEALTHS.index(reason.severity))
        if not reasons and (driver != "ok" or not gpus):
            return HealthResult(None)
        worst = max((HEALTHS.index(reason.severity) for reason in reasons), default=0)
        return HealthResult(HEALTHS[worst], tuple(reasons))


def _recent_reasons(now: float, gpu: GpuEntry, history: _GpuCounterHistory) -> Iterator[HealthReason]:
    """Reasons that need several readings."""
    index, condition = gpu.state.gpu.index, _condition(gpu)
    for rate, count, limit, what in (
        (history.ecc, gpu.job_memory_errors.get("corrected"), CORRECTED_PER_MINUTE, "corrected memory errors"),
        (history.pcie, condition.pcie_replays, REPLAYS_PER_MINUTE, "PCIe replays"),
        (history.nvlink, condition.nvlink_errors, NVLINK_ERRORS_PER_MINUTE, "NVLink errors"),
    ):
        rise = rate.per_minute(now, count)
        if rise is not None and rise > limit:
            yield HealthReason(index, "warning", f"{rise:.3g} {what} a minute in the last minutes")
    if history.link.is_slow(gpu):
        generations = f"{condition.pcie_generation} of {condition.pcie_generation_max}"
        yield HealthReason(index, "warning", f"PCIe runs at generation {generations} while the GPU works")


def _failures(gpu: GpuEntry) -> Iterator[HealthReason]:
    def failure(words: str) -> HealthReason:
        return HealthReason(gpu.state.gpu.index, "failure", words)

    state, condition = gpu.state, _condition(gpu)
    if state.state != "ok":
        words = f"it {STATE_TEXT[state.state]}"
        yield failure(f"{words}: {state.message}" if state.message else words)
    if errors := gpu.job_memory_errors.get("uncorrected"):
        yield failure(f"{_count(errors, 'uncorrectable memory error')} since the job's start")
    if condition.row_remap_failure:
        yield failure("a row of its memory could not be remapped")
    action = condition.recovery_action
    if action is not None and action != "none":
        yield failure(ACTION_TEXT[action])
    for code, xid in sorted(gpu.xids.items()):
        if xid.count > 0 and code in PAGING_XIDS:
            yield failure(_xid(code, xid.count))


def _warnings(now: float, gpu: GpuEntry) -> Iterator[HealthReason]:
    def warning(words: str) -> HealthReason:
        return HealthReason(gpu.state.gpu.index, "warning", words)

    condition = _condition(gpu)
    if condition.row_remap_pending:
        yield warning("a row of its memory will be remapped at the next reset")
    if condition.pages_pending:
        yield warning("a page of its memory will be retired when the driver is reloaded")
    for code, xid in sorted(gpu.xids.items()):
        is_recent = xid.count > 0 and now - xid.last <= XID_LASTS_S
        if is_recent and is_device_fault(code) and code not in PAGING_XIDS:
            yield warning(_xid(code, xid.count))
    width, widest = condition.pcie_width, condition.pcie_width_max
    if width and widest and width < widest:
        yield warning(f"PCIe uses {width} of {widest} lanes")


def _condition(gpu: GpuEntry) -> GpuCondition:
    return gpu.state.condition or GpuCondition()


def _xid(code: int, count: int) -> str:
    return f"Xid {code}{'' if count == 1 else f', {count} times'} since the job's start: {xid_meaning(code)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
