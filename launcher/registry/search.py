"""Find the directory of a job, sweep or pipeline by path, id or its beginning, name or age, from anywhere."""

import itertools
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.identity import safe_label
from launcher.errors import LauncherError, SlurmError
from launcher.registry.entries import LOCAL_PREFIX, JobEntry, read_own_entries, read_site_entries
from launcher.rundir.cluster_file import find_logs_dir
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import STARTING_S, read_orchestrator
from launcher.rundir.rundir import PIPELINE_FILE, SWEEP_FILE
from launcher.rundir.statuses import is_reporting
from launcher.steps.slurm_queue import SlurmQueue
from launcher.steps.slurm_steps import run_command
from launcher.words import clock_text

LEAST_PREFIX = 3  # characters of a part of an id: a shorter one soon fits another job
MOST_CANDIDATES = 8  # shown in an error
_SLURM_ID = re.compile(r"\d+(_\d+)?")


class FoundJob(NamedTuple):
    """The directory of a job, sweep or pipeline, and notices about how it was found."""

    directory: Path
    notices: tuple[str, ...] = ()


def is_sweep(directory: Path) -> bool:
    return (directory / SWEEP_FILE).is_file() and not (directory / run_files.MANIFEST_FILE).is_file()


def is_pipeline(directory: Path) -> bool:
    return (directory / PIPELINE_FILE).is_file() and not (directory / run_files.MANIFEST_FILE).is_file()


def find_job(job: str | None, environ: Mapping[str, str], workdir: Path, *, takes_newest: bool = False) -> FoundJob:
    """Find a job by its path, id, the beginning of an id that Slurm did not give, or name; None is the newest.

    ``takes_newest`` is for commands that leave the job as it is: of several with one name, the newest counts.
    Raises LauncherError, with the candidates if several fit.
    """
    if job is None:
        return _newest_job(environ, workdir)
    place = Path(job)
    if place.name == run_files.MANIFEST_FILE and place.is_file():
        place = place.parent
    if _is_job(place):
        return FoundJob(place.resolve())
    logs_dir = find_logs_dir(environ, workdir)
    if job and os.sep not in job:
        found = _in_logs_dir(job, logs_dir)
        if found is None:
            entries = read_own_entries(environ, lambda job_id: _is_id_of(job, job_id))
            entries += read_site_entries(environ, workdir, lambda job_id: _is_id_of(job, job_id))
            found = _among_entries(job, entries) or _in_slurm(job)
            if found is None and entries:
                raise LauncherError(f"job {job} was in {entries[0].run_dir}, {_why_missing(Path(entries[0].run_dir))}")
        if found is not None:
            return FoundJob(found.resolve())
        if (named := _by_part_or_name(job, read_own_entries(environ), takes_newest=takes_newest)) is not None:
            return named._replace(directory=named.directory.resolve())
    if logs_dir.exists():
        os.scandir(logs_dir).close()  # raises what hides its contents from a glob
    raise LauncherError(
        f"{job!r} is neither a run directory nor the id or name of a job in {logs_dir} or in your index of jobs; "
        "give the run directory that `gpujob submit` or `gpujob run` printed"
    )


def _is_job(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (run_files.MANIFEST_FILE, SWEEP_FILE, PIPELINE_FILE))


def _is_readable_job(directory: Path) -> bool:
    try:
        return _is_job(directory)
    except OSError:
        return False


def _why_missing(directory: Path) -> str:
    try:
        _is_job(directory)
    except OSError as error:
        return f"which cannot be read: {error.strerror}; ask its owner for access"
    return "which was moved or deleted; if it was moved, name its new place"


def _in_logs_dir(job: str, logs_dir: Path) -> Path | None:
    """The newest directory with this id in the logs directory.

    Those of this user come first: anyone may have written to a shared logs directory.
    """
    sweep, name = _escaped_glob(job.partition("_")[0]), _escaped_glob(job)
    in_sweeps = (f"{sweep}_*/{name}_*", f"*/{name}_*") if "_" in job else ()  # the second matches a resumed sweep
    for pattern in (f"{name}_*", *in_sweeps):
        matching = [path for path in logs_dir.glob(pattern) if _is_readable_job(path)]
        found = [path for path in matching if job_id_of(path) == job]  # a name may begin with a number
        if found:
            return max(found, key=_rank)
    return None


def _rank(directory: Path) -> tuple[bool, float]:
    status = directory.stat()
    return status.st_uid == os.geteuid(), status.st_mtime


def _escaped_glob(text: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)


def _is_id_of(job: str, job_id: str) -> bool:
    """Whether this is the id of the job, or of the sweep whose point it is."""
    return job_id == job or ("_" in job and job_id == job.partition("_")[0])


def _among_entries(job: str, entries: Iterable[JobEntry]) -> Path | None:
    """The directory of the newest entry with this id. Raises LauncherError if jobs of two clusters have it."""
    found: dict[str | None, tuple[JobEntry, Path]] = {}
    for entry in entries:
        directory = Path(entry.run_dir)
        point = directory if entry.job_id == job else _in_logs_dir(job, directory)
        if point is not None and _is_readable_job(point):
            found.setdefault(entry.cluster, (entry, point))
    if len(found) > 1:
        raise _ambiguity(job, [entry.replace(run_dir=str(point)) for entry, point in found.values()])
    return next((point for _, point in found.values()), None)


def _in_slurm(job: str) -> Path | None:
    """The directory in which Slurm writes the output of the job; None if it does not know the job."""
    if not _SLURM_ID.fullmatch(job) or shutil.which("scontrol") is None:
        return None
    try:
        match = re.search(
            r"^\s*StdOut=(/.*)$", run_command(["scontrol", "show", "job", job], timeout_s=10.0), re.MULTILINE
        )
    except SlurmError:
        return None
    if match is None:
        return None
    run_dir = Path(match[1]).parent
    sweep_dir = run_dir.parents[1] if len(run_dir.parents) > 1 else run_dir  # SWEEP/tasks/4459_3/log.out
    if "_" not in job and is_sweep(sweep_dir):
        return sweep_dir
    return run_dir if _is_job(run_dir) else None  # the error of a directory that others cannot read passes on


def _by_part_or_name(job: str, entries: Sequence[JobEntry], *, takes_newest: bool) -> FoundJob | None:
    """The job whose id begins so, or whose name this is; of several, the only one that runs or waits.

    A number is always a whole id: half of one must not stop another job. A sweep or pipeline never has a report of its
    own, so its missing one does not show that it still runs. Raises LauncherError if several fit, unless all have this
    name and the newest is enough.
    """
    found = {entry.run_dir: entry for entry in entries if _fits(job, entry) and _is_readable_job(Path(entry.run_dir))}
    if len(found) < 2:
        return next((FoundJob(Path(run_dir)) for run_dir in found), None)
    in_order = sorted(found.values(), key=lambda entry: entry.submitted, reverse=True)
    newest = in_order[0]
    may_run = (entry for entry in in_order if _may_run(Path(entry.run_dir), is_looking=takes_newest))
    running = list(itertools.islice(may_run, 2))  # each may read the queue, and of several that run none is meant
    if len(running) == 1 and not (is_sweep(only := Path(running[0].run_dir)) or is_pipeline(only)):
        notice = f"one of {len(found)} jobs has not ended: {running[0].job_id}, {only}"
        return FoundJob(only, () if running[0] == newest else (notice,))
    if not takes_newest or any(entry.job_name != job for entry in found.values()):
        raise _ambiguity(job, list(found.values()))
    notice = f"newest of {len(found)} jobs named {safe_label(job)}: {newest.job_id}, {newest.run_dir}"
    return FoundJob(Path(newest.run_dir), (notice,))


def _may_run(run_dir: Path, *, is_looking: bool) -> bool:
    """Whether a job has no report, and its process, Slurm's queue or its sidecars do not show that it has ended.

    A job that was cancelled in the queue, or was lost with its node, never gets a report. A job that cannot be seen has
    ended for those who are looking when its sidecars are silent; for `stop` it may always run.
    """
    if (run_dir / run_files.REPORT_FILE).exists():
        return False
    if is_sweep(run_dir) or is_pipeline(run_dir):
        return True
    process, now = read_orchestrator(run_dir), time.time()
    if process is not None and process.local:
        if not process.is_hidden():
            return process.is_running_here()
        has_just_started = now - (process.start or 0.0) < STARTING_S
        return not is_looking or has_just_started or is_reporting(run_dir, process.attempt, now)
    if run_dir.name.startswith(LOCAL_PREFIX):
        return now - (run_dir / run_files.MANIFEST_FILE).stat().st_mtime < STARTING_S
    return SlurmQueue(run_dir).read().state != ""


def _fits(job: str, entry: JobEntry) -> bool:
    is_part = len(job) >= LEAST_PREFIX and not job.isdigit()
    return entry.job_name == job or (is_part and entry.job_id.startswith((job, f"{LOCAL_PREFIX}{job}")))


def _ambiguity(job: str, candidates: Sequence[JobEntry]) -> LauncherError:
    lines = [
        f"  {entry.job_id}  {safe_label(entry.job_name)}  {clock_text(entry.submitted)}  {entry.run_dir}"
        for entry in candidates[:MOST_CANDIDATES]
    ]
    more = len(candidates) - len(lines)
    lines += [f"  and {more} older ones"] if more > 0 else []
    return LauncherError("\n".join([f"{job!r} fits {len(candidates)} jobs; give an id or a directory:", *lines]))


def _newest_job(environ: Mapping[str, str], workdir: Path) -> FoundJob:
    """The newest job of this user whose directory is still there."""
    notices = []
    for entry in read_own_entries(environ):
        directory = Path(entry.run_dir)
        if _is_readable_job(directory):
            notices.append(f"newest job: {entry.job_id} {safe_label(entry.job_name)}, {directory}")
            return FoundJob(directory.resolve(), tuple(notices))
        if len(notices) < MOST_CANDIDATES:
            notices.append(f"job {entry.job_id} is left out: it was in {directory}, {_why_missing(directory)}")
    logs_dir = find_logs_dir(environ, workdir)
    own = [path for path in logs_dir.glob("[!.]*") if _is_readable_job(path) and path.stat().st_uid == os.geteuid()]
    if not own:
        raise LauncherError(
            "you have no job yet; start one with `gpujob run` or `gpujob submit`, or give a run directory"
        )
    newest = max(own, key=_rank)
    return FoundJob(newest.resolve(), (*notices, f"newest job: {newest}"))
