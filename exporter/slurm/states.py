"""States of jobs in Slurm's words, ids of jobs and array tasks, and Slurm's times."""

import re
from itertools import chain, islice

ENDS = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
)  # without REVOKED: the job then runs on another cluster of the federation
RETURNING = frozenset(("NODE_FAIL", "PREEMPTED", "BOOT_FAIL"))  # Slurm may requeue such a job within seconds
NEVER = "DependencyNeverSatisfied"  # the pending reason of a job that can no longer start

# squeue prints a flag in place of the state behind it; an unknown word stays as it is, and is no end
_WAITING = ("CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED")
_RUNNING = ("COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
_BASE_STATES = {**dict.fromkeys(_WAITING, "PENDING"), **dict.fromkeys(_RUNNING, "RUNNING")}

JOB_ID = r"\d+(?:_\d+|_\[[^\]|]*\]|\+\d+)?"  # 4459, 4459_3, 4459_[1-3%2], 20+0 (a component)
_ARRAY = re.compile(r"(\d+)_\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_CUT = re.compile(r"[-,][\d:]*\.\.\.$")  # the end of a list that Slurm has cut after 64 bytes, often within a number
MOST_TASKS = 100_000  # of an array that are told apart; more would fill the memory

NO_LIMIT_S = 365 * 86400.0  # what the controller enters for a started job of a partition without a limit

_DURATION = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)(?:\.\d+)?")


def base_state(text: str) -> str:
    """The base state behind what Slurm prints, such as ``CANCELLED by 1000`` or the flag ``COMPLETING``."""
    word = text.partition(" ")[0]
    return _BASE_STATES.get(word, word)


def task_ids(job_id: str) -> tuple[str, ...]:
    """Ids of the tasks in ``4459_[1-3,7,10-19:3%2]``, and any other id alone. Raises ValueError.

    If the id does not tell all of them, these are the first ones.
    """
    found = _ARRAY.fullmatch(job_id)
    if found is None:
        return (job_id,)
    indexes = chain.from_iterable(_ranges(found[2]))
    return tuple(f"{found[1]}_{index}" for index in islice(indexes, MOST_TASKS))


def tells_all_tasks(job_id: str) -> bool:
    """Whether ``task_ids`` has all tasks: Slurm has not cut their list, and there are not too many.

    Raises ValueError.
    """
    found = _ARRAY.fullmatch(job_id)
    return found is None or ("..." not in found[2] and sum(map(len, _ranges(found[2]))) <= MOST_TASKS)


def _ranges(text: str) -> list[range]:
    indexes = text.partition("%")[0]
    found = [_RANGE.fullmatch(part) for part in _CUT.sub("", indexes).split(",")]
    if None in found:
        raise ValueError(f"{indexes[:60]!r} is not a list of array indexes")
    return [range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1) or 1) for part in found if part]


def array_of(job_id: str) -> str:
    """The id of the array or heterogeneous job to which a task or component belongs; any other id itself."""
    return job_id.partition("_")[0].partition("+")[0]


def is_part_of(job_id: str, wanted: str) -> bool:
    """Whether a job is the wanted one, a task of that array, or a component of that job."""
    return job_id == wanted or job_id.startswith((f"{wanted}_", f"{wanted}+"))


def waits_with(job_id: str, task: str) -> bool:
    """Whether a task is among the tasks of an array that wait together."""
    return job_id.endswith("]") and array_of(job_id) == array_of(task) and task in task_ids(job_id)


def parse_duration(text: str) -> float | None:
    """Seconds of ``1-02:03:04``, ``5:00`` or ``00:10.481``; None for ``UNLIMITED`` and other words."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_moment(text: str) -> float | None:
    """Epoch seconds; None for ``N/A``, ``NONE``, ``Unknown`` and other words."""
    return float(text) if text.isdecimal() else None


def known_limit(limit_s: float | None) -> float | None:
    """A time limit; None for a job that has none, whatever Slurm has entered for it."""
    return None if limit_s == NO_LIMIT_S else limit_s
