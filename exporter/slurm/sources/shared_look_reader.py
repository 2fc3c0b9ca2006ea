"""One answer of Slurm for all commands of a user, in a file of the user's cache folder.

It is asked anew when it is a minute old, and for the nodes after 200 seconds: all watchers together make 2.6 RPCs a
minute.
"""

import contextlib
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from exporter.contract import run_files
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.records import NOTHING, Record, to_json
from exporter.contract.user_state import user_cache_folder
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import DEADLINE_S, SlurmReader, SlurmUnansweredError
from exporter.slurm.nodes import NodeRow
from exporter.slurm.queue import QueueRow
from exporter.slurm.sources.hub_reader import HubAnswer, hub_addresses, read_hub, read_hub_nodes
from exporter.slurm.usage import RunningUse

LOOK_S = 60.0  # age at which Slurm is asked anew; two RPCs each
NODES_LOOK_S = 200.0  # for nodes that are watched, which cost two RPCs too
HISTORY_LOOK_S = 300.0  # for ended jobs that are watched: the queue has the latest of them too
HISTORY_STEP_S = 3600.0  # those who watch since the same hour share one answer
USE_LOOK_S = 60.0  # for the use of a running job, which costs three RPCs
WATCHED_USE_S, WATCHED_USE_BESIDE_HUB_S = 200.0, 600.0  # of all such jobs that are watched, one each time
OTHERS_LOOK_S = 300.0  # for the jobs of others, while a hub has the user's own and asks Slurm itself
ALL_LATE_S = 15.0  # how late those may be whose turn it is to ask: for all jobs, or about another one
LEAST_S = 5.0  # between two questions, however many jobs have changed
HUB_READ_S = 10.0  # age at which a hub is asked anew
HUB_NODES_S = (
    900.0  # age up to which nodes of a hub are shown to a watcher: it reads them every 10 minutes, or when asked
)
HUB_LATE_S = 20.0  # how late the answer of a hub may be after its interval, with its jitter and a slow controller
RETRY_S = 0.1  # between two reads of the file while another process asks
OWNER_ONLY = 0o600  # names of jobs may be private
MOST_CONF_BYTES = 1 << 20  # of slurm.conf that is searched for the cluster's name
CONF_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
_CLUSTER_NAME = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*([\w.-]+)", re.IGNORECASE | re.MULTILINE)


class Look(Record):
    """What Slurm answered, and when."""

    SCHEMA = 1

    cluster: str
    as_of: float | None = None  # epoch seconds of the answer; None if there was never one
    tried: float  # when Slurm was last asked
    problem: str | None = None  # why it did not answer then
    source: str = "squeue"  # or slurmrestd, or the address of a hub
    hub_problem: str | None = None  # why the hub that the user has named was not asked


class QueueLook(Look):
    """An answer of squeue."""

    rows: tuple[QueueRow, ...] = ()

    @property
    def is_of_hub(self) -> bool:
        """Whether it came from a hub, which may have a newer one."""
        return self.source not in ("squeue", "slurmrestd")


class NodesLook(Look):
    """An answer of sinfo, or of a hub."""

    rows: tuple[NodeRow, ...] = ()


class UseLook(Look):
    """An answer of sstat about one job."""

    rows: tuple[RunningUse, ...] = ()


class HistoryLook(Look):
    """An answer of sacct about all jobs of a user."""

    since: float = 0.0  # attempts that ended before are not there
    rows: tuple[tuple[QueueRow, Attempt], ...] = ()


L = TypeVar("L", QueueLook, NodesLook, UseLook, HistoryLook)


def read_queue_look(
    slurm: SlurmReader,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    since: float = 0.0,
    least_s: float | None = None,
) -> QueueLook:
    """The queue of the reader's user, from a hub if one runs. Raises SlurmUnansweredError if nothing is known.

    An answer before ``since`` is of no use: then Slurm is asked anew, unless that was done within ``least_s`` (default:
    LEAST_S). Whoever has the jobs of all users read spares the others their question.
    """
    of_hub, hub_problem = _read_hub_look(slurm, environ, clock, since)
    if of_hub is not None and (of_hub.as_of or 0.0) >= since:
        return of_hub
    look = _read_own_of_all(slurm, environ, clock, since)
    if look is None:
        look = _read_look(QueueLook, _queue_name(slurm, slurm.user), slurm.queue, environ, clock, since, least_s)
    return look.replace(source=slurm.source, hub_problem=hub_problem)


def read_queue_of_all(
    slurm: SlurmReader,
    me: str,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    others_s: float = OTHERS_LOOK_S,
    user: str | None = None,
) -> QueueLook:
    """The queue of all users, as of the oldest part of it. Raises SlurmUnansweredError if nothing is known.

    If a hub has only the jobs of this user, those of others are read every ``others_s``. With ``user`` only the jobs of
    that one are returned: all who watch others share one question.
    """
    wanted = slurm if user is None else SlurmReader(user, slurm.cluster, environ)
    of_hub, hub_problem = _read_hub_look(wanted, environ, clock, 0.0)
    if of_hub is not None:
        return of_hub
    own, _ = _read_hub_look(SlurmReader(me, slurm.cluster, environ), environ, clock, 0.0)
    most_s = LOOK_S if own is None else others_s
    look = _read_look(QueueLook, _queue_name(slurm, None), slurm.queue, environ, clock, most_s=most_s)
    if own is not None and (own.as_of or 0.0) > (look.as_of or 0.0):
        look = look.replace(rows=(*own.rows, *(row for row in look.rows if row.user != me)))
    if user is not None:
        look = look.replace(rows=tuple(row for row in look.rows if row.user == user))
    return look.replace(source=slurm.source, hub_problem=hub_problem)


def _queue_name(slurm: SlurmReader, user: str | None) -> str:
    return f"{slurm.source}-{user or 'all'}-{slurm.cluster or ''}"


def _read_own_of_all(
    slurm: SlurmReader, environ: Mapping[str, str], clock: Callable[[], float], since: float
) -> QueueLook | None:
    """The jobs of the reader's user in a recent answer about all; None without one."""
    folder = _own_folder(environ) if slurm.user is not None else None
    path = None if folder is None else _path(folder, QueueLook, (_queue_name(slurm, None), cluster_name(environ)))
    try:
        if path is None or time.time() - path.stat().st_mtime >= LOOK_S + ALL_LATE_S:
            return None
    except OSError:
        return None
    known = QueueLook.read_valid(path)
    if known is None or known.problem is not None or not 0.0 <= clock() - known.tried < LOOK_S + ALL_LATE_S:
        return None
    if (known.as_of or 0.0) < since:
        return None
    return known.replace(rows=tuple(row for row in known.rows if row.user == slurm.user))


def _read_hub_look(
    slurm: SlurmReader, environ: Mapping[str, str], clock: Callable[[], float], since: float
) -> tuple[QueueLook | None, str | None]:
    """The queue as a hub knows it, None without one that fits, and the problem of a hub that the user has named.

    Commands share this answer too: a hub of 10,000 jobs works 100 ms for it.
    """
    addresses = hub_addresses(slurm, environ)
    folder = _own_folder(environ) if addresses else None
    path = (
        None
        if folder is None
        else _path(folder, QueueLook, (addresses, slurm.user, slurm.cluster, environ.get("SLURM_CLUSTERS")))
    )
    known = None if path is None else QueueLook.read_valid(path)
    age_s = math.inf if known is None or (known.as_of or 0.0) < since else clock() - known.tried
    if 0.0 <= age_s < HUB_READ_S:
        return known, None
    recent = known if 0.0 <= age_s < LOOK_S else None
    with contextlib.ExitStack() as stack:
        if path is not None:
            try:
                if (descriptor := lock_file(path.with_suffix(".lock"))) >= 0:
                    stack.callback(os.close, descriptor)
            except FileLockedError:
                if recent is not None:  # another command asks: a hub that all ask at once answers none in time
                    return recent, None
            except OSError:  # a full disk, for example
                pass
        return _ask_hub(slurm, environ, clock, path, recent)


def _ask_hub(
    slurm: SlurmReader,
    environ: Mapping[str, str],
    clock: Callable[[], float],
    path: Path | None,
    recent: QueueLook | None,
) -> tuple[QueueLook | None, str | None]:
    """The answer of the hub, which is also written; without one the ``recent`` answer, if there is one."""
    found = read_hub(slurm, environ)
    if found is None or found.answer is None:
        return recent, None if found is None or recent is not None else found.problem
    look = hub_look(found.address, found.answer, clock())
    if look is not None and path is not None:
        with contextlib.suppress(OSError):
            _write_look(path, look)
    return look, None


def _write_look(path: Path, look: QueueLook | NodesLook | UseLook | HistoryLook) -> None:
    """Write a look, its rows as lists: with the name of each field a reader takes twice the time. Raises OSError."""
    body = {**look.replace(rows=()).to_json(), "rows": look.rows}
    run_files.write_json(path, body, durable=False, mode=OWNER_ONLY, default=to_json)


def _path(folder: Path, kind: type[Look], name: object) -> Path:
    digest = hashlib.sha256(repr(name).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return folder / f"{kind.__name__.lower()}-{digest}.json"


def hub_look(address: str, answer: HubAnswer, now: float) -> QueueLook | None:
    """The queue as a hub knows it; None if its answer is old without a reason, for it may hang."""
    if answer.as_of is None:
        return None
    is_late = now - answer.as_of > answer.scope.interval_s + HUB_LATE_S
    problem = (
        next((each for each in answer.problems if each.startswith(("squeue ", "slurmrestd "))), None)
        if is_late
        else None
    )
    if is_late and problem is None:
        return None
    cluster, as_of = answer.scope.cluster, answer.as_of
    return QueueLook(cluster=cluster, as_of=as_of, tried=now, problem=problem, source=address, rows=answer.rows())


def read_nodes_look(
    slurm: SlurmReader, environ: Mapping[str, str], clock: Callable[[], float] = time.time, *, watch: bool = False
) -> NodesLook:
    """The nodes, from a hub if one runs and has them. Raises SlurmUnansweredError if nothing is known.

    Who watches is content with an older answer than who asks once.
    """
    found, now = read_hub_nodes(slurm, environ), clock()
    if found is not None and found[1] is not None and now - found[1] < (HUB_NODES_S if watch else LOOK_S):
        address, as_of, rows = found
        return NodesLook(cluster=cluster_name(environ), as_of=as_of, tried=now, source=address, rows=rows)
    return _read_look(
        NodesLook, "nodes", slurm.nodes, environ, clock, most_s=NODES_LOOK_S if watch else LOOK_S
    ).replace(source="sinfo")


def read_use_look(
    slurm: SlurmReader,
    job_id: str,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    watched_s: float | None = None,
) -> UseLook:
    """CPU time and memory of a running job. Raises SlurmUnansweredError if nothing is known.

    For those who watch, sstat is asked once in ``watched_s``, whatever the number of jobs.
    """
    folder = _own_folder(environ)
    last = None if folder is None else folder / "sstat.last"  # the job that was asked about last
    name = f"use-{slurm.user}-{job_id}-{slurm.cluster or ''}"

    def ask() -> tuple[RunningUse, ...]:
        if last is not None:
            with contextlib.suppress(OSError):
                last.write_text(name)
                os.utime(last, (clock(), clock()))
        return (slurm.running_use(job_id),)

    most_s = USE_LOOK_S
    if watched_s is not None and last is not None:
        with contextlib.suppress(OSError):  # it has never been asked
            wait_s = watched_s + (ALL_LATE_S if last.read_text() == name else 0.0)  # other jobs come first
            most_s = watched_s if clock() - last.stat().st_mtime >= wait_s else math.inf
    return _read_look(UseLook, name, ask, environ, clock, most_s=most_s).replace(source="sstat")


def read_history_look(
    slurm: SlurmReader, environ: Mapping[str, str], since: float, clock: Callable[[], float] = time.time
) -> list[tuple[QueueRow, Attempt]]:
    """Attempts that had not ended at ``since``, for those who watch. Raises SlurmUnansweredError."""
    begin = since // HISTORY_STEP_S * HISTORY_STEP_S

    def has_all(look: HistoryLook) -> bool:
        return look.since <= begin

    name = f"{slurm.user or 'all'}-{slurm.cluster or ''}"
    look = _read_look(
        *(HistoryLook, name, lambda: slurm.history(begin), environ, clock),
        most_s=HISTORY_LOOK_S,
        fits=has_all,
        more={"since": begin},
    )
    if not has_all(look):
        raise SlurmUnansweredError("sacct", (look.problem or "").removeprefix("sacct "))
    return [pair for pair in look.rows if pair[1].sight.ended is None or pair[1].sight.ended >= since]


def _read_look(
    kind: type[L],
    name: str,
    ask: Callable[[], tuple[Any, ...]],
    environ: Mapping[str, str],
    clock: Callable[[], float],
    since: float = 0.0,
    least_s: float | None = None,
    most_s: float | None = None,
    fits: Callable[[L], bool] = lambda _: True,
    more: Mapping[str, object] = NOTHING,
) -> L:
    """The look in the file while it is fresh and ``fits``, else Slurm's answer, else the old look with the problem.

    Of several processes one asks and the others wait for the file, no longer than the command may take. A question
    without an answer counts as a look too, so that they do not all ask a controller in trouble.
    """
    cluster = cluster_name(environ)
    folder = _own_folder(environ)
    if folder is None:
        return _usable(_asked(kind, cluster, None, ask, clock, more))
    path = _path(folder, kind, (name, cluster))
    end = time.monotonic() + DEADLINE_S
    while True:
        known = kind.read_valid(path)
        if known is not None and fits(known) and _is_fresh(known, clock(), since, least_s, most_s):
            return _usable(known)
        try:
            descriptor = lock_file(path.with_suffix(".lock"))
            break
        except FileLockedError as holder:
            if time.monotonic() >= end:
                problem = f"is being asked by {holder} and has not answered in {DEADLINE_S:g} s"
                return _usable(_failed(kind, cluster, known, SlurmUnansweredError("Slurm", problem), clock()))
            time.sleep(RETRY_S)
        except OSError:  # a full disk, for example
            return _usable(_asked(kind, cluster, known, ask, clock, more))
    try:
        known = kind.read_valid(path)  # another process may have written it before the lock was ours
        if known is None or not (fits(known) and _is_fresh(known, clock(), since, least_s, most_s)):
            known = _asked(kind, cluster, known, ask, clock, more)
            with contextlib.suppress(OSError):  # it is asked again by the next command
                _write_look(path, known)
        return _usable(known)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_fresh(look: Look, now: float, since: float, least_s: float | None, most_s: float | None) -> bool:
    age_s = now - look.tried  # a moment in the future was written by another clock
    limit_s, default_s = (most_s, LOOK_S) if look.tried >= since else (least_s, LEAST_S)
    return 0.0 <= age_s < (default_s if limit_s is None else limit_s)


def _asked(
    kind: type[L],
    cluster: str,
    known: L | None,
    ask: Callable[[], tuple[Any, ...]],
    clock: Callable[[], float],
    more: Mapping[str, object],
) -> L:
    try:
        rows = ask()
    except SlurmUnansweredError as error:
        if error.is_local:
            raise
        return _failed(kind, cluster, known, error, clock())
    now = clock()
    return kind(cluster=cluster, as_of=now, tried=now, rows=rows).replace(**more)


def _failed(kind: type[L], cluster: str, known: L | None, error: SlurmUnansweredError, now: float) -> L:
    return (known or kind(cluster=cluster, tried=now)).replace(tried=now, problem=str(error))


def _usable(look: L) -> L:
    """The look, if it has ever had an answer. Raises SlurmUnansweredError."""
    if look.as_of is None:
        command, _, problem = (look.problem or "Slurm did not answer").partition(" ")
        raise SlurmUnansweredError(command, problem)
    return look


def _own_folder(environ: Mapping[str, str]) -> Path | None:
    """The cache folder of this user; None if there is none in which nobody else can write."""
    found = user_cache_folder(environ)
    if found is None:
        return None
    folder = Path(found)
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    return folder if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else None


def cluster_name(environ: Mapping[str, str]) -> str:
    """The cluster that the commands ask: a home may serve several.

    It is the one that the user has chosen, else that of Slurm's configuration, else known by this machine's name.
    """
    return environ.get("SLURM_CLUSTERS") or configured_cluster(environ) or os.uname().nodename


def configured_cluster(environ: Mapping[str, str]) -> str | None:
    """The name of the cluster in Slurm's configuration; None if it cannot be read here."""
    for path in filter(None, (environ.get("SLURM_CONF"), *CONF_FILES)):
        try:
            with open(path, encoding="utf-8", errors="replace") as source:
                found = _CLUSTER_NAME.search(source.read(MOST_CONF_BYTES))
        except OSError:
            continue
        return found[1] if found else None
    return None
