"""Shared parts of the commands: exit statuses, options and messages."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from exporter.contract import run_files
from launcher.cli.about.completion import complete_jobs
from launcher.cli.job_source import USAGE, warn
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from exporter.contract.report import Report
    from launcher.plan.plan import Plan
    from launcher.planner.planned_job import JobText, PlannedJob
    from launcher.watch.view import JobClient

INTERRUPTED = 130


class _Seconds(click.FloatRange):
    """A number of seconds. NaN passes every comparison of a range."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if str(value).strip().lower().lstrip("+-") == "nan":
            self.fail(f"{value!r} is not a number of seconds; {self.min:g} to {self.max:g} are possible", param, ctx)
        return super().convert(value, param, ctx)


INTERVAL = _Seconds(min=0.1, max=3600.0)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
NO_COLOR = click.option("--no-color", is_flag=True, help="No colours (NO_COLOR does the same).")
ASCII = click.option("--ascii", "ascii_only", is_flag=True, help="Plain characters only.")
JOB = click.argument("job", metavar="[JOB]", required=False, shell_complete=complete_jobs)
RESUME = click.option(
    "--resume",
    metavar="SWEEP",
    shell_complete=complete_jobs,
    help="Run only the points of this sweep that are missing or did not complete.",
)


def set_variable(context: click.Context, name: str, value: str) -> None:
    """Set an environment variable during this command."""
    before = os.environ.get(name)

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    os.environ[name] = value
    context.call_on_close(restore)


def _choose_hub(context: click.Context, _option: click.Parameter, address: str | None) -> None:
    """Put the address where all readers of the queue look for it."""
    from exporter.slurm.sources.http_reader import check_address
    from exporter.slurm.sources.hub_reader import NO_HUB, VARIABLE

    if named := os.environ.get(VARIABLE) if address is None else address:
        try:
            if named != NO_HUB:
                check_address(named)
            set_variable(context, VARIABLE, named)
        except ValueError as error:
            where = f"{VARIABLE}: " if address is None else ""
            raise click.BadParameter(f"{where}{error}, or {NO_HUB} to ask Slurm") from error


HUB = click.option(
    "--hub",
    metavar="ADDRESS",
    expose_value=False,
    callback=_choose_hub,
    help="Hub to ask for Slurm's queue; by default your own on this machine. `none` queries Slurm directly.",
)


def _choose_source(context: click.Context, _option: click.Parameter, source: str | None) -> None:
    from exporter.slurm.sources.rest_reader import SOURCE as VARIABLE

    if source is not None:
        set_variable(context, VARIABLE, source)


SOURCE = click.option(
    "--source",
    type=click.Choice(("auto", "commands", "rest")),
    expose_value=False,
    callback=_choose_source,
    help="Where to read the queue: from squeue, or from slurmrestd at GPUJOB_SLURMRESTD; auto prefers squeue.",
)


def fail(message: str) -> NoReturn:
    """End with an error; control characters in untrusted names are escaped."""
    from launcher.watch.text import printable_line

    click.echo("\n".join(map(printable_line, f"gpujob: {message}".split("\n"))), err=True)
    sys.exit(USAGE)


def print_json(value: Mapping[str, object]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    if not text.isprintable():  # names of files can have what a terminal obeys, or what is not text
        text = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
    click.echo(text)


def show_files(job: "JobText") -> None:
    """Print which cluster file counts and why. Raises LauncherError if it or the job file must not be used."""
    from launcher.rundir.cluster_file import find_cluster_file, require_trusted
    from launcher.rundir.trust import read_facts

    if (found := find_cluster_file(os.environ, Path.cwd())) is not None and found.path.exists():
        owner = read_facts(found.path).owner_name
        click.echo(f"gpujob: cluster file {found.path} ({found.found_by}; owner {owner})", err=True)
    require_trusted(
        Path(job.source), "its commands would run as you, so read it and use a copy of your own", is_named=True
    )


def checked_plan(job: "JobText", *, local: bool, names_file: bool = False) -> "Plan":
    """The plan of a job. Raises one error with all problems; writes nothing.

    Runs the cheap checks of this machine and shows their warnings; ``names_file`` is for one of several jobs.
    """
    from launcher.planner.planned_job import read_planned_job

    subject = read_planned_job(job, local=local)
    _show_preflight(subject, job.source, names_file=names_file)
    return subject.plan


def _show_preflight(planned_job: "PlannedJob", source: str, *, names_file: bool) -> None:
    """Show the warnings found before the start. Raises ConfigError with the errors."""
    from launcher.check.preflight import check_plan
    from launcher.errors import ConfigError

    items = check_plan(planned_job)
    if not planned_job.local:
        from exporter.machine.mounts import mount_table
        from launcher.check.site_facts import check_installation, check_partition, read_partitions

        items += check_partition(planned_job, read_partitions())
        items.append(check_installation(planned_job.plan, mount_table().current()))
    for item in items:
        if item.status == "warning":
            warn(f"{source}: {item}" if names_file else str(item))
    errors = [str(item) for item in items if item.status == "error"]
    if errors:
        raise ConfigError(source, errors)


def show_notices(notices: Iterable[str]) -> None:
    """Print on standard error how a job was found."""
    from launcher.watch.text import printable_line

    for notice in notices:
        click.echo(f"gpujob: {printable_line(notice)}", err=True)


def open_target(job: str | None, *, trusted: bool = False) -> Path:
    """Find the directory of a job, sweep or pipeline; see `find_job`.

    Its records must be ``trusted`` where a command signals what they name, or runs what they say. Otherwise another
    user's directory is only named as theirs.
    """
    from launcher.registry.search import find_job
    from launcher.rundir.cluster_file import require_trusted
    from launcher.rundir.rundir import PIPELINE_FILE, SWEEP_FILE
    from launcher.rundir.trust import read_facts
    from launcher.watch.text import printable_line

    found = find_job(job, os.environ, Path.cwd(), takes_newest=not trusted)
    show_notices(found.notices)
    if trusted:
        for name in (run_files.MANIFEST_FILE, run_files.ORCHESTRATOR_FILE, SWEEP_FILE, PIPELINE_FILE):
            require_trusted(
                found.directory / name,
                "only its owner stops or enters a job with gpujob; on Slurm, others use `scancel`",
            )
    elif (facts := read_facts(found.directory)).owner != os.geteuid():
        click.echo(f"gpujob: notice: {printable_line(facts.path)} belongs to {facts.owner_name}", err=True)
    return found.directory


def open_job(job: str | None, *, trusted: bool = False) -> "JobClient":
    """Find a job, which must not be a sweep or pipeline; see `open_target`."""
    from launcher.registry.search import is_pipeline, is_sweep
    from launcher.rundir.job_ids import job_id_of
    from launcher.watch.view import JobClient

    directory = open_target(job, trusted=trusted)
    if is_sweep(directory):
        points = sorted(path.parent for path in directory.glob(f"*/{run_files.MANIFEST_FILE}"))
        name = f", as in {job_id_of(points[0])}" if points else ""
        raise LauncherError(f"{job or str(directory)!r} is a sweep; name one of its points{name}")
    if is_pipeline(directory):
        raise LauncherError(
            f"{job or str(directory)!r} is a pipeline; name one of its jobs, as `gpujob watch` shows them"
        )
    return JobClient(directory)


def register_run(run_dir: Path, job_id: str) -> None:
    """Add a job to the index, by its submission record."""
    from launcher.registry.entries import register_job

    submission = run_files.read_json(run_dir / f"{job_id}.json") or {}
    register_job(run_dir, submission, os.environ, Path.cwd())


def come_back_lines(job_id: str, *, sweep: bool = False) -> str:
    """Commands for a job that runs in the background."""
    logs = [] if sweep else [f"Logs: gpujob logs {job_id} -f"]
    return "\n".join([f"Watch: gpujob watch {job_id}", *logs, f"Stop: gpujob stop {job_id}"])


def has_screen() -> bool:
    """Whether standard output is a terminal on which a picture can be drawn again."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def print_report(report: "Report", as_json: bool, *, markdown: bool = False, after_view: bool = False) -> None:
    """Print JSON, or on a terminal the end of the job, or else the Markdown of ``report.md``."""
    if as_json:
        print_json(report.to_json())
        return
    if sys.stdout.isatty() and not markdown:
        from launcher.watch.ending import render_ending

        lines = render_ending(report, shutil.get_terminal_size().columns)
    else:
        from launcher.report.text import render_report
        from launcher.watch.text import printable_line

        lines = [printable_line(line) for line in render_report(report).splitlines()]
    click.echo("\n".join([*([""] if after_view else []), *lines]))
