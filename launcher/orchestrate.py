"""The batch step: sidecars, then workers, then policy, and an orderly end with a report.

    python -I -m launcher.orchestrate RUN_DIR [--local]

One thread, one loop. A signal only sets a flag and wakes the loop; whatever
ends the job goes through one teardown with one deadline for all its steps.
"""

import functools
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exporter import records
from exporter.derive.exits import LIMIT_OVERRUN_S, exit_evidence, parse_stop, signal_name
from exporter.events import EventLog
from exporter.manifest import Task, read_manifest
from launcher.diagnose import write_missing
from launcher.environment import forget_coerced_locale
from launcher.history import keep_history
from launcher.judge import Judge, failures
from launcher.launch_check import Checklist, LaunchCheck, render_checklist
from launcher.plan import PLAN_FILE, Plan, RunFacts, TaskPlan, parse_plan
from launcher.report import (
    EXIT_STATUS,
    REPORT_TEXT_FILE,
    build_report,
    read_statuses,
    render_report,
    write_report,
)
from launcher.run_records import RunRecords
from launcher.say import say, show
from launcher.sidecars import Sidecars
from launcher.status_events import StatusEvents
from launcher.steps import ENDING_SIGNALS, Ending, Running, Steps
from launcher.wrap import read_start_ticks

TICK_S = 0.2
RECORD_GRACE_S = 2.0
"""How long after the end of a step its exit record may take to be seen here (network file systems)."""
NOTICE_GRACE_S = 3.0
"""An end by a signal from outside gets this long for the signal to reach this process too."""
ASK_AFTER_S = 0.5
"""How long that signal may take before the place is asked for the reason."""
FINAL_VALUES_S = 15.0
LAST_VALUES_S = 0.7
"""The same while KillWait is running."""
STATUSES_S = 5.0
"""Between two looks at what the sidecars have written: they write it as often."""
VERIFY_S = 60.0
"""How long output files may be read for their records while the nodes wait,"""
LEAST_VERIFY_S = 2.0
"""at least so long,"""
LIMIT_MARGIN_S = 15.0
"""and else so much shorter than up to the time limit: the report has to be written before it."""
KILL_MARGIN_S = 1.5
"""Kept free of KillWait for the report."""
OWN_TEARDOWN_S = 8.0
"""Between SIGTERM and SIGKILL when the job ends itself and no KillWait is running."""


class Orchestrator:
    """Carries out a plan on the given kind of steps."""

    def __init__(self, plan: Plan, facts: RunFacts, steps: Steps, time_limit_end: float | None) -> None:
        self._plan = plan
        self._facts = facts
        self._steps = steps
        self._time_limit_end = time_limit_end
        self._events = EventLog(facts.run_dir / records.EVENTS_FILE, facts.job_id)
        self._running: dict[int, Running] = {}
        """By rank."""
        self._ended: dict[int, tuple[Running, int, float]] = {}
        """Tasks whose step has ended and whose exit record may still be on its way: (what, status, since)."""
        self._waiting: dict[int, tuple[float, TaskPlan, int]] = {}
        """Restarts to come by rank: (when, what, which run)."""
        self._sidecars = Sidecars(plan, facts, steps, self._sleep, lambda: self._signal is not None)
        self._signal: int | None = None
        self._signal_at = 0.0
        self._stop: dict[str, Any] | None = None
        self._deadline: float | None = None
        self._killed = False
        self._wake_read, self._wake_write = os.pipe()
        self._workers_ended = False
        self._phase = ""
        self._asked_at = 0.0
        self._ends_by_itself = False
        self._signal_by: float | None = None
        """Until when the end of this process has to wait for a signal that is announced."""
        self._records = RunRecords(facts)
        self._judge_of_ends = Judge(plan.manifest, facts.attempt, time_limit_end)
        self._launch = LaunchCheck(plan, facts)
        self._checklist: Checklist | None = None
        self._looks_at_launch = True
        self._ends: dict[int, dict[str, Any]] = {}
        """Why each task last ended, by rank."""
        self._status_events = StatusEvents(self._events, self._plan.manifest.total_items)
        self._statuses_due = 0.0

    # -- signals ---------------------------------------------------------------------------------

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP end the job in order."""
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM):
            signal.signal(number, lambda *_: None)  # warnings before a time limit are for the workers
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes the loop

    def _note_signal(self, number: int, _frame: object) -> None:
        if self._signal is None:
            self._signal, self._signal_at = number, time.monotonic()

    def _sleep(self, seconds: float) -> None:
        ready, _, _ = select.select([self._wake_read], [], [], max(0.0, seconds))
        if ready:
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass

    # -- the course of a job ---------------------------------------------------------------------

    def run(self) -> int:
        """Exit status of the job."""
        self._attempt_to("set space aside", lambda: records.make_reserve(self._facts.run_dir))
        self._keep_earlier_report()
        self._events.write("job started", hosts=list(self._facts.hosts), attempt=self._facts.attempt)
        self._state("launching")
        for index, host in enumerate(self._facts.hosts):
            say(f"Node {index}: {host}")
        try:
            self._sidecars.start()
            self._start_workers()
            self._until_workers_ended()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not leave a job without its end
            say(f"internal error: {traceback.format_exc()}")
            self._begin_stop("cancelled", f"internal error of the orchestrator: {type(error).__name__}: {error}")
            self._until_workers_ended()
        return self._finish()

    def _keep_earlier_report(self) -> None:
        """The report of an attempt before this one gets its number: ``report_a0.json``."""
        earlier = self._facts.attempt - 1
        if earlier >= 0 and not (self._facts.run_dir / records.REPORT_FILE).exists():
            say(f"Attempt {earlier} has left no report: its batch node has failed, or it was killed")
            self._events.write("attempt without report", earlier=earlier)
        for name in (records.REPORT_FILE, REPORT_TEXT_FILE):
            old = self._facts.run_dir / name
            if old.exists():
                kept = old.with_name(f"{old.stem}_a{max(0, earlier)}{old.suffix}")
                self._attempt_to(f"keep {name}", functools.partial(old.replace, kept))

    def _state(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._events.write("phase", phase=phase)
        self._attempt_to(
            f"write {records.STATE_FILE}",
            lambda: records.write_state(str(self._facts.run_dir), phase, self._stop, workers_ended=self._workers_ended),
        )

    def _attempt_to(self, what: str, action: Callable[[], object]) -> None:
        """Do what the job can do without: neither a full disk nor a defect of ours there may end it."""
        try:
            action()
        except OSError as error:
            say(f"cannot {what}: {error.strerror}")
        except Exception:  # noqa: BLE001 - see above
            say(f"cannot {what}: {traceback.format_exc()}")

    def _start_workers(self) -> None:
        for planned in self._plan.tasks:
            if self._signal:
                return
            self._start(planned, 0)

    def _start(self, planned: TaskPlan, restart: int) -> None:
        task = planned.task
        host = self._facts.hosts[task.node_index]
        words = (
            f"Launching {task.role} worker {task.index}, node {task.node_index} (local_rank {task.local_rank}): {host}"
        )
        say(words + (f", run {restart + 1}" if restart else ""))
        try:
            self._running[task.rank] = self._steps.start_task(planned, restart)
        except OSError as error:
            say(f"{task.worker} rank {task.rank} cannot be started: {error}")
            now = time.time()
            record = {"code": 127, "signal": None, "error": str(error), "start": now, "end": now}
            self._attempt_to("write its record", lambda: self._records.keep(planned, restart, record))
            self._judge(planned, restart, record)
            return
        what = "worker restarted" if restart else "worker started"
        self._events.write(what, worker=task.worker, rank=task.rank, node=host, restart=restart)

    def _until_workers_ended(self) -> None:
        phase = "launching"
        while self._running or self._ended or self._waiting:
            if self._signal and self._stop is None:
                self._stop_for_signal()
            if phase == "launching" and self._stop is None and self._records.have_started(self._plan.tasks):
                phase = "running"
                self._state(phase)
                say("All workers are up")
            self._sidecars.care(revive=self._stop is None)
            if time.monotonic() >= self._statuses_due:
                self._attempt_to("read what the sidecars say", self._take_statuses)
            if self._looks_at_launch and self._stop is None:
                self._looks_at_launch = False  # not again after a defect
                self._attempt_to("check the launch", lambda: self._say_launch(self._launch.look(time.time())))
            self._reap()
            self._restart_due()
            self._release_helpers()
            if self._deadline is not None and time.monotonic() > self._deadline and not self._kill_the_rest():
                say(f"Leaving {len(self._running)} workers to be ended from outside")
                return
            self._sleep(TICK_S)

    def _take_statuses(self) -> None:
        """Write down what the sidecars have seen since the last time."""
        self._status_events.take(read_statuses(self._facts.run_dir, self._facts.attempt), say)
        self._statuses_due = time.monotonic() + STATUSES_S

    def _kill_the_rest(self) -> bool:
        """Kill the workers that did not end in time; whether there is still something to wait for.

        Slurm kills by itself when it ends the job, refuses to do it for us, and leaves no time for waiting.
        """
        if self._ends_by_itself:
            return False
        if not self._killed and self._running:
            self._killed = True
            say(f"Killing {len(self._running)} workers that did not end in time")
            self._steps.kill(list(self._running.values()))
        return self._deadline is None or time.monotonic() <= self._deadline + 1.0

    def _say_launch(self, checklist: Checklist | None) -> None:
        """Say once how the launch went."""
        if checklist is None:
            self._looks_at_launch = True
            return
        self._checklist = checklist
        say("Launch verification")
        for line in render_checklist(checklist):
            show(f"    {line}".rstrip())
        self._events.write("launch verified" if checklist.verified else "launch not verified", **checklist.to_json())

    def _release_helpers(self) -> None:
        """Once all that is critical has completed, nothing is left to help with."""
        waiting = [planned for _, planned, _ in self._waiting.values()]
        active = [running.planned for running in self._running.values()] + waiting
        active += [running.planned for running, _, _ in self._ended.values()]
        some_critical = any(planned.critical for planned in self._plan.tasks)
        if self._stop is None and active and some_critical and not any(planned.critical for planned in active):
            self._begin_stop("terminated_peer", "all critical workers have completed")

    def _reap(self) -> None:
        now = time.monotonic()
        for rank, running in list(self._running.items()):
            code = running.returncode
            if code is not None:
                del self._running[rank]
                if left := self._steps.sweep(running):
                    found = functools.partial(self._records.keep_found, running, {"survivors": left})
                    self._attempt_to("write its record", found)
                self._ended[rank] = (running, code, now)
        if self._ended:
            self._attempt_to("list the records", self._records.refresh)
        for rank, (running, code, since) in list(self._ended.items()):
            record, waited = self._records.read_exit(running), now - since
            hopeless = self._killed or self._is_on_a_failed_node(running)
            if record is None and waited < RECORD_GRACE_S and not hopeless:
                continue
            if record is not None and self._may_be_told_why(record) and waited < NOTICE_GRACE_S:
                if waited > ASK_AFTER_S and self._asked_at < since:
                    self._ask_why()
                continue
            if record is None and self._stop is None and self._asked_at < since:
                self._ask_why()
            del self._ended[rank]
            if record is None:
                record = self._records.from_status(running, code, exact=self._steps.exact_status)
                keep = functools.partial(self._records.keep, running.planned, running.restart, record)
                self._attempt_to("write its record", keep)
            self._judge(running.planned, running.restart, record)

    def _is_on_a_failed_node(self, running: Running) -> bool:
        """Whether its node is known to be gone: no record will come from there."""
        nodes = (self._stop or {}).get("nodes") or ()
        return self._facts.hosts[running.planned.task.node_index] in nodes

    def _ask_why(self) -> None:
        """A worker has ended and nothing here says why: what does the place say?"""
        self._asked_at = time.monotonic()
        ending = self._steps.ending()
        if ending.reason is not None or ending.failed_nodes:
            self._begin_stop_of(ending, "")

    def _may_be_told_why(self, record: dict[str, Any]) -> bool:
        """Whether a worker was asked to end from outside and this process has not been yet.

        scancel and the time limit reach the steps before the batch step; its signal says which it was.
        """
        return self._stop is None and self._signal is None and bool(exit_evidence(record).forwarded)

    def _judge(self, planned: TaskPlan, restart: int, record: dict[str, Any]) -> None:
        """Say why a task ended, and do what its policy asks for."""
        task = planned.task
        state = records.read_json(self._facts.run_dir / records.STATE_FILE) or {}
        host = self._facts.hosts[task.node_index]
        peers = [peer for rank, peer in failures(self._ends_of_tasks()) if rank != task.rank]
        ended = self._judge_of_ends.judge(task, restart, host, record, parse_stop(state), peers)
        self._ends[task.rank] = ended
        for moment, number, sender in record.get("signals") or ():
            name = signal_name(int(number))
            facts = {"worker": task.worker, "rank": task.rank, "node": host, "signal": name, "from_pid": sender}
            self._events.write("worker signalled", time=moment, **facts)
        say(f"{task.worker} rank {task.rank} on {host} ended: {ended['reason']} ({'; '.join(ended['evidence'])})")
        self._events.write("worker ended", worker=task.worker, rank=task.rank, node=host, **ended)
        if ended["reason"] == "completed" or self._stop is not None:
            return
        if restart < planned.restart_max:
            delay = planned.restart_backoff_s * (restart + 1)
            count = f"{restart + 1} of {planned.restart_max}"
            say(f"{task.worker} rank {task.rank} is started again in {delay:g} s ({count})")
            self._waiting[task.rank] = (time.monotonic() + delay, planned, restart + 1)
        elif planned.critical:
            self._begin_stop(
                "terminated_peer",
                f"{task.worker} rank {task.rank} on {host} ended by {ended['reason']}",
                {"rank": task.rank, "restart": restart},
            )
        else:
            say(f"{task.worker} is not critical: the job goes on without it")

    def _ends_of_tasks(self) -> list[tuple[Task, dict[str, Any]]]:
        by_rank = {planned.task.rank: planned.task for planned in self._plan.tasks}
        return [(by_rank[rank], end) for rank, end in self._ends.items()]

    def _restart_due(self) -> None:
        for rank, (due, planned, restart) in list(self._waiting.items()):
            if self._stop is not None:
                del self._waiting[rank]
            elif time.monotonic() >= due:
                del self._waiting[rank]
                self._start(planned, restart)

    # -- the end ---------------------------------------------------------------------------------

    def _stop_for_signal(self) -> None:
        name = signal.Signals(self._signal or signal.SIGTERM).name
        self._events.write("signal", signal=name)
        limit, now = self._time_limit_end, time.time()
        late = limit is not None and limit - 2.0 <= now <= limit + LIMIT_OVERRUN_S
        ending = self._steps.ending()
        self._ends_by_itself = ending.by_itself
        if ending.reason is not None:
            self._begin_stop_of(ending, f" ({name} to the job)")
        elif late:
            self._begin_stop("time_limit", f"{name} at the time limit")
        else:
            self._begin_stop("cancelled", f"{name} to the job", ask=not ending.by_itself)

    def _begin_stop_of(self, ending: Ending, how: str) -> None:
        """Stop the job for a reason that the place has given. What runs beside a failed node ends with it."""
        self._signal_by = ending.signal_by if self._signal is None else None
        nodes = list(ending.failed_nodes)
        cause = (ending.cause or f"node {', '.join(nodes)} has failed") + how
        reason = ending.reason or "node_failure"
        if reason == "node_failure" and nodes:
            reason = "terminated_peer"
        self._begin_stop(reason, cause, {"nodes": nodes} if nodes else None, ask=not ending.by_itself)

    def _begin_stop(self, reason: str, cause: str, origin: dict[str, Any] | None = None, *, ask: bool = True) -> None:
        """Publish why, then tell all workers at once; one deadline for all of them.

        ``origin`` is the rank and the run whose end has led to this, or the nodes that have failed.
        """
        allowed = OWN_TEARDOWN_S if self._signal is None else max(1.0, self._plan.kill_wait_s - KILL_MARGIN_S)
        self._deadline = (self._signal_at if self._signal is not None else time.monotonic()) + allowed
        self._stop = {"reason": reason, "cause": cause, "time": time.time(), **(origin or {})}
        say(f"Stopping the job: {cause}")
        self._events.write("job stopping", reason=reason, cause=cause)
        self._state("completing")
        self._waiting.clear()
        if ask and self._running:
            self._steps.terminate(list(self._running.values()))

    def _finish(self) -> int:
        hurry = self._signal is not None
        if self._signal is not None and self._stop is None:
            self._stop_for_signal()
        self._workers_ended = True
        self._state("completing")
        self._sidecars.await_final_values(LAST_VALUES_S if hurry else FINAL_VALUES_S)
        if self._checklist is None and not hurry and self._ends:
            self._attempt_to("check the launch", lambda: self._say_launch(self._launch.conclude(time.time())))
        records.release_reserve(self._facts.run_dir)
        if not hurry:
            self._write_diagnoses()
        status = EXIT_STATUS["UNKNOWN"]
        try:
            status = self._report()
        except Exception:  # noqa: BLE001 - see above: sidecars and targets still have to go
            say(f"the report cannot be made: {traceback.format_exc()}")
        if hurry:
            self._write_diagnoses()  # the report is there, whatever time is left
        self._state("finished")
        self._sidecars.end(hurry=hurry)
        if self._signal_by is not None:
            say("Waiting for Slurm to end the job")
            while self._signal is None and time.time() < self._signal_by:
                self._sleep(1.0)
        return status

    def _write_diagnoses(self) -> None:
        """Diagnoses that the sidecars have not written."""
        for task, ended in self._ends_of_tasks():
            host = self._facts.hosts[task.node_index]
            write = functools.partial(write_missing, self._plan.manifest, self._facts.attempt, task, host, ended)
            self._attempt_to(f"write the diagnosis of {task.worker}", write)

    def _report(self) -> int:
        """Write the report and say it; its exit status."""
        self._attempt_to("read what the sidecars say", self._take_statuses)
        # reading output files takes its time, and there is none once Slurm is ending the job
        deadline = (
            self._deadline
            if self._signal is not None
            else time.monotonic() + verification_s(self._time_limit_end, time.time())
        )
        report = build_report(
            self._facts.run_dir,
            now=time.time(),
            ended=True,
            ends=self._ends,
            job_end=self._time_limit_end,
            launch=self._checklist.to_json() if self._checklist is not None else None,
            out_of_time=lambda: self._signal is not None or (deadline is not None and time.monotonic() > deadline),
        )
        self._attempt_to("write the report", lambda: write_report(self._facts.run_dir, report))
        self._attempt_to("keep the course of the run", lambda: keep_history(self._plan.manifest, report))
        self._events.write("job ended", state=report["state"], items=report["items"])
        say(f"Job {self._facts.job_id} {report['state']}")
        for line in render_report(report).splitlines():
            show(f"    {line}".rstrip())
        return int(report["exit_status"])


def verification_s(limit_end: float | None, now: float) -> float:
    """How long the verification may take, where the job has until ``limit_end``."""
    return VERIFY_S if limit_end is None else min(VERIFY_S, max(LEAST_VERIFY_S, limit_end - now - LIMIT_MARGIN_S))


def load_plan(run_dir: Path) -> Plan:
    """The plan that was written into the run directory."""
    body = records.read_json(run_dir / PLAN_FILE)
    if body is None:
        sys.exit(f"gpujob: {run_dir / PLAN_FILE} cannot be read: is this a run directory?")
    return parse_plan(body, read_manifest(run_dir))


def main(arguments: list[str]) -> None:
    """Run the job of the run directory given as first argument."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -I -m launcher.orchestrate RUN_DIR [--local]")
    forget_coerced_locale()
    run_dir = Path(arguments[0]).resolve()
    plan, start = load_plan(run_dir), time.time()
    (run_dir / records.WORKERS_DIR).mkdir(exist_ok=True)
    steps: Steps
    if "--local" in arguments:
        from launcher.local import LocalSteps, local_hosts

        job_id = run_dir.name.partition("_")[0]
        facts = RunFacts(job_id, run_dir, local_hosts(plan, socket.gethostname()), 0, start)
        steps = LocalSteps(plan, facts)
        limit = None
    else:
        from launcher.hostlist import parse_hostlist
        from launcher.slurm import SlurmSteps

        hosts = parse_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        facts = RunFacts(os.environ.get("SLURM_JOB_ID", "unknown"), run_dir, hosts, attempt, start)
        if len(hosts) < plan.nodes:
            sys.exit(f"gpujob: the job has {len(hosts)} nodes ({', '.join(hosts)}) and the plan needs {plan.nodes}")
        steps = SlurmSteps(plan, facts)
        limit = plan.manifest.time_limit_s
    records.write_json(
        run_dir / records.ORCHESTRATOR_FILE,
        {
            "schema": records.RECORD_SCHEMA,
            "job_id": facts.job_id,
            "pid": os.getpid(),
            "start_ticks": read_start_ticks(os.getpid()),
            "host": socket.gethostname(),
            "hosts": list(facts.hosts),
            "attempt": facts.attempt,
            "start": start,
            "local": "--local" in arguments,
        },
    )
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    end = float(job_end) if job_end.isdigit() else (start + limit if limit else None)
    orchestrator = Orchestrator(plan, facts, steps, end)
    orchestrator.listen()
    sys.exit(orchestrator.run())


if __name__ == "__main__":
    main(sys.argv[1:])
