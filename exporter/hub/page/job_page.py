"""The series of all jobs as text, of which only those of changed jobs are made anew."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from exporter.collecting.families import Family, Samples, page_part
from exporter.hub.costs import budget_use
from exporter.hub.counters import Counters
from exporter.hub.jobs import SHOWN_AFTER_END_S, Job
from exporter.hub.look import end_of, wants_figures
from exporter.hub.page.series import (
    HUB_JOBS,
    HUB_LAG,
    Sum,
    render_counters,
    render_job,
    render_job_budget,
    render_sums,
    sums_of,
)
from exporter.slurm.tracking import UNKNOWN

_TRACKED, _UNKNOWN = Sum(HUB_JOBS, ("tracked",)), Sum(HUB_JOBS, ("unknown",))


class _Entry(NamedTuple):
    """A job on the page."""

    job: Job
    sums: Mapping[Sum, int]


class JobPage:
    """The page of jobs, which keeps the lines of each job until the job is replaced by another object.

    In a cluster, jobs that wait and jobs without GPUs that gpujob did not launch are only in the sums. If there are
    too many others, the youngest have series.
    """

    def __init__(self, cluster: str, *, whole_cluster: bool, most: int) -> None:
        self.cluster = cluster
        self._whole_cluster, self._most = whole_cluster, most
        self._of_job, self._of_sums = Samples({"cluster": cluster}), Samples({"cluster": cluster})
        self._entries: dict[str, _Entry] = {}
        self._ends: dict[str, float] = {}  # when the series of ended jobs go
        self._sums: dict[Sum, int] = {}
        self._unsettled: dict[str, float] = {}  # ends of jobs that wait for their figures
        self.sweeps: Sequence[tuple[Job, Mapping[str, float]]] = ()  # with the used shares of their budgets
        self._budgeted: dict[str, Job] = {}  # running jobs with a budget
        self._wanted: dict[str, float] = {}  # submit times of jobs that should have series
        self._rendered: dict[str, tuple[Family, ...]] = {}
        self._lines: dict[Family, dict[str, str]] = {}  # by job

    def parts(self, jobs: Mapping[str, Job], counters: Counters, now: float) -> Iterator[str]:
        """Yield the page, a family at a time."""
        self._update(jobs, now)
        shown = set(self._wanted)
        if len(shown) > self._most:
            shown = set(sorted(shown, key=lambda key: (self._wanted[key], key), reverse=True)[: self._most])
        for key in self._rendered.keys() - shown:
            self._remove_lines(key)
        for key in [key for key in self._wanted if key in shown and key not in self._rendered]:
            render_job(self._entries[key].job, self._of_job)
            lines = self._of_job.take()
            self._rendered[key] = tuple(lines)
            for family, own in lines.items():
                self._lines.setdefault(family, {})[key] = "\n".join(own)
        for family, by_job in self._lines.items():
            if by_job:
                yield page_part(family, by_job.values())
        kinds = {"waiting_for_accounting": len(self._unsettled), "not_shown": len(self._wanted) - len(shown)}
        sums = {_TRACKED: 0, _UNKNOWN: 0} | self._sums | {Sum(HUB_JOBS, (kind,)): kinds[kind] for kind in kinds}
        render_sums(sums, self._of_sums)
        render_counters(counters, self._of_sums)
        for job in self._budgeted.values():
            render_job_budget(job, budget_use(job, now), self._of_sums)
        for sweep, used in self.sweeps:
            render_job_budget(sweep, used, self._of_sums)
        self._of_sums.add(HUB_LAG, now - min(self._unsettled.values(), default=now))
        yield self._of_sums.page()

    def _update(self, jobs: Mapping[str, Job], now: float) -> None:
        for key in self._entries.keys() - jobs.keys():
            self._remove(key)
        for key, job in jobs.items():
            entry = self._entries.get(key)
            if entry is None or entry.job is not job:
                if entry is not None:
                    self._remove(key)
                self._add(key, job)
        for key in [key for key, goes_at in self._ends.items() if goes_at <= now]:
            job = self._entries[key].job
            self._remove(key)
            self._entries[key] = _Entry(job, {})
            self._note_unsettled(key, job)

    def _add(self, key: str, job: Job) -> None:
        tracked = job.tracked
        sums = dict.fromkeys(sums_of(job), job.tasks)
        if tracked.is_over:
            self._ends[key] = end_of(tracked) + SHOWN_AFTER_END_S
        else:
            sums[_TRACKED] = 1
        if tracked.state == UNKNOWN:
            sums[_UNKNOWN] = 1
        for each, number in sums.items():
            self._sums[each] = self._sums.get(each, 0) + number
        self._entries[key] = _Entry(job, sums)
        self._note_unsettled(key, job)
        if not self._whole_cluster or tracked.run_dir or (job.gpus and tracked.state != "PENDING"):
            self._wanted[key] = tracked.submitted or 0.0
        if job.budget is not None and tracked.state == "RUNNING":
            self._budgeted[key] = job

    def _note_unsettled(self, key: str, job: Job) -> None:
        if wants_figures(job.tracked):
            self._unsettled[key] = end_of(job.tracked)

    def _remove(self, key: str) -> None:
        for each, number in self._entries.pop(key).sums.items():
            self._sums[each] -= number
            if not self._sums[each]:
                del self._sums[each]
        for known in (self._ends, self._unsettled, self._wanted, self._budgeted):
            known.pop(key, None)
        if key in self._rendered:
            self._remove_lines(key)

    def _remove_lines(self, key: str) -> None:
        for family in self._rendered.pop(key):
            del self._lines[family][key]
