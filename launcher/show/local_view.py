"""The plan of `gpujob run`: processes on this machine, without a batch script."""

import dataclasses
import os
import shlex
import textwrap
from collections.abc import Iterator, Sequence

from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.programs.wrapper import task_visible_devices
from launcher.show.json_view import describe_plan, planned_facts
from launcher.show.picture import WIDTH
from launcher.show.records import PlannedProcess, PlanRecord
from launcher.steps import steps
from launcher.steps.local_steps import LOOPBACK, local_hosts

VISIBLE_DEVICES, FOM = "CUDA_VISIBLE_DEVICES", ("GPUJOB_FOM_URL", "GPUJOB_TOKEN")


def local_facts(plan: Plan, hostname: str, hosts: Sequence[str] = ()) -> RunFacts:
    """Facts of a run on this machine, whose virtual nodes may have other names."""
    facts = planned_facts(plan, tuple(hosts[: plan.nodes]) or local_hosts(plan, hostname))
    return dataclasses.replace(facts, addresses=(LOOPBACK,) * plan.nodes)


def describe_local(plan: Plan, facts: RunFacts, devices: str | None = None) -> PlanRecord:
    """The plan like that of ``describe_plan``, without script and srun commands.

    Commands include the container runtime. ``devices`` is the CUDA_VISIBLE_DEVICES of this shell.
    """
    record, processes = describe_plan(plan, "", facts.hosts), []
    for planned, process in zip(plan.tasks, record.processes, strict=True):
        visible = _visible_gpus(plan, planned, planned.env.get(VISIBLE_DEVICES, devices))
        own = {*FOM, *plan.secrets, *([VISIBLE_DEVICES] if visible is not None else [])}
        changed = process._replace(
            command=tuple(steps.worker_argv(plan, planned, facts)),
            cuda_visible_devices=visible,
            environment=tuple(sorted({*process.environment, *own})),
        )
        processes.append(changed)
    return record.replace(processes=tuple(processes), script=None, srun=())


def _visible_gpus(plan: Plan, planned: TaskPlan, devices: str | None) -> str | None:
    """A task's share of this machine's GPUs, which serve all virtual nodes. None in a job without GPUs."""
    if not plan.gpus_per_node:
        return None
    positions = steps.task_gpu_positions(planned, planned.task.node_index * plan.gpus_per_node)
    return os.fsdecode(task_visible_devices(positions, None if devices is None else os.fsencode(devices)))


def render_local(record: PlanRecord, parallel_points: int = 1) -> str:
    """The processes of ``describe_local`` as text, in place of the batch script.

    ``parallel_points`` is the number of sweep points that run in parallel.
    """
    lines = ["no batch script: `gpujob run` starts these processes on this machine"]
    if parallel_points > 1 and record.gpus_per_node:
        note = (
            f"{parallel_points} points of the sweep run at once, each on its own GPUs; "
            "the GPUs shown are those of the first slot, and this point may run in another"
        )
        lines += textwrap.wrap(note, WIDTH)
    shown: tuple[str, ...] | None = None
    for process in record.processes:
        if process.environment != shown:
            shown = process.environment
            text = f"variables in addition to the user's own: {' '.join(shown)}"
            lines += ["", *textwrap.wrap(text, WIDTH, subsequent_indent="  ")]
        lines += _process_lines(process)
    return "\n".join(lines) + "\n"


def _process_lines(process: PlannedProcess) -> Iterator[str]:
    about = [f"rank {process.rank}", f"on {process.node}"]
    if process.gpus:
        about.append(f"GPUs {process.cuda_visible_devices}")
    about += [f"{name} port {port}" for name, port in process.ports.items()]
    yield f"{process.worker}: {', '.join(about)}"
    yield f"  {shlex.join(process.command) or 'no command yet: this plan shows only the topology'}"
