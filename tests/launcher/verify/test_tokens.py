"""A benchmark without output tokens is detected from its results and its log."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.verify.tokens import TokenCounts, count_tokens, count_tokens_in_log, token_check_text
from tests.launcher.verify.verify_job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


RESULT: dict[str, Any] = {"num_prompts": 640, "completed": 640, "total_output_tokens": 589824, "duration": 93.97}
WITHOUT = {**RESULT, "total_output_tokens": 0, "mean_ttft_ms": 0.0}


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (RESULT, None),
        (WITHOUT, "total_output_tokens is 0"),
        ({**RESULT, "total_output_tokens": 0, "generated_texts": ["", ""]}, "total_output_tokens is 0"),
        ({**RESULT, "total_output_tokens": 0, "completed": 0}, "total_output_tokens is 0"),
        ({"num_prompts": 640, "completed": 0}, "completed is 0"),
        ({"request_count": {"avg": 0.0}, "output_token_throughput": {"avg": 0.0}}, "output_token_throughput is 0"),
        ({**WITHOUT, "duration": float("inf")}, "total_output_tokens is 0"),
        ({**WITHOUT, "generated_texts": ["x" * 3_000_000]}, "total_output_tokens is 0"),
    ],
)
def test_a_benchmark_without_tokens_is_a_failure(result: object, problem: str | None, tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1, verify={"records_per_item": None})
    job.write("output_0.json", json.dumps(result))
    passed, detail = job.result("tokens")
    assert passed is (problem is None)
    assert detail == (
        "1 result with tokens" if not problem else f"the benchmark produced no tokens: output_0.json: {problem}"
    )
    passed, detail = job.write("output_1.json", json.dumps(RESULT)).result("tokens")
    assert passed is True, "a run to warm up has none"
    assert problem is None or detail == f"1 of 2 results with tokens; output_0.json: {problem}"


@pytest.mark.parametrize(
    "result",
    [
        {**RESULT, "total_output_tokens": 0},
        {**WITHOUT, "backend": "sglang-embedding"},
        {**WITHOUT, "endpoint": "/v1/rerank", "padding": "x" * 3_000_000},
        {"request_count": {"avg": 64.0}, "output_sequence_length": {"avg": 0.0}},
    ],
)
def test_a_benchmark_of_embeddings_has_no_tokens(result: object, tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1, verify={"records_per_item": None})
    passed, detail = job.write("output_0.json", json.dumps(result)).result("tokens")
    assert (passed, detail) == (None, "1 result, none with tokens; results of their kinds may have none")


def test_a_warm_up_line_may_have_no_tokens(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    lines = ({**WITHOUT, "completed": 0}, {**RESULT, "total_output_tokens": 5000})
    job.write("output_0.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    assert job.result("tokens")[0] is True


def test_requests_fail_only_when_none_of_them_has_tokens(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    zeros = [{"id": number, "text": "", "output_tokens": 0} for number in range(3)]
    job.write("output_0.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in zeros))
    assert job.result("tokens") == (False, "the benchmark produced no tokens: 0 in each of 3 requests")
    job.write("output_1.json", json.dumps([{"output_tokens": 5}]))
    assert job.result("tokens") == (True, "1 of 4 requests with tokens")


def test_requests_of_embeddings_have_no_tokens(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    line = json.dumps({"prompt_tokens": 12, "completion_tokens": 0, "embedding": [0.1]})
    passed, detail = job.write("output_0.jsonl", f"{line}\n" * 3).result("tokens")
    assert (passed, detail) == (None, "3 requests, none with tokens; results of their kinds may have none")


@pytest.mark.parametrize(
    "body",
    [{"completed": 0}, {"completed": False, "num_prompts": 1}, {"text": '"total_output_tokens": 0'}, [1], "x", {}],
)
def test_unrelated_json_is_not_a_benchmark_result(body: object) -> None:
    assert count_tokens(json.dumps(body).encode(), is_json_lines=False) == TokenCounts()


def test_unread_requests_may_have_tokens() -> None:
    line = b'{"output_tokens": 0}\n'
    assert count_tokens(line * 3, is_json_lines=True).requests_with_tokens == 0
    assert count_tokens(line * 3 + b'{"outp', is_json_lines=True, is_complete=False).requests_with_tokens == 1
    part = count_tokens(line * 3, is_json_lines=True, is_complete=False)
    assert (part.requests_with_tokens, token_check_text(part)) == (1, "at least 1 of 3 requests")


@pytest.mark.parametrize(
    ("log", "passed", "expected"),
    [
        (
            "Successful requests:                     640\nTotal generated tokens:   589,824\n",
            True,
            "at least 1 result with",
        ),
        (
            "Successful requests:                     0\n",
            False,
            "produced no tokens: benchmark.out: Successful requests: 0",
        ),
        ("Total generated tokens:                  0", False, "produced no tokens: benchmark.out: Total generated"),
        (
            "Total generated tokens:                  0\nTotal generated tokens:  10\n",
            True,
            "at least 1 of 2 results with",
        ),
        (
            "Successful requests: 0\nSuccessful requests: 9\nTotal generated tokens: 50\n",
            True,
            "at least 1 of 2 results with",
        ),
        ("Successful requests: 9\nTotal generated tokens: 0\n", None, "results of their kinds may have none"),
        ("Successful requests: 9\nTotal generated tokens: 0\nMean TTFT (ms): 0.00\n", False, "tokens: 0"),
        (
            "Backend: sglang-embedding\nSuccessful requests: 9\nTotal generated tokens: 0\nMean TTFT (ms): 0\n",
            None,
            "results of their kinds may have none",
        ),
    ],
)
def test_a_benchmark_that_prints_no_tokens_is_a_failure(log: str, passed: bool | None, expected: str, job: Job) -> None:
    job.write("benchmark.out", "warm-up\n" * 20_000 + log)
    job.logs = (job.path / "none.out", job.path / "benchmark.out")
    check = job.checks()["tokens"]
    assert check.passed is passed
    assert expected in check.detail


def test_results_in_output_files_and_in_the_log_count_together(job: Job) -> None:
    job.write("output_0.json", json.dumps(RESULT)).write("a.log", "Successful requests: 0\n")
    job.logs = (job.path / "a.log",)
    assert job.result("tokens") == (True, "1 of 2 results with tokens; a.log: Successful requests: 0")


def test_all_results_of_a_log_count() -> None:
    blocks = "".join(f"Successful requests: {done}\nTotal generated tokens: {10 * done}\n" for done in (8, 0, 16))
    assert count_tokens_in_log(blocks.encode()) == TokenCounts(results=3, results_with_tokens=2)
    assert count_tokens_in_log(blocks.encode(), is_complete=False).may_have_more


@given(
    st.builds(TokenCounts, *[st.integers(0, 9)] * 3, st.none(), *[st.integers(0, 9)] * 3, st.booleans()).filter(
        lambda counts: counts.results or counts.requests
    )
)
@example(TokenCounts(results=2, results_with_tokens=3, may_have_more=True))
def test_the_text_never_counts_more_with_tokens_than_exist(counts: TokenCounts) -> None:
    text = token_check_text(counts)
    assert text.startswith("at least ") is counts.may_have_more
    parts = [[int(number) for number in re.findall(r"\d+", part)] for part in text.split(" and ")]
    assert [numbers[-1] for numbers in parts] == [count for count in (counts.results, counts.requests) if count]
    assert all(first < last for first, *_, last in (numbers for numbers in parts if len(numbers) == 2))


@pytest.mark.parametrize("text", [b"", b"Successful requests: many", b"Total generated tokens per second: 0"])
def test_a_log_may_contain_no_result(text: bytes) -> None:
    assert count_tokens_in_log(text) == TokenCounts()


def test_a_job_without_a_benchmark_has_no_token_check(job: Job) -> None:
    job.logs = (job.path / "none.out",)
    assert "tokens" not in job.lines(0, 50).lines(1, 50).checks()
