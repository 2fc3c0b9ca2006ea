"""The command `gpujob run`: run a job on this machine to its end."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.job_source import JobCommand, takes_job, warn_of_options_for_slurm
from launcher.cli.parts import (
    ASCII,
    INTERRUPTED,
    INTERVAL,
    NO_COLOR,
    RESUME,
    checked_plan,
    come_back_lines,
    fail,
    print_json,
    print_report,
    register_run,
    show_files,
)
from launcher.cli.watch import show_job

if TYPE_CHECKING:
    from launcher.planner.planned_job import JobText

START_POLL_S = 0.05  # between two looks whether a job in the background has started


@click.command(cls=JobCommand, epilog="example: gpujob run --workers 2 -- python train.py --lr 1e-4")
@takes_job
@click.option("--json", "as_json", is_flag=True, help="No view; the report as one JSON object at the end.")
@click.option("--quiet", is_flag=True, help="No view; the report at the end.")
@click.option("-d", "--detach", is_flag=True, help="Run in the background, also after the terminal is closed.")
@click.option("--stack", "with_stack", is_flag=True, help="Start your own boards first, as `gpujob stack up` does.")
@RESUME
@click.option("--interval", type=INTERVAL, default=1.0, show_default=True, help="Seconds between two refreshes.")
@NO_COLOR
@ASCII
def run(
    job: "JobText",
    as_json: bool,
    quiet: bool,
    detach: bool,
    with_stack: bool,
    interval: float,
    no_color: bool,
    ascii_only: bool,
    resume: str | None,
) -> None:
    """Run a job on this machine, without Slurm, and watch it until its end.

    The job is a job file, or a command after --, whose words reach the program as they are, without a
    shell. Options set keys of the job file; --set sets any key.

    Ctrl-C stops the job, and its workers have time to save. The exit status shows how the job ended: 0 completed
    and verified, 1 failed, 4 out of memory, 5 cancelled, 8 output incomplete or invalid, 130 Ctrl-C. With --detach
    it is 0 as soon as the job has started; `gpujob watch` shows the job again.
    """
    import secrets

    from launcher.cli import sweep
    from launcher.report.state import EXIT_STATUS, log_for_missing_report
    from launcher.run.job_state import teardown_limit_s
    from launcher.rundir import rundir
    from launcher.rundir.job_records import read_report_elsewhere, report_path_elsewhere
    from launcher.steps.batch_script import render_sbatch
    from launcher.steps.local_steps import wait_for_guard
    from launcher.watch.view import JobClient
    from launcher.watch.waiting import STOPS_JOB

    show_files(job)
    warn_of_options_for_slurm()
    board = _start_stack() if with_stack else None
    if (swept := sweep.read_planned_sweep(job, local=True)) is not None:
        sweep.run_command_for_sweep(swept, job.text, resume=resume, as_json=as_json, quiet=quiet, detach=detach)
        return
    if resume is not None:
        fail(f"--resume: {job.source} has no sweep; leave --resume out")
    plan = checked_plan(job, local=True)
    job_id = f"local-{secrets.token_hex(4)}"
    run_dir = rundir.create_run_dir(plan, render_sbatch(plan), job_id)
    register_run(run_dir, job_id)
    if board is not None:
        click.echo(f"board {board}&var-job_id={job_id}&from=now-15m&to=now", err=True)
    if detach:
        _start_in_background(run_dir, job_id, as_json=as_json)
        return
    interrupt_message = (
        f"stopping the job; its workers have {teardown_limit_s(plan.kill_wait_s):g} s to end; Ctrl-C again kills them"
    )
    started = _RunningJob(run_dir, interrupt_message if as_json or quiet else None)
    if not (as_json or quiet):
        try:
            click.echo(f"job {job_id}, logs in {run_dir}")
            show_job(
                JobClient(run_dir),
                interval,
                lambda _: started.job.process.poll() is not None,
                no_color,
                ascii_only,
                on_interrupt=STOPS_JOB,
            )
        except Exception as error:  # noqa: BLE001 - the job continues without its view
            _discard_output(f"the view has ended ({error}); the job continues, see {run_dir}")
    code = wait_for_guard(started.job.process, run_dir)
    report = started.job.read_report()
    if report is None:
        see = log_for_missing_report(run_dir)
        click.echo(f"gpujob: the job ended without a report (status {code}); see {see}", err=True)
        sys.exit(EXIT_STATUS["UNKNOWN"])
    try:
        print_report(report, as_json, after_view=not quiet)
    except OSError as error:
        _discard_output(f"the report cannot be printed ({error}); it is in {run_dir}")
    if read_report_elsewhere(run_dir) is not None:
        place = report_path_elsewhere(run_dir, os.environ)
        click.echo(f"gpujob: the report cannot be written to {run_dir}, so it is {place}", err=True)
    sys.exit(INTERRUPTED if started.interrupted else report.exit_status)


def _discard_output(why: str) -> None:
    """Discard output from now on, so that the exit status is still that of the job."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    click.echo(f"gpujob: {why}", err=True)


def _start_stack() -> str:
    """Start the user's own stack; return the address of the board of jobs."""
    from launcher.cli.stack.group import boards_url, folder_of_stack, tunnel
    from launcher.cli.stack.start import start_own_stack

    record, _ = start_own_stack(folder_of_stack())
    click.echo(f"boards {boards_url(record)}\n       from elsewhere: {tunnel(record)}", err=True)
    return f"{boards_url(record)}?board=gpujob-job"


def _start_in_background(run_dir: Path, job_id: str, *, as_json: bool) -> None:
    """Start a job that outlives this command, and return when it has started."""
    from launcher.report.state import EXIT_STATUS, log_for_missing_report
    from launcher.rundir.job_records import read_orchestrator
    from launcher.steps.local_steps import LocalJob

    if as_json:
        print_json({"schema": 1, "job_id": job_id, "run_dir": str(run_dir)})
    else:
        click.echo(f"job {job_id} runs in the background, logs in {run_dir}\n{come_back_lines(job_id)}")
    job = LocalJob(run_dir, detached=True)
    while read_orchestrator(run_dir) is None:
        if job.process.poll() is not None:
            see = log_for_missing_report(run_dir)
            click.echo(f"gpujob: the job could not start (status {job.process.returncode}); see {see}", err=True)
            sys.exit(EXIT_STATUS["UNKNOWN"])
        time.sleep(START_POLL_S)


class _RunningJob:
    """A running job, to which this command forwards its signals."""

    def __init__(self, run_dir: Path, interrupt_message: str | None) -> None:
        """Start the job of a run directory. ``interrupt_message`` is printed at the first Ctrl-C."""
        from launcher.steps.local_steps import LocalJob
        from launcher.steps.steps import ENDING_SIGNALS

        self.interrupted = False
        self._interrupt_message = interrupt_message
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        self.job = LocalJob(run_dir)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._forward_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def _forward_signal(self, number: int, _frame: object) -> None:
        again, self.interrupted = self.interrupted, self.interrupted or number == signal.SIGINT
        self.job.process.send_signal(number)  # a second SIGINT kills workers that do not end
        if self.interrupted and not again and self._interrupt_message is not None:
            click.echo(f"gpujob: {self._interrupt_message}", err=True)
