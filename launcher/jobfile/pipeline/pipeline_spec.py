"""A pipeline: several jobs, and which waits for which."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from launcher.jobfile.value_types import FileModel
from launcher.jobfile.yamlfile import parse_yaml_model

# how the job before has to end, or that it has started; `each` is of two sweeps, point by point
Condition = Literal["ok", "any", "notok", "start", "each"]


def _as_mapping(value: object) -> object:
    """``prep`` and ``[prep, fetch]`` mean that these must end well."""
    names = [value] if isinstance(value, str) else value
    return dict.fromkeys(names, "ok") if isinstance(names, list) and all(isinstance(n, str) for n in names) else value


class PartSpec(FileModel):
    """A job or sweep of a pipeline: its job file, and the jobs that it waits for."""

    file: str = Field(min_length=1)
    after: Annotated[dict[str, Condition], BeforeValidator(_as_mapping)] = {}


class PipelineSpec(FileModel):
    """A pipeline file."""

    name: str = Field(min_length=1, max_length=200)
    jobs: dict[str, PartSpec] = Field(min_length=1)


def parse_pipeline(text: str, source: str) -> PipelineSpec:
    """Parse the text of a pipeline file. Raises ConfigError with every problem."""
    return parse_yaml_model(text, source, PipelineSpec)
