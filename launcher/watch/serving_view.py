"""Stages and readiness of a job, as seen from outside."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest
from exporter.launch.readiness_reader import read_readiness
from exporter.logs.log_files_reader import read_last_bytes
from launcher.plan.plan import BENCHMARK, PLAN_FILE, PREFILL, STAGES, WORKERS

EVENTS_TAIL_BYTES = 64 * 1024  # end of `events.jsonl` searched for the loss of readiness


@dataclass(frozen=True)
class StageFacts:
    """Stages and services from the plan, or from the manifest if the plan is unreadable (another user's)."""

    has_readiness_rules: bool  # whether the job has readiness rules, as far as is known
    services: frozenset[int]  # ranks of the services
    stages: Mapping[int, int]  # position of each task's stage in the start order, by rank

    @classmethod
    def read(cls, manifest: Manifest) -> "StageFacts":
        """Read the facts of a run directory. Plans are large: call once."""
        plan: Any = run_files.read_json(manifest.run_dir / PLAN_FILE)
        if plan is None:
            stages = {task.rank: STAGES.index(BENCHMARK if task.later else WORKERS) for task in manifest.tasks}
            return cls(has_readiness_rules=False, services=frozenset(), stages=stages)
        tasks = plan["tasks"]
        return cls(
            has_readiness_rules=bool((plan.get("readiness") or {}).get("rules")),
            services=frozenset(planned["task"]["rank"] for planned in tasks if planned.get("service")),
            stages={planned["task"]["rank"]: STAGES.index(planned.get("stage", WORKERS)) for planned in tasks},
        )

    def waiting_ranks(self, workers: Iterable[Mapping[str, Any]]) -> set[int]:
        """Ranks of the tasks whose stage has not started. A stage has started when one of its tasks has a run."""
        begun = [self.stages.get(worker["rank"], 0) for worker in workers if worker["state"] != "not_found"]
        latest = max(begun, default=min(self.stages.values(), default=0))
        return {rank for rank, stage in self.stages.items() if stage > latest}


def readiness_view(
    run_dir: Path, attempt: int, *, has_readiness_rules: bool, start: float | None, phase: str
) -> dict[str, Any] | None:
    """Readiness of the services, since when, and which workers are missing.

    None if nothing is waited for. ``start`` of this attempt is in epoch seconds, or None before it.
    """
    found = None if start is None else read_readiness(run_dir, attempt)
    if found is None and not has_readiness_rules:
        return None
    body: dict[str, Any] = {"ready": False, "since": None, "not_ready_since": None, "waiting": "", "workers": {}}
    if found is not None:
        workers = {role: {"ready": ready, "expected": expected} for role, (ready, expected) in found.roles.items()}
        body |= {"ready": found.ready, "since": found.since, "waiting": found.waiting, "workers": workers}
    if not body["ready"] and start is not None:
        body["not_ready_since"] = _not_ready_since(run_dir, start, phase)
    return body


def _not_ready_since(run_dir: Path, start: float, phase: str) -> float | None:
    """When readiness was lost, or the start of a job that was never ready; None if unknown."""
    for line in reversed(read_last_bytes(run_dir / run_files.EVENTS_FILE, EVENTS_TAIL_BYTES).splitlines()):
        if b'"event": "ready"' not in line and b'"event": "not ready"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the first line may be cut off
        if event.get("event") not in ("ready", "not ready") or event["time"] < start:
            continue
        return float(event["time"]) if event["event"] == "not ready" else None
    return start if phase == "launching" else None


def output_tokens_rate(workers: Iterable[Mapping[str, Any]]) -> float | None:
    """Output tokens per second of all engines; None if no log reports it.

    Prefill workers do not count: their only output is the first token of answers that decode workers write.
    """
    rates = [worker.get("output_tokens_per_second") for worker in workers if worker["up"] and worker["role"] != PREFILL]
    known = [float(rate) for rate in rates if rate is not None]
    return sum(known) if known else None
