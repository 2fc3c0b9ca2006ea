"""What the poller of a job's services has found: ``readiness.json`` in the run directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.contract import run_files


@dataclass(frozen=True, slots=True)
class RoleReadiness:
    """Workers of one role that have registered, and those that are meant to."""

    role: str
    seen: int
    expected: int


@dataclass(frozen=True, slots=True)
class PublishedReadiness:
    """Whether the services of a job take work."""

    ready: bool
    since: float | None  # when they became ready, epoch seconds; None while they are not
    timeout_s: float  # how long the job gives them from its start
    waiting: str  # who is waited for, for people; empty when all are ready
    roles: tuple[RoleReadiness, ...]


def read_readiness(run_dir: Path, attempt: int) -> PublishedReadiness | None:
    """What was last found in this attempt; None where nobody polls, or has yet."""
    body: Any = run_files.read_json(run_dir / run_files.READINESS_FILE)
    if body is None or body.get("attempt") != attempt:
        return None
    try:
        return PublishedReadiness(
            ready=body["ready"] is True,
            since=None if body["since"] is None else float(body["since"]),
            timeout_s=float(body["timeout_s"]),
            waiting=str(body["waiting"]),
            roles=tuple(
                RoleReadiness(role, int(body["seen"].get(role, 0)), int(expected))
                for role, expected in body["expected"].items()
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # written by another version
