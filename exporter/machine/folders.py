"""Files of a path group."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that says whether a name matches a glob. Hidden names need a pattern that starts with a dot."""
    matches, hidden = re.compile(fnmatch.translate(pattern)).match, pattern.startswith(".")
    return lambda name: (hidden or not name.startswith(".")) and matches(name) is not None


def file_names(directory: str | os.PathLike[str], pattern: str) -> Iterator[str]:
    """Names of regular files directly in ``directory`` that match the glob, in no order: there may be millions.

    A missing directory is empty. Links are not followed.
    """
    matches = name_matcher(pattern)
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if matches(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name
    except (FileNotFoundError, NotADirectoryError):
        return


def read_mtime(path: str | os.PathLike[str]) -> float | None:
    """Modification time of a file or folder; None if it does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


RECENT_S = 5.0  # time after a change of the folder during which every check reports news: clocks and mtimes are coarse
FORCED_CHECK_EVERY = 5


class FolderChangeCheck:
    """Checks a folder for changes, to avoid polling many of its files one by one.

    Some file systems store mtimes in whole seconds, by another clock. So a change counts for a while, and every few
    checks report news anyway.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._last_mtime: float | None = None
        self._checks = 0

    def may_have_changed(self, now: float) -> bool:
        """Whether names may be new since the last check; ``now`` in epoch seconds. True for a missing folder."""
        before, self._last_mtime = self._last_mtime, read_mtime(self._folder)
        self._checks += 1
        recent = self._last_mtime is None or abs(now - self._last_mtime) < RECENT_S
        return recent or self._last_mtime != before or self._checks % FORCED_CHECK_EVERY == 0
