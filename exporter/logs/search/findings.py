"""What a look at a log finds: the values that scanning gives and progress takes.

There is one for every record that says something, so they are tuples: a frozen dataclass takes several times as long.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

UNITS = ("items", "requests", "tokens", "steps", "batches", "epochs")  # what a position may count
ADDED_UP = ("items", "requests", "tokens")
"""Units of which each data-parallel rank does its own share; the ranks are in step in all others."""
MARKS = ("evaluating", "checkpointing", "compiling", "loading", "completing")
"""Words for what a worker does instead of its work: these name a pause before it shows in the rate."""


class LogPosition(NamedTuple):
    """Where the work stands, as one record says. Offsets count from the start of the file."""

    pattern: str
    unit: str
    offset: int  # byte at which the record begins
    done: int
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    rank: int | None = None  # Data-parallel rank that the record names, when several write to one log
    resumed: bool = False  # whether the record says that the work goes on here: this much is not work done
    stamp: float | None = None
    """Time in the record: epoch seconds as if its clock were UTC, unless the record names its zone."""


class LogValue(NamedTuple):
    """Last number under a name."""

    number: float
    offset: int
    stamp: float | None = None


class ActivityMark(NamedTuple):
    """A record that says what the worker does now; ``begins`` is False where it says that it has ended."""

    name: str
    begins: bool
    offset: int
    stamp: float | None = None


@dataclass
class LogFindings:
    """Everything that one piece of a log says, in the order of its records."""

    positions: list[LogPosition] = field(default_factory=list)
    values: dict[str, dict[int | None, LogValue]] = field(default_factory=dict)
    """By name, then by data-parallel rank (None when the record names none)."""
    marks: list[ActivityMark] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    """Records that match, by error pattern; patterns without one are left out."""
