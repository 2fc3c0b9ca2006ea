"""Small JSON files in the run directory, through which the parts of a running job communicate.

``workers/{worker}_rank{rank}_a{attempt}_r{restart}.start.json`` and ``.exit.json``
    by the wrapper of a worker, at its start and end.
``state.json``
    by the orchestrator: phase of the job and, during a stop, its reason.
``sidecars/{node}.json``
    by each sidecar: its listen address.
``status/{node}.json``
    by each sidecar: its latest status; the last one is marked final.
``progress/{node}_{worker}.jsonl``
    by a worker that reports its own progress, one file per run.
``nodes/{node}.json``
    on each node before anything else of a job with ports: its address and its busy ports.
``readiness.json``
    by the readiness poller: whether the services are ready, and which are not.
``token``
    by the launcher, for the owner alone: what a request to a sidecar needs to see the job.
``diagnostics/{worker}.json`` and ``.txt``
    after a worker failed or stalled: everything known about it, without secrets.

Standard library only and no dataclasses: a wrapper runs next to every worker and must cost almost nothing.
"""

import errno
import io
import json
import os
import stat
import time
from collections.abc import Callable, Mapping

RECORD_SCHEMA = 1

WORKERS_DIR = "workers"
SIDECARS_DIR = "sidecars"
STATUS_DIR = "status"
DIAGNOSTICS_DIR = "diagnostics"
PROGRESS_DIR = "progress"
NODES_DIR = "nodes"
TASKS_DIR = "tasks"  # in the directory of a sweep: one link per array task, to the run directory of its point
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
EVENTS_FILE = "events.jsonl"
TARGETS_FILE = "targets.json"
ORCHESTRATOR_FILE = "orchestrator.json"
STOP_REQUEST_FILE = "stop_request.json"  # who used `gpujob stop`
READINESS_FILE = "readiness.json"
ABANDONED_FILE = "given_up.json"
REPORT_FILE = "report.json"
ACCOUNTING_FILE = "accounting.json"
LOCK_FILE = ".lock"
TOKEN_FILE = "token"  # noqa: S105 - a name
RESERVE_DIR = ".reserve"
RESERVE_FILES = 8  # inodes for the report, diagnoses, and files that are replaced
RESERVE_BYTES = 512 * 1024  # of all files together
MOST_TOKEN_BYTES = 256
MOST_JSON_BYTES = 64 * 1024 * 1024  # of one file; the report of 10,000 workers has fewer
MOST_NUMBER = 1e300  # in a record that any user may write; Python turns no much longer whole number into a float
FOLDER_MODE = 0o750  # before the umask: others see and write nothing; to show a job is up to its owner
FILE_MODE = 0o644  # likewise


def write_json(
    path: str | os.PathLike[str],
    value: object,
    *,
    durable: bool = True,
    mode: int | None = None,
    default: Callable[[object], object] | None = None,
) -> None:
    """Replace ``path`` by the JSON of ``value``, as ``replace_file`` does. ``default`` is that of ``json.dumps``."""
    text = f"{json.dumps(value, ensure_ascii=False, default=default)}\n"
    replace_file(path, text.encode("utf-8", "surrogateescape"), durable=durable, mode=mode)


def replace_file(
    path: str | os.PathLike[str], content: bytes, *, durable: bool = True, mode: int | None = None
) -> None:
    """Replace ``path`` atomically, also in a folder in which others may write.

    ``durable`` makes it survive a power cut; files rewritten within seconds need not. ``mode`` applies whatever the
    umask; None is `FILE_MODE` less the umask.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE if mode is None else mode)

    target = os.fspath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
    out = open(temporary, "xb", opener=opener)  # noqa: SIM115 - outside try: a file that exists is not ours to remove
    try:
        with out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            out.write(content)
            out.flush()
            if durable:
                os.fsync(out.fileno())
        os.replace(temporary, target)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # its directory was removed
        raise


def is_full(error: OSError) -> bool:
    """Whether a write failed since no space, inode or quota is left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_json_with_reserve(
    run_dir: str | os.PathLike[str] | None,
    path: str | os.PathLike[str],
    value: object,
    *,
    spare: str | os.PathLike[str] | None = None,
    durable: bool = True,
) -> bool:
    """Call ``write_json`` for a file that must not be lost. Return whether its file system had room for it.

    On a full disk, write into ``spare``, a file that has a block and an inode: ``path`` itself, or one that is worth
    less and becomes the same file. If that is not possible, release the reserve of ``run_dir`` and try again.
    """
    try:
        write_json(path, value, durable=durable)
    except OSError as error:
        if not is_full(error):
            raise
        if spare is None or not _overwrite(spare, path, value):
            if run_dir is None or not release_reserve(run_dir):
                raise
            write_json(path, value, durable=durable)
        return False
    return True


def _overwrite(spare: str | os.PathLike[str], path: str | os.PathLike[str], value: object) -> bool:
    """Write JSON into a file that exists, without another block, and give it the name ``path`` too. Return success.

    A reader that comes in between finds JSON or none, since blanks after the value replace the rest of the old one.
    """
    content = f"{json.dumps(value, ensure_ascii=False)}\n".encode("utf-8", "surrogateescape")
    temporary = f"{os.fspath(path)}.{os.urandom(8).hex()}.tmp"
    try:
        file = os.open(spare, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            size = os.fstat(file).st_size
            if len(content) > size:
                os.posix_fallocate(file, 0, len(content))  # fails before anything is lost
            os.pwrite(file, content.ljust(size), 0)
            os.fsync(file)
        finally:
            os.close(file)
        if spare != path:
            os.link(spare, temporary)
            os.replace(temporary, path)
    except OSError:
        return False
    return True


def write_json_if_absent(path: str | os.PathLike[str], value: object) -> bool:
    """Call ``write_json`` unless the file exists. Return whether it was written."""
    target = os.fspath(path)
    mine = os.path.join(os.path.dirname(target), f".{os.urandom(8).hex()}.new")
    write_json(mine, value)
    try:
        os.link(mine, target)
    except FileExistsError:
        return False
    finally:
        os.unlink(mine)
    return True


def open_with_file_mode(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)``; a new one has `FILE_MODE` less the umask."""
    return os.open(path, flags, FILE_MODE)


def append_to(run_dir: str | os.PathLike[str], name: str | os.PathLike[str]) -> io.BufferedWriter:
    """Open a log of the run directory for more lines, on a full disk with the reserve. Raises OSError."""
    path = os.path.join(run_dir, name)
    try:
        return open(path, "ab", opener=_open_own)
    except OSError as error:
        if not is_full(error) or not release_reserve(run_dir):
            raise
    return open(path, "ab", opener=_open_own)


def _open_own(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)``, but no link: in the directory others may write."""
    return open_with_file_mode(path, flags | os.O_NOFOLLOW)


def make_reserve(run_dir: str | os.PathLike[str]) -> None:
    """Reserve space and inodes for records and report, in case the job fills its disk. Raises OSError."""
    folder = os.path.join(run_dir, RESERVE_DIR)
    os.makedirs(folder, FOLDER_MODE, exist_ok=True)
    try:
        for number in range(RESERVE_FILES):
            with open(os.path.join(folder, str(number)), "wb", opener=open_with_file_mode) as out:
                out.write(b"\0" * (RESERVE_BYTES // RESERVE_FILES))
    except OSError:
        release_reserve(run_dir)  # others need what is left
        raise


def release_reserve(run_dir: str | os.PathLike[str]) -> bool:
    """Delete the reserve. Return whether there was one."""
    folder = os.path.join(run_dir, RESERVE_DIR)
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for remove, path in [*((os.unlink, os.path.join(folder, name)) for name in names), (os.rmdir, folder)]:
        try:
            remove(path)
        except OSError:
            pass  # another process of the job has just released it
    return True


def make_token(run_dir: str | os.PathLike[str]) -> None:
    """Write the job's token, unless it has one."""
    path = os.path.join(run_dir, TOKEN_FILE)
    if not os.path.lexists(path):
        replace_file(path, f"{os.urandom(32).hex()}\n".encode("ascii"), mode=0o600)


def read_token(run_dir: str | os.PathLike[str]) -> str | None:
    """Read the job's token; None if there is none for this user."""
    try:
        with open_regular(os.path.join(run_dir, TOKEN_FILE)) as source:
            return source.read(MOST_TOKEN_BYTES).decode("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read it. Raises OSError, also for anything else.

    The directory may be another user's: nobody waits for a pipe there, or reads a device.
    """
    try:
        source = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    except ValueError as error:  # a record names it, with NUL or half a character (a surrogate)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from error
    if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
        source.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return source


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def require_name(path: str) -> None:
    """Raise ValueError if no file can have this name, as with NUL or half a character (a surrogate)."""
    if b"\0" in os.fsencode(path):
        raise ValueError(f"{path!r} is not the name of a file")


def read_json_text(path: str | os.PathLike[str]) -> str:
    """Read a file of JSON of ours. Raises OSError, also if it is no regular file or larger than any of ours."""
    with open_regular(path) as source:
        size = os.fstat(source.fileno()).st_size
        if size > MOST_JSON_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
        return source.read(size).decode("utf-8", "surrogateescape")  # a larger bound would be reserved as memory


def read_json(path: str | os.PathLike[str]) -> dict[str, object] | None:
    """Read the object in ``path``; None if the file is absent or contains no JSON object."""
    try:
        value = json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError):  # the last if it is nested deeper than anything we write
        return None
    return value if isinstance(value, dict) else None


class JobStateFile:
    """``state.json`` of a running job. A file server may fail for a moment, which must not change the phase."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._path = os.path.join(run_dir, STATE_FILE)
        self._last: dict[str, object] = {}

    def read(self) -> dict[str, object]:
        """What the file contains, or contained when it could last be read; empty before."""
        found = read_json(self._path)
        self._last = self._last if found is None else found
        return self._last


def record_name(worker: str, rank: int, attempt: int, restart: int) -> str:
    """Return the stem of the start and exit record of one run of a task."""
    return f"{worker}_rank{rank}_a{attempt}_r{restart}"


def write_job_state(
    run_dir: str,
    phase: str,
    stop: dict[str, object] | None = None,
    *,
    workers_ended: bool = False,
    attempt: int = 0,
    time_limit_end: float | None = None,
    warning: Mapping[str, object] | None = None,
) -> bool:
    """Publish the phase of the job, and whether all its workers have ended. Return whether the disk had room for it.

    ``stop`` is set while the job is being stopped: ``{"reason", "cause", "time"}``. The reason is an exit reason that
    the workers inherit, the cause a sentence for people. ``kill_at`` is when the remaining workers are killed. ``rank``
    and ``restart`` name the worker whose end caused the stop, if any. ``time_limit_end``, in epoch seconds: of a limit
    that Slurm has changed while the job runs. ``warning`` is the signal before the time limit that workers got:
    ``{"signal", "time"}``. Raises OSError.
    """
    path = os.path.join(run_dir, STATE_FILE)
    state = {"schema": RECORD_SCHEMA, "attempt": attempt, "phase": phase, "stop": stop, "workers_ended": workers_ended}
    known = {"time_limit_end": time_limit_end, "warning": warning}
    optional = {name: value for name, value in known.items() if value is not None}
    return write_json_with_reserve(None, path, {**state, **optional, "time": time.time()}, spare=path)
