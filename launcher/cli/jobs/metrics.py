"""The command `gpujob metrics`: CPU, memory and GPUs of a job that runs or has ended."""

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.cluster.queue_options import WATCH, repeat, show_age
from launcher.cli.parts import HUB, JOB, open_job
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.fleet.metrics_view import JobMetrics
    from launcher.watch.view import JobClient

_SLURM_ID = re.compile(r"\d+(?:_\d+|\+\d+)?")


@click.command(epilog="example: gpujob metrics 4459 -w")
@JOB
@WATCH
@click.option("--user", metavar="USER", help="Owner of a job that gpujob did not launch; by default you.")
@click.option(
    "--chart", is_flag=True, help="Show GPU use and memory of the last hour as bars, if the job records them."
)
@HUB
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def metrics(job: str | None, watch: bool, user: str | None, chart: bool, as_json: bool) -> None:
    """Show the CPU, memory and GPUs of a job, running or ended, with one line for each GPU.

    For jobs of gpujob, the values come from the sidecars, or else from the report. For other jobs they come from
    sstat while they run, and from accounting afterwards. The last line names the source. 100% of CPU is one core.
    Slurm does not know how busy the GPUs are.

    --chart shows the last hour of each GPU. It needs `gpu_metrics: true` under `monitoring` in the job file.
    """
    from launcher.fleet.metrics_view import metrics_json, render_metrics
    from launcher.registry.search import find_job
    from launcher.rundir.rundir import user_name

    client = None
    try:
        find_job(job, os.environ, Path.cwd(), takes_newest=True)
    except LauncherError:
        if job is None or not _SLURM_ID.fullmatch(job):
            raise
    else:
        client = open_job(job)

    if chart and client is None:
        raise LauncherError(f"--chart: gpujob has not launched {job}, so there is no history of its GPUs; leave it out")

    ended: list[JobMetrics] = []  # what accounting has told, when nothing more will come

    def show() -> tuple[Mapping[str, object], list[str]]:
        if chart and client is not None:
            return _read_chart(client)
        if client is None:
            found = ended[0] if ended else _ask_slurm(str(job), user or user_name(), ended, watch=watch)
        else:
            found = _read_run(client)
        return metrics_json(found), render_metrics(found, time.time())

    repeat(show, watch=watch, as_json=as_json)


def _read_chart(client: "JobClient") -> tuple[Mapping[str, object], list[str]]:
    from launcher.fleet.chart import BLOCKS, PLAIN, chart_json, make_chart, read_samples, render_chart

    found = make_chart(read_samples(client.manifest))
    levels = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else PLAIN
    return chart_json(found), render_chart(found, time.time(), levels)


def _read_run(client: "JobClient") -> "JobMetrics":
    """The values in the run directory. Raises LauncherError if it has none."""
    from exporter.contract import run_files
    from launcher.fleet.metrics_view import report_metrics, sidecar_metrics
    from launcher.rundir.job_records import OrchestratorRecord, read_report
    from launcher.rundir.statuses import read_statuses

    orchestrator = OrchestratorRecord.read_valid(client.run_dir / run_files.ORCHESTRATOR_FILE) or OrchestratorRecord()
    report = read_report(client.run_dir)
    statuses = read_statuses(client.run_dir, orchestrator.attempt)
    if statuses:
        is_same = report is not None and report.attempt == orchestrator.attempt
        state = report.state if report is not None and is_same else client.read_state()
        return sidecar_metrics(client.manifest.job_name, state, statuses)
    if report is None:
        raise LauncherError(f"{client.run_dir}: neither a sidecar nor a report has left values there")
    return report_metrics(report)


def _ask_slurm(job_id: str, user: str, ended: "list[JobMetrics]", *, watch: bool) -> "JobMetrics":
    """What Slurm knows of a job. Raises LauncherError if it does not know it.

    Answers of accounting are kept in ``ended``, so that --watch queries it once.
    """
    from exporter.slurm.queue import part_rows
    from exporter.slurm.sources.rest_reader import slurm_reader
    from exporter.slurm.sources.shared_answers_reader import (
        WATCHED_USE_BESIDE_HUB_S,
        WATCHED_USE_S,
        read_shared_queue,
        read_shared_use,
    )
    from exporter.slurm.states import ENDS, array_of
    from launcher.fleet.metrics_view import ended_metrics, running_metrics

    slurm = slurm_reader(user, None, os.environ)
    answer = read_shared_queue(slurm, os.environ)
    known = part_rows(answer.rows, job_id)
    if not known:  # it may have been submitted since that answer
        known = part_rows(read_shared_queue(slurm, os.environ, since=time.time(), least_s=0.0).rows, job_id)
    running = [row for row in known if row.snapshot.started is not None and row.snapshot.state not in ENDS]
    if len(running) == 1:
        watched_s = WATCHED_USE_BESIDE_HUB_S if answer.is_of_hub else WATCHED_USE_S
        use = read_shared_use(slurm, running[0].job_id, os.environ, watched_s=watched_s if watch else None)
        show_age(use, "use ")
        return running_metrics(running[0], use.rows[0], use.as_of or time.time())
    if running:
        raise LauncherError(f"{job_id} is an array; name one of its tasks, as in {running[0].job_id}")
    attempts = [
        attempt
        for attempt in slurm.accounting([job_id], 0.0)
        if attempt.snapshot.started is not None and job_id in (attempt.job_id, array_of(attempt.job_id))
    ]
    if not attempts:
        raise LauncherError(f"{job_id}: Slurm knows no such job of {user} that has started; name its owner with --user")
    ended.append(ended_metrics(attempts))
    return ended[0]
