"""Fake GPUs whose values a test sets, and a node with collectors that read them."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.published import JobProgress, NodeGpuUse, WorkerProcesses, WorkerProgress
from exporter.contract.manifest import Task
from exporter.contract.status import NodeGpus
from exporter.gpus.collectors.gpus_collector import GpusCollector, GpusSnapshot
from exporter.gpus.collectors.workers_collector import GpuWorkersCollector
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.records import (
    DriverState,
    Gpu,
    GpuActivity,
    GpuCondition,
    GpuDriver,
    GpuEvent,
    GpuProcess,
    GpuReading,
    GpuState,
    JobGpus,
)
from exporter.machine.kernel_log import KernelEvent, KernelLog, KernelXid
from exporter.workers.exit_facts_reader import NodeFacts
from tests.support.exporter import FakeClock, make_identity, make_manifest, make_task, page_of, publisher

GIB = 1 << 30
NVIDIA = GpuDriver("nvidia", "570.86.15", "12.8")
AMD = GpuDriver("amd", "6.12.12", "6.3")
DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def uuid(number: int) -> str:
    """UUID of the GPU with this number."""
    return f"GPU-{number}a0b1c2d-1111-2222-3333-44445555666{number}"


def gpu(number: int, **changes: Any) -> GpuState:
    """A GPU with some values of each part."""
    identity = Gpu(
        uuid(number),
        str(number),
        "nvidia",
        name="NVIDIA H200",
        pci_bus_id=f"0000:{0x18 + number:02x}:00.0",
        persistence=True,
        memory_total_bytes=141 * GIB,
    )
    activity = GpuActivity(
        utilization_ratio=0.5,
        memory_used_bytes=70 * GIB,
        memory_total_bytes=141 * GIB,
        power_average_w=400.0,
        power_limit_w=700.0,
        energy_j=1e6,
        temperature_c=55.0,
    )
    parts: dict[str, Any] = {"activity": activity, "processes": (), "condition": GpuCondition()}
    return GpuState(identity, **{**parts, **changes})


def instance(of: int, number: int, **changes: Any) -> GpuState:
    """A MIG instance of a GPU."""
    identity = Gpu(
        f"MIG-{of}{number}a0b1c2-1111-2222-3333-444455556666",
        f"{of}:{number}",
        "nvidia",
        name="NVIDIA H200 MIG 3g.71gb",
        pci_bus_id=f"0000:{0x18 + of:02x}:00.0",
        parent=uuid(of),
        memory_total_bytes=70 * GIB,
        gpu_instance=number,
    )
    return GpuState(identity, **{"activity": GpuActivity(utilization_ratio=0.25), "processes": (), **changes})


def mig_gpu(number: int, **changes: Any) -> GpuState:
    """A GPU with MIG on."""
    state = gpu(number, **changes)
    return dataclasses.replace(state, gpu=dataclasses.replace(state.gpu, mig=True))


def changed(state: GpuState, /, **changes: Any) -> GpuState:
    """The state with other values, each of the state, activity or condition."""
    for name, value in changes.items():
        if hasattr(GpuState, name):
            state = dataclasses.replace(state, **{name: value})
        elif hasattr(GpuActivity, name):
            activity = dataclasses.replace(state.activity or GpuActivity(), **{name: value})
            state = dataclasses.replace(state, activity=activity)
        else:
            condition = dataclasses.replace(state.condition or GpuCondition(), **{name: value})
            state = dataclasses.replace(state, condition=condition)
    return state


class FakeGpus:
    """Replaces a ``GpuHost``."""

    def __init__(self, clock: FakeClock, gpus: Iterable[GpuState]) -> None:
        self._clock = clock
        self.gpus = list(gpus)
        self.state: DriverState = "ok"
        self.message: str | None = None
        self.driver: GpuDriver | None = NVIDIA
        self.reported_events: list[GpuEvent] = []
        self.poll_count = 0
        self.ready = self.reports_events = True

    def poll(self, _wait_s: float) -> GpuReading:
        self.poll_count += 1
        return GpuReading(
            self._clock.time(),
            self.state,
            self.message,
            self.driver,
            tuple(
                dataclasses.replace(state, processes_time=self._clock.time(), condition_time=self._clock.time())
                for state in self.gpus
            ),
            tuple(self.reported_events),
            {"nvmlDeviceGetFanSpeed": "Not Supported"},
            is_ready=self.ready,
            reports_events=self.reports_events,
        )

    def events(self) -> tuple[GpuEvent, ...]:
        return tuple(self.reported_events)


class Node:
    """One node of a job, with its GPU collectors."""

    def __init__(
        self,
        run_dir: Path,
        *gpus: GpuState,
        plan: tuple[tuple[int, ...], ...] = ((0,),),
        first_gpu: int | None = None,
        attempt: int = 0,
        proc: str = "/proc",
        host: GpuHost | None = None,
        clock: FakeClock | None = None,
        **manifest: Any,
    ) -> None:
        """``plan``: GPU positions of each worker. ``host``: the GPU host to poll instead of the fake."""
        tasks = tuple(dataclasses.replace(make_task(rank), gpus=positions) for rank, positions in enumerate(plan))
        self.clock = FakeClock() if clock is None else clock
        self.host = FakeGpus(self.clock, gpus)
        self.kernel = KernelLog(self.clock, None, path="/nowhere")
        self.context = CollectorContext(
            make_manifest(run_dir, *tasks, **manifest),
            make_identity(first_gpu=first_gpu, attempt=attempt),
            self.clock,
            proc,
            kernel=self.kernel,
            gpus=cast(GpuHost, self.host) if host is None else host,
        )
        self.phase = publisher("running", self.clock)
        self.job_gpus, self.gpu_use = publisher(JobGpus(), self.clock), publisher(NodeGpuUse(), self.clock)
        self.processes = publisher(WorkerProcesses(), self.clock)
        self.progress = publisher(JobProgress(), self.clock)
        self.gpus = GpusCollector(self.context, self.job_gpus, self.phase)
        self.workers = GpuWorkersCollector(
            self.context, self.gpu_use, self.job_gpus, self.processes, self.progress, self.phase
        )
        self.node_facts = NodeFacts(self.context, self.processes, self.job_gpus, self.gpu_use)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.context.tasks

    def change(self, number: int, **changes: Any) -> None:
        """Change values of the GPU at this position of the reading: of its state, activity or condition."""
        self.host.gpus[number] = changed(self.host.gpus[number], **changes)

    def use(self, number: int, *pids: int | GpuProcess) -> None:
        """Put processes on a GPU."""
        self.change(number, processes=tuple(p if isinstance(p, GpuProcess) else GpuProcess(p, GIB, 0.5) for p in pids))

    def run(self, rank: int, *pids: int, since: float = 3600.0) -> None:
        """Give a worker these processes. The first is its own."""
        starts = {**self.processes.value.starts, rank: self.clock.time() - since}
        self.processes.publish(WorkerProcesses(pids={**self.pids, rank: frozenset(pids)}, starts=starts))

    @property
    def pids(self) -> Mapping[int, frozenset[int]]:
        """Processes of the workers as last published."""
        return self.processes.value.pids

    def run_only(self, pids: Mapping[int, frozenset[int]]) -> None:
        """Let the workers have these processes alone; start times stay."""
        self.processes.publish(dataclasses.replace(self.processes.value, pids=pids))

    def report(self, rank: int, progress: WorkerProgress) -> None:
        """Let the log of a worker show this progress, and of no other any."""
        self.progress.publish(JobProgress(workers={rank: progress}))

    def xid(self, number: int, code: int, gpu_instance: int | None = None) -> None:
        """Let the driver report an Xid of the GPU at this position of the reading."""
        event = GpuEvent(self.host.gpus[number].gpu.uuid, code, self.clock.time(), gpu_instance=gpu_instance)
        self.host.reported_events.append(event)

    def log_xid(self, pci: str, code: int, pid: int | None = None, gpu_instance: int | None = None) -> None:
        """Add an Xid to the kernel log."""
        event = KernelEvent(self.clock.time(), KernelXid(pci, code, pid, gpu_instance))
        self.kernel.events = (*self.kernel.events, event)

    def read_gpus(self, seconds: float = 0.0) -> GpusSnapshot:
        """Snapshot of the GPU collector after this time."""
        self.clock.advance(seconds)
        return self.gpus.read()

    def page(self, seconds: float = 0.0) -> str:
        """Metrics of both collectors. The logs are read as well."""
        self.progress.publish(self.progress.value)
        return page_of(self.gpus, self.read_gpus(seconds)) + page_of(self.workers, self.workers.read())

    def status(self, seconds: float = 0.0) -> StatusParts:
        """The status of both collectors."""
        status = StatusParts()
        self.gpus.describe(self.read_gpus(seconds), status)
        self.workers.describe(self.workers.read(), status)
        return status

    def events(self, seconds: float = 0.0) -> list[tuple[str, str, str]]:
        """Level, kind and detail of all events so far."""
        return [(event.level, event.event, event.detail) for event in self.status(seconds).events]

    def node_gpus(self, seconds: float = 0.0) -> NodeGpus:
        """GPUs of the status."""
        found = self.status(seconds).gpus
        assert found is not None
        return found
