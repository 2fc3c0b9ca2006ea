"""The file watch host: reads on threads and in the file helper."""

import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from exporter.contract import clock
from exporter.contract.clock import SystemClock
from exporter.machine import file_host
from exporter.machine.file_helper import ANSWER, DIRECTORY, ERROR, HEAD, READY, _HelperServer
from exporter.machine.file_host import FileHelperEnded, FileWatchHost, WatchFailed, WatchHandle, WatchHanging
from tests.exporter.machine.fuse_server import FuseMount
from tests.exporter.machine.watches import Echo, Failing, FailingConstructor, Listing, Slow
from tests.support.exporter import SOON_S, ShiftedClock, refuse_threads, until

NOW = 1_700_000_000.0
WAIT_S = 60.0  # time limit for results, enough for a slow machine
BOTH = pytest.mark.parametrize("process", [False, True], ids=["threads", "process"])
Make = Callable[[bool], FileWatchHost]
T = TypeVar("T")


@pytest.fixture
def hosts() -> Iterator[Make]:
    """Creates hosts and closes them afterwards."""
    created: list[FileWatchHost] = []

    def create(process: bool) -> FileWatchHost:
        created.append(FileWatchHost(SystemClock(), use_helper=process))
        return created[-1]

    yield create
    for host in created:
        host.close()


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    """A file system that can hang, with one file."""
    mount = FuseMount(tmp_path)
    (mount.folder / "a").write_bytes(b"12345")
    yield mount
    mount.close()


@pytest.fixture(autouse=True)
def long_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the helper start slowly."""
    monkeypatch.setattr(file_host, "START_S", WAIT_S)


def poll(watched: WatchHandle[T], wait_s: float = WAIT_S) -> T:
    """Result of one poll."""
    watched.request(NOW)
    return watched.result(wait_s)


@BOTH
def test_a_watch_is_created_once_and_answers_each_poll(process: bool, hosts: Make, tmp_path: Path) -> None:
    watched = hosts(process).watch("echo", partial(Echo, str(tmp_path), "hello"))
    label, count, now, pid = poll(watched)
    assert (label, count, now) == ("hello", 1, NOW)
    assert (pid != os.getpid()) is process
    assert poll(watched) == ("hello", 2, NOW, pid)
    assert watched.responding


@BOTH
def test_watches_do_not_wait_for_each_other(process: bool, hosts: Make, tmp_path: Path) -> None:
    host, gate = hosts(process), tmp_path / "gate"
    slow, quick = host.watch("slow", partial(Slow, str(tmp_path), str(gate))), host.watch("q", partial(Echo, "/"))
    slow.request(NOW)
    assert poll(quick)[1] == 1
    with pytest.raises(WatchHanging) as caught:
        slow.result(0.05)
    assert not slow.responding
    assert 0.05 <= time.monotonic() - caught.value.since < SOON_S
    gate.touch()
    until(lambda: slow.responding, "the answer")
    assert slow.result(0) == 1


@BOTH
def test_a_late_answer_is_kept_and_no_second_poll_begins(process: bool, hosts: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = hosts(process).watch("slow", partial(Slow, str(tmp_path), str(gate)))
    slow.request(NOW)
    for _ in range(3):
        with pytest.raises(WatchHanging):
            slow.result(0.01)
        slow.request(NOW)
    gate.touch()
    until(lambda: slow.responding, "the answer")
    slow.request(NOW)
    assert slow.result(0) == 1
    assert poll(slow) == 2


def test_a_late_answer_of_a_lost_helper_is_discarded(hosts: Make, tmp_path: Path) -> None:
    host, gate = hosts(True), tmp_path / "gate"
    slow = host.watch("slow", partial(Slow, str(tmp_path), str(gate)))
    slow.request(NOW)
    with pytest.raises(WatchHanging):
        slow.result(0.01)
    earlier = slow.generation
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(FileHelperEnded):
        until(lambda: slow.result(0) is None if slow.responding else None, "the end")
    until(lambda: not isinstance(host.poll([slow], NOW, 0)[0], FileHelperEnded), "another helper")
    slow.receive(ANSWER, pickle.dumps("late"), earlier)
    slow.receive(READY, "ended", earlier)
    with pytest.raises(WatchHanging):
        slow.result(0)
    gate.touch()
    assert slow.result(WAIT_S) == 1


@BOTH
def test_a_thread_that_cannot_be_started_costs_one_read(
    process: bool, hosts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = hosts(process).watch("echo", partial(Echo, str(tmp_path), "once"))
    refuse_threads(monkeypatch, "file-helper" if process else "read-", 2)
    for _ in range(2):
        with pytest.raises(FileHelperEnded, match="can't start new thread"):
            poll(watched)
        assert watched.responding
    assert poll(watched)[:3] == ("once", 1, NOW)


def test_a_thread_that_the_helper_cannot_start_costs_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, child = socket.socketpair()
    threading.Thread(target=_HelperServer(child.fileno()).run).start()
    refuse_threads(monkeypatch, "read-", 1)
    body = pickle.dumps(("echo", NOW, pickle.dumps(partial(Echo, str(tmp_path), "once"))))
    kinds = []
    with link, child:
        for number in (0, 7, 7):
            if number:
                link.send(HEAD.pack(len(body), number, ANSWER) + body)
            kinds += [read_message(link)[1:]]
        assert read_message(link)[2] == ANSWER
        link.shutdown(socket.SHUT_WR)
    assert kinds == [(0, READY), (7, ERROR), (7, DIRECTORY)]


def read_message(link: socket.socket) -> tuple[int, int, int]:
    """Head of the next message: length of its body, number of the watch, kind."""
    head: tuple[int, int, int] = HEAD.unpack(link.recv(HEAD.size, socket.MSG_WAITALL))
    assert len(link.recv(head[0], socket.MSG_WAITALL)) == head[0]
    return head


def test_a_result_without_a_request_is_an_error(hosts: Make) -> None:
    with pytest.raises(RuntimeError, match="no read was requested"):
        hosts(False).watch("echo", partial(Echo, "/")).result(0)


@BOTH
def test_an_error_affects_only_its_own_watch(process: bool, hosts: Make, tmp_path: Path) -> None:
    host = hosts(process)
    watches = [
        host.watch("echo", partial(Echo, str(tmp_path))),
        host.watch("denied", partial(Failing, str(tmp_path), "odd\udcff\nname")),
        host.watch("wrong", partial(Failing, str(tmp_path), "value")),
        host.watch("not_created", partial(FailingConstructor, str(tmp_path))),
    ]
    for _ in range(2):
        echo, denied, wrong, not_created = host.poll(watches, NOW, WAIT_S)
        assert isinstance(echo, tuple)
        assert echo[0] == ""
        assert isinstance(denied, PermissionError)
        assert (denied.errno, denied.filename) == (13, "odd\udcff\nname")
        assert isinstance(wrong, WatchFailed)
        assert str(wrong).startswith("wrong: ValueError: not a number (watches.py:")
        assert isinstance(not_created, NotADirectoryError)
    assert all(watched.responding for watched in watches)


def test_an_answer_that_cannot_be_pickled_is_a_failure(hosts: Make) -> None:
    with pytest.raises(WatchFailed, match="pickle"):
        poll(hosts(True).watch("odd", partial(Failing, "/", "answer")))


def test_a_watch_that_cannot_be_pickled_is_refused_immediately(hosts: Make) -> None:
    with pytest.raises((AttributeError, TypeError, Exception), match="pickle"):
        hosts(True).watch("local", lambda: Echo("/"))


@BOTH
def test_all_watches_share_one_waiting_time(process: bool, hosts: Make, tmp_path: Path) -> None:
    host = hosts(process)
    poll(host.watch("echo", partial(Echo, str(tmp_path))))
    watches = [host.watch(f"slow{n}", partial(Slow, str(tmp_path), str(tmp_path / "gate"))) for n in range(60)]
    began = time.monotonic()
    answers = host.poll(watches, NOW, 1.0)
    assert all(isinstance(answer, WatchHanging) for answer in answers)
    assert 1.0 <= time.monotonic() - began < SOON_S  # one after the other would take a minute
    began = time.monotonic()
    answers = host.poll(watches, NOW, WAIT_S)  # hanging watches are not waited for again
    assert all(isinstance(answer, WatchHanging) for answer in answers)
    assert time.monotonic() - began < SOON_S
    (tmp_path / "gate").touch()
    until(lambda: all(watched.responding for watched in watches), "the answers")
    assert host.poll(watches, NOW, WAIT_S) == [1] * 60


@BOTH
def test_a_poll_waits_again_for_watches_that_stood_still_with_it(
    process: bool, hosts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, gates, shifted = hosts(process), [tmp_path / "first", tmp_path / "second"], ShiftedClock()
    first, second = watches = [host.watch(gate.name, partial(Slow, str(tmp_path), str(gate))) for gate in gates]
    wait_first, wait_second = first._changed.wait, second._changed.wait

    def stand_still(_: float) -> bool:
        shifted.shift += 2 * WAIT_S
        gates[0].touch()
        monkeypatch.setattr(first._changed, "wait", wait_first)
        return False

    def wait(left_s: float) -> bool:
        gates[1].touch()
        return wait_second(left_s)

    for module in (clock, file_host):
        monkeypatch.setattr(module, "time", shifted)
    monkeypatch.setattr(first._changed, "wait", stand_still)
    monkeypatch.setattr(second._changed, "wait", wait)
    assert host.poll(watches, NOW, WAIT_S) == [1, 1]


def test_the_mount_is_that_of_the_link_target(hosts: Make, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/sys")
    watched = hosts(False).watch("echo", partial(Echo, str(tmp_path / "link")))
    before = watched.mount
    assert before is not None
    assert str(tmp_path).startswith(before)
    poll(watched)
    assert watched.mount == "/proc"
    assert hosts(False).watch("none", partial(Echo, "relative")).mount is None


def test_a_node_without_remote_mounts_needs_no_helper(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    for text, process in (
        ("22 1 254:0 / / rw - ext4 /dev/vda1 rw\n", False),
        ("22 1 254:0 / / rw - ext4 /dev/vda1 rw\n23 22 0:1 / /home rw - nfs4 server:/home rw\n", True),
        ("", True),
    ):
        (tmp_path / "self" / "mountinfo").write_text(text, encoding="ascii")
        host = FileWatchHost(SystemClock(), proc=str(tmp_path))
        assert isinstance(host.readers, file_host._ProcessHost) is process
        host.close()


def test_idle_threads_end_with_the_host(tmp_path: Path) -> None:
    host = FileWatchHost(SystemClock(), use_helper=False)
    for number in range(3):
        poll(host.watch(f"ending{number}", partial(Echo, str(tmp_path))))
    assert sum(thread.name.startswith("read-ending") for thread in threading.enumerate()) == 3
    host.close()
    until(lambda: not any(thread.name.startswith("read-ending") for thread in threading.enumerate()), "their end")


def pid_of(host: FileWatchHost) -> int:
    """Pid of the running helper."""
    assert host.pid is not None
    return host.pid


def has_ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_helper_inherits_no_descriptors_of_the_sidecar(hosts: Make, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        host = hosts(True)
        poll(host.watch("echo", partial(Echo, str(tmp_path))))
        folder = Path(f"/proc/{host.pid}/fd")
        targets = {int(entry.name): os.readlink(entry) for entry in folder.iterdir()}
        assert targets.keys() == {0, 1, 2}
        assert targets[0].startswith("socket:")
        assert targets[1] == targets[2] == "/dev/null"
        assert targets[0] != os.readlink(f"/proc/self/fd/{server.fileno()}")
        assert os.readlink(f"/proc/{host.pid}/cwd") == "/"


def test_the_helper_has_the_priority_of_the_sidecar_and_little_memory(hosts: Make, tmp_path: Path) -> None:
    program = """
        import os, sys, time
        from functools import partial
        from exporter.contract.clock import SystemClock
        from exporter.machine import file_host
        from exporter.files.disks.space_reader import SpaceWatch
        open("/proc/self/oom_score_adj", "w").write("1000")
        os.nice(5)
        file_host.START_S = 60.0
        host = file_host.FileWatchHost(SystemClock(), use_helper=True)
        watched = host.watch("space", partial(SpaceWatch, "/"))
        watched.request(1.0)
        assert watched.result(60).space.size_bytes
        print(host.pid, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}/oom_score_adj").read_text("ascii").strip() == "1000"
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        time.sleep(0.1)
        assert not has_ended(pid), "only the sidecar ends it"
        rss = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * resource.getpagesize()
        assert rss < 16 << 20
        process.kill()
        until(lambda: has_ended(pid), "its end with the sidecar")


def test_the_helper_ends_with_its_host(hosts: Make, tmp_path: Path) -> None:
    host = hosts(True)
    watched = host.watch("echo", partial(Echo, str(tmp_path)))
    poll(watched)
    pid = pid_of(host)
    host.close()
    until(lambda: has_ended(pid), "its end")
    with pytest.raises(FileHelperEnded):
        poll(watched)
    assert host.pid is None


def test_a_killed_helper_is_restarted(hosts: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = hosts(True)
    first, second = (host.watch(name, partial(Echo, str(tmp_path))) for name in "ab")
    for _ in range(3):
        host.poll([first, second], NOW, WAIT_S)
    pid = pid_of(host)
    with caplog.at_level(logging.WARNING, "gpujob.files"):
        os.kill(pid, signal.SIGKILL)
        until(lambda: caplog.records, "the notice")
        with pytest.raises(FileHelperEnded):
            poll(first)
        answer = until(lambda: next((a for a in [_try(first)] if a is not None), None), "a new helper")
    assert [record.getMessage() for record in caplog.records] == [
        "the process that reads files has ended (signal 9): it is restarted"
    ]
    assert answer[1] == 1, "the watch was created again"
    assert answer[3] != pid
    assert poll(second)[1] == 1


def _try(watched: WatchHandle[T]) -> T | None:
    try:
        return poll(watched)
    except FileHelperEnded:
        time.sleep(0.05)
        return None


def test_a_watch_that_crashes_the_helper_fails(hosts: Make, tmp_path: Path) -> None:
    host = hosts(True)
    slow = host.watch("slow", partial(Slow, str(tmp_path), str(tmp_path / "gate")))
    crash = host.watch("crash", partial(Failing, str(tmp_path), "crash"))
    slow.request(NOW)
    with pytest.raises(FileHelperEnded):
        poll(crash)
    with pytest.raises(FileHelperEnded):
        slow.result(WAIT_S)
    (tmp_path / "gate").touch()
    assert until(lambda: _try(slow), "the next helper") == 1


def test_an_interpreter_that_cannot_be_started_is_an_error(
    hosts: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    host = hosts(True)
    watched = host.watch("echo", partial(Echo, "/"))
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(FileHelperEnded):
            poll(watched)
    assert time.monotonic() - began < SOON_S
    assert watched.responding
    until(lambda: "No such file or directory" in caplog.text, "the reason")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mode", ["ignore", "swallow"])
def test_a_hanging_file_system_affects_only_its_own_watch(
    mode: str, hosts: Make, fuse: FuseMount, tmp_path: Path
) -> None:
    host = FileWatchHost(SystemClock())
    try:
        assert isinstance(host.readers, file_host._ProcessHost), "a FUSE mount requires it"
        there = host.watch("there", partial(Listing, str(fuse.point)))
        here = host.watch("here", partial(Echo, str(tmp_path)))
        assert host.poll([there, here], NOW, WAIT_S)[0] == ["a"]
        fuse.say(mode)
        there.request(NOW)
        with pytest.raises(WatchHanging):
            there.result(0.2)
        for count in range(2, 7):
            hanging, echo = host.poll([there, here], NOW, WAIT_S)  # the hanging watch costs no time
            assert isinstance(hanging, WatchHanging)
            assert hanging.mount == str(fuse.point)
            assert isinstance(echo, tuple)
            assert echo[1] == count
        (fuse.folder / "b").touch()
        fuse.say("answer")
        until(lambda: there.responding, "the answer")
        assert there.result(0) == ["a", "b"]
        assert poll(there) == ["a", "b"]
    finally:
        host.close()


def test_closing_does_not_wait_for_a_hanging_poll(hosts: Make, fuse: FuseMount) -> None:
    host = hosts(True)
    there = host.watch("there", partial(Listing, str(fuse.point)))
    poll(there)
    pid = pid_of(host)
    fuse.say("swallow")
    with pytest.raises(WatchHanging):
        poll(there, 0.1)
    began = time.monotonic()
    host.close()
    assert time.monotonic() - began < SOON_S
    fuse.close()
    until(lambda: has_ended(pid), "the end of the helper")


def test_a_helper_killed_during_a_hanging_poll_is_replaced(hosts: Make, fuse: FuseMount, tmp_path: Path) -> None:
    host = hosts(True)
    there, here = host.watch("there", partial(Listing, str(fuse.point))), host.watch("h", partial(Echo, str(tmp_path)))
    host.poll([there, here], NOW, WAIT_S)
    pid = pid_of(host)
    fuse.say("swallow")
    host.poll([there, here], NOW, 0.1)
    os.kill(pid, signal.SIGKILL)  # as when out of memory: the hanging thread keeps the socket open

    def poll_new_helper() -> object:
        result = host.poll([there, here], NOW, 0.1)[1]
        return result if isinstance(result, tuple) and result[3] != pid else None

    assert until(poll_new_helper, "another helper")[1] == 1
    assert host.pid != pid
    fuse.say("answer")
    until(lambda: host.poll([there], NOW, 1.0)[0] == ["a"], "the file system")
