"""The hub's file while no hub has it: what is in it, and how it is filled from accounting and run directories."""

import http.client
import json
import os
import pwd
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.user_state import hub_socket, make_own_folder, user_state_folder
from exporter.hub.api.answers import job_json
from exporter.hub.jobs import Job, take_missed, unknown_rows
from exporter.hub.registry_reader import RegistryReader
from exporter.hub.runs.reports import Run, rows_of_runs, with_runs
from exporter.hub.runs.run_directory_reader import Entry, read_run
from exporter.hub.store import JOBS_KEPT_S, Batch, Store, StoreFacts, name_of
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import SAME_SUBMISSION_S, QueueRow
from exporter.slurm.sources.cached_answers_reader import cluster_name
from exporter.slurm.sources.hub_queue_reader import hub_queue
from exporter.slurm.sources.hub_reader import MOST_JOBS, VARIABLE, HubJob, hub_addresses, read_hub
from exporter.slurm.tracking import Event

FILE_NAME = "hub-user.sqlite"
WINDOW_S = 30 * 86400.0  # of one question to accounting, which may refuse longer ones
ANSWER_S = 5.0  # of a hub


class IndexFacts(NamedTuple):
    """What is in an index."""

    path: str
    facts: StoreFacts
    hub: str | None = None  # the process that has it


class Rebuilt(NamedTuple):
    """What was found for an index."""

    added: int
    from_accounting: int
    from_run_dirs: int
    problems: tuple[str, ...] = ()


class History(NamedTuple):
    """Past jobs that are known without a query to accounting."""

    source: str  # the address of a hub, or a file
    jobs: tuple[HubJob, ...]  # that ended after the requested time, or had not ended
    covers_since: float  # jobs that ended from then on
    covers_until: float  # to then are all there
    is_of_hub: bool = False  # which knows what runs now


def read_history(slurm: SlurmReader, environ: Mapping[str, str], since: float) -> History | None:
    """What the hub knows of a user's jobs, else the user's index; None if there is neither. Never raises."""
    found, now = read_hub(slurm, environ, since), time.time()
    if found is not None:
        answer = found.answer
        if answer is None or answer.covers_since is None or hub_queue(found.address, answer, now) is None:
            return None
        return History(found.address, answer.jobs, answer.covers_since, now, is_of_hub=True)
    return _read_own_history(slurm, environ, since, now) if _may_read_index(slurm, environ) else None


def _may_read_index(slurm: SlurmReader, environ: Mapping[str, str]) -> bool:
    """Whether the index has the jobs that are asked for: those of this user and cluster."""
    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    is_wanted = not environ.get(VARIABLE) and not hub_addresses(slurm, environ)
    return is_wanted and slurm.user == own and slurm.cluster is None


def _read_own_history(slurm: SlurmReader, environ: Mapping[str, str], since: float, now: float) -> History | None:
    try:
        path = index_path(environ)
        lock = lock_file(path.with_suffix(".lock")) if path.exists() else None
    except (ExporterError, OSError):
        return None  # a hub of another machine has it
    if lock is None:
        return None
    try:
        store = Store(path)
        try:
            meta = store.saved.meta
            if store.problem is not None or meta.get("cluster", "") != cluster_name(environ):
                return None
            found = store.jobs_since(since, slurm.user, None, MOST_JOBS + 1)
            known = {name_of(job) for job in found}
            found += [job for job in store.saved.jobs if job.user == slurm.user and name_of(job) not in known]
        finally:
            store.close()
    finally:
        os.close(lock)
    covers_since = max(float(meta.get("covers_since", "inf")), now - JOBS_KEPT_S)
    covers_until = max(float(meta.get(name, 0.0)) for name in ("covers_until", "as_of"))
    if len(found) > MOST_JOBS or covers_since >= covers_until:
        return None
    jobs = (HubJob.from_json(job_json(job, now)) for job in found)
    return History(str(path), tuple(jobs), covers_since, covers_until)


def index_path(environ: Mapping[str, str], state_dir: Path | None = None) -> Path:
    """The file of the user's hub. Raises ExporterError."""
    own = user_state_folder(environ)
    if state_dir is None and own is None:
        raise ExporterError("HOME is not set, so there is no index; give --state-dir")
    return (state_dir or Path(str(own), "hub")).absolute() / FILE_NAME


def read_index(path: Path, environ: Mapping[str, str]) -> IndexFacts | None:
    """What is in the index; None without one. A hub that has it is asked. Raises ExporterError."""
    if not path.exists():
        return None
    try:
        lock = lock_file(path.with_suffix(".lock"))
    except FileLockedError as error:
        body = _ask_hub(Path(hub_socket(environ, str(path.parent))), "/api/v1/index")
        facts = {name: body.get(name) for name in StoreFacts._fields}
        return IndexFacts(str(path), StoreFacts(**facts), str(error))  # type: ignore[arg-type] # as the hub has written
    try:
        store = Store(path)
        try:
            if store.problem is not None:
                raise ExporterError(store.problem)
            return IndexFacts(str(path), store.facts())
        finally:
            store.close()
    finally:
        os.close(lock)


def _ask_hub(path: Path, question: str) -> Mapping[str, object]:
    client = http.client.HTTPConnection("hub", timeout=ANSWER_S)
    try:
        client.sock = socket.socket(socket.AF_UNIX)
        client.sock.settimeout(ANSWER_S)
        client.sock.connect(os.fspath(path))
        client.request("GET", question)
        body = json.loads(client.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ExporterError(f"a hub has the index, and does not answer at {path}: {error}") from error
    finally:
        client.close()
    return body if isinstance(body, dict) else {}


def rebuild_index(
    path: Path, environ: Mapping[str, str], user: str, since: float, folders: Sequence[Path], slurm: SlurmReader
) -> Rebuilt:
    """Add the jobs that accounting and run directories know, and the index does not. Raises ExporterError.

    ``folders`` have run directories in them, besides those of the user's entries. A file that is damaged is put aside
    first. What only the index knows stays.
    """
    runs = _runs(environ, folders)
    make_own_folder(path.parent)
    try:
        lock = lock_file(path.with_suffix(".lock"))
    except FileLockedError as error:
        raise ExporterError(f"a hub has the index: {error}; end it first") from error
    store, now, problems = Store(path), time.time(), list[str]()
    try:
        if store.problem is not None:
            raise ExporterError(store.problem)
        history = list(_history(slurm, since, now, problems))
        jobs = take_missed({}, _not_in(store, [row for row, _ in history]), now).jobs
        earlier: dict[str, list[Attempt]] = {}
        for _, attempt in history:
            earlier.setdefault(attempt.job_id, []).append(attempt)
        for row, attempt in history:
            if row.job_id in jobs and jobs[row.job_id].tracked.submitted == row.snapshot.submitted:
                job = jobs[row.job_id]
                jobs[row.job_id] = job._replace(tracked=job.tracked.replace(figures=attempt.figures()))
        jobs = {key: with_earlier(job, earlier.get(key, ())) for key, job in jobs.items()}
        from_accounting = len(jobs)
        rows = [row for row in rows_of_runs(jobs, runs, since, now) if row.user == user]
        jobs = with_runs(take_missed(jobs, _not_in(store, rows), now).jobs, runs)
        meta = {} if problems else _coverage(store, since, now, cluster_name(environ))
        store.save(Batch(now, list(jobs.values()), meta=meta, is_history=True))
        if store.problem is not None:
            raise ExporterError(store.problem)
        return Rebuilt(len(jobs), from_accounting, len(jobs) - from_accounting, tuple(problems))
    finally:
        store.close()
        os.close(lock)


def with_earlier(job: Job, attempts: Iterable[Attempt]) -> Job:
    """The job with the earlier attempts that led to it by requeues, each right after the end of the previous one."""
    history, submitted, count = job.tracked.history, job.tracked.submitted, 0
    for attempt in sorted(attempts, key=lambda each: -(each.snapshot.submitted or 0.0)):
        begin, end = attempt.snapshot.started, attempt.snapshot.ended
        if submitted is None or end is None or (attempt.snapshot.submitted or 0.0) >= submitted:
            continue
        if abs(submitted - end) > SAME_SUBMISSION_S or attempt.user != job.user:
            break  # an older job with this id
        ran = () if begin is None else (Event(state="RUNNING", time=begin, seen=end),)
        history = (*ran, Event(state="PENDING", time=end, seen=end), *history)
        submitted, count = attempt.snapshot.submitted, count + 1
    tracked = job.tracked.replace(history=history, restarts=count, attempt=count + 1)
    return job._replace(tracked=tracked, first_submitted=submitted) if count else job


def _coverage(store: Store, since: float, now: float, cluster: str) -> dict[str, str]:
    """What the index notes of the time whose jobs accounting has given it."""
    meta = store.saved.meta
    known = max(float(meta.get(name, 0.0)) for name in ("covers_until", "as_of"))
    earlier = float(meta.get("covers_since", "inf")) if known >= since else since
    return {"covers_since": str(min(since, earlier)), "covers_until": str(now), "cluster": cluster}


def _not_in(store: Store, rows: Sequence[QueueRow]) -> list[QueueRow]:
    return unknown_rows(rows, store.jobs_by_id(row.job_id for row in rows))


def _history(slurm: SlurmReader, since: float, now: float, problems: list[str]) -> Iterator[tuple[QueueRow, Attempt]]:
    while since < now:
        until = min(now, since + WINDOW_S)
        try:
            yield from slurm.history(since, until)
        except SlurmUnansweredError as error:
            problems.append(str(error))
            return
        since = until


def _runs(environ: Mapping[str, str], folders: Iterable[Path]) -> list[Run]:
    """Runs of the user's entries, and those in the folders."""
    own = user_state_folder(environ)
    registry = RegistryReader([Path(own, "runs")] if own is not None else [], only_own=True)
    registry.read()
    found = {run.run_dir: run for run in registry.runs()}
    for folder in folders:
        try:
            places = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            raise ExporterError(f"{folder}: {error.strerror}; name a directory with run directories") from error
        for place in places:
            if place not in found and (run := _run_in(place)) is not None:
                found[place] = run
    return list(found.values())


def _run_in(run_dir: str) -> Run | None:
    """The run of Slurm in a directory; None if it is none, or has no report."""
    try:
        path = Path(run_dir, run_files.REPORT_FILE)
        body, uid = run_files.read_json(path) or {}, path.stat().st_uid
        job_id = str(body.get("job_id"))
        if not job_id.isdecimal():
            return None  # it ran without Slurm
        submission = run_files.read_json(Path(run_dir, f"{job_id}.json")) or {}
        entry = Entry.from_json({**submission, "run_dir": run_dir})
    except (OSError, ValueError, RecursionError):
        return None
    return read_run(uid, entry)
