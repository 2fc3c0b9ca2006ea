"""MPI: all ranks of a worker in one step, in which srun connects them. Pure."""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import BackendContext, BackendWorker, LaunchedBackend, torch_environment
from launcher.planner.backends.deepspeed import unused_option_problems
from launcher.planner.roles import Role


class MpiBackend(LaunchedBackend):
    """The user's program, once for each GPU or node, with ranks from MPI."""

    name = "mpi"
    one_step = True
    sees_worker = True

    def problems(self, setting: BackendContext, role: Role) -> list[str]:
        return super().problems(setting, role) + unused_option_problems(setting, role.name)

    def environment(self, setting: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)
