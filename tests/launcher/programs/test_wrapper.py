"""The worker wrapper, with real child processes."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.process_identity import read_start_ticks
from exporter.machine.procfs import is_zombie
from launcher.programs.environment import original_environment
from launcher.programs.wrapper import task_visible_devices
from tests.realstack.waiting import readable
from tests.support.launcher import clean_environment, poll, read_json

PYTHON = [sys.executable, "-I", "-S", "-c"]  # a Python worker that starts quickly; the program is the next argument
GLIBC_OWN = 1 << 31 | 1 << 32
"""Signals 32 and 33, which posix_spawn leaves ignored. glibc sets them again when needed."""
MOST_RSS_BYTES = 12 * 1024 * 1024

SHOW_SIGNALS = """
import os, signal, sys
waited = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
print("ready", flush=True)
while True:
    number = signal.sigwaitinfo(waited).si_signo
    print(int(number), flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
"""

SHELL = ("sh", "-c", '"$@"; :', "sh")  # runs the words after it as a program, which gets no signals from it
SAVES_WITH_A_CHILD = """
import os, signal, sys
waited = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
name = "child" if (child := os.fork()) == 0 else "parent"
print(name, os.getpid(), flush=True)
while (number := signal.sigwaitinfo(waited).si_signo) and print(name, int(number), flush=True) is None:
    if number == (signal.SIGTERM if name == "child" else signal.SIGUSR1):
        sys.exit()
"""


class Wrapped:
    """Starts workers under the wrapper in one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "workers").mkdir()
        self.children: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()  # processes that may outlive their wrapper

    def argv(self, *command: str, options: tuple[str, ...] = ()) -> list[str]:
        head = [sys.executable, "-I", "-m", "launcher.programs.wrapper", "--run-dir", str(self.run_dir)]
        return [*head, "--worker", "worker_w0", "--rank", "0", *options, "--", *command]

    def run(self, *command: str, options: tuple[str, ...] = (), **popen: Any) -> subprocess.CompletedProcess[bytes]:
        popen = {"env": clean_environment(), "timeout": 60, "capture_output": True, **popen}
        return subprocess.run(self.argv(*command, options=options), check=False, **popen)

    def start(self, *command: str, options: tuple[str, ...] = (), **popen: Any) -> subprocess.Popen[bytes]:
        popen = {
            "env": clean_environment(),
            "stdout": subprocess.PIPE,
            "bufsize": 0,
            "start_new_session": True,
            **popen,
        }
        child = subprocess.Popen(self.argv(*command, options=options), **popen)
        self.children.append(child)
        return child

    def record(self, kind: str, attempt: int = 0, restart: int = 0) -> dict[str, Any]:
        return read_json(self.run_dir / f"workers/worker_w0_rank0_a{attempt}_r{restart}.{kind}.json")

    def started(self) -> dict[str, Any]:
        return poll(lambda: self.record("start"), "a start record")

    def close(self) -> None:
        pids = [child.pid for child in self.children if child.poll() is None]
        pids += [self.record("start")["pid"]] if pids and self.record("start") else []
        for pid in (*pids, *self.pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for child in self.children:
            child.communicate()


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Wrapped]:
    worker = Wrapped(tmp_path)
    yield worker
    worker.close()


def line_of(child: subprocess.Popen[bytes], timeout: float = 60.0) -> str:
    """The next output line of a child."""
    assert child.stdout is not None
    assert readable(child.stdout, timeout), f"no line within {timeout:g} s"
    return os.fsdecode(child.stdout.readline()).strip()


def run_without_wrapper(*command: str, **popen: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a worker without the wrapper."""
    popen = {"env": clean_environment(), "timeout": 60, "capture_output": True, **popen}
    return subprocess.run(command, check=False, **popen)


# Ends


@pytest.mark.parametrize("code", [0, 1, 2, 3, 42, 77, 126, 127, 128, 137, 143, 254, 255])
def test_an_exit_status_is_passed_on(code: int, wrapped: Wrapped) -> None:
    done = wrapped.run("sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
    record = wrapped.record("exit")
    assert (record["code"], record["signal"], record["core"]) == (code, None, False)


SIGNALS = [
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM"),
    *("TERM", "XCPU", "XFSZ", "VTALRM", "PROF", "IO", "SYS"),
]


@pytest.mark.parametrize("number", [*(signal.Signals[f"SIG{name}"] for name in SIGNALS), signal.SIGRTMIN + 3])
def test_an_end_by_signal_is_passed_on(number: int, wrapped: Wrapped) -> None:
    done = wrapped.run("sh", "-c", f"kill -{int(number)} $$; sleep 9")
    assert (done.returncode, done.stderr) == (-number, b"")
    record = wrapped.record("exit")
    assert (record["code"], record["signal"]) == (None, number)
    assert wrapped.record("start")["pid"] == record["pid"]


@pytest.mark.parametrize("size", [0, resource.RLIM_INFINITY])
def test_a_core_dump_is_recorded_and_written_once(size: int, wrapped: Wrapped, tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    folder.mkdir()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (size, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    command = ("sh", "-c", "kill -SEGV $$; sleep 9")
    spawn = f"import os; print(os.WCOREDUMP(os.wait4(os.posix_spawnp('sh', {list(command)!r}, os.environ), 0)[1]))"
    expected = run_without_wrapper(*PYTHON, spawn, cwd=folder, preexec_fn=limit).stdout.strip() == b"True"
    before = len(list(folder.iterdir()))
    assert wrapped.run(*command, cwd=folder, preexec_fn=limit).returncode == -signal.SIGSEGV
    assert wrapped.record("exit")["core"] is expected
    assert len(list(folder.iterdir())) - before <= int(expected)


@pytest.mark.parametrize(
    ("program", "code", "error"),
    [
        ("no-such-program-anywhere", 127, "No such file or directory"),
        ("./missing", 127, "No such file or directory"),
        ("./plain.txt", 126, "Permission denied"),
        ("./folder", 126, "Permission denied"),
        ("./garbage", 126, "Exec format error"),
        ("./lost-interpreter", 127, "the interpreter that it names does not exist"),
    ],
)
def test_a_command_that_cannot_start_is_reported_and_recorded(
    program: str, code: int, error: str, wrapped: Wrapped, tmp_path: Path
) -> None:
    (tmp_path / "plain.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, text in (("garbage", "\0\1"), ("lost-interpreter", "#!/no/such/interpreter\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = wrapped.run(program, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.decode() == f"gpujob: worker_w0 rank 0: cannot start {program!r}: {error}\n"
    record = wrapped.record("exit")
    assert (record["code"], record["pid"]) == (code, None)
    assert record["error"] == f"cannot start {program!r}: {error}"
    assert not wrapped.record("start")


def test_a_stopped_and_continued_worker_keeps_its_exit_status(wrapped: Wrapped) -> None:
    child = wrapped.start("sh", "-c", "echo ready; read x; exit 5", stdin=subprocess.PIPE)
    assert line_of(child) == "ready"
    pid = wrapped.started()["pid"]
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        poll(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T", "stopped")
        os.kill(pid, signal.SIGCONT)
        poll(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "S", "continued")
    assert child.poll() is None
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 5


def test_an_exit_status_is_passed_on_when_sigchld_was_ignored(wrapped: Wrapped) -> None:
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = run_without_wrapper(*PYTHON, ignoring, *wrapped.argv("sh", "-c", "exit 5"))
    assert done.returncode == 5, done.stderr


# Inherited by the worker


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"LC_ALL": "C"},
        {"LANG": "C.UTF-8", "PYTHONPATH": "/nowhere", "PYTHONHASHSEED": "0"},
        {"LANG": "de_DE.ISO-8859-1", "LC_CTYPE": "POSIX"},
        {b"NAME": b"caf\xe9 \xff\xfe", b"EMPTY": b"", b"B": b"x=y=z", b"LINES": b"a\nb", b"\xe9": b"1"},
    ],
    ids=["no locale", "C", "UTF-8", "other", "any bytes"],
)
def test_the_environment_is_passed_on_byte_for_byte(given: Mapping[str | bytes, str | bytes], wrapped: Wrapped) -> None:
    environment = {b"PATH": os.environb[b"PATH"]} | {os.fsencode(name): os.fsencode(v) for name, v in given.items()}
    done = wrapped.run("cat", "/proc/self/environ", env=environment)
    assert done.stdout == b"".join(name + b"=" + value + b"\0" for name, value in environment.items())


def test_the_original_environment_is_read(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"A=1\0B=\0C==x\0\0NONSENSE\0=C:=x\0")
    assert original_environment(str(tmp_path / "environ")) == {b"A": b"1", b"B": b"", b"C": b"=x"}
    assert original_environment(str(tmp_path / "none")) == dict(os.environb)


@pytest.mark.parametrize(
    ("gpus", "inherited", "visible"),
    [
        ("0", None, b"0"),
        ("2,3", None, b"2,3"),
        ("", None, b""),
        ("", b"0,1", b""),
        ("0", b"4", b"4"),
        ("1,0", b"4,5,6,7", b"5,4"),
        ("2,3", b"4,5,6,7", b"6,7"),
        ("0,1", b"GPU-8f2c,GPU-77aa", b"GPU-8f2c,GPU-77aa"),
        ("1", b"MIG-1,MIG-2", b"MIG-2"),
        ("3", b"4,5", b"3"),
    ],
)
def test_gpus_of_the_plan_are_positions_among_inherited_devices(
    gpus: str, inherited: bytes | None, visible: bytes
) -> None:
    assert task_visible_devices(gpus, inherited) == visible


def test_a_task_sees_only_its_own_gpus(wrapped: Wrapped) -> None:
    def seen(options: tuple[str, ...], **variables: str) -> bytes:
        command = ("sh", "-c", 'echo "${CUDA_VISIBLE_DEVICES-unset}"')
        return wrapped.run(*command, options=options, env=clean_environment(**variables)).stdout.strip()

    assert seen(("--gpus", "2,3")) == b"2,3"
    assert seen(("--gpus", "2,3"), CUDA_VISIBLE_DEVICES="4,5,6,7") == b"6,7"
    assert seen(("--gpus", "")) == b""
    assert seen(()) == b"unset"
    assert seen((), CUDA_VISIBLE_DEVICES="4,5") == b"4,5"


def test_cuda_counts_devices_as_the_plan_does(wrapped: Wrapped) -> None:
    """In the order of the bus, like NVML; by default CUDA puts the fastest first."""

    def order(**variables: str) -> bytes:
        command = ("sh", "-c", 'echo "${CUDA_DEVICE_ORDER-unset}"')
        return wrapped.run(*command, options=("--gpus", "0"), env=clean_environment(**variables)).stdout.strip()

    assert order() == b"PCI_BUS_ID"
    assert order(CUDA_DEVICE_ORDER="FASTEST_FIRST") == b"FASTEST_FIRST"
    assert order(CUDA_VISIBLE_DEVICES="GPU-8f2c") == b"unset"


PRINT_ATTRIBUTES = """
import json, os, resource, signal
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    **{key: status[key] for key in ("Umask", "SigBlk", "Cpus_allowed_list", "NoNewPrivs", "CapEff")},
    "limits": open("/proc/self/limits").read(),
    "nice": os.nice(0),
    "cwd": os.getcwd(),
    "oom": open("/proc/self/oom_score_adj").read(),
    "personality": open("/proc/self/personality").read() if os.access("/proc/self/personality", os.R_OK) else "",
    "descriptors": sorted(entry for entry in os.listdir("/proc/self/fd")),
    "tty": [os.isatty(number) for number in (0, 1, 2)],
    "session": os.getsid(0) == os.getsid(os.getppid()),
    "group": os.getpgrp() == os.getpgid(os.getppid()),
}))
"""
PRINT_ATTRIBUTES_ARGV = [sys.executable, "-I", "-S", "-c", PRINT_ATTRIBUTES]


def test_process_attributes_are_passed_on(wrapped: Wrapped, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    opening_7 = ("sh", "-c", 'exec "$@" 7>/dev/null', "sh")

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGWINCH, signal.SIGRTMIN + 1})
        for number in (signal.SIGHUP, signal.SIGQUIT):  # as nohup(1) does
            signal.signal(number, signal.SIG_IGN)
        os.umask(0o027)
        os.nice(3)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    given: dict[str, Any] = {"cwd": folder, "preexec_fn": prepare, "stdin": subprocess.DEVNULL}
    done = run_without_wrapper(*opening_7, *wrapped.argv(*PRINT_ATTRIBUTES_ARGV), **given)
    plain = run_without_wrapper(*opening_7, *PRINT_ATTRIBUTES_ARGV, **given)
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    seen = json.loads(done.stdout)
    assert (seen["Umask"], seen["nice"], seen["cwd"]) == ("0027", os.nice(0) + 3, str(folder))
    assert "7" in seen["descriptors"]


@pytest.mark.parametrize("restore_signals", [True, False])
def test_ignored_signals_stay_ignored_except_those_of_python(restore_signals: bool, wrapped: Wrapped) -> None:
    def ignored(argv: list[str]) -> int:
        def prepare() -> None:
            for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):  # as nohup(1) and `&` of a shell do
                signal.signal(number, signal.SIG_IGN)

        status = run_without_wrapper(*argv, preexec_fn=prepare, restore_signals=restore_signals).stdout.decode()
        return int(status.partition("SigIgn:")[2].split()[0], 16)

    given = ignored(["cat", "/proc/self/status"])
    python_signals = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert bool(given & python_signals) is not restore_signals
    assert ignored(wrapped.argv("cat", "/proc/self/status")) & ~GLIBC_OWN == given & ~python_signals & ~GLIBC_OWN


def test_a_broken_pipe_ends_the_worker(wrapped: Wrapped) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = wrapped.run("sh", "-c", "echo x; echo x >&2", stdout=writing, capture_output=False, restore_signals=False)
    os.close(writing)
    assert done.returncode == -signal.SIGPIPE


def in_a_terminal(argv: list[str], cwd: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program with its own controlling terminal; return it and the other end."""
    terminal, child_terminal = os.openpty()
    child = subprocess.Popen(
        ["setsid", "--ctty", *argv],
        stdin=child_terminal,
        stdout=child_terminal,
        stderr=child_terminal,
        cwd=cwd,
        env=clean_environment(),
    )
    os.close(child_terminal)
    return child, terminal


def read_until(terminal: int, text: str, timeout: float = 60.0) -> str:
    """Output of a terminal up to and including a text."""
    seen, end = "", time.monotonic() + timeout
    while text not in seen:
        assert readable(terminal, end - time.monotonic()), f"{text!r} not within {timeout:g} s: {seen!r}"
        try:
            seen += os.fsdecode(os.read(terminal, 4096))
        except OSError:
            break  # the other end is closed
    return seen


def test_the_worker_controls_the_terminal(wrapped: Wrapped, tmp_path: Path) -> None:
    program = PRINT_ATTRIBUTES + (
        "\nprint('foreground', os.tcgetpgrp(0) == os.getpgrp(), flush=True)\nprint('read', input()[::-1], flush=True)"
    )
    child, terminal = in_a_terminal(wrapped.argv(*PYTHON, program), tmp_path)
    wrapped.children.append(child)
    shown = read_until(terminal, "foreground True")
    attributes = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    assert (attributes["tty"], attributes["session"], attributes["group"]) == ([True] * 3, True, True)
    os.write(terminal, b"abc\n")
    assert "read cba" in read_until(terminal, "read cba")
    assert child.wait(60) == 0
    os.close(terminal)


def test_ctrl_c_reaches_the_worker_once(wrapped: Wrapped, tmp_path: Path) -> None:
    child, terminal = in_a_terminal(wrapped.argv(*PYTHON, SHOW_SIGNALS), tmp_path)
    wrapped.children.append(child)
    read_until(terminal, "ready")
    os.write(terminal, b"\x03")
    shown = read_until(terminal, "2\r\n")
    pid = wrapped.started()["pid"]
    os.kill(pid, signal.SIGTERM)
    shown += read_until(terminal, "15\r\n")
    assert child.wait(60) == 7
    os.close(terminal)
    assert re.findall(r"(\d+)\r\n", shown) == ["2", "15"]
    assert [entry[1] for entry in wrapped.record("exit")["signals"]] == [signal.SIGINT]


# Signals


def test_each_signal_is_forwarded_once(wrapped: Wrapped) -> None:
    child = wrapped.start(*PYTHON, SHOW_SIGNALS)
    assert line_of(child) == "ready"
    wrapped.started()
    sent = [
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGWINCH,
    ]
    sent += [signal.SIGURG, signal.SIGXCPU, signal.SIGCONT, signal.SIGUSR1]
    for number in sent:
        child.send_signal(number)
        assert line_of(child) == str(int(number))
    for _ in range(3):  # these queue
        child.send_signal(signal.SIGRTMIN + 2)
    child.send_signal(signal.SIGRTMAX)
    queued = [line_of(child) for _ in range(4)]
    assert sorted(queued) == sorted([str(signal.SIGRTMIN + 2)] * 3 + [str(int(signal.SIGRTMAX))])
    child.send_signal(signal.SIGTERM)
    assert line_of(child) == "15"
    assert child.wait(60) == 7
    assert child.stdout is not None
    assert child.stdout.read() == b""
    record = wrapped.record("exit")
    assert [entry[1] for entry in record["signals"]] == [*sent, *map(int, queued), signal.SIGTERM]
    assert {entry[2] for entry in record["signals"]} == {os.getpid()}
    assert (record["code"], record["signal"]) == (7, None)


def test_a_signal_that_ends_the_worker_also_ends_the_wrapper(wrapped: Wrapped) -> None:
    child = wrapped.start("sleep", "60")
    wrapped.started()
    child.terminate()
    assert child.wait(60) == -signal.SIGTERM
    assert wrapped.record("exit")["signal"] == signal.SIGTERM


def test_a_signal_that_the_worker_ignores_does_not_end_the_wrapper(wrapped: Wrapped) -> None:
    child = wrapped.start("sh", "-c", "trap '' TERM; echo ready; read x; exit 4", stdin=subprocess.PIPE)
    assert line_of(child) == "ready"
    wrapped.started()
    for _ in range(3):
        child.terminate()
    assert child.stdin is not None
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 4
    assert {entry[1] for entry in wrapped.record("exit")["signals"]} == {signal.SIGTERM}


def test_a_worker_of_another_user_is_waited_for(wrapped: Wrapped) -> None:
    refuse = """
import os, runpy
def kill(pid, number):
    raise PermissionError(1, "Operation not permitted")
os.kill = kill
runpy.run_module("launcher.programs.wrapper", run_name="__main__", alter_sys=True)
"""
    arguments = wrapped.argv("sh", "-c", "echo ready; read x; exit 4")[4:]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-I", "-c", refuse, *arguments], env=clean_environment(), **pipes) as child:
        assert line_of(child) == "ready"
        wrapped.started()
        child.terminate()
        child.communicate(b"\n", timeout=60)
    assert child.returncode == 4
    record = wrapped.record("exit")
    assert (record["code"], [entry[1] for entry in record["signals"]]) == (4, [signal.SIGTERM])


def start_saving(wrapped: Wrapped, *before: str) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """Start a program with a child behind these words; return the wrapper and the pids of both."""
    wrapper = wrapped.start(*before, *PYTHON, SAVES_WITH_A_CHILD)
    wrapped.started()
    pids = {name: int(pid) for name, pid in (line_of(wrapper).split() for _ in range(2))}
    wrapped.pids.update(pids.values())
    wrapper.terminate()
    return wrapper, pids


def test_programs_behind_shells_get_sigterm_once_after_their_parents_and_are_waited_for(wrapped: Wrapped) -> None:
    wrapper, _ = start_saving(wrapped, *SHELL, *SHELL)
    assert line_of(wrapper) == "parent 15"
    assert not wrapped.record("exit")
    wrapper.send_signal(signal.SIGUSR1)
    assert [line_of(wrapper) for _ in range(2)] == ["parent 10", "child 15"]
    assert wrapper.wait(60) == -signal.SIGTERM
    assert wrapper.stdout is not None
    assert wrapper.stdout.read() == b""
    assert wrapped.record("exit")["signal"] == signal.SIGTERM


def test_a_kill_ends_the_wait_for_what_a_worker_has_left(wrapped: Wrapped) -> None:
    wrapper, pids = start_saving(wrapped, *SHELL)
    assert line_of(wrapper) == "parent 15"
    os.kill(pids["parent"], signal.SIGKILL)
    assert wrapper.wait(60) == -signal.SIGTERM
    os.kill(pids["child"], signal.SIGUSR1)
    assert line_of(wrapper) == "child 10"


def test_a_program_in_a_session_of_its_own_is_not_waited_for(wrapped: Wrapped) -> None:
    wrapper, pids = start_saving(wrapped, *SHELL, "setsid")
    assert wrapper.wait(60) == -signal.SIGTERM
    os.kill(pids["parent"], signal.SIGUSR1)
    assert line_of(wrapper) == "parent 10"


def test_an_orphan_that_ignores_sigterm_is_killed_with_its_children(wrapped: Wrapped) -> None:
    worker = "trap '' TERM; sleep 99 & echo $!; wait; wait"
    argv = wrapped.argv("sh", "-c", worker, options=("--kill-wait", "0.5"))
    parent = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    child = subprocess.Popen([sys.executable, "-c", parent, *argv], stdout=subprocess.PIPE, env=clean_environment())
    wrapped.children.append(child)
    sleeper, started = int(line_of(child)), wrapped.started()
    os.kill(started["wrapper_pid"], signal.SIGTERM)
    time.sleep(1.0)
    assert not wrapped.record("exit"), "it has a parent, who decides"
    child.kill()
    child.wait(60)
    os.kill(started["wrapper_pid"], signal.SIGTERM)
    assert poll(lambda: wrapped.record("exit"), "an exit record")["signal"] == signal.SIGKILL
    poll(
        lambda: not any(read_start_ticks(pid) and not is_zombie(pid) for pid in (sleeper, started["wrapper_pid"])),
        "the end of all",
    )


# Records


def test_records_have_identity_times_place_and_resource_use(wrapped: Wrapped) -> None:
    before = time.time()
    variables = clean_environment(GPUJOB_NODE="cn07", SLURM_STEP_ID="3")
    options = ("--attempt", "1", "--restart", "2")
    child = wrapped.start(
        *PYTHON, "x = b'x' * 30_000_000; [i for i in range(10**6)]; print('up', flush=True); input()",
        options=options, env=variables, stdin=subprocess.PIPE,
    )  # fmt: skip
    assert line_of(child) == "up"
    start = poll(lambda: wrapped.record("start", 1, 2), "a start record")
    assert start["start_ticks"] == read_start_ticks(start["pid"])
    assert Path(f"/proc/{start['pid']}/stat").read_text().split()[3] == str(child.pid)
    child.communicate(b"\n", timeout=60)
    ended = wrapped.record("exit", 1, 2)
    same = ("schema", "worker", "rank", "attempt", "restart", "host", "node", "step", "pid", "wrapper_pid", "start")
    assert {key: start[key] for key in same} == {key: ended[key] for key in same}
    assert [start[key] for key in ("schema", "worker", "rank", "attempt", "restart")] == [1, "worker_w0", 0, 1, 2]
    assert [start[key] for key in ("host", "node", "step", "wrapper_pid")] == [
        *(os.uname().nodename, "cn07", "3", child.pid)
    ]
    assert start["pid_namespace"] == os.stat("/proc/self/ns/pid").st_ino
    assert before <= ended["start"] <= ended["end"] <= time.time()
    # the kernel splits the exact sum by its ticks, so that a short run may seem to be all system
    assert ended["user_seconds"] + ended["system_seconds"] > 0.02
    assert min(ended["user_seconds"], ended["system_seconds"]) >= 0.0
    assert 30_000_000 < ended["max_rss_bytes"] < 200_000_000
    assert min(ended["io_read_bytes"], ended["io_write_bytes"]) >= 0
    assert ended["signals"] == []
    assert sorted(path.name for path in (wrapped.run_dir / "workers").iterdir()) == [
        "worker_w0_rank0_a1_r2.exit.json",
        "worker_w0_rank0_a1_r2.start.json",
    ]


def test_a_missing_run_directory_does_not_affect_the_worker(wrapped: Wrapped) -> None:
    (wrapped.run_dir / "workers").rmdir()
    done = wrapped.run("sh", "-c", "echo out; exit 6")
    assert (done.returncode, done.stdout) == (6, b"out\n")
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("gpujob: cannot write ") and "No such file" in line for line in lines)


def test_a_file_size_limit_of_0_does_not_affect_the_worker(wrapped: Wrapped) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may grow

    argv = wrapped.argv("sh", "-c", "sleep 0.2; echo out; exit 6")
    argv.insert(1, "-B")  # otherwise a partial byte code file may be left
    done = run_without_wrapper(*argv, preexec_fn=fill)
    assert (done.returncode, done.stdout) == (6, b"out\n")
    assert list((wrapped.run_dir / "workers").iterdir()) == []
    assert done.stderr.count(b"File too large") == 2


@pytest.mark.parametrize("target", ["/dev/full", None])
def test_a_log_that_cannot_be_written_does_not_affect_the_worker(target: str | None, wrapped: Wrapped) -> None:
    (wrapped.run_dir / "workers").rmdir()
    redirect = f"2>{target}" if target else "2>&-"
    done = run_without_wrapper("sh", "-c", f'exec "$@" {redirect}', "sh", *wrapped.argv("sh", "-c", "echo out; exit 6"))
    assert (done.returncode, done.stdout) == (6, b"out\n")


# Logs

LOGS = ("--stdout", "n1_w0.out", "--stderr", "n1_w0.err")
PRINTS = ("sh", "-c", "echo out; echo err >&2")


def test_output_is_appended_to_the_logs_of_the_worker(wrapped: Wrapped) -> None:
    out, err = (wrapped.run_dir / name for name in LOGS[1::2])
    out.write_text("earlier\n")
    done = wrapped.run(*PRINTS, options=LOGS, umask=0o027)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (out.read_text(), err.read_text()) == ("earlier\nout\n", "err\n")
    assert err.stat().st_mode & 0o777 == 0o640


def test_a_log_that_cannot_be_opened_leaves_the_output_of_the_step(wrapped: Wrapped) -> None:
    out, err = (wrapped.run_dir / name for name in LOGS[1::2])
    out.symlink_to(wrapped.run_dir / "elsewhere")  # by another who may write there
    done = wrapped.run(*PRINTS, options=LOGS)
    assert (done.returncode, done.stdout, err.read_text()) == (0, b"out\n", "err\n")
    assert done.stderr.startswith(b"gpujob: worker_w0 rank 0: cannot open n1_w0.out: ")
    assert not (wrapped.run_dir / "elsewhere").exists()


# Cost


def test_the_waiting_wrapper_uses_little_memory(wrapped: Wrapped) -> None:
    child = wrapped.start("sh", "-c", "echo ready; exec sleep 60")
    assert line_of(child) == "ready"
    wrapped.started()
    status = Path(f"/proc/{child.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    rss = int(fields["VmRSS"].split()[0]) * 1024
    print(f"the wrapper waits in {rss / 1024 / 1024:.1f} MiB")
    assert rss <= MOST_RSS_BYTES, f"{rss / 1024 / 1024:.1f} MiB"
    assert fields["Threads"].strip() == "1"


def test_the_wrapper_delays_the_start_only_a_little(wrapped: Wrapped) -> None:
    delays = []
    for _ in range(3):
        before = time.monotonic()
        done = wrapped.run(*PYTHON, "import time; print(time.monotonic())")
        through = float(done.stdout) - before
        before = time.monotonic()
        delays.append(
            through - (float(run_without_wrapper(*PYTHON, "import time; print(time.monotonic())").stdout) - before)
        )
    print(f"the wrapper delays the start by {min(delays) * 1000:.0f} ms")
    assert min(delays) < 1.0


def test_user_packages_with_our_names_are_not_imported(wrapped: Wrapped, tmp_path: Path) -> None:
    for name in ("launcher", "exporter", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    done = wrapped.run("sh", "-c", "exit 3", cwd=tmp_path, env=clean_environment(PYTHONPATH=str(tmp_path)))
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--run-dir", "x", "--"], ["--worker", "a", "--rank", "0", "--", "x"], ["--run-dir", "x", "--worker"]],
)
def test_invalid_arguments_are_refused(arguments: list[str]) -> None:
    done = run_without_wrapper(sys.executable, "-I", "-m", "launcher.programs.wrapper", *arguments)
    assert done.returncode == 1
    assert b"launcher.programs.wrapper" in done.stderr
