"""Attempts of jobs, from the text of sacct, and their figures as seff calculates them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from exporter.contract.records import Record
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.states import ENDS, base_state, known_limit, parse_duration, parse_moment, task_ids

# the last one is the user's text and may contain `|`
FIELDS = (
    *("JobID", "User", "State", "ExitCode", "Submit", "Start", "End", "ElapsedRaw", "TimelimitRaw", "AllocCPUS"),
    *("TotalCPU", "AllocTRES", "TRESUsageInTot", "JobName"),
)
FORMAT = ",".join(FIELDS)
ROW_FIELDS = ("Partition", "Account", "QOS", "NNodes", "NodeList")  # before those, for what the queue would tell
ROW_FORMAT = ",".join((*ROW_FIELDS, *FIELDS))
MOST_ENERGY_J = 1e15  # the controller enters a number near 2^64 for an energy that it does not know
_GPU = "gres/gpu"
_FACTORS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}


class Step(NamedTuple):
    """A step of an attempt."""

    ended: float | None
    cpu_s: float | None
    memory_bytes: float | None  # of all its tasks at their peaks; None if it was never sampled


class Figures(Record):
    """What a job used of what it asked for. None is not measured."""

    elapsed_s: float | None = None
    limit_s: float | None = None
    cpu_ratio: float | None = None  # CPU time of all steps / (elapsed time x CPUs)
    memory_bytes: float | None = None  # of the largest step
    memory_requested_bytes: float | None = None
    exit_code: str | None = None  # status:signal
    energy_j: float | None = None  # of the whole nodes, also if others used them


class Attempt(NamedTuple):
    """One attempt of a job, with its steps."""

    job_id: str
    user: str
    name: str
    snapshot: AttemptSnapshot
    exit_code: str
    elapsed_s: float
    cpus: int
    memory_requested_bytes: float | None
    steps: tuple[Step, ...] = ()
    resources: str = ""  # allocated ones such as `cpu=4,gres/gpu=1,mem=600M`
    energy_j: float | None = None  # of the largest step: those that run at the same time count the same nodes

    @property
    def is_complete(self) -> bool:
        """Whether accounting has the ends of the attempt and all its steps: those of steps come 1 to 2 s later."""
        ends = (self.snapshot.ended, *(step.ended for step in self.steps))
        return self.snapshot.state in ENDS and None not in ends

    def figures(self) -> Figures:
        """The figures of seff: it counts whole seconds of each step, and the largest step's memory."""
        cpu_s = [int(step.cpu_s) for step in self.steps if step.cpu_s is not None]
        available_s = self.elapsed_s * self.cpus
        return Figures(
            elapsed_s=self.elapsed_s,
            limit_s=self.snapshot.limit_s,
            cpu_ratio=sum(cpu_s) / available_s if cpu_s and available_s else None,
            memory_bytes=max((step.memory_bytes for step in self.steps if step.memory_bytes), default=None),
            memory_requested_bytes=self.memory_requested_bytes,
            exit_code=self.exit_code,
            energy_j=self.energy_j,
        )


def plain_lines(text: str, delimiter: str) -> str:
    """What sacct prints with another delimiter, as with its own one.

    Lines without it are left out. Those are the other lines of a name, which nobody can make look like a job of another
    user if nobody can guess the delimiter.
    """
    return "".join(f"{line.replace(delimiter, '|')}\n" for line in text.split("\n") if delimiter in line)


def parse_accounting(text: str) -> tuple[Attempt, ...]:
    """Parse ``sacct -n -P -D -o FORMAT``: each attempt comes before its steps. Lines that are none are skipped."""
    found: list[Attempt] = []
    place: dict[str, int] = {}  # of the last attempt of each id
    for line in text.split("\n"):
        parts = line.split("|", len(FIELDS) - 1)
        job_id, _, step = parts[0].partition(".")
        if len(parts) < len(FIELDS):
            continue
        if not step:
            try:
                tasks = task_ids(job_id)
                found.append(_parse_attempt(parts))
            except ValueError:
                continue
            place |= dict.fromkeys(tasks, len(found) - 1)
        elif job_id in place:
            attempt = found[place[job_id]]
            memory = tres(parts[12], "mem")
            read = Step(parse_moment(parts[6]), parse_duration(parts[10]), memory or None)
            energy = max(filter(None, (attempt.energy_j, known_energy(parts[11]))), default=None)
            found[place[job_id]] = attempt._replace(steps=(*attempt.steps, read), energy_j=energy)
    return tuple(found)


def _parse_attempt(parts: Sequence[str]) -> Attempt:
    job_id, user, state, exit_code, submit, start, end, elapsed, limit, cpus, _, allocated, _, name = parts
    snapshot = AttemptSnapshot(
        base_state(state),
        parse_moment(submit),
        parse_moment(start),
        parse_moment(end),
        limit_s=known_limit(float(limit) * 60 if limit.isdecimal() else None),
    )
    memory = tres(allocated, "mem")
    energy = known_energy(allocated)
    return Attempt(
        job_id, user, name, snapshot, exit_code, float(int(elapsed)), int(cpus), memory, (), allocated, energy
    )


def parse_history(text: str) -> tuple[tuple[QueueRow, Attempt], ...]:
    """Parse ``sacct -n -P -D -o ROW_FORMAT``: attempts, also as rows like those of the queue.

    Lines that are none are skipped.
    """
    lines = [line.split("|", len(ROW_FIELDS)) for line in text.split("\n")]
    whole = [line for line in lines if len(line) > len(ROW_FIELDS)]
    places = [own for *own, rest in whole if "." not in rest.partition("|")[0] and parse_accounting(rest)]
    attempts = parse_accounting("\n".join(rest for *_, rest in whole))
    found = []
    for (partition, account, qos, node_count, nodes), last in zip(places, attempts, strict=True):
        row = QueueRow(last.job_id, last.snapshot, last.name, None, partition, last.resources, last.user, account, qos)
        count = int(node_count) if node_count.isdecimal() else 0
        found.append((row._replace(node_count=count, nodes=nodes), last))
    return tuple(found)


def known_energy(allocated: str) -> float | None:
    """Energy in allocated resources, where Slurm enters it (``ConsumedEnergyRaw``); None if it is unknown."""
    energy = tres(allocated, "energy")
    return energy if energy is not None and 0 < energy < MOST_ENERGY_J else None


def gpu_counts(resources: str) -> dict[str, int]:
    """GPUs by type in trackable resources; those whose type Slurm does not tell are under an empty name."""
    return dict(_gpu_counts(resources))


@lru_cache(maxsize=4096)  # thousands of jobs ask for the same few things
def _gpu_counts(resources: str) -> tuple[tuple[str, int], ...]:
    names = [pair.partition("=")[0] for pair in resources.split(",") if pair.startswith(_GPU)]
    counts = {name.removeprefix(_GPU).lstrip(":"): int(tres(resources, name) or 0) for name in names}
    typed = {name: count for name, count in counts.items() if name and count}
    # the number of all of them stands beside those of the types
    rest = counts.get("", 0) - sum(typed.values())
    return (*typed.items(), *((("", rest),) if rest > 0 else ()))


@lru_cache(maxsize=4096)
def tres(text: str, name: str) -> float | None:
    """The amount of a resource in ``cpu=4,mem=600M``, memory in bytes; None without it."""
    amount = dict(pair.partition("=")[::2] for pair in text.split(",")).get(name, "")
    factor = _FACTORS.get(amount[-1:], 1)
    number = amount[:-1] if factor > 1 else amount
    try:
        return float(number) * factor
    except ValueError:
        return None
