"""Processes of a job in a made-up ``/proc``."""

import os
from pathlib import Path

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


def test_a_wrapper_is_no_leftover_even_if_it_ends_meanwhile(tmp_path: Path) -> None:
    add_process(tmp_path, 1, **TASK)
    add_process(tmp_path, 2, "python -I -m launcher.programs.wrapper --rank 3", **TASK)
    add_process(tmp_path, 3, **TASK)
    (tmp_path / "3" / "cmdline").write_text("")
    add_process(tmp_path, 4, **TASK)
    (tmp_path / "4" / "cmdline").unlink()
    assert find_leftover_processes("7", 3, str(tmp_path)) == {1}
