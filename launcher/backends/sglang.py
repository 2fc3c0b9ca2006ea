"""SGLang: one server process on each node of a worker. Pure.

Options: https://docs.sglang.ai/advanced_features/server_arguments.html
"""

from exporter.manifest import Task
from launcher.backends import dynamo
from launcher.backends.base import (
    DISAGGREGATED,
    EVERYWHERE,
    NAMES,
    PREFILL,
    SIZE_NAMES,
    Backend,
    Setting,
    Worker,
    config_path,
    engine_problems,
    option_words,
    sizes,
)
from launcher.plan import ReadyRule
from launcher.roles import Role

_TAKEN: tuple[str, ...] = (
    "model-path",
    "model",
    "served-model-name",
    "host",
    "port",
    "nnodes",
    "node-rank",
    "dist-init-addr",
)
_TAKEN += ("nccl-port", "disaggregation-mode", "disaggregation-bootstrap-port", "config")


class Sglang(Backend):
    """``sglang.launch_server``, or ``dynamo.sglang`` behind a front end of dynamo."""

    name = "sglang"
    service = True
    granularity = "node"

    def problems(self, setting: Setting, role: Role) -> list[str]:
        found = engine_problems(setting, role, self.name, _TAKEN)
        return found + sizes(setting, role, shared=_shared(setting, role))[1]

    def ports(self, setting: Setting, role: Role, processes: int) -> tuple[str, ...]:
        names = ["http", "dist_init" if processes > 1 else "nccl"]
        if role.name == PREFILL:
            names.append("bootstrap")
        return (*names, *(dynamo.PORTS if setting.dynamo else ()))

    def follower_ports(self, setting: Setting) -> tuple[str, ...]:
        return ("http", *(dynamo.PORTS if setting.dynamo else ()))

    def words(self, setting: Setting, worker: Worker, task: Task) -> list[str]:
        role = worker.role
        words = ["python3", "-m", "dynamo.sglang" if setting.dynamo else "sglang.launch_server"]
        if setting.config(role.name):
            words += ["--config", config_path(self.name, role.name)]
        words += ["--model-path", setting.model_path, "--served-model-name", setting.model_name]
        words += ["--host", EVERYWHERE, "--port", "{http_port}"]
        parts = sizes(setting, role, shared=_shared(setting, role))[0]
        for kind, number in (("tensor", parts.tensor), ("pipeline", parts.pipeline), ("data", parts.data)):
            if number > 1 or kind == "tensor":
                words += [f"--{NAMES[kind][0]}", str(number)]
        if parts.expert is not None:
            words += ["--ep-size", str(parts.expert)]
        if len(worker.tasks) > 1:
            words += ["--nnodes", str(len(worker.nodes)), "--node-rank", str(task.local_rank)]
            words += ["--dist-init-addr", worker.address("dist_init")]
        else:
            words += ["--nccl-port", "{nccl_port}"]
        if role.name in DISAGGREGATED:
            words += ["--disaggregation-mode", role.name]
        if role.name == PREFILL:
            words += ["--disaggregation-bootstrap-port", f"{{port_{worker.ports['bootstrap']}}}"]
        args = {"enable-metrics": True, **setting.arguments(role.name)}
        return words + option_words({name: value for name, value in args.items() if name not in SIZE_NAMES})

    def environment(self, setting: Setting, worker: Worker, task: Task) -> dict[str, str]:
        return dynamo.environment() if setting.dynamo else {}

    def rules(self, setting: Setting, worker: Worker) -> tuple[ReadyRule, ...]:
        if setting.dynamo:
            return dynamo.rules(worker)
        return (ReadyRule(worker.name, "http", worker.node, worker.ports["http"], "/health"),)

    def metrics(self, setting: Setting, worker: Worker, task: Task) -> str | None:
        if setting.dynamo:
            return dynamo.METRICS
        return "http_port/metrics" if task.local_rank == 0 else None


def _shared(setting: Setting, role: Role) -> bool:
    """Data parallel attention runs on the GPUs of tensor parallelism."""
    said = {**setting.config(role.name), **setting.arguments(role.name)}
    return any(said.get(name) for name in ("enable-dp-attention", "enable_dp_attention"))
