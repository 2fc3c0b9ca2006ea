"""Start the tasks of a job, find out why they end, and apply their restart policies."""

import dataclasses
import functools
import math
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.records import from_json
from exporter.contract.status import WorkerEnd
from exporter.workers.exit_reason import evidence_from_record, signal_name
from launcher.errors import LauncherError
from launcher.plan.plan import WORKERS, TaskPlan
from launcher.report.exit_reasons import TaskFailures
from launcher.run.before.resume import find_checkpoint, may_resume
from launcher.run.job_log import launch_lines, log_line
from launcher.run.job_state import OWN_TEARDOWN_S, JobRun, Stop, attempt_optional
from launcher.run.run_records import RunRecords
from launcher.run.slurm_end import QUERY_AFTER_S, QUERY_INTERVAL_S, SlurmEndQuery
from launcher.steps.srun_lines import group_by_step
from launcher.steps.steps import RunningTask
from launcher.words import count_text

RECORD_GRACE_S = 2.0  # from the end of a step until its exit record is visible here (network file systems)
_EXTERNAL_REASONS = ("cancelled", "time_limit")  # exit reasons of a signal from outside the job
LOST_STEP_S = 60.0  # from the end of a task until the srun that still waits for it is killed
STEPS_POLL_S = 1.0  # between two polls for tasks that have ended in a step that still runs


@dataclass
class TaskGroup:
    """Tasks that are started and restarted together: those of one worker, or of one step."""

    tasks: tuple[TaskPlan, ...]
    restart: int = 0  # number of the current run, from 0
    failed: bool = False  # whether one of its tasks has failed in this run
    restart_at: float | None = None  # time of its next start, monotonic clock
    kill_at: float | None = None  # when its other tasks are killed after one has failed, monotonic clock


def task_groups(tasks: Iterable[TaskPlan]) -> list[TaskGroup]:
    """Group tasks by worker or step, in their order."""
    groups = group_by_step(tasks, lambda planned: planned.task.worker)
    return [TaskGroup(tuple(members)) for members in groups.values()]


def is_awaited(planned: TaskPlan) -> bool:
    """Whether the job lasts until this task has ended."""
    return planned.critical and not planned.service


class JobTasks:
    """Starts tasks, notices their ends, and restarts them where the plan allows it."""

    def __init__(self, job: JobRun) -> None:
        self.ends: dict[int, WorkerEnd] = {}  # last exit of each task, by rank
        self.abandoned: dict[str, str] = {}  # workers that the job continues without: name -> role
        # when a worker was signalled, if the job is stopped for it and the reason is not yet confirmed
        self.unconfirmed_since: float | None = None
        self._job, self._plan, self._facts, self._steps = job, job.plan, job.facts, job.steps
        self._job_state, self._signals = job.state, job.signals
        self._records = RunRecords(job.facts)
        self.slurm_end_query = SlurmEndQuery(job, self.first_signalled_at, self.ends)
        self.exit_reason_finder = job.exit_reason_finder()
        self._failures = TaskFailures()
        self._tasks = {planned.task.rank: planned.task for planned in job.plan.tasks}
        self._task_groups: dict[int, TaskGroup] = {}  # task groups that were started, by rank
        self._running: dict[int, RunningTask] = {}  # by rank
        # tasks whose step ended and whose exit record may not be visible yet: (task, status, since)
        self._ended: dict[int, tuple[RunningTask, int, float]] = {}
        # by rank: tasks in a shared step without an exit record so far
        self._in_shared_steps: dict[int, RunningTask] = {}
        self._failed_early: set[int] = set()  # ranks whose failure was seen before the end of their step
        self._next_steps_poll_at = self._next_lost_steps_poll_at = 0.0
        # by rank: ended tasks that still have processes in their step
        self._with_leftovers: dict[int, RunningTask] = {}
        self._killed_at: float | None = None

    # -- state -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any task runs, or will run again."""
        return bool(self._running or self._ended or any(self._waiting_groups()))

    @property
    def running(self) -> list[RunningTask]:
        """Tasks that are not known to have ended."""
        return list(self._running.values())

    def active(self) -> list[TaskPlan]:
        """Tasks that run or will run again."""
        found = [running.planned for running in self._running.values()]
        found += [running.planned for running, _, _ in self._ended.values()]
        return found + [planned for unit in self._waiting_groups() for planned in unit.tasks]

    def have_started(self) -> bool:
        """Whether every task of the plan has left a start or exit record."""
        return self._records.have_started(self._plan.tasks)

    def restarts(self) -> dict[int, int]:
        """Number of the current run of each task, by rank."""
        return {rank: unit.restart for rank, unit in self._task_groups.items()}

    def ended_tasks(self) -> list[tuple[Task, WorkerEnd]]:
        """Tasks that have ended, each with its last exit."""
        return [(self._tasks[rank], end) for rank, end in self.ends.items()]

    def _waiting_groups(self) -> Iterable[TaskGroup]:
        """Task groups that wait for their restart."""
        distinct = {id(unit): unit for unit in self._task_groups.values()}
        return [unit for unit in distinct.values() if unit.restart_at is not None]

    # -- starts ----------------------------------------------------------------------------------

    def start(self, tasks: Sequence[TaskPlan]) -> None:
        """Start tasks for the first time; none after a signal that ends the job."""
        for unit in task_groups(tasks):
            if self._signals.end_signal:
                return
            self._task_groups.update((planned.task.rank, unit) for planned in unit.tasks)
            self._start_group(unit)

    def _start_group(self, group: TaskGroup) -> None:
        group.failed, group.restart_at, group.kill_at = False, None, None
        together = len(group.tasks) > 1 and bool(group.tasks[0].step)
        for tasks in [group.tasks] if together else [(planned,) for planned in group.tasks]:
            if not group.failed and not self._signals.end_signal:
                self._start_step(group, tasks)

    def _start_step(self, group: TaskGroup, tasks: Sequence[TaskPlan]) -> None:
        restart = group.restart
        self._signals.show_life()  # the starts of thousands of tasks take long
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
            attempt_optional("write its record", lambda: self._records.save_exit(first, restart, record))
            self._handle_end(first, restart, record)
            if group.restart_at is not None:
                self._save_not_started(group, first)
            return
        for running in started:
            task = running.planned.task
            self._running[task.rank] = running
            if len(tasks) > 1 and running.process is started[-1].process is started[0].process:
                self._in_shared_steps[task.rank] = running
            host = self._facts.hosts[task.node_index]
            event = "worker restarted" if restart else "worker started"
            self._job_state.events.write(event, worker=task.worker, rank=task.rank, node=host, restart=restart)

    def _save_not_started(self, group: TaskGroup, failed: TaskPlan) -> None:
        """Write the end of each task that was to start after the failed one: without it, no later run is found."""
        error = f"not started: {failed.task.worker} rank {failed.task.rank} could not be started"
        record = {"error": error, "end": time.time()}
        for planned in group.tasks[group.tasks.index(failed) + 1 :]:
            save = functools.partial(self._records.save_exit, planned, group.restart, record)
            attempt_optional("write its record", save)

    # -- ends ------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect ended tasks, find their exit reasons, and apply their restart policies."""
        now, end_query = time.monotonic(), self.slurm_end_query
        for rank, running in list(self._running.items()):
            code = running.returncode
            if code is not None:
                del self._running[rank]
                self._in_shared_steps.pop(rank, None)
                if left := self._steps.kill_leftovers(running):
                    save_findings = functools.partial(self._records.save_findings, running, {"survivors": left})
                    attempt_optional("write its record", save_findings)
                if self._job_state.stop is None:
                    self._with_leftovers[rank] = running
                if rank in self._failed_early:
                    self._failed_early.discard(rank)
                else:
                    self._ended[rank] = (running, code, now)
        # after a signal there may be no time to ask, and everything is being ended anyway
        if self._signals.end_signal is None:
            self._with_leftovers = {
                rank: left for rank, left in self._with_leftovers.items() if not self._steps.has_no_leftovers(left)
            }
        self._poll_shared_steps(now)
        self._end_lost_steps(now)
        if self._ended:
            attempt_optional("list the records", lambda: self._records.find_written(()))
        records = {rank: self._records.read_exit(running) for rank, (running, _, _) in self._ended.items()}
        oom_kills = {
            rank: self._steps.read_oom_kills(running)
            for rank, (running, _, ended_at) in self._ended.items()
            if records[rank] is None and not self._may_get_record(running, now - ended_at)
        }
        # the first failure decides, whatever its rank; if times are unknown, a kill for lack of memory
        for rank in sorted(records, key=lambda rank: (_end_of(records[rank]), -oom_kills.get(rank, 0))):
            running, code, ended_at = self._ended[rank]
            if self._signals.end_signal is not None and self._job_state.stop is None:
                break  # the signal is new: first find out its reason
            record, waited = records[rank] or self._records.read_exit(running), now - ended_at
            if record is None and self._may_get_record(running, waited):
                continue
            has_queried = end_query.has_queried_since(ended_at)
            may_get_reason = record is not None and self._may_get_reason(running, record)
            # one pass may take longer than the grace time
            if may_get_reason and (waited < end_query.grace_s or not has_queried):
                if waited > QUERY_AFTER_S and not end_query.has_queried_since(now - QUERY_INTERVAL_S):
                    end_query.query_reason()
                continue
            if record is None and not has_queried and self._job_state.has_time_for_query:
                if self._job_state.stop is None:
                    end_query.query_reason()
                else:
                    end_query.query_failed_node()
            if record is not None and self._awaits_oom_victim(running, record):
                continue
            del self._ended[rank]
            if record is None:
                record = self._records.derive_exit(
                    running,
                    code,
                    is_exact=self._steps.has_exact_status,
                    is_node_lost=self._is_on_a_failed_node(running),
                    was_signalled=self._job_state.stop is not None or self._task_groups[rank].kill_at is not None,
                    may_lack_records=self._job_state.find_why_incomplete() is not None,
                )
                if kills := oom_kills.get(rank):  # perhaps also of the wrapper, which counts them
                    record["oom_kills"] = kills
                host = self._facts.hosts[running.planned.task.node_index]
                if (stop := end_query.node_stop(host)) is not None:
                    save_stop = functools.partial(self._records.save_stop, running, stop)
                    attempt_optional("write the reason for its end", save_stop)
                save_record = functools.partial(self._records.save_exit, running.planned, running.restart, record)
                attempt_optional("write its record", save_record)
            self._handle_end(running.planned, running.restart, record)

    def _poll_shared_steps(self, now: float) -> None:
        """Find failed tasks in steps that still run.

        srun does not report a task that ended with 0, but a service must not end at all.
        """
        if not self._in_shared_steps or self._job_state.stop is not None or now < self._next_steps_poll_at:
            return
        self._next_steps_poll_at = now + STEPS_POLL_S
        try:
            ended = self._records.find_ended(self._in_shared_steps)
        except OSError:
            return
        for rank in ended:
            running = self._in_shared_steps[rank]
            record = self._records.read_exit(running)
            if record is None:
                continue
            del self._in_shared_steps[rank]
            code = evidence_from_record(record).code
            if code != 0 or running.planned.service:
                self._failed_early.add(rank)
                self._ended[rank] = (running, code or 0, now)

    def _end_lost_steps(self, now: float) -> None:
        """Kill each srun whose tasks all ended long ago: without slurmstepd, it would wait until the time limit."""
        if not self._running or now < self._next_lost_steps_poll_at:
            return
        self._next_lost_steps_poll_at = now + LOST_STEP_S / 6
        try:
            ended = set(self._records.find_ended(self._running))
        except OSError:
            return
        lost: dict[subprocess.Popen[bytes], bool] = {}
        for rank, running in self._running.items():
            end = evidence_from_record(self._records.read_exit(running) or {}).end if rank in ended else None
            is_over = end is not None and time.time() - end >= LOST_STEP_S
            lost[running.process] = lost.get(running.process, True) and is_over
        for process in (process for process, is_lost in lost.items() if is_lost):
            log_line(f"Killing srun {process.pid}: its tasks ended {LOST_STEP_S:g} s ago, and Slurm has not told it")
            process.kill()

    def _is_on_a_failed_node(self, running: RunningTask) -> bool:
        """Whether the task's node has failed, so that no record will come from it."""
        stop, host = self._job_state.stop, self._facts.hosts[running.planned.task.node_index]
        return host in self.slurm_end_query.failed_nodes or (stop is not None and host in stop.nodes)

    def _may_get_record(self, running: RunningTask, waited_s: float) -> bool:
        """Whether the exit record of a task that ended this long ago may not be visible here yet."""
        return waited_s < RECORD_GRACE_S and self._killed_at is None and not self._is_on_a_failed_node(running)

    def _may_get_reason(self, running: RunningTask, record: Mapping[str, object]) -> bool:
        """Whether the task was signalled from outside and the signal has not reached this process yet.

        scancel and the time limit reach the steps before the batch step. Its signal shows which of them it was.
        """
        if self._job_state.stop is not None or self._signals.end_signal is not None:
            return False
        if self._task_groups[running.planned.task.rank].kill_at is not None:
            return False  # we sent the signal
        return bool(evidence_from_record(record).forwarded)

    def _awaits_oom_victim(self, running: RunningTask, record: Mapping[str, object]) -> bool:
        """Whether a task on its node may turn out to be the one that the OOM killer chose."""
        if self._job_state.stop is not None or self._signals.end_signal is not None:
            return False  # the report judges again when all have ended
        task = running.planned.task
        host = self._facts.hosts[task.node_index]
        peers = self._failures.find_before(task.rank, evidence_from_record(record).end)
        return self.exit_reason_finder.awaits_oom_victim(task, running.restart, host, record, peers)

    def _handle_end(self, planned: TaskPlan, restart: int, record: Mapping[str, object]) -> None:
        """Find the exit reason of a task, then restart its group, stop the job, or continue without it."""
        task, job_state = planned.task, self._job_state
        host = self._facts.hosts[task.node_index]
        peers = self._failures.find_before(task.rank, evidence_from_record(record).end)
        end = self.exit_reason_finder.describe_end(task, restart, host, record, job_state.stop, peers)
        self.ends[task.rank] = end
        self._failures.add(task, end)
        for moment, number, sender in from_json(tuple[tuple[float, int, int], ...], record.get("signals") or ()):
            name = signal_name(number)
            facts = {"worker": task.worker, "rank": task.rank, "node": host, "signal": name, "from_pid": sender}
            job_state.events.write("worker signalled", time=moment, **facts)
        log_line(f"{task.worker} rank {task.rank} on {host} ended: {end.reason} ({'; '.join(end.evidence)})")
        job_state.events.write("worker ended", worker=task.worker, rank=task.rank, node=host, **end.to_json())
        group = self._task_groups[task.rank]
        if end.reason == "completed" or job_state.stop is not None or group.failed:
            return
        group.failed = True
        is_ended_by_slurm = self.slurm_end_query.is_being_ended and end.reason in _EXTERNAL_REASONS
        if restart < planned.restart_max and not is_ended_by_slurm and end.reason != "node_failure":
            delay = planned.restart_backoff_s * (restart + 1)
            times = f"{restart + 1} of {planned.restart_max}"
            failed_part = f"rank {task.rank}" if len(group.tasks) > 1 else "it"
            log_line(f"{_group_name(group)} restarts in {delay:g} s ({times}): {failed_part} ended by {end.reason}")
            group.restart_at = time.monotonic() + delay
            self._end_rest_of_group(group, planned, end.reason)
        elif planned.critical or is_ended_by_slurm:
            self.slurm_end_query.is_left_to_slurm = is_ended_by_slurm
            self.unconfirmed_since = end.time if end.reason in _EXTERNAL_REASONS else None
            job_state.begin_stop(
                "terminated_peer",
                f"{task.worker} rank {task.rank} on {host} ended by {end.reason}"
                + (f", restarted {restart} of {planned.restart_max} times" if planned.restart_max else ""),
                {"rank": task.rank, "restart": restart},
                send_sigterm=not is_ended_by_slurm,
                kill_wait_in_s=0.0 if is_ended_by_slurm else None,
            )
        else:
            log_line(f"{task.worker} is not critical: the job continues without it")
            self._abandon(group)
            self._end_rest_of_group(group, planned, end.reason)

    def _abandon(self, group: TaskGroup) -> None:
        """Publish that the job continues without these workers."""
        self.abandoned.update((planned.task.worker, planned.task.role) for planned in group.tasks)
        attempt_optional("write the list of abandoned workers", lambda: self._records.save_abandoned(self.abandoned))

    def _end_rest_of_group(self, group: TaskGroup, failed: TaskPlan, reason: str) -> None:
        """End the other tasks of a worker after one has failed: they may wait for it forever."""
        ranks = {planned.task.rank for planned in group.tasks} - self._failed_early
        rest = [running for rank, running in self._running.items() if rank in ranks]
        if not rest:
            return
        task = failed.task
        cause = f"{task.worker} rank {task.rank} ended by {reason}"
        stop = Stop("terminated_peer", cause, time.time())
        log_line(f"Ending the other {len(rest)} processes of {_group_name(group)}")
        for running in rest:
            self._signals.show_life()  # hundreds of files take long on a slow file server
            save_stop = functools.partial(self._records.save_stop, running, stop, like=rest[0])
            attempt_optional("write the reason for its end", save_stop)
        self._steps.terminate(rest)
        group.kill_at = time.monotonic() + OWN_TEARDOWN_S  # counted from after SIGTERM

    def handle_task_groups(self) -> None:
        """Restart groups that are due, and kill tasks that did not end with their group in time."""
        if self._job_state.stop is not None:
            for group in self._waiting_groups():
                group.restart_at = None
            return
        now, due = time.monotonic(), list[TaskGroup]()
        for group in {id(group): group for group in self._task_groups.values() if group.failed}.values():
            ranks = [planned.task.rank for planned in group.tasks]
            rest = [self._running[rank] for rank in ranks if rank in self._running]
            if rest and group.kill_at is not None and now >= group.kill_at:
                log_line(f"Killing {len(rest)} processes of {_group_name(group)} that did not end in time")
                self._steps.kill(rest)
                group.kill_at = time.monotonic() + OWN_TEARDOWN_S
            left = rest or any(rank in self._ended or rank in self._with_leftovers for rank in ranks)
            if group.restart_at is not None and now >= group.restart_at and not left:
                due.append(group)
        if any(may_resume(planned) for group in due for planned in group.tasks):
            self._update_checkpoint()  # once for all: it may take seconds, and hundreds may have failed together
        for group in due:
            group.restart += 1
            self._start_group(group)

    def _update_checkpoint(self) -> None:
        """Let restarted workers resume from what the job has saved meanwhile."""
        began = time.time() - self._job.elapsed_s
        found = find_checkpoint(self._plan, self._facts, self._signals.is_ending, is_restart=True, began=began)
        if found != self._facts.checkpoint:
            self._facts = dataclasses.replace(self._facts, checkpoint=found)
            self._steps.update_facts(self._facts)

    # -- teardown --------------------------------------------------------------------------------

    def first_signalled_at(self) -> float | None:
        """Earliest end among workers that were signalled from outside and lack a confirmed reason."""
        records = (self._records.read_exit(running) for running, _, _ in self._ended.values())
        found = [evidence_from_record(record) for record in records if record is not None]
        ends = [evidence.end for evidence in found if evidence.forwarded]
        return min((end for end in (*ends, self.unconfirmed_since) if end is not None), default=None)

    def warn_workers(self, signal_number: int) -> int:
        """Send a warning before the time limit to workers that are not services; return their number.

        A service has nothing to save, and would be killed by a signal that it does not handle.
        """
        planned_of = ((running, running.planned) for running in self._running.values())
        workers = [running for running, planned in planned_of if planned.stage == WORKERS and not planned.service]
        self._steps.send_signal(workers, signal_number)
        return len(workers)

    def terminate_if_due(self) -> None:
        """Send SIGTERM to all running tasks when it is due, once."""
        if self._job_state.is_sigterm_due and time.monotonic() >= self._job_state.sigterm_at:
            if self._running:
                self._steps.terminate(self.running)
            self._job_state.mark_signalled()

    def kill_at_deadline(self) -> bool:
        """Kill tasks at the deadline; return whether to keep waiting.

        When Slurm ends the job, it kills the tasks itself, rejects our request, and leaves no time to wait.
        """
        deadline = self._job_state.deadline
        if deadline is None or time.monotonic() <= deadline:
            return True
        if self.slurm_end_query.is_left_to_slurm:
            return False
        if self._killed_at is None and self._running:
            log_line(f"Killing {count_text(len(self._running), 'worker')} that did not end in time")
            self._steps.kill(self.running)
            self._killed_at = time.monotonic()
        return time.monotonic() <= max(deadline, self._killed_at or deadline) + 1.0


def _end_of(record: Mapping[str, object] | None) -> float:
    """Time of the end for comparisons; infinite if unknown."""
    end = evidence_from_record(record or {}).end
    return math.inf if end is None else end


def _group_name(group: TaskGroup) -> str:
    """Name of the worker, with the rank if it has one task."""
    task = group.tasks[0].task
    return f"{task.worker} rank {task.rank}" if len(group.tasks) == 1 else task.worker
