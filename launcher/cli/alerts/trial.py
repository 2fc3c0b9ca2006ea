"""The command `gpujob alerts test`: one message through each channel."""

import os
import time
from pathlib import Path

import click

from launcher.cli.alerts.show import URL, manager
from launcher.cli.parts import JSON, print_json
from launcher.errors import LauncherError, did_you_mean

POLL_S = 1.0  # between two polls of Alertmanager's counters
FAILED = 1  # exit status


@click.command("test", epilog="example: gpujob alerts test --to oncall")
@click.option("--to", "channel", metavar="CHANNEL", help="Only this channel of the cluster file.")
@click.option("--wait", "wait_s", type=click.FloatRange(1, 600), default=45.0, help="Seconds to wait (default: 45).")
@URL
@JSON
def test(channel: str | None, wait_s: float, url: str | None, as_json: bool) -> None:
    """Send an alert through each channel, and report what was delivered. Alertmanager waits 10 seconds before it sends.

    Delivered means that the service took the message. Check yourself that a person sees it. The exit status is 1 if
    a message was not delivered.
    """
    from launcher.alerts.api import ask
    from launcher.alerts.trial import outcomes, parse_counts, trial_alerts
    from launcher.jobfile.jobfile import load_cluster
    from launcher.rundir.rundir import user_name

    channels = load_cluster(os.environ, Path.cwd()).notify.channels
    if channel is not None and channel not in channels:
        known = f"(known: {', '.join(channels) or 'none'})"
        raise LauncherError(f'unknown channel "{channel}"{did_you_mean(channel, list(channels))} {known}')
    kinds = {
        name: next(kind for kind, value in spec if value is not None)
        for name, spec in channels.items()
        if channel in (None, name)
    }
    if not kinds:
        raise LauncherError("no channel in the cluster file; `gpujob explain --cluster notify` says how to name one")
    source = manager(url)
    before = parse_counts(ask(source, "/metrics"))
    ask(source, "/api/v2/alerts", trial_alerts(kinds, user_name(), time.time()))
    end = time.monotonic() + wait_s
    last, found = None, outcomes(kinds, before, before)
    while time.monotonic() < end and (found != last or not all(each.is_over for each in found)):
        time.sleep(POLL_S)
        # two equal looks, because Alertmanager counts an attempt and its failure one after the other
        last, found = found, outcomes(kinds, before, parse_counts(ask(source, "/metrics")))
    if as_json:
        rows = [{**each._asdict(), "channels": list(each.channels), "arrived": each.arrived} for each in found]
        print_json({"schema": 1, "services": rows})
    else:
        for each in found:
            word = "delivered" if each.arrived else "FAILED" if each.failed else "nothing sent yet"
            failed = f"; {each.failed} attempts failed, see the log of Alertmanager" if each.failed else ""
            number = f"{each.delivered} of {len(each.channels)} ({', '.join(each.channels)})"
            click.echo(f"{each.integration:10} {word}: {number}{failed}")
    if not all(each.arrived for each in found):
        raise SystemExit(FAILED)
