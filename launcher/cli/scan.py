"""The command `gpujob scan`: show the matches in logs."""

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_files
from launcher.cli.parts import JSON, print_json
from launcher.errors import LauncherError, did_you_mean

if TYPE_CHECKING:
    from exporter.logs.lexicon import Lexicon
    from launcher.scan.position import ExpectedTotals

STANDARD_INPUT = "-"


@click.command(epilog="example: gpujob scan train.log --pack hf-trainer")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, shell_complete=complete_files)
@click.option("--pack", help="Log pack of the lines; detected from the lines by default.")
@click.option(
    "--config",
    metavar="JOB.YAML",
    shell_complete=complete_files,
    help="Job file whose pack, patterns, errors and totals are used.",
)
@click.option("--count", is_flag=True, help="Count the matches of every pattern also in logs of over 4 MiB.")
@JSON
def scan(logs: tuple[str, ...], pack: str | None, config: str | None, count: bool, as_json: bool) -> None:
    """Show what the patterns find in logs: positions, values and errors, with their lines.

    A log named `-` is standard input, as in `kubectl logs POD | gpujob scan -`.

    A log may be finished or still growing; it is read once, to its present end. The position is the one
    that a sidecar would report: that of the work, not of an evaluation that runs after it. A last record
    without a line end may be half written. It is searched and marked "(unfinished)", but the position
    leaves it out: a sidecar reads it when it is complete or the worker has ended. Only the newest state of
    a progress bar counts at once: a record after a carriage return that does not end in a number.

    Lines that look like progress but contain no known position are shown with a suggested pattern.

    Logs that cannot be read are listed on standard error after the others, and the exit status is 2.
    """
    from launcher.scan.scan import scan_logs
    from launcher.scan.text import printable_text, render_scan, scan_results

    lexicon, totals = _requested_lexicon(pack, config)
    with ExitStack() as stack:
        paths = [_copy_input(stack) if log == STANDARD_INPUT else log for log in logs]
        reports, unreadable = scan_logs(paths, lexicon, totals, count_all=count)
    for report in reports:
        report.path = logs[paths.index(report.path)]
    if as_json:
        print_json(scan_results(reports, unreadable).to_json())
    elif reports:
        click.echo("\n".join(render_scan(reports)))
    if unreadable:
        what = "1 log" if len(unreadable) == 1 else f"{len(unreadable)} logs"
        named = [f"{printable_text(error.path)}: {error.problem}" for error in unreadable]
        raise LauncherError("\n  ".join([f"{what} cannot be read", *named]))


def _copy_input(stack: ExitStack) -> str:
    """A file with all of standard input, which is searched in several places, until the stack closes.

    It has no name, so that nothing is left if a signal ends the command.
    """
    import tempfile  # lazy: most scans are of files

    if sys.stdin is None:
        raise LauncherError("standard input is closed; give the path of a log instead of -")
    try:
        copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack does
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
    except OSError as error:
        raise LauncherError(f"standard input cannot be copied to a temporary file: {error.strerror}") from error
    return f"/proc/self/fd/{copy.fileno()}"


def _requested_lexicon(pack: str | None, config: str | None) -> "tuple[Lexicon, ExpectedTotals]":
    """The lexicon and totals for these options. Raises LauncherError for an unknown pack."""
    from exporter.logs.lexicon import AUTO
    from exporter.logs.lexicon_reader import build_lexicon
    from exporter.logs.packs_reader import pack_names
    from launcher.scan.position import ExpectedTotals

    known = (AUTO, *pack_names())
    if pack is not None and pack not in known:
        raise LauncherError(f'--pack: unknown pack "{pack}"{did_you_mean(pack, known)} (known: {", ".join(known)})')
    if config is None:
        return build_lexicon(pack or AUTO), ExpectedTotals()
    from launcher.jobfile.jobfile import load_job
    from launcher.jobfile.monitoring import error_patterns, progress_patterns

    spec = load_job(Path(config))
    lexicon = build_lexicon(
        pack or spec.progress.pack, progress_patterns(spec.progress.patterns), error_patterns(spec.errors)
    )
    return lexicon, ExpectedTotals(spec.progress.total_epochs, spec.progress.total_steps)
