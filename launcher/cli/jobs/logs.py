"""The command `gpujob logs`."""

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_workers
from launcher.cli.job_source import warn
from launcher.cli.parts import INTERRUPTED, JOB, NO_COLOR, open_job

if TYPE_CHECKING:
    from launcher.watch.log_lines import LogLine

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
POLL_S = 0.5  # between two reads of logs that are followed
STATE_S = 2.0  # between two reads of the job's state
LINES_FOLLOWED = 10  # last lines of each file that --follow begins with


@click.command(epilog="example: gpujob logs 4459 worker_w3 -f")
@JOB
@click.argument("worker", metavar="[WORKER]", required=False, shell_complete=complete_workers)
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until the job ends.")
@click.option("--errors", is_flag=True, help="Only lines that match an error pattern of the job, and tracebacks.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    metavar="N",
    help="Last lines of each file; by default all, or 10 with -f.",
)
@NO_COLOR
def logs(job: str | None, worker: str | None, follow: bool, errors: bool, lines: int | None, no_color: bool) -> None:
    """Print the logs of the workers of a job, or of one WORKER: its name, role or rank.

    With several workers, each line begins with the name of its worker, after a restart also with the number of the
    run. Colours and control characters of the programs are removed.
    """
    from exporter.machine.own_process import allow_many_descriptors
    from launcher.report.state import UNFINISHED
    from launcher.watch.log_lines import JobLogs, select_tasks
    from launcher.watch.text import printable_line

    client = open_job(job)
    tasks = select_tasks(client.manifest, worker)
    if follow and lines is None and not errors:
        lines = LINES_FOLLOWED
    # two files for each run of each worker
    reader = JobLogs(client.manifest, tasks, lines, errors=errors, descriptors=allow_many_descriptors())
    names = {task.worker for task in tasks}
    printer = _LinePrinter(max(map(len, names)) if len(names) > 1 else 0, no_color)
    try:
        ended, asked_at = not follow, float("-inf")
        while True:
            if not ended and time.monotonic() - asked_at >= STATE_S:
                ended, asked_at = client.read_state() not in UNFINISHED, time.monotonic()
            for line in reader.read(ended=ended):
                printer.show(line)
            sys.stdout.flush()
            for problem in reader.pop_problems():
                warn(printable_line(problem))
            if ended:
                return
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


class _LinePrinter:
    """Prints lines behind the name of their worker; ``width`` is that of the names, 0 for a single worker."""

    def __init__(self, width: int, no_color: bool) -> None:
        self._width = width
        self._has_color = sys.stdout.isatty() and not no_color and not os.environ.get("NO_COLOR")

    def show(self, line: "LogLine") -> None:
        name = f"{line.worker}{line.run}" if self._width or line.run else ""
        prefix = f"{name:<{self._width}} | " if name else ""
        if prefix and self._has_color:
            prefix = click.style(prefix, fg=COLORS[line.rank % len(COLORS)])
        click.echo(f"{prefix}{line.text}", color=self._has_color)
