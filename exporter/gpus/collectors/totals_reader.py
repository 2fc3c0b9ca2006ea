"""Totals of each GPU since the start of the job: mean utilization, idle time, peak memory and energy."""

import logging
from dataclasses import field

from exporter.collecting.collector import CollectorContext
from exporter.collecting.saved_state import load_saved_state, save_state
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import RecordError, from_json, to_json
from exporter.gpus.records import GpuState

KIND = "gpu_totals"
# Utilization lost at most by a restart of the sidecar; energy loses nothing, as the counter continues.
SAVE_INTERVAL_S = 15.0
IDLE_RATIO = 0.01  # utilization below which a GPU is idle: a desktop or a monitor draws as much
GAP_S = 30.0  # utilization is unknown between readings further apart

log = logging.getLogger("gpujob.gpus")


@dataclass
class GpuTotal:
    """Totals of one GPU."""

    busy_s: float = 0.0
    known_s: float = 0.0
    idle_s: float = 0.0  # of the known time
    memory_peak_bytes: int | None = None
    energy_j: float | None = None  # since its first reading
    counter_j: float | None = None  # the driver's counter at the last reading
    last: float | None = field(default=None, init=False)  # time of the last known utilization; not restored

    @property
    def utilization_mean_ratio(self) -> float | None:
        """Mean over the known time."""
        return self.busy_s / self.known_s if self.known_s else None

    def update(self, now: float, state: GpuState) -> None:
        """Add a reading."""
        activity = state.activity
        if activity is None:
            self.last = None
            return
        if activity.busy_ratio is not None:
            passed_s = now - self.last if self.last is not None else 0.0
            if 0 < passed_s <= GAP_S:
                self.known_s += passed_s
                self.busy_s += passed_s * activity.busy_ratio
                self.idle_s += passed_s if activity.busy_ratio < IDLE_RATIO else 0.0
            self.last = now
        if activity.memory_used_bytes is not None:
            self.memory_peak_bytes = max(self.memory_peak_bytes or 0, activity.memory_used_bytes)
        if activity.energy_j is not None:
            if self.counter_j is not None:  # a fallen counter was reset
                self.energy_j = (self.energy_j or 0.0) + max(0.0, activity.energy_j - self.counter_j)
            self.counter_j = activity.energy_j


class GpuTotals:
    """Totals by UUID, saved in the run directory for the next sidecar."""

    def __init__(self, context: CollectorContext) -> None:
        identity = context.identity
        self._clock = context.clock
        self._state_args = (context.manifest.run_dir, identity.node, identity.job_id, identity.attempt)
        # None until loaded: not in the constructor, because the run directory may hang.
        self._totals: dict[str, GpuTotal] | None = None
        self._saved_at: float | None = None
        self._save_problem: str | None = None

    def update(self, now: float, state: GpuState, *, is_job_over: bool = False) -> GpuTotal:
        """Add a reading of one GPU and return its total, which no longer changes when the job is ``is_job_over``."""
        if self._totals is None:
            self._totals = self._restore()
        total = self._totals.get(state.gpu.uuid)
        if total is None:
            total = self._totals[state.gpu.uuid] = GpuTotal()
        if not is_job_over:
            total.update(now, state)
        return total

    def save(self) -> None:
        """Save the totals for the next sidecar, at most every `SAVE_INTERVAL_S`."""
        now = self._clock.monotonic()
        if self._totals is None or (self._saved_at is not None and now - self._saved_at < SAVE_INTERVAL_S):
            return
        self._saved_at = now
        body = {uuid: to_json(total) for uuid, total in self._totals.items()}
        problem = save_state(*self._state_args, body, kind=KIND)
        if problem is not None and self._save_problem is None:
            log.warning("GPU totals cannot be saved: %s", problem)
        self._save_problem = problem

    def _restore(self) -> dict[str, GpuTotal]:
        found = {}
        for uuid, body in (load_saved_state(*self._state_args, kind=KIND) or {}).items():
            try:
                found[uuid] = from_json(GpuTotal, body)
            except RecordError as error:
                log.warning("the totals of GPU %s saved by an earlier sidecar are not used: %s", uuid, error)
        return found
