"""The commands of a sweep: what `plan`, `check`, `submit` and `run` do for one, and `gpujob sweep`."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.errors import ConfigError, ConfigErrors, LauncherError

if TYPE_CHECKING:
    from launcher.sweep_dir import SweepRecord
    from launcher.sweep_plan import PlannedPoint, PlannedSweep

INTERRUPTED = 130


def planned_sweep(job: str, *, local: bool) -> "PlannedSweep | None":
    """The sweep of a job file, planned; None for a file without one. Raises with all that is wrong."""
    from launcher.config import load_cluster, read_job
    from launcher.sweep import is_sweep
    from launcher.sweep_plan import plan_sweep

    try:
        if "sweep" not in Path(job).read_text(encoding="utf-8"):
            return None
        body = read_job(Path(job))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None  # what cannot be read is told as it is of any job file
    if not is_sweep(body):
        return None
    cluster, workdir = load_cluster(os.environ, Path.cwd()), Path.cwd()
    timestamp = time.strftime("%Y%m%d_%H%M%S")
    job_dir = Path(job).resolve().parent
    try:
        return plan_sweep(body, job, cluster, job_dir=job_dir, workdir=workdir, timestamp=timestamp, local=local)
    except ConfigError as error:
        raise ConfigErrors([error]) from error


def _again(home: Path, record: "SweepRecord") -> "PlannedSweep":
    """The sweep in a directory, planned anew from its own copy of the job file."""
    from launcher.config import load_cluster, read_job
    from launcher.sweep_dir import JOB_FILE
    from launcher.sweep_plan import plan_sweep

    workdir, job_dir = Path(str(record.submission["workdir"])), Path(str(record.submission["job_dir"]))
    return plan_sweep(
        read_job(home / JOB_FILE),
        str(home / JOB_FILE),
        load_cluster(os.environ, workdir),
        job_dir=job_dir,
        workdir=workdir,
        timestamp=time.strftime("%Y%m%d_%H%M%S"),
        local=record.local,
    )


def _same_points(planned: "PlannedSweep", record: "SweepRecord") -> None:
    ours = {one.point.name: dict(one.point.values) for one in planned.points}
    theirs = {point.name: dict(point.values) for point in record.points}
    if list(ours.items()) != list(theirs.items()):
        odd = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
        raise ConfigError(
            planned.source,
            [f"its points are not those of the sweep that is to be resumed: {', '.join(odd[:4]) or 'their order'}"],
        )


def choose_point(planned: "PlannedSweep", point: str) -> "PlannedPoint":
    """The point of this name or number."""
    for one in planned.points:
        if point in (one.point.name, str(one.point.index)):
            return one
    known = ", ".join(one.point.name for one in planned.points[:8])
    more = ", ..." if len(planned.points) > 8 else ""
    raise LauncherError(
        f"--point: {planned.source} has no point {point!r}; name one or give its number ({known}{more})"
    )


def script_of_point(planned: "PlannedSweep", one: "PlannedPoint") -> str:
    """The batch script of one point: that of an array of its own."""
    from launcher.sweep_plan import place_array, plan_arrays

    (array,) = plan_arrays(planned, [one.point.index])
    return place_array(array, planned.logs_dir, planned.directory)[1]


def describe_sweep(planned: "PlannedSweep", *, local: bool) -> dict[str, Any]:
    """What will run, for programs."""
    from launcher.sweep_plan import place_array, plan_arrays

    arrays = () if local else plan_arrays(planned, range(len(planned.points)))
    array_of = {index: number for number, array in enumerate(arrays) for index in array.indexes}
    return {
        "schema": 1,
        "sweep": planned.sweep.name,
        "max_parallel": planned.sweep.max_parallel or (1 if local else None),
        "sweep_dir": str(planned.logs_dir / planned.directory),
        "points": [
            {
                "index": one.point.index,
                "name": one.point.name,
                "values": dict(one.point.values),
                "nodes": one.plan.nodes,
                "gpus_per_node": one.plan.gpus_per_node,
                "gpus": one.plan.nodes * one.plan.gpus_per_node,
                "time_limit": one.plan.slurm.get("time_limit"),
                "run_dir": str(one.plan.run_dir("{job_id}")),
                "array": array_of.get(one.point.index),
            }
            for one in planned.points
        ],
        "arrays": [
            {
                "tasks": array.tasks,
                "points": list(array.indexes),
                "script": place_array(array, planned.logs_dir, planned.directory)[1],
            }
            for array in arrays
        ],
    }


def render_sweep(described: Mapping[str, Any]) -> list[str]:
    """What will run, for people."""
    from launcher.sweep import text_of
    from launcher.sweep_dir import table

    rows = [("", "point", "values", "nodes", "GPUs", "time limit")]
    for point in described["points"]:
        values = " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else text_of(value)}"
            for key, value in point["values"].items()
        )
        limit = point["time_limit"] or "-"
        rows.append((str(point["index"]), point["name"], values, str(point["nodes"]), str(point["gpus"]), limit))
    most = described["max_parallel"]
    at_once = f"at most {most} at once" if most else "as many at once as there is room for"
    lines = [*table(rows), "", f"{len(described['points'])} points, {at_once}", f"directory: {described['sweep_dir']}"]
    arrays = described["arrays"]
    for number, array in enumerate(arrays):
        lines.append("")
        if len(arrays) > 1:
            after = ", after the one before" if number and most else ""
            points = array["tasks"].partition("%")[0]
            lines.append(f"array {number + 1} of {len(arrays)}: points {points}, which ask for the same{after}")
        lines.append(array["script"].rstrip("\n"))
    return lines


def show_plan(planned: "PlannedSweep", *, local: bool, as_json: bool) -> None:
    """Print what will run."""
    described = describe_sweep(planned, local=local)
    click.echo(json.dumps(described, ensure_ascii=False) if as_json else "\n".join(render_sweep(described)))


def _warn(planned: "PlannedSweep", *, quiet: bool) -> None:
    """Raise with every error found before the start; warnings are only shown."""
    from launcher.sweep_plan import check_sweep

    for warning in check_sweep(planned):
        if not quiet:
            click.echo(f"gpujob: warning: {warning}", err=True)


def _for_slurm(planned: "PlannedSweep", dependency: str | None) -> "PlannedSweep":
    """The sweep with what only Slurm can tell, and what the command adds."""
    from launcher.plan import DEFAULT_KILL_WAIT_S
    from launcher.slurm import read_kill_wait_s
    from launcher.sweep_plan import adapted
    from launcher.sweep_submit import check_array_size

    check_array_size(planned)
    return adapted(planned, read_kill_wait_s(DEFAULT_KILL_WAIT_S), dependency)


def submit(planned: "PlannedSweep", *, dependency: str | None, resume: str | None, as_json: bool) -> None:
    """Submit all points as arrays, or those of the sweep ``resume`` that did not complete there."""
    from launcher.sweep_submit import submit_sweep

    if resume is not None:
        resume_points(_find(resume), planned=planned, local=False, dependency=dependency, as_json=as_json)
        return
    _warn(planned, quiet=as_json)
    home, record = submit_sweep(_for_slurm(planned, dependency), Path(planned.source).read_bytes())
    ids = [array.job_id for array in record.arrays]
    if as_json:
        points = [
            {"index": point.index, "name": point.name, "job_id": _job_id(home, point.runs), "run_dir": str(home / run)}
            for point in record.points
            for run in point.runs
        ]
        body = {"schema": 1, "job_id": ids[0], "arrays": ids, "sweep_dir": str(home), "points": points}
        click.echo(json.dumps(body, ensure_ascii=False))
        return
    for array in record.arrays:
        click.echo(f"Submitted array job {array.job_id} of {array.tasks.partition('%')[0]}")
    _say_next(home)
    on = {f"--clusters={array.cluster} " for array in record.arrays if array.cluster}
    click.echo(f"Stop: scancel {''.join(on)}{' '.join(ids)}")


def _job_id(home: Path, runs: tuple[str, ...]) -> str:
    from launcher.job_ids import job_id_of

    return job_id_of(home / runs[-1])


def _say_next(home: Path) -> None:
    import shlex

    click.echo(f"Logs: {home}/")
    click.echo(f"Table: gpujob sweep {shlex.quote(str(home))}")


def run(planned: "PlannedSweep", *, resume: str | None, as_json: bool, quiet: bool) -> None:
    """Run all points on this machine, or those of the sweep ``resume`` that did not complete there.

    Ends the process with the exit status of the sweep.
    """
    from launcher.sweep_run import begin_sweep, slots_of

    if resume is not None:
        resume_points(_find(resume), planned=planned, local=True, as_json=as_json)
        return
    _warn(planned, quiet=as_json)
    slots_of(planned, os.environ.get("CUDA_VISIBLE_DEVICES"))
    home, record = begin_sweep(planned, Path(planned.source).read_bytes())
    _run_points(planned, home, record, [one.point.index for one in planned.points], as_json=as_json, quiet=quiet)


def _run_points(
    planned: "PlannedSweep",
    home: Path,
    record: "SweepRecord",
    indexes: list[int],
    *,
    as_json: bool,
    quiet: bool = False,
) -> None:
    from launcher.sweep_run import LocalSweep

    def say(line: str) -> None:
        if not (as_json or quiet):
            click.echo(line)

    at_once = planned.sweep.max_parallel or 1
    say(f"{len(indexes)} of {len(planned.points)} points, at most {at_once} at once, logs in {home}")
    local = LocalSweep(planned, home, record, say)
    local.run(indexes)
    status = _show_states(home, local.record, as_json=as_json)
    sys.exit(INTERRUPTED if local.signal == signal.SIGINT else status)


def _show_states(home: Path, record: "SweepRecord", *, as_json: bool) -> int:
    """Print how every point stands; the exit status of the sweep."""
    from launcher.sweep_dir import look, render_states, sweep_json, sweep_status
    from launcher.watch import clean

    states = look(home, record)
    if as_json:
        click.echo(json.dumps(sweep_json(home, record, states), ensure_ascii=False))
    else:
        click.echo("\n".join(map(clean, render_states(states))))
    return sweep_status(states)


def _find(sweep: str) -> Path:
    """The directory of the sweep that a command names by directory or job id."""
    from launcher.config import load_cluster, resolve_directory
    from launcher.sweep_dir import find_sweep_dir

    logs_dir = resolve_directory(load_cluster(os.environ, Path.cwd()).logs_dir, Path.cwd())
    return find_sweep_dir(sweep, Path(logs_dir) if logs_dir else Path.cwd() / "logs")


def resume_points(
    home: Path,
    *,
    planned: "PlannedSweep | None" = None,
    local: bool | None = None,
    dependency: str | None = None,
    as_json: bool,
) -> None:
    """Run again the points that are missing or did not complete, where the sweep runs: on Slurm, or here.

    ``planned`` is the sweep of another job file with the same points; by default it is that of the sweep itself.
    """
    from launcher.sweep_dir import UNFINISHED, arrays_in_queue, ask_queue, look, read_record, to_resume
    from launcher.sweep_submit import keep_job_file, resume_sweep

    record = read_record(home)
    if local is not None and local != record.local:
        where, command = ("on this machine", "run") if record.local else ("on Slurm", "submit")
        raise LauncherError(f"{home} is a sweep {where}; resume it by `gpujob {command} --resume`")
    mended = planned is not None
    planned = planned if planned is not None else _again(home, record)
    _same_points(planned, record)
    queue = {} if record.local else ask_queue(home, record)
    states = look(home, record, queue)
    if record.local and any(state.state in UNFINISHED for state in states):
        raise LauncherError(f"{home}: its points still run; wait for them, or stop them first")
    indexes = list(to_resume(states))
    if not indexes:
        raise LauncherError(f"{home}: nothing to resume: every point has completed, or is on its way")
    _warn(planned, quiet=as_json)
    if record.local:
        if mended:
            keep_job_file(home, Path(planned.source).read_bytes())
        _run_points(planned, home, record, indexes, as_json=as_json)
    after = arrays_in_queue(record, queue) if planned.sweep.max_parallel is not None else ()
    changed, arrays = resume_sweep(_for_slurm(planned, dependency), home, record, indexes, after)
    if mended:
        keep_job_file(home, Path(planned.source).read_bytes())
    ids = [array.job_id for array in arrays]
    if as_json:
        points = [
            {"index": point.index, "name": point.name, "job_id": _job_id(home, point.runs)}
            for point in changed.points
            if point.index in indexes
        ]
        body = {"schema": 1, "job_id": ids[0], "arrays": ids, "sweep_dir": str(home), "points": points}
        click.echo(json.dumps(body, ensure_ascii=False))
        return
    for array in arrays:
        names = ", ".join(record.points[index].name for index in indexes[:4]) + (", ..." if len(indexes) > 4 else "")
        click.echo(f"Submitted array job {array.job_id} of {array.tasks.partition('%')[0]}: {names}")
    if after:
        most = planned.sweep.max_parallel
        click.echo(f"They begin when array job {', '.join(after)} has ended: at most {most} points run at once")
    _say_next(home)


@click.command(epilog="example: gpujob sweep logs/4459_embed_20251122_041341 --resume")
@click.argument("sweep", metavar="SWEEP")
@click.option("--resume", "again", is_flag=True, help="Run again the points that are missing or did not complete.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def sweep(sweep: str, again: bool, as_json: bool) -> None:
    """Show how the points of a sweep stand. SWEEP is its directory or its job id.

    The exit status is 0 when all have completed, 10 while some still run or wait, else that of the first that
    did not complete.
    """
    from launcher.sweep_dir import read_record

    home = _find(sweep)
    if again:
        resume_points(home, as_json=as_json)
        return
    sys.exit(_show_states(home, read_record(home), as_json=as_json))
