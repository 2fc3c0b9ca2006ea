"""Lists of the files in a directory, and whether it may have changed."""

import os
from pathlib import Path

from exporter.machine.folders import FORCED_CHECK_EVERY, RECENT_S, FolderChangeCheck, file_names

NOW = 1_700_000_000.0


def names(directory: Path, pattern: str) -> list[str]:
    return sorted(file_names(directory, pattern))


def test_a_missing_directory_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert names(tmp_path / "later", "*") == names(tmp_path / "file", "*") == []


def test_only_regular_files_directly_in_the_directory_count(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1", encoding="ascii")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner").write_text("1", encoding="ascii")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "fifo")
    assert names(tmp_path, "*") == ["a"]


def test_temporary_names_match_only_a_pattern_that_begins_with_a_dot(tmp_path: Path) -> None:
    for name in (".a.pt.tmp", ".b.pt", "a.pt"):
        (tmp_path / name).touch()
    assert names(tmp_path, "*") == ["a.pt"]
    assert names(tmp_path, "*.pt") == ["a.pt"]
    assert names(tmp_path, ".*.pt") == [".b.pt"]


def test_patterns_are_case_sensitive(tmp_path: Path) -> None:
    (tmp_path / "A.pt").touch()
    assert names(tmp_path, "a.pt") == []
    assert names(tmp_path, "[A-Z].p?") == ["A.pt"]


def test_a_file_with_a_hard_name_is_found(tmp_path: Path, hard_name: str) -> None:
    name = f"output_{hard_name}.pt"
    (tmp_path / name).touch()
    assert names(tmp_path, "output_*.pt") == [name]


def test_a_name_that_is_not_utf8_is_found(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/out\xff.pt")).touch()
    assert names(tmp_path, "*.pt") == ["out\udcff.pt"]


def test_an_unchanged_directory_is_checked_now_and_then(tmp_path: Path) -> None:
    os.utime(tmp_path, (NOW - 100, NOW - 100))
    check = FolderChangeCheck(tmp_path)
    results = [check.may_have_changed(NOW + number) for number in range(2 * FORCED_CHECK_EVERY)]
    assert results[0]
    assert [number + 1 for number, changed in enumerate(results) if changed and number] == [
        FORCED_CHECK_EVERY,
        2 * FORCED_CHECK_EVERY,
    ]


def test_a_change_is_found_whatever_the_clock_of_the_file_server(tmp_path: Path) -> None:
    os.utime(tmp_path, (NOW - 100, NOW - 100))
    check = FolderChangeCheck(tmp_path)
    check.may_have_changed(NOW)
    os.utime(tmp_path, (NOW - 90, NOW - 90))
    assert check.may_have_changed(NOW)
    assert not check.may_have_changed(NOW)


def test_every_call_reports_a_possible_change_after_a_recent_one(tmp_path: Path) -> None:
    os.utime(tmp_path, (NOW, NOW))
    check = FolderChangeCheck(tmp_path)
    assert [check.may_have_changed(NOW + after) for after in (0, 1, RECENT_S - 1, RECENT_S)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_missing_directory_may_appear_at_any_time(tmp_path: Path) -> None:
    check = FolderChangeCheck(tmp_path / "none")
    assert check.may_have_changed(NOW)
    assert check.may_have_changed(NOW + 1)
