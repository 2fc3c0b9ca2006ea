"""Signals of the orchestrator: each sets a flag and wakes the loop."""

import os
import select
import signal
import time

from launcher.steps.steps import ENDING_SIGNALS

CHECKPOINT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # signals that Slurm can send some time before the time limit
IGNORED = (signal.SIGQUIT, signal.SIGALRM)
# how these reach a command run by hand
_OF_A_TERMINAL = {signal.SIGINT: ", by Ctrl-C", signal.SIGHUP: " because the terminal was closed"}


def signal_text(number: int, *, local: bool) -> str:
    """Describe the signal that ends a job; ``local`` if it was started by `gpujob run`."""
    came = signal.Signals(number)
    if local and came in _OF_A_TERMINAL:
        return f"{came.name} to `gpujob run`{_OF_A_TERMINAL[came]}"
    return f"{came.name} to the job"


class OrchestratorSignals:
    """Received signals, and a sleep that they interrupt."""

    def __init__(self, guard: int | None = None) -> None:
        self._guard = guard
        self.ending: int | None = None  # first signal that ends the job
        self.ending_at = 0.0  # when `ending` came, monotonic clock
        self.hurry = False  # whether a second SIGINT came, which only users send
        self._interrupted = False
        self.warnings: set[int] = set()  # warnings before the time limit, not handled yet
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._wake = select.poll()  # select(2) is limited to descriptors below 1024
        self._wake.register(self._wake_read, select.POLLIN)

    @property
    def orphaned(self) -> bool:
        """Whether the guard has died."""
        return self._guard is not None and os.getppid() != self._guard

    def listen(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP as ends, and SIGUSR1 and SIGUSR2 as warnings."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._note_ending)
        for number in CHECKPOINT_SIGNALS:
            signal.signal(number, lambda number, _: self.warnings.add(number))
        for number in IGNORED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING_SIGNALS, *CHECKPOINT_SIGNALS))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the end of a child wakes the loop

    def _note_ending(self, number: int, _frame: object) -> None:
        if self.ending is None:
            self.ending, self.ending_at = number, time.monotonic()
        if number == signal.SIGINT:
            self.hurry, self._interrupted = self._interrupted, True

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over, a signal comes, or a child ends."""
        if self._wake.poll(1000 * max(0.0, seconds)):
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass
