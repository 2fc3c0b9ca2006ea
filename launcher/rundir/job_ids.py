"""Ids of jobs as Slurm's commands take them, and as they stand in the names of run directories."""

from collections.abc import Iterable
from pathlib import Path


def job_id_of(run_dir: Path) -> str:
    """The job id in the name of a run directory: ``4459``, or ``4459_3`` for a task of an array.

    ``4459_3_...`` can be either, since a job's name may begin with a number: the record of the submission has the
    id for its own name.
    """
    first, _, rest = run_dir.name.partition("_")
    task = f"{first}_{rest.partition('_')[0]}"
    return task if (run_dir / f"{task}.json").is_file() else first


def task_ranges(indexes: Iterable[int]) -> str:
    """Array indexes as sbatch(1) takes them: ``0-2,5``."""
    ranges: list[list[int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
