"""Lines appended to a file that others read meanwhile, on disks that fill up and after crashes."""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given

from exporter.files.outputs import csv_reader
from exporter.files.outputs.csv_reader import CsvFile, csv_file_name, is_sidecar_csv
from tests.support.strategies import PATH_TEXT

HEADER = "time,value"
Append = Callable[[str], None]


@pytest.fixture
def append(tmp_path: Path) -> Append:
    """Appends lines to ``out/x.csv``."""
    (tmp_path / "out").mkdir()
    file = CsvFile(str(tmp_path / "out"), "x.csv", HEADER, str(tmp_path / "lines"))

    def add(lines: str) -> None:
        (tmp_path / "lines").write_text(lines, encoding="utf-8")
        file.poll(0.0)

    return add


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the file is."""
    return tmp_path / "out" / "x.csv"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KB."""
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root (mount)")
    disk = tmp_path / "out"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small-disk", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Use up all of its space; gives the file that does."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as out:
        os.posix_fallocate(out.fileno(), 0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize)
    return ballast


def test_the_header_comes_once(append: Append, place: Path) -> None:
    append("1,a\n2,b\n")
    append("3,c\n")
    assert place.read_text() == "time,value\n1,a\n2,b\n3,c\n"


def test_a_file_of_an_earlier_sidecar_is_gone_on_with(append: Append, place: Path) -> None:
    place.write_text("time,value\n1,a\n")
    append("2,b\n")
    assert place.read_text() == "time,value\n1,a\n2,b\n"


@pytest.mark.parametrize("left", ["", "t", "time,value"])
def test_a_header_that_a_crash_has_cut_is_written_anew(left: str, append: Append, place: Path) -> None:
    place.write_text(left)
    append("1,a\n")
    assert place.read_text() == "time,value\n1,a\n"


def test_a_partial_last_line_is_ended_first(append: Append, place: Path) -> None:
    place.write_text("time,value\n1,a\n2,")
    append("3,c\n")
    append("4,d\n")
    assert place.read_text() == "time,value\n1,a\n2,\n3,c\n4,d\n"


def test_another_file_of_that_name_is_left_alone(append: Append, place: Path) -> None:
    place.write_text("id,score\n1,2\n")
    with pytest.raises(FileExistsError, match="Another file has this name"):
        append("1,a\n")
    assert place.read_text() == "id,score\n1,2\n"


def test_a_fifo_or_a_link_of_that_name_holds_nobody_up(append: Append, place: Path, tmp_path: Path) -> None:
    os.mkfifo(place)
    with pytest.raises(OSError, match="Not a regular file"):
        append("1,a\n")
    place.unlink()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        append("1,a\n")
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_is_not_there_is_an_error_until_it_is(append: Append, place: Path) -> None:
    place.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        append("1,a\n")
    place.parent.mkdir()
    append("2,b\n")
    assert place.read_text() == "time,value\n2,b\n"


def test_a_file_that_becomes_too_large_is_put_aside_once(
    append: Append, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_reader, "MOST_BYTES", len(HEADER) + 1 + 2 * len("1,a\n"))
    for line in ("1,a\n", "2,b\n", "3,c\n"):
        append(line)
    aside = place.with_name("x.csv.1")
    assert (place.read_text(), aside.read_text()) == ("time,value\n3,c\n", "time,value\n1,a\n2,b\n")
    for line in ("4,d\n", "5,e\n"):
        append(line)
    assert (place.read_text(), aside.read_text()) == ("time,value\n5,e\n", "time,value\n3,c\n4,d\n")
    assert sorted(os.listdir(place.parent)) == ["x.csv", "x.csv.1"]


def test_both_files_together_stay_below_twice_the_bound() -> None:
    assert csv_reader.MOST_BYTES == 64 * 1024 * 1024


def test_a_full_disk_leaves_whole_lines_and_is_gone_on_with_once_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    source = tmp_path / "lines"
    file = CsvFile(str(small_disk), "x.csv", HEADER, str(source))
    source.write_text("1,a\n")
    file.poll(0.0)
    ballast = fill(small_disk)
    source.write_text("2,b\n" * 2000)  # more than what is left of the file's last page: part of it could be written
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            file.poll(0.0)
        assert (small_disk / "x.csv").read_text() == "time,value\n1,a\n"
    ballast.unlink()
    source.write_text("3,c\n")
    file.poll(0.0)
    assert (small_disk / "x.csv").read_text() == "time,value\n1,a\n3,c\n"


def test_a_disk_that_is_full_from_the_start_gets_its_header_later(small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "lines"
    file = CsvFile(str(small_disk), "x.csv", HEADER, str(source))
    ballast = fill(small_disk)
    source.write_text("1,a\n")
    with pytest.raises(OSError, match="No space left"):
        file.poll(0.0)
    ballast.unlink()
    file.poll(0.0)
    assert (small_disk / "x.csv").read_text() == "time,value\n1,a\n"


def test_several_who_append_leave_whole_lines(tmp_path: Path) -> None:
    def run(number: int) -> None:
        source = tmp_path / f"lines-{number}"
        source.write_text(f"{number},{'x' * 50}\n" * 8)
        file = CsvFile(str(tmp_path), "x.csv", HEADER, str(source))
        for _ in range(100):
            file.poll(0.0)

    (tmp_path / "x.csv").write_text(f"{HEADER}\n")
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    head, *lines = (tmp_path / "x.csv").read_text().splitlines()
    assert head == HEADER
    lines = [line for line in lines if line]  # an empty one ends what another was just writing
    assert len(lines) == 4 * 100 * 8
    assert {line for line in lines if not re.fullmatch(r"[0-3],x{50}", line)} == set()


@given(PATH_TEXT)
@example("")
@example("..")
@example("a/b")
@example("a" * 300)
def test_the_file_of_any_node_is_a_plain_name_that_is_known_as_ours(node: str) -> None:
    for index in (1, 100_000):
        name = csv_file_name(node, index)
        assert re.fullmatch(r"gpu_metrics_[A-Za-z0-9_.-]+\.csv", name)
        assert len(name) < 160
        assert is_sidecar_csv(name)
        assert is_sidecar_csv(f"{name}.1")


def test_the_file_of_a_hard_node_is_a_plain_name(hard_name: str) -> None:
    assert re.fullmatch(r"gpu_metrics_[A-Za-z0-9_.-]+\.csv", csv_file_name(hard_name, 3))


def test_the_first_node_has_the_plain_name_and_each_other_one_its_own() -> None:
    assert csv_file_name("gn01", 0) == "gpu_metrics.csv"
    assert csv_file_name("gn02", 1) == "gpu_metrics_gn02.csv"
    assert (
        len({csv_file_name("n[1]", 1), csv_file_name("n(1)", 2), csv_file_name("n_1_", 3), csv_file_name("", 4)}) == 4
    )


@pytest.mark.parametrize(
    "name", ["gpu_metrics.json", "my_gpu_metrics.csv", "gpu_metrics.csv.2", "gpu_metricsx.csv", "gpu_metrics_.csv"]
)
def test_other_names_are_not_ours(name: str) -> None:
    assert not is_sidecar_csv(name)
