"""GPU readings on one thread, which is replaced when a call about a device hangs.

A driver answers one call at a time, so a second thread would not help. A faulty GPU can block a call for ever, and a
blocked thread cannot be stopped. That device is not read again until the call returns. Other devices continue, and no
caller waits longer than it asked to.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from exporter.contract.clock import Clock
from exporter.gpus.device_state_reader import NOW, DeviceTracker, Part
from exporter.gpus.late_calls import DriverCall, LateCalls
from exporter.gpus.records import (
    DriverState,
    GpuDriver,
    GpuDriverReplaced,
    GpuEvent,
    GpuReader,
    GpuReading,
    GpuUnavailable,
)
from exporter.machine.thread_name import name_thread

CALL_S = 2.0  # longest time for one part of one device
OPEN_S = 30.0  # longest time to list devices: without persistence mode, each is initialized then
SETTLED_S = 60.0  # after this uptime a replaced driver is reopened quickly, as if it had never failed
EVENT_WAIT_S = 0.5  # wait of the event thread in the driver, which bounds the time to close
MOST_EVENTS = 1000
ABSENT_S = 60.0  # interval of attempts if there is no driver
LEAST_RETRY_S, MOST_RETRY_S = 5.0, 300.0  # delay before a failing driver is reopened; doubled each time
EARLY = 0.8  # share of its interval after which a reading is due, because callers have their own clocks
# Most useful reasons first: the one to report if no reader opens.
TELLING: tuple[DriverState, ...] = ("version_mismatch", "no_permission", "failing", "no_driver", "no_library")

log = logging.getLogger("gpujob.gpus")


class GpuHost:
    """The GPUs of this machine. Any thread may call the public methods."""

    def __init__(
        self,
        makes: Sequence[Callable[[], GpuReader]],
        clock: Clock,
        *,
        fast_s: float = 1.0,
        medium_s: float = 5.0,
        slow_s: float = 60.0,
        call_s: float = CALL_S,
        open_s: float = OPEN_S,
    ) -> None:
        """Set up the host; no GPU is read yet.

        ``makes``: one function per vendor; the first reader that opens is used. ``fast_s``, ``medium_s``, ``slow_s``:
        shortest interval of activity, of processes, and of condition and GPU list.
        """
        self._makes = tuple(makes)
        self._clock = clock
        self._fast_s, self._medium_s, self._slow_s = fast_s, medium_s, slow_s
        self._call_s, self._open_s = call_s, max(open_s, call_s)
        self._longest_s: dict[Part, float] = {
            "activity": call_s + 3 * fast_s,
            "processes": 5 * medium_s,
            "condition": 5 * slow_s,
        }  # maximum age of published values
        self._changed = threading.Condition()
        self._thread: DriverCall | None = None
        self._late = LateCalls()
        self._reader: GpuReader | None = None
        self._driver: GpuDriver | None = None
        self._state: DriverState = "ok"
        self._words: str | None = None
        self._told = False  # whether the driver has listed its GPUs, or failed to
        self._seats: dict[str, DeviceTracker] = {}
        self._events: deque[GpuEvent] = deque(maxlen=MOST_EVENTS)
        self._absent: Mapping[str, str] = {}
        self._replaced = False
        self._asked = 0  # number of the last requested round
        self._served = 0
        self._round_due = NOW
        self._open_due = NOW
        self._retry_s = LEAST_RETRY_S
        self._opened = NOW
        self._gpus_due = NOW
        self._closing = threading.Event()
        self._listening: threading.Thread | None = None
        self._closed = threading.Event()
        self._let_go = False

    def look(self, wait_s: float) -> GpuReading:
        """Return the state of all GPUs, reading parts that are due for at most ``wait_s``.

        Parts not read in time keep earlier values. Values that are too old are left out.
        """
        end = time.monotonic() + wait_s
        with self._changed:
            self._ask()
            asked = self._asked
            while self._served < asked and not self._closing.is_set():
                now = time.monotonic()
                patience = self._watch(now)
                if self._served >= asked or now >= end or self._thread is None:
                    break
                self._changed.wait(min(end - now, patience))
            self._watch(time.monotonic())
            return self._state_now()

    def close(self, wait_s: float) -> bool:
        """Stop reading and close the library; return whether that succeeded within ``wait_s``.

        A hanging call prevents that, and the process may exit anyway. Otherwise no driver call is in progress at exit.
        """
        with self._changed:
            self._closing.set()
            if self._thread is None:
                self._let_go = self._reader is None
                self._closed.set()
            self._changed.notify_all()
            thread, now = self._thread, time.monotonic()
            if self._late.askers or (thread and thread.part is not None and now - thread.began > EVENT_WAIT_S):
                return False  # never wait for a hanging call
        return self._closed.wait(wait_s) and self._let_go

    def events(self) -> tuple[GpuEvent, ...]:
        """Errors reported by the driver so far; see ``GpuReading``."""
        with self._changed:
            return tuple(self._events)

    # -- callers -----------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Request a round if one is due."""
        now = self._clock.monotonic()
        if self._closing.is_set():
            return
        if self._asked == self._served and now >= self._round_due and (not self._is_shut() or now >= self._open_due):
            self._asked += 1
            self._round_due = now + EARLY * self._fast_s
        if self._asked > self._served and self._thread is None and not self._late.full:
            self._start()
        self._changed.notify_all()

    def _is_shut(self) -> bool:
        """Whether the driver must be opened or reopened."""
        return self._reader is None or self._replaced

    def _start(self) -> None:
        self._thread = DriverCall()
        threading.Thread(target=self._run, args=(self._thread,), name="gpus", daemon=True).start()

    def _watch(self, now: float) -> float:
        """Abandon the thread if its call takes too long; return the seconds until the next check."""
        for late in self._late.blame(now, self._call_s):
            self._blame(late)
        thread = self._thread
        if thread is None or thread.part is None:
            return self._call_s / 4
        if thread.part == "open":
            return self._call_s  # nothing else can be read without a driver
        left = thread.began + (self._call_s if self._seats else self._open_s) - now
        if left > 0:
            return left
        self._thread = None
        if thread.seat is not None:
            thread.seat.given_up += 1
        elif self._seats:
            self._gpus_due = self._clock.monotonic() + self._slow_s  # known GPUs first
        self._late.add(thread)
        if thread.blamed:
            self._blame(thread)
        else:
            log.warning("the driver hangs: %d calls have not come back", len(self._late.askers))
        if not self._late.full:
            self._start()
        return self._call_s / 4

    def _blame(self, late: DriverCall) -> None:
        """Record that the object of this call hangs."""
        if late.seat is not None and late.part is not None:
            late.seat.hang(late.part, self._clock.monotonic())
        else:
            log.warning("the driver hangs: no list of GPUs")

    def _state_now(self) -> GpuReading:
        state, words = self._state, self._words
        thread = self._thread
        if self._late.driver_hangs:
            state, words = "hanging", f"{len(self._late.askers)} calls have not come back"
        elif thread is not None and (thread.part == "open" or (thread.part == "gpus" and not self._seats)):
            late = time.monotonic() - thread.began > self._call_s
            state, words = ("hanging", f"{thread.part} has not come back") if late else (state, words)
        now = self._clock.monotonic()
        return GpuReading(
            time=self._clock.time(),
            state=state,
            words=words,
            driver=self._driver,
            gpus=tuple(seat.shown(now, self._longest_s) for seat in self._seats.values()),
            events=tuple(self._events),
            absent=self._absent,
            replaced=self._replaced,
            ready=self._told,
            tells_events=self._reader is not None and not self._replaced and self._reader.tells_events(),
        )

    # -- reading thread ----------------------------------------------------------------------------

    def _run(self, me: DriverCall) -> None:
        while True:
            with self._changed:
                if me.late:
                    self._came_back(me)
                    return
                me.part = me.seat = None
                while not self._closing.is_set() and not self._next(me):
                    if self._served < self._asked:
                        self._served = self._asked
                        self._changed.notify_all()
                    self._changed.wait()
                if self._closing.is_set():
                    break
                me.began = time.monotonic()
            self._do(me)
        self._let_go = self._leave()
        self._closed.set()

    def _next(self, me: DriverCall) -> bool:
        """Choose the next read; return False if none is due in this round."""
        if self._served == self._asked:
            return False
        now, me.reader = self._clock.monotonic(), self._reader
        if self._is_shut():
            me.part = "open" if now >= self._open_due else None
            return me.part is not None
        if now >= self._gpus_due:
            me.part = "gpus"
            return True
        able = [seat for seat in self._seats.values() if not seat.given_up and now >= seat.not_before]
        if any(seat.hung for seat in able):
            able.sort(key=lambda seat: seat.times_hung(now))  # those that hung most come last
        for seat in able:
            if seat.round < self._asked:
                me.part, me.seat, seat.round = "activity", seat, self._asked
                return True
        well = [seat for seat in able if seat.state == "ok"]
        for seat in well:
            if now >= seat.due["processes"]:
                me.part, me.seat = "processes", seat
                return True
        for seat in well:
            if now >= seat.due["condition"]:
                me.part, me.seat = "condition", seat
                return True
        return False

    def _do(self, me: DriverCall) -> None:
        """Read and record the result, unless the thread has been abandoned meanwhile."""
        part, seat, reader = me.part, me.seat, me.reader
        told: object
        absent: Mapping[str, str] | None = None
        try:
            if part == "open" or reader is None:
                told = self._open()
            elif seat is None:
                told = reader.gpus()
            elif part == "activity":
                told = reader.activity(seat.gpu)
            elif part == "processes":
                told = reader.processes(seat.gpu)
            else:
                told = reader.condition(seat.gpu)
                absent = reader.absent()
        except Exception as error:  # noqa: BLE001 - whatever fails in a reader costs this part of this device alone
            told = error
        with self._changed:
            if me.late:
                return
            if self._late.askers:
                self._late.note_answer(time.monotonic())
            if part == "open":
                self._note_open(told)
                return
            if self._is_shut():
                return  # the driver was replaced meanwhile
            self._absent = self._absent if absent is None else absent
            if isinstance(told, GpuDriverReplaced):
                self._replace(told)
            elif seat is not None and part is not None:
                self._note(seat, part, told)
            else:
                self._note_gpus(told)
                self._changed.notify_all()  # hanging calls are now detected sooner

    def _open(self) -> tuple[GpuReader, GpuDriver]:
        """Return the first reader that opens; raises GpuUnavailable with the most useful reason.

        A reader that is already open is closed first, because it belongs to an earlier driver.
        """
        if not self._leave():
            raise GpuUnavailable(self._state, self._words or "")
        with self._changed:
            self._reader = self._listening = None
        failures: list[GpuUnavailable] = []
        for make in self._makes:
            reader = make()
            try:
                return reader, reader.open()
            except GpuUnavailable as failure:
                failures.append(failure)
            except Exception as error:  # noqa: BLE001 - a library that cannot even say what it lacks
                failures.append(GpuUnavailable("failing", f"{type(error).__name__}: {error}"))
        if not failures:
            raise GpuUnavailable("no_library", "nothing reads GPUs here")
        raise min(failures, key=lambda failure: TELLING.index(failure.state) if failure.state in TELLING else 0)

    def _note_open(self, told: object) -> None:
        now = self._clock.monotonic()
        if isinstance(told, tuple):
            self._reader, self._driver = told
            self._replaced, self._opened, self._gpus_due = False, now, NOW
            return
        self._told = True
        state: DriverState = told.state if isinstance(told, GpuUnavailable) else "failing"
        if state != self._state:
            ordinary = state in ("no_library", "no_driver")
            log.log(logging.INFO if ordinary else logging.WARNING, "no GPU can be read: %s: %s", state, told)
        self._state, self._words = state, str(told)
        if state in ("no_library", "no_driver"):
            self._open_due = now + ABSENT_S
        else:
            self._wait_to_open(now)

    def _wait_to_open(self, now: float) -> None:
        self._open_due = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)

    def _note_gpus(self, told: object) -> None:
        now = self._clock.monotonic()
        self._told = True
        if not isinstance(told, tuple):
            if not self._seats or self._state != "ok":
                self._state, self._words = "failing", f"{type(told).__name__}: {told}"
            self._gpus_due = now + self._medium_s
            return
        self._state, self._words = "ok", None
        self._gpus_due = now + self._slow_s
        known, self._seats = self._seats, {}
        for gpu in told:
            seat = self._seats[gpu.uuid] = known.get(gpu.uuid) or DeviceTracker(gpu)
            seat.gpu = gpu
        if self._listening is None and self._reader is not None:
            self._listening = threading.Thread(
                target=self._listen, args=(self._reader,), name="gpu-events", daemon=True
            )
            self._listening.start()

    def _note(self, seat: DeviceTracker, part: Part, told: object) -> None:
        now = self._clock.monotonic()
        if part in seat.due:
            interval_s = self._medium_s if part == "processes" else self._slow_s
            places = list(self._seats.values())
            if part not in seat.read and seat in places:
                # After the first time, spread the GPUs over the interval, so that all rounds have equal work.
                interval_s *= (places.index(seat) + 1) / len(places)
            seat.due[part] = now + interval_s
        seat.note(part, told, now, self._clock.time(), self._medium_s)

    def _replace(self, error: GpuDriverReplaced) -> None:
        """Reopen the driver after a delay that doubles each time."""
        if self._state != "version_mismatch":
            log.warning("the driver was replaced: %s", error)
        now = self._clock.monotonic()
        self._replaced, self._state, self._words = True, "version_mismatch", str(error)
        if now - self._opened > SETTLED_S:
            self._retry_s = LEAST_RETRY_S
        self._wait_to_open(now)
        for seat in self._seats.values():
            seat.read.clear()
            seat.due.update(dict.fromkeys(seat.due, NOW))
        self._changed.notify_all()

    def _came_back(self, me: DriverCall) -> None:
        """Allow reads of the device again after a pause; the thread ends."""
        self._late.askers.remove(me)
        self._late.note_answer(time.monotonic())
        if me.seat is not None:
            me.seat.given_up -= 1
            if me.blamed:
                me.seat.come_back(self._clock.monotonic(), self._medium_s, self._slow_s)

    # -- events and closing ------------------------------------------------------------------------

    def _listen(self, reader: GpuReader) -> None:
        name_thread("gpu-events")
        failing = False
        while not self._closing.is_set() and reader is self._reader and not self._replaced:
            began = time.monotonic()
            events: tuple[GpuEvent, ...] = ()
            try:
                events, failing = reader.wait_event(EVENT_WAIT_S), False
            except GpuDriverReplaced as error:
                with self._changed:
                    if reader is self._reader and not self._replaced:
                        self._replace(error)
            except Exception as error:  # noqa: BLE001 - without events the rest goes on
                if not failing:
                    log.warning("events of GPUs: %s: %s", type(error).__name__, error)
                failing = True
            if events:
                with self._changed:
                    self._events.extend(events)
            elif time.monotonic() - began < EVENT_WAIT_S / 2:
                self._closing.wait(EVENT_WAIT_S)  # for a reader without events, or one that fails immediately

    def _leave(self) -> bool:
        """Close the reader if no other thread is in it; return whether it is closed."""
        if self._reader is None:
            return True
        if self._late.askers:
            return False
        if self._listening is not None:
            self._listening.join(4 * EVENT_WAIT_S)
            if self._listening.is_alive():
                return False
        try:
            self._reader.close()
        except Exception as error:  # noqa: BLE001 - the end goes on
            log.warning("GPUs: %s: %s", type(error).__name__, error)
        return True
