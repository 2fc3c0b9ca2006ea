"""Checkpoints of the job: how many, whether the last is complete, and when the next is due."""

import logging
import math
from collections import deque
from functools import partial

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import Publisher
from exporter.collecting.saved_state import load_saved_state, save_state
from exporter.contract import run_files, status
from exporter.contract.clock import StopDetector
from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import RecordError
from exporter.files.checkpoints.checkpoints_reader import CLOCK_SLACK_S, CheckpointReading, CheckpointWatch
from exporter.files.checkpoints.history import SavedCheckpoints
from exporter.files.checkpoints.sets import Checkpoint
from exporter.files.checkpoints.tracker import CheckpointEvent, CheckpointTracker
from exporter.files.formats.source import printable
from exporter.machine.file_host import POLL_WAIT_S, WatchHandle, WatchHanging

TOTAL = Family(
    "checkpoints_total", "Complete checkpoints that the job has written, including damaged ones.", kind="counter"
)
LAST = Family("checkpoint_last_timestamp_seconds", "When the last complete checkpoint was written.")
LAST_BYTES = Family("checkpoint_last_bytes", "Size of the last complete checkpoint.")
VALID = Family(
    "checkpoint_valid",
    "Whether all files of the last complete checkpoint are valid, 0 if one is damaged; absent while unknown.",
)
WRITING = Family("checkpoint_writing", "Whether a checkpoint is being written.")
MISSING = Family("checkpoint_shards_missing", "Files missing from the newest checkpoint.")
INTERVAL = Family(
    "checkpoint_interval_seconds",
    "Seconds between checkpoints: from the job file, otherwise learned from at least three checkpoints.",
)
STOPPED = Family(
    "checkpoint_stopped_seconds",
    "Seconds in which the whole job was stopped since the last complete checkpoint, or without one since the start.",
)

CHECKPOINT = "checkpoint"  # group whose files are checkpoints
MOST_EVENTS = 50
LEVELS = {"saved": "info", "damaged": "critical", "incomplete": "warning", "unusual": "info"}
SAVE_INTERVAL_S = 30.0
MOST_POLLS = 4  # polls in one read while names remain unread
LAST_WAIT_S = 3.0  # for an answer once the workers have ended: it tells of their last checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointsSnapshot:
    """The checkpoints at one read."""

    responding: bool = True  # False while the file system does not answer
    total: int = 0
    writing: bool = False
    last: Checkpoint | None = None  # newest in any state
    last_complete: Checkpoint | None = None  # newest that was complete
    interval_s: float | None = None
    interval_steps: float | None = None
    next_expected: float | None = None
    stopped_s: float = 0.0  # since the last complete one, or since the start
    passed_over: tuple[tuple[str, str], ...] = ()  # matching names that are not files, and their kinds
    events: tuple[Event, ...] = ()


class CheckpointsCollector:
    """Follow the files of the checkpoint group.

    Every node does, since each needs to know when the next checkpoint is due. Only the first node shows them.
    """

    name = "checkpoints"
    families = (TOTAL, LAST, LAST_BYTES, VALID, WRITING, MISSING, INTERVAL, STOPPED)

    def __init__(self, context: CollectorContext, times: Publisher[tuple[float, ...]]) -> None:
        """``times`` of its last checkpoint files, in order, are published."""
        manifest, start = context.manifest, context.identity.start
        self.interval_s = manifest.check_interval_s
        self._clock, self._times = context.clock, times
        self._stop_detector = StopDetector(self.interval_s)
        self._is_first_node = context.identity.node_index == 0
        self._tracker = CheckpointTracker(
            start, manifest.checkpoint_interval_s, clock_slack_s=self._clock_slack_s(context)
        )
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._state_location = (
            manifest.run_dir,
            context.identity.node,
            context.identity.job_id,
            context.identity.attempt,
        )
        self._restored = False
        self._saved_state = self._tracker.history.state().to_json()  # state saved for the next sidecar
        self._saved_at: float | None = None  # when it was last saved
        self._save_problem: str | None = None  # why the last save failed
        self._state_file = run_files.JobStateFile(manifest.run_dir)
        self._workers_dir = manifest.run_dir / run_files.WORKERS_DIR
        self._handle: WatchHandle[CheckpointReading] | None = None
        for group in manifest.groups:
            if group.name == CHECKPOINT and group.pattern is not None:
                make = partial(
                    CheckpointWatch,
                    str(manifest.directory(group).absolute()),
                    group.pattern,
                    start,
                    verify=self._is_first_node,
                    is_only_node=manifest.nodes == 1,
                )
                self._handle = context.files.watch("checkpoints", make)

    @staticmethod
    def _clock_slack_s(context: CollectorContext) -> float:
        """How much older than the start a file of this attempt may be.

        0 if such files must be older: the last save of a previous attempt, or of a restarted job, is often under a
        minute old.
        """
        start = context.identity.start
        is_early = start is not None and context.clock.time() - start < CLOCK_SLACK_S
        return 0.0 if is_early or context.identity.attempt > 0 else CLOCK_SLACK_S

    def _last_worker_change(self) -> float | None:
        """When a worker last recorded its start or end; None if unknown."""
        try:
            return self._workers_dir.stat().st_mtime
        except OSError:
            return None

    def read(self) -> CheckpointsSnapshot | None:
        """Poll the folder; None without a checkpoint group, or on a node that does not show it."""
        if self._handle is None:
            return None
        self._restore()
        if stopped_s := self._stop_detector.begin_read(self._clock.monotonic()):
            self._tracker.history.stops.add(self._clock.time(), stopped_s)
        snapshot = self._poll(self._handle)
        self._stop_detector.end_read(self._clock.monotonic())
        return snapshot

    def _poll(self, handle: WatchHandle[CheckpointReading]) -> CheckpointsSnapshot | None:
        now = self._clock.time()
        found, history = self._tracker, self._tracker.history
        ended = self._state_file.read().get("workers_ended") is True
        last_worker_change = self._last_worker_change()
        for _ in range(MOST_POLLS):
            wait_s = LAST_WAIT_S if ended else POLL_WAIT_S if handle.responding else 0.0
            handle.request(now)
            try:
                reading = handle.result(wait_s)
            except WatchHanging:
                return (
                    CheckpointsSnapshot(responding=False, events=tuple(self._events)) if self._is_first_node else None
                )
            events = found.update(
                *(reading.entries, reading.names, self._clock.monotonic(), now),
                has_unread_names=reading.has_unread_names,
                workers_ended=ended,
                last_worker_change=last_worker_change,
            )
            self._events.extend(_event(one, now) for one in events)
            if not reading.has_unread_names:
                break
        self._times.publish(history.save_times)
        self._save()
        if not self._is_first_node:
            return None
        last = found.last_complete
        return CheckpointsSnapshot(
            total=history.total,
            writing=found.writing,
            last=found.last,
            last_complete=last,
            interval_s=history.interval_s,
            interval_steps=history.interval_steps,
            next_expected=history.next_expected,
            stopped_s=history.stops.seconds_since(-math.inf if last is None else last.end),
            passed_over=reading.passed_over,
            events=tuple(self._events),
        )

    def _restore(self) -> None:
        """Restore the count of an earlier sidecar, whose checkpoints may be gone."""
        if self._restored:
            return
        self._restored = True
        state = load_saved_state(*self._state_location, kind="checkpoints")
        if state is None:
            return
        try:
            saved = SavedCheckpoints.from_json(state)
        except RecordError as error:
            log.warning("the saved state of checkpoints is not used, existing checkpoints are counted again: %s", error)
        else:
            self._tracker.history.restore(saved)
            self._saved_state = saved.to_json()

    def _save(self) -> None:
        """Save the count for the next sidecar of this node."""
        now = self._clock.monotonic()
        if self._saved_at is not None and now - self._saved_at < SAVE_INTERVAL_S:
            return
        state = self._tracker.history.state().to_json()
        if state == self._saved_state:
            return
        self._saved_at = now
        problem = save_state(*self._state_location, state, kind="checkpoints")
        if problem is None:
            self._saved_state = state
        elif self._save_problem is None:
            log.warning(
                "the number of checkpoints is not saved: %s; a restarted sidecar would count again from zero", problem
            )
        self._save_problem = problem

    def render(self, snapshot: CheckpointsSnapshot | None, out: Samples) -> None:
        if snapshot is None or not snapshot.responding:
            return
        last, settled = snapshot.last_complete, snapshot.last
        if settled is not None and settled.state == "writing":
            settled = last
        out.add(TOTAL, snapshot.total)
        out.add(WRITING, snapshot.writing)
        out.add(INTERVAL, snapshot.interval_s)
        out.add(STOPPED, snapshot.stopped_s)
        if last is not None:
            out.add(LAST, last.end)
            out.add(LAST_BYTES, last.bytes)
            out.add(VALID, last.valid)
        if settled is not None:
            out.add(MISSING, settled.missing_count)

    def describe(self, snapshot: CheckpointsSnapshot | None, parts: StatusParts) -> None:
        if snapshot is None:
            return
        parts.events += snapshot.events
        if not snapshot.responding:
            return
        parts.checkpoints = status.Checkpoints(
            count=snapshot.total,
            writing=snapshot.writing,
            last=_checkpoint(snapshot.last) if snapshot.last is not None else None,
            last_complete=_checkpoint(snapshot.last_complete) if snapshot.last_complete is not None else None,
            interval_s=snapshot.interval_s,
            interval_steps=snapshot.interval_steps,
            next_expected=snapshot.next_expected,
            passed_over=tuple(
                status.IgnoredName(name=printable(name), kind=kind) for name, kind in snapshot.passed_over
            ),
        )


def _checkpoint(found: Checkpoint) -> status.Checkpoint:
    """One checkpoint as it is in the status."""
    return status.Checkpoint(
        name=printable(found.name),
        step=found.step,
        epoch=found.epoch,
        bytes=found.bytes,
        files=found.files,
        time=found.end,
        seconds=found.seconds,
        state=found.state,
        missing=found.missing_count,
        missing_files=tuple(map(printable, found.missing)),
        valid=found.valid,
        reason=printable(found.reason) if found.reason is not None else None,
        odd_size=found.odd_size,
        odd=printable(found.odd) if found.odd is not None else None,
    )


def _event(event: CheckpointEvent, now: float) -> Event:
    """Return one event; a saved checkpoint's has the time of its writing."""
    found = event.checkpoint
    detail = f"{printable(found.name)}: "
    level = LEVELS[event.kind]
    if event.kind == "saved":
        detail += f"{found.bytes} bytes" if found.files == 1 else f"{found.bytes} bytes in {found.files} files"
        detail += f", written in {found.seconds:.0f} s" if found.seconds is not None and found.seconds >= 1 else ""
        if found.odd_size is not None:
            level = "warning"
            detail += f"; {found.odd_size:.2g} times the usual size"
    elif event.kind == "unusual":
        detail += printable(found.odd or "")
    elif found.reason is not None:
        detail += printable(found.reason)
    moment = found.end if event.kind == "saved" else now
    return Event(time=moment, level=level, event=f"checkpoint {event.kind}", detail=detail)
