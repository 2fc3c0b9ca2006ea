"""Published values: one writer each, readers that only read, absent and old values."""

import inspect
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.collecting.collector import Collector
from exporter.collecting.families import Samples
from exporter.collecting.published import RECENT_S, Published, Publisher
from exporter.contract import run_files
from exporter.contract.status import NodeStatus
from exporter.sidecar.collectors import make_collectors
from exporter.sidecar.sidecar import Sidecar
from tests.support.exporter import FakeClock, make_context, make_manifest

COLLECTORS = make_collectors(make_context(make_manifest(Path("/runs/1"))), NodeStatus).collectors


def values_of(collector: Collector) -> Iterator[tuple[str, type, object]]:
    """The published values that a collector is given: name of the argument, role and type of the value."""
    hints = typing.get_type_hints(type(collector).__init__)
    for name, hint in hints.items():
        role = typing.get_origin(hint)
        if role in (Published, Publisher):
            yield name, role, typing.get_args(hint)[0]


def test_each_published_value_has_one_writer_and_readers() -> None:
    given = [value for collector in COLLECTORS for value in values_of(collector)]
    writers = Counter(kind for _, role, kind in given if role is Publisher)
    assert set(writers.values()) == {1}
    assert {kind for _, role, kind in given if role is Published} == set(writers)


def test_the_writer_is_given_its_value_after_the_context() -> None:
    for collector in COLLECTORS:
        names = list(inspect.signature(type(collector)).parameters)
        assert all(names[1] == name for name, role, _ in values_of(collector) if role is Publisher), collector.name


def test_readers_cannot_publish() -> None:
    assert not hasattr(Published, "publish")


@pytest.mark.parametrize(("interval_s", "lasts_s"), [(0.0, RECENT_S), (100.0, 300.0)])
def test_a_value_is_recent_for_three_intervals_of_its_writer_and_a_minute(interval_s: float, lasts_s: float) -> None:
    clock = FakeClock()
    published = Publisher("none", clock, interval_s=interval_s)
    assert (published.value, published.recent) == ("none", "none")
    published.publish("first")
    clock.advance(lasts_s)
    assert (published.value, published.recent) == ("first", "first")
    clock.advance(1)
    assert (published.value, published.recent) == ("first", "none")
    published.publish("second")
    assert (published.value, published.recent) == ("second", "second")


@pytest.mark.parametrize("number", range(len(COLLECTORS)), ids=[collector.name for collector in COLLECTORS])
def test_a_collector_reads_before_any_other_has_published(tmp_path: Path, number: int) -> None:
    (tmp_path / run_files.WORKERS_DIR).mkdir()
    sidecar = Sidecar(make_context(make_manifest(tmp_path)))
    slot = sidecar.slots[number]
    slot._read()
    slot.render(Samples({}))
    assert slot.success
    sidecar.context.files.close()
