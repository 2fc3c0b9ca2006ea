"""The plan of `gpujob run`: the processes that it starts on this machine, where there is no batch script."""

import dataclasses
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher import steps
from launcher.describe import describe_plan, planned_facts
from launcher.drawing import WIDTH
from launcher.fill import task_argv
from launcher.local import LOOPBACK, local_hosts
from launcher.plan import Plan, RunFacts, TaskPlan

VISIBLE, FOM_URL = "CUDA_VISIBLE_DEVICES", "GPUJOB_FOM_URL"


def local_facts(plan: Plan, hostname: str, hosts: Sequence[str] = ()) -> RunFacts:
    """The facts of a run on the machine of this name, whose virtual nodes may have other names."""
    facts = planned_facts(plan, tuple(hosts[: plan.nodes]) or local_hosts(plan, hostname))
    return dataclasses.replace(facts, addresses=(LOOPBACK,) * plan.nodes)


def describe_local(plan: Plan, facts: RunFacts) -> dict[str, Any]:
    """The plan as a JSON object of the shape of ``describe_plan``: ``script`` is null, and ``srun`` is empty."""
    body = describe_plan(plan, "", facts.hosts)
    for planned, process in zip(plan.tasks, body["processes"], strict=True):
        visible = _visible_gpus(plan, planned)
        own = {FOM_URL, *plan.secrets, *([VISIBLE] if visible is not None else [])}
        process |= {
            "command": task_argv(plan, planned, facts),
            "cuda_visible_devices": visible,
            "environment": sorted({*process["environment"], *own}),
        }
    return {**body, "script": None, "srun": []}


def _visible_gpus(plan: Plan, planned: TaskPlan) -> str | None:
    """Positions of a task's GPUs among those of this machine, which plays all nodes; None in a job without any."""
    first = planned.task.node_index * plan.gpus_per_node
    return steps.visible_gpus(planned, first) if plan.gpus_per_node else None


def render_local(body: Mapping[str, Any]) -> str:
    """The processes of ``describe_local`` for people, in the place of the batch script."""
    lines = ["no batch script: `gpujob run` starts these processes on this machine"]
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
