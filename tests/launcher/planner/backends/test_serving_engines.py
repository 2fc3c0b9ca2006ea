"""A local serving job with stand-in engines, virtual nodes and a real nginx."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.serving import (
    ENOUGH,
    RESULTS,
    fetch,
    place_stand_ins,
    readiness_lines,
    results,
    series,
    serving_job,
)
from tests.support.launcher import LocalJob, poll, read_events

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")

WAIT_S = 120.0


def serve(folder: Path, **parts: Any) -> LocalJob:
    """Start a serving job in this folder."""
    place_stand_ins(folder)
    return LocalJob(folder, serving_job(folder, **parts))


def targets(job: LocalJob, role: str) -> dict[str, tuple[str, str]]:
    """Metrics address and path of each worker of a role, from the target file."""
    groups = json.loads((job.run_dir / "targets.json").read_text())
    engines = [group for group in groups if group["labels"]["job"] == "gpujob-engine"]
    return {
        group["labels"]["worker"]: (group["targets"][0], group["labels"]["__metrics_path__"])
        for group in engines
        if group["labels"]["role"] == role
    }


def first_page(job: LocalJob) -> str:
    """Metrics page of the sidecar on the first node."""
    host = job.json("orchestrator.json")["hosts"][0]
    return fetch(job.json(f"sidecars/{host}.json")["address"], "/metrics")[1]


def ready_series(job: LocalJob) -> dict[tuple[str, str], float]:
    found = series(first_page(job), "gpujob_ready")
    return {key: value for key, value in found.items() if "seconds" not in key[0]}


def test_a_benchmark_runs_through_nginx_routers_prefill_and_decode(tmp_path: Path) -> None:
    with serve(tmp_path, prefill=2, decode=1) as job:
        assert job.wait(WAIT_S) == 0, job.output + job.log()
        report, run_dir = job.report(), job.run_dir
    assert (report["state"], report["stopped"]["cause"]) == ("COMPLETED", "the benchmark has completed")
    assert run_dir.name.partition("_")[2].startswith("2P_1D_")
    port = 8000 + job.json("orchestrator.json")["port_offset"]
    polling, *lines, last = readiness_lines(run_dir)
    assert polling.startswith("Polling http://127.0.0.1:")
    waiting = re.compile(r"Model is not ready, waiting for [012] prefills and [01] decodes(?: and \w+)* to spin up\.")
    assert all(waiting.fullmatch(line) for line in lines), lines
    assert last == "Model is ready. Have 2 prefills and 1 decodes."
    benchmark = (run_dir / "benchmark.out").read_text()
    assert f"endpoint=http://127.0.0.1:{port};" in benchmark
    assert benchmark.index("Model is ready.") < benchmark.index("Warming up model with concurrency 2")
    done = {f"isl_32_osl_16_concurrency_{count}_req_rate_inf.json": 4 * count for count in (2, 4)}
    assert results(run_dir) == done
    assert RESULTS in {path.name for path in run_dir.iterdir()}
    assert f"Frontend available at: http://127.0.0.1:{port}" in job.log()
    assert [event["stage"] for event in read_events(run_dir, "stage started")] == [
        *("workers", "frontends", "balancer", "benchmark"),
    ]
    for worker, text in (("prefill_w0", "Prefill batch"), ("prefill_w1", "Prefill batch"), ("decode_w0", "Decode b")):
        (log,) = run_dir.glob(f"*_{worker}.err")
        assert text in log.read_text(), log
    assert {worker["exit"]["reason"] for worker in report["workers"]} == {"completed"}
    assert job.left_over() == {}


def test_two_serving_jobs_have_readiness_series_targets_and_their_own_ports(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with serve(folders[0], prefill=2, decode=1, repeat=True) as first:
        poll(lambda: first.json("state.json").get("phase") == "running", f"running: {first.run_dir}", WAIT_S)
        expected = {("gpujob_ready", ""): 1.0}
        for role, count in (("prefill", 2.0), ("decode", 1.0)):
            expected |= {(f"gpujob_ready_workers{kind}", role): count for kind in ("", "_expected")}
        poll(lambda: ready_series(first) == expected, f"series of {first.run_dir}", WAIT_S)

        def engines() -> dict[str, tuple[str, str]]:
            return targets(first, "prefill") | targets(first, "decode")

        poll(lambda: sorted(engines()) == ["decode_w0", "prefill_w0", "prefill_w1"], "targets", WAIT_S)
        found = engines()
        assert len({address for address, _ in found.values()}) == 3, "each has its own port on this machine"
        for address, path in found.values():
            status, text = fetch(address, path)
            assert (status, "sglang:num_running_reqs" in text) == (200, True)
        with serve(folders[1], prefill=1, decode=1) as second:
            assert second.wait(WAIT_S) == 0, second.output + second.log()
        (folders[0] / ENOUGH).touch()
        assert first.wait(WAIT_S) == 0, first.output + first.log()
    assert [job.report()["state"] for job in (first, second)] == ["COMPLETED"] * 2
    assert not ports_of(first) & ports_of(second)


def ports_of(job: LocalJob) -> set[int]:
    """Ports of all tasks of a job."""
    offset = job.json("orchestrator.json")["port_offset"]
    return {port + offset for entry in job.json("plan.json")["tasks"] for port in entry["ports"].values()}
