"""The command `gpujob stop`."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.parts import JOB, fail, open_target

if TYPE_CHECKING:
    from launcher.rundir.job_records import ProcessRecord


@click.command(epilog="example: gpujob stop 4459")
@JOB
def stop(job: str | None) -> None:
    """Stop a job, sweep or pipeline: its workers get SIGTERM and time to save, and it still writes its report.

    Without JOB, the newest job is stopped.
    """
    from launcher.cli.jobs.pipeline import stop_pipeline
    from launcher.registry.search import is_pipeline, is_sweep

    directory = open_target(job, trusted=True)
    if is_sweep(directory):
        _stop_sweep(directory)
    elif is_pipeline(directory):
        stop_pipeline(directory)
    else:
        _stop_job(directory)


def _stop_job(run_dir: Path) -> None:
    from exporter.contract import run_files
    from launcher.report.state import UNFINISHED
    from launcher.rundir.job_ids import job_id_of
    from launcher.rundir.job_records import read_orchestrator, stop_request
    from launcher.rundir.rundir import submitted_cluster, user_name
    from launcher.steps import slurm_steps
    from launcher.watch.view import JobClient

    client = JobClient(run_dir)
    state = client.read_state()  # a view of all workers and nodes takes long, and meanwhile the GPUs are in use
    orchestrator = read_orchestrator(run_dir)
    job_id = (orchestrator.job_id if orchestrator is not None else None) or job_id_of(run_dir)
    if client.manifest.attached:
        fail(f"{job_id} was not launched by gpujob, which only watches it; end it with the program that started it")
    if state in (*UNFINISHED, "UNKNOWN") and orchestrator is not None and orchestrator.local:
        _require_here(orchestrator, f"job {job_id}")
    if state not in UNFINISHED:
        click.echo(f"job {job_id} has ended: {client.report().state if state == 'UNKNOWN' else state}")
        return
    if orchestrator is None and client.is_local:
        fail(f"job {job_id} has no process yet: {run_dir / run_files.ORCHESTRATOR_FILE} is missing")
    with stop_request(run_dir, user_name()):
        if orchestrator is not None and orchestrator.local:
            _terminate(orchestrator.pid, f"job {job_id}")
        else:
            slurm_steps.cancel_job(job_id_of(run_dir), submitted_cluster(run_dir))
    click.echo(f"job {job_id} is being stopped")


def _stop_sweep(sweep_dir: Path) -> None:
    from launcher.report.state import UNFINISHED
    from launcher.steps import slurm_steps
    from launcher.sweep.directory import arrays_in_queue, read_point_states, read_record, require_queue

    record = read_record(sweep_dir)
    sweep_id = record.submission["job_id"]
    if record.local:
        runner = record.runner
        if runner is not None:
            _require_here(runner, f"sweep {sweep_id}")
        is_stopping = runner is not None and runner.is_running_here()
        if runner is not None and is_stopping:
            _terminate(runner.pid, f"sweep {sweep_id}")
        elif any(state.state in UNFINISHED for state in read_point_states(sweep_dir, record)):
            fail(f"sweep {sweep_id} does not run on this machine; stop it on {record.submission.get('host')}")
    else:
        left = arrays_in_queue(record, require_queue(sweep_dir, record))
        for array in record.arrays:
            if array.job_id in left:
                slurm_steps.cancel_job(array.job_id, array.cluster)
        is_stopping = bool(left)
    click.echo(f"sweep {sweep_id} is being stopped" if is_stopping else f"sweep {sweep_id} has ended")


def _require_here(process: "ProcessRecord", subject: str) -> None:
    if process.is_elsewhere():  # a process of that number here is another one
        fail(f"{subject} was started on {process.place}; stop it there")


def _terminate(pid: int, subject: str) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        fail(f"{subject} belongs to another user (process {pid})")
