"""Stages of a job: which tasks may start, given the services that are ready."""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from exporter.contract import run_files
from exporter.contract.clock import StopDetector
from exporter.contract.records import RecordError, from_json
from launcher.plan.plan import BENCHMARK, STAGES, Plan, RunFacts, TaskPlan
from launcher.report.verification import benchmark_log
from launcher.run.before.readiness import MOST_NAMED, JobReadiness, RuleStatus, describe_missing, missing_text
from launcher.run.job_log import log_line
from launcher.steps.steps import PYTHON_FLAGS, Steps
from launcher.words import names_text

TICK_S = 0.2  # between two turns of the orchestrator
READ_INTERVAL_S = 0.5  # between two reads of `readiness.json`
# missing workers that the cause names; it is repeated next to every worker that ends with the job
MOST_NAMED_IN_CAUSE = 2
_NOT_READY_TEXT = " is not ready: "
RESTART_DELAY_S = 5.0  # before another start of a readiness poller that ended unasked


class ReadinessState:
    """Readiness as found by the process ``launcher.run.before.poll_readiness``."""

    def __init__(self, plan: Plan, facts: RunFacts, steps: Steps) -> None:
        self.is_polled = plan.readiness is not None and bool(plan.readiness.rules)
        self.found: JobReadiness | None = None  # as last published in this attempt
        self._plan = plan
        self._facts = facts
        self._steps = steps
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start_at = 0.0
        self._next_read_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether all services of the job are ready."""
        return not self.is_polled or (self.found is not None and self.found.ready)

    def poll(self) -> None:
        """Read the readiness file, and restart the poller if it has ended."""
        now = time.monotonic()
        if not self.is_polled or now < self._next_read_at:
            return
        self._next_read_at = now + READ_INTERVAL_S
        if self._process is None or self._process.poll() is not None:
            self._start(now)
        try:
            found = from_json(JobReadiness, run_files.read_json(self._facts.run_dir / run_files.READINESS_FILE))
        except RecordError:
            return  # not written yet
        if found.attempt == self._facts.attempt:
            self.found = found

    def _start(self, now: float) -> None:
        if now < self._next_start_at:
            return
        self._next_start_at = now + RESTART_DELAY_S
        if self._process is not None:
            log_line(f"The readiness poller ended with status {self._process.returncode}; restarting it")
        run_dir = self._facts.run_dir
        argv = [self._plan.python, *PYTHON_FLAGS, "launcher.run.before.poll_readiness", "--run-dir", str(run_dir)]
        try:
            self._process = self._steps.start_program(argv, run_dir / benchmark_log(self._facts.attempt))
        except OSError as error:
            log_line(f"The readiness poller cannot be started: {error}")

    def is_met(self, stage: str) -> bool:
        """Whether everything a stage waits for is ready; the benchmark waits for all services."""
        if not self.is_polled or self._plan.readiness is None:
            return True
        asked = [index for index, rule in enumerate(self._plan.readiness.rules) if stage in (BENCHMARK, rule.before)]
        ready = [] if self.found is None else [index for index, rule in enumerate(self.found.rules) if rule.ready]
        return set(asked) <= set(ready)

    def end(self) -> None:
        """Stop the poller."""
        if self.is_polled and self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self.is_polled = False


class Stages:
    """Tasks still to be started, stage by stage."""

    def __init__(self, plan: Plan, facts: RunFacts, readiness: ReadinessState) -> None:
        self._plan = plan
        self._facts = facts
        self._readiness = readiness
        self._remaining_stages = [stage for stage in STAGES if any(planned.stage == stage for planned in plan.tasks)]
        # Start of the latest stage on the monotonic clock, moved by the length of each later stop of the job.
        self._stage_started_at: float | None = None
        self._stops = StopDetector(TICK_S)
        self._was_ready = False

    @property
    def remaining_tasks(self) -> list[TaskPlan]:
        """Tasks of later stages."""
        return [planned for planned in self._plan.tasks if planned.stage in self._remaining_stages]

    def advance(self) -> list[TaskPlan]:
        """Return the tasks of the next stage and advance, or nothing while it must wait."""
        if not self._remaining_stages or not self._readiness.is_met(self._remaining_stages[0]):
            return []
        stage = self._remaining_stages.pop(0)
        self._stage_started_at = time.monotonic()
        return [planned for planned in self._plan.tasks if planned.stage == stage]

    def is_overdue(self) -> bool:
        """Whether readiness has timed out. A job that was ready before has no timeout.

        To be called in each turn of the orchestrator, since stops of the job are found between two calls.
        """
        now = time.monotonic()
        stopped_s = self._stops.begin_read(now)
        self._stops.end_read(now)
        if self._stage_started_at is not None:
            self._stage_started_at = min(now, self._stage_started_at + stopped_s)
        self._was_ready = self._was_ready or (self._readiness.ready and not self._remaining_stages)
        if (
            not self._readiness.is_polled
            or self._plan.readiness is None
            or self._was_ready
            or self._stage_started_at is None
        ):
            return False
        return now - self._stage_started_at > self._plan.readiness.timeout_s

    def describe_missing_services(
        self, restarts: Callable[[], dict[int, int]]
    ) -> tuple[str, dict[str, object], list[str]]:
        """Describe the missing services: a sentence, the failure for the report, and the ends of their logs.

        The sentence and the failure name the first of many workers. Each worker has a line in the evidence.
        """
        timeout_s = self._plan.readiness.timeout_s if self._plan.readiness is not None else 0.0
        found = self._readiness.found
        lines = describe_missing(self._plan, self._facts, found, restarts())
        names = unready_workers(self._plan, found)
        waiting = found.waiting if found is not None else ""
        others = unready_others(self._plan, found, names) if names and found is not None else ""
        late, besides = f"not ready after {timeout_s:g} s", f" (waiting for {others})" if others else ""
        cause = f"{late}: missing {names_text(names, MOST_NAMED_IN_CAUSE) or waiting or 'all'}{besides}"
        tasks = {planned.task.worker: planned.task for planned in reversed(self._plan.tasks)}
        missing: list[dict[str, object]] = [
            {"worker": name, "rank": tasks[name].rank, "node": self._facts.hosts[tasks[name].node_index]}
            for name in names
            if name in tasks
        ] or [{"worker": "the model", "rank": None, "node": self._facts.hosts[0]}]
        failed: dict[str, object] = {
            **missing[0],
            "missing": missing[:MOST_NAMED],
            "missing_total": len(missing),
            "reason": "launch_failed",
            "evidence": [f"{late}{besides}" if names else cause, *_first_missing_lines(lines)],
        }
        return cause, failed, lines


def _first_missing_lines(lines: Sequence[str]) -> list[str]:
    """Keep the first lines about missing services and all other lines."""
    missing_lines = [line for line in lines if _NOT_READY_TEXT in line and not line.startswith(" ")]
    left_out = set(missing_lines[MOST_NAMED:])
    kept = [line for line in lines if line not in left_out]
    if left_out:
        kept.insert(kept.index(missing_lines[MOST_NAMED - 1]) + 1, f"and {len(left_out)} more are not ready")
    return kept


def unready_workers(plan: Plan, found: JobReadiness | None) -> list[str]:
    """Workers that are polled themselves and are not ready, in the order of the rules."""
    statuses = found.rules if found is not None else ()
    rules = plan.readiness.rules if plan.readiness is not None else ()
    names = [
        rule.subject
        for index, rule in enumerate(rules)
        if rule.subject and not (index < len(statuses) and statuses[index].ready)
    ]
    return list(dict.fromkeys(names))


def unready_others(plan: Plan, found: JobReadiness, names: Collection[str]) -> str:
    """Describe the other services that are not ready, like ``missing_text``; empty without any.

    A front end that counts workers is omitted when ``names`` contains all its missing workers.
    """
    rules = plan.readiness.rules if plan.readiness is not None else ()
    roles = {planned.task.worker: planned.task.role for planned in plan.tasks}
    named = Counter(roles[name] for name in names if name in roles)
    lacks_them = bool(found.expected) and all(
        number - found.seen.get(role, 0) <= named[role] for role, number in found.expected.items()
    )
    others = [
        rule
        for rule, status in zip(rules, found.rules, strict=False)
        if not status.ready and rule.subject not in names and not lacks_them
    ]
    return missing_text(others, [RuleStatus(ready=False)] * len(others), found.seen, found.expected)
