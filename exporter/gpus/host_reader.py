"""GPU readings on one thread, which is replaced when a call about a device hangs.

A driver answers one call at a time, so a second thread would not help. A faulty GPU can block a call for ever, and a
blocked thread cannot be stopped. That device is not read again until the call returns. Other devices continue, and no
caller waits longer than it asked to.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from exporter.contract.clock import Clock
from exporter.gpus.device_state_reader import ALWAYS_DUE, DeviceTracker, Part
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
from exporter.machine.own_process import name_thread

CALL_TIMEOUT_S = 2.0  # longest time for one part of one device
OPEN_TIMEOUT_S = 30.0  # longest time to open and list: without persistence mode, each device is initialized then
SETTLED_S = 60.0  # after this uptime a replaced driver is reopened quickly, as if it had never failed
EVENT_WAIT_S = 0.5  # wait of the event thread in the driver, which bounds the time to close
MOST_EVENTS = 1000
NO_DRIVER_RETRY_S = 60.0  # interval of attempts if there is no driver
LEAST_RETRY_S, MOST_RETRY_S = 5.0, 300.0  # delay before a failing driver is reopened; doubled each time
EARLY = 0.8  # share of its interval after which a reading is due, because callers have their own clocks
PERIODIC_PARTS: tuple[Part, ...] = ("processes", "condition")  # the more urgent first
# Most useful reasons first: the one to report if no reader opens.
STATES_BY_USEFULNESS: tuple[DriverState, ...] = (
    "version_mismatch",
    "no_permission",
    "failing",
    "no_driver",
    "no_library",
)

log = logging.getLogger("gpujob.gpus")


class GpuHost:
    """The GPUs of this machine. Any thread may call the public methods."""

    def __init__(
        self,
        factories: Sequence[Callable[[], GpuReader]],
        clock: Clock,
        *,
        fast_s: float = 1.0,
        medium_s: float = 5.0,
        slow_s: float = 60.0,
        call_timeout_s: float = CALL_TIMEOUT_S,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """Set up the host; no GPU is read yet.

        ``factories``: one function per vendor; the first reader that opens is used. ``fast_s``, ``medium_s``,
        ``slow_s``: shortest interval of activity, of processes, and of condition and GPU list.
        """
        self._factories = tuple(factories)
        self._clock = clock
        self._fast_s, self._medium_s, self._slow_s = fast_s, medium_s, slow_s
        self._call_timeout_s, self._open_timeout_s = call_timeout_s, max(open_timeout_s, call_timeout_s)
        self._max_age_s: dict[Part, float] = {
            "activity": call_timeout_s + 3 * fast_s,
            "processes": 5 * medium_s,
            "condition": 5 * slow_s,
        }  # maximum age of published values
        self._changed = threading.Condition()
        self._thread: DriverCall | None = None
        self._late_calls = LateCalls()
        self._reader: GpuReader | None = None
        self._driver: GpuDriver | None = None
        self._state: DriverState = "ok"
        self._message: str | None = None
        self._is_ready = False  # whether the driver has listed its GPUs, or failed to
        self._devices: dict[str, DeviceTracker] = {}
        self._events: deque[GpuEvent] = deque(maxlen=MOST_EVENTS)
        self._unsupported_calls: Mapping[str, str] = {}
        self._is_driver_replaced = False
        self._requested_round = 0  # number of the last requested round
        self._completed_round = 0
        self._round_due = ALWAYS_DUE
        self._open_due = ALWAYS_DUE
        self._retry_s = LEAST_RETRY_S
        self._opened_at = ALWAYS_DUE
        self._gpus_due = ALWAYS_DUE
        self._closing = threading.Event()
        self._event_thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._is_released = False

    def poll(self, wait_s: float) -> GpuReading:
        """Return the state of all GPUs, reading parts that are due for at most ``wait_s``.

        Parts not read in time keep earlier values. Values that are too old are left out.
        """
        end = time.monotonic() + wait_s
        with self._changed:
            self._request_round()
            asked = self._requested_round
            while self._completed_round < asked and not self._closing.is_set():
                now = time.monotonic()
                patience = self._abandon_if_late(now)
                if self._completed_round >= asked or now >= end or self._thread is None:
                    break
                self._changed.wait(min(end - now, patience))
            self._abandon_if_late(time.monotonic())
            return self._current_reading()

    def close(self, wait_s: float) -> bool:
        """Stop reading and close the library; return whether that succeeded within ``wait_s``.

        A hanging call prevents that, and the process may exit anyway. Otherwise no driver call is in progress at exit.
        """
        with self._changed:
            self._closing.set()
            if self._thread is None:
                self._is_released = self._reader is None
                self._closed.set()
            self._changed.notify_all()
            thread, now = self._thread, time.monotonic()
            if self._late_calls.calls or (
                thread and thread.part is not None and now - thread.started_at > EVENT_WAIT_S
            ):
                return False  # never wait for a hanging call
        return self._closed.wait(wait_s) and self._is_released

    def events(self) -> tuple[GpuEvent, ...]:
        """Errors reported by the driver so far; see ``GpuReading``."""
        with self._changed:
            return tuple(self._events)

    # -- callers -----------------------------------------------------------------------------------

    def _request_round(self) -> None:
        """Request a round if one is due."""
        now = self._clock.monotonic()
        if self._closing.is_set():
            return
        if (
            self._requested_round == self._completed_round
            and now >= self._round_due
            and (not self._needs_open() or now >= self._open_due)
        ):
            self._requested_round += 1
            self._round_due = now + EARLY * self._fast_s
        if self._requested_round > self._completed_round and self._thread is None and not self._late_calls.is_full:
            self._start()
        self._changed.notify_all()

    def _needs_open(self) -> bool:
        """Whether the driver must be opened or reopened."""
        return self._reader is None or self._is_driver_replaced

    def _start(self) -> None:
        """Start the thread. Raises RuntimeError if that is not possible now; the next round tries again."""
        call = DriverCall()
        threading.Thread(target=self._run, args=(call,), name="gpus", daemon=True).start()
        self._thread = call

    def _abandon_if_late(self, now: float) -> float:
        """Abandon the thread if its call takes too long; return the seconds until the next check."""
        for late in self._late_calls.find_at_fault(now, self._call_timeout_s):
            self._record_hang(late)
        thread = self._thread
        if thread is None or thread.part is None:
            return self._call_timeout_s / 4
        if thread.part == "open":
            return self._call_timeout_s  # nothing else can be read without a driver
        left = thread.time_left(now, self._call_timeout_s if self._devices else self._open_timeout_s)
        if left > 0:
            return left
        self._thread = None
        if thread.device is not None:
            thread.device.abandoned_calls += 1
        elif self._devices:
            self._gpus_due = self._clock.monotonic() + self._slow_s  # known GPUs first
        self._late_calls.add(thread)
        if thread.is_at_fault:
            self._record_hang(thread)
        else:
            log.warning("the driver hangs: %d calls have not returned", len(self._late_calls.calls))
        if not self._late_calls.is_full:
            self._start()
        return self._call_timeout_s / 4

    def _record_hang(self, call: DriverCall) -> None:
        """Record that the object of this call hangs."""
        if call.device is not None and call.part is not None:
            call.device.record_hang(call.part, self._clock.monotonic())
        else:
            log.warning("the driver hangs: it does not list its GPUs")

    def _current_reading(self) -> GpuReading:
        state, message = self._state, self._message
        thread = self._thread
        if self._late_calls.is_driver_hanging:
            state, message = "hanging", f"{len(self._late_calls.calls)} calls have not returned"
        elif thread is not None and (thread.part == "open" or (thread.part == "gpus" and not self._devices)):
            is_late = time.monotonic() - thread.started_at > self._open_timeout_s
            state, message = ("hanging", f"{thread.part} has not returned") if is_late else (state, message)
        now = self._clock.monotonic()
        return GpuReading(
            time=self._clock.time(),
            state=state,
            message=message,
            driver=self._driver,
            gpus=tuple(tracker.published_state(now, self._max_age_s) for tracker in self._devices.values()),
            events=tuple(self._events),
            unsupported_calls=self._unsupported_calls,
            is_driver_replaced=self._is_driver_replaced,
            is_ready=self._is_ready,
            reports_events=self._reader is not None and not self._is_driver_replaced and self._reader.reports_events(),
        )

    # -- reading thread ----------------------------------------------------------------------------

    def _run(self, call: DriverCall) -> None:
        while True:
            with self._changed:
                if call.is_abandoned:
                    self._handle_return(call)
                    return
                call.part = call.device = None
                while not self._closing.is_set() and not self._choose_next(call):
                    if self._completed_round < self._requested_round:
                        self._completed_round = self._requested_round
                        self._changed.notify_all()
                    self._changed.wait()
                if self._closing.is_set():
                    break
                call.started_at = time.monotonic()
            self._perform(call)
        self._is_released = self._close_reader()
        self._closed.set()

    def _choose_next(self, call: DriverCall) -> bool:
        """Choose the next read; return False if none is due in this round."""
        if self._completed_round == self._requested_round:
            return False
        now, call.reader = self._clock.monotonic(), self._reader
        if self._needs_open():
            call.part = "open" if now >= self._open_due else None
            return call.part is not None
        if now >= self._gpus_due:
            call.part = "gpus"
            return True
        able = [
            tracker for tracker in self._devices.values() if not tracker.abandoned_calls and now >= tracker.not_before
        ]
        if any(tracker.hang_times for tracker in able):
            able.sort(key=lambda tracker: tracker.recent_hangs(now))  # those that hung most come last
        for tracker in able:
            if tracker.last_round < self._requested_round:
                call.part, call.device, tracker.last_round = "activity", tracker, self._requested_round
                return True
        well = [tracker for tracker in able if tracker.state == "ok"]
        for part in PERIODIC_PARTS:
            for tracker in well:
                if now >= tracker.due[part]:
                    call.part, call.device = part, tracker
                    return True
        return False

    def _perform(self, call: DriverCall) -> None:
        """Read and record the result, unless the thread has been abandoned meanwhile."""
        part, device, reader = call.part, call.device, call.reader
        result: object
        absent: Mapping[str, str] | None = None
        try:
            if part == "open" or reader is None:
                result = self._open()
            elif device is None:
                result = reader.gpus()
            elif part == "activity":
                result = reader.activity(device.gpu)
            elif part == "processes":
                result = reader.processes(device.gpu)
            else:
                result = reader.condition(device.gpu)
                absent = reader.unsupported_calls()
        except Exception as error:  # noqa: BLE001 - whatever fails in a reader costs this part of this device alone
            result = error
        with self._changed:
            if call.is_abandoned:
                return
            if self._late_calls.calls:
                self._late_calls.record_answer(time.monotonic())
            if part == "open":
                self._record_open(result)
                return
            if self._needs_open():
                return  # the driver was replaced meanwhile
            self._unsupported_calls = self._unsupported_calls if absent is None else absent
            if isinstance(result, GpuDriverReplaced):
                self._record_driver_replaced(result)
            elif device is not None and part is not None:
                self._record(device, part, result)
            else:
                self._record_gpus(result)
                self._changed.notify_all()  # hanging calls are now detected sooner

    def _open(self) -> tuple[GpuReader, GpuDriver]:
        """Return the first reader that opens; raises GpuUnavailable with the most useful reason.

        A reader that is already open is closed first, because it belongs to an earlier driver.
        """
        if not self._close_reader():
            raise GpuUnavailable(self._state, self._message or "")
        with self._changed:
            self._reader = self._event_thread = None
        failures: list[GpuUnavailable] = []
        for make in self._factories:
            reader = make()
            try:
                return reader, reader.open()
            except GpuUnavailable as failure:
                failures.append(failure)
            except Exception as error:  # noqa: BLE001 - a library may fail in any way
                failures.append(GpuUnavailable("failing", f"{type(error).__name__}: {error}"))
        if not failures:
            raise GpuUnavailable("no_library", "no GPU library is supported here")
        raise min(
            failures,
            key=lambda failure: (
                STATES_BY_USEFULNESS.index(failure.state) if failure.state in STATES_BY_USEFULNESS else 0
            ),
        )

    def _record_open(self, result: object) -> None:
        now = self._clock.monotonic()
        if isinstance(result, tuple):
            self._reader, self._driver = result
            self._is_driver_replaced, self._opened_at, self._gpus_due = False, now, ALWAYS_DUE
            return
        self._is_ready = True
        state: DriverState = result.state if isinstance(result, GpuUnavailable) else "failing"
        if state != self._state:
            ordinary = state in ("no_library", "no_driver")
            log.log(logging.INFO if ordinary else logging.WARNING, "no GPU can be read: %s: %s", state, result)
        self._state, self._message = state, str(result)
        if state in ("no_library", "no_driver"):
            self._open_due = now + NO_DRIVER_RETRY_S
        else:
            self._schedule_open(now)

    def _schedule_open(self, now: float) -> None:
        self._open_due = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)

    def _record_gpus(self, result: object) -> None:
        now = self._clock.monotonic()
        self._is_ready = True
        if not isinstance(result, tuple):
            if not self._devices or self._state != "ok":
                self._state, self._message = "failing", f"{type(result).__name__}: {result}"
            self._gpus_due = now + self._medium_s
            return
        self._state, self._message = "ok", None
        self._gpus_due = now + self._slow_s
        known, self._devices = self._devices, {}
        for gpu in result:
            tracker = self._devices[gpu.uuid] = known.get(gpu.uuid) or DeviceTracker(gpu)
            tracker.gpu = gpu
        if self._event_thread is None and self._reader is not None:
            listener = threading.Thread(target=self._listen, args=(self._reader,), name="gpu-events", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started now: the next list tries again
                listener.start()
                self._event_thread = listener

    def _record(self, device: DeviceTracker, part: Part, result: object) -> None:
        now = self._clock.monotonic()
        if part in device.due:
            interval_s = self._medium_s if part == "processes" else self._slow_s
            places = list(self._devices.values())
            if part not in device.read_times and device in places:
                # After the first time, spread the GPUs over the interval, so that all rounds have equal work.
                interval_s *= (places.index(device) + 1) / len(places)
            device.due[part] = now + interval_s
        device.record(part, result, now, self._clock.time(), self._medium_s)

    def _record_driver_replaced(self, error: GpuDriverReplaced) -> None:
        """Reopen the driver after a delay that doubles each time."""
        if self._state != "version_mismatch":
            log.warning("the driver was replaced: %s", error)
        now = self._clock.monotonic()
        self._is_driver_replaced, self._state, self._message = True, "version_mismatch", str(error)
        if now - self._opened_at > SETTLED_S:
            self._retry_s = LEAST_RETRY_S
        self._schedule_open(now)
        for tracker in self._devices.values():
            tracker.read_times.clear()
            tracker.due.update(dict.fromkeys(tracker.due, ALWAYS_DUE))
        self._changed.notify_all()

    def _handle_return(self, call: DriverCall) -> None:
        """Allow reads of the device again after a pause; the thread ends."""
        self._late_calls.calls.remove(call)
        self._late_calls.record_answer(time.monotonic())
        if call.device is not None:
            call.device.abandoned_calls -= 1
            if call.is_at_fault:
                call.device.resume_reads(self._clock.monotonic(), self._medium_s, self._slow_s)

    # -- events and closing ------------------------------------------------------------------------

    def _listen(self, reader: GpuReader) -> None:
        name_thread("gpu-events")
        failing = False
        while not self._closing.is_set() and reader is self._reader and not self._is_driver_replaced:
            began = time.monotonic()
            events: tuple[GpuEvent, ...] = ()
            try:
                events, failing = reader.wait_event(EVENT_WAIT_S), False
            except GpuDriverReplaced as error:
                with self._changed:
                    if reader is self._reader and not self._is_driver_replaced:
                        self._record_driver_replaced(error)
            except Exception as error:  # noqa: BLE001 - without events the rest goes on
                if not failing:
                    log.warning("events of GPUs: %s: %s", type(error).__name__, error)
                failing = True
            if events:
                with self._changed:
                    self._events.extend(events)
            elif time.monotonic() - began < EVENT_WAIT_S / 2:
                self._closing.wait(EVENT_WAIT_S)  # for a reader without events, or one that fails immediately

    def _close_reader(self) -> bool:
        """Close the reader if no other thread is in it; return whether it is closed."""
        if self._reader is None:
            return True
        if self._late_calls.calls:
            return False
        if self._event_thread is not None:
            self._event_thread.join(4 * EVENT_WAIT_S)
            if self._event_thread.is_alive():
                return False
        try:
            self._reader.close()
        except Exception as error:  # noqa: BLE001 - the end goes on
            log.warning("GPUs: %s: %s", type(error).__name__, error)
        return True
