"""Steps of a local job."""

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.contract.process_identity import read_start_ticks
from exporter.machine.procfs import is_zombie, read_children
from launcher.plan.plan import RunFacts
from launcher.steps import local_steps
from launcher.steps.local_steps import LocalJob, LocalSteps, local_hosts, wait_for_guard
from launcher.steps.steps import RunningTask
from tests.support.launcher import job_spec, plan_of, poll


@pytest.mark.parametrize(
    ("resources", "expected"),
    [({"nodes": 2, "gpus_per_node": 4}, ["0", "4"]), ({"nodes": 2}, ["0", "0"]), ({"gpus_per_node": 4}, ["0"])],
)
def test_each_sidecar_has_the_first_gpu_of_its_node(
    resources: dict[str, int], expected: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$GPUJOB_FIRST_GPU"\n')
    python.chmod(0o755)
    plan = replace(plan_of(job_spec(resources=resources), local=True), python=str(python))
    hosts = local_hosts(plan, "here")
    for sidecar in LocalSteps(plan, RunFacts("local-1", tmp_path, hosts)).start_sidecars():
        assert sidecar.wait(60) == 0
    assert [(tmp_path / f"{host}_sidecar.log").read_text().strip() for host in hosts] == expected


def test_an_interpreter_without_memfd_create_can_run_jobs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    job = LocalJob(tmp_path)
    assert job.process.wait(60) != 0
    assert "plan.json cannot be read" in (tmp_path / "log.err").read_text()
    assert job.read_report() is None


def test_an_unreaped_orchestrator_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_steps, "ORPHAN_S", 30.0)
    with subprocess.Popen(["sleep", "60"]) as orchestrator, subprocess.Popen(["sleep", "60"]) as guard:
        record = {"pid": orchestrator.pid, "start_ticks": read_start_ticks(orchestrator.pid)}
        (tmp_path / "orchestrator.json").write_text(json.dumps(record))
        orchestrator.kill()
        guard.kill()
        while not is_zombie(orchestrator.pid):
            time.sleep(0.01)
        started_at = time.monotonic()
        assert wait_for_guard(guard, tmp_path) == -9
        assert time.monotonic() - started_at < 15


def test_a_sidecar_does_not_outlive_its_killed_supervisor(tmp_path: Path) -> None:
    steps = LocalSteps(plan_of(job_spec(), local=True), RunFacts("local-1", tmp_path, ("here",)))
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as supervisor:
        (sidecar,) = poll(lambda: read_children(supervisor.pid), "the sidecar")
        supervisor.kill()
    assert not steps.sidecars_have_no_leftovers([supervisor])
    poll(lambda: steps.sidecars_have_no_leftovers([supervisor]), "the end of the sidecar")
    assert read_start_ticks(sidecar) is None


def test_a_process_of_another_user_is_reported_once_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(job_spec(), local=True)
    steps = LocalSteps(plan, RunFacts("local-1", tmp_path, ("here",)))

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as wrapper:
        children = poll(lambda: read_children(wrapper.pid), "the worker")
        running = RunningTask(plan.tasks[0], 0, wrapper)
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", refuse)
            patched.setattr(os, "killpg", refuse)
            for _ in range(2):
                steps.kill([running])
            assert f"process {children[0]} runs on: it belongs to another user" in (text := capfd.readouterr().err)
            assert text.count("\n") == 1
            wrapper.pid, leader = children[0], wrapper.pid  # its group, and the only child of this process
            assert steps.kill_leftovers(running) == 0
            assert f"process {leader} runs on" in capfd.readouterr().err
        os.killpg(leader, 9)
        os.waitpid(leader, 0)
