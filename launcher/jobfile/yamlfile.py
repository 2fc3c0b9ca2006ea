"""Validate YAML as a model, and report every problem with its place, the value found and a fix."""

import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from datetime import date
from typing import NamedTuple, TypeGuard

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from exporter.contract.bounded_yaml import BoundedLoader, WrittenFloat, WrittenInt, yaml_problem
from exporter.contract.records import JsonValue
from launcher.errors import ConfigError

Spec = typing.TypeVar("Spec", bound=BaseModel)
Location = Sequence[int | str]
FindMore = Callable[[Mapping[str, object]], list[str]]
Place = tuple[int, int]  # line and column of a text, from 0

_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_NUMBER = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,9}})?) ?({'|'.join(_SECONDS)})?", re.ASCII)
MOST_ERRORS = 100  # of the model; nobody reads more, and to name the nearest known key takes a millisecond each


def parse_yaml_model(text: str, source: str, model: type[Spec], find_more_problems: FindMore = lambda _: []) -> Spec:
    """Parse YAML as a ``model``. Raises ConfigError with every problem.

    ``find_more_problems`` finds problems of the whole file, which the model cannot see while parts are wrong.
    """
    body, twice = read_mapping(text, source)
    if body is None and any(field.is_required() for field in model.model_fields.values()):
        raise ConfigError(source, ["is empty; `gpujob init` writes a job file to start from"])
    return validate_model(body or {}, source, model, find_more_problems, twice, text)


def read_mapping(text: str, source: str) -> tuple[dict[str, JsonValue] | None, list[str]]:
    """Read a YAML mapping (None if empty), and a problem for each duplicate key."""
    twice: dict[Place, str] = {}
    try:
        loader = UniqueKeyLoader(text, twice)
        try:
            body = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigError(source, [*_problems_in_order(twice), yaml_problem(error, text)]) from error
    if body is not None and not isinstance(body, dict):
        wrong = f"contains a {type(body).__name__}, not a mapping of keys to values"
        raise ConfigError(source, [*_problems_in_order(twice), wrong])
    return body, _problems_in_order(twice)


def validate_model(
    body: Mapping[str, object],
    source: str,
    model: type[Spec],
    find_more_problems: FindMore = lambda _: [],
    known_problems: Sequence[str] = (),
    text: str = "",
) -> Spec:
    """Validate a mapping as a ``model``. Raises ConfigError with the ``known_problems``, then every other one.

    ``text`` is the original YAML, so that messages can quote it.
    """
    try:
        if problems := [f"{join_place(location)}: {what}" for location, what in _find_unusable_texts(body, [])]:
            raise ConfigError(source, [*known_problems, *problems])
        spec = model.model_validate(body)
    except ValidationError as error:
        errors = error.errors()
        shown, hidden = errors[:MOST_ERRORS], len(errors) - MOST_ERRORS
        meant = _places_of_typos(shown, model)
        more = [problem for problem in find_more_problems(body) if problem.partition(": is missing")[0] not in meant]
        more += [f"and {hidden:,} more; is it the right file?"] if hidden > 0 else []
        raise ConfigError(source, [*known_problems, *_problems(shown, model, text, meant), *more]) from error
    except (RecursionError, OverflowError, ValueError) as error:
        wrong = f"contains a value that cannot be used: {type(error).__name__}: {error}"
        raise ConfigError(source, [*known_problems, wrong]) from error
    if problems := [*known_problems, *find_more_problems(body)]:
        raise ConfigError(source, problems)
    return spec


def _problems_in_order(duplicates: Mapping[Place, str]) -> list[str]:
    return [duplicates[place] for place in sorted(duplicates)]


class _PlacedError(NamedTuple):
    """An error of pydantic, with its place in the file."""

    place: str
    details: ErrorDetails


class UniqueKeyLoader(BoundedLoader):
    """YAML loader that reports duplicate keys; PyYAML silently keeps the last one.

    It also keeps the last one, but adds the duplicate to ``duplicates``, so that the rest of the file is checked too.
    """

    def __init__(self, text: str, duplicates: dict[Place, str]) -> None:
        super().__init__(text)
        self._duplicates = duplicates
        self._checked: set[int] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
            kind = str(node.tag).rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{str(node.value)[:40]!r} is not a valid {kind}: {error}", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        if id(node) not in self._checked:  # a mapping merged by ``<<`` comes again, already flattened
            self._checked.add(id(node))
            seen: set[object] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, list | dict | set):
                    wrong = "a key is a list or mapping"
                    raise yaml.constructor.ConstructorError(None, None, wrong, key_node.start_mark)
                if key in seen:
                    mark = key_node.start_mark
                    self._duplicates[mark.line, mark.column] = (
                        f"line {mark.line + 1}, column {mark.column + 1}: not YAML: the key {key!r} is duplicated"
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" and isinstance(value_node, yaml.MappingNode):
                self._checked.add(id(value_node))
        super().flatten_mapping(node)
        last = {(pair[0].tag, str(pair[0].value)): pair for pair in node.value}
        node.value = list(last.values())  # PyYAML 6.0.4 takes the first of some keys where this mapping is merged


def _find_unusable_texts(value: object, location: list[int | str]) -> Iterator[tuple[list[int | str], str]]:
    """Find texts that no file name, argument or JSON can contain."""
    if isinstance(value, str):
        if "\0" in value:
            yield location, "a text cannot contain a NUL character"
        elif any("\ud800" <= character <= "\udfff" for character in value):
            yield location, "a text cannot contain half a character (a surrogate)"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _find_unusable_texts(key if isinstance(key, str) else None, [*location, ascii(key)])
            yield from _find_unusable_texts(inner, [*location, key])
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_unusable_texts(inner, [*location, index])


_CURES = {  # of missing keys
    "key_file": "; write the key into a file of mode 0600, and name the file",
    "token_file": "; `gpujob alerts receive` makes it: name the file `token` in its directory",
    "url_file": "; write the URL into a file of mode 0600, and name the file",
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _places_of_typos(errors: Sequence[ErrorDetails], model: type[BaseModel]) -> set[str]:
    """Places of the keys meant by misspelled ones, so that these are not also reported missing."""
    return {
        _places((*entry["loc"][:-1], near), model)[0]
        for entry in errors
        if entry["type"] == "extra_forbidden" and (near := _nearest(entry["loc"], model)) is not None
    }


def _nearest(location: Location, model: type[BaseModel]) -> str | None:
    """The known key most similar to an unknown one, or the place of its name in another section, or None."""
    word, known = str(location[-1]), _known_names(model, location[:-1])
    longer = [name for name in known if name.startswith(f"{word}_per_node")]
    if near := longer or difflib.get_close_matches(word, known, 1, 0.5):
        return near[0]
    elsewhere = [place for place in _key_places(model) if place.endswith(f".{location[-1]}".replace("-", "_"))]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _key_places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Places of all keys of a model and its sections."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *_union_members(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _key_places(kind, f"{prefix}{name}.")


def _problems(
    errors: Sequence[ErrorDetails], model: type[BaseModel], text: str, intended_places: Collection[str]
) -> list[str]:
    """Report one problem for each place. For a union, report only the kind that was probably meant.

    Missing keys at ``intended_places``, where a misspelled key was meant to be, are left out.
    """
    found: dict[str, list[_PlacedError]] = {}
    for details in errors:
        location, is_of_key = details["loc"], details["loc"][-1:] == ("[key]",)
        if details["type"] == "invalid_key":  # 5 and true are no keys of any section
            location = (*location[:-1], _source_key(text, location[:-1], details["input"]))
            details = {**details, "type": "extra_forbidden", "loc": location}
        place, base = _places(location[:-2] if is_of_key else location, model)
        if is_of_key and details["type"] == "string_type":
            word = _source_key(text, location[:-2], details["input"])
            message = f'the key {word} is not a text; write "{word}" in quotes'
            details = {**details, "type": "value_error", "msg": message}
            base = f"{base} {word}"  # each key is a problem of its own
        if details["type"] != "missing" or place not in intended_places:
            found.setdefault(base, []).append(_PlacedError(place, details))
    problems = []
    for base, entries in found.items():
        if len(entries) > 1 and len({entry.place for entry in entries}) == 1 and base != "":
            kinds = [_EXPECTED.get(entry.details["type"]) for entry in entries]
            value = entries[0].details["input"]
            if all(kinds) and "a list" in kinds and not isinstance(value, list | dict):
                entries = [entry for entry in entries if entry.details["type"] != "list_type"]
            elif all(kinds):
                words = ", ".join(str(kind) for kind in kinds[:-1]) + f" or {str(kinds[-1]).partition(' or ')[0]}"
                is_text_meant = _is_placeholder(value) or ("a text" in kinds and isinstance(value, int | float | date))
                fix = f'; write it in quotes: "{_written(value)}"' if is_text_meant else ""
                problems.append(f"{base}: {_value_text(value)} is not {words}{fix}")
                continue
        elif len(entries) > 1:
            deeper = [entry for entry in entries if entry.place != base]
            entries = deeper or entries
        problems += [_problem(entry.place, entry.details, model, text) for entry in entries]
    return problems


def _problem(place: str, error: ErrorDetails, model: type[BaseModel], text: str) -> str:
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        key, known = str(error["loc"][-1]), _known_names(model, error["loc"][:-1])
        near = _nearest(error["loc"], model)
        hint = f'; did you mean "{near}"?' if near is not None else ""
        return f'{place}: unknown key "{key}"{hint} (known: {", ".join(sorted(known))})'
    if kind == "missing":
        return f"{place}: is missing" + _CURES.get(str(error["loc"][-1]), "")
    if kind in _EXPECTED:
        fix = ""
        is_section = kind.startswith("model")
        if kind == "string_type" and isinstance(value, bool) and (word := _source_text(text, error["loc"])):
            return f'{place}: {word} is not {_EXPECTED[kind]}; write it in quotes: "{word}"'
        if (kind in ("string_type", "list_type") or is_section) and value is None:
            fix = "; leave the key out"
        elif kind == "string_type" and (_is_placeholder(value) or not isinstance(value, dict | list)):
            fix = f'; write it in quotes: "{_written(value)}"'
        elif kind == "list_type":
            has_sections = isinstance(value, dict) or _known_names(model, (*error["loc"], 0))
            fix = '; begin each entry with "- "' if has_sections else f"; write it as [{_value_text(value)}]"
        elif _EXPECTED[kind].endswith("number") and isinstance(value, str):
            fix = _number_hint(value, may_be_time=_EXPECTED[kind] == "a number")
        elif is_section and (keys := _known_names(model, error["loc"])):
            fix = f"; give it keys (known: {', '.join(sorted(keys))})"
        return f"{place}: {_value_text(value)} is not {_EXPECTED[kind]}{fix}"
    if kind == "literal_error":
        expected = str(error["ctx"]["expected"]).replace("'", '"')
        return f"{place}: {_value_text(value)} is not one of {expected}"
    if kind in ("too_short", "string_too_short"):
        return f"{place}: is empty"
    message = str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error":
        key, separator, rest = message.partition(": ")
        if separator and key in _known_names(model, error["loc"]):
            place, message = f"{place}.{key}" if place else key, rest
        return f"{place}: {message}" if place else message
    _, should, requirement = message.partition(" should ")  # as in "Input should be ..." and "String should match ..."
    return f"{place}: {_value_text(value)} must {requirement}" if should else f"{place}: {message}"


def _number_hint(text: str, *, may_be_time: bool) -> str:
    """How to write a number that is in quotes, or has a unit of time. Whole numbers are counts."""
    if (found := _NUMBER.fullmatch(text.strip())) is None or (found[2] and not may_be_time):
        return ""
    number, unit = found.groups()
    return f"; give seconds, as in {float(number) * _SECONDS[unit]:.15g}" if unit else "; leave out the quotes"


def _source_text(text: str, location: Location) -> str | None:
    """The unparsed scalar at a place, or None: YAML 1.1 turns ``no`` and ``on`` into booleans."""
    node = _find_node(text, location)
    return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def _find_node(text: str, location: Location) -> yaml.Node | None:
    """The unparsed value at a place, or None."""
    node = _compose(text) if text else None
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), None)
        else:
            return None
    return node


def _source_key(text: str, location: Location, key: object) -> str:
    """A key of the mapping at a place, as the file writes it, or else as YAML does."""
    node = _find_node(text, location)
    for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(name, yaml.ScalarNode) and not name.style and repr(yaml.safe_load(name.value)) == repr(key):
            return str(name.value)
    return yaml_text(key)


@functools.lru_cache(maxsize=1)
def _compose(text: str) -> yaml.Node | None:
    return yaml.compose(text, yaml.SafeLoader)


def _is_placeholder(value: object) -> TypeGuard[Mapping[str, None]]:
    """Whether this is ``{rank}`` without quotes, which YAML reads as a mapping."""
    return isinstance(value, dict) and list(value.values()) == [None]


def yaml_text(value: object) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if _is_placeholder(value):
        return f"{{{next(iter(value))}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _written(value: object) -> str:
    """A value as the file writes it, or else as YAML does."""
    if isinstance(value, date):
        return value.isoformat()
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else yaml_text(value)


def _value_text(value: object) -> str:
    if isinstance(value, str):
        text = f'"{value}"'
    else:
        text = repr(value) if isinstance(value, dict | list) and not _is_placeholder(value) else _written(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def join_place(location: Location) -> str:
    """Format a location as errors show it: ``workers[0].gpus``."""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place


def _steps(location: Location, model: type[BaseModel]) -> Iterator[tuple[int | str, object, bool]]:
    """Each part of a location, the type it leads to, and whether it only names a member of a union."""
    kind: object = model
    for part in location:
        kind = _without_annotation(kind)
        members = [member for member in _union_members(kind) if member is not type(None)]
        if len(members) > 1:
            yield part, kind, True
            lists = [member for member in members if typing.get_origin(member) is list]
            kind = lists[0] if lists and str(part).startswith("list") else str
            continue
        if len(members) == 1:
            kind = _without_annotation(members[0])
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field is not None else None
        elif typing.get_origin(kind) is list:
            kind = typing.get_args(kind)[0]
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        yield part, kind, False


def _without_annotation(kind: object) -> object:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _union_members(kind: object) -> tuple[object, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else ()


def _places(location: Location, model: type[BaseModel]) -> tuple[str, str]:
    """Place of a value, and place of the outermost union around it (the same if there is none)."""
    parts: list[int | str] = []
    base: str | None = None
    for part, _, names_a_kind in _steps(location, model):
        if names_a_kind:
            base = base if base is not None else join_place(parts)
        else:
            parts.append(part)
    place = join_place(parts)
    return place, place if base is None else base


def _known_names(model: type[BaseModel], location: Location) -> list[str]:
    kind: object = model
    for _, reached, _ in _steps(location, model):
        kind = reached
    kind = _without_annotation(kind)
    optional = [member for member in _union_members(kind) if member is not type(None)]
    kind = _without_annotation(optional[0]) if len(optional) == 1 else kind
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
