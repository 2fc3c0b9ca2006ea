"""Every key of the job file and of the cluster file: its place, type, default, meaning and an example."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from launcher.jobfile.jobfile import ClusterSpec, JobSpec

KEYS_FILE = Path(__file__).with_name("keys.yaml")  # meanings and examples; types and defaults come from the models
MOST_NAMES = 3  # names that an error suggests: more are no help
LIKENESS = 0.6  # of difflib, 0 to 1: below it a suggestion is a guess
NO_BOUND = 1e9  # an upper bound from here on is a protection against mistakes, and no fact about the key
WIDTH = 100  # columns of an example, before a line is broken

Schema = Mapping[str, Any]

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
    example: Any = None
    required: bool = False

    @property
    def top_level_key(self) -> str:
        """The top-level key that it belongs to."""
        return plain_path(self.path).partition(".")[0]

    @property
    def first_sentence(self) -> str:
        """Its meaning in short."""
        return re.split(r"(?<=[.;:]) ", self.meaning, maxsplit=1)[0].rstrip(".;:") + "."


@cache
def job_keys() -> tuple[Key, ...]:
    """Every key of the job file, in the order of ``keys.yaml``."""
    return _with_meanings("job", JobSpec.model_json_schema())


@cache
def cluster_keys() -> tuple[Key, ...]:
    """Every key of the cluster file, in the order of ``keys.yaml``."""
    return _with_meanings("cluster", ClusterSpec.model_json_schema())


@cache
def described_keys() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Meaning and example by path, of the ``job`` file and of the ``cluster`` file."""
    described: Mapping[str, Mapping[str, Mapping[str, Any]]] = yaml.safe_load(KEYS_FILE.read_text(encoding="utf-8"))
    return described


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
    near = [*within, *difflib.get_close_matches(wanted, known, MOST_NAMES, LIKENESS)]
    return tuple(dict.fromkeys(known[name] for name in near))[:MOST_NAMES]


def plain_path(text: str) -> str:
    """A path without the marks of lists and mappings."""
    return _PATH_MARKS.sub("", text)


def nested(path: str, value: Any) -> Any:
    """The value at its place in a file: mappings and lists down to it."""
    for part in reversed(path.split(".")):
        name = part.removesuffix("[]").removesuffix("{}")
        if part.endswith("[]"):
            value = [value]
        elif part.endswith("{}"):
            value = {"NAME": value}
        value = {name: value}
    return value


def as_yaml(value: Any) -> str:
    """A value as people write it: blocks outside, innermost lists and mappings on one line."""
    if isinstance(value, Mapping) and value:
        return "".join(_dump({name: inner}, isinstance(inner, Mapping | list)) for name, inner in value.items())
    return _dump(value, True).removesuffix("...\n")


class _Dumper(yaml.SafeDumper):
    """Writes texts that are more than words in quotes, as the job file wants time limits and numbers."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if _WORDS.fullmatch(text) else "'" if "\\" in text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _dump(value: Any, inline: bool) -> str:
    style = None if inline else False
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, default_flow_style=style)


def _with_meanings(file: str, schema: Schema) -> tuple[Key, ...]:
    known = {key.path: key for key in schema_keys(schema)}
    return tuple(
        replace(known[path], meaning=str(entry["meaning"]), example=entry["example"])
        for path, entry in described_keys()[file].items()
        if path in known  # a test compares the two
    )


def schema_keys(schema: Schema) -> Iterator[Key]:
    """Every key of a JSON Schema without meaning and example, each section before its keys."""
    yield from _keys_of(schema, schema.get("$defs", {}), "")


def _keys_of(section: Schema, definitions: Schema, prefix: str) -> Iterator[Key]:
    required = section.get("required", ())
    for name, field in section["properties"].items():
        mark, inner = _section_in(field, definitions)
        path = f"{prefix}{name}"
        is_section = inner is not None and not mark and field.get("default") is not None
        default = "" if name in required or is_section else as_yaml(field.get("default")).strip()
        yield Key(path, _type_text(field, definitions), default, required=name in required)
        if inner is not None:
            yield from _keys_of(inner, definitions, f"{path}{mark}.")


def _section_in(field: Schema, definitions: Schema) -> tuple[str, Schema | None]:
    """The section that a key contains, with ``[]`` for a list of them and ``{}`` for a mapping to them."""
    for kind in _kinds(field, definitions):
        if "properties" in kind:
            return "", kind
        for mark, inside in (("[]", kind.get("items")), ("{}", kind.get("additionalProperties"))):
            if isinstance(inside, Mapping) and (inner := _section_in(inside, definitions))[1] is not None:
                return f"{mark}{inner[0]}", inner[1]
    return "", None


def _kinds(field: Schema, definitions: Schema) -> list[Schema]:
    """The kinds that a value may be of, references followed."""
    if "$ref" in field:
        return [definitions[field["$ref"].rpartition("/")[2]]]
    return [kind for part in field["anyOf"] for kind in _kinds(part, definitions)] if "anyOf" in field else [field]


def _type_text(field: Schema, definitions: Schema, ending: str = "") -> str:
    words = [word for kind in _kinds(field, definitions) for word in _kind_texts(kind, definitions, ending)]
    return _or_text(tuple(dict.fromkeys(words)))


def _kind_texts(kind: Schema, definitions: Schema, ending: str) -> list[str]:
    """What a value may be, each in words; ``ending`` is ``s`` where several values are meant."""
    if "enum" in kind:
        return [f"`{value}`" for value in kind["enum"]]
    match kind.get("type"):
        case "array":
            inside = _type_text(kind.get("items", {}), definitions, "s")
            return [f"list{ending} of {inside}" if inside and " or " not in inside else f"list{ending}"]
        case "object":
            inner = kind.get("additionalProperties")
            inside = _type_text(inner, definitions, "s") if isinstance(inner, Mapping) else ""
            return [f"mapping{ending} of {inside}" if inside and " or " not in inside else f"mapping{ending}"]
        case str(name):
            return [_TYPES[name] + (ending if name in _COUNTABLE else "") + _bounds(kind)]
    return []


def _bounds(kind: Schema) -> str:
    least, most = kind.get("minimum"), kind.get("maximum")
    if least is not None and most is not None:
        return f" ({least:g} to {most:.10g})"
    words = [
        f"{word} {bound:.10g}"
        for word, bound in (
            ("at least", least),
            ("above", kind.get("exclusiveMinimum")),
            ("at most", most),
            ("below", kind.get("exclusiveMaximum")),
        )
        if bound is not None and bound < NO_BOUND
    ]
    return f" ({', '.join(words)})" if words else ""


def _or_text(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
