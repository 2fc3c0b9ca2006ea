"""News of a folder: by its own time, for a while after it, and now and then without."""

import os
from pathlib import Path

from exporter.machine.folders import FORCED_CHECK_EVERY, RECENT_S, FolderChangeCheck

NOW = 1_700_000_000.0


def test_a_folder_that_does_not_change_has_news_now_and_then(tmp_path: Path) -> None:
    os.utime(tmp_path, (NOW - 100, NOW - 100))
    news = FolderChangeCheck(tmp_path)
    looks = [news.may_have_changed(NOW + look) for look in range(2 * FORCED_CHECK_EVERY)]
    assert looks[0]
    assert [look + 1 for look, has in enumerate(looks) if has and look] == [FORCED_CHECK_EVERY, 2 * FORCED_CHECK_EVERY]


def test_a_change_has_news_whatever_the_clock_of_the_file_server(tmp_path: Path) -> None:
    os.utime(tmp_path, (NOW - 100, NOW - 100))
    news = FolderChangeCheck(tmp_path)
    news.may_have_changed(NOW)
    os.utime(tmp_path, (NOW - 90, NOW - 90))
    assert news.may_have_changed(NOW)
    assert not news.may_have_changed(NOW)


def test_after_a_recent_change_each_look_has_news(tmp_path: Path) -> None:
    os.utime(tmp_path, (NOW, NOW))
    news = FolderChangeCheck(tmp_path)
    assert [news.may_have_changed(NOW + after) for after in (0, 1, RECENT_S - 1, RECENT_S)] == [True, True, True, False]


def test_a_folder_that_is_not_there_may_come_at_any_time(tmp_path: Path) -> None:
    news = FolderChangeCheck(tmp_path / "none")
    assert news.may_have_changed(NOW)
    assert news.may_have_changed(NOW + 1)
