"""What the tasks of a job wait for, as those see it who look from outside: its stages, and its readiness."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest
from exporter.launch.readiness_reader import read_readiness
from exporter.logs.places_reader import read_last_bytes
from launcher.plan.plan import BENCHMARK, PLAN_FILE, PREFILL, STAGES, WORKERS

EVENTS_TAIL_BYTES = 64 * 1024  # of `events.jsonl`: when readiness was lost is told there


@dataclass(frozen=True)
class StageFacts:
    """What the plan says of the stages of a job; by the manifest alone where somebody else's plan cannot be read."""

    asked: bool  # whether readiness is waited for, as far as is known
    services: frozenset[int]  # ranks of the tasks that serve until the job is over
    stages: Mapping[int, int]  # places of the tasks' stages in the order of their starts, by rank

    @classmethod
    def read(cls, manifest: Manifest) -> "StageFacts":
        """Those of a run directory. Plans are large: read once."""
        plan: Any = run_files.read_json(manifest.run_dir / PLAN_FILE)
        if plan is None:
            stages = {task.rank: STAGES.index(BENCHMARK if task.later else WORKERS) for task in manifest.tasks}
            return cls(asked=False, services=frozenset(), stages=stages)
        tasks = plan["tasks"]
        return cls(
            asked=bool((plan.get("readiness") or {}).get("rules")),
            services=frozenset(planned["task"]["rank"] for planned in tasks if planned.get("service")),
            stages={planned["task"]["rank"]: STAGES.index(planned.get("stage", WORKERS)) for planned in tasks},
        )

    def waiting(self, workers: Iterable[Mapping[str, Any]]) -> set[int]:
        """Ranks of the tasks whose stage has not begun, in a job that runs: one that has has a run by now."""
        begun = [self.stages.get(worker["rank"], 0) for worker in workers if worker["state"] != "not_found"]
        latest = max(begun, default=min(self.stages.values(), default=0))
        return {rank for rank, stage in self.stages.items() if stage > latest}


def readiness_view(
    run_dir: Path, attempt: int, *, asked: bool, start: float | None, phase: str
) -> dict[str, Any] | None:
    """Whether the services of a job that is not over are ready, since when, and who is waited for.

    None where nothing is waited for. ``start`` is that of this attempt in epoch seconds, None before it has begun.
    """
    found = None if start is None else read_readiness(run_dir, attempt)
    if found is None and not asked:
        return None
    body: dict[str, Any] = {"ready": False, "since": None, "not_ready_since": None, "waiting": "", "workers": {}}
    if found is not None:
        workers = {entry.role: {"ready": entry.seen, "expected": entry.expected} for entry in found.roles}
        body |= {"ready": found.ready, "since": found.since, "waiting": found.waiting, "workers": workers}
    if not body["ready"] and start is not None:
        body["not_ready_since"] = _not_ready_since(run_dir, start, phase)
    return body


def _not_ready_since(run_dir: Path, start: float, phase: str) -> float | None:
    """When readiness was lost, or the start of a job that never was ready; None where that cannot be told."""
    for line in reversed(read_last_bytes(run_dir / run_files.EVENTS_FILE, EVENTS_TAIL_BYTES).splitlines()):
        if b'"event": "ready"' not in line and b'"event": "not ready"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue  # cut off at its begin
        if event.get("event") not in ("ready", "not ready") or event["time"] < start:
            continue
        return float(event["time"]) if event["event"] == "not ready" else None
    return start if phase == "launching" else None


def output_tokens_rate(workers: Iterable[Mapping[str, Any]]) -> float | None:
    """Tokens per second that the engines of a job make together; None where no log says.

    What prefill workers make beside reading is the first token of an answer that others write.
    """
    rates = [worker.get("output_tokens_per_second") for worker in workers if worker["up"] and worker["role"] != PREFILL]
    known = [float(rate) for rate in rates if rate is not None]
    return sum(known) if known else None
