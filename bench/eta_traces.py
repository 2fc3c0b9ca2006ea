"""Synthetic runs of jobs, as log lines: difficult cases for an ETA estimator.

Deterministic by seed. Each family is a way in which progress differs from a straight line.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Line(NamedTuple):
    """A line of a log: its stamp, what it says, and when it could be read."""

    t: float
    worker: int
    done: float
    total: float | None
    arrival: float


class Trace(NamedTuple):
    """A run. ``end`` is None when it never ended and was watched until the last moment of ``watched``."""

    name: str
    family: str
    lines: list[Line]
    end: float | None
    watched: float
    foreseeable: float  # from this moment on nothing happens any more that nobody could know
    slow: tuple[tuple[float, float], ...] = ()  # when the work was truly slower than before
    stalls: tuple[tuple[float, float], ...] = ()
    slow_is_open: bool = False  # whether a slow-down alarm is neither right nor wrong here


class Work:
    """The clock of one worker at work."""

    def __init__(self, r: random.Random, length: float | None = None) -> None:
        self.r = r
        self.items = r.choice((300, 500, 800, 1200))
        self.length = length or math.exp(r.uniform(math.log(1500), math.log(30_000)))
        self.noise = r.uniform(0.02, 0.12)
        self.t = r.uniform(10, 90)

    @property
    def pace(self) -> float:
        """Usual seconds per item."""
        return self.length / self.items

    def item(self, factor: float = 1.0) -> float:
        """Do one item; return when it is done."""
        self.t += factor * self.pace * self.r.lognormvariate(-(self.noise**2) / 2, self.noise)
        return self.t

    def line(self, done: float, worker: int = 0, total: float | None = None, late: float = 0.0) -> Line:
        """The log line about it."""
        return Line(self.t, worker, done, self.items if total is None else total, self.t + late)

    def lines(self, factor: Callable[[float], float], first: int = 0) -> Iterator[Line]:
        """A line for each item from here on; ``factor`` of its time by the share done."""
        for done in range(first + 1, self.items + 1):
            self.item(factor(done / self.items))
            yield self.line(done)


def trace(family: str, lines: list[Line], **known: float | tuple[tuple[float, float], ...] | bool) -> Trace:
    """A run that completed."""
    end = max(line.arrival for line in lines)
    return Trace(family, family, lines, end, end, -math.inf)._replace(**known)  # type: ignore[arg-type]


def steady(work: Work) -> Trace:
    """Nothing but noise."""
    return trace("steady", list(work.lines(lambda share: 1.0)))


def warm_up(work: Work) -> Trace:
    """Compiling and cold caches at the beginning."""
    cold, extra = work.r.uniform(0.004, 0.02), work.r.uniform(5, 40)
    return trace("warm-up", list(work.lines(lambda share: extra if share <= cold else 1.0)))


def checkpoints(work: Work) -> Trace:
    """A file is written now and then."""
    every = int(work.items * work.r.uniform(0.05, 0.15))
    size = work.pace * every * work.r.uniform(0.06, 0.2)
    lines = []
    for done in range(1, work.items + 1):
        if done > 1 and (done - 1) % every == 0:
            work.t += size * work.r.lognormvariate(0, 0.15)
        work.item()
        lines.append(work.line(done))
    return trace("checkpoints", lines)


def epochs(work: Work) -> Trace:
    """A validation after each epoch."""
    count = work.r.choice((4, 6, 10))
    each = work.items // count
    work.items = each * count
    size = work.pace * each * work.r.uniform(0.1, 0.3)
    lines = []
    for done in range(1, work.items + 1):
        if done > 1 and (done - 1) % each == 0:
            work.t += size * work.r.lognormvariate(0, 0.04)
        work.item()
        if done % 5 == 0 or done == work.items:
            lines.append(work.line(done))
    return trace("epochs", lines)


def drift(work: Work) -> Trace:
    """Items take longer and longer."""
    growth = work.r.uniform(0.5, 1.5)
    return trace("drift", list(work.lines(lambda share: 1 + growth * share)), slow_is_open=True)


def speed_up(work: Work) -> Trace:
    """Items take less and less time."""
    fall = work.r.uniform(0.4, 0.7)
    return trace("speed-up", list(work.lines(lambda share: 1 - fall * share)))


def step(work: Work) -> Trace:
    """The work becomes slower and stays so."""
    place, factor = work.r.uniform(0.3, 0.65), work.r.uniform(1.4, 2.2)
    lines = list(work.lines(lambda share: factor if share > place else 1.0))
    at = lines[int(place * len(lines))].t
    return trace("step", lines, slow=((at, math.inf),), foreseeable=at)


def hiccup(work: Work) -> Trace:
    """The work is slow for a while."""
    begin, factor = work.r.uniform(0.2, 0.4), work.r.uniform(1.5, 2.5)
    end = begin + work.r.uniform(0.15, 0.25)
    lines = list(work.lines(lambda share: factor if begin < share <= end else 1.0))
    moments = (lines[int(begin * len(lines))].t, lines[int(end * len(lines))].t)
    return trace("hiccup", lines, slow=(moments,), foreseeable=moments[1])


def stall(work: Work) -> Trace:
    """Nothing for a long time, then it goes on."""
    place = int(work.items * work.r.uniform(0.3, 0.7))
    lines = []
    for done in range(1, work.items + 1):
        if done == place:
            work.t += max(900.0, work.length * work.r.uniform(0.08, 0.2))
        work.item()
        lines.append(work.line(done))
    moments = (lines[place - 2].t, lines[place - 1].t)
    return trace("stall", lines, stalls=(moments,), foreseeable=moments[1])


def hang(work: Work) -> Trace:
    """No line after some time."""
    lines = list(work.lines(lambda share: 1.0))[: int(work.items * work.r.uniform(0.2, 0.9))]
    at = lines[-1].t
    return trace("hang", lines, stalls=((at, math.inf),))._replace(end=None, watched=at + max(3600.0, 0.3 * at))


def resume(work: Work) -> Trace:
    """A crash, and on from the last checkpoint."""
    crash = int(work.items * work.r.uniform(0.3, 0.7))
    lines = list(work.lines(lambda share: 1.0))[:crash]
    work.t = lines[-1].t + work.r.uniform(60, 280)
    again = work.t
    lines += work.lines(lambda share: 1.0, first=int(crash * work.r.uniform(0.9, 0.98)))
    return trace("resume", lines, foreseeable=again)


def heavy_tails(work: Work) -> Trace:
    """Few items take most of the time."""
    work.noise = work.r.uniform(0.9, 1.2)
    return trace("heavy tails", list(work.lines(lambda share: 1.0)))


def longest_first(work: Work) -> Trace:
    """Items sorted by their length."""
    lengths = sorted((work.r.lognormvariate(-0.32, 0.8) for _ in range(work.items)), reverse=True)
    return trace(
        "longest first", list(work.lines(lambda share: lengths[round(share * work.items) - 1])), slow_is_open=True
    )


def constant(factor: float) -> Callable[[float], float]:
    """The same factor all the time."""
    return lambda share: factor


def straggler(work: Work) -> Trace:
    """Eight workers, one of them slow."""
    slow, factor, lines = work.r.randrange(8), work.r.uniform(1.3, 2.0), []
    for worker in range(8):
        own = Work(work.r, work.length)
        own.items = 250
        pace = constant(factor if worker == slow else 1.0)
        lines += [line._replace(worker=worker) for line in own.lines(pace)]
    return trace("straggler", sorted(lines, key=lambda line: line.arrival))


def clock_set(work: Work) -> Trace:
    """The clock of the log jumps."""
    place, offset = work.r.uniform(0.3, 0.6), work.r.choice((-25_200, -3600, -90, 3600, 7200))
    lines = list(work.lines(lambda share: 1.0))
    jump = int(place * len(lines))
    return trace("clock set", lines[:jump] + [line._replace(t=line.t + offset) for line in lines[jump:]])


def buffered(work: Work) -> Trace:
    """Lines come in one flush now and then."""
    every = work.length * work.r.uniform(0.005, 0.02)
    lines = [line._replace(arrival=math.ceil(line.t / every) * every) for line in work.lines(lambda share: 1.0)]
    return trace("buffered", lines)


def sparse(work: Work) -> Trace:
    """Few lines, hours apart."""
    work.items, work.length = work.r.choice((24, 40, 60)), work.r.uniform(8, 40) * 3600
    return trace("sparse", list(work.lines(lambda share: 1.0)))


FAMILIES: tuple[Callable[[Work], Trace], ...] = (
    *(steady, warm_up, checkpoints, epochs, drift, speed_up, step, hiccup, stall, hang),
    *(resume, heavy_tails, longest_first, straggler, clock_set, buffered, sparse),
)


def traces(seed: int, of_each: int = 3) -> list[Trace]:
    """Some runs of each family."""
    return [
        family(Work(random.Random(f"{seed}/{family.__name__}/{index}")))._replace(name=f"{family.__name__}-{index}")
        for family in FAMILIES
        for index in range(of_each)
    ]


def twins(seed: int, of_each: int = 3) -> list[tuple[Trace, Trace]]:
    """Pairs of runs of one job: what differs is only the noise."""
    found = []
    for family in (steady, warm_up, checkpoints, epochs, drift, speed_up, heavy_tails):
        for index in range(of_each):
            pair = []
            for again in range(2):
                r = random.Random(f"{seed}/{family.__name__}/{index}")
                work = Work(Twin(r, random.Random(f"{seed}/{index}/{again}")))
                work.length *= random.Random(f"{seed}/{family.__name__}/{index}/{again}").lognormvariate(0, 0.05)
                pair.append(family(work))
            found.append((pair[0], pair[1]))
    return found


class Twin(random.Random):
    """Chooses as one generator does, while the noise comes from another."""

    def __init__(self, same: random.Random, own: random.Random) -> None:
        super().__init__(0)
        self.choice = same.choice  # type: ignore[method-assign]
        self.uniform = same.uniform  # type: ignore[method-assign]
        self.lognormvariate = own.lognormvariate  # type: ignore[method-assign]
