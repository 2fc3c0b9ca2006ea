"""The launch check over all nodes of a job: sidecar status, records, and the printed checklist."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.launch.checks import LEVELS, NodeLaunchFacts, WorkerLaunchFacts, check_launch
from launcher.plan.plan import Plan, RunFacts
from launcher.run.launch_check import (
    MARGIN_S,
    MOST_LINES,
    POLL_INTERVAL_S,
    JobLaunchCheck,
    LaunchChecklist,
    render_launch_checklist,
)
from tests.launcher.conftest import Golden
from tests.support.exporter import NODE, Wrappers, until, write_manifest
from tests.support.launcher import clean_environment, job_spec, plan_of

START = 1_700_000_000.0
TIMEOUT_S = 60.0


class Job:
    """A job whose sidecar status files the test writes."""

    def __init__(self, run_dir: Path, *hosts: str, workers: int = 8, watched: bool = True) -> None:
        self.run_dir = run_dir
        self.hosts = hosts or ("cn01", "cn02")
        nodes = len(self.hosts)
        spec: dict[str, Any] = {
            "resources": {"nodes": nodes, "gpus_per_node": workers // nodes},
            "workers": [{"count": workers, "gpus": 1, "command": "true"}],
            "paths": {"output_dir": "/data/out" if watched else None},
            "monitoring": {"enabled": watched},
        }
        self.plan: Plan = plan_of(job_spec(**spec))
        self.facts = RunFacts("4459", run_dir, self.hosts, 0, START)
        self.check = JobLaunchCheck(self.plan, self.facts)
        for folder in (run_files.STATUS_DIR, run_files.WORKERS_DIR):
            (run_dir / folder).mkdir(exist_ok=True)

    def workers(self, index: int) -> dict[int, WorkerLaunchFacts]:
        """The workers of a node, all without problems."""
        return {
            task.rank: WorkerLaunchFacts(
                task.worker, task.rank, task.gpus, pid=task.rank + 100, started=True, up=True, age_s=30.0,
                devices=str(task.rank), device_files=1, log_files=2, log_bytes=10, items=1,
            )
            for task in self.plan.manifest.tasks_of(index)
        }  # fmt: skip

    def write_launch_status(
        self, index: int, workers: dict[int, WorkerLaunchFacts] | None = None, *, final: bool = True, **node: Any
    ) -> None:
        """Write the status of a sidecar with these workers and node facts."""
        facts = NodeLaunchFacts(
            **{"output_dir": "/data/out", "output_files": 1, "has_gpus": True, "expects_progress": True, **node}
        )
        checks = check_launch(
            list((self.workers(index) if workers is None else workers).values()),
            dataclasses.replace(facts, output_files=None) if index else facts,
            elapsed_s=TIMEOUT_S if final else 5.0,
            launch_timeout_s=TIMEOUT_S,
        )
        self.write_status(
            index,
            {
                "launch": {
                    "final": final,
                    "checks": [check.to_json() for check in checks],
                }
            },
        )

    def write_status(self, index: int, body: dict[str, Any]) -> None:
        status = {"attempt": self.facts.attempt, "final": False, **body}
        run_files.write_json(self.run_dir / run_files.STATUS_DIR / f"{self.hosts[index]}.json", status)

    def write_record(self, rank: int, kind: str, restart: int = 0, **body: Any) -> None:
        """Write a record of a wrapper."""
        stem = run_files.record_name(f"worker_w{rank}", rank, self.facts.attempt, restart)
        run_files.write_json(
            self.run_dir / run_files.WORKERS_DIR / f"{stem}.{kind}.json", {"pid": 7, "start": START, **body}
        )

    def write_log(self, rank: int, node: str, run: str = "") -> None:
        (self.run_dir / f"{node}_worker_w{rank}{run}.out").write_text("hello\n")

    def poll_after(self, seconds: float) -> LaunchChecklist | None:
        return self.check.poll(seconds)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def text_of(checklist: LaunchChecklist) -> str:
    return "\n".join(render_launch_checklist(checklist)) + "\n"


def test_the_checklist_of_a_good_launch_matches_its_golden_text(job: Job, golden: Golden) -> None:
    for index in range(2):
        job.write_launch_status(index)
    checklist = job.poll_after(12.0)
    assert checklist is not None
    assert checklist.is_verified
    golden("launcher/launch-passed.txt", text_of(checklist))


def test_the_only_worker_is_not_one_of_all(tmp_path: Path) -> None:
    job = Job(tmp_path, "cn01", workers=1)
    job.write_launch_status(0)
    checklist = job.poll_after(12.0)
    assert checklist is not None
    assert [line.removeprefix("✓ ") for line in render_launch_checklist(checklist) if "only" in line] == [
        "The only worker started",
        "The only worker is alive or completed, none started twice",
        "The only worker has the GPUs of the plan",
        "The only worker with GPUs uses them",
        "The only worker has a log file",
        "The only worker has logged a first line",
        "The only worker reports progress",
    ]


def test_services_are_not_counted_among_workers_with_progress(job: Job) -> None:
    job.plan = dataclasses.replace(
        job.plan,
        tasks=tuple(
            dataclasses.replace(planned, task=dataclasses.replace(planned.task, service=planned.task.rank % 4 > 0))
            for planned in job.plan.tasks
        ),
    )
    job.check = JobLaunchCheck(job.plan, job.facts)
    for index in range(2):
        workers = {
            rank: dataclasses.replace(worker, service=rank % 4 > 0, items=1 if rank == 0 else None)
            for rank, worker in job.workers(index).items()
        }
        job.write_launch_status(index, workers)
    checklist = job.poll_after(TIMEOUT_S)
    assert checklist is not None
    assert [result.detail for result in checklist.results if result.name == "progress"] == [
        "1 of 2 workers report progress"
    ]
    assert [fault.worker for fault in checklist.faults("warning")] == ["worker_w4"]


def test_the_checklist_confirms_no_gpus_that_were_not_seen(job: Job) -> None:
    first = job.workers(0)
    first[1] = dataclasses.replace(first[1], up=False, reason="completed", devices=None, device_files=None)
    unseen = {
        rank: dataclasses.replace(worker, up=False, reason="completed", devices=None, device_files=None)
        for rank, worker in job.workers(1).items()
    }
    job.write_launch_status(0, first)
    job.write_launch_status(1, unseen)
    checklist = job.poll_after(TIMEOUT_S)
    assert checklist is not None
    assert checklist.is_verified
    details = {result.name: result.detail for result in checklist.results}
    assert details["gpu_use"] == "3 of 8 workers with GPUs use them; 5 could not be seen"
    assert details["gpus"] == "3 of 8 workers have the GPUs of the plan; 5 could not be seen"


def three_faults(job: Job) -> LaunchChecklist:
    """Checklist with a worker that never starts, one with a wrong GPU, and an unwritable output directory."""
    problem = "/data/out cannot be written to"
    first, second = job.workers(0), job.workers(1)
    first[1] = dataclasses.replace(first[1], devices="0,1", device_files=0)
    second[6] = WorkerLaunchFacts("worker_w6", 6, (2,))
    job.write_launch_status(0, first, output_problem=problem, output_files=0)
    job.write_launch_status(1, second, output_problem=problem)
    checklist = job.poll_after(TIMEOUT_S + 5)
    assert checklist is not None
    return checklist


def test_faults_are_printed_with_worker_node_and_fix(job: Job, golden: Golden) -> None:
    checklist = three_faults(job)
    assert not checklist.is_verified
    golden("launcher/launch-failed.txt", text_of(checklist))


def test_the_json_checklist_has_all_results(job: Job) -> None:
    checklist = three_faults(job)
    body = json.loads(json.dumps(checklist.report().to_json()))
    assert (body["schema"], body["verified"], body["elapsed_s"]) == (1, False, TIMEOUT_S + 5)
    by_name = {check["name"]: check for check in body["checks"]}
    assert list(by_name) == list(LEVELS)
    assert by_name["processes"]["passed"] is False
    (fault,) = by_name["processes"]["faults"]
    assert (fault["worker"], fault["rank"], fault["node"]) == ("worker_w6", 6, "cn02")
    assert body["checks"] == [result.to_json() for result in checklist.results]


def test_every_failed_check_has_a_suggestion(job: Job) -> None:
    worst = {
        rank: WorkerLaunchFacts(w.worker, rank, w.gpus, devices="", device_files=0)
        for rank, w in job.workers(0).items()
    }
    job.write_launch_status(0, worst, output_problem="gone", output_files=0)
    job.write_launch_status(1)
    checklist = job.poll_after(TIMEOUT_S)
    assert checklist is not None
    assert {result.name for result in checklist.results if not result.passed} == set(LEVELS)
    assert all(fault.cure for result in checklist.results for fault in result.faults)


def test_there_is_no_checklist_before_every_node_is_final(job: Job) -> None:
    job.write_launch_status(0)
    assert job.poll_after(1.0) is None
    job.write_launch_status(1, final=False)
    assert job.poll_after(3.0) is None
    job.write_launch_status(1)
    checklist = job.poll_after(5.0)
    assert checklist is not None
    assert job.poll_after(1000.0) is checklist


def test_a_stop_of_the_job_does_not_count_for_the_launch(job: Job) -> None:
    job.write_launch_status(0)
    assert [job.poll_after(seconds) for seconds in (1.0, 3600.0, 3650.0)] == [None] * 3
    job.write_launch_status(1)
    checklist = job.poll_after(3652.0)
    assert checklist is not None
    assert checklist.is_verified


def test_statuses_are_not_read_at_each_poll(job: Job) -> None:
    assert job.poll_after(1.0) is None
    for index in range(2):
        job.write_launch_status(index)
    assert job.poll_after(1.0 + POLL_INTERVAL_S / 2) is None
    assert job.poll_after(1.0 + POLL_INTERVAL_S) is not None


def test_the_records_of_a_node_count_if_its_sidecar_is_silent(job: Job) -> None:
    job.write_launch_status(0)
    for rank in (4, 5, 6):
        job.write_record(rank, "start")
        job.write_log(rank, "cn02")
    assert job.poll_after(TIMEOUT_S + MARGIN_S - 1) is None
    checklist = job.poll_after(TIMEOUT_S + MARGIN_S)
    assert checklist is not None
    printed = [line for line in render_launch_checklist(checklist) if line.startswith("  - ")]
    assert [line.partition(";")[0] for line in printed] == [
        "  - cn02: its sidecar has not reported on the launch",
        "  - worker_w7 (rank 7) on cn02: none of its processes was found",
        "  - cn02: /data/out does not exist",
    ]


@pytest.mark.parametrize(
    "status",
    [
        {"attempt": 3, "launch": {"final": True, "checks": [{"name": "processes", "passed": True, "lacking": []}]}},
        {"launch": {"final": True, "checks": []}},
        {"launch": {}},
        {"final": True},
        {},
    ],
)
def test_a_status_without_this_launch_counts_as_silence(status: dict[str, Any], job: Job) -> None:
    job.write_launch_status(0)
    job.write_status(1, status)
    checklist = job.poll_after(TIMEOUT_S + MARGIN_S)
    assert checklist is not None
    assert checklist.faults("issue")[0].node == "cn02"


def test_a_job_that_ends_early_is_checked_by_its_last_status(job: Job) -> None:
    job.write_launch_status(0)
    workers = job.workers(1)
    workers[5] = dataclasses.replace(workers[5], up=False, reason="app_error", evidence="exit status 3")
    job.write_launch_status(1, workers, final=False)
    status = run_files.read_json(job.run_dir / run_files.STATUS_DIR / "cn02.json") or {}
    job.write_status(1, {"launch": status["launch"], "final": True})
    checklist = job.check.conclude(5)
    (fault,) = checklist.faults("issue")
    (line,) = [line for line in render_launch_checklist(checklist) if line.startswith("  - ")]
    assert line.startswith("  - worker_w5 (rank 5) on cn02: it has ended: app_error (exit status 3); ")
    assert fault.cure == "read the end of its log, cn02_worker_w5.err"
    assert job.poll_after(6.0) is checklist


def test_a_job_without_sidecars_is_checked_by_its_records(tmp_path: Path) -> None:
    job = Job(tmp_path, "cn01", workers=2, watched=False)
    job.write_record(0, "start")
    job.write_log(0, "cn01")
    assert job.poll_after(1.0) is None
    job.write_record(1, "start")
    job.write_log(1, "cn01")
    checklist = job.poll_after(3.0)
    assert checklist is not None
    assert checklist.is_verified
    assert [result.name for result in checklist.results] == ["processes", "count", "logs", "log_lines", "output_dir"]


def test_records_give_the_last_run_and_its_end(tmp_path: Path) -> None:
    job = Job(tmp_path, "cn01", workers=3, watched=False)
    job.write_record(0, "start")
    job.write_record(0, "exit", code=1, signal=None, end=START + 1)
    job.write_record(0, "start", restart=1)
    job.write_log(0, "cn01", "_r1")
    job.write_record(1, "start")
    job.write_record(1, "exit", code=3, signal=None, end=START + 1)
    job.write_log(1, "cn01")
    job.write_record(2, "exit", pid=None, code=127, signal=None, error="cannot start 'x': No such file", end=START + 1)
    assert job.poll_after(TIMEOUT_S - 1) is None
    checklist = job.poll_after(TIMEOUT_S)
    assert checklist is not None
    found = {(result.name, fault.rank): fault.found for result in checklist.results for fault in result.faults}
    assert found[("count", 1)].startswith("it has ended: app_error (exit status 3")
    assert "cannot start 'x'" in found[("processes", 2)]
    assert not [key for key in found if key[1] == 0]


def test_the_number_of_printed_faults_is_limited(tmp_path: Path) -> None:
    job = Job(tmp_path, "cn01", workers=50)
    job.write_launch_status(
        0, {rank: dataclasses.replace(worker, log_bytes=0) for rank, worker in job.workers(0).items()}
    )
    checklist = job.poll_after(TIMEOUT_S)
    assert checklist is not None
    lines = render_launch_checklist(checklist)
    assert sum(line.startswith("  - worker") for line in lines) == MOST_LINES
    assert lines[-1] == "  - and 30 more: 0 of 50 workers have logged a first line"


def test_the_checklist_can_be_printed_in_any_locale(job: Job) -> None:
    program = (
        "from exporter.contract.report import LaunchResult;"
        "from launcher.run.launch_check import LaunchChecklist, render_launch_checklist;"
        "from launcher.run.job_log import log_raw_line;"
        "found = LaunchChecklist(1.0, (LaunchResult(name='count', level='issue', passed=True, detail='x'),));"
        "[log_raw_line(l) for l in render_launch_checklist(found)]"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.decode() == "✓ x\n\n✓ Job launch verification PASSED\n"


# -- with a real sidecar over real wrappers ------------------------------------------------------

WORK = """
import contextlib, sys, time
print("Processed 1/9 items", flush=True)
with contextlib.suppress(OSError):
    open(sys.argv[1], "w").write("x")
time.sleep(600)
"""


class RealLaunch:
    """A real launch on this machine: a sidecar, wrappers and their workers."""

    def __init__(self, run_dir: Path, output: Path, *, gpus: int, workers: int, timeout_s: float) -> None:
        self.output = output
        spec = job_spec(
            resources={"gpus_per_node": gpus * workers},
            workers=[{"count": workers, "gpus": gpus, "command": "true"}],
            paths={"output_dir": str(output)},
            monitoring={"launch_timeout": timeout_s, "check_interval": 0.2},
            progress={"total_items": 18},
        )
        self.plan = plan_of(spec, local=True)
        self.plan = dataclasses.replace(self.plan, manifest=dataclasses.replace(self.plan.manifest, run_dir=run_dir))
        write_manifest(self.plan.manifest)
        run_files.write_job_state(str(run_dir), "running")
        self.start = time.time()
        self.check = JobLaunchCheck(self.plan, RunFacts("4459", run_dir, (NODE,), 0, self.start))
        self.wrappers = Wrappers(run_dir)
        environment = clean_environment(
            GPUJOB_NODE=NODE, GPUJOB_JOB_ID="4459", GPUJOB_START_TIME=repr(self.start), GPUJOB_ATTEMPT="0"
        )
        with (run_dir / "sidecar.log").open("wb") as log:
            argv = [sys.executable, "-I", "-m", "exporter", "sidecar", "--run-dir", str(run_dir)]
            self.sidecar = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)

    def start_worker(self, rank: int, devices: str) -> None:
        """Start the worker with this rank."""
        task = self.plan.tasks[rank].task
        output = self.output / f"output_worker_{rank}.jsonl"
        argv = ["env", f"CUDA_VISIBLE_DEVICES={devices}", sys.executable, "-c", WORK, str(output)]
        self.wrappers.start(task, *argv)

    def checklist(self) -> LaunchChecklist:
        found: LaunchChecklist = until(lambda: self.check.poll(time.time() - self.start), "the checklist", 40)
        return found

    def close(self) -> None:
        self.sidecar.kill()
        self.sidecar.wait()
        self.wrappers.close()


@pytest.fixture
def real_launches() -> Iterator[list[RealLaunch]]:
    started: list[RealLaunch] = []
    yield started
    for launch in started:
        launch.close()


def test_a_real_launch_is_verified(tmp_path: Path, real_launches: list[RealLaunch]) -> None:
    (tmp_path / "out").mkdir()
    launch = RealLaunch(tmp_path, tmp_path / "out", gpus=0, workers=2, timeout_s=60)
    real_launches.append(launch)
    for rank in range(2):
        launch.start_worker(rank, "")
    checklist = launch.checklist()
    assert checklist.is_verified, text_of(checklist)
    assert not checklist.faults("warning"), text_of(checklist)
    names = ["processes", "count", "logs", "log_lines", "output_dir", "output", "progress"]
    assert [result.name for result in checklist.results] == names
    assert checklist.elapsed_s < 30


def test_a_real_launch_with_three_faults_reports_all(
    tmp_path: Path, real_launches: list[RealLaunch], locked: Path
) -> None:
    """Worker 1 never starts, worker 2 has one GPU too many, and the output directory is not writable."""
    launch = RealLaunch(tmp_path, locked, gpus=1, workers=3, timeout_s=8)
    real_launches.append(launch)
    launch.start_worker(0, "0")
    launch.start_worker(2, "2,3")
    checklist = launch.checklist()
    assert not checklist.is_verified
    issues = [
        (fault.worker, fault.found)
        for result in checklist.results
        for fault in result.faults
        if result.level == "issue"
    ]
    assert ("worker_w1", "none of its processes was found") in issues
    assert (
        "worker_w2",
        'CUDA_VISIBLE_DEVICES is "2,3", 2 devices; the plan gives it 1 device (GPU 2)',
    ) in issues
    assert (None, f"{locked} cannot be written to") in issues
    assert "worker_w0" not in [worker for worker, _ in issues]
