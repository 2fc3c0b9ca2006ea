"""Locations of a task's logs, and their first and last bytes."""

import fnmatch
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.logs.tail_reader import rotated_from
from exporter.machine.folders import read_mtime

SETTLED_S = 2.0  # a folder changed this recently may change again without a new mtime
CLOCK_SLACK_S = 60.0  # a file server's clock may be this far behind, so a log this much older may be of the run
RESCAN_S = 60.0  # reread a folder after this time: not every file system updates mtime

_PACKED = re.compile(r"\.(?:gz|bz2|xz|zst)\Z")


def run_suffix(attempt: int, restart: int) -> str:
    """Suffix that distinguishes the files of one run: ``_a1`` after a requeue, ``_r1`` after a restart."""
    return (f"_a{attempt}" if attempt else "") + (f"_r{restart}" if restart else "")


def log_paths(task: Task, run_dir: str | os.PathLike[str], node: str, attempt: int, restart: int) -> tuple[str, ...]:
    """Return the log files of one run of a task; ``{node}`` and ``{run}`` are substituted."""
    return tuple(
        os.path.join(run_dir, name.replace("{node}", node).replace("{run}", run_suffix(attempt, restart)))
        for name in task.logs
    )


def progress_path(task: Task, run_dir: str | os.PathLike[str], node: str, attempt: int, restart: int) -> str:
    """Return the progress file of one run of a task, its ``GPUJOB_PROGRESS_FILE``.

    It is named like the task's logs, since a node may run several processes of one worker.
    """
    stem = os.path.basename(task.logs[0]).rpartition(".")[0] if task.logs else f"{{node}}_{task.worker}{{run}}"
    name = stem.replace("{node}", node).replace("{run}", run_suffix(attempt, restart))
    return os.path.join(run_dir, run_files.PROGRESS_DIR, f"{name}.jsonl")


def extra_log_finder(manifest: Manifest, rank_of: Callable[[str], int | None]) -> "LogFinder | None":
    """Finder of files of the job's own log pattern, by the rank that ``rank_of`` finds in their names.

    A file without a worker's number is that of the only worker, if the job has one.
    """
    group = manifest.logs
    if group is None or group.pattern is None:
        return None
    if len(manifest.tasks) == 1:
        rank_of = partial(_rank_or_only, rank_of=rank_of, only=manifest.tasks[0].rank)
    return LogFinder(manifest.directory(group), group.pattern, rank_of)


def _rank_or_only(name: str, rank_of: Callable[[str], int | None], only: int) -> int | None:
    """The rank in a name, or that of the only worker for a name without a number."""
    found = rank_of(name)
    return only if found is None else found


def find_extra_logs(
    manifest: Manifest, rank_of: Callable[[str], int | None], since: float | None = None, ranks: Iterable[int] = ()
) -> Mapping[int, list[str]]:
    """Find the files of ``extra_log_finder`` once; with ``since``, those of ``ranks`` that were written after it."""
    finder = extra_log_finder(manifest, rank_of)
    return finder.find_since(since, ranks) if finder is not None else {}


def _rotated_from(name: str) -> tuple[str, ...]:
    """Logs that rotation may have renamed to this name, compressed or not."""
    return tuple(rotated_from(_PACKED.sub("", name)))


class LogFinder:
    """Finds files of a log pattern by rank, with one ``stat`` while no name in their folder changes.

    Rotated files are left out: the tail of the current log reads them to their end.
    """

    def __init__(self, directory: Path, pattern: str, rank_of: Callable[[str], int | None]) -> None:
        self._directory = str(directory)  # names are strings: each `Path` interns its own, and many come and go
        self._matches = re.compile(fnmatch.translate(pattern)).match
        self._hidden = pattern.startswith(".")
        self._rank_of = rank_of
        # By name: rank, and logs that rotation may have renamed to it
        self._known: dict[str, tuple[int | None, tuple[str, ...]]] = {}
        # Of files and of logs renamed to them: between a rotation and the next record the original may be missing
        self._ranks: dict[str, int] = {}
        self._names: dict[int, list[str]] = {}  # by rank, with rotated ones
        self._found: dict[int, list[str]] = {}  # paths
        # Device, inode and mtime of the folder when read; None if a later change may not show in them
        self._folder: tuple[int, int, int] | None = None
        self._read_at = 0.0

    def find(self) -> Mapping[int, list[str]]:
        """Paths of regular files by the rank that ``rank_of`` finds in their names; empty without the folder."""
        try:
            facts = os.stat(self._directory)
        except (OSError, ValueError):  # the latter for a name that no folder can have
            self._folder, self._names, self._found = None, {}, {}
            return self._found
        folder = (facts.st_dev, facts.st_ino, facts.st_mtime_ns)
        now = time.monotonic()
        if folder != self._folder or now - self._read_at >= RESCAN_S:
            settled = time.time() - facts.st_mtime > SETTLED_S
            if self._scan():
                self._folder, self._read_at = folder if settled else None, now
        return self._found

    def find_since(self, since: float | None, ranks: Iterable[int]) -> Mapping[int, list[str]]:
        """Files of these ranks that were written after ``since``: others are from an earlier job.

        Of a rank without such a file, those of the last minute before count too: the file server's clock may be behind.
        Only files of these ranks cost a ``stat`` each: a job has thousands of ranks, which may all end at once.
        """
        found = self.find()
        return found if since is None else {rank: self._find_new(since, rank) for rank in ranks}

    def _find_new(self, since: float, rank: int) -> list[str]:
        names = self._names.get(rank, [])
        written = {name: read_mtime(self._path(name)) or 0.0 for name in names}
        if max(written.values(), default=0.0) < since:
            since -= CLOCK_SLACK_S
        old = {name for name in names if written[name] < since}
        return [self._path(name) for name in names if name not in old and not self._is_rotated(name, old)]

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _is_rotated(self, name: str, old: Container[str] = ()) -> bool:
        """Whether it was renamed from another log of its rank that is not among the ``old`` ones."""
        rank, others = self._known[name]
        # a name with another rank is another worker's
        return any(self._ranks.get(other) == rank and other not in old for other in others)

    def _scan(self) -> bool:
        known: dict[str, tuple[int | None, tuple[str, ...]]] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    name = entry.name
                    if (name.startswith(".") and not self._hidden) or not self._matches(name):
                        continue
                    if entry.is_file(follow_symlinks=False):
                        known[name] = self._known.get(name) or (self._rank_of(name), _rotated_from(name))
        except OSError:
            return False  # keep the last result until the folder can be read again
        self._known, self._names, self._found = known, {}, {}
        originals = {other for _, others in known.values() for other in others}
        self._ranks = {name: rank for name, rank in self._ranks.items() if name in originals}
        self._ranks.update((name, rank) for name, (rank, _) in known.items() if rank is not None)
        for name in sorted(known):
            rank, _ = known[name]
            if rank is not None:
                self._names.setdefault(rank, []).append(name)
                if not self._is_rotated(name):
                    self._found.setdefault(rank, []).append(self._path(name))
        return True


def read_first_bytes(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read the first bytes of a file; empty if that fails."""
    try:
        with run_files.open_regular(path) as source:
            return source.read(most_bytes)
    except OSError:
        return b""


def read_last_bytes(
    path: str | os.PathLike[str], most_bytes: int, find_begin: Callable[[int], int] | None = None
) -> bytes:
    """Read the last bytes of a file; empty if that fails.

    ``find_begin`` finds the place before which the text does not count, in the open file.
    """
    try:
        with run_files.open_regular(path) as source:
            size = os.fstat(source.fileno()).st_size
            begin = 0 if find_begin is None else find_begin(source.fileno())
            source.seek(max(begin, size - most_bytes))
            return source.read(most_bytes)
    except OSError:
        return b""
