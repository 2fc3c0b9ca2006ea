"""Parent of one worker: records its pid and its end, forwards signals, and ends in the same way.

    python -I -m launcher.programs.wrapper --run-dir DIR --worker NAME --rank N [--attempt N] [--restart N]
                               [--stdout NAME] [--stderr NAME] [--gpus 0,1] [--service 1] [--ports 6100,7200]
                               [--step-file FILE] [--kill-wait S] -- COMMAND...

The worker inherits the environment, descriptors, terminal, limits, signal mask and signal dispositions. Only
``CUDA_VISIBLE_DEVICES`` is narrowed to the GPUs of the task, in the order of ``CUDA_DEVICE_ORDER``, and its output goes
to the logs with these names in the run directory. The wrapper ends with the same status or signal, so that Slurm sees
the worker's end.

Tasks of one step (MPI) have the same command line. ``SLURM_PROCID`` selects the task's entry in FILE: worker,
rank, command, logs, GPUs and variables.

Every worker has a wrapper, so it uses few imports, all from the standard library.
"""

import math
import os
import signal
import sys
import time

from exporter.contract import oom_kills, run_files
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from launcher.programs.environment import original_environment, restore_given
from launcher.programs.port_claims import claim_ports

MOST_SIGNALS = 100
CANNOT_EXECUTE, NOT_FOUND = 126, 127  # exit statuses of a shell for a command that did not start
_PR_SET_CHILD_SUBREAPER = 36

_FAULT_SIGNALS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGABRT,
}
FORWARDED_SIGNALS = (
    set(signal.valid_signals())
    - _FAULT_SIGNALS
    - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU}
    - {signal.SIGXFSZ}  # from the wrapper's own write beyond a file size limit
)


def task_visible_devices(gpus: str, inherited: bytes | None) -> bytes:
    """Map the plan's GPU positions (``0,1`` or empty) to devices for ``CUDA_VISIBLE_DEVICES``.

    Slurm's list may contain numbers or UUIDs and need not begin at 0. Without a list, positions are device
    numbers.
    """
    positions = [int(word) for word in gpus.split(",") if word]
    devices = inherited.split(b",") if inherited else []
    return b",".join(devices[at] if at < len(devices) else str(at).encode() for at in positions)


def read_available_bytes(path: str) -> int | None:
    """Space available to unprivileged users on the file system of ``path``."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def wait_forwarding(
    pid: int,
    signals: set[int],
    received: list[list[float]],
    orphan_s: float | None = None,
    *,
    await_leftovers: bool = False,
) -> tuple[int, object]:
    """Wait for ``pid`` and forward signals to it; return its wait status and rusage.

    ``signals`` are blocked signals, including SIGCHLD. A signal from the kernel (Ctrl-C in a terminal) also
    reaches the worker, in the same process group. It is noted in ``received`` but not forwarded.

    ``orphan_s`` after a SIGTERM, ``pid`` is killed if our parent has gone: nobody else would.

    After a SIGTERM, ``await_leftovers`` also waits for what ``pid`` leaves in this session, as a shell leaves the
    program that it runs. Each of these gets SIGTERM once, after its parent has ended. A SIGKILL ends the wait.
    """
    parent, kill_at = os.getppid(), math.inf
    waited, adopts = {pid}, False
    end: tuple[int, object] | None = None
    while end is None or waited:
        if kill_at == math.inf:
            info = signal.sigwaitinfo(signals)
        elif (timed := signal.sigtimedwait(signals, max(0.0, kill_at - time.monotonic()))) is not None:
            info = timed
        else:
            kill_at = math.inf
            for child in waited:
                send_signal(child, signal.SIGKILL)
            continue
        if info.si_signo != signal.SIGCHLD:
            record_signal(received, [time.time(), info.si_signo, info.si_pid])
            if info.si_signo == signal.SIGTERM and await_leftovers and not adopts:
                adopts = adopt_orphans()
            for child in waited:
                forward_signal(child, info)
            if info.si_signo == signal.SIGTERM and orphan_s is not None and os.getppid() != parent:
                kill_at = min(kill_at, time.monotonic() + orphan_s)
            continue
        while ended := [found for child in waited if (found := os.wait4(child, os.WNOHANG))[0]]:
            for child, status, usage in ended:
                waited.discard(child)
                end = (status, usage) if child == pid else end
                adopts = adopts and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
            if end is not None and not adopts:
                return end
            if end is not None:
                waited |= terminate_leftovers(waited)
    return end


def adopt_orphans() -> bool:
    """Become the parent of what the worker leaves behind; return whether that is possible."""
    try:
        import ctypes  # lazy: few workers are asked to end

        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError):
        return False


def terminate_leftovers(known: set[int]) -> set[int]:
    """Send SIGTERM to the children in this session that are not ``known``; return those that got it."""
    reached: set[int] = set()
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as source:
            found = set(map(int, source.read().split())) - known
    except OSError:
        return reached
    for child in found:
        try:
            if os.getsid(child) == os.getsid(0):
                os.kill(child, signal.SIGTERM)
                reached.add(child)
        except PermissionError:
            pass  # another user's, as that of ``sudo``
    return reached


def forward_signal(pid: int, info: signal.struct_siginfo) -> None:
    """Forward a signal to a child, unless it is from the kernel."""
    if info.si_code <= 0:
        send_signal(pid, info.si_signo)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a child, which may be another user's by now, as that of ``sudo``: then it is waited for."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # the former has just ended; SIGCHLD follows


def record_signal(received: list[list[float]], entry: list[float]) -> None:
    """Note a signal. Beyond ``MOST_SIGNALS``, keep the last of each kind: checkpoint signals may be many."""
    if len(received) >= MOST_SIGNALS:
        received[:] = [known for known in received if known[1] != entry[1]]
    received.append(entry)


def end_with_status(status: int) -> None:
    """End this process with this wait status, without a second core dump."""
    if os.WIFSIGNALED(status):
        import resource  # lazy: few workers end by a signal

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def start_worker(argv: list[str], environment: dict[bytes, bytes], mask: set[int]) -> int:
    """Start the worker with the signal mask and dispositions of this process; return its pid.

    An ignored SIGCHLD is restored for the worker only. Here it would make the kernel reap the worker, and its
    status would be lost.
    """
    own = [signal.SIGPIPE, signal.SIGXFSZ]  # ignored by the interpreter itself
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        return os.posix_spawnp(argv[0], argv, environment, setsigmask=mask, setsigdef=own)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number in own:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(argv[0], argv, environment)  # noqa: S606
        except OSError as error:
            os.write(write_end, str(error.errno).encode())
        finally:
            os._exit(CANNOT_EXECUTE)
    os.close(write_end)
    reason = os.read(read_end, 16)
    os.close(read_end)
    if reason:
        os.waitpid(pid, 0)
        raise OSError(int(reason), os.strerror(int(reason)))
    return pid


def apply_step_entry(options: dict[str, str], environment: dict[bytes, bytes]) -> list[str]:
    """Apply this task's entry of the step file to ``options`` and ``environment``; return its command."""
    entries = (run_files.read_json(options["step-file"]) or {}).get("tasks")
    task_index = os.environ.get("SLURM_PROCID", "")
    if not isinstance(entries, list) or not task_index.isdigit() or int(task_index) >= len(entries):
        sys.exit(f"gpujob: {options['step-file']} has no entry for task {task_index or 'without SLURM_PROCID'}")
    entry = entries[int(task_index)]
    node = os.environ.get("SLURMD_NODENAME", entry["node"])
    if node != entry["node"]:
        sys.exit(
            f"gpujob: task {task_index} of its step is on {node}, but was planned for {entry['node']}: "
            "Slurm did not distribute the tasks over the nodes in order (--distribution=block)"
        )
    options.update({"worker": entry["worker"], "rank": str(entry["rank"])})
    options.update({name: entry[name] for name in ("gpus", "ports", "stdout", "stderr") if name in entry})
    environment.update((os.fsencode(name), os.fsencode(value)) for name, value in entry["env"].items())
    return [str(word) for word in entry["argv"]]


def open_logs(options: dict[str, str]) -> None:
    """Write to the worker's logs from here on, or to the inherited output if a log cannot be opened.

    srun would write them on the node of the batch step, and a network file system shows those lines to the worker's
    node seconds later, when its sidecar has judged the end.
    """
    for descriptor, name in ((1, options.get("stdout")), (2, options.get("stderr"))):
        if name is None:
            continue
        try:
            with run_files.append_to(options["run-dir"], name) as log:
                os.dup2(log.fileno(), descriptor)
        except OSError as error:
            who = f"{options['worker']} rank {options['rank']}"
            _write_error(f"{who}: cannot open {name}: {error.strerror}; its lines go to the logs of the job instead")


def run_worker(argv: list[str], options: dict[str, str]) -> None:
    """Start the worker, wait for it, write its records and end like it."""
    environment = original_environment()
    if "step-file" in options:
        argv = apply_step_entry(options, environment)
    restore_given(environment)
    open_logs(options)
    worker, rank = options["worker"], int(options["rank"])
    attempt, restart = int(options.get("attempt", "0")), int(options.get("restart", "0"))
    folder = os.path.join(options["run-dir"], run_files.WORKERS_DIR)
    stem = os.path.join(folder, run_files.record_name(worker, rank, attempt, restart))
    common: dict[str, object] = {
        "schema": run_files.RECORD_SCHEMA,
        "worker": worker,
        "rank": rank,
        "attempt": attempt,
        "restart": restart,
        "host": os.uname().nodename,
        "node": os.environ.get("GPUJOB_NODE") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "step": os.environ.get("SLURM_STEP_ID"),
        "pid_namespace": read_pid_namespace(),
        "wrapper_pid": os.getpid(),
        "wrapper_start_ticks": read_start_ticks(os.getpid()),
    }
    if options.get("service"):
        common["service"] = True
    if "gpus" in options:
        name = b"CUDA_VISIBLE_DEVICES"
        environment[name] = task_visible_devices(options["gpus"], environment.get(name))
        if environment[name][:1].isdigit():  # numbers as NVML and the plan count; CUDA alone puts the fastest first
            environment.setdefault(b"CUDA_DEVICE_ORDER", b"PCI_BUS_ID")
    held = claim_ports(map(int, options["ports"].split(","))) if "ports" in options else []
    oom_before = oom_kills.read_oom_kills()
    waited = FORWARDED_SIGNALS | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    start = time.time()
    try:
        pid = start_worker(argv, environment, mask)
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
        is_there = code == NOT_FOUND and "/" in argv[0] and os.path.exists(argv[0])
        problem = "the interpreter that it names does not exist" if is_there else error.strerror
        message = f"cannot start {argv[0]!r}: {problem}"
        _write_error(f"{worker} rank {rank}: {message}")
        ended = {"pid": None, "code": code, "signal": None, "core": False, "error": message}
        _write(options["run-dir"], f"{stem}.exit.json", {**common, **ended, "start": start, "end": time.time()})
        os._exit(code)
    common.update({"pid": pid, "start_ticks": read_start_ticks(pid), "start": start})
    _write(options["run-dir"], f"{stem}.start.json", common)
    seen: list[list[float]] = []
    kill_wait, parent = options.get("kill-wait"), os.getppid()
    orphan_s = None if kill_wait is None else float(kill_wait)
    status, usage = wait_forwarding(pid, {int(number) for number in waited}, seen, orphan_s, await_leftovers=True)
    held.clear()
    signaled = os.WIFSIGNALED(status)
    oom_after = oom_kills.read_oom_kills()
    _write(
        options["run-dir"],
        f"{stem}.exit.json",
        {
            **common,
            "end": time.time(),
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "core": os.WCOREDUMP(status),
            "oom_kills": None if oom_after is None else oom_after - (oom_before or 0),
            "signals": seen,
            "disk_available_bytes": read_available_bytes(options["run-dir"]),
            "user_seconds": getattr(usage, "ru_utime", None),
            "system_seconds": getattr(usage, "ru_stime", None),
            "max_rss_bytes": getattr(usage, "ru_maxrss", 0) * 1024,
            "io_read_bytes": getattr(usage, "ru_inblock", 0) * 512,
            "io_write_bytes": getattr(usage, "ru_oublock", 0) * 512,
        },
        spare=f"{stem}.start.json",
    )
    if orphan_s is not None and os.WIFSIGNALED(status) and os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)  # what the worker has left, and this process
    end_with_status(status)


def _write(run_dir: str, path: str, record: dict[str, object], spare: str | None = None) -> None:
    """Write a record, or complain: a full disk must not hide how the worker ended.

    The report says that the disk was full. A line here, in the log of the worker, would pass for its own error.
    """
    try:
        run_files.write_json_with_reserve(run_dir, path, record, spare=spare)
    except OSError as error:
        if not run_files.is_full(error):
            _write_error(f"cannot write {path}: {error.strerror}")


def _write_error(message: str) -> None:
    """Write to standard error, ignoring a full disk or a closed descriptor."""
    try:
        os.write(2, f"gpujob: {message}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """Parse ``--name value`` pairs up to ``--`` by hand: argparse costs more than the rest."""
    if "--" not in arguments:
        sys.exit("usage: python -I -m launcher.programs.wrapper --run-dir DIR --worker NAME --rank N -- COMMAND...")
    split = arguments.index("--")
    pairs, argv = arguments[:split], arguments[split + 1 :]
    options = {name.removeprefix("--"): value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
    missing = {"run-dir", "worker", "rank"} - set(options)
    if missing or not argv:
        sys.exit(f"launcher.programs.wrapper: missing {', '.join(sorted(missing)) or 'the command after --'}")
    run_worker(argv, options)


if __name__ == "__main__":
    main(sys.argv[1:])
