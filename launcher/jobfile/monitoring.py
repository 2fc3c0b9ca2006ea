"""Keys about monitoring: file names, patterns for logs, sidecars, and verification."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from exporter.contract.manifest import LogPattern
from exporter.contract.records import JsonValue
from exporter.logs.lexicon import AUTO
from exporter.logs.packs_reader import pack_names
from exporter.logs.patterns import PatternKind, pattern_problems
from launcher.jobfile.value_types import (
    Address,
    CheckInterval,
    Count,
    Directory,
    FileModel,
    NotNegativeSeconds,
    Seconds,
    as_float,
    check_entry,
    combine_problems,
    known_name,
)
from launcher.plan.plan import safe_file_word

# common pattern names, and the exporter's names for the same thing
EXPORTER_NAMES = {"items_processed": "items", "batch_number": "batch"}
PACKS = (AUTO, *pack_names())


def _file_pattern_problem(pattern: str) -> str | None:
    if pattern and "/" not in pattern:
        return None
    return f"{pattern!r} is not a pattern of file names; directories go into `paths`"


FilePattern = Annotated[str, check_entry(_file_pattern_problem)]


class PatternsSpec(FileModel):
    """Globs of file names."""

    output: FilePattern | None = "output_worker_*.json*"
    logs: FilePattern | None = "worker_*.log"
    checkpoints: FilePattern | None = "checkpoint_*"


PackName = Annotated[str, known_name("pack", PACKS), Field(json_schema_extra={"enum": list(PACKS)})]


def _pattern_problems(name: str, text: str, kind: PatternKind | None = None) -> list[str]:
    return [problem.removeprefix(f"{name}: ") for problem in pattern_problems([(name, text)], kind)]


def _usable_patterns(patterns: dict[str, str]) -> dict[str, str]:
    problems: list[tuple[tuple[str | int, ...], str]] = []
    names: dict[str, str] = {}
    for name, text in patterns.items():
        meant = EXPORTER_NAMES.get(name, name)
        if (other := names.setdefault(meant, name)) != name:
            problems.append(((name,), f'means the same as "{other}"; remove one of them'))
        problems += [((name,), problem) for problem in _pattern_problems(meant, text)]
    if problems:
        raise combine_problems(problems, patterns)
    return patterns


ProgressPatterns = Annotated[dict[str, str], AfterValidator(_usable_patterns)]


class ProgressSpec(FileModel):
    """How to read progress from the logs."""

    total_items: Count | None = Field(None, ge=1)
    total_epochs: Count | None = Field(None, ge=1)
    total_steps: Count | None = Field(None, ge=1)
    pack: PackName = AUTO
    patterns: ProgressPatterns = {}
    sample: str | list[str] | None = None


class ErrorSpec(FileModel):
    """An additional error pattern for the logs."""

    pattern: str
    severity: Literal["critical", "warning", "info"] = "warning"
    name: str | None = None

    @field_validator("pattern")
    @classmethod
    def _usable(cls, pattern: str) -> str:
        if problems := _pattern_problems("pattern", pattern, PatternKind.ERROR):
            raise combine_problems([((), problem) for problem in problems], pattern)
        return pattern


def progress_patterns(patterns: Mapping[str, str]) -> tuple[LogPattern, ...]:
    """The job's own progress patterns, under the exporter's names."""
    return tuple(LogPattern(EXPORTER_NAMES.get(name, name), text) for name, text in patterns.items())


def error_patterns(errors: Iterable[ErrorSpec]) -> tuple[LogPattern, ...]:
    """The job's own error patterns. One without a name is named after its text."""
    found: dict[str, LogPattern] = {}
    for error in errors:
        name = error.name or safe_file_word(error.pattern)
        while name in found:
            name += "_"
        found[name] = LogPattern(name, error.pattern, error.severity)
    return tuple(found.values())


Detail = Literal["essential", "normal", "full"]


class MonitoringSpec(FileModel):
    """How to monitor the job. Times in seconds."""

    enabled: bool = True
    check_interval: CheckInterval = 5.0
    launch_timeout: Seconds = 60.0
    stall_timeout: Seconds = 300.0
    checkpoint_interval: Seconds | None = None
    linger: NotNegativeSeconds = 30.0
    gpu_metrics: bool = False
    listen_address: Address | None = None
    detail: Detail | None = None


def _share(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value <= 1:
        percent = f"; for {value:g} % write {value / 100:g}" if 1 < value <= 100 else ""
        raise ValueError(f"{value} is not a share; use a number above 0 and at most 1{percent}")
    return as_float(value)


def _per_item(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 1e9:
        raise ValueError(f"{value} is not above 0 and below 1e9; write null to count no records")
    return as_float(value)


Share = Annotated[float, BeforeValidator(_share), Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})]
PerItem = Annotated[
    float, BeforeValidator(_per_item), Field(json_schema_extra={"exclusiveMinimum": 0, "exclusiveMaximum": 1e9})
]


class VerifySpec(FileModel):
    """Requirements on the results. A job that exits without error but delivers less is not a success."""

    complete_share: Share = 0.99
    outputs: int | None = Field(None, ge=1)
    records_per_item: PerItem | None = 1.0
    checksums: bool = False


def _retention_problem(text: str) -> str | None:
    if re.fullmatch(r"[1-9]\d{0,4}[hdwy]", text):
        return None
    return f"{text!r} is not a time that Prometheus keeps samples; write for example 30d, 12w or 1y"


def _remote_write(value: object) -> object:
    if isinstance(value, str):
        value = {"url": value}
    if isinstance(value, dict) and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", str(value.get("url", ""))):
        # without the value: it may have a password
        raise ValueError('has no address of a server; write for example "https://mimir.example.org/api/v1/push"')
    return value


class StackSpec(FileModel):
    """The Prometheus, Alertmanager and Grafana of one user."""

    bin: Directory | None = None
    image: dict[Literal["prometheus", "alertmanager", "grafana"], Directory] = {}
    grafana: bool = True
    retention: Annotated[str, check_entry(_retention_problem)] = "30d"
    remote_write: Annotated[str | dict[str, JsonValue] | None, BeforeValidator(_remote_write)] = None
