"""Time limits of waits."""

import pytest

from exporter.contract import clock
from exporter.contract.clock import LATE_S, Deadline
from tests.support.exporter import FakeClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of the machine, which the test advances."""
    fake = FakeClock(128.0)
    monkeypatch.setattr(clock, "time", fake)
    return fake


def test_a_deadline_is_over_after_its_limit(now: FakeClock) -> None:
    deadline = Deadline(2.0)
    assert deadline.left_s() == 2.0
    now.advance(1.5)
    assert deadline.left_s() == 0.5
    now.advance(0.5 + LATE_S / 2)
    assert deadline.left_s() == 0.0
    assert Deadline(0.0).left_s() == 0.0


@pytest.mark.parametrize(("late_s", "added_s"), [(LATE_S, LATE_S), (1.5, 1.5), (3600.0, 2.0)])
def test_a_process_that_stood_still_gets_that_time_once(late_s: float, added_s: float, now: FakeClock) -> None:
    deadline = Deadline(2.0)
    now.advance(2.0 + late_s)
    assert deadline.left_s() == added_s
    now.advance(added_s / 2)
    assert deadline.left_s() == added_s / 2
    now.advance(3600.0)
    assert deadline.left_s() == 0.0
