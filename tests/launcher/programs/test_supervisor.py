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
PATIENT = """
import sys
from launcher.programs import supervisor as supervise
supervise.BACKOFF_S = (600.0,)
sys.exit(supervise.supervise(sys.argv[1:], []))
"""  # one that waits for longer than a test takes before it starts anything again


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell program under the supervisor; what is left of it is killed."""
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
    """Pids of the starts so far; the programs below write theirs down."""
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_program_that_is_killed_is_back_in_seconds(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; exec sleep 60")

    def running(count: int) -> int:
        """Pid of the last start, once there are so many."""
        return poll(lambda: starts(tmp_path)[-1] if len(starts(tmp_path)) == count else None, f"start {count}")

    os.kill(running(1), signal.SIGKILL)
    os.kill(running(2), signal.SIGKILL)
    assert running(3)
    child.terminate()
    told, _ = child.communicate(timeout=60)
    assert told.splitlines() == [
        f"gpujob: the sidecar ended by signal 9; starting it again in {seconds} s" for seconds in ("0.5", "1")
    ]


@pytest.mark.parametrize("code", [0, 2])
def test_an_end_that_is_meant_is_final(code: int, start: Start, tmp_path: Path) -> None:
    child = start(f"echo $$ >> pids; exit {code}")
    assert child.wait(60) == code
    assert len(starts(tmp_path)) == 1


def test_a_failure_is_answered_by_another_start(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; [ $(wc -l < pids) -gt 1 ] || exit 1")
    told, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert len(starts(tmp_path)) == 2
    assert "ended by exit status 1; starting it again in " in told


def test_the_first_failure_waits_the_shortest_time(start: Start, tmp_path: Path) -> None:
    told, _ = start("echo $$ >> pids; [ $(wc -l < pids) -gt 1 ] || exit 1").communicate(timeout=60)
    assert "starting it again in 0.5 s" in told


def test_the_sidecars_word_for_a_new_start_is_the_supervisors() -> None:
    assert supervisor.RESTART_STATUS == cli.RESTART_STATUS
    assert cli.RESTART_STATUS not in (0, 1, cli.USAGE, cli.INTERRUPTED)


def test_a_program_that_asks_for_it_is_started_again_at_once(start: Start, tmp_path: Path) -> None:
    told, _ = start("echo $$ >> pids; [ $(wc -l < pids) -gt 1 ] || exit 75").communicate(timeout=60)
    assert len(starts(tmp_path)) == 2
    assert told == "gpujob: the sidecar ended by exit status 75; starting it again in 0 s\n"


def test_a_program_that_asks_time_and_again_waits_as_after_a_failure(start: Start, tmp_path: Path) -> None:
    told, _ = start("echo $$ >> pids; [ $(wc -l < pids) -gt 3 ] || exit 75").communicate(timeout=60)
    assert [line.rpartition(" in ")[2] for line in told.splitlines()] == ["0 s", "1 s", "2 s"]


def test_a_signal_between_two_starts_that_follow_at_once_is_not_lost(start: Start, tmp_path: Path) -> None:
    child = start("trap 'exit 75' TERM; echo $$ >> pids; while :; do sleep 0.05; done")
    poll(lambda: starts(tmp_path), "the start")
    child.terminate()
    assert child.wait(60) == 75
    assert len(starts(tmp_path)) == 1


def test_the_program_is_told_that_it_is_supervised(start: Start, tmp_path: Path) -> None:
    start('echo "$GPUJOB_SUPERVISED" > told').communicate(timeout=60)
    assert (tmp_path / "told").read_text() == "1\n"


def test_sigterm_is_passed_on_and_ends_it(start: Start, tmp_path: Path) -> None:
    child = start("trap 'echo term >> told; exit 0' TERM; echo $$ >> pids; while :; do sleep 0.05; done")
    poll(lambda: starts(tmp_path), "the start")
    child.terminate()
    assert child.wait(60) == 0
    assert (tmp_path / "told").read_text() == "term\n"
    assert len(starts(tmp_path)) == 1


def test_a_program_that_dies_of_the_sigterm_is_not_started_again(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; exec sleep 60")
    poll(lambda: starts(tmp_path), "the start")
    child.terminate()
    assert child.wait(60) == 128 + signal.SIGTERM
    assert len(starts(tmp_path)) == 1


def test_sigterm_while_it_waits_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    child = start("echo $$ >> pids; exit 1", by=("-c", PATIENT))
    assert child.stdout is not None
    assert "starting it again" in child.stdout.readline()
    child.terminate()
    assert child.wait(60) == 0
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(("code", "said"), [(0, "last\n"), (2, "")])
def test_the_last_command_takes_over_from_a_program_that_is_done(code: int, said: str) -> None:
    words = ["sh", "-c", "trap 'exit 3' TERM; kill -TERM $$; echo not asked"]
    for last, expected, status in ((["echo", "last"], said, code), (words, "", 3 if code == 0 else code)):
        argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", *last, "--", "sh", "-c", f"exit {code}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.returncode) == (expected, status)


def test_a_program_that_is_told_to_end_has_no_last_command(tmp_path: Path) -> None:
    program = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"
    argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", "echo", "last", "--", "sh", "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.terminate()
        assert (child.wait(60), child.stdout.read()) == (0, "")


def test_a_program_that_is_not_there_ends_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", "--", "./no-such-program"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert done.stderr == "gpujob: cannot start './no-such-program': No such file or directory\n"


def test_without_a_program_it_says_how_it_is_used() -> None:
    argv = [sys.executable, "-I", "-m", "launcher.programs.supervisor", "--"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")
