"""Checksum list of the run directory, in the format of sha256sum(1)."""

import os
from collections.abc import Iterable
from pathlib import Path

from exporter.contract import run_files

CHECKSUMS_FILE = "checksums.txt"


def write_checksums(run_dir: Path, sums: Iterable[tuple[str, str]]) -> None:
    """Replace the list; ``sha256sum -c`` checks it in the output directory."""
    lines = [f"{_checksum_line(name, digest)}\n" for name, digest in sorted(sums)]
    run_files.replace_file(run_dir / CHECKSUMS_FILE, os.fsencode("".join(lines)))


def read_checksums(run_dir: Path) -> dict[str, str] | None:
    """Checksums by file name; None without a list."""
    try:
        with run_files.open_regular(run_dir / CHECKSUMS_FILE) as source:
            text = os.fsdecode(source.read())
    except OSError:
        return None
    found = {}
    for line in text.split("\n"):
        digest, separator, name = line.partition("  ")
        if separator:
            found[_unescaped(name) if digest.startswith("\\") else name] = digest.removeprefix("\\")
    return found


def _checksum_line(name: str, digest: str) -> str:
    """A line of the list. sha256sum(1) starts it with a backslash if the name contains escapes."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{digest}  {name}" if escaped == name else f"\\{digest}  {escaped}"


def _unescaped(name: str) -> str:
    parts = (part.replace("\\n", "\n").replace("\\r", "\r") for part in name.split("\\\\"))
    return "\\".join(parts)
