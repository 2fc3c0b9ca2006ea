"""The tail of a batch of requests."""

import heapq
import itertools
import math
import random
import statistics

import pytest

from exporter.progress.eta.estimator import EtaEstimator
from exporter.progress.eta.tail import BatchTail, GapMoments, possible_tail_wait


def tail_after(*readings: tuple[float, float, float], pace: float = 2.0) -> BatchTail:
    """A tail after these readings (running, waiting, items left)."""
    tail = BatchTail()
    for running, waiting, left in readings:
        tail.update(running, waiting, left, pace)
    return tail


def test_the_tail_begins_when_fewer_requests_are_left_than_ran_at_once() -> None:
    tail = tail_after((32, 500, 532))
    assert not tail.has_begun(32)
    assert tail.has_begun(31)


def test_before_the_tail_the_remaining_work_is_steady_work_and_the_tail() -> None:
    work, tail = tail_after((32, 500, 532)).work(132, 264.0)
    assert tail == pytest.approx(2 * 32 * sum(1 / k for k in range(1, 33)), rel=0.01)
    assert work == pytest.approx(200 + tail)


def test_requests_that_are_not_the_counted_unit_are_ignored() -> None:
    assert tail_after((32, 500, 20)).work(20, 40.0) == (40.0, 0.0)
    assert tail_after((32, 0, 20)).work(20, 40.0) == (40.0, 0.0)
    assert not tail_after((32, 0, 20)).has_begun(20)


def test_with_a_client_side_queue_the_tail_begins_when_fewer_requests_run() -> None:
    tail = tail_after((32, 0, 500), (32, 0, 100))
    assert not tail.counts_requests
    tail.update(20, 0, 21, 2.0)
    assert tail.has_begun(20)


def test_the_pace_is_measured_at_full_load() -> None:
    tail = tail_after((32, 500, 532), pace=2.0)
    tail.update(10, 0, 10, 30.0)
    assert tail.seconds_per_item == 2.0


def batch(
    seed: int, slots: int = 32, requests: int = 600, mean_s: float = 100.0, longest_first: bool = False
) -> list[tuple[float, int, int, int]]:
    """Time, done, running and waiting at the end of each request; their lengths vary widely."""
    r = random.Random(seed)
    lengths = [mean_s * r.lognormvariate(0, 0.8) for _ in range(requests)]
    if longest_first:
        lengths = [length * r.lognormvariate(0, 0.05) for length in sorted(lengths, reverse=True)]
        lengths[slots:] = lengths[: slots - 1 : -1]  # the last of them is next
    running = lengths[:slots]
    heapq.heapify(running)
    waiting, found = lengths[slots:], []
    while running:
        t = heapq.heappop(running)
        if waiting:
            heapq.heappush(running, t + waiting.pop())
        found.append((t, requests - len(running) - len(waiting), len(running), len(waiting)))
    return found


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 0.97])
def test_running_and_waiting_counts_halve_the_error_of_a_batch(share: float) -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(12):
        lines = batch(seed)
        for with_counts, found in errors.items():
            estimator = EtaEstimator()
            for t, done, running, waiting in lines[: int(share * len(lines))]:
                estimator.update(t, done, len(lines))
                # Otherwise a server tells of other requests, so that all work seems steady.
                estimator.update_requests(*((running, waiting) if with_counts else (1e6, 0)))
            estimate = estimator.estimate(t)
            assert estimate is not None
            found.append(abs(math.log(estimate.seconds / (lines[-1][0] - t))))
    assert statistics.fmean(errors[True]) < 0.6 * statistics.fmean(errors[False])


def test_the_last_requests_of_a_batch_may_take_long() -> None:
    with_counts, without_counts = EtaEstimator(), EtaEstimator()
    for done in range(1, 599):
        for estimator in (with_counts, without_counts):
            estimator.update(2.0 * done, done, 600)
        with_counts.update_requests(min(100, 600 - done), max(0, 500 - done))
    at = 2.0 * 598 + 500
    assert without_counts.is_stalled(at)
    assert not with_counts.is_stalled(at)
    assert with_counts.is_stalled(at + 500)


def test_the_last_items_of_very_different_lengths_may_be_requests_in_parallel() -> None:
    assert possible_tail_wait(4.0, 2.0, sd=0.8) == 16.0
    assert possible_tail_wait(32.0, 2.0, sd=0.8) == 0.0
    assert possible_tail_wait(4.0, 2.0, sd=0.2) == 0.0


@pytest.mark.parametrize(("slots", "sd", "parallel"), [(16, 0.8, True), (1, 1.1, False), (1, 0.1, False)])
def test_ends_of_parallel_requests_are_known_by_their_rhythm(slots: int, sd: float, parallel: bool) -> None:
    r = random.Random(slots)
    running, before, gaps = [r.lognormvariate(0, sd) for _ in range(slots)], 0.0, GapMoments()
    heapq.heapify(running)
    for _ in range(400):
        end = heapq.heapreplace(running, running[0] + r.lognormvariate(0, sd))
        gaps.add(math.log(end - before))
        before = end
    assert gaps.are_parallel() == parallel


def test_guessed_requests_have_a_tail_until_a_server_says_how_many_run() -> None:
    tail = BatchTail()
    tail.guess(True, 100.0, 2.0)
    tail.guess(False, 10.0, 9.0)  # in the tail the rhythm changes
    work, length = tail.work(100.0, 200.0)
    assert work == pytest.approx(2 * 84 + length)
    assert not tail.has_begun(10.0), "silence in it is judged by its own rule"
    told = tail_after((8, 100, 108))
    sd = tail.sd
    tail.update(8, 100, 108, 2.0)
    assert (tail.work(100.0, 200.0), tail.sd < sd) == (told.work(100.0, 200.0), True)


def test_the_guessed_tail_widens_the_interval_of_the_last_tenth_of_a_batch() -> None:
    held: dict[bool, list[bool]] = {True: [], False: []}
    for seed, slots in itertools.product(range(6), (8, 16, 32)):
        lines = batch(seed, slots)
        for guessed, found in held.items():
            estimator = EtaEstimator()
            if not guessed:
                estimator.update(0.0, 0, len(lines))
                estimator.update_requests(1e6, 0)
            for t, done, *_ in lines[: int(0.9 * len(lines))]:
                estimator.update(t, done, len(lines))
            estimate = estimator.estimate(t)
            assert estimate is not None
            found.append(estimate.low <= lines[-1][0] - t <= estimate.high)
    assert sum(held[True]) >= max(2 * sum(held[False]), len(held[True]) / 2), held


def test_requests_sorted_longest_first_finish_together() -> None:
    errors = []
    for seed in range(5):
        lines, estimator = batch(seed, slots=8, requests=1500, longest_first=True), EtaEstimator()
        for t, done, *_ in lines[:1350]:
            estimator.update(t, done, len(lines))
        estimate = estimator.estimate(t)
        assert estimate is not None
        errors.append(abs(estimate.seconds / (lines[-1][0] - t) - 1))
    assert statistics.median(errors) < 0.25, errors
