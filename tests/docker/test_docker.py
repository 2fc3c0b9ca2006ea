"""Checks of the images and the compose file that need no Docker engine."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pip
import pytest
import yaml
from packaging.version import Version

from tests.realstack.waiting import wait_for
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
PINNED = re.compile(r"^[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$")
NO_INDEX = ("No matching distribution found", "ConnectionError", "NewConnectionError", "Temporary failure in name")
SECRET = re.compile(r"PASS|TOKEN|SECRET|CREDENTIAL|API_?KEY", re.IGNORECASE)

Json = dict[str, Any]


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments, without comments and line breaks."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = lines.replace("\\\n", " ")
    pairs = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(word.upper(), " ".join(rest[0].split()) if rest else "") for word, *rest in pairs]


def arguments(*words: str) -> list[str]:
    """Arguments of all instructions with these words."""
    return [rest for word, rest in instructions(DOCKERFILE.read_text(encoding="utf-8")) if word in words]


def test_base_images_are_pinned() -> None:
    stages = [words.split() for words in arguments("FROM")]
    earlier = {words[2] for words in stages if len(words) > 2}
    assert [words[0] for words in stages if words[0] not in earlier and not PINNED.match(words[0])] == []


def test_the_image_does_not_run_as_root() -> None:
    words = [word for word, _ in instructions(DOCKERFILE.read_text(encoding="utf-8"))]
    last_stage = words[len(words) - words[::-1].index("FROM") :]
    assert {"USER", "ENTRYPOINT", "HEALTHCHECK", "LABEL"} <= set(last_stage)
    assert arguments("USER")[-1].split(":")[0] not in ("0", "root")
    assert [rest for rest in arguments("COPY") if "--chown=" not in rest] == []


def test_the_image_has_no_secret_and_no_unchecked_download() -> None:
    assert [rest for rest in arguments("ENV", "ARG") if SECRET.search(rest)] == []
    assert [rest for rest in arguments("RUN") if re.search(r"\b(curl|wget|sudo)\b", rest)] == []
    assert arguments("ADD") == []


def test_image_runs_the_exporter_and_has_both_programs() -> None:
    steps = instructions(DOCKERFILE.read_text(encoding="utf-8"))
    assert ("ENTRYPOINT", '["gpujob-exporter"]') in steps
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"].keys() >= {"gpujob", "gpujob-exporter"}


def health_command() -> list[str]:
    steps = dict(instructions(DOCKERFILE.read_text(encoding="utf-8")))
    command: list[str] = json.loads(steps["HEALTHCHECK"].split("CMD", 1)[1])
    return [sys.executable, *command[1:]]


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/-/healthy" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_health_check_detects_healthy_unhealthy_and_absent_servers() -> None:
    def status(url: str) -> int:
        environment = {**os.environ, "GPUJOB_HEALTH_URL": url, "http_proxy": "http://127.0.0.1:1"}
        return subprocess.run(health_command(), env=environment, capture_output=True, timeout=30).returncode

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        assert status(f"{base}/-/healthy") == 0
        assert status(f"{base}/elsewhere") != 0
        server.shutdown()
    assert status(f"{base}/-/healthy") != 0


def test_health_check_uses_the_listen_port() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert "GPUJOB_HEALTH_URL=http://127.0.0.1:9410/-/healthy" in text
    assert '"--web.listen-address", ":9410"' in text
    assert "EXPOSE 9410" in text


def build_context(folder: Path) -> Path:
    """Copy what the build sees of this checkout."""
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*", "everything is left out first"
    for pattern in patterns:
        for source in ROOT.glob(pattern[1:]) if pattern.startswith("!") else ():
            target = folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
    return folder


def test_the_build_steps_install_both_programs(tmp_path: Path) -> None:
    """The build's RUN command, outside a container: context, pinned packages, hashes."""
    context = build_context(tmp_path / "src")
    image, wheels = tmp_path / "image", tmp_path / "wheels"
    base = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    (site,) = base.glob("lib/python*/site-packages")
    shutil.copytree(Path(pip.__file__).parent, site / "pip")
    (base / "bin/pip").write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n', encoding="utf-8")
    (base / "bin/pip").chmod(0o755)
    (command,) = (words for words in arguments("RUN") if "pip wheel" in words)
    command = command.replace("/opt/gpujob", str(image)).replace("/wheels", str(wheels))
    environment = {**os.environ, "PATH": f"{base}/bin:{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}
    done = subprocess.run(["sh", "-ec", command], cwd=context, env=environment, capture_output=True, text=True)
    if done.returncode and any(text in done.stderr for text in NO_INDEX):
        pytest.skip("no package index answers")
    assert done.returncode == 0, done.stderr
    for program in ("gpujob", "gpujob-exporter"):
        assert subprocess.run([image / "bin" / program, "--version"], capture_output=True).returncode == 0
    assert (image / "share/gpujob/alertmanager/rules").is_dir()


def test_the_locked_packages_are_those_of_the_project() -> None:
    locked = dict(re.findall(r"^([\w-]+)==([\w.]+)", (DOCKER / "requirements.txt").read_text(), re.MULTILINE))
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for need in needs:
        name, _, bound = need.replace("_", "-").partition(">=")
        assert Version(locked[name]) >= Version(bound), name


@pytest.fixture(scope="module")
def compose() -> Json:
    loaded: Json = yaml.safe_load((DOCKER / "compose.yml").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def services(compose: Json) -> dict[str, Json]:
    found: dict[str, Json] = compose["services"]
    return found


@pytest.fixture(scope="module")
def with_hub(services: dict[str, Json]) -> dict[str, Json]:
    """The services of both files, merged as Compose does."""
    overlay: Json = yaml.safe_load((DOCKER / "compose.hub.yml").read_text(encoding="utf-8"))["services"]
    mounts = [*services["prometheus"]["volumes"], *overlay["prometheus"]["volumes"]]
    return {**services, "hub": overlay["hub"], "prometheus": {**services["prometheus"], "volumes": mounts}}


def binds(service: Json) -> list[Json]:
    return [volume for volume in service["volumes"] if volume["type"] == "bind"]


def test_services(services: dict[str, Json]) -> None:
    images = {name: service["image"].split(":")[0] for name, service in services.items()}
    assert images == {
        "prometheus": "prom/prometheus",
        "alertmanager": "prom/alertmanager",
        "grafana": "grafana/grafana",
    }


def test_images_are_pinned(services: dict[str, Json]) -> None:
    for service in services.values():
        assert PINNED.match(service["image"]), service["image"]


def test_containers_are_hardened(with_hub: dict[str, Json]) -> None:
    for name, service in with_hub.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["user"].split(":")[0] not in ("0", "root"), name
        assert "privileged" not in service, name
        assert "cap_add" not in service, name
        assert "healthcheck" in service, name


def test_services_listen_only_on_loopback(with_hub: dict[str, Json]) -> None:
    """With the host network, each program must be configured to listen on loopback."""
    services = with_hub
    for name, service in services.items():
        assert service["network_mode"] == "host", name
        assert "ports" not in service, name
    for name in ("prometheus", "alertmanager", "hub"):
        flags = dict(flag.split("=", 1) for flag in services[name]["command"] if "=" in flag)
        assert flags["--web.listen-address"].startswith("127.0.0.1:"), name
    assert "--cluster.listen-address=" in services["alertmanager"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_bind_mounts_are_read_only_and_exist(with_hub: dict[str, Json]) -> None:
    for name, service in with_hub.items():
        for volume in binds(service):
            assert volume["read_only"] is True, (name, volume["source"])
            assert volume["bind"] == {"create_host_path": False}, (name, volume["source"])
            if not volume["source"].startswith("${"):
                assert (DOCKER / volume["source"]).exists(), (name, volume["source"])


def test_data_is_in_named_volumes(compose: Json, services: dict[str, Json]) -> None:
    used = {
        volume["source"] for service in services.values() for volume in service["volumes"] if volume["type"] == "volume"
    }
    assert used == compose["volumes"].keys()


def test_files_named_in_commands_are_mounted(services: dict[str, Json]) -> None:
    for name, service in services.items():
        targets = {volume["target"] for volume in service["volumes"]}
        flags = dict(flag.split("=", 1) for flag in service.get("command", []))
        for flag in ("--config.file", "--storage.tsdb.path", "--storage.path"):
            if flag in flags:
                assert flags[flag] in targets, (name, flag)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("compose.yml", {"GPUJOB_TARGETS_DIR", "GRAFANA_ADMIN_PASSWORD_FILE"}),
        ("compose.hub.yml", {"GPUJOB_CLUSTER", "GPUJOB_SLURMRESTD"}),
    ],
)
def test_variables_of_the_user_must_be_set(file: str, names: set[str]) -> None:
    text = (DOCKER / file).read_text(encoding="utf-8")
    variables = re.findall(r"\$\{(\w+)(.*?)\}", text)
    assert {name for name, _ in variables} == names
    assert all(rest.startswith(":?") for _, rest in variables)
    readme = (DOCKER / "README.md").read_text(encoding="utf-8")
    assert all(name in readme for name, _ in variables)


def test_no_secret_in_the_environment(services: dict[str, Json]) -> None:
    for service in services.values():
        for name in service.get("environment", {}):
            assert not SECRET.search(name) or name.endswith("__FILE"), name


def test_prometheus_configuration(services: dict[str, Json]) -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    sidecars = jobs["gpujob-sidecar"]
    mounted = {volume["target"] for volume in binds(services["prometheus"])}
    for path in [*config["rule_files"], *sidecars["file_sd_configs"][0]["files"]]:
        assert str(Path(path).parent) in mounted, path
    [manager] = config["alerting"]["alertmanagers"]
    flags = dict(flag.split("=", 1) for flag in services["alertmanager"]["command"])
    assert manager["static_configs"] == [{"targets": [flags["--web.listen-address"]]}]


def outside(text: str, service: Json, folder: Path) -> str:
    """A text with the paths of a container replaced by those outside: of the repository, else below ``folder``."""
    for volume in service["volumes"]:
        source = str(volume["source"])
        own = volume["type"] == "bind" and not source.startswith("${")
        here = (DOCKER / source).resolve() if own else folder / source.strip("${").partition(":")[0]
        text = re.sub(rf"(?<![\w/]){re.escape(volume['target'])}(?![\w-])", str(here), text)
    return text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_prometheus_configuration(with_hub: dict[str, Json], tmp_path: Path) -> None:
    text = outside((DOCKER / "prometheus.yml").read_text(encoding="utf-8"), with_hub["prometheus"], tmp_path)
    assert "/etc/prometheus" not in text
    assert " /hub" not in text
    config = tmp_path / "prometheus.yml"
    config.write_text(text, encoding="utf-8")
    (tmp_path / "hub-data").mkdir()
    (tmp_path / "hub-data/token").touch()
    command = ["promtool", "check", "config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
    assert " 0 rule files" not in done.stdout


def test_provisioned_grafana_files_are_mounted(services: dict[str, Json]) -> None:
    folder = ROOT / "grafana/provisioning"
    mounted = {volume["target"]: DOCKER / volume["source"] for volume in binds(services["grafana"])}
    assert mounted["/etc/grafana/provisioning"].resolve() == folder

    [provider] = yaml.safe_load((folder / "dashboards/gpujob.yml").read_text(encoding="utf-8"))["providers"]
    assert mounted[provider["options"]["path"]].resolve() == ROOT / "grafana/dashboards"
    assert provider["allowUiUpdates"] is False

    [source] = yaml.safe_load((folder / "datasources/gpujob.yml").read_text(encoding="utf-8"))["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "${PROMETHEUS_URL}"
    assert source["editable"] is False

    environment = services["grafana"]["environment"]
    flags = dict(flag.split("=", 1) for flag in services["prometheus"]["command"])
    assert environment["PROMETHEUS_URL"] == f"http://{flags['--web.listen-address']}"
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).exists()


KEYS_OF_SERVICES = {  # those of the Compose specification that we use; others are likely to be mistakes
    *("build", "cap_drop", "command", "environment", "healthcheck", "image", "network_mode", "read_only", "restart"),
    *("secrets", "security_opt", "tmpfs", "user", "volumes"),
}


@pytest.mark.parametrize("file", ["compose.yml", "compose.hub.yml"])
def test_a_compose_file_has_only_known_keys(file: str) -> None:
    body = yaml.safe_load((DOCKER / file).read_text(encoding="utf-8"))
    assert body.keys() <= {"name", "services", "volumes", "secrets", "x-hardened"}
    for name, service in body["services"].items():
        assert service.keys() <= KEYS_OF_SERVICES, name
        assert service.get("healthcheck", {}).keys() <= {"test", "interval", "timeout", "retries"}, name
        assert all(isinstance(word, str) for word in service.get("command", [])), name
        for volume in service.get("volumes", []):
            known = {"type", "source", "target", "read_only"} | ({"bind"} if volume["type"] == "bind" else set())
            assert volume.keys() <= known, (name, volume)
            assert volume["type"] == "bind" or volume["source"] in body["volumes"], (name, volume)


DEBIAN = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager", "hub": "gpujob-exporter"}


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("prometheus-alertmanager") is None, reason="Alertmanager is not installed")
def test_the_services_start_and_become_healthy(with_hub: dict[str, Json], tmp_path: Path) -> None:
    """The command lines and health checks of Compose, outside a container and on free ports. Grafana is left out."""
    ports = {number: str(free_port()) for number in ("9090", "9093", "9420")}

    def here(text: str, service: Json) -> str:
        text = re.sub(r"\$\{GPUJOB_CLUSTER:.*?\}", "hal", outside(text, service, tmp_path))
        return re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda port: ports[port[0]], text)

    config = here((DOCKER / "prometheus.yml").read_text(encoding="utf-8"), with_hub["prometheus"])
    (tmp_path / "hub-target").mkdir()
    (tmp_path / "hub-target/hub.json").write_text(here((DOCKER / "hub-target/hub.json").read_text(), with_hub["hub"]))
    (tmp_path / "prometheus.yml").write_text(config.replace(str(DOCKER / "hub-target"), str(tmp_path / "hub-target")))
    running = []
    try:
        for name, program in DEBIAN.items():
            service = with_hub[name]
            words = [
                here(word, service).replace(str(DOCKER / "prometheus.yml"), f"{tmp_path}/prometheus.yml")
                for word in service["command"]
            ]
            found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            assert found is not None
            environment = {**os.environ, "GPUJOB_SLURMRESTD": "http://127.0.0.1:9", "XDG_RUNTIME_DIR": ""}
            log = (tmp_path / f"{name}.log").open("wb")
            running.append(subprocess.Popen([found, *words], env=environment, stdout=log, stderr=log))
        for name in DEBIAN:
            service = with_hub[name]
            test = service["healthcheck"].get("test", ["CMD", *health_command()])
            command = [here(word, service) for word in test[1:]]
            health = here(service.get("environment", {}).get("GPUJOB_HEALTH_URL", ""), service)

            def is_healthy(command: list[str] = command, health: str = health) -> bool:
                variables = {**os.environ, "GPUJOB_HEALTH_URL": health}
                return subprocess.run(command, env=variables, capture_output=True, timeout=30).returncode == 0

            wait_for(is_healthy, 60, f"the health of {name}", logs=tmp_path)
        base = f"http://127.0.0.1:{ports['9090']}/api/v1"
        wait_for(lambda: jobs_up(base) >= {"prometheus", "alertmanager"}, 60, "scrapes", logs=tmp_path)
        rules = json.loads(urllib.request.urlopen(f"{base}/rules", timeout=10).read())["data"]["groups"]
        assert rules
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)


def jobs_up(base: str) -> set[str]:
    """Jobs of Prometheus with a target that answers. All jobs must have been found."""
    targets = json.loads(urllib.request.urlopen(f"{base}/targets", timeout=10).read())["data"]["activeTargets"]
    if "gpujob-hub" not in {target["labels"]["job"] for target in targets}:
        return set()
    return {target["labels"]["job"] for target in targets if target["health"] == "up"}


def compose_client() -> list[str] | None:
    """The command of an installed Docker Compose 2. It checks files without an engine."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and re.match(r"v?([2-9]|\d\d)\.", done.stdout.strip()):
            return command
    return None


def test_compose_accepts_the_file(tmp_path: Path) -> None:
    client = compose_client()
    if client is None:
        pytest.skip("Docker Compose 2 is not installed")
    password = tmp_path / "password"
    password.write_text("x", encoding="utf-8")
    environment = {
        **os.environ,
        "GPUJOB_TARGETS_DIR": str(tmp_path),
        "GRAFANA_ADMIN_PASSWORD_FILE": str(password),
    }
    command = [*client, "-f", str(DOCKER / "compose.yml"), "config", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    del environment["GPUJOB_TARGETS_DIR"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "GPUJOB_TARGETS_DIR" in done.stderr
