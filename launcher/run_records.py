"""The records of the runs of a job's tasks, as the orchestrator reads and completes them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from exporter import records
from launcher.plan import RunFacts, TaskPlan
from launcher.steps import Running


class RunRecords:
    """Start and exit records of one attempt."""

    def __init__(self, facts: RunFacts) -> None:
        self._folder = facts.run_dir / records.WORKERS_DIR
        self._attempt = facts.attempt

    def path(self, planned: TaskPlan, restart: int, kind: str) -> Path:
        """Where the ``start`` or ``exit`` record of a run is."""
        stem = records.record_name(planned.task.worker, planned.task.rank, self._attempt, restart)
        return self._folder / f"{stem}.{kind}.json"

    def refresh(self) -> None:
        """Look into the folder, so that a network file system learns of new files; raises OSError."""
        os.listdir(self._folder)

    def have_started(self, tasks: tuple[TaskPlan, ...]) -> bool:
        """Whether every task has left a first record."""
        try:
            names = set(os.listdir(self._folder))
        except OSError:
            return False
        kinds = ("start", "exit")
        return all(any(self.path(planned, 0, kind).name in names for kind in kinds) for planned in tasks)

    def read_exit(self, running: Running) -> dict[str, Any] | None:
        """The record of an end, as soon as it can be seen here."""
        return records.read_json(self.path(running.planned, running.restart, "exit"))

    def keep(self, planned: TaskPlan, restart: int, facts: dict[str, Any]) -> None:
        """Write what is known of a run without a record: later runs are found by those before. Raises OSError."""
        task = planned.task
        body: dict[str, Any] = {"schema": records.RECORD_SCHEMA, "worker": task.worker, "rank": task.rank}
        body |= {"code": None, "signal": None, **facts}
        records.write_json_once(self.path(planned, restart, "exit"), body)

    def keep_found(self, running: Running, facts: dict[str, Any]) -> None:
        """Write what was found beside the record of a run, unless its sidecar has. Raises OSError."""
        path = self.path(running.planned, running.restart, "found")
        records.write_json_once(path, {"schema": records.RECORD_SCHEMA, **facts})

    def from_status(self, running: Running, code: int, *, exact: bool) -> dict[str, Any]:
        """What the status of a step tells when the wrapper has left no record; ``exact`` if it is the task's own."""
        started = self.path(running.planned, running.restart, "start").exists()
        if not started and code > 0 and code not in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return {"error": f"its step did not start (status {code}); see log.err", "end": time.time()}
        if code < 0 or code > 128 or (code == 0 and not exact):
            return {"end": time.time()}  # who ended it with which signal is not known from srun's status
        return {"code": code, "end": time.time()}
