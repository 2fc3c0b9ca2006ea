"""The board of one node: whose it is, whether it is busy, and whether it is well."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import board, variables
from grafana.build.board import Panel
from grafana.build.job import CORES, PHASE_WORDS
from grafana.build.panels import column, lines, rows, states, tile
from grafana.build.queries import RANGE, RATE, listed, new, now, over_time, phase_numbers, since

UID = "gpujob-node"
ON_NODE = 'cluster="$cluster", node="$node"'
JOB = "job_id, job_name, user"
FIRING = f'ALERTS{{{ON_NODE}, alertstate="firing"}}'
HEALTH = {0: ("healthy", "green"), 1: ("warning", "orange"), 2: ("failure", "red")}


def _node(metric: str, matchers: str = "") -> str:
    return f"{metric}{{{ON_NODE}{matchers}}}"


def _health(health: str) -> str:
    return _node("gpujob_gpu_health", f', health="{health}"')


def _gpu(metric: str, matchers: str = "") -> str:
    return _node(metric, f', gpu=~"$gpu"{matchers}')


def _by_gpu(metric: str, matchers: str = "") -> str:
    return f"max by (gpu) ({_gpu(metric, matchers)})"


def who() -> list[Panel]:
    return [
        states(
            "Jobs on the node",
            "The jobs that had the node, and their phase there.",
            over_time(f"max by ({JOB}) ({phase_numbers(ON_NODE)})", "{{job_id}} {{job_name}} ({{user}})"),
            words=PHASE_WORDS,
            width=16,
            unknown="no job",
        ),
        rows(
            "Jobs now",
            "Jobs that have the node now: workers that are up, and GPUs that the plan gives them.",
            {
                "workers up": listed(f"sum by ({JOB}) ({_node('gpujob_worker_up')})"),
                "GPUs": listed(f"sum by ({JOB}) ({_node('gpujob_gpus_allocated')})"),
            },
            labels=("job_id", "job_name", "user"),
            columns=[column("job_id", link=board.to_board("gpujob-job", job_id="job_id"))],
            width=8,
            unknown="no job",
        ),
        rows(
            "Firing alerts of the node",
            "Alerts about this node that fire now, and since when. Select a name for what to do.",
            {"since": since("alertname, severity, job_id", ON_NODE)},
            labels=("alertname", "severity", "job_id"),
            first_by="since",
            columns=[
                column("alertname", link=board.TO_RUNBOOK),
                column("job_id", link=board.to_board("gpujob-job", job_id="job_id")),
                column("since", unit="dateTimeAsIso"),
            ],
            width=12,
            unknown="none",
        ),
        lines(
            "Strangers on GPUs",
            "Processes on each GPU that do not belong to the job. Alert: GpuJobGpuForeignProcess.",
            [
                over_time(
                    f"sum by (gpu) ({_gpu('gpujob_gpu_foreign_processes')} or 0 * {_gpu('gpujob_gpu_up')})", "{{gpu}}"
                )
            ],
            width=8,
            decimals=0,
            stepped=True,
            unknown="no GPU seen",
            height=7,
        ),
        tile(
            "Data age",
            "Time since a sidecar on the node last read successfully. Alert: GpuJobNodeSidecarDown.",
            [now(f"time() - max(max_over_time({_node('gpujob_collector_last_success_timestamp_seconds')}[{RANGE}]))")],
            width=4,
            unit="s",
            decimals=0,
            steps=(("green", None), ("orange", 60), ("red", 180)),
            height=7,
        ),
    ]


def use() -> list[Panel]:
    return [
        lines(
            title,
            description,
            [over_time(expr, "{{gpu}}")],
            width=width,
            unit="percentunit",
            maximum=1,
            unknown=unknown,
        )
        for title, description, expr, width, unknown in (
            (
                "Utilization",
                "Share of time in which anything ran on each GPU, even if it used little of it.",
                _by_gpu("gpujob_gpu_utilization_ratio"),
                12,
                "no GPU seen",
            ),
            (
                "GPU memory in use",
                "Share of each GPU's memory that is in use. Alert: GpuJobGpuMemoryFilling.",
                f"{_by_gpu('gpujob_gpu_memory_used_bytes')}\n  / {_by_gpu('gpujob_gpu_memory_total_bytes')}",
                12,
                "no GPU seen",
            ),
            (
                "Multiprocessors",
                "Share of time in which the multiprocessors of each GPU had work. Available on Hopper and later.",
                _by_gpu("gpujob_gpu_sm_activity_ratio"),
                8,
                "not reported by these GPUs",
            ),
            (
                "Tensor cores",
                "Share of time in which the tensor cores of each GPU computed. Available on Hopper and later.",
                _by_gpu("gpujob_gpu_tensor_activity_ratio"),
                8,
                "not reported by these GPUs",
            ),
            (
                "Memory bandwidth",
                "Share of the memory bandwidth of each GPU that was used. Available on Hopper and later.",
                _by_gpu("gpujob_gpu_dram_activity_ratio"),
                8,
                "not reported by these GPUs",
            ),
        )
    ]


def saturation() -> list[Panel]:
    return [
        lines(
            "Power",
            "Power of each GPU. High utilization at low power means waiting.",
            [
                over_time(
                    _by_gpu("gpujob_gpu_power_watts", ', kind="average"')
                    + "\nor "
                    + _by_gpu("gpujob_gpu_power_watts", ', kind="instant"'),
                    "{{gpu}}",
                )
            ],
            width=8,
            unit="watt",
            unknown="no GPU seen",
        ),
        lines(
            "Throttled clocks",
            "Share of time in which the clocks of each GPU were throttled, by reason. A power cap is normal under full"
            " load; all other reasons cost time. Alert: GpuJobGpuSlow.",
            [
                over_time(
                    f"max by (gpu, reason) (rate({_gpu('gpujob_gpu_throttle_seconds_total')}[{RATE}]))",
                    "{{gpu}}: {{reason}}",
                )
            ],
            width=8,
            unit="percentunit",
            maximum=1,
            unknown="never throttled",
        ),
        lines(
            "Temperature",
            "Temperature of each GPU, and of its memory if it is measured.",
            [over_time(f"max by (gpu, sensor) ({_gpu('gpujob_gpu_temperature_celsius')})", "{{gpu}}: {{sensor}}")],
            width=8,
            unit="celsius",
            unknown="no GPU seen",
        ),
        lines(
            "NVLink traffic",
            "Bytes per second that each GPU receives (rx) and sends (tx) over NVLink.",
            [
                over_time(
                    f"sum by (gpu, direction) ({_gpu('gpujob_gpu_nvlink_bytes_per_second')})\n"
                    f"or sum by (gpu, direction) (rate({_gpu('gpujob_gpu_nvlink_bytes_total')}[{RATE}]))",
                    "{{gpu}}: {{direction}}",
                )
            ],
            width=8,
            unit="binBps",
            unknown="not reported by these GPUs",
        ),
        lines(
            "PCIe traffic",
            "Bytes per second that each GPU receives and sends over PCIe. It is read only if enabled.",
            [
                over_time(
                    f"sum by (gpu, direction) ({_gpu('gpujob_gpu_pcie_bytes_per_second')})", "{{gpu}}: {{direction}}"
                )
            ],
            width=8,
            unit="binBps",
            unknown="not reported by these GPUs",
        ),
        lines(
            "Waiting for memory",
            "Share of time in which some or all (full) processes of a job waited for host memory. Needs cgroup v2.",
            [
                over_time(
                    f"max by (job_id, kind) (rate({_node('gpujob_cgroup_memory_pressure_seconds_total')}[{RATE}]))",
                    "{{job_id}}: {{kind}}",
                )
            ],
            width=8,
            unit="percentunit",
        ),
    ]


def errors() -> list[Panel]:
    return [
        states(
            "Health of the GPUs",
            "The worst health of the job's GPUs; `/status` of the node has the reasons. Alerts: GpuJobGpuUnhealthy and"
            " GpuJobGpuDegraded.",
            over_time(
                f"max by (job_id) ({_health('warning')})\n  + 2 * max by (job_id) ({_health('failure')})",
                "{{job_id}}",
            ),
            words=HEALTH,
            width=8,
            unknown="no GPU seen",
        ),
        states(
            "Responding GPUs",
            "Whether each GPU responds. One that does not is lost, needs a reset, or hangs. Alert: GpuJobGpuLost.",
            over_time(f"min by (gpu) ({_gpu('gpujob_gpu_up')})", "{{gpu}}"),
            words={0: ("does not respond", "red"), 1: ("responds", "green")},
            width=8,
            unknown="no GPU seen",
        ),
        rows(
            "Xid errors",
            "Errors that the driver reported in the time range: GPU, code, and time of the last one. Alert for"
            " hardware errors: GpuJobGpuXidCritical.",
            {
                "last at": listed(
                    "max by (gpu, xid, job_id)"
                    f" (last_over_time({_gpu('gpujob_gpu_xid_last_timestamp_seconds')}[{RANGE}])) * 1000"
                )
            },
            labels=("gpu", "xid", "job_id"),
            first_by="last at",
            columns=[column("last at", unit="dateTimeAsIso")],
            width=8,
            unknown="none",
        ),
        *(
            lines(title, description, [query], width=8, decimals=0, stepped=True, unknown=unknown)
            for title, description, query, unknown in (
                (
                    "Memory errors",
                    "ECC errors of each GPU by type. Each point counts the previous five minutes.",
                    over_time(
                        f"round(sum by (gpu, type) {new(_gpu('gpujob_gpu_ecc_job_errors_total'), '5m')})",
                        "{{gpu}}: {{type}}",
                    ),
                    "none",
                ),
                (
                    "Repaired memory",
                    "Rows of memory remapped, and pages retired. Each point counts the previous five minutes.",
                    over_time(
                        f"round(sum by (gpu, type) {new(_gpu('gpujob_gpu_remapped_rows_total'), '5m')}\n"
                        f"  or sum by (gpu, type) {new(_gpu('gpujob_gpu_retired_pages_total'), '5m')})",
                        "{{gpu}}: {{type}}",
                    ),
                    "none",
                ),
                (
                    "Waiting for a reset",
                    "1 while a row or page of a GPU waits for a reset to be repaired.",
                    over_time(
                        f"max by (gpu) ({_gpu('gpujob_gpu_row_remap_pending')} or {_gpu('gpujob_gpu_pages_pending')})",
                        "{{gpu}}",
                    ),
                    "none",
                ),
                (
                    "PCIe replays",
                    "Packets that each GPU sent again over PCIe. Each point counts the previous five minutes.",
                    over_time(
                        f"round(sum by (gpu) (increase({_gpu('gpujob_gpu_pcie_replays_total')}[5m])))", "{{gpu}}"
                    ),
                    "not reported by these GPUs",
                ),
                (
                    "NVLink errors",
                    "Errors of the NVLinks of each GPU. Each point counts the previous five minutes.",
                    over_time(
                        f"round(sum by (gpu) (increase({_gpu('gpujob_gpu_nvlink_errors_total')}[5m])))", "{{gpu}}"
                    ),
                    "not reported by these GPUs",
                ),
                (
                    "Xids in time",
                    "Errors that the driver reported, by code. Each point counts the previous five minutes.",
                    over_time(f"round(sum by (xid) {new(_node('gpujob_gpu_xid_errors_total'), '5m')})", "Xid {{xid}}"),
                    "none",
                ),
            )
        ),
    ]


def host() -> list[Panel]:
    return [
        lines(
            "Memory of jobs",
            "Memory of each job without page cache, and its limit. Alert: GpuJobHostMemoryNearLimit.",
            [
                over_time(f"max by (job_id) ({_node('gpujob_cgroup_memory_working_set_bytes')})", "{{job_id}}: used"),
                over_time(f"min by (job_id) ({_node('gpujob_cgroup_memory_limit_bytes')})", "{{job_id}}: limit"),
            ],
            width=8,
            unit="bytes",
        ),
        lines(
            "OOM kills",
            "Processes that the kernel killed because a job ran out of memory. Each point counts five minutes.",
            [over_time(f"round(sum(increase({_node('gpujob_cgroup_oom_kills_total')}[5m])))", "OOM kills")],
            width=8,
            decimals=0,
            stepped=True,
        ),
        lines(
            "CPU cores used",
            "CPU time per second of all workers of each job: 1 is one core.",
            [over_time(f"sum by (job_id) (rate({_node('gpujob_worker_cpu_seconds_total')}[{RATE}]))", "{{job_id}}")],
            width=8,
            unit=CORES,
        ),
        lines(
            "Read and written",
            "Bytes per second that all workers on the node together read from and wrote to storage.",
            [
                over_time(f"sum(rate({_node('gpujob_worker_io_read_bytes_total')}[{RATE}]))", "read"),
                over_time(f"sum(rate({_node('gpujob_worker_io_write_bytes_total')}[{RATE}]))", "written"),
            ],
            width=8,
            unit="binBps",
        ),
        lines(
            "Free disk space",
            "Available share of the file system of each path group. Alert: GpuJobDiskLow.",
            [
                over_time(
                    f"min by (job_id, group) ({_node('gpujob_filesystem_avail_bytes')}\n"
                    f"  / ({_node('gpujob_filesystem_size_bytes')} > 0))",
                    "{{job_id}}: {{group}}",
                )
            ],
            width=8,
            unit="percentunit",
            maximum=1,
        ),
        states(
            "File systems",
            "Whether the directories of each path group respond. Alert: GpuJobFilesystemHangs.",
            over_time(f"min by (job_id, group) ({_node('gpujob_filesystem_responding')})", "{{job_id}}: {{group}}"),
            words={0: ("hangs", "red"), 1: ("responds", "green")},
            width=8,
            height=8,
        ),
    ]


ROWS = (("Who", who), ("Use", use), ("Saturation", saturation), ("Errors", errors), ("Host", host))


def build() -> Dashboard:
    start = f"max by (job_id, job_name) ({_node('gpujob_start_timestamp_seconds')}) * 1000"
    exits = f"max by (worker, node, reason) ({_node('gpujob_worker_last_exit_timestamp_seconds')}) * 1000"
    firing = f"max by (alertname, severity) ({FIRING})"
    return board.build(
        UID,
        ROWS,
        (variables.cluster(), variables.one_node(), variables.gpu()),
        (
            variables.job_start(over_time(start)),
            variables.worker_exits(over_time(exits)),
            variables.alerts(over_time(firing)),
        ),
        since="now-24h",
    )
