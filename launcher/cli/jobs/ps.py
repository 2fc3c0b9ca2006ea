"""The command `gpujob ps`: jobs in Slurm's queue, also those that gpujob has not launched."""

import os
import shutil
import sys
import time

import click

from launcher.cli.parts import INTERRUPTED, fail, print_json

WATCH_INTERVAL_S = 60.0  # each look costs Slurm's controller


@click.command(epilog="example: gpujob ps -a -v")
@click.option("-a", "--all", "ended_too", is_flag=True, help="Also jobs that have ended, while Slurm lists them.")
@click.option("-v", "--verbose", is_flag=True, help="More columns: partition, time, limit, resources.")
@click.option("-w", "--watch", is_flag=True, help="Repeat once a minute; with --json one object per line.")
@click.option("--user", metavar="USER", help="Owner of the jobs; by default you.")
@click.option("--json", "as_json", is_flag=True, help="JSON: runs with their jobs. An array is one run.")
def ps(ended_too: bool, verbose: bool, watch: bool, user: str | None, as_json: bool) -> None:
    """List your jobs in Slurm's queue: those that have not ended, or the last one that did.

    Slurm lists ended jobs for some minutes. GPUs, CPUs and memory of a waiting job are what it asks for.
    """
    from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
    from launcher.rundir.rundir import user_name
    from launcher.track.queue_view import render_rows, rows_json, shown_rows

    if shutil.which("squeue") is None:
        fail("squeue is not on PATH; load the Slurm module")
    slurm = SlurmReader(user or user_name(), None, os.environ)
    try:
        while True:
            try:
                rows = shown_rows(slurm.queue(), ended_too=ended_too)
            except SlurmUnansweredError as error:
                if not watch:
                    raise
                click.echo(f"gpujob: {error}", err=True)  # what was shown stays
            else:
                if watch and not as_json:
                    click.clear()
                lines = render_rows(rows, time.time(), verbose=verbose)
                print_json(rows_json(rows)) if as_json else click.echo("\n".join(lines))
            if not watch:
                return
            time.sleep(WATCH_INTERVAL_S)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
