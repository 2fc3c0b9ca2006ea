"""dynamo's front end, and etcd and NATS, by which it and the workers find each other. Pure.

https://docs.nvidia.com/dynamo, https://etcd.io/docs, https://docs.nats.io
"""

from collections.abc import Sequence

from launcher.planner.backends.base import BackendContext, BackendWorker, option_words
from launcher.planner.frontends.base import Frontend, InfraService, frontend_of

ETCD, NATS = "etcd", "nats"


class DynamoFrontend(Frontend):
    """``dynamo.frontend``; workers are its own programs around the engines and register by themselves."""

    name = "dynamo"
    readiness = "dynamo"
    backends = ("sglang", "vllm", "trtllm", "command")
    infra = (InfraService(ETCD, ("etcd", "etcd_peer")), InfraService(NATS, ("nats",)))

    def words(self, setting: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        words = ["python3", "-m", "dynamo.frontend", "--http-port", "{http_port}"]
        return words + option_words(frontend_of(setting).args)

    def metrics(self) -> str:
        return "http_port/metrics"


def infra_command(name: str, node: int) -> list[str]:
    """The command of etcd or NATS. What they keep is worth nothing after the job, so it need not reach the disk.

    Each attempt of a job begins with nothing: what an earlier one has registered is on nodes that it has lost.
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
    """Variables by which everybody finds etcd and NATS; ``ports`` are theirs."""
    return {
        "ETCD_ENDPOINTS": f"http://{{host_{node}}}:{{port_{ports['etcd']}}}",
        "NATS_SERVER": f"nats://{{host_{node}}}:{{port_{ports['nats']}}}",
    }
