"""vLLM: one process on each node of a worker, of which the first serves. Pure.

Options: https://docs.vllm.ai/en/latest/cli/serve/ and, for several nodes,
https://docs.vllm.ai/en/latest/serving/data_parallel_deployment/ and .../parallelism_scaling/
"""

from exporter.manifest import Task
from launcher.backends import dynamo
from launcher.backends.base import (
    DISAGGREGATED,
    EVERYWHERE,
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
    "model",
    "served-model-name",
    "host",
    "port",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "config",
)
_TAKEN += ("headless", "data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port")
_TAKEN += ("data-parallel-start-rank", "data-parallel-rank")


class Vllm(Backend):
    """``vllm serve``, or ``dynamo.vllm`` behind a front end of dynamo."""

    name = "vllm"
    service = True
    granularity = "node"

    def problems(self, setting: Setting, role: Role) -> list[str]:
        parts, found = sizes(setting, role)
        nodes = -(-role.gpus // setting.spec.resources.gpus_per_node) if setting.spec.resources.gpus_per_node else 1
        if not found and parts.data > 1 and parts.data % max(nodes, 1):
            place = setting.place_of(role.name, *SIZE_NAMES)
            found.append(
                f"{place}: data parallel {parts.data} cannot be divided over the {nodes} nodes of a {role.name}; "
                f"use a multiple of {nodes}, or 1"
            )
        if not found and parts.expert is not None:
            place = setting.place_of(role.name, *SIZE_NAMES)
            found.append(f"{place}: vLLM takes no size of expert parallelism; use enable-expert-parallel: true")
        return engine_problems(setting, role, self.name, _TAKEN) + found

    def ports(self, setting: Setting, role: Role, processes: int) -> tuple[str, ...]:
        names = ["http", "vllm"]
        if processes > 1:
            names += ["dp_rpc" if sizes(setting, role)[0].data > 1 else "dist_init"]
        return (*names, *self._further(setting, role))

    def follower_ports(self, setting: Setting) -> tuple[str, ...]:
        return ("vllm", *(dynamo.PORTS if setting.dynamo else ()))

    def _further(self, setting: Setting, role: Role) -> tuple[str, ...]:
        side = ("nixl",) if role.name in DISAGGREGATED else ()
        return (*side, *(dynamo.PORTS if setting.dynamo else ()))

    def words(self, setting: Setting, worker: Worker, task: Task) -> list[str]:
        role, first = worker.role, task.local_rank == 0
        if setting.dynamo:
            words = ["python3", "-m", "dynamo.vllm", "--model", setting.model_path]
        else:
            words = ["vllm", "serve", setting.model_path]
        if setting.config(role.name):
            words += ["--config", config_path(self.name, role.name)]
        words += ["--served-model-name", setting.model_name]
        if first and not setting.dynamo:
            words += ["--host", EVERYWHERE, "--port", "{http_port}"]
        parts, _ = sizes(setting, role)
        words += ["--tensor-parallel-size", str(parts.tensor)]
        if parts.pipeline > 1:
            words += ["--pipeline-parallel-size", str(parts.pipeline)]
        if parts.data > 1:
            words += ["--data-parallel-size", str(parts.data)]
        if len(worker.tasks) > 1:
            words += self._together(worker, task, parts.data)
        if setting.dynamo and role.name in DISAGGREGATED:
            words += ["--disaggregation-mode", role.name]
        args = {name: value for name, value in setting.arguments(role.name).items() if name not in SIZE_NAMES}
        return words + option_words(args)

    def _together(self, worker: Worker, task: Task, data: int) -> list[str]:
        """How the processes of a worker on several nodes find each other."""
        leader, headless = f"{{host_{worker.node}}}", [] if task.local_rank == 0 else ["--headless"]
        if data == 1:
            words = ["--nnodes", str(len(worker.nodes)), "--node-rank", str(task.local_rank)]
            return [
                *words,
                "--master-addr",
                leader,
                "--master-port",
                f"{{port_{worker.ports['dist_init']}}}",
                *headless,
            ]
        each = data // len(worker.nodes)
        words = ["--data-parallel-size-local", str(each), "--data-parallel-address", leader]
        words += ["--data-parallel-rpc-port", f"{{port_{worker.ports['dp_rpc']}}}"]
        return words + (["--data-parallel-start-rank", str(each * task.local_rank), *headless] if headless else [])

    def environment(self, setting: Setting, worker: Worker, task: Task) -> dict[str, str]:
        found = {"VLLM_PORT": "{vllm_port}"}
        if worker.role.name in DISAGGREGATED and task.local_rank == 0:
            found["VLLM_NIXL_SIDE_CHANNEL_HOST"] = f"{{host_{task.node_index}}}"
            found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "{nixl_port}"
        return {**found, **(dynamo.environment() if setting.dynamo else {})}

    def rules(self, setting: Setting, worker: Worker) -> tuple[ReadyRule, ...]:
        if setting.dynamo:
            return dynamo.rules(worker)
        return (ReadyRule(worker.name, "http", worker.node, worker.ports["http"], "/health"),)

    def metrics(self, setting: Setting, worker: Worker, task: Task) -> str | None:
        if setting.dynamo:
            return dynamo.METRICS
        return "http_port/metrics" if task.local_rank == 0 else None
