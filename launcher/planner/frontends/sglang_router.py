"""SGLang's router. Pure.

Options: https://docs.sglang.ai/advanced_features/router.html
"""

from collections.abc import Sequence

from launcher.planner.backends.base import EVERYWHERE, BackendContext, BackendWorker, option_words
from launcher.planner.frontends.base import Frontend, frontend_of, workers_by_mode


class SglangRouterFrontend(Frontend):
    """``sglang_router.launch_router``, with the workers' addresses as options."""

    name = "sglang-router"
    readiness = "sglang"
    backends = ("sglang", "command")
    ports = ("system",)

    def problems(self, setting: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        silent = dict.fromkeys(worker.role.name for worker in workers if "http" not in worker.ports)
        return [
            f"{setting.key_of(role, 'command')}: the router asks the {role} workers over HTTP; "
            "have the command listen on {http_port}"
            for role in silent
        ]

    def words(self, setting: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        words = ["python3", "-m", "sglang_router.launch_router"]
        prefill, decode, both = workers_by_mode(workers)
        if prefill or decode:
            words.append("--pd-disaggregation")
        for worker in prefill:
            bootstrap = worker.ports.get("bootstrap")
            words += ["--prefill", worker.url(), *([f"{{port_{bootstrap}}}"] if bootstrap else [])]
        for worker in decode:
            words += ["--decode", worker.url()]
        if both:
            words += ["--worker-urls", *(worker.url() for worker in both)]
        words += ["--host", EVERYWHERE, "--port", "{http_port}", "--prometheus-port", "{system_port}"]
        return words + option_words(frontend_of(setting).args)

    def metrics(self) -> str:
        return "system_port/metrics"
