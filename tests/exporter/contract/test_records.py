"""Records: what goes out as JSON comes in again, whatever else the JSON holds."""

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.records import NOTHING, JsonObject, Record, RecordError


class Point(NamedTuple):
    seconds: float
    items: int = 0


class Worker(Record):
    rank: int
    rate: float | None = None
    last: Point | None = None


class Where(Record):
    node: str = ""


class Page(Record):
    SCHEMA: ClassVar[int | None] = 2
    job: str
    workers: tuple[Worker, ...] = ()
    by_rank: Mapping[int, Worker] = NOTHING
    limits: JsonObject = NOTHING


def page(**values: object) -> dict[str, object]:
    return {"schema": 2, "job": "j", **values}


NUMBERS = st.floats(-1e299, 1e299)
WORKERS = st.builds(
    Worker,
    rank=st.integers(),
    rate=st.none() | NUMBERS,
    last=st.none() | st.builds(Point, NUMBERS, st.integers()),
)


@given(
    st.builds(
        Page, job=st.text(), workers=st.lists(WORKERS).map(tuple), by_rank=st.dictionaries(st.integers(), WORKERS)
    )
)
def test_a_record_survives_its_json(record: Page) -> None:
    assert Page.from_json(record.to_json()) == record


@given(st.dictionaries(st.text(), st.integers() | st.lists(st.text()), max_size=4))
def test_keys_without_a_field_are_written_again(unknown: dict[str, object]) -> None:
    body = page(workers=[{"rank": 1, "rate": None, "last": None, "colour": "red"}], by_rank={}, limits={})
    assert Page.from_json(unknown | body).to_json() == unknown | body
    assert Page.from_json(unknown | body).replace(job="k").to_json() == unknown | body | {"job": "k"}


def test_a_whole_number_with_a_point_is_a_whole_number() -> None:
    assert type(Worker.from_json({"rank": 1.0}).rank) is int


def test_a_field_that_an_older_version_did_not_write_has_its_default() -> None:
    assert Page.from_json({"schema": 1, "job": "j"}) == Page(job="j")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (page(schema=3), "status of n1 has schema 3, and this gpujob reads up to 2"),
        (page(workers=[{"rank": "a"}]), "status of n1.workers[0].rank: expected a whole number, not 'a'"),
        (page(workers=[{"rank": 1, "last": {"seconds": "x"}}]), "workers[0].last.seconds: expected a number, not 'x'"),
        (page(workers=[{"rank": 1, "rate": "x"}]), "workers[0].rate: expected a number, not 'x'"),
        (page(workers=[{"rank": 1, "rate": 10**400}]), "workers[0].rate: 1000000000"),
        (page(workers=[{"rank": 1, "last": [10**400, 1]}]), "is too large or not finite"),
        (page(workers=[{"rank": 10**400}]), "workers[0].rank: 1000000000"),
        (page(workers=[{"rank": 1, "rate": -math.inf}]), "workers[0].rate: -inf is too large or not finite"),
        (page(workers=[{"rank": 1, "rate": math.nan}]), "workers[0].rate: nan is too large or not finite"),
        (page(workers=[{"rank": 1, "last": {"seconds": 1e301}}]), "seconds: 1e+301 is too large or not finite"),
        (page(workers=[{"rank": math.inf}]), "workers[0].rank: inf is too large or not finite"),
        (page(workers=[{"rank": math.nan}]), "workers[0].rank: nan is too large or not finite"),
        (page(workers=[{"rank": True}]), "workers[0].rank: expected a whole number, not True"),
        (page(workers=[{"rank": 1.5}]), "workers[0].rank: expected a whole number, not 1.5"),
        (page(by_rank={"x": {}}), "status of n1.by_rank: invalid literal for int()"),
        ({}, "status of n1: job is missing"),
        ([], "status of n1: expected an object, not []"),
    ],
)
def test_errors_name_place_and_value(body: object, message: str) -> None:
    with pytest.raises(RecordError) as error:
        Page.from_json(body, "status of n1")
    assert message in str(error.value)


def test_records_are_frozen_and_know_their_fields() -> None:
    with pytest.raises(AttributeError):
        Worker(rank=1).rank = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="has no field speed"):
        Worker(rank=1).replace(speed=3)
    with pytest.raises(TypeError, match="needs rank"):
        Worker()  # type: ignore[call-arg]


class Placed(Worker, Where):
    pass


def test_a_record_is_joined_from_its_parts() -> None:
    joined = Placed.join(Worker.from_json({"rank": 3, "else": 1}), Where(node="n"), rate=2.0)
    assert joined.to_json() == {"rank": 3, "rate": 2.0, "last": None, "node": "n"}
    with pytest.raises(TypeError, match=r"^Placed needs rank$"):
        Placed.join(Where(node="n"))
    with pytest.raises(TypeError, match=r"^Where is no part of Worker$"):
        Worker.join(Where(node="n"), rank=3)
