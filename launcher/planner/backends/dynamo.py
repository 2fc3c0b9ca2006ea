"""Parts shared by all workers that register with dynamo. Pure.

Variables: https://docs.nvidia.com/dynamo (discovery through etcd and NATS, a status server in each worker).
"""

from launcher.plan.plan import ReadyRule
from launcher.planner.backends.base import BackendWorker

PORTS = ("system",)


def dynamo_worker_environment() -> dict[str, str]:
    """Variables of each process, for its status server."""
    return {"DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_PORT": "{system_port}"}


def dynamo_ready_rules(worker: BackendWorker) -> tuple[ReadyRule, ...]:
    """Check that its status server listens. The front end knows whether the worker has registered."""
    return (ReadyRule(worker.name, "tcp", worker.node, worker.ports["system"]),)


METRICS = "system_port/metrics"
