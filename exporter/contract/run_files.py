"""The small JSON files that the parts of a running job leave for each other in the run directory.

``workers/{worker}_rank{rank}_a{attempt}_r{restart}.start.json`` and ``.exit.json``
    written by the wrapper of a worker when it starts and when it ends.
``state.json``
    written by the orchestrator: phase of the job and, once it is being stopped, why.
``sidecars/{node}.json``
    written by each sidecar: where it listens.
``status/{node}.json``
    written by each sidecar: its latest status, the last one marked final.
``progress/{node}_{worker}.jsonl``
    written by a worker that tells its progress itself, one file for each run.
``nodes/{node}.json``
    written on each node before anything else of a job with ports: its address, and which ports are busy.
``readiness.json``
    written by what polls the services of a job: whether they are ready, and who is waited for.
``diagnostics/{worker}.json`` and ``.txt``
    written when a worker has failed or stalled: all that is known about it, secrets left out.

Standard library only and without dataclasses: the wrapper stands beside every
worker of a job and must cost next to nothing.
"""

import errno
import json
import os
import time

RECORD_SCHEMA = 1

WORKERS_DIR = "workers"
SIDECARS_DIR = "sidecars"
STATUS_DIR = "status"
DIAGNOSTICS_DIR = "diagnostics"
PROGRESS_DIR = "progress"
NODES_DIR = "nodes"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
EVENTS_FILE = "events.jsonl"
TARGETS_FILE = "targets.json"
ORCHESTRATOR_FILE = "orchestrator.json"
READINESS_FILE = "readiness.json"
GIVEN_UP_FILE = "given_up.json"
REPORT_FILE = "report.json"
RESERVE_FILE = ".reserve"
RESERVE_BYTES = 512 * 1024


def write_json(path: str | os.PathLike[str], value: object, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by the JSON of ``value`` in one step; a reader sees the old file or the new one.

    ``durable`` also outlives a power cut; what is written again within seconds need not. ``mode`` is that of a new
    file before the umask.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    target = os.fspath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    text = json.dumps(value, ensure_ascii=False)
    try:
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", opener=opener) as out:
            out.write(text)
            out.write("\n")
            out.flush()
            if durable:
                os.fsync(out.fileno())
        os.replace(temporary, target)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # never created, or its directory is gone
        raise


def write_json_with_reserve(run_dir: str | os.PathLike[str], path: str | os.PathLike[str], value: object) -> None:
    """``write_json`` for what must not be lost: on a full disk the run directory's reserve is given up for it."""
    try:
        write_json(path, value)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not release_reserve(run_dir):
            raise
        write_json(path, value)


def write_json_if_absent(path: str | os.PathLike[str], value: object) -> bool:
    """``write_json`` unless the file is there already; whether it was written."""
    target = os.fspath(path)
    mine = f"{target}.{os.getpid()}.new"
    write_json(mine, value)
    try:
        os.link(mine, target)
    except FileExistsError:
        return False
    finally:
        os.unlink(mine)
    return True


def make_reserve(run_dir: str | os.PathLike[str]) -> None:
    """Set space aside for the exit records and the report of a job that fills its disk."""
    with open(os.path.join(run_dir, RESERVE_FILE), "wb") as out:
        out.write(b"\0" * RESERVE_BYTES)


def release_reserve(run_dir: str | os.PathLike[str]) -> bool:
    """Give the reserve up; whether there was one."""
    try:
        os.unlink(os.path.join(run_dir, RESERVE_FILE))
    except OSError:
        return False
    return True


def read_json(path: str | os.PathLike[str]) -> dict[str, object] | None:
    """The object in ``path``, or None when the file is absent or holds no JSON object."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as source:
            value = json.load(source)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def record_name(worker: str, rank: int, attempt: int, restart: int) -> str:
    """Stem of the start and exit record of one run of one task."""
    return f"{worker}_rank{rank}_a{attempt}_r{restart}"


def write_job_state(
    run_dir: str, phase: str, stop: dict[str, object] | None = None, *, workers_ended: bool = False
) -> None:
    """Publish the phase of the job, and whether all its workers have ended.

    ``stop`` is given once the job is being ended: ``{"reason", "cause", "time"}``, where the
    reason is an exit reason that its workers inherit and the cause a sentence for people; with
    ``rank`` and ``restart`` of the worker whose end has led to it, if one has.
    """
    write_json(
        os.path.join(run_dir, STATE_FILE),
        {"schema": RECORD_SCHEMA, "phase": phase, "stop": stop, "workers_ended": workers_ended, "time": time.time()},
    )
