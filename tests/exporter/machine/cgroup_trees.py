"""Memory cgroups for tests: fake ones of every layout, and real ones with a limit."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.contract import oom_kills

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
UNIFIED_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:8 - cgroup2 cgroup2 rw\n"
OTHER_MOUNTS = (
    "23 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
)
V1_UNLIMITED = 9223372036854771712
MIB = 1 << 20


class Machine:
    """A root directory with ``/proc`` and mounted memory cgroups."""

    def __init__(self, root: Path, mountinfo: str) -> None:
        self.root = root
        self.write("proc/self/mountinfo", OTHER_MOUNTS + mountinfo)

    def write(self, name: str, text: str) -> None:
        """Write a file below the root. The name may be absolute."""
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")

    def process(self, pid: int | str, cgroup: str, *, flags: int = 0x400000, start_ticks: int = 7700) -> None:
        """Add a process with this text as ``/proc/PID/cgroup``."""
        self.write(f"proc/{pid}/cgroup", cgroup)
        fields = ["S", "1", "1", "1", "0", "-1", str(flags), *["0"] * 12, str(start_ticks), *["0"] * 30]
        self.write(f"proc/{pid}/stat", f"{pid} (a) b (c) {' '.join(fields)}\n")

    def v1(
        self,
        path: str,
        *,
        mount: str = "/sys/fs/cgroup/memory",
        used: int = 100 * MIB,
        limit: int = V1_UNLIMITED,
        oom_kills: int = 0,
        **stat: int,
    ) -> None:
        """Add a v1 cgroup."""
        values = {"cache": 1, "active_file": 3, "inactive_file": 5, "hierarchical_memory_limit": limit}
        values |= {"total_active_file": 10 * MIB, "total_inactive_file": 20 * MIB, **stat}
        self._files(
            mount + path,
            {
                "memory.usage_in_bytes": f"{used}\n",
                "memory.limit_in_bytes": f"{limit}\n",
                "memory.max_usage_in_bytes": f"{2 * used}\n",
                "memory.stat": "".join(f"{key} {value}\n" for key, value in values.items()),
                "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kills}\n",
            },
        )

    def v2(
        self,
        path: str,
        *,
        mount: str = "/sys/fs/cgroup",
        used: int = 100 * MIB,
        limit: int | str = "max",
        high: int | str = "max",
        oom_kills: int = 0,
    ) -> None:
        """Add a v2 cgroup with the memory controller."""
        self._files(
            mount + path,
            {
                "memory.current": f"{used}\n",
                "memory.max": f"{limit}\n",
                "memory.high": f"{high}\n",
                "memory.peak": f"{2 * used}\n",
                "memory.stat": f"anon 5\nfile 9\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\nactive_anon 3\n",
                "memory.events": f"low 0\nhigh 0\nmax 9\noom 8\noom_kill {oom_kills}\noom_group_kill 6\n",
                "memory.pressure": "some avg10=0.10 avg60=0.00 avg300=0.00 total=2500000\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=1250000\n",
            },
        )

    def v2_without_memory(self, path: str, *, mount: str = "/sys/fs/cgroup") -> None:
        """Add a v2 cgroup without the memory controller. The root looks the same."""
        self._files(mount + path, {"cgroup.procs": "1\n", "memory.pressure": "some avg10=0.00 total=7\n"})

    def _files(self, folder: str, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self.write(f"{folder}/{name}", text)


class RealCgroup:
    """A new cgroup of the real kernel."""

    def __init__(self, version: int, directory: Path) -> None:
        self.version = version
        self.directory = directory
        self.procs = directory / "cgroup.procs"

    def limit(self, size: int) -> None:
        """Limit its memory in bytes, and allow no swap."""
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self.version == 1 else ("memory.max",)
        for name in names:
            if (self.directory / name).exists():
                (self.directory / name).write_text(str(size))
        if (self.directory / "memory.swap.max").exists():
            (self.directory / "memory.swap.max").write_text("0")

    def start(self, program: str) -> "subprocess.Popen[bytes]":
        """Start a Python program in the cgroup, with pipes."""
        script = 'echo $$ > "$1" && exec "$2" -I -c "$3"'
        return subprocess.Popen(
            ["sh", "-c", script, "sh", str(self.procs), sys.executable, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def exceed(self) -> int:
        """Run a process that uses 128 MiB and return its pid. The kernel kills it at a lower limit."""
        process = self.start("bytearray(b'x' * (1 << 27))")
        process.communicate(timeout=60)
        return process.pid


@contextmanager
def real_cgroup(name: str) -> Iterator[RealCgroup]:
    """A cgroup named after the argument and this pid. Skips the test if none can be created."""
    if os.geteuid() != 0:
        pytest.skip("only root can create cgroups")
    candidates = oom_kills.memory_cgroup_candidates()
    if not candidates:
        pytest.skip("no memory cgroups here")
    version, mount, path = candidates[0]
    # in v2 a cgroup with processes, other than the root, has no controllers for its children
    directory = Path(f"{mount}{path if version == 1 else ''}", f"gpujob-{name}-{os.getpid()}")
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a cgroup: {error}")
    try:
        if version == 2 and not (directory / "memory.current").exists():
            pytest.skip("the memory controller is not enabled below the root")
        yield RealCgroup(version, directory)
    finally:
        if directory.exists():
            directory.rmdir()
