"""Memory cgroups (v1 and v2) of a process, and the kernel's count of OOM kills in them.

Standard library only and no dataclasses: the wrapper next to every worker uses this too.
"""

import os

# File with the count of OOM kills (key `oom_kill`) for each cgroup version
OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}
# System services whose cgroup may hold the programs of several users; any other one is that of a single program.
SHARED_SERVICES = {"slurmd", "ssh", "sshd", "cron", "crond", "atd"}


def parse_memory_mounts(text: str) -> list[tuple[int, str, str]]:
    """Parse ``mountinfo`` (proc(5)): version, root within the hierarchy and mount point of possible memory cgroups.

    Mounts that show more of their hierarchy come first.
    """
    found = []
    for line in text.split("\n"):
        place, _, kind = line.partition(" - ")
        fields, words = place.split(" "), kind.split(" ")
        if len(fields) < 5 or words[0] not in ("cgroup", "cgroup2"):
            continue
        if words[0] == "cgroup" and "memory" not in words[-1].split(","):
            continue
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            fields = [field.replace(code, character) for field in fields]
        found.append((2 if words[0] == "cgroup2" else 1, fields[3], fields[4]))
    return sorted(found, key=lambda mount: len(mount[1]))


def parse_memory_cgroup(text: str) -> tuple[int, str] | None:
    """Parse ``/proc/PID/cgroup``: version and path of the memory cgroup. Prefer v1 if it has the controller."""
    unified = None
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return 1, path
        if number == "0" and not controllers:
            unified = 2, path
    return unified


def memory_cgroup_candidates(pid: int | str = "self", root: str = "/") -> list[tuple[int, str, str]]:
    """List possible places of a process's memory cgroup: version, mount point, path below it (empty, or like ``/a/b``).

    No cgroup name is assumed, since names vary (job id, SLUID, host, systemd slice). In containers and cgroup
    namespaces a mount may show only part of the hierarchy; cgroups outside of it have no place.
    """
    texts = []
    for name in (f"{pid}/cgroup", "self/mountinfo"):
        try:
            with open(os.path.join(root, "proc", name), encoding="utf-8", errors="surrogateescape") as source:
                texts.append(source.read())
        except OSError:
            return []
    named = parse_memory_cgroup(texts[0])
    if named is None:
        return []
    places = []
    for version, top, mount in parse_memory_mounts(texts[1]):
        names, above = ([part for part in path.split("/") if part] for path in (named[1], top))
        below = names[len(above) :]
        if version == named[0] and names[: len(above)] == above and ".." not in below:
            places.append((version, root.rstrip("/") + mount.rstrip("/"), "".join(f"/{name}" for name in below)))
    return places


def parse_oom_kills(text: str) -> int | None:
    """Parse the count (key ``oom_kill``) from ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1)."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return None


def is_shared_cgroup(version: int, mount: str, path: str) -> bool:
    """Whether a memory cgroup also counts processes of others: it is the whole machine, or that of a shared service.

    Where Slurm does not limit memory, the steps of all jobs are in the cgroup of slurmd. A CI runner has its own.
    """
    if version == 1 and os.path.exists(f"{mount}{path}/release_agent"):  # only the root has it
        return True
    slice_name, _, unit = path.removeprefix("/").partition("/")
    service = unit.removesuffix(".service").partition("@")[0]
    return slice_name == "system.slice" and unit.endswith(".service") and service in SHARED_SERVICES


def read_oom_kills(root: str = "/") -> int | None:
    """Count OOM kills in this process's own memory cgroup, v1 or v2; None if others share it.

    A v2 cgroup may lack the memory controller; its nearest ancestor with the controller then counts its memory.
    """
    for version, mount, path in memory_cgroup_candidates("self", root):
        while True:
            try:
                with open(f"{mount}{path}/{OOM_FILES[version]}", encoding="ascii", errors="replace") as source:
                    return None if is_shared_cgroup(version, mount, path) else parse_oom_kills(source.read())
            except OSError:
                if version == 1 or not path:
                    break
            path = path.rpartition("/")[0]
    return None
