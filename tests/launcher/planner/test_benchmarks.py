"""Benchmarks: their commands, variables and result directories."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.jobfile.jobfile import parse_job
from launcher.jobfile.serving import BenchmarkSpec, concurrency_list
from tests.launcher.planner.backends.serving_jobs import (
    argv_of,
    environment_of,
    job,
    option,
    plan_from,
    planned,
)

SIZES = {"isl": 1024, "osl": 128, "concurrencies": "4x8x16"}
WORKERS = [{"role": "agg", "command": "serve {http_port}"}]


def bench(benchmark: dict[str, Any], **over: Any) -> str:
    return job(**{"workers": WORKERS, "benchmark": benchmark, "model": {"path": "/models/r1"}, **over})


def test_sa_bench_gets_its_options_and_a_result_directory(tmp_path: Path) -> None:
    plan = plan_from(bench({"type": "sa-bench", "command": "python3 /opt/bench.py -v", **SIZES, "args": {"seed": 1}}))
    argv = argv_of(plan, "benchmark")
    folder = f"{plan.run_dir('4459')}/sa-bench_isl_1024_osl_128"
    assert argv[3:] == [
        *(folder, "python3", "/opt/bench.py", "-v", "--host", "cn00", "--port", "6100", "--model", "r1"),
        *("--isl", "1024", "--osl", "128", "--concurrencies", "4x8x16", "--req-rate", "inf"),
        *("--result-dir", folder, "--seed", "1"),
    ]
    place = str(tmp_path / "a b; $x")
    done = subprocess.run([*argv[:3], place, "sh", "-c", 'test -d "$1" && exit 7', "-", place], check=False)
    assert done.returncode == 7


def test_the_logs_of_a_benchmark_have_fixed_names() -> None:
    plan = plan_from(bench({"type": "custom", "command": "load"}))
    entry = planned(plan, "benchmark")
    assert entry.task.logs == ("benchmark{run}.out", "benchmark{run}.err")
    assert (entry.stage, entry.service, entry.critical, entry.task.rank) == ("benchmark", False, True, 1)
    assert plan.world_size == 1


def test_a_custom_benchmark_gets_its_parameters_in_variables() -> None:
    benchmark = {"type": "custom", "command": "load --to {job_id}", **SIZES, "req_rate": 2.5, "env": {"A": "{nodes}"}}
    plan = plan_from(bench({**benchmark, "config": {"b": [1]}, "args": {"quiet": True}}))
    assert argv_of(plan, "benchmark") == ["load", "--to", "4459", "--quiet"]
    variables = environment_of(plan, "benchmark")
    expected = {
        "GPUJOB_ENDPOINT": "http://cn00:6100",
        "GPUJOB_MODEL": "r1",
        "GPUJOB_MODEL_PATH": "/models/r1",
        "GPUJOB_CONCURRENCIES": "4x8x16",
        "GPUJOB_ISL": "1024",
        "GPUJOB_OSL": "128",
        "GPUJOB_REQ_RATE": "2.5",
        "GPUJOB_WORKER_URLS": "http://cn00:6100",
        "GPUJOB_CONFIG_FILE": f"{plan.run_dir('4459')}/benchmark_config.yaml",
        "A": "1",
    }
    assert {name: variables.get(name) for name in expected} == expected
    assert plan.templates["benchmark_config.yaml"] == "b:\n- 1\n"


@pytest.mark.parametrize("command", [["load", "a b", "it's", "{job_id}", ""], ["x\ny"]])
def test_a_command_may_be_a_list_of_arguments(command: list[str]) -> None:
    plan = plan_from(bench({"type": "custom", "command": command}, frontend={"type": "custom", "command": command}))
    expected = [word.replace("{job_id}", "4459") for word in command]
    assert argv_of(plan, "benchmark") == expected
    assert argv_of(plan, "frontend_0") == expected
    router = plan_from(bench({"type": "router", "command": command, **SIZES}))
    assert argv_of(router, "benchmark")[4 : 4 + len(command)] == expected


def test_the_schema_accepts_a_command_as_text_and_as_list() -> None:
    kinds = BenchmarkSpec.model_json_schema()["properties"]["command"]["anyOf"]
    assert [kind["type"] for kind in kinds] == ["string", "array", "null"]


def test_the_router_benchmark_runs_one_profile_per_concurrency(tmp_path: Path) -> None:
    plan = plan_from(bench({"type": "router", **SIZES, "req_rate": 3, "args": {"request-count": 100}}))
    argv = argv_of(plan, "benchmark")
    assert argv[4:6] == ["aiperf", "profile"]
    assert (option(argv, "--url"), option(argv, "--request-rate")) == ("http://cn00:6100", "3")
    program = ["sh", "-c", 'echo "$@" >> out; test "$2" != 8', "-"]
    environment = {"PATH": "/usr/bin:/bin", "GPUJOB_RESULT_DIR": "/run/a b"}
    done = subprocess.run([*argv[:4], *program], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert (tmp_path / "out").read_text().splitlines() == [
        f"--concurrency {each} --artifact-dir /run/a b/concurrency_{each}" for each in (4, 8)
    ]


def test_a_job_without_a_benchmark_serves_until_it_is_stopped() -> None:
    for benchmark in ({"type": "manual"}, {}):
        plan = plan_from(bench(benchmark))
        assert [entry.service for entry in plan.tasks] == [True]
    assert [entry.service for entry in plan_from(job(workers=WORKERS)).tasks] == [False]


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=8))
def test_concurrencies_as_list_and_as_text_are_equal(numbers: list[int]) -> None:
    written = (numbers, "x".join(map(str, numbers)))
    found = [parse_job(bench({"concurrencies": value}), "job.yaml").benchmark for value in written]
    assert all(entry and concurrency_list(entry.concurrencies) == tuple(numbers) for entry in found)
