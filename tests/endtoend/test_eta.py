"""A job on a real Slurm that pauses, has one slow worker and is resumed: what was promised, against what came."""

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

from exporter.progress.eta import RunPrior
from exporter.progress.history_reader import read_run_history
from tests.endtoend.jobs import EMBED, GPUJOB, JobSpace, embed_job
from tests.realstack.cluster import ROOT, Cluster
from tests.realstack.waiting import wait_for

ITEMS, WORKERS, RATE = 6400, 8, 20.0
PAUSE_S, LOG_S = 2.0, 1.0  # how long a worker saves, and the longest that it says nothing otherwise
SLOW, FACTOR = 5, 1.6
WITHIN = {0.25: 0.35, 0.5: 0.2, 0.75: 0.2}
"""Of the time left: at a quarter one pause has been seen, and the work since the resume is a few seconds old."""


def idle(log: Sequence[str], since: float, end: float) -> float:
    """Seconds from then on in which a worker did nothing that it was to do, by its own log."""
    said = [(time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")), line) for line in log]
    found = 0.0
    for (before, line), (after, _) in pairwise([*said, (end, "")]):
        usual = PAUSE_S if "Saving a checkpoint" in line else LOG_S
        found += max(0.0, after - max(before, since) - usual - 1.0)  # they tell whole seconds
    return found


@pytest.mark.slurm
def test_the_end_of_a_job_with_pauses_a_slow_worker_and_a_resume_is_foreseen(jobs: JobSpace, cluster: Cluster) -> None:
    options = f"--checkpoint-seconds {PAUSE_S:g} --only-rank {SLOW} --slow-down {FACTOR}"
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
    log = [
        line for path in sorted(job.run_dir.glob(f"*_worker_w{SLOW}*.out")) for line in path.read_text().splitlines()
    ]
    for share_done, within in WITHIN.items():
        moment, _, eta, met = min(seen, key=lambda entry: abs(entry[1] - share_done))
        left = end - moment - idle(log, moment, end)  # nobody foresees that the machine has no time for it
        told[share_done] = (round(eta["seconds"], 1), round(left, 1), met)
        assert abs(eta["seconds"] - left) <= within * left + 2.0, told
        assert eta["low"] <= eta["seconds"] <= eta["high"]
        assert met is None or met > 0.5, "there is time enough"
    print(json.dumps({"eta, truly left, probability": told}))


def test_a_run_that_has_completed_tells_the_next_one_when_it_will_be_done(tmp_path: Path) -> None:
    share, rate, first_line = 400, 40, 20
    shutil.copy(EMBED, tmp_path)
    environ = {**os.environ, "GPUJOB_HISTORY_DIR": str(tmp_path / "history")}

    def start(options: str = "") -> subprocess.Popen[str]:
        spec = embed_job("again", items=2 * share, nodes=1, count=2, gpus_per_node=0, rate=rate, options=options)
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

    def words() -> list[dict[str, float]]:
        folders = set((tmp_path / "logs").glob("*")) - before
        statuses = [json.loads(path.read_text()) for folder in folders for path in folder.glob("status/*.json")]
        workers = [worker for status in statuses for worker in status["workers"] if worker.get("eta")]
        return [{**worker["eta"], "items": worker["items"]} for worker in workers]

    # it does nothing after its first line: what is known of its end is what the first run has told
    command = start(f"--stall --at {first_line}")
    try:
        told, *_ = wait_for(words, 60, "a word on its end")
        command.terminate()
        command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert told["items"] <= first_line
    left = prior.work_left(told["items"], share)
    assert 0.9 * (share - told["items"]) / rate <= left <= report["duration_s"]
    # what the next line may be late is not taken for work that is done
    assert abs(told["seconds"] - left) <= 0.35 * left + 1.0 + 1.2 * prior.warm_up_seconds, (told, left, prior)
    assert len(read_run_history("again", environ)) == 1, "only what has completed tells the next one"
