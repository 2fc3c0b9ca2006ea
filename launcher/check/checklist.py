"""The preflight checklist, in six sections, as text and as JSON."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonValue, to_json
from exporter.gpus.inventory_reader import GpuInventory, read_gpu_inventory
from exporter.machine.mounts import mount_table
from launcher.check import finding, job_checks, plan_checks, preflight, site_facts
from launcher.check.finding import CheckFinding
from launcher.check.inputs import check_inputs
from launcher.check.role_programs import job_file_place, role_commands
from launcher.check.unknown_placeholders import check_placeholders
from launcher.errors import ConfigError
from launcher.planner.planned_job import PlannedJob
from launcher.words import count_text

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
    **dict.fromkeys(("web_config_file", "metrics_access", "detail", "alerts", "notify"), "Monitoring"),
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
    if not job.local:
        yield site_facts.check_installation(job.plan, mount_table().current())
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
    yield from plan_checks.check_cpus(job)
    yield from plan_checks.check_step_cpus(job)
    yield site_facts.check_memory(job)
    yield from site_facts.check_disk(job.plan)
    yield site_facts.check_network(job)
    if not job.local:
        yield from site_facts.check_partition(job, site_facts.read_partitions())
    yield from job_checks.check_roles(job)


def _input_data(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from job_checks.check_model(job)
    yield from check_inputs(job.plan, job.spec.inputs, check_contents=True)


def _output(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from preflight.check_directories(job)
    yield preflight.check_output_files(job)
    yield from preflight.check_output_use(job)


def _monitoring(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from job_checks.check_notify(job)
    yield from plan_checks.check_watching(job)
    own = len(job.spec.errors)
    message = f"{own} pattern{'s' if own != 1 else ''} of the job, in addition to the standard ones"
    yield finding.ok("errors", "errors", message)
    yield from preflight.check_sample(job)
    yield preflight.check_target_directory(job)
    yield from preflight.check_page(job)
    yield from site_facts.check_endpoints(job)


def _check_job(job: PlannedJob) -> Iterator[CheckFinding]:
    yield from plan_checks.check_gpu_use(job)
    yield plan_checks.check_time_limit(job)
    if job.plan.gpus_per_node:
        message = "the GPU memory that a worker uses is known only at run time; `gpujob watch` shows it"
        yield finding.not_checked("batch-size", "GPU memory", message)
    yield from plan_checks.check_checkpoints(job)
    yield from plan_checks.check_buffering(job)
    yield from _describe_policy(job)
    yield from check_placeholders(job)
    yield from job_checks.check_groups(job)
    yield from job_checks.check_launchers(job)
    yield from job_checks.check_benchmark(job)
    yield from job_checks.check_readiness(job)
    yield from job_checks.check_slurm(job)


def _describe_policy(job: PlannedJob) -> Iterator[CheckFinding]:
    """Describe the effect of a failed worker, for each role."""
    for _, planned, _ in role_commands(job):
        restarts = f"is restarted up to {planned.restart_max} times, then " if planned.restart_max else ""
        end = "ends the job" if planned.critical else "is tolerated"
        yield finding.ok("policy", job_file_place(planned), f"a failed worker {restarts}{end}")


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


def render_preflight_checklist(sections: Sequence[ChecklistSection], *, show_all: bool = False) -> list[str]:
    """The checklist as text, one finding a line. What was not checked is only counted, unless ``show_all``."""
    lines = []
    for number, section in enumerate(sections, 1):
        shown = [item for item in section.items if show_all or item.status != "not checked"]
        lines += [f"{number} {section.name}"] if shown else []
        for item in shown:
            text = f"not checked: {item.message}" if item.status == "not checked" else item.message
            lines.append(
                f"  {STATUS_MARKS[item.status]:<7} " + (text if item.place == "-" else f"{item.place}: {text}")
            )
    left_out = sum(item.status == "not checked" for section in sections for item in section.items)
    if left_out and not show_all:
        lines.append(f"not checked: {left_out}; --all shows what, and why")
    return lines


def verdict(sections: Sequence[ChecklistSection]) -> str:
    """``ok``, ``ok, 2 warnings`` or ``not ready: 1 error, 2 warnings``."""
    found = Counter(item.status for item in checklist_findings(sections))
    counts = ", ".join(count_text(found[status], status) for status in ("error", "warning") if found[status])
    if found["error"]:
        return f"not ready: {counts}"
    return f"ok, {counts}" if counts else "ok"
