"""The queue out of a real slurmrestd: the same rows as those of squeue."""

import json
import signal
import time

import pytest

from tests.endtoend.jobs import GPUJOB, JobSpace
from tests.endtoend.test_track import REQUEUED, sbatch
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm

BOTH = """
import os, sys
from exporter.slurm.commands_reader import SlurmReader
from exporter.slurm.sources.rest_reader import slurm_reader
user = sys.argv[1] or None
rows = [{row.job_id: row for row in reader.queue()} for reader in (
    SlurmReader(user, None, os.environ), slurm_reader(user, None, os.environ), SlurmReader(user, None, os.environ))]
rest, before, after = rows[1], rows[0], rows[2]
steady = {job_id for job_id in after if before.get(job_id) == after[job_id]}
for job_id in sorted(steady | rest.keys() - after.keys()):
    if rest.get(job_id) != after.get(job_id):
        print(job_id, after.get(job_id), rest.get(job_id), sep="\\n  ")
print("equal:", len(steady))
"""  # a job may change between two questions


def test_slurmrestd_has_the_rows_of_squeue(jobs: JobSpace) -> None:
    cluster, node = jobs.cluster, jobs.cluster.node_names[0]
    sbatch(jobs, "a|b 'c' naïve\nname", "exec srun sleep 300", "-w", node, "--gres=gpu:2", "-c2", "--mem=100")
    array = sbatch(
        jobs, "arr", "sleep 300", "--array=1-3,7,10-19:3%1", "--mem=50", "-o", f"{jobs.directory}/%x-%A_%a-%u.log"
    )
    again = sbatch(jobs, "again", REQUEUED, "--requeue", "--gres=gpu:1", "--mem=50")
    held = sbatch(jobs, "held", "true", "--hold", "--mem=50", "--time=1-00:00:00")
    sbatch(jobs, "after", "true", f"--dependency=afterok:{held},afterany:{array}", "--mem=50")
    sbatch(jobs, "later", "true", "--begin=now+1hour", "--mem=50", "--nice=10")
    failed = sbatch(jobs, "failed", "ulimit -c 0; kill -SEGV $$", "--mem=50")
    never = sbatch(jobs, "never", "true", f"--dependency=afterok:{failed}", "--mem=50")
    sbatch(jobs, "behind", "true", f"--dependency=afterany:{never}", "--mem=50")
    cancelled = sbatch(jobs, "cancelled", "true", "--hold", "--mem=50")
    argv = ["sbatch", "--parsable", "-J", "het", "--mem=50", ":", "--mem=60", "--wrap", "exec srun sleep 300"]
    cluster.run(argv, user=jobs.user, cwd=jobs.directory, check=True)
    cluster.run(["scancel", cancelled], user=ROOT, check=True)
    cluster.wait_for(lambda: cluster.job_state(int(failed)) == "FAILED", 60, "the job that fails")
    cluster.wait_for(lambda: cluster.job_state(int(again)) == "RUNNING", 60, "the job that is requeued")
    socket = jobs.directory / "rest.sock"
    rest = cluster.popen(["slurmrestd", "-a", "rest_auth/local", f"unix:{socket}"], user=jobs.user, cwd=jobs.directory)
    try:
        cluster.wait_for(socket.exists, 60, "slurmrestd")
        environ = {"GPUJOB_SLURM_SOURCE": "rest", "GPUJOB_SLURMRESTD": f"unix:{socket}"}
        for moment, user in enumerate((jobs.user, "")):
            done = cluster.run([GPUJOB.parent / "python", "-c", BOTH, user], user=jobs.user, env=environ, check=True)
            assert done.stdout.startswith("equal: "), (moment, done.stdout)
            assert int(done.stdout.split()[1]) >= 10
            time.sleep(2)
        cache = {"XDG_CACHE_HOME": f"{jobs.directory}/cache", "GPUJOB_SLURMRESTD": f"unix:{socket}"}
        shown = json.loads(jobs.gpujob("ps", "--source", "rest", "--json", env=cache, check=True).stdout)
        assert (shown["source"], held in str(shown)) == ("slurmrestd", True)
    finally:
        cluster.signal(rest, signal.SIGKILL)
        rest.communicate(timeout=60)
        cluster.run(["scancel", "-u", jobs.user], user=ROOT, check=True)  # or the next test waits for room
