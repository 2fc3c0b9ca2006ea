"""torchrun: one agent on each node of a worker, which starts one process per GPU. Pure.

Options: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from exporter.contract.manifest import Task
from launcher.jobfile.resources import command_argv
from launcher.planner.backends.base import (
    BackendContext,
    BackendWorker,
    LaunchedBackend,
    conflicting_option_problems,
    option_argv,
)
from launcher.planner.backends.programs import program_argv
from launcher.planner.roles import Role

_RESERVED_OPTIONS = ("nnodes", "node-rank", "master-addr", "master-port", "rdzv-endpoint", "rdzv-id", "standalone")


class TorchrunBackend(LaunchedBackend):
    """The user's script under torchrun."""

    name = "torchrun"
    granularity = "node"

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        return super().problems(context, role) + conflicting_option_problems(context, role.name, _RESERVED_OPTIONS)

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        args = context.arguments(worker.role.name)
        each = args.pop("nproc-per-node", None) or max(len(task.gpus), 1)
        words = ["torchrun", f"--nnodes={len(worker.nodes)}", f"--nproc-per-node={each}"]
        if args.get("rdzv-backend", "static") == "static":
            words += [f"--node-rank={task.local_rank}", f"--master-addr={{host_{worker.node}}}"]
            words.append(f"--master-port={{port_{worker.ports['dist_init']}}}")
        else:
            words += ["--rdzv-id={job_id}", f"--rdzv-endpoint={worker.address('dist_init')}"]
        return [
            *words,
            *option_argv(args),
            *program_argv(command_argv(worker.role.options), module="-m", no_python="--no-python"),
        ]


BACKEND = TorchrunBackend()
