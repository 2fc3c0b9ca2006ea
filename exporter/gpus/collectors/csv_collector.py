"""``gpu_metrics.csv`` in the output directory: one line per GPU of the job and reading."""

import os
import time
import weakref
from collections.abc import Iterable
from functools import partial

from exporter.collecting.collector import IDLE_INTERVAL_S, CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import Published
from exporter.contract.identity import safe_label
from exporter.files.outputs.csv_reader import NAME, CsvFile, csv_file_name
from exporter.gpus.records import GpuActivity, GpuReading, GpuState, JobGpus
from exporter.machine.file_host import WatchHandle, WatchHanging
from exporter.machine.own_process import open_memory_file

HEADER = "time,node,gpu,utilization_percent,memory_used_gb,memory_total_gb,power_watts,temperature_celsius"
GROUP = "output"  # path group whose directory gets the file
LEAST_INTERVAL_S = 1.0
WAIT_S = 5.0  # a write that takes longer fails, although it may still complete
GB = 1 << 30  # GPU vendors call 1 GiB a GB: an 80 GB GPU has 80 of these


class GpuMetricsCollector:
    """Appends the GPU readings of another collector to a CSV file; has no series.

    The file helper writes the file, so a hanging mount blocks neither the GPU collectors nor the end of the sidecar.
    """

    name = NAME
    families: tuple[Family, ...] = ()

    def __init__(self, context: CollectorContext, gpus: Published[JobGpus], job_phase: Published[str]) -> None:
        manifest, identity = context.manifest, context.identity
        self._clock, self._files, self._gpus, self._job_phase = context.clock, context.files, gpus, job_phase
        self._node = safe_label(identity.node)
        self._file: WatchHandle[None] | None = None
        self._lines_fd = -1  # descriptor of the lines of one reading
        self._is_written = True  # whether those were written, so that the buffer is free
        self._last_written: float | None = None  # time of the reading that was written last
        self.interval_s = IDLE_INTERVAL_S
        group = next((group for group in manifest.groups if group.name == GROUP), None)
        if manifest.gpu_metrics and group is not None:
            self.interval_s = max(LEAST_INTERVAL_S, manifest.check_interval_s)
            self._lines_fd = open_memory_file(NAME)
            weakref.finalize(self, os.close, self._lines_fd)
            name, source = csv_file_name(identity.node, identity.node_index), f"/proc/{os.getpid()}/fd/{self._lines_fd}"
            make = partial(CsvFile, os.path.abspath(manifest.directory(group)), name, HEADER, source)
            self._file = self._files.watch(NAME, make)

    def read(self) -> None:
        gpus = self._gpus.value  # an old reading was written before
        reading = gpus.reading
        if (
            self._file is None
            or reading is None
            or reading.time == self._last_written
            or self._job_phase.value == "finished"
        ):
            return
        text = csv_lines(reading, gpus.positions.values(), self._node)
        if not text:
            return
        if not self._is_written:
            self._write(self._file)
        os.ftruncate(self._lines_fd, 0)
        os.pwrite(self._lines_fd, text.encode(), 0)
        self._is_written, self._last_written = False, reading.time
        self._write(self._file)

    def _write(self, file: WatchHandle[None]) -> None:
        """Have the lines written and wait for it. Raises the error of the write."""
        (answer,) = self._files.poll([file], self._clock.time(), WAIT_S)
        self._is_written = not isinstance(answer, WatchHanging)
        if isinstance(answer, Exception):
            raise answer

    def render(self, _snapshot: None, _out: Samples) -> None:
        """Add nothing: the collector has no series."""

    def describe(self, _snapshot: None, _parts: StatusParts) -> None:
        """Add nothing."""


def csv_lines(reading: GpuReading, uuids: Iterable[str], node: str) -> str:
    """Lines for these GPUs, in this order. A GPU that cannot be read has only its total memory."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(reading.time))
    states = {state.gpu.uuid: state for state in reading.gpus}
    return "".join(f"{moment},{node},{_values(states[uuid])}\n" for uuid in uuids if uuid in states)


def _values(state: GpuState) -> str:
    """Fields of one GPU, empty if unknown."""
    # The last activity of a lost GPU is from an earlier time.
    found = state.activity if state.state == "ok" and state.activity is not None else GpuActivity()
    total = state.gpu.memory_total_bytes if found.memory_total_bytes is None else found.memory_total_bytes
    fields = (
        _number(found.busy_ratio, 0, 0.01),
        _number(found.memory_used_bytes, 2, GB),
        _number(total, 2, GB),
        _number(found.power_w, 1),
        _number(found.temperature_c, 0),
    )
    return ",".join((state.gpu.index, *fields))


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"
