"""`gpujob ps` itself, with fake Slurm commands."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.contract.records import JsonValue
from exporter.slurm.commands_reader import NO_CLUSTER
from exporter.slurm.sources import shared_answers_reader
from launcher.cli.cluster.queue_options import PAST_INTERVAL_S, repeat
from launcher.fleet import own_runs
from launcher.pipeline.directory import PipelineRecord, write_record
from launcher.registry.entries import register_job
from launcher.sweep import directory as sweep_directory
from launcher.sweep.directory import SweepArray, SweepPoint, SweepRecord
from tests.launcher.fleet.conftest import Gpujob
from tests.launcher.fleet.run_dirs import run_directory
from tests.support.fake_slurm import FakeSlurm

RUNNING = (
    "7|RUNNING|None|100|110|N/A|5:00|0|n1|gpu|cpu=4,mem=600M,node=1,gres/gpu=4|7|ada|lab|normal|1|(null)|{log}|job|\n"
)
WAITING = "8|PENDING|Priority|101|N/A|N/A|5:00|0||cpu|cpu=4|8|ada|lab|normal|1|(null)|/dev/null|next|\n"
ENDED = "9|FAILED|NonZeroExitCode|90|95|99|5:00|0|n1|gpu|cpu=4|9|ada|lab|normal|1|(null)|/dev/null|old|\n"
ACCOUNTED = "gpu|lab|normal|1|n1|5|ada|COMPLETED|0:0|50|60|160|100|5|4|00:01:40|cpu=4,gres/gpu=2,mem=1000M||early\n"
REPORT = {"schema": 1, "job_id": "6", "job_name": "x", "exit_status": 0, "attempt": 0}  # keys that every report has
GONE = "slurm_load_jobs error: Unable to contact slurm controller"


COLUMNS = ["NAME", "JOB", "BACKEND", "GPU", "PRICE", "STATUS", "PROGRESS", "ETA", "MARGIN", "COST", "SUBMITTED"]


def queue(slurm: FakeSlurm, log: object = "/dev/null") -> None:
    slurm.say("squeue", "out", RUNNING.format(log=log) + WAITING + ENDED)


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.partition("\n\n")[0].splitlines()[1:]]


def test_two_commands_ask_slurm_once(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    queue(slurm)
    status, out, err = gpujob("ps")
    assert (status, err, names(out)) == (0, "", ["next", "job"])
    assert out.splitlines()[2].startswith("job   7    slurm    4    RUNNING  ")
    assert out.endswith("\n\nPriority: jobs with a higher priority come first\n")
    assert names(gpujob("ps", "-a", "--sort", "job")[1]) == ["job", "next", "old"]
    assert names(gpujob("ps", "--partition", "gpu,x")[1]) == ["job"]
    assert names(gpujob("ps", "--state", "failed,pending", "-n", "2")[1]) == ["next", "old"]
    body = json.loads(gpujob("ps", "--json", "-n", "1")[1])
    assert (body["runs"][0]["run_name"], body["ended_from"]) == ("next", "queue")
    assert abs(body["as_of"] - time.time()) < 30
    assert len(slurm.calls()) == 1


def test_of_jobs_submitted_in_one_second_the_newest_comes_first(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    rows = [f"{number}|{WAITING.partition('|')[2].replace('next', f'job{number}')}" for number in (9, 8, 11, 10)]
    slurm.say("squeue", "out", "".join(rows))
    assert names(gpujob("ps", "-v")[1]) == ["job11", "job10", "job9", "job8"]


def test_everybodys_jobs_are_another_question(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    queue(slurm)
    assert [gpujob("ps", *words)[0] for words in ((), ("--user", "bob"), ("--all-users",))] == [0, 0, 0]
    users = [call["argv"][call["argv"].index("-u") + 1] if "-u" in call["argv"] else None for call in slurm.calls()]
    assert users == ["ada", "bob", None]
    assert gpujob("ps", "--user", "bob", "--all-users")[::2] == (
        2,
        "gpujob: --user and --all-users exclude each other; leave one of them out\n",
    )


def test_without_an_answer_the_known_state_is_shown_with_its_age(
    slurm: FakeSlurm, gpujob: Gpujob, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(slurm)
    gpujob("ps")
    slurm.say("squeue", "err", GONE)
    slurm.say("squeue", "status", 1)
    monkeypatch.setattr(shared_answers_reader, "QUEUE_MAX_AGE_S", 0.0)
    status, out, err = gpujob("ps")
    assert (status, names(out)) == (0, ["next", "job"])
    assert json.loads(gpujob("ps", "--json")[1])["problem"] == f"squeue exited with 1: {GONE}"
    assert err.startswith("gpujob: as of ")
    assert err.endswith(f" ago): squeue does not answer: exited with 1: {GONE}\n")
    assert gpujob("ps", "--user", "bob") == (9, "", f"gpujob: squeue exited with 1: {GONE}\n")
    slurm.say("squeue", "err", "squeue: fatal: Could not establish a configuration source\n")
    assert gpujob("ps", "--user", "eve") == (2, "", f"gpujob: squeue {NO_CLUSTER}\n")


def test_ended_jobs_come_from_accounting_with_their_efficiency(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path
) -> None:
    queue(slurm)
    slurm.say("sacct", "out", ACCOUNTED + "|||||5.0|||0:0|60|60|160|100||4|00:01:40||cpu=1,mem=250000000|python\n")
    status, out, err = gpujob("ps", "--since", "1970-01-01")
    assert (status, err, names(out)) == (0, "", ["next", "job", "old", "early"])
    assert out.splitlines()[-1] == "ended jobs are from accounting"
    early = out.splitlines()[4]
    assert early.split()[:5] == ["early", "5", "slurm", "2", "COMPLETED"]
    assert " 25%   24%   " in early
    (call,) = slurm.calls("sacct")
    assert call["argv"][: call["argv"].index("-o")] == ["-n", "-P", "-D", "--noconvert", "-S", "uts0", "-u", "ada"]
    body = json.loads(gpujob("ps", "--since", "1970-01-01", "--json")[1])
    assert (body["ended_from"], body["runs"][3]["jobs"][0]["figures"]["cpu_ratio"]) == ("accounting", 0.25)
    slurm.say("sacct", "err", "Slurm accounting storage is disabled")
    slurm.say("sacct", "status", 1)
    run_dir = run_directory(tmp_path / "logs" / "4_mine")
    (run_dir / "report.json").write_text(
        '{"schema": 1, "job_id": "4", "job_name": "mine", "state": "TIMEOUT", "exit_status": 3, "end": 120}'
    )
    submission = {"job_id": "4", "job_name": "mine", "submitted": 40.0, "user": "ada"}
    register_job(run_dir, submission, os.environ, tmp_path)
    status, out, err = gpujob("ps", "--since", "1970-01-01")
    assert (status, names(out)) == (0, ["next", "job", "old", "mine"])
    assert out.splitlines()[4].split()[4] == "TIMEOUT"
    assert "ended jobs are those of gpujob, from their reports" in err


def test_a_running_job_of_gpujob_has_progress_and_eta(slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "logs" / "7_job")
    queue(slurm, run_dir / "log.out")
    (tmp_path / "gpujob.yaml").write_text("prices: {currency: EUR, gpu_hour: {default: 1.8}}\n")
    out = gpujob("ps")[1]
    assert out.splitlines()[0].split() == COLUMNS
    # the sidecar estimated 10 minutes a minute ago
    assert re.search(r" 66\.7% 2/3 steps  (8m 5\ds|9m 00s)  -\d+d \d+h  EUR ", out.splitlines()[2])
    job = json.loads(gpujob("ps", "--json")[1])["runs"][1]["jobs"][0]
    assert (job["run_dir"], job["cost"]["currency"]) == (str(run_dir), "EUR")
    assert gpujob("ps", "--user", "bob")[0] == 0
    (tmp_path / "gpujob.yaml").write_text("prices: {gpu_hour: 2}\n")
    status, _, err = gpujob("ps")
    assert (status, "has no price for each type of GPU" in err) == (2, True)


def test_a_mount_that_hangs_costs_a_bounded_time(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_directory(tmp_path / "logs" / "7_job")
    answers, read = threading.Event(), run_files.read_json_text

    def read_or_hang(path: str | os.PathLike[str]) -> str:
        if run_dir / "status" in Path(path).parents:
            answers.wait(60)
        return read(path)

    monkeypatch.setattr(run_files, "read_json_text", read_or_hang)
    queue(slurm, run_dir / "log.out")
    start = time.monotonic()
    assert names(gpujob("ps")[1]) == ["next", "job"]
    assert 1 < time.monotonic() - start < 50
    answers.set()


def test_jobs_of_this_machine_are_listed_too(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(slurm)
    run_dir = run_directory(tmp_path / "logs" / "local-3f_smoke")
    (run_dir / "report.json").write_text(
        '{"schema": 1, "job_id": "local-3f", "job_name": "smoke", "state": "INCOMPLETE", "exit_status": 8, "end": 120}'
    )
    submission = {"job_id": "local-3f", "job_name": "smoke", "submitted": 99.0, "user": "ada"}
    register_job(run_dir, submission, os.environ, tmp_path)
    assert names(gpujob("ps")[1]) == ["next", "job"]
    line = gpujob("ps", "-a")[1].splitlines()[3]
    assert line.split()[:5] == ["smoke", "local-3f", "local", "2", "INCOMPLETE"]
    assert "smoke" not in gpujob("ps", "-a", "--user", "bob")[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    status, out, err = gpujob("ps")
    assert (status, err, names(out)) == (0, "", ["smoke"])


def test_a_job_of_this_machine_that_runs_is_listed_however_many_came_later(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path
) -> None:
    slurm.say("squeue", "out", "")
    for number in range(own_runs.MOST_RUNS + 1):
        run_dir = run_directory(tmp_path / "logs" / f"local-{number}_job")
        if number:
            report = {**REPORT, "job_id": f"local-{number}", "state": "COMPLETED", "end": 120}
            (run_dir / "report.json").write_text(json.dumps(report))
        name = "short" if number else "service"
        submission = {"job_id": f"local-{number}", "job_name": name, "submitted": 99.0 + number, "user": "ada"}
        register_job(run_dir, submission, os.environ, tmp_path)
    assert [name for name in names(gpujob("ps", "-a")[1]) if name != "short"] == ["service"]


@pytest.mark.parametrize(("end", "last"), [(130, "embed"), (110, "smoke")])
def test_a_sweep_of_this_machine_can_be_the_last_one_that_ended(
    end: int, last: str, slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path
) -> None:
    slurm.say("squeue", "out", "")
    job, sweep = tmp_path / "logs" / "local-3f_smoke", tmp_path / "logs" / "local-4a_embed"
    ends = ((job, "local-3f", "COMPLETED", 120), (sweep / "p0", "local-4a_0", "FAILED", end))
    for folder, job_id, state, ended in ends:
        run_directory(folder)
        report = {**REPORT, "job_id": job_id, "state": state, "end": ended}
        (folder / "report.json").write_text(json.dumps(report))
    submission: dict[str, JsonValue] = {"job_id": "local-4a", "job_name": "embed", "submitted": 98.0, "user": "ada"}
    points = (SweepPoint(0, "p0", {}, ("p0",)), SweepPoint(1, "p1", {}))  # Ctrl-C came before the second
    record = SweepRecord(submission=submission, max_parallel=1, local=True, points=points)
    sweep_directory.write_record(sweep, record)
    register_job(sweep, submission, os.environ, tmp_path)
    register_job(job, {**submission, "job_id": "local-3f", "job_name": "smoke"}, os.environ, tmp_path)
    assert names(gpujob("ps")[1]) == [last]
    register_job(sweep, {**submission, "job_id": "local-5b", "submitted": 99.0}, os.environ, tmp_path)  # resumed
    (line,) = (line for line in gpujob("ps", "-a")[1].splitlines() if "embed" in line)
    assert line.split()[:5] == ["embed", "local-4a", "local", "-", "FAILED"]


def test_without_slurm_and_jobs_the_list_is_empty(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = "squeue is not on PATH; load the Slurm module\n"
    status, out, err = gpujob("ps")
    assert (status, names(out)) == (0, [])
    assert err == f"gpujob: no job of yours is known: none on this machine, and {problem}"
    assert json.loads(gpujob("ps", "--json")[1])["runs"] == []
    assert gpujob("ps", "--all-users") == (2, "", f"gpujob: {problem}")


def test_a_job_of_this_machine_that_is_not_read_in_time_is_named(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_directory(tmp_path / "logs" / "local-3f_smoke")
    submission = {"job_id": "local-3f", "job_name": "smoke", "submitted": 99.0, "user": "ada"}
    register_job(run_dir, submission, os.environ, tmp_path)
    answers = threading.Event()

    def hang(_: Path) -> None:
        answers.wait(60)
        raise OSError

    monkeypatch.setattr(own_runs, "read_manifest", hang)
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    status, out, err = gpujob("ps")
    answers.set()
    assert (status, names(out)) == (0, [])
    assert err.startswith("gpujob: warning: job local-3f is left out: not read within 2 s")


def test_a_state_that_does_not_exist_is_refused(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    queue(slurm)
    assert names(gpujob("ps", "--state", "running")[1]) == ["job"]
    status, out, err = gpujob("ps", "--state", "RUNING")
    assert (status, out) == (2, "")
    assert err.startswith('gpujob: --state: RUNING is not a state; did you mean "RUNNING"? (known: BOOT_FAIL, ')


@pytest.mark.parametrize("options", [(), ("--since", "7d")])
def test_watch_repeats_what_is_known_and_spares_accounting(
    options: tuple[str, ...], slurm: FakeSlurm, gpujob: Gpujob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    queue(slurm)
    monkeypatch.setattr("launcher.cli.cluster.queue_options.WATCH_INTERVAL_S", 0.1)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    status, out, _ = gpujob("ps", "-w", "--json", *options)
    signal.signal(signal.SIGALRM, before)
    lines = [json.loads(line)["runs"][0]["run_name"] for line in out.splitlines()]
    assert (status, len(lines) > 1, set(lines)) == (130, not options, {"next"})
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (1, len(options) // 2)


def test_an_age_moves_with_the_clock_while_watching(
    slurm: FakeSlurm, gpujob: Gpujob, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sleep, later_s = time.time, time.sleep, [0.0]

    def rest(seconds: float) -> None:
        if seconds < PAST_INTERVAL_S:
            sleep(seconds)  # while a command ends
        elif later_s[0]:
            raise KeyboardInterrupt
        else:
            later_s[0] = 3600.0

    slurm.say("squeue", "out", ENDED.replace("|99|", f"|{now() - 1800:.0f}|"))
    monkeypatch.setattr("time.time", lambda: now() + later_s[0])
    monkeypatch.setattr("time.sleep", rest)
    out = gpujob("ps", "-w", "--json", "--since", "1h")[1]
    assert [len(json.loads(line)["runs"]) for line in out.splitlines()] == [1, 0]


def test_watching_thousands_of_jobs_leaves_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rests, used = list[float](), iter([0.0, 1.0, 1.05, 1.05, 1.35])  # CPU time before each time, and after it

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", rest)
    monkeypatch.setattr("time.process_time", lambda: next(used))
    with pytest.raises(SystemExit):
        repeat(lambda: ({}, []), watch=True, as_json=True)
    assert rests == pytest.approx([5.0, 5.0, 15.0])


@pytest.mark.parametrize("since", ["soon", "7x", "2026-13-01"])
def test_a_wrong_age_is_refused(slurm: FakeSlurm, gpujob: Gpujob, since: str) -> None:
    status, _, err = gpujob("ps", "--since", since)
    assert (status, "is neither an age such as 12h, 7d or 2w nor a date" in err) == (2, True)


def test_a_pipeline_is_one_line_that_run_opens(slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path) -> None:
    queue(slurm)
    parts = [
        {"name": name, "file": "x.yaml", "job_id": job_id, "run_dir": str(tmp_path / f"{job_id}_x"), "after": {}}
        for name, job_id in (("prep", "6"), ("train", "7"), ("eval", "8"))
    ]
    directory = tmp_path / "pipeline_r8"
    directory.mkdir()
    submission = {"job_id": "pipeline-6", "job_name": "r8", "submitted": 100.0, "user": "ada"}
    write_record(directory, PipelineRecord.from_json({"schema": 1, "submission": submission, "parts": parts}))
    ended = run_directory(tmp_path / "6_x")
    run_files.write_json(ended / "report.json", {**REPORT, "state": "COMPLETED"})
    register_job(directory, submission, os.environ, tmp_path)
    out = gpujob("ps")[1]
    assert names(out) == ["r8"]
    assert "pipeline-6" in out
    assert "1 PENDING (Priority), 1 RUNNING" in out
    assert sorted(names(gpujob("ps", "-v")[1])) == ["job", "next"]
    status, out, err = gpujob("ps", "--run", "r8")
    assert (status, err, names(out)) == (0, "", ["eval", "train", "prep"])
    assert out.splitlines()[3].split()[:4] == ["prep", "6", "slurm", "-"]
    (run,) = json.loads(gpujob("ps", "--json")[1])["runs"]
    assert (run["run_name"], [job["job_id"] for job in run["jobs"]]) == ("r8", ["8", "7"])
    assert gpujob("ps", "--run", "nothing")[0] == 2


def test_the_array_of_a_resumed_sweep_is_a_part_of_its_pipeline(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path
) -> None:
    queue(slurm)
    sweep, pipeline = tmp_path / "5_x", tmp_path / "pipeline_r8"
    part = {"name": "lr", "file": "x.yaml", "job_id": "5", "run_dir": str(sweep), "after": {}, "arrays": ["5"]}
    for directory in (sweep, pipeline):
        directory.mkdir()
    submission: dict[str, JsonValue] = {"job_id": "pipeline-5", "job_name": "r8", "submitted": 100.0, "user": "ada"}
    write_record(pipeline, PipelineRecord.from_json({"schema": 1, "submission": submission, "parts": [part]}))
    arrays = tuple(SweepArray(job_id, "0", 100.0) for job_id in ("5", "7"))
    record = SweepRecord(submission=submission, max_parallel=1, local=False, points=(), arrays=arrays)
    sweep_directory.write_record(sweep, record)
    register_job(pipeline, submission, os.environ, tmp_path)
    assert sorted(names(gpujob("ps")[1])) == ["next", "r8"]
