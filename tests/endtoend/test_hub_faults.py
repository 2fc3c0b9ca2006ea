"""The hub while its sources or the hub itself are gone, on a cluster of its own: daemons of Slurm hang and die."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import JobSpace, embed_job
from tests.endtoend.test_hub import RealHub
from tests.endtoend.test_track import sbatch
from tests.realstack.cluster import ROOT, Cluster, slurm_unavailable
from tests.realstack.stack import prometheus_unavailable

pytestmark = pytest.mark.slurm

NODES = 2
HUB_PORT, PROMETHEUS_PORT = 9420, 9090  # of the head, on which nothing else runs
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "run-the-hub.md"
REFRESH_S = 2
UNTIL_ENOUGH = "until [ -e {}/enough ]; do sleep 0.2; done"
NO_REQUEUE = {"partition": "gpu", "time_limit": "00:10:00", "directives": {"no-requeue": True}}
SIDECARS = 'up{job="gpujob-sidecar",node=~"hub.+"}'  # the user may have had jobs on other clusters


@pytest.fixture(scope="module")
def cluster(space_dir: Path) -> Iterator[Cluster]:
    if reason := slurm_unavailable():
        pytest.skip(reason)
    with Cluster(space_dir / "hub", nodes=NODES, prefix="hub") as cluster:
        yield cluster


def signal_daemon(cluster: Cluster, name: str, signum: signal.Signals) -> None:
    """Send a signal to a daemon of the head."""
    pids = [pid for pid, command in cluster.node_processes("head", daemons=True) if command.split()[0].endswith(name)]
    assert pids, name
    cluster.run(["kill", f"-{signum:d}", *map(str, pids)], user=ROOT, check=True)


def save_state(cluster: Cluster, job_id: str) -> None:
    """Let the controller save its state, with what it knows by now. It does so some seconds after a change."""
    saved, begun = cluster.directory / "state" / "job_state", time.time()
    cluster.run(["scontrol", "update", f"JobId={job_id}", "Comment=saved"], user=ROOT, check=True)

    def is_saved() -> bool:
        try:
            return saved.stat().st_mtime > begun
        except FileNotFoundError:  # it is just being replaced
            return False

    cluster.wait_for(is_saved, 60, "the controller to save its state")


def metric(hub: RealHub, name: str) -> float:
    lines = [line for line in hub.get("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert len(lines) == 1, lines
    return float(lines[0].rpartition(" ")[2])


def states_of(hub: RealHub, *job_ids: str) -> list[str | None]:
    states = hub.states()
    return [states.get(job_id) for job_id in job_ids]


def job_of(hub: RealHub, job_id: str) -> Any:
    return hub.json(f"/api/v1/jobs/{job_id}")["jobs"][0]


def test_accounting_that_hangs_delays_figures_and_no_end(jobs: JobSpace) -> None:
    cluster, hub = jobs.cluster, RealHub(jobs)
    job_id = sbatch(jobs, "short", UNTIL_ENOUGH.format(jobs.directory))
    cluster.wait_for(lambda: hub.states().get(job_id) == "RUNNING", 60, "the job to run")
    signal_daemon(cluster, "slurmdbd", signal.SIGSTOP)
    try:
        (jobs.directory / "enough").touch()
        cluster.wait_for(lambda: hub.states().get(job_id) == "COMPLETED", 60, "the end, from the queue")
        cluster.wait_for(lambda: any("sacct" in text for text in hub.json("/api/v1/jobs")["problems"]), 90, "a problem")
        assert job_of(hub, job_id)["figures"] is None
    finally:
        signal_daemon(cluster, "slurmdbd", signal.SIGCONT)
    cluster.wait_for(lambda: job_of(hub, job_id)["figures"], 150, "the figures")
    assert hub.json("/api/v1/jobs")["problems"] == []


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_controller_that_dies_or_hangs_and_returns_ends_no_job_and_hides_none(
    jobs: JobSpace, fault: signal.Signals
) -> None:
    cluster, hub = jobs.cluster, RealHub(jobs)
    stays = sbatch(jobs, "stays", "exec sleep 300")
    ends = sbatch(jobs, "ends", UNTIL_ENOUGH.format(jobs.directory))
    cluster.wait_for(lambda: states_of(hub, stays, ends) == ["RUNNING", "RUNNING"], 60, "both to run")
    save_state(cluster, stays)
    signal_daemon(cluster, "slurmctld", fault)
    answers_s = []
    try:
        (jobs.directory / "enough").touch()
        told = cluster.wait_for(lambda: hub.json("/api/v1/jobs")["problems"], 90, "the hub to notice")
        time.sleep(10)
        for _ in range(3):
            begun = time.monotonic()
            assert states_of(hub, stays, ends) == ["RUNNING", "RUNNING"]
            answers_s.append(time.monotonic() - begun)
    finally:
        if fault == signal.SIGKILL:
            cluster.run(["slurmctld"], user=ROOT, check=True)
        else:
            signal_daemon(cluster, "slurmctld", signal.SIGCONT)
    assert any("squeue" in text for text in told)
    assert min(answers_s) < 2.0  # one that waits for the controller does so each time
    cluster.wait_for(lambda: states_of(hub, stays, ends) == ["RUNNING", "COMPLETED"], 120, "the end that was missed")
    assert hub.json("/api/v1/jobs")["problems"] == []
    (row,) = cluster.sacct(int(ends), "JobID", "End")[:1]
    told = hub.json("/api/v1/changes?after=0")["changes"]
    told_end = [change for change in told if (change["job_id"], change["state"]) == (ends, "COMPLETED")]
    assert len(told_end) == 1
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(told_end[0]["time"])) == row["End"]
    cluster.run(["scancel", stays], user=ROOT, check=True)


def wait_for_prometheus(cluster: Cluster, directory: Path) -> Callable[[str], dict[str, str]]:
    """Start a Prometheus that asks the hub what to scrape; return how to query it, by instance."""
    argv = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/prometheus"]
    options = [f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}", "--scrape.discovery-reload-interval=1s"]
    with (directory / "prometheus.log").open("w") as log:
        cluster.popen([*argv, *options], user=ROOT, stdout=log, stderr=log, in_root=False)
    url = f"http://127.0.0.1:{PROMETHEUS_PORT}"

    def query(promql: str) -> dict[str, str]:
        argv = ["curl", "-sS", "--data-urlencode", f"query={promql}", f"{url}/api/v1/query"]
        result = json.loads(cluster.run(argv, user=ROOT, check=True, in_root=False).stdout)["data"]["result"]
        return {series["metric"].get("instance", ""): series["value"][1] for series in result}

    cluster.wait_for(
        lambda: cluster.run(["curl", "-fsS", f"{url}/-/ready"], user=ROOT, in_root=False).returncode == 0,
        60,
        "Prometheus",
    )
    return query


def test_prometheus_loses_and_doubles_no_target_while_the_hub_restarts(jobs: JobSpace) -> None:
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    cluster, listen = jobs.cluster, ("--web.listen-address", f"127.0.0.1:{HUB_PORT}")
    hub = RealHub(jobs, *listen)
    (documented,) = re.findall(r"^scrape_configs:\n(?:[ ].*\n)+", DOCS.read_text(), re.MULTILINE)
    token = str(hub.folder / "token")
    config = documented.replace("/etc/prometheus/gpujob/hub-token", token).replace("15s", f"{REFRESH_S}s")
    (jobs.directory / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{config}")
    query = wait_for_prometheus(cluster, jobs.directory)
    job = jobs.submit(embed_job("served", nodes=NODES, count=4, items=6400, linger=10))
    cluster.wait_for(lambda: list(query(SIDECARS).values()) == ["1"] * NODES, 90, "all sidecars, once each")
    begun = time.time()
    hub.kill()
    time.sleep(4 * REFRESH_S)
    hub = RealHub(jobs, *listen)
    time.sleep(4 * REFRESH_S)
    assert job.json("state.json")["phase"] == "running", "the job is to outlive the hub's restart"
    window = int(time.time() - begun)
    assert set(query(f"min_over_time(count({SIDECARS})[{window}s:1s])").values()) == {str(NODES)}
    assert set(query(f"max_over_time(count({SIDECARS})[{window}s:1s])").values()) == {str(NODES)}
    assert job.wait() == "COMPLETED"
    cluster.wait_for(lambda: not query(SIDECARS), 60, "the targets to go")
    total = query("sum(last_over_time(gpujob_worker_items_processed_total[5m]))")
    assert total == {"": "6400"}, "the last values of all workers"


def test_targets_of_a_job_whose_nodes_lost_their_power_go(jobs: JobSpace) -> None:
    jobs.targets_dir.mkdir(exist_ok=True)
    jobs.targets_dir.chmod(0o1777)
    cluster, hub = jobs.cluster, RealHub(jobs, "--cluster-file", str(jobs.directory / "gpujob.yaml"))
    job = jobs.submit(embed_job("dark", nodes=NODES, count=4, items=64000, slurm=NO_REQUEUE))
    site_file = jobs.targets_dir / f"gpujob-{job.run_dir.name}.json"

    def targets() -> int:
        """Those of this run: a job of an earlier cluster may have had the same id a minute ago."""
        published = job.run_dir / "targets.json"
        groups = json.loads(published.read_text()) if published.exists() else []
        own = {target for group in groups for target in group["targets"]}
        return sum(target in own for group in hub.json("/targets") for target in group["targets"])

    cluster.wait_for(lambda: targets() == NODES, 90, "all sidecars")
    nodes = [f"hub{number}" for number in range(1, NODES + 1)]
    for node in nodes:
        cluster.kill_node(node)
    try:
        assert job.wait() == "NODE_FAIL"  # Slurm's own timeouts first
        cluster.wait_for(lambda: states_of(hub, job.job_id) == ["NODE_FAIL"], 60, "the end of the job")
        assert targets() == NODES, "they stay for a while"
        assert site_file.exists()
        cluster.wait_for(lambda: targets() == 0, 120, "the targets to go")
        cluster.wait_for(lambda: not site_file.exists(), 15, "the file in the target directory to go")
    finally:
        for node in nodes:
            cluster.start_node(node)
    assert (job.run_dir / "targets.json").exists(), "nobody was there to remove it"
