"""Reasons to stop a job while tasks run: work done or useless, time limit, or a signal."""

import signal
import time
from collections.abc import Sequence
from datetime import datetime

from exporter.workers.exit_reason import CONSEQUENCES, LIMIT_OVERRUN_S
from launcher.plan.plan import BENCHMARK, DECODE, PREFILL, WORKERS, TaskPlan
from launcher.report.inputs import ReportPace
from launcher.report.report import build_report
from launcher.run.job_log import log_line
from launcher.run.job_state import OWN_TEARDOWN_S, JobRun, lost_part_cause, teardown_limit_s
from launcher.run.signals import signal_text
from launcher.run.stages import Stages
from launcher.run.tasks import JobTasks, is_awaited
from launcher.rundir.job_records import LimitWarning, stop_request_text
from launcher.words import duration_text

REQUEUE_MARGIN_S = 37.0  # kept free between SIGKILL and the time limit: the report must be written before the requeue
LIMIT_INTERVAL_S = 600.0  # between questions whether the limit was changed: six an hour, also of a thousand jobs
LEAST_CHANGE_S = 60.0  # of a limit, which counts minutes; less is only known more exactly
FOLD_S = 3600.0  # by which clocks are set back at the end of summer time
LIMIT_ROUNDING_S = 1.0  # between the ends of one limit in the environment and in the answer of scontrol
MOST_SAVE_SHARE = 0.05  # largest share of the time limit between SIGTERM and SIGKILL before a requeue


class StopReasons:
    """Finds reasons to stop a job, and begins the stop."""

    def __init__(self, job: JobRun, job_tasks: JobTasks, stages: Stages) -> None:
        self._job = job
        self.time_limit_end = job.time_limit_end  # epoch seconds; None without a limit
        self._plan, self._facts = job.plan, job.facts
        self._job_state, self._signals = job.state, job.signals
        self._job_tasks, self._stages = job_tasks, stages
        self._has_handled_end_signal = False
        self._limit_query_at = time.monotonic() + LIMIT_INTERVAL_S

    def handle_signals(self) -> None:
        """Handle signals that end the job, and warnings before the time limit."""
        self.handle_end_signal()
        self._job_tasks.slurm_end_query.query_again()
        self._forward_warnings()

    def poll(self) -> None:
        """Stop the job if its work is done, useless, or out of time."""
        self._stop_when_done()
        self._stop_without_workers()
        self._read_limit_if_due()
        self._stop_if_requeue_due()

    def _stop_when_done(self) -> None:
        """Stop the job when all critical tasks that are not services have completed."""
        work = [planned for planned in self._plan.tasks if is_awaited(planned)]
        active, job_state = self._job_tasks.active(), self._job_state
        if job_state.may_finish_work and self._have_completed(work):
            if self._is_work_complete():
                job_state.withdraw_stop()
            else:
                job_state.expedite_sigterm()  # remaining tasks are only helpers and services
        if self._job_state.stop is not None or not work or not active:
            return
        if not any(is_awaited(planned) for planned in [*active, *self._stages.remaining_tasks]):
            alone = all(planned.stage == BENCHMARK for planned in work)
            cause = "the benchmark has completed" if alone else "all critical workers have completed"
            self._job_state.begin_stop("completed", cause)

    def _have_completed(self, work: Sequence[TaskPlan]) -> bool:
        """Whether there is work and all of it has completed."""
        ends = [self._job_tasks.ends.get(planned.task.rank) for planned in work]
        over = not any(is_awaited(planned) for planned in [*self._job_tasks.active(), *self._stages.remaining_tasks])
        return bool(work) and over and all(end is not None and end.reason == "completed" for end in ends)

    def _is_work_complete(self) -> bool:
        """Whether all items of the job are known to be processed.

        After the warning a worker may also exit with 0 because it saved its state and will resume.
        """
        known = self._job.know(self._job_tasks.ends)
        pace = ReportPace(out_of_time=lambda: True, out_of_time_for_runs=lambda: True)
        report = build_report(self._facts.run_dir, now=time.time(), ended=True, known=known, pace=pace)
        expected = report.items_expected
        least = self._plan.manifest.verify.complete_share * expected if expected else None
        return least is not None and (report.items or 0) >= least

    def _stop_without_workers(self) -> None:
        """Stop a serving job when all its workers have failed for good.

        With disaggregated serving, losing either half is enough.
        """
        job_tasks = self._job_tasks
        if self._job_state.stop is not None or not job_tasks.abandoned or not job_tasks.busy:
            return
        living = [
            planned for planned in [*job_tasks.active(), *self._stages.remaining_tasks] if planned.stage == WORKERS
        ]
        serving = {planned.task.role for planned in self._plan.tasks if planned.stage == WORKERS and planned.service}
        alive = {planned.task.role for planned in living if planned.service}
        missing = serving - alive
        if alive:
            missing &= {PREFILL, DECODE}
        if not missing or (not alive and living):
            return
        ends = [entry for entry in job_tasks.ended_tasks() if entry[0].role in missing]
        failed = [(task, end) for task, end in ends if end.reason not in CONSEQUENCES]
        if not failed:
            return
        task, end = max(failed, key=lambda entry: entry[1].time or 0.0)
        host = self._facts.hosts[task.node_index]
        kind = f"{task.role} worker" if alive else "worker"
        cause = f"no {kind} is left: the last, {task.worker} rank {task.rank} on {host}, ended by {end.reason}"
        failed_worker = {"worker": task.worker, "rank": task.rank, "node": host, **end.to_json()}
        self._job_state.begin_stop("terminated_peer", cause, {"failed": failed_worker})

    def _forward_warnings(self) -> None:
        """Send the warning before the time limit to the workers, if the job file asks for it."""
        asked = (self._plan.slurm.signal or "").partition("@")[0].removeprefix("SIG")
        while self._signals.warnings:
            number = self._signals.warnings.pop()
            name = signal.Signals(number).name
            if name != f"SIG{asked}" or self._job_state.stop is not None:
                continue
            warning = LimitWarning(signal=name, time=time.time())
            count = self._job_tasks.warn_workers(number)
            log_line(f"{name} before the time limit: sent to {count} processes of workers")
            self._job_state.events.write("checkpoint signal", signal=name, processes=count)
            if count:
                self._job_state.warning = warning
                self._job_state.publish(self._job_state.phase)  # for the report
            if self._may_be_requeued():
                self._read_limit()
                self._stop_for_requeue()

    def _stop_if_requeue_due(self) -> None:
        """Stop a job before the time limit if it is to be requeued."""
        if (
            self._job_state.stop is None
            and self._job_tasks.busy
            and self._may_be_requeued()
            and self._requeue_stop_in_s() <= 0.0
        ):
            self._read_limit()
            if self._requeue_stop_in_s() <= 0.0:
                self._stop_for_requeue()

    def _read_limit_if_due(self) -> None:
        if time.monotonic() >= self._limit_query_at and self._job_state.stop is None:
            self._read_limit()

    def _read_limit(self) -> None:
        """Ask Slurm when the time limit ends: it may have been changed since, or moved by a suspension."""
        self._limit_query_at = time.monotonic() + LIMIT_INTERVAL_S
        end, before = self._job.steps.read_time_limit_end(), self.time_limit_end
        if end is None or before is None or abs(end - before) <= LIMIT_ROUNDING_S:
            return
        if datetime.fromtimestamp(before).fold and abs(end + FOLD_S - before) <= LIMIT_ROUNDING_S:
            return  # Slurm's text has no time zone, and this hour comes twice
        if abs(end - before) >= LEAST_CHANGE_S:
            how = "later" if end > before else "earlier"
            log_line(f"The time limit ends {duration_text(abs(end - before))} {how} than before")
        self.time_limit_end = self._job_state.changed_limit_end = self._job_tasks.exit_reason_finder.job_end = end
        self._job_state.publish(self._job_state.phase)  # for sidecars and `watch`

    def _may_be_requeued(self) -> bool:
        requeue = self._plan.slurm.requeue
        return (
            not self._facts.is_local  # in an allocation too, whose end it knows
            and requeue is not None
            and requeue.time_limit
            and self.time_limit_end is not None
            and self._facts.attempt < requeue.max
        )

    def _requeue_stop_in_s(self) -> float:
        """Seconds that the workers still have before a stop for a requeue."""
        return self._requeue_kill_in_s() - self._save_s

    def _requeue_kill_in_s(self) -> float:
        """Seconds until workers are killed in a stop for a requeue."""
        return (self.time_limit_end or 0.0) - REQUEUE_MARGIN_S - time.time()

    @property
    def _save_s(self) -> float:
        """Seconds from SIGTERM to SIGKILL in a stop for a requeue: as at the time limit, unless that is short.

        Workers that save at `slurm.signal` need no more than in other stops, and the signal must come first.
        """
        if self._plan.slurm.signal:
            return OWN_TEARDOWN_S
        limit_s = (self.time_limit_end or 0.0) - self._facts.start
        return max(OWN_TEARDOWN_S, min(teardown_limit_s(self._plan.kill_wait_s), MOST_SAVE_SHARE * limit_s))

    def _stop_for_requeue(self) -> None:
        cause = "the time limit is near; the job will be requeued"
        sigterm_after_s = max(0.0, self._requeue_stop_in_s())
        kill_after_s = max(OWN_TEARDOWN_S, self._requeue_kill_in_s() - sigterm_after_s)
        self._job_state.begin_stop(
            "time_limit", cause, {"requeue": True}, sigterm_after_s=sigterm_after_s, kill_after_s=kill_after_s
        )

    def handle_end_signal(self) -> None:
        """Stop the job for a signal, once. The signal may also explain a stop that is already running."""
        job_state, job_tasks, number = self._job_state, self._job_tasks, self._signals.end_signal
        if number is None or self._has_handled_end_signal:
            return
        self._has_handled_end_signal = True
        name, text = signal.Signals(number).name, signal_text(number, local=self._facts.is_local)
        text = stop_request_text(self._facts.run_dir, self._facts.attempt) or text
        job_state.events.write("signal", signal=name, cause=text)
        if job_state.stop is None or job_tasks.unconfirmed_since is not None or job_state.may_finish_work:
            self._stop_for_signal(name, text)
            job_tasks.unconfirmed_since = None
        elif job_state.stop.requeue:  # tasks are saving; Slurm may end the job for another reason than the limit
            external_end = job_tasks.slurm_end_query.query()
            if external_end.reason is not None:
                job_state.replace_requeue(external_end.reason, f"{external_end.cause} ({text})")
        if job_tasks.slurm_end_query.is_left_to_slurm:
            job_state.begin_kill_wait(self._signals.end_signal_at)  # Slurm's answer may have come before the signal

    def _stop_for_signal(self, name: str, text: str) -> None:
        end_query, signalled_at = self._job_tasks.slurm_end_query, self._job_tasks.first_signalled_at()
        limit, now = self.time_limit_end, time.time()
        late = limit is not None and limit - 2.0 <= now <= limit + LIMIT_OVERRUN_S
        external_end = end_query.query()
        end_query.record(external_end)
        ask = not end_query.is_left_to_slurm
        if external_end.reason is not None:
            end_query.stop_job(external_end, f" ({text})")
        elif self._job_tasks.unconfirmed_since is not None and not late:
            return  # the end of that worker explains more
        elif self._signals.is_orphaned:
            cause = "the guard of the orchestrator was killed"
            self._job_state.begin_stop(
                "terminated_peer", cause, {"failed": lost_part_cause("guard", self._facts.hosts[0], cause)}
            )
        elif late:
            self._job_state.begin_stop(
                "time_limit", f"{name} at the time limit", send_sigterm=ask, signalled_at=signalled_at
            )
        else:
            self._job_state.begin_stop("cancelled", text, send_sigterm=ask, signalled_at=signalled_at)
