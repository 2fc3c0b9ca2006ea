"""The phase of the job, from the orchestrator and from the logs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.collecting.collector import StatusParts
from exporter.collecting.families import Samples
from exporter.collecting.published import RECENT_S, JobProgress
from exporter.contract import run_files
from exporter.contract.alert_thresholds import AlertThreshold
from exporter.sidecar.job_collector import JobCollector
from tests.support.exporter import FakeClock, make_context, make_manifest, publisher


def test_the_logs_name_the_phase_of_a_running_job_as_long_as_they_are_read(tmp_path: Path) -> None:
    clock = FakeClock()
    phase, progress = publisher("", clock), publisher(JobProgress(), clock)
    job = JobCollector(make_context(make_manifest(tmp_path), clock), phase, progress)
    progress.publish(JobProgress("checkpointing"))
    for written, shown in (("launching",) * 2, ("completing",) * 2, ("running", "checkpointing")):
        run_files.write_job_state(str(tmp_path), written)
        assert (job.read().phase, phase.value) == (shown, shown)
    clock.advance(RECENT_S + 1)
    assert (job.read().phase, phase.value) == ("running", "running")


@pytest.mark.parametrize("damage", [lambda path: path.write_text('{"phase": "runn'), Path.unlink])
def test_a_state_that_cannot_be_read_for_a_moment_keeps_the_phase(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    job = JobCollector(make_context(make_manifest(tmp_path)), publisher(""), publisher(JobProgress()))
    assert job.read().phase == "launching"
    run_files.write_job_state(str(tmp_path), "running")
    assert job.read().phase == "running"
    damage(tmp_path / run_files.STATE_FILE)
    assert job.read().phase == "running"


def test_a_time_limit_that_was_changed_while_the_job_runs_counts_from_then_on(tmp_path: Path) -> None:
    context = make_context(make_manifest(tmp_path), start=1000.0, end=5000.0)
    job = JobCollector(context, publisher(""), publisher(JobProgress()))

    def limit() -> tuple[float | None, str, float | None]:
        snapshot, out, parts = job.read(), Samples({}), StatusParts()
        job.render(snapshot, out)
        job.describe(snapshot, parts)
        (line,) = [line for line in out.page().splitlines() if line.startswith("gpujob_time_limit_seconds")]
        return context.limit_end, line.rpartition(" ")[2], parts.job.end

    run_files.write_job_state(str(tmp_path), "running")
    assert limit() == (5000.0, "4000", 5000.0)
    run_files.write_job_state(str(tmp_path), "running", attempt=1, time_limit_end=7000.0)  # of another attempt
    assert limit() == (5000.0, "4000", 5000.0)
    run_files.write_job_state(str(tmp_path), "running", time_limit_end=9000.0)
    assert limit() == (9000.0, "8000", 9000.0)
    run_files.write_job_state(str(tmp_path), "completing")  # by the successor of a lost orchestrator
    assert limit() == (9000.0, "8000", 9000.0)


def test_only_the_last_attempt_of_a_requeued_job_has_to_finish_before_its_limit(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, requeues=2, alert_thresholds=(AlertThreshold("time_limit_chance", 0.3),))

    def threshold(attempt: int) -> str:
        context = make_context(manifest, attempt=attempt)
        collector, out = JobCollector(context, publisher(""), publisher(JobProgress())), Samples({})
        collector.render(collector.read(), out)
        (line,) = [line for line in out.page().splitlines() if line.startswith("gpujob_alert_threshold{")]
        return line.rpartition(" ")[2]

    assert [threshold(attempt) for attempt in range(4)] == ["-Inf", "-Inf", "0.3", "0.3"]
