"""When a file system is full."""

import itertools
import math
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.disks.forecast import HISTORY_S, MOST_CHANGES, DiskForecast, is_space_low
from exporter.files.disks.space_reader import read_space

GB = 1e9
START = 1_700_000_000.0


def course(free: Callable[[float], float], seconds: float, every: float = 5.0) -> Iterator[tuple[float, float | None]]:
    """Seconds and the predicted second, at each reading."""
    fill = DiskForecast()
    for index in range(int(seconds / every)):
        t = index * every
        fill.update(START + t, free(t))
        at = fill.full_at(START + t)
        yield t, None if at is None else at - START


def last(free: Callable[[float], float], seconds: float, every: float = 5.0) -> float | None:
    """What is predicted in the end."""
    fill, t = DiskForecast(), 0.0
    for index in range(int(seconds / every)):
        t = index * every
        fill.update(START + t, free(t))
    at = fill.full_at(START + t)
    return None if at is None else at - START


def test_a_steady_writer_is_foreseen_from_its_first_changes_on() -> None:
    said = dict(course(lambda t: max(0.0, 100 * GB - 0.05 * GB * t), 2100))
    assert all(at == pytest.approx(2000) for t, at in said.items() if t >= 200)
    assert all(at is None for t, at in said.items() if t < 20)


def test_a_writer_that_flushes_in_steps_is_foreseen() -> None:
    at = [at for t, at in course(lambda t: 100 * GB - 0.05 * GB * (t // 30 * 30), 1500) if t > 300]
    assert all(value is not None and abs(value - 2000) < 0.05 * 2000 for value in at)


def test_noise_of_others_is_smoothed() -> None:
    noise = random.Random(7)
    said = course(lambda t: 100 * GB - 0.05 * GB * t + noise.gauss(0, 0.2) * GB, 1500)
    assert all(at is not None and abs(at - 2000) < 0.05 * 2000 for t, at in said if t > 400)


def test_checkpoints_between_rests_are_foreseen_by_their_rhythm() -> None:
    def free(t: float) -> float:
        return 100 * GB - (t // 600) * 10 * GB - min(t % 600, 60) / 6 * GB

    at = [at for t, at in course(free, 5000) if t > 1800 and t % 600 > 90]
    assert all(value is not None and abs(value - 6000) < 0.15 * 6000 for value in at)


def test_checkpoints_that_replace_each_other_fill_nothing() -> None:
    said = course(lambda t: 100 * GB - min(t % 600, 60) / 6 * GB, 10_000)
    assert all(at is None or at - t > 3600 for t, at in said if t > 600)


def test_cleaning_up_once_makes_nothing_slower() -> None:
    said = course(lambda t: 100 * GB - 0.05 * GB * t + (20 * GB if t > 500 else 0), 2200)
    assert all(at is not None and abs(at - 2400) < 0.02 * 2400 for t, at in said if t > 520)


def test_one_large_file_of_another_is_no_speed() -> None:
    said = course(lambda t: 100 * GB - 0.01 * GB * t - (50 * GB if t > 300 else 0), 4000)
    assert all(at is not None and abs(at - 5000) < 0.03 * 5000 for t, at in said if t > 320)


def test_a_new_speed_is_believed_soon() -> None:
    said = dict(course(lambda t: 100 * GB - (0.01 * t if t < 1000 else 10 + 0.5 * (t - 1000)) * GB, 1150))
    assert said[1100] == pytest.approx(1180, rel=0.02)


def test_once_nothing_falls_any_more_nothing_is_foreseen() -> None:
    said = course(lambda t: 100 * GB - 0.05 * GB * min(t, 500), 1500)
    assert all(at is None for t, at in said if t > 530)


def test_a_file_system_that_empties_is_never_full() -> None:
    assert all(at is None for _, at in course(lambda t: 10 * GB + 0.05 * GB * t, 500))
    assert all(at is None for _, at in course(lambda _: 10 * GB, 500))


def test_what_is_very_far_away_is_not_foretold() -> None:
    assert last(lambda t: 1e15 - 1e6 * t, 600) is None


def test_a_full_one_is_full_since_it_became_so() -> None:
    said = dict(course(lambda t: max(0.0, 10 * GB - 0.1 * GB * t), 300))
    assert said[295] == 100
    fill = DiskForecast()
    fill.update(1.0, 0)
    assert fill.full_at(2.0) == 1.0
    fill.update(3.0, 5.0)
    assert fill.full_at(3.0) is None


def test_a_clock_that_is_set_back_begins_anew() -> None:
    fill = DiskForecast()
    for t in range(100):
        fill.update(1000.0 + t, 1e6 - 1000 * t)
    assert fill.full_at(1099.0) is not None
    fill.update(500.0, 1e6)
    assert fill.full_at(500.0) is None


STEPS = st.lists(st.tuples(st.floats(0.01, 1000), st.floats(-1e12, 1e12)), max_size=400)


@given(STEPS, st.floats(0, 1e15))
def test_a_moment_is_never_past_nor_absurd(steps: list[tuple[float, float]], free: float) -> None:
    fill, t = DiskForecast(), START
    for wait, change in steps:
        t += wait
        free = max(0.0, free + change)
        fill.update(t, free)
        at = fill.full_at(t)
        assert at is None or (math.isfinite(at) and (at >= t or free == 0))
    assert len(fill._changes) <= MOST_CHANGES
    assert all(t - moment <= HISTORY_S for moment, _ in list(fill._changes)[1:])


@given(
    free=st.floats(1e6, 1e15),
    seconds=st.floats(100, 20_000),
    readings=st.integers(15, 2000),
    when=st.floats(0.3, 0.95),
)
def test_a_steady_speed_is_foreseen_whatever_it_is(free: float, seconds: float, readings: int, when: float) -> None:
    every = seconds * when / readings
    at = last(lambda t: free - free / seconds * t, seconds * when, every)
    assert at == pytest.approx(seconds, rel=0.01)


@given(st.floats(0, 1e16), st.floats(0, 1e16))
def test_low_is_little_or_a_small_part(available: float, size: float) -> None:
    low = is_space_low(available, size)
    if available >= 1e12 or (available >= 10e9 and available >= 0.1 * size):
        assert not low
    if available < 10e9:
        assert low


@pytest.mark.parametrize(
    ("available", "size", "low"),
    [
        (9e9, 200e9, True),
        (11e9, 100e9, False),
        (90e9, 1e12, True),
        (0.9e12, 10e12, True),
        (1.1e12, 12e12, False),
        (3e9, 20e9, True),
        (1.9e9, 20e9, True),
        (4e6, 8e6, True),
        (0, 8e6, True),
    ],
)
def test_ten_gigabytes_count_always_and_a_tenth_below_a_terabyte(available: float, size: float, low: bool) -> None:
    assert is_space_low(available, size) is low


def test_a_real_disk_is_full_when_it_was_said(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root (mount)")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small-disk", str(disk)], check=True)
    try:
        fill, said, begun, full = DiskForecast(), list[tuple[float, float]](), 1_700_000_000.0, None
        with open(disk / "out", "wb", buffering=0) as out:
            for now in itertools.count(begun, 0.01):  # the disk is real, and its writer keeps time
                try:
                    is_whole = out.write(b"x" * 20_000) == 20_000
                except OSError:
                    is_whole = False
                if not is_whole:
                    full = now
                    break
                if round((now - begun) / 0.01) % 10 == 0:
                    space = read_space(disk)
                    assert space is not None
                    fill.update(now, space.available_bytes)
                    at = fill.full_at(now)
                    said += [] if at is None else [(now, at)]
        assert full is not None
        assert said[0][0] - begun < 0.4 * (full - begun), "it is said early enough to act"
        assert all(abs(at - full) <= 0.15 * (full - begun) for _, at in said)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
