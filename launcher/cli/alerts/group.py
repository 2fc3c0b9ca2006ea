"""The command `gpujob alerts`: a word after it is a part of it, or the job whose alerts are shown."""

import os
import sys

import click

from exporter.contract.python_flags import ISOLATED
from launcher.cli.alerts.config import config
from launcher.cli.alerts.mute import mute, unmute
from launcher.cli.alerts.show import show
from launcher.cli.alerts.trial import test

LIST = "list"


class AlertsGroup(click.Group):
    """Parts of `gpujob alerts`; without the name of one, it lists alerts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)  # a shell completes the names of the parts
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [LIST, *args]
        return super().parse_args(ctx, args)


@click.group(cls=AlertsGroup, epilog="example: gpujob alerts 4459")
def alerts() -> None:
    """Show the alerts that fire, and set up who gets them. Without one of its parts, it is `gpujob alerts list`."""


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog='example: gpujob alerts receive --on-silence "mail -s gpujob ada@example.org"',
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def receive(options: tuple[str, ...]) -> None:
    """Take alerts from Alertmanager, log them, and report when they stop. It is `gpujob-exporter receive-alerts`."""
    command = [sys.executable, *ISOLATED, "-m", "exporter", "receive-alerts", *options]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is involved


for command in (show, config, receive, test, mute, unmute):
    alerts.add_command(command)
