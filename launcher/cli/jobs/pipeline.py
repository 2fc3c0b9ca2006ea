"""The command `gpujob pipeline`, and what other commands do with a pipeline."""

import contextlib
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_files
from launcher.cli.jobs.sweep_states import QUEUE_INTERVAL_S, note_unanswered
from launcher.cli.parts import JSON, checked_plan, print_json, register_run, show_files

if TYPE_CHECKING:
    from launcher.pipeline.directory import PartState, PipelineRecord
    from launcher.plan.plan import Plan
    from launcher.planner.planned_job import JobText
    from launcher.sweep.plan import PlannedSweep


@click.command(epilog="example: gpujob pipeline r8.yaml --dry-run")
@click.argument("file", metavar="PIPELINE.YAML", shell_complete=complete_files)
@click.option("--dry-run", is_flag=True, help="Check all files and print the plan; submit nothing.")
@JSON
def pipeline(file: str, dry_run: bool, as_json: bool) -> None:
    """Submit several jobs and sweeps to Slurm that wait for each other. PIPELINE.YAML names their job files.

    All files are checked first. The jobs are submitted on hold and released when all are in the queue; after an error
    none is left there.
    """
    from launcher.cli.sweep import register_sweep
    from launcher.pipeline.plan import plan_pipeline
    from launcher.pipeline.show import plan_json, render_plan
    from launcher.pipeline.submit import submit_pipeline
    from launcher.planner.planned_job import read_job_text
    from launcher.registry.entries import register_job
    from launcher.sweep.directory import read_record

    text = read_job_text(Path(file), file)
    show_files(text)
    planned = plan_pipeline(text, _check_part)
    if dry_run:
        if as_json:
            print_json(plan_json(planned))
        else:
            click.echo("\n".join(render_plan(planned)))
        return
    directory, record = submit_pipeline(planned)
    for part in record.parts:
        if part.arrays:
            register_sweep(Path(part.run_dir), read_record(Path(part.run_dir)))
        else:
            register_run(Path(part.run_dir), part.job_id)
    register_job(directory, record.submission, os.environ, Path.cwd())  # last, so that it is the newest
    if as_json:
        jobs = [{"name": part.name, "job_id": part.job_id, "run_dir": part.run_dir} for part in record.parts]
        print_json({"schema": 1, "pipeline": record.name, "pipeline_dir": str(directory), "jobs": jobs})
        return
    for part in record.parts:
        kind = "array" if part.arrays else "batch"
        click.echo(f"Submitted {kind} job {', '.join(part.job_ids)}: {part.name}")
    name = shlex.quote(str(directory))
    click.echo(f"Watch: gpujob watch {name}\nStop: gpujob stop {name}")


def _check_part(job: "JobText") -> "Plan | PlannedSweep":
    from launcher.cli.sweep import read_planned_sweep, show_warnings
    from launcher.rundir.cluster_file import require_trusted
    from launcher.sweep.submit import check_array_size

    require_trusted(
        Path(job.source), "its commands would run as you, so read it and use a copy of your own", is_named=True
    )
    if (sweep := read_planned_sweep(job, local=False)) is not None:
        show_warnings(sweep)
        check_array_size(sweep)
        return sweep
    return checked_plan(job, local=False, names_file=True)


def show_pipeline(directory: Path, *, as_json: bool) -> int:
    """Print the states of the jobs. Returns the exit status."""
    from launcher.pipeline.directory import pipeline_exit_status, read_part_states, read_record

    record = read_record(directory)
    states = read_part_states(record)
    _print_states(directory, record, states, as_json=as_json)
    return pipeline_exit_status(states)


def _print_states(directory: Path, record: "PipelineRecord", states: "tuple[PartState, ...]", *, as_json: bool) -> None:
    from launcher.pipeline.show import states_json

    if as_json:
        print_json(states_json(directory, record, states))
    else:
        click.echo(_states_text(record, states))


def _states_text(record: "PipelineRecord", states: "tuple[PartState, ...]") -> str:
    from launcher.pipeline.show import render_states
    from launcher.watch.text import printable_line

    return "\n".join(map(printable_line, render_states(record, states)))


def watch_pipeline(directory: Path, interval: float, until: str, *, once: bool, as_json: bool) -> int:
    """Show the states of the jobs after each change, until all have ended or one runs. Returns the exit status."""
    from exporter.slurm.commands_reader import SlurmUnansweredError
    from launcher.pipeline.directory import pipeline_exit_status, read_part_states, read_record
    from launcher.sweep.final_states import FinalStates

    record, shown, problem, has_answer = read_record(directory), "", "", False
    final_states = {part.name: FinalStates() for part in record.parts}
    while True:
        try:
            states = read_part_states(record, final_states)
        except SlurmUnansweredError as error:
            if once or (error.is_local and not has_answer):
                raise
            problem = note_unanswered(error, problem, interval)
        else:
            problem, has_answer = "", True
            if as_json or (text := _states_text(record, states)) != shown:
                _print_states(directory, record, states, as_json=as_json)
                shown = "" if as_json else text
            if once or all(state.has_ended for state in states):
                return pipeline_exit_status(states)
            if until == "running" and any(state.state == "RUNNING" for state in states):
                return 0
        time.sleep(max(interval, QUEUE_INTERVAL_S))


def stop_pipeline(directory: Path) -> None:
    """Stop all jobs that wait or run, the last one first: none may start because one before it has ended."""
    from launcher.pipeline.directory import NEVER_STATE, read_part_states, read_record
    from launcher.report.state import UNFINISHED
    from launcher.rundir.job_records import stop_request
    from launcher.rundir.rundir import user_name
    from launcher.steps.slurm_steps import cancel_job

    record = read_record(directory)
    left = [state for state in read_part_states(record) if state.state in (*UNFINISHED, NEVER_STATE)]
    for state in reversed(left):
        request = contextlib.nullcontext() if state.arrays else stop_request(Path(state.run_dir), user_name())
        with request:
            for job_id in state.arrays or (state.job_id,):
                cancel_job(job_id, record.cluster)
    names = ", ".join(state.name for state in left)
    click.echo(f"pipeline {record.name} is being stopped: {names}" if left else f"pipeline {record.name} has ended")
