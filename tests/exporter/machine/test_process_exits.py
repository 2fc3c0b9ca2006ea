"""Exits of real processes, reported when they happen."""

import asyncio
import errno
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.contract.process_identity import read_start_ticks
from exporter.machine import process_exits
from exporter.machine.process_exits import ProcessEnd, ProcessExitWatch
from exporter.machine.procfs import CLOCK_TICKS
from tests.exporter.conftest import Start
from tests.exporter.machine.test_procfs import another_user, spare_descriptors, start_with_pid
from tests.realstack.waiting import readable
from tests.support.exporter import FakeClock, open_files, read_line, send_line, until


@pytest.fixture
def watch() -> Iterator[ProcessExitWatch]:
    """A watch whose clock always shows 1700000000."""
    exit_watch = ProcessExitWatch(FakeClock())
    yield exit_watch
    exit_watch.close()


def wait_for_ends(watch: ProcessExitWatch, count: int, timeout: float = 20.0) -> list[ProcessEnd]:
    """Wait for this number of ends, dispatching whenever the watch is readable."""
    ends: list[ProcessEnd] = []
    deadline = time.monotonic() + timeout
    while len(ends) < count:
        assert readable(watch, deadline - time.monotonic()), f"{len(ends)} of {count} ends"
        ends.extend(watch.dispatch())
    return ends


def reports_status_after_reaping() -> bool:
    """Whether this kernel reports the exit status of a reaped process (Linux 6.15)."""
    process = subprocess.Popen(["true"])
    fd = os.pidfd_open(process.pid)
    process.wait()
    try:
        return process_exits._exit_status(fd) is not None
    finally:
        os.close(fd)


needs_exit_info = pytest.mark.skipif(not reports_status_after_reaping(), reason="needs Linux 6.15")


def start_shell(start: Start, program: str) -> "tuple[subprocess.Popen[str], int | None]":
    """A shell that runs this program after a line of input, and its start time."""
    process = start("sh", "-c", f"read line; {program}")
    return process, read_start_ticks(process.pid)


@pytest.mark.parametrize(
    ("program", "code"),
    [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", -9), ("kill -15 $$", -15), ("exec false", 1)],
)
def test_the_status_of_an_unreaped_child_comes_from_proc(
    watch: ProcessExitWatch, start: Start, program: str, code: int
) -> None:
    process, ticks = start_shell(start, program)
    assert watch.watch(process.pid, ticks)
    assert watch.dispatch() == ()
    assert watch.find_end(process.pid, ticks) is None
    assert watch.status(process.pid, ticks) is None
    send_line(process)
    (end_event,) = wait_for_ends(watch, 1)
    assert end_event == ProcessEnd(process.pid, ticks, 1_700_000_000.0, end_event.status, "zombie")
    assert end_event.status is not None
    assert os.waitstatus_to_exitcode(end_event.status) == code == process.wait()
    assert watch.find_end(process.pid, ticks) == end_event
    assert watch.status(process.pid, ticks) == end_event.status
    assert watch.dispatch() == ()


@needs_exit_info
@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$"])
def test_the_status_of_a_reaped_process_comes_from_its_pidfd(watch: ProcessExitWatch, start: Start, end: str) -> None:
    """The parent is another program, which reaps the process before the watch reads the status."""
    parent = start("sh", "-c", f"exec 3<&0; sh -c 'read line; {end}' <&3 & echo $!; wait $!; echo $?; read line")
    pid = int(read_line(parent))
    ticks = read_start_ticks(pid)
    assert watch.watch(pid, ticks)
    send_line(parent)
    reported = int(read_line(parent))
    until(lambda: not Path(f"/proc/{pid}").exists(), "its reaping")
    (end_event,) = wait_for_ends(watch, 1)
    assert end_event.source == "pidfd"
    assert end_event.status is not None
    code = os.waitstatus_to_exitcode(end_event.status)
    assert reported == (code if code >= 0 else 128 - code)


@needs_exit_info
def test_a_hidden_status_is_known_after_the_parent_has_reaped_the_process(start: Start) -> None:
    watch = ProcessExitWatch(FakeClock())
    process, ticks = start_shell(start, "exit 3")
    with another_user():
        watch.watch(process.pid, ticks)
        send_line(process)
        (end_event,) = wait_for_ends(watch, 1)
        assert (end_event.status, end_event.source) == (None, None)
        assert watch.status(process.pid, ticks) is None
        assert watch.dispatch() == (), "its end has been reported"
    process.wait()
    with another_user():
        assert watch.status(process.pid, ticks) == 3 << 8
        assert watch.find_end(process.pid, ticks) == ProcessEnd(process.pid, ticks, 1_700_000_000.0, 3 << 8, "pidfd")
    watch.close()


@needs_exit_info
def test_the_status_of_a_process_reaped_during_the_read_is_known(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start_shell(start, "exit 3")
    watch.watch(process.pid, None)

    def read_after_reaping(pid: int, start_ticks: int | None, proc: str) -> int | None:
        process.wait()
        return None

    monkeypatch.setattr(process_exits, "read_zombie_status", read_after_reaping)
    send_line(process)
    (end_event,) = wait_for_ends(watch, 1)
    assert (end_event.status, end_event.source) == (3 << 8, "pidfd")


@needs_exit_info
def test_the_status_can_be_read_before_the_event_loop_dispatches(watch: ProcessExitWatch, start: Start) -> None:
    process, ticks = start_shell(start, "exit 3")
    watch.watch(process.pid, ticks)
    send_line(process)
    process.wait()
    assert watch.find_end(process.pid, ticks) is None
    assert watch.status(process.pid, ticks) == 3 << 8


def test_an_already_ended_process_is_reported_immediately(watch: ProcessExitWatch, start: Start) -> None:
    process, ticks = start_shell(start, "exit 3")
    send_line(process)
    until(lambda: watch.status(process.pid, ticks) is not None, "its end")
    assert watch.watch(process.pid, None), "it has not been reaped"
    (end_event,) = wait_for_ends(watch, 1)
    assert (end_event.pid, end_event.start_ticks, end_event.status) == (process.pid, None, 3 << 8)
    process.wait()
    assert watch.status(process.pid, ticks) is None, "that key was not watched"
    assert watch.status(process.pid, None) == 3 << 8


def test_a_missing_process_is_refused(watch: ProcessExitWatch, start: Start) -> None:
    process, ticks = start_shell(start, "exit 3")
    with pytest.raises(ProcessLookupError, match=f"^pid {process.pid} now belongs to another process$"):
        watch.watch(process.pid, (ticks or 0) - 1)
    send_line(process)
    process.wait()
    before = os.listdir("/proc/self/fd")
    for pid in (process.pid, 0, -1):
        with pytest.raises(ProcessLookupError, match=f"^process {pid} does not exist$"):
            watch.watch(pid, ticks)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_process_that_ends_while_it_is_being_watched_is_refused(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, ticks = start_shell(start, "exit 3")
    real = read_start_ticks

    def read_after_reaping(pid: int, proc: str) -> int | None:
        send_line(process)
        process.wait()
        return real(pid, proc)

    monkeypatch.setattr(process_exits, "read_start_ticks", read_after_reaping)
    with pytest.raises(ProcessLookupError, match=f"^process {process.pid} does not exist$"):
        watch.watch(process.pid, ticks)


def test_a_recycled_pid_is_never_watched(watch: ProcessExitWatch, start: Start) -> None:
    process, ticks = start_shell(start, "exit 3")
    pid = process.pid
    assert watch.watch(pid, ticks)
    send_line(process)
    process.wait()
    time.sleep(2 / CLOCK_TICKS)
    other = start_with_pid(pid)
    try:
        assert [end_event.start_ticks for end_event in wait_for_ends(watch, 1)] == [ticks]
        with pytest.raises(ProcessLookupError, match=f"^pid {pid} now belongs to another process$"):
            ProcessExitWatch(FakeClock()).watch(pid, ticks)
        new = read_start_ticks(pid)
        assert watch.watch(pid, new)
        assert watch.find_end(pid, new) is None
        other.kill()
        (end_event,) = wait_for_ends(watch, 1)
        assert (end_event.start_ticks, end_event.status) == (new, signal.SIGKILL)
    finally:
        other.kill()
        other.wait()


def test_a_thousand_quick_exits_are_each_reported_once(watch: ProcessExitWatch) -> None:
    """Killed in random order by another process than their parent, which reaps some of them. 200 live at a time."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, lambda *_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"  # it may come before a child waits for it
        "for line in sys.stdin:\n"
        "    pids = []\n"
        "    for _ in range(int(line)):\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            signal.sigwait([signal.SIGUSR1])\n"
        "            os._exit(os.getpid() % 200)\n"
        "        pids.append(pid)\n"
        "    print(*pids, flush=True)\n"
        "    for pid in pids[::2]: os.waitpid(pid, 0)\n"
    )
    rng = random.Random(5)
    parent = subprocess.Popen(
        [sys.executable, "-I", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    reported: list[ProcessEnd] = []
    watch.on_exit = reported.append
    expected: dict[tuple[int, int | None], set[int | None]] = {}
    try:
        for _ in range(5):
            parent.stdin.write("200\n")
            parent.stdin.flush()
            pids = [int(word) for word in read_line(parent).split()]
            ticks = {pid: read_start_ticks(pid) for pid in pids}
            assert all(watch.watch(pid, ticks[pid]) for pid in pids)
            before = len(reported)
            for pid in rng.sample(pids, len(pids)):
                number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
                os.kill(pid, number)
                status = pid % 200 << 8 if number == signal.SIGUSR1 else int(number)
                expected[pid, ticks[pid]] = {status, None} if not reports_status_after_reaping() else {status}
                if rng.random() < 0.05:
                    watch.dispatch()
            wait_for_ends(watch, 200 - (len(reported) - before))
        assert len(reported) == 1000
        assert {(end_event.pid, end_event.start_ticks) for end_event in reported} == set(expected)
        wrong = [
            end_event
            for end_event in reported
            if end_event.status not in expected[end_event.pid, end_event.start_ticks]
        ]
        assert wrong == []
    finally:
        parent.kill()
        parent.wait()


def test_a_loop_dispatches_while_other_threads_watch_and_drop_processes() -> None:
    """Descriptors that are closed and immediately reused are never mistaken for each other."""
    watch = ProcessExitWatch(FakeClock())
    reported: list[ProcessEnd] = []
    problems: list[str] = []
    watch.on_exit = reported.append

    def work() -> None:
        for _ in range(150):
            process = subprocess.Popen(["sleep", "60"])
            ticks = read_start_ticks(process.pid)
            watch.watch(process.pid, ticks)
            if watch.find_end(process.pid, ticks) is not None:
                problems.append("reported a running process")
            process.kill()
            process.wait()
            until(lambda key=(process.pid, ticks): watch.find_end(*key), "its end")
            end_event = watch.find_end(process.pid, ticks)
            if end_event is not None and end_event.status not in (signal.SIGKILL, None):
                problems.append(f"status {end_event.status}")
            watch.drop(process.pid, ticks)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(watch.fileno(), watch.dispatch)
        await asyncio.gather(*(loop.run_in_executor(None, work) for _ in range(2)))
        loop.remove_reader(watch.fileno())

    asyncio.run(run())
    watch.close()
    assert problems == []
    assert len(reported) == 300


def test_a_dropped_process_is_not_reported(watch: ProcessExitWatch, start: Start) -> None:
    process, ticks = start_shell(start, "exit 3")
    before = len(os.listdir("/proc/self/fd"))
    assert watch.watch(process.pid, ticks)
    assert watch.watch(process.pid, ticks), "watching twice changes nothing"
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.drop(process.pid, ticks)
    watch.drop(process.pid, ticks)
    assert len(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()
    assert not readable(watch, 0.05)
    assert watch.dispatch() == ()
    assert watch.find_end(process.pid, ticks) is None


def test_descriptors_are_closed_when_the_status_is_known(start: Start) -> None:
    watch = ProcessExitWatch(FakeClock())
    before = len(open_files("anon_inode:[pidfd]"))
    process, _ = start_shell(start, "exit 3")
    watch.watch(process.pid, None)
    assert len(open_files("anon_inode:[pidfd]")) == before + 1
    process.kill()
    wait_for_ends(watch, 1)
    assert len(open_files("anon_inode:[pidfd]")) == before
    assert watch.status(process.pid, None) == signal.SIGKILL
    watch.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENFILE])
def test_watch_returns_false_without_pidfds(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    process, ticks = start_shell(start, "exit 3")
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not watch.watch(process.pid, ticks)
    assert watch.find_end(process.pid, ticks) is None
    send_line(process)
    until(lambda: watch.status(process.pid, ticks) == 3 << 8, "its exit status in /proc")


def test_watch_returns_false_without_free_descriptors(watch: ProcessExitWatch, start: Start) -> None:
    process, ticks = start_shell(start, "exit 3")
    for spare, watched in ((0, False), (1, False), (2, True)):
        with spare_descriptors(spare):
            assert watch.watch(process.pid, ticks) is watched
        assert len(open_files("anon_inode:[pidfd]")) == watched


def test_an_interpreter_without_pidfd_open_can_watch_too(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process, ticks = start_shell(start, "exit 3")
    assert watch.watch(process.pid, ticks)
    send_line(process)
    (end_event,) = wait_for_ends(watch, 1)
    assert end_event.status == 3 << 8
    process.wait()
    with pytest.raises(ProcessLookupError):
        watch.watch(process.pid, None)


@pytest.mark.parametrize("reason", [errno.ENOTTY, errno.ESRCH])
def test_an_older_kernel_reports_the_end_without_the_status(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(fd: int, request: int, argument: bytearray) -> int:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("fcntl.ioctl", refuse)
    process, ticks = start_shell(start, "exit 3")
    watch.watch(process.pid, ticks)
    send_line(process)
    process.wait()
    (end_event,) = wait_for_ends(watch, 1)
    assert (end_event.status, end_event.source) == (None, None)


def test_ends_of_threads_are_not_reported(watch: ProcessExitWatch, start: Start) -> None:
    program = (
        "import os, sys, threading\n"
        "thread = threading.Thread(target=sys.stdin.readline)\n"
        "thread.start()\n"
        "print(thread.native_id, flush=True)\n"
        "thread.join()\n"
        "print('joined', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    thread = int(read_line(process))
    with pytest.raises(ProcessLookupError):
        watch.watch(thread, None)
    watch.watch(process.pid, None)
    send_line(process)
    read_line(process)
    assert watch.dispatch() == ()


def test_an_exec_in_another_thread_is_not_an_end(watch: ProcessExitWatch, start: Start) -> None:
    program = (
        "import os, sys, threading\n"
        "sys.stdin.readline()\n"
        "threading.Thread(target=os.execvp, args=('sh', ['sh', '-c', 'echo replaced; read line; exit 4'])).start()\n"
        "threading.Event().wait()\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    ticks = read_start_ticks(process.pid)
    watch.watch(process.pid, ticks)
    send_line(process)
    assert read_line(process) == "replaced\n"
    assert watch.dispatch() == ()
    send_line(process)
    (end_event,) = wait_for_ends(watch, 1)
    assert end_event.status == 4 << 8


def test_one_epoll_call_returns_all_ends(watch: ProcessExitWatch, start: Start) -> None:
    processes = [start_shell(start, "exit 3")[0] for _ in range(20)]
    for process in processes:
        watch.watch(process.pid, None)
    calls = []

    class CountingEpoll:
        """An epoll object that records its polls."""

        def __init__(self, real: select.epoll) -> None:
            self._real = real

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            calls.append(timeout)
            return self._real.poll(timeout)

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    for process in processes:
        process.kill()
        process.wait()
    time.sleep(0.05)
    watch._epoll = CountingEpoll(watch._epoll)  # type: ignore[assignment]
    assert len(watch.dispatch()) == 20
    assert calls == [0]


def test_many_threads_may_dispatch(watch: ProcessExitWatch) -> None:
    processes = [subprocess.Popen(["true"]) for _ in range(50)]
    for process in processes:
        watch.watch(process.pid, None)
    ends: list[ProcessEnd] = []
    deadline = time.monotonic() + 20

    def work() -> None:
        while len(ends) < 50 and time.monotonic() < deadline:
            ends.extend(watch.dispatch())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(end_event.pid for end_event in ends) == sorted(process.pid for process in processes)
    assert {process.wait() for process in processes} == {0}
