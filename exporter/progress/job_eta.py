"""The job on one node: ETA, chance to meet the time limit, and workers that delay it."""

from collections.abc import Mapping, Sequence
from dataclasses import field

from exporter.collecting.collector import WORKER_LABELS, worker_labels
from exporter.collecting.families import Family, Samples
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import JobOutlook
from exporter.progress.eta.interval import slowest_eta
from exporter.progress.outlook import (
    STEP_S,
    WorkerPosition,
    first_to_stop,
    lags,
    next_checkpoint,
    time_limit_met_probability,
)
from exporter.progress.work import may_share_queue
from exporter.progress.worker_logs_reader import WorkerLogFacts

JOB_ETA = Family(
    "eta_seconds",
    "Seconds of work left of the job's slowest worker on this node.",
    labels=("quantile",),
    kind="summary",  # the label `quantile` is reserved for this kind
)
JOB_FINISH = Family("finish_timestamp_seconds", "When the workers of this node should finish.")
DEADLINE = Family("time_limit_timestamp_seconds", "When the time limit of the job expires; absent when it has none.")
TIME_LIMIT_MET = Family(
    "time_limit_met_probability_ratio", "Probability that the workers of this node finish before the time limit."
)
CHECKPOINT_NEXT = Family(
    "checkpoint_next_expected_timestamp_seconds",
    "When the next checkpoint should be complete, from the rhythm of the last ones.",
)
CHECKPOINT_FITS = Family(
    "checkpoint_before_time_limit", "Whether the next checkpoint should be complete before the time limit."
)
LAG = Family(
    "worker_lag_ratio",
    "How far the worker is behind the median of its role on this node, as a share: 0 when it is not behind.",
    labels=WORKER_LABELS,
)
FAMILIES = (JOB_ETA, JOB_FINISH, DEADLINE, TIME_LIMIT_MET, CHECKPOINT_NEXT, CHECKPOINT_FITS, LAG)


@dataclass(frozen=True)
class NodeOutlook:
    """Outlook of the job, from the workers of this node."""

    read_at: float
    job: JobOutlook = field(default_factory=JobOutlook)
    lags: Mapping[int, float] = field(default_factory=dict)  # by rank


def job_outlook(
    workers: Sequence[WorkerLogFacts],
    now: float,
    deadline: float | None,
    checkpoint_times: Sequence[float],
    checkpoint_interval_s: float | None = None,
    total_items: int | None = None,
) -> NodeOutlook:
    """Outlook of the job; ``checkpoint_times`` has the times of the last checkpoints, from their files.

    ``checkpoint_interval_s`` and ``total_items`` are from the job file.
    """
    known = [facts for facts in workers if facts.position is not None]
    known = [facts for facts in known if facts.task.critical] or known  # others do not do the work of the job
    running = [facts for facts in known if not facts.ended]
    positions = [(facts.unit, facts.position, facts.expected) for facts in known if facts.position is not None]
    unknown = any(facts.eta is None for facts in running) or may_share_queue(positions, total_items)
    eta = slowest_eta([facts.eta for facts in running if facts.eta is not None]) if not unknown else None
    logged = max((facts for facts in workers), key=lambda facts: len(facts.checkpoints), default=None)
    begun, durations = (logged.checkpoints, logged.checkpoint_seconds) if logged is not None else ((), ())
    saves, took = (begun, durations) if begun else (tuple(checkpoint_times), ())
    due = next_checkpoint(saves, took, now, checkpoint_interval_s) if running else None
    standings = [
        WorkerPosition(facts.task.rank, facts.position, facts.expected, f"{facts.task.role} {facts.unit}")
        for facts in workers
        if facts.position is not None
    ]
    rises = {facts.task.rank: facts.last_rise for facts in running if facts.last_rise is not None}
    stalled = {facts.task.rank for facts in running if facts.stalled}
    return NodeOutlook(
        now,
        JobOutlook(
            eta=eta,
            deadline=deadline,
            time_limit_met_probability=time_limit_met_probability(now, deadline, eta),
            checkpoint_next=due,
            checkpoint_before_time_limit=due <= deadline if due is not None and deadline is not None else None,
            first_to_stop=first_to_stop(rises, stalled, STEP_S),
        ),
        lags(standings),
    )


def render_outlook(outlook: NodeOutlook, workers: Sequence[WorkerLogFacts], out: Samples) -> None:
    job = outlook.job
    out.add(DEADLINE, job.deadline)
    if job.eta is not None:
        out.add(JOB_ETA, job.eta.low, quantile="0.1")
        out.add(JOB_ETA, job.eta.seconds, quantile="0.5")
        out.add(JOB_ETA, job.eta.high, quantile="0.9")
        out.add(JOB_FINISH, outlook.read_at + job.eta.seconds)
    out.add(TIME_LIMIT_MET, job.time_limit_met_probability)
    out.add(CHECKPOINT_NEXT, job.checkpoint_next)
    is_in_time = job.checkpoint_before_time_limit
    out.add(CHECKPOINT_FITS, None if is_in_time is None else int(is_in_time))
    for facts in workers:
        out.row(**worker_labels(facts.task)).add(LAG, outlook.lags.get(facts.task.rank))
