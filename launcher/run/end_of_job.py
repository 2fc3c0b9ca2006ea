"""End of a job: final values, diagnoses, the report, and a requeue if requested."""

import contextlib
import functools
import itertools
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.events import EventLog
from exporter.contract.manifest import Manifest, Task
from exporter.contract.report import Report
from exporter.contract.status import NodeStatus, WorkerEnd
from exporter.logs.packs_reader import read_error_patterns
from exporter.progress.history_reader import build_run_history, write_run_history
from exporter.workers.diagnosis import NodeSituation, build_failure_diagnosis
from exporter.workers.diagnosis_reader import has_failure_diagnosis, read_run_files, write_diagnosis
from exporter.workers.diagnosis_text import render_diagnosis
from exporter.workers.exit_reason import CONSEQUENCES, LIMIT_OVERRUN_S
from exporter.workers.slurm_end_notice import CANCELLED, LAST_ENDS
from launcher.errors import LauncherError
from launcher.plan.plan import Plan
from launcher.report import run_logs, verification  # noqa: F401 - loaded now: an upgrade during the job may not mix versions
from launcher.report.inputs import ReportPace
from launcher.report.report import build_report, write_report
from launcher.report.state import EXIT_STATUS
from launcher.report.text import render_report
from launcher.report.trackers.mlflow import HURRY_S, WAIT_S, end_runs
from launcher.run.job_log import log_line, log_raw_line
from launcher.run.job_state import JobRun, attempt_optional
from launcher.run.launch_check import LaunchChecklist
from launcher.run.sidecars import Sidecars
from launcher.run.signals import signal_text
from launcher.run.tasks import JobTasks
from launcher.rundir.job_records import stop_request_text
from launcher.rundir.secrets_file import remove_secrets
from launcher.rundir.statuses import merge_workers, read_statuses
from launcher.steps.local_steps import LocalSteps
from launcher.words import end_line, plain_text

FINAL_VALUES_S = 15.0
FINAL_VALUES_IN_KILL_WAIT_S = 0.7  # wait for final values while KillWait is running
VERIFY_S = 60.0  # longest verification of output files, while the nodes wait
LEAST_VERIFY_S = 2.0  # shortest verification
LEAST_RUNS_S = 1.0  # shortest time for the earlier runs of restarted workers: those of most jobs take a moment
REPORT_MARGIN_S = 15.0  # kept free before the time limit for writing the report
MOST_DIAGNOSES = 20  # written here: if hundreds of workers fail together, more explain nothing, and the nodes wait
REQUEUE_S = 60.0  # how long Slurm may take to end a job that is requeued


def verification_s(time_limit_end: float | None, now: float) -> float:
    """Seconds that the verification may take if the time limit ends at ``time_limit_end``.

    A limit that was over long ago was extended meanwhile, or is that of an earlier allocation.
    """
    if time_limit_end is None or now > time_limit_end + LIMIT_OVERRUN_S:
        return VERIFY_S
    return min(VERIFY_S, max(LEAST_VERIFY_S, time_limit_end - now - REPORT_MARGIN_S))


def save_report(run_dir: Path, report: Report, report_fd: int | None = None) -> None:
    """Write the report to its files, and to memory that the command of a local run reads.

    If that is not possible in the run directory, standard error gets the result and the place of the report. Raises
    OSError if it has no place.
    """
    if report_fd is not None:
        content = json.dumps(report.to_json()).encode()
        os.ftruncate(report_fd, len(content))
        os.pwrite(report_fd, content, 0)
    cause = "" if report.cause is None else f": {plain_text(end_line(report.cause))}"
    result = f"gpujob: job {report.job_id} {report.state}{cause}; its report cannot be written to {run_dir}"
    try:
        path = write_report(run_dir, report)
    except OSError:
        _write_error(result)
        raise
    if path.parent != run_dir:
        _write_error(f"{result}, so it is {path}")


def _write_error(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode("utf-8", "replace"))


def publish_report(
    plan: Plan, report: Report, events: EventLog, report_fd: int | None = None, tracker_wait_s: float = WAIT_S
) -> None:
    """Write and log the report of a job that has ended, save its run history, and end its runs in trackers."""
    manifest = plan.manifest
    attempt_optional("write the report", lambda: save_report(manifest.run_dir, report, report_fd))
    attempt_optional("save the run history", lambda: save_run_history(manifest, report))
    events.write("job ended", state=report.state, items=report.items)
    attempt_optional("end runs of MLflow", lambda: _end_tracked_runs(plan, report, tracker_wait_s))
    log_line(f"Job {report.job_id} {report.state}")
    for line in render_report(report).splitlines():
        log_raw_line(f"    {line}".rstrip())


def _end_tracked_runs(plan: Plan, report: Report, wait_s: float) -> None:
    try:
        ended = end_runs(plan, report, os.environ, time.time(), wait_s)
    except LauncherError as error:
        log_line(f"cannot end runs of MLflow: {error}")
        return
    for run_id in ended:
        log_line(f"The run {run_id} of MLflow is ended: it still counted as running")


def write_diagnoses(
    manifest: Manifest,
    attempt: int,
    hosts: Sequence[str],
    ends: Iterable[tuple[Task, WorkerEnd]],
    show_life: Callable[[], object] = lambda: None,
) -> None:
    """Write the diagnoses that the sidecars have not written, of the first failures; critical workers come first."""
    failures = [end for end in ends if end[1].restart is not None and end[1].reason not in CONSEQUENCES]
    failures.sort(key=lambda end: (not end[0].critical, end[1].time or math.inf))

    def is_missing(end: tuple[Task, WorkerEnd]) -> bool:
        show_life()
        task, ended = end
        node = hosts[task.node_index]
        return not has_failure_diagnosis(manifest.run_dir, task, node, attempt, ended.restart or 0)

    statuses: Mapping[str, NodeStatus] | None = None
    for task, ended in itertools.islice(filter(is_missing, failures), MOST_DIAGNOSES):
        if statuses is None:
            statuses = read_statuses(manifest.run_dir, attempt)
        node = hosts[task.node_index]
        write = functools.partial(_write_diagnosis, manifest, attempt, task, node, ended, statuses.get(node))
        attempt_optional(f"write the diagnosis of {task.worker}", write)


def _write_diagnosis(
    manifest: Manifest, attempt: int, task: Task, node: str, ended: WorkerEnd, status: NodeStatus | None
) -> None:
    """Write the diagnosis of one end. Raises OSError."""
    files = read_run_files(manifest, task, node, attempt, ended.restart or 0)
    situation = NodeSituation(time.time(), status or NodeStatus())
    found = build_failure_diagnosis(files, situation, ended, read_error_patterns())
    write_diagnosis(manifest.run_dir, found, render_diagnosis(found))


class EndOfJob:
    """The work after all tasks have ended."""

    def __init__(self, job: JobRun, job_tasks: JobTasks, sidecars: Sidecars) -> None:
        self._job = job
        self._plan, self._facts, self._time_limit_end = job.plan, job.facts, job.time_limit_end
        self._steps, self._job_state, self._signals = job.steps, job.state, job.signals
        self._job_tasks, self._sidecars = job_tasks, sidecars

    def finish(
        self,
        checklist: LaunchChecklist | None,
        conclude_launch: Callable[[], LaunchChecklist | None],
        copy_status_events: Callable[[], None],
    ) -> int:
        """Finish the job and return its exit status. ``conclude_launch`` completes a launch check that is not final."""
        hurry, job_state = self._is_in_kill_wait, self._job_state
        job_state.have_workers_ended = True
        job_state.publish("completing")
        if hurry:
            run_files.release_reserve(self._facts.run_dir)
            attempt_optional("write a first report", lambda: self._write_first_report(checklist))
        final_values_s = FINAL_VALUES_IN_KILL_WAIT_S if hurry else FINAL_VALUES_S
        self._sidecars.await_final_values(final_values_s, job_state.repeat_writes)
        if checklist is None and not hurry and self._job_tasks.ends:
            checklist = conclude_launch()
        run_files.release_reserve(self._facts.run_dir)
        if not hurry:
            self._write_diagnoses()
        will_requeue = job_state.stop is not None and job_state.stop.requeue and not hurry
        status, report = EXIT_STATUS["UNKNOWN"], None
        try:
            attempt_optional("read the events of the sidecars", copy_status_events)
            report = self._build_and_publish_report(checklist, requeued=will_requeue)
            status = report.exit_status
        except Exception:  # noqa: BLE001 - sidecars and targets must still be removed
            log_line(f"cannot build the report: {traceback.format_exc()}")
        if hurry:
            self._write_diagnoses()  # after the report, with whatever time is left
        job_state.publish("finished")
        self._sidecars.end(hurry=hurry or will_requeue)
        job_state.repeat_writes()
        if will_requeue and (cause := self._find_cancellation()) is not None:
            log_line(f"Not requeueing the job: {cause}")
            will_requeue = False
            status = EXIT_STATUS["CANCELLED"]
            if report is not None:
                self._publish_cancelled(report, cause)
        is_slurm_ending = hurry or self._job_tasks.slurm_end_query.signal_deadline is not None
        if isinstance(self._steps, LocalSteps) or not (will_requeue or (is_slurm_ending and self._may_run_again())):
            attempt_optional("remove the secrets", lambda: remove_secrets(self._facts.run_dir))
        if will_requeue:
            self._requeue(report)
        elif self._job_tasks.slurm_end_query.signal_deadline is not None:
            log_line("Waiting for Slurm to end the job")
            self._await_signal(self._job_tasks.slurm_end_query.signal_deadline)
        return status

    def _find_cancellation(self) -> str | None:
        """Cause of a cancellation after the workers had ended; None if the job is not known to be cancelled.

        Slurm obeys a requeue of a cancelled job, and it would run again. A time limit that comes now prevents nothing.
        """
        number = self._signals.end_signal
        if number is None:
            return None
        external_end = self._steps.query_end()
        if (external_end.reason, external_end.cause) != CANCELLED:
            return None
        text = stop_request_text(self._facts.run_dir, self._facts.attempt)
        return f"{external_end.cause} ({text or signal_text(number, local=False)})"

    def _publish_cancelled(self, report: Report, cause: str) -> None:
        """Replace the report of a job that was to be requeued."""
        stopped = None if report.stopped is None else report.stopped.replace(reason="cancelled", cause=cause)
        end = {"state": "CANCELLED", "exit_status": EXIT_STATUS["CANCELLED"], "requeued": False, "stopped": stopped}
        publish_report(self._plan, report.replace(**end), self._job_state.events, self._job.report_fd, HURRY_S)

    def _may_run_again(self) -> bool:
        """Whether Slurm may requeue the job that it is ending: it has not said that it was cancelled or timed out."""
        external_end = self._steps.query_end()
        return (external_end.reason, external_end.cause) not in LAST_ENDS

    @property
    def _is_in_kill_wait(self) -> bool:
        """Whether KillWait is running: after a signal, or earlier according to Slurm."""
        return self._signals.end_signal is not None or self._job_tasks.slurm_end_query.is_kill_wait_running

    def _write_diagnoses(self) -> None:
        ends, show_life = self._job_tasks.ended_tasks(), self._signals.show_life
        write_diagnoses(self._plan.manifest, self._facts.attempt, self._facts.hosts, ends, show_life)

    def _build_and_publish_report(self, checklist: LaunchChecklist | None, *, requeued: bool) -> Report:
        """Build, write and log the report."""
        report = self._build_report(checklist, requeued=requeued)
        wait_s = HURRY_S if self._is_in_kill_wait else WAIT_S
        publish_report(self._plan, report, self._job_state.events, self._job.report_fd, wait_s)
        return report

    def _write_first_report(self, checklist: LaunchChecklist | None) -> None:
        """Write an early report, in case Slurm kills us before the final values. Skip it if they are there."""
        statuses = read_statuses(self._facts.run_dir, self._facts.attempt)
        if not all(host in statuses and statuses[host].final for host in self._facts.hosts):
            self._write_report(self._build_report(checklist, requeued=False, is_quick=True))

    def _build_report(self, checklist: LaunchChecklist | None, *, requeued: bool, is_quick: bool = False) -> Report:
        hurry, now = self._is_in_kill_wait, time.monotonic()
        if hurry:  # to judge what was read takes as long
            limit_s = max(LEAST_RUNS_S, ((self._job_state.deadline or 0.0) - now) / 2)
        else:
            limit_s = verification_s(self._time_limit_end, time.time())

        def is_late() -> bool:
            self._signals.show_life()
            return time.monotonic() > now + limit_s or (self._is_in_kill_wait and not hurry)

        report = build_report(
            self._facts.run_dir,
            now=time.time(),
            ended=True,
            known=self._job.know(self._job_tasks.ends, self._job_tasks.exit_reason_finder if hurry else None),
            launch=checklist.report() if checklist is not None else None,
            pace=ReportPace(
                is_quick=is_quick,
                out_of_time=lambda: is_late() or hurry,  # no time to read output files while Slurm is ending the job
                out_of_time_for_runs=is_late,
            ),
        )
        return report.replace(requeued=requeued)

    def _requeue(self, report: Report | None) -> None:
        """Requeue the job. Slurm then ends this step; if it ended first, the job would be over."""
        log_line("Requeueing the job")
        self._job_state.events.write("job requeued", attempt=self._facts.attempt)
        problem = self._steps.requeue()
        if problem is None:
            self._await_signal(time.time() + REQUEUE_S)
            return
        log_line(f"The job could not be requeued: {problem}")
        if report is not None:
            failed_report = report.replace(requeued=False)
            attempt_optional("write the report", lambda: self._write_report(failed_report))
        external_end = self._steps.query_end()
        if external_end.ends_all or external_end.is_unanswered:
            return  # a slow Slurm may requeue it after all
        if report is not None:
            attempt_optional("end runs of MLflow", lambda: _end_tracked_runs(self._plan, failed_report, WAIT_S))
        attempt_optional("remove the secrets", lambda: remove_secrets(self._facts.run_dir))

    def _write_report(self, report: Report) -> None:
        save_report(self._facts.run_dir, report, self._job.report_fd)

    def _await_signal(self, until: float) -> None:
        while self._signals.end_signal is None and time.time() < until:
            self._signals.sleep(1.0)


def save_run_history(manifest: Manifest, report: Report) -> None:
    """Save the run history of a completed job, from the statuses of all nodes."""
    if report.state != "COMPLETED" or report.duration_s is None or report.end is None:
        return
    workers = list(merge_workers(read_statuses(manifest.run_dir, report.attempt)).values())
    run = build_run_history(workers, manifest.total_items, report.duration_s, report.end)
    if run is not None:
        write_run_history(manifest.job_name, os.environ, run)
