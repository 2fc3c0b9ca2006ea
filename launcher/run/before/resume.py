"""The checkpoint from which an attempt can resume, judged before its workers start."""

import re
import time
from collections.abc import Callable
from functools import partial

from exporter.contract.clock import SystemClock
from exporter.files.formats.source import printable
from exporter.machine.file_host import FileWatchHost
from launcher.plan.placeholders import VARIABLES
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.run.job_log import log_line
from launcher.rundir.job_records import read_first_start
from launcher.verify.files import LastCheckpoint, VerifiedCheckpoint
from launcher.verify.timed_reads import run_file_work

MOST_S = 60.0  # for the search: a hanging file server must not hold up the job
RESTART_MOST_S = 10.0  # the same before the restart of a worker, while others may run
KIND = "checkpoint"
_CHECKPOINT = re.compile(rf"\{{{KIND}\}}|{VARIABLES[KIND]}\b")


def may_resume(planned: TaskPlan) -> bool:
    """Whether a restarted task may read the path of a checkpoint: a program by its variable, a service by its command.

    What a service loads is the same at each start, unless the job file says otherwise.
    """
    return not planned.service or any(map(_CHECKPOINT.search, (*planned.argv, *planned.env.values())))


def find_checkpoint(
    plan: Plan,
    facts: RunFacts,
    is_ending: Callable[[], bool],
    *,
    is_restart: bool = False,
    began: float | None = None,
) -> str:
    """Return the path of the newest whole checkpoint, otherwise of the best undamaged one; empty without any.

    Only for an attempt that may resume, or before the ``is_restart`` of a worker. Unless the job file says that the job
    resumes, only checkpoints of the job itself count; ``began`` is when this attempt began by the present clock.

    ``log.out`` names it, and damaged or doubtful ones that are newer. If they cannot be read in time, a restart gets
    that of the ``facts`` again.
    """
    group = plan.group(KIND)
    if group is None or group.pattern is None or not (facts.attempt or plan.manifest.resumes or is_restart):
        return ""
    directory = plan.manifest.directory(group)
    end = time.monotonic() + (RESTART_MOST_S if is_restart else MOST_S)
    since = 0.0
    if not plan.manifest.resumes:
        start = facts.start
        if facts.attempt:
            start = read_first_start(plan.manifest) or 0.0
        since = start if began is None else min(start, began)
    search = partial(LastCheckpoint, str(directory), group.pattern, since, wants_whole=True)
    host = FileWatchHost(SystemClock())
    try:
        result = run_file_work({KIND: search}, host, lambda: is_ending() or time.monotonic() >= end)[KIND]
    finally:
        host.close()
    found = result.facts
    if not isinstance(found, VerifiedCheckpoint) or not (found.done or found.undamaged):
        log_line("Checkpoint to resume from: unknown, since the checkpoints could not be read in time")
        return facts.checkpoint
    if found.last is None:
        return ""
    last, resume = found.last.checkpoint, found.resume
    if found.last.is_damaged:
        log_line(f"WARNING checkpoint {printable(last.name)} must not be resumed from: {printable(last.reason or '')}")
    elif last.valid is None:
        log_line(f"Checkpoint {printable(last.name)} may not be whole: {printable(last.reason or '')}")
    if resume is None:
        log_line("Checkpoint to resume from: none")
        return ""
    best = resume.checkpoint
    doubt = "" if best.valid else " (undamaged, but not fully checkable)"
    log_line(f"Checkpoint to resume from: {printable(best.name)}{doubt}")
    return str(directory / best.name)
