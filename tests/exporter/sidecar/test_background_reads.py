"""Background reads: a collector that fails or hangs loses only its own series."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.collecting.collector import StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract.clock import SystemClock
from exporter.contract.events import Event
from exporter.contract.manifest import ESSENTIAL, FULL, NORMAL
from exporter.sidecar.background_reads import (
    DURATION,
    FAMILIES,
    LAST_SUCCESS,
    LEAST_DEADLINE_S,
    SUCCESS,
    CollectorSlot,
)
from tests.support.exporter import FakeClock, make_context, make_manifest, make_sidecar, samples_of, until

DEADLINE_S = 10.0
VALUE = Family("test_value", "Reads so far.", labels=("which",))


class ScriptedCollector:
    """A collector that reads, fails or hangs, as the test sets."""

    families = (VALUE,)

    def __init__(self, name: str, interval_s: float = 1e6) -> None:
        self.name = name
        self.interval_s = interval_s
        self.mode = "reads"
        self.release = threading.Event()
        self.reads = 0
        self.max_concurrent = 0
        self._running = 0

    def read(self) -> int:
        self.reads += 1
        self._running += 1
        self.max_concurrent = max(self.max_concurrent, self._running)
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

    def describe(self, snapshot: int, parts: StatusParts) -> None:
        parts.events.append(Event(time=snapshot, level="info", event=self.name))


class SlotSet:
    """Several slots that share a fake clock."""

    def __init__(self, *names: str) -> None:
        self.clock = FakeClock()
        self.collectors = [ScriptedCollector(name) for name in names]
        self.slots = [CollectorSlot(collector, self.clock, DEADLINE_S) for collector in self.collectors]

    def start(self) -> None:
        for slot in self.slots:
            slot.start()
        until(lambda: all(slot.ready for slot in self.slots), "the first reads")

    def read_once(self, slot: CollectorSlot) -> None:
        """Request a read and wait for its end."""
        ticket = slot.request()
        until(lambda: slot.has_served(ticket), "a read")

    def begin_read(self, number: int, mode: str) -> None:
        """Begin a read that does not end."""
        self.collectors[number].mode = mode
        before = self.collectors[number].reads
        self.slots[number].request()
        until(lambda: self.collectors[number].reads > before, "the start of a read")

    def page(self) -> str:
        out = Samples({})
        for slot in self.slots:
            slot.render(out)
            slot.render_self(out)
        return out.page()

    def close(self) -> None:
        """Let every read end, so that it logs nothing during the next test."""
        for collector, slot in zip(self.collectors, self.slots, strict=True):
            collector.mode = "reads"
            collector.release.set()
            if collector.reads:
                self.read_once(slot)

    def values(self) -> dict[str, float]:
        return samples_of(self.page(), VALUE)

    def success(self) -> dict[str, float]:
        return samples_of(self.page(), SUCCESS)


@pytest.fixture
def slot_set() -> Iterator[SlotSet]:
    created = SlotSet("a", "b")
    yield created
    created.close()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gpujob.refresh"]


def test_in_the_first_minute_a_collector_reads_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.sidecar.background_reads.FIRST_INTERVAL_S", 0.05)
    slots = SlotSet("often", "rarely")
    often, rarely = slots.collectors
    often.interval_s = 10.0
    slots.start()
    until(lambda: often.reads >= 3, "the third read")
    slots.clock.advance(60.0)
    slots.read_once(slots.slots[0])
    slots.read_once(slots.slots[0])  # the first request may have met a read that was due
    before = often.reads
    time.sleep(0.3)
    assert (often.reads - before, rarely.reads) == (0, 1)


def test_the_page_is_empty_before_the_first_read(slot_set: SlotSet) -> None:
    assert slot_set.page() == ""
    assert not any(slot.ready or slot.success or slot.overdue for slot in slot_set.slots)


def test_a_read_is_shown_with_its_success_and_duration(slot_set: SlotSet) -> None:
    slot_set.start()
    page = slot_set.page()
    assert samples_of(page, VALUE) == {'which="a"': 1, 'which="b"': 1}
    assert samples_of(page, SUCCESS) == {'collector="a"': 1, 'collector="b"': 1}
    assert set(samples_of(page, DURATION).values()) == {0.0}
    assert set(samples_of(page, LAST_SUCCESS).values()) == {slot_set.clock.now}


def test_a_failed_read_drops_only_the_snapshot_of_its_collector(slot_set: SlotSet) -> None:
    slot_set.start()
    first, second = slot_set.slots
    slot_set.collectors[0].mode = "fails"
    slot_set.clock.advance(5)
    slot_set.read_once(first)
    slot_set.read_once(second)
    assert slot_set.values() == {'which="b"': 2}
    assert slot_set.success() == {'collector="a"': 0, 'collector="b"': 1}
    last = samples_of(slot_set.page(), LAST_SUCCESS)
    assert last['collector="b"'] - last['collector="a"'] == 5
    slot_set.collectors[0].mode = "reads"
    slot_set.read_once(first)
    assert slot_set.values() == {'which="a"': 3, 'which="b"': 2}
    assert slot_set.success() == {'collector="a"': 1, 'collector="b"': 1}


def test_a_failure_is_logged_when_it_begins_and_when_it_ends(
    slot_set: SlotSet, caplog: pytest.LogCaptureFixture
) -> None:
    slot_set.start()
    slot_set.collectors[0].mode = "fails"
    for _ in range(3):
        slot_set.read_once(slot_set.slots[0])
    assert logged(caplog) == ["collector a fails: ValueError: no such thing"]
    assert [record.levelno for record in caplog.records if record.name == "gpujob.refresh"] == [logging.WARNING]
    slot_set.collectors[0].mode = "reads"
    for _ in range(3):
        slot_set.read_once(slot_set.slots[0])
    assert logged(caplog)[1:] == ["collector a works again"]


def test_an_overdue_read_removes_only_its_own_series(slot_set: SlotSet) -> None:
    slot_set.start()
    hanging, other = slot_set.slots
    slot_set.begin_read(0, "hangs")
    assert slot_set.values() == {'which="a"': 1, 'which="b"': 1}, "the last snapshot stays until the deadline"
    slot_set.clock.advance(DEADLINE_S + 1)
    slot_set.read_once(other)
    assert slot_set.values() == {'which="b"': 2}
    assert slot_set.success() == {'collector="a"': 0, 'collector="b"': 1}
    assert hanging.overdue
    assert hanging.reads.overdue
    parts = StatusParts()
    for slot in slot_set.slots:
        slot.describe(parts)
    assert [event.event for event in parts.events] == ["b"]


def test_no_second_read_starts_while_one_hangs(slot_set: SlotSet) -> None:
    slot_set.start()
    slot_set.begin_read(0, "hangs")
    for _ in range(3):
        slot_set.slots[0].request()
        slot_set.clock.advance(100)
        slot_set.read_once(slot_set.slots[1])
    collector = slot_set.collectors[0]
    assert (collector.reads, collector.max_concurrent) == (2, 1)
    collector.mode = "reads"
    collector.release.set()
    until(lambda: slot_set.success()['collector="a"'] == 1, "it to work again")
    until(lambda: slot_set.values()['which="a"'] == 3, "the read requested meanwhile")
    assert collector.max_concurrent == 1


def test_a_first_read_that_hangs_is_a_failure(slot_set: SlotSet) -> None:
    slot_set.collectors[0].mode = "hangs"
    for slot in slot_set.slots:
        slot.start()
    until(lambda: slot_set.slots[1].ready and slot_set.collectors[0].reads, "the first reads")
    slot_set.clock.advance(DEADLINE_S + 1)
    assert slot_set.success() == {'collector="a"': 0, 'collector="b"': 1}
    assert not slot_set.slots[0].ready


def test_a_hang_is_logged_when_it_begins_and_when_it_ends(slot_set: SlotSet, caplog: pytest.LogCaptureFixture) -> None:
    slot_set.start()
    slot_set.begin_read(0, "hangs")
    slot_set.clock.advance(DEADLINE_S + 1)
    for _ in range(3):
        slot_set.page()
    assert len(logged(caplog)) == 1
    assert logged(caplog)[0].startswith("collector a hangs")
    slot_set.collectors[0].release.set()
    until(lambda: logged(caplog)[1:] == ["collector a works again"], "the end of it")


def test_a_read_in_progress_does_not_serve_a_later_request(slot_set: SlotSet) -> None:
    slot_set.start()
    slot, collector = slot_set.slots[0], slot_set.collectors[0]
    slot_set.begin_read(0, "hangs")
    ticket = slot.request()
    release_of_first_read, collector.release = collector.release, threading.Event()
    release_of_first_read.set()
    until(lambda: collector.reads == 3, "the start of the requested read")
    assert not slot.has_served(ticket)
    collector.release.set()
    until(lambda: slot.has_served(ticket), "its end")


def test_the_callback_runs_after_each_read(slot_set: SlotSet) -> None:
    called = threading.Event()
    slot_set.slots[0].on_read = called.set
    slot_set.collectors[0].mode = "fails"
    slot_set.slots[0].start()
    assert called.wait(20)


def test_reads_follow_the_interval_of_the_collector() -> None:
    collector = ScriptedCollector("a", interval_s=0.01)
    CollectorSlot(collector, SystemClock()).start()
    until(lambda: collector.reads >= 3, "three reads")
    collector.interval_s = 1e6
    assert collector.max_concurrent == 1


def test_requested_reads_do_not_delay_the_next_regular_read(slot_set: SlotSet, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, waits = slot_set.slots[0], list[float]()
    wait = slot._wake.wait

    def record(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(timeout_s)

    monkeypatch.setattr(slot._wake, "wait", record)
    slot_set.start()
    for number in range(50):
        until(lambda count=number + 1: len(waits) == count, "the wait for the regular read")
        slot_set.clock.advance(1.0)
        slot_set.read_once(slot)
    assert waits[:50] == [slot.collector.interval_s - number for number in range(50)]


@pytest.mark.parametrize(("interval_s", "deadline_s"), [(1.0, LEAST_DEADLINE_S), (5.0, 15.0), (60.0, 180.0)])
def test_the_read_deadline_is_three_intervals_and_at_least_ten_seconds(interval_s: float, deadline_s: float) -> None:
    clock, collector = FakeClock(), ScriptedCollector("a", interval_s)
    slot = CollectorSlot(collector, clock)
    collector.mode = "hangs"
    slot.start()
    until(lambda: collector.reads, "the read")
    clock.advance(deadline_s)
    assert not slot.overdue
    clock.advance(0.001)
    assert slot.overdue
    collector.release.set()


def test_a_snapshot_that_cannot_be_rendered_loses_only_its_own_series(tmp_path: Path) -> None:
    bad, good = ScriptedCollector("bad"), ScriptedCollector("good")
    sidecar = make_sidecar(make_context(make_manifest(tmp_path)), bad, good)
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


@pytest.mark.parametrize(
    ("detail", "families"),
    [(level, {SUCCESS, LAST_SUCCESS}) for level in (ESSENTIAL, NORMAL)] + [(FULL, {SUCCESS, LAST_SUCCESS, DURATION})],
)
def test_a_page_has_the_detail_that_the_manifest_names(tmp_path: Path, detail: str, families: set[Family]) -> None:
    sidecar = make_sidecar(make_context(make_manifest(tmp_path, detail=detail)), ScriptedCollector("a"))
    sidecar.start()
    until(lambda: sidecar.ready, "the first read")
    page = sidecar.page()
    assert {family for family in FAMILIES if f"# TYPE {family.full_name} " in page} == families


def test_a_hanging_read_does_not_delay_the_end_of_the_process() -> None:
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
