import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.machine import python_stacks
from exporter.machine.python_stacks import MOST_BYTES, find_py_spy, python_processes, read_stacks
from tests.exporter.conftest import Start
from tests.realstack.waiting import readable
from tests.support.exporter import SOON_S, read_line, until

Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a shell script as ``py-spy`` on a separate PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(folder / "python3"))

    def write(body: str) -> Path:
        program = folder / "py-spy"
        program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        program.chmod(0o755)
        return program

    return write


def test_each_process_has_a_stack(install: Install) -> None:
    install('echo "$@"')
    assert read_stacks([11, 12, 11]) == {11: "dump --pid 11 --nonblocking", 12: "dump --pid 12 --nonblocking"}


def test_the_number_of_processes_is_limited(install: Install) -> None:
    install("echo stack")
    assert list(read_stacks(range(100), most=3)) == [0, 1, 2]


def test_a_missing_py_spy_is_reported(install: Install) -> None:
    assert find_py_spy() is None
    assert read_stacks([11]) == {11: "no stack: py-spy is not installed"}


def test_py_spy_is_found_next_to_the_interpreter(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    program = install("echo stack")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_py_spy() == str(program)


@pytest.mark.parametrize(
    "message",
    [
        "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'",
        "Error: Operation not permitted (os error 1)",
        "Error: EPERM: Operation not permitted",
    ],
)
def test_a_refusal_is_explained(install: Install, message: str) -> None:
    install(f"cat <<'END' >&2\n{message}\nEND\nexit 1")
    assert "ptrace_scope" in read_stacks([11])[11]


def test_another_failure_keeps_its_message(install: Install) -> None:
    install("echo 'Error: Failed to find python version from target process' >&2; exit 1")
    expected = "no stack: py-spy ended with 1: Error: Failed to find python version from target process"
    assert read_stacks([11]) == {11: expected}


def test_a_py_spy_that_cannot_be_started_is_reported(install: Install) -> None:
    program = install("echo")
    program.write_bytes(b"\x7fELF")
    assert "cannot be started" in read_stacks([11])[11]


def test_a_hanging_py_spy_is_ended(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("echo partial; exec sleep 60")
    output = python_stacks._output

    def read_after_start(fd: int, deadline: float) -> tuple[bytes, bool]:
        assert readable(fd, SOON_S)
        return output(fd, time.monotonic() + 0.3)

    monkeypatch.setattr(python_stacks, "_output", read_after_start)
    began = time.monotonic()
    found = read_stacks(range(8), timeout_s=0.3)
    assert set(found.values()) == {"partial\n... (py-spy did not finish in 0.3 s)"}
    assert time.monotonic() - began < SOON_S


def test_a_py_spy_that_closes_its_output_and_hangs_is_ended(install: Install) -> None:
    install("exec >&- 2>&-; exec sleep 60")
    assert read_stacks([11], timeout_s=0.3) == {11: "no stack: no answer from py-spy in 0.3 s"}


def test_endless_output_is_cut(install: Install) -> None:
    install("exec yes")
    began = time.monotonic()
    found = read_stacks([11], timeout_s=2 * SOON_S)[11]
    assert len(found) < MOST_BYTES + 100
    assert found.endswith(f"\n... (cut off after {MOST_BYTES} bytes)")
    assert time.monotonic() - began < SOON_S


def test_python_processes_are_found_under_a_shell(start: Start) -> None:
    code = "import sys; print('there', flush=True); sys.stdin.read()"
    shell = start("sh", "-c", f'"{sys.executable}" -c "{code}"; true')
    assert read_line(shell) == "there\n"
    (found,) = python_processes(shell.pid, 4)
    assert found != shell.pid
    assert python_processes(os.getpid(), 1) == [os.getpid()]


def test_an_ended_process_has_no_python_processes() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    until(lambda: not Path(f"/proc/{process.pid}").exists(), "its end")
    assert python_processes(process.pid, 4) == []


@pytest.mark.skipif(python_stacks.find_py_spy() is None, reason="py-spy is not installed")
def test_the_real_py_spy_shows_where_a_program_waits(start: Start) -> None:
    code = "import sys, time\ndef waiting():\n    print('there', flush=True)\n    time.sleep(600)\nwaiting()"
    process = start(sys.executable, "-c", code)
    read_line(process)
    assert "waiting" in read_stacks([process.pid], timeout_s=60)[process.pid]
