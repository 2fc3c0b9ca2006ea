"""Submits jobs of the tests and reads their results."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.run.job_state import OWN_TEARDOWN_S
from tests.realstack.cluster import FINAL_STATES, ROOT, Cluster

ROOT_DIR = Path(__file__).resolve().parents[2]
GPUJOB = Path(os.environ.get("GPUJOB_PROGRAM") or ROOT_DIR / ".venv" / "bin" / "gpujob")
EMBED = ROOT_DIR / "examples" / "embed" / "embed.py"
FAULTY_EMBED = ROOT_DIR / "tests" / "engines" / "faulty_embed.py"


def user_for(cluster: Cluster) -> str:
    """The unprivileged test user where it can run gpujob out of this checkout, else root."""
    version = cluster.run([GPUJOB, "--version"], cwd=Path("/"))
    return cluster.user if version.returncode == 0 else ROOT


def diagnosis(run_dir: Path, worker: str) -> dict[str, Any]:
    """The JSON diagnosis of a failed worker. The text one must exist, too."""
    folder = run_dir / "diagnostics"
    assert (folder / f"{worker}.json").is_file(), f"no diagnosis of {worker} in {sorted(folder.glob('*'))}"
    assert worker in (folder / f"{worker}.txt").read_text()
    found: dict[str, Any] = json.loads((folder / f"{worker}.json").read_text())
    assert (found["worker"], found["kind"]) == (worker, "failure")
    return found


def was_asked(report: dict[str, Any], end: dict[str, Any]) -> bool:
    """Whether a worker was asked to end: it ended by SIGTERM, or was killed only after the grace time."""
    return end["signal"] == "SIGTERM" or bool(end["time"] >= report["stopped"]["time"] + OWN_TEARDOWN_S)


def embed_job(
    name: str,
    *,
    faults: str = "",
    items: int = 4000,
    rate: float = 20,
    nodes: int = 4,
    count: int = 8,
    gpus_per_node: int = 2,
    linger: float = 8,
    **over: Any,
) -> dict[str, Any]:
    """A job file of the embedding example. A scrape by Prometheus shortens its ``linger``."""
    program = FAULTY_EMBED.name if faults else EMBED.name
    command = f"python3 {program} --items {items} --rate {rate} --log-every 20 --checkpoint-every 100 {faults}"
    return {
        "name": name,
        "resources": {"nodes": nodes, "gpus_per_node": gpus_per_node},
        "workers": [{"role": "worker", "count": count, "gpus": 1, "command": command.strip()}],
        "slurm": {"partition": "gpu", "time_limit": "00:10:00"},
        "patterns": {"output": "output_worker_*.jsonl", "checkpoints": "checkpoint_*.json"},
        "progress": {"total_items": items},
        "monitoring": {"check_interval": 1, "linger": linger, "stall_timeout": 60},
        **over,
    }


class Job:
    """One submitted job."""

    def __init__(self, space: "JobSpace", job_id: str, run_dir: Path) -> None:
        self.space = space
        self.job_id = job_id
        self.run_dir = run_dir

    def wait(self, timeout: float = 180) -> str:
        """Wait for the final state of the job in Slurm."""
        return self.space.cluster.wait_for_job(int(self.job_id), timeout)

    def wait_for_phase(self, phase: str, timeout: float = 120) -> None:
        """Wait until the orchestrator has published this phase."""
        self.space.cluster.wait_for(lambda: self.json("state.json").get("phase") == phase, timeout, f"phase {phase}")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run directory, empty while it does not exist."""
        try:
            return json.loads((self.run_dir / name).read_text())  # type: ignore[no-any-return]
        except (FileNotFoundError, ValueError):
            return {}

    def report(self) -> dict[str, Any]:
        """The job's report."""
        found = self.json("report.json")
        assert found, (self.run_dir / "log.out").read_text() + (self.run_dir / "log.err").read_text()
        return found

    def output_lines(self) -> int:
        """Lines in all output files."""
        return sum(path.read_bytes().count(b"\n") for path in self.run_dir.glob("output_worker_*.jsonl"))

    def start_record(self, rank: int) -> dict[str, Any]:
        """The start record of the first run of a task."""
        return self.json(f"workers/worker_w{rank}_rank{rank}_a0_r0.start.json")

    def watch(self, *options: str) -> dict[str, Any]:
        """The view of `gpujob watch --once --json`."""
        done = self.space.gpujob("watch", str(self.run_dir), "--once", "--json", *options)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def our_processes(self) -> list[str]:
        """Command lines on any node that belong to this job."""
        found = []
        for node in self.space.cluster.node_names:
            for _, command in self.space.cluster.node_processes(node):
                if str(self.run_dir) in command or "embed.py" in command or command.startswith("srun"):
                    found.append(f"{node}: {command}")
        return found


class JobSpace:
    """A working directory in which jobs are submitted as an ordinary user."""

    def __init__(self, cluster: Cluster, directory: Path, user: str, targets_dir: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.user = user
        self.submitted: list[Job] = []
        for program in (EMBED, FAULTY_EMBED):
            shutil.copy(program, directory)
        self.targets_dir = targets_dir
        (directory / "gpujob.yaml").write_text(yaml.safe_dump({"target_dir": str(targets_dir), "cluster": "test"}))
        self.own(directory)

    def own(self, *paths: Path) -> None:
        """Make the user the owner of these paths and their contents."""
        for path in paths:
            shutil.chown(path, self.user)
            for inner in path.rglob("*"):
                shutil.chown(inner, self.user)
        if self.user != ROOT:
            self.directory.chmod(0o755)

    def gpujob(
        self, *arguments: str, cwd: Path | None = None, check: bool = False, env: Mapping[str, str] | None = None
    ) -> Any:
        """Run a command of gpujob on the head."""
        return self.cluster.run(
            [GPUJOB, *arguments],
            user=self.user,
            cwd=cwd or self.directory,
            env={"GPUJOB_HISTORY_DIR": "", **(env or {})},
            timeout=300,
            check=check,
        )

    def submit(self, spec: dict[str, Any], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Job:
        """Write the job file and submit it, with these variables in addition."""
        path = (cwd or self.directory) / "job.yaml"
        path.write_text(yaml.safe_dump(spec, allow_unicode=True))
        done = self.gpujob("submit", str(path), "--json", cwd=cwd, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        job = Job(self, answer["job_id"], Path(answer["run_dir"]))
        self.submitted.append(job)
        return job

    def close(self) -> None:
        """Cancel jobs that still run, and wait for their end."""
        for job in self.submitted:
            if self.cluster.job_state(int(job.job_id)) not in FINAL_STATES:
                self.cluster.run(["scancel", job.job_id], user=ROOT)
                job.wait()


class JobSpaces:
    """Job spaces of scenarios that run in parallel."""

    def __init__(self, cluster: Cluster, directory: Path, targets_dir: Path) -> None:
        self._cluster, self._directory, self._targets_dir = cluster, directory, targets_dir
        self._user, self._spaces = user_for(cluster), list[JobSpace]()

    def create(self, name: str) -> JobSpace:
        """Another job space."""
        directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._directory))
        self._spaces.append(JobSpace(self._cluster, directory, self._user, self._targets_dir))
        return self._spaces[-1]

    def close(self) -> None:
        for space in self._spaces:
            space.close()


def kill_worker(cluster: Cluster, job: Job, rank: int) -> str:
    """Send SIGKILL to the process of a worker; return its node."""
    cluster.wait_for(lambda: "pid" in job.start_record(rank), 60, f"start of rank {rank}")
    record = job.start_record(rank)
    done = cluster.on(record["node"], ["kill", "-9", str(record["pid"])], user=ROOT)
    assert done.returncode == 0, done.stderr
    return str(record["node"])
