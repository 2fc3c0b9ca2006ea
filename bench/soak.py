"""Nothing grows: a real local job whose workers come and go, with logs that rotate and files that come and go.

Every process that lasts as long as the job is measured, while the page is scraped each second. Descriptors, threads
and files must stay, and memory by a robust slope after a warm-up. What each run leaves does not count as a file: its
records and its logs are the record of the job.
"""

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.clock import Figures, cpu_s, rss_mib
from exporter.contract import run_files
from exporter.machine.procfs import read_children

SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
WORKERS = 32
LIFE_S = 160.0  # mean life of a worker: 12 restarts a minute
WARM_UP_S = 600.0
MEMORY_S = 600.0  # after the warm-up; a shorter run shows no slope, and has no goal for it
MOST_MIB_PER_HOUR = 0.5
MOST_MORE = {"more_descriptors": 5.0, "more_threads": 1.0}  # of workers that are just starting or ending
MOST_MORE_FILES = 5
MOST_MORE_STATUS = 0.2  # share
SAMPLE_S = 2.0
LASTING_S = 10.0  # what is open this long after it was seen is not just that of a worker which starts or ends

PARTS = {
    "launcher.programs.supervisor": "supervisor",  # before the sidecar, whose command is part of its own
    "exporter sidecar": "sidecar",
    "launcher.run.orchestrator": "orchestrator",
    "launcher.guard": "guard",
}
"""Processes that last as long as the job, by words of their commands."""
COUNTER = re.compile(r"^(\w+_total(?:\{[^}]*\})?) (\S+)", re.MULTILINE)
RESTARTS = "gpujob_worker_restarts_total"
OF_PROCESS = re.compile(r"^(?:/proc/|Pid:\s+)(\d+)", re.MULTILINE)
OF_A_RUN = re.compile(r"_r\d+[._]")

_WORKER = r"""
me=$RANK n=0 left=$(($1 * (50 + $$ * 7919 % 100) / 100))
while [ $n -lt $left ]; do
    n=$((n + 1))
    echo "Processed $n/100000 items"
    echo "step $n/100000 loss 0.5" >> more_worker_$me.log
    if [ $((n % 20)) = 0 ]; then mv more_worker_$me.log more_worker_$me.log.1; fi
    echo '{}' > output_worker_${me}_$n.jsonl; rm -f output_worker_${me}_$((n - 5)).jsonl
    if [ $me = 0 ]; then echo '{}' > checkpoint_$n.json; rm -f checkpoint_$((n - 3)).json; fi
    sleep $2
done
rm -f output_worker_${me}_*.jsonl
case $(($$ % 3)) in
    0) kill -9 $$ ;;
    1) echo 'torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' ;;
    2) echo "ValueError: bad record $n of worker $me" ;;
esac
exit 1
"""


class Sample(NamedTuple):
    """The job at one moment."""

    time: float  # since the start
    restarts: float  # of all workers
    parts: dict[str, dict[str, float]]  # by process: MiB, descriptors, threads
    files: int
    status_bytes: int


def measure() -> Figures:
    """Slopes and sums of SOAK_SECONDS, by process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background, where shells ignore it
    is_long = SECONDS > WARM_UP_S + MEMORY_S
    return soak(
        SECONDS, WORKERS, LIFE_S, min(WARM_UP_S, SECONDS / 2), {"mib_per_hour": MOST_MIB_PER_HOUR} if is_long else {}
    )


def soak(
    seconds: float,
    workers: int,
    life_s: float,
    warm_up_s: float,
    most: Mapping[str, float],
    restarts: float = math.inf,
) -> Figures:
    """Soak a job; ``most`` bounds the growth of memory, as ``mib_per_hour`` or ``mib_per_1000_restarts``.

    It ends sooner after so many ``restarts`` since the warm-up: how many a second has depends on the machine.
    After Ctrl-C the figures are those of the time until then.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        job_file = _job_file(Path(folder), workers, life_s)
        command = subprocess.Popen(
            [sys.executable, "-I", "-m", "launcher", "run", str(job_file)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C ends the watching first
        )
        try:
            watched = _Watch(command.pid, _address(Path(folder), command))
            samples: list[Sample] = []
            with contextlib.suppress(KeyboardInterrupt):
                for sample in watched.samples(seconds):
                    samples.append(sample)
                    warm = next((each for each in samples if each.time >= warm_up_s), sample)
                    if sample.restarts - warm.restarts >= restarts:
                        break
        finally:
            command.send_signal(signal.SIGTERM)
            command.wait()
    return _figures(samples, watched, warm_up_s, most)


def _job_file(folder: Path, workers: int, life_s: float) -> Path:
    (folder / "worker.sh").write_text(_WORKER)
    (folder / "work").mkdir()
    paths = dict.fromkeys(("output_dir", "log_dir", "checkpoint_dir"), str(folder / "work"))
    steps, step_s = (int(life_s), 1) if life_s > 10 else (int(life_s * 10), 0.1)
    job = {
        "name": "soak",
        "resources": {"nodes": 1, "gpus_per_node": 0},
        "workers": [
            {
                "role": "worker",
                "count": workers,
                "gpus": 0,
                "command": f"sh {folder}/worker.sh {steps} {step_s}",
                "restart": {"max": 1000, "backoff": 0},
            }
        ],
        "workdir": str(folder / "work"),
        "paths": paths,
        "patterns": {"output": "output_*.jsonl", "checkpoints": "checkpoint_*.json", "logs": "more_worker_*.log*"},
        "monitoring": {"check_interval": 1, "linger": 0},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def _address(folder: Path, command: "subprocess.Popen[bytes]") -> tuple[Path, str]:
    """The run directory, and where its sidecar listens, as soon as it does."""
    while command.poll() is None:
        for record in folder.rglob(f"{run_files.SIDECARS_DIR}/*.json"):
            if (published := run_files.read_json(record)) is not None:
                return record.parents[1], str(published["address"])
        time.sleep(0.1)
    raise RuntimeError(f"the job has ended at once, with status {command.returncode}")


class _Watch:
    """Scrapes the page of a job and measures its lasting processes."""

    def __init__(self, command: int, place: tuple[Path, str]) -> None:
        self.command = command
        self.run_dir, address = place
        headers = {"Authorization": f"Bearer {run_files.read_token(self.run_dir)}"}
        self._page = urllib.request.Request(f"http://{address}/metrics", headers=headers)
        self.counters: dict[str, float] = {}
        self.fallen: list[str] = []
        self.scrapes_ms: list[float] = []
        self.cpu_s: dict[str, float] = {}
        samples = round(LASTING_S / SAMPLE_S) + 1
        self._open: dict[str, deque[set[str]]] = defaultdict(lambda: deque(maxlen=samples))

    def samples(self, seconds: float) -> Iterator[Sample]:
        """Scrape once a second, with a sample of the job at some of the scrapes."""
        start = time.monotonic()
        for tick in range(1, int(seconds) + 1):
            time.sleep(max(0.0, start + tick - time.monotonic()))
            restarts = self._scrape()
            if tick % SAMPLE_S == 0:
                yield self._sample(time.monotonic() - start, restarts)

    def _scrape(self) -> float:
        before = time.perf_counter()
        with urllib.request.urlopen(self._page, timeout=30) as answer:
            page = answer.read().decode()
        self.scrapes_ms.append((time.perf_counter() - before) * 1000)
        found = {name: float(value) for name, value in COUNTER.findall(page)}
        self.fallen += [name for name, last in self.counters.items() if found.get(name, last) < last]
        self.counters |= found
        return sum(value for name, value in self.counters.items() if name.startswith(RESTARTS))

    def _sample(self, now: float, restarts: float) -> Sample:
        parts = {}
        for name, pid in _lasting(self.command):
            threads = len(os.listdir(f"/proc/{pid}/task"))
            (now_open := self._open[name]).append(_descriptors(pid))
            lasting = len(now_open[0] & now_open[-1])
            parts[name] = {"mib": rss_mib(pid), "descriptors": lasting, "threads": threads}
            self.cpu_s[name] = cpu_s(pid)
        status_bytes = sum(path.stat().st_size for path in (self.run_dir / run_files.STATUS_DIR).glob("*.json"))
        names = (name for _, _, found in os.walk(self.run_dir) for name in found)
        return Sample(now, restarts, parts, sum(OF_A_RUN.search(name) is None for name in names), status_bytes)


def _descriptors(pid: int) -> set[str]:
    """Open descriptors and their targets, without those of processes that live.

    How many processes live at once depends on the machine.
    """
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target == "anon_inode:[pidfd]":
                target = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
            of_process = OF_PROCESS.search(target)
            if of_process is None or not Path(f"/proc/{of_process[1]}").exists():
                found.add(f"{descriptor} {target}")
    return found


def _lasting(pid: int, name: str = "command") -> Iterator[tuple[str, int]]:
    """The processes below the command that last as long as the job, by their names."""
    yield name, pid
    for child in read_children(pid):
        try:
            argv = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        part = next((part for words, part in PARTS.items() if words in argv), name)
        if part != name:  # a child that is just being started looks like its parent
            yield from _lasting(child, part)


def _figures(samples: Sequence[Sample], watched: _Watch, warm_up_s: float, most: Mapping[str, float]) -> Figures:
    warm = [sample for sample in samples if sample.time >= warm_up_s]
    if not warm:
        raise SystemExit(f"no figures: the soak ended within its first {warm_up_s:.0f} s")
    if samples[-1].time < warm_up_s + MEMORY_S:  # interrupted
        most = {key: bound for key, bound in most.items() if key != "mib_per_hour"}
    hours = [sample.time / 3600 for sample in warm]
    thousands = [sample.restarts / 1000 for sample in warm]
    parts: Figures = {}
    for name in warm[0].parts:
        mib, *others = ([sample.parts[name][key] for sample in warm] for key in ("mib", "descriptors", "threads"))
        parts[name] = {
            "mib": round(mib[-1], 1),
            "mib_by_tenth": _by_tenth([sample.parts[name]["mib"] for sample in samples if name in sample.parts]),
            "mib_per_hour": round(_slope(hours, mib), 2),
            "mib_per_1000_restarts": round(_slope(thousands, mib), 2),
            "more_descriptors": _more(others[0]),
            "more_threads": _more(others[1]),
            "percent_of_a_core": round(100 * watched.cpu_s[name] / samples[-1].time, 1),
        }
    more_files = _more([sample.files for sample in warm])
    more_status = _more([sample.status_bytes for sample in warm]) / warm[0].status_bytes
    watched.scrapes_ms.sort()
    goals = {
        f"{name}: at most {bound:g} {key}": part[key] <= bound
        for name, part in parts.items()
        for key, bound in {**most, **MOST_MORE}.items()
    }
    goals[f"at most {MOST_MORE_FILES} more files"] = more_files <= MOST_MORE_FILES
    goals["the status does not grow"] = more_status <= MOST_MORE_STATUS
    goals["no counter fell"] = not watched.fallen
    return {
        "seconds": round(samples[-1].time),
        "restarts": samples[-1].restarts,
        "parts": parts,
        "more_files": more_files,
        "counters_fallen": watched.fallen[:5],
        "scrapes": len(watched.scrapes_ms),
        "scrape_ms_p99": round(watched.scrapes_ms[int(0.99 * (len(watched.scrapes_ms) - 1))], 1),
        "status_bytes": samples[-1].status_bytes,
        "more_status": round(more_status, 2),
        "goals": goals,
    }


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Median of the slopes between the samples of the first half and those of the second (Theil)."""
    half = len(x) // 2
    pairs = zip(x, y, x[-half:], y[-half:], strict=False)
    return statistics.median([(y1 - y0) / (x1 - x0) for x0, y0, x1, y1 in pairs if x1 > x0] or [0.0])


def _by_tenth(values: Sequence[float]) -> list[float]:
    """The median of each tenth of the run: growth that ends looks different from growth that goes on."""
    tenth = max(1, len(values) // 10)
    return [
        round(statistics.median(values[at : at + tenth]), 1) for at in range(0, min(len(values), tenth * 10), tenth)
    ]


def _more(values: Sequence[float]) -> float:
    """By how much the least of the last third is above that of the first one.

    What leaks raises the least too. How many workers live at the same time depends on how busy the machine is.
    """
    third = max(1, len(values) // 3)
    return min(values[-third:]) - min(values[:third])
