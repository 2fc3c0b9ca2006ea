"""Values of a sweep in variables that are called like a secret: they would stand in names and in many files. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config import is_harmless, is_secret
from launcher.sweep_values import Path, place_of, placeholders_of, value_at


def secret_problems(
    body: Mapping[str, Any], base: Mapping[str, Any], paths: Mapping[str, Path], sources: Mapping[str, str]
) -> Iterator[str]:
    """Variables like a secret to which the sweep gives a value, at the point with this file; no value is told.

    ``paths`` has the place of each key of the sweep, empty for a placeholder, ``sources`` where the sweep says it.
    """
    for path, text in _secrets(body, ()):
        if text == value_at(base, path) or is_harmless(text):
            continue
        said = [source for key, source in sources.items() if paths[key] and path[: len(paths[key])] == paths[key]]
        names = placeholders_of(_text_at(base, path)) & sources.keys()
        said = said or [f"{{{name}}} of {sources[name]}" for name in sorted(names)]
        if not said:  # the point's own name or number
            continue
        name = path[-1]
        yield (
            f"{place_of(path)}: {' and '.join(said)} says its value, and {name} is called like a secret: "
            "values of a sweep stand in names and in files that others read; "
            f"take it out of the sweep and say `secrets: [{name}]`, or give the variable another name if it is none"
        )


def _text_at(base: Mapping[str, Any], path: Path) -> str:
    """The text of the file at a place, or in the place of a part of the file that it lies in."""
    found = (value_at(base, path[:steps]) for steps in range(len(path), 0, -1))
    return next((value for value in found if isinstance(value, str)), "")


def _secrets(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Variables of every ``env`` within a value that are called like a secret, each with its place."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _secrets(inner, (*path, index))
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(inner, str):
                yield from _secrets(inner, (*path, key))
            elif path[-1:] == ("env",) and isinstance(key, str) and is_secret(key):
                yield (*path, key), inner
