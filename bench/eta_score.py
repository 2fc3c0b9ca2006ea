"""Our estimator behind the interface of the scorer of progress traces: ``bench.eta_score:Estimator``."""

from exporter.contract.status import EtaEstimate
from exporter.progress.eta.estimator import EstimatorWarnings
from exporter.progress.eta.estimator import EtaEstimator as OneWorker
from exporter.progress.eta.interval import median_seconds_per_item, slowest_eta


class Estimator:
    """A job: one estimator for each worker, the job ends with its slowest."""

    combine = "multi"
    wants_arrival = True

    def __init__(self) -> None:
        self._workers: dict[int, OneWorker] = {}
        self._unfinished: set[int] = set()

    def update(self, t: float, done: float, total: float | None, worker: int = 0, arrival: float | None = None) -> None:
        """A line of one worker."""
        self._workers.setdefault(worker, OneWorker()).update(t, done, total, arrival)
        if total is not None and done >= total:
            self._unfinished.discard(worker)
        else:
            self._unfinished.add(worker)

    def estimate(self, now: float) -> EtaEstimate | None:
        """Seconds left of the job."""
        peers = (
            median_seconds_per_item(worker.seconds_per_item for worker in self._workers.values())
            if len(self._workers) > 1
            else None
        )
        return slowest_eta(self._workers[name].estimate(now, peers) for name in self._unfinished)

    def alarms(self, now: float) -> EstimatorWarnings:
        """What seems wrong with any of the workers."""
        found = [self._workers[name].alarms(now) for name in self._unfinished]
        return {
            "stalled": any(alarms["stalled"] for alarms in found),
            "slowdown": any(alarms["slowdown"] for alarms in found),
        }
