"""Preflight checks of models, containers, secrets and Slurm options."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.check.role_programs import UNLESS_ON_NODES, may_be_on_nodes
from launcher.errors import did_you_mean
from launcher.jobfile.alerts.notify import OWN_NAMES
from launcher.jobfile.backend_kinds import BACKEND_KINDS, ENGINES
from launcher.jobfile.jobfile import HUB
from launcher.jobfile.redaction import is_harmless, is_secret_name
from launcher.jobfile.resources import command_argv
from launcher.jobfile.slurm import parse_signal
from launcher.jobfile.value_types import parse_time_limit
from launcher.plan.container import APPTAINER, ENROOT, PYXIS, container_mounts, is_image_file, parse_mount
from launcher.plan.placeholders import fill_placeholders, placeholder_values, shell_text_index
from launcher.plan.plan import BENCHMARK, DECODE, PREFILL, WORKERS, Plan
from launcher.planner.planned_job import PlannedJob
from launcher.rundir.cluster_file import read_trusted_owners
from launcher.rundir.trust import distrust

# a launcher as the program of a command or of a line of shell text, in a group with the name of its backend
_LAUNCHER = re.compile(
    r"(?:^|[\n;&|(]|\bexec\b)\s*(?:[\w./-]*/)?"
    r"(?:(?P<torchrun>torchrun|python[\d.]*(?:\s+-\w+)*\s+-m\s+torch\.distributed\.(?:run|launch))"
    r"|(?P<accelerate>accelerate\s+launch)|(?P<deepspeed>deepspeed)|(?P<mpi>mpirun|mpiexec))(?=\s|$)"
)
# an option that says where the processes of a launcher meet
_MEETING_OPTION = re.compile(r"\s--(?:standalone|hostfile|(?:master|main[_-]process|rdzv|node|machine)[_-][a-z]+)\b")
# between two commands of shell text; with a single one, the shell replaces itself by the program
_BETWEEN_COMMANDS = re.compile(r"[|;]|(?<!\\)\n|(?<!>)&(?!>)")
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|(?<!\S)#[^\n]*")  # text in which such signs are none, and comments
_EXPORTED = re.compile(r"(?m)(?:^|[;&\s])(?:export\s+)?([A-Za-z_]\w*)=[\"']?([^\s\"';]*)")


def check_planned_job(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Run the checks that every start needs."""
    for check in (
        check_model,
        check_container,
        check_setup,
        check_secrets,
        check_roles,
        check_groups,
        check_launchers,
        check_benchmark,
        check_readiness,
        check_slurm,
        check_slurm_signal,
        check_notify,
    ):
        yield from check(planned_job)


def has_only_services(plan: Plan) -> bool:
    """Whether all tasks except the benchmark are services, so that the job writes no output or checkpoints."""
    return all(planned.service or planned.stage == BENCHMARK for planned in plan.tasks)


# -- needs of the workers -------------------------------------------------------------------------


def check_model(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the model exists, by its alias or as a directory."""
    model, place = planned_job.spec.model, "model.path"
    if model is None:
        return
    known = planned_job.cluster.models
    found = planned_job.cluster.resolve_model(model.path)
    if found.startswith(HUB):
        yield finding.not_checked("model", place, f"the engine downloads {found} when it starts")
        return
    by = f'"{model.path}" is {found}, which' if model.path in known else f'"{found}"'
    path = Path(planned_job.plan.workdir, os.path.expanduser(found))
    if path.is_dir():
        yield finding.ok("model", place, f"{by} exists")
    elif "/" not in model.path and model.path not in known:
        hint = did_you_mean(model.path, known) or "; add it there, or give its path"
        known_words = f" (known: {', '.join(sorted(known))})" if known else ""
        message = f'"{model.path}" is neither a directory nor an alias of the cluster file{hint}{known_words}'
        yield finding.error("no-model-alias", place, message)
    else:
        what = "is not a directory" if path.exists() else "does not exist here"
        message, fix = f"{by} {what}; ", "give the directory of the model, or hf:ORGANIZATION/NAME"
        if may_be_on_nodes(planned_job, str(path)):
            yield finding.warning("no-model", place, message + UNLESS_ON_NODES + fix)
        else:
            yield finding.error("no-model", place, message + fix)


def check_container(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the image, the runtime and the mounts exist."""
    planned, local = planned_job.plan.container, planned_job.local
    level = finding.error if local else finding.warning
    if planned is None:
        return
    yield from _image(planned_job)
    if planned.runtime == PYXIS and local:
        message = (
            "pyxis is a plugin of srun, which `gpujob run` does not use; use apptainer or enroot, or submit the job"
        )
        yield finding.error("container-local", "container.runtime", message)
    elif planned.runtime != PYXIS and shutil.which(planned.runtime, path=planned_job.environ.get("PATH")) is None:
        fix = "install it, or load its module in this shell" if local else "load its module in `setup.modules`"
        message = f"{planned.runtime} is not on PATH here; {fix}, or use another runtime"
        yield level("no-runtime", "container.runtime", message)
    yield from _mounts(planned_job)


def _image(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    planned, spec = planned_job.plan.container, planned_job.spec.container
    if planned is None or spec is None:
        return
    place, known, asked, image = "container.image", planned_job.cluster.containers, spec.image, planned.image
    by = f'"{asked}" is {image}, which' if asked in known else f'"{image}"'
    exists = Path(planned_job.plan.workdir, image).exists()
    if is_image_file(image) or (exists and planned.runtime != PYXIS):
        if exists:
            yield finding.ok("image", place, f"{by} exists")
        else:
            message, fix = f"{by} does not exist here; ", "give the file of the image, or import it first"
            if may_be_on_nodes(planned_job, image):
                yield finding.warning("no-image", place, message + UNLESS_ON_NODES + fix)
            else:
                yield finding.error("no-image", place, message + fix)
    elif problem := _registry_problem(image, planned.runtime):
        yield finding.error("image-name", place, f"{by} {problem}")
    elif asked not in known and (hint := did_you_mean(asked, known, 0.6)):
        message = f'"{asked}" is not an alias of the cluster file, so it is pulled from a registry{hint}'
        yield finding.warning("no-image-alias", place, message)
    else:
        yield finding.not_checked("image", place, f"{by} is pulled from a registry when the job starts")


def _registry_problem(image: str, runtime: str) -> str | None:
    """Why a runtime cannot start an image with this name, which is not a file."""
    if runtime == APPTAINER:
        return None if "://" in image else "is not a file; write docker:// before the name of a registry's image"
    if runtime == ENROOT:
        is_container = not re.search(r"[/:#]", image)  # made by `enroot create`
        return None if is_container else "is not a file, and enroot pulls none; make a file by `enroot import`"
    name = image.removeprefix("docker://")
    host, slash, path = name.partition("/")
    if slash and "#" not in name and "://" not in name and re.search(r"[.:]", host):
        return f"would be searched for on Docker Hub; write {host}#{path}"
    return None


def _mounts(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    plan, spec, place = planned_job.plan, planned_job.spec.container, "container.mounts"
    level = finding.error if planned_job.local else finding.warning
    task = next((planned for planned in plan.tasks if planned.contained), None)
    if task is None or plan.container is None or spec is None:
        return
    facts = plan.facts_before_run()
    values = placeholder_values(plan, task, facts)
    refused = ":,\n" + (" \t" if plan.container.runtime != APPTAINER else "")  # fields of fstab(5) elsewhere
    for mount in container_mounts(plan, task, facts):
        if found := [character for character in refused if character in mount.source + mount.target]:
            what = f"contains {found[0]!r}, which {plan.container.runtime} does not accept in a mount"
            yield finding.error("mount-path", place, f'"{mount.source}" {what}; rename it')
    for key, given in (("mounts", planned_job.cluster.mounts), (place, spec.mounts)):
        named = [parse_mount(fill_placeholders(text, values)) for text in given]
        for mount in named:
            if not os.path.exists(mount.source):
                message = f'"{mount.source}" does not exist here; correct it, or create it on every node'
                yield level("no-mount", key, message)
        for target, count in Counter(mount.target for mount in named).items():
            if count > 1:
                message = f"{target} is mounted {count} times; the last one applies"
                yield finding.warning("mount-twice", key, message)


def check_setup(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the setup script exists and is trusted, and warn that a local run skips the setup."""
    for part in planned_job.plan.setup.parts:
        is_used = part.script is not None and not planned_job.local
        if is_used and (problem := distrust(Path(str(part.script)), read_trusted_owners)):
            message = f"is not used: {problem}; use a copy of your own"
            yield finding.error("untrusted-script", "setup.script", message)
            continue
        if part.script is not None and Path(part.script).is_file():
            yield finding.ok("setup-script", "setup.script", f'"{part.script}" exists')
        elif part.script is not None and not planned_job.local:
            message = f'"{part.script}" is not a file; give its path from the working directory'
            yield finding.error("no-setup-script", "setup.script", message)
    if planned_job.plan.setup.parts and planned_job.local:
        message = "modules, script and preamble belong to the batch script; `gpujob run` ignores them"
        yield finding.warning("setup-local", "setup", message)


def check_secrets(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that secrets are set here, and that none is written where others can read it."""
    for name in planned_job.spec.secrets:
        if name in planned_job.environ:
            yield finding.ok("secret", "secrets", f"{name} is set")
        else:
            yield finding.error("no-secret", "secrets", f"{name} is not set here; export it first, or leave it out")
    for place, env in _literal_variables(planned_job):
        for name in _secret_names(env):
            fix = f"remove it and add `secrets: [{name}]`, which reads it from this shell"
            yield finding.warning("secret-value", f"{place}.{name}", f"its value is in the job file; {fix}")
    for key, text in (("preamble", planned_job.cluster.preamble), ("setup.preamble", planned_job.spec.setup.preamble)):
        for name in _secret_names(dict(_EXPORTED.findall(text or ""))):
            message = f"{name} is written into the batch script; remove it and add `secrets: [{name}]`"
            yield finding.warning("secret-value", key, message)


def _literal_variables(planned_job: PlannedJob) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Variables with a value in the job file, by place."""
    spec = planned_job.spec
    yield "env", spec.env
    for index, workers in enumerate(spec.workers):
        yield f"workers[{index}].env", workers.env
    for key, part in spec.processes():
        yield f"{key}.env", part.env


def _secret_names(env: Mapping[str, str]) -> list[str]:
    return [
        name
        for name, value in env.items()
        # placeholders and variables
        if is_secret_name(name) and not is_harmless(value) and not value.startswith(("{", "$"))
    ]


# -- the job -------------------------------------------------------------------------------------


def check_roles(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that a job with prefill or decode has both."""
    roles = {planned.task.role for planned in planned_job.plan.tasks}
    for only, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        if only in roles and other not in roles:
            what = f"there are {only} workers and no {other} workers"
            message = f"{what}; for workers that do both, set resources.agg_workers"
            yield finding.warning("topology-aggregated-style", f"resources.{other}_workers", message)


def check_groups(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Warn about several workers that may be meant as one: each worker of these backends is a separate training."""
    kind, plan = planned_job.spec.backend.type, planned_job.plan
    if not BACKEND_KINDS[kind].is_group:
        return
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
        yield finding.warning("separate-workers", f"workers ({role}).count", message)


def check_launchers(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Warn about launchers in commands that would start too many processes, or that would not find each other."""
    kind, workers = planned_job.spec.backend.type, planned_job.spec.workers
    is_group = BACKEND_KINDS[kind].is_group
    found = {
        each.role: match
        for each in (workers if kind not in ENGINES else ())
        if (match := _launcher_in(command_argv(each))) and (is_group or not _MEETING_OPTION.search(match.string))
    }
    tasks = [each for each in planned_job.plan.tasks if each.stage == WORKERS and each.task.role in found]
    node_of = {each.task.rank: 0 if planned_job.local else each.task.node_index for each in tasks}
    on_node = Counter(node_of.values())
    for role, match in found.items():
        own = [each for each in tasks if each.task.role == role]
        name, backend = match[match.lastgroup or 0], match.lastgroup
        processes = max((each.worker_size for each in own), default=0)
        fix = f"write only the script and its arguments, and `backend: {{type: {backend}}}`"
        if is_group:
            problem, fix = f"each process of {kind} starts {name}", "write only the script and its arguments"
        elif processes > 1:
            problem = f"each of the {processes} processes of a worker starts {name}, which knows nothing of the others"
        elif backend != "mpi" and any(on_node[node_of[each.task.rank]] > 1 for each in own):
            problem = f"several processes on a node start {name}, all with its default port"
        else:
            continue
        yield finding.warning("launcher-in-command", f"workers ({role}).command", f"{problem}; {fix}")


def _launcher_in(command: Sequence[str]) -> re.Match[str] | None:
    at = shell_text_index(command)
    return _LAUNCHER.match(" ".join(command)) if at is None else _LAUNCHER.search(command[at])


def check_benchmark(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that a benchmark has a server to send requests to."""
    benchmark = planned_job.spec.benchmark
    if benchmark is None or benchmark.type == "manual" or any("http" in task.ports for task in planned_job.plan.tasks):
        return
    message = f"{benchmark.type} sends requests to a front end and the job has none; name one under `frontend`"
    level = finding.warning if benchmark.type == "custom" else finding.error
    yield level("no-frontend", "benchmark.type", message)


def check_readiness(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the readiness timeout is shorter than the time limit."""
    limit, readiness = _time_limit_s(planned_job), planned_job.plan.readiness
    if limit is None or readiness is None or not readiness.rules or readiness.timeout_s < limit:
        return
    message = (
        f"{readiness.timeout_s:g} s is not below the time limit of {limit:g} s, so Slurm would end the job before it "
        "is reported that the model never became ready; use less"
    )
    yield finding.warning("readiness-timeout", "readiness.timeout", message)


def _time_limit_s(planned_job: PlannedJob) -> float | None:
    text = planned_job.plan.slurm.time_limit
    return None if planned_job.local or text is None else parse_time_limit(text)


def check_slurm(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that signal, requeue and segment suit the rest of the job."""
    asked, limit = planned_job.plan.slurm, _time_limit_s(planned_job)
    if asked.time_limit and re.fullmatch(r"\d+:\d+", asked.time_limit):
        first, second = map(int, asked.time_limit.split(":"))
        meant = f"{first}h" + (f"{second}m" if second else "")
        message = f"Slurm reads {asked.time_limit} as minutes and seconds; for hours and minutes write {meant}"
        yield finding.warning("minutes-and-seconds", "slurm.time_limit", message)
    if asked.signal and limit is not None:
        name, seconds = parse_signal(asked.signal)
        if seconds >= limit:
            message = (
                f"{seconds} s before a time limit of {limit:g} s is before the job starts, so {name} would come "
                "immediately; use fewer seconds"
            )
            yield finding.error("signal-early", "slurm.signal", message)
    if asked.requeue and (asked.requeue.preempted or asked.requeue.time_limit):
        group = planned_job.plan.group("checkpoint")
        if group.pattern is None and not has_only_services(planned_job.plan):
            message = "no checkpoint is watched, so each attempt may start from zero; name them in patterns.checkpoints"
            yield finding.warning("requeue-no-checkpoints", "slurm.requeue", message)
    parts = asked.het or [planned_job.plan.nodes]
    if asked.segment and (odd := next((nodes for nodes in parts if nodes % asked.segment), None)):
        message = f"{odd} nodes are not a multiple of {asked.segment}, so Slurm may refuse the job; use a divisor"
        yield finding.warning("segment", "slurm.segment", message)


def check_slurm_signal(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Warn about launchers and shells of workers that the signal before the time limit would end."""
    asked = planned_job.plan.slurm.signal
    if asked is None or planned_job.local:
        return
    name, _ = parse_signal(asked)
    tasks = (each for each in planned_job.plan.tasks if each.stage == WORKERS and not each.service)
    for role, command in {each.task.role: each.argv for each in tasks}.items():
        if found := _ended_parent(command, name):
            parent, fix = found
            message = f"{name} may end {parent} of {role}, which does not pass it on to the program; {fix}"
            yield finding.warning("signal-not-passed-on", "slurm.signal", message)


def _ended_parent(command: Sequence[str], name: str) -> tuple[str, str] | None:
    """The parent of the program that this signal would end, a launcher or shell, and what to do; None without one."""
    launcher, at = _launcher_in(command), shell_text_index(command)
    if any(name in word for word in command):  # a trap, or an option
        return None
    if launcher and launcher.lastgroup not in (None, "mpi"):  # mpirun passes it on
        return str(launcher.lastgroup), "leave it out, and save at intervals or at SIGTERM"
    text = "" if at is None else command[at].strip()
    if _BETWEEN_COMMANDS.search(_QUOTED.sub("", text)) and not re.search(r"\bexec\b", text):
        return "the shell", f"start that with `exec`, or trap {name}"
    return None


def check_notify(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the one who is notified is a channel of the site. A site without channels routes in its own way."""
    name, notify = planned_job.spec.alerts.notify, planned_job.cluster.notify
    if name is None or not notify.channels or name in (*OWN_NAMES, *notify.channels):
        return
    known = (*OWN_NAMES, *notify.channels)
    message = f'"{name}" is not a channel of the cluster file{did_you_mean(name, known)} (known: {", ".join(known)})'
    yield finding.error("no-channel", "alerts.notify", message)
