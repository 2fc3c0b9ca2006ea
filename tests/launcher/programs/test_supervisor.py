"""The supervisor of a sidecar, with real child processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from exporter import cli
from launcher.programs import supervisor
from tests.support.launcher import clean_environment, kill_all_with, poll

Start = Callable[..., subprocess.Popen[str]]
MODULE = ("-m", "launcher.programs.supervisor", "--")
LONG_BACKOFF = """
import sys
from launcher.programs import supervisor
supervisor.BACKOFF_S = (600.0,)
sys.exit(supervisor.supervise(sys.argv[1:], []))
"""  # a supervisor whose restart delay is longer than a test


FAILING_RESTART = """
import errno, os, sys
from launcher.programs import supervisor
real, starts = os.posix_spawnp, []
def spawn(*args, **more):
    starts.append(args)
    if len(starts) == 2:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real(*args, **more)
os.posix_spawnp = spawn
supervisor.BACKOFF_S = (0.01,)
sys.exit(supervisor.supervise(sys.argv[1:], []))
"""  # a supervisor whose first restart finds no free process


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell program under the supervisor. Leftover processes are killed."""
    children: list[subprocess.Popen[str]] = []

    def begin(program: str, by: Sequence[str] = MODULE) -> subprocess.Popen[str]:
        argv = [sys.executable, "-I", *by, "sh", "-c", program, f"{tmp_path}/"]
        child = subprocess.Popen(
            argv, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()
    kill_all_with(tmp_path)


def starts(folder: Path) -> list[int]:
    """Pids of the starts so far, written by the programs."""
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_killed_program_is_restarted_within_seconds(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; exec sleep 60")

    def running(count: int) -> int:
        """Wait for `count` starts; return the pid of the last one."""
        return poll(lambda: starts(tmp_path)[-1] if len(starts(tmp_path)) == count else None, f"start {count}")

    os.kill(running(1), signal.SIGKILL)
    os.kill(running(2), signal.SIGKILL)
    assert running(3)
    child.terminate()
    output, _ = child.communicate(timeout=60)
    assert output.splitlines() == [
        f"gpujob: the sidecar ended by signal 9; restarting it in {seconds} s" for seconds in ("0.5", "1")
    ]


@pytest.mark.parametrize("code", [0, 2])
def test_a_deliberate_end_is_final(code: int, start: Start, tmp_path: Path) -> None:
    child = start(f"echo $$ >> pids; exit {code}")
    assert child.wait(60) == code
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(
    ("code", "delays"), [(1, ["0.5"]), (75, ["0"]), (75, ["0", "1", "2"])], ids=["failure", "request", "requests"]
)
def test_a_failed_program_is_restarted(code: int, delays: list[str], start: Start, tmp_path: Path) -> None:
    """Status 75 requests a restart, which is immediate for the first time."""
    child = start(f"echo $$ >> pids; [ $(wc -l < pids) -gt {len(delays)} ] || exit {code}")
    output, _ = child.communicate(timeout=60)
    assert (child.returncode, len(starts(tmp_path))) == (0, len(delays) + 1)
    ended = f"gpujob: the sidecar ended by exit status {code}; restarting it in"
    assert output.splitlines() == [f"{ended} {delay} s" for delay in delays]


def test_sidecar_and_supervisor_share_the_restart_status() -> None:
    assert supervisor.RESTART_STATUS == cli.RESTART_STATUS
    assert cli.RESTART_STATUS not in (0, 1, cli.USAGE, 130)


def test_a_signal_before_an_immediate_restart_is_not_lost(start: Start, tmp_path: Path) -> None:
    child = start("trap 'exit 75' TERM; echo $$ >> pids; while :; do sleep 0.05; done")
    poll(lambda: starts(tmp_path), "the start")
    child.terminate()
    assert child.wait(60) == 75
    assert len(starts(tmp_path)) == 1


def test_the_program_has_a_variable_that_it_is_supervised(start: Start, tmp_path: Path) -> None:
    start('echo "$GPUJOB_SUPERVISED" > told').communicate(timeout=60)
    assert (tmp_path / "told").read_text() == "1\n"


def test_sigterm_is_passed_on_and_ends_the_supervisor(start: Start, tmp_path: Path) -> None:
    child = start("trap 'echo term >> told; exit 0' TERM; echo $$ >> pids; while :; do sleep 0.05; done")
    poll(lambda: starts(tmp_path), "the start")
    child.terminate()
    assert child.wait(60) == 0
    assert (tmp_path / "told").read_text() == "term\n"
    assert len(starts(tmp_path)) == 1


def test_a_program_killed_by_sigterm_is_not_restarted(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; exec sleep 60")
    poll(lambda: starts(tmp_path), "the start")
    child.terminate()
    assert child.wait(60) == 128 + signal.SIGTERM
    assert len(starts(tmp_path)) == 1


def test_sigterm_during_the_restart_delay_ends_the_supervisor(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; exit 1", by=("-c", LONG_BACKOFF))
    assert child.stdout is not None
    assert "restarting it" in child.stdout.readline()
    child.terminate()
    assert child.wait(60) == 0
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(("code", "output"), [(0, "last\n"), (2, "")])
def test_the_last_command_runs_after_a_completed_program(code: int, output: str) -> None:
    ended = ["sh", "-c", "trap 'exit 3' TERM; kill -TERM $$; echo not asked"]
    for last, expected, status in ((["echo", "last"], output, code), (ended, "", 3 if code == 0 else code)):
        argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", *last, "--", "sh", "-c", f"exit {code}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.returncode) == (expected, status)


def test_the_last_command_does_not_run_after_sigterm(tmp_path: Path) -> None:
    program = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"
    argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", "echo", "last", "--", "sh", "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.terminate()
        assert (child.wait(60), child.stdout.read()) == (0, "")


def test_a_restart_that_fails_is_repeated(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; [ $(wc -l < pids) = 1 ] && kill -9 $$; exit 0", by=("-c", FAILING_RESTART))
    output, _ = child.communicate(timeout=60)
    assert (child.returncode, len(starts(tmp_path))) == (0, 2)
    assert output.splitlines() == [
        "gpujob: the sidecar ended by signal 9; restarting it in 0.01 s",
        "gpujob: cannot start 'sh': Resource temporarily unavailable; restarting it in 0.01 s",
    ]


def test_a_missing_program_ends_the_supervisor(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", "--", "./no-such-program"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert done.stderr == "gpujob: cannot start './no-such-program': No such file or directory\n"


def test_the_usage_is_shown_without_a_program() -> None:
    argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", "--"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")
