"""The states of the points of a sweep, once or live."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.parts import has_screen, print_json

if TYPE_CHECKING:
    from exporter.slurm.commands_reader import SlurmUnansweredError
    from launcher.sweep.directory import PointState, SweepRecord

QUEUE_INTERVAL_S = 15.0  # shortest interval between two queries of Slurm's queue by `watch`


def show_states(sweep_dir: Path, record: "SweepRecord | None" = None, *, as_json: bool, sort: str | None = None) -> int:
    """Print the state of every point, in the order of a logged value if one is named. Returns the exit status."""
    from launcher.sweep.directory import read_point_states, read_record, sort_by_result, sweep_exit_status

    record = record or read_record(sweep_dir)
    states = read_point_states(sweep_dir, record)
    shown = states if sort is None else sort_by_result(states, sort)
    _print_states(sweep_dir, record, shown, as_json=as_json, sorted_by=sort)
    return sweep_exit_status(states)


def _print_states(
    sweep_dir: Path,
    record: "SweepRecord",
    states: "Sequence[PointState]",
    *,
    as_json: bool,
    sorted_by: str | None = None,
) -> None:
    from launcher.sweep.directory import sweep_json

    if as_json:
        print_json(sweep_json(sweep_dir, record, states))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(_states_text(states, width, sorted_by=sorted_by))


def _states_text(
    states: "Sequence[PointState]", width: int | None, height: int | None = None, sorted_by: str | None = None
) -> str:
    from launcher.sweep.directory import render_states
    from launcher.watch.text import printable_line

    return "\n".join(map(printable_line, render_states(states, width, height, sorted_by)))


def watch_sweep(sweep_dir: Path, interval: float, until: str, *, once: bool, as_json: bool) -> int:
    """Show the states of the points until the sweep has ended, or runs. Returns its exit status.

    On a terminal this is a live table, elsewhere the table after each change. While Slurm does not answer, the last
    one stays: a point whose state is unknown has not ended.
    """
    from exporter.slurm.commands_reader import SlurmUnansweredError
    from launcher.report.state import UNFINISHED
    from launcher.sweep.directory import read_point_states, read_record, sweep_exit_status
    from launcher.sweep.final_states import FinalStates

    live, shown, problem, has_answer, final_states = None, "", "", False, FinalStates()
    if has_screen() and not (once or as_json):
        from rich.live import Live

        live = Live(auto_refresh=False, vertical_overflow="crop")
        live.start()
    try:
        while True:
            record = read_record(sweep_dir)
            try:
                states = read_point_states(sweep_dir, record, needs_queue=not once, final_states=final_states)
            except SlurmUnansweredError as error:
                if error.is_local and not has_answer:
                    raise
                problem = note_unanswered(error, problem, interval)
            else:
                problem, has_answer = "", True
                unfinished = [state.state for state in states if state.state in UNFINISHED]
                if live is not None:
                    from rich.text import Text

                    width, height = live.console.size
                    fitted = _states_text(states, width, height if unfinished else None)  # the end stays, with all
                    live.update(Text(fitted), refresh=True)
                elif as_json or (text := _states_text(states, None)) != shown:
                    _print_states(sweep_dir, record, states, as_json=as_json)
                    shown = "" if as_json else text
                if once or not unfinished:
                    return sweep_exit_status(states)
                if until == "running" and set(unfinished) != {"PENDING"}:
                    return 0
            time.sleep(interval if record.local else max(interval, QUEUE_INTERVAL_S))
    finally:
        if live is not None:
            live.stop()


def note_unanswered(error: "SlurmUnansweredError", last: str, interval: float) -> str:
    """Print why Slurm does not answer a view, which goes on, unless that was the ``last`` problem. Returns it."""
    if str(error) != last:
        text = f"gpujob: {error}; asked again every {max(interval, QUEUE_INTERVAL_S):g} s"
        print(text, file=sys.stderr, flush=True)  # a live table shows this above it, and click's output within it
    return str(error)
