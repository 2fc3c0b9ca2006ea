"""JSON of the hub's API."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.records import NOTHING, JsonObject, JsonValue, to_json
from exporter.hub.jobs import Job
from exporter.hub.store import ToldChange
from exporter.slurm.accounting import tres
from exporter.slurm.states import array_of, is_part_of
from exporter.slurm.tracking import Change

SCHEMA = 1
MOST_JOBS = 10_000  # in one answer
MOST_CHANGES = 1000  # likewise
_AGE = re.compile(r"(\d{1,9})([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Head(NamedTuple):
    """What every answer says of itself."""

    now: float
    as_of: float | None  # when Slurm's queue was last read
    problems: Sequence[str]
    scope: JsonObject = NOTHING  # whose jobs, and how often Slurm is asked

    def with_body(self, **body: JsonValue) -> dict[str, JsonValue]:
        return {
            "schema": SCHEMA,
            "time": self.now,
            "as_of": self.as_of,
            "source": self.scope.get("source", "squeue"),
            "problems": list(self.problems),
            "scope": dict(self.scope),
            **body,
        }


class WrongQueryError(ValueError):
    """A query that cannot be answered. The text says what would be right."""


class JobQuery(NamedTuple):
    """Which jobs are wanted."""

    user: str | None = None
    state: str | None = None
    since: float | None = None  # None for the jobs that the hub follows or that ended within 30 minutes
    limit: int = 1000


def parse_query(query: Mapping[str, str], now: float) -> JobQuery:
    """Parse the query of `/api/v1/jobs`. Raises WrongQueryError."""
    unknown = query.keys() - {"user", "state", "since", "limit"}
    if unknown:
        raise WrongQueryError(f"{min(unknown)}: unknown; known are user, state, since and limit")
    limit = parse_number(query, "limit", 1000)
    if not 1 <= limit <= MOST_JOBS:
        raise WrongQueryError(f"limit: {limit} is not from 1 to {MOST_JOBS}")
    state = query.get("state")
    return JobQuery(query.get("user"), state and state.upper(), _parse_since(query.get("since"), now), limit)


def parse_number(query: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of a query. Raises WrongQueryError."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise WrongQueryError(f"{name}: {text[:40]!r} is no whole number")
    return int(text)


def _parse_since(text: str | None, now: float) -> float | None:
    if text is None:
        return None
    try:
        moment = float(text)
    except ValueError:
        moment = math.nan
    if math.isfinite(moment):
        return moment
    found = _AGE.fullmatch(text)
    if found is None:
        raise WrongQueryError(f"since: {text[:40]!r} is neither seconds since 1970 nor an age such as 90m, 12h or 7d")
    return now - int(found[1]) * _UNITS[found[2]]


def matching(jobs: Iterable[Job], query: JobQuery) -> list[Job]:
    """The wanted jobs, the newest first."""
    wanted = [job for job in jobs if query.user in (None, job.user) and query.state in (None, job.tracked.state)]
    wanted.sort(key=lambda job: (job.tracked.submitted or 0.0, job.tracked.job_id), reverse=True)
    return wanted


def parts_of(jobs: Mapping[str, Job], job_id: str) -> list[Job]:
    """The job with this id, or the tasks of the array or components that it names."""
    if job_id in jobs:
        return [jobs[job_id]]
    found = [job for key, job in jobs.items() if is_part_of(key, job_id)]
    together = jobs.get(f"{array_of(job_id)}_[]")
    return found or ([together] if together is not None else [])


def job_json(job: Job) -> dict[str, JsonValue]:
    """A job. What is unknown is null."""
    tracked = job.tracked
    return {
        "job_id": tracked.job_id,
        "job_name": tracked.name,
        "user": job.user,
        "partition": job.partition,
        "account": job.account or None,
        "qos": job.qos or None,
        "state": tracked.state,
        "reason": tracked.reason,
        "attempt": tracked.attempt,
        "tasks": job.tasks,
        "first_submitted": job.first_submitted,
        "submitted": tracked.submitted,
        "started": tracked.started,
        "ended": tracked.ended,
        "expected_start": job.expected_start if tracked.state == "PENDING" else None,
        "limit_s": tracked.limit_s,
        "node_count": job.node_count or None,
        "nodes": job.nodes or None,
        "gpus": _whole(job.gpus),
        "cpus": _whole(tres(job.resources, "cpu")),
        "memory_bytes": _whole(tres(job.resources, "mem")),
        "resources": job.resources or None,
        "dependency": job.dependency or None,
        "run_dir": tracked.run_dir,
        "log": tracked.log,
        "is_listed": job.is_listed,
        "is_over": tracked.is_over,
        "is_never": tracked.is_never,
        "figures": to_json(tracked.figures),
        "history": to_json(tracked.history),
    }


def change_json(change: Change, job: Job) -> dict[str, JsonValue]:
    """A change of a job's state."""
    tracked = change.job
    return {
        "job_id": tracked.job_id,
        "job_name": tracked.name,
        "user": job.user,
        "partition": job.partition,
        "first_submitted": job.first_submitted,
        "attempt": tracked.attempt,
        "previous": change.previous,
        "state": tracked.state,
        "time": change.time,
        "reason": None if tracked.state == "RUNNING" else tracked.reason,  # it may be that of a later end
    }


def told_json(change: ToldChange) -> dict[str, JsonValue]:
    return {"number": change.number, **change.body}


def _whole(amount: float | None) -> int | None:
    return None if amount is None else int(amount)
