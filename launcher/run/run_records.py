"""Start and exit records of task runs, as the orchestrator reads and completes them."""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from exporter.contract import run_files
from launcher.plan.plan import RunFacts, TaskPlan
from launcher.run.job_state import Stop
from launcher.rundir.job_records import AbandonedWorkers
from launcher.steps.steps import RunningTask


class RunRecords:
    """Start and exit records of one attempt."""

    def __init__(self, facts: RunFacts) -> None:
        self._folder = facts.run_dir / run_files.WORKERS_DIR
        self._attempt = facts.attempt
        self._not_started: set[str] | None = None  # stems of first runs without a record so far

    def path(self, planned: TaskPlan, restart: int, kind: str) -> Path:
        """Path of the ``start`` or ``exit`` record of a run."""
        return self._folder / self._name(planned, restart, kind)

    def _name(self, planned: TaskPlan, restart: int, kind: str) -> str:
        # no Path for names that are polled: it interns each, and the table of those grows to 1 MB within an hour
        return f"{run_files.record_name(planned.task.worker, planned.task.rank, self._attempt, restart)}.{kind}.json"

    def find_written(self, wanted: Collection[str]) -> set[str]:
        """Return which of these records exist. This also refreshes a network file system's view. Raises OSError.

        The names of all runs are never in memory at once: a job may have thousands.
        """
        with os.scandir(self._folder) as entries:
            return {entry.name for entry in entries if entry.name in wanted}

    def find_ended(self, runs: Mapping[int, RunningTask]) -> list[int]:
        """Return the ranks of those of these runs that have an exit record. Raises OSError."""
        ranks = {self._name(running.planned, running.restart, "exit"): rank for rank, running in runs.items()}
        written = self.find_written(ranks)
        return [rank for name, rank in ranks.items() if name in written]

    def have_started(self, tasks: tuple[TaskPlan, ...]) -> bool:
        """Whether every task has left a first record; ``tasks`` must be the same in each call."""
        if self._not_started is None:
            of_tasks = (planned.task for planned in tasks)
            self._not_started = {run_files.record_name(task.worker, task.rank, self._attempt, 0) for task in of_tasks}
        if self._not_started:
            first = {f"{stem}.{kind}.json": stem for stem in self._not_started for kind in ("start", "exit")}
            try:
                self._not_started -= {first[name] for name in self.find_written(first)}
            except OSError:
                return False
        return not self._not_started

    def read_exit(self, running: RunningTask) -> dict[str, object] | None:
        """Return the exit record of a run, or None while it is not visible."""
        return run_files.read_json(self.path(running.planned, running.restart, "exit"))

    def save_exit(self, planned: TaskPlan, restart: int, facts: Mapping[str, object]) -> None:
        """Write the exit record of a run that has none; later runs are found through it. Raises OSError."""
        task = planned.task
        body = {"schema": run_files.RECORD_SCHEMA, "worker": task.worker, "rank": task.rank}
        body |= {"code": None, "signal": None, **facts}
        run_files.write_json_if_absent(self.path(planned, restart, "exit"), body)

    def save_findings(self, running: RunningTask, facts: Mapping[str, object]) -> None:
        """Write findings next to the record of a run, unless the sidecar did. Raises OSError."""
        path = self.path(running.planned, running.restart, "found")
        run_files.write_json_if_absent(path, {"schema": run_files.RECORD_SCHEMA, **facts})

    def save_stop(self, running: RunningTask, stop: Stop, like: RunningTask | None = None) -> None:
        """Write why we end one run while the job continues. Raises OSError.

        If another run has the same record, ``like`` names it, and both share one file: hundreds of durable writes to a
        file server take many seconds.
        """
        path = self.path(running.planned, running.restart, "stop")
        if like is not None:
            with contextlib.suppress(OSError):  # it has none, or its file system has no hard links
                os.link(self.path(like.planned, like.restart, "stop"), path)
                return
        run_files.write_json(path, {"stop": stop.to_json()})

    def save_abandoned(self, workers: Mapping[str, str]) -> None:
        """Write the workers (name -> role) that failed while the job continues. Raises OSError."""
        record = AbandonedWorkers(attempt=self._attempt, workers=workers)
        run_files.write_json(self._folder.parent / run_files.ABANDONED_FILE, record.to_json())

    def derive_exit(
        self,
        running: RunningTask,
        code: int,
        *,
        is_exact: bool,
        is_node_lost: bool,
        was_signalled: bool = False,
        may_lack_records: bool = False,
    ) -> dict[str, object]:
        """Derive an exit record from the status of a step; ``is_exact`` if it is the task's own status.

        The status means nothing if the node is ``is_node_lost`` (srun 24.11 then exits with its own 1), or if the task
        was ``was_signalled`` to end before it started. If the run directory ``may_lack_records``, a missing record
        means nothing, and the status is all that is known.
        """
        service = {"service": True} if running.planned.service else {}
        if may_lack_records and not is_node_lost:
            number = -code if code < 0 else 0 if is_exact else max(0, code - 128)  # srun adds 128
            status = {"signal": number} if number else {"code": code}
            return {**status, "source": "step", "end": time.time(), **service}
        started = self.path(running.planned, running.restart, "start").exists()
        if is_node_lost or (was_signalled and not started):
            return {"end": time.time()}
        if not started and code > 0 and code not in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return {"error": f"its step did not start (status {code}); see log.err", "end": time.time()}
        if code < 0 or code > 128 or (code == 0 and not is_exact):
            # srun's status does not show who sent a signal or which one, and srun itself may have been killed
            killed = started and code == (-signal.SIGKILL if is_exact else 128 + signal.SIGKILL)
            return {"end": time.time(), **({"wrapper": "was killed by SIGKILL"} if killed else {})}
        return {"code": code, "end": time.time(), **service}


def have_all_runs_ended(run_dir: Path, attempt: int) -> bool:
    """Whether every run of this attempt with a start record also has its exit record."""
    try:
        names = set(os.listdir(run_dir / run_files.WORKERS_DIR))
    except OSError:
        return True
    stems = (name.removesuffix(".start.json") for name in names if name.endswith(".start.json"))
    return all(f"{stem}.exit.json" in names for stem in stems if f"_a{attempt}_r" in stem)
