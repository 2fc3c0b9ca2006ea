"""The manual page ``gpujob.1``, made from the page of commands."""

import re
from collections.abc import Iterator

from exporter import __version__

HEAD = """\
.\\" Written by `pytest tests/docs/test_reference.py --update-golden`.
.TH GPUJOB 1 "" "gpujob {version}" "User Commands"
.SH NAME
gpujob, gpujob-exporter \\- launch GPU jobs and watch them
.SH DESCRIPTION
"""
FENCE, ROW = "```", re.compile(r"\| (.+?) \| (.*?) \|")


def man_page(commands: str) -> str:
    """The manual page with the text of ``commands.md``."""
    text = commands.partition("# Commands\n")[2]
    return HEAD.format(version=__version__) + "".join(f"{line}\n" for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    is_code = False
    for line in text.splitlines():
        row = ROW.fullmatch(line.replace("\\|", "\0"))
        if line.startswith(FENCE):
            is_code = not is_code
            yield ".EX" if is_code else ".EE"
        elif is_code:
            yield _escaped(line)
        elif line.startswith("## "):
            yield f".SH {line[3:].upper()}"
        elif row is not None:
            if row[2] != "Meaning":  # of the head of a table
                yield from (".TP", f"\\fB{_plain(row[1])}\\fR", _plain(row[2]))
        elif line and not line.startswith("|---"):
            yield _plain(line)
        elif not line:
            yield ".PP"


def _plain(text: str) -> str:
    """Text without links and marks of code."""
    text = re.sub(r"\[([^\]\n]+)\]\([^)\n]+\)", r"\1", text.replace("\0", "|"))
    return _escaped(text.replace("`", ""))


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
