"""Front ends of a serving job, and the services that they need. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.jobfile.backend_kinds import ENGINES
from launcher.jobfile.serving import FrontendSpec
from launcher.planner.backends.base import (
    ALL_ADDRESSES,
    DECODE,
    DISAGGREGATED,
    PREFILL,
    BackendContext,
    BackendWorker,
    option_argv,
    reserved_option_problems,
)


class Service(NamedTuple):
    """A program that is not a worker."""

    name: str
    ports: tuple[str, ...] = ()  # port names of `launcher.plan.ports`
    argv: tuple[str, ...] = ()  # with placeholders; empty if it depends on the job


class Frontend:
    """How to run the processes of one kind of front end."""

    name: str
    readiness: str  # kind of readiness rule that asks it for its workers
    backends: tuple[str, ...]  # backends whose workers it can serve; `command` is any program of the user
    ports: tuple[str, ...] = ()  # in addition to the port for its clients
    infra: tuple[Service, ...] = ()  # needed before it and the workers start
    has_own_process = True  # False: a worker serves clients itself
    metrics: str | None = None  # location of its own metrics, as in ``TaskPlan.metrics``
    reserved_options: tuple[str, ...] = ()  # options of its own program that the launcher sets from the plan

    def problems(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        """Parts of the job that do not suit this front end, each with place, value and fix."""
        spec = context.spec.frontend
        if spec is None or spec.command is not None:
            return []
        return reserved_option_problems("frontend", spec.args, self.reserved_options)

    def argv(self, workers: Sequence[BackendWorker]) -> list[str]:
        """Command of one process without the job file's options. It listens on ``{http_port}``."""
        raise NotImplementedError


class CustomFrontend(Frontend):
    """The command of the job file, which listens on ``{http_port}``; variables contain the workers' URLs."""

    name = "custom"
    readiness = "http"
    backends = ("command", *ENGINES)


# Their data is worthless after the job, so it need not reach the disk. Each attempt starts with empty data, because
# earlier registrations refer to nodes that may be lost. https://etcd.io/docs, https://docs.nats.io
ETCD = Service(
    "etcd",
    ("etcd", "etcd_peer"),
    (
        *("etcd", "--data-dir={run_dir}/etcd/{attempt}", "--unsafe-no-fsync"),
        "--listen-client-urls=http://0.0.0.0:{etcd_port}",
        "--advertise-client-urls=http://{leader}:{etcd_port}",
        "--listen-peer-urls=http://0.0.0.0:{etcd_peer_port}",
        "--initial-advertise-peer-urls=http://{leader}:{etcd_peer_port}",
        "--initial-cluster=default=http://{leader}:{etcd_peer_port}",
    ),
)
NATS = Service(
    "nats",
    ("nats",),
    ("nats-server", "--jetstream", "--store_dir={run_dir}/nats/{attempt}", "--addr=0.0.0.0", "--port={nats_port}"),
)


class DynamoFrontend(Frontend):
    """``dynamo.frontend``. Its workers are dynamo's own programs around the engines, and register themselves.

    It and the workers find each other through etcd and NATS. https://docs.nvidia.com/dynamo
    """

    name = "dynamo"
    readiness = "dynamo"
    backends = (*ENGINES, "command")
    infra = (ETCD, NATS)
    metrics = "http_port/metrics"
    reserved_options = ("http-port",)

    def argv(self, workers: Sequence[BackendWorker]) -> list[str]:
        return ["python3", "-m", "dynamo.frontend", "--http-port", "{http_port}"]


class SglangRouterFrontend(Frontend):
    """``sglang_router.launch_router``, with the workers' addresses as options.

    Options: https://docs.sglang.ai/advanced_features/router.html
    """

    name = "sglang-router"
    readiness = "sglang"
    backends = ("sglang", "command")
    ports = ("system",)
    metrics = "system_port/metrics"
    reserved_options = ("host", "port", "prometheus-port", "worker-urls", "prefill", "decode", "pd-disaggregation")

    def problems(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        silent = dict.fromkeys(worker.role.name for worker in workers if "http" not in worker.ports)
        return super().problems(context, workers) + [
            f"{context.role_key(role, 'command')}: the router sends requests to the {role} workers over HTTP; "
            "let the command listen on {http_port}"
            for role in silent
        ]

    def argv(self, workers: Sequence[BackendWorker]) -> list[str]:
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
        return [*words, "--host", ALL_ADDRESSES, "--port", "{http_port}", "--prometheus-port", "{system_port}"]


class VllmFrontend(Frontend):
    """vLLM without a front end: its only worker serves clients itself, on the public port."""

    name = "vllm"
    readiness = "vllm"
    backends = ("vllm",)
    has_own_process = False

    def problems(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        frontend, found = context.spec.frontend, []
        if len(workers) != 1 or workers[0].role.name in DISAGGREGATED:
            workers_text = ", ".join(dict.fromkeys(f"{worker.role.count} {worker.role.name}" for worker in workers))
            found.append(
                f"frontend.type: vllm needs exactly one agg worker, and the job has {workers_text}; use dynamo"
            )
        if frontend is not None and frontend.balanced:
            what = f"count: {frontend.count}" if frontend.count > 1 else "nginx: true"
            found.append(f"frontend: {what}, and type vllm is the worker itself; leave it out")
        if frontend is not None and (frontend.command or frontend.args or frontend.env):
            found.append("frontend: type vllm is the worker itself; put command, args and env into `backend`")
        return found


FRONTENDS: dict[str, Frontend] = {
    frontend.name: frontend for frontend in (SglangRouterFrontend(), DynamoFrontend(), VllmFrontend(), CustomFrontend())
}


def frontend_argv(frontend: Frontend, spec: FrontendSpec, workers: Sequence[BackendWorker]) -> list[str]:
    """Command of one process of a front end, with placeholders."""
    own = frontend.argv(workers) if spec.command is None else shlex.split(spec.command)
    return own + option_argv(spec.args)


def infra_environment(node: int, ports: Mapping[str, int]) -> dict[str, str]:
    """Variables by which all tasks find etcd and NATS; ``ports`` are the ports of these two."""
    return {
        "ETCD_ENDPOINTS": f"http://{{host_{node}}}:{{port_{ports['etcd']}}}",
        "NATS_SERVER": f"nats://{{host_{node}}}:{{port_{ports['nats']}}}",
    }


def workers_by_mode(
    workers: Sequence[BackendWorker],
) -> tuple[list[BackendWorker], list[BackendWorker], list[BackendWorker]]:
    """Workers for prefill, workers for decode, and workers that do both."""
    prefill = [worker for worker in workers if worker.role.name == PREFILL]
    decode = [worker for worker in workers if worker.role.name == DECODE]
    return prefill, decode, [worker for worker in workers if worker.role.name not in DISAGGREGATED]


def worker_url_variables(context: BackendContext, workers: Sequence[BackendWorker]) -> dict[str, str]:
    """Variables with the URLs of the workers, for a user's program; empty with dynamo, where workers register."""
    if context.uses_dynamo:
        return {}
    names = ("GPUJOB_PREFILL_URLS", "GPUJOB_DECODE_URLS", "GPUJOB_WORKER_URLS")
    return {
        name: ",".join(worker.url() for worker in group)
        for name, group in zip(names, workers_by_mode(workers), strict=True)
        if group and all("http" in worker.ports for worker in group)
    }
