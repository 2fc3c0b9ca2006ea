"""Manifest of a job: the wire format between launcher and exporter.

The exporter owns the format. The launcher writes the file before submission and never changes it. Job id, hosts and
attempt come from the environment at run time (``exporter.contract.identity``), so requeues and arrays reuse the file.

Readers ignore unknown keys (a newer launcher) and reject an unknown ``schema_version``. Standard library only.
"""

import dataclasses
import json
import os
import types
import typing
from dataclasses import field
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.alert_thresholds import THRESHOLDS, AlertThreshold
from exporter.contract.errors import ManifestError
from exporter.contract.lazy_dataclass import dataclass

SCHEMA_VERSION = 1
OWN_ADDRESSES = "the node's address and 127.0.0.1, on a free port"  # where a page without a listen address is
OPEN, AUTHENTICATED = METRICS_ACCESS = ("open", "authenticated")  # who may read the series
# How many series a page has: what alerts need, what the dashboards show too, or everything
ESSENTIAL, NORMAL, FULL = DETAILS = ("essential", "normal", "full")


@dataclass(frozen=True)
class Task:
    """One process that the launcher starts: a worker, or its part on one node."""

    worker: str
    role: str
    index: int
    rank: int
    local_rank: int
    node_index: int
    gpus: tuple[int, ...] = ()
    # Relative to the run directory; `{node}` is the host name, `{run}` the suffix of the run
    logs: tuple[str, ...] = ()
    critical: bool = True  # whether its failure fails the job
    later: bool = False  # whether it starts only when others are ready, like a benchmark; not part of the launch
    service: bool = False  # whether it serves until the job ends, without a position of its own
    restarts: int = 0  # most restarts by the policy of its worker
    visible_gpus: int = 0  # how many it sees, if more than its own: those of its worker, of which it selects by rank


@dataclass(frozen=True)
class PathGroup:
    """Files watched together; ``directory`` is relative to the run directory."""

    name: str
    directory: str
    pattern: str | None  # glob of file names; None to watch only the free space of the directory


@dataclass(frozen=True)
class LogPattern:
    """A regular expression for one log record. Progress patterns have no severity."""

    name: str
    pattern: str
    severity: str | None = None


@dataclass(frozen=True)
class Verification:
    """Results required for a job that ended well to count as a success."""

    complete_share: float = 0.99  # least share of the job's items that must be done
    outputs: int | None = None  # least number of output files; None: one per worker, if their names show the worker
    records_per_item: float | None = 1.0  # records in the output files per item; None: not counted
    checksums: bool = False  # whether to write checksums of the output files into the run directory


@dataclass(frozen=True)
class WorkerSearchPlan:
    """Where to search for the workers of an attached job."""

    pid_file: str  # their process ids in the order of the workers
    must_exist: bool = False  # whether a missing pid file is a problem
    slurm_job_id: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything a sidecar needs that is not in its environment."""

    job_name: str
    user: str
    cluster: str  # the site's name for the cluster; empty for Slurm's name
    partition: str
    nodes: int
    tasks: tuple[Task, ...]
    groups: tuple[PathGroup, ...] = ()
    # log files in addition to those of the tasks; worker numbers in their names distinguish them
    logs: PathGroup | None = None
    pack: str = "auto"  # producer of the workers' logs; `auto` detects it from the lines
    progress: tuple[LogPattern, ...] = ()
    errors: tuple[LogPattern, ...] = ()
    total_items: int | None = None  # of the whole job
    total_epochs: int | None = None  # of each worker, if its logs do not give a total
    total_steps: int | None = None  # of each worker, if its logs do not give a total
    resumes: bool = False  # whether the job continues from earlier output files, which then count as its own
    verify: Verification = Verification()
    time_limit_s: float | None = None
    requeues: int = 0  # how many attempts, from the first, are requeued at the time limit
    check_interval_s: float = 5.0
    launch_timeout_s: float = 60.0
    stall_timeout_s: float = 300.0
    checkpoint_interval_s: float | None = None  # seconds between checkpoints, if they cannot be learned from the files
    linger_s: float = 30.0
    kill_wait_s: float = 30.0  # time between SIGTERM and SIGKILL when Slurm ends the job
    gpu_metrics: bool = False  # whether to write GPU activity to `gpu_metrics.csv` in the output directory too
    announced: bool = False  # whether the job's targets are published for Prometheus
    listen_address: str | None = None  # None: `OWN_ADDRESSES`
    web_config_file: str | None = None  # TLS and users of the page, in the format of Prometheus' exporters
    metrics_access: str = OPEN  # who may read the series, if that file names no users or client certificates
    detail: str = NORMAL  # how many series the page has
    alert_thresholds: tuple[AlertThreshold, ...] = ()  # where they differ from those of the rules
    notify: str = ""  # who is notified of its alerts: a name that Alertmanager routes by; empty for the site's routes
    # whether another user started the job: there are no exit records, and the sidecar infers the phase
    attached: bool = False
    search: WorkerSearchPlan | None = None  # of an attached job
    # directory that the manifest was read from; not part of the file
    run_dir: Path = field(default=Path(), metadata={"derived": True})

    def tasks_of(self, node_index: int) -> tuple[Task, ...]:
        """Return the tasks of the node with this index."""
        return tuple(task for task in self.tasks if task.node_index == node_index)

    def ranks_of_roles(self) -> dict[tuple[str, int], int]:
        """Rank of each worker's first task, by role and index."""
        return {(task.role, task.index): task.rank for task in sorted(self.tasks, key=lambda task: -task.local_rank)}

    def directory(self, group: PathGroup) -> Path:
        """Directory of a path group, joined to ``run_dir``."""
        return self.run_dir / group.directory


def render_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON object of a manifest."""
    body = {
        item.name: _plain(getattr(manifest, item.name))
        for item in dataclasses.fields(manifest)
        if not item.metadata.get("derived")
    }
    return {"schema_version": SCHEMA_VERSION, **body}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value


def parse_manifest(text: str, run_dir: Path) -> Manifest:
    """Parse a manifest; raise ManifestError with the problem."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not JSON: {error}") from error
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"schema_version is {version!r}, this exporter reads {SCHEMA_VERSION}; "
            "use the exporter of the installation that launched the job"
        )
    try:
        values = _known_values(Manifest, body)
        values["tasks"] = tuple(
            Task(**{**_known_values(Task, task), "gpus": tuple(task["gpus"]), "logs": tuple(task["logs"])})
            for task in body["tasks"]
        )
        values["groups"] = tuple(PathGroup(**_known_values(PathGroup, group)) for group in body["groups"])
        values["logs"] = PathGroup(**_known_values(PathGroup, body["logs"])) if body.get("logs") else None
        values["search"] = (
            WorkerSearchPlan(**_known_values(WorkerSearchPlan, body["search"])) if body.get("search") else None
        )
        values["verify"] = Verification(**_known_values(Verification, body.get("verify", {})))
        for key in ("progress", "errors"):
            values[key] = tuple(LogPattern(**_known_values(LogPattern, entry)) for entry in body[key])
        # a newer launcher may know more of them
        values["alert_thresholds"] = tuple(
            AlertThreshold(**_known_values(AlertThreshold, entry))
            for entry in body.get("alert_thresholds", ())
            if entry["alert"] in THRESHOLDS
        )
        parts = (*values["tasks"], *values["groups"], *values["progress"], *values["errors"], values["verify"])
        parts += values["alert_thresholds"]
        parts += (values["search"],) if values["search"] else ()
        for owner in (Manifest, *parts):
            _check_types(owner, values)
        return Manifest(**values, run_dir=run_dir)
    except (KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"incomplete or malformed: {error}") from error


def _check_types(owner: Any, values: dict[str, Any]) -> None:
    """Raise ManifestError for the first plain value of the wrong type. An int is accepted as a float."""
    kind = owner if isinstance(owner, type) else type(owner)
    for name, hint in typing.get_type_hints(kind).items():
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not set(allowed) <= {str, int, float, bool, type(None)}:
            continue
        value = values.get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name)
        number = float in allowed and isinstance(value, int) and not isinstance(value, bool)
        is_known = type(value) in allowed or (number and abs(value) < run_files.MOST_NUMBER)
        if value is not _ABSENT and not is_known:
            raise ManifestError(f"{kind.__name__.lower()}: {name} is {value!r}, not of type {hint}")


_ABSENT = object()


def _known_values(kind: type, body: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind) if not item.metadata.get("derived")}
    return {key: value for key, value in body.items() if key in names}


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest from a file, or from the run directory if ``path`` is a directory."""
    place = Path(path)
    if place.is_dir():
        place = place / "manifest.json"
    try:
        text = run_files.read_json_text(place)
    except OSError as error:
        raise ManifestError(f"{place}: {error.strerror}") from error
    try:
        return parse_manifest(text, place.resolve().parent)
    except ManifestError as error:
        raise ManifestError(f"{place}: {error}") from error
