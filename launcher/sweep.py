"""A job file with a sweep becomes its points: each a job file of its own, and a name. Pure.

Values are data: they are put into the file once, with their types, and what they hold is not looked at again.
"""

import copy
import difflib
import hashlib
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config import JobSpec, check_job
from launcher.errors import ConfigError
from launcher.fill import VARIABLES, shell_text_index
from launcher.plan import file_word
from launcher.spec_sweep import SweepFile, SweepSpec
from launcher.yamlfile import validate

MOST_POINTS = 10_000
MOST_NAME = 64
"""Characters of a point's name: it stands in file names, labels and tables."""
MOST_NAMED = 3
"""Points that an error names one by one."""

POINT, POINT_INDEX = "point", "point_index"
"""Placeholders that every sweep has: name and number of the point."""

Path = tuple[str | int, ...]
"""Keys and indexes from the root of a job file to one of its values."""

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_NAME = re.compile(_WORD)
_TOKEN = re.compile(rf"\{{\{{{_WORD}\}}\}}|\$\{{{_WORD}\}}|\{{(?P<name>{_WORD})\}}")
"""A literal ``{{name}}``, a shell's ``${name}``, or a placeholder."""
_PATH = re.compile(r"[^.\[\]\s]+(?:\[\d+\])*(?:\.[^.\[\]\s]+(?:\[\d+\])*)*")
_OF_A_RUN = re.compile(r"host_\d+|port_\d+|[a-z_]+_port|leader|head|worker_size|worker_nodes")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]*")
"""Text that means itself to every shell, whatever quotes are around it."""
_FIELDS = frozenset(JobSpec.model_fields) - {"sweep"}
_COMMANDS = ("command", "preamble")


@dataclass(frozen=True)
class Point:
    """One job of a sweep."""

    index: int
    name: str
    """Safe in file names, and no other point's."""
    values: Mapping[str, Any]
    """What it sets, by key of the sweep."""
    body: Mapping[str, Any]
    """Its job file."""


@dataclass(frozen=True)
class Sweep:
    """All points of a job file, in their order."""

    name: str
    points: tuple[Point, ...]
    max_parallel: int | None


@dataclass(frozen=True)
class _Key:
    """A key of the sweep: a place of the file, or a placeholder when the path is empty."""

    text: str
    path: Path


def is_sweep(body: Mapping[str, Any]) -> bool:
    """Whether a job file stands for several jobs."""
    return body.get("sweep") is not None


def expand(body: Mapping[str, Any], source: str) -> Sweep:
    """The points of the job file ``body``; raises ConfigError with every problem of the sweep itself."""
    spec = validate({"sweep": body["sweep"]}, source, SweepFile).sweep
    base = {key: value for key, value in body.items() if key != "sweep"}
    keys, problems = _keys(spec, base)
    problems += _shape_problems(spec)
    if problems:
        raise ConfigError(source, problems)
    placeholders = {key.text for key in keys.values() if not key.path}
    problems += [f"{place}: {what}" for place, what in _bare_braces(base, placeholders)]
    found = _Problems()
    points: list[Point] = []
    used: set[str] = set()
    names = _Names()
    name = base["name"] if isinstance(base.get("name"), str) else "job"
    for index, values in enumerate(_combinations(spec)):
        made = copy.deepcopy(base)
        told = [_assign(made, keys[key].path, key, value) for key, value in values.items() if keys[key].path]
        own = {key: value for key, value in values.items() if not keys[key].path}
        given = made.get("name")
        if given == base.get("name") and not (isinstance(given, str) and _placeholders_of(given) & placeholders):
            point = names.take(f"{name}_{_label(values)}" if values else name)
        else:
            point = names.take(_fill_text(str(given), {**own, POINT_INDEX: index}))
        filler = _Filler({**own, POINT: point, POINT_INDEX: index}, placeholders)
        made = filler.mapping(made, ())
        if "name" in made:
            made["name"] = point
        used |= filler.used
        found.add(point, [problem for problem in told if problem] + filler.problems)
        points.append(Point(index, point, values, made))
    problems += found.render(len(points))
    problems += [_unused(name, base) for name in sorted(placeholders - used)] if not problems else []
    if problems:
        raise ConfigError(source, problems)
    return Sweep(name, tuple(points), spec.max_parallel)


def check_points(sweep: Sweep, source: str) -> tuple[JobSpec, ...]:
    """The job of every point; raises ConfigError with all problems of all points."""
    found, specs = _Problems(), []
    for point in sweep.points:
        try:
            specs.append(check_job(dict(point.body), source))
        except ConfigError as error:
            found.add(point.name, error.problems)
    if problems := found.render(len(sweep.points)):
        raise ConfigError(source, problems)
    return tuple(specs)


def merge_problems(problems: Mapping[str, Sequence[str]], points: int) -> list[str]:
    """Problems by name of the point as one list, each of them once with the points that have it."""
    found = _Problems()
    for name, told in problems.items():
        found.add(name, told)
    return found.render(points)


class _Problems:
    """Problems of points; the same one of several points is told once."""

    def __init__(self) -> None:
        self._points: dict[str, list[str]] = {}

    def add(self, point: str, problems: Sequence[str]) -> None:
        for problem in problems:
            self._points.setdefault(problem, []).append(point)

    def render(self, points: int) -> list[str]:
        return [f"{_which(names, points)}: {problem}" for problem, names in self._points.items()]


def _which(names: Sequence[str], points: int) -> str:
    if len(names) == points > 1:
        return f"all {points} points"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


# -- keys and combinations -----------------------------------------------------------------------


def _keys(spec: SweepSpec, base: Mapping[str, Any]) -> tuple[dict[str, _Key], list[str]]:
    """What each key of the sweep means, and what is wrong with them."""
    keys: dict[str, _Key] = {}
    problems: list[str] = []
    seen: dict[Path, str] = {}
    places = [("grid", key) for key in spec.grid] + [("zip", key) for key in spec.zip]
    for part, key in places:
        place = f"sweep.{part}.{key}"
        path, problem = _path_of(key, base)
        if problem:
            problems.append(f"{place}: {problem}")
            continue
        meant = path or (key,)
        if meant in seen:
            problems.append(f"{place}: {seen[meant]} sets the same; leave one of them out")
        seen.setdefault(meant, place)
        keys[key] = _Key(key, path)
    for index, point in enumerate(spec.list):
        for key in point:
            path, problem = _path_of(key, base)
            if problem:
                problems.append(f"sweep.list[{index}].{key}: {problem}")
            else:
                keys[key] = _Key(key, path)
    return keys, problems


def _path_of(key: str, base: Mapping[str, Any]) -> tuple[Path, str | None]:
    """The place of the job file that a key names (empty for a placeholder), or what is wrong with it."""
    if not _PATH.fullmatch(key):
        return (), f"{key!r} is neither a place of the job file (as in workers[0].gpus) nor a name for a placeholder"
    words: list[str | int] = []
    for part in key.split("."):
        name, *indexes = part.replace("]", "").split("[")
        words += [name, *map(int, indexes)]
    if words[0] == "sweep":
        return (), "a sweep cannot change itself"
    if words[0] not in _FIELDS:
        if len(words) == 1 and _NAME.fullmatch(key):
            return (), f"{{{key}}} already stands for something; choose another name" if is_taken(key) else None
        near = difflib.get_close_matches(str(words[0]), sorted(_FIELDS), 1, 0.5)
        hint = f'; did you mean "{near[0]}"?' if near else f" (known: {', '.join(sorted(_FIELDS))})"
        if len(words) == 1:
            hint += "; a placeholder is made of letters, digits and _"
        return (), f'unknown key "{words[0]}"{hint}'
    if words[0] == "workers" and len(words) > 1 and isinstance(words[1], str):
        entries = base.get("workers")
        roles = [
            entry.get("role", "worker") if isinstance(entry, dict) else None
            for entry in (entries if isinstance(entries, list) else ())
        ]
        if words[1] not in roles:
            known = ", ".join(str(role) for role in roles) or "none"
            return (), f'workers has no role "{words[1]}" (there: {known})'
        words[1] = roles.index(words[1])
    return tuple(words), None


def is_taken(name: str) -> bool:
    """Whether a placeholder of this name has a meaning of its own: of the run, or of every sweep."""
    return name in VARIABLES or name in (POINT, POINT_INDEX) or bool(_OF_A_RUN.fullmatch(name))


def _shape_problems(spec: SweepSpec) -> list[str]:
    problems = [
        f"sweep.{part}.{key}: is empty"
        for part, lists in (("grid", spec.grid), ("zip", spec.zip))
        for key, values in lists.items()
        if not values
    ]
    lengths = {key: len(values) for key, values in spec.zip.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        problems.append(f"sweep.zip: its lists go side by side and must be as long as each other: {told}")
    if not (spec.grid or spec.zip or spec.list):
        problems.append("sweep: has no points; give grid, zip or list")
    count = math.prod(map(len, spec.grid.values())) * (max(lengths.values(), default=1)) * (len(spec.list) or 1)
    if count > MOST_POINTS:
        problems.append(
            f"sweep: makes {count} points and the limit is {MOST_POINTS}; take fewer values, or several files"
        )
    for part, values in (("grid", spec.grid), ("zip", spec.zip), ("list", dict(enumerate(spec.list)))):
        for key, value in values.items():
            place = f"sweep.{part}[{key}]" if part == "list" else f"sweep.{part}.{key}"
            problems += [f"{at}: {what}" for at, what in _no_data(value, place)]
    return problems


def _no_data(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Values that YAML knows and a job file does not, such as dates."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{place}.{key}", f"the key {key!r} is not a text; write it in quotes"
            yield from _no_data(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _no_data(inner, f"{place}[{index}]")
    elif not isinstance(value, str | int | float | bool | None):
        yield place, f"{value} is a {type(value).__name__} to YAML; write it in quotes"


def _combinations(spec: SweepSpec) -> Iterator[dict[str, Any]]:
    """What each point sets: grid, then zip, then list, the first slowest."""
    grid = itertools.product(*spec.grid.values())
    side_by_side = list(zip(*spec.zip.values(), strict=True)) if spec.zip else [()]
    for combined in grid:
        for beside in side_by_side:
            for point in spec.list or [{}]:
                yield {
                    **dict(zip(spec.grid, combined, strict=True)),
                    **dict(zip(spec.zip, beside, strict=True)),
                    **point,
                }


# -- values into the file ------------------------------------------------------------------------


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


def _assign(body: dict[str, Any], path: Path, key: str, value: Any) -> str | None:
    """Put a value at its place; what is wrong with the place, if anything is."""
    inner: Any = body
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        at = place_of(path[:depth])
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


def place_of(path: Path) -> str:
    """A path as errors write it."""
    place = ""
    for step in path:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else step
    return place or "the job file"


def text_of(value: Any) -> str:
    """A value as a text, as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _bare_braces(value: Any, placeholders: set[str], path: Path = ()) -> Iterator[tuple[str, str]]:
    """Placeholders without quotes: YAML takes ``{lr}`` for a mapping with a key and no value."""
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value.values())) is None and next(iter(value)) in placeholders:
            (name,) = value
            yield place_of(path), f'{{{name}}} without quotes is a mapping to YAML; write "{{{name}}}"'
        for key, inner in value.items():
            yield from _bare_braces(inner, placeholders, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _bare_braces(inner, placeholders, (*path, index))


def _placeholders_of(text: str) -> set[str]:
    return {match["name"] for match in _TOKEN.finditer(text) if match["name"]}


def _fill_text(text: str, values: Mapping[str, Any]) -> str:
    return _TOKEN.sub(lambda match: text_of(values[match["name"]]) if match["name"] in values else match[0], text)


class _Filler:
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
        key = path[-1]
        if key in _COMMANDS and isinstance(value, str | list):
            return self._command(value, path, shell=bool(parent.get("shell")) or not _is_of_workers(path))
        if isinstance(value, list):
            return [self._value(inner, (*path, index), {}) for index, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        whole = _TOKEN.fullmatch(value)
        if whole and whole["name"] in self._values and "env" not in path[-2:-1]:
            self.used.add(whole["name"])
            return copy.deepcopy(self._values[whole["name"]])
        return self._text(value, path, known="env" in path[-2:-1] or "args" in path[-2:-1])

    def _command(self, command: str | list[Any], path: Path, *, shell: bool) -> str | list[Any]:
        """A command. Its words are split before values are put into them, and no value becomes code of a shell."""
        if isinstance(command, str):
            if not _placeholders_of(command):
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
        place = place_of(path)

        def part(match: re.Match[str]) -> str:
            name = match["name"]
            if not name:
                return match[0]
            if name not in self._values:
                self._say_unknown(name, place, sure=known and not plain)
                return match[0]
            self.used.add(name)
            value = self._values[name]
            if isinstance(value, list | dict | None):
                kind = "null" if value is None else "a list" if isinstance(value, list) else "a mapping"
                self.problems.append(f"{place}: {{{name}}} is {kind}, which cannot stand within a text")
            filled = text_of(value)
            if plain and not _PLAIN.fullmatch(filled):
                cure = f'hand it over by env: {{{name.upper()}: "{{{name}}}"}} and write "${name.upper()}"'
                self.problems.append(f"{place}: {filled!r} of {{{name}}} would be code to a shell; {cure}")
            return filled

        return _TOKEN.sub(part, text)

    def _say_unknown(self, name: str, place: str, *, sure: bool) -> None:
        """A placeholder that nobody fills in would go to the program as it stands."""
        if is_taken(name):
            return
        near = difflib.get_close_matches(name, sorted(self._values), 1, 0.6)
        if name in self._placeholders:
            self.problems.append(f"{place}: {{{name}}} has no value at this point; give it one at every point")
        elif near or sure:
            hint = f'; did you mean "{{{near[0]}}}"?' if near else f"; for braces that stay write {{{{{name}}}}}"
            self.problems.append(f"{place}: {{{name}}} is no placeholder{hint}")


def _is_of_workers(path: Path) -> bool:
    """Whether this is the command of a role, which may be a list of words."""
    return len(path) == 3 and path[0] == "workers"


def _unused(name: str, base: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, sorted(_FIELDS), 1, 0.6)
    hint = f', or did you mean the key "{near[0]}"?' if near else ""
    where = f'put it into a command, env or args in quotes: "{{{name}}}"'
    return f"sweep: {{{name}}} stands nowhere in the job file; {where}{hint}"


# -- names ---------------------------------------------------------------------------------------


class _Names:
    """Names of points: safe, short, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, wanted: str) -> str:
        """``wanted`` as a name that no other point has."""
        name = short_name(wanted)
        number = 1
        while name in self._taken:
            number += 1
            name = short_name(f"{short_name(wanted, MOST_NAME - 8)}_{number}")
        self._taken.add(name)
        return name


def short_name(wanted: str, most: int = MOST_NAME) -> str:
    """A text as a word for file names; a long one is cut and gets a hash of the whole, so that it stays its own."""
    word = re.sub(r"[^\w.-]+", "_", wanted).strip("._-")
    if word and word == file_word(word) and len(word) <= most and word == wanted:
        return word
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", wanted).strip("._-") or "point"
    if len(plain) <= most:
        return plain
    digest = hashlib.sha256(wanted.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{plain[: most - 9].rstrip('._-')}-{digest}"


def _label(values: Mapping[str, Any]) -> str:
    """What a point sets, as short words: ``lr1e-05_bs8``."""
    leaves = [leaf for key, value in values.items() for leaf in _leaves(tuple(key.split(".")), value)]
    lasts = [words[-1] for words, _ in leaves]
    named = [(words[-1:] if lasts.count(words[-1]) == 1 else words[-2:], value) for words, value in leaves]
    return "_".join(re.sub(r"[\[\]]", "", ".".join(words)) + _value_word(value) for words, value in named)


def _leaves(words: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values within a value that are no mappings, each with the words of its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*words, key), inner)
    else:
        yield words, value


def _value_word(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(_value_word, value))
    return re.sub(r"[^\w.+-]+", "-", text_of(value)).replace("+", "")
