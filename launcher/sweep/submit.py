"""Submit the points of a sweep: complete their directories, submit their arrays on hold, release all."""

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonObject
from launcher.errors import LauncherError, SlurmError, os_errors
from launcher.rundir import rundir
from launcher.steps import slurm_steps
from launcher.sweep.directory import JOB_FILE, SweepArray, SweepPoint, SweepRecord, with_runs, write_record
from launcher.sweep.plan import Array, PlannedPoint, PlannedSweep, place_array, plan_arrays


def new_record(planned: PlannedSweep, sweep_id: str, *, local: bool) -> SweepRecord:
    submission = rundir.describe_submission(planned.points[0].plan, sweep_id)
    points = tuple(SweepPoint(one.point.index, one.point.name, one.point.values) for one in planned.points)
    return SweepRecord(
        submission={**submission, "job_name": planned.sweep.name},
        max_parallel=planned.sweep.max_parallel,
        local=local,
        points=points,
    )


def check_array_size(planned: PlannedSweep) -> None:
    """Raise LauncherError if the sweep has more points than the cluster's MaxArraySize."""
    try:
        text = slurm_steps.run_command(["scontrol", "show", "config"], timeout_s=10.0)
    except SlurmError:
        return
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    if match and len(planned.points) > int(match[1]):
        raise LauncherError(
            f"{planned.source}: the sweep has {len(planned.points)} points and this cluster accepts at most {match[1]} "
            "in an array (MaxArraySize); split the sweep over several files"
        )


def submit_sweep(planned: PlannedSweep, job_text: bytes) -> tuple[Path, SweepRecord]:
    """Submit every point in a new directory. Returns the directory and its record."""
    home, record = hold_sweep(planned, job_text)
    try:
        for array in record.arrays:
            slurm_steps.release_job(array.job_id, array.cluster)
    except BaseException as error:
        rundir.discard_run_dir(home)
        cancel_held([(array.job_id, array.cluster) for array in record.arrays], error)
        raise
    return home, record


def hold_sweep(planned: PlannedSweep, job_text: bytes) -> tuple[Path, SweepRecord]:
    """Submit every point on hold in a new directory. Returns the directory and its record.

    After an error nothing is left.
    """
    held: list[_HeldArray] = []
    indexes = [one.point.index for one in planned.points]
    arrays = plan_arrays(planned, indexes)
    staging = make_sweep_dir(planned.logs_dir, job_text)
    try:
        staged = stage_points(planned, indexes, staging)
        _submit(arrays, planned.logs_dir, planned.directory_name, staging, held)
        record = new_record(planned, held[0].array.job_id, local=False)
        runs = _settle(planned, held, staged, record, staging)
        record = with_runs(record, runs).replace(arrays=tuple(array.array for array in held))
        write_record(staging, record)
        final = planned.logs_dir / planned.directory_name.replace("{array_job_id}", held[0].array.job_id, 1)
        _rename(staging, final)
    except BaseException as error:
        rundir.discard_run_dir(staging)
        _cancel(held, error)
        raise
    return final, record


def resume_sweep(
    planned: PlannedSweep, sweep_dir: Path, record: SweepRecord, indexes: Collection[int], after: Sequence[str] = ()
) -> tuple[SweepRecord, tuple[SweepArray, ...]]:
    """Submit these points again in the same directory. Returns the new record and the new arrays.

    If max_parallel is set, they start when the unfinished array jobs ``after`` have ended.
    """
    planned_arrays = plan_arrays(planned, indexes, after=after)
    held: list[_HeldArray] = []
    made: list[Path] = []
    written = False
    staging = make_sweep_dir(sweep_dir, None)
    try:
        staged = stage_points(planned, indexes, staging)
        _submit(planned_arrays, sweep_dir.parent, sweep_dir.name, staging, held, after)
        runs = _settle(planned, held, staged, record, staging)
        arrays = tuple(array.array for array in held)
        changed = with_runs(record, runs).replace(arrays=(*record.arrays, *arrays))
        links = [f"{run_files.TASKS_DIR}/{link.name}" for link in (staging / run_files.TASKS_DIR).iterdir()]
        for name in (*runs.values(), *links):
            _rename(staging / name, sweep_dir / name)
            made.append(sweep_dir / name)
        write_record(sweep_dir, changed)
        written = True
        _release(held)
    except BaseException as error:
        try:
            _cancel(held, error)
        finally:
            for path in (staging, *made):
                path.unlink() if path.is_symlink() else rundir.discard_run_dir(path)
            if written:
                write_record(sweep_dir, record)
        raise
    rundir.discard_run_dir(staging)
    return changed, arrays


def make_sweep_dir(logs_dir: Path, job_text: bytes | None) -> Path:
    """Make a hidden directory for run directories, with a copy of the job file."""
    staging = logs_dir / rundir.staging_name()
    with os_errors(f"{staging} cannot be created"):
        staging.mkdir(run_files.FOLDER_MODE, parents=True)
    if job_text is not None:
        keep_job_file(staging, job_text)
    return staging


def keep_job_file(sweep_dir: Path, text: bytes) -> None:
    """Keep a copy of the job file that only the owner can read: its variables may be secrets."""
    with os_errors(f"{sweep_dir / JOB_FILE} cannot be written"):
        (sweep_dir / JOB_FILE).touch(0o600)
        (sweep_dir / JOB_FILE).write_bytes(text)


def stage_points(planned: PlannedSweep, indexes: Collection[int], staging: Path) -> dict[int, Path]:
    """Make run directories without a job id or batch script, by index of the point."""
    return {index: rundir.stage_run_dir(planned.points[index].plan, "", staging) for index in sorted(indexes)}


def settle_point(
    planned_point: PlannedPoint,
    job_id: str,
    staged: Path,
    record: SweepRecord,
    sweep_dir: Path,
    script: str,
    array: SweepArray | None = None,
) -> str:
    """Complete a point's run directory with its batch script and its final name, which is returned."""
    name = planned_point.plan.run_dir(job_id).name
    of_array: JsonObject = {"cluster": None}
    if array is not None:  # that of a resumed point is later than the sweep
        of_array = {"cluster": array.cluster, "submitted": array.submitted}
    submission = {**record.submission, "job_id": job_id, "job_name": planned_point.plan.job_name, **of_array}
    with os_errors(f"{staged} cannot be written"):
        (staged / "sbatch_script.sh").write_text(script, encoding="utf-8", errors="surrogateescape")
        run_files.write_json(staged / f"{job_id}.json", submission, durable=False)
    _rename(staged, sweep_dir / name)
    return name


@dataclass(frozen=True)
class _HeldArray:
    """An array on hold."""

    indexes: tuple[int, ...]
    array: SweepArray
    script: str


def _submit(
    arrays: Sequence[Array],
    logs_dir: Path,
    directory: str,
    staging: Path,
    held: list[_HeldArray],
    after: Sequence[str] = (),
) -> None:
    """Submit arrays on hold and append each to ``held``.

    With max_parallel each array waits for the one before it, and the first for ``after``.
    """
    for number, array in enumerate(arrays):
        here = directory.replace("{array_job_id}", held[0].array.job_id, 1) if held else directory
        before = (held[-1].array.job_id,) if held else after
        previous = before if array.is_throttled else ()
        plan, script = place_array(array, logs_dir, here, previous)
        path = staging / f"array_{number}.sh"
        path.touch(0o600)  # may contain keys
        path.write_text(script, encoding="utf-8", errors="surrogateescape")
        with slurm_steps.deferred_interrupt():
            job_id, cluster = slurm_steps.submit_held(plan, path)
            held.append(_HeldArray(array.indexes, SweepArray(job_id, array.tasks, time.time(), cluster), script))
        path.unlink()


def _settle(
    planned: PlannedSweep, held: Sequence[_HeldArray], staged: Mapping[int, Path], record: SweepRecord, staging: Path
) -> dict[int, str]:
    """Name the run directories, by index, and link each from the job id that Slurm shows."""
    names, links = {}, staging / run_files.TASKS_DIR
    with os_errors(f"{links} cannot be created"):
        links.mkdir(run_files.FOLDER_MODE)
        for array in held:
            for index in array.indexes:
                job_id, one = f"{array.array.job_id}_{index}", planned.points[index]
                facts = (job_id, staged[index], record, staging, array.script, array.array)
                names[index] = settle_point(one, *facts)
                (links / job_id).symlink_to(Path("..", names[index]))
    return names


def _release(held: Sequence[_HeldArray]) -> None:
    for array in held:
        slurm_steps.release_job(array.array.job_id, array.array.cluster)


def _cancel(held: Sequence[_HeldArray], cause: BaseException) -> None:
    cancel_held([(array.array.job_id, array.array.cluster) for array in held], cause)


def cancel_held(held: Sequence[tuple[str, str | None]], cause: BaseException) -> None:
    """Cancel jobs of clusters after an error: they would stay on hold forever. Raises LauncherError for those left."""
    left = []
    for job_id, cluster in held:
        try:
            slurm_steps.cancel_job(job_id, cluster)
        except LauncherError as error:
            left.append(f"{job_id} ({error})")
    if left:
        message = f"{cause}\n  jobs on hold that could not be cancelled: {', '.join(left)}; cancel them by hand"
        raise LauncherError(message) from cause


def _rename(source: Path, target: Path) -> None:
    with os_errors(f"{target} cannot be created"):
        os.rename(source, target)
