"""Stops of the whole job that a collector finds between its reads, as by `scontrol suspend`. Pure."""

from exporter.contract.lazy_dataclass import dataclass

STOPPED_S = 60.0  # a read that begins later than this was held up by a stop of the job


@dataclass(slots=True)
class StopDetector:
    """Finds for how long the sidecar was stopped, since each collector reads at its interval."""

    interval_s: float
    next_read_at: float | None = None  # monotonic clock; None after a read that was not completed

    def begin_read(self, monotonic: float) -> float:
        """Seconds for which the sidecar was stopped before this read; 0 if it was not."""
        late_s = 0.0 if self.next_read_at is None else monotonic - self.next_read_at
        self.next_read_at = None
        return late_s if late_s > STOPPED_S else 0.0

    def end_read(self, monotonic: float) -> None:
        """Take the end of a read."""
        self.next_read_at = monotonic + self.interval_s
