"""State of a job in Slurm's queue, polled rarely to spare the controller."""

import os
import time
from pathlib import Path
from typing import NamedTuple

from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import submitted_cluster

QUERY_INTERVAL_S = 30.0  # shortest interval between two queries


class QueueState(NamedTuple):
    """Answer of squeue."""

    state: str | None  # the base state; empty if the job is not in the queue, None if unknown
    reason: str | None = None  # why it does not run, such as `Dependency`; None without a reason


class SlurmQueue:
    """Queries the state of one job."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._queried_at = float("-inf")
        self._state = QueueState(None)

    def invalidate(self) -> None:
        """Make the next call query Slurm again."""
        self._queried_at = float("-inf")

    def read(self) -> QueueState:
        """Return the state, at most ``QUERY_INTERVAL_S`` old."""
        if time.monotonic() - self._queried_at < QUERY_INTERVAL_S:
            return self._state
        reader = SlurmReader(None, submitted_cluster(self._run_dir), os.environ)
        try:
            rows = reader.queue_of([job_id_of(self._run_dir)])
            # of the components of a heterogeneous job the first one has the batch step
            self._state = QueueState(rows[0].sight.state, rows[0].sight.reason) if rows else QueueState("")
        except SlurmUnansweredError:
            self._state = QueueState(None)
        self._queried_at = time.monotonic()
        return self._state
