"""Checkpoints from the files that are there: which are being written, whole, in parts or damaged, and their rhythm."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from exporter.derive.checkpoint_names import (
    Name,
    common_name,
    is_marker,
    is_sharded,
    is_text,
    is_weights,
    missing_numbers,
    missing_ranks,
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
MISSING_S = 60.0
"""But not for less than this: one shard may be gathered for a while before it is written."""
DAMAGED_S = 60.0
"""Nothing is damaged that has changed within this time: a writer may pause in the middle of a file."""
MOST_EARLY_S = 3600.0
"""By so much the clock of a file server may be behind where files were seen to change."""
ABANDONED_S = 600.0
"""A temporary file that has not changed for so long is what is left of a writer that has ended."""
ALIAS_S = 60.0
"""``last.ckpt`` that is written within this time of another checkpoint is the same one."""
MARKED_S = 1.0
"""A file may be younger than the marker of its checkpoint by this."""
LEARN_FROM = 3
"""Checkpoints from which the interval, the usual size and the usual shards are learned."""
SHORT_BEFORE = 2
"""After so many with the same ranks missing the next one is whole without them."""
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


class SeenIndex(Protocol):
    """An index of shards; paths from the checkpoint folder on."""

    @property
    def path(self) -> str: ...

    @property
    def shards(self) -> Sequence[str]:
        """What it names."""
        ...


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
    def indexes(self) -> Sequence[SeenIndex]: ...

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
    odd: str | None = None
    """What those before it had and it has not, which need not mean anything."""


class Happened(NamedTuple):
    """Something that is worth an event."""

    kind: Literal["saved", "damaged", "incomplete", "unusual"]
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


class _Facts(NamedTuple):
    """What the names of a set's files tell."""

    told: frozenset[object]
    """By which paths and indexes."""
    shapes: frozenset[str]
    gaps: tuple[str, ...]
    holes: tuple[str, ...]


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
    seen: bool = False
    """Whether something of it was seen to appear or change."""
    is_note: bool = False
    """Whether it is a text that tells no step, as ``checkpoint_log.txt``: no checkpoint beside others."""
    _facts: _Facts | None = None

    def files(self) -> list[SeenFile]:
        """All of its files under their final names."""
        return [file for entry in self.entries.values() for file in entry.files]

    @property
    def has_step(self) -> bool:
        """Whether its name tells a step or an epoch, rather than a date or nothing."""
        return self.name.step is not None or self.name.epoch is not None

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
        return self._read_names().shapes

    @property
    def gaps(self) -> tuple[str, ...]:
        """Paths of shards that numbers and indexes tell of and that are not there."""
        return self._read_names().gaps

    @property
    def holes(self) -> tuple[str, ...]:
        """Those of ranks between others that are not there."""
        return self._read_names().holes

    def _read_names(self) -> _Facts:
        files = self.files()
        indexes = [index for entry in self.entries.values() for index in entry.seen.indexes]
        told = frozenset(itertools.chain((file.path for file in files), ((one.path, one.shards) for one in indexes)))
        if self._facts is None or self._facts.told != told:
            there = {file.path for file in files}
            gaps = set(missing_numbers(there))
            for index in indexes:
                if _counts(index, there):
                    gaps.update(path for path in index.shards if path not in there)
            shapes = {
                shape for entry in self.entries.values() for file in entry.files if (shape := _shape(file, entry))
            }
            holes = set(missing_ranks(there)) - gaps
            self._facts = _Facts(told, frozenset(shapes), tuple(sorted(gaps)), tuple(sorted(holes)))
        return self._facts


def _counts(index: SeenIndex, there: Collection[str]) -> bool:
    """Whether an index is of what is there, rather than left over from other weights."""
    if any(path in there for path in index.shards):
        return True
    folder = index.path.rpartition("/")[0]
    return not any(path.rpartition("/")[0] == folder and is_weights(path) for path in there)


def _shape(file: SeenFile, entry: _Entry) -> str | None:
    """The shape of a shard or marker, beginning with a slash within a directory; None for other files."""
    if not entry.seen.directory:
        return shape(file.path, entry.name) if entry.name.marker or is_sharded(file.path) else None
    inner = file.path.partition("/")[2]
    return f"/{shape(inner, entry.name)}" if is_marker(inner) or is_sharded(inner) else None


class Checkpoints:
    """The checkpoints of one job, told of by looks at its checkpoint folder.

    ``now`` is monotonic and only differences of it count; ``wall`` is epoch seconds. Files that are older than
    ``start`` were left by an earlier job and are none of this one, unless they were seen to change. Those that are
    older by no more than ``early_s`` count as well, but nothing bad is said of them.
    """

    def __init__(self, start: float | None = None, interval_s: float | None = None, *, early_s: float = 0.0) -> None:
        self.total = 0
        """How many have been written; it never falls."""
        self.last: Checkpoint | None = None
        """The newest one, whole or not, as it was when it was last there,"""
        self.last_complete: Checkpoint | None = None
        """and the newest that was whole, damaged or not."""
        self.writing = False
        """Whether one is being written."""
        self._start, self._early_s = start, early_s
        self._interval_s = interval_s
        self._sets: dict[str, _Set] = {}
        self._key_of: dict[str, str] = {}
        self._past: deque[_Past] = deque(maxlen=KEPT)
        self._beats: deque[float] = deque(maxlen=KEPT)
        self._shapes_of_beat: frozenset[str] = frozenset()
        self._counted: dict[str, float] = {}
        self._settle_s = SETTLE_S
        self._ended = False
        """Whether nobody writes any more."""
        self._holders: dict[str, tuple[float, str, frozenset[str]]] = {}
        """End, key and shapes of the last checkpoint with a file of this shape."""
        self._short: deque[tuple[str, frozenset[str]]] = deque(maxlen=KEPT)
        """Keys and shapes of those that had fewer files than the ones before them."""
        self._held: set[str] = set()
        """Keys of those with directories whose files are kept."""
        self._older: dict[str, float] = {}
        """Ends of those that are none of this job, by their keys."""
        self._doubted: set[str] = set()
        """Keys of those that seem to be damaged and may still be written to."""
        self._real = False
        """Whether there has been anything besides texts that tell no step."""
        self._first = True
        self._now = 0.0

    def update(
        self,
        entries: Iterable[SeenEntry],
        names: Collection[str] | None,
        now: float,
        wall: float,
        *,
        behind: bool = False,
        ended: bool = False,
    ) -> list[Happened]:
        """Take what a look has found; gives what has happened since the last, oldest first.

        ``entries`` are at least those that have changed, others are no harm; ``names`` all that are there, or None
        where none has come or gone. ``behind`` says that not all names have been looked at yet: nothing is judged
        before they are. What was written before the first look is counted, but nothing is told of it. ``ended`` says
        that all workers have ended: what is there then is not waited for to settle.
        """
        first, self._now, self._ended = self._first, now, ended
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
        for key in sorted(self._doubted - taken):
            self._refresh(self._sets[key], happened)
        for found in waiting if not behind else ():
            if found.entries:
                self._judge(found, now, happened)
        self._slim()
        self.writing = any(
            found.state == "writing" or self._has_live_temporary(found, now)
            for found in self._sets.values()
            if not self._is_beside(found)
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

    def state(self) -> dict[str, Any]:
        """What another one may go on from, as JSON can hold it."""
        return {
            "total": self.total,
            "beats": list(self._beats),
            "counted": dict(self._counted),
            "real": self._real,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there, before the first update; raises ValueError for what ``state`` has never given."""
        total, beats, counted, real = (state.get(name) for name in ("total", "beats", "counted", "real"))
        if not isinstance(total, int) or isinstance(total, bool) or total < 0 or not isinstance(real, bool):
            raise ValueError("tells no number of checkpoints")
        if not isinstance(beats, list) or not all(map(_is_moment, beats)) or sorted(set(beats)) != beats:
            raise ValueError("tells no moments of checkpoints")
        if not isinstance(counted, dict) or not all(map(_is_moment, counted.values())):
            raise ValueError("tells no names of checkpoints")
        self.total, self._real = total, real
        self._beats.extend(beats)
        self._counted.update((str(key), float(end)) for key, end in list(counted.items())[-REMEMBERED:])

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
        if entry.files and not name.marker:
            found.is_note = (
                not found.has_step
                and all(is_text(file.path) for file in entry.files)
                and (not found.has_data or found.is_note)
            )
            if not found.is_note and not self._real:
                self._begin_real()
        if entry.temporary:
            if found.temporary.get(entry.name) != entry:
                found.seen = found.seen or not self._first
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
            if (
                not self._first
                and (before is None or not before.slim)
                and self._older.get(found.key, 0.0) < (newest or 0)
            ):
                found.seen = True
        found.entries[entry.name] = _Entry(entry, name)
        if entry.directory:
            self._held.add(found.key)
        return found.key

    def _begin_real(self) -> None:
        """There is more than texts that tell no step: those were no checkpoints."""
        self._real = True
        self._past.clear()
        self._beats.clear()
        self._counted.clear()
        self._doubted.clear()
        self._shapes_of_beat = frozenset()
        self.last = self.last_complete = None

    def _is_beside(self, found: _Set) -> bool:
        """Whether it is a text beside checkpoints."""
        return found.is_note and self._real

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
        ours = ours and not self._is_beside(found)
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
            self._doubted.discard(found.key)
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
        if self._start is None or found.end >= self._start - self._early_s:
            return True
        return found.seen and found.end >= self._start - MOST_EARLY_S

    def _may_be_older(self, found: _Set) -> bool:
        """Whether an earlier job may have written it."""
        return self._start is not None and found.end < self._start and not found.seen

    def _has_live_temporary(self, found: _Set, now: float) -> bool:
        """Whether a file under a temporary name is being written."""
        if (
            self._ended
            or not found.temporary
            or now - found.temporary_changed > max(ABANDONED_S, PATIENCE * self._longest_s())
        ):
            return False
        newest = max((file.mtime for entry in found.temporary.values() for file in entry.files), default=None)
        return self._start is None or newest is None or found.seen or newest >= self._start - self._early_s

    def _judge(self, found: _Set, now: float, happened: list[Happened]) -> None:
        """Decide what a checkpoint that was written to is by now."""
        found.state = None
        if not self._is_ours(found):
            found.pending = False
            self._older[found.key] = found.end
            while len(self._older) > REMEMBERED:
                del self._older[next(iter(self._older))]
            return
        if self._is_beside(found):
            found.pending = False
            return
        if not found.has_data:
            return
        quiet = math.inf if self._ended else now - found.changed
        if self._is_other_name(found):
            found.pending = quiet < self._settle_s
            return
        missing = self._missing(found)
        late = self._unusual(found) and quiet < max(self._settle_s, PATIENCE * self._longest_s())
        partial = any(entry.is_partial for entry in found.entries.values()) and quiet < ABANDONED_S
        partial = partial or (self._has_live_temporary(found, now) and not self._is_renamed(found))
        settled = quiet >= self._settle_s and not late
        if not missing and not partial and (settled or self._is_sure(found)):
            if quiet >= ALIAS_S or not self._may_be_other_name(found):
                self._complete(found, happened)
            return
        if partial or not missing or quiet < max(MISSING_S, self._settle_s, PATIENCE * self._longest_s()):
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
        valid, reason = self._validity(found)
        unusual = self._unusual(found) if state == "complete" else ()
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
            odd=_odd(unusual),
        )
        if self.last is None or shown.end >= self.last.end or self.last.key == shown.key:
            self.last = shown
        return shown

    def _odd_size(self, size: int, key: str) -> float | None:
        sizes = [past.bytes for past in self._alike(key)]
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
        """Files that should be there and are not, in order; none where not all could be looked at.

        Only what its own numbers and indexes tell counts: others of the job may have had more files, where it goes on
        with fewer ranks, or saves all in one file at its end.
        """
        if self._may_be_older(found) or not all(entry.seen.whole for entry in found.entries.values()):
            return ()
        return (*found.gaps, *self._holes(found))

    def _holes(self, found: _Set) -> tuple[str, ...]:
        if not found.holes or _is_marked(found):
            return ()
        others = {key for key, shapes in self._short if shapes == found.shapes}
        others.update(past.key for past in self._past if past.shapes == found.shapes)
        others.discard(found.key)
        if len(others) >= SHORT_BEFORE:
            return ()  # its writer leaves them out
        return tuple(
            hole for hole in found.holes if "/" in hole or not self._is_elsewhere(shape(hole, found.name), found)
        )

    def _unusual(self, found: _Set) -> tuple[str, ...]:
        """Shapes of shards and markers that all like it have had and that are neither here nor missing, in order."""
        if not all(entry.seen.whole for entry in found.entries.values()):
            return ()
        told = {shape(gap.partition("/")[2] if "/" in gap else gap, found.name) for gap in (*found.gaps, *found.holes)}
        left = [
            usual
            for usual in self._usual(found.key) - found.shapes
            if usual.removeprefix("/") not in told and not self._is_elsewhere(usual, found)
        ]
        return tuple(sorted(usual.removeprefix("/") for usual in left))

    def _usual(self, key: str) -> frozenset[str]:
        """Shapes that all of the last that are like it had."""
        last = [past.shapes for past in self._alike(key)]
        return frozenset.intersection(*last) if last else frozenset()

    def _alike(self, key: str) -> list[_Past]:
        """The last that may be compared with it: one that is called ``final`` need not be like those with a step."""
        if key.startswith("fixed"):
            return [past for past in self._past if past.key == key]
        return [past for past in self._past if past.key != key and not past.key.startswith("fixed")]

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
        several = len(found.entries) > 1
        if self._is_renamed(found) and (not several or (self._usual(found.key) and not self._unusual(found))):
            return True
        return _is_marked(found) or self._is_superseded(found)

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
        goes_on = before is not None and _is_addition(before, files, found)
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
        past = _Past(found.key, shown.step, shown.bytes, shown.seconds or 0.0, shapes)
        if known == shown.end and all(one.key != found.key for one in self._past):
            self._past.append(past)  # it was counted by another one that this one goes on from
        if known == shown.end:
            return
        self._counted.pop(found.key, None)
        self._counted[found.key] = shown.end
        while len(self._counted) > REMEMBERED:
            del self._counted[next(iter(self._counted))]
        if goes_on:
            return
        self.total += 1
        self._past.append(past)
        self._beat(shown.end, shapes)
        happened.append(Happened("saved", shown))
        if shown.odd is not None:
            happened.append(Happened("unusual", shown))
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
        valid, reason = self._validity(found)
        if valid is None or (valid, reason) == (done.valid, done.reason):
            return
        found.done = now = done._replace(state="complete" if valid else "invalid", valid=valid, reason=reason)
        found.state = now.state
        if self.last_complete is not None and self.last_complete.key == found.key:
            self.last_complete = now
        if self.last is not None and self.last.key == found.key:
            self.last = now
        self._tell_damage(found, now, happened)

    def _validity(self, found: _Set) -> tuple[bool | None, str | None]:
        """Whether its files are whole, and what is wrong with one that is not; None while that may still change."""
        self._doubted.discard(found.key)
        for entry in found.entries.values():
            for bad in entry.seen.damaged:
                if self._may_be_older(found):
                    return None, None
                quiet = self._now - found.changed
                if quiet >= max(DAMAGED_S, self._settle_s) or self._is_superseded(found):
                    return False, f"{bad.path}: {bad.reason}"
                self._doubted.add(found.key)
                return None, None
        seen = [entry.seen for entry in found.entries.values()]
        decided = all(entry.looked_into >= len(entry.files) for entry in seen)
        return (True, None) if decided and any(entry.valid for entry in seen) else (None, None)

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


def _is_marked(found: _Set) -> bool:
    """Whether its writer has left a marker after all of its files."""
    marks = [
        file.mtime
        for entry in found.entries.values()
        for file in entry.files
        if entry.name.marker or (entry.seen.directory and is_marker(file.path))
    ]
    return bool(marks) and all(file.mtime <= max(marks) + MARKED_S for file in found.files())


def _is_addition(before: Checkpoint, files: Sequence[SeenFile], found: _Set) -> bool:
    """Whether one that was whole has only got more: its files have grown, or most of it is as it was.

    One that is written over the last one grows as well, but not soon after.
    """
    newest, size = max(file.mtime for file in files), sum(file.size for file in files)
    if not found.shrunk:
        if newest <= before.end:
            return True
        if size > before.bytes and (found.name.versioned or found.pause < ALIAS_S):
            return True
    if len(files) == 1:
        return False
    return 2 * sum(file.size for file in files if file.mtime <= before.end) >= max(before.bytes, 1)


def _odd(unusual: Sequence[str]) -> str | None:
    """For a person."""
    if not unusual:
        return None
    if len(unusual) == 1:
        return f"there is no {unusual[0]}, unlike before"
    return f"{len(unusual)} files that the ones before had are not there: {unusual[0]}, ..."


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _seconds(found: _Set, files: Sequence[SeenFile]) -> float | None:
    """How long it was written, by the times of its files or by what was seen, whichever is longer; None if unknown."""
    since = found.done.end if found.done is not None else None
    times = [file.mtime for file in files if since is None or file.mtime > since]
    spread = max(times) - min(times) if len(times) > 1 else 0.0
    seen = found.changed - found.first_seen if found.watched else 0.0
    return max(spread, seen) or None
