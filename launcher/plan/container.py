"""Command lines that run a task in a container of pyxis, Apptainer or enroot. Pure.

With pyxis the whole step runs in the container, including the wrapper. The other runtimes are a program that the
wrapper starts instead of the worker's command.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from launcher.plan.placeholders import fill_placeholders, placeholder_values, task_environment
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.programs.environment import GIVEN_PREFIX

PYXIS, APPTAINER, ENROOT = "pyxis", "apptainer", "enroot"
PACKAGES_IN_CONTAINER = (
    "/opt/gpujob-launcher"  # our packages in a container; chosen so that it hides nothing of the image
)
PACKAGES = Path(__file__).resolve().parents[2]  # directory of our packages on this machine
# starts the wrapper, which needs only the standard library, where our packages are not installed
WRAPPER_CODE = (
    f"import sys; sys.path.insert(0, {PACKAGES_IN_CONTAINER!r}); "
    "from launcher.programs.wrapper import main; main(sys.argv[1:])"
)

_IMAGE_FILE = re.compile(r"[./~].*|.*\.(?:sqsh|squashfs|sif|img)")
_ENROOT_STEP_SCRIPT = (
    "for name in $(env | sed -n 's/^\\(\\(SLURM\\|PMI\\|PMIX\\)_[A-Za-z0-9_]*\\)=.*/\\1/p'); "
    'do set -- --env "$name" "$@"; done; exec enroot start "$@"'
)  # starts an MPI rank with the variables by which Slurm connects the ranks
# before the names of variables that override those of the image
_GIVEN_PREFIXES = {PYXIS: GIVEN_PREFIX, APPTAINER: "APPTAINERENV_"}
_EVALUATED = re.compile(r"[$`\\]")  # what Apptainer evaluates in them as a shell does
_OF_RUNTIME = ("PATH", "LD_LIBRARY_PATH")  # Apptainer passes neither on, and itself needs those of the node


@dataclass(frozen=True)
class ContainerMount:
    """A directory or file of the node, and its path in the container."""

    source: str
    target: str
    flags: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.source, self.target, self.flags) if part)


def is_image_file(image: str) -> bool:
    """Whether the text is the path of a file, not a name that a runtime pulls."""
    return bool(_IMAGE_FILE.fullmatch(image)) and "://" not in image


def parse_mount(text: str) -> ContainerMount:
    """Parse ``source:target[:flags]``, already checked as ``launcher.jobfile.slurm.Mount``."""
    source, _, rest = text.partition(":")
    target, _, flags = rest.partition(":")
    return ContainerMount(os.path.expanduser(source), target, flags)


def container_runtime(plan: Plan, planned: TaskPlan) -> str | None:
    """Runtime of the container that a task runs in, or None if it runs in none."""
    return plan.container.runtime if plan.container is not None and planned.contained else None


def container_mounts(
    plan: Plan, planned: TaskPlan, facts: RunFacts, packages: Path = PACKAGES
) -> tuple[ContainerMount, ...]:
    """Mounts of a task's container: our packages, the job's directories, those of the cluster and job files.

    Of mounts with the same target, the last counts. The run directory comes last, so that the job's records always
    reach it.
    """
    values = placeholder_values(plan, planned, facts)
    own = (plan.workdir, plan.job_dir, *(values[name] for name in ("output_dir", "checkpoint_dir", "log_dir")))
    texts = plan.container.mounts if plan.container is not None else ()
    asked = tuple(parse_mount(fill_placeholders(text, values)) for text in texts)
    return _unique_mounts(
        packages if container_runtime(plan, planned) == PYXIS else None, own, asked, str(facts.run_dir)
    )


@lru_cache(maxsize=16)
def _unique_mounts(
    packages: Path | None, own: tuple[str, ...], given: tuple[ContainerMount, ...], run_dir: str
) -> tuple[ContainerMount, ...]:
    """Mounts without duplicate targets; cached, because most tasks have the same."""
    found: dict[str, ContainerMount] = {}
    for mount in (
        *(
            ContainerMount(str(packages / name), f"{PACKAGES_IN_CONTAINER}/{name}", "ro")
            for name in ("exporter", "launcher")
            if packages
        ),
        *(ContainerMount(path, path) for path in own if not _is_within(path, own)),
        *given,
        ContainerMount(run_dir, run_dir),
    ):
        target = os.path.normpath(mount.target)
        found.pop(target, None)
        found[target] = mount
    return tuple(found.values())


def _is_within(path: str, folders: Iterable[str]) -> bool:
    """Whether a path lies within another of these folders and so is mounted with it."""
    return any(path != folder and path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def pyxis_options(plan: Plan, planned: TaskPlan, facts: RunFacts, packages: Path = PACKAGES) -> list[str]:
    """Options of srun for a step in a pyxis container; empty for other tasks."""
    if plan.container is None or container_runtime(plan, planned) != PYXIS:
        return []
    seen = container_mounts(plan, planned, facts, packages)
    return [
        f"--container-image={plan.container.image}",
        f"--container-mounts={','.join(map(str, seen))}",
        "--no-container-mount-home",
        f"--container-workdir={plan.container.workdir or plan.workdir}",
    ]


def container_wrapper_argv(plan: Plan, planned: TaskPlan) -> list[str]:
    """Words that start a task's wrapper in its image; empty when our own interpreter starts it."""
    if plan.container is None or container_runtime(plan, planned) != PYXIS:
        return []
    return [plan.container.python, "-I", "-B", "-c", WRAPPER_CODE]


def container_worker_argv(plan: Plan, planned: TaskPlan, facts: RunFacts, command: Sequence[str]) -> list[str]:
    """Words that a task's wrapper starts: the task's own, behind those of Apptainer or enroot if it uses them."""
    runtime = container_runtime(plan, planned)
    if plan.container is None or runtime not in (APPTAINER, ENROOT):
        return list(command)
    seen = container_mounts(plan, planned, facts)
    workdir = plan.container.workdir or plan.workdir
    if runtime == APPTAINER:
        argv = ["apptainer", "exec", "--no-home", *(["--nv"] if plan.gpus_per_node else [])]
        for mount in seen:
            argv += ["--bind", str(mount)]
        return [*argv, "--pwd", workdir, plan.container.image, *command]
    argv = ["sh", "-c", _ENROOT_STEP_SCRIPT, "sh"] if planned.step else ["enroot", "start"]
    for mount in seen:  # fields of fstab(5), separated by colons (enroot's doc/cmd/start.md)
        flags = f"x-create=auto,rbind,{mount.flags or 'rw'}"
        argv += ["--mount", f"{mount.source}:{mount.target}:none:{flags}"]
    for name in _forwarded_variables(plan, planned, facts):
        argv += ["--env", name]
    # enroot has no option for the working directory
    return [*argv, plan.container.image, "sh", "-c", 'cd "$0" && exec "$@"', workdir, *command]


def container_environment(plan: Plan, planned: TaskPlan, variables: Mapping[str, str]) -> dict[str, str]:
    """A task's variables as they reach it in its container, also where the image has others.

    No image has variables of gpujob and Slurm, and the wrapper sets those of GPUs.
    """
    runtime = container_runtime(plan, planned)
    if runtime not in (PYXIS, APPTAINER):
        return dict(variables)
    prefix, left_alone = _GIVEN_PREFIXES[runtime], ("GPUJOB_", "SLURM_", "CUDA_VISIBLE_DEVICES")
    given = {f"{prefix}{name}": value for name, value in variables.items() if not name.startswith(left_alone)}
    if runtime == PYXIS:
        return {**variables, **given}
    given.pop(f"{prefix}HOME", None)  # Apptainer sets HOME itself, and only warns in the log that it keeps its own
    if any(_EVALUATED.search(value) for value in given.values()):
        given["APPTAINER_NO_EVAL"] = "1"  # since 1.1; not always, since a site may have `$` in variables of its own
    return {**{name: value for name, value in variables.items() if name not in _OF_RUNTIME}, **given}


def _forwarded_variables(plan: Plan, planned: TaskPlan, facts: RunFacts) -> list[str]:
    """Names of variables to pass on explicitly: enroot drops the rest of its environment."""
    given: Mapping[str, str] = task_environment(plan, planned, facts, 0)
    resume = {"GPUJOB_RESUME"} if facts.attempt else set()
    required = plan.container.variables if plan.container is not None else ()
    of_wrapper = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return sorted({*given, *plan.secrets, *required, *resume, *of_wrapper, "GPUJOB_FOM_URL", "GPUJOB_TOKEN"})
