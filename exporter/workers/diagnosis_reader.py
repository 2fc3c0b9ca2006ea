"""Reads the files for a diagnosis, and writes the diagnosis.

    files = read_run_files(manifest, task, node, attempt, restart)
    found = build_failure_diagnosis(files, situation, ended, errors)
    write_diagnosis(manifest.run_dir, found, render_diagnosis(found))

``diagnostics/{worker}.json`` and ``.txt`` describe the worker's latest failure. Before they are overwritten, they are
renamed to ``{worker}_rank{rank}_r{restart}``, with ``_a{attempt}`` after a requeue. A worker with several ranks always
has both names, since its ranks may be on several nodes. The names of a stall end in ``_stall``. Of each rank, only the
newest are kept.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.logs.log_files_reader import log_paths, run_suffix
from exporter.logs.log_starts_reader import read_log_starts
from exporter.workers.diagnosis import DiagnosedRun, Diagnosis, LogEnd, RunFiles

MOST_LOG_BYTES = 64 * 1024  # of each log, from its end
MOST_LOGS = 8
MOST_COUNTED_BYTES = 8 << 20  # lines before the log's end are counted only up to this size
SMALL_TEXT_BYTES = 4096  # written if the disk has no room for more
MOST_DIAGNOSES = 20  # of one rank: a worker may restart hundreds of times


def read_run_files(
    manifest: Manifest, task: Task, node: str, attempt: int, restart: int, more_logs: Iterable[str] = ()
) -> RunFiles:
    """Read the records, the job state and the log ends of one run; ``more_logs`` follow the task's own."""
    name = run_files.record_name(task.worker, task.rank, attempt, restart)
    stem = f"{manifest.run_dir}/{run_files.WORKERS_DIR}/{name}"  # no `Path`: each one interns its name
    paths = [*log_paths(task, manifest.run_dir, node, attempt, restart), *more_logs]
    starts = read_log_starts(f"{stem}.logs.json")
    ends = [read_log_end(path, manifest.run_dir, starts.get(path)) for path in dict.fromkeys(paths)][:MOST_LOGS]
    run = DiagnosedRun(
        worker=task.worker,
        role=task.role,
        rank=task.rank,
        ranks=sum(other.worker == task.worker for other in manifest.tasks),
        node=node,
        attempt=attempt,
        restart=restart,
    )
    return RunFiles(
        run=run,
        start=run_files.read_json(f"{stem}.start.json") or {},
        ended=run_files.read_json(f"{stem}.exit.json") or {},
        state=run_files.read_json(manifest.run_dir / run_files.STATE_FILE) or {},
        logs=tuple(end for end in ends if end is not None),
    )


def read_log_end(
    path: str | os.PathLike[str], run_dir: Path, find_begin: Callable[[int], int] | None = None
) -> LogEnd | None:
    """Read the end of a log; None if unreadable.

    ``find_begin`` finds where the text of the run begins in the open file.
    """
    try:
        # A FIFO at this path must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        begin = 0 if find_begin is None else find_begin(fd)
        start = max(begin, size - MOST_LOG_BYTES)
        text = os.pread(fd, MOST_LOG_BYTES, start)
        if start > begin:
            # Skip the partial first line: it could be the unrecognizable rest of a secret.
            gap = next((gap for gap in (b"\n", b"\r", b" ") if gap in text), b"")
            skipped = text.find(gap) + len(gap)
            start, text = start + skipped, text[skipped:]
        lines = os.pread(fd, start, 0).count(b"\n") if start <= MOST_COUNTED_BYTES else None
    except OSError:
        return None
    finally:
        os.close(fd)
    name = os.fspath(path).removeprefix(f"{run_dir}/")
    return LogEnd(name, size, text, start, lines)


def has_diagnosis(run_dir: Path, found: Diagnosis) -> bool:
    """Whether a diagnosis of the same end or stall exists."""
    folder = run_dir / run_files.DIAGNOSTICS_DIR
    return any(_is_same_case(_read(folder, stem), found) for stem in (_run_stem(found), _latest_stem(found)))


def has_failure_diagnosis(run_dir: Path, task: Task, node: str, attempt: int, restart: int) -> bool:
    """Whether a diagnosis of this end exists, without reading anything else about it."""
    found = Diagnosis(
        worker=task.worker,
        role=task.role,
        rank=task.rank,
        ranks=1,
        node=node,
        attempt=attempt,
        restart=restart,
        kind="failure",
        time=0.0,
    )
    return has_diagnosis(run_dir, found)


def write_diagnosis(run_dir: Path, found: Diagnosis, text: str) -> bool:
    """Write a diagnosis; false if a richer one of the same end exists.

    The text is written first, and shortened if the disk is full. Raises OSError if nothing can be written.
    """
    folder = run_dir / run_files.DIAGNOSTICS_DIR
    folder.mkdir(run_files.FOLDER_MODE, exist_ok=True)
    stem, own = _latest_stem(found), _run_stem(found)
    latest, known = _read(folder, stem), _read(folder, own)
    if any(_is_same_case(old, found) and _richness(old) > _richness(found) for old in (latest, known)):
        return False
    stems = [stem]
    if found.ranks > 1 or known is not None:
        stems = [own, stem]
    if latest is not None and _run_stem(latest) != own:
        if latest.end > found.end:
            stems = [own]  # an older end, reported late
        else:
            stems = [own, stem]
            _move_diagnosis(folder, stem, _run_stem(latest))
    for name in stems:
        _write_text(f"{folder}/{name}.txt", text)
        run_files.write_json(f"{folder}/{name}.json", found.to_json())
    _remove_old(folder, found)
    return True


def _remove_old(folder: Path, found: Diagnosis) -> None:
    """Remove all but the newest diagnoses of earlier runs of this rank."""
    name = re.compile(rf"{re.escape(found.worker)}_rank{found.rank}(?:_a(\d+))?_r(\d+)(?:_stall)?\.json")
    with os.scandir(folder) as entries:  # unlike a list of all names, these take no memory
        found_runs = [run for entry in entries if (run := name.fullmatch(entry.name))]
    runs = sorted((int(run[1] or 0), int(run[2]), run[0]) for run in found_runs)
    for *_, old in runs[:-MOST_DIAGNOSES]:
        (folder / old).unlink(missing_ok=True)
        (folder / old).with_suffix(".txt").unlink(missing_ok=True)


def _read(folder: Path, stem: str) -> Diagnosis | None:
    return Diagnosis.read_valid(f"{folder}/{stem}.json")


def _move_diagnosis(folder: Path, stem: str, new_stem: str) -> None:
    """Rename the files under ``stem`` to ``new_stem``, unless those exist."""
    for suffix in ("txt", "json"):
        if not (folder / f"{new_stem}.{suffix}").exists():
            try:
                (folder / f"{stem}.{suffix}").rename(folder / f"{new_stem}.{suffix}")
            except FileNotFoundError:
                continue  # another node was faster


def _latest_stem(found: Diagnosis) -> str:
    return f"{found.worker}{'_stall' if found.kind == 'stall' else ''}"


def _run_stem(found: Diagnosis) -> str:
    run = f"{run_suffix(found.attempt, 0)}_r{found.restart}"
    return f"{found.worker}_rank{found.rank}{run}{'_stall' if found.kind == 'stall' else ''}"


def _identity(found: Diagnosis) -> tuple[object, ...]:
    return found.kind, found.worker, found.rank, found.attempt, found.restart, found.since


def _is_same_case(old: Diagnosis | None, found: Diagnosis) -> bool:
    return old is not None and _identity(old) == _identity(found)


def _richness(found: Diagnosis | None) -> int:
    """Amount of data that was available only at the time of the end."""
    return len(found.course) + len(found.stacks) if found is not None else -1


def _write_text(path: str, text: str) -> None:
    whole = text.encode("utf-8", "replace")
    try:
        run_files.replace_file(path, whole)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        run_files.replace_file(path, whole[:SMALL_TEXT_BYTES])
