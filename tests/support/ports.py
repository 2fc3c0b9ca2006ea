"""Ports that no other test takes between the moment they are chosen and the start of the program that listens there."""

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(host: str = "127.0.0.1", family: int = socket.AF_INET, **options: bool) -> Iterator[int]:
    """A port with a listener, outside the range that the kernel gives to clients."""
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            for name in options:
                server.setsockopt(socket.SOL_SOCKET, getattr(socket, name), 1)
            try:
                server.bind((host, random.randrange(21000, 32000)))
                server.listen()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield server.getsockname()[1]
            return


_handed_out: set[int] = set()


def free_port() -> int:
    """A port without a listener, which no earlier call has returned: a test that takes two needs different ones."""
    while True:
        with listening() as port:
            if port not in _handed_out:
                _handed_out.add(port)
                return port
