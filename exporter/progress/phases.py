"""What workers say that they do instead of their work, and the phase of the job that follows from it."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.logs.search.findings import ActivityMark

PHASES = ("checkpointing", "evaluating")
"""Marks that are a phase of the job, the one that is believed first at the head."""
BELIEVED_S = 1800.0
"""A mark that nothing has ended is believed for this long, while none of its kind has been seen to end;"""
LONGEST_TIMES, BELIEVED_LEAST_S = 3, 300.0  # else for three times the longest of the kind, and never less than this
SAME_S = 60.0  # a mark that comes again within this time, as one for each file of a checkpoint, is the same one
KEPT = 32


@dataclass
class WorkerActivities:
    """The marks of one worker."""

    since: dict[str, float] = field(default_factory=dict)  # when each mark that has not ended began
    begun: dict[str, deque[float]] = field(default_factory=dict)
    """Moments at which the last ones of each name began, or ended where a log tells the end only."""
    durations: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, mark: ActivityMark, t: float) -> None:
        """A record of this moment says what the worker does now, or that it has ended."""
        begun = self.begun.setdefault(mark.name, deque(maxlen=KEPT))
        since = self.since.get(mark.name)
        if mark.begins:
            if since is None or t - since >= SAME_S:
                self.since[mark.name] = t
                begun.append(t)
        elif since is not None:
            del self.since[mark.name]
            self.durations.setdefault(mark.name, deque(maxlen=KEPT)).append(max(0.0, t - since))
        elif not begun or t - begun[-1] >= SAME_S:
            begun.append(t)

    def begin_run(self) -> None:
        """A new run of the worker: what the last one was at has ended with it."""
        self.since.clear()

    def present(self, now: float, last_rise: float | None) -> str | None:
        """What the worker is at, of those that are phases; None once it has made progress since, or after too long."""
        for name in PHASES:
            since = self.since.get(name)
            if since is None or (last_rise is not None and last_rise > since):
                continue
            durations = self.durations.get(name)
            believed_s = max(BELIEVED_LEAST_S, LONGEST_TIMES * max(durations)) if durations else BELIEVED_S
            if now - since <= believed_s:
                return name
        return None

    def state(self) -> dict[str, Any]:
        """All that it knows, ready for JSON."""
        return {
            "since": dict(self.since),
            "begun": {name: list(moments) for name, moments in self.begun.items()},
            "durations": {name: list(seconds) for name, seconds in self.durations.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "WorkerActivities":
        """Marks that go on from what ``state`` gave; KeyError, TypeError or ValueError where that is malformed."""
        return cls(
            dict(state["since"]),
            {name: deque(moments, KEPT) for name, moments in state["begun"].items()},
            {name: deque(seconds, KEPT) for name, seconds in state["durations"].items()},
        )


def job_phase(workers: Iterable[tuple[WorkerActivities, float | None]], now: float) -> str | None:
    """Phase of the job by the marks and the last progress of its workers: what more than half of them are at.

    Only workers that have ever logged a mark of that name are asked, so rank 0 alone decides when no other logs it.
    """
    known = [(marks, marks.present(now, last_rise)) for marks, last_rise in workers]
    for name in PHASES:
        asked = [present for marks, present in known if name in marks.begun]
        if 2 * asked.count(name) > len(asked):
            return name
    return None
