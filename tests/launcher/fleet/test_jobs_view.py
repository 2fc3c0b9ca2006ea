"""The table and the JSON of `gpujob ps`, from the queue of a real Slurm."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from exporter.contract.report import GpuSums
from exporter.contract.status import EtaEstimate
from exporter.slurm.accounting import Figures, parse_history
from exporter.slurm.prices import Prices
from exporter.slurm.queue import AttemptSnapshot, QueueRow, parse_queue
from launcher.cli.cluster.ps import SORT_NAMES
from launcher.fleet.jobs_view import (
    SORTS,
    Filters,
    Job,
    ended_rows,
    fold_runs,
    jobs_json,
    render_jobs,
    rows_of_run,
    shown_jobs,
)
from launcher.fleet.own_runs import Pipeline, RunProgress
from tests.launcher.conftest import Golden

SAMPLES = Path(__file__).parents[2] / "exporter" / "slurm" / "samples"
ROWS = parse_queue((SAMPLES / "squeue.24.11.5.txt").read_text(encoding="utf-8"))
NOW = 1795395600.0
TRAIN = QueueRow(
    *("7", AttemptSnapshot("RUNNING", 1705314600.0, 1705314660.0, limit_s=7200.0), "train", None),
    *("gpu", "cpu=32,mem=256G,node=1,billing=32,gres/gpu=1,gres/gpu:h100=1"),
    user="ada",
    account="lab",
    qos="normal",
    node_count=1,
    nodes="cn01",
)
TRAIN_RUN = RunProgress("logs/7_train", 2070.0, 6000.0, "items", EtaEstimate(7470.0, 7000.0, 8000.0))
PRICES = Prices("EUR", {"h100": 2.4})


def array(*states: str) -> list[Job]:
    ids = [f"8_{index}" for index in range(len(states))]
    return [
        Job(
            QueueRow(
                job_id,
                AttemptSnapshot(state, 1.0, reason="Priority" if state == "PENDING" else None),
                "arr",
                None,
                "gpu",
                "gres/gpu:h100=1",
            )
        )
        for job_id, state in zip(ids, states, strict=True)
    ]


def test_the_table_is_that_of_the_golden_page(golden: Golden) -> None:
    unfinished = render_jobs(shown_jobs(map(Job, ROWS), ended_too=False), NOW, verbose=False)
    rows = [job.row for job in shown_jobs(map(Job, [*ROWS, TRAIN]), ended_too=True)]
    everything = render_jobs([Job(row) for row in rows], NOW, verbose=True)
    golden("launcher/ps.txt", "\n".join([*unfinished, "", *everything]) + "\n")


@pytest.mark.parametrize("width", [80, 120])
def test_narrow_windows_lose_whole_columns(golden: Golden, width: int) -> None:
    later = TRAIN.snapshot.started + 3600 if TRAIN.snapshot.started else 0.0
    waiting = TRAIN._replace(
        job_id="9",
        snapshot=AttemptSnapshot("PENDING", later - 65, reason="Resources"),
        name="eval",
        nodes="",
        expected_start=later + 3720,
    )
    local = QueueRow("local-3f", AttemptSnapshot("COMPLETED", later - 900, later - 900, later - 60), "smoke", None)
    jobs = [
        Job(waiting),
        Job(TRAIN, TRAIN_RUN),
        *fold_runs(array("RUNNING", "RUNNING", "COMPLETED", "PENDING")),
        Job(local),
    ]
    table = render_jobs(jobs, later, verbose=False, prices=PRICES, width=width)
    assert max(len(line) for line in table) <= width
    golden(f"launcher/ps-{width}.txt", "\n".join(table) + "\n")


def test_a_long_name_is_cut_before_columns_are_left_out_and_wide_letters_count_twice() -> None:
    names, now = ("train", "日本語の学習ジョブ", "x" * 60), (TRAIN.snapshot.started or 0.0) + 3600
    jobs = [Job(TRAIN._replace(name=name), TRAIN_RUN) for name in names]
    head, *lines = render_jobs(jobs, now, verbose=False, width=80)
    assert head.split() == ["NAME", "JOB", "STATUS", "PROGRESS", "ETA", "MARGIN"]
    assert {cell_len(line) for line in lines} == {80}
    assert {cell_len(line.partition("  7  ")[0]) for line in lines} == {24}
    assert lines[2].startswith(f"{'x' * 21}...  7    RUNNING  34.5% 2,070/6,000 items  ")


def test_work_that_is_not_done_is_not_100_percent() -> None:
    line = render_jobs([Job(TRAIN, TRAIN_RUN._replace(items=9999.0, items_expected=1e4))], NOW, verbose=False)[1]
    assert " 99.9% 9,999/10,000 items " in line


def test_without_an_unfinished_job_the_last_ended_one_is_shown() -> None:
    ended = [QueueRow(str(end), AttemptSnapshot("COMPLETED", 1.0, 2.0, end), "job", None) for end in (30.0, 50.0, 40.0)]
    assert [job.row.job_id for job in shown_jobs(map(Job, ended), ended_too=False)] == ["50.0"]
    assert shown_jobs([], ended_too=False) == []


def test_a_local_sweep_with_a_point_that_never_started_has_ended() -> None:
    sweep = Job(QueueRow("local-1", AttemptSnapshot("MISSING", 1.0), "lr", None))
    assert sweep.has_ended
    assert [job.row.job_id for job in shown_jobs([sweep, Job(TRAIN)], ended_too=False)] == ["7"]


def test_tasks_of_an_array_are_one_line_with_counts() -> None:
    rows = [job.row for job in array("RUNNING", "COMPLETED", "PENDING")] + [
        TRAIN._replace(snapshot=AttemptSnapshot("COMPLETED"))
    ]
    found = shown_jobs(map(Job, rows), ended_too=False)  # with the ended task, not with the other ended job
    (job,) = fold_runs(found)
    assert (job.row.job_id, dict(job.tasks)) == ("8_[0-2]", {"RUNNING": 1, "COMPLETED": 1, "PENDING": 1})
    (line, *_) = render_jobs([job], NOW, verbose=False)[1:]
    assert line.split(maxsplit=5)[:4] == ["arr", "8_[0-2]", "slurm", "h100:1"]
    assert " x3  1 COMPLETED, 1 PENDING (Priority), 1 RUNNING  " in line
    (rest,) = fold_runs([Job(TRAIN._replace(job_id="8_[1-3%2]"))])
    assert (rest.row.job_id, rest.tasks) == ("8_[1-3%2]", {})


def test_price_cost_and_gpus_of_one_line_are_those_of_all_its_parts() -> None:
    running = AttemptSnapshot("RUNNING", 1.0, NOW - 3600.0)
    waiting = QueueRow("8_[2-4]", AttemptSnapshot("PENDING", 1.0), "arr", None, "gpu", "gres/gpu:h100=1")
    tasks = [Job(waiting), *(Job(waiting._replace(job_id=f"8_{index}", snapshot=running)) for index in range(2))]
    (job,) = fold_runs(tasks)
    assert job.price_per_hour(PRICES) == pytest.approx(5 * 2.4)
    assert job.cost(PRICES, NOW) == pytest.approx(2 * 2.4)
    assert " h100:1 x5 " in render_jobs([job], NOW, verbose=False)[1]
    over = Job(waiting._replace(job_id="8_5", snapshot=AttemptSnapshot("COMPLETED", 1.0, NOW - 7200.0, NOW - 3600.0)))
    (rest,) = fold_runs([*tasks, over])
    assert (rest.price_per_hour(PRICES), rest.cost(PRICES, NOW)) == pytest.approx((5 * 2.4, 3 * 2.4))
    sizes = {"9+0": 16, "9+1": 4}
    rows = (QueueRow(name, running, "het", None, "gpu", f"gres/gpu:h100={count}") for name, count in sizes.items())
    (het,) = fold_runs(map(Job, rows))
    assert het.cost(PRICES, NOW) == pytest.approx(20 * 2.4)
    assert " h100:20 " in render_jobs([het], NOW, verbose=False)[1]


def test_filters_and_orders() -> None:
    both = TRAIN._replace(partition="low,gpu")
    assert Filters(frozenset({"gpu"})).fits(both)
    assert not Filters(frozenset({"cpu"})).fits(both)
    assert not Filters(states=frozenset({"PENDING"})).fits(both)
    ended = TRAIN._replace(snapshot=AttemptSnapshot("FAILED", 1.0, 2.0, 100.0))
    assert [Filters(since=since).fits(ended) for since in (100.0, 101.0)] == [True, False]
    assert tuple(SORTS) == SORT_NAMES
    jobs = [Job(TRAIN._replace(job_id=job_id)) for job_id in ("10", "9", "local-3f")]
    for order in SORTS.values():
        jobs.sort(key=order)
    assert [job.row.job_id for job in sorted(jobs, key=SORTS["job"])] == ["local-3f", "9", "10"]


def test_json_has_the_runs_with_their_jobs() -> None:
    body: Any = jobs_json([Job(TRAIN, TRAIN_RUN, Figures(elapsed_s=3600.0, cpu_ratio=0.5))], NOW, PRICES)
    (run,) = body["runs"]
    (job,) = run.pop("jobs")
    assert run == {"run_name": "train", "status": "running", "submitted_at": "2024-01-15T10:30:00Z"}
    gpu = {"name": "h100", "memory_mib": None}
    assert job["resources"] == {"gpus": [gpu], "cpus": 32, "memory_mib": 262144}
    assert (job["backend"], job["region"], job["nodes"], job["limit_s"]) == ("slurm", "gpu", "cn01", 7200.0)
    assert (job["started_at"], job["ended_at"], job["expected_start"]) == ("2024-01-15T10:31:00Z", None, None)
    assert job["progress"] == {"items": 2070.0, "items_expected": 6000.0, "unit": "items", "stalled": False}
    assert (job["eta_s"], job["cost"]) == (7470.0, {"amount": 2.4, "currency": "EUR"})
    assert job["figures"]["cpu_ratio"] == 0.5
    local = TRAIN._replace(job_id="local-3f")
    assert (Job(local).cost(PRICES, NOW), Job(local).backend) == (None, "local")
    body = jobs_json([Job(TRAIN)], NOW)
    unknown = ("progress", "eta_s", "run_dir", "figures", "cost", "reason", "dependency")
    assert {body["runs"][0]["jobs"][0][key] for key in unknown} == {None}
    (run,) = json.loads(json.dumps(jobs_json(array("COMPLETED", "PENDING"), NOW)))["runs"]
    assert (run["status"], len(run["jobs"])) == ("pending", 2)


def test_ended_jobs_have_the_figures_of_their_last_attempts() -> None:
    text = (SAMPLES / "sacct.24.11.5.txt").read_text(encoding="utf-8")
    attempts = parse_history("".join(f"gpu|lab|normal|1|n1|{line}\n" for line in text.splitlines()))
    ended = {row.job_id: (row, figures) for row, figures in ended_rows(attempts, ROWS)}
    row, figures = ended["2"]
    assert (row.name, row.snapshot.state, row.resources) == (
        "ok",
        "COMPLETED",
        "billing=4,cpu=4,gres/gpu=4,mem=600M,node=2",
    )
    assert figures.cpu_ratio is not None
    assert "1" not in ended  # the queue shows that it runs
    (line,) = render_jobs([Job(row, figures=figures)], NOW, verbose=False)[1:]
    assert " 12%   28%   " in line


@pytest.mark.parametrize(("days", "shown"), [(1, True), (364, False)])
def test_a_start_that_nobody_can_forecast_is_not_shown(days: int, shown: bool) -> None:
    """Behind a job without a time limit Slurm forecasts the start in a year."""
    waiting = TRAIN._replace(
        snapshot=AttemptSnapshot("PENDING", NOW, reason="Resources"), expected_start=NOW + days * 86400
    )
    assert ("start in" in render_jobs([Job(waiting)], NOW, verbose=False)[1]) == shown


def test_a_pipeline_is_one_line_with_its_ended_jobs() -> None:
    pipeline = Pipeline("pipeline-7", "r8")
    states = {"7": "COMPLETED", "9": "RUNNING", "10": "PENDING"}
    rows = [QueueRow(job_id, AttemptSnapshot(state, 1.0), f"job{job_id}", None) for job_id, state in states.items()]
    other = Job(QueueRow("8", AttemptSnapshot("COMPLETED", 2.0, ended=3.0), "other", None))
    jobs = shown_jobs([other, *(Job(row, pipeline=pipeline) for row in rows)], ended_too=False)
    (job,) = fold_runs(jobs)
    assert (job.row.name, job.row.job_id, job.tasks) == ("r8", "pipeline-7", dict.fromkeys(sorted(states.values()), 1))
    assert render_jobs([job], NOW, verbose=False)[1].split()[:2] == ["r8", "pipeline-7"]
    body: Any = jobs_json(jobs, NOW)
    (run,) = body["runs"]
    assert (run["run_name"], run["status"], len(run["jobs"])) == ("r8", "running", 3)


def test_a_run_has_its_own_names_and_its_waiting_tasks() -> None:
    rows = [QueueRow(job_id, AttemptSnapshot("PENDING"), "job", None) for job_id in ("7", "8_1", "8_[2-4]", "9", "70")]
    found = rows_of_run(rows, {"7": "prep", "8_1": "a", "8_3": "b"})
    assert [(row.job_id, row.name) for row in found] == [("7", "prep"), ("8_1", "a"), ("8_[2-4]", "job")]


def test_margin_idle_time_and_energy_are_shown_where_they_are_known() -> None:
    now = (TRAIN.snapshot.started or 0.0) + 3600
    gpus = GpuSums(seen_s=400.0, idle_s=100.0, energy_j=7.2e6)
    job = Job(TRAIN, TRAIN_RUN._replace(gpus=gpus))
    head, line = render_jobs([job], now, verbose=True)[:2]
    shown = dict(zip(re.split(r" {2,}", head), re.split(r" {2,}", line), strict=True))
    assert (shown["MARGIN"], shown["IDLE"], shown["ENERGY"]) == ("-1h 04m", "25%", "2.0 kWh")
    bare = Job(TRAIN, TRAIN_RUN._replace(gpus=GpuSums(), eta=None))
    assert (bare.margin_s(now), bare.gpu_idle_ratio, bare.energy_j) == (None, None, None)
    assert Job(TRAIN._replace(snapshot=TRAIN.snapshot._replace(limit_s=None)), TRAIN_RUN).margin_s(now) is None


def test_a_suspension_moves_the_margin_and_leaves_no_forecast_while_it_lasts() -> None:
    now = (TRAIN.snapshot.started or 0.0) + 3600
    assert Job(TRAIN, TRAIN_RUN._replace(limit_end=now + 7500)).margin_s(now) == 30
    suspended = Job(TRAIN._replace(snapshot=TRAIN.snapshot._replace(state="SUSPENDED")), TRAIN_RUN)
    assert (suspended.eta_s, suspended.margin_s(now)) == (None, None)
