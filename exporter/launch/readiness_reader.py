"""Results of the readiness poller: ``readiness.json`` in the run directory."""

from collections.abc import Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.records import Record, RecordError


class PublishedReadiness(Record):
    """Whether the services of a job accept work."""

    attempt: int
    ready: bool
    since: float | None  # when they became ready, epoch seconds; None while they are not
    timeout_s: float  # time to become ready, from the start of the job
    waiting: str  # what is missing, for people; empty if ready
    seen: Mapping[str, int]  # registered workers by role
    expected: Mapping[str, int]  # by role

    @property
    def roles(self) -> dict[str, tuple[int, int]]:
        """Registered and expected workers of each role that is waited for."""
        return {role: (self.seen.get(role, 0), expected) for role, expected in self.expected.items()}


def read_readiness(run_dir: Path, attempt: int) -> PublishedReadiness | None:
    """Latest result in this attempt; None if there is no poller, or no result yet."""
    try:
        found = PublishedReadiness.read(run_dir / run_files.READINESS_FILE)
    except RecordError:
        return None  # written by another version
    return found if found is not None and found.attempt == attempt else None
