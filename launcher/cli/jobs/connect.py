"""The command `gpujob connect`."""

import os
import shlex

import click

from launcher.cli.about.completion import complete_workers
from launcher.cli.parts import JOB, fail, open_job


@click.command(epilog="example: gpujob connect 4459 worker_w3")
@JOB
@click.argument("worker", metavar="[WORKER]", required=False, shell_complete=complete_workers)
@click.option("--print", "only_print", is_flag=True, help="Print the command line instead of running it.")
def connect(job: str | None, worker: str | None, only_print: bool) -> None:
    """Open a shell at a worker: on its node, in its container, with its environment and working directory.

    WORKER is its name, role or rank; by default it is the first one.
    """
    from launcher.report.state import UNFINISHED
    from launcher.rundir.job_records import read_orchestrator
    from launcher.steps.connect import connect_argv
    from launcher.watch.log_lines import select_tasks

    client = open_job(job, trusted=True)
    task = select_tasks(client.manifest, worker)[0]
    orchestrator, state = read_orchestrator(client.run_dir), client.read_state()
    if orchestrator is None or state == "PENDING":
        fail(f"{client.run_dir} has not started yet: {state}; see `gpujob watch`")
    argv = connect_argv(client.manifest, task, orchestrator)  # first, since other machines do not know the state
    if state not in UNFINISHED:
        fail(f"{client.run_dir} has ended: {state}; see `gpujob logs`")
    if only_print:
        click.echo(shlex.join(argv))
        return
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is involved
    except FileNotFoundError:
        fail(f"{argv[0]} is not on PATH; load the Slurm module")
