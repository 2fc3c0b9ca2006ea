"""The board about alerts and the monitoring itself. It needs a Prometheus that scrapes itself."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import board, variables
from grafana.build.board import Panel
from grafana.build.panels import column, lines, rows, states, tile
from grafana.build.queries import RATE, listed, now, over_time, since

UID = "gpujob-self"
CLUSTER = 'cluster="$cluster"'
OF_JOBS = f'{CLUSTER}, job_id!=""'
# On the monitoring, and on users. Alerts of Prometheus' own series are often of no cluster.
OF_NO_JOB = tuple(
    f'{cluster}, alertname=~"GpuJob.+", alertname!="GpuJobWatchdog", job_id=""' for cluster in (CLUSTER, 'cluster=""')
)
SIDECARS = f'{{job="gpujob-sidecar", {CLUSTER}}}'
GROUPS = '{rule_group=~".*;gpujob-.*"}'
ITSELF = "Prometheus does not scrape itself"


def _alerts(**labels: str) -> str:
    """All alerts of gpujob with these labels."""
    more = "".join(f', {name}="{value}"' for name, value in labels.items())
    each = (f"ALERTS{{{matchers}{more}}}" for matchers in (OF_JOBS, *OF_NO_JOB))
    return "(\n  " + "\n  or ".join(each) + "\n)"


FIRING = _alerts(alertstate="firing")


def alerts() -> list[Panel]:
    return [
        *(
            tile(
                f"Firing: {severity}",
                f"Alerts on jobs and on the monitoring with the severity {severity} that fire now.",
                [now(f"count{_alerts(alertstate='firing', severity=severity)} or vector(0)")],
                width=4,
                steps=(("green", None), (color, 1)),
            )
            for severity, color in (("critical", "red"), ("warning", "orange"), ("info", "blue"))
        ),
        tile(
            "Alert that always fires",
            "1 while Prometheus evaluates the rules. If it does not arrive, no alert is delivered: GpuJobWatchdog.",
            [now('count(ALERTS{alertname="GpuJobWatchdog", alertstate="firing"})')],
            width=6,
            words={1: ("fires", "green")},
            unknown="does not fire",
        ),
        tile(
            "Age of the heartbeat",
            "Time since the alert that always fires last reached the receiver of gpujob.",
            [now("time() - max(gpujob_alerts_heartbeat_timestamp_seconds)")],
            width=6,
            unit="s",
            decimals=0,
            unknown="no receiver of gpujob",
        ),
        states(
            "Alerts in time",
            "Each alert, and when it was pending or fired.",
            over_time(
                f"max by (alertname, job_id) ({_alerts(alertstate='pending')} * 1 or {FIRING} * 2)",
                "{{alertname}} {{job_id}}",
            ),
            words={1: ("pending", "yellow"), 2: ("fires", "red")},
            width=12,
            unknown="none",
            height=9,
        ),
        rows(
            "Firing now",
            "Alerts of jobs that fire now, and since when their condition has held. Select a name for what to do.",
            {"since": since("alertname, severity, job_id, user", OF_JOBS)},
            labels=("alertname", "severity", "job_id", "user"),
            first_by="since",
            columns=[
                column("alertname", link=board.TO_RUNBOOK),
                column("job_id", link=board.to_board("gpujob-job", job_id="job_id")),
                column("since", unit="dateTimeAsIso"),
            ],
            width=12,
            unknown="none",
            height=9,
        ),
        rows(
            "Firing now, of no job",
            "Alerts on the monitoring itself and on users that fire now, and since when their condition has held."
            " Select a name for what to do.",
            {
                "since": listed(
                    "\nor ".join(since("alertname, severity, instance, user", each).expr for each in OF_NO_JOB)
                )
            },
            labels=("alertname", "severity", "instance", "user"),
            first_by="since",
            columns=[column("alertname", link=board.TO_RUNBOOK), column("since", unit="dateTimeAsIso")],
            width=24,
            unknown="none",
            height=6,
        ),
    ]


def delivery() -> list[Panel]:
    return [
        lines(
            "Notifications of Prometheus",
            "Alerts that Prometheus sent to Alertmanager, that failed, and that it dropped. Alert:"
            " GpuJobNotificationsFailing.",
            [
                over_time(f"sum(rate(prometheus_notifications_{what}_total[{RATE}]))", what)
                for what in ("sent", "errors", "dropped")
            ],
            width=8,
            unknown=ITSELF,
        ),
        lines(
            "Notifications of Alertmanager",
            "Messages by integration, and those that failed. Needs a scrape of Alertmanager. Alert:"
            " GpuJobNotificationFailed.",
            [
                over_time(
                    f"sum by (integration) (rate(alertmanager_notifications_total[{RATE}])) > 0", "{{integration}}"
                ),
                over_time(
                    f"sum by (integration) (rate(alertmanager_notifications_failed_total[{RATE}])) > 0",
                    "{{integration}}: failed",
                ),
            ],
            width=8,
            unknown="Alertmanager is not scraped, or was silent",
        ),
        lines(
            "Failed and missed evaluations",
            "Evaluations of rules that failed, and that began too late, in the previous five minutes. Alert:"
            " GpuJobRulesFailing.",
            [
                over_time(f"sum(increase(prometheus_rule_evaluation_failures_total{GROUPS}[5m]))", "failed"),
                over_time(f"sum(increase(prometheus_rule_group_iterations_missed_total{GROUPS}[5m]))", "missed"),
            ],
            width=8,
            decimals=0,
            unknown=ITSELF,
        ),
        lines(
            "Time of the rules",
            "How long the last evaluation of each group of rules took.",
            [
                over_time(
                    f"max by (group) (label_replace(prometheus_rule_group_last_duration_seconds{GROUPS},"
                    ' "group", "$1", "rule_group", ".*;gpujob-(.*)"))',
                    "{{group}}",
                )
            ],
            width=24,
            unit="s",
            unknown=ITSELF,
        ),
    ]


def targets() -> list[Panel]:
    return [
        lines(
            "Targets",
            "Sidecars that are listed, and those that answer. Alert: GpuJobNodeSidecarDown.",
            [over_time(f"count(up{SIDECARS})", "listed"), over_time(f"sum(up{SIDECARS})", "answer")],
            width=8,
            decimals=0,
            stepped=True,
        ),
        lines(
            "Age of target files",
            "Time since the oldest and the newest target file was written. Alert: GpuJobTargetsUnreadable.",
            [
                over_time("time() - min(prometheus_sd_file_mtime_seconds)", "oldest"),
                over_time("time() - max(prometheus_sd_file_mtime_seconds)", "newest"),
            ],
            width=8,
            unit="s",
            unknown=ITSELF,
        ),
        lines(
            "Duration of scrapes",
            "How long the ten slowest sidecars take to answer, and half of all.",
            [
                over_time(f"topk(10, max by (node) (scrape_duration_seconds{SIDECARS}))", "{{node}}"),
                over_time(f"quantile(0.5, scrape_duration_seconds{SIDECARS})", "half of all"),
            ],
            width=8,
            unit="s",
        ),
        lines(
            "Series of jobs",
            "Samples in the pages of the ten jobs with most, and of all jobs together.",
            [
                over_time(f"topk(10, sum by (job_id) (scrape_samples_scraped{SIDECARS}))", "{{job_id}}"),
                over_time(f"sum(scrape_samples_scraped{SIDECARS})", "all"),
            ],
            width=12,
        ),
        lines(
            "Age of the hub's answers",
            "Time since each command of Slurm last answered the hub. Needs the hub. Alert: GpuJobHubBlind.",
            [
                over_time(
                    f"time() - max by (command) (gpujob_hub_last_success_timestamp_seconds{{{CLUSTER}}})", "{{command}}"
                )
            ],
            width=12,
            unit="s",
            unknown="needs the hub",
        ),
    ]


def sidecars() -> list[Panel]:
    return [
        lines(
            "Sidecar CPU",
            "CPU time of the ten busiest sidecars, as a share of one core. The budget is 1 %.",
            [
                over_time(
                    f"topk(10, sum by (job_id, node) (rate(gpujob_exporter_cpu_seconds_total{{{CLUSTER}}}[{RATE}])))",
                    "{{node}} ({{job_id}})",
                )
            ],
            width=8,
            unit="percentunit",
        ),
        lines(
            "Sidecar memory",
            "Resident memory of the ten largest sidecars. The budget is 80 MiB.",
            [
                over_time(
                    f"topk(10, sum by (job_id, node) (gpujob_exporter_memory_rss_bytes{{{CLUSTER}}}))",
                    "{{node}} ({{job_id}})",
                )
            ],
            width=8,
            unit="bytes",
        ),
        lines(
            "Data age",
            "Time since a sidecar of each of the ten jobs with the oldest data last read successfully.",
            [
                over_time(
                    "topk(10, time() - min by (job_id) (max by (job_id, node)"
                    f" (gpujob_collector_last_success_timestamp_seconds{{{CLUSTER}}})))",
                    "{{job_id}}",
                )
            ],
            width=8,
            unit="s",
        ),
        rows(
            "Failing collectors",
            "Collectors whose last read failed, with the number of nodes. Alert: GpuJobCollectorFailing.",
            {"nodes": listed(f"count by (job_id, collector) (gpujob_collector_success{{{CLUSTER}}} == 0)")},
            labels=("job_id", "collector"),
            first_by="nodes",
            columns=[column("job_id", link=board.to_board("gpujob-job", job_id="job_id"))],
            width=24,
            unknown="none",
        ),
    ]


ROWS = (
    ("Alerts", alerts),
    ("From a rule to a person", delivery),
    ("From a node to Prometheus", targets),
    ("Sidecars", sidecars),
)


def build() -> Dashboard:
    firing = over_time(f"max by (alertname, severity, node) ({FIRING})")
    return board.build(UID, ROWS, (variables.cluster_of_jobs_or_hub(),), (variables.alerts(firing),))
