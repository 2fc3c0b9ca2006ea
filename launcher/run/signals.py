"""Signals of the orchestrator: each only sets a flag and wakes the loop."""

import os
import select
import signal
import time

from launcher.steps.steps import ENDING_SIGNALS

CHECKPOINT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Those that Slurm may be asked to send some time before the time limit."""
IGNORED = (signal.SIGQUIT, signal.SIGALRM)
_OF_A_TERMINAL = {signal.SIGINT: ", by Ctrl-C", signal.SIGHUP: ", whose terminal was closed"}
"""Why these come to a command that somebody has started by hand."""


def signal_text(number: int, *, local: bool) -> str:
    """What has asked a job to end, and who where that is known; a ``local`` one is run by a command."""
    came = signal.Signals(number)
    if local and came in _OF_A_TERMINAL:
        return f"{came.name} to `gpujob run`{_OF_A_TERMINAL[came]}"
    return f"{came.name} to the job"


class OrchestratorSignals:
    """What has come, and a sleep that ends when something comes."""

    def __init__(self, guard: int | None = None) -> None:
        self._guard = guard
        self.ending: int | None = None
        """The first signal that asks for the end of the job."""
        self.ending_at = 0.0
        """When it came, by the monotonic clock."""
        self.hurry = False
        """Whether somebody does not want to wait any more: a second SIGINT, and Slurm never sends one."""
        self._interrupted = False
        self.warnings: set[int] = set()
        """Warnings before a time limit that have come and are not dealt with yet."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._wake = select.poll()  # select(2) knows no descriptor beyond 1023
        self._wake.register(self._wake_read, select.POLLIN)

    @property
    def orphaned(self) -> bool:
        """Whether the process that stands over this one has died."""
        return self._guard is not None and os.getppid() != self._guard

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP are noted, and SIGUSR1 and SIGUSR2 are warnings."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note_ending)
        for number in CHECKPOINT_SIGNALS:
            signal.signal(number, lambda number, _: self.warnings.add(number))
        for number in IGNORED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING_SIGNALS, *CHECKPOINT_SIGNALS))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes the loop

    def _note_ending(self, number: int, _frame: object) -> None:
        if self.ending is None:
            self.ending, self.ending_at = number, time.monotonic()
        if number == signal.SIGINT:
            self.hurry, self._interrupted = self._interrupted, True

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until a signal comes or a child ends."""
        if self._wake.poll(1000 * max(0.0, seconds)):
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass
