"""The batch step of a Slurm job, with a fake srun that runs the tasks on this machine.

The jobs run concurrently, each in its own folder.
"""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.run.slurm_end import NOTICE_GRACE_S
from launcher.run.stop_reasons import REQUEUE_MARGIN_S
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import gpujob, poll, processes_with, read_json
from tests.support.scenarios import Ended, Results, Scenarios


@dataclass(kw_only=True)
class Batch(Ended):
    """A batch step that has ended."""

    slurm: FakeSlurm


JOB_IDS = itertools.count(4459)  # each its own: at its end, a job ends what is left of its id on the node


class Submitted:
    """A submitted job, and its start as by slurmd."""

    def __init__(self, folder: Path, command: str, **over: Any) -> None:
        folder.mkdir()
        self.slurm = FakeSlurm(folder / "fake")
        self.job_id = str(next(JOB_IDS))
        self.slurm.say("sbatch", "out", self.job_id)
        self._work = folder / "work"
        self._work.mkdir()
        job = {
            "name": "steps",
            "resources": {"nodes": 2},
            "workers": [{"count": 4, "command": command}],
            "monitoring": {"check_interval": 0.5, "linger": 0},
            **over,
        }
        (self._work / "job.yaml").write_text(yaml.safe_dump(job))
        done = gpujob("submit", "job.yaml", "--json", cwd=self._work, env=self.slurm.environment())
        self.run_dir = Path(json.loads(done.stdout)["run_dir"])

    def run(self, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None, **variables: str) -> Batch:
        """Run the batch script to its end, with the variables of slurmd."""
        environment = self.slurm.environment(
            SLURM_JOB_ID=self.job_id,
            SLURM_JOB_NODELIST="cn[01-02]",
            SLURM_NTASKS_PER_NODE="1",
            SLURM_CPUS_PER_TASK="2",
            SLURM_MEM_PER_NODE="1024",
            **variables,
        )
        argv = ["bash", str(self.run_dir / "sbatch_script.sh")]
        with (self.run_dir / "log.out").open("ab") as out, (self.run_dir / "log.err").open("ab") as err:
            step = subprocess.Popen(argv, cwd=self._work, env=environment, stdout=out, stderr=err)
        try:
            if meanwhile is not None:
                meanwhile(step)
            return Batch(self.run_dir, step.wait(90), slurm=self.slurm)
        finally:
            step.kill()
            step.wait()


WORKER = """
import json, os, urllib.request
print(*(os.environ[name] for name in ("GPUJOB_RANK", "GPUJOB_NODE", "SLURMD_NODENAME")), flush=True)
with open(os.environ["GPUJOB_PROGRESS_FILE"], "a") as out:
    print(json.dumps({"done": 1, "total": 1}), file=out)
figure = json.dumps({"name": "rank " + os.environ["GPUJOB_RANK"], "value": 1.5}).encode()
token = {"Authorization": "Bearer " + os.environ["GPUJOB_TOKEN"]}
proxyless = urllib.request.build_opener(urllib.request.ProxyHandler({}))
proxyless.open(urllib.request.Request(os.environ["GPUJOB_FOM_URL"], figure, token), timeout=60)
"""  # a worker that reports progress and a figure of merit


MAX_CONCURRENT = 3  # scenarios: the fake Slurm commands must answer within the timeouts of the real ones
scenario = Scenarios[Path, Batch]("batches")


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results[Batch]]:
    with scenario.run_in(tmp_path_factory.mktemp("batch"), request, MAX_CONCURRENT) as batches:
        yield batches


def await_workers(job: Submitted, count: int) -> None:
    """Wait until the job runs and ``count`` workers have printed that they are up, with their traps set."""
    poll(lambda: read_json(job.run_dir / "state.json").get("phase") == "running", "phase running")
    poll(lambda: [path.read_text() for path in job.run_dir.glob("cn*_w*.out")] == ["up\n"] * count, "all workers")


@scenario
def completed(folder: Path) -> Batch:
    script = folder.with_name("worker.py")
    script.write_text(WORKER)
    job = Submitted(folder, shlex.join([sys.executable, str(script)]))
    return job.run(SLURM_RESTART_COUNT="1")


@scenario
def refused_step(folder: Path) -> Batch:
    job = Submitted(folder, "true")
    job.slurm.say("srun", "status", 1)
    job.slurm.say("srun", "err", "srun: error: Unable to create step for job 1: Invalid credential\n")
    return job.run()


@scenario
def refused(folder: Path) -> Batch:
    over = {"slurm": {"time_limit": "01:00:00", "requeue": {"time_limit": True, "max": 2}}}
    job = Submitted(folder, "sh -c 'trap \"exit 143\" TERM; echo up; while :; do sleep 0.05; done'", **over)
    job.slurm.say("scontrol", "status", 1)
    job.slurm.say("scontrol", "err", "scontrol: error: Requeue is disabled for the job\n")
    return job.run(SLURM_JOB_END_TIME=str(int(time.time() + REQUEUE_MARGIN_S + 1.0)), SLURM_RESTART_COUNT="1")


def run_with_an_end_after_the_warning(folder: Path, *, total: int) -> Batch:
    """The job completes after the warning signal, although its helper would run forever."""
    over = {
        "progress": {"total_items": total},
        "slurm": {"time_limit": "01:00:00", "signal": "USR1@120", "requeue": {"time_limit": True}},
        "resources": {"nodes": 1},
    }
    enough = shlex.quote(str(folder / "enough"))
    script = f"trap '' USR1; echo up; while [ ! -e {enough} ]; do sleep 0.05; done; echo Processed 5/{total} items"
    helper = "trap '' USR1; echo up; while :; do sleep 0.05; done"
    workers = [
        {"count": 4, "command": ["sh", "-c", script]},
        {"role": "helper", "critical": False, "command": ["sh", "-c", helper]},
    ]
    job = Submitted(folder, "", **over, workers=workers)

    def warn(step: subprocess.Popen[bytes]) -> None:
        await_workers(job, 5)
        step.send_signal(signal.SIGUSR1)
        poll(lambda: read_json(job.run_dir / "state.json").get("stop"), "the stop")
        (folder / "enough").touch()
        poll(lambda: (job.run_dir / "report.json").exists(), "the report")
        step.terminate()  # as Slurm does to a requeued job

    end = time.time() + REQUEUE_MARGIN_S + 600.0
    return job.run(warn, SLURM_JOB_END_TIME=str(int(end)))


@scenario
def finished(folder: Path) -> Batch:
    return run_with_an_end_after_the_warning(folder, total=5)


@scenario
def unfinished(folder: Path) -> Batch:
    return run_with_an_end_after_the_warning(folder, total=50)


@scenario
def killed_srun(folder: Path) -> Batch:
    restart = {"restart": {"max": 1, "backoff": 0.1}}
    script = f"echo up; while [ ! -e {shlex.quote(str(folder / 'enough'))} ]; do sleep 0.05; done"
    worker = {"count": 1, "command": shlex.join(["sh", "-c", script]), **restart}
    job = Submitted(folder, "true", resources={"nodes": 1}, workers=[worker], monitoring={"enabled": False})

    def kill(_: subprocess.Popen[bytes]) -> None:
        first, second = (job.run_dir / f"workers/worker_w0_rank0_a0_r{run}.start.json" for run in (0, 1))
        wrapper = int(poll(lambda: read_json(first), "the first run")["wrapper_pid"])
        poll((job.slurm.folder / "steps" / f"{job.job_id}.0").exists, "the complete step")
        own_folder = str(job.slurm.folder.parent)
        (srun,) = (pid for pid, argv in processes_with("--job-name=worker_w0").items() if own_folder in " ".join(argv))
        os.kill(srun, signal.SIGKILL)
        poll(lambda: read_json(second), "the second run")
        assert not os.path.exists(f"/proc/{wrapper}/exe")
        (folder / "enough").touch()

    return job.run(kill)


@scenario
def killed_wrapper(folder: Path) -> Batch:
    """The OOM killer takes all processes of a step, and slurmstepd reports it."""
    line = "slurmstepd-cn01: error: Detected 1 oom_kill event in StepId=$SLURM_JOB_ID.$SLURM_STEP_ID. Some of ..."
    script = 'cd "$GPUJOB_RUN_DIR"; until [ -e workers/*.start.json ]; do sleep 0.05; done; '
    script += f'echo "{line}" >> log.err; kill -9 $PPID; exec sleep 60'
    worker = {"count": 1, "command": ["sh", "-c", script]}
    job = Submitted(folder, "true", resources={"nodes": 1}, workers=[worker], monitoring={"enabled": False})
    return job.run()


def run_with_a_time_limit(folder: Path, shown: str, log_text: str = "", *, ends_in_s: float = 3600.0) -> Batch:
    """Slurm sends SIGTERM to one worker, a service, and much later to the batch step and the other workers.

    Meanwhile ``scontrol show job`` prints ``shown``, and ``log_text`` is added late to the error log of the job. By
    the clock, the allocation ends in ``ends_in_s``.
    """
    enough = shlex.quote(str(folder / "enough"))
    rest = f"trap 'until [ -e {enough} ]; do sleep 0.05; done; exit 143' TERM; echo up; while :; do sleep 0.05; done"
    workers = [
        {
            "role": "first",
            "count": 1,
            "service": True,
            "command": ["sh", "-c", "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"],
        },
        {"role": "rest", "count": 3, "command": ["sh", "-c", rest]},
    ]
    job = Submitted(folder, "", workers=workers, slurm={"time_limit": "01:00:00"}, monitoring={"enabled": False})
    job.slurm.say("scontrol", "job", f"   {shown} Dependency=(null)\n")

    def end_as_slurm_does(step: subprocess.Popen[bytes]) -> None:
        await_workers(job, 4)
        first, *others = (
            int(read_json(job.run_dir / f"workers/{name}_a0_r0.start.json")["wrapper_pid"])
            for name in ("first_w0_rank0", *(f"rest_w{n}_rank{n + 1}" for n in range(3)))
        )
        os.kill(first, signal.SIGTERM)
        if log_text:
            time.sleep(NOTICE_GRACE_S + 1.0)
            (job.run_dir / "log.err").open("a").write(log_text.format(job.job_id))
        poll(lambda: read_json(job.run_dir / "state.json").get("stop"), "the stop")
        step.terminate()
        poll(lambda: read_json(job.run_dir / "state.json")["stop"]["reason"] == "time_limit", "its reason")
        for wrapper in others:
            os.kill(wrapper, signal.SIGTERM)
        (folder / "enough").touch()

    return job.run(end_as_slurm_does, SLURM_JOB_END_TIME=str(int(time.time() + ends_in_s)))


@scenario
def time_limit_in_the_job_state(folder: Path) -> Batch:
    return run_with_a_time_limit(folder, "JobState=COMPLETING Reason=TimeLimit")


@scenario
def time_limit_in_the_error_log(folder: Path) -> Batch:
    log_text = "slurmstepd-cn01: error: *** JOB {} ON cn01 CANCELLED AT 2026-11-22T19:41:17 DUE TO TIME LIMIT ***\n"
    return run_with_a_time_limit(folder, "JobState=COMPLETING Reason=None", log_text)


@scenario
def time_limit_by_the_clock(folder: Path) -> Batch:
    return run_with_a_time_limit(folder, "JobState=RUNNING Reason=None", ends_in_s=5.0)


def test_each_worker_is_a_named_step(completed: Batch) -> None:
    assert completed.outcome == 0, completed.logs()
    report, calls = completed.report, completed.slurm.calls("srun")
    assert (report["state"], report["attempt"], report["nodes"]) == ("COMPLETED", 1, ["cn01", "cn02"])
    assert "\n- attempt: 2, after report_a0.md\n" in completed.log("report.md")
    workers = [f"worker_w{n}" for n in range(4)]
    assert sorted(call["options"]["job-name"] for call in calls) == ["nodes", "sidecar", *workers]
    assert {call["options"]["nodelist"] for call in calls} == {"cn01,cn02", "cn01", "cn02"}
    assert not [name for call in calls for name in call["env"] if name.startswith(("SLURM_NTASKS", "SLURM_MEM"))]
    by_srun = {call["options"]["output"] for call in calls if call["options"]["job-name"] in workers}
    assert by_srun == {"all"}, "srun writes logs on its own node, which others see late"
    for rank, node in enumerate(["cn01", "cn01", "cn02", "cn02"]):
        assert (completed.run_dir / f"{node}_worker_w{rank}_a1.out").read_text() == f"{rank} {node} {node}\n"
        start = read_json(completed.run_dir / f"workers/worker_w{rank}_rank{rank}_a1_r0.start.json")
        assert (start["node"], start["step"] is not None) == (node, True)
        progress = (completed.run_dir / f"progress/{node}_worker_w{rank}_a1.jsonl").read_text()
        assert json.loads(progress) == {"done": 1, "total": 1}
        figures = read_json(completed.run_dir / f"status/{node}.json")["figures_of_merit"]
        assert (f"rank_{rank}", 1.5) in [(figure["name"], figure["value"]) for figure in figures]
        assert len(figures) == 2
    assert report["monitoring"]["nodes_with_final_values"] == ["cn01", "cn02"]
    assert "All 2 sidecars listen" in completed.log()
    assert not (completed.run_dir / "targets.json").exists()


def test_a_step_that_does_not_start_is_reported(refused_step: Batch) -> None:
    assert refused_step.outcome == 1
    assert refused_step.report["cause"]["reason"] == "launch_failed"
    assert "Invalid credential" in refused_step.log("log.err")
    assert "could not run on cn01, cn02; the job runs without monitoring there" in refused_step.log()


def test_a_refused_requeue_is_logged(refused: Batch) -> None:
    assert (refused.report["state"], refused.report["requeued"], refused.outcome) == ("TIMEOUT", False, 3)
    assert "The job could not be requeued: scontrol exited with 1: Requeue is disabled for the job" in refused.log()


def test_a_job_that_completes_after_the_warning_is_not_requeued(finished: Batch) -> None:
    report = finished.report
    assert (report["state"], report["requeued"], finished.outcome) == ("COMPLETED", False, 0), finished.log()
    assert report["stopped"]["reason"] == "completed"
    assert "Stop cancelled: the work is complete" in finished.log()
    assert not [call for call in finished.slurm.calls("scontrol") if "requeue" in call["argv"]]


def test_a_job_with_saved_state_is_requeued_after_the_warning(unfinished: Batch) -> None:
    assert (unfinished.report["state"], unfinished.report["requeued"]) == ("TIMEOUT", True), unfinished.log()
    assert "- requeued: the job continues in its next attempt" in unfinished.log("report.md")
    assert [call for call in unfinished.slurm.calls("scontrol") if "requeue" in call["argv"]]


def test_the_step_of_a_killed_srun_ends_before_the_next_run(killed_srun: Batch) -> None:
    assert (killed_srun.report["state"], killed_srun.outcome) == ("COMPLETED", 0), killed_srun.logs()
    assert [end["reason"] for end in killed_srun.report["workers"][0]["exits"]] == ["killed_unknown", "completed"]
    step = f"{killed_srun.report['job_id']}.0"
    assert ["--signal=KILL", step] in [call["argv"] for call in killed_srun.slurm.calls("scancel")]


def test_a_step_killed_for_lack_of_memory_with_its_wrapper_has_that_reason(killed_wrapper: Batch) -> None:
    assert killed_wrapper.report["cause"]["reason"] == "host_oom", killed_wrapper.logs()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("time_limit_in_the_job_state", "Slurm: the time limit was reached"),
        ("time_limit_in_the_error_log", "Slurm: the time limit was reached"),
        ("time_limit_by_the_clock", "SIGTERM at the time limit"),
    ],
)
def test_a_time_limit_is_the_cause_if_a_worker_gets_sigterm_first(
    name: str, cause: str, batches: Results[Batch]
) -> None:
    batch = batches(name)
    assert (batch.report["state"], batch.outcome) == ("TIMEOUT", 3), batch.logs()
    assert batch.report["stopped"]["cause"].startswith(cause), "the sender follows the cause"
    assert batch.report["cause"] is None
    reasons = {worker["worker"]: worker["exit"]["reason"] for worker in batch.report["workers"]}
    assert reasons == {"first_w0": "completed", **{f"rest_w{n}": "time_limit" for n in range(3)}}
