"""Checkpoint folders on disk, written step by step as frameworks write them, and looks at them."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from exporter.files.checkpoints.checkpoints_reader import CheckpointWatch
from exporter.files.checkpoints.tracker import CheckpointEvent, CheckpointTracker

START = 1_700_000_000.0


def torch_bytes(size: int = 64) -> bytes:
    """What ``torch.save`` writes, as far as can be told without unpickling."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/data/0", b"\0" * size)
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def safetensors_bytes(floats: int = 4) -> bytes:
    """One tensor of zeros."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [floats], "data_offsets": [0, 4 * floats]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * floats)


class Folder:
    """A checkpoint folder with a clock, its watch and what is made of it."""

    def __init__(self, path: Path, pattern: str = "*", start: float | None = START, *, verify: bool = False) -> None:
        self.path = path
        self.pattern, self.start, self.verify = pattern, start, verify
        self.now = START + 1000.0
        self.happened: list[CheckpointEvent] = []
        path.mkdir(exist_ok=True)
        self.restart()

    def restart(self) -> None:
        """A new sidecar."""
        self.watch = CheckpointWatch(str(self.path), self.pattern, self.start, verify=self.verify)
        self.checkpoints = CheckpointTracker(self.start)

    def write(self, name: str, content: bytes | str | int = b"x" * 100, mtime: float | None = None) -> Path:
        """A file that was written at this moment, or so long; an int is the size of a sparse one."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            with path.open("ab") as out:
                out.truncate(content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.touch(path, mtime)
        return path

    def touch(self, path: Path, mtime: float | None = None) -> None:
        """Set its times, and those of the directories that it lies in."""
        moment = self.now if mtime is None else mtime
        os.utime(path, (moment, moment))
        place = path.parent
        while place != self.path.parent:
            os.utime(place, (self.now, self.now))
            place = place.parent

    def rename(self, old: str, new: str) -> None:
        os.replace(self.path / old, self.path / new)
        os.utime(self.path, (self.now, self.now))

    def remove(self, name: str) -> None:
        (self.path / name).unlink()
        os.utime(self.path, (self.now, self.now))

    def look(self, seconds: float = 5.0) -> list[str]:
        """Let time pass and look; gives what has happened, as words."""
        self.now += seconds
        sight = self.watch.poll(self.now)
        happened = self.checkpoints.update(
            sight.entries, sight.names, self.now, self.now, has_unread_names=sight.has_unread_names
        )
        self.happened += happened
        return [f"{one.kind} {one.checkpoint.name}" for one in happened]

    def looks(self, seconds: float) -> list[str]:
        """Looks every five seconds for so long."""
        found = []
        for _ in range(int(seconds // 5)):
            found += self.look()
        return found

    def write_all(self, names: Iterable[str], content: bytes | str | int = b"x" * 100) -> None:
        for name in names:
            self.write(name, content)
