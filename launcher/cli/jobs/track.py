"""The command `gpujob track`: follow any jobs of Slurm to their ends."""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_jobs
from launcher.cli.cluster.queue_options import require_command
from launcher.cli.job_source import warn
from launcher.cli.parts import HUB, SOURCE, print_json, show_notices

if TYPE_CHECKING:
    from exporter.slurm.queue import QueueRow
    from exporter.slurm.sources.cached_answers_reader import QueueAnswer

LEAST_INTERVAL_S, ADVISED_INTERVAL_S, MOST_INTERVAL_S = 10.0, 60.0, 3600.0


@click.command(epilog="example: gpujob track 4459 4460_[0-7] --name r8 --state-file run-r8-state.json")
@click.argument("jobs", metavar="[JOB]...", nargs=-1, shell_complete=complete_jobs)
@click.option("--user", metavar="USER", help="Owner of the jobs; by default you.")
@click.option("--name", metavar="NAME", default="", help="Name of the run, before the names of its jobs in the log.")
@click.option(
    "--log", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Also append to this file."
)
@click.option(
    "--state-file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the states are kept; by default in your state directory, until all jobs have ended.",
)
@click.option(
    "--interval",
    type=click.FloatRange(LEAST_INTERVAL_S, MOST_INTERVAL_S),
    default=ADVISED_INTERVAL_S,
    show_default=True,
    help="Seconds between two polls.",
)
@click.option("--noun", default="jobs", show_default=True, help="What the summary calls the jobs.")
@click.option(
    "--gpu-every", type=click.IntRange(1), default=5, show_default=True, help="Polls between two reports of GPU use."
)
@HUB
@SOURCE
@click.option(
    "--json", "as_json", is_flag=True, help="The states as one JSON object at the end; the log on standard error."
)
def track(
    jobs: tuple[str, ...],
    user: str | None,
    name: str,
    log: Path | None,
    state_file: Path | None,
    interval: float,
    noun: str,
    gpu_every: int,
    as_json: bool,
) -> None:
    """Follow any jobs of Slurm to their ends, and log every change of state with Slurm's own times.

    JOB is an id, some tasks of an array as in 4459_[0-7], the name or directory of a job, sweep or pipeline of
    gpujob, or the name of jobs in the queue; by default all your jobs in the queue.

    Each poll reads Slurm's queue once, whatever the number of jobs, or asks a hub if one runs. The exit status is 0
    if all jobs completed, and otherwise that of the first one that did not. After Ctrl-C it is 10 while jobs are left,
    and the same command continues from there, with jobs that have come since if it names others than ids.
    """
    from exporter.contract.file_locks import FileLockedError, lock_file
    from exporter.slurm.sources.hub_reader import NO_HUB, VARIABLE, read_hub_jobs
    from exporter.slurm.sources.rest_reader import slurm_reader
    from exporter.slurm.sources.shared_accounting_reader import SharedAccounting
    from exporter.slurm.sources.shared_answers_reader import read_shared_queue
    from launcher.errors import LauncherError, os_errors
    from launcher.report.state import EXIT_STATUS
    from launcher.rundir.rundir import user_name
    from launcher.track.follow import ACCOUNTING_EACH, Follower
    from launcher.track.selection import read_new, read_selected, select
    from launcher.track.state import TrackState, find_state_files, read_state
    from launcher.words import clock_text, count_text

    user = user or user_name()
    selection = select(jobs, os.environ, Path.cwd())
    show_notices(selection.notices)
    slurm = slurm_reader(user, selection.cluster, os.environ)
    if slurm.source == "squeue" and os.environ.get(VARIABLE, NO_HUB) == NO_HUB:
        require_command("squeue")
    if interval < ADVISED_INTERVAL_S:
        warn(f"--interval {interval:g}: each poll costs Slurm's controller; {ADVISED_INTERVAL_S:g} s suit most jobs")
    path, lock = find_state_files((user, selection.cluster, *jobs), state_file, os.environ)

    def read_queue(since: float) -> "QueueAnswer":
        # an answer of a moment ago may lack a job that was just submitted
        return read_shared_queue(slurm, os.environ, since=since, least_s=0.0)

    def start(rows: "tuple[QueueRow, ...]") -> TrackState:
        found, now = read_selected(slurm, selection, name, rows), time.time()
        return TrackState(
            words=jobs, user=user, cluster=selection.cluster, started=now, updated=now, jobs=found, summary={}
        )

    def add_new(state: TrackState, rows: "tuple[QueueRow, ...]") -> TrackState:
        return state.replace(jobs={**state.jobs, **read_new(slurm, selection, name, rows, state.jobs.keys())})

    with ExitStack() as stack:
        try:
            if (descriptor := lock_file(lock)) >= 0:
                stack.callback(os.close, descriptor)
        except FileLockedError as error:
            raise LauncherError(f"{path} is in use by {error}; give another --state-file") from error
        state = read_state(path, jobs, user)
        if state is not None:
            what = f"the run of {clock_text(state.started)} with {count_text(len(state.jobs), 'job')}"
            verb = "has followed" if state.complete else "continues"
            click.echo(f"gpujob: {verb} {what}; to begin a new one, remove {path}", err=True)
        with os_errors(f"{log} cannot be written"):
            out = None if log is None else stack.enter_context(log.open("ab", buffering=0))
        is_log_full = False

        def write(text: str) -> None:
            nonlocal is_log_full
            click.echo(f"{text}\n", err=as_json)
            try:
                if out is not None:
                    out.write(f"{text}\n\n".encode("utf-8", "backslashreplace"))
            except OSError as error:
                if not is_log_full:
                    click.echo(f"gpujob: {log} cannot be written: {error.strerror}", err=True)
                is_log_full = True

        accounting = SharedAccounting(slurm, os.environ, interval * ACCOUNTING_EACH)
        how = (accounting, read_queue, lambda hub, ids: read_hub_jobs(hub, ids, os.environ), state, start)
        added = None if state is None or selection.is_fixed else add_new
        follower = Follower(*how, added, path, write, noun=noun, interval_s=interval, gpu_every=gpu_every)
        try:
            state = state if state is not None and state.complete else follower.run()
        except KeyboardInterrupt:
            click.echo("\ngpujob: interrupted; the jobs continue, and the same command follows them again", err=True)
            sys.exit(EXIT_STATUS["RUNNING"])
    if state_file is None:
        path.unlink(missing_ok=True)
    if as_json:
        print_json(state.to_json())
    sys.exit(state.exit_status)
