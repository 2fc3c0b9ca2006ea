"""Version and cost of the sidecar itself."""

import time

from exporter import __version__
from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract.status import SidecarCost
from exporter.machine.procfs import read_self_rss_bytes

INFO = Family("exporter_info", "This exporter.", labels=("version",), kind="info")
CPU = Family("exporter_cpu_seconds_total", "CPU time of the exporter.", kind="counter")
RSS = Family("exporter_memory_rss_bytes", "Resident memory of the exporter.")


class SelfCollector:
    """Cost of the sidecar, from the kernel's accounting of this process."""

    name = "self"
    interval_s = 15.0  # not more often than the page is scraped: its own cost needs no close look
    families = (INFO, CPU, RSS)

    def __init__(self, context: CollectorContext) -> None:
        self._proc = context.proc

    def read(self) -> SidecarCost:
        return SidecarCost(version=__version__, cpu_s=time.process_time(), rss_bytes=read_self_rss_bytes(self._proc))

    def render(self, cost: SidecarCost, out: Samples) -> None:
        out.add(INFO, 1, version=cost.version)
        out.add(CPU, cost.cpu_s)
        out.add(RSS, cost.rss_bytes)

    def describe(self, cost: SidecarCost, parts: StatusParts) -> None:
        parts.exporter = cost
