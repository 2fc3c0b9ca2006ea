"""The course of a run that has completed, kept for the next run of the same job."""

import os
from collections.abc import Mapping
from typing import Any

from exporter.contract.manifest import Manifest
from exporter.progress.history_reader import run_history, write_history
from launcher.statuses import merge_workers, read_statuses


def keep_history(manifest: Manifest, report: Mapping[str, Any]) -> None:
    """Write down what the sidecars of all nodes have seen of the workers: only now is known that all went well."""
    if report["state"] != "COMPLETED" or report["duration_s"] is None or report["end"] is None:
        return
    workers = list(merge_workers(read_statuses(manifest.run_dir, report["attempt"])).values())
    run = run_history(workers, manifest.total_items, report["duration_s"], report["end"])
    if run is not None:
        write_history(manifest.job_name, os.environ, run)
