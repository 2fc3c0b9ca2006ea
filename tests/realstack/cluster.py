"""A Slurm cluster on this machine for tests, started by ``slurm-cluster.sh``."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

from tests.realstack.waiting import wait_for

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "slurm-cluster.sh"
TEST_USER = os.environ.get("GPUJOB_TEST_USER", "gpujobtest")
ROOT = "root"

# After PREEMPTED, NODE_FAIL and BOOT_FAIL a job that may be requeued becomes PENDING again.
FINAL_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)

_MARK = b"gpujob-slurm-host"
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_SLURM_ROOT_VARIABLE = "GPUJOB_SLURM_ROOT"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv", "perl")
_ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct")
_SLURM_DAEMONS = frozenset({"slurmd", "slurmstepd"})


class ClusterError(RuntimeError):
    """A command of the cluster failed or did not end. The message has its output."""


def slurm_unavailable(accounting: bool = True) -> str | None:
    """Reason why no cluster can be started here, for a skip, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root (namespaces, slurmd)"
    required = _PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ())
    if slurm_root() is None and (missing := missing_programs(required)):  # a requested tree must have them
        return f"not installed: {', '.join(missing)} (run {HERE / 'packages.sh'})"
    namespaces = ["unshare", "--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "true"]
    attempt = subprocess.run(namespaces, capture_output=True, text=True, timeout=60)
    if attempt.returncode != 0:
        return f"no namespaces can be made here: {attempt.stderr.strip()}"
    return None


def slurm_root() -> Path | None:
    """The file tree of another Slurm for these tests (made by ``slurm-root.sh``), or None for that of this machine."""
    root = os.environ.get(_SLURM_ROOT_VARIABLE)
    return Path(root).resolve() if root else None


def missing_programs(names: Sequence[str]) -> list[str]:
    """Programs that are neither on PATH nor in the system folders."""
    path = f"{os.environ.get('PATH', '')}:{_PATH}"
    return [name for name in names if shutil.which(name, path=path) is None]


class Cluster:
    """Nodes ``node1`` to ``nodeN`` and a head; use it as a context manager, or call `up` and `down`.

    Every user must be able to enter `directory`, so pytest's tmp_path (0700 above it) will not do; take a
    folder in /tmp. Two clusters can run at once when their `prefix`, the nodes' name, differs. `root`, by default
    that of ``GPUJOB_SLURM_ROOT``, has another Slurm, and all commands run in it; of this machine they see /tmp,
    `directory`, and the users with the home of `user`.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 4,
        accounting: bool = True,
        *,
        cpus: int = 8,
        mem_mb: int = 2000,
        gpus: int = 4,
        cgroup: str = "auto",
        prefix: str = "node",
        user: str = TEST_USER,
        root: Path | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self.accounting = accounting
        self.user = user
        self.node_names = tuple(f"{prefix}{i}" for i in range(1, nodes + 1))
        self._settings = {
            "CLUSTER_DIR": str(self.directory),
            "NODES": str(nodes),
            "ACCOUNTING": str(int(accounting)),
            "CPUS": str(cpus),
            "MEM": str(mem_mb),
            "GPUS": str(gpus),
            "CGROUP": cgroup,
            "NODE_PREFIX": prefix,
            "TEST_USER": user,
            "SLURM_ROOT": str(root or slurm_root() or ""),
        }

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def log_dir(self) -> Path:
        """Logs of the daemons, kept after `down`."""
        return self.directory / "log"

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def enforces_memory(self) -> bool:
        """Whether a step over its memory limit is killed. This needs a memory cgroup."""
        return "ConstrainRAMSpace=yes" in (self.directory / "etc" / "cgroup.conf").read_text()

    # Life of the cluster and its nodes

    def up(self, timeout: float = 240) -> None:
        """Start everything and wait until all nodes are idle. On failure nothing is left running."""
        self._script("up", timeout=timeout)

    def down(self, timeout: float = 120) -> None:
        """End everything; no process, mount or control group is left. Safe to call twice."""
        self._script("down", timeout=timeout)

    def is_up(self) -> bool:
        return self._host_pid("head") is not None

    def kill_node(self, node: str) -> None:
        """Power cut: every process of the node dies at once."""
        self._script("kill-node", node)

    def stop_slurmd(self, node: str) -> None:
        """Send SIGKILL to the slurmd of a node only. Processes of its jobs continue."""
        self._script("stop-slurmd", node)

    def start_node(self, node: str) -> None:
        """Restart the node after `kill_node` or `stop_slurmd`."""
        self._script("start-node", node)

    # Commands

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        user: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float = 60,
        check: bool = False,
        in_root: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head as the test user (or `user`), in that user's home (or `cwd`).

        The environment is that of a fresh login plus `env`; nothing of the caller's gets in. `stdin` is text.
        With `check` an exit status other than 0 raises ClusterError. A command that does not end in time is
        killed with its process group, and ClusterError has what it printed. Without `in_root` it is a program of
        this machine, with its files, also where the cluster's are those of another tree.
        """
        return self._run("head", argv, user, cwd, env, stdin, timeout, check, in_root)

    def on(
        self,
        node: str,
        argv: Sequence[str | Path],
        *,
        user: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """`run` on a node, as ``ssh`` would, outside of any job."""
        return self._run(node, argv, user, cwd, env, stdin, timeout, check, in_root=True)

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        node: str = "head",
        user: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[str] | None = subprocess.DEVNULL,
        stdout: int | IO[str] | None = subprocess.PIPE,
        stderr: int | IO[str] | None = subprocess.PIPE,
        in_root: bool = True,
    ) -> subprocess.Popen[str]:
        """Start a command on the head (or `node`) and return at once.

        The process is an intermediary that ends as the command does, with the same status or signal. Do not
        signal it: use `signal`, which reaches the command.
        """
        name = user or self.user
        home = pwd.getpwnam(name).pw_dir
        return subprocess.Popen(
            [*self._enter(node, cwd or Path(home), in_root), *_as_user(name), *map(str, argv)],
            env=self._environment(name, home, env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
        )

    def signal(self, process: subprocess.Popen[str], signum: int) -> None:
        """Send a signal to a command started by `popen`, not to its children."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(
            lambda: process.poll() is not None or _started(children),
            60,
            f"process {process.pid} to start its command",
            interval=0.01,
        )
        if process.poll() is None:
            for pid in children.read_text().split():
                os.kill(int(pid), signum)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a command started by `popen` with its whole process group, and collect it."""
        _kill_group(process)

    def wait_for(self, predicate: Callable[[], T | None], timeout: float, what: str, *, interval: float = 0.1) -> T:
        """The first true value of `predicate`, or TimeoutError with `what` and the log directory."""
        return wait_for(predicate, timeout, what, logs=self.log_dir, interval=interval)

    # State

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node: ``idle``, ``mixed``, ``down*``, ..."""
        listed = self.run(["sinfo", "-h", "-N", "-o", "%N %T"], check=True).stdout
        return dict(line.split(maxsplit=1) for line in listed.splitlines())

    def node_processes(self, node: str, *, daemons: bool = False) -> list[tuple[int, str]]:
        """Pid on the node and command line of its processes, without init and, unless asked for, Slurm daemons.

        Zombies are omitted. Empty for a node without power.
        """
        init = self._host_pid(node)
        if init is None:
            return []
        try:
            namespace = os.readlink(f"/proc/{init}/ns/pid")
        except FileNotFoundError:
            return []
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "pid") != namespace:
                    continue
                status = dict(
                    line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line
                )
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="backslashreplace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has just ended, or is a hidden process of the machine
            pid = int(status["NSpid"].split()[-1])
            if pid == 1 or (status["Name"] in _SLURM_DAEMONS and not daemons):
                continue
            if not status["State"].startswith(("Z", "X")):
                found.append((pid, command.strip() or f"[{status['Name']}]"))
        return sorted(found)

    def job_state(self, job_id: int) -> str:
        """State of the job from the controller, which needs no accounting and remembers ended jobs for an hour.

        Components of a heterogeneous job have one line each; equal states are returned once.
        """
        shown = self.run(["squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%T"], check=True)
        return " ".join(dict.fromkeys(shown.stdout.split()))

    def wait_for_job(
        self,
        job_id: int,
        timeout: float,
        states: frozenset[str] | set[str] = FINAL_STATES,
        *,
        interval: float = 0.1,
    ) -> str:
        """Wait until the job is in one of `states`, by default a final one; return that state."""

        seen = ""

        def reached() -> str:
            nonlocal seen
            seen = self.job_state(job_id)
            return seen if seen in states else ""

        try:
            return self.wait_for(
                reached, timeout, f"job {job_id} to be {' or '.join(sorted(states))}", interval=interval
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the job is {seen}") from None

    def sacct(self, job_id: int, *fields: str) -> list[dict[str, str]]:
        """Accounting rows of the job and its steps, with these fields or JobID, JobName, State, ExitCode."""
        names = fields or ("JobID", "JobName", "State", "ExitCode")
        shown = self.run(["sacct", "-j", str(job_id), "-n", "-P", "-o", ",".join(names)], check=True)
        return [dict(zip(names, line.split("|"), strict=True)) for line in shown.stdout.splitlines()]

    # Internals

    def _script(self, *arguments: str, timeout: float = 120) -> None:
        settings = {**os.environ, **self._settings}
        process = subprocess.Popen(
            [str(SCRIPT), *arguments],
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            output = _end_script(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise ClusterError(
                f"{SCRIPT.name} {' '.join(arguments)} did not end within {timeout:g} s; logs: {self.log_dir}; "
                f"output: {output.strip()}"
            ) from error
        if process.returncode != 0:
            raise ClusterError(f"{SCRIPT.name} {' '.join(arguments)} failed: {output.strip()}")

    def _run(
        self,
        host: str,
        argv: Sequence[str | Path],
        user: str | None,
        cwd: Path | None,
        env: Mapping[str, str] | None,
        stdin: str | None,
        timeout: float,
        check: bool,
        in_root: bool,
    ) -> subprocess.CompletedProcess[str]:
        source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        process = self.popen(argv, node=host, user=user, cwd=cwd, env=env, stdin=source, in_root=in_root)
        shown = " ".join(map(str, argv))
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            stdout, stderr = _kill_group(process)
            raise ClusterError(
                f"{host}: {shown}: did not end within {timeout:g} s; logs: {self.log_dir}\n"
                f"stdout: {stdout}\nstderr: {stderr}"
            ) from error
        except BaseException:
            _kill_group(process)
            raise
        if check and process.returncode != 0:
            raise ClusterError(f"{host}: {shown}: exit status {process.returncode}\nstdout: {stdout}\nstderr: {stderr}")
        return subprocess.CompletedProcess([str(a) for a in argv], process.returncode, stdout, stderr)

    def _host_pid(self, host: str) -> int | None:
        """Pid of the init of a host, or None if the host is not running."""
        try:
            pid = int((self.directory / "run" / f"{host}.init.pid").read_text())
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        return pid if _MARK in arguments else None

    def _enter(self, host: str, cwd: Path, in_root: bool) -> list[str]:
        pid = self._host_pid(host)
        if pid is None:
            raise ClusterError(f"{host} is not running ({self.directory})")
        root = ["--root"] if in_root else []
        return ["nsenter", "--target", str(pid), "--net", "--uts", "--pid", "--mount", *root, f"--wdns={cwd}", "--"]

    def _environment(self, user: str, home: str, extra: Mapping[str, str] | None) -> dict[str, str]:
        return {
            "HOME": home,
            "LANG": "C.UTF-8",
            "LOGNAME": user,
            "PATH": _PATH,
            "SHELL": "/bin/bash",
            "SLURM_CONF": str(self.slurm_conf),
            "USER": user,
            **(extra or {}),
        }


def _as_user(name: str) -> list[str]:
    if name == ROOT:
        return []
    user = pwd.getpwnam(name)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups", "--"]


def _started(children: Path) -> bool:
    """Whether the intermediary has a child and that child has become the command itself."""
    try:
        pids = children.read_text().split()
        return bool(pids) and all(
            Path(f"/proc/{pid}/comm").read_text().strip() not in {"nsenter", "setpriv"} for pid in pids
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def _end_script(process: subprocess.Popen[str]) -> str:
    """End a script early, with time to undo an `up`; return its output."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        output, _ = _kill_group(process)
    return output


def _kill_group(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill the process group, collect the process, and return what it had printed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        stdout, stderr = process.communicate(timeout=15)
    except subprocess.TimeoutExpired:  # a child with its own session keeps the pipes open
        return "", ""
    return stdout or "", stderr or ""
