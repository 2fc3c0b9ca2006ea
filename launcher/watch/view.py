"""The state of a job, merged from its run directory and its sidecars."""

import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, read_manifest
from exporter.contract.report import Report
from exporter.contract.status import (
    JobStatus,
    NodeGpus,
    NodeStatus,
)
from exporter.contract.view import (
    EarlierAttempt,
    JobView,
    NodeGpusView,
    NodeView,
    ReadinessView,
    StopView,
    WorkerView,
)
from exporter.progress.outlook import time_limit_met_probability
from exporter.progress.phases import PHASES as PHASES_OF_LOGS
from exporter.progress.work import counting_workers, job_average_rate, job_eta, job_rate, job_work, with_current_eta
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from launcher.report.exit_reasons import ExitReasonFinder
from launcher.report.inputs import UNHURRIED, KnownEnds, ReportPace
from launcher.report.report import build_report
from launcher.report.state import EXIT_STATUS, REASON_OF_STATE
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import STARTING_S, JobStateRecord, OrchestratorRecord, read_report, read_submitted
from launcher.rundir.rundir import submitted_cluster, user_name
from launcher.rundir.statuses import StatusFetcher, is_reporting, merge_workers, read_statuses
from launcher.rundir.targets import read_sidecars
from launcher.steps.slurm_queue import QueueState, SlurmQueue, is_over, is_queued_again
from launcher.steps.slurm_steps import read_final_state
from launcher.watch import merge
from launcher.watch.serving_view import StageFacts, output_tokens_rate, readiness_view

if TYPE_CHECKING:
    from launcher.verify.timed_reads import ReportProgress

END_INTERVAL_S = 60.0  # between questions whether a job that the queue may hide has ended
SUCCESSOR_S = 5.0  # until the process that replaces a killed orchestrator has written who it is


class JobClient:
    """Repeated reads of the state of one job."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.manifest: Manifest = read_manifest(run_dir)
        self._queue = SlurmQueue(run_dir)
        self._end_query_at, self._has_hidden_end = -math.inf, False  # monotonic clock
        self._gone_at = -math.inf  # when the process of a local job was first seen gone; inf while it runs
        self._last_orchestrator_key: object = (
            None  # orchestrator at the last read, and whether it had written its report
        )

        self._fetcher = StatusFetcher()
        self._finder = ExitReasonFinder(self.manifest, 0, None)  # keeps what it has read in logs of ended runs

    @property
    def is_local(self) -> bool:
        """Whether the job runs without Slurm."""
        return self.run_dir.name.startswith("local-")

    @cached_property
    def _stages(self) -> StageFacts:
        return StageFacts.read(self.manifest)

    def read_view(self) -> JobView:
        """Read the state of the job now; ``report`` is set when it has ended. Raises RecordError."""
        now = time.time()
        orchestrator, report = self._read_records()
        if orchestrator is not None and self._is_requeued(orchestrator, report):
            return self._queued_view(orchestrator.attempt, report, now)
        state, unknown_reason = self._state(orchestrator, report)
        if state == "UNKNOWN" and (built := self._build_report(state, unknown_reason)).state != state:
            state, unknown_reason, report = built.state, None, built  # Slurm or the sidecars know the end
        attempt = orchestrator.attempt if orchestrator is not None else 0
        statuses = read_statuses(self.run_dir, attempt)
        nodes: list[NodeView] = []
        if orchestrator is not None and report is None:
            live, nodes = self._fetch_statuses(attempt, statuses, now)
            statuses = {**statuses, **live}
        view = self._view(state, statuses, nodes, orchestrator or OrchestratorRecord(), report, now)
        return view.replace(unknown_reason=unknown_reason)

    def read_state(self) -> str:
        """Read only the state of the job, without its sidecars. Raises RecordError."""
        orchestrator, report = self._read_records()
        if orchestrator is not None and self._is_requeued(orchestrator, report):
            return "PENDING"
        return self._state(orchestrator, report)[0]

    def _read_records(self) -> tuple[OrchestratorRecord | None, Report | None]:
        """The last orchestrator, and its report if it has written one."""
        orchestrator = OrchestratorRecord.read(self.run_dir / run_files.ORCHESTRATOR_FILE)
        report = read_report(self.run_dir)
        if report is not None and orchestrator is not None and report.attempt != orchestrator.attempt:
            report = None
        self._drop_outdated_queue_state(orchestrator, report)
        return orchestrator, report

    def report(self, *, verify: bool = False, progress: "ReportProgress | None" = None) -> Report:
        """The report of the job, or one made now; its state shows whether the job has ended. Raises RecordError.

        ``verify`` checks the files again and reports to ``progress``.
        """
        orchestrator, found = self._read_records()
        if orchestrator is not None and not is_over(found) and self._is_requeued(orchestrator, found):
            return self._queued_report(orchestrator.attempt, found)
        if found is not None:
            return self._verify_again(found, progress) if verify else found
        state, unknown_reason = self._state(orchestrator, found)
        report = self._build_report(state, unknown_reason, ReportPace(progress=progress))
        if verify and state == "UNKNOWN" and not report.verification.checks:
            return self._verify_again(report, progress)
        return report

    def _build_report(self, state: str, unknown_reason: str | None, pace: ReportPace = UNHURRIED) -> Report:
        """The report of a job without one; its state is UNKNOWN unless Slurm or the sidecars saw the end."""
        slurm_state, ended = None, state == "UNKNOWN"
        if ended and not (self.manifest.attached or self.is_local):
            slurm_state = self._read_final_state()
        known = KnownEnds(slurm_state=slurm_state, is_past=True)
        report = build_report(self.run_dir, now=time.time(), ended=ended, known=known, pace=pace)
        has_ended = slurm_state in REASON_OF_STATE or self._has_watched_end(report)
        if state == "PENDING" or (ended and not has_ended):
            why = report.why if unknown_reason is None else (unknown_reason,)
            report = report.replace(state=state, exit_status=EXIT_STATUS[state], why=why)
        return report

    def _queued_report(self, ended_attempt: int, last: Report | None) -> Report:
        """The report of a job that waits for the attempt after ``ended_attempt``; attempts count from 1 for people."""
        now, ended_as = time.time(), "" if last is None else f" as {last.state}"
        report = build_report(self.run_dir, now=now, ended=False, next_attempt=ended_attempt + 1)
        why = f"requeued, after attempt {ended_attempt + 1} ended{ended_as}"
        return report.replace(state="PENDING", exit_status=EXIT_STATUS["PENDING"], why=(why,))

    def _has_watched_end(self, report: Report) -> bool:
        """Whether the sidecars of an attached job saw the ends of all workers, though they left no report."""
        ends = [worker.exit for worker in report.workers]
        return self.manifest.attached and all(end is not None and end.time is not None for end in ends)

    def _verify_again(self, report: Report, progress: "ReportProgress | None") -> Report:
        from launcher.report.verification import verify_again  # lazy: few calls verify, and file formats load slowly

        return verify_again(self.run_dir, report, progress)

    def _fetch_statuses(
        self, attempt: int, saved_statuses: Mapping[str, NodeStatus], now: float
    ) -> tuple[dict[str, NodeStatus], list[NodeView]]:
        """Status of every sidecar by node, read in parallel over HTTP, and how each was obtained.

        If a sidecar does not answer, its status file counts.
        """
        sidecars = read_sidecars(self.run_dir, attempt)
        token = run_files.read_token(self.run_dir)
        answers = self._fetcher.fetch(sidecars, token, len(self.manifest.tasks))
        live, nodes = {}, []
        for node, answer in answers.items():
            if isinstance(answer, NodeStatus):
                live[node] = answer
            status = live.get(node) or saved_statuses.get(node)
            nodes.append(
                NodeView(
                    node=node,
                    address=sidecars[node].address,
                    source="http" if node in live else "file",
                    age_s=now - status.time if status is not None else None,
                    error=answer if isinstance(answer, str) else None,
                )
            )
        return live, nodes

    def _summary(self, attempt: int, next_attempt: int | None, now: float) -> Report:
        """The report so far. Each log of an ended run is read once."""
        if self._finder.attempt != attempt:
            self._finder = ExitReasonFinder(self.manifest, attempt, None)
        known = KnownEnds(finder=self._finder)
        return build_report(self.run_dir, now=now, ended=False, next_attempt=next_attempt, known=known)

    def _state(self, orchestrator: OrchestratorRecord | None, report: Report | None) -> tuple[str, str | None]:
        """The state of the job, and why it is unknown."""
        if report is not None:
            return report.state, None
        if orchestrator is None and self.is_local:
            age = time.time() - (self.run_dir / run_files.MANIFEST_FILE).stat().st_mtime
            return _known("PENDING", age < STARTING_S, f"the job has not started within {STARTING_S:.0f} s")
        if orchestrator is None:
            waits = self._read_queue().state in (None, "PENDING", "RUNNING")
            return _known("PENDING", waits, "Slurm no longer lists the job, which has never started")
        if (self.manifest.attached or orchestrator.local) and orchestrator.is_hidden():
            reason = f"the processes on {orchestrator.place} cannot be seen from here, and no sidecar writes its status"
            return _known("RUNNING", self._is_reporting(orchestrator), reason)
        if orchestrator.local:
            reason = f"process {orchestrator.pid} on {orchestrator.host} has gone without a report"
            return _known("RUNNING", self._is_orchestrated(orchestrator), reason)
        if self._queue.read().state == "" and self._is_hidden:
            reason = "Slurm does not show jobs of others here (PrivateData), and no sidecar writes its status"
            return _known("RUNNING", self._is_reporting(orchestrator), reason)
        is_queued = self._queue.read().state != ""
        return _known("RUNNING", is_queued, "the job has left Slurm's queue without a report")

    def _read_queue(self) -> QueueState:
        """What the queue says of the job. A job that Slurm may hide there has left it only if its end is known."""
        at = self._queue.read()
        if at.state != "" or not self._is_hidden:
            return at
        now = time.monotonic()
        if not self._has_hidden_end and now >= self._end_query_at:
            self._end_query_at = now + END_INTERVAL_S
            self._has_hidden_end = self._read_final_state() is not None
        return at if self._has_hidden_end else QueueState(None)

    def _read_final_state(self) -> str | None:
        job_id, submitted = job_id_of(self.run_dir), read_submitted(self.run_dir)
        return read_final_state(job_id, submitted_cluster(self.run_dir), submitted)

    @cached_property
    def _is_hidden(self) -> bool:
        """Whether this is the job of another user, and Slurm shows no jobs of others."""
        if self.manifest.user == user_name():
            return False
        try:
            return SlurmReader(None, submitted_cluster(self.run_dir), os.environ).cluster_facts().hides_jobs
        except SlurmUnansweredError:
            return True

    def _is_orchestrated(self, orchestrator: OrchestratorRecord) -> bool:
        """Whether the process of a local job runs, or did a moment ago: its successor may be about to end the job."""
        now = time.monotonic()
        if orchestrator.is_running_here():
            self._gone_at = math.inf
        elif self._gone_at == math.inf:
            self._gone_at = now
        return now < self._gone_at + SUCCESSOR_S

    def _is_reporting(self, orchestrator: OrchestratorRecord) -> bool:
        """Whether a job that cannot be seen has just started, or a sidecar of it has lately written its status."""
        now = time.time()
        has_just_started = not self.manifest.attached and now - (orchestrator.start or 0.0) < STARTING_S
        return has_just_started or is_reporting(self.run_dir, orchestrator.attempt, now)

    def _drop_outdated_queue_state(self, orchestrator: OrchestratorRecord | None, report: Report | None) -> None:
        """Discard the queue's answer when a new orchestrator has started, or the report was written: it is outdated."""
        record = orchestrator or OrchestratorRecord()
        stage = record.attempt, record.start, record.pid, report is not None
        if self._last_orchestrator_key is None:  # this process begins to watch
            ended = (report.end or 0.0) if report is not None else 0.0
            self._queue.require_since(max(record.start or 0.0, ended))
        elif stage != self._last_orchestrator_key:
            self._queue.require_since(time.time())
        self._last_orchestrator_key = stage

    def _is_requeued(self, orchestrator: OrchestratorRecord, report: Report | None) -> bool:
        """Whether the attempt of this orchestrator is over, and the next one waits in the queue or is starting."""
        if orchestrator.local or self.manifest.attached:
            return False
        at, requeued = self._read_queue(), report is not None and bool(report.requeued)
        return requeued if at.state is None else is_queued_again(at, orchestrator.attempt, requeued=requeued)

    def _queued_view(self, ended_attempt: int, report: Report | None, now: float) -> JobView:
        """View of a job that waits for the attempt after ``ended_attempt``; values of that attempt are not shown."""
        last_attempt = EarlierAttempt(attempt=ended_attempt)
        if report is not None:
            last_attempt = last_attempt.replace(
                state=report.state, items=report.items, items_expected=report.items_expected, unit=report.unit
            )
        view = self._view("PENDING", {}, [], OrchestratorRecord(attempt=ended_attempt + 1), None, now)
        return view.replace(requeued=last_attempt)

    def _view(
        self,
        state: str,
        statuses: Mapping[str, NodeStatus],
        nodes: list[NodeView],
        orchestrator: OrchestratorRecord,
        report: Report | None,
        now: float,
    ) -> JobView:
        coming = orchestrator.attempt if state == "PENDING" else None
        summary = report or self._summary(orchestrator.attempt, coming, now)
        gpus = {node: status.gpus for node, status in sorted(statuses.items()) if status.gpus is not None}
        workers = [
            with_current_eta(worker, now)
            for worker in self._workers(
                summary, statuses, gpus, is_running=state == "RUNNING", is_final=report is not None
            )
        ]
        work = job_work(workers)
        at_work = [worker for worker in counting_workers(workers) if worker.up]
        job = next((status.job for status in statuses.values() if status.job.job_id), JobStatus())
        published = JobStateRecord.of_attempt(self.run_dir, orchestrator.attempt)
        limit, start = job.time_limit_s or self.manifest.time_limit_s, orchestrator.start
        limit_end = published.time_limit_end or job.end or (start + limit if start and limit else None)
        if published.time_limit_end and start:
            limit = published.time_limit_end - start
        may_be_suspended = state == "RUNNING" and not (self.manifest.attached or orchestrator.local)
        suspended = may_be_suspended and self._queue.read().state == "SUSPENDED"
        eta = None if report or suspended else job_eta(workers, self.manifest.total_items)
        return JobView(
            time=now,
            job_id=summary.job_id,
            job_name=self.manifest.job_name,
            user=self.manifest.user,
            state=state,
            pending_reason=self._pending_reason(state),
            suspended=suspended,
            attempt=orchestrator.attempt,
            phase="finished" if report else _phase(published.phase, statuses.values()),
            orchestrator_silent_since=None if report else published.orchestrator_silent_since,
            start=start,
            end=summary.end,
            time_limit_s=limit,
            limit_end=limit_end,
            unit=work.unit,
            items=work.done,
            items_expected=report.items_expected if report else work.expected_total(self.manifest.total_items),
            items_processed=work.processed,
            rate=None if report else job_rate(at_work, work),
            average_rate=None if report else job_average_rate(at_work, work),
            output_tokens_per_second=output_tokens_rate(workers),
            eta=eta,
            time_limit_met_probability=time_limit_met_probability(now, limit_end, eta) if eta else None,
            stop=StopView.from_json(published.stop) if published.stop and state == "RUNNING" else None,
            readiness=self._readiness(state, orchestrator, published),
            first_to_stop=merge.first_to_stop(at_work),
            workers=tuple(workers),
            outputs=merge.outputs(statuses.values()),
            checkpoints=next((found for status in statuses.values() if (found := status.checkpoints)), None),
            filesystems=merge.filesystems(statuses.values()),
            gpus=tuple(NodeGpusView.join(entry, node=node) for node, entry in gpus.items()),
            events=merge.events(statuses.values(), self.run_dir, start),
            nodes=tuple(nodes),
            launch=merge.launch(statuses),
            cause=summary.cause,
            report=report,
            run_dir=str(self.run_dir),
        )

    def _workers(
        self,
        summary: Report,
        statuses: Mapping[str, NodeStatus],
        gpus: Mapping[str, NodeGpus],
        *,
        is_running: bool,
        is_final: bool,
    ) -> list[WorkerView]:
        """The workers, with services marked. If the job ``is_running``, those of a later stage are waiting."""
        seen = merge_workers(statuses)
        workers = [
            merge.worker_view(worker, seen.get(worker.rank), gpus.get(worker.node), is_final=is_final)
            for worker in summary.workers
        ]
        waiting = self._stages.waiting_ranks(workers) if is_running else set()
        outputs = merge.output_of_workers(statuses.values())
        return [
            worker.replace(
                service=worker.rank in self._stages.services,
                output=outputs.get(worker.rank),
                state="waiting" if worker.rank in waiting else worker.state,
            )
            for worker in workers
        ]

    def _pending_reason(self, state: str) -> str | None:
        """Slurm's reason for a pending job, from the query that returned its state."""
        return self._queue.read().reason if state == "PENDING" and not self.is_local else None

    def _readiness(
        self, state: str, orchestrator: OrchestratorRecord, published: JobStateRecord
    ) -> ReadinessView | None:
        """Readiness of the services. None if the job does not wait for it, or is being stopped: polling has ended."""
        phase = published.phase
        pending, runs = state == "PENDING", state == "RUNNING" and phase in ("launching", "running")
        if not (pending or runs) or published.stop is not None:
            return None
        return readiness_view(
            self.run_dir,
            orchestrator.attempt,
            has_readiness_rules=self._stages.has_readiness_rules,
            start=orchestrator.start,
            phase=phase,
        )


def _known(state: str, is_so: bool, unknown_reason: str) -> tuple[str, str | None]:
    return (state, None) if is_so else ("UNKNOWN", unknown_reason)


def _phase(published: str, statuses: Iterable[NodeStatus]) -> str:
    """Phase of the job: the orchestrator's, refined by a phase from the logs while the job runs."""
    if published != "running":
        return published
    return next((status.job.phase for status in statuses if status.job.phase in PHASES_OF_LOGS), published)
