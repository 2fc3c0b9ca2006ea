"""Figures of merit: contents of a request, and how long a figure is kept."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import run_files
from exporter.contract.identity import safe_label
from exporter.contract.status import FigureOfMerit
from exporter.sidecar.figures_collector import (
    FIGURE,
    FIGURE_TIME,
    MOST_FIGURES,
    STALE_S,
    FigureOfMeritError,
    FomCollector,
    parse_figure_of_merit,
)
from tests.support.exporter import NODE, FakeClock, make_context, make_manifest, page_of, samples_of
from tests.support.statuses import described


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make_collector(run_dir: Path, clock: FakeClock, **identity: Any) -> FomCollector:
    return FomCollector(make_context(make_manifest(run_dir), clock, **identity))


def body(name: object, value: object) -> bytes:
    return json.dumps({"name": name, "value": value}).encode()


# -- one request ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "figure"),
    [
        ("gflops", 511.264069, ("gflops", 511.264069)),
        ("epoch", 3, ("epoch", 3.0)),
        ("reward", -1e299, ("reward", -1e299)),
        (" tokens/s ", 0, ("tokens_s", 0.0)),
        ('a"b\n{}', 1, ("a_b___", 1.0)),
        ("Übung 日本", 1, ("Übung_日本", 1.0)),
        ("n" * 300, 1, ("n" * 128, 1.0)),
    ],
)
def test_a_figure_is_a_name_and_a_number(name: str, value: float, figure: tuple[str, float]) -> None:
    assert parse_figure_of_merit(body(name, value)) == figure


def test_other_keys_of_the_object_are_ignored() -> None:
    assert parse_figure_of_merit(b'{"name": "a", "value": 1, "unit": "s", "gpu": 3}') == ("a", 1.0)


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"name=gflops&value=1", "the body is not JSON"),
        (b'{"name": "a", "value": nan}', "the body is not JSON"),
        (b'{"name": "caf\xe9", "value": 1}', "the body is not JSON"),
        (b"[" * 60_000, "the body is not JSON"),
        (b"9" * 5000, "the body is not JSON"),
        (b'[{"name": "a", "value": 1}]', "the body is not a JSON object"),
        (b"{}", "name and value missing"),
        (b'{"name": "a"}', "value missing"),
        (b'{"value": 1}', "name missing"),
        (body("", 1), 'name: "" is not a name; use a text'),
        (body("  ", 1), 'name: "  " is not a name; use a text'),
        (body(7, 1), "name: 7 is not a name; use a text"),
        (body(None, 1), "name: null is not a name; use a text"),
        (body("a", "1"), 'value: "1" is not a number'),
        (body("a", None), "value: null is not a number"),
        (body("a", True), "value: true is not a number"),
        (body("a", ["x" * 100]), f'value: ["{"x" * 38}... is not a number'),
        (body("a", float("nan")), "value: NaN is not a finite number"),
        (body("a", float("-inf")), "value: -Infinity is not a finite number"),
        (b'{"name": "a", "value": 1e999}', "value: Infinity is not a finite number"),
        (body("a", 10**400), f"value: 1{'0' * 39}... is not a finite number"),
        (body("a", -1e300), "value: -1e+300 is too large; use one below 1e+300"),
    ],
)
def test_an_invalid_body_is_refused_with_its_error(request_body: bytes, message: str) -> None:
    with pytest.raises(FigureOfMeritError) as error:
        parse_figure_of_merit(request_body)
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 200


LARGEST = math.nextafter(run_files.MOST_NUMBER, 0)


@given(st.text(min_size=1, max_size=200), st.floats(-LARGEST, LARGEST))
def test_a_name_is_a_safe_label(name: str, value: float) -> None:
    try:
        label, number = parse_figure_of_merit(body(name, value))
    except FigureOfMeritError:
        assert not name.strip()
    else:
        assert (safe_label(label), number) == (label, value)


@given(st.binary(max_size=100))
def test_a_random_body_is_refused(request_body: bytes) -> None:
    with pytest.raises(FigureOfMeritError):
        parse_figure_of_merit(request_body)


# -- kept figures --------------------------------------------------------------------------------


def test_the_last_value_of_each_name_is_shown_with_its_time(tmp_path: Path, clock: FakeClock) -> None:
    collector = make_collector(tmp_path, clock)
    start = clock.now
    collector.accept(body("gflops", 1))
    collector.accept(body("loss", 3))
    clock.advance(60)
    assert collector.accept(body("gflops", 2)) == FigureOfMerit("gflops", 2.0, start + 60)
    page = page_of(collector, collector.read())
    assert samples_of(page, FIGURE) == {'name="gflops"': 2.0, 'name="loss"': 3.0}
    assert samples_of(page, FIGURE_TIME) == {'name="gflops"': start + 60, 'name="loss"': start}
    assert described(collector, collector.read()).figures_of_merit == (
        FigureOfMerit("gflops", 2.0, start + 60),
        FigureOfMerit("loss", 3.0, start),
    )


def test_a_figure_is_kept_without_updates(tmp_path: Path, clock: FakeClock) -> None:
    collector = make_collector(tmp_path, clock)
    collector.accept(body("score", 1))
    clock.advance(7 * 86400)
    assert [figure.name for figure in collector.read()] == ["score"]


def test_the_page_is_empty_without_figures(tmp_path: Path, clock: FakeClock) -> None:
    collector = make_collector(tmp_path, clock)
    assert page_of(collector, collector.read()) == ""


def test_the_number_of_names_is_limited_but_known_names_are_updated(tmp_path: Path, clock: FakeClock) -> None:
    collector = make_collector(tmp_path, clock)
    for index in range(MOST_FIGURES):
        collector.accept(body(f"n{index}", index))
    with pytest.raises(
        FigureOfMeritError, match="name: one is not added: 64 others were reported within the last 10 min"
    ):
        collector.accept(body("one", 1))
    collector.accept(body("n0", 9))
    figures = collector.read()
    assert (len(figures), figures[0].value) == (MOST_FIGURES, 9.0)


def test_the_figure_that_was_not_reported_for_longest_makes_room(tmp_path: Path, clock: FakeClock) -> None:
    collector = make_collector(tmp_path, clock)
    for index in range(MOST_FIGURES):
        collector.accept(body(f"n{index}", index))
    clock.advance(STALE_S)
    collector.accept(body("n0", 9))
    collector.accept(body("one", 1))
    names = {figure.name for figure in collector.read()}
    assert names == {"n0", "one", *(f"n{index}" for index in range(2, MOST_FIGURES))}


def test_no_figure_is_lost_during_concurrent_reads(tmp_path: Path, clock: FakeClock) -> None:
    collector = make_collector(tmp_path, clock)
    senders = [
        threading.Thread(
            target=lambda number=number: [collector.accept(body(f"n{number}_{index}", 1)) for index in range(8)]
        )
        for number in range(8)
    ]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        collector.read()
    assert len(collector.read()) == MOST_FIGURES


# -- a restarted sidecar -------------------------------------------------------------------------


def leave_status(run_dir: Path, figures: object, attempt: int = 0) -> None:
    (run_dir / run_files.STATUS_DIR).mkdir()
    run_files.write_json(
        run_dir / run_files.STATUS_DIR / f"{NODE}.json", {"attempt": attempt, "figures_of_merit": figures}
    )


def test_a_restarted_sidecar_keeps_the_figures(tmp_path: Path, clock: FakeClock) -> None:
    leave_status(tmp_path, [{"name": "score", "value": 2, "time": 5}])
    assert make_collector(tmp_path, clock).read() == (FigureOfMerit("score", 2.0, 5.0),)


def test_figures_of_an_earlier_attempt_are_dropped(tmp_path: Path, clock: FakeClock) -> None:
    leave_status(tmp_path, [{"name": "score", "value": 2, "time": 5}])
    assert make_collector(tmp_path, clock, attempt=1).read() == ()


@pytest.mark.parametrize("figures", [None, 3, [3], [{}], [{"name": "a", "value": "x", "time": 5}]])
def test_a_status_without_figures_gives_none(tmp_path: Path, clock: FakeClock, figures: object) -> None:
    leave_status(tmp_path, figures)
    assert make_collector(tmp_path, clock).read() == ()
