"""Files of a path group."""

import fnmatch
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One regular file at one look; times in epoch seconds."""

    name: str
    size_bytes: int
    mtime: float


def list_files(directory: Path, pattern: str) -> tuple[FileFacts, ...]:
    """Regular files directly in ``directory`` whose names match the glob, by name.

    A directory that does not exist (yet) has none. Temporary names that start with a dot match
    only a pattern that does; links are not followed, other kinds of file are passed over.
    """
    hidden = pattern.startswith(".")
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if (entry.name.startswith(".") and not hidden) or not fnmatch.fnmatchcase(entry.name, pattern):
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    found.append(FileFacts(entry.name, facts.st_size, facts.st_mtime))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(found, key=lambda file: file.name))


def read_mtime(path: Path) -> float | None:
    """When a file or folder was last changed, or None when it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


RECENT_S = 5.0  # for so long after a change of the folder each look has news
LOOK_ANYWAY_EVERY = 5


class FolderChangeCheck:
    """Asked at each look of somebody who would otherwise ask for many files of a folder one by one.

    Some file systems tell a change to the second, and their clock may be another one: so it counts for a while, and
    every few looks have news without it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._before: float | None = None
        self._looks = 0

    def has_news(self, now: float) -> bool:
        """Whether names may have come since the last look; ``now`` in epoch seconds. A folder that is not there has."""
        before, self._before = self._before, read_mtime(self._folder)
        self._looks += 1
        recent = self._before is None or abs(now - self._before) < RECENT_S
        return recent or self._before != before or self._looks % LOOK_ANYWAY_EVERY == 0
