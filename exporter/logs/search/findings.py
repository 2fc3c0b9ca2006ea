"""Findings of one read of a log, as passed from search to progress.

There is one for every relevant record, so they are tuples: frozen dataclasses take several times as long.
"""

from dataclasses import field
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass

UNITS = ("items", "requests", "tokens", "steps", "batches", "epochs")  # possible units of a position
# each data-parallel rank does its own share of these; other units advance together
SUMMED_UNITS = ("items", "requests", "tokens")
# activities instead of work; they announce a pause before the rate shows it
MARKS = ("evaluating", "checkpointing", "compiling", "loading", "completing")


class LogPosition(NamedTuple):
    """Position in the work, from one record. ``offset`` counts from the start of the file."""

    pattern: str
    unit: str
    offset: int  # byte at which the record begins
    done: int
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    rank: int | None = None  # data-parallel rank in the record, if several write to one log
    resumed: bool = False  # whether the run resumes here: this count is not work done
    # Time in the record: epoch seconds as if its clock were UTC, unless the record names its zone
    stamp: float | None = None


class LogValue(NamedTuple):
    """Last number under a name."""

    number: float
    offset: int
    stamp: float | None = None


class ActivityMark(NamedTuple):
    """A record about the worker's activity; ``begins`` is False at its end."""

    name: str
    begins: bool
    offset: int
    stamp: float | None = None


@dataclass
class LogFindings:
    """All findings in one part of a log, in record order."""

    positions: list[LogPosition] = field(default_factory=list)
    # By name, then by data-parallel rank (None if the record has none)
    values: dict[str, dict[int | None, LogValue]] = field(default_factory=dict)
    marks: list[ActivityMark] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)  # number of matching records by error pattern; without zeros
