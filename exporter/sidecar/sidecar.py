"""The sidecar of one node: collectors, pages, status, and when to end."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.collecting.saved_state import load_saved_state, save_state
from exporter.contract import run_files
from exporter.contract.status import JobStatus, NodeName, NodeStatus, TaskFacts, WorkerStatus
from exporter.sidecar.background_reads import CollectorSlot
from exporter.sidecar.collectors import Register, make_collectors
from exporter.sidecar.job_collector import JobCollector, JobSnapshot
from exporter.timeline.timeline_reader import NodeTimeline
from exporter.web.addresses import ALL_INTERFACES
from exporter.workers.collector import WorkersSnapshot
from exporter.workers.diagnosis_collector import DiagnosticsCollector

PUBLISH_INTERVAL_S = 5.0
RESTART_PAUSE_S = 60.0  # least time between two restarts for a replaced driver; doubles with each restart
RESTARTS_KIND = "gpus_restart"

log = logging.getLogger("gpujob.sidecar")


class DriverRestarts:
    """Permission to restart after the driver was replaced, stored in the run directory.

    The interval grows with each restart: if the driver keeps reporting a replacement, restarts do not help.
    """

    def __init__(self, context: CollectorContext) -> None:
        identity = context.identity
        self._clock = context.clock
        self._state_location = (context.manifest.run_dir, identity.node, identity.job_id, identity.attempt)
        self._was_refused = False

    def acquire(self) -> bool:
        """Whether a restart is allowed now; if so, it is recorded."""
        kept = load_saved_state(*self._state_location, kind=RESTARTS_KIND) or {}
        now, times, last = self._clock.time(), kept.get("times"), kept.get("last")
        if not isinstance(times, int) or not isinstance(last, int | float):
            times, last = 0, 0.0
        pause_s = RESTART_PAUSE_S * 2.0 ** min(times - 1, 30)
        if times and abs(now - last) < pause_s:
            refused: str | None = f"the last restart was less than {pause_s:g} s ago"
        else:  # without a record, the next process would not know of this restart
            refused = save_state(*self._state_location, {"times": times + 1, "last": now}, kind=RESTARTS_KIND)
        if refused is not None and not self._was_refused:
            log.warning("the GPU driver was replaced, and the sidecar continues without GPUs: %s", refused)
        self._was_refused = refused is not None
        return not self._was_refused


class StatusPublisher:
    """Publishes address and status in the run directory, for readers that cannot reach the port.

    It has its own slot and thread, like a collector, since the run directory may hang.
    """

    name = "publish"
    interval_s = PUBLISH_INTERVAL_S
    families: tuple[Family, ...] = ()

    def __init__(self, sidecar: "Sidecar") -> None:
        self._sidecar = sidecar
        self._published: tuple[int, str | None] | None = None  # port and certificate in the run directory
        self._restarts = DriverRestarts(sidecar.context)

    def read(self) -> bool:
        manifest, identity = self._sidecar.context.manifest, self._sidecar.context.identity
        certificate = self._sidecar.certificate()
        if self._sidecar.port is not None and self._published != (self._sidecar.port, certificate):
            self._publish_address(self._sidecar.port, certificate)
            self._published = self._sidecar.port, certificate
        if self._sidecar.has_outlived_driver and not self._sidecar.may_restart:
            self._sidecar.may_restart = self._restarts.acquire()
        folder = manifest.run_dir / run_files.STATUS_DIR
        folder.mkdir(run_files.FOLDER_MODE, exist_ok=True)
        status = self._sidecar.status()
        path = folder / f"{identity.node}.json"
        run_files.write_json_with_reserve(None, path, status.to_json(), spare=path, durable=status.final)
        self._sidecar.timeline.take_up()
        self._sidecar.timeline.write(final=status.final)
        return True

    def _publish_address(self, port: int, certificate: str | None) -> None:
        """Write the address and the labels of the series."""
        context = self._sidecar.context
        identity, run_dir = context.identity, context.manifest.run_dir
        folder = run_dir / run_files.SIDECARS_DIR
        folder.mkdir(run_files.FOLDER_MODE, exist_ok=True)
        host = identity.node if self._sidecar.host in ALL_INTERFACES else self._sidecar.host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._sidecar.timeline.instance = address
        run_files.write_json_with_reserve(
            run_dir,
            folder / f"{identity.node}.json",
            {
                "schema": run_files.RECORD_SCHEMA,
                "node": identity.node,
                "node_index": identity.node_index,
                "attempt": identity.attempt,
                "address": address,
                "port": port,
                "fom": self._sidecar.fom,
                "certificate": certificate,
                "labels": identity.constant_labels(),
                "time": context.clock.time(),
            },
        )

    def render(self, snapshot: bool, out: Samples) -> None:
        """Render nothing: `CollectorSlot.render_self` shows whether publishing works."""

    def describe(self, snapshot: bool, parts: StatusParts) -> None:
        """Add nothing."""


class Sidecar:
    """A sidecar without its web server."""

    def __init__(self, context: CollectorContext, register: Register | None = None) -> None:
        self.context = context
        register = make_collectors(context, self.status) if register is None else register
        self.slots = [CollectorSlot(collector, context.clock) for collector in register.collectors]
        self._gpus = register.gpus
        self.host = ""  # where clients reach it; empty for the node's name
        self.port: int | None = None  # port it listens on; None before it does
        self.fom: str | None = None  # URL for figures of merit on this node
        self.certificate: Callable[[], str | None] = lambda: None  # fingerprint of its certificate; None without TLS
        self.diagnostics = CollectorSlot(DiagnosticsCollector(context, self.status), context.clock, deadline_s=60.0)
        self.publisher = CollectorSlot(StatusPublisher(self), context.clock)
        self.timeline = NodeTimeline(context)
        self._runs: object = None  # phase, starts and ends of workers at the last point of the timeline
        self.final = False  # whether the final values have been read
        self.may_restart = False  # whether it may exit for a new sidecar that can read the GPUs
        self._tasks = {
            task.rank: TaskFacts(
                worker=task.worker, role=task.role, rank=task.rank, node=context.identity.node, gpus=task.gpus
            )
            for task in context.tasks
        }
        self._samples = Samples(context.identity.constant_labels(), context.manifest.detail)

    def start(self) -> None:
        """Start the background reads."""
        for slot in (*self.slots, self.diagnostics, self.publisher):
            slot.start()

    @property
    def ready(self) -> bool:
        """Whether every collector has read at least once."""
        return all(slot.ready for slot in self.slots)

    @property
    def job(self) -> JobSnapshot:
        """The job as of the last read."""
        for slot in self.slots:
            if isinstance(slot.collector, JobCollector) and isinstance(slot.snapshot, JobSnapshot):
                return slot.snapshot
        return JobSnapshot("launching", None)

    @property
    def has_outlived_driver(self) -> bool:
        """Whether a new sidecar could read the GPUs, this one cannot, and a supervisor would start one."""
        reading = self._gpus.value.reading
        return self.context.identity.supervised and reading is not None and reading.is_driver_replaced

    @property
    def phase(self) -> str:
        """Phase of the job as of the last read."""
        return self.job.phase

    @property
    def workers_ended(self) -> bool:
        """Whether no worker of the job was running at the last read."""
        return self.job.workers_ended or self.phase == "finished"

    @property
    def running_workers(self) -> int:
        """Workers of this node whose latest run had not ended at the last read."""
        snapshots = (slot.snapshot for slot in self.slots)
        return sum(snapshot.running for snapshot in snapshots if isinstance(snapshot, WorkersSnapshot))

    @property
    def ended_reads(self) -> int:
        """Reads that have ended. The page changes only with them, apart from what is overdue."""
        return sum(slot.ended_reads for slot in (*self.slots, self.publisher))

    def page(self, *, openmetrics: bool = False) -> str:
        """Metrics page of the last snapshots."""
        self._render()
        return self._samples.page(openmetrics=openmetrics)

    def _render(self) -> None:
        for slot in self.slots:
            slot.render(self._samples)
        for slot in (*self.slots, self.publisher):
            slot.render_self(self._samples)

    def _take_samples(self) -> Mapping[Family, Sequence[str]]:
        self._render()
        return self._samples.take()

    def keep_timeline(self, wait_s: float = 0.0) -> None:
        """Add a point to the timeline if its step is over, a worker has started or ended, or the job has.

        While the timeline is being packed, wait up to ``wait_s``; the next call tries again.
        """
        snapshots = [slot.snapshot for slot in self.slots]
        workers = [facts for each in snapshots if isinstance(each, WorkersSnapshot) for facts in each.workers]
        runs = (self.phase, self.final, [(facts.up, facts.restart, facts.exits) for facts in workers])
        is_moment = runs != self._runs
        is_needed = is_moment or self.timeline.is_due()
        if is_needed and self.timeline.record(self._take_samples, is_moment=is_moment, wait_s=wait_s):
            self._runs = runs

    def status(self) -> NodeStatus:
        """Status of the last snapshots."""
        parts, identity = StatusParts(), self.context.identity
        for slot in self.slots:
            slot.describe(parts)
        return NodeStatus(
            time=time.time(),
            final=self.final,
            attempt=identity.attempt,
            job=JobStatus.join(parts.job, parts.outlook, exporter=parts.exporter, readiness=parts.readiness),
            node=NodeName(name=identity.node, index=identity.node_index),
            workers=tuple(
                WorkerStatus.join(self._tasks[rank], *worker) for rank, worker in sorted(parts.workers.items())
            ),
            outputs=parts.outputs,
            checkpoints=parts.checkpoints,
            filesystems=parts.filesystems,
            memory=parts.memory,
            gpus=parts.gpus,
            launch=parts.launch,
            figures_of_merit=parts.figures_of_merit,
            events=tuple(sorted(parts.events, key=lambda event: event.time)),
            collectors={slot.collector.name: slot.reads for slot in (*self.slots, self.diagnostics, self.publisher)},
        )
