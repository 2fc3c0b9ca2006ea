"""Submit a pipeline: all jobs on hold with their dependencies, then its record, then all are released."""

import re
import time
from pathlib import Path

from exporter.contract import run_files
from launcher.errors import LauncherError, os_errors
from launcher.pipeline.directory import PipelinePart, PipelineRecord, write_record
from launcher.pipeline.plan import PlannedPart, PlannedPipeline
from launcher.plan.plan import DEFAULT_KILL_WAIT_S, safe_file_word
from launcher.planner.planner import adapt_plan
from launcher.registry.entries import PIPELINE_PREFIX
from launcher.rundir import rundir
from launcher.steps import slurm_steps
from launcher.steps.batch_script import render_sbatch
from launcher.sweep.plan import PlannedSweep, adapt_sweep
from launcher.sweep.submit import cancel_held, hold_sweep


def submit_pipeline(pipeline: PlannedPipeline) -> tuple[Path, PipelineRecord]:
    """Submit all jobs. Returns the pipeline's directory and its record.

    After an error nothing is left: neither a job nor a directory.
    """
    kill_wait_s = slurm_steps.read_kill_wait_s(DEFAULT_KILL_WAIT_S)
    held: list[tuple[str, str | None]] = []
    made: list[Path] = []
    parts: list[PipelinePart] = []
    try:
        for planned in pipeline.parts:
            parts.append(_submit_part(planned, parts, kill_wait_s, held, made))
        directory = _make_directory(pipeline)
        made.append(directory)
        submission = rundir.describe_submission(pipeline.parts[0].plan, pipeline_id(parts[0].job_id), held[0][1])
        record = PipelineRecord(
            submission={**submission, "job_name": pipeline.name}, cluster=held[0][1], parts=tuple(parts)
        )
        write_record(directory, record)
        for job_id, cluster in held:
            slurm_steps.release_job(job_id, cluster)
    except BaseException as error:
        try:
            # the last one first: none may start because one before it was cancelled
            cancel_held(held[::-1], error)
        finally:
            for path in made:
                rundir.discard_run_dir(path)
        raise
    return directory, record


def pipeline_id(first_job_id: str) -> str:
    """Its id in the index of jobs."""
    return f"{PIPELINE_PREFIX}{first_job_id}"


def _submit_part(
    planned: PlannedPart,
    before: list[PipelinePart],
    kill_wait_s: float,
    held: list[tuple[str, str | None]],
    made: list[Path],
) -> PipelinePart:
    """Submit one job or sweep on hold, and append it to ``held`` and its directory to ``made``."""
    dependency = planned.dependency({part.name: ":".join(part.job_ids) for part in before})
    if isinstance(planned.planned, PlannedSweep):
        return _submit_sweep(planned, adapt_sweep(planned.planned, kill_wait_s, dependency), held, made)
    plan = adapt_plan(planned.plan, kill_wait_s, dependency)
    staging = rundir.stage_run_dir(plan, render_sbatch(plan))
    made.append(staging)
    with slurm_steps.deferred_interrupt():
        submitted = slurm_steps.submit_held(plan, staging / "sbatch_script.sh")
        held.append(submitted)
    job_id, cluster = submitted
    _require_cluster(planned.name, cluster, held[0][1])
    made[-1] = rundir.finalize_run_dir(staging, plan, job_id, cluster)
    return PipelinePart(
        name=planned.name, file=planned.file, job_id=job_id, run_dir=str(made[-1]), after=dict(planned.after)
    )


def _submit_sweep(
    part: PlannedPart, planned: PlannedSweep, held: list[tuple[str, str | None]], made: list[Path]
) -> PipelinePart:
    home, record = hold_sweep(planned, part.text.encode())
    held += [(array.job_id, array.cluster) for array in record.arrays]
    made.append(home)
    for array in record.arrays:
        _require_cluster(part.name, array.cluster, held[0][1])
    ids = tuple(array.job_id for array in record.arrays)
    return PipelinePart(
        name=part.name, file=part.file, job_id=ids[0], run_dir=str(home), after=dict(part.after), arrays=ids
    )


def _require_cluster(name: str, cluster: str | None, first: str | None) -> None:
    if cluster != first:
        raise LauncherError(
            f"job {name!r} went to the cluster {cluster or 'of this machine'}, and the first one to "
            f"{first or 'that of this machine'}; jobs of several clusters cannot wait for each other"
        )


def _make_directory(pipeline: PlannedPipeline) -> Path:
    """Make the pipeline's directory, beside the run directory of its first job."""
    logs_dir = Path(pipeline.parts[0].plan.logs_dir)
    stem = f"pipeline_{safe_file_word(pipeline.name)}_{time.strftime('%Y%m%d_%H%M%S')}"
    taken = sum(bool(re.fullmatch(rf"{re.escape(stem)}(-\d+)?", path.name)) for path in logs_dir.glob("pipeline_*"))
    directory = logs_dir / (f"{stem}-{taken + 1}" if taken else stem)
    with os_errors(f"{directory} cannot be created"):
        directory.mkdir(run_files.FOLDER_MODE)
    return directory
