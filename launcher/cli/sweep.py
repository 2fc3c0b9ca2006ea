"""Commands for sweeps: `check`, `submit` and `run` of one, and `gpujob sweep`."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_jobs
from launcher.cli.job_source import warn
from launcher.cli.jobs.sweep_states import show_states
from launcher.cli.parts import HUB, INTERRUPTED, JSON, come_back_lines, print_json, show_notices
from launcher.errors import ConfigError, ConfigErrors, LauncherError

if TYPE_CHECKING:
    from exporter.contract.records import JsonValue
    from launcher.planner.planned_job import JobText
    from launcher.sweep.directory import PointState, SweepRecord
    from launcher.sweep.plan import PlannedSweep

START_POLL_S = 0.05  # between two looks whether a sweep in the background has started


def read_planned_sweep(job: "JobText", *, local: bool, available: int | None = None) -> "PlannedSweep | None":
    """Plan the sweep of a job; None for one without one. Raises ConfigErrors with all problems.

    ``available`` is the number of nodes, if known.
    """
    from launcher.jobfile.jobfile import load_cluster
    from launcher.planner.planned_job import make_invocation
    from launcher.sweep.plan import plan_sweep

    if (found := _read_sweep(job)) is None:
        return None
    body, twice = found
    problems: list[ConfigError] = []
    try:
        cluster = load_cluster(os.environ, Path.cwd())
    except ConfigError as error:
        problems.append(error)
    if problems or twice:
        raise ConfigErrors([*problems, *_sweep_problems(body, job.source, twice)])
    try:
        return plan_sweep(body, job.source, cluster, make_invocation(job.job_dir, local=local, available=available))
    except ConfigError as error:
        raise ConfigErrors([error]) from error


def _read_sweep(job: "JobText") -> "tuple[dict[str, JsonValue], list[str]] | None":
    """Parse the job file of a sweep, and its duplicate keys.

    None for other files, and for those that are not YAML: they are reported like any job file.
    """
    from launcher.jobfile.yamlfile import read_mapping
    from launcher.sweep.points import is_sweep

    try:
        body, twice = read_mapping(job.text, job.source) if "sweep" in job.text else (None, [])
    except ConfigError:
        return None
    return (body, twice) if body is not None and is_sweep(body) else None


def _sweep_problems(body: "dict[str, JsonValue]", job: str, known: list[str]) -> list[ConfigError]:
    """All problems of a sweep's job file, the ``known`` ones first."""
    from launcher.sweep.points import read_sweep

    problems = list(known)
    try:
        read_sweep(body, job)
    except ConfigError as error:
        problems += error.problems
    return [ConfigError(job, problems)] if problems else []


def _replan_sweep(sweep_dir: Path, record: "SweepRecord") -> "PlannedSweep":
    """Plan a sweep again from the job file in its directory."""
    from launcher.jobfile.jobfile import load_cluster, read_job
    from launcher.planner.planned_job import make_invocation
    from launcher.rundir.cluster_file import require_trusted
    from launcher.sweep.directory import JOB_FILE
    from launcher.sweep.plan import plan_sweep

    workdir, job_dir = Path(str(record.submission["workdir"])), Path(str(record.submission["job_dir"]))
    require_trusted(sweep_dir / JOB_FILE, "name a job file of your own: `gpujob submit JOB.YAML --resume SWEEP`")
    invocation = make_invocation(job_dir, workdir, local=record.local)
    job, cluster = read_job(sweep_dir / JOB_FILE), load_cluster(os.environ, workdir)
    return plan_sweep(job, str(sweep_dir / JOB_FILE), cluster, invocation)


def _require_same_points(planned: "PlannedSweep", record: "SweepRecord") -> None:
    ours = {one.point.name: dict(one.point.values) for one in planned.points}
    theirs = {point.name: dict(point.values) for point in record.points}
    if list(ours.items()) != list(theirs.items()):
        odd = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
        raise ConfigError(
            planned.source,
            [f"its points differ from those of the sweep to resume: {', '.join(odd[:4]) or 'their order'}"],
        )


def show_warnings(planned: "PlannedSweep") -> None:
    """Show the warnings found before the start. Raises ConfigError with the errors."""
    from launcher.sweep.plan import check_sweep

    for warning in check_sweep(planned):
        warn(warning)


def _adapt_for_slurm(planned: "PlannedSweep", dependency: str | None) -> "PlannedSweep":
    """Adapt the sweep to Slurm's settings and to the command's options."""
    from launcher.plan.plan import DEFAULT_KILL_WAIT_S
    from launcher.steps.slurm_steps import read_kill_wait_s
    from launcher.sweep.plan import adapt_sweep
    from launcher.sweep.submit import check_array_size

    check_array_size(planned)
    return adapt_sweep(planned, read_kill_wait_s(DEFAULT_KILL_WAIT_S), dependency)


def submit_command(
    planned: "PlannedSweep", job_text: str, *, dependency: str | None, resume: str | None, as_json: bool
) -> None:
    """Submit all points as arrays, or the incomplete points of the sweep ``resume``."""
    from launcher.sweep.submit import submit_sweep

    if resume is not None:
        resume_points(_find_sweep(resume), new=(planned, job_text), local=False, dependency=dependency, as_json=as_json)
        return
    show_warnings(planned)
    home, record = submit_sweep(_adapt_for_slurm(planned, dependency), job_text.encode())
    register_sweep(home, record)
    ids = [array.job_id for array in record.arrays]
    if as_json:
        points = [
            {"index": point.index, "name": point.name, "job_id": _job_id(home, point.runs), "run_dir": str(home / run)}
            for point in record.points
            for run in point.runs
        ]
        body = {"schema": 1, "job_id": ids[0], "arrays": ids, "sweep_dir": str(home), "points": points}
        print_json(body)
        return
    for array in record.arrays:
        click.echo(f"Submitted array job {array.job_id} of {array.tasks.partition('%')[0]}")
    _print_next_commands(home)
    click.echo(f"Stop: gpujob stop {ids[0]}")


def register_sweep(sweep_dir: Path, record: "SweepRecord") -> None:
    """Add a sweep to the index of jobs, under the id of each of its arrays."""
    from launcher.registry.entries import register_job

    for array in record.arrays:
        own = {"job_id": array.job_id, "cluster": array.cluster, "submitted": array.submitted}
        register_job(sweep_dir, {**record.submission, **own}, os.environ, Path.cwd())


def _job_id(sweep_dir: Path, runs: tuple[str, ...]) -> str:
    from launcher.rundir.job_ids import job_id_of

    return job_id_of(sweep_dir / runs[-1])


def _print_next_commands(sweep_dir: Path) -> None:
    import shlex

    click.echo(f"Logs: {sweep_dir}/")
    click.echo(f"Table: gpujob sweep {shlex.quote(str(sweep_dir))}")


def run_command_for_sweep(
    planned: "PlannedSweep", job_text: str, *, resume: str | None, as_json: bool, quiet: bool, detach: bool
) -> None:
    """Run all points on this machine, or the incomplete points of the sweep ``resume``.

    Exits with the exit status of the sweep.
    """
    from launcher.sweep.run import begin_sweep, gpu_slots

    if resume is not None:
        if detach:
            raise LauncherError("--detach: not with --resume; leave one of them out")
        resume_points(_find_sweep(resume), new=(planned, job_text), local=True, as_json=as_json, quiet=quiet)
        return
    show_warnings(planned)
    gpu_slots(planned, os.environ.get("CUDA_VISIBLE_DEVICES"))
    home, record = begin_sweep(planned, job_text.encode())
    if detach and not _continue_in_background(home, str(record.submission["job_id"]), as_json=as_json):
        return
    _run_points(planned, home, record, [one.point.index for one in planned.points], as_json=as_json, quiet=quiet)


def _continue_in_background(sweep_dir: Path, sweep_id: str, *, as_json: bool) -> bool:
    """Go on as a process that outlives this command. Returns true there, and false here once its points run."""
    from exporter.logs.log_files_reader import read_last_bytes
    from launcher.report.state import EXIT_STATUS, LOG_TAIL_BYTES
    from launcher.sweep.directory import read_record
    from launcher.watch.text import printable_line

    output = sweep_dir / "log.out"
    if as_json:
        print_json({"schema": 1, "job_id": sweep_id, "sweep_dir": str(sweep_dir)})
    else:
        click.echo(
            f"sweep {sweep_id} runs in the background, logs in {sweep_dir}\n{come_back_lines(sweep_id, sweep=True)}"
        )
    sys.stdout.flush()
    if child := os.fork():
        while (record := read_record(sweep_dir)).runner is None:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended and not any(point.runs for point in record.points):
                code, lines = os.waitstatus_to_exitcode(status), read_last_bytes(output, LOG_TAIL_BYTES).split(b"\n")
                last = next((line.decode("utf-8", "replace") for line in reversed(lines) if line), f"see {output}")
                click.echo(printable_line(f"gpujob: the sweep could not start (status {code}): {last}"), err=True)
                sys.exit(EXIT_STATUS["UNKNOWN"])
            if ended:
                break
            time.sleep(START_POLL_S)
        return False
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "ab") as log:
        for source, descriptor in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), descriptor)
    return True


def _run_points(
    planned: "PlannedSweep",
    sweep_dir: Path,
    record: "SweepRecord",
    indexes: list[int],
    *,
    as_json: bool,
    quiet: bool = False,
) -> None:
    from launcher.sweep.run import LocalSweep

    def show_line(line: str) -> None:
        if not (as_json or quiet):
            click.echo(line)

    at_once = planned.sweep.max_parallel or 1
    show_line(f"{len(indexes)} of {len(planned.points)} points, at most {at_once} at once, logs in {sweep_dir}")
    local = LocalSweep(planned, sweep_dir, record, show_line)
    local.run(indexes)
    status = show_states(sweep_dir, local.record, as_json=as_json)
    sys.exit(INTERRUPTED if local.received_signal == signal.SIGINT else status)


def _find_sweep(sweep: str, *, takes_newest: bool = False) -> Path:
    from launcher.registry.search import find_job
    from launcher.rundir.rundir import SWEEP_FILE

    directory, notices = find_job(sweep, os.environ, Path.cwd(), takes_newest=takes_newest)
    show_notices(notices)
    if not (directory / SWEEP_FILE).is_file():
        raise LauncherError(f"{sweep!r} is a job, not a sweep; see `gpujob watch`")
    return directory


def resume_points(
    sweep_dir: Path,
    *,
    new: "tuple[PlannedSweep, str] | None" = None,
    local: bool | None = None,
    dependency: str | None = None,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Run missing and incomplete points again, on Slurm or here, as the sweep did.

    Without such points this only prints a message. ``new`` is the sweep of another job file with the same points, and
    that file's text; by default it is the sweep's own.
    """
    from launcher.report.state import UNFINISHED
    from launcher.rundir.statuses import CONCLUDING_S
    from launcher.sweep.directory import (
        arrays_in_queue,
        is_reporting_elsewhere,
        points_to_resume,
        read_point_states,
        read_record,
        require_queue,
    )
    from launcher.sweep.submit import keep_job_file, resume_sweep

    record = read_record(sweep_dir)
    if local is not None and local != record.local:
        where, command = ("on this machine", "run") if record.local else ("on Slurm", "submit")
        raise LauncherError(f"{sweep_dir} is a sweep {where}; resume it with `gpujob {command} --resume`")
    planned = new[0] if new is not None else None
    if planned is not None:
        _require_same_points(planned, record)
    queue = {} if record.local else require_queue(sweep_dir, record)
    states = read_point_states(sweep_dir, record, queue)
    if record.runner is not None and is_reporting_elsewhere(sweep_dir, record, states):  # its points would run twice
        raise LauncherError(
            f"{sweep_dir} was started on {record.runner.place}, and this machine cannot see whether it still runs; "
            f"resume it there, or here once its points have not reported for {CONCLUDING_S:.0f} s"
        )
    if record.is_run_here() or (record.local and any(state.state in UNFINISHED for state in states)):
        raise LauncherError(f"{sweep_dir}: its points still run; wait for them, or stop them first")
    indexes = list(points_to_resume(states))
    if not indexes:
        _report_nothing_to_resume(sweep_dir, record, states, as_json=as_json)
        return
    if planned is None:
        planned = _replan_sweep(sweep_dir, record)
        _require_same_points(planned, record)
    show_warnings(replace(planned, points=tuple(one for one in planned.points if one.point.index in indexes)))
    if record.local:
        if new is not None:
            keep_job_file(sweep_dir, new[1].encode())
        _run_points(planned, sweep_dir, record, indexes, as_json=as_json, quiet=quiet)
    after = arrays_in_queue(record, queue) if planned.sweep.max_parallel is not None else ()
    changed, arrays = resume_sweep(_adapt_for_slurm(planned, dependency), sweep_dir, record, indexes, after)
    register_sweep(sweep_dir, changed)
    if new is not None:
        keep_job_file(sweep_dir, new[1].encode())
    ids = [array.job_id for array in arrays]
    if as_json:
        points = [
            {"index": point.index, "name": point.name, "job_id": _job_id(sweep_dir, point.runs)}
            for point in changed.points
            if point.index in indexes
        ]
        body = {"schema": 1, "job_id": ids[0], "arrays": ids, "sweep_dir": str(sweep_dir), "points": points}
        print_json(body)
        return
    for array in arrays:
        names = ", ".join(record.points[index].name for index in indexes[:4]) + (", ..." if len(indexes) > 4 else "")
        click.echo(f"Submitted array job {array.job_id} of {array.tasks.partition('%')[0]}: {names}")
    if after:
        most = planned.sweep.max_parallel
        click.echo(f"They start when array job {', '.join(after)} has ended: at most {most} points run at once")
    _print_next_commands(sweep_dir)


def _report_nothing_to_resume(
    sweep_dir: Path, record: "SweepRecord", states: "Sequence[PointState]", *, as_json: bool
) -> None:
    """Print that no point is left to resume, which is not an error."""
    from launcher.sweep.directory import sweep_json

    if as_json:
        nothing: dict[str, object] = {
            "schema": 1,
            "job_id": None,
            "arrays": [],
            "sweep_dir": str(sweep_dir),
            "points": [],
        }
        body = sweep_json(sweep_dir, record, states) if record.local else nothing
        print_json(body)
        return
    done = sum(state.state == "COMPLETED" for state in states)
    rest = "" if done == len(states) else f", the other {len(states) - done} still run or wait"
    of = f"all {done}" if not rest else f"{done} of {len(states)}"
    click.echo(f"nothing to resume: {of} points have completed{rest}")


@click.command(epilog="example: gpujob sweep logs/4459_embed_20251122_041341 --resume")
@click.argument("sweep", metavar="SWEEP", shell_complete=complete_jobs)
@click.option("--resume", "again", is_flag=True, help="Run the missing and incomplete points again.")
@click.option("--sort", metavar="NAME", help="Order by the last value of this name in the logs, such as loss.")
@HUB
@JSON
def sweep(sweep: str, again: bool, sort: str | None, as_json: bool) -> None:
    """Show the states of the points of a sweep. SWEEP is its directory or its job id.

    The exit status is 0 when all have completed, 10 while some still run or wait, else that of the first that
    did not complete.
    """
    home = _find_sweep(sweep, takes_newest=not again)
    if again:
        resume_points(home, as_json=as_json)
        return
    sys.exit(show_states(home, as_json=as_json, sort=sort))
