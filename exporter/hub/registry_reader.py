"""Jobs that gpujob launched, from the entries that it leaves for each, and the scrape targets of those that run."""

import heapq
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.records import JsonValue, to_json
from exporter.contract.target_files import ENGINE_JOB, MOST_TARGETS, SCRAPE_JOB, TargetGroup
from exporter.hub.mount_reader import MountReader, Read
from exporter.hub.runs.reports import Run
from exporter.hub.runs.run_directory_reader import FRESH_S, MOST_BYTES, Entry, RunDirectory, read_text
from exporter.machine.mounts import MountPoint, mount_table
from exporter.machine.own_process import name_thread

READ_EACH_S = 5.0  # so that the end of a run is known in seconds
QUIET_EACH_S = 60.0  # for the directories of runs that have ended, and of those that nobody follows
MOST_IDLE_READS = 1000  # run directories at one question, each some milliseconds; those read longest ago come first
READ_S = 0.5  # for new entries of a folder at one read: others follow at the next ones, as a folder may have very many
MOST_FILES = 100_000  # of one folder, highest job ids first
MOST_OF_OWNER = 1000  # entries; a launch keeps at most 700
KINDS = {"sidecar": SCRAPE_JOB, "engine": ENGINE_JOB}

log = logging.getLogger("gpujob.hub")


class Registry(NamedTuple):
    """What was read last."""

    runs: tuple[Run, ...]
    groups: tuple[TargetGroup, ...]
    problems: tuple[str, ...] = ()
    hanging: frozenset[str] = frozenset()  # mounts


class _Folder:
    """The entries of one folder. Each is read once, since its name has a digest of the run directory."""

    def __init__(self, path: Path, own_uid: int, *, only_own: bool) -> None:
        self.path = path
        self.entries: dict[str, tuple[int, Entry] | None] = {}  # owner and entry by file name; None if it is none
        self.problem: str | None = None
        self._own_uid, self._only_own = own_uid, only_own
        self._unread = set[str]()  # names of files that were no entries when they were read
        self._mtime_ns = 0

    def read(self) -> None:
        """Read new entries."""
        try:
            mtime_ns = os.stat(self.path).st_mtime_ns
            if mtime_ns == self._mtime_ns:
                return
            names = {name for name in os.listdir(self.path) if name.endswith(".json") and not name.startswith(".")}
        except FileNotFoundError:
            self.entries, self.problem, self._mtime_ns = {}, None, 0  # nobody has launched a job yet
            return
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"
            return
        problem, count = None, len(names)
        if count > MOST_FILES:
            names = set(heapq.nlargest(MOST_FILES, names, key=_by_number))
            problem = f"{self.path}: of {count} entries only {MOST_FILES} are used; remove old ones"
        entries = {name: entry for name, entry in self.entries.items() if name in names}
        of_owner = Counter(entry[0] for entry in entries.values() if entry is not None)
        end, new = time.monotonic() + READ_S, sorted(names - entries.keys(), key=_by_number)
        new.sort(key=lambda name: name not in self._unread)  # those do not keep others from being read
        while new:
            name = new.pop()
            try:
                owner, entry = _read_entry(self.path / name)
            except (OSError, ValueError, RecursionError):
                self._unread.add(name)  # of a version that we do not know, or just replaced
            else:
                of_owner[owner] += 1
                is_used = of_owner[owner] <= MOST_OF_OWNER and (owner == self._own_uid or not self._only_own)
                entries[name] = (owner, entry) if is_used else None
            if time.monotonic() >= end:
                break
        self._unread &= names - entries.keys()
        self.entries, self.problem = dict(sorted(entries.items())), problem
        self._mtime_ns = mtime_ns if not new and time.time() - mtime_ns / 1e9 > FRESH_S else 0


def _by_number(name: str) -> tuple[int, str]:
    """Order of the names of entries, which begin with a job id, by the number of the job."""
    return len(name), name


def _ids_by_run_dir(entries: Iterable[tuple[int, Entry]]) -> dict[str, dict[str, float]]:
    """The jobs of each run directory, and when they were submitted: a sweep has several arrays."""
    found: dict[str, dict[str, float]] = {}
    for _, entry in entries:
        found.setdefault(entry.run_dir, {})[entry.job_id] = entry.submitted
    return found


def _read_entry(path: Path) -> tuple[int, Entry]:
    """The owner of a file, and its entry. Raises OSError and ValueError."""
    uid, text = read_text(path, MOST_BYTES)
    entry = Entry.from_json(json.loads(text))
    run_files.require_name(entry.run_dir)
    return uid, entry


class RegistryReader:
    """Reads the registry and the run directories on threads of its own: the last answer stays while a mount hangs."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        only_own: bool,
        own_uid: int | None = None,
        mounts: Callable[[], Iterable[MountPoint]] | None = None,
        target_dir: Path | None = None,
    ) -> None:
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._folders = [_Folder(path, self._own_uid, only_own=only_own) for path in folders]
        self._run_dirs: dict[str, RunDirectory] = {}
        self._mounts = MountReader(mounts or mount_table().current)
        self._idle_mounts, self._idle_lock = MountReader(mounts or mount_table().current), threading.Lock()
        self._known_problems, self._target_dir = frozenset[str](), target_dir
        self.live: Callable[[], Collection[str]] = tuple  # run directories of jobs that have not ended
        # of ended jobs: targets written before this time are stale, by run directory
        self.stale: Callable[[], Mapping[str, float]] = dict
        self.ends: Callable[[], Mapping[str, float]] = dict  # of those of ``stale`` whose job has ended
        self.tasks: Callable[[], Mapping[str, Collection[str]]] = dict  # that Slurm lists alone, by their array
        self.cluster: Callable[[], str | None] = lambda: None  # whose jobs are wanted, once it is known
        self.latest: Registry | None = None

    def start(self) -> None:
        threading.Thread(target=self._read_on, name="registry", daemon=True).start()

    def _read_on(self) -> None:
        name_thread("registry")
        while True:
            try:
                self.read()
            except Exception:
                log.exception("a fault of the hub; it reads run directories again in %g s", READ_EACH_S)
            threading.Event().wait(READ_EACH_S)

    def read(self) -> None:
        """Read what may have changed."""
        now, live = time.monotonic(), self.live()
        self._mounts.read(Read(str(folder.path), folder.read) for folder in self._folders)
        wanted = (None, self.cluster())  # a home may serve several clusters, which give the same ids
        known = [each for folder in self._folders for each in self._of(folder)]
        if wanted[1] is not None:
            known = [(uid, entry) for uid, entry in known if entry.slurm_cluster in wanted]
        known += list(self._points(known))
        entries = {entry.run_dir: (uid, entry) for uid, entry in known}
        for path, (uid, entry) in entries.items():
            if path not in self._run_dirs:
                self._run_dirs[path] = RunDirectory(uid, entry, self._own_uid)
        self._run_dirs = {path: self._run_dirs[path] for path in entries}
        for path, own in _ids_by_run_dir(known).items():
            self._run_dirs[path].job_ids = own
        due = [
            each
            for each in self._run_dirs.values()
            if now - each.read_at >= QUIET_EACH_S or each.path in live or each.groups or each.is_young
        ]
        for each in due:
            each.read_at = now
        self._mounts.read(Read(each.entry.run_dir, each.read) for each in due)
        if self._target_dir is not None:
            self._mounts.read(self._removals(self._target_dir))
        self._publish()

    def idle_s(self, attempts: Mapping[str, int]) -> dict[str, float]:
        """GPU seconds that sidecars have seen idle so far in these attempts, by run directory.

        What cannot be read in time is as it was at the previous question, or absent.
        """
        own = [each for each in tuple(self._run_dirs.values()) if each.path in attempts]
        own.sort(key=lambda each: each.idle_read_at)
        with self._idle_lock:
            reads = (Read(each.path, partial(each.read_idle, attempts[each.path])) for each in own[:MOST_IDLE_READS])
            self._idle_mounts.read(reads)
        known = {each.path: each.idle for each in own}
        return {path: idle for path, (of, idle) in known.items() if idle is not None and of == attempts[path]}

    def _removals(self, target_dir: Path) -> Iterator[Read]:
        """Removals of the files that jobs of this user left in the target directory, as their nodes were lost."""
        ends = self.ends()
        for each in self._run_dirs.values():
            end = ends.get(each.path)
            if end is not None and each.groups and each.uid == self._own_uid and each.removed_at != each.groups_at:
                yield Read(str(target_dir), partial(each.remove_site_targets, target_dir, end))

    def _points(self, known: Iterable[tuple[int, Entry]]) -> Iterator[tuple[int, Entry]]:
        """Entries of the points of sweeps whose array tasks have been seen in the queue."""
        tasks = self.tasks()
        for uid, entry in known:
            for task in tasks.get(entry.job_id, ()):
                link = f"{entry.run_dir}/{run_files.TASKS_DIR}/{task}"
                yield uid, entry.replace(job_id=task, run_dir=link, budget=None)  # which is that of the sweep

    @staticmethod
    def _of(folder: _Folder) -> list[tuple[int, Entry]]:
        return [entry for entry in folder.entries.values() if entry is not None]

    def _publish(self) -> None:
        """Publish what is known. The runs are the same object as before if they are the same."""
        runs, groups = tuple(each.run for each in self._run_dirs.values() if each.is_found), list[TargetGroup]()
        problems, counts = [folder.problem for folder in self._folders], Counter[int]()
        hanging, stale = self._mounts.hanging(), self.stale()
        problems += [f"{point} does not answer: run directories on it are not read" for point in sorted(hanging)]
        for each in self._run_dirs.values():
            problems.append(each.problem)
            if each.is_stale(stale.get(each.path)):
                continue
            counts[each.uid] += sum(len(group.targets) for group in each.groups)
            if counts[each.uid] > MOST_TARGETS:
                problems.append(f"{each.entry.run_dir}: {each.user} has more than {MOST_TARGETS} targets; not used")
                continue
            groups += each.groups
        found = tuple(dict.fromkeys(filter(None, problems)))
        for problem in found:
            if problem not in self._known_problems:
                log.warning("%s", problem)
        for point in self.hanging - hanging.keys():
            log.warning("%s answers again", point)
        self._known_problems = frozenset(found)
        before = self.runs()
        same = len(before) == len(runs) and all(old == new for old, new in zip(before, runs, strict=True))
        self.latest = Registry(before if same else runs, tuple(groups), found, frozenset(hanging))

    @property
    def hanging(self) -> frozenset[str]:
        """Mounts that do not answer."""
        return self.latest.hanging if self.latest is not None else frozenset()

    @property
    def problems(self) -> tuple[str, ...]:
        return self.latest.problems if self.latest is not None else ()

    def mounts(self) -> dict[str, bool]:
        """Mounts with run directories, and whether they answer."""
        return {point: point not in self.hanging for point in sorted(self._mounts.known())}

    def runs(self) -> tuple[Run, ...]:
        return self.latest.runs if self.latest is not None else ()

    def targets(self, kind: str) -> list[JsonValue] | None:
        """The groups of one kind; None before the first answer."""
        if self.latest is None:
            return None
        return [to_json(group) for group in self.latest.groups if group.labels["job"] == KINDS[kind]]
