"""The command `gpujob stack`: a user's own Prometheus, Alertmanager and boards."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from launcher.cli.parts import INTERRUPTED, JSON, print_json, set_variable
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.registry.own_stack import StackRecord
    from launcher.stack.status import StackStatus

UNSOUND = 1  # exit status
WATCH_S = 1.0  # between two looks at the programs inside a job


def _set_folder(context: click.Context, _option: click.Parameter, folder: str | None) -> None:
    from launcher.registry.own_stack import STACK_VARIABLE

    if folder is not None:
        set_variable(context, STACK_VARIABLE, folder)


DIRECTORY = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    expose_value=False,
    callback=_set_folder,
    help="Directory of the stack (default: GPUJOB_STACK_DIR, or ~/.local/share/gpujob/stack).",
)


def folder_of_stack() -> Path:
    """The directory of the stack. Raises LauncherError."""
    from launcher.registry.own_stack import stack_folder

    found = stack_folder(os.environ)
    if found is None:
        raise LauncherError("HOME is not set, so there is no place for the stack; give --dir")
    return found


@click.group(epilog="example: gpujob stack up")
def stack() -> None:
    """Run your own Prometheus, Alertmanager and boards, without an administrator."""


@stack.command(epilog="example: gpujob stack up --bin ~/prometheus-3.5.0.linux-amd64")
@DIRECTORY
@click.option("--bin", "bin_folder", metavar="DIR", help="Directory with the programs (default: PATH).")
@click.option("--agent", is_flag=True, help="Only send samples to `stack.remote_write` of the cluster file; no alerts.")
@click.option("--in-job", is_flag=True, help="Inside a Slurm job: stay until the job or Ctrl-C ends it.")
@JSON
def up(bin_folder: str | None, agent: bool, in_job: bool, as_json: bool) -> None:
    """Start the programs that are not running, and print the address of the boards.

    Nothing is downloaded. Everything listens on this machine only, below a secret path. Run it again after a
    change of the cluster file, or if a program has crashed.
    """
    from launcher.cli.stack.start import start_own_stack

    job = os.environ.get("SLURM_JOB_ID")
    if in_job and job is None:
        raise LauncherError("--in-job: not inside a Slurm job (SLURM_JOB_ID is not set); leave it out")
    folder = folder_of_stack()
    record, where = start_own_stack(folder, bin_folder=bin_folder, agent=agent, job=job if in_job else None)
    if as_json:
        print_json({"schema": 1, "url": boards_url(record), **_facts(folder, record)})
    else:
        click.echo(where)
        for line in _places(folder, record, agent=agent):
            click.echo(line)
    if in_job:
        sys.stdout.flush()
        _stay(folder, record)


def boards_url(record: "StackRecord") -> str:
    """Where a browser begins."""
    return f"{record.url}user/" if "alertmanager" in record.programs else record.url


def _facts(folder: Path, record: "StackRecord") -> dict[str, object]:
    return {"tunnel": tunnel(record), "folder": str(folder), "targets": record.targets, "job": record.job}


def tunnel(record: "StackRecord") -> str:
    """The command that brings the address to another machine."""
    import socket

    port, host = record.ports["gate"], socket.gethostname()
    through = " -J LOGIN-NODE" if record.job is not None else ""
    return f"ssh -L {port}:127.0.0.1:{port}{through} {host}"


def _places(folder: Path, record: "StackRecord", *, agent: bool) -> list[str]:
    word = "agent" if agent else "boards"
    lines = [f"{word:9}{boards_url(record)}", f"{'':9}from elsewhere: {tunnel(record)}"]
    if "grafana" in record.programs:
        lines.append(f"{'grafana':9}{record.url}grafana/")
    if not agent:
        lines.append(f"{'alerts':9}{folder / 'alerts.log'}, and `gpujob alerts`")
    return [*lines, f"{'targets':9}{record.targets}"]


def _stay(folder: Path, record: "StackRecord") -> NoReturn:
    """Wait until a signal comes or a program ends, and take the stack down."""
    from launcher.stack.processes import is_alive
    from launcher.stack.status import stop_stack
    from launcher.stack.up import OPTIONAL

    needed = {name: program for name, program in record.programs.items() if name != OPTIONAL}

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    ended: list[str] = []
    try:
        while not ended:
            ended = [name for name, program in needed.items() if not is_alive(program)]
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        stop_stack(folder)
        sys.exit(INTERRUPTED)
    stop_stack(folder)
    raise LauncherError(f"{', '.join(ended)} has ended; see {folder / 'log'}")


@stack.command(epilog="example: gpujob stack status")
@DIRECTORY
@JSON
def status(as_json: bool) -> None:
    """Show what runs. The exit status is 1 if something is down, or if alerts would not arrive."""
    from launcher.stack.status import read_record, read_status

    folder = folder_of_stack()
    record = read_record(folder)
    now = read_status(folder, record)
    if as_json:
        rows = {"sound": now.is_sound, "url": boards_url(record), **_facts(folder, record), **now._asdict()}
        print_json({"schema": 1, **rows})
    else:
        for line in _status_lines(folder, record, now):
            click.echo(line)
    sys.exit(0 if now.is_sound else UNSOUND)


def _status_lines(folder: Path, record: "StackRecord", now: "StackStatus") -> list[str]:
    if not now.programs:
        return [f"down; `gpujob stack up` starts it again with the data in {folder}"]
    lines = [f"{name:13}{state}" for name, state in now.programs.items()]
    if now.is_silent:
        lines.append(f"{'heartbeat':13}ALERTING IS BROKEN: none since {now.heartbeat}")
    elif now.heartbeat is not None:
        lines.append(f"{'heartbeat':13}{now.heartbeat}")
    if now.targets is not None:
        lines.append(f"{'targets':13}{now.targets_up} of {now.targets} answer")
    if now.firing is not None:
        lines.append(f"{'alerts':13}{now.firing} firing; see {folder / 'alerts.log'}")
    return [*lines, f"{'boards':13}{boards_url(record)}"]


@stack.command(epilog="example: gpujob stack down")
@DIRECTORY
def down() -> None:
    """End what `up` has started, and nothing else. The data stay."""
    from launcher.stack.status import stop_stack

    folder = folder_of_stack()
    ended = stop_stack(folder)
    click.echo(f"ended: {', '.join(ended) or 'nothing ran'}; the data stay in {folder}")


@stack.command("open", epilog="example: gpujob stack open")
@DIRECTORY
def open_boards() -> None:
    """Open the boards in a browser, or print their address where there is no display."""
    import webbrowser

    from launcher.stack.status import read_record

    record = read_record(folder_of_stack())
    if not record.programs:
        raise LauncherError("the stack is down; start it with `gpujob stack up`")
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")) or not webbrowser.open(
        boards_url(record)
    ):
        click.echo(boards_url(record))
        click.echo(f"from elsewhere: {tunnel(record)}")
