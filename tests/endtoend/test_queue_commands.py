"""`gpujob ps`, `fleet`, `usage` and `metrics` on a real Slurm, with jobs that gpujob has not launched."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from exporter.slurm.accounting import tres
from exporter.slurm.sources.shared_answers_reader import QUEUE_MAX_AGE_S
from tests.endtoend.jobs import JobSpace, embed_job
from tests.endtoend.test_hub import RealHub
from tests.endtoend.test_track import COUNTED_SQUEUE, REQUEUED, sbatch
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm

WATCHERS = 8


def shown(jobs: JobSpace, *words: str) -> Any:
    """JSON of a command that shows nothing that an earlier one has seen."""
    cache = f"{jobs.directory}/cache-{time.monotonic_ns()}"
    done = jobs.gpujob(*words, "--json", env={"XDG_CACHE_HOME": cache, "XDG_STATE_HOME": f"{jobs.directory}/state"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of_hub(jobs: JobSpace, address: str, *words: str) -> Any:
    """JSON of a command that the hub has answered. It gives a hub two seconds, and then asks Slurm."""
    source = "ended_from" if words[0] == "ps" else "source"

    def answer() -> Any:
        found = shown(jobs, *words, "--hub", address)
        return found if address in str(found[source]) else None

    return jobs.cluster.wait_for(answer, 60, f"an answer of the hub to {words}")


def of_jobs(body: Any) -> dict[str, Any]:
    return {job["job_id"]: job for run in body["runs"] for job in run["jobs"]}


def test_jobs_nodes_and_hours_are_those_of_slurm(jobs: JobSpace) -> None:
    cluster, (node, second, third, *_) = jobs.cluster, jobs.cluster.node_names
    begin = time.time() - 1
    busy = sbatch(jobs, "a|b 'c'", "exec srun sleep 300", "-w", node, "--gres=gpu:2", "-c2", "--mem=100", "--time=9")
    small = ("-w", third, "--gres=gpu:1", "--mem=50")  # elsewhere: they come and go while that node is compared
    array = sbatch(jobs, "arr", "sleep 3", "--array=0-2%1", *small)
    again = sbatch(jobs, "again", REQUEUED, "--requeue", *small)
    after = sbatch(jobs, "after", "true", f"--dependency=afterok:{busy}", "--mem=50")
    cluster.wait_for(lambda: cluster.job_state(int(busy)) == "RUNNING", 60, "the job that stays")
    cluster.wait_for(lambda: cluster.job_state(int(again)) == "RUNNING", 60, "the job that is requeued")

    queue = of_jobs(shown(jobs, "ps"))
    running = queue[busy]
    assert (running["job_name"], running["status"], running["nodes"]) == ("a|b 'c'", "running", node)
    assert running["resources"]["gpus"] == [{"name": None, "memory_mib": None}] * 2
    assert (queue[after]["reason"], queue[after]["dependency"]) == ("Dependency", f"afterok:{busy}(unfulfilled)")
    table = jobs.gpujob("ps", env={"XDG_CACHE_HOME": f"{jobs.directory}/cache-table"}, check=True).stdout
    assert f"{array}_[0-2]" in table
    assert "PENDING (Dependency)" in table
    assert "\nDependency: it waits for another job" in table

    instances = {entry["instance"]: entry for entry in shown(jobs, "fleet")["instances"] if entry["fleet"] == "gpu"}
    assert set(instances) == set(cluster.node_names)
    config = cluster.run(["scontrol", "show", "node", node, "-o"], check=True).stdout
    allocated = tres(config.partition("AllocTRES=")[2].split()[0], "gres/gpu")
    assert instances[node]["resources"]["gpus_used"] == int(allocated or 0) >= 2
    assert f"CPUTot={instances[node]['resources']['cpus']} " in config
    assert f"RealMemory={instances[node]['resources']['memory_mib']} " in config
    assert instances[node]["status"].startswith(f"busy {int(allocated or 0)}/")
    assert busy in instances[node]["jobs"]
    cluster.run(["scontrol", "update", f"NodeName={second}", "State=DRAIN", "Reason=fan | 3"], user=ROOT, check=True)
    drained = {entry["instance"]: entry for entry in shown(jobs, "fleet")["instances"]}[second]
    cluster.run(["scontrol", "update", f"NodeName={second}", "State=RESUME"], user=ROOT, check=True)
    assert (drained["state"].startswith("drain"), drained["reason"]) == (True, "fan | 3")

    time.sleep(4)  # two samples of the job's memory
    running_use = shown(jobs, "metrics", busy)
    assert running_use["source"] == "sstat"
    assert running_use["jobs"][0]["memory_limit_bytes"] == 100 * 2**20
    cluster.run(["scontrol", "requeue", again], user=ROOT, check=True)
    cluster.wait_for(lambda: cluster.job_state(int(again)) == "COMPLETED", 240, "the second attempt")
    cluster.run(["scancel", busy, after], user=ROOT, check=True)
    cluster.wait_for_job(int(busy), 60, {"CANCELLED"})  # accounting may say so before its processes have ended
    cluster.wait_for(lambda: cluster.job_state(int(array)) == "COMPLETED", 60, "the array")
    cluster.wait_for(lambda: all(_ended(jobs, job_id) for job_id in (busy, array, again)), 60, "accounting")

    found = shown(jobs, "usage", "--by", "name", "--since", _iso(begin))
    by_name = {group["name"]: group for group in found["groups"]}
    assert by_name["again"]["attempts"] == 2
    for name, job_id in (("a|b 'c'", busy), ("arr", array), ("again", again)):
        rows = _accounting(jobs, job_id)
        gpu_s = sum(float(elapsed) * (tres(resources, "gres/gpu") or 0.0) for elapsed, resources in rows)
        cpu_s = sum(float(elapsed) * (tres(resources, "cpu") or 0.0) for elapsed, resources in rows)
        assert by_name[name]["gpu_hours"] == pytest.approx(gpu_s / 3600, abs=1e-4), name
        assert by_name[name]["cpu_hours"] == pytest.approx(cpu_s / 3600, abs=1e-4), name
    ended = shown(jobs, "ps", "--since", _iso(begin))
    assert ended["ended_from"] == "accounting"
    assert of_jobs(ended)[busy]["figures"]["memory_requested_bytes"] == 100 * 2**20
    assert (of_jobs(ended)[busy]["status"], of_jobs(ended)[again]["attempt"]) == ("cancelled", 2)
    assert shown(jobs, "metrics", busy)["source"] == "accounting"
    started, end = _moments(jobs, busy)
    late = shown(jobs, "usage", "--by", "name", "--since", _iso(started + 2))  # after the job began
    (rest,) = (group for group in late["groups"] if group["name"] == "a|b 'c'")
    assert rest["gpu_hours"] == pytest.approx((end - started - 2) * 2 / 3600, abs=1e-4)


def test_the_hub_and_accounting_say_the_same_of_ended_jobs(jobs: JobSpace) -> None:
    cluster = jobs.cluster
    early = sbatch(jobs, "early", "sleep 2", "--gres=gpu:1", "--mem=50")
    cluster.wait_for(lambda: _ended(jobs, early), 60, "a job that no hub has seen")
    cluster.wait_for(lambda: not cluster.run(["squeue", "-h", "-j", early]).stdout, 60, "the end of its node's work")
    hub = RealHub(jobs)
    address = f"unix:{next(hub.folder.glob('*.sock'))}"
    cluster.wait_for(lambda: "instances" in hub.get("/api/v1/fleet"), 30, "the nodes of the hub")
    told = [of_hub(jobs, address, "fleet"), shown(jobs, "fleet", "--hub", "none")]
    assert [each.pop("source") for each in told] == [address, "sinfo"]
    assert all(abs(each.pop("as_of") - time.time()) < 45 for each in told)
    assert told[0] == told[1]

    begin = time.time() - 120
    sbatch(jobs, "good", "exec srun sleep 6", "--gres=gpu:2", "--mem=50")
    bad = sbatch(jobs, "bad", "sleep 2; exit 3", "--mem=50")
    array = sbatch(jobs, "arr", "sleep 1", "--array=0-3%2", "--gres=gpu:1", "--mem=50")
    again = sbatch(jobs, "again", REQUEUED, "--requeue", "--gres=gpu:1", "--mem=50")
    busy = sbatch(jobs, "busy", "exec sleep 300", "--gres=gpu:1", "--mem=50")
    cluster.wait_for(lambda: cluster.job_state(int(again)) == "RUNNING", 60, "the job that is requeued")
    cluster.wait_for(lambda: hub.states().get(again) == "RUNNING", 60, "the hub")
    cluster.run(["scontrol", "requeue", again], user=ROOT, check=True)
    cluster.wait_for(lambda: cluster.job_state(int(again)) == "COMPLETED", 240, "the second attempt")
    cluster.wait_for(lambda: all(_ended(jobs, job_id) for job_id in (bad, array, again)), 60, "accounting")

    def has_figures() -> bool:
        found = hub.json("/api/v1/jobs")["jobs"]
        return all(job["figures"] for job in found if job["is_over"] and job["started"])

    cluster.wait_for(has_figures, 120, "the figures of the hub")
    cluster.run(["scancel", busy], user=ROOT, check=True)
    cluster.wait_for(lambda: hub.states().get(busy) == "CANCELLED" and has_figures(), 120, "the last end")
    ended = ("ps", "--since", _iso(begin))
    told = [of_hub(jobs, address, *ended), shown(jobs, *ended, "--hub", "none")]
    assert [each["ended_from"] for each in told] == [f"{address} and accounting", "accounting"]
    keys = ("job_name", "status", "user", "account", "region", "started_at", "ended_at", "attempt", "figures")
    by_hub, by_accounting = ({k: {key: v[key] for key in keys} for k, v in of_jobs(each).items()} for each in told)
    assert by_hub == by_accounting
    assert len(by_hub) >= 9
    for since in (_iso(begin), _iso(time.time() - 15)):  # before the hub began, and within its time
        for by in ("name", "partition"):
            words = ("usage", "--since", since, "--by", by)
            used = [of_hub(jobs, address, *words), shown(jobs, *words, "--hub", "none")]
            assert used[0]["groups"] == used[1]["groups"]
        assert used[1]["source"] == "accounting"
    assert used[0]["source"] == address


def test_a_job_of_gpujob_has_progress_and_metrics_while_it_runs_and_afterwards(jobs: JobSpace) -> None:
    job = jobs.submit(embed_job("embed", items=600, rate=40, nodes=1, count=2, gpus_per_node=2, linger=0))
    job.wait_for_phase("running")
    found = jobs.cluster.wait_for(lambda: _progress(jobs, job.job_id), 60, "progress", interval=1)
    assert (found["progress"]["items_expected"], found["progress"]["unit"]) == (600, "items")
    assert found["run_dir"] == str(job.run_dir)
    running = shown(jobs, "metrics", job.job_id)
    assert (running["source"], running["jobs"][0]["status"]) == ("sidecars", "RUNNING")
    assert running["jobs"][0]["cpu_cores"] > 0
    assert job.wait() == "COMPLETED"
    ended = shown(jobs, "metrics", job.job_id)
    assert (ended["source"], ended["jobs"][0]["status"]) == ("sidecars", "COMPLETED")


def _progress(jobs: JobSpace, job_id: str) -> dict[str, Any] | None:
    job: dict[str, Any] = of_jobs(shown(jobs, "ps"))[job_id]
    return job if job["progress"] is not None and job["progress"]["items"] else None


def test_of_many_watchers_one_asks_slurm(jobs: JobSpace) -> None:
    squeue = jobs.directory / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(COUNTED_SQUEUE)
    squeue.chmod(0o755)
    jobs.own(squeue.parent)
    env = {"PATH": f"{squeue.parent}:/usr/bin:/bin", "XDG_CACHE_HOME": f"{jobs.directory}/cache"}
    sbatch(jobs, "one", "exec sleep 60", "--mem=50")
    start = time.monotonic()
    with ThreadPoolExecutor(WATCHERS) as pool:
        done = list(pool.map(lambda _: jobs.gpujob("ps", "--json", env=env), range(WATCHERS)))
    assert {(each.returncode, len(json.loads(each.stdout)["runs"])) for each in done} == {(0, 1)}
    asked = len(squeue.with_suffix(".calls").read_text().splitlines())
    assert asked <= 1 + (time.monotonic() - start) // QUEUE_MAX_AGE_S


def _iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))


def _accounting(jobs: JobSpace, job_id: str) -> list[tuple[str, str]]:
    argv = ["sacct", "-X", "-D", "-n", "-P", "-j", job_id, "-o", "ElapsedRaw,AllocTRES"]
    text = jobs.cluster.run(argv, user=ROOT, check=True).stdout
    return [(elapsed, resources) for elapsed, _, resources in (line.partition("|") for line in text.splitlines())]


def _moments(jobs: JobSpace, job_id: str) -> tuple[float, float]:
    argv = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "Start,End"]
    text = jobs.cluster.run(argv, user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
    start, _, end = text.strip().partition("|")
    return float(start), float(end)


def _ended(jobs: JobSpace, job_id: str) -> bool:
    argv = ["sacct", "-D", "-n", "-P", "-j", job_id, "-o", "End"]
    return "Unknown" not in jobs.cluster.run(argv, user=ROOT, check=True).stdout
