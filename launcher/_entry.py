"""Console scripts: restart the program in Python's isolated mode.

This is installed as the top-level module ``gpujob_entry``, an otherwise unused name. Console scripts run with
the user's ``PYTHONPATH``, where a folder named ``launcher`` or ``exporter`` would shadow this package.
``-I`` ignores ``PYTHONPATH``, the working directory and the user's site, unless this module lies there.
"""

import os
import site
import sys


def gpujob() -> None:
    """Become ``python -I -m launcher``."""
    _become("launcher")


def exporter() -> None:
    """Become ``python -I -m exporter``."""
    _become("exporter")


def _become(package: str) -> None:
    # in a C locale the interpreter has set LC_CTYPE, which is not from the user
    try:
        with open("/proc/self/environ", "rb") as source:
            is_set_by_user = b"\0LC_CTYPE=" in b"\0" + source.read()
    except OSError:
        is_set_by_user = True
    if not is_set_by_user:
        os.environ.pop("LC_CTYPE", None)
    folder = os.path.dirname(__file__)
    in_user_site = folder == site.getusersitepackages()
    is_in_site = in_user_site or folder in site.getsitepackages()
    if not is_in_site and folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.stderr.write(
            f"gpujob: {folder} is only on PYTHONPATH, which gpujob ignores; install it into a virtual environment\n"
        )
        sys.exit(2)
    flags = ("-E", "-P") if in_user_site else ("-I",)
    os.execv(sys.executable, [sys.executable, *flags, "-m", package, *sys.argv[1:]])  # noqa: S606
