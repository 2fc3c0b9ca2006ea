"""Entries of workers, job views and run directories, with a default for everything that a test does not set."""

import json
import os
from pathlib import Path
from typing import Any, Self

from exporter.contract import run_files
from exporter.contract.manifest import read_manifest
from exporter.contract.process_identity import read_start_ticks
from exporter.contract.records import Record
from exporter.contract.report import Report
from launcher.report.exit_reasons import ExitReasonFinder
from launcher.report.inputs import KnownEnds, ReportPace
from launcher.report.report import build_report
from launcher.report.text import render_report
from launcher.report.verification import verify_again
from tests.support.launcher import read_json, settled_run_dir

NOW = 1763784821.0  # 2025-11-22 04:13:41 UTC
START = 1763784000.0  # 2025-11-22 04:00:00 UTC
KILLED: dict[str, Any] = {"code": None, "signal": 9}
TERM_SENT: dict[str, Any] = {"code": None, "signal": 15, "signals": [[START + 95, 15, 1]]}


def worker_end(reason: str, code: int | None = None, signal: str | None = None, **over: Any) -> dict[str, Any]:
    """The end of one run of a worker."""
    evidence = f"killed by {signal}" if signal else f"exit status {code}"
    end = {"reason": reason, "code": code, "signal": signal, "time": NOW - 30, "restart": 0, "evidence": [evidence]}
    return {**end, **over}


def dead(reason: str, code: int | None, signal: str | None = None) -> dict[str, Any]:
    """What a worker's end changes in its entry."""
    return {"up": False, "state": "dead", "exit": worker_end(reason, code, signal), "rate": None, "eta": None}


def worker_entry(rank: int = 0, **over: Any) -> dict[str, Any]:
    """A running worker in a status, view or report."""
    return {
        "worker": f"worker_w{rank}",
        "role": "worker",
        "rank": rank,
        "node": f"cn0{rank // 2}",
        "gpus": [rank % 2],
        "up": True,
        "state": "running",
        "start": NOW - 600,
        "restarts": 0,
        "exits": [],
        "exit": None,
        "items": 750 + rank,
        "items_expected": 1500,
        "items_processed": 750 + rank,
        "rate": 12.5,
        "average_rate": 12.0,
        "eta": {"seconds": 60.0, "low": 55.0, "high": 75.0},
        "last_progress": NOW - 1.2,
        "stalled": False,
        "rss_bytes": int(3.2 * 1024**3),
        "pid": 1000 + rank,
        **over,
    }


def job_view(**over: Any) -> dict[str, Any]:
    """The view of a running job with two workers."""
    return {
        "schema": 1,
        "time": NOW,
        "job_id": "4459",
        "job_name": "embed-v2",
        "user": "ana",
        "state": "RUNNING",
        "phase": "running",
        "start": NOW - 3725,
        "end": None,
        "time_limit_s": 7200.0,
        "limit_end": NOW - 3725 + 7200,
        "items": 4506,
        "items_expected": 9000,
        "items_processed": 4600,
        "rate": 37.5,
        "eta": {"seconds": 125.0, "low": 100.0, "high": 3700.0},
        "time_limit_met_probability": 0.995,
        "first_to_stop": None,
        "workers": [worker_entry(0), worker_entry(1)],
        "outputs": [],
        "filesystems": [],
        "events": [],
        "launch": {"verified": True, "lacking": []},
        "nodes": [],
        "cause": None,
        "report": None,
        "run_dir": "/logs/4459_embed-v2_20251122_041341",
        **over,
    }


def orchestrator_record(**over: Any) -> dict[str, Any]:
    """The record of an orchestrator of a local job, with the pid of the test process."""
    pid = os.getpid()
    record = {"schema": 1, "job_id": "local-1", "pid": pid, "start_ticks": read_start_ticks(pid), "attempt": 0}
    return {**record, "host": os.uname().nodename, "hosts": ["here"], "start": 1000.0, "local": True, **over}


class RunDir:
    """The hand-written run directory of a job that has ended on one node."""

    def __init__(self, folder: Path, count: int = 2, **over: Any) -> None:
        spec = {"name": "job", "workers": [{"count": count, "command": "true"}], **over}
        self.path = settled_run_dir(folder, spec)
        facts = {"schema": 1, "job_id": "4459", "pid": 1, "host": "h", "hosts": ["cn01"], "attempt": 0, "start": START}
        self.write("orchestrator.json", facts)

    def write(self, name: str, content: object) -> Self:
        """Write a text, or an object as JSON."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return self

    def edit(self, name: str, **changes: Any) -> Self:
        """Change keys of a JSON file."""
        return self.write(name, {**read_json(self.path / name), **changes})

    def ended(self, rank: int, restart: int = 0, *, end: float = 100.0, log: str = "", **facts: Any) -> Self:
        """Write the records and the log of one run of a worker. It ended at ``START + end``."""
        (worker,) = (task.worker for task in read_manifest(self.path).tasks if task.rank == rank)
        stem = f"workers/{run_files.record_name(worker, rank, 0, restart)}"
        base = {"schema": 1, "worker": worker, "rank": rank, "pid": 7, "start": START + 1}
        record = {**base, "end": START + end, "code": 0, "signal": None, "oom_kills": 0, "signals": [], **facts}
        self.write(f"{stem}.start.json", base).write(f"{stem}.exit.json", record)
        return self.write(f"cn01_{worker}{f'_r{restart}' if restart else ''}.out", log)

    def stop(self, reason: str, cause: str, at: float = 90.0, **over: Any) -> Self:
        """Write the stop of the job."""
        notice: dict[str, object] = {"reason": reason, "cause": cause, "time": START + at, **over}
        run_files.write_job_state(str(self.path), "completing", notice)
        return self

    def status(self, *workers: dict[str, Any], **over: Any) -> Self:
        """Write the status of the sidecar."""
        return self.write("status/cn01.json", {"attempt": 0, "workers": list(workers), **over})

    def report(
        self,
        *,
        quick: bool = False,
        slurm_state: str | None = None,
        finder: ExitReasonFinder | None = None,
        **over: Any,
    ) -> dict[str, Any]:
        """The JSON of the report."""
        known, pace = KnownEnds(slurm_state=slurm_state, finder=finder), ReportPace(is_quick=quick)
        given = {"now": START + 200, "ended": True, "known": known, "pace": pace, **over}
        return build_report(self.path, **given).to_json()

    def verify_again(self, report: dict[str, Any]) -> dict[str, Any]:
        """The JSON of this report with its files verified again."""
        return verify_again(self.path, Report.from_json(report)).to_json()


def restartable(folder: Path, **over: Any) -> RunDir:
    """A job with two workers. Each may be restarted twice."""
    workers = [{"count": 2, "command": "true", "restart": {"max": 2, "backoff": 1}}]
    return RunDir(folder, workers=workers, **over)


def as_json(record: Record) -> dict[str, Any]:
    """The JSON of a record, for tests that look into it."""
    return record.to_json()


def rendered(report: dict[str, Any]) -> str:
    """The text of a report, from its JSON."""
    return render_report(Report.from_json(report))
