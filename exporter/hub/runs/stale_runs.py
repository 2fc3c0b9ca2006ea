"""Runs that have ended by Slurm's word, but could not remove their scrape targets: their node lost its power."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from exporter.hub.jobs import Job
from exporter.hub.polling import end_of
from exporter.hub.runs.reports import Run, is_of_run
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import MOST_ASKED
from exporter.slurm.states import ENDS, array_of

GONE_AFTER_S = 60.0  # after the end: Slurm ends a job after its sidecars, but network file systems show it this late
ASKED_EACH_S = 3600.0  # about a run that neither the queue nor the index knows
QUEUED_WITHIN_S = 600.0  # from its submission: until then, a job that is unknown may not have been read yet


class StaleRuns:
    """Run directories with stale targets: targets written before this time are useless."""

    def __init__(self, find: Callable[[Iterable[str]], Sequence[Job]]) -> None:
        self._find = find  # jobs of the index by id
        self._ended: dict[str, float] = {}  # runs that the queue no longer has; when they ended, NaN if it is unknown
        self._asked: dict[str, float] = {}  # when accounting was asked
        self.before: Mapping[str, float] = {}
        self.ends: Mapping[str, float] = {}  # when the jobs of some of these runs ended

    def update(self, runs: Iterable[Run], jobs: Mapping[str, Job], now: float) -> list[Run]:
        """Compare with the jobs of the queue. Return runs of which accounting may know the end."""
        found, ends, unknown, present = dict[str, float](), dict[str, float](), list[Run](), set[str]()
        for run in runs:
            present.add(run.run_dir)
            job = jobs.get(run.job_id) if run.is_monitored else None
            if job is not None and is_of_run(job, run):
                self._ended.pop(run.run_dir, None)
                before = _useless_before(job, now)
            elif run.is_monitored and run.job_id[:1].isdigit():
                before = self._of_past(run, now)
                if before is None and now - run.submitted > QUEUED_WITHIN_S:
                    unknown.append(run)
            else:
                continue
            if before is not None:
                found[run.run_dir] = before
            if before == math.inf:
                past = self._ended.get(run.run_dir)
                ends[run.run_dir] = end_of(jobs[run.job_id].tracked) if past is None else past
        self.before, self.ends = found, ends
        self._ended = {run_dir: end for run_dir, end in self._ended.items() if run_dir in present}
        self._asked = {run_dir: at for run_dir, at in self._asked.items() if run_dir in present}
        return [run for run in unknown if now - self._asked.get(run.run_dir, -math.inf) >= ASKED_EACH_S][:MOST_ASKED]

    def _of_past(self, run: Run, now: float) -> float | None:
        if run.run_dir not in self._ended:
            own = (job for job in self._find([run.job_id]) if is_of_run(job, run) and _useless_before(job, math.inf))
            self._ended[run.run_dir] = next((end_of(job.tracked) for job in own), math.nan)
        return math.inf if now - self._ended[run.run_dir] > GONE_AFTER_S else None

    def take(self, asked: Iterable[Run], attempts: Iterable[Attempt], now: float) -> None:
        """Learn the ends that accounting knows."""
        by_id: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_id.setdefault(attempt.job_id, []).append(attempt)
        for run in asked:
            self._asked[run.run_dir] = now
            own = [each for each in by_id.get(run.job_id, ()) if each.user == run.user]
            last = max(own, key=lambda each: each.snapshot.submitted or 0.0, default=None)
            if last is not None and last.snapshot.state in ENDS and (last.snapshot.ended or 0.0) >= run.submitted:
                self._ended[run.run_dir] = last.snapshot.ended or now


def ids_of(runs: Iterable[Run]) -> list[str]:
    """What accounting is asked for about runs."""
    return list(dict.fromkeys(array_of(run.job_id) for run in runs))


def _useless_before(job: Job, now: float) -> float | None:
    """When targets of the job were written if nobody serves them; None if it may still run."""
    tracked = job.tracked
    if tracked.is_over and not tracked.is_reported:
        return math.inf if now - end_of(tracked) > GONE_AFTER_S else None
    if tracked.state == "PENDING" and tracked.attempt > 1 and tracked.submitted is not None:
        return tracked.submitted if now - tracked.submitted > GONE_AFTER_S else None  # a requeue is a new submission
    return None
