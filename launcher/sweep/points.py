"""Expand a job file with a sweep into its points: a job file and a name each. Pure.

``values.py`` puts the values of a point into its job file, ``names.py`` names it.
"""

import copy
import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonObject, JsonValue
from launcher.errors import ConfigError, did_you_mean
from launcher.jobfile.jobfile import JobSpec, validate_job
from launcher.jobfile.sweep import SweepFile, SweepSpec
from launcher.jobfile.yamlfile import validate_model
from launcher.sweep.names import PointNames, point_label
from launcher.sweep.secret_values import secret_problems
from launcher.sweep.values import (
    POINT,
    POINT_INDEX,
    Path,
    PointFiller,
    assign_value,
    fill_text,
    find_placeholders,
    format_place,
    index_role,
    is_reserved_name,
    parse_place,
    unquoted_placeholders,
    value_at,
)

MOST_POINTS = 10_000
MOST_NAMED = 3  # points that a problem names

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[^.\[\]\s]+(?:\[\d+\])*(?:\.[^.\[\]\s]+(?:\[\d+\])*)*")
_FIELDS = frozenset(JobSpec.model_fields) - {"sweep"}


@dataclass(frozen=True)
class PointSpec:
    """One job of a sweep."""

    index: int
    name: str  # unique, and safe in file names
    values: JsonObject  # by key of the sweep
    sources: Mapping[str, str]  # where the sweep sets each: `sweep.grid.lr[0]`
    body: JsonObject  # the point's job file


@dataclass(frozen=True)
class ExpandedSweep:
    """All points of a job file, in order."""

    name: str
    points: tuple[PointSpec, ...]
    max_parallel: int | None
    paths: Mapping[str, Path]  # place in the job file that each key sets; empty for a placeholder
    base: JsonObject  # the job file without its sweep


def is_sweep(body: JsonObject) -> bool:
    return body.get("sweep") is not None


def expand_sweep(body: JsonObject, source: str) -> ExpandedSweep:
    """The points of the job file ``body``. Raises ConfigError with all problems of the sweep itself."""
    sweep, problems = _try_expand(body, source)
    if problems or sweep is None:
        raise ConfigError(source, problems)
    return sweep


def check_points(sweep: ExpandedSweep, source: str) -> tuple[JobSpec, ...]:
    """The specification of every point. Raises ConfigError with the problems of all points."""
    found: dict[str, Sequence[str]] = {}
    specs = []
    for point in sweep.points:
        try:
            specs.append(validate_job(point.body, source))
        except ConfigError as error:
            found[point.name] = error.problems
    if problems := merge_problems(found, len(sweep.points)):
        raise ConfigError(source, problems)
    return tuple(specs)


def read_sweep(body: JsonObject, source: str) -> tuple[ExpandedSweep, tuple[JobSpec, ...]]:
    """The points of a job file and their specifications. Raises ConfigError with the problems of sweep and job file."""
    sweep, problems = _try_expand(body, source)
    if sweep is None:
        raise ConfigError(source, [*problems, *_problems_without_sweep(body, source)])
    try:
        specs = check_points(sweep, source)
    except ConfigError as error:
        # drop problems that follow from a value that could not be placed, which is reported
        spoilt = {part for problem in problems for part in problem.split(": ")[:2]}
        rest = [problem for problem in error.problems if problem.split(": ")[1] not in spoilt]
        raise ConfigError(source, [*problems, *rest]) from error
    if problems:
        raise ConfigError(source, problems)
    return sweep, specs


def _try_expand(body: JsonObject, source: str) -> tuple[ExpandedSweep | None, list[str]]:
    """The points, or None, and the problems of the sweep and of its values."""
    try:
        spec = validate_model({"sweep": body["sweep"]}, source, SweepFile).sweep
    except ConfigError as error:
        return None, list(error.problems)
    base = _without_sweep(body)
    keys, problems = _key_paths(spec, base)
    problems += _shape_problems(spec)
    if problems:
        return None, problems
    maker = _PointMaker(base, keys)
    problems += [f"{place}: {what}" for place, what in unquoted_placeholders(base, maker.placeholders)]
    made = [maker.make(index, settings) for index, settings in enumerate(_combinations(spec))]
    points = tuple(point for point, _ in made)
    secrets: dict[str, str] = {}
    for point in points:
        for problem in secret_problems(point.body, base, keys, point.sources):
            secrets.setdefault(problem.partition(": ")[0], problem)
    if secrets:  # the names in other problems would show the secret values
        return None, list(secrets.values())
    problems += merge_problems({point.name: filler.problems for point, filler in made}, len(points))
    if not problems:
        used = {name for _, filler in made for name in filler.used_placeholders}
        problems += [_unused_text(name) for name in sorted(maker.placeholders - used)]
    return ExpandedSweep(maker.sweep_name, points, spec.max_parallel, keys, base), problems


def _without_sweep(body: JsonObject) -> dict[str, JsonValue]:
    return {key: value for key, value in body.items() if key != "sweep"}


class _PointValue(NamedTuple):
    """One value of a point, and where the sweep sets it."""

    key: str
    value: JsonValue
    source: str


class _PointMaker:
    def __init__(self, base: JsonObject, paths: Mapping[str, Path]) -> None:
        self._base = base
        self._paths = paths
        self._names = PointNames()
        self.placeholders = {key for key, path in paths.items() if not path}
        name = base.get("name")
        self.sweep_name = name if isinstance(name, str) else "job"

    def make(self, index: int, settings: Sequence[_PointValue]) -> tuple[PointSpec, PointFiller]:
        """The point with these values, and what filled them in, with all problems."""
        values = {setting.key: setting.value for setting in settings}
        body = copy.deepcopy(dict(self._base))
        placed = {key: value for key, value in values.items() if self._paths[key]}
        assigned = [assign_value(body, self._paths[key], key, value) for key, value in placed.items()]
        own = {key: value for key, value in values.items() if key not in placed}
        name = self._choose_name(body, index, values, own)
        filler = PointFiller({**own, POINT: name, POINT_INDEX: index}, self.placeholders)
        body = filler.fill_mapping(body, ())
        filler.problems[:0] = [problem for problem in assigned if problem]
        if "name" in body:
            body["name"] = name
        return PointSpec(index, name, values, {setting.key: setting.source for setting in settings}, body), filler

    def _choose_name(self, body: JsonObject, index: int, values: JsonObject, own: JsonObject) -> str:
        """The name that the file or the point sets, else one made of the values."""
        given = body.get("name")
        has_placeholder = isinstance(given, str) and not find_placeholders(given).isdisjoint(self.placeholders)
        if given == self._base.get("name") and not has_placeholder:
            return self._names.make_unique(f"{self.sweep_name}_{point_label(values)}" if values else self.sweep_name)
        return self._names.make_unique(fill_text(str(given), {**own, POINT_INDEX: index}))


# -- problems ------------------------------------------------------------------------------------


def merge_problems(problems: Mapping[str, Sequence[str]], point_count: int) -> list[str]:
    """Merge the problems of points, by name, into a list: each once, with the points that have it."""
    found: dict[str, list[str]] = {}
    for name, of_point in problems.items():
        for problem in of_point:
            found.setdefault(problem, []).append(name)
    return [f"{_points_text(names, point_count)}: {problem}" for problem, names in found.items()]


def _points_text(names: Sequence[str], point_count: int) -> str:
    if len(names) == point_count > 1:
        return f"all {point_count} points"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _problems_without_sweep(body: JsonObject, source: str) -> list[str]:
    """Problems of the rest of a job file whose sweep is unusable, except in places that the sweep may set."""
    base = _without_sweep(body)
    try:
        validate_job(base, source)
    except ConfigError as error:
        decided = list(_places_set(body["sweep"], base))
        return [
            problem for problem in error.problems if not _is_set_by_sweep(problem.partition(": ")[0], base, decided)
        ]
    return []


def _places_set(sweep: object, base: JsonObject) -> Iterator[str]:
    """Places that a sweep sets, as far as it is readable."""
    parts = sweep if isinstance(sweep, Mapping) else {}
    listed = parts.get("list")
    for part in (parts.get("grid"), parts.get("zip"), *(listed if isinstance(listed, list) else ())):
        for key in part if isinstance(part, Mapping) else ():
            path, problem = _parse_key(str(key), base)
            if path and not problem:
                yield format_place(path)


def _is_set_by_sweep(place: str, base: JsonObject, places_set: Sequence[str]) -> bool:
    """Whether points decide the value at a place: the sweep sets it, or its text has a placeholder."""
    if any(_is_within(place, other) or _is_within(other, place) for other in places_set):
        return True
    value = value_at(base, parse_place(place))
    return isinstance(value, str) and any(not is_reserved_name(name) for name in find_placeholders(value))


def _is_within(place: str, other: str) -> bool:
    return place == other or place.startswith((f"{other}.", f"{other}["))


def _unused_text(name: str) -> str:
    near = difflib.get_close_matches(name, sorted(_FIELDS), 1, 0.6)
    hint = f', or did you mean the key "{near[0]}"?' if near else ""
    where = f'put it into a command, env or args in quotes: "{{{name}}}"'
    return f"sweep: {{{name}}} is not in the job file; {where}{hint}"


# -- keys and combinations -----------------------------------------------------------------------


def _key_paths(spec: SweepSpec, base: JsonObject) -> tuple[dict[str, Path], list[str]]:
    """The place that each key sets (empty for a placeholder), and the problems of the keys."""
    keys: dict[str, Path] = {}
    problems: list[str] = []
    seen: dict[Path, str] = {}
    places = [("grid", key) for key in spec.grid] + [("zip", key) for key in spec.zip]
    for part, key in places:
        place = f"sweep.{part}.{key}"
        path, problem = _parse_key(key, base)
        if problem:
            problems.append(f"{place}: {problem}")
            continue
        meant = path or (key,)
        if meant in seen:
            problems.append(f"{place}: {seen[meant]} sets the same key; leave one of them out")
        seen.setdefault(meant, place)
        keys[key] = path
    for index, point in enumerate(spec.list):
        for key in point:
            path, problem = _parse_key(key, base)
            if problem:
                problems.append(f"sweep.list[{index}].{key}: {problem}")
            else:
                keys[key] = path
    return keys, problems


def _parse_key(key: str, base: JsonObject) -> tuple[Path, str | None]:
    """The place in the job file that a key names (empty for a placeholder), or its problem."""
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
            return (), f"{{{key}}} already has a meaning; choose another name" if is_reserved_name(key) else None
        hint = did_you_mean(str(words[0]), sorted(_FIELDS)) or f" (known: {', '.join(sorted(_FIELDS))})"
        if len(words) == 1:
            hint += "; a placeholder is made of letters, digits and _"
        return (), f'unknown key "{words[0]}"{hint}'
    return index_role(tuple(words), base)


def _shape_problems(spec: SweepSpec) -> list[str]:
    problems = [
        f"sweep.{part}.{key}: is empty"
        for part, lists in (("grid", spec.grid), ("zip", spec.zip))
        for key, values in lists.items()
        if not values
    ]
    lengths = {key: len(values) for key, values in spec.zip.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        problems.append(f"sweep.zip: its lists are used side by side and must have equal lengths: {found}")
    if not (spec.grid or spec.zip or spec.list):
        problems.append("sweep: has no points; give grid, zip or list")
    count = math.prod(map(len, spec.grid.values())) * (max(lengths.values(), default=1)) * (len(spec.list) or 1)
    if count > MOST_POINTS:
        problems.append(
            f"sweep: makes {count} points and the limit is {MOST_POINTS}; use fewer values, or several job files"
        )
    for part, values in (("grid", spec.grid), ("zip", spec.zip), ("list", dict(enumerate(spec.list)))):
        for key, value in values.items():
            place = f"sweep.{part}[{key}]" if part == "list" else f"sweep.{part}.{key}"
            problems += [f"{at}: {what}" for at, what in _unsupported_values(value, place)]
    return problems


def _unsupported_values(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Problems of values that YAML has and a job file does not, such as dates."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{place}.{key}", f"the key {key!r} is not a text; write it in quotes"
            yield from _unsupported_values(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unsupported_values(inner, f"{place}[{index}]")
    elif not isinstance(value, str | int | float | bool | None):
        yield place, f"{value} is a {type(value).__name__} to YAML; write it in quotes"


def _combinations(spec: SweepSpec) -> Iterator[list[_PointValue]]:
    """The values of each point: grid, then zip, then list, the first varying slowest. The last of equal keys wins."""
    grid = [
        [_PointValue(key, value, f"sweep.grid.{key}[{index}]") for index, value in enumerate(values)]
        for key, values in spec.grid.items()
    ]
    rows = range(len(next(iter(spec.zip.values()), ())))
    zipped = [
        [_PointValue(key, values[row], f"sweep.zip.{key}[{row}]") for key, values in spec.zip.items()] for row in rows
    ]
    listed = [
        [_PointValue(key, value, f"sweep.list[{index}].{key}") for key, value in point.items()]
        for index, point in enumerate(spec.list)
    ]
    for combined in itertools.product(*grid):
        for side in zipped or [[]]:
            for point in listed or [[]]:
                yield [*combined, *side, *point]
