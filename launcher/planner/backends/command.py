"""A command of the user, started once for each process of a worker. Pure."""

import re

from launcher.jobfile.resources import words_of
from launcher.plan.plan import ReadyRule
from launcher.planner.backends.base import Backend, Setting, Worker
from launcher.planner.backends.deepspeed import no_options
from launcher.planner.roles import Role

LISTENS = "{http_port}"
"""In a command: it listens there, so that it can be asked whether it is ready."""
_LISTENS = re.compile(r"(?<!\{)\{http_port\}(?!\})")


class Command(Backend):
    """What the job file says, and nothing around it."""

    name = "command"

    def problems(self, setting: Setting, role: Role) -> list[str]:
        """Of its options alone: workers without a command can be planned, and are refused before they would start."""
        return no_options(setting, role.name) if setting.spec.backend.type == self.name else []

    def rules(self, setting: Setting, worker: Worker) -> tuple[ReadyRule, ...]:
        readiness = setting.spec.readiness
        if not any(_LISTENS.search(word) for word in words_of(worker.role.options)):
            return ()
        kind = "tcp" if readiness.kind == "tcp" else "http"
        path = (readiness.path if setting.spec.frontend is None else None) or "/health"
        return (ReadyRule(worker.name, kind, worker.node, worker.ports["http"], path if kind == "http" else ""),)
