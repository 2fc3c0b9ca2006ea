"""The process behind a pid that the GPU driver reports, from real and fake ``/proc``."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.gpus.process_info_reader import GpuProcessInfo, read_gpu_process, read_namespace_pids
from tests.support.exporter import until

Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def child(**environment: str) -> Iterator[int]:
    """Run a process with this environment and yield its pid."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.communicate()


def test_a_process_of_the_job_is_recognized_by_its_environment() -> None:
    with child(GPUJOB_JOB_ID="4459", GPUJOB_RANK="3") as pid:
        info = read_gpu_process(pid)
    assert info is not None
    assert (info.uid, info.job_id, info.rank) == (os.geteuid(), "4459", 3)
    assert info.name.startswith("python")


@pytest.mark.parametrize("rank", ["", "-1", "three", "٣", "1.0"])
def test_a_rank_that_is_not_a_number_is_none(rank: str) -> None:
    with child(GPUJOB_JOB_ID="4459", GPUJOB_RANK=rank) as pid:
        info = read_gpu_process(pid)
    assert info is not None
    assert (info.job_id, info.rank) == ("4459", None)


def test_a_foreign_process_has_only_a_name_and_a_user() -> None:
    with child() as pid:
        info = read_gpu_process(pid)
    assert info is not None
    assert info == GpuProcessInfo(info.name, os.geteuid())


def test_a_pid_without_a_process_has_no_info() -> None:
    with child() as pid:
        pass
    assert read_gpu_process(pid) is None
    assert read_namespace_pids(pid) == ()


def test_a_process_with_an_unreadable_environment_has_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "comm").write_bytes(b"a) b (\xff\n")
    assert read_gpu_process(7, str(tmp_path)) == GpuProcessInfo("a) b (\ufffd", os.geteuid())


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        (b"Name:\ta\nNStgid:\t9\t8\nNSpid:\t4242\t17\t1\nNSpgid:\t1\n", (4242, 17, 1)),
        (b"Name:\tNSpid: 5\nNSpid:\t4242\n", (4242,)),
        (b"Name:\ta\n", ()),
        (b"", ()),
    ],
)
def test_namespace_pids_are_ordered_from_this_namespace_inwards(
    tmp_path: Path, text: bytes, pids: tuple[int, ...]
) -> None:
    folder = tmp_path / "4242"
    folder.mkdir()
    (folder / "status").write_bytes(text)
    assert read_namespace_pids(4242, str(tmp_path)) == pids


def test_this_process_has_one_pid_in_its_own_namespace() -> None:
    assert read_namespace_pids(os.getpid())[:1] == (os.getpid(),)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a pid namespace")
def test_a_process_in_its_own_pid_namespace_has_another_pid_there(start: Start) -> None:
    process = start("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; read x")
    assert process.stdout is not None
    if process.stdout.readline() != "\n":
        pytest.skip("cannot create a pid namespace here")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    inner_pid = int(until(lambda: children.read_text("ascii").split(), "the shell")[0])
    assert read_namespace_pids(inner_pid) == (inner_pid, 1)
    assert read_namespace_pids(process.pid) == (process.pid,)
