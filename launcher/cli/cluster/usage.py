"""The command `gpujob usage`: GPU hours, CPU hours and list prices of jobs, from the hub or accounting."""

import os
import sys
import time
from pathlib import Path

import click

from launcher.cli.cluster.queue_options import Since, since_option
from launcher.cli.parts import HUB, fail, print_json

GROUP_NAMES = ("user", "account", "partition", "name")


@click.command(epilog="example: gpujob usage --by account --since 30d --all-users")
@since_option("Beginning of the period.", default="7d")
@click.option(
    "--by", type=click.Choice(GROUP_NAMES), default="user", show_default=True, help="What the sums are grouped by."
)
@click.option("--user", metavar="USER", help="Owner of the jobs; by default you.")
@click.option("--all-users", is_flag=True, help="Jobs of all users, as far as Slurm shows them.")
@HUB
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV with a header.")
def usage(since: Since, by: str, user: str | None, all_users: bool, as_json: bool, as_csv: bool) -> None:
    """Show what jobs took: GPU hours, CPU hours, and the list price if the cluster file has prices.

    The hours are those of the allocation, used or not, in all attempts of a job, including requeued ones. If a job
    began before the period, only the part within it counts. The hours come from the hub or your index
    (`gpujob index`), and from accounting for what these lack. The last line names the source. IDLE is the hours in
    which sidecars saw idle GPUs, for your running jobs and the ended ones that the hub knows. The exit status is 9 if
    accounting does not answer.
    """
    from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
    from launcher.fleet.history import read_used
    from launcher.fleet.prices import read_prices
    from launcher.fleet.usage_view import render_usage, usage_csv, usage_json, usage_table
    from launcher.report.state import EXIT_STATUS
    from launcher.rundir.rundir import user_name

    if user and all_users:
        fail("--user and --all-users exclude each other; leave one of them out")
    if as_json and as_csv:
        fail("--json and --csv exclude each other; leave one of them out")
    prices, begin, until = read_prices(os.environ, Path.cwd()), since(), time.time()
    if begin >= until:
        fail("--since is not in the past; give an earlier time")
    slurm = SlurmReader(None if all_users else user or user_name(), None, os.environ)
    try:
        rows, source = read_used(slurm, begin, until, os.environ)
    except SlurmUnansweredError as error:
        if error.is_lasting or error.is_local:
            raise
        click.echo(f"gpujob: {error}", err=True)
        sys.exit(EXIT_STATUS["UNKNOWN"])
    table = usage_table(rows, by)
    if as_json:
        print_json({**usage_json(table, begin, until, prices), "source": source})
    elif as_csv:
        click.echo(usage_csv(table, prices), nl=False)
    else:
        click.echo("\n".join([*render_usage(table, prices), "", f"from {source}"]))
