"""Lines of the logs of a job's workers, of all runs, as they are written."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.errors.lines import plain_line
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.logs.log_files_reader import find_extra_logs
from exporter.logs.search.engine import SearchEngine
from exporter.logs.tail_reader import MARK_BYTES, LogTail, TailPosition
from launcher.errors import LauncherError, did_you_mean
from launcher.rundir.job_records import OrchestratorRecord
from launcher.words import names_text

BLOCK_BYTES = 64 * 1024  # read at once from the end of a file
OTHER_DESCRIPTORS = 32  # for the output, the records of the job, and libraries
MOST_KNOWN = 8  # workers or files that an error names
_TRACEBACK = re.compile(rb"(.*)Traceback \(most recent call last\):")
_RUN = re.compile(r"(?P<head>.*?)(?P<run>(?:_a\d+)?(?:_r\d+)?)(?P<end>\.[^.]*)?")


class LogLine(NamedTuple):
    """A line of a worker's log, without colours and control characters."""

    worker: str
    rank: int
    run: str  # `_r1` for the first restart, `_a1` for the second attempt; empty for the first run
    text: str


class _Source(NamedTuple):
    """A log file, and whose it is."""

    task: Task
    run: str


def select_tasks(manifest: Manifest, worker: str | None) -> tuple[Task, ...]:
    """Tasks of a worker, given by its name, role or rank; None selects all. Raises LauncherError if there is none."""
    if worker is None:
        return manifest.tasks
    found = tuple(task for task in manifest.tasks if worker in (task.worker, task.role, str(task.rank)))
    if not found:
        names = list(dict.fromkeys(task.worker for task in manifest.tasks))
        known = ", ".join(names[:MOST_KNOWN]) + (", ..." if len(names) > MOST_KNOWN else "")
        raise LauncherError(f"the job has no worker {worker!r}{did_you_mean(worker, names)} (known: {known})")
    return found


class JobLogs:
    """The logs of some tasks, to be read repeatedly."""

    def __init__(
        self,
        manifest: Manifest,
        tasks: Sequence[Task],
        last: int | None = None,
        *,
        errors: bool = False,
        descriptors: int = 1024,
    ):
        """``last`` limits the lines of each file that exists now; ``errors`` selects lines with errors.

        ``descriptors`` is how many files this process may open.
        """
        self._manifest, self._tasks, self._last = manifest, {task.rank: task for task in tasks}, last
        self._tails: dict[Path, tuple[_Source, LogTail]] = {}
        self._errors = SearchEngine(lexicon_of_job(manifest).errors) if errors else None
        self._tracebacks: dict[Path, bytes] = {}  # what each line of an unfinished traceback begins with
        self._most_open = (descriptors - OTHER_DESCRIPTORS) // 2  # a log that is rotated takes two for a moment
        self._is_first_read = True
        self._problems: dict[Path, str] = {}  # last problem of each file
        self._new_problems: dict[str, list[str]] = {}  # names of the files that have one since it was last asked for
        self._earlier_nodes: dict[tuple[int, int], str | None] = {}  # by rank and attempt

    def read(self, *, ended: bool = False) -> Iterator[LogLine]:
        """New lines, also of files that are new. If the job has ``ended``, also the last ones without a line end.

        Then no file stays open. Before, files beyond those that this process may open are closed after each read.
        """
        for path, source in self._find_files():
            if path not in self._tails:
                is_limited = self._last is not None and self._is_first_read
                self._tails[path] = source, _tail_of(path, self._last if is_limited else None)
        self._is_first_read = False
        for number, (path, (source, tail)) in enumerate(self._tails.items()):
            while True:
                for records in tail.read_chunks():
                    yield from self._lines(path, source, bytes(records.buffer[: records.end]))
                if not tail.has_more and not tail.lag_bytes:
                    break
                if tail.problem is not None:
                    break
            if tail.problem is not None and tail.problem != self._problems.get(path):
                self._problems[path] = tail.problem
                self._new_problems.setdefault(tail.problem, []).append(path.name)
            if ended and (rest := tail.pop_unfinished_record()):
                yield from self._lines(path, source, rest)
            if ended or number >= self._most_open:
                tail.close()

    def pop_problems(self) -> list[str]:
        """One line for each problem with files that has come up since the previous call."""
        found, self._new_problems = self._new_problems, {}
        return [f"{names_text(names, MOST_KNOWN)}: {problem}" for problem, names in found.items()]

    def _lines(self, path: Path, source: _Source, text: bytes) -> Iterator[LogLine]:
        engine = self._errors
        if engine is not None and path not in self._tracebacks and not engine.scan(text).errors:
            return
        for raw in text.removesuffix(b"\n").split(b"\n"):
            if engine is None or self._is_in_traceback(path, raw) or self._is_error(path, raw, engine):
                yield LogLine(source.task.worker, source.task.rank, source.run, plain_line(raw, None))

    def _is_error(self, path: Path, line: bytes, engine: SearchEngine) -> bool:
        if not engine.scan(line + b"\n").errors:
            return False
        if traceback := _TRACEBACK.match(line):
            self._tracebacks[path] = traceback[1]
        return True

    def _is_in_traceback(self, path: Path, line: bytes) -> bool:
        """Whether a line belongs to a traceback of Python, which ends with the error, the first line not indented."""
        head = self._tracebacks.get(path)
        if head is None:
            return False
        rest = line.removeprefix(head)
        if not rest[:1].isspace() or not line.startswith(head):
            del self._tracebacks[path]
        return line.startswith(head) and not _TRACEBACK.match(line)

    def _find_files(self) -> Iterator[tuple[Path, _Source]]:
        """New files of all runs, by rank and run. Raises RecordError."""
        record = OrchestratorRecord.read(self._manifest.run_dir / run_files.ORCHESTRATOR_FILE)
        tasks: dict[Path, list[Task]] = {}  # also those that are not read: the nodes of a worker share the name
        for task in self._manifest.tasks:
            for name in task.logs:
                tasks.setdefault(self._manifest.run_dir / name.replace("{run}", ""), []).append(task)
        found = list(self._runs_of(tasks, record or OrchestratorRecord()))
        ranks = partial(rank_in_file_name, ranks=self._manifest.ranks_of_roles())
        since = record.start if record is not None else None
        for rank, paths in find_extra_logs(self._manifest, ranks, since, self._tasks).items():
            if rank in self._tasks:
                found += [(Path(path), _Source(self._tasks[rank], "")) for path in paths]
        return iter(sorted(found, key=lambda entry: (entry[1].task.rank, _run_number(entry[1].run), entry[0])))

    def _runs_of(
        self, tasks: Mapping[Path, Sequence[Task]], record: OrchestratorRecord
    ) -> Iterator[tuple[Path, _Source]]:
        """New files of all runs, given the paths of the first runs, which may begin with ``{node}``.

        The nodes of earlier attempts may be others than the present ones.
        """
        odd_hosts = [host for host in record.hosts if "_" in host]  # hardly any
        for folder in dict.fromkeys(path.parent for path in tasks):
            for name in _names_in(folder):
                match = _RUN.fullmatch(name)
                if match is None or folder / name in self._tails:
                    continue
                first = f"{match['head']}{match['end'] or ''}"
                node = next((host for host in odd_hosts if first.startswith(f"{host}_")), first.partition("_")[0])
                if shared := tasks.get(folder / first):
                    task = next((task for task in reversed(shared) if task.rank in self._tasks), None)
                elif of_nodes := tasks.get(folder / f"{{node}}{first.removeprefix(node)}"):
                    task = self._task_on(node, of_nodes, _run_number(match["run"])[0], record)
                else:
                    continue
                if task is not None and task.rank in self._tasks:
                    yield folder / name, _Source(task, match["run"])

    def _task_on(self, node: str, tasks: Sequence[Task], attempt: int, record: OrchestratorRecord) -> Task:
        """The one of these tasks, each on its own node, that ran on this node; the first one if that is unknown."""
        if len(tasks) == 1:
            return tasks[0]
        present = {record.hosts[task.node_index]: task for task in tasks if task.node_index < len(record.hosts)}
        earlier: dict[str | None, Task] = {}
        if attempt != record.attempt:
            earlier = {self._earlier_node(task, attempt): task for task in tasks}
        return earlier.get(node) or present.get(node) or tasks[0]

    def _earlier_node(self, task: Task, attempt: int) -> str | None:
        """Node of a task in an attempt that is over, by the record of its start; None if there is none."""
        if (task.rank, attempt) not in self._earlier_nodes:
            name = f"{run_files.record_name(task.worker, task.rank, attempt, 0)}.start.json"
            node = (run_files.read_json(self._manifest.run_dir / run_files.WORKERS_DIR / name) or {}).get("node")
            self._earlier_nodes[task.rank, attempt] = node if isinstance(node, str) else None
        return self._earlier_nodes[task.rank, attempt]


def _names_in(folder: Path) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()


def _run_number(run: str) -> tuple[int, int]:
    numbers = {word[0]: int(word[1:]) for word in run.split("_") if word}
    return numbers.get("a", 0), numbers.get("r", 0)


def _tail_of(path: Path, last: int | None) -> LogTail:
    """A tail that begins at the top, or at the last lines."""
    tail = LogTail(str(path))
    if last is None:
        return tail
    try:
        with run_files.open_regular(path) as source:
            facts = os.fstat(source.fileno())
            start = _start_of_last_lines(source.fileno(), facts.st_size, last)
            begin = max(0, start - MARK_BYTES)
            mark = os.pread(source.fileno(), start - begin, begin)
    except OSError:
        return tail  # its first read says why
    if start == 0:
        return tail
    position = TailPosition(os.path.realpath(path), facts.st_ino, start, start, mark.hex(), 0, 0)
    return LogTail.restore(str(path), position)


def _start_of_last_lines(descriptor: int, size: int, count: int) -> int:
    """Offset at which the last lines of a file begin; a last line without an end is none of them."""
    left, position = count + 1, size
    while position > 0:
        begin = max(0, position - BLOCK_BYTES)
        block = os.pread(descriptor, position - begin, begin)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if left == 0:
                return begin + at + 1
        position = begin
    return 0
