"""Types of values in job files and cluster files, each with its check and message."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from exporter.contract.bounded_yaml import WrittenFloat, WrittenInt
from launcher.errors import did_you_mean

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME_LIMIT = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
_DURATION = re.compile(r"(?=\d)(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
_DIGITS = re.compile(r"[-+]?[0-9.:]+")
_POWER_OF_TEN = re.compile(r"\d{1,9}(?:\.\d{1,9})?[eE]\+?\d{1,2}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*):([0-9]{1,5})")


class FileModel(BaseModel):
    """One mapping of a file. Unknown keys are refused, and values are not converted."""

    # with its build deferred, a section is built once, in the whole file that is read, and not also alone
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


def parse_time_limit(text: str) -> float:
    """Seconds of a Slurm time limit: ``minutes``, ``min:sec``, ``h:min:sec``, ``days-h[:min[:sec]]`` (sbatch(1))."""
    match = _TIME_LIMIT.fullmatch(text)
    if not match:
        raise ValueError(f'{text!r} is not a time limit; write for example 4h, 90m, "04:00:00" or "2-00:00:00"')
    days, second, third = (int(part) if part is not None else None for part in match.group(1, 3, 4))
    first = int(match[2])
    if days is not None:
        hours, minutes, seconds = first, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first, second or 0, third
    else:
        hours, minutes, seconds = 0, first, second or 0
    total = ((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
    if total == 0:
        raise ValueError(f"{text!r} is a time limit of zero, with which a job would wait forever; use a longer one")
    return float(total)


def _time_text(value: object) -> object:
    """The text that Slurm takes: ``4h`` becomes ``04:00:00``."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    if isinstance(value, int):
        text = value.text if isinstance(value, WrittenInt) else str(value)
        if ":" in text:  # YAML reads an unquoted 04:00:00 as base 60
            raise ValueError(f'{text} is not a text; write it in quotes: "{text}"')
        raise ValueError(f'{text} is a number; give its unit, as in 4h or 90m, or write "04:00:00" in quotes')
    if match := _DURATION.fullmatch(value):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        minutes, seconds = minutes + seconds // 60, seconds % 60
        days, hours, minutes = days + (hours + minutes // 60) // 24, (hours + minutes // 60) % 24, minutes % 60
        value = (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{seconds:02}"
    parse_time_limit(value)
    return value


TimeLimit = Annotated[str, BeforeValidator(_time_text)]


def as_written(*kinds: type[WrittenInt | WrittenFloat]) -> BeforeValidator:
    """Read a number of digits as its text, for options of other programs: YAML reads 12:00:00 as 43200, 3.10 as 3.1."""

    def text(value: object) -> object:
        return value.text if isinstance(value, kinds) and _DIGITS.fullmatch(value.text) else value

    return BeforeValidator(text)


def _whole_number(value: object) -> object:
    """Read 1e5 as a whole number; YAML reads it as a text, and 1.0e+5 as a fraction."""
    number = float(value) if isinstance(value, str) and _POWER_OF_TEN.fullmatch(value) else value
    return int(number) if isinstance(number, float) and number.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole_number)]


def as_float(value: object) -> object:
    """Convert a whole number to float; return anything else unchanged."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if abs(value) > 1 << 53:
        raise ValueError("is far too large")
    return float(value)


Seconds = Annotated[float, BeforeValidator(as_float), Field(gt=0, lt=1e9)]
CheckInterval = Annotated[Seconds, Field(le=300)]  # GpuJobCollectorFailing waits for 5 minutes without a read
NotNegativeSeconds = Annotated[float, BeforeValidator(as_float), Field(ge=0, lt=1e9)]


def _address(value: object) -> object:
    if isinstance(value, str):
        match = _ADDRESS.fullmatch(value)
        if not match or int(match[1]) > 65535:
            raise ValueError(f'{value!r} is not host:port; write for example ":0" or "127.0.0.1:9410"')
    return value


def _directory(value: object) -> object:
    if isinstance(value, str):
        try:
            Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{value!r}: {str(error)[:1].lower()}{str(error)[1:]}") from error
    return value


def _url(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        raise ValueError(f'{value!r} is not the address of a server; write for example "http://prometheus:9090"')
    return value


Address = Annotated[str, BeforeValidator(_address)]
Url = Annotated[str, BeforeValidator(_url)]
Directory = Annotated[str, BeforeValidator(_directory)]


def known_name(what: str, known: Sequence[str]) -> BeforeValidator:
    """Refuse an unknown name, and suggest the nearest known one."""

    def check(name: object) -> object:
        if isinstance(name, str) and name not in known:
            raise ValueError(f'unknown {what} "{name}"{did_you_mean(name, known)} (known: {", ".join(known)})')
        return name

    return BeforeValidator(check)


def combine_problems(problems: Sequence[tuple[tuple[str | int, ...], str]], given: object) -> ValidationError:
    """Combine several problems within a value into one error, each with its place."""
    details: list[InitErrorDetails] = [
        {"type": PydanticCustomError("value_error", "{message}", {"message": message}), "loc": place, "input": given}
        for place, message in problems
    ]
    return ValidationError.from_exception_data("parts", details)


def check_entry(find_problem: Callable[[str], str | None]) -> AfterValidator:
    """Check list entries one by one, so that one of a wrong type hides no problem of the others."""

    def check(text: str) -> str:
        if problem := find_problem(text):
            raise ValueError(problem)
        return text

    return AfterValidator(check)


def variable_problem(name: str) -> str | None:
    """Problem with the name of an environment variable, or None."""
    return None if _ENVIRONMENT_NAME.fullmatch(name) else f"{name!r} is not a name for an environment variable"


VariableName = Annotated[str, check_entry(variable_problem)]


Variables = dict[VariableName, str]
