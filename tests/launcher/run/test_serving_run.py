"""Serving jobs by real processes: stages, services, policies, warnings."""

import os
import shlex
import signal
import urllib.request
from collections.abc import Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from launcher.programs.port_claims import CLAIM_PREFIX, RESERVATION_PREFIX, read_claimed_ports
from tests.launcher.programs.guarded import Guarded, ready, server, until
from tests.support.launcher import poll, read_json

DECODE, ROUTER = 6100, 8000
SERVES = {"service": True}


def workers(folder: Path, *arguments: str, **decode: Any) -> list[dict[str, Any]]:
    """Two decode workers, a router, and a benchmark that ends when the test creates a file."""
    return [
        {"role": "decode", "count": 2, "command": server(*arguments), **decode},
        {"role": "router", "command": server()},
        {"role": "benchmark", "command": until(folder / "enough")},
    ]


TASKS: dict[str, dict[str, Any]] = {
    "decode_w0": {**SERVES, "ports": {"http": DECODE}},
    "decode_w1": {**SERVES, "ports": {"http": DECODE + 32}},
    "router": {**SERVES, "ports": {"http": ROUTER}, "stage": "frontends"},
    "benchmark": {"stage": "benchmark"},
}
RULES = (
    ready("router_w0", ROUTER, kind="tcp"),
    ready("decode_w0", DECODE),
    ready("decode_w1", DECODE + 32),
)


@pytest.fixture(scope="module")
def never_ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A job whose workers never become ready, until its readiness timeout."""
    folder = tmp_path_factory.mktemp("never")
    tasks = {**TASKS, "decode_w1": {**TASKS["decode_w1"], "env": {}}}
    spec = workers(folder)
    spec[0]["command"] = server(str(folder / "never"))
    with Guarded(folder, spec, tasks, RULES, timeout_s=20.0) as job:
        yield job


@pytest.fixture(scope="module", autouse=True)
def never_ready_started(request: pytest.FixtureRequest) -> None:
    """Start that job first, so that it waits while the other tests run. The last test checks its result."""
    if any("never_ready" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("never_ready")


def port(job: Guarded, base: int) -> int:
    return base + int(read_json(job.run_dir / "orchestrator.json")["port_offset"])


def end_server(job: Guarded, base: int) -> None:
    """Let a server end by itself."""
    with pytest.raises((RemoteDisconnected, ConnectionResetError)):
        urllib.request.urlopen(f"http://127.0.0.1:{port(job, base)}/end", timeout=60)


def test_stages_wait_for_readiness_and_the_benchmark_ends_the_job(tmp_path: Path) -> None:
    gate = tmp_path / "loaded"
    templates = {"conf/nginx.conf": "listen {port_8000}; {{rank}} of {job_id}\n"}
    with Guarded(tmp_path, workers(tmp_path, str(gate)), TASKS, RULES, templates=templates) as job:
        job.await_event("stage started", 2)
        poll(lambda: "decode" in job.log and read_json(job.run_dir / "readiness.json").get("rules"), "polling")
        assert [event["stage"] for event in job.events("stage started")] == ["workers", "frontends"]
        assert read_json(job.run_dir / "state.json")["phase"] == "launching"
        offset = read_json(job.run_dir / "orchestrator.json")["port_offset"]
        ports = {DECODE + offset, DECODE + 32 + offset, ROUTER + offset}
        processes = read_json(job.run_dir / "ports.json")["processes"]
        assert {process["ports"]["http"] for process in processes} == ports
        assert ports <= read_claimed_ports((RESERVATION_PREFIX,))
        gate.touch()
        job.await_phase("running")
        poll(lambda: ports.isdisjoint(read_claimed_ports((RESERVATION_PREFIX,))), "the claims of the tasks")
        assert ports <= read_claimed_ports((CLAIM_PREFIX,))
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log
    assert [event["stage"] for event in job.events("stage started")] == ["workers", "frontends", "benchmark"]
    assert job.report["state"] == "COMPLETED"
    assert job.reasons() == dict.fromkeys(("decode_w0", "decode_w1", "router_w0", "benchmark_w0"), "completed")
    assert job.report["stopped"]["cause"] == "the benchmark has completed"
    assert (job.run_dir / "conf/nginx.conf").read_text() == f"listen {8000 + offset}; {{rank}} of local-1\n"
    assert (job.run_dir / "conf/nginx.conf").stat().st_mode & 0o777 == 0o600, "it may hold keys"
    assert f"Frontend available at: http://127.0.0.1:{8000 + offset}" in job.log
    assert "Model is ready." in (job.run_dir / "benchmark.out").read_text()
    assert job.left_over() == {}


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_service_that_ends_by_itself_has_failed_with_any_exit_status(tmp_path: Path, code: str) -> None:
    with Guarded(tmp_path, workers(tmp_path, env={"END_WITH": code}), TASKS, RULES) as job:
        job.await_phase("running")
        end_server(job, DECODE + 32)
        assert job.wait() == 1
    cause = job.report["cause"]
    assert (job.report["state"], cause["worker"], cause["reason"]) == ("FAILED", "decode_w1", "app_error")
    evidence = "a service ended with code 0 while the job needed it" if code == "0" else "exit status 3"
    assert evidence in cause["evidence"]
    assert job.reasons()["benchmark_w0"] == "terminated_peer"
    assert job.left_over() == {}


def test_the_job_continues_without_a_tolerated_worker(tmp_path: Path) -> None:
    with Guarded(tmp_path, workers(tmp_path, critical=False), TASKS, RULES) as job:
        job.await_phase("running")
        end_server(job, DECODE)
        job.await_event("not ready")
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log
    assert (job.report["state"], job.reasons()["decode_w0"]) == ("COMPLETED", "app_error")
    assert "decode_w0 is not critical: the job continues without it" in job.log


def test_a_job_is_ready_again_after_the_restart_of_a_worker(tmp_path: Path) -> None:
    with Guarded(tmp_path, workers(tmp_path, restart={"max": 1, "backoff": 0.5}), TASKS, RULES) as job:
        job.await_phase("running")
        first_pid = job.pid("decode_w1")
        os.kill(first_pid, signal.SIGKILL)
        job.await_event("worker restarted")
        assert job.pid("decode_w1", restart=1) != first_pid
        poll(lambda: "serving" in job.output("decode_w1", 1), "the second run")
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log
    assert job.report["state"] == "COMPLETED"
    assert [worker["restarts"] for worker in job.report["workers"]] == [0, 1, 0, 0]


def test_all_tasks_of_a_worker_are_restarted_together(tmp_path: Path) -> None:
    role = {"role": "decode", "count": 1, "gpus": 2, "command": "sh -c 'echo up; sleep 600'"}
    others = [{"role": "benchmark", "command": until(tmp_path / "enough")}]
    spec: dict[str, Any] = {"resources": {"nodes": 3, "gpus_per_node": 1}}
    restart = {"restart": {"max": 1, "backoff": 0.1}}
    with Guarded(
        tmp_path, [{**role, **restart}, *others], {"decode": SERVES, "benchmark": {"stage": "benchmark"}}, **spec
    ) as job:
        job.await_phase("running")
        first = job.pid("decode_w0")
        os.kill(first, signal.SIGKILL)
        for local_rank in (0, 1):
            job.pid("decode_w0", restart=1, local_rank=local_rank)
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log
    assert job.report["state"] == "COMPLETED"
    decode_workers = [worker for worker in job.report["workers"] if worker["role"] == "decode"]
    assert [[end["reason"] for end in worker["exits"]] for worker in decode_workers] == [
        ["killed_unknown", "completed"],
        ["terminated_peer", "completed"],
    ]
    assert "Ending the other 1 processes of decode_w0" in job.log
    assert "decode_w0 restarts in 0.1 s (1 of 1): rank 0 ended by killed_unknown\n" in job.log
    (restart_entry,) = job.report["restarted"]
    assert (restart_entry["worker"], restart_entry["rank"], restart_entry["run"], restart_entry["reason"]) == (
        "decode_w0",
        0,
        1,
        "killed_unknown",
    )


def test_a_job_with_only_services_runs_until_it_is_stopped(tmp_path: Path) -> None:
    with Guarded(tmp_path, workers(tmp_path)[:2], TASKS, RULES) as job:
        job.await_phase("running")
        job.guard.terminate()
        assert job.wait() == 5
    assert job.report["state"] == "CANCELLED"
    assert job.left_over() == {}


REPORTS_SIGUSR1 = "trap 'echo told of the limit' USR1; echo up; while :; do sleep 0.05; done"


def test_workers_get_the_warning_signal_if_it_is_configured(tmp_path: Path) -> None:
    solver = {"role": "solver", "critical": False, "command": shlex.join(["sh", "-c", REPORTS_SIGUSR1])}
    with Guarded(tmp_path, [*workers(tmp_path), solver], TASKS, RULES, slurm={"signal": "USR1@120"}) as job:
        job.await_phase("running")
        poll(lambda: "up" in job.output("solver_w0"), "the worker")
        job.guard.send_signal(signal.SIGUSR1)
        event = job.await_event("checkpoint signal")
        assert (event["signal"], event["processes"]) == ("SIGUSR1", 1)
        poll(lambda: "told of the limit" in job.output("solver_w0"), "the worker's answer")
        assert not any("told of the limit" in job.output(name) for name in ("decode_w0", "decode_w1", "router_w0"))
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log


def test_a_tolerated_worker_that_ends_while_loading_is_not_awaited(tmp_path: Path) -> None:
    spec = workers(tmp_path, critical=False)
    spec[0]["command"] = server(str(tmp_path / "loaded"))
    with Guarded(tmp_path, spec, TASKS, RULES) as job:
        job.pid("decode_w1")
        poll(lambda: "serving" in job.output("decode_w1"), "its port")
        end_server(job, DECODE + 32)
        poll(lambda: read_json(job.run_dir / "given_up.json").get("workers"), "the abandoned workers")
        (tmp_path / "loaded").touch()
        job.await_phase("running")
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log
    assert (job.report["state"], job.reasons()["decode_w1"]) == ("COMPLETED", "app_error")
    assert read_json(job.run_dir / "given_up.json")["workers"] == {"decode_w1": "decode"}


def test_a_job_ends_when_its_last_worker_has_ended(tmp_path: Path) -> None:
    with Guarded(tmp_path, workers(tmp_path, critical=False, env={"END_WITH": "3"})[:2], TASKS, RULES) as job:
        job.await_phase("running")
        end_server(job, DECODE)
        job.await_event("worker ended")
        end_server(job, DECODE + 32)
        assert job.wait() == 1, job.log
    cause = job.report["cause"]
    assert (job.report["state"], cause["worker"], cause["reason"]) == ("FAILED", "decode_w1", "app_error")
    assert job.report["stopped"]["cause"].startswith("no worker is left: the last, decode_w1 rank 1 on ")
    assert job.left_over() == {}


def test_a_job_ends_when_its_last_decode_worker_has_ended(tmp_path: Path) -> None:
    """This applies although tolerated workers are not awaited, neither before nor after readiness."""
    prefill = {"role": "prefill", "command": server()}
    spec = [prefill, *workers(tmp_path, critical=False, env={"END_WITH": "3"})[:2]]
    tasks = {**TASKS, "prefill_w0": {**SERVES, "ports": {"http": DECODE + 64}}}
    with Guarded(tmp_path, spec, tasks, (*RULES, ready("prefill_w0", DECODE + 64))) as job:
        job.await_phase("running")
        end_server(job, DECODE)
        job.await_event("worker ended")
        end_server(job, DECODE + 32)
        assert job.wait() == 1, job.log
    assert job.report["stopped"]["cause"].startswith("no decode worker is left: the last, decode_w1 rank 2 on ")
    assert (job.report["cause"]["worker"], job.report["cause"]["reason"]) == ("decode_w1", "app_error")
    assert job.left_over() == {}


def test_an_unconfigured_warning_signal_is_not_passed_on(tmp_path: Path) -> None:
    with Guarded(tmp_path, workers(tmp_path), TASKS, RULES) as job:
        job.await_phase("running")
        job.guard.send_signal(signal.SIGUSR1)
        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.log
    assert job.events("checkpoint signal") == []


def test_a_worker_not_ready_in_time_is_named_with_the_end_of_its_log(never_ready: Guarded) -> None:
    job = never_ready
    assert job.wait() == 1
    report = job.report
    assert (report["state"], report["cause"]["reason"], report["cause"]["worker"]) == (
        *("FAILED", "launch_failed", "decode_w0"),
    )
    assert report["stopped"]["cause"].startswith("not ready after 20 s: missing decode_w0, decode_w1")
    assert any("serving on" in line for line in report["cause"]["evidence"])
    assert "serving on" in job.log
    ended = dict.fromkeys(("decode_w0", "decode_w1", "router_w0"), "completed")
    assert job.reasons() == {**ended, "benchmark_w0": "terminated_peer"}
    assert [entry["worker"] for entry in report["cause"]["missing"]] == ["decode_w0", "decode_w1"]
    not_started = next(worker for worker in report["workers"] if worker["worker"] == "benchmark_w0")
    assert (not_started["state"], not_started["start"]) == ("not_started", None)
    text = (job.run_dir / "report.md").read_text()
    assert "| benchmark_w0 | 3 | " in text
    assert " | not started (the job ended " in text
    assert "\n        - serving on " in text
    assert job.left_over() == {}
