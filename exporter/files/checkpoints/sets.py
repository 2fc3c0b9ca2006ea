"""Entries of a folder that form one checkpoint, and what follows from them alone."""

import bisect
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field
from typing import Literal, NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.files.checkpoints.entries import CheckpointEntry, CheckpointFile, CheckpointIndex
from exporter.files.checkpoints.names import (
    FORMLESS,
    CheckpointName,
    is_marker,
    is_part,
    is_sharded,
    is_state_of_training,
    is_text,
    is_weights,
    missing_companions,
    missing_first_ranks,
    missing_indexes,
    missing_numbers,
    missing_ranks,
    name_shape,
    open_ranks,
    original_key,
)

State = Literal["writing", "complete", "incomplete", "invalid"]

ALIAS_S = 60.0  # `last.ckpt` written within this time of another checkpoint is the same one
UNFINISHED = ("-unfinished", ".unfinished")
MARKER_TOLERANCE_S = 1.0  # a file may be this much younger than the marker of its checkpoint


class Checkpoint(NamedTuple):
    """One checkpoint as of one poll; times in epoch seconds."""

    key: str
    name: str
    state: State
    step: int | None
    epoch: int | None
    files: int
    bytes: int
    end: float  # when the last of its files was written
    seconds: float | None  # time that writing took, if seen
    missing: tuple[str, ...] = ()  # expected files that are missing, at most twenty
    missing_count: int = 0  # all of them
    valid: bool | None = None  # whether all checked files are valid; None before any result
    reason: str | None = None
    odd_size: float | None = None  # size relative to the median of earlier ones, if below half or above twice that
    odd: str | None = None  # files that earlier ones had and this one has not; may be harmless
    saved: tuple[float, float] = (0.0, 0.0)  # the one with the largest is the newest; see ``save_times``


class CheckpointSetEntry(NamedTuple):
    """One entry of a set as last seen."""

    view: CheckpointEntry
    name: CheckpointName
    has_dropped_files: bool = False  # whether its files have been dropped from memory

    @property
    def files(self) -> Sequence[CheckpointFile]:
        return () if self.has_dropped_files else [file for file in self.view.files if not file.temporary]

    @property
    def is_partial(self) -> bool:
        """Whether a file in it still has a temporary name."""
        return any(file.temporary for file in self.view.files)


class _NameFacts(NamedTuple):
    """Facts from the names of a set's files."""

    inputs: frozenset[object]  # paths and indexes that the others derive from
    shapes: frozenset[str]
    parts: frozenset[str]
    shard_gaps: tuple[str, ...]
    rank_gaps: tuple[str, ...]
    first_ranks: tuple[str, ...]
    open_rank: str | None
    optional_gap: str | None


@dataclass
class CheckpointSet:
    """Entries that form one checkpoint; times are monotonic."""

    key: str
    name: CheckpointName
    first_seen: float  # first sign of its writing; reset when it is overwritten
    changed_at: float  # last change of any entry
    was_watched: bool  # whether we saw its writing, not just its end
    entries: dict[str, CheckpointSetEntry] = field(default_factory=dict)
    temporary: dict[str, CheckpointEntry] = field(default_factory=dict)
    temporary_changed_at: float = 0.0
    temporary_inodes: set[int] = field(default_factory=set)  # of entries seen under temporary names
    renamed: set[str] = field(default_factory=set)  # final names of such entries
    pending: bool = True  # whether anything was written since it was last complete
    state: State | None = None
    last_complete: Checkpoint | None = None  # as it was when last complete
    shrunk: bool = False  # whether a file was truncated or replaced since then
    pause_s: float = 0.0
    reported: set[str] = field(default_factory=set)  # kinds of events already reported for its present content
    copies: set[str] = field(default_factory=set)  # entries named like a copy, parts of it until an original appears
    replaces_copy: bool = False  # whether a copy was counted in its place before it was complete
    is_finished: bool = False  # whether its writer showed that it had finished it
    was_seen_changing: bool = False  # whether we saw any of it appear or change
    # whether it is text without a step, as ``checkpoint_log.txt``: ignored beside real checkpoints
    is_text_only: bool = False
    _facts: _NameFacts | None = None

    def files(self) -> list[CheckpointFile]:
        """Return all of its files under their final names."""
        return [file for entry in self.entries.values() for file in entry.files]

    @property
    def has_step(self) -> bool:
        """Whether its name has a step or an epoch, rather than a date or no number."""
        return self.name.step is not None or self.name.epoch is not None

    @property
    def has_data(self) -> bool:
        """Whether it holds more than a marker or an empty directory."""
        return any(entry.files for entry in self.entries.values() if not entry.name.marker)

    @property
    def end(self) -> float:
        """When the last of its files was written; 0 without files."""
        return max((file.mtime for file in self.files()), default=0.0)

    @property
    def saved(self) -> tuple[float, float]:
        """When it was written, by which checkpoints are ordered."""
        return save_times(self.files())

    @property
    def shapes(self) -> frozenset[str]:
        """Shapes of its shards and markers."""
        return self._read_names().shapes

    @property
    def parts(self) -> frozenset[str]:
        """Shapes of its other parts, in its directory."""
        return self._read_names().parts

    @property
    def shard_gaps(self) -> tuple[str, ...]:
        """Missing shards that numbers or indexes imply."""
        return self._read_names().shard_gaps

    @property
    def rank_gaps(self) -> tuple[str, ...]:
        """Missing ranks between others."""
        return self._read_names().rank_gaps

    @property
    def first_ranks(self) -> tuple[str, ...]:
        """Rank 0 wherever only others exist, which earlier checkpoints may have had."""
        return self._read_names().first_ranks

    @property
    def open_rank(self) -> str | None:
        """A file of one of the ranks, if nothing in the checkpoint says how many there are."""
        return self._read_names().open_rank

    @property
    def optional_gap(self) -> str | None:
        """A file that is absent and may have been left out on purpose."""
        return self._read_names().optional_gap

    @property
    def lacks_weights(self) -> bool:
        """Whether only the state of an optimizer and the like is left, without a model."""
        return bool(self.parts) and _holds_only_state_of_training(self.files())

    @property
    def unfinished_mark(self) -> str | None:
        """The empty file that NeMo leaves beside a checkpoint until it is written, and by which it removes the rest."""
        for entry in self.temporary.values():
            if entry.name.endswith(UNFINISHED) and not (entry.is_directory or any(file.size for file in entry.files)):
                return entry.name
        return None

    @property
    def is_renamed(self) -> bool:
        """Whether every entry was renamed into place."""
        return all(name in self.renamed for name in self.entries)

    @property
    def is_marked(self) -> bool:
        """Whether its writer left a marker after writing all files."""
        marks = [
            file.mtime
            for entry in self.entries.values()
            for file in entry.files
            if entry.name.marker or (entry.view.is_directory and is_marker(file.path))
        ]
        return bool(marks) and all(file.mtime <= max(marks) + MARKER_TOLERANCE_S for file in self.files())

    def _read_names(self) -> _NameFacts:
        files = self.files()
        indexes = [index for entry in self.entries.values() for index in entry.view.indexes]
        inputs = frozenset(itertools.chain((file.path for file in files), indexes))
        if self._facts is None or self._facts.inputs != inputs:
            there = {file.path for file in files}
            gaps = {*missing_numbers(there), *missing_companions(there)}
            for index in indexes:
                if _is_index_current(index, there):
                    gaps.update(path for path in index.shards if path not in there)
            shapes = {
                shape for entry in self.entries.values() for file in entry.files if (shape := _file_shape(file, entry))
            }
            holes = set(missing_ranks(there)) - gaps
            named = {path for index in indexes for path in index.shards}
            optional = [path for index in indexes for path in index.optional if path not in there]
            optional += sorted(missing_indexes(there))
            self._facts = _NameFacts(
                inputs,
                frozenset(shapes),
                frozenset(
                    name_shape(inner, entry.name)
                    for entry in self.entries.values()
                    for file in entry.files
                    if (inner := file.path.partition("/")[2]) and is_part(inner) and not is_sharded(inner)
                ),
                tuple(sorted(gaps)),
                tuple(sorted(holes)),
                tuple(missing_first_ranks(there)),
                open_ranks(there - named),
                next(iter(optional), None),
            )
        return self._facts


def has_model(entry: CheckpointEntry) -> bool:
    """Whether it holds a model by its names, rather than an optimizer, a note or a marker."""
    return not _holds_only_state_of_training(entry.files) if entry.is_directory else is_weights(entry.bare)


def _holds_only_state_of_training(files: Iterable[CheckpointFile]) -> bool:
    beside = (is_text, is_marker, FORMLESS.search)
    return all(is_state_of_training(file.path) or any(kind(file.path) for kind in beside) for file in files)


def save_times(files: Iterable[CheckpointFile]) -> tuple[float, float]:
    """When half of the bytes of a checkpoint were written, and then when all were; zeros without files.

    So the results of an evaluation, or converted weights, make an older checkpoint no newer.
    """
    ordered = sorted(files, key=lambda file: file.mtime)
    sums = list(itertools.accumulate(file.size for file in ordered))
    if not ordered:
        return 0.0, 0.0
    return ordered[bisect.bisect_left(sums, sums[-1] / 2)].mtime, ordered[-1].mtime


def _is_index_current(index: CheckpointIndex, paths: Collection[str]) -> bool:
    """Whether an index describes these files, rather than being left over from other weights."""
    if any(path in paths for path in index.shards):
        return True
    folder = index.path.rpartition("/")[0]
    return not any(path.rpartition("/")[0] == folder and is_weights(path) for path in paths)


def _file_shape(file: CheckpointFile, entry: CheckpointSetEntry) -> str | None:
    """Shape of a shard or marker, with a leading slash inside a directory; None for other files."""
    if not entry.view.is_directory:
        return name_shape(file.path, entry.name) if entry.name.marker or is_sharded(file.path) else None
    inner = file.path.partition("/")[2]
    return f"/{name_shape(inner, entry.name)}" if is_marker(inner) or is_sharded(inner) else None


def is_being_written(found: CheckpointSet, before: CheckpointSetEntry | None, entry: CheckpointEntry) -> bool:
    """Whether any file of the entry was written since last seen; removals do not count.

    Sets ``shrunk`` if a file became shorter or was replaced.
    """
    done = found.last_complete
    if before is None or before.has_dropped_files:
        return done is None or any(file.mtime > done.end for file in entry.files)
    known = {file.path: file for file in before.view.files}
    written = False
    for file in entry.files:
        old = known.get(file.path)
        if old is None or not file.is_unchanged(old):
            written = True
            if old is not None and (file.size < old.size or file.inode != old.inode):
                found.shrunk = True
    return written


def is_only_extended(before: Checkpoint, files: Sequence[CheckpointFile], found: CheckpointSet) -> bool:
    """Whether a complete checkpoint only gained data: its files grew, or most of its bytes are unchanged.

    A checkpoint that overwrites the last one may grow too, but not soon after it.
    """
    newest, size = max(file.mtime for file in files), sum(file.size for file in files)
    if not found.shrunk:
        if newest <= before.end:
            return True
        if size > before.bytes and (found.name.versioned or found.pause_s < ALIAS_S):
            return True
    if len(files) == 1:
        return False
    return 2 * sum(file.size for file in files if file.mtime <= before.end) >= max(before.bytes, 1)


def seconds_written(found: CheckpointSet, files: Sequence[CheckpointFile]) -> float | None:
    """Seconds that writing took: by file times or by what we saw, whichever is longer. None if unknown."""
    since = found.last_complete.end if found.last_complete is not None else None
    times = [file.mtime for file in files if since is None or file.mtime > since]
    spread = max(times) - min(times) if len(times) > 1 else 0.0
    seen = found.changed_at - found.first_seen if found.was_watched else 0.0
    return max(spread, seen) or None


def is_superseded(found: CheckpointSet, sets: Collection[CheckpointSet]) -> bool:
    """Whether its writer has started another checkpoint, and so has finished this one."""
    if not found.name.versioned or not found.entries or found.temporary:
        return False
    end = found.end
    return any(
        other is not found
        and other.name.versioned
        and other.first_seen >= found.changed_at
        and min((file.mtime for file in other.files()), default=0.0) > end
        and found.shapes <= other.shapes
        for other in sets
    )


def may_be_alias_of_other(found: CheckpointSet, sets: Collection[CheckpointSet]) -> bool:
    """Whether it has a name like ``last`` while others have a step."""
    return found.name.alias and any(other.name.versioned and other.entries for other in sets)


def is_alias_of_other(found: CheckpointSet, sets: Collection[CheckpointSet]) -> bool:
    """Whether it is another checkpoint's file or copy, or is named like ``last`` and was written with another one."""
    if (original := original_key(found.key)) and any(other.key == original and other.entries for other in sets):
        return True
    if found.name.versioned:
        return False
    inodes = {file.inode for file in found.files()}
    for other in sets:
        if other.name.versioned and other.entries:
            end = other.last_complete.end if other.last_complete is not None else other.end
            if found.name.alias and abs(end - found.end) < ALIAS_S:
                return True
            if inodes & {file.inode for file in other.files()}:
                return True
    return False
