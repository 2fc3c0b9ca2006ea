"""Values of a sweep in variables and options that are called like a secret. Pure.

They would stand in the names of points and in many files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.jobfile.redaction import is_harmless, is_secret_name, is_secret_option
from launcher.sweep.values import Path, format_place, placeholders_of, value_at


def secret_problems(
    body: Mapping[str, Any], base: Mapping[str, Any], paths: Mapping[str, Path], sources: Mapping[str, str]
) -> Iterator[str]:
    """Variables and options like a secret to which the sweep gives a value, at the point with this file, never told.

    ``paths`` has the place of each key of the sweep, empty for a placeholder, ``sources`` where the sweep says it.
    """
    for path, value in _secrets(body, ()):
        if value == value_at(base, path) or all(is_harmless(text) for text in _texts(value)):
            continue
        said = [source for key, source in sources.items() if paths[key] and path[: len(paths[key])] == paths[key]]
        names = {name for text in _texts_at(base, path) for name in placeholders_of(text)} & sources.keys()
        said = said or [f"{{{name}}} of {sources[name]}" for name in sorted(names)]
        if not said:  # the point's own name or number
            continue
        name = path[-1]
        cure = "write it where the option is, or name the program's own variable for it in `secrets`"
        if path[-2:-1] == ("env",):
            cure = f"say `secrets: [{name}]`, or give the variable another name if it is none"
        yield (
            f"{format_place(path)}: {' and '.join(said)} says its value, and {name} is called like a secret: "
            f"values of a sweep stand in names and in files that others read; take it out of the sweep and {cure}"
        )


def _texts(value: Any) -> list[str]:
    """The texts of a value that is one, or a list of them."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _texts_at(base: Mapping[str, Any], path: Path) -> list[str]:
    """The texts of the file at a place, or the one in the place of a part of the file that it lies in."""
    found = (_texts(value_at(base, path[:steps])) for steps in range(len(path), 0, -1))
    return next((texts for texts in found if texts), [])


def _secrets(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """What within a value is called like a secret, texts and lists of them, each with its place.

    That is variables of every ``env``, options of every ``args`` and, as deep as they are, of every ``config``.
    """
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _secrets(inner, (*path, index))
    elif isinstance(value, dict):
        option = path[-1:] == ("args",) or "config" in path
        for key, inner in value.items():
            variable = path[-1:] == ("env",) and isinstance(key, str) and is_secret_name(key)
            if _texts(inner) and (variable or (option and is_secret_option(str(key)))):
                yield (*path, key), inner
            elif not isinstance(inner, str):
                yield from _secrets(inner, (*path, key))
