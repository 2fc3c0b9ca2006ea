"""Local jobs under their guard, with small servers as workers."""

import contextlib
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from launcher.jobfile.jobfile import ClusterSpec
from launcher.plan.plan import ReadinessPlan, ReadyRule, TaskPlan
from launcher.planner.planner import make_plan
from launcher.rundir import rundir
from launcher.steps.batch_script import render_sbatch
from launcher.steps.steps import PYTHON_FLAGS
from tests.support.launcher import (
    clean_environment,
    invocation_in,
    job_spec,
    kill_all_with,
    poll,
    processes_with,
    read_events,
    read_json,
)

SERVER = """
import http.server, os, signal, sys
port, ready = int(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else None)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(int(os.environ.get("END_WITH", "0")))
        up = ready is None or os.path.exists(ready)
        self.send_response(200 if up else 503)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        pass
signal.signal(signal.SIGUSR1, lambda *_: print("told of the limit", flush=True))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server = http.server.ThreadingHTTPServer(("", port), Answer)
print("serving on", port, flush=True)
server.serve_forever()
"""  # `server.py PORT [FILE]`: ready when FILE exists; GET /end ends it with status END_WITH


class Guarded:
    """One job, from the start of its guard to its end.

    ``tasks`` has changes of planned tasks, ``limits`` other values for the limits of the guard.
    """

    def __init__(
        self,
        folder: Path,
        workers: Sequence[Mapping[str, Any]],
        tasks: Mapping[str, Mapping[str, Any]],
        rules: Sequence[ReadyRule] = (),
        *,
        timeout_s: float = 60.0,
        slurm: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
        limits: Mapping[str, float] | None = None,
        **spec: Any,
    ) -> None:
        (folder / "server.py").write_text(SERVER)
        self.folder = folder
        # long enough that no slow process is killed
        here = invocation_in(folder, local=True)._replace(python=sys.executable, kill_wait_s=60.0)
        parts = {"name": "serving", "workers": list(map(dict, workers)), "monitoring": {"enabled": False}, **spec}
        plan = make_plan(job_spec(**parts), ClusterSpec(), here)
        changed = tuple(
            dataclasses.replace(planned, **tasks.get(planned.task.worker, tasks.get(planned.task.role, {})))
            for planned in plan.tasks
        )
        plan = dataclasses.replace(
            plan,
            tasks=changed,
            readiness=ReadinessPlan(tuple(rules), timeout_s, 0.2) if rules else None,
            slurm=plan.slurm._replace(**(slurm or {})),
            templates=templates or {},
        )
        self.plan = plan
        self.run_dir = rundir.finalize_run_dir(rundir.stage_run_dir(plan, render_sbatch(plan)), plan, "local-1")
        argv = [sys.executable, *PYTHON_FLAGS, "launcher.guard", str(self.run_dir), "--local"]
        if limits is not None:
            lines = ["import sys", "from launcher import guard", *(f"guard.{name} = {s}" for name, s in limits.items())]
            script = "\n".join([*lines, "guard.guard(sys.argv[1:])"])
            argv = [sys.executable, "-I", "-B", "-c", script, str(self.run_dir), "--local"]
        with (self.run_dir / "log.out").open("ab") as log:
            self.guard = subprocess.Popen(
                argv, env=clean_environment(), cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.guard.kill()
        self.guard.wait()
        kill_all_with(self.folder)

    @property
    def log(self) -> str:
        """Log of the orchestrator."""
        return (self.run_dir / "log.out").read_text()

    @property
    def report(self) -> dict[str, Any]:
        """The report, or an empty mapping."""
        return read_json(self.run_dir / "report.json")

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Events with these names so far."""
        return read_events(self.run_dir, *names)

    def await_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait for the `count`-th event with this name."""

        def find_event() -> dict[str, Any] | None:
            found = self.events(name)
            return found[count - 1] if len(found) >= count else None

        return poll(find_event, f"event {name} ({self.log})")

    def await_phase(self, phase: str) -> None:
        """Wait until the job is in this phase."""
        poll(lambda: read_json(self.run_dir / "state.json").get("phase") == phase, f"{phase} ({self.log})")

    def planned(self, worker: str, local_rank: int = 0) -> TaskPlan:
        """A task of the plan."""
        return next(
            planned
            for planned in self.plan.tasks
            if (planned.task.worker, planned.task.local_rank) == (worker, local_rank)
        )

    def pid(self, worker: str, restart: int = 0, local_rank: int = 0, of: str = "pid") -> int:
        """Wait for one run of a worker; return the pid of it or of its wrapper."""
        rank = self.planned(worker, local_rank).task.rank
        path = self.run_dir / "workers" / f"{worker}_rank{rank}_a0_r{restart}.start.json"
        return int(poll(lambda: read_json(path), f"{path.name} ({self.log})")[of])

    def output(self, worker: str, restart: int = 0) -> str:
        """Standard output of one run of a worker."""
        run = f"_r{restart}" if restart else ""
        return "".join(path.read_text() for path in self.run_dir.glob(f"*_{worker}{run}.out"))

    def orchestrator_pid(self) -> int:
        """Wait for the orchestrator; return its pid."""
        return int(poll(lambda: read_json(self.run_dir / "orchestrator.json"), f"orchestrator ({self.log})")["pid"])

    def wait(self, timeout: float = 90.0) -> int:
        """Exit status of the guard."""
        try:
            return self.guard.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.log) from error

    def reasons(self) -> dict[str, str]:
        """Exit reason of the last run of each worker."""
        return {worker["worker"]: worker["exit"]["reason"] for worker in self.report["workers"] if worker["exit"]}

    def left_over(self) -> dict[int, list[str]]:
        """Processes of the job that still run."""
        return processes_with(f"{self.folder}/")


def server(*words: str) -> str:
    """The command of a worker that serves."""
    return shlex.join([sys.executable, "server.py", "{http_port}", *words])


def until(path: Path) -> str:
    """The command of a benchmark that ends when this file exists."""
    return shlex.join(["sh", "-c", f"while [ ! -e {shlex.quote(str(path))} ]; do sleep 0.05; done; echo done"])


def ready(worker: str, port: int, before: str = "benchmark", kind: str = "http") -> ReadyRule:
    """A readiness rule for one worker."""
    return ReadyRule(worker, kind, 0, port, "/health" if kind == "http" else "", before=before)
