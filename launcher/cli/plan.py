"""The command `gpujob plan`: what `submit` or `run` would do."""

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.job_source import JobCommand, takes_job, warn
from launcher.cli.parts import JSON, show_files
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.planner.planned_job import JobText, PlannedJob
    from launcher.show.records import PlanRecord, ValueSource
    from launcher.show.sources import SourceNames
    from launcher.sweep.plan import PlannedSweep

ENVIRONMENT_CODES = ("no-slurm",)  # codes that refuse a start but do not matter to a plan
START_CODES = ("no-program", "no-module", "few-gpus", "no-time-limit")  # warnings that wait for the start
SUBMIT_ONLY_CODES = (
    "backslash",
    "no-setup-script",
    "untrusted-script",
    "signal-early",
)  # codes that only `submit` refuses


@click.command(name="plan", cls=JobCommand, epilog="example: gpujob plan --gpus 8 --nodes 2 -- python train.py")
@takes_job
@click.option(
    "--nodes",
    "hosts",
    metavar="N|HOSTLIST",
    multiple=True,
    help="Number of nodes, or their names in their order, as in cn[01-04].",
)
@click.option(
    "--local", is_flag=True, help="Show the plan of `gpujob run` instead of `gpujob submit`, without a script."
)
@click.option("--explain", "explained", is_flag=True, help="Show each value and its source, instead of the plan.")
@click.option("--point", metavar="NAME", help="Show one point of a sweep, by its name or number, instead of the table.")
@JSON
def plan_command(
    job: "JobText", hosts: tuple[str, ...], local: bool, explained: bool, point: str | None, as_json: bool
) -> None:
    """Show what `submit` and `run` would do with a job file, or with a command after --.

    Nothing is written or submitted, except a job file with --save.
    """
    import gc

    gc.disable()  # a short command has no garbage, and the search for it takes a fifth of the time
    from launcher.cli.sweep import read_planned_sweep
    from launcher.planner.planned_job import read_planned_job
    from launcher.show.sources import explain_values, name_options, source_names
    from launcher.steps.batch_script import render_sbatch

    hosts = _hosts(hosts)
    show_files(job)
    sources = source_names(job.source, os.environ, Path.cwd())._replace(options=job.options)
    swept = read_planned_sweep(job, local=local, available=len(hosts) or None)
    if swept is not None and point is None:
        _show_sweep(swept, hosts, sources, local=local, explained=explained, as_json=as_json)
        return
    if swept is not None:
        from launcher.sweep.show import choose_point, explain_point, script_of_point

        chosen = choose_point(swept, str(point))
        subject, script = chosen.planned_job, "" if local else script_of_point(swept, chosen)
        rows = explain_point(swept, chosen, sources) if explained else None
    elif point is not None:
        raise LauncherError(f"--point: {job.source} has no sweep; leave --point out")
    else:
        subject = read_planned_job(job, local=local, available=len(hosts) or None)
        script = "" if local else render_sbatch(subject.plan)
        rows = name_options(explain_values(subject, sources), sources) if explained else None
    at_once = (swept.sweep.max_parallel or 1) if swept is not None else 1
    _show_job(subject, script, rows, hosts, at_once, as_json=as_json)


def _hosts(nodes: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts of all ``--nodes`` options; empty without any."""
    from launcher.errors import SlurmError
    from launcher.steps.hostlist import parse_hostlist

    try:
        hosts = tuple(host for text in nodes for host in parse_hostlist(text))
    except SlurmError as error:
        raise LauncherError(f"--nodes: {error}") from error
    if twice := next((host for host, count in Counter(hosts).items() if count > 1), None):
        raise LauncherError(f"--nodes: {twice} is listed twice; name each node once")
    if nodes and not hosts:
        raise LauncherError("--nodes: contains no host; write for example cn[01-04]")
    return hosts


def _show_sweep(
    swept: "PlannedSweep",
    hosts: tuple[str, ...],
    sources: "SourceNames",
    *,
    local: bool,
    explained: bool,
    as_json: bool,
) -> None:
    _show_warnings({point.point.name: point.planned_job for point in swept.points})
    from launcher.sweep.show import describe_sweep, render_point_sources, render_sweep

    if explained and not as_json:
        click.echo("\n".join(render_point_sources(swept, sources)))
        return
    record = describe_sweep(swept, local=local, hosts=hosts, sources=sources if explained else None)
    click.echo(json.dumps(record.to_json(), ensure_ascii=False) if as_json else "\n".join(render_sweep(record)))


def _show_job(
    planned_job: "PlannedJob",
    script: str,
    rows: "tuple[ValueSource, ...] | None",
    hosts: tuple[str, ...],
    at_once: int,
    *,
    as_json: bool,
) -> None:
    """Show the plan of one job, or with ``rows`` the sources of its values. JSON contains both.

    ``at_once`` is the number of sweep points that run in parallel, if the job is one.
    """
    from launcher.show.sources import render_sources

    plan = planned_job.plan
    if hosts and len(hosts) < plan.nodes:
        more = plan.nodes - len(hosts)
        raise LauncherError(f"--nodes: {len(hosts)} hosts and the plan needs {plan.nodes}; name {more} more")
    _show_warnings({"": planned_job})
    if as_json:
        from launcher.show.json_view import dump_json_chunks
        from launcher.show.records import explained

        record = _describe_job(planned_job, script, hosts)
        if rows is not None:
            record = explained(record, rows)
        sys.stdout.writelines(dump_json_chunks(record))
        click.echo()
    elif rows is not None:
        click.echo("\n".join(render_sources(rows)))
    else:
        _print_picture(planned_job, script, hosts, at_once)


def _show_warnings(planned_jobs: "Mapping[str, PlannedJob]") -> None:
    """Show the warnings of a start, and the errors that would prevent it; ``planned_jobs`` are by point name.

    Nothing is refused here: a plan may be shown before its commands are right.
    """
    from launcher.sweep.points import merge_problems

    warnings = {name: _plan_warnings(planned_job) for name, planned_job in planned_jobs.items()}
    for line in merge_problems(warnings, len(warnings)) if len(warnings) > 1 else next(iter(warnings.values())):
        warn(line)


def _plan_warnings(planned_job: "PlannedJob") -> list[str]:
    from launcher.check.preflight import check_plan

    both = "run refuses it" if planned_job.local else "submit and run refuse it"
    found = [item for item in check_plan(planned_job) if item.code not in ENVIRONMENT_CODES]
    refused = [
        f"{item}; {'submit refuses it' if item.code in SUBMIT_ONLY_CODES else both}"
        for item in found
        if item.status == "error"
    ]
    return refused + [str(item) for item in found if item.status == "warning" and item.code not in START_CODES]


def _describe_job(planned_job: "PlannedJob", script: str, hosts: tuple[str, ...]) -> "PlanRecord":
    """The plan on Slurm or on this machine."""
    if planned_job.local:
        from launcher.show.local_view import VISIBLE_DEVICES, describe_local, local_facts

        facts = local_facts(planned_job.plan, socket.gethostname(), hosts)
        return describe_local(planned_job.plan, facts, os.environ.get(VISIBLE_DEVICES))
    from launcher.show.json_view import describe_plan

    return describe_plan(planned_job.plan, script, hosts)


def _print_picture(planned_job: "PlannedJob", script: str, hosts: tuple[str, ...], at_once: int) -> None:
    from launcher.show.picture import draw_plan

    plan = planned_job.plan
    if planned_job.local:
        from launcher.show.local_view import VISIBLE_DEVICES, describe_local, local_facts, render_local

        facts = local_facts(plan, socket.gethostname(), hosts)
        script = render_local(describe_local(plan, facts, os.environ.get(VISIBLE_DEVICES)), at_once)
    else:
        from launcher.show.json_view import planned_facts

        facts = planned_facts(plan, hosts)
    click.echo(draw_plan(plan, script, facts), nl=False)
