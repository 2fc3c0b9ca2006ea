"""A real Alertmanager with the shipped configuration inhibits exactly the intended alerts."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

CONFIG = Path(__file__).resolve().parents[2] / "alertmanager" / "alertmanager.yml"
PROGRAM = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")
START_S = SETTLE_S = 60

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(PROGRAM is None, reason="alertmanager is not installed"),
]


class Alertmanager:
    """The HTTP interface of a running Alertmanager."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2):
                return True
        except OSError:
            return False

    def post(self, *alerts: dict[str, str]) -> None:
        """Report alerts with these labels as firing."""
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        request = urllib.request.Request(
            f"{self._url}/api/v2/alerts", body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=START_S):
            pass

    def inhibited(self) -> dict[tuple[str, str], bool]:
        """Whether each alert is inhibited, by name and job."""
        with urllib.request.urlopen(f"{self._url}/api/v2/alerts", timeout=START_S) as answer:
            alerts: list[dict[str, Any]] = json.load(answer)
        found = {}
        for alert in alerts:
            labels, inhibitors = alert["labels"], alert["status"]["inhibitedBy"]
            found[labels["alertname"], labels.get("job_id", "")] = bool(inhibitors)
        return found


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    assert PROGRAM is not None
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            PROGRAM,
            f"--config.file={CONFIG}",
            f"--storage.path={tmp_path}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        server = Alertmanager(f"http://{address}")
        deadline = time.monotonic() + START_S
        while not server.ready():
            assert process.poll() is None, "Alertmanager ended"
            assert time.monotonic() < deadline, "Alertmanager does not get ready"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(START_S)
        process.kill()
        process.wait()


def job_alert(name: str, job_id: str, **labels: str) -> dict[str, str]:
    """Labels of an alert of one job."""
    labels = {"user": "ada", "severity": "critical"} | labels
    return {"alertname": name, "cluster": "c1", "job_id": job_id, **labels}


def wait_for_inhibition(
    alertmanager: Alertmanager, expected: dict[tuple[str, str], bool]
) -> dict[tuple[str, str], bool]:
    """Wait until inhibition is as expected, at most `SETTLE_S`; return it."""
    deadline = time.monotonic() + SETTLE_S
    while alertmanager.inhibited() != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return alertmanager.inhibited()


def test_another_user_with_the_job_id_inhibits_nothing(alertmanager: Alertmanager) -> None:
    alertmanager.post(
        job_alert("GpuJobWorkerKilled", "7", user="mallory", worker="w1", node="n1"),
        job_alert("GpuJobWorkersLost", "7", node="n1"),
        job_alert("GpuJobWorkerKilled", "8", worker="w1", node="n1"),
        job_alert("GpuJobWorkersLost", "8", node="n1"),
    )
    expected = {(name, job): False for name in ("GpuJobWorkerKilled", "GpuJobWorkersLost") for job in "78"}
    expected["GpuJobWorkersLost", "8"] = True
    assert wait_for_inhibition(alertmanager, expected) == expected


@pytest.mark.parametrize("failure", ["GpuJobWorkerKilled", "GpuJobWorkerCrashed", "GpuJobWorkerOutOfMemory"])
def test_a_worker_failure_inhibits_its_consequences_in_its_own_job(alertmanager: Alertmanager, failure: str) -> None:
    nameless = {"cluster": "c1", "severity": "critical"}
    alertmanager.post(
        job_alert(failure, "7", worker="w1", node="n1"),
        job_alert("GpuJobWorkersLost", "7", node="n1"),
        job_alert("GpuJobNoProgress", "7", worker="w0", node="n2"),
        job_alert("GpuJobDiskLow", "7", group="output"),
        job_alert("GpuJobWorkersLost", "8", node="n1"),
        job_alert("GpuJobNoProgress", "8", worker="w0", node="n1"),
        {"alertname": failure, **nameless},
        {"alertname": "GpuJobNoProgress", **nameless},
    )
    expected = {
        (failure, "7"): False,
        ("GpuJobWorkersLost", "7"): True,
        ("GpuJobNoProgress", "7"): True,
        ("GpuJobDiskLow", "7"): False,
        ("GpuJobWorkersLost", "8"): False,
        ("GpuJobNoProgress", "8"): False,
        (failure, ""): False,
        ("GpuJobNoProgress", ""): False,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected


@pytest.mark.parametrize("gpu_fault", ["GpuJobGpuLost", "GpuJobGpuXidCritical"])
def test_a_gpu_fault_inhibits_its_consequences_in_its_own_job(alertmanager: Alertmanager, gpu_fault: str) -> None:
    alertmanager.post(
        job_alert(gpu_fault, "7", node="n1"),
        job_alert("GpuJobGpuUnhealthy", "7", node="n1"),
        job_alert("GpuJobGpuHang", "7"),
        job_alert("GpuJobGpuIdle", "7"),
        job_alert("GpuJobNoProgress", "7", worker="w0", node="n2"),
        job_alert("GpuJobWorkersLost", "7", node="n1"),
        job_alert("GpuJobWorkerCrashed", "7", worker="w1", node="n1"),
        job_alert("GpuJobGpuHang", "8"),
        job_alert("GpuJobGpuUnhealthy", "8", node="n1"),
    )
    expected = {
        (gpu_fault, "7"): False,
        ("GpuJobGpuUnhealthy", "7"): True,
        ("GpuJobGpuHang", "7"): True,
        ("GpuJobGpuIdle", "7"): True,
        ("GpuJobNoProgress", "7"): True,
        ("GpuJobWorkersLost", "7"): True,
        ("GpuJobWorkerCrashed", "7"): False,
        ("GpuJobGpuHang", "8"): False,
        ("GpuJobGpuUnhealthy", "8"): False,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected


def test_a_lost_gpu_does_not_inhibit_alerts_of_another_node(alertmanager: Alertmanager) -> None:
    alertmanager.post(
        job_alert("GpuJobGpuLost", "7", node="n1"),
        job_alert("GpuJobGpuUnhealthy", "7", node="n2"),
        job_alert("GpuJobNoProgress", "7", node="n2", worker="w0"),
    )
    expected = {
        ("GpuJobGpuLost", "7"): False,
        ("GpuJobGpuUnhealthy", "7"): False,
        ("GpuJobNoProgress", "7"): True,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected


def test_a_hang_inhibits_the_alert_on_missing_progress(alertmanager: Alertmanager) -> None:
    alertmanager.post(
        job_alert("GpuJobGpuHang", "7"),
        job_alert("GpuJobNoProgress", "7", worker="w0", node="n2"),
        job_alert("GpuJobGpuSlow", "7"),
    )
    expected = {
        ("GpuJobGpuHang", "7"): False,
        ("GpuJobNoProgress", "7"): True,
        ("GpuJobGpuSlow", "7"): False,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected


def test_a_hanging_file_system_inhibits_the_collectors_that_wait_for_it(alertmanager: Alertmanager) -> None:
    alertmanager.post(
        job_alert("GpuJobFilesystemHangs", "7", group="run"),
        job_alert("GpuJobCollectorFailing", "7", node="n1", collector="workers"),
        job_alert("GpuJobGpuUnreadable", "7", node="n1"),
        job_alert("GpuJobCollectorFailing", "8", node="n1", collector="workers"),
    )
    expected = {
        ("GpuJobFilesystemHangs", "7"): False,
        ("GpuJobCollectorFailing", "7"): True,
        ("GpuJobGpuUnreadable", "7"): False,
        ("GpuJobCollectorFailing", "8"): False,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected


def test_a_certain_time_limit_inhibits_the_predicted_one(alertmanager: Alertmanager) -> None:
    alertmanager.post(
        job_alert("GpuJobTimeLimitCertain", "7"),
        job_alert("GpuJobTimeLimitPredicted", "7"),
        job_alert("GpuJobTimeLimitPredicted", "8"),
    )
    expected = {
        ("GpuJobTimeLimitCertain", "7"): False,
        ("GpuJobTimeLimitPredicted", "7"): True,
        ("GpuJobTimeLimitPredicted", "8"): False,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected


@pytest.mark.parametrize("end", ["GpuJobFailed", "GpuJobTimedOut", "GpuJobNodeFailed"])
def test_the_end_of_a_job_inhibits_its_symptoms_but_not_their_cause(alertmanager: Alertmanager, end: str) -> None:
    alertmanager.post(
        job_alert(end, "7"),
        job_alert("GpuJobWorkersLost", "7", node="n1"),
        job_alert("GpuJobNodeSidecarDown", "7", node="n1"),
        job_alert("GpuJobTimeLimitCertain", "7"),
        job_alert("GpuJobGpuLost", "7", node="n1"),
        job_alert("GpuJobOutputInvalid", "7"),
        job_alert("GpuJobFailed", "8"),
        job_alert("GpuJobWorkerCrashed", "8", worker="w1", node="n1"),
    )
    expected = {
        (end, "7"): False,
        ("GpuJobWorkersLost", "7"): True,
        ("GpuJobNodeSidecarDown", "7"): True,
        ("GpuJobTimeLimitCertain", "7"): True,
        ("GpuJobGpuLost", "7"): False,
        ("GpuJobOutputInvalid", "7"): False,
        ("GpuJobFailed", "8"): True,
        ("GpuJobWorkerCrashed", "8"): False,
    }
    assert wait_for_inhibition(alertmanager, expected) == expected
