"""A FUSE file system whose server can stop answering. It serves the regular files of a directory.

Run as ``python fuse_server.py FOLDER MOUNT_POINT CONTROL``. The wire format is that of ``linux/fuse.h``. The file
CONTROL contains the mode. ``answer`` answers requests. ``ignore`` leaves them in the queue of the kernel, so a killed
caller can withdraw its request. ``swallow`` reads them without an answer, so not even SIGKILL ends the caller. When
the mode is ``answer`` again, swallowed requests are answered.
"""

import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE = 1, 2, 3, 4, 14, 15, 16, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 25, 26, 27, 28, 29, 36, 38, 42
SILENT = (FORGET, INTERRUPT, BATCH_FORGET)  # requests without an answer
ROOT_NODE = 1
BLOCK = 4096
FREE_BLOCKS, BLOCKS = 25_000_000, 50_000_000  # the space it reports: 102 GB of 205 GB
SOURCE = "gpujob-test"
WAIT_S = 60.0  # how long to wait for the server


def seen_file(control: str | Path) -> Path:
    """File in which the server records the last mode that it read."""
    return Path(f"{control}.seen")


def write(path: Path, text: str) -> None:
    """Replace the contents of a file atomically."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="ascii")
    temporary.replace(path)


class Server:
    """Answers the requests of one mount."""

    def __init__(self, folder: str, point: str, control: str) -> None:
        self._folder, self._control = folder, control
        self._names: dict[int, str] = {}
        self._nodes: dict[str, int] = {}
        self._swallowed: list[bytes] = []
        self._seen = ""
        self._fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        mount = ctypes.CDLL(None, use_errno=True).mount
        if mount(SOURCE.encode(), os.fsencode(point), b"fuse.gpujob_test", 6, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), point)

    def serve(self) -> None:
        """Answer until the mount is gone."""
        while True:
            mode = self._mode()
            if mode != self._seen:
                write(seen_file(self._control), mode)
                self._seen = mode
            while mode == "answer" and self._swallowed:
                self._answer(self._swallowed.pop(0))
            if mode == "ignore" or not select.select([self._fd], [], [], 0.01)[0]:
                time.sleep(0.01 if mode == "ignore" else 0)
                continue
            try:
                request = os.read(self._fd, 1 << 18)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue  # withdrawn meanwhile
            self._swallowed.append(request)

    def _mode(self) -> str:
        try:
            with open(self._control, encoding="ascii") as source:
                return source.read().strip() or "answer"
        except OSError:
            return "answer"

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node = struct.unpack_from("=IIQQ", request)
        if opcode in SILENT:
            return
        try:
            code, body = 0, self._body(opcode, node, request[40:])
        except OSError as error:
            code, body = -(error.errno or errno.EIO), b""
        try:
            os.write(self._fd, struct.pack("=IiQ", 16 + len(body), code, unique) + body)
        except OSError:
            pass  # the caller has ended

    def _body(self, opcode: int, node: int, rest: bytes) -> bytes:
        if opcode == INIT:
            return struct.pack("=IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 16, 0, 0)
        if opcode == LOOKUP:
            return self._entry(os.fsdecode(rest.split(b"\0", 1)[0]))
        if opcode == GETATTR:
            return struct.pack("=QII", 0, 0, 0) + self._attributes(node)
        if opcode == STATFS:
            numbers = (BLOCKS, FREE_BLOCKS, FREE_BLOCKS, 1000, 900, BLOCK, 255, BLOCK, 0)
            return struct.pack("=QQQQQIIII24x", *numbers)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("=QII", 0, 1, 0)  # without the page cache
        if opcode == READ:
            offset, size = struct.unpack_from("=QI", rest, 8)
            with open(self._path(node), "rb") as source:
                source.seek(offset)
                return source.read(size)
        if opcode == READDIR:
            offset, size = struct.unpack_from("=QI", rest, 8)
            return self._entries(offset, size)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not served")

    def _path(self, node: int) -> str:
        return self._folder if node == ROOT_NODE else os.path.join(self._folder, self._names[node])

    def _attributes(self, node: int) -> bytes:
        facts = os.stat(self._path(node))
        mode = stat.S_IFDIR | 0o755 if node == ROOT_NODE else stat.S_IFREG | 0o644
        seconds, nanos = divmod(facts.st_mtime_ns, 1_000_000_000)
        size = facts.st_size
        numbers = (
            node,
            size,
            -(-size // 512),
            seconds,
            seconds,
            seconds,
            nanos,
            nanos,
            nanos,
            mode,
            1,
            0,
            0,
            0,
            BLOCK,
            0,
        )
        return struct.pack("=QQQQQQIIIIIIIIII", *numbers)

    def _entry(self, name: str) -> bytes:
        if not os.path.isfile(os.path.join(self._folder, name)):
            raise FileNotFoundError(errno.ENOENT, name)
        node = self._nodes.setdefault(name, len(self._nodes) + 2)
        self._names[node] = name
        return struct.pack("=QQQQII", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _entries(self, offset: int, size: int) -> bytes:
        names = [name for name in sorted(os.listdir(self._folder)) if os.path.isfile(os.path.join(self._folder, name))]
        listing = b""
        for index, name in enumerate(names[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("=QQII", index + 1, index, len(raw), stat.S_IFREG >> 12) + raw
            entry += b"\0" * (-len(entry) % 8)
            if len(listing) + len(entry) > size:
                break
            listing += entry
        return listing


class FuseMount:
    """A mount served by a separate process. Skips the test where that is impossible."""

    def __init__(self, place: Path) -> None:
        if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            pytest.skip("a file system that hangs needs root and /dev/fuse")
        self.folder, self.point, self._control = place / "served", place / "fuse", place / "control"
        self.folder.mkdir()
        self.point.mkdir()
        write(self._control, "answer")
        argv = [sys.executable, __file__, str(self.folder), str(self.point), str(self._control)]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/")
        end = time.monotonic() + WAIT_S
        while not os.path.ismount(self.point):
            if self._process.poll() is not None:
                _, message = self._process.communicate()
                pytest.skip(f"cannot serve a file system here: {message.strip().splitlines()[-1:]}")
            assert time.monotonic() < end, "the mount does not appear"
            time.sleep(0.01)

    def say(self, mode: str) -> None:
        """Set the mode: ``answer``, ``ignore`` or ``swallow``."""
        write(self._control, mode)
        seen, end = seen_file(self._control), time.monotonic() + WAIT_S
        while self._process.poll() is None and not (seen.exists() and seen.read_text("ascii") == mode):
            assert time.monotonic() < end, f"the server does not {mode}"
            time.sleep(0.005)

    def close(self) -> None:
        """Kill the server, which ends waiting requests, and remove the mount."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        subprocess.run(["umount", "--lazy", str(self.point)], check=False, capture_output=True)


if __name__ == "__main__":
    Server(*sys.argv[1:]).serve()
