"""Earlier runs of a job, as priors for the next run, and earlier attempts of this one.

Runs are in a small file of the user, in ``GPUJOB_HISTORY_DIR``; if that is empty there is none. Without it they are in
``gpujob/history`` of ``$XDG_STATE_HOME``, or else of ``~/.local/state``. A missing or read-only home and a file with
other contents are not errors. Attempts are in the run directory.
"""

import hashlib
import json
import logging
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import from_json
from exporter.contract.status import WorkerStatus
from exporter.contract.user_state import make_private_folder, user_state_folder
from exporter.progress.eta.prior import RunPrior

HISTORY_SCHEMA = 1
HISTORY_VARIABLE = "GPUJOB_HISTORY_DIR"
MOST_RUNS = 5
MOST_BYTES = 64 * 1024
_NAME_LENGTH = 64
_HASH_LENGTH = 12

log = logging.getLogger("gpujob.history")
_reported_paths: set[Path] = set()  # files with a logged warning about other contents


@dataclass(frozen=True)
class RunHistory:
    time: float  # when it ended, epoch seconds
    workers: int
    total: int | None  # items of the whole job, if known
    seconds: float  # duration
    prior: Mapping[str, Mapping[str, object]]  # priors for the workers of each role, as JSON


def build_run_history(
    workers: Sequence[WorkerStatus], total: int | None, seconds: float, now: float
) -> RunHistory | None:
    """Create from the last status of the workers of a completed run; None if no worker has a prior.

    The median worker represents its role.
    """
    of_roles: dict[str, list[Mapping[str, object]]] = {}
    for worker in workers:
        if worker.prior:
            of_roles.setdefault(worker.role, []).append(worker.prior)
    if not of_roles:
        return None
    middle = {
        role: sorted(priors, key=lambda prior: RunPrior.from_json(prior).pace)[len(priors) // 2]
        for role, priors in of_roles.items()
    }
    return RunHistory(now, len(workers), total, seconds, middle)


def run_history_path(name: str, environ: Mapping[str, str]) -> Path | None:
    """History file for jobs of this name; None if there is no place for one."""
    state = user_state_folder(environ)
    folder = environ.get(HISTORY_VARIABLE, f"{state}/history" if state else "")
    if not folder or "\0" in folder:
        return None
    word = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:_NAME_LENGTH].strip("._") or "job"
    number = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    return Path(folder, f"{word}-{number}.json")


def read_run_history(name: str, environ: Mapping[str, str]) -> tuple[RunHistory, ...]:
    """The last completed runs of jobs of this name, oldest first."""
    path = run_history_path(name, environ)
    return _read(path) if path is not None else ()


def write_run_history(name: str, environ: Mapping[str, str], run: RunHistory) -> bool:
    """Add a run to the history of its job and drop the oldest; whether it was saved.

    If two jobs end at the same time, one run may be lost.
    """
    path = run_history_path(name, environ)
    if path is None:
        return False
    runs = [*_read(path), run][-MOST_RUNS:]
    while len(text := _render(name, runs)) > MOST_BYTES:
        del runs[0]
        if not runs:
            return False
    try:
        make_private_folder(path.parent)
        run_files.replace_file(path, text, durable=False, mode=0o600)
    except OSError as error:
        log.info("the run history cannot be saved: %s: %s", path, error.strerror)
        return False
    return True


def read_earlier_attempts(run_dir: Path, attempt: int) -> Iterator[list[dict[str, object]]]:
    """The report of each earlier attempt, newest first, or its statuses if it has no report.

    Files are read on demand. The orchestrator added the attempt to their names, since sidecars of this attempt write to
    ``status/``.
    """
    for number in range(attempt - 1, -1, -1):
        report = run_files.read_json(run_dir / f"{Path(run_files.REPORT_FILE).stem}_a{number}.json")
        if report is not None:
            yield [report]
        else:
            files = sorted((run_dir / f"{run_files.STATUS_DIR}_a{number}").glob("*.json"))
            yield [status for file in files if (status := run_files.read_json(file)) is not None]


def _render(name: str, runs: list[RunHistory]) -> bytes:
    body = {"schema": HISTORY_SCHEMA, "job_name": name, "runs": [asdict(run) for run in runs]}
    return json.dumps(body).encode("ascii") + b"\n"


def _read(path: Path) -> tuple[RunHistory, ...]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return ()  # reading from a pipe would not end
        with path.open("rb") as source:
            text = source.read(MOST_BYTES + 1)
    except OSError:
        return ()
    try:
        if len(text) > MOST_BYTES:
            raise ValueError("too large")
        return _parse_runs(text)[-MOST_RUNS:]
    except (ValueError, OverflowError, RecursionError):
        if path not in _reported_paths:
            _reported_paths.add(path)
            log.warning("%s is not a run history and is not used; the next completed run replaces it", path)
        return ()


def _parse_runs(text: bytes) -> tuple[RunHistory, ...]:
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("schema") != HISTORY_SCHEMA:
        raise ValueError("not a run history")
    runs = from_json(tuple[RunHistory, ...], body.get("runs"), "runs")
    numbers = [number for run in runs for number in (run.time, run.workers, run.seconds, run.total or 0)]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("an impossible number")
    if not all(isinstance(number, int) for run in runs for number in (run.workers, run.total or 0)):
        raise ValueError("a count with a fraction")
    return runs
