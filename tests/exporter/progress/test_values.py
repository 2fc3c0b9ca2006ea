"""Values of a worker's log: which are fresh, and which are the best."""

from exporter.logs.search.findings import LogValue
from exporter.progress.values import MOST_RANKS, VALUE_FRESH_S, WorkerValues


def test_a_value_is_fresh_from_its_time_until_it_is_too_old() -> None:
    values = WorkerValues()
    values.set("loss", None, LogValue(2.5, 10), 100.0)
    values.set("lr", None, LogValue(0.1, 20), 400.0)
    assert values.fresh(500.0) == (("loss", 2.5, 100.0), ("lr", 0.1, 400.0))
    assert values.fresh(99.0 + VALUE_FRESH_S) == (("loss", 2.5, 100.0), ("lr", 0.1, 400.0))
    assert values.fresh(100.0 + VALUE_FRESH_S) == (("lr", 0.1, 400.0),)
    assert values.fresh(500.0) == (("loss", 2.5, 100.0), ("lr", 0.1, 400.0))  # a clock that was set back


def test_a_value_of_one_rank_expires_while_another_is_fresh() -> None:
    values = WorkerValues()
    values.set("tokens_per_second", 0, LogValue(6.5, 10), 100.0)
    values.set("tokens_per_second", 1, LogValue(3.5, 20), 400.0)
    assert values.fresh(500.0) == (("tokens_per_second", 10.0, 400.0),)
    assert values.fresh(100.0 + VALUE_FRESH_S) == (("tokens_per_second", 3.5, 400.0),)


def test_a_new_value_is_shown_at_once_and_the_best_one_stays() -> None:
    values = WorkerValues()
    for t, loss in enumerate((2.5, 1.5, 3.5)):
        values.set("loss", None, LogValue(loss, t), float(t))
        assert values.fresh(3.0) == (("loss", loss, t),)
        assert values.last() == {"loss": loss}
    assert values.best == {"loss": 1.5}
    values.remove(["loss", "lr"])
    assert (values.fresh(3.0), values.last()) == ((), {})


def test_the_last_value_is_that_of_the_ranks_that_were_fresh_with_it() -> None:
    values = WorkerValues()
    for rank, rate, t in ((0, 6.5, 100.0), (1, 3.5, 400.0), (2, 1.5, 200.0 + VALUE_FRESH_S)):
        values.set("tokens_per_second", rank, LogValue(rate, rank), t)
    assert values.last() == {"tokens_per_second": 5.0}


def test_a_rank_too_many_takes_the_place_of_one_that_is_silent() -> None:
    values = WorkerValues()
    for rank in range(MOST_RANKS + 1):
        values.set("loss", rank, LogValue(1.0, rank), 100.0)
    assert MOST_RANKS not in values.by_name["loss"]
    values.set("loss", MOST_RANKS, LogValue(1.0, 9), 100.0 + VALUE_FRESH_S)
    assert set(values.by_name["loss"]) == {MOST_RANKS}
