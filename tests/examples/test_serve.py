"""The serving example: the whole job and its programs, as real processes."""

import http.client
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.jobfile.jobfile import parse_job
from tests.launcher.planner.backends.serving_jobs import ask, running
from tests.support.launcher import clean_environment, gpujob, plan_of, poll, processes_with, read_json
from tests.support.ports import free_port

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "serve"
TOY = FOLDER / "toy.yaml"
FAST = ("--load-seconds", "0.3", "--prefill-rate", "20000", "--step-ms", "2", "--step-ms-each", "0")
HEAD = (
    "| concurrency | requests | requests/s | output tokens/s | total tokens/s | TTFT median (ms) | TTFT p99 (ms) "
    "| TPOT median (ms) | TPOT p99 (ms) | E2EL median (ms) | E2EL p99 (ms) |\n"
)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_bench", FOLDER / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_bench"] = module  # dataclasses looks up the module
    spec.loader.exec_module(module)
    return module


def program(name: str, *options: object) -> list[str]:
    """The arguments that start a program of the example."""
    return [sys.executable, str(FOLDER / f"{name}.py"), *map(str, options)]


@contextmanager
def toy_engine(log: Path, *options: object) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a toy engine; yield its URL and process when it is ready."""
    port = free_port()
    with running(program("toy_engine", "--port", port, *FAST, *options), log) as process:
        url = f"http://127.0.0.1:{port}"
        poll(lambda: ask(f"{url}/health")[0] == 200, f"the engine at {url}", 60)
        yield url, process


@contextmanager
def toy_router(log: Path, **urls: str) -> Iterator[int]:
    """Run a toy router before these workers; yield its port."""
    port = free_port()
    with running(program("toy_router", "--port", port), log, **urls):
        poll(lambda: ask(f"http://127.0.0.1:{port}/health")[0] == 200, "the router", 60)
        yield port


def measure(port: int, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with its results in ``folder``."""
    arguments = program("bench", "--host", "127.0.0.1", "--port", port, "--isl", 8, "--osl", 6, "--result-dir", folder)
    environment = clean_environment(GPUJOB_OUTPUT_DIR=str(folder), GPUJOB_PROGRESS_FILE=str(folder / "progress"))
    arguments += map(str, options)
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)


def results(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("isl_*.json")]
    return {entry["max_concurrency"]: entry for entry in found}


# -- the job -------------------------------------------------------------------------------------


def test_the_job_runs_locally_and_its_report_has_the_measurements(tmp_path: Path) -> None:
    done = gpujob("run", TOY, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_with(f"{tmp_path}/") == {}
    (run_dir,) = (tmp_path / "logs").iterdir()
    report = read_json(run_dir / "report.json")
    assert "serve-toy: COMPLETED and verified\n" in done.stdout
    assert f"\n## Benchmark\n\n{HEAD}" in done.stdout
    assert [
        (entry["concurrency"], entry["requests"], entry["requests_expected"], entry["input_tokens"])
        for entry in report["benchmark"]
    ] == [(2, 16, 16, 16 * 128), (4, 32, 32, 32 * 128)]
    for entry in report["benchmark"]:
        assert entry["output_tokens"] == entry["requests"] * 32
        assert entry["ttft_median_s"] >= 0.064 + 0.016, "a prompt of 128 tokens at 2000 a second, and a step"
        assert entry["tpot_median_s"] >= 0.016, "no step is shorter"
        assert entry["e2el_median_s"] >= entry["ttft_median_s"] + 31 * 0.016
    assert {worker["worker"]: (worker["node"][-2:], worker["exit"]["reason"]) for worker in report["workers"]} == {
        "prefill_w0": ("n0", "completed"),
        "prefill_w1": ("n1", "completed"),
        "decode_w0": ("n0", "completed"),
        "frontend_0": ("n0", "completed"),
        "benchmark": ("n0", "completed"),
    }
    assert (report["items"], report["items_expected"], report["unit"]) == (48, 48, "requests")
    view = json.loads(gpujob("watch", run_dir, "--once", "--json", cwd=tmp_path).stdout)
    workers = {worker["worker"]: worker for worker in view["workers"]}
    assert workers["decode_w0"]["pack"] == workers["prefill_w1"]["pack"] == "sglang"
    assert workers["decode_w0"]["values"]["generation_tokens_per_second"] > 0
    assert workers["prefill_w1"]["values"]["input_tokens_per_second"] > 0
    assert len((run_dir / "requests.jsonl").read_text().splitlines()) == 48


def test_check_and_plan_have_no_warnings(tmp_path: Path) -> None:
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    active = clean_environment(
        VIRTUAL_ENV=sys.prefix, PATH=path
    )  # otherwise check warns that "python3" may be any Python
    checked = json.loads(gpujob("check", "--json", TOY, cwd=tmp_path, env=active).stdout)
    items = [item for section in checked["sections"] for item in section["items"]]
    assert checked["ok"] is True
    assert [item for item in items if item["status"] in ("warning", "error") and item["code"] != "disk-low"] == []
    for options in ((), ("--local",)):
        planned = gpujob("plan", TOY, *options, cwd=tmp_path, env=active)
        assert (planned.returncode, planned.stderr) == (0, "")
        assert f"python3 {shlex.quote(f'{FOLDER}/toy_router.py')} --port" in planned.stdout


def test_the_real_engine_of_the_comments_can_be_planned() -> None:
    text = TOY.read_text()
    model = re.search(r"^# real: (model: \{.*?\})", text, re.MULTILINE)
    assert model is not None
    job = yaml.safe_load(text)
    assert [job.pop("workers")[0]["role"], job["frontend"].pop("command")[:7]] == ["prefill", "python3"]
    job["resources"] |= {"gpus_per_node": 8, "gpus_per_prefill": 4, "gpus_per_decode": 8}
    plan = plan_of(parse_job(yaml.safe_dump(job | yaml.safe_load(model[1])), "job.yaml"))
    modules = {entry.task.role: entry.argv[2] for entry in plan.tasks if entry.task.role != "benchmark"}
    assert modules == {
        "prefill": "sglang.launch_server",
        "decode": "sglang.launch_server",
        "frontend": "sglang_router.launch_router",
    }
    benchmark = plan.tasks[-1].argv
    assert benchmark[benchmark.index("--model") + 1] == "qwen"


def test_the_large_job_uses_the_same_benchmark(tmp_path: Path) -> None:
    checked = gpujob("check", FOLDER / "job.yaml", cwd=tmp_path).stdout
    assert f'ok      benchmark.command: "python3" and "{FOLDER}/bench.py" exist' in checked


# -- the engine and the router -------------------------------------------------------------------


def test_an_engine_loads_and_then_streams_the_requested_tokens(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    request = json.dumps({"prompt": "a b c", "max_tokens": 5, "stream": True}).encode()
    with running(program("toy_engine", "--port", port, *FAST, "--load-seconds", 15), log):
        url = f"http://127.0.0.1:{port}"
        poll(lambda: ask(f"{url}/health")[0] == 503, "its first answer", 60)
        assert ask(f"{url}/v1/completions", request)[0] == 503
        poll(lambda: ask(f"{url}/health")[0] == 200, "the end of loading", 60)
        status, body = ask(f"{url}/v1/completions", request)
        events = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
        assert (status, events[-1]) == (200, "[DONE]")
        parts = [json.loads(event) for event in events[:-1]]
        assert "".join(choice["text"] for part in parts for choice in part["choices"]) == "word " * 5
        assert parts[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        status, body = ask(f"{url}/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2}).encode())
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "word word ")
        assert [ask(f"{url}/v1/completions", wrong)[0] for wrong in (b"", b"[]", b"{}", b'{"prompt": ')] == [400] * 4
        metrics = ask(f"{url}/metrics")[1].decode()
        assert 'sglang:num_requests_total{model_name="toy"} 2\n' in metrics
        assert 'sglang:generation_tokens_total{model_name="toy"} 7\n' in metrics
    text = log.read_text()
    assert text.index("Load weight begin. ") < text.index("Load weight end. ") < text.index("Prefill batch, ")


def test_a_request_without_its_client_leaves_the_batch(tmp_path: Path) -> None:
    with toy_engine(tmp_path / "log", "--disaggregation-mode", "decode") as (url, _):
        running_now = 'sglang:num_running_reqs{model_name="toy"} 0\n'
        request = json.dumps({"prompt": "a", "max_tokens": 1_000_000, "stream": True}).encode()
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        client.request("POST", "/v1/completions", request)
        answer = client.getresponse()
        assert answer.readline().startswith(b"data: ")
        assert running_now not in ask(f"{url}/metrics")[1].decode()
        answer.close()
        client.close()
        poll(lambda: running_now in ask(f"{url}/metrics")[1].decode(), "an empty batch", 60)


def test_the_rate_of_a_batch_excludes_the_pause_before_it(tmp_path: Path) -> None:
    """Tokens for part of a log interval, a pause longer than any stall of the machine, then the rest and more."""
    request = json.dumps({"prompt": "a", "max_tokens": 15}).encode()
    with toy_engine(tmp_path / "log", "--disaggregation-mode", "decode", "--step-ms", 10) as (url, _):
        ask(f"{url}/v1/completions", request)
        time.sleep(12)
        more = json.dumps({"prompt": "a", "max_tokens": 45}).encode()
        ask(f"{url}/v1/completions", more)
        metrics = ask(f"{url}/metrics")[1].decode()
    rates = re.findall(r"gen throughput \(token/s\): ([\d.]+), ", (tmp_path / "log").read_text())
    assert len(rates) == 2, "after 20 and 40 steps"
    assert min(map(float, rates)) > 2, "20 tokens in 12 seconds are 1.7 a second"
    assert 'sglang:generation_tokens_total{model_name="toy"} 60\n' in metrics


def test_a_router_counts_healthy_workers_and_skips_the_others(tmp_path: Path) -> None:
    def counts(port: int) -> list[int]:
        stats = json.loads(ask(f"http://127.0.0.1:{port}/workers", timeout=30)[1])["stats"]
        return [stats[f"{role}_count"] for role in ("prefill", "decode", "regular")]

    request = json.dumps({"prompt": "a b", "max_tokens": 3}).encode()
    with ExitStack() as stack:
        modes = ("prefill", "prefill", "decode")
        engines = [
            stack.enter_context(toy_engine(tmp_path / f"{number}.log", "--disaggregation-mode", mode))
            for number, mode in enumerate(modes)
        ]
        urls = [url for url, _ in engines]
        names = {"GPUJOB_PREFILL_URLS": ",".join(urls[:2]), "GPUJOB_DECODE_URLS": urls[2]}
        port = stack.enter_context(toy_router(tmp_path / "router.log", **names))
        assert counts(port) == [2, 1, 0]
        engines[0][1].kill()
        engines[0][1].wait()
        assert counts(port) == [1, 1, 0]
        answers = [ask(f"http://127.0.0.1:{port}/v1/completions", request, timeout=30) for _ in range(4)]
        assert [(status, json.loads(body)["choices"][0]["text"]) for status, body in answers] == [
            (200, "word word word ")
        ] * 4
        engines[2][1].kill()
        engines[2][1].wait()
        status, body = ask(f"http://127.0.0.1:{port}/v1/completions", request, timeout=30)
        assert (status, json.loads(body)) == (503, {"error": "no decode worker takes requests"})


# -- the benchmark -------------------------------------------------------------------------------


def test_a_benchmark_writes_a_result_for_each_concurrency(tmp_path: Path) -> None:
    with toy_engine(tmp_path / "log") as (url, _):
        port = int(url.rpartition(":")[2])
        done = measure(port, tmp_path, "--concurrencies", "1x3", "--requests-each", 4)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert {each: (entry["completed"], entry["num_prompts"]) for each, entry in found.items()} == {
        1: (4, 4),
        3: (12, 12),
    }
    assert (found[3]["total_input_tokens"], found[3]["total_output_tokens"]) == (12 * 8, 12 * 6)
    positions = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    assert positions == [{"done": done, "total": 16, "unit": "requests"} for done in range(17)]
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [entry["concurrency"] for entry in requests] == [1] * 4 + [3] * 12
    assert done.stdout.count("============ Serving Benchmark Result ============\n") == 2


def test_requests_wait_for_a_starting_server(tmp_path: Path) -> None:
    port = free_port()
    with running(program("toy_engine", "--port", port, *FAST, "--load-seconds", 2), tmp_path / "log"):
        done = measure(port, tmp_path, "--concurrencies", "2", "--requests-each", 2, "--patience", 60)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)[2]["completed"] == 4


def test_a_benchmark_without_a_server_fails_with_the_reason(tmp_path: Path) -> None:
    done = measure(free_port(), tmp_path, "--concurrencies", "2", "--requests-each", 1, "--patience", 0)
    assert done.returncode == 1
    assert "2 requests failed: [Errno 111] Connection refused\n" in done.stderr
    assert results(tmp_path)[2]["completed"] == 0


def test_an_interrupted_response_is_not_a_completed_request(tmp_path: Path) -> None:
    with ExitStack() as stack:
        prefill, _ = stack.enter_context(toy_engine(tmp_path / "p.log", "--disaggregation-mode", "prefill"))
        decode, process = stack.enter_context(
            toy_engine(tmp_path / "d.log", "--disaggregation-mode", "decode", "--step-ms", 50)
        )
        port = stack.enter_context(
            toy_router(tmp_path / "router.log", GPUJOB_PREFILL_URLS=prefill, GPUJOB_DECODE_URLS=decode)
        )
        arguments = (
            "--concurrencies",
            "1",
            "--requests-each",
            1,
            "--patience",
            0,
            "--osl",
            1_000_000,
            "--result-dir",
            tmp_path,
        )
        client = subprocess.Popen(
            [*program("bench", "--host", "127.0.0.1", "--port", port, "--isl", 8), *map(str, arguments)],
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(client.kill)
        poll(lambda: "Decode batch, #running-req: 1" in (tmp_path / "d.log").read_text(), "tokens", 60)
        process.kill()
        _, errors = client.communicate(timeout=60)
    assert re.search(r"^1 requests failed: the answer broke off after [1-9]\d* pieces$", errors, re.MULTILINE), errors
    assert client.returncode == 1
    assert results(tmp_path)[1]["completed"] == 0


def stream(pieces: list[str], usage: dict[str, int] | None) -> list[bytes]:
    """Lines of a streamed response."""
    events: list[object] = [{"choices": [{"text": piece}]} for piece in pieces]
    events += [{"choices": [], "usage": usage}] if usage else []
    return [line for event in (*map(json.dumps, events), "[DONE]") for line in (f"data: {event}\n".encode(), b"\n")]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=8), st.booleans(), st.data())
def test_only_a_complete_stream_is_a_completed_request(
    bench: ModuleType, pieces: list[str], counted: bool, data: st.DataObject
) -> None:
    lines = stream(pieces, {"prompt_tokens": 3, "completion_tokens": 50} if counted else None)
    whole = bench.taken(iter(lines), 0.0)
    assert (whole.tokens_in, whole.tokens_out) == ((3, 50) if counted else (0, len(pieces)))
    assert len(whole.arrivals) == len(pieces)
    text = b"".join(lines)
    cut = text[: data.draw(st.integers(0, text.index(b"[DONE]") + len(b"[DONE")))]
    with pytest.raises((bench.RequestFailed, ValueError)):
        bench.taken(iter(cut.splitlines(keepends=True)), 0.0)


def test_a_response_may_use_all_of_the_event_stream_syntax(bench: ModuleType) -> None:
    lines = [
        b": ping\n",
        b"\n",
        b"event: completion\r\n",
        b"id: 1\r\n",
        b'data:{"choices": [{"text": "a"}]}\r\n',
        b"\r\n",
        b"retry: 1000\n",
        b"data\n",
        b'data:   {"choices": [{"text": "b: c"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n',
        b":\n",
        b"data:[DONE]\n",
    ]
    found = bench.taken(iter(lines), 0.0)
    assert (found.tokens_in, found.tokens_out, len(found.arrivals)) == (3, 2, 2)


def test_statistics_are_computed_from_the_times(bench: ModuleType) -> None:
    options = bench.parse(
        ["--host", "h", *["--port", "1", "--isl", "8", "--osl", "3", "--concurrencies", "2", "--result-dir", "d"]]
    )
    one = bench.Completed(8, 3, 10.0, (10.5, 10.6, 10.9))
    two = bench.Completed(8, 1, 10.0, (11.0,))
    found = bench.result(options, 2, 3, [one, two], 4.0)
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
    assert {name: value for name, value in rounded.items() if name != "date"} == {
        "model_id": "toy",
        "num_prompts": 3,
        "request_rate": "inf",
        "max_concurrency": 2,
        "duration": 4.0,
        "completed": 2,
        "total_input_tokens": 16,
        "total_output_tokens": 4,
        "request_throughput": 0.5,
        "output_throughput": 1.0,
        "total_token_throughput": 5.0,
        "mean_ttft_ms": 750.0,
        "median_ttft_ms": 750.0,
        "p99_ttft_ms": 1000.0,
        "mean_tpot_ms": 200.0,
        "median_tpot_ms": 200.0,
        "p99_tpot_ms": 200.0,
        "mean_itl_ms": 200.0,
        "median_itl_ms": 200.0,
        "p99_itl_ms": 300.0,
        "mean_e2el_ms": 950.0,
        "median_e2el_ms": 950.0,
        "p99_e2el_ms": 1000.0,
    }
