"""JSON Schemas of records, from their annotations, docstrings and trailing comments; and a check of values."""

import ast
import inspect
import re
import sys
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from io import StringIO

from exporter.contract.events import LoggedEvent
from exporter.contract.records import Record
from exporter.contract.report import Report
from exporter.contract.status import NodeStatus
from exporter.contract.view import JobView
from launcher.scan.records import ScanResults
from launcher.show.records import PlanRecord, SweepPlanRecord

PUBLISHED: Mapping[str, tuple[type[Record], str]] = {
    "status": (NodeStatus, "`/status` of a sidecar, and `status/{node}.json` in the run directory"),
    "report": (Report, "`gpujob report --json`, and `report.json` in the run directory"),
    "view": (JobView, "`gpujob watch --json`"),
    "events": (LoggedEvent, "each line of `events.jsonl` in the run directory"),
    "plan": (PlanRecord, "`gpujob plan --json`; with `--explain` there is also `explain`"),
    "sweep-plan": (SweepPlanRecord, "`gpujob plan --json` of a job file with a sweep"),
    "scan": (ScanResults, "`gpujob scan --json`"),
}  # record of each published schema, and the JSON that it describes

Schema = dict[str, typing.Any]
_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}


def published_schema(name: str) -> Schema:
    """The schema that is published under this name."""
    record, _ = PUBLISHED[name]
    definitions: dict[str, Schema] = {}
    body = _object(record, definitions)
    if record.SCHEMA:
        body["properties"] = {"schema": {"const": record.SCHEMA, "description": "version"}, **body["properties"]}
    version = record.SCHEMA or 1
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:gpujob:{name}:{version}",
        "title": record.__name__,
        **body,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(kind: type, definitions: dict[str, Schema]) -> Schema:
    """Schema of a record or named tuple, which adds the classes inside it to ``definitions``."""
    hints = typing.get_type_hints(kind)
    if issubclass(kind, Record):
        keys, required = kind.KEYS, kind.REQUIRED
    else:
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        keys, required = {name: name for name in names}, frozenset(names)
    properties = {}
    for name, key in keys.items():
        properties[key] = _value(hints[name], definitions)
        about = next((text for base in kind.__mro__ if (text := _comments(base).get(name))), None)
        if about is not None:
            properties[key] = {**properties[key], "description": about}
    return {
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "type": "object",
        "properties": properties,
        "required": [key for name, key in keys.items() if name in required],
        "additionalProperties": True,
    }


def _value(kind: object, definitions: dict[str, Schema]) -> Schema:
    """Schema of a value of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and kind in _TYPES:
        return {"type": _TYPES[kind]}
    if isinstance(kind, type) and (issubclass(kind, Record) or hasattr(kind, "_fields")):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # it may contain itself
            definitions[kind.__name__] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin in (types.UnionType, typing.Union):
        options = [_value(argument, definitions) for argument in arguments]
        if all(option.keys() == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    if origin is tuple and arguments[-1:] != (...,):
        return {"type": "array", "prefixItems": [_value(argument, definitions) for argument in arguments]}
    if origin in (tuple, list, frozenset):
        return {"type": "array", "items": _value(arguments[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        numbered = {"propertyNames": {"pattern": "^[0-9]+$"}} if arguments[0] is int else {}
        return {"type": "object", "additionalProperties": _value(arguments[1], definitions), **numbered}
    return {}  # any JSON value


@cache
def _comments(kind: type) -> dict[str, str]:
    """Trailing comments of the fields that a class declares."""
    if kind.__module__ in ("builtins", "typing"):
        return {}
    source = inspect.getsource(sys.modules[kind.__module__])
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    return {
        node.target.id: comments[node.lineno]
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.lineno in comments
    }


def problems(value: object, schema: Schema, root: Schema | None = None, place: str = "$") -> Iterator[str]:
    """What is wrong with a JSON value, according to the keywords that ``published_schema`` uses."""
    root = root or schema
    if "$ref" in schema:
        yield from problems(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, place)
    if "anyOf" in schema:
        found = [list(problems(value, option, root, place)) for option in schema["anyOf"]]
        if all(found):
            yield from max(found, key=lambda texts: len(texts[0].partition(": ")[0]))
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r} is not {schema['const']!r}"
    if "type" in schema:
        wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_has_type(value, name) for name in wanted):
            yield f"{place}: {value!r} is not of type {' or '.join(wanted)}"
    if isinstance(value, list):
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        for at, (entry, inner) in enumerate(zip(value, items, strict=True)):
            yield from problems(entry, inner, root, f"{place}[{at}]")
    if isinstance(value, dict):
        yield from (f"{place}: {key} is missing" for key in schema.get("required", ()) if key not in value)
        other = schema.get("additionalProperties", True)
        for key, entry in value.items():
            inner = schema.get("properties", {}).get(key, {} if other is True else other)
            yield from problems(entry, inner, root, f"{place}.{key}")
            if not re.search(schema.get("propertyNames", {}).get("pattern", ""), key):
                yield f"{place}: {key!r} is not a possible key"


def _has_type(value: object, name: str) -> bool:
    if name in ("array", "object"):
        return isinstance(value, list if name == "array" else dict)
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return _TYPES.get(type(value)) == name
