"""Use of the cluster over a time, and of running jobs, from the text of sacct and sstat."""

from collections.abc import Iterable
from typing import NamedTuple

from exporter.slurm.accounting import gpu_counts, tres
from exporter.slurm.states import base_state, parse_duration

# the last one is the user's text and may contain `|`
FIELDS = ("JobID", "User", "Account", "Partition", "State", "ElapsedRaw", "AllocCPUS", "AllocTRES", "JobName")
FORMAT = ",".join(FIELDS)
RUNNING_FIELDS = ("JobID", "AveCPU", "NTasks", "TRESUsageInTot")
RUNNING_FORMAT = ",".join(RUNNING_FIELDS)


class UsageRow(NamedTuple):
    """One attempt of a job, in the time that was asked for."""

    job_id: str
    user: str
    account: str
    partition: str
    state: str
    elapsed_s: float
    cpus: int
    gpus: dict[str, int]  # by type; a type that Slurm does not tell is empty
    name: str
    idle_s: float | None = None  # GPU seconds in which a sidecar saw an idle GPU; None if no sidecar ran

    @property
    def gpu_seconds(self) -> float:
        return self.elapsed_s * sum(self.gpus.values())


class Usage(NamedTuple):
    """What some jobs took. Waiting jobs took nothing."""

    jobs: int
    attempts: int
    cpu_s: float  # allocated, whether used or not
    gpu_s: dict[str, float]  # allocated, by type
    idle_s: float | None = None  # of these, where sidecars looked


class RunningUse(NamedTuple):
    """CPU time and memory of a running job so far. None is not measured."""

    cpu_s: float | None
    memory_bytes: float | None


def parse_usage(text: str) -> tuple[UsageRow, ...]:
    """Parse ``sacct -n -P -D -X -o FORMAT``. Lines that are none are skipped."""
    found = []
    for line in text.split("\n"):
        parts = line.split("|", len(FIELDS) - 1)
        if len(parts) < len(FIELDS) or not (parts[5].isdecimal() and parts[6].isdecimal()):
            continue
        job_id, user, account, partition, state, elapsed, cpus, allocated, name = parts
        gpus = gpu_counts(allocated)
        row = UsageRow(job_id, user, account, partition, base_state(state), float(elapsed), int(cpus), gpus, name)
        found.append(row)
    return tuple(found)


def sum_usage(rows: Iterable[UsageRow]) -> Usage:
    """The sums of some attempts."""
    rows = [row for row in rows if row.elapsed_s]
    gpu_s: dict[str, float] = {}
    for row in rows:
        for name, count in row.gpus.items():
            gpu_s[name] = gpu_s.get(name, 0.0) + count * row.elapsed_s
    cpu_s, idle_s = (
        sum(row.elapsed_s * row.cpus for row in rows),
        [row.idle_s for row in rows if row.idle_s is not None],
    )
    jobs = {row.job_id.partition("+")[0] for row in rows}  # components of a heterogeneous job are one
    return Usage(len(jobs), len(rows), cpu_s, gpu_s, sum(idle_s) if idle_s else None)


def parse_running_use(text: str) -> RunningUse:
    """Parse ``sstat -n -P -a -o RUNNING_FORMAT``: CPU time and memory of all steps that run now."""
    cpu_s, memory = list[float](), list[float]()
    for line in text.split("\n"):
        parts = line.split("|")
        if len(parts) != len(RUNNING_FIELDS):
            continue
        whole = parse_duration(dict(pair.partition("=")[::2] for pair in parts[3].split(",")).get("cpu", ""))
        cpu_s += [] if whole is None else [whole]
        held = tres(parts[3], "mem")
        memory += [held] if held else []
    return RunningUse(sum(cpu_s) if cpu_s else None, sum(memory) if memory else None)
