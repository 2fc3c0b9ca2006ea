"""Every key of the job file and of the cluster file: its place, type, default, meaning and an example."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonObject, JsonValue, from_json
from launcher.jobfile.jobfile import ClusterSpec, JobSpec

KEYS_FILE = Path(__file__).with_name("keys.yaml")  # meanings and examples; types and defaults come from the models
MOST_NAMES = 3  # names that an error suggests: more are no help
LIKENESS = 0.6  # of difflib, 0 to 1: below it a suggestion is a guess
NO_BOUND = 1e9  # an upper bound from here on is a protection against mistakes, and no fact about the key
WIDTH = 100  # columns of an example, before a line is broken

File = Literal["job", "cluster"]

_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}
_COUNTABLE = ("string", "integer", "number")
_WORDS = re.compile(r"[A-Za-z/][\w./+-]*( [\w./+-]+)*")
_PATH_MARKS = re.compile(r"\[[^\]]*\]|\{[^}]*\}")


@dataclass(frozen=True)
class Key:
    """One key. ``path`` has ``[]`` after a list and ``{}`` after a mapping with free names."""

    path: str
    type_text: str
    default_text: str  # YAML; empty for a required key, and for a section, because its keys have their own
    meaning: str = ""
    example: JsonValue = None
    required: bool = False

    @property
    def top_level_key(self) -> str:
        """The top-level key that it belongs to."""
        return plain_path(self.path).partition(".")[0]

    @property
    def first_sentence(self) -> str:
        """Its meaning in short."""
        return re.split(r"(?<=[.;:]) ", self.meaning, maxsplit=1)[0].rstrip(".;:") + "."


class Description(NamedTuple):
    """Meaning of a key, and a value for it."""

    meaning: str
    example: JsonValue


@cache
def job_keys() -> tuple[Key, ...]:
    """Every key of the job file, in the order of ``keys.yaml``."""
    return _described_keys("job")


@cache
def cluster_keys() -> tuple[Key, ...]:
    """Every key of the cluster file, in the order of ``keys.yaml``."""
    return _described_keys("cluster")


@cache
def read_descriptions() -> Mapping[str, Mapping[str, Description]]:
    """Descriptions by path, of the ``job`` file and of the ``cluster`` file."""
    return from_json(dict[str, dict[str, Description]], yaml.safe_load(KEYS_FILE.read_text(encoding="utf-8")))


def _described_keys(file: File) -> tuple[Key, ...]:
    fields = {field.path: field for field in file_fields(_inlined_schema(file))}
    return tuple(
        Key(path, _type_text(fields[path].schema), _default_text(fields[path]), *described, fields[path].required)
        for path, described in read_descriptions()[file].items()
        if path in fields  # a test compares the two
    )


def file_schema(file: File) -> JsonObject:
    """The JSON Schema of a file with the meaning of each key, for editors."""
    schema, descriptions = _inlined_schema(file), read_descriptions()[file]
    for field in file_fields(schema):
        field.schema["description"] = descriptions[field.path].meaning
    return schema


def find_keys(text: str, keys: Sequence[Key]) -> tuple[Key, ...]:
    """The key at this path, else every key whose path ends with it; ``[]``, ``[0]`` and ``{}`` may be left out."""
    wanted = plain_path(text)
    exact = tuple(key for key in keys if plain_path(key.path) == wanted)
    return exact or tuple(key for key in keys if plain_path(key.path).endswith(f".{wanted}"))


def nearest_keys(text: str, keys: Sequence[Key]) -> tuple[str, ...]:
    """Paths and names that are most like an unknown one, the nearest first."""
    wanted = plain_path(text)
    paths = {plain_path(key.path): key.path for key in keys}
    names = {path.rpartition(".")[2]: path.rpartition(".")[2] for path in paths}
    known = {**names, **paths}
    within = [name for name in names if wanted and wanted in name]
    within.sort(key=lambda name: not name.startswith(wanted))
    near = [*within, *difflib.get_close_matches(wanted, known, MOST_NAMES, LIKENESS)]
    return tuple(dict.fromkeys(known[name] for name in near))[:MOST_NAMES]


def plain_path(text: str) -> str:
    """A path without the marks of lists and mappings."""
    return _PATH_MARKS.sub("", text)


def nested(path: str, value: JsonValue) -> JsonValue:
    """The value at its place in a file: mappings and lists down to it."""
    for part in reversed(path.split(".")):
        name = part.removesuffix("[]").removesuffix("{}")
        if part.endswith("[]"):
            value = [value]
        elif part.endswith("{}"):
            value = {"NAME": value}
        value = {name: value}
    return value


def as_yaml(value: JsonValue) -> str:
    """A value as people write it: blocks outside, innermost lists and mappings on one line."""
    if isinstance(value, dict) and value:
        return "".join(_dump({name: inner}, isinstance(inner, dict | list)) for name, inner in value.items())
    return _dump(value, True).removesuffix("...\n")


class _Dumper(yaml.SafeDumper):
    """Writes texts that are more than words in quotes, as the job file wants time limits and numbers."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if _WORDS.fullmatch(text) else "'" if "\\" in text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _dump(value: JsonValue, inline: bool) -> str:
    style = None if inline else False
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, default_flow_style=style)


def _inlined_schema(file: File) -> dict[str, JsonValue]:
    """The JSON Schema of a file, each section in its place."""
    schema = (JobSpec if file == "job" else ClusterSpec).model_json_schema()
    return _inlined_mapping(schema, schema.pop("$defs", {}))


def _inlined(value: JsonValue, definitions: JsonObject) -> JsonValue:
    """A part of a schema with its references replaced by what they refer to."""
    if isinstance(value, list):
        return [_inlined(inner, definitions) for inner in value]
    return _inlined_mapping(value, definitions) if isinstance(value, dict) else value


def _inlined_mapping(value: JsonObject, definitions: JsonObject) -> dict[str, JsonValue]:
    name = str(value.get("$ref", "")).rpartition("/")[2]
    parts = {**_mapping(definitions.get(name)), **value}
    return {key: _inlined(inner, definitions) for key, inner in parts.items() if key != "$ref"}


def _mapping(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


class Field(NamedTuple):
    """A key in the schema of a file."""

    path: str
    schema: dict[str, JsonValue]
    required: bool
    is_section: bool  # which may not be left out: its keys have their own defaults


def file_fields(section: JsonObject, prefix: str = "") -> Iterator[Field]:
    """Every key of an inlined schema, each section before its keys."""
    for name, value in _mapping(section.get("properties")).items():
        schema = _mapping(value)
        mark, inner = _section_in(schema)
        is_section = inner is not None and not mark and schema.get("default") is not None
        yield Field(f"{prefix}{name}", schema, name in _list(section.get("required")), is_section)
        if inner is not None:
            yield from file_fields(inner, f"{prefix}{name}{mark}.")


def _section_in(schema: JsonObject) -> tuple[str, JsonObject | None]:
    """The section that a key contains, with ``[]`` for a list of them and ``{}`` for a mapping to them."""
    for kind in _kinds(schema):
        if "properties" in kind:
            return "", kind
        for mark, inside in (("[]", kind.get("items")), ("{}", kind.get("additionalProperties"))):
            if isinstance(inside, dict) and (found := _section_in(inside))[1] is not None:
                return f"{mark}{found[0]}", found[1]
    return "", None


def _kinds(schema: JsonObject) -> list[JsonObject]:
    """The kinds that a value may be of."""
    parts = [kind for part in _list(schema.get("anyOf")) for kind in _kinds(_mapping(part))]
    return parts if "anyOf" in schema else [schema]


def _default_text(field: Field) -> str:
    return "" if field.required or field.is_section else as_yaml(field.schema.get("default")).strip()


def _type_text(schema: JsonObject, ending: str = "") -> str:
    words = [word for kind in _kinds(schema) for word in _kind_texts(kind, ending)]
    return _or_text(tuple(dict.fromkeys(words)))


def _kind_texts(kind: JsonObject, ending: str) -> list[str]:
    """What a value may be, each in words; ``ending`` is ``s`` where several values are meant."""
    if "enum" in kind:
        return [f"`{value}`" for value in _list(kind["enum"])]
    match kind.get("type"):
        case "array" | "object" as name:
            word, inner = {"array": ("list", "items"), "object": ("mapping", "additionalProperties")}[name]
            inside = _type_text(_mapping(kind.get(inner)), "s")
            return [f"{word}{ending} of {inside}" if inside and " or " not in inside else f"{word}{ending}"]
        case str(name):
            return [_TYPES[name] + (ending if name in _COUNTABLE else "") + _bounds(kind)]
    return []


def _bounds(kind: JsonObject) -> str:
    least, most, above, below = (
        bound if isinstance(bound := kind.get(name), int | float) else None
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    )
    if least is not None and most is not None:
        return f" ({least:g} to {most:.10g})"
    words = [
        f"{word} {bound:.10g}"
        for word, bound in (
            ("at least", least),
            ("above", above),
            ("at most", most),
            ("below", below),
        )
        if bound is not None and bound < NO_BOUND
    ]
    return f" ({', '.join(words)})" if words else ""


def _or_text(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
