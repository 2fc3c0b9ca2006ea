"""The tables of `gpujob usage`."""

from typing import Any

import pytest

from exporter.slurm.prices import Prices
from exporter.slurm.usage import parse_usage
from launcher.fleet.usage_view import NO_GPUS, render_usage, usage_csv, usage_json, usage_table
from tests.launcher.conftest import Golden

ROWS = parse_usage(
    """7|ada|nlp|gpu|REQUEUED|1800|8|cpu=8,gres/gpu:h100=2,gres/gpu=2|train
7|ada|nlp|gpu|COMPLETED|7200|8|cpu=8,gres/gpu:h100=2,gres/gpu=2|train
8_0|ada|nlp|low|RUNNING|3600|4|cpu=4,gres/gpu:a100=1,gres/gpu=1|a, "b"
9|bob|vis|cpu|FAILED|36000|100|cpu=100,mem=1G|render
10|eve|vis|cpu|PENDING|0|0||wait
"""
)
PRICES = Prices("EUR", {"h100": 2.4, "default": 1.0})


def test_the_tables_are_those_of_the_golden_page(golden: Golden) -> None:
    tables = [render_usage(usage_table(ROWS, by), PRICES) for by in ("user", "account", "partition", "name")]
    golden("launcher/usage.txt", "\n\n".join("\n".join(lines) for lines in tables) + "\n")


def test_all_attempts_of_a_job_count() -> None:
    table = usage_table(ROWS, "user")
    assert list(table.groups) == ["ada", "bob"]  # a job that waits took nothing
    ada = table.groups["ada"]
    assert (ada.jobs, ada.attempts, ada.gpu_s) == (2, 3, {"h100": 18000.0, "a100": 3600.0})
    assert table.gpu_hours(table.groups["bob"]) == 0.0


def test_without_a_price_there_is_no_cost() -> None:
    table = usage_table(ROWS, "user")
    assert "COST" not in render_usage(table)[0]
    body: Any = usage_json(table, 0.0, 1.0, Prices("EUR", {"h100": 2.4}))
    assert [group["cost"] for group in body["groups"]] == [None, None]  # a100 has no price; bob used no GPU
    assert body["total"]["gpu_hours"] == pytest.approx(6.0)
    assert usage_csv(table).splitlines()[0] == "user,jobs,attempts,gpu_hours,cpu_hours"


def test_csv_quotes_names() -> None:
    lines = usage_csv(usage_table(ROWS, "name"), PRICES).splitlines()
    assert lines == [
        "name,jobs,attempts,gpu_hours,cpu_hours,cost,currency",
        "train,1,2,5.0,20.0,12.0,EUR",
        '"a, ""b""",1,1,1.0,4.0,1.0,EUR',
        "render,1,1,0.0,1000.0,,",
    ]


def test_gpu_hours_are_unknown_where_accounting_has_no_gpus() -> None:
    table = usage_table([row._replace(gpus={}) for row in ROWS], "user")
    assert render_usage(table)[-1] == NO_GPUS
    assert " -      " in render_usage(table)[1]
    body: Any = usage_json(table, 0.0, 1.0)
    assert body["total"]["gpu_hours"] is None
