"""Readiness of the job's services and workers, shown by its first node."""

from exporter.collecting.collector import IDLE_INTERVAL_S, CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract.status import Readiness, RoleReadiness
from exporter.launch.readiness_reader import PublishedReadiness, read_readiness

READY = Family(
    "ready",
    "Whether the services of the job accept work; only on its first node, absent without such services.",
)
WORKERS = Family(
    "ready_workers", "Workers of a role that are ready, according to the front ends or to themselves.", labels=("role",)
)
EXPECTED = Family("ready_workers_expected", "Workers of a role that must be ready.", labels=("role",))
TIMEOUT = Family(
    "ready_timeout_seconds", "The job's own threshold: time within which its services must be ready, or it ends itself."
)

POLL_S = 5.0


class ReadinessCollector:
    """Shows the result of the readiness poller, so that services are polled only once."""

    name = "readiness"
    families = (READY, WORKERS, EXPECTED, TIMEOUT)

    def __init__(self, context: CollectorContext) -> None:
        self._run_dir = context.manifest.run_dir
        self._attempt = context.identity.attempt
        self._is_first = context.identity.node_index == 0
        self.interval_s = POLL_S if self._is_first else IDLE_INTERVAL_S

    def read(self) -> PublishedReadiness | None:
        return read_readiness(self._run_dir, self._attempt) if self._is_first else None

    def render(self, readiness: PublishedReadiness, out: Samples) -> None:
        out.add(READY, int(readiness.ready))
        out.add(TIMEOUT, readiness.timeout_s)
        for role, (registered, expected) in readiness.roles.items():
            out.add(WORKERS, registered, role=role)
            out.add(EXPECTED, expected, role=role)

    def describe(self, readiness: PublishedReadiness, parts: StatusParts) -> None:
        parts.readiness = Readiness(
            ready=readiness.ready,
            since=readiness.since,
            waiting=readiness.waiting,
            workers={
                role: RoleReadiness(ready=registered, expected=expected)
                for role, (registered, expected) in readiness.roles.items()
            },
        )
