"""Run directories as a hub reads them: report, targets and statuses, if they belong to the user of the job."""

import json
import logging
import math
import os
import pwd
import socket
import stat
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.budget import Budget
from exporter.contract.identity import safe_label
from exporter.contract.process_identity import read_start_ticks
from exporter.contract.records import Record
from exporter.contract.target_files import SCRAPE_JOB, TargetGroup, parse_targets, read_target_file, remove_site_targets
from exporter.hub.jobs import Outcome
from exporter.hub.runs.reports import Run
from exporter.hub.runs.stale_runs import GONE_AFTER_S

YOUNG_S = 600.0  # since its submission, while a run is read as often as one that has not ended
FRESH_S = 2.0  # a directory that changed so recently may change again without another time
MOST_BYTES = 16 * 1024  # of an entry
MOST_REPORT_BYTES = 32 * 1024 * 1024  # that of 1,000 workers has some megabytes
MOST_REPORT_VALUES = 1_000_000  # each may take 100 bytes of memory; that of 10,000 workers has half as many
MOST_STATUS_BYTES = 8 * 1024 * 1024  # that of a node with 64 workers has some hundred kilobytes
MOST_NODES = 10_000  # of a job, whose statuses are looked at

log = logging.getLogger("gpujob.hub")


class Entry(Record):
    """What a hub needs of the entry of a job."""

    job_id: str
    run_dir: str
    submitted: float
    job_name: str = ""
    budget: Budget | None = None
    notify: str = ""
    slurm_cluster: str | None = None  # None if it is not known, or without Slurm


class _Process(Record):
    """What a hub needs of ``orchestrator.json``."""

    pid: int = 0
    start_ticks: int | None = None
    host: str = ""

    def has_ended(self) -> bool:
        """Whether it ran on this machine, and is gone."""
        ticks = read_start_ticks(self.pid)
        return self.host == socket.gethostname() and (ticks is None or self.start_ticks not in (None, ticks))


class RunDirectory:
    """What a hub reads of one run: its report and its targets, if they belong to its user."""

    def __init__(self, uid: int, entry: Entry, own_uid: int) -> None:
        self.uid, self.entry, self._own_uid = uid, entry, own_uid
        self.path = entry.run_dir  # without the link of an array task, once it was read
        self.user = _user_name(uid)
        self.job_ids: Mapping[str, float] = {entry.job_id: entry.submitted}  # and when each was submitted
        self.groups: tuple[TargetGroup, ...] = ()
        self.groups_at = 0.0  # when they were written
        self.removed_at = 0.0  # those that were removed from the target directory
        self.gone_since: float | None = None  # of a job without Slurm: when its processes were first gone
        self.outcome: Outcome | None = None
        self.problem: str | None = None
        self.read_at = -math.inf
        self.idle: tuple[int, float | None] = 0, None  # of an attempt so far: GPU seconds that sidecars saw idle
        self.idle_read_at = -math.inf
        self._mtime_ns = 0

    @property
    def run(self) -> Run:
        entry, is_monitored = self.entry, any(each.labels.get("job") == SCRAPE_JOB for each in self.groups)
        known = (entry.job_id, self.user, self.path, entry.submitted)
        return Run(*known, is_monitored, self.outcome, entry.job_name, entry.budget, entry.notify, self.job_ids)

    @property
    def is_found(self) -> bool:
        """Whether its directory is known: that of a point only once its link was read."""
        return "_" not in self.entry.job_id or self.path != self.entry.run_dir

    @property
    def is_young(self) -> bool:
        """Whether it was submitted a while ago: its job may run before Slurm's queue is read again."""
        return time.time() - self.entry.submitted < YOUNG_S

    def read(self) -> None:
        """Read the files again if the directory has changed."""
        self.problem = None
        try:
            mtime_ns = os.stat(self.entry.run_dir).st_mtime_ns
        except OSError:
            self.groups = ()  # removed or unreadable; what is known about its end is kept
            return
        if self.groups and not self._is_of_slurm:
            self.gone_since = (self.gone_since or time.time()) if self._is_gone() else None
        if mtime_ns == self._mtime_ns:
            return
        self.path = _without_link(self.entry.run_dir)
        self.groups = self._read_groups()
        self.outcome = self._read_outcome() or self.outcome
        self._mtime_ns = mtime_ns if time.time() - mtime_ns / 1e9 > FRESH_S and self.problem is None else 0

    def read_idle(self, attempt: int) -> None:
        """Read how long sidecars have seen idle GPUs so far, from their status files."""
        from exporter.contract.status import NodeStatus  # lazy: 1 MiB, which hubs need only for this question
        from exporter.gpus.analysis.node_status import account_gpus  # lazy: as above

        self.idle_read_at, statuses = time.monotonic(), dict[str, NodeStatus]()
        folder = Path(self.entry.run_dir, run_files.STATUS_DIR)
        try:
            names = [name for name in islice(os.listdir(folder), MOST_NODES) if name.endswith(".json")]
        except OSError:
            return
        for name in names:
            try:
                uid, text = read_text(folder / name, MOST_STATUS_BYTES)
                if uid == self.uid and text.count(",") <= MOST_REPORT_VALUES:
                    statuses[name] = NodeStatus.from_json(json.loads(text))
            except (OSError, ValueError, RecursionError):
                continue  # of another version, or just replaced
        gpus = account_gpus({name: each for name, each in statuses.items() if each.attempt == attempt})
        self.idle = attempt, None if gpus is None else gpus.idle_s

    @property
    def _is_of_slurm(self) -> bool:
        return self.entry.job_id[:1].isdigit()

    def _is_gone(self) -> bool:
        """Whether the process that leads a job without Slurm has ended, and no sidecar writes any more."""
        try:
            uid, text = read_text(Path(self.entry.run_dir, run_files.ORCHESTRATOR_FILE), MOST_BYTES)
            process = _Process.from_json(json.loads(text)) if uid == self.uid else None
            with os.scandir(Path(self.entry.run_dir, run_files.STATUS_DIR)) as statuses:
                written = max((each.stat().st_mtime for each in islice(statuses, MOST_NODES)), default=0.0)
        except (OSError, ValueError, RecursionError):
            return False
        return process is not None and process.has_ended() and time.time() - written > GONE_AFTER_S

    def is_stale(self, written_before: float | None) -> bool:
        """Whether nobody serves its targets: the job is gone, and could not remove them.

        ``written_before`` is from Slurm: targets that were written earlier are of a job or attempt that has ended.
        """
        if written_before is not None and self.groups_at < written_before:
            return True
        return self.gone_since is not None and time.time() - self.gone_since > GONE_AFTER_S

    def remove_site_targets(self, target_dir: Path, end: float) -> None:
        """Remove the file of this job from the target directory."""
        try:
            remove_site_targets(target_dir, self.groups, self.uid, end)
        except OSError as error:
            log.warning("%s: targets of a job that has ended cannot be removed: %s", target_dir, error.strerror)
        self.removed_at = self.groups_at

    def _read_groups(self) -> tuple[TargetGroup, ...]:
        path = Path(self.entry.run_dir, run_files.TARGETS_FILE)
        try:
            self.groups_at = path.stat().st_mtime
            uid, text = read_target_file(path)
            if uid != self.uid:
                return ()
            found = parse_targets(text, with_path=uid == self._own_uid)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return ()  # it has no sidecars now, or shows its directory to nobody
        except (OSError, ValueError, RecursionError) as error:
            self.problem = f"{path}: {getattr(error, 'strerror', None) or error}; not used"
            return ()
        if uid == self._own_uid:
            return tuple(found)
        label = safe_label(self.user)
        return tuple(each._replace(labels={**each.labels, "user": label}) for each in found)

    def _read_outcome(self) -> Outcome | None:
        try:
            uid, text = read_text(Path(self.entry.run_dir, run_files.REPORT_FILE), MOST_REPORT_BYTES)
            return parse_outcome(text, self.entry.job_id) if uid == self.uid else None
        except (OSError, ValueError, RecursionError):
            return None  # none yet, or of a version that we do not know


def _without_link(path: str) -> str:
    """The run directory of a point, which the directory of its sweep links from the id of its array task."""
    try:
        return str(Path(path).parent.with_name(Path(os.readlink(path)).name))
    except (OSError, ValueError):
        return path  # of a job


def read_run(uid: int, entry: Entry) -> Run:
    """A run with its outcome, read once."""
    found = RunDirectory(uid, entry, uid)
    found.read()
    return found.run


def parse_outcome(text: str, job_id: str) -> Outcome | None:
    """What ``report.json`` says of an attempt that has ended for good. Raises ValueError."""
    if text.count(",") > MOST_REPORT_VALUES:
        raise ValueError(f"has more than {MOST_REPORT_VALUES} values")
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("requeued") or body.get("job_id") != job_id:
        return None
    gpus = body.get("gpus")
    wanted = {**body, **(gpus if isinstance(gpus, dict) else {})}
    return Outcome.from_json({name: wanted[name] for name in Outcome.FIELDS if name in wanted}, "report")


def read_text(path: Path, most_bytes: int) -> tuple[int, str]:
    """The owner and the text of a regular file. Raises OSError and ValueError."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, encoding="utf-8", errors="surrogateescape") as lines:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise ValueError("not a file of this kind")
        return status.st_uid, lines.read()


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
