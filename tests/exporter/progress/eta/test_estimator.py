"""The ETA of one worker: what always holds, and how accurate it is for typical runs."""

import json
import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.contract.records import RecordError, from_json
from exporter.contract.status import EtaEstimate
from exporter.progress.eta.estimator import EtaEstimator
from exporter.progress.eta.prior import RunPrior
from tests.support.exporter import saved_and_read, saved_text

Line = tuple[float, float, float | None]


def run(
    items: int = 1000,
    seconds_per_item: float = 2.0,
    spread: float = 0.05,
    every: int = 1,
    pause_every: int = 0,
    pause_s: float = 0.0,
    start: float = 1e6,
    change: Callable[[int], float] = lambda item: 1.0,
    seed: int = 1,
) -> list[Line]:
    """Lines of a run: one per ``every`` items, with a pause before each ``pause_every``-th but the first."""
    r = random.Random(seed)
    t = start
    lines: list[Line] = []
    for item in range(1, items + 1):
        if pause_every and item > 1 and (item - 1) % pause_every == 0:
            t += pause_s
        t += seconds_per_item * change(item) * r.lognormvariate(0, spread)
        if item % every == 0 or item == items:
            lines.append((t, float(item), float(items)))
    return lines


def feed(lines: list[Line], estimator: EtaEstimator | None = None) -> EtaEstimator:
    estimator = estimator or EtaEstimator()
    for t, done, total in lines:
        estimator.update(t, done, total)
    return estimator


def errors(lines: list[Line], estimator: EtaEstimator | None = None) -> Iterator[tuple[float, float]]:
    """Completed share and relative error of the estimate, at each 1 % of the lines."""
    estimator = estimator or EtaEstimator()
    end = lines[-1][0]
    for index, (t, done, total) in enumerate(lines[:-1]):
        estimator.update(t, done, total)
        found = estimator.estimate(t) if index % max(1, len(lines) // 100) == 0 and t < end else None
        if found is not None:
            yield done / lines[-1][1], found.seconds / (end - t) - 1


def worst_error(lines: list[Line], after: float, estimator: EtaEstimator | None = None, before: float = 0.95) -> float:
    return max(abs(error) for share, error in errors(lines, estimator) if after <= share <= before)


# What always holds

NUMBERS = st.one_of(st.floats(0, 1e5), st.integers(0, 10**6), st.sampled_from([0, -1, 1e-9, 1e30, math.inf, math.nan]))
ODD_LINES = st.lists(
    st.tuples(NUMBERS, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, st.sampled_from([None, "saving", "back"])),
    max_size=60,
)
STEPS = st.lists(st.tuples(st.floats(0, 500), st.integers(-3, 40)), max_size=120)


def feed_odd(lines: list[tuple[float, float, float | None, float | None, str | None]]) -> EtaEstimator:
    estimator = EtaEstimator()
    for t, done, total, arrival, activity in lines:
        if activity == "saving":
            estimator.pause(activity, t, arrival)
        elif activity == "back":
            estimator.resume(t, arrival)
        estimator.update(t, done, total, arrival)
    return estimator


def from_steps(steps: list[tuple[float, int]], start: float = 0.0, total: float | None = 2000) -> list[Line]:
    t, done = start, 0
    lines: list[Line] = []
    for seconds, rise in steps:
        t, done = t + seconds, max(0, done + rise)
        lines.append((t, done, total))
    return lines


@settings(max_examples=200)
@given(ODD_LINES, NUMBERS)
@example([(0.0, 1, 10, None, None), (0.0, 2, 10, None, None), (0.0, 3, 10, None, None)], 0.0)
@example([(5.0, 10, 5, None, None), (6.0, 20, 0, None, None)], 7.0)
@example([(1e12, 1e15, 1e15, 0.0, "saving"), (0.0, 1e15, 1e15, 0.0, "back")], -1.0)
def test_an_estimate_is_finite_and_within_its_interval_for_any_input(
    lines: list[tuple[float, float, float | None, float | None, str | None]], now: float
) -> None:
    estimator = feed_odd(lines)
    estimate = estimator.estimate(now)
    if estimate is not None:
        assert all(math.isfinite(part) for part in estimate)
        assert 0 <= estimate.low <= estimate.seconds <= estimate.high
    for rate in (estimator.rate(now), estimator.average_rate(now), estimator.slowdown_ratio()):
        assert rate is None or rate >= 0
    assert (estimator.confidence(now) is None) == (estimate is None)


@given(STEPS)
def test_the_eta_is_zero_only_when_all_is_done(steps: list[tuple[float, int]]) -> None:
    estimator = EtaEstimator()
    for t, done, total in from_steps([(seconds, max(0, rise)) for seconds, rise in steps], total=60):
        estimator.update(t, done, total)
        estimate = estimator.estimate(t + 1e6)
        assert total is not None
        if done >= total:
            assert estimate == EtaEstimate(0.0, 0.0, 0.0)
        elif estimate is not None:
            assert estimate.seconds > 0


@given(STEPS, st.integers(-(2**20), 2**20))
def test_shifting_all_times_does_not_change_the_estimate(steps: list[tuple[float, int]], shift: int) -> None:
    steps = [(round(seconds * 8) / 8, rise) for seconds, rise in steps]  # exact sums
    here, there = feed(from_steps(steps)), feed(from_steps(steps, start=float(shift)))
    now = sum(seconds for seconds, _ in steps) + 10
    assert here.estimate(now) == there.estimate(now + shift)
    assert here.is_stalled(now) == there.is_stalled(now + shift)


@given(STEPS, st.data())
def test_a_restored_estimator_continues_exactly(steps: list[tuple[float, int]], data: st.DataObject) -> None:
    lines = from_steps(steps)
    cut = data.draw(st.integers(0, len(lines)))
    estimator_a = feed(lines[:cut])
    estimator_a.estimate(1e6)
    estimator_b = saved_and_read(EtaEstimator, estimator_a)
    for t, done, total in lines[cut:]:
        for estimator in (estimator_a, estimator_b):
            estimator.update(t, done, total)
        assert estimator_a.estimate(t + 5) == estimator_b.estimate(t + 5)
        assert estimator_a.is_stalled(t + 5) == estimator_b.is_stalled(t + 5)
        assert estimator_a.rate(t) == estimator_b.rate(t)
    assert saved_text(estimator_a) == saved_text(estimator_b)


def results(estimator: EtaEstimator, now: float, peers: float | None, busy: bool | None) -> list[object]:
    """All results that one poll needs."""
    return [
        estimator.is_stalled(now, 120.0, busy),
        estimator.estimate(now, peers),
        estimator.rate(now),
        estimator.average_rate(now),
        estimator.confidence(now),
        estimator.slowdown_ratio(),
        estimator.seconds_per_item,
    ]


PEERS = st.sampled_from([None, 0.5, 1.0, 300.0])
POLLS = st.lists(st.tuples(st.floats(0, 1e4), PEERS, st.sampled_from([None, True, False])), max_size=3)
ACTIONS = st.sampled_from(["line", "line", "line", "same line", "new total", "saving", "testing", "back", "queue"])


@given(st.lists(st.tuples(ACTIONS, st.floats(0, 500), st.integers(-2, 12), POLLS), max_size=60), st.booleans())
def test_every_result_follows_from_the_saved_state_alone(
    steps: list[tuple[str, float, int, list[tuple[float, float | None, bool | None]]]], with_prior: bool
) -> None:
    estimator = EtaEstimator(feed(run(60, 9.0, pause_every=20, pause_s=100.0)).prior() if with_prior else None)
    t, done, total = 0.0, 0, 200
    for action, seconds, rise, polls in steps:
        t += seconds
        if action in ("saving", "testing"):
            estimator.pause(action, t)
        elif action == "back":
            estimator.resume(t)
        elif action == "queue":
            estimator.update_requests(abs(rise), max(0.0, 200.0 - done - abs(rise)))
        else:
            done = max(0, done + rise) if action == "line" else done
            total += 20 if action == "new total" else 0
            estimator.update(t, done, total)
        for after, peers, busy in polls:
            fresh = saved_and_read(EtaEstimator, estimator)
            assert results(estimator, t + after, peers, busy) == results(fresh, t + after, peers, busy)
            assert results(estimator, t + after, peers, busy) == results(fresh, t + after, peers, busy)


def is_readable(prior: RunPrior | None) -> bool:
    """Whether the next run can read this prior, or there is none."""
    return prior is None or RunPrior.from_json(json.loads(json.dumps(prior._asdict()))) == prior


@given(ODD_LINES)
def test_a_prior_of_odd_lines_can_be_read_back(
    lines: list[tuple[float, float, float | None, float | None, str | None]],
) -> None:
    assert is_readable(feed_odd(lines).prior())


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1e-3]) | st.floats(0, 1e5), st.floats(0.125, 40)), max_size=80),
    st.sampled_from([None, 20, 400, 2000]),
    st.floats(0, 1e5),
)
@example([(7.3, 1.0)] * 40, 40, 0.0)
def test_a_prior_of_any_run_can_be_read_back(
    steps: list[tuple[float, float]], total: float | None, start: float
) -> None:
    estimator = EtaEstimator()
    t, done = start, 0.0
    for seconds, rise in [(0.0, 0.0), *steps]:
        t, done = t + seconds, done + rise
        estimator.update(t, done, total)
        prior = estimator.prior("items")
        assert is_readable(prior)
        assert prior is None or prior.unit == "items"
    assert is_readable(
        feed([(t + place * 7.3, place, 50) for place in range(50)], EtaEstimator(estimator.prior())).prior()
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("items", [12, 40, 150, 3000])
def test_the_prior_of_a_finished_run_ends_where_the_run_ended(items: int, seed: int) -> None:
    prior = feed(run(items, 9.7, seed=seed)).prior()
    assert prior is not None
    assert is_readable(prior)
    assert [done for done, _ in prior.curve].count(items) == 1
    assert prior.curve[-1][1] == pytest.approx(prior.work_between(1, items), rel=1e-6)


@pytest.mark.parametrize("rise", [1e-300, 1e-20])
def test_a_run_with_absurd_numbers_leaves_no_prior(rise: float) -> None:
    assert feed([(10.0 * place, rise * place, 1.0) for place in range(40)]).prior() is None


@pytest.mark.parametrize(
    "lines",
    [
        run(pause_every=100, pause_s=60.0, change=lambda item: 1 if item < 600 else 1.6),
        run(3000, spread=1.0),
        run(400, change=lambda item: 1 + item / 200),
    ],
    ids=["pauses and a step", "heavy tails", "drift"],
)
def test_the_state_of_a_long_run_is_exact_and_small(lines: list[Line]) -> None:
    estimator_a, estimator_b = EtaEstimator(), EtaEstimator()
    for index, (t, done, total) in enumerate(lines):
        estimator_a.update(t, done, total)
        estimator_b.update(t, done, total)
        if index % 37 == 0:
            assert len(saved_text(estimator_b)) < 16_384
            estimator_b = saved_and_read(EtaEstimator, estimator_b)
            assert estimator_a.estimate(t + 1) == estimator_b.estimate(t + 1)


@pytest.mark.parametrize("state", [None, [], [0] * 20, [None, [0] * 20, *[None] * 21]])
def test_an_invalid_state_is_refused(state: object) -> None:
    with pytest.raises(RecordError, match="state"):
        from_json(EtaEstimator, state, "state")


# Unknown


@pytest.mark.parametrize("total", [None, 0, -5])
def test_without_a_total_there_is_no_estimate(total: float | None) -> None:
    estimator = feed([(t, done, total) for t, done, _ in run(100)])
    assert estimator.estimate(2e6) is None
    assert estimator.confidence(2e6) is None


def test_there_is_no_estimate_before_the_first_progress() -> None:
    assert EtaEstimator().estimate(0.0) is None
    assert feed([(0.0, 5, 100)]).estimate(1.0) is None
    assert feed([(0.0, 5, 100), (10.0, 5, 100)]).estimate(11.0) is None


# Typical runs


@pytest.mark.parametrize("every", [1, 10])
def test_steady_work_is_estimated_within_5_percent(every: int) -> None:
    lines = run(every=every)
    assert worst_error(lines, after=0.1) < 0.05
    assert feed(lines[: len(lines) // 2]).confidence(lines[len(lines) // 2][0]) == "high"


def test_a_warm_up_does_not_distort_the_estimate() -> None:
    assert worst_error(run(change=lambda item: 60.0 if item == 2 else 4.0 if item < 6 else 1.0), after=0.05) < 0.1


def test_regular_pauses_are_included() -> None:
    assert worst_error(run(pause_every=125, pause_s=90.0), after=0.27) < 0.08


def test_regular_pauses_of_twice_the_time_of_a_line_are_included() -> None:
    """Such as evaluations in a log with a line for each hundred steps."""
    lines = run(items=10_000, every=50, spread=0.2, pause_every=1000, pause_s=200.0)
    assert worst_error(lines, after=0.55) < 0.05


def test_a_drift_is_followed() -> None:
    assert worst_error(run(change=lambda item: 1 + item / 1000), after=0.5) < 0.05


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0.7, 2.0), st.sampled_from([-0.4, 1.0]))
def test_the_interval_widens_if_the_time_per_item_drifts(seed: int, place: float, drift: float) -> None:
    def width(change: Callable[[int], float]) -> float:
        lines = run(items=600, change=change, seed=seed)[: int(200 * place)]
        estimate = feed(lines).estimate(lines[-1][0])
        assert estimate is not None
        assert estimate.low < estimate.seconds < estimate.high
        return (estimate.high - estimate.low) / estimate.seconds

    assert width(lambda item: 1 + drift * item / 300) > width(lambda item: 1.0)


@pytest.mark.parametrize(
    ("change", "widens"),
    [(lambda item: math.exp(item / 250), True), (lambda item: 1.0 if item < 80 else 6.0, False)],
    ids=["drift", "step"],
)
def test_drift_in_the_scatter_widens_the_interval_but_a_known_step_does_not(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int], float], widens: bool
) -> None:
    lines = run(spread=0.7, change=change, seed=3)[:150]
    found = feed(lines).estimate(lines[-1][0])
    monkeypatch.setattr("exporter.progress.eta.estimator.drift_doubt", lambda overall, recent: 0.0)
    without = feed(lines).estimate(lines[-1][0])
    assert found is not None
    assert without is not None
    assert (found.high > 1.05 * without.high) == widens


def test_a_step_is_followed_within_a_few_lines() -> None:
    lines = run(change=lambda item: 1.0 if item < 500 else 1.8)
    assert worst_error(lines, after=0.56) < 0.08
    estimator = feed(lines[:520])
    assert estimator.slowdown_ratio() == pytest.approx(1.8, rel=0.1)
    assert feed(lines[:499]).slowdown_ratio() is None


def test_items_before_a_resume_do_not_count_as_speed() -> None:
    first, again = run(), run(start=1e6 + 2000)
    lines = first[:500] + [(t + 300, done, total) for t, done, total in again[449:]]
    estimator = feed(first[:500])
    end = lines[-1][0]
    for t, done, total in lines[500:-50]:
        estimator.update(t, done, total)
        estimate = estimator.estimate(t)
        assert estimate is not None
        assert estimate.seconds == pytest.approx(end - t, rel=0.1)
        rate = estimator.rate(t)
        assert rate is not None
        assert rate == pytest.approx(0.5, rel=0.1)


def test_the_duration_of_a_restart_does_not_widen_the_interval() -> None:
    first, again = run(), run(start=1e6 + 30_000)
    estimator = feed(first[:500] + again[449:600])
    assert estimator.confidence(again[599][0]) == "high"


def test_a_growing_total_raises_the_eta() -> None:
    lines = run()
    estimator = feed([(t, done, 700.0) for t, done, _ in lines[:400]])
    estimator.update(*lines[400])
    estimate = estimator.estimate(lines[400][0])
    assert estimate is not None
    assert estimate.seconds == pytest.approx(lines[-1][0] - lines[400][0], rel=0.05)


def test_simultaneous_lines_count_as_one() -> None:
    lines = run(2000, 1.0)
    merged = [(math.ceil(t / 20) * 20.0, done, total) for t, done, total in lines]
    assert worst_error(merged, after=0.1, before=0.9) < 0.1


def test_the_estimate_counts_down_between_lines_and_then_waits() -> None:
    lines = run(100, 60.0)
    estimator = feed(lines[:50])
    at = lines[49][0]
    seconds = [estimate.seconds for wait in (0, 30, 60) if (estimate := estimator.estimate(at + wait)) is not None]
    assert seconds[1] == pytest.approx(seconds[0] - 30)
    assert seconds[2] == pytest.approx(seconds[0] - 60)
    late = [estimate for wait in (120, 600) if (estimate := estimator.estimate(at + wait)) is not None]
    assert late[1].seconds == pytest.approx(late[0].seconds + 240)
    assert late[1].high - late[0].high > 480


def test_lines_of_two_writers_out_of_step_form_one_count() -> None:
    lines = run()
    mixed = [entry for t, done, total in lines for entry in ((t, done, total), (t + 0.1, done - 1, total))]
    estimator = feed(mixed[:1000])
    estimate = estimator.estimate(mixed[999][0])
    assert estimate is not None
    assert estimate.seconds == pytest.approx(lines[-1][0] - lines[499][0], rel=0.05)


def test_the_current_rate_excludes_pauses_and_the_average_includes_them() -> None:
    lines = run(pause_every=100, pause_s=100.0)
    estimator = feed(lines[:450])
    at = lines[449][0]
    assert estimator.rate(at) == pytest.approx(0.5, rel=0.05)
    assert estimator.rate(at + 90) == estimator.rate(at)
    assert estimator.rate(at + 5000) is None
    assert estimator.average_rate(at) == pytest.approx(449 / (at - lines[0][0]))
    finished = feed(lines)
    assert finished.average_rate(lines[-1][0] + 1e6) == finished.average_rate(lines[-1][0])
    assert EtaEstimator().rate(0.0) is None
    assert EtaEstimator().average_rate(0.0) is None


# Alarms


def test_silence_beyond_the_timeout_is_a_stall_until_progress() -> None:
    lines = run()
    estimator = feed(lines[:300])
    at = lines[299][0]
    assert not estimator.is_stalled(at + 290)
    assert estimator.is_stalled(at + 310)
    assert not estimator.is_stalled(at + 310, stall_timeout_s=600)
    estimator.update(at + 320, 301, 1000)
    assert not estimator.is_stalled(at + 330)


def test_a_finished_worker_does_not_stall() -> None:
    lines = run(100)
    assert not feed(lines).is_stalled(lines[-1][0] + 1e6)


def test_sparse_lines_are_no_stall() -> None:
    lines = run(40, 2000.0)
    for count in (1, 3, 20):
        assert not feed(lines[:count]).is_stalled(lines[count - 1][0] + 3000)


def test_busy_gpus_delay_a_stall_and_idle_gpus_hasten_it() -> None:
    lines = run(40, 100.0)
    estimator = feed(lines[:20])
    at = lines[19][0]
    assert not estimator.is_stalled(at + 500)
    assert estimator.is_stalled(at + 500, busy=False)
    assert estimator.is_stalled(at + 1000)
    assert not estimator.is_stalled(at + 1000, busy=True)


def test_half_a_minute_after_a_slowdown_the_current_rate_is_the_new_one() -> None:
    lines = run(3000, seconds_per_item=0.05, change=lambda item: 1.0 if item <= 1200 else 4.0)
    slow = next(t for t, done, _ in lines if done == 1200)
    estimator = EtaEstimator()
    for t, done, total in lines:
        if t > slow + 35:
            break
        estimator.update(t, done, total)
    assert estimator.rate(slow + 35) == pytest.approx(5.0, rel=0.1)
    assert estimator.average_rate(slow + 35) > 10  # type: ignore[operator]


def test_a_count_next_to_zero_is_no_progress() -> None:
    estimator = feed([(0.0, 0.0, 1.0), (2.0, 1e-308, 1.0)])
    assert estimator.estimate(3.0) is None


def test_a_restart_is_neither_work_nor_a_pause_that_recurs() -> None:
    lines = run()
    estimator = feed(lines[:500])
    at, done, _ = lines[499]
    estimator.begin_run(at + 30)
    estimator.pause("loading", at + 60)
    estimator.update(at + 900, done + 40, 1000.0)  # a newer checkpoint than the last line
    for t, done, total in lines[540:560]:
        estimator.update(t + 820, done, total)
    estimate = estimator.estimate(lines[559][0] + 820)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(440 * 2.0, rel=0.03)


def test_a_named_pause_is_neither_a_stall_nor_slow_work() -> None:
    lines = run()
    estimator = feed(lines[:3])  # too early to recognize a pause by its length
    at = lines[2][0]
    estimator.pause("evaluating", at + 1)
    assert not estimator.is_stalled(at + 2000)
    assert estimator.is_stalled(at + 4000)
    for t, done, total in lines[3:20]:
        estimator.update(t + 2500, done, total)
    assert estimator.seconds_per_item == pytest.approx(2.0, rel=0.05)
    assert estimator.rate(lines[19][0] + 2500) == pytest.approx(0.5, rel=0.05)


def test_a_named_pause_is_expected_after_its_first_occurrence() -> None:
    lines = run(pause_every=100, pause_s=60.0)
    named, plain = EtaEstimator(), EtaEstimator()
    for t, done, total in lines[:150]:
        named.update(t, done, total)
        plain.update(t, done, total)
        if done == 100:
            named.pause("saving", t)
    left = lines[-1][0] - lines[149][0]
    by_name, by_length = named.estimate(lines[149][0]), plain.estimate(lines[149][0])
    assert by_name is not None
    assert by_length is not None
    assert abs(by_name.seconds - left) < abs(by_length.seconds - left)
    assert by_name.seconds == pytest.approx(left, rel=0.03)


def test_silence_after_a_named_pause_still_raises_the_eta() -> None:
    lines = run()
    estimator = feed(lines[:300])
    estimator.pause("saving", lines[299][0])
    estimator.resume(lines[299][0] + 600)
    estimator.update(lines[300][0] + 600, 301, 1000)
    at = lines[300][0] + 600
    now, later = estimator.estimate(at), estimator.estimate(at + 300)
    assert now is not None
    assert later is not None
    assert later.seconds > now.seconds


def test_a_stall_next_to_a_named_pause_is_not_slow_work() -> None:
    lines = run()
    estimator = feed(lines[:300])
    at = lines[299][0]
    estimator.pause("saving", at)
    estimator.resume(at + 1)
    for t, done, total in lines[300:320]:
        estimator.update(t + 900, done, total)
    assert estimator.rate(lines[319][0] + 900) == pytest.approx(0.5, rel=0.05)


# Priors


def test_the_previous_run_improves_the_first_part_of_the_next() -> None:
    def warm(item: int) -> float:
        return 30.0 if item == 1 else 3.0 - item / 50 if item < 100 else 1.0

    prior = feed(run(change=warm, pause_every=230, pause_s=120.0, seed=2)).prior()
    assert prior is not None
    lines = run(change=warm, pause_every=230, pause_s=120.0, seed=3)
    with_prior = [abs(error) for share, error in errors(lines, EtaEstimator(prior)) if share < 0.1]
    without = [abs(error) for share, error in errors(lines) if share < 0.1]
    assert len(with_prior) > len(without)  # from the first line on
    assert sum(with_prior) / len(with_prior) < 0.5 * sum(without) / len(without)


def test_a_wrong_prior_is_dropped() -> None:
    prior = feed(run(seconds_per_item=6.0)).prior()
    lines = run()
    assert worst_error(lines, after=0.05, estimator=EtaEstimator(prior)) < 0.1


def test_a_prior_still_applies_after_a_resume() -> None:
    def drift(item: int) -> float:
        return 1 + item / 500

    prior = feed(run(change=drift, seed=2)).prior()
    first, again = run(change=drift, seed=3), run(change=drift, seed=4)
    lines = first[:300] + [(t + 2000, done, total) for t, done, total in again[269:]]
    late = [abs(error) for share, error in errors(lines, EtaEstimator(prior)) if 0.31 < share < 0.5]
    assert max(late) < 0.06


def test_the_prior_of_a_resumed_run_applies_to_the_items_before_it() -> None:
    prior = feed(run(seed=2)[799:]).prior()
    assert worst_error(run(), after=0.0, estimator=EtaEstimator(prior)) < 0.1


def test_a_prior_gives_an_estimate_after_one_line() -> None:
    prior = feed(run()).prior()
    estimator = feed([(0.0, 0, 1000)], EtaEstimator(prior))
    estimate = estimator.estimate(0.0)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(2000, rel=0.05)
    assert estimator.confidence(0.0) == "low"


def test_a_run_that_was_too_short_leaves_no_prior() -> None:
    assert feed(run(5)).prior() is None


def test_the_first_tenth_of_items_sorted_by_length_shows_the_rest() -> None:
    dice = random.Random(1)
    lengths = sorted((dice.lognormvariate(2.0, 0.8) for _ in range(1000)), reverse=True)
    estimator, t = EtaEstimator(), 0.0
    for done, seconds in enumerate(lengths[:100], 1):
        t += seconds * dice.lognormvariate(0.0, 0.05)
        estimator.update(t, float(done), 1000.0)
    estimate = estimator.estimate(t)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(sum(lengths[100:]), rel=0.2)
