"""Files of a path group, and the space of the file system they are on."""

import fnmatch
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One regular file at one look; times in epoch seconds."""

    name: str
    size_bytes: int
    mtime: float


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """Space of one file system in bytes; ``available`` is what an ordinary user can still write."""

    available_bytes: int
    size_bytes: int


def read_files(directory: Path, pattern: str) -> tuple[FileFacts, ...]:
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


def read_space(directory: Path) -> SpaceFacts | None:
    """Space of the file system that holds ``directory`` or its nearest existing parent."""
    for place in (directory, *directory.parents):
        try:
            facts = os.statvfs(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return SpaceFacts(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)
    return None


def count_lines(path: Path, most_bytes: int) -> int | None:
    """Lines of a file, a last one without newline included; None when it is larger than ``most_bytes``."""
    lines, last = 0, b"\n"
    with path.open("rb") as source:
        if os.fstat(source.fileno()).st_size > most_bytes:
            return None
        while chunk := source.read(1 << 20):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return lines + (last != b"\n")


def newest(files: Iterable[FileFacts]) -> float | None:
    """Latest modification, or None without files."""
    return max((file.mtime for file in files), default=None)


def read_mtime(path: Path) -> float | None:
    """When a file or folder was last changed, or None when it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
