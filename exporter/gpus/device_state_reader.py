"""State of one GPU: last values, times of the next reads, and failures."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.gpus.records import DeviceState, Gpu, GpuActivity, GpuCondition, GpuFailed, GpuProcess, GpuState

NOW = float("-inf")  # always due
# One read; the first two are of the driver, the others of one GPU.
Part = Literal["open", "gpus", "activity", "processes", "condition"]

REMEMBERED_S = 3600.0  # time for which a hanging call counts

log = logging.getLogger("gpujob.gpus")


@dataclass(eq=False)
class DeviceTracker:
    """State of one GPU; times are monotonic."""

    gpu: Gpu
    state: DeviceState = "ok"
    words: str | None = None
    activity: GpuActivity | None = None
    processes: tuple[GpuProcess, ...] | None = None
    condition: GpuCondition | None = None
    # Last read of each part: monotonic and epoch seconds.
    read: dict[Part, tuple[float, float]] = field(default_factory=dict)
    due: dict[Part, float] = field(default_factory=lambda: {"processes": NOW, "condition": NOW})
    round: int = 0  # last round that read its activity
    given_up: int = 0  # calls about it that have not returned
    unanswered: int = 0  # consecutive hangs without an answer in between
    hung: list[float] = field(default_factory=list)  # times of recent hangs
    not_before: float = NOW  # no reads before this time

    def shown(self, now: float, longest_s: Mapping[Part, float]) -> GpuState:
        """Return the state to publish: only the failure if there is one, and no part older than ``longest_s``."""
        if self.state != "ok":
            return GpuState(self.gpu, self.state, self.words)
        times = {part: epoch for part, (moment, epoch) in self.read.items() if now - moment <= longest_s[part]}
        return GpuState(
            self.gpu,
            activity=self.activity if "activity" in times else None,
            processes=self.processes if "processes" in times else None,
            processes_time=times.get("processes"),
            condition=self.condition if "condition" in times else None,
            condition_time=times.get("condition"),
        )

    def note(self, part: Part, told: object, now: float, epoch: float, pause_s: float) -> None:
        """Record a value or exception. After GpuFailed, the device is not read for ``pause_s``."""
        self.unanswered = 0
        if isinstance(told, GpuFailed):
            if self.state != told.state:
                log.warning("GPU %s (%s): %s: %s", self.gpu.index, self.gpu.uuid, told.state, told)
            self.state, self.words = told.state, str(told)
            self.not_before = now + pause_s
            return
        if isinstance(told, Exception):
            if part not in self.read or getattr(self, part) is not None:
                log.warning("GPU %s: %s fails: %s: %s", self.gpu.index, part, type(told).__name__, told)
            told = None
        if self.state != "ok" and told is not None:
            log.warning("GPU %s (%s) can be read again", self.gpu.index, self.gpu.uuid)
            self.state, self.words = "ok", None
        self.read[part] = now, epoch
        setattr(self, part, told)

    def times_hung(self, now: float) -> int:
        """Hangs within `REMEMBERED_S`."""
        return sum(now - moment < REMEMBERED_S for moment in self.hung)

    def hang(self, part: Part, now: float) -> None:
        """Record that a call for this part hangs because of this GPU."""
        log.warning("GPU %s (%s) hangs: no %s", self.gpu.index, self.gpu.uuid, part)
        self.unanswered += 1
        self.hung = [*(moment for moment in self.hung if now - moment < REMEMBERED_S), now]
        self.state, self.words = "hanging", f"{part} has not come back"

    def come_back(self, now: float, pause_s: float, longest_pause_s: float) -> None:
        """Allow reads again after a pause, which grows with consecutive hangs."""
        self.not_before = now + min(pause_s * self.unanswered, longest_pause_s)
