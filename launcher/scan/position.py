"""Where the work of a log stands, as a sidecar that follows the log says."""

from dataclasses import dataclass

from exporter.logs.lexicon import Lexicon
from exporter.logs.search.findings import ActivityMark, LogFindings, LogPosition
from exporter.progress.track import ProgressTrack


@dataclass(frozen=True)
class ExpectedTotals:
    """What a job file says of the end of each worker, for logs that do not."""

    epochs: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class WorkPosition:
    """Where the work stands: what the counter in force says, over all epochs."""

    done: float
    total: float | None
    unit: str
    pattern: str | None  # none where only a resume has been told so far
    epoch: int | None
    epochs: int | None
    aside: bool  # whether what moves last is another counter, such as that of an evaluation


class PositionFollower:
    """Takes what the parts of one log say, in their order."""

    def __init__(self, path: str, lexicon: Lexicon, pack: str, totals: ExpectedTotals) -> None:
        self._path = path
        bases = lexicon.epoch_bases(pack)
        self._track = ProgressTrack(
            lexicon.preference(pack), epoch_bases=bases, epochs=totals.epochs, steps=totals.steps
        )
        self._t = 0.0
        """When the last record was written, as far as the records say."""

    def take(self, findings: LogFindings, begin: int, end: int) -> None:
        """Follow the records that begin in this part of the log."""
        told: list[LogPosition | ActivityMark] = [*findings.positions, *findings.marks]
        for record in sorted(told, key=lambda record: record.offset):
            if not begin <= record.offset < end:
                continue
            self._t = self._t if record.stamp is None else record.stamp
            if isinstance(record, ActivityMark):
                self._track.mark(record, self._t)
            else:
                self._track.update(self._path, record, self._t)

    @property
    def standing(self) -> WorkPosition | None:
        """What they have said so far; None before the first position."""
        track = self._track
        if track.done is None or track.unit is None:
            return None
        done, total = _whole(track.done), None if track.total is None else _whole(track.total)
        return WorkPosition(done, total, track.unit, track.pattern, track.epoch, track.epochs, track.aside)


def _whole(number: float) -> float:
    """As a whole number where it is one: it is shown so."""
    return int(number) if number == int(number) else number
