"""Where the text of a run begins in logs that were there before it."""

import dataclasses
import os
from pathlib import Path

import pytest

from exporter.contract.clock import SystemClock
from exporter.contract.manifest import PathGroup
from exporter.logs.log_files_reader import LogFinder, read_last_bytes
from exporter.logs.log_starts_reader import LogStartFinder, read_log_starts
from exporter.machine.file_host import FileWatchHost
from tests.support.exporter import NODE, FakeClock, make_context, make_manifest, make_task

TASK, BEFORE = make_task(0), "an earlier run\n" * 20
BEGAN = 1000.0


class RunLog:
    """The log that a worker opens itself, and the record of where one run begins in it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.record, self.clock = folder / "worker_0.log", folder / "run.logs.json", FakeClock()
        self.context = make_context(make_manifest(folder, TASK, logs=PathGroup("log", ".", "*.log")), self.clock)
        self.finder = LogStartFinder(self.context)

    def write(self, text: str, at: float) -> None:
        with self.path.open("a") as out:
            out.write(text)
        os.utime(self.path, (at, at))

    def note(self, at: float) -> None:
        self.clock.now = at
        assert self.finder.note()

    def save(self) -> None:
        self.finder.save(TASK, BEGAN, self.record)

    def end(self) -> str:
        return read_last_bytes(self.path, 1 << 16, read_log_starts(self.record).get(str(self.path))).decode()


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return RunLog(tmp_path)


def test_a_run_begins_at_the_end_that_was_noted_before_it(log: RunLog) -> None:
    log.write(BEFORE, at=990)
    log.note(995)
    log.write("this run\n", at=1001)
    log.save()
    assert log.end() == "this run\n"


def test_a_log_to_which_the_run_has_written_nothing_has_no_text_of_it(log: RunLog) -> None:
    log.write(BEFORE, at=990)
    log.note(995)
    log.save()
    assert log.end() == ""


def test_a_log_that_was_old_at_the_start_may_be_noted_later(log: RunLog) -> None:
    log.write(BEFORE, at=90)
    log.note(1001)
    log.save()
    log.write("this run\n", at=1002)
    assert log.end() == "this run\n"


def test_the_whole_text_counts_if_the_run_had_begun_before_the_note(log: RunLog) -> None:
    log.write(BEFORE + "this run\n", at=1001)
    log.note(1002)
    log.save()
    assert (log.end(), log.record.exists()) == (BEFORE + "this run\n", False)


def test_the_whole_text_counts_if_the_run_began_while_the_ends_were_read(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = LogFinder.find

    def find_slowly(finder: LogFinder) -> object:
        log.write("this run\n", at=1001)
        log.clock.now = 1002
        return find(finder)

    log.write(BEFORE, at=990)
    monkeypatch.setattr(LogFinder, "find", find_slowly)
    log.note(995)
    log.save()
    log.write("its end\n", at=1003)
    assert log.end() == BEFORE + "this run\nits end\n"


def test_the_whole_text_counts_if_its_last_write_may_be_of_the_run(log: RunLog) -> None:
    """The clock of the file server is four minutes behind."""
    log.write(BEFORE + "this run\n", at=BEGAN - 240)
    log.note(1001)
    log.save()
    assert (log.end(), log.record.exists()) == (BEFORE + "this run\n", False)


def test_the_whole_text_counts_without_a_note(log: RunLog) -> None:
    log.write(BEFORE + "this run\n", at=90)
    log.save()
    assert (log.end(), log.record.exists()) == (BEFORE + "this run\n", False)


def test_a_later_sidecar_keeps_the_record_of_an_earlier_one(log: RunLog) -> None:
    log.write(BEFORE, at=90)
    log.note(995)
    log.save()
    log.write("this run\n", at=95)
    log.note(995)
    log.save()
    assert log.end() == "this run\n"


@pytest.mark.parametrize("change", ["written anew", "with the same text", "shorter", "replaced"])
def test_the_whole_text_of_a_new_log_counts(log: RunLog, change: str) -> None:
    log.write(BEFORE, at=90)
    log.note(995)
    log.save()
    text = {"with the same text": BEFORE, "shorter": "new\n"}.get(change, "new\n" * 200)
    if change == "replaced":
        log.path.rename(log.path.with_suffix(".log.1"))
        text = BEFORE + text
    log.path.write_text(text)
    assert log.end() == text


def test_a_log_of_all_runs_that_the_job_file_names_has_starts_too(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, logs=("{node}.out", "{node}{run}.err"))
    for name in (f"{NODE}.out", f"{NODE}.err"):
        (tmp_path / name).write_text("x\n")
        os.utime(tmp_path / name, (90, 90))
    finder = LogStartFinder(make_context(make_manifest(tmp_path, task), FakeClock(95)))
    finder.note()
    finder.save(task, 100, tmp_path / "run.logs.json")
    assert list(read_log_starts(tmp_path / "run.logs.json")) == [f"{tmp_path}/{NODE}.out"]


def test_a_helper_process_can_note_ends(log: RunLog) -> None:
    log.write(BEFORE, at=90)
    files = FileWatchHost(SystemClock(), use_helper=True)
    log.finder = LogStartFinder(dataclasses.replace(log.context, files=files))
    log.note(995)
    files.close()
    log.save()
    assert list(read_log_starts(log.record)) == [str(log.path)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"starts": 3}', '{"starts": {"x": {"offset": 1}}}'])
def test_a_damaged_record_has_no_starts(log: RunLog, text: str) -> None:
    log.record.write_text(text)
    assert read_log_starts(log.record) == {}


def test_ends_that_could_not_be_read_are_noted_later(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write(BEFORE, at=990)
    with monkeypatch.context() as patched:
        patched.setattr(LogFinder, "find", lambda _: Path("/nonexistent").stat())
        assert not log.finder.note()
    log.note(995)
    log.write("this run\n", at=1001)
    log.save()
    assert log.end() == "this run\n"
