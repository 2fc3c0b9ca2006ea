"""A job on a real Slurm that pauses, has one slow worker and is resumed: what was promised, against what came."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from exporter.readers.history import read_history
from tests.endtoend.jobs import EMBED, GPUJOB, JobSpace, embed_job
from tests.realstack.cluster import ROOT, Cluster

ITEMS, WORKERS, RATE = 6400, 8, 20.0
SLOW, FACTOR = 5, 1.6
WITHIN = {0.25: 0.35, 0.5: 0.2, 0.75: 0.2}
"""Of the time left: at a quarter one pause has been seen, and the work since the resume is a few seconds old."""


@pytest.mark.slurm
def test_the_end_of_a_job_with_pauses_a_slow_worker_and_a_resume_is_foreseen(jobs: JobSpace, cluster: Cluster) -> None:
    options = f"--checkpoint-seconds 2 --only-rank {SLOW} --slow-down {FACTOR}"
    spec = embed_job("eta", items=ITEMS, rate=RATE, options=options)
    spec["workers"][0]["restart"] = {"max": 1, "backoff": 1}
    spec["slurm"]["time_limit"] = "00:04:00"
    job = jobs.submit(spec)
    seen: list[tuple[float, float, dict[str, float], float | None]] = []
    share, killed = ITEMS / WORKERS, False
    while cluster.job_state(int(job.job_id)) in ("PENDING", "RUNNING", "CONFIGURING"):
        for status in (job.json(f"status/{name}.json") for name in cluster.node_names):
            for worker in status.get("workers", ()):
                if worker["rank"] == SLOW and worker.get("eta") and not status["final"]:
                    moment, met = float(status["time"]), status["job"]["time_limit_met_probability"]
                    if not seen or seen[-1][0] != moment:
                        seen.append((moment, worker["items"] / share, worker["eta"], met))
        if not killed and seen and seen[-1][1] >= 0.15:
            # a slow worker of which the node loses the process: it goes on from its last checkpoint
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
    told = {}
    for share_done, within in WITHIN.items():
        moment, _, eta, met = min(seen, key=lambda entry: abs(entry[1] - share_done))
        left = end - moment
        told[share_done] = (round(eta["seconds"], 1), round(left, 1), met)
        assert abs(eta["seconds"] - left) <= within * left + 2.0, told
        assert eta["low"] <= eta["seconds"] <= eta["high"]
        assert met is None or met > 0.5, "there is time enough"
    print(json.dumps({"eta, truly left, probability": told}))


def test_a_run_that_has_completed_tells_the_next_one_when_it_will_be_done(tmp_path: Path) -> None:
    shutil.copy(EMBED, tmp_path)
    spec = embed_job("again", items=800, nodes=1, count=2, gpus_per_node=0, rate=40)
    spec["workers"][0]["gpus"] = 0
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    environ = {**os.environ, "GPUJOB_HISTORY_DIR": str(tmp_path / "history")}
    first: list[dict[str, float]] = []
    for run in range(2):
        before = set((tmp_path / "logs").glob("*")) if run else set()
        command = subprocess.Popen(
            [GPUJOB, "run", "job.yaml", "--json"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
        )
        try:
            while run and command.poll() is None and not first:
                (folder,) = set((tmp_path / "logs").glob("*")) - before or {tmp_path}
                for path in folder.glob("status/*.json"):
                    status = json.loads(path.read_text())
                    workers = [worker for worker in status["workers"] if worker.get("eta")]
                    first += [{**worker["eta"], "at": status["time"], "items": worker["items"]} for worker in workers]
                time.sleep(0.1)
            out, _ = command.communicate(timeout=90)
        finally:
            command.kill()
            command.wait()
        report = json.loads(out)
        assert report["state"] == "COMPLETED"
        assert len(read_history("again", environ)) == run + 1
    told = first[0]
    left = max(worker["exit"]["time"] for worker in report["workers"]) - told["at"]
    assert told["items"] < 200, "an early word"
    assert abs(told["seconds"] - left) <= 0.35 * left + 1.0, (told, left)
