"""TensorRT-LLM: all ranks of a worker in one MPI step; the first of them serves. Pure.

Options: https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/
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
    torch_environment,
    with_dash,
)
from launcher.plan import ReadyRule
from launcher.roles import Role

_TAKEN: tuple[str, ...] = (
    "model-path",
    "served-model-name",
    "host",
    "port",
    "extra-llm-api-options",
    "config",
    "extra-engine-args",
)
_TAKEN += ("disaggregation-mode",)
_SIZES = {"tensor": "tp_size", "pipeline": "pp_size", "expert": "ep_size"}


class Trtllm(Backend):
    """``trtllm-serve``, or ``dynamo.trtllm`` behind a front end of dynamo. All ranks get the same words."""

    name = "trtllm"
    service = True
    granularity = "gpu"
    one_step = True
    sees_worker = True
    dash = "_"

    def problems(self, setting: Setting, role: Role) -> list[str]:
        parts, found = sizes(setting, role)
        if not found and parts.data > 1:
            place = setting.place_of(role.name, *SIZE_NAMES)
            found.append(
                f"{place}: trtllm takes no size of data parallelism; use config: {{enable_attention_dp: true}}"
            )
        return engine_problems(setting, role, self.name, _TAKEN) + found

    def ports(self, setting: Setting, role: Role, processes: int) -> tuple[str, ...]:
        # torch.distributed of all ranks meets at MASTER_PORT
        names = ["dist_init"] if processes > 1 else []
        return (*names, *(dynamo.PORTS if setting.dynamo else ("http",)))

    def words(self, setting: Setting, worker: Worker, task: Task) -> list[str]:
        role = worker.role
        words = ["trtllm-llmapi-launch"] if len(worker.tasks) > 1 else []
        args = {name: value for name, value in setting.arguments(role.name).items() if name not in SIZE_NAMES}
        if setting.dynamo:
            words += ["python3", "-m", "dynamo.trtllm", "--model-path", setting.model_path]
            words += ["--served-model-name", setting.model_name]
            if role.name in DISAGGREGATED:
                words += ["--disaggregation-mode", role.name]
            if setting.config(role.name):
                words += ["--extra-engine-args", config_path(self.name, role.name)]
            return words + self._sizes(setting, role, "-") + option_words(args)
        words += [
            "trtllm-serve",
            setting.model_path,
            "--host",
            EVERYWHERE,
            "--port",
            f"{{port_{worker.ports['http']}}}",
        ]
        if setting.model_name != setting.model_path.rpartition("/")[2] or not setting.model_path.startswith("/"):
            words += ["--served_model_name", setting.model_name]  # else it takes the directory's name by itself
        words += self._sizes(setting, role, "_")
        if setting.config(role.name):
            words += ["--extra_llm_api_options", config_path(self.name, role.name)]
        return words + option_words(with_dash(args, self.dash))

    def _sizes(self, setting: Setting, role: Role, dash: str) -> list[str]:
        parts, _ = sizes(setting, role)
        names = _SIZES if dash == "_" else {"tensor": "tensor-parallel-size", "pipeline": "pipeline-parallel-size"}
        names = names if dash == "_" else {**names, "expert": "expert-parallel-size"}
        numbers = {"tensor": parts.tensor, "pipeline": parts.pipeline, "expert": parts.expert or 1}
        return [
            word
            for kind, number in numbers.items()
            if number > 1 or kind == "tensor"
            for word in (f"--{names[kind]}", str(number))
        ]

    def environment(self, setting: Setting, worker: Worker, task: Task) -> dict[str, str]:
        found = torch_environment(worker, task) if len(worker.tasks) > 1 else {}
        if setting.dynamo:
            found["DYN_SYSTEM_ENABLED"] = "true"
            found["DYN_SYSTEM_PORT"] = f"{{port_{worker.ports['system']}}}"
        return found

    def rules(self, setting: Setting, worker: Worker) -> tuple[ReadyRule, ...]:
        if setting.dynamo:
            return dynamo.rules(worker)
        return (ReadyRule(worker.name, "http", worker.node, worker.ports["http"], "/health"),)

    def metrics(self, setting: Setting, worker: Worker, task: Task) -> str | None:
        return dynamo.METRICS if setting.dynamo and task.local_rank == 0 else None
