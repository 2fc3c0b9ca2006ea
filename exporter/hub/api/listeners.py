"""Where a hub listens: a socket for the users of this machine, and TCP if it is asked for."""

import contextlib
import errno
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.web.limits import KERNEL_QUEUE

MOST_PER_USER = 64  # open connections; each `gpujob ps -w` has one
MOST_OPEN = 512  # of all users together
MOST_PATH_BYTES = 107  # of a socket's path (unix(7))
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_uid(connection: Any) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def open_local(path: Path, admits: Callable[[int], bool], *, for_all: bool) -> "UnixListener":
    """Listen on a socket file. A lock beside it, kept until the process ends, says that an old file is nobody's.

    ``admits`` decides about users by their uid. ``for_all`` lets others connect, as their own users.
    """
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ExporterError(f"{path}: too long for a socket; set XDG_RUNTIME_DIR or --state-dir to a shorter folder")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755 if for_all else 0o700)  # whatever the umask
        owner = path.parent.stat()
        if owner.st_uid != os.geteuid() or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ExporterError(f"{path.parent} belongs to another user, or others may write there; remove it")
        lock = lock_file(f"{path}.lock")
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ExporterError(f"{path} exists and is not a socket; remove it")
            path.unlink()
        listening.bind(os.fspath(path))
        path.chmod(0o666 if for_all else 0o600)
        listening.listen(KERNEL_QUEUE)
    except OSError as error:
        listening.close()
        raise ExporterError(f"cannot listen on {path}: {error.strerror}") from error
    except FileLockedError as error:
        listening.close()
        raise ExporterError(f"another hub listens on {path}: {error}; end it first") from error
    except ExporterError:
        listening.close()
        raise
    listening.setblocking(False)
    return UnixListener(listening, admits, lock)


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class UnixListener(socket.socket):
    """A listening Unix socket that closes connections of users who may not see anything, or have too many."""

    def __init__(self, listening: socket.socket, admits: Callable[[int], bool], lock: int) -> None:
        """``lock`` is the descriptor of the lock beside the socket file; -1 without one."""
        super().__init__(fileno=listening.detach())
        self._admits, self._lock = admits, lock
        self._open: list[tuple[socket.socket, int]] = []
        self._folder = os.path.dirname(self.getsockname())
        self._folder_identity = _identity(self._folder)

    def has_folder(self) -> bool:
        """Whether clients can still find it: systemd removes the folder of a user with the last login."""
        return _identity(self._folder) == self._folder_identity

    def unlock(self) -> None:
        """Give up the lock of a folder that is gone."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raises BlockingIOError after closing one, so that asyncio goes on."""
        connection, address = super().accept()
        uid = peer_uid(connection)
        self._open = [entry for entry in self._open if entry[0].fileno() >= 0]
        of_user = Counter(user for _, user in self._open)[uid]
        if not self._admits(uid) or of_user >= MOST_PER_USER or len(self._open) >= MOST_OPEN:
            connection.close()
            raise BlockingIOError(errno.EAGAIN, "the connection was refused")
        self._open.append((connection, uid))
        return connection, address
