"""Prometheus target files (file_sd) of a job, in its run directory and in the site's target directory."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.identity import safe_label
from exporter.contract.records import Record, RecordError, to_json
from exporter.contract.target_files import ENGINE_JOB, SCRAPE_JOB, SITE_PREFIX, TargetGroup
from launcher.plan.plan import Plan, RunFacts, TaskPlan, safe_file_word


class SidecarRecord(Record):
    """What a sidecar publishes when it listens."""

    attempt: int
    address: str
    labels: Mapping[str, str]  # of all its series
    certificate: str | None = None  # SHA-256 of its certificate; None without TLS


def read_sidecars(run_dir: Path, attempt: int) -> dict[str, SidecarRecord]:
    """Records that the sidecars of this attempt have published, by node."""
    try:
        paths = sorted((run_dir / run_files.SIDECARS_DIR).glob("[!.]*.json"))
    except OSError:
        return {}
    found = {}
    for path in paths:
        try:
            record = SidecarRecord.from_json(run_files.read_json(path))
        except RecordError:
            continue
        if record.attempt == attempt:
            found[path.stem] = record
    return found


def sidecar_target_groups(sidecars: Iterable[SidecarRecord], notify: str) -> list[TargetGroup]:
    """One file_sd group per sidecar, with the same labels as its series, and who is notified of the job's alerts.

    This gives `running_ranks` the labels, and makes a scrape configuration work with or without ``honor_labels``.
    """
    further = {"job": SCRAPE_JOB, **({"notify": notify} if notify else {})}
    return [TargetGroup((record.address,), {**record.labels, **further}) for record in sidecars]


def engine_target_groups(
    plan: Plan, facts: RunFacts, labels: Mapping[str, str], running_ranks: Iterable[int]
) -> list[TargetGroup]:
    """file_sd groups of workers and front ends that serve metrics and whose ranks are ``running_ranks``.

    ``labels`` are those of the job; each group adds its node, worker, role and rank.
    """
    started, found = set(running_ranks), []
    for planned in plan.tasks:
        endpoint, task = metrics_endpoint(planned), planned.task
        if endpoint is None or task.rank not in started:
            continue
        host, port = facts.address(task.node_index), endpoint[0] + facts.port_offset
        own = {
            "node": safe_label(facts.hosts[task.node_index]),
            "worker": task.worker,
            "role": task.role,
            "rank": str(task.rank),
            "job": ENGINE_JOB,
            "__metrics_path__": endpoint[1],
        }
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        found.append(TargetGroup((address,), {**labels, **own}))
    return found


def metrics_endpoint(planned: TaskPlan) -> tuple[int, str] | None:
    """Port (before the offset) and path of a task's own metrics, from ``TaskPlan.metrics``; None without any.

    For a worker on several nodes, the process that has the port serves all of them.
    """
    name, _, path = (planned.metrics or "").partition("/")
    port = planned.ports.get(name.removesuffix("_port"))
    return None if port is None else (port, f"/{path}")


class TargetFiles:
    """The target files of one job."""

    def __init__(self, run_dir: Path, target_dir: str | None) -> None:
        self._paths = [run_dir / run_files.TARGETS_FILE]
        if target_dir:
            self._paths.append(Path(target_dir, f"{SITE_PREFIX}{safe_file_word(run_dir.name)}.json"))
        self._published: dict[Path, list[TargetGroup]] = {}
        self._failures: dict[Path, str] = {}  # last problem of each file that could not be written
        self.problems: list[str] = []  # why a file could not be written or removed, one sentence each

    def publish(self, groups: list[TargetGroup]) -> bool:
        """Write the groups to each file that does not have them yet. Returns whether anything was written."""
        due = [path for path in self._paths if groups and self._published.get(path) != groups]
        for path in due:
            try:
                run_files.write_json(path, to_json(groups), mode=0o644)  # Prometheus is another user
            except OSError as error:
                problem = f"cannot write targets to {path}: {error.strerror}"
                if self._failures.get(path) != problem:
                    self.problems.append(problem)
                self._failures[path] = problem
            else:
                self._published[path] = groups
                self._failures.pop(path, None)
        return any(path not in self._failures for path in due)

    def remove(self) -> None:
        """Remove the files, so that Prometheus drops the targets."""
        for path in self._paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.problems.append(f"cannot remove {path}: {error.strerror}")
