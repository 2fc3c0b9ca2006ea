"""The hub on a real Slurm, with jobs that gpujob has not launched."""

import json
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import GPUJOB, JobSpace
from tests.endtoend.test_track import REQUEUED
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm

EXPORTER = GPUJOB.parent / "gpujob-exporter"


class RealHub:
    """A hub of a user on the head of the cluster."""

    def __init__(self, jobs: JobSpace, *options: str, user: str | None = None) -> None:
        self.jobs, self.folder = jobs, jobs.directory / "hub"
        self.user = user or jobs.user
        if not self.folder.exists():
            self.folder.mkdir()
            shutil.chown(self.folder, self.user)
        argv: list[str | Path] = [EXPORTER, "hub", "--interval", "5", "--state-dir", self.folder, *options]
        self.process = jobs.cluster.popen(argv, user=self.user, cwd=jobs.directory, env={"XDG_RUNTIME_DIR": ""})
        jobs.cluster.wait_for(
            lambda: "ready" in self.get("/-/ready") and "Not" not in self.get("/-/ready"), 60, "a look"
        )

    def get(self, path: str) -> str:
        name = next(self.folder.glob("*.sock"), Path("none"))
        argv = ["curl", "-s", "--unix-socket", str(name), f"http://hub{path}"]
        return str(self.jobs.cluster.run(argv, user=self.user).stdout)

    def json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def states(self) -> dict[str, str]:
        return {job["job_id"]: job["state"] for job in self.json("/api/v1/jobs")["jobs"]}

    def kill(self) -> None:
        """End it without notice, and its file with a hot journal."""
        self.jobs.cluster.signal(self.process, signal.SIGKILL)
        self.process.communicate(timeout=60)


def sbatch(jobs: JobSpace, name: str, command: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", "-J", name, "-p", "gpu", "-o", f"{jobs.directory}/%x-%A_%a.log", *options]
    return str(jobs.cluster.run([*argv, "--wrap", command], user=jobs.user, check=True).stdout.strip())


def test_every_change_is_told_once_although_the_hub_is_killed(jobs: JobSpace) -> None:
    cluster, hub = jobs.cluster, RealHub(jobs)
    time.sleep(1.5)  # Slurm counts whole seconds, and what happened before the hub is not its own
    good = sbatch(jobs, "good", "sleep 4", "--gres=gpu:1")
    bad = sbatch(jobs, "bad|'name", "exit 3")
    late = sbatch(jobs, "late", "exec sleep 300", "--time=1")
    running = sbatch(jobs, "cancelled", "exec sleep 300")
    waiting = sbatch(jobs, "held", "true", "--hold")
    array = sbatch(jobs, "arr", "sleep 3; exit $((SLURM_ARRAY_TASK_ID == 2 ? 3 : 0))", "--array=0-2%1")
    cluster.wait_for(lambda: hub.states().get(running) == "RUNNING", 90, "the hub to see a running job")
    hub.kill()
    cluster.run(["scancel", running, waiting], user=ROOT, check=True)
    cluster.wait_for(lambda: cluster.job_state(int(good)) == "COMPLETED", 60, "an end that no hub sees")
    hub = RealHub(jobs)

    def is_over() -> bool:
        found = hub.json("/api/v1/jobs")["jobs"]
        return all(job["is_over"] and (job["figures"] or not job["started"]) for job in found)

    cluster.wait_for(is_over, 240, "all ends and figures")
    changes = hub.json("/api/v1/changes?after=0")["changes"]
    assert [change["number"] for change in changes] == list(range(1, len(changes) + 1))
    told: dict[str, list[str]] = {}
    for change in changes:
        told.setdefault(change["job_id"], []).append(change["state"])
    assert told == {
        good: ["RUNNING", "COMPLETED"],
        bad: ["RUNNING", "FAILED"],
        late: ["RUNNING", "TIMEOUT"],
        running: ["RUNNING", "CANCELLED"],
        waiting: ["CANCELLED"],
        **{f"{array}_{index}": ["RUNNING", "FAILED" if index == 2 else "COMPLETED"] for index in range(3)},
    }
    found = {job["job_id"]: job for job in hub.json("/api/v1/jobs")["jobs"]}
    for job_id in told:
        argv = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "Start,End,ExitCode"]
        text = cluster.run(argv, user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
        start, end, code = text.splitlines()[0].split("|")
        job = found[job_id]
        assert job["ended"] == float(end)
        times = [change["time"] for change in changes if change["job_id"] == job_id]
        assert times == ([float(end)] if job_id == waiting else [float(start), float(end)])
        assert job_id == waiting or job["figures"]["exit_code"] == code
    cluster.wait_for(lambda: "gpujob_hub_clock_offset_seconds" in hub.get("/metrics"), 60, "the load of the controller")
    assert hub.json("/api/v1/jobs")["problems"] == []
    page = hub.get("/metrics")
    for command in ("squeue", "sacct", "sinfo"):
        assert re.search(rf'gpujob_hub_unparsed_lines_total{{[^}}]*command="{command}"}} 0\n', page)
    gpu_seconds = found[good]["ended"] - found[good]["started"]
    samples = dict(line.rpartition(" ")[::2] for line in page.splitlines() if not line.startswith("#"))
    place = f'user="{jobs.user}",partition="gpu"'
    cluster_name = next(iter(samples)).partition('cluster="')[2].partition('"')[0]
    totals = {
        name.partition("{")[0] + name.rpartition(place)[2]: value for name, value in samples.items() if place in name
    }
    assert totals["gpujob_jobs_started_total}"] == "7"
    assert totals['gpujob_jobs_ended_total,state="COMPLETED"}'] == "3"
    assert totals['gpujob_jobs_ended_total,state="CANCELLED"}'] == "2"
    assert abs(float(totals["gpujob_gpu_seconds_total}"]) - gpu_seconds) <= 10.0  # it was not watched up to its end
    assert (
        cluster_name
        == cluster.run(
            ["sh", "-c", "scontrol show config | sed -n 's/^ClusterName *= //p'"], user=ROOT, check=True
        ).stdout.strip()
    )
    cluster.signal(hub.process, signal.SIGTERM)
    hub.process.communicate(timeout=60)
    assert not list(hub.folder.glob("*.sock"))
    rebuild: list[str | Path] = [
        GPUJOB,
        "index",
        "--rebuild",
        "--since",
        "1d",
        "--json",
        "--state-dir",
        jobs.directory / "lost",
    ]
    rebuilt = json.loads(cluster.run(rebuild, user=jobs.user, cwd=jobs.directory, check=True).stdout)
    assert rebuilt["rebuilt"]["problems"] == []
    # a window of accounting lacks the job that was never eligible
    assert rebuilt["index"]["jobs"] == rebuilt["rebuilt"]["from_accounting"] >= len(told) - 1


OTHER_USERS = ("games", "news")  # of any Debian, without jobs of their own
SLEEPS = "exec sleep 300"
TAKES_MEMORY = "exec python3 -c 'b\" \" * (400 << 20)'"
"""More than a job of 50 MiB has."""


class Story:
    """Some sixty jobs of three users, which end in the ways that jobs end."""

    def __init__(self, jobs: JobSpace, hub: RealHub) -> None:
        """``hub`` sees them until the end of `interfere`."""
        self.jobs, self.cluster, self.hub = jobs, jobs.cluster, hub
        self.requeued, self.cancelled, self.never = list[str](), list[str](), list[str]()
        self.states = dict[str, str]()
        for user in (jobs.user, *OTHER_USERS):
            self._submit_those_of(user)
        lost, back = self.cluster.node_names[-2:]
        gpus = "--gres=gpu:4"
        victims = {
            "PREEMPTED": self._sbatch(jobs.user, "lost", SLEEPS, "-p", "scavenge", "-w", lost, gpus),
            "COMPLETED": self._sbatch(
                jobs.user, "back", REQUEUED, "-p", "scavenge-requeue", "--requeue", "-w", back, gpus
            ),
        }
        self.states |= {job: state for state, job in victims.items()}
        self._await_seen(victims.values())
        for node in (lost, back):
            self.states[self._sbatch(OTHER_USERS[0], "first", "sleep 3", "-w", node, gpus)] = "COMPLETED"

    def _await_seen(self, job_ids: Collection[str]) -> None:
        """Wait until the hub has seen these run: after a requeue, Slurm does not tell when the attempt before began."""
        for job in job_ids:
            self.cluster.wait_for_job(int(job), 120, {"RUNNING"})

        def are_seen() -> bool:
            states = self.hub.states()
            return all(states.get(job) == "RUNNING" for job in job_ids)

        self.cluster.wait_for(are_seen, 60, "the hub to see running jobs")
        time.sleep(2.0)  # Slurm counts whole seconds

    def _sbatch(self, user: str, name: str, command: str, *options: str) -> str:
        argv = ["sbatch", "--parsable", "-J", name, "-p", "gpu", "-o", "/dev/null", "-D", "/tmp", "-t", "9", "--mem=50"]
        done = self.cluster.run([*argv, *options, "--wrap", command], user=user, cwd=Path("/tmp"), check=True)
        return done.stdout.strip()

    def _submit_those_of(self, user: str) -> None:
        def submit(state: str, name: str, command: str, *options: str) -> str:
            job = self._sbatch(user, name, command, *options)
            self.states[job] = state
            return job

        good = [submit("COMPLETED", name, "sleep 2", "-G1") for name in ("good", "a|b 'c'\\nd\"", "größer", "good")]
        bad = submit("FAILED", "bad", "exit 3")
        submit("FAILED", "crash", "ulimit -c 0; kill -SEGV $$")
        submit("COMPLETED", "step", "srun false; exit 0")
        if self.cluster.enforces_memory:
            submit("OUT_OF_MEMORY", "memory", TAKES_MEMORY)
        submit("TIMEOUT", "late", SLEEPS, "-t", "1")
        self.cancelled += [submit("CANCELLED", "running", SLEEPS), submit("CANCELLED", "held", "true", "--hold")]
        array = self._sbatch(user, "arr", "sleep 1; exit $((SLURM_ARRAY_TASK_ID == 2 ? 3 : 0))", "--array=0-3%2")
        self.states |= {f"{array}_{index}": "FAILED" if index == 2 else "COMPLETED" for index in range(4)}
        submit("COMPLETED", "after", "true", f"--dependency=afterok:{good[0]}")
        self.never.append(submit("CANCELLED", "never", "true", f"--dependency=afterok:{bad}"))
        self.requeued.append(submit("COMPLETED", "again", REQUEUED, "--requeue"))

    def interfere(self) -> None:
        """Requeue and cancel, as users do."""
        self._await_seen(self.requeued)
        self.cluster.run(["scontrol", "requeue", ",".join(self.requeued)], user=ROOT, check=True)
        self.cluster.wait_for_job(int(self.cancelled[0]), 120, {"RUNNING"})
        self.cluster.run(["scancel", *self.cancelled, *self.never], user=ROOT, check=True)

    def history(self) -> dict[str, list[tuple[str, float]]]:
        """States and times of each job, by accounting."""
        fields = "JobID,State,Submit,Start,End,NodeList"
        argv = ["sacct", "-a", "-D", "-X", "-n", "-P", "-j", ",".join(self.states), "-o", fields]
        text = self.cluster.run(argv, user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
        attempts: dict[str, list[list[str]]] = {}
        for job, *attempt in sorted((line.split("|") for line in text.splitlines()), key=lambda row: row[2]):
            attempts.setdefault(job, []).append(attempt)
        return {job: list(_changes(rows)) for job, rows in attempts.items()}


def _changes(attempts: list[list[str]]) -> Iterator[tuple[str, float]]:
    for number, (_, submitted, started, _, nodes) in enumerate(attempts):
        if number:
            yield "PENDING", float(submitted)
        if nodes != "None assigned":
            yield "RUNNING", float(started)
    state, _, _, ended, _ = attempts[-1]
    yield state.partition(" ")[0], float(ended) if ended.isdigit() else 0.0


def test_sixty_jobs_of_three_users_are_told_as_accounting_has_them(jobs: JobSpace) -> None:
    cluster, hub = jobs.cluster, RealHub(jobs, "--scope", "cluster", user=ROOT)
    time.sleep(1.5)  # Slurm counts whole seconds, and what happened before the hub is not its own
    story = Story(jobs, hub)
    for act in (story.interfere, lambda: time.sleep(5)):
        act()
        hub.kill()
        hub = RealHub(jobs, "--scope", "cluster", user=ROOT)

    def ends() -> dict[str, str]:
        found = hub.json("/api/v1/jobs?limit=1000")["jobs"]
        return {job["job_id"]: job["state"] for job in found if job["is_over"] and job["job_id"] in story.states}

    cluster.wait_for(lambda: ends().keys() == story.states.keys(), 240, "all ends")
    assert ends() == story.states
    told: dict[str, list[tuple[str, float]]] = {}
    for change in hub.json("/api/v1/changes?after=0")["changes"]:
        told.setdefault(change["job_id"], []).append((change["state"], change["time"]))
    expected = cluster.wait_for(
        lambda: {job: changes[-1][0] for job, changes in story.history().items()} == story.states and story.history(),
        60,
        "accounting",
    )
    assert {job: told[job] for job in story.states} == expected
    cluster.signal(hub.process, signal.SIGTERM)
    hub.process.communicate(timeout=60)
