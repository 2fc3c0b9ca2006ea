"""The user's program as arguments of a launcher of Python programs. Pure."""

import re
from collections.abc import Sequence

_PYTHON = re.compile(r"(?:.*/)?python(?:\d+(?:\.\d+)*)?")


def program_argv(command: Sequence[str], *, module: str, no_python: str) -> list[str]:
    """Arguments for torchrun or accelerate: a script, ``module`` and its name, or ``no_python`` and a program.

    They start scripts with their own interpreter, which may not be the one in the command.
    """
    if command[0].endswith(".py"):
        return list(command)
    if _PYTHON.fullmatch(command[0]) and len(command) > 1:
        if not command[1].startswith("-"):
            return list(command[1:])
        if command[1] == "-m" and len(command) > 2:
            return [module, *command[2:]]
    return [no_python, *command]
