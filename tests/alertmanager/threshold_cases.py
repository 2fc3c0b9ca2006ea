"""Jobs with the default of a threshold, with their own, and with none, as cases of promtool."""

from typing import Any

from exporter.contract.alert_thresholds import THRESHOLDS, AlertThreshold

J = 'cluster="c",job_name="n",user="u",partition="p",notify="me",node="a"'
RUNNING = {'gpujob_phase{%s,phase="running"}': "1x90", "gpujob_start_timestamp_seconds{%s}": "1x90"}
LIMIT = {"gpujob_time_limit_seconds{%s}": "7200x90", "gpujob_time_limit_timestamp_seconds{%s}": "7200x90"}
# Series of a job, and a threshold between its value and the default, so that it is silent with it
CASES: dict[str, tuple[dict[str, str], float]] = {
    "slowdown": ({'gpujob_worker_slowdown_ratio{%s,worker="w"}': "1.4x90"}, 1.5),
    "straggler": ({'gpujob_worker_lag_ratio{%s,worker="w"}': "0.3x90"}, 0.4),
    "time_limit_chance": ({"gpujob_time_limit_met_probability_ratio{%s}": "0.05x90", **LIMIT}, 0.01),
    "host_memory": (
        {"gpujob_cgroup_memory_working_set_bytes{%s}": "97x90", "gpujob_cgroup_memory_limit_bytes{%s}": "100x90"},
        0.98,
    ),
    "disk_free": (
        {
            'gpujob_filesystem_avail_bytes{%s,group="output"}': "9e9x90",
            'gpujob_filesystem_size_bytes{%s,group="output"}': "1e13x90",
        },
        8e9,
    ),
    "checkpoint_late": (
        {"gpujob_checkpoint_last_timestamp_seconds{%s}": "1x90", "gpujob_checkpoint_interval_seconds{%s}": "900x90"},
        8,
    ),
    "log_burst": ({'gpujob_log_errors_total{%s,worker="w",pattern="x",severity="warning"}': "0+2x90"}, 50),
    "log_unread": ({'gpujob_log_lag_bytes{%s,worker="w"}': "1e8x90"}, 1e9),
    "gpu_idle": (
        {
            'gpujob_worker_gpu_condition{%s,worker="w",rank="0",condition="unused"}': "1x90",
            'gpujob_worker_up{%s,worker="w",rank="0"}': "1x90",
        },
        1,
    ),
    "worker_restarts": (
        {
            'gpujob_worker_last_exit_timestamp_seconds{%s,worker="w",rank="0",reason="app_error"}': "4800x90",
            'gpujob_worker_last_exit_restarts_left{%s,worker="w",rank="0",reason="app_error"}': "1x90",
        },
        1,
    ),
}


def job_series(job: int, series: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"series": f'{name.replace("%s", J)[:-1]},job_id="{job}"}}', "values": values}
        for name, values in {**RUNNING, **series}.items()
    ]


def threshold_case(name: str) -> dict[str, Any]:
    """A job with the default, one with its own threshold, and one with off: only the first has alerts."""
    series, own = CASES[name]
    rows = [row for job in (1, 2, 3) for row in job_series(job, series)]
    for job, value in ((2, own), (3, None)):
        text = f"{AlertThreshold(name, value).series_value:g} ".replace("inf", "Inf")
        label = 'gpujob_alert_threshold{%s,alert="' + name + '"}'
        rows.append(job_series(job, {label: text * 90})[-1])
    fires = THRESHOLDS[name].alerts
    expected = [{"labels": f'{{job_id="1",notify="me",alertname="{alert}"}}', "value": 1} for alert in fires]
    selected = f'alertname=~"{"|".join(fires)}",alertstate="firing"'
    expr = f"count by (alertname, job_id, notify) (ALERTS{{{selected}}})"
    when = [{"expr": expr, "eval_time": "85m", "exp_samples": expected}]
    return {"name": name, "interval": "1m", "input_series": rows, "promql_expr_test": when}
