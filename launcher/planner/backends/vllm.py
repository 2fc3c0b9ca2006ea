"""vLLM: one process on each node of a worker, or on each GPU with pure data parallelism; the first serves. Pure.

Where it binds a socket of ZeroMQ it gets an IP address, since libzmq before 4.3.5 binds to no host name.

Options: https://docs.vllm.ai/en/latest/cli/serve/ and, for several nodes,
https://docs.vllm.ai/en/latest/serving/data_parallel_deployment/ and .../parallelism_scaling/
"""

from exporter.contract.manifest import Task
from launcher.jobfile.resources import command_argv
from launcher.planner.backends.base import (
    ALL_ADDRESSES,
    DISAGGREGATED,
    BackendContext,
    BackendWorker,
    config_path,
    option_argv,
)
from launcher.planner.backends.engine import SIZE_OPTION_NAMES, EngineBackend, nodes_of_worker, other_arguments
from launcher.planner.roles import Role

_SIZE_OPTIONS = {"tensor": "tensor-parallel-size", "pipeline": "pipeline-parallel-size", "data": "data-parallel-size"}


class VllmBackend(EngineBackend):
    """``vllm serve``, or ``dynamo.vllm`` behind a dynamo front end."""

    name = "vllm"
    granularity = "node"
    reserved_options = (
        *("model", "served-model-name", "host", "port", "nnodes", "node-rank", "master-addr", "master-port", "config"),
        *("headless", "data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port"),
        *("data-parallel-start-rank", "data-parallel-rank"),
    )

    def size_problems(self, context: BackendContext, role: Role) -> list[str]:
        if found := super().size_problems(context, role):
            return found
        parts, nodes = self.sizes(context, role), nodes_of_worker(context, role)
        place = context.args_key(role.name, *SIZE_OPTION_NAMES)
        if parts.data > 1 and parts.data % nodes:
            spread = f"{nodes} nodes of each {role.name} worker"
            fix = f"use a multiple of {nodes}, or 1"
            return [f"{place}: data parallel {parts.data} cannot be divided over the {spread}; {fix}"]
        if parts.expert is not None:
            return [f"{place}: vLLM has no size option for expert parallelism; use enable-expert-parallel: true"]
        return []

    def granularity_problems(self, context: BackendContext, role: Role) -> list[str]:
        parts = self.sizes(context, role)
        of_process = parts.tensor * parts.pipeline
        if context.spec.resources.process_granularity != "gpu" or of_process == 1 or command_argv(role.options):
            return []  # a user's own command may divide the GPUs in any way
        problem = f"resources.process_granularity: gpu, and one vLLM process of {role.name} divides {of_process} GPUs; "
        return [problem + f"leave it out, or set data-parallel-size: {role.gpus} alone"]

    def ports(self, context: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        names = ["http", "vllm"]
        if processes > 1:
            names += ["dp_rpc" if self.sizes(context, role).data > 1 else "dist_init"]
        return (*names, *self._further_ports(context, role))

    def follower_ports(self, context: BackendContext, role: Role) -> tuple[str, ...]:
        return ("vllm", *self._further_ports(context, role))

    def _further_ports(self, context: BackendContext, role: Role) -> tuple[str, ...]:
        side = ("nixl",) if role.name in DISAGGREGATED else ()
        return (*side, *self.dynamo_ports(context))

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        role, first = worker.role, task.local_rank == 0
        before, after = context.cached(("words", role.name, first), lambda: self._role_argv(context, role, first))
        own = self._rendezvous_options(worker, task, self.sizes(context, role).data) if len(worker.tasks) > 1 else []
        return [*before, *own, *after]

    def _role_argv(self, context: BackendContext, role: Role, is_first: bool) -> tuple[list[str], list[str]]:
        """First and last words of the command, for the first or the further processes of a role's workers."""
        if context.uses_dynamo:
            words = ["python3", "-m", "dynamo.vllm", "--model", context.model_path]
        else:
            words = ["vllm", "serve", context.model_path]
        if context.config(role.name):
            words += ["--config", config_path(self.name, role.name)]
        words += ["--served-model-name", context.model_name]
        if is_first and not context.uses_dynamo:
            words += ["--host", ALL_ADDRESSES, "--port", "{http_port}"]
        words += self.size_argv(context, role, _SIZE_OPTIONS)
        mode = ["--disaggregation-mode", role.name] if context.uses_dynamo and role.name in DISAGGREGATED else []
        return words, [*mode, *option_argv(other_arguments(context, role.name))]

    def _rendezvous_options(self, worker: BackendWorker, task: Task, data: int) -> list[str]:
        """Options by which the processes of a worker find each other."""
        headless = [] if task.local_rank == 0 else ["--headless"]
        if data == 1:
            words = ["--nnodes", str(len(worker.nodes)), "--node-rank", str(task.local_rank)]
            words += ["--master-addr", worker.host, "--master-port", worker.port("dist_init")]
            return words + headless
        each = data // len(worker.tasks)
        words = ["--data-parallel-size-local", str(each), "--data-parallel-address", f"{{ip_{worker.node}}}"]
        words += ["--data-parallel-rpc-port", worker.port("dp_rpc")]
        return words + (["--data-parallel-start-rank", str(each * task.local_rank), *headless] if headless else [])

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        found = {"VLLM_PORT": "{vllm_port}"}
        if len(worker.tasks) > 1:  # else vLLM takes the address of the default route, which may be another network
            found["VLLM_HOST_IP"] = f"{{ip_{task.node_index}}}"
        if worker.role.name in DISAGGREGATED:
            data = self.sizes(context, worker.role).data
            first_rank = data // len(worker.tasks) * task.local_rank if data > 1 else 0
            found["VLLM_NIXL_SIDE_CHANNEL_HOST"] = f"{{ip_{task.node_index}}}"
            # each data parallel rank adds its number to this port
            found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = f"{{port_{worker.ports_by_rank[task.rank]['nixl'] - first_rank}}}"
        return {**found, **super().environment(context, worker, task)}
