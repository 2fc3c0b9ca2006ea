"""A local job with a real Prometheus and Alertmanager."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.endtoend.jobs import EMBED, GPUJOB, embed_job
from tests.realstack.stack import Stack, prometheus_unavailable
from tests.realstack.waiting import wait_for

pytestmark = pytest.mark.prometheus


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[tuple[Path, Stack]]:
    """A working directory whose jobs are targets of a local Prometheus."""
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    targets = tmp_path / "targets"
    targets.mkdir()
    shutil.copy(EMBED, tmp_path)
    (tmp_path / "gpujob.yaml").write_text(yaml.safe_dump({"target_dir": str(targets), "cluster": "here"}))
    with Stack(Path(tempfile.mkdtemp(prefix="gpujob-stack-")), targets_dir=targets) as stack:
        yield tmp_path, stack
    shutil.rmtree(stack.directory, ignore_errors=True)


def test_a_killed_worker_pages_and_a_finished_job_leaves_no_target(workspace: tuple[Path, Stack]) -> None:
    directory, stack = workspace
    # lingering ends with the scrape that contains the exit
    spec = embed_job("here", items=8000, nodes=1, count=4, gpus_per_node=0, linger=60)
    spec["workers"][0]["gpus"] = 0
    (directory / "job.yaml").write_text(yaml.safe_dump(spec))
    command = subprocess.Popen(
        [GPUJOB, "run", "job.yaml", "--json"], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stack.wait_for(
            lambda: stack.query("sum(gpujob_worker_items_processed_total) > 0"), 60, "progress in Prometheus"
        )
        (record,) = directory.glob("logs/*/workers/worker_w2_rank2_a0_r0.start.json")
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        killed_at = time.time()

        def page() -> list[dict[str, Any]]:
            return [alert for alert in stack.alerts() if alert["labels"]["alertname"] == "GpuJobWorkerKilled"]

        found = stack.wait_for(page, 60, "the page")[0]
        print(f"\npaged {found['received'] - killed_at:.1f} s after the kill")
        labels = found["labels"]
        assert (labels["worker"], labels["reason"], labels["cluster"]) == ("worker_w2", "killed_unknown", "here")
        out, err = command.communicate(timeout=120)
    finally:
        command.kill()
        command.wait()
    report = json.loads(out)
    assert (command.returncode, report["state"], report["cause"]["worker"]) == (1, "FAILED", "worker_w2"), err
    wait_for(lambda: not list((directory / "targets").iterdir()), 60, "the targets to be gone")
    stack.wait_for(lambda: not stack.targets(), 60, "no target in Prometheus")
