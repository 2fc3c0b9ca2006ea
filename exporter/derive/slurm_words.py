"""What Slurm's daemons and srun write into a job's error log when they end it.

Lines as written by slurmstepd and srun from 20.11 to 25.05:

    slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T12:02:53 DUE TO TIME LIMIT ***
    srun: error: Node failure on n2
"""

import re
from dataclasses import dataclass

_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+?(?: DUE TO ([A-Z ]+?))?(?:,[^*\n]*)? \*\*\*")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)

_REASONS = {
    "TIME LIMIT": ("time_limit", "Slurm: the time limit was reached"),
    "PREEMPTION": ("preempted", "Slurm: preempted by another job"),
    "JOB REQUEUE": ("cancelled", "Slurm: requeued; the job will run again"),
    "NODE FAILURE": ("node_failure", "Slurm: a node has failed"),
}


@dataclass(frozen=True)
class SlurmWords:
    """Why Slurm ends the job, as an exit reason and in words, and which nodes have failed."""

    reason: str | None = None
    cause: str | None = None
    failed_nodes: tuple[str, ...] = ()


def parse_slurm_words(text: str) -> SlurmWords:
    """The words in an error log; no reason when nothing says that the job is being ended."""
    nodes = tuple(dict.fromkeys(_NODE_FAILURE.findall(text)))
    last = None
    for match in _CANCELLED.finditer(text):
        last = match
    if last is None:
        return SlurmWords(failed_nodes=nodes)
    why = last[1]
    if why is None:
        return SlurmWords("cancelled", "Slurm: cancelled", nodes)
    reason, cause = _REASONS.get(why, ("cancelled", f"Slurm: cancelled due to {why.lower()}"))
    if reason == "node_failure" and nodes:
        cause = f"Slurm: node {', '.join(nodes)} has failed"
    return SlurmWords(reason, cause, nodes)


def parse_preempt_time(text: str) -> str | None:
    """The moment of a preemption in the text of ``scontrol show job``, or None when there was none."""
    match = re.search(r"\bPreemptTime=(\d\S+)", text)
    return match[1] if match else None
