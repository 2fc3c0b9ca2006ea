"""End a job whose orchestrator was killed, and write its report.

    python -I -B -m launcher.run.lost_orchestrator RUN_DIR [--local] --status STATUS [--report-fd FD]
                                                   [--silent S --signal N]

STATUS is the wait status of the orchestrator (wait(2)). After S seconds without a sign of life the guard killed it,
either since the job needed an orchestrator (N is 0), or after signal N to the job.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.events import EventLog
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from exporter.contract.report import Report
from exporter.machine.job_processes import find_job_processes, is_wrapper
from exporter.workers.exit_reason import signal_name
from launcher.errors import LauncherError
from launcher.plan.plan import Plan
from launcher.programs.end_leftovers import TASK_VARIABLE, signal_processes, topmost
from launcher.report.inputs import KnownEnds
from launcher.report.report import REPORT_TEXT_FILE, archive, build_report
from launcher.report.state import EXIT_STATUS, VERIFIED_STATES
from launcher.run.end_of_job import publish_report, save_report, write_diagnoses
from launcher.run.job_log import log_line
from launcher.run.job_state import DISK_FULL, OWN_TEARDOWN_S, Stop, attempt_optional, lost_part_cause, write_problem
from launcher.run.orchestrator import load_plan, time_limit_end
from launcher.run.run_records import have_all_runs_ended
from launcher.run.signals import signal_text
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import JobStateRecord, OrchestratorRecord, read_job_state, read_orchestrator
from launcher.rundir.secrets_file import remove_secrets
from launcher.rundir.statuses import read_statuses
from launcher.rundir.targets import TargetFiles
from launcher.steps.batch_script import component_ids, without_outer_components
from launcher.steps.slurm_steps import SIGNAL_TIMEOUT_S, read_steps, signal_steps
from launcher.steps.srun_lines import SIDECARS

FINAL_VALUES_S = 4.0  # wait for the sidecars' final values
LIMIT_MARGIN_S = 2.0  # a signal this long before the time limit is that of the time limit


class LocalLeftoverTasks:
    """Processes on this machine that have the job's run directory in their environment."""

    poll_interval_s = 0.1  # between two calls of `send_signal`

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = os.fsencode(run_dir).decode("utf-8", "replace")  # as environments are read

    def send_signal(self, signal_number: int, *, include_sidecars: bool) -> int:
        """Send a signal to the tasks, and to the sidecars if wanted; 0 only counts (kill(2)). Return how many.

        Each task gets SIGTERM once: many programs treat a second one as "hurry". Wrappers forward theirs, which the
        kernel sent when the orchestrator died.
        """
        task: dict[str, str | None] = {} if include_sidecars else {TASK_VARIABLE: None}
        found = find_job_processes({"GPUJOB_RUN_DIR": self._run_dir, **task})
        if signal_number == signal.SIGTERM and not include_sidecars:
            signal_processes((pid for pid in topmost(found) if not is_wrapper(pid)), signal_number)
            return len(found)
        return signal_processes(found, signal_number)


class SlurmLeftoverTasks:
    """Slurm steps of the job, which are signalled in the same way."""

    poll_interval_s = 1.0

    def __init__(self, job_ids: Sequence[str]) -> None:
        self._job_ids = job_ids  # one per component of the job
        self._problem = ""

    def send_signal(self, signal_number: int, *, include_sidecars: bool) -> int:
        try:
            steps = read_steps(self._job_ids)
            wanted = [
                step
                for step, name in steps.items()
                if not step.endswith((".batch", ".extern")) and (include_sidecars or name != SIDECARS)
            ]
            if signal_number:
                signal_steps(wanted, signal.Signals(signal_number).name.removeprefix("SIG"), SIGNAL_TIMEOUT_S)
        except LauncherError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log_line(f"cannot end the steps of the job: {error}; Slurm ends them with the job")
            return 0
        return len(wanted)


class OrchestratorEnd(NamedTuple):
    """How the orchestrator ended. If it was killed because it did not respond, ``silent_s`` is for how long.

    ``end_signal`` is the signal to the job to which it did not respond, or 0.
    """

    wait_status: int
    silent_s: float | None = None
    end_signal: int = 0

    @property
    def text(self) -> str:
        """Sentence about it."""
        if self.silent_s is not None:
            return f"the orchestrator did not respond for {self.silent_s:.0f} s and was killed"
        if os.WIFSIGNALED(self.wait_status):
            return f"the orchestrator was killed by {signal_name(os.WTERMSIG(self.wait_status))}"
        return f"the orchestrator ended with status {os.WEXITSTATUS(self.wait_status)} before the job finished"

    def stop(self, record: OrchestratorRecord, limit_end: float | None, now: float) -> Stop:
        """Stop of a job that had none before. A signal to end the job decides, else it is the loss."""
        if self.silent_s is not None and self.end_signal:
            signalled_at = now - self.silent_s
            reason = (
                "time_limit" if limit_end is not None and signalled_at >= limit_end - LIMIT_MARGIN_S else "cancelled"
            )
            return Stop(reason, f"{signal_text(self.end_signal, local=record.local)}; {self.text}", signalled_at)
        is_killed = os.WIFSIGNALED(self.wait_status)
        killed_by = signal_name(os.WTERMSIG(self.wait_status)) if is_killed and self.silent_s is None else None
        code = None if is_killed else os.WEXITSTATUS(self.wait_status)
        return Stop(
            "terminated_peer",
            self.text,
            now,
            failed=lost_part_cause("orchestrator", record.host or os.uname().nodename, self.text, killed_by, code),
        )


class LostOrchestrator:
    """Ends the job in place of the orchestrator."""

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        leftovers: LocalLeftoverTasks | SlurmLeftoverTasks,
        end: OrchestratorEnd,
        report_fd: int | None = None,
    ) -> None:
        found = read_orchestrator(run_dir)
        is_local = isinstance(leftovers, LocalLeftoverTasks)
        attempt = 0 if is_local else int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if found is None or found.attempt != attempt:  # it was lost before it had written its own
            found = OrchestratorRecord(attempt=attempt, local=is_local)
        self._record = record = found  # of the one that was lost
        self._plan = plan
        self._run_dir = run_dir
        self._leftovers = leftovers
        self._attempt, self._hosts = record.attempt, record.hosts
        start = record.start
        state = JobStateRecord.of_attempt(run_dir, attempt)
        self._changed_limit_end = state.time_limit_end
        self._warning = None if state.warning is None else state.warning.to_json()
        self._time_limit_end = self._changed_limit_end or (time_limit_end(plan, start) if start is not None else None)
        self._events = EventLog(run_dir / run_files.EVENTS_FILE, record.job_id or job_id_of(run_dir))
        self._end = end
        self._report_fd = report_fd
        self._stop: dict[str, object] = {}
        self._incomplete: str | None = None

    def run(self) -> int:
        """End the job; return its exit status."""
        self._record_itself()
        log_line(f"Stopping the job: {self._end.text}")
        self._archive_earlier_report()
        earlier = read_job_state(self._run_dir, self._attempt).get("stop")
        self._stop = self._end.stop(self._record, self._time_limit_end, time.time()).to_json()
        if isinstance(earlier, dict):
            self._stop = earlier  # a stop that had already begun stays the reason
        self._events.write("orchestrator lost", cause=self._end.text)
        self._publish("completing")
        self._end_tasks()
        self._publish("completing", workers_ended=True)
        self._wait_for(self._have_final_values, FINAL_VALUES_S)
        run_files.release_reserve(self._run_dir)
        status = EXIT_STATUS["UNKNOWN"]
        try:
            status = self._report()
        finally:
            self._publish("finished", workers_ended=True)
            TargetFiles(self._run_dir, self._plan.target_dir).remove()
            self._leftovers.send_signal(signal.SIGTERM, include_sidecars=True)
            if not self._wait_for(
                lambda: not self._leftovers.send_signal(0, include_sidecars=True), OWN_TEARDOWN_S / 2
            ):
                self._leftovers.send_signal(signal.SIGKILL, include_sidecars=True)
            if isinstance(self._leftovers, LocalLeftoverTasks):  # Slurm may requeue the job
                attempt_optional("remove the secrets", lambda: remove_secrets(self._run_dir))
        return status

    def _record_itself(self) -> None:
        """Write that this process orchestrates the job now: without a process that does, a local job has ended."""
        path, pid = self._run_dir / run_files.ORCHESTRATOR_FILE, os.getpid()
        if path.exists():  # else the job has not begun for others, and need not begin
            own = self._record.replace(
                pid=pid,
                start_ticks=read_start_ticks(pid),
                host=os.uname().nodename,
                pid_namespace=read_pid_namespace(),
            )
            attempt_optional(
                f"write {path.name}",
                lambda: run_files.write_json_with_reserve(None, path, own.to_json(), spare=path),
            )

    def _archive_earlier_report(self) -> None:
        """Number the report and statuses of an earlier attempt, if the orchestrator was lost before it did."""
        earlier = Report.read_valid(self._run_dir / run_files.REPORT_FILE)
        if earlier is not None and earlier.attempt < self._attempt:
            for name in (run_files.REPORT_FILE, REPORT_TEXT_FILE, run_files.STATUS_DIR):
                attempt_optional(f"archive {name}", partial(archive, self._run_dir / name, earlier.attempt))

    def _publish(self, phase: str, *, workers_ended: bool = False) -> None:
        def write() -> None:
            try:
                had_room = run_files.write_job_state(
                    str(self._run_dir),
                    phase,
                    self._stop,
                    workers_ended=workers_ended,
                    attempt=self._attempt,
                    time_limit_end=self._changed_limit_end,
                    warning=self._warning,
                )
            except OSError as error:
                self._incomplete = write_problem(error)
                raise
            self._incomplete = self._incomplete if had_room else DISK_FULL

        attempt_optional(f"write {run_files.STATE_FILE}", write)

    def _end_tasks(self) -> None:
        """Send SIGTERM to all tasks, and SIGKILL to those that do not end."""
        asked = self._leftovers.send_signal(signal.SIGTERM, include_sidecars=False)
        if not asked or self._wait_for(self._have_tasks_ended, OWN_TEARDOWN_S):
            return
        log_line("Killing workers that did not end in time")
        self._leftovers.send_signal(signal.SIGKILL, include_sidecars=False)
        self._wait_for(self._have_tasks_ended, OWN_TEARDOWN_S / 4)

    def _have_tasks_ended(self) -> bool:
        """Whether every started run has its exit record, or no task is left."""
        return have_all_runs_ended(self._run_dir, self._attempt) or not self._leftovers.send_signal(
            0, include_sidecars=False
        )

    def _have_final_values(self) -> bool:
        if not self._leftovers.send_signal(0, include_sidecars=True):
            return True
        statuses = read_statuses(self._run_dir, self._attempt)
        return all(status.final for status in statuses.values())

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not (held := condition()) and time.monotonic() < end:
            time.sleep(self._leftovers.poll_interval_s)
        return held

    def _report(self) -> int:
        report = self._build_report()
        attempt_optional("write the report", lambda: save_report(self._run_dir, report, self._report_fd))
        tasks = {task.rank: task for task in self._plan.manifest.tasks}
        ran = [
            (worker.rank, worker.exit) for worker in report.workers if worker.exit and worker.exit.restart is not None
        ]
        ends = [(tasks[rank], end) for rank, end in ran]
        write_diagnoses(self._plan.manifest, self._attempt, self._hosts, ends)
        # rebuilt, so that it refers to the diagnoses
        final_report = self._build_report() if report.state not in VERIFIED_STATES else report
        publish_report(self._plan, final_report, self._events, self._report_fd)
        return final_report.exit_status

    def _build_report(self) -> Report:
        known = KnownEnds(
            job_end=self._time_limit_end,
            orchestrator=self._record,
            job_state={"stop": self._stop, "warning": self._warning},
            elapsed_s=self._record.elapsed_s(),
            incomplete=self._incomplete,
        )
        return build_report(self._run_dir, now=time.time(), ended=True, known=known).replace(requeued=False)


def own_component_ids(plan: Plan) -> tuple[str, ...]:
    """Slurm's ids of the job's components that contain this process."""
    own = without_outer_components(os.environ, het=plan.slurm.het is not None)
    return component_ids(own, own.get("SLURM_JOB_ID", ""))


def main(arguments: list[str]) -> int:
    """End the job of the run directory given as first argument; return its exit status."""
    run_dir = Path(arguments[0]).resolve()
    options = dict(itertools.pairwise(arguments))
    plan, local = load_plan(run_dir), "--local" in arguments
    leftovers = LocalLeftoverTasks(run_dir) if local else SlurmLeftoverTasks(own_component_ids(plan))
    report_fd = int(options["--report-fd"]) if "--report-fd" in options else None
    silent_s = float(options["--silent"]) if "--silent" in options else None
    end = OrchestratorEnd(int(options["--status"]), silent_s, int(options.get("--signal", 0)))
    return LostOrchestrator(plan, run_dir, leftovers, end, report_fd).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
