"""Report that the orchestrator of a job does not respond, and wait until the job needs one.

    python -I -B -m launcher.run.silent_orchestrator RUN_DIR [--local] --pid PID --silent S

PID is the orchestrator, which has given no sign of life for S seconds. Ends with status 0 when the job cannot go on
without an orchestrator. The guard then replaces it, or ends this process if the orchestrator responds again.
This is a process of its own because the run directory may hang, which the guard must survive.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.errors import ManifestError
from exporter.contract.events import EventLog
from exporter.contract.records import RecordError
from exporter.machine.procfs import read_process_stat
from exporter.workers.exit_reason import evidence_from_record
from launcher.plan.plan import PLAN_FILE, Plan, TaskPlan
from launcher.run.job_log import log_line
from launcher.run.job_state import attempt_optional
from launcher.run.orchestrator import load_plan
from launcher.run.tasks import is_awaited
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import OrchestratorRecord, read_job_state, read_orchestrator

POLL_S = 2.0
_STATES = {"stopped": "it is stopped (SIGSTOP)", "disk_sleep": "it waits in the kernel"}


class SilentOrchestrator:
    """What a job needs its silent orchestrator for."""

    def __init__(self, plan: Plan, run_dir: Path, pid: int) -> None:
        self._plan, self._run_dir, self._pid = plan, run_dir, pid
        self._ends: dict[str, int | None] = {}  # exit statuses of ended runs, by stem of their records

    def report(self, silent_s: float) -> None:
        """Write the silence to the log, the events and ``state.json``; the orchestrator writes the last anew."""
        stat = read_process_stat(self._pid)
        how = _STATES.get(stat.state if stat is not None else "", "it is busy or waits")
        text = f"The orchestrator (process {self._pid}) has not responded for {silent_s:g} s: {how}"
        log_line(f"{text}. The workers continue; it is replaced when the job needs it")
        events = EventLog(self._run_dir / run_files.EVENTS_FILE, job_id_of(self._run_dir))
        events.write("orchestrator silent", level="warning", pid=self._pid, silent_s=round(silent_s, 1), detail=how)
        record = read_orchestrator(self._run_dir)
        attempt = 0 if record is None else record.attempt
        state = {**read_job_state(self._run_dir, attempt), "attempt": attempt}
        since = {"orchestrator_silent_since": time.time() - silent_s}
        attempt_optional(
            f"write {run_files.STATE_FILE}",
            lambda: run_files.write_json(self._run_dir / run_files.STATE_FILE, {**state, **since}),
        )

    def find_need(self) -> str | None:
        """Describe why the job cannot go on without an orchestrator; None while it can. Raises OSError."""
        record = self._read_record()
        if record is None or record.pid != self._pid:
            return "the job has not begun"
        if (run_files.read_json(self._run_dir / run_files.STATE_FILE) or {}).get("phase") in ("completing", "finished"):
            return "the job is ending"
        names = set(os.listdir(self._run_dir / run_files.WORKERS_DIR))
        ended: list[TaskPlan] = []
        for planned in self._plan.tasks:
            task = planned.task
            stems = (
                run_files.record_name(task.worker, task.rank, record.attempt, restart) for restart in itertools.count()
            )
            runs = list(itertools.takewhile(lambda stem: {f"{stem}.start.json", f"{stem}.exit.json"} & names, stems))
            if not runs:
                return f"{task.worker} rank {task.rank} has not been started"
            if f"{runs[-1]}.exit.json" not in names:
                continue
            ended.append(planned)
            if planned.critical and (planned.service or self._read_code(runs[-1]) != 0):
                return f"{task.worker} rank {task.rank} has failed"
        awaited = [planned for planned in self._plan.tasks if is_awaited(planned)] or self._plan.tasks
        return "its workers have ended" if all(planned in ended for planned in awaited) else None

    def _read_record(self) -> OrchestratorRecord | None:
        """The record of the last orchestrator; None if it is absent or damaged. Raises OSError."""
        try:
            body = _read_object(self._run_dir / run_files.ORCHESTRATOR_FILE)
            return OrchestratorRecord.from_json(body, run_files.ORCHESTRATOR_FILE)
        except (FileNotFoundError, RecordError):
            return None

    def _read_code(self, stem: str) -> int | None:
        """Exit status of an ended run; None if its record has none. Raises OSError."""
        if stem not in self._ends:
            record = _read_object(self._run_dir / run_files.WORKERS_DIR / f"{stem}.exit.json")
            self._ends[stem] = evidence_from_record(record).code
        return self._ends[stem]


def _read_object(path: Path) -> dict[str, object]:
    """The object in a file, empty if it is damaged. Raises OSError: a file that cannot be read says nothing."""
    try:
        value = json.loads(run_files.read_json_text(path))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def main(arguments: list[str]) -> int:
    """Watch over the run directory given as first argument; return the exit status."""
    run_dir, guard = Path(arguments[0]).resolve(), os.getppid()
    options = dict(itertools.pairwise(arguments))
    job: SilentOrchestrator | None = None
    while os.getppid() == guard:
        with contextlib.suppress(OSError, ManifestError):  # a file server may fail for a moment
            if job is None:
                run_files.read_json_text(run_dir / PLAN_FILE)  # without it load_plan ends this process
                job = SilentOrchestrator(load_plan(run_dir), run_dir, int(options["--pid"]))
                job.report(float(options["--silent"]))
            if (need := job.find_need()) is not None:
                log_line(f"The job needs an orchestrator: {need}")
                return 0
        time.sleep(POLL_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
