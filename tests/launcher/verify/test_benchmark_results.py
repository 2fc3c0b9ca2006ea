"""Result files of benchmarks, and their section in the report."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.report import WorkerReport
from launcher.jobfile.serving import BenchmarkSpec
from launcher.planner.benchmarks import BENCHMARKS
from launcher.report.benchmark import MOST_SHOWN, benchmark_section
from launcher.verify.benchmark_results import (
    FULL_READ_BYTES,
    MOST_COUNT,
    MOST_FILES,
    PART_BYTES,
    RESULT_FOLDERS,
    ROLE,
    NoBenchmarkResult,
    parse_benchmark_result,
    parse_partial_result,
    with_counted_requests,
)
from tests.launcher.conftest import Golden
from tests.support.builders import RunDir, rendered

FOLDER = "sa-bench_isl_1024_osl_128"
SIZES: dict[str, Any] = {"isl": 1024, "osl": 128, "concurrencies": "4x8"}


def sa_bench(concurrency: int = 8, **over: Any) -> dict[str, Any]:
    """A result as sa-bench and vLLM write it: totals at both ends, requests between them."""
    return {
        "date": "20251122-041341",
        "backend": "openai",
        "model_id": "r1",
        "num_prompts": 4 * concurrency,
        "request_rate": "inf",
        "max_concurrency": concurrency,
        "duration": 93.97,
        "completed": 4 * concurrency,
        "total_input_tokens": 655360,
        "total_output_tokens": 589824,
        "request_throughput": 6.81,
        "request_goodput": None,
        "output_throughput": 6278.02,
        "total_token_throughput": 13254.91,
        "ttfts": [0.1, 0.2],
        "generated_texts": ['she said "median_ttft_ms": 1, and', "]"],
        "mean_ttft_ms": 1924.07,
        "median_ttft_ms": 342.39,
        "p99_ttft_ms": 13652.77,
        "median_tpot_ms": 18.5,
        "p99_tpot_ms": 21.0,
        **over,
    }


AIPERF: dict[str, Any] = {
    "schema_version": "1.0",
    "input_config": {"loadgen": {"concurrency": 16}},
    "request_count": {"unit": "requests", "avg": 98.0},
    "error_request_count": {"unit": "requests", "avg": 2.0},
    "benchmark_duration": {"unit": "sec", "avg": 29.5},
    "request_throughput": {"unit": "requests/sec", "avg": 3.37},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1150.92},
    "time_to_first_token": {"unit": "ms", "avg": 150.5, "p50": 145.0, "p99": 200.0, "std": 25.0},
    "inter_token_latency": {"unit": "us", "avg": 18500.0, "p50": 18000.0},
    "request_latency": {"unit": "ms", "avg": 2500.0, "p50": 2400.0, "p99": 3100.0},
}


class Bench(RunDir):
    """A job whose only worker has run a benchmark."""

    def __init__(self, folder: Path, role: str = ROLE, log: str = "", **over: Any) -> None:
        super().__init__(folder, **{"workers": [{"role": role, "command": "true"}], **over})
        self.ended(0, log=log)

    def results(self) -> list[dict[str, Any]]:
        """The results in the report."""
        found: list[dict[str, Any]] = self.report()["benchmark"]
        return found


def test_a_result_is_reported_in_seconds_and_per_second(tmp_path: Path) -> None:
    assert Bench(tmp_path).write(f"{FOLDER}/c8.json", sa_bench()).results() == [
        {
            "file": f"{FOLDER}/c8.json",
            "concurrency": 8,
            "duration_s": 93.97,
            "requests_expected": 32,
            "requests": 32,
            "input_tokens": 655360,
            "output_tokens": 589824,
            "requests_per_second": 6.81,
            "output_tokens_per_second": 6278.02,
            "total_tokens_per_second": 13254.91,
            "ttft_mean_s": pytest.approx(1.92407),
            "ttft_median_s": 0.34239,
            "ttft_p99_s": pytest.approx(13.65277),
            "tpot_median_s": pytest.approx(0.0185),
            "tpot_p99_s": pytest.approx(0.021),
        }
    ]


def test_each_profile_of_aiperf_is_a_result(tmp_path: Path) -> None:
    job = Bench(tmp_path).write("artifacts/concurrency_16/profile_export_aiperf.json", AIPERF)
    job.write("artifacts/concurrency_16/inputs.json", {"data": []})
    job.write("artifacts/concurrency_4/m-chat/profile_export_genai_perf.json", {"request_throughput": {"avg": 1.5}})
    assert job.results() == [
        {
            "file": "artifacts/concurrency_4/m-chat/profile_export_genai_perf.json",
            "concurrency": 4,
            "requests_per_second": 1.5,
        },
        {
            "file": "artifacts/concurrency_16/profile_export_aiperf.json",
            "concurrency": 16,
            "duration_s": 29.5,
            "requests": 98,
            "requests_expected": 100,
            "requests_per_second": 3.37,
            "output_tokens_per_second": 1150.92,
            "ttft_mean_s": 0.1505,
            "ttft_median_s": 0.145,
            "ttft_p99_s": 0.2,
            "itl_mean_s": 0.0185,
            "itl_median_s": 0.018,
            "e2el_mean_s": 2.5,
            "e2el_median_s": 2.4,
            "e2el_p99_s": 3.1,
        },
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is empty"),
        (json.dumps(sa_bench())[:-20], "is not complete JSON: was it cut off?"),
        ("[" * 100_000, "is not complete JSON: was it cut off?"),
        ({"data": [1, 2]}, "contains no result of a known benchmark (sa-bench, vLLM, SGLang, AIPerf)"),
        ([sa_bench()], "contains no result of a known benchmark (sa-bench, vLLM, SGLang, AIPerf)"),
        ({"completed": True, "request_throughput": "fast"}, "contains no result of a known benchmark (sa-bench,"),
    ],
    ids=["empty", "cut", "deep", "unknown", "list", "words"],
)
def test_an_invalid_result_file_is_reported_after_the_valid_ones(content: object, problem: str, tmp_path: Path) -> None:
    job = Bench(tmp_path).write(f"{FOLDER}/a.json", content).write(f"{FOLDER}/b.json", sa_bench())
    good, bad = job.results()
    assert (good["file"], bad["file"]) == (f"{FOLDER}/b.json", f"{FOLDER}/a.json")
    assert bad["problem"].startswith(problem)
    text = rendered(job.report())
    assert f"\n- {FOLDER}/a.json: {problem}" in text
    assert "\n| 8 | 32 | 6.81 | " in text


def test_fifos_links_and_directories_do_not_block_the_report(tmp_path: Path) -> None:
    job = Bench(tmp_path).write(f"{FOLDER}/b.json", sa_bench())
    os.mkfifo(job.path / f"{FOLDER}/a.json")
    (job.path / f"{FOLDER}/c.json").symlink_to("nowhere")
    (job.path / f"{FOLDER}/d.json").symlink_to("..")
    (job.path / f"{FOLDER}/e.json").mkdir()
    (job.path / "artifacts/concurrency_3/x_aiperf.json").mkdir(parents=True)
    (job.path / "artifacts/concurrency_2").mkdir(parents=True)
    problems = {entry["file"]: entry["problem"] for entry in job.results()[1:]}
    assert problems == {
        f"{FOLDER}/a.json": "is not a regular file",
        f"{FOLDER}/c.json": "cannot be read: No such file or directory",
        f"{FOLDER}/d.json": "is not a regular file",
        f"{FOLDER}/e.json": "is not a regular file",
        "artifacts/concurrency_3/x_aiperf.json": "is not a regular file",
        "artifacts/concurrency_2": "contains no AIPerf summary (profile_export_aiperf.json): did this run end early?",
    }


def lines_of(*bodies: object) -> str:
    """JSON Lines as SGLang's bench_serving appends them."""
    return "".join(f"{json.dumps(body)}\n" for body in bodies)


def test_each_line_of_json_lines_is_a_result(tmp_path: Path) -> None:
    name = f"{FOLDER}/sglang_1122_1000_random.jsonl"
    large = sa_bench(16, ttfts=[0.125] * 300_000)
    job = Bench(tmp_path).write(name, lines_of(sa_bench(4), large, sa_bench(8, total_throughput=9.5)))
    assert (job.path / name).stat().st_size > FULL_READ_BYTES
    found = job.results()
    assert [(entry["file"], entry["concurrency"], entry["requests"]) for entry in found] == [
        *((name, 4, 16), (name, 8, 32), (name, 16, 64))
    ]
    assert found[1]["total_tokens_per_second"] == 9.5
    assert found[2] == {"file": name, **parse_benchmark_result(json.dumps(large).encode())}
    assert job.report()["items"] == 112


def test_the_end_of_a_long_line_is_read_at_every_part_boundary(tmp_path: Path) -> None:
    body = sa_bench(4, pad="")
    short = len(json.dumps(body)) - FULL_READ_BYTES
    for beyond in (10 - 2 * PART_BYTES, -1, 0, 1, 10, PART_BYTES - 1, PART_BYTES):
        line = json.dumps({"pad": "x" * (2 * PART_BYTES + beyond - short), **{k: body[k] for k in body if k != "pad"}})
        assert len(line) == FULL_READ_BYTES + 2 * PART_BYTES + beyond
        for end in ("", "\n", "\n{}\n"):
            job = Bench(tmp_path / f"{beyond}{len(end)}").write(f"{FOLDER}/a.jsonl", line + end)
            (found,) = job.results()
            assert (found["concurrency"], found["ttft_median_s"]) == (4, 0.34239)


@pytest.mark.parametrize(
    ("text", "count", "problem"),
    [
        ("", 0, "is empty"),
        ("\n\n", 0, "is empty"),
        (lines_of(sa_bench(4)) + json.dumps(sa_bench(8))[:-9], 1, "line 2 is not complete JSON: was it cut off?"),
        (lines_of(sa_bench(4), {"output_len": 3}), 1, None),
        (lines_of({"output_len": 3}), 0, "contains no result of a known benchmark (sa-bench, vLLM, SGLang, AIPerf)"),
        (
            lines_of(*(sa_bench(n + 1) for n in range(MOST_FILES + 1))),
            MOST_FILES,
            "has too many results; a report lists at",
        ),
    ],
    ids=["empty", "blank", "cut", "others", "unknown", "many"],
)
def test_problems_of_json_lines_are_reported(text: str, count: int, problem: str | None, tmp_path: Path) -> None:
    job = Bench(tmp_path).write(f"{FOLDER}/a.jsonl", text)
    found = job.results()
    assert sum("problem" not in entry for entry in found) == count
    problems = [entry["problem"] for entry in found if "problem" in entry]
    assert [text[: len(problem or "")] for text in problems] == ([problem] if problem else [])


def test_only_the_beginning_of_endless_lines_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.verify.benchmark_results.LINES_BYTES", FULL_READ_BYTES)
    job = Bench(tmp_path).write(f"{FOLDER}/a.jsonl", "x" * (4 * FULL_READ_BYTES))
    job.write(f"{FOLDER}/b.jsonl", lines_of(sa_bench(4)) + "\n" * (2 * FULL_READ_BYTES))
    good, endless, blank = job.results()
    assert (good["concurrency"], endless["problem"], blank["problem"]) == (
        4,
        *["is too large; only the first 1 MiB were read"] * 2,
    )


def test_the_file_name_gives_the_concurrency_when_the_content_does_not(tmp_path: Path) -> None:
    job = Bench(tmp_path).write(f"{FOLDER}/results_concurrency_4_gpus_8.json", sa_bench(max_concurrency=None))
    job.write(f"{FOLDER}/openai-infqps-concurrency16-m.json", sa_bench(max_concurrency=None))
    job.write(f"{FOLDER}/x_concurrency_9.json", sa_bench(8)).write(f"{FOLDER}/y_concurrency_2.json", "{")
    assert [entry["concurrency"] for entry in job.results()] == [4, 8, 16, 2]


def test_totals_are_read_from_both_ends_of_a_large_file(tmp_path: Path) -> None:
    whole = sa_bench(ttfts=[0.125] * 200_000)
    job = Bench(tmp_path).write(f"{FOLDER}/big.json", whole)
    job.write(f"{FOLDER}/cut.json", json.dumps(whole)[:-9]).write(f"{FOLDER}/whole.json", f"{json.dumps(whole)}\n")
    assert (job.path / f"{FOLDER}/big.json").stat().st_size > FULL_READ_BYTES
    big, again, cut = job.results()
    assert {**again, "file": big["file"]} == big
    assert big == {"file": f"{FOLDER}/big.json", **parse_benchmark_result(json.dumps(whole).encode())}
    assert cut == {"file": f"{FOLDER}/cut.json", "problem": "is not complete JSON: was it cut off?"}


def test_numbers_inside_texts_are_ignored_at_both_ends_of_a_large_file() -> None:
    end = json.dumps(sa_bench())[-PART_BYTES:].encode()
    assert parse_partial_result(b"{", end)["ttft_median_s"] == pytest.approx(0.34239)
    with pytest.raises(NoBenchmarkResult, match="at its beginning or its end"):
        parse_partial_result(b"{", rb'"generated_texts": ["\"completed\": 5, "]}')


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -(10**400), None, True, "7"])
def test_invalid_numbers_are_left_out(value: object) -> None:
    found = parse_benchmark_result(json.dumps(sa_bench(median_ttft_ms=value, total_output_tokens=value)).encode())
    assert not {"ttft_median_s", "output_tokens"} & found.keys()
    assert found["requests"] == 32


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"completed": 1e308}, "completed is 1e+308, more than any benchmark can reach (at most 9.01e+15)"),
        ({"num_prompts": MOST_COUNT + 2}, "num_prompts is 9007199254740994, more than"),
        ({"total_output_tokens": 10**400}, f"total_output_tokens is 1{'0' * 19}..., more than"),
        ({"duration": 1.1e15}, "duration is 1100000000000000.0, more than any benchmark can reach (at most 1e+15)"),
        ({"median_ttft_ms": 1e308}, "median_ttft_ms is 1e+308, more than"),
        ({"percentiles_itl_ms": [[99, 1e16]]}, "percentiles_itl_ms is 1e+16, more than"),
        ({"request_count": {"avg": 1e16}}, "request_count is 1e+16, more than"),
        ({"error_request_count": {"avg": 10**40}}, "error_request_count is 1000"),
        ({"request_latency": {"unit": "s", "p99": 1e300}}, "request_latency is 1e+300, more than"),
        ({"request_throughput": {"avg": 1e300}}, "request_throughput is 1e+300, more than"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossibly_large_number_is_a_problem_of_its_file(
    over: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    ((_, value),) = over.items()
    job = Bench(tmp_path).write(f"{FOLDER}/a.json", {**(AIPERF if isinstance(value, dict) else sa_bench()), **over})
    problems = [entry["problem"] for entry in job.write(f"{FOLDER}/b.json", sa_bench()).results()[1:]]
    assert [problem[: len(expected)] for problem in problems] == [expected]


def test_the_largest_possible_numbers_are_accepted() -> None:
    found = parse_benchmark_result(json.dumps(sa_bench(completed=MOST_COUNT, output_throughput=1e15)).encode())
    assert (found["requests"], found["output_tokens_per_second"]) == (MOST_COUNT, 1e15)
    failed = 2 * 10**15
    profile = {"request_count": {"avg": MOST_COUNT - failed}, "error_request_count": {"avg": failed}}
    result = parse_benchmark_result(json.dumps(profile).encode())
    assert result == {"requests": MOST_COUNT - failed, "requests_expected": MOST_COUNT}


@pytest.mark.parametrize("total", [{}, {"progress": {"total_items": 100}}], ids=["open", "given"])
def test_unbounded_numbers_do_not_prevent_the_report(total: dict[str, Any], tmp_path: Path) -> None:
    job = Bench(tmp_path, log=BAR, **total)
    for name in "ab":
        job.write(f"{FOLDER}/{name}.json", {"completed": 1e308, "num_prompts": 1e308})
    report = job.report()
    assert [entry["problem"].partition(",")[0] for entry in report["benchmark"]] == ["num_prompts is 1e+308"] * 2
    assert report["items"] == 32
    assert f"## Benchmark\n\n- {FOLDER}/a.json: num_prompts is 1e+308, more than " in rendered(report)


@pytest.mark.parametrize(
    "broken",
    ["launcher.report.verification.read_benchmark_results", "launcher.report.verification.with_counted_requests"],
)
def test_a_defect_in_reading_results_is_in_the_report(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Bench(tmp_path).write(f"{FOLDER}/b.json", sa_bench())
    monkeypatch.setattr(broken, Mock(side_effect=OverflowError("too large")))
    report = job.report()
    assert (report["state"], report["items"]) == ("COMPLETED", None)
    assert "\n- the results cannot be read: OverflowError: too large\n" in rendered(report)


def test_percentiles_of_older_versions_and_sglang_names_are_read() -> None:
    body = {"completed": 5, "total_input": 7, "percentiles_ttft_ms": [[50, 100.0], [99.0, 200.0], [12, 1], "x", [99]]}
    assert parse_benchmark_result(json.dumps(body).encode()) == {
        "requests": 5,
        "input_tokens": 7,
        "ttft_median_s": 0.1,
        "ttft_p99_s": 0.2,
    }
    assert parse_benchmark_result(b'{"completed": 5, "median_e2e_latency_ms": 900.0}')["e2el_median_s"] == 0.9


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_file_content_is_a_result_or_a_named_error(text: bytes) -> None:
    for parse in (parse_benchmark_result, lambda whole: parse_partial_result(whole, whole)):
        with suppress(NoBenchmarkResult):
            assert parse(text)


def test_the_number_of_results_is_bounded_in_the_report_and_its_text(tmp_path: Path) -> None:
    job = Bench(tmp_path)
    for concurrency in range(1, MOST_FILES + 4):
        job.write(f"{FOLDER}/c{concurrency:03}.json", sa_bench(concurrency))
    results = job.results()
    assert len(results) == MOST_FILES + 1
    assert results[-1]["problem"] == f"3 more files were not read; a report lists at most {MOST_FILES} results"
    lines = list(benchmark_section(results))
    assert len([line for line in lines if line.startswith("| ")]) == MOST_SHOWN + 1
    assert f"and {MOST_FILES - MOST_SHOWN} more, in report.json" in lines
    assert lines[-1] == f"- 3 more files were not read; a report lists at most {MOST_FILES} results"


def test_results_are_found_among_the_logs_of_many_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.verify.benchmark_results.MOST_NAMES", 3)
    job = Bench(tmp_path).write(f"{FOLDER}/a.json", sa_bench())
    assert len(list(job.path.iterdir())) > 5
    assert [entry["file"] for entry in job.results()] == [f"{FOLDER}/a.json"]


def test_a_job_without_a_benchmark_has_no_benchmark_section(tmp_path: Path) -> None:
    job = Bench(tmp_path, role="worker").write(f"{FOLDER}/a.json", sa_bench())
    assert job.report()["benchmark"] is None
    assert "## Benchmark" not in rendered(job.report())
    assert Bench(tmp_path / "b").write("out/a.json", sa_bench()).results() == []


def test_result_folders_match_those_of_every_benchmark() -> None:
    specs = {"sa-bench": {"command": "b", **SIZES}, "router": SIZES, "custom": {"command": "b"}}
    folders = [
        kind.result_dir(BenchmarkSpec.model_validate({"type": name, **specs.get(name, {})}))
        for name, kind in BENCHMARKS.items()
    ]
    assert sum(folder is not None for folder in folders) == 2
    assert all(folder is None or RESULT_FOLDERS.fullmatch(folder) for folder in folders)


BAR = "\r100%|##########| 32/32 [00:05<00:00,  2.00it/s]\n"


def test_the_items_of_the_job_are_the_requests_of_all_runs(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"progress": {"pack": "sa-bench"}}
    job = Bench(tmp_path, log=BAR, **spec)
    assert [job.report()[key] for key in ("unit", "items", "items_expected")] == ["requests", 32, 32]
    job.write(f"{FOLDER}/c4.json", sa_bench(4)).write(f"{FOLDER}/c8.json", sa_bench(8, completed=30))
    report = job.report()
    keys = ("unit", "items", "items_expected", "items_processed", "throughput_items_per_second")
    assert [report[key] for key in keys] == ["requests", 46, 48, 46, pytest.approx(46 / 200)]
    assert "\n- requests: 46 of 48, 0.23 requests/s over the whole job\n" in rendered(report)
    assert "\n| 8 | 30 of 32 | 2 (6.25%) | 6.81 |" in rendered(report)


MISSING: dict[str, Any] = {"file": "", "missing": [8], "problem": "no result for concurrency 8"}


@pytest.mark.parametrize(
    ("reported", "results", "position"),
    [
        ({"pattern": "progress_file", "items": 23, "items_expected": 72}, [], (23, 72)),
        ({"pattern": "progress_file", "items": 40, "items_expected": 72}, [{"requests": 24}], (40, 72)),
        ({"pattern": "progress_file", "items": 5, "items_expected": 24}, [{"requests": 24}], (24, None)),
        ({"pattern": "progress_file", "items": 23, "items_expected": None}, [{"requests": 24}], (24, None)),
        ({"pattern": "bar", "items": 16, "items_expected": 48}, [{"requests": 24}], (24, None)),
        ({"pattern": "bar", "items": 16, "items_expected": 24}, [], (16, None)),
    ],
)
def test_an_interrupted_benchmark_keeps_the_total_that_it_reported(
    reported: dict[str, Any], results: list[dict[str, Any]], position: tuple[int, int | None]
) -> None:
    entry = {"role": ROLE, "rank": 0, "unit": "requests", "items_processed": reported["items"], **reported}
    (counted,) = with_counted_requests([WorkerReport.from_json(entry)], [*results, MISSING])
    assert (counted.items, counted.items_expected) == position


def test_the_verification_names_the_source_of_the_request_count(tmp_path: Path) -> None:
    job = Bench(tmp_path, log=BAR.replace("32/32", "31/32").replace("100%", " 97%"), progress={"pack": "sa-bench"})
    logged = job.report()
    assert "; the logs show 31 of 32 requests" in detail_of_items(logged)
    report = job.write(f"{FOLDER}/c8.json", sa_bench(8, completed=30)).report()
    assert "; the result files show 30 of 32 requests" in detail_of_items(report)
    assert detail_of_items(job.verify_again(report)) == detail_of_items(report)
    counted = Bench(tmp_path / "b", progress={"total_items": 32}).write(f"{FOLDER}/c8.json", sa_bench()).report()
    assert detail_of_items(counted) == "requests are counted, not items"


def detail_of_items(report: dict[str, Any]) -> str:
    """Detail of the check of items."""
    (detail,) = (check["detail"] for check in report["verification"]["checks"] if check["name"] == "items")
    return str(detail)


def test_a_job_that_counts_another_unit_keeps_its_count(tmp_path: Path) -> None:
    job = Bench(tmp_path, log="step 300/300\n").write(f"{FOLDER}/c4.json", sa_bench(4))
    assert [job.report()[key] for key in ("unit", "items")] == ["steps", 300]


def test_a_result_without_requests_does_not_change_the_count(tmp_path: Path) -> None:
    job = Bench(tmp_path, log=BAR, progress={"pack": "sa-bench"}).write(f"{FOLDER}/c4.json", sa_bench(4))
    job.write("artifacts/concurrency_4/profile_export_aiperf.json", {"request_throughput": {"avg": 1.5}})
    assert job.report()["items"] == 32


def test_the_benchmark_section_matches_the_golden_page(golden: Golden) -> None:
    results: list[dict[str, object]] = [
        {"file": "a", "concurrency": 4, **parse_benchmark_result(json.dumps(sa_bench(4)).encode())},
        {"file": "b", **parse_benchmark_result(json.dumps(sa_bench(512, completed=2000, request_rate=2.5)).encode())},
        {"file": "c", "concurrency": 1024, **parse_benchmark_result(json.dumps(AIPERF).encode())},
        {"file": "d | x", "problem": "is empty"},
    ]
    golden("launcher/benchmark.md", "\n".join(benchmark_section(results)) + "\n")
