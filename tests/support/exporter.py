"""Clocks, manifests and real processes for the tests of the exporter."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from exporter.collecting.collector import CollectorContext
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import Published, Publisher
from exporter.collecting.saved_state import state_fields
from exporter.contract import run_files
from exporter.contract.clock import Clock
from exporter.contract.identity import Identity
from exporter.contract.manifest import Manifest, PathGroup, Task, render_manifest
from exporter.contract.records import from_json
from exporter.gpus.records import JobGpus
from exporter.sidecar import background_reads
from exporter.sidecar.collectors import Register
from exporter.sidecar.sidecar import Sidecar
from tests.realstack.waiting import wait_for

T = TypeVar("T")
NODE = "node01"
NOBODY = 65534
SOON_S = (
    30.0  # bounds actions that wait for nothing, on a busy machine; actions that wait for a hang take twice as long
)


def saved_text(state: object) -> str:
    """A state as a sidecar saves it."""
    return json.dumps(state, default=state_fields)


def saved_and_read(kind: type[T], state: T) -> T:
    """A state as the next sidecar reads it."""
    return from_json(kind, json.loads(saved_text(state)), "state")


class FakeClock:
    """A clock that moves only when the test advances it."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass."""
        self.now += seconds


class ShiftedClock:
    """The clock of the machine plus a shift that the test sets."""

    def __init__(self) -> None:
        self.shift = 0.0

    def time(self) -> float:
        return time.time() + self.shift

    def monotonic(self) -> float:
        return time.monotonic() + self.shift


def make_task(rank: int = 0, *, role: str = "worker", index: int | None = None, node_index: int = 0) -> Task:
    """A task as the launcher plans it, one GPU for each rank."""
    number = rank if index is None else index
    worker = f"{role}_w{number}"
    logs = tuple(f"{{node}}_{worker}{{run}}.{stream}" for stream in ("out", "err"))
    return Task(worker, role, number, rank, 0, node_index, (rank,), logs)


def make_manifest(run_dir: Path, *tasks: Task, **changes: Any) -> Manifest:
    """The manifest of a small job, one task unless others are given."""
    tasks = tasks or (make_task(),)
    manifest = Manifest(
        job_name="embed",
        user="ada",
        cluster="c1",
        partition="gpu",
        nodes=max(task.node_index for task in tasks) + 1,
        tasks=tasks,
        groups=(PathGroup("output", "out", "output_*.jsonl"), PathGroup("checkpoint", "ckpt", "*.pt")),
        run_dir=run_dir,
    )
    return dataclasses.replace(manifest, **changes)


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Let no thread whose name begins so start the first ``times``."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and len(refused) < times:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def make_identity(node: str = NODE, node_index: int = 0, **changes: Any) -> Identity:
    """The identity of one node of job 4459."""
    identity = Identity("c1", "4459", "embed", "ada", "gpu", node, node_index, 0, 1_700_000_000.0, 1_700_003_600.0)
    return dataclasses.replace(identity, **changes)


def make_context(manifest: Manifest, clock: Clock | None = None, **identity: Any) -> CollectorContext:
    """The context of a node's collectors."""
    return CollectorContext(manifest, make_identity(**identity), clock or FakeClock())


def publisher(value: T, clock: Clock | None = None) -> Publisher[T]:
    """A value that a test publishes in place of a collector. ``value`` is also what is there before the first."""
    return Publisher(value, clock or FakeClock())


def make_sidecar(context: CollectorContext, *collectors: Any, gpus: Published[JobGpus] | None = None) -> Sidecar:
    """A sidecar with these collectors alone."""
    return Sidecar(context, Register(collectors, gpus or publisher(JobGpus())))


def declared_families() -> tuple[Family, ...]:
    """All declared families, in the order of the page."""
    slots = Sidecar(make_context(make_manifest(Path("/runs/1")))).slots
    return (*(family for slot in slots for family in slot.collector.families), *background_reads.FAMILIES)


def write_manifest(manifest: Manifest) -> Path:
    """Write the manifest into its run directory and return the directory."""
    text = json.dumps(render_manifest(manifest))
    (manifest.run_dir / run_files.MANIFEST_FILE).write_text(text, encoding="utf-8")
    run_files.make_token(manifest.run_dir)
    return manifest.run_dir


def page_of(collector: Any, snapshot: Any, *, openmetrics: bool = False) -> str:
    """The page of one collector's snapshot without constant labels."""
    out = Samples({})
    collector.render(snapshot, out)
    return out.page(openmetrics=openmetrics)


def samples_of(page: str, family: Family) -> dict[str, float]:
    """Values of a family's series by their labels as the page writes them."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name == family.full_name and not line.startswith("#"):
            found[labels.removesuffix("}")] = float(value)
    return found


class Listing:
    """Entries of a directory, as ``os.scandir`` returns them."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: all entries have been read."""


def change_listings(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], Iterable[Any]]) -> None:
    """Let ``os.scandir`` return what ``change`` makes of the entries of a directory."""
    scandir = os.scandir

    def changed(place: Any) -> Listing:
        with scandir(place) as entries:
            return Listing(change(list(entries)))

    monkeypatch.setattr(os, "scandir", changed)


def read_line(process: "subprocess.Popen[str]") -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def send_line(process: "subprocess.Popen[str]") -> None:
    """Send an empty line to a program."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def open_files(place: str) -> list[str]:
    """Files that this process has open and whose paths begin with ``place``."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of this listing, or closed by another thread
    return sorted(path for path in found if path.startswith(place))


def until(predicate: Any, what: str, timeout: float = 60.0) -> Any:
    """The first true value of ``predicate``, which is called every few milliseconds."""
    return wait_for(predicate, timeout, what, interval=0.02)


class Wrappers:
    """Starts real wrappers with real workers, and ends all of them at the end."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / run_files.WORKERS_DIR
        self.folder.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, task: Task, *command: str, restart: int = 0) -> subprocess.Popen[bytes]:
        """Start a wrapper of ``command``, with the log files of the manifest."""
        suffix = f"_r{restart}" if restart else ""
        out, err = (self.run_dir / name.replace("{node}", NODE).replace("{run}", suffix) for name in task.logs)
        argv = [sys.executable, "-I", "-m", "launcher.programs.wrapper", "--run-dir", str(self.run_dir)]
        argv += ["--worker", task.worker, "--rank", str(task.rank), "--restart", str(restart), "--", *command]
        with out.open("ab") as stdout, err.open("ab") as stderr:
            wrapper = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        self._started.append(wrapper)
        return wrapper

    def record(self, task: Task, kind: str, restart: int = 0) -> dict[str, Any]:
        """The start or exit record of a run. Waits until it exists."""
        path = self.path(task, kind, restart)
        found: dict[str, Any] = until(lambda: run_files.read_json(path), f"{path.name}")
        return found

    def path(self, task: Task, kind: str, restart: int = 0) -> Path:
        """Path of that record."""
        return self.folder / f"{run_files.record_name(task.worker, task.rank, 0, restart)}.{kind}.json"

    def close(self) -> None:
        """Kill remaining processes, workers before their wrappers."""
        for path in self.folder.glob("*.start.json"):
            record = run_files.read_json(path) or {}
            if not path.with_name(path.name.replace(".start.", ".exit.")).exists() and _is_same(record):
                os.kill(int(str(record["pid"])), signal.SIGKILL)
        for wrapper in self._started:
            try:
                wrapper.wait(timeout=SOON_S)  # it reaps its worker and ends with the same status
            except subprocess.TimeoutExpired:
                wrapper.kill()
                wrapper.wait()


def _is_same(record: dict[str, object]) -> bool:
    """Whether the pid of a start record still belongs to its process."""
    try:
        with open(f"/proc/{record['pid']}/stat", "rb") as source:
            return int(source.read().rpartition(b")")[2].split()[19]) == record["start_ticks"]
    except (OSError, KeyError):
        return False


@contextmanager
def without_rights() -> Iterator[Path]:
    """An empty folder, with the process as an unprivileged user, because root may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if os.geteuid() != 0:
            yield path
            return
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o755)
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        try:
            yield path
        finally:
            os.seteuid(0)
            os.setegid(0)
