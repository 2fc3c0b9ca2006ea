"""Interface for starting and ending processes, as Slurm steps or on this machine."""

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.python_flags import ISOLATED
from exporter.logs.log_files_reader import run_suffix
from launcher.plan.container import container_environment, container_worker_argv, container_wrapper_argv
from launcher.plan.placeholders import DEFAULT_VARIABLES, nodes_variable, task_argv, task_environment
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.rundir.secrets_file import read_secrets

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Isolated, so that a user's folder `launcher` or `exporter` is not imported instead of ours. Without bytecode, since
# a user's file size limit could leave a truncated file in the installation.
PYTHON_FLAGS = (*ISOLATED, "-B", "-m")


@dataclass
class RunningTask:
    """One run of a task, with its process here: srun, or the wrapper itself.

    Tasks of one step share a process.
    """

    planned: TaskPlan
    restart: int
    process: subprocess.Popen[bytes]

    @property
    def returncode(self) -> int | None:
        """Exit status of the process, or None while it runs; negative for a signal."""
        return self.process.poll()


@dataclass(frozen=True)
class ExternalEnd:
    """Whether and why Slurm is ending the whole job."""

    ends_all: bool = False
    reason: str | None = None  # an exit reason
    cause: str | None = None
    failed_nodes: tuple[str, ...] = ()
    is_unanswered: bool = False  # whether Slurm did not answer, so that it may be ending the job
    # End of the grace time in epoch seconds. Slurm signals the batch step then; its end before that would count as a
    # failure.
    grace_ends_at: float | None = None

    @property
    def may_end_all(self) -> bool:
        """Whether Slurm ends, or may be ending, all processes."""
        return self.ends_all or self.is_unanswered


class Steps(Protocol):
    """What the orchestrator needs from Slurm or this machine."""

    has_exact_status: bool  # whether a status is the task's own; srun returns 0 for a task on a failed node

    def update_facts(self, facts: RunFacts) -> None:
        """Use these addresses and ports for everything started from now on."""

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        """Start one sidecar per node, under a supervisor."""

    def start_survey(self, offsets: Sequence[int], round_number: int) -> list[subprocess.Popen[bytes]]:
        """Start ``node_facts`` on each node for this round of the survey, with these port offsets.

        Standard output is a pipe, with the line ``DONE_LINE`` of ``launcher.run.before.node_facts`` from each node.
        """

    def start_program(self, argv: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a gpujob program next to the orchestrator, and append its standard output to ``output``."""

    def start_tasks(self, tasks: Sequence[TaskPlan], restart: int) -> list[RunningTask]:
        """Start the tasks of one step, each under its wrapper. Raises OSError."""

    def send_signal(self, running: Sequence[RunningTask], signal_number: int) -> None:
        """Send a signal, such as SIGUSR1, to the tasks."""

    def terminate(self, running: Sequence[RunningTask]) -> None:
        """Send SIGTERM to all these tasks together."""

    def kill(self, running: Sequence[RunningTask]) -> None:
        """Send SIGKILL to the tasks and all their processes."""

    def read_oom_kills(self, running: RunningTask) -> int:
        """Kills for lack of memory that Slurm reports of the step of a finished task, on the task's node."""

    def kill_leftovers(self, running: RunningTask) -> int:
        """Kill processes that a finished task left behind. Return how many it had put in the background."""

    def has_no_leftovers(self, running: RunningTask) -> bool:
        """Whether a swept task has no process left; kill any that remain. Call it until it is true."""

    def sidecars_have_no_leftovers(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Whether ended sidecars have no process left; kill any that remain."""

    def end_sidecars(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> None:
        """Send SIGTERM to the sidecars."""

    def query_end(self) -> ExternalEnd:
        """Return what Slurm reports about the end of the job."""

    def read_time_limit_end(self) -> float | None:
        """When the time limit of the job ends now, epoch seconds: it may have been changed. None if unknown."""

    def requeue(self) -> str | None:
        """Requeue the job, which ends it here. Return the problem, or None."""


def wrapper_argv(
    plan: Plan,
    planned: TaskPlan,
    facts: RunFacts,
    restart: int,
    *,
    first_gpu: int | None = None,
    step_file: Path | None = None,
) -> list[str]:
    """Command that starts one task under its wrapper.

    ``first_gpu`` is the first GPU of the task's virtual node, and restricts the task to its own GPUs. Without
    it, a task with all GPUs of a node sees those that Slurm shows it. ``step_file`` identifies the tasks of a
    shared step.
    """
    task = planned.task
    argv = [*_wrapper_prefix(plan, planned), "--run-dir", str(facts.run_dir), "--worker", task.worker]
    argv += ["--rank", str(task.rank), "--attempt", str(facts.attempt), "--restart", str(restart)]
    if first_gpu is not None:  # on this machine, where no Slurm kills what is left
        argv += ["--kill-wait", f"{plan.kill_wait_s:g}"]
    if planned.service:
        argv += ["--service", "1"]
    if planned.ports and step_file is None:
        argv += ["--ports", claimed_ports(planned, facts)]
    if step_file is not None:
        argv += ["--step-file", str(step_file)]
    else:
        for stream, name in log_files(planned, facts, restart).items():
            argv += [f"--{stream}", name]
        if plan.gpus_per_node and sees_planned_gpus_only(planned, first_gpu):
            argv += ["--gpus", task_gpu_positions(planned, first_gpu)]
    return [*argv, "--", *worker_argv(plan, planned, facts)]


def claimed_ports(planned: TaskPlan, facts: RunFacts) -> str:
    """Ports of a task for its wrapper: ``6100,7200``."""
    return ",".join(str(port + facts.port_offset) for port in sorted(planned.ports.values()))


def sees_planned_gpus_only(planned: TaskPlan, first_gpu: int | None = None) -> bool:
    """Whether a task on a node with GPUs sees only its planned ones."""
    return planned.narrowed or not planned.task.gpus or first_gpu is not None


def task_gpu_positions(planned: TaskPlan, first_gpu: int | None = None) -> str:
    """Positions of a task's GPUs among those of the job: ``0,1``."""
    return ",".join(str((first_gpu or 0) + gpu) for gpu in planned.visible or planned.task.gpus)


def _wrapper_prefix(plan: Plan, planned: TaskPlan) -> list[str]:
    if planned.contained and (argv := container_wrapper_argv(plan, planned)):
        return argv
    return [plan.python, *PYTHON_FLAGS, "launcher.programs.wrapper"]


def worker_argv(plan: Plan, planned: TaskPlan, facts: RunFacts) -> list[str]:
    """Command that a wrapper starts: the task, or the runtime of its container."""
    argv = task_argv(plan, planned, facts)
    if planned.contained:
        return container_worker_argv(plan, planned, facts, argv)
    return argv


def step_entries(plan: Plan, tasks: Iterable[TaskPlan], facts: RunFacts, restart: int) -> list[dict[str, object]]:
    """Describe the tasks of one step, by their position in it (``SLURM_PROCID``).

    Each entry has only the variables in which the tasks differ; the step's environment has the others.
    """
    tasks = list(tasks)
    environments = [run_environment(plan, planned, facts, restart) for planned in tasks]
    common = shared_variables(environments)
    entries = []
    for planned, environment in zip(tasks, environments, strict=True):
        own = {name: value for name, value in environment.items() if name not in common}
        entry: dict[str, object] = {
            "worker": planned.task.worker,
            "rank": planned.task.rank,
            "env": own,
            "node": facts.hosts[planned.task.node_index],
            "argv": worker_argv(plan, planned, facts),
            **log_files(planned, facts, restart),
        }
        if plan.gpus_per_node and sees_planned_gpus_only(planned):
            entry["gpus"] = task_gpu_positions(planned)
        if planned.ports:
            entry["ports"] = claimed_ports(planned, facts)
        entries.append(entry)
    return entries


def shared_variables(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Variables with the same value in all environments."""
    first, *others = environments
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def sidecar_argv(plan: Plan, facts: RunFacts) -> list[str]:
    """Command that starts a sidecar under its supervisor, which ends leftover processes on the node."""
    python = [plan.python, *PYTHON_FLAGS]
    return [
        *python,
        "launcher.programs.supervisor",
        *[*python, "launcher.programs.end_leftovers", str(facts.run_dir)],
        "--",
        *python,
        "exporter",
        "sidecar",
        "--run-dir",
        str(facts.run_dir),
    ]


def survey_argv(plan: Plan, facts: RunFacts) -> list[str]:
    """Command for the survey of one node, to be completed by its name."""
    return [plan.python, *PYTHON_FLAGS, "launcher.run.before.node_facts", "--run-dir", str(facts.run_dir), "--node"]


def survey_environment(facts: RunFacts, offsets: Sequence[int], round_number: int) -> dict[str, str]:
    """Variables for ``launcher.run.before.node_facts``."""
    return {
        "GPUJOB_ATTEMPT": str(facts.attempt),
        **nodes_variable(facts.hosts),
        "GPUJOB_PORT_OFFSETS": ",".join(map(str, offsets)),
        "GPUJOB_SURVEY_ROUND": str(round_number),
    }


def run_environment(plan: Plan, planned: TaskPlan, facts: RunFacts, restart: int) -> dict[str, str]:
    """Variables for a run of a task besides the user's environment. Raises LauncherError without its secrets.

    ``GPUJOB_FOM_URL`` accepts figures of merit with ``GPUJOB_TOKEN``; empty while the node's sidecar does not listen.
    ``GPUJOB_RESUME`` is 1 if an earlier attempt may have left checkpoints.
    """
    node = facts.hosts[planned.task.node_index]
    sidecar = run_files.read_json(facts.run_dir / run_files.SIDECARS_DIR / f"{node}.json") or {}
    url = sidecar.get("fom") if sidecar.get("attempt") == facts.attempt else None
    resume = {"GPUJOB_RESUME": "1"} if facts.attempt else {}
    token = run_files.read_token(facts.run_dir) if url else None
    ours = {"GPUJOB_FOM_URL": str(url or ""), "GPUJOB_TOKEN": token or "", **resume}
    kept = {name: os.environ[name] for name in DEFAULT_VARIABLES if name in os.environ and name not in planned.env}
    secrets = read_secrets(facts.run_dir, plan.secrets)
    variables = {**ours, **secrets, **task_environment(plan, planned, facts, restart), **kept}
    return container_environment(plan, planned, variables)


def log_files(planned: TaskPlan, facts: RunFacts, restart: int) -> dict[str, str]:
    """Names of the logs of a run's ``stdout`` and ``stderr``, which its wrapper opens."""
    node, run = facts.hosts[planned.task.node_index], run_suffix(facts.attempt, restart)
    names = (name.replace("{node}", node).replace("{run}", run) for name in planned.task.logs)
    return dict(zip(("stdout", "stderr"), names, strict=False))


def open_log(run_dir: Path, name: str | Path) -> IO[bytes]:
    """Open a log in the run directory for more lines: on a full disk with the reserve, else ``/dev/null``."""
    try:
        return run_files.append_to(run_dir, name)
    except OSError as error:
        if not run_files.is_full(error):
            raise
    return open(os.devnull, "wb")
