"""`gpujob track` itself, with a fake squeue and no accounting."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.contract.file_locks import lock_file
from exporter.slurm.commands_reader import NO_CLUSTER, SlurmReader
from exporter.slurm.sources.shared_answers_reader import read_shared_queue
from launcher.cli.main import main
from launcher.track.state import find_state_files
from tests.support.fake_slurm import BIN, FakeSlurm

Run = Callable[..., tuple[int | str | None, str, str]]
RUNNING = (
    "7|RUNNING|None|100|110|N/A|5:00|0|n1|gpu|cpu=4,mem=600M,node=1,billing=4,gres/gpu=4|"
    "7|ada|lab|normal|1|(null)|/dev/null|job|\n"
)
COMPLETED = RUNNING.replace("RUNNING", "COMPLETED").replace("N/A", "170")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{BIN}:{Path(sys.executable).parent}")
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpujob", "track", "--user", "ada", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def test_an_answer_of_before_the_submission_does_not_hide_a_job(
    slurm: FakeSlurm, track: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slurm.say("squeue", "out", "")
    read_shared_queue(SlurmReader("ada", None, os.environ), os.environ)  # as another command a moment ago
    slurm.say("squeue", "out", COMPLETED)
    assert track("7")[0] == 0


def test_after_ctrl_c_the_same_command_goes_on(slurm: FakeSlurm, track: Run) -> None:
    slurm.say("squeue", "out", RUNNING)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    status, log, problem = track()
    signal.signal(signal.SIGALRM, before)
    assert (status, log.count("STATE_CHANGE")) == (10, 1)
    assert "interrupted; the jobs continue, and the same command follows them again" in problem
    slurm.say("squeue", "out", COMPLETED)
    status, out, log = track("--json")
    assert (status, log.count("STATE_CHANGE"), log.count("QUERY_FAILED: sacct")) == (0, 1, 1)
    (job,) = json.loads(out)["jobs"].values()
    assert [event["state"] for event in job["history"]] == ["RUNNING", "COMPLETED"]
    assert not list((slurm.folder / "state" / "gpujob" / "track").glob("*.json"))  # all have ended


@pytest.mark.parametrize("words", [(), ("job",), ("7",)])
def test_a_run_that_goes_on_follows_what_its_words_mean_now(
    words: tuple[str, ...], slurm: FakeSlurm, track: Run
) -> None:
    slurm.say("squeue", "out", RUNNING)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    assert track(*words)[0] == 10
    slurm.say("squeue", "out", COMPLETED + RUNNING.replace("7|", "9|"))
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    status, log, problem = track(*words)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    assert "gpujob: continues the run of " in problem
    if words == ("7",):  # an id means one job
        assert (status, log.count("ALL_COMPLETE"), "(9)" in log) == (0, 1, False)
        return
    assert (status, log.count("ALL_COMPLETE")) == (10, 0)
    slurm.say("squeue", "out", COMPLETED.replace("7|", "9|").replace("COMPLETED", "FAILED"))
    status, out, log = track(*words, "--json")
    assert (status, {key: job["state"] for key, job in json.loads(out)["jobs"].items()}) == (
        1,
        {"7": "COMPLETED", "9": "FAILED"},
    )


def test_a_state_file_is_of_one_run_and_one_process(slurm: FakeSlurm, track: Run) -> None:
    slurm.say("squeue", "out", COMPLETED)
    path = Path("states.json")
    _, lock = find_state_files((), path, os.environ)
    descriptor = lock_file(lock)
    status, _, problem = track("job", "--state-file", "states.json")
    os.close(descriptor)
    assert status == 2
    assert f"gpujob: states.json is in use by process {os.getpid()} on " in problem
    path.write_text('{"user": "ada", "words": ["8"], "started": 1, "updated": 1, "jobs": {}, "summary": {}}')
    assert track("job", "--state-file", "states.json")[::2] == (
        2,
        "gpujob: states.json has the states of another run (8); give another --state-file\n",
    )


def test_a_log_that_cannot_be_written_ends_no_run(slurm: FakeSlurm, track: Run) -> None:
    slurm.say("squeue", "out", COMPLETED)
    status, log, problem = track("job", "--log", "/dev/full")
    assert (status, log.count("STATE_CHANGE")) == (0, 2)
    assert problem.count("gpujob: /dev/full cannot be written: No space left on device") == 1


def test_a_machine_without_a_cluster_is_an_error_at_once(slurm: FakeSlurm, track: Run) -> None:
    slurm.say("squeue", "err", "squeue: fatal: Could not establish a configuration source\n")
    slurm.say("squeue", "status", 1)
    problem = f"gpujob: squeue {NO_CLUSTER}\n"
    assert track("7") == (2, "", problem)
