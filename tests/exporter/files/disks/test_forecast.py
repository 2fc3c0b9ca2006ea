"""The time at which a file system will be full."""

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


def forecasts(
    free: Callable[[float], float], seconds: float, every: float = 5.0
) -> Iterator[tuple[float, float | None]]:
    """The time of each reading with the predicted time, in seconds since START."""
    forecast = DiskForecast()
    for index in range(int(seconds / every)):
        t = index * every
        forecast.update(START + t, free(t))
        at = forecast.full_at(START + t)
        yield t, None if at is None else at - START


def last_forecast(free: Callable[[float], float], seconds: float, every: float = 5.0) -> float | None:
    """The prediction after the last reading."""
    forecast, t = DiskForecast(), 0.0
    for index in range(int(seconds / every)):
        t = index * every
        forecast.update(START + t, free(t))
    at = forecast.full_at(START + t)
    return None if at is None else at - START


def test_a_steady_writer_is_predicted_from_its_first_changes() -> None:
    predicted = dict(forecasts(lambda t: max(0.0, 100 * GB - 0.05 * GB * t), 2100))
    assert all(at == pytest.approx(2000) for t, at in predicted.items() if t >= 200)
    assert all(at is None for t, at in predicted.items() if t < 20)


def test_a_writer_that_flushes_in_steps_is_predicted() -> None:
    at = [at for t, at in forecasts(lambda t: 100 * GB - 0.05 * GB * (t // 30 * 30), 1500) if t > 300]
    assert all(value is not None and abs(value - 2000) < 0.05 * 2000 for value in at)


def test_noise_of_other_writers_is_smoothed() -> None:
    noise = random.Random(7)
    predicted = forecasts(lambda t: 100 * GB - 0.05 * GB * t + noise.gauss(0, 0.2) * GB, 1500)
    assert all(at is not None and abs(at - 2000) < 0.05 * 2000 for t, at in predicted if t > 400)


def test_the_rhythm_of_checkpoints_gives_a_prediction() -> None:
    def free(t: float) -> float:
        return 100 * GB - (t // 600) * 10 * GB - min(t % 600, 60) / 6 * GB

    at = [at for t, at in forecasts(free, 5000) if t > 1800 and t % 600 > 90]
    assert all(value is not None and abs(value - 6000) < 0.15 * 6000 for value in at)


def test_checkpoints_that_replace_each_other_do_not_fill_the_disk() -> None:
    predicted = forecasts(lambda t: 100 * GB - min(t % 600, 60) / 6 * GB, 10_000)
    assert all(at is None or at - t > 3600 for t, at in predicted if t > 600)


def test_a_single_cleanup_does_not_lower_the_fill_rate() -> None:
    predicted = forecasts(lambda t: 100 * GB - 0.05 * GB * t + (20 * GB if t > 500 else 0), 2200)
    assert all(at is not None and abs(at - 2400) < 0.02 * 2400 for t, at in predicted if t > 520)


def test_a_single_large_file_is_no_fill_rate() -> None:
    predicted = forecasts(lambda t: 100 * GB - 0.01 * GB * t - (50 * GB if t > 300 else 0), 4000)
    assert all(at is not None and abs(at - 5000) < 0.03 * 5000 for t, at in predicted if t > 320)


def test_a_new_fill_rate_is_adopted_soon() -> None:
    predicted = dict(forecasts(lambda t: 100 * GB - (0.01 * t if t < 1000 else 10 + 0.5 * (t - 1000)) * GB, 1150))
    assert predicted[1100] == pytest.approx(1180, rel=0.02)


def test_there_is_no_prediction_once_free_space_stops_falling() -> None:
    predicted = forecasts(lambda t: 100 * GB - 0.05 * GB * min(t, 500), 1500)
    assert all(at is None for t, at in predicted if t > 530)


def test_a_file_system_that_empties_is_never_full() -> None:
    assert all(at is None for _, at in forecasts(lambda t: 10 * GB + 0.05 * GB * t, 500))
    assert all(at is None for _, at in forecasts(lambda _: 10 * GB, 500))


def test_a_time_in_the_distant_future_is_not_predicted() -> None:
    assert last_forecast(lambda t: 1e15 - 1e6 * t, 600) is None


def test_a_full_disk_keeps_the_time_at_which_it_became_full() -> None:
    predicted = dict(forecasts(lambda t: max(0.0, 10 * GB - 0.1 * GB * t), 300))
    assert predicted[295] == 100
    forecast = DiskForecast()
    forecast.update(1.0, 0)
    assert forecast.full_at(2.0) == 1.0
    forecast.update(3.0, 5.0)
    assert forecast.full_at(3.0) is None


def test_a_clock_that_is_set_back_restarts_the_forecast() -> None:
    forecast = DiskForecast()
    for t in range(100):
        forecast.update(1000.0 + t, 1e6 - 1000 * t)
    assert forecast.full_at(1099.0) is not None
    forecast.update(500.0, 1e6)
    assert forecast.full_at(500.0) is None


STEPS = st.lists(st.tuples(st.floats(0.01, 1000), st.floats(-1e12, 1e12)), max_size=400)


@given(STEPS, st.floats(0, 1e15))
def test_a_predicted_time_is_never_in_the_past_or_absurd(steps: list[tuple[float, float]], free: float) -> None:
    forecast, t = DiskForecast(), START
    for wait, change in steps:
        t += wait
        free = max(0.0, free + change)
        forecast.update(t, free)
        at = forecast.full_at(t)
        assert at is None or (math.isfinite(at) and (at >= t or free == 0))
    assert len(forecast._times) == len(forecast._free) <= MOST_CHANGES
    assert all(t - moment <= HISTORY_S for moment in forecast._times[1:])


@given(
    free=st.floats(1e6, 1e15),
    seconds=st.floats(100, 20_000),
    readings=st.integers(22, 2000),  # fewer leave too few changes within the history
    when=st.floats(0.3, 0.95),
)
def test_any_steady_fill_rate_is_predicted(free: float, seconds: float, readings: int, when: float) -> None:
    every = seconds * when / readings
    at = last_forecast(lambda t: free - free / seconds * t, seconds * when, every)
    assert at == pytest.approx(seconds, rel=0.01)


@given(st.floats(0, 1e16), st.floats(0, 1e16))
def test_low_space_depends_on_bytes_and_share(available: float, size: float) -> None:
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
def test_space_is_low_below_10_gb_or_below_a_tenth_and_1_tb(available: float, size: float, low: bool) -> None:
    assert is_space_low(available, size) is low


def test_a_real_disk_is_full_at_the_predicted_time(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root (mount)")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small-disk", str(disk)], check=True)
    try:
        forecast, predicted, start, full = DiskForecast(), list[tuple[float, float]](), 1_700_000_000.0, None
        with open(disk / "out", "wb", buffering=0) as out:
            for now in itertools.count(start, 0.01):  # a real disk with a simulated clock
                try:
                    is_whole = out.write(b"x" * 20_000) == 20_000
                except OSError:
                    is_whole = False
                if not is_whole:
                    full = now
                    break
                if round((now - start) / 0.01) % 10 == 0:
                    space = read_space(disk)
                    assert space is not None
                    forecast.update(now, space.available_bytes)
                    at = forecast.full_at(now)
                    predicted += [] if at is None else [(now, at)]
        assert full is not None
        assert predicted[0][0] - start < 0.4 * (full - start), "the warning comes early enough to act"
        assert all(abs(at - full) <= 0.15 * (full - start) for _, at in predicted)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
