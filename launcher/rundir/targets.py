"""Prometheus finds sidecars and engines: ``targets.json`` (file_sd) in the run directory and where the site looks."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.identity import safe_label
from launcher.plan.plan import Plan, RunFacts, TaskPlan, safe_file_word

SCRAPE_JOB = "gpujob-sidecar"
"""Value of the targets' ``job`` label, whatever the scrape configuration is called: rules count on it."""
ENGINE_JOB = "gpujob-engine"  # the same of what the workers' programs tell of themselves: no rule of ours is about it


def read_sidecars(run_dir: Path, attempt: int) -> dict[str, dict[str, Any]]:
    """What the sidecars of this attempt have published, by node."""
    found: dict[str, dict[str, Any]] = {}
    try:
        paths = sorted((run_dir / run_files.SIDECARS_DIR).iterdir())
    except OSError:
        return found
    for path in paths:
        record = run_files.read_json(path) if path.suffix == ".json" and not path.name.startswith(".") else None
        if record is not None and record.get("attempt") == attempt and isinstance(record.get("address"), str):
            found[path.stem] = record
    return found


def sidecar_target_groups(sidecars: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """file_sd groups, one per sidecar, with the labels that its series carry too.

    So `up` has them, and a scrape configuration works with and without ``honor_labels``.
    """
    return [{"targets": [record["address"]], "labels": {**record["labels"], "job": SCRAPE_JOB}} for record in sidecars]


def engine_target_groups(
    plan: Plan, facts: RunFacts, labels: Mapping[str, str], up: Iterable[int]
) -> list[dict[str, Any]]:
    """file_sd groups of the workers and front ends whose programs serve metrics, of those whose ranks are ``up``.

    ``labels`` are those of the job; a group has its own node, worker, role and rank.
    """
    started, found = set(up), []
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
        found.append({"targets": [address], "labels": {**labels, **own}})
    return found


def metrics_endpoint(planned: TaskPlan) -> tuple[int, str] | None:
    """Port before the offset and path of a task's own metrics, ``http_port/metrics`` in the plan; None without any.

    Of a worker on several nodes the process that has the port serves for all.
    """
    name, _, path = (planned.metrics or "").partition("/")
    port = planned.ports.get(name.removesuffix("_port"))
    return None if port is None else (port, f"/{path}")


class TargetFiles:
    """The target files of one job."""

    def __init__(self, run_dir: Path, target_dir: str | None) -> None:
        self._paths = [run_dir / run_files.TARGETS_FILE]
        if target_dir:
            self._paths.append(Path(target_dir, f"gpujob-{safe_file_word(run_dir.name)}.json"))
        self._published: list[dict[str, Any]] | None = None
        self.problems: list[str] = []
        """Why a file could not be written, one sentence for each."""

    def publish(self, groups: list[dict[str, Any]]) -> bool:
        """Write the groups where they changed; whether anything was written."""
        if groups == self._published or not groups:
            return False
        for path in self._paths:
            try:
                run_files.write_json(path, groups)
                path.chmod(0o644)
            except OSError as error:
                self.problems.append(f"cannot write targets to {path}: {error.strerror}")
        self._published = groups
        return True

    def remove(self) -> None:
        """Take the files away: Prometheus then forgets the targets."""
        for path in self._paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.problems.append(f"cannot remove {path}: {error.strerror}")
