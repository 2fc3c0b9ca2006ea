"""Values of a sweep for variables and options whose names look secret. Pure.

Such values would appear in the names of points and in many files.
"""

from collections.abc import Iterator, Mapping

from exporter.contract.records import JsonObject
from launcher.jobfile.redaction import is_harmless, is_secret_name, is_secret_option
from launcher.sweep.values import Path, find_placeholders, format_place, value_at


def secret_problems(
    body: JsonObject, base: JsonObject, paths: Mapping[str, Path], sources: Mapping[str, str]
) -> Iterator[str]:
    """Problems of secret-looking variables and options that the sweep sets, without their values.

    ``body`` is the job file of a point, ``base`` that of the sweep. ``paths`` are the places that the keys set, empty
    for a placeholder; ``sources`` are the places in the sweep.
    """
    for path, value in _secrets(body, ()):
        if value == value_at(base, path) or all(is_harmless(text) for text in _texts(value)):
            continue
        setters = [source for key, source in sources.items() if paths[key] and path[: len(paths[key])] == paths[key]]
        names = {name for text in _texts_at(base, path) for name in find_placeholders(text)} & sources.keys()
        setters = setters or [f"{{{name}}} of {sources[name]}" for name in sorted(names)]
        if not setters:  # it contains only the point's name or index
            continue
        name = path[-1]
        fix = "write it at the option, or list the program's own variable for it in `secrets`"
        if path[-2:-1] == ("env",):
            fix = f"add `secrets: [{name}]`, or rename the variable if it is not a secret"
        yield (
            f"{format_place(path)}: {' and '.join(setters)} sets its value, and the name {name} looks like a secret. "
            f"Values of a sweep appear in names and in files that others can read; remove it from the sweep and {fix}"
        )


def _texts(value: object) -> list[str]:
    """The text, or the texts of a list."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _texts_at(base: JsonObject, path: Path) -> list[str]:
    """The texts at a place of the job file, or at the nearest place above it that has some."""
    found = (_texts(value_at(base, path[:steps])) for steps in range(len(path), 0, -1))
    return next((texts for texts in found if texts), [])


def _secrets(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Texts and lists of texts with secret-looking names, each with its place.

    Searches the variables of every ``env``, the options of every ``args`` and, at any depth, every ``config``.
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
