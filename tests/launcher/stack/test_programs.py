"""Programs of the stack: where they are found, what is said where they are not, and which processes are ended."""

import os
import subprocess
from pathlib import Path

import pytest

from exporter.contract.process_identity import read_start_ticks
from launcher.errors import LauncherError
from launcher.registry.own_stack import StackProgram, StackRecord
from launcher.rundir.yaml_files import load_yaml
from launcher.stack.files import Settings, prometheus_arguments, prometheus_config
from launcher.stack.processes import end_programs
from launcher.stack.programs import Places, find_grafana, find_program
from tests.launcher.stack import grafana
from tests.realstack.cluster import HERE

SHIPPED = load_yaml((HERE.parents[1] / "docker/prometheus.yml").read_text(), "prometheus.yml")
NOWHERE = Places(None, {}, [])
RECORD = StackRecord(
    token="secret",
    password="p",
    password_hash="h",
    ports={"gate": 1, "prometheus": 2, "alertmanager": 3, "receiver": 4},
)


def program(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_a_folder_an_image_and_path_are_searched(tmp_path: Path) -> None:
    program(tmp_path, "prometheus-alertmanager", "alertmanager, version 0.25.0 (branch: debian/sid)")
    found = find_program("alertmanager", Places(str(tmp_path), {}, []), {"PATH": "/usr/bin:/bin"})
    assert (found.version, found.command) == ((0, 25, 0), (str(tmp_path / "prometheus-alertmanager"),))
    program(tmp_path, "apptainer", "prometheus, version 3.5.3 (branch: HEAD)")
    (tmp_path / "p.sif").touch()
    places = Places(None, {"prometheus": str(tmp_path / "p.sif")}, [tmp_path])
    found = find_program("prometheus", places, {"PATH": f"{tmp_path}:/bin"})
    bound = ("exec", "--bind", str(tmp_path), str(tmp_path / "p.sif"), "/bin/prometheus")
    assert (found.version, found.command[1:]) == ((3, 5, 3), bound)


def test_what_is_missing_is_said_with_ways_that_need_no_rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(LauncherError) as caught:
        find_program("prometheus", NOWHERE, {"PATH": str(tmp_path)})
    text = str(caught.value)
    assert "prometheus-VERSION.linux-arm64.tar.gz" in text
    assert "apptainer pull prometheus.sif docker://prom/prometheus" in text
    assert "module avail prometheus" in text


@pytest.mark.parametrize(
    ("says", "problem"), [("prometheus, version 2.41.0", "2.42 or newer"), ("hello version 9.9", "is not prometheus")]
)
def test_other_programs_and_old_ones_are_refused(tmp_path: Path, says: str, problem: str) -> None:
    program(tmp_path, "prometheus", says)
    with pytest.raises(LauncherError, match=problem):
        find_program("prometheus", Places(str(tmp_path), {}, []), {"PATH": "/bin"})


def test_grafana_is_the_program_of_a_home(tmp_path: Path) -> None:
    home = tmp_path / "grafana-v11"
    grafana.install(home)
    wrapper = program(tmp_path, "grafana", "a script with settings of its own")
    (tmp_path / "on-path").mkdir()
    (tmp_path / "on-path" / "grafana").symlink_to(home / "bin" / "grafana")
    by_folder = [Places(str(each), {}, []) for each in (home, home / "bin")]
    on_path = (NOWHERE, {"PATH": f"{tmp_path / 'on-path'}:/bin"})
    for places, environ in [*((each, {"PATH": "/bin"}) for each in by_folder), on_path]:
        found = find_grafana(places, environ)
        assert found is not None
        assert (found[0].version, found[0].where, found[1]) == ((11, 2, 0), f"{home}/bin/grafana", str(home))
    assert find_grafana(NOWHERE, {"PATH": f"{wrapper.parent}:/bin"}) is None


def test_an_old_grafana_is_refused(tmp_path: Path) -> None:
    grafana.install(tmp_path / "home", "9.5.1")
    with pytest.raises(LauncherError, match=r"10\.0 or newer"):
        find_grafana(Places(str(tmp_path / "home"), {}, []), {"PATH": "/bin"})


def test_only_the_very_process_is_ended() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        ticks = read_start_ticks(process.pid)
        assert ticks is not None
        own = StackProgram(pid=process.pid, start_ticks=ticks, host=os.uname().nodename)
        end_programs([own.replace(start_ticks=ticks - 1), own.replace(host="elsewhere")])
        assert process.poll() is None
        end_programs([own])
        assert process.poll() is not None


def settings(*, agent: bool = False, hub: str | None = None, version: tuple[int, ...] = (2, 42, 0)) -> Settings:
    remote = [{"url": "http://r"}] if agent else []
    return Settings(agent, remote, "30d", ["/t/*.json"], hub, version)


def test_a_hub_names_the_targets_in_place_of_files() -> None:
    assert isinstance(SHIPPED, dict)
    jobs = {job["job_name"]: job for job in prometheus_config(SHIPPED, "/s", RECORD, settings())["scrape_configs"]}  # type: ignore[attr-defined]
    assert jobs["gpujob-sidecar"]["file_sd_configs"][0]["files"] == ["/t/*.json"]
    config = prometheus_config(SHIPPED, "/s", RECORD, settings(hub="/run/hub.sock"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}  # type: ignore[attr-defined]
    assert jobs["gpujob-sidecar"]["http_sd_configs"][0]["url"] == "http://127.0.0.1:1/secret/hub/targets?kind=sidecar"
    assert "file_sd_configs" not in jobs["gpujob-sidecar"]
    assert jobs["gpujob-hub"]["metrics_path"] == "/secret/hub/metrics"


@pytest.mark.parametrize(("version", "flag"), [((2, 42, 0), "--enable-feature=agent"), ((3, 5, 3), "--agent")])
def test_an_agent_neither_stores_nor_alerts(version: tuple[int, ...], flag: str) -> None:
    assert isinstance(SHIPPED, dict)
    chosen = settings(agent=True, version=version)
    lines = prometheus_arguments("/s", RECORD, chosen).splitlines()
    assert flag in lines
    assert not [line for line in lines if line.startswith("--storage.tsdb")]
    config = prometheus_config(SHIPPED, "/s", RECORD, chosen)
    assert not {"rule_files", "alerting"} & config.keys()
    assert config["remote_write"] == [{"url": "http://r"}]
