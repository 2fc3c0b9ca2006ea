"""Each reason why a worker ends, made for real: local jobs, and jobs of a Slurm whose nodes lose power.

Each scenario is one job, played once. Those that the collected tests need are played side by side, on
the cluster each on nodes of its own, while the tests look at the ones that have ended.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from exporter.workers.exit_reason import CONSEQUENCES
from tests.endtoend.jobs import Job, JobSpace, diagnosis, embed_job, events, user_for, was_asked
from tests.realstack.cluster import ROOT, Cluster, slurm_unavailable
from tests.support import launcher
from tests.support.launcher import LocalJob, poll

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
while not glob.glob(os.path.join(folder, "workers", "worker_*.start.json")):  # nobody else writes on a full disk
    time.sleep(0.1)
with open(os.path.join(folder, "big"), "wb", buffering=0) as out:
    while True:
        out.write(bytes(65536))
"""


@dataclass
class Ended:
    """A job that has been played: exit status of `gpujob run`, or Slurm's word for how the job ended."""

    run_dir: Path
    outcome: int | str
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def report(self) -> dict[str, Any]:
        found = launcher.read_json(self.run_dir / "report.json")
        assert found, "".join((self.run_dir / name).read_text() for name in ("log.out", "log.err"))
        return found

    def worker(self, name: str) -> dict[str, Any]:
        """A worker's part of the report."""
        (found,) = [worker for worker in self.report["workers"] if worker["worker"] == name]
        return dict(found)

    def reasons(self) -> list[str]:
        return [worker["exit"]["reason"] for worker in self.report["workers"]]

    def events(self, kind: str, **facts: Any) -> list[dict[str, Any]]:
        """Events of a kind that have these facts."""
        return [event for event in events(self.run_dir) if event["event"] == kind and facts.items() <= event.items()]

    def has_run(self, worker: str) -> bool:
        """Whether a worker of one process has left a start record."""
        return any((self.run_dir / "workers").glob(f"{worker}_rank*.start.json"))

    def records(self) -> set[str]:
        """Names of the exit records of all runs."""
        return {path.name.removesuffix(".exit.json") for path in (self.run_dir / "workers").glob("*.exit.json")}


def told(done: Ended, worker: str, reason: str, *words: str) -> dict[str, Any]:
    """The end of a worker, which report and events tell alike, and a diagnosis if it has failed."""
    end = done.worker(worker)["exit"]
    assert end["reason"] == reason, end["evidence"]
    evidence = "; ".join(end["evidence"])
    assert [word for word in words if word not in evidence] == [], evidence
    assert done.events("worker ended", worker=worker)[-1]["reason"] == reason
    assert done.events("worker started", worker=worker)
    for kind in ("job started", "phase", "job ended"):
        assert done.events(kind), f"no event {kind!r}"
    if reason not in CONSEQUENCES:
        assert diagnosis(done.run_dir, worker)["exit"]["reason"] == reason
    return dict(end)


def failed(done: Ended, worker: str, reason: str, *words: str) -> dict[str, Any]:
    """The job failed because of this worker, and its peers were asked to end for that reason."""
    report = done.report
    assert (report["state"], report["exit_status"]) == ("FAILED", 1)
    assert (report["cause"]["worker"], report["cause"]["reason"]) == (worker, reason)
    for peer in (other["worker"] for other in report["workers"] if other["worker"] != worker):
        end = done.worker(peer)["exit"]
        assert end["reason"] == "terminated_peer"
        assert f"{worker} rank {report['cause']['rank']}" in "; ".join(end["evidence"])
        assert f"ended by {reason}" in "; ".join(end["evidence"])
        if not done.has_run(peer):
            continue  # the other was faster: what was asked to end was not yet the wrapper
        assert was_asked(report, end)
        assert done.events("worker signalled", worker=peer, signal="SIGTERM") or end["signal"] is None
    return told(done, worker, reason, *words)


# How scenarios are played

Play = Callable[[Path], Ended]
SlurmPlay = Callable[[JobSpace], Ended]
LOCAL: dict[str, Play] = {}
SLURM: dict[str, SlurmPlay] = {}


class Stage:
    """Plays scenarios side by side; each is a function without arguments."""

    def __init__(self, plays: Mapping[str, Callable[[], Ended]], at_once: int) -> None:
        self._pool = ThreadPoolExecutor(max(1, at_once))
        self._played: dict[str, Future[Ended]] = {name: self._pool.submit(play) for name, play in plays.items()}

    def result(self, name: str) -> Ended:
        return self._played[name].result(600)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def needed(request: pytest.FixtureRequest, scenarios: Mapping[str, object]) -> list[str]:
    """Those scenarios that a collected test asks for, in the order in which they stand here."""
    ours = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = {name for item in ours for name in getattr(item, "fixturenames", ())}
    return [name for name in scenarios if name in names]


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("jobs")
    made = Stage({name: partial(LOCAL[name], folder / name) for name in needed(request, LOCAL)}, AT_ONCE)
    yield made
    launcher.kill_all_with(folder)
    made.close()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, space_dir: Path) -> Iterator[Cluster]:
    """Two nodes for each scenario: those that lose power or are taken by others are nobody else's."""
    if reason := slurm_unavailable():
        pytest.skip(reason)
    with Cluster(space_dir / "exits", nodes=2 * len(needed(request, SLURM)), prefix="exits") as made:
        yield made


@pytest.fixture(scope="module")
def slurm_stage(request: pytest.FixtureRequest, space_dir: Path, cluster: Cluster) -> Iterator[Stage]:
    user, spaces = user_for(cluster), list[JobSpace]()
    targets = space_dir / "exits-targets"
    targets.mkdir()
    targets.chmod(0o777)

    def play(name: str) -> Ended:
        directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=space_dir))
        space = JobSpace(cluster, directory, user, targets)
        spaces.append(space)
        return SLURM[name](space)

    names = needed(request, SLURM)
    made = Stage({name: partial(play, name) for name in names}, len(names))
    yield made
    for space in spaces:
        space.close()
    made.close()


def scenario(play: Play) -> Any:
    """A fixture that is what came of a local job."""
    LOCAL[play.__name__] = play

    @pytest.fixture(scope="module", name=play.__name__)
    def played(stage: Stage) -> Ended:
        return stage.result(play.__name__)

    return played


def slurm_scenario(play: SlurmPlay) -> Any:
    """A fixture that is what came of a job of the cluster."""
    SLURM[play.__name__] = play

    @pytest.fixture(scope="module", name=play.__name__)
    def played(slurm_stage: Stage) -> Ended:
        return slurm_stage.result(play.__name__)

    return played


# Jobs of the cluster. Each plays on its own; the slowest tests stand at the end of this file.


def cluster_job(options: str = "", *, partition: str = "gpu", time_limit: str = "00:10:00", **over: Any) -> Any:
    """Four workers on two nodes that are theirs alone; Slurm's own options are those in ``directives``."""
    directives = {"exclusive": True, **over.pop("directives", {})}
    slurm = {"partition": partition, "time_limit": time_limit, "directives": directives}
    sizes = {"nodes": 2, "count": 4, "gpus_per_node": 2, "rate": 10, "items": 40000}
    return embed_job("exits", options=options, slurm=slurm, **{**sizes, **over})


def attempt_is_up(job: Job, attempt: int = 0) -> bool:
    """Whether all workers of the attempt have been seen to run."""
    return job.json("orchestrator.json").get("attempt") == attempt and job.json("state.json").get("phase") == "running"


def started(space: JobSpace, spec: dict[str, Any]) -> Job:
    """A job whose workers run, and have logged that they do."""
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
    """A job of which each worker of the first attempt has done some work and does no more, until it is ended."""
    job = started(space, cluster_job("--stall --once --at 20", items=200, **over))

    def all_wait() -> bool:
        return len(list(job.run_dir.glob("failed_once_worker_*"))) == 4

    space.cluster.wait_for(all_wait, 60, f"some work of job {job.job_id}")
    return job


def over(job: Job, timeout: float = 180, **seen: Any) -> Ended:
    """Wait for the end, looking seldom: many do at once."""
    state = job.space.cluster.wait_for_job(int(job.job_id), timeout, interval=1.0)
    return Ended(job.run_dir, state, seen)


def queue_of(job: Job) -> str:
    """State and reason of the job in Slurm's queue."""
    return job.space.cluster.run(["squeue", "-h", "-j", job.job_id, "-o", "%T|%r"]).stdout


def runs_again(job: Job) -> None:
    """Wait for the second attempt. What it does belongs to nobody's test: a short job ends by itself."""
    attempt = partial(job.json, "orchestrator.json")
    job.space.cluster.wait_for(lambda: attempt().get("attempt", 0) >= 1, 150, "the second attempt")


def hosts(job: Job) -> list[str]:
    return list(job.json("orchestrator.json")["hosts"])


def take_nodes(job: Job, seconds: float = 1) -> None:
    """A job of a partition that comes first wants the very nodes."""
    nodes = ",".join(hosts(job))
    wanted = ["--partition=gpu", "--nodes=2", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null"]
    argv = ["sbatch", *wanted, f"--wrap=sleep {seconds:g}"]
    job.space.cluster.run(argv, user=job.space.user, check=True)


@slurm_scenario
def at_the_time_limit(space: JobSpace) -> Ended:
    return over(space.submit(cluster_job(time_limit="00:01:00")), 240)


@slurm_scenario
def time_limit_shortened(space: JobSpace) -> Ended:
    job = started(space, cluster_job())
    space.cluster.run(["scontrol", "update", f"JobId={job.job_id}", "TimeLimit=1"], user=ROOT, check=True)
    return over(job, 240)


@slurm_scenario
def power_cut(space: JobSpace) -> Ended:
    job = started(space, cluster_job(directives={"no-requeue": True}))
    space.cluster.kill_node(hosts(job)[1])
    return over(job, nodes=hosts(job))


@slurm_scenario
def power_cut_of_the_batch_node(space: JobSpace) -> Ended:
    job = started(space, cluster_job(directives={"no-requeue": True}))
    space.cluster.kill_node(hosts(job)[0])
    done = over(job, nodes=hosts(job))
    done.seen["report"] = space.gpujob("report", str(job.run_dir), "--json")
    return done


@slurm_scenario
def requeued(space: JobSpace) -> Ended:
    job = waiting_for_its_end(space)
    # held, so that it waits there until somebody has looked
    space.cluster.run(["scontrol", "requeuehold", job.job_id], user=ROOT, check=True)
    space.cluster.wait_for(lambda: queue_of(job).startswith("PENDING"), 60, "the job in the queue")
    queued = job.watch()
    space.cluster.run(["scontrol", "release", job.job_id], user=ROOT, check=True)
    runs_again(job)
    return over(job, queued=queued)


@slurm_scenario
def preempted_with_a_warning(space: JobSpace) -> Ended:
    job = waiting_for_its_end(space, partition="scavenge-requeue-grace")
    take_nodes(job)
    runs_again(job)
    return over(job)


@slurm_scenario
def preempted(space: JobSpace) -> Ended:
    job = started(space, cluster_job(partition="scavenge"))
    take_nodes(job)
    return over(job)


@slurm_scenario
def out_of_memory(space: JobSpace) -> Ended:
    options = "--leak 300 --at 20 --only-rank 3"
    resources = {"nodes": 2, "gpus_per_node": 2, "memory_per_node": "400M"}
    return over(space.submit(cluster_job(options, resources=resources)))


@slurm_scenario
def cancelled(space: JobSpace) -> Ended:
    job = started(space, cluster_job())
    space.cluster.run(["scancel", job.job_id], user=space.user, check=True)
    return over(job)


@slurm_scenario
def cancelled_in_vain(space: JobSpace) -> Ended:
    job = started(space, cluster_job("--ignore-sigterm"))
    space.cluster.run(["scancel", job.job_id], user=space.user, check=True)
    done = over(job)
    done.seen["report"] = space.gpujob("report", str(job.run_dir), "--json")
    return done


@pytest.mark.slurm
def test_scancel_is_a_cancellation_of_every_worker(cancelled: Ended) -> None:
    report = cancelled.report
    assert (cancelled.outcome, report["state"], report["exit_status"]) == ("CANCELLED", "CANCELLED", 5)
    assert report["cause"] is None
    for worker in report["workers"]:
        end = told(cancelled, worker["worker"], "cancelled", "killed by SIGTERM", "cancelled")
        assert end["signal"] == "SIGTERM"
        assert cancelled.events("worker signalled", worker=worker["worker"], signal="SIGTERM")
    stop = cancelled.events("job stopping")[-1]
    assert stop["reason"] == "cancelled"


@pytest.mark.slurm
def test_workers_that_do_not_listen_do_not_cost_the_report(cancelled_in_vain: Ended) -> None:
    told = cancelled_in_vain.seen["report"]
    report = json.loads(told.stdout)
    assert (cancelled_in_vain.outcome, report["state"], told.returncode) == ("CANCELLED", "CANCELLED", 5), told.stderr
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["cancelled"] * 4


@pytest.mark.slurm
def test_a_worker_that_takes_too_much_memory_is_named(out_of_memory: Ended) -> None:
    report = out_of_memory.report
    assert (report["state"], report["exit_status"]) == ("OUT_OF_MEMORY", 4)
    assert (report["cause"]["worker"], report["cause"]["reason"]) == ("worker_w3", "host_oom")
    told(out_of_memory, "worker_w3", "host_oom", "killed by SIGKILL", "oom_kill")
    assert out_of_memory.reasons() == ["terminated_peer"] * 3 + ["host_oom"]


@pytest.mark.slurm
def test_a_job_that_others_push_aside_was_preempted(preempted: Ended) -> None:
    report = preempted.report
    assert (preempted.outcome, report["state"], report["exit_status"]) == ("PREEMPTED", "PREEMPTED", 7)
    for worker in report["workers"]:
        told(preempted, worker["worker"], "preempted", "killed by SIGTERM", "preempted by another job")
    stop = preempted.events("job stopping")[-1]
    assert stop["reason"] == "preempted"


def assert_ran_again(done: Ended, *, attempts: int = 2) -> None:
    """The first attempt was ended, the second took up its work and completed it; later ones had nothing left to do."""
    report, runs = done.report, range(attempts)
    assert (done.outcome, report["state"], report["attempt"]) == ("COMPLETED", "COMPLETED", attempts - 1)
    assert report["items"] == 200
    assert done.records() == {f"worker_w{rank}_rank{rank}_a{attempt}_r0" for rank in range(4) for attempt in runs}
    assert [event["attempt"] for event in done.events("job started")] == list(runs)
    assert len(done.events("worker ended", reason="completed")) == 4 * (attempts - 1)


@pytest.mark.slurm
def test_a_requeued_job_keeps_what_is_known_of_its_first_attempt(requeued: Ended) -> None:
    assert_ran_again(requeued)
    stop = requeued.events("job stopping")[-1]
    assert (stop["reason"], "requeued" in stop["cause"]) == ("cancelled", True)
    queued = requeued.seen["queued"]
    assert (queued["state"], queued["attempt"], queued["report"]) == ("PENDING", 1, None)
    assert queued["requeued"]["attempt"] == 0
    assert [worker["state"] for worker in queued["workers"]] == ["not_found"] * 4
    assert len(requeued.events("worker ended", reason="cancelled", signal="SIGTERM")) == 4


@pytest.mark.slurm
def test_a_job_that_is_warned_of_its_preemption_is_preempted_and_runs_again(preempted_with_a_warning: Ended) -> None:
    # Slurm 24.11 queues a job that it has requeued at the end of a grace time once more when that job completes
    attempts = preempted_with_a_warning.report["attempt"] + 1
    assert attempts in (2, 3)
    assert_ran_again(preempted_with_a_warning, attempts=attempts)
    stop = preempted_with_a_warning.events("job stopping")[-1]
    assert (stop["reason"], "preempted by another job" in stop["cause"]) == ("preempted", True)
    ends = preempted_with_a_warning.events("worker ended", reason="preempted")
    assert len(ends) == 4


# On this machine


def gang(options: str, **over: Any) -> dict[str, Any]:
    """Two workers with work for a long time, of which one is to fail."""
    return launcher.embed_job(options, items=9000, **over)


def two_roles(program: str, **keys: Any) -> dict[str, Any]:
    """A worker that runs a Python program, and one beside it that has work for a long time."""
    spec = gang("", count=1)
    return {**spec, "workers": [{"role": "odd", "command": ["python3", "-c", program], **keys}, *spec["workers"]]}


def played(folder: Path, spec: Mapping[str, Any], act: Callable[[LocalJob], object] = lambda job: None) -> Ended:
    """Run a local job to its end, once something has been done to it."""
    with LocalJob(folder, spec, "--quiet") as job:
        act(job)
        return Ended(job.run_dir, job.wait(120))


def send(number: int, key: str = "pid") -> Callable[[LocalJob], None]:
    """A signal to a process of the second worker, once it has been at work for a while."""

    def act(job: LocalJob) -> None:
        job.phase("running", 60)
        poll(lambda: job.lines_of(1) >= 150, "some work of the second worker", 60)
        os.kill(job.worker(1)[key], number)

    return act


@scenario
def completed(folder: Path) -> Ended:
    return played(folder, launcher.embed_job(items=60))


@scenario
def raised(folder: Path) -> Ended:
    return played(folder, gang("--only-rank 1 --at 5 --raise"))


@scenario
def exit_status_3(folder: Path) -> Ended:
    return played(folder, gang("--only-rank 1 --at 5 --exit-code 3", count=3))


@scenario
def segmentation_fault(folder: Path) -> Ended:
    return played(folder, gang("--only-rank 1 --at 5 --signal SEGV"))


@scenario
def killed(folder: Path) -> Ended:
    return played(folder, gang(""), send(signal.SIGKILL))


@scenario
def wrapper_killed(folder: Path) -> Ended:
    return played(folder, gang(""), send(signal.SIGKILL, "wrapper_pid"))


@scenario
def terminated_alone(folder: Path) -> Ended:
    return played(folder, gang(""), send(signal.SIGTERM, "wrapper_pid"))


@scenario
def no_interpreter(folder: Path) -> Ended:
    folder.mkdir()
    (folder / "program").write_text("#!/no/such/interpreter\n")
    (folder / "program").chmod(0o755)
    spec = gang("", count=1)
    return played(folder, {**spec, "workers": [{"role": "odd", "command": "./program"}, *spec["workers"]]})


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
        spec["workers"][1]["command"] = "sleep 600"  # writes nothing: the disk fails one worker alone
        ended = played(folder, spec)
        # the disk goes with the mount
        subprocess.run(["cp", "-r", f"{ended.run_dir}/.", kept], check=True)
        return Ended(kept, ended.outcome)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@scenario
def cuda_memory(folder: Path) -> Ended:
    return played(folder, gang("--only-rank 1 --at 5 --cuda-oom"))


@scenario
def nccl_timeout(folder: Path) -> Ended:
    return played(folder, two_roles(NCCL_TIMEOUT))


@scenario
def ctrl_c(folder: Path) -> Ended:
    ours, theirs = os.openpty()
    with LocalJob(
        folder, gang(""), "--quiet", prefix=["setsid", "--ctty", "--wait"], stdin=theirs, stdout=theirs
    ) as job:
        os.close(theirs)
        job.phase("running", 60)
        os.write(ours, b"\x03")
        done = Ended(job.run_dir, job.wait(120))
        os.close(ours)
        return done


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
                if position:  # each run goes on once a value of its own has been seen
                    (job.run_dir / f"seen_{run_of(position)}").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(0.1)
            return job.process.returncode is not None

        poll(ended, "the end of three runs", 120)
        return Ended(job.run_dir, job.wait(), {"positions": positions})


def run_of(position: float) -> int:
    """Which of the runs has done this item."""
    return int(position - 1) // 20


def items_processed(address: str) -> list[float]:
    """The counter of the only worker, while the sidecar answers."""
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


@scenario
def dispensable(folder: Path) -> Ended:
    spec = launcher.embed_job("--shards 2", items=300)  # the helper has no share of the work
    work, begin = spec["workers"][0], folder / "begin"
    work |= {"command": f"until [ -e {shlex.quote(str(begin))} ]; do sleep 0.1; done; exec {work['command']}"}
    work["shell"] = True
    helper = {"role": "helper", "critical": False, "command": ["python3", "-c", "raise SystemExit(3)"]}

    def act(job: LocalJob) -> None:
        job.phase("running", 60)
        poll(lambda: [event for event in events(job.run_dir) if event["event"] == "worker ended"], "its end", 60)
        begin.touch()

    return played(folder, {**spec, "workers": [work, helper]}, act)


def test_a_worker_that_does_its_work_has_completed(completed: Ended) -> None:
    assert (completed.outcome, completed.report["state"]) == (0, "COMPLETED")
    for worker in completed.report["workers"]:
        assert (worker["exit"]["reason"], worker["exit"]["evidence"]) == ("completed", ["exit status 0"])
    assert not completed.events("worker signalled")
    assert [event["phase"] for event in completed.events("phase")][-1] == "finished"


def test_an_exception_is_an_error_of_the_program(raised: Ended) -> None:
    assert raised.outcome == 1
    end = failed(raised, "worker_w1", "app_error", "exit status 1", "simulated failure of worker 1 at item 5", ".err")
    assert (end["code"], end["signal"]) == (1, None)


def test_an_exit_status_is_kept(exit_status_3: Ended) -> None:
    assert exit_status_3.outcome == 1
    assert failed(exit_status_3, "worker_w1", "app_error", "exit status 3")["code"] == 3
    assert exit_status_3.reasons() == ["terminated_peer", "app_error", "terminated_peer"]


def test_a_segmentation_fault_is_a_crash(segmentation_fault: Ended) -> None:
    assert segmentation_fault.outcome == 1
    end = failed(segmentation_fault, "worker_w1", "crashed_signal", "killed by SIGSEGV")
    assert (end["code"], end["signal"]) == (None, "SIGSEGV")


def test_nobody_is_blamed_for_a_kill_without_a_trace(killed: Ended) -> None:
    assert killed.outcome == 1
    end = failed(killed, "worker_w1", "killed_unknown", "killed by SIGKILL", "sender unknown")
    assert end["signal"] == "SIGKILL"


def test_a_worker_that_loses_its_wrapper_is_told_apart(wrapper_killed: Ended) -> None:
    assert wrapper_killed.outcome == 1
    failed(wrapper_killed, "worker_w1", "killed_unknown", "its wrapper", "left no record")


def test_a_worker_that_somebody_terminates_was_cancelled(terminated_alone: Ended) -> None:
    assert terminated_alone.outcome == 5
    told(terminated_alone, "worker_w1", "cancelled", "killed by SIGTERM", "SIGTERM came from outside")
    assert terminated_alone.events("worker signalled", worker="worker_w1", signal="SIGTERM")
    assert terminated_alone.report["state"] == "CANCELLED"


def test_a_program_without_its_interpreter_was_never_launched(no_interpreter: Ended) -> None:
    assert no_interpreter.outcome == 1
    assert (no_interpreter.report["state"], no_interpreter.report["cause"]["worker"]) == ("FAILED", "odd_w0")
    # the other may be ended before its own program has begun
    assert no_interpreter.reasons() == ["launch_failed", "terminated_peer"]
    end = told(no_interpreter, "odd_w0", "launch_failed", "cannot start './program'", "No such file or directory")
    assert end["code"] == 127


def test_a_disk_that_a_worker_fills_is_the_reason(disk_full: Ended) -> None:
    assert disk_full.outcome == 1
    assert failed(disk_full, "odd_w0", "disk_full", "exit status 1")["code"] == 1


def test_gpu_memory_that_runs_out_is_read_from_the_log(cuda_memory: Ended) -> None:
    assert cuda_memory.outcome == 1
    end = failed(cuda_memory, "worker_w1", "cuda_oom", "exit status 1", "CUDA out of memory. Tried to allocate")
    assert end["code"] == 1


def test_a_collective_that_hangs_is_read_from_the_log(nccl_timeout: Ended) -> None:
    assert nccl_timeout.outcome == 1
    end = failed(nccl_timeout, "odd_w0", "nccl_timeout", "killed by SIGABRT")
    assert end["signal"] == "SIGABRT"


def test_ctrl_c_in_a_terminal_is_a_cancellation(ctrl_c: Ended) -> None:
    assert (ctrl_c.outcome, ctrl_c.report["state"], ctrl_c.report["exit_status"]) == (130, "CANCELLED", 5)
    assert ctrl_c.reasons() == ["cancelled", "cancelled"]
    told(ctrl_c, "worker_w0", "cancelled", "the job was being stopped")
    assert ctrl_c.events("signal")


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
    assert {run_of(position) for position in positions if position} == {0, 1, 2}


def test_the_job_goes_on_without_a_worker_that_is_not_critical(dispensable: Ended) -> None:
    assert (dispensable.outcome, dispensable.report["state"]) == (0, "COMPLETED")
    told(dispensable, "helper_w0", "app_error", "exit status 3")
    assert dispensable.reasons() == ["completed", "completed", "app_error"]
    assert dispensable.report["cause"] is None
    assert not dispensable.events("job stopping")


# What takes Slurm a while


@pytest.mark.slurm
def test_workers_of_a_node_without_power_failed_with_it(power_cut: Ended) -> None:
    report, lost = power_cut.report, power_cut.seen["nodes"][1]
    assert (power_cut.outcome, report["state"], report["exit_status"]) == ("NODE_FAIL", "NODE_FAIL", 6)
    assert (report["cause"]["node"], report["cause"]["reason"]) == (lost, "node_failure")
    assert power_cut.reasons() == ["terminated_peer", "terminated_peer", "node_failure", "node_failure"]
    for worker in ("worker_w2", "worker_w3"):
        told(power_cut, worker, "node_failure", lost)
    assert lost in "; ".join(power_cut.worker("worker_w0")["exit"]["evidence"])


@pytest.mark.slurm
def test_a_job_whose_first_node_loses_power_is_not_taken_for_running(power_cut_of_the_batch_node: Ended) -> None:
    done, lost = power_cut_of_the_batch_node, power_cut_of_the_batch_node.seen["nodes"][0]
    assert done.outcome == "NODE_FAIL"
    report = json.loads(done.seen["report"].stdout)
    assert (report["state"], done.seen["report"].returncode) == ("NODE_FAIL", 6), done.seen["report"].stderr
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["node_failure"] * 2 + ["terminated_peer"] * 2
    assert (report["cause"]["worker"], report["cause"]["node"]) == ("worker_w0", lost)
    assert lost in "; ".join(report["cause"]["evidence"])
    # nobody was left to write a report, but those of the other node have told how they ended
    assert not done.events("job ended")
    assert done.records() == {"worker_w2_rank2_a0_r0", "worker_w3_rank3_a0_r0"}


@pytest.mark.slurm
@pytest.mark.usefixtures("at_the_time_limit", "time_limit_shortened")
@pytest.mark.parametrize("name", ["at_the_time_limit", "time_limit_shortened"])
def test_every_worker_ends_at_the_time_limit(slurm_stage: Stage, name: str) -> None:
    done = slurm_stage.result(name)
    report = done.report
    assert (done.outcome, report["state"], report["exit_status"]) == ("TIMEOUT", "TIMEOUT", 3)
    assert report["cause"] is None
    for worker in report["workers"]:
        told(done, worker["worker"], "time_limit", "killed by SIGTERM", "time limit")
        assert done.events("worker signalled", worker=worker["worker"], signal="SIGTERM")
    stop = done.events("job stopping")[-1]
    assert stop["reason"] == "time_limit"
