"""The user's program as arguments of a launcher of Python programs. Pure."""

import re
from collections.abc import Sequence

_PYTHON = re.compile(r"(?:.*/)?python(?:\d+(?:\.\d+)*)?")


def program_words(words: Sequence[str], *, module: str, no_python: str) -> list[str]:
    """Arguments for torchrun or accelerate: a script, ``module`` and its name, or ``no_python`` and a program.

    They start scripts with their own interpreter, which may not be the one in the command.
    """
    if words[0].endswith(".py"):
        return list(words)
    if _PYTHON.fullmatch(words[0]) and len(words) > 1:
        if not words[1].startswith("-"):
            return list(words[1:])
        if words[1] == "-m" and len(words) > 2:
            return [module, *words[2:]]
    return [no_python, *words]
