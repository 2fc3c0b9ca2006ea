"""The source of each value of a plan: job file, cluster file, environment or default."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from exporter.contract.manifest import OWN_ADDRESSES
from exporter.contract.records import JsonValue
from launcher.jobfile.jobfile import ClusterSpec, JobSpec, cpus_of_full_nodes, gpus_are_defaulted
from launcher.jobfile.redaction import REDACTED, is_secret_name
from launcher.plan.container import container_mounts, parse_mount
from launcher.plan.placeholders import DEFAULT_VARIABLES, fill_placeholders, placeholder_values
from launcher.plan.plan import Plan
from launcher.planner.planned_job import PlannedJob
from launcher.planner.slurm_options import SBATCH
from launcher.rundir.cluster_file import find_cluster_file
from launcher.show.records import ValueSource

DEFAULT = "default"


class SourceNames(NamedTuple):
    """Displayed names of job file and cluster file, and of options of the command that set places of the job file."""

    job: str
    cluster: str | None
    found_by: str  # how the cluster file was found
    options: Mapping[str, str] = MappingProxyType({})  # option by place


def source_names(job: str, environ: Mapping[str, str], workdir: Path) -> SourceNames:
    """Name the two files, and say how the cluster file was found."""
    found = find_cluster_file(environ, workdir)
    if found is None:
        return SourceNames(job, None, "not found")
    return SourceNames(job, str(found.path), found.found_by)


def explain_values(planned_job: PlannedJob, sources: SourceNames) -> tuple[ValueSource, ...]:
    """All values with their sources. The job file overrides the cluster file, which overrides our defaults."""
    spec, cluster, plan = planned_job.spec, planned_job.cluster, planned_job.plan
    rows = (
        ValueSource("cluster file", sources.cluster, sources.found_by),
        *_slurm(spec, cluster, plan, sources),
        *_resources(spec, cluster, plan, sources),
        *_paths(spec, cluster, plan, sources),
        *_aliases(spec, cluster, sources),
        *_mounts(spec, cluster, plan, sources),
        *_setup(spec, cluster, sources),
        *_environment(spec, sources, planned_job.environ),
    )
    used = {row.source for row in rows}
    return (*rows, *(row for row in _sbatch_variables(planned_job.environ) if f"environment: {row.key}" not in used))


def name_options(rows: tuple[ValueSource, ...], sources: SourceNames) -> tuple[ValueSource, ...]:
    """Name the option of the command as the source where one sets a place of the job file, or a part that it is in."""
    file = f"{sources.job}: "

    def named(row: ValueSource) -> ValueSource:
        place = row.source.removeprefix(file)
        found = [name for at, name in sources.options.items() if re.match(rf"{re.escape(at)}(?![^.\[ ])", place)]
        return row._replace(source=found[-1]) if found and row.source.startswith(file) else row

    return tuple(map(named, rows)) if sources.options else rows


def _first_set(
    key: str, job: JsonValue, cluster: JsonValue, sources: SourceNames, default: JsonValue = None
) -> ValueSource:
    """The first of job, cluster and default that is set."""
    if job is not None:
        return ValueSource(key, job, f"{sources.job}: {key}")
    if cluster is not None:
        return ValueSource(key, cluster, f"{sources.cluster}: {key.rpartition('.')[2]}")
    return ValueSource(key, default, DEFAULT)


def _slurm(spec: JobSpec, cluster: ClusterSpec, plan: Plan, sources: SourceNames) -> Iterator[ValueSource]:
    for name in ("partition", "account", "qos", "time_limit"):
        row = _first_set(f"slurm.{name}", getattr(spec.slurm, name), getattr(cluster, name), sources)
        value = getattr(plan.slurm, name)
        yield row if value is None or row.value is not None else _from_variable(row.key, name, value)
    for name, value in sorted(plan.slurm.directives.items()):
        key = f"slurm.directives.{name}"
        if name in spec.slurm.directives:
            yield ValueSource(key, value, f"{sources.job}: {key}")
        elif name in cluster.directives:
            yield ValueSource(key, value, f"{sources.cluster}: directives.{name}")
        else:
            yield _from_variable(key, name, value)


def _from_variable(key: str, option: str, value: JsonValue) -> ValueSource:
    return ValueSource(key, value, f"environment: {SBATCH}{option.upper()}")


def _resources(spec: JobSpec, cluster: ClusterSpec, plan: Plan, sources: SourceNames) -> Iterator[ValueSource]:
    given = spec.resources.model_fields_set
    for key, value in (
        ("nodes", plan.nodes),
        ("gpus_per_node", plan.gpus_per_node),
        ("gpu_type", plan.gpu_type),
        ("cpus_per_node", plan.cpus_per_node),
        ("memory_per_node", plan.memory_per_node),
    ):
        place = f"resources.{key}"
        if key in given and getattr(spec.resources, key) is not None:
            source = f"{sources.job}: {place}"
        elif key == "gpus_per_node" and cluster.gpus_per_node and gpus_are_defaulted(spec):
            source = f"{sources.cluster}: gpus_per_node"
        elif key == "gpu_type" and value is not None:
            source = f"{sources.cluster}: gpu_type"
        elif key == "cpus_per_node" and value == cpus_of_full_nodes(spec, cluster):
            source = f"{sources.cluster}: cpus_per_node"
        else:
            source = "as the workers need" if key in ("nodes", "cpus_per_node") else DEFAULT
        yield ValueSource(place, value, source)


def _paths(spec: JobSpec, cluster: ClusterSpec, plan: Plan, sources: SourceNames) -> Iterator[ValueSource]:
    yield ValueSource(
        "workdir",
        plan.workdir,
        f"{sources.job}: workdir" if spec.workdir is not None else "the current directory",
    )
    yield ValueSource(
        "logs_dir", plan.logs_dir, f"{sources.cluster}: logs_dir" if cluster.logs_dir is not None else DEFAULT
    )
    if cluster.target_dir is None and plan.target_dir is not None:
        yield ValueSource("target_dir", plan.target_dir, "gpujob stack")
    else:
        yield _first_set("target_dir", None, plan.target_dir, sources)
    yield _first_set("network_interface", None, cluster.network_interface, sources)
    yield _first_set(
        "monitoring.listen_address",
        spec.monitoring.listen_address,
        cluster.listen_address,
        sources,
        default=plan.manifest.listen_address or OWN_ADDRESSES,
    )
    yield _first_set("web_config_file", None, plan.manifest.web_config_file, sources)
    yield _first_set("metrics_access", None, cluster.metrics_access, sources, default=plan.manifest.metrics_access)
    yield _first_set("monitoring.detail", spec.monitoring.detail, cluster.detail, sources, default=plan.manifest.detail)
    for threshold in plan.manifest.alert_thresholds:
        name = threshold.alert
        own, site = getattr(spec.alerts, name), getattr(cluster.alerts, name)
        place = f"{sources.job}: alerts.{name}" if own is not None else f"{sources.cluster}: alerts.{name}"
        yield ValueSource(f"alerts.{name}", own if own is not None else site, place)


def _aliases(spec: JobSpec, cluster: ClusterSpec, sources: SourceNames) -> Iterator[ValueSource]:
    if spec.model is not None:
        yield _alias("model.path", spec.model.path, cluster.models, "models", sources)
    if spec.container is not None:
        yield _alias("container.image", spec.container.image, cluster.containers, "containers", sources)


def _alias(key: str, text: str, known: Mapping[str, str], name: str, sources: SourceNames) -> ValueSource:
    if text in known:
        return ValueSource(key, known[text], f"{sources.cluster}: {name}.{text} ({sources.job}: {key} = {text})")
    return ValueSource(key, text, f"{sources.job}: {key}")


def _setup(spec: JobSpec, cluster: ClusterSpec, sources: SourceNames) -> Iterator[ValueSource]:
    for name in cluster.modules:
        yield ValueSource("setup.modules", name, f"{sources.cluster}: modules")
    for name in spec.setup.modules:
        yield ValueSource("setup.modules", name, f"{sources.job}: setup.modules")
    if cluster.preamble is not None:
        yield ValueSource("setup.preamble", cluster.preamble, f"{sources.cluster}: preamble")
    if spec.setup.preamble is not None:
        yield ValueSource("setup.preamble", spec.setup.preamble, f"{sources.job}: setup.preamble")


def _mounts(spec: JobSpec, cluster: ClusterSpec, plan: Plan, sources: SourceNames) -> Iterator[ValueSource]:
    """The effective mounts; ``container.mounts`` hides earlier ones with the same target."""
    task = next((planned for planned in plan.tasks if planned.contained), None)
    if task is None or spec.container is None:
        return
    facts = plan.facts_before_run("{job_id}")
    values = placeholder_values(plan, task, facts)
    source_of: dict[str, str] = {}
    for source, given in (
        (f"{sources.cluster}: mounts", cluster.mounts),
        (f"{sources.job}: container.mounts", spec.container.mounts),
    ):
        source_of |= {parse_mount(fill_placeholders(text, values)).target: source for text in given}
    for mount in container_mounts(plan, task, facts):
        yield ValueSource("container.mounts", str(mount), source_of.get(mount.target, "built in"))


def _environment(spec: JobSpec, sources: SourceNames, environ: Mapping[str, str]) -> Iterator[ValueSource]:
    for name in DEFAULT_VARIABLES.keys() - spec.env.keys():
        source = "environment" if name in environ else DEFAULT
        yield ValueSource(f"env.{name}", environ.get(name, DEFAULT_VARIABLES[name]), source)
    for name, value in spec.env.items():
        yield ValueSource(f"env.{name}", _redacted_value(name, value), f"{sources.job}: env.{name}")
    for index, workers in enumerate(spec.workers):
        for name, value in workers.env.items():
            yield ValueSource(
                f"env.{name} of {workers.role}",
                _redacted_value(name, value),
                f"{sources.job}: workers[{index}].env.{name}",
            )
    for name in spec.secrets:
        yield ValueSource(f"env.{name}", REDACTED, f"environment: {name} ({sources.job}: secrets)")


def _redacted_value(name: str, value: str) -> str:
    return REDACTED if is_secret_name(name) else value


def _sbatch_variables(environ: Mapping[str, str]) -> Iterator[ValueSource]:
    """Variables that sbatch would read as options; gpujob does not pass them on."""
    for name in sorted(environ):
        if name.startswith(SBATCH):
            yield ValueSource(name, environ[name], "environment, ignored")


def render_sources(rows: tuple[ValueSource, ...]) -> list[str]:
    cells = [(row.key, _text(row.value), row.source) for row in rows]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in (0, 1)]
    return [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip() for key, value, source in cells]


def _text(value: JsonValue) -> str:
    if value is None:
        return "-"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", "\\n")
