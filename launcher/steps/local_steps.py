"""Tasks and sidecars as child processes on this machine, without Slurm."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from exporter.contract.process_identity import read_start_ticks
from exporter.contract.report import Report
from exporter.machine.own_process import open_memory_file
from exporter.machine.procfs import is_zombie, read_children, read_environment
from launcher.plan.placeholders import nodes_variable
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.rundir.job_records import OrchestratorRecord, read_orchestrator, read_report
from launcher.steps.steps import (
    ENDING_SIGNALS,
    PYTHON_FLAGS,
    ExternalEnd,
    RunningTask,
    open_log,
    run_environment,
    sidecar_argv,
    survey_argv,
    survey_environment,
    wrapper_argv,
)

LOOPBACK = "127.0.0.1"  # for virtual nodes, whose names do not resolve
ORPHAN_S = 120.0  # how long an orchestrator without its guard may take to end the job and verify its files
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def local_hosts(plan: Plan, hostname: str) -> tuple[str, ...]:
    """Name each node of the plan. Several nodes are virtual nodes of this machine."""
    short = hostname.partition(".")[0] or "localhost"
    return (short,) if plan.nodes == 1 else tuple(f"{short}-n{index}" for index in range(plan.nodes))


class LocalSteps:
    """Runs tasks as child processes of the orchestrator, each in its own session.

    If the orchestrator dies, the kernel sends them SIGTERM, so that nothing outlives it.
    """

    has_exact_status = True

    def __init__(self, plan: Plan, facts: RunFacts) -> None:
        self._plan = plan
        self._facts = facts
        self._die_with_parent = die_with_parent()
        self._own_pids: set[int] = set()  # pids started here; any other child is an orphan of a task
        self._wrapper_pids: set[int] = set()  # pids of the wrappers of running tasks
        self._foreign_pids: set[int] = set()  # pids of processes that this user may not kill
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def update_facts(self, facts: RunFacts) -> None:
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
                **nodes_variable(self._facts.hosts),
                "GPUJOB_START_TIME": repr(self._facts.start),
                "GPUJOB_ATTEMPT": str(self._facts.attempt),
                "GPUJOB_FIRST_GPU": str(self._first_gpu(index)),
            }
            with open_log(self._facts.run_dir, f"{host}_sidecar.log") as log:
                started.append(self._start(sidecar_argv(self._plan, self._facts), environment, log, log))
        return started

    def start_survey(self, offsets: Sequence[int], round_number: int) -> list[subprocess.Popen[bytes]]:
        argv = survey_argv(self._plan, self._facts)
        environment = {**os.environ, **survey_environment(self._facts, offsets, round_number)}
        with open_log(self._facts.run_dir, "log.err") as log:
            return [self._start([*argv, host], environment, subprocess.PIPE, log) for host in self._facts.hosts]

    def start_program(self, argv: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        run_dir = self._facts.run_dir
        with open_log(run_dir, output) as out, open_log(run_dir, "log.err") as log:
            return self._start(argv, dict(os.environ), out, log)

    def start_tasks(self, tasks: Sequence[TaskPlan], restart: int) -> list[RunningTask]:
        """Start each task separately: no process combines them here."""
        return [self._start_task(planned, restart) for planned in tasks]

    def _start_task(self, planned: TaskPlan, restart: int) -> RunningTask:
        environment = {**os.environ, **run_environment(self._plan, planned, self._facts, restart)}
        first = self._first_gpu(planned.task.node_index)
        argv = wrapper_argv(self._plan, planned, self._facts, restart, first_gpu=first)
        process = self._start(argv, environment, None, None, self._plan.workdir)
        self._wrapper_pids.add(process.pid)
        return RunningTask(planned, restart, process)

    def _first_gpu(self, node_index: int) -> int:
        """First GPU of a virtual node: the nodes divide the GPUs of this machine in order."""
        return node_index * self._plan.gpus_per_node

    def _start(
        self,
        argv: Sequence[str],
        environment: dict[str, str],
        output: IO[bytes] | int | None,
        error: IO[bytes] | None,
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
            preexec_fn=self._die_with_parent,  # safe: the orchestrator has one thread
        )
        self._own_pids.add(process.pid)
        return process

    def send_signal(self, running: Sequence[RunningTask], signal_number: int) -> None:
        for entry in running:
            entry.process.send_signal(signal_number)

    def terminate(self, running: Sequence[RunningTask]) -> None:
        self.send_signal(running, signal.SIGTERM)

    def kill(self, running: Sequence[RunningTask]) -> None:
        """Kill the workers, so that their wrappers record it. Wrappers without one are killed themselves."""
        for entry in running:
            workers = read_children(entry.process.pid)
            for pid in workers:
                self._kill(pid)
            if not workers:
                self._kill_group(entry)

    def _kill(self, pid: int) -> None:
        """Kill a process. One of another user, as of ``sudo``, runs on, which is logged once."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            if pid not in self._foreign_pids:
                self._foreign_pids.add(pid)
                message = (
                    f"process {pid} runs on: it belongs to another user, perhaps through sudo, and cannot be ended"
                )
                print(f"gpujob: {message}", file=sys.stderr, flush=True)  # noqa: T201

    def _kill_group(self, running: RunningTask) -> None:
        try:
            os.killpg(running.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the latter if all are another user's
            pass

    def read_oom_kills(self, running: RunningTask) -> int:
        return 0

    def kill_leftovers(self, running: RunningTask) -> int:
        """Kill what a task left behind, as the end of a Slurm step does.

        This covers its process group, even after its wrapper was killed, and orphans in other groups, which
        become children of this subreaper. Processes of running workers are spared. A process that cannot be
        killed now is left to the next call.
        """
        self._kill_group(running)
        self._wrapper_pids.discard(running.process.pid)
        self._own_pids.discard(running.process.pid)  # it was waited for: another process may get its pid
        own = {"GPUJOB_JOB_ID": self._facts.job_id, "GPUJOB_RANK": str(running.planned.task.rank)}
        ended = 0
        for pid in read_children(os.getpid()):
            if pid in self._own_pids:
                continue
            environment = read_environment(pid, tuple(own))
            if self._wrapper_pids and environment != own and not is_zombie(pid):
                continue
            try:
                ended += environment == own and os.getpgid(pid) != running.process.pid
                self._kill(pid)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass
        return ended

    def has_no_leftovers(self, running: RunningTask) -> bool:
        return True

    def sidecars_have_no_leftovers(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> bool:
        """A sidecar whose supervisor was killed goes on, and its lock keeps out the next one."""
        return all(_kill_orphans(process.pid) for process in sidecars if (process.returncode or 0) < 0)

    def end_sidecars(self, sidecars: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in sidecars:
            process.terminate()

    def query_end(self) -> ExternalEnd:
        return ExternalEnd()

    def read_time_limit_end(self) -> float | None:
        return None

    def requeue(self) -> str | None:
        return "there is no queue on this machine"


def _kill_orphans(group: int) -> bool:
    """Kill what is left of a process group whose leader was killed. Return whether nothing is.

    The orphans are children of this subreaper, which has to wait for them.
    """
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
        os.killpg(group, signal.SIGKILL)
    except (ChildProcessError, ProcessLookupError):
        return True
    return False


class LocalJob:
    """The guard of a job on this machine, as a child of the command."""

    def __init__(self, run_dir: Path, *first_words: str, detached: bool = False) -> None:
        """Start the job of a run directory. ``first_words`` are put before the command line of the guard.

        A ``detached`` one outlives the command.
        """
        self._run_dir = run_dir
        self._report_fd = open_memory_file("report")  # whatever happens to disks
        argv = [*first_words, sys.executable, *PYTHON_FLAGS, "launcher.guard", str(run_dir), "--local"]
        with open_log(run_dir, "log.out") as out, open_log(run_dir, "log.err") as err:
            argv += ["--report-fd", str(self._report_fd)]
            self.process = _start_guard(argv, out, err, self._report_fd, detached=detached)

    def read_report(self) -> Report | None:
        """The report of the ended job; None if it left none."""
        with open(self._report_fd, "rb") as source:
            content = source.read()
        return Report.from_json(json.loads(content)) if content else read_report(self._run_dir)


def _start_guard(
    argv: Sequence[str], output: IO[bytes], error: IO[bytes], report_fd: int, *, detached: bool
) -> subprocess.Popen[bytes]:
    """Start the guard.

    Unless it is ``detached``, it gets SIGTERM when the command dies. It starts with its signals blocked until it can
    handle them.
    """
    ask_for_signal = die_with_parent()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        if not detached:
            ask_for_signal()

    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        pass_fds=[report_fd],
        start_new_session=True,  # Ctrl-C reaches it only through the command
        preexec_fn=prepare,  # safe: other threads of the command at most wait for a file system
    )


def wait_for_guard(guard: subprocess.Popen[bytes], run_dir: Path) -> int:
    """Wait for the guard. If it was killed, also wait for the orchestrator, which then ends the job."""
    code = guard.wait()
    orchestrator, end = read_orchestrator(run_dir), time.monotonic() + ORPHAN_S
    while code < 0 and orchestrator is not None and time.monotonic() < end and _is_running(orchestrator):
        time.sleep(0.1)
    return code


def _is_running(process: OrchestratorRecord) -> bool:
    """Whether it has not ended; in a container, a first process that reaps no orphans leaves it a zombie."""
    return read_start_ticks(process.pid) == process.start_ticks and not is_zombie(process.pid)


def die_with_parent(parent: int | None = None) -> Callable[[], None]:
    """Return a function that a child calls to get SIGTERM when its parent dies (prctl(2)).

    Call it between fork and exec. ``parent`` is the pid of the parent, by default this process.
    """
    library = ctypes.CDLL(None, use_errno=True)
    parent = parent or os.getpid()

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(143)  # the parent died before the request

    return ask
