"""SGLang's router. Pure.

Options: https://docs.sglang.ai/advanced_features/router.html
"""

from collections.abc import Sequence

from launcher.planner.backends.base import ALL_ADDRESSES, BackendContext, BackendWorker, option_argv
from launcher.planner.frontends.base import Frontend, job_frontend, workers_by_mode


class SglangRouterFrontend(Frontend):
    """``sglang_router.launch_router``, with the workers' addresses as options."""

    name = "sglang-router"
    readiness = "sglang"
    backends = ("sglang", "command")
    ports = ("system",)

    def problems(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        silent = dict.fromkeys(worker.role.name for worker in workers if "http" not in worker.ports)
        return [
            f"{context.role_key(role, 'command')}: the router sends requests to the {role} workers over HTTP; "
            "let the command listen on {http_port}"
            for role in silent
        ]

    def argv(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
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
        words += ["--host", ALL_ADDRESSES, "--port", "{http_port}", "--prometheus-port", "{system_port}"]
        return words + option_argv(job_frontend(context).args)

    def metrics(self) -> str:
        return "system_port/metrics"
