"""Console scripts: run the program as in Python's isolated mode.

This is installed as the top-level module ``gpujob_entry``, an otherwise unused name. Console scripts run with
the user's ``PYTHONPATH``, where a folder named ``launcher`` or ``exporter`` would shadow this package.
``-I`` ignores ``PYTHONPATH``, the working directory and the user's site, unless this module lies there. Where none of
them can be in the way the program goes on as it is: a second start takes a tenth of a short command.
"""

import os
import runpy
import site
import sys


def gpujob() -> None:
    """Run as ``python -I -m launcher``."""
    _run("launcher")


def exporter() -> None:
    """Run as ``python -I -m exporter``."""
    _run("exporter")


def _run(package: str) -> None:
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
    variables = any(name.startswith("PYTHON") for name in os.environ)  # even a wish such as PYTHONUNBUFFERED
    if not (variables or site.ENABLE_USER_SITE) and sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])):
        del sys.path[0]  # the folder of the script
        runpy.run_module(package, run_name="__main__", alter_sys=True)
        return
    flags = ("-E", "-P") if in_user_site else ("-I",)
    os.execv(sys.executable, [sys.executable, *flags, "-m", package, *sys.argv[1:]])  # noqa: S606
