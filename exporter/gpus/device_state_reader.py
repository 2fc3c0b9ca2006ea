"""State of one GPU: last values, times of the next reads, and failures."""

import logging
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.records import DeviceState, Gpu, GpuActivity, GpuCondition, GpuFailed, GpuProcess, GpuState

ALWAYS_DUE = float("-inf")  # always due
# One read; the first two are of the driver, the others of one GPU.
Part = Literal["open", "gpus", "activity", "processes", "condition"]

HANG_WINDOW_S = 3600.0  # time for which a hanging call counts

log = logging.getLogger("gpujob.gpus")


@dataclass(eq=False)
class DeviceTracker:
    """State of one GPU; times are monotonic."""

    gpu: Gpu
    state: DeviceState = "ok"
    message: str | None = None
    activity: GpuActivity | None = None
    processes: tuple[GpuProcess, ...] | None = None
    condition: GpuCondition | None = None
    # Last read of each part: monotonic and epoch seconds.
    read_times: dict[Part, tuple[float, float]] = field(default_factory=dict)
    due: dict[Part, float] = field(default_factory=lambda: {"processes": ALWAYS_DUE, "condition": ALWAYS_DUE})
    last_round: int = 0  # last round that read its activity
    abandoned_calls: int = 0  # calls about it that have not returned
    consecutive_hangs: int = 0  # consecutive hangs without an answer in between
    hang_times: list[float] = field(default_factory=list)  # times of recent hangs
    not_before: float = ALWAYS_DUE  # no reads before this time

    def published_state(self, now: float, max_age_s: Mapping[Part, float]) -> GpuState:
        """Return the state to publish: only the failure if there is one, and no part older than ``max_age_s``."""
        if self.state != "ok":
            return GpuState(self.gpu, self.state, self.message)
        times = {part: epoch for part, (moment, epoch) in self.read_times.items() if now - moment <= max_age_s[part]}
        return GpuState(
            self.gpu,
            activity=self.activity if "activity" in times else None,
            processes=self.processes if "processes" in times else None,
            processes_time=times.get("processes"),
            condition=self.condition if "condition" in times else None,
            condition_time=times.get("condition"),
        )

    def record(self, part: Part, result: object, now: float, epoch: float, pause_s: float) -> None:
        """Record a value or exception. After GpuFailed, the device is not read for ``pause_s``."""
        self.consecutive_hangs = 0
        if isinstance(result, GpuFailed):
            if self.state != result.state:
                log.warning("%s: %s: %s", self.gpu.title, result.state, result)
            self.state, self.message = result.state, str(result)
            self.not_before = now + pause_s
            return
        if isinstance(result, Exception):
            if part not in self.read_times or getattr(self, part) is not None:
                log.warning("GPU %s: %s fails: %s: %s", self.gpu.index, part, type(result).__name__, result)
            result = None
        if self.state != "ok" and result is not None:
            log.warning("%s can be read again", self.gpu.title)
            self.state, self.message = "ok", None
        self.read_times[part] = now, epoch
        setattr(self, part, result)

    def recent_hangs(self, now: float) -> int:
        """Hangs within `HANG_WINDOW_S`."""
        return sum(now - moment < HANG_WINDOW_S for moment in self.hang_times)

    def record_hang(self, part: Part, now: float) -> None:
        """Record that a call for this part hangs because of this GPU."""
        log.warning("%s hangs: no %s", self.gpu.title, part)
        self.consecutive_hangs += 1
        self.hang_times = [*(moment for moment in self.hang_times if now - moment < HANG_WINDOW_S), now]
        self.state, self.message = "hanging", f"{part} has not returned"

    def resume_reads(self, now: float, pause_s: float, max_pause_s: float) -> None:
        """Allow reads again after a pause, which grows with consecutive hangs."""
        self.not_before = now + min(pause_s * self.consecutive_hangs, max_pause_s)
