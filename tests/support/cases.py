"""Golden files of cases: each is some lines, with its answer in indented lines below."""

import re
import textwrap
from collections.abc import Callable, Iterable

from tests.conftest import GOLDEN

_ANSWER = re.compile(r"(?m)(?:^    .*\n)+")


def answered(name: str, answer: Callable[[str], Iterable[str]]) -> str:
    """The cases of a golden file, each with what ``answer`` returns for its text; comments begin with ``#``."""
    cases = _ANSWER.split((GOLDEN / name).read_text(encoding="utf-8"))
    return "".join(
        case + textwrap.indent("".join(f"{line}\n" for line in answer(_without_comments(case))), "    ")
        for case in cases
        if case.strip()
    )


def _without_comments(case: str) -> str:
    return "".join(line for line in case.lstrip("\n").splitlines(keepends=True) if not line.startswith("# "))
