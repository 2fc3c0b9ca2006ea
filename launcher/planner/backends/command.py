"""A user's command, run by each process of a worker. Pure."""

import re
from collections.abc import Iterable, Mapping

from exporter.contract.manifest import Task
from launcher.jobfile.resources import command_argv
from launcher.plan.plan import ReadyRule
from launcher.planner.backends.base import (
    Backend,
    BackendContext,
    BackendWorker,
    torch_environment,
    unused_option_problems,
)
from launcher.planner.roles import Role

PORT_PLACEHOLDER = "{http_port}"  # in a command: its program listens there, so readiness can be polled
_PORT_PATTERN = re.compile(r"(?<![{$])\{http_port\}(?!\})")


class CommandBackend(Backend):
    """Only the command of the job file."""

    name = "command"

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        """Check the options only: workers without a command may be planned, and are refused before they start."""
        return unused_option_problems(context, role.name) if context.spec.backend.type == self.name else []

    def ready_rules(self, context: BackendContext, worker: BackendWorker) -> tuple[ReadyRule, ...]:
        readiness = context.spec.readiness
        if not any(_PORT_PATTERN.search(word) for word in command_argv(worker.role.options)):
            return ()
        kind = "tcp" if readiness.kind == "tcp" else "http"
        path = (readiness.path if context.spec.frontend is None else None) or "/health"
        return (ReadyRule(worker.name, kind, worker.node, worker.ports["http"], path if kind == "http" else ""),)


def connected_tasks(tasks: Iterable[Task], backends: Mapping[str, Backend]) -> dict[str, tuple[Task, ...]]:
    """Processes of each role that runs several of the user's command; they may connect with torch.distributed."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        if isinstance(backends[task.role], CommandBackend):
            found.setdefault(task.role, []).append(task)
    return {role: tuple(own) for role, own in found.items() if len(own) > 1}


def connecting_environment(group: BackendWorker, task: Task) -> dict[str, str]:
    """Variables by which the processes of a role connect.

    A process with GPUs sees no others, so its local rank, which selects a GPU, is that of a process alone on its node.
    """
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if task.gpus else {}
    return {**torch_environment(group, task), **alone}
