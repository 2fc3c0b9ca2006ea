"""MPI: all ranks of a worker in one step, which srun gives the means to find each other. Pure."""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import Launched, Setting, Worker, torch_environment
from launcher.planner.backends.deepspeed import no_options
from launcher.planner.roles import Role


class Mpi(Launched):
    """The user's program once for each GPU, or node; ranks are those that MPI tells."""

    name = "mpi"
    one_step = True
    sees_worker = True

    def problems(self, setting: Setting, role: Role) -> list[str]:
        return super().problems(setting, role) + no_options(setting, role.name)

    def environment(self, setting: Setting, worker: Worker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)
