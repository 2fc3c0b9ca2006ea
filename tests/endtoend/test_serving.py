"""Serving jobs on a real Slurm: stand-in engines, routers, a real nginx and a benchmark."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.endtoend.jobs import EMBED, Job, JobSpace
from tests.endtoend.serving import (
    BACK,
    ENOUGH,
    RECORD_START,
    RESULTS,
    WAIT_FOR_FILE,
    place_stand_ins,
    readiness_lines,
    results,
    series,
    serving_job,
)
from tests.realstack.cluster import ROOT, Cluster, slurm_unavailable
from tests.support.launcher import read_events

pytestmark = pytest.mark.slurm

Serve = Callable[..., Job]

EXAMPLE = EMBED.parents[1] / "serve"


@pytest.fixture(scope="module")
def cluster(space_dir: Path) -> Iterator[Cluster]:
    """Nodes with 8 GPUs, as in the examples of serving jobs."""
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    with Cluster(space_dir / "serving", nodes=5, cpus=16, gpus=8, accounting=False, prefix="serve") as cluster:
        yield cluster


@pytest.fixture
def serve(jobs: JobSpace, cluster: Cluster) -> Serve:
    """Starts serving jobs in the working directory."""
    if cluster.on(cluster.node_names[0], ["nginx", "-v"]).returncode != 0:
        pytest.skip("nginx is not installed")
    place_stand_ins(jobs.directory)
    jobs.own(jobs.directory)
    (jobs.directory / "gpujob.yaml").unlink()  # no Prometheus scrapes these jobs

    def start(*, decode: int = 2, **over: Any) -> Job:
        spec = serving_job(jobs.directory, prefill=4 - decode, decode=decode, **over)
        return jobs.submit(spec | {"slurm": {"partition": "gpu", "time_limit": "00:10:00"}})

    return start


def log_of(job: Job) -> str:
    """Logs of the orchestrator and of Slurm."""
    return "".join((job.run_dir / name).read_text() for name in ("log.out", "log.err"))


def await_event(job: Job, name: str, count: int = 1) -> dict[str, Any]:
    """Wait for the `count`-th event with this name."""

    def find_event() -> dict[str, Any] | None:
        found = read_events(job.run_dir, name)
        return found[count - 1] if len(found) >= count else None

    return job.space.cluster.wait_for(find_event, 90, f"event {name!r} of {job.run_dir}")


def await_line(job: Job, line: str) -> None:
    """Wait for a readiness line in the log of the benchmark."""
    job.space.cluster.wait_for(lambda: line in readiness_lines(job.run_dir), 90, f"{line!r} in {job.run_dir}")


def exit_reasons(job: Job) -> dict[str, str]:
    """Exit reason of the last run of each worker."""
    return {worker["worker"]: worker["exit"]["reason"] for worker in job.report()["workers"]}


def page(job: Job) -> dict[tuple[str, str], float]:
    """Readiness series of the sidecar on the first node."""
    host = job.json("orchestrator.json")["hosts"][0]
    address = job.json(f"sidecars/{host}.json").get("address")
    shown = job.space.cluster.run(["curl", "-sf", f"http://{address}/metrics"])
    return series(shown.stdout, "gpujob_ready")


def ready_values(job: Job) -> tuple[float | None, float | None]:
    """Readiness of the job and number of ready decode workers."""
    found = page(job)
    return found.get(("gpujob_ready", "")), found.get(("gpujob_ready_workers", "decode"))


def has_benchmark_results(job: Job) -> bool:
    """Whether the first round of the benchmark has results."""
    return len(results(job.run_dir)) == 2


def kill_engine(job: Job, worker: str, rank: int) -> float:
    """Send SIGKILL to the engine of a worker; return the time."""
    record = job.json(f"workers/{worker}_rank{rank}_a0_r0.start.json")
    job.space.cluster.on(record["node"], ["kill", "-9", str(record["pid"])], user=ROOT, check=True)
    return time.time()


def await_service(job: Job) -> None:
    """Wait until the benchmark uses the engines."""
    job.wait_for_phase("running", 90)
    job.space.cluster.wait_for(lambda: has_benchmark_results(job), 90, f"a round of the benchmark of {job.run_dir}")


def test_a_benchmark_runs_on_four_nodes_with_prefill_decode_routers_and_nginx(serve: Serve) -> None:
    job = serve()
    assert job.wait(150) == "COMPLETED", log_of(job)
    report, hosts = job.report(), job.json("orchestrator.json")["hosts"]
    assert (report["state"], report["stopped"]["cause"]) == ("COMPLETED", "the benchmark has completed")
    assert set(exit_reasons(job).values()) == {"completed"}
    *lines, last = readiness_lines(job.run_dir)
    waiting = re.compile(r"Model is not ready, waiting for [012] prefills and [012] decodes(?: and \w+)* to spin up\.")
    assert all(waiting.fullmatch(line) for line in lines[1:]), lines
    assert last == "Model is ready. Have 2 prefills and 2 decodes."
    names = [f"isl_32_osl_16_concurrency_{count}_req_rate_inf.json" for count in (2, 4)]
    assert results(job.run_dir) == dict(zip(names, (8, 16), strict=True))
    assert [(entry["concurrency"], entry["requests"]) for entry in report["benchmark"]] == [(2, 8), (4, 16)]
    assert all(0 < entry["ttft_median_s"] <= entry["ttft_p99_s"] < 60 for entry in report["benchmark"])
    assert [report[key] for key in ("unit", "items", "items_expected")] == ["requests", 24, 24]
    port, log = 8000 + job.json("orchestrator.json")["port_offset"], log_of(job)
    first, second = (job.space.cluster.on(host, ["hostname", "-I"]).stdout.split()[0] for host in hosts[:2])
    for line in (
        f"Master IP address (node 0): {first}",
        f"Nginx node (node 0): {hosts[0]}",
        f"Additional frontend 1 on node 1: {hosts[1]} ({second})",
        f"Prefill worker 0 leader: {hosts[0]} ({first})",
        f"Launching decode worker 1, node 3 (local_rank 0): {hosts[3]}",
        f"Frontend available at: http://{hosts[0]}:{port}",
        f"srun --jobid {job.job_id} -w {hosts[0]} --overlap --pty bash",
    ):
        assert line in log
    logs = {path.name for path in job.run_dir.glob("*.err")} - {"log.err"}
    workers = [f"{hosts[index]}_{name}" for index, name in enumerate(("prefill_w0", "prefill_w1", "decode_w0"))]
    served = [f"{hosts[0]}_frontend_0", f"{hosts[1]}_frontend_1", f"{hosts[0]}_nginx", "benchmark"]
    assert {f"{name}.err" for name in (*workers, f"{hosts[3]}_decode_w1", *served)} == logs
    assert (job.run_dir / RESULTS).is_dir()
    assert job.our_processes() == []


def test_the_serving_example_runs_unchanged_on_a_cluster(jobs: JobSpace) -> None:
    folder = jobs.directory / "serve"
    shutil.copytree(EXAMPLE, folder)
    jobs.own(folder)
    job = jobs.submit(yaml.safe_load((folder / "toy.yaml").read_text()), cwd=folder)
    assert job.wait(150) == "COMPLETED", log_of(job)
    report = job.report()
    assert (report["state"], report["verification"]["verified"]) == ("COMPLETED", True)
    assert [(entry["concurrency"], entry["requests"]) for entry in report["benchmark"]] == [(2, 16), (4, 32)]
    assert set(exit_reasons(job).values()) == {"completed"}
    assert job.our_processes() == []


def test_a_restarted_decode_worker_makes_the_job_ready_again(serve: Serve, cluster: Cluster, jobs: JobSpace) -> None:
    (jobs.directory / "engines" / "sitecustomize.py").write_text(WAIT_FOR_FILE)
    job = serve(repeat=True, workers=[{"role": "decode", "restart": {"max": 1, "backoff": 1}}])
    await_service(job)
    cluster.wait_for(lambda: ready_values(job) == (1.0, 2.0), 60, "series of a job that is ready")
    kill_engine(job, "decode_w1", 3)
    lost = await_event(job, "not ready")
    await_line(job, "Model is not ready, waiting for 0 prefills and 1 decodes to spin up.")
    assert await_event(job, "worker restarted")["worker"] == "decode_w1"
    (jobs.directory / BACK).touch()
    back = await_event(job, "ready", 2)
    assert back["time"] > lost["time"]
    cluster.wait_for(lambda: ready_values(job) == (1.0, 2.0), 60, "series of a job that is ready again")
    (jobs.directory / ENOUGH).touch()
    assert job.wait() == "COMPLETED", log_of(job)
    report = job.report()
    assert report["state"] == "COMPLETED"
    (decode,) = [worker for worker in report["workers"] if worker["worker"] == "decode_w1"]
    assert [end["reason"] for end in decode["exits"]] == ["killed_unknown", "completed"]
    assert readiness_lines(job.run_dir)[-1] == "Model is ready. Have 2 prefills and 2 decodes."


FOUR_AND_ONE = {
    "resources": {"gpus_per_node": 8, "prefill_workers": 4, "decode_workers": 1}
    | {"gpus_per_prefill": 8, "gpus_per_decode": 8},
    "frontend": {"type": "sglang-router"},
}
TWO_ON_A_NODE = {
    "resources": {"gpus_per_node": 8, "decode_workers": 2, "gpus_per_decode": 4},
    "workers": [{"role": "decode", "command": "python3 -m sglang.launch_server --port {http_port}"}],
    "backend": {"type": "command"},
    "frontend": None,
}
ALL_GPUS = "0,1,2,3,4,5,6,7"


def with_ports(word: str, ports: dict[int, int]) -> str:
    """An argument with the ports of the plan replaced by those of the job."""
    return re.sub(r"\b\d+\b", lambda match: str(ports.get(int(match[0]), match[0])), word)


def without_time(text: str) -> str:
    """A text without the time in the name of the run directory."""
    return re.sub(r"_\d{8}_\d{6}\b", "", text)


@pytest.mark.parametrize(
    ("parts", "visible"),
    [
        pytest.param(FOUR_AND_ONE, [ALL_GPUS] * 5, id="4 prefill and 1 decode on nodes of 8 GPUs"),
        pytest.param(TWO_ON_A_NODE, ["0,1,2,3", "4,5,6,7"], id="2 decode of 4 GPUs on one node"),
    ],
)
def test_each_task_has_the_environment_and_command_of_the_plan(
    parts: dict[str, Any], visible: list[str], jobs: JobSpace, serve: Serve
) -> None:
    (jobs.directory / "engines" / "sitecustomize.py").write_text(RECORD_START)
    job = serve(benchmark={"type": "custom", "command": "python3 -c pass"}, **parts)
    assert job.wait(150) == "COMPLETED", log_of(job)
    facts = job.json("orchestrator.json")
    hosts, offset = facts["hosts"], facts["port_offset"]
    plan = json.loads(jobs.gpujob("plan", "job.yaml", "--nodes", ",".join(hosts), "--json", check=True).stdout)
    planned = {f"{process['worker']}_{process['local_rank']}": process for process in plan["processes"]}
    seen = {path.stem: json.loads(path.read_text()) for path in (job.run_dir / "seen").glob("*.json")}
    assert sorted(seen) == sorted(planned)
    workers = [name for name, process in planned.items() if process["stage"] == "workers"]
    ports = {port: port + offset for process in planned.values() for port in process["ports"].values()}
    assert [seen[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in workers] == visible
    for name, process in planned.items():
        environment, argv = seen[name]["environment"], seen[name]["argv"]
        expected = {
            "GPUJOB_RANK": process["rank"],
            "GPUJOB_LOCAL_RANK": process["local_rank"],
            "GPUJOB_WORLD_SIZE": len(workers),
            "GPUJOB_WORKER": process["worker"],
            "GPUJOB_WORKER_INDEX": process["worker_index"],
            "GPUJOB_ROLE": process["role"],
            "GPUJOB_NODE": process["node"],
            "GPUJOB_NODE_INDEX": process["node_index"],
            "GPUJOB_GPUS": ",".join(map(str, process["gpus"])),
            "SLURMD_NODENAME": hosts[process["node_index"]],
        }
        # otherwise it sees the GPUs that Slurm gave to the step
        if process["cuda_visible_devices"] is not None:
            expected["CUDA_VISIBLE_DEVICES"] = process["cuda_visible_devices"]
        assert {variable: environment.get(variable) for variable in expected} == {
            variable: str(value) for variable, value in expected.items()
        }
        assert set(process["environment"]) <= set(environment)
        assert process["leader"] == (environment["GPUJOB_LOCAL_RANK"] == "0")
        assert [with_ports(word, ports) for word in process["command"]][-len(argv) :] == argv
    script = (job.run_dir / "sbatch_script.sh").read_text()
    assert without_time(script) == without_time(plan["script"])
