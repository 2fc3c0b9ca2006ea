"""File checks have a deadline: reads that hang, are slow, fail briefly or are lost."""

import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.clock import SystemClock
from exporter.files.checkpoints import checkpoints_reader
from exporter.machine.file_host import FileWatchHost
from launcher.verify import files, timed_reads
from launcher.verify.files import OutputFiles, SlicedWork, VerifiedOutput
from launcher.verify.timed_reads import FileWorkResult, run_file_work
from tests.exporter.files.checkpoints.checkpoint_trees import torch_bytes
from tests.exporter.machine.fuse_server import FuseMount
from tests.launcher.verify.verify_job import Job, out_of_time_after, shortest_slices
from tests.support.exporter import SOON_S, change_listings


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def fail_listings(monkeypatch: pytest.MonkeyPatch, times: float, number: int = errno.ESTALE) -> None:
    """Make the first `times` listings of a directory fail."""
    calls, scandir = [0], os.scandir

    def refuse(path: Any) -> Any:
        calls[0] += 1
        if calls[0] <= times:
            raise OSError(number, os.strerror(number))
        return scandir(path)

    monkeypatch.setattr("launcher.verify.files.os.scandir", refuse)


def test_a_briefly_unreadable_directory_is_read_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_reads, "RETRY_DELAY_S", 0.05)
    fail_listings(monkeypatch, 3)
    assert job.lines(0, 50).lines(1, 50).result("records") == (True, "100 records for 100 items")


def test_a_directory_that_is_unreadable_until_the_deadline_is_undecided(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_reads, "RETRY_DELAY_S", 0.05)
    fail_listings(monkeypatch, float("inf"))
    passed, detail = job.result("outputs", out_of_time=out_of_time_after(5))
    assert (passed, detail) == (None, "the output files could not be read: Stale file handle")


def test_a_directory_that_is_unreadable_for_long_is_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_reads, "RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(timed_reads, "HANG_LIMIT_S", 0.3)
    fail_listings(monkeypatch, float("inf"))
    assert job.result("outputs") == (False, f"{job.path} cannot be read: Stale file handle")


def test_without_time_nothing_is_read_and_nothing_fails(job: Job) -> None:
    job.write("output_worker_0.jsonl", "").write("checkpoint_40.pt", "")
    checks = job.checks(out_of_time=lambda: True)
    assert (checks["outputs"].passed, checks["outputs"].detail) == (None, "there was no time to check them")
    assert checks["checkpoint"].passed is None


def test_damage_found_before_the_deadline_counts(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    shortest_slices(monkeypatch)
    for number in range(50):
        job.write(f"output_worker_{number}.jsonl", "{\n", age_s=number)
    check = job.checks(out_of_time=out_of_time_after(64))["valid"]
    assert check.passed is False
    assert 0 < check.files_total < 50
    assert "there was no time to check " in check.detail
    assert check.files[0].file == "output_worker_0.jsonl"  # newest files first


def test_valid_files_alone_do_not_pass_after_the_deadline(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    shortest_slices(monkeypatch)
    for number in range(50):
        job.write(f"output_worker_{number}.jsonl", "{}\n")
    checks = job.checks(out_of_time=out_of_time_after(64))
    assert checks["valid"].passed is None
    assert checks["records"].passed is None
    assert checks["records"].detail.endswith("there was no time to count them all")


def test_progress_is_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    shortest_slices(monkeypatch)
    seen: list[tuple[int, int]] = []
    job.lines(0, 50).lines(1, 50)
    job.checks(progress=lambda done, files, _: seen.append((done, files)))
    assert seen[-1] == (2, 2)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(set(seen)) > 2


def test_a_hanging_file_watch_costs_its_own_checks_and_no_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_reads, "WAIT_S", 0.02)
    monkeypatch.setattr(timed_reads, "HANG_LIMIT_S", 600.0)
    gate, waits = threading.Event(), itertools.count()

    def pass_limit(done: int, _files: int, _silent: str | None) -> None:
        if done and next(waits) == 20:  # by now the checkpoint has been read
            monkeypatch.setattr(timed_reads, "HANG_LIMIT_S", 0.02)

    def hang(_self: OutputFiles, _now: float) -> VerifiedOutput:
        gate.wait()
        raise OSError

    monkeypatch.setattr(OutputFiles, "poll", hang)
    job.write("checkpoint_40.pt", torch_bytes())
    began = time.monotonic()
    checks = job.checks(progress=pass_limit)
    gate.set()
    assert time.monotonic() - began < SOON_S
    assert checks["outputs"].passed is False
    assert checks["outputs"].detail.startswith("the output directory does not answer (mount /")
    assert checks["checkpoint"].passed is True
    assert not {"valid", "records"} & checks.keys()


def test_a_hanging_file_watch_does_not_delay_the_deadline(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_reads, "OVERTIME_S", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(OutputFiles, "poll", lambda *_: gate.wait())
    began = time.monotonic()
    checks = job.checks(out_of_time=out_of_time_after(3))
    gate.set()
    assert time.monotonic() - began < SOON_S
    assert (checks["outputs"].passed, checks["outputs"].detail) == (None, "there was no time to check them")


def test_a_slow_read_at_the_deadline_is_not_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_reads, "LATE_S", 0.2)
    gate = threading.Event()
    monkeypatch.setattr(OutputFiles, "poll", lambda *_: gate.wait())
    end = time.monotonic() + 0.5
    passed, detail = job.result("outputs", out_of_time=lambda: time.monotonic() > end)
    gate.set()
    assert (passed, detail) == (None, "there was no time to check them")


class SlowDirectories(threading.local):
    """The time of a thread in which only reads of directory entries take time."""

    now = 0.0
    time = staticmethod(time.time)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def test_a_slow_checkpoint_directory_is_read_to_the_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """No single read takes as long as the limit for a file system that hangs."""
    for step in range(30):
        for rank in range(10):
            job.write(f"checkpoint_{step}/model_rank{rank}.pt", torch_bytes(8), age_s=1000 - step)
    clock, poll, reads_s = SlowDirectories(), SlicedWork.poll, list[float]()

    def slowly(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            clock.now += 0.1
            yield entry

    def measured(work: SlicedWork[Any], now: float) -> Any:
        began = clock.now
        facts = poll(work, now)
        reads_s.append(clock.now - began)
        return facts

    change_listings(monkeypatch, slowly)
    monkeypatch.setattr(files, "time", clock)
    monkeypatch.setattr(checkpoints_reader, "time", clock)
    monkeypatch.setattr(SlicedWork, "poll", measured)
    assert job.result("checkpoint")[0] is True
    assert max(reads_s) < timed_reads.HANG_LIMIT_S < sum(reads_s)


def test_a_defect_of_the_verification_does_not_fail_the_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputFiles, "poll", lambda *_: 1 // 0)
    passed, detail = job.result("outputs")
    assert passed is None
    assert "ZeroDivisionError" in detail


def test_a_lost_file_server_is_reported_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = FuseMount(tmp_path)
    try:
        (mount.folder / "output_worker_0.jsonl").write_text("{}\n" * 100)
        job = Job(tmp_path, paths={"output_dir": str(mount.point), "checkpoint_dir": str(tmp_path)}, count=1)
        (tmp_path / "checkpoint_1.pt").write_bytes(torch_bytes())
        assert job.checks(host=None)["records"].passed is True
        monkeypatch.setattr(timed_reads, "HANG_LIMIT_S", 10.0)  # a new file helper has to start
        mount.say("swallow")
        began = time.monotonic()
        checks = job.checks(host=None)
        assert time.monotonic() - began < 10.0 + SOON_S
        assert checks["outputs"].detail == f"the output directory does not answer (mount {mount.point})"
        assert checks["outputs"].passed is False
        assert checks["checkpoint"].passed is True
    finally:
        mount.say("answer")
        mount.close()


def test_a_lost_file_helper_is_started_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its work is then repeated."""
    shortest_slices(monkeypatch)
    job.lines(0, 50).lines(1, 50)
    host = FileWatchHost(SystemClock(), use_helper=True)
    killed: list[int] = []

    def kill_once(done: int, _files: int, _silent: str | None) -> None:
        if done and not killed and host.pid is not None:
            killed.append(host.pid)
            os.kill(host.pid, 9)

    try:
        checks = job.checks(host=host, progress=kill_once)
    finally:
        host.close()
    assert checks["records"].detail == "100 records for 100 items"


def test_reads_without_a_file_helper_are_not_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_reads, "RETRY_DELAY_S", 0.0)
    host = FileWatchHost(SystemClock(), use_helper=True)
    host.close()
    passed, detail = job.result("outputs", host=host)
    assert passed is None
    assert "could not be read" in detail


def test_the_file_host_is_closed_after_the_checks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[FileWatchHost] = []
    monkeypatch.setattr(FileWatchHost, "close", lambda host: ends.append(host))
    job.checks(host=None)
    assert len(ends) == 1


def test_no_work_has_no_result() -> None:
    assert run_file_work({}, FileWatchHost(SystemClock(), use_helper=False), lambda: False) == {}
    assert FileWorkResult() == (None, (), None, None, None, None)
