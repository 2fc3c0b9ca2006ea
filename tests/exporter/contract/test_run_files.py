"""Small files by which the parts of a job communicate."""

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import oom_kills, run_files
from tests.exporter.machine.cgroup_trees import V2_MOUNT, Machine
from tests.support.strategies import NAME

V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_EVENTS = "low 0\nhigh 0\nmax 7\noom 5\noom_kill {}\noom_group_kill 1\n"


def test_a_written_value_is_read_back(tmp_path: Path, hard_name: str) -> None:
    value = {"name": hard_name, "bytes": "\udcff", "number": 1.5, "none": None}
    run_files.write_json(tmp_path / "a.json", value)
    assert run_files.read_json(tmp_path / "a.json") == value
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"a"', "\x80\x81", '{"a":' * 9999])
def test_a_file_without_a_json_object_reads_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    assert run_files.read_json(tmp_path / "a.json") is None


def test_a_missing_file_or_a_directory_reads_as_none(tmp_path: Path) -> None:
    assert run_files.read_json(tmp_path / "a.json") is None
    assert run_files.read_json(tmp_path) is None


def test_a_pipe_and_a_huge_file_read_as_none_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users make what they like in a folder of theirs."""
    os.mkfifo(tmp_path / "pipe.json")
    assert run_files.read_json(tmp_path / "pipe.json") is None
    assert run_files.read_json("/dev/zero") is None
    os.mkfifo(tmp_path / run_files.TOKEN_FILE)
    assert run_files.read_token(tmp_path) is None
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setattr(run_files, "MOST_JSON_BYTES", 1)
    assert run_files.read_json(tmp_path / "a.json") is None


def test_a_reader_never_sees_a_partial_record(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    values = [{"text": letter * size} for letter, size in (("a", 10), ("b", 200_000))]
    run_files.write_json(path, values[0])
    done = threading.Event()

    def replace() -> None:
        for turn in range(60):
            run_files.write_json(path, values[turn % 2])
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    reads = 0
    while not done.is_set():
        assert json.loads(path.read_text(encoding="utf-8")) in values
        reads += 1
    writer.join()
    assert reads
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_record_and_leaves_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    run_files.write_json(tmp_path / "a.json", {"old": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        run_files.write_json(tmp_path / "a.json", {"new": 1})
    assert os.listdir(tmp_path) == ["a.json"]
    assert run_files.read_json(tmp_path / "a.json") == {"old": 1}


def test_a_truncated_write_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import resource, sys\n"
        "from exporter.contract import run_files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"  # after the import, which may write a cache
        "run_files.write_json(sys.argv[1], {'text': 'x' * 100000})\n"
    )
    argv = [sys.executable, "-I", "-c", program, str(tmp_path / "a.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert "File too large" in done.stderr
    assert os.listdir(tmp_path) == []


def test_write_if_absent_never_replaces_a_file(tmp_path: Path) -> None:
    assert run_files.write_json_if_absent(tmp_path / "a.json", {"first": 1})
    assert not run_files.write_json_if_absent(tmp_path / "a.json", {"second": 2})
    assert run_files.read_json(tmp_path / "a.json") == {"first": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def full_disk(monkeypatch: pytest.MonkeyPatch, run_dir: Path, number: int) -> None:
    """Let writes fail while the reserve exists."""
    real = os.fsync

    def sync(fd: int) -> None:
        if (run_dir / run_files.RESERVE_DIR).exists():
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_urgent_records_use_the_reserve_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run_files.make_reserve(tmp_path)
    files = list((tmp_path / run_files.RESERVE_DIR).iterdir())
    assert (len(files), sum(path.stat().st_size for path in files)) == (8, run_files.RESERVE_BYTES)
    full_disk(monkeypatch, tmp_path, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        run_files.write_json(tmp_path / "a.json", {"urgent": False})
    run_files.write_json_with_reserve(tmp_path, tmp_path / "a.json", {"urgent": True})
    assert run_files.read_json(tmp_path / "a.json") == {"urgent": True}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_record_takes_the_place_of_a_spare_one_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_files.write_json(tmp_path / "start.json", {"pid": 7, "start": 1.5, "text": "x" * 60})
    real = os.open

    def no_new_file(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_new_file)
    for number, value in enumerate(({"code": 3}, {"code": 3, "text": "y" * 200})):
        path = tmp_path / f"exit{number}.json"
        assert not run_files.write_json_with_reserve(tmp_path, path, value, spare=tmp_path / "start.json")
        assert run_files.read_json(path) == run_files.read_json(tmp_path / "start.json") == value
    assert sorted(os.listdir(tmp_path)) == ["exit0.json", "exit1.json", "start.json"]


def test_the_reserve_is_not_released_for_other_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_files.make_reserve(tmp_path)
    full_disk(monkeypatch, tmp_path, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        run_files.write_json_with_reserve(tmp_path, tmp_path / "a.json", {})
    assert os.listdir(tmp_path) == [run_files.RESERVE_DIR]


def test_the_reserve_is_released_once(tmp_path: Path) -> None:
    run_files.make_reserve(tmp_path)
    assert run_files.release_reserve(tmp_path)
    assert not run_files.release_reserve(tmp_path)


def test_a_non_durable_write_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    run_files.write_json(tmp_path / "a.json", {"a": 1}, durable=False)
    assert synced == []
    run_files.write_json(tmp_path / "a.json", {"a": 2})
    assert len(synced) == 1


def test_a_write_into_a_missing_folder_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_files.write_json(tmp_path / "gone" / "a.json", {})


def test_a_value_that_is_not_json_leaves_the_old_record(tmp_path: Path) -> None:
    run_files.write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        run_files.write_json(tmp_path / "a.json", {"new": object()})
    assert run_files.read_json(tmp_path / "a.json") == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("suffix", [f".{os.getpid()}.tmp", ".{}.tmp"])
@pytest.mark.parametrize("write", [run_files.write_json, run_files.write_json_if_absent])
def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, write: Callable[[Path, object], object]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    guess = tmp_path / (f".a.json{suffix}".format("00" * 8))
    guess.symlink_to(victim)
    with contextlib.suppress(FileExistsError):  # the name can be guessed only here
        write(tmp_path / "a.json", {"a": 1})
    assert victim.read_text() == "precious"
    assert guess.is_symlink()


def test_a_write_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a.json").symlink_to(tmp_path / "victim")
    run_files.write_json(tmp_path / "a.json", {"a": 1}, mode=0o644)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "a.json").is_symlink()


@pytest.mark.parametrize(
    ("mask", "mode", "found"), [(0, None, 0o644), (0o077, None, 0o600), (0o077, 0o644, 0o644), (0, 0o600, 0o600)]
)
def test_no_umask_lets_others_write(tmp_path: Path, mask: int, mode: int | None, found: int) -> None:
    before = os.umask(mask)
    try:
        run_files.write_json(tmp_path / "a.json", {}, mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == found


@given(
    st.lists(st.tuples(NAME, st.integers(0, 10**6), st.integers(0, 99), st.integers(0, 99)), max_size=5, unique=True)
)
def test_every_run_of_every_task_has_its_own_record_name(runs: list[tuple[str, int, int, int]]) -> None:
    assert len({run_files.record_name(*run) for run in runs}) == len(runs)


def test_a_record_name_has_worker_rank_attempt_and_restart() -> None:
    assert run_files.record_name("prefill_w0", 3, 1, 2) == "prefill_w0_rank3_a1_r2"


@pytest.mark.parametrize("ended", [False, True])
def test_the_job_state_has_phase_stop_and_time(tmp_path: Path, ended: bool) -> None:
    stop: dict[str, object] = {"reason": "cancelled", "cause": "SIGTERM to the job", "time": 5.0}
    assert run_files.write_job_state(str(tmp_path), "completing", stop, workers_ended=ended, attempt=2)
    state = run_files.read_json(tmp_path / "state.json") or {}
    assert state.pop("time")
    assert state == {"schema": 1, "attempt": 2, "phase": "completing", "stop": stop, "workers_ended": ended}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (V2_EVENTS.format(3), 3),
        (V1_CONTROL.format(2), 2),
        (V2_EVENTS.format(0), 0),
        ("oom_kill_disable 0\nunder_oom 0\n", None),  # kernels before 4.13
        ("oom_group_kill 4\n", None),
        ("oom_kill x\n", None),
        ("oom_kill\n", None),
        ("", None),
    ],
)
def test_oom_kills_are_read_only_from_their_own_key(text: str, count: int | None) -> None:
    assert oom_kills.parse_oom_kills(text) == count


@pytest.mark.parametrize(
    ("text", "mounts"),
    [
        ("", []),
        ("31 23 0:28 / /a rw - cgroup2 cgroup2 rw\n", [(2, "/", "/a")]),
        ("31 23 0:28 / /a rw shared:1 master:2 - cgroup2 cgroup2 rw\n", [(2, "/", "/a")]),
        ("31 23 0:28 / /a rw - cgroup cgroup rw,cpu,memory\n", [(1, "/", "/a")]),
        ("31 23 0:28 / /a rw - cgroup cgroup rw,cpu\n", []),
        ("31 23 0:28 / /a rw - cgroup cgroup rw,name=memory\n", []),
        ("31 23 0:28 / /memory rw - tmpfs cgroup2 rw,memory\n", []),
        ("31 23 0:28 /b\\040c /a\\134040\\011 rw - cgroup2 cgroup2 rw\n", [(2, "/b c", "/a\\040\t")]),
        (
            "1 0 0:1 /deep/er /x rw - cgroup2 a rw\n2 0 0:2 / /y rw - cgroup2 a rw\n3 0 0:3 /d /z rw - cgroup2 a rw\n",
            [(2, "/", "/y"), (2, "/d", "/z"), (2, "/deep/er", "/x")],
        ),
        ("31 23\n - cgroup2\n31 23 0:28 / /a rw - \n", []),
    ],
)
def test_memory_mounts_are_cgroup_v2_or_the_v1_memory_controller(text: str, mounts: list[tuple[int, str, str]]) -> None:
    assert oom_kills.parse_memory_mounts(text) == mounts


@pytest.mark.parametrize(
    ("text", "cgroup"),
    [
        ("0::/a\n", (2, "/a")),
        ("5:memory:/a\n0::/b\n", (1, "/a")),
        ("0::/b\n5:cpu,memory:/a:b\n", (1, "/a:b")),
        ("5:name=memory:/a\n4:cpu:/a\n", None),
        ("4:cpu:/a\n0::/b\n", (2, "/b")),
        ("", None),
    ],
)
def test_the_v1_cgroup_is_used_if_it_has_the_memory_controller(text: str, cgroup: tuple[int, str] | None) -> None:
    assert oom_kills.parse_memory_cgroup(text) == cgroup


@pytest.mark.parametrize(
    ("text", "count"),
    [(V2_EVENTS.format(4), 4), (V2_EVENTS.replace("oom_kill {}\n", ""), None), ("", None)],
)
def test_oom_kills_are_read_from_the_memory_cgroup_of_the_process(tmp_path: Path, text: str, count: int | None) -> None:
    machine = Machine(tmp_path, V2_MOUNT)
    machine.process("self", "0::/job_7/step_0\n")
    machine.write("sys/fs/cgroup/job_7/memory.events", V2_EVENTS.format(9))
    machine.write("sys/fs/cgroup/job_7/step_0/memory.events", text)
    assert oom_kills.read_oom_kills(str(tmp_path)) == count


def test_oom_kills_are_unknown_without_proc(tmp_path: Path) -> None:
    assert oom_kills.read_oom_kills(str(tmp_path)) is None


def test_oom_kills_of_this_machine_are_a_count_or_unknown() -> None:
    count = oom_kills.read_oom_kills()
    assert count is None or count >= 0
