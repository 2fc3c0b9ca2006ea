"""Statuses of workers and nodes, and what collectors add to them."""

from typing import Any

from exporter.collecting.collector import Collector, StatusParts
from exporter.contract.status import (
    CollectorReads,
    FileSystem,
    JobStatus,
    Memory,
    NodeName,
    NodeStatus,
    ProcessDetails,
    WorkerEnd,
    WorkerStatus,
)
from tests.support.exporter import NODE

NOW = 1763784821.0  # 2025-11-22 04:13:41 UTC
ENDED = WorkerEnd(reason="app_error", code=1, time=NOW, restart=0, evidence=("exit status 1",))
READ = CollectorReads(success=True, duration_s=0.01, last_success=NOW)


def worker_status(rank: int = 0, **over: Any) -> WorkerStatus:
    """A running worker."""
    facts: dict[str, Any] = {
        "worker": f"worker_w{rank}",
        "role": "worker",
        "rank": rank,
        "node": NODE,
        "up": True,
        "state": "sleeping",
        "start": NOW - 60,
        "pid": 4711 + rank,
        "rss_bytes": 3 << 30,
        "cpu_s": 10.0,
        "children": 3,
        "threads": 40,
        "items": 12,
        "items_expected": 1500,
        "last_progress": NOW - 1.2,
        "stalled": False,
        "values": {"loss": 0.25},
        "details": ProcessDetails(
            pss_bytes=1 << 30, open_files=12, paths=("/data/shard-3",), devices=("/dev/nvidia0",)
        ),
    }
    return WorkerStatus(**facts | over)


def node_status(*workers: WorkerStatus, **over: Any) -> NodeStatus:
    """The status of a node whose collectors have read."""
    facts: dict[str, Any] = {
        "time": NOW,
        "job": JobStatus(job_id="4459", job_name="embed", phase="running", user="ada"),
        "node": NodeName(name=NODE),
        "workers": workers,
        "filesystems": (FileSystem(group="output", available_bytes=5 << 30, size_bytes=10 << 30),),
        "memory": Memory(used_bytes=6 << 30, limit_bytes=8 << 30, oom_kills=1, oom_victims={4711: NOW}),
        "collectors": dict.fromkeys(("workers", "logs", "outputs"), READ),
    }
    return NodeStatus(**facts | over)


def described(collector: Collector, snapshot: object) -> StatusParts:
    """What a collector adds to the status for this snapshot."""
    parts = StatusParts()
    collector.describe(snapshot, parts)  # type: ignore[arg-type]
    return parts


def worker_of(parts: StatusParts, rank: int = 0) -> WorkerStatus:
    """The worker with the parts that were added for it."""
    return WorkerStatus.join(*parts.workers[rank], worker=f"worker_w{rank}", rank=rank)
