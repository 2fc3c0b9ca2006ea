"""The command `gpujob alerts config`: the configuration of Alertmanager."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.job_source import warn
from launcher.cli.parts import JSON, print_json
from launcher.errors import ConfigError, LauncherError
from launcher.words import count_text

if TYPE_CHECKING:
    from launcher.jobfile.alerts.notify import NotifySpec

SECRET_MODE = 0o600
OLDEST = "0.25"
CHECK_S = 30  # for amtool
BOARD_TEMPLATE = "templates/gpujob-board.tmpl"


@click.command(epilog="example: gpujob alerts config --base /etc/prometheus/alertmanager.yml -o alerting")
@click.option("-o", "--output", default="alerting", metavar="DIR", help="Directory to write (default: alerting).")
@click.option("--base", metavar="FILE", help="The site's configuration; everything in it is kept except comments.")
@click.option("--config", metavar="FILE", help="A monitor_config.yaml; its `alerts` become channels too.")
@click.option(
    "--alert-email", metavar="ADDRESS", help="Also send mail to this address, through `notify.smtp` or that of --base."
)
@click.option("--alert-slack", metavar="FILE", help="Also send to Slack; FILE has the URL of the webhook.")
@click.option(
    "--alertmanager", "version", default=OLDEST, metavar="VERSION", help="Oldest Alertmanager that must accept it."
)
@JSON
def config(
    output: str,
    base: str | None,
    config: str | None,
    alert_email: str | None,
    alert_slack: str | None,
    version: str,
    as_json: bool,
) -> None:
    """Write a complete configuration of Alertmanager into a directory, and check it.

    Channels are those of `notify` in the cluster file, and those of the options. The directory gets
    alertmanager.yml, the templates, and files with secrets. Everything is checked before a file is replaced.
    """
    from launcher.jobfile.alerts.notify import find_problems
    from launcher.jobfile.jobfile import load_cluster

    folder = Path(output).absolute()
    notify, secrets = with_absolute_files(load_cluster(os.environ, Path.cwd()).notify), dict[str, str]()
    notify = _with_options(notify, secrets, folder, config, alert_email, alert_slack)
    site = {} if base is None else read_yaml(Path(base))
    has_mail_server = notify.smtp is not None or _has_mail_server(site)
    if alert_email is not None and not has_mail_server:
        raise LauncherError(
            "--alert-email: no mail server is known; write `notify.smtp` into the cluster file "
            "(`gpujob explain --cluster notify.smtp`), or give --config or --base with a file that names one"
        )
    if problems := find_problems(notify, has_mail_server=has_mail_server):
        raise ConfigError("cluster file", problems)
    if not notify.channels:
        raise LauncherError(
            "no channel: write `notify.channels` into the cluster file (`gpujob explain --cluster notify`), or give "
            "--alert-email, --alert-slack or --config"
        )
    for file in secret_files(notify):
        if file not in secrets and Path(file).exists():
            _check_mode(Path(file))
    files = alertmanager_files(notify, folder, _version(version), site, secrets)
    files |= {str(Path(file).relative_to(folder)): text for file, text in secrets.items()}
    is_checked = _check(files, folder)
    for name, text in files.items():
        _write(folder / name, text)
    if as_json:
        facts = {"file": str(folder / "alertmanager.yml"), "checked": is_checked, "files": sorted(files)}
        print_json({"schema": 1, **facts, "channels": list(notify.channels)})
        return
    click.echo(
        f"{folder}/alertmanager.yml: {count_text(len(notify.channels), 'channel')}: {', '.join(notify.channels)}"
    )
    if not is_checked:
        warn("amtool is not on PATH, so the file is not checked; run `amtool check-config` on it")
    click.echo("Alertmanager must be able to read it; then start it with --config.file, or reload it")


def alertmanager_files(
    notify: "NotifySpec",
    folder: Path,
    version: tuple[int, int],
    base: Mapping[str, object],
    secrets: Mapping[str, str],
    log: str | None = None,
) -> dict[str, str]:
    """The configuration and its templates.

    ``secrets`` has the texts of files that are yet to be written; ``log`` names a channel that gets every alert.
    """
    from launcher.alerts.config import Site, board_template, make_config
    from launcher.rundir.yaml_files import dump_yaml

    shipped = shipped_folder()
    rules = read_yaml(shipped / "alertmanager.yml").get("inhibit_rules")
    site = Site(
        version=version,
        read_secret=lambda file: secrets.get(file) or read_secret(file),
        inhibit_rules=rules if isinstance(rules, list) else (),
        templates=f"{folder}/templates/*.tmpl",
        log=log,
    )
    files = {"alertmanager.yml": dump_yaml(make_config(notify, site, base))}
    files |= {f"templates/{path.name}": path.read_text("utf-8") for path in (shipped / "templates").glob("*.tmpl")}
    if notify.board_url is not None:
        files[BOARD_TEMPLATE] = board_template(notify.board_url)
    return files


def shipped_folder() -> Path:
    """Rules, routes and templates: of the clone, or of the installed package."""
    above = Path(__file__).parents
    prefixes = above[6:7]  # of PREFIX/lib/pythonX/site-packages/launcher/cli/alerts; a clone may lie less deep
    places = (above[3] / "alertmanager", *(prefix / "share" / "gpujob" / "alertmanager" for prefix in prefixes))
    found = next((place for place in places if (place / "templates").is_dir()), None)
    if found is None:
        raise LauncherError(f"{places[-1]} is missing; install gpujob again")
    return found


def with_absolute_files(notify: "NotifySpec") -> "NotifySpec":
    """The section with absolute paths of its files: Alertmanager expands no ``~``, and runs elsewhere."""
    return type(notify).model_validate(_absolute_files(notify.model_dump(by_alias=True, exclude_unset=True)))


def _absolute_files(part: object, key: str = "") -> object:
    from launcher.rundir.cluster_file import resolve_directory

    if isinstance(part, dict):
        return {name: _absolute_files(value, name) for name, value in part.items()}
    return resolve_directory(part, Path.cwd()) if isinstance(part, str) and key.endswith("_file") else part


def secret_files(notify: "NotifySpec") -> list[str]:
    """Files of the channels and of the heartbeat with one secret each, on this machine or on that of Alertmanager."""
    kinds: list[object] = [each for channel in notify.channels.values() for _, each in channel if each is not None]
    kinds.append(notify.heartbeat)
    found = [getattr(kind, key, None) for kind in kinds for key in ("url_file", "key_file", "token_file")]
    return [file for file in (*found, notify.smtp and notify.smtp.password_file) if file]


def _version(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"v?(\d{1,3})\.(\d{1,3})(?:\.\d{1,5})?", text)
    if match is None or (int(match[1]), int(match[2])) < (0, 25):
        raise LauncherError(f"--alertmanager: {text!r} is not a version from {OLDEST} on; write for example 0.28")
    return int(match[1]), int(match[2])


def _with_options(
    notify: "NotifySpec",
    secrets: dict[str, str],
    folder: Path,
    config: str | None,
    email: str | None,
    slack: str | None,
) -> "NotifySpec":
    """The channels with those of the options, which hear everything; secrets that came as values get files."""
    from launcher.jobfile.alerts.notify import NotifySpec, address_problem
    from launcher.jobfile.yamlfile import validate_model

    body = notify.model_dump(by_alias=True, exclude_unset=True)
    channels, source = body.setdefault("channels", {}), "command line"
    if config is not None:
        found, source = _alerts_of(config), config
        mail, chat = _enabled(found, "email"), _enabled(found, "slack")
        email = email or mail.get("address")
        if mail.get("smtp_server") and "smtp" not in body:
            port = mail.get("smtp_port", 587)
            body["smtp"] = {"smarthost": f"{mail['smtp_server']}:{port}", "from": mail.get("address", email)}
        if slack is None and chat.get("webhook"):
            place = str(folder / "secrets" / "slack-url")
            secrets[place] = str(chat["webhook"])
            channels["alert-slack"] = {"slack": {"url_file": place}}
    if email is not None:
        if problem := address_problem(email):
            raise LauncherError(f"--alert-email: {problem}")
        channels["alert-email"] = {"email": {"to": email}}
    if slack is not None:
        if "://" in slack:
            raise LauncherError(
                "--alert-slack: a URL of a webhook is a secret, and all users of this machine see arguments; write it "
                "into a file of mode 0600 and name the file"
            )
        channels["alert-slack"] = {"slack": {"url_file": str(Path(slack).absolute())}}
    for key in ("page", "notify", "operators"):
        if body.get(key) is not None:
            body[key] += [name for name in channels if name not in notify.channels]
    return validate_model(body, source, NotifySpec)


def _has_mail_server(site: Mapping[str, object]) -> bool:
    """Whether mail without a server of its own has that of the configuration."""
    shared = site.get("global")
    return isinstance(shared, dict) and {"smtp_smarthost", "smtp_from"} <= shared.keys()


def _alerts_of(path: str) -> Mapping[str, object]:
    from launcher.jobfile.monitor_config import load_monitor_config, without_nulls

    load_monitor_config(path, {})  # one error with every problem, none of them with a secret
    found = without_nulls(read_yaml(Path(path))).get("alerts")
    return found if isinstance(found, dict) else {}


def _enabled(found: Mapping[str, object], key: str) -> dict[str, str]:
    section = found.get(key)
    return section if isinstance(section, dict) and section.get("enabled", True) else {}


def read_yaml(path: Path) -> dict[str, object]:
    from launcher.rundir.yaml_files import load_yaml, read_yaml_text

    body = load_yaml(read_yaml_text(path), str(path))
    if not isinstance(body, dict):
        raise ConfigError(str(path), ["is not a mapping of keys to values"])
    return body


def read_secret(file: str) -> str:
    """The URL in a file that nobody else can read."""
    path = Path(file)
    try:
        _check_mode(path)
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not re.fullmatch(r"https?://\S+", text):
        raise LauncherError(f"{path}: is not a URL on one line; write one with http:// or https:// and nothing else")
    return text


def _check_mode(path: Path) -> None:
    if path.stat().st_mode & 0o077:
        raise LauncherError(f"{path}: others can read this secret; run chmod 600 on it")


def _check(files: Mapping[str, str], folder: Path) -> bool:
    """Whether amtool has accepted the files; False without amtool. Raises ConfigError with what it says."""
    amtool = shutil.which("amtool")
    if amtool is None:
        return False
    with tempfile.TemporaryDirectory() as trial:
        for name, text in files.items():
            _write(Path(trial, name), text.replace(f"{folder}/templates", f"{trial}/templates"))
        done = subprocess.run(
            [amtool, "check-config", f"{trial}/alertmanager.yml"],
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    if done.returncode:
        lines = [
            line.strip() for line in (done.stdout + done.stderr).splitlines() if "rror" in line or "FAILED" in line
        ]
        raise ConfigError("amtool check-config", lines or ["has refused the configuration"])
    return True


def _write(path: Path, text: str) -> None:
    """Replace a file that only its owner can read: even without a secret today, it may have one tomorrow."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE), "w", encoding="utf-8") as out:
        out.write(text)
    temporary.replace(path)
