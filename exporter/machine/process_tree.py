"""A worker and its descendants, read from ``/proc`` through open descriptors (proc(5)).

``pread`` on an open ``stat`` takes a tenth of psutil's time. It also rules out pid reuse: the descriptor stays bound to
its process, and fails with ESRCH when that is gone.
"""

import errno
import functools
import os
import resource
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import islice

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import ProcessDetails
from exporter.machine.procfs import (
    CLOCK_TICKS,
    ENDED_STATES,
    IO_BYTES,
    PAGE_SIZE,
    READ_FLAGS,
    STAT_BYTES,
    ProcessStat,
    parse_process_io,
    parse_process_stat,
    read_children,
    read_proc_file,
    read_proc_names,
)

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NOT_OPEN, _DENIED = -1, -2  # in place of a descriptor

MOST_PROCESSES = 64  # of one worker, read by `read_details`
MOST_LINKS = 200  # open files whose names `read_details` reads; at most half of them for the worker itself
MOST_PATHS = 100
MOST_PSS_S = 0.3  # CPU time after which a sum of PSS is abandoned
PSS_REST_FACTOR = 2000  # rest after a PSS read, as a multiple of its cost: a read takes 17 ms per GiB


@dataclass(frozen=True, slots=True)
class ProcessTreeSample:
    """One read of a worker and all its descendants. IO is None where the kernel denies it."""

    state: str
    cpu_s: float
    rss_bytes: int
    threads: int
    children: int
    io_read_bytes: int | None
    io_write_bytes: int | None


def _may_stay_open(fd: int) -> bool:
    """Whether this descriptor may be kept; a quarter of the limit is reserved for others.

    The kernel assigns the lowest free number, so a high one shows how many are in use.
    """
    return fd < resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


def _open_to_keep(path: str) -> int:
    """Open a file to keep. Return ``_NOT_OPEN`` if descriptors are scarce, ``_DENIED`` on other errors."""
    try:
        fd = os.open(path, READ_FLAGS)
    except OSError as error:
        return _NOT_OPEN if error.errno in _OUT_OF_DESCRIPTORS else _DENIED
    if _may_stay_open(fd):
        return fd
    os.close(fd)
    return _NOT_OPEN


class _OpenProcess:
    """One process: its open descriptors and last read values."""

    __slots__ = (
        *("folder", "io_fd", "io_text", "own_ticks", "parent", "pid", "read_bytes", "reaped_ticks", "rss_pages"),
        *("start_ticks", "stat_fd", "stat_text", "state", "switches", "threads", "write_bytes"),
    )

    def __init__(self, pid: int, proc: str, *, keep: bool = False) -> None:
        """``keep`` keeps ``stat`` open even if descriptors are scarce."""
        self.pid = pid
        self.folder = f"{proc}/{pid}"
        self.stat_fd = os.open(f"{self.folder}/stat", READ_FLAGS)
        try:
            stat = parse_process_stat(os.pread(self.stat_fd, STAT_BYTES, 0))
        except (OSError, ValueError) as error:
            os.close(self.stat_fd)
            raise ProcessLookupError(f"process {pid} does not exist") from error
        if not keep and not _may_stay_open(self.stat_fd):
            os.close(self.stat_fd)
            self.stat_fd = _NOT_OPEN
        self.io_fd = _open_to_keep(f"{self.folder}/io")
        self.start_ticks, self.parent = stat.start_ticks, stat.parent
        self.state = stat.state
        self.stat_text = self.io_text = b""
        self.own_ticks = self.reaped_ticks = self.threads = self.rss_pages = 0
        self.read_bytes = self.write_bytes = 0
        self.switches = (0, 0)

    def close(self) -> None:
        for fd in (self.stat_fd, self.io_fd):
            if fd >= 0:
                os.close(fd)

    def read_stat(self) -> bytes:
        """Read ``stat``; raise ProcessLookupError if the process was reaped, OSError if that is unknown."""
        if self.stat_fd >= 0:
            return os.pread(self.stat_fd, STAT_BYTES, 0)
        try:
            text = read_proc_file(f"{self.folder}/stat", STAT_BYTES)
        except FileNotFoundError as error:
            raise ProcessLookupError(f"process {self.pid} does not exist") from error
        if parse_process_stat(text).start_ticks != self.start_ticks:
            raise ProcessLookupError(f"pid {self.pid} now belongs to another process")
        return text

    def read_io(self) -> bytes:
        """Read ``io``; empty if it was denied at the start."""
        if self.io_fd >= 0:
            return os.pread(self.io_fd, IO_BYTES, 0)
        return b"" if self.io_fd == _DENIED else read_proc_file(f"{self.folder}/io", IO_BYTES)

    def exists(self) -> bool:
        """Whether it has not been reaped, so that its pid cannot have been reused."""
        try:
            self.read_stat()
        except OSError:
            return False
        return True

    def with_live_thread(self, stat: ProcessStat) -> ProcessStat:
        """Replace state and memory by those of a live thread, if only the first thread has ended."""
        if stat.state != "zombie" or stat.threads < 2:
            return stat
        for thread in read_proc_names(f"{self.folder}/task"):
            try:
                other = parse_process_stat(read_proc_file(f"{self.folder}/task/{thread}/stat", STAT_BYTES))
            except (OSError, ValueError):
                continue
            if other.state not in ENDED_STATES:
                return stat._replace(state=other.state, rss_pages=other.rss_pages)
        return stat


class _ChildrenOfAll:
    """Children of every process of the machine, shared by all trees.

    One pass over the names in ``/proc`` and the ``stat`` of new ones finds children of all threads. Reading each
    thread's ``children`` file would cost more: workers have hundreds of threads.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        # Inode and first known parent of each process; a reused pid has another inode
        self._parents: dict[int, tuple[int, int]] = {}
        self._children: dict[int, list[int]] = {}
        self._read_at = -1.0

    def children(self, min_read_time: float) -> Mapping[int, list[int]]:
        """Children as of ``min_read_time`` (monotonic) or later. The caller must check their present parent."""
        with self._lock:
            if self._read_at < min_read_time:
                self._read_at = time.monotonic()
                self._read()
            return self._children

    def _read(self) -> None:
        try:
            with os.scandir(self._proc) as entries:
                found = [(int(entry.name), entry.inode()) for entry in entries if entry.name.isdecimal()]
        except OSError:
            return  # no free descriptor
        known, self._parents = self._parents, {}
        children: dict[int, list[int]] = {}
        for pid, inode in found:
            facts = known.get(pid)
            if facts is None or facts[0] != inode:
                try:
                    facts = inode, parse_process_stat(read_proc_file(f"{self._proc}/{pid}/stat", STAT_BYTES)).parent
                except (OSError, ValueError):
                    continue
            self._parents[pid] = facts
            children.setdefault(facts[1], []).append(pid)
        self._children = children


_children_of_all = functools.lru_cache(maxsize=4)(_ChildrenOfAll)


class ProcessTree:
    """A worker and its descendants, read repeatedly.

    CPU seconds and IO bytes never fall. The use last read from a descendant stays in the sums after its end. Use by
    children that lived only between two reads arrives with their parent, to which the kernel adds it. Raises
    ProcessLookupError if the worker does not exist, or has other ``start_ticks``.
    """

    # Reads from one full read to the next. A full read searches all processes for descendants and reads everyone's IO;
    # others read only the worker's own children, and IO of those that used CPU
    FULL_READ_EVERY = 5
    SHARED_S = 0.5  # reads this close together, as for all workers of a node, share a search

    def __init__(self, pid: int, start_ticks: int | None = None, proc: str = "/proc") -> None:
        self._proc = proc
        self.pid = pid
        self._processes: dict[int, _OpenProcess] = {}  # the worker first, and parents before children: see `read`
        self._children_fd = _NOT_OPEN
        self._children_text = b""
        try:
            worker = _OpenProcess(pid, proc, keep=True)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            raise ProcessLookupError(f"process {pid} does not exist") from error
        self._processes[pid] = worker
        self.start_ticks = worker.start_ticks
        if start_ticks is not None and start_ticks != self.start_ticks:
            self.close()
            raise ProcessLookupError(f"pid {pid} now belongs to another process")
        self._children_fd = _open_to_keep(f"{proc}/{pid}/task/{pid}/children")
        self._ticks = self._read_bytes = self._write_bytes = 0
        self._rss_pages = self._threads = 0
        self._has_io = False
        self._claims: dict[int, list[int]] = {}
        self._switches: tuple[int, int] | None = None
        self._pss: tuple[int | None, float] = (None, 0.0)  # last value, and when (monotonic) it may be read again
        self._costly_rss_pages = 0  # resident memory at which the sum of PSS was abandoned; 0 if it was not
        self._reads = 0

    @property
    def pids(self) -> frozenset[int]:
        """The worker and its descendants, as last found."""
        return frozenset(self._processes)

    def close(self) -> None:
        """Close all descriptors."""
        for watched in self._processes.values():
            watched.close()
        self._processes = {}
        if self._children_fd >= 0:
            os.close(self._children_fd)
            self._children_fd = _NOT_OPEN

    def read(self) -> ProcessTreeSample | None:
        """Read once; None if the worker was reaped. Its descendants then stay watched.

        Parents are read before children, so that a child's use is never counted both in its parent and in itself.
        """
        if not self._processes:
            return None
        whole = self._reads % self.FULL_READ_EVERY == 0
        self._find_descendants(time.monotonic() - self.SHARED_S if whole else None)
        self._reads += 1
        worker = self._processes[self.pid]
        ended: list[_OpenProcess] = []
        growth: dict[int, list[int]] = {}
        pread = os.pread
        for watched in self._processes.values():
            try:
                # inlined where possible: with all processes of a node each call counts
                text = watched.read_stat() if watched.stat_fd < 0 else pread(watched.stat_fd, STAT_BYTES, 0)
            except ProcessLookupError:
                if watched is worker:
                    return None
                ended.append(watched)
                continue
            except OSError:
                continue  # no free descriptor: the last values still count
            if text == watched.stat_text:
                if not whole:
                    continue  # it has hardly run and reaped no child, so its IO can wait
                reaped_ticks = 0
            else:
                stat = parse_process_stat(text)
                if stat.state in ENDED_STATES:
                    if stat.state == "dead" and watched is not worker:
                        ended.append(watched)  # its parent already has its use
                        continue
                    stat = watched.with_live_thread(stat)
                watched.stat_text = text
                watched.state, watched.parent = stat.state, stat.parent
                self._ticks += max(0, stat.own_ticks - watched.own_ticks)
                watched.own_ticks = stat.own_ticks
                reaped_ticks, watched.reaped_ticks = stat.reaped_ticks - watched.reaped_ticks, stat.reaped_ticks
                self._rss_pages += stat.rss_pages - watched.rss_pages
                self._threads += stat.threads - watched.threads
                watched.rss_pages, watched.threads = stat.rss_pages, stat.threads
            read_bytes = write_bytes = 0
            try:
                text = watched.read_io() if watched.io_fd < 0 else pread(watched.io_fd, IO_BYTES, 0)
            except OSError:
                text = b""  # denied, or no free descriptor
            if text != watched.io_text and text:
                watched.io_text = text
                read, write = parse_process_io(text)
                read_bytes, watched.read_bytes = read - watched.read_bytes, read
                write_bytes, watched.write_bytes = write - watched.write_bytes, write
                self._has_io = True
            if reaped_ticks or read_bytes or write_bytes:
                growth[watched.pid] = [max(0, reaped_ticks), max(0, read_bytes), max(0, write_bytes)]
        self._add_growth(growth, ended)
        return ProcessTreeSample(
            state=worker.state,
            cpu_s=self._ticks / CLOCK_TICKS,
            rss_bytes=self._rss_pages * PAGE_SIZE,
            threads=self._threads,
            children=len(self._processes) - 1,
            io_read_bytes=self._read_bytes if self._has_io else None,
            io_write_bytes=self._write_bytes if self._has_io else None,
        )

    def _add_growth(self, growth: Mapping[int, list[int]], ended: Iterable[_OpenProcess]) -> None:
        """Add reaped CPU time and IO growth, less what was counted before.

        When a process is gone, the kernel credits its parent with all its use, once the parent waits for it. So what
        was counted already becomes a claim on the parent. If the parent was read just before it waited, the credit
        appears in the next read, so a claim lasts for one more.
        """
        before, self._claims = self._claims, {}
        gone = {watched.pid: watched for watched in ended}
        for watched in gone.values():
            del self._processes[watched.pid]
            self._rss_pages -= watched.rss_pages
            self._threads -= watched.threads
            watched.close()
        for watched in gone.values():
            heir = watched.parent
            while heir in gone:
                heir = gone[heir].parent
            if heir in self._processes:
                claim = self._claims.setdefault(heir, [0, 0, 0])
                claim[0] += watched.own_ticks + watched.reaped_ticks
                claim[1] += watched.read_bytes
                claim[2] += watched.write_bytes
        for claims in (before, self._claims):
            for pid in claims.keys() & growth.keys():
                grown, claim = growth[pid], claims[pid]
                for at in range(3):
                    paid = min(grown[at], claim[at])
                    grown[at] -= paid
                    claim[at] -= paid
        for reaped_ticks, read_bytes, write_bytes in growth.values():
            self._ticks += reaped_ticks
            self._read_bytes += read_bytes
            self._write_bytes += write_bytes

    def _find_descendants(self, min_read_time: float | None) -> None:
        """Find new descendants of the worker; a reparented orphan stays watched until its end.

        With ``min_read_time``, also search children of all descendants, as of that time (monotonic) or later.
        """
        pending = self._new_children()
        children: Mapping[int, list[int]] = {}
        if min_read_time is not None:
            children = _children_of_all(self._proc).children(min_read_time)
            for pid in self._processes:
                pending.extend(children.get(pid, ()))
        while pending:
            pid = pending.pop()
            if pid in self._processes:
                continue
            try:
                watched = _OpenProcess(pid, self._proc)
            except OSError:
                continue  # it has ended, or no free descriptor
            if watched.parent not in self._processes:
                watched.close()  # an orphan whose parent's pid was reused
                continue
            self._processes[pid] = watched
            pending.extend(read_children(pid, self._proc, every_thread=False))
            pending.extend(children.get(pid, ()))

    def _new_children(self) -> list[int]:
        """Children of the worker's first thread; empty if unchanged."""
        if self._children_fd < 0:
            return read_children(self.pid, self._proc, every_thread=False)
        text = b""
        try:
            while chunk := os.pread(self._children_fd, 65536, len(text)):
                text += chunk
        except OSError:
            return []
        if text == self._children_text:
            return []
        self._children_text = text
        return [int(word) for word in text.split()]

    def survivors(self) -> tuple[int, ...]:
        """Live descendants, mainly for after the worker's end."""
        if self._processes:
            self._find_descendants(time.monotonic())
        living = []
        for watched in islice(self._processes.values(), 1, None):
            try:
                stat = watched.with_live_thread(parse_process_stat(watched.read_stat()))
            except OSError:
                continue
            if stat.state not in ENDED_STATES:
                living.append(watched.pid)
        return tuple(living)

    def follow(self, pid: int) -> bool:
        """Make a descendant the worker once the worker has ended; False if the descendant has ended, too.

        What was counted stays. Only descendants of the new worker stay watched.
        """
        worker = self._processes.get(pid)
        if worker is None or not worker.exists():
            return False
        kept = {pid: worker}
        for watched in self._processes.values():
            if watched.parent in kept:
                kept[watched.pid] = watched
        for watched in self._processes.values():
            if watched.pid not in kept:
                self._rss_pages -= watched.rss_pages
                self._threads -= watched.threads
                watched.close()
        self._processes = kept
        self.pid, self.start_ticks = pid, worker.start_ticks
        if self._children_fd >= 0:
            os.close(self._children_fd)
        self._children_fd, self._children_text = _open_to_keep(f"{self._proc}/{pid}/task/{pid}/children"), b""
        return True

    def read_details(self) -> ProcessDetails:
        """Read the costlier facts; takes milliseconds, so call it less often."""
        processes = list(islice(self._processes.values(), MOST_PROCESSES))
        open_files: int | None = None
        paths: list[str] = []
        devices: set[str] = set()
        links = MOST_LINKS
        for watched in processes:
            count, targets = _read_open_files(watched.folder, links // 2 if watched.pid == self.pid else links)
            switches = _read_switches(watched.folder)
            if not watched.exists():
                continue  # the values may be those of another process
            if count is not None:
                open_files = (open_files or 0) + count
                links -= len(targets)
                devices.update(target for target in targets if target.startswith("/dev/nvidia"))
                if watched.pid == self.pid:
                    paths = [target for target in targets if _is_data_file(target)]
            if switches is not None:
                grown = [max(0, now - last) for now, last in zip(switches, watched.switches, strict=True)]
                voluntary, involuntary = self._switches or (0, 0)
                self._switches = voluntary + grown[0], involuntary + grown[1]
                watched.switches = switches
        voluntary_switches, involuntary_switches = self._switches or (None, None)
        return ProcessDetails(
            pss_bytes=self._read_pss(processes),
            open_files=open_files,
            voluntary_switches=voluntary_switches,
            involuntary_switches=involuntary_switches,
            paths=tuple(dict.fromkeys(paths))[:MOST_PATHS],
            devices=tuple(sorted(devices)),
        )

    def _read_pss(self, processes: Iterable[_OpenProcess]) -> int | None:
        """Sum the PSS of these processes, or return the last value: the kernel walks all pages, so large workers must
        rest. After an abandoned sum it is None until their memory has halved.
        """
        pss_bytes, due = self._pss
        if time.monotonic() < due or self._rss_pages * 2 > self._costly_rss_pages > 0:
            return pss_bytes
        self._costly_rss_pages = 0
        start = time.thread_time()
        pss_bytes = None
        for watched in processes:
            size = _read_pss_bytes(watched.folder)
            if size is not None and watched.exists():
                pss_bytes = (pss_bytes or 0) + size
            if time.thread_time() - start > MOST_PSS_S:
                pss_bytes = None  # a partial sum is useless, and ends of workers are watched on this thread too
                self._costly_rss_pages = self._rss_pages
                break
        self._pss = pss_bytes, time.monotonic() + PSS_REST_FACTOR * (time.thread_time() - start)
        return pss_bytes


def _read_open_files(folder: str, most: int) -> tuple[int | None, list[str]]:
    """Number of open files (None if denied), and targets of the first ones."""
    targets = []
    try:
        count = os.stat(f"{folder}/fd").st_size  # number of entries since Linux 6.2
        with os.scandir(f"{folder}/fd") as entries:
            names = [entry.name for entry in (islice(entries, most) if count else entries)]
    except OSError:
        return None, []
    for name in names[:most]:
        try:
            targets.append(os.readlink(f"{folder}/fd/{name}"))
        except OSError:
            continue  # closed meanwhile
    return count or len(names), targets


def _is_data_file(target: str) -> bool:
    """Whether a descriptor's target looks like a regular data file."""
    return (
        target.startswith("/")
        and not target.startswith(("/dev/", "/proc/", "/sys/", "/memfd:"))
        and not target.endswith(" (deleted)")
    )


def _read_numbers(path: str, size: int, *names: bytes) -> list[int] | None:
    """Values of the lines ``Name: value`` in a ``/proc`` file; None unless all are present."""
    try:
        text = b"\n" + read_proc_file(path, size)
    except OSError:
        return None
    found: list[int] = []
    for name in names:  # each searched alone: to split all of the 60 lines takes four times as long
        _, _, rest = text.partition(b"\n%b:" % name)
        if not rest:
            return None
        found.append(int(rest.split(None, 1)[0]))
    return found


def _read_switches(folder: str) -> tuple[int, int] | None:
    found = _read_numbers(f"{folder}/status", 8192, b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")
    return None if found is None else (found[0], found[1])


def _read_pss_bytes(folder: str) -> int | None:
    found = _read_numbers(f"{folder}/smaps_rollup", 4096, b"Pss")
    return None if found is None else found[0] * 1024
