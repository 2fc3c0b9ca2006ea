"""Position of a log, calculated as a sidecar does."""

from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.lexicon import Lexicon
from exporter.logs.search.findings import ActivityMark, LogFindings, LogPosition
from exporter.progress.track import ProgressTrack


@dataclass(frozen=True)
class ExpectedTotals:
    """Totals of each worker from the job file, for logs without them."""

    epochs: int | None = None
    steps: int | None = None


class WorkPosition(NamedTuple):
    """The position according to the preferred counter, over all epochs."""

    done: float
    total: float | None
    unit: str  # of ``done`` and ``total``: items, steps, epochs, ...
    pattern: str | None  # None after only a resume
    epoch: int | None
    epochs: int | None
    aside: bool  # whether another counter moved last, such as that of an evaluation


class PositionFollower:
    """The position through the parts of one log, in order."""

    def __init__(self, path: str, lexicon: Lexicon, pack: str, totals: ExpectedTotals) -> None:
        self._path = path
        bases = lexicon.epoch_bases(pack)
        self._track = ProgressTrack(
            lexicon.preferred_positions(pack), epoch_bases=bases, epochs=totals.epochs, steps=totals.steps
        )
        self._time_s = 0.0  # time of the last record, as far as records show it

    def add(self, findings: LogFindings, begin: int, end: int) -> None:
        """Add the findings of records that begin in this part of the log."""
        records: list[LogPosition | ActivityMark] = [*findings.positions, *findings.marks]
        for record in sorted(records, key=lambda record: record.offset):
            if not begin <= record.offset < end:
                continue
            self._time_s = self._time_s if record.stamp is None else record.stamp
            if isinstance(record, ActivityMark):
                self._track.apply_activity(record, self._time_s)
            else:
                self._track.update(self._path, record, self._time_s)

    @property
    def position(self) -> WorkPosition | None:
        """The position so far; None before the first one."""
        track = self._track
        if track.done is None or track.unit is None:
            return None
        done, total = _plain_number(track.done), None if track.total is None else _plain_number(track.total)
        return WorkPosition(done, total, track.unit, track.pattern, track.epoch, track.epochs, track.has_other_counter)


def _plain_number(number: float) -> float:
    """A whole number as an int, for display."""
    return int(number) if number == int(number) else number
