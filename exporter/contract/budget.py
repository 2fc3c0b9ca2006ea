"""What a job or a user may take before an alert: in the entry of a job, and in the cluster file."""

from collections.abc import Iterator

from exporter.contract.records import Record

HOUR_S = 3600.0
USER_DAYS = 30.0  # in which the use of a user counts


class Budget(Record):
    """The most GPU hours, and the highest list price. None is no limit."""

    gpu_hours: float | None = None
    cost: float | None = None

    def used(self, gpu_seconds: float | None, cost: float | None) -> Iterator[tuple[str, float]]:
        """The used share of each limit, 1 when it is reached, where the use is known."""
        hours = None if gpu_seconds is None else gpu_seconds / HOUR_S
        for kind, amount, limit in (("gpu_hours", hours, self.gpu_hours), ("cost", cost, self.cost)):
            if amount is not None and limit:
                yield kind, amount / limit
