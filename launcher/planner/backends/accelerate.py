"""accelerate launch: one agent on each node of a worker. Pure.

Options: https://huggingface.co/docs/accelerate/package_reference/cli
"""

from exporter.contract.manifest import Task
from launcher.jobfile.resources import command_argv
from launcher.planner.backends.base import (
    BackendContext,
    BackendWorker,
    LaunchedBackend,
    config_path,
    conflicting_option_problems,
    option_argv,
)
from launcher.planner.backends.programs import program_argv
from launcher.planner.roles import Role

_RESERVED_OPTIONS = ("num-machines", "machine-rank", "main-process-ip", "main-process-port", "config-file")


class AccelerateBackend(LaunchedBackend):
    """The user's script under ``accelerate launch``; ``config`` is its configuration file."""

    name = "accelerate"
    granularity = "node"
    word_separator = "_"

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        return super().problems(context, role) + conflicting_option_problems(context, role.name, _RESERVED_OPTIONS)

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        args = context.arguments(worker.role.name, self.word_separator)
        total = args.pop("num_processes", None) or max(worker.role.gpus, 1)
        configured = bool(context.config(worker.role.name))
        words = ["accelerate", "launch"]
        if configured:
            words += ["--config_file", config_path(self.name, worker.role.name)]
        words += [f"--num_machines={len(worker.nodes)}", f"--machine_rank={task.local_rank}"]
        words += [f"--main_process_ip={{host_{worker.node}}}"]
        words += [f"--main_process_port={{port_{worker.ports['dist_init']}}}", f"--num_processes={total}"]
        if worker.role.gpus > 1 and not configured and not any(name.startswith("use_") for name in args):
            words.append("--multi_gpu")
        return [
            *words,
            *option_argv(args),
            *program_argv(command_argv(worker.role.options), module="--module", no_python="--no_python"),
        ]


BACKEND = AccelerateBackend()
