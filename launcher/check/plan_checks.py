"""Preflight checks of a plan by itself: use of GPUs and CPUs, time limit, checkpoints, output. They cost nothing."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.check.job_checks import has_only_services
from launcher.check.role_programs import environment_of, is_python, role_commands
from launcher.jobfile.backend_kinds import BACKEND_KINDS
from launcher.jobfile.jobfile import cpus_of_full_nodes
from launcher.plan.placeholders import shell_text_index
from launcher.plan.plan import WORKERS, TaskPlan
from launcher.planner.planned_job import PlannedJob
from launcher.words import count_text


def check_plan_alone(job: PlannedJob) -> Iterator[CheckFinding]:
    """Run every check of this module."""
    yield from check_cpus(job)
    yield from check_step_cpus(job)
    yield from check_gpu_use(job)
    yield check_time_limit(job)
    yield from check_checkpoints(job)
    yield from check_buffering(job)
    yield from check_watching(job)


def check_cpus(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that a node has the CPUs, and that engines and trainings get more than one for each GPU.

    Tokenizers and data loaders need some. More than a node has are only a warning: some partition may have them.
    """
    spec, plan, place = planned_job.spec, planned_job.plan, "resources.cpus_per_node"
    is_set = spec.resources.cpus_per_node or spec.slurm.exclusive or any(workers.cpus for workers in spec.workers)
    site = planned_job.cluster
    kind = BACKEND_KINDS[spec.backend.type]
    needs_several = kind.is_engine or kind.is_group or any(len(planned.task.gpus) > 1 for planned in plan.tasks)
    if not planned_job.local and site.cpus_per_node and plan.cpus_per_node > site.cpus_per_node:
        message = (
            f"{plan.cpus_per_node} CPUs, and by the cluster file a node has {site.cpus_per_node}; "
            "unless the partition has larger nodes, use more nodes, or fewer workers or `cpus`"
        )
        yield finding.warning("too-many-cpus", place, message)
        return
    if planned_job.local or is_set or not plan.gpus_per_node or not needs_several:
        return
    if cpus_of_full_nodes(spec, site) is not None:
        yield finding.ok("cpus", place, f"{plan.cpus_per_node} CPUs, all of a node")
        return
    fix = "set how many the job may use, or `slurm: {exclusive: true}` for exclusive nodes"
    if site.cpus_per_node and site.gpus_per_node:
        fix = f"its share of a node is {site.cpus_per_node * plan.gpus_per_node // site.gpus_per_node}, so {fix}"
    else:
        fix += "; with gpus_per_node and cpus_per_node in the cluster file, jobs that take whole nodes ask for all CPUs"
    message = (
        f"{plan.cpus_per_node} CPUs for {plan.gpus_per_node} GPUs of a node: one for each GPU or process and one more; "
        f"engines and data loaders can use several for each GPU; {fix}"
    )
    yield finding.warning("few-cpus", place, message)


def check_step_cpus(job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that a node has a CPU for each process of a step, without which srun refuses it.

    Only a warning: some partitions give all CPUs of a node to every job.
    """
    cpus, has_all = job.plan.cpus_per_node, job.local or job.plan.slurm.exclusive
    sizes = Counter((planned.step, planned.task.node_index) for planned in job.plan.tasks if planned.step)
    for (step, _), processes in sizes.most_common(1):
        if processes > cpus and not has_all:
            message = (
                f"{cpus} CPUs, and the step of {step} has {processes} processes on a node; "
                f"srun refuses it with fewer CPUs than processes; use at least {processes + 1}"
            )
            yield finding.warning("step-cpus", "resources.cpus_per_node", message)


def check_gpu_use(job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that workers use all requested GPUs, and that every role has some."""
    plan = job.plan
    asked = plan.gpus_per_node * plan.nodes
    used = sum(len(planned.task.gpus) for planned in plan.tasks)
    without = [planned.task.role for _, planned, _ in role_commands(job) if _lacks_gpu(job, planned)]
    if used < asked:
        message = f"the job asks for {asked} GPUs and its workers use {used}; add workers, or ask for fewer"
        yield finding.warning("idle-gpus", "resources.gpus_per_node", message)
    for role in without:
        message = "its workers get no GPU, although the job has some; set this key if they need one"
        yield finding.warning("no-gpu", f"workers ({role}).gpus", message)
    if used >= asked and not without:
        workers = sum(planned.stage == WORKERS for planned in plan.tasks)
        message = (
            f"{count_text(used, 'GPU')} for {count_text(workers, 'worker task')}"
            if asked
            else f"{count_text(workers, 'worker')} without GPUs"
        )
        yield finding.ok("workers", "workers", message)


def _lacks_gpu(job: PlannedJob, planned: TaskPlan) -> bool:
    return bool(job.plan.gpus_per_node) and not planned.task.gpus and planned.stage == WORKERS


def check_time_limit(job: PlannedJob) -> CheckFinding:
    limit, place = job.plan.slurm.time_limit, "slurm.time_limit"
    if job.local:
        return finding.not_checked("time-limit", place, "a run on this machine has no time limit")
    if limit:
        return finding.ok("time-limit", place, _time_limit_text(limit))
    message = "is not set, so the partition's default applies; set the time that the job needs, and a little more"
    return finding.warning("no-time-limit", place, message)


def _time_limit_text(limit: str) -> str:
    """Show the unit of a time limit: Slurm reads one number as minutes, and two as minutes and seconds."""
    if limit.isdigit():
        return f"{int(limit)} minute{'s' if int(limit) != 1 else ''}"
    if "-" in limit:
        return f"{limit} (days-hours)" if ":" not in limit else limit
    return f"{limit} (minutes:seconds)" if limit.count(":") == 1 else limit


def check_checkpoints(job: PlannedJob) -> Iterator[CheckFinding]:
    group, place = job.plan.group("checkpoint"), "patterns.checkpoints"
    if group.pattern is not None:
        where = "the run directory" if group.directory == "." else f'"{group.directory}"'
        interval = job.spec.monitoring.checkpoint_interval
        often = "their interval is learned" if interval is None else f"one every {interval:g} s"
        yield finding.ok("checkpoints", place, f"{group.pattern} in {where}; {often}")
    elif not has_only_services(job.plan):
        message = "no checkpoint is watched, so a failure would repeat all work; name the checkpoint files"
        yield finding.warning("no-checkpoints", place, message)


def check_buffering(job: PlannedJob) -> Iterator[CheckFinding]:
    """Warn about Python buffering its output: progress would appear late, and final errors could be lost."""
    places = [
        place
        for place, planned, argv in role_commands(job)
        if argv and _buffers_output(argv) and not environment_of(job, planned).get("PYTHONUNBUFFERED")
    ]
    for place in places:
        problem = "PYTHONUNBUFFERED is empty, so Python buffers its output and progress is seen late"
        yield finding.warning("buffered", place, f"{problem}; leave it out, or use `python -u`")
    if not places:
        yield finding.ok("buffering", "workers", "no Python command buffers its output")


def _buffers_output(argv: Sequence[str]) -> bool:
    """Whether a command runs Python without ``-u``, directly or in a shell's text."""
    at = shell_text_index(argv)
    if at is not None:
        found = re.search(r"(?<![\w/.-])(?:[\w./-]*/)?python[\d.]*(?=\s)(?!\s+-[A-Za-z]*u)", argv[at])
        return found is not None and "PYTHONUNBUFFERED=" not in argv[at]
    flags = itertools.takewhile(lambda word: word.startswith("-"), argv[1:])
    return is_python(argv[0]) and not any("u" in flag and flag[1:2] != "-" for flag in flags)


def check_watching(job: PlannedJob) -> Iterator[CheckFinding]:
    """Warn about a job that is not watched, and about one without output files."""
    if not job.spec.monitoring.enabled:
        message = "the job is not watched; remove this key to get progress, alerts and exit reasons"
        yield finding.warning("unwatched", "monitoring.enabled", message)
    if job.spec.patterns.output is None:
        only_serves = has_only_services(job.plan)
        message = "no output file is watched; " + (
            "the results of a benchmark are read without it" if only_serves else "name the files that the job writes"
        )
        level = finding.not_checked if only_serves else finding.warning
        yield level("no-output-pattern", "patterns.output", message)
