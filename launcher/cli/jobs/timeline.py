"""The command `gpujob timeline`: the history of a job as OpenMetrics."""

import contextlib
import sys
from pathlib import Path

import click

from launcher.cli.job_source import warn
from launcher.cli.parts import INTERRUPTED, JOB, JSON, open_job, print_json
from launcher.errors import LauncherError


@click.command(epilog="example: gpujob timeline 4459 -o job.om")
@JOB
@click.option(
    "-o", "--output", "path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write it here."
)
@JSON
def timeline(job: str | None, path: Path | None, as_json: bool) -> None:
    """Print the timelines of a job, from all its nodes and attempts, as OpenMetrics with timestamps.

    The sidecars record them even if no Prometheus scrapes. `promtool tsdb create-blocks-from openmetrics FILE
    DIRECTORY` turns the text into blocks for Prometheus, so that the boards show the job. While a job runs, its last
    five minutes may be missing.

    With --json, --output FILE gets the text, and standard output describes it: nodes, series, times.
    """
    from launcher.export.openmetrics import openmetrics_lines, read_timelines
    from launcher.words import clock_text, count_text

    if as_json and path is None:
        raise LauncherError("--json: the timelines are OpenMetrics; add --output FILE for them")
    client = open_job(job)
    found = read_timelines(client.run_dir, client.manifest)
    for problem in found.problems:
        warn(problem)
    times = [time for head in found.heads for time in (*head.times[:1], *head.times[-1:])]
    if not times:
        raise LauncherError(
            f"{client.run_dir}/status: no sidecar has left a timeline there; the job must have run for some seconds, "
            "with this version of gpujob or a newer one"
        )
    try:
        if path is None:
            sys.stdout.writelines(openmetrics_lines(found))
            return
        with path.open("w", encoding="utf-8") as out:
            out.writelines(openmetrics_lines(found))
    except KeyboardInterrupt:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # promtool wants the whole text
        sys.exit(INTERRUPTED)
    except OSError as error:
        if path is None:
            raise
        raise LauncherError(f"--output: {path}: {error.strerror}") from error
    nodes, series = len({head.node for head in found.heads}), sum(map(len, found.families.values()))
    if as_json:
        print_json({"schema": 1, "nodes": nodes, "series": series, "start": min(times), "end": max(times)})
    else:
        span = f"{clock_text(min(times))} to {clock_text(max(times))}"
        click.echo(f"{path}: {count_text(nodes, 'node')}, {series} series, {span}")
