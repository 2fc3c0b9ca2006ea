"""Plans of the points of a sweep, and its array jobs. Nothing is written or submitted."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonObject
from launcher.check.preflight import check_plan
from launcher.check.site_facts import check_partition, read_partitions
from launcher.errors import ConfigError, TopologyError
from launcher.jobfile.jobfile import ClusterSpec
from launcher.plan.plan import Plan, safe_file_word
from launcher.planner import planner
from launcher.planner.planned_job import PlannedJob, plan_job
from launcher.planner.planner import Invocation
from launcher.planner.slurm_options import with_dependency
from launcher.rundir.job_ids import task_ranges
from launcher.steps.batch_script import render_sbatch, sbatch_arguments
from launcher.sweep.points import ExpandedSweep, PointSpec, merge_problems, read_sweep


@dataclass(frozen=True)
class PlannedPoint:
    point: PointSpec
    planned_job: PlannedJob

    @property
    def plan(self) -> Plan:
        return self.planned_job.plan


@dataclass(frozen=True)
class PlannedSweep:
    sweep: ExpandedSweep
    points: tuple[PlannedPoint, ...]
    directory_name: str  # name of its directory, with `{array_job_id}`
    source: str

    @property
    def logs_dir(self) -> Path:
        return Path(self.points[0].plan.logs_dir)


@dataclass(frozen=True)
class Array:
    """One array job: points with the same Slurm options. Task index and point index are equal."""

    indexes: tuple[int, ...]
    tasks: str  # sbatch's --array: `0-5%2`
    plan: Plan  # plan of the first point, with the name of the sweep
    is_throttled: bool  # whether the sweep sets max_parallel


def plan_sweep(body: JsonObject, source: str, cluster: ClusterSpec, invocation: Invocation) -> PlannedSweep:
    """Plan every point. Raises ConfigError with the problems of all points."""
    sweep, specs = read_sweep(body, source)
    timestamp = invocation.timestamp
    directory = f"{{array_job_id}}_{safe_file_word(sweep.name)}_{timestamp}"
    planned: list[PlannedPoint] = []
    problems: dict[str, Sequence[str]] = {}
    for point, spec in zip(sweep.points, specs, strict=True):
        try:
            subject = plan_job(spec, cluster, invocation)
        except TopologyError as error:
            problems[point.name] = error.problems
            continue
        name = f"{directory}/{{job_id}}_{point.name}_{timestamp}"
        plan = dataclasses.replace(subject.plan, run_dir_name=name)
        planned.append(PlannedPoint(point, dataclasses.replace(subject, plan=plan)))
        if plan.slurm.het:
            problems[point.name] = ["slurm.het: Slurm has no arrays of heterogeneous jobs; leave het or the sweep out"]
    if found := merge_problems(problems, len(specs)) or _shared_directories(planned):
        raise ConfigError(source, found)
    return PlannedSweep(sweep, tuple(planned), directory, source)


def _shared_directories(points: Sequence[PlannedPoint]) -> list[str]:
    """Problems of points that write the same file names into one directory: each would count the others' files."""
    keys = {"output": "paths.output_dir", "checkpoint": "paths.checkpoint_dir", "log": "paths.log_dir"}
    problems: list[str] = []
    for name, key in keys.items():
        groups = [
            (group.directory, group.pattern)
            for point in points
            for group in (*point.plan.manifest.groups, point.plan.manifest.logs)
            if group is not None and group.name == name and group.pattern and Path(group.directory).is_absolute()
        ]
        twice = [place for place, count in Counter(groups).items() if count > 1]
        if twice and not any(problem.endswith(f'"{twice[0][0]}"') for problem in problems):
            fix = f"leave {key} out (then each uses its run directory), or write {{point}} into it"
            problems.append(f'{key}: points would write the same files; {fix}: "{twice[0][0]}"')
    return problems


def check_sweep(planned: PlannedSweep) -> list[str]:
    """Run the cheap checks of all points. Returns the warnings; raises ConfigError with the errors."""
    found: dict[str, dict[str, list[str]]] = {"warning": {}, "error": {}}
    local = planned.points[0].planned_job.local
    partitions = {} if local else read_partitions()
    for point in planned.points:
        at_site = () if local else check_partition(point.planned_job, partitions)
        for item in (*check_plan(point.planned_job), *at_site):
            if item.status in found:
                found[item.status].setdefault(point.point.name, []).append(str(item))
    count = len(planned.points)
    if found["error"]:
        raise ConfigError(planned.source, merge_problems(found["error"], count))
    return merge_problems(found["warning"], count)


def plan_arrays(planned: PlannedSweep, indexes: Collection[int], *, after: Collection[str] = ()) -> tuple[Array, ...]:
    """Array jobs for these points, after the array jobs ``after``.

    There is one array per set of Slurm options. Raises ConfigError if arrays must wait for others and the dependency of
    the job file uses ``?``.
    """
    groups: dict[tuple[str, ...], list[tuple[int, Plan]]] = {}
    for point in planned.points:
        if point.point.index in indexes:
            plan = dataclasses.replace(point.plan, job_name=planned.sweep.name, run_dir_name=planned.directory_name)
            same = (render_sbatch(plan), *sbatch_arguments(plan))
            groups.setdefault(same, []).append((point.point.index, plan))
    arrays = []
    for members in groups.values():
        own = tuple(index for index, _ in members)
        most = planned.sweep.max_parallel
        tasks = task_ranges(own) + (f"%{most}" if most is not None and most < len(own) else "")
        plan = members[0][1]
        slurm = plan.slurm._replace(directives={**plan.slurm.directives, "array": tasks})
        arrays.append(Array(own, tasks, dataclasses.replace(plan, slurm=slurm), most is not None))
    given = next((str(given) for array in arrays if "?" in (given := array.plan.slurm.dependency or "")), None)
    if given and planned.sweep.max_parallel is not None and (after or len(arrays) > 1):
        why = "with max_parallel an array of the sweep waits for the one before it, and sbatch refuses , with ?"
        raise ConfigError(planned.source, [f"slurm.dependency: {given!r}: {why}; join the jobs by , instead of ?"])
    return tuple(arrays)


def place_array(array: Array, logs_dir: Path, directory: str, previous: Collection[str] = ()) -> tuple[Plan, str]:
    """The plan and the batch script of an array in this directory, which may contain ``{array_job_id}``.

    Tasks find their run directories by links. The array starts when the array jobs ``previous`` have ended.
    """
    name = f"{directory}/{run_files.TASKS_DIR}/{{array_job_id}}_{{array_task_id}}"
    plan = array.plan
    if previous:
        given, behind = plan.slurm.dependency, ":".join(("afterany", *previous))
        plan = with_dependency(plan, f"{given},{behind}" if given else behind)
    plan = dataclasses.replace(plan, logs_dir=str(logs_dir), run_dir_name=name)
    return plan, render_sbatch(plan)


def adapt_sweep(planned: PlannedSweep, kill_wait_s: float, dependency: str | None) -> PlannedSweep:
    """Apply the cluster's KillWait, and a dependency that replaces the job file's."""
    points = []
    for one in planned.points:
        plan = planner.adapt_plan(one.plan, kill_wait_s, dependency)
        points.append(PlannedPoint(one.point, dataclasses.replace(one.planned_job, plan=plan)))
    return dataclasses.replace(planned, points=tuple(points))
