"""The collectors, in the order of the page. To add one: its file, and its line in ``COLLECTORS``."""

from collections.abc import Callable
from typing import Any

from exporter.collectors.base import Collector, Context
from exporter.collectors.checkpoints import CheckpointsCollector
from exporter.collectors.disk import DiskCollector
from exporter.collectors.fom import FomCollector
from exporter.collectors.gpu_metrics import GpuMetricsCollector
from exporter.collectors.gpu_workers import GpuWorkersCollector
from exporter.collectors.gpus import GpusCollector
from exporter.collectors.job import JobCollector
from exporter.collectors.logs import LogsCollector
from exporter.collectors.memory import MemoryCollector
from exporter.collectors.outputs import OutputsCollector
from exporter.collectors.readiness import ReadinessCollector
from exporter.collectors.self import SelfCollector
from exporter.collectors.workers import WorkersCollector

COLLECTORS: tuple[Callable[[Context], Collector[Any]], ...] = (
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
