"""Guess from /proc what the flags of an attached job do not say: workers, name, logs, GPUs, directories."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.attach.workers_reader import (
    BYSTANDERS,
    SHELLS,
    STARTERS,
    ProcessInfo,
    WorkerSearchCriteria,
    ancestors,
    find_by_name,
    find_by_slurm_step,
    program_name,
    read_boot_time,
    read_processes,
)
from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.analysis.users import listed_gpu_positions, parse_visible_devices
from exporter.gpus.inventory_reader import read_gpu_units
from exporter.gpus.records import Gpu
from exporter.machine.procfs import read_environment
from launcher.errors import LauncherError

MOST_WORKERS = 1024  # found by name, if nothing says how many there are
_OUTPUT_WORDS = ("output-dir", "output", "out-dir", "outdir", "out", "save-dir", "results-dir")
_CHECKPOINT_WORDS = ("checkpoint-dir", "checkpoints", "ckpt-dir", "save-path", "checkpoint-path")
_TEMPORARY = ("/tmp/", "/var/tmp/")  # noqa: S108 - only compared
_DATABASES = (".db", ".sqlite", ".sqlite3", "-journal", "-wal", "-shm")  # such as a program's history
_DEVICES = "CUDA_VISIBLE_DEVICES"
_NOT_FILES = ("/dev/", "/proc/", "/sys/", "/run/")
_GPU = re.compile(r"/dev/nvidia(\d+)")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)


class Sought(NamedTuple):
    """What the user has said about the processes."""

    pids: tuple[int, ...] = ()
    slurm_job_id: str | None = None
    job_name: str | None = None


@dataclass(frozen=True)
class JobGuess:
    """What is known of a running job; ``logs`` and ``gpus`` have those of each worker, GPUs as positions."""

    pids: tuple[int, ...]
    name: str
    directory: str
    logs: tuple[tuple[str, ...], ...]
    gpus: tuple[tuple[int, ...], ...] = ()  # empty if no worker has any
    output_dir: str | None = None
    checkpoint_dir: str | None = None

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """GPUs of all workers."""
        return tuple(dict.fromkeys(gpu for own in self.gpus for gpu in own))

    def lines(self) -> list[str]:
        """Lines that say what was guessed."""
        files = [path for paths in self.logs for path in paths]
        return [
            f"name: {self.name}",
            f"workers: {len(self.pids)} (pid {', '.join(map(str, self.pids))})",
            f"GPUs: {', '.join(map(str, self.gpu_ids)) or 'none'}",
            f"logs: {', '.join(files) or 'none, since the output goes to no file; see --log-dir and --log-pattern'}",
            f"working directory: {self.directory}",
            f"output: {self.output_dir or 'unknown; see --output-dir'}",
            *([f"checkpoints: {self.checkpoint_dir}"] if self.checkpoint_dir else []),
        ]


def guess_job(sought: Sought, environ: Mapping[str, str], proc: str = "/proc") -> JobGuess:
    """Find the processes that are sought, and guess. Raises LauncherError if there are none."""
    processes = read_processes(proc)
    barred = ancestors(os.getpid(), processes) | {os.getpid()}
    pids = _find_workers(sought, processes, barred, environ, proc)
    directory = _link(f"{proc}/{pids[0]}/cwd") or os.getcwd()
    argv, job, name, logs = processes[pids[0]].argv, sought.slurm_job_id, sought.job_name, _logs(pids, proc)
    if job is not None:
        name = name or (read_environment(pids[0], ("SLURM_JOB_NAME",), proc) or {}).get("SLURM_JOB_NAME")
    if job is not None and not any(logs):  # srun passes on the output of its tasks, so they have one file
        logs = (tuple(path for paths in _logs(_topmost(job, processes, barred, proc), proc) for path in paths),)
    return JobGuess(
        pids=tuple(pids),
        name=name or program_name(argv) or f"pid-{pids[0]}",
        directory=directory,
        logs=logs,
        gpus=_gpus(pids, proc),
        output_dir=_directory_word(argv, _OUTPUT_WORDS, directory) or _open_directory(pids, directory, proc),
        checkpoint_dir=_directory_word(argv, _CHECKPOINT_WORDS, directory),
    )


def _find_workers(
    sought: Sought, processes: Mapping[int, ProcessInfo], barred: set[int], environ: Mapping[str, str], proc: str
) -> list[int]:
    """Pids of the workers, in their order."""
    for pid in sought.pids:
        if pid not in processes:
            raise LauncherError(f"there is no process {pid} on this machine")
        if not processes[pid].argv:
            raise LauncherError(f"process {pid} belongs to another user, or has ended; only its owner can attach to it")
        if pid in barred:
            raise LauncherError(f"process {pid} is this command or has started it")
    if sought.pids:
        return list(dict.fromkeys(worker for pid in sought.pids for worker in _workers_below(pid, processes)))
    criteria = WorkerSearchCriteria(
        sought.job_name or "", (), Path(), slurm_job_id=sought.slurm_job_id, workers=MOST_WORKERS
    )
    facts = (processes, criteria, environ, barred, read_boot_time(), proc)
    if sought.slurm_job_id is not None:
        found = [candidate.pid for candidate in find_by_slurm_step(*facts)]
        top = () if found else _topmost(sought.slurm_job_id, processes, barred, proc)
        found += [worker for pid in top for worker in _workers_below(pid, processes)]
        subject = f"Slurm job {sought.slurm_job_id}"
    else:
        candidates = sorted(find_by_name(*facts), key=lambda one: (one.number is None, one.number or 0))
        found, subject = [candidate.pid for candidate in candidates], f"the job {sought.job_name!r}"
    if not found:
        raise LauncherError(
            f"this machine has no process of {subject} that is yours; run this on its node, or give pids"
        )
    return found


def _workers_below(pid: int, processes: Mapping[int, ProcessInfo]) -> list[int]:
    """The process, or what it runs if it is a shell or a program that starts workers."""
    if program_name(processes[pid].argv) not in SHELLS | STARTERS:
        return [pid]
    children = [
        child
        for child, process in sorted(processes.items())
        if process.parent == pid and process.argv and program_name(process.argv) not in BYSTANDERS
    ]
    return [worker for child in children for worker in _workers_below(child, processes)] or [pid]


def _topmost(job: str, processes: Mapping[int, ProcessInfo], barred: set[int], proc: str) -> list[int]:
    """Topmost processes of a Slurm job: its batch script and the tasks of its steps."""
    own = {
        pid
        for pid, process in processes.items()
        if process.argv
        and pid not in barred
        and (read_environment(pid, ("SLURM_JOB_ID",), proc) or {}).get("SLURM_JOB_ID") == job
    }
    return sorted(pid for pid in own if processes[pid].parent not in own)


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _logs(pids: Iterable[int], proc: str) -> tuple[tuple[str, ...], ...]:
    """Regular files that are descriptors 1 and 2. A file of several workers counts for the first."""
    taken: set[str] = set()
    found = []
    for pid in pids:
        links = dict.fromkeys(link for number in (1, 2) if (link := _link(f"{proc}/{pid}/fd/{number}")))
        own = tuple(link for link in links if link not in taken and _is_data_file(link))
        taken |= set(own)
        found.append(own)
    return tuple(found)


def _is_data_file(path: str) -> bool:
    return os.path.isabs(path) and not path.startswith(_NOT_FILES) and os.path.isfile(path)


def _gpus(pids: Iterable[int], proc: str) -> tuple[tuple[int, ...], ...]:
    """GPUs that each worker sees: those in its CUDA_VISIBLE_DEVICES, else those whose device it has opened."""
    listed, opened = [], []
    for pid in pids:
        listed.append((read_environment(pid, (_DEVICES,), proc) or {}).get(_DEVICES))
        opened.append({int(match[1]) for path in _open_files(pid, proc) if (match := _GPU.fullmatch(path))})
    units = read_gpu_units() if any(listed) or any(opened) else ()
    uuids, minors = [unit.uuid for unit in units], [_read_minor(unit, proc) for unit in units]
    found = []
    for text, own in zip(listed, opened, strict=True):
        if text is None:
            # Of several MIG instances of one device it is unknown which one is used.
            gpus = [minors.index(minor) for minor in own if minors.count(minor) == 1] if units else list(own)
            found.append(tuple(sorted(gpus)))
        elif units:
            found.append(tuple(at for at in listed_gpu_positions(text, uuids) if at is not None))
        else:
            found.append(tuple(int(device) for device in parse_visible_devices(text) if device.isdigit()))
    return tuple(found) if any(found) else ()


def _read_minor(gpu: Gpu, proc: str) -> int | None:
    """Number in the name of its device file, which need not be its position; None if it is unknown."""
    try:
        with open(
            f"{proc}/driver/nvidia/gpus/{gpu.pci_bus_id}/information", encoding="ascii", errors="replace"
        ) as file:
            found = _MINOR.search(file.read(4096))
    except OSError:
        return None
    return int(found[1]) if found else None


def _open_files(pid: int, proc: str) -> list[str]:
    try:
        names = os.listdir(f"{proc}/{pid}/fd")
    except OSError:
        return []
    return [link for name in names if (link := _link(f"{proc}/{pid}/fd/{name}"))]


def _directory_word(argv: Sequence[str], words: Sequence[str], directory: str) -> str | None:
    """The directory that an option of the command line names, such as ``--output-dir DIR``; None without one."""
    for at, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name.startswith("-") and name.lstrip("-").replace("_", "-") in words:
            value = value or "".join(argv[at + 1 : at + 2])
            if (path := os.path.normpath(os.path.join(directory, value))) and value and os.path.isdir(path):
                return path
    return None


def _open_directory(pids: Iterable[int], directory: str, proc: str) -> str | None:
    """The directory in which the workers have most files open for writing, besides their logs; None without any."""
    folders: Counter[str] = Counter()
    for pid in pids:
        for number in _descriptors_for_writing(pid, proc):
            path = _link(f"{proc}/{pid}/fd/{number}")
            if number > 2 and path is not None and _is_data_file(path) and _may_be_output(path, directory):
                folders[os.path.dirname(path)] += 1
    return folders.most_common(1)[0][0] if folders else None


def _may_be_output(path: str, directory: str) -> bool:
    """Whether a file is no database, nor hidden or temporary, for a program that works in ``directory``."""
    is_below = directory != "/" and path.startswith(f"{directory}/")
    if "/." in (path[len(directory) :] if is_below else path) or path.endswith(_DATABASES):
        return False
    return is_below or not path.startswith(_TEMPORARY)


def _descriptors_for_writing(pid: int, proc: str) -> list[int]:
    found = []
    try:
        for name in os.listdir(f"{proc}/{pid}/fdinfo"):
            with open(f"{proc}/{pid}/fdinfo/{name}", encoding="ascii") as source:
                flags = re.search(r"^flags:\s*([0-7]+)", source.read(4096), re.MULTILINE)
            if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                found.append(int(name))
    except (OSError, ValueError):
        pass  # it has just ended
    return found
