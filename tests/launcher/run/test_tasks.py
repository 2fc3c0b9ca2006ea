"""Start, restart and end of tasks, alone and as task groups of one step."""

import dataclasses
import errno
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import run_files
from exporter.contract.manifest import Task, read_manifest
from exporter.contract.status import WorkerEnd
from exporter.workers.exit_reason import PEER_WINDOW_S, JobStop
from launcher.errors import SlurmError
from launcher.plan.plan import Plan, RunFacts, SlurmOptions
from launcher.report.exit_reasons import ExitReasonFinder, TaskFailures, task_failures
from launcher.report.report import build_report
from launcher.run.job_state import OWN_TEARDOWN_S, JobRun, JobState
from launcher.run.run_records import RunRecords, have_all_runs_ended
from launcher.run.signals import OrchestratorSignals
from launcher.run.slurm_end import ANNOUNCED_GRACE_S, NOTICE_GRACE_S, QUERY_AFTER_S, QUERY_INTERVAL_S, SIGNAL_LATE_S
from launcher.run.tasks import LOST_STEP_S, JobTasks, is_awaited, task_groups
from launcher.steps import slurm_steps
from launcher.steps.slurm_steps import SlurmSteps
from launcher.steps.steps import (
    ExternalEnd,
    RunningTask,
    Steps,
    run_environment,
    shared_variables,
    step_entries,
    wrapper_argv,
)
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import clean_environment, job_spec, plan_of, read_json, settled_run_dir


def mpi_plan(command: list[str], processes: int = 2, gpus: int = 2) -> Plan:
    """One worker on two nodes, its processes in one step."""
    plan = plan_of(
        job_spec(
            resources={"nodes": 2, "gpus_per_node": gpus},
            workers=[{"role": "solver", "count": 1, "gpus": 2 * gpus, "command": command}],
        )
    )
    tasks = tuple(dataclasses.replace(planned, step="solver_w0", narrowed=False) for planned in plan.tasks[:processes])
    return dataclasses.replace(plan, tasks=tasks)


def plan_of_four_ranks(**over: Any) -> Plan:
    """One worker on two nodes with two processes on each."""
    plan = mpi_plan(["solve"])
    first = dataclasses.replace(plan.tasks[0], **over)
    places = [dataclasses.replace(first.task, rank=rank, node_index=rank // 2) for rank in range(4)]
    return dataclasses.replace(plan, tasks=tuple(dataclasses.replace(first, task=task) for task in places))


def test_a_worker_is_a_task_group_and_so_is_a_step() -> None:
    plan = plan_of(
        job_spec(
            resources={"nodes": 3, "gpus_per_node": 1},
            workers=[{"role": "a", "gpus": 2, "command": "x"}, {"role": "b", "count": 2, "command": "x"}],
        )
    )
    ranks = [[planned.task.rank for planned in group.tasks] for group in task_groups(plan.tasks)]
    assert ranks == [[0, 1], [2], [3]]
    together = [dataclasses.replace(planned, step="all") for planned in plan.tasks]
    assert [len(group.tasks) for group in task_groups(together)] == [4]


@pytest.mark.parametrize(("over", "awaited"), [({}, True), ({"critical": False}, False), ({"service": True}, False)])
def test_the_job_waits_for_critical_tasks_that_are_not_services(over: dict[str, Any], awaited: bool) -> None:
    assert is_awaited(dataclasses.replace(plan_of().tasks[0], **over)) is awaited


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=4))
def test_shared_and_own_variables_make_up_each_environment(
    environments: list[dict[str, str]],
) -> None:
    common = shared_variables(environments)
    for environment in environments:
        own = {name: value for name, value in environment.items() if name not in common}
        assert {**common, **own} == environment


def facts_in(folder: Path, **over: Any) -> RunFacts:
    return RunFacts("4459", folder, ("cn00", "cn01"), **over)


def test_each_task_of_a_step_has_its_rank_and_command(tmp_path: Path) -> None:
    plan = mpi_plan(["solve", "--rank", "{rank}"])
    entries: list[dict[str, Any]] = step_entries(plan, plan.tasks, facts_in(tmp_path), 0)
    assert [(entry["worker"], entry["rank"], entry["argv"][-1]) for entry in entries] == [
        ("solver_w0", 0, "0"),
        ("solver_w0", 1, "1"),
    ]
    assert [entry["env"]["RANK"] for entry in entries] == ["0", "1"]
    assert all("WORLD_SIZE" not in entry["env"] and "gpus" not in entry for entry in entries)


@pytest.mark.parametrize(
    ("narrowed", "gpus", "first_gpu", "expected"),
    [
        (True, (1,), None, "1"),
        (False, (0, 1), None, None),
        (False, (), None, ""),
        (False, (0, 1), 2, "2,3"),
    ],
)
def test_a_task_with_all_gpus_of_its_node_sees_the_given_ones(
    narrowed: bool, gpus: tuple[int, ...], first_gpu: int | None, expected: str | None, tmp_path: Path
) -> None:
    plan = mpi_plan(["true"])
    planned = dataclasses.replace(
        plan.tasks[0], narrowed=narrowed, task=dataclasses.replace(plan.tasks[0].task, gpus=gpus)
    )
    argv = wrapper_argv(plan, planned, facts_in(tmp_path), 0, first_gpu=first_gpu)
    gpus_option = argv[argv.index("--gpus") + 1] if "--gpus" in argv else None
    assert gpus_option == expected


@pytest.mark.parametrize(("attempt", "expected"), [(0, None), (2, "1")])
def test_a_later_attempt_gets_the_resume_variable(attempt: int, expected: str | None, tmp_path: Path) -> None:
    plan = plan_of()
    environment = run_environment(plan, plan.tasks[0], facts_in(tmp_path, attempt=attempt), 0)
    assert environment.get("GPUJOB_RESUME") == expected


def test_one_srun_starts_all_tasks_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of nodes in Slurm may have a domain, which their host names lack."""
    nodes = ("cn00.example.org", "cn01.example.org")
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    program = "import os; print(os.environ['RANK'], os.environ['SLURMD_NODENAME'], os.environ.get('ODD'))"
    plan = dataclasses.replace(
        mpi_plan([sys.executable, "-c", program]),
        python=sys.executable,
        workdir=str(tmp_path),
        slurm=SlurmOptions(mpi="pmi2"),
    )
    (tmp_path / "workers").mkdir()
    monkeypatch.setenv("ODD", "a 'b'\n")
    steps = SlurmSteps(plan, RunFacts("4459", tmp_path, nodes))
    started = steps.start_tasks(plan.tasks, 0)
    assert [running.process.wait(20) for running in started] == [0, 0]
    (call,) = slurm.calls("srun")
    options = {"ntasks", "nodes", "ntasks-per-node", "mpi", "job-name", "nodelist", "distribution", "wait"}
    assert {name: call["options"][name] for name in options} == {
        "ntasks": "2",
        "nodes": "2",
        "ntasks-per-node": "1",
        "mpi": "pmi2",
        "job-name": "solver_w0",
        "nodelist": ",".join(nodes),
        "distribution": "block",
        "wait": "0",
    }
    for rank, node in enumerate(nodes):
        assert (tmp_path / f"{node}_solver_w0.out").read_text() == f"{rank} {node} a 'b'\n\n"
        record = read_json(tmp_path / "workers" / f"solver_w0_rank{rank}_a0_r0.exit.json")
        assert (record["rank"], record["code"], record["node"]) == (rank, 0, node)


PYXIS = """\
#!/bin/sh
# the Python of an image of PyTorch, with the variables that pyxis gives a task
unset LC_ALL
export MINE=image TOKEN=image PATH="/image:$PATH" RANK="$SLURM_PROCID" LOCAL_RANK=0 WORLD_SIZE=1
exec {python} "$@"
"""


@pytest.mark.parametrize(
    ("count", "one_step", "torch"),
    [
        (2, False, [("0", "0", "2"), ("1", "1", "2")]),
        (2, True, [("0", "0", "2"), ("1", "1", "2")]),
        (1, False, [(None, None, "1")]),
    ],
)
def test_variables_of_the_job_override_those_of_pyxis_and_its_image(
    count: int,
    one_step: bool,
    torch: list[tuple[str | None, str | None, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    for folder, name, text in (
        ("image", "python", PYXIS.format(python=sys.executable)),
        ("bin", "show", f"#!{sys.executable} -I\nimport json, os\njson.dump(dict(os.environ), open(FILE, 'w'))\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text.replace("FILE", "os.environ['GPUJOB_WORKER']"))
        (tmp_path / folder / name).chmod(0o755)
    given = {"MINE": "job {rank}", "LC_ALL": "C.UTF-8", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "EMPTY": ""}
    plan = plan_of(
        job_spec(
            workers=[{"count": count, "command": "show"}],
            container={"image": "i", "python": str(tmp_path / "image" / "python")},
            env=given,
            secrets=["TOKEN"],
        ),
        workdir=str(tmp_path),
    )
    (tmp_path / "workers").mkdir()
    (tmp_path / "secrets.json").write_text('{"TOKEN": "hunter2"}')
    steps = SlurmSteps(plan, RunFacts("4459", tmp_path, ("cn00",)))
    tasks = [dataclasses.replace(planned, step="all" if one_step else "") for planned in plan.tasks]
    for together in [tasks] if one_step else [[planned] for planned in tasks]:
        assert [running.process.wait(20) for running in steps.start_tasks(together, 0)] == [0] * len(together)
    found = [json.loads((tmp_path / planned.task.worker).read_text()) for planned in tasks]
    for rank, environment in enumerate(found):
        expected = {**given, "MINE": f"job {rank}", "TOKEN": "hunter2", "GPUJOB_RANK": str(rank)}
        assert {name: environment.get(name) for name in expected} == expected
        assert not [name for name in environment if name.startswith("GPUJOB_ENV_")]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert [tuple(environment.get(name) for name in names) for environment in found] == torch
    assert "hunter2" not in json.dumps([call["argv"] for call in slurm.calls()])
    assert not [path for path in (tmp_path / "workers").iterdir() if "hunter2" in path.read_text()]


def test_a_wrapper_without_an_entry_in_the_step_file_fails(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "step.json").write_text(json.dumps({"tasks": []}))
    argv = [
        sys.executable,
        "-I",
        "-m",
        "launcher.programs.wrapper",
        "--run-dir",
        str(tmp_path),
        "--worker",
        "w",
        "--rank",
        "0",
    ]
    done = subprocess.run(
        [*argv, "--step-file", str(tmp_path / "step.json"), "--", "true"],
        env=clean_environment(SLURM_PROCID="3"),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 1
    assert f"{tmp_path / 'step.json'} has no entry for task 3" in done.stderr


def run_dir_of(folder: Path, workers: list[dict[str, Any]]) -> Path:
    run_dir = settled_run_dir(folder, {"name": "job", "workers": workers})
    (run_dir / "workers").mkdir(exist_ok=True)
    run_files.write_json(
        run_dir / run_files.ORCHESTRATOR_FILE, {"job_id": "local-1", "hosts": ["cn00"], "attempt": 0, "start": 1.0}
    )
    return run_dir


def test_the_log_of_a_terminated_task_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_dir_of(tmp_path, [{"command": "true"}])
    manifest = read_manifest(run_dir)
    read = Mock(return_value=b"")
    monkeypatch.setattr("launcher.report.run_logs.read_last_bytes", read)
    finder, stop = ExitReasonFinder(manifest, 0, None), JobStop("cancelled", "Slurm: cancelled", 10.0)
    record = {"code": None, "signal": 15, "end": 11.0, "signals": [[10.5, 15, 1]]}
    assert finder.describe_end(manifest.tasks[0], 0, "cn00", record, stop).reason == "cancelled"
    read.assert_not_called()
    assert finder.describe_end(manifest.tasks[0], 0, "cn00", {**record, "signals": []}, stop).reason == "killed_unknown"
    read.assert_called()


def test_a_task_ended_with_its_worker_has_the_reason_terminated_peer(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, [{"command": "true"}])
    manifest = read_manifest(run_dir)
    stem = run_dir / "workers" / "worker_w0_rank0_a0_r0"
    record = {"code": 143, "signal": None, "end": 11.0, "signals": [[10.5, 15, 1]]}
    finder = ExitReasonFinder(manifest, 0, None)
    assert finder.describe_end(manifest.tasks[0], 0, "cn00", record, None).reason == "cancelled"
    stop = {"reason": "terminated_peer", "cause": "worker_w0 rank 1 ended by app_error", "time": 10.0}
    run_files.write_json(f"{stem}.stop.json", {"stop": stop})
    ended = finder.describe_end(manifest.tasks[0], 0, "cn00", record, None)
    assert (ended.reason, ended.evidence[-1]) == (
        "terminated_peer",
        "the job was being stopped: worker_w0 rank 1 ended by app_error",
    )


def test_the_report_takes_the_cause_from_the_stop_if_no_worker_failed(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, [{"command": "true"}])
    failed = {"worker": "orchestrator", "rank": None, "node": "cn00", "reason": "killed_unknown", "evidence": ["x"]}
    stop = {"reason": "terminated_peer", "cause": "x", "time": 10.0, "failed": failed}
    run_files.write_job_state(str(run_dir), "completing", stop)
    report = build_report(run_dir, now=20.0, ended=True)
    assert (report.state, report.cause and report.cause.worker, report.cause and report.cause.time) == (
        "FAILED",
        "orchestrator",
        10.0,
    )


def test_all_runs_have_ended_when_each_start_has_an_exit_record(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    folder.mkdir()
    assert have_all_runs_ended(tmp_path, 1)
    for name in ("w_rank0_a0_r0.start", "w_rank0_a1_r0.start", "w_rank0_a1_r0.exit"):
        (folder / f"{name}.json").write_text("{}")
    assert have_all_runs_ended(tmp_path, 1)
    assert not have_all_runs_ended(tmp_path, 0)


class SimulatedJob:
    """The tasks of a job, on steps that the test simulates."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        (folder / run_files.WORKERS_DIR).mkdir()
        self.plan, self.facts, self.signals = plan, facts_in(folder), OrchestratorSignals()
        self.steps = Mock(spec=Steps, has_exact_status=False)
        self.steps.kill_leftovers.return_value = 0
        self.steps.has_no_leftovers.return_value = True
        self.steps.read_oom_kills.return_value = 0
        self.steps.start_tasks.side_effect = self._start
        self.steps.query_end.return_value = ExternalEnd()
        self.job_state = JobState(self.facts, 30.0, self.signals)
        self.job_tasks = JobTasks(JobRun(plan, self.facts, self.steps, self.job_state, self.signals))
        self.processes: list[Mock] = []

    def _start(self, tasks: tuple[Any, ...], restart: int) -> list[RunningTask]:
        self.processes.append(Mock(spec=subprocess.Popen, pid=1, poll=Mock(return_value=None)))
        return [RunningTask(planned, restart, self.processes[-1]) for planned in tasks]

    def record_end(self, rank: int, code: int | None, **facts: Any) -> None:
        """Write the exit record of the first run of a task."""
        body = {"code": code, "signal": None, "end": time.time(), **facts}
        run_files.write_json(RunRecords(self.facts).path(self.plan.tasks[rank], 0, "exit"), body)


def test_an_srun_that_waits_for_tasks_that_ended_long_ago_is_killed(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    (srun,) = job.processes
    srun.kill.side_effect = lambda: srun.poll.configure_mock(return_value=-9)
    long_ago = time.time() - LOST_STEP_S
    for rank, end, is_killed in ((0, long_ago, False), (1, time.time(), False), (1, long_ago, True)):
        job.record_end(rank, 0, end=end)
        job.job_tasks._next_lost_steps_poll_at = 0.0
        job.job_tasks.reap()
        assert srun.kill.called is is_killed
    job.job_tasks.reap()
    assert not job.job_tasks.busy
    assert [end.reason for _, end in job.job_tasks.ended_tasks()] == ["completed", "completed"]


def test_a_kill_for_lack_of_memory_is_not_charged_to_other_nodes_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.tasks.RECORD_GRACE_S", 0.0)
    job = SimulatedJob(tmp_path, plan_of_four_ranks(step="solve"))
    job.steps.read_oom_kills.side_effect = SlurmSteps(job.plan, job.facts).read_oom_kills
    job.job_tasks.start(job.plan.tasks)
    for planned in job.plan.tasks:
        run_files.write_json(RunRecords(job.facts).path(planned, 0, "start"), {"step": "3"})
    (tmp_path / "log.err").write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4459.3. Some of the step tasks have been OOM Killed.\n"
        "srun: error: cn01: tasks 2-3: Out Of Memory\nsrun: error: cn00: tasks 0-1: Killed\n"
    )
    job.processes[0].poll.return_value = 137
    job.job_tasks.reap()
    kills = [read_json(RunRecords(job.facts).path(planned, 0, "exit")).get("oom_kills") for planned in job.plan.tasks]
    assert kills == [None, None, 1, 1]
    assert job.job_state.stop is not None
    assert job.job_state.stop.cause == "solver_w0 rank 2 on cn01 ended by host_oom"


def serving_step(**over: Any) -> Plan:
    plan = mpi_plan(["serve"])
    tasks = (dataclasses.replace(planned, service=True, **over) for planned in plan.tasks)
    return dataclasses.replace(plan, tasks=tuple(tasks))


def test_a_service_that_ends_in_a_running_step_fails_immediately(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, serving_step())
    job.job_tasks.start(job.plan.tasks)
    job.job_tasks.reap()
    assert job.job_state.stop is None
    job.record_end(1, 0, service=True)
    job.job_tasks._next_steps_poll_at = 0.0
    job.job_tasks.reap()
    assert job.job_state.stop is not None
    assert job.job_state.stop.cause == "solver_w0 rank 1 on cn01 ended by app_error"
    assert job.job_tasks.busy
    job.record_end(0, 143, service=True)
    job.processes[0].poll.return_value = 143
    job.job_tasks.reap()
    assert job.job_tasks.ends[1].reason == "app_error"
    assert not job.job_tasks.busy


def test_a_completed_task_waits_for_its_step(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    job.record_end(1, 0)
    job.job_tasks.reap()
    assert job.job_tasks.ends == {}
    job.record_end(0, 0)
    job.processes[0].poll.return_value = 0
    job.job_tasks.reap()
    assert [job.job_tasks.ends[rank].reason for rank in (0, 1)] == ["completed", "completed"]


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EKEYEXPIRED, errno.EIO, errno.ESTALE, errno.ENOSPC]
)
def test_a_run_directory_that_cannot_be_written_costs_records_and_no_result(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.tasks.RECORD_GRACE_S", 0.0)
    job, error = SimulatedJob(tmp_path, mpi_plan(["solve"])), OSError(number, os.strerror(number))
    job.job_tasks.start(job.plan.tasks)
    with monkeypatch.context() as patched:
        patched.setattr(run_files, "replace_file", Mock(side_effect=error))
        job.processes[0].poll.return_value = 0
        job.job_tasks.reap()
    assert [job.job_tasks.ends[rank].reason for rank in (0, 1)] == ["completed", "completed"]
    assert job.job_state.stop is None
    job.job_state.repeat_writes()
    is_full = number == errno.ENOSPC
    why = "is full" if is_full else f"cannot be written: {os.strerror(number)}"
    assert job.job_state.incomplete == f"the run directory {why}"


def test_an_error_of_one_write_that_is_repeated_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_state = SimulatedJob(tmp_path, mpi_plan(["solve"])).job_state
    with monkeypatch.context() as patched:
        patched.setattr(run_files, "replace_file", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        job_state.publish("running")
    assert job_state.incomplete == "the run directory cannot be written: Input/output error"
    job_state.repeat_writes()
    assert job_state.incomplete is None


def test_an_oom_kill_in_a_shared_cgroup_is_blamed_on_its_victim_that_ends_later(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, plan_of(job_spec(workers=[{"role": "peer", "count": 2, "command": "x"}])))
    for planned in job.plan.tasks[:2]:
        job.job_tasks.start((planned,))
    peer, victim = job.processes
    peer.poll.return_value = 1
    job.record_end(0, 1, oom_kills=1)
    job.job_tasks.reap()
    assert (job.job_tasks.ends, job.job_state.stop) == ({}, None)
    victim.poll.return_value = 137
    job.record_end(1, None, signal=9, oom_kills=1)
    job.job_tasks.reap()
    job.job_tasks.reap()
    assert {rank: end.reason for rank, end in job.job_tasks.ends.items()} == {0: "terminated_peer", 1: "host_oom"}
    assert job.job_state.stop is not None
    assert job.job_state.stop.cause == "peer_w1 rank 1 on cn00 ended by host_oom"


def test_the_first_of_several_failures_found_together_stops_the_job(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, plan_of(job_spec(workers=[{"role": "peer", "count": 2, "command": "x"}])))
    for planned in job.plan.tasks[:2]:
        job.job_tasks.start((planned,))
    for process in job.processes:
        process.poll.return_value = 1
    job.record_end(0, 1, end=101.0)
    job.record_end(1, 1, end=100.0)
    job.job_tasks.reap()
    assert job.job_state.stop is not None
    assert job.job_state.stop.cause == "peer_w1 rank 1 on cn00 ended by app_error"


def test_a_step_is_restarted_after_all_its_tasks_have_ended(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, serving_step(restart_max=1, restart_backoff_s=0.0))
    job.job_tasks.start(job.plan.tasks)
    job.record_end(1, 0, service=True)
    job.job_tasks.reap()
    job.job_tasks.handle_task_groups()
    (terminated_tasks,) = job.steps.terminate.call_args.args
    assert [running.planned.task.rank for running in terminated_tasks] == [0]
    stops = sorted(path.name for path in (tmp_path / "workers").glob("*.stop.json"))
    assert stops == ["solver_w0_rank0_a0_r0.stop.json"]
    assert len(job.processes) == 1
    job.processes[0].poll.return_value = 143
    job.record_end(0, 143, service=True)
    job.steps.has_no_leftovers.return_value = False
    job.job_tasks.reap()
    job.job_tasks.handle_task_groups()
    assert len(job.processes) == 1
    job.steps.has_no_leftovers.return_value = True
    job.job_tasks.reap()
    job.job_tasks.handle_task_groups()
    assert len(job.processes) == 2
    assert job.job_tasks.restarts() == {0: 1, 1: 1}


@pytest.mark.parametrize("has_links", [True, False])
def test_tasks_that_end_with_their_worker_share_the_record_of_its_stop(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SimulatedJob(tmp_path, plan_of_four_ranks(step="", restart_max=1))
    job.job_tasks.start(job.plan.tasks)
    job.record_end(0, 1)
    job.processes[0].poll.return_value = 1
    write, show_life = Mock(wraps=run_files.write_json), Mock()
    monkeypatch.setattr(run_files, "write_json", write)
    monkeypatch.setattr(job.signals, "show_life", show_life)
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    alive_at_sigterm: list[int] = []
    job.steps.terminate.side_effect = lambda _: alive_at_sigterm.append(show_life.call_count)
    job.job_tasks.reap()
    paths = [RunRecords(job.facts).path(planned, 0, "stop") for planned in job.plan.tasks]
    assert [path.exists() for path in paths] == [False, True, True, True]
    assert [read_json(path)["stop"]["cause"] for path in paths[1:]] == ["solver_w0 rank 0 ended by app_error"] * 3
    assert sum(call.args[0] in paths for call in write.call_args_list) == (1 if has_links else 3)
    assert alive_at_sigterm[0] >= 3, "hundreds of records take long"


def test_workers_that_restart_together_resume_from_the_result_of_one_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Mock(return_value="/saved/checkpoint_100.pt")
    monkeypatch.setattr("launcher.run.tasks.find_checkpoint", search)
    plan = plan_of(job_spec(workers=[{"count": 3, "command": "x", "restart": {"max": 1, "backoff": 0}}]))
    job = SimulatedJob(tmp_path, plan)
    job.job_tasks.start(plan.tasks)
    for rank, process in enumerate(job.processes):
        job.record_end(rank, 1)
        process.poll.return_value = 1
    job.steps.update_facts.side_effect = lambda _: job.processes.clear()
    job.job_tasks.reap()
    job.job_tasks.handle_task_groups()
    search.assert_called_once()
    assert [call.args[0].checkpoint for call in job.steps.update_facts.call_args_list] == [search.return_value]
    assert len(job.processes) == 3, "all of them start after the search"


@pytest.mark.parametrize("in_one_step", [True, False])
def test_every_task_of_a_worker_has_a_record_of_a_restart_that_failed(tmp_path: Path, in_one_step: bool) -> None:
    plan = mpi_plan(["solve"])
    over: dict[str, Any] = {"restart_max": 2, "restart_backoff_s": 0.0, **({} if in_one_step else {"step": ""})}
    tasks = tuple(dataclasses.replace(planned, **over) for planned in plan.tasks)
    job = SimulatedJob(tmp_path, dataclasses.replace(plan, tasks=tasks))
    job.job_tasks.start(job.plan.tasks)
    for rank in (0, 1):
        job.record_end(rank, 1)
    for process in job.processes:
        process.poll.return_value = 1
    job.steps.start_tasks.side_effect = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    job.job_tasks.reap()
    job.job_tasks.handle_task_groups()
    job.steps.start_tasks.side_effect = job._start
    job.job_tasks.handle_task_groups()
    assert job.job_tasks.restarts() == {0: 2, 1: 2}
    first, second = (read_json(tmp_path / "workers" / f"solver_w0_rank{rank}_a0_r1.exit.json") for rank in (0, 1))
    assert first["error"] == "[Errno 11] Resource temporarily unavailable"
    assert second["error"] == "not started: solver_w0 rank 0 could not be started"
    assert first["end"] <= second["end"], "the failure is the first end"


def slow_request(clock: list[float], seconds: float) -> Callable[[object], None]:
    """A request that takes this long on the fake clock."""
    return lambda _: clock.__setitem__(0, clock[0] + seconds)


def test_the_time_to_end_begins_after_the_sigterm_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("launcher.run.tasks.time.monotonic", lambda: clock[0])
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    job.steps.terminate.side_effect = slow_request(clock, OWN_TEARDOWN_S + 2.0)
    job.steps.kill.side_effect = slow_request(clock, 2.0)
    job.job_state.begin_stop("cancelled", "a test")
    job.job_tasks.terminate_if_due()
    assert job.job_tasks.kill_at_deadline()
    job.steps.kill.assert_not_called()
    clock[0] += OWN_TEARDOWN_S + 0.1
    assert job.job_tasks.kill_at_deadline()
    job.steps.kill.assert_called_once()
    clock[0] += 1.1
    assert not job.job_tasks.kill_at_deadline()


def terminated(**over: Any) -> dict[str, Any]:
    """Record entries of a task that just received SIGTERM from outside."""
    return {"signals": [[time.time(), 15, 1]], **over}


def test_slurm_is_queried_for_the_reason_of_a_sigterm_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("launcher.run.tasks.time.monotonic", lambda: clock[0])
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    job.processes[0].poll.return_value = 143
    ended_at = time.time() - 3.0
    job.record_end(0, 143, **terminated(end=ended_at))
    job.record_end(1, 143, **terminated(end=ended_at + 1.0))
    job.job_tasks.reap()
    job.steps.query_end.return_value = ExternalEnd(is_unanswered=True)
    for waited_s in (NOTICE_GRACE_S + 1.0, QUERY_INTERVAL_S + 0.1):
        clock[0] += waited_s
        job.job_tasks.reap()
        assert job.job_tasks.ends == {}, "the reason may still arrive"
    assert job.steps.query_end.call_count == 2
    clock[0] += QUERY_INTERVAL_S + 0.1
    job.steps.query_end.return_value = ExternalEnd(True, "time_limit", "Slurm: the time limit was reached")
    job.job_tasks.reap()
    job.job_tasks.reap()
    assert {end.reason for end in job.job_tasks.ends.values()} == {"time_limit"}
    assert job.job_state.stop is not None
    assert job.job_state.stop.time == ended_at, "ends before the answer belong to the stop"


def test_a_pending_signal_decides_the_reason_before_the_ends_are_read(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    job.processes[0].poll.return_value = 143
    job.record_end(0, 143, **terminated())
    job.record_end(1, 143, **terminated())
    job.signals.end_signal = 15
    job.job_tasks.reap()
    assert (job.job_tasks.ends, job.job_state.stop) == ({}, None)
    job.job_state.begin_stop("cancelled", "Slurm: cancelled", send_sigterm=False)
    job.job_tasks.reap()
    assert {end.reason for end in job.job_tasks.ends.values()} == {"cancelled"}


def test_tasks_that_slurm_ends_are_neither_restarted_nor_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("launcher.run.tasks.time.monotonic", lambda: clock[0])
    plan = mpi_plan(["solve"])
    tasks = (dataclasses.replace(planned, restart_max=2, critical=False) for planned in plan.tasks)
    job = SimulatedJob(tmp_path, dataclasses.replace(plan, tasks=tuple(tasks)))
    job.steps.query_end.return_value = ExternalEnd(ends_all=True)
    job.job_tasks.start(job.plan.tasks)
    job.processes[0].poll.return_value = 143
    for rank in (0, 1):
        job.record_end(rank, 143, **terminated())
    for waited_s in (0.0, QUERY_AFTER_S + 0.1, ANNOUNCED_GRACE_S):
        clock[0] += waited_s
        job.job_tasks.reap()
    assert job.job_state.stop is not None
    assert (job.job_state.is_sigterm_due, job.job_tasks.slurm_end_query.is_left_to_slurm) == (False, True)
    job.job_tasks.handle_task_groups()
    assert len(job.processes) == 1
    job.steps.terminate.assert_not_called()


def test_tasks_are_left_to_slurm_if_it_does_not_answer_about_a_node(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    job.job_tasks.slurm_end_query.stop_job(ExternalEnd(failed_nodes=("cn01",), is_unanswered=True), "")
    assert (
        job.job_state.is_sigterm_due,
        job.job_tasks.slurm_end_query.is_left_to_slurm,
        job.job_tasks.slurm_end_query._next_query_at is None,
    ) == (
        False,
        True,
        False,
    )


@pytest.mark.parametrize("grace_s", [None, 120.0])
def test_the_stop_deadline_includes_the_grace_time_of_slurm(
    grace_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("launcher.run.job_state.time.monotonic", lambda: now)
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    ends_at = None if grace_s is None else time.time() + grace_s
    signal_by = None if ends_at is None else ends_at + SIGNAL_LATE_S
    job.job_tasks.slurm_end_query.stop_job(ExternalEnd(True, "preempted", "Slurm", grace_ends_at=ends_at), "")
    assert job.job_state.deadline == pytest.approx(now + (grace_s or 0.0) + 27.0, abs=1.0)
    assert (
        job.job_state.is_sigterm_due,
        job.job_tasks.slurm_end_query.is_left_to_slurm,
        job.job_tasks.slurm_end_query.signal_deadline,
    ) == (False, True, signal_by)


def test_the_failed_node_is_queried_until_its_tasks_have_a_reason(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, mpi_plan(["solve"]))
    job.job_tasks.start(job.plan.tasks)
    job.steps.query_end.return_value = ExternalEnd(True, "node_failure", "Slurm: a node has failed")
    job.job_tasks.slurm_end_query.stop_job(job.steps.query_end(), "")
    assert job.job_state.stop is not None
    assert not job.job_state.stop.nodes
    job.steps.query_end.return_value = ExternalEnd(True, "node_failure", "Slurm: node cn01 has failed", ("cn01",))
    job.record_end(0, 143, **terminated())
    job.processes[0].poll.return_value = 137
    job.job_tasks._killed_at = time.monotonic()  # tasks without a record by now leave none
    job.job_tasks.reap()
    assert job.job_state.stop.nodes == ("cn01",)
    assert {rank: end.reason for rank, end in job.job_tasks.ends.items()} == {
        0: "terminated_peer",
        1: "node_failure",
    }
    assert read_json(tmp_path / run_files.STATE_FILE)["stop"]["cause"] == "Slurm: node cn01 has failed"


def on_a_failed_node(
    folder: Path, answer: ExternalEnd, *, critical: bool, is_early_critical: bool = False
) -> SimulatedJob:
    """A job with a critical worker on one node, and one on a second node that failed. All may restart once.

    A third one had completed there before, and may have been critical too.
    """
    plan = mpi_plan(["serve"])
    workers = [("lead", 0, True), ("decode", 1, critical), ("early", 1, is_early_critical)]
    tasks = tuple(
        dataclasses.replace(
            plan.tasks[node],
            step="",
            critical=needed,
            restart_max=1,
            restart_backoff_s=0.0,
            task=dataclasses.replace(plan.tasks[node].task, worker=name, rank=rank, critical=needed),
        )
        for rank, (name, node, needed) in enumerate(workers)
    )
    manifest = dataclasses.replace(plan.manifest, run_dir=folder)
    job = SimulatedJob(folder, dataclasses.replace(plan, tasks=tasks, manifest=manifest))
    job.job_tasks.start(job.plan.tasks)
    job.record_end(2, 0)
    job.processes[2].poll.return_value = 0
    job.job_tasks.reap()
    job.steps.query_end.return_value = answer
    job.processes[1].poll.return_value = 1
    job.job_tasks.reap()
    return job


@pytest.mark.parametrize(
    ("answer", "critical", "is_stopped"),
    [
        (ExternalEnd(failed_nodes=("cn01",)), False, False),
        (ExternalEnd(failed_nodes=("cn01",)), True, True),
        (ExternalEnd(ends_all=True, failed_nodes=("cn01",)), False, True),  # without `no-kill`
        (ExternalEnd(is_unanswered=True, failed_nodes=("cn01",)), False, True),
    ],
)
def test_a_failed_node_ends_a_job_that_slurm_ends_or_that_needs_the_node(
    answer: ExternalEnd, critical: bool, is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.tasks.RECORD_GRACE_S", 0.0)
    job = on_a_failed_node(tmp_path, answer, critical=critical, is_early_critical=True)
    stop = job.job_state.stop
    assert (stop.nodes if stop is not None else None) == (("cn01",) if is_stopped else None)
    assert job.job_tasks.ends[1].reason == "node_failure"


def test_a_job_continues_without_the_workers_of_a_failed_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.run.tasks.RECORD_GRACE_S", 0.0)
    job = on_a_failed_node(tmp_path, ExternalEnd(failed_nodes=("cn01",)), critical=False)
    job.job_tasks.handle_task_groups()
    assert (job.job_tasks.abandoned, len(job.processes)) == ({"decode": "solver"}, 3), "a restart would need the node"
    assert job.job_tasks.ends[1].evidence[-1] == "node cn01 has failed"
    job.steps.query_end.return_value = ExternalEnd(is_unanswered=True, failed_nodes=("cn01",))
    job.job_tasks.slurm_end_query.query_reason()
    assert job.job_state.stop is None, "what was borne is no reason later, when Slurm does not answer"
    job.steps.query_end.return_value = ExternalEnd(failed_nodes=("cn01",))
    job.processes[0].poll.return_value = 143
    job.record_end(0, 143, **terminated())
    start = time.monotonic()
    for wait_s in (0.0, NOTICE_GRACE_S + 1.0, NOTICE_GRACE_S + 2.0):
        monkeypatch.setattr("launcher.run.tasks.time.monotonic", lambda now=start + wait_s: now)
        job.job_tasks.reap()
    assert job.job_tasks.ends[0].reason == "cancelled", "it is on a node that has not failed"
    assert (job.job_state.stop, capfd.readouterr().out.count("Node cn01 has failed")) == (None, 1)


def test_a_step_without_a_record_is_terminated_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    plan = plan_of(job_spec(workers=[{"count": 3, "command": "x"}]))
    (slurm.folder / "steps").mkdir()
    (slurm.folder / "steps" / "4459.7.name").write_text("worker_w1")
    (tmp_path / run_files.WORKERS_DIR).mkdir()
    steps, facts = SlurmSteps(plan, facts_in(tmp_path)), facts_in(tmp_path)
    running = [RunningTask(planned, 0, Mock(spec=subprocess.Popen)) for planned in plan.tasks]
    run_files.write_json(RunRecords(facts).path(plan.tasks[0], 0, "start"), {"step": "3"})
    steps.terminate(running)
    assert [call["argv"] for call in slurm.calls("scancel")] == [["--signal=TERM", "4459.3", "4459.7"]]
    assert [entry.process.terminate.call_count for entry in running] == [0, 0, 1], "Slurm does not know the last step"  # type: ignore[attr-defined]


def test_one_record_is_read_for_all_tasks_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    (tmp_path / run_files.WORKERS_DIR).mkdir()
    plan, facts, srun = plan_of_four_ranks(), facts_in(tmp_path), Mock(spec=subprocess.Popen)
    running = [RunningTask(planned, 0, srun) for planned in plan.tasks]
    for planned in plan.tasks[1:]:  # the first is not visible here yet
        run_files.write_json(RunRecords(facts).path(planned, 0, "start"), {"step": "3"})
    read = Mock(wraps=run_files.read_json)
    monkeypatch.setattr(run_files, "read_json", read)
    SlurmSteps(plan, facts).terminate(running)
    assert [call["argv"] for call in slurm.calls("scancel")] == [["--signal=TERM", "4459.3"]]
    assert (read.call_count, slurm.calls("squeue"), srun.terminate.called) == (2, [], False)


def test_the_step_of_a_killed_srun_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    plan = mpi_plan(["true"])
    names = ("solver_w0", "other", "sidecar")
    (slurm.folder / "steps").mkdir()
    for number, name in enumerate(names):
        (slurm.folder / "steps" / f"4459.{number}.name").write_text(name)
    steps = SlurmSteps(plan, facts_in(tmp_path))
    ended = [RunningTask(planned, 0, Mock(poll=Mock(return_value=137), returncode=137)) for planned in plan.tasks]
    assert (steps.kill_leftovers(ended[0]), steps.has_no_leftovers(ended[0]), slurm.calls()) == (0, True, [])
    killed = [RunningTask(planned, 0, Mock(poll=Mock(return_value=-9), returncode=-9)) for planned in plan.tasks]
    assert [steps.kill_leftovers(running) for running in killed] == [0, 0]
    assert [steps.has_no_leftovers(running) for running in killed] == [False, False]
    assert [call["argv"] for call in slurm.calls("scancel")] == [["--signal=KILL", "4459.0"]]
    steps._orphans_poll_at = 0.0
    assert steps.has_no_leftovers(killed[1])
    steps._orphans_poll_at = 0.0
    assert not steps.sidecars_have_no_leftovers([Mock(returncode=-9)])
    assert slurm.calls("scancel")[-1]["argv"] == ["--signal=KILL", "4459.2"]
    steps._orphans_poll_at = 0.0
    assert steps.sidecars_have_no_leftovers([Mock(returncode=-9)])


def test_a_step_is_not_over_if_squeue_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = mpi_plan(["true"])
    steps = SlurmSteps(plan, facts_in(tmp_path))
    killed = RunningTask(plan.tasks[0], 0, Mock(poll=Mock(return_value=-9), returncode=-9))
    steps.kill_leftovers(killed)
    for _ in range(2):
        steps._orphans_poll_at = 0.0
        assert not steps.has_no_leftovers(killed)
    assert capfd.readouterr().err.count("steps without their srun cannot be ended: squeue is not on PATH") == 1


def ends_of(reasons: list[tuple[int, int, str]]) -> list[tuple[Task, WorkerEnd]]:
    task = plan_of().tasks[0].task
    return [
        (dataclasses.replace(task, rank=rank, worker=f"w{rank}"), WorkerEnd(time=float(time_s), reason=reason))
        for rank, time_s, reason in reasons
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 40), st.sampled_from(["app_error", "completed", "host_oom"])),
        max_size=12,
    ),
    st.integers(0, 4),
    st.integers(0, 40),
)
def test_the_earliest_recent_failure_of_a_peer_is_found(
    reasons: list[tuple[int, int, str]], rank: int, end: int
) -> None:
    failures, last = TaskFailures(), dict[int, tuple[Task, WorkerEnd]]()
    for task, ended in ends_of(reasons):
        failures.add(task, ended)
        last[task.rank] = (task, ended)
    others = [peer for other, peer in task_failures(last.values()) if other != rank]
    recent = [peer for peer in others if end - PEER_WINDOW_S <= peer.end <= end]
    found = failures.find_before(rank, end)
    assert [peer.end for peer in found] == sorted(peer.end for peer in recent)[:1]
    assert set(found) <= set(recent)
    assert failures.find_before(rank, None) == []


def test_a_task_on_another_node_than_planned_fails(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    plan = mpi_plan(["true"])
    entries = step_entries(plan, plan.tasks, facts_in(tmp_path), 0)
    (tmp_path / "step.json").write_text(json.dumps({"tasks": entries}))
    argv = [
        sys.executable,
        "-I",
        "-m",
        "launcher.programs.wrapper",
        "--run-dir",
        str(tmp_path),
        "--worker",
        "w",
        "--rank",
        "0",
    ]
    for node, proc_id in itertools.product(("cn00", "cn01"), ("0", "1")):
        done = subprocess.run(
            [*argv, "--step-file", str(tmp_path / "step.json"), "--", "true"],
            env=clean_environment(SLURM_PROCID=proc_id, SLURMD_NODENAME=node),
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        planned = f"cn0{proc_id}"
        assert done.returncode == int(node != planned)
        assert (f"task {proc_id} of its step is on {node}, but was planned for {planned}" in done.stderr) is (
            node != planned
        )


def test_the_name_of_a_failed_node_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, log = SlurmSteps(mpi_plan(["true"]), facts_in(tmp_path)), tmp_path / "log.err"
    log.write_text(
        "slurmstepd-cn01: error: *** JOB 7 ON cn01 CANCELLED AT 2026-01-01T12:02:53 DUE TO NODE FAILURE ***\n"
    )
    monkeypatch.setattr(slurm_steps, "NODE_NAME_WAIT_S", 0.2)
    unnamed = steps.query_end()
    assert (unnamed.reason, unnamed.cause, unnamed.failed_nodes) == ("node_failure", "Slurm: a node has failed", ())

    def write_node_name(_: float) -> None:
        log.write_text(log.read_text() + "srun: error: Node failure on cn02\n")

    monkeypatch.setattr("launcher.steps.slurm_steps.time.sleep", write_node_name)
    named = steps.query_end()
    assert (named.cause, named.failed_nodes) == ("Slurm: node cn02 has failed", ("cn02",))


# A job that was suspended keeps the time of its preemption.
PREEMPTED_LONG_AGO = "StartTime=2026-11-21T12:00:00 EndTime=2026-11-21T12:40:00 PreemptTime=2026-11-21T12:20:00"
IN_GRACE = "StartTime=2026-11-21T12:00:00 EndTime=2026-11-21T12:22:00 PreemptTime=2026-11-21T12:20:00"
PREEMPTED = ExternalEnd(
    True,
    "preempted",
    "Slurm: preempted by another job, with a grace time",
    grace_ends_at=datetime.fromisoformat("2026-11-21T12:22:00").timestamp(),
)


@pytest.mark.parametrize(
    ("scontrol_text", "expected"),
    [
        ("JobState=RUNNING Reason=None", ExternalEnd()),
        ("JobState=COMPLETING Reason=None", ExternalEnd(ends_all=True)),
        ("JobState=COMPLETING Reason=TimeLimit", ExternalEnd(True, "time_limit", "Slurm: the time limit was reached")),
        (f"JobState=COMPLETING Reason=None {PREEMPTED_LONG_AGO}", ExternalEnd(ends_all=True)),
        (f"JobState=RUNNING Reason=None {IN_GRACE}", PREEMPTED),
        (None, ExternalEnd(is_unanswered=True)),
    ],
    ids=[
        *("it runs", "it is being ended", "at its time limit", "cancelled after a preemption"),
        *("preempted with a grace time", "no answer"),
    ],
)
def test_the_slurm_end_query_reads_the_state_of_the_job(
    scontrol_text: str | None, expected: ExternalEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*_: object, **__: object) -> str:
        if scontrol_text is None:
            raise SlurmError("scontrol did not answer in 2 s")
        return scontrol_text

    monkeypatch.setattr(slurm_steps, "run_command", show)
    steps = SlurmSteps(mpi_plan(["true"]), facts_in(tmp_path))
    assert steps.query_end() == expected
    shown = re.search("EndTime=([-0-9T:]+)", scontrol_text or "")
    limit_end = datetime.fromisoformat(shown[1]).timestamp() if shown and expected == ExternalEnd() else None
    assert steps.read_time_limit_end() == limit_end
