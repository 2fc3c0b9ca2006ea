"""Options and messages that the commands about Slurm's queue, nodes and accounting share."""

import io
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from launcher.cli.job_source import warn
from launcher.cli.parts import INTERRUPTED, fail, print_json

if TYPE_CHECKING:
    from exporter.slurm.sources.cached_answers_reader import CachedAnswer

F = TypeVar("F", bound=Callable[..., Any])
Since: TypeAlias = Callable[[], float]  # epoch seconds, as of now
WATCH_INTERVAL_S = 5.0  # the shared answer asks Slurm less often
OLD_S = 90.0  # the queue is read each minute; what is older is shown with its age
MOST_SHARE = 0.02  # of a core that watching takes: with thousands of jobs, many watchers would take all of them
PAST_INTERVAL_S = 60.0  # with jobs of the past, which a hub or an index searches each time
_AGE = re.compile(r"(\d{1,6})([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

VERBOSE = click.option("-v", "--verbose", is_flag=True, help="More columns.")
WATCH = click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Repeat every 5 seconds until Ctrl-C, with --json as one object per line. Slurm is asked less often.",
)


def split_words(text: str | None) -> frozenset[str]:
    """The words of an option that are separated by commas."""
    return frozenset(word.strip() for word in (text or "").split(",") if word.strip())


def _parse_since(_context: click.Context, _option: click.Parameter, text: str | None) -> Since | None:
    """The moment of an age, which moves with the clock, or of a date."""
    if text is None:
        return None
    if found := _AGE.fullmatch(text):
        age_s = int(found[1]) * _UNITS[found[2]]
        return lambda: max(0.0, time.time() - age_s)
    try:
        moment = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        problem = f"{text!r} is neither an age such as 12h, 7d or 2w nor a date such as 2026-01-31"
        raise click.BadParameter(problem) from error
    return lambda: moment


def since_option(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """The option --since."""
    return click.option(
        "--since",
        metavar="AGE|DATE",
        callback=_parse_since,
        default=default,
        show_default=default is not None,
        help=help_text,
    )


def require_command(name: str) -> None:
    if shutil.which(name) is None:
        fail(f"{name} is not on PATH; load the Slurm module")


def terminal_width() -> int | None:
    """Columns of the window; None where the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show_age(answer: "CachedAnswer", what: str = "") -> None:
    """Print the age of an old state, and that the named hub does not answer."""
    from launcher.watch.text import clock_time_text
    from launcher.words import duration_text

    if answer.hub_problem is not None:
        warn(f"{answer.hub_problem}; Slurm is asked instead")
    age_s = max(0.0, time.time() - (answer.as_of or time.time()))
    if answer.as_of is not None and (answer.problem is not None or age_s >= OLD_S):
        command, _, reason = (answer.problem or "").partition(" ")
        why = f": {command} does not answer: {reason}" if command else ""
        click.echo(f"gpujob: {what}as of {clock_time_text(answer.as_of)} ({duration_text(age_s)} ago){why}", err=True)


def repeat(
    show: Callable[[], tuple[Mapping[str, object], list[str]]], *, watch: bool, as_json: bool, has_past: bool = False
) -> None:
    """Print what ``show`` returns, JSON and lines, once or until Ctrl-C.

    ``has_past``: it shows jobs of the past. Exits with 9 if Slurm does not answer and nothing is known; while watching
    that is only reported.
    """
    from exporter.slurm.commands_reader import SlurmUnansweredError

    shown_before = False
    try:
        while True:
            before_s = time.process_time()
            said = io.StringIO() if watch and not as_json else None  # shown with the table, not cleared before it
            try:
                with nullcontext() if said is None else redirect_stderr(said):
                    body, lines = show()
            except SlurmUnansweredError as error:
                if error.is_local:
                    raise
                click.echo(f"gpujob: {error}", err=True)
                if not watch:
                    from launcher.report.state import EXIT_STATUS  # lazy: 10 ms, a tenth of the rest

                    sys.exit(EXIT_STATUS["UNKNOWN"])
            else:
                if said is not None:
                    click.clear()
                    click.echo(said.getvalue(), err=True, nl=False)
                print_json(body) if as_json else click.echo("\n".join(lines))
            if not watch:
                return
            rest_s = (
                (time.process_time() - before_s) / MOST_SHARE if shown_before else 0.0
            )  # the first one loads modules
            shown_before = True
            time.sleep(max(rest_s, PAST_INTERVAL_S if has_past else WATCH_INTERVAL_S))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
