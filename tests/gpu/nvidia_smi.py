"""What ``nvidia-smi`` tells: the witness against which our own series are held."""

import csv
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from xml.etree import ElementTree

MIB = 1 << 20
WORDS = {"yes": 1.0, "no": 0.0, "enabled": 1.0, "disabled": 0.0}
NOTHING = ("n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]", "unknown error", "")


@dataclass(frozen=True)
class Device:
    """One GPU as ``nvidia-smi`` names it."""

    index: str
    uuid: str
    name: str


@dataclass(frozen=True)
class Answer:
    """All that was told of one GPU at one moment, by field or by path in the XML."""

    texts: Mapping[str, str] = field(default_factory=dict)

    def text(self, sources: Collection[str]) -> str | None:
        """The first of these that is told; None where the driver says that there is none."""
        for source in sources:
            found = self.texts.get(source, "").strip()
            if found.lower() not in NOTHING and "deprecated" not in found:
                return found
        return None

    def number(self, sources: Collection[str]) -> float | None:
        """The same as a number, without its unit; yes and no are 1 and 0."""
        found = self.text(sources)
        if found is None:
            return None
        if found.lower() in WORDS:
            return WORDS[found.lower()]
        match = re.match(r"[-+]?\d+(\.\d+)?", found)
        return None if match is None else float(match[0])


def run(*arguments: str) -> str:
    """What it prints; raises CalledProcessError."""
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def devices() -> tuple[Device, ...]:
    """All GPUs; empty without a driver."""
    try:
        told = run("--query-gpu=index,uuid,name", "--format=csv,noheader,nounits")
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(Device(*row) for row in csv.reader(told.splitlines(), skipinitialspace=True) if len(row) == 3)


@cache
def known_fields() -> frozenset[str]:
    """Fields that this version can be asked for: one that it does not know makes it tell nothing at all."""
    return frozenset(re.findall(r'"([a-zA-Z][\w.]*)"', run("--help-query-gpu")))


def ask(device: Device, sources: Collection[str]) -> Answer:
    """The present answer about fields of ``--query-gpu`` and, where they begin with ``./``, of ``-q -x``."""
    asked = sorted(source for source in sources if source in known_fields())
    told = run(f"--id={device.uuid}", f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits")
    (row,) = csv.reader(told.splitlines(), skipinitialspace=True)
    texts = dict(zip(asked, row, strict=True))
    paths = [source for source in sources if source.startswith("./")]
    if paths:
        root = ElementTree.fromstring(run(f"--id={device.uuid}", "-q", "-x"))  # noqa: S314 - the driver's own
        gpu = root.find("./gpu")
        for path in paths:
            texts[path] = (gpu.findtext(path) if gpu is not None else None) or root.findtext(path) or ""
    return Answer(texts)


def processes(device: Device) -> dict[int, int | None]:
    """Bytes of compute processes by pid; None where they are not told."""
    told = run(f"--id={device.uuid}", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")
    rows = [row for row in csv.reader(told.splitlines(), skipinitialspace=True) if len(row) == 2]
    return {int(pid): int(memory) * MIB if memory.isdecimal() else None for pid, memory in rows}
