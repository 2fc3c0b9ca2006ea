"""The words of a user's program behind a launcher of Python programs. Pure."""

import re
from collections.abc import Sequence

_PYTHON = re.compile(r"(?:.*/)?python(?:\d+(?:\.\d+)*)?")


def program_words(words: Sequence[str], *, module: str, no_python: str) -> list[str]:
    """A command as torchrun and accelerate take it: a script, ``module`` with a name, or ``no_python`` and a program.

    They start scripts by their own interpreter, which is the one that they are installed for.
    """
    if words[0].endswith(".py"):
        return list(words)
    if _PYTHON.fullmatch(words[0]) and len(words) > 1:
        if not words[1].startswith("-"):
            return list(words[1:])
        if words[1] == "-m" and len(words) > 2:
            return [module, *words[2:]]
    return [no_python, *words]
