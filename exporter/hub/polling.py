"""When to ask Slurm: the queue at a steady pace, and accounting some seconds after the ends of jobs.

In any ten minutes there are at most 16 commands, whatever the number of jobs and of those who watch: 10 for the queue,
two for the load and configuration of the controller, and four for accounting and the nodes. They cost the controller at
most 30 requests.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from exporter.slurm.allowance import Extra
from exporter.slurm.states import array_of
from exporter.slurm.tracking import GIVEN_UP_AFTER_S, TrackedJob

INTERVAL_S = 60.0  # between two questions for the queue
JITTER = 0.1  # most of the interval that is added to it, so that many hubs do not ask together
MOST_INTERVAL_S = 300.0  # while Slurm is in trouble; each failure doubles the interval
SLOW_S = 1.0  # a slow answer takes longer than this, and than
SLOW_FACTOR = 5.0  # times the usual duration: the controller is in trouble, or limits our rate
USUAL_WEIGHT = 0.2  # of the newest answer in the usual duration
AFTER_END_S = (5.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # questions for the figures of an ended job
AFTER_LOSS_S = (0.0, *AFTER_END_S, GIVEN_UP_AFTER_S)  # questions about a job that has left the queue
CONTROLLER_S = 600.0  # between two questions for the load of the controller, and for its configuration
NODES_S = 600.0  # between two questions for the nodes
EXTRA_S = 200.0  # between two questions for accounting or the nodes: four in ten minutes, two of them at once
WATCHED_NODES_S = 240.0  # age at which nodes are read again for somebody who asks; above EXTRA_S, for accounting's sake
MISSED_EACH_S = 600.0  # between two questions for jobs that came and went between two polls
BETWEEN_QUESTIONS_S = 30.0  # to accounting, of two at once
MOST_IN_QUESTION = 1000  # ids; they take 0.3 s of the accounting's daemon


class PollInterval(NamedTuple):
    """How often one command is asked."""

    normal_s: float
    interval_s: float
    usual_s: float | None = None  # duration of its answers
    failures: int = 0  # in a row, slow answers too

    @classmethod
    def of(cls, normal_s: float) -> "PollInterval":
        return cls(normal_s, normal_s)

    def after(self, took_s: float | None) -> "PollInterval":
        """The pace after an answer that took so long, or after a failure (None)."""
        usual_s = self.usual_s
        if took_s is not None:
            usual_s = took_s if usual_s is None else usual_s + USUAL_WEIGHT * (took_s - usual_s)
        if took_s is not None and not self._is_slow(took_s):
            return PollInterval(self.normal_s, self.normal_s, usual_s)
        most_s = max(self.normal_s, MOST_INTERVAL_S)
        return PollInterval(self.normal_s, min(self.interval_s * 2, most_s), usual_s, self.failures + 1)

    def _is_slow(self, took_s: float) -> bool:
        return self.usual_s is not None and took_s > max(SLOW_S, SLOW_FACTOR * self.usual_s)

    def wait_s(self, chance: float) -> float:
        """The time to the next question. ``chance`` is a random number from 0 to 1."""
        return self.interval_s * (1 + JITTER * chance)


def extra_commands(interval_s: float) -> Extra:
    """Those of a hub. One that reads the queue more often than usual reads all more often."""
    return Extra(EXTRA_S * min(1.0, interval_s / INTERVAL_S))


class AccountingQuery(NamedTuple):
    """What accounting is asked in one command."""

    arrays: tuple[str, ...]  # ids; that of an array covers all its tasks
    jobs: tuple[TrackedJob, ...]


def end_of(job: TrackedJob) -> float:
    """When an ended job ended, as far as it is known."""
    return job.ended if job.ended is not None else job.history[-1].seen if job.history else 0.0


def shown_from(job: TrackedJob, since: float) -> float:
    """From when on the series of an ended job show its end: the end, or when this hub learned of it.

    An end up to ``since`` is not this hub's.
    """
    end = end_of(job)
    return max(end, job.history[-1].seen) if job.history and end > since else end


def wants_figures(job: TrackedJob) -> bool:
    """Whether accounting is asked for what an ended job used. A job that never ran used nothing."""
    return job.is_over and not job.given_up and job.figures is None and job.started is not None


def is_last_question(job: TrackedJob, now: float) -> bool:
    """Whether figures that are incomplete now are taken as they are."""
    return now >= end_of(job) + AFTER_END_S[-1]


def due_at(job: TrackedJob, lost_asked: float | None) -> float:
    """When accounting is to be asked about a job; infinity if it need not be.

    ``lost_asked`` is when it last answered about a job that has left the queue.
    """
    if wants_figures(job):
        return _next_time(end_of(job), AFTER_END_S, job.figures_asked)
    if job.missing_since is not None and not job.is_over:
        return _next_time(job.missing_since, AFTER_LOSS_S, lost_asked)
    return math.inf


def _next_time(begin: float, steps: Iterable[float], asked: float | None) -> float:
    return next((begin + step for step in steps if asked is None or begin + step > asked), math.inf)


def next_query(due: Iterable[tuple[float, TrackedJob]], now: float) -> AccountingQuery | None:
    """The next question, about the jobs that wait longest; None if nothing is due."""
    arrays: dict[str, list[TrackedJob]] = {}
    for _, job in sorted(((at, job) for at, job in due if at <= now), key=lambda entry: entry[0]):
        arrays.setdefault(array_of(job.job_id), []).append(job)
    asked = tuple(arrays)[:MOST_IN_QUESTION]
    return AccountingQuery(asked, tuple(job for array in asked for job in arrays[array])) if asked else None
