"""SGLang: one server process on each node of a worker. Pure.

Processes of several nodes get an IP address, since SGLang also binds sockets of ZeroMQ at that of the first one, and
libzmq before 4.3.5 binds to no host name.

Options: https://docs.sglang.ai/advanced_features/server_arguments.html
"""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import (
    ALL_ADDRESSES,
    DISAGGREGATED,
    PREFILL,
    BackendContext,
    BackendWorker,
    config_path,
    option_argv,
)
from launcher.planner.backends.engine import SIZE_OPTION_NAMES, EngineBackend, nodes_of_worker, other_arguments
from launcher.planner.roles import Role

_SIZE_OPTIONS = {"tensor": "tp-size", "pipeline": "pp-size", "data": "dp-size", "expert": "ep-size"}


class SglangBackend(EngineBackend):
    """``sglang.launch_server``, or ``dynamo.sglang`` behind a dynamo front end."""

    name = "sglang"
    granularity = "node"
    reserved_options = (
        *("model-path", "model", "served-model-name", "host", "port", "nnodes", "node-rank", "dist-init-addr"),
        *("nccl-port", "disaggregation-mode", "disaggregation-bootstrap-port", "config"),
    )

    def size_problems(self, context: BackendContext, role: Role) -> list[str]:
        if found := super().size_problems(context, role):
            return found
        data, nodes = self.sizes(context, role).data, nodes_of_worker(context, role)
        if data == 1 or nodes == 1 or self.shares_gpus(context, role):
            return []
        place = context.args_key(role.name, *SIZE_OPTION_NAMES)
        wrong = f"data parallel {data} over the {nodes} nodes of each {role.name} worker needs DP attention in SGLang"
        return [f"{place}: {wrong}; set enable-dp-attention: true, or use more and smaller workers"]

    def shares_gpus(self, context: BackendContext, role: Role) -> bool:
        """Whether data parallel attention is on: it runs on the GPUs of tensor parallelism."""
        settings = {**context.config(role.name), **context.arguments(role.name)}
        return any(settings.get(name) for name in ("enable-dp-attention", "enable_dp_attention"))

    def ports(self, context: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        names = ["http"]
        if processes > 1:
            names.append("dist_init")
        elif self._has_one_group(context, role):
            names.append("nccl")
        if role.name == PREFILL:
            names.append("bootstrap")
        return (*names, *self.dynamo_ports(context))

    def _has_one_group(self, context: BackendContext, role: Role) -> bool:
        """Whether the GPUs of a process form one NCCL group, which may have a fixed port.

        Otherwise each data parallel rank has a group, and SGLang has to choose a port for each.
        """
        return self.sizes(context, role).data == 1 or self.shares_gpus(context, role)

    def follower_ports(self, context: BackendContext, role: Role) -> tuple[str, ...]:
        return ("http", *self.dynamo_ports(context))

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        role = worker.role
        before, after = context.cached(("words", role.name), lambda: self._role_argv(context, role))
        if len(worker.tasks) > 1:
            own = ["--nnodes", str(len(worker.nodes)), "--node-rank", str(task.local_rank)]
            own += ["--dist-init-addr", f"{{ip_{worker.node}}}:{worker.port('dist_init')}"]
        else:
            own = ["--nccl-port", "{nccl_port}"] if self._has_one_group(context, role) else []
        if role.name in DISAGGREGATED:
            own += ["--disaggregation-mode", role.name]
        if role.name == PREFILL:
            own += ["--disaggregation-bootstrap-port", worker.port("bootstrap")]
        return [*before, *own, *after]

    def _role_argv(self, context: BackendContext, role: Role) -> tuple[list[str], list[str]]:
        """First and last words of the command, the same for all processes of a role."""
        words = ["python3", "-m", "dynamo.sglang" if context.uses_dynamo else "sglang.launch_server"]
        if context.config(role.name):
            words += ["--config", config_path(self.name, role.name)]
        words += ["--model-path", context.model_path, "--served-model-name", context.model_name]
        words += ["--host", ALL_ADDRESSES, "--port", "{http_port}"]
        words += self.size_argv(context, role, _SIZE_OPTIONS)
        return words, option_argv({"enable-metrics": True, **other_arguments(context, role.name)})
