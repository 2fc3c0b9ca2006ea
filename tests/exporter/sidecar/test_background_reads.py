"""Reading in the background: a collector that fails or hangs costs its own series and nothing else."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.collecting.collector import NodeStatus
from exporter.collecting.families import Family, Samples
from exporter.contract.clock import SystemClock
from exporter.sidecar.background_reads import DURATION, LAST_SUCCESS, LEAST_DEADLINE_S, SUCCESS, CollectorSlot
from exporter.sidecar.sidecar import Sidecar
from tests.support.exporter import FakeClock, make_context, make_manifest, samples_of, until

DEADLINE_S = 10.0
VALUE = Family("test_value", "Reads so far.", labels=("which",))


class Scripted:
    """A collector that reads, fails or hangs as it is told."""

    families = (VALUE,)

    def __init__(self, name: str, interval_s: float = 1e6) -> None:
        self.name = name
        self.interval_s = interval_s
        self.mode = "reads"
        self.release = threading.Event()
        self.reads = 0
        self.most_at_once = 0
        self._running = 0

    def read(self) -> int:
        self.reads += 1
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            if self.mode == "fails":
                raise ValueError("no such thing")
            if self.mode == "hangs":
                self.release.wait(60)
            return self.reads
        finally:
            self._running -= 1

    def render(self, snapshot: int, out: Samples) -> None:
        if self.mode == "cannot be shown":
            out.add(VALUE, -1, which=self.name)
            raise KeyError("lunch")
        out.add(VALUE, snapshot, which=self.name)

    def describe(self, snapshot: int, status: NodeStatus) -> None:
        status.job[self.name] = snapshot


class Row:
    """Some slots side by side, on one clock that stands still."""

    def __init__(self, *names: str) -> None:
        self.clock = FakeClock()
        self.collectors = [Scripted(name) for name in names]
        self.slots = [CollectorSlot(collector, self.clock, DEADLINE_S) for collector in self.collectors]

    def start(self) -> None:
        for slot in self.slots:
            slot.start()
        until(lambda: all(slot.ready for slot in self.slots), "the first reads")

    def turn(self, slot: CollectorSlot) -> None:
        """One read more, from its beginning to its end."""
        ticket = slot.request()
        until(lambda: slot.has_served(ticket), "a read")

    def begin(self, number: int, mode: str) -> None:
        """A read that does not end."""
        self.collectors[number].mode = mode
        before = self.collectors[number].reads
        self.slots[number].request()
        until(lambda: self.collectors[number].reads > before, "the begin of a read")

    def page(self) -> str:
        out = Samples({})
        for slot in self.slots:
            slot.render(out)
            slot.render_self(out)
        return out.page()

    def close(self) -> None:
        """Let every read end, so that nothing is logged into the next test."""
        for collector, slot in zip(self.collectors, self.slots, strict=True):
            collector.mode = "reads"
            collector.release.set()
            if collector.reads:
                self.turn(slot)

    def values(self) -> dict[str, float]:
        return samples_of(self.page(), VALUE)

    def success(self) -> dict[str, float]:
        return samples_of(self.page(), SUCCESS)


@pytest.fixture
def row() -> Iterator[Row]:
    made = Row("a", "b")
    yield made
    made.close()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gpujob.refresh"]


def test_nothing_is_shown_before_the_first_read(row: Row) -> None:
    assert row.page() == ""
    assert not any(slot.ready or slot.success or slot.overdue for slot in row.slots)


def test_a_read_is_shown_with_how_it_went(row: Row) -> None:
    row.start()
    page = row.page()
    assert samples_of(page, VALUE) == {'which="a"': 1, 'which="b"': 1}
    assert samples_of(page, SUCCESS) == {'collector="a"': 1, 'collector="b"': 1}
    assert set(samples_of(page, DURATION).values()) == {0.0}
    assert set(samples_of(page, LAST_SUCCESS).values()) == {row.clock.now}


def test_a_failed_read_drops_the_snapshot_of_its_collector_alone(row: Row) -> None:
    row.start()
    first, second = row.slots
    row.collectors[0].mode = "fails"
    row.clock.advance(5)
    row.turn(first)
    row.turn(second)
    assert row.values() == {'which="b"': 2}
    assert row.success() == {'collector="a"': 0, 'collector="b"': 1}
    last = samples_of(row.page(), LAST_SUCCESS)
    assert last['collector="b"'] - last['collector="a"'] == 5
    row.collectors[0].mode = "reads"
    row.turn(first)
    assert row.values() == {'which="a"': 3, 'which="b"': 2}
    assert row.success() == {'collector="a"': 1, 'collector="b"': 1}


def test_a_failure_is_logged_when_it_begins_and_when_it_ends(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    row.start()
    row.collectors[0].mode = "fails"
    for _ in range(3):
        row.turn(row.slots[0])
    assert logged(caplog) == ["collector a fails: ValueError: no such thing"]
    row.collectors[0].mode = "reads"
    for _ in range(3):
        row.turn(row.slots[0])
    assert logged(caplog)[1:] == ["collector a works again"]


def test_a_read_that_hangs_costs_its_own_series_once_it_is_overdue(row: Row) -> None:
    row.start()
    hanging, other = row.slots
    row.begin(0, "hangs")
    assert row.values() == {'which="a"': 1, 'which="b"': 1}, "in time so far: the last snapshot stays"
    row.clock.advance(DEADLINE_S + 1)
    row.turn(other)
    assert row.values() == {'which="b"': 2}
    assert row.success() == {'collector="a"': 0, 'collector="b"': 1}
    assert hanging.overdue
    assert hanging.describe()["overdue"]


def test_no_second_read_is_started_beside_one_that_hangs(row: Row) -> None:
    row.start()
    row.begin(0, "hangs")
    for _ in range(3):
        row.slots[0].request()
        row.clock.advance(100)
        row.turn(row.slots[1])
    collector = row.collectors[0]
    assert (collector.reads, collector.most_at_once) == (2, 1)
    collector.mode = "reads"
    collector.release.set()
    until(lambda: row.success()['collector="a"'] == 1, "it to work again")
    until(lambda: row.values()['which="a"'] == 3, "the read that was asked for meanwhile")
    assert collector.most_at_once == 1


def test_a_first_read_that_hangs_is_a_failure_too(row: Row) -> None:
    row.collectors[0].mode = "hangs"
    for slot in row.slots:
        slot.start()
    until(lambda: row.slots[1].ready and row.collectors[0].reads, "the first reads")
    row.clock.advance(DEADLINE_S + 1)
    assert row.success() == {'collector="a"': 0, 'collector="b"': 1}
    assert not row.slots[0].ready


def test_a_hang_is_logged_when_it_begins_and_when_it_ends(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    row.start()
    row.begin(0, "hangs")
    row.clock.advance(DEADLINE_S + 1)
    for _ in range(3):
        row.page()
    assert len(logged(caplog)) == 1
    assert logged(caplog)[0].startswith("collector a hangs")
    row.collectors[0].release.set()
    until(lambda: logged(caplog)[1:] == ["collector a works again"], "the end of it")


def test_a_read_that_was_under_way_does_not_serve_a_later_request(row: Row) -> None:
    row.start()
    slot, collector = row.slots[0], row.collectors[0]
    row.begin(0, "hangs")
    ticket = slot.request()
    under_way, collector.release = collector.release, threading.Event()
    under_way.set()
    until(lambda: collector.reads == 3, "the begin of the read that was asked for")
    assert not slot.has_served(ticket)
    collector.release.set()
    until(lambda: slot.has_served(ticket), "its end")


def test_the_end_of_each_read_is_told(row: Row) -> None:
    told = threading.Event()
    row.slots[0].on_read = told.set
    row.collectors[0].mode = "fails"
    row.slots[0].start()
    assert told.wait(20)


def test_reads_follow_each_other_by_the_interval_of_the_collector() -> None:
    collector = Scripted("a", interval_s=0.01)
    CollectorSlot(collector, SystemClock()).start()
    until(lambda: collector.reads >= 3, "three reads")
    collector.interval_s = 1e6
    assert collector.most_at_once == 1


def test_reads_that_are_asked_for_do_not_put_off_the_next_one() -> None:
    collector = Scripted("a", interval_s=0.1)
    slot = CollectorSlot(collector, SystemClock())
    slot.start()
    for _ in range(50):
        ticket = slot.request()
        until(lambda ticket=ticket: slot.has_served(ticket), "a read")
    asked = collector.reads
    until(lambda: collector.reads > asked + 1, "two reads that nobody asked for", timeout=1.0)
    collector.interval_s = 1e6


@pytest.mark.parametrize(("interval_s", "deadline_s"), [(1.0, LEAST_DEADLINE_S), (5.0, 15.0), (60.0, 180.0)])
def test_a_read_has_three_intervals_and_at_least_ten_seconds(interval_s: float, deadline_s: float) -> None:
    clock, collector = FakeClock(), Scripted("a", interval_s)
    slot = CollectorSlot(collector, clock)
    collector.mode = "hangs"
    slot.start()
    until(lambda: collector.reads, "the read")
    clock.advance(deadline_s)
    assert not slot.overdue
    clock.advance(0.001)
    assert slot.overdue
    collector.release.set()


def test_a_snapshot_that_cannot_be_shown_costs_its_own_series(tmp_path: Path) -> None:
    bad, good = Scripted("bad"), Scripted("good")
    sidecar = Sidecar(make_context(make_manifest(tmp_path)), built=[bad, good])
    sidecar.start()
    until(lambda: sidecar.ready, "the first reads")
    bad.mode = "cannot be shown"
    for _ in range(2):
        page = sidecar.page()
        assert [line.rpartition(",")[2] for line in page.splitlines() if "test_value{" in line] == ['which="good"} 1']
        assert 'collector="bad"} 0\n' in page
    bad.mode = "reads"
    assert 'which="bad"} 1\n' in sidecar.page()
    assert 'collector="bad"} 1\n' in sidecar.page()


def test_a_read_that_hangs_does_not_hold_the_end_of_the_process() -> None:
    program = (
        "import threading\n"
        "from exporter.contract.clock import SystemClock\n"
        "from exporter.sidecar.background_reads import CollectorSlot\n"
        "class Hanging:\n"
        "    name, families, interval_s, started = 'a', (), 1.0, threading.Event()\n"
        "    def read(self):\n"
        "        self.started.set()\n"
        "        threading.Event().wait()\n"
        "collector = Hanging()\n"
        "CollectorSlot(collector, SystemClock()).start()\n"
        "collector.started.wait()\n"
    )
    subprocess.run([sys.executable, "-I", "-c", program], timeout=20, check=True)


def test_levels_are_warnings_so_that_they_are_seen(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    row.start()
    row.collectors[0].mode = "fails"
    row.turn(row.slots[0])
    assert [record.levelno for record in caplog.records if record.name == "gpujob.refresh"] == [logging.WARNING]
