"""Target files for Prometheus."""

import json
from pathlib import Path

import pytest

from launcher.discovery import Targets, read_sidecars, target_groups
from tests.launcher.support import HARD_NAMES

GROUPS = [{"targets": ["cn01:9410"], "labels": {"job_id": "4459"}}]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "4459_job_20251122_041341"
    (made / "sidecars").mkdir(parents=True)
    return made


def test_sidecars_of_this_attempt_are_found(run_dir: Path) -> None:
    for name, text in {
        "cn01.json": '{"attempt": 1, "address": "cn01:9410", "labels": {}}',
        "cn02.json": '{"attempt": 0, "address": "cn02:9410", "labels": {}}',
        "cn03.json": '{"attempt": 1, "address": null}',
        "cn04.json": '{"attempt": 1, "addr',
        ".cn05.json.77.tmp": '{"attempt": 1, "address": "cn05:9410"}',
        ".cn06.json": '{"attempt": 1, "address": "cn06:9410"}',
    }.items():
        (run_dir / "sidecars" / name).write_text(text)
    assert list(read_sidecars(run_dir, 1)) == ["cn01"]
    assert read_sidecars(run_dir / "none", 1) == {}


def test_a_target_has_the_labels_of_its_series() -> None:
    record = {"address": "cn01:9410", "labels": {"job_id": "4459", "node": "cn01"}}
    assert target_groups([record]) == [
        {"targets": ["cn01:9410"], "labels": {"job_id": "4459", "node": "cn01", "job": "gpujob-sidecar"}}
    ]


def test_targets_are_published_where_prometheus_looks_and_taken_away(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    targets = Targets(run_dir, str(tmp_path / "site"))
    files = [run_dir / "targets.json", tmp_path / "site/gpujob-4459_job_20251122_041341.json"]
    assert targets.publish([]) is False
    assert targets.publish(GROUPS) is True
    assert [json.loads(path.read_text()) for path in files] == [GROUPS, GROUPS]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}
    assert targets.publish(GROUPS) is False
    assert targets.publish(GROUPS * 2) is True
    assert json.loads(files[1].read_text()) == GROUPS * 2
    targets.remove()
    targets.remove()
    assert not [path for path in files if path.exists()]
    assert targets.problems == []


def test_a_directory_that_is_not_there_is_told_and_the_rest_is_written(run_dir: Path, tmp_path: Path) -> None:
    targets = Targets(run_dir, str(tmp_path / "none"))
    targets.publish(GROUPS)
    (problem,) = targets.problems
    assert problem.startswith(f"cannot write targets to {tmp_path}/none/gpujob-")
    assert problem.endswith(": No such file or directory")
    assert json.loads((run_dir / "targets.json").read_text()) == GROUPS


def test_hostile_names_make_a_plain_file_name(tmp_path: Path) -> None:
    run_dir = tmp_path / f"4459_{''.join(HARD_NAMES)}"
    run_dir.mkdir()
    (tmp_path / "site").mkdir()
    Targets(run_dir, str(tmp_path / "site")).publish(GROUPS)
    (path,) = (tmp_path / "site").iterdir()
    assert path.name.startswith("gpujob-4459_")
    assert path.suffix == ".json"
    assert not set(path.name) & set("\n \"'$`*?[]{}()<>|&;\\#%")
