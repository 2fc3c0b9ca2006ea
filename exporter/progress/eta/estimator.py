"""ETA of one worker from (time, done, total).

Lines get a time on one clock, pauses are removed, and work is gathered into blocks that show changes of speed. Experts
forecast the rest, and a back-test on the run's own past weights them.
"""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

from exporter.progress.eta.backtest import (
    FIRST_WEIGHTS,
    PRIOR_ERROR,
    SPACING,
    BacktestHistory,
    BacktestPoint,
    ExpertTrust,
    mix_forecasts,
)
from exporter.progress.eta.blocks import LEAST_S, RecentThroughput, WorkBlock, WorkBlocks
from exporter.progress.eta.changes import SpeedChanges
from exporter.progress.eta.clock import LineClock, LineRhythm
from exporter.progress.eta.interval import (
    EtaEstimate,
    confidence,
    half_width,
    log_deviation,
    peer_adjustment,
    start_doubt,
)
from exporter.progress.eta.pauses import AnnouncedPauses, ExpectedPauses, Pause, Pauses, is_pause, pause_factor
from exporter.progress.eta.prior import FIRST_SPREAD, PriorPause, RunPrior, WorkCurve, prior_weight
from exporter.progress.eta.projection import (
    NAMED_STALL_S,
    QUIET,
    RATE_PAUSES,
    RATE_S,
    RATE_SILENCES,
    STALL_TIMEOUT_S,
    EtaForecast,
    EtaOutlook,
    StallLimit,
    usual_stall_limit,
)
from exporter.progress.eta.tail import TAIL_SD, BatchTail

VERSION = 1
UNSEEN = 0.1  # added doubt about the back-test if as much is left as is done
MOST_S = 1e12
MOST_ITEMS = 1e15  # larger numbers are not times or counts of a job
OUT_OF_ORDER = 2  # a count at most this many steps back, within a usual gap, is a late line, not a resume


class EstimatorWarnings(TypedDict):
    """Problems of a worker."""

    stalled: bool
    slowdown: bool


class EtaEstimator:
    """Estimates the remaining time of one worker from its lines.

    All times are seconds on one clock; only differences count. Memory is bounded, an update takes microseconds, and no
    input raises an error.
    """

    def __init__(self, prior: RunPrior | None = None) -> None:
        self._prior = prior
        self._clock = LineClock()
        self._rhythm = LineRhythm()
        self._blocks = WorkBlocks()
        self._throughput = RecentThroughput()
        self._changes = SpeedChanges()
        self._pauses = Pauses(usual=() if prior is None else prior.pauses)
        self._announced = AnnouncedPauses()
        self._tail = BatchTail()
        self._curve = WorkCurve()
        self._history = BacktestHistory()
        self._verdict = ExpertTrust(FIRST_WEIGHTS, PRIOR_ERROR)
        self._judged = True
        self._done: float | None = None
        self._total: float | None = None
        self._at = 0.0  # time of the last line with progress
        self._began = 0.0
        self._lost = 0.0  # seconds between the last line before the count fell and the line where it fell, in total
        self._place_seconds = 0.0  # seconds of work when the count started, or fell to its new start
        self._rises = 0
        self._pending = 0.0  # items of lines without a later time
        self._factor = pause_factor(0.0)
        self._next = 0.0  # count at which the next checkpoint is due
        self._standing: EtaOutlook | None = None
        self._forecast: EtaForecast | None = None  # cached, like `_standing`; None also without a forecast
        self._leaning = 1.0  # factor by which peers have moved the forecast

    # Input

    def update(self, t: float, done: float, total: float | None, arrival: float | None = None) -> None:
        """Take a line with the stamp ``t``, read at ``arrival`` (None: at ``t``).

        The same count is no progress. Neither is a slightly lower one soon after: lines of several writers mix. A lower
        count (resume, reset) keeps the speed and drops everything tied to a position.
        """
        if not (-MOST_S <= t <= MOST_S and 0 <= done <= MOST_ITEMS):
            return
        self._forget()
        self._total = total if total is not None and 0 < total <= MOST_ITEMS else None
        at = self._read(t, arrival)
        if self._done is None:
            self._began = at
            self._place(done, at)
            return
        rise = done - self._done
        if rise == 0:
            return
        if rise > 0:
            self._rise(done, rise, at)
        elif rise < -OUT_OF_ORDER * self._rhythm.step or at - self._at > self._rhythm.gap:
            self._fall(done, at)

    def pause(self, name: str, t: float, arrival: float | None = None) -> None:
        """Take the start, at ``t``, of an activity other than work, such as an evaluation.

        It ends with resume(), with another pause, or when the work for the next line should have started.
        """
        if -MOST_S <= t <= MOST_S:
            self._forget()
            self._announced.begin(name, self._read(t, arrival))

    def resume(self, t: float, arrival: float | None = None) -> None:
        """Take a record that work continues at ``t``."""
        if -MOST_S <= t <= MOST_S:
            self._forget()
            self._announced.end(self._read(t, arrival))

    def queue(self, running: float, waiting: float) -> None:
        """Take the numbers of running and waiting requests of the server that processes these items.

        When none wait, the batch has a tail, in which the rate falls normally.
        """
        if self._done is None or self._total is None or not (0 <= running <= MOST_ITEMS and 0 <= waiting <= MOST_ITEMS):
            return
        self._forget()
        self._tail.look(running, waiting, self._total - self._done, self.pace)

    def _forget(self) -> None:
        """Drop cached results."""
        self._standing = self._forecast = None

    def _read(self, t: float, arrival: float | None) -> float:
        return self._clock.read(t, arrival if arrival is not None and -MOST_S <= arrival <= MOST_S else None)

    def _place(self, done: float, at: float) -> None:
        self._done, self._at = done, at
        self._place_seconds = self._blocks.seconds
        # The curve of an interrupted run is of no use to another.
        self._curve = WorkCurve([] if self._rises else [(done, 0.0)])
        self._pauses.restart(done)
        self._next = done

    def _fall(self, done: float, at: float) -> None:
        block = self._blocks.close()
        if block is not None:
            self._take(block)
        self._lost += at - self._at
        self._announced = AnnouncedPauses()
        self._pending = 0.0
        self._place(done, at)

    def _rise(self, done: float, rise: float, at: float) -> None:
        gap = at - self._at
        before = done - rise - self._pending
        rise += self._pending
        self._done = done
        self._rises += 1
        speed = self._changes.speed
        expected = speed.pace * rise
        work = gap
        wait = max(gap, self._clock.age(self._at))
        if self._announced.name is not None or self._announced.over:
            for name, seconds in self._announced.take(at, gap, expected):
                work -= seconds
                self._pauses.add(Pause(before, seconds, self._blocks.seconds, name), self._rhythm.step)
            wait = work
        if speed.blocks >= 4 and is_pause(work, expected, self._factor, self._rhythm.gap):
            self._pauses.add(Pause(before, work - expected, self._blocks.seconds), self._rhythm.step)
            work = expected
        elif work >= LEAST_S:
            self._rhythm.line(work, rise, wait)
        self._at = at
        if work < LEAST_S:
            self._pending = rise
            return
        self._pending = 0.0
        self._throughput.add(work, rise)
        block = self._blocks.add(work, rise)
        if block is not None:
            self._take(block)
        if done >= self._next:
            self._checkpoint(done)
        if self._curve.points and done >= self._curve.next:
            self._curve.add(done, self._blocks.seconds, self._total)

    def _take(self, block: WorkBlock) -> None:
        warm = self._blocks.warmed_up()
        if warm is None:
            self._changes.add(block)
        else:
            self._changes.restart(warm)
        self._factor = pause_factor(self._changes.speed.sd)

    def _checkpoint(self, done: float) -> None:
        blocks = self._blocks
        if not self._changes.speed.items:
            return
        outlook = self._history.outlook(blocks, self._changes.speed)
        eta = left = 0.0
        if self._total is not None and self._total > done:
            left = self._total - done
            eta = mix_forecasts(outlook, left, self._verdict.weights) + self._ahead(done, self._total).seconds
        checkpoint = BacktestPoint(blocks.items, blocks.seconds, self._at - self._lost, left, eta, outlook)
        self._history.add(checkpoint, blocks.cold.items, self._changed)
        self._judged = False
        self._next = done + (self._total or 4 * (done - self._pauses.start)) / SPACING

    # Output

    def estimate(self, now: float, peers: float | None = None) -> EtaEstimate | None:
        """Estimate at ``now``; None without a total or any evidence, 0 only if all is complete.

        EtaForecast.after() describes the time between lines. ``peers`` is median_peer_pace() of the workers of one job.
        """
        if self._done is None or self._total is None:
            return None
        if self._total <= self._done:
            return EtaEstimate(0.0, 0.0, 0.0)
        towards = peer_adjustment(self._changes.speed.pace, peers, self._blocks.count)
        if self._forecast is None or towards != self._leaning:
            self._leaning = towards
            self._forecast = self._foresee(self._done, self._total)
        return None if self._forecast is None else self._forecast.after(self._since(now))

    def _foresee(self, done: float, total: float) -> EtaForecast | None:
        left, gap = total - done, self._rhythm.gap
        if self._changes.speed.items:
            work, sd = self._work_left(done, left)
        elif self._prior is not None:
            work = self._prior.left(done, total)
            sd = log_deviation(PRIOR_ERROR, 0.0, left, 1, self._prior.spread)
            gap = self._prior.gap + self._prior.warm_up_seconds
        else:
            return None
        ahead = self._ahead(done, total)
        credit = 1.2 * max(gap, self._rhythm.silence, self._tail.wait(left)) + ahead.due
        return EtaForecast(work + ahead.seconds, max(0.5 * gap, 1e-9), credit, half_width(sd))

    def _work_left(self, done: float, left: float) -> tuple[float, float]:
        """Seconds of work left, and the standard deviation of their logarithm."""
        blocks, speed = self._blocks, self._changes.speed
        if not self._judged:
            self._judged = True
            self._verdict = self._history.judge(
                blocks.items, blocks.seconds, self._at - self._lost, left, self._changed
            )
        work = mix_forecasts(self._history.outlook(blocks, speed), left, self._verdict.weights) * self._leaning
        sd, error, start = speed.sd, self._verdict.error, start_doubt(blocks.count)
        work, tail = self._tail.work(left, work)
        steps = left / max(self._rhythm.step, 1e-9)
        doubt = math.hypot(log_deviation(error, sd, steps, speed.blocks, start), TAIL_SD * tail / work if tail else 0.0)
        if self._prior is None or work <= 0:
            return work, doubt
        so_far = blocks.seconds - self._place_seconds
        before = self._prior.work(self._pauses.start, done)
        ratio = min(1e3, max(1e-3, so_far / before)) if so_far > 0 and before > 0 else 1.0
        measured = math.hypot(start, math.sqrt(math.expm1(sd * sd) / max(1, speed.blocks)))
        unseen = UNSEEN * math.sqrt(left / max(done - self._pauses.start, 1e-9))
        believed = prior_weight(self._prior, ratio, measured, math.hypot(doubt, min(1.0, unseen)), blocks.count)
        as_before = self._prior.left(done, done + left) * believed.scale
        return work * (as_before / work) ** believed.weight, min(doubt, believed.doubt)

    def _ahead(self, done: float, total: float) -> ExpectedPauses:
        """Expected pauses; a current named one is due."""
        ahead = self._pauses.ahead(done, total, self._rhythm.step)
        if self._announced.name is None:
            return ahead
        size = self._pauses.size(self._announced.name)
        begun = self._announced.began - self._at
        if ahead.due >= size:
            return ExpectedPauses(ahead.seconds, ahead.due + begun)
        return ExpectedPauses(ahead.seconds + size - ahead.due, size + begun)

    @property
    def _changed(self) -> float:
        """Items counted in work when the current speed began."""
        return self._blocks.items - self._blocks.open_items - self._changes.speed.items

    @property
    def _left(self) -> float:
        """Items left; infinite without a total."""
        return math.inf if self._done is None or self._total is None else self._total - self._done

    def _since(self, now: float) -> float:
        """Seconds since the last line with progress."""
        return min(MOST_S, self._clock.at(now) - self._at)

    def _stand(self) -> EtaOutlook:
        """State of the work since the last line."""
        if self._standing is None:
            blocks, changes, silence = self._blocks, self._changes, self._rhythm.silence
            left = self._left
            self._standing = EtaOutlook(
                unfinished=self._done is not None and left > 0,
                patience=self._patience(left, silence),
                slow=changes.slowed_down(blocks.seconds) and not self._tail.begun(left),
                slowdown=changes.slowdown_ratio(blocks.seconds),
                rate=self._throughput.rate,
                rate_until=max(RATE_S, RATE_SILENCES * silence, RATE_PAUSES * self._pauses.largest),
                items=blocks.items + self._pending,
                elapsed=self._at - self._began,
                quiet=QUIET * silence,
            )
        return self._standing

    def _patience(self, left: float, silence: float) -> StallLimit:
        speed, pauses, name = self._changes.speed, self._pauses, self._announced.name
        sd = speed.sd
        # If work varies much, a single step may take very long.
        longest = speed.pace * self._rhythm.step * math.exp(4 * sd - sd**2 / 2)
        usual = usual_stall_limit(self._rises, silence, longest, pauses.largest, self._tail.wait(left), self._at)
        if name is None:
            return usual
        return usual._replace(
            named_s=3 * pauses.size(name) or NAMED_STALL_S, named_after_s=self._announced.began - self._at
        )

    def alarms(
        self, now: float, stall_timeout_s: float = STALL_TIMEOUT_S, busy: bool | None = None
    ) -> EstimatorWarnings:
        """Warnings at ``now``: no progress for longer than usual, or slower work than before.

        ``busy``: whether the GPUs work, None if unknown. Busy GPUs raise the limit of a stall, idle ones lower it.
        """
        standing = self._stand()
        return {"stalled": standing.stalled(self._since(now), stall_timeout_s, busy), "slowdown": standing.slow}

    def rate(self, now: float) -> float | None:
        """Recent items per second of work; None before any or if out of date.

        During a pause it is the rate before the pause, never 0.
        """
        return self._stand().rate_after(self._since(now))

    def average_rate(self, now: float) -> float | None:
        """Items per second since the first line, with pauses; None before two lines."""
        return self._stand().average_after(self._since(now))

    @property
    def pace(self) -> float | None:
        """Seconds per item at the current speed, without pauses; None if unknown. For median_peer_pace()."""
        return self._changes.speed.pace or None

    def slowdown_ratio(self) -> float | None:
        """Current seconds per item relative to the fastest earlier speed; None without an earlier one."""
        return self._stand().slowdown

    def confidence(self, now: float, estimate: EtaEstimate | None = None) -> str | None:
        """Confidence in the estimate: high, medium or low; None without one.

        ``estimate`` is the result of estimate() for this time, if available.
        """
        estimate = estimate if estimate is not None else self.estimate(now)
        if estimate is None:
            return None
        stalled = self._stand().stalled(self._since(now), STALL_TIMEOUT_S, None)
        return confidence(estimate, self._blocks.count, stalled)

    def prior(self, unit: str | None = None) -> RunPrior | None:
        """Prior from this run, with items of this ``unit``, for the next run.

        None if the run was too short or its numbers are impossible.
        """
        blocks, speed = self._blocks, self._changes.speed
        cold = blocks.cold
        items = blocks.items - cold.items
        if blocks.count < 8 or items <= 0 or not speed.pace:
            return None
        pace = (blocks.seconds - cold.seconds) / items
        if pace <= 0:
            return None
        done = self._done or 0.0
        regular = [kind for kind in self._pauses.kinds() if kind.period]
        this = RunPrior(
            pace=pace,
            spread=FIRST_SPREAD,
            warm_up_seconds=max(0.0, cold.seconds - pace * cold.items),
            gap=self._rhythm.gap,
            pauses=tuple(PriorPause(kind.name, kind.seconds, kind.period) for kind in regular if kind.period),
            items=done,
            seconds=self._at - self._began,
            curve=self._curve.until(done, blocks.seconds),
            unit=unit,
        )
        found = this.after(self._prior)
        return found if found.fault() is None else None

    # State

    def state(self) -> dict[str, Any]:
        """The complete state, ready for JSON."""
        return {
            "version": VERSION,
            "prior": None if self._prior is None else self._prior.to_json(),
            "clock": _dataclass_fields(self._clock),
            "rhythm": _dataclass_fields(self._rhythm),
            "blocks": _dataclass_fields(self._blocks),
            "throughput": _dataclass_fields(self._throughput),
            "changes": _dataclass_fields(self._changes),
            "pauses": self._pauses.state(),
            "announced": _dataclass_fields(self._announced),
            "tail": _dataclass_fields(self._tail),
            "curve": _dataclass_fields(self._curve),
            "history": self._history.state(),
            "verdict": self._verdict,
            "judged": self._judged,
            "line": [
                self._done,
                self._total,
                self._at,
                self._began,
                self._rises,
                self._pending,
                self._factor,
                self._next,
                self._place_seconds,
                self._lost,
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "EtaEstimator":
        """Restore an estimator from state(); ValueError if malformed."""
        if state.get("version") != VERSION:
            raise ValueError(f"not a state of this version of the estimator: {state.get('version')!r}, not {VERSION}")
        try:
            own = cls(None if state["prior"] is None else RunPrior.from_json(state["prior"]))
            own._clock = LineClock(*state["clock"])
            own._rhythm = LineRhythm(*state["rhythm"])
            own._blocks = WorkBlocks.restored(state["blocks"])
            own._throughput = RecentThroughput(*state["throughput"])
            own._changes = SpeedChanges.restored(state["changes"])
            own._pauses = Pauses.restored(state["pauses"])
            name, began, over = state["announced"]
            own._announced = AnnouncedPauses(name, began, [(one, seconds) for one, seconds in over])
            own._tail = BatchTail(*state["tail"])
            own._curve = WorkCurve.restored(state["curve"])
            own._history = BacktestHistory.restored(state["history"])
            weights, error = state["verdict"]
            own._verdict = ExpertTrust(tuple(weights), error)
            own._judged = state["judged"]
            own._done, own._total, own._at, own._began, own._rises, own._pending, *rest = state["line"]
            own._factor, own._next, own._place_seconds, own._lost = rest
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of an estimator: {error!r}") from error
        return own


def _dataclass_fields(part: Any) -> list[Any]:
    """Fields of a dataclass, recursively; lists are copied shallowly."""
    found = []
    for name in part.__dataclass_fields__:
        value = getattr(part, name)
        if isinstance(value, list):
            value = value.copy()
        elif hasattr(value, "__dataclass_fields__"):
            value = _dataclass_fields(value)
        found.append(value)
    return found
