"""Whatever part of a job on a real Slurm is killed or stopped: nothing of it is left, and the report has the cause.

KILLS signals are drawn for many small jobs, each on a node of its own, some at a time. A job is first hurt in ways that
it must survive, then perhaps in one that it cannot. Needs root and the packages of tests/realstack.
"""

import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.clock import Figures
from tests.endtoend.jobs import Job, JobSpace, JobSpaces
from tests.realstack.cluster import FINAL_STATES, ROOT, Cluster, slurm_unavailable

KILLS = int(os.environ.get("KILLS", "150"))
AT_ONCE = int(os.environ.get("KILLS_AT_ONCE", "6"))
WORKERS = 2
PATIENCE_S = 180.0  # for the start of a job, and for the end of all its processes
MOST_STOPPED_S = 4.0
ENOUGH = "enough"

FAILED, COMPLETED = "FAILED", "COMPLETED"
WORKER = r"worker_w\d \S+ killed_unknown"
PARTS = {
    "supervisor": (r"python\S* -I -B -m launcher\.programs\.supervisor ", COMPLETED, ""),
    "sidecar": (r"python\S* -I -B -m exporter sidecar ", COMPLETED, ""),
    "wrapper": (r"python\S* -I -B -m launcher\.programs\.wrapper .*--worker worker_w", FAILED, WORKER),
    "worker": (r"sh -c until ", FAILED, WORKER),
    "srun of a worker": (r"srun .*--worker worker_w", FAILED, r"worker_w\d \S+ \w+"),
    "slurmstepd": (r"slurmstepd: \[\d+\.[1-9]\d*\]", COMPLETED, ""),  # its worker goes on; .0 is the sidecar's
    "orchestrator": (r"python\S* -I -B -m launcher\.run\.orchestrator ", FAILED, r"orchestrator \S+ killed_unknown"),
    "guard": (r"python\S* -I -B -m launcher\.guard ", FAILED, r"guard \S+ killed_unknown|Slurm: FAILED; .*"),
}
"""Each part by its command, and what a job comes to whose part is killed: state and cause."""


class Hurt(NamedTuple):
    """One signal to one part."""

    part: str
    kill: bool  # or stopped for a while


def measure() -> Figures:
    """How many jobs left processes, had no report, or a wrong one."""
    if reason := slurm_unavailable(accounting=False):
        raise SystemExit(f"slurm_kills: {reason}")
    chosen = random.Random(time.time_ns())
    plans = list(_plans(KILLS, chosen))
    folder = Path(tempfile.mkdtemp(prefix="gpujob-kills-", dir="/tmp"))
    folder.chmod(0o755)
    start = time.monotonic()
    try:
        with Cluster(folder / "cluster", nodes=AT_ONCE, accounting=False, prefix="hurt") as cluster:
            spaces, free = JobSpaces(cluster, folder, folder / "nowhere"), list(cluster.node_names)

            def hurt(plan: list[Hurt]) -> Figures:
                node = free.pop()
                try:
                    return _Hurting(spaces.create("job"), node, random.Random(chosen.random())).outcome(plan)
                finally:
                    free.append(node)

            with ThreadPoolExecutor(AT_ONCE) as pool:
                rows = list(pool.map(hurt, plans))
            spaces.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    faults = [row for row in rows if row["faults"]]
    counts = Counter(fault.partition(":")[0] for row in rows for fault in row["faults"])
    return {
        "kills": sum(row["sent"] for row in rows),
        "jobs": len(rows),
        "parts": dict(sorted(Counter(name for row in rows for name in row["hurt"]).items())),
        "faults": dict(counts),
        "examples": faults[:5],
        "seconds": round(time.monotonic() - start),
        "goals": {"no job with a fault": not faults},
    }


def _plans(kills: int, chosen: random.Random) -> Iterator[list[Hurt]]:
    """What is done to each job: some signals that it survives, then for most jobs one that it does not."""
    survived = [Hurt(part, kill=False) for part in PARTS]
    survived += [Hurt("sidecar", kill=True), Hurt("supervisor", kill=True)]
    while kills > 0:
        plan = chosen.choices(survived, k=chosen.randrange(1, 4))
        plan += [Hurt(chosen.choice([*PARTS]), kill=True)] if chosen.random() < 0.8 else []
        kills -= len(plan)
        yield plan


class _Hurting:
    """One job on one node, and what is done to it."""

    def __init__(self, space: JobSpace, node: str, chosen: random.Random) -> None:
        self._space, self._cluster, self._node, self._chosen = space, space.cluster, node, chosen
        self._before = {pid for pid, _ in self._cluster.node_processes(node, daemons=True)}
        (space.directory / "gpujob.yaml").unlink()  # no Prometheus scrapes these jobs, so no sidecar lingers

    def outcome(self, plan: list[Hurt]) -> Figures:
        """What was done to the job, and what is wrong with its end."""
        job = self._space.submit(self._spec())
        job.wait_for_phase("running", PATIENCE_S)
        done = []
        for hurt in plan:
            time.sleep(self._chosen.uniform(0.1, 2.0))
            if not self._send(hurt):
                continue
            done.append(hurt)
        last = done[-1] if done and done[-1].kill else None
        if last is None or PARTS[last.part][1] == COMPLETED:
            (self._space.directory / ENOUGH).touch()
        names = [f"{hurt.part} {'killed' if hurt.kill else 'stopped'}" for hurt in done]
        faults = list(self._faults(job, last))
        return {"hurt": names, "sent": len(done), "faults": faults, "log": self._log(job) if faults else []}

    def _spec(self) -> dict[str, Any]:
        command = f"sh -c 'until [ -e {self._space.directory}/{ENOUGH} ]; do sleep 0.2; done'"
        return {
            "name": "hurt",
            "resources": {"nodes": 1, "gpus_per_node": 0},
            "workers": [{"role": "worker", "count": WORKERS, "gpus": 0, "command": command}],
            "slurm": {
                "partition": "gpu",
                "time_limit": "00:10:00",
                "directives": {"no-requeue": True, "nodelist": self._node},
            },
            "monitoring": {"check_interval": 1, "linger": 0},
        }

    def _processes(self, *, daemons: bool = False) -> list[tuple[int, str]]:
        found = self._cluster.node_processes(self._node, daemons=daemons)
        return [(pid, command) for pid, command in found if pid not in self._before]

    def _send(self, hurt: Hurt) -> bool:
        """Whether there was such a process."""
        pattern = re.compile(rf"(/\S*/)?{PARTS[hurt.part][0]}")
        found = [(command, pid) for pid, command in self._processes(daemons=True) if pattern.match(command)]
        if hurt.part.startswith("srun"):
            found = list(dict(reversed(found)).items())  # its child, which begins later, has the same command
        if not found:
            return False
        _, pid = self._chosen.choice(found)
        if hurt.kill:
            return self._signal(pid, signal.SIGKILL)
        if not self._signal(pid, signal.SIGSTOP):
            return False
        time.sleep(self._chosen.uniform(0.1, MOST_STOPPED_S))
        return self._signal(pid, signal.SIGCONT)

    def _signal(self, pid: int, number: int) -> bool:
        return bool(self._cluster.on(self._node, ["kill", f"-{number}", str(pid)], user=ROOT).returncode == 0)

    def _faults(self, job: Job, kill: Hurt | None) -> Iterator[str]:
        """What is wrong when the job has ended."""

        def gone() -> bool:
            return self._cluster.job_state(int(job.job_id)) in FINAL_STATES and not self._processes()

        try:
            self._cluster.wait_for(gone, PATIENCE_S, "the end", interval=0.5)
        except TimeoutError:
            yield f"left: {self._cluster.job_state(int(job.job_id))}, {self._processes()}"
        for path in job.run_dir.rglob("*.json"):
            try:
                json.loads(path.read_text())
            except ValueError:
                yield f"half-written: {path.relative_to(job.run_dir)}"
        report = job.json("report.json")
        if not report:
            report = json.loads(self._space.gpujob("report", str(job.run_dir), "--json").stdout or "{}")
            if not report or kill is None or kill.part != "guard":
                yield f"no report: {report.get('state')}"
        _, state, cause = PARTS[kill.part] if kill else ("", COMPLETED, "")
        if report.get("state") != state:
            yield f"wrong state: {report.get('state')}, {_cause(report)}"
        elif state == FAILED and not re.fullmatch(cause, _cause(report)):
            yield f"wrong cause: {_cause(report)}"

    def _log(self, job: Job) -> list[str]:
        return [str(job.run_dir), *(job.run_dir / "log.out").read_text(errors="replace").splitlines()[-40:]]


def _cause(report: dict[str, Any]) -> str:
    """Worker, node and reason of the cause, or else the cause of the stop."""
    failed, stopped = report.get("cause") or {}, report.get("stopped") or {}
    if failed:
        return f"{failed.get('worker')} {failed.get('node')} {failed.get('reason')}"
    return str(stopped.get("cause", ""))
