"""State of a job in the Slurm queue, with a fake squeue on PATH."""

from pathlib import Path

import pytest

from launcher.steps import slurm_queue
from launcher.steps.slurm_queue import QueueState, SlurmQueue
from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("PENDING|Dependency\n", QueueState("PENDING", "Dependency")),
        ("RUNNING|None\n", QueueState("RUNNING")),
        ("REQUEUE_HOLD|(null)\n", QueueState("PENDING")),
        ("CLUSTER: other\nPENDING|Priority\nPENDING|None\n", QueueState("PENDING", "Priority")),
        ("CLUSTER: other\n", QueueState("")),
        ("", QueueState("")),
    ],
)
def test_state_and_reason_are_those_of_the_first_component(
    slurm: FakeSlurm, tmp_path: Path, text: str, found: QueueState
) -> None:
    slurm.say("squeue", "out", text)
    assert SlurmQueue(tmp_path / "4459_job").read() == found


def test_slurm_is_queried_once_for_state_and_reason(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.say("squeue", "out", "PENDING|Dependency\n")
    queue = SlurmQueue(tmp_path / "4459_job_20251122_041341")
    assert [queue.read() for _ in range(3)] == [QueueState("PENDING", "Dependency")] * 3
    (call,) = slurm.calls("squeue")
    assert call["argv"][:5] == ["--local", "-h", "-a", "-j", "4459"]
    monkeypatch.setattr(slurm_queue, "QUERY_INTERVAL_S", 0.0)
    slurm.say("squeue", "out", "RUNNING|None\n")
    assert queue.read() == QueueState("RUNNING")


def test_an_unknown_job_differs_from_a_slurm_that_does_not_answer(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.say("squeue", "status", 1)
    slurm.say("squeue", "err", "slurm_load_jobs error: Invalid job id specified\n")
    assert SlurmQueue(tmp_path / "4459_job").read() == QueueState("")
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    assert SlurmQueue(tmp_path / "4459_job").read() == QueueState(None)
