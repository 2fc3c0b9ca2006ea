"""Console scripts: start the program again in Python's isolated mode.

Installed as the top-level module ``gpujob_entry``, a name nobody else uses.
A console script of ours runs with the user's ``PYTHONPATH``, where a folder
named ``launcher`` or ``gpujob_exporter`` would be imported instead of this package;
``-I`` leaves out ``PYTHONPATH``, the working directory and the user's site.
"""

import os
import sys


def gpujob() -> None:
    """Become ``python -I -m launcher``."""
    _become("launcher")


def gpujob_exporter() -> None:
    """Become ``python -I -m exporter``."""
    _become("exporter")


def _become(package: str) -> None:
    # in a C locale this interpreter has put LC_CTYPE into its environment, which is not the user's
    try:
        with open("/proc/self/environ", "rb") as source:
            given = b"\0LC_CTYPE=" in b"\0" + source.read()
    except OSError:
        given = True
    if not given:
        os.environ.pop("LC_CTYPE", None)
    os.execv(sys.executable, [sys.executable, "-I", "-m", package, *sys.argv[1:]])  # noqa: S606
