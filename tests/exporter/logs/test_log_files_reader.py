"""The log files of a run, and their last bytes."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.manifest import PathGroup
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.log_files_reader import (
    RESCAN_S,
    LogFinder,
    find_extra_logs,
    log_paths,
    progress_path,
    read_first_bytes,
    read_last_bytes,
    run_suffix,
)
from tests.support.exporter import make_manifest, make_task


@pytest.mark.parametrize(
    ("attempt", "restart", "suffix"), [(0, 0, ""), (0, 1, "_r1"), (1, 0, "_a1"), (2, 10, "_a2_r10")]
)
def test_each_run_has_its_own_files(attempt: int, restart: int, suffix: str) -> None:
    assert run_suffix(attempt, restart) == suffix
    assert log_paths(make_task(3), Path("/runs/1"), "node02", attempt, restart) == (
        f"/runs/1/node02_worker_w3{suffix}.out",
        f"/runs/1/node02_worker_w3{suffix}.err",
    )
    progress = progress_path(make_task(3), Path("/runs/1"), "node02", attempt, restart)
    assert progress == f"/runs/1/progress/node02_worker_w3{suffix}.jsonl"


def test_tasks_of_one_worker_on_a_node_have_separate_progress_files() -> None:
    tasks = [dataclasses.replace(make_task(3), logs=(f"{{node}}_worker_w3_p{local}{{run}}.out",)) for local in (0, 1)]
    names = [Path(progress_path(task, Path("/runs/1"), "node02", 1, 0)).name for task in tasks]
    assert names == ["node02_worker_w3_p0_a1.jsonl", "node02_worker_w3_p1_a1.jsonl"]


def test_the_end_of_a_log_is_its_last_bytes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_last_bytes(tmp_path / "log", 4) == b"6789"
    assert read_last_bytes(tmp_path / "log", 100) == b"0123456789"


def test_the_end_of_an_unreadable_log_is_empty(tmp_path: Path) -> None:
    assert read_last_bytes(tmp_path / "gone", 4) == b""
    assert read_last_bytes(tmp_path, 4) == b""


def test_neither_end_of_a_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    assert read_first_bytes(tmp_path / "log", 4) == read_last_bytes(tmp_path / "log", 4) == b""


def rank_of(name: str) -> int | None:
    digits = "".join(character for character in name if character.isdigit())
    return int(digits) if digits else None


def scans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of folder scans since the previous call."""
    real, seen = os.scandir, []

    def scandir(place: Path) -> Any:
        seen.append(place)
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)

    def count() -> int:
        number = len(seen)
        seen.clear()
        return number

    return count


def test_files_are_found_by_pattern_and_rank(tmp_path: Path) -> None:
    for name in ("rank_1.log", "rank_0.log", "rank_0.b.log", "rank_2.txt", ".rank_3.log", "none.log"):
        (tmp_path / name).touch()
    (tmp_path / "rank_4.log").mkdir()
    (tmp_path / "rank_5.log").symlink_to(tmp_path / "rank_1.log")
    assert LogFinder(tmp_path, "*.log", rank_of).find() == {
        0: [f"{tmp_path}/rank_0.b.log", f"{tmp_path}/rank_0.log"],
        1: [f"{tmp_path}/rank_1.log"],
    }


def test_new_and_deleted_files_are_noticed(tmp_path: Path) -> None:
    finder = LogFinder(tmp_path / "logs", "*.log", rank_of)
    assert finder.find() == {}
    (tmp_path / "logs").mkdir()
    assert finder.find() == {}
    for rank in range(3):
        (tmp_path / "logs" / f"{rank}.log").touch()
        assert list(finder.find()) == list(range(rank + 1))
    (tmp_path / "logs" / "1.log").unlink()
    assert list(finder.find()) == [0, 2]
    (tmp_path / "logs").rename(tmp_path / "old")
    assert finder.find() == {}


def test_an_unchanged_folder_is_not_rescanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.log").touch()
    os.utime(tmp_path, (1, 1))
    count, finder = scans(monkeypatch), LogFinder(tmp_path, "*.log", rank_of)
    assert list(finder.find()) == [0]
    (tmp_path / "0.log").write_text("more")
    assert list(finder.find()) == [0]
    assert count() == 1
    (tmp_path / "1.log").touch()
    assert list(finder.find()) == [0, 1]
    assert count() == 1


def test_a_recently_changed_folder_is_rescanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second file within the resolution of the mtime leaves the mtime unchanged."""
    (tmp_path / "0.log").touch()
    now = time.time()
    os.utime(tmp_path, (now, now))
    finder = LogFinder(tmp_path, "*.log", rank_of)
    assert list(finder.find()) == [0]
    (tmp_path / "1.log").touch()
    os.utime(tmp_path, (now, now))
    assert list(finder.find()) == [0, 1]


def test_a_folder_is_rescanned_periodically_whatever_its_mtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(tmp_path, (1, 1))
    finder = LogFinder(tmp_path, "*.log", rank_of)
    assert finder.find() == {}
    (tmp_path / "0.log").touch()
    os.utime(tmp_path, (1, 1))
    assert finder.find() == {}
    later = time.monotonic() + RESCAN_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert list(finder.find()) == [0]


def test_a_folder_that_is_unreadable_for_a_while_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.log").touch()
    finder = LogFinder(tmp_path, "*.log", rank_of)
    finder.find()

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert list(finder.find()) == [0]
    (tmp_path / "1.log").touch()
    assert list(finder.find()) == [0, 1]


ROTATED_AWAY = [
    "worker_0.log.1",
    "worker_0.log-20260101",
    "worker_0.log_2",
    "worker_0.2026-01-01.log",
    "worker_0.1.log",
    "worker_0.log.2.gz",
    "worker_0.log-20260101.zst",
]
OTHERS = ["worker_0.err", "worker_0_1.log", "worker_0.logs", "worker_0-2.log", "worker_0.log.old"]


def by_worker(name: str) -> int | None:
    return rank_in_file_name(name, {})


def found_names(finder: LogFinder) -> list[str]:
    return [Path(path).name for paths in finder.find().values() for path in paths]


@pytest.mark.parametrize("name", ROTATED_AWAY)
def test_a_rotated_part_of_a_found_log_is_no_separate_log(tmp_path: Path, name: str) -> None:
    log = tmp_path / "worker_0.log"
    log.touch()
    finder = LogFinder(tmp_path, "worker_0*", by_worker)
    assert found_names(finder) == ["worker_0.log"]
    log.rename(tmp_path / name)
    assert found_names(finder) == [], "the log of this name comes with the next record"
    log.touch()
    assert found_names(finder) == ["worker_0.log"]


def extra_names(folder: Path, since: float | None = None) -> list[str]:
    manifest = make_manifest(folder, make_task(0), logs=PathGroup("log", ".", "worker*"))
    return [Path(path).name for paths in find_extra_logs(manifest, by_worker, since, [0]).values() for path in paths]


@pytest.mark.parametrize("name", ROTATED_AWAY)
def test_a_rotated_log_is_read_once_at_the_end_of_a_job(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert extra_names(tmp_path) == [name], "the log itself is gone"
    (tmp_path / "worker_0.log").touch()
    assert extra_names(tmp_path) == ["worker_0.log"]
    os.utime(tmp_path / "worker_0.log", (1, 1))
    assert extra_names(tmp_path, since=1000.0) == [name], "the log is of an earlier job"


def test_a_log_of_the_minute_before_counts_only_if_there_is_no_newer_one(tmp_path: Path) -> None:
    """The clock of the file server may be behind; but the file may also be of the job before."""
    for name, written in (("worker_0_second.log", 980.0), ("worker_0_first.log", 900.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written, written))
    assert extra_names(tmp_path, since=1000.0) == ["worker_0_second.log"]
    (tmp_path / "worker_0_third.log").touch()
    os.utime(tmp_path / "worker_0_third.log", (1000.0, 1000.0))
    assert extra_names(tmp_path, since=1000.0) == ["worker_0_third.log"]


@pytest.mark.parametrize("name", [*OTHERS, "worker_1.log"])
def test_another_log_is_read_besides_the_first_at_the_end_of_a_job(tmp_path: Path, name: str) -> None:
    for other in ("worker_0.log", name):
        (tmp_path / other).touch()
    assert sorted(extra_names(tmp_path)) == sorted(["worker_0.log", name])


def test_a_name_with_another_rank_is_the_log_of_that_rank(tmp_path: Path) -> None:
    for name in ("w0.log", "w0.1.log"):
        (tmp_path / name).touch()
    manifest = make_manifest(tmp_path, make_task(0), logs=PathGroup("log", ".", "*.log"))
    assert find_extra_logs(manifest, rank_of) == {0: [f"{tmp_path}/w0.log"], 1: [f"{tmp_path}/w0.1.log"]}


@pytest.mark.parametrize("name", OTHERS)
def test_another_log_of_the_worker_is_found_besides_the_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "worker_0.log").touch()
    (tmp_path / name).touch()
    assert sorted(found_names(LogFinder(tmp_path, "worker_0*", by_worker))) == sorted(["worker_0.log", name])


@pytest.mark.parametrize("name", ROTATED_AWAY)
def test_a_name_that_looks_rotated_is_found_if_the_log_is_absent(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert found_names(LogFinder(tmp_path, "worker_0*", by_worker)) == [name]


def test_rank_suffixes_are_not_taken_for_rotation_numbers(tmp_path: Path) -> None:
    names = ["worker", "worker-0", "worker_1", "worker_2"]
    for name in names:
        (tmp_path / name).touch()
    assert sorted(found_names(LogFinder(tmp_path, "worker*", by_worker))) == names[1:]
