"""Decide from the answers of services whether a job is ready, and what is missing.

Formats: dynamo's ``/health``, ``/workers`` of SGLang's router, vLLM's ``/health`` and ``/v1/models``.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import NOTHING
from exporter.logs.log_files_reader import log_paths, read_last_bytes
from exporter.logs.redact import redact
from launcher.plan.plan import COUNTING_KINDS, DECODE, PREFILL, Plan, ReadyRule, RunFacts, TaskPlan

# paths to request for each kind; a rule's own path replaces the first
PATHS = {"dynamo": ("/health",), "sglang": ("/workers",), "vllm": ("/health", "/v1/models"), "http": ("/health",)}

MOST_LOG_LINES = 5
MOST_NAMED = 8  # missing workers to name, with the ends of their logs
MOST_LINE = 400


class ServerReply(NamedTuple):
    status: int
    body: bytes


@dataclass(frozen=True)
class RuleStatus:
    """Result of a readiness rule."""

    ready: bool
    seen: Mapping[str, int] = field(default_factory=dict)  # workers found, by the roles of `expected`
    detail: str = ""


class RuleReadiness(NamedTuple):  # cheaper to compare than a record: a large job may have a thousand
    """A rule and its latest result in ``readiness.json``."""

    subject: str
    kind: str
    ready: bool
    seen: Mapping[str, int]
    expected: Mapping[str, int]
    before: str
    detail: str


class JobReadiness(NamedTuple):
    """``readiness.json``: whether the services of the job are ready, and which are not."""

    schema: int
    attempt: int
    ready: bool
    since: float | None
    timeout_s: float
    waiting: str  # missing services, for people
    seen: Mapping[str, int]
    expected: Mapping[str, int]
    rules: tuple[RuleReadiness, ...]
    time: float = 0.0


def request_paths(rule: ReadyRule) -> tuple[str, ...]:
    """Paths to request in turn; empty if accepting a connection is enough."""
    paths = PATHS.get(rule.kind, ())
    return (rule.path, *paths[1:]) if rule.path and paths else paths


def parse_dynamo(body: bytes) -> dict[str, int] | None:
    """Count prefill and decode workers in dynamo's ``/health``; None for another format.

    The body is ``{"instances": [{"endpoint": "generate", "component": "prefill"}]}``, or an object of such
    entries. Of the endpoints of a process, only ``generate`` counts. Decode workers, and those that do both,
    have the component ``decode``, ``backend`` or ``tensorrt_llm``.
    """
    instances = _parse_object(body).get("instances")
    if isinstance(instances, dict):
        instances = list(instances.values())
    if not isinstance(instances, list):
        return None
    components = [
        entry.get("component") for entry in instances if isinstance(entry, dict) and entry.get("endpoint") == "generate"
    ]
    return {
        PREFILL: components.count("prefill"),
        DECODE: sum(components.count(name) for name in ("decode", "backend", "tensorrt_llm")),
    }


def parse_sglang(body: bytes) -> dict[str, int] | None:
    """Count prefill and decode workers in ``/workers`` of SGLang's router; None for another format.

    The body is ``{"stats": {"prefill_count": 1, "decode_count": 1, "regular_count": 0}}``. A regular worker
    does both and counts as decode.
    """
    stats = _parse_object(body).get("stats")
    if not isinstance(stats, dict):
        return None
    prefill, decode, regular = (stats.get(f"{name}_count", 0) for name in ("prefill", "decode", "regular"))
    if not (_is_count(prefill) and _is_count(decode) and _is_count(regular)):
        return None
    return {PREFILL: prefill, DECODE: decode + regular}


def parse_models(body: bytes) -> list[str]:
    """Model names in an OpenAI-like ``/v1/models``: ``{"data": [{"id": "m"}]}``."""
    models = _parse_object(body).get("data")
    if not isinstance(models, list):
        return []
    return [entry["id"] for entry in models if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _parse_object(body: bytes) -> dict[str, object]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def rule_status(rule: ReadyRule, replies: Sequence[ServerReply]) -> RuleStatus:
    """Evaluate a rule. ``replies`` answer ``request_paths(rule)`` up to the first status other than 200."""
    for path, reply in zip(request_paths(rule), replies, strict=False):
        if reply.status != 200:
            return unreached_status(rule, f"{path} answers {reply.status}")
    if rule.kind in COUNTING_KINDS:
        counts = (parse_dynamo if rule.kind == "dynamo" else parse_sglang)(replies[0].body)
        if counts is None:
            return unreached_status(rule, f"{request_paths(rule)[0]} does not answer like {rule.kind}")
        seen = counts_by_role(counts, rule.expected)
        return RuleStatus(all(seen[role] >= number for role, number in rule.expected.items()), seen)
    if rule.kind == "vllm" and not parse_models(replies[1].body):
        return unreached_status(rule, f"{request_paths(rule)[1]} names no model")
    return RuleStatus(ready=True, seen=dict(rule.expected))


def unreached_status(rule: ReadyRule, detail: str) -> RuleStatus:
    """Result for a rule whose server did not answer as a ready one does."""
    return RuleStatus(ready=False, seen=dict.fromkeys(rule.expected, 0), detail=detail)


def counts_by_role(counts: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, int]:
    """Map an engine's counts to the job's roles. Decode workers fill the other roles in turn."""
    others = [role for role in expected if role != PREFILL]
    seen = {PREFILL: counts[PREFILL]} if PREFILL in expected else {}
    left = counts[DECODE]
    for role in others[:-1]:
        seen[role] = min(left, expected[role])
        left -= seen[role]
    return seen | dict.fromkeys(others[-1:], left)


def without_workers(
    rules: Sequence[ReadyRule], statuses: Sequence[RuleStatus], abandoned: Mapping[str, str]
) -> tuple[list[ReadyRule], list[RuleStatus]]:
    """Rules and results without the workers in ``abandoned`` (name -> role).

    A rule for such a worker is ready, and rules that count its role expect fewer workers.
    """
    lost = Counter(abandoned.values())
    asked, found = [], []
    for rule, status in zip(rules, statuses, strict=True):
        if rule.subject in abandoned:
            asked.append(replace(rule, expected={}))
            found.append(RuleStatus(ready=True, detail="abandoned"))
            continue
        if rule.kind in COUNTING_KINDS and any(lost[role] for role in rule.expected):
            expected = {role: max(0, number - lost[role]) for role, number in rule.expected.items()}
            rule = replace(rule, expected=expected)
            if not status.detail:  # the workers were counted
                enough = all(status.seen.get(role, 0) >= number for role, number in expected.items())
                status = replace(status, ready=enough)
        asked.append(rule)
        found.append(status)
    return asked, found


def worker_totals(rules: Sequence[ReadyRule], statuses: Sequence[RuleStatus]) -> tuple[dict[str, int], dict[str, int]]:
    """Workers seen and expected in the whole job, by role.

    If several front ends count the same workers, the lowest count wins. Rules for single workers are added up.
    A worker whose own rule is not ready does not count, whatever a front end reports.
    """
    views: dict[str, list[tuple[int, int]]] = {}
    singles: dict[str, tuple[int, int]] = {}
    for rule, status in zip(rules, statuses, strict=True):
        for role, number in rule.expected.items():
            here = status.seen.get(role, 0)
            if rule.kind in COUNTING_KINDS:
                views.setdefault(role, []).append((here, number))
            else:
                before = singles.get(role, (0, 0))
                singles[role] = (before[0] + here, before[1] + number)
    for role, sums in singles.items():
        views.setdefault(role, []).append(sums)
    seen = {role: min(here for here, _ in found) for role, found in views.items()}
    expected = {role: max(number for _, number in found) for role, found in views.items()}
    away = Counter(_polled_role(rule) for rule, status in zip(rules, statuses, strict=True) if not status.ready)
    for role in away.keys() & seen.keys():
        seen[role] = min(seen[role], max(0, expected[role] - away[role]))
    return seen, expected


def _polled_role(rule: ReadyRule) -> str:
    """Role of the worker that a rule polls; empty if it polls something else."""
    return rule.subject.rpartition("_w")[0]


def missing_text(
    rules: Sequence[ReadyRule], statuses: Sequence[RuleStatus], seen: Mapping[str, int], expected: Mapping[str, int]
) -> str:
    """Describe missing workers, ``4 prefills and 1 decodes``, and other services; empty when all are ready.

    A surplus in one role does not make up for a gap in another. Workers with their own rule are not named again
    if they are among the counted gaps.
    """
    if all(status.ready for status in statuses):
        return ""
    prefill, decode = missing_counts(seen, expected)
    counted = prefill + decode > 0
    parts = [f"{prefill} prefills and {decode} decodes"] if counted else []
    lacking = {role for role, number in expected.items() if seen.get(role, 0) < number}
    services = [
        rule.subject or "the model"
        for rule, status in zip(rules, statuses, strict=True)
        if not status.ready and not (counted and (rule.expected or _polled_role(rule) in lacking))
    ]
    return " and ".join(parts + shorten_names(list(dict.fromkeys(services))))


def shorten_names(names: Sequence[str]) -> list[str]:
    """The first ``MOST_NAMED`` names, and the number of others."""
    more = len(names) - MOST_NAMED
    return [*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])]


def missing_counts(seen: Mapping[str, int], expected: Mapping[str, int]) -> tuple[int, int]:
    """Missing prefill and decode workers; those that do both are decode."""
    lacking = {role: max(0, number - seen.get(role, 0)) for role, number in expected.items()}
    return lacking.get(PREFILL, 0), sum(number for role, number in lacking.items() if role != PREFILL)


def present_text(seen: Mapping[str, int]) -> str:
    """Describe the ready workers: ``4 prefills and 1 decodes``."""
    return f"{seen.get(PREFILL, 0)} prefills and {sum(seen.values()) - seen.get(PREFILL, 0)} decodes"


def describe_missing(
    plan: Plan, facts: RunFacts, readiness: JobReadiness | None, restarts: Mapping[int, int] | None = None
) -> list[str]:
    """List the services that were not ready in time and the ends of their logs, redacted.

    ``restarts`` are the current runs by rank, which are part of the log names.
    """
    rules = plan.readiness.rules if plan.readiness else ()
    statuses = readiness.rules if readiness is not None else ()
    lines: list[str] = []
    suspects: dict[int, TaskPlan] = {}
    for index, rule in enumerate(rules):
        status = statuses[index] if index < len(statuses) else None
        if status is not None and status.ready:
            continue
        seen, detail = (status.seen, status.detail) if status is not None else (NOTHING, "")
        lacking = {role: number - seen.get(role, 0) for role, number in rule.expected.items()}
        subject = rule.subject or "the model"
        asked = [planned for planned in plan.tasks if _is_polled_by(planned, rule)]
        if rule.kind in COUNTING_KINDS and not detail and status is not None:
            for role, number in lacking.items():
                if number <= 0:
                    continue
                workers = [task for task in plan.tasks if task.task.role == role and task.task.local_rank == 0]
                names = shorten_names([_worker_text(task, facts) for task in workers])
                lines.append(f"{role}: {number} of {rule.expected[role]} not ready, among {', '.join(names)}")
                suspects.update((task.task.rank, task) for task in workers)
        else:
            lines.append(f"{subject} is not ready: {detail or 'no answer yet'}")
            suspects.update((task.task.rank, task) for task in asked)
    lines = list(dict.fromkeys(lines))
    for task in list(suspects.values())[:MOST_NAMED]:
        lines += _last_lines(task, facts, (restarts or {}).get(task.task.rank, 0))
    return lines


def _is_polled_by(planned: TaskPlan, rule: ReadyRule) -> bool:
    """Whether a rule polls this task."""
    return planned.task.worker == rule.subject or (
        planned.task.node_index == rule.node and rule.port in planned.ports.values()
    )


def _worker_text(planned: TaskPlan, facts: RunFacts) -> str:
    return f"{planned.task.worker} on {facts.hosts[planned.task.node_index]}"


def _last_lines(planned: TaskPlan, facts: RunFacts, restart: int) -> list[str]:
    """Last lines of a task's logs, under their file names."""
    found = []
    node = facts.hosts[planned.task.node_index]
    for path in log_paths(planned.task, facts.run_dir, node, facts.attempt, restart):
        text = redact(read_last_bytes(path, 8192).decode("utf-8", "replace"))
        ends = [line.rstrip()[:MOST_LINE] for line in text.splitlines() if line.strip()][-MOST_LOG_LINES:]
        name = os.path.basename(path)
        found += [f"{name}:", *(f"    {line}" for line in ends)] if ends else [f"{name} is empty"]
    return found
