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
    sees_worker_gpus = True

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        return super().problems(context, role) + unused_option_problems(context, role.name)

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)


def unused_option_problems(context: BackendContext, role: str) -> list[str]:
    """Report options for a backend that has no program to take them."""
    kind = context.spec.backend.type
    return [
        f"{place}.args: type {kind} starts no program of its own that accepts options; put them into the command"
        for place, options in context.role_options(role)
        if options.args
    ]


BACKEND = DeepspeedBackend()
