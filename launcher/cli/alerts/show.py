"""The command `gpujob alerts list`, which is also `gpujob alerts`: the terminal and a file as channels."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from launcher.cli.about.completion import complete_jobs
from launcher.cli.job_source import warn
from launcher.cli.parts import INTERRUPTED, INTERVAL, print_json
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.alerts.api import Source
    from launcher.alerts.firing import Found, Silence

UNKNOWN = 9  # exit status: nothing is known
URL = click.option("--alertmanager", "url", metavar="URL", help="Alertmanager (default: that of the cluster file).")


def sources(url: str | None) -> "list[Source]":
    """The servers to ask. Raises LauncherError if there is none."""
    from exporter.contract.user_state import user_state_folder
    from launcher.alerts.api import Source, find_sources
    from launcher.registry.own_stack import read_own_stack
    from launcher.rundir.cluster_file import read_cluster_key

    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise LauncherError(f"--alertmanager: {url!r} is not a URL; write for example http://alertmanager:9093")
        return [Source("alertmanager", url)]
    names = ("alertmanager", "prometheus")
    urls = {name: read_cluster_key(f"{name}_url", os.environ, Path.cwd())[1] for name in names}
    if found := find_sources(urls, user_state_folder(os.environ), read_own_stack(os.environ)):
        return found
    raise LauncherError(
        "no source of alerts: write `alertmanager_url` or `prometheus_url` into the cluster file, give --alertmanager "
        "URL, or start your own with `gpujob stack up`"
    )


def manager(url: str | None) -> "Source":
    """The Alertmanager. Raises LauncherError if there is none."""
    found = next((source for source in sources(url) if source.kind == "alertmanager"), None)
    if found is None:
        raise LauncherError(
            "no Alertmanager: write `alertmanager_url` into the cluster file, or give --alertmanager URL"
        )
    return found


def place_of(owner: str) -> dict[str, str]:
    """The labels of jobs of this user here: `user`, and `cluster` if the cluster file names it."""
    from exporter.contract.identity import safe_label
    from launcher.rundir.cluster_file import read_cluster_key

    cluster = read_cluster_key("cluster", os.environ, Path.cwd())[1]
    return {"user": safe_label(owner)} | ({"cluster": safe_label(cluster)} if isinstance(cluster, str) else {})


@click.command("list", epilog="example: gpujob alerts 4459 --follow")
@click.argument("job", metavar="[JOB-ID]", required=False, shell_complete=complete_jobs)
@click.option("-f", "--follow", is_flag=True, help="Print a line when an alert begins or ends, until Ctrl-C.")
@click.option("--log", "log_file", metavar="FILE", help="With --follow: also append to FILE, and JSON to FILE.jsonl.")
@click.option("--all-users", is_flag=True, help="Alerts of all users' jobs.")
@click.option("--interval", type=INTERVAL, default=10.0, help="Seconds between two polls with --follow (default: 10).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --follow one for each change.")
@URL
def show(
    job: str | None,
    follow: bool,
    log_file: str | None,
    all_users: bool,
    interval: float,
    as_json: bool,
    url: str | None,
) -> None:
    """List the alerts that fire, worst first: yours, or those of the job with this id or name.

    The Alertmanager of the cluster file is asked, else its Prometheus, else that of `gpujob stack`, else your
    own `gpujob alerts receive`. With --follow, only the first that answers is asked. If none answers, the exit status
    is 9.
    """
    from launcher.alerts.firing import as_json as to_json
    from launcher.alerts.firing import render, selected
    from launcher.rundir.rundir import user_name

    if log_file is not None and not follow:
        raise LauncherError("--log needs --follow; without it, redirect the output into a file")
    places, own = sources(url), place_of(user_name())
    choose = partial(selected, job=job, user=None if all_users else own["user"], cluster=own.get("cluster"))
    if follow:
        try:
            _follow(places, choose, log_file, interval, as_json)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
    source, found, silences = _look(places)
    rows = choose(found)
    if as_json:
        print_json({"schema": 1, "source": source.kind, "url": source.url, "alerts": to_json(rows, silences)})
    else:
        click.echo("\n".join(render(rows, silences, time.time())))


def _look(places: "list[Source]") -> "tuple[Source, list[Found], dict[str, Silence]]":
    """The alerts from the first server that answers, and the silences. Ends with status 9 if none does."""
    from launcher.alerts.api import UnansweredError, read_alerts, read_silences

    for source in places:
        try:
            found = read_alerts(source)
            silences = read_silences(source) if source.kind == "alertmanager" else []
        except UnansweredError as error:
            warn(str(error))
        else:
            return source, found, {each.id: each for each in silences}
    raise SystemExit(UNKNOWN)


def _first_answer(places: "list[Source]") -> "tuple[Source, list[Found]]":
    """The first server that answers, and its alerts. Raises UnansweredError of the last one."""
    from launcher.alerts.api import UnansweredError, read_alerts

    silent = list[str]()
    for source in places[:-1]:
        try:
            found = read_alerts(source)
        except UnansweredError as error:
            silent.append(str(error))
        else:
            break
    else:
        source = places[-1]
        found = read_alerts(source)
    for problem in silent:
        warn(f"{problem}; the alerts are those of {source}")
    return source, found


def _follow(
    places: "list[Source]",
    choose: "Callable[[list[Found]], list[Found]]",
    log_file: str | None,
    interval_s: float,
    as_json: bool,
) -> NoReturn:
    from exporter.alerts.log_file import AlertLog
    from exporter.alerts.messages import Alert, alert_json, iso, log_line
    from launcher.alerts.api import UnansweredError
    from launcher.alerts.firing import changes

    log = None if log_file is None else AlertLog(Path(log_file))

    def write(alert: Alert) -> None:
        now = time.time()
        if log is not None:
            log.write(alert, now)
        if as_json:
            print_json({"schema": 1, "time": iso(now), **alert_json(alert)})
        else:
            click.echo(log_line(alert, now))

    before: list[Found] = []
    problem = ""
    while True:
        try:
            source, found = _first_answer(places)
        except UnansweredError as error:
            if str(error) != problem:
                warn(f"{error}; the alerts are those of the last answer")
            problem = str(error)
        else:
            if problem:
                warn("alerts are read again")
            problem = ""
            places = [source]  # others know other alerts, so a change of the server would pass for changes of alerts
            after = choose(found)
            changes(before, after, write)
            before = after
        time.sleep(interval_s)
