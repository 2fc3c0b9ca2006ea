"""Signatures of workers that hang on their GPUs, do not use them, or are slowed down by them.

Each is derived from GPU readings and from the progress in the log. Nothing is reported while a worker starts, nor for
ordinary phases: evaluations, checkpoints, the end of the job.
"""

from collections.abc import Mapping
from dataclasses import field
from statistics import median
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.analysis.activity_history import (
    GAP_S,
    THROTTLE_S,
    ClockHistory,
    ConditionTimer,
    MemoryHistory,
    ThrottleHistory,
)
from exporter.gpus.records import GIB

RUNNING = "running"
PHASES_OF_WORK = (RUNNING, "checkpointing", "evaluating")
SAME_START_S = 1.0

# Lowest utilization of a spinning GPU. A hanging collective shows 100 %, while working steps dip now and then.
BUSY = 0.95
IDLE = 0.05  # highest utilization of an idle GPU: a desktop or a monitor draws a little, work always more
WORKING = 0.5
# Time to hold memory before any computation or progress: copying weights shows no utilization.
LOADING_S = 1800.0
# Share of its usual power under load that a GPU must exceed: spinning takes a third or less, work varies less.
LOW_POWER_OF_WORK = 0.6
# The same as a share of the power limit, before any work was seen: idle is about 0.1, spinning 0.25, work from 0.5.
LOW_POWER_OF_LIMIT = 0.35
POWER_S = 60.0  # period over which power is smoothed, because single readings jump
# Period for the usual power, long enough that a hang not yet detected hardly changes it.
WORK_POWER_S = 600.0
FRESH_S = 60.0  # age up to which progress proves that the GPU works, and utilization that the worker does
PEERS_S = 180.0  # longer than any work between two collectives, even a slow batch, while all others wait
THROTTLE_SHARE = 0.2  # short spells of heat are ordinary; a fifth of the time noticeably slows the work
# Faults of the machine; the power cap is ordinary at full load and only shown.
HEAT = ("thermal", "hw_thermal", "hw_power_brake")
SLOW_CLOCK = 0.15  # boards of one model differ by a few percent in clock under the same load
SLOW_LEAST_PEERS = 2


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of a GPU of a worker; None for values that it does not report."""

    index: str
    model: str = ""
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_hz: float | None = None
    throttle_s: Mapping[str, float] = field(default_factory=dict)  # seconds by reason
    used: bool | None = None  # whether a process of the worker is on it


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One reading of a worker."""

    rank: int
    role: str = "worker"
    start: float | None = None  # start of the run; None while it does not run
    phase: str | None = None  # phase of the job
    last_rise: float | None = None  # time of the last progress; None if there was none or it is unknown
    # Whether its log stopped its usual rhythm, regardless of GPUs; None without known progress.
    stalled: bool | None = None
    done: bool = False  # whether its work is complete
    waits_for_requests: bool = False  # whether it serves requests and has none, so no progress is expected
    gpus: tuple[GpuSample, ...] = ()


class Finding(NamedTuple):
    """Whether a signature is present, absent or unknown (None), with its evidence as text."""

    state: bool | None = None
    text: str = ""
    full_time: float | None = None  # when the memory will be full, for `memory_filling`


UNKNOWN, ABSENT = Finding(), Finding(False)


class _GpuTrack:
    """History of one GPU of a worker."""

    def __init__(self) -> None:
        self.sample: GpuSample | None = None
        self.busy = False  # at the last known utilization
        self.power_w: float | None = None  # smoothed, while busy
        self.work_power_w: float | None = None  # smoothed, while the worker makes progress
        self._work_s = 0.0
        self.unused_timer = ConditionTimer()
        self.clock = ClockHistory()
        self.throttle = ThrottleHistory()
        self.memory = MemoryHistory()

    def update(
        self, now: float, gpu: GpuSample, *, passed_s: float, is_active: bool, at_work: bool, has_recent_progress: bool
    ) -> None:
        """Add a reading."""
        self.sample = gpu
        works = gpu.utilization is not None and gpu.utilization >= WORKING
        if gpu.utilization is not None:
            self.busy = gpu.utilization >= BUSY
            self.power_w = self.power_w if works else None
        if works and gpu.power_w is not None:
            self.power_w = _smoothed(self.power_w, gpu.power_w, passed_s / POWER_S)
            if has_recent_progress:
                self._work_s += passed_s
                share = passed_s / min(self._work_s, WORK_POWER_S) if self._work_s else 0.0
                self.work_power_w = _smoothed(self.work_power_w, gpu.power_w, share)
        self.clock.update(now, gpu.sm_clock_hz if works and at_work else None)
        self.throttle.update(now, gpu.throttle_s)
        self.unused_timer.update(now, None if gpu.used is None else is_active and not gpu.used)
        if is_active and gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
            self.memory.update(now, gpu.memory_used_bytes, gpu.memory_total_bytes)

    @property
    def model(self) -> str:
        return self.sample.model if self.sample is not None else ""

    def low_power(self) -> tuple[bool, str] | None:
        """Whether the GPU draws too little power for work, with the power as text; None if unknown."""
        power, work = self.power_w, self.work_power_w
        limit = self.sample.power_limit_w if self.sample is not None else None
        if power is None:
            return None
        if work:
            return power <= LOW_POWER_OF_WORK * work, f"{power:.0f} W, {power / work:.0%} of its usual power under load"
        if limit:
            return power <= LOW_POWER_OF_LIMIT * limit, f"{power:.0f} W, {power / limit:.0%} of its limit"
        return None


class _WorkerTrack:
    """History of one run of a worker."""

    def __init__(self, start: float, launch_timeout_s: float) -> None:
        self.start = start
        self.launch_timeout_s = launch_timeout_s
        self.sample = WorkerSample(-1)
        self.last_seen: float | None = None
        self.at_work = False  # whether it should have been working at the last reading
        self.utilization: float | None = None  # smoothed utilization of its busiest GPU
        self.busy_timer = ConditionTimer()
        self.held_idle_timer = ConditionTimer()
        self.idle_peers_timer = ConditionTimer()
        self.idle_timer = ConditionTimer()  # true while all its GPUs are idle
        self.last_worked: float | None = None
        self.last_progress: float | None = None  # last progress in this run
        self.gpus: dict[str, _GpuTrack] = {}

    def update(self, now: float, sample: WorkerSample) -> None:
        """Add a reading."""
        passed_s = 0.0 if self.last_seen is None or not 0 <= now - self.last_seen <= GAP_S else now - self.last_seen
        if sample.last_rise != self.sample.last_rise:
            self.busy_timer.reset()
            self.held_idle_timer.reset()
        self.sample, self.last_seen = sample, now
        rise = sample.last_rise if sample.last_rise is not None and sample.last_rise >= self.start else None
        self.last_progress = rise
        settled = rise is not None or now - self.start >= self.launch_timeout_s
        self.at_work = sample.phase == RUNNING and settled and not sample.done and not sample.waits_for_requests
        fresh = rise is not None and now - rise <= FRESH_S
        self.gpus = {gpu.index: self.gpus.get(gpu.index) or _GpuTrack() for gpu in sample.gpus}
        here = sample.phase in PHASES_OF_WORK and not sample.done
        for gpu in sample.gpus:
            kept = self.gpus[gpu.index]
            kept.update(now, gpu, passed_s=passed_s, is_active=here, at_work=self.at_work, has_recent_progress=fresh)
        uses = [gpu.utilization for gpu in sample.gpus if gpu.utilization is not None]
        if not uses:
            return
        most = max(uses)
        idle = most <= IDLE and len(uses) == len(sample.gpus)
        self.utilization = _smoothed(self.utilization, most, passed_s / POWER_S)
        self.last_worked = now if most > IDLE else self.last_worked
        self.idle_timer.update(now, idle)
        self.busy_timer.update(now, None if sample.stalled is None else self.at_work and most >= BUSY)
        held = [gpu.used for gpu in sample.gpus]
        holds = True if True in held else None if None in held else False
        self.held_idle_timer.update(now, None if holds is None else self.at_work and idle and holds)

    def low_power(self) -> tuple[bool, str] | None:
        """Whether all busy GPUs draw too little power for work, with the powers as text; None if unknown."""
        busy = [(index, gpu) for index, gpu in self.gpus.items() if gpu.busy]
        found = [(index, low) for index, gpu in busy if (low := gpu.low_power()) is not None]
        if not found:
            return None
        return all(low for _, (low, _) in found), ", ".join(f"GPU {index} at {text}" for index, (_, text) in found)


class ConditionDetector:
    """Finds signatures of the workers of one node. Call ``update`` for every worker, then ``conditions``."""

    def __init__(self, *, stall_timeout_s: float, launch_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._launch_timeout_s = launch_timeout_s
        self._workers: dict[int, _WorkerTrack] = {}
        self._roles: dict[str, list[_WorkerTrack]] = {}  # workers at the last call of `conditions`, by role
        # Mean clock under load of each GPU, by role and model.
        self._clocks: dict[tuple[str, str], dict[_GpuTrack, float]] = {}
        self._fastest: dict[tuple[str, str], float] = {}  # highest of those clocks

    def update(self, now: float, sample: WorkerSample) -> None:
        """Add a reading of one worker. A new run restarts its history; a worker that does not run is dropped."""
        if sample.start is None:
            self._workers.pop(sample.rank, None)
            return
        worker = self._workers.get(sample.rank)
        if worker is None or abs(worker.start - sample.start) > SAME_START_S:
            worker = self._workers[sample.rank] = _WorkerTrack(sample.start, self._launch_timeout_s)
        worker.update(now, sample)

    def is_busy(self, rank: int, now: float) -> bool | None:
        """Whether a worker's GPUs worked in the last minute; None if unknown.

        Also None if they are busy but draw too little power for work, as in a hanging collective.
        """
        worker = self._workers.get(rank)
        if worker is None or not worker.idle_timer.is_known(now):
            return None
        if worker.last_worked is not None and 0 <= now - worker.last_worked <= FRESH_S:
            low = worker.low_power() if worker.busy_timer.lasted_s >= FRESH_S else None
            return None if low is not None and low[0] else True
        return False if worker.idle_timer.lasted_s >= FRESH_S else None

    def conditions(self, now: float) -> dict[int, dict[str, Finding]]:
        """All conditions by name, of each worker with a recent reading."""
        self._workers = {
            rank: worker
            for rank, worker in self._workers.items()
            if worker.last_seen is not None and 0 <= now - worker.last_seen <= GAP_S
        }
        self._clocks, self._roles = {}, {}
        for worker in self._workers.values():
            self._roles.setdefault(worker.sample.role, []).append(worker)
            for gpu in worker.gpus.values():
                if (hz := gpu.clock.mean_hz) is not None:
                    self._clocks.setdefault((worker.sample.role, gpu.model), {})[gpu] = hz
        self._fastest = {kind: max(clocks.values()) for kind, clocks in self._clocks.items()}
        return {rank: self._worker_conditions(now, worker) for rank, worker in sorted(self._workers.items())}

    def _worker_conditions(self, now: float, worker: _WorkerTrack) -> dict[str, Finding]:
        hanging, hanging_at_low_power = self._hanging(now, worker)
        return {
            "busy_without_progress": hanging,
            "busy_without_progress_low_power": hanging_at_low_power,
            "held_idle": self._held_idle(now, worker),
            "unused": self._unused(now, worker),
            "idle_beside_peers": self._idle_beside_peers(now, worker),
            "throttled": _throttled(worker),
            "slow_clock": self._slow_clock(worker),
            "memory_filling": _memory_filling(now, worker),
        }

    def _hanging(self, now: float, worker: _WorkerTrack) -> tuple[Finding, Finding]:
        """Whether the worker is busy without progress, and whether at too little power for work."""
        sample, spins = worker.sample, worker.busy_timer
        if sample.stalled is None or sample.last_rise is None:
            return (Finding(None, "its log shows no progress"),) * 2
        if not spins.is_known(now):
            return UNKNOWN, UNKNOWN
        if not (sample.stalled and spins.lasted_s >= self._stall_timeout_s):
            return ABSENT, ABSENT
        busy = ", ".join(index for index, gpu in worker.gpus.items() if gpu.busy)
        text = f"GPU {busy} at {BUSY:.0%} and more for {_time(spins.lasted_s)}"
        text += f", no progress for {_time(now - sample.last_rise)}"
        low = worker.low_power()
        if low is None:
            return Finding(True, text), UNKNOWN
        return Finding(True, text), Finding(True, f"{text}, {low[1]}") if low[0] else ABSENT

    def _held_idle(self, now: float, worker: _WorkerTrack) -> Finding:
        if not worker.held_idle_timer.is_known(now):
            return UNKNOWN
        lasted_s = worker.held_idle_timer.lasted_s
        loading = worker.last_worked is None and worker.last_progress is None
        least_s = max(self._stall_timeout_s, LOADING_S) if loading else self._stall_timeout_s
        if lasted_s < least_s:
            return Finding(False, "it waits for requests" if worker.sample.waits_for_requests else "")
        rise = worker.sample.last_rise
        progress = f", no progress for {_time(now - rise)}" if rise is not None else ", its log shows no progress"
        return Finding(True, f"holds memory, GPU idle for {_time(lasted_s)}{progress}")

    def _unused(self, now: float, worker: _WorkerTrack) -> Finding:
        known = {
            index: gpu.unused_timer.lasted_s for index, gpu in worker.gpus.items() if gpu.unused_timer.is_known(now)
        }
        if not known:
            return UNKNOWN
        absent = {index: lasted_s for index, lasted_s in known.items() if lasted_s >= self._launch_timeout_s}
        if not absent:
            return ABSENT
        text = f"none of its processes on GPU {', '.join(absent)} for {_time(min(absent.values()))}"
        return Finding(True, text)

    def _idle_beside_peers(self, now: float, worker: _WorkerTrack) -> Finding:
        peers = self._roles[worker.sample.role]
        known = any(peer.utilization is not None for peer in peers if peer is not worker)
        if not worker.idle_timer.is_known(now) or not known:
            return UNKNOWN
        if not worker.at_work or worker.idle_timer.lasted_s <= 0:
            worker.idle_peers_timer.update(now, False)
            return ABSENT
        uses = [
            (peer.at_work, peer.utilization) for peer in peers if peer is not worker and peer.utilization is not None
        ]
        working = [use for at_work, use in uses if at_work and use >= WORKING]
        worker.idle_peers_timer.update(now, 2 * len(working) > len(uses))
        lasted_s = worker.idle_peers_timer.lasted_s
        if lasted_s < PEERS_S:
            return ABSENT
        text = f"GPUs idle for {_time(lasted_s)} while {len(working)} of {len(uses)} peers on this node work"
        return Finding(True, f"{text}, at {median(working):.0%}" if working else text)

    def _slow_clock(self, worker: _WorkerTrack) -> Finding:
        state: bool | None = None
        for index, gpu in worker.gpus.items():
            kind = worker.sample.role, gpu.model
            peers = self._clocks.get(kind, {})
            own = peers.get(gpu)
            if own is None or len(peers) <= SLOW_LEAST_PEERS:
                continue
            state = False
            if own > (1 - SLOW_CLOCK) * self._fastest[kind]:
                continue  # close to the fastest, so not below the median by that much either
            usual = median(hz for other, hz in peers.items() if other is not gpu)
            if own <= (1 - SLOW_CLOCK) * usual:
                text = f"GPU {index} at {own / 1e6:.0f} MHz, {1 - own / usual:.0%} below its peers ({usual / 1e6:.0f})"
                return Finding(True, text)
        return Finding(state)


def _throttled(worker: _WorkerTrack) -> Finding:
    most, index, found = 0.0, "", None
    for number, gpu in worker.gpus.items():
        shares = gpu.throttle.shares
        if shares is None:
            continue
        # Reasons may overlap in time, so only the largest share is certain.
        heat = max([shares.get(reason, 0.0) for reason in HEAT])
        if found is None or heat > most:
            most, index, found = heat, number, shares
    if found is None:
        return UNKNOWN
    if most <= THROTTLE_SHARE:
        return ABSENT
    shares_shown = sorted(((share, name) for name, share in found.items() if share >= 0.01), reverse=True)
    shown = ", ".join(f"{name} {share:.0%}" for share, name in shares_shown)
    return Finding(True, f"GPU {index} at reduced clocks in the last {_time(THROTTLE_S)}: {shown}")


def _memory_filling(now: float, worker: _WorkerTrack) -> Finding:
    known = {index: gpu.memory for index, gpu in worker.gpus.items() if gpu.memory.is_known(now)}
    if not known:
        return UNKNOWN
    full = [(at, index) for index, memory in known.items() if (at := memory.full_at(now)) is not None]
    if not full:
        return ABSENT
    at, index = min(full)
    growth = 3600 * (known[index].growth or 0.0) / GIB
    text = f"the memory of GPU {index} grows by {growth:.1f} GiB an hour and will be full in {_time(at - now)}"
    return Finding(True, text, at)


def _smoothed(before: float | None, value: float, share: float) -> float:
    """Moving average in which the new value has weight ``share``, 0 to 1."""
    return value if before is None else before + (value - before) * min(1.0, share)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
