"""Index of jobs: a small file for each job in the user's state directory, and in the site's if it has one.

It leads from a job id to the run directory. It may be lost: all that is known of a job is in its run directory.
One file per job, because appends of several nodes to one file can mix on network file systems.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.budget import Budget
from exporter.contract.records import Record, RecordError
from exporter.contract.user_state import make_private_folder, user_state_folder
from exporter.slurm.sources.cached_answers_reader import configured_cluster
from launcher.errors import LauncherError
from launcher.registry.bounded_reads import read_some
from launcher.rundir.cluster_file import find_registry_dir

LOCAL_PREFIX = "local-"  # of ids of jobs without Slurm
PIPELINE_PREFIX = "pipeline-"  # of ids of pipelines, before that of their first job
MOST_ENTRIES = 500  # jobs of one user in one directory; the oldest make room, unless they may still run
MOST_OLDER = 200  # of those: a launch looks at the directory of each
MOST_BYTES = 16 * 1024  # of an entry: two paths and a few names
_HASH_LENGTH = 8
_SUFFIX = f"-{'?' * _HASH_LENGTH}.json"


class JobEntry(Record):
    """A job or sweep, and its directory."""

    SCHEMA = 1
    job_id: str
    job_name: str
    run_dir: str
    submitted: float  # epoch seconds
    user: str = ""
    host: str = ""
    cluster: str | None = None  # None for the cluster of the machine that submitted it
    budget: Budget | None = None
    notify: str = ""  # as in the manifest
    slurm_cluster: str | None = None  # the same by its name, if that is known: another one may give this id too


def register_job(run_dir: Path, submission: Mapping[str, object], environ: Mapping[str, str], workdir: Path) -> None:
    """Add a job or sweep to the indexes. ``submission`` is its submission record.

    An index that cannot be written must not fail the job: its run directory can still be named.
    """
    fields = {name: submission[name] for name in JobEntry.FIELDS if name in submission}
    try:
        entry = JobEntry.from_json({**fields, "run_dir": str(run_dir)})
        if not entry.job_id.startswith(LOCAL_PREFIX):
            entry = entry.replace(slurm_cluster=entry.cluster or configured_cluster(environ))
    except RecordError:
        return
    for folder, mode in ((_own_folder(environ), 0o600), (_site_folder(environ, workdir), 0o644)):
        if folder is not None:
            try:
                if mode == 0o600:
                    make_private_folder(folder)
                _remove_oldest(folder)
                run_files.write_json(folder / _file_name(entry), entry.to_json(), durable=False, mode=mode)
            except OSError:
                continue


def read_own_entries(environ: Mapping[str, str], matches: Callable[[str], bool] = lambda _: True) -> list[JobEntry]:
    """Entries of this user whose job id ``matches``, newest first. Damaged files are skipped."""
    folder = _own_folder(environ)
    return [] if folder is None else _read_entries(folder, matches, lambda owner, _: owner == os.geteuid())


def last_registered(environ: Mapping[str, str]) -> float:
    """When this user last submitted or ran a job, epoch seconds; 0 if it is not known."""
    folder = _own_folder(environ)
    try:
        return 0.0 if folder is None else folder.stat().st_mtime
    except OSError:
        return 0.0


def read_site_entries(environ: Mapping[str, str], workdir: Path, matches: Callable[[str], bool]) -> list[JobEntry]:
    """Entries of all users whose job id ``matches``; believed only about run directories of their owner."""
    folder = _site_folder(environ, workdir)
    return [] if folder is None else _read_entries(folder, matches, _owns)


def _owns(owner: int, run_dir: str) -> bool:
    try:
        return os.stat(run_dir).st_uid == owner
    except OSError:
        return False


def _own_folder(environ: Mapping[str, str]) -> Path | None:
    folder = user_state_folder(environ)
    return Path(folder, "runs") if folder else None


def _site_folder(environ: Mapping[str, str], workdir: Path) -> Path | None:
    try:
        return find_registry_dir(environ, workdir)
    except LauncherError:
        return None  # commands that launch a job report the cluster file


def _file_name(entry: JobEntry) -> str:
    """Name with the job id, which other clusters and earlier years may have used for other directories too."""
    digest = hashlib.sha256(entry.run_dir.encode("utf-8", "surrogateescape")).hexdigest()[:_HASH_LENGTH]
    return f"{entry.job_id}-{digest}.json"


def _own_files(folder: Path) -> list[tuple[float, Path]]:
    """Files of this user by age, newest first."""
    with os.scandir(folder) as found:
        facts = [(entry.stat(follow_symlinks=False), entry.path) for entry in found if entry.name.endswith(".json")]
    own = ((status.st_mtime, Path(path)) for status, path in facts if status.st_uid == os.geteuid())
    return sorted(own, reverse=True)


def _remove_oldest(folder: Path) -> None:
    """Make room for one more, of jobs that have ended if there are enough of them.

    An old job on a file system that hangs does not delay a launch: it may still run.
    """
    older = [path for _, path in _own_files(folder)[MOST_ENTRIES - 1 :]]
    signs = {**dict.fromkeys(older, 1), **dict(read_some(older, _sign_of_life)[0])}
    kept = sorted(filter(signs.get, signs), key=lambda path: -signs[path])[:MOST_OLDER]  # the newest ones first
    for path in signs.keys() - set(kept):
        path.unlink(missing_ok=True)


def _sign_of_life(path: Path) -> int:
    """2 for a job with sidecars, also in a later attempt, 1 for any other without a report, 0 for one that has ended.

    A sweep or pipeline never has a report of its own, nor has a job that was cancelled while it waited.
    """
    try:
        run_dir = Path(_read_entry(path)[1].run_dir)
    except (OSError, ValueError, RecursionError):
        return 0  # no entry for anybody
    try:
        if (run_dir / run_files.TARGETS_FILE).exists():
            return 2
        return int(run_dir.exists() and not (run_dir / run_files.REPORT_FILE).exists())
    except OSError:
        return 1  # it may be readable later


def _read_entries(
    folder: Path, matches: Callable[[str], bool], is_trusted: Callable[[int, str], bool]
) -> list[JobEntry]:
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith(".")]
    except OSError:
        return []
    found = []
    for name in names:
        if matches(name[: -len(_SUFFIX)]):
            try:
                owner, entry = _read_entry(folder / name)
            except (OSError, ValueError, RecursionError):
                continue
            if is_trusted(owner, entry.run_dir):
                found.append(entry)
    return sorted(found, key=lambda entry: -entry.submitted)


def _read_entry(path: Path) -> tuple[int, JobEntry]:
    """The owner of a file, and its entry. Raises OSError and ValueError."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, encoding="utf-8", errors="surrogateescape") as lines:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise ValueError("not an entry")
        entry = JobEntry.from_json(json.loads(lines.read()))
    run_files.require_name(entry.run_dir)
    return status.st_uid, entry
