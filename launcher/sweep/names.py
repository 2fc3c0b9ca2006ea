"""Names of the points of a sweep: short, safe in file names, unique. Pure."""

import hashlib
import re
from collections.abc import Iterator

from exporter.contract.records import JsonObject, JsonValue
from launcher.jobfile.yamlfile import yaml_text
from launcher.plan.plan import safe_file_word

MOST_NAME_LENGTH = 64  # characters of a point's name, for use in file names, labels and tables


class PointNames:
    """The source of the names of points."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def make_unique(self, wanted: str) -> str:
        """Make ``wanted`` a name that no other point has."""
        name = short_name(wanted)
        number = 1
        while name in self._used:
            number += 1
            name = short_name(f"{short_name(wanted, MOST_NAME_LENGTH - 8)}_{number}")
        self._used.add(name)
        return name


def short_name(wanted: str, most: int = MOST_NAME_LENGTH) -> str:
    """Make a text safe for file names. A long one is cut and gets a hash of the whole, so that it stays unique."""
    word = re.sub(r"[^\w.-]+", "_", wanted).strip("._-")
    if word and word == safe_file_word(word) and len(word) <= most and word == wanted:
        return word
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", wanted).strip("._-") or "point"
    if len(plain) <= most:
        return plain
    digest = hashlib.sha256(wanted.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{plain[: most - 9].rstrip('._-')}-{digest}"


def point_label(values: JsonObject) -> str:
    """The values of a point as short words: ``lr1e-05_bs8``."""
    leaves = [leaf for key, value in values.items() for leaf in _leaves(tuple(key.split(".")), value)]
    lasts = [words[-1] for words, _ in leaves]
    named = [(words[-1:] if lasts.count(words[-1]) == 1 else words[-2:], value) for words, value in leaves]
    return "_".join(re.sub(r"[\[\]]", "", ".".join(words)) + _value_text(value) for words, value in named)


def _leaves(words: tuple[str, ...], value: JsonValue) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """The leaves of nested mappings, each with the words of its key path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*words, key), inner)
    else:
        yield words, value


def _value_text(value: JsonValue) -> str:
    if isinstance(value, list):
        return "x".join(map(_value_text, value))
    return re.sub(r"[^\w.+-]+", "-", yaml_text(value)).replace("+", "")
