"""State of a job in Slurm's queue, polled rarely to spare the controller."""

import time
from pathlib import Path
from typing import NamedTuple

from launcher.errors import SlurmError
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import submitted_cluster
from launcher.steps.slurm_steps import cluster_option, run_command

QUERY_INTERVAL_S = 30.0  # shortest interval between two queries
# states before a job runs, also after a requeue (squeue(1))
WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
NO_REASON = ("", "None", "(null)")  # printed by squeue if nothing holds the job back


class QueueState(NamedTuple):
    """Answer of squeue."""

    state: str | None  # empty if the job is not in the queue, None if unknown
    reason: str | None = None  # why it does not run, such as `Dependency`; None without a reason


def parse_queue(text: str) -> QueueState:
    """Parse the first component's line of ``squeue -h -o '%T|%r'``.

    Each component of a heterogeneous job has a line, and the first has the batch step. Despite ``-h``, a line
    with the cluster's name comes first if one was selected.
    """
    line = next((line for line in text.split("\n") if line and not line.startswith("CLUSTER:")), "")
    state, _, reason = line.partition("|")
    return QueueState(state, None if reason.strip() in NO_REASON else reason.strip())


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
        job_id, on = job_id_of(self._run_dir), cluster_option(submitted_cluster(self._run_dir))
        try:
            self._state = parse_queue(run_command(["squeue", *on, "-h", "-j", job_id, "-o", "%T|%r"], timeout_s=10.0))
        except SlurmError as error:
            self._state = QueueState("" if "Invalid job id" in str(error) else None)
        self._queried_at = time.monotonic()
        return self._state
