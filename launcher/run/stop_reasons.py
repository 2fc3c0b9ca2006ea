"""Reasons to stop a job while tasks run: work done or useless, time limit, or a signal."""

import signal
import time
from collections.abc import Sequence

from exporter.workers.exit_reason import CONSEQUENCES, LIMIT_OVERRUN_S
from launcher.plan.plan import BENCHMARK, DECODE, PREFILL, WORKERS, Plan, RunFacts, TaskPlan
from launcher.report.report import build_report
from launcher.run.job_log import log_line
from launcher.run.job_state import JobState, lost_part_cause
from launcher.run.signals import OrchestratorSignals, signal_text
from launcher.run.stages import Stages
from launcher.run.tasks import JobTasks, is_awaited

REQUEUE_MARGIN_S = 45.0  # stop this long before the time limit to requeue: the report must be written


class StopReasons:
    """Finds reasons to stop a job, and begins the stop."""

    def __init__(
        self,
        plan: Plan,
        facts: RunFacts,
        course: JobState,
        signals: OrchestratorSignals,
        crew: JobTasks,
        stages: Stages,
        time_limit_end: float | None,
    ) -> None:
        self._plan = plan
        self._facts = facts
        self._course = course
        self._signals = signals
        self._crew = crew
        self._stages = stages
        self._time_limit_end = time_limit_end
        self._has_heeded = False

    def heed_signals(self) -> None:
        """Handle signals that end the job, and warnings before the time limit."""
        self.heed_end()
        self._crew.inquiry.ask_again()
        self._pass_warnings_on()

    def look(self) -> None:
        """Stop the job if its work is done, useless, or out of time."""
        self._end_when_done()
        self._end_without_workers()
        self._end_for_requeue()

    def _end_when_done(self) -> None:
        """Stop the job when all critical tasks that are not services have completed."""
        work = [planned for planned in self._plan.tasks if is_awaited(planned)]
        active, course = self._crew.active(), self._course
        if course.leaves_time and self._have_completed(work):
            if self._is_whole():
                course.take_back_stop()
            else:
                course.ask_now()  # remaining tasks are only helpers and services
        if self._course.stop is not None or not work or not active:
            return
        if not any(is_awaited(planned) for planned in [*active, *self._stages.left]):
            alone = all(planned.stage == BENCHMARK for planned in work)
            what = "the benchmark has completed" if alone else "all critical workers have completed"
            self._course.begin_stop("completed", what)

    def _have_completed(self, work: Sequence[TaskPlan]) -> bool:
        """Whether there is work and all of it has completed."""
        ends = [self._crew.ends.get(planned.task.rank) for planned in work]
        over = not any(is_awaited(planned) for planned in [*self._crew.active(), *self._stages.left])
        return bool(work) and over and all(end is not None and end["reason"] == "completed" for end in ends)

    def _is_whole(self) -> bool:
        """Whether all items of the job are known to be processed.

        After the warning a worker may also exit with 0 because it saved its state and will resume.
        """
        now, ends = time.time(), self._crew.ends
        told = build_report(self._facts.run_dir, now=now, ended=True, ends=ends, out_of_time=lambda: True)
        expected = told["items_expected"]
        least = self._plan.manifest.verify.complete_share * expected if expected else None
        return least is not None and (told["items"] or 0) >= least

    def _end_without_workers(self) -> None:
        """Stop a serving job when all its workers have failed for good.

        With disaggregated serving, losing either half is enough.
        """
        crew = self._crew
        if self._course.stop is not None or not crew.given_up or not crew.busy:
            return
        living = [planned for planned in [*crew.active(), *self._stages.left] if planned.stage == WORKERS]
        serving = {planned.task.role for planned in self._plan.tasks if planned.stage == WORKERS and planned.service}
        alive = {planned.task.role for planned in living if planned.service}
        missing = serving - alive
        if alive:
            missing &= {PREFILL, DECODE}
        if not missing or (not alive and living):
            return
        ends = [entry for entry in crew.ends_of_tasks() if entry[0].role in missing]
        failed = [(task, end) for task, end in ends if end["reason"] not in CONSEQUENCES]
        if not failed:
            return
        task, end = max(failed, key=lambda entry: entry[1]["time"] or 0.0)
        host = self._facts.hosts[task.node_index]
        kind = f"{task.role} worker" if alive else "worker"
        cause = f"no {kind} is left: the last, {task.worker} rank {task.rank} on {host}, ended by {end['reason']}"
        told = {"worker": task.worker, "rank": task.rank, "node": host, **end}
        self._course.begin_stop("terminated_peer", cause, {"failed": told})

    def _pass_warnings_on(self) -> None:
        """Send the warning before the time limit to the workers, if the job file asks for it."""
        asked = str(self._plan.slurm.get("signal") or "").partition("@")[0].removeprefix("SIG")
        while self._signals.warnings:
            number = self._signals.warnings.pop()
            name = signal.Signals(number).name
            if name != f"SIG{asked}" or self._course.stop is not None:
                continue
            count = self._crew.warn(number)
            log_line(f"{name} before the time limit: passed on to {count} processes of workers")
            self._course.events.write("checkpoint signal", signal=name, processes=count)
            if self._may_be_requeued():
                self._stop_for_requeue()

    def _end_for_requeue(self) -> None:
        """Stop a job before the time limit if it is to be requeued."""
        if self._course.stop is None and self._crew.busy and self._may_be_requeued() and self._left_to_requeue() <= 0.0:
            self._stop_for_requeue()

    def _may_be_requeued(self) -> bool:
        requeue = self._plan.slurm.get("requeue") or {}
        return (
            bool(requeue.get("time_limit"))
            and self._time_limit_end is not None
            and self._facts.attempt < requeue.get("max", 0)
        )

    def _left_to_requeue(self) -> float:
        """Seconds that the workers still have before a stop for a requeue."""
        return (self._time_limit_end or 0.0) - REQUEUE_MARGIN_S - time.time()

    def _stop_for_requeue(self) -> None:
        cause = "the time limit is near, and the job is queued again"
        left = max(0.0, self._left_to_requeue())
        self._course.begin_stop("time_limit", cause, {"requeue": True}, ask_after_s=left)

    def heed_end(self) -> None:
        """Stop the job for a signal, once. The signal may also explain a stop that is already running."""
        course, crew, number = self._course, self._crew, self._signals.ending
        if number is None or self._has_heeded:
            return
        self._has_heeded = True
        name, words = signal.Signals(number).name, signal_text(number, local=self._facts.job_id.startswith("local-"))
        course.events.write("signal", signal=name, cause=words)
        if course.stop is None or crew.presumed_since is not None or course.leaves_time:
            self._stop_for_signal(name, words)
            crew.presumed_since = None
        if crew.inquiry.ends_by_itself:
            course.begin_kill_wait(self._signals.ending_at)  # Slurm's answer may have come before the signal

    def _stop_for_signal(self, name: str, words: str) -> None:
        inquiry, since = self._crew.inquiry, self._crew.asked_since()
        limit, now = self._time_limit_end, time.time()
        late = limit is not None and limit - 2.0 <= now <= limit + LIMIT_OVERRUN_S
        ending = inquiry.ask()
        inquiry.note(ending)
        ask = not inquiry.ends_by_itself
        if ending.reason is not None:
            inquiry.stop_for(ending, f" ({words})")
        elif self._crew.presumed_since is not None and not late:
            return  # the end of that worker explains more
        elif self._signals.orphaned:
            cause = "the guard of the orchestrator was killed"
            self._course.begin_stop(
                "terminated_peer", cause, {"failed": lost_part_cause("guard", self._facts.hosts[0], cause)}
            )
        elif late:
            self._course.begin_stop("time_limit", f"{name} at the time limit", ask=ask, since=since)
        else:
            self._course.begin_stop("cancelled", words, ask=ask, since=since)
