"""What is alike in all workers that register with dynamo. Pure.

Variables: https://docs.nvidia.com/dynamo (etcd and NATS for discovery, a status server in each worker).
"""

from launcher.plan.plan import ReadyRule
from launcher.planner.backends.base import BackendWorker

PORTS = ("system",)


def dynamo_worker_environment() -> dict[str, str]:
    """Variables of each process: its status server."""
    return {"DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_PORT": "{system_port}"}


def dynamo_ready_rules(worker: BackendWorker) -> tuple[ReadyRule, ...]:
    """Its status server listens; whether it has registered, the front end tells."""
    return (ReadyRule(worker.name, "tcp", worker.node, worker.ports["system"]),)


METRICS = "system_port/metrics"
