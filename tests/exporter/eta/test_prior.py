"""What earlier runs tell."""

import math

import pytest

from exporter.derive.eta.prior import FIRST_SPREAD, Prior, UsualPause, belief

PRIOR = Prior(
    2.0,
    0.1,
    30.0,
    5.0,
    (UsualPause("evaluating", 60.0, 100.0), UsualPause(None, 5.0, 10.0)),
    1000.0,
    2600.0,
    ((0.0, 0.0), (100.0, 500.0), (1000.0, 2300.0)),
)


def test_a_prior_comes_back_from_json() -> None:
    assert Prior.from_json(PRIOR.to_json()) == PRIOR


@pytest.mark.parametrize(
    "data",
    [
        {},
        {**PRIOR.to_json(), "pace": "fast"},
        {**PRIOR.to_json(), "pace": 0.0},
        {**PRIOR.to_json(), "pauses": [[None, 5.0, 0.0]]},
        {**PRIOR.to_json(), "curve": [[5.0, 1.0], [5.0, 2.0]]},
    ],
)
def test_what_is_no_prior_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a prior"):
        Prior.from_json(data)


def test_work_follows_the_course_of_the_earlier_run() -> None:
    assert PRIOR.work(0.0, 50.0) == 250.0
    assert PRIOR.work(50.0, 200.0) == 250.0 + 200.0
    assert PRIOR.work(900.0, 1100.0) == 200.0 + 200.0
    assert PRIOR._replace(curve=()).work(50.0, 200.0) == 300.0


def test_a_run_of_another_length_takes_only_the_pace() -> None:
    assert PRIOR.left(50.0, 1000.0) == 2050.0
    assert PRIOR.left(50.0, 3000.0) == 5900.0


def test_the_prior_counts_less_as_the_runs_own_evidence_grows() -> None:
    weights = [belief(PRIOR, 1.05, 0.05, doubt, blocks=10).weight for doubt in (0.3, 0.1, 0.03, 0.003)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 0.8
    assert weights[-1] < 0.01


def test_a_prior_that_is_contradicted_counts_for_nothing() -> None:
    assert belief(PRIOR, 3.0, 0.1, 0.3, blocks=10).weight < 0.01
    assert belief(PRIOR, 0.35, 0.1, 0.3, blocks=10).weight < 0.01


def test_slow_first_lines_do_not_contradict_a_prior() -> None:
    assert belief(PRIOR, 4.0, 0.25, 0.3, blocks=1).weight > 0.9


def test_the_prior_is_scaled_by_what_is_known_of_this_run() -> None:
    scales = [belief(PRIOR, 1.2, measured, 0.1, blocks=10).scale for measured in (1.0, 0.1, 0.01)]
    assert scales == sorted(scales)
    assert 1.0 < scales[0] < 1.01
    assert scales[-1] == pytest.approx(1.2, rel=0.01)


def test_runs_that_differ_widen_the_spread_and_the_latest_pace_counts() -> None:
    alike = PRIOR._replace(spread=FIRST_SPREAD).after(PRIOR)
    apart = PRIOR._replace(pace=4.0, spread=FIRST_SPREAD).after(PRIOR)
    assert alike.spread < PRIOR.spread < apart.spread
    assert apart.spread == pytest.approx(math.sqrt((0.01 + math.log(2) ** 2) / 2))
    assert (apart.pace, apart.runs) == (4.0, 2)
