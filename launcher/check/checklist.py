"""The preflight checklist, in six sections, as text and as JSON."""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from exporter.contract.records import JsonValue, to_json
from exporter.gpus.inventory_reader import GpuInventory, read_gpu_inventory
from launcher.check import finding, job_checks, preflight, site_facts
from launcher.check.finding import CheckFinding
from launcher.check.inputs import check_inputs
from launcher.check.role_programs import environment_of, is_python, job_file_place, role_commands
from launcher.check.unknown_placeholders import check_placeholders
from launcher.errors import ConfigError
from launcher.plan.placeholders import shell_text_index
from launcher.plan.plan import WORKERS, TaskPlan
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
        _input_data(planned_job),
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
    **dict.fromkeys(("web_config_file", "metrics_access"), "Monitoring"),
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
            wrong[section].append(finding.error(_problem_code(problem, fits), error.source, problem))
    if remaining is None:
        skipped = finding.not_checked("job-file", "-", "the job file or the cluster file has mistakes")
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


def _environment(job: PlannedJob, inventory: GpuInventory | str) -> Iterator[CheckFinding]:
    yield from preflight.check_commands(job)
    yield from preflight.check_modules(job)
    yield from site_facts.check_interpreter(job)
    yield site_facts.check_packages(job)
    if not job.spec.environment.required:
        yield finding.not_checked("variables", "environment.required", "the job file names none")
    yield from preflight.check_variables(job)
    yield from job_checks.check_setup(job)
    yield from job_checks.check_secrets(job)
    yield from job_checks.check_container(job)
    yield site_facts.check_driver(inventory)


def _resources(job: PlannedJob, inventory: GpuInventory | str) -> Iterator[CheckFinding]:
    yield preflight.check_gpus_here(job, None if isinstance(inventory, str) else len(inventory.gpus))
    yield from site_facts.check_gpu_memory(job, inventory)
    yield from job_checks.check_cpus(job)
    yield site_facts.check_memory(job)
    yield from site_facts.check_disk(job.plan)
    yield site_facts.check_network(job)
    yield from site_facts.check_partition(job)
    yield from job_checks.check_roles(job)


def _input_data(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from job_checks.check_model(job)
    yield from check_inputs(job.plan, job.spec.inputs, check_contents=True)


def _output(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from preflight.check_directories(job)
    yield preflight.check_output_files(job)
    yield from preflight.check_output_use(job)


def _monitoring(job: PlannedJob) -> Iterator[CheckFinding]:
    if not job.spec.monitoring.enabled:
        message = "the job is not watched; remove this key to get progress, alerts and exit reasons"
        yield finding.warning("unwatched", "monitoring.enabled", message)
    if job.spec.patterns.output is None:
        only_serves = job_checks.has_only_services(job.plan)
        message = "no output file is watched; " + (
            "the results of a benchmark are read without it" if only_serves else "name the files that the job writes"
        )
        level = finding.not_checked if only_serves else finding.warning
        yield level("no-output-pattern", "patterns.output", message)
    own = len(job.spec.errors)
    message = f"{own} pattern{'s' if own != 1 else ''} of the job, in addition to the standard ones"
    yield finding.ok("errors", "errors", message)
    yield from preflight.check_sample(job)
    yield preflight.check_target_directory(job)
    yield from preflight.check_page(job)
    yield from site_facts.check_endpoints(job)


def _check_job(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from _gpus_used(job)
    yield _time_limit(job)
    if job.plan.gpus_per_node:
        message = "the GPU memory that a worker uses is known only at run time; `gpujob watch` shows it"
        yield finding.not_checked("batch-size", "GPU memory", message)
    yield from _checkpoints(job)
    yield from _buffering(job)
    yield from _describe_policy(job)
    yield from check_placeholders(job)
    yield from job_checks.check_groups(job)
    yield from job_checks.check_benchmark(job)
    yield from job_checks.check_readiness(job)
    yield from job_checks.check_slurm(job)


def _gpus_used(job: PlannedJob) -> Iterator[CheckFinding]:
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
        message = f"{used} GPUs for {workers} worker tasks" if asked else f"{workers} workers without GPUs"
        yield finding.ok("workers", "workers", message)


def _lacks_gpu(job: PlannedJob, planned: TaskPlan) -> bool:
    return bool(job.plan.gpus_per_node) and not planned.task.gpus and planned.stage == WORKERS


def _time_limit(job: PlannedJob) -> CheckFinding:
    limit, place = job.plan.slurm.time_limit, "slurm.time_limit"
    if limit:
        return finding.ok("time-limit", place, _time_limit_text(limit))
    if job.local:
        return finding.not_checked("time-limit", place, "a run on this machine has no time limit")
    message = "is not set, so the partition's default applies; set the time that the job needs, and a little more"
    return finding.warning("no-time-limit", place, message)


def _time_limit_text(limit: str) -> str:
    """Show the unit of a time limit: Slurm reads one number as minutes, and two as minutes and seconds."""
    if limit.isdigit():
        return f"{int(limit)} minute{'s' if int(limit) != 1 else ''}"
    if "-" in limit:
        return f"{limit} (days-hours)" if ":" not in limit else limit
    return f"{limit} (minutes:seconds)" if limit.count(":") == 1 else limit


def _checkpoints(job: PlannedJob) -> Iterator[CheckFinding]:
    group, place = job.plan.group("checkpoint"), "patterns.checkpoints"
    if group.pattern is not None:
        where = "the run directory" if group.directory == "." else f'"{group.directory}"'
        interval = job.spec.monitoring.checkpoint_interval
        often = "their interval is learned" if interval is None else f"one every {interval:g} s"
        yield finding.ok("checkpoints", place, f"{group.pattern} in {where}; {often}")
    elif not job_checks.has_only_services(job.plan):
        message = "no checkpoint is watched, so a failure would repeat all work; name the checkpoint files"
        yield finding.warning("no-checkpoints", place, message)


def _describe_policy(job: PlannedJob) -> Iterator[CheckFinding]:
    """Describe the effect of a failed worker, for each role."""
    for _, planned, _ in role_commands(job):
        restarts = f"is restarted up to {planned.restart_max} times, then " if planned.restart_max else ""
        end = "ends the job" if planned.critical else "is tolerated"
        yield finding.ok("policy", job_file_place(planned), f"a failed worker {restarts}{end}")


def _buffering(job: PlannedJob) -> Iterator[CheckFinding]:
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


def checklist_findings(sections: Sequence[ChecklistSection]) -> list[CheckFinding]:
    """Warnings and errors of the checklist."""
    return [item for section in sections for item in section.items if item.status in ("warning", "error")]


def checklist_to_json(sections: Sequence[ChecklistSection]) -> dict[str, JsonValue]:
    """The checklist as a JSON object; its ``findings`` are the warnings and errors."""
    found = checklist_findings(sections)
    return {
        "schema": CHECKLIST_SCHEMA,
        "ok": not any(item.status == "error" for item in found),
        "findings": [
            {"code": item.code, "level": item.status, "place": item.place, "message": item.message} for item in found
        ],
        "sections": to_json(sections),
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
