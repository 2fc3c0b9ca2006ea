"""Slurm options of a job beyond its resources, as seen by its processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import JobSpace

pytestmark = pytest.mark.slurm

QUIET: dict[str, Any] = {"monitoring": {"check_interval": 1, "linger": 0}, "patterns": {"output": None}}


def text(run_dir: Path, *names: str) -> str:
    return "".join((run_dir / name).read_text() for name in names)


def test_prefill_and_decode_run_in_two_components_of_one_job(jobs: JobSpace) -> None:
    """Each worker runs in its own component, the sidecars in both."""
    command = 'echo "$GPUJOB_WORKER $GPUJOB_NODE $GPUJOB_NODES $CUDA_VISIBLE_DEVICES"'
    job = jobs.submit(
        {
            "name": "apart",
            "resources": {"gpus_per_node": 2, "prefill_workers": 2, "decode_workers": 1, "gpus_per_prefill": 1}
            | {"gpus_per_decode": 4},
            "workers": [{"role": role, "command": command, "shell": True} for role in ("prefill", "decode")],
            "slurm": {"partition": "gpu", "time_limit": "00:05:00", "het": True},
            **QUIET,
        }
    )
    assert job.run_dir.name.startswith(f"{job.job_id}_2P_1D_")
    state = job.wait()
    log = text(job.run_dir, "log.out", "log.err")
    assert state == "COMPLETED", log
    first, *others = hosts = job.json("orchestrator.json")["hosts"]
    assert len(set(hosts)) == 3, log
    outputs = {
        path.name.removesuffix(".out"): path.read_text().split()
        for path in job.run_dir.glob("*.out")
        if path.name.startswith("node")
    }
    nodes = ",".join(hosts)
    assert outputs == {
        f"{first}_prefill_w0": ["prefill_w0", first, nodes, "0"],
        f"{first}_prefill_w1": ["prefill_w1", first, nodes, "1"],
        f"{others[0]}_decode_w0": ["decode_w0", others[0], nodes, "0,1"],
        f"{others[1]}_decode_w0": ["decode_w0", others[1], nodes, "0,1"],
    }
    listed = job.space.cluster.run(["squeue", "-h", "-t", "all", "-j", job.job_id, "-o", "%i"]).stdout
    assert listed.split() == [f"{job.job_id}+0", f"{job.job_id}+1"]
    assert {path.stem for path in (job.run_dir / "sidecars").glob("*.json")} == set(hosts)
    assert job.report()["state"] == "COMPLETED"


def test_modules_script_secrets_and_signal_reach_the_workers(jobs: JobSpace) -> None:
    (jobs.directory / "env.sh").write_text("export FROM_SCRIPT=script\n")
    jobs.own(jobs.directory)
    command = 'test "$FROM_SCRIPT$FROM_PREAMBLE" = "scriptlines 1" && test "${#HF_TOKEN}" = 8 && echo "$ORDER"'
    spec = {
        "name": "prepared",
        "workers": [{"command": command, "shell": True}],
        "setup": {
            "script": "env.sh",
            "preamble": 'export FROM_PREAMBLE="lines $(ls env.sh | wc -l)"\nexport ORDER=$FROM_SCRIPT,$FROM_PREAMBLE',
        },
        "secrets": ["HF_TOKEN"],
        "slurm": {"partition": "gpu", "time_limit": "00:05:00", "signal": "USR1@60", "requeue": {}},
        **QUIET,
    }
    # as if submitted from the batch step of a heterogeneous job
    outer = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "elsewhere"}
    job = jobs.submit(spec, env={"HF_TOKEN": "a secret", **outer})
    state = job.wait()
    assert state == "COMPLETED", text(job.run_dir, "log.out", "log.err")
    (out,) = job.run_dir.glob("*_worker_w0.out")
    assert out.read_text() == "script,lines 1\n"
    files_with_secret = [
        path.name for path in job.run_dir.rglob("*") if path.is_file() and b"a secret" in path.read_bytes()
    ]
    assert files_with_secret == [], "secrets.json is removed with the job"
    assert "Requeue=0" in jobs.cluster.run(["scontrol", "show", "job", job.job_id]).stdout


def test_a_missing_module_ends_the_job_before_it_starts(jobs: JobSpace) -> None:
    job = jobs.submit(
        {
            "name": "unprepared",
            "workers": [{"command": "true"}],
            "setup": {"modules": ["no-such-module"]},
            "slurm": {"partition": "gpu", "time_limit": "00:05:00"},
            **QUIET,
        }
    )
    assert job.wait() == "FAILED"
    last = text(job.run_dir, "log.err").splitlines()[-1]
    assert last == "gpujob: the module no-such-module cannot be loaded; nothing was started"
    assert not list((job.run_dir / "workers").iterdir())


def test_a_job_with_a_dependency_waits_for_the_other_job(jobs: JobSpace) -> None:
    spec = {
        "name": "first",
        "workers": [{"command": "sleep 3"}],
        "slurm": {"partition": "gpu", "time_limit": "00:05:00"},
        **QUIET,
    }
    first = jobs.submit(spec)
    second = jobs.submit({**spec, "slurm": {**spec["slurm"], "dependency": f"afterok:{first.job_id}"}})
    assert (first.wait(), second.wait()) == ("COMPLETED", "COMPLETED")
    ended = first.report()["end"]
    assert second.report()["start"] >= ended


def test_workers_in_both_components_are_asked_to_end(jobs: JobSpace) -> None:
    """A failure in the first component ends the worker of the second, with time to save its work."""
    save = 'trap "echo saved; exit 0" TERM; touch up; while :; do sleep 0.1; done'
    fail = "until [ -e up ]; do sleep 0.2; done; exit 3"
    job = jobs.submit(
        {
            "name": "apart",
            "resources": {"gpus_per_node": 2, "prefill_workers": 1, "decode_workers": 1, "gpus_per_prefill": 2}
            | {"gpus_per_decode": 2},
            "workers": [
                {"role": "prefill", "command": fail, "shell": True},
                {"role": "decode", "command": save, "shell": True},
            ],
            "workdir": str(jobs.directory),
            "slurm": {"partition": "gpu", "time_limit": "00:05:00", "het": True},
            **QUIET,
        }
    )
    assert job.wait() == "FAILED"
    log = text(job.run_dir, "log.out", "log.err")
    (out,) = job.run_dir.glob("*_decode_w0.out")
    assert out.read_text() == "saved\n", log
    hosts = job.json("orchestrator.json")["hosts"]
    left = [
        command for host in hosts for _, command in jobs.cluster.node_processes(host) if str(job.run_dir) in command
    ]
    assert left == [], log
    ends = {worker["worker"]: worker["exit"] for worker in job.report()["workers"]}
    assert (ends["prefill_w0"]["reason"], ends["prefill_w0"]["code"]) == ("app_error", 3)
    assert (ends["decode_w0"]["reason"], ends["decode_w0"]["code"]) == ("completed", 0)
