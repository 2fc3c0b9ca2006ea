"""Entries of jobs and their run directories, also on mounts that hang."""

import json
import logging
import math
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.contract.process_identity import read_start_ticks
from exporter.hub import mount_reader, registry_reader
from exporter.hub.registry_reader import QUIET_EACH_S, RegistryReader
from exporter.hub.runs.run_directory_reader import parse_outcome
from exporter.machine.mounts import MountPoint
from tests.support.exporter import SOON_S, until

REPORT = {
    "schema": 1,
    "job_id": "7",
    "state": "FAILED",
    "exit_status": 1,
    "end": 30.0,
    "workers": [{"rank": 0}],
    "gpus": {"count": 2, "seen_s": 80.0, "idle_s": 8.0, "energy_j": 5.0, "nodes": []},
}


@pytest.fixture(autouse=True)
def _every_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mount answer late: what it reads is there after the first read all the same."""
    monkeypatch.setattr(mount_reader, "WAIT_S", 2 * SOON_S)


def register(folder: Path, run_dir: Path, job_id: str = "7", **more: object) -> None:
    folder.mkdir(exist_ok=True)
    run_dir.mkdir(parents=True)
    entry = {"schema": 1, "job_id": job_id, "job_name": "train", "run_dir": str(run_dir), "submitted": 10.0, **more}
    entry["notify"] = "oncall"
    run_files.write_json(folder / f"{job_id}-{run_dir.name}.json", entry)


def report(run_dir: Path, **over: object) -> None:
    run_files.write_json(run_dir / run_files.REPORT_FILE, {**REPORT, **over})


def test_the_end_of_a_run_is_read_once_it_is_reported(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    register(tmp_path / "entries", run_dir)
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    registry.live = lambda: (str(run_dir),)
    registry.read()
    before = registry.runs()
    assert [(run.job_id, run.name, run.notify, run.outcome) for run in before] == [("7", "train", "oncall", None)]
    registry.read()
    assert registry.runs() is before  # nothing has changed
    report(run_dir)
    registry.read()
    (run,) = registry.runs()
    assert run.outcome is not None
    assert (run.outcome.state, run.outcome.end, run.outcome.count, run.outcome.idle_s) == ("FAILED", 30.0, 2, 8.0)
    assert not run.outcome.unknown_keys  # of which a report has megabytes


def test_a_directory_that_nobody_follows_is_read_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path / "entries", tmp_path / "run")
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    registry.read()
    report(tmp_path / "run")
    registry.read()
    assert registry.runs()[0].outcome is None
    later = time.monotonic() + QUIET_EACH_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    registry.read()
    assert registry.runs()[0].outcome is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_report_of_another_owner_is_not_believed(tmp_path: Path) -> None:
    register(tmp_path / "entries", tmp_path / "run")
    report(tmp_path / "run")
    os.chown(tmp_path / "run" / run_files.REPORT_FILE, 65534, -1)
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    registry.read()
    assert registry.runs()[0].outcome is None


@pytest.mark.parametrize("over", [{"requeued": True}, {"job_id": "8"}])
def test_a_report_that_is_not_the_end_of_this_job_says_nothing(over: dict[str, object]) -> None:
    assert parse_outcome(json.dumps({**REPORT, **over}), "7") is None


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", f"1{'0' * 400}"])
def test_a_report_with_a_number_that_is_none_is_no_report(number: str) -> None:
    text = json.dumps({**REPORT, "gpus": {"idle_s": "?"}}).replace('"?"', number)
    with pytest.raises(ValueError, match=r"idle_s: .* is too large or not finite"):
        parse_outcome(text, "7")


def test_a_mount_that_hangs_costs_its_own_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad, answers = tmp_path / "good" / "run", tmp_path / "bad" / "run", threading.Event()
    register(tmp_path / "entries", good)
    register(tmp_path / "entries", bad, "8")
    mounts = [MountPoint(str(tmp_path / name), "nfs4", "server:/") for name in ("good", "bad")]
    registry = RegistryReader([tmp_path / "entries"], only_own=True, mounts=lambda: mounts)
    registry.live = lambda: (str(good), str(bad))
    registry.read()
    threads = registry._mounts._of_mount
    stat, asked, waits, wait = os.stat, list[str](), list[float](), threads[mounts[1].point].idle.wait

    def hang(path: str | Path, **how: object) -> os.stat_result:
        if str(path) == str(bad):
            asked.append(str(path))
            answers.wait(4 * SOON_S)
        return stat(path, **how)  # type: ignore[arg-type] # as it was called

    def record_wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(timeout_s)

    monkeypatch.setattr(os, "stat", hang)
    monkeypatch.setattr(threads[mounts[1].point].idle, "wait", record_wait)
    report(good)
    report(bad, job_id="8")
    with monkeypatch.context() as patch:
        patch.setattr(mount_reader, "WAIT_S", 0.5)
        registry.read()
    assert max(waits) <= 0.5
    until(threads[mounts[0].point].idle.is_set, "the answers of the other mount")
    monkeypatch.setattr(mount_reader, "PATIENCE_S", 0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            registry.read()
    assert (len(asked), len(waits)) == (1, 1)  # it is asked nothing more
    assert {run.job_id: run.outcome is not None for run in registry.runs()} == {"7": True, "8": False}
    assert registry.mounts() == {"/": True, str(mounts[0].point): True, str(mounts[1].point): False}
    problem = f"{mounts[1].point} does not answer: run directories on it are not read"
    assert registry.problems == (problem,)
    assert [record.getMessage() for record in caplog.records] == [problem]
    answers.set()

    def all_ended() -> bool:
        registry.read()
        return all(run.outcome is not None for run in registry.runs())

    until(all_ended, "the outcomes")
    assert all(registry.mounts().values())
    assert caplog.records[-1].getMessage() == f"{mounts[1].point} answers again"


def publish(run_dir: Path) -> None:
    groups = [{"targets": ["n1:9410"], "labels": {"job": "gpujob-sidecar", "job_id": "7"}}]
    run_files.write_json(run_dir / run_files.TARGETS_FILE, groups)


def test_targets_of_an_attempt_that_slurm_has_ended_go_and_those_of_the_next_one_stay(tmp_path: Path) -> None:
    register(tmp_path / "entries", tmp_path / "run")
    publish(tmp_path / "run")
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    registry.live = lambda: (str(tmp_path / "run"),)
    now, found = time.time(), []
    for before in ({}, {str(tmp_path / "run"): now + 10}, {str(tmp_path / "run"): now - 10}):
        registry.stale = lambda before=before: before  # type: ignore[misc] # a value of this turn
        registry.read()
        found.append(len(registry.targets("sidecar") or ()))
    assert found == [1, 0, 1]
    assert registry.runs()[0].is_monitored  # alerts about a running job ask for its plan


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_targets_of_a_job_without_slurm_go_after_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    run_dir = tmp_path / "run"
    register(tmp_path / "entries", run_dir, "local-7")
    publish(run_dir)
    status = run_dir / run_files.STATUS_DIR / f"{host}.json"
    status.parent.mkdir()
    status.write_text("{}")
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    now, clock, found = time.time(), time.time(), []
    monkeypatch.setattr(time, "time", lambda: clock)
    with subprocess.Popen(["sleep", "60"]) as process:
        record = {"schema": 1, "pid": process.pid, "start_ticks": read_start_ticks(process.pid), "host": host}
        run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, record)
        for after_s, written_s in ((200, 0), (300, 290), (400, 290), (470, 290), (480, 475)):
            os.utime(status, (now + written_s, now + written_s))
            clock = now + after_s
            registry.read()
            found.append(len(registry.targets("sidecar") or ()))
            process.kill()
            process.wait()
    # it runs; its sidecar writes; both are gone; and for longer; its sidecar is back
    assert found == ([1, 1, 1, 0, 1] if host == socket.gethostname() else [1] * 5)


def test_no_record_of_another_user_stops_the_hub_or_takes_its_memory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    register(tmp_path / "entries", run_dir, "local-7")
    publish(run_dir)
    os.mkfifo(run_dir / run_files.ORCHESTRATOR_FILE)  # which would be taken for a mount that does not answer
    registry = RegistryReader([tmp_path / "entries"], only_own=False)
    reads = threading.Thread(target=registry.read, daemon=True)
    reads.start()
    reads.join(SOON_S)
    assert registry.problems == ()
    assert len(registry.targets("sidecar") or ()) == 1
    with pytest.raises(ValueError, match="has more than 1000000 values"):
        parse_outcome(json.dumps({**REPORT, "x": [[]] * 1_000_001}), "7")


@pytest.mark.parametrize("over", [{"run_dir": "\0"}, {"run_dir": "\ud800"}, {"submitted": 10**400}])
def test_an_impossible_entry_of_another_user_hides_no_other_job(over: dict[str, object], tmp_path: Path) -> None:
    register(tmp_path / "entries", tmp_path / "a", "6")
    register(tmp_path / "entries", tmp_path / "b", "7")
    report(tmp_path / "b")
    planted = json.loads((tmp_path / "entries/6-a.json").read_text())
    (tmp_path / "entries/6-a.json").write_text(json.dumps({**planted, **over}))
    registry = RegistryReader([tmp_path / "entries"], only_own=False)
    registry.read()
    registry.read()
    assert [(run.job_id, run.outcome is not None) for run in registry.runs()] == [("7", True)]


def test_a_fault_in_one_read_stops_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    reader, done = mount_reader.MountReader(tuple), list[int]()

    def fail() -> None:
        raise OverflowError

    for _ in range(2):
        reader.read([mount_reader.Read("/a", fail), mount_reader.Read("/a", lambda: done.append(1))])
    assert done == [1, 1]
    assert "OverflowError" in caplog.text


def test_very_many_entries_delay_and_hide_no_new_job_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tmp_path / "entries"
    for bound, most in (("READ_S", 0.0), ("MOST_OF_OWNER", 2), ("MOST_FILES", 5)):
        monkeypatch.setattr(registry_reader, bound, most)
    for job_id in ("9", "10", "11"):
        register(entries, tmp_path / job_id, job_id)
    for name in ("7", "8", "200", "201"):
        (entries / f"{name}-{name}.json").write_text("{")
    registry, found = RegistryReader([entries], only_own=False), []
    for _ in range(5):
        registry.read()
        found.append([run.job_id for run in registry.runs()])
    assert found == [[], [], ["11"], ["10", "11"], ["10", "11"]]
    (problem,) = registry.problems
    assert problem == f"{entries}: of 7 entries only 5 are used; remove old ones"
    (entries / "8-8.json").unlink()
    (entries / "7-7.json").unlink()
    registry.read()
    assert not registry.problems


def test_equal_ids_of_two_clusters_with_one_home_are_two_jobs(tmp_path: Path) -> None:
    for name, cluster in (("one", "c1"), ("two", "c2"), ("old", None)):
        register(tmp_path / "entries", tmp_path / name, slurm_cluster=cluster)
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    registry.read()
    assert len(registry.runs()) == 3  # before Slurm has told its name
    registry.cluster = lambda: "c1"
    registry.read()
    assert {Path(run.run_dir).name for run in registry.runs()} == {"one", "old"}


def test_the_file_of_a_lost_job_leaves_the_target_directory_and_no_other_one_does(tmp_path: Path) -> None:
    site, run_dir, lives = tmp_path / "site", tmp_path / "lost", tmp_path / "lives"
    site.mkdir()
    for number, path in enumerate((run_dir, lives), 7):
        register(tmp_path / "entries", path, str(number))
        publish(path)
    lost = (run_dir / run_files.TARGETS_FILE).read_text()
    files = dict.fromkeys(("gpujob-lost.json", "gpujob-later.json", "gpujob-of-another.json", "mine.json"), lost)
    files |= {"gpujob-lives.json": lost.replace("n1:", "n2:"), "gpujob-no.json": "text"}
    end = time.time() - 100
    for name, text in files.items():
        (site / name).write_text(text)
        written = end + (1 if name == "gpujob-later.json" else -1)  # by an attempt after this end
        os.utime(site / name, (written, written))
    if os.geteuid() == 0:
        os.chown(site / "gpujob-of-another.json", 65534, -1)
    else:
        (site / "gpujob-of-another.json").unlink()
    before = {path.name for path in site.iterdir()}
    registry = RegistryReader([tmp_path / "entries"], only_own=True, target_dir=site)
    registry.read()
    assert {path.name for path in site.iterdir()} == before
    registry.stale, registry.ends = (lambda: {str(run_dir): math.inf}), (lambda: {str(run_dir): end})
    registry.read()
    assert {path.name for path in site.iterdir()} == before - {"gpujob-lost.json"}


def test_each_array_of_a_sweep_was_submitted_at_a_time_of_its_own(tmp_path: Path) -> None:
    folder, sweep = tmp_path / "entries", tmp_path / "sweep"
    register(folder, sweep, "9")
    again = {"schema": 1, "job_id": "12", "run_dir": str(sweep), "submitted": 9000.0}
    run_files.write_json(folder / "12-sweep.json", again)
    registry = RegistryReader([folder], only_own=True)
    registry.read()
    assert [run.job_ids for run in registry.runs()] == [{"9": 10.0, "12": 9000.0}]


def test_points_of_a_sweep_come_and_go_with_their_array_tasks(tmp_path: Path) -> None:
    sweep, tasks = tmp_path / "sweep", dict[str, list[str]]()
    register(tmp_path / "entries", sweep, "9")
    registry = RegistryReader([tmp_path / "entries"], only_own=True)
    registry.tasks = lambda: tasks
    (sweep / run_files.TASKS_DIR).mkdir()
    for index in (1, 2):
        (sweep / f"lr_{index}").mkdir()
        publish(sweep / f"lr_{index}")
        (sweep / run_files.TASKS_DIR / f"9_{index}").symlink_to(f"../lr_{index}")
    found = []
    for listed in ([], ["9_1"], ["9_1", "9_2", "9_3"], []):
        tasks["9"] = listed
        registry.read()
        runs = {run.job_id: run.run_dir for run in registry.runs() if run.job_id != "9"}
        found.append((runs, len(registry.targets("sidecar") or ())))
    first, second = {"9_1": str(sweep / "lr_1")}, {"9_2": str(sweep / "lr_2")}
    assert found == [({}, 0), (first, 1), (first | second, 2), ({}, 0)]
