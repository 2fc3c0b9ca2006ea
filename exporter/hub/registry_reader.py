"""Jobs that gpujob launched, from the entries that it leaves for each, and the scrape targets of those that run."""

import json
import logging
import math
import os
import pwd
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.budget import Budget
from exporter.contract.identity import safe_label
from exporter.contract.process_identity import read_start_ticks
from exporter.contract.records import JsonValue, Record, to_json
from exporter.contract.target_files import (
    ENGINE_JOB,
    MOST_TARGETS,
    SCRAPE_JOB,
    TargetGroup,
    parse_targets,
    read_target_file,
    remove_site_targets,
)
from exporter.hub.jobs import Outcome
from exporter.hub.mount_reader import MountReader, Read
from exporter.hub.runs.reports import Run
from exporter.hub.runs.stale_runs import GONE_AFTER_S
from exporter.machine.mounts import MountPoint, mount_table
from exporter.machine.threads import name_thread

READ_EACH_S = 5.0  # so that the end of a run is known in seconds
QUIET_EACH_S = 60.0  # for the directories of runs that have ended, and of those that nobody follows
YOUNG_S = 600.0  # since its submission, while a run is read as often as one that has not ended
FRESH_S = 2.0  # a directory that changed so recently may change again without another time
MOST_BYTES = 16 * 1024  # of an entry
MOST_REPORT_BYTES = 32 * 1024 * 1024  # that of 1,000 workers has some megabytes
MOST_REPORT_VALUES = 1_000_000  # each may take 100 bytes of memory; that of 10,000 workers has half as many
MOST_NODES = 10_000  # of a job without Slurm, whose statuses are looked at
KINDS = {"sidecar": SCRAPE_JOB, "engine": ENGINE_JOB}

log = logging.getLogger("gpujob.hub")


class Entry(Record):
    """What a hub needs of the entry of a job."""

    job_id: str
    run_dir: str
    submitted: float
    job_name: str = ""
    budget: Budget | None = None
    notify: str = ""
    slurm_cluster: str | None = None  # None if it is not known, or without Slurm


class _Process(Record):
    """What a hub needs of ``orchestrator.json``."""

    pid: int = 0
    start_ticks: int | None = None
    host: str = ""

    def has_ended(self) -> bool:
        """Whether it ran on this machine, and is gone."""
        ticks = read_start_ticks(self.pid)
        return self.host == socket.gethostname() and (ticks is None or self.start_ticks not in (None, ticks))


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
        entries = {name: entry for name, entry in self.entries.items() if name in names}
        for name in sorted(names - entries.keys()):
            try:
                owner, entry = _read_entry(self.path / name)
            except (OSError, ValueError, RecursionError):
                continue  # of a version that we do not know, or just replaced
            entries[name] = (owner, entry) if owner == self._own_uid or not self._only_own else None
        self.entries, self.problem = entries, None
        self._mtime_ns = mtime_ns if time.time() - mtime_ns / 1e9 > FRESH_S else 0


class _RunDir:
    """What a hub reads of one run: its report and its targets, if they belong to its user."""

    def __init__(self, uid: int, entry: Entry, own_uid: int) -> None:
        self.uid, self.entry, self._own_uid = uid, entry, own_uid
        self.path = entry.run_dir  # without the link of an array task, once it was read
        self.user = _user_name(uid)
        self.job_ids: tuple[str, ...] = (entry.job_id,)
        self.groups: tuple[TargetGroup, ...] = ()
        self.groups_at = 0.0  # when they were written
        self.removed_at = 0.0  # those that were removed from the target directory
        self.gone_since: float | None = None  # of a job without Slurm: when its processes were first gone
        self.outcome: Outcome | None = None
        self.problem: str | None = None
        self.read_at = -math.inf
        self._mtime_ns = 0

    @property
    def run(self) -> Run:
        entry, is_monitored = self.entry, any(each.labels.get("job") == SCRAPE_JOB for each in self.groups)
        known = (entry.job_id, self.user, self.path, entry.submitted)
        return Run(*known, is_monitored, self.outcome, entry.job_name, entry.budget, entry.notify, self.job_ids)

    @property
    def is_found(self) -> bool:
        """Whether its directory is known: that of a point only once its link was read."""
        return "_" not in self.entry.job_id or self.path != self.entry.run_dir

    @property
    def is_young(self) -> bool:
        """Whether it was submitted a while ago: its job may run before Slurm's queue is read again."""
        return time.time() - self.entry.submitted < YOUNG_S

    def read(self) -> None:
        """Read the files again if the directory has changed."""
        self.problem = None
        try:
            mtime_ns = os.stat(self.entry.run_dir).st_mtime_ns
        except OSError:
            self.groups = ()  # it was removed, or shows itself to nobody; what is known of the end stays
            return
        if self.groups and not self._is_of_slurm:
            self.gone_since = (self.gone_since or time.time()) if self._is_gone() else None
        if mtime_ns == self._mtime_ns:
            return
        self.path = _without_link(self.entry.run_dir)
        self.groups = self._read_groups()
        self.outcome = self._read_outcome() or self.outcome
        self._mtime_ns = mtime_ns if time.time() - mtime_ns / 1e9 > FRESH_S and self.problem is None else 0

    @property
    def _is_of_slurm(self) -> bool:
        return self.entry.job_id[:1].isdigit()

    def _is_gone(self) -> bool:
        """Whether the process that leads a job without Slurm has ended, and no sidecar writes any more."""
        try:
            uid, text = _read_text(Path(self.entry.run_dir, run_files.ORCHESTRATOR_FILE), MOST_BYTES)
            process = _Process.from_json(json.loads(text)) if uid == self.uid else None
            with os.scandir(Path(self.entry.run_dir, run_files.STATUS_DIR)) as statuses:
                written = max((each.stat().st_mtime for each in islice(statuses, MOST_NODES)), default=0.0)
        except (OSError, ValueError, RecursionError):
            return False
        return process is not None and process.has_ended() and time.time() - written > GONE_AFTER_S

    def is_stale(self, written_before: float | None) -> bool:
        """Whether nobody serves its targets: the job is gone, and could not remove them.

        ``written_before`` is from Slurm: targets that were written earlier are of a job or attempt that has ended.
        """
        if written_before is not None and self.groups_at < written_before:
            return True
        return self.gone_since is not None and time.time() - self.gone_since > GONE_AFTER_S

    def remove_site_targets(self, target_dir: Path, end: float) -> None:
        """Remove the file of this job from the target directory."""
        try:
            remove_site_targets(target_dir, self.groups, self.uid, end)
        except OSError as error:
            log.warning("%s: targets of a job that has ended cannot be removed: %s", target_dir, error.strerror)
        self.removed_at = self.groups_at

    def _read_groups(self) -> tuple[TargetGroup, ...]:
        path = Path(self.entry.run_dir, run_files.TARGETS_FILE)
        try:
            self.groups_at = path.stat().st_mtime
            uid, text = read_target_file(path)
            if uid != self.uid:
                return ()
            found = parse_targets(text, with_path=uid == self._own_uid)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return ()  # it has no sidecars now, or shows its directory to nobody
        except (OSError, ValueError, RecursionError) as error:
            self.problem = f"{path}: {getattr(error, 'strerror', None) or error}; not used"
            return ()
        if uid == self._own_uid:
            return tuple(found)
        label = safe_label(self.user)
        return tuple(each._replace(labels={**each.labels, "user": label}) for each in found)

    def _read_outcome(self) -> Outcome | None:
        try:
            uid, text = _read_text(Path(self.entry.run_dir, run_files.REPORT_FILE), MOST_REPORT_BYTES)
            return parse_outcome(text, self.entry.job_id) if uid == self.uid else None
        except (OSError, ValueError, RecursionError):
            return None  # none yet, or of a version that we do not know


def _ids_by_run_dir(entries: Iterable[tuple[int, Entry]]) -> dict[str, tuple[str, ...]]:
    """Ids of the jobs of each run directory: a sweep has several arrays."""
    found: dict[str, list[str]] = {}
    for _, entry in entries:
        found.setdefault(entry.run_dir, []).append(entry.job_id)
    return {path: tuple(sorted(job_ids)) for path, job_ids in found.items()}


def _without_link(path: str) -> str:
    """The run directory of a point, which the directory of its sweep links from the id of its array task."""
    try:
        return str(Path(path).parent.with_name(Path(os.readlink(path)).name))
    except (OSError, ValueError):
        return path  # of a job


def read_run(uid: int, entry: Entry) -> Run:
    """A run with its outcome, read once."""
    found = _RunDir(uid, entry, uid)
    found.read()
    return found.run


def parse_outcome(text: str, job_id: str) -> Outcome | None:
    """What ``report.json`` says of an attempt that has ended for good. Raises ValueError."""
    if text.count(",") > MOST_REPORT_VALUES:
        raise ValueError(f"has more than {MOST_REPORT_VALUES} values")
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("requeued") or body.get("job_id") != job_id:
        return None
    gpus = body.get("gpus")
    wanted = {**body, **(gpus if isinstance(gpus, dict) else {})}
    return Outcome.from_json({name: wanted[name] for name in Outcome.FIELDS if name in wanted}, "report")


def _read_entry(path: Path) -> tuple[int, Entry]:
    """The owner of a file, and its entry. Raises OSError and ValueError."""
    uid, text = _read_text(path, MOST_BYTES)
    return uid, Entry.from_json(json.loads(text))


def _read_text(path: Path, most_bytes: int) -> tuple[int, str]:
    """The owner and the text of a regular file. Raises OSError and ValueError."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, encoding="utf-8", errors="surrogateescape") as lines:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise ValueError("not a file of this kind")
        return status.st_uid, lines.read()


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
        self._run_dirs: dict[str, _RunDir] = {}
        self._mounts = MountReader(mounts or mount_table().current)
        self._known_problems, self._target_dir = frozenset[str](), target_dir
        self.live: Callable[[], Collection[str]] = tuple  # run directories of jobs that have not ended
        # of jobs that have: the run directory, and before when its targets were written if they are of no use
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
                self._run_dirs[path] = _RunDir(uid, entry, self._own_uid)
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
