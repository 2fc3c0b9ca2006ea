"""The plan of `gpujob run`: the processes that it starts on this machine, where there is no batch script."""

import dataclasses
import os
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.programs.wrapper import task_visible_devices
from launcher.show.json_view import describe_plan, planned_facts
from launcher.show.picture import WIDTH
from launcher.steps import steps
from launcher.steps.local_steps import LOOPBACK, local_hosts

VISIBLE, FOM_URL = "CUDA_VISIBLE_DEVICES", "GPUJOB_FOM_URL"


def local_facts(plan: Plan, hostname: str, hosts: Sequence[str] = ()) -> RunFacts:
    """The facts of a run on the machine of this name, whose virtual nodes may have other names."""
    facts = planned_facts(plan, tuple(hosts[: plan.nodes]) or local_hosts(plan, hostname))
    return dataclasses.replace(facts, addresses=(LOOPBACK,) * plan.nodes)


def describe_local(plan: Plan, facts: RunFacts, devices: str | None = None) -> dict[str, Any]:
    """The plan as a JSON object of the shape of ``describe_plan``: ``script`` is null, and ``srun`` is empty.

    A command is what is started, with the runtime of a container. ``devices`` is the CUDA_VISIBLE_DEVICES that the
    run will find here, if any.
    """
    body = describe_plan(plan, "", facts.hosts)
    for planned, process in zip(plan.tasks, body["processes"], strict=True):
        visible = _visible_gpus(plan, planned, planned.env.get(VISIBLE, devices))
        own = {FOM_URL, *plan.secrets, *([VISIBLE] if visible is not None else [])}
        process |= {
            "command": steps.worker_argv(plan, planned, facts),
            "cuda_visible_devices": visible,
            "environment": sorted({*process["environment"], *own}),
        }
    return {**body, "script": None, "srun": []}


def _visible_gpus(plan: Plan, planned: TaskPlan, devices: str | None) -> str | None:
    """A task's GPUs out of those of this machine, which plays all nodes, as its wrapper finds them.

    None in a job without any.
    """
    if not plan.gpus_per_node:
        return None
    positions = steps.task_gpu_positions(planned, planned.task.node_index * plan.gpus_per_node)
    return os.fsdecode(task_visible_devices(positions, None if devices is None else os.fsencode(devices)))


def render_local(body: Mapping[str, Any], at_once: int = 1) -> str:
    """The processes of ``describe_local`` for people, in the place of the batch script.

    ``at_once`` is how many points of a sweep run side by side, where this is one of them.
    """
    lines = ["no batch script: `gpujob run` starts these processes on this machine"]
    if at_once > 1 and body["gpus_per_node"]:
        told = (
            f"which GPUs they get depends on the slot in which this point runs: {at_once} points of the sweep run at "
            "once, each with GPUs of its own; these are those of the first slot"
        )
        lines += textwrap.wrap(told, WIDTH)
    shown: list[str] | None = None
    for process in body["processes"]:
        if process["environment"] != shown:
            shown = process["environment"]
            told = f"variables beside the user's own: {' '.join(shown)}"
            lines += ["", *textwrap.wrap(told, WIDTH, subsequent_indent="  ")]
        lines += _process_lines(process)
    return "\n".join(lines) + "\n"


def _process_lines(process: Mapping[str, Any]) -> Iterator[str]:
    about = [f"rank {process['rank']}", f"on {process['node']}"]
    if process["gpus"]:
        about.append(f"GPUs {process['cuda_visible_devices']}")
    about += _ports(process["ports"].items())
    yield f"{process['worker']}: {', '.join(about)}"
    yield f"  {shlex.join(process['command']) or 'no command yet: this plan shows the topology alone'}"


def _ports(ports: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Ports as they are planned; the run adds one number to all of them where one is taken."""
    for name, port in ports:
        yield f"{name} port {port}"
