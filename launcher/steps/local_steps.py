"""The plan on this machine: wrappers and sidecars as child processes, no Slurm."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from exporter.contract import run_files
from exporter.machine.procfs import is_zombie, read_children, read_environment, read_start_ticks
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.steps.steps import (
    ENDING_SIGNALS,
    ExternalEnd,
    RunningTask,
    log_files,
    run_environment,
    sidecar_argv,
    survey_argv,
    survey_environment,
    wrapper_argv,
)

LOOPBACK = "127.0.0.1"  # by which the virtual nodes of this machine reach each other: nobody can resolve their names
ORPHAN_S = 120.0  # how long an orchestrator without its guard may take to end the job and to verify its files
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def local_hosts(plan: Plan, hostname: str) -> tuple[str, ...]:
    """A name for each node of the plan; with more than one they are virtual nodes of this machine."""
    short = hostname.partition(".")[0] or "localhost"
    return (short,) if plan.nodes == 1 else tuple(f"{short}-n{index}" for index in range(plan.nodes))


class LocalSteps:
    """Child processes of the orchestrator, each in a session of its own.

    When the orchestrator dies, however, the kernel sends them SIGTERM: nothing of a job outlives it.
    """

    exact_status = True

    def __init__(self, plan: Plan, facts: RunFacts) -> None:
        self._plan = plan
        self._facts = facts
        self._die_with_parent = die_with_parent()
        self._ours: set[int] = set()
        """Processes started here; any other child is somebody's orphan."""
        self._tasks: set[int] = set()
        """Those of them that stand for tasks that run."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def learn(self, facts: RunFacts) -> None:
        self._facts = facts

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        started = []
        for index, host in enumerate(self._facts.hosts):
            environment = {
                **os.environ,
                "GPUJOB_JOB_ID": self._facts.job_id,
                "GPUJOB_RUN_DIR": str(self._facts.run_dir),
                "GPUJOB_NODE": host,
                "GPUJOB_NODE_INDEX": str(index),
                "GPUJOB_NODES": ",".join(self._facts.hosts),
                "GPUJOB_START_TIME": repr(self._facts.start),
                "GPUJOB_ATTEMPT": str(self._facts.attempt),
                "GPUJOB_FIRST_GPU": str(self._first_gpu(index)),
            }
            with (self._facts.run_dir / f"{host}_sidecar.log").open("ab") as log:
                started.append(self._start(sidecar_argv(self._plan, self._facts), environment, log, log))
        return started

    def start_survey(self, offsets: Sequence[int], number: int) -> list[subprocess.Popen[bytes]]:
        argv = survey_argv(self._plan, self._facts)
        environment = {**os.environ, **survey_environment(self._facts, offsets, number)}
        with (self._facts.run_dir / "log.err").open("ab") as log:
            return [self._start([*argv, host], environment, subprocess.PIPE, log) for host in self._facts.hosts]

    def start_beside(self, argv: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as out, (self._facts.run_dir / "log.err").open("ab") as log:
            return self._start(argv, dict(os.environ), out, log)

    def start_tasks(self, tasks: Sequence[TaskPlan], restart: int) -> list[RunningTask]:
        """Each task by itself: here nothing stands between the processes of a step."""
        return [self._start_task(planned, restart) for planned in tasks]

    def _start_task(self, planned: TaskPlan, restart: int) -> RunningTask:
        environment = {**os.environ, **run_environment(self._plan, planned, self._facts, restart)}
        out, err = log_files(planned, self._facts, restart)
        with open(out, "ab") as output, open(err, "ab") as error:
            first = self._first_gpu(planned.task.node_index)
            argv = wrapper_argv(self._plan, planned, self._facts, restart, first_gpu=first)
            process = self._start(argv, environment, output, error, self._plan.workdir)
        self._tasks.add(process.pid)
        return RunningTask(planned, restart, process)

    def _first_gpu(self, node_index: int) -> int:
        """This machine plays all nodes of the plan: their GPUs are its own, one after the other."""
        return node_index * self._plan.gpus_per_node

    def _start(
        self,
        argv: Sequence[str],
        environment: dict[str, str],
        output: IO[bytes] | int,
        error: IO[bytes],
        cwd: str | None = None,
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            argv,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            start_new_session=True,
            preexec_fn=self._die_with_parent,  # the orchestrator has one thread
        )
        self._ours.add(process.pid)
        return process

    def warn(self, running: Sequence[RunningTask], number: int) -> None:
        for entry in running:
            entry.process.send_signal(number)

    def terminate(self, running: Sequence[RunningTask]) -> None:
        self.warn(running, signal.SIGTERM)

    def kill(self, running: Sequence[RunningTask]) -> None:
        for entry in running:
            try:
                os.killpg(entry.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def sweep(self, running: RunningTask) -> int:
        """What a task has left behind ends with it, as it does in a Slurm step.

        That is its process group, the worker of a wrapper that was killed included, and the processes
        in groups of their own that have become children of this one, their nearest subreaper; not
        those of a worker that lives. Nobody waits for one that cannot be killed now: the next sweep does.
        """
        self.kill([running])
        self._tasks.discard(running.process.pid)
        own = {"GPUJOB_JOB_ID": self._facts.job_id, "GPUJOB_RANK": str(running.planned.task.rank)}
        ended = 0
        for pid in read_children(os.getpid()):
            if pid in self._ours:
                continue
            told = read_environment(pid, tuple(own))
            if self._tasks and told != own and not is_zombie(pid):
                continue
            try:
                ended += told == own and os.getpgid(pid) != running.process.pid
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass
        return ended

    def is_over(self, running: RunningTask) -> bool:
        return True

    def are_over(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> bool:
        return True

    def end_sidecars(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in sidecars:
            process.terminate()

    def ending(self) -> ExternalEnd:
        return ExternalEnd()

    def requeue(self) -> str | None:
        return "there is no queue on this machine"


def start_orchestrator(argv: Sequence[str], output: IO[bytes], error: IO[bytes]) -> subprocess.Popen[bytes]:
    """The orchestrator as a child of the command that shows it.

    It gets SIGTERM when the command dies, and begins with its signals blocked: until it can
    answer them in order, they wait.
    """
    ask_for_signal = die_with_parent()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        ask_for_signal()

    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        start_new_session=True,  # Ctrl-C reaches it through the command alone, once
        preexec_fn=prepare,  # the command has one thread
    )


def wait_for_guard(guard: subprocess.Popen[bytes], run_dir: Path) -> int:
    """Status of the guard. When that was killed, the orchestrator is still ending the job: then after its end."""
    code = guard.wait()
    told: Mapping[str, Any] = run_files.read_json(run_dir / run_files.ORCHESTRATOR_FILE) or {}
    end = time.monotonic() + ORPHAN_S
    while code < 0 and told and time.monotonic() < end and read_start_ticks(told["pid"]) == told["start_ticks"]:
        time.sleep(0.1)
    return code


def die_with_parent(parent: int | None = None) -> Callable[[], None]:
    """A function for a child, best between fork and exec: SIGTERM when its parent dies (prctl(2)).

    ``parent`` is the process that starts the child, by default this one.
    """
    library = ctypes.CDLL(None, use_errno=True)
    parent = parent or os.getpid()

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(143)  # it died before the request

    return ask
