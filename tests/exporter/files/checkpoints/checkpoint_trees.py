"""Checkpoint folders on disk, written step by step as frameworks write them, and polls of them."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from exporter.files.checkpoints.checkpoints_reader import CheckpointWatch
from exporter.files.checkpoints.sets import Checkpoint
from exporter.files.checkpoints.tracker import CheckpointEvent, CheckpointTracker

START = 1_700_000_000.0


def torch_bytes(size: int = 64) -> bytes:
    """A file like those of ``torch.save``, as far as it matters without unpickling."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/data/0", b"\0" * size)
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def safetensors_bytes(floats: int = 4, name: str = "w") -> bytes:
    """One tensor of zeros."""
    header = json.dumps({name: {"dtype": "F32", "shape": [floats], "data_offsets": [0, 4 * floats]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * floats)


class Folder:
    """A checkpoint folder with a clock, its watch and its tracker."""

    def __init__(
        self,
        path: Path,
        pattern: str = "*",
        start: float | None = START,
        *,
        verify: bool = False,
        is_only_node: bool = False,
    ) -> None:
        self.path, self.is_only_node = path, is_only_node
        self.pattern, self.start, self.verify = pattern, start, verify
        self.now = START + 1000.0
        self.happened: list[CheckpointEvent] = []
        path.mkdir(exist_ok=True)
        self.restart()

    def restart(self) -> None:
        """Replace watch and tracker, as a new sidecar does."""
        self.watch = CheckpointWatch(
            *(str(self.path), self.pattern, self.start), verify=self.verify, is_only_node=self.is_only_node
        )
        self.checkpoints = CheckpointTracker(self.start)
        self.history = self.checkpoints.history

    @property
    def last(self) -> Checkpoint:
        """The newest checkpoint in any state, which must exist."""
        assert self.checkpoints.last is not None
        return self.checkpoints.last

    @property
    def last_complete(self) -> Checkpoint:
        """The newest complete checkpoint, which must exist."""
        assert self.checkpoints.last_complete is not None
        return self.checkpoints.last_complete

    def write(self, name: str, content: bytes | str | int = b"x" * 100, mtime: float | None = None) -> Path:
        """Write a file with this mtime, by default now; an int is the size of a sparse file."""
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
        """Set the times of a file and of the directories around it."""
        moment = self.now if mtime is None else mtime
        os.utime(path, (moment, moment))
        parent = path.parent
        while parent != self.path.parent:
            os.utime(parent, (self.now, self.now))
            parent = parent.parent

    def rename(self, old: str, new: str) -> None:
        os.replace(self.path / old, self.path / new)
        os.utime(self.path, (self.now, self.now))

    def remove(self, name: str) -> None:
        (self.path / name).unlink()
        os.utime(self.path, (self.now, self.now))

    def poll(self, seconds: float = 5.0) -> list[str]:
        """Let time pass and poll; return the events as text."""
        self.now += seconds
        reading = self.watch.poll(self.now)
        happened = self.checkpoints.update(
            reading.entries, reading.names, self.now, self.now, has_unread_names=reading.has_unread_names
        )
        self.happened += happened
        return [f"{event.kind} {event.checkpoint.name}" for event in happened]

    def poll_for(self, seconds: float) -> list[str]:
        """Poll every five seconds for this long."""
        found = []
        for _ in range(int(seconds // 5)):
            found += self.poll()
        return found

    def write_all(self, names: Iterable[str], content: bytes | str | int = b"x" * 100) -> None:
        for name in names:
            self.write(name, content)
