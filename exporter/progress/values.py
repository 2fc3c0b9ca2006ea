"""Last numbers that a worker has logged, by name and data-parallel rank."""

import math
from collections.abc import Iterable

from exporter.contract import run_files
from exporter.logs.search.findings import LogValue
from exporter.progress.track import combine_ranks

# by the last word of a value's name: of two, the better one
_BETTER = dict.fromkeys(("loss", "perplexity", "error", "rmse", "logloss"), min) | {"accuracy": max, "auc": max}
VALUE_FRESH_S = 900.0  # older values are no longer shown: they may not be current
# Limits on a worker's value names, since each is a series, and on the ranks of one name.
MOST_VALUES, MOST_RANKS = 64, 512

ValuesByRank = dict[int | None, LogValue]  # the rank is None if the record has none


class WorkerValues:
    """Values of one worker. Those on the page are combined again only after a new one, or when one is too old."""

    def __init__(self, by_name: dict[str, ValuesByRank] | None = None, best: dict[str, float] | None = None) -> None:
        self.by_name = {} if by_name is None else by_name
        self.best: dict[str, float] = {} if best is None else best
        self._fresh: tuple[tuple[str, float, float], ...] = ()
        self._fresh_between = math.inf, -math.inf  # times between which they are valid
        self._last: dict[str, float] | None = None  # None after a change

    def set(self, name: str, rank: int | None, value: LogValue, t: float) -> None:
        """Replace a value by one of time ``t``, unless that is one name or rank too many."""
        of_ranks = self.by_name.get(name)
        if of_ranks is None:
            if len(self.by_name) >= MOST_VALUES:
                return
            of_ranks = self.by_name[name] = {}
        if rank not in of_ranks and len(of_ranks) >= MOST_RANKS:
            for old in [old for old, last in of_ranks.items() if t - (last.stamp or 0.0) >= VALUE_FRESH_S]:
                del of_ranks[old]
            if len(of_ranks) >= MOST_RANKS:
                return
        of_ranks[rank] = LogValue(value.number, value.offset, t)
        self._forget_results()

    def remove(self, names: Iterable[str]) -> None:
        """Remove all values of these names."""
        for name in names:
            self.by_name.pop(name, None)
        self._forget_results()

    def _forget_results(self) -> None:
        self._fresh_between, self._last = (math.inf, -math.inf), None

    def number(self, name: str, now: float, fresh_s: float = VALUE_FRESH_S) -> float | None:
        """The number of all ranks under a name; None if none is fresh."""
        of_ranks = self.by_name.get(name)
        return None if of_ranks is None else combine_ranks(name, of_ranks, now, fresh_s)

    def fresh(self, now: float) -> tuple[tuple[str, float, float], ...]:
        """Name, number and time of each fresh value."""
        since, until = self._fresh_between
        if since <= now < until:
            return self._fresh
        found, until = [], math.inf
        for name, of_ranks in self.by_name.items():
            times = [value.stamp or 0.0 for value in of_ranks.values()]
            until = min([until, *(t + VALUE_FRESH_S for t in times if now < t + VALUE_FRESH_S)])
            number = combine_ranks(name, of_ranks, now, VALUE_FRESH_S)
            if number is None:
                continue
            found.append((name, number, max(times)))
        self._fresh, self._fresh_between = tuple(found), (now, until)
        return self._fresh

    def last(self) -> dict[str, float]:
        """The last number under each name, however old. One better than the best so far becomes that.

        Of several ranks it is their number at the time of the last value. Numbers that no record has are omitted.
        """
        if self._last is not None:
            return self._last
        self._last = {}
        for name, of_ranks in self.by_name.items():
            latest = max((value.stamp or 0.0 for value in of_ranks.values()), default=0.0)
            number = combine_ranks(name, of_ranks, latest, VALUE_FRESH_S)
            if number is None or not abs(number) < run_files.MOST_NUMBER:  # NaN is not less
                continue
            self._last[name] = number
            better = _BETTER.get(name.rpartition("_")[2])
            if better is not None:
                self.best[name] = better(number, self.best.get(name, number))
        return self._last
