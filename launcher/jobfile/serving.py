"""Keys of a serving job: model, engine, front end, benchmark and readiness."""

import re
import shlex
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import InitErrorDetails

from exporter.contract.bounded_yaml import WrittenFloat, WrittenInt
from launcher.jobfile.backend_kinds import BACKEND_KINDS
from launcher.jobfile.value_types import FileModel, Seconds, Variables, as_written, check_entry, known_name

_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
MOST_CONCURRENCY = 1_000_000  # concurrent requests; a larger number is a typing error


def _option_problem(name: str) -> str | None:
    if _OPTION.fullmatch(name):
        return None
    bare = name.lstrip("-").partition("=")[0].partition(" ")[0]
    hint = f"; write {bare}" if _OPTION.fullmatch(bare) else ""
    return f"{name!r} is not the name of an option: write it without -- and without its value{hint}"


_AS_WRITTEN = as_written(WrittenInt, WrittenFloat)
# options of a program by long name without ``--``; true: bare option, false or null: left out
Arguments = dict[
    Annotated[str, check_entry(_option_problem)],
    Annotated[str | int | float | bool | list[Annotated[str | int | float, _AS_WRITTEN]] | None, _AS_WRITTEN],
]


def concurrency_list(value: list[int] | str | None) -> tuple[int, ...]:
    """Numbers of concurrent requests, one for each run of the benchmark."""
    parts = value.split("x") if isinstance(value, str) else value or ()
    return tuple(int(part) for part in parts)


def _concurrencies(value: object) -> object:
    parts = value.split("x") if isinstance(value, str) else value
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 < value <= MOST_CONCURRENCY:
            raise ValueError(f"{value} is not a list of numbers above 0; write for example [4, 8, 16]")
        raise ValueError(f"{value} is a number; write [{value}], or [4, 8, 16]")
    if not isinstance(parts, list):
        return value
    wrong = [part for part in parts if isinstance(part, bool) or not re.fullmatch(r"[1-9][0-9]{0,6}", str(part))]
    if wrong or not parts or any(int(part) > MOST_CONCURRENCY for part in parts):
        raise ValueError(f'{value!r} is not a list of numbers above 0; write for example [4, 8, 16] or "4x8x16"')
    return value


def _rate(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    if value != "inf" and not (isinstance(value, int | float) and 0 < value < 1e9):
        raise ValueError(f'{value!r} is not a rate; write requests per second as a number, or "inf"')
    return value


def _command(command: object) -> object:
    if isinstance(command, list):
        command = _join_argv(command)
    if isinstance(command, str):
        try:
            empty = not shlex.split(command)
        except ValueError as error:
            raise ValueError(f'"{command}" cannot be split into words: {error}') from error
        if empty:
            raise ValueError("the command is empty")
    return command


def _join_argv(words: list[object]) -> str:
    """Join words into a text that splits into the same words."""
    wrong: list[InitErrorDetails] = [
        {"type": "string_type", "loc": (index,), "input": word}
        for index, word in enumerate(words)
        if not isinstance(word, str)
    ]
    if wrong:
        raise ValidationError.from_exception_data("command", wrong)
    if words[:1] == [""]:
        raise ValueError("the command is empty")
    return shlex.join(map(str, words))


if TYPE_CHECKING:
    BackendType = str
else:
    BackendType = Literal[tuple(BACKEND_KINDS)]
FrontendType = Literal["sglang-router", "dynamo", "vllm", "custom"]
BenchmarkType = Literal["manual", "custom", "sa-bench", "router"]
Command = Annotated[
    str,
    BeforeValidator(_command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}]}),
]  # one text, split as a shell does; a list of words becomes such a text


class ModelSpec(FileModel):
    """The model that is served."""

    path: str
    name: str | None = None


class EngineRoleSpec(FileModel):
    """Settings of the engine for one role, after those for all roles."""

    args: Arguments = {}
    env: Variables = {}
    config: dict[str, object] = {}


class BackendSpec(EngineRoleSpec):
    """The program that the workers run, and how its parts find each other."""

    type: Annotated[BackendType, known_name("backend", tuple(BACKEND_KINDS))] = "command"
    prefill: EngineRoleSpec = EngineRoleSpec()
    decode: EngineRoleSpec = EngineRoleSpec()
    agg: EngineRoleSpec = EngineRoleSpec()
    mpi: str = Field("pmix", pattern="^[A-Za-z0-9_]+$")

    @property
    def granularity(self) -> Literal["node", "gpu"]:
        """One process for each node of a worker, or for each of its GPUs."""
        return BACKEND_KINDS[self.type].granularity


class FrontendSpec(EngineRoleSpec):
    """The front end, which takes the requests."""

    type: Annotated[FrontendType, known_name("front end", get_args(FrontendType))]
    count: int = Field(1, ge=1, le=1000)
    command: Command | None = None
    nginx: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> "FrontendSpec":
        if self.type == "custom" and self.command is None:
            raise ValueError("command: is missing; type custom needs one")
        if self.count > 1 and self.nginx is False:
            raise ValueError(
                f"nginx: {self.count} front ends need nginx to have one address; leave this key out, or use count: 1"
            )
        return self

    @property
    def balanced(self) -> bool:
        """Whether nginx runs in front of the front ends."""
        return bool(self.nginx) or self.count > 1


class BenchmarkSpec(EngineRoleSpec):
    """The benchmark, which uses the workers. The job ends with it; `manual` serves until the job is stopped."""

    type: Annotated[BenchmarkType, known_name("benchmark", get_args(BenchmarkType))] = "manual"
    command: Command | None = None
    isl: int | None = Field(None, ge=1)
    osl: int | None = Field(None, ge=1)
    concurrencies: Annotated[list[int] | str | None, BeforeValidator(_concurrencies)] = None
    req_rate: Annotated[str | int | float, BeforeValidator(_rate)] = "inf"

    @model_validator(mode="after")
    def _whole(self) -> "BenchmarkSpec":
        needed = {
            "manual": (),
            "custom": ("command",),
            "sa-bench": ("command", "isl", "osl", "concurrencies"),
            "router": ("isl", "osl", "concurrencies"),
        }[self.type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"type {self.type} needs {', '.join(missing)}; set {'it' if len(missing) == 1 else 'them'}"
            )
        return self


class ReadinessSpec(FileModel):
    """When the workers are ready, and how long that may take. Times in seconds."""

    kind: Literal["auto", "none", "dynamo", "sglang", "vllm", "http", "tcp"] = "auto"
    path: str | None = None
    timeout: Seconds = 1800.0
    interval: Seconds = 5.0
