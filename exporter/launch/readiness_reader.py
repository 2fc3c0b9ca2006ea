"""Results of the readiness poller: ``readiness.json`` in the run directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.contract import run_files


@dataclass(frozen=True, slots=True)
class RoleReadiness:
    """Registered and expected workers of one role."""

    role: str
    registered: int
    expected: int


@dataclass(frozen=True, slots=True)
class PublishedReadiness:
    """Whether the services of a job accept work."""

    ready: bool
    since: float | None  # when they became ready, epoch seconds; None while they are not
    timeout_s: float  # time to become ready, from the start of the job
    missing: str  # what is missing, for people; empty if ready
    roles: tuple[RoleReadiness, ...]


def read_readiness(run_dir: Path, attempt: int) -> PublishedReadiness | None:
    """Latest result in this attempt; None if there is no poller, or no result yet."""
    body: Any = run_files.read_json(run_dir / run_files.READINESS_FILE)
    if body is None or body.get("attempt") != attempt:
        return None
    try:
        return PublishedReadiness(
            ready=body["ready"] is True,
            since=None if body["since"] is None else float(body["since"]),
            timeout_s=float(body["timeout_s"]),
            missing=str(body["waiting"]),
            roles=tuple(
                RoleReadiness(role, int(body["seen"].get(role, 0)), int(expected))
                for role, expected in body["expected"].items()
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # written by another version
