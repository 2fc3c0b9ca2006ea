"""Phase, limits, thresholds and requested resources of the job."""

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import JobProgress, Published, Publisher
from exporter.contract.alert_thresholds import THRESHOLDS
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.run_files import JobStateFile
from exporter.contract.status import JobFacts

PHASES = ("launching", "running", "checkpointing", "evaluating", "completing", "finished")

INFO = Family("info", "The job, 1 for the attempt that runs.", labels=("attempt",), kind="info")
START = Family("start_timestamp_seconds", "When the job started.")
TIME_LIMIT = Family("time_limit_seconds", "Time limit of the job; absent when it has none.")
PHASE = Family("phase", "Phase of the job, 1 for the present one.", labels=("phase",))
WORKERS_EXPECTED = Family("workers_expected", "Worker tasks that the launcher starts on this node.")
GPUS_ALLOCATED = Family("gpus_allocated", "GPUs of this node that the plan gives to workers.")
STALL_TIMEOUT = Family(
    "stall_timeout_seconds", "The job's own threshold: time without progress that counts as a stall."
)
LAUNCH_TIMEOUT = Family("launch_timeout_seconds", "The job's own threshold: time within which all workers must start.")
ALERT_THRESHOLD = Family(
    "alert_threshold",
    "A threshold that the job or the site has set for an alert, in its unit; infinite when it is off. "
    "Without the series the default of the rules applies.",
    labels=("alert",),
)


@dataclass(frozen=True)
class JobSnapshot:
    """Phase as last published, stop reason if any, and whether all workers have ended."""

    phase: str
    stop_reason: str | None
    workers_ended: bool = False
    orchestrator_silent_since: float | None = None


class JobCollector:
    """Facts of the manifest, and the phase from the orchestrator or, while it is running, from the logs."""

    name = "job"
    interval_s = 1.0
    families = (
        *(INFO, START, TIME_LIMIT, PHASE, WORKERS_EXPECTED, GPUS_ALLOCATED, STALL_TIMEOUT, LAUNCH_TIMEOUT),
        ALERT_THRESHOLD,
    )

    def __init__(self, context: CollectorContext, published: Publisher[str], progress: Published[JobProgress]) -> None:
        self._manifest, self._identity, self._tasks = context.manifest, context.identity, context.tasks
        self._context, self._published, self._progress = context, published, progress
        self._state_file = JobStateFile(self._manifest.run_dir)

    def read(self) -> JobSnapshot:
        state = self._state_file.read()
        phase = state.get("phase")
        if phase == "running":
            phase = self._progress.recent.phase or phase  # logs that cannot be read do not hold a phase
        stop, silent_since = state.get("stop"), state.get("orchestrator_silent_since")
        changed_limit = state.get("time_limit_end")
        if isinstance(changed_limit, float) and state.get("attempt") == self._identity.attempt:
            self._context.changed_limit_end.publish(changed_limit)
        phase = phase if isinstance(phase, str) and phase in PHASES else "launching"
        self._published.publish(phase)
        return JobSnapshot(
            phase=phase,
            stop_reason=str(stop["reason"]) if isinstance(stop, dict) and "reason" in stop else None,
            workers_ended=state.get("workers_ended") is True,
            orchestrator_silent_since=silent_since if isinstance(silent_since, float) else None,
        )

    def render(self, job: JobSnapshot, out: Samples) -> None:
        manifest, identity = self._manifest, self._identity
        out.add(INFO, 1, attempt=identity.attempt)
        out.add(START, identity.start)
        out.add(TIME_LIMIT, self._time_limit_s())
        for phase in PHASES:
            out.add(PHASE, int(phase == job.phase), phase=phase)
        out.add(WORKERS_EXPECTED, len(self._tasks))
        out.add(GPUS_ALLOCATED, len({gpu for task in self._tasks for gpu in task.gpus}))
        out.add(STALL_TIMEOUT, manifest.stall_timeout_s)
        out.add(LAUNCH_TIMEOUT, manifest.launch_timeout_s)
        thresholds = {threshold.alert: threshold.series_value for threshold in manifest.alert_thresholds}
        if identity.attempt < manifest.requeues:  # only the last attempt has to finish before its limit
            thresholds["time_limit_chance"] = THRESHOLDS["time_limit_chance"].never
        for alert, value in thresholds.items():
            out.add(ALERT_THRESHOLD, value, alert=alert)

    def describe(self, job: JobSnapshot, parts: StatusParts) -> None:
        identity = self._identity
        parts.job = JobFacts(
            job_id=identity.job_id,
            job_name=identity.job_name,
            cluster=identity.cluster,
            user=identity.user,
            partition=identity.partition,
            attempt=identity.attempt,
            phase=job.phase,
            stop_reason=job.stop_reason,
            orchestrator_silent_since=job.orchestrator_silent_since,
            start=identity.start,
            end=self._context.limit_end,
            time_limit_s=self._time_limit_s(),
            total_items=self._manifest.total_items,
            workers_expected=len(self._manifest.tasks),
            nodes=self._manifest.nodes,
        )

    def _time_limit_s(self) -> float | None:
        start, end = self._identity.start, self._context.limit_end
        if start is not None and end is not None:
            return end - start
        return self._manifest.time_limit_s
