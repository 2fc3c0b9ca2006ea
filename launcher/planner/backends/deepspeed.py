"""DeepSpeed without its own launcher, which would go by ssh: one process for each GPU, with the variables that
``deepspeed.init_distributed`` and torch.distributed read. Pure.
"""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import Launched, Setting, Worker, torch_environment
from launcher.planner.roles import Role


class Deepspeed(Launched):
    """The user's program once for each GPU; ``--deepspeed`` and its configuration are options of that program."""

    name = "deepspeed"
    granularity = "gpu"
    sees_worker = True

    def problems(self, setting: Setting, role: Role) -> list[str]:
        return super().problems(setting, role) + no_options(setting, role.name)

    def environment(self, setting: Setting, worker: Worker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)


def no_options(setting: Setting, role: str) -> list[str]:
    """Options that are given to a backend which has no program for them."""
    kind = setting.spec.backend.type
    return [
        f"{place}.args: type {kind} has no program of its own that takes them; put them into the command"
        for place, options in setting.parts(role)
        if options.args
    ]
