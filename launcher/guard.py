"""Parent of the orchestrator: forwards signals, and ends the job if the orchestrator is lost.

    python -I -B -m launcher.guard RUN_DIR [--local]

It ends like the orchestrator. If that is lost before the job has finished, the new process
``launcher.run.lost_orchestrator`` ends remaining tasks and writes the report. If the guard is killed, the
orchestrator gets SIGTERM and ends the job in order.

The orchestrator shows signs of life. Without them, ``launcher.run.silent_orchestrator`` says so and finds out
whether the job needs its orchestrator. Only then, and after a signal that ends the job, the guard kills it.

It uses few imports, all from gpujob or the standard library, so that little can fail here.
"""

import contextlib
import os
import signal
import sys
import time

from exporter.contract import run_files
from exporter.contract.python_flags import ISOLATED
from launcher.programs.environment import original_environment
from launcher.programs.wrapper import FORWARDED_SIGNALS, end_with_status, forward_signal, wait_forwarding

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# blocked at the start of the orchestrator, until it can handle them
HANDLED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
PYTHON_FLAGS = (*ISOLATED, "-B", "-m")
STARTED, FINISHED = 1, 2  # what the orchestrator adds to the eventfd

WAIT_S = 1.0  # between two looks for signs of life
SILENT_S = 30.0  # without a sign of life, until this is reported
LOST_S = 120.0  # without one, until the orchestrator is replaced if the job needs it: longer than any call of it takes
START_TRIES = 30  # of the program that ends the job, one each second: nothing else would
ENDING_S = 20.0  # the same after a signal that ends the job: KillWait is 30 s by default


def guard(arguments: list[str]) -> None:
    """Start the orchestrator, wait for it, and end with the status of the job."""
    waited = {int(number) for number in (*FORWARDED_SIGNALS, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    orchestrator = Orchestrator(arguments, mask | set(HANDLED_SIGNALS))
    status = orchestrator.wait(waited)
    reached = orchestrator.read_progress()
    if reached & FINISHED:
        end_with_status(reported_status(arguments[0], status))
    if not (os.WIFSIGNALED(status) or reached & STARTED):
        end_with_status(status)
    # later signals cannot speed up the end of the job
    argv = ["launcher.run.lost_orchestrator", *arguments, "--status", str(status)]
    if orchestrator.is_killed:
        argv += ["--silent", str(orchestrator.silent_s), "--signal", str(orchestrator.end_signal)]
    status = wait_program(start_eventually(argv, mask | set(HANDLED_SIGNALS)), waited)
    end_with_status(status)


class Orchestrator:
    """The orchestrator as a child process that shows signs of life.

    Silence is counted in waits of this process: while it is itself stopped or suspended, no time passes.
    """

    def __init__(self, arguments: list[str], mask: set[int]) -> None:
        self.silent_s = 0.0  # without a sign of life
        self.is_killed = False  # whether it was killed because it is silent
        self._arguments = arguments
        self._mask = mask
        # inherited; they need no file system, and no clock
        self._signs, self._progress = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self.end_signal = 0  # first forwarded signal that ends the job
        self._observer = 0  # pid of `launcher.run.silent_orchestrator`
        self._is_observed = False  # whether an observer was started in this silence
        self._is_needed = False  # whether the job cannot go on without an orchestrator
        own = ["--guard", str(os.getpid()), "--signs", str(self._signs), "--progress-fd", str(self._progress)]
        self.pid = start_program(["launcher.run.orchestrator", *arguments, *own], mask)

    def wait(self, signals: set[int]) -> int:
        """Wait for its end, forward signals to it, and kill it if it is silent and needed; return its wait status."""
        # not sigtimedwait: after a stop and its timeout, Python's returns a signal that nobody sent
        signal.setitimer(signal.ITIMER_REAL, WAIT_S, WAIT_S)
        while True:
            info = signal.sigwaitinfo(signals)
            if info.si_signo == signal.SIGALRM and info.si_code > 0:
                self._count_silence()
            elif info.si_signo != signal.SIGCHLD:
                forward_signal(self.pid, info)
                is_ignored = signal.getsignal(info.si_signo) == signal.SIG_IGN
                if info.si_signo in ENDING_SIGNALS and not is_ignored and not self.end_signal:
                    self.end_signal, self.silent_s = info.si_signo, 0.0
            elif (status := self._reap()) is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                self._end_observer()
                return status
            self._handle_silence()

    def _count_silence(self) -> None:
        """Count a wait without a sign of life. Signs are read only here, so that each counted wait was a whole one."""
        if _read_eventfd(self._signs) > 0:
            self._end_observer()
            self.silent_s, self._is_observed, self._is_needed = 0.0, False, False
        else:
            self.silent_s += WAIT_S

    def _handle_silence(self) -> None:
        if self.silent_s >= SILENT_S and not self._is_observed:
            argv = ["launcher.run.silent_orchestrator", *self._arguments, "--pid", str(self.pid)]
            argv += ["--silent", str(self.silent_s)]
            with contextlib.suppress(OSError):  # no memory or no free process: try again at the next wait
                self._observer = start_program(argv, self._mask - set(HANDLED_SIGNALS))
                self._is_observed = True
        limit_s = ENDING_S if self.end_signal else LOST_S
        if (self.end_signal or self._is_needed) and self.silent_s >= limit_s and not self.is_killed:
            self.is_killed = True
            os.kill(self.pid, signal.SIGKILL)

    def read_progress(self) -> int:
        """The sum of ``STARTED`` and ``FINISHED``, as far as it got; 0 at the next call."""
        return _read_eventfd(self._progress)

    def _reap(self) -> int | None:
        """Collect ended children; return the wait status of the orchestrator if it is one of them."""
        found = None
        while (ended := _wait_for_any_child())[0]:
            if ended[0] == self.pid:
                found = ended[1]
            elif ended[0] == self._observer:
                self._observer, self._is_needed = 0, self._is_needed or ended[1] == 0
        return found

    def _end_observer(self) -> None:
        if self._observer:
            os.kill(self._observer, signal.SIGTERM)
            self._observer = 0


def _read_eventfd(descriptor: int) -> int:
    try:
        return os.eventfd_read(descriptor)
    except BlockingIOError:
        return 0


def _wait_for_any_child() -> tuple[int, int]:
    """Pid and wait status of an ended child; pid 0 if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def start_program(argv: list[str], mask: set[int]) -> int:
    """Start a gpujob program; return its pid."""
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *PYTHON_FLAGS, *argv],
        original_environment(),
        setsigmask=mask,
        setsigdef=[signal.SIGPIPE],
    )


def start_eventually(argv: list[str], mask: set[int]) -> int:
    """Start a gpujob program; try again for a while if there is no memory or no free process. Raises OSError."""
    for _ in range(START_TRIES - 1):
        try:
            return start_program(argv, mask)
        except OSError:
            time.sleep(WAIT_S)
    return start_program(argv, mask)


def wait_program(pid: int, signals: set[int]) -> int:
    """Wait for a child and forward signals to it; return its wait status."""
    return wait_forwarding(pid, signals, [])[0]


def reported_status(run_dir: str, status: int) -> int:
    """Wait status of an orchestrator that ended after its report: that of the job if a signal ended it."""
    report = run_files.read_json(os.path.join(run_dir, run_files.REPORT_FILE)) or {}
    job_status = report.get("exit_status")
    return job_status << 8 if os.WIFSIGNALED(status) and isinstance(job_status, int) else status


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -I -B -m launcher.guard RUN_DIR [--local]")
    guard(sys.argv[1:])
