"""vLLM without a front end: its only worker serves the clients itself. Pure."""

from collections.abc import Sequence

from launcher.planner.backends.base import DISAGGREGATED, BackendContext, BackendWorker
from launcher.planner.frontends.base import Frontend, job_frontend


class VllmFrontend(Frontend):
    """The worker, listening on the public port."""

    name = "vllm"
    readiness = "vllm"
    backends = ("vllm",)
    has_own_process = False

    def problems(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        frontend = job_frontend(context)
        found = []
        if len(workers) != 1 or workers[0].role.name in DISAGGREGATED:
            workers_text = ", ".join(dict.fromkeys(f"{worker.role.count} {worker.role.name}" for worker in workers))
            found.append(
                f"frontend.type: vllm needs exactly one agg worker, and the job has {workers_text}; use dynamo"
            )
        if frontend.balanced:
            what = f"count: {frontend.count}" if frontend.count > 1 else "nginx: true"
            found.append(f"frontend: {what}, and type vllm is the worker itself; leave it out")
        if frontend.command or frontend.args or frontend.env:
            found.append("frontend: type vllm is the worker itself; put command, args and env into `backend`")
        return found
