"""CPU time and memory of other processes."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

Figures: TypeAlias = dict[str, Any]  # of one measurement, nested as they are printed


def cpu_s(pid: int) -> float:
    """CPU time of a process by the kernel's clock for it, ended threads included (clock_getcpuclockid(3))."""
    return time.clock_gettime_ns(((~pid) << 3) | 2) / 1e9


def cpu_by_thread(pid: int) -> dict[str, float]:
    """CPU seconds of the threads of a process by their names; the first is ``serving``."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = "serving" if task.name == str(pid) else (task / "comm").read_text().strip()
            spent = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue  # it has ended
        found[name] = found.get(name, 0.0) + spent
    return found


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range, rounded to four significant places."""
    return {
        "median": float(f"{statistics.median(values):.4g}"),
        "least": float(f"{min(values):.4g}"),
        "most": float(f"{max(values):.4g}"),
    }
