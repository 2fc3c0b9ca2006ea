"""Memory of cgroups, v1 and v2 (cgroups(7); kernel documents cgroup-v1/memory and cgroup-v2).

Files stay open between reads. The place of a cgroup comes only from ``mountinfo`` and ``/proc/PID/cgroup``
(``oom_kills.memory_cgroup_candidates``). A removed cgroup fails with ENODEV on an open descriptor.
"""

import os
from collections.abc import Iterator

from exporter.contract import oom_kills
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import CgroupMemory

V1_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest multiple of the page size; no machine has this much
LARGEST_FILE = 16384
PF_EXITING = 0x4

V1_FILES = {
    "used": "memory.usage_in_bytes",
    "peak": "memory.max_usage_in_bytes",
    "stat": "memory.stat",
    "oom": oom_kills.OOM_FILES[1],
}
V2_FILES = {
    "used": "memory.current",
    "peak": "memory.peak",  # since Linux 5.19
    "stat": "memory.stat",
    "oom": oom_kills.OOM_FILES[2],
    "pressure": "memory.pressure",
}


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A memory cgroup; ``path`` is the part below ``mount``, empty for the mount itself."""

    version: int
    mount: str
    path: str

    @property
    def directory(self) -> str:
        """Path in the file system."""
        return self.mount + self.path

    def with_ancestors(self) -> Iterator["MemoryCgroup"]:
        """Yield it and its ancestors, up to the mount."""
        path = self.path
        while path:
            yield MemoryCgroup(self.version, self.mount, path)
            path = path.rpartition("/")[0]
        yield MemoryCgroup(self.version, self.mount, "")


def common_ancestor(first: MemoryCgroup, second: MemoryCgroup) -> MemoryCgroup:
    """Return the nearest cgroup that contains both; they must share a mount."""
    below = {cgroup.path for cgroup in second.with_ancestors()}
    return next(cgroup for cgroup in first.with_ancestors() if cgroup.path in below)


def read_memory_cgroup(pid: int | str = "self", root: str = "/", start_ticks: int | None = None) -> MemoryCgroup | None:
    """Return the cgroup that counts a process's memory; None if unknown.

    In v2 it is the nearest ancestor with the memory controller, else the mount. An exiting process is in no v1 cgroup,
    although proc shows "/". With ``start_ticks``, the process must have this start time.
    """
    places = oom_kills.memory_cgroup_candidates(pid, root)
    found = next((cgroup for cgroup in (_find_memory_cgroup(*place) for place in places) if cgroup is not None), None)
    if found is None or pid == "self":
        return found
    try:
        with open(os.path.join(root, f"proc/{pid}/stat"), "rb") as source:
            fields = source.read().rpartition(b")")[2].split()
        exiting, started = int(fields[6]) & PF_EXITING, int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
    if (start_ticks is not None and started != start_ticks) or (found.version == 1 and exiting):
        return None
    return found


def _find_memory_cgroup(version: int, mount: str, path: str) -> MemoryCgroup | None:
    own = MemoryCgroup(version, mount, path)
    if version == 1:
        return own if os.path.isdir(own.directory) else None
    for cgroup in own.with_ancestors():
        if not cgroup.path or os.path.exists(f"{cgroup.directory}/memory.current"):
            return cgroup
    return None


class OpenCgroupFile:
    """A small cgroup file, kept open between reads."""

    __slots__ = ("_fd", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def read(self) -> str:
        """Read the text; empty if the file is gone or denied."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._fd, LARGEST_FILE, 0).decode("ascii", "replace")
        except OSError:
            self.close()
            return ""

    def close(self) -> None:
        """Close the descriptor; the next read reopens the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemoryCgroupReader:
    """Reads the memory of one cgroup repeatedly.

    One that counts others too is not read, such as the root of a hierarchy, which is the whole machine. The top that a
    container or namespace shows has the same path but is no such root.
    """

    def __init__(self, cgroup: MemoryCgroup) -> None:
        names = V1_FILES if cgroup.version == 1 else V2_FILES
        self.cgroup = cgroup
        self._files = {key: OpenCgroupFile(f"{cgroup.directory}/{name}") for key, name in names.items()}
        # the root of v2 lacks memory.current, so it cannot be read anyway
        self.is_shared = oom_kills.is_shared_cgroup(cgroup.version, cgroup.mount, cgroup.path)
        above = () if cgroup.version == 1 else tuple(cgroup.with_ancestors())
        self._limits = [
            OpenCgroupFile(f"{holder.directory}/{name}") for holder in above for name in ("memory.max", "memory.high")
        ]

    def close(self) -> None:
        """Close all descriptors."""
        for file in (*self._files.values(), *self._limits):
            file.close()

    def read(self) -> CgroupMemory | None:
        """Read once; None if the cgroup is gone, denied, or counts others too."""
        used = parse_cgroup_number(self._files["used"].read())
        if used is None or self.is_shared:
            return None
        stat = parse_memory_stat(self._files["stat"].read())
        if self.cgroup.version == 1:
            limits = [stat.get("hierarchical_memory_limit")]
            cache = stat.get("total_active_file"), stat.get("total_inactive_file")
            pressure: dict[str, float] = {}  # v2 only
        else:
            limits = [parse_cgroup_number(file.read()) for file in self._limits]
            cache = stat.get("active_file"), stat.get("inactive_file")
            pressure = parse_memory_pressure(self._files["pressure"].read())
        active, inactive = cache
        return CgroupMemory(
            used_bytes=used,
            limit_bytes=min((limit for limit in limits if limit is not None and limit < V1_UNLIMITED), default=None),
            peak_bytes=parse_cgroup_number(self._files["peak"].read()),
            # the values were not read at the same time
            working_set_bytes=None if active is None or inactive is None else max(0, used - active - inactive),
            oom_kills=oom_kills.parse_oom_kills(self._files["oom"].read()),
            pressure_some_s=pressure.get("some"),
            pressure_full_s=pressure.get("full"),
        )


def parse_cgroup_number(text: str) -> int | None:
    """Parse the only number of a file; None for ``max`` and anything else."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def parse_memory_stat(text: str) -> dict[str, int]:
    """Parse ``memory.stat``: numbers by key."""
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if value.isascii() and value.isdigit():
            found[key] = int(value)
    return found


def parse_memory_pressure(text: str) -> dict[str, float]:
    """Parse ``memory.pressure``: seconds waited so far, by kind (``some``, ``full``)."""
    found = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        total = parse_cgroup_number(rest.rpartition("total=")[2])
        if total is not None and kind in ("some", "full"):
            found[kind] = total / 1e6
    return found
