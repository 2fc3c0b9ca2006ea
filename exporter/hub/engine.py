"""The engine of the hub: asks Slurm at the right times, keeps what it learns, and publishes it for the pages."""

import logging
import math
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.budget import USER_DAYS
from exporter.contract.clock import Clock
from exporter.contract.records import JsonObject
from exporter.hub.api.answers import change_json
from exporter.hub.counters import Counters, count
from exporter.hub.jobs import (
    Job,
    Observation,
    forget,
    split_rows,
    take_accounting,
    take_missed,
    take_queue,
    unknown_rows,
    with_prices,
)
from exporter.hub.page.job_page import JobPage
from exporter.hub.page.series import CommandUse
from exporter.hub.polling import (
    BETWEEN_QUESTIONS_S,
    CONTROLLER_S,
    JITTER,
    MISSED_EACH_S,
    NODES_S,
    WATCHED_NODES_S,
    AccountingQuery,
    PollInterval,
    due_at,
    extra_commands,
    next_query,
)
from exporter.hub.runs.budgets import sweeps_with_budgets, user_budget_use
from exporter.hub.runs.reports import Run, rows_of_runs, take_reports, with_runs
from exporter.hub.runs.stale_runs import StaleRuns, ids_of
from exporter.hub.site_reader import NO_SITE, Site
from exporter.hub.store import Batch, PublishedChange, Store, name_of
from exporter.slurm.commands_reader import ClusterFacts, SlurmReader, SlurmUnansweredError
from exporter.slurm.diagnostics import Diagnostics
from exporter.slurm.nodes import NodeRow, most_cpus
from exporter.slurm.queue import SAME_SUBMISSION_S, QueueRow
from exporter.slurm.states import array_of
from exporter.slurm.tracking import Change

RECENT_CHANGES = 10_000  # in memory; older ones are read from the file
MOST_MISSED_S = 86400.0  # how far back such a question goes
BUDGETS_EACH_S = 300.0  # between two comparisons of all users with their budgets
DAY_S = 86400.0
MOST_OFFSET_S = 2.0  # largest clock difference that is not reported
EARLIER_S = 60.0  # how long before the first submission accounting is searched, for clocks that differ
LEAST_WAIT_S = 0.05
MOST_WAIT_S = 5.0  # so that a clock that was set is noticed
EXTRAS = ("sacct", "sinfo")  # commands that are asked only as often as all of them together may be
UNNAMED = "slurm"  # label of a cluster whose name is not known

log = logging.getLogger("gpujob.hub")


class Settings(NamedTuple):
    """What the command line asks for."""

    whole_cluster: bool
    cluster: str | None  # None for the cluster of this machine
    interval_s: float
    most_jobs: int  # with series of their own


class View(NamedTuple):
    """Immutable snapshot for all pages; replaced as a whole."""

    jobs: Mapping[str, Job]
    as_of: float | None  # when the queue was last read
    counters: Counters
    is_ready: bool = False  # whether this process has read the queue
    number: int = 0  # of the views of this process


class Engine:
    """Works in one thread; other threads read its public attributes, which are replaced and not changed."""

    def __init__(
        self,
        slurm: SlurmReader,
        store: Store,
        settings: Settings,
        clock: Clock,
        *,
        runs: Callable[[], Iterable[Run]] = tuple,
        site: Site = NO_SITE,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._slurm, self._store, self._settings, self._clock = slurm, store, settings, clock
        self._runs, self.prices, self._chance = runs, site.prices, chance
        self._budgets, self._site_cluster = site.budgets, site.cluster
        self.budget_use: Mapping[tuple[str, str], float] = {}  # used share by user and kind
        self._budgets_at = 0.0
        saved = store.saved
        self._jobs: dict[str, Job] = {job.key: job for job in saved.jobs}
        self.counters: Counters = dict(saved.counters)
        self._rows: Mapping[str, QueueRow] = {}  # of the latest answer
        self.covers_since = float(saved.meta.get("covers_since", "inf"))  # no end after it is missing in the index
        self._covers_until = max(float(saved.meta.get(name, 0.0)) for name in ("covers_until", "as_of"))
        self._born = float(saved.meta.get("born", 0.0))  # changes before it are not this hub's
        self.last_number = saved.last_number
        self.recent: deque[PublishedChange] = deque(maxlen=RECENT_CHANGES)
        self.facts: ClusterFacts | None = None
        self._slurm_name = settings.cluster or saved.meta.get("cluster", UNNAMED)
        self._pace = {
            "squeue": PollInterval.of(settings.interval_s),
            "sacct": PollInterval.of(BETWEEN_QUESTIONS_S),
            "sinfo": PollInterval.of(NODES_S),
            "sdiag": PollInterval.of(CONTROLLER_S),
            "scontrol": PollInterval.of(CONTROLLER_S),
        }
        self._next_at = dict.fromkeys(self._pace, clock.monotonic())
        self._extra = extra_commands(settings.interval_s)
        self._has_accounting = True
        self._runs_taken: Iterable[Run] = ()
        self._stale = StaleRuns(store.jobs_by_id)
        self._missed_at, self._missed_since = 0.0, float(saved.meta.get("missed_since", 0.0))
        self._due_at = 0.0  # time of the next query to accounting
        self._lost_asked: dict[str, float] = {}  # when accounting last answered about a job that left the queue
        self._failing: dict[str, str] = {}  # problem by command
        self.commands = {command: CommandUse() for command in self._pace}
        self.nodes: tuple[NodeRow, ...] | None = None  # None before the first answer
        self._node_cpus: Mapping[str, int] = {}
        self.controller: Diagnostics | None = None
        self.clock_offset_s: float | None = None  # the controller's clock less that of this machine
        self.on_change: Callable[[], None] = lambda: None
        self.wake = threading.Event()  # set while something is due that was not foreseen
        self._page, self._sweeps = self._new_page(), list[tuple[Job, Mapping[str, float]]]()
        self._page_made: tuple[int, bytes] = 0, b""  # number of its view
        self._page_lock = threading.Lock()  # of the two attributes before
        as_of = float(saved.meta["as_of"]) if "as_of" in saved.meta else None
        # a hub that never gets an answer is as blind as one that gets no more
        self.commands["squeue"] = CommandUse(last_success=clock.time() if as_of is None else as_of)
        self.view = View(self._jobs, as_of, self.counters)
        self._live = self.view, frozenset[str]()
        self._tasks: tuple[View, Mapping[str, Sequence[str]]] = self.view, {}
        self._publish(is_ready=False)

    def known_cluster(self) -> str | None:
        """The name of the cluster; None until Slurm has told it."""
        return None if self._slurm_name == UNNAMED else self._slurm_name

    @property
    def label(self) -> str:
        """The label ``cluster`` of all series: that of the sidecars, so that alerts of both are about one job."""
        return self._slurm_name if self._settings.cluster else self._site_cluster or self._slurm_name

    @property
    def interval_s(self) -> float:
        return self._pace["squeue"].interval_s

    @property
    def unparsed(self) -> Mapping[str, int]:
        """Lines that could not be parsed, by command."""
        return self._slurm.unparsed

    @property
    def scope(self) -> JsonObject:
        """Whose jobs these are, and how often Slurm is asked about them."""
        slurm = self._slurm
        return {
            "cluster": self._slurm_name,
            "user": slurm.user,
            "partitions": list(slurm.partitions),
            "interval_s": self._settings.interval_s,
            "source": slurm.source,
        }

    @property
    def problems(self) -> list[str]:
        """What is wrong at present, one sentence each."""
        return [*self._failing.values(), *filter(None, [self._store.problem, self._clock_problem()])]

    def step(self) -> float:
        """Do what is due. Return the seconds until more may be."""
        if self._may_ask("squeue"):
            self._read_queue()
        if self._may_ask("sinfo") and self.view.is_ready:
            self._read_nodes()
        if self._may_ask("sdiag") and self.view.is_ready:
            self._read_controller()
        if self._may_ask("scontrol") and self.view.is_ready:
            self._read_cluster()  # a reconfiguration may hide jobs
        if self._clock.monotonic() >= self._budgets_at and self.view.is_ready:
            self._check_budgets()
        if self._runs() is not self._runs_taken and self.view.is_ready:
            self._take_runs()
        if self.view.is_ready:
            self._find_stale_runs()
        if self._may_miss_jobs() and self._clock.monotonic() >= self._missed_at and self._may_ask("sacct"):
            self._find_missed()
        question, now = None, self._clock.time()
        if now >= self._due_at and self._may_ask("sacct"):
            due = [(due_at(job.tracked, self._lost_asked.get(key)), job.tracked) for key, job in self._jobs.items()]
            question, self._due_at = next_query(due, now), min((at for at, _ in due), default=math.inf)
        if question is not None:
            self._ask_accounting(question)
        wait_s = self._next_at["squeue"] - self._clock.monotonic()
        return min(max(wait_s, LEAST_WAIT_S), MOST_WAIT_S)

    def _may_ask(self, command: str) -> bool:
        at = max(self._next_at[command], self._extra.next_at if command in EXTRAS else -math.inf)
        return self._clock.monotonic() >= at

    def _read_cluster(self) -> None:
        begun, before = self._clock.monotonic(), self.facts
        try:
            self.facts = self._slurm.cluster_facts()
        except SlurmUnansweredError as error:
            self._note("scontrol", begun, error)
            return
        self._note("scontrol", begun, None)
        self._slurm_name = self._settings.cluster or self.facts.name or UNNAMED
        if self.facts.hides_jobs and self._settings.whole_cluster and not (before and before.hides_jobs):
            log.warning("Slurm has PrivateData=jobs: without operator rights this hub sees its own user's jobs only")

    def _read_queue(self) -> None:
        begun = self._clock.monotonic()
        try:
            rows = split_rows(self._slurm.queue())
        except SlurmUnansweredError as error:
            self._note("squeue", begun, error)
            self._publish(is_ready=self.view.is_ready)
            return
        self._note("squeue", begun, None)
        if self.facts is None:
            self._read_cluster()
        now = self._clock.time()
        self._born = self._born or now
        seen = take_queue(self._jobs, rows, self._rows, now)
        self._rows = seen.rows
        self._runs_taken = ()  # new jobs may be those of runs that are known
        seen = seen._replace(jobs=with_runs(seen.jobs, self._runs()))
        self._take(seen, now, {"as_of": str(now), "born": str(self._born), "cluster": self._slurm_name})
        self._cover(now)
        self.commands["squeue"] = self.commands["squeue"]._replace(last_success=now)  # its answer has been used, too
        self.view = self.view._replace(as_of=now)
        self._publish(is_ready=True)

    def _cover(self, now: float) -> None:
        """Record since when the index has every end: Slurm may forget jobs between two answers."""
        listed_s = None if self.facts is None else self.facts.ended_listed_s
        gap_s, since = now - self._covers_until, self.covers_since
        if since > now or (gap_s > max(self.interval_s * 2, listed_s or 0.0) and not self._fill_gap(now)):
            since = now
        if since != self.covers_since:
            self._store.save(Batch(now, meta={"covers_since": str(since)}))
        self.covers_since, self._covers_until = since, now

    def _fill_gap(self, now: float) -> bool:
        """Find jobs that came and went while nobody looked. Returns whether accounting knew them."""
        if now - self._covers_until > MOST_MISSED_S or not self._has_accounting:
            return False
        self._missed_since = min(self._missed_since, self._covers_until) or self._covers_until
        self._find_missed()
        return self._missed_since >= now

    def _check_budgets(self) -> None:
        """Compare what users and sweeps have taken with their budgets."""
        now = self._clock.time()
        self._budgets_at = self._clock.monotonic() + BUDGETS_EACH_S
        self._sweeps = list(sweeps_with_budgets(self._runs(), self._jobs, self._store.tasks_of, now))
        if self._budgets:
            sums = self._store.sums_since(now - USER_DAYS * DAY_S, "user", None)
            self.budget_use = user_budget_use(self._budgets, sums, self._jobs.values(), now)

    def _read_controller(self) -> None:
        begun, asked_at = self._clock.monotonic(), self._clock.time()
        try:
            self.controller = self._slurm.diagnostics()
        except SlurmUnansweredError as error:
            self._note("sdiag", begun, error)
            return
        self._note("sdiag", begun, None)
        # its time is in whole seconds, and of some moment of the question
        offset_s = self.controller.time + 0.5 - (asked_at + self._clock.time()) / 2
        was_off = abs(self.clock_offset_s or 0.0) > MOST_OFFSET_S
        self.clock_offset_s = offset_s
        if abs(offset_s) > MOST_OFFSET_S and not was_off:
            log.warning("%s", self._clock_problem())
        elif was_off and abs(offset_s) <= MOST_OFFSET_S:
            log.warning("this machine and the controller of Slurm agree on the time again")

    def _clock_problem(self) -> str | None:
        offset_s = self.clock_offset_s or 0.0
        if abs(offset_s) <= MOST_OFFSET_S:
            return None
        relation = "behind" if offset_s > 0 else "ahead of"
        return f"the clock of this machine is {abs(offset_s):.0f} s {relation} that of Slurm's controller"

    def live_run_dirs(self) -> frozenset[str]:
        """Run directories of jobs that have not ended, or whose report Slurm has not confirmed."""
        view = self.view
        if self._live[0] is not view:
            own = (job.tracked for job in view.jobs.values() if job.tracked.run_dir is not None)
            paths = frozenset(job.run_dir for job in own if job.run_dir and (not job.is_over or job.is_reported))
            self._live = view, paths
        return self._live[1]

    def array_tasks(self) -> Mapping[str, Sequence[str]]:
        """Tasks of arrays that no longer wait together, by the id of their array."""
        view = self.view
        if self._tasks[0] is not view:
            found: dict[str, list[str]] = {}
            for key in view.jobs:
                if "_" in key and not key.endswith("_[]"):
                    found.setdefault(array_of(key), []).append(key)
            self._tasks = view, found
        return self._tasks[1]

    def stale_targets(self) -> Mapping[str, float]:
        """Run directories whose jobs have ended, and before when their targets were written if nobody serves them."""
        return self._stale.before

    def ends_of_stale(self) -> Mapping[str, float]:
        """When the jobs of these run directories ended."""
        return self._stale.ends

    def _find_stale_runs(self) -> None:
        asked = self._stale.update(self._runs(), self._jobs, self._clock.time())
        if not asked or not self._has_accounting or not self._may_ask("sacct"):
            return
        begun, since = self._clock.monotonic(), min(run.submitted for run in asked) - SAME_SUBMISSION_S
        try:
            attempts = self._slurm.accounting(ids_of(asked), max(0.0, since))
        except SlurmUnansweredError as error:
            self._note("sacct", begun, error)
            self._has_accounting = not error.is_lasting
            return
        self._note("sacct", begun, None)
        self._stale.take(asked, attempts, self._clock.time())

    def _take_runs(self) -> None:
        """Learn from the run directories, which tell an end before Slurm does."""
        runs, now = self._runs(), self._clock.time()
        missed = Observation({**self._jobs})
        if not self._has_accounting:  # which would tell more of such a job
            rows = rows_of_runs(self._jobs, runs, self._born, now)
            missed = take_missed(self._jobs, self._not_in_store(rows), now)
        jobs = with_runs(missed.jobs, runs)
        seen = take_reports(jobs, now, has_accounting=self._has_accounting)
        self._runs_taken = runs
        changes = (*missed.changes, *seen.changes)
        if changes or any(job is not self._jobs.get(key) for key, job in seen.jobs.items()):
            self._take(seen._replace(changes=changes), now, {})
            self._publish(is_ready=self.view.is_ready)

    def _may_miss_jobs(self) -> bool:
        """Whether jobs can come and go between two polls, and accounting knows them."""
        listed_s = None if self.facts is None else self.facts.ended_listed_s
        return self._has_accounting and listed_s is not None and listed_s < self.interval_s * (1 + JITTER)

    def _find_missed(self) -> None:
        begun, now = self._clock.monotonic(), self._clock.time()
        self._missed_at = begun + MISSED_EACH_S
        since = max(self._missed_since, self._born, now - MOST_MISSED_S)
        try:
            rows = self._slurm.ended_since(since - EARLIER_S)
        except SlurmUnansweredError as error:
            self._note("sacct", begun, error)
            self._has_accounting = not error.is_lasting
            self._runs_taken = ()
            return
        self._note("sacct", begun, None)
        self._missed_since = now
        new = [
            row
            for row in rows
            if (row.snapshot.submitted or 0.0) >= self._born and (row.snapshot.ended or 0.0) >= since
        ]
        seen = take_missed(self._jobs, self._not_in_store(new), now)
        self._take(seen, now, {"missed_since": str(now)})
        self._publish(is_ready=self.view.is_ready)

    def _not_in_store(self, rows: Sequence[QueueRow]) -> list[QueueRow]:
        """The rows of jobs that this hub has never known: most are of jobs that it knew and has forgotten."""
        return unknown_rows(rows, self._store.jobs_by_id(row.job_id for row in rows))

    def want_nodes(self) -> bool:
        """Schedule a read of the nodes for a client that watches them; return whether one is scheduled."""
        last = self.commands["sinfo"].last_success
        if "sinfo" in self._failing or (last is not None and self._clock.time() - last < WATCHED_NODES_S):
            return False
        self._next_at["sinfo"] = self._clock.monotonic()
        if not self._may_ask("sinfo"):
            return False
        self.wake.set()
        return True

    def _read_nodes(self) -> None:
        begun = self._clock.monotonic()
        try:
            self.nodes = self._slurm.nodes()
        except SlurmUnansweredError as error:
            self._note("sinfo", begun, error)
            return
        self._note("sinfo", begun, None)
        self.view = self.view._replace(number=self.view.number + 1)
        self._node_cpus = most_cpus(self.nodes)

    def _ask_accounting(self, question: AccountingQuery) -> None:
        begun, attempts = self._clock.monotonic(), None
        times = [job.submitted or 0.0 for job in question.jobs]
        if self._has_accounting:
            try:
                attempts = self._slurm.accounting(question.arrays, max(0.0, min(times) - EARLIER_S))
            except SlurmUnansweredError as error:
                self._note("sacct", begun, error)
                self._has_accounting = not error.is_lasting
                if self._has_accounting:
                    return  # a failure says nothing about a job
            else:
                self._note("sacct", begun, None)
        now = self._clock.time()
        self._lost_asked |= {job.job_id: now for job in question.jobs if not job.is_over}
        self._take(take_accounting(self._jobs, question.jobs, attempts, now), now, {})
        self._publish(is_ready=self.view.is_ready)

    def _take(self, seen: Observation, now: float, meta: Mapping[str, str]) -> None:
        """Keep what an answer changed: on disk, and then for the pages."""
        before = self._jobs
        changed = {key for key, job in seen.jobs.items() if job is not before.get(key)}
        seen = seen._replace(jobs=with_prices(seen.jobs, changed, self.prices, self._node_cpus))
        told = self._number(seen.changes, seen.jobs)
        counters = count(self.counters, before, seen.jobs, changed, seen.changes, self._born, now)
        kept = forget(seen.jobs, self._born, now)
        forgotten = seen.jobs.keys() - kept.keys()
        batch = Batch(
            now,
            [*(seen.jobs[key] for key in changed | forgotten), *seen.replaced],
            frozenset(name_of(seen.jobs[key]) for key in changed - forgotten),
            seen.gone,
            told,
            {key: value for key, value in counters.items() if self.counters.get(key) != value},
            {**meta, "last_number": str(told[-1].number if told else self.last_number)},
        )
        self._store.save(batch)
        self._jobs, self.counters = kept, counters
        self._due_at = 0.0
        self._lost_asked = {key: at for key, at in self._lost_asked.items() if key in kept}
        self.recent.extend(told)
        self.last_number += len(told)  # from now on they are told, and so not before they are saved

    def _number(self, changes: Sequence[Change], jobs: Mapping[str, Job]) -> list[PublishedChange]:
        own = [(change, jobs[change.job.job_id]) for change in changes if change.time > self._born]
        return [
            PublishedChange(number, change.time, job.user, change_json(change, job))
            for number, (change, job) in enumerate(own, self.last_number + 1)
        ]

    def _note(self, command: str, begun: float, error: SlurmUnansweredError | None) -> None:
        """Note how a command answered, and when it is asked next. A problem is logged when it begins and ends."""
        took_s, use = self._clock.monotonic() - begun, self.commands[command]
        if error is None:
            last_success = use.last_success if command == "squeue" else self._clock.time()
            use = use._replace(answers=use.answers + 1, last_success=last_success)
            if self._failing.pop(command, None) is not None:
                log.warning("%s answers again", command)
        else:
            use = use._replace(failures=use.failures + 1)
            if command not in self._failing:
                log.warning("%s", error)
            self._failing[command] = str(error)
        self.commands[command] = use._replace(seconds=use.seconds + took_s)
        if command in EXTRAS:
            self._extra = self._extra.after(begun)
        if command in self._pace:
            before = self._pace[command]
            pace = self._pace[command] = before.after(took_s if error is None else None)
            if error is None and pace.failures and not before.failures:
                log.warning("%s took %.1f s: it is asked less often", command, took_s)
            wait_s = pace.wait_s(self._chance()) if command == "squeue" else pace.interval_s
            self._next_at[command] = self._clock.monotonic() + wait_s

    def _new_page(self) -> JobPage:
        return JobPage(self.label, whole_cluster=self._settings.whole_cluster, most=self._settings.most_jobs)

    def page(self) -> bytes:
        """The series of the jobs, as a member of a gzip file. Any thread may ask; it takes 0.1 s for 10,000 jobs.

        Made for the first scrape after an answer of Slurm: a hub that nobody scrapes makes none.
        """
        with self._page_lock:
            view = self.view
            if self._page_made[0] != view.number:
                if self._page.cluster != self.label:
                    self._page = self._new_page()
                self._page.sweeps, self._page.since = self._sweeps, self._born
                packer = zlib.compressobj(1, zlib.DEFLATED, 31)
                parts = self._page.parts(view.jobs, view.counters, self._clock.time())
                packed = b"".join([*(packer.compress(part.encode("utf-8")) for part in parts), packer.flush()])
                self._page_made = view.number, packed
            return self._page_made[1]

    def _publish(self, *, is_ready: bool) -> None:
        number = self.view.number + 1
        self.view = self.view._replace(jobs=self._jobs, counters=self.counters, is_ready=is_ready, number=number)
        self.on_change()
