"""Diagnoses of failed and stalled workers."""

import asyncio
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exporter.collecting.collector import StatusParts
from exporter.collecting.families import Samples
from exporter.contract import run_files
from exporter.contract.clock import SystemClock
from exporter.contract.manifest import PathGroup
from exporter.contract.records import to_json
from exporter.contract.status import (
    CollectorReads,
    FileSystem,
    GpuUseStatus,
    JobStatus,
    Memory,
    NodeGpus,
    NodeStatus,
    ProcessDetails,
    WorkerEnd,
    WorkerStatus,
)
from exporter.logs.log_starts_reader import LogStartFinder
from exporter.logs.packs_reader import read_error_patterns
from exporter.machine import python_stacks
from exporter.machine.procfs import CLOCK_TICKS
from exporter.sidecar.background_reads import CollectorSlot
from exporter.sidecar.service import HttpService
from exporter.sidecar.sidecar import Sidecar
from exporter.web.access import Access
from exporter.workers.diagnosis import (
    LINE_LENGTH,
    LOG_LINES,
    MOST_JSON_BYTES,
    DiagnosedRun,
    Diagnosis,
    LogEnd,
    NodeSituation,
    ReceivedSignal,
    RecentSamples,
    RunFiles,
    build_failure_diagnosis,
    build_stall_diagnosis,
)
from exporter.workers.diagnosis_collector import DiagnosticsCollector
from exporter.workers.diagnosis_reader import (
    MOST_DIAGNOSES,
    MOST_LOG_BYTES,
    has_diagnosis,
    read_log_end,
    read_run_files,
    write_diagnosis,
)
from exporter.workers.diagnosis_text import MOST_TEXT_BYTES, render_diagnosis
from tests.exporter.sidecar.test_sidecar_process import SidecarProcess
from tests.support.exporter import (
    NODE,
    SOON_S,
    FakeClock,
    Wrappers,
    make_context,
    make_manifest,
    make_sidecar,
    make_task,
    until,
    write_manifest,
)
from tests.support.gpu_status import GIB, XID_79, gpu, gpus, of_worker, use
from tests.support.statuses import ENDED, NOW, node_status, worker_status

ERRORS = read_error_patterns()
EMPTY = NodeSituation(NOW, NodeStatus())
TRACEBACK = b"""\
Traceback (most recent call last):
  File "/home/ada/train.py", line 12, in <module>
    main()
RuntimeError: CUDA error: device-side assert triggered
"""


def log_of(text: bytes, name: str = "node01_worker_w0.err") -> LogEnd:
    return LogEnd(name, len(text), text, 0, 0)


RUN = DiagnosedRun(worker="worker_w0", role="worker", rank=0, ranks=1, node=NODE, attempt=0, restart=0)


def make_files(*logs: LogEnd, **changes: Any) -> RunFiles:
    facts: dict[str, Any] = {
        "run": RUN,
        "start": {"pid": 4711, "host": "gn01", "start": NOW - 60, "start_ticks": 1},
        "ended": {
            "pid": 4711,
            "start": NOW - 60,
            "end": NOW,
            "code": 1,
            "signal": None,
            "core": False,
            "oom_kills": 0,
            "signals": [[NOW - 1, 15, 99]],
            "user_seconds": 40.5,
            "max_rss_bytes": 3 << 30,
        },
        "state": {"phase": "running", "stop": None},
        "logs": logs,
    }
    return RunFiles(**{**facts, **changes})


# -- contents of a diagnosis ---------------------------------------------------------------------


def test_a_diagnosis_contains_exit_error_logs_peers_and_node() -> None:
    files = make_files(log_of(b"Processed 3/50 items\n", "node01_worker_w0.out"), log_of(b"start\n" + TRACEBACK))
    status = node_status(worker_status(), worker_status(1, state="disk_sleep"))
    situation = NodeSituation(
        NOW, status, [{"time": NOW - 1, "rss_bytes": 1}], ProcessDetails(open_files=12), {"x": "stack"}
    )
    body = build_failure_diagnosis(files, situation, ENDED, ERRORS)
    assert (body.worker, body.rank, body.node, body.kind) == ("worker_w0", 0, NODE, "failure")
    ended = body.exit
    assert ended is not None
    assert (ended.reason, ended.code, ended.signal, ended.pid) == ("app_error", 1, None, 4711)
    assert (ended.duration_s, ended.max_rss_bytes, ended.core) == (60.0, 3 << 30, False)
    assert ended.signals_received == (ReceivedSignal(NOW - 1, "SIGTERM", 99),)
    error = body.error
    assert error is not None
    assert (error.line, error.source) == ("RuntimeError: CUDA error: device-side assert triggered", "train.py:12")
    assert (error.file, error.line_number, error.offset) == (
        "node01_worker_w0.err",
        5,
        6 + TRACEBACK.index(b"RuntimeError"),
    )
    assert error.traceback == tuple(TRACEBACK.decode().splitlines())
    assert [log.lines for log in body.logs] == [
        ("Processed 3/50 items",),
        ("start", *TRACEBACK.decode().splitlines()),
    ]
    assert [(peer.worker, peer.state) for peer in body.peers] == [("worker_w1", "disk_sleep")]
    assert (body.memory.oom_kills, body.filesystems[0].group) == (1, "output")
    assert (body.course, body.stacks, body.process["open_files"]) == (
        tuple(situation.recent_samples),
        {"x": "stack"},
        12,
    )
    json.dumps(body.to_json())


def test_a_diagnosis_shows_positions_in_their_unit() -> None:
    workers = [worker_status(unit="steps"), worker_status(rank=1, unit="steps"), worker_status(rank=2)]
    body = build_failure_diagnosis(make_files(), NodeSituation(NOW, node_status(*workers)), ENDED, ERRORS)
    assert (body.progress["unit"], body.progress["items"]) == ("steps", 12)
    text = render_diagnosis(body.replace(job={"end": NOW}))
    assert "worker_w1 (rank 1): sleeping, 12 steps, last at" in text
    assert "worker_w2 (rank 2): sleeping, 12 items, last at" in text
    assert "  time_limit_at          20" in text, "the end of the allocation, not of the job"


def test_a_diagnosis_is_built_from_empty_records() -> None:
    files = make_files(start={}, ended={}, state={})
    body = build_failure_diagnosis(files, EMPTY, WorkerEnd(reason="killed_unknown"), ERRORS)
    assert (body.error, body.logs, body.peers, body.end) == (None, (), (), NOW)
    assert "killed_unknown at an unknown time" in render_diagnosis(body)


def test_a_log_with_a_traceback_is_preferred() -> None:
    logs = [log_of(TRACEBACK, "a.out"), log_of(b"ValueError: only a line\n", "b.err")]
    body = build_failure_diagnosis(make_files(*logs), EMPTY, ENDED, ERRORS)
    assert body.error is not None
    assert body.error.file == "a.out"


def test_the_line_number_of_an_error_counts_from_the_start_of_the_file() -> None:
    log = LogEnd("a.err", 10_000, TRACEBACK, 9_000, 120)
    error = build_failure_diagnosis(make_files(log), EMPTY, ENDED, ERRORS).error
    assert error is not None
    assert (error.line_number, error.offset) == (124, 9_000 + TRACEBACK.index(b"RuntimeError"))


def test_the_last_log_lines_are_kept_and_long_lines_cut() -> None:
    text = b"".join(b"line %d\n" % number for number in range(300)) + b"x" * 5000 + b"\n\x1b[31mred\x1b[0m 1%\r 2%\n"
    (log,) = build_failure_diagnosis(make_files(log_of(text)), EMPTY, ENDED, ERRORS).logs
    assert len(log.lines) == LOG_LINES
    assert log.cut is True
    assert log.lines[0] == "line 202"
    assert log.lines[-2] == "x" * LINE_LENGTH + " ..."
    assert log.lines[-1] == " 2%"


def test_a_stall_diagnosis_names_its_start() -> None:
    body = build_stall_diagnosis(
        make_files(), NodeSituation(NOW, node_status(worker_status(stalled=True))), NOW - 300, ERRORS
    )
    assert (body.kind, body.since) == ("stall", NOW - 300)
    assert render_diagnosis(body).startswith(
        "worker_w0 (rank 0) on node01 makes no progress since 2025-11-22 04:08:41 UTC\n"
    )


SECRETS = {
    "hf": "hf_abcdefghijklmnopqrstuvwxyz0123",
    "password": "correct-horse",
    "url": "battery-staple",
    "hook": "T000XSECRETX",
    "key": "MIIEowIBAAKCAQEAabcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKL",
}


def test_a_diagnosis_contains_no_secret() -> None:
    leak = (
        f"HF_TOKEN={SECRETS['hf']} password: {SECRETS['password']} https://ada:{SECRETS['url']}@x.org "
        f"https://hooks.slack.com/services/{SECRETS['hook']}"
    )
    block = f"-----BEGIN PRIVATE KEY-----\n{SECRETS['key']}\n-----END PRIVATE KEY-----\n"
    text = f"{leak}\n{block}".encode() + TRACEBACK.replace(b"device-side", leak.encode())
    status = node_status(
        worker_status(1, state=leak),
        job=JobStatus(job_name=leak),
        memory=Memory(cgroup=leak),
        filesystems=(FileSystem(group=leak),),
    )
    files = make_files(log_of(text), ended={"error": leak}, state={"stop": {"cause": leak}})
    situation = NodeSituation(NOW, status, (), ProcessDetails(paths=(leak,)), {leak: leak})
    body = build_failure_diagnosis(files, situation, ENDED.replace(evidence=(leak,)), ERRORS)
    for secret in SECRETS.values():
        assert secret not in json.dumps(body.to_json())
        assert secret not in render_diagnosis(body)
    assert "Traceback (most recent call last):" in render_diagnosis(body)


# -- its size ------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["x", "é\n", "\U0001f600", "a=1 \n", "\n", '"\\\n']), st.integers(1, 8), st.integers(0, 30))
@example("\U0001f600", 8, 30)
def test_the_size_of_a_diagnosis_is_bounded(piece: str, logs: int, stack_count: int) -> None:
    text = (piece * MOST_LOG_BYTES)[:MOST_LOG_BYTES].encode()
    stacks = {f"process {number}": piece * 40_000 for number in range(stack_count)}
    files = make_files(*(LogEnd(f"log{number}", len(text), text, 0, 0) for number in range(logs)))
    body = build_failure_diagnosis(
        files, NodeSituation(NOW, node_status(), (), ProcessDetails(paths=(piece * 100,) * 5000), stacks), ENDED, ERRORS
    )
    assert len(json.dumps(body.to_json(), ensure_ascii=False).encode()) <= MOST_JSON_BYTES
    text_of_diagnosis = render_diagnosis(body)
    assert len(text_of_diagnosis.encode()) <= MOST_TEXT_BYTES
    assert "== Exit" in text_of_diagnosis


# -- recent samples ------------------------------------------------------------------------------


def test_recent_samples_are_dense_at_the_end_and_sparse_before() -> None:
    recent = RecentSamples()
    for second in range(1000):
        worker = WorkerStatus(worker="w", rank=0, rss_bytes=second, cpu_s=second * 2.0, pid=7)
        recent.add(worker, NodeStatus(time=NOW + second, memory=Memory(used_bytes=second)))
    samples = recent.samples()
    times = [sample["time"] - NOW for sample in samples]
    assert times[-30:] == list(range(970, 1000))
    assert {after - before for before, after in itertools.pairwise(times[:54])} == {5.0}
    assert 295 <= times[-1] - times[0] <= 305
    assert len(samples) == len(recent) == 84
    assert samples[-1] == {
        "time": NOW + 999,
        "rss_bytes": 999,
        "cpu_s": 1998.0,
        "cgroup_used_bytes": 999,
        "cpu_cores": 2.0,
    }
    assert [type(samples[-1][name]) for name in ("rss_bytes", "cpu_s")] == [int, float]


def test_recent_samples_leave_out_unknown_values() -> None:
    recent = RecentSamples()
    worker = WorkerStatus(worker="w", rank=0, items=5, gpus=(0,), state="running", gpu_memory_full=NOW + 9)
    recent.add(worker, NodeStatus(time=NOW))
    assert recent.samples() == [{"time": NOW, "items": 5}]


# -- GPUs ----------------------------------------------------------------------------------------


def test_recent_samples_contain_the_gpu_use_of_the_worker() -> None:
    recent = RecentSamples()
    worker = WorkerStatus.from_json({"worker": "w", "rank": 0, **of_worker(0)})
    node = NodeGpus.from_json(gpus(gpu(0), gpu(1, utilization_ratio=0.0)))
    recent.add(worker, NodeStatus(time=NOW, gpus=node))
    shares = {"gpu_utilization_ratio": 0.95, "gpu_sm_ratio": 0.5}
    assert recent.samples() == [{"time": NOW, **shares, "gpu_memory_bytes": 15 * GIB}]


def body_with_gpus(restarts: int = 0, kind: str = "failure") -> Diagnosis:
    """Diagnosis of a worker whose GPU was lost two seconds before its end."""
    node = gpus(gpu(0, state="lost", words="GPU is lost", xids=[{**XID_79, "time": NOW - 2}]), gpu(1))
    used = GpuUseStatus.from_json(of_worker(0, gpu_use=[use(1)] if restarts else [use(0)]))
    entry = WorkerStatus.join(worker_status(restarts=restarts), used)
    samples = [{"time": NOW - 9 + second, "gpu_sm_ratio": 0.5, "gpu_memory_bytes": 15.0 * GIB} for second in range(9)]
    situation = NodeSituation(NOW, node_status(entry, gpus=NodeGpus.from_json(node)), samples)
    if kind == "stall":
        return build_stall_diagnosis(make_files(), situation, NOW - 300, ERRORS)
    return build_failure_diagnosis(make_files(), situation, ENDED, ERRORS)


def test_a_diagnosis_shows_gpu_problems() -> None:
    body = body_with_gpus()
    evidence: Any = to_json(body.gpus)
    assert evidence["last_minute"]["gpu_memory_peak_bytes"] == 15 * GIB
    (device,) = evidence["devices"]
    assert (device["uuid"], device["state"], device["xids"][0]["xid"]) == ("GPU-00", "lost", 79)
    text = render_diagnosis(body)
    assert text.index("== GPUs of the worker") < text.index("== Last minutes")
    assert "  wrong                  GPU 0 is lost\n" in text
    assert "  wrong                  GPU 0: Xid 79, GPU has fallen off the bus, at 2025-11-22 04:13:39 UTC" in text
    assert "04:13:39 UTC (2 s before the end)\n" in text
    assert "  last minute            50 % by its own kernels, 15.0 GiB of GPU memory at the end, at most 15.0" in text
    assert "  GPU 0                  NVIDIA H200, 141 GiB, GPU-00, 61 °C\n" in text
    assert "own kernels   GPU memory\n" in text
    json.dumps(body.to_json())


def test_a_stall_diagnosis_shows_gpu_errors_without_a_time_to_the_end() -> None:
    assert "GPU has fallen off the bus, at 2025-11-22 04:13:39 UTC\n" in render_diagnosis(body_with_gpus(kind="stall"))


def test_gpus_of_the_next_run_are_not_in_the_diagnosis() -> None:
    evidence = body_with_gpus(restarts=1).gpus
    assert evidence is not None
    assert [device.uuid for device in evidence.devices] == ["GPU-00"]


def test_the_diagnosis_of_a_worker_without_gpus_mentions_none() -> None:
    body = build_failure_diagnosis(make_files(), NodeSituation(NOW, node_status(worker_status())), ENDED, ERRORS)
    assert body.gpus is None
    assert "GPU" not in render_diagnosis(body.replace(process={}))


# -- the end of a log ----------------------------------------------------------------------------


def test_the_end_of_a_log_begins_with_a_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    lines = [b"password=correct-horse-%06d" % number for number in range(5000)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    end = read_log_end(path, tmp_path)
    assert end is not None
    assert (end.name, end.size_bytes) == ("a.log", path.stat().st_size)
    assert end.start + len(end.text) == end.size_bytes
    assert end.lines_before is not None
    assert end.text.split(b"\n")[:-1] == lines[end.lines_before :]


@pytest.mark.parametrize("separator", [b"\r", b" "])
def test_the_end_of_a_log_without_lines_begins_after_a_separator(tmp_path: Path, separator: bytes) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(separator.join(b"password=%06d" % number for number in range(9000)))
    end = read_log_end(path, tmp_path)
    assert end is not None
    assert end.text.startswith(b"password=")


def test_an_unreadable_log_gives_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert read_log_end(tmp_path / "absent", tmp_path) is None
    assert read_log_end(tmp_path, tmp_path) is None
    fifo = read_log_end(tmp_path / "fifo", tmp_path)
    assert fifo is None or fifo.text == b""


# -- where it is written -------------------------------------------------------------------------


def body_of(end: float = NOW, **changes: Any) -> Diagnosis:
    body = build_failure_diagnosis(make_files(), EMPTY, ENDED, ERRORS)
    assert body.exit is not None
    return body.replace(exit=body.exit.replace(end=end), **changes)


def read_diagnoses(run_dir: Path) -> dict[str, tuple[int, int, int]]:
    """Rank, attempt and restart of each diagnosis, by file name. Each must have its text file."""
    folder = run_dir / run_files.DIAGNOSTICS_DIR
    bodies = {path.stem: run_files.read_json(path) or {} for path in folder.glob("*.json")}
    assert {path.stem for path in folder.glob("*.txt")} == set(bodies)
    assert len(list(folder.iterdir())) == 2 * len(bodies)
    return {stem: tuple(int(str(body[key])) for key in ("rank", "attempt", "restart")) for stem, body in bodies.items()}  # type: ignore[misc]


def test_the_plain_name_has_the_latest_failure_and_earlier_ones_are_kept(tmp_path: Path) -> None:
    for restart in range(3):
        assert write_diagnosis(tmp_path, body_of(restart=restart, end=NOW + restart), "text")
    assert write_diagnosis(tmp_path, body_of(attempt=1, end=NOW + 9), "text")
    assert read_diagnoses(tmp_path) == {
        "worker_w0": (0, 1, 0),
        "worker_w0_rank0_r0": (0, 0, 0),
        "worker_w0_rank0_r1": (0, 0, 1),
        "worker_w0_rank0_r2": (0, 0, 2),
        "worker_w0_rank0_a1_r0": (0, 1, 0),
    }


def test_only_the_newest_diagnoses_of_a_rank_are_kept(tmp_path: Path) -> None:
    count = MOST_DIAGNOSES + 5
    for restart in range(count):
        write_diagnosis(tmp_path, body_of(restart=restart, end=NOW + restart), "text")
    newest = {f"worker_w0_rank0_r{restart}" for restart in range(5, count)}
    kept = {path.stem for path in (tmp_path / "diagnostics").iterdir()}
    assert kept == {"worker_w0", *newest}
    assert len(list((tmp_path / "diagnostics").iterdir())) == 2 * len(kept)


def test_a_first_failure_has_only_the_plain_name(tmp_path: Path) -> None:
    write_diagnosis(tmp_path, body_of(), "text")
    assert read_diagnoses(tmp_path) == {"worker_w0": (0, 0, 0)}


def test_every_rank_of_a_worker_has_its_own_diagnosis(tmp_path: Path) -> None:
    for rank in (1, 0):
        write_diagnosis(tmp_path, body_of(rank=rank, ranks=2, end=NOW - rank), "text")
    write_diagnosis(tmp_path, body_of(rank=2, ranks=3, end=NOW - 50), "reported late")
    assert read_diagnoses(tmp_path) == {
        "worker_w0": (0, 0, 0),
        "worker_w0_rank0_r0": (0, 0, 0),
        "worker_w0_rank1_r0": (1, 0, 0),
        "worker_w0_rank2_r0": (2, 0, 0),
    }


def test_a_diagnosis_is_not_replaced_by_one_with_less_information(tmp_path: Path) -> None:
    rich, poor = body_of(course=({"time": NOW},)), body_of()
    assert write_diagnosis(tmp_path, poor, "poor")
    assert write_diagnosis(tmp_path, rich, "rich")
    assert not write_diagnosis(tmp_path, poor, "poor")
    assert (tmp_path / run_files.DIAGNOSTICS_DIR / "worker_w0.txt").read_text("utf-8") == "rich"
    assert has_diagnosis(tmp_path, poor)
    assert not has_diagnosis(tmp_path, body_of(restart=1))


def test_a_stall_has_its_own_file_next_to_the_failure(tmp_path: Path) -> None:
    write_diagnosis(tmp_path, body_of(), "text")
    for since in (1.0, 2.0):
        write_diagnosis(tmp_path, build_stall_diagnosis(make_files(), EMPTY, since, ERRORS), "text")
    assert read_diagnoses(tmp_path) == {"worker_w0": (0, 0, 0), "worker_w0_stall": (0, 0, 0)}
    assert (run_files.read_json(tmp_path / run_files.DIAGNOSTICS_DIR / "worker_w0_stall.json") or {})["since"] == 2.0


# -- the collector -------------------------------------------------------------------------------


class DiagnosedNode:
    """A collector over a status that the test sets."""

    def __init__(self, run_dir: Path, ranks: int = 1) -> None:
        (run_dir / run_files.WORKERS_DIR).mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.context = make_context(make_manifest(run_dir, *(make_task(rank) for rank in range(ranks))))
        self.status = node_status(*(worker_status(rank) for rank in range(ranks)))
        self.collector = DiagnosticsCollector(self.context, lambda: self.status)

    def read(self, *workers: WorkerStatus, seconds: float = 1.0) -> None:
        """Read once, some seconds later, with these workers in the status."""
        self.status = self.status.replace(time=self.status.time + seconds, workers=workers)
        self.collector.read()

    def written(self, stem: str = "worker_w0") -> Diagnosis | None:
        return Diagnosis.read(self.run_dir / run_files.DIAGNOSTICS_DIR / f"{stem}.json")

    def body(self, stem: str = "worker_w0") -> Diagnosis:
        body = self.written(stem)
        assert body is not None
        return body


@pytest.fixture
def diagnosed_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiagnosedNode:
    monkeypatch.setattr(python_stacks, "find_py_spy", lambda: None)
    monkeypatch.setattr("exporter.workers.diagnosis_collector.find_py_spy", lambda: None)
    return DiagnosedNode(tmp_path)


FAILED = worker_status(up=False, state="dead", rss_bytes=None, exit=ENDED, exits=(ENDED,))


def test_a_failure_is_written_once_with_its_recent_samples(diagnosed_node: DiagnosedNode) -> None:
    for number in range(5):
        diagnosed_node.read(worker_status(cpu_s=10.0 + 2 * number))
    assert diagnosed_node.written() is None
    diagnosed_node.read(FAILED)
    body = diagnosed_node.body()
    assert [sample.get("cpu_cores") for sample in body.course] == [None, 2.0, 2.0, 2.0, 2.0]
    assert body.process["paths"] == ["/data/shard-3"]
    assert body.stacks == {"workers of this node": "no stack: py-spy is not installed"}
    path = diagnosed_node.run_dir / run_files.DIAGNOSTICS_DIR / "worker_w0.json"
    before = path.stat().st_mtime_ns
    diagnosed_node.read(FAILED)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("start", "mtime", "has_log"),
    [
        (1000.0, 900.0, False),  # of an earlier job
        (1000.0, 998.0, True),  # the clock of the file server is behind
        (4600.0, 1001.0, True),  # the clock of the node was set back
    ],
)
def test_a_diagnosis_has_no_log_of_an_earlier_job(
    diagnosed_node: DiagnosedNode, start: float, mtime: float, has_log: bool
) -> None:
    run_dir, logs = diagnosed_node.run_dir, PathGroup("log", ".", "*.log")
    manifest = make_manifest(run_dir, make_task(), logs=logs)
    collector = DiagnosticsCollector(make_context(manifest, FakeClock()), lambda: diagnosed_node.status)
    (run_dir / "worker_0.log").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    os.utime(run_dir / "worker_0.log", (mtime, mtime))
    (run_dir / f"{NODE}_worker_w0.err").write_text("ModuleNotFoundError: No module named 'x'\n")
    name = run_files.record_name("worker_w0", 0, 0, 0)
    record = {"pid": 1, "start": start, "start_ticks": 1000 * CLOCK_TICKS}
    run_files.write_json(run_dir / run_files.WORKERS_DIR / f"{name}.start.json", record)
    diagnosed_node.status = node_status(FAILED)
    collector.read()
    found = [log.file for log in diagnosed_node.body().logs]
    assert found == [f"{NODE}_worker_w0.err", *(["worker_0.log"] if has_log else [])]


@pytest.mark.parametrize("reason", ["completed", "terminated_peer", "cancelled", "time_limit", "preempted"])
def test_an_end_that_is_not_a_failure_has_no_diagnosis(diagnosed_node: DiagnosedNode, reason: str) -> None:
    diagnosed_node.read(worker_status(up=False, exits=(ENDED.replace(reason=reason),)))
    assert not (diagnosed_node.run_dir / run_files.DIAGNOSTICS_DIR).exists()


def test_each_run_of_a_worker_has_its_own_recent_samples(diagnosed_node: DiagnosedNode) -> None:
    diagnosed_node.read(worker_status())
    second_end = ENDED.replace(restart=1, time=NOW + 5)
    diagnosed_node.read(worker_status(restarts=1, exits=(ENDED,)))
    diagnosed_node.read(worker_status(restarts=1, exits=(ENDED,)))
    diagnosed_node.read(
        worker_status(
            up=False,
            restarts=1,
            exits=(
                ENDED,
                second_end,
            ),
        )
    )
    assert len(diagnosed_node.body("worker_w0_rank0_r0").course) == 1
    assert len(diagnosed_node.body("worker_w0_rank0_r1").course) == 2
    assert diagnosed_node.body().restart == 1


def test_a_restarted_sidecar_keeps_the_earlier_diagnosis(diagnosed_node: DiagnosedNode) -> None:
    diagnosed_node.read(FAILED)
    path = diagnosed_node.run_dir / run_files.DIAGNOSTICS_DIR / "worker_w0.json"
    before = path.stat().st_mtime_ns
    later = DiagnosedNode(diagnosed_node.run_dir)
    later.read(FAILED)
    assert path.stat().st_mtime_ns == before


def test_a_status_without_runs_does_not_end_a_stall(diagnosed_node: DiagnosedNode) -> None:
    stalled = worker_status(stalled=True, last_progress=NOW - 400)
    diagnosed_node.read(stalled)
    path = diagnosed_node.run_dir / run_files.DIAGNOSTICS_DIR / "worker_w0_stall.json"
    before = path.stat().st_mtime_ns
    collectors = diagnosed_node.status.collectors
    diagnosed_node.status = diagnosed_node.status.replace(collectors={"workers": CollectorReads(success=False)})
    diagnosed_node.read(worker_status(up=False))
    diagnosed_node.status = diagnosed_node.status.replace(collectors=collectors)
    diagnosed_node.read(stalled)
    assert path.stat().st_mtime_ns == before


def test_each_stall_is_written_once(diagnosed_node: DiagnosedNode) -> None:
    for _ in range(3):
        diagnosed_node.read(worker_status(stalled=True, last_progress=NOW - 400))
    path = diagnosed_node.run_dir / run_files.DIAGNOSTICS_DIR / "worker_w0_stall.json"
    before = path.stat().st_mtime_ns
    assert diagnosed_node.body("worker_w0_stall").since == NOW - 400
    diagnosed_node.read(worker_status(stalled=True, last_progress=NOW - 400))
    assert path.stat().st_mtime_ns == before
    diagnosed_node.read(worker_status(items=13, items_processed=13))
    diagnosed_node.read(worker_status(items=13, items_processed=13, stalled=True, last_progress=NOW - 100))
    assert diagnosed_node.body("worker_w0_stall").since == NOW - 100


def test_a_stall_is_the_same_after_a_suspension_of_the_job_and_after_more_time(diagnosed_node: DiagnosedNode) -> None:
    diagnosed_node.read(worker_status(stalled=True, last_progress=NOW - 400))
    diagnosed_node.read(worker_status(stalled=True, last_progress=NOW + 3200), seconds=3600)
    diagnosed_node.read(worker_status(stalled=False, last_progress=NOW + 3200))
    diagnosed_node.read(worker_status(stalled=True, last_progress=NOW + 3200), seconds=300)
    assert diagnosed_node.body("worker_w0_stall").since == NOW - 400


def test_stacks_are_read_from_leftover_processes_and_running_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "py-spy"
    program.write_text('#!/bin/sh\necho "stack of $3, token=hf_abcdefghijklmnopqrstuvwxyz"\n', encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    code = "import sys; print('there', flush=True); sys.stdin.read()"
    peer = start(sys.executable, "-c", code)
    leftover = start("env", "GPUJOB_JOB_ID=4459", "GPUJOB_RANK=0", sys.executable, "-c", code)
    for process in (peer, leftover):
        assert process.stdout.readline() == "there\n"
    diagnosed_node = DiagnosedNode(tmp_path, ranks=2)
    diagnosed_node.read(FAILED, worker_status(1, pid=peer.pid))
    stacks = diagnosed_node.body().stacks
    assert stacks == {
        f"worker_w0 (rank 0, left over), pid {leftover.pid}": f"stack of {leftover.pid}, token=<redacted>",
        f"worker_w1 (rank 1), pid {peer.pid}": f"stack of {peer.pid}, token=<redacted>",
    }


def test_the_stack_of_a_stalled_worker_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "py-spy").write_text("#!/bin/sh\necho stack\n", encoding="ascii")
    (folder / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    running = [start(sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()") for _ in range(8)]
    assert [process.stdout.readline() for process in running] == ["1\n"] * 8
    diagnosed_node = DiagnosedNode(tmp_path, ranks=8)
    entries = [worker_status(rank, pid=process.pid) for rank, process in enumerate(running)]
    diagnosed_node.read(*entries[:7], entries[7].replace(stalled=True))
    stacks = diagnosed_node.body("worker_w7_stall").stacks
    assert list(stacks) == [f"worker_w{rank} (rank {rank}), pid {running[rank].pid}" for rank in (7, 0, 1, 2, 3)]


def test_no_stack_is_read_from_a_reused_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setattr("exporter.workers.diagnosis_collector.find_py_spy", lambda: "/bin/true")
    other = start(sys.executable, "-c", "import sys; sys.stdin.read()")
    diagnosed_node = DiagnosedNode(tmp_path, ranks=2)
    name = run_files.record_name("worker_w1", 1, 0, 0)
    run_files.write_json(tmp_path / run_files.WORKERS_DIR / f"{name}.start.json", {"pid": other.pid, "start_ticks": 1})
    diagnosed_node.read(FAILED, worker_status(1, pid=other.pid))
    assert diagnosed_node.body().stacks == {}


# -- a full disk, and everything together ----------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with almost no space."""
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    options = ["-o", "size=256k,mode=0777"]
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tmpfs", str(mount_point)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs root to mount a small file system")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def fill(mount_point: Path) -> None:
    """Fill the file system completely."""
    with (mount_point / "filler").open("ab", buffering=0) as out:
        for piece in (b"\0" * 4096, b"\0"):
            try:
                while out.write(piece):
                    pass
            except OSError:
                continue


def test_a_full_disk_is_logged_once(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("exporter.workers.diagnosis_collector.find_py_spy", lambda: None)
    diagnosed_node = DiagnosedNode(small_disk, ranks=2)
    fill(small_disk)
    caplog.set_level(logging.WARNING)
    diagnosed_node.read(FAILED, worker_status(1))
    diagnosed_node.read(FAILED, worker_status(1, up=False, exits=(ENDED,)))
    assert [record.getMessage() for record in caplog.records] == [
        "the diagnosis of worker_w0 cannot be written: No space left on device"
    ]
    assert list(small_disk.glob("diagnostics/*")) == []


def test_the_start_of_the_text_is_written_if_little_space_is_left(small_disk: Path) -> None:
    (small_disk / run_files.DIAGNOSTICS_DIR).mkdir()
    fill(small_disk)
    os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 8192)
    with pytest.raises(OSError, match="No space left"):
        write_diagnosis(small_disk, body_of(stacks={"x": "y" * 200_000}), "headline\n" + "x" * 100_000)
    text = (small_disk / run_files.DIAGNOSTICS_DIR / "worker_w0.txt").read_text("utf-8")
    assert text.startswith("headline\n")
    assert [path.name for path in (small_disk / run_files.DIAGNOSTICS_DIR).iterdir()] == ["worker_w0.txt"]


PROGRAM = """
import os, sys, time
print("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123")
print("cloning https://ada:battery-staple@example.org/x.git")
print("Processed 1/50 items", flush=True)
sys.stderr.write(" 10%|#   |\\r 20%|##  |\\n")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
try:
    {}["shard-3"]
except KeyError as error:
    raise RuntimeError("no shard for token=hf_abcdefghijklmnopqrstuvwxyz0123") from error
"""


def last_read(sidecar: SidecarProcess) -> object:
    """When the diagnostics were last read."""
    return json.loads(sidecar.text("/status"))["collectors"][DiagnosticsCollector.name]["last_success"]


def test_a_worker_that_raises_leaves_its_diagnosis(tmp_path: Path) -> None:
    task, peer = make_task(0), make_task(1)
    write_manifest(make_manifest(tmp_path, task, peer, total_items=100, check_interval_s=0.5))
    run_files.write_job_state(str(tmp_path), "running")
    wrappers = Wrappers(tmp_path)
    sidecar = None
    try:
        wrappers.start(task, sys.executable, "-c", PROGRAM, str(tmp_path / "go"))
        wrappers.start(peer, "sleep", "600")
        sidecar = SidecarProcess(tmp_path, "--web.listen-address", "127.0.0.1:0")
        sidecar.until_ready()
        # on a busy machine the first look at a log, which loads the packs, takes seconds
        until(lambda: "gpujob_worker_items{" in sidecar.text("/metrics"), "the log of the worker")
        for _ in range(2):  # a recent sample each
            before = last_read(sidecar)
            until(lambda before=before: last_read(sidecar) != before, "a read of the diagnostics")
        (tmp_path / "go").touch()
        ended = wrappers.record(task, "exit")
        path = tmp_path / run_files.DIAGNOSTICS_DIR / "worker_w0.json"
        body = Diagnosis.from_json(until(lambda: run_files.read_json(path), "the diagnosis"))
        assert path.stat().st_mtime - ended["end"] < SOON_S  # with the next read, and not at the end of the job
        text = path.with_suffix(".txt").read_text("utf-8")
    finally:
        if sidecar is not None:
            sidecar.close()
        wrappers.close()
    assert body.exit is not None
    assert body.error is not None
    assert (body.exit.reason, body.exit.code, body.exit.pid) == ("app_error", 1, ended["pid"])
    assert body.error.line == "KeyError: 'shard-3'"
    assert body.error.led_to == "RuntimeError: no shard for token=<redacted>"
    assert body.error.file == f"{NODE}_worker_w0.err"
    lines = (tmp_path / body.error.file).read_bytes().decode().split("\n")
    assert lines[(body.error.line_number or 0) - 1] == "KeyError: 'shard-3'"
    assert [peer.worker for peer in body.peers] == ["worker_w1"]
    assert body.course
    assert body.course[-1]["rss_bytes"] > 1 << 20
    assert {entry.group for entry in body.filesystems} == {"output", "checkpoint", "run"}
    for shown in (text, path.read_text("utf-8")):
        assert "HF_TOKEN=<redacted>" in shown
        assert " 20%|##  |" in shown
        assert " 10%|" not in shown
        for secret in ("abcdefghijklmnopqrstuvwxyz0123", "battery-staple"):
            assert secret not in shown


class RecordingCollector:
    """A collector that records each read, and whether the sidecar is final then."""

    families = ()
    interval_s = 3600.0

    def __init__(self, name: str, sidecar: Sidecar, reads: list[tuple[str, bool]]) -> None:
        self.name, self._sidecar, self._reads = name, sidecar, reads

    def read(self) -> int:
        self._reads.append((self.name, self._sidecar.final))
        return 0

    def render(self, snapshot: int, out: Samples) -> None: ...

    def describe(self, snapshot: int, parts: StatusParts) -> None: ...


def test_diagnoses_are_written_before_the_final_status(tmp_path: Path) -> None:
    reads: list[tuple[str, bool]] = []
    context = make_context(make_manifest(tmp_path), SystemClock())
    sidecar = make_sidecar(context)
    sidecar.slots = [CollectorSlot(RecordingCollector("workers", sidecar, reads), context.clock)]
    sidecar.diagnostics = CollectorSlot(RecordingCollector("diagnostics", sidecar, reads), context.clock)
    sidecar.publisher = CollectorSlot(RecordingCollector("publish", sidecar, reads), context.clock)
    sidecar.start()
    until(lambda: len(reads) == 3, "the first reads")
    reads.clear()
    asyncio.run(HttpService(sidecar, Access({}, names=()))._finish(10.0, 10.0))
    assert reads == [("workers", False), ("diagnostics", False), ("publish", True)]


def test_the_logs_of_a_diagnosis_begin_with_its_run(tmp_path: Path) -> None:
    task, log = make_task(0), tmp_path / "worker_0.log"
    manifest = make_manifest(tmp_path, task, logs=PathGroup("log", ".", "*.log"))
    log.write_bytes(b"an earlier run\n")
    os.utime(log, (90, 90))
    (tmp_path / "workers").mkdir()
    finder = LogStartFinder(make_context(manifest, FakeClock(95)))
    finder.note()
    finder.save(task, 100, tmp_path / "workers" / "worker_w0_rank0_a0_r2.logs.json")
    with log.open("ab") as out:
        out.write(b"this run\n")
    (end,) = read_run_files(manifest, task, NODE, 0, 2, [str(log)]).logs
    assert (end.text, end.start, end.lines_before) == (b"this run\n", 15, 1)


def test_files_of_a_run_are_found(tmp_path: Path) -> None:
    task = make_task(0)
    manifest = make_manifest(tmp_path, task, make_task(1))
    (tmp_path / f"{NODE}_worker_w0_r2.err").write_bytes(b"second\n")
    (tmp_path / "own.log").write_bytes(b"own\n")
    files = read_run_files(manifest, task, NODE, 0, 2, [f"{tmp_path}/own.log", f"{tmp_path}/absent.log"])
    assert [(log.name, log.text) for log in files.logs] == [
        (f"{NODE}_worker_w0_r2.err", b"second\n"),
        ("own.log", b"own\n"),
    ]
    assert (files.run.worker, files.run.rank, files.run.ranks, files.run.restart) == ("worker_w0", 0, 1, 2)
