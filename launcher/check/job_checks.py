"""Preflight checks of models, containers, secrets and Slurm options."""

import difflib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.check.finding import CheckFinding, Status
from launcher.jobfile.backend_kinds import BACKEND_KINDS, ENGINES
from launcher.jobfile.jobfile import HUB, cpus_of_full_nodes
from launcher.jobfile.redaction import is_harmless, is_secret_name
from launcher.jobfile.slurm import parse_signal
from launcher.jobfile.value_types import parse_time_limit
from launcher.plan.container import ENROOT, PYXIS, container_mounts, parse_mount
from launcher.plan.placeholders import fill_placeholders, placeholder_values
from launcher.plan.plan import BENCHMARK, WORKERS, Plan, RunFacts
from launcher.planner.planned_job import PlannedJob

_IMAGE_FILE = re.compile(r"[./~].*|.*\.(?:sqsh|squashfs|sif|img)")
# backends whose workers are each a group of connected processes
_EXPORTED = re.compile(r"(?m)(?:^|[;&\s])(?:export\s+)?([A-Za-z_]\w*)=[\"']?([^\s\"';]*)")


def check_planned_job(planned_job: PlannedJob) -> list[CheckFinding]:
    """Run the checks that every start needs."""
    return [
        *check_model(planned_job),
        *check_container(planned_job),
        *check_setup(planned_job),
        *check_secrets(planned_job),
        *check_roles(planned_job),
        *check_groups(planned_job),
        *check_benchmark(planned_job),
        *check_readiness(planned_job),
        *check_slurm(planned_job),
    ]


def has_only_services(plan: Plan) -> bool:
    """Whether all tasks except the benchmark are services, so that the job writes no output or checkpoints."""
    return all(planned.service or planned.stage == BENCHMARK for planned in plan.tasks)


def check_cpus(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that engines have more CPUs than one for each GPU: tokenizers and schedulers need some."""
    spec, plan, place = planned_job.spec, planned_job.plan, "resources.cpus_per_node"
    is_set = spec.resources.cpus_per_node or spec.slurm.exclusive or any(workers.cpus for workers in spec.workers)
    site = planned_job.cluster
    if planned_job.local or is_set or not plan.gpus_per_node or spec.backend.type not in ENGINES:
        return []
    if cpus_of_full_nodes(spec, site) is not None:
        return [CheckFinding("cpus", "ok", place, f"{plan.cpus_per_node} CPUs, all of a node")]
    fix = "set how many the job may use, or `slurm: {exclusive: true}` for exclusive nodes"
    if site.cpus_per_node and site.gpus_per_node:
        fix = f"its share of a node is {site.cpus_per_node * plan.gpus_per_node // site.gpus_per_node}, so {fix}"
    else:
        fix += "; with gpus_per_node and cpus_per_node in the cluster file, jobs that take whole nodes ask for all CPUs"
    message = (
        f"{plan.cpus_per_node} CPUs for {plan.gpus_per_node} GPUs of a node: one for each GPU or process and one more; "
        f"{spec.backend.type} can use several for each GPU; {fix}"
    )
    return [CheckFinding("few-cpus", "warning", place, message)]


# -- needs of the workers -------------------------------------------------------------------------


def check_model(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that the model exists, by its alias or as a directory."""
    model, place = planned_job.spec.model, "model.path"
    if model is None:
        return []
    known = planned_job.cluster.models
    found = planned_job.cluster.resolve_model(model.path)
    if found.startswith(HUB):
        message = f"the engine downloads {found} when it starts"
        return [CheckFinding("model", "not checked", place, message)]
    by = f'"{model.path}" is {found}, which' if model.path in known else f'"{found}"'
    path = Path(planned_job.plan.workdir, os.path.expanduser(found))
    if path.is_dir():
        return [CheckFinding("model", "ok", place, f"{by} exists")]
    if "/" not in model.path and model.path not in known:
        near = difflib.get_close_matches(model.path, known, 1, 0.5)
        hint = f'; did you mean "{near[0]}"?' if near else "; add it there, or give its path"
        known_words = f" (known: {', '.join(sorted(known))})" if known else ""
        message = f'"{model.path}" is neither a directory nor an alias of the cluster file{hint}{known_words}'
        return [CheckFinding("no-model-alias", "error", place, message)]
    what = "is not a directory" if path.exists() else "does not exist"
    message = f"{by} {what}; give the directory of the model, or hf:ORGANIZATION/NAME"
    return [CheckFinding("no-model", "error", place, message)]


def check_aliases(planned_job: PlannedJob) -> list[CheckFinding]:
    """Report a model or image that looks like an alias but is not one."""
    items, container, planned = check_model(planned_job), planned_job.spec.container, planned_job.plan.container
    if container is not None and planned is not None:
        items.append(_image(planned_job, container.image, planned.image))
    return [item for item in items if item.code in ("no-model-alias", "no-image-alias")]


def check_container(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that the image, the runtime and the mounts exist."""
    asked, planned = planned_job.spec.container, planned_job.plan.container
    if asked is None or planned is None:
        return []
    items = [_image(planned_job, asked.image, planned.image)]
    if planned.runtime == PYXIS and planned_job.local:
        message = (
            "pyxis is a plugin of srun, which `gpujob run` does not use; use apptainer or enroot, or submit the job"
        )
        items.append(CheckFinding("container-local", "error", "container.runtime", message))
    elif planned.runtime != PYXIS and shutil.which(planned.runtime, path=planned_job.environ.get("PATH")) is None:
        fix = (
            "install it, or load its module in this shell"
            if planned_job.local
            else "load its module in `setup.modules`"
        )
        message = f"{planned.runtime} is not on PATH here; {fix}, or use another runtime"
        items.append(
            CheckFinding("no-runtime", "error" if planned_job.local else "warning", "container.runtime", message)
        )
    return [*items, *_mounts(planned_job)]


def _image(planned_job: PlannedJob, asked: str, image: str) -> CheckFinding:
    place, known = "container.image", planned_job.cluster.containers
    by = f'"{asked}" is {image}, which' if asked in known else f'"{image}"'
    if _IMAGE_FILE.fullmatch(image):
        if Path(planned_job.plan.workdir, image).exists():
            return CheckFinding("image", "ok", place, f"{by} exists")
        return CheckFinding(
            "no-image", "error", place, f"{by} does not exist; give the file of the image, or import it first"
        )
    near = difflib.get_close_matches(asked, known, 1, 0.6) if asked not in known else []
    if near:
        message = (
            f'"{asked}" is not an alias of the cluster file, so it is pulled from a registry; did you mean "{near[0]}"?'
        )
        return CheckFinding("no-image-alias", "warning", place, message)
    return CheckFinding("image", "not checked", place, f"{by} is pulled from a registry when the job starts")


def _mounts(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    plan, place = planned_job.plan, "container.mounts"
    task = next((planned for planned in plan.tasks if planned.contained), None)
    if task is None or plan.container is None:
        return
    facts = RunFacts("0", plan.run_dir("0"), tuple(f"node{index}" for index in range(plan.nodes)))
    values = placeholder_values(plan, task, facts)
    refused = ":,\n" + (" \t" if plan.container.runtime == ENROOT else "")
    for mount in container_mounts(plan, task, facts):
        if found := [character for character in refused if character in mount.source + mount.target]:
            message = (
                f'"{mount.source}" contains {found[0]!r}, which {plan.container.runtime} does not accept in a mount; '
                "rename it"
            )
            yield CheckFinding("mount-path", "error", place, message)
    for key, given in (
        ("mounts", planned_job.cluster.mounts),
        (place, planned_job.spec.container and planned_job.spec.container.mounts),
    ):
        named = [parse_mount(fill_placeholders(text, values)) for text in given or ()]
        for mount in named:
            if not os.path.exists(mount.source):
                message = f'"{mount.source}" does not exist here; correct it, or create it on every node'
                yield CheckFinding("no-mount", "error" if planned_job.local else "warning", key, message)
        for target, count in Counter(mount.target for mount in named).items():
            if count > 1:
                yield CheckFinding(
                    "mount-twice", "warning", key, f"{target} is mounted {count} times; the last one applies"
                )


def check_setup(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that the setup script exists, and warn that a local run skips the setup."""
    parts, items = planned_job.plan.setup.parts, []
    for part in parts:
        if part.script is not None:
            if Path(part.script).is_file():
                items.append(CheckFinding("setup-script", "ok", "setup.script", f'"{part.script}" exists'))
            elif not planned_job.local:
                message = f'"{part.script}" is not a file; give its path from the working directory'
                items.append(CheckFinding("no-setup-script", "error", "setup.script", message))
    if parts and planned_job.local:
        message = "modules, script and preamble belong to the batch script; `gpujob run` ignores them"
        items.append(CheckFinding("setup-local", "warning", "setup", message))
    return items


def check_secrets(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that secrets are set here, and that none is written where others can read it."""
    items = []
    for name in planned_job.spec.secrets:
        if name in planned_job.environ:
            items.append(CheckFinding("secret", "ok", "secrets", f"{name} is set"))
        else:
            message = f"{name} is not set here; export it first, or leave it out"
            items.append(CheckFinding("no-secret", "error", "secrets", message))
    for place, names in _literal_secrets(planned_job):
        for name in names:
            message = (
                f"its value is in the job file; remove it and add `secrets: [{name}]`, which reads it from this shell"
            )
            items.append(CheckFinding("secret-value", "warning", f"{place}.{name}", message))
    for key, text in (("preamble", planned_job.cluster.preamble), ("setup.preamble", planned_job.spec.setup.preamble)):
        for name in _secret_names(dict(_EXPORTED.findall(text or ""))):
            message = f"{name} is written into the batch script; remove it and add `secrets: [{name}]`"
            items.append(CheckFinding("secret-value", "warning", key, message))
    return items


def _literal_secrets(planned_job: PlannedJob) -> Iterator[tuple[str, list[str]]]:
    """Secret-looking variables with a value in the job file, by place."""
    spec = planned_job.spec
    yield "env", _secret_names(spec.env)
    for index, workers in enumerate(spec.workers):
        yield f"workers[{index}].env", _secret_names(workers.env)
    yield "backend.env", _secret_names(spec.backend.env)
    for name in ("prefill", "decode", "agg"):
        yield f"backend.{name}.env", _secret_names(getattr(spec.backend, name).env)
    for key, part in (("frontend", spec.frontend), ("benchmark", spec.benchmark)):
        if part is not None:
            yield f"{key}.env", _secret_names(part.env)


def _secret_names(env: Mapping[str, str]) -> list[str]:
    return [
        name
        for name, value in env.items()
        # placeholders and variables
        if is_secret_name(name) and not is_harmless(value) and not value.startswith(("{", "$"))
    ]


# -- the job -------------------------------------------------------------------------------------


def check_roles(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that a job with prefill or decode has both."""
    roles = {planned.task.role for planned in planned_job.plan.tasks}
    if len(roles & {"prefill", "decode"}) != 1:
        return []
    (only,) = roles & {"prefill", "decode"}
    other = "decode" if only == "prefill" else "prefill"
    message = f"there are {only} workers and no {other} workers; for workers that do both, set resources.agg_workers"
    return [CheckFinding("topology-aggregated-style", "warning", f"resources.{other}_workers", message)]


def check_groups(planned_job: PlannedJob) -> list[CheckFinding]:
    """Warn about several workers that may be meant as one: each worker of these backends is a separate training."""
    kind, plan, items = planned_job.spec.backend.type, planned_job.plan, []
    if not BACKEND_KINDS[kind].is_group:
        return []
    workers: dict[str, dict[str, int]] = {}
    for planned in plan.tasks:
        if planned.stage == WORKERS:
            sizes = workers.setdefault(planned.task.role, {})
            sizes[planned.task.worker] = sizes.get(planned.task.worker, 0) + len(planned.task.gpus)
    for role, sizes in workers.items():
        gpus = sum(sizes.values())
        if len(sizes) < 2:
            continue
        where = "" if plan.nodes < 2 else " over both nodes" if plan.nodes == 2 else f" over all {plan.nodes} nodes"
        fits = gpus <= plan.gpus_per_node or (plan.gpus_per_node and gpus % plan.gpus_per_node == 0)
        fix = "count: 1" + (f", gpus: {gpus}" if gpus and fits else "")
        message = (
            f"{len(sizes)} workers of {kind} are {len(sizes)} separate trainings; for a single one{where} write {fix}"
        )
        items.append(CheckFinding("separate-workers", "warning", f"workers ({role}).count", message))
    return items


def check_benchmark(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that a benchmark has a server to send requests to."""
    benchmark = planned_job.spec.benchmark
    if benchmark is None or benchmark.type == "manual" or any("http" in task.ports for task in planned_job.plan.tasks):
        return []
    level: Status = "warning" if benchmark.type == "custom" else "error"
    message = f"{benchmark.type} sends requests to a front end and the job has none; name one under `frontend`"
    return [CheckFinding("no-frontend", level, "benchmark.type", message)]


def check_readiness(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that the readiness timeout is shorter than the time limit."""
    limit, readiness = _time_limit_s(planned_job), planned_job.plan.readiness
    if limit is None or readiness is None or not readiness.rules or readiness.timeout_s < limit:
        return []
    message = (
        f"{readiness.timeout_s:g} s is not below the time limit of {limit:g} s, so Slurm would end the job before it "
        "is reported that the model never became ready; use less"
    )
    return [CheckFinding("readiness-timeout", "warning", "readiness.timeout", message)]


def _time_limit_s(planned_job: PlannedJob) -> float | None:
    text = planned_job.plan.slurm.time_limit
    return None if planned_job.local or text is None else parse_time_limit(text)


def check_slurm(planned_job: PlannedJob) -> list[CheckFinding]:
    """Check that signal, requeue and segment suit the rest of the job."""
    asked, items = planned_job.plan.slurm, []
    limit = _time_limit_s(planned_job)
    if asked.signal and limit is not None:
        name, seconds = parse_signal(asked.signal)
        if seconds >= limit:
            message = (
                f"{seconds} s before a time limit of {limit:g} s is before the job starts, so {name} would come "
                "immediately; use fewer seconds"
            )
            items.append(CheckFinding("signal-early", "error", "slurm.signal", message))
    if asked.requeue and (asked.requeue.preempted or asked.requeue.time_limit):
        group = next(group for group in planned_job.plan.manifest.groups if group.name == "checkpoint")
        if group.pattern is None and not has_only_services(planned_job.plan):
            message = "no checkpoint is watched, so each attempt may start from zero; name them in patterns.checkpoints"
            items.append(CheckFinding("requeue-no-checkpoints", "warning", "slurm.requeue", message))
    parts = asked.het or [planned_job.plan.nodes]
    if asked.segment and (odd := next((nodes for nodes in parts if nodes % asked.segment), None)):
        message = f"{odd} nodes are not a multiple of {asked.segment}, so Slurm may refuse the job; use a divisor"
        items.append(CheckFinding("segment", "warning", "slurm.segment", message))
    return items
