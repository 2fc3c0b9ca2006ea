"""Parser of ``monitor_config.yaml`` that reports all problems at once: place, value and fix."""

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from exporter.contract.errors import ExporterError
from exporter.contract.manifest import LogPattern
from exporter.logs.patterns import PatternKind, pattern_problems

MOST_BYTES = 1 << 20
SEVERITIES = ("critical", "warning", "info")

# Pattern names that the exporter calls differently.
_EXPORTER_NAMES = {"items_processed": "items", "batch_number": "batch"}

Check = Callable[[Any], Any]  # returns the value to use; raises _InvalidValue or _InvalidParts


class _InvalidValue(Exception):
    """Why a value is unusable, phrased to follow the value."""


class _InvalidParts(Exception):
    """Problems within a value, each starting with its place in that value."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__()
        self.problems = problems


def read_monitor_config(path: str, given: Collection[str] = ()) -> dict[str, Any]:
    """Settings in a file, by flag name. Required settings in ``given`` may be missing."""
    try:
        with Path(path).open("rb") as source:
            text = source.read(MOST_BYTES + 1)
    except OSError as error:
        raise ExporterError(f"{path}: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise ExporterError(f"{path}: is larger than {MOST_BYTES} bytes")
    try:
        return parse_monitor_config(text.decode("utf-8"), path, given)
    except UnicodeDecodeError as error:
        raise ExporterError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def parse_monitor_config(text: str, source: str, given: Collection[str] = ()) -> dict[str, Any]:
    """Settings in a text; raises ExporterError with every problem."""
    try:
        body = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ExporterError(f"{source}: {place}not YAML: {getattr(error, 'problem', None) or error}") from error
    except (RecursionError, ValueError, TypeError, OverflowError) as error:
        raise ExporterError(f"{source}: YAML that cannot be used: {type(error).__name__}") from error
    if not isinstance(body, dict):
        what = "is empty" if body is None else f"holds a {type(body).__name__}, not a mapping of keys to values"
        raise ExporterError(f"{source}: {what}")
    found, problems = dict[str, Any](), list[str]()
    _walk(body, _KEYS, "", found, problems)
    for setting, place in _REQUIRED_KEYS.items():
        if setting not in given and _is_absent(body, place):
            problems.append(f"{place}: is missing; set it here or with --{setting.replace('_', '-')}")
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ExporterError("\n  ".join([f"{source}: {count}", *problems]))
    return found


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys; the library would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is duplicated", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _walk(
    body: Mapping[Any, Any], keys: Mapping[str, Any], place: str, found: dict[str, Any], problems: list[str]
) -> None:
    """Check a mapping. ``keys`` are nested mappings with (setting or None, check) as leaves."""
    for key, value in body.items():
        here = f"{place}.{key}" if place else str(key)
        kind = keys.get(key) if isinstance(key, str) else None
        if kind is None:
            near = _suggestion(str(key), keys)
            hint = f'; did you mean "{near}"?' if near else ""
            problems.append(f'{here}: unknown key "{key}"{hint} (known: {", ".join(sorted(keys))})')
        elif isinstance(kind, dict):
            if isinstance(value, dict):
                _walk(value, kind, here, found, problems)
            elif value is not None:
                example = f"; for example {_MAPPING_EXAMPLES[here]}" if here in _MAPPING_EXAMPLES else ""
                wanted = f"is not a mapping with keys among {', '.join(sorted(kind))}{example}"
                problems.append(f"{here}: {_value_text(value, here)} {wanted}")
        elif value is not None:
            setting, check = kind
            try:
                usable = check(value)
                if setting is not None:
                    found[setting] = usable
            except _InvalidValue as error:
                problems.append(f"{here}: {_value_text(value, here)} {error}")
            except _InvalidParts as error:
                problems += [f"{here}{problem}" for problem in error.problems]


def _suggestion(key: str, keys: Collection[str]) -> str | None:
    """Likely meaning of an unknown key: a key of this mapping, or the place of a key of another."""
    name = key.replace("-", "_")
    if name in _KEY_PATHS:
        return _KEY_PATHS[name]
    if near := difflib.get_close_matches(key, keys, 1, 0.5):
        return near[0]
    far = difflib.get_close_matches(name, _KEY_PATHS, 1, 0.8)
    return _KEY_PATHS[far[0]] if far else None


def _is_absent(body: Mapping[Any, Any], place: str) -> bool:
    section, _, key = place.partition(".")
    inner = body.get(section)
    return inner is None or (isinstance(inner, dict) and inner.get(key) is None)


def _value_text(value: object, place: str) -> str:
    if place.partition(".")[0] == "alerts":
        return "the value"  # may be a webhook or password
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _InvalidValue("is not a text; write it in quotes")
    if not value.strip():
        raise _InvalidValue("is empty")
    if "\0" in value:
        raise _InvalidValue("contains a NUL character")
    return value


def _secret(value: Any) -> str:
    _text(value)
    return "given"  # the value is unused, and what is not kept cannot leak


def _glob(value: Any) -> str:
    if "/" in (text := _text(value)):
        raise _InvalidValue("is not a pattern of file names; give the directory under paths")
    return text


def _integer(least: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _InvalidValue("is not a whole number")
        if value < least:
            raise _InvalidValue(f"must be {least} or more")
        return value

    return check


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _InvalidValue("is not a number of seconds")
    if value <= 0:
        raise _InvalidValue("must be above 0")
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _InvalidValue("is not true or false")
    return value


def _gpu_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _InvalidValue("is not a list; for example [0, 1, 2, 3]")
    wrong = [
        f"[{index}]: {_value_text(entry, '')} is not the number of a GPU"
        for index, entry in enumerate(value)
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0
    ]
    if wrong:
        raise _InvalidParts(wrong)
    return tuple(value)


def _pattern_problems(name: str, text: Any, kind: PatternKind | None = None) -> list[str]:
    """Problems of one pattern."""
    if not isinstance(text, str) or not text:
        return [f"{_value_text(text, '')} is not a regular expression"]
    return [problem.removeprefix(f"{name}: ") for problem in pattern_problems([(name, text)], kind)]


def _progress_patterns(value: Any) -> tuple[LogPattern, ...]:
    if not isinstance(value, dict):
        raise _InvalidValue("is not a mapping of names to regular expressions")
    found, wrong = dict[str, LogPattern](), list[str]()
    for key, text in value.items():
        name = _EXPORTER_NAMES.get(str(key), str(key))
        if name in found:
            wrong.append(f'.{key}: is another word for "{name}", which is there too; leave one of them out')
        wrong += [f".{key}: {problem}" for problem in _pattern_problems(name, text)]
        found[name] = LogPattern(name, text)
    if wrong:
        raise _InvalidParts(wrong)
    return tuple(found.values())


def _error_patterns(value: Any) -> tuple[LogPattern, ...]:
    if not isinstance(value, list):
        raise _InvalidValue("is not a list; each entry has a pattern and a severity")
    found, wrong = dict[str, LogPattern](), list[str]()
    for index, entry in enumerate(value):
        if not isinstance(entry, dict) or "pattern" not in entry:
            wrong.append(f"[{index}]: {_value_text(entry, '')} is not a mapping with a pattern and a severity")
            continue
        for key in entry:
            if key not in ("pattern", "severity", "name"):
                wrong.append(f'[{index}].{key}: unknown key "{key}" (known: name, pattern, severity)')
        severity = entry.get("severity", "warning")
        if severity not in SEVERITIES:
            known = ", ".join(f'"{word}"' for word in SEVERITIES)
            wrong.append(f"[{index}].severity: {_value_text(severity, '')} is not one of {known}")
        pattern = entry["pattern"]
        if problems := _pattern_problems("error", pattern, PatternKind.ERROR):
            wrong += [f"[{index}].pattern: {problem}" for problem in problems]
            continue
        name = str(entry.get("name") or re.sub(r"\W+", "_", pattern).strip("_")[:64] or f"pattern_{index}")
        while name in found:
            name += "_"
        found[name] = LogPattern(name, pattern, str(severity))
    if wrong:
        raise _InvalidParts(wrong)
    return tuple(found.values())


_REQUIRED_KEYS = {
    "job_name": "job.name",
    "num_workers": "job.num_workers",
    "output_dir": "paths.output_dir",
    "log_dir": "paths.log_dir",
}

_KEYS: Mapping[str, Any] = {
    "job": {
        "name": ("job_name", _text),
        "num_workers": ("num_workers", _integer(1)),
        "gpu_ids": ("gpu_ids", _gpu_ids),
        "total_items": ("total_items", _integer(0)),
    },
    "paths": {
        "output_dir": ("output_dir", _text),
        "log_dir": ("log_dir", _text),
        "checkpoint_dir": ("checkpoint_dir", _text),
    },
    "patterns": {
        "output": ("output_pattern", _glob),
        "logs": ("log_pattern", _glob),
        "checkpoints": ("checkpoint_pattern", _glob),
    },
    "monitoring": {
        "check_interval": ("check_interval", _seconds),
        "launch_timeout": ("launch_timeout", _seconds),
        "stall_timeout": ("stall_timeout", _seconds),
        "gpu_metrics": ("gpu_metrics", _switch),
    },
    "progress_patterns": ("progress_patterns", _progress_patterns),
    "error_patterns": ("error_patterns", _error_patterns),
    "alerts": {
        "email": {
            "enabled": ("email_enabled", _switch),
            "address": ("alert_email", _text),
            "smtp_server": (None, _text),
            "smtp_port": (None, _integer(1)),
        },
        "slack": {"enabled": ("slack_enabled", _switch), "webhook": ("alert_slack", _secret)},
        "terminal": {"enabled": ("terminal", _switch), "refresh_rate": (None, _seconds)},
    },
}

_MAPPING_EXAMPLES = {
    "alerts": '{email: {address: "user@example.com"}}',
    "alerts.email": '{address: "user@example.com"}',
    "alerts.slack": '{webhook: "https://hooks.slack.com/services/..."}',
    "alerts.terminal": "{enabled: true}",
}  # examples for places that need a mapping


def _key_paths() -> dict[str, str]:
    """Place of each key, by its name and its setting; without keys that have several places."""
    found: dict[str, set[str]] = {}
    sections = [(name, kind) for name, kind in _KEYS.items() if isinstance(kind, dict)]
    for place, keys in sections:  # grows during the loop
        for key, kind in keys.items():
            here = f"{place}.{key}"
            if isinstance(kind, dict):
                sections.append((here, kind))
            for name in (key, *(kind[:1] if isinstance(kind, tuple) else ())):
                found.setdefault(name or key, set()).add(here)
    return {name: places.pop() for name, places in found.items() if len(places) == 1}


_KEY_PATHS = _key_paths()
