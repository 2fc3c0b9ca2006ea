"""A sweep: one job file for several jobs with different values."""

from pydantic import Field

from exporter.contract.records import JsonValue
from launcher.jobfile.value_types import FileModel

# defined here because Python 3.14 would resolve `list` within the class to the field
Values = list[JsonValue]
Points = list[dict[str, JsonValue]]


class SweepSpec(FileModel):
    """Points by grid (every combination), zip (in parallel) and list, each applied to the rest of the file.

    A key is a place of the job file (`resources.nodes`, `workers[0].gpus`, `workers.ROLE.count`, `env.LR`), whose
    value it replaces. Any other word is a placeholder `{word}` in the file's texts.
    """

    grid: dict[str, Values] = {}
    zip: dict[str, Values] = {}
    max_parallel: int | None = Field(None, ge=1)
    list: Points = []


class SweepFile(FileModel):
    """The sweep of a job file."""

    sweep: SweepSpec
