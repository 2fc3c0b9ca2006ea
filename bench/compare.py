"""Compare two runs of the measurements: ``python -m bench compare OLD NEW``, with what each run printed in a file."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOISE = 0.03  # relative; smaller changes are not shown

Results = dict[str, dict[str, Any]]  # by measurement and the path of a figure in it


def compare(old: str, new: str) -> int:
    """Print what changed from one file to another; 1 if a goal that was met is missed now, else 0."""
    before, after = _read(Path(old)), _read(Path(new))
    for bench in sorted(before.keys() ^ after.keys()):
        print(f"{bench}: only in {old if bench in before else new}")
    lost = False
    for bench in sorted(before.keys() & after.keys()):
        for name, was, now in _changes(before[bench], after[bench]):
            change = f"{now / was:.2f}x" if was and not isinstance(now, bool) else ""
            print(f"{bench:<12} {name:<60} {_text(was):>12} -> {_text(now):<12} {change}".rstrip())
            lost = lost or (was is True and now is False)
    return int(lost)


def _read(path: Path) -> Results:
    try:
        found = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
        return {result["bench"]: dict(_figures(result)) for result in found}
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{path}: cannot be read as what `python -m bench` prints ({error})")


def _figures(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _figures(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _figures(inner, f"{path}.{position}")
    elif isinstance(value, int | float):
        yield path, value


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in before:
        was, now = before[name], after.get(name)
        if now is None or was == now:
            continue
        if isinstance(was, bool) or isinstance(now, bool) or abs(now - was) > NOISE * abs(was):
            yield name, was, now


def _text(value: float) -> str:
    return {True: "met", False: "missed"}[value] if isinstance(value, bool) else f"{value:.4g}"
