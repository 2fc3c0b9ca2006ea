"""The values of one point of a sweep, put into its job file. Pure.

A value takes a place of the file, and is then as if it had been written there; or it stands for a placeholder of
the file's texts, and is data: what it holds is not looked at again, neither here nor when the run's own
placeholders are filled in.
"""

import copy
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.plan.placeholders import VARIABLES, fill_placeholders, shell_text_index

POINT, POINT_INDEX = "point", "point_index"  # placeholders that every sweep has: name and number of the point

Path = tuple[str | int, ...]  # keys and indexes from the root of a job file to one of its values

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_TOKEN = re.compile(rf"\{{\{{{_WORD}\}}\}}|\$\{{{_WORD}\}}|\{{(?P<name>{_WORD})\}}")
"""A literal ``{{name}}``, a shell's ``${name}``, or a placeholder."""
_BRACED = re.compile(rf"\{{{_WORD}\}}")
_OF_A_RUN = re.compile(r"host_\d+|port_\d+|[a-z_]+_port|leader|head|worker_size|worker_nodes")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]*")  # text that means itself to every shell, whatever quotes are around it
_PREAMBLE = ("setup", "preamble")
_OF_PROCESSES = ("workers", "backend", "frontend", "benchmark")
_FILLED = frozenset({"command", "env", "args", "config"})
"""Keys of processes in which the placeholders of the run are filled in once more."""
_FILLED_WHOLE = ("env", "inputs")
"""Parts of the file of which all becomes words, variables or patterns with placeholders."""


def is_reserved_name(name: str) -> bool:
    """Whether a placeholder of this name has a meaning of its own: of the run, or of every sweep."""
    return name in VARIABLES or name in (POINT, POINT_INDEX) or bool(_OF_A_RUN.fullmatch(name))


def format_place(path: Path) -> str:
    """A path as errors write it."""
    place = ""
    for step in path:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    return place or "the job file"


def value_at(value: Any, path: Sequence[str | int]) -> Any:
    """What stands at a path, or None."""
    for step in path:
        if isinstance(step, int):
            value = value[step] if isinstance(value, list) and step < len(value) else None
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def text_of(value: Any) -> str:
    """A value as a text, as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


# -- at a place of the file ----------------------------------------------------------------------


def merge(base: Any, over: Any) -> Any:
    """``base`` with ``over`` put over it: mappings key by key, null takes a key away, all else is replaced."""
    if not isinstance(over, Mapping):
        return copy.deepcopy(over)
    merged = dict(base) if isinstance(base, Mapping) else {}
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def assign_value(body: dict[str, Any], path: Path, key: str, value: Any) -> str | None:
    """Put a value at its place; what is wrong with the place, if anything is."""
    inner: Any = body
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        at = format_place(path[:depth])
        if isinstance(step, int):
            if not isinstance(inner, list):
                return f"{key}: {at} is no list"
            if step >= len(inner):
                return f"{key}: {at} has {len(inner)} entries, counted from 0"
            if last and value is None:
                return f"{key}: an entry of a list cannot be taken away by null; give the whole list"
            if last:
                inner[step] = merge(inner[step], _texts_of_env(path, value))
        else:
            if not isinstance(inner, dict):
                return f"{key}: {at} is no mapping"
            if last and value is None:
                inner.pop(step, None)
            elif last:
                inner[step] = merge(inner.get(step), _texts_of_env(path, value))
            elif inner.get(step) is None:
                inner[step] = {}
        if not last:
            inner = inner[step]
    return None


def _texts_of_env(path: Path, value: Any) -> Any:
    """Variables are texts: a number for one becomes its text."""
    if len(path) > 1 and path[-2] == "env" and isinstance(value, int | float):
        return text_of(value)
    if path[-1] == "env" and isinstance(value, dict):
        return {name: text_of(one) if isinstance(one, int | float) else one for name, one in value.items()}
    return value


# -- for a placeholder ---------------------------------------------------------------------------


def bare_braces(value: Any, placeholders: set[str], path: Path = ()) -> Iterator[tuple[str, str]]:
    """Placeholders without quotes: YAML takes ``{lr}`` for a mapping with a key and no value."""
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value.values())) is None and next(iter(value)) in placeholders:
            (name,) = value
            yield format_place(path), f'{{{name}}} without quotes is a mapping to YAML; write "{{{name}}}"'
        for key, inner in value.items():
            yield from bare_braces(inner, placeholders, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from bare_braces(inner, placeholders, (*path, index))


def placeholders_of(text: str) -> set[str]:
    """Names of the placeholders in a text."""
    return {match["name"] for match in _TOKEN.finditer(text) if match["name"]}


def fill_text(text: str, values: Mapping[str, Any]) -> str:
    """A text that nothing fills in later, with the values of its placeholders."""
    return _TOKEN.sub(lambda match: text_of(values[match["name"]]) if match["name"] in values else match[0], text)


def escape_value(value: Any) -> Any:
    """A value as the file has to write it for the run to get it as it is: ``{rank}`` in it becomes ``{{rank}}``."""
    if isinstance(value, str):
        return _BRACED.sub(lambda match: _doubled(match[0]), value)
    if isinstance(value, dict):
        return {escape_value(key): escape_value(inner) for key, inner in value.items()}
    return [escape_value(inner) for inner in value] if isinstance(value, list) else value


def _doubled(word: str) -> str:
    """``{word}`` in double braces, where filling it in takes these off again."""
    return f"{{{word}}}" if fill_placeholders(f"{{{word}}}", {}) == word else word


class _ProbeValues(dict[str, str]):
    """A value for every placeholder that no text can hold: it shows what is filled in and what is not."""

    def __missing__(self, name: str) -> str:
        return f"\0{name}\0"


def join_literally(parts: Sequence[tuple[str, bool]]) -> str | None:
    """Texts of the file and values (true) as one text, from which the run gets every value as it is.

    None where it cannot: braces of two values around a placeholder of the run look like the literal ``{{rank}}``.
    """
    text = "".join(part for part, _ in parts)
    held: list[tuple[int, int]] = []
    end = 0
    for part, is_value in parts:
        start, end = end, end + len(part)
        if is_value:
            held.append((start, end))

    def word(match: re.Match[str]) -> str:
        of_value = any(match.start() < last and first < match.end() for first, last in held)
        return _doubled(match[0]) if of_value else match[0]

    joined, marks = _BRACED.sub(word, text), _ProbeValues()
    wanted = "".join(part if is_value else fill_placeholders(part, marks) for part, is_value in parts)
    return joined if fill_placeholders(joined, marks) == wanted else None


def _is_filled_later(path: Path) -> bool:
    """Whether the run fills its own placeholders in at this place."""
    if path[0] in _OF_PROCESSES:
        return not _FILLED.isdisjoint(path)
    return path[0] in _FILLED_WHOLE or path[:2] == ("container", "mounts")


class PointFiller:
    """Puts the values of one point into the texts of its file, in one pass."""

    def __init__(self, values: Mapping[str, Any], placeholders: set[str]) -> None:
        self._values = values
        self._placeholders = placeholders
        self.used: set[str] = set()
        self.problems: list[str] = []

    def mapping(self, value: dict[str, Any], path: Path) -> dict[str, Any]:
        """A mapping with its texts filled in; a text that is nothing but a placeholder of null is left out."""
        filled = {key: self._value(inner, (*path, key), value) for key, inner in value.items()}
        return {key: inner for key, inner in filled.items() if inner is not None or value[key] is None}

    def _value(self, value: Any, path: Path, parent: Mapping[str, Any]) -> Any:
        if isinstance(value, dict):
            return self.mapping(value, path)
        if path == _PREAMBLE and isinstance(value, str):
            return self._text(value, path, plain=True)
        if _is_command(path) and isinstance(value, str | list):
            return self._command(value, path, shell=_is_of_workers(path) and bool(parent.get("shell")))
        if isinstance(value, list):
            return [self._value(inner, (*path, index), {}) for index, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        whole = _TOKEN.fullmatch(value)
        if whole and whole["name"] in self._values and "env" not in path[-2:-1]:
            self.used.add(whole["name"])
            given = copy.deepcopy(self._values[whole["name"]])
            return escape_value(given) if _is_filled_later(path) else given
        return self._text(value, path, known="env" in path[-2:-1] or "args" in path[-2:-1])

    def _command(self, command: str | list[Any], path: Path, *, shell: bool) -> str | list[Any]:
        """A command. Its words are split before values are put into them, and no value becomes code of a shell."""
        if isinstance(command, str):
            if not placeholders_of(command):
                return command
            if shell:
                return self._text(command, path, plain=True)
            try:
                command = shlex.split(command)
            except ValueError:
                return command  # told when the point is checked
        texts = [word if isinstance(word, str) else "" for word in command]
        code = shell_text_index(texts)
        return [
            self._text(word, path, plain=index == code) if isinstance(word, str) else word
            for index, word in enumerate(command)
        ]

    def _text(self, text: str, path: Path, *, plain: bool = False, known: bool = True) -> str:
        """A text with its placeholders filled in; with ``plain`` values that mean something to a shell are refused."""
        place = format_place(path)
        parts: list[tuple[str, bool]] = []
        end = 0
        for match in _TOKEN.finditer(text):
            if (name := match["name"]) is None:
                continue
            if name not in self._values:
                self._say_unknown(name, place, sure=known and not plain)
                continue
            parts += [(text[end : match.start()], False), (self._given(name, place, plain=plain), True)]
            end = match.end()
        parts.append((text[end:], False))
        if not _is_filled_later(path):
            return "".join(part for part, _ in parts)
        if (joined := join_literally(parts)) is None:
            told = "".join(part for part, _ in parts)
            why = "braces of values around a placeholder look like a literal one; put something between them"
            self.problems.append(f"{place}: {told!r}: {why}")
        return joined or ""

    def _given(self, name: str, place: str, *, plain: bool) -> str:
        """The value of a placeholder within a text; told when it cannot stand there."""
        self.used.add(name)
        value = self._values[name]
        if isinstance(value, list | dict | None):
            kind = "null" if value is None else "a list" if isinstance(value, list) else "a mapping"
            self.problems.append(f"{place}: {{{name}}} is {kind}, which cannot stand within a text")
        filled = text_of(value)
        if plain and not _PLAIN.fullmatch(filled):
            cure = f'hand it over by env: {{{name.upper()}: "{{{name}}}"}} and write "${name.upper()}"'
            if place == format_place(_PREAMBLE):  # no variable of the file has a value where the batch script begins
                cure = "letters, digits and _ . , : / @ % + = - alone can stand there"
            self.problems.append(f"{place}: {filled!r} of {{{name}}} would be code to a shell; {cure}")
        return filled

    def _say_unknown(self, name: str, place: str, *, sure: bool) -> None:
        """A placeholder that nobody fills in would go to the program as it stands."""
        if is_reserved_name(name):
            return
        near = difflib.get_close_matches(name, sorted(self._values), 1, 0.6)
        if name in self._placeholders:
            self.problems.append(f"{place}: {{{name}}} has no value at this point; give it one at every point")
        elif near or sure:
            hint = f'; did you mean "{{{near[0]}}}"?' if near else f"; for braces that stay write {{{{{name}}}}}"
            self.problems.append(f"{place}: {{{name}}} is no placeholder{hint}")


def _is_command(path: Path) -> bool:
    """Whether this is the command of a role, of a front end or of the benchmark."""
    return path in (("frontend", "command"), ("benchmark", "command")) or (
        _is_of_workers(path) and path[-1] == "command"
    )


def _is_of_workers(path: Path) -> bool:
    """Whether this is a key of a role."""
    return len(path) == 3 and path[0] == "workers"
