"""Checkpoints from the files that are there: which are being written, whole, in parts or damaged, and their rhythm."""

import itertools
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from exporter.derive.checkpoint_names import (
    Name,
    common_name,
    is_marker,
    is_sharded,
    missing_numbers,
    parse_name,
    shape,
)

State = Literal["writing", "complete", "incomplete", "invalid"]

SETTLE_S, MOST_SETTLE_S = 10.0, 300.0
"""Files that do not change for so long are written; longer where a writer has been seen to pause for longer."""
PAUSES = 2.0
"""How many times such a pause is waited for."""
PATIENCE = 3.0
"""What is missing is waited for this many times as long as the longest of the last checkpoints took."""
ABANDONED_S = 600.0
"""A temporary file that has not changed for so long is what is left of a writer that has ended."""
ALIAS_S = 60.0
"""``last.ckpt`` that is written within this time of another checkpoint is the same one."""
MARKED_S = 1.0
"""A file may be younger than the marker of its checkpoint by this."""
LEARN_FROM = 3
"""Checkpoints from which the interval, the usual size and the usual shards are learned."""
SHORT_BEFORE = 2
"""After so many with the same files missing the next one is whole without them."""
ODD_RATIO = 2.0
KEPT = 16
REMEMBERED = 1024
"""Checkpoints that have been counted, so that one which is lost from sight for a moment is not counted twice."""
HELD = 8
"""Checkpoints whose files are kept in memory, the newest."""
MOST_SHAPES = 50_000
MOST_NAMES = 20
"""Of missing files in a report."""


class SeenFile(Protocol):
    """One file; times in epoch seconds."""

    @property
    def path(self) -> str:
        """From the checkpoint folder on."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def mtime(self) -> float: ...

    @property
    def inode(self) -> int: ...

    @property
    def temporary(self) -> bool: ...


class SeenDamage(Protocol):
    """A file that is damaged."""

    @property
    def path(self) -> str: ...

    @property
    def reason(self) -> str | None: ...


class SeenEntry(Protocol):
    """One file or directory of the checkpoint folder with the files in it."""

    @property
    def name(self) -> str: ...

    @property
    def bare(self) -> str:
        """The name without marks of a temporary file."""
        ...

    @property
    def temporary(self) -> bool: ...

    @property
    def directory(self) -> bool: ...

    @property
    def inode(self) -> int: ...

    @property
    def files(self) -> Sequence[SeenFile]:
        """Of a file, itself."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all of its files could be looked at."""
        ...

    @property
    def shards(self) -> Sequence[str]:
        """Paths that an index in it names."""
        ...

    @property
    def valid(self) -> int:
        """Files that were looked into and are whole."""
        ...

    @property
    def looked_into(self) -> int:
        """Files of which it is sure what they are; one that was found damaged once is none of them."""
        ...

    @property
    def damaged(self) -> Sequence[SeenDamage]: ...


class Checkpoint(NamedTuple):
    """One checkpoint as it is at one look; times in epoch seconds."""

    key: str
    name: str
    state: State
    step: int | None
    epoch: int | None
    files: int
    bytes: int
    end: float
    """When the last of its files was written."""
    seconds: float | None
    """How long it was written, where that has been seen."""
    missing: tuple[str, ...] = ()
    """Files that should be there, not more than twenty of them,"""
    missing_count: int = 0
    """and how many there are."""
    valid: bool | None = None
    """Whether all of its files that were looked into are whole; None before any that can be told is."""
    reason: str | None = None
    odd_size: float | None = None
    """Its size by the median of those before it, where it is less than half or more than twice of that."""


class Happened(NamedTuple):
    """Something that is worth an event."""

    kind: Literal["saved", "damaged", "incomplete"]
    checkpoint: Checkpoint


class _Past(NamedTuple):
    """What is remembered of a checkpoint that was whole."""

    key: str
    step: int | None
    bytes: int
    seconds: float
    shapes: frozenset[str]
    """Shapes of its shards and markers."""


class _Entry(NamedTuple):
    """One entry of a set as it was last seen."""

    seen: SeenEntry
    name: Name
    slim: bool = False
    """Whether its files are no longer kept."""

    @property
    def files(self) -> Sequence[SeenFile]:
        return () if self.slim else [file for file in self.seen.files if not file.temporary]

    @property
    def is_partial(self) -> bool:
        """Whether a file in it still has a temporary name."""
        return any(file.temporary for file in self.seen.files)


@dataclass
class _Set:
    """Entries that are one checkpoint; moments are monotonic."""

    key: str
    name: Name
    first_seen: float
    """When its writing was first seen, that of a new one over an old one too,"""
    changed: float
    """and when something of it last changed."""
    watched: bool
    """Whether its writing was seen, rather than its end alone."""
    entries: dict[str, _Entry] = field(default_factory=dict)
    temporary: dict[str, SeenEntry] = field(default_factory=dict)
    temporary_changed: float = 0.0
    inodes: set[int] = field(default_factory=set)
    """Of entries that were seen under temporary names,"""
    renamed: set[str] = field(default_factory=set)
    """and the names of those that have them now."""
    pending: bool = True
    """Whether something has been written since it was last whole."""
    state: State | None = None
    done: Checkpoint | None = None
    """As it was when it was last whole."""
    shrunk: bool = False
    """Whether a file of it has become shorter or another one since then."""
    pause: float = 0.0
    told: set[str] = field(default_factory=set)
    """Kinds of events that what is there now has had."""
    _facts: tuple[frozenset[str], frozenset[str], tuple[str, ...]] | None = None

    def files(self) -> list[SeenFile]:
        """All of its files under their final names."""
        return [file for entry in self.entries.values() for file in entry.files]

    @property
    def has_data(self) -> bool:
        """Whether there is more than a marker or an empty directory."""
        return any(entry.files for entry in self.entries.values() if not entry.name.marker)

    @property
    def end(self) -> float:
        """When the last of its files was written; 0 without any."""
        return max((file.mtime for file in self.files()), default=0.0)

    @property
    def shapes(self) -> frozenset[str]:
        """Shapes of its shards and markers."""
        return self._read_names()[1]

    @property
    def gaps(self) -> tuple[str, ...]:
        """Paths of shards that numbers and indexes tell of and that are not there."""
        return self._read_names()[2]

    def _read_names(self) -> tuple[frozenset[str], frozenset[str], tuple[str, ...]]:
        files = self.files()
        paths = frozenset(
            itertools.chain(
                (file.path for file in files),
                (f"\0{path}" for entry in self.entries.values() for path in entry.seen.shards),
            )
        )
        if self._facts is None or self._facts[0] != paths:
            there = {file.path for file in files}
            gaps = set(missing_numbers(there))
            gaps.update(path for entry in self.entries.values() for path in entry.seen.shards if path not in there)
            shapes = {told for entry in self.entries.values() for file in entry.files if (told := _shape(file, entry))}
            self._facts = (paths, frozenset(shapes), tuple(sorted(gaps)))
        return self._facts


def _shape(file: SeenFile, entry: _Entry) -> str | None:
    """The shape of a shard or marker, beginning with a slash within a directory; None for other files."""
    if not entry.seen.directory:
        return shape(file.path, entry.name) if entry.name.marker or is_sharded(file.path) else None
    inner = file.path.partition("/")[2]
    return f"/{shape(inner, entry.name)}" if is_marker(inner) or is_sharded(inner) else None


class Checkpoints:
    """The checkpoints of one job, told of by looks at its checkpoint folder.

    ``now`` is monotonic and only differences of it count; ``wall`` is epoch seconds. Files that are older than
    ``start`` were left by an earlier job and are none of this one.
    """

    def __init__(self, start: float | None = None, interval_s: float | None = None) -> None:
        self.total = 0
        """How many have been written; it never falls."""
        self.last: Checkpoint | None = None
        """The newest one, whole or not, as it was when it was last there,"""
        self.last_complete: Checkpoint | None = None
        """and the newest that was whole, damaged or not."""
        self.writing = False
        """Whether one is being written."""
        self._start = start
        self._interval_s = interval_s
        self._sets: dict[str, _Set] = {}
        self._key_of: dict[str, str] = {}
        self._past: deque[_Past] = deque(maxlen=KEPT)
        self._beats: deque[float] = deque(maxlen=KEPT)
        self._shapes_of_beat: frozenset[str] = frozenset()
        self._counted: dict[str, float] = {}
        self._settle_s = SETTLE_S
        self._holders: dict[str, tuple[float, str, frozenset[str]]] = {}
        """End, key and shapes of the last checkpoint with a file of this shape."""
        self._short: deque[tuple[str, frozenset[str]]] = deque(maxlen=KEPT)
        """Keys and shapes of those that had fewer files than the ones before them."""
        self._held: set[str] = set()
        """Keys of those with directories whose files are kept."""
        self._first = True

    def update(
        self,
        entries: Iterable[SeenEntry],
        names: Collection[str] | None,
        now: float,
        wall: float,
        *,
        behind: bool = False,
    ) -> list[Happened]:
        """Take what a look has found; gives what has happened since the last, oldest first.

        ``entries`` are at least those that have changed, others are no harm; ``names`` all that are there, or None
        where none has come or gone. ``behind`` says that a first look is not through yet: what it finds is
        only judged once it is. What was written before it is counted, but nothing is told of it.
        """
        first = self._first
        taken = {key for entry in entries if (key := self._take(entry, now, wall)) is not None}
        if first and behind:
            return []
        self._first = False
        happened: list[Happened] = []
        waiting = sorted((found for found in self._sets.values() if found.pending), key=lambda found: found.end)
        for found in waiting:
            self._note_holder(found)
        there = names if names is None or isinstance(names, (set, frozenset)) else set(names)
        for name in [name for name in self._key_of if there is not None and name not in there]:
            self._forget(name, happened)
        for key in sorted(taken & self._sets.keys()):
            if not self._sets[key].pending:
                self._refresh(self._sets[key], happened)
        for found in waiting:
            if found.entries:
                self._judge(found, now, happened)
        self._slim()
        self.writing = any(
            found.state == "writing" or self._has_live_temporary(found, now) for found in self._sets.values()
        )
        return [] if first else happened

    @property
    def interval_s(self) -> float | None:
        """Seconds between two checkpoints: given, or the median of the last; None while fewer than three are known."""
        if self._interval_s is not None:
            return self._interval_s
        if len(self._beats) < LEARN_FROM:
            return None
        gap = statistics.median(after - before for before, after in itertools.pairwise(self._beats))
        return gap if gap > 0 else None

    @property
    def interval_steps(self) -> float | None:
        """Steps between two checkpoints, by the median of the last; None while fewer than three tell their steps."""
        steps = sorted({past.step for past in self._past if past.step is not None})
        if len(steps) < LEARN_FROM:
            return None
        return statistics.median(after - before for before, after in itertools.pairwise(steps))

    @property
    def next_expected(self) -> float | None:
        """When the next one should be whole; in the past where it is late, None when the interval is not known."""
        interval = self.interval_s
        return self._beats[-1] + interval if self._beats and interval is not None else None

    @property
    def saved(self) -> tuple[float, ...]:
        """When the last ones were whole, in order; ranks that do not keep in step are of one."""
        return tuple(self._beats)

    # What is there

    def _take(self, entry: SeenEntry, now: float, wall: float) -> str | None:
        """Note one entry; gives the key of its checkpoint, None for what is none."""
        name = parse_name(entry.bare, entry.directory)
        if name is None:
            return None
        newest = max((file.mtime for file in entry.files), default=None)
        # what a first look finds has been as it is since it was written, as far as anybody can tell
        since = now if not self._first or newest is None else now - max(0.0, wall - newest)
        found = self._sets.get(name.key)
        if found is None:
            found = self._sets[name.key] = _Set(name.key, name, since, since, watched=not self._first)
        elif found.name.marker and not name.marker:
            found.name = name
        if self._key_of.setdefault(entry.name, name.key) != name.key:
            self._drop(entry.name)  # a directory has taken the place of a file
            self._key_of[entry.name] = name.key
        if entry.temporary:
            if found.temporary.get(entry.name) != entry:
                found.temporary[entry.name], found.temporary_changed = entry, since
                if not found.pending or not found.entries:
                    found.first_seen = min(found.first_seen, since) if found.pending else since
            found.inodes.add(entry.inode)
            return None
        before = found.entries.get(entry.name)
        if _is_written(found, before, entry):
            if entry.inode in found.inodes:
                found.renamed.add(entry.name)
            if not found.pending:
                found.pause = since - found.changed
                if not found.temporary and not found.renamed:
                    found.first_seen = since
                found.pending = True
            elif found.entries:
                found.pause = max(found.pause, since - found.changed)
            found.changed = max(found.changed, since) if found.entries else since
            found.told.clear()
        found.entries[entry.name] = _Entry(entry, name)
        if entry.directory:
            self._held.add(found.key)
        return found.key

    def _note_holder(self, found: _Set) -> None:
        if len(self._holders) > MOST_SHAPES:
            self._holders.clear()
        holder = (found.end, found.key, found.shapes)
        for told in found.shapes:
            if told not in self._holders or self._holders[told][0] <= holder[0]:
                self._holders[told] = holder

    def _forget(self, name: str, happened: list[Happened]) -> None:
        """The entry is gone: removed by who keeps the last few only, or renamed."""
        found = self._sets[self._key_of[name]]
        ours = name in found.entries and found.pending and self._is_ours(found) and found.has_data
        if ours and self._is_superseded(found) and not self._missing(found):
            self._complete(found, happened)  # its writer would not have gone on without
        self._drop(name)

    def _drop(self, name: str) -> None:
        """Forget an entry, and its checkpoint with the last of them."""
        found = self._sets[self._key_of.pop(name)]
        found.temporary.pop(name, None)
        found.entries.pop(name, None)
        found.renamed.discard(name)
        if not found.entries and not found.temporary:
            del self._sets[found.key]
            self._held.discard(found.key)
            if self.last is not None and self.last.key == found.key and self.last.state == "writing":
                self.last = self.last_complete

    def _slim(self) -> None:
        """Keep the files of the newest directories only in memory."""
        held = [key for key in self._held if key in self._sets and not self._sets[key].pending]
        if len(held) > HELD:
            for key in sorted(held, key=lambda key: self._sets[key].end)[:-HELD]:
                found = self._sets[key]
                found.entries = {name: entry._replace(slim=True) for name, entry in found.entries.items()}
                self._held.discard(key)

    # What it is worth

    def _is_ours(self, found: _Set) -> bool:
        """Whether this job has written it."""
        return self._start is None or found.end >= self._start

    def _has_live_temporary(self, found: _Set, now: float) -> bool:
        """Whether a file under a temporary name is being written."""
        if not found.temporary or now - found.temporary_changed > max(ABANDONED_S, PATIENCE * self._longest_s()):
            return False
        newest = max((file.mtime for entry in found.temporary.values() for file in entry.files), default=None)
        return self._start is None or newest is None or newest >= self._start

    def _judge(self, found: _Set, now: float, happened: list[Happened]) -> None:
        """Decide what a checkpoint that was written to is by now."""
        found.state = None
        if not self._is_ours(found):
            found.pending = False
            return
        if not found.has_data:
            return
        quiet = now - found.changed
        if self._is_other_name(found):
            found.pending = quiet < self._settle_s
            return
        missing = self._missing(found)
        partial = any(entry.is_partial for entry in found.entries.values()) and quiet < ABANDONED_S
        partial = partial or (self._has_live_temporary(found, now) and not self._is_renamed(found))
        if not missing and not partial and (quiet >= self._settle_s or self._is_sure(found)):
            if quiet >= ALIAS_S or not self._may_be_other_name(found):
                self._complete(found, happened)
            return
        if partial or quiet < max(self._settle_s, PATIENCE * self._longest_s()):
            found.state = "writing"
            if not self._may_be_other_name(found):
                self._show(found, "writing")
        else:
            found.state = "incomplete"
            shown = self._show(found, "incomplete", missing)
            if "incomplete" not in found.told and self.last is shown:
                found.told.add("incomplete")
                if not found.gaps:
                    self._short.append((found.key, found.shapes))
                happened.append(Happened("incomplete", shown))

    def _show(self, found: _Set, state: State, missing: Sequence[str] = ()) -> Checkpoint:
        """The checkpoint as it is now, which is the last one when none is newer."""
        files = found.files()
        size = sum(file.size for file in files)
        valid, reason = _validity(found)
        if valid is False and state == "complete":
            state = "invalid"
        if missing:
            reason = f"{missing[0]} is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
        shown = Checkpoint(
            key=found.key,
            name=common_name([entry.seen.bare for entry in found.entries.values() if not entry.name.marker]),
            state=state,
            step=found.name.step,
            epoch=found.name.epoch,
            files=len(files),
            bytes=size,
            end=found.end,
            seconds=_seconds(found, files),
            missing=tuple(missing[:MOST_NAMES]),
            missing_count=len(missing),
            valid=valid,
            reason=reason,
            odd_size=self._odd_size(size, found.key) if state != "writing" else None,
        )
        if self.last is None or shown.end >= self.last.end or self.last.key == shown.key:
            self.last = shown
        return shown

    def _odd_size(self, size: int, key: str) -> float | None:
        sizes = [past.bytes for past in self._past if past.key != key or key.startswith("fixed")]
        if len(sizes) < LEARN_FROM:
            return None
        usual = statistics.median(sizes)
        ratio = size / usual if usual else 1.0
        return ratio if not 1 / ODD_RATIO <= ratio <= ODD_RATIO else None

    def _longest_s(self) -> float:
        """How long the longest of the last checkpoints took."""
        return max((past.seconds for past in itertools.islice(reversed(self._past), LEARN_FROM)), default=0.0)

    # What belongs to it

    def _missing(self, found: _Set) -> tuple[str, ...]:
        """Files that should be there and are not, in order; none where not all could be looked at."""
        if not all(entry.seen.whole for entry in found.entries.values()):
            return ()
        gaps = found.gaps
        told = {shape(gap.partition("/")[2] if "/" in gap else gap, found.name) for gap in gaps}
        left = [
            usual
            for usual in self._usual(found.key) - found.shapes
            if usual.removeprefix("/") not in told and not self._is_elsewhere(usual, found)
        ]
        others = {key for key, shapes in self._short if shapes == found.shapes and key != found.key}
        if len(others) >= SHORT_BEFORE:
            left = []  # there are fewer ranks by now
        return (*gaps, *sorted(usual.removeprefix("/") for usual in left))

    def _usual(self, key: str) -> frozenset[str]:
        """Shapes that all of the last checkpoints had."""
        last = [past.shapes for past in self._past if past.key != key or key.startswith("fixed")][-LEARN_FROM:]
        return frozenset.intersection(*last) if last else frozenset()

    def _is_elsewhere(self, usual: str, found: _Set) -> bool:
        """Whether the rank of this file has last saved without the ranks that are here: they are not in step."""
        if usual.startswith("/") or usual not in self._holders:
            return False
        _, key, shapes = self._holders[usual]
        return key != found.key and not found.shapes <= shapes

    # When it is whole

    def _is_renamed(self, found: _Set) -> bool:
        return all(name in found.renamed for name in found.entries)

    def _is_sure(self, found: _Set) -> bool:
        """Whether it is whole without a wait: renamed into place, marked by its writer, or its writer has gone on."""
        if self._is_renamed(found) and (len(found.entries) == 1 or self._usual(found.key)):
            return True
        marks = [
            file.mtime
            for entry in found.entries.values()
            for file in entry.files
            if entry.name.marker or (entry.seen.directory and is_marker(file.path))
        ]
        if marks and all(file.mtime <= max(marks) + MARKED_S for file in found.files()):
            return True
        return self._is_superseded(found)

    def _is_superseded(self, found: _Set) -> bool:
        """Whether its writer has begun another one since: it is then done with this one."""
        if not found.name.versioned or not found.entries or found.temporary:
            return False
        end = found.end
        return any(
            other is not found
            and other.name.versioned
            and other.first_seen >= found.changed
            and min((file.mtime for file in other.files()), default=0.0) > end
            and found.shapes <= other.shapes
            for other in self._sets.values()
        )

    def _complete(self, found: _Set, happened: list[Happened]) -> None:
        """It is whole: count it, unless it was before and has only been added to."""
        before, files, shapes = found.done, found.files(), found.shapes
        goes_on = before is not None and _is_addition(before, files, shrunk=found.shrunk)
        if goes_on and PAUSES * found.pause <= MOST_SETTLE_S:
            self._settle_s = max(self._settle_s, PAUSES * found.pause)
        known = self._counted.get(found.key)
        shown = self._show(found, "complete")
        found.done, found.state, found.pending = shown, shown.state, False
        found.shrunk, found.pause, found.watched = False, 0.0, True
        found.inodes.clear()
        found.renamed.clear()
        if self.last_complete is None or shown.end >= self.last_complete.end or self.last_complete.key == shown.key:
            self.last_complete = shown
        if goes_on or known == shown.end:
            return
        self.total += 1
        self._counted.pop(found.key, None)
        self._counted[found.key] = shown.end
        while len(self._counted) > REMEMBERED:
            del self._counted[next(iter(self._counted))]
        self._past.append(_Past(found.key, shown.step, shown.bytes, shown.seconds or 0.0, shapes))
        self._beat(shown.end, shapes)
        happened.append(Happened("saved", shown))
        self._tell_damage(found, shown, happened)

    def _beat(self, end: float, shapes: frozenset[str]) -> None:
        """Note the moment; files of ranks that have not saved since the last one belong to that."""
        others = self._shapes_of_beat
        if self._beats and shapes and others and not shapes & others:
            self._beats[-1] = max(end, self._beats[-1])
            self._shapes_of_beat = others | shapes
        elif not self._beats or end > self._beats[-1]:
            self._beats.append(end)
            self._shapes_of_beat = shapes

    def _refresh(self, found: _Set, happened: list[Happened]) -> None:
        """Note what has been found out about one that is whole."""
        done = found.done
        if done is None or not found.entries:
            return
        valid, reason = _validity(found)
        if valid is None or (valid, reason) == (done.valid, done.reason):
            return
        found.done = now = done._replace(state="complete" if valid else "invalid", valid=valid, reason=reason)
        found.state = now.state
        if self.last_complete is not None and self.last_complete.key == found.key:
            self.last_complete = now
        if self.last is not None and self.last.key == found.key:
            self.last = now
        self._tell_damage(found, now, happened)

    @staticmethod
    def _tell_damage(found: _Set, shown: Checkpoint, happened: list[Happened]) -> None:
        if shown.valid is False and "damaged" not in found.told:
            found.told.add("damaged")
            happened.append(Happened("damaged", shown))

    # Other names of one

    def _may_be_other_name(self, found: _Set) -> bool:
        return found.name.alias and any(other.name.versioned and other.entries for other in self._sets.values())

    def _is_other_name(self, found: _Set) -> bool:
        """Whether another checkpoint is the same file, or was written at the same time as one called ``last``."""
        if found.name.versioned:
            return False
        inodes = {file.inode for file in found.files()}
        for other in self._sets.values():
            if other.name.versioned and other.entries:
                end = other.done.end if other.done is not None else other.end
                if found.name.alias and abs(end - found.end) < ALIAS_S:
                    return True
                if inodes & {file.inode for file in other.files()}:
                    return True
        return False


def _is_written(found: _Set, before: _Entry | None, entry: SeenEntry) -> bool:
    """Whether something of the entry has been written since it was last seen; what was removed does not count."""
    done = found.done
    if before is None or before.slim:
        return done is None or any(file.mtime > done.end for file in entry.files)
    known = {file.path: file for file in before.seen.files}
    written = False
    for file in entry.files:
        old = known.get(file.path)
        if old is None or (old.size, old.mtime, old.temporary) != (file.size, file.mtime, file.temporary):
            written = True
            if old is not None and (file.size < old.size or file.inode != old.inode):
                found.shrunk = True
    return written


def _is_addition(before: Checkpoint, files: Sequence[SeenFile], *, shrunk: bool) -> bool:
    """Whether one that was whole has only got more: most of it is as it was, or its one file has grown soon after."""
    newest = max(file.mtime for file in files)
    if newest <= before.end and not shrunk:
        return True
    if len(files) == 1:
        return not shrunk and files[0].size > before.bytes and newest - before.end < ALIAS_S
    return 2 * sum(file.size for file in files if file.mtime <= before.end) >= max(before.bytes, 1)


def _seconds(found: _Set, files: Sequence[SeenFile]) -> float | None:
    """How long it was written, by the times of its files or by what was seen, whichever is longer; None if unknown."""
    since = found.done.end if found.done is not None else None
    times = [file.mtime for file in files if since is None or file.mtime > since]
    spread = max(times) - min(times) if len(times) > 1 else 0.0
    seen = found.changed - found.first_seen if found.watched else 0.0
    return max(spread, seen) or None


def _validity(found: _Set) -> tuple[bool | None, str | None]:
    """Whether its files are whole, and what is wrong with one that is not."""
    for entry in found.entries.values():
        for bad in entry.seen.damaged:
            return False, f"{bad.path}: {bad.reason}"
    seen = [entry.seen for entry in found.entries.values()]
    decided = all(entry.looked_into >= len(entry.files) for entry in seen)
    return (True, None) if decided and any(entry.valid for entry in seen) else (None, None)
