"""Each exit reason, produced by real local jobs and by jobs on a Slurm whose nodes lose power.

Each scenario is one job, run once. The scenarios of the collected tests run in parallel, on the cluster
each on its own nodes, while tests check those that have ended.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from exporter.workers.exit_reason import CONSEQUENCES, REASONS
from tests.endtoend.jobs import Job, JobSpace, JobSpaces, diagnosis, embed_job, was_asked
from tests.realstack.cluster import ROOT, Cluster, slurm_unavailable
from tests.support import launcher
from tests.support.launcher import LocalJob, poll
from tests.support.scenarios import Ended, Results, Scenarios

AT_ONCE = 3
DISK_BYTES = 3 << 20

NCCL_TIMEOUT = """
import os, sys, time
print("Processed 5/900 items", flush=True)
time.sleep(0.5)
head = "[rank0]:[E1121 12:02:53.123456789 ProcessGroupNCCL.cpp:632] [Rank 0]"
print(f"{head} Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1133, OpType=ALLREDUCE, NumelIn=1, "
      "NumelOut=1, Timeout(ms)=600000) ran for 600038 milliseconds before timing out.", file=sys.stderr)
print(f"{head} To avoid data inconsistency, we are taking the entire process down.", file=sys.stderr, flush=True)
os.abort()
"""
LISTENS = """
import os, socket
server = socket.create_server(("127.0.0.1", 0))
with open(os.path.join(os.environ["GPUJOB_RUN_DIR"], "port"), "w") as out:
    out.write(f"{server.getsockname()[1]:5}")
peer, _ = server.accept()
kept = []
while True:
    kept.append(os.urandom(8 << 20))
"""
CONNECTS = """
import os, socket, sys, time
path = os.path.join(os.environ["GPUJOB_RUN_DIR"], "port")
while not os.path.exists(path) or os.path.getsize(path) < 5:
    time.sleep(0.1)
socket.create_connection(("127.0.0.1", int(open(path).read()))).recv(1)
sys.exit(1)
"""
FAILS_TWICE = """
import os, sys, time
run = int(os.environ["GPUJOB_RESTART"])
seen = os.path.join(os.environ["GPUJOB_RUN_DIR"], f"seen_{run}")
first, last = 20 * run, 20 * run + 20
print(f"Resuming at {first}/60 items", flush=True)
for done in range(first + 1, last + 1):
    time.sleep(0.1)
    print(f"Processed {done}/60 items", flush=True)
    while done == first + 10 and not os.path.exists(seen):
        time.sleep(0.1)
sys.exit(3 if run < 2 else 0)
"""
FILLS_THE_DISK = """
import glob, os, sys, time
print("Processed 5/900 items", flush=True)
folder = os.environ["GPUJOB_RUN_DIR"]
while not glob.glob(os.path.join(folder, "workers", "worker_*.start.json")):  # before the disk is full
    time.sleep(0.1)
with open(os.path.join(folder, "big"), "wb", buffering=0) as out:
    while True:
        out.write(bytes(65536))
"""


def check_end(done: Ended, worker: str, reason: str, *texts: str) -> dict[str, Any]:
    """Check the end of a worker in report, events and, if it failed, its diagnosis. Return its exit."""
    end = done.worker(worker)["exit"]
    assert end["reason"] == reason, end["evidence"]
    evidence = "; ".join(end["evidence"])
    assert [text for text in texts if text not in evidence] == [], evidence
    assert done.events("worker ended", worker=worker)[-1]["reason"] == reason
    assert done.events("worker started", worker=worker)
    for kind in ("job started", "phase", "job ended"):
        assert done.events(kind), f"no event {kind!r}"
    if reason not in CONSEQUENCES:
        assert diagnosis(done.run_dir, worker)["exit"]["reason"] == reason
    return dict(end)


def check_failure(done: Ended, worker: str, reason: str, *texts: str) -> dict[str, Any]:
    """Check that the job failed because of this worker, and that its peers were asked to end."""
    report = done.report
    assert (report["state"], report["exit_status"]) == ("FAILED", 1)
    assert (report["cause"]["worker"], report["cause"]["reason"]) == (worker, reason)
    for peer in (other["worker"] for other in report["workers"] if other["worker"] != worker):
        end = done.worker(peer)["exit"]
        assert end["reason"] == "terminated_peer"
        assert f"{worker} rank {report['cause']['rank']}" in "; ".join(end["evidence"])
        assert f"ended by {reason}" in "; ".join(end["evidence"])
        if not done.has_run(peer):
            continue  # the failure came before the wrapper of this peer had started
        assert was_asked(report, end)
        assert done.events("worker signalled", worker=peer, signal="SIGTERM") or end["signal"] is None
    return check_end(done, worker, reason, *texts)


# Running scenarios

scenario = Scenarios[Path, Ended]("results")
slurm_scenario = Scenarios[JobSpace, Ended]("slurm_results")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results[Ended]]:
    with scenario.run_in(tmp_path_factory.mktemp("jobs"), request, AT_ONCE) as results:
        yield results


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, space_dir: Path) -> Iterator[Cluster]:
    """Two nodes for each scenario, so that a power cut or preemption affects no other."""
    if reason := slurm_unavailable():
        pytest.skip(reason)
    with Cluster(space_dir / "exits", nodes=2 * len(slurm_scenario.needed(request)), prefix="exits") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm_results(request: pytest.FixtureRequest, space_dir: Path, cluster: Cluster) -> Iterator[Results[Ended]]:
    targets = space_dir / "exits-targets"
    targets.mkdir()
    targets.chmod(0o777)
    names, spaces = slurm_scenario.needed(request), JobSpaces(cluster, space_dir, targets)
    with slurm_scenario.run(names, spaces.create, spaces.close, len(names)) as results:
        yield results


# Jobs of the cluster. The slowest tests are at the end of this file.


def cluster_job(faults: str = "", *, partition: str = "gpu", time_limit: str = "00:10:00", **over: Any) -> Any:
    """Four workers on two exclusive nodes. ``directives`` are further Slurm options."""
    directives = {"exclusive": True, **over.pop("directives", {})}
    slurm = {"partition": partition, "time_limit": time_limit, "directives": directives}
    sizes = {"nodes": 2, "count": 4, "gpus_per_node": 2, "rate": 10, "items": 40000}
    return embed_job("exits", faults=faults, slurm=slurm, **{**sizes, **over})


def attempt_is_up(job: Job, attempt: int = 0) -> bool:
    """Whether all workers of the attempt are running."""
    return job.json("orchestrator.json").get("attempt") == attempt and job.json("state.json").get("phase") == "running"


def started(space: JobSpace, spec: dict[str, Any]) -> Job:
    """Submit a job and wait until all workers run and have logged a line."""
    job = space.submit(spec)
    space.cluster.wait_for(lambda: attempt_is_up(job), 120, f"workers of job {job.job_id}")
    logs = ("w0", "w1", "w2", "w3")
    space.cluster.wait_for(
        lambda: all(any(path.stat().st_size for path in job.run_dir.glob(f"*_worker_{log}.out")) for log in logs),
        60,
        f"a line of each worker of job {job.job_id}",
    )
    return job


def waiting_for_its_end(space: JobSpace, **over: Any) -> Job:
    """A job whose workers stop after some work and wait for their end in the first attempt."""
    job = started(space, cluster_job("--stall --once --at 20", items=200, **over))

    def all_wait() -> bool:
        return len(list(job.run_dir.glob("failed_once_worker_*"))) == 4

    space.cluster.wait_for(all_wait, 60, f"some work of job {job.job_id}")
    return job


def wait_for_end(job: Job, timeout: float = 180, **seen: Any) -> Ended:
    """Wait for the end with rare polls, since many scenarios wait at the same time."""
    state = job.space.cluster.wait_for_job(int(job.job_id), timeout, interval=1.0)
    return Ended(job.run_dir, state, seen)


def queue_of(job: Job) -> str:
    """State and reason of the job in the Slurm queue."""
    return job.space.cluster.run(["squeue", "-h", "-j", job.job_id, "-o", "%T|%r"]).stdout


def runs_again(job: Job) -> None:
    """Wait for the second attempt, which ends by itself."""
    attempt = partial(job.json, "orchestrator.json")
    job.space.cluster.wait_for(lambda: attempt().get("attempt", 0) >= 1, 150, "the second attempt")


def hosts(job: Job) -> list[str]:
    return list(job.json("orchestrator.json")["hosts"])


def take_nodes(job: Job, seconds: float = 1) -> None:
    """Submit a job with a higher priority for the same nodes."""
    nodes = ",".join(hosts(job))
    wanted = ["--partition=gpu", "--nodes=2", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null"]
    argv = ["sbatch", *wanted, f"--wrap=sleep {seconds:g}"]
    job.space.cluster.run(argv, user=job.space.user, check=True)


@slurm_scenario
def at_the_time_limit(space: JobSpace) -> Ended:
    return wait_for_end(space.submit(cluster_job(time_limit="00:01:00")), 240)


@slurm_scenario
def time_limit_shortened(space: JobSpace) -> Ended:
    job = started(space, cluster_job())
    space.cluster.run(["scontrol", "update", f"JobId={job.job_id}", "TimeLimit=1"], user=ROOT, check=True)
    return wait_for_end(job, 240)


@slurm_scenario
def power_cut(space: JobSpace) -> Ended:
    job = started(space, cluster_job(directives={"no-requeue": True}))
    space.cluster.kill_node(hosts(job)[1])
    return wait_for_end(job, nodes=hosts(job))


@slurm_scenario
def power_cut_of_the_batch_node(space: JobSpace) -> Ended:
    job = started(space, cluster_job(directives={"no-requeue": True}))
    space.cluster.kill_node(hosts(job)[0])
    done = wait_for_end(job, nodes=hosts(job))
    done.seen["report"] = space.gpujob("report", str(job.run_dir), "--json")
    return done


@slurm_scenario
def requeued(space: JobSpace) -> Ended:
    job = waiting_for_its_end(space)
    # held, so that it stays in the queue until it was read
    space.cluster.run(["scontrol", "requeuehold", job.job_id], user=ROOT, check=True)
    space.cluster.wait_for(lambda: queue_of(job).startswith("PENDING"), 60, "the job in the queue")
    queued = job.watch()
    space.cluster.run(["scontrol", "release", job.job_id], user=ROOT, check=True)
    runs_again(job)
    return wait_for_end(job, queued=queued)


@slurm_scenario
def preempted_with_a_warning(space: JobSpace) -> Ended:
    job = waiting_for_its_end(space, partition="scavenge-requeue-grace")
    take_nodes(job)
    runs_again(job)
    return wait_for_end(job)


@slurm_scenario
def preempted(space: JobSpace) -> Ended:
    job = started(space, cluster_job(partition="scavenge"))
    take_nodes(job)
    return wait_for_end(job)


@slurm_scenario
def out_of_memory(space: JobSpace) -> Ended:
    faults = "--leak 300 --at 20 --only-rank 3"
    resources = {"nodes": 2, "gpus_per_node": 2, "memory_per_node": "400M"}
    return wait_for_end(space.submit(cluster_job(faults, resources=resources)))


@slurm_scenario
def cancelled(space: JobSpace) -> Ended:
    job = started(space, cluster_job())
    space.cluster.run(["scancel", job.job_id], user=space.user, check=True)
    return wait_for_end(job)


@slurm_scenario
def cancelled_with_sigterm_ignored(space: JobSpace) -> Ended:
    job = started(space, cluster_job("--ignore-sigterm"))
    space.cluster.run(["scancel", job.job_id], user=space.user, check=True)
    done = wait_for_end(job)
    done.seen["report"] = space.gpujob("report", str(job.run_dir), "--json")
    return done


@pytest.mark.slurm
def test_scancel_cancels_every_worker(cancelled: Ended) -> None:
    report = cancelled.report
    assert (cancelled.outcome, report["state"], report["exit_status"]) == ("CANCELLED", "CANCELLED", 5)
    assert report["cause"] is None
    for worker in report["workers"]:
        end = check_end(cancelled, worker["worker"], "cancelled", "killed by SIGTERM", "cancelled")
        assert end["signal"] == "SIGTERM"
        assert cancelled.events("worker signalled", worker=worker["worker"], signal="SIGTERM")
    stop = cancelled.events("job stopping")[-1]
    assert stop["reason"] == "cancelled"
    assert not (cancelled.run_dir / "targets.json").exists()
    assert not list(cancelled.run_dir.rglob(".*.tmp"))


@pytest.mark.slurm
def test_workers_that_ignore_sigterm_do_not_prevent_the_report(cancelled_with_sigterm_ignored: Ended) -> None:
    result = cancelled_with_sigterm_ignored.seen["report"]
    report = json.loads(result.stdout)
    assert (cancelled_with_sigterm_ignored.outcome, report["state"], result.returncode) == (
        "CANCELLED",
        "CANCELLED",
        5,
    ), result.stderr
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["cancelled"] * 4


@pytest.mark.slurm
def test_a_worker_that_uses_too_much_memory_is_the_cause(out_of_memory: Ended) -> None:
    report = out_of_memory.report
    assert (report["state"], report["exit_status"]) == ("OUT_OF_MEMORY", 4)
    assert (report["cause"]["worker"], report["cause"]["reason"]) == ("worker_w3", "host_oom")
    check_end(out_of_memory, "worker_w3", "host_oom", "killed by SIGKILL", "oom_kill", "its largest process had used")
    reasons = out_of_memory.reasons()
    # the kernel may kill the neighbour too, before the memory of the first victim is free
    assert (reasons[:2], reasons[3]) == (["terminated_peer"] * 2, "host_oom")
    assert reasons[2] in ("terminated_peer", "host_oom")


@pytest.mark.slurm
def test_a_job_preempted_by_another_one_is_preempted(preempted: Ended) -> None:
    report = preempted.report
    assert (preempted.outcome, report["state"], report["exit_status"]) == ("PREEMPTED", "PREEMPTED", 7)
    for worker in report["workers"]:
        check_end(preempted, worker["worker"], "preempted", "killed by SIGTERM", "preempted by another job")
    stop = preempted.events("job stopping")[-1]
    assert stop["reason"] == "preempted"


def assert_ran_again(done: Ended, *, attempts: int = 2) -> None:
    """Check that the second attempt resumed and completed the work. Later ones had nothing to do."""
    report, runs = done.report, range(attempts)
    assert (done.outcome, report["state"], report["attempt"]) == ("COMPLETED", "COMPLETED", attempts - 1)
    assert report["items"] == 200
    assert done.records() == {f"worker_w{rank}_rank{rank}_a{attempt}_r0" for rank in range(4) for attempt in runs}
    assert [event["attempt"] for event in done.events("job started")] == list(runs)
    assert len(done.events("worker ended", reason="completed")) == 4 * (attempts - 1)


@pytest.mark.slurm
def test_a_requeued_job_keeps_the_records_of_its_first_attempt(requeued: Ended) -> None:
    assert_ran_again(requeued)
    stop = requeued.events("job stopping")[-1]
    assert (stop["reason"], "requeued" in stop["cause"]) == ("cancelled", True)
    queued = requeued.seen["queued"]
    assert (queued["state"], queued["attempt"], queued["report"]) == ("PENDING", 1, None)
    assert queued["requeued"]["attempt"] == 0
    assert [worker["state"] for worker in queued["workers"]] == ["not_found"] * 4
    assert len(requeued.events("worker ended", reason="cancelled", signal="SIGTERM")) == 4


@pytest.mark.slurm
def test_a_job_preempted_with_a_grace_time_runs_again(preempted_with_a_warning: Ended) -> None:
    # Slurm 24.11 may queue a job requeued at the end of a grace time once more when that job completes
    attempts = preempted_with_a_warning.report["attempt"] + 1
    assert attempts in (2, 3)
    assert_ran_again(preempted_with_a_warning, attempts=attempts)
    stop = preempted_with_a_warning.events("job stopping")[-1]
    assert (stop["reason"], "preempted by another job" in stop["cause"]) == ("preempted", True)
    ends = preempted_with_a_warning.events("worker ended", reason="preempted")
    assert len(ends) == 4


# On this machine


def test_every_exit_reason_is_produced_by_a_job_of_this_file() -> None:
    text = Path(__file__).read_text("utf-8")
    assert [reason for reason in REASONS if f'"{reason}"' not in text] == []


def two_workers(faults: str, **over: Any) -> dict[str, Any]:
    """Two workers with long work and these faults."""
    return launcher.embed_job(faults, items=9000, **over)


def two_roles(program: str, **keys: Any) -> dict[str, Any]:
    """A worker that runs a Python program, and one with long work."""
    spec = two_workers("", count=1)
    return {**spec, "workers": [{"role": "odd", "command": ["python3", "-c", program], **keys}, *spec["workers"]]}


def run_local(folder: Path, spec: Mapping[str, Any], act: Callable[[LocalJob], object] = lambda job: None) -> Ended:
    """Run a local job to its end, after this action. No process may outlive it."""
    with LocalJob(folder, spec, "--quiet") as job:
        act(job)
        done = Ended(job.run_dir, job.wait(120))
        assert job.left_over() == {}
        return done


def send(number: int, key: str = "pid") -> Callable[[LocalJob], None]:
    """Send a signal to a process of the second worker after some work."""

    def act(job: LocalJob) -> None:
        job.phase("running", 60)
        poll(lambda: job.lines_of(1) >= 150, "some work of the second worker", 60)
        os.kill(job.worker(1)[key], number)

    return act


@scenario
def raised(folder: Path) -> Ended:
    return run_local(folder, two_workers("--only-rank 1 --at 5 --raise"))


@scenario
def segmentation_fault(folder: Path) -> Ended:
    return run_local(folder, two_workers("--only-rank 1 --at 5 --signal SEGV"))


@scenario
def killed(folder: Path) -> Ended:
    return run_local(folder, two_workers(""), send(signal.SIGKILL))


@scenario
def wrapper_killed(folder: Path) -> Ended:
    return run_local(folder, two_workers(""), send(signal.SIGKILL, "wrapper_pid"))


@scenario
def terminated_alone(folder: Path) -> Ended:
    return run_local(folder, two_workers(""), send(signal.SIGTERM, "wrapper_pid"))


@scenario
def no_interpreter(folder: Path) -> Ended:
    folder.mkdir()
    (folder / "program").write_text("#!/no/such/interpreter\n")
    (folder / "program").chmod(0o755)
    spec = two_workers("", count=1)
    return run_local(folder, {**spec, "workers": [{"role": "odd", "command": "./program"}, *spec["workers"]]})


@scenario
def disk_full(folder: Path) -> Ended:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root (mount)")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "small-disk", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    kept = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        spec = two_roles(FILLS_THE_DISK)
        spec["workers"][1]["command"] = "sleep 600"  # writes nothing, so that only one worker fails
        ended = run_local(folder, spec)
        # the files disappear with the mount
        subprocess.run(["cp", "-r", f"{ended.run_dir}/.", kept], check=True)
        return Ended(kept, ended.outcome)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@scenario
def cuda_memory(folder: Path) -> Ended:
    return run_local(folder, two_workers("--only-rank 1 --at 5 --cuda-oom"))


@scenario
def nccl_timeout(folder: Path) -> Ended:
    return run_local(folder, two_roles(NCCL_TIMEOUT))


@scenario
def other_ends(folder: Path) -> Ended:
    commands = {
        "device": "echo 'RuntimeError: CUDA error: uncorrectable ECC error encountered' >&2; exit 1",
        "cpu": "ulimit -St 1; while :; do :; done",
        "file": "ulimit -f 8; exec cat /dev/zero > large",
        "shell": "sh -c 'kill -SEGV $$'; exit $?",
    }
    workers = [{"role": role, "command": ["bash", "-c", text], "critical": False} for role, text in commands.items()]
    spec = launcher.embed_job("", items=900, count=1)
    return run_local(folder, {**spec, "workers": [*workers, *spec["workers"]]})


@scenario
def out_of_shared_memory(folder: Path) -> Ended:
    """A job in one control group for all its workers. One of them uses too much memory, and its peer notices."""
    group = Path("/sys/fs/cgroup/memory/gpujob-tests")
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(500 << 20))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    spec = two_roles(CONNECTS)
    spec["workers"][1] = {"role": "leaky", "command": ["python3", "-c", LISTENS]}
    try:
        with LocalJob(
            folder, spec, "--quiet", prefix=("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        ) as job:
            return Ended(job.run_dir, job.wait(120))
    finally:
        group.rmdir()


@scenario
def third_time_lucky(folder: Path) -> Ended:
    keys = {"restart": {"max": 2, "backoff": 0.2}}
    spec = {
        "name": "lucky",
        "workers": [{"command": ["python3", "-c", FAILS_TWICE], **keys}],
        "progress": {"total_items": 60},
        "monitoring": {"check_interval": 0.2, "linger": 0},
    }
    with LocalJob(folder, spec, "--quiet") as job:
        record = poll(lambda: next(job.run_dir.glob("sidecars/*.json"), None), "a sidecar", 60)
        address = json.loads(record.read_text())["address"]
        positions: list[float] = []

        def ended() -> bool:
            for position in items_processed(address):
                positions.append(position)
                if position:  # each run continues when one of its values has been read
                    (job.run_dir / f"seen_{run_of(position)}").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(0.1)
            return job.process.returncode is not None

        poll(ended, "the end of three runs", 120)
        return Ended(job.run_dir, job.wait(), {"positions": positions})


def run_of(position: float) -> int:
    """The run that processed this item."""
    return int(position - 1) // 20


def items_processed(address: str) -> list[float]:
    """Item counter of the only worker, empty if the sidecar does not answer."""
    try:
        page = requests.get(f"http://{address}/metrics", timeout=2).text
    except requests.RequestException:
        return []
    return [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "gpujob_worker_items_processed_total"
    ]


def test_an_exception_is_an_app_error(raised: Ended) -> None:
    assert raised.outcome == 1
    end = check_failure(
        raised, "worker_w1", "app_error", "exit status 1", "simulated failure of worker 1 at item 5", ".err"
    )
    assert (end["code"], end["signal"]) == (1, None)


def test_a_segmentation_fault_is_a_crash(segmentation_fault: Ended) -> None:
    assert segmentation_fault.outcome == 1
    end = check_failure(segmentation_fault, "worker_w1", "crashed_signal", "killed by SIGSEGV")
    assert (end["code"], end["signal"]) == (None, "SIGSEGV")


def test_the_sender_of_an_unexplained_kill_is_unknown(killed: Ended) -> None:
    assert killed.outcome == 1
    end = check_failure(killed, "worker_w1", "killed_unknown", "killed by SIGKILL", "sender unknown")
    assert end["signal"] == "SIGKILL"


def test_a_worker_without_its_wrapper_is_reported_as_such(wrapper_killed: Ended) -> None:
    assert wrapper_killed.outcome == 1
    check_failure(wrapper_killed, "worker_w1", "killed_unknown", "its wrapper", "left no record")


def test_a_worker_terminated_from_outside_is_cancelled(terminated_alone: Ended) -> None:
    assert terminated_alone.outcome == 5
    check_end(terminated_alone, "worker_w1", "cancelled", "killed by SIGTERM", "SIGTERM sent by another process")
    assert terminated_alone.events("worker signalled", worker="worker_w1", signal="SIGTERM")
    assert terminated_alone.report["state"] == "CANCELLED"


def test_a_program_without_its_interpreter_fails_to_launch(no_interpreter: Ended) -> None:
    assert no_interpreter.outcome == 1
    assert (no_interpreter.report["state"], no_interpreter.report["cause"]["worker"]) == ("FAILED", "odd_w0")
    # the other worker may end before its own program has started
    assert no_interpreter.reasons() == ["launch_failed", "terminated_peer"]
    problem = "cannot start './program'", "the interpreter that it names does not exist"
    end = check_end(no_interpreter, "odd_w0", "launch_failed", *problem)
    assert end["code"] == 127


def test_a_full_disk_is_the_exit_reason(disk_full: Ended) -> None:
    assert disk_full.outcome == 1
    assert check_failure(disk_full, "odd_w0", "disk_full", "exit status 1")["code"] == 1


def test_exhausted_gpu_memory_is_found_in_the_log(cuda_memory: Ended) -> None:
    assert cuda_memory.outcome == 1
    end = check_failure(cuda_memory, "worker_w1", "cuda_oom", "exit status 1", "CUDA out of memory. Tried to allocate")
    assert end["code"] == 1


def test_a_hanging_collective_is_found_in_the_log(nccl_timeout: Ended) -> None:
    assert nccl_timeout.outcome == 1
    end = check_failure(nccl_timeout, "odd_w0", "nccl_timeout", "killed by SIGABRT")
    assert end["signal"] == "SIGABRT"


def test_limits_of_a_process_and_the_words_of_a_shell_are_named(other_ends: Ended) -> None:
    check_end(other_ends, "cpu_w0", "resource_limit", "killed by SIGXCPU", "limit of CPU time")
    check_end(other_ends, "file_w0", "resource_limit", "killed by SIGXFSZ", "limit of file size")
    check_end(other_ends, "shell_w0", "crashed_signal", "exit status 139, a shell's word for SIGSEGV")
    check_end(other_ends, "device_w0", "gpu_fault", "exit status 1", "uncorrectable ECC error")


def test_a_kill_for_lack_of_memory_belongs_to_the_worker_that_was_killed(out_of_shared_memory: Ended) -> None:
    done = out_of_shared_memory
    assert (done.report["state"], done.report["cause"]["worker"]) == ("OUT_OF_MEMORY", "leaky_w0")
    check_end(done, "leaky_w0", "host_oom", "killed by SIGKILL", "oom_kill rose")
    check_end(
        done, "odd_w0", "terminated_peer", "exit status 1", "the kernel had killed leaky_w0 of the same control group"
    )


def test_a_worker_that_fails_twice_completes_in_its_third_run(third_time_lucky: Ended) -> None:
    assert (third_time_lucky.outcome, third_time_lucky.report["state"]) == (0, "COMPLETED")
    worker = third_time_lucky.worker("worker_w0")
    assert worker["restarts"] == 2
    assert [end["reason"] for end in worker["exits"]] == ["app_error", "app_error", "completed"]
    assert (worker["items"], worker["items_processed"]) == (60, 60)
    (node,) = third_time_lucky.report["nodes"]
    for run, first in (("", 0), ("_r1", 20), ("_r2", 40)):
        text = (third_time_lucky.run_dir / f"{node}_worker_w0{run}.out").read_text()
        assert text.startswith(f"Resuming at {first}/60 items\nProcessed {first + 1}/60 items\n")
    restarts = third_time_lucky.events("worker restarted", worker="worker_w0")
    assert [event["restart"] for event in restarts] == [1, 2]
    positions = third_time_lucky.seen["positions"]
    assert positions == sorted(positions), "a counter never falls"
    assert "worker_w0 rank 0 restarts in 0.2 s (1 of 2): it ended by app_error\n" in third_time_lucky.log()
    assert {run_of(position) for position in positions if position} == {0, 1, 2}


# Slow scenarios of Slurm


@pytest.mark.slurm
def test_workers_of_a_node_without_power_fail_with_it(power_cut: Ended) -> None:
    report, lost = power_cut.report, power_cut.seen["nodes"][1]
    assert (power_cut.outcome, report["state"], report["exit_status"]) == ("NODE_FAIL", "NODE_FAIL", 6)
    assert (report["cause"]["node"], report["cause"]["reason"]) == (lost, "node_failure")
    assert power_cut.reasons() == ["terminated_peer", "terminated_peer", "node_failure", "node_failure"]
    for worker in ("worker_w2", "worker_w3"):
        check_end(power_cut, worker, "node_failure", lost)
    assert lost in "; ".join(power_cut.worker("worker_w0")["exit"]["evidence"])


@pytest.mark.slurm
def test_a_job_whose_first_node_loses_power_is_not_shown_as_running(power_cut_of_the_batch_node: Ended) -> None:
    done, lost = power_cut_of_the_batch_node, power_cut_of_the_batch_node.seen["nodes"][0]
    assert done.outcome == "NODE_FAIL"
    report = json.loads(done.seen["report"].stdout)
    assert (report["state"], done.seen["report"].returncode) == ("NODE_FAIL", 6), done.seen["report"].stderr
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["node_failure"] * 2 + ["terminated_peer"] * 2
    assert (report["cause"]["worker"], report["cause"]["node"]) == ("worker_w0", lost)
    assert lost in "; ".join(report["cause"]["evidence"])
    # no process was left to write a report, but the other node has exit records
    assert not done.events("job ended")
    assert done.records() == {"worker_w2_rank2_a0_r0", "worker_w3_rank3_a0_r0"}


@pytest.mark.slurm
@pytest.mark.parametrize("name", ["at_the_time_limit", "time_limit_shortened"])
def test_every_worker_ends_at_the_time_limit(slurm_results: Results[Ended], name: str) -> None:
    done = slurm_results(name)
    report = done.report
    assert (done.outcome, report["state"], report["exit_status"]) == ("TIMEOUT", "TIMEOUT", 3)
    assert report["cause"] is None
    for worker in report["workers"]:
        check_end(done, worker["worker"], "time_limit", "killed by SIGTERM", "time limit")
        assert done.events("worker signalled", worker=worker["worker"], signal="SIGTERM")
    stop = done.events("job stopping")[-1]
    assert stop["reason"] == "time_limit"
