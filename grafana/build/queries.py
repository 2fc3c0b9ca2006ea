"""The queries of the board of one job, each with a name; panels refer to them.

`$cluster`, `$job_id` and `$node` are variables of the dashboard. The row Overview is about
the whole job, so its queries ignore `$node`. Everything below it follows the chosen nodes.

A file is reported by one node only, also when all nodes see it, so files and bytes are added up.
A file system is reported by every node, so of that the one with least space counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RATE = "$__rate_interval"
RANGE = "$__range"
INTERVAL = "$__interval"


@dataclass(frozen=True)
class Query:
    """A PromQL expression and how its series are called.

    `instant` asks for the value at the end of the time range only, so that a value which has
    gone absent shows as unknown; without it a panel shows the last one known in the range.
    """

    name: str
    expr: str
    legend: str = ""
    instant: bool = False
    table: bool = False
    step: str = ""  # least time between points, if the series are scraped less often than Grafana knows


def over_time(expr: str, legend: str = "", step: str = "") -> Query:
    """A query that one panel alone asks, and that needs no name."""
    return Query("", expr, legend, step=step)


def now(expr: str, legend: str = "") -> Query:
    return Query("", expr, legend, instant=True)


def listed(expr: str) -> Query:
    return Query("", expr, instant=True, table=True)


def since(labels: str, matchers: str) -> Query:
    """Firing alerts, and since when their condition holds. Milliseconds, as Grafana wants a date."""
    firing = f'ALERTS{{{matchers}, alertstate="firing"}}'
    return listed(f"min by ({labels}) (ALERTS_FOR_STATE{{{matchers}}}\n  and ignoring (alertstate) {firing}) * 1000")


_OF_JOB = 'cluster="$cluster", job_id="$job_id"'


def _select(metric: str, *matchers: str, **labels: str) -> str:
    equal = (f'{name}="{value}"' for name, value in labels.items())
    return metric + "{" + ", ".join((_OF_JOB, *matchers, *equal)) + "}"


def _job(metric: str, **labels: str) -> str:
    """The metric for all nodes of the chosen job."""
    return _select(metric, **labels)


def _node(metric: str, **labels: str) -> str:
    """The metric for the chosen nodes of the chosen job."""
    return _select(metric, 'node=~"$node"', **labels)


def _new(metric: str, window: str) -> str:
    """The rise of a counter of the job within the window, to be summed. A series that began in it began at 0.

    A counter that is 0 has no series, and `increase` does not see a first value. The first values have no `instance`,
    so `or` keeps both parts, and a sidecar that restarts at another address begins no counter.
    """
    return new(_node(metric), window)


def _ten(worst: str, shown: str, rank: str) -> str:
    """Those ten of the series `shown` of which `rank` is worst at the end of the time range.

    They are the same ten in the whole range: `topk` alone would choose anew for each point.
    """
    by = shown[shown.index("by (") + 3 : shown.index(")") + 1]
    return f"{shown}\nand on {by} {worst}(10, {rank})"


def new(series: str, window: str, seen: str = "") -> str:
    """The rise of a counter, to be summed, as `_new`.

    Of counters that are older than what Prometheus knows of them, first values count only if `seen`, a series of the
    same pages, has more samples in the window than they: then Prometheus knew the page before they began.
    """
    first = f"min without (instance) (min_over_time({series}[{window}]))"
    only = ""
    if seen:
        own, of_page = (f"sum without (instance) (count_over_time({name}[{window}]))" for name in (series, seen))
        only = f"\n    and ignoring (instance) ({own}\n      < on (cluster) group_left () max by (cluster) ({of_page}))"
    return (
        f"(\n  increase({series}[{window}])\n  or {first}\n"
        f"    unless ignoring (instance) {series} offset {window}{only}\n)"
    )


# Overview

JOB_INFO = Query(
    "job_info",
    f"count by (job_name, user, partition, attempt) (last_over_time({_job('gpujob_info')}[{RANGE}]))",
    instant=True,
    table=True,
)

PHASES = ("launching", "running", "checkpointing", "evaluating", "completing", "finished")


def phase_numbers(matchers: str) -> str:
    """One number per phase, in the order of PHASES."""
    return "\n  or ".join(
        f'(gpujob_phase{{{matchers}, phase="{phase}"}} == 1) * {number}' for number, phase in enumerate(PHASES, start=1)
    )


# The least of all nodes: a job is launching until each node has launched, and finished when each node is.
PHASE = Query("phase", f"min(\n  {phase_numbers(_OF_JOB)}\n)", "phase")

PROGRESS = Query(
    "progress",
    f"sum({_job('gpujob_worker_items')} and {_job('gpujob_worker_items_expected')})"
    f" / (sum({_job('gpujob_worker_items_expected')}) > 0)",
    "done",
)

_TIME_LEFT = f"max({_job('gpujob_start_timestamp_seconds')}) + max({_job('gpujob_time_limit_seconds')}) - time()"


def _eta(quantile: str) -> str:
    """Seconds to the end of the slowest worker."""
    return f"max({_job('gpujob_eta_seconds', quantile=quantile)})"


ETA_NOW = Query("eta_now", _eta("0.5"), "ETA (p50)", instant=True)
TIME_LEFT_NOW = Query("time_left_now", _TIME_LEFT, "until the limit", instant=True)
MARGIN_NOW = Query("margin_now", f"{_TIME_LEFT} - {_eta('0.9')}", "margin", instant=True)

WORKERS_UP = Query("workers_up", f"sum({_job('gpujob_worker_up')})", "up", instant=True)
WORKERS_EXPECTED = Query("workers_expected", f"sum({_job('gpujob_workers_expected')})", "expected", instant=True)
READY_WORKERS = Query("ready_workers", f"sum({_job('gpujob_ready_workers')})", "ready", instant=True)
READY_EXPECTED = Query("ready_expected", f"sum({_job('gpujob_ready_workers_expected')})", "expected", instant=True)
# No series says 0 here, and from here on where a query has `or 0 *`.
WORKERS_STALLED = Query(
    "workers_stalled",
    f"sum({_job('gpujob_worker_stalled')} or 0 * {_job('gpujob_worker_up')})",
    "stalled",
    instant=True,
)


def _throughput(window: str) -> str:
    return _job("gpujob_worker_throughput_items_per_second", window=window)


RATE_NOW = Query("rate_now", f"sum({_throughput('current')})", "now", instant=True)
RATE_AVERAGE = Query("rate_average", f"sum({_throughput('average')})", "average", instant=True)

_LAST_LOOK = f"max by (node) (max_over_time({_job('gpujob_collector_last_success_timestamp_seconds')}[{RANGE}]))"
AGE_FRESHEST = Query("age_freshest", f"time() - max({_LAST_LOOK})", "most recent node", instant=True)
AGE_OLDEST = Query("age_oldest", f"time() - min({_LAST_LOOK})", "least recent node", instant=True)

ALERTS_NOW = replace(since("alertname, severity, node, worker", _OF_JOB), name="alerts_now")

# Progress

LOG_VALUES, LOG_HIGHEST, LOG_LOWEST = (
    Query(name, f"{calculation}{_node('gpujob_worker_log_value')})", "{{name}}: " + word)
    for name, calculation, word in (
        ("log_values", "quantile by (name) (0.5, ", "median"),
        ("log_highest", "max by (name) (", "highest"),
        ("log_lowest", "min by (name) (", "lowest"),
    )
)

ITEMS = Query("items", f"sum({_node('gpujob_worker_items')})", "done")
ITEMS_EXPECTED = Query("items_expected", f"sum({_node('gpujob_worker_items_expected')})", "expected")

ITEM_RATE = Query(
    "item_rate",
    f"sum(rate({_node('gpujob_worker_items_processed_total')}[{RATE}]))",
    "measured over the interval",
)
ITEM_RATE_CURRENT = Query(
    "item_rate_current",
    f"sum({_node('gpujob_worker_throughput_items_per_second', window='current')})",
    "current, by the sidecar",
)
ITEM_RATE_AVERAGE = Query(
    "item_rate_average",
    f"sum({_node('gpujob_worker_throughput_items_per_second', window='average')})",
    "average since the start",
)

ETA_P10 = Query("eta_p10", _eta("0.1"), "ETA, p10")
ETA_P50 = Query("eta_p50", _eta("0.5"), "ETA, p50")
ETA_P90 = Query("eta_p90", _eta("0.9"), "ETA, p90")
TIME_LEFT = Query("time_left", _TIME_LEFT, "until the time limit")

WORKER_RATE = Query(
    "worker_rate",
    f"sum by (worker) ({_node('gpujob_worker_throughput_items_per_second', window='current')})",
    "{{worker}}",
)

CHANCE = Query("chance", f"min({_job('gpujob_time_limit_met_probability_ratio')})", "finished before the limit")
SLOWDOWN, LAG = (
    Query(
        name,
        _ten(
            "topk",
            f"max by (worker) ({_node(metric)})",
            f"max by (worker) (last_over_time({_node(metric)}[{RANGE}] @ end()))",
        ),
        "{{worker}}",
    )
    for name, metric in (("slowdown", "gpujob_worker_slowdown_ratio"), ("lag", "gpujob_worker_lag_ratio"))
)

# Workers. A worker may span nodes: it is up when each of its parts is.

WORKER_UP = Query(
    "worker_up",
    _ten(
        "bottomk",
        f"min by (worker) ({_node('gpujob_worker_up')})",
        f"min by (worker) (avg_over_time({_node('gpujob_worker_up')}[{RANGE}] @ end()))",
    ),
    "{{worker}}",
)
WORKER_STATES = Query("worker_states", f"sum by (state) ({_node('gpujob_worker_state')})", "{{state}}")

EXITS = Query(
    "exits",
    f"round(sum by (worker, node, reason) {_new('gpujob_worker_exits_total', RANGE)}) > 0",
    instant=True,
    table=True,
)
# One line for each worker
_BY_WORKER = "by (worker, node)"
WORKERS_NOW = Query("workers_now", f"min {_BY_WORKER} ({_node('gpujob_worker_up')})", instant=True, table=True)
WORKERS_DONE = Query(
    "workers_done",
    f"max {_BY_WORKER} ({_node('gpujob_worker_items')})\n/ max {_BY_WORKER} ({_node('gpujob_worker_items_expected')})",
    instant=True,
    table=True,
)
WORKERS_RATE = Query(
    "workers_rate",
    f"max {_BY_WORKER} ({_node('gpujob_worker_throughput_items_per_second', window='current')})",
    instant=True,
    table=True,
)
WORKERS_AGE = Query(
    "workers_age",
    f"time() - max {_BY_WORKER} ({_node('gpujob_worker_progress_last_timestamp_seconds')})\n"
    f"and on (worker, node) {_node('gpujob_worker_up')} == 1",
    instant=True,
    table=True,
)
# Milliseconds, as Grafana wants a date.
EXIT_TIMES = Query(
    "exit_times",
    "max by (worker, node, reason)"
    f" (last_over_time({_node('gpujob_worker_last_exit_timestamp_seconds')}[{RANGE}])) * 1000",
    instant=True,
    table=True,
)
# A worker has either a code or a signal. As in a shell, one number says which. Looked up in steps,
# since an exit code that a signal came after must not be found again.
EXIT_STATUS = Query(
    "exit_status",
    "last_over_time((\n"
    f"  max by (worker, node) ({_node('gpujob_worker_last_exit_code')})\n"
    f"  or 128 + max by (worker, node) ({_node('gpujob_worker_last_exit_signal')})\n"
    f")[{RANGE}:{INTERVAL}])",
    instant=True,
    table=True,
)

WORKER_CPU = Query(
    "worker_cpu", f"sum by (worker) (rate({_node('gpujob_worker_cpu_seconds_total')}[{RATE}]))", "{{worker}}"
)
WORKER_RSS = Query("worker_rss", f"sum by (worker) ({_node('gpujob_worker_memory_rss_bytes')})", "{{worker}}")
# Of the node that is worst off: its limit is that of all of them as a rule.
MEMORY_USED = Query("memory_used", f"max({_node('gpujob_cgroup_memory_used_bytes')})", "used with page cache")
MEMORY_WORKING_SET = Query(
    "memory_working_set", f"max({_node('gpujob_cgroup_memory_working_set_bytes')})", "used without page cache"
)
MEMORY_PEAK = Query("memory_peak", f"max({_node('gpujob_cgroup_memory_peak_bytes')})", "peak with page cache")
MEMORY_LIMIT = Query("memory_limit", f"min({_node('gpujob_cgroup_memory_limit_bytes')})", "limit")
OOM_KILLS = Query("oom_kills", f"round(sum(increase({_node('gpujob_cgroup_oom_kills_total')}[5m])))", "OOM kills")
MEMORY_PRESSURE = Query(
    "memory_pressure",
    f"max by (kind) (rate({_node('gpujob_cgroup_memory_pressure_seconds_total')}[{RATE}]))",
    "{{kind}}",
)
WORKER_READ = Query("worker_read", f"sum(rate({_node('gpujob_worker_io_read_bytes_total')}[{RATE}]))", "read")
WORKER_WRITE = Query("worker_write", f"sum(rate({_node('gpujob_worker_io_write_bytes_total')}[{RATE}]))", "written")
RESTARTS = Query(
    "restarts",
    f"topk(10, round(sum by (worker) {_new('gpujob_worker_restarts_total', RANGE)}))",
    "{{worker}}",
    instant=True,
)

# GPUs

GPUS = Query("gpus", f"sum({_node('gpujob_gpus_allocated')})", "allocated", instant=True)
# A GPU that is divided into MIG instances stands beside them and is given to nobody.
GPUS_ANSWERING = Query(
    "gpus_answering",
    f"sum(\n  {_node('gpujob_gpu_up')}\n  unless on (node, gpu) {_node('gpujob_gpu_info', mig_mode='on')}\n)",
    "responding",
    instant=True,
)
GPU_ENERGY = Query(
    "gpu_energy", f"sum(increase({_node('gpujob_gpu_energy_joules_total')}[{RANGE}])) / 3.6e6", "energy", instant=True
)

# Of the nodes: health is the number of its word, in the order healthy, warning, failure.
GPUS_BY_NODE = Query("gpus_by_node", f"sum by (node) ({_node('gpujob_gpus_allocated')})", instant=True, table=True)
GPUS_VISIBLE_BY_NODE = Query(
    "gpus_visible_by_node", f"sum by (node) ({_node('gpujob_gpus_visible')})", instant=True, table=True
)
GPU_HEALTH = Query(
    "gpu_health",
    f"max by (node) ({_node('gpujob_gpu_health', health='warning')})\n"
    f"  + 2 * max by (node) ({_node('gpujob_gpu_health', health='failure')})",
    instant=True,
    table=True,
)
GPU_FOREIGN = Query(
    "gpu_foreign",
    f"sum by (node) ({_node('gpujob_gpu_foreign_processes')} or 0 * {_node('gpujob_gpu_up')})",
    instant=True,
    table=True,
)
# Milliseconds, as Grafana wants a date.
XIDS = Query(
    "xids",
    f"max by (node, gpu, xid) (last_over_time({_node('gpujob_gpu_xid_last_timestamp_seconds')}[{RANGE}])) * 1000",
    instant=True,
    table=True,
)
GPU_CONDITIONS = Query(
    "gpu_conditions",
    "max by (worker, node, condition) (\n"
    f"  sum_over_time({_node('gpujob_worker_gpu_condition')}[{RANGE}])\n"
    f"  / ignoring (condition) group_left () count_over_time({_node('gpujob_worker_up')}[{RANGE}])\n) > 0",
    instant=True,
    table=True,
)

GPU_UTILIZATION = Query(
    "gpu_utilization", f"max by (node, gpu) ({_node('gpujob_gpu_utilization_ratio')})", "{{node}}: {{gpu}}"
)
GPU_MEMORY = Query(
    "gpu_memory",
    f"max by (node, gpu) ({_node('gpujob_gpu_memory_used_bytes')}\n  / {_node('gpujob_gpu_memory_total_bytes')})",
    "{{node}}: {{gpu}}",
)
# How much of the GPU works, where it tells: utilization only says that something runs.
SM_ACTIVITY = Query("sm_activity", f"avg({_node('gpujob_gpu_sm_activity_ratio')})", "multiprocessors")
TENSOR_ACTIVITY = Query("tensor_activity", f"avg({_node('gpujob_gpu_tensor_activity_ratio')})", "tensor cores")
DRAM_ACTIVITY = Query("dram_activity", f"avg({_node('gpujob_gpu_dram_activity_ratio')})", "memory bandwidth")
# Either kind of power will do: not every GPU tells both.
GPU_POWER = Query(
    "gpu_power",
    "sum by (node) (\n"
    f"  max by (node, gpu) ({_node('gpujob_gpu_power_watts', kind='average')})\n"
    f"  or max by (node, gpu) ({_node('gpujob_gpu_power_watts', kind='instant')})\n)",
    "{{node}}",
)
GPU_TEMPERATURE = Query(
    "gpu_temperature",
    f"max by (node, gpu) ({_node('gpujob_gpu_temperature_celsius')})",
    "{{node}}: {{gpu}}",
)
GPU_THROTTLE = Query(
    "gpu_throttle",
    f"max by (reason) (rate({_node('gpujob_gpu_throttle_seconds_total')}[{RATE}]))",
    "{{reason}}",
)
NVLINK = Query(
    "nvlink",
    f"sum by (direction) ({_node('gpujob_gpu_nvlink_bytes_per_second')})\n"
    f"or sum by (direction) (rate({_node('gpujob_gpu_nvlink_bytes_total')}[{RATE}]))",
    "NVLink {{direction}}",
)
PCIE = Query("pcie", f"sum by (direction) ({_node('gpujob_gpu_pcie_bytes_per_second')})", "PCIe {{direction}}")
GPU_ECC = Query(
    "gpu_ecc",
    f"round(sum by (type) {_new('gpujob_gpu_ecc_job_errors_total', '5m')})",
    "memory, {{type}}",
)
GPU_LINK_ERRORS = Query(
    "gpu_link_errors", f"round(sum(increase({_node('gpujob_gpu_nvlink_errors_total')}[5m])))", "NVLink"
)
PCIE_REPLAYS = Query("pcie_replays", f"round(sum(increase({_node('gpujob_gpu_pcie_replays_total')}[5m])))", "PCIe")

# Outputs

OUTPUT_FILES = Query("output_files", f"sum by (group) ({_node('gpujob_output_files')})", "{{group}}")
OUTPUT_BYTES = Query("output_bytes", f"sum by (group) ({_node('gpujob_output_bytes')})", "{{group}}")
OUTPUT_GROWTH = Query(
    "output_growth", f"sum by (group) ({_node('gpujob_output_growth_bytes_per_second')})", "{{group}}"
)
OUTPUT_AGE = Query(
    "output_age",
    f"time() - max by (group) ({_node('gpujob_output_file_mtime_timestamp_seconds')})",
    "{{group}}",
)
OUTPUT_RECORDS = Query("output_records", f"sum by (group) ({_node('gpujob_output_records')})", "{{group}}")
OUTPUT_INVALID = Query("output_invalid", f"sum by (group) ({_node('gpujob_output_files_invalid')})", "{{group}}")
CHECKPOINTS = Query("checkpoints", f"round(sum(increase({_node('gpujob_checkpoints_total')}[5m])))", "saved")
CHECKPOINT_AGE = Query(
    "checkpoint_age", f"time() - max({_node('gpujob_checkpoint_last_timestamp_seconds')})", "since the last one"
)
RESPONDING = Query("responding", f"min by (group) ({_node('gpujob_filesystem_responding')})", "{{group}}")
DISK_AVAILABLE = Query(
    "disk_available", f"min by (group) ({_node('gpujob_filesystem_avail_bytes')})", "{{group}}: available"
)
DISK_SIZE = Query("disk_size", f"min by (group) ({_node('gpujob_filesystem_size_bytes')})", "{{group}}: size")
DISK_LEFT = Query(
    "disk_left",
    f"min by (group) ({_node('gpujob_filesystem_avail_bytes')} / ({_node('gpujob_filesystem_size_bytes')} > 0))",
    "{{group}}",
    instant=True,
)

# Events. Each point counts the five minutes before it.

EXITS_IN_TIME = Query(
    "exits_in_time",
    f"round(sum by (reason) {_new('gpujob_worker_exits_total', '5m')}) > 0",
    "exit: {{reason}}",
)
RESTARTS_IN_TIME = Query("restarts_in_time", f"round(sum{_new('gpujob_worker_restarts_total', '5m')})", "restarts")
LOG_ERRORS = Query(
    "log_errors",
    f"round(sum by (severity, pattern) {_new('gpujob_log_errors_total', '5m')})",
    "{{severity}}: {{pattern}}",
)
PHASE_SHARE = Query(  # not the average: the series of a phase begins with the phase
    "phase_share",
    f"sum by (phase) (max by (phase, node) ({_node('gpujob_phase')}))\n"
    f"  / scalar(count(count by (node) ({_node('gpujob_phase')})))",
    "{{phase}}",
)

# Monitor cost

_SIDECAR_CPU_S, _SIDECAR_BYTES = _node("gpujob_exporter_cpu_seconds_total"), _node("gpujob_exporter_memory_rss_bytes")
SIDECAR_CPU = Query(
    "sidecar_cpu",
    _ten(
        "topk",
        f"sum by (node) (rate({_SIDECAR_CPU_S}[{RATE}]))",
        f"sum by (node) (increase({_SIDECAR_CPU_S}[{RANGE}] @ end()))",
    ),
    "{{node}}",
)
SIDECAR_RSS = Query(
    "sidecar_rss",
    _ten(
        "topk",
        f"sum by (node) ({_SIDECAR_BYTES})",
        f"sum by (node) (last_over_time({_SIDECAR_BYTES}[{RANGE}] @ end()))",
    ),
    "{{node}}",
)
COLLECTOR_SUCCESS = Query(
    "collector_success",
    f"min by (node, collector) ({_node('gpujob_collector_success')})",
    instant=True,
    table=True,
)
COLLECTOR_DURATION = Query(
    "collector_duration",
    f"max by (node, collector) ({_node('gpujob_collector_duration_seconds')})",
    instant=True,
    table=True,
)
COLLECTOR_AGE = Query(
    "collector_age",
    f"time() - max by (node, collector) ({_node('gpujob_collector_last_success_timestamp_seconds')})",
    instant=True,
    table=True,
)

# Annotations. Alerts mark the time in which they fire. Of others, the value is their moment, in milliseconds.

JOB_START = Query("job_start", f"max({_job('gpujob_start_timestamp_seconds')}) * 1000")
WORKER_EXIT = Query(
    "worker_exit",
    f"max by (worker, node, reason) ({_node('gpujob_worker_last_exit_timestamp_seconds')}) * 1000",
)
CHECKPOINT = Query("checkpoint", f"max({_job('gpujob_checkpoint_last_timestamp_seconds')}) * 1000")
FIRING = Query(
    "firing", f'max by (alertname, severity, node) (ALERTS{{{_OF_JOB}, alertstate="firing"}})', "{{alertname}}"
)


def all_queries() -> list[Query]:
    """Every query of this file, in its order."""
    return [value for value in globals().values() if isinstance(value, Query)]
