"""The targets of all users in one file for Prometheus."""

import json
import os
import pwd
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import target_files
from exporter.contract.target_files import TargetGroup
from launcher.cli.targets import targets
from launcher.rundir.site_targets import read_site_targets
from launcher.rundir.targets import TargetFiles

ME = pwd.getpwuid(os.geteuid()).pw_name
LABELS = {"job_id": "4711", "user": "ana", "job": "gpujob-sidecar"}
GROUPS = [TargetGroup(("cn01:40001",), LABELS), TargetGroup(("[fe80::1]:6100",), LABELS | {"job": "gpujob-engine"})]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A target directory with the file of one job."""
    path = tmp_path / "site"
    path.mkdir()
    (tmp_path / "10_job").mkdir()
    TargetFiles(tmp_path / "10_job", str(path)).publish(GROUPS)
    return path


def test_the_owner_of_the_file_is_the_user(site: Path) -> None:
    mine = [TargetGroup(group.targets, {**group.labels, "user": ME}) for group in GROUPS]
    assert read_site_targets(site) == (mine, [])
    if os.geteuid() == 0:
        os.chown(next(site.iterdir()), 65534, -1)
        groups, _ = read_site_targets(site)
        assert {group.labels["user"] for group in groups} == {pwd.getpwuid(65534).pw_name}


def test_labels_that_are_orders_to_prometheus_are_dropped(site: Path) -> None:
    hostile = {"__address__": "x:1", "__param_q": "x", "__metrics_path__": "/", "a b": "x", "node": "cn01"}
    (site / "x.json").write_text(json.dumps([{"targets": ["cn02:40001"], "labels": LABELS | hostile}]))
    groups, problems = read_site_targets(site)
    assert groups[-1] == TargetGroup(("cn02:40001",), LABELS | {"user": ME, "node": "cn01"})
    assert problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("{}", "expected a list"),
        ('[{"targets": "cn01:1", "labels": {}}]', "targets[0].targets: expected a list"),
        ('[{"targets": [], "labels": {"job": 1}}]', "targets[0].labels.job: expected a text"),
        ('[{"targets": [], "labels": {"job": "node"}}]', "label job: expected gpujob-sidecar or gpujob-engine"),
        ('[{"targets": ["http://x/y"], "labels": {"job": "gpujob-engine"}}]', "'http://x/y' is not host:port"),
        (json.dumps([{"targets": [], "labels": LABELS | {"x": "y" * 300}}]), "a label is longer than 256 characters"),
        (json.dumps([{"targets": [], "labels": LABELS | {"x": "\ud800"}}]), "surrogates not allowed"),
        (json.dumps([{"targets": ["a:1"] * 10_001, "labels": LABELS}]), f"{ME} has more than 10000 targets"),
        ("[" + " " * target_files.MOST_BYTES + "]", "larger than"),
    ],
)
def test_a_file_that_is_no_target_file_is_left_out_and_named(site: Path, text: str, problem: str) -> None:
    (site / "z.json").write_text(text)
    groups, problems = read_site_targets(site)
    assert len(groups) == len(GROUPS)
    (found,) = problems
    assert found.startswith(f"{site / 'z.json'}: ")
    assert problem in found


def test_links_pipes_and_folders_are_not_read(site: Path) -> None:
    (site / "link.json").symlink_to("/dev/zero")
    os.mkfifo(site / "pipe.json")
    (site / "folder.json").mkdir()
    groups, problems = read_site_targets(site)
    assert (len(groups), len(problems)) == (len(GROUPS), 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_any_json_is_targets_of_its_owner_or_refused(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    folder = tmp_path_factory.mktemp("site")
    (folder / "a.json").write_text(json.dumps([{"targets": ["cn01:1"], "labels": value}, value]))
    groups, problems = read_site_targets(folder)
    assert bool(problems) != bool(groups)
    assert all(group.labels["user"] == ME for group in groups)


def test_the_command_writes_a_file_that_prometheus_can_read(site: Path, tmp_path: Path) -> None:
    (site / "x.json").write_text("no")
    done = CliRunner().invoke(targets, [str(site), "--output", str(tmp_path / "out.json")])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith(f"gpujob: {site}/x.json: Expecting value")
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o644
    written = json.loads((tmp_path / "out.json").read_text())
    assert [group["targets"] for group in written] == [["cn01:40001"], ["[fe80::1]:6100"]]
