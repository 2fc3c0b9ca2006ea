"""The environment of the user, without what our own interpreters add to it."""

import os

COERCED = "LC_CTYPE"


def forget_coerced_locale() -> None:
    """Take ``LC_CTYPE`` out again where this interpreter, and not the user, has put it.

    In a C locale Python sets it for itself (PEP 538), and every child would inherit it.
    ``/proc/self/environ`` still shows what this process was started with.
    """
    if COERCED in os.environ and COERCED.encode() not in original_environment():
        del os.environ[COERCED]


def original_environment(path: str = "/proc/self/environ") -> dict[bytes, bytes]:
    """The environment this process was started with."""
    try:
        with open(path, "rb") as source:
            block = source.read()
    except OSError:
        return dict(os.environb)
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs if name}
