"""Start, publish, restart and end the sidecars of a job.

Problems here are logged. They never delay or fail the job.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable

from exporter.contract import run_files
from exporter.contract.status import NodeStatus
from exporter.logs.log_files_reader import read_last_bytes
from launcher.plan.plan import Plan, RunFacts
from launcher.run.job_log import log_line
from launcher.rundir.targets import (
    SidecarRecord,
    TargetFiles,
    engine_target_groups,
    metrics_endpoint,
    read_sidecars,
    sidecar_target_groups,
)
from launcher.steps.steps import Steps

START_TIMEOUT_S = 30.0  # wait for the sidecars to listen; then the job continues without them
POLL_S, MOST_POLL_S = 0.05, 0.5  # between two polls for them: this for each node, whose file is read, up to the latter
TARGETS_INTERVAL_S = 5.0  # between two searches for late or restarted sidecars, which read one file per node
KILL_WAIT_S = 2.0  # wait for the end of a killed sidecar: it may hang in a system call
END_S = 5.0
MOST_RESTARTS = 3  # within this time: a sidecar that ends at once is not started over and over
RESTARTS_WITHIN_S = 3600.0
CONFIGURATION_ERROR = 2  # exit status for a configuration error: a restart would fail in the same way


class Sidecars:
    """One sidecar per node. Signals and ended children wake ``sleep``; ``is_ending`` is true after a signal."""

    def __init__(
        self,
        plan: Plan,
        facts: RunFacts,
        steps: Steps,
        sleep: Callable[[float], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._facts = facts
        self._steps = steps
        self._sleep = sleep
        self._is_ending = is_ending
        self._targets = TargetFiles(facts.run_dir, plan.target_dir)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._restarts: list[float] = []  # on the monotonic clock, of the last hour
        self._paused = False  # whether there were too many, which is in the log
        self._targets_due = 0.0
        self._are_targets_logged = True  # as last written
        # tasks whose programs serve metrics, by rank
        self._engines = {planned.task.rank: planned.task for planned in plan.tasks if metrics_endpoint(planned)}
        self._started_engines: set[int] = set()  # ranks of tasks with metrics that have started

    @property
    def _have_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def start(self) -> None:
        """Start the sidecars and wait up to ``START_TIMEOUT_S`` until they listen."""
        if not self._plan.monitoring:
            log_line("No sidecars: monitoring.enabled is false")
            return
        if not self._start():
            return
        end, hosts = time.monotonic() + START_TIMEOUT_S, self._facts.hosts
        poll_s = min(MOST_POLL_S, POLL_S * len(hosts))
        while not self._is_ending():
            listening = self._publish()
            is_complete, missing = len(listening) >= len(hosts), sorted(set(hosts) - set(listening))
            if not (is_complete or self._have_ended or time.monotonic() > end):
                self._sleep(poll_s)
                continue
            self._log_targets(listening)
            if is_complete:
                log_line("The sidecar listens" if len(listening) == 1 else f"All {len(listening)} sidecars listen")
            elif self._have_ended:
                log_line(
                    f"The sidecars could not run on {', '.join(missing)}; "
                    f"the job runs without monitoring there{self._last_log_line()}"
                )
            else:
                log_line(f"No sidecar listens yet on {', '.join(missing)}; the job continues without waiting for them")
            return

    def _start(self) -> bool:
        try:
            self._processes = self._steps.start_sidecars()
        except OSError as error:
            log_line(f"The sidecars cannot be started: {error}; the job runs without monitoring")
            return False
        return True

    def _publish(self) -> dict[str, SidecarRecord]:
        """Publish sidecars that listen and engines that have started; return the sidecars by node."""
        found = read_sidecars(self._facts.run_dir, self._facts.attempt)
        groups = sidecar_target_groups(found.values(), self._plan.manifest.notify)
        if groups:  # the records of the sidecars contain the job's labels
            groups += engine_target_groups(self._plan, self._facts, groups[0].labels, self._find_started_engines())
        if self._targets.publish(groups):
            self._are_targets_logged = False
        while self._targets.problems:
            log_line(self._targets.problems.pop())
        self._targets_due = time.monotonic() + TARGETS_INTERVAL_S
        return found

    def _log_targets(self, found: dict[str, SidecarRecord]) -> None:
        """Log all targets, unless they are the same as before."""
        if not self._are_targets_logged:
            self._are_targets_logged = True
            engines = f" and {len(self._started_engines)} engines" if self._started_engines else ""
            log_line(f"Prometheus targets: {', '.join(record.address for record in found.values())}{engines}")

    def _find_started_engines(self) -> set[int]:
        """Ranks of the tasks with own metrics that have a start record."""
        folder = self._facts.run_dir / run_files.WORKERS_DIR
        for rank, task in self._engines.items():
            if rank not in self._started_engines:
                record = f"{run_files.record_name(task.worker, rank, self._facts.attempt, 0)}.start.json"
                if (folder / record).exists():
                    self._started_engines.add(rank)
        return self._started_engines

    def _last_log_line(self) -> str:
        """Last line of the first sidecar log that has one, as a suffix for a message."""
        for path in sorted(self._facts.run_dir.glob("*sidecar*.log")):
            lines = read_last_bytes(path, 4096).decode("utf-8", "replace").splitlines()
            if lines:
                return f": {lines[-1].strip()} (in {path.name})"
        return ""

    def maintain(self, *, may_restart: bool) -> None:
        """Publish targets when due; with ``may_restart``, restart the sidecars if their supervisors have ended too."""
        if not self._processes:
            return
        if time.monotonic() >= self._targets_due:
            self._log_targets(self._publish())
        final = all(process.returncode == CONFIGURATION_ERROR for process in self._processes)
        if may_restart and self._have_ended and not final:
            now = time.monotonic()
            self._restarts = [at for at in self._restarts if now - at < RESTARTS_WITHIN_S]
            if len(self._restarts) >= MOST_RESTARTS:
                if not self._paused:
                    log_line(f"The sidecars have ended again, after {MOST_RESTARTS} restarts within an hour; waiting")
                self._paused = True
                return
            if not self._steps.sidecars_have_no_leftovers(self._processes):
                return
            self._restarts.append(now)
            self._paused = False
            log_line("The sidecars have ended; restarting them")
            self._start()

    def await_final_values(self, timeout_s: float, repeat_writes: Callable[[], None]) -> None:
        """Wait until every sidecar has written its final status, once it has read that the workers have ended."""
        if not self._processes:
            return
        end = time.monotonic() + timeout_s
        waiting = set(read_sidecars(self._facts.run_dir, self._facts.attempt))
        while time.monotonic() < end:
            for node in sorted(waiting):
                status = NodeStatus.read_valid(self._facts.run_dir / run_files.STATUS_DIR / f"{node}.json")
                if status is not None and status.final and status.attempt == self._facts.attempt:
                    waiting.discard(node)
            if not waiting or self._have_ended:
                return
            self._sleep(0.1)
            repeat_writes()
            if self._is_ending() and timeout_s > 1.0:
                end = min(end, time.monotonic() + 1.0)
        log_line(f"No final values in time from the sidecars on {', '.join(sorted(waiting))}")

    def _kill(self) -> None:
        """Kill remaining sidecars with their supervisors, which lead process groups here."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        end = time.monotonic() + KILL_WAIT_S
        while not self._have_ended and time.monotonic() < end:
            self._sleep(0.05)

    def end(self, *, hurry: bool) -> None:
        """Let the sidecars linger for a last scrape, end them, and remove their targets."""
        end = time.monotonic() + (0.5 if hurry else self._plan.linger_s + END_S)
        asked = False
        while not self._have_ended:
            if (time.monotonic() > end or self._is_ending()) and not asked:
                asked = True
                self._steps.end_sidecars(self._processes)
                end = time.monotonic() + END_S
            elif asked and time.monotonic() > end:
                self._kill()
                break
            self._sleep(0.2)
        self._targets.remove()
