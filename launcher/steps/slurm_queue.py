"""State of a job in Slurm's queue, out of a hub or the shared answer of squeue, to spare the controller."""

import os
import time
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.report import Report
from exporter.slurm.commands_reader import SlurmUnansweredError
from exporter.slurm.queue import AttemptSnapshot, QueueRow, is_of_submission, part_rows
from exporter.slurm.sources.cached_answers_reader import QueueAnswer
from exporter.slurm.sources.rest_reader import slurm_reader
from exporter.slurm.sources.shared_answers_reader import LEAST_S, QUEUE_MAX_AGE_S, read_shared_queue
from exporter.slurm.states import ENDS, RETURNING
from exporter.workers.slurm_end_notice import REQUEUED
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import read_submitted
from launcher.rundir.rundir import user_name

READ_INTERVAL_S = 5.0  # shortest time between two reads of the answer, which may be long
MOST_AHEAD_S = 30.0  # of the clock of a node; a moment that is later says nothing
_BEGAN = time.time()  # this command: its first answer is a new one, since a report is about what is true now


class QueueState(NamedTuple):
    """What the queue says of a job."""

    state: str | None  # the base state; empty if the job is not in the queue, None if unknown
    reason: str | None = None  # why it does not run, such as `Dependency`; None without a reason
    restarts: int = 0  # how often Slurm has requeued it


def is_queued_again(at: QueueState | AttemptSnapshot | None, attempt: int, *, requeued: bool | None) -> bool:
    """Whether the queue has the job for an attempt after this one, which has ``requeued`` the job itself or not.

    While the next attempt starts it is running for Slurm, which has counted the restart, but has written nothing yet.
    """
    return at is not None and bool(at.state) and (requeued or at.state == "PENDING" or at.restarts > attempt)


def is_over(report: Report | None) -> bool:
    """Whether a job has ended for good. If not, Slurm's queue says whether it runs again."""
    if report is None or report.requeued or report.state in RETURNING:
        return False
    return report.stopped is None or not report.stopped.cause.startswith(REQUEUED[1])


def read_unfinished(user: str, cluster: str | None, since: float) -> tuple[QueueRow, ...]:
    """Jobs of a user that have not ended, by an answer that is not older than ``since``.

    Raises SlurmUnansweredError, also if only an older answer is known.
    """
    answer = _read_answer(user, cluster, usable_since(since))
    if (problem := unusable(answer, usable_since(since))) is not None:
        command, _, problem = problem.partition(" ")
        raise SlurmUnansweredError(command, problem)
    return unfinished(answer)


def _read_answer(user: str, cluster: str | None, since: float) -> QueueAnswer:
    """The queue, by an answer of after the beginning of this command. Raises SlurmUnansweredError."""
    least_s = LEAST_S if since > _BEGAN else 0.0
    return read_shared_queue(
        slurm_reader(user, cluster, os.environ), os.environ, since=max(since, _BEGAN), least_s=least_s
    )


def usable_since(moment: float) -> float:
    """From when on answers count; 0 if the moment is of a clock that is wrong."""
    now = time.time()
    return min(moment, now) if moment < now + MOST_AHEAD_S else 0.0


def unusable(answer: QueueAnswer, since: float) -> str | None:
    """Why an answer says nothing; None if it does."""
    if answer.problem is None and (answer.as_of or 0.0) < since:
        return f"{answer.source} has not been asked since then"
    return answer.problem


def unfinished(answer: QueueAnswer) -> tuple[QueueRow, ...]:
    return tuple(row for row in answer.rows if row.snapshot.state not in ENDS)


def is_own(row: QueueRow, submitted: float | None) -> bool:
    """Whether a row with the id of a job is that job, submitted at this time if that is known: ids are used again."""
    return is_of_submission(row.snapshot.submitted, row.snapshot.restarts, submitted)


class SlurmQueue:
    """Reads the state of one job."""

    def __init__(self, run_dir: Path) -> None:
        self._job_id = job_id_of(run_dir)
        submission = run_files.read_json(run_dir / f"{self._job_id}.json") or {}
        user, cluster = submission.get("user"), submission.get("cluster")
        self._user = str(user or user_name())
        self._cluster = str(cluster) if cluster else None
        self._submitted = read_submitted(run_dir)
        self._since = self._submitted or 0.0
        self._next_at = float("-inf")
        self._state = QueueState(None)

    def require_since(self, moment: float) -> None:
        """Believe only answers from this moment on: the job has started or ended then."""
        self._since = max(self._since, moment)
        self._next_at = float("-inf")

    def read(self) -> QueueState:
        """Return the state, read again when there may be another answer."""
        if time.monotonic() < self._next_at:
            return self._state
        since, wait_s = usable_since(self._since), QUEUE_MAX_AGE_S
        try:
            answer = _read_answer(self._user, self._cluster, since)
        except SlurmUnansweredError:
            self._state = QueueState(None)
        else:
            if unusable(answer, since) is not None:
                self._state = QueueState(None)
            else:
                found = [row for row in part_rows(unfinished(answer), self._job_id) if is_own(row, self._submitted)]
                # of the components of a heterogeneous job the first one has the batch step
                first = found[0].snapshot if found else AttemptSnapshot("")
                self._state = QueueState(first.state, first.reason, first.restarts)
            if (answer.as_of or 0.0) < since or answer.is_of_hub:
                wait_s = READ_INTERVAL_S
            else:
                wait_s = min(max(answer.tried + QUEUE_MAX_AGE_S - time.time(), READ_INTERVAL_S), QUEUE_MAX_AGE_S)
        self._next_at = time.monotonic() + wait_s
        return self._state
