"""Output of ``nvidia-smi``, with which our series are compared."""

import csv
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from xml.etree import ElementTree

MIB = 1 << 20
BOOLEANS = {"yes": 1.0, "no": 0.0, "enabled": 1.0, "disabled": 0.0}
NOTHING = ("n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]", "unknown error", "")


@dataclass(frozen=True)
class Device:
    """One GPU as ``nvidia-smi`` lists it."""

    index: str
    uuid: str
    name: str


@dataclass(frozen=True)
class Answer:
    """Values of one GPU at one time, by field or by path in the XML."""

    texts: Mapping[str, str] = field(default_factory=dict)

    def text(self, sources: Collection[str]) -> str | None:
        """The first known value of these sources, or None."""
        for source in sources:
            found = self.texts.get(source, "").strip()
            if found.lower() not in NOTHING and "deprecated" not in found:
                return found
        return None

    def number(self, sources: Collection[str]) -> float | None:
        """The same as a number without its unit. Yes is 1 and no is 0."""
        found = self.text(sources)
        if found is None:
            return None
        if found.lower() in BOOLEANS:
            return BOOLEANS[found.lower()]
        match = re.match(r"[-+]?\d+(\.\d+)?", found)
        return None if match is None else float(match[0])


def run(*arguments: str) -> str:
    """Output of ``nvidia-smi``. Raises CalledProcessError."""
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def devices() -> tuple[Device, ...]:
    """All GPUs; empty without a driver."""
    try:
        output = run("--query-gpu=index,uuid,name", "--format=csv,noheader,nounits")
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(Device(*row) for row in csv.reader(output.splitlines(), skipinitialspace=True) if len(row) == 3)


@cache
def known_fields() -> frozenset[str]:
    """Fields that this version can query. A query with an unknown field fails as a whole."""
    return frozenset(re.findall(r'"([a-zA-Z][\w.]*)"', run("--help-query-gpu")))


def ask(device: Device, sources: Collection[str]) -> Answer:
    """Current values of fields of ``--query-gpu`` and, for names that begin with ``./``, of ``-q -x``."""
    fields = sorted(source for source in sources if source in known_fields())
    output = run(f"--id={device.uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    (row,) = csv.reader(output.splitlines(), skipinitialspace=True)
    texts = dict(zip(fields, row, strict=True))
    paths = [source for source in sources if source.startswith("./")]
    if paths:
        root = ElementTree.fromstring(run(f"--id={device.uuid}", "-q", "-x"))  # noqa: S314 - from the driver
        gpu = root.find("./gpu")
        for path in paths:
            texts[path] = (gpu.findtext(path) if gpu is not None else None) or root.findtext(path) or ""
    return Answer(texts)


def processes(device: Device) -> dict[int, int | None]:
    """Memory in bytes of compute processes by pid, or None where unknown."""
    output = run(f"--id={device.uuid}", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")
    rows = [row for row in csv.reader(output.splitlines(), skipinitialspace=True) if len(row) == 2]
    return {int(pid): int(memory) * MIB if memory.isdecimal() else None for pid, memory in rows}
