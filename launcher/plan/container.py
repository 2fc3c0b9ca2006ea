"""Containers: what srun, Apptainer or enroot are told so that a task runs in one. Pure.

With pyxis the step itself is in the container, the wrapper too; the other runtimes
are a program that the wrapper starts in place of the worker's own.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from launcher.plan.placeholders import fill_placeholders, placeholder_values, task_environment
from launcher.plan.plan import Plan, RunFacts, TaskPlan

PYXIS, APPTAINER, ENROOT = "pyxis", "apptainer", "enroot"
OURS = "/opt/gpujob-launcher"
"""Where our packages are in a container: nothing of an image is there, and nothing of it is hidden."""
PACKAGES = Path(__file__).resolve().parents[2]  # the folder of our packages here
BOOT = f"import sys; sys.path.insert(0, {OURS!r}); from launcher.programs.wrapper import main; main(sys.argv[1:])"
"""Program of an interpreter that knows nothing of us. The wrapper needs the standard library alone."""

_ENROOT_OF_STEP = (
    "for name in $(env | sed -n 's/^\\(\\(SLURM\\|PMI\\|PMIX\\)_[A-Za-z0-9_]*\\)=.*/\\1/p'); "
    'do set -- --env "$name" "$@"; done; exec enroot start "$@"'
)  # text for sh that starts a rank of MPI with the variables by which Slurm tells it where the others are


@dataclass(frozen=True)
class ContainerMount:
    """A directory or file of the node, and where it is in the container."""

    source: str
    target: str
    flags: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.source, self.target, self.flags) if part)


def parse_mount(text: str) -> ContainerMount:
    """``source:target[:flags]``, as ``spec_slurm.ContainerMount`` has let it pass."""
    source, _, rest = text.partition(":")
    target, _, flags = rest.partition(":")
    return ContainerMount(os.path.expanduser(source), target, flags)


def runtime_of(plan: Plan, planned: TaskPlan) -> str | None:
    """What puts a task into its container, or None for one outside."""
    return plan.container.runtime if plan.container is not None and planned.contained else None


def container_mounts(
    plan: Plan, planned: TaskPlan, facts: RunFacts, packages: Path = PACKAGES
) -> tuple[ContainerMount, ...]:
    """What a task's container sees of its node: ours, what the job reads and writes, the cluster's, the job's.

    Of two with the same target the later one counts. The run directory comes last: whatever is mounted where it
    lies, the records of the job must get there.
    """
    values = placeholder_values(plan, planned, facts)
    own = (plan.workdir, plan.job_dir, *(values[name] for name in ("output_dir", "checkpoint_dir", "log_dir")))
    texts = plan.container.mounts if plan.container is not None else ()
    asked = tuple(parse_mount(fill_placeholders(text, values)) for text in texts)
    return _mounts(packages if runtime_of(plan, planned) == PYXIS else None, own, asked, str(facts.run_dir))


@lru_cache(maxsize=16)
def _mounts(
    packages: Path | None, own: tuple[str, ...], asked: tuple[ContainerMount, ...], run_dir: str
) -> tuple[ContainerMount, ...]:
    """Made once for all tasks for which they are the same."""
    found: dict[str, ContainerMount] = {}
    for mount in (
        *(
            ContainerMount(str(packages / name), f"{OURS}/{name}", "ro")
            for name in ("exporter", "launcher")
            if packages
        ),
        *(ContainerMount(path, path) for path in own if not _lies_in(path, own)),
        *asked,
        ContainerMount(run_dir, run_dir),
    ):
        target = os.path.normpath(mount.target)
        found.pop(target, None)
        found[target] = mount
    return tuple(found.values())


def _lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a path lies within another one of these, which brings it along."""
    return any(path != folder and path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def pyxis_options(plan: Plan, planned: TaskPlan, facts: RunFacts, packages: Path = PACKAGES) -> list[str]:
    """Options of srun for a step in a container of pyxis; none for any other task."""
    if plan.container is None or runtime_of(plan, planned) != PYXIS:
        return []
    seen = container_mounts(plan, planned, facts, packages)
    return [
        f"--container-image={plan.container.image}",
        f"--container-mounts={','.join(map(str, seen))}",
        "--no-container-mount-home",
        f"--container-workdir={plan.container.workdir or plan.workdir}",
    ]


def wrapper_words(plan: Plan, planned: TaskPlan) -> list[str]:
    """The words that start a task's wrapper within its image; none where our own interpreter starts it."""
    if plan.container is None or runtime_of(plan, planned) != PYXIS:
        return []
    return [plan.container.python, "-I", "-B", "-c", BOOT]


def worker_words(plan: Plan, planned: TaskPlan, facts: RunFacts, words: Sequence[str]) -> list[str]:
    """The words that a task's wrapper starts: those of the task, or the runtime that has them as its command."""
    runtime = runtime_of(plan, planned)
    if plan.container is None or runtime not in (APPTAINER, ENROOT):
        return list(words)
    seen = container_mounts(plan, planned, facts)
    workdir = plan.container.workdir or plan.workdir
    if runtime == APPTAINER:
        argv = ["apptainer", "exec", "--no-home", *(["--nv"] if plan.gpus_per_node else [])]
        for mount in seen:
            argv += ["--bind", str(mount)]
        return [*argv, "--pwd", workdir, plan.container.image, *words]
    argv = ["sh", "-c", _ENROOT_OF_STEP, "sh"] if planned.step else ["enroot", "start"]
    for mount in seen:  # the fields of fstab(5), with colons (enroot's doc/cmd/start.md)
        flags = f"x-create=auto,rbind,{mount.flags or 'rw'}"
        argv += ["--mount", f"{mount.source}:{mount.target}:none:{flags}"]
    for name in _passed_on(plan, planned, facts):
        argv += ["--env", name]
    # it has no option for the directory to start in
    return [*argv, plan.container.image, "sh", "-c", 'cd "$0" && exec "$@"', workdir, *words]


def _passed_on(plan: Plan, planned: TaskPlan, facts: RunFacts) -> list[str]:
    """Variables that enroot hands on by name: it takes nothing else of its environment along."""
    given: Mapping[str, str] = task_environment(plan, planned, facts, 0)
    resume = {"GPUJOB_RESUME"} if facts.attempt else set()
    return sorted({*given, *plan.secrets, *resume, "CUDA_VISIBLE_DEVICES", "GPUJOB_FOM_URL"})
