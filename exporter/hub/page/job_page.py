"""The series of all jobs as text, of which only those of changed jobs are made anew."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from exporter.collecting.families import Family, Samples, page_part
from exporter.hub.costs import budget_use
from exporter.hub.counters import Counters
from exporter.hub.jobs import SHOWN_AFTER_END_S, Job
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
from exporter.hub.polling import end_of, shown_from, wants_figures
from exporter.slurm.tracking import UNKNOWN

_TRACKED, _UNKNOWN = Sum(HUB_JOBS, ("tracked",)), Sum(HUB_JOBS, ("unknown",))
_LIVE, _LOST = (_TRACKED,), (_UNKNOWN,)


class _Entry(NamedTuple):
    """A job on the page."""

    job: Job
    sums: tuple[Sum, ...] = ()  # to which all its tasks belong
    counts: tuple[Sum, ...] = ()  # in which it counts as one


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
        self.since = 0.0  # ends up to it are not those of this hub
        self._budgeted: dict[str, Job] = {}  # jobs with a budget that run or are suspended
        self._wanted: dict[str, float] = {}  # submit times of jobs that should have series
        self._rendered: dict[str, tuple[Family, ...]] = {}  # the families of a job
        # texts by job, one for each family; most jobs have the same families, and lists of lists take less memory
        self._texts: dict[tuple[Family, ...], dict[str, tuple[str, ...]]] = {}

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
            by_job = self._texts.setdefault(families := tuple(lines), {})
            by_job[key] = tuple("\n".join(own) for own in lines.values())
            self._rendered[key] = next(each for each in self._texts if each == families)
        for family in dict.fromkeys(family for families in self._texts for family in families):
            yield page_part(family, self._texts_of(family))
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

    def _texts_of(self, family: Family) -> Iterator[str]:
        own = [(families.index(family), by_job) for families, by_job in self._texts.items() if family in families]
        return chain.from_iterable(map(itemgetter(index), by_job.values()) for index, by_job in own)

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
            self._entries[key] = _Entry(job)
            self._note_unsettled(key, job)

    def _add(self, key: str, job: Job) -> None:
        tracked = job.tracked
        if tracked.is_over:
            self._ends[key] = shown_from(tracked, self.since) + SHOWN_AFTER_END_S
        counts = (() if tracked.is_over else _LIVE) + (_LOST if tracked.state == UNKNOWN else ())
        entry = self._entries[key] = _Entry(job, sums_of(job), counts)
        self._count(entry, 1)
        self._note_unsettled(key, job)
        if not self._whole_cluster or tracked.run_dir or (job.gpus and tracked.state != "PENDING"):
            self._wanted[key] = tracked.submitted or 0.0
        if job.budget is not None and tracked.is_active:
            self._budgeted[key] = job

    def _count(self, entry: _Entry, sign: int) -> None:
        """Add an entry to the sums, or take it out."""
        for sums, number in ((entry.sums, entry.job.tasks), (entry.counts, 1)):
            for each in sums:
                self._sums[each] = self._sums.get(each, 0) + sign * number
                if not self._sums[each]:
                    del self._sums[each]

    def _note_unsettled(self, key: str, job: Job) -> None:
        if wants_figures(job.tracked):
            self._unsettled[key] = end_of(job.tracked)

    def _remove(self, key: str) -> None:
        self._count(self._entries.pop(key), -1)
        for known in (self._ends, self._unsettled, self._wanted, self._budgeted):
            known.pop(key, None)
        if key in self._rendered:
            self._remove_lines(key)

    def _remove_lines(self, key: str) -> None:
        families = self._rendered.pop(key)
        del self._texts[families][key]
        if not self._texts[families]:
            del self._texts[families]
