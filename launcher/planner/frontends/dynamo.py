"""dynamo's front end, with etcd and NATS, through which it and the workers find each other. Pure.

https://docs.nvidia.com/dynamo, https://etcd.io/docs, https://docs.nats.io
"""

from collections.abc import Sequence

from launcher.jobfile.backend_kinds import ENGINES
from launcher.planner.backends.base import BackendContext, BackendWorker, option_argv
from launcher.planner.frontends.base import Frontend, InfraService, job_frontend

ETCD, NATS = "etcd", "nats"


class DynamoFrontend(Frontend):
    """``dynamo.frontend``. Its workers are dynamo's own programs around the engines, and register themselves."""

    name = "dynamo"
    readiness = "dynamo"
    backends = (*ENGINES, "command")
    infra = (InfraService(ETCD, ("etcd", "etcd_peer")), InfraService(NATS, ("nats",)))

    def argv(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        words = ["python3", "-m", "dynamo.frontend", "--http-port", "{http_port}"]
        return words + option_argv(job_frontend(context).args)

    def metrics(self) -> str:
        return "http_port/metrics"


def infra_argv(name: str, node: int) -> list[str]:
    """Command of etcd or NATS. Their data is worthless after the job, so it need not reach the disk.

    Each attempt starts with empty data, because earlier registrations refer to nodes that may be lost.
    """
    here = f"http://{{host_{node}}}"
    if name == NATS:
        store = "--store_dir={run_dir}/nats/{attempt}"
        return ["nats-server", "--jetstream", store, "--addr=0.0.0.0", "--port={nats_port}"]
    return [
        "etcd",
        "--data-dir={run_dir}/etcd/{attempt}",
        "--unsafe-no-fsync",
        "--listen-client-urls=http://0.0.0.0:{etcd_port}",
        f"--advertise-client-urls={here}:{{etcd_port}}",
        "--listen-peer-urls=http://0.0.0.0:{etcd_peer_port}",
        f"--initial-advertise-peer-urls={here}:{{etcd_peer_port}}",
        f"--initial-cluster=default={here}:{{etcd_peer_port}}",
    ]


def infra_environment(node: int, ports: dict[str, int]) -> dict[str, str]:
    """Variables by which all tasks find etcd and NATS; ``ports`` are the ports of these two."""
    return {
        "ETCD_ENDPOINTS": f"http://{{host_{node}}}:{{port_{ports['etcd']}}}",
        "NATS_SERVER": f"nats://{{host_{node}}}:{{port_{ports['nats']}}}",
    }
