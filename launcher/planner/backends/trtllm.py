"""TensorRT-LLM: all ranks of a worker in one MPI step; the first one serves. Pure.

Options: https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/
"""

from exporter.contract.manifest import Task
from launcher.planner.backends.base import (
    ALL_ADDRESSES,
    DISAGGREGATED,
    BackendContext,
    BackendWorker,
    config_path,
    option_argv,
    spell_options,
    torch_environment,
)
from launcher.planner.backends.engine import SIZE_OPTION_NAMES, EngineBackend, other_arguments
from launcher.planner.roles import Role

_SIZE_OPTIONS = {"tensor": "tp_size", "pipeline": "pp_size", "expert": "ep_size"}
_DYNAMO_SIZE_OPTIONS = {
    "tensor": "tensor-parallel-size",
    "pipeline": "pipeline-parallel-size",
    "expert": "expert-parallel-size",
}


class TrtllmBackend(EngineBackend):
    """``trtllm-serve``, or ``dynamo.trtllm`` behind a dynamo front end. All ranks get the same command."""

    name = "trtllm"
    granularity = "gpu"
    is_one_step = True
    sees_worker_gpus = True
    reserved_options = (
        *("model-path", "served-model-name", "host", "port", "extra-llm-api-options", "config", "extra-engine-args"),
        "disaggregation-mode",
    )

    def size_problems(self, context: BackendContext, role: Role) -> list[str]:
        found = super().size_problems(context, role)
        if not found and self.sizes(context, role).data > 1:
            place = context.args_key(role.name, *SIZE_OPTION_NAMES)
            found = [
                f"{place}: trtllm has no size option for data parallelism; use config: {{enable_attention_dp: true}}"
            ]
        return found

    def ports(self, context: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        # all ranks meet at MASTER_PORT (torch.distributed)
        names = ["dist_init"] if processes > 1 else []
        return (*names, *(self.dynamo_ports(context) or ("http",)))

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        role, port, several = worker.role, worker.ports.get("http"), len(worker.tasks) > 1
        return context.cached(("words", role.name, port), lambda: self._role_argv(context, role, port, several))

    def _role_argv(self, context: BackendContext, role: Role, port: int | None, has_several_ranks: bool) -> list[str]:
        """Command for all ranks of a role that serve at this port."""
        words = ["trtllm-llmapi-launch"] if has_several_ranks else []
        args = other_arguments(context, role.name)
        if context.uses_dynamo:
            words += ["python3", "-m", "dynamo.trtllm", "--model-path", context.model_path]
            words += ["--served-model-name", context.model_name]
            if role.name in DISAGGREGATED:
                words += ["--disaggregation-mode", role.name]
            if context.config(role.name):
                words += ["--extra-engine-args", config_path(self.name, role.name)]
            return words + self.size_argv(context, role, _DYNAMO_SIZE_OPTIONS) + option_argv(args)
        words += ["trtllm-serve", context.model_path, "--host", ALL_ADDRESSES, "--port", f"{{port_{port}}}"]
        if context.model_name != context.model_path.rpartition("/")[2] or not context.model_path.startswith("/"):
            words += ["--served_model_name", context.model_name]  # trtllm-serve defaults to the directory's name
        words += self.size_argv(context, role, _SIZE_OPTIONS)
        if context.config(role.name):
            words += ["--extra_llm_api_options", config_path(self.name, role.name)]
        return words + option_argv(spell_options(args, "_"))

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        found = torch_environment(worker, task) if len(worker.tasks) > 1 else {}
        if context.uses_dynamo:  # all ranks get the port of the first one, which serves
            found |= {"DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_PORT": worker.port("system")}
        return found

    def metrics(self, context: BackendContext, worker: BackendWorker, task: Task) -> str | None:
        if task.local_rank != 0:
            return None
        if context.uses_dynamo:
            return super().metrics(context, worker, task)
        # /metrics is JSON, and only this option adds a page for Prometheus
        is_served = context.config(worker.role.name).get("return_perf_metrics")
        return "http_port/prometheus/metrics" if is_served else None
