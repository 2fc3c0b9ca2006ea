"""Stages and readiness of a job, as seen from outside."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest
from exporter.contract.records import JsonObject, Record
from exporter.contract.status import RoleReadiness, TaskFacts
from exporter.contract.view import ReadinessView, WorkerView
from exporter.launch.readiness_reader import read_readiness
from launcher.plan.plan import BENCHMARK, PLAN_FILE, PREFILL, STAGES, WORKERS
from launcher.watch.merge import last_logged_events


class _PlannedTask(Record):
    task: TaskFacts
    stage: str = WORKERS
    service: bool = False


class _PlannedReadiness(Record):
    rules: tuple[JsonObject, ...] = ()


class _PlannedStages(Record):
    tasks: tuple[_PlannedTask, ...] = ()
    readiness: _PlannedReadiness | None = None


@dataclass(frozen=True)
class StageFacts:
    """Stages and services from the plan, or from the manifest if the plan is unreadable or unknown (another user's)."""

    has_readiness_rules: bool  # whether the job has readiness rules, as far as is known
    services: frozenset[int]  # ranks of the services
    stages: Mapping[int, int]  # position of each task's stage in the start order, by rank

    @classmethod
    def read(cls, manifest: Manifest) -> "StageFacts":
        """Read the facts of a run directory. Plans are large: call once."""
        plan = _PlannedStages.read_valid(manifest.run_dir / PLAN_FILE)
        if plan is None or not {planned.stage for planned in plan.tasks} <= set(STAGES):
            stages = {task.rank: STAGES.index(BENCHMARK if task.later else WORKERS) for task in manifest.tasks}
            return cls(has_readiness_rules=False, services=frozenset(), stages=stages)
        return cls(
            has_readiness_rules=plan.readiness is not None and bool(plan.readiness.rules),
            services=frozenset(planned.task.rank for planned in plan.tasks if planned.service),
            stages={planned.task.rank: STAGES.index(planned.stage) for planned in plan.tasks},
        )

    def waiting_ranks(self, workers: Iterable[WorkerView]) -> set[int]:
        """Ranks of the tasks whose stage has not started. A stage has started when one of its tasks has a run."""
        begun = [self.stages.get(worker.rank, 0) for worker in workers if worker.state != "not_found"]
        latest = max(begun, default=min(self.stages.values(), default=0))
        return {rank for rank, stage in self.stages.items() if stage > latest}


def readiness_view(
    run_dir: Path, attempt: int, *, has_readiness_rules: bool, start: float | None, phase: str
) -> ReadinessView | None:
    """Readiness of the services, since when, and which workers are missing.

    None if nothing is waited for. ``start`` of this attempt is in epoch seconds, or None before it.
    """
    found = None if start is None else read_readiness(run_dir, attempt)
    if found is None and not has_readiness_rules:
        return None
    is_ready = found is not None and found.ready
    lost_at = None if is_ready or start is None else _not_ready_since(run_dir, start, phase)
    if found is None:
        return ReadinessView(ready=False, not_ready_since=lost_at)
    return ReadinessView(
        ready=found.ready,
        since=found.since,
        waiting=found.waiting,
        workers={
            role: RoleReadiness(ready=ready, expected=expected) for role, (ready, expected) in found.roles.items()
        },
        not_ready_since=lost_at,
    )


def _not_ready_since(run_dir: Path, start: float, phase: str) -> float | None:
    """When readiness was lost, or the start of a job that was never ready; None if unknown."""
    for event in last_logged_events(run_dir, ("ready", "not ready"), start):
        return event.time if event.event == "not ready" else None
    return start if phase == "launching" else None


def output_tokens_rate(workers: Iterable[WorkerView]) -> float | None:
    """Output tokens per second of all engines; None if no log reports it.

    Prefill workers do not count: their only output is the first token of answers that decode workers write.
    """
    rates = [worker.output_tokens_per_second for worker in workers if worker.up and worker.role != PREFILL]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
