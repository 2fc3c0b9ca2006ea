"""The job view, read from hand-written run directories."""

import http.server
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from exporter.contract import run_files
from exporter.contract.events import EventLog
from exporter.contract.manifest import read_manifest
from exporter.contract.view import JobView, WorkerView
from exporter.logs.log_files_reader import log_paths
from exporter.workers.slurm_end_notice import REQUEUED
from launcher.report.report import build_report
from launcher.report.state import UNFINISHED
from launcher.report.text import render_report
from launcher.rundir import job_records
from launcher.watch import view as view_module
from launcher.watch.ending import render_ending
from launcher.watch.picture import render_picture
from launcher.watch.serving_view import output_tokens_rate
from launcher.watch.view import JobClient
from tests.support.builders import as_json, orchestrator_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.gpu_status import gpu, gpus, of_worker, use
from tests.support.launcher import settled_run_dir


def read_view(run_dir: Path) -> dict[str, Any]:
    """The JSON of the view."""
    return as_json(JobClient(run_dir).read_view())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A local job with two workers. Its orchestrator is the test process."""
    path = settled_run_dir(tmp_path, {"name": "job", "workers": [{"count": 2, "command": "true"}]})
    write(path / "orchestrator.json", orchestrator_record())
    return path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def record(run_dir: Path, kind: str, rank: int = 0, **facts: Any) -> None:
    stem = run_files.record_name(f"worker_w{rank}", rank, 0, 0)
    write(run_dir / f"workers/{stem}.{kind}.json", {"schema": 1, "worker": f"worker_w{rank}", "rank": rank, **facts})


def status(**worker: Any) -> dict[str, Any]:
    """A status with one worker."""
    entry = {"rank": 0, "worker": "worker_w0", "state": "running", "items": 5, "items_expected": 10, **worker}
    empty: dict[str, Any] = {"outputs": [], "filesystems": [], "events": []}
    job = {"phase": "running", "end": None, "job_id": "7"}
    return {
        "schema": 1,
        "time": 2000.0,
        "final": False,
        "job": job,
        "node": {"name": "here"},
        "workers": [entry],
        **empty,
    }


@pytest.fixture
def sidecar(run_dir: Path) -> Iterator[dict[str, Any]]:
    """A sidecar that answers with this object, or with broken JSON while it is empty."""
    page: dict[str, Any] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(page).encode() if page else b"{"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        write(run_dir / "sidecars/here.json", {"attempt": 0, "address": address, "labels": {"job_id": "7"}})
        yield page
        server.shutdown()


def test_workers_without_records_are_not_found(run_dir: Path) -> None:
    view = read_view(run_dir)
    assert (view["state"], view["phase"], view["items"]) == ("RUNNING", "launching", None)
    assert [(worker["state"], worker["up"]) for worker in view["workers"]] == [("not_found", False)] * 2


def test_values_of_the_sidecar_take_precedence(run_dir: Path, sidecar: dict[str, Any]) -> None:
    record(run_dir, "start", pid=77, start=1500.0)
    write(run_dir / "status/here.json", status(items=1))
    sidecar.update(status(items=7, rate=2.0, pid=77))
    view = read_view(run_dir)
    assert (view["phase"], view["items"], view["rate"]) == ("launching", 7, 2.0)
    assert (view["nodes"][0]["source"], view["nodes"][0]["error"]) == ("http", None)
    assert (view["workers"][0]["pid"], view["workers"][0]["items_expected"]) == (77, 10)


def report_workers(page: dict[str, Any], *entries: dict[str, Any]) -> None:
    """Let the sidecar report these workers."""
    known = [{"rank": rank, "worker": f"worker_w{rank}", **entry} for rank, entry in enumerate(entries)]
    page.update({**status(), "workers": known})


def test_the_job_has_the_steps_of_its_slowest_worker(run_dir: Path, sidecar: dict[str, Any]) -> None:
    for rank in range(2):
        record(run_dir, "start", rank, pid=77, start=1500.0)
    entry = {"state": "running", "unit": "steps", "items": 7, "items_expected": 10, "items_processed": 7, "rate": 2.0}
    entry["average_rate"] = 1.8  # since the first position, as the metrics have it, and not since the start
    report_workers(sidecar, entry, {**entry, "items": 5, "items_processed": 4, "rate": 1.5})
    keys = ("unit", "items", "items_expected", "items_processed", "rate", "average_rate")
    view = read_view(run_dir)
    assert [view[key] for key in keys] == ["steps", 5, 10, 4, 1.5, 1.8]
    assert [worker["unit"] for worker in view["workers"]] == ["steps", "steps"]
    report_workers(sidecar, {**entry, "unit": "items"}, {**entry, "unit": None})
    assert [read_view(run_dir)[key] for key in keys] == ["items", 14, 20, 14, 4.0, 3.6]
    report_workers(sidecar, {**entry, "unit": "items"}, entry)
    assert [read_view(run_dir)[key] for key in keys] == [None] * 6


def test_token_rates_of_engines_are_added_up(run_dir: Path, sidecar: dict[str, Any]) -> None:
    keys = ("output_tokens_per_second", "input_tokens_per_second")
    for rank in range(2):
        record(run_dir, "start", rank, pid=77, start=1500.0)
    report_workers(sidecar, {"state": "running", keys[0]: 100.5, keys[1]: 8.0}, {"state": "running", keys[0]: 80.0})
    view = read_view(run_dir)
    assert view["output_tokens_per_second"] == 180.5
    assert [[worker[key] for key in keys] for worker in view["workers"]] == [[100.5, 8.0], [80.0, None]]
    report_workers(sidecar, {"state": "running"}, {"state": "running", keys[1]: 8.0})
    assert read_view(run_dir)["output_tokens_per_second"] is None


@pytest.mark.parametrize("total", [None, 72])
def test_the_total_of_a_finished_job_comes_from_its_report(total: int | None, run_dir: Path) -> None:
    """The sidecar has seen only the progress bar of the last run."""
    for rank in range(2):
        record(run_dir, "start", rank, pid=77, start=1500.0)
    write(run_dir / "status/here.json", status(items=16, items_expected=24, unit="requests"))
    write(run_dir / "orchestrator.json", {"attempt": 0, "local": True, "pid": 1, "host": "h", "start": 1000.0})
    report = as_json(build_report(run_dir, now=2000.0, ended=True))
    report |= {"items": 16, "items_expected": total, "unit": "requests"}
    report["workers"][0] |= {"items": 16, "items_expected": total, "unit": "requests"}
    write(run_dir / "report.json", report)
    view = read_view(run_dir)
    assert (view["items"], view["items_expected"]) == (16, total)
    assert (view["workers"][0]["items"], view["workers"][0]["items_expected"]) == (16, total)


def test_output_tokens_of_prefill_and_ended_workers_do_not_count() -> None:
    def worker(rate: float | None, role: str = "decode", *, up: bool = True) -> WorkerView:
        return WorkerView(rank=0, role=role, up=up, output_tokens_per_second=rate)

    assert output_tokens_rate([worker(10.0), worker(5.0, "prefill"), worker(7.0, up=False), worker(None)]) == 10.0
    assert output_tokens_rate([worker(0.0)]) == 0.0
    assert output_tokens_rate([worker(5.0, "prefill"), worker(None)]) is None
    assert output_tokens_rate([]) is None


def test_the_last_status_file_is_used_when_the_sidecar_does_not_answer(run_dir: Path, sidecar: dict[str, Any]) -> None:
    record(run_dir, "start", pid=77, start=1500.0)
    write(run_dir / "status/here.json", status(items=3))
    assert not sidecar  # it answers with a broken page
    view = read_view(run_dir)
    assert view["items"] == 3
    assert view["nodes"][0]["source"] == "file"
    assert view["nodes"][0]["error"].startswith("no status from 127.0.0.1:")


def test_a_started_worker_is_not_shown_as_not_found(run_dir: Path, sidecar: dict[str, Any]) -> None:
    record(run_dir, "start", pid=77, start=1500.0)
    sidecar.update(status(state="not_found", items=None))
    (first, _) = read_view(run_dir)["workers"]
    assert (first["up"], first["state"]) == (True, "running")


def test_the_phase_comes_from_the_orchestrator(run_dir: Path, sidecar: dict[str, Any]) -> None:
    run_files.write_job_state(str(run_dir), "completing")
    sidecar.update(status())
    assert read_view(run_dir)["phase"] == "completing"


def test_the_phase_of_a_running_job_comes_from_its_logs(run_dir: Path, sidecar: dict[str, Any]) -> None:
    run_files.write_job_state(str(run_dir), "running")
    sidecar.update({**status(), "job": {"phase": "checkpointing", "end": None, "job_id": "7"}})
    assert read_view(run_dir)["phase"] == "checkpointing"


def test_the_job_has_the_eta_of_the_only_worker_with_progress(run_dir: Path, sidecar: dict[str, Any]) -> None:
    for rank in range(2):
        record(run_dir, "start", rank, pid=77, start=1500.0)
    eta = {"seconds": 60.0, "low": 50.0, "high": 80.0}
    report_workers(
        sidecar, {"state": "running", "items": 7, "eta": eta}, {"state": "running", "items": None, "eta": None}
    )
    view = read_view(run_dir)
    assert (view["eta"], view["time_limit_met_probability"]) == (eta, None)


def test_the_eta_of_a_job_is_that_of_its_slowest_worker(run_dir: Path, sidecar: dict[str, Any]) -> None:
    for rank in range(2):
        record(run_dir, "start", rank, pid=77, start=1500.0)
    sure, unsure = {"seconds": 60.0, "low": 55.0, "high": 70.0}, {"seconds": 50, "low": 20, "high": 90}
    entry = {"state": "running", "items": 7}
    report_workers(sidecar, {**entry, "eta": sure}, {**entry, "eta": unsure})
    assert read_view(run_dir)["eta"] == {"seconds": 60.0, "low": 55.0, "high": 90.0}
    report_workers(sidecar, {**entry, "eta": sure}, {**entry, "eta": None})
    assert read_view(run_dir)["eta"] is None, "one running worker has no ETA"


def test_the_moment_of_the_end_does_not_move_between_two_reads(run_dir: Path, sidecar: dict[str, Any]) -> None:
    record(run_dir, "start", pid=77, start=1500.0)
    made = time.time() - 20
    sidecar.update(status(eta={"seconds": 60.0, "low": 10.0, "high": 80.0}, eta_time=made))
    view = JobClient(run_dir).read_view()
    assert view.eta is not None
    assert view.time + view.eta.seconds == pytest.approx(made + 60)
    assert view.time + view.eta.high == pytest.approx(made + 80)
    assert view.eta.low == 0.0
    assert view.workers[0].eta == view.eta
    sidecar.update(status(eta={"seconds": 10.0, "low": 5.0, "high": 19.0}, eta_time=made))
    assert JobClient(run_dir).read_view().eta is None, "it is overdue"


def test_the_worker_of_all_nodes_that_stopped_first_is_named(tmp_path: Path) -> None:
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"count": 4, "command": "true"}]})
    write(run_dir / "orchestrator.json", orchestrator_record(hosts=["a", "b"]))
    nodes = {"a": {0: 2000.0, 1: 2010.0}, "b": {2: 1500.0, 3: 2005.0}}
    for node, last in nodes.items():
        body = status()
        body["job"]["first_to_stop"] = min(last, key=last.__getitem__)  # as far as its sidecar knows
        body["workers"] = [
            {"rank": rank, "worker": f"worker_w{rank}", "node": node, "stalled": True, "last_progress": at}
            for rank, at in last.items()
        ]
        (run_dir / "status").mkdir(exist_ok=True)
        write(run_dir / f"status/{node}.json", body)
        for rank in last:
            record(run_dir, "start", rank, pid=77, start=1000.0)
    assert read_view(run_dir)["first_to_stop"] == "worker_w2"


def test_an_ended_worker_has_its_exit_reason(run_dir: Path, sidecar: dict[str, Any]) -> None:
    record(run_dir, "start", pid=77, start=1500.0)
    record(run_dir, "exit", pid=77, start=1500.0, end=1600.0, code=3, signal=None)
    sidecar.update(status(items=7))
    view = read_view(run_dir)
    assert (view["workers"][0]["up"], view["workers"][0]["state"]) == (False, "dead")
    assert view["workers"][0]["exit"]["reason"] == "app_error"
    assert view["cause"]["worker"] == "worker_w0"


def test_the_log_of_an_ended_run_is_read_once(run_dir: Path) -> None:
    manifest = read_manifest(run_dir)
    _, log = log_paths(manifest.tasks[0], run_dir, orchestrator_record()["hosts"][0], 0, 0)
    Path(log).write_text("Traceback (most recent call last):\n  File 'a.py', line 3\nValueError: bad record 7\n")
    record(run_dir, "exit", pid=77, start=1500.0, end=1600.0, code=1, signal=None)
    client = JobClient(run_dir)
    first = as_json(client.read_view())["workers"][0]["exit"]
    assert any("bad record 7" in text for text in first["evidence"])
    Path(log).unlink()
    assert as_json(client.read_view())["workers"][0]["exit"] == first


def test_milestones_of_this_attempt_are_among_the_events(run_dir: Path) -> None:
    write(run_dir / "status/here.json", {**status(), "events": [{"time": 1003.0, "level": "info", "event": "e"}]})
    log = EventLog(run_dir / run_files.EVENTS_FILE, "local-1")
    log.write("milestone", level="info", detail="60% done")
    log.write("phase", phase="running")
    with (run_dir / run_files.EVENTS_FILE).open("a") as out:
        out.write('{"event": "milestone", "ti')
    found = [(event["event"], event["detail"]) for event in read_view(run_dir)["events"]]
    assert found == [("e", ""), ("milestone", "60% done")]
    record = run_files.read_json(run_dir / "orchestrator.json") or {}
    write(run_dir / "orchestrator.json", {**record, "start": time.time() + 9})
    assert [event["event"] for event in read_view(run_dir)["events"]] == ["e"]


def test_half_written_files_of_sidecars_and_workers_are_ignored(run_dir: Path) -> None:
    for name in ("status/here.json", "sidecars/here.json", "workers/worker_w0_rank0_a0_r0.start.json"):
        (run_dir / name).write_text('{"a": ')
    view = read_view(run_dir)
    assert (view["state"], view["workers"][0]["state"], view["nodes"]) == ("RUNNING", "not_found", [])


def test_positions_come_from_the_report_when_it_exists(run_dir: Path) -> None:
    """For example for a benchmark, where the log shows only the position of its last run."""
    record(run_dir, "exit", pid=77, start=1500.0, end=1600.0, code=0, signal=None)
    write(run_dir / "status/here.json", status(items=10, unit="requests"))
    report = as_json(build_report(run_dir, now=2000.0, ended=True))
    done = {"items": 24, "items_expected": 30, "items_processed": 24}
    report["workers"][0].update(done)
    write(run_dir / "report.json", {**report, **done})
    view = read_view(run_dir)
    assert [view[key] for key in ("unit", "items", "items_expected")] == ["requests", 24, 30]
    assert [view["workers"][0][key] for key in done] == [24, 30, 24]


def test_the_report_of_an_earlier_attempt_is_ignored(run_dir: Path) -> None:
    write(run_dir / "report.json", as_json(build_report(run_dir, now=2000.0, ended=True)))
    write(run_dir / "orchestrator.json", orchestrator_record(attempt=1))
    assert read_view(run_dir)["state"] == "RUNNING"
    report = JobClient(run_dir).report(verify=True)
    assert (report.state, report.exit_status, report.attempt) == ("RUNNING", 10, 1)


@pytest.mark.parametrize("over", [{"host": "login1"}, {"pid_namespace": 1}], ids=["machine", "container"])
def test_a_local_job_seen_from_elsewhere_runs_while_its_sidecar_reports(run_dir: Path, over: dict[str, Any]) -> None:
    write(run_dir / "orchestrator.json", orchestrator_record(**over))
    assert "cannot be seen from here" in read_view(run_dir)["unknown_reason"]
    write(run_dir / "status/here.json", {**status(), "time": time.time()})
    assert (read_view(run_dir)["state"], JobClient(run_dir).report().exit_status) == ("RUNNING", 10)
    write(run_dir / "status/here.json", {**status(), "time": time.time() - 60.0})
    assert read_view(run_dir)["state"] == "UNKNOWN"
    write(run_dir / "orchestrator.json", orchestrator_record(**over, start=time.time()))
    assert read_view(run_dir)["state"] == "RUNNING", "its first status is still to come"


def test_a_local_job_of_a_user_whose_processes_are_hidden_runs_while_its_sidecar_reports(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_records, "read_start_ticks", lambda _pid: None)  # mount option hidepid=2 of /proc
    monkeypatch.setattr(view_module, "SUCCESSOR_S", 0.0)
    write(run_dir / "status/here.json", {**status(), "time": time.time()})
    assert read_view(run_dir)["state"] == "UNKNOWN", "it is our own process, so it has gone"

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert read_view(run_dir)["state"] == "RUNNING"
    write(run_dir / "status/here.json", {**status(), "time": time.time() - 60.0})
    view = read_view(run_dir)
    assert (view["state"], "cannot be seen from here" in view["unknown_reason"]) == ("UNKNOWN", True)


def test_the_state_is_unknown_without_an_orchestrator_process(run_dir: Path) -> None:
    write(run_dir / "orchestrator.json", orchestrator_record(pid=2**22 + 1))
    view = read_view(run_dir)
    assert view["state"] == "UNKNOWN"
    assert view["unknown_reason"].startswith("process ")
    report = JobClient(run_dir).report()
    assert report.why == (view["unknown_reason"],)
    assert f"why: {view['unknown_reason']}" in render_ending(report)
    assert f"- why: {view['unknown_reason']}\n" in render_report(report)


def test_the_fullest_or_hanging_file_system_of_each_group_is_shown(run_dir: Path) -> None:
    def space(group: str, available: int | None, responding: bool = True) -> dict[str, Any]:
        return {"group": group, "available_bytes": available, "size_bytes": 100, "responding": responding}

    write(run_dir / "status/n0.json", {**status(), "filesystems": [space("output", 50), space("run", 50)]})
    write(run_dir / "status/n1.json", {**status(), "filesystems": [space("output", 40), space("run", None, False)]})
    write(run_dir / "status/n2.json", {**status(), "filesystems": [space("output", None), space("run", 10)]})
    found = {entry["group"]: entry for entry in read_view(run_dir)["filesystems"]}
    assert (found["output"]["available_bytes"], found["run"]["responding"]) == (40, False)


def test_files_of_all_nodes_are_combined(run_dir: Path) -> None:
    def group(**over: Any) -> dict[str, Any]:
        known = {"group": "output", "files": 2, "bytes": 10, "growth_bytes_per_second": 1.5, "mtime": 5.0}
        return {**known, "records": 3, "stalled": True, "files_invalid": 0, "invalid": [], "workers": {}, **over}

    bad = {"file": "a", "format": "npy", "reason": "is cut"}
    write(
        run_dir / "status/n0.json",
        {**status(), "outputs": [group(workers={"0": {"files": 1, "bytes": 7}})], "checkpoints": {"count": 2}},
    )
    other = group(
        records=None,
        stalled=False,
        files_invalid=1,
        invalid=[bad],
        workers={"1": {"files": 1, "bytes": 5, "stalled": True}},
    )
    write(run_dir / "status/n1.json", {**status(), "outputs": [other], "checkpoints": {}})
    view = read_view(run_dir)
    assert view["workers"][0]["output"]["bytes"] == 7
    (found,) = view["outputs"]
    assert found == {
        "group": "output",
        "counting": False,
        "files": 4,
        "bytes": 20,
        "growth_bytes_per_second": 3.0,
        "mtime": 5.0,
        "records": 3,
        "stalled": False,
        "stalled_ranks": [1],
        "files_invalid": 1,
        "invalid": [bad],
    }
    assert view["checkpoints"]["count"] == 2


def test_gpu_values_are_joined_with_workers_and_nodes(run_dir: Path, sidecar: dict[str, Any]) -> None:
    node = gpus(gpu(0), gpu(1))
    record(run_dir, "start", pid=77, start=1500.0)
    write(run_dir / "status/here.json", {**status(**of_worker(1)), "gpus": node})
    sidecar.update({**status(**of_worker(1, gpu_use=[use(0)], gpu_misplaced="uses GPU 0")), "gpus": node})
    view = read_view(run_dir)
    (shown,) = view["gpus"]
    assert shown == {
        "node": "here",
        **node,
        "gpus": [{**device, "seen_s": None, "idle_s": None, "lost_since": None} for device in node["gpus"]],
    }
    first, second = view["workers"]
    assert [(device["gpu"], device["planned"]) for device in first["gpu_devices"]] == [("1", True), ("0", False)]
    assert first["gpu_misplaced"] == "uses GPU 0"
    assert (second["gpu_devices"], second["gpu_misplaced"]) == ([], None)


def test_a_job_without_gpus_has_none_in_its_view(run_dir: Path, sidecar: dict[str, Any]) -> None:
    sidecar.update({**status(), "gpus": {}})
    view = read_view(run_dir)
    assert (view["gpus"], view["workers"][0]["gpu_devices"]) == ([], [])


# Waiting tasks and readiness


SERVING = """
name: serve
workers:
  - {role: prefill, count: 1, gpus: 0, command: "engine --port {http_port}"}
  - {role: decode, count: 1, gpus: 0, command: "engine --port {http_port}"}
model: {path: "hf:a/M", name: m}
frontend: {type: custom, command: "front --port {http_port}"}
benchmark: {type: sa-bench, command: "bench", isl: 128, osl: 8, concurrencies: "1"}
"""
PREFILL, DECODE, FRONTEND, BENCHMARK = "prefill_w0", "decode_w0", "frontend_0", "benchmark"


@pytest.fixture
def serving(tmp_path: Path) -> Path:
    """A local job with two engine workers, a front end and a benchmark."""
    path = settled_run_dir(tmp_path, yaml.safe_load(SERVING))
    write(path / "orchestrator.json", orchestrator_record())
    return path


def write_start_records(run_dir: Path, *names: str) -> None:
    """Write the start records of these tasks."""
    ranks = {task.worker: task.rank for task in read_manifest(run_dir).tasks}
    for name in names:
        stem = run_files.record_name(name, ranks[name], 0, 0)
        start = {"schema": 1, "worker": name, "rank": ranks[name], "pid": 77, "start": 1500.0}
        write(run_dir / f"workers/{stem}.start.json", start)


def write_readiness(run_dir: Path, **over: Any) -> None:
    """Write the result of the readiness poller."""
    result = {"schema": 1, "attempt": 0, "ready": False, "since": None, "timeout_s": 60.0, "waiting": "the model"}
    write(run_dir / "readiness.json", {**result, "seen": {"decode": 0}, "expected": {"decode": 1}, "rules": [], **over})


def states(view: dict[str, Any]) -> dict[str, str]:
    return {worker["worker"]: worker["state"] for worker in view["workers"]}


def test_tasks_of_later_stages_are_waiting(serving: Path) -> None:
    missing = dict.fromkeys((PREFILL, DECODE), "not_found")
    assert states(read_view(serving)) == {**missing, FRONTEND: "waiting", BENCHMARK: "waiting"}
    write_start_records(serving, PREFILL)
    found = {PREFILL: "running", DECODE: "not_found", FRONTEND: "waiting", BENCHMARK: "waiting"}
    assert states(read_view(serving)) == found, "the stage of the missing task has started"
    write_start_records(serving, DECODE, FRONTEND)
    view = read_view(serving)
    assert states(view) == {**dict.fromkeys((PREFILL, DECODE, FRONTEND), "running"), BENCHMARK: "waiting"}
    assert [worker["service"] for worker in view["workers"]] == [True, True, True, False]
    write_start_records(serving, BENCHMARK)
    assert states(read_view(serving))[BENCHMARK] == "running"


def test_the_benchmark_is_known_without_a_readable_plan(serving: Path) -> None:
    (serving / "plan.json").unlink()  # the same as a plan that only its owner may read
    missing = dict.fromkeys((PREFILL, DECODE, FRONTEND), "not_found")
    view = read_view(serving)
    assert (states(view), view["readiness"]) == ({**missing, BENCHMARK: "waiting"}, None)
    write_readiness(serving)
    assert read_view(serving)["readiness"]["waiting"] == "the model"


def test_no_task_is_waiting_in_a_job_that_does_not_run(serving: Path) -> None:
    write(serving / "orchestrator.json", orchestrator_record(pid=2**22 + 1))
    view = read_view(serving)
    assert (set(states(view).values()), view["state"]) == ({"not_found"}, "UNKNOWN")
    assert view["readiness"] is None


def test_readiness_names_the_missing_services(serving: Path) -> None:
    unknown: dict[str, Any] = {"ready": False, "since": None, "not_ready_since": 1000.0, "waiting": "", "workers": {}}
    assert read_view(serving)["readiness"] == unknown, "no answer yet"
    write_readiness(serving, attempt=1)
    assert read_view(serving)["readiness"] == unknown, "of another attempt"
    write_readiness(serving)
    workers = {"decode": {"ready": 0, "expected": 1}}
    assert read_view(serving)["readiness"] == {**unknown, "waiting": "the model", "workers": workers}
    write_readiness(serving, ready=True, since=1060.0, waiting="", seen={"decode": 1})
    assert read_view(serving)["readiness"] == {
        "ready": True,
        "since": 1060.0,
        "not_ready_since": None,
        "waiting": "",
        "workers": {"decode": {"ready": 1, "expected": 1}},
    }


def test_a_job_that_is_no_longer_ready_has_the_time_of_that_change(serving: Path) -> None:
    write_readiness(serving)
    run_files.write_job_state(str(serving), "running")

    def since(*events: tuple[float, str]) -> float | None:
        lines = [{"time": time, "job_id": "local-1", "event": name} for time, name in events]
        (serving / "events.jsonl").write_text(
            '1", "event": "ready"}\n' + "".join(f"{json.dumps(line)}\n" for line in lines)
        )
        found = read_view(serving)["readiness"]["not_ready_since"]
        return None if found is None else float(found)

    assert since((1060.0, "ready"), (1200.0, "not ready"), (1210.0, "worker started")) == 1200.0
    assert since((1060.0, "ready")) is None, "the orchestrator has not said so yet"
    assert since((900.0, "not ready")) is None, "that was the attempt before"


def test_a_job_without_services_waits_for_nothing(run_dir: Path) -> None:
    view = read_view(run_dir)
    assert (view["readiness"], view["pending_reason"]) == (None, None)
    assert not any(worker["service"] for worker in view["workers"])


@pytest.mark.parametrize("over", ["stop", "completing", "report"])
def test_an_ending_job_has_no_readiness(serving: Path, over: str) -> None:
    write_readiness(serving)
    assert read_view(serving)["readiness"] is not None
    if over == "report":
        write(serving / "report.json", as_json(build_report(serving, now=2000.0, ended=True)))
    else:
        stop: Any = (
            {"reason": "cancelled", "cause": "ctrl-c", "time": 1900.0, "kill_at": 1927.0} if over == "stop" else None
        )
        run_files.write_job_state(str(serving), "launching" if stop else "completing", stop)
    view = read_view(serving)
    assert view["readiness"] is None
    assert (view["stop"] or {}).get("kill_at") == (1927.0 if over == "stop" else None)


def test_a_pending_job_has_the_reason_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    client = JobClient(settled_run_dir(tmp_path, yaml.safe_load(SERVING), job_id="4459"))
    slurm.say("squeue", "out", "PENDING|Dependency\n")
    for _ in range(3):
        view = as_json(client.read_view())
    assert len(slurm.calls("squeue")) == 1
    assert (view["state"], view["pending_reason"]) == ("PENDING", "Dependency")
    assert set(states(view)) == {PREFILL, DECODE, FRONTEND, BENCHMARK}
    assert (view["readiness"]["ready"], view["readiness"]["not_ready_since"]) == (False, None)


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, FakeSlurm]:
    """A Slurm job of this user after its first attempt, and a fake queue."""
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    path = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]}, job_id="4459")
    monkeypatch.setenv("LOGNAME", read_manifest(path).user)
    write(path / "orchestrator.json", orchestrator_record(job_id="4459", local=False))
    record(path, "start", pid=1, start=1000.0)
    record(path, "exit", pid=1, start=1000.0, end=1900.0, code=None, signal=15, core=False, signals=[])
    run_files.write_job_state(str(path), "finished", {"reason": "time_limit", "cause": "late", "time": 1900.0})
    write(path / "status/here.json", {**status(up=False, exit={"reason": "time_limit"}), "attempt": 0})
    return path, slurm


def write_report(run_dir: Path, **facts: Any) -> dict[str, Any]:
    report = {**as_json(build_report(run_dir, now=2000.0, ended=True)), "requeued": False, **facts}
    write(run_dir / "report.json", report)
    return report


def test_a_requeued_job_is_shown_as_its_next_attempt(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    write_report(run_dir, requeued=True)
    slurm.say("squeue", "out", "PENDING|BeginTime\n")
    view = read_view(run_dir)
    assert [view[key] for key in ("state", "phase", "attempt", "pending_reason")] == [
        *("PENDING", "launching", 1, "BeginTime"),
    ]
    requeued = {"attempt": 0, "state": "TIMEOUT", "items": 5, "items_expected": 10, "unit": "items"}
    assert view["requeued"] == requeued
    assert (view["report"], view["cause"], view["start"], view["end"], view["items"]) == (None,) * 5
    (worker,) = view["workers"]
    assert (worker["up"], worker["exit"], worker["start"], worker["state"]) == (False, None, None, "not_found")
    picture = Console(width=140, file=io.StringIO(), color_system=None)
    picture.print(render_picture(JobView.from_json(view)))
    shown = picture.file.getvalue()  # type: ignore[attr-defined]
    text = "requeued (attempt 1 ended TIMEOUT at 5/10 items), waiting in the queue for attempt 2: BeginTime"
    assert text in shown
    assert "planned" in shown
    assert "!" not in shown


@pytest.mark.parametrize(
    ("answer", "requeued", "state"),
    [
        ("PENDING|Resources", False, "PENDING"),  # requeued by Slurm itself, for example after a preemption
        ("REQUEUE_HOLD|JobHeldAdmin", False, "PENDING"),
        ("RUNNING|None", False, "TIMEOUT"),  # its batch step ends
        ("RUNNING*1|None", False, "PENDING"),  # the next attempt starts
        ("COMPLETING|None", True, "PENDING"),
        ("", True, "TIMEOUT"),  # it was cancelled in the queue
        ("", False, "TIMEOUT"),
    ],
)
def test_the_queue_decides_whether_another_attempt_follows(
    queued: tuple[Path, FakeSlurm], answer: str, requeued: bool, state: str
) -> None:
    run_dir, slurm = queued
    write_report(run_dir, requeued=requeued)
    slurm.say("squeue", "out", f"{answer}\n")
    view = read_view(run_dir)
    assert (view["state"], view["report"] is None) == (state, state == "PENDING")


@pytest.mark.parametrize(
    ("answer", "facts", "is_pending"),
    [
        ("PENDING|Resources", {"state": "PREEMPTED"}, True),
        ("RUNNING*1|None", {"state": "NODE_FAIL"}, True),
        ("REQUEUE_HOLD|JobHeldAdmin", {"stopped": {"reason": "cancelled", "cause": REQUEUED[1], "time": 1.0}}, True),
        ("COMPLETING|None", {"requeued": True}, True),
        ("RUNNING|None", {"state": "PREEMPTED"}, False),
        ("", {"requeued": True}, False),
    ],
)
def test_the_queue_decides_whether_a_report_is_the_last_one(
    queued: tuple[Path, FakeSlurm], answer: str, facts: dict[str, Any], is_pending: bool
) -> None:
    run_dir, slurm = queued
    state = write_report(run_dir, **facts)["state"]
    slurm.say("squeue", "out", f"{answer}\n")
    report = JobClient(run_dir).report()
    assert (report.state, report.attempt) == (("PENDING", 1) if is_pending else (state, 0))
    if is_pending:
        assert (report.exit_status, report.why) == (10, (f"requeued, after attempt 1 ended as {state}",))
        assert (report.items, report.cause, report.stopped) == (None, None, None)


def test_slurm_is_not_asked_for_the_report_of_a_job_that_has_ended_for_good(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    write_report(run_dir)
    slurm.say("squeue", "out", "PENDING|Resources\n")  # another job has this number now
    report = JobClient(run_dir).report()
    assert (report.state, report.exit_status, report.attempt) == ("TIMEOUT", 3, 0)
    assert not slurm.calls("squeue")


def test_a_requeued_job_without_a_report_is_pending(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    slurm.say("squeue", "out", "PENDING|BeginTime\n")
    client = JobClient(run_dir)
    view = as_json(client.read_view())
    assert (view["state"], view["attempt"], view["requeued"]["state"]) == ("PENDING", 1, None)
    assert client.report().state == "PENDING"


def test_the_queue_is_queried_again_when_a_report_appears(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    slurm.say("squeue", "out", "RUNNING|None\n")
    client = JobClient(run_dir)
    assert client.read_view().state == "RUNNING"
    write_report(run_dir)
    slurm.say("squeue", "out", "PENDING|Resources\n")
    assert [client.read_view().state for _ in range(3)] == ["PENDING"] * 3
    assert len(slurm.calls("squeue")) == 2


@pytest.mark.parametrize(("answer", "eta_s"), [("RUNNING", 60.0), ("SUSPENDED", None)])
def test_a_suspended_job_has_no_eta(queued: tuple[Path, FakeSlurm], answer: str, eta_s: float | None) -> None:
    run_dir, slurm = queued
    slurm.say("squeue", "out", f"{answer}|None\n")
    run_files.write_job_state(str(run_dir), "running")
    for ended in (run_dir / "workers").glob("*.exit.json"):
        ended.unlink()
    eta = {"seconds": 60.0, "low": 50.0, "high": 80.0}
    write(run_dir / "status/here.json", {**status(up=True, eta=eta), "attempt": 0})
    view = JobClient(run_dir).read_view()
    assert (view.state, view.suspended) == ("RUNNING", eta_s is None)
    assert (view.eta and view.eta.seconds) == eta_s


def test_a_job_that_was_cancelled_in_the_queue_is_cancelled(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    for name in ("orchestrator.json", "state.json"):
        (run_dir / name).unlink()
    slurm.say("squeue", "out", "\n")
    view = JobClient(run_dir).read_view()
    assert (view.state, view.unknown_reason) == ("UNKNOWN", "Slurm no longer lists the job, which has never started")
    slurm.say("scontrol", "job", "JobState=CANCELLED Reason=None\n")
    view = JobClient(run_dir).read_view()
    assert (view.state, view.unknown_reason, view.report and view.report.exit_status) == ("CANCELLED", None, 5)


def test_a_lost_job_takes_no_longer_with_every_look(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    run_files.write_json(run_dir / "state.json", {"phase": "running", "time": 1950.0})
    slurm.say("squeue", "out", "\n")
    slurm.say("scontrol", "job", "JobState=NODE_FAIL Reason=None\n")
    report, view = JobClient(run_dir).report(), JobClient(run_dir).read_view()
    assert (report.state, report.start, report.end, report.duration_s) == ("NODE_FAIL", 1000.0, 2000.0, 1000.0)
    assert view.end == 2000.0, "its last status"


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ({"signal": 9, "oom_kills": 1}, "OUT_OF_MEMORY", "host_oom"),
        ({"code": 3}, "FAILED", "app_error"),  # it counts first, as in every report
        ({"code": 0}, "COMPLETED", None),  # the rest of the job needed more memory
        (None, "OUT_OF_MEMORY", None),
    ],
)
def test_slurm_knows_that_a_lost_job_was_out_of_memory(
    queued: tuple[Path, FakeSlurm], end: dict[str, Any] | None, state: str, reason: str | None
) -> None:
    run_dir, slurm = queued
    run_files.write_json(run_dir / "state.json", {"phase": "running", "time": 1950.0})
    (exit_record,) = run_dir.glob("workers/*.exit.json")
    exit_record.unlink()
    (run_dir / "status/here.json").unlink()
    if end is not None:
        facts: dict[str, Any] = {"code": None, "signal": None, **end}
        record(run_dir, "exit", pid=1, start=1000.0, end=1900.0, core=False, signals=[], **facts)
    slurm.say("squeue", "out", "\n")
    slurm.say("scontrol", "job", "JobState=OUT_OF_MEMORY Reason=OutOfMemory\n")
    report = JobClient(run_dir).report()
    assert (report.state, report.cause and report.cause.reason) == (state, reason)
    assert JobClient(run_dir).read_view().state == state


def test_a_newly_started_job_is_not_requeued(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    (run_dir / "orchestrator.json").unlink()
    slurm.say("squeue", "out", "PENDING|Resources\n")
    client = JobClient(run_dir)
    assert [client.read_view().state for _ in range(2)] == ["PENDING"] * 2
    assert len(slurm.calls("squeue")) == 1
    slurm.say("squeue", "out", "RUNNING|None\n")
    write(run_dir / "orchestrator.json", orchestrator_record(job_id="4459", local=False))
    views = [as_json(client.read_view()) for _ in range(3)]
    assert [(view["state"], view["attempt"], view["requeued"]) for view in views] == [("RUNNING", 0, None)] * 3
    assert len(slurm.calls("squeue")) == 2


@pytest.mark.parametrize("change", [{"attempt": 1}, {"start": 2000.0}, {"pid": 1}])
def test_the_queue_is_queried_again_for_another_orchestrator(
    change: dict[str, Any], queued: tuple[Path, FakeSlurm]
) -> None:
    run_dir, slurm = queued
    slurm.say("squeue", "out", "PENDING|BeginTime\n")
    client = JobClient(run_dir)
    assert client.read_view().state == "PENDING"
    slurm.say("squeue", "out", "RUNNING|None\n")
    write(run_dir / "orchestrator.json", orchestrator_record(**{"job_id": "4459", "local": False, **change}))
    assert [client.read_view().state for _ in range(2)] == ["RUNNING"] * 2
    assert len(slurm.calls("squeue")) == 2


def test_the_next_attempt_is_running_when_its_orchestrator_started(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    write_report(run_dir, requeued=True)
    write(run_dir / "orchestrator.json", orchestrator_record(job_id="4459", local=False, attempt=1))
    slurm.say("squeue", "out", "RUNNING|None\n")
    view = read_view(run_dir)
    assert (view["state"], view["attempt"], view["requeued"]) == ("RUNNING", 1, None)
    assert (view["phase"], view["stop"]) == ("launching", None), "those of the attempt before are not its own"
    assert JobClient(run_dir).report().stopped is None


def test_a_time_limit_that_was_changed_is_shown(queued: tuple[Path, FakeSlurm]) -> None:
    run_dir, slurm = queued
    start = time.time() - 600.0
    write(run_dir / "orchestrator.json", orchestrator_record(job_id="4459", local=False, attempt=1, start=start))
    slurm.say("squeue", "out", "RUNNING|None\n")
    run_files.write_job_state(str(run_dir), "running", attempt=1, time_limit_end=start + 9000.0)
    view = read_view(run_dir)
    assert (view["limit_end"], view["time_limit_s"]) == (start + 9000.0, 9000.0)


def test_a_time_limit_that_the_site_lowered_at_the_submission_is_shown(run_dir: Path) -> None:
    manifest = json.loads((run_dir / "manifest.json").read_text())
    write(run_dir / "manifest.json", {**manifest, "time_limit_s": 14400.0})
    job = {"phase": "running", "job_id": "7", "end": 9000.0, "time_limit_s": 7200.0}
    write(run_dir / "status/here.json", {**status(), "attempt": 0, "job": job})
    view = read_view(run_dir)
    assert (view["limit_end"], view["time_limit_s"]) == (9000.0, 7200.0)


def test_a_job_of_another_user_that_slurm_hides_runs_while_its_sidecars_report(
    queued: tuple[Path, FakeSlurm],
) -> None:
    run_dir, slurm = queued
    slurm.say("squeue", "out", "")
    slurm.say("scontrol", "config", "ClusterName = c1\nPrivateData = jobs,usage\n")
    write(run_dir / "status/here.json", {**status(), "time": time.time()})
    assert read_view(run_dir)["state"] == "UNKNOWN", "of one's own jobs the queue has all"
    manifest = json.loads((run_dir / "manifest.json").read_text())
    write(run_dir / "manifest.json", {**manifest, "user": "bob"})
    client = JobClient(run_dir)
    assert [client.read_state() for _ in range(3)] == ["RUNNING"] * 3
    # for the end of one's own, above; whether jobs are hidden; once in a while whether this one has ended
    assert len(slurm.calls("scontrol")) == 1 + 1 + 1
    write(run_dir / "status/here.json", {**status(), "time": time.time() - 60.0})
    assert (client.read_state(), client.read_view().unknown_reason) == (
        "UNKNOWN",
        "Slurm does not show jobs of others here (PrivateData), and no sidecar writes its status",
    )
    write_report(run_dir, requeued=True)
    assert JobClient(run_dir).read_state() == "PENDING", "it may wait in the queue"
    for name in ("report.json", "orchestrator.json"):
        (run_dir / name).unlink()
    assert JobClient(run_dir).read_state() == "PENDING"
    slurm.say("scontrol", "job", "JobId=4459 JobState=CANCELLED Reason=None\n")
    client = JobClient(run_dir)
    assert (client.read_state(), client.report().state in UNFINISHED) == ("UNKNOWN", False)
    slurm.say("scontrol", "job", "")
    slurm.say("scontrol", "config", "ClusterName = c1\nPrivateData = none\n")
    assert JobClient(run_dir).read_state() == "UNKNOWN", "it has left a queue that shows all jobs"


def test_a_watched_job_outlives_the_moment_in_which_its_process_is_replaced(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = JobClient(run_dir)
    assert watching.read_state() == "RUNNING"
    write(run_dir / "orchestrator.json", orchestrator_record(start_ticks=1))  # no such process
    assert [watching.read_state() for _ in range(3)] == ["RUNNING"] * 3
    assert JobClient(run_dir).read_state() == "UNKNOWN"
    monkeypatch.setattr(view_module, "SUCCESSOR_S", 0.0)
    assert watching.read_state() == "UNKNOWN"
