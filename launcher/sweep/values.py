"""Put the values of one point of a sweep into its job file. Pure.

A value for a place of the file acts as if it were written there. A value for a placeholder is data: its own braces are
never filled in, neither here nor in the run.
"""

import copy
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from exporter.contract.records import JsonObject, JsonValue
from launcher.jobfile.yamlfile import join_place, yaml_text
from launcher.plan.placeholders import VARIABLES, fill_placeholders, shell_text_index

POINT, POINT_INDEX = "point", "point_index"  # placeholders in every sweep: name and index of the point

Path = tuple[str | int, ...]  # keys and indexes from the root of a job file to a value

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
# A literal ``{{name}}``, a shell's ``${name}``, or a placeholder.
_TOKEN = re.compile(rf"\{{\{{{_WORD}\}}\}}|\$\{{{_WORD}\}}|\{{(?P<name>{_WORD})\}}")
_BRACED = re.compile(rf"\{{{_WORD}\}}")
_RUN_PLACEHOLDER = re.compile(r"(?:host|ip|port)_\d+|[a-z_]+_port|leader|head|worker_size|worker_nodes")
_SHELL_SAFE = re.compile(r"[A-Za-z0-9_.,:/@%+=-]*")  # text without meaning to any shell, in any quotes
_PREAMBLE_PATH = ("setup", "preamble")
_PROCESS_SECTIONS = ("workers", "backend", "frontend", "benchmark")
_FILLED_KEYS = frozenset({"command", "env", "args", "config"})  # keys of processes in which the run fills placeholders
_FILLED_SECTIONS = ("env", "inputs")  # parts of the file in which the run fills all text


def is_reserved_name(name: str) -> bool:
    """Whether a placeholder name belongs to the run or to every sweep."""
    return name in VARIABLES or name in (POINT, POINT_INDEX) or bool(_RUN_PLACEHOLDER.fullmatch(name))


def format_place(path: Path) -> str:
    """Format a path as errors show it."""
    return join_place(path) or "the job file"


def parse_place(place: str) -> Path:
    """Parse a place written by ``format_place``."""
    found = re.findall(r"\[(\d+)\]|([^.\[\]]+)", place)
    return tuple(int(index) if index else word for index, word in found)


def value_at(value: object, path: Path) -> object:
    for step in path:
        if isinstance(step, int):
            value = value[step] if isinstance(value, list) and step < len(value) else None
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


# -- places of the file --------------------------------------------------------------------------


def merge(base: JsonValue, override: JsonValue) -> JsonValue:
    """Merge ``override`` into ``base``: mappings key by key, null removes a key, anything else replaces."""
    if not isinstance(override, Mapping):
        return copy.deepcopy(override)
    merged = dict(base) if isinstance(base, Mapping) else {}
    for key, value in override.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def index_role(path: Path, body: JsonObject) -> tuple[Path, str | None]:
    """The place of a role's key, ``workers.ROLE.key``, by the role's index, or the problem; others stay as they are."""
    if path[0] != "workers" or len(path) < 2 or isinstance(path[1], int):
        return path, None
    entries = body.get("workers")
    roles = [
        entry.get("role", "worker") if isinstance(entry, dict) else None
        for entry in (entries if isinstance(entries, list) else ())
    ]
    if path[1] not in roles:
        known = ", ".join(str(role) for role in roles) or "none"
        return path, f'workers has no role "{path[1]}" (known: {known})'
    return (path[0], roles.index(path[1]), *path[2:]), None


def assign_value(body: dict[str, JsonValue], path: Path, key: str, value: JsonValue) -> str | None:
    """Put a value at its place. Returns the problem with that place, or None."""
    inner: JsonValue = body
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        at = format_place(path[:depth])
        if isinstance(step, int):
            if not isinstance(inner, list):
                return f"{key}: {at} is not a list"
            if step >= len(inner):
                return f"{key}: {at} has {len(inner)} entr{'y' if len(inner) == 1 else 'ies'}, counted from 0"
            if last and value is None:
                return f"{key}: null cannot remove an entry of a list; give the whole list"
            if last:
                inner[step] = merge(inner[step], _env_numbers_to_text(path, value))
            inner = inner[step]
        else:
            if not isinstance(inner, dict):
                return f"{key}: {at} is not a mapping"
            if last and value is None:
                inner.pop(step, None)
                return None
            if last:
                inner[step] = merge(inner.get(step), _env_numbers_to_text(path, value))
            elif inner.get(step) is None:
                inner[step] = {}
            inner = inner[step]
    return None


def _env_numbers_to_text(path: Path, value: JsonValue) -> JsonValue:
    """Convert numbers for variables to text."""
    if len(path) > 1 and path[-2] == "env" and isinstance(value, int | float):
        return yaml_text(value)
    if path[-1] == "env" and isinstance(value, dict):
        return {name: yaml_text(one) if isinstance(one, int | float) else one for name, one in value.items()}
    return value


# -- placeholders --------------------------------------------------------------------------------


def unquoted_placeholders(value: object, placeholders: set[str], path: Path = ()) -> Iterator[tuple[str, str]]:
    """Problems of placeholders without quotes: to YAML, ``{lr}`` is a mapping."""
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value.values())) is None and next(iter(value)) in placeholders:
            (name,) = value
            yield format_place(path), f'{{{name}}} without quotes is a mapping to YAML; write "{{{name}}}"'
        for key, inner in value.items():
            yield from unquoted_placeholders(inner, placeholders, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from unquoted_placeholders(inner, placeholders, (*path, index))


def find_placeholders(text: str) -> set[str]:
    return {match["name"] for match in _TOKEN.finditer(text) if match["name"]}


def fill_text(text: str, values: JsonObject) -> str:
    """Fill the placeholders of a text that the run does not fill again."""
    return _TOKEN.sub(lambda match: yaml_text(values[match["name"]]) if match["name"] in values else match[0], text)


def escape_text(text: str) -> str:
    """Escape a text so that the run gets it unchanged: ``{rank}`` becomes ``{{rank}}``."""
    return _BRACED.sub(lambda match: _double_braces(match[0]), text)


def escape_value(value: JsonValue) -> JsonValue:
    """Escape all texts of a value."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, dict):
        return {escape_text(key): escape_value(inner) for key, inner in value.items()}
    return [escape_value(inner) for inner in value] if isinstance(value, list) else value


def _double_braces(word: str) -> str:
    """``{word}`` in double braces, if the run would remove one pair of them."""
    return f"{{{word}}}" if fill_placeholders(f"{{{word}}}", {}) == word else word


class _ProbeValues(dict[str, str]):
    """A mark for each placeholder that no text contains, to detect which are filled in."""

    def __missing__(self, name: str) -> str:
        return f"\0{name}\0"


def join_literally(parts: Sequence[tuple[str, bool]]) -> str | None:
    """Join texts of the file and values (true) so that the run gets every value unchanged.

    None if impossible: braces of two values around a placeholder look like the literal ``{{rank}}``.
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
        return _double_braces(match[0]) if of_value else match[0]

    joined, marks = _BRACED.sub(word, text), _ProbeValues()
    wanted = "".join(part if is_value else fill_placeholders(part, marks) for part, is_value in parts)
    return joined if fill_placeholders(joined, marks) == wanted else None


def _is_filled_later(path: Path) -> bool:
    """Whether the run fills placeholders at this place."""
    if path[0] in _PROCESS_SECTIONS:
        return not _FILLED_KEYS.isdisjoint(path)
    return path[0] in _FILLED_SECTIONS or path[:2] == ("container", "mounts")


class PointFiller:
    """The values of one point, put into the texts of its job file in one pass."""

    def __init__(self, values: JsonObject, placeholders: set[str]) -> None:
        self._values = values
        self._placeholders = placeholders
        self.used_placeholders: set[str] = set()
        self.problems: list[str] = []

    def fill_mapping(self, value: dict[str, JsonValue], path: Path) -> dict[str, JsonValue]:
        """A mapping with its texts filled in; a text that only names a placeholder whose value is null is dropped."""
        filled = {key: self._fill_value(inner, (*path, key), value) for key, inner in value.items()}
        return {key: inner for key, inner in filled.items() if inner is not None or value[key] is None}

    def _fill_value(self, value: JsonValue, path: Path, parent: JsonObject) -> JsonValue:
        if isinstance(value, dict):
            return self.fill_mapping(value, path)
        if path == _PREAMBLE_PATH and isinstance(value, str):
            return self._fill_text(value, path, is_shell_code=True)
        if _is_command(path) and isinstance(value, str | list):
            return self._fill_command(value, path, shell=_is_role_path(path) and bool(parent.get("shell")))
        if isinstance(value, list):
            return [self._fill_value(inner, (*path, index), {}) for index, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        whole = _TOKEN.fullmatch(value)
        if whole and whole["name"] in self._values and "env" not in path[-2:-1]:
            self.used_placeholders.add(whole["name"])
            given = copy.deepcopy(self._values[whole["name"]])
            return escape_value(given) if _is_filled_later(path) else given
        return self._fill_text(value, path, reports_unknown="env" in path[-2:-1] or "args" in path[-2:-1])

    def _fill_command(self, command: str | list[JsonValue], path: Path, *, shell: bool) -> str | list[JsonValue]:
        """Fill in a command. Words are split first, so that no value becomes shell code."""
        if isinstance(command, str):
            if not find_placeholders(command):
                return command
            if shell:
                return self._fill_text(command, path, is_shell_code=True)
            try:
                command = [*shlex.split(command)]
            except ValueError:
                return command  # reported when the point is checked
        texts = [word if isinstance(word, str) else "" for word in command]
        code = shell_text_index(texts)
        return [
            self._fill_text(word, path, is_shell_code=index == code) if isinstance(word, str) else word
            for index, word in enumerate(command)
        ]

    def _fill_text(self, text: str, path: Path, *, is_shell_code: bool = False, reports_unknown: bool = True) -> str:
        """Fill in a text; ``is_shell_code`` refuses values that a shell would interpret."""
        place = format_place(path)
        parts: list[tuple[str, bool]] = []
        end = 0
        for match in _TOKEN.finditer(text):
            if (name := match["name"]) is None:
                continue
            if name not in self._values:
                self._report_unknown(name, place, is_certain=reports_unknown and not is_shell_code)
                continue
            parts += [
                (text[end : match.start()], False),
                (self._placeholder_text(name, place, is_shell_code=is_shell_code), True),
            ]
            end = match.end()
        parts.append((text[end:], False))
        if not _is_filled_later(path):
            return "".join(part for part, _ in parts)
        if (joined := join_literally(parts)) is None:
            filled = "".join(part for part, _ in parts)
            why = "braces of values around a placeholder form a literal one; put something between them"
            self.problems.append(f"{place}: {filled!r}: {why}")
        return joined or ""

    def _placeholder_text(self, name: str, place: str, *, is_shell_code: bool) -> str:
        """The value of a placeholder within a text; adds a problem if it does not fit there."""
        self.used_placeholders.add(name)
        value = self._values[name]
        if isinstance(value, list | dict | None):
            kind = "null" if value is None else "a list" if isinstance(value, list) else "a mapping"
            self.problems.append(f"{place}: {{{name}}} is {kind}, which cannot be part of a text")
        filled = yaml_text(value)
        if is_shell_code and not _SHELL_SAFE.fullmatch(filled):
            fix = f'pass it in env: {{{name.upper()}: "{{{name}}}"}} and write "${name.upper()}"'
            if place == format_place(_PREAMBLE_PATH):  # no variables are set yet where the batch script begins
                fix = "only letters, digits and _ . , : / @ % + = - are allowed there"
            self.problems.append(f"{place}: {filled!r} of {{{name}}} would be interpreted by the shell; {fix}")
        return filled

    def _report_unknown(self, name: str, place: str, *, is_certain: bool) -> None:
        """Add a problem for an unknown placeholder: the program would get it as it is."""
        if is_reserved_name(name):
            return
        near = difflib.get_close_matches(name, sorted(self._values), 1, 0.6)
        if name in self._placeholders:
            self.problems.append(f"{place}: {{{name}}} has no value at this point; give it one at every point")
        elif near or is_certain:
            hint = f'; did you mean "{{{near[0]}}}"?' if near else f"; to keep the braces write {{{{{name}}}}}"
            self.problems.append(f"{place}: {{{name}}} is not a placeholder{hint}")


def _is_command(path: Path) -> bool:
    """Whether this is the command of a role, front end or benchmark."""
    return path in (("frontend", "command"), ("benchmark", "command")) or (
        _is_role_path(path) and path[-1] == "command"
    )


def _is_role_path(path: Path) -> bool:
    return len(path) == 3 and path[0] == "workers"
