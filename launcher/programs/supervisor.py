"""Keep one program running: restart it when it dies, and end it on request.

    python -I -m launcher.programs.supervisor [LAST...] -- COMMAND...

A killed sidecar is restarted within seconds, without another job step. Exit status 0 (done) or 2 (configuration
error) is final. After any other, the program is restarted: immediately at its first request (75) in a row, else with a
delay. A start that fails (no memory, no free process) counts as such an end, unless it is the first.
After status 0 without a request to stop, LAST replaces this process.
"""

import os
import signal
import sys
import time

BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
STEADY_S = 60.0  # a run of this length resets the delay
FINAL_STATUSES = (0, 2)
NOT_STARTED = 127
RESTART_STATUS = 75  # a sidecar asks for a new process (`exporter.cli.RESTART_STATUS`)
SUPERVISED = {"GPUJOB_SUPERVISED": "1"}  # shows the program that `RESTART_STATUS` works
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# warnings before the time limit reach every step, but are meant for workers
IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM)


def supervise(argv: list[str], last_argv: list[str]) -> int:
    """Run ``argv`` until it is done or a stop signal comes, which is passed on; return its exit status.

    Does not return if the program is done by itself and ``last_argv`` takes over.
    """
    waited = {*STOP_SIGNALS, *IGNORED_SIGNALS, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    failures, has_run = 0, False
    while True:
        started = time.monotonic()
        try:
            pid = os.posix_spawnp(
                argv[0],
                argv,
                {**os.environ, **SUPERVISED},
                setsigmask=mask,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError as error:
            text = f"cannot start {argv[0]!r}: {error.strerror}"
            if not has_run:
                print(f"gpujob: {text}", file=sys.stderr, flush=True)
                return NOT_STARTED
            code, stopping = NOT_STARTED, False
        else:
            has_run = True
            status, stopping = _wait(pid, waited)
            code = os.waitstatus_to_exitcode(status)
            text = f"the sidecar ended by {f'signal {-code}' if code < 0 else f'exit status {code}'}"
        if code == 0 and not stopping and last_argv:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvp(last_argv[0], last_argv)  # noqa: S606
        if stopping or code in FINAL_STATUSES:
            return code if code >= 0 else 128 - code
        failures = 1 if time.monotonic() - started > STEADY_S else failures + 1
        is_immediate = code == RESTART_STATUS and failures == 1
        delay = 0.0 if is_immediate else BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
        print(f"gpujob: {text}; restarting it in {delay:g} s", file=sys.stderr, flush=True)
        if _sleep_until_stop(delay, waited):
            return 0


def _wait(pid: int, signals: set[signal.Signals]) -> tuple[int, bool]:
    """Wait status of ``pid``, and whether a stop signal came meanwhile."""
    stopping = False
    while True:
        info = signal.sigwaitinfo(signals)
        if info.si_signo == signal.SIGCHLD:
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid == pid:
                return status, stopping
        elif info.si_signo in STOP_SIGNALS:
            stopping = True
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass


def _sleep_until_stop(duration_s: float, signals: set[signal.Signals]) -> bool:
    """Sleep; return true at once when a stop signal comes."""
    end = time.monotonic() + duration_s
    while (left := end - time.monotonic()) > 0:
        info = signal.sigtimedwait(signals, left)
        if info is not None and info.si_signo in STOP_SIGNALS:
            return True
    return False


if __name__ == "__main__":
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    if not words[split + 1 :]:
        sys.exit("usage: python -I -m launcher.programs.supervisor [LAST...] -- COMMAND...")
    sys.exit(supervise(words[split + 1 :], words[:split]))
