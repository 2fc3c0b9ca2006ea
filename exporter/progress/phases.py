"""Activities that workers log, such as checkpoints, and the resulting phase of the job."""

from collections.abc import Iterable
from dataclasses import field

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.search.findings import ActivityMark

PHASES = ("checkpointing", "evaluating")  # activities that are a phase of the job, the preferred one first
MOST_ACTIVITY_S = 1800.0  # limit of an activity without a logged end, until one of its kind has ended
DURATION_FACTOR, LEAST_ACTIVITY_S = 3, 300.0  # afterwards: multiple of its longest duration, and least limit
SAME_ACTIVITY_S = 60.0  # an activity logged again within this time, such as per checkpoint file, is the same one
MOST_TIMES = 32


@dataclass
class WorkerActivities:
    active_since: dict[str, float] = field(default_factory=dict)  # start of each activity that has not ended
    # Recent starts by name, or ends if the log shows only those.
    recent_starts: dict[str, list[float]] = field(default_factory=dict)
    durations: dict[str, list[float]] = field(default_factory=dict)

    def apply(self, activity: ActivityMark, t: float) -> None:
        """Take a record that an activity starts or ends."""
        begun = self.recent_starts.setdefault(activity.name, [])
        since = self.active_since.get(activity.name)
        if activity.begins:
            if since is None or t - since >= SAME_ACTIVITY_S:
                self.active_since[activity.name] = t
                begun.append(t)
        elif since is not None:
            del self.active_since[activity.name]
            durations = self.durations.setdefault(activity.name, [])
            durations.append(max(0.0, t - since))
            del durations[:-MOST_TIMES]
        elif not begun or t - begun[-1] >= SAME_ACTIVITY_S:
            begun.append(t)
        del begun[:-MOST_TIMES]

    def begin_run(self) -> None:
        """Start a new run: the activities of the last run have ended."""
        self.active_since.clear()

    def set_wall_clock(self, step: float) -> None:
        """Move all times with the clock."""
        self.active_since = {name: since + step for name, since in self.active_since.items()}
        self.recent_starts = {name: [start + step for start in starts] for name, starts in self.recent_starts.items()}

    def current_phase(self, now: float, last_rise: float | None) -> str | None:
        """Current activity that is a phase; None after newer progress, or after too long."""
        if not self.active_since:
            return None
        for name in PHASES:
            since = self.active_since.get(name)
            if since is None or (last_rise is not None and last_rise > since):
                continue
            durations = self.durations.get(name)
            believed_s = max(LEAST_ACTIVITY_S, DURATION_FACTOR * max(durations)) if durations else MOST_ACTIVITY_S
            if now - since <= believed_s:
                return name
        return None


def job_phase(workers: Iterable[tuple[WorkerActivities, float | None]], now: float) -> str | None:
    """Phase of the job: the current activity of more than half of its workers, or None.

    Only workers that have ever logged this activity count. So rank 0 decides alone if no other rank logs it.
    """
    known = [(marks, marks.current_phase(now, last_rise)) for marks, last_rise in workers]
    for name in PHASES:
        asked = [present for marks, present in known if name in marks.recent_starts]
        if 2 * asked.count(name) > len(asked):
            return name
    return None
