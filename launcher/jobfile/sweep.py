"""A sweep: many runs of one job file, each with other values."""

from typing import Any

from pydantic import Field

from launcher.jobfile.value_types import FileModel

# named out here: within the class `list` is the field of that name once Python 3.14 evaluates the annotations
Values = list[Any]
Points = list[dict[str, Any]]


class SweepSpec(FileModel):
    """Points by grid (every combination), zip (side by side) and list, each over the rest of the file.

    A key is a place of the job file (`resources.nodes`, `workers[0].gpus`, `workers.ROLE.count`, `env.LR`), whose
    value it replaces, or any other word, which then is a placeholder `{word}` of the file's texts.
    """

    grid: dict[str, Values] = Field({}, description="Values by key; every combination, the first key slowest.")
    zip: dict[str, Values] = Field({}, description="Values by key, all as many: the first of each, the second, ...")
    max_parallel: int | None = Field(
        None, ge=1, description="Points that run at once; on Slurm all of them by default, on this machine one."
    )
    list: Points = Field([], description="The points themselves: keys with their values.")


class SweepFile(FileModel):
    """A job file with a sweep, as far as the sweep goes."""

    sweep: SweepSpec
