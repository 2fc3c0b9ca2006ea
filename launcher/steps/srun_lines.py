"""Build the srun command of each step."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from exporter.contract import run_files
from launcher.plan.container import pyxis_options
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.steps.batch_script import SrunStep, srun_argv
from launcher.steps.steps import sidecar_argv, survey_argv, wrapper_argv

SIDECARS, SURVEY = "sidecar", "nodes"  # names of gpujob's own steps, with one task per node
OWN = "all"  # for the output of a step: srun passes it on to its own, which is the orchestrator's


def sidecar_line(plan: Plan, facts: RunFacts) -> list[str]:
    """Command for the step of the sidecars."""
    log = facts.run_dir / "sidecars.log"
    return srun_argv(plan, _own_step(SIDECARS, facts, log, log, sidecar_argv(plan, facts)))


def survey_line(plan: Plan, facts: RunFacts) -> list[str]:
    """Command for the node survey."""
    # the node name is only known on the node
    command = ["sh", "-c", 'exec "$@" "$SLURMD_NODENAME"', "sh", *survey_argv(plan, facts)]
    return srun_argv(plan, _own_step(SURVEY, facts, OWN, facts.run_dir / "log.err", command))


def _own_step(name: str, facts: RunFacts, output: str | Path, error: Path, command: Sequence[str]) -> SrunStep:
    """A step on all nodes that continues on the others after its tasks on some have ended or failed."""
    return SrunStep(name, facts.hosts, output, error, command, wait_s=0, ends_with_a_failure=False)


def tasks_by_step(plan: Plan) -> Iterator[tuple[str, list[TaskPlan]]]:
    """Name and tasks of each step, in the order of ranks."""
    parts = Counter(planned.task.worker for planned in plan.tasks)

    def alone(planned: TaskPlan) -> str:
        worker = planned.task.worker
        return worker if parts[worker] == 1 else f"{worker}-{planned.task.local_rank}"

    yield from group_by_step(plan.tasks, alone).items()


def group_by_step(tasks: Iterable[TaskPlan], default_name: Callable[[TaskPlan], str]) -> dict[str, list[TaskPlan]]:
    """Group tasks by step, in their order; ``default_name`` names the groups of tasks without a step."""
    found: dict[str, list[TaskPlan]] = {}
    for planned in tasks:
        found.setdefault(planned.step or default_name(planned), []).append(planned)
    return found


def task_line(plan: Plan, name: str, tasks: Sequence[TaskPlan], facts: RunFacts, restart: int) -> list[str]:
    """Command for one step. Its tasks are in the order of its nodes, as in the plan.

    Their wrappers open their logs. What comes before them, and from Slurm, goes to the job's own logs.
    """
    first, several = tasks[0], len(tasks) > 1
    nodes = list(dict.fromkeys(planned.task.node_index for planned in tasks))
    options, entries = pyxis_options(plan, first, facts) if first.contained else [], None
    if several:
        entries = step_file(first, facts, restart)
        options += ["--distribution=block"]
    step = SrunStep(
        name=name,
        hosts=[facts.hosts[index] for index in nodes],
        output=OWN,
        error=OWN,
        command=wrapper_argv(plan, first, facts, restart, step_file=entries),
        tasks_per_node=len(tasks) // len(nodes),
        mpi=plan.slurm.mpi if first.step else "none",
        options=options,
        first_node=nodes[0],
        wait_s=0 if several else None,
    )
    return srun_argv(plan, step)


def step_file(first: TaskPlan, facts: RunFacts, restart: int) -> Path:
    """File in which the wrappers of a shared step find their tasks."""
    stem = run_files.record_name(first.task.worker, first.task.rank, facts.attempt, restart)
    return facts.run_dir / run_files.WORKERS_DIR / f"{stem}.step.json"
