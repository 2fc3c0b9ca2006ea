"""The command `gpujob watch`, and the view that `gpujob run` also shows."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.parts import (
    ASCII,
    HUB,
    INTERRUPTED,
    INTERVAL,
    JOB,
    NO_COLOR,
    has_screen,
    open_target,
    print_json,
    print_report,
)

if TYPE_CHECKING:
    from rich.console import Console

    from exporter.contract.view import JobView
    from launcher.watch.view import JobClient


UNREADABLE_S = 3600.0  # a file server that fails over takes minutes; a user may have to renew a ticket
MUTED_S = 2.0  # for what is muted, before a picture without it is printed


def show_job(
    client: "JobClient",
    interval: float,
    is_over: "Callable[[JobView], bool]",
    no_color: bool,
    ascii_only: bool,
    *,
    on_interrupt: str,
    complete: "Callable[[JobView], JobView]" = lambda view: view,
) -> "JobView":
    """Show the job until ``is_over`` returns true. Returns the last view.

    On a screen the last picture of an ended job gives way to the report that the caller prints.
    ``on_interrupt`` is what Ctrl-C does to this command. ``complete`` adds to a view what the job does not know.
    """
    from launcher.watch.lines import LineView

    read = _last_readable(client, complete)
    view = read()
    with _picture(no_color, ascii_only, on_interrupt) if has_screen() else nullcontext() as show_picture:
        show = show_picture or LineView(sys.stdout).show
        while True:
            if ends := is_over(view):
                view = read()
            show(view)
            if ends:
                return view
            time.sleep(interval)
            view = read()


def _last_readable(client: "JobClient", complete: "Callable[[JobView], JobView]") -> "Callable[[], JobView]":
    """What reads the view of a job, and repeats the last one while the run directory cannot be read."""
    known: JobView | None = None
    read_at, is_readable = 0.0, True

    def read() -> "JobView":
        nonlocal known, read_at, is_readable
        try:
            known, read_at, is_readable = complete(client.read_view()), time.monotonic(), True
        except FileNotFoundError:
            raise  # the directory was moved or removed
        except OSError as error:
            if known is None or time.monotonic() - read_at > UNREADABLE_S:
                raise
            if is_readable:
                problem = f"{client.run_dir} cannot be read: {error.strerror}; the view stays as it was"
                click.echo(f"gpujob: warning: {problem}", err=True)
            is_readable = False
        return known

    return read


@contextmanager
def _picture(no_color: bool, ascii_only: bool, on_interrupt: str) -> "Iterator[Callable[[JobView], None]]":
    from rich.live import Live

    from launcher.watch.picture import fit_picture

    console = _console(no_color)
    plain, size = _plain_characters(console, ascii_only), console.size
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def show(view: "JobView") -> None:
            nonlocal size
            if size != (size := console.size):  # what a resized terminal does to the last picture is its own choice
                live.stop()
                console.clear()
                live.start()
            live.transient = view.report is not None
            live.update(fit_picture(view, console, ascii_only=plain, on_interrupt=on_interrupt), refresh=True)

        yield show


def _muting(wait_s: float) -> "Callable[[JobView], JobView]":
    """What adds the muted alerts to a view; nothing without an Alertmanager of the cluster file or of an own stack."""
    from launcher.errors import LauncherError
    from launcher.registry.own_stack import read_own_stack
    from launcher.rundir.cluster_file import read_cluster_key

    try:
        url, cluster = (read_cluster_key(key, os.environ, Path.cwd())[1] for key in ("alertmanager_url", "cluster"))
    except LauncherError:
        url = cluster = None  # a view needs no cluster file
    own = read_own_stack(os.environ)
    if not isinstance(url, str) and own is None:
        return lambda view: view
    from exporter.contract.identity import safe_label
    from launcher.alerts.api import find_sources, read_silences
    from launcher.alerts.muted import SilencesReader, muted_alerts

    sources = find_sources({"alertmanager": url}, None, own)
    reader = SilencesReader(lambda: read_silences(sources[0]) if sources else [], wait_s)

    def add(view: "JobView") -> "JobView":
        known = {"cluster": cluster if isinstance(cluster, str) else "", "user": view.user}
        place = {name: safe_label(text) for name, text in known.items() if text}
        return view.replace(muted=muted_alerts(reader.latest, view.job_id, view.time, place))

    return add


def _plain_characters(console: "Console", ascii_only: bool) -> bool:
    return ascii_only or "utf" not in (console.encoding or "").lower()


def _console(no_color: bool) -> "Console":
    from rich.console import Console

    return Console(no_color=no_color or None, highlight=False)


@click.command(epilog="example: gpujob watch 4459 --until done")
@JOB
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@click.option("--json", "as_json", is_flag=True, help="JSON; without --once one object per line and refresh.")
@click.option(
    "--until", type=click.Choice(["running", "done"]), default="done", show_default=True, help="When to exit."
)
@click.option("--interval", type=INTERVAL, default=2.0, show_default=True, help="Seconds between two refreshes.")
@NO_COLOR
@ASCII
@HUB
def watch(
    job: str | None, once: bool, as_json: bool, until: str, interval: float, no_color: bool, ascii_only: bool
) -> None:
    """Watch a job: progress, ETA, workers, GPUs, output, events.

    For a sweep, the view is the table of its points; for a pipeline, the table of its jobs.

    JOB is an id, the beginning of a local id, the name of a job, or a directory; by default it is the newest job.

    Read-only: Ctrl-C ends the view, not the job. At the job's end the exit status is that of
    `gpujob run`; 10 means that the job still runs (--once).
    """
    from launcher.cli.jobs.pipeline import watch_pipeline
    from launcher.cli.jobs.sweep_states import watch_sweep
    from launcher.registry.search import is_pipeline, is_sweep
    from launcher.report.state import EXIT_STATUS, UNFINISHED
    from launcher.watch.view import JobClient

    def over(view: "JobView") -> bool:
        return view.state not in UNFINISHED or (until == "running" and view.phase != "launching")

    try:
        directory = open_target(job)
        if is_sweep(directory):
            sys.exit(watch_sweep(directory, interval, until, once=once, as_json=as_json))
        if is_pipeline(directory):
            sys.exit(watch_pipeline(directory, interval, until, once=once, as_json=as_json))
        client, complete = JobClient(directory), _muting(MUTED_S if once else 0.0)
        if once or as_json:
            read = _last_readable(client, complete)
            while True:
                view = read()
                if as_json:
                    print_json(view.to_json())
                else:
                    from launcher.watch.picture import render_picture

                    console = _console(no_color)
                    console.print(render_picture(view, ascii_only=_plain_characters(console, ascii_only)))
                if once or over(view):
                    break
                time.sleep(interval)
        else:
            ends_view = "ends the view, not the job"
            view = show_job(client, interval, over, no_color, ascii_only, on_interrupt=ends_view, complete=complete)
            if view.state not in UNFINISHED and sys.stdout.isatty():
                print_report(view.report or client.report(), as_json=False, after_view=True)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if until == "running" and view.state == "RUNNING" and not once:
        sys.exit(0)
    sys.exit(EXIT_STATUS.get(view.state, 9))
