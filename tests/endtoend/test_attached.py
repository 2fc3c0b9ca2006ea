"""Jobs that gpujob only watches, with a sidecar on each node in an overlapping step."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import GPUJOB, JobSpace

pytestmark = pytest.mark.slurm

EXPORTER = GPUJOB.with_name("gpujob-exporter")
WORKER = """
import json, os, sys, time
rank, items, pause = os.environ["SLURM_PROCID"], int(sys.argv[1]), float(sys.argv[2])
with open(f"worker_{rank}.log", "w", buffering=1) as log, open(f"output_worker_{rank}.json", "w", buffering=1) as out:
    for item in range(1, items + 1):
        out.write(json.dumps({"item": item}) + "\\n")
        log.write(f"Processed {item}/50 items\\n")
        time.sleep(pause)
        while item == 5 and not os.path.exists((*sys.argv, ".")[3]):
            time.sleep(0.1)
"""
PRINTING_SCRIPT = """#!/bin/sh
srun python3 -u -c "import os, time
for item in range(1, 41): print(f'Processed {item}/40 items'); time.sleep(0.1)
while not os.path.exists('done'): time.sleep(0.1)"
"""
SCRIPT = """#!/bin/bash
srun --overlap --ntasks=$SLURM_NNODES --ntasks-per-node=1 {exporter} sidecar --web.listen-address :0 --job-name train \
    --num-workers 4 --total-items 200 --output-dir . --log-dir . {options} &
SIDECARS=$!
srun --overlap --ntasks-per-node=2 python3 worker.py {arguments}
{then}
wait $SIDECARS
echo $? > status
"""


def submit(jobs: JobSpace, arguments: str, then: str = "", options: str = "", *limits: str) -> int:
    """Submit a batch job on two nodes."""
    (jobs.directory / "worker.py").write_text(WORKER)
    script = SCRIPT.format(exporter=EXPORTER, arguments=arguments, then=then, options=options)
    (jobs.directory / "job.sh").write_text(script)
    jobs.own(jobs.directory)
    options_of_job = ("--parsable", "--nodes=2", "--ntasks-per-node=2", "--partition=gpu", "--output=job.out", *limits)
    done = jobs.cluster.run(
        ["sbatch", *options_of_job, "job.sh"], user=jobs.user, cwd=jobs.directory, env={"GPUJOB_HISTORY_DIR": ""}
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def run_dir(jobs: JobSpace, job_id: int) -> Path:
    (found,) = (jobs.directory / "logs").glob(f"{job_id}_train_*")
    return found


def output(jobs: JobSpace) -> str:
    return (jobs.directory / "job.out").read_text()


def on(jobs: JobSpace, node: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a command of gpujob on a node."""
    done = jobs.cluster.on(node, [GPUJOB, *words, "--json"], user=jobs.user, cwd=jobs.directory)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def ended_report(jobs: JobSpace, node: str, directory: Path) -> tuple[int, dict[str, Any]] | None:
    """The report as seen from a node; None while the job runs."""
    found = on(jobs, node, "report", str(directory))
    return None if found[0] == 10 else found


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_sidecars_of_two_nodes_write_one_verified_report(jobs: JobSpace) -> None:
    job_id = submit(jobs, "50 0.1 enough")
    jobs.cluster.wait_for(lambda: list(jobs.directory.glob("logs/*/status/*.json"))[1:] or None, 60, "two statuses")
    directory = run_dir(jobs, job_id)
    jobs.cluster.wait_for(lambda: read_json(directory / "state.json")["phase"] == "running" or None, 60, "the phase")
    for node in (jobs.cluster.node_names[0], jobs.cluster.node_names[3]):  # of the job, and another one
        assert on(jobs, node, "watch", str(directory), "--once")[1]["state"] == "RUNNING", node
    (jobs.directory / "enough").touch()
    assert jobs.cluster.wait_for_job(job_id, 180) == "COMPLETED", output(jobs)
    assert (jobs.directory / "status").read_text() == "0\n", output(jobs)
    report = read_json(directory / "report.json")
    assert (report["state"], report["verification"]["verified"], len(report["nodes"])) == ("COMPLETED", True, 2)
    assert [(worker["rank"], worker["node"], worker["items"]) for worker in report["workers"]] == [
        (rank, report["nodes"][rank // 2], 50) for rank in range(4)
    ]
    assert report["monitoring"]["nodes_without"] == []
    assert output(jobs).count(": COMPLETED and verified\n") == 1
    for node in (report["nodes"][1], jobs.cluster.node_names[3]):
        assert on(jobs, node, "report", str(directory)) == (0, report)


def test_the_report_of_killed_sidecars_is_made_on_demand(jobs: JobSpace) -> None:
    job_id = submit(jobs, "50 0.5", "kill $SIDECARS")  # then srun sends SIGKILL to its tasks
    jobs.cluster.wait_for_job(job_id, 180)
    directory = run_dir(jobs, job_id)
    assert not (directory / "report.json").exists()
    for node in (read_json(directory / "orchestrator.json")["hosts"][0], jobs.cluster.node_names[3]):
        status, report = jobs.cluster.wait_for(partial(ended_report, jobs, node, directory), 60, "the end")
        assert (status, report["state"], report["verification"]["verified"]) == (0, "COMPLETED", True)


def test_short_output_gives_the_step_exit_status_8(jobs: JobSpace) -> None:
    job_id = submit(jobs, "40 0.5")
    jobs.cluster.wait_for_job(job_id, 180)
    assert (jobs.directory / "status").read_text() == "8\n"
    report = read_json(run_dir(jobs, job_id) / "report.json")
    failed = [check["detail"] for check in report["verification"]["checks"] if check["passed"] is False]
    assert failed == ["160 of 200 items done; 99% are enough"]


def test_a_cancelled_job_leaves_its_report(jobs: JobSpace) -> None:
    job_id = submit(jobs, "50 10")
    jobs.cluster.wait_for(lambda: list(jobs.directory.glob("logs/*/workers/*.json"))[3:] or None, 60, "four workers")
    jobs.cluster.run(["scancel", str(job_id)], user=jobs.user, check=True)
    jobs.cluster.wait_for_job(job_id, 180)
    directory = run_dir(jobs, job_id)
    report = jobs.cluster.wait_for(
        lambda: read_json(directory / "report.json") if (directory / "report.json").exists() else None, 40, "report"
    )
    assert (report["state"], report["exit_status"]) == ("FAILED", 1)
    signals = {worker["exit"]["signal"] for worker in report["workers"]}
    assert "SIGTERM" in signals, signals  # a status may be lost if the process is gone too soon


def test_attach_needs_only_the_id_of_a_slurm_job(jobs: JobSpace) -> None:
    cluster, folder = jobs.cluster, jobs.directory / "elsewhere"
    folder.mkdir()
    (jobs.directory / "job.sh").write_text(PRINTING_SCRIPT)
    jobs.own(jobs.directory)
    place: dict[str, Any] = {"user": jobs.user, "cwd": folder, "env": {"XDG_STATE_HOME": str(folder)}}
    words = ("--partition=gpu", "--job-name=train", "--output=job.out", f"--chdir={jobs.directory}", "../job.sh")
    job_id = int(cluster.run(["sbatch", "--parsable", *words], **place, check=True).stdout)
    cluster.wait_for(lambda: (jobs.directory / "job.out").exists() and "40/40" in output(jobs), 60, "the work")
    node = cluster.run(["squeue", "-h", "-j", str(job_id), "-o", "%N"], check=True).stdout.strip()
    attach = cluster.popen([GPUJOB, "attach", "--job", str(job_id)], node=node, **place)
    (found,) = cluster.wait_for(lambda: list(folder.glob("logs/*/status/*.json")), 60, "a status")
    connect: list[str | Path] = [GPUJOB, "connect", str(job_id)]
    shell = cluster.on(cluster.node_names[-1], connect, **place, stdin='echo "$(hostname) $PWD"\n')
    assert (shell.returncode, shell.stdout) == (0, f"{node} {jobs.directory}\n"), shell.stderr
    (jobs.directory / "done").touch()
    _, said = attach.communicate(timeout=120)
    report = read_json(found.parents[1] / "report.json")
    assert (attach.returncode, report["state"], report["job_name"], report["items"]) == (0, "COMPLETED", "train", 40)
    assert f"gpujob: logs: {jobs.directory}/job.out\n" in said
