"""Orchestrator: start sidecars and tasks, watch them, and end the job with a report.

    python -I -m launcher.run.orchestrator RUN_DIR [--local] [--guard PID --signs FD --progress-fd FD] [--report-fd FD]

It is one loop on one thread. A signal only sets a flag and wakes the loop. Every end of the job uses the same
teardown, with one deadline. If the orchestrator is killed, ``launcher.guard`` ends the job.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.manifest import read_manifest
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from exporter.contract.records import RecordError
from exporter.contract.report import Report
from exporter.machine.own_process import GarbageCollection, limit_reserved_memory
from launcher.guard import STARTED
from launcher.plan.placeholders import fill_template
from launcher.plan.plan import BENCHMARK, PLAN_FILE, Plan, RunFacts, parse_plan
from launcher.programs.environment import remove_coerced_locale
from launcher.report.report import REPORT_TEXT_FILE, archive
from launcher.run.before.nodes_survey import PortReservation, needs_survey, run_node_survey
from launcher.run.before.resume import find_checkpoint
from launcher.run.end_of_job import EndOfJob
from launcher.run.job_log import access_lines, log_line, log_raw_line, place_lines
from launcher.run.job_state import JobRun, JobState, attempt_optional
from launcher.run.launch_check import JobLaunchCheck, LaunchChecklist, render_launch_checklist
from launcher.run.sidecars import Sidecars
from launcher.run.signals import OrchestratorSignals
from launcher.run.stages import TICK_S, ReadinessState, Stages
from launcher.run.status_events import StatusEvents
from launcher.run.stop_reasons import StopReasons
from launcher.run.tasks import JobTasks
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import OrchestratorRecord, read_report_elsewhere
from launcher.rundir.output_locks import OutputInUseError, OutputLocks
from launcher.rundir.statuses import read_statuses
from launcher.rundir.trust import foreign_owner
from launcher.steps.batch_script import allocated_nodes, without_outer_components
from launcher.steps.hostlist import parse_hostlist
from launcher.steps.local_steps import LOOPBACK, LocalSteps, die_with_parent, local_hosts
from launcher.steps.slurm_steps import SlurmSteps
from launcher.steps.steps import Steps
from launcher.words import count_text

OUTPUT_WAIT_S = 5.0  # for another job that writes the same files: it may just be ending
_NUMBERS = ("--guard", "--signs", "--progress-fd", "--report-fd")
STATUSES_INTERVAL_S = 5.0  # between two reads of the sidecars' statuses; they are written at this interval


class Orchestrator:
    """Runs a plan, with local steps or those of Slurm."""

    def __init__(self, job: JobRun, reservation: PortReservation) -> None:
        plan, facts, steps, signals = job.plan, job.facts, job.steps, job.signals
        self._job, self._job_state = job, job.state
        self._plan, self._facts, self._signals = plan, facts, signals
        self._reservation = reservation
        self._job_tasks = JobTasks(job)
        self._sidecars = Sidecars(plan, facts, steps, signals.sleep, lambda: signals.end_signal is not None)
        self._readiness = ReadinessState(plan, facts, steps)
        self._stages = Stages(plan, facts, self._readiness)
        self._stop_reasons = StopReasons(job, self._job_tasks, self._stages)
        self._launch_check = JobLaunchCheck(plan, facts)
        self._checklist: LaunchChecklist | None = None
        self._is_launch_check_due = True
        self._status_events = StatusEvents(self._job_state.events, plan.manifest.total_items)
        self._next_statuses_at = 0.0
        self._output_locks = OutputLocks()
        self._was_ready = False
        self._has_logged_access = False

    # -- main loop -------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job; return its exit status."""
        attempt_optional("reserve disk space", lambda: run_files.make_reserve(self._facts.run_dir))
        self._archive_earlier_report()
        self._job_state.events.write("job started", hosts=list(self._facts.hosts), attempt=self._facts.attempt)
        self._job_state.publish("launching")
        for line in place_lines(self._plan, self._facts):
            log_line(line)
        try:
            self._lock_outputs()
            if self._job_state.stop is None:
                self._write_templates()
                self._sidecars.start()
            self._run_until_done()
        except Exception as error:  # noqa: BLE001 - a bug of ours must not leave the job running
            log_line(f"internal error: {traceback.format_exc()}")
            self._readiness.end()
            cause = f"internal error of the orchestrator: {type(error).__name__}: {error}"
            self._job_state.begin_stop("cancelled", cause)
            self._run_until_done()
        self._readiness.end()
        self._reservation.release()
        self._stop_reasons.handle_end_signal()
        job = self._job._replace(time_limit_end=self._stop_reasons.time_limit_end)
        end = EndOfJob(job, self._job_tasks, self._sidecars)
        status = end.finish(self._checklist, self._conclude_launch, self._copy_status_events)
        self._output_locks.release()
        return status

    def _lock_outputs(self) -> None:
        """Stop the job before anything starts if another running job writes the same files."""
        end = time.monotonic() + OUTPUT_WAIT_S
        while True:
            try:
                return self._output_locks.acquire(self._plan, self._facts.job_id, os.environ)
            except OutputInUseError as error:
                if time.monotonic() >= end or self._signals.end_signal is not None:
                    host = self._facts.hosts[0]
                    failed = {"worker": "the output", "rank": None, "node": host, "reason": "launch_failed"}
                    self._job_state.begin_stop(
                        "launch_failed", str(error), {"failed": {**failed, "evidence": [str(error)]}}
                    )
                    return None
            self._signals.sleep(TICK_S)

    def _archive_earlier_report(self) -> None:
        """Number the report and statuses of an earlier attempt: ``report_a0.json``."""
        earlier, run_dir = self._facts.attempt - 1, self._facts.run_dir
        here = Report.read_valid(run_dir / run_files.REPORT_FILE)
        last = here
        with contextlib.suppress(RecordError):  # of a newer version
            last = here or read_report_elsewhere(run_dir)
        if earlier >= 0 and (last is None or last.attempt < earlier):
            log_line(f"Attempt {earlier} left no report: its batch node failed, or it was killed")
            self._job_state.events.write("attempt without report", earlier=earlier)
        # else the sidecars of this attempt would overwrite the earlier statuses
        statuses = (run_files.STATUS_DIR,) if earlier >= 0 else ()
        number = here.attempt if here is not None else max(0, earlier)  # one in between may have ended before this step
        for name in (run_files.REPORT_FILE, REPORT_TEXT_FILE, *statuses):
            attempt_optional(f"archive {name}", functools.partial(archive, run_dir / name, number))

    def _write_templates(self) -> None:
        """Write the files that services read, with placeholders substituted. Raises OSError: the job needs them."""
        for name, text in self._plan.templates.items():
            path = self._facts.run_dir / name
            path.parent.mkdir(run_files.FOLDER_MODE, parents=True, exist_ok=True)
            path.touch(0o600)  # may contain keys
            path.write_text(fill_template(self._plan, text, self._facts), encoding="utf-8", errors="surrogateescape")

    def _run_until_done(self) -> None:
        job_state, job_tasks, garbage = self._job_state, self._job_tasks, GarbageCollection()
        while job_tasks.busy or (job_state.stop is None and self._stages.remaining_tasks):
            self._stop_reasons.handle_signals()
            self._begin_stages()
            self._update_phase()
            self._sidecars.maintain(may_restart=job_state.stop is None)
            if time.monotonic() >= self._next_statuses_at:
                attempt_optional("read the events of the sidecars", self._copy_status_events)
                job_state.repeat_writes()
                self._watch_guard()
                self._correct_silence()
                garbage.poll()
            if self._is_launch_check_due and job_state.stop is None:
                self._is_launch_check_due = False  # a check that fails with an exception is not repeated
                attempt_optional(
                    "check the launch", lambda: self._report_launch(self._launch_check.poll(self._job.elapsed_s))
                )
            job_tasks.reap()
            job_tasks.handle_task_groups()
            self._stop_reasons.poll()
            job_tasks.terminate_if_due()
            if self._signals.is_kill_requested:
                job_state.expire_deadline()
            if not job_tasks.kill_at_deadline():
                log_line(f"Leaving {count_text(len(job_tasks.running), 'worker')} running")
                return
            self._signals.sleep(TICK_S)

    # -- guard -----------------------------------------------------------------------------------

    def _watch_guard(self) -> None:
        if self._signals.continue_guard():
            log_line("The guard of the orchestrator was stopped (SIGSTOP); continuing it")
            self._job_state.events.write("guard continued")

    def _correct_silence(self) -> None:
        """Report that this process responds, if it was said not to, also if that was written only afterwards."""
        since = self._job_state.clear_silence()
        if since is not None:
            silent_s = max(0.0, time.time() - since)
            log_line(f"The orchestrator responds again after {silent_s:.0f} s: it was stopped, or waited in the kernel")
            self._job_state.events.write("orchestrator responds", silent_s=round(silent_s, 1))

    # -- stages ----------------------------------------------------------------------------------

    def _begin_stages(self) -> None:
        """Start the tasks of stages that may start."""
        while self._job_state.stop is None and self._signals.end_signal is None:
            self._poll_readiness()
            tasks = self._stages.advance()
            if not tasks:
                break
            if len({planned.stage for planned in self._plan.tasks}) > 1:
                self._job_state.events.write("stage started", stage=tasks[0].stage)
            self._job_tasks.start(tasks)
        if self._job_state.stop is not None:
            self._readiness.end()
            return
        if not self._stages.remaining_tasks or {planned.stage for planned in self._stages.remaining_tasks} == {
            BENCHMARK
        }:
            self._log_access_lines()
        if self._stages.is_overdue():
            cause, failed, lines = self._stages.describe_missing_services(self._job_tasks.restarts)
            self._job_state.begin_stop("launch_failed", cause, {"failed": failed})
            for line in lines:
                log_raw_line(f"    {line}".rstrip())

    def _poll_readiness(self) -> None:
        self._readiness.poll()
        if not self._readiness.is_polled or self._readiness.ready == self._was_ready:
            return
        self._was_ready = self._readiness.ready
        waiting = self._readiness.found.waiting if self._readiness.found is not None else None
        self._job_state.events.write("ready" if self._was_ready else "not ready", waiting=waiting)
        log_line("The job is ready" if self._was_ready else f"The job is no longer ready: waiting for {waiting}")

    def _log_access_lines(self) -> None:
        if not self._has_logged_access:
            self._has_logged_access = True
            for line in access_lines(self._plan, self._facts, local=self._facts.is_local):
                log_line(line)

    def _update_phase(self) -> None:
        """Enter phase ``running`` when all tasks have started and all services are ready."""
        job_state = self._job_state
        if (
            job_state.phase != "launching"
            or job_state.stop is not None
            or self._stages.remaining_tasks
            or not self._readiness.ready
        ):
            return
        if self._job_tasks.have_started():
            self._reservation.release()  # ports not yet in use remain claimed by their wrappers
            job_state.publish("running")
            log_line("All workers are up")

    # -- sidecars and launch check ---------------------------------------------------------------

    def _copy_status_events(self) -> None:
        """Record new events of the sidecars."""
        self._status_events.copy_new_events(read_statuses(self._facts.run_dir, self._facts.attempt), log_line)
        self._next_statuses_at = time.monotonic() + STATUSES_INTERVAL_S

    def _report_launch(self, checklist: LaunchChecklist | None, title: str = "Launch verification") -> None:
        """Log and record the result of the launch check; None means that it is not final."""
        if checklist is None:
            self._is_launch_check_due = True
            return
        if not checklist.is_verified and (problem := self._job_state.find_why_incomplete()):
            log_line(f"The launch cannot be checked: {problem}")
            return
        self._checklist = checklist
        log_line(title)
        for line in render_launch_checklist(checklist):
            log_raw_line(f"    {line}".rstrip())
        verified = "launch verified" if checklist.is_verified else "launch not verified"
        self._job_state.events.write(verified, **checklist.report().to_json())

    def _conclude_launch(self) -> LaunchChecklist | None:
        title = "Launch verification, as last seen before the job ended"
        attempt_optional(
            "check the launch", lambda: self._report_launch(self._launch_check.conclude(self._job.elapsed_s), title)
        )
        return self._checklist


def load_plan(run_dir: Path) -> Plan:
    """Read the plan of a run directory, or exit."""
    body = run_files.read_json(run_dir / PLAN_FILE)
    if body is None:
        sys.exit(f"gpujob: {run_dir / PLAN_FILE} cannot be read: is this a run directory?")
    return parse_plan(body, read_manifest(run_dir))


def locate_job(plan: Plan, run_dir: Path, start: float, *, local: bool) -> tuple[RunFacts, Steps]:
    """Return the facts of the job on this machine, and its steps."""
    if local:
        hosts = local_hosts(plan, socket.gethostname())
        facts = RunFacts(job_id_of(run_dir), run_dir, hosts, 0, start, (LOOPBACK,) * len(hosts))
        return facts, LocalSteps(plan, facts)
    own = without_outer_components(os.environ, het=plan.slurm.het is not None)
    hosts = parse_hostlist(allocated_nodes(own) or "")
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    facts = RunFacts(job_id_of(run_dir), run_dir, hosts, attempt, start)
    if len(hosts) < plan.nodes:
        sys.exit(f"gpujob: the job has {len(hosts)} nodes ({', '.join(hosts)}), but the plan needs {plan.nodes}")
    return facts, SlurmSteps(plan, facts)


def write_orchestrator_record(facts: RunFacts, job_state: JobState, *, local: bool) -> OrchestratorRecord:
    """Write which process orchestrates the job, and the facts of the job. A full disk costs only the file."""
    record = OrchestratorRecord(
        job_id=facts.job_id,
        pid=os.getpid(),
        start_ticks=read_start_ticks(os.getpid()),
        host=socket.gethostname(),
        pid_namespace=read_pid_namespace(),
        hosts=facts.hosts,
        attempt=facts.attempt,
        start=facts.start,
        local=local,
        addresses=facts.addresses,
        port_offset=facts.port_offset,
    )
    path = facts.run_dir / run_files.ORCHESTRATOR_FILE
    job_state.write(path.name, lambda: run_files.write_json_with_reserve(None, path, record.to_json(), spare=path))
    return record


def time_limit_end(plan: Plan, start: float) -> float | None:
    """End of the time limit in epoch seconds: from Slurm, else from the plan; None without a limit."""
    limit, job_end = plan.manifest.time_limit_s, os.environ.get("SLURM_JOB_END_TIME", "")
    return float(job_end) if job_end.isdigit() else (start + limit if limit else None)


def main(arguments: list[str]) -> None:
    """Run the job of the run directory given as first argument."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -I -m launcher.run.orchestrator RUN_DIR [--local] [--guard PID --signs DESCRIPTOR]")
    given = {name: int(value) for name, value in itertools.pairwise(arguments) if name in _NUMBERS}
    guard, signs, progress_fd = (given.get(name) for name in ("--guard", "--signs", "--progress-fd"))
    if guard is not None:
        die_with_parent(guard)()
    if signs is not None:
        os.set_inheritable(signs, False)
    limit_reserved_memory()
    remove_coerced_locale()
    run_dir = Path(arguments[0]).resolve()
    if problem := foreign_owner(run_dir, run_dir / PLAN_FILE):  # somebody may have put another one in its place
        sys.exit(f"gpujob: {run_dir / PLAN_FILE}: is not used: {problem}")
    plan, start, began, local = load_plan(run_dir), time.time(), time.monotonic(), "--local" in arguments
    (run_dir / run_files.WORKERS_DIR).mkdir(run_files.FOLDER_MODE, exist_ok=True)
    facts, steps = locate_job(plan, run_dir, start, local=local)
    signals = OrchestratorSignals(guard, signs)
    job_state = JobState(facts, plan.kill_wait_s, signals, progress_fd)
    record = write_orchestrator_record(facts, job_state, local=local)
    if progress_fd is not None:
        os.eventfd_write(progress_fd, STARTED)
    signals.install_handlers()
    reservation = PortReservation()
    if needs_survey(plan):
        facts, reservation = run_node_survey(plan, facts, steps, signals)
        steps.update_facts(facts)
        record = write_orchestrator_record(facts, job_state, local=local)
    if checkpoint := find_checkpoint(plan, facts, signals.is_ending):
        facts = dataclasses.replace(facts, checkpoint=checkpoint)
        steps.update_facts(facts)
    limit = time_limit_end(plan, start)
    job = JobRun(plan, facts, steps, job_state, signals, limit, record, began, given.get("--report-fd"))
    status = Orchestrator(job, reservation).run()
    signals.continue_guard(0.0)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
