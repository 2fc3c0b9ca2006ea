"""GPUs in the report of a job, from run directories made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.report import render_report
from tests.gpu_status import GIB, XID_79, XID_NOISE, gpu, gpus, of_worker, use
from tests.launcher.conftest import Golden
from tests.launcher.test_report import START, RunDir, _utc  # noqa: F401 - a fixture


def told(run_dir: RunDir, node: dict[str, Any], *entries: dict[str, Any]) -> RunDir:
    """Let the sidecar have written this of the job's GPUs."""
    workers = [{"rank": rank, **entry} for rank, entry in enumerate(entries)]
    status = {"attempt": 0, "final": True, "gpus": node, "workers": workers}
    (run_dir.path / "status/cn01.json").write_text(json.dumps(status))
    return run_dir


def a_job(folder: Path) -> RunDir:
    """A job of two workers of which one uses the other's GPU too."""
    node = gpus(
        gpu(0, utilization_mean_ratio=0.92, memory_peak_bytes=120 * GIB, energy_job_j=40e6),
        gpu(1, utilization_mean_ratio=0.5, energy_job_j=4.3e6, xids=[{**XID_79, "time": START + 40}, XID_NOISE]),
        health="failure",
        reasons=[{"gpu": "1", "severity": "failure", "words": "it fell | off\nthe bus"}],
    )
    wrong = of_worker(1, gpu_use=[use(0, attribution="inferred")], gpu_misplaced="uses GPU 0 of worker_w0")
    return told(RunDir(folder).ended(0).ended(1, code=3), node, of_worker(0), wrong)


@pytest.mark.usefixtures("_utc")
def test_the_report_of_a_job_with_gpus_is_the_golden_one(tmp_path: Path, golden: Golden) -> None:
    golden("launcher/report-gpus.md", render_report(a_job(tmp_path).report()))


def test_the_report_for_programs_has_sums_and_each_gpu(tmp_path: Path) -> None:
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
    report = told(RunDir(tmp_path).ended(0).ended(1), {}, {}, {}).report()
    assert (report["gpus"], report["workers"][0]["gpu_devices"]) == (None, [])
    assert "GPU" not in render_report(report)


def test_a_report_that_was_written_without_gpus_can_still_be_shown(tmp_path: Path) -> None:
    report = a_job(tmp_path).report()
    del report["gpus"]
    for worker in report["workers"]:
        del worker["gpu_devices"], worker["gpu_misplaced"]
    assert "GPU" not in render_report(report)


def test_gpus_that_could_not_be_read_are_said_to_be_so(tmp_path: Path) -> None:
    blind = gpus(driver_state="no_driver", words="Driver Not Loaded", allocated=2, health=None)
    text = render_report(told(RunDir(tmp_path).ended(0).ended(1), blind, of_worker(gpu_use=None)).report())
    assert "\n- GPUs: could not be read on cn01 (no_driver)\n" in text
    assert "\n| cn01 | none seen | - | - | - | no_driver |\n" in text
    assert "\n- cn01: GPUs could not be read (no_driver): Driver Not Loaded\n" in text
    assert "GPUs of workers" not in text


def test_of_a_gpu_that_nobody_could_see_it_is_not_said_whether_it_was_used(tmp_path: Path) -> None:
    text = render_report(told(RunDir(tmp_path).ended(0).ended(1), gpus(gpu(0)), of_worker(1, gpu_use=[])).report())
    assert "\n| worker_w0 | cn01 | - | GPU-01 | yes | - |\n" in text
    assert "all 1" not in text
