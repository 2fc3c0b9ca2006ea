"""Shared parts of the commands: exit statuses, options and messages."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from exporter.contract import run_files

if TYPE_CHECKING:
    from exporter.contract.report import Report
    from launcher.plan.plan import Plan
    from launcher.planner.planned_job import PlannedJob
    from launcher.watch.view import JobClient

USAGE = 2
INTERRUPTED = 130

INTERVAL = click.FloatRange(min=0.1, max=3600.0)
JOB = click.argument("job", metavar="JOB.YAML")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
NO_COLOR = click.option("--no-color", is_flag=True, help="No colours (NO_COLOR does the same).")
ASCII = click.option("--ascii", "ascii_only", is_flag=True, help="Plain characters only.")
RESUME = click.option(
    "--resume", metavar="SWEEP", help="Run only the points of this sweep that are missing or did not complete."
)


def fail(message: str) -> NoReturn:
    click.echo(f"gpujob: {message}", err=True)
    sys.exit(USAGE)


def print_json(value: Mapping[str, object]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def show_files(job: str) -> None:
    """Print which cluster file counts and why, and whose the job file is if it is another user's.

    Raises LauncherError if one of them must not be used.
    """
    from launcher.rundir.cluster_file import find_cluster_file
    from launcher.rundir.trust import foreign_owner, read_facts

    if (found := find_cluster_file(os.environ, Path.cwd())) is not None and found.path.exists():
        owner = read_facts(found.path).owner_name
        click.echo(f"gpujob: cluster file {found.path} ({found.found_by}; owner {owner})", err=True)
    if other := foreign_owner(Path(job)):
        click.echo(f"gpujob: notice: {job} belongs to {other}, whose commands will run as you", err=True)


def checked_plan(job: str, *, local: bool, quiet: bool = False) -> "Plan":
    """The plan of a job file. Raises one error with all problems; writes nothing.

    Runs the cheap checks of this machine and shows their warnings, unless ``quiet``.
    """
    from launcher.planner.planned_job import read_planned_job

    subject = read_planned_job(job, local=local)
    _show_preflight(subject, job, quiet=quiet)
    return subject.plan


def _show_preflight(planned_job: "PlannedJob", job: str, *, quiet: bool) -> None:
    """Show the warnings found before the start. Raises ConfigError with the errors."""
    from launcher.check.preflight import check_plan
    from launcher.errors import ConfigError

    items = check_plan(planned_job)
    if not quiet:
        for item in items:
            if item.status == "warning":
                click.echo(f"gpujob: warning: {item}", err=True)
    errors = [str(item) for item in items if item.status == "error"]
    if errors:
        raise ConfigError(job, errors)


def open_job(job: str) -> "JobClient":
    """Find a job by its id or run directory."""
    from launcher.rundir.cluster_file import find_logs_dir
    from launcher.rundir.rundir import find_run_dir
    from launcher.watch.view import JobClient

    if (Path(job) / run_files.MANIFEST_FILE).is_file():
        return JobClient(Path(job).resolve())
    return JobClient(find_run_dir(job, find_logs_dir(os.environ, Path.cwd())))


def print_report(report: "Report", as_json: bool) -> None:
    from launcher.report.text import render_report
    from launcher.watch.text import printable_line

    if as_json:
        print_json(report.to_json())
    else:
        click.echo("\n" + "\n".join(printable_line(line) for line in render_report(report).splitlines()))
