"""DeepSpeed without its own launcher, which would use ssh. Pure.

One process for each GPU gets the variables that ``deepspeed.init_distributed`` and torch.distributed read.
"""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import BackendContext, BackendWorker, LaunchedBackend, torch_environment
from launcher.planner.roles import Role


class DeepspeedBackend(LaunchedBackend):
    """The user's program, once for each GPU. ``--deepspeed`` and its configuration are options of that program."""

    name = "deepspeed"
    granularity = "gpu"
    sees_worker = True

    def problems(self, setting: BackendContext, role: Role) -> list[str]:
        return super().problems(setting, role) + unused_option_problems(setting, role.name)

    def environment(self, setting: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)


def unused_option_problems(setting: BackendContext, role: str) -> list[str]:
    """Report options for a backend that has no program to take them."""
    kind = setting.spec.backend.type
    return [
        f"{place}.args: type {kind} has no program of its own that takes them; put them into the command"
        for place, options in setting.parts(role)
        if options.args
    ]
