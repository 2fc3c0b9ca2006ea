"""How the orchestrator starts and ends processes, whatever carries them: Slurm steps or this machine."""

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter import records
from exporter.readers.worker_logs import run_suffix
from launcher.plan import Plan, RunFacts, TaskPlan, task_argv, task_environment

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a job in order."""
PYTHON_FLAGS = ("-I", "-B", "-m")
"""Isolated: a user's folder called ``launcher`` or ``exporter`` must not be imported in place of ours.

And without writing bytecode: under a user's file size limit the interpreter would leave a cut
file in the installation, which then fails for everybody.
"""


@dataclass
class Running:
    """One run of one task: the process that stands for it here (srun, or the wrapper itself)."""

    planned: TaskPlan
    restart: int
    process: subprocess.Popen[bytes]

    @property
    def returncode(self) -> int | None:
        """Exit status of that process, or None while it runs; negative for a signal."""
        return self.process.poll()


@dataclass(frozen=True)
class Ending:
    """Whether the place is ending every process of the job on its own, and why, as far as it says."""

    by_itself: bool = False
    reason: str | None = None
    """An exit reason."""
    cause: str | None = None
    failed_nodes: tuple[str, ...] = ()
    signal_by: float | None = None
    """Until when the batch step is still to be told: an end of its own before that would count as a failure."""


class Steps(Protocol):
    """What the orchestrator needs from the place where a job runs."""

    exact_status: bool
    """Whether the status of a task here is its own: srun says 0 for one whose node has failed."""

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        """Start one sidecar on each node, under a supervisor."""
        ...

    def start_task(self, planned: TaskPlan, restart: int) -> Running:
        """Start one task under its wrapper."""
        ...

    def terminate(self, running: Sequence[Running]) -> None:
        """SIGTERM to the tasks, all at once."""
        ...

    def kill(self, running: Sequence[Running]) -> None:
        """SIGKILL to the tasks and all that they have started."""
        ...

    def sweep(self, running: Running) -> int:
        """End what a task that has ended left running; how many processes it had put into the background."""
        ...

    def end_sidecars(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> None:
        """SIGTERM to the sidecars."""
        ...

    def ending(self) -> Ending:
        """What the place says about the end of the job."""
        ...


def wrapped(plan: Plan, planned: TaskPlan, facts: RunFacts, restart: int, first_gpu: int = 0) -> list[str]:
    """The words that start one task under its wrapper; ``first_gpu`` is where the GPUs of its node begin."""
    task = planned.task
    argv = [plan.python, *PYTHON_FLAGS, "launcher.wrap"]
    argv += ["--run-dir", str(facts.run_dir), "--worker", task.worker, "--rank", str(task.rank)]
    argv += ["--attempt", str(facts.attempt), "--restart", str(restart)]
    if plan.gpus_per_node:
        argv += ["--gpus", ",".join(str(first_gpu + gpu) for gpu in task.gpus)]
    return [*argv, "--", *task_argv(plan, planned, facts)]


def supervised_sidecar(plan: Plan, facts: RunFacts) -> list[str]:
    """The words that start one sidecar under its supervisor."""
    python = [plan.python, *PYTHON_FLAGS]
    return [
        *python,
        "launcher.supervise",
        "--",
        *python,
        "exporter",
        "sidecar",
        "--run-dir",
        str(facts.run_dir),
    ]


def run_environment(plan: Plan, planned: TaskPlan, facts: RunFacts, restart: int) -> dict[str, str]:
    """Variables that one run of a task gets beside the user's own environment.

    ``GPUJOB_FOM_URL`` is where the sidecar of its node takes figures of merit; empty while none listens there.
    """
    node = facts.hosts[planned.task.node_index]
    sidecar = records.read_json(facts.run_dir / records.SIDECARS_DIR / f"{node}.json") or {}
    url = sidecar.get("fom") if sidecar.get("attempt") == facts.attempt else None
    return {"GPUJOB_FOM_URL": str(url or ""), **task_environment(plan, planned, facts, restart)}


def log_files(planned: TaskPlan, facts: RunFacts, restart: int) -> tuple[Path, Path]:
    """Standard output and standard error of one run of a task."""
    node, run = facts.hosts[planned.task.node_index], run_suffix(facts.attempt, restart)
    out, err = (facts.run_dir / name.replace("{node}", node).replace("{run}", run) for name in planned.task.logs[:2])
    return out, err
