"""Search for worker processes of an attached job: by pid file, Slurm variables or job name.

It considers processes of this user, except this one and its ancestors. A process is identified by pid and start time,
because pids are reused. It reads only the environment variables named here, and keeps only numbers from them.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest, WorkerSearchPlan
from exporter.machine.procfs import CLOCK_TICKS, parse_process_stat, read_environment

MOST_PROCESSES = 65536
MOST_ARGUMENT_BYTES = 65536
MOST_PID_FILE_BYTES = 65536
LARGEST_PID = 1 << 22
UNFINISHED_S = 2.0  # age below which a last pid without separator may be incomplete
CLOCK_SLACK_S = 300.0  # how far the clock of a file server may lag behind: Kerberos allows no more
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's batch, extern and interactive steps have numbers from here on (slurm.h)

PID_FILE_NAME = "worker_pids.txt"


def _name_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHELLS = _name_set("sh bash dash zsh ksh mksh fish csh tcsh ash busybox slurm_script")
STARTERS = _name_set(
    """
    accelerate accelerate.commands.launch apptainer conda deepspeed deepspeed.launcher.launch docker doas enroot env
    horovodrun hydra_pmi_proxy ionice ltrace make mamba mpiexec mpiexec.hydra mpirun ncu nice nohup nsys numactl orterun
    parallel podman poetry prted prterun setsid singularity stdbuf strace su sudo taskset time timeout torchrun
    torch.distributed.launch torch.distributed.run uv xargs
    """
)  # programs that start workers and wait: they have the job's name, but do no work
BYSTANDERS = _name_set(
    """
    ag atop awk bat cat code code-server cp curl dtach du ed egrep emacs emacsclient exporter fgrep find fzf gawk gdb
    git glances gpujob gpujob-exporter gpujob_entry gpustat grep gzip head htop hx inotifywait ipython joe journalctl jq
    jupyter jupyter-lab jupyter-notebook kate kill launcher launcher.attach.prepare less ls lsof man mawk mc micro more
    mosh mosh-server most mv nano ncdu node nvidia-smi nvim nvitop pdsh perf pgrep pkill ps pstree py-spy rclone rg rm
    rsync sacct salloc sattach sbatch scancel scontrol scp screen script sed sftp sleep squeue srun ssh sshd sshfs sstat
    stat tail tar tee tensorboard tmux top touch vi view vim vimdiff visidata watch wc wget xxd zip zstd
    """
)  # programs whose command line may contain a job's name because they view, copy or submit something

_NUMBER_FLAGS = _name_set("--worker-id --worker_id --worker --rank --shard --local_rank --local-rank")
_NUMBER_VARIABLES = ("RANK", "LOCAL_RANK", "GPUJOB_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process at one reading; ``words``: command line, empty for other users and zombies."""

    pid: int
    parent: int
    start_ticks: int
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerCandidate:
    """A process that is probably a worker."""

    pid: int
    start_ticks: int
    start: float  # epoch seconds
    found_by: str  # `pid_file`, `slurm_step` or `name`
    number: int | None = None  # worker number from 0; None if only the order of candidates decides
    directory: str | None = None  # working directory; None if unreadable
    session: int | None = None  # session that started it
    command: str = ""  # program and first argument, for display

    def is_related(self, directory: str | None, session: int | None) -> bool:
        """Whether it has this working directory or session."""
        same_directory = directory is not None and self.directory == directory
        return same_directory or (session is not None and self.session == session)


@dataclass(frozen=True)
class WorkerSearchResult:
    """Result of one search; candidates of one method are in the order of the workers."""

    candidates: tuple[WorkerCandidate, ...] = ()
    gone: Mapping[int, str] = field(default_factory=dict)  # by worker: why its process in the pid file is not usable
    problems: tuple[str, ...] = ()  # problems of the pid file


@dataclass(frozen=True)
class WorkerSearchCriteria:
    """Criteria for the workers of a job."""

    job_name: str
    gpus: tuple[tuple[int, ...], ...]  # one entry per worker of this node
    pid_file: Path
    must_exist: bool = False  # whether a missing pid file is a problem
    slurm_job_id: str | None = None
    workers: int = 0  # of the whole job, if it has several nodes

    @property
    def count(self) -> int:
        return max(self.workers, len(self.gpus))

    @classmethod
    def of_node(cls, manifest: Manifest, search: WorkerSearchPlan, node_index: int) -> "WorkerSearchCriteria":
        """The criteria for the workers of one node."""
        gpus = tuple(task.gpus for task in manifest.tasks_of(node_index))
        pid_file, workers = Path(search.pid_file), len(manifest.tasks)
        return cls(manifest.job_name, gpus, pid_file, search.must_exist, search.slurm_job_id, workers)


def read_boot_time() -> float:
    """Boot time in epoch seconds, more precise than the whole seconds of ``/proc/stat``."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def read_processes(proc: str = "/proc") -> dict[int, ProcessInfo]:
    """All visible processes by pid; command lines only for this user."""
    own, found = os.getuid(), dict[int, ProcessInfo]()
    with os.scandir(proc) as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            if len(found) >= MOST_PROCESSES:
                break
            process = read_process(int(entry.name), proc)
            if process is None:
                continue
            try:
                mine = entry.stat().st_uid == own
            except OSError:
                continue
            found[process.pid] = process if mine else ProcessInfo(process.pid, process.parent, process.start_ticks)
    return found


def read_process(pid: int, proc: str = "/proc") -> ProcessInfo | None:
    """Read one process; None if it does not exist."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as source:
            stat = parse_process_stat(source.read(4096))
    except (OSError, ValueError, IndexError):
        return None
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as source:
            text = source.read(MOST_ARGUMENT_BYTES)
    except OSError:
        text = b""
    argv = tuple(os.fsdecode(word) for word in text.rstrip(b"\0").split(b"\0")) if text else ()
    return ProcessInfo(pid, stat.parent, stat.start_ticks, argv)


def ancestors(pid: int, processes: Mapping[int, ProcessInfo]) -> set[int]:
    """All ancestors of a process."""
    found: set[int] = set()
    while pid in processes and (pid := processes[pid].parent) not in found and pid > 0:
        found.add(pid)
    return found


class WorkerSearch:
    """Search for the workers of one job, to be repeated."""

    def __init__(
        self,
        criteria: WorkerSearchCriteria,
        environ: Mapping[str, str],
        proc: str = "/proc",
        own_pid: int | None = None,
    ):
        self._criteria = criteria
        self._environ = environ
        self._proc = proc
        self._own_pid = own_pid if own_pid is not None else os.getpid()

    def find(self, known: Iterable[int] = (), *, by_name: bool = True) -> WorkerSearchResult:
        """Search now. ``known``: running workers, which are skipped with their ancestors and descendants.

        Names are ignored if a pid file names a worker.
        """
        boot, processes = read_boot_time(), read_processes(self._proc)
        barred = ancestors(self._own_pid, processes) | {self._own_pid}
        taken = set(known)
        named = read_pid_file(self._criteria, barred, boot, self._proc)
        candidates = [candidate for candidate in named.candidates if candidate.pid not in taken]
        taken |= {candidate.pid for candidate in candidates}
        later = find_by_slurm_step(processes, self._criteria, self._environ, barred, boot, self._proc)
        if by_name and not named.candidates:
            later += find_by_name(processes, self._criteria, self._environ, barred, boot, self._proc)
        above = set[int]().union(*(ancestors(pid, processes) for pid in taken))
        for candidate in later:
            parents = ancestors(candidate.pid, processes)
            if candidate.pid not in taken | above and not parents & taken:
                candidates.append(candidate)
                taken.add(candidate.pid)
                above |= parents
        return WorkerSearchResult(tuple(candidates), named.gone, named.problems)


def _make_candidate(
    process: ProcessInfo, found_by: str, number: int | None, boot_time: float, proc: str
) -> WorkerCandidate:
    start, pid = boot_time + process.start_ticks / CLOCK_TICKS, process.pid
    try:
        directory = os.readlink(f"{proc}/{pid}/cwd")
    except OSError:
        directory = None
    return WorkerCandidate(
        pid,
        process.start_ticks,
        start,
        found_by,
        number,
        directory,
        _session(process, proc),
        _command_text(process.argv),
    )


def _session(process: ProcessInfo, proc: str) -> int | None:
    """Session that started a process: that of its parent if it leads its own."""
    session = _read_session(process.pid, proc)
    if session != process.pid:
        return session
    return _read_session(process.parent, proc) if process.parent > 1 else None


def _read_session(pid: int, proc: str) -> int | None:
    try:
        with open(f"{proc}/{pid}/stat", "rb") as source:
            text = source.read(4096)
        session = int(text[text.rindex(b")") + 2 :].split(None, 4)[3])
    except (OSError, ValueError, IndexError):
        return None
    return session if session > 1 else None  # started outside this container, or by its first process


def _command_text(argv: Sequence[str]) -> str:
    """Program with its script or first argument; later arguments may be secret."""
    if not argv:
        return ""
    base, program = os.path.basename(argv[0]), program_name(argv)
    second = program if program != base else "".join(word for word in argv[1:2] if not word.startswith("-"))
    return "".join(character if character.isprintable() else "?" for character in f"{base} {second}".strip())[:60]


# -- pid file --------------------------------------------------------------------------------------


def parse_pids(text: str, *, is_complete: bool) -> list[int]:
    """Pids in worker order, separated by blanks, newlines or commas; raises ValueError otherwise.

    A last pid without separator is ignored unless the file is ``is_complete``.
    """
    entries = re.split(r"[\s,]+", text)
    if not is_complete:
        entries[-1] = ""
    pids = []
    for entry in filter(None, entries):
        if not (entry.isascii() and entry.isdigit() and len(entry) < 10 and 0 < int(entry) <= LARGEST_PID):
            raise ValueError(f"{entry[:40]!r} is not a process id")
        pids.append(int(entry))
    return pids


def read_pid_file(
    criteria: WorkerSearchCriteria, excluded: set[int], boot_time: float, proc: str = "/proc"
) -> WorkerSearchResult:
    """Processes named by the pid file, by position; none while the file is missing.

    A process that started after the last write to the file is not the one it means.
    """
    path, name = criteria.pid_file, criteria.pid_file.name
    try:
        with path.open("rb") as source:
            facts, text = os.fstat(source.fileno()), source.read(MOST_PID_FILE_BYTES)
        pids = parse_pids(text.decode("ascii", "replace"), is_complete=time.time() - facts.st_mtime > UNFINISHED_S)
    except FileNotFoundError:
        return WorkerSearchResult(problems=(f"{path}: does not exist",) if criteria.must_exist else ())
    except (OSError, ValueError) as error:
        return WorkerSearchResult(problems=(f"{path}: {getattr(error, 'strerror', None) or error}",))
    candidates, gone, seen = [], dict[int, str](), set[int]()
    for number, pid in enumerate(pids):
        process = read_process(pid, proc)
        if process is None:
            gone[number] = f"pid {pid} from {name} is gone"
        elif boot_time + process.start_ticks / CLOCK_TICKS > facts.st_mtime + CLOCK_SLACK_S:
            gone[number] = (
                f"pid {pid} from {name} seems to have ended: the process with that pid is newer than the file"
            )
        elif pid in excluded:
            gone[number] = f"pid {pid} from {name} is this program or one of its ancestors"
        elif pid in seen:
            gone[number] = f"pid {pid} is in {name} twice"
        else:
            candidates.append(_make_candidate(process, "pid_file", number, boot_time, proc))
        seen.add(pid)
    return WorkerSearchResult(tuple(candidates), gone)


# -- steps of a Slurm job --------------------------------------------------------------------------


def find_by_slurm_step(
    processes: Mapping[int, ProcessInfo],
    criteria: WorkerSearchCriteria,
    environ: Mapping[str, str],
    excluded: set[int],
    boot_time: float,
    proc: str = "/proc",
) -> list[WorkerCandidate]:
    """Topmost process of each task of the job's ordinary steps on this node, without our own step.

    Every task is a worker: a shell is watched with everything it starts.
    """
    if criteria.slurm_job_id is None:
        return []
    own_step = environ.get("SLURM_STEP_ID") if environ.get("SLURM_JOB_ID") == criteria.slurm_job_id else None
    tasks: dict[int, tuple[int, int]] = {}
    for pid, process in processes.items():
        values = read_environment(pid, _SLURM_VARIABLES, proc) if process.argv and pid not in excluded else None
        if values is None or values.get("SLURM_JOB_ID") != criteria.slurm_job_id:
            continue
        step, task = _parse_number(values.get("SLURM_STEP_ID")), _parse_number(values.get("SLURM_PROCID"))
        if step is None or task is None or step >= FIRST_SPECIAL_STEP or str(step) == own_step:
            continue
        tasks[pid] = (step, task)
    first: dict[tuple[int, int], ProcessInfo] = {}
    for pid, task_of in tasks.items():
        process = processes[pid]
        if tasks.get(process.parent) != task_of and (
            task_of not in first or process.start_ticks < first[task_of].start_ticks
        ):
            first[task_of] = process
    numbers = [task for _, task in first]
    # Each step counts from 0, and on a later node of a job the numbers start above 0.
    numbered = len(set(numbers)) == len(numbers) and all(number < criteria.count for number in numbers)
    return [
        _make_candidate(first[step, task], "slurm_step", task if numbered else None, boot_time, proc)
        for step, task in sorted(first)
    ]


# -- name of the job -------------------------------------------------------------------------------


def find_by_name(
    processes: Mapping[int, ProcessInfo],
    criteria: WorkerSearchCriteria,
    environ: Mapping[str, str],
    excluded: set[int],
    boot_time: float,
    proc: str = "/proc",
) -> list[WorkerCandidate]:
    """Processes with the job's name as a word of their command line, oldest first.

    Of a process and its descendants, the topmost counts: loaders are part of their worker. Editors, pagers, Slurm
    clients and similar programs never count. A process that started two or more numbered workers (a script,
    ``torchrun``, ``mpirun``) does not count, nor does an unnumbered shell or starter. Their numbered descendants count
    even without the name: ``bash launch.sh --job-name X`` and its ``python worker.py --worker-id 0``.
    """
    pattern = re.compile(rf"(?<![\w-]){re.escape(criteria.job_name)}(?![\w-])")
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    order = [pid for pid, process in processes.items() if process.parent not in processes]
    named: dict[int, bool] = {}
    under: set[int] = set()  # processes with the name, and their descendants, which may be workers
    for pid in order:  # grows during the loop: parents before children
        process = processes[pid]
        order += children.get(pid, ())
        program = program_name(process.argv)
        named[pid] = program not in BYSTANDERS and any(pattern.search(word) for word in process.argv)
        if named[pid] or process.parent in under:
            under.add(pid)
    numbers = {
        pid: _worker_numbers(processes[pid], criteria, environ, proc)
        for pid in under
        if pid not in excluded and program_name(processes[pid].argv) not in BYSTANDERS
    }
    chosen: dict[int, list[int]] = {}
    for pid in reversed(order):
        below = [found for child in children.get(pid, ()) for found in chosen.pop(child, ())]
        itself = pid in numbers and (named[pid] or bool(numbers[pid]))
        starter = program_name(processes[pid].argv) in SHELLS | STARTERS and not numbers.get(pid)
        chosen[pid] = below if not itself or starter or _are_distinguished(below, numbers) else [pid]
    candidates = sorted(
        (pid for found in chosen.values() for pid in found), key=lambda pid: (processes[pid].start_ticks, pid)
    )
    source = _most_distinguishing_source([numbers[pid] for pid in candidates])
    return [_make_candidate(processes[pid], "name", numbers[pid].get(source), boot_time, proc) for pid in candidates]


def program_name(argv: Sequence[str]) -> str:
    """Name of a program; for Python, its script or module."""
    if not argv or not argv[0].strip():
        return ""
    base = os.path.basename(argv[0].split()[0]).lstrip("-")
    if not re.fullmatch(r"(?:python|pypy)[\d.]*", base):
        return base
    rest = iter(argv[1:])
    for word in rest:
        if word == "-m":
            return next(rest, base)
        if word in ("-X", "-W"):
            next(rest, None)
        elif word == "-c":
            return base
        elif not word.startswith("-"):
            return os.path.basename(word)
    return base


def _worker_numbers(
    process: ProcessInfo, criteria: WorkerSearchCriteria, environ: Mapping[str, str], proc: str
) -> dict[str, int]:
    """Worker numbers in arguments and environment of a process, by source.

    Variables that we have with the same value are ignored: they do not identify a worker.
    """
    found: dict[str, int] = {}
    for at, word in enumerate(process.argv):
        flag, _, value = word.partition("=")
        if flag in _NUMBER_FLAGS:
            number = _parse_number(value or "".join(process.argv[at + 1 : at + 2]))
            if number is not None and number < criteria.count:
                found.setdefault("arguments", number)
    values = read_environment(process.pid, (*_NUMBER_VARIABLES, _GPUS_VARIABLE, "SLURM_STEP_ID"), proc) or {}
    if _parse_number(values.get("SLURM_STEP_ID")) is None:
        values.pop("SLURM_PROCID", None)  # of a batch script: 0 for everything it starts
    for name in _NUMBER_VARIABLES:
        number = _parse_number(values.get(name))
        if number is not None and number < criteria.count and values[name] != environ.get(name):
            found[name] = number
    devices = values.get(_GPUS_VARIABLE)
    if devices is not None and devices != environ.get(_GPUS_VARIABLE):
        ids = sorted(int(word) for word in devices.split(",") if _parse_number(word) is not None)
        owners = [index for index, gpus in enumerate(criteria.gpus) if gpus and sorted(gpus) == ids]
        if len(owners) == 1:
            found[_GPUS_VARIABLE] = owners[0]
    return found


def _parse_number(text: str | None) -> int | None:
    """A number without a sign; ``0/8``, as for a shard, is 0."""
    head = (text or "").partition("/")[0]
    return int(head) if head.isascii() and head.isdigit() and len(head) <= 10 else None


def _are_distinguished(pids: Sequence[int], numbers: Mapping[int, Mapping[str, int]]) -> bool:
    """Whether some source gives these processes at least two different numbers."""
    given: dict[str, set[int]] = {}
    for pid in pids:
        for source, number in numbers[pid].items():
            given.setdefault(source, set()).add(number)
    return any(len(distinct) > 1 for distinct in given.values())


def _most_distinguishing_source(numbers: Sequence[Mapping[str, int]]) -> str:
    """Source that distinguishes most processes; a source with one number for all is useless."""
    best, most = "", 0
    for source in ("arguments", *_NUMBER_VARIABLES, _GPUS_VARIABLE):
        said = [given[source] for given in numbers if source in given]
        if len(set(said)) > most and (len(set(said)) > 1 or len(said) == 1):
            best, most = source, len(set(said))
    return best
