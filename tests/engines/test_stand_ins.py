"""The stand-in engines answer and log like the real ones."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from launcher.plan.plan import ReadyRule
from launcher.run.before.readiness import parse_models, parse_sglang
from tests.endtoend.serving import BENCHMARK
from tests.launcher.planner.backends.serving_jobs import argv_of, ask, engine, job, plan_from, running
from tests.support.launcher import poll
from tests.support.ports import free_port

FAST = ("--token-seconds", "0.0005", "--log-interval", "0.05")


def ready(port: int) -> str:
    url = f"http://127.0.0.1:{port}"
    poll(lambda: ask(f"{url}/health")[0] == 200, f"the engine at {url}")
    return url


def test_a_worker_becomes_ready_and_logs_its_batches(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    argv = engine("sglang_worker", "--port", port, "--ready-after", 0.5, "--served-model-name", "m", *FAST)
    with running(argv, log):
        url = f"http://127.0.0.1:{port}"
        poll(lambda: ask(f"{url}/health")[0] == 503, "its first answer")
        assert ask(f"{url}/v1/completions", b"{}")[0] == 503
        ready(port)
        assert parse_models(ask(f"{url}/v1/models")[1]) == ["m"]
        status, body = ask(f"{url}/v1/completions", json.dumps({"prompt": "a b", "max_tokens": 40}).encode())
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 40)
        line = r"^\[\d{4}-\d\d-\d\d [\d:]{8} DP0 TP0 EP0\] Decode batch, .*gen throughput \(token/s\): [\d.]+, #queue"
        poll(lambda: re.search(line, log.read_text(), re.MULTILINE), "a batch in the log")
        metrics = ask(f"{url}/metrics")[1].decode()
        assert 'sglang:num_requests_total{model_name="m"} 1\n' in metrics
    assert "The server is fired up and ready to roll!" in log.read_text()


def test_a_router_lists_healthy_workers_and_skips_the_others(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(4)]
    modes = ["prefill", "decode", "decode"]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                running(engine("sglang_worker", "--port", port, "--disaggregation-mode", mode), tmp_path / f"w{port}")
            )
            for port, mode in zip(ports, modes, strict=False)
        ]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        argv = engine("router", "--port", ports[3], "--pd-disaggregation", "--prefill", urls[0], 7200)
        argv += ["--decode", urls[1], "--decode", urls[2], "--policy", "x"]
        stack.enter_context(running(argv, tmp_path / "router"))
        both = {"prefill": 1, "decode": 2}
        poll(lambda: parse_sglang(ask(f"{urls[3]}/workers")[1]) == both, "both decode workers")
        workers[1].kill()
        poll(lambda: parse_sglang(ask(f"{urls[3]}/workers")[1]) == {"prefill": 1, "decode": 1}, "one to be gone")
        body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        answers = [ask(f"{urls[3]}/v1/completions", body) for _ in range(4)]
        assert {status for status, _ in answers} == {200}
        workers[0].kill()
        poll(lambda: ask(f"{urls[3]}/v1/completions", body)[0] == 503, "no prefill")


def test_stand_ins_run_with_the_commands_of_a_plan(tmp_path: Path) -> None:
    worker = f"{shlex.join(engine('sglang_worker'))} --port {{http_port}} {shlex.join(FAST)}"
    text = job(
        resources={"gpus_per_node": 0, "nodes": 1},
        workers=[
            {"role": "prefill", "command": f"{worker} --disaggregation-mode prefill"},
            {"role": "decode", "count": 2, "command": worker},
        ],
        backend={"type": "sglang"},
        frontend={"type": "sglang-router", "command": f"{shlex.join(engine('router'))} --port {{http_port}}"},
        benchmark={
            "type": "sa-bench",
            "command": shlex.join([sys.executable, str(BENCHMARK)]),
            "args": {"requests-each": 4},
            "isl": 4,
            "osl": 8,
            "concurrencies": "2x4",
        },
    )
    plan = plan_from(text)
    bases = sorted({port for entry in plan.tasks for port in entry.ports.values()})
    ports_here = {str(base): str(free_port()) for base in bases}

    def here(argv: list[str]) -> list[str]:
        local = [word.replace("cn00", "127.0.0.1").replace(str(plan.run_dir("4459")), str(tmp_path)) for word in argv]
        return [re.sub(r"\b(?:6100|6132|6164|8000)\b", lambda match: ports_here[match[0]], word) for word in local]

    def rule_is_met(rule: ReadyRule) -> bool:
        url = f"http://127.0.0.1:{ports_here[str(rule.port)]}"
        if rule.kind == "sglang":
            return parse_sglang(ask(f"{url}/workers")[1]) == rule.expected
        return ask(url + rule.path)[0] == 200

    urls = {
        "GPUJOB_PREFILL_URLS": here(["http://127.0.0.1:6100"])[0],
        "GPUJOB_DECODE_URLS": here(["http://127.0.0.1:6132,http://127.0.0.1:6164"])[0],
    }
    with ExitStack() as stack:
        for entry in plan.tasks[:-1]:
            argv = here(argv_of(plan, entry.task.worker))
            stack.enter_context(running(argv, tmp_path / f"{entry.task.worker}.log", **urls))
        assert plan.readiness is not None
        for rule in plan.readiness.rules:
            poll(lambda rule=rule: rule_is_met(rule), f"{rule}")  # type: ignore[misc]
        done = subprocess.run(here(argv_of(plan, "benchmark")), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "============ Serving Benchmark Result ============\nSuccessful requests:                     8" in done.stdout
    )
    assert re.search(r"^Total generated tokens: {18}64 *$", done.stdout, re.MULTILINE)
    assert done.stdout.count("Maximum request concurrency: 4\n") == 2
    folder = tmp_path / "sa-bench_isl_4_osl_8"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"isl_4_osl_8_concurrency_{each}_req_rate_inf.json" for each in (2, 4)
    ]
    result = json.loads((folder / "isl_4_osl_8_concurrency_4_req_rate_inf.json").read_text())
    assert (result["completed"], result["total_output_tokens"], result["max_concurrency"]) == (16, 128, 4)
    assert done.stdout.endswith(f"SA-Bench complete. Results in {folder}\n")
