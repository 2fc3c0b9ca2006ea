"""Memory cgroups of a process, v1 and v2, and the OOM kills that the kernel counts in them.

Standard library only and without dataclasses: the wrapper, which stands beside every worker, reads this too.
"""

import os

OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}
"""Where each version of cgroups counts OOM kills, both under the key ``oom_kill``."""


def parse_memory_mounts(text: str) -> list[tuple[int, str, str]]:
    """Version, root within its hierarchy and mount point of what ``mountinfo`` (proc(5)) says may hold memory cgroups.

    Those that show more of their hierarchy come first.
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
    """Version and path of the cgroup that ``/proc/PID/cgroup`` names for memory: in v1 if that has the controller."""
    unified = None
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return 1, path
        if number == "0" and not controllers:
            unified = 2, path
    return unified


def memory_cgroup_places(pid: int | str = "self", root: str = "/") -> list[tuple[int, str, str]]:
    """Where a process's memory cgroup may be: version, directory of the mount, path below it (empty, or like ``/a/b``).

    Cgroups have any names (of a job id, a SLUID, a host, a systemd slice), so none is looked for. In containers
    and cgroup namespaces a mount may show a part of the hierarchy alone; what lies outside of it has no place.
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
    """Count from ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1), key ``oom_kill``."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return None


def read_oom_kills(root: str = "/") -> int | None:
    """Processes that the kernel's OOM killer took from this process's own memory cgroup, v1 or v2.

    In v2 a cgroup may be without the memory controller; its memory then counts in the nearest one above that has it.
    """
    for version, mount, path in memory_cgroup_places("self", root):
        while True:
            try:
                with open(f"{mount}{path}/{OOM_FILES[version]}", encoding="ascii", errors="replace") as source:
                    return parse_oom_kills(source.read())
            except OSError:
                if version == 1 or not path:
                    break
            path = path.rpartition("/")[0]
    return None
