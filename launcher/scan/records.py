"""What `gpujob scan --json` prints."""

from collections.abc import Mapping
from typing import NamedTuple

from exporter.contract.records import Record
from launcher.scan.position import WorkPosition


class MatchedRecord(NamedTuple):
    """One record of a log: a line, or one state of a progress bar."""

    line: int  # from 1; the states of a progress bar share one line
    offset: int  # in bytes
    text: str  # as a terminal shows it, shortened
    unfinished: bool  # without a record end, so possibly half written


class NearestPack(NamedTuple):
    """The pack whose samples are most like a log in which nothing was found."""

    name: str
    why: str


class SuggestedPattern(NamedTuple):
    """A pattern for `progress.patterns` of the job file."""

    name: str
    pattern: str  # regular expression


class UnmatchedLine(NamedTuple):
    """A record that looks like progress but gives no position. Its first fields are those of a matched record."""

    line: int
    offset: int
    text: str
    unfinished: bool
    suggestion: SuggestedPattern | None


class PositionMatches(NamedTuple):
    """Matches of a pattern for the position of the work, or for a position at which it resumes."""

    name: str
    kind: str  # position or resume
    own: bool  # from the job file
    matches: int | None  # matching records; null if not counted
    unit: str | None
    done: int | None  # these and the following: of the last match
    total: int | None
    epoch: int | None
    epochs: int | None
    rank: int | None
    groups: Mapping[str, str | None]  # of the expression, by name or number
    last: MatchedRecord | None


class ValueMatches(NamedTuple):
    """Matches of a pattern for one number or several."""

    name: str
    kind: str  # value or pairs
    own: bool
    matches: int | None
    values: Mapping[str, float | None]  # last number by name; null for one that JSON lacks
    rank: int | None
    groups: Mapping[str, str | None]
    last: MatchedRecord | None


class MarkMatches(NamedTuple):
    """Matches of a pattern for the begin or end of an activity, such as an evaluation."""

    name: str
    kind: str  # mark
    own: bool
    matches: int | None
    begins: bool | None
    groups: Mapping[str, str | None]
    last: MatchedRecord | None


class ErrorMatches(NamedTuple):
    """Matches of an error pattern."""

    name: str
    kind: str  # error
    own: bool
    matches: int | None
    severity: str | None  # critical, warning or info
    groups: Mapping[str, str | None]
    last: MatchedRecord | None


class ScannedLog(Record):
    """The results for one log. CPU times are seconds of this process."""

    path: str
    bytes: int
    problem: str | None  # why it was not searched
    records: int
    lines: int
    pack: str
    pack_chosen: bool  # whether the pack was detected, not given
    pack_evidence: MatchedRecord | None  # first record that indicates the detected pack
    position: WorkPosition | None  # without an unfinished last record
    unfinished: (
        MatchedRecord | None
    )  # last record without an end, which a sidecar ignores until it, or its worker, ends
    nearest_pack: NearestPack | None
    cpu_seconds: float  # reading, searching, and counting records, as in a sidecar
    bytes_per_cpu_second: float | None  # null if the log is too small to measure
    choose_cpu_seconds: float  # detecting the pack
    count_cpu_seconds: float  # counting matches, and locating the last ones
    patterns: tuple[PositionMatches | ValueMatches | MarkMatches | ErrorMatches, ...]
    unmatched: tuple[UnmatchedLine, ...]
    notes: tuple[str, ...]
    timeouts: Mapping[str, int]  # records per pattern whose search timed out


class UnreadableLogRecord(NamedTuple):
    """A log that cannot be read."""

    path: str
    problem: str


class ScanResults(Record):
    """The results of a scan."""

    SCHEMA = 1

    logs: tuple[ScannedLog, ...]
    errors: tuple[UnreadableLogRecord, ...]
