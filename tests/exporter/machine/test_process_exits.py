"""Ends of real processes, told at the moment they happen."""

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

from exporter.machine import process_exits
from exporter.machine.process_exits import ProcessEnd, ProcessExitWatch
from exporter.machine.procfs import CLOCK_TICKS, read_start_ticks
from tests.exporter.conftest import Start
from tests.exporter.machine.test_procfs import another_user, spare_descriptors, start_with_pid
from tests.realstack.waiting import readable
from tests.support.exporter import FakeClock, open_files, until


@pytest.fixture
def watch() -> Iterator[ProcessExitWatch]:
    """A watch that tells its ends at the moment 1700000000."""
    made = ProcessExitWatch(FakeClock())
    yield made
    made.close()


def wait_for_ends(watch: ProcessExitWatch, count: int, timeout: float = 20.0) -> list[ProcessEnd]:
    """So many ends, told one after the other as the watch becomes readable."""
    found: list[ProcessEnd] = []
    end = time.monotonic() + timeout
    while len(found) < count:
        assert readable(watch, end - time.monotonic()), f"{len(found)} of {count} ends"
        found.extend(watch.dispatch())
    return found


def tells_after_reaping() -> bool:
    """Whether this kernel tells the status of a process that was waited for (Linux 6.15)."""
    process = subprocess.Popen(["true"])
    fd = os.pidfd_open(process.pid)
    process.wait()
    try:
        return process_exits._exit_status(fd) is not None
    finally:
        os.close(fd)


needs_exit_info = pytest.mark.skipif(not tells_after_reaping(), reason="needs Linux 6.15")


def begin(start: Start, program: str) -> "subprocess.Popen[str]":
    """A shell that does this once its standard input is closed."""
    return start("sh", "-c", f"read line; {program}")


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize(
    ("program", "code"),
    [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", -9), ("kill -15 $$", -15), ("exec false", 1)],
)
def test_a_child_that_nobody_has_waited_for_tells_by_proc(
    watch: ProcessExitWatch, start: Start, program: str, code: int
) -> None:
    process = begin(start, program)
    ticks = read_start_ticks(process.pid)
    assert watch.watch(process.pid, ticks)
    assert watch.dispatch() == ()
    assert watch.find_end(process.pid, ticks) is None
    assert watch.status(process.pid, ticks) is None
    go_on(process)
    (ending,) = wait_for_ends(watch, 1)
    assert ending == ProcessEnd(process.pid, ticks, 1_700_000_000.0, ending.status, "zombie")
    assert ending.status is not None
    assert os.waitstatus_to_exitcode(ending.status) == code == process.wait()
    assert watch.find_end(process.pid, ticks) == ending
    assert watch.status(process.pid, ticks) == ending.status
    assert watch.dispatch() == ()


@needs_exit_info
@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$"])
def test_a_process_that_was_waited_for_tells_by_its_pidfd(watch: ProcessExitWatch, start: Start, end: str) -> None:
    """Its parent is another program, which has waited for it before we look."""
    parent = start("sh", "-c", f"exec 3<&0; sh -c 'read line; {end}' <&3 & echo $!; wait $!; echo $?; read line")
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    ticks = read_start_ticks(pid)
    assert watch.watch(pid, ticks)
    go_on(parent)
    told = int(parent.stdout.readline())
    until(lambda: not Path(f"/proc/{pid}").exists(), "its reaping")
    (ending,) = wait_for_ends(watch, 1)
    assert ending.source == "pidfd"
    assert ending.status is not None
    code = os.waitstatus_to_exitcode(ending.status)
    assert told == (code if code >= 0 else 128 - code)


@needs_exit_info
def test_a_status_that_was_hidden_at_the_end_is_told_once_the_parent_has_waited(start: Start) -> None:
    watch = ProcessExitWatch(FakeClock())
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    with another_user():
        watch.watch(process.pid, ticks)
        go_on(process)
        (ending,) = wait_for_ends(watch, 1)
        assert (ending.status, ending.source) == (None, None)
        assert watch.status(process.pid, ticks) is None
        assert watch.dispatch() == (), "it has been told of"
    process.wait()
    with another_user():
        assert watch.status(process.pid, ticks) == 3 << 8
        assert watch.find_end(process.pid, ticks) == ProcessEnd(process.pid, ticks, 1_700_000_000.0, 3 << 8, "pidfd")
    watch.close()


@needs_exit_info
def test_a_process_that_is_waited_for_while_we_ask_tells_all_the_same(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(start, "exit 3")
    watch.watch(process.pid, None)

    def too_late(pid: int, start_ticks: int | None, proc: str) -> int | None:
        process.wait()
        return None

    monkeypatch.setattr(process_exits, "read_zombie_status", too_late)
    go_on(process)
    (ending,) = wait_for_ends(watch, 1)
    assert (ending.status, ending.source) == (3 << 8, "pidfd")


@needs_exit_info
def test_a_status_is_told_also_to_who_looks_before_the_loop_does(watch: ProcessExitWatch, start: Start) -> None:
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    watch.watch(process.pid, ticks)
    go_on(process)
    process.wait()
    assert watch.find_end(process.pid, ticks) is None
    assert watch.status(process.pid, ticks) == 3 << 8


def test_a_process_that_has_ended_before_is_told_at_once(watch: ProcessExitWatch, start: Start) -> None:
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    go_on(process)
    until(lambda: watch.status(process.pid, ticks) is not None, "its end")
    assert watch.watch(process.pid, None), "it has not been waited for"
    (ending,) = wait_for_ends(watch, 1)
    assert (ending.pid, ending.start_ticks, ending.status) == (process.pid, None, 3 << 8)
    process.wait()
    assert watch.status(process.pid, ticks) is None, "that one was not watched"
    assert watch.status(process.pid, None) == 3 << 8


def test_a_process_that_is_not_there_is_refused(watch: ProcessExitWatch, start: Start) -> None:
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    with pytest.raises(ProcessLookupError, match=f"^process {process.pid} is another one now$"):
        watch.watch(process.pid, (ticks or 0) - 1)
    go_on(process)
    process.wait()
    before = os.listdir("/proc/self/fd")
    for pid in (process.pid, 0, -1):
        with pytest.raises(ProcessLookupError, match=f"^process {pid} is not there$"):
            watch.watch(pid, ticks)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_process_that_ends_between_the_two_steps_is_refused(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(start, "exit 3")
    ticks, real = read_start_ticks(process.pid), read_start_ticks

    def too_late(pid: int, proc: str) -> int | None:
        go_on(process)
        process.wait()
        return real(pid, proc)

    monkeypatch.setattr(process_exits, "read_start_ticks", too_late)
    with pytest.raises(ProcessLookupError, match=f"^process {process.pid} is not there$"):
        watch.watch(process.pid, ticks)


def test_a_recycled_pid_is_never_watched(watch: ProcessExitWatch, start: Start) -> None:
    process = begin(start, "exit 3")
    pid, ticks = process.pid, read_start_ticks(process.pid)
    assert watch.watch(pid, ticks)
    go_on(process)
    process.wait()
    time.sleep(2 / CLOCK_TICKS)
    other = start_with_pid(pid)
    try:
        assert [ending.start_ticks for ending in wait_for_ends(watch, 1)] == [ticks]
        with pytest.raises(ProcessLookupError, match=f"^process {pid} is another one now$"):
            ProcessExitWatch(FakeClock()).watch(pid, ticks)
        new = read_start_ticks(pid)
        assert watch.watch(pid, new)
        assert watch.find_end(pid, new) is None
        other.kill()
        (ending,) = wait_for_ends(watch, 1)
        assert (ending.start_ticks, ending.status) == (new, signal.SIGKILL)
    finally:
        other.kill()
        other.wait()


def test_a_thousand_quick_deaths_are_each_told_once(watch: ProcessExitWatch) -> None:
    """In a random order, by others than their parent, while that waits for some of them; 200 live at a time."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, lambda *_: None)\n"
        "for line in sys.stdin:\n"
        "    pids = []\n"
        "    for _ in range(int(line)):\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            signal.signal(signal.SIGUSR1, lambda *_: os._exit(os.getpid() % 200))\n"
        "            signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "            while True: signal.pause()\n"
        "        pids.append(pid)\n"
        "    print(*pids, flush=True)\n"
        "    for pid in pids[::2]: os.waitpid(pid, 0)\n"
    )
    chosen = random.Random(5)
    parent = subprocess.Popen(
        [sys.executable, "-I", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    told: list[ProcessEnd] = []
    watch.on_exit = told.append
    expected: dict[tuple[int, int | None], set[int | None]] = {}
    try:
        for _ in range(5):
            parent.stdin.write("200\n")
            parent.stdin.flush()
            pids = [int(word) for word in parent.stdout.readline().split()]
            ticks = {pid: read_start_ticks(pid) for pid in pids}
            time.sleep(0.1)  # for the handlers
            assert all(watch.watch(pid, ticks[pid]) for pid in pids)
            before = len(told)
            for pid in chosen.sample(pids, len(pids)):
                number = chosen.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
                os.kill(pid, number)
                status = pid % 200 << 8 if number == signal.SIGUSR1 else int(number)
                expected[pid, ticks[pid]] = {status, None} if not tells_after_reaping() else {status}
                if chosen.random() < 0.05:
                    watch.dispatch()
            wait_for_ends(watch, 200 - (len(told) - before))
        assert len(told) == 1000
        assert {(ending.pid, ending.start_ticks) for ending in told} == set(expected)
        wrong = [ending for ending in told if ending.status not in expected[ending.pid, ending.start_ticks]]
        assert wrong == []
    finally:
        parent.kill()
        parent.wait()


def test_a_loop_tells_while_another_thread_watches_asks_and_forgets() -> None:
    """Descriptors that are closed and used again at once are never taken for each other."""
    watch = ProcessExitWatch(FakeClock())
    told: list[ProcessEnd] = []
    trouble: list[str] = []
    watch.on_exit = told.append

    def work() -> None:
        for _ in range(150):
            process = subprocess.Popen(["sleep", "60"])
            ticks = read_start_ticks(process.pid)
            watch.watch(process.pid, ticks)
            if watch.find_end(process.pid, ticks) is not None:
                trouble.append("told of a process that lives")
            process.kill()
            process.wait()
            until(lambda key=(process.pid, ticks): watch.find_end(*key), "its end")
            ending = watch.find_end(process.pid, ticks)
            if ending is not None and ending.status not in (signal.SIGKILL, None):
                trouble.append(f"status {ending.status}")
            watch.drop(process.pid, ticks)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(watch.fileno(), watch.dispatch)
        await asyncio.gather(*(loop.run_in_executor(None, work) for _ in range(2)))
        loop.remove_reader(watch.fileno())

    asyncio.run(run())
    watch.close()
    assert trouble == []
    assert len(told) == 300


def test_who_is_forgotten_is_not_told_of(watch: ProcessExitWatch, start: Start) -> None:
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    before = len(os.listdir("/proc/self/fd"))
    assert watch.watch(process.pid, ticks)
    assert watch.watch(process.pid, ticks), "asking twice changes nothing"
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.drop(process.pid, ticks)
    watch.drop(process.pid, ticks)
    assert len(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()
    assert not readable(watch, 0.05)
    assert watch.dispatch() == ()
    assert watch.find_end(process.pid, ticks) is None


def test_descriptors_go_back_once_the_status_is_known(start: Start) -> None:
    watch = ProcessExitWatch(FakeClock())
    before = len(open_files("anon_inode:[pidfd]"))
    process = begin(start, "exit 3")
    watch.watch(process.pid, None)
    assert len(open_files("anon_inode:[pidfd]")) == before + 1
    process.kill()
    wait_for_ends(watch, 1)
    assert len(open_files("anon_inode:[pidfd]")) == before
    assert watch.status(process.pid, None) == signal.SIGKILL
    watch.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENFILE])
def test_a_kernel_without_pidfds_leaves_it_to_the_caller(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not watch.watch(process.pid, ticks)
    assert watch.find_end(process.pid, ticks) is None
    go_on(process)
    until(lambda: watch.status(process.pid, ticks) == 3 << 8, "what /proc says of its end")


def test_without_a_free_descriptor_it_is_left_to_the_caller(watch: ProcessExitWatch, start: Start) -> None:
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    for spare, watched in ((0, False), (1, False), (2, True)):
        with spare_descriptors(spare):
            assert watch.watch(process.pid, ticks) is watched
        assert len(open_files("anon_inode:[pidfd]")) == watched


def test_an_interpreter_of_an_older_system_can_watch_too(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    assert watch.watch(process.pid, ticks)
    go_on(process)
    (ending,) = wait_for_ends(watch, 1)
    assert ending.status == 3 << 8
    process.wait()
    with pytest.raises(ProcessLookupError):
        watch.watch(process.pid, None)


@pytest.mark.parametrize("reason", [errno.ENOTTY, errno.ESRCH])
def test_an_older_kernel_tells_the_end_and_perhaps_not_the_status(
    watch: ProcessExitWatch, start: Start, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(fd: int, request: int, argument: bytearray) -> int:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("fcntl.ioctl", refuse)
    process = begin(start, "exit 3")
    ticks = read_start_ticks(process.pid)
    watch.watch(process.pid, ticks)
    go_on(process)
    process.wait()
    (ending,) = wait_for_ends(watch, 1)
    assert (ending.status, ending.source) == (None, None)


def test_threads_end_without_being_told_of(watch: ProcessExitWatch, start: Start) -> None:
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
    assert process.stdout is not None
    thread = int(process.stdout.readline())
    with pytest.raises(ProcessLookupError):
        watch.watch(thread, None)
    watch.watch(process.pid, None)
    go_on(process)
    process.stdout.readline()
    assert watch.dispatch() == ()


def test_a_program_that_replaces_itself_from_another_thread_lives_on(watch: ProcessExitWatch, start: Start) -> None:
    program = (
        "import os, sys, threading\n"
        "sys.stdin.readline()\n"
        "threading.Thread(target=os.execvp, args=('sh', ['sh', '-c', 'echo replaced; read line; exit 4'])).start()\n"
        "threading.Event().wait()\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    ticks = read_start_ticks(process.pid)
    watch.watch(process.pid, ticks)
    go_on(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "replaced\n"
    assert watch.dispatch() == ()
    go_on(process)
    (ending,) = wait_for_ends(watch, 1)
    assert ending.status == 4 << 8


def test_one_call_of_the_kernel_serves_all_ends(watch: ProcessExitWatch, start: Start) -> None:
    processes = [begin(start, "exit 3") for _ in range(20)]
    for process in processes:
        watch.watch(process.pid, None)
    calls = []

    class Counting:
        """The epoll object, its waits counted."""

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
    watch._epoll = Counting(watch._epoll)  # type: ignore[assignment]
    assert len(watch.dispatch()) == 20
    assert calls == [0]


def test_many_threads_may_dispatch(watch: ProcessExitWatch) -> None:
    processes = [subprocess.Popen(["true"]) for _ in range(50)]
    for process in processes:
        watch.watch(process.pid, None)
    found: list[ProcessEnd] = []
    end = time.monotonic() + 20

    def work() -> None:
        while len(found) < 50 and time.monotonic() < end:
            found.extend(watch.dispatch())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ending.pid for ending in found) == sorted(process.pid for process in processes)
    assert {process.wait() for process in processes} == {0}
