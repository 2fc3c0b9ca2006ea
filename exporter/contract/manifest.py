"""What was launched and is to be watched: the wire format between launcher and exporter.

The exporter owns the format, the launcher writes it once, before submission, and
never again: job id, hosts and attempt come from the environment at run time
(``exporter.contract.identity``), so that requeue and arrays reuse the file. Workers are
named by role and index, their tasks by rank and node index.

Reading ignores unknown keys (a newer launcher) and refuses an unknown
``schema_version``. Standard library only.
"""

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter.contract.errors import ManifestError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Task:
    """One process that the launcher starts: a worker, or a worker's share of one node."""

    worker: str
    role: str
    index: int
    rank: int
    local_rank: int
    node_index: int
    gpus: tuple[int, ...] = ()
    logs: tuple[str, ...] = ()
    """Log files relative to the run directory; ``{node}`` stands for the host name, ``{run}`` for the run."""
    critical: bool = True  # whether its failure is that of the job
    later: bool = False
    """Whether it starts only once others are ready, as a benchmark does: it is no part of the launch."""
    service: bool = False  # whether it serves until the job is over: it has no work of its own to tell a position of


@dataclass(frozen=True)
class PathGroup:
    """Files watched together; a relative directory counts from the run directory."""

    name: str
    directory: str
    pattern: str | None  # glob of file names, or None when only the space of the directory is watched


@dataclass(frozen=True)
class LogPattern:
    """A regular expression over one record of a log. Progress patterns have no severity."""

    name: str
    pattern: str
    severity: str | None = None


@dataclass(frozen=True)
class Verification:
    """What the work must come to for a job that has ended well to be a success."""

    complete_share: float = 0.99  # share of the items of the job that is enough
    outputs: int | None = None
    """Least number of output files; None: one of each worker, where their names tell whose they are."""
    records_per_item: float | None = 1.0  # records in the output files for each item; None when they are not counted
    checksums: bool = False  # whether checksums of the output files are written into the run directory


@dataclass(frozen=True)
class Manifest:
    """Everything a sidecar must know that its environment does not tell."""

    job_name: str
    user: str
    cluster: str  # name that the site gives the cluster; empty for Slurm's own name
    partition: str
    nodes: int
    tasks: tuple[Task, ...]
    groups: tuple[PathGroup, ...] = ()
    logs: PathGroup | None = None  # log files beside those of the tasks, told apart by the worker number in their names
    pack: str = "auto"  # whose log lines the workers write; `auto` is found out from the lines
    progress: tuple[LogPattern, ...] = ()
    errors: tuple[LogPattern, ...] = ()
    total_items: int | None = None  # items of the whole job
    total_epochs: int | None = None  # epochs of each worker, where its logs do not say how many there are,
    total_steps: int | None = None  # and steps
    resumes: bool = False  # whether the job goes on where output files of earlier ones end: they count as its own
    verify: Verification = Verification()
    time_limit_s: float | None = None
    check_interval_s: float = 5.0
    launch_timeout_s: float = 60.0
    stall_timeout_s: float = 300.0
    checkpoint_interval_s: float | None = None
    """Seconds between two checkpoints, where they are not to be learned from the files."""
    linger_s: float = 30.0
    kill_wait_s: float = 30.0  # time between SIGTERM and SIGKILL when Slurm ends the job
    gpu_metrics: bool = False  # whether what the GPUs do is also written to `gpu_metrics.csv` in the output directory
    announced: bool = False  # whether the targets of the job are announced where a Prometheus looks for them
    listen_address: str = ":0"
    attached: bool = False
    """Whether the job was started by others: nobody writes exit records, and the phase is the sidecar's own finding."""
    run_dir: Path = field(default=Path(), metadata={"derived": True})
    """Where the manifest was read from; not part of the file."""

    def tasks_of(self, node_index: int) -> tuple[Task, ...]:
        """Tasks that run on the node with this index."""
        return tuple(task for task in self.tasks if task.node_index == node_index)

    def ranks_of_roles(self) -> dict[tuple[str, int], int]:
        """Rank of the first task of each worker, by role and index within it."""
        return {(task.role, task.index): task.rank for task in sorted(self.tasks, key=lambda task: -task.local_rank)}

    def directory(self, group: PathGroup) -> Path:
        """Absolute directory of a path group."""
        return self.run_dir / group.directory


def render_manifest(manifest: Manifest) -> dict[str, Any]:
    """The JSON object of a manifest."""
    body = {
        item.name: _plain(getattr(manifest, item.name))
        for item in dataclasses.fields(manifest)
        if not item.metadata.get("derived")
    }
    return {"schema_version": SCHEMA_VERSION, **body}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value


def parse_manifest(text: str, run_dir: Path) -> Manifest:
    """The manifest in ``text``; raises ManifestError with what is wrong."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ManifestError(f"not JSON: {error}") from error
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"schema_version is {version!r}, this exporter reads {SCHEMA_VERSION}; "
            "use the exporter of the installation that launched the job"
        )
    try:
        values = _known(Manifest, body)
        values["tasks"] = tuple(
            Task(**{**_known(Task, task), "gpus": tuple(task["gpus"]), "logs": tuple(task["logs"])})
            for task in body["tasks"]
        )
        values["groups"] = tuple(PathGroup(**_known(PathGroup, group)) for group in body["groups"])
        values["logs"] = PathGroup(**_known(PathGroup, body["logs"])) if body.get("logs") else None
        values["verify"] = Verification(**_known(Verification, body.get("verify", {})))
        for key in ("progress", "errors"):
            values[key] = tuple(LogPattern(**_known(LogPattern, entry)) for entry in body[key])
        parts = (*values["tasks"], *values["groups"], *values["progress"], *values["errors"], values["verify"])
        for owner in (Manifest, *parts):
            _check_types(owner, values)
        return Manifest(**values, run_dir=run_dir)
    except (KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"incomplete or of the wrong shape: {error}") from error


def _check_types(owner: Any, values: dict[str, Any]) -> None:
    """Raise for the first plain value that is not of its declared type; a whole number may stand for a number."""
    kind = owner if isinstance(owner, type) else type(owner)
    for name, hint in typing.get_type_hints(kind).items():
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not set(allowed) <= {str, int, float, bool, type(None)}:
            continue
        value = values.get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name)
        number = float in allowed and isinstance(value, int) and not isinstance(value, bool)
        if value is not _ABSENT and type(value) not in allowed and not number:
            raise ManifestError(f"{kind.__name__.lower()}: {name} is {value!r}, not of type {hint}")


_ABSENT = object()


def _known(kind: type, body: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind) if not item.metadata.get("derived")}
    return {key: value for key, value in body.items() if key in names}


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest in a file, or in the run directory when ``path`` is a directory."""
    place = Path(path)
    if place.is_dir():
        place = place / "manifest.json"
    try:
        text = place.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ManifestError(f"{place}: {error.strerror}") from error
    try:
        return parse_manifest(text, place.resolve().parent)
    except ManifestError as error:
        raise ManifestError(f"{place}: {error}") from error
