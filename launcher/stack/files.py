"""The files of the stack, as texts: configuration of its programs, and arguments that `ps` must not show."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from exporter.contract.stack_gate import USER, GateFile, Upstream
from launcher.registry.own_stack import StackRecord
from launcher.rundir.yaml_files import dump_yaml

Tree = dict[str, object]

SIDECAR_JOB = "gpujob-sidecar"
MOST_DATA = "10GB"
REFRESH = "5s"  # of target files: on a network file system Prometheus is not told of changes
AGENT_FLAG_SINCE = (3, 0)  # before, it was a feature
GRAFANA_PATH = "grafana/"  # below the secret path
PROVISIONING = "grafana/provisioning"


class Settings(NamedTuple):
    """Settings of Prometheus."""

    agent: bool
    remote_write: Sequence[Mapping[str, object]]
    retention: str
    target_files: Sequence[str]  # globs
    hub: str | None  # socket of the user's hub
    version: tuple[int, ...]


def prometheus_config(shipped: Mapping[str, object], folder: str, record: StackRecord, settings: Settings) -> Tree:
    """The shipped configuration of Prometheus with the addresses of this stack."""
    jobs = {str(job["job_name"]): dict(job) for job in _mappings(shipped["scrape_configs"])}
    sidecars, root = jobs[SIDECAR_JOB], f"/{record.token}"
    if settings.hub is None:
        sidecars["file_sd_configs"] = [{"files": list(settings.target_files), "refresh_interval": REFRESH}]
    else:
        del sidecars["file_sd_configs"]
        url = f"{record.url}hub/targets?kind=sidecar"
        sidecars["http_sd_configs"] = [{"url": url, "refresh_interval": REFRESH}]
    login = {"username": USER, "password": record.password}

    def scrape(name: str, port: str, path: str = "/metrics", **more: object) -> Tree:
        target = f"127.0.0.1:{record.ports[port]}"
        return {"job_name": name, "metrics_path": path, **more, "static_configs": [{"targets": [target]}]}

    own = [scrape("prometheus", "prometheus", f"{root}/metrics", basic_auth=login)]
    if not settings.agent:
        own.append(scrape("alertmanager", "alertmanager", f"{root}/alertmanager/metrics", basic_auth=login))
        own.append(scrape("gpujob-alerts", "receiver"))
    if settings.hub is not None:
        own.append(scrape("gpujob-hub", "gate", f"{root}/hub/metrics", scrape_interval="60s"))
    config: Tree = {"global": shipped["global"], "scrape_configs": [sidecars, *own]}
    if not settings.agent:
        target = {"targets": [f"127.0.0.1:{record.ports['alertmanager']}"]}
        manager = {"path_prefix": f"{root}/alertmanager", "basic_auth": login, "static_configs": [target]}
        config |= {"rule_files": [f"{folder}/rules/*.yml"], "alerting": {"alertmanagers": [manager]}}
    if settings.remote_write:
        config["remote_write"] = [dict(each) for each in settings.remote_write]
    return config


def _mappings(value: object) -> list[Mapping[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def prometheus_arguments(folder: str, record: StackRecord, settings: Settings) -> str:
    """One argument a line."""
    if not settings.agent:
        storage = [
            f"--storage.tsdb.path={folder}/data",
            f"--storage.tsdb.retention.time={settings.retention}",
            f"--storage.tsdb.retention.size={MOST_DATA}",
            f"--web.user-assets={folder}/assets",
        ]
    else:
        flag = "--agent" if settings.version >= AGENT_FLAG_SINCE else "--enable-feature=agent"
        storage = [flag, f"--storage.agent.path={folder}/agent"]
    return _lines(
        f"--config.file={folder}/prometheus.yml",
        *storage,
        *_web(folder, record, "prometheus", ""),
    )


def alertmanager_arguments(folder: str, record: StackRecord) -> str:
    """One argument a line."""
    return _lines(
        f"--config.file={folder}/alertmanager.yml",
        f"--storage.path={folder}/alertmanager",
        "--cluster.listen-address=",
        *_web(folder, record, "alertmanager", "alertmanager/"),
    )


def _web(folder: str, record: StackRecord, name: str, path: str) -> list[str]:
    return [
        f"--web.config.file={folder}/web.yml",
        f"--web.listen-address=127.0.0.1:{record.ports[name]}",
        f"--web.external-url={record.url}{path}",
        f"--web.route-prefix=/{record.token}/{path}",
    ]


def _lines(*words: str) -> str:
    return "".join(f"{word}\n" for word in words)


def web_config(record: StackRecord) -> str:
    """Who may ask Prometheus and Alertmanager."""
    return dump_yaml({"basic_auth_users": {USER: record.password_hash}})


def grafana_files(shipped: Mapping[str, object], boards: str, folder: str, record: StackRecord) -> dict[str, str]:
    """Settings of Grafana, its data source and its boards, by name. The gate logs every request in.

    `shipped` is grafana/provisioning/datasources/gpujob.yml, `boards` the folder of the boards.
    """
    data = f"{folder}/grafana/{record.password[:8]}"  # a new password needs a new database: the old one keeps its own
    sections: dict[str, dict[str, object]] = {
        "paths": {
            "data": data,
            "logs": f"{data}/log",
            "plugins": f"{data}/plugins",
            "provisioning": f"{folder}/{PROVISIONING}",
        },
        "log": {"mode": "console"},
        "server": {
            "http_addr": "127.0.0.1",
            "http_port": record.ports["grafana"],
            "root_url": f"{record.url}{GRAFANA_PATH}",
            "serve_from_sub_path": "true",
        },
        "security": {
            "admin_user": USER,
            "admin_password": record.password,
            "secret_key": record.password,
            "disable_gravatar": "true",
            # or wrong passwords of another user of this machine would lock the owner out
            "disable_brute_force_login_protection": "true",
        },
        "auth": {"disable_login_form": "true"},
        "dashboards": {"default_home_dashboard_path": f"{boards}/gpujob-fleet.json"},
        "live": {"max_connections": "0"},  # the gate passes no WebSocket
        # nothing is fetched or reported
        "plugins": {"preinstall_disabled": "true", "plugin_admin_enabled": "false"},
        "analytics": {
            "reporting_enabled": "false",
            "check_for_updates": "false",
            "check_for_plugin_updates": "false",
        },
        "news": {"news_feed_enabled": "false"},
        "snapshots": {"external_enabled": "false"},
    }
    settings = [
        f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for section, entries in sections.items()
    ]
    (shipped_source,) = _mappings(shipped["datasources"])
    source = {
        **shipped_source,
        "url": f"http://127.0.0.1:{record.ports['prometheus']}/{record.token}",
        "basicAuth": True,
        "basicAuthUser": USER,
        "secureJsonData": {"basicAuthPassword": record.password},
    }
    provider = {"name": "gpujob", "folder": "gpujob", "type": "file", "options": {"path": boards}}
    return {
        "grafana/grafana.ini": "\n".join(settings),
        f"{PROVISIONING}/datasources/gpujob.yml": dump_yaml({**shipped, "datasources": [source]}),
        f"{PROVISIONING}/dashboards/gpujob.yml": dump_yaml({"apiVersion": 1, "providers": [provider]}),
    }


def gate_file(record: StackRecord, *, agent: bool, hub: str | None, grafana: bool) -> GateFile:
    """What the gate serves."""
    upstreams = [] if hub is None else [Upstream(path="hub/", address=f"unix:{hub}", strip=True)]
    names = ("prometheus",) if agent else ("alertmanager", "prometheus")
    for name in (*(("grafana",) if grafana else ()), *names):
        path = "" if name == "prometheus" else f"{name}/"
        address = f"127.0.0.1:{record.ports[name]}"
        upstreams.append(Upstream(path=path, address=address, password=record.password))
    return GateFile(port=record.ports["gate"], token=record.token, upstreams=tuple(upstreams))
