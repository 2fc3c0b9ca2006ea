"""Benchmarks: what uses the workers, and where its results go."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.jobfile.jobfile import parse_job
from launcher.jobfile.serving import BenchmarkSpec, concurrency_list
from tests.launcher.planner.backends.serving_jobs import (
    environment_of,
    job,
    option,
    plan_from,
    planned,
    problems_of,
    words_of,
)

SIZES = {"isl": 1024, "osl": 128, "concurrencies": "4x8x16"}
WORKERS = [{"role": "agg", "command": "serve {http_port}"}]


def bench(benchmark: dict[str, Any], **over: Any) -> str:
    return job(**{"workers": WORKERS, "benchmark": benchmark, "model": {"path": "/models/r1"}, **over})


def test_sa_bench_gets_its_options_and_a_folder(tmp_path: Path) -> None:
    plan = plan_from(bench({"type": "sa-bench", "command": "python3 /opt/bench.py -v", **SIZES, "args": {"seed": 1}}))
    words = words_of(plan, "benchmark")
    folder = f"{plan.run_dir('4459')}/sa-bench_isl_1024_osl_128"
    assert words[3:] == [
        *(folder, "python3", "/opt/bench.py", "-v", "--host", "cn00", "--port", "6100", "--model", "r1"),
        *("--isl", "1024", "--osl", "128", "--concurrencies", "4x8x16", "--req-rate", "inf"),
        *("--result-dir", folder, "--seed", "1"),
    ]
    place = str(tmp_path / "a b; $x")
    done = subprocess.run([*words[:3], place, "sh", "-c", 'test -d "$1" && exit 7', "-", place], check=False)
    assert done.returncode == 7


def test_its_logs_are_those_that_everybody_looks_for() -> None:
    plan = plan_from(bench({"type": "custom", "command": "load"}))
    entry = planned(plan, "benchmark")
    assert entry.task.logs == ("benchmark{run}.out", "benchmark{run}.err")
    assert (entry.stage, entry.service, entry.critical, entry.task.rank) == ("benchmark", False, True, 1)
    assert plan.world_size == 1


def test_a_custom_benchmark_finds_in_its_variables_what_it_is_about() -> None:
    benchmark = {"type": "custom", "command": "load --to {job_id}", **SIZES, "req_rate": 2.5, "env": {"A": "{nodes}"}}
    plan = plan_from(bench({**benchmark, "config": {"b": [1]}, "args": {"quiet": True}}))
    assert words_of(plan, "benchmark") == ["load", "--to", "4459", "--quiet"]
    told = environment_of(plan, "benchmark")
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
    assert {name: told.get(name) for name in expected} == expected
    assert plan.templates["benchmark_config.yaml"] == "b:\n- 1\n"


@pytest.mark.parametrize("words", [["load", "a b", "it's", "{job_id}", ""], ["x\ny"]])
def test_a_command_may_be_a_list_of_words(words: list[str]) -> None:
    plan = plan_from(bench({"type": "custom", "command": words}, frontend={"type": "custom", "command": words}))
    expected = [word.replace("{job_id}", "4459") for word in words]
    assert words_of(plan, "benchmark") == expected
    assert words_of(plan, "frontend_0") == expected
    router = plan_from(bench({"type": "router", "command": words, **SIZES}))
    assert words_of(router, "benchmark")[4 : 4 + len(words)] == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["x", 3, ["a"]], ['command[1]: 3 is not a text; write it in quotes: "3"', "command[2]: ['a'] is not a text"]),
        ([], ["command: the command is empty"]),
        ([""], ["command: the command is empty"]),
    ],
)
def test_a_list_that_is_no_command_is_told_with_its_words(words: list[Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_job(bench({"type": "custom", "command": words}), "job.yaml")
    assert list(raised.value.problems) == [f"benchmark.{problem}" for problem in told]


def test_the_schema_takes_both_ways_to_write_a_command() -> None:
    kinds = BenchmarkSpec.model_json_schema()["properties"]["command"]["anyOf"]
    assert [kind["type"] for kind in kinds] == ["string", "array", "null"]


def test_the_router_benchmark_is_one_profile_for_each_concurrency(tmp_path: Path) -> None:
    plan = plan_from(bench({"type": "router", **SIZES, "req_rate": 3, "args": {"request-count": 100}}))
    words = words_of(plan, "benchmark")
    assert words[4:6] == ["aiperf", "profile"]
    assert (option(words, "--url"), option(words, "--request-rate")) == ("http://cn00:6100", "3")
    program = ["sh", "-c", 'echo "$@" >> out; test "$2" != 8', "-"]
    environment = {"PATH": "/usr/bin:/bin", "GPUJOB_RESULT_DIR": "/run/a b"}
    done = subprocess.run([*words[:4], *program], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert (tmp_path / "out").read_text().splitlines() == [
        f"--concurrency {each} --artifact-dir /run/a b/concurrency_{each}" for each in (4, 8)
    ]


def test_a_job_without_a_benchmark_serves_until_it_is_stopped() -> None:
    for benchmark in ({"type": "manual"}, {}):
        plan = plan_from(bench(benchmark))
        assert [entry.service for entry in plan.tasks] == [True]
    assert [entry.service for entry in plan_from(job(workers=WORKERS)).tasks] == [False]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            bench({"type": "sa-bench", "command": "b", **SIZES}, workers=[{"command": "true"}]),
            "benchmark.type: sa-bench sends requests and nothing takes them; say a frontend, or have the workers'",
        ),
        (
            job(workers=WORKERS, benchmark={"type": "router", **SIZES}),
            "model: is missing; the router benchmark has to name it in its requests",
        ),
        (
            bench(
                {"type": "custom", "command": "b"},
                workers=[{"role": "t", "command": "t.py"}],
                backend={"type": "torchrun"},
            ),
            "benchmark: it uses workers that serve, and torchrun runs a program to its end; leave it out",
        ),
    ],
)
def test_a_benchmark_that_has_nothing_to_do_is_told(text: str, told: str) -> None:
    assert len(problems_of(text)) == 1
    assert told in problems_of(text)[0]


@pytest.mark.parametrize(
    ("benchmark", "told"),
    [
        ({"type": "custom"}, "benchmark: type custom needs command, which it does not say"),
        ({"type": "sa-bench", "isl": 1}, "type sa-bench needs command, osl, concurrencies"),
        ({"type": "router", **SIZES, "concurrencies": "4xx8"}, "benchmark.concurrencies: '4xx8' is no list of numbers"),
        ({"concurrencies": [0]}, "benchmark.concurrencies: [0] is no list of numbers above 0"),
        (
            {"concurrencies": 0},
            "benchmark.concurrencies: 0 is no list of numbers above 0; write for example [4, 8, 16]",
        ),
        ({"concurrencies": []}, "benchmark.concurrencies: [] is no list"),
        ({"concurrencies": [True]}, "benchmark.concurrencies: [True] is no list"),
        ({"concurrencies": "4,8"}, "benchmark.concurrencies: '4,8' is no list"),
        ({"concurrencies": 4}, "benchmark.concurrencies: 4 is a number; write [4]"),
        ({"concurrencies": [9999999]}, "is no list of numbers"),
        ({"req_rate": "fast"}, "benchmark.req_rate: 'fast' is no rate"),
        ({"req_rate": 0}, "benchmark.req_rate: 0 is no rate"),
        ({"type": "sa_bench"}, 'unknown benchmark "sa_bench"; did you mean "sa-bench"?'),
    ],
)
def test_wrong_keys_of_a_benchmark(benchmark: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_job(bench(benchmark), "job.yaml")
    assert told in str(error.value)


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=8))
def test_both_ways_to_write_concurrencies_are_the_same(numbers: list[int]) -> None:
    written = (numbers, "x".join(map(str, numbers)))
    found = [parse_job(bench({"concurrencies": value}), "job.yaml").benchmark for value in written]
    assert all(entry and concurrency_list(entry.concurrencies) == tuple(numbers) for entry in found)
