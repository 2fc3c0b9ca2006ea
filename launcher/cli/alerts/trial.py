"""The command `gpujob alerts test`: one message through each channel."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.alerts.show import URL, manager
from launcher.cli.parts import JSON, print_json
from launcher.errors import LauncherError, did_you_mean

if TYPE_CHECKING:
    from launcher.alerts.api import Source

POLL_S = 1.0  # between two polls of Alertmanager's counters
FAILED = 1  # exit status


@click.command("test", epilog="example: gpujob alerts test --to oncall")
@click.option("--to", "channel", metavar="CHANNEL", help="Only this channel of the cluster file.")
@click.option("--wait", "wait_s", type=click.FloatRange(1, 600), default=75.0, help="Seconds to wait (default: 75).")
@URL
@JSON
def test(channel: str | None, wait_s: float, url: str | None, as_json: bool) -> None:
    """Send an alert through each channel, and report what was delivered. Alertmanager waits 10 seconds before it sends.

    Delivered means that the service took the message. Check yourself that a person sees it. A webhook or a log takes up
    to a minute, since heartbeats are counted with its messages. The exit status is 1 if a message was not delivered.
    """
    from launcher.alerts.api import ask
    from launcher.alerts.trial import most_heartbeats, outcomes, parse_counts, trial_alerts
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
    webhooks = _heartbeat_webhooks(source)
    begin = time.monotonic()
    before = parse_counts(ask(source, "/metrics"))
    ask(source, "/api/v2/alerts", trial_alerts(kinds, user_name(), time.time()))
    last, found = None, outcomes(kinds, before, before)
    while time.monotonic() - begin < wait_s and (found != last or not all(each.is_over for each in found)):
        time.sleep(POLL_S)
        # two equal looks, because Alertmanager counts an attempt and its failure one after the other
        after = parse_counts(ask(source, "/metrics"))
        last, found = found, outcomes(kinds, before, after, webhooks * most_heartbeats(time.monotonic() - begin))
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


def _heartbeat_webhooks(source: "Source") -> int:
    """Number of webhooks to which Alertmanager sends heartbeats; 0 if Prometheus sends it none."""
    from launcher.alerts.api import read_alerts, read_config
    from launcher.alerts.config import WATCHDOG
    from launcher.alerts.trial import heartbeat_webhooks
    from launcher.rundir.yaml_files import load_yaml

    if not any(found.alert.name == WATCHDOG for found in read_alerts(source)):
        return 0
    return heartbeat_webhooks(load_yaml(read_config(source), f"configuration of {source}"))
