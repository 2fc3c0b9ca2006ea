"""The manifest of a job that others started, from settings and from what was found."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exporter.contract.manifest import (
    Manifest,
    PathGroup,
    Task,
    Verification,
    WorkerSearchPlan,
)
from exporter.contract.records import Record
from launcher.jobfile.alerts.thresholds import alert_thresholds
from launcher.jobfile.monitor_config import MonitorConfig
from launcher.jobfile.monitoring import error_patterns, progress_patterns
from launcher.rundir.rundir import user_name

ROLE = "worker"


def shares(count: int, parts: int) -> list[int]:
    """Sizes of ``parts`` even parts of ``count`` things, the larger ones first."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def gpus_of_workers(gpu_ids: Sequence[int], workers: int) -> tuple[tuple[int, ...], ...]:
    """GPUs of each worker: divided evenly, or shared if there are fewer GPUs than workers."""
    count = len(gpu_ids)
    least = 1 if count < workers else 0
    bounds = [(index * count // workers, (index + 1) * count // workers) for index in range(workers)]
    return tuple(tuple(gpu_ids[first : max(end, first + least)]) for first, end in bounds)


def make_tasks(config: MonitorConfig, nodes: int) -> tuple[Task, ...]:
    """One task per worker, divided evenly over the nodes in their order. Each node has the GPUs of the settings."""
    tasks: list[Task] = []
    for node_index, workers in enumerate(shares(config.job.num_workers, nodes)):
        for local_rank, gpus in enumerate(gpus_of_workers(config.job.gpu_ids, workers)):
            rank = len(tasks)
            tasks.append(Task(f"{ROLE}_w{rank}", ROLE, rank, rank, local_rank, node_index, gpus))
    return tuple(tasks)


def absolute(path: str) -> str:
    """The path from the working directory, with ``~`` expanded."""
    return os.path.abspath(os.path.expanduser(path))


def make_manifest(
    config: MonitorConfig, search: WorkerSearchPlan, run_dir: Path, nodes: int, page: Mapping[str, Any]
) -> Manifest:
    """The manifest of the job, as a launcher would write it. The job itself tells its user and its cluster."""
    elsewhere = "" if search.slurm_job_id is not None else "local"
    paths, patterns, monitoring = config.paths, config.patterns, config.monitoring
    output = absolute(paths.output_dir)
    checkpoint = absolute(paths.checkpoint_dir) if paths.checkpoint_dir is not None else output
    return Manifest(
        job_name=config.job.name,
        user=user_name(),
        cluster=elsewhere,
        partition=elsewhere,
        nodes=nodes,
        tasks=make_tasks(config, nodes),
        groups=(
            PathGroup("output", output, patterns.output),
            PathGroup("checkpoint", checkpoint, patterns.checkpoints),
        ),
        logs=PathGroup("logs", absolute(paths.log_dir), patterns.logs),
        progress=progress_patterns(config.progress_patterns),
        errors=error_patterns(config.error_patterns),
        total_items=config.job.total_items or None,
        verify=Verification(**config.verify.model_dump()),
        check_interval_s=monitoring.check_interval,
        launch_timeout_s=monitoring.launch_timeout,
        stall_timeout_s=monitoring.stall_timeout,
        gpu_metrics=monitoring.gpu_metrics,
        detail=monitoring.detail,
        alert_thresholds=alert_thresholds(monitoring.alerts),
        **page,
        attached=True,
        search=search,
        run_dir=run_dir,
    )


class FoundJob(Record):
    """What `gpujob attach` has found of the job."""

    pids: tuple[int, ...] = ()  # workers in their order; empty to search for them
    logs: tuple[tuple[str, ...], ...] = ()  # log files of each worker; empty to search for files of a pattern
    gpus: tuple[tuple[int, ...], ...] = ()  # GPUs that each worker sees; empty if the settings name them
    has_output_dir: bool = True  # whether the output directory is one, so that its files are watched


NOTHING_FOUND = FoundJob()


def with_found(manifest: Manifest, found: FoundJob) -> Manifest:
    """The manifest with what was found instead of what a pattern finds."""
    if found.logs:
        logs = (*found.logs, *[()] * len(manifest.tasks))
        tasks = tuple(dataclasses.replace(task, logs=logs[task.rank]) for task in manifest.tasks)
        manifest = dataclasses.replace(manifest, tasks=tasks, logs=None)
    if found.gpus:
        own = dict(enumerate(_own_gpus(found.gpus)))  # a worker that was not found keeps its part of all
        tasks = tuple(dataclasses.replace(task, gpus=own.get(task.rank, task.gpus)) for task in manifest.tasks)
        manifest = dataclasses.replace(manifest, tasks=tasks)
    if not found.has_output_dir:
        groups = tuple(dataclasses.replace(group, pattern=None) for group in manifest.groups)
        manifest = dataclasses.replace(manifest, groups=groups)
    return manifest


def _own_gpus(seen: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """GPUs of each worker: those that it sees, divided among the workers that see the same ones."""
    parts = {gpus: iter(gpus_of_workers(gpus, seen.count(gpus))) for gpus in seen}
    return [next(parts[gpus]) for gpus in seen]
