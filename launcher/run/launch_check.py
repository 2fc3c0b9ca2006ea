"""Launch check of a job, from the statuses of its sidecars, or from task records without sidecars."""

import os
from collections.abc import Mapping, Sequence

from exporter.contract import run_files
from exporter.contract.clock import StopDetector
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.report import LaunchFault, LaunchReport, LaunchResult
from exporter.contract.status import LaunchCheck, LaunchProblem, NodeStatus
from exporter.launch.checks import LEVELS, Level, NodeLaunchFacts, WorkerLaunchFacts, check_launch
from exporter.launch.facts_reader import read_file_size, why_not_writable
from exporter.logs.log_files_reader import log_paths
from exporter.workers.exit_reason import evidence_from_record, find_exit_reason
from launcher.plan.plan import Plan, RunFacts

MARGIN_S = 15.0  # added to the launch timeout, for a late sidecar and for its status to arrive here
POLL_INTERVAL_S = 1.0
NODES_PER_S = 100  # status files read per second; larger jobs are polled less often
MOST_LINES = 20  # faults shown per check; the others are counted

SIDECAR = "sidecar"
_LEVELS: Mapping[str, Level] = {SIDECAR: "issue", **LEVELS}

_PASSED_TEXTS = {
    "processes": "{all} started",
    "count": "{all} {are} alive or completed, none started twice",
    "gpus": "{all} {have} the GPUs of the plan",
    "gpu_use": "{all} with GPUs {use} them",
    "logs": "{all} {have} a log file",
    "log_lines": "{all} {have} logged a first line",
    "output_dir": "The output directory can be written to",
    "output": "The first output files exist",
    "progress": "{all} {report} progress",
}
_ONE_WORKER = {"all": "The only worker", "are": "is", "have": "has", "use": "uses", "report": "reports"}
_FAILED_TEXTS = {
    SIDECAR: "{well} of {count} nodes were checked",
    "processes": "{well} of {count} workers started",
    "count": "{well} of {count} workers alive or completed",
    "gpus": "{well} of {count} workers have the GPUs of the plan",
    "gpu_use": "{well} of {count} workers with GPUs use them",
    "logs": "{well} of {count} workers have a log file",
    "log_lines": "{well} of {count} workers have logged a first line",
    "output_dir": "The output directory cannot be written to",
    "output": "No output file yet",
    "progress": "{well} of {count} workers report progress",
}
_FIXES = {
    SIDECAR: "read its log in the run directory",
    "processes": "read log.err in the run directory: was its step started, with enough CPUs and memory for all?",
    "count": "read the end of its log, {log}",
    "gpus": "remove CUDA_VISIBLE_DEVICES from its command and from `env`, or correct `gpus` of its role",
    "gpu_use": "is its framework built with CUDA, and does nvidia-smi work on the node?",
    "logs": "can the run directory be written to from the node?",
    "log_lines": "its output may be buffered: flush it, or start the program with `stdbuf -oL`; with several workers a "
    "log file of its own must have the worker's number in its name, as in train_0.log",
    "output_dir": "create it, give the job's user permission to write to it, or choose another `paths.output_dir`",
    "output": "if files are written elsewhere, correct `paths.output_dir` and `patterns.output`",
    "progress": "set `progress.patterns.items` to match its log, or increase `monitoring.launch_timeout`",
}


@dataclass(frozen=True)
class LaunchChecklist:
    """Result of the launch check."""

    elapsed_s: float
    results: tuple[LaunchResult, ...]

    @property
    def is_verified(self) -> bool:
        """Whether the launch has no issues; warnings are allowed."""
        return bool(self.results) and not self.faults("issue")

    def faults(self, level: Level) -> list[LaunchFault]:
        """Faults of all checks of this level."""
        return [fault for result in self.results if result.level == level for fault in result.faults]

    def independent_faults(self, result: LaunchResult) -> list[LaunchFault]:
        """Faults of one check, without those that follow from a missing worker."""
        absent: set[int | None] = set()
        for earlier in self.results:
            if earlier is result:
                break
            if earlier.name in ("processes", "count"):
                absent.update(fault.rank for fault in earlier.faults)
        return [fault for fault in result.faults if result.name == "gpus" or fault.rank not in absent - {None}]

    def report(self) -> LaunchReport:
        """Return the checklist for events and the report."""
        return LaunchReport(verified=self.is_verified, elapsed_s=self.elapsed_s, checks=self.results)


class JobLaunchCheck:
    """Collects the launch checks of all nodes. ``poll`` may be called at any rate above one a minute."""

    def __init__(self, plan: Plan, facts: RunFacts) -> None:
        self._plan = plan
        self._facts = facts
        self._next_poll_at = 0.0
        self._stops = StopDetector(POLL_INTERVAL_S)
        self._stopped_s = 0.0
        self._node_checks: dict[int, Sequence[LaunchCheck]] = {}  # final checks by node index
        self._checklist: LaunchChecklist | None = None

    def poll(self, elapsed_s: float) -> LaunchChecklist | None:
        """Return the checklist, or None while a node still has time. ``elapsed_s`` counts from the start of the job."""
        self._stopped_s += self._stops.begin_read(elapsed_s)
        self._stops.end_read(elapsed_s)
        if self._checklist is None and elapsed_s >= self._next_poll_at:
            self._next_poll_at = elapsed_s + max(POLL_INTERVAL_S, self._plan.nodes / NODES_PER_S)
            own_s = elapsed_s - self._stopped_s
            self._read(own_s)
            late = own_s >= self._plan.launch_timeout_s + MARGIN_S
            if late or len(self._node_checks) == self._plan.nodes:
                return self.conclude(elapsed_s)
        return self._checklist

    def conclude(self, elapsed_s: float) -> LaunchChecklist:
        """Return the checklist from the current facts, for a job that has ended."""
        if self._checklist is None:
            self._read(elapsed_s)
            silent = [index for index in range(self._plan.nodes) if index not in self._node_checks]
            for index in silent:
                self._node_checks[index] = self._checks_from_records(index, elapsed_s, has_ended=True)
            self._checklist = self._merge(elapsed_s, silent if self._plan.monitoring else [])
        return self._checklist

    def _read(self, elapsed_s: float) -> None:
        for index in range(self._plan.nodes):
            if index in self._node_checks:
                continue
            if self._plan.monitoring:
                checks = self._checks_from_status(index)
            else:
                checks = self._checks_from_records(index, elapsed_s, has_ended=False)
                if elapsed_s < self._plan.launch_timeout_s and not all(check.passed for check in checks):
                    continue
            if checks:
                self._node_checks[index] = checks

    def _checks_from_status(self, index: int) -> Sequence[LaunchCheck]:
        """Final checks of a node's sidecar; empty before they are final."""
        status = NodeStatus.read_valid(self._facts.run_dir / run_files.STATUS_DIR / f"{self._facts.hosts[index]}.json")
        if status is None or status.attempt != self._facts.attempt or not (status.final or status.launch.final):
            return ()
        return status.launch.checks

    def _checks_from_records(self, index: int, elapsed_s: float, *, has_ended: bool) -> Sequence[LaunchCheck]:
        """Check a node without a sidecar from its task records."""
        manifest = self._plan.manifest
        group = next((group for group in manifest.groups if group.name == "output"), None)
        directory = self._facts.run_dir / group.directory if group is not None else None
        node = NodeLaunchFacts(
            output_dir=str(directory) if directory is not None else None,
            output_problem=why_not_writable(directory) if directory is not None else None,
        )
        workers = [self._worker_facts(task) for task in manifest.tasks_of(index)]
        return check_launch(
            workers,
            node,
            elapsed_s=elapsed_s,
            launch_timeout_s=self._plan.launch_timeout_s,
            is_over=has_ended,
        )

    def _worker_facts(self, task: Task) -> WorkerLaunchFacts:
        facts, restart = self._facts, 0
        while self._read_record(task, restart + 1, "start") or self._read_record(task, restart + 1, "exit"):
            restart += 1
        start, ended = self._read_record(task, restart, "start"), self._read_record(task, restart, "exit")
        judged = find_exit_reason(evidence_from_record(ended)) if ended is not None else None
        paths = log_paths(task, facts.run_dir, facts.hosts[task.node_index], facts.attempt, restart)
        sizes = [size for path in paths if (size := read_file_size(path)) is not None]
        return WorkerLaunchFacts(
            worker=task.worker,
            rank=task.rank,
            started=start is not None or (judged is not None and judged.reason != "launch_failed"),
            up=ended is None and start is not None,
            age_s=float("inf"),  # clocks of nodes differ, so a task without an exit record counts as old enough
            reason=judged.reason if judged is not None else None,
            evidence="; ".join(judged.evidence) if judged is not None else "",
            log_files=len(sizes),
            log_bytes=sum(sizes),
        )

    def _read_record(self, task: Task, restart: int, kind: str) -> dict[str, object] | None:
        stem = run_files.record_name(task.worker, task.rank, self._facts.attempt, restart)
        return run_files.read_json(self._facts.run_dir / run_files.WORKERS_DIR / f"{stem}.{kind}.json")

    def _merge(self, elapsed_s: float, silent_nodes: Sequence[int]) -> LaunchChecklist:
        """Merge the checks of all nodes into one result per check."""
        faults: dict[str, list[LaunchFault]] = {}
        unseen: dict[str, int] = {}
        silent_text = "its sidecar has not reported on the launch"
        if silent_nodes:
            faults[SIDECAR] = [
                LaunchFault(node=self._facts.hosts[index], found=silent_text, cure=_FIXES[SIDECAR])
                for index in silent_nodes
            ]
        for index in sorted(self._node_checks):
            for check in self._node_checks[index]:
                if check.name in LEVELS and (check.passed is not None or check.lacking):
                    found = faults.setdefault(check.name, [])
                    found += [self._fault(check.name, index, problem) for problem in check.lacking]
        for name in ("gpus", "gpu_use"):  # only these need a look at a process while it runs
            unseen[name] = sum(self._unseen(name, index) for index in self._node_checks)
        return LaunchChecklist(
            elapsed_s,
            tuple(self._result(name, faults[name], unseen.get(name, 0)) for name in _LEVELS if name in faults),
        )

    def _unseen(self, name: str, index: int) -> int:
        """Workers of a node for which this check has no result."""
        found = next((check for check in self._node_checks[index] if check.name == name), None)
        tasks = (task for task in self._checked_tasks(name) if task.node_index == index)
        return found.unseen if found is not None else sum(1 for _ in tasks)

    def _checked_tasks(self, name: str) -> list[Task]:
        """Tasks to which a check of workers applies."""
        tasks = [planned.task for planned in self._plan.tasks if not planned.task.later]
        if name == "gpu_use":
            return [task for task in tasks if task.gpus]
        if name == "progress":
            return [task for task in tasks if task.critical and not task.service]
        return tasks

    def _fault(self, name: str, index: int, problem: LaunchProblem) -> LaunchFault:
        fix = _FIXES[name]
        if "{log}" in fix:
            fix = fix.replace("{log}", self._error_log_name(problem.rank, index))
        node = self._facts.hosts[index]
        return LaunchFault(worker=problem.worker, rank=problem.rank, node=node, found=problem.found, cure=fix)

    def _error_log_name(self, rank: int | None, index: int) -> str:
        """Name of the standard error file of a task's last run."""
        task = next(planned.task for planned in self._plan.tasks if planned.task.rank == rank)
        restart = 0
        while self._read_record(task, restart + 1, "start"):
            restart += 1
        paths = log_paths(task, "", self._facts.hosts[index], self._facts.attempt, restart)
        return os.path.basename(paths[-1]) if paths else "in the run directory"

    def _result(self, name: str, faults: Sequence[LaunchFault], unseen: int) -> LaunchResult:
        count = self._plan.nodes if name == SIDECAR else len(self._checked_tasks(name))
        texts = _FAILED_TEXTS if faults or unseen else _PASSED_TEXTS
        subject = {name: name for name in _ONE_WORKER} | {"all": f"All {count} workers"} if count > 1 else _ONE_WORKER
        detail = texts[name].format(count=count, well=count - len(faults) - unseen, **subject)
        if unseen:
            detail += f"; {unseen} could not be seen"
        return LaunchResult(name=name, level=_LEVELS[name], passed=not faults, detail=detail, faults=tuple(faults))


def render_launch_checklist(checklist: LaunchChecklist) -> list[str]:
    """Render the checklist for people, one entry per line."""
    lines = []
    for result in checklist.results:
        mark = "✓" if result.passed else "✗" if result.level == "issue" else "!"
        lines.append(f"{mark} {result.detail}")
    lines += ["", "✓ Job launch verification PASSED" if checklist.is_verified else "✗ Job launch verification FAILED"]
    for level, title in (("issue", "Issues:"), ("warning", "Warnings:")):
        shown_faults = [
            (result, checklist.independent_faults(result)) for result in checklist.results if result.level == level
        ]
        if any(faults for _, faults in shown_faults):
            lines += ["", title]
        for result, faults in shown_faults:
            shown = _fault_lines(faults)
            lines += [f"  - {line}" for line in shown[:MOST_LINES]]
            if len(shown) > MOST_LINES:
                lines.append(f"  - and {len(shown) - MOST_LINES} more: {result.detail}")
    return lines


def _fault_text(fault: LaunchFault) -> str:
    return f"{fault.worker} (rank {fault.rank}) on {fault.node}: {fault.found}; {fault.cure}"


def _fault_lines(faults: Sequence[LaunchFault]) -> list[str]:
    """One line per fault; nodes with the same fault share a line."""
    nodes: dict[str, list[str]] = {}
    for fault in faults:
        if fault.worker is None:
            nodes.setdefault(f"{fault.found}; {fault.cure}", []).append(fault.node)
    lines = [_fault_text(fault) for fault in faults if fault.worker is not None]
    for text, names in nodes.items():
        more = f" and {len(names) - MOST_LINES} more" if len(names) > MOST_LINES else ""
        lines.append(f"{', '.join(names[:MOST_LINES])}{more}: {text}")
    return lines
