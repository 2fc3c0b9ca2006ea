"""End a job whose orchestrator was killed, and write its report.

    python -I -B -m launcher.run.lost_orchestrator RUN_DIR [--local] --status STATUS --since TIME

STATUS is the wait status of the orchestrator (wait(2)), TIME its start.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.events import EventLog
from exporter.contract.report import Report
from exporter.machine.job_processes import find_job_processes
from exporter.workers.exit_reason import signal_name
from launcher.errors import LauncherError
from launcher.plan.plan import Plan
from launcher.programs.end_leftovers import TASK_VARIABLE, signal_processes
from launcher.report.inputs import KnownEnds
from launcher.report.report import build_report, write_report
from launcher.report.state import EXIT_STATUS, VERIFIED_STATES
from launcher.run.end_of_job import publish_report, write_diagnoses
from launcher.run.job_log import log_line
from launcher.run.job_state import OWN_TEARDOWN_S, Stop, attempt_optional, lost_part_cause
from launcher.run.orchestrator import load_plan, time_limit_end
from launcher.run.run_records import have_all_runs_ended
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import OrchestratorRecord, read_orchestrator
from launcher.rundir.secrets_file import remove_secrets
from launcher.rundir.statuses import read_statuses
from launcher.rundir.targets import TargetFiles
from launcher.steps.batch_script import component_ids, without_outer_components
from launcher.steps.slurm_steps import SIGNAL_TIMEOUT_S, read_steps, signal_steps
from launcher.steps.srun_lines import SIDECARS

FINAL_VALUES_S = 4.0  # wait for the sidecars' final values


class LocalLeftoverTasks:
    """Processes on this machine that have the job's run directory in their environment."""

    poll_interval_s = 0.1  # between two calls of `send_signal`

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = str(run_dir)

    def send_signal(self, signal_number: int, *, include_sidecars: bool) -> int:
        """Send a signal to the tasks, and to the sidecars if wanted; 0 only counts (kill(2)). Return how many."""
        task: dict[str, str | None] = {} if include_sidecars else {TASK_VARIABLE: None}
        return signal_processes(find_job_processes({"GPUJOB_RUN_DIR": self._run_dir, **task}), signal_number)


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


def orchestrator_end_text(wait_status: int) -> str:
    """Describe how the orchestrator ended."""
    if os.WIFSIGNALED(wait_status):
        return f"the orchestrator was killed by {signal_name(os.WTERMSIG(wait_status))}"
    return f"the orchestrator ended with status {os.WEXITSTATUS(wait_status)} before the job finished"


class LostOrchestrator:
    """Ends the job in place of the orchestrator."""

    def __init__(
        self, plan: Plan, run_dir: Path, leftovers: LocalLeftoverTasks | SlurmLeftoverTasks, wait_status: int
    ) -> None:
        record = read_orchestrator(run_dir) or OrchestratorRecord()
        self._plan = plan
        self._run_dir = run_dir
        self._leftovers = leftovers
        self._attempt, self._host, self._hosts = record.attempt, record.host, record.hosts
        start = record.start
        self._time_limit_end = time_limit_end(plan, start, local=record.local) if start is not None else None
        self._events = EventLog(run_dir / run_files.EVENTS_FILE, record.job_id or job_id_of(run_dir))
        self._wait_status = wait_status
        self._stop: dict[str, object] = {}

    def run(self, since: float) -> int:
        """End the job; return its exit status. ``since`` is the start of the orchestrator."""
        cause, now = orchestrator_end_text(self._wait_status), time.time()
        log_line(f"Stopping the job: {cause}")
        state = run_files.read_json(self._run_dir / run_files.STATE_FILE) or {}
        written_at, earlier = state.get("time"), state.get("stop")
        killed_by = signal_name(os.WTERMSIG(self._wait_status)) if os.WIFSIGNALED(self._wait_status) else None
        code = None if killed_by else os.WEXITSTATUS(self._wait_status)
        failed = lost_part_cause("orchestrator", self._host, cause, killed_by, code)
        self._stop = Stop("terminated_peer", cause, now, failed=failed).to_json()
        if isinstance(earlier, dict) and isinstance(written_at, float | int) and written_at >= since:
            self._stop = earlier  # a stop that had already begun stays the reason
        self._events.write("orchestrator lost", cause=cause)
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

    def _publish(self, phase: str, *, workers_ended: bool = False) -> None:
        attempt_optional(
            f"write {run_files.STATE_FILE}",
            lambda: run_files.write_job_state(str(self._run_dir), phase, self._stop, workers_ended=workers_ended),
        )

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
        attempt_optional("write the report", lambda: write_report(self._run_dir, report))
        tasks = {task.rank: task for task in self._plan.manifest.tasks}
        ends = [(tasks[worker.rank], worker.exit) for worker in report.workers if worker.exit is not None]
        write_diagnoses(self._plan.manifest, self._attempt, self._hosts, ends)
        # rebuilt, so that it refers to the diagnoses
        final_report = self._build_report() if report.state not in VERIFIED_STATES else report
        publish_report(self._plan.manifest, final_report, self._events)
        return final_report.exit_status

    def _build_report(self) -> Report:
        known = KnownEnds(job_end=self._time_limit_end)
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
    return LostOrchestrator(plan, run_dir, leftovers, int(options["--status"])).run(float(options["--since"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
