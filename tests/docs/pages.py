"""The pages of the documentation, their fences, links and anchors."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
JOB = {"name": "example", "workers": [{"role": "worker", "command": "python3 train.py"}]}
"""The least that a job file must hold."""

_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>```+|~~~+)(?P<tag>.*)")
_HEADING = re.compile(r"#{1,6} +(?P<text>.+?)(?: +#+)?")
_LINK = re.compile(r"\]\((?P<inline>[^)\s]+)[^)]*\)|(?:href|src)=\"(?P<html>[^\"]+)\"")
_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Fence:
    """One fenced block with its place."""

    page: Path
    line: int
    tag: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that a user reads."""
    folders = ("docs", "alertmanager", "grafana", "docker", "examples")
    named = ("README.md", "CONTRIBUTING.md", "exporter/packs/README.md")
    return [
        *(ROOT / name for name in named),
        *(path for name in folders for path in sorted((ROOT / name).rglob("*.md"))),
    ]


@cache
def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


def fences(page: Path) -> Iterator[Fence]:
    """Every fenced block of a page."""
    opened: re.Match[str] | None = None
    start, lines = 0, list[str]()
    for number, line in enumerate(read(page).splitlines(), 1):
        match = _FENCE.fullmatch(line)
        if opened is None:
            if match:
                opened, start, lines = match, number, []
        elif match and match["ticks"] == opened["ticks"] and not match["tag"].strip():
            indent = len(opened["indent"])
            text = "".join(f"{inner[indent:]}\n" for inner in lines)
            yield Fence(page, start, opened["tag"].strip(), text)
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        yield Fence(page, start, "a fence that does not end", "")


def all_fences() -> list[Fence]:
    """Every fenced block of every page."""
    return [fence for page in pages() for fence in fences(page)]


def prose(page: Path) -> str:
    """A page without its fences."""
    inside, lines = False, list[str]()
    for line in read(page).splitlines():
        if _FENCE.fullmatch(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links(page: Path) -> list[str]:
    """Every link of a page, web addresses included."""
    text = re.sub(r"`[^`\n]*`", "`code`", prose(page))
    return [match["inline"] or match["html"] for match in _LINK.finditer(text)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """What follows the # of links to this page, as GitHub makes it."""
    found: list[str] = []
    for line in prose(page).splitlines():
        if match := _HEADING.fullmatch(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["text"])
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = sum(other == name or other.startswith(f"{name}#") for other in found)
            found.append(f"{name}#{count}" if count else name)
    return frozenset([*(name.replace("#", "-") for name in found), *_ANCHOR.findall(read(page))])
