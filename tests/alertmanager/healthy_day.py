"""Two hours of good jobs: what their sidecars and the hub show, as Prometheus would scrape it.

Sidecars, collectors and the hub are the real ones. They read real files and processes, and their clock is set forward.
Slurm's answers and the GPUs are made up, as is the space on the disk, so that no other machine changes the result.
"""

import dataclasses
import gzip
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

from exporter.collecting.collector import CollectorContext
from exporter.contract import run_files
from exporter.contract.manifest import PathGroup, Task
from exporter.contract.process_identity import read_start_ticks
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.records import GpuProcess
from exporter.hub.engine import Engine, Settings
from exporter.hub.runs.reports import Run
from exporter.hub.store import Store
from exporter.machine.file_host import FileWatchHost
from exporter.machine.kernel_log import KernelLog
from exporter.sidecar.sidecar import Sidecar
from exporter.slurm.queue import QueueRow
from tests.alertmanager.promtool_cases import RULES
from tests.exporter.gpus.fake_gpus import GIB, FakeGpus, changed, gpu
from tests.exporter.hub.made_up_slurm import MadeUpSlurm, queue_row
from tests.support.exporter import FakeClock, make_identity, make_manifest, make_task
from tests.support.promql import PROMETHEUS_SERIES, rule_metric_names

STEP_S = 60.0  # between two scrapes, and two evaluations of the rules
LAUNCH_S = 50.0  # in which the workers load what they need
SAVED_S, EVALUATED_S = 60.0, 1500.0  # how long a checkpoint and an evaluation take
NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class GoodJob:
    """A job and what happens to it; times are minutes of its own."""

    name: str
    begins: float  # minute of the day
    minutes: float
    workers: int = 1  # of each node
    nodes: int = 1
    gpus: bool = False
    steps: bool = True  # whether its logs show how far it is
    limit: float | None = None  # minutes
    checkpoint_each: float | None = None
    evaluates_at: float | None = None
    state: str = "COMPLETED"  # in which it ends
    reason: str = "completed"  # for which its workers end
    requeued_at: float | None = None
    sidecar_restarts_at: float | None = None  # on another port
    sidecar_silent: tuple[float, float] | None = None  # from when, and for how long
    clock_steps: tuple[float, float] | None = None  # when, and by how many seconds
    service: bool = False
    uneven: float = 0.0  # share by which the workers differ
    waits: float = 0.0  # in the queue, before it begins


JOBS = (
    GoodJob("training", 1, 115, workers=2, gpus=True, limit=200, checkpoint_each=20),
    GoodJob("limit-met", 2, 90, limit=100),
    GoodJob("saves", 3, 60, workers=2, checkpoint_each=10),
    GoodJob("saves-with-gpus", 4, 70, workers=2, gpus=True, checkpoint_each=15, limit=120),
    GoodJob("evaluates", 5, 80, evaluates_at=30),
    GoodJob("evaluates-with-gpus", 6, 90, workers=2, gpus=True, evaluates_at=40, limit=160),
    GoodJob("service", 7, 60, service=True),
    GoodJob("service-with-gpus", 8, 60, workers=2, gpus=True, service=True, limit=200),
    GoodJob("requeued", 9, 60, requeued_at=35, checkpoint_each=10),
    GoodJob("requeued-with-gpus", 10, 50, workers=2, gpus=True, requeued_at=30, limit=200),
    GoodJob("new-sidecar", 11, 50, workers=2, sidecar_restarts_at=25),
    GoodJob("new-sidecar-with-gpus", 12, 60, gpus=True, sidecar_restarts_at=30, checkpoint_each=15, limit=150),
    GoodJob("silent-sidecar", 13, 40, sidecar_silent=(20, 2)),
    GoodJob("silent-sidecar-with-gpus", 14, 40, gpus=True, sidecar_silent=(25, 2)),
    GoodJob("clock-forward", 15, 60, workers=2, clock_steps=(30, 75.0), limit=120),
    GoodJob("clock-back", 16, 60, workers=2, gpus=True, clock_steps=(30, -75.0), checkpoint_each=15),
    GoodJob("uneven", 17, 60, workers=4, uneven=0.1, limit=200),
    GoodJob("short", 18, 3),
    GoodJob("no-steps", 19, 50, steps=False),
    GoodJob("no-steps-with-gpus", 20, 50, gpus=True, steps=False, limit=100),
    GoodJob("cancelled", 21, 35, workers=2, state="CANCELLED", reason="cancelled"),
    GoodJob("preempted", 22, 35, gpus=True, state="PREEMPTED", reason="preempted", limit=300),
    GoodJob("two-nodes", 23, 60, workers=2, nodes=2, checkpoint_each=15),
    GoodJob("two-nodes-with-gpus", 24, 50, workers=2, nodes=2, gpus=True, limit=120),
    GoodJob("waited", 100, 10, waits=230),
    *(GoodJob(f"sweep-{number}", 30 + 6 * number, 10, gpus=number % 2 == 0, limit=30) for number in range(6)),
)
DAY_S = 125 * 60.0
PROMETHEUS_RESTARTS = (50 * 60.0, 53 * 60.0)  # it scrapes nothing
MISSED_SCRAPES = (70 * 60.0, 72 * 60.0)  # of every target


class NodeClock:
    """The clock of a node, which may be set."""

    def __init__(self, day: FakeClock) -> None:
        self._day, self.shift = day, 0.0

    def time(self) -> float:
        return self._day.now + self.shift

    def monotonic(self) -> float:
        return self._day.now


class Node:
    """The sidecar of one node of an attempt, and its workers."""

    def __init__(self, life: "Life", index: int) -> None:
        job, manifest = life.job, life.manifest
        self.life, self.name, self.clock = life, f"{job.name}-n{index}", NodeClock(life.day)
        self.port, self.tasks = 9400, manifest.tasks_of(index)
        self.gpus = FakeGpus(life.day, [gpu(task.gpus[0]) for task in self.tasks if task.gpus])
        limit = None if job.limit is None else life.begun + job.limit * 60
        identity = {"job_id": life.job_id, "job_name": job.name, "attempt": life.attempt}
        self.context = CollectorContext(
            manifest,
            make_identity(self.name, index, start=life.begun, end=limit, **identity),
            self.clock,
            files=FileWatchHost(self.clock, use_helper=False),
            kernel=KernelLog(self.clock, None, path="/nowhere"),
            gpus=cast(GpuHost, self.gpus),
        )
        self.processes = [self._start(task) for task in self.tasks]
        self.start_sidecar()

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        devices = ",".join(map(str, task.gpus))
        environment = {"SLURM_JOB_ID": self.life.job_id, "RANK": str(task.rank), "CUDA_VISIBLE_DEVICES": devices}
        process = subprocess.Popen(["sleep", "1000"], env={**environment, "PATH": os.environ["PATH"]})
        start = {"pid": process.pid, "start_ticks": read_start_ticks(process.pid), "start": self.clock.time()}
        self._record(task, "start", start)
        return process

    def _record(self, task: Task, kind: str, facts: Mapping[str, object]) -> None:
        stem = run_files.record_name(task.worker, task.rank, self.life.attempt, 0)
        path = self.life.folder / run_files.WORKERS_DIR / f"{stem}.{kind}.json"
        run_files.write_json(path, {"schema": run_files.RECORD_SCHEMA, **facts})

    def start_sidecar(self) -> None:
        self.port += 1
        self.sidecar = Sidecar(self.context)
        self._due = dict.fromkeys(range(len(self.sidecar.slots)), 0.0)

    def busy(self, share: float) -> None:
        for number, process in enumerate(self.processes if self.gpus.gpus else ()):
            used = (GpuProcess(process.pid, 70 * GIB, share),)
            self.gpus.gpus[number] = changed(self.gpus.gpus[number], utilization_ratio=share, processes=used)

    def end(self) -> None:
        ok = self.life.ends_well
        for task, process in zip(self.tasks, self.processes, strict=True):
            process.kill()
            process.wait()
            how = {"code": 0, "signal": None} if ok else {"code": None, "signal": 15}
            signals = [] if ok else [[self.clock.time(), 15, None]]
            self._record(task, "exit", {"end": self.clock.time(), "signals": signals, **how})
        for number in range(len(self.gpus.gpus)):
            self.gpus.gpus[number] = changed(self.gpus.gpus[number], utilization_ratio=0.0, processes=())

    def page(self) -> str:
        """Read what is due, and show it."""
        for number, slot in enumerate(self.sidecar.slots):
            if self.clock.monotonic() >= self._due[number]:
                slot._read()
                self._due[number] = self.clock.monotonic() + slot.collector.interval_s
        return self.sidecar.page()


class Life:
    """One attempt of a job, from its first to its last page."""

    def __init__(self, job: GoodJob, job_id: str, folder: Path, day: FakeClock, attempt: int) -> None:
        self.job, self.job_id, self.folder, self.day, self.attempt = job, job_id, folder, day, attempt
        self.begun = day.now
        self.is_last = job.requeued_at is None or attempt == 1
        self.minutes = job.minutes if self.is_last else cast(float, job.requeued_at)
        count = job.workers * job.nodes
        tasks = tuple(
            dataclasses.replace(
                make_task(rank, node_index=rank // job.workers),
                gpus=(rank % job.workers,) if job.gpus else (),
                service=job.service,
            )
            for rank in range(count)
        )
        self.manifest = make_manifest(
            folder,
            *tasks,
            job_name=job.name,
            groups=(PathGroup("output", "out", "output_*.jsonl"), PathGroup("checkpoint", "ckpt", "*.json")),
            detail="essential",
        )
        for name in (run_files.WORKERS_DIR, "out", "ckpt"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        run_files.write_job_state(str(folder), "launching", attempt=attempt)
        self.nodes = [Node(self, index) for index in range(job.nodes)]
        self.done = dict.fromkeys(range(count), 0.0)
        self.total = int(job.minutes * 60)
        self.saved_at, self.saving_since, self.evaluated = day.now, NEVER, False
        self.evaluating_since = NEVER
        self.phase = "launching"

    @property
    def ends_well(self) -> bool:
        """Whether its workers end by themselves."""
        return self.is_last and self.job.reason == "completed"

    @property
    def age_s(self) -> float:
        return self.day.now - self.begun

    def step(self) -> None:
        """Let the workers do what they do in one step."""
        job = self.job
        if self.age_s >= self.minutes * 60:
            if self.phase == "running":
                stop = {"reason": job.reason if self.is_last else "cancelled", "cause": "asked", "time": self.day.now}
                self.publish("completing", None if self.ends_well else stop)
                for node in self.nodes:
                    node.end()
            else:
                self.publish("finished", None)
            return
        if self.age_s < LAUNCH_S:
            return
        if self.phase == "launching":
            self.publish("running", None)
        works = self.works()
        for node in self.nodes:
            node.busy(0.95 if works else 0.2)
            for number, task in enumerate(node.tasks):
                self.write(node, task, 1 - job.uneven * number / max(1, job.workers - 1), works)
        for minute, act in ((job.sidecar_restarts_at, Node.start_sidecar), (job.clock_steps, set_clock)):
            at = minute[0] if isinstance(minute, tuple) else minute
            if at is not None and at * 60 <= self.age_s < at * 60 + STEP_S:
                for node in self.nodes:
                    act(node)

    def publish(self, phase: str, stop: dict[str, object] | None) -> None:
        self.phase = phase
        ended = phase in ("completing", "finished")
        run_files.write_job_state(str(self.folder), phase, stop, workers_ended=ended, attempt=self.attempt)

    def works(self) -> bool:
        """Whether the workers work on their items: they neither save nor evaluate."""
        job, now = self.job, self.day.now
        if job.evaluates_at is not None and not self.evaluated and self.age_s >= job.evaluates_at * 60:
            self.evaluated, self.evaluating_since = True, now
            self.log("Evaluating on 640 samples")
        elif now - self.evaluating_since >= EVALUATED_S:
            self.evaluating_since = NEVER
            self.log(" validation loss at iteration 1000 | lm loss value: 2.724416E+00 |")
        elif job.checkpoint_each is not None and now - self.saved_at >= job.checkpoint_each * 60:
            self.saved_at = self.saving_since = now
            self.log("saving checkpoint at iteration     500 to ckpt in torch_dist format")
        elif now - self.saving_since >= SAVED_S:
            self.saving_since = NEVER
            path = self.folder / "ckpt" / f"step_{int(self.age_s)}.json"
            path.write_text(json.dumps({"step": int(self.age_s), "state": "x" * 100}))
            os.utime(path, (now, now))
            self.log("  successfully saved checkpoint from iteration     500 to ckpt [ t 1/1, p 1/1 ]")
        return self.evaluating_since == self.saving_since == NEVER

    def log(self, line: str) -> None:
        for node in self.nodes:
            for task in node.tasks:
                self.append(node, task, line)

    def append(self, node: Node, task: Task, line: str) -> None:
        suffix = f"_a{self.attempt}" if self.attempt else ""
        with (self.folder / task.logs[0].format(node=node.name, run=suffix)).open("a") as out:
            out.write(line + "\n")

    def write(self, node: Node, task: Task, speed: float, works: bool) -> None:
        if self.job.service:
            self.append(node, task, "GET /v1/models 200 OK")
            return
        if not works:
            return
        self.done[task.rank] = min(self.total, self.done[task.rank] + STEP_S * speed)
        done = int(self.done[task.rank])
        if not self.job.steps:
            self.append(node, task, "the next document is in work")
        else:
            text = f"consumed samples: {64 * done} | elapsed time per iteration (ms): 1000.0 | lm loss: 1.05E+01"
            self.append(node, task, f" iteration {done:8d}/{self.total:8d} | {text} |")
        path = self.folder / "out" / f"output_{task.worker}.jsonl"
        with path.open("a") as out:
            out.write(json.dumps({"id": done}) + "\n")
        os.utime(path, (self.day.now, self.day.now))

    @property
    def is_over(self) -> bool:
        return self.phase == "finished" and self.age_s > self.minutes * 60 + 2 * STEP_S

    def is_silent(self) -> bool:
        """Whether the sidecars do not answer."""
        silent = self.job.sidecar_silent
        return silent is not None and silent[0] <= self.age_s / 60 < silent[0] + silent[1]


def set_clock(node: Node) -> None:
    node.clock.shift += cast(Any, node.life.job.clock_steps)[1]


class Sample(NamedTuple):
    """A value, or one of promtool's words for none: ``_`` for no scrape, ``stale`` for no series."""

    step: int
    value: str


class Recorder:
    """The series that the rules read, as Prometheus stores them."""

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._wanted = rule_metric_names(RULES) - PROMETHEUS_SERIES
        self.series: dict[str, list[Sample]] = {}
        self._by_target: dict[str, set[str]] = {}

    def page(self, step: int, target: str, text: str) -> None:
        """Take one page. Series of the target that it lacks are stale."""
        found = set[str]()
        more = ",".join((target, ""))
        for line in text.splitlines():
            name, brace, rest = line.partition("{")
            if line.startswith("#") or not brace or name not in self._wanted:
                continue
            labels, _, value = rest.rpartition("} ")
            if name.endswith("_timestamp_seconds"):  # promtool's day begins at 0
                value = repr(float(value) - self._begun)
            series = f"{name}{{{more}{labels.rstrip(',')}}}"
            self.put(step, series, value)
            found.add(series)
        for gone in self._by_target.get(target, set()) - found:
            self.put(step, gone, "stale")
        self._by_target[target] = found

    def put(self, step: int, series: str, value: str) -> None:
        self.series.setdefault(series, []).append(Sample(step, value))

    def input_series(self, steps: int) -> Iterator[dict[str, str]]:
        """All series in promtool's notation."""
        for name, samples in self.series.items():
            values = ["_"] * (steps + 1)
            for step, value in samples:
                values[step] = value
            runs = [(value, len(list(same))) for value, same in groupby(values)]
            words = (value if count == 1 or value == "stale" else _repeated(value, count) for value, count in runs)
            yield {"series": name, "values": " ".join(words)}


def _repeated(value: str, count: int) -> str:
    return f"_x{count}" if value == "_" else f"{value}x{count - 1}"


class Day:
    """All jobs, the hub, and what was scraped."""

    def __init__(self, folder: Path, begun: float) -> None:
        self.clock, self.folder = FakeClock(begun), folder
        self.begun, self.recorder = begun, Recorder(begun)
        self.ids = {job: str(1000 + number) for number, job in enumerate(JOBS)}
        self.lives: dict[GoodJob, Life] = {}
        self.ended: dict[GoodJob, float] = {}
        self.started: dict[GoodJob, float] = {}
        self.slurm = MadeUpSlurm()
        self.slurm.controller_time = lambda: float(int(self.clock.now))
        self.store = Store(folder / "hub.sqlite")
        settings = Settings(whole_cluster=False, cluster=None, interval_s=60.0, most_jobs=100)
        self.engine = Engine(self.slurm, self.store, settings, self.clock, runs=self._runs, chance=lambda: 0.0)

    def _minute(self) -> float:
        return (self.clock.now - self.begun) / 60

    def _runs(self) -> list[Run]:
        return [
            Run(self.ids[job], "ada", str(self.folder / job.name), self._submitted(job), is_monitored=True)
            for job in JOBS
            if self.clock.now >= self._submitted(job)
        ]

    def _submitted(self, job: GoodJob) -> float:
        return self.begun + (job.begins - job.waits) * 60 - 20

    def _rows(self) -> Iterator[QueueRow]:
        for job in JOBS:
            if self.clock.now < self._submitted(job) or self.clock.now - self.ended.get(job, self.clock.now) > 300:
                continue
            state = job.state if job in self.ended else "RUNNING" if job in self.lives else "PENDING"
            times = {"started": self.started.get(job), "ended": self.ended.get(job)}
            yield queue_row(
                self.ids[job],
                state,
                self._submitted(job),
                restarts=int(job in self.lives and self.lives[job].attempt),
                **{name: value for name, value in times.items() if value is not None},
            )._replace(name=job.name)

    def step(self, number: int) -> None:
        """Let all happen that happens in one step, and scrape."""
        for job in JOBS:
            life = self.lives.get(job)
            if life is None and job not in self.ended and self._minute() >= job.begins:
                self._begin(job, 0)
            elif life is not None:
                life.step()
                if life.phase == "finished" and life.is_last:
                    self.ended.setdefault(job, self.clock.now)
        self.slurm.rows = tuple(self._rows())
        self.engine.step()
        seconds = self.clock.now - self.begun
        if PROMETHEUS_RESTARTS[0] <= seconds < PROMETHEUS_RESTARTS[1]:
            for life in self.lives.values():
                for node in life.nodes:
                    node.page()  # the sidecars go on
        else:
            self._scrape(number, missed=MISSED_SCRAPES[0] <= seconds < MISSED_SCRAPES[1])
        for job, life in list(self.lives.items()):
            if not life.is_over:
                continue
            for node in life.nodes:
                self.recorder.page(number + 1, _target(node), "")
                self.recorder.put(number + 1, _up(node), "stale")
            del self.lives[job]
            if not life.is_last:
                self._begin(job, 1)

    def _begin(self, job: GoodJob, attempt: int) -> None:
        self.started[job] = self.clock.now
        self.lives[job] = Life(job, self.ids[job], self.folder / job.name, self.clock, attempt)

    def _scrape(self, number: int, *, missed: bool) -> None:
        for life in self.lives.values():
            for node in life.nodes:
                text, failed = node.page(), missed or life.is_silent()
                self.recorder.page(number, _target(node), "" if failed else text)
                self.recorder.put(number, _up(node), "0" if failed else "1")
                if node.port > 9401:  # the target file names the new address alone
                    old = _up(node).replace(f":{node.port}", f":{node.port - 1}")
                    if self.recorder.series[old][-1].value != "stale":
                        self.recorder.page(number, _target(node).replace(f":{node.port}", f":{node.port - 1}"), "")
                        self.recorder.put(number, old, "stale")
        hub = 'job="gpujob-hub",instance="head:9420"'
        self.recorder.page(number, hub, "" if missed else self._hub_page())
        self.recorder.put(number, f"up{{{hub}}}", "0" if missed else "1")

    def _hub_page(self) -> str:
        return gzip.decompress(self.engine.page()).decode()

    def close(self) -> None:
        self.store.close()
        for life in self.lives.values():
            for node in life.nodes:
                node.end()


def _target(node: Node) -> str:
    return f'job="gpujob-sidecar",instance="{node.name}:{node.port}"'


def _up(node: Node) -> str:
    labels = node.context.identity.constant_labels()
    return f"up{{{_target(node)},{','.join(f'{name}={json.dumps(text)}' for name, text in labels.items())}}}"


@contextmanager
def steady_disk() -> Iterator[None]:
    """A disk with room, whatever the machine has."""
    facts = os.statvfs("/")
    space = os.statvfs_result((*facts[:2], 1 << 30, 1 << 29, 1 << 29, 1 << 30, 1 << 29, 1 << 29, *facts[8:10]))
    with mock.patch.object(os, "statvfs", return_value=space):
        yield


def promtool_case(folder: Path, begun: float) -> dict[str, Any]:
    """The whole day as the input of a promtool test."""
    steps = int(DAY_S / STEP_S)
    with ExitStack() as stack:
        stack.enter_context(steady_disk())
        day = Day(folder, begun)
        stack.callback(day.close)
        for number in range(1, steps + 1):
            day.clock.advance(STEP_S)
            day.step(number)
    return {"interval": f"{STEP_S:.0f}s", "input_series": list(day.recorder.input_series(steps + 1))}
