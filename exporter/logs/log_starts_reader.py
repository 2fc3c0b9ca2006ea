"""Where the text of each run begins in logs that all runs of a worker write, even those of earlier jobs.

Python's logging appends to its file by default. The last error of an earlier run explains nothing about the present
one. ``workers/....logs.json`` has these places, for the sidecar and the report. A place that nobody could note in time
is missing there, and then the whole text counts.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.contract.records import NOTHING, Record
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.log_files_reader import extra_log_finder

MARK_BYTES = 128  # text before the place that shows that the file was not written anew
MTIME_GRAIN_S = 2.0  # a write may get a time this much earlier: some file systems store whole seconds
LISTED_S = 1.0  # reuse of a list of files: the workers of a node start together


class LogStart(Record):
    """Where the text of a run begins in one file."""

    offset: int
    inode: int
    mark: str  # text before that, in hexadecimal digits

    def find_in(self, fd: int) -> int:
        """Offset at which the text begins in this file; 0 if it was replaced, or written anew. Raises OSError."""
        facts, size = os.fstat(fd), len(self.mark) // 2
        if facts.st_ino != self.inode or not size <= self.offset < facts.st_size:
            return 0
        return self.offset if os.pread(fd, size, self.offset - size).hex() == self.mark else 0


class RunLogStarts(Record):
    """Where the text of one run begins, by path; only in files that were there before it."""

    SCHEMA = run_files.RECORD_SCHEMA

    starts: Mapping[str, LogStart] = NOTHING


def read_log_starts(record: str | os.PathLike[str]) -> Mapping[Path, Callable[[int], int]]:
    """Functions that find where the text of one run begins in an open log, by path; empty without a record."""
    found = RunLogStarts.read_valid(Path(record))
    return {} if found is None else {Path(path): start.find_in for path, start in found.starts.items()}


class LogStartFinder:
    """Finds where runs of this node's workers begin in their logs."""

    def __init__(self, manifest: Manifest, node: str) -> None:
        self._run_dir, self._node = manifest.run_dir, node
        self._finder = extra_log_finder(manifest, partial(rank_in_file_name, ranks=manifest.ranks_of_roles()))
        self._listed: tuple[float, Mapping[int, list[Path]]] = (float("-inf"), {})
        self._noted: dict[int, tuple[float, dict[str, LogStart]]] = {}  # by rank: when, and the ends of its logs

    def note(self, task: Task, now: float) -> None:
        """Note the ends of a worker's logs while no run of it writes them, for its next run."""
        self._noted[task.rank] = now, {path: end for path, _, end in self._ends(task)}

    def save(self, task: Task, began: float, record: Path) -> None:
        """Write the record of a run, unless there is one or no log was there before."""
        noted_at, noted = self._noted.get(task.rank, (float("inf"), {}))
        starts = dict(noted) if noted_at <= began else {}
        starts |= {path: end for path, written, end in self._ends(task) if written < began - MTIME_GRAIN_S}
        if starts and not record.exists():
            run_files.write_json_if_absent(record, RunLogStarts(starts=starts).to_json())

    def _ends(self, task: Task) -> Iterator[tuple[str, float, LogStart]]:
        """Path, time of the last write and end of each log that is not of one run alone."""
        if self._finder is not None and time.monotonic() - self._listed[0] > LISTED_S:
            self._listed = time.monotonic(), self._finder.find()
        own = (self._run_dir / name.replace("{node}", self._node) for name in task.logs if "{run}" not in name)
        for path in (*own, *self._listed[1].get(task.rank, ())):
            try:
                with run_files.open_regular(path) as source:
                    facts = os.fstat(source.fileno())
                    size = min(MARK_BYTES, facts.st_size)
                    mark = os.pread(source.fileno(), size, facts.st_size - size)
            except OSError:
                continue
            if len(mark) == size > 0:
                yield str(path), facts.st_mtime, LogStart(offset=facts.st_size, inode=facts.st_ino, mark=mark.hex())
