"""The hub's file while no hub has it: what is in it, and how it is filled from accounting and run directories."""

import http.client
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.user_state import hub_socket, user_state_folder
from exporter.hub.jobs import Run, rows_of_runs, take_missed, unknown_rows, with_runs
from exporter.hub.registry_reader import Entry, RegistryReader, read_run
from exporter.hub.store import Batch, Store, StoreFacts
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import QueueRow

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
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
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
        for row, attempt in history:
            if row.job_id in jobs and jobs[row.job_id].tracked.submitted == row.sight.submitted:
                job = jobs[row.job_id]
                jobs[row.job_id] = job._replace(tracked=job.tracked.replace(figures=attempt.figures()))
        from_accounting = len(jobs)
        rows = [row for row in rows_of_runs(jobs, runs, since) if row.user == user]
        jobs = with_runs(take_missed(jobs, _not_in(store, rows), now).jobs, runs)
        store.save(Batch(now, list(jobs.values()), is_history=True))
        if store.problem is not None:
            raise ExporterError(store.problem)
        return Rebuilt(len(jobs), from_accounting, len(jobs) - from_accounting, tuple(problems))
    finally:
        store.close()
        os.close(lock)


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
        body, uid = json.loads(path.read_bytes()), path.stat().st_uid
        job_id = str(body.get("job_id")) if isinstance(body, dict) else ""
        if not job_id.isdecimal():
            return None  # it ran without Slurm
        submission = json.loads(Path(run_dir, f"{job_id}.json").read_bytes())
        entry = Entry.from_json({**submission, "run_dir": run_dir})
    except (OSError, ValueError, RecursionError):
        return None
    return read_run(uid, entry)
