"""Reads of run directories within a bounded time."""

import threading
import time

from launcher.fleet.own_runs import MOST_RUNS, read_within


def test_what_cannot_be_read_is_left_out_and_the_rest_is_in_order() -> None:
    def read(number: int) -> int:
        if number == 1:
            raise FileNotFoundError(number)
        time.sleep(0.05 if number == 0 else 0)
        return number * 10

    assert read_within(range(4), read) == [(0, 0), (2, 20), (3, 30)]
    assert len(read_within(range(MOST_RUNS + 9), str)) == MOST_RUNS
    assert read_within([], str) == []


def test_at_the_deadline_the_known_values_are_returned() -> None:
    release = threading.Event()

    def read(number: int) -> int:
        if number % 2:
            release.wait(30)
        return number

    start = time.monotonic()
    assert read_within(range(6), read, 2.0) == [(0, 0), (2, 2), (4, 4)]
    assert time.monotonic() - start < 25
    release.set()
