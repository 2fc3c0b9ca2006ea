"""The GPU host: one polling thread, its intervals, and calls that hang."""

import functools
import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.clock import SystemClock
from exporter.gpus import host_reader
from exporter.gpus.device_state_reader import DeviceTracker
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.records import (
    Gpu,
    GpuActivity,
    GpuCondition,
    GpuDriver,
    GpuDriverReplaced,
    GpuEvent,
    GpuFailed,
    GpuProcess,
    GpuReading,
    GpuUnavailable,
)
from tests.exporter.gpus.nvidia.nvml_driver import FakeDriver
from tests.fakenvml import compiler
from tests.fakenvml.profiles import h200, uuid_of
from tests.support.exporter import SOON_S, FakeClock, refuse_threads, until

CALL_S = 0.4  # time limit of a call in tests of hanging calls: short, so that they finish soon
PATIENT_S = 60.0  # time limit in all other tests: a thread that is merely slow must not count as hanging


class Fake:
    """A reader in plain Python. Tests set failures and hangs by part, or by part and GPU."""

    vendor = "acme"

    def __init__(self, count: int = 3) -> None:
        self.listed: list[Gpu] = [Gpu(f"GPU-{i}", str(i), self.vendor) for i in range(count)]
        self.failing: dict[Any, Exception] = {}
        self.hanging: dict[Any, threading.Event] = {}
        self.pending_events: list[GpuEvent] = []
        self.calls: Counter[Any] = Counter()
        self.threads: set[int] = set()
        self.hanging_calls = 0
        self.waits = 0
        self.events = True
        self.closed_by: int | None = None

    def _call(self, part: str, gpu: Gpu | None = None) -> None:
        for key in ((part, gpu.index) if gpu else part, part):
            self.calls[key] += 1
            if gpu is None:
                break
        self.threads.add(threading.get_ident())
        keys: list[Any] = [part] if gpu is None else [part, (part, gpu.index)]
        for key in keys:
            if key in self.hanging:
                self.hanging_calls += 1
                self.hanging[key].wait(20)
                self.hanging_calls -= 1
            if key in self.failing:
                raise self.failing[key]

    def hang(self, key: Any) -> threading.Event:
        """Make calls hang until the returned event is set."""
        self.hanging[key] = threading.Event()
        return self.hanging[key]

    def open(self) -> GpuDriver:
        self._call("open")
        return GpuDriver(self.vendor, "1.2", "12.8")

    def gpus(self) -> tuple[Gpu, ...]:
        self._call("gpus")
        return tuple(self.listed)

    def activity(self, gpu: Gpu) -> GpuActivity:
        self._call("activity", gpu)
        return GpuActivity(energy_j=float(self.calls["activity", gpu.index]))

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        self._call("processes", gpu)
        return (GpuProcess(100 + self.calls["processes", gpu.index]),)

    def condition(self, gpu: Gpu) -> GpuCondition:
        self._call("condition", gpu)
        return GpuCondition(pcie_replays=self.calls["condition", gpu.index])

    def wait_event(self, timeout_s: float) -> tuple[GpuEvent, ...]:
        self.waits += 1
        if "wait_event" in self.hanging:
            self.hanging["wait_event"].wait(20)
        if "wait_event" in self.failing:
            raise self.failing["wait_event"]
        events, self.pending_events = tuple(self.pending_events), []
        return events

    def reports_events(self) -> bool:
        return self.events

    def unsupported_calls(self) -> Mapping[str, str]:
        return {"fan": "has none"}

    def close(self) -> None:
        self._call("close")
        self.closed_by = threading.get_ident()


def _itself(reader: Fake) -> Fake:
    return reader


class Machine:
    """A host with fake readers and a fake clock."""

    def __init__(self, *readers: Fake, **options: Any) -> None:
        self.readers = readers or (Fake(),)
        self.clock = FakeClock()
        self.host = GpuHost(
            [functools.partial(_itself, reader) for reader in self.readers],
            self.clock,
            **{"call_timeout_s": PATIENT_S, **options},
        )

    @property
    def reader(self) -> Fake:
        return self.readers[0]

    def poll(self, after_s: float = 1.0, wait_s: float = PATIENT_S) -> GpuReading:
        """Poll the host some seconds after the previous poll."""
        self.clock.advance(after_s)
        return self.host.poll(wait_s)

    def release(self, *gates: threading.Event, remaining: int = 1) -> None:
        """Let hanging calls return, then wait until only `remaining` polling threads are left."""
        self.reader.hanging.clear()
        for gate in gates:
            gate.set()
        until(lambda: len(polling_threads()) == remaining, "the end of the abandoned threads")


def polling_threads() -> list[threading.Thread]:
    """Threads that poll GPUs, including those that hang."""
    return [thread for thread in threading.enumerate() if thread.name == "gpus"]


Start = Callable[..., Machine]


@pytest.fixture(autouse=True)
def short_event_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reader, "EVENT_WAIT_S", 0.02)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts hosts. Afterwards releases every hang and closes all hosts."""
    machines: list[Machine] = []

    def start_machine(*readers: Fake, **options: Any) -> Machine:
        machines.append(Machine(*readers, **options))
        return machines[-1]

    yield start_machine
    for machine in machines:
        for reader in machine.readers:
            for gate in reader.hanging.values():
                gate.set()
            reader.hanging.clear()
        machine.host.close(2.0)


def energies(reading: GpuReading) -> list[float | None]:
    """Energy of each GPU, which the fake sets to the number of reads."""
    return [None if gpu.activity is None else gpu.activity.energy_j for gpu in reading.gpus]


# -- polls and intervals -------------------------------------------------------------------------


def test_the_first_poll_reads_everything(start: Start) -> None:
    machine = start()
    reading = machine.poll()
    assert (reading.state, reading.message, reading.is_driver_replaced, reading.time) == (
        "ok",
        None,
        False,
        machine.clock.now,
    )
    assert reading.driver == GpuDriver("acme", "1.2", "12.8")
    assert reading.unsupported_calls == {"fan": "has none"}
    assert [gpu.gpu.index for gpu in reading.gpus] == ["0", "1", "2"]
    for gpu in reading.gpus:
        assert (gpu.state, gpu.message) == ("ok", None)
        assert gpu.activity == GpuActivity(energy_j=1.0)
        assert gpu.processes == (GpuProcess(101),)
        assert gpu.condition == GpuCondition(pcie_replays=1)
        assert gpu.processes_time == gpu.condition_time == machine.clock.now


def test_a_single_background_thread_makes_all_calls(start: Start) -> None:
    machine = start()
    for _ in range(3):
        machine.poll()
    assert len(machine.reader.threads) == 1
    assert threading.get_ident() not in machine.reader.threads


def test_polls_within_the_interval_return_the_previous_reading(start: Start) -> None:
    machine = start()
    assert energies(machine.poll()) == energies(machine.poll(0.5)) == [1, 1, 1]
    assert energies(machine.poll(0.5)) == [2, 2, 2]
    assert energies(machine.poll(0.9)) == [3, 3, 3]  # tolerance for another clock that is slightly faster


def test_nothing_is_read_without_a_poll(start: Start) -> None:
    machine = start()
    machine.poll()
    before = machine.reader.calls.copy()
    machine.clock.advance(1000)
    time.sleep(0.05)
    assert machine.reader.calls == before


def test_each_tier_has_its_interval_and_gpus_take_turns(start: Start) -> None:
    machine = start(Fake(8), fast_s=1.0, medium_s=5.0, slow_s=60.0)
    machine.poll()
    longest = 0
    for _ in range(600):
        before = machine.reader.calls.copy()
        machine.poll()
        calls = machine.reader.calls - before
        longest = max(longest, calls["processes"] + calls["condition"] + calls["gpus"])
    for i in range(8):
        assert machine.reader.calls["activity", str(i)] == 601
        assert 120 <= machine.reader.calls["processes", str(i)] <= 122
        assert 10 <= machine.reader.calls["condition", str(i)] <= 12
    assert machine.reader.calls["gpus"] == 11
    assert longest <= 4


def test_infrequent_polls_read_everything_that_is_due(start: Start) -> None:
    machine = start(Fake(8))
    machine.poll()
    for number in range(2, 12):
        reading = machine.poll(60)
        assert energies(reading) == [number] * 8
        assert [gpu.processes for gpu in reading.gpus] == [(GpuProcess(100 + number),)] * 8
    assert all(machine.reader.calls["condition", str(i)] == 11 for i in range(8))


def test_the_reading_follows_added_and_removed_gpus(start: Start) -> None:
    machine = start(Fake(2))
    machine.poll()
    machine.reader.listed = [machine.reader.listed[1], Gpu("GPU-9", "9", "acme")]
    assert [gpu.gpu.index for gpu in machine.poll(60).gpus] == ["1", "9"]


def test_several_threads_may_poll_at_the_same_time(start: Start) -> None:
    machine = start()
    gate = machine.reader.hang(("activity", "1"))
    found: list[GpuReading] = []
    threads = [threading.Thread(target=lambda: found.append(machine.host.poll(PATIENT_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: machine.reader.hanging_calls, "a call")
    gate.set()
    for thread in threads:
        thread.join()
    assert [energies(reading) for reading in found] == [[1, 1, 1]] * 4


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "retry_s"),
    [("no_library", 60), ("no_driver", 60), ("no_permission", 5), ("version_mismatch", 5), ("failing", 5)],
)
def test_opening_an_unavailable_driver_is_retried_after_a_pause(state: Any, retry_s: float, start: Start) -> None:
    machine = start(call_timeout_s=CALL_S)
    machine.reader.failing["open"] = GpuUnavailable(state, "it is so")
    reading = machine.poll()
    assert (reading.state, reading.message, reading.gpus, reading.driver, reading.is_ready) == (
        state,
        "it is so",
        (),
        None,
        True,
    )
    time.sleep(1.2 * CALL_S)
    assert machine.poll(retry_s - 1).state == state
    assert machine.reader.calls["open"] == 1
    machine.poll(1)
    assert machine.reader.calls["open"] == 2
    machine.reader.failing.clear()
    assert machine.poll(2 * retry_s).state == "ok"


def test_retries_of_a_failing_driver_back_off(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = GpuUnavailable("failing", "again")
    for _ in range(3600):
        machine.poll()
    assert 13 <= machine.reader.calls["open"] <= 20


def test_the_first_reader_that_opens_is_used(start: Start) -> None:
    broken, good, spare = Fake(), Fake(1), Fake(2)
    broken.failing["open"] = GpuUnavailable("no_library", "none")
    machine = start(broken, good, spare)
    assert len(machine.poll().gpus) == 1
    assert spare.calls["open"] == 0


@pytest.mark.parametrize(
    ("states", "reported"),
    [
        (("no_library", "no_driver"), "no_driver"),
        (("no_driver", "no_permission"), "no_permission"),
        (("failing", "no_library"), "failing"),
        (("failing", "version_mismatch"), "version_mismatch"),
    ],
)
def test_the_most_informative_state_of_several_readers_is_reported(states: Any, reported: str, start: Start) -> None:
    readers = [Fake() for _ in states]
    for reader, state in zip(readers, states, strict=True):
        reader.failing["open"] = GpuUnavailable(state, state)
    assert start(*readers).poll().state == reported


def test_an_unexpected_error_is_reported(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = ValueError("odd")
    reading = machine.poll()
    assert (reading.state, reading.message) == ("failing", "ValueError: odd")


def test_a_failed_listing_is_reported_and_retried(start: Start) -> None:
    machine = start()
    machine.reader.failing["gpus"] = ValueError("odd")
    reading = machine.poll()
    assert (reading.state, reading.message, reading.gpus) == ("failing", "ValueError: odd", ())
    machine.reader.failing.clear()
    assert energies(machine.poll(5)) == [1, 1, 1]


@pytest.mark.parametrize("name", ["gpus", "gpu-events"])
def test_a_thread_that_cannot_be_started_is_started_later(
    name: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, name, 1)
    machine = start()
    if name == "gpus":
        with pytest.raises(RuntimeError, match="can't start new thread"):
            machine.poll()
    assert energies(machine.poll()) == [1, 1, 1]
    machine.poll(3600)
    until(lambda: name in {thread.name for thread in threading.enumerate()}, f"the thread {name}")
    assert machine.poll().state == "ok"


def test_a_host_without_readers_reports_no_library() -> None:
    host = GpuHost([], FakeClock())
    assert host.poll(PATIENT_S).state == "no_library"
    assert host.close(PATIENT_S)


@pytest.mark.parametrize("state", ["lost", "reset_required"])
def test_a_failed_gpu_has_only_its_state_and_is_read_less_often(state: Any, start: Start) -> None:
    machine = start()
    machine.poll()
    machine.reader.failing["activity", "1"] = GpuFailed(state, "it is so")
    reading = machine.poll()
    failed = reading.gpus[1]
    assert (failed.state, failed.message) == (state, "it is so")
    assert (failed.activity, failed.processes, failed.condition) == (None, None, None)
    assert energies(reading) == [2, None, 2]
    for _ in range(10):
        machine.poll()
    assert machine.reader.calls["activity", "1"] == 4
    machine.reader.failing.clear()
    for _ in range(5):
        reading = machine.poll()
    assert reading.gpus[1].state == "ok"
    assert reading.gpus[1].processes is not None


def test_a_failed_part_does_not_affect_the_others(start: Start) -> None:
    machine = start()
    machine.reader.failing["processes", "1"] = ValueError("odd")
    reading = machine.poll()
    assert [gpu.processes is None for gpu in reading.gpus] == [False, True, False]
    assert energies(reading) == [1, 1, 1]
    assert [gpu.state for gpu in reading.gpus] == ["ok"] * 3
    machine.reader.failing.clear()
    machine.reader.failing["activity"] = ValueError("odd")
    assert energies(machine.poll()) == [None, None, None]
    machine.reader.failing.clear()
    assert energies(machine.poll()) == [3, 3, 3]


@pytest.mark.parametrize("part", ["gpus", "activity", "processes", "condition"])
def test_a_replaced_driver_is_reported_and_retries_back_off(part: str, start: Start) -> None:
    machine = start()
    machine.poll()
    machine.reader.failing[part] = GpuDriverReplaced("another one")
    machine.reader.failing["open"] = GpuUnavailable("version_mismatch", "not with this library")
    reading = machine.poll(61)
    assert (reading.state, reading.message, reading.is_driver_replaced, reading.reports_events) == (
        "version_mismatch",
        "another one",
        True,
        False,
    )
    assert energies(reading) == [None, None, None]
    before = machine.reader.calls.copy()
    for _ in range(3600):
        reading = machine.poll()
    assert (reading.state, reading.message, reading.is_driver_replaced) == (
        "version_mismatch",
        "not with this library",
        True,
    )
    calls = machine.reader.calls - before
    assert calls.keys() == {"open", "close"}
    assert calls["close"] == 1
    assert 13 <= calls["open"] <= 20


def test_a_replaced_driver_that_reopens_is_read_again_with_its_events(start: Start) -> None:
    machine = start()
    machine.poll()
    machine.reader.failing["activity"] = GpuDriverReplaced("another one")
    machine.poll()
    machine.reader.failing.clear()
    assert machine.poll(4).is_driver_replaced
    assert machine.reader.closed_by is None
    reading = machine.poll(2)
    assert (reading.state, reading.message, reading.is_driver_replaced) == ("ok", None, False)
    assert energies(reading) == [3, 2, 2]
    assert all(gpu.processes and gpu.condition for gpu in reading.gpus)
    assert machine.reader.closed_by in machine.reader.threads
    machine.reader.pending_events = [GpuEvent("GPU-1", 79, 5.0)]
    until(lambda: machine.poll(0.0).events, "the event")
    assert len([it for it in threading.enumerate() if it.name == "gpu-events"]) == 1


@pytest.mark.parametrize(("well_s", "least", "most"), [(0, 12, 20), (100, 34, 40)])
def test_a_driver_that_is_replaced_repeatedly_causes_no_busy_loop(
    well_s: float, least: int, most: int, start: Start
) -> None:
    machine = start()
    well_until = 0.0
    for _ in range(3600):
        if machine.poll().is_driver_replaced and well_s:
            well_until = machine.clock.now + well_s
            machine.reader.failing.clear()
        elif machine.clock.now >= well_until:
            machine.reader.failing["activity"] = GpuDriverReplaced("another one")
    assert least <= machine.reader.calls["open"] <= most


def test_a_replaced_driver_is_not_closed_or_reopened_while_a_call_hangs(start: Start) -> None:
    machine = start(call_timeout_s=CALL_S)
    machine.poll()
    gate = machine.reader.hang(("activity", "1"))
    machine.poll()
    machine.reader.failing["activity"] = GpuDriverReplaced("another one")
    for _ in range(20):
        reading = machine.poll()
    assert (reading.state, reading.message, reading.is_driver_replaced) == ("version_mismatch", "another one", True)
    assert machine.reader.closed_by is None
    assert machine.reader.calls["open"] == 1
    machine.reader.failing.clear()
    machine.release(gate)
    until(lambda: machine.poll(100).state == "ok", "the next successful read")


# -- hanging calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["activity", "processes", "condition"])
def test_a_hanging_gpu_does_not_affect_the_others(part: str, start: Start) -> None:
    machine = start(call_timeout_s=CALL_S)
    machine.poll()
    gate = machine.reader.hang((part, "1"))
    began = time.monotonic()
    reading = machine.poll(61)  # all parts are due
    assert CALL_S <= time.monotonic() - began < SOON_S
    assert (reading.state, [gpu.state for gpu in reading.gpus]) == ("ok", ["ok", "hanging", "ok"])
    assert energies(reading) == [2, None, 2]
    assert part in str(reading.gpus[1].message)
    for number in range(3, 9):
        assert energies(machine.poll()) == [number, None, number]
    assert machine.reader.calls[part, "1"] == 2
    machine.release(gate)
    machine.poll()
    assert machine.poll(10).gpus[1].state == "ok"


def test_a_hanging_call_of_the_first_poll_does_not_get_the_time_limit_of_the_listing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = start(call_timeout_s=CALL_S)
    listing, gate = machine.reader.hang("gpus"), machine.reader.hang(("activity", "1"))
    waits: list[float] = []
    abandon_if_late = machine.host._abandon_if_late

    def record_wait(now: float) -> float:
        waits.append(abandon_if_late(now))
        return waits[-1]

    monkeypatch.setattr(machine.host, "_abandon_if_late", record_wait)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(machine.poll)
        until(lambda: waits and waits[-1] > CALL_S, "the wait for the list")
        listing.set()
        states = [gpu.state for gpu in future.result().gpus]
    assert states == ["ok", "hanging", "ok"]
    machine.release(gate)


def test_a_poll_waits_no_longer_than_its_limit(start: Start) -> None:
    machine = start(Fake(2))
    machine.poll()
    machine.reader.hang(("activity", "1"))
    began = time.monotonic()
    machine.poll(wait_s=0.03)
    assert time.monotonic() - began < SOON_S
    until(lambda: machine.reader.hanging_calls, "the call")
    reading = machine.host.poll(0.0)
    assert ([gpu.state for gpu in reading.gpus], energies(reading)) == (["ok", "ok"], [2, 1])


def test_outdated_values_are_dropped(start: Start) -> None:
    machine = start(call_timeout_s=5.0)
    machine.poll()
    machine.reader.hang("activity")
    reading = machine.poll(wait_s=0.01)
    assert energies(reading) == [1, 1, 1]
    machine.clock.advance(10)
    reading = machine.host.poll(0.01)
    assert energies(reading) == [None, None, None]
    assert reading.gpus[2].processes is not None
    machine.clock.advance(100)
    assert machine.host.poll(0.01).gpus[2].processes is None


def test_a_gpu_that_hung_is_read_last_and_less_often(start: Start) -> None:
    machine = start(Fake(3), call_timeout_s=CALL_S)
    gate = machine.reader.hang(("activity", "0"))
    machine.poll()
    machine.release(gate)
    for _ in range(3):
        assert machine.poll().gpus[0].state == "hanging"
    assert machine.poll(5).gpus[0].state == "ok"
    machine.reader.hang(("activity", "0"))
    machine.poll(wait_s=0.0)
    until(lambda: machine.reader.hanging_calls, "the call")
    assert energies(machine.host.poll(0.0))[1:] == [6, 6]  # they were read before it


def test_hangs_far_apart_do_not_lengthen_the_pause(start: Start) -> None:
    machine = start(call_timeout_s=CALL_S, fast_s=1.0, medium_s=5.0)
    machine.poll()
    for _ in range(13):
        machine.clock.advance(1000)
        gate = machine.reader.hang(("activity", "1"))
        assert machine.poll().gpus[1].state == "hanging"
        machine.release(gate)
        assert machine.poll(4).gpus[1].state == "hanging"
        assert machine.poll(1.1).gpus[1].state == "ok"


def test_retries_of_a_gpu_that_keeps_hanging_back_off(start: Start) -> None:
    machine = start(call_timeout_s=CALL_S, fast_s=1.0, medium_s=5.0, slow_s=60.0)
    machine.poll()
    for pause_s in (5, 10, 15):
        gate = machine.reader.hang(("activity", "1"))
        machine.poll(0.9)
        until(lambda: machine.reader.hanging_calls, "a try")
        until(lambda: machine.poll(0.0).gpus[1].state == "hanging", "the hang")
        machine.release(gate)
        before = machine.reader.calls["activity", "1"]
        machine.poll(pause_s - 0.5)
        assert machine.reader.calls["activity", "1"] == before
    assert machine.poll().gpus[1].state == "ok"


def test_a_hang_counts_for_an_hour() -> None:
    tracker = DeviceTracker(Gpu("GPU-0", "0", "acme"))
    for hang_time in (0.0, 2000.0, 3000.0):
        tracker.record_hang("activity", hang_time)
    assert [tracker.recent_hangs(now) for now in (3001, 3601, 5601, 6601)] == [3, 2, 1, 0]
    tracker.record_hang("activity", 9000.0)
    assert len(tracker.hang_times) == 1


def test_two_gpus_that_hang_in_succession_mean_that_the_driver_hangs(start: Start) -> None:
    machine = start(Fake(5), call_timeout_s=CALL_S)
    machine.poll()
    gate = machine.reader.hang("activity")
    reading = until(lambda: (reading := machine.poll(1.0, 0.05)).state == "hanging" and reading, "the driver to hang")
    assert reading.message == "2 calls have not returned"
    assert [gpu.state for gpu in reading.gpus] == ["hanging", "ok", "ok", "ok", "ok"]
    reading = until(
        lambda: (reading := machine.poll(1.0, 0.05)).message == "3 calls have not returned" and reading, "the third"
    )
    assert [gpu.state for gpu in reading.gpus] == ["hanging", "ok", "ok", "ok", "ok"]
    machine.release(gate, remaining=0)
    machine.poll()
    reading = machine.poll()
    assert [gpu.state for gpu in reading.gpus] == ["hanging", "ok", "ok", "ok", "ok"]
    assert None not in energies(reading)[1:]
    assert machine.poll(5).gpus[0].state == "ok"


def test_two_hanging_gpus_do_not_mean_a_hanging_driver_when_another_answers(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    machine = start(Fake(5), call_timeout_s=CALL_S)
    machine.poll()
    for index in "01":
        machine.reader.hang(("activity", index))
    reading = machine.poll()
    assert (reading.state, energies(reading)[2:]) == ("ok", [2, 2, 2])
    reading = until(lambda: (reading := machine.poll(0.0)).gpus[1].state == "hanging" and reading, "the second")
    assert [gpu.state for gpu in reading.gpus] == ["hanging", "hanging", "ok", "ok", "ok"]
    for number in (3, 4, 5):
        reading = machine.poll()
        assert (reading.state, energies(reading)[2:]) == ("ok", [number] * 3)
    messages = [record.getMessage() for record in caplog.records if "hangs: no activity" in record.getMessage()]
    assert len(messages) == 2


def test_after_three_hanging_calls_nothing_is_read_until_one_returns(start: Start) -> None:
    machine = start(Fake(5), call_timeout_s=CALL_S)
    machine.poll()
    gates = [machine.reader.hang(("activity", str(i))) for i in range(4)]
    reading = machine.poll()
    assert (reading.state, reading.message) == ("hanging", "3 calls have not returned")
    assert [gpu.state for gpu in reading.gpus] == ["hanging"] + ["ok"] * 4
    before = machine.reader.calls.copy()
    began = time.monotonic()
    for _ in range(10):
        reading = machine.poll()
    assert time.monotonic() - began < SOON_S
    assert machine.reader.calls == before
    assert energies(reading) == [None] * 5
    machine.release(gates[0], remaining=2)
    reading = machine.poll()
    assert reading.state == "ok"
    assert energies(reading)[3:] == [2, 2]
    gates[1].set()
    gates[2].set()


def test_a_driver_that_hangs_while_opening_is_reported(start: Start) -> None:
    machine = start(call_timeout_s=CALL_S, open_timeout_s=CALL_S)
    gate = machine.reader.hang("open")
    reading = machine.poll(wait_s=0.02)
    assert (reading.state, reading.is_ready) == ("ok", False)
    until(lambda: machine.poll(0.0, 0.02).state == "hanging", "the state")
    reading = machine.poll(100, 0.02)
    assert (reading.state, reading.message, reading.gpus) == ("hanging", "open has not returned", ())
    assert machine.reader.calls["open"] == 1
    gate.set()
    reading = machine.poll()
    assert (energies(reading), reading.is_ready) == ([1, 1, 1], True)


def test_a_stall_of_the_whole_machine_is_not_taken_for_a_hanging_gpu(start: Start) -> None:
    machine = start()
    machine.poll()
    gate = machine.reader.hang(("activity", "1"))
    machine.poll(wait_s=0.0)
    until(lambda: machine.reader.hanging_calls, "the call")
    call = machine.host._thread
    assert call is not None
    call.started_at -= 1.2 * PATIENT_S  # a stall, after which this thread runs first
    assert [gpu.state for gpu in machine.poll(0.0, 0.0).gpus] == ["ok"] * 3
    machine.release(gate)
    assert energies(machine.poll(0.0)) == [2, 2, 2]
    assert not any(tracker.hang_times for tracker in machine.host._devices.values())


@pytest.mark.parametrize("part", ["open", "gpus"])
def test_a_driver_that_is_slow_to_open_is_not_taken_for_a_hanging_one(start: Start, part: str) -> None:
    machine = start(call_timeout_s=CALL_S)
    gate = machine.reader.hang(part)
    machine.poll(wait_s=0.02)
    time.sleep(1.2 * CALL_S)
    reading = machine.poll(0.0, 0.02)
    assert (reading.state, reading.is_ready, reading.gpus) == ("ok", False, ())
    gate.set()
    assert len(until(lambda: machine.poll(0.1, 0.02).gpus, "the list")) == 3


def test_a_hanging_listing_does_not_affect_known_gpus(start: Start) -> None:
    machine = start(call_timeout_s=CALL_S, open_timeout_s=CALL_S)
    machine.poll()
    gate = machine.reader.hang("gpus")
    reading = machine.poll(60)
    assert reading.state == "ok"
    assert energies(reading) == [2, 2, 2]
    machine.release(gate)
    assert energies(machine.poll()) == [3, 3, 3]
    assert machine.reader.calls["gpus"] == 2
    machine.poll(60)
    assert machine.reader.calls["gpus"] == 3


# -- events --------------------------------------------------------------------------------------


def test_events_are_kept_in_order(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = start()
    machine.poll()
    machine.reader.pending_events = [GpuEvent("GPU-1", 79, 5.0), GpuEvent("GPU-0", 31, 6.0)]
    until(lambda: len(machine.poll(0.0).events) == 2, "the events")
    machine.reader.pending_events = [GpuEvent("GPU-0", i, 7.0) for i in range(host_reader.MOST_EVENTS)]
    until(lambda: machine.poll(0.0).events[0].xid == 0, "the events")
    assert len(machine.poll(0.0).events) == host_reader.MOST_EVENTS


def test_failing_events_affect_nothing_else(start: Start) -> None:
    machine = start()
    machine.reader.failing["wait_event"] = ValueError("odd")
    assert energies(machine.poll()) == [1, 1, 1]
    time.sleep(0.05)
    machine.reader.failing.clear()
    machine.reader.pending_events = [GpuEvent("GPU-1", 79, 5.0)]
    until(lambda: machine.poll(0.0).events, "the event")


def test_event_support_is_what_the_reader_reports(start: Start) -> None:
    machine = start()
    assert machine.poll().reports_events
    machine.reader.events = False
    assert not machine.poll().reports_events


def test_without_a_driver_no_events_are_reported(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = GpuUnavailable("no_library", "none")
    assert not machine.poll().reports_events


def test_a_reader_without_events_is_not_polled_in_a_busy_loop(start: Start) -> None:
    machine = start()
    began = time.monotonic()
    machine.poll()
    until(lambda: machine.reader.waits >= 3, "waits")
    time.sleep(0.1)
    waits = machine.reader.waits
    assert waits <= 2 + (time.monotonic() - began) / host_reader.EVENT_WAIT_S


def test_the_event_thread_reports_a_replaced_driver(start: Start) -> None:
    machine = start()
    machine.reader.failing["wait_event"] = GpuDriverReplaced("another one")
    machine.poll()
    until(lambda: machine.poll(0.0).is_driver_replaced, "the replaced driver")


# -- closing -------------------------------------------------------------------------------------


def test_the_polling_thread_closes_the_reader(start: Start) -> None:
    machine = start()
    machine.poll()
    assert machine.host.close(PATIENT_S)
    assert machine.reader.closed_by in machine.reader.threads
    assert len(machine.reader.threads) == 1
    before = machine.reader.calls.copy()
    assert energies(machine.poll()) == [1, 1, 1]
    assert machine.reader.calls == before
    assert machine.host.close(0.0)


def test_a_host_that_never_polled_closes_immediately() -> None:
    assert GpuHost([Fake], FakeClock()).close(0.0)


def test_a_host_without_a_driver_closes(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = GpuUnavailable("no_library", "none")
    machine.poll()
    assert machine.host.close(PATIENT_S)
    assert machine.reader.closed_by is None


@pytest.mark.parametrize("given_up", [False, True])
def test_close_returns_in_time_during_a_hanging_call_and_leaves_the_reader_open(given_up: bool, start: Start) -> None:
    machine = start(call_timeout_s=CALL_S)
    machine.poll()
    machine.reader.hang(("activity", "1"))
    machine.poll(wait_s=PATIENT_S if given_up else 0.01)
    began = time.monotonic()
    assert not machine.host.close(0.1)
    assert time.monotonic() - began < SOON_S
    assert machine.reader.closed_by is None


def test_the_reader_stays_open_during_a_hanging_wait_for_events(start: Start) -> None:
    machine = start()
    machine.reader.hang("wait_event")
    machine.poll()
    until(lambda: machine.reader.waits, "a wait for events")
    assert not machine.host.close(1.0)
    assert machine.reader.closed_by is None


def test_close_waits_for_a_call_that_returns(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reader, "EVENT_WAIT_S", PATIENT_S)  # also the time after which a call counts as hanging
    machine = start()
    machine.poll()
    gate = machine.reader.hang(("activity", "1"))
    machine.poll(wait_s=0.0)
    until(lambda: machine.reader.hanging_calls, "the call")
    threading.Timer(0.05, gate.set).start()
    assert machine.host.close(PATIENT_S)
    assert machine.reader.closed_by is not None
    assert machine.reader.calls["activity", "2"] == 1  # nothing more was read


# -- with the fake driver library ----------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A fake driver with eight H200 GPUs."""
    if compiler() is None:
        pytest.skip("needs a C compiler")
    fake = FakeDriver(h200(), tmp_path, monkeypatch)
    yield fake
    fake.close()


def host_of(driver: FakeDriver, **options: Any) -> GpuHost:
    clock = SystemClock()
    return GpuHost([lambda: driver.make_reader(clock)], clock, fast_s=0.02, **{"call_timeout_s": PATIENT_S, **options})


def utilization(reading: GpuReading) -> list[float | None]:
    return [None if gpu.activity is None else gpu.activity.utilization_ratio for gpu in reading.gpus]


def test_an_abandoned_call_makes_no_further_calls_and_the_gpu_recovers(driver: FakeDriver) -> None:
    host = host_of(driver, call_timeout_s=CALL_S, medium_s=0.05)
    host.poll(PATIENT_S)
    failed_gpu = driver.scenario.gpus[3]
    driver.change(lambda scenario: scenario.hang("nvmlDeviceGetUtilizationRates", failed_gpu))
    until(lambda: host.poll(PATIENT_S).gpus[3].state == "hanging", "the GPU to hang")
    time.sleep(0.03)
    host.poll(PATIENT_S)
    before = driver.calls()["nvmlDeviceGetTotalEnergyConsumption"]
    driver.change(lambda scenario: scenario.release())
    time.sleep(0.05)
    assert driver.calls()["nvmlDeviceGetTotalEnergyConsumption"] == before
    until(lambda: utilization(host.poll(PATIENT_S)) == [0.97] * 8, "the GPU to come back")
    assert host.close(PATIENT_S)
    assert driver.calls()["nvmlShutdown"] == 1


def test_a_gpu_that_hangs_during_listing_has_a_placeholder_and_the_others_are_listed(driver: FakeDriver) -> None:
    driver.change(lambda scenario: scenario.hang("nvmlDeviceGetUUID", scenario.gpus[2]))
    host = host_of(driver, call_timeout_s=CALL_S, slow_s=0.1, open_timeout_s=CALL_S)
    reading = host.poll(PATIENT_S)
    assert [gpu.state for gpu in reading.gpus] == ["ok", "ok", "hanging", *["ok"] * 5]
    assert (reading.gpus[2].gpu.uuid, reading.gpus[2].gpu.index) == ("GPU-unknown-2", "2")
    assert utilization(reading)[:4] == [0.97, 0.97, None, 0.97]
    driver.change(lambda scenario: scenario.release())
    until(lambda: utilization(host.poll(PATIENT_S)) == [0.97] * 8, "the GPU to be met")
    assert [gpu.gpu.uuid for gpu in host.poll(PATIENT_S).gpus] == [uuid_of(i) for i in range(8)]
    assert host.close(PATIENT_S)


def test_a_gpu_that_answers_no_call_occupies_one_thread(driver: FakeDriver) -> None:
    host = host_of(driver, call_timeout_s=CALL_S, medium_s=0.02, slow_s=0.02)
    host.poll(PATIENT_S)
    host._gpus_due = (
        math.inf
    )  # no listing: it would hang too, in a thread of its own, because it reads the MIG mode of this GPU
    driver.change(lambda scenario: scenario.hang("*", scenario.gpus[3]))
    until(lambda: host.poll(PATIENT_S).gpus[3].state == "hanging", "the GPU to hang")
    end = time.monotonic() + 3 * CALL_S
    while time.monotonic() < end:
        reading = host.poll(PATIENT_S)
        assert (reading.state, [gpu.state for gpu in reading.gpus].count("ok")) == ("ok", 7)
        assert utilization(reading).count(0.97) == 7
        time.sleep(0.02)
    assert len(polling_threads()) == 2


def test_a_library_that_works_again_is_reopened_in_the_same_process(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_reader, "LEAST_RETRY_S", 0.1)
    host = host_of(driver)
    host.poll(PATIENT_S)
    driver.change(lambda scenario: setattr(scenario, "broken", "UNINITIALIZED"))
    until(lambda: host.poll(PATIENT_S).is_driver_replaced, "the replaced driver")
    driver.scenario.driver = "575.57.08"
    driver.change(lambda scenario: setattr(scenario, "broken", 0))
    reading = until(lambda: (reading := host.poll(PATIENT_S)).state == "ok" and reading, "the driver")
    assert reading.driver is not None
    assert (reading.driver.version, reading.is_driver_replaced) == ("575.57.08", False)
    until(lambda: utilization(host.poll(PATIENT_S)) == [0.97] * 8, "all GPUs")
    assert host.close(PATIENT_S)


PROGRAM = """
import sys, time
from exporter.contract.clock import SystemClock
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.nvidia.reader import NvmlReader
host = GpuHost([NvmlReader], SystemClock(), call_timeout_s=float(sys.argv[1]))
reading = host.poll(0.5)
while [gpu.state for gpu in reading.gpus][1:] != sys.argv[2:]:
    reading = host.poll(0.5)
print([gpu.state for gpu in reading.gpus])
began = time.monotonic()
print(host.close(60.0), time.monotonic() - began < 30, flush=True)
"""


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("hangs", [False, True])
def test_the_process_exits_in_time_during_a_hanging_call(hangs: bool, tmp_path: Path) -> None:
    scenario = h200(2)
    if hangs:
        scenario.hang("nvmlDeviceGetTemperature", scenario.gpus[1])
    path = tmp_path / "scenario"
    scenario.write(path)
    environ = {**scenario.environment(path), "PATH": "/usr/bin"}
    states = ["ok", "hanging" if hangs else "ok"]
    argv = [sys.executable, "-c", PROGRAM, str(CALL_S if hangs else PATIENT_S), states[1]]
    result = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == [str(states), f"{not hangs} True"], result.stderr
    assert result.returncode == 0
