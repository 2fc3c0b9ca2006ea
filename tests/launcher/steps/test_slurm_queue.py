"""State of a job in the Slurm queue, with a fake squeue on PATH."""

import json
import time
from pathlib import Path

import pytest

from exporter.slurm.sources import shared_answers_reader
from launcher.steps import slurm_queue
from launcher.steps.slurm_queue import QueueState, SlurmQueue
from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    return fake


def run_dir(folder: Path, job_id: str, **submission: object) -> Path:
    path = folder / f"{job_id}_job_20251122_041341"
    path.mkdir()
    (path / f"{job_id}.json").write_text(json.dumps(submission))
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("PENDING|Dependency\n", QueueState("PENDING", "Dependency")),
        ("RUNNING|None\n", QueueState("RUNNING")),
        ("REQUEUE_HOLD|(null)\n", QueueState("PENDING")),
        ("CLUSTER: other\nPENDING|Priority\nPENDING|None\n", QueueState("PENDING", "Priority")),
        ("CLUSTER: other\n", QueueState("")),
        ("COMPLETED|None\n", QueueState("")),
        ("44590|RUNNING\n", QueueState("")),
        ("", QueueState("")),
    ],
)
def test_state_and_reason_are_those_of_the_first_component(
    slurm: FakeSlurm, tmp_path: Path, text: str, found: QueueState
) -> None:
    slurm.say("squeue", "out", text)
    assert SlurmQueue(tmp_path / "4459_job").read() == found


def test_a_task_is_found_among_those_that_wait_together(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.say("squeue", "out", "4459_[2-4]|PENDING\n4459_1|RUNNING\n")
    found = {index: SlurmQueue(run_dir(tmp_path, f"4459_{index}")).read().state for index in (1, 3, 5)}
    assert found == {1: "RUNNING", 3: "PENDING", 5: ""}


def test_a_job_that_has_got_the_id_later_is_not_this_one(slurm: FakeSlurm, tmp_path: Path) -> None:
    path = run_dir(tmp_path, "4459", submitted=time.time() - 30 * 86400.0)
    slurm.say("squeue", "out", "RUNNING\n")
    assert SlurmQueue(path).read() == QueueState("")
    slurm.say("squeue", "out", "RUNNING*1\n")  # a requeue changes the submit time
    assert SlurmQueue(path).read() == QueueState("RUNNING", restarts=1)


def test_a_point_that_an_older_version_resumed_is_in_the_queue(slurm: FakeSlurm, tmp_path: Path) -> None:
    path = run_dir(tmp_path, "4460_3", submitted=time.time() - 86400.0)  # that of the sweep
    arrays = [{"job_id": "4459", "submitted": time.time() - 86400.0}, {"job_id": "4460", "submitted": time.time()}]
    (tmp_path / "sweep.json").write_text(json.dumps({"arrays": arrays}))
    slurm.say("squeue", "out", "4460_3|RUNNING\n")
    assert SlurmQueue(path).read() == QueueState("RUNNING")


def test_a_hundred_watchers_of_one_job_make_one_query(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.say("squeue", "out", "PENDING|Dependency\n")
    path = run_dir(tmp_path, "4459", user="ada", cluster="c2", submitted=time.time() - 9.0)
    assert {SlurmQueue(path).read() for _ in range(100)} == {QueueState("PENDING", "Dependency")}
    (call,) = slurm.calls("squeue")
    assert call["argv"][:7] == ["--clusters=c2", "-h", "-a", "-t", "all", "-u", "ada"]
    monkeypatch.setattr(shared_answers_reader, "QUEUE_MAX_AGE_S", 0.0)
    slurm.say("squeue", "out", "RUNNING|None\n")
    assert SlurmQueue(path).read() == QueueState("RUNNING")


def test_an_answer_before_the_submission_says_nothing_of_the_job(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.say("squeue", "out", "")
    SlurmQueue(tmp_path / "7_other").read()
    monkeypatch.setattr(slurm_queue, "READ_INTERVAL_S", 0.0)
    queue = SlurmQueue(run_dir(tmp_path, "4459", submitted=time.time()))
    assert queue.read() == QueueState(None)  # Slurm was asked a moment ago
    monkeypatch.setattr(shared_answers_reader, "LEAST_S", 0.0)
    slurm.say("squeue", "out", "PENDING\n")
    assert [queue.read().state for _ in range(3)] == ["PENDING"] * 3
    assert len(slurm.calls("squeue")) == 2
    queue.require_since(time.time() + 60.0)  # it has started, by the clock of a node
    slurm.say("squeue", "out", "RUNNING\n")
    assert queue.read() == QueueState("RUNNING")


def test_an_unknown_job_differs_from_a_slurm_that_does_not_answer(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.say("squeue", "status", 1)
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    assert SlurmQueue(tmp_path / "4459_job").read() == QueueState(None)


def test_without_a_place_to_share_it_the_answer_is_kept(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(slurm_queue, "READ_INTERVAL_S", 0.0)
    slurm.say("squeue", "out", "PENDING\n")
    queue = SlurmQueue(tmp_path / "4459_job")
    assert [queue.read().state for _ in range(20)] == ["PENDING"] * 20
    slurm.say("squeue", "status", 1)
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    queue.require_since(time.time())
    assert [queue.read().state for _ in range(20)] == [None] * 20
    assert len(slurm.calls("squeue")) == 2
