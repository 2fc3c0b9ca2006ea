"""How the orchestrator starts and ends processes, whatever carries them: Slurm steps or this machine."""

import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from exporter.contract import run_files
from exporter.logs.places_reader import run_suffix
from launcher.plan.container import worker_words, wrapper_words
from launcher.plan.placeholders import task_argv, task_environment
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.rundir.secrets_file import read_secrets

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that end a job in order
PYTHON_FLAGS = ("-I", "-B", "-m")
"""Isolated: a user's folder called ``launcher`` or ``exporter`` must not be imported in place of ours.

And without writing bytecode: under a user's file size limit the interpreter would leave a cut
file in the installation, which then fails for everybody.
"""


@dataclass
class RunningTask:
    """One run of one task: the process that stands for it here (srun, or the wrapper itself).

    Tasks of one step share theirs.
    """

    planned: TaskPlan
    restart: int
    process: subprocess.Popen[bytes]

    @property
    def returncode(self) -> int | None:
        """Exit status of that process, or None while it runs; negative for a signal."""
        return self.process.poll()


@dataclass(frozen=True)
class ExternalEnd:
    """Whether the place is ending every process of the job on its own, and why, as far as it says."""

    by_itself: bool = False
    reason: str | None = None  # an exit reason
    cause: str | None = None
    failed_nodes: tuple[str, ...] = ()
    unanswered: bool = False  # whether the place could not be asked: it may be ending them or not
    ends_at: float | None = None
    """When the place ends a job that still has a grace time, a moment; the batch step is told then, and an end of its
    own before that would count as a failure."""

    @property
    def may_end_all(self) -> bool:
        """Whether the place ends every process on its own, as far as is known."""
        return self.by_itself or self.unanswered


class Steps(Protocol):
    """What the orchestrator needs from the place where a job runs."""

    exact_status: bool  # whether the status of a task here is its own: srun says 0 for one whose node has failed

    def learn(self, facts: RunFacts) -> None:
        """What the nodes have told since: addresses and ports for all that is started from now on."""
        ...

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        """Start one sidecar on each node, under a supervisor."""
        ...

    def start_survey(self, offsets: Sequence[int], number: int) -> list[subprocess.Popen[bytes]]:
        """Start ``node_facts`` once on each node, in round ``number``, to try these offsets of the ports.

        Standard output is a pipe, with the line ``TOLD`` of ``launcher.run.before.node_facts`` from each node.
        """
        ...

    def start_beside(self, argv: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a program of ours beside the orchestrator; ``output`` is appended to, errors go to its own log."""
        ...

    def start_tasks(self, tasks: Sequence[TaskPlan], restart: int) -> list[RunningTask]:
        """Start the tasks of one step, each under its wrapper. Raises OSError."""
        ...

    def warn(self, running: Sequence[RunningTask], number: int) -> None:
        """A signal, such as SIGUSR1, to the tasks."""
        ...

    def terminate(self, running: Sequence[RunningTask]) -> None:
        """SIGTERM to the tasks, all at once."""
        ...

    def kill(self, running: Sequence[RunningTask]) -> None:
        """SIGKILL to the tasks and all that they have started."""
        ...

    def sweep(self, running: RunningTask) -> int:
        """End what a task that has ended left running; how many processes it had put into the background."""
        ...

    def is_over(self, running: RunningTask) -> bool:
        """Whether nothing is left of a task that has been swept up; what is, is ended: to be asked until it is so."""
        ...

    def are_over(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> bool:
        """The same of sidecars that have ended as far as is seen here; what is left of them is ended."""
        ...

    def end_sidecars(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> None:
        """SIGTERM to the sidecars."""
        ...

    def ending(self) -> ExternalEnd:
        """What the place says about the end of the job."""
        ...

    def requeue(self) -> str | None:
        """Have the job queued again, which ends it here; why that cannot be done, or None."""
        ...


def wrapper_argv(
    plan: Plan,
    planned: TaskPlan,
    facts: RunFacts,
    restart: int,
    *,
    first_gpu: int | None = None,
    step_file: Path | None = None,
) -> list[str]:
    """The words that start one task under its wrapper.

    ``first_gpu`` is where the GPUs of its node begin on a machine that plays the nodes; there a task always gets
    its own, elsewhere one with the GPUs of a whole node sees what Slurm shows it. ``step_file`` tells the wrappers
    of a step of several tasks apart.
    """
    task = planned.task
    argv = [*_wrapper(plan, planned), "--run-dir", str(facts.run_dir), "--worker", task.worker]
    argv += ["--rank", str(task.rank), "--attempt", str(facts.attempt), "--restart", str(restart)]
    if planned.service:
        argv += ["--service", "1"]
    if planned.ports and step_file is None:
        argv += ["--ports", claimed_ports(planned, facts)]
    if step_file is not None:
        argv += ["--step-file", str(step_file)]
    elif plan.gpus_per_node and sees_planned_gpus_only(planned, first_gpu):
        argv += ["--gpus", task_gpu_positions(planned, first_gpu)]
    return [*argv, "--", *worker_argv(plan, planned, facts)]


def claimed_ports(planned: TaskPlan, facts: RunFacts) -> str:
    """Ports that a task has been given, as its wrapper takes them: ``6100,7200``."""
    return ",".join(str(port + facts.port_offset) for port in sorted(planned.ports.values()))


def sees_planned_gpus_only(planned: TaskPlan, first_gpu: int | None = None) -> bool:
    """Whether a task, on a node with GPUs, sees those of the plan alone."""
    return planned.narrowed or not planned.task.gpus or first_gpu is not None


def task_gpu_positions(planned: TaskPlan, first_gpu: int | None = None) -> str:
    """Positions of a task's GPUs among those of the job: ``0,1``."""
    return ",".join(str((first_gpu or 0) + gpu) for gpu in planned.visible or planned.task.gpus)


def _wrapper(plan: Plan, planned: TaskPlan) -> list[str]:
    if planned.contained and (words := wrapper_words(plan, planned)):
        return words
    return [plan.python, *PYTHON_FLAGS, "launcher.programs.wrapper"]


def worker_argv(plan: Plan, planned: TaskPlan, facts: RunFacts) -> list[str]:
    """The words that a wrapper starts: those of the task, or the runtime of its container."""
    argv = task_argv(plan, planned, facts)
    if planned.contained:
        return worker_words(plan, planned, facts, argv)
    return argv


def step_entries(plan: Plan, tasks: Iterable[TaskPlan], facts: RunFacts, restart: int) -> list[dict[str, Any]]:
    """What each task of one step is, by its place in it (``SLURM_PROCID``).

    Its variables are those alone in which the tasks differ: what they share is the environment of the step.
    """
    tasks = list(tasks)
    environments = [run_environment(plan, planned, facts, restart) for planned in tasks]
    common = shared_variables(environments)
    entries = []
    for planned, environment in zip(tasks, environments, strict=True):
        own = {name: value for name, value in environment.items() if name not in common}
        entry: dict[str, Any] = {"worker": planned.task.worker, "rank": planned.task.rank, "env": own}
        entry["node"] = facts.hosts[planned.task.node_index]
        entry["argv"] = worker_argv(plan, planned, facts)
        if plan.gpus_per_node and sees_planned_gpus_only(planned):
            entry["gpus"] = task_gpu_positions(planned)
        if planned.ports:
            entry["ports"] = claimed_ports(planned, facts)
        entries.append(entry)
    return entries


def shared_variables(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Variables that have the same value in each environment."""
    first, *others = environments
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def sidecar_argv(plan: Plan, facts: RunFacts) -> list[str]:
    """The words that start one sidecar under its supervisor, which sees to it that nothing stays on the node."""
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
    """The words that look at one node; its name is still to be added."""
    return [plan.python, *PYTHON_FLAGS, "launcher.run.before.node_facts", "--run-dir", str(facts.run_dir), "--node"]


def survey_environment(facts: RunFacts, offsets: Sequence[int], number: int) -> dict[str, str]:
    """Variables of ``launcher.run.before.node_facts``."""
    return {
        "GPUJOB_ATTEMPT": str(facts.attempt),
        "GPUJOB_NODES": ",".join(facts.hosts),
        "GPUJOB_PORT_OFFSETS": ",".join(map(str, offsets)),
        "GPUJOB_SURVEY_ROUND": str(number),
    }


def run_environment(plan: Plan, planned: TaskPlan, facts: RunFacts, restart: int) -> dict[str, str]:
    """Variables that a run of a task gets beside the user's own environment; raises LauncherError without its secrets.

    ``GPUJOB_FOM_URL`` is where the sidecar of its node takes figures of merit; empty while none listens there.
    ``GPUJOB_RESUME`` is 1 where an attempt before this one may have left checkpoints.
    """
    node = facts.hosts[planned.task.node_index]
    sidecar = run_files.read_json(facts.run_dir / run_files.SIDECARS_DIR / f"{node}.json") or {}
    url = sidecar.get("fom") if sidecar.get("attempt") == facts.attempt else None
    resume = {"GPUJOB_RESUME": "1"} if facts.attempt else {}
    ours = {"GPUJOB_FOM_URL": str(url or ""), **resume}
    return {**ours, **read_secrets(facts.run_dir, plan.secrets), **task_environment(plan, planned, facts, restart)}


def log_files(planned: TaskPlan, facts: RunFacts, restart: int) -> tuple[str, str]:
    """Paths of standard output and standard error of one run of a task; text, for thousands of tasks are planned."""
    node, run = facts.hosts[planned.task.node_index], run_suffix(facts.attempt, restart)
    out, err = planned.task.logs[:2]
    here = str(facts.run_dir)
    return (
        f"{here}/{out.replace('{node}', node).replace('{run}', run)}",
        f"{here}/{err.replace('{node}', node).replace('{run}', run)}",
    )
