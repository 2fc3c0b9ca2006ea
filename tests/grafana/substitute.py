"""Replaces the variables in a dashboard query, for Prometheus or a parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VARIABLE = re.compile(r"\$\{?([a-zA-Z_]\w*)(?::\w+)?\}?")  # `$1` is a group of a regular expression

# Queries that return nothing where no GPU can be read.
NEED_A_GPU = (
    *("gpus_answering", "gpus_visible_by_node", "gpu_energy", "gpu_health", "gpu_foreign"),
    *("gpu_utilization", "gpu_memory", "gpu_power", "gpu_temperature", "gpu_throttle"),
)

# Queries that may return nothing for a healthy job, each with its reason.
MAY_BE_EMPTY: Mapping[str, str] = {
    "ready_workers": "the job waits for no service",
    "ready_expected": "as ready_workers",
    "eta_now": "the time to the end is unknown before enough progress was seen, and after the last worker",
    "eta_p10": "as eta_now",
    "eta_p50": "as eta_now",
    "eta_p90": "as eta_now",
    "rate_now": "a rate that is no longer measured is absent, as after the last worker",
    "rate_average": "as rate_now",
    "item_rate_current": "as rate_now",
    "item_rate_average": "as rate_now",
    "worker_rate": "as rate_now",
    "workers_rate": "as rate_now",
    "workers_age": "a worker that has exited makes no progress",
    "time_left": "a job without a time limit has no time left to it",
    "time_left_now": "as time_left",
    "margin_now": "needs a time limit and a time to the end",
    "chance": "as margin_now",
    "slowdown": "a worker has one speed until it has shown another",
    "lag": "two workers or fewer cannot be compared",
    "exits": "no worker has exited yet",
    "exit_times": "as exits",
    "exit_status": "as exits",
    "exits_in_time": "as exits",
    "worker_exit": "as exits",
    "firing": "no alert fires",
    "alerts_now": "as firing",
    "log_values": "no pattern of the job has a name",
    "log_highest": "as log_values",
    "log_lowest": "as log_values",
    "checkpoint": "no checkpoint is complete yet",
    "restarts": "no worker has been restarted yet",
    "restarts_in_time": "as restarts",
    "worker_rss": "a worker that has exited has no memory",
    "memory_used": "the job may be in no memory cgroup of its own",
    "memory_working_set": "as memory_used",
    "memory_peak": "as memory_used; cgroups v2 tell it since Linux 5.19",
    "memory_limit": "the job may be without a memory limit",
    "memory_pressure": "cgroups v1 do not tell it",
    "oom_kills": "as memory_used",
    "log_errors": "no line matches an error pattern",
    "output_age": "no file has been written yet",
    "output_growth": "growth needs two looks at the files",
    **dict.fromkeys(NEED_A_GPU, "there is no GPU, or none can be read"),
    "sm_activity": "GPUs before Hopper do not tell it",
    "tensor_activity": "as sm_activity",
    "dram_activity": "as sm_activity",
    "nvlink": "the GPUs have no NVLink",
    "pcie": "it is read only when that is turned on",
    "gpu_ecc": "there was no memory error, or no ECC that counts it",
    "gpu_link_errors": "as nvlink",
    "pcie_replays": "MIG instances do not tell it",
    "xids": "no error was reported",
    "collector_duration": "pages of full detail alone tell it",
    "gpu_conditions": "nothing is the matter with the GPU of any worker",
}


def variables(*, cluster: str, job_id: str, node: str = ".*", scrape: int = 15, span: int = 900) -> dict[str, str]:
    """Values that Grafana gives the variables. `scrape` and `span`, the time range, are in seconds."""
    step = max(scrape, span // 500)
    return {
        "cluster": cluster,
        "job_id": job_id,
        "node": node,
        **dict.fromkeys(("gpu", "user", "partition"), ".*"),
        "datasource": "prometheus",
        "__range": f"{span}s",
        "__interval": f"{step}s",
        "__rate_interval": f"{max(4 * scrape, step + scrape)}s",
    }


def substitute(text: str, values: Mapping[str, str]) -> str:
    """The text with all variables replaced. A variable without a value is an error."""

    def value(match: re.Match[str]) -> str:
        return values[match.group(1)]

    return VARIABLE.sub(value, text)


def panels_of(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows and panels of a board, those in closed rows too, in their order."""
    return [inner for panel in board["panels"] for inner in (panel, *(panel.get("panels") or []))]
