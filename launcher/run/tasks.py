"""The tasks of a job that run: their starts, their ends and why, and what the policy of each asks for then."""

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.contract import run_files
from exporter.contract.manifest import Task
from exporter.workers.exit_reason import evidence_of_record, parse_job_stop, signal_name
from launcher.errors import LauncherError
from launcher.plan.plan import WORKERS, Plan, RunFacts, TaskPlan
from launcher.report.exit_reasons import ExitReasonFinder, TaskFailures
from launcher.run.job_log import launch_lines, log_line
from launcher.run.job_state import OWN_TEARDOWN_S, JobState, attempt_optional
from launcher.run.run_records import RunRecords
from launcher.run.signals import OrchestratorSignals
from launcher.run.slurm_end import ASK_AFTER_S, ASK_AGAIN_S, SlurmEndQuery
from launcher.steps.srun_lines import group_by_step
from launcher.steps.steps import RunningTask, Steps

RECORD_GRACE_S = 2.0  # how long after the end of a step its exit record may take to be seen here (network file systems)
_ASKED_FROM_OUTSIDE = ("cancelled", "time_limit")
"""Reasons of ends by a signal from outside, as long as nobody has said why the job is being ended."""
LOOK_INTO_STEPS_S = 1.0  # between two looks for tasks that have ended in a step that goes on


@dataclass
class TaskGroup:
    """Tasks that are started together, and again together: all those of a worker, or of a step."""

    tasks: tuple[TaskPlan, ...]
    restart: int = 0  # the present run
    failed: bool = False  # whether one of its tasks has failed in this run
    due: float | None = None  # when it is started again, by the monotonic clock
    kill_at: float | None = None  # until when its other tasks have time to end, once one has failed


def task_groups(tasks: Iterable[TaskPlan]) -> list[TaskGroup]:
    """The units of these tasks, in their order."""
    groups = group_by_step(tasks, lambda planned: planned.task.worker)
    return [TaskGroup(tuple(members)) for members in groups.values()]


def is_awaited(planned: TaskPlan) -> bool:
    """Whether the job is over only when this task has ended."""
    return planned.critical and not planned.service


class JobTasks:
    """Starts tasks, sees them end, and starts them again where they may be."""

    def __init__(
        self,
        plan: Plan,
        facts: RunFacts,
        steps: Steps,
        course: JobState,
        signals: OrchestratorSignals,
        job_end: float | None,
    ) -> None:
        self.ends: dict[int, dict[str, Any]] = {}
        """Why each task last ended, by rank."""
        self.given_up: dict[str, str] = {}
        """Roles of the workers that have failed for good while the job goes on, by their names."""
        self.presumed_since: float | None = None
        """When a worker was asked to end, where the job is being stopped for that and nobody has said yet why."""
        self._plan = plan
        self._facts = facts
        self._steps = steps
        self._course = course
        self._signals = signals
        self._records = RunRecords(facts)
        self.inquiry = SlurmEndQuery(steps, course, signals, self.asked_since)
        self.judge_of_ends = ExitReasonFinder(plan.manifest, facts.attempt, job_end)
        self._failures = TaskFailures()
        self._tasks = {planned.task.rank: planned.task for planned in plan.tasks}
        self._units: dict[int, TaskGroup] = {}
        """Those that have been started, by the ranks of their tasks."""
        self._running: dict[int, RunningTask] = {}
        """By rank."""
        self._ended: dict[int, tuple[RunningTask, int, float]] = {}
        """Tasks whose step has ended and whose exit record may still be on its way: (what, status, since)."""
        self._in_steps: dict[int, RunningTask] = {}
        """Those that run in a step with others, of which no record of an end has been seen."""
        self._ahead: set[int] = set()
        """Ranks whose failure has been seen before the end of their step."""
        self._look_into_steps_at = 0.0
        self._leaving: dict[int, RunningTask] = {}
        """Tasks that have ended for us, and of which the place still has something."""
        self._killed_at: float | None = None

    # -- what there is ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything runs, or will again."""
        return bool(self._running or self._ended or any(self._waiting()))

    @property
    def running(self) -> list[RunningTask]:
        """What runs, as far as is known here."""
        return list(self._running.values())

    def active(self) -> list[TaskPlan]:
        """Tasks that run or will again."""
        found = [running.planned for running in self._running.values()]
        found += [running.planned for running, _, _ in self._ended.values()]
        return found + [planned for unit in self._waiting() for planned in unit.tasks]

    def have_started(self) -> bool:
        """Whether every task of the plan has left a first record."""
        return self._records.have_started(self._plan.tasks)

    def restarts(self) -> dict[int, int]:
        """The present run of each task, by rank."""
        return {rank: unit.restart for rank, unit in self._units.items()}

    def ends_of_tasks(self) -> list[tuple[Task, dict[str, Any]]]:
        """Why tasks have ended, by rank."""
        return [(self._tasks[rank], end) for rank, end in self.ends.items()]

    def _waiting(self) -> Iterable[TaskGroup]:
        """Units that are to be started again."""
        distinct = {id(unit): unit for unit in self._units.values()}
        return [unit for unit in distinct.values() if unit.due is not None]

    # -- starts ----------------------------------------------------------------------------------

    def start(self, tasks: Sequence[TaskPlan]) -> None:
        """Start tasks for the first time; none once a signal has come."""
        for unit in task_groups(tasks):
            if self._signals.ending:
                return
            self._units.update((planned.task.rank, unit) for planned in unit.tasks)
            self._start(unit)

    def _start(self, unit: TaskGroup) -> None:
        unit.failed, unit.due, unit.kill_at = False, None, None
        together = len(unit.tasks) > 1 and bool(unit.tasks[0].step)
        for tasks in [unit.tasks] if together else [(planned,) for planned in unit.tasks]:
            if not unit.failed and not self._signals.ending:
                self._start_step(unit, tasks)

    def _start_step(self, unit: TaskGroup, tasks: Sequence[TaskPlan]) -> None:
        restart = unit.restart
        for planned in tasks:
            for line in launch_lines(planned, self._facts, restart):
                log_line(line)
        try:
            started = self._steps.start_tasks(tasks, restart)
        except (OSError, LauncherError) as error:
            first = tasks[0]
            log_line(f"{first.task.worker} rank {first.task.rank} cannot be started: {error}")
            now = time.time()
            record = {"code": 127, "signal": None, "error": str(error), "start": now, "end": now}
            attempt_optional("write its record", lambda: self._records.keep(first, restart, record))
            self._judge(first, restart, record)
            return
        for running in started:
            task = running.planned.task
            self._running[task.rank] = running
            if len(tasks) > 1 and running.process is started[-1].process is started[0].process:
                self._in_steps[task.rank] = running
            host = self._facts.hosts[task.node_index]
            what = "worker restarted" if restart else "worker started"
            self._course.events.write(what, worker=task.worker, rank=task.rank, node=host, restart=restart)

    # -- ends ------------------------------------------------------------------------------------

    def reap(self) -> None:
        """See what has ended, say why, and do what its policy asks for."""
        now, inquiry = time.monotonic(), self.inquiry
        for rank, running in list(self._running.items()):
            code = running.returncode
            if code is not None:
                del self._running[rank]
                self._in_steps.pop(rank, None)
                if left := self._steps.sweep(running):
                    found = functools.partial(self._records.keep_found, running, {"survivors": left})
                    attempt_optional("write its record", found)
                if self._course.stop is None:
                    self._leaving[rank] = running
                if rank in self._ahead:
                    self._ahead.discard(rank)
                else:
                    self._ended[rank] = (running, code, now)
        if self._signals.ending is None:  # else there may be no time to ask, and all ends from outside
            self._leaving = {rank: left for rank, left in self._leaving.items() if not self._steps.is_over(left)}
        self._look_into_steps(now)
        if self._ended:
            attempt_optional("list the records", self._records.refresh)
        for rank, (running, code, since) in list(self._ended.items()):
            if self._signals.ending is not None and self._course.stop is None:
                break  # it has just come: first the reason
            record, waited = self._records.read_exit(running), now - since
            hopeless = self._killed_at is not None or self._is_on_a_failed_node(running)
            if record is None and waited < RECORD_GRACE_S and not hopeless:
                continue
            has_asked = inquiry.has_asked_since(since)
            may_be_told = record is not None and self._may_be_told_why(running, record)
            if may_be_told and (waited < inquiry.grace_s or not has_asked):  # a turn may take longer than the grace
                if waited > ASK_AFTER_S and not inquiry.has_asked_since(now - ASK_AGAIN_S):
                    inquiry.ask_why()
                continue
            if record is None and not has_asked and self._course.has_time:
                if self._course.stop is None:
                    inquiry.ask_why()
                else:
                    inquiry.ask_which_node()
            del self._ended[rank]
            if record is None:
                record = self._records.from_status(
                    running,
                    code,
                    exact=self._steps.exact_status,
                    lost=self._is_on_a_failed_node(running),
                    asked=self._course.stop is not None or self._units[rank].kill_at is not None,
                )
                keep = functools.partial(self._records.keep, running.planned, running.restart, record)
                attempt_optional("write its record", keep)
            self._judge(running.planned, running.restart, record)

    def _look_into_steps(self, now: float) -> None:
        """Failures in steps that go on: srun says nothing of a task that has ended well, and a service must not."""
        if not self._in_steps or self._course.stop is not None or now < self._look_into_steps_at:
            return
        self._look_into_steps_at = now + LOOK_INTO_STEPS_S
        try:
            names = self._records.refresh()
        except OSError:
            return
        for rank, running in list(self._in_steps.items()):
            if self._records.path(running.planned, running.restart, "exit").name not in names:
                continue
            record = self._records.read_exit(running)
            if record is None:
                continue
            del self._in_steps[rank]
            if record.get("code") != 0 or running.planned.service:
                self._ahead.add(rank)
                self._ended[rank] = (running, int(record.get("code") or 0), now)

    def _is_on_a_failed_node(self, running: RunningTask) -> bool:
        """Whether its node is known to be gone: no record will come from there."""
        nodes = (self._course.stop or {}).get("nodes") or ()
        return self._facts.hosts[running.planned.task.node_index] in nodes

    def _may_be_told_why(self, running: RunningTask, record: dict[str, Any]) -> bool:
        """Whether a worker was asked to end from outside and this process has not been yet.

        scancel and the time limit reach the steps before the batch step; its signal says which it was.
        """
        if self._course.stop is not None or self._signals.ending is not None:
            return False
        if self._units[running.planned.task.rank].kill_at is not None:
            return False  # we have asked it
        return bool(evidence_of_record(record).forwarded)

    def _judge(self, planned: TaskPlan, restart: int, record: dict[str, Any]) -> None:
        """Say why a task ended, and do what its policy asks for."""
        task, course = planned.task, self._course
        state = run_files.read_json(self._facts.run_dir / run_files.STATE_FILE) or {}
        host = self._facts.hosts[task.node_index]
        peers = self._failures.before(task.rank, record.get("end"))
        ended = self.judge_of_ends.judge(task, restart, host, record, parse_job_stop(state), peers)
        self.ends[task.rank] = ended
        self._failures.take(task, ended)
        for moment, number, sender in record.get("signals") or ():
            name = signal_name(int(number))
            facts = {"worker": task.worker, "rank": task.rank, "node": host, "signal": name, "from_pid": sender}
            course.events.write("worker signalled", time=moment, **facts)
        log_line(f"{task.worker} rank {task.rank} on {host} ended: {ended['reason']} ({'; '.join(ended['evidence'])})")
        course.events.write("worker ended", worker=task.worker, rank=task.rank, node=host, **ended)
        unit = self._units[task.rank]
        if ended["reason"] == "completed" or course.stop is not None or unit.failed:
            return
        unit.failed = True
        ended_by_place = self.inquiry.is_being_ended and ended["reason"] in _ASKED_FROM_OUTSIDE
        if restart < planned.restart_max and not ended_by_place:
            delay = planned.restart_backoff_s * (restart + 1)
            times = f"{restart + 1} of {planned.restart_max}"
            who = f"rank {task.rank}" if len(unit.tasks) > 1 else "it"
            log_line(f"{_named(unit)} is started again in {delay:g} s ({times}): {who} ended by {ended['reason']}")
            unit.due = time.monotonic() + delay
            self._end_rest_of(unit, planned, ended["reason"])
        elif planned.critical or ended_by_place:
            self.inquiry.ends_by_itself = ended_by_place
            self.presumed_since = ended["time"] if ended["reason"] in _ASKED_FROM_OUTSIDE else None
            course.begin_stop(
                "terminated_peer",
                f"{task.worker} rank {task.rank} on {host} ended by {ended['reason']}"
                + (f", restarted {restart} of {planned.restart_max} times" if planned.restart_max else ""),
                {"rank": task.rank, "restart": restart},
                ask=not ended_by_place,
                ended_in_s=0.0 if ended_by_place else None,
            )
        else:
            log_line(f"{task.worker} is not critical: the job goes on without it")
            self._give_up(unit)
            self._end_rest_of(unit, planned, ended["reason"])

    def _give_up(self, unit: TaskGroup) -> None:
        """Nobody is to wait for these workers any more."""
        self.given_up.update((planned.task.worker, planned.task.role) for planned in unit.tasks)
        attempt_optional("write who is given up", lambda: self._records.keep_given_up(self.given_up))

    def _end_rest_of(self, unit: TaskGroup, failed: TaskPlan, reason: str) -> None:
        """End the other tasks of a worker of which one has failed: half a worker may wait for ever."""
        ranks = {planned.task.rank for planned in unit.tasks} - self._ahead
        rest = [running for rank, running in self._running.items() if rank in ranks]
        if not rest:
            return
        task = failed.task
        cause = f"{task.worker} rank {task.rank} ended by {reason}"
        stop = {"reason": "terminated_peer", "cause": cause, "time": time.time()}
        log_line(f"Ending the other {len(rest)} processes of {_named(unit)}")
        for running in rest:
            attempt_optional("write why it is ended", functools.partial(self._records.keep_stop, running, stop))
        self._steps.terminate(rest)
        unit.kill_at = time.monotonic() + OWN_TEARDOWN_S  # from when they have been told

    def look_after_units(self) -> None:
        """Start again what is due, and kill what has not ended with its worker in time."""
        if self._course.stop is not None:
            for unit in self._waiting():
                unit.due = None
            return
        now = time.monotonic()
        for unit in {id(unit): unit for unit in self._units.values() if unit.failed}.values():
            ranks = [planned.task.rank for planned in unit.tasks]
            rest = [self._running[rank] for rank in ranks if rank in self._running]
            if rest and unit.kill_at is not None and now >= unit.kill_at:
                log_line(f"Killing {len(rest)} processes of {_named(unit)} that did not end in time")
                self._steps.kill(rest)
                unit.kill_at = time.monotonic() + OWN_TEARDOWN_S
            left = rest or any(rank in self._ended or rank in self._leaving for rank in ranks)
            if unit.due is not None and now >= unit.due and not left:
                unit.restart += 1
                self._start(unit)

    # -- the end of all --------------------------------------------------------------------------

    def asked_since(self) -> float | None:
        """When the first worker was asked to end, of those whose ends wait for the reason or were taken for one."""
        left = (self._records.read_exit(running) for running, _, _ in self._ended.values())
        ends = [record.get("end") for record in left if record is not None and evidence_of_record(record).forwarded]
        return min((end for end in (*ends, self.presumed_since) if end is not None), default=None)

    def warn(self, number: int) -> int:
        """Pass a warning before the time limit on to the workers that have work to save; how many processes they are.

        A service has nothing to save, and one that does not know the signal would die of it.
        """
        planned_of = ((running, running.planned) for running in self._running.values())
        workers = [running for running, planned in planned_of if planned.stage == WORKERS and not planned.service]
        self._steps.warn(workers, number)
        return len(workers)

    def ask_to_end(self) -> None:
        """SIGTERM to all that runs, if that is still to be done."""
        if self._course.ask and time.monotonic() >= self._course.ask_at:
            if self._running:
                self._steps.terminate(self.running)
            self._course.have_asked()

    def kill_in_time(self) -> bool:
        """Kill what did not end by the deadline; whether there is still something to wait for.

        Slurm kills by itself when it ends the job, refuses to do it for us, and leaves no time for waiting.
        """
        deadline = self._course.deadline
        if deadline is None or time.monotonic() <= deadline:
            return True
        if self.inquiry.ends_by_itself:
            return False
        if self._killed_at is None and self._running:
            log_line(f"Killing {len(self._running)} workers that did not end in time")
            self._steps.kill(self.running)
            self._killed_at = time.monotonic()
        return time.monotonic() <= max(deadline, self._killed_at or deadline) + 1.0


def _named(unit: TaskGroup) -> str:
    """Its worker, with the rank where it has one process alone."""
    task = unit.tasks[0].task
    return f"{task.worker} rank {task.rank}" if len(unit.tasks) == 1 else task.worker
