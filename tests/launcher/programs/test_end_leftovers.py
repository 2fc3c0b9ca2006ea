"""Leftover processes of a job on a node, with real processes that have its variables."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.contract import run_files
from launcher.programs import end_leftovers
from tests.support.launcher import clean_environment, poll

WORKER = {"GPUJOB_WORKER": "decode_w0"}
REPORT_SIGTERM = "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done"
END_AT_SIGTERM = "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.05; done"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def job() -> dict[str, str]:
    """Variables of a job of this test only. Killed processes of other tests may briefly leave a `sleep`."""
    return {"GPUJOB_JOB_ID": f"leftovers-{secrets.token_hex(4)}", "GPUJOB_ATTEMPT": "1"}


@pytest.fixture
def start_program(tmp_path: Path, job: dict[str, str]) -> Iterator[Start]:
    """Starts a shell program with variables of the job and waits until it handles signals."""
    children: list[subprocess.Popen[str]] = []

    def start(program: str, name: str, **environment: str) -> subprocess.Popen[str]:
        out = tmp_path / name
        with out.open("w") as output:
            child = subprocess.Popen(
                ["sh", "-c", program], stdout=output, text=True, env=clean_environment(**job | environment)
            )
        children.append(child)
        poll(lambda: "up" in out.read_text(), name)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def end_leftovers_of(run_dir: Path, phase: str, job: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the program as the supervisor of a sidecar does."""
    run_files.write_job_state(str(run_dir), phase)
    return subprocess.run(
        [sys.executable, "-I", "-B", "-m", "launcher.programs.end_leftovers", str(run_dir)],
        env=clean_environment(**job),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_workers_of_a_finished_job_get_one_sigterm(start_program: Start, job: dict[str, str], tmp_path: Path) -> None:
    inner = END_AT_SIGTERM.replace("told", "inner told; sleep 0.5")  # time for a second one
    wrapped = f"sh -c \"{inner}\" & child=$!; trap 'echo told; sleep 0.2; kill $child' TERM; wait; wait"
    unwrapped, wrapper = start_program(END_AT_SIGTERM, "alone", **WORKER), start_program(wrapped, "wrapper", **WORKER)
    done = end_leftovers_of(tmp_path, "finished", job)
    assert (done.returncode, unwrapped.wait(10), wrapper.wait(10)) == (0, 0, 0)
    assert (tmp_path / "alone").read_text() == "up\ntold\n"
    assert sorted((tmp_path / "wrapper").read_text().split("\n")) == ["", "inner told", "told", "up"]
    assert "leftover processes of the finished job" in done.stderr


def test_a_process_that_ignores_sigterm_is_killed(start_program: Start, job: dict[str, str]) -> None:
    child = start_program(REPORT_SIGTERM, "stubborn", **WORKER)
    assert end_leftovers.end_task_processes(job, 0.3) >= 1
    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("phase", "differs"),
    [
        pytest.param("running", WORKER, id="the job goes on"),
        pytest.param("finished", {**WORKER, "GPUJOB_ATTEMPT": "0"}, id="another attempt"),
        pytest.param("finished", {**WORKER, "GPUJOB_JOB_ID": "leftovers"}, id="another job"),
        pytest.param("finished", {}, id="a shell in the job"),
    ],
)
def test_other_processes_are_not_signalled(
    start_program: Start, job: dict[str, str], tmp_path: Path, phase: str, differs: dict[str, str]
) -> None:
    child = start_program(REPORT_SIGTERM, "other", **differs)
    done = end_leftovers_of(tmp_path, phase, job)
    assert (done.returncode, done.stderr, child.poll()) == (0, "", None)
    assert (tmp_path / "other").read_text() == "up\n"


def test_a_process_that_already_ended_does_not_count(job: dict[str, str]) -> None:
    child = subprocess.Popen(["true"], env=clean_environment(**job, **WORKER))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert end_leftovers.end_task_processes(job, 0.0) == 0, "a zombie has no environment"
    child.wait()
    assert end_leftovers.signal_processes([child.pid], signal.SIGTERM) == 0
