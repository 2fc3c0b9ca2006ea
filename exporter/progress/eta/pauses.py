"""Pauses, such as validations and checkpoints: observed ones, and expected ones for the rest."""

import math
import statistics
from dataclasses import field
from itertools import pairwise
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.progress.eta.prior import PriorPause

MOST_OBSERVED = 48
LEAST_FACTOR = 3.0  # a line this many times later than expected may follow a pause
DEVIATIONS = 3.5  # the same for varying work, in standard deviations (of the logarithm)
LEAST_GAPS = 2.5  # usual gaps that a pause always exceeds
# The same of a pause that is alone: more of such small ones would hide a change of speed.
SMALL_FACTOR, SMALL_GAPS = 1.4, 0.4
SMALL_STEPS = 10  # usual lines since the last pause, for one that is alone
SMALL_BLOCKS = 12  # blocks at this speed, from which its scatter is known well enough
SAME_KIND = 2.0  # unnamed pauses within this factor in size are of one kind
LEAST_STEPS = 4  # minimum of lines between two pauses for a regular pattern
FEW_PAUSES = 3
FEW_SCATTER = 0.05  # least assumed scatter of at most `FEW_PAUSES` pauses, as a part of their period
# Probability that a pause seen once recurs, if its position divides the total evenly or not.
EVEN_PERIOD_PROBABILITY, ODD_PERIOD_PROBABILITY = 0.9, 0.5
LONG_PAUSE_SHARE = 0.4  # a pause longer than this part of the work before it is probably an accident
LONG_PAUSE_PROBABILITY = 0.2
MOST_EPOCHS = 20  # with more, nearly every position would be the end of one
FEW_PAUSES = 3  # pauses of one kind after which its length is known
RESUMED_STEPS = 2  # usual rises that the first count of a fresh run may have
EARLY_SHARE = 1 / 6  # part of the work in which the first pause is likely


def pause_factor(sd: float) -> float:
    """Factor over the expected seconds from which a line followed a pause that is alone, if pace varies by ``sd``."""
    return max(SMALL_FACTOR, math.exp(DEVIATIONS * sd))


def is_pause(gap: float, expected: float, factor: float, usual_gap: float, alone: bool) -> bool:
    """Whether a gap between two lines contains a pause; ``alone``: whether the one before it is far away."""
    gaps = SMALL_GAPS if alone else LEAST_GAPS
    return gap > expected * (factor if alone else max(LEAST_FACTOR, factor)) and gap > expected + gaps * usual_gap


class Pause(NamedTuple):
    """Time without work."""

    done: float
    seconds: float
    work_before: float  # seconds of work before it
    name: str | None = None  # name in the log


class PauseKind(NamedTuple):
    """Pauses that belong together."""

    name: str | None
    seconds: float  # expected for the next: mean of the last five
    times: int  # number of times seen
    first: float
    last: float  # items done at the first and the last one
    period: float | None  # items between two of them, None if irregular
    scatter: float  # largest deviation from that
    work_before: float  # seconds of work before the first


class KnownPauses(NamedTuple):
    """Known pauses, until the next one is seen."""

    kinds: tuple[tuple[PauseKind, PriorPause | None], ...]  # observed kinds, each with its equivalent from earlier runs
    unseen: tuple[PriorPause, ...]  # from earlier runs only


class ExpectedPauses(NamedTuple):
    seconds: float
    due: float  # part of it that is due before the next line


def group_pauses(pauses: list[Pause], step: float) -> list[PauseKind]:
    """Group pauses by name, or by size if unnamed."""
    names = dict.fromkeys(pause.name for pause in pauses if pause.name is not None)
    found = [make_pause_kind([pause for pause in pauses if pause.name == name], step) for name in names]
    rest = sorted((pause for pause in pauses if pause.name is None), key=lambda pause: -pause.seconds)
    while rest:
        alike = [pause for pause in rest if pause.seconds * SAME_KIND >= rest[0].seconds]
        found.append(make_pause_kind(sorted(alike, key=lambda pause: pause.done), step))
        rest = rest[len(alike) :]
    return found


def make_pause_kind(pauses: list[Pause], step: float) -> PauseKind:
    """Create a kind from its pauses, in the order of the work."""
    done = [pause.done for pause in pauses]
    period = pause_period(done, step)
    scatter = 0.0 if period is None else max(abs(b - a - period) for a, b in pairwise(done))
    if period is not None and len(done) <= FEW_PAUSES:
        scatter = max(scatter, FEW_SCATTER * period)
    size = statistics.fmean([pause.seconds for pause in pauses[-5:]])
    return PauseKind(pauses[0].name, size, len(pauses), done[0], done[-1], period, scatter, pauses[0].work_before)


def pause_period(done: list[float], step: float) -> float | None:
    """Items between regular pauses; None if irregular.

    Most distances must be near their median; multiples do not count, since everything is a multiple of a small median.
    Two pauses are regular only if the first is at a multiple of their distance.
    """
    if len(done) < 2:
        return None
    distances = [after - before for before, after in pairwise(done)]
    median = statistics.median(distances)
    if median < min_pause_period(step):
        return None
    near = sum(abs(distance - median) <= 0.15 * median for distance in distances)
    if near < 0.7 * len(distances):
        return None
    if len(done) == 2 and abs(done[0] / median - round(done[0] / median)) > 0.2:
        return None
    span = done[-1] - done[0]
    return span / max(1, round(span / median))


def min_pause_period(step: float) -> float:
    """Least items between pauses for a regular pattern."""
    return max(1.0, LEAST_STEPS * step)


class RemainingWork(NamedTuple):
    """Position in the work."""

    start: float  # count at the start
    done: float
    total: float
    step: float  # usual rise between lines


def expect_regular_pauses(last: float, period: float, scatter: float, remaining: RemainingWork) -> tuple[int, int]:
    """Number of regular pauses until the end, and whether one is due before the next line.

    A pause at the end itself does not count. None are expected after two were skipped.
    """
    if remaining.done > last + 2 * period + 2 * remaining.step:
        return 0, 0
    nearest = last + period * max(1, math.ceil((remaining.done - 0.5 * remaining.step - last) / period))
    end = remaining.total - max(0.9 * remaining.step, min(scatter, 0.2 * period))
    if nearest > end:
        return 0, 0
    return 1 + math.floor((end - nearest) / period), int(nearest <= remaining.done + 0.5 * remaining.step)


def expect_irregular_pauses(kind: PauseKind, remaining: RemainingWork) -> float:
    """Expected seconds of pauses that occurred several times without a pattern."""
    share = 0.7 if kind.times == 2 else 1.0
    return (
        share
        * kind.seconds
        * kind.times
        * (remaining.total - remaining.done)
        / max(1.0, remaining.done - remaining.start)
    )


def expect_after_one_pause(kind: PauseKind, remaining: RemainingWork) -> ExpectedPauses:
    """Expected pauses of a kind seen once, if it recurs at multiples of its position.

    This is likelier the earlier it came and the more evenly it divides the total; with a name it is certain. After a
    resume, the position of an unnamed one is unknown: then at most one more is expected.
    """
    named = kind.name is not None
    period = kind.first - remaining.start if named else kind.first
    if period < min_pause_period(remaining.step) or (not named and remaining.start > 0.5 * kind.first):
        left, before = remaining.total - remaining.done, max(1.0, kind.first - remaining.start)
        since = (remaining.done - kind.first) / max(1.0, remaining.total - remaining.start)
        return ExpectedPauses(
            pause_credibility(kind) * max(0.0, 0.5 - since) * min(1.0, left / before) * kind.seconds, 0.0
        )
    if remaining.done > kind.first + period + 2 * remaining.step:
        return ExpectedPauses(0.0, 0.0)
    count, due = expect_regular_pauses(kind.first, period, 0.0, remaining)
    if named:
        return ExpectedPauses(count * kind.seconds, due * kind.seconds)
    parts, share = remaining.total / period, period / remaining.total
    evenly = abs(parts - round(parts)) <= 0.01 * parts + parts * remaining.step / period
    likely = EVEN_PERIOD_PROBABILITY * (1 - share) if evenly else ODD_PERIOD_PROBABILITY * max(0.0, 1 - 2 * share)
    return ExpectedPauses(pause_credibility(kind) * likely * count * kind.seconds, 0.0)


def pause_credibility(kind: PauseKind) -> float:
    """Probability, by its length, that this is a pause and not an accident."""
    return LONG_PAUSE_PROBABILITY if kind.name is None and kind.seconds > LONG_PAUSE_SHARE * kind.work_before else 1.0


RESTART = "restart"  # the pause until the first line of another run


@dataclass(slots=True)
class AnnouncedPauses:
    """Pauses since the last line that the log announced."""

    name: str | None = None  # name of the current one
    began: float = 0.0
    ended: list[tuple[str, float]] = field(default_factory=list)  # ended pauses: name and seconds

    def begin(self, name: str, line_time: float) -> None:
        """Start a pause, and end the current one."""
        if name != self.name:
            self.end(line_time)
            self.name, self.began = name, line_time

    def end(self, line_time: float) -> None:
        """End the pause: work continues."""
        if self.name is not None:
            self.ended = [*self.ended[-7:], (self.name, max(0.0, line_time - self.began))]
            self.name = None

    def has_restart(self) -> bool:
        """Whether the worker has started again since the last line."""
        return self.name == RESTART or bool(self.ended and any(name == RESTART for name, _ in self.ended))

    def pop_all(self, line_time: float, gap: float, expected: float) -> list[tuple[str, float]]:
        """Remove and return the pauses before a line ``gap`` seconds after the last one, ``expected`` of them work.

        A pause without a logged end lasted until the work for the line started.
        """
        if self.name is not None:
            known = sum(seconds for _, seconds in self.ended)
            self.ended.append((self.name, max(0.0, min(line_time - self.began, gap - known - expected))))
        found, self.name, self.ended = self.ended, None, []
        return found


@dataclass(slots=True)
class Pauses:
    """Pauses of a worker, and those expected from earlier runs."""

    start: float = 0.0
    seen: list[Pause] = field(default_factory=list)
    largest: float = 0.0
    prior_pauses: tuple[PriorPause, ...] = ()
    step: float = 0.0  # usual rise between lines at the latest pause
    _known: KnownPauses | None = field(default=None, init=False)  # cached

    def add(self, pause: Pause, step: float) -> None:
        """Add an ended pause; ``step`` is the usual rise between lines."""
        self.step = step
        self.seen = [*self.seen[1 - MOST_OBSERVED :], pause]
        self.largest = max(self.largest, pause.seconds)
        self._known = None

    def restart(self, start: float) -> None:
        """Restart at the count ``start``: drop the positions of pauses, but not their lengths."""
        self.start = start
        self.seen = []
        self._known = None

    def is_alone(self, done: float, step: float) -> bool:
        """Whether a pause here is far from the last one and from the start."""
        return done - (self.seen[-1].done if self.seen else self.start) >= SMALL_STEPS * step

    def kinds(self) -> list[PauseKind]:
        """Observed pauses by kind."""
        return [kind for kind, _ in self._group().kinds]

    def _group(self) -> KnownPauses:
        if self._known is None:
            matched = []
            unseen = list(self.prior_pauses)
            for kind in group_pauses(self.seen, self.step):
                before = next((usual for usual in unseen if had_pause_kind(usual, kind)), None)
                if before is not None:
                    unseen.remove(before)
                matched.append((kind, before))
            self._known = KnownPauses(tuple(matched), tuple(unseen))
        return self._known

    def longest_s(self, name: str) -> float:
        """Seconds of the longest pause of this name, here or else in earlier runs; 0 if new."""
        seen = [pause.seconds for pause in self.seen if pause.name == name]
        return max(seen, default=max((usual.seconds for usual in self.prior_pauses if usual.name == name), default=0.0))

    def first_share(self, done: float, total: float, step: float) -> float:
        """Part of the work so far after which a pause of a new kind may come here; 0 if none is likely.

        Evaluations follow epochs, which divide the total evenly. The first pause of all usually comes early, and the
        next ones as far apart: their length is uncertain until there are a few.
        """
        work = done - self.start
        if not 0 < done < total or work <= 0:
            return 0.0
        if not self.seen and work < EARLY_SHARE * total:
            return 1.0
        resumed = self.start > RESUMED_STEPS * step
        for parts in range(2, MOST_EPOCHS + 1):
            epochs = round(done * parts / total)
            if abs(done - epochs * total / parts) <= max(1.0, step) and (epochs == 1 or resumed):
                return min(1.0, total / parts / work)
        for kind in self.kinds():
            apart = kind.first - self.start
            if kind.times < FEW_PAUSES and apart > 0 and abs(work - round(work / apart) * apart) <= max(1.0, step):
                return min(1.0, apart / work)
        return 0.0

    def expected(self, done: float, total: float, step: float) -> ExpectedPauses:
        """Expected pauses in the rest of the work."""
        if not self.seen and not self.prior_pauses:
            return ExpectedPauses(0.0, 0.0)
        course = RemainingWork(self.start, done, total, step)
        known = self._group()
        seconds = due = 0.0
        for kind, before in known.kinds:
            part = expect_pauses(kind, before, course)
            seconds += part.seconds
            due += part.due
        for usual in known.unseen:
            last = usual.period * math.floor(self.start / usual.period)
            if done <= last + 1.5 * usual.period:  # otherwise it should have occurred here
                count, here = expect_regular_pauses(last, usual.period, 0.0, course)
                seconds += count * usual.seconds
                due += here * usual.seconds
        return ExpectedPauses(seconds, due)


def had_pause_kind(prior_pause: PriorPause, kind: PauseKind) -> bool:
    """Whether earlier runs had this kind of pause."""
    if prior_pause.name is not None or kind.name is not None:
        return prior_pause.name == kind.name
    return max(prior_pause.seconds, kind.seconds) <= SAME_KIND * min(prior_pause.seconds, kind.seconds)


def expect_pauses(kind: PauseKind, prior_pause: PriorPause | None, remaining: RemainingWork) -> ExpectedPauses:
    period = kind.period
    if period is None and prior_pause is not None and kind.times <= 2:
        period = prior_pause.period
    if period is not None:
        count, here = expect_regular_pauses(kind.last, period, kind.scatter, remaining)
        return ExpectedPauses(count * kind.seconds, here * kind.seconds)
    if kind.times > 1:
        return ExpectedPauses(expect_irregular_pauses(kind, remaining), 0.0)
    return expect_after_one_pause(kind, remaining)
