"""A pipeline as text and JSON: its plan, and the states of its jobs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.contract.records import JsonValue, to_json
from launcher.pipeline.directory import NEVER_STATE, PartState, PipelineRecord, pipeline_exit_status
from launcher.pipeline.plan import PlannedPipeline
from launcher.steps.slurm_steps import cluster_option
from launcher.sweep.directory import align_columns
from launcher.words import count_text, duration_text


def render_plan(pipeline: PlannedPipeline) -> list[str]:
    """A line per job."""
    rows = [("job", "file", "after", "nodes", "GPUs", "time limit")]
    for part in pipeline.parts:
        plan = part.plan
        size = (str(plan.nodes), str(plan.nodes * plan.gpus_per_node), str(plan.slurm.time_limit or "-"))
        file = part.file if part.points is None else f"{part.file} ({count_text(part.points, 'point')})"
        rows.append((part.name, file, _after_text(part.after), *size))
    return align_columns(rows)


def plan_json(pipeline: PlannedPipeline) -> dict[str, JsonValue]:
    """The plan as a JSON object."""
    jobs: list[JsonValue] = [
        {
            "name": part.name,
            "file": part.file,
            "after": dict(part.after),
            "nodes": part.plan.nodes,
            "gpus_per_node": part.plan.gpus_per_node,
            "points": part.points,
        }
        for part in pipeline.parts
    ]
    return {"schema": 1, "pipeline": pipeline.name, "jobs": jobs}


def render_states(record: PipelineRecord, states: Sequence[PartState]) -> list[str]:
    """A line per job, and the number of jobs by state."""
    rows = [("job", "state", "after", "id", "took", "cause")]
    for state in states:
        cause = " ".join((state.cause or "").split())
        if state.state == NEVER_STATE:
            ids = state.arrays or (state.job_id,)
            cause = f"to cancel it: {' '.join(('scancel', *cluster_option(record.cluster), *ids))}"
        elif state.state == "PENDING":
            cause = state.reason or ""
        elif state.points:
            cause = ", ".join(f"{count} {word}" for word, count in sorted(state.points.items()))
        took = "" if state.duration_s is None else duration_text(state.duration_s)
        rows.append((state.name, state_text(state), _after_text(state.after), state.job_id, took, cause))
    counts = Counter(state.state for state in states)
    totals = ", ".join(f"{count} {'never' if name == NEVER_STATE else name}" for name, count in counts.items())
    return [*align_columns(rows), f"{count_text(len(states), 'job')}: {totals}"]


def state_text(state: PartState) -> str:
    """``RUNNING``, or ``never (needs prep)``."""
    return f"never (needs {', '.join(state.needs)})" if state.state == NEVER_STATE else state.state


def states_json(directory: Path, record: PipelineRecord, states: Sequence[PartState]) -> dict[str, JsonValue]:
    """The states as a JSON object."""
    return {
        "schema": PipelineRecord.SCHEMA,
        "pipeline": record.name,
        "pipeline_dir": str(directory),
        "states": to_json(Counter(state.state for state in states)),
        "jobs": to_json(states),
        "exit_status": pipeline_exit_status(states),
    }


def _after_text(after: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {condition}" for name, condition in after.items()) or "-"
