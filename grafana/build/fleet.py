"""The board of all jobs. Of jobs it reads recorded series only, one for each, so that a thousand nodes cost little."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import board, variables
from grafana.build.board import Panel
from grafana.build.job import CLOCK, ITEMS_PER_SECOND, PHASE_WORDS
from grafana.build.node import HEALTH
from grafana.build.panels import bars, column, lines, rows, tile
from grafana.build.queries import RANGE, Query, listed, new, now, over_time

UID = "gpujob-fleet"
CHOSEN = 'cluster="$cluster", partition=~"$partition", user=~"$user"'
JOB = "job_id, job_name, user"
NEEDS_HUB = "needs the hub"
NONE_OR_NO_HUB = "none, or no hub"  # of what the hub counts only where there is some
TO_JOB = column("job_id", link=board.to_board("gpujob-job", job_id="job_id"))
# The board of an ended job shows the time in which it ran.
TO_ENDED_JOB = column(
    "job_id",
    link=(
        board.BOARDS["gpujob-job"][0],
        board.to_board("gpujob-job", job_id="job_id")[1].replace(
            "${__url_time_range}", "from=${__data.fields.started.numeric}&to=${__data.fields.ended.numeric}"
        ),
    ),
)
TO_NODE = column("node", link=board.to_board("gpujob-node", node="node"))
FIRING = f'ALERTS{{{CHOSEN}, alertstate="firing"}}'
RECORDED_EACH_S = 30
HUB = 'gpujob_hub_jobs{cluster="$cluster"}'
HUB_STEP = "1m"  # the hub is scraped once a minute


def _all(metric: str, matchers: str = "") -> str:
    return f"{metric}{{{CHOSEN}{matchers}}}"


def _jobs(metric: str) -> str:
    return f"max by ({JOB}) ({_all(metric)})"


def _ended(metric: str, extra: str = "") -> str:
    return f"max by ({JOB}{extra}) (last_over_time({_all(metric)}[{RANGE}]))"


def overview() -> list[Panel]:
    return [
        tile(
            "Running jobs",
            "Jobs whose sidecars are scraped.",
            [now(f"count({_all('job:gpujob_phase:number')}) or vector(0)")],
            width=4,
        ),
        tile(
            "GPUs",
            "GPUs that plans give to workers, and those that ran nothing at the last look.",
            [
                now(f"sum({_all('job:gpujob_gpus_allocated:sum')})", "given"),
                now(f"sum({_all('job:gpujob_gpus_idle:count')})", "idle"),
            ],
            width=6,
            unknown="none",
        ),
        *(
            tile(
                f"Firing: {severity}",
                f"Alerts of these jobs with the severity {severity} that fire now.",
                [now(f'count({FIRING[:-1]}, severity="{severity}"}}) or vector(0)')],
                width=3,
                steps=(("green", None), (color, 1)),
            )
            for severity, color in (("critical", "red"), ("warning", "orange"))
        ),
        tile(
            "Sidecars",
            "Nodes whose sidecar answers, and nodes that are listed. Alert: GpuJobNodeSidecarDown.",
            [
                now(f'sum(up{{job="gpujob-sidecar", {CHOSEN}}})', "answer"),
                now(f'count(up{{job="gpujob-sidecar", {CHOSEN}}})', "listed"),
            ],
            width=4,
            unknown="none",
        ),
        tile(
            "Waiting and failed",
            "Waiting jobs, counted in each partition that they request, and jobs that failed in the time range. "
            "Needs the hub.",
            [
                now("sum(" + _all("gpujob_jobs", ', state="PENDING"') + f")\nor 0 * max({HUB})", "waiting"),
                now(
                    "round(sum(increase("
                    + _all("gpujob_jobs_ended_total", ', state!~"COMPLETED|CANCELLED"')
                    + f"[{RANGE}])))\nor 0 * max({HUB})",
                    "failed",
                ),
            ],
            width=4,
            unknown=NEEDS_HUB,
        ),
    ]


def needs_a_look() -> list[Panel]:
    return [
        rows(
            "Jobs",
            "One line for each job; those with most alerts come first. Select a number for the board of the job."
            " Progress and rate are added over the workers, also over those in step. Margin is the time left at the"
            " limit (p90). Slowdown is the time per item against the best.",
            {
                "alerts": listed(_jobs("job:gpujob_alerts:count")),
                "phase": listed(_jobs("job:gpujob_phase:number")),
                "progress": listed(_jobs("job:gpujob_progress:ratio")),
                "ETA": listed(_jobs("job:gpujob_eta:p50")),
                "margin": listed(_jobs("job:gpujob_limit_margin:seconds")),
                "rate": listed(_jobs("job:gpujob_rate:items_per_second")),
                "slowdown": listed(_jobs("job:gpujob_slowdown:ratio")),
                "GPUs": listed(_jobs("job:gpujob_gpus_allocated:sum")),
                "GPU use": listed(_jobs("job:gpujob_gpu_utilization:avg")),
                "idle GPUs": listed(_jobs("job:gpujob_gpus_idle:count")),
                "checkpoint": listed(_jobs("job:gpujob_checkpoint_age:seconds")),
                "data age": listed(_jobs("job:gpujob_data_age:seconds")),
            },
            labels=("job_id", "job_name", "user"),
            first_by="alerts",
            columns=[
                TO_JOB,
                column("phase", words=PHASE_WORDS),
                column("progress", unit="percentunit", decimals=0),
                column("ETA", unit=CLOCK),
                column("margin", unit="s", decimals=0),
                column("rate", unit=ITEMS_PER_SECOND),
                column("slowdown", decimals=2),
                column("GPU use", unit="percentunit", decimals=0),
                column("checkpoint", unit="s", decimals=0),
                column("data age", unit="s", decimals=0),
            ],
            width=24,
            unknown="-",  # also of a job that has ended: it has no ETA
            height=12,
        )
    ]


def time_limits() -> list[Panel]:
    return [
        rows(
            "Least margin at the limit",
            "The ten jobs with the least time left at their limit (p90). Below zero, a job will probably be cut off."
            " Alerts: GpuJobTimeLimitPredicted and GpuJobTimeLimitCertain.",
            {"margin": listed(f"bottomk(10, {_jobs('job:gpujob_limit_margin:seconds')})")},
            labels=("job_id", "job_name", "user"),
            columns=[TO_JOB, column("margin", unit="s", decimals=0)],
            width=12,
            unknown="no job has a limit and an ETA",
        ),
        bars(
            "Chance to finish",
            "Probability of the ten least likely jobs to finish before their limit.",
            now(f"bottomk(10, {_jobs('job:gpujob_time_limit_met:probability')})", "{{job_id}} {{job_name}}"),
            width=12,
            unit="percentunit",
            maximum=1,
            steps=(("red", None), ("orange", 0.1), ("green", 0.5)),
            unknown="no job has a limit and an ETA",
        ),
    ]


def waste() -> list[Panel]:
    idle_hours = f"sum_over_time({_all('job:gpujob_gpus_idle:count')}[{RANGE}]) * {RECORDED_EACH_S} / 3600"
    return [
        lines(
            "GPUs given and idle",
            "GPUs that plans give to workers, and those whose utilization is below 5 %.",
            [
                over_time(f"sum({_all('job:gpujob_gpus_allocated:sum')})", "given"),
                over_time(f"sum({_all('job:gpujob_gpus_idle:count')})", "idle"),
            ],
            width=8,
            decimals=0,
            unknown="no GPU seen",
        ),
        bars(
            "Idle GPU hours",
            "Hours of GPUs whose utilization was below 5 % in the time range, by user and partition: the ten most.",
            now(f"topk(10, sum by (user, partition) ({idle_hours}))", "{{user}} ({{partition}})"),
            width=8,
            steps=(("orange", None),),
            unknown="no GPU seen",
            height=8,
        ),
        bars(
            "Lowest use",
            "Average utilization of the GPUs of the ten jobs that use theirs least, in the time range.",
            now(
                f"bottomk(10, max by ({JOB}) (avg_over_time({_all('job:gpujob_gpu_utilization:avg')}[{RANGE}])))",
                "{{job_id}} {{job_name}}",
            ),
            width=8,
            unit="percentunit",
            maximum=1,
            steps=(("orange", None), ("green", 0.5)),
            unknown="no GPU seen",
            height=8,
        ),
        *(
            bars(
                title,
                description,
                now(f"topk(10, sum by (user{label}) {new(_all(metric), RANGE, HUB)}{scale})", legend),
                width=12,
                unit=unit,
                steps=(("blue", None),),
                unknown=NONE_OR_NO_HUB,
            )
            for title, description, metric, label, scale, legend, unit in (
                (
                    "Energy of ended jobs",
                    "Energy by user in the time range, of GPUs or whole nodes (slurm): the ten most. Needs the hub.",
                    "gpujob_energy_joules_total",
                    ", source",
                    " / 3.6e6",
                    "{{user}} ({{source}})",
                    "kwatth",
                ),
                (
                    "Cost",
                    "List price of GPUs by user in the time range: the ten most. Needs the hub, and prices.",
                    "gpujob_cost_total",
                    ", currency",
                    "",
                    "{{user}} ({{currency}})",
                    "short",
                ),
            )
        ),
    ]


def queue() -> list[Panel]:
    waiting = 'cluster="$cluster", partition=~"$partition"'
    return [
        lines(
            "Waiting jobs by reason",
            "Waiting jobs by pending reason, counted in each partition that they request. Needs the hub.",
            [over_time(f"sum by (reason) (gpujob_jobs_pending{{{waiting}}})", "{{reason}}")],
            width=12,
            decimals=0,
            stacked=True,
            stepped=True,
            unknown=NONE_OR_NO_HUB,
        ),
        lines(
            "Average wait",
            "How long the jobs that started in the range of each point had waited, by partition. Needs the hub.",
            [
                over_time(
                    f"sum by (partition) (rate({_all('gpujob_queue_wait_seconds_total')}[$__rate_interval]))\n"
                    f"  / (sum by (partition) (rate({_all('gpujob_jobs_started_total')}[$__rate_interval])) > 0)",
                    "{{partition}}",
                    step=HUB_STEP,
                )
            ],
            width=8,
            unit="s",
            unknown=NONE_OR_NO_HUB,
        ),
        tile(
            "Oldest waiting job",
            "Time since the submission of the job that has waited longest. Needs the hub.",
            [
                now(
                    f"time() - min({_all('gpujob_job_submit_timestamp_seconds')}\n  and on (cluster, job_id)"
                    f' (gpujob_job_state{{{waiting}, state="PENDING"}} == 1))'
                )
            ],
            width=4,
            unit=CLOCK,
            unknown=NONE_OR_NO_HUB,
            height=8,
        ),
    ]


def health() -> list[Panel]:
    return [
        rows(
            "Nodes with warnings or failures",
            "Health of the GPUs of nodes where it is not good. Alerts: GpuJobGpuUnhealthy and GpuJobGpuDegraded.",
            {"health": listed(f"max by (node, job_id) ({_all('node:gpujob_gpu_health:number')})")},
            labels=("node", "job_id"),
            first_by="health",
            columns=[TO_NODE, TO_JOB, column("health", words=HEALTH)],
            width=8,
            unknown="none",
        ),
        rows(
            "Xid errors",
            "Errors that the driver reported: node, code, and time of the last one. Alert: GpuJobGpuXidCritical.",
            {
                "last at": listed(
                    "max by (node, xid)"
                    f" (last_over_time({_all('node:gpujob_gpu_xid_last:timestamp_seconds')}[{RANGE}])) * 1000"
                )
            },
            labels=("node", "xid"),
            first_by="last at",
            columns=[TO_NODE, column("last at", unit="dateTimeAsIso")],
            width=8,
            unknown="none",
        ),
        rows(
            "Low disks",
            "Jobs whose file systems are nearly full, with their number. Alert: GpuJobDiskLow.",
            {"file systems": listed(_jobs("job:gpujob_filesystems_low:count"))},
            labels=("job_id", "job_name", "user"),
            columns=[TO_JOB],
            width=8,
            unknown="none",
        ),
    ]


def ended() -> list[Panel]:
    last = f"topk(50, {_ended('gpujob_job_end_timestamp_seconds')})"

    def of_last(expr: str) -> Query:
        return listed(f"{expr}\n  and on ({JOB}) {last}")

    return [
        rows(
            "Ended jobs",
            "The last 50 jobs that ended in the time range. Select a number to see its time. Needs the hub.",
            {
                "ended": listed(f"{last} * 1000"),
                "started": of_last(f"{_ended('gpujob_job_start_timestamp_seconds')} * 1000"),
                "exit code": of_last(_ended("gpujob_job_exit_code")),
                "limit used": of_last(_ended("gpujob_job_time_limit_used_ratio")),
                "GPU time": of_last(_ended("gpujob_job_gpu_seconds")),
                "items": of_last(_ended("gpujob_job_items_processed")),
                "cost": of_last(_ended("gpujob_job_cost")),
            },
            labels=("job_id", "job_name", "user"),
            first_by="ended",
            columns=[
                TO_ENDED_JOB,
                column("ended", unit="dateTimeAsIso"),
                column("started", unit="dateTimeAsIso"),
                column("limit used", unit="percentunit", decimals=0),
                column("GPU time", unit=CLOCK),
            ],
            width=24,
            unknown=NONE_OR_NO_HUB,
            height=10,
        )
    ]


ROWS: board.Rows = (
    ("Now", overview),
    ("Needs a look", needs_a_look),
    ("Time limits", time_limits),
    ("Waste", waste),
    ("Queue", queue),
    ("Health", health),
    ("Ended", ended),
)


def build() -> Dashboard:
    choices = (
        variables.cluster_of_jobs_or_hub(),
        variables.recorded("partition", "Partition"),
        variables.recorded("user", "User"),
    )
    firing = over_time(f"max by (alertname, severity, job_id) ({FIRING})")
    return board.build(UID, ROWS, choices, (variables.alerts(firing, shown=False),))
