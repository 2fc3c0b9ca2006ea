"""A user's command, run by each process of a worker. Pure."""

import re

from launcher.jobfile.resources import command_argv
from launcher.plan.plan import ReadyRule
from launcher.planner.backends.base import Backend, BackendContext, BackendWorker, unused_option_problems
from launcher.planner.roles import Role

PORT_PLACEHOLDER = "{http_port}"  # in a command: its program listens there, so readiness can be polled
_PORT_PATTERN = re.compile(r"(?<!\{)\{http_port\}(?!\})")


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
