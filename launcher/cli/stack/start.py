"""What `gpujob stack up` and `gpujob run --stack` start: the programs found, and the configuration of this user."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.alerts.config import (
    BOARD_TEMPLATE,
    alertmanager_files,
    read_yaml,
    secret_files,
    shipped_folder,
    with_absolute_files,
)
from launcher.cli.job_source import warn
from launcher.errors import LauncherError
from launcher.registry.own_stack import StackRecord

if TYPE_CHECKING:
    from launcher.jobfile.alerts.notify import NotifySpec
    from launcher.stack.programs import Places
    from launcher.stack.up import Grafana

LOG_CHANNEL = "stack-log"


def start_own_stack(
    folder: Path, *, bin_folder: str | None = None, agent: bool = False, job: str | None = None
) -> tuple[StackRecord, str]:
    """Start the stack; return its record and a line about the programs. Raises LauncherError."""
    from launcher.alerts.config import SERVED_BOARDS
    from launcher.jobfile.jobfile import load_cluster
    from launcher.registry.own_stack import TARGETS_DIR
    from launcher.rundir.cluster_file import resolve_directory
    from launcher.rundir.trust import is_own_directory
    from launcher.stack.files import Settings
    from launcher.stack.programs import BIN_VARIABLE, Places, find_program
    from launcher.stack.up import COLLECTED_FILE, Wanted, running_target_files, start_stack
    from launcher.steps.local_steps import die_with_parent

    if "\n" in str(folder):
        raise LauncherError("--dir: a name with a line break cannot be given to Prometheus; choose another one")
    cluster = load_cluster(os.environ, Path.cwd())
    remote = cluster.stack.remote_write
    if agent and not remote:
        raise LauncherError("--agent: there is nowhere to send samples; name `stack.remote_write` in the cluster file")
    named = resolve_directory(bin_folder or os.environ.get(BIN_VARIABLE) or cluster.stack.bin, Path.cwd())
    images = {} if bin_folder else {str(name): file for name, file in cluster.stack.image.items()}
    places = Places(named, images, [folder])
    names = ("prometheus",) if agent else ("prometheus", "alertmanager")
    programs = {name: find_program(name, places, os.environ) for name in names}
    grafana = _find_grafana(places) if cluster.stack.grafana and not agent else None
    targets = resolve_directory(cluster.target_dir, Path.cwd())
    shipped, hub = shipped_folder(), _hub_socket()
    collects = targets is not None and hub is None and not is_own_directory(Path(targets))
    settings = Settings(
        agent=agent,
        remote_write=[remote] if isinstance(remote, dict) else [],
        retention=cluster.stack.retention,
        target_files=[
            str(folder / COLLECTED_FILE) if collects else f"{targets or folder / TARGETS_DIR}/*.json",
            *running_target_files(),
        ],
        hub=hub,
        version=programs["prometheus"].version,
    )

    def alerting(record: StackRecord) -> dict[str, str]:
        own = _with_log(_usable(with_absolute_files(cluster.notify)), folder, record)
        major, minor, *_ = programs["alertmanager"].version
        files = alertmanager_files(own, folder, (major, minor), {}, {}, log=LOG_CHANNEL)
        return files if own.board_url is not None else {**files, BOARD_TEMPLATE: SERVED_BOARDS}

    wanted = Wanted(
        folder=folder,
        programs=programs,
        shipped=read_yaml(shipped.parent / "docker" / "prometheus.yml"),
        rules=shipped / "rules",
        targets=targets,
        collects=collects,
        settings=settings,
        alerting=alerting,
        warn=warn,
        grafana=grafana,
        job=job,
        prepare=None if job is None else die_with_parent(),
    )
    all_programs = [*programs.values(), *([] if grafana is None else [grafana.program])]
    found = ", ".join(f"{each.name} {each.version_text} ({each.where})" for each in all_programs)
    return start_stack(wanted), found


def _find_grafana(places: "Places") -> "Grafana | None":
    """The Grafana of this machine; None, with a warning, if it cannot be used."""
    from launcher.boards.assets import shipped_folder
    from launcher.stack.programs import find_grafana
    from launcher.stack.up import Grafana

    try:
        found = find_grafana(places, os.environ)
    except LauncherError as error:
        warn(f"{error}; the boards work without Grafana")
        return None
    if found is None:
        return None
    shipped = shipped_folder()
    provisioning = read_yaml(shipped / "provisioning" / "datasources" / "gpujob.yml")
    return Grafana(*found, provisioning, str(shipped / "dashboards"))


def _hub_socket() -> str | None:
    """The socket of this user's hub, if one runs."""
    from exporter.contract.user_state import HUB_FOLDER, hub_socket, user_state_folder

    state = user_state_folder(os.environ)
    if state is None:
        return None
    path = hub_socket(os.environ, f"{state}/{HUB_FOLDER}")
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(path)
        except OSError:
            return None
    return path


def _usable(notify: "NotifySpec") -> "NotifySpec":
    """The channels whose secrets this user can read: those of a site may be its administrators' alone."""
    spec = type(notify)
    own = {
        f"channels.{name}": spec(channels={name: channel}, smtp=None if channel.email is None else notify.smtp)
        for name, channel in notify.channels.items()
    }
    if notify.owner_domain is not None:
        own["owner_domain"] = spec(smtp=notify.smtp)
    closed = {key for key, part in own.items() if not all(os.access(file, os.R_OK) for file in secret_files(part))}
    for key in sorted(closed):
        warn(f"notify.{key}: you cannot read its secret, so your stack does not use it")
    kept = _keep(notify, [name for name in notify.channels if f"channels.{name}" not in closed])
    return kept.model_copy(update={"owner_domain": None}) if "owner_domain" in closed else kept


def _keep(notify: "NotifySpec", names: list[str]) -> "NotifySpec":
    keys = ("page", "notify", "operators")
    lists = {key: [name for name in chosen if name in names] for key in keys if (chosen := getattr(notify, key))}
    # one Alertmanager calls the heartbeat: while a second one does, nobody hears of the end of the site's
    own = {"channels": {name: notify.channels[name] for name in names}, "heartbeat": None}
    return notify.model_copy(update={**own, **lists})


def _with_log(notify: "NotifySpec", folder: Path, record: StackRecord) -> "NotifySpec":
    """The channels and the receiver of the stack."""
    from launcher.jobfile.alerts.notify import ChannelSpec, LogChannel

    url = f"http://127.0.0.1:{record.ports['receiver']}/gpujob"
    log = ChannelSpec(log=LogChannel(token_file=str(folder / "receiver" / "token"), url=url))
    return notify.model_copy(update={"channels": {**notify.channels, LOG_CHANNEL: log}})
