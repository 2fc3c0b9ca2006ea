"""The preflight checklist, in six sections, as text and as JSON."""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exporter.gpus.inventory_reader import GpuInventory, read_gpu_inventory
from launcher.check import job_checks, preflight, site_facts
from launcher.check.finding import CheckFinding, Status
from launcher.check.inputs import check_inputs
from launcher.check.role_programs import environment_of, is_python, job_file_place, role_commands
from launcher.check.unknown_placeholders import check_placeholders
from launcher.errors import ConfigError
from launcher.plan.placeholders import shell_text_index
from launcher.plan.plan import WORKERS
from launcher.planner.planned_job import PlannedJob

CHECKLIST_SCHEMA = 1

SECTION_NAMES = ("Environment", "Resources", "Input data", "Output", "Job", "Monitoring")
STATUS_MARKS = {"ok": "ok", "warning": "WARNING", "error": "ERROR", "not checked": "-"}


@dataclass(frozen=True)
class ChecklistSection:
    name: str
    items: tuple[CheckFinding, ...]


def make_checklist(planned_job: PlannedJob) -> tuple[ChecklistSection, ...]:
    """Run every preflight check, however long it takes."""
    inventory = read_gpu_inventory()
    parts = (
        _environment(planned_job, inventory),
        _resources(planned_job, inventory),
        [
            *job_checks.check_model(planned_job),
            *check_inputs(planned_job.plan, planned_job.spec.inputs, check_contents=True),
        ],
        _output(planned_job),
        _check_job(planned_job),
        _monitoring(planned_job),
    )
    return tuple(ChecklistSection(name, tuple(items)) for name, items in zip(SECTION_NAMES, parts, strict=True))


SECTION_BY_KEY = {
    **dict.fromkeys(("env", "environment", "setup", "secrets", "container", "backend", "workdir"), "Environment"),
    **dict.fromkeys(("containers", "mounts", "modules", "preamble", "network_interface"), "Environment"),
    **dict.fromkeys(("resources", "gpus_per_node", "cpus_per_node"), "Resources"),
    **dict.fromkeys(("inputs", "model", "models"), "Input data"),
    **dict.fromkeys(("paths", "resume", "verify", "logs_dir"), "Output"),
    **dict.fromkeys(("monitoring", "progress", "errors", "patterns", "target_dir"), "Monitoring"),
    **dict.fromkeys(("prometheus_url", "alertmanager_url", "listen_address"), "Monitoring"),
}  # section of each key of a job or cluster file; other keys are in Job
TOPOLOGY_CODES = (
    ("topology-missing", re.compile(r"(?:resources\.\w+_)?workers: (?:is missing|the job has none)")),
    ("topology-mixed", re.compile(r"resources\.agg_workers: .* agg in addition to ")),
    ("topology-no-workers", re.compile(r"resources\.\w+_nodes: .* no \w+ worker")),
    ("topology-no-nodes", re.compile(r"resources\.\w+_nodes: 0 nodes for ")),
    ("het", re.compile(r"slurm\.het: ")),
)


# other places that a finding depends on, by its code
DEPENDENCIES_BY_CODE = {"policy": ("workers[",), "sample": ("progress.patterns",)}


def checklist_of_broken_job(
    errors: Sequence[ConfigError], remaining: tuple[PlannedJob, frozenset[str]] | None = None, *, topology: bool = False
) -> tuple[ChecklistSection, ...]:
    """Checklist of a job with mistakes: the mistakes by section, then findings on the ``remaining``.

    ``remaining`` is the job without its mistakes, and the places that were removed from its files. With ``topology``,
    the files are correct but the workers do not fit.
    """
    wrong: dict[str, list[CheckFinding]] = {name: [] for name in SECTION_NAMES}
    for error in errors:
        for problem in error.problems:
            key = problem.partition(":")[0].partition(".")[0].partition("[")[0]
            fits = not (topology and key in ("workers", "resources"))
            section = SECTION_BY_KEY.get(key, "Job") if fits else "Resources"
            wrong[section].append(CheckFinding(_problem_code(problem, fits), "error", error.source, problem))
    if remaining is None:
        skipped = CheckFinding("job-file", "not checked", "-", "the job file or the cluster file has mistakes")
        return tuple(ChecklistSection(name, tuple(items) or (skipped,)) for name, items in wrong.items())
    planned_job, removed_places = remaining
    return tuple(
        ChecklistSection(
            section.name,
            (*wrong[section.name], *(item for item in section.items if not _is_unreliable(item, removed_places))),
        )
        for section in make_checklist(planned_job)
    )


def _is_unreliable(item: CheckFinding, removed_places: Collection[str]) -> bool:
    """Whether a finding is about a substitute for a removed value, or reports ok for a place that had a mistake."""
    place = item.place
    if place in removed_places or ("workers" in removed_places and place.startswith("workers")):
        return True
    within = (f"{place}.", f"{place}[", *DEPENDENCIES_BY_CODE.get(item.code, ()))
    return item.status == "ok" and any(other.startswith(within) for other in removed_places)


def _problem_code(problem: str, fits: bool) -> str:
    found = next((code for code, pattern in TOPOLOGY_CODES if pattern.match(problem)), None)
    return found or ("job-file" if fits else "topology")


def _environment(job: PlannedJob, inventory: GpuInventory | str) -> list[CheckFinding]:
    none = (
        []
        if job.spec.environment.required
        else [CheckFinding("variables", "not checked", "environment.required", "the job file names none")]
    )
    return [
        *preflight.check_commands(job),
        *preflight.check_modules(job),
        *site_facts.check_interpreter(job),
        *site_facts.check_packages(job),
        *none,
        *preflight.check_variables(job),
        *job_checks.check_setup(job),
        *job_checks.check_secrets(job),
        *job_checks.check_container(job),
        *site_facts.check_driver(inventory),
    ]


def _resources(job: PlannedJob, inventory: GpuInventory | str) -> list[CheckFinding]:
    known = None if isinstance(inventory, str) else len(inventory.gpus)
    return [
        *preflight.check_gpus_here(job, known),
        *site_facts.check_gpu_memory(job, inventory),
        *job_checks.check_cpus(job),
        *site_facts.check_memory(job),
        *site_facts.check_disk(job.plan),
        *site_facts.check_network(job),
        *site_facts.check_partition(job),
        *job_checks.check_roles(job),
    ]


def _output(job: PlannedJob) -> list[CheckFinding]:
    return [*preflight.check_directories(job), *preflight.check_output_files(job)]


def _monitoring(job: PlannedJob) -> list[CheckFinding]:
    items = []
    if not job.spec.monitoring.enabled:
        message = "the job is not watched; remove this key to get progress, alerts and exit reasons"
        items.append(CheckFinding("unwatched", "warning", "monitoring.enabled", message))
    if job.spec.patterns.output is None:
        only_serves = job_checks.has_only_services(job.plan)
        message = "no output file is watched; " + (
            "the results of a benchmark are read without it" if only_serves else "name the files that the job writes"
        )
        level: Status = "not checked" if only_serves else "warning"
        items.append(CheckFinding("no-output-pattern", level, "patterns.output", message))
    own = len(job.spec.errors)
    message = f"{own} pattern{'s' if own != 1 else ''} of the job, in addition to the standard ones"
    items.append(CheckFinding("errors", "ok", "errors", message))
    return [
        *items,
        *preflight.check_sample(job),
        *preflight.check_target_directory(job),
        *site_facts.check_endpoints(job),
    ]


def _check_job(job: PlannedJob) -> list[CheckFinding]:
    return [
        *_gpus_used(job),
        *_time_limit(job),
        *_batch_size(job),
        *_checkpoints(job),
        *_buffering(job),
        *_describe_policy(job),
        *check_placeholders(job),
        *job_checks.check_groups(job),
        *job_checks.check_benchmark(job),
        *job_checks.check_readiness(job),
        *job_checks.check_slurm(job),
    ]


def _gpus_used(job: PlannedJob) -> list[CheckFinding]:
    """Check that workers use all requested GPUs, and that every role has some."""
    plan, items = job.plan, []
    asked = plan.gpus_per_node * plan.nodes
    used = sum(len(planned.task.gpus) for planned in plan.tasks)
    if used < asked:
        message = f"the job asks for {asked} GPUs and its workers use {used}; add workers, or ask for fewer"
        items.append(CheckFinding("idle-gpus", "warning", "resources.gpus_per_node", message))
    workers = [planned for planned in plan.tasks if planned.stage == WORKERS]
    for _, planned, _ in role_commands(job):
        if asked and not planned.task.gpus and planned.stage == WORKERS:
            message = "its workers get no GPU, although the job has some; set this key if they need one"
            items.append(CheckFinding("no-gpu", "warning", f"workers ({planned.task.role}).gpus", message))
    if not items:
        message = f"{used} GPUs for {len(workers)} worker tasks" if asked else f"{len(workers)} workers without GPUs"
        items.append(CheckFinding("workers", "ok", "workers", message))
    return items


def _time_limit(job: PlannedJob) -> list[CheckFinding]:
    limit = job.plan.slurm.time_limit
    if limit:
        return [CheckFinding("time-limit", "ok", "slurm.time_limit", _time_limit_text(limit))]
    if job.local:
        return [
            CheckFinding("time-limit", "not checked", "slurm.time_limit", "a run on this machine has no time limit")
        ]
    message = "is not set, so the partition's default applies; set the time that the job needs, and a little more"
    return [CheckFinding("no-time-limit", "warning", "slurm.time_limit", message)]


def _time_limit_text(limit: str) -> str:
    """Show the unit of a time limit: Slurm reads one number as minutes, and two as minutes and seconds."""
    if limit.isdigit():
        return f"{int(limit)} minute{'s' if int(limit) != 1 else ''}"
    if "-" in limit:
        return f"{limit} (days-hours)" if ":" not in limit else limit
    return f"{limit} (minutes:seconds)" if limit.count(":") == 1 else limit


def _checkpoints(job: PlannedJob) -> list[CheckFinding]:
    group = next(group for group in job.plan.manifest.groups if group.name == "checkpoint")
    if group.pattern is None and job_checks.has_only_services(job.plan):
        return []
    if group.pattern is None:
        message = "no checkpoint is watched, so a failure would repeat all work; name the checkpoint files"
        return [CheckFinding("no-checkpoints", "warning", "patterns.checkpoints", message)]
    where = "the run directory" if group.directory == "." else f'"{group.directory}"'
    interval = job.spec.monitoring.checkpoint_interval
    often = "their interval is learned" if interval is None else f"one every {interval:g} s"
    return [CheckFinding("checkpoints", "ok", "patterns.checkpoints", f"{group.pattern} in {where}; {often}")]


def _batch_size(job: PlannedJob) -> list[CheckFinding]:
    if not job.plan.gpus_per_node:
        return []
    message = "the GPU memory that a worker uses is known only at run time; `gpujob watch` shows it"
    return [CheckFinding("batch-size", "not checked", "GPU memory", message)]


def _describe_policy(job: PlannedJob) -> list[CheckFinding]:
    """Describe the effect of a failed worker, for each role."""
    items = []
    for _, planned, _ in role_commands(job):
        restarts = f"is restarted up to {planned.restart_max} times" if planned.restart_max else ""
        end = "ends the job" if planned.critical else "is tolerated"
        message = f"a failed worker {restarts}, then {end}" if restarts else f"a failed worker {end}"
        items.append(CheckFinding("policy", "ok", job_file_place(planned), message))
    return items


def _buffering(job: PlannedJob) -> list[CheckFinding]:
    """Warn about Python buffering its output: progress would appear late, and final errors could be lost."""
    items = []
    for place, planned, argv in role_commands(job):
        if not argv:
            continue
        at = shell_text_index(argv)
        if at is not None:
            found = re.search(r"(?<![\w/.-])(?:[\w./-]*/)?python[\d.]*(?=\s)(?!\s+-[A-Za-z]*u)", argv[at])
            is_buffered = found is not None and "PYTHONUNBUFFERED=" not in argv[at]
        else:
            flags = argv[1 : next((at for at, word in enumerate(argv) if at and not word.startswith("-")), len(argv))]
            is_buffered = is_python(argv[0]) and not any("u" in flag and flag[1:2] != "-" for flag in flags)
        if is_buffered and not environment_of(job, planned).get("PYTHONUNBUFFERED"):
            message = (
                "Python buffers its output, so progress is seen late; use `python -u`, or set PYTHONUNBUFFERED=1 in env"
            )
            items.append(CheckFinding("buffered", "warning", place, message))
    return items or [CheckFinding("buffering", "ok", "workers", "no Python command buffers its output")]


def checklist_findings(sections: Sequence[ChecklistSection]) -> list[CheckFinding]:
    """Warnings and errors of the checklist."""
    return [item for section in sections for item in section.items if item.status in ("warning", "error")]


def checklist_to_json(sections: Sequence[ChecklistSection]) -> dict[str, Any]:
    """The checklist as a JSON object; its ``findings`` are the warnings and errors."""
    found = checklist_findings(sections)
    return {
        "schema": CHECKLIST_SCHEMA,
        "ok": not any(item.status == "error" for item in found),
        "findings": [
            {"code": item.code, "level": item.status, "place": item.place, "message": item.message} for item in found
        ],
        "sections": [{"name": section.name, "items": [asdict(item) for item in section.items]} for section in sections],
    }


def render_preflight_checklist(sections: Sequence[ChecklistSection]) -> list[str]:
    """The checklist as text, one finding a line."""
    lines = []
    for number, section in enumerate(sections, 1):
        lines.append(f"{number} {section.name}")
        for item in section.items:
            text = f"not checked: {item.message}" if item.status == "not checked" else item.message
            lines.append(
                f"  {STATUS_MARKS[item.status]:<7} " + (text if item.place == "-" else f"{item.place}: {text}")
            )
    return lines
