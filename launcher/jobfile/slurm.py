"""Slurm options, container and setup in a job file."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from exporter.contract.bounded_yaml import WrittenInt
from launcher.jobfile.value_types import Directory, FileModel, TimeLimit, as_written, check_entry

_DIRECTIVE = re.compile(r"[a-z][a-z0-9-]*")
_SIGNAL = re.compile(r"(?:SIG)?(?P<name>[A-Z][A-Z0-9]*)@(?P<seconds>\d{1,9})")
_DEPENDENCY_IDS = "(?:after|afterany|afterok|afternotok|aftercorr|afterburstbuffer|expand)"
_DEPENDENCY = re.compile(rf"(?:{_DEPENDENCY_IDS}(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+|singleton)")
SIGNALS = ("USR1", "USR2")  # those that the orchestrator passes on as a warning; others end the job or do nothing
MOST_SIGNAL_S = 65535  # longest time before the time limit that sbatch accepts (sbatch(1), ``--signal``)

_RESERVED_DIRECTIVES = {
    "output": "the run directory",
    "error": "the run directory",
    "open-mode": "the run directory",
    "array": "sweep",
    "nodes": "resources.nodes",
    "ntasks": "resources",
    "ntasks-per-node": "resources",
    "ntasks-per-gpu": "resources",
    "ntasks-per-socket": "resources",
    "cpus-per-task": "resources.cpus_per_node",
    "cpus-per-gpu": "resources.cpus_per_node",
    "mem": "resources.memory_per_node",
    "gpus": "resources.gpus_per_node and gpu_type",
    "gpus-per-node": "resources.gpus_per_node and gpu_type",
    "gpus-per-socket": "resources.gpus_per_node",
    "gpus-per-task": "resources.gpus_per_node",
    "gres": "resources.gpus_per_node and gpu_type",
    "tres-per-node": "resources.gpus_per_node and gpu_type",
    "tres-per-task": "resources.gpus_per_node",
    "job-name": "name",
    "chdir": "workdir",
    "time": "slurm.time_limit",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "dependency": "slurm.dependency",
    "segment": "slurm.segment",
    "signal": "slurm.signal",
    "parsable": "`gpujob submit --json`",
    "test-only": "`gpujob check`",
    "hold": "`gpujob submit`, which releases the job when its run directory is complete",
    "wait": "`gpujob watch`, since `gpujob submit` does not wait",
}
_WITH_YES_OR_NO = ("kill-on-invalid-dep",)


def parse_signal(text: str) -> tuple[str, int]:
    """Name and seconds of ``USR1@120``, the syntax of sbatch's ``--signal``."""
    match = _SIGNAL.fullmatch(text.removeprefix("B:"))
    if not match:
        raise ValueError(
            f'{text!r} is not a signal and its seconds before the time limit; write for example "USR1@120"'
        )
    name, seconds = match["name"], int(match["seconds"])
    if name not in SIGNALS:
        raise ValueError(
            f"{name!r} does not reach the workers as a warning; use {' or '.join(SIGNALS)}, "
            f'for example "USR1@{seconds}"'
        )
    if not 0 < seconds <= MOST_SIGNAL_S:
        raise ValueError(f"{seconds} seconds before the time limit is not within 1 to {MOST_SIGNAL_S}")
    return name, seconds


def check_dependency(text: str) -> str:
    """Check a dependency of sbatch: ``type:job[:job...]``, joined by ``,`` (all) or ``?`` (any)."""
    parts = re.split(r"[,?]", text)
    if "," in text and "?" in text:
        raise ValueError(f"{text!r} mixes , (all of them) and ? (any of them), which sbatch does not accept; use one")
    for part in parts:
        if not _DEPENDENCY.fullmatch(part):
            raise ValueError(f'{part!r} is not a dependency; write for example "afterok:4459" or "singleton"')
    return text


def _directive_problem(name: str) -> str | None:
    if not _DIRECTIVE.fullmatch(name):
        return f"{name!r} is not a long option of sbatch; write it without --"
    if name in _RESERVED_DIRECTIVES:
        return f"{name!r} is set by {_RESERVED_DIRECTIVES[name]}; leave it out here"
    return None


def _yes_or_no(directives: dict[str, str | int | bool | None]) -> dict[str, str | int | bool | None]:
    """YAML reads ``yes`` and ``no`` as true and false, which otherwise mean an option without a value, or none."""
    words = {True: "yes", False: "no"}
    return {
        name: words[value] if name in _WITH_YES_OR_NO and isinstance(value, bool) else value
        for name, value in directives.items()
    }


# further options of sbatch, without those that another key sets
Directives = Annotated[
    dict[Annotated[str, check_entry(_directive_problem)], Annotated[str | int | bool | None, as_written(WrittenInt)]],
    AfterValidator(_yes_or_no),
]
Dependency = Annotated[str, AfterValidator(check_dependency)]
Signal = Annotated[str, AfterValidator(lambda text: "{}@{}".format(*parse_signal(text)))]


class RequeueSpec(FileModel):
    """When the job goes back into the queue, to continue as its next attempt."""

    preempted: bool = False
    time_limit: bool = False
    max: int = Field(3, ge=1, le=1000)


class SlurmSpec(FileModel):
    """Options for sbatch, beyond the resources."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: TimeLimit | None = None
    directives: Directives = {}

    dependency: Dependency | None = None
    exclusive: bool = False
    segment: int | None = Field(None, ge=1)
    het: bool = False
    signal: Signal | None = None
    requeue: RequeueSpec = RequeueSpec()

    @model_validator(mode="after")
    def _said_once(self) -> "SlurmSpec":
        twice = {"exclusive": ("exclusive",), "requeue": ("requeue", "no-requeue")}
        for key, names in twice.items():
            for name in names:
                if key in self.model_fields_set and name in self.directives:
                    raise ValueError(f"directives: {name!r} is set by slurm.{key} too; leave one of them out")
        return self


def _mount_problem(text: str) -> str | None:
    source, colon, rest = text.partition(":")
    target, _, flags = rest.partition(":")
    if not colon or not source or not target:
        return f"{text!r} is not a mount; write host:container, for example /data:/data:ro"
    if source[0] not in "/~{" or target[0] not in "/{":
        return f"{text!r}: both sides of a mount must be absolute paths"
    if flags not in ("", "ro", "rw"):
        return f'{text!r}: "{flags}" is neither ro nor rw'
    if "," in text or "\n" in text:
        return f"{text!r}: the path of a mount must not contain a comma or a line end"
    return None


# ``source:target[:flags]``, both absolute after ``~`` and placeholders are replaced
Mount = Annotated[str, check_entry(_mount_problem)]


def _module_problem(name: str) -> str | None:
    if re.fullmatch(r"[\w+][\w.+/@=~:-]*", name, re.ASCII):
        return None
    return f"{name!r} is not the name of a module; write it as for `module load`, one per entry"


EnvironmentModule = Annotated[str, check_entry(_module_problem)]


NotEmpty = Annotated[str, check_entry(lambda text: None if text.strip() else "is empty")]


class ContainerSpec(FileModel):
    """The container in which workers run."""

    image: NotEmpty
    runtime: Literal["pyxis", "apptainer", "enroot"] = "pyxis"
    mounts: list[Mount] = []
    workdir: str | None = None
    python: NotEmpty = "python3"


class SetupSpec(FileModel):
    """Steps of the batch script before any part of the job starts."""

    modules: list[EnvironmentModule] = []
    script: Directory | None = None
    preamble: str | None = None
