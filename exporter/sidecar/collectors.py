"""The list of collectors, in the order of the page."""

from collections.abc import Callable

from exporter.collecting.collector import Collector, CollectorContext
from exporter.files.checkpoints.collector import CheckpointsCollector
from exporter.files.disks.collector import DiskCollector
from exporter.files.outputs.collector import OutputsCollector
from exporter.gpus.collectors.csv_collector import GpuMetricsCollector
from exporter.gpus.collectors.gpus_collector import GpusCollector
from exporter.gpus.collectors.workers_collector import GpuWorkersCollector
from exporter.launch.readiness_collector import ReadinessCollector
from exporter.progress.collector import LogsCollector
from exporter.sidecar.figures_collector import FomCollector
from exporter.sidecar.job_collector import JobCollector
from exporter.sidecar.self_collector import SelfCollector
from exporter.workers.collector import WorkersCollector
from exporter.workers.memory_collector import MemoryCollector

COLLECTORS: tuple[Callable[[CollectorContext], Collector], ...] = (
    JobCollector,
    ReadinessCollector,
    WorkersCollector,
    MemoryCollector,
    GpusCollector,
    GpuWorkersCollector,
    LogsCollector,
    FomCollector,
    OutputsCollector,
    CheckpointsCollector,
    DiskCollector,
    GpuMetricsCollector,
    SelfCollector,
)
