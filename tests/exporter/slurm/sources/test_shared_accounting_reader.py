"""One question to accounting for all who follow jobs of a user."""

import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exporter.contract.file_locks import lock_file
from exporter.slurm.accounting import Attempt, Step
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import AttemptSnapshot
from exporter.slurm.sources.shared_accounting_reader import (
    KEPT_S,
    LAST_AHEAD,
    LAST_S,
    AccountingRequest,
    SharedAccounting,
)
from tests.support.exporter import FakeClock

EACH_S = 150.0


class Asked(SlurmReader):
    """Notes what sacct would be asked, and answers with one attempt of each job, or not."""

    def __init__(self) -> None:
        super().__init__("ada", None, {})
        self.questions: list[tuple[list[str], float]] = []
        self.problem: str | None = None

    def accounting(self, job_ids: Sequence[str], since: float) -> tuple[Attempt, ...]:
        self.questions.append((sorted(job_ids), since))
        if self.problem is not None:
            raise SlurmUnansweredError("sacct", self.problem)
        snapshot = AttemptSnapshot("COMPLETED", 1.0, 2.0, 3.0)
        return tuple(
            Attempt(f"{job_id}{task}", "ada", "x", snapshot, "0:0", 1.0, 1, None, (Step(3.0, 1.0, None),))
            for job_id in job_ids
            for task in ("_0", "_1")
        )


@pytest.fixture
def slurm() -> Asked:
    return Asked()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


def follower(slurm: Asked, folder: Path | None, clock: FakeClock) -> SharedAccounting:
    return SharedAccounting(slurm, {} if folder is None else {"HOME": str(folder)}, EACH_S, clock.time)


def answered(who: SharedAccounting, clock_at: float, *job_ids: str, is_last: bool = False) -> list[str]:
    wanted: Mapping[str, AccountingRequest] = {job_id: AccountingRequest(clock_at, 500.0) for job_id in job_ids}
    told = who.read(wanted, is_last=is_last)
    assert {attempt.job_id.partition("_")[0] for attempt in told.attempts} == told.answered.keys()
    assert len(told.attempts) == 2 * len(told.answered)
    return sorted(job_id for job_id, at in told.answered.items() if at >= clock_at)


def test_fifty_followers_ask_as_often_as_one(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    followers = {str(number): follower(slurm, tmp_path, clock) for number in range(50)}
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda pair: answered(pair[1], 1000.0, pair[0]), followers.items()))
    assert len(slurm.questions) <= 2
    clock.advance(60.0)  # all answer again, and nobody may ask
    for job_id, each in followers.items():
        answered(each, 1000.0, job_id)
    assert len(slurm.questions) <= 2
    clock.now = 1000.0 + EACH_S
    assert [answered(each, 1000.0, job_id) for job_id, each in followers.items()] == [[job_id] for job_id in followers]
    assert len(slurm.questions) <= 3
    assert sorted(job_id for ids, _ in slurm.questions for job_id in ids) == sorted(followers)
    assert {since for _, since in slurm.questions} == {500.0}


def test_an_answer_before_the_job_ended_is_of_no_use(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    first, second = follower(slurm, tmp_path, clock), follower(slurm, tmp_path, clock)
    assert answered(first, 1000.0, "7") == answered(second, 1000.0, "7") == ["7"]
    clock.advance(1.0)
    assert answered(second, 1001.0, "7") == ["7"]
    assert len(slurm.questions) == 2
    clock.advance(KEPT_S)
    assert answered(first, clock.now, "8") == ["8"]  # the others are forgotten
    assert answered(second, 1001.0, "7") == ["7"]
    assert len(slurm.questions) == 4


def test_who_waits_for_nothing_else_asks_within_seconds(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    first, second = follower(slurm, tmp_path, clock), follower(slurm, tmp_path, clock)
    for job_id in ("1", "2"):
        answered(first, 1000.0, job_id)
    assert (answered(first, 1000.0, "3"), answered(second, 1000.0, "4", is_last=True)) == ([], [])
    assert (first.next_at(is_last=False), second.next_at(is_last=True)) == (1000.0 + EACH_S, 1000.0 + LAST_S)
    clock.advance(LAST_S)
    assert (answered(second, 1000.0, "4", is_last=True), answered(first, 1000.0, "3")) == (["4"], ["3"])
    assert slurm.questions[2:] == [(["3", "4"], 500.0)]
    for number in range(60):  # jobs end all the time, each with a follower of its own
        clock.advance(10.0)
        answered(first, clock.now, str(number), is_last=True)
    assert len(slurm.questions) <= 2 + LAST_AHEAD + 600 / EACH_S


def test_without_an_answer_the_ids_wait_on(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    first, second = follower(slurm, tmp_path, clock), follower(slurm, tmp_path, clock)
    slurm.problem = "did not answer in 30 s"
    with pytest.raises(SlurmUnansweredError, match="30 s"):
        answered(first, 1000.0, "1")
    slurm.problem = None
    with pytest.raises(SlurmUnansweredError, match="30 s"):  # it would have asked then
        answered(second, 1000.0, "2")
    assert answered(second, 1000.0, "2") == ["2"]
    assert answered(first, 1000.0, "1") == ["1"]
    assert [ids for ids, _ in slurm.questions] == [["1"], ["1", "2"]]


def test_nobody_waits_longer_because_others_have_another_pace(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    slow = SharedAccounting(slurm, {"HOME": str(tmp_path)}, 60 * EACH_S, clock.time)
    for number in range(40):  # and some that ask when all their jobs have ended
        clock.advance(30.0)
        answered(slow, clock.now, f"{number}", is_last=number % 2 == 0)
    fast = follower(slurm, tmp_path, clock)
    assert fast.next_at(is_last=False) <= clock.now + EACH_S
    clock.advance(EACH_S)
    assert answered(fast, clock.now, "99") == ["99"]


def test_who_must_search_further_back_is_not_content_with_less(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    late, early = follower(slurm, tmp_path, clock), follower(slurm, tmp_path, clock)
    late.read({"7": AccountingRequest(1000.0, 900.0)}, is_last=False)
    assert answered(early, 1000.0, "7") == ["7"]
    for since in (900.0, 0.0, 500.0):  # nobody may ask now
        late.read({"8": AccountingRequest(1001.0, since), "9": AccountingRequest(1001.0, 900.0)}, is_last=False)
    clock.advance(2 * EACH_S)
    assert answered(late, 1001.0, "9") == []
    assert answered(late, 1001.0, "9") == ["9"]
    assert slurm.questions == [(["7"], 900.0), (["7"], 500.0), (["8"], 0.0), (["9"], 500.0)]


@pytest.mark.parametrize("has_home", [True, False])
def test_one_alone_needs_no_file_of_others(tmp_path: Path, slurm: Asked, clock: FakeClock, has_home: bool) -> None:
    alone = follower(slurm, tmp_path if has_home else None, clock)
    assert [answered(alone, 1000.0, job_id) for job_id in ("1", "2", "3")] == [["1"], ["2"], []]
    for path in tmp_path.rglob("sharedaccountingfile*.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.write_text("{")  # damaged
    clock.advance(EACH_S)
    assert answered(alone, 1000.0, "3") == ["3"]


def test_while_another_one_asks_nobody_waits(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    one = follower(slurm, tmp_path, clock)
    answered(one, 1000.0, "1")
    (path,) = tmp_path.rglob("sharedaccountingfile*.json")
    descriptor = lock_file(path.with_suffix(".lock"))
    assert (answered(one, 1000.0, "1"), answered(one, 1000.0, "2")) == (["1"], [])
    with open(descriptor):
        pass
    assert answered(one, 1000.0, "2") == ["2"]


def test_a_file_of_the_future_does_not_count(tmp_path: Path, slurm: Asked, clock: FakeClock) -> None:
    ahead = FakeClock(9000.0)
    other = follower(slurm, tmp_path, ahead)
    for job_id in ("1", "2"):
        answered(other, 9000.0, job_id)
    assert answered(follower(slurm, tmp_path, clock), 1000.0, "3") == ["3"]
