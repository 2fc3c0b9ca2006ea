"""What Slurm's accounting knows of an ended job: ``accounting.json`` in the run directory."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from exporter.contract.records import Record


class GpuTime(NamedTuple):
    """How long the job had GPUs of one type."""

    gpu_type: str | None  # None if Slurm does not report it
    gpu_seconds: float  # time x GPUs, over all attempts


class SlurmAccounting(Record):
    """Figures of a job by Slurm's accounting. They are those of its last attempt, unless a comment says otherwise.

    None is not measured.
    """

    SCHEMA: ClassVar[int | None] = 1

    attempt: int = 0  # of the report, from 0
    complete: bool = False  # whether accounting had the ends of the job and of all its steps
    problem: str | None = None  # why nothing is known
    state: str | None = None
    exit_code: str | None = None  # status:signal
    derived_exit_code: str | None = None  # the highest of all steps
    allocated: str | None = None  # AllocTRES, such as `cpu=4,gres/gpu=4,mem=600M,node=2`
    attempts: int | None = None  # in Slurm's accounting
    elapsed_s: float | None = None
    limit_s: float | None = None
    cpus: int | None = None
    cpu_s: float | None = None  # TotalCPU
    cpu_ratio: float | None = None  # CPU time of all steps / (elapsed time x CPUs), as seff
    memory_bytes: float | None = None  # of the largest step, as seff
    memory_requested_bytes: float | None = None
    max_rss_bytes: float | None = None  # MaxRSS: of the largest task
    lower_bound: bool = False  # whether CPU time is a lower bound: that of killed children is not counted
    gpu_time: tuple[GpuTime, ...] | None = None  # over all attempts
    gpu_idle_ratio: float | None = None  # of the GPU time that sidecars saw: with a utilization under 1 %
    gpu_seen_ratio: float | None = None  # of the GPU time
    gpu_energy_j: float | None = None  # by the counters of the boards
    slurm_energy_j: float | None = None  # of whole nodes, by Slurm; only of a job that had its nodes alone
