"""JSON of the hub's API."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.records import NOTHING, JsonObject, JsonValue, to_json
from exporter.hub import costs
from exporter.hub.jobs import Job
from exporter.hub.store import GROUPS, PublishedChange, Sums
from exporter.slurm.accounting import tres
from exporter.slurm.nodes import NodeRow
from exporter.slurm.prices import Prices
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.states import ENDS, array_of, is_part_of
from exporter.slurm.tracking import Change

SCHEMA = 1
MOST_JOBS = 10_000  # in one answer
MOST_CHANGES = 1000  # likewise
MOST_TEXTS = 2 * MOST_JOBS  # rows of the queue that are kept as text: 8 MB
_AGE = re.compile(r"(\d{1,9})([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Head(NamedTuple):
    """Fields that every response has."""

    now: float
    as_of: float | None  # when Slurm's queue was last read
    problems: Sequence[str]
    scope: JsonObject = NOTHING  # whose jobs, and how often Slurm is asked

    def with_body(self, source: str | None = None, **body: JsonValue) -> dict[str, JsonValue]:
        return {
            "schema": SCHEMA,
            "time": self.now,
            "as_of": self.as_of,
            "source": source or self.scope.get("source", "squeue"),
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
    _require_known(query, ("user", "state", "since", "limit"))
    limit = parse_number(query, "limit", 1000)
    if not 1 <= limit <= MOST_JOBS:
        raise WrongQueryError(f"limit: {limit} is not from 1 to {MOST_JOBS}")
    state = query.get("state")
    return JobQuery(query.get("user"), state and state.upper(), _parse_since(query.get("since"), now), limit)


class UsageQuery(NamedTuple):
    """Which sums are wanted."""

    by: str
    since: float
    user: str | None


def parse_usage_query(query: Mapping[str, str], now: float) -> UsageQuery:
    """Parse the query of `/api/v1/usage`. Raises WrongQueryError."""
    _require_known(query, ("by", "since", "user"))
    by = query.get("by", GROUPS[0])
    if by not in GROUPS:
        raise WrongQueryError(f"by: {by[:40]!r} is unknown; known are {', '.join(GROUPS[:-1])} and {GROUPS[-1]}")
    return UsageQuery(by, _parse_since(query.get("since", "7d"), now) or 0.0, query.get("user"))


def _require_known(query: Mapping[str, str], known: Sequence[str]) -> None:
    unknown = query.keys() - set(known)
    if unknown:
        raise WrongQueryError(f"{min(unknown)}: unknown; known are {', '.join(known[:-1])} and {known[-1]}")


def parse_number(query: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of a query. Raises WrongQueryError."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise WrongQueryError(f"{name}: {text[:40]!r} is not a whole number")
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


def job_json(job: Job, now: float, idle: Mapping[str, float] = NOTHING) -> dict[str, JsonValue]:
    """A job. What is unknown is null. ``idle`` are the idle GPU seconds of jobs that run, by run directory."""
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
        "can_never_start": tracked.can_never_start,
        "figures": to_json(tracked.figures),
        "gpu_seconds": costs.gpu_seconds(job, now) if tracked.started is not None else None,
        "gpu_idle_seconds": costs.idle_s(job, idle),
        "gpu_seen_ratio": costs.seen_ratio(job),
        "energy_j": dict(costs.energies(job)) or None,
        "cost": _cost_json(job, now),
        "history": to_json(tracked.history),
    }


def queue_row(job: Job) -> QueueRow:
    """The row of Slurm's queue of which the hub has learned a job."""
    tracked = job.tracked
    known = (tracked.state, tracked.submitted, tracked.started, tracked.ended, tracked.attempt - 1, tracked.reason)
    return QueueRow(
        *(
            tracked.job_id,
            AttemptSnapshot(*known, tracked.limit_s),
            tracked.name,
            tracked.log,
            job.partition,
            job.resources,
        ),
        *(job.user, job.account, job.qos, job.node_count, job.nodes, job.dependency),
        expected_start=job.expected_start if tracked.state == "PENDING" else None,
    )


class QueueText:
    """JSON of rows of Slurm's queue. A job that is the same as before keeps its text: few change from look to look."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Job, str]] = {}

    def of_jobs(self, jobs: Iterable[Job]) -> str:
        """Rows of jobs in the queue, and of those that ended in the last 30 minutes: lists of fields."""
        return f"[{','.join(self._of_job(job) for job in jobs if job.is_listed or job.tracked.state in ENDS)}]"

    def _of_job(self, job: Job) -> str:
        known = self._known.get(job.tracked.job_id)
        if known is None or known[0] is not job:
            if len(self._known) >= MOST_TEXTS:
                self._known.clear()
            known = self._known[job.tracked.job_id] = job, json.dumps(queue_row(job), separators=(",", ":"))
        return known[1]


def _cost_json(job: Job, now: float) -> JsonValue:
    amount = costs.cost(job, now)
    if amount is None or job.price is None or job.tracked.started is None:
        return None
    return _amount_json(amount, job.price.currency)


def _amount_json(amount: float, currency: str) -> JsonValue:
    return {"amount": round(amount, 4), "currency": currency, "source": "list price"}


def runs_json(jobs: Iterable[Job], now: float) -> list[JsonValue]:
    """Runs in the order of their first jobs: an array is a run, and so is any other job."""
    runs: dict[tuple[str, float | None], list[Job]] = {}
    for job in jobs:
        runs.setdefault((array_of(job.tracked.job_id), job.first_submitted), []).append(job)
    return [_run_json(job_id, run, now) for (job_id, _), run in runs.items()]


def _run_json(job_id: str, jobs: Sequence[Job], now: float) -> JsonValue:
    first, states = jobs[0], Counter[str]()
    for job in jobs:
        states[job.tracked.state] += job.tasks
    worst = next((state for state in states if state != "COMPLETED"), "COMPLETED")
    gpu_s = [costs.gpu_seconds(job, now) for job in jobs if job.tracked.started is not None]
    amounts = [costs.cost(job, now) for job in jobs if job.tracked.started is not None]
    return {
        "run_name": first.tracked.name,
        "job_id": job_id,
        "user": first.user,
        "partition": first.partition,
        "status": next((state for state in ("RUNNING", "PENDING") if state in states), worst),
        "states": dict(states),
        "submitted": first.first_submitted,
        "run_dirs": [job.tracked.run_dir for job in jobs if job.tracked.run_dir is not None],
        "jobs": [job.tracked.job_id for job in jobs],
        "gpu_seconds": _total(gpu_s),
        "cost": None
        if first.price is None or (amount := _total(amounts)) is None
        else _amount_json(amount, first.price.currency),
    }


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None if one of the values is not known, or if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def fleet_json(nodes: Iterable[NodeRow], prices: Prices | None) -> list[JsonValue]:
    """Nodes by partition, as sinfo lists them."""
    return [_node_json(row, None if prices is None else prices.of_gpus(row.gpus), prices) for row in nodes]


def _node_json(row: NodeRow, price: float | None, prices: Prices | None) -> JsonValue:
    return {
        "fleet": row.partition,
        "instance": row.node,
        "state": row.state,
        "responds": row.responds,
        "is_out_of_service": row.is_out_of_service,
        "reason": row.reason,
        "gpus": [{"name": name or None, "count": count} for name, count in row.gpus.items()],
        "gpus_used": row.gpus_used,
        "cpus": row.cpus,
        "cpus_used": row.cpus_used,
        "memory_mib": row.memory_mib,
        "price_per_hour": None if price is None or prices is None else _amount_json(price, prices.currency),
    }


def usage_json(
    sums: Iterable[Sums], active: Iterable[Job], by: str, now: float, idle: Mapping[str, float]
) -> list[JsonValue]:
    """Usage of ended and active jobs, most GPU time first. ``idle`` is as for ``job_json``."""
    groups: dict[tuple[str, str | None], Sums] = {(each.name, each.currency): each for each in sums}
    for job in active:
        name = {"user": job.user, "account": job.account, "partition": job.first_partition}.get(by, job.tracked.name)
        key = name, None if job.price is None else job.price.currency
        old = groups.get(key) or Sums(*key, 0, None, None, None, None, None)
        more = old._replace(jobs=old.jobs + 1, gpu_s=costs.plus(old.gpu_s, costs.gpu_seconds(job, now)))
        idle_s = costs.plus(old.idle_s, costs.idle_s(job, idle))
        groups[key] = more._replace(cost=costs.plus(old.cost, costs.cost(job, now)), idle_s=idle_s)
    in_order = sorted(groups.values(), key=lambda each: (-(each.gpu_s or 0.0), each.name))
    return [_sums_json(each, by) for each in in_order]


def _sums_json(sums: Sums, by: str) -> JsonValue:
    energy = {source: joules for source, joules in (("gpu", sums.gpu_j), ("slurm", sums.node_j)) if joules is not None}
    return {
        by: sums.name,
        "jobs": sums.jobs,
        "gpu_seconds": sums.gpu_s,
        "gpu_idle_seconds": sums.idle_s,
        "energy_j": dict[str, JsonValue](energy) or None,
        "cost": None if sums.cost is None else _amount_json(sums.cost, sums.currency or ""),
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


def change_row(change: PublishedChange) -> dict[str, JsonValue]:
    return {"number": change.number, **change.body}


def _whole(amount: float | None) -> int | None:
    return None if amount is None else int(amount)
