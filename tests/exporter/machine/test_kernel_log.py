"""The kernel log: sample lines of several kernels, a fake device and the real one."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.clock import SystemClock
from exporter.machine import kernel_log
from exporter.machine.kernel_log import (
    FIRST_PID_NAMESPACE,
    KernelEvent,
    KernelLine,
    KernelLog,
    KernelXid,
    OomVictim,
    parse_event,
    parse_line,
)
from tests.exporter.machine.cgroup_trees import MIB, real_cgroup
from tests.support.exporter import FakeClock, open_files

OOM_KILL = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm_rs5/uid_1001/job_15,"
    "task_memcg=/slurm_rs5/uid_1001/job_15/step_0/task_0,task=python3,pid=21167,uid=1001"
)
KILLED = (
    "Memory cgroup out of memory: Killed process 21167 (python3) total-vm:323884kB, anon-rss:305920kB, "
    "file-rss:4096kB, shmem-rss:0kB, UID:1001 pgtables:668kB oom_score_adj:0"
)
JOB = "/slurm_rs5/uid_1001/job_15/step_0/task_0"


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (b"6,1234,5678900,-;text\n", KernelLine(5.6789, "text")),
        (b"3,1,2,-;a;b,c\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n", KernelLine(2e-6, "a;b,c")),
        (b"6,1,2000000,c,caller=T12;text", KernelLine(2.0, "text")),
        (b"0,1,2,-;\n", KernelLine(2e-6, "")),
        (b"6,1,0,-;\xff\\x0a\n", KernelLine(0.0, "\ufffd\\x0a")),
        (b"12,1,2,-;a process writes with another facility\n", None),
        (b"30,1,2,-;a daemon\n", None),
        (b" SUBSYSTEM=pci\n", None),
        (b"6,1;text\n", None),
        (b"", None),
    ],
)
def test_only_lines_of_the_kernel_itself_are_parsed(record: bytes, line: KernelLine | None) -> None:
    assert parse_line(record) == line


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (OOM_KILL, OomVictim(21167, JOB)),
        (
            "oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/a,task=b,c,task=a, pid=1,pid=77,uid=0",
            OomVictim(77, "/a,task=b,c"),
        ),
        (KILLED, OomVictim(21167)),
        (
            "Out of memory: Killed process 123 (a) b (c)) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB",
            OomVictim(123),
        ),
        ("Killed process 4711 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB", OomVictim(4711)),
        ("Killed process 4711 (python), UID 1001, total-vm:1kB, anon-rss:1kB, file-rss:0kB", OomVictim(4711)),
        ("Out of memory (oom_kill_allocating_task): Killed process 9 (x) total-vm:1kB", OomVictim(9)),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            KernelXid("0000:3b:00", 79, 1234),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off.",
            KernelXid("0000:3b:00", 79),
        ),
        ("NVRM: Xid (PCI:0009:01:00): 31, pid='2231', name=a, Ch 00000008", KernelXid("0009:01:00", 31, 2231)),
        ("NVRM: Xid (PCI:0000:C7:00): 94, Contained: SM (0x1). RST: No, D-RST: No", KernelXid("0000:C7:00", 94)),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No",
            KernelXid("0000:01:00", 94, 7194, 5),
        ),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:00 GPU-CI:03): 43, pid='<unknown>'", KernelXid("0000:01:00", 43, None, 0)),
        ("NVRM: Xid (PCI:0000:01:00 GPU-CI:03): 43, pid=9", KernelXid("0000:01:00", 43, 9)),
        ("NVRM: Xid (0000:03:00): 13, 0001 00000000 0000a0c0", KernelXid("0000:03:00", 13)),
        ("Memory cgroup out of memory: Kill process 12 (x) score 900 or sacrifice child", None),
        ("oom_reaper: reaped process 21167 (python3), now anon-rss:0kB, file-rss:4096kB, shmem-rss:0kB", None),
        ("python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0", None),
        ("Tasks in /job_7 are going to be killed due to memory.oom.group set", None),
        ("usb 1-1: Killed processes are none", None),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", None),
        ("", None),
    ],
)
def test_oom_kills_and_xids_are_parsed(text: str, event: OomVictim | KernelXid | None) -> None:
    assert parse_event(text) == event


@given(st.text(max_size=15), st.integers(1, 1 << 22))
def test_an_oom_victim_may_have_any_name(name: str, pid: int) -> None:
    printed = "".join(char if char.isascii() and char.isprintable() else "\\x20" for char in name)
    assert parse_event(f"Out of memory: Killed process {pid} ({printed}) total-vm:1kB") == OomVictim(pid)


@given(st.binary(max_size=200))
def test_any_record_can_be_parsed(record: bytes) -> None:
    line = parse_line(record)
    if line is not None:
        parse_event(line.text)


class Device:
    """A fake of ``/dev/kmsg`` that returns one record per read."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        (self.proc / "self/ns").mkdir(parents=True)
        (self.proc / "self/ns/pid").symlink_to("/proc/self/ns/pid")
        self._reading, self._writing = os.pipe2(os.O_DIRECT)  # packet mode: one record per read
        self.path = f"/proc/self/fd/{self._reading}"

    def log(self, text: str, uptime_s: float, facility: int = 0) -> None:
        """Write one record."""
        os.write(self._writing, f"{facility * 8 + 6},1,{round(uptime_s * 1e6)},-;{text}\n".encode())

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    fake = Device(tmp_path)
    monkeypatch.setattr(kernel_log, "FIRST_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    yield fake
    fake.close()


class Uptime(FakeClock):
    """The clock of a machine that was booted at 1000."""

    def monotonic(self) -> float:
        return self.now - 1000


def test_events_since_the_start_of_the_job_are_kept_once(device: Device) -> None:
    device.log(KILLED.replace("21167", "1"), 99.0)
    device.log(OOM_KILL, 101.0)
    device.log(KILLED, 101.5)
    device.log("eth0: link up", 102.0)
    device.log("NVRM: Xid (PCI:0000:3b:00): 79, pid=5, name=a, b", 103.0)
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))
    log.read()
    expected = (
        KernelEvent(1101.0, OomVictim(21167, JOB)),
        KernelEvent(1101.5, OomVictim(21167)),
        KernelEvent(1103.0, KernelXid("0000:3b:00", 79, 5)),
    )
    assert log.unavailable_reason is None
    assert log.events == expected
    log.read()
    assert log.events == expected


def test_records_written_by_processes_are_ignored(device: Device) -> None:
    device.log(KILLED, 150.0, facility=1)
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))
    log.read()
    assert log.events == ()


@pytest.mark.parametrize(("uptime_s", "time_s"), [(150.0, 1200.0), (205.0, 1205.0), (290.0, 1210.0)])
def test_event_times_stay_between_two_reads_when_the_clock_drifts(
    device: Device, uptime_s: float, time_s: float
) -> None:
    clock = Uptime(1200.0)
    log = KernelLog(clock, 1100.0, device.path, str(device.proc))
    log.read()
    clock.advance(10)
    device.log(KILLED, uptime_s)
    log.read()
    assert log.events == (KernelEvent(time_s, OomVictim(21167)),)


def test_overwritten_records_affect_no_others(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.log(KILLED, 150.0)
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))
    overwritten = [OSError(errno.EPIPE, "Broken pipe")] * 3
    real_read = os.read

    def read(fd: int, size: int) -> bytes:
        if overwritten:
            raise overwritten.pop()
        return real_read(fd, size)

    monkeypatch.setattr(os, "read", read)
    log.read()
    assert not overwritten
    assert len(log.events) == 1
    assert log.unavailable_reason is None


def test_a_log_is_unavailable_after_a_read_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))

    def read(fd: int, size: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    pipe = os.readlink(device.path)
    before = open_files(pipe)
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        log.read()
    assert log.unavailable_reason == "Input/output error"
    assert len(open_files(pipe)) == len(before) - 1
    device.log(KILLED, 150.0)
    log.read()
    assert log.events == ()


def test_a_flood_is_read_in_parts_and_keeps_its_event_times(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "RECORDS_PER_READ", 5)
    clock = Uptime(1200.0)
    log = KernelLog(clock, 1100.0, device.path, str(device.proc))
    for pid in range(8):
        device.log(KILLED.replace("21167", str(pid)), 110.0 + pid)
    log.read()
    assert [event.time for event in log.events] == [1110.0 + pid for pid in range(5)]
    clock.advance(5)
    log.read()
    assert [event.time for event in log.events] == [1110.0 + pid for pid in range(8)]


def test_only_the_last_events_are_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "MOST_EVENTS", 3)
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))
    for pid in range(8):
        device.log(KILLED.replace("21167", str(pid)), 110.0 + pid)
    log.read()
    assert [event.detail.pid for event in log.events] == [5, 6, 7]


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES, errno.ENOENT])
def test_an_unreadable_log_is_unavailable(device: Device, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(os, "open", refuse)
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))
    log.read()
    assert log.unavailable_reason == os.strerror(error)
    assert log.events == ()


def test_the_log_is_unavailable_in_a_separate_pid_namespace(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "FIRST_PID_NAMESPACE", 1)
    device.log(KILLED, 150.0)
    log = KernelLog(Uptime(1200.0), 1100.0, device.path, str(device.proc))
    log.read()
    assert log.unavailable_reason == "running in a separate pid namespace"
    assert log.events == ()


def test_a_machine_without_proc_has_no_log(tmp_path: Path) -> None:
    assert KernelLog(Uptime(), None, "/dev/kmsg", str(tmp_path)).unavailable_reason == "No such file or directory"


# The real kernel


@pytest.fixture
def real_log() -> KernelLog:
    if os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
        pytest.skip("not in the first pid namespace")
    log = KernelLog(SystemClock(), None)
    if log.unavailable_reason is not None:
        pytest.skip(f"the kernel log: {log.unavailable_reason}")
    return log


def test_the_real_kernel_logs_oom_victims_with_time(real_log: KernelLog) -> None:
    real_log.read()
    with real_cgroup("kmsg") as real:
        real.limit(32 * MIB)
        before = time.time()
        pid = real.exceed()
        after = time.time()
        real_log.read()
        own_events = [event for event in real_log.events if event.detail.pid == pid]
        cgroups = [event.detail.cgroup for event in own_events if isinstance(event.detail, OomVictim)]
        assert any(cgroup is not None and cgroup.endswith(f"/{real.directory.name}") for cgroup in cgroups)
        assert None in cgroups  # the line that reports the kill
        assert all(before - 1 <= event.time <= after + 1 for event in own_events)
        earlier = KernelLog(SystemClock(), before - 1)
        earlier.read()
        assert pid in [event.detail.pid for event in earlier.events]
        later = KernelLog(SystemClock(), None)
        later.read()
        assert pid not in [event.detail.pid for event in later.events]


def test_a_process_cannot_forge_an_oom_kill_in_the_real_log(real_log: KernelLog) -> None:
    text = KILLED.replace("21167", "4194305")  # above the largest pid
    try:
        Path("/dev/kmsg").write_text(f"<6>{text}\n", encoding="ascii")
    except OSError as error:
        pytest.skip(f"cannot write to the kernel log: {error}")
    real_log.read()
    assert 4194305 not in [event.detail.pid for event in real_log.events]
