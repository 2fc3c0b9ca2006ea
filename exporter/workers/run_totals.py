"""What is kept of the runs of a worker that have ended: the last ends, and sums over all."""

from collections.abc import Mapping
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import NOTHING, Record, RecordError
from exporter.contract.status import LISTED_RUNS


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One end of a worker, with its exit reason."""

    restart: int
    code: int | None
    signal: int | None
    end: float
    reason: str
    evidence: tuple[str, ...]


class ExitTotals(NamedTuple):
    """Ends of a worker."""

    last: tuple[WorkerExit, ...] = ()  # of its last runs, oldest first
    counts: Mapping[str, int] = NOTHING  # of all runs, by reason
    times: Mapping[str, float] = NOTHING  # of the last end, by reason

    def plus(self, ended: WorkerExit) -> "ExitTotals":
        """With the end of one more run."""
        reason = ended.reason
        return ExitTotals(
            tuple(sorted((*self.last, ended), key=lambda known: known.restart)[-LISTED_RUNS:]),
            {**self.counts, reason: self.counts.get(reason, 0) + 1},
            {**self.times, reason: max(ended.end, self.times.get(reason, ended.end))},
        )


class RunUsage(NamedTuple):
    """What runs have used; None while unknown."""

    cpu_s: float | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None

    def plus(self, other: "RunUsage") -> "RunUsage":
        """Sums of what is known."""
        pairs = zip(self, other, strict=True)
        return RunUsage(*(b if a is None else a if b is None else a + b for a, b in pairs))  # type: ignore[arg-type]


NO_EXITS, NO_USAGE = ExitTotals(), RunUsage()


class _RecordedUsage(Record):
    """Part of an exit record."""

    user_seconds: float | None = None
    system_seconds: float | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None


def recorded_usage(record: Mapping[str, object]) -> RunUsage:
    """What a run has used according to its exit record, without descendants for which nobody waited."""
    try:
        found = _RecordedUsage.from_json(record)
    except RecordError:  # a file, in which anything can be
        return NO_USAGE
    known = found.user_seconds is not None and found.system_seconds is not None
    cpu_s = (found.user_seconds or 0.0) + (found.system_seconds or 0.0) if known else None
    return RunUsage(cpu_s, found.io_read_bytes, found.io_write_bytes)
