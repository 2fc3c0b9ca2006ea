"""State of checkpoints, from their files: writing, complete, incomplete or damaged."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from exporter.files.checkpoints.entries import CheckpointEntry
from exporter.files.checkpoints.history import MOST_REMEMBERED, CheckpointHistory
from exporter.files.checkpoints.names import (
    CheckpointName,
    common_name,
    is_copy_of,
    is_text,
    name_shape,
    original_key,
    parse_name,
)
from exporter.files.checkpoints.sets import (
    ALIAS_S,
    Checkpoint,
    CheckpointSet,
    CheckpointSetEntry,
    State,
    has_model,
    is_alias_of_other,
    is_being_written,
    is_only_extended,
    is_superseded,
    may_be_alias_of_other,
    seconds_written,
)
from exporter.files.checkpoints.verdict import doubt, unusual_text

# files unchanged this long are finished; raised after a longer pause of the writer
SETTLE_S, MOST_SETTLE_S = 10.0, 300.0
SETTLE_PAUSES = 2.0  # wait this many times the longest pause seen
WAIT_RATIO = 3.0  # wait for missing files this many times as long as the longest recent checkpoint took
MISSING_S = 60.0  # but at least this long: a shard may be gathered for a while before it is written
# no damage is reported sooner after a change unless the writer has finished: it may pause in the middle of a file
DAMAGED_S = 60.0
MOST_CLOCK_SLACK_S = 3600.0  # a file server's clock may be this far behind, for files that we saw change
ABANDONED_S = 600.0  # a temporary file unchanged this long was left by a writer that ended
MOST_HELD = 8  # checkpoints whose files are kept in memory, the newest
MOST_NAMES = 20  # missing files named in a report


class CheckpointEvent(NamedTuple):
    """A checkpoint event to report."""

    kind: Literal["saved", "damaged", "incomplete", "unusual"]
    checkpoint: Checkpoint


class CheckpointTracker:
    """Checkpoints of one job, from successive readings of its checkpoint folder.

    Only differences of ``now`` (monotonic) matter; ``wall`` is in epoch seconds. Files older than ``start`` belong to
    an earlier job, unless they were seen to change. Files older by at most ``clock_slack_s`` count too, but are never
    reported as damaged or incomplete.
    """

    def __init__(
        self, start: float | None = None, interval_s: float | None = None, *, clock_slack_s: float = 0.0
    ) -> None:
        self.last: Checkpoint | None = None  # newest checkpoint in any state, as last seen
        self.last_complete: Checkpoint | None = None  # newest that was complete, damaged or not
        self.writing = False  # whether a checkpoint is being written
        self._start, self._clock_slack_s = start, clock_slack_s
        self.history = CheckpointHistory(interval_s)
        self._sets: dict[str, CheckpointSet] = {}
        self._keys_by_name: dict[str, str] = {}
        self._settle_s = SETTLE_S
        self._ended = False  # whether all writers have ended
        self._held_keys: set[str] = set()  # keys of checkpoints whose directories' files are in memory
        self._earlier_ends: dict[str, float] = {}  # end of each checkpoint of an earlier job, by key
        self._suspected: set[str] = set()  # keys of checkpoints that look damaged but may still be written
        self._is_first_update = True
        self._now = 0.0

    def update(
        self,
        entries: Iterable[CheckpointEntry],
        names: Collection[str] | None,
        now: float,
        wall: float,
        *,
        has_unread_names: bool = False,
        workers_ended: bool = False,
        last_worker_change: float | None = None,
    ) -> list[CheckpointEvent]:
        """Take one reading of the folder and return the events since the previous one, oldest first.

        ``entries`` must include all changed ones. ``names`` are all that exist, or None if none came or went. With
        ``has_unread_names``, some names are unread, so no state is decided. Checkpoints from before the first reading
        count but raise no event. With ``workers_ended``, all workers have ended, so files need not settle.
        ``last_worker_change`` is the last start or end of a worker, by the clock of the files: names with ranks are not
        compared across it.
        """
        self.history.last_worker_change = last_worker_change
        first, self._now, self._ended = self._is_first_update, now, workers_ended
        originals_first = sorted(entries, key=_may_be_copy)
        taken = {key for entry in originals_first if (key := self._add_entry(entry, now, wall)) is not None}
        if first and has_unread_names:
            return []
        self._is_first_update = False
        happened: list[CheckpointEvent] = []
        waiting = sorted((found for found in self._sets.values() if found.pending), key=lambda found: found.end)
        for found in waiting:
            self.history.record_latest(found)
        there = names if names is None or isinstance(names, (set, frozenset)) else set(names)
        for name in [name for name in self._keys_by_name if there is not None and name not in there]:
            if name in self._sets[self._keys_by_name[name]].temporary:
                taken.add(self._keys_by_name[name])  # it may have been a mark of its writer
            self._handle_removed(name, happened)
        for key in sorted(taken & self._sets.keys()):
            if not self._sets[key].pending:
                self._update_validity(self._sets[key], happened)
        for key in sorted(self._suspected - taken):
            self._update_validity(self._sets[key], happened)
        for found in waiting if not has_unread_names else ():
            if found.entries:
                self._update_state(found, now, happened)
        self._drop_files()
        self.writing = any(
            found.state == "writing" or self._has_live_temporary(found, now)
            for found in self._sets.values()
            if not self._is_ignored(found)
        )
        return [] if first else happened

    # Entries

    @property
    def keys(self) -> Mapping[str, str]:
        """The key of the checkpoint of each entry, by the entry's name."""
        return self._keys_by_name

    def _add_entry(self, entry: CheckpointEntry, now: float, wall: float) -> str | None:
        """Record one entry; return the key of its checkpoint, or None if it belongs to none."""
        name = self._parse_name(entry)
        if name is None:
            return None
        newest = max((file.mtime for file in entry.files), default=None)
        # assume that files in the first reading are unchanged since their mtime
        since = now if not self._is_first_update or newest is None else now - max(0.0, wall - newest)
        found = self._sets.get(name.key)
        if found is None:
            found = self._sets[name.key] = CheckpointSet(
                name.key, name, since, since, was_watched=not self._is_first_update
            )
        elif found.name.marker and not name.marker:
            found.name = name
        if self._keys_by_name.setdefault(entry.name, name.key) != name.key:
            self._drop(entry.name)  # a directory replaced a file
            self._keys_by_name[entry.name] = name.key
        if entry.files and not name.marker:
            found.is_text_only = (
                not found.has_step
                and all(is_text(file.path) for file in entry.files)
                and (not found.has_data or found.is_text_only)
            )
            if not found.is_text_only and not self.history.has_real_checkpoints:
                self._discard_text_files()
        if entry.temporary:
            if found.temporary.get(entry.name) != entry:
                found.was_seen_changing = found.was_seen_changing or not self._is_first_update
                found.temporary[entry.name], found.temporary_changed_at = entry, since
                if not found.pending or not found.entries:
                    found.first_seen = min(found.first_seen, since) if found.pending else since
            found.temporary_inodes.add(entry.inode)
            return None
        before = found.entries.get(entry.name)
        if is_being_written(found, before, entry):
            if entry.inode in found.temporary_inodes:
                found.renamed.add(entry.name)
            if not found.pending:
                found.pause_s = since - found.changed_at
                if not found.temporary and not found.renamed:
                    found.first_seen = since
                found.pending = True
            elif found.entries:
                found.pause_s = max(found.pause_s, since - found.changed_at)
            found.changed_at = max(found.changed_at, since) if found.entries else since
            found.reported.clear()
            found.is_finished = False
            if (
                not self._is_first_update
                and (before is None or not before.has_dropped_files)
                and self._earlier_ends.get(found.key, 0.0) < (newest or 0)
            ):
                found.was_seen_changing = True
        found.entries[entry.name] = CheckpointSetEntry(entry, name)
        if entry.is_directory:
            self._held_keys.add(found.key)
        if not original_key(name.key) and _may_be_copy(entry):
            found.copies.add(entry.name)
        elif found.copies and has_model(entry):
            self._separate_copies(found, entry, now, wall)
        return found.key

    def _separate_copies(self, found: CheckpointSet, original: CheckpointEntry, now: float, wall: float) -> None:
        """Take copies that were written before their original out of its checkpoint."""
        copies = [
            found.entries[name].view
            for name in found.copies
            if is_copy_of(found.entries[name].view.bare, original.bare)
        ]
        for copy in copies:
            self._drop(copy.name)
            self._add_entry(copy, now, wall)
        if copies:
            found.pause_s = 0.0  # the time between two writers is no pause of one
            found.replaces_copy = found.last_complete is not None

    def _parse_name(self, entry: CheckpointEntry) -> CheckpointName | None:
        """Parse the name of an entry. What may be a copy belongs to the checkpoint, unless its original has a model."""
        name = parse_name(entry.bare, entry.is_directory)
        original = original_key(name.key) if name is not None else ""
        if name is None or not original or self._keys_by_name.get(entry.name) == name.key:
            return name
        others = self._sets[original].entries.values() if original in self._sets else ()
        if any(is_copy_of(entry.bare, other.view.bare) and has_model(other.view) for other in others):
            return name
        return name._replace(key=original)

    def _discard_text_files(self) -> None:
        """Discard notes counted so far: the first real checkpoint shows that they were none."""
        self.history.discard_text_files()
        self._suspected.clear()
        self.last = self.last_complete = None

    def _is_ignored(self, found: CheckpointSet) -> bool:
        """Whether it is a text beside real checkpoints."""
        return found.is_text_only and self.history.has_real_checkpoints

    def _handle_removed(self, name: str, events: list[CheckpointEvent]) -> None:
        """Handle an entry that is gone: removed to keep only the last few, or renamed."""
        found = self._sets[self._keys_by_name[name]]
        ours = name in found.entries and found.pending and self._is_ours(found) and found.has_data
        ours = ours and not self._is_ignored(found)
        if ours and is_superseded(found, self._sets.values()) and not self._missing_files(found):
            self._mark_complete(found, events)  # its writer starts the next only after this one
        self._drop(name)

    def _drop(self, name: str) -> None:
        """Forget an entry, and its checkpoint with its last entry."""
        found = self._sets[self._keys_by_name.pop(name)]
        found.temporary.pop(name, None)
        found.entries.pop(name, None)
        found.renamed.discard(name)
        found.copies.discard(name)
        if not found.entries and not found.temporary:
            del self._sets[found.key]
            self._held_keys.discard(found.key)
            self._suspected.discard(found.key)
            if self.last is not None and self.last.key == found.key and self.last.state == "writing":
                self.last = self.last_complete

    def _drop_files(self) -> None:
        """Keep only the files of the newest directories in memory."""
        held = [key for key in self._held_keys if key in self._sets and not self._sets[key].pending]
        if len(held) > MOST_HELD:
            for key in sorted(held, key=lambda key: self._sets[key].end)[:-MOST_HELD]:
                found = self._sets[key]
                found.entries = {name: entry._replace(has_dropped_files=True) for name, entry in found.entries.items()}
                self._held_keys.discard(key)

    # State

    def _is_ours(self, found: CheckpointSet) -> bool:
        """Whether this job wrote it."""
        if self._start is None or found.end >= self._start - self._clock_slack_s:
            return True
        return found.was_seen_changing and found.end >= self._start - MOST_CLOCK_SLACK_S

    def _may_be_older(self, found: CheckpointSet) -> bool:
        """Whether an earlier job may have written it."""
        return self._start is not None and found.end < self._start and not found.was_seen_changing

    def _began_earlier(self, found: CheckpointSet) -> bool:
        """Whether an earlier job may have written some of it."""
        first = min((file.mtime for file in found.files()), default=math.inf)
        return self._start is not None and first < self._start and not found.was_seen_changing

    def _has_live_temporary(self, found: CheckpointSet, now: float) -> bool:
        """Whether a file under a temporary name is being written."""
        if (
            self._ended
            or not found.temporary
            or now - found.temporary_changed_at > max(ABANDONED_S, WAIT_RATIO * self.history.longest_write_s)
        ):
            return False
        newest = max((file.mtime for entry in found.temporary.values() for file in entry.files), default=None)
        return (
            self._start is None
            or newest is None
            or found.was_seen_changing
            or newest >= self._start - self._clock_slack_s
        )

    def _update_state(self, found: CheckpointSet, now: float, events: list[CheckpointEvent]) -> None:
        """Update the state of a checkpoint written since its last check."""
        found.state = None
        if not self._is_ours(found):
            found.pending = False
            self._earlier_ends[found.key] = found.end
            while len(self._earlier_ends) > MOST_REMEMBERED:
                del self._earlier_ends[next(iter(self._earlier_ends))]
            return
        if self._is_ignored(found):
            found.pending = False
            return
        if not found.has_data:
            return
        quiet = math.inf if self._ended else now - found.changed_at
        if is_alias_of_other(found, self._sets.values()):
            found.pending = quiet < self._settle_s
            return
        missing = self._missing_files(found)
        late = self._unusual_shapes(found) and quiet < max(self._settle_s, WAIT_RATIO * self.history.longest_write_s)
        partial = any(entry.is_partial for entry in found.entries.values()) and quiet < ABANDONED_S
        partial = partial or (self._has_live_temporary(found, now) and not found.is_renamed)
        settled = quiet >= self._settle_s and not late
        is_lost = any(entry.view.is_closed for entry in found.entries.values())
        if not missing and not partial and (settled or is_lost or self._is_surely_complete(found)):
            if quiet >= ALIAS_S or not may_be_alias_of_other(found, self._sets.values()):
                self._mark_complete(found, events)
            return
        if partial or not missing or quiet < max(MISSING_S, self._settle_s, WAIT_RATIO * self.history.longest_write_s):
            found.state = "writing"
            if not may_be_alias_of_other(found, self._sets.values()):
                self._publish(found, "writing")
        else:
            found.state = "incomplete"
            shown = self._publish(found, "incomplete", missing)
            if "incomplete" not in found.reported and self.last is shown:
                found.reported.add("incomplete")
                if not found.shard_gaps:
                    self.history.record_missing_ranks(found.key, found.shapes)
                events.append(CheckpointEvent("incomplete", shown))

    def _publish(self, found: CheckpointSet, state: State, missing: Sequence[str] = ()) -> Checkpoint:
        """Return the checkpoint as it is now, and make it the last one if none is newer."""
        files = found.files()
        size = sum(file.size for file in files)
        valid, reason = self._validity(found) if state == "complete" else (None, None)
        unusual = self._unusual_shapes(found) if state == "complete" else ()
        if valid is False:
            state = "invalid"
        if missing:
            reason = f"{missing[0]} is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
        shown = Checkpoint(
            key=found.key,
            name=common_name([entry.view.bare for entry in found.entries.values() if not entry.name.marker]),
            state=state,
            step=found.name.step,
            epoch=found.name.epoch,
            files=len(files),
            bytes=size,
            end=found.end,
            seconds=seconds_written(found, files),
            missing=tuple(missing[:MOST_NAMES]),
            missing_count=len(missing),
            valid=valid,
            reason=reason,
            odd_size=self.history.odd_size(size, found.key, found.shapes) if state != "writing" else None,
            odd=unusual_text(unusual),
            saved=found.saved,
        )
        if self.last is None or shown.saved >= self.last.saved or self.last.key == shown.key:
            self.last = shown
        return shown

    # Missing files

    def _missing_files(self, found: CheckpointSet) -> tuple[str, ...]:
        """Expected files that are missing, in order; empty if not all files could be read.

        Only its own numbers and indexes count: other checkpoints of the job may have had more files, for example before
        a restart with fewer ranks, or before a final save into a single file.
        """
        if self._began_earlier(found) or not all(entry.view.is_fully_read for entry in found.entries.values()):
            return ()
        return tuple(dict.fromkeys((*found.shard_gaps, *self._rank_gaps(found), *self._missing_first_ranks(found))))

    def _missing_first_ranks(self, found: CheckpointSet) -> Iterator[str]:
        """Yield rank 0 wherever this checkpoint has only others and all similar ones had it too."""
        for path in found.first_ranks:
            folder, slash, inner = path.partition("/")
            shape = slash + name_shape(inner if slash else folder, found.name)
            if shape in self.history.usual_shapes(found.key) and not self.history.is_saved_separately(shape, found):
                yield path

    def _rank_gaps(self, found: CheckpointSet) -> tuple[str, ...]:
        if not found.rank_gaps or found.is_marked or self.history.omits_on_purpose(found.key, found.shapes):
            return ()
        return tuple(
            hole
            for hole in found.rank_gaps
            if "/" in hole or not self.history.is_saved_separately(name_shape(hole, found.name), found)
        )

    def _unusual_shapes(self, found: CheckpointSet) -> tuple[str, ...]:
        """Sorted shapes of shards and markers that all similar checkpoints had but this one has not.

        Files already known to be missing are left out.
        """
        if not all(entry.view.is_fully_read for entry in found.entries.values()):
            return ()
        gap_shapes = {
            name_shape(gap.partition("/")[2] if "/" in gap else gap, found.name)
            for gap in (*found.shard_gaps, *found.rank_gaps)
        }
        left = [
            usual
            for usual in self.history.usual_shapes(found.key) - found.shapes
            if usual.removeprefix("/") not in gap_shapes and not self.history.is_saved_separately(usual, found)
        ]
        return tuple(sorted(usual.removeprefix("/") for usual in left))

    # Completion

    def _is_surely_complete(self, found: CheckpointSet) -> bool:
        """Whether it is complete without waiting: renamed into place, marked, or followed by the next."""
        several = len(found.entries) > 1
        if found.is_renamed and (
            not several or (self.history.usual_shapes(found.key) and not self._unusual_shapes(found))
        ):
            return True
        return found.is_marked or is_superseded(found, self._sets.values())

    def _mark_complete(self, found: CheckpointSet, events: list[CheckpointEvent]) -> None:
        """Mark it complete and count it, unless it only grew after it was counted."""
        before, files, shapes = found.last_complete, found.files(), found.shapes
        goes_on = before is not None and is_only_extended(before, files, found)
        if goes_on and not found.replaces_copy and SETTLE_PAUSES * found.pause_s <= MOST_SETTLE_S:
            self._settle_s = max(self._settle_s, SETTLE_PAUSES * found.pause_s)
        found.is_finished = self._is_surely_complete(found)
        shown = self._publish(found, "complete")
        found.last_complete, found.state, found.pending = shown, shown.state, False
        found.shrunk, found.pause_s, found.was_watched = False, 0.0, True
        found.temporary_inodes.clear()
        found.renamed.clear()
        if self.last_complete is None or shown.saved >= self.last_complete.saved or self.last_complete.key == shown.key:
            self.last_complete = shown
        replaces_copy, found.replaces_copy = found.replaces_copy, False
        if not self.history.count(shown, shapes, is_addition=goes_on, replaces_copy=replaces_copy, parts=found.parts):
            return
        events.append(CheckpointEvent("saved", shown))
        if shown.odd is not None:
            events.append(CheckpointEvent("unusual", shown))
        self._report_damage(found, shown, events)

    def _update_validity(self, found: CheckpointSet, events: list[CheckpointEvent]) -> None:
        """Update a complete checkpoint with new results of file checks."""
        done = found.last_complete
        if done is None or not found.entries:
            return
        valid, reason = self._validity(found)
        if (valid, reason) in ((None, None), (done.valid, done.reason)):
            return
        state: State = "complete" if valid is not False else "invalid"
        found.last_complete = now = done._replace(state=state, valid=valid, reason=reason)
        found.state = now.state
        if self.last_complete is not None and self.last_complete.key == found.key:
            self.last_complete = now
        if self.last is not None and self.last.key == found.key:
            self.last = now
        self._report_damage(found, now, events)

    def _validity(self, found: CheckpointSet) -> tuple[bool | None, str | None]:
        """Whether the checkpoint is whole, and why not or why unknown; None without a reason may still change."""
        self._suspected.discard(found.key)
        seen = [entry.view for entry in found.entries.values()]
        for bad in (bad for entry in seen for bad in entry.damaged):
            if self._may_be_older(found):
                return None, None
            quiet = math.inf if self._ended else self._now - found.changed_at
            is_final = found.is_finished or any(entry.is_closed for entry in seen)
            if is_final or quiet >= max(DAMAGED_S, self._settle_s) or is_superseded(found, self._sets.values()):
                return False, f"{bad.file}: {bad.reason}"
            self._suspected.add(found.key)
            return None, None
        if any(entry.checked < len(entry.files) for entry in seen):
            return None, None
        unproven = doubt(found, self.history, self._unusual_shapes(found), began_earlier=self._began_earlier(found))
        return (True, None) if unproven is None else (None, unproven)

    @staticmethod
    def _report_damage(found: CheckpointSet, checkpoint: Checkpoint, events: list[CheckpointEvent]) -> None:
        if checkpoint.valid is False and "damaged" not in found.reported:
            found.reported.add("damaged")
            events.append(CheckpointEvent("damaged", checkpoint))


def _may_be_copy(entry: CheckpointEntry) -> bool:
    name = parse_name(entry.bare, entry.is_directory)
    return name is not None and original_key(name.key) != ""
