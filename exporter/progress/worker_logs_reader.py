"""Reads the logs of one worker: from bytes to progress, ETA, values and errors."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import NamedTuple

from exporter.collecting.published import WorkerProgress
from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import ESSENTIAL, NORMAL, Manifest, Task
from exporter.contract.records import NOTHING, from_json
from exporter.contract.status import EtaEstimate
from exporter.logs.errors.lines import plain_line
from exporter.logs.lexicon import GENERIC, Lexicon
from exporter.logs.packs import looks_like_progress
from exporter.logs.records import record_ends
from exporter.logs.search.engine import SMALL_BYTES, FileSearch
from exporter.logs.search.findings import ActivityMark, LogFindings, LogPosition, LogValue
from exporter.logs.tail_reader import LogTail, TailPosition
from exporter.logs.timestamps import TimestampReader, zone_offset
from exporter.progress import progress_file
from exporter.progress.eta.estimator import EtaEstimator
from exporter.progress.eta.prior import RunPrior
from exporter.progress.phases import WorkerActivities
from exporter.progress.resumes import EarlierProgress
from exporter.progress.track import ProgressTrack, TrackState, items_of_rank
from exporter.progress.values import ValuesByRank, WorkerValues

UNMATCHED_AFTER_S = 120.0  # a log without any match this long after its first text fits no pattern
SAMPLE_BYTES = 16 << 10  # kept of such a log, to describe it
DESCRIBED_S = 60.0  # a description of such a log lasts for this time: to compare the log with all packs takes 4 ms
# The pack is chosen with each of the first pieces, then after this much text or time.
EARLY_PIECES, UNSURE_BYTES, UNSURE_S = 8, 64 << 10, 60.0
POLL_BYTES = 256 << 20  # read from one file at most in one poll
LATE_S = 600.0  # a new line with an older time is from another clock or time zone
FOREIGN_S = 86400.0  # a stamp older than this, when its line is first read, does not date a line whose run is unknown
STANDING_S, STANDING_READS = 2.0, 2  # reads, this far apart, with the newest stamp of the one before: it is not a clock
# Clocks change for summer time by this, or twice this; other differences are late lines.
SHIFT_S, SHIFT_SLACK_S = 1800.0, 60.0
# Values of an LLM server that show when its last batch is draining.
RUNNING, WAITING = "running_requests", "queued_requests"
# Values of an LLM server that show its throughput.
OUTPUT_TOKENS, INPUT_TOKENS = "generation_tokens_per_second", "input_tokens_per_second"
TOKENS_FRESH_S = 30.0  # older values are not current: an engine without requests writes none
STATE_VERSION = 7  # rises with each change of `WorkerLogsState`, or of a value in it
FLUSH_S = 60.0  # by which the time of a write on a file server may be later: that of its flush
RESUMED_S = 2.0  # between the end of a stop, such as `scontrol resume`, and the first read after it
LOG, PROGRESS_FILE = 0, 1  # order of sources: a progress file overrides the logs


class WorkerLogFacts(NamedTuple):
    task: Task
    read_at: float
    pack: str
    unit: str | None = None
    pattern: str | None = None
    position: float | None = None
    expected: float | None = None
    processed: float | None = None
    first: float | None = None  # first position of a run that started at 0
    epoch: int | None = None
    last_rise: float | None = None
    rate: float | None = None
    average_rate: float | None = None
    eta: EtaEstimate | None = None
    confidence: str | None = None
    stalled: bool | None = None
    stalled_at_end: bool | None = None
    slowdown: float | None = None
    phase: str | None = None  # current activity instead of work, from the log
    checkpoints: tuple[float, ...] = ()  # start times of its last checkpoints, from the log
    checkpoint_seconds: tuple[float, ...] = ()  # durations of those checkpoints
    values: tuple[tuple[str, float, float], ...] = ()  # (name, value, time) of each fresh value
    last_values: Mapping[str, float] = NOTHING  # the last one of each name, however old
    best_values: Mapping[str, float] = NOTHING
    output_tokens_rate: float | None = None  # tokens per second that an LLM server generates; None if not logged
    input_tokens_rate: float | None = None  # tokens per second that it reads; None if not logged
    errors: tuple[tuple[str, str, int], ...] = ()  # (pattern, severity, records) of each error pattern
    bytes_read: int = 0
    lines: int | None = 0  # None if no page shows them
    lag_bytes: int = 0
    problems: tuple[str, ...] = ()  # unreadable files, with the error
    prior: RunPrior | None = None  # prior for a later run of the same job
    unmatched: str | None = None  # description of its log, if it has had no match for some minutes
    unmatched_at: float | None = None  # start of the time without a match
    first_unmatched: str | None = None  # that description when it was first made
    ended: bool = False


class SavedSource(NamedTuple):
    """One file of a worker, for a later sidecar."""

    path: str
    order: int
    lasting: bool
    zone_s: float | None
    tail: TailPosition


@dataclass
class WorkerLogsState:
    """What a later sidecar needs to continue."""

    version: int
    restart: int
    pack: str
    track: TrackState
    estimator: EtaEstimator
    activities: WorkerActivities
    seen_changes: int
    values: dict[str, ValuesByRank]
    best_values: dict[str, float]
    errors: dict[str, int]
    lines: int
    closed_bytes: int
    first_text_time: float | None
    first_description: str | None
    reported_phase: str | None
    invalid_lines: int
    sources: list[SavedSource]


@dataclass
class _LogSource:
    """One file of a worker."""

    tail: LogTail
    order: int = LOG
    stamps: TimestampReader = field(default_factory=TimestampReader)
    zone_s: float | None = None  # added to its times; None while unknown
    live: bool = False  # whether it was read to its end before, so that new lines were just written
    lasting: bool = False  # whether it belongs to all runs of the worker, not to one
    is_clock: bool = True  # whether its stamps are times at which lines were written
    newest_stamp: float | None = None
    newest_stamp_at: float = 0.0  # when that was read
    same_stamps: int = 0  # reads in a row that have not changed it
    ahead: list[LogPosition] = field(default_factory=list)  # from its unfinished record, which will be read again

    def stands_still(self, newest: float, now: float) -> bool:
        """Whether the newest stamp of new lines is the same at several reads, such as the start of the program."""
        if newest != self.newest_stamp:
            self.newest_stamp, self.same_stamps = newest, 0
        elif now - self.newest_stamp_at < STANDING_S:
            return False
        else:
            self.same_stamps += 1
        self.newest_stamp_at = now
        return self.same_stamps >= STANDING_READS


class WorkerLogs:
    """Facts from one worker's files, over all its runs on this node."""

    def __init__(
        self,
        task: Task,
        manifest: Manifest,
        lexicon: Lexicon,
        prior: RunPrior | None = None,
        earlier: EarlierProgress | None = None,
    ) -> None:
        """``earlier`` is the worker's progress in an earlier attempt of the job."""
        self.task = task
        self.restart = -1  # the current run; -1 before the first
        self.activities = WorkerActivities()
        self._sources: dict[str, _LogSource] = {}
        self._manifest = manifest
        self._lexicon = lexicon
        self._earlier = earlier
        self._pack_detector = lexicon.new_detector(task.role)
        self._undetected_text = bytearray()  # text that has not been used to choose the pack
        self._detected_pieces, self._detected_at = 0, 0.0
        self._pack = GENERIC if self._pack_detector is not None else lexicon.pack
        self.track = self._new_track(None)
        self._prior = prior
        self._estimator = self._new_estimator()
        self._seen_changes = -1  # track changes that the estimator has seen; it restarts after another one
        self._values = WorkerValues()
        self._errors = dict.fromkeys(lexicon.severities, 0)
        self._reported_errors: tuple[tuple[str, str, int], ...] | None = None  # cached for facts(); None after a change
        self._counts_lines = manifest.detail not in (ESSENTIAL, NORMAL)  # counting takes longer than the search
        self._lines = 0
        self._closed_bytes = 0
        self._first_text_time: float | None = None
        self._sample = b""
        self._description: tuple[float, bytes, str] | None = None  # when, of which sample, and what it says
        self._first_description: str | None = None
        self.end: float | None = None  # of the latest run; None while it runs
        self._busy: bool | None = None  # whether its GPUs worked when it was last seen running
        self._reported_phase: str | None = None  # last activity in the progress file
        self._invalid_lines = 0  # invalid lines of the progress file

    @cached_property
    def _item_share(self) -> int | None:
        """Items of this worker, according to the job file."""
        tasks = [(task.role, task.worker, task.rank, task.critical) for task in self._manifest.tasks]
        return items_of_rank(self._manifest.total_items, tasks, self.task.rank)

    def _new_track(self, state: TrackState | None) -> ProgressTrack:
        preference, bases = self._lexicon.preferred_positions(self._pack), self._lexicon.epoch_bases(self._pack)
        bases[progress_file.PATTERN] = 0  # from 0, like loops that print them
        return ProgressTrack(
            preference,
            epoch_bases=bases,
            epochs=self._manifest.total_epochs,
            steps=self._manifest.total_steps,
            share=self._item_share,
            earlier=self._earlier,
            state=state,
        )

    def _new_estimator(self, first_wait_s: float = 0.0) -> EtaEstimator:
        """Create an estimator, with the prior if that has the same unit."""
        fits = self._prior is not None and self._prior.unit == self.track.unit
        return EtaEstimator(self._prior if fits else None, first_wait_s)

    # -- files ------------------------------------------------------------------------------------

    def begin_run(self, restart: int) -> None:
        """Start a run: close the files of the previous one, and count its positions from 0."""
        for path, source in list(self._sources.items()):
            if not source.lasting:
                self._remove_file(path)
        self._reported_phase = None
        if self.restart >= 0:
            self.track.begin_run()
            self.activities.begin_run()
        self.restart, self.end, self._busy = restart, None, None

    def begin_at(self, start: float | None) -> None:
        """Take the time at which the current run began, None if unknown."""
        self.track.began = start
        if start is not None and self.restart > 0:
            self._estimator.begin_run(start)

    def set_wall_clock(self, step: float) -> None:
        """Take a step of the node's clock: what happened keeps its age."""
        track = self.track
        track.last_rise = None if track.last_rise is None else track.last_rise + step
        track.began = None if track.began is None else track.began + step
        self.activities.set_wall_clock(step)
        self._estimator.set_wall_clock(step)

    def add_file(self, path: str, order: int = LOG, *, lasting: bool = False) -> LogTail | None:
        """Start to read a file; None if it is read already."""
        if path in self._sources:
            return None
        self._sources[path] = _LogSource(LogTail(path), order, lasting=lasting)
        return self._sources[path].tail

    def _remove_file(self, path: str) -> None:
        source = self._sources.pop(path)
        self._closed_bytes += source.tail.bytes_read
        source.tail.close()

    @property
    def has_unread(self) -> bool:
        """Whether the last poll left part of this run's files unread."""
        tails = (source.tail for source in self._sources.values() if not source.lasting)
        return any(tail.lag_bytes > 0 and tail.problem is None for tail in tails)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, of all runs."""
        return self._closed_bytes + sum(source.tail.bytes_read for source in self._sources.values())

    def has_worked_since(self, stop: float, now: float) -> bool:
        """Whether its files show that it worked on while the sidecar stood still, since its last read.

        A write right before now may have followed the end of a stop of both. Then it is little text.
        """
        last, unread_bytes = -math.inf, 0
        for path, source in self._sources.items():
            try:
                file = os.stat(path)
            except OSError:
                continue
            if file.st_mtime > stop + FLUSH_S and file.st_mtime != source.tail.mtime:
                last = max(last, file.st_mtime)
                unread_bytes += max(0, file.st_size - source.tail.size)
        began = stop if self._first_text_time is None else self._first_text_time
        usual_bytes = self.bytes_read * (now - stop) / max(1.0, stop - began)
        return last > -math.inf and (last < now - RESUMED_S or unread_bytes > usual_bytes / 2)

    @property
    def ended(self) -> bool:
        """Whether the latest run has ended."""
        return self.end is not None

    # -- reading ----------------------------------------------------------------------------------

    def poll(self, now: float, *, end: float | None, should_stop: Callable[[], bool]) -> None:
        """Read new text; stop when ``should_stop`` is true, and continue at the next poll.

        ``end``: when the run ended, so that a last line without a newline counts; None while it runs.
        """
        self.end = end
        for path, source in list(self._sources.items()):
            self._read(source, now, should_stop)
            if source.lasting and source.tail.is_gone:
                self._remove_file(path)
            if self.ended and not source.tail.lag_bytes and (rest := source.tail.pop_unfinished_record()):
                offset = source.tail.position().offset - len(rest)
                self._apply(source, self._search_text(source, rest, offset), now)
                self._lines += 1
        if self.ended and not self.has_unread:
            self.track.decide_starts()

    def _read(self, source: _LogSource, now: float, should_stop: Callable[[], bool]) -> None:
        """Read new text of one file, across rotations."""
        left, tail = POLL_BYTES, source.tail
        while left > 0:
            before, scan = tail.bytes_read, None
            for piece in tail.read_chunks(left, should_stop):
                source.stamps.reference = now if source.live else tail.mtime or now
                text = piece.buffer
                if self._counts_lines:
                    self._lines += record_ends(text, piece.end)[1]
                self.track.skips_positions = tail.bytes_read - before > SMALL_BYTES
                if source.order == PROGRESS_FILE:
                    self._apply(source, self._parse_progress(bytes(memoryview(text)[: piece.end]), piece.offset), now)
                    continue
                self._keep_sample(text, piece.end, now)
                scan = self._current_search(text, piece.end, scan, source, now)
                scan.feed(text, piece.end, piece.offset)
            if scan is not None:
                self.track.skips_positions = tail.bytes_read - before > SMALL_BYTES
                state = b"" if tail.lag_bytes else tail.read_bar_state()
                if state and self.track.pattern is None:  # it may be the first record that shows the pack
                    scan = self._current_search(bytearray(state), len(state), scan, source, now)
                ahead = self._search_text(source, state, tail.position().offset).positions if state else []
                self._apply(source, scan.finish(tail.reread), now, ahead)
            self.track.skips_positions = False
            left -= tail.bytes_read - before
            if not tail.has_more or should_stop():
                break
        source.live = source.live or not tail.lag_bytes

    def _current_search(
        self, text: bytearray, end: int, scan: FileSearch | None, source: _LogSource, now: float
    ) -> FileSearch:
        """The scan for the next piece, of another pack if the lines now match that."""
        choice = self._choose_pack(text, end, now)
        if choice != self._pack:
            if scan is not None:
                self._apply(source, scan.finish(source.tail.reread), now)
            # Values that only the previous pack reads would never change again.
            if self._values.by_name:
                self._values.remove(self._lexicon.value_names(self._pack) - self._lexicon.value_names(choice))
            self._pack, scan = choice, None
            self.track = self._new_track(self.track)
        return scan if scan is not None else self._lexicon.engine(self._pack).begin_file(source.stamps)

    def _choose_pack(self, text: bytearray, end: int, now: float) -> str:
        """Choose the pack from the lines so far: with each of the first pieces, later at intervals."""
        if self._pack_detector is None or self._pack_detector.is_final:
            return self._pack
        if self._detected_pieces < EARLY_PIECES:
            self._detected_pieces, self._detected_at = self._detected_pieces + 1, now
            self._pack_detector.feed(text, end)
        else:
            self._undetected_text += memoryview(text)[max(0, end - UNSURE_BYTES) : end]
            if len(self._undetected_text) >= UNSURE_BYTES or now - self._detected_at >= UNSURE_S:
                self._pack_detector.feed(self._undetected_text[-UNSURE_BYTES:])
                self._undetected_text.clear()
                self._detected_at = now
        return self._pack_detector.choice or self._pack

    def _search_text(self, source: _LogSource, text: bytes, offset: int) -> LogFindings:
        if source.order == PROGRESS_FILE:
            return self._parse_progress(text, offset)
        return self._lexicon.engine(self._pack).scan(text, source.stamps, offset)

    def _parse_progress(self, text: bytes, offset: int) -> LogFindings:
        """Parse the progress file."""
        found = progress_file.parse_updates(text, offset, self._values.by_name, self._reported_phase)
        self._reported_phase, self._invalid_lines = found.phase, self._invalid_lines + found.invalid
        return found

    def _keep_sample(self, text: bytearray, end: int, now: float) -> None:
        """Keep a sample of an unknown log."""
        if self._first_text_time is None:
            self._first_text_time = now
        if self.track.pattern is None and not self._values.by_name:
            self._sample = bytes(memoryview(text)[max(0, end - SAMPLE_BYTES) : end])
        elif self._sample:
            self._sample = b""

    # -- records ----------------------------------------------------------------------------------

    def _apply(self, source: _LogSource, found: LogFindings, now: float, ahead: Sequence[LogPosition] = ()) -> None:
        """Take the records of a piece in order; positions with the same time are one reading of the estimator.

        ``ahead`` are the positions of the unfinished record after it; once it is whole, they do not count again.
        """
        if source.ahead:
            found.positions = [position for position in found.positions if position not in source.ahead]
        found.positions += ahead
        source.ahead = list(ahead)
        self._learn_clock(source, found, now)
        if found.errors:
            self._reported_errors = None
            for name, count in found.errors.items():
                self._errors[name] += count
        for name, of_ranks in found.values.items():
            for rank, value in of_ranks.items():
                self._values.set(name, rank, value, self._record_time(source, value.stamp, now))
        reading: tuple[float, float] | None = None
        if RUNNING in found.values and WAITING in found.values:
            requests = [self._values.number(name, now) for name in (RUNNING, WAITING)]
            self._estimator.update_requests(*(number or 0.0 for number in requests))
        records: list[LogPosition | ActivityMark] = [*found.positions, *found.marks]
        for record in sorted(records, key=lambda record: record.offset):
            t = self._record_time(source, record.stamp, now)
            arrival = now if source.live else t
            if reading is not None and reading[0] != t:
                self._update_estimator(*reading, is_new=source.live)
                reading = None
            if isinstance(record, ActivityMark):
                if reading is not None:
                    self._update_estimator(*reading, is_new=source.live)
                    reading = None
                self._apply_activity(record, t, arrival)
                continue
            aside = self.track.has_other_counter
            if self.track.update(source.tail.path, record, t, source.order):
                reading = (t, arrival)
            elif self.track.has_other_counter and not aside:
                self._estimator.pause("evaluating", t, arrival)  # another counter moves instead
        if reading is not None:
            self._update_estimator(*reading, is_new=source.live)

    def _apply_activity(self, activity: ActivityMark, t: float, arrival: float) -> None:
        self.track.apply_activity(activity, t)
        self.activities.apply(activity, t)
        if activity.begins:
            self._estimator.pause(activity.name, t, arrival)
        else:
            self._estimator.resume(t, arrival)

    def _update_estimator(self, t: float, arrival: float, *, is_new: bool) -> None:
        """Update the estimator; after a change of count, start a new one. ``is_new``: the line was written just now."""
        done, total = self.track.standing()
        if done is None:
            return
        if self._seen_changes != self.track.changes:
            began = self.track.began if is_new and self._seen_changes < 0 else None
            self._seen_changes = self.track.changes
            self._estimator = self._new_estimator(0.0 if began is None else max(0.0, t - began))
        self._estimator.update(t, done, total, arrival)

    def _record_time(self, source: _LogSource, stamp: float | None, now: float) -> float:
        """Time of a record, from its own stamp if usable, else now."""
        if stamp is None or source.zone_s is None or not source.is_clock:
            return now
        t = min(stamp + source.zone_s, now)
        return now if source.live and now - t > LATE_S else t

    def _learn_clock(self, source: _LogSource, found: LogFindings, now: float) -> None:
        """Find the offset for times without a zone: clocks of logs are local or UTC.

        Stamps that do not change, or are from before the run, are no clock, such as the time of the data or of the
        start.
        """
        records: list[LogPosition | ActivityMark | LogValue] = [*found.positions, *found.marks]
        records += [value for of_ranks in found.values.values() for value in of_ranks.values()]
        stamps = [record.stamp for record in records if record.stamp is not None]
        if not stamps or not source.is_clock:
            return
        last = max(stamps)
        if source.live and source.stands_still(last, now):
            source.is_clock = False
            self._estimator = self._new_estimator()  # it had wrong times
            return
        if source.zone_s is not None and source.live:
            shift = round((now - last - source.zone_s) / SHIFT_S) * SHIFT_S
            if shift and abs(now - last - source.zone_s - shift) <= SHIFT_SLACK_S:
                source.zone_s = zone_offset(last, now)
        elif source.live:
            source.zone_s = zone_offset(last, now)
        elif not source.tail.lag_bytes:
            source.zone_s = zone_offset(last, source.tail.mtime or now)
        elif source.zone_s is None:
            # A backlog that has not been read to its end.
            local = float(time.localtime(last).tm_gmtoff)
            source.zone_s = -local if last - local <= now else 0.0
        if not source.live:
            began = self.track.began
            earliest = now - FOREIGN_S if began is None else began - LATE_S
            source.is_clock = last + (source.zone_s or 0.0) >= earliest

    # -- results ----------------------------------------------------------------------------------

    @property
    def seconds_per_item(self) -> float | None:
        """Seconds per item while it works."""
        return None if self.ended else self._estimator.seconds_per_item

    def facts(self, now: float, peers: float | None = None, *, busy: bool | None = None) -> WorkerLogFacts:
        """Facts at this time.

        ``peers`` is the typical time per item of similar workers; ``busy`` is whether its GPUs work, None if unknown.
        """
        track, estimator, ended = self.track, self._estimator, self.ended
        if self._reported_errors is None:
            severities = self._lexicon.severities
            self._reported_errors = tuple((name, severities[name], count) for name, count in self._errors.items())
        done, total = track.standing()
        if not ended:
            self._busy = busy
        silence_s, outlook = estimator.silence_s(now if self.end is None else self.end), estimator.outlook()
        stalled = outlook.is_stalled(silence_s, self._manifest.stall_timeout_s, self._busy)
        known = done is not None
        idle = ended or (stalled and known)  # whether it will go on, and how fast, is unknown
        eta = None if idle or track.may_go_on else estimator.estimate_after(silence_s, peers)
        sources = self._sources.values()
        return WorkerLogFacts(
            task=self.task,
            read_at=now,
            pack=self._pack,
            unit=track.unit,
            pattern=track.pattern,
            position=_as_integer(done),
            expected=_as_integer(total if known else self._item_share),
            processed=_as_integer(track.processed),
            first=_as_integer(track.first),
            epoch=track.epoch,
            last_rise=track.last_rise,
            rate=None if idle else outlook.rate_after(silence_s),
            average_rate=outlook.average_after(silence_s),
            eta=eta,
            confidence=estimator.confidence_after(silence_s, eta) if eta is not None else None,
            stalled=stalled and not ended if known else None,
            stalled_at_end=stalled if known and ended else None,
            slowdown=None if ended else outlook.slowdown,
            phase=None if ended else self.activities.current_phase(now, track.last_rise),
            checkpoints=tuple(self.activities.recent_starts.get("checkpointing", ())),
            checkpoint_seconds=tuple(self.activities.durations.get("checkpointing", ())),
            values=self._values.fresh(now),
            last_values=self._values.last(),
            best_values=self._values.best,
            output_tokens_rate=self._tokens_rate(OUTPUT_TOKENS, now),
            input_tokens_rate=self._tokens_rate(INPUT_TOKENS, now),
            errors=self._reported_errors,
            bytes_read=self.bytes_read,
            lines=self._lines if self._counts_lines else None,
            lag_bytes=sum(source.tail.lag_bytes for source in sources),
            problems=self._problems(),
            prior=estimator.prior(track.unit) if ended else None,
            unmatched=self._unmatched(now),
            first_unmatched=self._first_description,
            unmatched_at=self._first_text_time + UNMATCHED_AFTER_S if self._first_text_time is not None else None,
            ended=ended,
        )

    def _tokens_rate(self, name: str, now: float) -> float | None:
        """Current token rate of an LLM server; the results of a benchmark do not count."""
        if self.ended or self.task.later:
            return None
        age_s = (
            math.inf if self.track.began is None else now - self.track.began
        )  # values of an earlier run are not current
        found = self._values.number(name, now, min(TOKENS_FRESH_S, age_s))
        return found if found is not None and abs(found) < run_files.MOST_NUMBER else None

    def progress(self, now: float) -> WorkerProgress:
        """Progress to compare with the worker's GPUs, which do not influence it here."""
        done, total = self.track.standing()
        stalled = None
        if done is not None:
            stalled = self._estimator.is_stalled(now, self._manifest.stall_timeout_s) and not self.ended
        total = total if total is not None else self._item_share
        # A server without requests may log that once and then nothing.
        requests = [self._values.number(name, now, math.inf) for name in (RUNNING, WAITING)]
        return WorkerProgress(
            last_rise=self.track.last_rise,
            stalled=stalled,
            done=self.ended or (done is not None and total is not None and done >= total),
            waits_for_requests=all(number == 0 for number in requests),
        )

    def _problems(self) -> tuple[str, ...]:
        tails = [source.tail for source in self._sources.values()]
        found = [f"{tail.path}: {tail.problem}" for tail in tails if tail.problem is not None]
        if self._invalid_lines:
            count = "1 line" if self._invalid_lines == 1 else f"{self._invalid_lines} lines"
            found.append(f"progress file: {count} without a JSON object of counts and numbers")
        return tuple(found)

    def _unmatched(self, now: float) -> str | None:
        """Describe a log without any match for minutes; None for services, which may log little."""
        if self.track.pattern is not None or self._values.by_name or self._first_text_time is None or self.task.service:
            return None
        if now - self._first_text_time < UNMATCHED_AFTER_S:
            return None
        if self._description is not None:
            at, sample, text = self._description
            if sample is self._sample or 0 <= now - at < DESCRIBED_S:
                return text
        lines = self._sample.replace(b"\r", b"\n").split(b"\n")
        shown = next((line for line in reversed(lines) if looks_like_progress(line)), b"")
        shown = shown or next((line for line in reversed(lines) if line.strip()), b"")
        nearest = self._pack_detector.find_nearest(self._sample) if self._pack_detector is not None else None
        near = f"; nearest pack: {nearest[0]} ({nearest[1]})" if nearest is not None else ""
        text = f'no pattern finds progress in lines such as "{plain_line(shown, 120)}"{near}'
        path = next((path for path, source in self._sources.items() if source.tail.bytes_read), None)
        if path is not None:
            text += f"; `gpujob scan {path}` shows what is found"
        self._description = now, self._sample, text
        self._first_description = self._first_description or text
        return text

    # -- saved state ------------------------------------------------------------------------------

    def state(self) -> WorkerLogsState:
        """The complete state. Much of it is shared with the worker, so it must be saved at once."""
        return WorkerLogsState(
            version=STATE_VERSION,
            restart=self.restart,
            pack=self._pack,
            track=self.track,
            estimator=self._estimator,
            activities=self.activities,
            seen_changes=self._seen_changes,
            values=self._values.by_name,
            best_values=self._values.best,
            errors=self._errors,
            lines=self._lines,
            closed_bytes=self._closed_bytes,
            first_text_time=self._first_text_time,
            first_description=self._first_description,
            reported_phase=self._reported_phase,
            invalid_lines=self._invalid_lines,
            sources=[
                SavedSource(path, source.order, source.lasting, source.zone_s, source.tail.position())
                for path, source in self._sources.items()
            ],
        )

    def restore(self, saved: object) -> None:
        """Restore from the JSON of ``state``; ValueError if malformed."""
        state = from_json(WorkerLogsState, saved, "state")
        if state.version != STATE_VERSION:
            raise ValueError(f"it is of version {state.version}, not {STATE_VERSION}")
        self.restart, self._pack = state.restart, state.pack
        if self._pack_detector is not None:
            self._pack_detector.resume(state.pack)
        self.track = self._new_track(state.track)
        self._estimator, self.activities = state.estimator, state.activities
        self._seen_changes = state.seen_changes
        self._values = WorkerValues(state.values, state.best_values)
        self._errors.update({name: count for name, count in state.errors.items() if name in self._errors})
        self._reported_errors = None
        self._lines, self._closed_bytes = state.lines, state.closed_bytes
        self._first_text_time, self._reported_phase = state.first_text_time, state.reported_phase
        self._first_description, self._invalid_lines = state.first_description, state.invalid_lines
        for path, order, lasting, zone_s, tail in state.sources:
            self._sources[path] = _LogSource(LogTail.restore(path, tail), order, zone_s=zone_s, lasting=lasting)


def _as_integer(number: float | None) -> float | None:
    """A whole count as an integer, for display."""
    return int(number) if number is not None and number == int(number) else number
