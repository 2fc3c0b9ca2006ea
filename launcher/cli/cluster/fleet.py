"""The command `gpujob fleet`: nodes of the cluster, and what is free, busy or out of service."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import click

from launcher.cli.cluster.queue_options import VERBOSE, WATCH, repeat, show_age, split_words, terminal_width
from launcher.cli.job_source import warn
from launcher.cli.parts import HUB

JOBS_MAX_AGE_S = 600.0  # for their number on each node, while a hub asks Slurm for all else


@click.command(epilog="example: gpujob fleet -v --partition gpu")
@VERBOSE
@WATCH
@click.option("--partition", metavar="NAMES", help="Only nodes of these partitions, separated by commas.")
@HUB
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def fleet(verbose: bool, watch: bool, partition: str | None, as_json: bool) -> None:
    """List the nodes of the cluster by partition: GPUs, use and state.

    STATUS is idle, busy with the number of GPUs in use, or Slurm's own word. A warning or failure of the GPUs follows
    it if sidecars of your jobs have reported one in the last 24 hours. Without a report, the health is unknown.

    With -v, Slurm's reasons follow, and the commands with which an administrator takes nodes out of service. gpujob
    does not run them. The nodes come from a running hub, or else from sinfo. If Slurm does not answer, the last known
    state is shown with its age. The exit status is 9 if nothing is known.
    """
    from exporter.slurm.commands_reader import SlurmUnansweredError
    from exporter.slurm.sources.rest_reader import slurm_reader
    from exporter.slurm.sources.shared_answers_reader import QUEUE_MAX_AGE_S, read_queue_of_all, read_shared_nodes
    from launcher.fleet.nodes_view import known_nodes, nodes_json, render_nodes
    from launcher.fleet.own_runs import read_progress
    from launcher.fleet.prices import read_prices
    from launcher.rundir.rundir import user_name

    slurm, me = slurm_reader(None, None, os.environ), user_name()
    wanted = split_words(partition)
    prices = read_prices(os.environ, Path.cwd())

    def show() -> tuple[Mapping[str, object], list[str]]:
        answer, queue = read_shared_nodes(slurm, os.environ, watch=watch), None
        show_age(answer, "nodes ")
        try:
            jobs = read_queue_of_all(slurm, me, os.environ, others_s=JOBS_MAX_AGE_S if watch else QUEUE_MAX_AGE_S)
            show_age(jobs, "jobs ")
            queue = jobs.rows
        except SlurmUnansweredError as error:
            warn(f"{error}; the jobs of the nodes are unknown")
        now = time.time()
        own = {row.job_id: row.output for row in queue or () if row.output is not None and row.user == me}
        rows = [row for row in answer.rows if not wanted or row.partition in wanted]
        rows.sort(key=lambda row: row.partition)
        nodes = known_nodes(rows, queue, read_progress(own, now).values(), now)
        lines = render_nodes(nodes, now, verbose=verbose, prices=prices, width=terminal_width())
        return {
            **nodes_json(nodes, now, prices),
            "as_of": answer.as_of,
            "problem": answer.problem,
            "source": answer.source,
        }, lines

    repeat(show, watch=watch, as_json=as_json)
