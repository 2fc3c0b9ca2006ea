"""Ctrl-C at moments of a command: exit status 130, and nothing is left on disk or in the queue.

A terminal sends it to all processes of the command. The moments of a running job are in ``tests/launcher/run``,
those of a sweep in ``tests/launcher/sweep``, that of a verification in ``tests/launcher/report``.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launcher.steps.slurm_steps import deferred_interrupt
from tests.support.builders import orchestrator_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import GPUJOB, poll, settled_run_dir

JOB = 'name: job\nworkers: [{command: "true"}]\nslurm: {time_limit: 1h}\n'


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a job file, and with a pipe that holds up whoever reads it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/job.yaml").write_text(JOB)
    os.mkfifo(tmp_path / "work/pipe")
    return tmp_path / "work"


def interrupted(
    words: str, folder: Path, slurm: FakeSlurm, moment: Callable[[int], object] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Start a command, wait for its first line or for the moment, which is told its pid, and press Ctrl-C."""
    process = subprocess.Popen(
        [GPUJOB, *words.split()],
        cwd=folder, env=slurm.environment(), start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if moment is None else ""
        if moment is not None:
            poll(lambda: moment(process.pid), words)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, line + out, err)


@pytest.mark.parametrize("words", ["plan pipe", "check -f pipe", "submit pipe", "run pipe"])
def test_while_a_file_is_read(words: str, folder: Path, slurm: FakeSlurm) -> None:
    before = sorted(os.listdir(folder))
    pipes: list[int] = []

    def is_read(pid: int) -> bool:
        with contextlib.suppress(OSError):  # nobody reads it yet
            pipes[:] = pipes or [os.open(folder / "pipe", os.O_WRONLY | os.O_NONBLOCK)]
        # between its last look for signals and the read, Python does not notice one
        return bool(pipes) and psutil.Process(pid).status() == psutil.STATUS_SLEEPING

    done = interrupted(words, folder, slurm, is_read)
    os.close(pipes[0])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("words", ["check job.yaml", "submit job.yaml"])
def test_while_slurm_is_asked(words: str, folder: Path, slurm: FakeSlurm) -> None:
    slurm.say("sinfo", "sleep", 60)
    done = interrupted(words, folder, slurm, lambda _: slurm.calls("sinfo"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")
    assert sorted(os.listdir(folder)) == ["job.yaml", "pipe"]
    assert [call["command"] for call in slurm.calls()] == ["sinfo"]


@pytest.mark.parametrize("sweep", ["", "sweep: {grid: {lr: [1, 2]}}\n"])
def test_while_a_job_is_submitted(sweep: str, folder: Path, slurm: FakeSlurm) -> None:
    """Its id arrives although Ctrl-C comes first, and so it does not stay on hold."""
    (folder / "job.yaml").write_text(JOB.replace("true", "true {lr}" if sweep else "true") + sweep)
    slurm.say("sbatch", "sleep", 1)
    done = interrupted("submit job.yaml", folder, slurm, lambda _: slurm.calls("sbatch"))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == ("" if sweep else "gpujob: interrupted; job 4459 was cancelled")
    assert [call["argv"][-1] for call in slurm.calls("scancel")] == ["4459"]
    assert os.listdir(folder / "logs") == []


def test_while_a_job_is_released(folder: Path, slurm: FakeSlurm) -> None:
    slurm.say("scontrol", "sleep", 60)
    done = interrupted("submit job.yaml", folder, slurm, lambda _: len(slurm.calls("scontrol")) == 2)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "gpujob: interrupted; job 4459 was cancelled"
    assert [call["argv"][-1] for call in slurm.calls("scancel")] == ["4459"]
    assert os.listdir(folder / "logs") == []


def test_while_a_job_is_watched(folder: Path, slurm: FakeSlurm) -> None:
    """The job goes on: its orchestrator, here this process, gets nothing."""
    run_dir = settled_run_dir(folder, {"name": "job", "workers": [{"command": "true"}]})
    (run_dir / "orchestrator.json").write_text(json.dumps(orchestrator_record()))
    done = interrupted(f"watch {run_dir}", folder, slurm)
    assert (done.returncode, done.stderr.strip()) == (130, "")
    assert "job local-1 starting" in done.stdout


def test_a_deferred_interrupt_comes_at_the_end() -> None:
    seen = []

    def press() -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)  # to this thread: others may be left
            seen.append("end")

    with pytest.raises(KeyboardInterrupt):
        press()
    assert seen == ["end"]
