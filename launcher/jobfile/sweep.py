"""A sweep: one job file for several jobs with different values."""

from typing import Any

from pydantic import Field

from launcher.jobfile.value_types import FileModel

# defined here because Python 3.14 would resolve `list` within the class to the field
Values = list[Any]
Points = list[dict[str, Any]]


class SweepSpec(FileModel):
    """Points by grid (every combination), zip (in parallel) and list, each applied to the rest of the file.

    A key is a place of the job file (`resources.nodes`, `workers[0].gpus`, `workers.ROLE.count`, `env.LR`), whose
    value it replaces. Any other word is a placeholder `{word}` in the file's texts.
    """

    grid: dict[str, Values] = Field({}, description="Values by key; every combination, the first key slowest.")
    zip: dict[str, Values] = Field(
        {}, description="Values by key, in lists of equal length: the first of each, the second, ..."
    )
    max_parallel: int | None = Field(
        None, ge=1, description="Points that run at once; on Slurm all of them by default, on this machine one."
    )
    list: Points = Field([], description="The points themselves: keys with their values.")


class SweepFile(FileModel):
    """The sweep of a job file."""

    sweep: SweepSpec
