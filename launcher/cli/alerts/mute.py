"""The commands `gpujob alerts mute` and `unmute`: silences of Alertmanager for one job."""

import re
import time

import click

from launcher.cli.about.completion import complete_jobs
from launcher.cli.alerts.config import shipped_folder
from launcher.cli.alerts.show import URL, manager, place_of
from launcher.cli.parts import JSON, print_json
from launcher.errors import LauncherError, did_you_mean

LONGEST_S = 30 * 86400.0  # of a silence: a job that somebody forgot must be heard again
_DURATION = re.compile(r"(\d{1,6})([mhd])")
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_JOB_ID = re.compile(r"\d+(_\d+)?|local-[\w-]+")


def _parse_duration(_context: click.Context, _option: click.Parameter, text: str) -> float:
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0.0 < seconds <= LONGEST_S:
        raise click.BadParameter(f"{text!r} is not a time of at most 30d; write for example 30m, 2h or 1d")
    return seconds


def _check_alert(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    if name is None:
        return None
    from launcher.alerts.firing import OURS

    short = name.removeprefix(OURS)
    known = {page.stem.removeprefix(OURS) for page in (shipped_folder() / "runbooks").glob(f"{OURS}*.md")}
    if short not in known:
        near = did_you_mean(short, known) or "; write for example GpuJobSlowdown or Slowdown"
        raise click.BadParameter(f"{name!r} is not the name of an alert{near}")
    return OURS + short


ALERT = click.option("--alert", metavar="NAME", callback=_check_alert, help="Only this alert, such as GpuJobSlowdown.")


def id_of(job: str) -> str:
    """The id of a job: the text itself, or that of the job with this name. Raises LauncherError."""
    if _JOB_ID.fullmatch(job):
        return job
    from launcher.cli.parts import open_job
    from launcher.rundir.job_ids import job_id_of

    return job_id_of(open_job(job).run_dir)


OWNER = click.option("--user", "owner", metavar="NAME", help="Owner of the job (default: you).")


@click.command(epilog="example: gpujob alerts mute 4459 --for 2h --alert Slowdown")
@click.argument("job", metavar="JOB", shell_complete=complete_jobs)
@click.option(
    "--for", "seconds", metavar="TIME", default="2h", callback=_parse_duration, help="30m, 2h, 1d (default 2h)."
)
@ALERT
@OWNER
@URL
@JSON
def mute(job: str, seconds: float, alert: str | None, owner: str | None, url: str | None, as_json: bool) -> None:
    """Mute the alerts of a job for some time. They still fire, and nobody is notified."""
    from exporter.alerts.messages import iso
    from exporter.contract.identity import safe_label
    from launcher.alerts.api import add_silence
    from launcher.alerts.firing import job_matcher
    from launcher.rundir.rundir import user_name

    source, now, job_id = manager(url), time.time(), id_of(job)
    own = user_name()
    owner = owner or own
    labels = place_of(owner)
    if alert is not None:
        labels["alertname"] = alert
    silence = add_silence(
        source,
        {
            "matchers": [
                {"name": name.removesuffix("=~"), "value": value, "isRegex": name.endswith("=~"), "isEqual": True}
                for name, value in (job_matcher(safe_label(job_id)), *labels.items())
            ],
            "startsAt": iso(now),
            "endsAt": iso(now + seconds),
            "createdBy": own,
            "comment": "gpujob alerts mute",
        },
    )
    if as_json:
        print_json({"schema": 1, "silence": silence, "job_id": job_id, "alert": alert, "until": iso(now + seconds)})
    else:
        click.echo(f"Muted: {alert or 'all alerts'} of job {job_id} of {owner} until {iso(now + seconds)}")
        whose = "" if owner == own else f" --user {owner}"
        click.echo(f"Hear them again: gpujob alerts unmute {job_id}{whose}")


@click.command(epilog="example: gpujob alerts unmute 4459")
@click.argument("job", metavar="JOB", shell_complete=complete_jobs)
@ALERT
@OWNER
@URL
@JSON
def unmute(job: str, alert: str | None, owner: str | None, url: str | None, as_json: bool) -> None:
    """End the silences of a job, or only those of one alert."""
    from launcher.alerts.api import end_silence, read_silences
    from launcher.rundir.rundir import user_name

    source, job_id, owner = manager(url), id_of(job), owner or user_name()
    place = place_of(owner)
    wanted = [
        silence
        for silence in read_silences(source)
        if silence.is_of(job_id, place) and (alert is None or silence.alert == alert)
    ]
    if not wanted:
        raise LauncherError(
            f"job {job_id} of {owner} is not muted; `gpujob alerts {job_id}` shows what is; --user names another owner"
        )
    for silence in wanted:
        end_silence(source, silence.id)
    if as_json:
        print_json({"schema": 1, "job_id": job_id, "ended": [silence.id for silence in wanted]})
    else:
        click.echo(f"No longer muted: {', '.join(silence.alert or 'all alerts' for silence in wanted)} of job {job_id}")
