"""GPUs in the report of a job, built from hand-written run directories."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.conftest import Golden
from tests.support.builders import START, RunDir, rendered
from tests.support.gpu_status import GIB, XID_79, XID_NOISE, gpu, gpus, of_worker, use


def with_status(run_dir: RunDir, node: dict[str, Any], *entries: dict[str, Any]) -> RunDir:
    """Write a final status with these GPUs."""
    return run_dir.status(
        *({"rank": rank, **entry} for rank, entry in enumerate(entries)),
        final=True,
        gpus=node,
    )


def with_events(run_dir: RunDir, *events: dict[str, Any], after: float = 70.0) -> RunDir:
    """Write these events, `after` seconds after the start."""
    with (run_dir.path / "events.jsonl").open("a") as out:
        for event in events:
            out.write(json.dumps({"time": START + after, "job_id": "1", "node": "cn01", **event}) + "\n")
    return run_dir


def a_job(folder: Path) -> RunDir:
    """A job with two workers. One also uses the GPU of the other."""
    node = gpus(
        gpu(0, utilization_mean_ratio=0.92, memory_peak_bytes=120 * GIB, energy_job_j=40e6),
        gpu(
            1,
            utilization_mean_ratio=0.5,
            seen_s=200.0,
            idle_s=78.0,
            energy_job_j=4.3e6,
            xids=[{**XID_79, "time": START + 40}, XID_NOISE],
        ),
        health="failure",
        reasons=[{"gpu": "1", "severity": "failure", "words": "it fell | off\nthe bus"}],
    )
    wrong = of_worker(1, gpu_use=[use(0, attribution="inferred")], gpu_misplaced="uses GPU 0 of worker_w0")
    run_dir = with_status(RunDir(folder).ended(0).ended(1, code=3), node, of_worker(0), wrong)
    return with_events(
        run_dir,
        {"happened": START + 40.0, "level": "critical", "event": "GPU Xid", "detail": "GPU 1: Xid 79"},
        {"happened": START + 41.0, "level": "critical", "event": "GPU lost", "detail": "GPU 1: it fell | off\nthe bus"},
        {"happened": START + 42.0, "level": "info", "event": "GPU Xid", "detail": "GPU 1: Xid 43"},
        {"happened": START + 60.0, "level": "info", "event": "GPU works again", "detail": "GPU 1"},
        {"happened": START + 50.0, "level": "warning", "event": "GPU misplaced", "worker": "worker_w1",
         "detail": "uses GPU 0 of worker_w0"},
    )  # fmt: skip


LOST: dict[str, Any] = {"level": "critical", "event": "GPU lost", "detail": "GPU 1"}


def completed_job(folder: Path, node: dict[str, Any], *entries: dict[str, Any]) -> RunDir:
    """A completed job with two workers."""
    return with_status(RunDir(folder).ended(0).ended(1), node, *entries)


def test_gpu_events_are_those_of_this_attempt(tmp_path: Path) -> None:
    run_dir = with_events(completed_job(tmp_path, gpus(gpu(0))), {**LOST, "detail": "earlier"}, after=-5.0)
    with (run_dir.path / "events.jsonl").open("a") as out:
        out.write('{"event": "GPU lost", "ti\n["GPU lost"]\n{"event": "GPU lost"}\n')
    assert run_dir.report()["gpus"]["events"] == []
    assert "GPU events" not in rendered(run_dir.report())
    report = with_events(run_dir, {**LOST, "happened": START + 3.0}).report()
    assert [(event["time"], event["event"], event["detail"]) for event in report["gpus"]["events"]] == [
        (START + 3.0, "GPU lost", "GPU 1")
    ]


def test_only_some_of_many_gpu_events_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    run_dir = with_events(completed_job(tmp_path, gpus(gpu(0))), *({**LOST, "detail": f"the {n}th"} for n in range(23)))
    text = rendered(run_dir.report())
    assert text.count("GPU lost: the ") == 20
    assert text.count("\n- and 3 more, in events.jsonl\n") == 1


def test_a_gpu_is_ok_only_without_health_reasons(tmp_path: Path) -> None:
    reasons = [
        {"gpu": "1", "severity": "failure", "words": "Xid 79"},
        {"gpu": "1", "severity": "warning", "words": "hot"},
        {"gpu": "2", "severity": "failure", "words": "it is gone"},
        {"gpu": None, "severity": "warning", "words": "the driver was replaced"},
        {"gpu": "5", "severity": "failure", "words": "not shown"},
    ]
    node = gpus(gpu(0), gpu(1), gpu(2, state="lost"), health="failure", reasons=reasons)
    text = rendered(completed_job(tmp_path, node).report())
    rows = [line.rpartition("kWh | ")[2] for line in text.splitlines() if line.startswith("| cn01 |")]
    assert rows == ["failure |", "ok |", "failure: Xid 79; warning: hot |", "lost; failure: it is gone |"]
    assert "\n- cn01: warning: the driver was replaced\n- cn01: failure: GPU 5: not shown\n" in text
    assert text.count("Xid 79") == 1


def test_mig_instances_are_counted_and_energy_is_that_of_the_whole_gpu(tmp_path: Path) -> None:
    part = {"energy_job_j": None, "name": "NVIDIA H200 MIG 1g.18gb"}
    text = rendered(completed_job(tmp_path, gpus(gpu(0), gpu("0:0", **part), gpu("0:1", **part))).report())
    assert "\n- GPUs: 2 x NVIDIA H200 MIG 1g.18gb, 90 % busy, 1.0 kWh (whole GPU)\n" in text
    assert "\n| cn01 | all 2 | 90 % | 30.0 GiB | 1.0 kWh (whole GPU) | healthy |\n" in text
    assert "\n| cn01 | 0 | 90 % | 30.0 of 141 GiB | 1.0 kWh (whole GPU) | ok |\n" in text
    assert "\n| cn01 | 0:1 | 90 % | 30.0 of 141 GiB | - | ok |\n" in text


def test_missing_gpus_of_the_plan_are_reported(tmp_path: Path) -> None:
    text = rendered(completed_job(tmp_path, gpus(gpu(0), allocated=2), of_worker(0, gpu_missing=["7"])).report())
    assert "\n- cn01: the plan needs 2 GPUs and the driver shows 1\n" in text
    assert "\n| worker_w0 | cn01 | 7 | - | yes | missing |\n" in text


@pytest.mark.usefixtures("utc")
def test_the_report_of_a_job_with_gpus_matches_the_golden_page(tmp_path: Path, golden: Golden) -> None:
    golden("launcher/report-gpus.md", rendered(a_job(tmp_path).report()))


def test_the_json_report_has_totals_and_each_gpu(tmp_path: Path) -> None:
    found = a_job(tmp_path).report()["gpus"]
    assert (found["count"], found["names"], found["energy_j"]) == (2, {"NVIDIA H200": 2}, 44.3e6)
    assert (found["utilization_mean_ratio"], found["memory_peak_bytes"]) == (pytest.approx(0.71), 120 * GIB)
    (node,) = found["nodes"]
    assert (node["node"], node["health"], node["driver"], node["energy_j"]) == ("cn01", "failure", "570.86.15", 44.3e6)
    assert [device["uuid"] for device in node["gpus"]] == ["GPU-00", "GPU-01"]
    assert node["gpus"][1]["xids"][0]["xid"] == 79


def test_each_worker_has_its_planned_and_its_used_gpus(tmp_path: Path) -> None:
    right, wrong = a_job(tmp_path).report()["workers"]
    assert [(device["gpu"], device["planned"], device["used"]) for device in right["gpu_devices"]] == [
        ("0", True, True)
    ]
    assert [(device["gpu"], device["planned"], device["used"]) for device in wrong["gpu_devices"]] == [
        ("1", True, False),
        ("0", False, True),
    ]
    assert (right["gpu_misplaced"], wrong["gpu_misplaced"]) == (None, "uses GPU 0 of worker_w0")


def test_a_job_without_gpus_has_none_in_its_report(tmp_path: Path) -> None:
    report = completed_job(tmp_path, {}, {}, {}).report()
    assert (report["gpus"], report["workers"][0]["gpu_devices"]) == (None, [])
    assert "GPU" not in rendered(report)


def test_an_old_report_without_gpus_is_rendered(tmp_path: Path) -> None:
    report = a_job(tmp_path).report()
    del report["gpus"]["events"], report["gpus"]["events_total"]
    assert "GPU events" not in rendered(report)
    del report["gpus"]
    for worker in report["workers"]:
        del worker["gpu_devices"], worker["gpu_misplaced"]
    assert "GPU" not in rendered(report)


def test_unreadable_gpus_are_reported(tmp_path: Path) -> None:
    blind = gpus(driver_state="no_driver", words="Driver Not Loaded", allocated=2, health=None)
    text = rendered(completed_job(tmp_path, blind, of_worker(gpu_use=None)).report())
    assert "\n- GPUs: could not be read on cn01 (no_driver)\n" in text
    assert "\n| cn01 | none seen | - | - | - | no_driver |\n" in text
    assert "\n- cn01: GPUs could not be read (no_driver): Driver Not Loaded\n" in text
    assert "GPUs of workers" not in text


def test_use_of_an_invisible_gpu_is_unknown(tmp_path: Path) -> None:
    text = rendered(completed_job(tmp_path, gpus(gpu(0)), of_worker(1, gpu_use=[])).report())
    assert "\n| worker_w0 | cn01 | - | GPU-01 | yes | - |\n" in text
    assert "all 1" not in text
