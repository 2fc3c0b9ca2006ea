"""Processes of a job in a made-up ``/proc``."""

import os
from pathlib import Path

import pytest

from exporter.machine.job_processes import find_job_processes, find_leftover_processes

TASK = {"GPUJOB_JOB_ID": "7", "GPUJOB_RANK": "3"}


def add_process(proc: Path, pid: int, words: str = "python train.py", **environment: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_text("\0".join([*words.split(), ""]))
    (proc / str(pid) / "environ").write_text("".join(f"{name}={value}\0" for name, value in environment.items()))


def test_processes_are_found_by_their_variables(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "9").mkdir()  # it ends meanwhile
    add_process(tmp_path, 1)
    add_process(tmp_path, 2, **TASK, HOME="/")
    add_process(tmp_path, 3, **{**TASK, "GPUJOB_RANK": ""})
    add_process(tmp_path, 4, GPUJOB_JOB_ID="7")
    add_process(tmp_path, os.getpid(), **TASK)
    assert find_job_processes(TASK, str(tmp_path)) == {2}
    assert find_job_processes({**TASK, "GPUJOB_RANK": None}, str(tmp_path)) == {2, 3}


def test_processes_of_a_job_that_a_worker_submitted_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in filter(lambda name: name.startswith("SLURM_JOB_ID"), list(os.environ)):
        monkeypatch.delenv(name)
    add_process(tmp_path, 1, **TASK)
    for pid, job in ((2, "7"), (3, "8"), (4, "9")):
        add_process(tmp_path, pid, **TASK, SLURM_JOB_ID=job)
    assert find_job_processes(TASK, str(tmp_path)) == {1}, "outside Slurm"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_job_processes(TASK, str(tmp_path)) == {1, 2}
    monkeypatch.setenv("SLURM_JOB_ID_HET_GROUP_1", "8")
    assert find_job_processes(TASK, str(tmp_path)) == {1, 2, 3}, "the other component of a heterogeneous job"


def test_a_wrapper_is_no_leftover_even_if_it_ends_meanwhile(tmp_path: Path) -> None:
    add_process(tmp_path, 1, **TASK)
    add_process(tmp_path, 2, "python -I -m launcher.programs.wrapper --rank 3", **TASK)
    add_process(tmp_path, 3, **TASK)
    (tmp_path / "3" / "cmdline").write_text("")
    add_process(tmp_path, 4, **TASK)
    (tmp_path / "4" / "cmdline").unlink()
    assert find_leftover_processes("7", 3, str(tmp_path)) == {1}
