"""Experiment trackers whose runs are ended with the job, and the variable by which such a run names its job. Pure."""

import json
from collections.abc import Iterable

MLFLOW = "mlflow"
TRACKERS = (MLFLOW,)
CONTEXT = "MLFLOW_RUN_CONTEXT"  # JSON object with tags that MLflow adds to each run that it starts
TAG = "gpujob.run"  # the name of the run directory


def tracker_environment(trackers: Iterable[str], run_dir_name: str) -> dict[str, str]:
    """Variables of tasks; the name may contain the placeholder for the job id."""
    return {CONTEXT: json.dumps({TAG: run_dir_name})} if MLFLOW in trackers else {}
