"""Launchers of a user's program: torchrun, accelerate, DeepSpeed and MPI. Pure.

The processes of a worker meet through the variables of torch.distributed, or through options of their launcher.
"""

import re
from collections.abc import Mapping, Sequence

from exporter.contract.manifest import Task
from launcher.jobfile.backend_kinds import ENGINES
from launcher.jobfile.resources import SERVING_ROLES, command_argv
from launcher.planner.backends.base import (
    Backend,
    BackendContext,
    BackendWorker,
    config_path,
    conflicting_option_problems,
    option_argv,
    torch_environment,
    unused_option_problems,
)
from launcher.planner.roles import Role

_DEEPSPEED_LAUNCHER = "deepspeed_multinode_launcher"
_PYTHON = re.compile(r"(?:.*/)?python(?:\d+(?:\.\d+)*)?")


class LaunchedBackend(Backend):
    """A user's program, run by groups of processes that work together."""

    reserved_options: tuple[str, ...] | None = None  # options that the launcher sets; None: it takes none at all

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        found = []
        if role.name in SERVING_ROLES:
            wrong = f"{self.name} runs the processes of one program, and {role.name} is a serving role"
            found = [f"backend.type: {wrong}; use an engine ({', '.join(ENGINES)}), or a role of another name"]
        elif not command_argv(role.options):
            key = context.role_key(role.name, "command")
            found = [f"{key}: {self.name} needs the program of {role.name}; set it here"]
        if self.reserved_options is None:
            return found + unused_option_problems(context, role.name)
        return found + conflicting_option_problems(context, role.name, self.reserved_options)

    def ports(self, context: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        return ("dist_init",)


class RankedBackend(LaunchedBackend):
    """The user's program, once for each rank, with the variables by which torch.distributed connects the ranks."""

    sees_worker_gpus = True

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        return torch_environment(worker, task)


class DeepspeedBackend(RankedBackend):
    """One rank for each GPU, without DeepSpeed's own launcher, which would use ssh.

    ``--deepspeed`` and its configuration are options of the user's program.
    """

    name = "deepspeed"
    granularity = "gpu"


class MpiBackend(RankedBackend):
    """One rank for each GPU or node, all in one step in which srun connects them."""

    name = "mpi"
    is_one_step = True


class TorchrunBackend(LaunchedBackend):
    """The user's script under torchrun: one agent on each node of a worker, which starts one process per GPU.

    Options: https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    name = "torchrun"
    granularity = "node"
    reserved_options = ("nnodes", "node-rank", "master-addr", "master-port", "rdzv-endpoint", "rdzv-id", "standalone")

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        args = context.arguments(worker.role.name)
        each = args.pop("nproc-per-node", None) or max(len(task.gpus), 1)
        words = ["torchrun", f"--nnodes={len(worker.nodes)}", f"--nproc-per-node={each}"]
        if args.get("rdzv-backend", "static") == "static":
            words += [f"--node-rank={task.local_rank}", f"--master-addr={worker.host}"]
            words.append(f"--master-port={worker.port('dist_init')}")
        else:
            words += ["--rdzv-id={job_id}", f"--rdzv-endpoint={worker.address('dist_init')}"]
        program = program_argv(command_argv(worker.role.options), module="-m", no_python="--no-python")
        return [*words, *option_argv(args), *program]


_DISTRIBUTED_TYPES = {  # by sections of accelerate's configuration, which it ignores for other types
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}


class AccelerateBackend(LaunchedBackend):
    """The user's script under ``accelerate launch``, one agent on each node; ``config`` is its configuration file.

    Options: https://huggingface.co/docs/accelerate/package_reference/cli
    """

    name = "accelerate"
    granularity = "node"
    reserved_options = ("num-machines", "machine-rank", "main-process-ip", "main-process-port", "config-file")

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        args = context.arguments(worker.role.name, "_")
        total = args.pop("num_processes", None) or max(worker.role.gpus, 1)
        config = self.config(context, worker.role) if context.config(worker.role.name) else {}
        words = ["accelerate", "launch"]
        if config:
            words += ["--config_file", config_path(self.name, worker.role.name)]
        words += [f"--num_machines={len(worker.nodes)}", f"--machine_rank={task.local_rank}"]
        words += [f"--main_process_ip={worker.host}", f"--main_process_port={worker.port('dist_init')}"]
        words.append(f"--num_processes={total}")
        if worker.role.gpus > 1 and not config and not any(name.startswith("use_") for name in args):
            words.append("--multi_gpu")
        if len(worker.nodes) > 1 and _lacks_deepspeed_launcher(args, config):
            words.append(f"--{_DEEPSPEED_LAUNCHER}=standard")
        program = program_argv(command_argv(worker.role.options), module="--module", no_python="--no_python")
        return [*words, *option_argv(args), *program]

    def config(self, context: BackendContext, role: Role) -> dict[str, object]:
        given = context.config(role.name)
        types = [kind for section, kind in _DISTRIBUTED_TYPES.items() if section in given]
        types.append("MULTI_GPU" if role.gpus > 1 else "NO")
        return {"distributed_type": types[0], **given}  # accelerate accepts no file without it


def _lacks_deepspeed_launcher(args: Mapping[str, object], config: Mapping[str, object]) -> bool:
    """Whether accelerate would start DeepSpeed by its default, pdsh, which starts the whole job over ssh.

    Only the launcher "standard" starts the processes of its own node alone.
    """
    nested = config.get("deepspeed_config")
    is_named = any(_DEEPSPEED_LAUNCHER in part for part in (args, config, nested) if isinstance(part, Mapping))
    return not is_named and (bool(args.get("use_deepspeed")) or config.get("distributed_type") == "DEEPSPEED")


def program_argv(command: Sequence[str], *, module: str, no_python: str) -> list[str]:
    """Arguments for torchrun or accelerate: a script, ``module`` and its name, or ``no_python`` and a program.

    They start scripts with their own interpreter, which may not be the one in the command.
    """
    if command[0].endswith(".py"):
        return list(command)
    if _PYTHON.fullmatch(command[0]) and len(command) > 1:
        if not command[1].startswith("-"):
            return list(command[1:])
        if command[1] == "-m" and len(command) > 2:
            return [module, *command[2:]]
    return [no_python, *command]
