"""Signals of the orchestrator, each of which sets a flag and wakes the loop, and its signs of life for the guard."""

import os
import select
import signal
import time

from exporter.machine.procfs import read_process_stat
from launcher.steps.steps import ENDING_SIGNALS

CHECKPOINT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # signals that Slurm can send some time before the time limit
STOPPED_S = 15.0  # a guard that is stopped for longer is continued; none of its work is urgent before
IGNORED = (signal.SIGQUIT, signal.SIGALRM)
# how these reach a command run by hand
_TERMINAL_CAUSES = {signal.SIGINT: ", by Ctrl-C", signal.SIGHUP: " because the terminal was closed"}


def signal_text(number: int, *, local: bool) -> str:
    """Describe the signal that ends a job; ``local`` if it was started by `gpujob run`."""
    received = signal.Signals(number)
    if local and received in _TERMINAL_CAUSES:
        return f"{received.name} to `gpujob run`{_TERMINAL_CAUSES[received]}"
    return f"{received.name} to the job"


class OrchestratorSignals:
    """Received signals, and a sleep that they interrupt.

    ``signs`` is an eventfd(2), on which the guard waits for signs of life.
    """

    def __init__(self, guard_pid: int | None = None, signs: int | None = None) -> None:
        self._guard_pid = guard_pid
        self._signs = signs
        self._guard_stopped_at: float | None = None  # monotonic clock
        self.end_signal: int | None = None  # first signal that ends the job
        self.end_signal_at = 0.0  # when `end_signal` came, monotonic clock
        self.is_kill_requested = False  # whether a second SIGINT came, which only users send
        self._was_interrupted = False
        self.warnings: set[int] = set()  # warnings before the time limit, not handled yet
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._wake_poll = select.poll()  # select(2) is limited to descriptors below 1024
        self._wake_poll.register(self._wake_read, select.POLLIN)

    @property
    def is_orphaned(self) -> bool:
        """Whether the guard has died."""
        return self._guard_pid is not None and os.getppid() != self._guard_pid

    def install_handlers(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP as ends, and SIGUSR1 and SIGUSR2 as warnings."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._record_end_signal)
        for number in CHECKPOINT_SIGNALS:
            signal.signal(number, lambda number, _: self.warnings.add(number))
        for number in IGNORED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING_SIGNALS, *CHECKPOINT_SIGNALS))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the end of a child wakes the loop

    def _record_end_signal(self, number: int, _frame: object) -> None:
        if self.end_signal is None:
            self.end_signal, self.end_signal_at = number, time.monotonic()
        if number == signal.SIGINT:
            self.is_kill_requested, self._was_interrupted = self._was_interrupted, True

    def show_life(self) -> None:
        """Give the guard a sign of life. ``sleep`` does so; what takes long without it must."""
        if self._signs is not None:
            os.eventfd_write(self._signs, 1)

    def is_ending(self) -> bool:
        """Whether a signal has ended the job, for work that asks this often: each time is a sign of life."""
        self.show_life()
        return self.end_signal is not None

    def continue_guard(self, after_s: float = STOPPED_S) -> bool:
        """Continue the guard if it has been stopped (SIGSTOP) for this time, and return whether it was.

        Otherwise signals would not reach the job, and the end of the job would not be the end of its batch step.
        """
        stat, now = read_process_stat(self._guard_pid) if self._guard_pid is not None else None, time.monotonic()
        if self._guard_pid is None or stat is None or stat.state != "stopped":
            self._guard_stopped_at = None
            return False
        self._guard_stopped_at = self._guard_stopped_at or now
        if now - self._guard_stopped_at < after_s:
            return False
        self._guard_stopped_at = None
        os.kill(self._guard_pid, signal.SIGCONT)
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over, a signal comes, or a child ends."""
        self.show_life()
        if self._wake_poll.poll(1000 * max(0.0, seconds)):
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass
