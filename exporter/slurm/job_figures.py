"""All figures of one ended job, over its attempts, from the text of sacct."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from exporter.contract.report import GpuSums
from exporter.contract.slurm_accounting import GpuTime, SlurmAccounting
from exporter.slurm import accounting
from exporter.slurm.accounting import MOST_ENERGY_J, Attempt, gpu_counts, parse_accounting, tres
from exporter.slurm.states import ENDS, is_part_of, parse_duration

_FIRST = ("DerivedExitCode", "MaxRSS", "ConsumedEnergyRaw", "TotalCPU")  # before the fields of an attempt
FORMAT = ",".join((*_FIRST, accounting.FORMAT))
SAME_SUBMISSION_S = 1.0  # within which components of a heterogeneous job have their submit times
_KILLED = ENDS - {"COMPLETED", "FAILED"}


class JobAttempt(NamedTuple):
    """One attempt of a job, or of a component of a heterogeneous job."""

    attempt: Attempt
    derived_exit_code: str
    cpu_s: float | None
    max_rss_bytes: float | None  # None if no step was sampled
    energy_j: float | None

    @property
    def submitted(self) -> float:
        return self.attempt.snapshot.submitted or 0.0


def parse_job_accounting(text: str) -> tuple[JobAttempt, ...]:
    """Parse ``sacct -n -P -D -o FORMAT``: each attempt comes before its steps. Lines that are none are skipped."""
    groups: list[list[list[str]]] = []
    place: dict[str, int] = {}  # of the last attempt of each id
    for line in text.split("\n"):
        parts = line.split("|", len(_FIRST))
        if len(parts) <= len(_FIRST):
            continue
        job_id, _, step = parts[-1].partition("|")[0].partition(".")
        if not step:
            place[job_id] = len(groups)
            groups.append([parts])
        elif job_id in place:
            groups[place[job_id]].append(parts)
    return tuple(attempt for group in groups if (attempt := _parse_group(group)) is not None)


def _parse_group(rows: Sequence[Sequence[str]]) -> JobAttempt | None:
    """The attempt in its row and those of its steps."""
    attempts = parse_accounting("\n".join(row[-1] for row in rows))
    if len(attempts) != 1:
        return None
    derived, _, _, cpu, _ = rows[0]
    peaks = [size for _, peak, *_ in rows[1:] if (size := tres(f"mem={peak}", "mem"))]
    # steps that run at the same time each count the energy of their nodes, so they are not added
    energies = [float(energy) for _, _, energy, *_ in rows if energy.isdecimal()]
    energy = max((energy for energy in energies if 0 < energy < MOST_ENERGY_J), default=None)
    return JobAttempt(attempts[0], derived, _cpu_time(cpu), max(peaks, default=None), energy)


def _cpu_time(text: str) -> float | None:
    """Seconds of ``00:04.492``."""
    whole = parse_duration(text)
    return None if whole is None else whole + float(f"0.{text.partition('.')[2] or 0}")


def own_attempts(
    attempts: Iterable[JobAttempt], job_id: str, user: str, since: float, until: float
) -> tuple[JobAttempt, ...]:
    """Attempts of this job by this user that were submitted in this time, oldest first: ids are used again."""
    own = (
        each
        for each in attempts
        if is_part_of(each.attempt.job_id, job_id) and each.attempt.user == user and since <= each.submitted <= until
    )
    return tuple(sorted(own, key=lambda each: each.submitted))


def last_attempt(attempts: Sequence[JobAttempt]) -> tuple[JobAttempt, ...]:
    """The last attempt, with all components of a heterogeneous job."""
    newest = max((each.submitted for each in attempts), default=0.0)
    return tuple(each for each in attempts if newest - each.submitted <= SAME_SUBMISSION_S)


def has_ended(attempts: Sequence[JobAttempt]) -> bool:
    """Whether accounting knows the end of the last attempt, perhaps not yet those of its steps."""
    last = last_attempt(attempts)
    return bool(last) and all(each.attempt.snapshot.state in ENDS for each in last)


def is_complete(attempts: Sequence[JobAttempt]) -> bool:
    """Whether accounting knows all ends of the last attempt: those of steps come later."""
    last = last_attempt(attempts)
    return bool(last) and all(each.attempt.is_complete for each in last)


def job_accounting(
    attempts: Sequence[JobAttempt], *, has_nodes_alone: bool, gpus: GpuSums | None = None
) -> SlurmAccounting:
    """The figures of a job with at least one attempt. Those of components of a heterogeneous job are added.

    The energy of nodes is of the job only if it has them alone. ``gpus`` are what sidecars saw of the last attempt.
    """
    gpus = gpus or GpuSums()
    last = last_attempt(attempts)
    figures = [each.attempt.figures() for each in last]
    available_s = [each.attempt.elapsed_s * each.attempt.cpus for each in last]
    used_s = _total(
        [
            None if found.cpu_ratio is None else found.cpu_ratio * available
            for found, available in zip(figures, available_s, strict=True)
        ]
    )
    given_s = sum(time.gpu_seconds for time in _gpu_time(last) or ())
    return SlurmAccounting(
        complete=is_complete(attempts),
        state=last[0].attempt.snapshot.state,
        exit_code=last[0].attempt.exit_code or None,
        derived_exit_code=last[0].derived_exit_code or None,
        allocated=" + ".join(each.attempt.resources for each in last if each.attempt.resources) or None,
        attempts=len({each.submitted for each in attempts if each.attempt.job_id == last[0].attempt.job_id}),
        elapsed_s=last[0].attempt.elapsed_s,
        limit_s=figures[0].limit_s,
        cpus=sum(each.attempt.cpus for each in last) or None,
        cpu_s=_total([each.cpu_s for each in last]) if any(available_s) else None,
        cpu_ratio=None if used_s is None else used_s / sum(available_s),
        memory_bytes=_total([found.memory_bytes for found in figures]),
        memory_requested_bytes=_total([found.memory_requested_bytes for found in figures]),
        max_rss_bytes=max((each.max_rss_bytes for each in last if each.max_rss_bytes), default=None),
        lower_bound=any(each.attempt.snapshot.state in _KILLED for each in last),
        gpu_time=_gpu_time(attempts),
        gpu_idle_ratio=gpus.idle_s / gpus.seen_s if gpus.seen_s and gpus.idle_s is not None else None,
        gpu_seen_ratio=min(1.0, gpus.seen_s / given_s) if gpus.seen_s and given_s else None,
        gpu_energy_j=gpus.energy_j,
        slurm_energy_j=_total([each.energy_j for each in last]) if has_nodes_alone else None,
    )


def _total(values: Sequence[float | None]) -> float | None:
    """The sum, or None if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _gpu_time(attempts: Sequence[JobAttempt]) -> tuple[GpuTime, ...] | None:
    """Time x GPUs by type over all attempts; None without any."""
    found: dict[str, float] = {}
    for each in attempts:
        for name, count in gpu_counts(each.attempt.resources).items():
            found[name] = found.get(name, 0.0) + count * each.attempt.elapsed_s
    return tuple(GpuTime(name or None, seconds) for name, seconds in found.items()) or None
