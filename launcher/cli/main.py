"""The commands of ``gpujob``. Only the modules of this package print for people and decide exit statuses."""

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import click

from exporter.contract import run_files
from exporter.contract.errors import ExporterError, ManifestError
from launcher.cli.about.command_group import CommandGroup, prepare_streams
from launcher.cli.about.version import print_version
from launcher.cli.job_source import USAGE, JobCommand, in_option_words, takes_job, warn
from launcher.cli.parts import (
    INTERRUPTED,
    JOB,
    JSON,
    RESUME,
    checked_plan,
    fail,
    open_target,
    print_json,
    print_report,
    register_run,
    show_files,
)
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from exporter.contract.report import Report
    from launcher.plan.plan import Plan
    from launcher.planner.planned_job import JobText

MODULES = {
    "alerts": "launcher.cli.alerts.group:alerts",
    "attach": "launcher.cli.jobs.attach:attach",
    "boards": "launcher.cli.cluster.boards:boards",
    "completion": "launcher.cli.about.completion:completion",
    "connect": "launcher.cli.jobs.connect:connect",
    "explain": "launcher.cli.explain:explain",
    "fleet": "launcher.cli.cluster.fleet:fleet",
    "index": "launcher.cli.cluster.index:index",
    "init": "launcher.cli.init:init",
    "logs": "launcher.cli.jobs.logs:logs",
    "metrics": "launcher.cli.jobs.metrics:metrics",
    "pipeline": "launcher.cli.jobs.pipeline:pipeline",
    "plan": "launcher.cli.plan:plan_command",
    "ps": "launcher.cli.cluster.ps:ps",
    "run": "launcher.cli.run:run",
    "scan": "launcher.cli.scan:scan",
    "stack": "launcher.cli.stack.group:stack",
    "stop": "launcher.cli.jobs.stop:stop",
    "sweep": "launcher.cli.sweep:sweep",
    "targets": "launcher.cli.targets:targets",
    "timeline": "launcher.cli.jobs.timeline:timeline",
    "track": "launcher.cli.jobs.track:track",
    "usage": "launcher.cli.cluster.usage:usage",
    "verify": "launcher.cli.jobs.verify:verify",
    "watch": "launcher.cli.watch:watch",
}  # of commands: loading all of them takes a quarter of a short one


def main() -> None:
    """Run the command in ``sys.argv``. Every expected error becomes one message and exit status 2."""
    from launcher.programs.environment import remove_coerced_locale

    remove_coerced_locale()
    prepare_streams()
    try:
        # otherwise click answers Ctrl-C with "Aborted!" and status 1
        status = commands.main(prog_name="gpujob", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (LauncherError, ExporterError) as error:
        cause = error.__cause__
        fail(_file_problem(cause) if isinstance(error, ManifestError) and isinstance(cause, OSError) else str(error))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            fail("the working directory no longer exists; change to one that exists")
        if error.filename is None:
            raise
        fail(_file_problem(error))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)


MOST_NAME_BYTES = 255  # NAME_MAX of Linux file systems


def _file_problem(error: OSError) -> str:
    """One line for a file that cannot be used: its path, the reason and the fix."""
    if isinstance(error, PermissionError):
        fix = "ask its owner for access"
    elif isinstance(error, FileNotFoundError):
        fix = "if it was moved, name its new place"
    else:
        fix = "check its file system"
    path = os.fsdecode(error.filename)
    if error.errno == errno.ENAMETOOLONG:
        name = max(path.split("/"), key=len)
        long = name if len(os.fsencode(name)) > MOST_NAME_BYTES else path
        path, fix = f"{long[:40]}... ({len(long)} characters)", "give a shorter one"
    return f"{path}: {error.strerror}; {fix}"


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


@click.group(
    cls=CommandGroup,
    modules=MODULES,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="example: gpujob run job.yaml",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version,
    help="Show the versions of gpujob, Python, Slurm and the GPU driver.",
)  # fmt: skip
def commands() -> None:
    """Launch GPU jobs on Slurm or on this machine, and watch them from the first second to the last."""


@commands.command(cls=JobCommand, epilog="example: gpujob check --local -- python train.py")
@takes_job
@click.option("--local", is_flag=True, help="Check for a run on this machine instead of Slurm.")
@click.option("--all", "show_all", is_flag=True, help="Also show what was not checked, and why.")
@JSON
def check(job: "JobText", local: bool, show_all: bool, as_json: bool) -> None:
    """Check everything that a launch needs: environment, resources, input, output, the job, monitoring.

    The exit status is 2 if a finding would prevent the job from working.
    """
    from launcher.check.checklist import (
        checklist_of_broken_job,
        checklist_to_json,
        make_checklist,
        render_preflight_checklist,
        verdict,
    )
    from launcher.cli.partial_check import load_partial_job
    from launcher.cli.sweep import read_planned_sweep
    from launcher.errors import ConfigErrors, TopologyError
    from launcher.planner.planned_job import read_planned_job

    show_files(job)
    subject = swept = None
    try:
        swept = read_planned_sweep(job, local=local)
        subject = swept.points[0].planned_job if swept is not None else read_planned_job(job, local=local)
        sections = make_checklist(subject)
    except ConfigErrors as broken:
        topology = isinstance(broken.__cause__, TopologyError)
        rest = load_partial_job(job, local=local)
        sections = checklist_of_broken_job(broken.errors, rest, topology=topology)
    body = checklist_to_json(sections)
    if as_json:
        print_json(body)
    else:
        text = "\n".join(render_preflight_checklist(sections, show_all=show_all))
        click.echo(in_option_words(text, job.options))
        if swept is not None:
            click.echo(f"checked the first of the {len(swept.points)} points of a sweep; all of them can be planned")
        click.echo(f"{job.source}: {_size_text(subject.plan) if subject is not None else ''}{verdict(sections)}")
    sys.exit(0 if body["ok"] else USAGE)


def _size_text(plan: "Plan") -> str:
    from launcher.words import count_text

    return (
        f"{count_text(len(plan.tasks), 'worker task')} on {count_text(plan.nodes, 'node')}, "
        f"{count_text(plan.gpus_per_node, 'GPU')} and {count_text(plan.cpus_per_node, 'CPU')} per node: "
    )


def _dependency(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    if text is not None:
        from launcher.jobfile.slurm import check_dependency

        try:
            check_dependency(text)
        except ValueError as error:
            fail(f"--dependency: {error}")
    return text


@commands.command(cls=JobCommand, epilog="example: gpujob submit --gpus 1 --time 4h -- python train.py --lr 1e-4")
@takes_job
@click.option(
    "--dependency",
    metavar="TYPE:JOB",
    callback=_dependency,
    help="Wait for other jobs, as in afterok:4459; replaces slurm.dependency.",
)
@RESUME
@JSON
def submit(job: "JobText", dependency: str | None, resume: str | None, as_json: bool) -> None:
    """Submit a job to Slurm. Prints the job id and the run directory.

    The job is a job file, or a command after --, whose words reach the program as they are, without a
    shell. Options set keys of the job file; --set sets any key.
    """
    from launcher.cli import sweep as cli_sweep
    from launcher.plan.plan import DEFAULT_KILL_WAIT_S
    from launcher.planner.planner import adapt_plan
    from launcher.rundir import rundir
    from launcher.steps import slurm_steps
    from launcher.steps.batch_script import render_sbatch

    show_files(job)
    if (swept := cli_sweep.read_planned_sweep(job, local=False)) is not None:
        cli_sweep.submit_command(swept, job.text, dependency=dependency, resume=resume, as_json=as_json)
        return
    if resume is not None:
        fail(f"--resume: {job.source} has no sweep; leave --resume out")
    plan = adapt_plan(checked_plan(job, local=False), slurm_steps.read_kill_wait_s(DEFAULT_KILL_WAIT_S), dependency)
    staging = rundir.stage_run_dir(plan, render_sbatch(plan))
    run_dir, submitted = staging, None
    try:
        with slurm_steps.deferred_interrupt():
            submitted = slurm_steps.submit_held(plan, staging / "sbatch_script.sh")
        job_id, cluster = submitted
        run_dir = rundir.finalize_run_dir(staging, plan, job_id, cluster)
        slurm_steps.release_job(job_id, cluster)
    except BaseException as error:
        rundir.discard_run_dir(run_dir)
        if submitted is not None:
            try:
                slurm_steps.cancel_job(*submitted)  # it is on hold and would wait forever
            except LauncherError as second:
                raise LauncherError(
                    f"{error}\n  job {submitted[0]} is on hold and could not be cancelled: {second}; cancel it by hand"
                ) from error
        if isinstance(error, KeyboardInterrupt):
            what = "nothing was submitted" if submitted is None else f"job {submitted[0]} was cancelled"
            click.echo(f"\ngpujob: interrupted; {what}", err=True)
            sys.exit(INTERRUPTED)
        raise
    register_run(run_dir, job_id)
    if as_json:
        print_json({"schema": 1, "job_id": job_id, "run_dir": str(run_dir), "nodes": plan.nodes})
        return
    click.echo(f"Submitted batch job {job_id}")
    click.echo(f"Logs: {run_dir}/")
    click.echo(f"Watch: gpujob watch {job_id}")
    click.echo(f"Connect: gpujob connect {job_id}")
    click.echo(f"Stop: gpujob stop {job_id}")


@commands.command(epilog="example: gpujob report 4459 --verify")
@JOB
@click.option("--verify", is_flag=True, help="Verify the files of a finished job again; report.json stays as it is.")
@click.option("--markdown", is_flag=True, help="The text of report.md also on a terminal.")
@JSON
def report(job: str | None, verify: bool, markdown: bool, as_json: bool) -> None:
    """Print the report of a job: a summary on a terminal, else the text of report.md.

    For a sweep, it prints the table of its points; for a pipeline, the table of its jobs.

    The exit status is that of `gpujob run`; 10 while the job still runs.

    With --verify the exit status is 0 if the files are complete and valid now, else 8 with a list of
    problems. A job that has failed keeps its own status.
    """
    from launcher.cli.jobs.pipeline import show_pipeline
    from launcher.cli.jobs.sweep_states import show_states
    from launcher.registry.search import is_pipeline, is_sweep
    from launcher.report.state import UNFINISHED
    from launcher.watch.view import JobClient

    directory = open_target(job)
    if is_sweep(directory):
        if verify:
            fail(f"--verify: {directory} is a sweep; name one of its points")
        sys.exit(show_states(directory, as_json=as_json))
    if is_pipeline(directory):
        if verify:
            fail(f"--verify: {directory} is a pipeline; name one of its jobs")
        sys.exit(show_pipeline(directory, as_json=as_json))
    client = JobClient(directory)
    if not verify:
        found = client.report()
    else:
        try:
            with _VerifyLine() as line:
                found = client.report(verify=True, progress=line.show)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        _report_difference(found)
    if found.state not in UNFINISHED:
        _end_tracked_runs(client.run_dir, found)
    if found.state not in UNFINISHED and not (found.requeued or client.is_local or client.manifest.attached):
        from launcher.report.accounting.ask import with_accounting

        found = with_accounting(client.run_dir, found, os.environ)
    print_report(found, as_json, markdown=markdown)
    sys.exit(found.exit_status)


def _end_tracked_runs(run_dir: Path, found: "Report") -> None:
    """End the runs in trackers of an own job whose orchestrator died without a report."""
    from launcher.plan.plan import PLAN_FILE
    from launcher.report.trackers.mlflow import end_runs
    from launcher.run.orchestrator import load_plan

    try:
        if (run_dir / run_files.REPORT_FILE).exists() or run_dir.stat().st_uid != os.geteuid():
            return  # done by the orchestrator, or not ours: its plan must not get our credentials
        plan = load_plan(run_dir) if (run_dir / PLAN_FILE).exists() else None  # a job that is only watched has none
        for run_id in [] if plan is None else end_runs(plan, found, os.environ, time.time()):
            warn(f"the run {run_id} of MLflow is ended: it still counted as running")
    except (LauncherError, OSError) as error:
        warn(f"runs of MLflow cannot be ended: {error}")


def _report_difference(found: "Report") -> None:
    """Report how a verification differs from the one at the end of the job, or that the job has not ended."""
    from launcher.report.state import UNFINISHED

    verification = found.verification
    if found.state in UNFINISHED:
        click.echo("gpujob: the job has not ended, so there is nothing to verify yet", err=True)
    elif verification.differs:
        before = verification.state_before
        states = f" ({before} then, {found.state} now)" if before != found.state else ""
        click.echo(
            f"gpujob: different from {run_files.REPORT_FILE}: {', '.join(verification.differs)}{states}", err=True
        )


class _VerifyLine:
    """One line on a terminal with the number of verified files; nothing on other outputs."""

    EVERY_S = 0.2

    def __init__(self) -> None:
        self._due = 0.0 if sys.stderr.isatty() else float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if 0.0 < self._due < float("inf"):
            click.echo("\r\x1b[K", nl=False, err=True)

    def show(self, done: int, files: int, silent_mount: str | None) -> None:
        """Show the number of verified files, and a mount that does not answer."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + self.EVERY_S
            waits = f", waiting for {silent_mount}" if silent_mount else ""
            click.echo(f"\r\x1b[KVerifying: {done} of {files} files{waits}", nl=False, err=True)


@commands.command(epilog="example: gpujob schema > job.schema.json")
@click.option("--cluster", is_flag=True, help="Print the schema of the cluster file instead.")
def schema(cluster: bool) -> None:
    """Print the JSON Schema of the job file."""
    from launcher.jobfile.keys import file_schema

    click.echo(json.dumps(file_schema("cluster" if cluster else "job"), indent=2))
