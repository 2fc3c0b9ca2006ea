"""The sidecars of a job, from the orchestrator's side: start, announce, start again, last values, end.

None of it may hold or fail the job: whatever goes wrong here is said, and the job goes on.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from exporter.contract import run_files
from exporter.logs.places_reader import read_last_bytes
from launcher.plan.plan import Plan, RunFacts
from launcher.run.job_log import log_line
from launcher.rundir.targets import (
    TargetFiles,
    engine_target_groups,
    metrics_endpoint,
    read_sidecars,
    sidecar_target_groups,
)
from launcher.steps.steps import Steps

START_TIMEOUT_S = 30.0  # how long the workers wait for the sidecars to listen; then the job goes on without them
TARGETS_EVERY_S = 5.0  # between two looks for sidecars that came late or came back elsewhere: one file for each node
KILLED_S = 2.0  # how long the end of one that was killed is waited for: it may hang in a system call
END_S = 5.0
MOST_STARTS = 3
CANNOT_WORK = 2  # status of a sidecar that cannot work as it is configured: another start would end alike


class Sidecars:
    """One sidecar on each node. ``sleep`` is woken by signals and children; ``hurried`` tells that a signal came."""

    def __init__(
        self,
        plan: Plan,
        facts: RunFacts,
        steps: Steps,
        sleep: Callable[[float], None],
        hurried: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._facts = facts
        self._steps = steps
        self._sleep = sleep
        self._hurried = hurried
        self._targets = TargetFiles(facts.run_dir, plan.target_dir)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts = 0
        self._targets_due = 0.0
        self._engines = {planned.task.rank: planned.task for planned in plan.tasks if metrics_endpoint(planned)}
        """Tasks whose programs serve metrics, by rank,"""
        self._engines_up: set[int] = set()
        """and those of them that have started."""

    @property
    def started(self) -> bool:
        """Whether any were started."""
        return bool(self._processes)

    @property
    def _gone(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def start(self) -> None:
        """Start them and wait until they listen, for a while."""
        if not self._plan.monitoring:
            log_line("No sidecars: monitoring.enabled is false")
            return
        if not self._start():
            return
        end = time.monotonic() + START_TIMEOUT_S
        while not self._hurried():
            listening = self._publish()
            if len(listening) >= len(self._facts.hosts):
                log_line(f"All {len(listening)} sidecars listen")
                return
            missing = sorted(set(self._facts.hosts) - set(listening))
            if self._gone:
                log_line(
                    f"The sidecars could not run on {', '.join(missing)}; the job goes on unwatched{self._last_words()}"
                )
                return
            if time.monotonic() > end:
                log_line(f"No sidecar listens yet on {', '.join(missing)}; the job does not wait for them any longer")
                return
            self._sleep(0.05)

    def _start(self) -> bool:
        try:
            self._processes = self._steps.start_sidecars()
        except OSError as error:
            log_line(f"The sidecars cannot be started: {error}; the job goes on unwatched")
            return False
        return True

    def _publish(self) -> dict[str, dict[str, Any]]:
        """Announce the sidecars that listen, and the engines that have started; the sidecars by node."""
        found = read_sidecars(self._facts.run_dir, self._facts.attempt)
        groups = sidecar_target_groups(found.values())
        if groups:  # the job's labels are in the records of its sidecars
            groups += engine_target_groups(self._plan, self._facts, groups[0]["labels"], self._look_for_engines())
        if self._targets.publish(groups):
            engines = f" and {len(self._engines_up)} engines" if self._engines_up else ""
            log_line(f"Prometheus targets: {', '.join(record['address'] for record in found.values())}{engines}")
        while self._targets.problems:
            log_line(self._targets.problems.pop())
        self._targets_due = time.monotonic() + TARGETS_EVERY_S
        return found

    def _look_for_engines(self) -> set[int]:
        """Ranks of the tasks with metrics of their own whose wrappers have started them."""
        folder = self._facts.run_dir / run_files.WORKERS_DIR
        for rank, task in self._engines.items():
            if rank not in self._engines_up:
                record = f"{run_files.record_name(task.worker, rank, self._facts.attempt, 0)}.start.json"
                if (folder / record).exists():
                    self._engines_up.add(rank)
        return self._engines_up

    def _last_words(self) -> str:
        """The last line that a sidecar has left in its log."""
        for path in sorted(self._facts.run_dir.glob("*sidecar*.log")):
            lines = read_last_bytes(path, 4096).decode("utf-8", "replace").splitlines()
            if lines:
                return f": {lines[-1].strip()} (in {path.name})"
        return ""

    def care(self, *, revive: bool) -> None:
        """What is due while the workers run; ``revive`` starts them again when not even their supervisors are left."""
        if not self._processes:
            return
        if time.monotonic() >= self._targets_due:
            self._publish()
        final = all(process.returncode == CANNOT_WORK for process in self._processes)
        if revive and self._gone and not final and self._starts < MOST_STARTS:
            if not self._steps.are_over(self._processes):
                return
            self._starts += 1
            log_line("The sidecars are gone; starting them again")
            self._start()

    def await_final_values(self, timeout_s: float) -> None:
        """Wait until every sidecar that runs has written its last status."""
        if not self._processes:
            return
        end = time.monotonic() + timeout_s
        waiting = set(read_sidecars(self._facts.run_dir, self._facts.attempt))
        while time.monotonic() < end:
            for node in sorted(waiting):
                status = run_files.read_json(self._facts.run_dir / run_files.STATUS_DIR / f"{node}.json") or {}
                if status.get("final") and status.get("attempt") == self._facts.attempt:
                    waiting.discard(node)
            if not waiting or self._gone:
                return
            self._sleep(0.1)
            if self._hurried() and timeout_s > 1.0:
                end = min(end, time.monotonic() + 1.0)
        log_line(f"No final values in time from the sidecars on {', '.join(sorted(waiting))}")

    def _kill(self) -> None:
        """Those that do not end, each with its supervisor: here these lead a group of processes."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        end = time.monotonic() + KILLED_S
        while not self._gone and time.monotonic() < end:
            self._sleep(0.05)

    def end(self, *, hurry: bool) -> None:
        """Let them linger for a last scrape, then end them; the targets go with them."""
        end = time.monotonic() + (0.5 if hurry else self._plan.linger_s + END_S)
        asked = False
        while not self._gone:
            if (time.monotonic() > end or self._hurried()) and not asked:
                asked = True
                self._steps.end_sidecars(self._processes)
                end = time.monotonic() + END_S
            elif asked and time.monotonic() > end:
                self._kill()
                break
            self._sleep(0.2)
        self._targets.remove()
