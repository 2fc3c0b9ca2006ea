"""Run the points of a sweep on this machine, a few at a time, each under its own orchestrator."""

import contextlib
import itertools
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from launcher.check.preflight import count_gpus, gpu_positions
from launcher.errors import LauncherError
from launcher.registry.entries import register_job
from launcher.rundir import rundir
from launcher.rundir.job_records import ProcessRecord
from launcher.steps.local_steps import LocalJob
from launcher.steps.steps import ENDING_SIGNALS
from launcher.sweep.directory import SweepRecord, with_runs, write_record
from launcher.sweep.plan import PlannedPoint, PlannedSweep
from launcher.sweep.submit import make_sweep_dir, new_record, settle_point

ReportLine = Callable[[str], None]
POLL_S = 0.1  # between two looks whether a point has ended


def begin_sweep(planned: PlannedSweep, job_text: bytes) -> tuple[Path, SweepRecord]:
    """Make the directory and the record of a sweep, before any point runs."""
    sweep_id = f"local-{secrets.token_hex(4)}"
    staging = make_sweep_dir(planned.logs_dir, job_text)
    home = planned.logs_dir / planned.directory_name.replace("{array_job_id}", sweep_id, 1)
    record = new_record(planned, sweep_id, local=True)
    write_record(staging, record)
    staging.rename(home)
    return home, record


def gpu_slots(
    planned: PlannedSweep, visible_devices: str | None, points: int | None = None, dev: Path = Path("/dev")
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each of the parallel points; None if each may use all GPUs.

    ``points`` is how many run in all, by default all of the sweep.

    Raises LauncherError if this machine has too few GPUs, or `env` gives the same ones to several points.
    """
    at_once = min(planned.sweep.max_parallel or 1, len(planned.points) if points is None else points)
    used = (at for one in planned.points for positions in gpu_positions(one.planned_job).values() for at in positions)
    each = max(used, default=-1) + 1
    if at_once == 1 or each == 0:
        return [None] * at_once
    with_gpus = ([task for task in one.plan.tasks if task.task.gpus] for one in planned.points)
    own = ({task.env.get("CUDA_VISIBLE_DEVICES") for task in tasks} - {None} for tasks in with_gpus)
    if shared := [devices for devices, points in Counter(itertools.chain.from_iterable(own)).items() if points > 1]:
        raise LauncherError(
            f"{planned.source}: sweep.max_parallel: points would share GPUs, since `env` sets CUDA_VISIBLE_DEVICES="
            f"{shared[0]} in each; set it in the shell of `gpujob run` instead, or max_parallel to 1"
        )
    # programs number the devices that they find from 0, also in a container that has only the last ones
    devices = [word for word in (visible_devices or "").split(",") if word] or list(map(str, range(count_gpus(dev))))
    if len(devices) < at_once * each:
        raise LauncherError(
            f"{planned.source}: sweep.max_parallel: {at_once} points of {each} GPUs need {at_once * each} and "
            f"this machine has {len(devices)}; set max_parallel to {max(1, len(devices) // each)}"
        )
    return [",".join(devices[slot * each : (slot + 1) * each]) for slot in range(at_once)]


class LocalSweep:
    """The runner of points, at most ``max_parallel`` at a time."""

    def __init__(self, planned: PlannedSweep, sweep_dir: Path, record: SweepRecord, report: ReportLine) -> None:
        self._planned = planned
        self._sweep_dir = sweep_dir
        self._report_line = report
        pid, ticks = os.getpid(), read_start_ticks(os.getpid())
        runner = ProcessRecord(
            pid=pid, start_ticks=ticks, host=socket.gethostname(), pid_namespace=read_pid_namespace()
        )
        self.record = record.replace(runner=runner)
        self._free_slots: list[str | None] = []
        self._running: dict[int, tuple[LocalJob, str | None]] = {}
        self._waiting: list[int] = []  # indexes of the points to start, the next one last
        self._ended_count = 0
        self.received_signal: int | None = None  # the signal that ended the sweep
        self._is_starting = False
        self._delayed_signals: list[int] = []  # signals received while a point was starting

    def run(self, indexes: Collection[int]) -> None:
        """Run these points until all end or a signal comes. The points still running are then stopped and awaited."""
        self._free_slots = gpu_slots(self._planned, os.environ.get("CUDA_VISIBLE_DEVICES"), len(indexes))
        sweep_id = f"local-{secrets.token_hex(4)}" if self._has_runs() else str(self.record.submission["job_id"])
        own = {"job_id": sweep_id, "submitted": time.time()}
        register_job(self._sweep_dir, {**self.record.submission, **own}, os.environ, Path.cwd())
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._stop)
        waiting = self._waiting = sorted(indexes, reverse=True)
        self.record = self.record.replace(waiting=tuple(indexes))
        write_record(self._sweep_dir, self.record)
        try:
            while self._running or (waiting and self.received_signal is None):
                while waiting and self._free_slots and self.received_signal is None:
                    point = self._planned.points[waiting[-1]]
                    try:
                        self._start(point, sweep_id, len(indexes))
                    except (LauncherError, OSError) as error:  # such as a full disk, which may have room again later
                        then = "it is tried again when another point ends" if self._running else "resume the sweep"
                        self._report(f"{point.point.name} cannot be started; {then}: {error}")
                        if self._running:
                            waiting.insert(0, waiting.pop())  # others may be able to start
                            break
                    waiting.pop()
                self._await_child()
                self._reap(len(indexes))
        finally:
            self._stop_all()
            for job, _ in self._running.values():
                job.process.wait()
            self.record = self.record.replace(runner=None, waiting=())
            write_record(self._sweep_dir, self.record)

    def _await_child(self) -> None:
        """Wait until a child has ended. One that is no point is collected, or it would end every later wait.

        It may be a program of `--stack`, or an orphan that the first process of a container inherits.
        """
        with contextlib.suppress(ChildProcessError):  # no child left: a signal came first
            # A signal just before a wait in the kernel would be handled after it, so there is none for long.
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
                time.sleep(POLL_S)
            if ended.si_pid not in {job.process.pid for job, _ in self._running.values()}:
                os.waitpid(ended.si_pid, 0)

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk or a closed pipe does not cost the running points
            self._report_line(line)

    def _has_runs(self) -> bool:
        return any(point.runs for point in self.record.points)

    def _stop(self, number: int, _frame: object = None) -> None:
        if self._is_starting:
            self._delayed_signals.append(number)
            return
        self.received_signal = self.received_signal or number
        self._stop_all(number)  # a second SIGINT kills workers that do not end

    def _stop_all(self, number: int = signal.SIGTERM) -> None:
        for job, _ in self._running.values():
            job.process.send_signal(number)

    def _start(self, planned_point: PlannedPoint, sweep_id: str, count: int) -> None:
        """Start a point, unless a signal has come. A signal during the start is handled after it."""
        job_id = f"{sweep_id}_{planned_point.point.index}"
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        self._is_starting = True  # another thread may still receive a signal that is blocked here
        try:
            if self.received_signal is not None:
                return
            self._start_orchestrator(planned_point, job_id)
        finally:
            self._is_starting = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
            while self._delayed_signals:
                self._stop(self._delayed_signals.pop(0))
        self._report(f"{planned_point.point.name} started as {job_id}, {self._ended_count} of {count} ended")

    def _start_orchestrator(self, planned_point: PlannedPoint, job_id: str) -> None:
        index, before, slot = planned_point.point.index, self.record, self._free_slots[0]
        run_dir = rundir.stage_run_dir(planned_point.plan, "", self._sweep_dir)
        try:
            run_dir = self._sweep_dir / settle_point(planned_point, job_id, run_dir, before, self._sweep_dir, "")
            waiting = tuple(sorted(set(self._waiting) - {index}))
            self.record = with_runs(before, {index: run_dir.name}).replace(waiting=waiting)
            write_record(self._sweep_dir, self.record)
            words = () if slot is None else ("env", f"CUDA_VISIBLE_DEVICES={slot}")
            self._running[index] = (LocalJob(run_dir, *words), slot)
        except (LauncherError, OSError):
            self.record = before
            rundir.discard_run_dir(run_dir)
            raise
        self._free_slots.pop(0)

    def _reap(self, count: int) -> None:
        for index, (job, slot) in list(self._running.items()):
            if job.process.poll() is None:
                continue
            del self._running[index]
            self._free_slots.append(slot)
            self._ended_count += 1
            point = self.record.points[index]
            report = job.read_report()
            state = report.state if report is not None else f"ended without a report (status {job.process.returncode})"
            self._report(f"{point.name} {state}, {self._ended_count} of {count} ended")
