"""Version and cost of the sidecar itself."""

import time
from dataclasses import dataclass

from exporter import __version__
from exporter.collecting.collector import CollectorContext, NodeStatus
from exporter.collecting.families import Family, Samples
from exporter.machine.procfs import read_self_rss_bytes

INFO = Family("exporter_info", "This exporter.", labels=("version",), kind="info")
CPU = Family("exporter_cpu_seconds_total", "CPU time of the exporter.", kind="counter")
RSS = Family("exporter_memory_rss_bytes", "Resident memory of the exporter.")


@dataclass(frozen=True)
class SelfSnapshot:
    """Cost of the sidecar so far."""

    cpu_s: float
    rss_bytes: int


class SelfCollector:
    """Cost of the sidecar, from the kernel's accounting of this process."""

    name = "self"
    interval_s = 5.0
    families = (INFO, CPU, RSS)

    def __init__(self, context: CollectorContext) -> None:
        self._proc = context.proc

    def read(self) -> SelfSnapshot:
        return SelfSnapshot(time.process_time(), read_self_rss_bytes(self._proc))

    def render(self, cost: SelfSnapshot, out: Samples) -> None:
        out.add(INFO, 1, version=__version__)
        out.add(CPU, cost.cpu_s)
        out.add(RSS, cost.rss_bytes)

    def describe(self, cost: SelfSnapshot, status: NodeStatus) -> None:
        status.job["exporter"] = {"version": __version__, "cpu_s": cost.cpu_s, "rss_bytes": cost.rss_bytes}
