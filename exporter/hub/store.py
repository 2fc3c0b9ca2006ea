"""The hub's memory on disk: one SQLite file with jobs, changes and counters.

One process writes and reads it, which a lock beside it ensures. Nobody else may open it meanwhile: with
``locking_mode=EXCLUSIVE`` SQLite needs no shared memory, so that the file can lie on NFS.
"""

import json
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from exporter.contract.records import JsonValue, RecordError, from_json, to_json
from exporter.hub import costs
from exporter.hub.counters import CounterKey
from exporter.hub.jobs import Job
from exporter.hub.polling import end_of

VERSION = 2
GROUPS = ("user", "account", "partition", "name")  # by which sums are made
BUSY_S = 2.0  # wait for a lock that somebody else has on the file
JOBS_KEPT_S = 400 * 86400.0
CHANGES_KEPT_S = 90 * 86400.0
PRUNED_EACH_S = 86400.0
MOST_UNSAVED = 100_000  # changes that wait for a disk that is full; the oldest make room
MOST_UNSAVED_JOBS = 20_000  # the same of jobs that have ended, and of removed ones: each try writes all of them
MOST_IDS = 500  # in one query; SQLite allows 999 values
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TEXTS, _NUMBERS = ("account", "partition", "name", "currency"), ("gpu_s", "idle_s", "gpu_j", "node_j", "cost")
_SUMMED = (*_TEXTS, *_NUMBERS)
# columns of jobs, so that sums read no bodies; what a job used is known at its end
_FIGURES = {**dict.fromkeys((*_TEXTS, "run_dir"), "TEXT"), **dict.fromkeys(("ended", *_NUMBERS), "REAL")}
_FIGURES_SQL = (
    *(f"ALTER TABLE jobs ADD COLUMN {name} {kind}" for name, kind in _FIGURES.items()),
    f"CREATE INDEX jobs_ended ON jobs (ended, user, {', '.join(_SUMMED)}) WHERE ended IS NOT NULL",
    "CREATE INDEX jobs_of_user ON jobs (user, seen)",
)
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (job_id TEXT, submitted REAL, user TEXT, state TEXT, seen REAL, is_kept INTEGER, body TEXT,
  PRIMARY KEY (job_id, submitted));
CREATE INDEX jobs_by_time ON jobs (seen);
CREATE INDEX jobs_kept ON jobs (is_kept) WHERE is_kept;
CREATE TABLE changes (number INTEGER PRIMARY KEY, time REAL, user TEXT, body TEXT);
CREATE INDEX changes_by_time ON changes (time);
CREATE TABLE counters (name TEXT, user TEXT, partition TEXT, state TEXT, value REAL,
  PRIMARY KEY (name, user, partition, state));
"""

log = logging.getLogger("gpujob.hub")


class PublishedChange(NamedTuple):
    """A published change with its number."""

    number: int
    time: float  # of the change
    user: str
    body: Mapping[str, JsonValue]


class Batch(NamedTuple):
    """Changes from one answer of Slurm, saved in one transaction."""

    now: float
    jobs: Sequence[Job] = ()
    kept: frozenset[tuple[str, float]] = frozenset()  # those of the jobs that a restarted hub needs at once
    removed: Sequence[Job] = ()
    changes: Sequence[PublishedChange] = ()
    counters: Mapping[CounterKey, float] = {}
    meta: Mapping[str, str] = {}
    is_history: bool = False  # whether its jobs ended long ago, and are found only now


class StoreFacts(NamedTuple):
    """What is in the file."""

    bytes: int | None
    jobs: int
    runs: int  # of these jobs: launched by gpujob
    changes: int
    oldest: float | None  # end of the first job


class Sums(NamedTuple):
    """Sums over ended jobs. None where nothing is known."""

    name: str  # of the group
    currency: str | None
    jobs: int
    gpu_s: float | None
    idle_s: float | None
    gpu_j: float | None
    node_j: float | None
    cost: float | None


class Saved(NamedTuple):
    """What an earlier hub left."""

    jobs: Sequence[Job] = ()
    counters: Mapping[CounterKey, float] = {}
    meta: Mapping[str, str] = {}
    last_number: int = 0


def name_of(job: Job) -> tuple[str, float]:
    """Identity of a job: its id and its first submission time."""
    return job.key, job.first_submitted or 0.0


class Store:
    """The file. After a failed write everything unsaved stays in memory, and is written by the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None  # why nothing is saved at present
        self._lock = threading.Lock()
        self._pruned_at = 0.0
        self._jobs: dict[tuple[str, float], tuple[Job, bool, float]] = {}  # unsaved, as are the following
        self._removed: dict[tuple[str, float], None] = {}
        self._changes: deque[PublishedChange] = deque(maxlen=MOST_UNSAVED)
        self._counters: dict[CounterKey, float] = {}
        self._meta: dict[str, str] = {}
        self._file: sqlite3.Connection | None = None
        self.saved = Saved()
        try:
            self._file, self.saved = self._open()
        except (sqlite3.Error, OSError) as error:
            self._note(f"{path} cannot be used: {_reason(error)}; nothing outlives this process")
        self.last_size_bytes = self.size_bytes()  # after the last save: its file system may hang now

    def _open(self) -> tuple[sqlite3.Connection, Saved]:
        """Open the file, and put it aside first if it cannot be read."""
        file = None
        try:
            file = self._connect()
            saved = _read(file)
        except (sqlite3.DatabaseError, RecordError, ValueError) as error:
            if file is not None:
                file.close()
            if isinstance(error, sqlite3.Error) and _code(error) not in _DAMAGED:
                raise
            self._put_aside(error)
            file = self._connect()
            saved = _read(file)
        return file, saved

    def _connect(self) -> sqlite3.Connection:
        file = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            file.execute("PRAGMA locking_mode = EXCLUSIVE")
            version = file.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise RecordError(f"it is of version {version}, and this gpujob reads up to {VERSION}")
            file.execute("PRAGMA journal_mode = WAL")
            if not version:
                file.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = 1; COMMIT;")
            if version < VERSION:
                _add_figures(file)
        except BaseException:
            file.close()
            raise
        os.chmod(self.path, 0o600)
        return file

    def _put_aside(self, error: Exception) -> None:
        """Rename a file that is damaged or of a newer version, so that a person can look at it."""
        mark = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(f"{self.path}{suffix}"):
                os.replace(f"{self.path}{suffix}", f"{self.path}.{mark}{suffix}")
        log.warning("%s is put aside as %s.%s, and a new one begins: %s", self.path, self.path.name, mark, error)

    def save(self, batch: Batch) -> None:
        """Write a batch and everything that earlier writes could not; never raises."""
        with self._lock:
            for job in batch.removed:
                self._jobs.pop(name_of(job), None)
                self._removed[name_of(job)] = None
            for job in batch.jobs:
                self._removed.pop(name_of(job), None)
                seen = end_of(job.tracked) if batch.is_history else batch.now
                self._jobs[name_of(job)] = job, name_of(job) in batch.kept, seen
            self._changes.extend(batch.changes)
            self._counters |= batch.counters
            self._meta |= batch.meta
            if self._file is None:
                self._forget_unsaved()
                return
            try:
                self._write(self._file, batch.now)
            except (
                sqlite3.Error,
                OverflowError,
                ValueError,
            ) as error:  # the latter: of a value that SQLite cannot keep
                self._note(f"{self.path} cannot be written: {_reason(error)}; the hub continues in memory")
                self._limit_unsaved()
                if _code(error) in _DAMAGED:
                    self._replace_damaged(error)
            else:
                self._note(None)
                self._forget_unsaved()
            self.last_size_bytes = self.size_bytes()

    def _write(self, file: sqlite3.Connection, now: float) -> None:
        file.execute("BEGIN IMMEDIATE")
        try:
            file.executemany("DELETE FROM jobs WHERE job_id = ? AND submitted = ?", self._removed)
            rows = (
                (*name, job.user, job.tracked.state, seen, kept, _text(to_json(job)), *_figures(job))
                for name, (job, kept, seen) in self._jobs.items()
            )
            marks = ", ".join("?" * (7 + len(_FIGURES)))
            file.executemany(f"INSERT OR REPLACE INTO jobs VALUES ({marks})", rows)  # noqa: S608 - marks
            changes = ((each.number, each.time, each.user, _text(each.body)) for each in self._changes)
            file.executemany("INSERT OR REPLACE INTO changes VALUES (?, ?, ?, ?)", changes)
            counters = ((*key, value) for key, value in self._counters.items())
            file.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?, ?, ?, ?)", counters)
            file.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", self._meta.items())
            if now - self._pruned_at >= PRUNED_EACH_S:
                file.execute("DELETE FROM jobs WHERE seen < ? AND NOT is_kept", (now - JOBS_KEPT_S,))
                file.execute("DELETE FROM changes WHERE time < ?", (now - CHANGES_KEPT_S,))
                self._pruned_at = now
            file.execute("COMMIT")
        except BaseException:
            if file.in_transaction:
                file.execute("ROLLBACK")
            raise

    def _forget_unsaved(self) -> None:
        for waiting in (self._jobs, self._removed, self._changes, self._counters, self._meta):
            waiting.clear()

    def _limit_unsaved(self) -> None:
        """Forget the oldest jobs that need not outlive this process."""
        settled = [name for name, (_, is_kept, _) in self._jobs.items() if not is_kept]
        for name in settled[: max(0, len(settled) - MOST_UNSAVED_JOBS)]:
            del self._jobs[name]
        for name in list(self._removed)[: max(0, len(self._removed) - MOST_UNSAVED_JOBS)]:
            del self._removed[name]

    def _replace_damaged(self, error: Exception) -> None:
        """Replace a file that was damaged while open; unsaved rows go into the new one."""
        if self._file is not None:
            self._file.close()
        try:
            self._put_aside(error)
            self._file = self._connect()
        except (sqlite3.Error, OSError):
            self._file = None

    def _note(self, problem: str | None) -> None:
        if problem is not None and self.problem is None:
            log.error("%s", problem)
        elif problem is None and self.problem is not None:
            log.warning("%s is written again", self.path)
        self.problem = problem

    def jobs_by_id(self, job_ids: Iterable[str]) -> list[Job]:
        """The latest job of each of these ids."""
        wanted, found = list(dict.fromkeys(job_ids)), list[Job]()
        for first in range(0, len(wanted), MOST_IDS):
            ids = wanted[first : first + MOST_IDS]
            marks = ",".join("?" * len(ids))
            sql = f"SELECT body, MAX(submitted) FROM jobs WHERE job_id IN ({marks}) GROUP BY job_id"  # noqa: S608 - marks
            found += _jobs(self._query(sql, ids))
        return found

    def tasks_of(self, array_ids: Iterable[str], user: str) -> list[Job]:
        """The tasks of arrays."""
        sql = "SELECT body FROM jobs WHERE job_id >= ? AND job_id < ? AND user = ?"
        found = [self._query(sql, (f"{job_id}_", f"{job_id}`", user)) for job_id in array_ids]  # ` comes after _
        return _jobs(row for rows in found for row in rows)

    def jobs_since(self, since: float, user: str | None, state: str | None, most: int) -> list[Job]:
        """Jobs about which something was learned since then, the newest first."""
        return _jobs(self.bodies_since(since, user, state, most))

    def bodies_since(self, since: float, user: str | None, state: str | None, most: int) -> list[Any]:
        """The same as JSON."""
        wanted = {"user": user, "state": state}
        known = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(("seen >= ?", *(f"{name} = ?" for name in known)))  # as SQLite finds an index for it
        sql = f"SELECT body FROM jobs WHERE {where} ORDER BY seen DESC, job_id DESC LIMIT ?"  # noqa: S608 - names
        return self._query(sql, (since, *known.values(), most))

    def sums_since(self, since: float, by: str, user: str | None) -> list[Sums]:
        """Sums over the jobs that ended since then, by a column of the jobs and by currency."""
        if by not in GROUPS:
            raise ValueError(f"{by} is no group")
        sql = (
            f"SELECT {by}, currency, COUNT(*), SUM(gpu_s), SUM(idle_s), SUM(gpu_j), SUM(node_j), SUM(cost) "  # noqa: S608
            "FROM jobs WHERE ended >= ?1 AND (?2 IS NULL OR user = ?2) GROUP BY 1, 2"
        )
        return [Sums(*row) for row in self._query(sql, (since, user))]

    def facts(self) -> StoreFacts:
        """What is in the file."""
        sql = "SELECT COUNT(*), COUNT(run_dir), (SELECT COUNT(*) FROM changes), MIN(ended) FROM jobs"
        rows = self._query(sql, ())
        return StoreFacts(self.size_bytes(), *(rows[0] if rows else (0, 0, 0, None)))

    def changes_after(self, number: int, most: int) -> list[PublishedChange]:
        """Changes with higher numbers, oldest first."""
        sql = "SELECT number, time, user, body FROM changes WHERE number > ? ORDER BY number LIMIT ?"
        rows = self._query(sql, (number, most))
        return [PublishedChange(each, moment, user, json.loads(body)) for each, moment, user, body in rows]

    def _query(self, sql: str, values: Sequence[str | float | None]) -> list[Any]:
        with self._lock:
            try:
                return [] if self._file is None else self._file.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                self._note(f"{self.path} cannot be read: {_reason(error)}")
                return []

    def size_bytes(self) -> int | None:
        try:
            sizes = [os.stat(f"{self.path}{suffix}").st_size for suffix in ("", "-wal")]
        except OSError:
            return None
        return sum(sizes)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


def _read(file: sqlite3.Connection) -> Saved:
    """Read what a hub needs at its start."""
    jobs = _jobs(file.execute("SELECT body FROM jobs WHERE is_kept"))
    # a NaN that an earlier version has saved is NULL
    rows = file.execute("SELECT * FROM counters WHERE value IS NOT NULL")
    counters = {CounterKey(*key): float(value) for *key, value in rows}
    meta = dict(file.execute("SELECT * FROM meta").fetchall())
    (last,) = file.execute("SELECT MAX(number) FROM changes").fetchone()
    return Saved(jobs, counters, meta, max(last or 0, int(meta.get("last_number", 0))))


def _add_figures(file: sqlite3.Connection) -> None:
    """Bring a file of version 1 to this version."""
    file.execute("BEGIN")
    for sql in _FIGURES_SQL:
        file.execute(sql)
    names = ", ".join(f"{name} = ?" for name in _FIGURES)
    for job_id, submitted, body in file.execute("SELECT job_id, submitted, body FROM jobs").fetchall():
        for job in _jobs([(body,)]):
            values = (*_figures(job), job_id, submitted)
            file.execute(f"UPDATE jobs SET {names} WHERE job_id = ? AND submitted = ?", values)  # noqa: S608
    file.execute(f"PRAGMA user_version = {VERSION}")
    file.execute("COMMIT")


def _figures(job: Job) -> tuple[str | float | None, ...]:
    """The values of the columns in ``_FIGURES``. SQLite keeps no text that is not valid UTF-8."""
    texts = [text.encode("utf-8", "replace").decode() for text in (job.account, job.first_partition, job.tracked.name)]
    currency, run_dir = None if job.price is None else job.price.currency, job.tracked.run_dir
    path = None if run_dir is None else run_dir.encode("utf-8", "replace").decode()
    if not job.tracked.is_over:
        return (*texts, currency, path, *(None,) * (1 + len(_NUMBERS)))
    known = costs.energies(job)
    numbers = (
        *(end_of(job.tracked), costs.gpu_seconds(job, 0.0), costs.idle_s(job)),
        *(known.get(costs.BOARDS), known.get(costs.NODES), costs.cost(job, 0.0)),
    )
    # those of a report may be whole, and SQLite keeps whole numbers of 64 bits only
    return *texts, currency, path, *(None if number is None else float(number) for number in numbers)


def _jobs(rows: Iterable[Sequence[Any]]) -> list[Job]:
    """The jobs of rows that begin with a body, without those that cannot be read: an earlier version has saved NaN."""
    found = []
    for body, *_ in rows:
        try:
            found.append(from_json(Job, json.loads(str(body)), "job"))
        except ValueError as error:  # also a RecordError
            _warn_unreadable(str(error))
    return found


@cache  # once, not at each read
def _warn_unreadable(reason: str) -> None:
    log.warning("A job of an earlier hub cannot be read, and is left out: %s", reason)


def _text(value: JsonValue | Mapping[str, JsonValue]) -> str:
    return json.dumps(value, ensure_ascii=True)  # escaped, since a name may not be valid UTF-8


def _code(error: Exception) -> int | None:
    return getattr(error, "sqlite_errorcode", None)  # errors of the module itself have none


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
