"""TensorRT-LLM: all ranks of a worker in one MPI step; the first one serves. Pure.

Options: https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/
"""

from exporter.contract.manifest import Task
from launcher.planner.backends import dynamo
from launcher.planner.backends.base import (
    DISAGGREGATED,
    EVERYWHERE,
    BackendContext,
    BackendWorker,
    config_path,
    option_words,
    torch_environment,
    with_dashes,
)
from launcher.planner.backends.engine import SIZE_NAMES, EngineBackend, further_arguments
from launcher.planner.roles import Role

_SIZES = {"tensor": "tp_size", "pipeline": "pp_size", "expert": "ep_size"}


class TrtllmBackend(EngineBackend):
    """``trtllm-serve``, or ``dynamo.trtllm`` behind a dynamo front end. All ranks get the same command."""

    name = "trtllm"
    granularity = "gpu"
    one_step = True
    sees_worker = True
    dash = "_"
    taken = (
        "model-path",
        "served-model-name",
        "host",
        "port",
        "extra-llm-api-options",
        "config",
        "extra-engine-args",
        "disaggregation-mode",
    )

    def size_problems(self, setting: BackendContext, role: Role) -> list[str]:
        found = super().size_problems(setting, role)
        if not found and self.sizes(setting, role).data > 1:
            place = setting.place_of(role.name, *SIZE_NAMES)
            found = [f"{place}: trtllm takes no size of data parallelism; use config: {{enable_attention_dp: true}}"]
        return found

    def ports(self, setting: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        # all ranks meet at MASTER_PORT (torch.distributed)
        names = ["dist_init"] if processes > 1 else []
        return (*names, *(dynamo.PORTS if setting.dynamo else ("http",)))

    def words(self, setting: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        role, port, several = worker.role, worker.ports.get("http"), len(worker.tasks) > 1
        return setting.once(("words", role.name, port), lambda: self._words_of_role(setting, role, port, several))

    def _words_of_role(self, setting: BackendContext, role: Role, port: int | None, several: bool) -> list[str]:
        """Command for all ranks of a role that serve at this port; ``several``: a worker has several ranks."""
        words = ["trtllm-llmapi-launch"] if several else []
        args = further_arguments(setting, role.name)
        if setting.dynamo:
            words += ["python3", "-m", "dynamo.trtllm", "--model-path", setting.model_path]
            words += ["--served-model-name", setting.model_name]
            if role.name in DISAGGREGATED:
                words += ["--disaggregation-mode", role.name]
            if setting.config(role.name):
                words += ["--extra-engine-args", config_path(self.name, role.name)]
            return words + self._sizes(setting, role, "-") + option_words(args)
        words += ["trtllm-serve", setting.model_path, "--host", EVERYWHERE, "--port", f"{{port_{port}}}"]
        if setting.model_name != setting.model_path.rpartition("/")[2] or not setting.model_path.startswith("/"):
            words += ["--served_model_name", setting.model_name]  # trtllm-serve defaults to the directory's name
        words += self._sizes(setting, role, "_")
        if setting.config(role.name):
            words += ["--extra_llm_api_options", config_path(self.name, role.name)]
        return words + option_words(with_dashes(args, self.dash))

    def _sizes(self, setting: BackendContext, role: Role, dash: str) -> list[str]:
        parts = self.sizes(setting, role)
        names = _SIZES if dash == "_" else {"tensor": "tensor-parallel-size", "pipeline": "pipeline-parallel-size"}
        names = names if dash == "_" else {**names, "expert": "expert-parallel-size"}
        numbers = {"tensor": parts.tensor, "pipeline": parts.pipeline, "expert": parts.expert or 1}
        return [
            word
            for kind, number in numbers.items()
            if number > 1 or kind == "tensor"
            for word in (f"--{names[kind]}", str(number))
        ]

    def environment(self, setting: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        found = torch_environment(worker, task) if len(worker.tasks) > 1 else {}
        if setting.dynamo:
            found["DYN_SYSTEM_ENABLED"] = "true"
            found["DYN_SYSTEM_PORT"] = f"{{port_{worker.ports['system']}}}"
        return found

    def metrics(self, setting: BackendContext, worker: BackendWorker, task: Task) -> str | None:
        return dynamo.METRICS if setting.dynamo and task.local_rank == 0 else None
