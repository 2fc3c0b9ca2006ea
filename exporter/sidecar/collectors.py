"""The collectors in the order of the page, and the values that they publish for one another."""

from collections.abc import Callable
from typing import NamedTuple

from exporter.collecting.collector import Collector, CollectorContext
from exporter.collecting.published import JobProgress, NodeGpuUse, Published, Publisher, WorkerProcesses
from exporter.contract.status import NodeStatus
from exporter.files.checkpoints.collector import CheckpointsCollector
from exporter.files.disks.collector import DiskCollector
from exporter.files.outputs.collector import OutputsCollector
from exporter.gpus.collectors.csv_collector import GpuMetricsCollector
from exporter.gpus.collectors.gpus_collector import GpusCollector
from exporter.gpus.collectors.workers_collector import GpuWorkersCollector
from exporter.gpus.records import JobGpus
from exporter.launch.collector import LaunchCollector
from exporter.launch.readiness_collector import ReadinessCollector
from exporter.progress.collector import LogsCollector
from exporter.sidecar.events_collector import WorkerEventsCollector
from exporter.sidecar.figures_collector import FomCollector
from exporter.sidecar.job_collector import JobCollector
from exporter.sidecar.self_collector import SelfCollector
from exporter.workers.collector import WorkersCollector
from exporter.workers.memory_collector import MemoryCollector


class Register(NamedTuple):
    """The collectors of one sidecar, and what they publish for the sidecar itself."""

    collectors: tuple[Collector, ...]
    gpus: Published[JobGpus]


def make_collectors(context: CollectorContext, status: Callable[[], NodeStatus]) -> Register:
    """Make every collector. ``status`` returns the status of the node.

    Each published value goes to its one writer as the argument after the context, and to its readers.
    """
    clock = context.clock
    phase = Publisher("launching", clock)  # of the job, as its page shows it
    processes = Publisher(WorkerProcesses(), clock)
    gpus = Publisher(JobGpus(), clock)
    gpu_use = Publisher(NodeGpuUse(), clock)
    progress = Publisher(JobProgress(), clock, interval_s=context.manifest.check_interval_s)
    checkpoints = Publisher[tuple[float, ...]]((), clock)  # times of the last checkpoint files, in order
    collectors = (
        JobCollector(context, phase, progress),
        ReadinessCollector(context),
        WorkersCollector(context, processes, gpus, gpu_use),
        MemoryCollector(context),
        GpusCollector(context, gpus, phase),
        GpuWorkersCollector(context, gpu_use, gpus, processes, progress, phase),
        LogsCollector(context, progress, gpu_use, checkpoints),
        FomCollector(context),
        OutputsCollector(context, processes),
        CheckpointsCollector(context, checkpoints),
        DiskCollector(context),
        GpuMetricsCollector(context, gpus, phase),
        SelfCollector(context),
        LaunchCollector(context, status),  # these last, since they use the facts of the others
        WorkerEventsCollector(context, status),
    )
    return Register(collectors, gpus)
