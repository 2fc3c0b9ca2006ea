"""Target files for Prometheus."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from exporter.contract.manifest import Task
from exporter.contract.target_files import TargetGroup
from exporter.machine.procfs import is_zombie
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.run import sidecars
from launcher.run.sidecars import Sidecars
from launcher.rundir.targets import (
    SidecarRecord,
    TargetFiles,
    engine_target_groups,
    read_sidecars,
    sidecar_target_groups,
)
from launcher.steps.steps import Steps
from tests.support.launcher import HARD_NAMES, plan_of, poll

GROUPS = [TargetGroup(("cn01:9410",), {"job_id": "4459"})]
WRITTEN = [{"targets": ["cn01:9410"], "labels": {"job_id": "4459"}}]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "4459_job_20251122_041341"
    (path / "sidecars").mkdir(parents=True)
    return path


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
    record = SidecarRecord(attempt=0, address="cn01:9410", labels={"job_id": "4459", "node": "cn01"})
    labels = {"job_id": "4459", "node": "cn01", "job": "gpujob-sidecar"}
    assert sidecar_target_groups([record], "") == [TargetGroup(("cn01:9410",), labels)]
    assert sidecar_target_groups([record], "oncall")[0].labels == {**labels, "notify": "oncall"}


def test_target_files_are_published_and_removed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    targets = TargetFiles(run_dir, str(tmp_path / "site"))
    files = [run_dir / "targets.json", tmp_path / "site/gpujob-4459_job_20251122_041341.json"]
    assert targets.publish([]) is False
    assert targets.publish(GROUPS) is True
    assert [json.loads(path.read_text()) for path in files] == [WRITTEN, WRITTEN]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}
    assert targets.publish(GROUPS) is False
    assert targets.publish(GROUPS * 2) is True
    assert json.loads(files[1].read_text()) == WRITTEN * 2
    targets.remove()
    targets.remove()
    assert not [path for path in files if path.exists()]
    assert targets.problems == []


def test_a_missing_target_directory_is_reported_and_the_other_file_written(run_dir: Path, tmp_path: Path) -> None:
    targets = TargetFiles(run_dir, str(tmp_path / "none"))
    targets.publish(GROUPS)
    (problem,) = targets.problems
    assert problem.startswith(f"cannot write targets to {tmp_path}/none/gpujob-")
    assert problem.endswith(": No such file or directory")
    assert json.loads((run_dir / "targets.json").read_text()) == WRITTEN


def test_a_failed_write_of_a_target_file_is_repeated_and_logged_once(run_dir: Path, tmp_path: Path) -> None:
    targets, site = TargetFiles(run_dir, str(tmp_path / "site")), tmp_path / "site"
    assert [targets.publish(GROUPS) for _ in range(3)] == [True, False, False]
    assert len(targets.problems) == 1
    site.mkdir()
    assert [targets.publish(GROUPS) for _ in range(2)] == [True, False]
    assert json.loads((site / f"gpujob-{run_dir.name}.json").read_text()) == WRITTEN
    shutil.rmtree(site)
    assert targets.publish(GROUPS * 2) is True
    assert len(targets.problems) == 2


def test_a_link_in_the_target_directory_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    site, name = tmp_path / "site", f"gpujob-{run_dir.name}.json"
    site.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    for planted in (name, f".{name}.{os.getpid()}.tmp"):
        (site / planted).symlink_to(victim)
    before = os.umask(0o077)
    try:
        TargetFiles(run_dir, str(site)).publish(GROUPS)
    finally:
        os.umask(before)
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("precious", 0o600)
    assert json.loads((site / name).read_text()) == WRITTEN
    assert stat.S_IMODE((site / name).lstat().st_mode) == 0o644


def test_hard_names_become_a_plain_file_name(tmp_path: Path) -> None:
    run_dir = tmp_path / f"4459_{''.join(HARD_NAMES)}"
    run_dir.mkdir()
    (tmp_path / "site").mkdir()
    TargetFiles(run_dir, str(tmp_path / "site")).publish(GROUPS)
    (path,) = (tmp_path / "site").iterdir()
    assert path.name.startswith("gpujob-4459_")
    assert path.suffix == ".json"
    assert not set(path.name) & set("\n \"'$`*?[]{}()<>|&;\\#%")


# -- engines -------------------------------------------------------------------------------------

LABELS = {"cluster": "c1", "job_id": "4459", "job_name": "serve", "node": "cn01", "job": "gpujob-sidecar"}


def serving_plan() -> Plan:
    """A decode worker on two nodes with metrics on the first, a prefill worker, and a benchmark without metrics."""
    tasks = [
        TaskPlan(Task("decode_w0", "decode", 0, 0, 0, 0), (), {}, ports={"http": 6100}, metrics="http_port/metrics"),
        TaskPlan(Task("decode_w0", "decode", 0, 1, 1, 1), (), {}, metrics="http_port/metrics"),
        TaskPlan(Task("prefill_w0", "prefill", 0, 2, 0, 1), (), {}, ports={"system": 7500}, metrics="system_port/a/b"),
        TaskPlan(Task("benchmark", "benchmark", 0, 3, 0, 0), (), {}, ports={"http": 6200}),
    ]
    return dataclasses.replace(plan_of(), nodes=2, tasks=tuple(tasks))


def engine(address: str, path: str, **labels: str) -> TargetGroup:
    job = {"cluster": "c1", "job_id": "4459", "job_name": "serve", "job": "gpujob-engine", "__metrics_path__": path}
    return TargetGroup((address,), job | labels)


DECODE = {"node": "cn01", "worker": "decode_w0", "role": "decode", "rank": "0"}
PREFILL = {"node": "cn02", "worker": "prefill_w0", "role": "prefill", "rank": "2"}


def test_started_engines_are_targets_at_their_metrics_port() -> None:
    facts = RunFacts("4459", Path("/runs/1"), ("cn01", "cn02"), addresses=("10.0.0.1", "fd00::2"), port_offset=17)
    assert engine_target_groups(serving_plan(), facts, LABELS, range(4)) == [
        engine("10.0.0.1:6117", "/metrics", **DECODE),
        engine("[fd00::2]:7517", "/a/b", **PREFILL),
    ]
    assert engine_target_groups(serving_plan(), facts, LABELS, {1, 2}) == [engine("[fd00::2]:7517", "/a/b", **PREFILL)]


class OneSidecar:
    """Steps that only start and end a sidecar."""

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        return [subprocess.Popen(["sleep", "60"])]

    def end_sidecars(self, running: list[subprocess.Popen[bytes]]) -> None:
        for process in running:
            process.kill()
            process.wait()


def test_engines_become_targets_when_they_have_started(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "TARGETS_INTERVAL_S", 0.0)
    (run_dir / run_files.WORKERS_DIR).mkdir()
    facts = RunFacts("4459", run_dir, ("cn01", "cn02"), attempt=1)
    for node in facts.hosts:
        labels = {name: value for name, value in LABELS.items() if name != "job"} | {"node": node}
        record = {"attempt": 1, "address": f"{node}:9410", "labels": labels}
        run_files.write_json(run_dir / "sidecars" / f"{node}.json", record)

    def addresses() -> list[str]:
        return [group["targets"][0] for group in json.loads((run_dir / "targets.json").read_text())]

    started = Sidecars(serving_plan(), facts, cast(Steps, OneSidecar()), lambda _: None, lambda: False)
    started.start()
    assert addresses() == ["cn01:9410", "cn02:9410"]
    for worker, rank, attempt in (("decode_w0", 0, 0), ("prefill_w0", 2, 1)):
        stem = run_files.record_name(worker, rank, attempt, 0)
        run_files.write_json(run_dir / run_files.WORKERS_DIR / f"{stem}.start.json", {})
    started.maintain(may_restart=False)
    assert addresses() == ["cn01:9410", "cn02:9410", "cn02:7500"]  # decode_w0 ran in an earlier attempt
    started.end(hurry=True)
    assert not (run_dir / "targets.json").exists()


@pytest.mark.parametrize("is_complete", [True, False])
def test_targets_are_logged_once_all_sidecars_listen_or_none_is_awaited(
    is_complete: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock, waits = [1000.0], list[float]()
    monkeypatch.setattr("launcher.run.sidecars.time.monotonic", lambda: clock[0])
    nodes = [f"cn{number:02}" for number in range(1, 65)]
    due = iter(nodes if is_complete else nodes[:-1])

    def sleep(seconds: float) -> None:
        """Two more sidecars listen, if they are left."""
        waits.append(seconds)
        clock[0] += seconds
        for node in itertools.islice(due, 2):
            record = {"attempt": 1, "address": f"{node}:9410", "labels": {"job_id": "4459"}}
            run_files.write_json(run_dir / "sidecars" / f"{node}.json", record)

    steps = Mock(spec=Steps)
    steps.start_sidecars.return_value = [Mock(returncode=None, poll=Mock(return_value=None))]
    facts = RunFacts("4459", run_dir, tuple(nodes), attempt=1)
    started = Sidecars(plan_of(), facts, steps, sleep, lambda: False)
    started.start()
    started.maintain(may_restart=False)
    clock[0] += sidecars.TARGETS_INTERVAL_S
    started.maintain(may_restart=False)
    (line,) = re.findall("Prometheus targets: (.*)", capfd.readouterr().out)
    assert len(line.split(", ")) == len(json.loads((run_dir / "targets.json").read_text())) == 63 + is_complete
    assert set(waits) == {0.5}, "each poll reads as many files as there are nodes"


def test_sidecars_are_restarted_when_the_old_ones_have_ended(run_dir: Path) -> None:
    steps = Mock(spec=Steps)
    steps.start_sidecars.return_value = [Mock(returncode=-9, poll=Mock(return_value=-9))]
    facts = RunFacts("4459", run_dir, ("cn01", "cn02"), attempt=1)
    sidecars_of_job = Sidecars(serving_plan(), facts, steps, lambda _: None, lambda: False)
    sidecars_of_job.start()
    steps.sidecars_have_no_leftovers.return_value = False
    sidecars_of_job.maintain(may_restart=True)
    assert steps.start_sidecars.call_count == 1
    steps.sidecars_have_no_leftovers.return_value = True
    sidecars_of_job.maintain(may_restart=True)
    assert steps.start_sidecars.call_count == 2


def test_a_sidecar_that_ignores_sigterm_is_killed_with_its_supervisor(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "END_S", 0.2)
    ignores_sigterm = "trap '' TERM; sh -c 'while :; do sleep 600; done' & echo $!; wait; wait"
    steps = Mock(spec=Steps)
    with subprocess.Popen(["sh", "-c", ignores_sigterm], stdout=subprocess.PIPE, start_new_session=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        steps.start_sidecars.return_value = [supervisor]
        sidecars_of_job = Sidecars(
            serving_plan(), RunFacts("4459", run_dir, ("cn01",)), steps, time.sleep, lambda: True
        )
        sidecars_of_job.start()
        sidecars_of_job.end(hurry=True)
        assert supervisor.poll() == -signal.SIGKILL
    steps.end_sidecars.assert_called_once_with([supervisor])
    poll(lambda: is_zombie(child) or not Path(f"/proc/{child}").exists(), "the end of the sidecar")
