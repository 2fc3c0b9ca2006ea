"""One thread for all GPUs, its turns, and what happens when a call does not come back."""

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
from tests.support.exporter import SOON_S, FakeClock, until

CALL_S = 0.4  # how long a call may take in tests of calls that hang,
PATIENT_S = 60.0  # and in all others, where a thread that comes to nothing for a while is no such call


class Fake:
    """A reader in plain Python: what fails, hangs or is told is set by part, or by part and GPU."""

    vendor = "acme"

    def __init__(self, count: int = 3) -> None:
        self.listed: list[Gpu] = [Gpu(f"GPU-{i}", str(i), self.vendor) for i in range(count)]
        self.failing: dict[Any, Exception] = {}
        self.hanging: dict[Any, threading.Event] = {}
        self.told: list[GpuEvent] = []
        self.calls: Counter[Any] = Counter()
        self.threads: set[int] = set()
        self.inside = 0
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
                self.inside += 1
                self.hanging[key].wait(20)
                self.inside -= 1
            if key in self.failing:
                raise self.failing[key]

    def hang(self, key: Any) -> threading.Event:
        """Make calls not come back before this is set."""
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
        told, self.told = tuple(self.told), []
        return told

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
    """A host over readers, and the clock that says what is due."""

    def __init__(self, *readers: Fake, **options: Any) -> None:
        self.readers = readers or (Fake(),)
        self.clock = FakeClock()
        self.host = GpuHost(
            [functools.partial(_itself, reader) for reader in self.readers],
            self.clock,
            **{"call_s": PATIENT_S, **options},
        )

    @property
    def reader(self) -> Fake:
        return self.readers[0]

    def look(self, later: float = 1.0, wait_s: float = PATIENT_S) -> GpuReading:
        """A look, some seconds after the last one."""
        self.clock.advance(later)
        return self.host.poll(wait_s)

    def release(self, *gates: threading.Event, stay: int = 1) -> None:
        """Have calls come back, and wait until no more threads are left than those that stay."""
        self.reader.hanging.clear()
        for gate in gates:
            gate.set()
        until(lambda: len(askers()) == stay, "the end of those who were given up")


def askers() -> list[threading.Thread]:
    """Threads that ask for GPUs, or hang in that."""
    return [thread for thread in threading.enumerate() if thread.name == "gpus"]


Start = Callable[..., Machine]


@pytest.fixture(autouse=True)
def quick_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reader, "EVENT_WAIT_S", 0.02)


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes hosts; at the end nothing hangs, and all are closed."""
    made: list[Machine] = []

    def begin(*readers: Fake, **options: Any) -> Machine:
        made.append(Machine(*readers, **options))
        return made[-1]

    yield begin
    for machine in made:
        for reader in machine.readers:
            for gate in reader.hanging.values():
                gate.set()
            reader.hanging.clear()
        machine.host.close(2.0)


def energies(look: GpuReading) -> list[float | None]:
    """How often the activity of each GPU was read, as the fake tells it."""
    return [None if gpu.activity is None else gpu.activity.energy_j for gpu in look.gpus]


# -- looks, and their tiers ----------------------------------------------------------------------


def test_the_first_look_has_all(start: Start) -> None:
    machine = start()
    look = machine.look()
    assert (look.state, look.message, look.is_driver_replaced, look.time) == ("ok", None, False, machine.clock.now)
    assert look.driver == GpuDriver("acme", "1.2", "12.8")
    assert look.unsupported_calls == {"fan": "has none"}
    assert [gpu.gpu.index for gpu in look.gpus] == ["0", "1", "2"]
    for gpu in look.gpus:
        assert (gpu.state, gpu.message) == ("ok", None)
        assert gpu.activity == GpuActivity(energy_j=1.0)
        assert gpu.processes == (GpuProcess(101),)
        assert gpu.condition == GpuCondition(pcie_replays=1)
        assert gpu.processes_time == gpu.condition_time == machine.clock.now


def test_one_thread_asks_and_it_is_not_ours(start: Start) -> None:
    machine = start()
    for _ in range(3):
        machine.look()
    assert len(machine.reader.threads) == 1
    assert threading.get_ident() not in machine.reader.threads


def test_looks_in_between_are_served_from_the_last(start: Start) -> None:
    machine = start()
    assert energies(machine.look()) == energies(machine.look(0.5)) == [1, 1, 1]
    assert energies(machine.look(0.5)) == [2, 2, 2]
    assert energies(machine.look(0.9)) == [3, 3, 3]  # another clock ticks a little faster


def test_nothing_is_asked_unless_somebody_looks(start: Start) -> None:
    machine = start()
    machine.look()
    before = machine.reader.calls.copy()
    machine.clock.advance(1000)
    time.sleep(0.05)
    assert machine.reader.calls == before


def test_each_tier_has_its_interval_and_gpus_take_turns(start: Start) -> None:
    machine = start(Fake(8), fast_s=1.0, medium_s=5.0, slow_s=60.0)
    machine.look()
    longest = 0
    for _ in range(600):
        before = machine.reader.calls.copy()
        machine.look()
        asked = machine.reader.calls - before
        longest = max(longest, asked["processes"] + asked["condition"] + asked["gpus"])
    for i in range(8):
        assert machine.reader.calls["activity", str(i)] == 601
        assert 120 <= machine.reader.calls["processes", str(i)] <= 122
        assert 10 <= machine.reader.calls["condition", str(i)] <= 12
    assert machine.reader.calls["gpus"] == 11
    assert longest <= 4


def test_rare_looks_have_all_that_is_due(start: Start) -> None:
    machine = start(Fake(8))
    machine.look()
    for number in range(2, 12):
        look = machine.look(60)
        assert energies(look) == [number] * 8
        assert [gpu.processes for gpu in look.gpus] == [(GpuProcess(100 + number),)] * 8
    assert all(machine.reader.calls["condition", str(i)] == 11 for i in range(8))


def test_gpus_that_come_and_go_are_followed(start: Start) -> None:
    machine = start(Fake(2))
    machine.look()
    machine.reader.listed = [machine.reader.listed[1], Gpu("GPU-9", "9", "acme")]
    assert [gpu.gpu.index for gpu in machine.look(60).gpus] == ["1", "9"]


def test_several_can_look_at_once(start: Start) -> None:
    machine = start()
    gate = machine.reader.hang(("activity", "1"))
    found: list[GpuReading] = []
    threads = [threading.Thread(target=lambda: found.append(machine.host.poll(PATIENT_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: machine.reader.inside, "a call")
    gate.set()
    for thread in threads:
        thread.join()
    assert [energies(look) for look in found] == [[1, 1, 1]] * 4


# -- what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "retry_s"),
    [("no_library", 60), ("no_driver", 60), ("no_permission", 5), ("version_mismatch", 5), ("failing", 5)],
)
def test_a_driver_that_is_not_there_is_asked_for_again_after_a_while(state: Any, retry_s: float, start: Start) -> None:
    machine = start(call_s=CALL_S)
    machine.reader.failing["open"] = GpuUnavailable(state, "it is so")
    look = machine.look()
    assert (look.state, look.message, look.gpus, look.driver, look.is_ready) == (state, "it is so", (), None, True)
    time.sleep(1.2 * CALL_S)
    assert machine.look(retry_s - 1).state == state
    assert machine.reader.calls["open"] == 1
    machine.look(1)
    assert machine.reader.calls["open"] == 2
    machine.reader.failing.clear()
    assert machine.look(2 * retry_s).state == "ok"


def test_a_driver_that_fails_is_tried_ever_more_rarely(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = GpuUnavailable("failing", "again")
    for _ in range(3600):
        machine.look()
    assert 13 <= machine.reader.calls["open"] <= 20


def test_the_first_reader_that_opens_is_used(start: Start) -> None:
    broken, good, spare = Fake(), Fake(1), Fake(2)
    broken.failing["open"] = GpuUnavailable("no_library", "none")
    machine = start(broken, good, spare)
    assert len(machine.look().gpus) == 1
    assert spare.calls["open"] == 0


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (("no_library", "no_driver"), "no_driver"),
        (("no_driver", "no_permission"), "no_permission"),
        (("failing", "no_library"), "failing"),
        (("failing", "version_mismatch"), "version_mismatch"),
    ],
)
def test_of_several_readers_the_most_telling_reason_is_told(states: Any, told: str, start: Start) -> None:
    readers = [Fake() for _ in states]
    for reader, state in zip(readers, states, strict=True):
        reader.failing["open"] = GpuUnavailable(state, state)
    assert start(*readers).look().state == told


def test_an_unheard_of_failure_is_told(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = ValueError("odd")
    look = machine.look()
    assert (look.state, look.message) == ("failing", "ValueError: odd")


def test_a_list_that_fails_is_told_and_read_again(start: Start) -> None:
    machine = start()
    machine.reader.failing["gpus"] = ValueError("odd")
    look = machine.look()
    assert (look.state, look.message, look.gpus) == ("failing", "ValueError: odd", ())
    machine.reader.failing.clear()
    assert energies(machine.look(5)) == [1, 1, 1]


def test_no_reader_at_all_is_no_library() -> None:
    host = GpuHost([], FakeClock())
    assert host.poll(PATIENT_S).state == "no_library"
    assert host.close(PATIENT_S)


@pytest.mark.parametrize("state", ["lost", "reset_required"])
def test_a_gpu_that_fails_tells_nothing_but_that_and_is_asked_less(state: Any, start: Start) -> None:
    machine = start()
    machine.look()
    machine.reader.failing["activity", "1"] = GpuFailed(state, "it is so")
    look = machine.look()
    sick = look.gpus[1]
    assert (sick.state, sick.message) == (state, "it is so")
    assert (sick.activity, sick.processes, sick.condition) == (None, None, None)
    assert energies(look) == [2, None, 2]
    for _ in range(10):
        machine.look()
    assert machine.reader.calls["activity", "1"] == 4
    machine.reader.failing.clear()
    for _ in range(5):
        look = machine.look()
    assert look.gpus[1].state == "ok"
    assert look.gpus[1].processes is not None


def test_a_part_that_fails_costs_itself(start: Start) -> None:
    machine = start()
    machine.reader.failing["processes", "1"] = ValueError("odd")
    look = machine.look()
    assert [gpu.processes is None for gpu in look.gpus] == [False, True, False]
    assert energies(look) == [1, 1, 1]
    assert [gpu.state for gpu in look.gpus] == ["ok"] * 3
    machine.reader.failing.clear()
    machine.reader.failing["activity"] = ValueError("odd")
    assert energies(machine.look()) == [None, None, None]
    machine.reader.failing.clear()
    assert energies(machine.look()) == [3, 3, 3]


@pytest.mark.parametrize("part", ["gpus", "activity", "processes", "condition"])
def test_a_replaced_driver_is_told_and_only_opened_ever_more_rarely(part: str, start: Start) -> None:
    machine = start()
    machine.look()
    machine.reader.failing[part] = GpuDriverReplaced("another one")
    machine.reader.failing["open"] = GpuUnavailable("version_mismatch", "not with this library")
    look = machine.look(61)
    assert (look.state, look.message, look.is_driver_replaced, look.reports_events) == (
        "version_mismatch",
        "another one",
        True,
        False,
    )
    assert energies(look) == [None, None, None]
    before = machine.reader.calls.copy()
    for _ in range(3600):
        look = machine.look()
    assert (look.state, look.message, look.is_driver_replaced) == ("version_mismatch", "not with this library", True)
    asked = machine.reader.calls - before
    assert asked.keys() == {"open", "close"}
    assert asked["close"] == 1
    assert 13 <= asked["open"] <= 20


def test_a_replaced_driver_that_opens_anew_is_read_again_with_its_events(start: Start) -> None:
    machine = start()
    machine.look()
    machine.reader.failing["activity"] = GpuDriverReplaced("another one")
    machine.look()
    machine.reader.failing.clear()
    assert machine.look(4).is_driver_replaced
    assert machine.reader.closed_by is None
    look = machine.look(2)
    assert (look.state, look.message, look.is_driver_replaced) == ("ok", None, False)
    assert energies(look) == [3, 2, 2]
    assert all(gpu.processes and gpu.condition for gpu in look.gpus)
    assert machine.reader.closed_by in machine.reader.threads
    machine.reader.told = [GpuEvent("GPU-1", 79, 5.0)]
    until(lambda: machine.look(0.0).events, "the event")
    assert len([it for it in threading.enumerate() if it.name == "gpu-events"]) == 1


@pytest.mark.parametrize(("well_s", "least", "most"), [(0, 12, 20), (100, 34, 40)])
def test_a_driver_that_opens_and_is_replaced_time_and_again_is_no_busy_loop(
    well_s: float, least: int, most: int, start: Start
) -> None:
    machine = start()
    well_until = 0.0
    for _ in range(3600):
        if machine.look().is_driver_replaced and well_s:
            well_until = machine.clock.now + well_s
            machine.reader.failing.clear()
        elif machine.clock.now >= well_until:
            machine.reader.failing["activity"] = GpuDriverReplaced("another one")
    assert least <= machine.reader.calls["open"] <= most


def test_a_driver_that_was_replaced_while_a_call_hangs_is_left_as_it_is(start: Start) -> None:
    machine = start(call_s=CALL_S)
    machine.look()
    gate = machine.reader.hang(("activity", "1"))
    machine.look()
    machine.reader.failing["activity"] = GpuDriverReplaced("another one")
    for _ in range(20):
        look = machine.look()
    assert (look.state, look.message, look.is_driver_replaced) == ("version_mismatch", "another one", True)
    assert machine.reader.closed_by is None
    assert machine.reader.calls["open"] == 1
    machine.reader.failing.clear()
    machine.release(gate)
    until(lambda: machine.look(100).state == "ok", "that it is read again")


# -- what hangs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["activity", "processes", "condition"])
def test_a_device_that_hangs_costs_itself_alone(part: str, start: Start) -> None:
    machine = start(call_s=CALL_S)
    machine.look()
    gate = machine.reader.hang((part, "1"))
    began = time.monotonic()
    look = machine.look(61)  # all parts are due
    assert CALL_S <= time.monotonic() - began < SOON_S
    assert (look.state, [gpu.state for gpu in look.gpus]) == ("ok", ["ok", "hanging", "ok"])
    assert energies(look) == [2, None, 2]
    assert part in str(look.gpus[1].message)
    for number in range(3, 9):
        assert energies(machine.look()) == [number, None, number]
    assert machine.reader.calls[part, "1"] == 2
    machine.release(gate)
    machine.look()
    assert machine.look(10).gpus[1].state == "ok"


def test_a_call_that_hangs_in_the_first_look_is_not_given_the_time_of_the_list(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = start(call_s=CALL_S)
    listing, gate = machine.reader.hang("gpus"), machine.reader.hang(("activity", "1"))
    waits: list[float] = []
    watch = machine.host._abandon_if_late

    def noted(now: float) -> float:
        waits.append(watch(now))
        return waits[-1]

    monkeypatch.setattr(machine.host, "_abandon_if_late", noted)
    with ThreadPoolExecutor(1) as pool:
        look = pool.submit(machine.look)
        until(lambda: waits and waits[-1] > CALL_S, "that the list is waited for")
        listing.set()
        states = [gpu.state for gpu in look.result().gpus]
    assert states == ["ok", "hanging", "ok"]
    machine.release(gate)


def test_a_look_does_not_wait_longer_than_it_says(start: Start) -> None:
    machine = start(Fake(2))
    machine.look()
    machine.reader.hang(("activity", "1"))
    began = time.monotonic()
    machine.look(wait_s=0.03)
    assert time.monotonic() - began < SOON_S
    until(lambda: machine.reader.inside, "the call")
    look = machine.host.poll(0.0)
    assert ([gpu.state for gpu in look.gpus], energies(look)) == (["ok", "ok"], [2, 1])


def test_what_is_too_old_is_left_out(start: Start) -> None:
    machine = start(call_s=5.0)
    machine.look()
    machine.reader.hang("activity")
    look = machine.look(wait_s=0.01)
    assert energies(look) == [1, 1, 1]
    machine.clock.advance(10)
    look = machine.host.poll(0.01)
    assert energies(look) == [None, None, None]
    assert look.gpus[2].processes is not None
    machine.clock.advance(100)
    assert machine.host.poll(0.01).gpus[2].processes is None


def test_a_device_that_hung_comes_last_and_is_asked_less(start: Start) -> None:
    machine = start(Fake(3), call_s=CALL_S)
    gate = machine.reader.hang(("activity", "0"))
    machine.look()
    machine.release(gate)
    for _ in range(3):
        assert machine.look().gpus[0].state == "hanging"
    assert machine.look(5).gpus[0].state == "ok"
    machine.reader.hang(("activity", "0"))
    machine.look(wait_s=0.0)
    until(lambda: machine.reader.inside, "the call")
    assert energies(machine.host.poll(0.0))[1:] == [6, 6]  # they were asked before it


def test_hiccups_hours_apart_do_not_add_up(start: Start) -> None:
    machine = start(call_s=CALL_S, fast_s=1.0, medium_s=5.0)
    machine.look()
    for _ in range(13):
        machine.clock.advance(1000)
        gate = machine.reader.hang(("activity", "1"))
        assert machine.look().gpus[1].state == "hanging"
        machine.release(gate)
        assert machine.look(4).gpus[1].state == "hanging"
        assert machine.look(1.1).gpus[1].state == "ok"


def test_a_device_that_hangs_again_as_it_is_tried_is_tried_ever_more_rarely(start: Start) -> None:
    machine = start(call_s=CALL_S, fast_s=1.0, medium_s=5.0, slow_s=60.0)
    machine.look()
    for pause_s in (5, 10, 15):
        gate = machine.reader.hang(("activity", "1"))
        machine.look(0.9)
        until(lambda: machine.reader.inside, "a try")
        until(lambda: machine.look(0.0).gpus[1].state == "hanging", "the hang")
        machine.release(gate)
        asked = machine.reader.calls["activity", "1"]
        machine.look(pause_s - 0.5)
        assert machine.reader.calls["activity", "1"] == asked
    assert machine.look().gpus[1].state == "ok"


def test_that_a_device_hung_counts_for_an_hour() -> None:
    seat = DeviceTracker(Gpu("GPU-0", "0", "acme"))
    for moment in (0.0, 2000.0, 3000.0):
        seat.record_hang("activity", moment)
    assert [seat.recent_hangs(moment) for moment in (3001, 3601, 5601, 6601)] == [3, 2, 1, 0]
    seat.record_hang("activity", 9000.0)
    assert len(seat.hang_times) == 1


def test_a_second_device_that_hangs_directly_after_the_first_is_the_driver_that_hangs(start: Start) -> None:
    machine = start(Fake(5), call_s=CALL_S)
    machine.look()
    gate = machine.reader.hang("activity")
    look = until(lambda: (it := machine.look(1.0, 0.05)).state == "hanging" and it, "the driver to hang")
    assert look.message == "2 calls have not come back"
    assert [gpu.state for gpu in look.gpus] == ["hanging", "ok", "ok", "ok", "ok"]
    look = until(lambda: (it := machine.look(1.0, 0.05)).message == "3 calls have not come back" and it, "the third")
    assert [gpu.state for gpu in look.gpus] == ["hanging", "ok", "ok", "ok", "ok"]
    machine.release(gate, stay=0)
    machine.look()
    look = machine.look()
    assert [gpu.state for gpu in look.gpus] == ["hanging", "ok", "ok", "ok", "ok"]
    assert None not in energies(look)[1:]
    assert machine.look(5).gpus[0].state == "ok"


def test_two_devices_that_hang_are_told_from_the_driver_once_another_answers(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    machine = start(Fake(5), call_s=CALL_S)
    machine.look()
    for index in "01":
        machine.reader.hang(("activity", index))
    look = machine.look()
    assert (look.state, energies(look)[2:]) == ("ok", [2, 2, 2])
    look = until(lambda: (it := machine.look(0.0)).gpus[1].state == "hanging" and it, "the second")
    assert [gpu.state for gpu in look.gpus] == ["hanging", "hanging", "ok", "ok", "ok"]
    for number in (3, 4, 5):
        look = machine.look()
        assert (look.state, energies(look)[2:]) == ("ok", [number] * 3)
    told = [record.getMessage() for record in caplog.records if "hangs: no activity" in record.getMessage()]
    assert len(told) == 2


def test_after_three_nothing_is_asked_until_one_comes_back(start: Start) -> None:
    machine = start(Fake(5), call_s=CALL_S)
    machine.look()
    gates = [machine.reader.hang(("activity", str(i))) for i in range(4)]
    look = machine.look()
    assert (look.state, look.message) == ("hanging", "3 calls have not come back")
    assert [gpu.state for gpu in look.gpus] == ["hanging"] + ["ok"] * 4
    before = machine.reader.calls.copy()
    began = time.monotonic()
    for _ in range(10):
        look = machine.look()
    assert time.monotonic() - began < SOON_S
    assert machine.reader.calls == before
    assert energies(look) == [None] * 5
    machine.release(gates[0], stay=2)
    look = machine.look()
    assert look.state == "ok"
    assert energies(look)[3:] == [2, 2]
    gates[1].set()
    gates[2].set()


def test_a_driver_that_hangs_as_it_opens_is_told(start: Start) -> None:
    machine = start(call_s=CALL_S, open_s=CALL_S)
    gate = machine.reader.hang("open")
    look = machine.look(wait_s=0.02)
    assert (look.state, look.is_ready) == ("ok", False)
    until(lambda: machine.look(0.0, 0.02).state == "hanging", "the state")
    look = machine.look(100, 0.02)
    assert (look.state, look.message, look.gpus) == ("hanging", "open has not come back", ())
    assert machine.reader.calls["open"] == 1
    gate.set()
    look = machine.look()
    assert (energies(look), look.is_ready) == ([1, 1, 1], True)


def test_a_list_that_hangs_costs_no_gpu_that_is_known(start: Start) -> None:
    machine = start(call_s=CALL_S, open_s=CALL_S)
    machine.look()
    gate = machine.reader.hang("gpus")
    look = machine.look(60)
    assert look.state == "ok"
    assert energies(look) == [2, 2, 2]
    machine.release(gate)
    assert energies(machine.look()) == [3, 3, 3]
    assert machine.reader.calls["gpus"] == 2
    machine.look(60)
    assert machine.reader.calls["gpus"] == 3


# -- events --------------------------------------------------------------------------------------


def test_events_are_kept_in_order(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = start()
    machine.look()
    told = [GpuEvent("GPU-1", 79, 5.0), GpuEvent("GPU-0", 31, 6.0)]
    machine.reader.told = told
    until(lambda: len(machine.look(0.0).events) == 2, "the events")
    machine.reader.told = [GpuEvent("GPU-0", i, 7.0) for i in range(host_reader.MOST_EVENTS)]
    until(lambda: machine.look(0.0).events[0].xid == 0, "the events")
    assert len(machine.look(0.0).events) == host_reader.MOST_EVENTS


def test_events_that_fail_cost_nothing_else(start: Start) -> None:
    machine = start()
    machine.reader.failing["wait_event"] = ValueError("odd")
    assert energies(machine.look()) == [1, 1, 1]
    time.sleep(0.05)
    machine.reader.failing.clear()
    machine.reader.told = [GpuEvent("GPU-1", 79, 5.0)]
    until(lambda: machine.look(0.0).events, "the event")


def test_whether_errors_are_told_is_what_the_reader_says(start: Start) -> None:
    machine = start()
    assert machine.look().reports_events
    machine.reader.events = False
    assert not machine.look().reports_events


def test_without_a_driver_nobody_tells_of_errors(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = GpuUnavailable("no_library", "none")
    assert not machine.look().reports_events


def test_a_reader_without_events_is_not_asked_all_the_time(start: Start) -> None:
    machine = start()
    began = time.monotonic()
    machine.look()
    until(lambda: machine.reader.waits >= 3, "waits")
    time.sleep(0.1)
    waits = machine.reader.waits
    assert waits <= 2 + (time.monotonic() - began) / host_reader.EVENT_WAIT_S


def test_an_event_thread_that_finds_the_driver_replaced_says_so(start: Start) -> None:
    machine = start()
    machine.reader.failing["wait_event"] = GpuDriverReplaced("another one")
    machine.look()
    until(lambda: machine.look(0.0).is_driver_replaced, "the news")


# -- the end -------------------------------------------------------------------------------------


def test_the_library_is_let_go_of_on_its_own_thread(start: Start) -> None:
    machine = start()
    machine.look()
    assert machine.host.close(PATIENT_S)
    assert machine.reader.closed_by in machine.reader.threads
    assert len(machine.reader.threads) == 1
    before = machine.reader.calls.copy()
    assert energies(machine.look()) == [1, 1, 1]
    assert machine.reader.calls == before
    assert machine.host.close(0.0)


def test_what_never_looked_closes_at_once() -> None:
    assert GpuHost([Fake], FakeClock()).close(0.0)


def test_a_driver_that_was_not_there_closes(start: Start) -> None:
    machine = start()
    machine.reader.failing["open"] = GpuUnavailable("no_library", "none")
    machine.look()
    assert machine.host.close(PATIENT_S)
    assert machine.reader.closed_by is None


@pytest.mark.parametrize("given_up", [False, True])
def test_the_end_is_in_time_while_a_call_hangs_and_nothing_is_closed(given_up: bool, start: Start) -> None:
    machine = start(call_s=CALL_S)
    machine.look()
    machine.reader.hang(("activity", "1"))
    machine.look(wait_s=PATIENT_S if given_up else 0.01)
    began = time.monotonic()
    assert not machine.host.close(0.1)
    assert time.monotonic() - began < SOON_S
    assert machine.reader.closed_by is None


def test_nothing_is_closed_while_somebody_waits_for_events_in_it(start: Start) -> None:
    machine = start()
    machine.reader.hang("wait_event")
    machine.look()
    until(lambda: machine.reader.waits, "a wait for events")
    assert not machine.host.close(1.0)
    assert machine.reader.closed_by is None


def test_the_end_waits_for_a_call_that_comes_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reader, "EVENT_WAIT_S", PATIENT_S)  # after which a call counts as one that hangs
    machine = start()
    machine.look()
    gate = machine.reader.hang(("activity", "1"))
    machine.look(wait_s=0.0)
    until(lambda: machine.reader.inside, "the call")
    threading.Timer(0.05, gate.set).start()
    assert machine.host.close(PATIENT_S)
    assert machine.reader.closed_by is not None
    assert machine.reader.calls["activity", "2"] == 1  # nothing more was asked


# -- with the driver's library -------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver of eight H200."""
    if compiler() is None:
        pytest.skip("needs a C compiler")
    made = FakeDriver(h200(), tmp_path, monkeypatch)
    yield made
    made.end()


def host_of(driver: FakeDriver, **options: Any) -> GpuHost:
    clock = SystemClock()
    return GpuHost([lambda: driver.make(clock)], clock, fast_s=0.02, **{"call_s": PATIENT_S, **options})


def utilization(look: GpuReading) -> list[float | None]:
    return [None if gpu.activity is None else gpu.activity.utilization_ratio for gpu in look.gpus]


def test_a_call_of_the_library_that_hangs_costs_one_gpu(driver: FakeDriver) -> None:
    host = host_of(driver, call_s=CALL_S)
    assert utilization(host.poll(PATIENT_S)) == [0.97] * 8
    sick = driver.scenario.gpus[3]
    for gpu in driver.scenario.gpus:
        gpu.utilization = 50
    driver.change(lambda scenario: scenario.hang("nvmlDeviceGetClockInfo", sick))
    look = until(lambda: (it := host.poll(PATIENT_S)).gpus[3].state == "hanging" and it, "the GPU to hang")
    time.sleep(0.03)
    assert utilization(host.poll(PATIENT_S)) == [0.5, 0.5, 0.5, None, 0.5, 0.5, 0.5, 0.5]
    before = driver.calls()["nvmlDeviceGetUtilizationRates"]
    assert not host.close(0.2)
    driver.scenario.release()
    driver.write()
    time.sleep(0.1)
    assert driver.calls()["nvmlDeviceGetUtilizationRates"] == before
    assert driver.calls()["nvmlShutdown"] == 0
    assert look.state == "ok"


def test_a_late_call_asks_no_more_and_the_gpu_comes_back(driver: FakeDriver) -> None:
    host = host_of(driver, call_s=CALL_S, medium_s=0.05)
    host.poll(PATIENT_S)
    sick = driver.scenario.gpus[3]
    driver.change(lambda scenario: scenario.hang("nvmlDeviceGetUtilizationRates", sick))
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


def test_a_gpu_that_hangs_as_it_is_met_is_named_and_the_others_are_met(driver: FakeDriver) -> None:
    driver.change(lambda scenario: scenario.hang("nvmlDeviceGetUUID", scenario.gpus[2]))
    host = host_of(driver, call_s=CALL_S, slow_s=0.1, open_s=CALL_S)
    look = host.poll(PATIENT_S)
    assert [gpu.state for gpu in look.gpus] == ["ok", "ok", "hanging", *["ok"] * 5]
    assert (look.gpus[2].gpu.uuid, look.gpus[2].gpu.index) == ("GPU-unknown-2", "2")
    assert utilization(look)[:4] == [0.97, 0.97, None, 0.97]
    driver.change(lambda scenario: scenario.release())
    until(lambda: utilization(host.poll(PATIENT_S)) == [0.97] * 8, "the GPU to be met")
    assert [gpu.gpu.uuid for gpu in host.poll(PATIENT_S).gpus] == [uuid_of(i) for i in range(8)]
    assert host.close(PATIENT_S)


def test_a_gpu_that_answers_nothing_at_all_costs_one_thread(driver: FakeDriver) -> None:
    host = host_of(driver, call_s=CALL_S, medium_s=0.02, slow_s=0.02)
    host.poll(PATIENT_S)
    host._gpus_due = math.inf  # a list that hangs, as this GPU is asked whether it is divided, has a thread of its own
    driver.change(lambda scenario: scenario.hang("*", scenario.gpus[3]))
    until(lambda: host.poll(PATIENT_S).gpus[3].state == "hanging", "the GPU to hang")
    end = time.monotonic() + 3 * CALL_S
    while time.monotonic() < end:
        look = host.poll(PATIENT_S)
        assert (look.state, [gpu.state for gpu in look.gpus].count("ok")) == ("ok", 7)
        assert utilization(look).count(0.97) == 7
        time.sleep(0.02)
    assert len(askers()) == 2


def test_a_driver_that_answers_nobody_while_one_call_hangs_is_hanging(driver: FakeDriver) -> None:
    host = host_of(driver, call_s=CALL_S)
    host.poll(PATIENT_S)
    driver.scenario.global_lock = True
    driver.change(lambda scenario: scenario.hang("nvmlDeviceGetUtilizationRates", scenario.gpus[0]))
    look = until(lambda: (it := host.poll(PATIENT_S)).state == "hanging" and it, "the driver to hang")
    assert [gpu.state for gpu in look.gpus] == ["hanging", *["ok"] * 7]
    began = time.monotonic()
    assert not host.close(0.5)
    assert time.monotonic() - began < SOON_S


def test_a_lost_gpu_and_its_xid_are_there_at_the_next_look(driver: FakeDriver) -> None:
    host = host_of(driver)
    host.poll(PATIENT_S)
    until(lambda: driver.calls()["nvmlDeviceRegisterEvents"] == 8, "the registration")
    sick = driver.scenario.gpus[5]
    sick.state = "lost"
    driver.change(lambda scenario: scenario.xid(79, sick))
    time.sleep(0.03)
    look = host.poll(PATIENT_S)
    assert (look.gpus[5].state, look.gpus[5].message, utilization(look)[5]) == ("lost", "GPU is lost", None)
    assert utilization(look).count(0.97) == 7
    (event,) = until(lambda: host.poll(0.1).events, "the Xid")
    assert (event.uuid, event.xid) == (uuid_of(5), 79)
    assert host.close(PATIENT_S)


def test_a_library_that_is_replaced_is_told(driver: FakeDriver) -> None:
    host = host_of(driver)
    host.poll(PATIENT_S)
    driver.change(lambda scenario: setattr(scenario, "broken", "LIB_RM_VERSION_MISMATCH"))
    look = until(lambda: (it := host.poll(PATIENT_S)).is_driver_replaced and it, "the news")
    assert (look.state, utilization(look)) == ("version_mismatch", [None] * 8)


def test_a_library_that_works_again_is_opened_anew_in_this_process(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_reader, "LEAST_RETRY_S", 0.1)
    host = host_of(driver)
    host.poll(PATIENT_S)
    driver.change(lambda scenario: setattr(scenario, "broken", "UNINITIALIZED"))
    until(lambda: host.poll(PATIENT_S).is_driver_replaced, "the news")
    driver.scenario.driver = "575.57.08"
    driver.change(lambda scenario: setattr(scenario, "broken", 0))
    look = until(lambda: (it := host.poll(PATIENT_S)).state == "ok" and it, "the driver")
    assert look.driver is not None
    assert (look.driver.version, look.is_driver_replaced) == ("575.57.08", False)
    until(lambda: utilization(host.poll(PATIENT_S)) == [0.97] * 8, "all GPUs")
    assert host.close(PATIENT_S)


def test_one_odd_code_is_no_replaced_driver(driver: FakeDriver) -> None:
    host = host_of(driver)
    host.poll(PATIENT_S)
    driver.change(lambda scenario: scenario.fail("nvmlDeviceGetUtilizationRates", "UNINITIALIZED", scenario.gpus[2]))
    look = until(lambda: (it := host.poll(PATIENT_S)) and utilization(it)[2] is None and it, "the failure")
    assert (look.state, look.is_driver_replaced, look.gpus[2].state) == ("ok", False, "ok")
    assert look.gpus[2].activity is not None
    assert look.gpus[2].activity.temperature_c is not None
    assert utilization(look).count(0.97) == 7
    assert host.close(PATIENT_S)


PROGRAM = """
import sys, time
from exporter.contract.clock import SystemClock
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.nvidia.reader import NvmlReader
host = GpuHost([NvmlReader], SystemClock(), call_s=float(sys.argv[1]))
look = host.look(0.5)
while [gpu.state for gpu in look.gpus][1:] != sys.argv[2:]:
    look = host.look(0.5)
print([gpu.state for gpu in look.gpus])
began = time.monotonic()
print(host.close(60.0), time.monotonic() - began < 30, flush=True)
"""


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_ends_in_time_while_a_call_hangs(hangs: bool, tmp_path: Path) -> None:
    scenario = h200(2)
    if hangs:
        scenario.hang("nvmlDeviceGetTemperature", scenario.gpus[1])
    path = tmp_path / "scenario"
    scenario.write(path)
    environ = {**scenario.environment(path), "PATH": "/usr/bin"}
    states = ["ok", "hanging" if hangs else "ok"]
    argv = [sys.executable, "-c", PROGRAM, str(CALL_S if hangs else PATIENT_S), states[1]]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [str(states), f"{not hangs} True"], done.stderr
    assert done.returncode == 0
