"""The hub's file: damage, other versions, a disk that is full, and an end at any moment."""

import resource
import sqlite3
from pathlib import Path

import pytest

from exporter.hub.counters import CounterKey
from exporter.hub.jobs import Job, Outcome
from exporter.hub.store import (
    _FIGURES,
    CHANGES_KEPT_S,
    JOBS_KEPT_S,
    PRUNED_EACH_S,
    Batch,
    PublishedChange,
    Store,
    Sums,
    name_of,
)
from exporter.slurm.accounting import Figures
from exporter.slurm.prices import Price
from exporter.slurm.tracking import Event, TrackedJob

NAMES = ("a space", 'a"quote', "a\nnewline", "\udcff", "a|b", "Übung 日本", "")
KEY = CounterKey("ended", "ada", "gpu", "FAILED")


def job(job_id: str, name: str = "job") -> Job:
    history = (Event(state="RUNNING", time=2.0, seen=3.0),)
    tracked = TrackedJob(job_id=job_id, name=name, state="RUNNING", history=history, figures=Figures(cpu_ratio=0.5))
    return Job(tracked, 1.0, "ada", "gpu", resources="cpu=1")


def batch(number: int, *jobs: Job, now: float = 10.0) -> Batch:
    change = PublishedChange(number, now, "ada", {"state": "RUNNING"})
    return Batch(now, jobs, frozenset(map(name_of, jobs)), (), [change], {KEY: float(number)}, {"born": "5"})


def to_version_1(path: Path) -> None:
    """Make a file what version 1 wrote."""
    with sqlite3.connect(path) as file:
        file.executescript("DROP INDEX jobs_ended; DROP INDEX jobs_of_user; PRAGMA user_version = 1;")
        for name in _FIGURES:
            file.execute(f"ALTER TABLE jobs DROP COLUMN {name}")
    file.close()


def test_what_is_saved_is_there_for_the_next_hub(tmp_path: Path) -> None:
    jobs = [job(str(number), name) for number, name in enumerate(NAMES)]
    store = Store(tmp_path / "hub.sqlite")
    store.save(batch(1, *jobs))
    store.save(Batch(11.0, jobs[:1]))  # no longer needed at once
    store.close()
    again = Store(tmp_path / "hub.sqlite")
    assert sorted(again.saved.jobs, key=lambda each: each.key) == jobs[1:]
    assert again.saved[1:] == ({KEY: 1.0}, {"born": "5"}, 1)
    assert again.jobs_by_id(["0", "99"]) == jobs[:1]
    assert [each.number for each in again.changes_after(0, 10)] == [1]
    assert [each.key for each in again.jobs_since(11.0, "ada", "RUNNING", 10)] == ["0"]
    assert again.jobs_since(0.0, "eve", None, 10) == []
    assert (tmp_path / "hub.sqlite").stat().st_mode & 0o777 == 0o600
    again.close()


@pytest.mark.parametrize("damage", ["no database", "newer", "cut"])
def test_a_file_that_cannot_be_read_is_put_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "hub.sqlite"
    store = Store(path)
    store.save(batch(1, *(job(str(number)) for number in range(500))))
    store.close()
    if damage == "newer":
        with sqlite3.connect(path) as file:
            file.execute("PRAGMA user_version = 99")
        file.close()
    else:
        content = path.read_bytes()
        path.write_bytes(b"no database" * 1000 if damage == "no database" else content[: len(content) // 2])
    found = path.read_bytes()
    again = Store(path)
    assert (again.saved.jobs, again.problem) == ([], None)
    (aside,) = tmp_path.glob("hub.sqlite.2*")
    assert aside.read_bytes() == found
    again.save(batch(1, job("7")))
    assert [each.key for each in again.jobs_by_id(["7"])] == ["7"]
    again.close()


def test_a_number_that_the_file_cannot_hold_is_a_problem_and_no_fault(tmp_path: Path) -> None:
    other = KEY._replace(name="idle_s")
    store = Store(tmp_path / "hub.sqlite")
    store.save(batch(1)._replace(counters={KEY: 1.0, other: float("nan")}))
    store.save(batch(2)._replace(counters={KEY: 10**20}))
    assert store.problem is not None
    assert "too large" in store.problem
    store.close()
    again = Store(tmp_path / "hub.sqlite")
    assert (again.problem, again.saved.counters) == (None, {KEY: 1.0})  # SQLite has no NaN
    again.close()


def test_a_job_that_cannot_be_read_costs_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, nan = tmp_path / "hub.sqlite", Outcome(state="COMPLETED", exit_status=0, idle_s=float("nan"))
    store = Store(path)
    store.save(batch(1, job("7")._replace(outcome=nan), job("8"), job("9_1")._replace(outcome=nan)))
    store.close()
    to_version_1(path)
    again = Store(path)
    assert (again.problem, again.saved) == (None, ([job("8")], {KEY: 1.0}, {"born": "5"}, 1))
    assert again.jobs_by_id(["7", "8"]) == again.jobs_since(0.0, "ada", None, 9) == [job("8")]
    assert again.tasks_of(["9"], "ada") == []
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "job.outcome.idle_s: nan is too large or not finite"
    ]
    again.save(batch(2, job("7")))
    assert again.jobs_by_id(["7"]) == [job("7")]
    again.close()


def test_a_huge_whole_number_of_a_report_is_saved(tmp_path: Path) -> None:
    tracked = job("7").tracked.replace(state="COMPLETED", ended=4.0)
    outcome = Outcome(state="COMPLETED", exit_status=0, idle_s=10**20)
    store = Store(tmp_path / "hub.sqlite")
    store.save(Batch(9.0, [job("7")._replace(tracked=tracked, outcome=outcome)]))
    assert (store.problem, store.sums_since(0.0, "user", None)[0].idle_s) == (None, 1e20)
    store.close()


def test_sums_are_over_ended_jobs_and_a_file_of_version_1_has_them_too(tmp_path: Path) -> None:
    def ended(job_id: str, user: str, at: float, price: Price | None) -> Job:
        tracked = TrackedJob(job_id=job_id, name="\udcff", state="FAILED", started=10.0, ended=at)
        return Job(tracked, 1.0, user, "gpu", "lab", resources="gres/gpu=2", price=price)

    path, eur = tmp_path / "hub.sqlite", Price(3600.0, "EUR")
    jobs = [ended("1", "ada", 20.0, eur), ended("2", "ada", 30.0, eur), ended("3", "eve", 30.0, None), job("4")]
    store = Store(path)
    store.save(Batch(40.0, jobs))
    store.save(Batch(99.0, [ended("5", "bob", 35.0, None)], is_history=True))
    assert [each.key for each in store.jobs_since(0.0, "bob", None, 9)] == ["5"]
    assert store.jobs_since(36.0, "bob", None, 9) == []  # it is in its place by time, whenever it is found
    store.save(Batch(99.0, removed=[ended("5", "bob", 35.0, None)]))
    assert store.sums_since(25.0, "user", None) == [
        Sums("ada", "EUR", 1, 40.0, None, None, None, 20.0),
        Sums("eve", None, 1, 40.0, None, None, None, None),
    ]
    store.close()
    to_version_1(path)
    again = Store(path)
    assert (again.problem, again.facts()[1:]) == (None, (4, 0, 0, 20.0))
    assert again.sums_since(0.0, "account", "ada") == [Sums("lab", "EUR", 2, 60.0, None, None, None, 30.0)]
    again.close()


def test_a_full_disk_costs_nothing_that_memory_can_hold(tmp_path: Path) -> None:
    store = Store(tmp_path / "hub.sqlite")
    store.save(batch(1, job("7")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.size_bytes() or 0, limits[1]))
    try:
        for number in (2, 3):
            store.save(batch(number, *(job(f"{number}_{task}", "n" * 1000) for task in range(500))))
            assert "cannot be written" in (store.problem or "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.save(batch(4))
    assert store.problem is None
    store.close()
    again = Store(tmp_path / "hub.sqlite")
    assert len(again.saved.jobs) == 1001
    assert [each.number for each in again.changes_after(0, 10)] == [1, 2, 3, 4]
    assert again.saved.counters == {KEY: 4.0}
    again.close()


def test_a_full_disk_keeps_what_is_needed_and_the_newest_of_what_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.hub.store.MOST_UNSAVED_JOBS", 100)
    store = Store(tmp_path / "hub.sqlite")
    store.save(batch(1, job("7")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.size_bytes() or 0, limits[1]))
    needed = [job(f"1_{task}", "n" * 1000) for task in range(150)]
    try:
        store.save(batch(2, *needed))
        for number in range(3, 6):
            ended = [job(f"{number}_{task}", "n" * 1000) for task in range(60)]
            removed = [job(f"{number}{task}") for task in range(60)]
            store.save(Batch(10.0, ended, removed=removed))
            assert "cannot be written" in (store.problem or "")
            most = min(100, 60 * (number - 2))
            assert (len(store._jobs), len(store._removed)) == (150 + most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.save(batch(6))
    assert store.problem is None
    assert {each.key for each in store.jobs_since(0.0, None, None, 1000)} == {
        "7",
        *(each.key for each in needed),
        *(f"4_{task}" for task in range(20, 60)),
        *(f"5_{task}" for task in range(60)),
    }
    store.close()


def test_a_file_that_somebody_else_has_open_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    Store(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store = Store(path)
    other.close()
    assert "cannot be used: database is locked; nothing outlives this process" in (store.problem or "")
    store.save(batch(1, job("7")))
    assert (store.changes_after(0, 10), store.jobs_by_id(["7"])) == ([], [])
    store.close()


def test_old_jobs_and_changes_go_once_a_day(tmp_path: Path) -> None:
    store = Store(tmp_path / "hub.sqlite")
    store.save(Batch(10.0, [job("7"), job("8")], frozenset((name_of(job("8")),)), (), batch(1).changes))
    store.save(batch(2, now=10.0 + CHANGES_KEPT_S + PRUNED_EACH_S))
    assert [each.number for each in store.changes_after(0, 10)] == [2]
    store.save(batch(3, now=10.0 + JOBS_KEPT_S + PRUNED_EACH_S))
    assert [each.key for each in store.jobs_by_id(["7", "8"])] == ["8"]  # it has not ended
    store.close()
