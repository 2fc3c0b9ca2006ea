"""Prometheus finds the sidecars: ``targets.json`` (file_sd) in the run directory and in the site's target directory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exporter import records
from launcher.plan import file_word

SCRAPE_JOB = "gpujob-sidecar"
"""Value of the targets' ``job`` label, whatever the scrape configuration is called: rules count on it."""


def read_sidecars(run_dir: Path, attempt: int) -> dict[str, dict[str, Any]]:
    """What the sidecars of this attempt have published, by node."""
    found: dict[str, dict[str, Any]] = {}
    try:
        paths = sorted((run_dir / records.SIDECARS_DIR).iterdir())
    except OSError:
        return found
    for path in paths:
        record = records.read_json(path) if path.suffix == ".json" and not path.name.startswith(".") else None
        if record is not None and record.get("attempt") == attempt and isinstance(record.get("address"), str):
            found[path.stem] = record
    return found


def target_groups(sidecars: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """file_sd groups, one per sidecar, with the labels that its series carry too.

    So `up` has them, and a scrape configuration works with and without ``honor_labels``.
    """
    return [{"targets": [record["address"]], "labels": {**record["labels"], "job": SCRAPE_JOB}} for record in sidecars]


class Targets:
    """The target files of one job."""

    def __init__(self, run_dir: Path, target_dir: str | None) -> None:
        self._paths = [run_dir / records.TARGETS_FILE]
        if target_dir:
            self._paths.append(Path(target_dir, f"gpujob-{file_word(run_dir.name)}.json"))
        self._published: list[dict[str, Any]] | None = None
        self.problems: list[str] = []
        """Why a file could not be written, one sentence for each."""

    def publish(self, groups: list[dict[str, Any]]) -> bool:
        """Write the groups where they changed; whether anything was written."""
        if groups == self._published or not groups:
            return False
        for path in self._paths:
            try:
                records.write_json(path, groups)
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
