"""ETA of one worker from (time, done, total).

Lines get a time on one clock, pauses are removed, and work is gathered into blocks that show changes of speed. Experts
forecast the rest, and a back-test on the run's own past weights them.
"""

import math
from dataclasses import field

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import EtaEstimate
from exporter.progress.eta.backtest import (
    CHECKPOINTS_PER_RUN,
    FIRST_TRUST,
    PRIOR_ERROR,
    BacktestHistory,
    BacktestPoint,
    ExpertTrust,
    mix_forecasts,
)
from exporter.progress.eta.blocks import SAME_TIME_S, RecentThroughput, WorkBlock, WorkBlocks
from exporter.progress.eta.changes import SpeedChanges
from exporter.progress.eta.clock import LineClock, LineRhythm
from exporter.progress.eta.interval import (
    confidence,
    drift_doubt,
    half_width,
    log_deviation,
    peer_adjustment,
    start_doubt,
)
from exporter.progress.eta.pauses import (
    RESTART,
    SMALL_BLOCKS,
    AnnouncedPauses,
    ExpectedPauses,
    Pause,
    Pauses,
    is_pause,
    pause_factor,
)
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
from exporter.progress.eta.tail import BatchTail, GapMoments, possible_tail_wait

BACKTEST_DOUBT = 0.1  # added doubt about the back-test if as much is left as is done
SHORT_LAST = -0.3  # trend by length below which the last items are so short that they finish together
MOST_S = 1e12
LEAST_ITEMS = 1e-9  # smaller changes of a count are not progress; time divided by them would overflow
MOST_ITEMS = 1e15  # larger numbers are not times or counts of a job
OUT_OF_ORDER_STEPS = 2  # a count at most this many steps back, within a usual gap, is a late line, not a resume


@dataclass(slots=True)
class EtaEstimator:
    """Estimates the remaining time of one worker from its lines.

    All times are seconds on one clock; only differences count. Memory is bounded, an update takes microseconds, and no
    input raises an error. The fields that the constructor takes are its whole state.
    """

    _prior: RunPrior | None = None
    _first_wait_s: float = 0.0  # from the start of the worker to its first line; 0 if unknown
    _clock: LineClock = field(default_factory=LineClock)
    _rhythm: LineRhythm = field(default_factory=LineRhythm)
    _blocks: WorkBlocks = field(default_factory=WorkBlocks)
    _throughput: RecentThroughput = field(default_factory=RecentThroughput)
    _changes: SpeedChanges = field(default_factory=SpeedChanges)
    _pauses: Pauses = field(default_factory=Pauses)
    _announced: AnnouncedPauses = field(default_factory=AnnouncedPauses)
    _tail: BatchTail = field(default_factory=BatchTail)
    _gaps: GapMoments = field(default_factory=GapMoments)
    _curve: WorkCurve = field(default_factory=WorkCurve)
    _history: BacktestHistory = field(default_factory=BacktestHistory)
    _trust: ExpertTrust = FIRST_TRUST
    _is_trust_current: bool = True
    _done: float | None = None
    _total: float | None = None
    _last_progress_time: float = 0.0  # time of the last line with progress
    _first_time: float = 0.0
    _lost_s: float = 0.0  # seconds between the last line before the count fell and the line where it fell, in total
    _work_at_start_s: float = 0.0  # seconds of work when the count started, or fell to its new start
    _rises: int = 0
    _pending_items: float = 0.0  # items of lines without a later time
    _pause_factor: float = pause_factor(0.0)
    _next_checkpoint: float = 0.0  # count at which the next checkpoint is due
    _outlook: EtaOutlook | None = field(default=None, init=False)
    _forecast: EtaForecast | None = field(default=None, init=False)  # cached, like `_outlook`; None also without one
    _peer_factor: float = field(default=1.0, init=False)  # factor by which peers have moved the forecast

    def __post_init__(self) -> None:
        if self._prior is not None:
            self._pauses.prior_pauses = self._prior.pauses

    # Input

    def update(self, t: float, done: float, total: float | None, arrival: float | None = None) -> None:
        """Take a line with the stamp ``t``, read at ``arrival`` (None: at ``t``).

        The same count is no progress. Neither is a slightly lower one soon after: lines of several writers mix. A lower
        count (resume, reset) keeps the speed and drops everything tied to a position.
        """
        if not (-MOST_S <= t <= MOST_S and 0 <= done <= MOST_ITEMS):
            return
        self._drop_cached()
        self._total = total if total is not None and 0 < total <= MOST_ITEMS else None
        at = self._to_line_time(t, arrival)
        if self._done is None:
            self._first_time = at
            self._set_position(done, at)
            return
        rise = done - self._done
        if abs(rise) < LEAST_ITEMS:
            return
        if self._announced.has_restart():
            self._handle_fall(done, at)
        elif rise > 0:
            self._handle_rise(done, rise, at)
        elif rise < -OUT_OF_ORDER_STEPS * self._rhythm.step or at - self._last_progress_time > self._rhythm.gap:
            self._handle_fall(done, at)

    def pause(self, name: str, t: float, arrival: float | None = None) -> None:
        """Take the start, at ``t``, of an activity other than work, such as an evaluation.

        It ends with resume(), with another pause, or when the work for the next line should have started.
        """
        if -MOST_S <= t <= MOST_S:
            self._drop_cached()
            self._announced.begin(name, self._to_line_time(t, arrival))

    def resume(self, t: float, arrival: float | None = None) -> None:
        """Take a record that work continues at ``t``."""
        if -MOST_S <= t <= MOST_S:
            self._drop_cached()
            self._announced.end(self._to_line_time(t, arrival))

    def begin_run(self, t: float) -> None:
        """Take a new start of the worker at ``t``.

        Until its next line it loads. That line may be at any count: what lies in between is no work of this run.
        """
        if self._done is not None:
            self._drop_cached()
            self._announced.begin(RESTART, self._clock.elapsed(t))

    def update_requests(self, running: float, waiting: float) -> None:
        """Take the numbers of running and waiting requests of the server that processes these items.

        When none wait, the batch has a tail, in which the rate falls normally.
        """
        if self._done is None or self._total is None or not (0 <= running <= MOST_ITEMS and 0 <= waiting <= MOST_ITEMS):
            return
        self._drop_cached()
        self._tail.update(running, waiting, self._total - self._done, self.seconds_per_item)

    def set_wall_clock(self, step: float) -> None:
        """Take a step of the clock of ``now``, such as -3600 seconds: no time passes."""
        self._clock.set_wall_clock(step)

    def _drop_cached(self) -> None:
        self._outlook = self._forecast = None

    def _to_line_time(self, t: float, arrival: float | None) -> float:
        return self._clock.read(t, arrival if arrival is not None and -MOST_S <= arrival <= MOST_S else None)

    def _set_position(self, done: float, line_time: float) -> None:
        self._done, self._last_progress_time = done, line_time
        self._work_at_start_s = self._blocks.seconds
        # The curve of an interrupted run is of no use to another.
        self._curve = WorkCurve([] if self._rises else [(done, 0.0)])
        self._pauses.restart(done)
        self._next_checkpoint = done

    def _handle_fall(self, done: float, line_time: float) -> None:
        block = self._blocks.close()
        if block is not None:
            self._add_block(block)
        self._lost_s += line_time - self._last_progress_time
        self._announced = AnnouncedPauses()
        self._pending_items = 0.0
        self._set_position(done, line_time)

    def _handle_rise(self, done: float, rise: float, line_time: float) -> None:
        gap = line_time - self._last_progress_time
        before = done - rise - self._pending_items
        rise += self._pending_items
        self._done = done
        self._rises += 1
        speed = self._changes.speed
        expected = speed.seconds_per_item * rise
        work = gap
        wait = max(gap, self._clock.age(self._last_progress_time))
        if self._announced.name is not None or self._announced.ended:
            for name, seconds in self._announced.pop_all(line_time, gap, expected):
                work -= seconds
                self._pauses.add(Pause(before, seconds, self._blocks.seconds, name), self._rhythm.step)
            wait = work
        # The first comparison spares most lines the others.
        if speed.blocks >= 4 and work > expected * self._pause_factor and self._is_pause(work, expected, before):
            self._pauses.add(Pause(before, work - expected, self._blocks.seconds), self._rhythm.step)
            work = expected
        elif work >= SAME_TIME_S:
            self._rhythm.add(work, rise, wait)
        self._last_progress_time = line_time
        if work < SAME_TIME_S:
            self._pending_items = rise
            return
        self._pending_items = 0.0
        self._throughput.add(work, rise)
        self._gaps.add(math.log(work / rise))
        block = self._blocks.add(work, rise)
        if block is not None:
            self._add_block(block)
        if done >= self._next_checkpoint:
            self._add_checkpoint(done)
        if self._curve.points and done >= self._curve.next_due:
            self._curve.add(done, self._blocks.seconds, self._total)

    def _is_pause(self, gap: float, expected: float, done: float) -> bool:
        alone = self._changes.speed.blocks >= SMALL_BLOCKS and self._pauses.is_alone(done, self._rhythm.step)
        return is_pause(gap, expected, self._pause_factor, self._rhythm.gap, alone)

    def _add_block(self, block: WorkBlock) -> None:
        warm = self._blocks.update_warm_up()
        if warm is None:
            if self._changes.add(block):
                self._throughput.restart(self._changes.speed.seconds, self._changes.speed.items)
        else:
            self._changes.restart(warm)
        self._pause_factor = pause_factor(self._changes.speed.sd)

    def _add_checkpoint(self, done: float) -> None:
        blocks = self._blocks
        if not self._changes.speed.items:
            return
        outlook = self._history.expert_speeds(blocks, self._changes.speed, done, self._total)
        eta = left = 0.0
        if self._total is not None and self._total > done:
            left = self._total - done
            is_parallel = self._gaps.are_parallel() and self._history.trends.by_length > SHORT_LAST
            self._tail.guess(is_parallel, left, self._changes.speed.seconds_per_item)
            work, _ = mix_forecasts(outlook, done, left, self._trust.weights)
            eta = work + self._expected_pauses(done, self._total).seconds
        checkpoint = BacktestPoint(
            blocks.items, blocks.seconds, self._last_progress_time - self._lost_s, left, eta, outlook
        )
        starts = self._changes.starts(self._speed_start)
        self._history.add(checkpoint, blocks.warm_up_work.items, starts, done, self._total)
        self._is_trust_current = False
        apart = max(self._total or 0.0, (2 if self._total else 4) * (done - self._pauses.start))
        self._next_checkpoint = done + apart / CHECKPOINTS_PER_RUN

    # Output

    def estimate(self, now: float, peers: float | None = None) -> EtaEstimate | None:
        """Estimate at ``now``; None without a total or any evidence, 0 only if all is complete.

        EtaForecast.after() describes the time between lines. ``peers`` is median_peer_pace() of the workers of one job.
        """
        return self.estimate_after(self.silence_s(now), peers)

    def estimate_after(self, silence_s: float, peers: float | None = None) -> EtaEstimate | None:
        """The same, ``silence_s`` seconds after the last line."""
        if self._done is None or self._total is None:
            return None
        if self._total <= self._done:
            return EtaEstimate(0.0, 0.0, 0.0)
        towards = peer_adjustment(self._changes.speed.seconds_per_item, peers, self._blocks.count)
        if self._forecast is None or towards != self._peer_factor:
            self._peer_factor = towards
            self._forecast = self._make_forecast(self._done, self._total)
        return None if self._forecast is None else self._forecast.after(silence_s)

    def _make_forecast(self, done: float, total: float) -> EtaForecast | None:
        left, gap = total - done, self._rhythm.gap
        if self._changes.speed.items:
            work, sd = self._work_left(done, left)
        elif self._prior is not None:
            work = self._prior.work_left(done, total)
            sd = log_deviation(PRIOR_ERROR, 0.0, left, 1, self._prior.spread)
            gap = self._prior.gap + self._prior.warm_up_seconds
        else:
            return None
        ahead = self._expected_pauses(done, total)
        credit = 1.2 * max(gap, self._rhythm.silence, self._tail.wait(left)) + ahead.due
        return EtaForecast(work + ahead.seconds, max(0.5 * gap, 1e-9), credit, half_width(sd))

    def _work_left(self, done: float, left: float) -> tuple[float, float]:
        """Seconds of work left, and the standard deviation of their logarithm."""
        blocks, speed = self._blocks, self._changes.speed
        if not self._is_trust_current:
            self._is_trust_current = True
            self._trust = self._history.rate_experts(
                blocks.items, blocks.seconds, self._last_progress_time - self._lost_s, left, self._speed_start, done
            )
        speeds = self._history.expert_speeds(blocks, speed, done, done + left)
        work, disagreement = mix_forecasts(speeds, done, left, self._trust.weights)
        work *= self._peer_factor
        sd, error, start = speed.sd, self._trust.error, start_doubt(blocks.count)
        work, tail = self._tail.work(left, work)
        steps = left / max(self._rhythm.step, 1e-9)
        unseen_tail = self._tail.sd * tail / work if tail else 0.0
        drift = 0.0 if self._changes.past else drift_doubt(speeds.overall, speeds.recent)
        doubt = math.hypot(log_deviation(error, sd, steps, speed.blocks, start), disagreement, unseen_tail, drift)
        if self._prior is None or work <= 0:
            return work, doubt
        so_far = blocks.seconds - self._work_at_start_s
        before = self._prior.work_between(self._pauses.start, done)
        ratio = min(1e3, max(1e-3, so_far / before)) if so_far > 0 and before > 0 else 1.0
        measured = math.hypot(start, math.sqrt(math.expm1(sd * sd) / max(1, speed.blocks)))
        unseen = BACKTEST_DOUBT * math.sqrt(left / max(done - self._pauses.start, 1e-9))
        believed = prior_weight(self._prior, ratio, measured, math.hypot(doubt, min(1.0, unseen)), blocks.count)
        as_before = self._prior.work_left(done, done + left) * believed.scale
        return work * (as_before / work) ** believed.weight, min(doubt, believed.doubt)

    def _expected_pauses(self, done: float, total: float) -> ExpectedPauses:
        """Expected pauses; a current named one is due."""
        ahead = self._pauses.expected(done, total, self._rhythm.step)
        if self._announced.name is None:
            return ahead
        size = self._pauses.longest_s(self._announced.name)
        begun = self._announced.began - self._last_progress_time
        if ahead.due >= size:
            return ExpectedPauses(ahead.seconds, ahead.due + begun)
        return ExpectedPauses(ahead.seconds + size - ahead.due, size + begun)

    @property
    def _speed_start(self) -> float:
        """Items counted in work when the current speed began."""
        return self._blocks.items - self._blocks.open_items - self._changes.speed.items

    def silence_s(self, now: float) -> float:
        """Seconds since the last line with progress."""
        return min(MOST_S, self._clock.elapsed(now) - self._last_progress_time)

    def outlook(self) -> EtaOutlook:
        """The state of the work at the last line, of which ``is_stalled`` and both rates are projections."""
        if self._outlook is None:
            blocks, changes, silence = self._blocks, self._changes, self._rhythm.silence
            left = math.inf if self._done is None or self._total is None else self._total - self._done
            self._outlook = EtaOutlook(
                unfinished=self._done is not None and left > 0,
                stall_limit=self._stall_limit(left, silence),
                slowdown=changes.slowdown_ratio(blocks.seconds),
                rate=self._throughput.rate,
                rate_valid_s=max(RATE_S, RATE_SILENCES * silence, RATE_PAUSES * self._pauses.largest),
                items=blocks.items + self._pending_items,
                elapsed=self._last_progress_time - self._first_time,
                quiet_s=QUIET * silence,
            )
        return self._outlook

    def _stall_limit(self, left: float, silence: float) -> StallLimit:
        speed, pauses, name = self._changes.speed, self._pauses, self._announced.name
        sd = speed.sd
        # If work varies much, a single step may take very long.
        longest = speed.seconds_per_item * self._rhythm.step * math.exp(4 * sd - sd**2 / 2)
        wait = self._tail.wait(left) or possible_tail_wait(left, speed.seconds_per_item, sd)
        first = pauses.first_share(self._done or 0.0, self._total or 0.0, self._rhythm.step)
        usual = usual_stall_limit(
            self._rises,
            silence,
            longest,
            pauses.largest,
            wait,
            self._last_progress_time,
            first,
            self._first_wait_s,
        )
        if name is None:
            return usual
        return usual._replace(
            named_s=3 * pauses.longest_s(name) or NAMED_STALL_S,
            named_after_s=self._announced.began - self._last_progress_time,
        )

    def is_stalled(self, now: float, stall_timeout_s: float = STALL_TIMEOUT_S, busy: bool | None = None) -> bool:
        """Whether there is no progress for longer than usual.

        ``busy``: whether the GPUs work, None if unknown. Busy GPUs raise the limit, idle ones lower it.
        """
        return self.outlook().is_stalled(self.silence_s(now), stall_timeout_s, busy)

    def rate(self, now: float) -> float | None:
        """Recent items per second of work; None before any or if out of date.

        During a pause it is the rate before the pause, never 0.
        """
        return self.outlook().rate_after(self.silence_s(now))

    def average_rate(self, now: float) -> float | None:
        """Items per second since the first line, with pauses; None before two lines."""
        return self.outlook().average_after(self.silence_s(now))

    @property
    def seconds_per_item(self) -> float | None:
        """Seconds per item at the current speed, without pauses; None if unknown. For median_peer_pace()."""
        return self._changes.speed.seconds_per_item or None

    def slowdown_ratio(self) -> float | None:
        """Current seconds per item relative to the fastest earlier speed; None without an earlier one."""
        return self.outlook().slowdown

    def confidence(self, now: float, estimate: EtaEstimate | None = None) -> str | None:
        """Confidence in the estimate: high, medium or low; None without one.

        ``estimate`` is the result of estimate() for this time, if available.
        """
        estimate = estimate if estimate is not None else self.estimate(now)
        return None if estimate is None else self.confidence_after(self.silence_s(now), estimate)

    def confidence_after(self, silence_s: float, estimate: EtaEstimate) -> str:
        """The same for the estimate ``silence_s`` seconds after the last line."""
        stalled = self.outlook().is_stalled(silence_s, STALL_TIMEOUT_S, None)
        return confidence(estimate, self._blocks.count, stalled)

    def prior(self, unit: str | None = None) -> RunPrior | None:
        """Prior from this run, with items of this ``unit``, for the next run.

        None if the run was too short or its numbers are impossible.
        """
        blocks, speed = self._blocks, self._changes.speed
        cold = blocks.warm_up_work
        items = blocks.items - cold.items
        if blocks.count < 8 or items <= 0 or not speed.seconds_per_item:
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
            seconds=self._last_progress_time - self._first_time,
            curve=self._curve.points_until(done, blocks.seconds),
            unit=unit,
        )
        found = this.combined_with(self._prior)
        return found if found.problem() is None else None
