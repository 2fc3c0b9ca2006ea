"""The check that a benchmark measured what was planned, and its place in the report."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.report import Report
from launcher.jobfile.monitoring import PatternsSpec
from launcher.report.report import write_report
from launcher.verify.benchmark import (
    MOST_NAMED,
    NO_REQUEST,
    NO_TOKENS,
    PlannedBenchmark,
    benchmark_check,
    missing_concurrencies,
    read_planned_benchmark,
)
from launcher.verify.verify import CHECKPOINT, DEFAULT_PATTERNS, OUTPUT
from tests.launcher.verify.test_benchmark_results import AIPERF, sa_bench
from tests.support.builders import KILLED, START, RunDir, rendered
from tests.support.launcher import read_json

CONCURRENCIES = (1, 4, 16)
SA_BENCH = {"type": "sa-bench", "command": "b", "isl": 128, "osl": 8, "concurrencies": "1x4x16"}
ROUTER = {"type": "router", "isl": 128, "osl": 8, "concurrencies": [4, 16]}
CUSTOM = {"type": "custom", "command": "b"}
FOLDER = "sa-bench_isl_128_osl_8"
PLANNED = PlannedBenchmark(CONCURRENCIES, has_tokens=True)
ANY = PlannedBenchmark((), has_tokens=False)
ZERO: dict[str, Any] = {"completed": 0, "total_output_tokens": 0, "request_throughput": 0.0, "output_throughput": 0.0}


class Serving(RunDir):
    """A finished serving job with two workers, a front end and a benchmark."""

    def __init__(
        self, folder: Path, benchmark: dict[str, Any], *, agg: dict[str, Any] | None = None, **over: Any
    ) -> None:
        workers = [{"role": "agg", "count": 2, "gpus": 0, "command": "w --port {http_port}", **(agg or {})}]
        frontend = {"type": "custom", "command": "f --port {http_port}"}
        model = {"path": "hf:a/M", "name": "toy"}
        super().__init__(folder, workers=workers, model=model, frontend=frontend, benchmark=benchmark, **over)
        for rank in range(4):
            self.ended(rank)

    def write_results(self, *concurrencies: int, **over: Any) -> "Serving":
        """Write results of sa-bench."""
        for each in concurrencies:
            self.write(f"{FOLDER}/results_concurrency_{each}_gpus_4.json", json.dumps(sa_bench(each, **over)))
        return self

    def check(self) -> tuple[str, bool | None, str]:
        """State of the job, then result and detail of its benchmark check."""
        report = self.report()
        (found,) = [check for check in report["verification"]["checks"] if check["name"] == "benchmark"]
        return report["state"], found["passed"], found["detail"]


def result(concurrency: int | None = 4, **over: Any) -> dict[str, Any]:
    """A result as in a report."""
    given = {} if concurrency is None else {"concurrency": concurrency}
    body = {"file": f"c{concurrency}.json", **given, "requests": 5, "output_tokens": 40, **over}
    return {key: value for key, value in body.items() if value is not None}


def test_the_plan_has_the_concurrencies_of_the_benchmark(tmp_path: Path) -> None:
    assert read_planned_benchmark(Serving(tmp_path / "a", SA_BENCH).path) == PLANNED
    assert read_planned_benchmark(Serving(tmp_path / "b", ROUTER).path) == PlannedBenchmark((4, 16), has_tokens=True)
    assert read_planned_benchmark(Serving(tmp_path / "c", {**CUSTOM, "concurrencies": "1x4"}).path) == ANY
    assert read_planned_benchmark(RunDir(tmp_path / "d").path) is None
    assert read_planned_benchmark(tmp_path) is None


def test_a_complete_benchmark_is_verified_without_further_checks(tmp_path: Path) -> None:
    report = Serving(tmp_path, SA_BENCH).write_results(1, 4, 16).report()
    assert (report["state"], report["exit_status"], report["verification"]["verified"]) == ("COMPLETED", 0, True)
    text = rendered(report)
    assert text.startswith("# Job 4459 job: COMPLETED and verified\n")
    detail = "results for all 3 concurrencies: 84 requests, 1769472 output tokens"
    lines = ["## Verification", "", "- workers: ok: 4 of 4 workers completed", f"- benchmark: ok: {detail}", "", "## W"]
    assert "\n".join(lines) in text


@pytest.mark.parametrize(
    ("left", "over", "detail"),
    [
        ((), {}, "no result for concurrency 1, 4, 16"),
        ((1,), {}, "no result for concurrency 4, 16"),
        ((1, 4, 16), ZERO, f"{NO_REQUEST} at concurrency 1, 4, 16"),
        ((1, 4, 16), {"total_output_tokens": 0}, f"{NO_TOKENS} at concurrency 1, 4, 16"),
        ((1, 4, 16), {"completed": None, "request_throughput": 0.0}, f"{NO_REQUEST} at concurrency 1, 4, 16"),
        ((1, 4), ZERO, f"no result for concurrency 16; {NO_REQUEST} at concurrency 1, 4"),
    ],
)
def test_a_benchmark_with_missing_results_makes_the_job_incomplete(
    left: tuple[int, ...], over: dict[str, Any], detail: str, tmp_path: Path
) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(*left, **over)
    assert job.check() == ("INCOMPLETE", False, detail)
    report = job.report()
    assert report["exit_status"] == 8
    assert f"\n- benchmark: FAILED: {detail}\n" in rendered(report)


def test_a_truncated_result_is_a_missing_result(tmp_path: Path) -> None:
    cut = f"{FOLDER}/results_concurrency_4_gpus_4.json"
    job = Serving(tmp_path, SA_BENCH).write_results(1, 16).write(cut, json.dumps(sa_bench(4))[:-9])
    assert job.check() == ("INCOMPLETE", False, "no result for concurrency 4")
    assert f"\n    - {cut}: is not complete JSON: was it cut off?\n" in rendered(job.report())
    entry = {"file": cut, "concurrency": 4, "problem": "is not complete JSON: was it cut off?"}
    assert job.report()["benchmark"][-2:] == [
        *(entry, {"file": "", "missing": [4], "problem": "no result for concurrency 4"})
    ]


def test_aiperf_needs_a_profile_for_each_concurrency(tmp_path: Path) -> None:
    job = Serving(tmp_path, ROUTER)
    job.write("artifacts/concurrency_4/profile_export_aiperf.json", json.dumps(AIPERF))
    few = "fewer than 99% of the requests completed at concurrency 4 (98 of 100)"
    assert job.check() == ("INCOMPLETE", False, f"no result for concurrency 16; {few}")
    job.write("artifacts/concurrency_16/profile_export_aiperf.json", json.dumps(AIPERF))
    assert job.check() == ("INCOMPLETE", False, f"{few}, 16 (98 of 100)")


def test_a_custom_benchmark_is_checked_by_its_existing_results_only(tmp_path: Path) -> None:
    job = Serving(tmp_path, CUSTOM)
    report = job.report()
    assert [check["name"] for check in report["verification"]["checks"]] == [
        "workers",
        "items",
        "outputs",
        "checkpoint",
    ]
    assert "COMPLETED, output not verified" in rendered(report)
    job.write("artifacts/settings.json", '{"isl": 4}')
    assert job.report()["verification"] == report["verification"]
    job.write_results(4)
    assert job.check() == ("COMPLETED", True, "1 result: 16 requests, 589824 output tokens")
    job.write("artifacts/b.json", "{")
    assert job.check() == ("INCOMPLETE", False, "damaged results")
    assert "\n    - artifacts/b.json: is not complete JSON: was it cut off?\n" in rendered(job.report())


def test_other_files_next_to_the_results_are_not_a_failure(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(1, 4, 16).write(f"{FOLDER}/args.json", '{"isl": 4}')
    assert job.check()[:2] == ("COMPLETED", True)
    assert job.write(f"{FOLDER}/warmup.json", "{").check()[:2] == ("COMPLETED", True)


@pytest.mark.parametrize(
    ("results", "passed", "detail"),
    [
        # a good result of either the warm-up or the real run is enough
        ([result(requests=0), result()], True, "1 concurrency: 5 of 10"),
        ([result(requests=0, requests_expected=5), result()], True, "1 concurrency: 5 of 10"),
        ([result(), result(requests=0)], True, "1 concurrency: 5 of 10"),
        ([result(), result(64, requests=0)], True, "1 concurrency"),
        ([result(None)], True, "1 concurrency"),
        ([result(None, requests=0)], False, f"{NO_REQUEST} in cNone.json"),
        ([result(requests=None, output_tokens=None, requests_per_second=2.0)], True, "1 concurrency"),
        ([result(output_tokens=None, output_tokens_per_second=0.0)], False, f"{NO_TOKENS} at concurrency 4"),
    ],
)
def test_one_good_result_of_each_concurrency_is_enough(
    results: list[dict[str, Any]], passed: bool, detail: str
) -> None:
    for entry in results:
        entry.setdefault("requests_expected", 5)
    check = benchmark_check(PlannedBenchmark((4,), has_tokens=True), results, 0.99)
    assert check is not None
    assert check.passed is passed
    assert detail in check.detail


@pytest.mark.parametrize(
    ("done", "share", "passed", "detail"),
    [
        (100, 0.99, True, "1 result: 100 requests, 589824 output tokens"),
        (99, 0.99, True, "1 result: 99 of 100 requests (1 failed), 589824 output tokens"),
        (98, 0.99, False, "fewer than 99% of the requests completed at concurrency 4 (98 of 100)"),
        (98, 0.98, True, "1 result: 98 of 100 requests (2 failed), 589824 output tokens"),
        (99, 1.0, False, "fewer than 100% of the requests completed at concurrency 4 (99 of 100)"),
        (0, 0.01, False, f"{NO_REQUEST} at concurrency 4"),
    ],
)
def test_the_required_share_applies_to_requests(
    done: int, share: float, passed: bool, detail: str, tmp_path: Path
) -> None:
    job = Serving(tmp_path, CUSTOM, verify={"complete_share": share}).write_results(4, num_prompts=100, completed=done)
    assert job.check() == ("COMPLETED" if passed else "INCOMPLETE", passed, detail)
    text = rendered(job.report())
    failed = 100 - done
    warning = f"\n\n**Warning**: {failed} of 100 requests failed; rates, tokens and latencies include only "
    assert (warning in text, f"| 4 | {done} of 100 | {failed} ({failed}%) |" in text) == (failed > 0, failed > 0)
    assert (" | failed | " in text) is (failed > 0)


def test_each_concurrency_needs_one_result_with_the_required_share(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(1, 16)
    partial = sa_bench(4, num_prompts=8, completed=7)
    job.write(f"{FOLDER}/results_concurrency_4_gpus_4.json", json.dumps(partial))
    few = "fewer than 99% of the requests completed at concurrency 4 (7 of 8)"
    assert job.check() == ("INCOMPLETE", False, few)
    job.write(f"{FOLDER}/again_concurrency_4.json", json.dumps(partial | {"completed": 8}))
    assert job.check()[:2] == ("COMPLETED", True)


@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0.001, 1.0))
@example(71, 72, 0.99)
@example(72, 72, 1.0)
def test_a_result_passes_when_its_share_is_reached(done: int, asked: int, share: float) -> None:
    check = benchmark_check(ANY, [result(requests=done, requests_expected=asked)], share)
    assert check is not None
    if abs(done - share * asked) > 1e-3:
        assert check.passed is (done > 0 and done > share * asked)


def test_the_log_is_not_checked_for_tokens_when_results_report_them(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(1, 4, 16)
    (job.path / "benchmark.out").write_text("Successful requests: 64\nTotal generated tokens: 99\n")
    assert [check["name"] for check in job.report()["verification"]["checks"]] == ["workers", "benchmark"]
    job.write_results(1, 4, 16, total_output_tokens=None, output_throughput=None)
    checks = job.report()["verification"]["checks"]
    assert [(check["name"], check["detail"]) for check in checks[1:]] == [
        ("benchmark", "results for all 3 concurrencies: 84 requests"),
        ("tokens", "1 result with tokens"),
    ]


def test_no_tokens_are_required_without_generated_text() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [({}, True), ({"ttft_median_s": 0.1}, False)]
    for over, passed in cases:
        check = benchmark_check(ANY, [result(output_tokens=0, **over)], 0.99)
        assert check is not None
        assert check.passed is passed


def test_embeddings_have_no_tokens(tmp_path: Path) -> None:
    body = {"backend": "openai-embeddings", "total_output_tokens": 0, "output_throughput": 0.0}
    assert Serving(tmp_path, SA_BENCH).write_results(1, 4, 16, **body).check()[:2] == ("COMPLETED", True)
    large = {**body, "errors": [""] * 300_000}
    assert Serving(tmp_path / "b", SA_BENCH).write_results(1, 4, 16, **large).check()[:2] == ("COMPLETED", True)


def test_missing_results_are_undecided_when_some_files_were_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(1, 4, 16)
    with monkeypatch.context() as patch:
        patch.setattr("launcher.verify.benchmark_results.MOST_FILES", 2)
        state, passed, detail = job.check()
        assert (state, passed) == ("COMPLETED", None)
        assert detail == "no result for concurrency 4; 1 more files were not read; a report lists at most 2 results"
    monkeypatch.setattr(
        "launcher.report.verification.read_benchmark_results", Mock(side_effect=OverflowError("too large"))
    )
    state, passed, detail = job.check()
    assert (state, passed) == ("COMPLETED", None)
    assert detail.endswith("the results cannot be read: OverflowError: too large")


def test_only_some_of_many_missing_concurrencies_are_named() -> None:
    planned = PlannedBenchmark(tuple(range(1, MOST_NAMED + 6)), has_tokens=True)
    check = benchmark_check(planned, [], 0.99)
    assert check is not None
    assert check.detail.endswith(f", {MOST_NAMED} and 5 more")


def test_a_result_without_concurrency_may_belong_to_any() -> None:
    assert missing_concurrencies(PLANNED, [result(1), result(None)]) == [4, 16]
    assert missing_concurrencies(PLANNED, [result(1), result(None), result(None)]) == []
    assert missing_concurrencies(None, []) == []


def test_a_failed_job_names_missing_concurrencies_and_has_no_total(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(4).ended(0, code=3, end=50)
    report = job.ended(3, **KILLED).stop("terminated_peer", "agg_w0 rank 0 on cn01 ended by app_error", at=51).report()
    assert report["state"] == "FAILED"
    assert [report[key] for key in ("items", "items_expected")] == [16, None]
    text = rendered(report)
    assert "|\n\n- no result for concurrency 1, 16\n" in text
    assert "| 16 | 0 |\n" in text
    assert "\n- requests: 16, " in text


def test_without_results_the_total_is_not_taken_from_the_log_of_one_run(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH)
    (job.path / "benchmark.out").write_text("\r100%|##########| 32/32 [00:05<00:00,  2.00it/s]\nSA-Bench Config: x\n")
    report = job.report()
    assert [report[key] for key in ("unit", "items", "items_expected")] == ["requests", 32, None]


def test_a_benchmark_that_never_started_has_no_missing_results(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).ended(0, code=3, end=50)
    for path in job.path.glob("workers/benchmark_*"):
        path.unlink()
    assert job.stop("terminated_peer", "agg_w0 rank 0 on cn01 ended by app_error", at=51).report()["benchmark"] == []


def test_verifying_again_reads_the_results_again(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(1, 4, 16)
    report = job.report()
    write_report(job.path, Report.from_json(report))
    assert job.verify_again(report)["verification"]["differs"] == []
    (job.path / FOLDER / "results_concurrency_4_gpus_4.json").unlink()
    again = job.verify_again(report)
    assert (again["state"], again["verification"]["differs"]) == ("INCOMPLETE", ["benchmark"])
    assert "\n- no result for concurrency 4\n" in rendered(again)
    (job.path / "plan.json").unlink()
    assert job.verify_again(again)["state"] == "INCOMPLETE"


def test_a_cancelled_job_needs_no_results(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(4)
    for rank in range(4):
        job.ended(rank, code=None, signal=15)
    report = job.stop("cancelled", "the job was cancelled").report()
    assert report["state"] == "CANCELLED"
    again = job.verify_again(report)
    (check,) = [check for check in again["verification"]["checks"] if check["name"] == "benchmark"]
    assert (again["state"], check["passed"]) == ("CANCELLED", None)
    assert check["detail"].endswith("; not required, because the job ended as CANCELLED")


def test_output_requested_in_the_job_file_is_checked(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH).write_results(1, 4, 16)
    groups = read_json(job.path / "manifest.json")["groups"]
    job.edit("manifest.json", groups=[{**group, "pattern": f"my_{group['pattern']}"} for group in groups])
    names = [check["name"] for check in job.report()["verification"]["checks"]]
    assert names == ["workers", "benchmark", "outputs", "checkpoint"]


def test_default_patterns_are_those_of_a_job_file() -> None:
    assert {OUTPUT: PatternsSpec().output, CHECKPOINT: PatternsSpec().checkpoints} == DEFAULT_PATTERNS


def test_a_failed_worker_that_is_not_critical_is_reported_as_tolerated(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH, agg={"critical": False}).write_results(1, 4, 16).ended(1, code=3, end=40)
    report = job.report()
    assert report["state"] == "COMPLETED"
    (end,) = report["tolerated"]
    facts = {key: end[key] for key in ("worker", "rank", "node", "reason", "code", "time")}
    assert facts == {
        "worker": "agg_w1",
        "rank": 1,
        "node": "cn01",
        "reason": "app_error",
        "code": 3,
        "time": START + 40,
    }
    text = rendered(report)
    assert "\n- tolerated: agg_w1 (rank 1) on cn01 ended by app_error at " in text
    assert "\n- workers: ok: 2 of 2 critical workers completed\n" in text


def test_a_failed_critical_worker_is_the_cause_and_not_tolerated(tmp_path: Path) -> None:
    report = Serving(tmp_path, SA_BENCH).ended(1, code=3, end=40).report()
    assert (report["state"], report["cause"]["worker"], report["tolerated"]) == ("FAILED", "agg_w1", [])
    assert "tolerated" not in rendered(report)
    alone = RunDir(tmp_path / "b", workers=[{"command": "x", "critical": False}]).ended(0, code=3).report()
    assert (alone["cause"]["worker"], alone["tolerated"]) == ("worker_w0", [])


def test_only_some_of_many_tolerated_failures_are_named(tmp_path: Path) -> None:
    ends = [
        {"worker": f"w{rank}", "rank": rank, "node": "n", "reason": "app_error", "time": None} for rank in range(11)
    ]
    report = Serving(tmp_path / "b", SA_BENCH).report()
    text = rendered({**report, "tolerated": [{**end, "evidence": ["x"]} for end in ends]})
    assert text.count("\n- tolerated: ") == 9
    assert "\n- tolerated: 3 more, in report.json\n" in text


def test_final_values_are_not_missing_before_the_end(tmp_path: Path) -> None:
    job = Serving(tmp_path, SA_BENCH)
    running = job.report(ended=False)
    assert running["monitoring"]["nodes_without"] == []
    assert "no final values" not in rendered(running)
    assert "\n- no final values from: cn01\n" in rendered(job.report())
