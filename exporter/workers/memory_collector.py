"""Memory of the job on this node, from its cgroup, and victims of the OOM killer."""

from collections import Counter, deque
from collections.abc import Mapping
from functools import reduce
from pathlib import Path

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract import oom_kills, run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.process_identity import read_pid_namespace
from exporter.contract.status import CgroupMemory, KernelXid, Memory
from exporter.machine.cgroup import (
    MemoryCgroup,
    MemoryCgroupReader,
    OpenCgroupFile,
    common_ancestor,
    read_memory_cgroup,
)
from exporter.machine.folders import FolderChangeCheck
from exporter.machine.kernel_log import KernelLog, OomVictim
from exporter.machine.kernel_log import KernelXid as LoggedXid

USED = Family("cgroup_memory_used_bytes", "Memory of the job on this node, page cache included.")
LIMIT = Family(
    "cgroup_memory_limit_bytes", "Smallest memory limit that applies to the job on this node; absent without a limit."
)
PEAK = Family("cgroup_memory_peak_bytes", "The most memory that the job has used on this node.")
WORKING_SET = Family(
    "cgroup_memory_working_set_bytes",
    "Memory of the job on this node without page cache, which the kernel takes back before it kills.",
)
OOM_KILLS = Family(
    "cgroup_oom_kills_total", "Processes of the job on this node that the kernel's OOM killer ended.", kind="counter"
)
PRESSURE = Family(
    "cgroup_memory_pressure_seconds_total",
    "Time in which some or all (full) processes of the job on this node waited for memory.",
    labels=("kind",),
    kind="counter",
)

LEAST_INTERVAL_S, MOST_INTERVAL_S = 2.0, 5.0  # every read makes the kernel sum up the whole cgroup tree
LISTED_XIDS = 50
MOST_PIDS = 1000  # of earlier runs, among which a victim of the OOM killer is looked up


@dataclass
class _MemoryRun:
    """One run of one worker: its cgroup, and the OOM kills that its wrapper counted there."""

    task: Task
    restart: int
    record: Mapping[str, object]
    cgroup: MemoryCgroup | None = None
    ended: bool = False
    oom_kills: int = 0


@dataclass
class _OomKillCount:
    """OOM kills of a v1 cgroup; the last count remains after its removal."""

    file: OpenCgroupFile
    count: int = 0

    def read(self) -> int:
        self.count = max(self.count, oom_kills.parse_oom_kills(self.file.read()) or 0)
        return self.count


class MemoryCollector:
    """Memory of the smallest cgroup that contains this sidecar and the workers of this node.

    Under Slurm this is the job's cgroup, on one machine the one in which all were started. Before any worker is known
    it is the sidecar's own. Nothing is reported for the root of the hierarchy, which is the machine. The sidecar of an
    attached job is in another cgroup, so only the workers count.
    """

    name = "memory"
    families = (USED, LIMIT, PEAK, WORKING_SET, OOM_KILLS, PRESSURE)

    def __init__(self, context: CollectorContext) -> None:
        self._context = context
        self._root = str(Path(context.proc).parent)
        self._folder = str(context.manifest.run_dir / run_files.WORKERS_DIR)
        self._change_check = FolderChangeCheck(self._folder)
        self.interval_s = min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, context.manifest.check_interval_s))
        self._runs: list[_MemoryRun] = []  # the latest one of each worker, and earlier ones that have not ended
        self._run_counts: Counter[int] = Counter()  # by rank
        # Of earlier runs: pids, the smallest cgroup that contains all of theirs, and OOM kills where there were any.
        self._earlier_pids: deque[object] = deque(maxlen=MOST_PIDS)
        self._earlier_cgroups: dict[str, MemoryCgroup] = {}  # by mount
        self._earlier_kills: dict[str, int] = {}  # by directory, or run without one
        self._own_cgroup: MemoryCgroup | None = None
        self._reader: MemoryCgroupReader | None = None
        self._kill_counts: dict[str, _OomKillCount] = {}
        self._most_kills = 0
        self._kernel_log = context.kernel
        self._pid_namespace = read_pid_namespace(context.proc)

    def read(self) -> Memory:
        if self._kernel_log is None:
            self._kernel_log = KernelLog(
                self._context.clock,
                self._context.identity.start,
                str(Path(self._root, "dev/kmsg")),
                self._context.proc,
            )
        self._kernel_log.read()
        self._update_runs()
        if self._own_cgroup is None:
            self._own_cgroup = read_memory_cgroup("self", self._root)
        facts = self._read_memory()
        unavailable = self._kernel_log.unavailable_reason
        return Memory.join(
            facts or CgroupMemory(),
            cgroup=(self._reader.cgroup.path or "/") if self._reader is not None else None,
            version=self._reader.cgroup.version if self._reader is not None else None,
            oom_kills=self._count_oom_kills(facts) if facts is not None else None,
            kmsg=f"unavailable: {unavailable}" if unavailable else "available",
            oom_victims={
                event.detail.pid: event.time
                for event in self._kernel_log.events
                if isinstance(event.detail, OomVictim) and self._is_ours(event.detail)
            },
            xids=tuple(
                KernelXid(pci=event.detail.pci, code=event.detail.code, pid=event.detail.pid, time=event.time)
                for event in self._kernel_log.events
                if isinstance(event.detail, LoggedXid)
            )[-LISTED_XIDS:],
        )

    def _is_ours(self, victim: OomVictim) -> bool:
        """Whether a victim was in the job's cgroup, or is a worker if it has none or an old kernel does not log it."""
        job = self._reader.cgroup.path if self._reader is not None and not self._reader.is_shared else ""
        if victim.cgroup is not None and job:
            return f"{victim.cgroup}/".startswith(f"{job}/")
        return victim.pid in self._earlier_pids or any(run.record.get("pid") == victim.pid for run in self._runs)

    def _update_runs(self) -> None:
        """Find runs with a new record, and the cgroups of those that still run."""
        fresh = self._change_check.may_have_changed(self._context.clock.time())
        for task in self._context.tasks:
            while (
                fresh
                and (
                    record := self._read_record(task, self._run_counts[task.rank], "start")
                    or self._read_record(task, self._run_counts[task.rank], "exit")
                )
                is not None
            ):
                self._runs.append(_MemoryRun(task, self._run_counts[task.rank], record))
                self._run_counts[task.rank] += 1
        for run in self._runs[:]:
            if not run.ended:
                self._update_run(run, fresh=fresh)
            elif run.restart + 1 < self._run_counts[run.task.rank]:
                self._forget(run)

    def _forget(self, run: _MemoryRun) -> None:
        """Keep only what counts of an earlier run that has ended."""
        self._runs.remove(run)
        self._earlier_pids.append(run.record.get("pid"))
        if run.cgroup is None or run.cgroup.version == 1:
            place, kills = self._oom_kills_of(run)
            if kills:
                self._earlier_kills[place] = max(kills, self._earlier_kills.get(place, 0))
        if run.cgroup is None:
            return
        mount = run.cgroup.mount
        self._earlier_cgroups[mount] = common_ancestor(self._earlier_cgroups.get(mount, run.cgroup), run.cgroup)
        if run.cgroup not in (self._own_cgroup, *(other.cgroup for other in self._runs)):
            kill_count = self._kill_counts.pop(run.cgroup.directory, None)
            if kill_count is not None:
                kill_count.file.close()

    def _update_run(self, run: _MemoryRun, *, fresh: bool) -> None:
        pid, namespace, ticks = (run.record.get(key) for key in ("pid", "pid_namespace", "start_ticks"))
        visible = namespace is None or self._pid_namespace is None or namespace == self._pid_namespace
        if run.cgroup is None and isinstance(pid, int) and visible:
            run.cgroup = read_memory_cgroup(pid, self._root, ticks if isinstance(ticks, int) else None)
        ended = self._read_record(run.task, run.restart, "exit") if fresh else None
        if ended is not None:
            run.ended = True
            kills = ended.get("oom_kills")
            run.oom_kills = kills if isinstance(kills, int) else 0

    def _read_record(self, task: Task, restart: int, kind: str) -> dict[str, object] | None:
        stem = run_files.record_name(task.worker, task.rank, self._context.identity.attempt, restart)
        return run_files.read_json(f"{self._folder}/{stem}.{kind}.json")

    def _read_memory(self) -> CgroupMemory | None:
        if self._own_cgroup is None:
            return None
        known = [
            run.cgroup for run in self._runs if run.cgroup is not None and run.cgroup.mount == self._own_cgroup.mount
        ]
        if self._own_cgroup.mount in self._earlier_cgroups:
            known.append(self._earlier_cgroups[self._own_cgroup.mount])
        if not self._context.manifest.attached:
            known.append(self._own_cgroup)
        if not known:
            return None
        job = reduce(common_ancestor, known)
        if self._reader is None or self._reader.cgroup != job:
            if self._reader is not None:
                self._reader.close()
            self._reader = MemoryCgroupReader(job)
        return self._reader.read()

    def _count_oom_kills(self, facts: CgroupMemory) -> int | None:
        """OOM kills of the job on this node; never falls.

        A v2 cgroup counts its whole subtree, a v1 cgroup only its own processes. The v1 cgroup of a step is removed
        when its last process is killed; then the count of the wrapper, which ran in it, is used.
        """
        if self._own_cgroup is None or facts.oom_kills is None:
            return None
        total = facts.oom_kills if self._own_cgroup.version == 2 else self._count_oom_kills_v1(self._own_cgroup)
        self._most_kills = max(self._most_kills, total)
        return self._most_kills

    def _count_oom_kills_v1(self, own: MemoryCgroup) -> int:
        counts = {} if self._context.manifest.attached else {own.directory: self._cgroup_oom_kills(own)}
        for place, kills in (*self._earlier_kills.items(), *map(self._oom_kills_of, self._runs)):
            counts[place] = max(counts.get(place, 0), kills)
        return sum(counts.values())

    def _oom_kills_of(self, run: _MemoryRun) -> tuple[str, int]:
        """Place of the OOM kills of a run, and their number according to the kernel or the wrapper."""
        if run.cgroup is not None:
            return run.cgroup.directory, max(self._cgroup_oom_kills(run.cgroup), run.oom_kills)
        # not found in time: its own cgroup if the other runs have their own, else the shared one
        own = self._own_cgroup
        if own is None or any(other.cgroup not in (None, own) for other in self._runs):
            return f"{run.task.rank} {run.restart}", run.oom_kills
        return own.directory, run.oom_kills

    def _cgroup_oom_kills(self, cgroup: MemoryCgroup) -> int:
        kills = self._kill_counts.get(cgroup.directory)
        if kills is None:
            kills = _OomKillCount(OpenCgroupFile(f"{cgroup.directory}/{oom_kills.OOM_FILES[cgroup.version]}"))
            self._kill_counts[cgroup.directory] = kills
        return kills.read()

    def render(self, memory: Memory, out: Samples) -> None:
        out.add(USED, memory.used_bytes)
        out.add(LIMIT, memory.limit_bytes)
        out.add(PEAK, memory.peak_bytes)
        out.add(WORKING_SET, memory.working_set_bytes)
        out.add(OOM_KILLS, memory.oom_kills)
        out.add(PRESSURE, memory.pressure_some_s, kind="some")
        out.add(PRESSURE, memory.pressure_full_s, kind="full")

    def describe(self, memory: Memory, parts: StatusParts) -> None:
        parts.memory = memory
