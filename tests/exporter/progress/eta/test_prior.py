"""Priors from earlier runs."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.estimator import EtaEstimator
from exporter.progress.eta.prior import (
    FIRST_SPREAD,
    MOST_PAUSES,
    MOST_POINTS,
    PriorPause,
    RunPrior,
    WorkCurve,
    prior_weight,
)

PRIOR = RunPrior(
    2.0,
    0.1,
    30.0,
    5.0,
    (PriorPause("evaluating", 60.0, 100.0), PriorPause(None, 5.0, 10.0)),
    1000.0,
    2600.0,
    ((0.0, 0.0), (100.0, 500.0), (1000.0, 2300.0)),
)


def test_a_prior_survives_json() -> None:
    for prior in (PRIOR, PRIOR._replace(unit="items", runs=7)):
        assert RunPrior.from_json(json.loads(json.dumps(prior._asdict()))) == prior


def test_the_unit_of_a_prior_without_one_is_unknown() -> None:
    data = PRIOR._replace(unit="items")._asdict()
    del data["unit"]
    assert RunPrior.from_json(data).unit is None


NUMBERS = ("pace", "spread", "warm_up_seconds", "gap", "items", "seconds", "runs")


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -1.0, 1e300, 10**400])
@pytest.mark.parametrize("place", [*NUMBERS, "done", "work", "pause", "period"])
def test_impossible_numbers_are_refused(place: str, number: float) -> None:
    odd: dict[str, dict[str, object]] = {
        "done": {"curve": [[0.0, 0.0], [number, 500.0]]},
        "work": {"curve": [[0.0, 0.0], [100.0, number]]},
        "pause": {"pauses": [[None, number, 100.0]]},
        "period": {"pauses": [[None, 60.0, number]]},
    }
    with pytest.raises(ValueError, match="prior"):
        RunPrior.from_json({**PRIOR._asdict(), **odd.get(place, {place: number})})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {**PRIOR._asdict(), "pace": "fast"},
        {**PRIOR._asdict(), "pace": 0.0},
        {**PRIOR._asdict(), "pauses": [[None, 5.0, 0.0]]},
        {**PRIOR._asdict(), "pauses": [[7, 5.0, 10.0]]},
        {**PRIOR._asdict(), "pauses": [[None, 5.0, 10.0]] * (MOST_PAUSES + 1)},
        {**PRIOR._asdict(), "curve": [[5.0, 1.0], [5.0, 2.0]]},
        {**PRIOR._asdict(), "curve": [[5.0, 2.0], [6.0, 1.0]]},
        {**PRIOR._asdict(), "curve": [[math.nan, 1.0]]},
        {**PRIOR._asdict(), "curve": [[float(place), 1.0] for place in range(MOST_POINTS + 2)]},
        {**PRIOR._asdict(), "spread": 0.0},
        {**PRIOR._asdict(), "pace": 1e-300},
        {**PRIOR._asdict(), "runs": 0},
        {**PRIOR._asdict(), "unit": 5},
    ],
)
def test_invalid_data_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="prior"):
        RunPrior.from_json(data)


SIZES = st.floats(-12, 15).map(lambda power: 10**power)
MOMENTS = st.just(0.0) | SIZES
PRIORS = st.builds(
    RunPrior,
    pace=SIZES,
    spread=SIZES,
    warm_up_seconds=MOMENTS,
    gap=MOMENTS,
    pauses=st.lists(
        st.builds(PriorPause, st.sampled_from([None, "saving"]), MOMENTS, SIZES.map(lambda size: max(1.0, size))),
        max_size=2,
    ).map(tuple),
    items=MOMENTS,
    seconds=MOMENTS,
    curve=st.tuples(st.sets(MOMENTS, min_size=4, max_size=4), st.lists(MOMENTS, min_size=4, max_size=4)).map(
        lambda columns: tuple(zip(sorted(columns[0]), sorted(columns[1]), strict=True))
    )
    | st.just(()),
    runs=st.integers(1, 10**15),
)


@given(PRIORS, st.lists(st.tuples(SIZES, st.integers(1, 100)), max_size=20), st.sampled_from([None, 12.0, 1000.0]))
def test_no_accepted_prior_breaks_an_estimate(
    prior: RunPrior, steps: list[tuple[float, int]], items: float | None
) -> None:
    prior = prior if items is None else prior._replace(items=items)  # of the length of this run or another one
    estimator = EtaEstimator(RunPrior.from_json(json.loads(json.dumps(prior._asdict()))))
    t = done = 0.0
    for seconds, rise in [(0.0, 0), *steps]:
        t, done = t + seconds, done + rise
        estimator.update(t, done, 1000)
        estimate = estimator.estimate(t)
        assert estimate is None or (all(map(math.isfinite, estimate)) and 0 <= estimate.low <= estimate.high)
    following = estimator.prior()
    assert following is None or RunPrior.from_json(following) == following


def test_a_curve_ends_where_the_run_ended() -> None:
    curve = WorkCurve([(0.0, 0.0)])
    curve.add(40.0, 398.54431009, 100.0)
    assert curve.points_until(40.0, 398.54431009) == ((0.0, 0.0), (40.0, 398.5443))
    assert curve.points_until(41.0, 398.54431009) == ((0.0, 0.0), (40.0, 398.5443), (41.0, 398.5443))
    assert WorkCurve().points_until(40.0, 398.5) == ()


def test_the_work_follows_the_curve_of_the_earlier_run() -> None:
    assert PRIOR.work_between(0.0, 50.0) == 250.0
    assert PRIOR.work_between(50.0, 200.0) == 250.0 + 200.0
    assert PRIOR.work_between(900.0, 1100.0) == 200.0 + 200.0
    assert PRIOR._replace(curve=()).work_between(50.0, 200.0) == 300.0


def test_a_run_of_another_length_uses_only_the_pace() -> None:
    assert PRIOR.work_left(50.0, 1000.0) == 2050.0
    assert PRIOR.work_left(50.0, 3000.0) == 5900.0


def test_the_prior_counts_less_as_the_runs_own_evidence_grows() -> None:
    weights = [prior_weight(PRIOR, 1.05, 0.05, doubt, blocks=10).weight for doubt in (0.3, 0.1, 0.03, 0.003)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 0.8
    assert weights[-1] < 0.01


def test_a_contradicted_prior_is_ignored() -> None:
    assert prior_weight(PRIOR, 3.0, 0.1, 0.3, blocks=10).weight < 0.01
    assert prior_weight(PRIOR, 0.35, 0.1, 0.3, blocks=10).weight < 0.01


def test_slow_first_lines_do_not_contradict_a_prior() -> None:
    assert prior_weight(PRIOR, 4.0, 0.25, 0.3, blocks=1).weight > 0.9


def test_the_prior_is_scaled_by_the_progress_of_this_run() -> None:
    scales = [prior_weight(PRIOR, 1.2, measured, 0.1, blocks=10).scale for measured in (1.0, 0.1, 0.01)]
    assert scales == sorted(scales)
    assert 1.0 < scales[0] < 1.01
    assert scales[-1] == pytest.approx(1.2, rel=0.01)


def test_different_runs_widen_the_spread_and_the_latest_pace_counts() -> None:
    alike = PRIOR._replace(spread=FIRST_SPREAD).combined_with(PRIOR)
    apart = PRIOR._replace(pace=4.0, spread=FIRST_SPREAD).combined_with(PRIOR)
    assert alike.spread < PRIOR.spread < apart.spread
    assert apart.spread == pytest.approx(math.sqrt((0.01 + math.log(2) ** 2) / 2))
    assert (apart.pace, apart.runs) == (4.0, 2)
