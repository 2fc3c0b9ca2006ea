"""The user's environment, without additions of the Python interpreter."""

import os

COERCED_VARIABLE = "LC_CTYPE"


def remove_coerced_locale() -> None:
    """Remove ``LC_CTYPE`` if this interpreter set it.

    In a C locale Python sets it (PEP 538), and every child would inherit it. ``/proc/self/environ`` shows the
    original.
    """
    if COERCED_VARIABLE in os.environ and COERCED_VARIABLE.encode() not in original_environment():
        del os.environ[COERCED_VARIABLE]


def original_environment(path: str = "/proc/self/environ") -> dict[bytes, bytes]:
    """Environment with which this process was started."""
    try:
        with open(path, "rb") as source:
            block = source.read()
    except OSError:
        return dict(os.environb)
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs if name}
