"""Queries of counters that have no series while they are 0, evaluated by Prometheus' own engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grafana.build import fleet, queries, watching
from grafana.build.queries import Query
from tests.grafana.substitute import substitute, variables

JOB = 'cluster="c1",job_id="42",node="n1"'
WORKER = f'{JOB},worker="w0",role="worker",rank="0"'
VALUES = variables(cluster="c1", job_id="42", span=3600)

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def check(folder: Path, query: Query, at: str, series: dict[str, str], *expected: tuple[str, float]) -> None:
    """Evaluate the query over series with a sample each minute."""
    samples = [{"labels": labels, "value": value} for labels, value in expected]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": substitute(query.expr, VALUES), "eval_time": at, "exp_samples": samples}],
    }
    path = folder / "case.yml"
    path.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def exits(instance: str) -> str:
    return f'gpujob_worker_exits_total{{{WORKER},reason="app_error",instance="{instance}"}}'


ONE = '{worker="w0",node="n1",reason="app_error"}'


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ("_x20 1x9", 1.0),  # born at 1
        ("_x20 1x4 2x4", 2.0),
        ("_x25 1 stale", 1.0),  # scraped once: the job ended with the worker
        ("3x29", 3.0),  # the first scrape came after the ends
        ("_x20 0x4 1x4", 1.0),  # full detail
    ],
)
def test_exits_count_the_first(tmp_path: Path, values: str, count: float) -> None:
    check(tmp_path, queries.EXITS, "29m", {exits("n1:9410"): values}, (ONE, count))


def test_exits_before_the_time_range_are_not_in_it(tmp_path: Path) -> None:
    check(tmp_path, queries.EXITS, "90m", {exits("n1:9410"): "1x90"})


def test_a_sidecar_that_restarts_at_another_address_adds_no_exit(tmp_path: Path) -> None:
    series = {exits("n1:9410"): "_x10 1x5 stale", exits("n1:9777"): "_x18 1x11"}
    check(tmp_path, queries.EXITS, "29m", series, (ONE, 1.0))


@pytest.mark.parametrize(
    ("query", "name", "labels"),
    [
        (queries.RESTARTS, f"gpujob_worker_restarts_total{{{WORKER}", '{worker="w0"}'),
        (queries.RESTARTS_IN_TIME, f"gpujob_worker_restarts_total{{{WORKER}", "{}"),
        (queries.EXITS_IN_TIME, f'gpujob_worker_exits_total{{{WORKER},reason="x"', '{reason="x"}'),
        (
            queries.LOG_ERRORS,
            f'gpujob_log_errors_total{{{WORKER},pattern="p",severity="error"',
            '{severity="error",pattern="p"}',
        ),
        (queries.GPU_ECC, f'gpujob_gpu_ecc_job_errors_total{{{JOB},gpu="0",type="corrected"', '{type="corrected"}'),
    ],
    ids=lambda value: value.name if isinstance(value, Query) else "",
)
def test_a_counter_that_begins_at_1_counts(tmp_path: Path, query: Query, name: str, labels: str) -> None:
    check(tmp_path, query, "22m", {f'{name},instance="n1:9410"}}': "_x20 1x9"}, (labels, 1.0))


def test_no_stalled_worker_shows_as_0(tmp_path: Path) -> None:
    up = f"gpujob_worker_up{{{WORKER}}}"
    check(tmp_path, queries.WORKERS_STALLED, "5m", {up: "1x9"}, ("{}", 0.0))
    check(tmp_path, queries.WORKERS_STALLED, "5m", {up: "1x9", up.replace("up", "stalled"): "_ 1x9"}, ("{}", 1.0))
    check(tmp_path, queries.WORKERS_STALLED, "5m", {"gpujob_worker_up{job_id='1'}": "1x9"})


def test_foreign_processes_are_0_where_a_gpu_responds(tmp_path: Path) -> None:
    up = f'gpujob_gpu_up{{{JOB},gpu="0"}}'
    check(tmp_path, queries.GPU_FOREIGN, "5m", {up: "1x9"}, ('{node="n1"}', 0.0))
    foreign = {up: "1x9", up.replace("gpu_up", "gpu_foreign_processes"): "_ 2x9"}
    check(tmp_path, queries.GPU_FOREIGN, "5m", foreign, ('{node="n1"}', 2.0))


def test_a_condition_that_came_late_has_its_share_of_the_time_range(tmp_path: Path) -> None:
    series = {
        f"gpujob_worker_up{{{WORKER}}}": "1x59",
        f'gpujob_worker_gpu_condition{{{WORKER},condition="unused"}}': "_x44 1x14",
    }
    labels = '{worker="w0",node="n1",condition="unused"}'
    check(tmp_path, queries.GPU_CONDITIONS, "59m", series, (labels, 0.25))


def test_the_board_of_the_monitoring_shows_alerts_of_no_job(tmp_path: Path) -> None:
    panels: dict[str, Any] = {str(built.title): built for built in (panel.build() for panel in watching.alerts())}

    def alert(labels: str) -> str:
        return f'ALERTS{{{labels},alertstate="firing"}}'

    hub_down = 'alertname="GpuJobHubDown",severity="critical",instance="h:9400"'
    series = {
        alert('alertname="GpuJobWorkerKilled",severity="critical",cluster="c1",job_id="42"'): "1x9",
        alert(hub_down): "1x9",
        alert('alertname="GpuJobHubBlind",severity="critical",cluster="c1"'): "1x9",
        alert('alertname="GpuJobHubBlind",severity="critical",cluster="c2"'): "1x9",
        alert('alertname="GpuJobWatchdog",severity="critical"'): "1x9",
        alert('alertname="OfTheSite",severity="critical"'): "1x9",
        f"ALERTS_FOR_STATE{{{hub_down}}}": "60x9",
    }
    (firing,), (since,) = (panels[title].targets for title in ("Firing: critical", "Firing now, of no job"))
    check(tmp_path, Query("", firing.expr), "5m", series, ("{}", 3.0))
    check(tmp_path, Query("", since.expr), "5m", series, (f"{{{hub_down}}}", 60_000.0))


def test_without_waiting_and_failed_jobs_a_hub_has_0(tmp_path: Path) -> None:
    """It drops the series of a state in which it has no job."""
    panels: list[Any] = [panel.build() for panel in fleet.overview()]
    waiting, failed = next(panel.targets for panel in panels if panel.title == "Waiting and failed")
    jobs = 'gpujob_jobs{cluster="c1",user="ada",partition="gpu",state="PENDING",instance="h:9400"}'
    ended = 'gpujob_jobs_ended_total{cluster="c1",user="ada",partition="gpu",state="FAILED",instance="h:9400"}'
    for query, series in ((waiting, {jobs: "3x9"}), (failed, {ended: "0x4 3x9"})):
        check(tmp_path, Query("", query.expr), "9m", {HUB_JOBS: "1x9"}, ("{}", 0.0))
        check(tmp_path, Query("", query.expr), "9m", {HUB_JOBS: "1x9", **series}, ("{}", 3.0))
        check(tmp_path, Query("", query.expr), "9m", {})


def test_ended_jobs_are_those_that_have_ended(tmp_path: Path) -> None:
    (panel,) = fleet.ended()
    targets: Any = panel.build().targets
    shown = {str(target.expr).partition("gpujob_job_")[2].partition("{")[0]: str(target.expr) for target in targets}
    labels = 'job_name="train",user="ada"'
    series = {
        f'gpujob_job_start_timestamp_seconds{{cluster="c1",partition="gpu",job_id="{job}",{labels}}}': "60x9"
        for job in (1, 2)
    } | {f'gpujob_job_end_timestamp_seconds{{cluster="c1",partition="gpu",job_id="1",{labels}}}': "_x5 300x3"}
    started = Query("", shown["start_timestamp_seconds"])
    check(tmp_path, started, "9m", series, (f'{{job_id="1",{labels}}}', 60_000.0))


HUB_JOBS = 'gpujob_hub_jobs{cluster="c1",kind="tracked",instance="h:9400"}'


def energy(source: str) -> str:
    return f'gpujob_energy_joules_total{{cluster="c1",user="ada",partition="gpu",source="{source}",instance="h:9400"}}'


def energy_of_ended_jobs() -> Query:
    panels: list[Any] = [panel.build() for panel in fleet.waste()]
    (target,) = next(panel.targets for panel in panels if panel.title == "Energy of ended jobs")
    return Query("", target.expr)


@pytest.mark.parametrize(
    ("counted", "seen", "kwh"),
    [
        ("_x80 7.2e6x9", "1x89", 2.0),  # the first job of a user
        ("_x70 7.2e6x19", "_x40 1x49", 2.0),  # and with a hub that is younger than the time range
        ("_x80 7.2e6x9", "_x80 1x9", 0.0),  # Prometheus has found a hub that has counted for months
        ("7.2e6x9 _x50 14.4e6x29", "1x9 _x50 1x29", 0.0),  # and after a night without it
        ("7.2e6x28 stale 7.2e6x59", "1x28 stale 1x59", 0.0),  # one scrape failed where the range begins
    ],
)
def test_counters_of_the_hub_do_not_begin_with_the_range(tmp_path: Path, counted: str, seen: str, kwh: float) -> None:
    series = {energy("gpu"): counted, HUB_JOBS: seen}
    check(tmp_path, energy_of_ended_jobs(), "89m", series, ('{user="ada",source="gpu"}', kwh))


def test_energy_of_gpus_and_of_their_nodes_is_not_added(tmp_path: Path) -> None:
    series = {energy("gpu"): "_x80 7.2e6x9", energy("slurm"): "_x80 10.8e6x9", HUB_JOBS: "1x89"}
    expected = [('{user="ada",source="slurm"}', 3.0), ('{user="ada",source="gpu"}', 2.0)]
    check(tmp_path, energy_of_ended_jobs(), "89m", series, *expected)


def test_rates_of_the_hub_reach_over_two_of_its_scrapes() -> None:
    """Grafana has the interval of the sidecars, and would look at one sample."""
    built = [panel.build() for _, row in fleet.ROWS for panel in row()]
    targets: list[Any] = [target for panel in built for target in panel.targets or []]
    assert [target.interval for target in targets if queries.RATE in target.expr] == [fleet.HUB_STEP]
