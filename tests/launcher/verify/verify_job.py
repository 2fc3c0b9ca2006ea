"""A job with hand-written files, and the results of its verification."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.clock import SystemClock
from exporter.contract.manifest import read_manifest
from exporter.contract.status import WorkerStatus
from exporter.machine import file_host
from exporter.machine.file_host import FileWatchHost
from exporter.progress.work import JobWork, job_work
from launcher.verify import files
from launcher.verify.verify import FinishedJob, VerificationCheck, verify_results
from tests.support.launcher import settled_run_dir

SAMPLES = Path(__file__).parents[2] / "exporter" / "files" / "formats" / "samples"
START = time.time() - 3600.0
"""Start of the job. Files are newer unless a test makes them older."""
COMPLETED = ("completed", "completed")


class Job:
    """The run directory of a job with two workers and hand-written files."""

    def __init__(self, folder: Path, *, items: int | None = 100, role: str = "worker", count: int = 2, **over: Any):
        self.items = items
        over = {"patterns": {"output": "output_*", "checkpoints": "checkpoint_*"}, **over}
        progress = {"total_items": items} if items else {}
        workers = [{"role": role, "count": count, "command": "x"}]
        self.path = settled_run_dir(folder, {"name": "job", "workers": workers, "progress": progress, **over})
        self.work = self.of(*(items // count if items else None for _ in range(count)))
        self.idle: tuple[int, ...] = ()
        self.busy: tuple[int, ...] = ()
        self.logs: tuple[Path, ...] = ()

    @staticmethod
    def of(*positions: int | None, unit: str | None = None) -> JobWork:
        """The work of workers at these positions."""
        return job_work(
            WorkerStatus(rank=rank, items=done, items_expected=done, items_processed=done, unit=unit)
            for rank, done in enumerate(positions)
        )

    def write(self, name: str, content: bytes | str, age_s: float = 0.0) -> "Job":
        """Write a file of the job, `age_s` seconds old."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        written = time.time() - age_s
        os.utime(path, (written, written))
        return self

    def lines(self, rank: int, count: int, end: str = "", age_s: float = 0.0) -> "Job":
        """Write the output of a worker: `count` records, then `end`."""
        return self.write(f"output_worker_{rank}.jsonl", "".join(f'{{"id": {n}}}\n' for n in range(count)) + end, age_s)

    def checks(self, **over: Any) -> dict[str, VerificationCheck]:
        """All checks, by name."""
        given: dict[str, Any] = {"work": self.work, "idle_ranks": self.idle, "busy_ranks": self.busy, "since": START}
        given |= {"logs": self.logs, "exit_reasons": COMPLETED, **over}
        how: dict[str, Any] = {"host": FileWatchHost(SystemClock(), use_helper=False)}
        how |= {name: given.pop(name) for name in ("host", "out_of_time", "progress") if name in given}
        found = verify_results(FinishedJob(read_manifest(self.path), **given), **how)
        assert len({check.name for check in found}) == len(found)
        return {check.name: check for check in found}

    def result(self, name: str, **over: Any) -> tuple[bool | None, str]:
        """Result and detail of one check."""
        check = self.checks(**over)[name]
        return check.passed, check.detail


def shortest_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """End each slice of work as early as possible, in this process, whatever other tests have mounted."""
    monkeypatch.setattr(files, "SLICE_S", 0.0)
    monkeypatch.setattr(file_host, "has_remote_mount", lambda _mounts: False)


def out_of_time_after(polls: int) -> Callable[[], bool]:
    """Returns a function that says "out of time" after `polls` calls."""
    calls = [0]

    def out_of_time() -> bool:
        calls[0] += 1
        return calls[0] > polls

    return out_of_time
