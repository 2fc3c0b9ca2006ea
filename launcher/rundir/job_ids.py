"""Job ids, as Slurm's commands take them and as run directories are named."""

from collections.abc import Iterable
from pathlib import Path


def job_id_of(run_dir: Path) -> str:
    """The job id in a run directory's name: ``4459``, or ``4459_3`` for a task of an array.

    ``4459_3_...`` is ambiguous, because a job name may begin with a number; the submission record decides.
    """
    first, _, rest = run_dir.name.partition("_")
    task = f"{first}_{rest.partition('_')[0]}"
    return task if (run_dir / f"{task}.json").is_file() else first


def task_ranges(indexes: Iterable[int]) -> str:
    """Array indexes in the syntax of sbatch(1): ``0-2,5``."""
    ranges: list[list[int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
