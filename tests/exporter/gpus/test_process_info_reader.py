"""Who stands behind a pid that a GPU's driver tells: from the tables of the kernel, made and real."""

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
    """A process with this environment; its pid."""
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


def test_a_process_of_the_job_says_so_by_its_environment() -> None:
    with child(GPUJOB_JOB_ID="4459", GPUJOB_RANK="3") as pid:
        found = read_gpu_process(pid)
    assert found is not None
    assert (found.uid, found.job_id, found.rank) == (os.geteuid(), "4459", 3)
    assert found.name.startswith("python")


@pytest.mark.parametrize("rank", ["", "-1", "three", "٣", "1.0"])
def test_a_rank_that_is_no_number_is_none(rank: str) -> None:
    with child(GPUJOB_JOB_ID="4459", GPUJOB_RANK=rank) as pid:
        found = read_gpu_process(pid)
    assert found is not None
    assert (found.job_id, found.rank) == ("4459", None)


def test_a_process_of_others_is_known_by_name_and_user_alone() -> None:
    with child() as pid:
        found = read_gpu_process(pid)
    assert found is not None
    assert found == GpuProcessInfo(found.name, os.geteuid())


def test_a_pid_that_is_nobodys_here_has_no_holder() -> None:
    with child() as pid:
        pass
    assert read_gpu_process(pid) is None
    assert read_namespace_pids(pid) == ()


def test_a_process_whose_environment_is_not_for_us_has_a_name_all_the_same(tmp_path: Path) -> None:
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
def test_pids_of_a_process_are_told_from_this_namespace_inwards(
    tmp_path: Path, text: bytes, pids: tuple[int, ...]
) -> None:
    folder = tmp_path / "4242"
    folder.mkdir()
    (folder / "status").write_bytes(text)
    assert read_namespace_pids(4242, str(tmp_path)) == pids


def test_this_process_has_one_pid_in_its_own_namespace() -> None:
    assert read_namespace_pids(os.getpid())[:1] == (os.getpid(),)


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace is for root to make")
def test_a_process_in_a_pid_namespace_of_its_own_has_another_pid_there(start: Start) -> None:
    process = start("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; read x")
    assert process.stdout is not None
    if process.stdout.readline() != "\n":
        pytest.skip("no pid namespace can be made here")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    inner = int(until(lambda: children.read_text("ascii").split(), "the shell")[0])
    assert read_namespace_pids(inner) == (inner, 1)
    assert read_namespace_pids(process.pid) == (process.pid,)
