"""Slurm commands and steps. This module alone changes the cluster.

Commands are argument lists with a timeout, and run in a fixed locale.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.slurm.commands_reader import SlurmUnansweredError, clean_environment, run_reading
from exporter.slurm.queue import is_of_submission
from exporter.slurm.states import ENDS, JOB_ID, array_of, base_state, parse_moment, task_ids
from exporter.workers.slurm_end_notice import (
    TIME_LIMIT,
    SlurmEndNotice,
    has_timed_out,
    parse_oom_kills,
    parse_preemption_end,
    parse_slurm_end_notice,
    parse_time_limit_end,
)
from launcher.errors import SlurmError, SlurmTimeoutError
from launcher.plan.placeholders import nodes_variable
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.steps.batch_script import (
    component_ids,
    component_index,
    sbatch_arguments,
    scrub_environment,
    without_outer_components,
)
from launcher.steps.srun_lines import SIDECARS, sidecar_line, step_file, survey_line, task_line, tasks_by_step
from launcher.steps.steps import (
    ExternalEnd,
    RunningTask,
    open_log,
    run_environment,
    shared_variables,
    step_entries,
    survey_environment,
)

COMMAND_TIMEOUT_S = 30.0
SIGNAL_TIMEOUT_S = 10.0  # for SIGTERM and warnings to many steps, before KillWait
ENDING_TIMEOUT_S = 2.0  # for commands during KillWait
FINAL_STATE_TIMEOUT_S = 10.0  # for sacct, and for scontrol, whose job has ended

NODE_NAME_WAIT_S = 2.0  # wait for the name of a failed node after its failure was reported, during KillWait
ERROR_LOG_POLL_S = 0.1
ORPHANS_POLL_S = 1.0  # between two polls for steps whose srun was killed
MOST_ERROR_BYTES = 256 * 1024  # read from the end of the job's error log for Slurm's last messages

# prefixes of variables that sbatch would read as options, or pass on from a requeued job in which it runs
NOT_SUBMITTED = ("SBATCH_", "SLURM_RESTART_COUNT")

_JOB_ID = re.compile(r"^(\d+)(?:;(\S*))?$", re.MULTILINE)


def run_command(argv: Sequence[str], *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a Slurm command and return its output. Raises SlurmError if it is missing, fails or hangs."""
    if shutil.which(argv[0]) is None:
        raise SlurmError(f"{argv[0]} is not on PATH; load the Slurm module, or use `gpujob run` on this machine")
    done = _run(argv, clean_environment(os.environ), timeout_s)
    if done.returncode != 0:
        raise SlurmError(
            f"{argv[0]} exited with {done.returncode}: {_error_text(done.stderr) or _error_text(done.stdout)}"
        )
    return done.stdout


def _run(argv: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeoutError(f"{argv[0]} did not answer in {timeout_s:g} s") from error


def _error_text(text: str) -> str:
    lines = [re.sub(r"^\w+: error: ", "", line).strip() for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))


def read_kill_wait_s(default: float) -> float:
    """KillWait of the cluster: seconds between SIGTERM and SIGKILL at the end of a job."""
    try:
        text = run_command(["scontrol", "show", "config"], timeout_s=10.0)
    except SlurmError:
        return default
    match = re.search(r"^KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    return float(match[1]) if match else default


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait, here and in the commands that start meanwhile: a job whose id nobody knows stays on hold."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def submit_held(plan: Plan, script: Path) -> tuple[str, str | None]:
    """Submit the script on hold; return the job id, and the cluster if it is another one.

    The run directory carries the job id and must be complete before the job starts. ``release_job`` lets it
    start.
    """
    argv = ["sbatch", "--parsable", "--hold", *sbatch_arguments(plan), str(script)]
    if shutil.which("sbatch") is None:
        run_command(argv)  # raises with a suggestion
    variables = without_outer_components(os.environ, het=False)
    environment = {name: value for name, value in variables.items() if not name.startswith(NOT_SUBMITTED)}
    try:
        done = _run(argv, environment, COMMAND_TIMEOUT_S)
    except SlurmError as error:
        raise SlurmError(
            f"{error}; it may still have submitted the job, on hold. "
            "Find the job with `squeue --me` and cancel it with `scancel`"
        ) from error
    match = _JOB_ID.search(done.stdout)
    if done.returncode != 0 or not match:
        raise SlurmError(
            f"sbatch exited with {done.returncode} and no job was submitted: "
            f'"{_error_text(done.stderr) or done.stdout}"'
            f"\n  {submission_text(plan)}"
        )
    if done.stderr.strip():
        _print_notes(done.stderr.rstrip())
    return match[1], match[2] or None


@functools.cache  # a sweep or pipeline gets the same text for each of its jobs
def _print_notes(text: str) -> None:
    """Print what sbatch said of a job that it accepted: plugins of the site report the limits that they changed."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def submission_text(plan: Plan) -> str:
    """Describe what sbatch was asked for, in two lines with the keys of the job file."""
    node = {
        "nodes": plan.nodes,
        "gpus_per_node": plan.gpus_per_node,
        **({"gpu_type": plan.gpu_type} if plan.gpu_type else {}),
        "cpus_per_node": plan.cpus_per_node,
        **({"memory_per_node": plan.memory_per_node} if plan.memory_per_node else {}),
    }
    job: dict[str, object] = {
        key: value
        for key, value in plan.slurm._asdict().items()
        if value and key not in ("directives", "requeue", "mpi")
    }
    if requeue := plan.slurm.requeue:
        job["requeue"] = ", ".join(key for key in ("preempted", "time_limit") if getattr(requeue, key)) or "never"
    job |= {name: value for name, value in plan.slurm.directives.items() if value is not False}
    lines = ("   ".join(f"{key}: {_value_text(value)}" for key, value in part.items()) for part in (node, job))
    return "\n  ".join(line for line in lines if line)


def _value_text(value: object) -> str:
    if value is None or value is True:
        return "yes"
    return " + ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def release_job(job_id: str, cluster: str | None = None) -> None:
    """Release a held job."""
    run_command(["scontrol", *cluster_option(cluster), "release", job_id])


def cancel_job(job_id: str, cluster: str | None = None) -> None:
    run_command(["scancel", *cluster_option(cluster), job_id])


def cluster_option(cluster: str | None) -> list[str]:
    """Option that addresses another cluster than that of this machine."""
    return [f"--clusters={cluster}"] if cluster else []


def read_final_state(job_id: str, cluster: str | None = None, submitted: float | None = None) -> str | None:
    """Final state of a job: from accounting, else from the controller while it remembers; None if unknown.

    With the time of its submission, the end of another job that had its id before, or has got it since, does not count.
    """
    attempts = ["-X", "-D", "-n", "-P", "-j", job_id, "-o", "Submit,End,State"]
    asked = (
        (["sacct", *cluster_option(cluster), *attempts], _state_in_accounting),
        (["scontrol", *cluster_option(cluster), "show", "job", job_id], _state_of_controller),
    )
    for argv, parse in asked:
        try:
            state = parse(run_reading(argv, clean_environment(os.environ, "%s"), FINAL_STATE_TIMEOUT_S), submitted)
        except SlurmUnansweredError:
            continue
        if state in ENDS:  # accounting learns of an end later than the controller
            return state
    return None


def read_final_states(submitted: Mapping[str, float], cluster: str | None) -> dict[str, str]:
    """Final states of the tasks of arrays that were submitted at these times, by task id, from accounting.

    A task that has not ended is left out, and so are all if accounting does not answer.
    """
    attempts = ["-X", "-D", "-n", "-P", "-j", ",".join(submitted), "-o", "JobID,Submit,End,State"]
    try:
        text = run_reading(
            ["sacct", *cluster_option(cluster), *attempts], clean_environment(os.environ, "%s"), FINAL_STATE_TIMEOUT_S
        )
    except SlurmUnansweredError:
        return {}
    lines: dict[str, list[str]] = {}
    for job_id, line in re.findall(rf"^({JOB_ID})\|(.*)$", text, re.MULTILINE):
        with contextlib.suppress(ValueError):  # not an id that Slurm prints
            for task in task_ids(job_id):  # those that were cancelled while they waited are one line
                lines.setdefault(task, []).append(line)
    states = {task: _state_in_accounting("\n".join(own), submitted.get(array_of(task))) for task, own in lines.items()}
    return {task: state for task, state in states.items() if state is not None and state in ENDS}


def _state_in_accounting(text: str, submitted: float | None) -> str | None:
    """State of the last attempt: a requeue submits the job again when the attempt before it ends."""
    state, since = None, submitted
    for submit, end, word in sorted(re.findall(r"^(.*)\|(.*)\|(.*)$", text, re.MULTILINE)):
        if is_of_submission(parse_moment(submit), 0, since):
            state = base_state(word)
            since = since if submitted is None else parse_moment(end) or since
    return state


def _state_of_controller(text: str, submitted: float | None) -> str | None:
    values = dict(re.findall(r"\b(JobState|SubmitTime|Restarts)=(\S+)", text))
    found, restarts = parse_moment(values.get("SubmitTime", "")), int(values.get("Restarts", 0))
    return values.get("JobState") if is_of_submission(found, restarts, submitted) else None


def signal_steps(steps: Sequence[str], name: str, timeout_s: float) -> None:
    """Send a signal to the tasks of some steps (``job.step``), not via srun, which turns SIGTERM into SIGKILL.

    scancel 22.05 delivers the signal, then reports an invalid job id and exits with 225.
    """
    if not steps:
        return
    try:
        run_command(["scancel", f"--signal={name}", *steps], timeout_s=timeout_s)
    except SlurmError as error:
        if "Invalid job id specified" not in str(error):
            raise


def read_steps(job_ids: Sequence[str]) -> dict[str, str]:
    """Running steps of a job as ``job.step`` -> name, given the ids of its components. Raises SlurmError."""
    argv = ["squeue", "--steps", "-h", "-j", ",".join(job_ids), "-o", "%i|%j"]
    text = run_command(argv, timeout_s=ENDING_TIMEOUT_S)
    return {step: name for step, _, name in (line.partition("|") for line in text.splitlines())}


class SlurmSteps:
    """Runs each task and the sidecars as named steps of this job."""

    has_exact_status = False

    def __init__(self, plan: Plan, facts: RunFacts) -> None:
        self._plan = plan
        self._facts = facts
        own = without_outer_components(os.environ, het=plan.slurm.het is not None)
        self._environment = scrub_environment(own)
        self._job_ids = component_ids(own, facts.job_id)  # Slurm's id of each component of the job
        try:
            self._error_log_start = (facts.run_dir / "log.err").stat().st_size
        except OSError:
            self._error_log_start = 0
        # step names, by rank
        self._step_names = {planned.task.rank: name for name, tasks in tasks_by_step(plan) for planned in tasks}
        self._orphans: set[str] = set()  # names of steps whose srun was killed, which may still run
        self._orphans_poll_at = 0.0
        self._problem = ""
        # from our PATH, since a job file may set another one for its workers
        self._srun = shutil.which("srun") or "srun"

    def update_facts(self, facts: RunFacts) -> None:
        self._facts = facts

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        argv = [self._srun, *sidecar_line(self._plan, self._facts)[1:]]
        environment = {
            **self._environment,
            "GPUJOB_JOB_ID": self._facts.job_id,
            **nodes_variable(self._facts.hosts),
            "GPUJOB_ATTEMPT": str(self._facts.attempt),
            "GPUJOB_START_TIME": repr(self._facts.start),
        }
        return [subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)]

    def start_survey(self, offsets: Sequence[int], round_number: int) -> list[subprocess.Popen[bytes]]:
        argv = [self._srun, *survey_line(self._plan, self._facts)[1:]]
        environment = {**self._environment, **survey_environment(self._facts, offsets, round_number)}
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        return [process]

    def start_program(self, argv: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with open_log(self._facts.run_dir, output) as out:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, start_new_session=True)

    def start_tasks(self, tasks: Sequence[TaskPlan], restart: int) -> list[RunningTask]:
        """Start one step. Its tasks are in the order of its nodes, as in the plan."""
        first = tasks[0]
        environment = run_environment(self._plan, first, self._facts, restart)
        if len(tasks) > 1:
            self._write_step(tasks, restart)
            environment = shared_variables(
                [run_environment(self._plan, planned, self._facts, restart) for planned in tasks]
            )
        argv = task_line(self._plan, self._step_names[first.task.rank], tasks, self._facts, restart)
        argv[0] = self._srun
        process = subprocess.Popen(
            argv, env={**self._environment, **environment}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return [RunningTask(planned, restart, process) for planned in tasks]

    def _write_step(self, tasks: Sequence[TaskPlan], restart: int) -> None:
        """Write the command and environment of each task of a step."""
        entries = step_entries(self._plan, tasks, self._facts, restart)
        run_files.write_json(
            step_file(tasks[0], self._facts, restart),
            {"schema": run_files.RECORD_SCHEMA, "tasks": entries},
            mode=0o600,
        )

    def send_signal(self, running: Sequence[RunningTask], signal_number: int) -> None:
        self._signal(running, signal.Signals(signal_number).name.removeprefix("SIG"))

    def terminate(self, running: Sequence[RunningTask]) -> None:
        self._signal(running, "TERM")

    def kill(self, running: Sequence[RunningTask]) -> None:
        self._signal(running, "KILL")
        for entry in running:
            entry.process.terminate()  # srun answers with SIGKILL to its tasks

    def read_oom_kills(self, running: RunningTask) -> int:
        task, step = running.planned.task, self._step_id(running)
        if step is None:
            return 0
        name = self._step_names[task.rank]
        nodes = {entry.task.node_index for entry in self._plan.tasks if self._step_names[entry.task.rank] == name}
        host = self._facts.hosts[task.node_index]
        return parse_oom_kills(self._read_new_errors(), step, host, is_only_node=len(nodes) == 1)

    def kill_leftovers(self, running: RunningTask) -> int:
        """Note a step whose srun was killed, for ``has_no_leftovers`` to end. Slurm cleans up all other steps."""
        if (running.returncode or 0) < 0:
            self._orphans.add(self._step_names[running.planned.task.rank])
        return 0

    def has_no_leftovers(self, running: RunningTask) -> bool:
        self._end_orphans()
        return self._step_names[running.planned.task.rank] not in self._orphans

    def sidecars_have_no_leftovers(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> bool:
        if any((process.returncode or 0) < 0 for process in sidecars):
            self._orphans.add(SIDECARS)
        self._end_orphans()
        return SIDECARS not in self._orphans

    def _end_orphans(self) -> None:
        """Kill steps without srun that Slurm still lists, and forget those it does not list."""
        if not self._orphans or time.monotonic() < self._orphans_poll_at:
            return
        try:
            listed = read_steps(self._job_ids)
            remaining = {step: name for step, name in listed.items() if name in self._orphans}
            signal_steps(list(remaining), "KILL", ENDING_TIMEOUT_S)
        except SlurmError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                message = f"gpujob: steps without their srun cannot be ended: {error}"
                print(message, file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._orphans &= set(remaining.values())
        self._orphans_poll_at = time.monotonic() + ORPHANS_POLL_S

    def _signal(self, running: Sequence[RunningTask], name: str) -> None:
        ends, steps = name in ("TERM", "KILL"), []
        parts: dict[tuple[subprocess.Popen[bytes], int], list[RunningTask]] = {}  # of each step, by component
        for entry in running:
            component = component_index(self._plan, entry.planned.task.node_index)
            parts.setdefault((entry.process, component), []).append(entry)
        # one record is enough: a step may have hundreds of tasks
        step_ids = [(tasks[0], next(filter(None, map(self._step_id, tasks)), None)) for tasks in parts.values()]
        # the record may not be visible here yet, and terminating srun would kill tasks that should get SIGTERM
        listed = self._steps_by_name() if ends and any(step is None for _, step in step_ids) else {}
        for entry, step in step_ids:
            step = step or listed.get(self._step_names[entry.planned.task.rank])
            if step is not None:
                steps.append(step)
            elif ends:
                entry.process.terminate()  # no sign of a start so far
        try:
            signal_steps(list(dict.fromkeys(steps)), name, ENDING_TIMEOUT_S if name == "KILL" else SIGNAL_TIMEOUT_S)
        except SlurmError as error:
            if ends and shutil.which("scancel") is None:
                for entry in running:
                    entry.process.terminate()
            print(f"gpujob: {error}", file=sys.stderr, flush=True)  # noqa: T201

    def _step_id(self, entry: RunningTask) -> str | None:
        task = entry.planned.task
        stem = run_files.record_name(task.worker, task.rank, self._facts.attempt, entry.restart)
        record = run_files.read_json(self._facts.run_dir / run_files.WORKERS_DIR / f"{stem}.start.json") or {}
        step = record.get("step")
        if not isinstance(step, str):
            return None
        return f"{self._job_ids[component_index(self._plan, task.node_index)]}.{step}"

    def _steps_by_name(self) -> dict[str, str]:
        """Running steps as name -> ``job.step``; empty if Slurm does not answer."""
        try:
            return {name: step for step, name in read_steps(self._job_ids).items()}
        except SlurmError:
            return {}

    def end_sidecars(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> None:
        try:
            steps = read_steps(self._job_ids)
            signal_steps([step for step, name in steps.items() if name == SIDECARS], "TERM", ENDING_TIMEOUT_S)
        except SlurmError:
            for process in sidecars:
                process.terminate()

    def query_end(self) -> ExternalEnd:
        """Read the job's error log, where Slurm's messages precede the signal, else ask the controller.

        A job that is preempted with a grace time is still running: only its steps have been signalled.
        """
        notice = self._await_end_notice()
        if notice.reason is not None:
            return ExternalEnd(True, notice.reason, notice.cause, notice.failed_nodes)
        try:
            text = self._read_job()
        except SlurmError:
            return ExternalEnd(is_unanswered=True, failed_nodes=notice.failed_nodes)
        if has_timed_out(text):  # on a slow node the message follows long after the first signal to a worker
            return ExternalEnd(True, *TIME_LIMIT, notice.failed_nodes)
        if "JobState=RUNNING" not in text:
            return ExternalEnd(ends_all=True, failed_nodes=notice.failed_nodes)  # the message will give the reason
        ends_at = parse_preemption_end(text)
        if ends_at is None:
            return ExternalEnd(failed_nodes=notice.failed_nodes)
        cause = "Slurm: preempted by another job, with a grace time"
        return ExternalEnd(True, "preempted", cause, notice.failed_nodes, grace_ends_at=ends_at)

    def _await_end_notice(self) -> SlurmEndNotice:
        """Read Slurm's messages. The failure of a node comes from the batch step, its name from an srun."""
        end = time.monotonic() + NODE_NAME_WAIT_S
        notice = parse_slurm_end_notice(self._read_new_errors())
        while notice.reason == "node_failure" and not notice.failed_nodes and time.monotonic() < end:
            time.sleep(ERROR_LOG_POLL_S)
            notice = parse_slurm_end_notice(self._read_new_errors())
        return notice

    def read_time_limit_end(self) -> float | None:
        try:
            return parse_time_limit_end(self._read_job())
        except SlurmError:
            return None

    def _read_job(self) -> str:
        """What the controller says of the job. Raises SlurmError."""
        return run_command(["scontrol", "show", "job", self._facts.job_id], timeout_s=ENDING_TIMEOUT_S)

    def requeue(self) -> str | None:
        try:
            run_command(["scontrol", "requeue", self._facts.job_id], timeout_s=SIGNAL_TIMEOUT_S)
        except SlurmError as error:
            return str(error)
        return None

    def _read_new_errors(self) -> str:
        """Text in the error log since this attempt began."""
        try:
            with (self._facts.run_dir / "log.err").open("rb") as source:
                source.seek(max(self._error_log_start, source.seek(0, os.SEEK_END) - MOST_ERROR_BYTES))
                return source.read(MOST_ERROR_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
