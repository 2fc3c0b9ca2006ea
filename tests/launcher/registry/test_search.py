"""Jobs are found from any directory, and never another job than the one that is meant."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError
from launcher.registry import entries
from launcher.registry.entries import MOST_ENTRIES, read_own_entries, register_job
from launcher.registry.search import find_job
from launcher.steps.slurm_queue import QueueState, SlurmQueue
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import gpujob

NOBODY = 65534
IDS = ["1", "445", "4459*", "*", "[4]459", "", "..", "no/such", "4459_x", "-1", "a\nb"]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A logs directory with two runs of job 4459 and one of a job with a similar id."""
    logs_dir = tmp_path / "logs"
    for age, name in enumerate(
        ["4459_b_20251122_041341", "4459_a_20251121_041341", "44590_c_20251122_041341", "4459_x"]
    ):
        (logs_dir / name).mkdir(parents=True)
        if name != "4459_x":
            (logs_dir / name / "manifest.json").write_text("{}")
        os.utime(logs_dir / name, (1000 - age, 1000 - age))
    return logs_dir


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A working directory from which nothing has been submitted."""
    path = tmp_path / "elsewhere"
    path.mkdir()
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a state directory, and without Slurm."""
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def directory(path: Path, job_id: str, name: str = "embed", **facts: object) -> Path:
    """A run directory that is in the index of the state directory beside it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text("{}")
    submission = {"job_id": job_id, "job_name": name, "submitted": 1.0, **facts}
    root = next(parent for parent in path.parents if (parent / "elsewhere").exists())
    register_job(path, submission, {"XDG_STATE_HOME": str(root / "state")}, root)
    return path


def sweep_directory(home: Path, *points: str) -> None:
    for point in points:
        (home / point).mkdir(parents=True)
        for name in ("manifest.json", f"{point.rpartition('_')[0]}.json"):
            (home / point / name).write_text("{}")
    (home / "sweep.json").write_text("{}")


def found(job: str | None, environ: dict[str, str], workdir: Path) -> Path:
    return find_job(job, environ, workdir).directory


def test_a_job_is_found_by_its_id_in_the_logs_directory(logs: Path) -> None:
    assert found("4459", {}, logs.parent) == logs / "4459_b_20251122_041341"
    os.utime(logs / "4459_a_20251121_041341", (2000, 2000))
    assert found("4459", {}, logs.parent) == logs / "4459_a_20251121_041341"
    assert found("44590", {}, logs.parent) == logs / "44590_c_20251122_041341"


def test_a_job_is_found_by_its_directory(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = logs / "4459_b_20251122_041341"
    monkeypatch.chdir(logs)
    for name in (str(run_dir), f"{run_dir}/", f"{run_dir}/manifest.json", run_dir.name, f"./{run_dir.name}"):
        assert found(name, {}, Path("nowhere")) == run_dir


@pytest.mark.parametrize("job", IDS)
def test_an_unknown_job_is_reported(job: str, logs: Path, environ: dict[str, str]) -> None:
    with pytest.raises(LauncherError, match="is neither a run directory nor the id or name of a job in") as caught:
        find_job(job, environ, logs.parent)
    assert repr(job) in str(caught.value)


def test_a_registered_job_is_found_from_anywhere(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    run_dir = directory(tmp_path / "a/logs/local-82f21e70_embed", "local-82f21e70")
    for job in ("local-82f21e70", "local-82f", "82f21", "embed"):
        assert found(job, environ, elsewhere) == run_dir


def test_a_number_is_never_a_part_of_an_id(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    directory(tmp_path / "a/4459_embed", "4459")
    with pytest.raises(LauncherError, match="is neither"):
        find_job("445", environ, elsewhere)


def test_several_candidates_are_listed(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    runs = [directory(tmp_path / f"a/{job_id}_embed", job_id) for job_id in ("local-aaa1", "local-aaa2")]
    for job in ("local-aaa", "embed"):
        with pytest.raises(LauncherError) as caught:
            find_job(job, environ, elsewhere)
        head, *lines = str(caught.value).splitlines()
        assert head == f"{job!r} fits 2 jobs; give an id or a directory:"
        assert {tuple(line.split()[::4]) for line in lines} == {
            ("local-aaa1", str(runs[0])),
            ("local-aaa2", str(runs[1])),
        }
    (runs[0] / "report.json").write_text("{}")  # the only one without a report is meant
    assert found("embed", environ, elsewhere) == runs[1]


def test_a_command_that_reads_takes_the_newest_job_of_a_name(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str]
) -> None:
    crashed, older, newer = (
        directory(tmp_path / f"a/local-aaa{n}_embed", f"local-aaa{n}", submitted=float(n)) for n in (1, 2, 3)
    )
    gone = {"schema": 1, "host": os.uname().nodename, "local": True, "pid": 4_194_304, "start_ticks": 1}
    (crashed / "orchestrator.json").write_text(json.dumps(gone))
    for run_dir in (older, newer):
        (run_dir / "report.json").write_text("{}")
    assert find_job("embed", environ, elsewhere, takes_newest=True) == (
        newer,
        (f"newest of 3 jobs named embed: local-aaa3, {newer}",),
    )
    for job, takes_newest in (("embed", False), ("local-aaa", True)):
        with pytest.raises(LauncherError, match=f"'{job}' fits 3 jobs"):
            find_job(job, environ, elsewhere, takes_newest=takes_newest)
    (older / "report.json").unlink()  # it has just begun, and has no process yet
    assert find_job("embed", environ, elsewhere, takes_newest=True) == (
        older,
        (f"one of 3 jobs has not ended: local-aaa2, {older}",),
    )
    os.utime(older / "manifest.json", (1000, 1000))  # it will never start
    assert find_job("embed", environ, elsewhere, takes_newest=True).directory == newer


def test_a_job_on_another_machine_runs_while_its_sidecars_report(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str]
) -> None:
    lost, newer = (directory(tmp_path / f"a/local-aaa{n}_embed", f"local-aaa{n}", submitted=float(n)) for n in (1, 2))
    (newer / "report.json").write_text("{}")
    record = {"schema": 1, "host": "elsewhere", "local": True, "pid": 1, "start_ticks": 1}
    (lost / "orchestrator.json").write_text(json.dumps(record))
    assert find_job("embed", environ, elsewhere, takes_newest=True).directory == newer
    assert found("embed", environ, elsewhere) == lost, "for `stop` it may run, and no other job is meant"
    (lost / "orchestrator.json").write_text(json.dumps({**record, "start": time.time()}))
    assert find_job("embed", environ, elsewhere, takes_newest=True).directory == lost, "it has just started"
    (lost / "orchestrator.json").write_text(json.dumps(record))
    (lost / "status").mkdir()
    (lost / "status/cn01.json").write_text(json.dumps({"schema": 1, "time": time.time()}))
    assert found("embed", environ, elsewhere) == lost


def test_a_job_that_has_left_the_queue_without_a_report_is_not_preferred(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    for name, value in slurm.environment(XDG_STATE_HOME=str(tmp_path / "state")).items():
        monkeypatch.setenv(name, value)
    cancelled, newer = (directory(tmp_path / f"a/{n}_embed", str(n), submitted=float(n)) for n in (10, 11))
    (newer / "report.json").write_text("{}")
    environ = dict(os.environ)
    slurm.say("squeue", "out", "10|PENDING\n")
    notice = f"one of 2 jobs has not ended: 10, {cancelled}"
    assert find_job("embed", environ, elsewhere) == (cancelled, (notice,))
    slurm.say("squeue", "out", "")  # it was cancelled there
    notice = f"newest of 2 jobs named embed: 11, {newer}"
    assert find_job("embed", environ, elsewhere, takes_newest=True) == (newer, (notice,))
    with pytest.raises(LauncherError, match="'embed' fits 2 jobs"):
        find_job("embed", environ, elsewhere)


def test_of_many_waiting_jobs_of_a_name_two_show_that_none_is_meant(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of the queue is slow where it is long."""
    read = list[SlurmQueue]()

    def answer(queue: SlurmQueue) -> QueueState:
        read.append(queue)
        return QueueState("PENDING")

    monkeypatch.setattr(SlurmQueue, "read", answer)
    waiting = [directory(tmp_path / f"a/{n}_embed", str(n), submitted=float(n)) for n in range(10, 30)]
    assert find_job("embed", environ, elsewhere, takes_newest=True).directory == waiting[-1]
    assert len(read) == 2


@pytest.mark.parametrize("table", ["sweep.json", "pipeline.json"])
def test_a_sweep_or_pipeline_is_not_preferred_because_it_has_no_report(
    table: str, tmp_path: Path, elsewhere: Path, environ: dict[str, str]
) -> None:
    ended = directory(tmp_path / "a/local-aaa1_embed", "local-aaa1")
    (ended / "report.json").write_text("{}")
    parent = directory(tmp_path / "a/local-aaa2_embed", "local-aaa2")
    (parent / "manifest.json").rename(parent / table)
    for job in ("local-aaa", "embed"):
        with pytest.raises(LauncherError, match=f"'{job}' fits 2 jobs"):
            find_job(job, environ, elsewhere)
    assert found("local-aaa2", environ, elsewhere) == parent


def test_the_same_id_on_two_clusters_is_ambiguous(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    directory(tmp_path / "a/4459_embed", "4459")
    directory(tmp_path / "b/4459_other", "4459", cluster="hal")
    with pytest.raises(LauncherError, match="'4459' fits 2 jobs"):
        find_job("4459", environ, elsewhere)


def test_points_of_a_sweep_are_found_from_anywhere(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    home = tmp_path / "a/4459_sweep"
    sweep_directory(home, "4459_1_p1", "4459_12_p12")
    submission = {"job_id": "4459", "job_name": "sweep", "submitted": 1.0}
    register_job(home, submission, environ, elsewhere)
    assert found("4459", environ, elsewhere) == home
    assert found("4459_12", environ, elsewhere) == home / "4459_12_p12"
    assert found("4459_1", environ, tmp_path / "x") == home / "4459_1_p1"
    with pytest.raises(LauncherError, match="job 4459_7 was in "):
        find_job("4459_7", environ, elsewhere)


def test_a_sweep_whose_name_begins_with_a_number_is_none_of_its_points(tmp_path: Path, environ: dict[str, str]) -> None:
    home = tmp_path / "logs/4459_2_stage_20251122_041341"
    sweep_directory(home, "4459_2_p2")
    assert found("4459_2", environ, tmp_path) == home / "4459_2_p2"
    assert found("4459", environ, tmp_path) == home


def test_without_a_name_the_newest_directory_that_is_left_counts(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str]
) -> None:
    with pytest.raises(LauncherError, match="you have no job yet"):
        find_job(None, environ, elsewhere)
    old = directory(tmp_path / "a/1_old", "1", "old")
    new = directory(tmp_path / "a/2_new", "2", "new", submitted=2.0)
    assert find_job(None, environ, elsewhere).notices == (f"newest job: 2 new, {new}",)
    new.rename(tmp_path / "moved")
    job = find_job(None, environ, elsewhere)
    missing = f"job 2 is left out: it was in {new}, which was moved or deleted; if it was moved, name its new place"
    assert job == (old, (missing, f"newest job: 1 old, {old}"))
    with pytest.raises(LauncherError, match=f"job 2 was in {new}, which was moved or deleted"):
        find_job("2", environ, elsewhere)


def test_damaged_and_foreign_entries_are_left_out(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    run_dir = directory(tmp_path / "a/7_embed", "7")
    (entry,) = (tmp_path / "state/gpujob/runs").iterdir()
    for number, text in enumerate(["", "{", "[]", '{"schema": 99}', '{"job_id": 7}', "[" * 10_000, "\0"]):
        entry.with_name(f"{number}-00000000.json").write_text(text)
    entry.with_name("8-00000000.json").symlink_to(entry)
    os.mkfifo(entry.with_name("9-00000000.json"))
    assert [one.run_dir for one in read_own_entries(environ)] == [str(run_dir)]
    assert found(None, environ, elsewhere) == run_dir
    if os.geteuid() == 0:
        os.chown(entry, NOBODY, NOBODY)
        assert read_own_entries(environ) == []


def test_the_index_keeps_the_newest_jobs(tmp_path: Path, elsewhere: Path, environ: dict[str, str]) -> None:
    (directory(tmp_path / "a/0_first", "0") / "report.json").touch()
    folder = tmp_path / "state/gpujob/runs"
    (entry,) = folder.iterdir()
    os.utime(entry, (1, 1))
    for number in range(1, MOST_ENTRIES):
        os.link(entry, folder / f"{number}-00000000.json")
    first = folder / "first-00000000.json"
    first.write_bytes(entry.read_bytes())
    os.utime(first, (0, 0))
    directory(tmp_path / "a/1_last", "last")
    names = {path.name for path in folder.iterdir()}
    assert len(names) == MOST_ENTRIES
    assert first.name not in names
    assert any(name.startswith("last-") for name in names)


def test_the_index_keeps_older_jobs_that_may_run(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "MOST_ENTRIES", 2)
    monkeypatch.setattr(entries, "MOST_OLDER", 2)
    (directory(tmp_path / "a/1_service", "1", "service") / "targets.json").touch()
    (tmp_path / "a/1_service/report.json").touch()  # of the attempt before
    for number in range(2, 9):
        path = directory(tmp_path / f"a/{number}_short", f"{number}", "short")
        (path / "report.json").touch()
    assert found("service", environ, elsewhere) == tmp_path / "a/1_service"
    for number in range(10, 15):  # cancelled while they waited
        directory(tmp_path / f"a/{number}_waiting", f"{number}", "waiting")
    assert sorted(one.job_id for one in read_own_entries(environ)) == ["1", "12", "13", "14"]


def test_an_old_job_on_a_file_system_that_hangs_keeps_its_place_and_delays_no_launch(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "MOST_ENTRIES", 2)
    directory(tmp_path / "hung/1_old", "1")
    directory(tmp_path / "a/2_new", "2")
    answers_again, read, real_stat = threading.Event(), [], os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "hung")):
            answers_again.wait(30.0)
            read.append(path)
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    directory(tmp_path / "a/3_newest", "3")
    assert read == []
    answers_again.set()
    assert sorted(one.job_id for one in read_own_entries(environ)) == ["1", "2", "3"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_index_of_the_site_is_believed_only_about_the_owner_of_an_entry(
    tmp_path: Path, elsewhere: Path, environ: dict[str, str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (elsewhere / "gpujob.yaml").write_text(f"registry_dir: {site}\n")
    run_dir = tmp_path / "theirs/7_embed"
    run_dir.mkdir(parents=True)
    (run_dir / "manifest.json").write_text("{}")
    submission = {"job_id": "7", "job_name": "embed", "submitted": 1.0}
    register_job(run_dir, submission, {}, elsewhere)
    (entry,) = site.iterdir()
    assert found("7", environ, elsewhere) == run_dir
    os.chown(entry, NOBODY, NOBODY)  # somebody says so of our directory
    with pytest.raises(LauncherError, match="is neither"):
        find_job("7", environ, elsewhere)
    os.chown(run_dir, NOBODY, NOBODY)
    assert found("7", environ, elsewhere) == run_dir
    for number, end in enumerate(("\0", "\ud800")):  # no directory has such a name
        planted = entry.with_name(f"7-0000000{number}.json")
        planted.write_text(json.dumps({**json.loads(entry.read_text()), "run_dir": f"{run_dir}{end}"}))
    assert found("7", environ, elsewhere) == run_dir


def test_the_output_file_that_slurm_knows_leads_to_the_job(
    tmp_path: Path, elsewhere: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "a/4459_embed"
    run_dir.mkdir(parents=True)
    (run_dir / "manifest.json").write_text("{}")
    slurm.say("scontrol", "job", f"JobId=4459 JobName=embed\n   JobState=RUNNING\n   StdOut={run_dir}/log.out\n")
    environ = dict(os.environ)
    assert found("4459", environ, elsewhere) == run_dir
    home = tmp_path / "a/77_sweep"
    (home / "tasks").mkdir(parents=True)
    (home / "sweep.json").write_text("{}")
    slurm.say("scontrol", "job", f"JobId=77\n   StdOut={home}/tasks/77_4294967294/log.out\n")
    assert found("77", environ, elsewhere) == home
    calls = len(slurm.calls("scontrol"))
    with pytest.raises(LauncherError):
        find_job("local-77", environ, elsewhere)
    assert len(slurm.calls("scontrol")) == calls


def test_a_closed_directory_is_reported_without_a_traceback(tmp_path: Path, elsewhere: Path) -> None:
    run_dir = directory(tmp_path / "a/local-77aa_embed", "local-77aa")
    (run_dir / "manifest.json").unlink()
    done = gpujob("watch", "local-77aa", cwd=elsewhere, env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"gpujob: job local-77aa was in {run_dir}, which was moved or deleted; if it was moved, name its new place\n"
    )


def test_an_entry_says_what_the_index_of_a_cluster_needs(tmp_path: Path, elsewhere: Path) -> None:
    directory(tmp_path / "a/7_embed", "7", user="ada", host="login1", cluster="hal", versions={"gpujob": "1"})
    (entry,) = (tmp_path / "state/gpujob/runs").iterdir()
    assert (entry.stat().st_mode & 0o777, entry.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert json.loads(entry.read_text()) == {
        "schema": 1,
        "job_id": "7",
        "job_name": "embed",
        "run_dir": str(tmp_path / "a/7_embed"),
        "submitted": 1.0,
        "user": "ada",
        "host": "login1",
        "cluster": "hal",
        "budget": None,
        "notify": "",
        "slurm_cluster": "hal",
    }
