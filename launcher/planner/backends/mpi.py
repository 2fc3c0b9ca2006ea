"""MPI: all ranks of a worker in one step, in which srun connects them. Pure."""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import BackendContext, BackendWorker, LaunchedBackend, torch_environment
from launcher.planner.backends.deepspeed import unused_option_problems
from launcher.planner.roles import Role


class MpiBackend(LaunchedBackend):
    """The user's program, once for each GPU or node, with ranks from MPI."""

    name = "mpi"
    is_one_step = True
    sees_worker_gpus = True

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        return super().problems(context, role) + unused_option_problems(context, role.name)

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)


BACKEND = MpiBackend()
