"""``gpu_metrics.csv``: its contents, and failures to write it."""

import csv
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import IDLE_INTERVAL_S
from exporter.collecting.families import Samples
from exporter.contract.clock import SystemClock
from exporter.contract.manifest import PathGroup
from exporter.files.outputs.csv_reader import CsvFile
from exporter.gpus.collectors import csv_collector
from exporter.gpus.collectors.csv_collector import HEADER, GpuMetricsCollector, csv_lines
from exporter.gpus.records import Gpu, GpuActivity, GpuReading, GpuState, JobGpus
from exporter.machine import file_host
from exporter.machine.file_host import FileWatchHost, WatchHanging
from exporter.sidecar.background_reads import SUCCESS, CollectorSlot
from tests.exporter.machine.fuse_server import FuseMount
from tests.support.exporter import (
    SOON_S,
    FakeClock,
    make_context,
    make_manifest,
    make_task,
    publisher,
    samples_of,
    until,
)

START = 1_700_000_000.0
START_TEXT = "2023-11-14T22:13:20Z"
BUSY = GpuActivity(
    utilization_ratio=0.87,
    memory_used_bytes=60 << 30,
    memory_total_bytes=80 << 30,
    power_average_w=412.345,
    power_instant_w=500.0,
    temperature_c=64.0,
)


def gpu(number: int, **changes: Any) -> GpuState:
    """One busy GPU."""
    return GpuState(Gpu(f"GPU-{number}", str(number), "nvidia"), **{"activity": BUSY, **changes})


def reading_of(*states: GpuState, after_s: float = 0.0) -> GpuReading:
    return GpuReading(START + after_s, "ok", gpus=states)


class Job:
    """A job with GPU 0 that has enabled the file."""

    def __init__(self, run_dir: Path) -> None:
        (run_dir / "out").mkdir()
        self.context = make_context(make_manifest(run_dir, gpu_metrics=True), FakeClock())
        self.gpus = publisher(JobGpus())
        self.read_gpus(0)

    def read_gpus(self, after_s: float) -> None:
        """Publish a reading of this time."""
        self.gpus.publish(JobGpus(reading_of(gpu(0), after_s=after_s), {0: "GPU-0"}))

    def collector(self, *, files: FileWatchHost | None = None, **manifest: Any) -> GpuMetricsCollector:
        """A collector, with changes of the manifest."""
        changed = replace(self.context, manifest=replace(self.context.manifest, **manifest))
        return GpuMetricsCollector(replace(changed, files=files or changed.files), self.gpus, publisher("running"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.context.files.close()


def lines(run_dir: Path, name: str = "gpu_metrics.csv") -> list[str]:
    """Lines of the file below its header."""
    header, *rows = (run_dir / "out" / name).read_text(encoding="utf-8").splitlines()
    assert header == HEADER
    return rows


def test_a_line_has_the_time_the_node_and_the_values_of_the_gpu() -> None:
    assert csv_lines(reading_of(gpu(0)), ("GPU-0",), "gn01") == f"{START_TEXT},gn01,0,87,60.00,80.00,412.3,64\n"


def test_each_reading_has_one_line_per_gpu_in_the_order_of_the_plan(job: Job, tmp_path: Path) -> None:
    collector = job.collector()
    for step in range(2):
        reading = reading_of(gpu(0), gpu(1), gpu(2), after_s=5.0 * step)
        job.gpus.publish(JobGpus(reading, {0: "GPU-2", 1: "GPU-0"}))
        collector.read()
    rows = [line.split(",") for line in lines(tmp_path)]
    assert [row[2] for row in rows] == ["2", "0", "2", "0"]
    assert [row[0] for row in rows] == [START_TEXT, START_TEXT, "2023-11-14T22:13:25Z", "2023-11-14T22:13:25Z"]


def test_the_last_line_can_be_parsed_as_csv(job: Job, tmp_path: Path) -> None:
    job.collector().read()
    with open(tmp_path / "out" / "gpu_metrics.csv", newline="", encoding="utf-8") as source:
        *_, last = csv.DictReader(source)
    text = f"{last['utilization_percent']}% | {last['memory_used_gb']}/{last['memory_total_gb']} GB"
    assert text == "87% | 60.00/80.00 GB"


def test_an_interpreter_without_memfd_create_can_write_the_file_too(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    job.collector().read()
    assert len(lines(tmp_path)) == 1


def test_an_unknown_field_is_empty() -> None:
    nothing = gpu(0, activity=GpuActivity())
    assert csv_lines(reading_of(nothing), ("GPU-0",), "n").endswith(",n,0,,,,,\n")
    idle = gpu(0, activity=GpuActivity(utilization_ratio=0.0, memory_used_bytes=0, power_instant_w=70.0))
    assert csv_lines(reading_of(idle), ("GPU-0",), "n").endswith(",n,0,0,0.00,,70.0,\n")


@pytest.mark.parametrize("state", ["lost", "reset_required", "hanging"])
def test_an_unreadable_gpu_does_not_show_earlier_values(state: Any) -> None:
    known = Gpu("GPU-0", "0", "nvidia", memory_total_bytes=80 << 30)
    unreadable = GpuState(known, state=state, activity=BUSY)
    assert csv_lines(reading_of(unreadable), ("GPU-0",), "n").endswith(",n,0,,,80.00,,\n")


def test_a_mig_instance_has_its_own_index() -> None:
    mig_instance = GpuState(Gpu("MIG-1", "0:1", "nvidia", parent="GPU-0"), activity=BUSY)
    assert csv_lines(reading_of(gpu(0), mig_instance), ("MIG-1",), "n").split(",")[2] == "0:1"


def test_a_missing_gpu_and_a_job_without_gpus_have_no_lines(job: Job, tmp_path: Path) -> None:
    assert csv_lines(reading_of(gpu(0)), ("GPU-9",), "n") == ""
    job.gpus.publish(JobGpus(reading_of(gpu(0))))
    job.collector().read()
    assert not (tmp_path / "out" / "gpu_metrics.csv").exists()


def test_the_same_reading_is_written_once(job: Job, tmp_path: Path) -> None:
    collector = job.collector()
    for _ in range(3):
        collector.read()
    assert len(lines(tmp_path)) == 1


def test_nothing_is_written_before_the_first_reading(job: Job, tmp_path: Path) -> None:
    job.gpus.publish(JobGpus())
    job.collector().read()
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_is_written_unless_the_file_is_enabled(job: Job, tmp_path: Path) -> None:
    collector = job.collector(gpu_metrics=False)
    collector.read()
    assert list((tmp_path / "out").iterdir()) == []
    assert collector.interval_s == IDLE_INTERVAL_S


def test_a_job_without_output_directory_has_no_file(job: Job) -> None:
    job.collector(groups=(PathGroup("scratch", "/", None),)).read()
    assert not Path("/gpu_metrics.csv").exists()


@pytest.mark.parametrize(("check_interval_s", "interval_s"), [(0.2, 1.0), (5.0, 5.0), (30.0, 30.0)])
def test_the_interval_is_the_check_interval_but_at_least_one_second(
    job: Job, check_interval_s: float, interval_s: float
) -> None:
    assert job.collector(check_interval_s=check_interval_s).interval_s == interval_s


def test_each_node_after_the_first_has_its_own_file(tmp_path: Path, hard_name: str) -> None:
    (tmp_path / "out").mkdir()
    manifest = make_manifest(tmp_path, make_task(0), make_task(1, node_index=1), gpu_metrics=True)
    for index, node in enumerate(("gn01", hard_name)):
        context = make_context(manifest, FakeClock(), node=node, node_index=index)
        gpus = publisher(JobGpus(reading_of(gpu(0)), {0: "GPU-0"}))
        GpuMetricsCollector(context, gpus, publisher("running")).read()
        context.files.close()
    assert lines(tmp_path) == [f"{START_TEXT},gn01,0,87,60.00,80.00,412.3,64"]
    (other,) = (path for path in (tmp_path / "out").iterdir() if path.name != "gpu_metrics.csv")
    (line,) = lines(tmp_path, other.name)
    assert len(line.split(",")) == len(HEADER.split(","))


def test_a_write_failure_is_logged_when_it_begins_and_when_it_ends(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(tmp_path / "out")
    slot = CollectorSlot(job.collector(), job.context.clock)
    success = []
    with caplog.at_level(logging.INFO):
        for step in range(6):
            job.read_gpus(5.0 * step)
            if step == 3:
                (tmp_path / "out").mkdir()
            slot._read()
            out = Samples({})
            slot.render(out)
            slot.render_self(out)
            success.append(samples_of(out.page(), SUCCESS)['collector="gpu_metrics"'])
    assert success == [0, 0, 0, 1, 1, 1]
    begun, ended = (record.getMessage() for record in caplog.records if "gpu_metrics" in record.getMessage())
    assert begun.startswith("collector gpu_metrics fails: FileNotFoundError: ")
    assert ended == "collector gpu_metrics works again"
    assert len(lines(tmp_path)) == 3


def test_late_lines_are_complete_and_precede_the_next(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real_poll = threading.Event(), CsvFile.poll
    monkeypatch.setattr(csv_collector, "WAIT_S", 0.05)
    monkeypatch.setattr(CsvFile, "poll", lambda file, now: (gate.wait(20), real_poll(file, now))[1])
    collector = job.collector()
    for step in range(3):  # the lines of all polls but the first are lost
        job.read_gpus(5.0 * step)
        with pytest.raises(WatchHanging):
            collector.read()
    gate.set()
    until(lambda: (tmp_path / "out" / "gpu_metrics.csv").exists(), "the late lines")
    monkeypatch.setattr(csv_collector, "WAIT_S", 60.0)
    job.read_gpus(60.0)
    until(lambda: _reads(collector), "a write that works")
    assert [line.split(",")[0] for line in lines(tmp_path)] == [START_TEXT, "2023-11-14T22:14:20Z"]


def _reads(collector: GpuMetricsCollector) -> bool:
    try:
        collector.read()
    except WatchHanging:
        return False
    return True


def test_the_file_helper_writes_where_a_file_system_may_hang(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_host, "START_S", 60.0)
    monkeypatch.setattr(csv_collector, "WAIT_S", 60.0)
    files = FileWatchHost(SystemClock(), use_helper=True)
    collector = job.collector(files=files)
    try:
        for step in range(3):
            job.read_gpus(5.0 * step)
            collector.read()
        assert files.pid is not None
    finally:
        files.close()
    assert len(lines(tmp_path)) == 3


def test_a_hanging_file_system_affects_only_the_file(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = FuseMount(tmp_path)
    monkeypatch.setattr(file_host, "START_S", 60.0)
    monkeypatch.setattr(csv_collector, "WAIT_S", 0.3)
    (mount.folder / "gpu_metrics.csv").write_text(f"{HEADER}\n")
    groups = (PathGroup("output", str(mount.point), None),)
    files = FileWatchHost(SystemClock(), use_helper=True)
    try:
        collector = job.collector(groups=groups, files=files)
        mount.say("swallow")
        for step in range(3):
            job.read_gpus(5.0 * step)
            began = time.monotonic()
            with pytest.raises(WatchHanging, match=str(mount.point)):
                collector.read()
            assert time.monotonic() - began < SOON_S
            monkeypatch.setattr(csv_collector, "WAIT_S", 60.0)  # a second wait would exceed the test's time limit
        began = time.monotonic()
        files.close()
        assert time.monotonic() - began < SOON_S
    finally:
        mount.say("answer")
        mount.close()
        files.close()
