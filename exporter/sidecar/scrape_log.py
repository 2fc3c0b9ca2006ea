"""Who scrapes a sidecar, and whether they have seen the final values. Pure."""

from typing import NamedTuple


class _Scraper(NamedTuple):
    """One scraper: its latest scrape, and how long it may stay away before nobody waits for it."""

    last: float
    patience_s: float  # 0 for one that has come once, and may never come again
    gaps_s: tuple[float, ...] = ()  # between its latest scrapes

    def is_awaited(self, now: float) -> bool:
        """Whether it should still come again."""
        return now - self.last < self.patience_s


class ScrapeLog:
    """Recent scrapers, and whether each has seen the final values.

    Waiting for the next scrape holds the job's nodes, so it must not be enough to ask once. A scraper is awaited if it
    has shown credentials, or comes again and again: for two of its own intervals. At the start of an announced job one
    scrape is enough until the second is due, since the Prometheus that knows its targets had no time for more.

    Two servers behind one address look like one scraper with a short and a long interval in turn: the longest counts.
    """

    RECENT_S = 180.0  # how long a scraper with credentials is awaited
    DISCOVERY_S = 30.0  # in which an announced job waits for its first scrape
    SECOND_SCRAPE_S = 45.0  # in which a Prometheus as documented finds an announced job and scrapes it twice
    MOST_GAPS = 4  # whose longest counts: as many servers may share an address
    MOST_SCRAPERS = 256  # kept; a job has a few, and each costs memory
    MOST_NAME = 100  # characters of a scraper's name, enough to distinguish them

    def __init__(self, started: float, *, announced: bool) -> None:
        self._scrapers: dict[str, _Scraper] = {}
        self._discovery_end = started + (self.DISCOVERY_S if announced else 0.0)
        self._second_scrape_end = started + (self.SECOND_SCRAPE_S if announced else 0.0)

    def record(self, scraper: str, now: float, *, is_known: bool = False) -> None:
        """Record a scrape; ``is_known`` is one with credentials. Without room for another scraper, the others stay."""
        name = scraper[: self.MOST_NAME]
        before = self._scrapers.get(name)
        if before is None and len(self._scrapers) >= self.MOST_SCRAPERS:
            self._scrapers = {key: one for key, one in self._scrapers.items() if one.is_awaited(now)}
            if len(self._scrapers) >= self.MOST_SCRAPERS:
                return
        gaps_s = (*before.gaps_s, now - before.last)[-self.MOST_GAPS :] if before is not None else ()
        patience_s = max(2.0 * max(gaps_s, default=0.0), self._second_scrape_end - now)
        self._scrapers[name] = _Scraper(now, self.RECENT_S if is_known else min(patience_s, self.RECENT_S), gaps_s)

    def is_satisfied(self, since: float, now: float) -> bool:
        """Whether all awaited scrapers have scraped again after ``since``."""
        awaited = [one for one in self._scrapers.values() if one.is_awaited(now)]
        if not awaited:
            return now >= self._discovery_end
        return all(one.last > since for one in awaited)
