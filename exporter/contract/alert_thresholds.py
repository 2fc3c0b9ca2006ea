"""Thresholds of alerts that a job or a site may set: names, units and defaults. The rules contain the same defaults."""

import math
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass

OFF = "off"  # instead of a value: the alert never fires


class Threshold(NamedTuple):
    """Meaning of one threshold; ``fires_above`` says on which side the alert fires."""

    alerts: tuple[str, ...]
    unit: str
    default: float
    meaning: str
    example: str
    fires_above: bool = True
    least: float = 0.0  # exclusive, unless it is the default
    most: float = 1e18  # inclusive

    @property
    def never(self) -> float:
        """Value at which the alert never fires."""
        return math.inf if self.fires_above else -math.inf


THRESHOLDS = {
    "slowdown": Threshold(
        ("GpuJobSlowdown",), "times", 1.25, "time per item, compared with the fastest sustained speed", "1.5", least=1
    ),
    "straggler": Threshold(
        ("GpuJobStraggler",), "share", 0.2, "lag of the slowest worker behind the median", "0.4", most=1
    ),
    "time_limit_chance": Threshold(
        ("GpuJobTimeLimitPredicted", "GpuJobTimeLimitCertain"),
        *("share", 0.1, "chance of finishing before the time limit", "0.3"),
        fires_above=False,
        most=1,
    ),
    "host_memory": Threshold(
        ("GpuJobHostMemoryNearLimit",), "share", 0.95, "working set as a share of the memory limit", "0.98", most=1
    ),
    "disk_free": Threshold(
        ("GpuJobDiskLow",), "bytes", 10e9, "free space; it also replaces the rule of 10 %", "50GB", fires_above=False
    ),
    "checkpoint_late": Threshold(("GpuJobCheckpointOverdue",), "intervals", 3, "time since the last checkpoint", "5"),
    "log_burst": Threshold(("GpuJobLogErrorBurst",), "lines", 10, "lines of one error pattern in 10 minutes", "50"),
    "log_unread": Threshold(
        ("GpuJobLogUnread",), "bytes", 64 * 1024**2, "log text that the sidecar has not read yet", "1GB"
    ),
    "gpu_idle": Threshold(("GpuJobGpuIdle",), "workers", 0, "workers whose GPUs are idle", "4"),
    "worker_restarts": Threshold(
        ("GpuJobWorkerRestarting",), "workers", 0, "workers restarted in 10 minutes for one reason", "3"
    ),
}


@dataclass(frozen=True)
class AlertThreshold:
    """A job's own threshold; None is off."""

    alert: str  # a name in `THRESHOLDS`
    value: float | None

    @property
    def series_value(self) -> float:
        """The value for rules: off is one that nothing passes."""
        return THRESHOLDS[self.alert].never if self.value is None else self.value
