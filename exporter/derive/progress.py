"""From positions in a log to work done: resumes, restarts and counters that fall."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Progress of one worker over all its runs.

    ``position`` is where the work stands, ``processed`` what was done since the job started and
    never falls. A position that falls is a reset, not negative work; one that a resume announces
    is work of an earlier run. Both are None, and so is ``last_rise``, before the first position.
    """

    position: int | None = None
    total: int | None = None
    processed: int | None = None
    last_rise: float | None = None
    _from: int = 0

    def begin_run(self) -> None:
        """A new run of the worker: its first position counts from zero, unless it says that it resumes."""
        self._from = 0

    def resume(self, done: int, total: int | None) -> None:
        """The worker says that it goes on at ``done``."""
        self.position = self._from = done
        self.total = total if total is not None else self.total
        if self.processed is None:
            self.processed = 0

    def update(self, now: float, done: int, total: int | None) -> None:
        """The worker says that ``done`` of ``total`` items are done."""
        rise = max(0, done - self._from)
        if rise or self.position is None:
            self.processed = (self.processed or 0) + rise
        if rise:
            self.last_rise = now
        self.position = self._from = done
        self.total = total if total is not None else self.total


def expected_items(total_of_job: int | None, tasks: int, rank: int) -> int | None:
    """Share of the task with this rank when a job's items are dealt out in turn; None without a total."""
    if total_of_job is None or tasks <= 0:
        return None
    return total_of_job // tasks + (rank < total_of_job % tasks)
