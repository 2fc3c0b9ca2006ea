"""How a job stands in Slurm's queue, asked rarely: controllers suffer from watchers."""

import time
from pathlib import Path
from typing import NamedTuple

from launcher.errors import SlurmError
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import submitted_cluster
from launcher.steps.slurm_steps import cluster_option, run_command

EVERY_S = 30.0  # at least this long between two questions
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
"""Slurm's states of a job before it runs (squeue(1)), the first time or again."""
NO_REASON = ("", "None", "(null)")  # what squeue prints for a job that nothing holds back


class QueueState(NamedTuple):
    """What squeue says of a job."""

    state: str | None  # an empty text when the job is not there, None when nobody can tell
    reason: str | None = None  # why it does not run, as in `Dependency`; None where Slurm gives no reason


def parse_queue(text: str) -> QueueState:
    """The first component's line of ``squeue -h -o '%T|%r'``.

    Components of a heterogeneous job have a line each, the first has the batch step; before them is the name of a
    cluster that was asked for, whatever ``-h`` says.
    """
    line = next((line for line in text.split("\n") if line and not line.startswith("CLUSTER:")), "")
    state, _, reason = line.partition("|")
    return QueueState(state, None if reason.strip() in NO_REASON else reason.strip())


class SlurmQueue:
    """Asks for one job."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._asked = float("-inf")
        self._found = QueueState(None)

    def forget(self) -> None:
        """What it was before is of no use any more: the next look asks."""
        self._asked = float("-inf")

    def look(self) -> QueueState:
        """How it stands, as it was at most ``EVERY_S`` ago."""
        if time.monotonic() - self._asked < EVERY_S:
            return self._found
        job_id, on = job_id_of(self._run_dir), cluster_option(submitted_cluster(self._run_dir))
        try:
            self._found = parse_queue(run_command(["squeue", *on, "-h", "-j", job_id, "-o", "%T|%r"], timeout_s=10.0))
        except SlurmError as error:
            self._found = QueueState("" if "Invalid job id" in str(error) else None)
        self._asked = time.monotonic()
        return self._found
