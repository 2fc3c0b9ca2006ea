"""What a job has left on a node, with real processes that carry its variables."""

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
LISTENS = "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done"
ENDS = "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.05; done"

Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def job() -> dict[str, str]:
    """Variables of a job of this test alone: what another one has killed may leave its last `sleep` for a moment."""
    return {"GPUJOB_JOB_ID": f"leftovers-{secrets.token_hex(4)}", "GPUJOB_ATTEMPT": "1"}


@pytest.fixture
def begin(tmp_path: Path, job: dict[str, str]) -> Iterator[Begin]:
    """Starts a shell program with the job's variables and these, and waits until it listens."""
    children: list[subprocess.Popen[str]] = []

    def start(program: str, name: str, **environment: str) -> subprocess.Popen[str]:
        out = tmp_path / name
        with out.open("w") as told:
            child = subprocess.Popen(
                ["sh", "-c", program], stdout=told, text=True, env=clean_environment(**job | environment)
            )
        children.append(child)
        poll(lambda: "up" in out.read_text(), name)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def sweep(run_dir: Path, phase: str, job: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The program, as the supervisor of a sidecar runs it."""
    run_files.write_job_state(str(run_dir), phase)
    return subprocess.run(
        [sys.executable, "-I", "-B", "-m", "launcher.programs.end_leftovers", str(run_dir)],
        env=clean_environment(**job),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_workers_of_a_job_that_is_over_are_asked_once_to_end(begin: Begin, job: dict[str, str], tmp_path: Path) -> None:
    wrapped = (
        f"sh -c \"{ENDS.replace('told', 'inner told')}\" & child=$!; trap 'echo told; kill $child' TERM; wait; wait"
    )
    alone, wrapper = begin(ENDS, "alone", **WORKER), begin(wrapped, "wrapper", **WORKER)
    done = sweep(tmp_path, "finished", job)
    assert (done.returncode, alone.wait(10), wrapper.wait(10)) == (0, 0, 0)
    assert (tmp_path / "alone").read_text() == "up\ntold\n"
    assert sorted((tmp_path / "wrapper").read_text().split("\n")) == ["", "inner told", "told", "up"]
    assert "the job is over" in done.stderr


def test_one_that_does_not_listen_is_killed(begin: Begin, job: dict[str, str]) -> None:
    child = begin(LISTENS, "stubborn", **WORKER)
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
def test_nothing_else_is_touched(
    begin: Begin, job: dict[str, str], tmp_path: Path, phase: str, differs: dict[str, str]
) -> None:
    child = begin(LISTENS, "other", **differs)
    done = sweep(tmp_path, phase, job)
    assert (done.returncode, done.stderr, child.poll()) == (0, "", None)
    assert (tmp_path / "other").read_text() == "up\n"


def test_who_has_ended_already_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    end_leftovers.signal_processes([child.pid], signal.SIGTERM)
    assert os.getpid() not in end_leftovers.find_task_processes({"GPUJOB_JOB_ID": "leftovers"})
