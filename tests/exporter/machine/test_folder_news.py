"""Change checks of a directory: by its modification time, and forced now and then."""

import os
from pathlib import Path

from exporter.machine.folders import FORCED_CHECK_EVERY, RECENT_S, FolderChangeCheck

NOW = 1_700_000_000.0


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
