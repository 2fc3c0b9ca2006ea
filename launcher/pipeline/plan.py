"""Plan a pipeline: check all of its files, and put its jobs into an order in which each comes after those it needs."""

from collections.abc import Callable, Mapping
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from launcher.errors import ConfigError, ConfigErrors, LauncherError, did_you_mean
from launcher.jobfile.pipeline.pipeline_spec import PipelineSpec, parse_pipeline
from launcher.plan.plan import Plan
from launcher.planner.planned_job import JobText, read_job_text
from launcher.sweep.plan import PlannedSweep, plan_arrays
from launcher.words import count_text

SLURM_CONDITIONS = {
    "ok": "afterok",
    "any": "afterany",
    "notok": "afternotok",
    "start": "after",
    "each": "aftercorr",
}  # of sbatch(1)

CheckJob = Callable[[JobText], Plan | PlannedSweep]


@dataclass(frozen=True)
class PlannedPart:
    """A job or sweep of a pipeline, ready to be submitted."""

    name: str
    file: str  # as the pipeline file names it
    after: Mapping[str, str]  # condition by name of the job before
    planned: Plan | PlannedSweep
    text: str = ""  # of its job file

    @property
    def plan(self) -> Plan:
        """The plan of the job, or of the first point of the sweep."""
        return self.planned.points[0].plan if isinstance(self.planned, PlannedSweep) else self.planned

    @property
    def points(self) -> int | None:
        """Number of points; None if it is no sweep."""
        return len(self.planned.points) if isinstance(self.planned, PlannedSweep) else None

    def dependency(self, job_ids: Mapping[str, str]) -> str | None:
        """Its dependency for sbatch, with that of its own job file; None if it waits for nothing.

        ``job_ids`` of a sweep are those of all its arrays, with colons: Slurm waits for all their tasks.
        """
        parts = [f"{SLURM_CONDITIONS[condition]}:{job_ids[name]}" for name, condition in self.after.items()]
        own = [self.plan.slurm.dependency] if self.plan.slurm.dependency else []
        return ",".join([*own, *parts]) or None


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline whose jobs have been checked, each after those it needs."""

    name: str
    parts: tuple[PlannedPart, ...]


def plan_pipeline(file: JobText, check_job: CheckJob) -> PlannedPipeline:
    """Plan all jobs. Raises ConfigErrors with all problems of all files."""
    try:
        spec = parse_pipeline(file.text, file.source)
    except ConfigError as error:
        raise ConfigErrors([error]) from error
    own, errors, plans = list[str](), list[ConfigError](), dict[str, PlannedPart]()
    own += _name_problems(spec)
    checked: dict[str, tuple[Plan | PlannedSweep, str]] = {}  # one file may be several jobs
    for name, part in spec.jobs.items():
        try:
            if part.file not in checked:
                job = read_job_text(file.job_dir / Path(part.file).expanduser())
                checked[part.file] = check_job(job), job.text
            plans[name] = PlannedPart(name, part.file, part.after, *checked[part.file])
        except ConfigError as error:
            errors.append(error)
        except ConfigErrors as several:
            errors += several.errors
        if name in plans and part.after and "?" in (given := plans[name].plan.slurm.dependency or ""):
            own.append(
                f"jobs.{name}.after: {part.file} has slurm.dependency {given!r}, to which it cannot be added; "
                "join those jobs by , instead of ?"
            )
    own += [problem for part in plans.values() for problem in _sweep_problems(part, plans)]
    if own:
        errors.insert(0, ConfigError(file.source, own))
    if errors:
        raise ConfigErrors(list({str(error): error for error in errors}.values()))
    order = sorted_names({name: tuple(part.after) for name, part in spec.jobs.items()})
    return PlannedPipeline(spec.name, tuple(plans[name] for name in order))


def _sweep_problems(part: PlannedPart, parts: Mapping[str, PlannedPart]) -> list[str]:
    """Conditions that cannot be those of the jobs and sweeps that they are about."""
    problems = []
    for name, condition in part.after.items():
        before, place = parts.get(name), f"jobs.{part.name}.after"
        if before is None:
            continue  # reported elsewhere
        if condition == "each" and (before.points is None or part.points != before.points):
            counts = f"{_size_text(before)} and {_size_text(part)}"
            problems.append(f"{place}: each is of two sweeps with equal numbers of points, not {counts}; use ok or any")
        elif condition == "each" and _array_count(before) + _array_count(part) > 2:
            problems.append(
                f"{place}: each needs points with the same Slurm options within each sweep; let slurm and resources "
                "be alike in all points, or use ok"
            )
        elif condition == "notok" and _array_count(before) > 1:
            problems.append(
                f"{place}: {name!r} is a sweep of several arrays, since its points have different Slurm options, and "
                "sbatch cannot wait for a failure in one of them; use any"
            )
    return problems


def _size_text(part: PlannedPart) -> str:
    return f"the job {part.name!r}" if part.points is None else f"{count_text(part.points, 'point')} of {part.name!r}"


def _array_count(part: PlannedPart) -> int:
    planned = part.planned
    return len(plan_arrays(planned, range(len(planned.points)))) if isinstance(planned, PlannedSweep) else 1


def _name_problems(spec: PipelineSpec) -> list[str]:
    """Unknown names in ``after``, and jobs that wait for themselves."""
    problems = []
    for name, part in spec.jobs.items():
        for before in part.after:
            place = f"jobs.{name}.after"
            if before == name:
                problems.append(f"{place}: {name!r} waits for itself; name another job or leave it out")
            elif before not in spec.jobs:
                known = ", ".join(sorted(spec.jobs.keys() - {name})) or "none"
                problems.append(
                    f"{place}: no job is named {before!r}{did_you_mean(before, spec.jobs)} (known: {known})"
                )
    needs = {
        name: tuple(before for before in part.after if before in spec.jobs and before != name)
        for name, part in spec.jobs.items()
    }
    if cycle := find_cycle(needs):
        path = " -> ".join((*cycle, cycle[0]))
        problems.append(f"jobs.{cycle[0]}.after: {path} wait for each other; remove one of these")
    return problems


def find_cycle(needs: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Names of which each needs the next one, and the last one the first; empty if there are none."""
    left = dict(needs)
    while ready := [name for name, before in left.items() if not any(other in left for other in before)]:
        for name in ready:
            del left[name]
    path = list(left)[:1]
    while path and path.count(path[-1]) == 1:  # each of those left needs another one of them
        path.append(next(other for other in left[path[-1]] if other in left))
    return tuple(path[path.index(path[-1]) : -1]) if path else ()


def sorted_names(needs: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names, each after all that it needs, else in their own order. Raises LauncherError if that is impossible."""
    order: dict[str, None] = {}
    while len(order) < len(needs):
        ready = next((name for name in needs if name not in order and all(one in order for one in needs[name])), None)
        if ready is None:
            raise LauncherError(f"{', '.join(needs.keys() - order.keys())} wait for each other")
        order[ready] = None
    return tuple(order)
