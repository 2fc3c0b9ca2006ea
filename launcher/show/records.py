"""What `gpujob plan --json` prints."""

from collections.abc import Mapping
from typing import NamedTuple

from exporter.contract.records import JsonValue, Record
from launcher.plan.plan import PLAN_SCHEMA


class PlannedWorker(Record):
    """One worker."""

    worker: str  # ``decode_w0``
    role: str
    index: int  # within its role
    nodes: tuple[str, ...]  # names of its nodes, in order
    gpus: Mapping[str, tuple[int, ...]]  # its GPUs on each node


class PlannedProcess(NamedTuple):
    """One process of a worker, a service or the benchmark; a named tuple, because there may be thousands."""

    worker: str  # worker or service that it belongs to
    role: str
    worker_index: int  # of its worker within the role
    rank: int  # within the job, workers first
    local_rank: int  # within its worker
    leader: bool  # first process of its worker
    node: str
    node_index: int
    gpus: tuple[int, ...]  # those that the plan gives it
    cuda_visible_devices: str | None  # null: Slurm's value is kept, or the job uses no GPUs
    ports: Mapping[str, int]  # by name; the run adds the same number to all if one is taken
    command: tuple[str, ...]
    environment: tuple[str, ...]  # names of the variables that it gets in addition to the user's own
    stage: str  # infra, workers, frontends, balancer or benchmark
    service: bool  # serves until the job ends
    critical: bool  # its failure ends the job


class PlannedTarget(NamedTuple):
    """One group of targets, as Prometheus reads it from a file."""

    targets: tuple[str, ...]  # ``host:port``; ``{port}`` is chosen on the node
    labels: Mapping[str, str]


class ValueSource(NamedTuple):
    """A value of a plan, and the place that set it."""

    key: str  # of the job file
    value: JsonValue
    source: str  # file and key, environment variable, or default


class PlanRecord(Record):
    """The plan of a job, without values of variables. ``{job_id}`` in a text is known only after the submission."""

    SCHEMA = PLAN_SCHEMA

    job_name: str
    sbatch_nodes: int  # nodes that the job asks for
    gpus_per_node: int
    cpus_per_node: int
    workers: tuple[PlannedWorker, ...]
    processes: tuple[PlannedProcess, ...]  # by rank
    run_dir: str
    files: tuple[str, ...]  # in the run directory before the job starts
    targets: tuple[PlannedTarget, ...]  # one sidecar per node; empty without monitoring
    script: str | None  # batch script; null with --local
    srun: tuple[tuple[str, ...], ...]  # words of each srun command, in order; empty with --local


class ExplainedPlanRecord(PlanRecord):
    """The plan with --explain."""

    explain: tuple[ValueSource, ...]


def explained(plan: PlanRecord, rows: tuple[ValueSource, ...]) -> ExplainedPlanRecord:
    """Add the sources of its values to a plan."""
    return ExplainedPlanRecord(**{name: getattr(plan, name) for name in plan.FIELDS}, explain=rows)


class PlannedPointRecord(Record):
    """One point of a sweep."""

    index: int
    name: str
    values: Mapping[str, JsonValue]  # by key of the sweep
    nodes: int
    hosts: tuple[str, ...]  # from --nodes; empty without
    gpus_per_node: int
    gpus: int  # of the whole point
    time_limit: str | None  # as Slurm writes it
    run_dir: str
    array: int | None  # index in ``arrays``; null with --local


class ExplainedPointRecord(PlannedPointRecord):
    """One point of a sweep with --explain."""

    explain: tuple[ValueSource, ...]


class PlannedArray(NamedTuple):
    """One array job: points with the same Slurm options."""

    tasks: str  # for sbatch's --array: ``0-5%2``
    points: tuple[int, ...]  # indexes
    script: str  # batch script


class SweepPlanRecord(Record):
    """The plan of a sweep."""

    SCHEMA = PLAN_SCHEMA

    sweep: str  # name
    max_parallel: int | None  # points that run at once; null: as many as resources allow
    sweep_dir: str  # with ``{array_job_id}``
    points: tuple[PlannedPointRecord | ExplainedPointRecord, ...]
    arrays: tuple[PlannedArray, ...]  # empty with --local
