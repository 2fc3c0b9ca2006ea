"""The command `gpujob index`: the file in which the hub remembers jobs."""

import os
import time
from pathlib import Path

import click

from launcher.cli.cluster.queue_options import Since, since_option
from launcher.cli.parts import JSON, fail, print_json

FOLDER = click.Path(path_type=Path)


@click.command(epilog="example: gpujob index --rebuild --since 90d logs")
@click.argument("folders", metavar="[LOGS_DIR...]", nargs=-1, type=FOLDER)
@click.option(
    "--rebuild", is_flag=True, help="Add jobs of accounting and run directories that are missing from the index."
)
@since_option("How far back accounting is asked.", default="90d")
@click.option("--state-dir", metavar="DIR", type=FOLDER, help="Folder of the hub's file, if it is not the default one.")
@JSON
def index(folders: tuple[Path, ...], rebuild: bool, since: Since, state_dir: Path | None, as_json: bool) -> None:
    """Show where the hub stores your jobs, and how many; or rebuild that index.

    If the index is lost, --rebuild fills it from your run directories and Slurm's accounting. Your newest 500 jobs are
    found by themselves; LOGS_DIR names directories with the run directories of older ones. --rebuild removes nothing,
    and no hub may run meanwhile.
    """
    from exporter.hub.index_reader import index_path, read_index, rebuild_index
    from exporter.slurm.commands_reader import SlurmReader
    from launcher.rundir.rundir import user_name
    from launcher.watch.text import size_text
    from launcher.words import count_text

    if folders and not rebuild:
        fail("LOGS_DIR is for --rebuild; add that")
    path, user, rebuilt = index_path(os.environ, state_dir), user_name(), None
    if rebuild:
        slurm = SlurmReader(user, None, os.environ)
        rebuilt = rebuild_index(path, os.environ, user, since(), folders, slurm)
    found = read_index(path, os.environ)
    if as_json:
        body = None if found is None else {"path": found.path, "hub": found.hub, **found.facts._asdict()}
        print_json({"schema": 1, "index": body, "rebuilt": None if rebuilt is None else rebuilt._asdict()})
        return
    if rebuilt is not None:
        for problem in rebuilt.problems:
            click.echo(f"gpujob: {problem}; only run directories are used", err=True)
        sources = f"{rebuilt.from_accounting} in accounting, {rebuilt.from_run_dirs} only in run directories"
        click.echo(f"added {count_text(rebuilt.added, 'job')}: {sources}")
    if found is None:
        click.echo(f"{path}: no hub has run yet")
        return
    facts = found.facts
    size = "" if facts.bytes is None else f" ({size_text(facts.bytes)})"
    click.echo(f"{found.path}{size}")
    oldest = "" if facts.oldest is None else f", since {time.strftime('%Y-%m-%d', time.localtime(facts.oldest))}"
    click.echo(f"{count_text(facts.jobs, 'job')}, {facts.runs} of them launched by gpujob{oldest}")
    click.echo(f"{count_text(facts.changes, 'change')} of states")
    click.echo("no hub runs" if found.hub is None else f"the hub is {found.hub}")
