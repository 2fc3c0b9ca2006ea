"""The job's GPUs on this node: activity, condition, health and driver errors."""

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import Published, Publisher
from exporter.contract import status
from exporter.contract.events import Event
from exporter.contract.identity import Identity
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest
from exporter.gpus.analysis.node_health import HEALTHS, HealthReason, HealthResult, NodeHealthTracker
from exporter.gpus.analysis.users import listed_gpu_positions, parse_visible_devices
from exporter.gpus.analysis.xid import KNOWN_XIDS, xid_class, xid_meaning
from exporter.gpus.collectors import page
from exporter.gpus.collectors.faults_reader import GpuFaultCounts
from exporter.gpus.collectors.totals_reader import GpuTotals
from exporter.gpus.records import (
    DriverState,
    Gpu,
    GpuDriver,
    GpuEntry,
    GpuEvent,
    GpuReading,
    GpuState,
    JobGpus,
)

DRIVER_STATE = Family(
    "gpu_driver_state",
    "Whether GPUs can be read on this node: ok, no_library, no_driver, no_permission, version_mismatch, failing or "
    "hanging; 1 for the present state.",
    labels=("state",),
)
VISIBLE = Family("gpus_visible", "GPUs of the job, or MIG instances, that the driver shows on this node.")
HEALTH = Family(
    "gpu_health",
    "Health of the job's GPUs on this node, 1 for the present one; `/status` has the reasons.",
    labels=("health",),
)
XIDS = Family(
    "gpu_xid_errors_total",
    "Errors of the job's GPUs on this node that the NVIDIA driver has reported since the job started, by code.",
    labels=("xid",),
    kind="counter",
)

LEAST_INTERVAL_S, MOST_INTERVAL_S = 1.0, 5.0
NOTHING_TO_READ_S = 60.0  # interval for a job without GPUs
WAIT_S = 1.5  # longest wait for a reading before earlier values are shown
# Health is calculated again after this time even without changes: rates fall, and old errors expire.
HEALTH_INTERVAL_S = 15.0
MOST_EVENTS = 50
# Variables that list the job's GPUs, by vendor.
DEVICE_LISTS = {"nvidia": ("CUDA_VISIBLE_DEVICES",), "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
EVENT_LEVELS = {"hardware": "critical", "reset": "critical", "application": "warning"}


@dataclass(frozen=True)
class GpusSnapshot:
    """The job's GPUs at one reading; the state is None for a job without GPUs."""

    state: DriverState | None = None
    message: str | None = None
    driver: GpuDriver | None = None
    allocated: int = 0
    visible: int = 0
    missing: tuple[int, ...] = ()  # planned positions without a GPU
    lost_since: Mapping[str, float] = field(default_factory=dict)  # by UUID
    gpus: tuple[GpuEntry, ...] = ()
    health: str | None = None
    reasons: tuple[HealthReason, ...] = ()
    xids: Mapping[int, int] | None = None  # total of all GPUs, by code
    unsupported_calls: Mapping[str, str] | None = None
    events: tuple[Event, ...] = ()


class NodeGpuResult(NamedTuple):
    """Result of the health calculation, reused while its inputs are unchanged."""

    inputs: tuple[object, ...]  # inputs of the calculation
    time: float
    health: HealthResult
    xids: Mapping[int, int]  # total of all GPUs, by code


class GpusCollector:
    """Reads the GPUs of the job on this node, and no others."""

    name = "gpus"
    families = (DRIVER_STATE, VISIBLE, HEALTH, XIDS, *page.FAMILIES)

    def __init__(self, context: CollectorContext, published: Publisher[JobGpus], job_phase: Published[str]) -> None:
        self._context, self._published, self._job_phase = context, published, job_phase
        self._positions = {position for task in context.tasks for position in task.gpus}
        self._faults = GpuFaultCounts(context)
        self._health = NodeHealthTracker()
        self._last_result: NodeGpuResult | None = None
        self._totals = GpuTotals(context)
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._states: dict[str, str] = {}
        self._reported_health = "healthy"
        self._reported_driver: DriverState = "ok"
        self._reported_missing: tuple[int, ...] = ()

    @property
    def interval_s(self) -> float:
        if not self._has_gpus:
            return NOTHING_TO_READ_S
        return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, self._context.manifest.check_interval_s))

    @property
    def _has_gpus(self) -> bool:
        """Whether the job has GPUs on this node; GPUs of other jobs are not shown."""
        if self._context.gpus is None:
            return False
        if self._positions:
            return True
        given = None if self._context.manifest.attached else devices_given_to_job(os.environ)
        return given is not None and bool(parse_visible_devices(given))

    def read(self) -> GpusSnapshot:
        host, now = self._context.gpus, self._context.clock.time()
        if host is None or not self._has_gpus:
            return GpusSnapshot()
        reading = host.poll(WAIT_S)
        if not reading.is_ready and reading.state == "ok":
            return GpusSnapshot()  # the driver has not listed its GPUs yet
        own = job_gpus(reading, self._context.manifest, self._context.identity, self._positions, os.environ)
        shown = _with_parents(own.values(), reading)
        risen = self._faults.update(reading, [state.gpu for state in shown])
        lost = self._lost_gpus(now, shown)
        positions = {position: gpu.uuid for position, gpu in own.items()}
        self._published.publish(JobGpus(reading, positions, lost))
        is_over = self._job_phase.value == "finished"
        entries = tuple(self._entry(reading.time, state, is_job_over=is_over) for state in shown)
        self._totals.save()
        result = self._evaluate_health(now, reading, entries)
        health = result.health
        missing = tuple(sorted(self._positions - own.keys())) if reading.state == "ok" else ()
        if missing and missing != self._reported_missing:
            text = f"GPU {', '.join(map(str, missing))} of the plan is missing: the driver shows {len(own)}"
            self._add_event(now, "critical", "GPU missing", text)
        self._reported_missing = missing
        self._log_events(now, reading, entries, risen, health.health, health.reasons)
        return GpusSnapshot(
            state=reading.state,
            message=reading.message,
            driver=reading.driver,
            allocated=len(self._positions),
            visible=len(own),
            missing=missing,
            lost_since={uuid: since for uuid, (since, _) in lost.items()},
            gpus=entries,
            health=health.health,
            reasons=health.reasons,
            xids=result.xids,
            unsupported_calls=reading.unsupported_calls,
            events=tuple(self._events),
        )

    def _can_detect_xids(self, reading: GpuReading) -> bool:
        """Whether Xids can be detected. If not, a count of 0 would be a guess."""
        kernel = self._context.kernel
        if reading.driver is None or reading.driver.vendor != "nvidia":
            return False
        return reading.reports_events or (kernel is not None and kernel.unavailable_reason is None)

    def _evaluate_health(self, now: float, reading: GpuReading, entries: Sequence[GpuEntry]) -> NodeGpuResult:
        """Health and error counts; the previous result if nothing changed."""
        detects_xids = self._can_detect_xids(reading)
        states = [entry.state for entry in entries]
        parts = [(s.gpu.uuid, s.gpu.index, s.state, s.message, s.condition_time, s.condition) for s in states]
        known = (reading.state, reading.message, detects_xids, self._faults.changes, *parts)
        last = self._last_result
        if last is not None and known == last.inputs and 0 <= now - last.time < HEALTH_INTERVAL_S:
            return last
        judgement = self._health.update(now, reading.state, entries, reading.message)
        sums = dict.fromkeys(KNOWN_XIDS if detects_xids else (), 0)
        for entry in entries:
            for code, xid in entry.xids.items():
                sums[code] = sums.get(code, 0) + xid.count
        self._last_result = NodeGpuResult(known, now, judgement, dict(sorted(sums.items())))
        return self._last_result

    def _entry(self, time: float, state: GpuState, *, is_job_over: bool) -> GpuEntry:
        uuid, total = state.gpu.uuid, self._totals.update(time, state, is_job_over=is_job_over)
        return GpuEntry(
            state=state,
            job_memory_errors=self._faults.job_memory_errors(uuid),
            xids=self._faults.xids(uuid),
            utilization_mean_ratio=total.utilization_mean_ratio,
            seen_s=total.known_s or None,
            idle_s=total.idle_s if total.known_s else None,
            memory_peak_bytes=total.memory_peak_bytes,
            energy_job_j=total.energy_j,
        )

    def _lost_gpus(self, now: float, states: Sequence[GpuState]) -> dict[str, tuple[float, str]]:
        """Lost GPUs by UUID, with the time and the driver's text of when they were lost."""
        before = self._published.value.lost
        return {
            state.gpu.uuid: before.get(state.gpu.uuid, (now, state.message or state.state))
            for state in states
            if state.state in ("lost", "reset_required") or (state.state == "hanging" and state.gpu.uuid in before)
        }

    def _log_events(
        self,
        now: float,
        reading: GpuReading,
        entries: Sequence[GpuEntry],
        new_xids: Sequence[GpuEvent],
        health: str | None,
        reasons: Sequence[HealthReason],
    ) -> None:
        """Add events for changes."""
        if reading.state != self._reported_driver:
            if reading.state == "ok":
                self._add_event(now, "info", "GPU driver", "GPUs can be read again")
            else:
                text = f": {reading.message}" if reading.message else ""
                self._add_event(now, "warning", "GPU driver", f"GPUs cannot be read: {reading.state}{text}")
            self._reported_driver = reading.state
        for entry in entries:
            uuid, state = entry.state.gpu.uuid, entry.state.state
            before = self._states.get(uuid, "ok")
            if state != "ok" and state != before:
                level, kind = ("warning", "GPU hangs") if state == "hanging" else ("critical", "GPU lost")
                self._add_event(now, level, kind, f"{entry.state.gpu.title}: {entry.state.message or state}")
            elif state == "ok" and before != "ok":
                self._add_event(now, "info", "GPU works again", entry.state.gpu.title)
            self._states[uuid] = state
        names = {entry.state.gpu.uuid: entry.state.gpu.title for entry in entries} if new_xids else {}
        for seen in new_xids:
            level = EVENT_LEVELS.get(xid_class(seen.xid), "info")
            who = f", process {seen.pid}" if seen.pid is not None else ""
            self._add_event(
                seen.time, level, "GPU Xid", f"{names[seen.uuid]}: Xid {seen.xid}: {xid_meaning(seen.xid)}{who}"
            )
        if health is not None and health != self._reported_health:
            level = {"failure": "critical", "warning": "warning"}.get(health, "info")
            text = "; ".join(f"{f'GPU {r.gpu}: ' if r.gpu is not None else ''}{r.text}" for r in reasons)
            self._add_event(now, level, "GPU health", f"{health}{': ' if text else ''}{text}")
            self._reported_health = health

    def _add_event(self, time: float, level: str, kind: str, detail: str) -> None:
        self._events.append(Event(time=time, level=level, event=kind, detail=detail))

    def render(self, snapshot: GpusSnapshot, out: Samples) -> None:
        if snapshot.state is None:
            return
        out.add(DRIVER_STATE, 1, state=snapshot.state)
        out.add(VISIBLE, snapshot.visible)
        if snapshot.health is not None:
            for health in HEALTHS:
                out.add(HEALTH, int(health == snapshot.health), health=health)
        for code, count in (snapshot.xids or {}).items():
            out.add(XIDS, count, xid=code)
        readable = snapshot.state == "ok"
        for entry in snapshot.gpus:
            page.add_gpu(out.row(gpu=entry.state.gpu.index), entry, snapshot.driver, readable=readable)

    def describe(self, snapshot: GpusSnapshot, parts: StatusParts) -> None:
        if snapshot.state is None:
            return
        driver = snapshot.driver
        parts.gpus = status.NodeGpus(
            driver_state=snapshot.state,
            words=snapshot.message,
            vendor=driver.vendor if driver else None,
            driver=driver.version if driver else None,
            cuda=driver.cuda_version if driver else None,
            allocated=snapshot.allocated,
            visible=snapshot.visible,
            health=snapshot.health,
            reasons=tuple(
                status.HealthReason(gpu=reason.gpu, severity=reason.severity, words=reason.text)
                for reason in snapshot.reasons
            ),
            absent=snapshot.unsupported_calls or {},
            gpus=tuple(
                page.gpu_device(entry, snapshot.lost_since.get(entry.state.gpu.uuid)) for entry in snapshot.gpus
            ),
        )
        parts.events += snapshot.events
        for task in self._context.tasks if snapshot.missing else ():
            missing = tuple(str(position) for position in task.gpus if position in snapshot.missing)
            parts.add_worker(task.rank, status.MissingGpus(gpu_missing=missing))


def devices_given_to_job(environ: Mapping[str, str], vendor: str | None = None) -> str | None:
    """Device list in the environment of this job, for one vendor or any; None if missing or empty."""
    names = DEVICE_LISTS.get(vendor, ()) if vendor is not None else sum(DEVICE_LISTS.values(), ())
    return next((environ[name] for name in names if environ.get(name)), None)


def job_gpus(
    reading: GpuReading, manifest: Manifest, identity: Identity, positions: Collection[int], environ: Mapping[str, str]
) -> dict[int, Gpu]:
    """GPUs of the job on this node by planned position, in order.

    An attached job has only planned GPUs, as positions in the driver's list. A machine that acts as several nodes gives
    each its share of the list. Otherwise all GPUs in the list belong to the job, planned or not. A lost GPU leaves its
    position empty, so the other positions do not shift.
    """
    units: list[Gpu | None] = [state.gpu for state in reading.gpus if not state.gpu.mig]
    if manifest.attached:
        return {at: gpu for at, gpu in enumerate(units) if at in positions and gpu is not None}
    text = devices_given_to_job(environ, reading.driver.vendor if reading.driver is not None else None)
    if text is not None:
        listed = listed_gpu_positions(text, [gpu.uuid for gpu in units if gpu is not None])
        units = [None if at is None else units[at] for at in listed]
    elif not positions:
        return {}
    if identity.first_gpu is not None and (positions or manifest.nodes > 1):
        units = units[identity.first_gpu : identity.first_gpu + max(positions, default=-1) + 1]
    return {at: gpu for at, gpu in enumerate(units) if gpu is not None}


def _with_parents(own: Collection[Gpu], reading: GpuReading) -> tuple[GpuState, ...]:
    """The job's GPUs and MIG instances, and the GPUs that contain these instances and share their faults."""
    uuids = {gpu.uuid for gpu in own} | {gpu.parent for gpu in own if gpu.parent is not None}
    return tuple(state for state in reading.gpus if state.gpu.uuid in uuids)
