"""What is known of one GPU: the last that was read of each part, when it is due again, and what keeps it from that."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.gpus.records import DeviceState, Gpu, GpuActivity, GpuCondition, GpuFailed, GpuProcess, GpuState

NOW = float("-inf")  # a moment that has come, whatever the time is
Part = Literal["open", "gpus", "activity", "processes", "condition"]
"""What is asked for at once: the first two of the driver, the others of one GPU."""

REMEMBERED_S = 3600.0  # how long it counts that a call did not come back

log = logging.getLogger("gpujob.gpus")


@dataclass(eq=False)
class DeviceTracker:
    """One GPU. Moments are monotonic."""

    gpu: Gpu
    state: DeviceState = "ok"
    words: str | None = None
    activity: GpuActivity | None = None
    processes: tuple[GpuProcess, ...] | None = None
    condition: GpuCondition | None = None
    read: dict[Part, tuple[float, float]] = field(default_factory=dict)
    """When each part was read, and the same in epoch seconds."""
    due: dict[Part, float] = field(default_factory=lambda: {"processes": NOW, "condition": NOW})
    round: int = 0  # the last one in which its activity was asked for
    given_up: int = 0  # calls about it that have not come back
    unanswered: int = 0  # how often in a row it hung, with no answer in between
    hung: list[float] = field(default_factory=list)  # when it hung, of late
    not_before: float = NOW  # it is asked for nothing until then

    def shown(self, now: float, longest_s: Mapping[Part, float]) -> GpuState:
        """What is told of it: of one that is not well nothing else, and no part that is older than that."""
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
        """Keep what was told of a part, or the exception; one that failed is left alone for ``pause_s``."""
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
        """How often it hung in the last hour."""
        return sum(now - moment < REMEMBERED_S for moment in self.hung)

    def hang(self, part: Part, now: float) -> None:
        """Note that the call for this part does not come back, and that it is this GPU's doing."""
        log.warning("GPU %s (%s) hangs: no %s", self.gpu.index, self.gpu.uuid, part)
        self.unanswered += 1
        self.hung = [*(moment for moment in self.hung if now - moment < REMEMBERED_S), now]
        self.state, self.words = "hanging", f"{part} has not come back"

    def come_back(self, now: float, pause_s: float, longest_pause_s: float) -> None:
        """Ask again after a pause, which is longer where it has hung again without an answer in between."""
        self.not_before = now + min(pause_s * self.unanswered, longest_pause_s)
