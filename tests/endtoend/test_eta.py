"""The ETA of a job with pauses, a slow worker and a resume, compared with its real end."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from exporter.progress.eta.prior import RunPrior
from exporter.progress.history_reader import read_run_history
from tests.endtoend.jobs import EMBED, FAULTY_EMBED, GPUJOB, JobSpace, embed_job
from tests.realstack.cluster import ROOT, Cluster
from tests.realstack.waiting import wait_for

ITEMS, WORKERS, RATE = 6400, 8, 20.0
PAUSE_S, LOG_S = 2.0, 1.0  # time of a checkpoint, and longest other time without a log line
SLOW, FACTOR = 5, 1.6
WITHIN = {0.25: 0.35, 0.5: 0.2, 0.75: 0.2}
"""Tolerance as a share of the ETA. At a quarter only one pause and little work since the resume are known."""


def idle(log: Sequence[str], since: float, end: float) -> float:
    """Seconds since then in which a worker unexpectedly did nothing, from its own log."""
    times = [(time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")), line) for line in log]
    found = 0.0
    for (before, line), (after, _) in pairwise([*times, (end, "")]):
        usual = PAUSE_S if "Saving a checkpoint" in line else LOG_S
        found += max(0.0, after - max(before, since) - usual - 1.0)  # log times are whole seconds
    return found


@pytest.mark.slurm
def test_the_eta_of_a_job_with_pauses_and_a_resumed_slow_worker_is_accurate(jobs: JobSpace, cluster: Cluster) -> None:
    faults = f"--checkpoint-seconds {PAUSE_S:g} --only-rank {SLOW} --slow-down {FACTOR}"
    spec = embed_job("eta", items=ITEMS, rate=RATE, faults=faults)
    spec["workers"][0]["restart"] = {"max": 1, "backoff": 1}
    spec["slurm"]["time_limit"] = "00:04:00"
    job = jobs.submit(spec)
    seen: list[tuple[float, float, dict[str, float], float | None]] = []
    share, killed = ITEMS / WORKERS, False
    while cluster.job_state(int(job.job_id)) in ("PENDING", "RUNNING", "CONFIGURING"):
        for status in (job.json(f"status/{name}.json") for name in cluster.node_names):
            for worker in status.get("workers", ()):
                if worker["rank"] == SLOW and worker.get("eta") and not status["final"]:
                    time_of_status, met = float(status["time"]), status["job"]["time_limit_met_probability"]
                    if not seen or seen[-1][0] != time_of_status:
                        seen.append((time_of_status, worker["items"] / share, worker["eta"], met))
        if not killed and seen and seen[-1][1] >= 0.15:
            # the slow worker is killed and resumes from its last checkpoint
            record = job.start_record(SLOW)
            assert cluster.on(record["node"], ["kill", "-9", str(record["pid"])], user=ROOT).returncode == 0
            killed = True
        time.sleep(0.5)
    assert job.wait() == "COMPLETED"
    report = job.report()
    slow = next(worker for worker in report["workers"] if worker["rank"] == SLOW)
    assert slow["restarts"] == 1
    assert report["items"] == ITEMS
    end = slow["exit"]["time"]
    results = {}
    log = [
        line for path in sorted(job.run_dir.glob(f"*_worker_w{SLOW}*.out")) for line in path.read_text().splitlines()
    ]
    for share_done, within in WITHIN.items():
        time_of_status, _, eta, met = min(seen, key=lambda entry: abs(entry[1] - share_done))
        left = end - time_of_status - idle(log, time_of_status, end)  # without delays of a busy machine
        results[share_done] = (round(eta["seconds"], 1), round(left, 1), met)
        assert abs(eta["seconds"] - left) <= within * left + 2.0, results
        assert eta["low"] <= eta["seconds"] <= eta["high"]
        assert met is None or met > 0.5, "there is enough time"
    print(json.dumps({"eta, truly left, probability": results}))


def test_a_completed_run_gives_the_next_run_its_first_eta(tmp_path: Path) -> None:
    share, rate, first_line = 400, 40, 20
    for program in (EMBED, FAULTY_EMBED):
        shutil.copy(program, tmp_path)
    environ = {**os.environ, "GPUJOB_HISTORY_DIR": str(tmp_path / "history")}

    def start(faults: str = "") -> subprocess.Popen[str]:
        spec = embed_job("again", items=2 * share, nodes=1, count=2, gpus_per_node=0, rate=rate, faults=faults)
        spec["workers"][0]["gpus"] = 0
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
        return subprocess.Popen(
            [GPUJOB, "run", "job.yaml", "--json"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
        )

    command = start()
    try:
        out, _ = command.communicate(timeout=120)
    finally:
        command.kill()
        command.wait()
    report = json.loads(out)
    assert report["state"] == "COMPLETED"
    (run,) = read_run_history("again", environ)
    prior = RunPrior.from_json(run.prior["worker"])
    before = set((tmp_path / "logs").glob("*"))

    def etas() -> list[dict[str, float]]:
        folders = set((tmp_path / "logs").glob("*")) - before
        statuses = [json.loads(path.read_text()) for folder in folders for path in folder.glob("status/*.json")]
        workers = [worker for status in statuses for worker in status["workers"] if worker.get("eta")]
        return [{**worker["eta"], "items": worker["items"]} for worker in workers]

    # it stalls after its first line, so its ETA comes from the first run
    command = start(f"--stall --at {first_line}")
    try:
        eta, *_ = wait_for(etas, 60, "a word on its end")
        command.terminate()
        command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert eta["items"] <= first_line
    left = prior.work_left(eta["items"], share)
    assert 0.9 * (share - eta["items"]) / rate <= left <= report["duration_s"]
    # a late next line does not count as work
    assert abs(eta["seconds"] - left) <= 0.35 * left + 1.0 + 1.2 * prior.warm_up_seconds, (eta, left, prior)
    assert len(read_run_history("again", environ)) == 1, "only completed runs are in the history"
