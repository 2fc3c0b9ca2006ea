"""The command `gpujob ps`: jobs in Slurm's queue, also those that gpujob has not launched, and jobs of this machine."""

import gc
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.cluster.queue_options import Since, repeat, show_age, since_option, split_words, terminal_width
from launcher.cli.job_source import warn
from launcher.cli.parts import HUB, SOURCE, fail

if TYPE_CHECKING:
    from exporter.slurm.accounting import Figures
    from exporter.slurm.commands_reader import SlurmReader
    from exporter.slurm.queue import QueueRow

SORT_NAMES = ("submitted", "started", "name", "job", "state", "gpus")


@click.command(epilog="example: gpujob ps -a --since 7d -n 20")
@click.option("-a", "--all", "ended_too", is_flag=True, help="Include ended jobs that Slurm still lists.")
@since_option("Include jobs that have ended since then, as in 7d or 2026-01-31.")
@click.option("-v", "--verbose", is_flag=True, help="More columns, and a line for each task of an array.")
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Repeat every 5 seconds until Ctrl-C, or every minute with --since; with --json as one object per line. "
    "Slurm is asked less often.",
)
@click.option("--user", metavar="USER", help="Owner of the jobs; by default you.")
@click.option("--all-users", is_flag=True, help="Jobs of all users, as far as Slurm shows them.")
@click.option("--partition", metavar="NAMES", help="Only jobs of these partitions, separated by commas.")
@click.option("--state", "states", metavar="STATES", help="Only jobs in these states, as in RUNNING,FAILED.")
@click.option(
    "--sort", type=click.Choice(SORT_NAMES), default=SORT_NAMES[0], show_default=True, help="Order of the jobs."
)
@click.option("-n", "--number", type=click.IntRange(1), help="At most this many lines.")
@click.option("--run", "name", metavar="NAME", help="Only the jobs of this pipeline or sweep of yours, one per line.")
@HUB
@SOURCE
@click.option(
    "--format",
    "form",
    type=click.Choice(("table", "json")),
    default="table",
    help="Format of the output; json is the same as --json.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON: runs with their jobs, an array as one run.")
def ps(
    ended_too: bool,
    since: Since | None,
    verbose: bool,
    watch: bool,
    user: str | None,
    all_users: bool,
    partition: str | None,
    states: str | None,
    sort: str,
    number: int | None,
    name: str | None,
    form: str,
    as_json: bool,
) -> None:
    """List your jobs: those that have not ended, or the last one that did.

    The jobs come from a running hub. Without one, Slurm is asked after each submission and at most once a minute,
    however many commands run. Slurm lists ended jobs for some minutes. Those of --since come from the hub, from your
    index (`gpujob index`), or from accounting. A waiting job shows the GPUs, CPUs and memory that it asks for. The
    tasks of an array share one line, and so do the jobs of a pipeline; --run lists them.

    Jobs of `gpujob run` are listed too. Progress, ETA and MARGIN are known only for jobs that gpujob launched. MARGIN
    is the time between the forecast end and the time limit. PRICE per hour and COST so far are list prices from the
    cluster file. With -v, IDLE is the idle share of the GPU time that sidecars saw, and ENERGY is what the GPUs used.
    If Slurm does not answer, the last known state is shown with its age. The exit status is then 0, or 9 if nothing
    is known.
    """
    from exporter.slurm.commands_reader import SlurmUnansweredError
    from exporter.slurm.sources.cached_answers_reader import QueueAnswer
    from exporter.slurm.sources.rest_reader import slurm_reader
    from exporter.slurm.sources.shared_answers_reader import read_queue_of_all, read_shared_queue
    from exporter.slurm.states import array_of
    from launcher.fleet.jobs_view import SORTS, Filters, Job, fold_runs, jobs_json, render_jobs, rows_of_run, shown_jobs
    from launcher.fleet.own_runs import late_text, read_local_jobs, read_pipelines, read_progress
    from launcher.fleet.prices import read_prices
    from launcher.registry.entries import last_registered
    from launcher.rundir.rundir import user_name

    if not watch:
        gc.disable()  # the search for garbage, of which there is none, takes a fifth of the time
    if user and all_users:
        fail("--user and --all-users exclude each other; leave one of them out")
    me = user_name()
    slurm = slurm_reader(None if all_users else user or me, None, os.environ)
    wanted = Filters(split_words(partition), _states(states))
    prices = read_prices(os.environ, Path.cwd())
    shows_mine = all_users or user in (None, me)

    wants_json = as_json or form == "json"

    def show() -> tuple[Mapping[str, object], list[str]]:
        begin = None if since is None else since()
        filters = wanted._replace(since=begin)
        local, late = read_local_jobs(os.environ) if shows_mine else ([], [])
        if late:
            warn(late_text(late))
        answer, has_slurm = QueueAnswer(cluster="", tried=time.time()), True
        try:
            since_last = min(last_registered(os.environ), time.time()) if shows_mine else 0.0
            if watch and (all_users or not shows_mine):
                answer = read_queue_of_all(slurm_reader(None, None, os.environ), me, os.environ, user=user)
            else:
                answer = read_shared_queue(slurm, os.environ, since=since_last)
        except SlurmUnansweredError as error:
            if not (local or late):
                if not (error.is_local and shows_mine and not all_users and name is None):
                    raise
                click.echo(f"gpujob: no job of yours is known: none on this machine, and {error}", err=True)
            has_slurm = False
            if not error.is_local:  # a machine without Slurm has only jobs of its own
                warn(str(error))
        show_age(answer)
        now = time.time()
        figures, source = dict[str, "Figures"](), "queue"
        rows = [*answer.rows, *local]
        if begin is not None and has_slurm:
            more, figures, source = _read_ended(
                slurm, answer.rows, begin, mine=shows_mine and not all_users, watch=watch
            )
            rows += more
        if name is not None:
            names, reported = _read_run(name, rows)
            rows = [*rows_of_run(rows, names), *reported]
        pipelines = read_pipelines(os.environ) if shows_mine else {}
        known = [Job(row, None, figures.get(row.job_id)) for row in rows if filters.fits(row)]
        if pipelines:
            known = [
                job._replace(pipeline=pipelines.get(array_of(job.row.job_id))) if job.row.user == me else job
                for job in known
            ]
        ended_too_now = ended_too or name is not None or since is not None or bool(filters.states)
        jobs = shown_jobs(known, ended_too=ended_too_now)
        own = {
            job.row.job_id: job.row.output
            for job in jobs
            if job.row.output is not None and job.state != "PENDING" and job.row.user == me
        }
        runs = read_progress(own, now)
        if runs:
            jobs = [job._replace(run=runs.get(job.row.job_id)) for job in jobs]
        jobs.sort(key=SORTS["job"], reverse=True)  # of those that are equal the newest come first
        jobs.sort(key=SORTS[sort])
        if wants_json:
            origin = {"as_of": answer.as_of, "problem": answer.problem, "source": answer.source, "ended_from": source}
            return {**jobs_json(jobs[:number], now, prices), **origin}, []
        lines = render_jobs(
            (jobs if verbose or name is not None else fold_runs(jobs))[:number],
            now,
            verbose=verbose,
            prices=prices,
            width=terminal_width(),
        )
        lines += ["", f"ended jobs are from {source}"] if since is not None and has_slurm else []
        return {}, lines

    repeat(show, watch=watch, as_json=wants_json, has_past=since is not None)


def _read_run(name: str, rows: "Iterable[QueueRow]") -> "tuple[dict[str, str], list[QueueRow]]":
    """Names of the jobs of a run by their ids, and the ended ones that Slurm no longer lists, from their reports."""
    from exporter.slurm.states import task_ids
    from launcher.fleet.own_runs import read_reported
    from launcher.registry.entries import JobEntry
    from launcher.registry.search import find_job
    from launcher.rundir.rundir import user_name
    from launcher.track.selection import runs_of

    found, _ = runs_of(find_job(name, os.environ, Path.cwd(), takes_newest=True).directory)
    listed = {task for row in rows for task in task_ids(row.job_id)}
    entries = [
        JobEntry(job_id=job_id, job_name=run.name, run_dir=str(run.run_dir), submitted=0.0, user=user_name())
        for job_id, run in found.items()
        if job_id not in listed
    ]
    ended = [row._replace(snapshot=row.snapshot._replace(submitted=None)) for row in read_reported(entries)]
    return {job_id: run.name for job_id, run in found.items()}, ended


def _states(text: str | None) -> frozenset[str]:
    from exporter.slurm.states import base_state
    from launcher.errors import did_you_mean
    from launcher.fleet.jobs_view import STATES

    wanted = frozenset(base_state(word.upper()) for word in split_words(text))
    for word in sorted(wanted - STATES):
        fail(f"--state: {word} is not a state{did_you_mean(word, STATES)} (known: {', '.join(sorted(STATES))})")
    return wanted


def _read_ended(
    slurm: "SlurmReader", queue: "tuple[QueueRow, ...]", since: float, *, mine: bool, watch: bool
) -> "tuple[list[QueueRow], dict[str, Figures], str]":
    """Ended jobs that the queue does not have, figures by job id, and where they are from."""
    from exporter.slurm.commands_reader import SlurmUnansweredError
    from launcher.fleet.history import read_ended
    from launcher.fleet.own_runs import read_ended_runs

    known = {row.job_id for row in queue}
    try:
        ended, source = read_ended(slurm, queue, since, os.environ, watch=watch)
    except SlurmUnansweredError as error:
        if not mine:
            raise
        warn(f"{error}; ended jobs are those of gpujob, from their reports")
        rows = read_ended_runs(os.environ, since)
        return [row for row in rows if row.job_id not in known], {}, "reports"
    figures = {row.job_id: found for row, found in ended if found is not None}
    return [row for row, _ in ended if row.job_id not in known], figures, source
