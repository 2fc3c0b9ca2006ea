"""Cache of Slurm's answers for all commands of a user, in files of the user's cache folder.

An answer is refreshed after a minute, for nodes after 200 seconds: all watchers together make 2.6 RPCs a minute.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.records import NOTHING
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import DEADLINE_S, SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import QueueRow
from exporter.slurm.sources.cached_answers_reader import (
    CachedAnswer,
    HistoryAnswer,
    NodesAnswer,
    QueueAnswer,
    UseAnswer,
    answer_path,
    cluster_name,
    own_folder,
    write_answer,
)
from exporter.slurm.sources.hub_queue_reader import read_hub_queue
from exporter.slurm.sources.hub_reader import read_hub_nodes
from exporter.slurm.usage import RunningUse

QUEUE_MAX_AGE_S = 60.0  # age at which Slurm is asked anew; two RPCs each
NODES_MAX_AGE_S = 200.0  # for nodes that are watched, which cost two RPCs too
HISTORY_MAX_AGE_S = 300.0  # for ended jobs that are watched: the queue has the latest of them too
HISTORY_STEP_S = 3600.0  # those who watch since the same hour share one answer
USE_MAX_AGE_S = 60.0  # for the use of a running job, which costs three RPCs
WATCHED_USE_S, WATCHED_USE_BESIDE_HUB_S = 200.0, 600.0  # of all such jobs that are watched, one each time
OTHERS_MAX_AGE_S = 300.0  # for the jobs of others, while a hub has the user's own and asks Slurm itself
ALL_LATE_S = 15.0  # how late those may be whose turn it is to ask: for all jobs, or about another one
LEAST_S = 5.0  # between two questions, however many jobs have changed
HUB_NODES_S = (
    900.0  # age up to which nodes of a hub are shown to a watcher: it reads them every 10 minutes, or when asked
)
RETRY_S = 0.1  # between two reads of the file while another process asks


L = TypeVar("L", QueueAnswer, NodesAnswer, UseAnswer, HistoryAnswer)


def read_shared_queue(
    slurm: SlurmReader,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    since: float = 0.0,
    least_s: float | None = None,
) -> QueueAnswer:
    """The queue of the reader's user, from a hub if one runs. Raises SlurmUnansweredError if nothing is known.

    An answer before ``since`` is of no use: then Slurm is asked anew, unless that was done within ``least_s`` (default:
    LEAST_S). A recent answer about all users is used in place of a query.
    """
    of_hub, hub_problem = read_hub_queue(slurm, environ, clock, since)
    if of_hub is not None and (of_hub.as_of or 0.0) >= since:
        return of_hub
    answer = _read_own_of_all(slurm, environ, clock, since)
    if answer is None:
        answer = _read_answer(QueueAnswer, _queue_name(slurm, slurm.user), slurm.queue, environ, clock, since, least_s)
    return answer.replace(source=slurm.source, hub_problem=hub_problem)


def read_queue_of_all(
    slurm: SlurmReader,
    me: str,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    others_s: float = OTHERS_MAX_AGE_S,
    user: str | None = None,
) -> QueueAnswer:
    """The queue of all users, as of the oldest part of it. Raises SlurmUnansweredError if nothing is known.

    If a hub has only the jobs of this user, those of others are read every ``others_s``. With ``user`` only the jobs of
    that one are returned: all who watch others share one question.
    """
    wanted = slurm if user is None else SlurmReader(user, slurm.cluster, environ)
    of_hub, hub_problem = read_hub_queue(wanted, environ, clock, 0.0)
    if of_hub is not None:
        return of_hub
    own, _ = read_hub_queue(SlurmReader(me, slurm.cluster, environ), environ, clock, 0.0)
    most_s = QUEUE_MAX_AGE_S if own is None else others_s
    answer = _read_answer(QueueAnswer, _queue_name(slurm, None), slurm.queue, environ, clock, most_s=most_s)
    if own is not None and (own.as_of or 0.0) > (answer.as_of or 0.0):
        answer = answer.replace(rows=(*own.rows, *(row for row in answer.rows if row.user != me)))
    if user is not None:
        answer = answer.replace(rows=tuple(row for row in answer.rows if row.user == user))
    return answer.replace(source=slurm.source, hub_problem=hub_problem)


def _queue_name(slurm: SlurmReader, user: str | None) -> str:
    return f"{slurm.source}-{user or 'all'}-{slurm.cluster or ''}"


def _read_own_of_all(
    slurm: SlurmReader, environ: Mapping[str, str], clock: Callable[[], float], since: float
) -> QueueAnswer | None:
    """The jobs of the reader's user in a recent answer about all; None without one."""
    folder = own_folder(environ) if slurm.user is not None else None
    path = None if folder is None else answer_path(folder, QueueAnswer, _queue_name(slurm, None), cluster_name(environ))
    try:
        if path is None or time.time() - path.stat().st_mtime >= QUEUE_MAX_AGE_S + ALL_LATE_S:
            return None
    except OSError:
        return None
    known = QueueAnswer.read_valid(path)
    if known is None or known.problem is not None or not 0.0 <= clock() - known.tried < QUEUE_MAX_AGE_S + ALL_LATE_S:
        return None
    if (known.as_of or 0.0) < since:
        return None
    return known.replace(rows=tuple(row for row in known.rows if row.user == slurm.user))


def read_shared_nodes(
    slurm: SlurmReader, environ: Mapping[str, str], clock: Callable[[], float] = time.time, *, watch: bool = False
) -> NodesAnswer:
    """The nodes, from a hub if one runs and has them. Raises SlurmUnansweredError if nothing is known.

    With ``watch``, an older answer is accepted.
    """
    found, now = read_hub_nodes(slurm, environ), clock()
    if found is not None and found[1] is not None and now - found[1] < (HUB_NODES_S if watch else QUEUE_MAX_AGE_S):
        address, as_of, rows = found
        return NodesAnswer(cluster=cluster_name(environ), as_of=as_of, tried=now, source=address, rows=rows)
    return _read_answer(
        NodesAnswer, "nodes", slurm.nodes, environ, clock, most_s=NODES_MAX_AGE_S if watch else QUEUE_MAX_AGE_S
    ).replace(source="sinfo")


def read_shared_use(
    slurm: SlurmReader,
    job_id: str,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    watched_s: float | None = None,
) -> UseAnswer:
    """CPU time and memory of a running job. Raises SlurmUnansweredError if nothing is known.

    For those who watch, sstat is asked once in ``watched_s``, whatever the number of jobs.
    """
    folder = own_folder(environ)
    last = None if folder is None else folder / "sstat.last"  # the job that was asked about last
    name = f"use-{slurm.user}-{job_id}-{slurm.cluster or ''}"

    def ask() -> tuple[RunningUse, ...]:
        if last is not None:
            with contextlib.suppress(OSError):
                last.write_text(name)
                os.utime(last, (clock(), clock()))
        return (slurm.running_use(job_id),)

    most_s = USE_MAX_AGE_S
    if watched_s is not None and last is not None:
        with contextlib.suppress(OSError):  # it has never been asked
            wait_s = watched_s + (ALL_LATE_S if last.read_text() == name else 0.0)  # other jobs come first
            most_s = watched_s if clock() - last.stat().st_mtime >= wait_s else math.inf
    return _read_answer(UseAnswer, name, ask, environ, clock, most_s=most_s).replace(source="sstat")


def read_shared_history(
    slurm: SlurmReader, environ: Mapping[str, str], since: float, clock: Callable[[], float] = time.time
) -> list[tuple[QueueRow, Attempt]]:
    """Attempts that had not ended at ``since``, for those who watch. Raises SlurmUnansweredError."""
    begin = since // HISTORY_STEP_S * HISTORY_STEP_S

    def has_all(answer: HistoryAnswer) -> bool:
        return answer.since <= begin

    name = f"{slurm.user or 'all'}-{slurm.cluster or ''}"
    answer = _read_answer(
        *(HistoryAnswer, name, lambda: slurm.history(begin), environ, clock),
        most_s=HISTORY_MAX_AGE_S,
        fits=has_all,
        more={"since": begin},
    )
    if not has_all(answer):
        raise SlurmUnansweredError("sacct", (answer.problem or "").removeprefix("sacct "))
    return [pair for pair in answer.rows if pair[1].snapshot.ended is None or pair[1].snapshot.ended >= since]


def _read_answer(
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
    """The cached answer while it is fresh and ``fits``, else a new one of Slurm, else the cached one with the problem.

    Of several processes one asks and the others wait for the file, no longer than the command may take. Failures are
    cached too, so that processes do not all query a failing controller.
    """
    cluster = cluster_name(environ)
    folder = own_folder(environ)
    if folder is None:
        return _usable(_asked(kind, cluster, None, ask, clock, more))
    path = answer_path(folder, kind, name, cluster)
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
                write_answer(path, known)
        return _usable(known)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_fresh(answer: CachedAnswer, now: float, since: float, least_s: float | None, most_s: float | None) -> bool:
    age_s = now - answer.tried  # a moment in the future was written by another clock
    limit_s, default_s = (most_s, QUEUE_MAX_AGE_S) if answer.tried >= since else (least_s, LEAST_S)
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


def _usable(answer: L) -> L:
    """The cached answer, if Slurm has ever answered. Raises SlurmUnansweredError."""
    if answer.as_of is None:
        command, _, problem = (answer.problem or "Slurm did not answer").partition(" ")
        raise SlurmUnansweredError(command, problem)
    return answer
