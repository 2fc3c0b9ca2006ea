"""Why Slurm ends a job, from the job's error log and from ``scontrol``.

Lines of slurmstepd and srun, 20.11 to 26.05; only 26.05 names the signal of a plain scancel:

    slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T12:02:53 DUE TO TIME LIMIT ***
    srun: error: Node failure on n2
    [2026-11-22T09:52:22.436] error: *** JOB 9 ON n1 CANCELLED AT 2026-11-22T09:52:22 DUE to SIGNAL Terminated ***
    slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=9.4. Some of your processes may have been killed ...
    slurmstepd-n1: error: Detected 1 oom_kill event in StepId=9.4. Some of the step tasks have been OOM Killed.
    srun: error: n1: tasks 2-3: Out Of Memory

slurmstepd names its node only if it was built for several slurmd on one machine.
"""

import re
from datetime import datetime

from exporter.contract.lazy_dataclass import dataclass
from exporter.slurm.states import NO_LIMIT_S

_CANCELLED = re.compile(
    r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+?(?: DUE TO ([A-Z ]+?)| DUE to SIGNAL [^*\n]+?)?(?:,[^*\n]*)? \*\*\*"
)
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)

_OOM_KILLS = re.compile(r"(?:slurmstepd-(\S+): )?error: Detected (\d{1,9}) oom[-_]kill event\S* in StepId=(\d+\.\d+)\b")
_OUT_OF_MEMORY = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: Out Of Memory", re.MULTILINE)

_TIMED_OUT = re.compile(r"\bJobState=(TIMEOUT|COMPLETING\s+Reason=TimeLimit)\b")
_MOMENTS = re.compile(r"\b(StartTime|EndTime|PreemptTime|SuspendTime)=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_START_TIME = re.compile(r"\bStartTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_END_TIME = re.compile(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")

LONGEST_GRACE_S = 3600.0  # above any grace time of a partition or QOS in practice

TIME_LIMIT = ("time_limit", "Slurm: the time limit was reached")  # exit reason and words
CANCELLED = ("cancelled", "Slurm: cancelled")
REQUEUED = ("cancelled", "Slurm: requeued; the job will run again")
LAST_ENDS = (TIME_LIMIT, CANCELLED)  # after which Slurm does not run the job again
_REASONS = {
    "TIME LIMIT": TIME_LIMIT,
    "PREEMPTION": ("preempted", "Slurm: preempted by another job"),
    "JOB REQUEUE": REQUEUED,
    "NODE FAILURE": ("node_failure", "Slurm: a node has failed"),
}


@dataclass(frozen=True)
class SlurmEndNotice:
    """Why Slurm ends the job, and which nodes failed; no reason if it does not."""

    reason: str | None = None
    cause: str | None = None
    failed_nodes: tuple[str, ...] = ()


def parse_slurm_end_notice(text: str) -> SlurmEndNotice:
    """Parse a job's error log; no reason if no line shows that the job is being ended."""
    nodes = tuple(dict.fromkeys(_NODE_FAILURE.findall(text)))
    last = None
    for match in _CANCELLED.finditer(text):
        last = match
    if last is None:
        return SlurmEndNotice(failed_nodes=nodes)
    why = last[1]
    if why is None:
        return SlurmEndNotice(*CANCELLED, nodes)
    reason, cause = _REASONS.get(why, ("cancelled", f"Slurm: cancelled due to {why.lower()}"))
    if reason == "node_failure" and nodes:
        cause = f"Slurm: node {', '.join(nodes)} has failed"
    return SlurmEndNotice(reason, cause, nodes)


def parse_oom_kills(text: str, step: str, node: str, *, is_only_node: bool) -> int:
    """Kills for lack of memory in a step (``job.step``) on a node that the job's error log reports.

    A line without a node counts if the step has no other one, or if srun reports tasks on the node out of memory.
    """
    is_named = is_only_node or node in _OUT_OF_MEMORY.findall(text)
    kills = [(on or (node if is_named else ""), int(count)) for on, count, of in _OOM_KILLS.findall(text) if of == step]
    return sum(count for on, count in kills if on == node)


def has_timed_out(text: str) -> bool:
    """Whether ``scontrol show job`` shows that Slurm is ending a job at its time limit.

    It shows ``JobState=COMPLETING Reason=TimeLimit`` from before the first signal until the last step has ended.
    """
    return _TIMED_OUT.search(text) is not None


def parse_time_limit_end(text: str) -> float | None:
    """When the time limit of a running job ends, epoch seconds, from ``scontrol show job``; None if it shows none.

    Once Slurm ends a job, also by a preemption, it shows when that will be, which is not the limit. A job without a
    limit has ``EndTime=Unknown``. Its limit ends when Slurm enters it for such a job at its start: after a year.
    """
    try:
        if "JobState=RUNNING" not in text or parse_preemption_end(text) is not None:
            return None
        ends = [datetime.fromisoformat(end).timestamp() for end in _END_TIME.findall(text)]
        if not ends and "TimeLimit=UNLIMITED" in text:
            ends = [datetime.fromisoformat(start).timestamp() + NO_LIMIT_S for start in _START_TIME.findall(text)]
    except ValueError:
        return None
    return min(ends, default=None)  # of the components of a heterogeneous job


def parse_preemption_end(text: str) -> float | None:
    """When a preempted job will be ended, epoch seconds, from ``scontrol show job``; None for other jobs.

    A job that was suspended or requeued keeps its ``PreemptTime``. So it counts only in the present run, unless the
    job was suspended or resumed since (``SuspendTime``), and only if the job's end is at most a grace time later.
    """
    try:
        moments = {name: datetime.fromisoformat(moment) for name, moment in _MOMENTS.findall(text)}
        start, end, preempted = (moments[name] for name in ("StartTime", "EndTime", "PreemptTime"))
    except (KeyError, ValueError):
        return None
    if preempted < start or (end - preempted).total_seconds() > LONGEST_GRACE_S:
        return None
    if (suspended := moments.get("SuspendTime")) is not None and suspended >= preempted:
        return None  # it was suspended instead of ended, and runs again
    return end.timestamp()
