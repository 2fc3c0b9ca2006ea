"""Where the text of each run begins in logs that all runs of a worker write, even those of earlier jobs.

Python's logging appends to its file by default. The last error of an earlier run explains nothing about the present
one. ``workers/....logs.json`` has these places, for the sidecar and the report. A start that could not be recorded in
time is missing; then the whole text counts.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from exporter.collecting.collector import CollectorContext
from exporter.contract import run_files
from exporter.contract.manifest import Task
from exporter.contract.records import NOTHING, Record
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.log_files_reader import LogFinder, extra_log_finder

MARK_BYTES = 128  # text before the place that shows that the file was not written anew
CLOCK_SKEW_S = 300.0  # the clock of a file server may be this far behind: Kerberos allows no more


class LogStart(Record):
    """Where the text of a run begins in one file."""

    offset: int
    inode: int
    mark: str  # text before that, in hexadecimal digits
    mtime_ns: int | None = None  # last write before that

    def find_in(self, fd: int) -> int:
        """Offset at which the text begins in this file; 0 if it was replaced, or written anew. Raises OSError."""
        facts, size = os.fstat(fd), len(self.mark) // 2
        if facts.st_ino != self.inode or not size <= self.offset <= facts.st_size:
            return 0
        if self.offset == facts.st_size and facts.st_mtime_ns != self.mtime_ns:
            return 0  # the same text was written anew
        return self.offset if os.pread(fd, size, self.offset - size).hex() == self.mark else 0


class RunLogStarts(Record):
    """Where the text of one run begins, by path; only in files that were there before it."""

    SCHEMA = run_files.RECORD_SCHEMA

    starts: Mapping[str, LogStart] = NOTHING


def read_log_starts(record: str | os.PathLike[str]) -> Mapping[str, Callable[[int], int]]:
    """Functions that find where the text of one run begins in an open log, by path; empty without a record."""
    found = RunLogStarts.read_valid(record)
    return {} if found is None else {path: start.find_in for path, start in found.starts.items()}


LogEnds = dict[int, list[tuple[str, float, LogStart]]]  # by rank: path, time of the last write and end of each log


class LogEndsWatch:
    """Reads the ends of logs that are not of one run alone."""

    def __init__(self, own: Mapping[int, Iterable[str]], finder: LogFinder | None) -> None:
        """``own``: logs that the job file names, by the rank of each worker of this node."""
        self._own, self._finder = own, finder

    def poll(self, now: float, /) -> LogEnds:
        """Read all ends at once."""
        found = self._finder.find() if self._finder is not None else {}
        ends: LogEnds = {rank: [] for rank in self._own}
        for rank, own in self._own.items():
            for path in (*own, *found.get(rank, ())):
                try:
                    with run_files.open_regular(path) as source:
                        facts = os.fstat(source.fileno())
                        size = min(MARK_BYTES, facts.st_size)
                        mark = os.pread(source.fileno(), size, facts.st_size - size)
                except OSError:
                    continue
                if len(mark) == size > 0:
                    start = LogStart(
                        offset=facts.st_size, inode=facts.st_ino, mark=mark.hex(), mtime_ns=facts.st_mtime_ns
                    )
                    ends[rank].append((path, facts.st_mtime, start))
        return ends


class LogStartFinder:
    """Finds where runs of this node's workers begin in their logs."""

    def __init__(self, context: CollectorContext) -> None:
        manifest, node = context.manifest, context.identity.node
        finder = extra_log_finder(manifest, partial(rank_in_file_name, ranks=manifest.ranks_of_roles()))
        own = {
            task.rank: [
                os.path.join(manifest.run_dir, name.replace("{node}", node))
                for name in task.logs
                if "{run}" not in name
            ]
            for task in context.tasks
        }
        self._clock, self._files = context.clock, context.files
        has_logs = finder is not None or any(own.values())
        self._watches = [self._files.watch("log-ends", partial(LogEndsWatch, own, finder))] if has_logs else []
        self._noted_at, self._ends = 0.0, LogEnds()

    def note(self) -> bool:
        """Note the ends of all logs, for runs that are found later; False while they cannot be read."""
        for answer in self._files.poll(self._watches, self._clock.time()):
            if isinstance(answer, Exception):
                return False
            self._noted_at, self._ends = self._clock.time(), answer
        return True

    def save(self, task: Task, began: float, record: str | os.PathLike[str]) -> None:
        """Write the record of a run, which was found after the last note, unless none of its logs was there before."""
        written_before = float("inf") if self._noted_at <= began else began - CLOCK_SKEW_S
        starts = {path: end for path, written, end in self._ends.get(task.rank, ()) if written < written_before}
        if starts:
            run_files.write_json_if_absent(record, RunLogStarts(starts=starts).to_json())
