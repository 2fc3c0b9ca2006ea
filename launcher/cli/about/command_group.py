"""All commands as one: groups in the help, and the loss of standard output and error."""

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from launcher.cli.parts import fail
from launcher.errors import did_you_mean

BROKEN_PIPE = 141

_GROUPS = {
    "Before a job": ("init", "check", "plan", "explain", "schema", "scan"),
    "Start a job": ("run", "submit", "pipeline", "attach"),
    "Jobs that run or have ended": (
        "ps",
        "watch",
        "track",
        "logs",
        "connect",
        "report",
        "verify",
        "stop",
        "sweep",
        "metrics",
        "timeline",
    ),
    "The cluster": ("fleet", "usage", "alerts", "stack", "boards", "index"),
}  # commands in the order in which people meet them; others come last
OTHER_WORDS = {
    **dict.fromkeys(("kill", "cancel", "scancel"), "stop"),
    **dict.fromkeys(("list", "ls", "jobs", "queue", "squeue"), "ps"),
    **dict.fromkeys(("start", "launch"), "run"),
    **dict.fromkeys(("validate", "lint"), "check"),
    **dict.fromkeys(("exec", "ssh", "shell"), "connect"),
    "sbatch": "submit",
    "status": "watch --once",
    "tail": "logs -f",
    "dry-run": "plan",
    "help": "--help",
    "version": "--version",
}  # what users of other programs type, and the command that does it here
LIKENESS = 0.6  # least likeness of a suggested command
_SHORT_HELP = 100  # characters of a line about a command


class CommandGroup(click.Group):
    """Commands in groups, which handle the loss of their standard output.

    Those of ``modules``, as in ``package.module:function``, are loaded when they are named, or for the help.
    """

    def __init__(self, *arguments: Any, modules: Mapping[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self._modules})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._modules and cmd_name not in self.commands:
            module, _, function = self._modules[cmd_name].partition(":")
            self.add_command(getattr(importlib.import_module(module), function))
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            other = OTHER_WORDS.get(name)
            hint = f'; did you mean "{other}"?' if other else did_you_mean(name, self.list_commands(ctx), LIKENESS)
            ctx.fail(f"No such command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def all_commands(self) -> dict[str, click.Command]:
        """Load all commands; returns them by name."""
        context = click.Context(self)
        found = {name: self.get_command(context, name) for name in self.list_commands(context)}
        return {name: command for name, command in found.items() if command is not None}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {name: command for name, command in self.all_commands().items() if not command.hidden}
        grouped = {name for names in _GROUPS.values() for name in names}
        for title, names in {**_GROUPS, "More": tuple(name for name in shown if name not in grouped)}.items():
            rows = [(name, shown[name].get_short_help_str(_SHORT_HELP)) for name in names if name in shown]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        with _handle_output_errors():  # --help and --version are printed here
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with _handle_output_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _handle_output_errors() -> Iterator[None]:
    """Report a closed pipe or a full disk by an exit status and at most one line, without a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(BROKEN_PIPE)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        _discard_output()
        fail(f"cannot write: {error.strerror}")


def prepare_streams() -> None:
    """Prepare standard output and error: neither a closed one nor a name that is not text ends a command."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as with >&-
    if isinstance(sys.stderr, io.TextIOWrapper) and isinstance(sys.stderr.buffer, io.BufferedWriter):
        out = io.BufferedWriter(_StandardError())
        sys.stderr = io.TextIOWrapper(out, sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _StandardError(io.RawIOBase):
    """Standard error without errors: a message that nobody can read changes no exit status."""

    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return os.isatty(2)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return os.write(2, data)
        return memoryview(data).nbytes


def _discard_output() -> None:
    """Discard unwritten output, so that the interpreter does not try again to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
