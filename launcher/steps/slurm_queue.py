"""State of a job in Slurm's queue, out of a hub or the shared answer of squeue, to spare the controller."""

import os
import time
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.slurm.commands_reader import SlurmUnansweredError
from exporter.slurm.queue import QueueRow, part_rows
from exporter.slurm.sources.rest_reader import slurm_reader
from exporter.slurm.sources.shared_look_reader import read_queue_look
from exporter.slurm.states import ENDS
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import user_name

READ_INTERVAL_S = 5.0  # between two reads of the answer, which may be long
MOST_AHEAD_S = 30.0  # of the clock of a node; a moment that is later says nothing


class QueueState(NamedTuple):
    """What the queue says of a job."""

    state: str | None  # the base state; empty if the job is not in the queue, None if unknown
    reason: str | None = None  # why it does not run, such as `Dependency`; None without a reason


def read_unfinished(user: str, cluster: str | None, since: float) -> tuple[QueueRow, ...]:
    """Jobs of a user that have not ended, by an answer that is not older than ``since``.

    Raises SlurmUnansweredError, also if only an older answer is known.
    """
    now = time.time()
    since = min(since, now) if since < now + MOST_AHEAD_S else 0.0
    look = read_queue_look(slurm_reader(user, cluster, os.environ), os.environ, since=since)
    if look.problem is not None or look.as_of is None or look.as_of < since:
        command, _, problem = (look.problem or "squeue has not been asked since then").partition(" ")
        raise SlurmUnansweredError(command, problem)
    return tuple(row for row in look.rows if row.sight.state not in ENDS)


class SlurmQueue:
    """Reads the state of one job."""

    def __init__(self, run_dir: Path) -> None:
        self._job_id = job_id_of(run_dir)
        submission = run_files.read_json(run_dir / f"{self._job_id}.json") or {}
        user, cluster, submitted = (submission.get(name) for name in ("user", "cluster", "submitted"))
        self._user = str(user or user_name())
        self._cluster = str(cluster) if cluster else None
        self._since = submitted if isinstance(submitted, float) else 0.0
        self._read_at = float("-inf")
        self._state = QueueState(None)

    def require_since(self, moment: float) -> None:
        """Believe only answers from this moment on: the job has started or ended then."""
        self._since = max(self._since, moment)
        self._read_at = float("-inf")

    def read(self) -> QueueState:
        """Return the state, read at most ``READ_INTERVAL_S`` ago."""
        if time.monotonic() - self._read_at < READ_INTERVAL_S:
            return self._state
        try:
            found = part_rows(read_unfinished(self._user, self._cluster, self._since), self._job_id)
            # of the components of a heterogeneous job the first one has the batch step
            self._state = QueueState(found[0].sight.state, found[0].sight.reason) if found else QueueState("")
        except SlurmUnansweredError:
            self._state = QueueState(None)
        self._read_at = time.monotonic()
        return self._state
