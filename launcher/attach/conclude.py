"""Write the report of a job that others started, as the last act of its sidecar.

    python -I -m launcher.attach.conclude RUN_DIR [--stopped-by SIGNAL] [--seconds LEFT]

SIGNAL ended the sidecar, which has LEFT seconds until SIGKILL. Returns the exit status of the report, as for a launched
job. If workers still run, only the watching has ended.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.events import EventLog
from exporter.contract.identity import identify
from exporter.contract.manifest import read_manifest
from exporter.contract.report import Report, Stop
from launcher.report.attached import launch_report
from launcher.report.inputs import KnownEnds, ReportPace
from launcher.report.report import build_report, write_report
from launcher.report.state import EXIT_STATUS
from launcher.report.text import render_report
from launcher.run.end_of_job import FINAL_VALUES_S, save_run_history, verification_s
from launcher.run.job_state import attempt_optional
from launcher.rundir.job_records import OrchestratorRecord, read_orchestrator
from launcher.rundir.statuses import read_statuses
from launcher.watch.text import printable_line

INTERRUPTED = 130
FINAL_VALUES_AFTER_SIGNAL_S = 4.0  # wait for the other nodes, which got the signal at the same time
MARGIN_S = 2.0  # kept free before SIGKILL for writing the report
POLL_S = 0.1


class Conclusion:
    """The end of one watch."""

    def __init__(self, run_dir: Path, stopped_by: int | None, seconds: float | None) -> None:
        self._run_dir = run_dir
        self._manifest = read_manifest(run_dir)
        record = read_orchestrator(run_dir) or OrchestratorRecord()
        self._attempt = record.attempt
        self._hosts = record.hosts
        self._events = EventLog(run_dir / run_files.EVENTS_FILE, record.job_id or "")
        self._time_limit_end = identify(self._manifest, os.environ, socket.gethostname()).end
        self._stopped_by = stopped_by
        left = verification_s(self._time_limit_end, time.time())
        self._deadline = time.monotonic() + (left if seconds is None else min(left, seconds - MARGIN_S))

    def hurry(self, *_: object) -> None:
        """Handle a signal: end the verification soon."""
        self._deadline = time.monotonic()

    def run(self) -> int:
        """Write and print the report; return the exit status."""
        self._await_final_values()
        launch, now = launch_report(read_statuses(self._run_dir, self._attempt)), time.time()
        if self._stopped_by is not None:
            so_far = build_report(self._run_dir, now=now, ended=False, launch=launch)
            running = sum(worker.up for worker in so_far.workers)
            if running or not any(worker.start for worker in so_far.workers):
                return self._end_watch(so_far, running, now)
        report = build_report(
            self._run_dir,
            now=now,
            ended=True,
            known=KnownEnds(job_end=self._time_limit_end),
            launch=launch,
            pace=ReportPace(out_of_time=lambda: time.monotonic() > self._deadline),
        )
        attempt_optional("write the report", lambda: write_report(self._run_dir, report))
        attempt_optional("save the run history", lambda: save_run_history(self._manifest, report))
        self._events.write("job ended", state=report.state, items=report.items)
        attempt_optional(
            "publish the end",
            lambda: run_files.write_job_state(
                str(self._run_dir), "finished", workers_ended=True, attempt=self._attempt
            ),
        )
        text = [printable_line(line) for line in render_report(report).splitlines()]
        try:
            print("\n".join([*text, "", f"run directory: {self._run_dir}"]), flush=True)
        except (OSError, UnicodeError):
            pass  # stdout is closed or the locale cannot encode it; the file has everything
        return report.exit_status

    def _await_final_values(self) -> None:
        """Wait for the sidecars of the other nodes."""
        limit_s = FINAL_VALUES_S if self._stopped_by is None else FINAL_VALUES_AFTER_SIGNAL_S
        end = min(self._deadline, time.monotonic() + limit_s)
        while time.monotonic() < end:
            statuses = read_statuses(self._run_dir, self._attempt)
            if all(host in statuses and statuses[host].final for host in self._hosts):
                return
            time.sleep(POLL_S)

    def _end_watch(self, so_far: Report, running: int, now: float) -> int:
        """Write the report of a job that goes on without its sidecar; return the exit status."""
        workers = "1 worker was" if running == 1 else f"{running} workers were"
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        cause = f"the sidecar was stopped at {clock}, while {workers} running"
        report = so_far.replace(
            state="UNKNOWN",
            exit_status=EXIT_STATUS["UNKNOWN"],
            cause=None,
            stopped=Stop(reason="unknown", cause=cause, time=now),
            end=now,
        )
        attempt_optional("write the report", lambda: write_report(self._run_dir, report))
        print("gpujob-exporter: the sidecar was stopped; the job itself was not touched", file=sys.stderr)
        return INTERRUPTED if self._stopped_by == signal.SIGINT else 0


def main(arguments: list[str]) -> int:
    """Conclude the watch of a run directory; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stopped-by", type=int)
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args(arguments)
    conclusion = Conclusion(given.run_dir.resolve(), given.stopped_by, given.seconds)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, conclusion.hurry)
    return conclusion.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
