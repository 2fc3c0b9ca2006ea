"""GPU faults since the start of the job: Xids from the driver and the kernel log, and memory errors."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

from exporter.collecting.collector import CollectorContext
from exporter.collecting.saved_state import load_saved_state, save_state
from exporter.contract.records import RecordError, from_json, to_json
from exporter.gpus.analysis.attribution import normal_pci_address
from exporter.gpus.analysis.node_health import counter_offset
from exporter.gpus.records import Gpu, GpuCondition, GpuEvent, GpuReading, XidCount
from exporter.machine.kernel_log import KernelEvent, KernelXid

KIND = "gpus"
UNCONTAINED_XIDS = (95,)  # reported for one instance, but affect the whole GPU

Entry = TypeVar("Entry", GpuEvent, KernelEvent)

MemoryErrors: TypeAlias = tuple[Mapping[str, int], Mapping[str, int]]  # offsets and last readings, by type

log = logging.getLogger("gpujob.gpus")


class _SavedFaults(NamedTuple):
    """Faults of one GPU as they are saved."""

    xids: Mapping[int, tuple[int, float]]  # count and last time by code
    ecc: MemoryErrors


class GpuFaultCounts:
    """Faults of this node's GPUs since the start of the job, saved in the run directory for the next sidecar.

    Driver and kernel log report the same errors, and either may miss some, so the larger count is used.
    """

    def __init__(self, context: CollectorContext) -> None:
        identity, run_dir = context.identity, context.manifest.run_dir
        self._kernel = context.kernel
        self._state_args = (run_dir, identity.node, identity.job_id, identity.attempt)
        # From earlier sidecars. None until loaded: not in the constructor, because the run directory may hang.
        self._saved: dict[tuple[str, int], XidCount] | None = None
        self._ecc: dict[str, MemoryErrors] = {}  # by UUID
        self._conditions: dict[str, GpuCondition] = {}  # by UUID: the last reading counted
        self._driver_counts: Counter[tuple[str, int]] = Counter()
        self._kernel_counts: Counter[tuple[str, int]] = Counter()
        self._last_times: dict[tuple[str, int], float] = {}
        self._last_event: GpuEvent | None = None
        self._last_kernel_event: KernelEvent | None = None
        self._xids: Mapping[str, Mapping[int, XidCount]] = {}
        self.changes = 0  # number of changes, so that users need not compare values

    def update(self, reading: GpuReading, gpus: Iterable[Gpu]) -> tuple[GpuEvent, ...]:
        """Count new errors and return the Xids that raised a count."""
        if self._saved is None:
            self._restore()
        ours = {gpu.uuid: gpu for gpu in gpus}
        if not ours:
            return ()  # kernel log lines can be matched only when the GPUs are known
        risen = self._count_xids(reading.events, ours)
        counted = False
        for state in reading.gpus:
            uuid, condition = state.gpu.uuid, state.condition
            if uuid in ours and condition is not None and condition is not self._conditions.get(uuid):
                self._conditions[uuid] = condition
                counted = self._count_memory_errors(uuid, condition) or counted
        if counted:
            self.changes += 1
        if risen or counted:
            self._save()
        return risen

    def _count_xids(self, events: tuple[GpuEvent, ...], ours: Mapping[str, Gpu]) -> tuple[GpuEvent, ...]:
        """Count new Xids and return those that raised a count."""
        new_events = _new_entries(self._last_event, events)
        logged = _new_entries(self._last_kernel_event, tuple(self._kernel.events) if self._kernel is not None else ())
        if not new_events and not logged:
            return ()
        # A MIG instance has its GPU's PCI address, and errors are reported for the GPU.
        whole = [gpu for gpu in ours.values() if gpu.parent is None and gpu.pci_bus_id]
        places = {normal_pci_address(gpu.pci_bus_id or ""): gpu.uuid for gpu in whole}
        instances = {(gpu.parent, gpu.gpu_instance) for gpu in ours.values() if gpu.parent is not None}
        divided = {parent for parent, _ in instances}

        def counts(event: GpuEvent) -> bool:
            """Whether an error concerns the job.

            On a divided GPU: only errors of the whole GPU or of the job's instances.
            """
            if event.uuid not in divided or event.gpu_instance is None or event.xid in UNCONTAINED_XIDS:
                return event.uuid in ours
            return (event.uuid, event.gpu_instance) in instances

        fresh: list[GpuEvent] = []
        for event in new_events:
            self._last_event = event
            if counts(event):
                self._driver_counts[event.uuid, event.xid] += 1
                fresh.append(event)
        for line in logged:
            self._last_kernel_event = line
            if (
                not isinstance(line.detail, KernelXid)
                or (uuid := places.get(normal_pci_address(line.detail.pci))) is None
            ):
                continue
            event = GpuEvent(uuid, line.detail.code, line.time, line.detail.pid, line.detail.gpu_instance)
            if counts(event):
                self._kernel_counts[uuid, line.detail.code] += 1
                fresh.append(event)
        if not fresh:
            return ()
        for seen in fresh:
            key = seen.uuid, seen.xid
            self._last_times[key] = max(self._last_times.get(key, seen.time), seen.time)
        before = self._xids
        self._merge_counts()
        newest = {(seen.uuid, seen.xid): seen for seen in fresh}
        return tuple(
            seen
            for (uuid, xid), seen in newest.items()
            if xid not in before.get(uuid, {}) or self._xids[uuid][xid].count > before[uuid][xid].count
        )

    def xids(self, uuid: str) -> Mapping[int, XidCount]:
        """Counts of a GPU, ordered by code."""
        return self._xids.get(uuid, {})

    def _merge_counts(self) -> None:
        """Merge saved, driver and kernel log counts."""
        kept = self._saved or {}
        found: dict[str, dict[int, XidCount]] = {}
        for key in sorted({*kept, *self._driver_counts, *self._kernel_counts}):
            old = kept.get(key, XidCount(0, 0.0))
            count = max(old.count + self._driver_counts[key], self._kernel_counts[key])
            uuid, xid = key
            found.setdefault(uuid, {})[xid] = XidCount(count, max(old.last, self._last_times.get(key, 0.0)))
        self._xids = found
        self.changes += 1

    def job_memory_errors(self, uuid: str) -> Mapping[str, int]:
        """Memory errors of a GPU since the start of the job, by type."""
        base, now = self._ecc.get(uuid, ({}, {}))
        return {kind: max(0, now[kind] - base.get(kind, 0)) for kind in now}

    def _count_memory_errors(self, uuid: str, condition: GpuCondition) -> bool:
        """Count memory errors; return whether anything changed."""
        totals = {"corrected": condition.ecc_corrected, "uncorrected": condition.ecc_uncorrected}
        counts = {kind: count for kind, count in totals.items() if count is not None}
        before = self._ecc.get(uuid, ({}, {}))
        base, last = before
        begun = {kind: counter_offset(base.get(kind), last.get(kind), count) for kind, count in counts.items()}
        self._ecc[uuid] = ({**base, **begun}, {**last, **counts})
        return self._ecc[uuid] != before

    def _restore(self) -> None:
        self._saved = {}
        found = load_saved_state(*self._state_args, kind=KIND) or {}
        try:
            saved = from_json(dict[str, _SavedFaults], found.get("gpus", {}), "gpus")
        except RecordError as error:
            log.warning("the GPU state saved by an earlier sidecar is not used: %s", error)
            saved = {}
        for uuid, faults in saved.items():
            self._saved |= {(uuid, code): XidCount(*xid) for code, xid in faults.xids.items()}
            self._ecc[uuid] = faults.ecc
        self._merge_counts()

    def _save(self) -> None:
        body = {}
        for uuid in {**self._xids, **self._ecc}:
            counts = {code: (xid.count, xid.last) for code, xid in self.xids(uuid).items()}
            body[uuid] = to_json(_SavedFaults(counts, self._ecc.get(uuid, ({}, {}))))
        problem = save_state(*self._state_args, {"gpus": body}, kind=KIND)
        if problem is not None:
            log.warning("GPU faults cannot be saved: %s", problem)


def _new_entries(last: Entry | None, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Entries after ``last``; all entries if it has been dropped meanwhile."""
    for at in range(len(entries) - 1, -1, -1):
        if entries[at] is last:
            return entries[at + 1 :]
    return entries
