"""Logs of real files that grow: from lines to progress, ETA and errors."""

import dataclasses
import json
import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.collecting.collector import CollectorContext
from exporter.collecting.published import RECENT_S as RECENT_VALUE_S
from exporter.collecting.published import JobProgress, NodeGpuUse
from exporter.collecting.saved_state import STATE_DIR
from exporter.contract import run_files
from exporter.contract.events import EventFilter
from exporter.contract.manifest import FULL, NORMAL, LogPattern, Manifest, PathGroup, Task
from exporter.contract.status import WorkerStatus
from exporter.logs import tail_reader
from exporter.logs.lexicon import Lexicon
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.logs.packs import PackDetector
from exporter.logs.tail_reader import CHUNK_BYTES
from exporter.machine.folders import FORCED_CHECK_EVERY, RECENT_S
from exporter.progress import collector, worker_logs_reader
from exporter.progress.collector import (
    ETA,
    FINISH,
    ITEMS,
    ITEMS_EXPECTED,
    ITEMS_PROCESSED,
    LAST_PROGRESS,
    LOG_BYTES,
    LOG_ERRORS,
    LOG_LAG,
    LOG_LINES,
    LOG_VALUE,
    LOG_VALUE_TIME,
    SAVE_INTERVAL_S,
    STALLED,
    THROUGHPUT,
    TIMEOUTS,
    UNMATCHED,
    LogsCollector,
)
from exporter.progress.values import MOST_RANKS, MOST_VALUES, VALUE_FRESH_S
from exporter.progress.worker_logs_reader import WorkerLogFacts
from tests.support.exporter import (
    NODE,
    FakeClock,
    make_context,
    make_identity,
    make_manifest,
    make_task,
    page_of,
    publisher,
    samples_of,
)
from tests.support.statuses import described, worker_of
from tests.support.strategies import PLACES, cut

TASK = make_task(0)
LABELS = 'worker="worker_w0",role="worker",rank="0"'


class LogsClock(FakeClock):
    """A clock for logs that are read all the time, even where a test does not."""

    def __init__(self, logs: "Logs") -> None:
        super().__init__()
        self._logs = logs

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._logs.collector._stops.next_read_at = None

    def stop(self, seconds: float) -> None:
        """Let this time pass for a job that is suspended."""
        self.now += seconds


class Logs:
    """The logs of one node's workers, and a collector with its own clock."""

    def __init__(self, run_dir: Path, *tasks: Task, **changes: Any) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        self.manifest = make_manifest(run_dir, *(tasks or (TASK,)), **{"detail": FULL, **changes})
        self.clock = LogsClock(self)
        self.collector = self.fresh()
        (run_dir / run_files.WORKERS_DIR).mkdir(exist_ok=True)

    def fresh(self) -> LogsCollector:
        """A collector that has read nothing yet, as after a restart of the sidecar."""
        return self.collector_of(make_context(self.manifest, self.clock))

    def collector_of(self, context: CollectorContext) -> LogsCollector:
        """A collector whose published values the test sees and sets."""
        self.context, self.published = context, publisher(JobProgress(), self.clock)
        self.gpu_use = publisher(NodeGpuUse(), self.clock)
        return LogsCollector(context, self.published, self.gpu_use, publisher(()))

    def append(self, text: str | bytes, name: str = f"{NODE}_worker_w0.out") -> None:
        with (self.run_dir / name).open("ab") as out:
            out.write(text.encode() if isinstance(text, str) else text)

    def date(self, mtime: float, name: str = f"{NODE}_worker_w0.out") -> None:
        """Set when a log was last written, by the test's clock."""
        os.utime(self.run_dir / name, (mtime, mtime))

    def record(self, kind: str, restart: int = 0, attempt: int = 0, **facts: object) -> None:
        """Write the start or exit record of a run."""
        stem = run_files.record_name(TASK.worker, TASK.rank, attempt, restart)
        run_files.write_json(self.run_dir / run_files.WORKERS_DIR / f"{stem}.{kind}.json", {"pid": 1, **facts})

    def saved_file(self) -> Path:
        (path,) = (self.run_dir / STATE_DIR).iterdir()
        return path

    def facts(self) -> WorkerLogFacts:
        """The facts about the first worker after one read."""
        return self.collector.read().workers[0]

    def status(self) -> WorkerStatus:
        """The first worker as the status shows it."""
        return worker_of(described(self.collector, self.collector.read()))

    def page(self) -> str:
        return page_of(self.collector, self.collector.read())


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def items(*numbers: int, total: int = 100) -> str:
    return "".join(f"Processed {number}/{total} items\n" for number in numbers)


def test_a_worker_without_a_log_has_no_progress(logs: Logs) -> None:
    page = logs.page()
    for family in (ITEMS, ITEMS_EXPECTED, ITEMS_PROCESSED, THROUGHPUT, ETA, FINISH, LAST_PROGRESS, STALLED, LOG_VALUE):
        assert samples_of(page, family) == {}, family.name
    assert samples_of(page, LOG_LINES) == samples_of(page, LOG_BYTES) == samples_of(page, LOG_LAG) == {LABELS: 0}
    assert set(samples_of(page, LOG_ERRORS).values()) == {0.0}


def test_log_lines_give_position_and_processed_items(logs: Logs) -> None:
    logs.append(items(1, 2, 3))
    page = logs.page()
    assert samples_of(page, ITEMS) == samples_of(page, ITEMS_PROCESSED) == {LABELS: 3}
    assert samples_of(page, ITEMS_EXPECTED) == {LABELS: 100}
    assert samples_of(page, LAST_PROGRESS) == {LABELS: logs.clock.now}
    assert samples_of(page, LOG_LINES) == {LABELS: 3}
    assert samples_of(page, LOG_BYTES) == {LABELS: len(items(1, 2, 3))}


def test_lines_are_counted_for_pages_that_show_them(tmp_path: Path) -> None:
    logs = Logs(tmp_path, detail=NORMAL)
    logs.append(items(1, 2, 3))
    assert (logs.facts().position, logs.facts().lines) == (3, None)


def test_stdout_and_stderr_belong_to_one_worker(logs: Logs) -> None:
    logs.append(items(5))
    logs.append("Connection refused\n", f"{NODE}_worker_w0.err")
    facts = logs.facts()
    assert (facts.position, facts.lines) == (5, 2)
    assert ("connection", "warning", 1) in facts.errors


def test_the_share_of_the_total_of_the_job_is_used_if_the_log_has_no_total(tmp_path: Path) -> None:
    own = LogPattern("items", r"done (\d+)")
    logs = Logs(tmp_path, make_task(0), make_task(1), total_items=101, progress=(own,))
    logs.append("done 7\n")
    first, second = logs.collector.read().workers
    assert (first.position, first.expected, second.expected) == (7, 51, 50)


def test_total_epochs_and_total_steps_are_used_if_the_log_has_no_total(tmp_path: Path) -> None:
    step = LogPattern("step", r"at step (\d+)")
    logs = Logs(tmp_path, make_task(0), make_task(1), total_epochs=10, total_steps=70, progress=(step,))
    logs.append("Epoch 3:  45%|#  | 45/100 [00:12<00:15, 3.66it/s, v_num=0]\n")
    logs.append("at step 7\n", f"{NODE}_worker_w1.out")
    first, second = logs.collector.read().workers
    assert (first.position, first.expected, first.unit) == (345, 1000, "batches")
    assert (second.position, second.expected, second.unit) == (7, 70, "steps")


def test_each_line_of_a_resumed_run_counts_once(logs: Logs) -> None:
    logs.append(items(*range(1, 31)))
    assert logs.facts().processed == 30
    logs.record("start")
    logs.record("start", 1)
    logs.append("Resuming at 20/100 items\n" + items(*range(21, 61)), f"{NODE}_worker_w0_r1.out")
    assert logs.facts().processed == 70, "lines that were there when the restart was seen"
    logs.append(items(*range(61, 101)), f"{NODE}_worker_w0_r1.out")
    facts = logs.facts()
    assert (facts.position, facts.processed, facts.lines) == (100, 110, 111)


def test_each_line_of_a_run_that_starts_over_counts_once(logs: Logs) -> None:
    logs.append(items(*range(1, 31)))
    logs.facts()
    logs.append(items(31, 32))
    logs.record("start", 1)
    logs.append(items(1, 2, 3), f"{NODE}_worker_w0_r1.out")
    facts = logs.facts()
    assert (facts.position, facts.processed) == (3, 35), "the last lines of the first run count, too"


def test_a_sidecar_that_starts_late_counts_the_same_items(logs: Logs) -> None:
    logs.append(items(*range(1, 31)))
    for restart, text in ((1, "Resuming at 30/100 items\n" + items(*range(31, 41))), (2, items(*range(1, 6)))):
        logs.record("start", restart)
        logs.append(text, f"{NODE}_worker_w0_r{restart}.out")
    facts = logs.facts()
    assert (facts.position, facts.processed) == (5, 45)


def test_a_run_after_one_that_could_not_start_is_read(logs: Logs) -> None:
    logs.record("start")
    logs.append(items(1, 2, 3))
    logs.facts()
    logs.record("exit")
    logs.record("exit", 1, error="its step did not start")
    logs.facts()
    logs.record("start", 2)
    logs.append("Resuming at 3/100 items\n" + items(4, 5), f"{NODE}_worker_w0_r2.out")
    facts = logs.facts()
    assert (facts.position, facts.processed, facts.ended) == (5, 5, False)


@given(places=PLACES, seed=st.integers(0, 1000))
def test_processed_items_equal_the_lines_however_they_arrive(
    tmp_path_factory: pytest.TempPathFactory, places: list[int], seed: int
) -> None:
    """Each line is one item. The second of two runs resumes where the first ended. Sidecars restart at random."""
    logs, rng = Logs(tmp_path_factory.mktemp("logs")), random.Random(seed)
    middle = rng.randrange(0, 100)
    texts = [items(*range(1, middle + 1)), f"Resuming at {middle}/100 items\n" + items(*range(middle + 1, 101))]
    for restart, text in enumerate(texts):
        logs.record("start", restart)
        for piece in cut(text.encode(), places):
            logs.append(piece, f"{NODE}_worker_w0{'_r1' if restart else ''}.out")
            if rng.random() < 0.5:
                logs.facts()
            if rng.random() < 0.3:
                logs.collector = logs.fresh()  # the sidecar was killed some time after it saved its state
            logs.clock.advance(rng.choice((1, SAVE_INTERVAL_S)))
    facts = logs.facts()
    assert (facts.processed, facts.position, facts.lines, facts.lag_bytes) == (100, 100, 101, 0)


def test_processed_items_do_not_fall_with_the_position(logs: Logs) -> None:
    logs.append(items(179, 180, total=200))
    logs.facts()
    logs.append(items(100, 105, total=200))
    page = logs.page()
    assert samples_of(page, ITEMS) == {LABELS: 105}
    assert samples_of(page, ITEMS_PROCESSED) == {LABELS: 185}


def test_a_last_line_without_newline_counts_once_its_worker_has_ended(logs: Logs) -> None:
    logs.record("start")
    logs.append(items(99) + "Processed 100/100 items")
    logs.facts()
    logs.record("exit")
    assert logs.facts().position == 100


def steady_work(logs: Logs, readings: int, every_s: float = 5.0) -> None:
    """One item a second, read every few seconds."""
    for reading in range(1, readings + 1):
        logs.append(items(int(reading * every_s), total=1000))
        logs.facts()
        logs.clock.advance(every_s)


def save(logs: Logs) -> None:
    """Let the time pass after which the state is saved."""
    logs.clock.advance(SAVE_INTERVAL_S)
    logs.facts()


def test_steady_work_gives_throughput_and_eta(logs: Logs) -> None:
    steady_work(logs, 61)
    page, now = logs.page(), logs.clock.now
    throughput = samples_of(page, THROUGHPUT)
    assert throughput == {f'{LABELS},window="current"': 1.0, f'{LABELS},window="average"': 1.0}
    eta = samples_of(page, ETA)
    assert eta[f'{LABELS},quantile="0.5"'] == pytest.approx(690, rel=0.02)
    low, middle, high = (eta[f'{LABELS},quantile="{quantile}"'] for quantile in ("0.1", "0.5", "0.9"))
    assert low <= middle <= high
    assert samples_of(page, FINISH) == {LABELS: pytest.approx(now + 690, abs=14)}
    assert samples_of(page, STALLED) == {LABELS: 0}


def test_a_short_count_after_the_end_leaves_the_eta_unknown(logs: Logs) -> None:
    for done in range(0, 101, 2):
        logs.clock.advance(2)
        logs.append(items(done))
        facts = logs.facts()
    assert facts.eta is not None
    assert facts.eta.seconds == 0
    logs.append(items(1, total=20))
    facts = logs.facts()
    assert (facts.position, facts.expected, facts.processed, facts.eta) == (100, 100, 100, None)
    for done in range(2, 19):
        logs.clock.advance(1)
        logs.append(items(done, total=20))
        facts = logs.facts()
    assert (facts.position, facts.expected, facts.processed) == (18, 20, 117)
    assert facts.eta is not None
    assert facts.eta.seconds > 0


def test_a_silent_worker_has_no_throughput_and_is_stalled(logs: Logs) -> None:
    steady_work(logs, 61)
    before = logs.clock.now - 5
    logs.clock.advance(302)
    page = logs.page()
    assert samples_of(page, STALLED) == {LABELS: 1}
    assert f'{LABELS},window="current"' not in samples_of(page, THROUGHPUT)
    assert samples_of(page, LAST_PROGRESS) == {LABELS: before}


@pytest.mark.parametrize(("silence_s", "stalled"), [(290, False), (310, True)])
def test_a_worker_that_had_stalled_when_it_ended_is_said_so_later_too(
    logs: Logs, silence_s: float, stalled: bool
) -> None:
    steady_work(logs, 61)
    logs.clock.advance(silence_s - 5)
    assert logs.status().stalled_at_end is None
    logs.record("exit", end=logs.clock.now)
    logs.clock.advance(1000)
    for _ in range(2):
        assert (logs.status().stalled, logs.status().stalled_at_end) == (False, stalled)
        logs.collector = logs.fresh()
    logs.record("start", 1, start=logs.clock.now)
    assert logs.status().stalled_at_end is None


@pytest.mark.parametrize("after", [None, False])
def test_gpus_that_rest_after_the_end_do_not_make_busy_work_a_stall(logs: Logs, after: bool | None) -> None:
    steady_work(logs, 61)
    logs.clock.advance(1.5 * logs.manifest.stall_timeout_s)
    logs.gpu_use.publish(NodeGpuUse(busy={0: True}))
    assert logs.status().stalled is False
    logs.record("exit", end=logs.clock.now)
    logs.gpu_use.publish(NodeGpuUse(busy={} if after is None else {0: after}))
    assert logs.status().stalled_at_end is False


def test_a_finished_worker_does_not_stall(logs: Logs) -> None:
    logs.append(items(100))
    logs.facts()
    logs.clock.advance(1e6)
    page = logs.page()
    assert samples_of(page, STALLED) == {LABELS: 0}
    assert set(samples_of(page, ETA).values()) == {0.0}


def test_a_worker_that_starts_again_may_load_for_an_hour(logs: Logs) -> None:
    steady_work(logs, 61)
    logs.clock.advance(200)
    logs.record("start", 1, start=logs.clock.now)
    logs.facts()
    logs.clock.advance(3590)
    assert not logs.facts().stalled
    logs.clock.advance(20)
    assert logs.facts().stalled


def test_the_stall_timeout_of_the_job_applies(tmp_path: Path) -> None:
    logs = Logs(tmp_path, stall_timeout_s=10.0)
    steady_work(logs, 10, 1.0)
    logs.clock.advance(8)
    assert not logs.facts().stalled
    logs.clock.advance(2)
    assert logs.facts().stalled


def test_a_worker_that_hangs_in_its_first_lines_stalls_after_a_multiple_of_a_short_timeout(tmp_path: Path) -> None:
    logs = Logs(tmp_path, stall_timeout_s=10.0)
    logs.append(items(1))
    logs.facts()
    logs.clock.advance(5)
    logs.append(items(2))
    logs.facts()
    logs.clock.advance(235)
    assert not logs.facts().stalled
    logs.clock.advance(10)
    assert logs.facts().stalled


def test_a_stalled_worker_has_neither_rate_nor_eta(tmp_path: Path) -> None:
    logs = Logs(tmp_path, stall_timeout_s=10.0)
    steady_work(logs, 10, 1.0)
    facts = logs.facts()
    assert facts.rate is not None
    assert facts.eta is not None
    logs.clock.advance(10)
    facts = logs.facts()
    assert (facts.stalled, facts.rate, facts.eta, facts.confidence) == (True, None, None, None)


def test_a_value_has_its_timestamp_and_disappears_when_old(logs: Logs) -> None:
    logs.append("Epoch 2 loss: 0.5\n")
    seen_at = logs.clock.now
    logs.facts()
    logs.clock.advance(VALUE_FRESH_S - 1)
    page = logs.page()
    assert samples_of(page, LOG_VALUE) == {f'{LABELS},name="epoch"': 2, f'{LABELS},name="loss"': 0.5}
    assert set(samples_of(page, LOG_VALUE_TIME).values()) == {seen_at}
    logs.clock.advance(1)
    assert samples_of(logs.page(), LOG_VALUE) == samples_of(logs.page(), LOG_VALUE_TIME) == {}
    assert logs.status().values == {"epoch": 2, "loss": 0.5}, "the report needs the last one"


def test_errors_are_counted_by_pattern_and_severity(tmp_path: Path) -> None:
    logs = Logs(tmp_path, errors=(LogPattern("bad_shard", "shard .* is bad", "critical"), LogPattern("odd", "odd")))
    logs.append("shard 3 is bad\nodd\nodd\nCUDA out of memory\nfine\n")
    logs.facts()
    found = samples_of(logs.page(), LOG_ERRORS)
    assert {key: value for key, value in found.items() if value} == {
        f'{LABELS},pattern="bad_shard",severity="critical"': 1,
        f'{LABELS},pattern="odd",severity="warning"': 2,
        f'{LABELS},pattern="cuda_oom",severity="critical"': 1,
    }


def test_an_invalid_pattern_is_ignored(tmp_path: Path) -> None:
    logs = Logs(tmp_path, errors=(LogPattern("broken", "(", "critical"),), progress=(LogPattern("lr", "[", None),))
    logs.append(items(3))
    assert logs.facts().position == 3


def test_a_pattern_name_becomes_a_safe_label(tmp_path: Path, hard_name: str) -> None:
    logs = Logs(tmp_path, errors=(LogPattern(f"x {hard_name}", "bad", "critical"),))
    logs.append("bad\n")
    (key,) = [key for key, value in samples_of(logs.page(), LOG_ERRORS).items() if value]
    name = key.partition('pattern="')[2].partition('",severity')[0]
    assert not set(name) & set(" \"\\'()[],\n")


def test_extra_log_files_belong_to_the_worker_named_in_them(tmp_path: Path) -> None:
    group = PathGroup("log", "mylogs", "*.log")
    logs = Logs(tmp_path, make_task(0), make_task(1), logs=group)
    (tmp_path / "mylogs").mkdir()
    logs.append(items(3), "mylogs/worker_0.log")
    logs.append(items(8), "mylogs/worker_1.log")
    logs.append(items(99), "mylogs/summary.log")
    assert [facts.position for facts in logs.collector.read().workers] == [3, 8]


def test_a_number_after_a_role_name_is_an_index_within_the_role(tmp_path: Path) -> None:
    tasks = (make_task(0, role="prefill", index=0), make_task(1, role="decode", index=0))
    logs = Logs(tmp_path, *tasks, logs=PathGroup("log", "mylogs", "*.log"))
    (tmp_path / "mylogs").mkdir()
    logs.append(items(3), "mylogs/prefill_w0.log")
    logs.append(items(8), "mylogs/decode_w0.log")
    assert [facts.position for facts in logs.collector.read().workers] == [3, 8]


def test_the_log_of_an_earlier_job_is_ignored(tmp_path: Path) -> None:
    logs = Logs(tmp_path, logs=PathGroup("log", "mylogs", "*.log"))
    (tmp_path / "mylogs").mkdir()
    logs.append(items(90), "mylogs/worker_0.log")
    start = make_identity().start
    assert start is not None
    os.utime(tmp_path / "mylogs" / "worker_0.log", (start - 1, start - 1))
    assert logs.facts().position is None
    logs.append(items(1, 2), "mylogs/worker_0.log")
    assert logs.facts().position == 2


def test_extra_logs_that_come_and_go_are_forgotten_and_stay_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_reader, "DELETED_S", 0.0)
    logs = Logs(tmp_path, logs=PathGroup("log", "mylogs", "*.log"))
    (tmp_path / "mylogs").mkdir()
    for number in range(1, 6):
        name = f"mylogs/worker_0.{number}x.log"
        logs.append(items(number), name)
        logs.facts()
        (tmp_path / name).unlink()
        logs.facts()
        logs.facts()
    (worker,) = logs.collector._workers
    assert [Path(source.path).parent.name for source in worker.state().sources] == [tmp_path.name] * 2
    assert (logs.facts().lines, logs.facts().bytes_read) == (5, 5 * len(items(1)))


def test_the_same_lines_in_two_logs_count_once(tmp_path: Path) -> None:
    logs = Logs(tmp_path, logs=PathGroup("log", "mylogs", "*.log"))
    (tmp_path / "mylogs").mkdir()
    for first in (1, 4, 7):
        for name in (f"{NODE}_worker_w0.out", "mylogs/worker_0.log"):
            logs.append(items(first, first + 1, first + 2), name)
        logs.facts()
    facts = logs.facts()
    assert (facts.position, facts.processed) == (9, 9)


def test_a_node_reads_only_the_logs_of_its_own_workers(tmp_path: Path) -> None:
    logs = Logs(tmp_path, make_task(0), make_task(1, node_index=1))
    assert [facts.task.rank for facts in logs.collector.read().workers] == [0]


def test_a_log_beyond_the_byte_limit_of_a_poll_is_read_in_several(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs_reader, "POLL_BYTES", 2 * CHUNK_BYTES)
    line = "x" * 99 + "\n"
    logs.append(line * (3 * CHUNK_BYTES // 100) + items(7))
    first = logs.facts()
    assert first.lag_bytes > 0
    assert first.position is None
    second = logs.facts()
    assert (second.lag_bytes, second.position) == (0, 7)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "1e305"])
@pytest.mark.parametrize("name", ["loss", "output_tokens_per_second"])
def test_the_status_can_be_read_despite_a_value_that_no_record_has(tmp_path: Path, name: str, value: str) -> None:
    logs = Logs(tmp_path, progress=(LogPattern(name, rf"{name} (\S+)"),))
    logs.append(f"{name} {value}\n")
    status = logs.status()
    assert WorkerStatus.from_json(json.loads(json.dumps(status.to_json(), allow_nan=False))) == status


def test_the_status_shows_progress_and_errors(logs: Logs) -> None:
    logs.append(items(5) + "loss: 2\nConnection refused\n")
    entry = logs.status()
    assert (entry.items, entry.items_expected, entry.items_processed) == (5, 100, 5)
    assert (entry.values, entry.log_errors) == ({"loss": 2.0}, {"connection": 1})
    assert (entry.eta, entry.rate, entry.stalled) == (None, None, False)


def test_the_best_loss_outlives_worse_ones_and_the_sidecar(logs: Logs) -> None:
    for loss in (2, 1, 3):
        logs.append(items(5) + f"loss: {loss}, lr: 0.1\n")
        logs.facts()
    logs.clock.advance(SAVE_INTERVAL_S)
    logs.facts()
    logs.collector = logs.fresh()
    entry = logs.status()
    assert entry.values == {"loss": 3.0, "learning_rate": 0.1}
    assert entry.best_values == {"loss": 1.0}


def test_a_new_sidecar_continues_from_the_saved_state(logs: Logs) -> None:
    logs.append(items(*range(1, 31)) + "loss: 2\nConnection refused\n")
    logs.facts()
    logs.clock.advance(SAVE_INTERVAL_S)
    logs.facts()
    logs.append(items(31, 32) + "Connection refused\nProcessed 33/1")
    logs.facts()  # not in the saved state
    logs.append("00 items\n")
    once = logs.facts()
    logs.collector = logs.fresh()
    again = logs.facts()
    for facts in (once, again):
        assert (facts.position, facts.processed, facts.lines) == (33, 33, 36)
        assert ("connection", "warning", 2) in facts.errors
        assert facts.values == (("loss", 2.0, logs.clock.now - SAVE_INTERVAL_S),)
    assert again.bytes_read == once.bytes_read


def test_a_new_sidecar_keeps_the_pack_until_there_is_evidence_as_good(logs: Logs) -> None:
    logs.append("{'loss': 2.1, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': 0.1}\n" * 3)
    assert logs.facts().pack == "hf-trainer"
    save(logs)
    logs.collector = logs.fresh()
    for done in range(1, 11):
        logs.append(bar_state(done))
        assert logs.facts().pack == "hf-trainer"
    logs.clock.advance(worker_logs_reader.UNSURE_S)
    logs.append("\n iteration 10/ 100 | consumed samples: 640 | elapsed time per iteration (ms): 900.0 |\n" * 3)
    assert logs.facts().pack == "megatron"


def test_a_slow_first_read_after_a_restart_of_the_sidecar_is_silence_too(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady_work(logs, 61)
    logs.clock.advance(SAVE_INTERVAL_S)
    last_rise = logs.facts().last_rise

    def read_slowly(manifest: Manifest) -> Lexicon:
        logs.clock.advance(900)
        return lexicon_of_job(manifest)

    monkeypatch.setattr(collector, "lexicon_of_job", read_slowly)
    logs.collector = logs.fresh()
    for _ in range(2):
        facts = logs.facts()
        assert (facts.read_at, facts.last_rise, facts.stalled) == (logs.clock.now, last_rise, True)


def test_the_eta_is_the_same_after_a_restart_of_the_sidecar(logs: Logs) -> None:
    steady_work(logs, 61)
    logs.clock.advance(SAVE_INTERVAL_S)
    before = logs.facts()
    logs.collector = logs.fresh()
    assert logs.facts().eta == before.eta is not None


@pytest.mark.parametrize(
    "state", ["", "{", "[]", '{"schema": 1}', "3", '{"0": 5}', '{"0": {"restart": 0, "pack": "generic"}}']
)
def test_an_invalid_or_older_saved_state_is_ignored(logs: Logs, state: str) -> None:
    steady_work(logs, 10)
    save(logs)
    identity = f'"job_id": "{logs.context.identity.job_id}", "attempt": 0'
    is_whole = state.startswith(("3", '{"0"'))
    logs.saved_file().write_text(f'{{"schema": 1, {identity}, "logs": {state}}}' if is_whole else state)
    logs.collector = logs.fresh()
    assert logs.facts().position == 50


def test_every_part_of_the_saved_state_may_be_missing(logs: Logs) -> None:
    steady_work(logs, 10)
    save(logs)
    path = logs.saved_file()
    body = json.loads(path.read_text())
    state = body["logs"]["0"]
    for part in range(len(state)):
        body["logs"]["0"] = state[:part] + state[part + 1 :]
        path.write_text(json.dumps(body))
        logs.collector = logs.fresh()
        assert logs.facts().position == 50, part


def test_the_pack_is_detected_from_the_lines(logs: Logs) -> None:
    logs.append("".join(f"Embedding:  {n}%|###  | {n}/100 [00:{n:02d}<00:50,  1.00it/s]\r" for n in range(1, 40)))
    facts = logs.facts()
    assert (facts.pack, facts.position, facts.expected) == ("tqdm", 39, 100)


def test_a_pack_is_detected_at_the_head_of_a_long_log_and_late_in_a_growing_one(logs: Logs) -> None:
    logs.append("***** Running training *****\n  Num examples = 1,000\n  Total optimization steps = 500\n")
    logs.append(("x" * 99 + "\n") * 12_000)
    assert logs.facts().pack == "hf-trainer"
    late = Logs(logs.run_dir / "late")
    for reading in range(20):
        late.append(items(reading))
        late.facts()
        late.clock.advance(1)
    late.append("Embedding:  3%|###  | 3/100 [00:03<00:50,  1.00it/s]\n")
    late.clock.advance(60)
    late.append("Embedding:  4%|###  | 4/100 [00:03<00:50,  1.00it/s]\n")
    assert late.facts().pack == "tqdm"


def test_values_of_the_previous_pack_are_dropped(tmp_path: Path) -> None:
    """The log of a benchmark begins with a wait for the workers of its job."""
    logs = Logs(tmp_path, progress=(LogPattern("seeds", "seed (\\d+)"),))
    logs.append("seed 7\nModel is not ready, waiting for 1 prefills and 0 decodes to spin up.\n")
    facts = logs.facts()
    assert facts.pack == "srtctl"
    assert {name: value for name, value, _ in facts.values} == {
        "seeds": 7,
        "waiting_prefill_workers": 1,
        "waiting_decode_workers": 0,
    }
    logs.append("Model is ready. Have 1 prefills and 0 decodes.\n")
    assert {name: value for name, value, _ in logs.facts().values}["waiting_prefill_workers"] == 0
    logs.append("SA-Bench Config: endpoint=http://localhost:8000\nMaximum request concurrency: 2\n")
    facts = logs.facts()
    assert facts.pack == "sa-bench"
    assert {name: value for name, value, _ in facts.values} == {"seeds": 7, "concurrency": 2}


DECODES = "[{stamp} DP{rank} TP0] Decode batch, #running-req: 4, gen throughput (token/s): {rate}, #queue-req: 0\n"


def log_decode_batch(logs: Logs, rate: float, rank: int = 0) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(logs.clock.now))
    logs.append(DECODES.format(stamp=stamp, rank=rank, rate=rate))


def test_the_token_rate_of_an_engine_is_the_current_one(logs: Logs) -> None:
    assert logs.facts().output_tokens_rate is None
    log_decode_batch(logs, 100.5, rank=0)
    log_decode_batch(logs, 50.0, rank=1)
    facts = logs.facts()
    assert (facts.output_tokens_rate, facts.input_tokens_rate) == (150.5, None)
    logs.clock.advance(20)
    log_decode_batch(logs, 70.0, rank=1)
    assert logs.facts().output_tokens_rate == 170.5
    logs.clock.advance(20)
    assert logs.facts().output_tokens_rate == 70.0, "rank 0 is idle"
    source = logs.status()
    assert (source.output_tokens_per_second, source.input_tokens_per_second) == (70.0, None)
    logs.clock.advance(20)
    facts = logs.facts()
    assert facts.output_tokens_rate is None
    assert "generation_tokens_per_second" in {name for name, _, _ in facts.values}, "its last value remains"


def test_a_restarted_engine_has_no_token_rate_until_it_logs_one(logs: Logs) -> None:
    logs.facts()  # a line that arrives between two reads reveals the time zone of the log
    log_decode_batch(logs, 100.5)
    assert logs.facts().output_tokens_rate == 100.5
    logs.clock.advance(5)
    logs.record("start", 1, start=logs.clock.now - 2)
    logs.clock.advance(1)
    assert logs.facts().output_tokens_rate is None
    logs.clock.advance(1)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(logs.clock.now))
    logs.append(DECODES.format(stamp=stamp, rank=0, rate=80.5), f"{NODE}_worker_w0_r1.out")
    logs.clock.advance(1)
    assert logs.facts().output_tokens_rate == 80.5


def test_ended_engines_and_benchmarks_have_no_token_rate(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    log_decode_batch(logs, 100.5)
    logs.record("exit")
    assert logs.facts().output_tokens_rate is None
    measured = Logs(tmp_path / "b", dataclasses.replace(TASK, later=True))
    measured.append("Traffic request rate: inf\nOutput token throughput (tok/s):         6278.02\n")
    facts = measured.facts()
    assert facts.output_tokens_rate is None
    assert ("generation_tokens_per_second", 6278.02) in {(name, value) for name, value, _ in facts.values}


def test_only_the_pack_named_in_the_job_file_is_used(tmp_path: Path) -> None:
    logs = Logs(tmp_path, pack="generic")
    logs.append("Embedding:  3%|###  | 3/100 [00:03<00:50,  1.00it/s]\n")
    facts = logs.facts()
    assert (facts.pack, facts.position) == ("generic", None)


def test_timestamps_in_a_backlog_give_its_history_at_once(logs: Logs) -> None:
    begin = logs.clock.now - 1000
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin + 10 * n)) for n in range(1, 101)]
    logs.append("".join(f"{stamp} Processed {n}/200 items\n" for n, stamp in enumerate(stamps, 1)))
    path = logs.run_dir / f"{NODE}_worker_w0.out"
    os.utime(path, (logs.clock.now, logs.clock.now))
    facts = logs.facts()
    assert facts.rate == pytest.approx(0.1, rel=0.02)
    assert facts.eta is not None
    assert facts.eta.seconds == pytest.approx(1000, rel=0.05)
    assert facts.last_rise == pytest.approx(logs.clock.now, abs=1)


def bar_state(done: int, hours: int = 3) -> str:
    """A state of tqdm, which writes the return before it."""
    return f"\r{5 * done:3d}%|#  | {done}/20 [{hours * done}:00:00<{hours * (20 - done)}:00:00, {3600 * hours}.00s/it]"


def test_the_newest_state_of_a_bar_is_read_before_the_next_one(logs: Logs) -> None:
    for done in range(4):
        logs.append(bar_state(done))
        facts = logs.facts()
        assert (facts.pack, facts.position, facts.expected, facts.processed) == ("tqdm", done, 20, done)
        logs.clock.advance(3 * 3600)
    assert facts.eta is not None
    assert facts.eta.low < 17 * 3 * 3600 < facts.eta.high
    assert facts.last_rise == logs.clock.now - 3 * 3600


def test_a_state_read_before_its_end_counts_once(logs: Logs) -> None:
    logs.append(bar_state(8))
    assert logs.facts().position == 8
    logs.append(bar_state(1))  # alone it is no reset
    assert logs.facts().position == 8
    logs.append("\nsaved\n")
    assert logs.facts().position == 8
    logs.append(bar_state(2))
    assert logs.facts().position == 2


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_duration(logs: Logs, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    steady_work(logs, 61)
    before = logs.facts()
    monkeypatch.setattr(logs.clock, "time", lambda: logs.clock.now + step)
    facts = logs.facts()
    assert facts.eta == before.eta is not None
    assert facts.last_rise is not None
    assert before.last_rise is not None
    assert facts.read_at - facts.last_rise == before.read_at - before.last_rise
    logs.clock.advance(1)
    logs.append(items(310, total=1000))
    assert logs.facts().processed == 310
    logs.clock.advance(logs.manifest.stall_timeout_s)
    assert logs.facts().stalled is False
    logs.clock.advance(10)
    assert logs.facts().stalled is True


@pytest.mark.parametrize("stop_s", [400.0, 7200.0])  # stamps of 10 minutes ago are no longer believed
@pytest.mark.parametrize("has_unread", [False, True])
@pytest.mark.parametrize("stamped", [False, True])
def test_the_time_of_a_suspended_job_is_no_silence(logs: Logs, stamped: bool, has_unread: bool, stop_s: float) -> None:
    def append(number: int) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime(logs.clock.now)) if stamped else ""
        logs.append(f"{stamp}Processed {number}/1000 items\n")
        logs.date(logs.clock.now)

    def work(*numbers: int) -> WorkerLogFacts:
        for number in numbers:
            logs.clock.advance(5)
            append(number)
            facts = logs.facts()
        return facts

    before = work(*range(5, 300, 5))
    if has_unread:
        logs.clock.stop(4)
        append(299)
    logs.clock.stop(stop_s)
    facts = logs.facts()
    assert (facts.stalled, facts.position) == (False, 299 if has_unread else 295)
    assert facts.rate == pytest.approx(before.rate, rel=0.05 if has_unread else 0)
    assert facts.average_rate == pytest.approx(before.average_rate, rel=0.05)
    assert facts.last_rise is not None
    silence_s = float(stamped) if has_unread else logs.manifest.check_interval_s
    assert facts.read_at - facts.last_rise == silence_s
    assert facts.eta is not None
    assert before.eta is not None
    assert facts.eta.seconds == pytest.approx(before.eta.seconds, abs=10)
    facts = work(300, 305)
    assert facts.average_rate == pytest.approx(before.average_rate, rel=0.05)
    logs.clock.advance(logs.manifest.stall_timeout_s + 10)
    assert logs.facts().stalled is True


def test_a_suspended_worker_whose_log_the_next_poll_reads_has_not_been_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(tmp_path, TASK, make_task(1))
    for number in range(5, 105, 5):
        logs.clock.advance(5)
        for worker in ("w0", "w1"):
            logs.append(items(number, total=1000), f"{NODE}_worker_{worker}.out")
        logs.collector.read()
    monkeypatch.setattr(collector, "POLL_S", -1.0)
    logs.clock.stop(7200)
    read = logs.collector.read()
    assert [read.workers[0].read_at - (facts.last_rise or 0.0) for facts in read.workers] == [5.0, 5.0]


@given(age_s=st.floats(-5.0, 1.9), lines=st.integers(1, 4), stop_s=st.floats(120.0, 1e5), stamped=st.booleans())
@example(age_s=0.05, lines=1, stop_s=7200.0, stamped=False)
@example(age_s=0.0, lines=4, stop_s=120.0, stamped=True)
@settings(max_examples=10, deadline=None)
def test_what_a_worker_writes_when_it_goes_on_is_no_work_during_the_suspension(
    age_s: float, lines: int, stop_s: float, stamped: bool
) -> None:
    """A fast worker may write before the sidecar has read anything, also by a clock of a file server that is ahead."""
    with TemporaryDirectory() as folder:
        logs = Logs(Path(folder))

        def append(*numbers: int) -> None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime(logs.clock.now)) if stamped else ""
            logs.append("".join(f"{stamp}Processed {number}/1000 items\n" for number in numbers))

        for number in range(5, 300, 5):
            logs.clock.advance(5)
            append(number)
            logs.date(logs.clock.now)
            before = logs.facts()
        logs.clock.stop(stop_s)
        append(*range(296, 296 + lines))
        logs.date(logs.clock.now - age_s)
        facts = logs.facts()
        assert facts.position == 295 + lines
        assert facts.average_rate == pytest.approx(before.average_rate, rel=0.05)
        assert facts.eta is not None
        assert before.eta is not None
        assert facts.eta.seconds == pytest.approx(before.eta.seconds, abs=20)


@pytest.mark.parametrize(("numbers", "age_s"), [((900,), 5.0), (range(310, 905, 5), 0.0)])
def test_lines_that_were_written_while_the_sidecar_alone_was_stopped_count(
    logs: Logs, numbers: Sequence[int], age_s: float
) -> None:
    steady_work(logs, 61)
    before = logs.facts()
    logs.clock.stop(600)
    logs.append(items(*numbers, total=1000))
    logs.date(logs.clock.now - age_s)
    facts = logs.facts()
    assert (facts.stalled, facts.position, facts.last_rise) == (False, 900, facts.read_at)
    assert facts.average_rate == pytest.approx(before.average_rate, rel=0.05)


def test_a_run_that_began_while_the_sidecar_alone_was_stopped_keeps_its_start(logs: Logs) -> None:
    steady_work(logs, 61)
    logs.facts()
    logs.clock.stop(600)
    logs.record("start", 1, start=logs.clock.now - 100)
    logs.facts()
    assert logs.collector._workers[0].track.began == logs.clock.now - 100


def test_a_worker_that_ended_before_the_job_was_suspended_keeps_its_times(logs: Logs) -> None:
    steady_work(logs, 61)
    logs.record("exit", end=logs.clock.now)
    before = logs.facts()
    logs.clock.stop(7200)
    assert logs.facts().last_rise == before.last_rise


def test_the_bar_of_an_epoch_is_not_that_of_the_run(logs: Logs) -> None:
    def show(description: str, done: int, total: int) -> None:
        logs.append(f"\r{description}: {100 * done // total}%|#  | {done}/{total} [00:10<00:20,  1.00it/s]")

    for epoch in range(3):
        for done in range(0, 101, 10):
            show(f"Epoch {epoch}", done, 100)
            facts = logs.facts()
            assert (facts.position, facts.unit, facts.expected) == (100 * epoch + done, "batches", None)
            assert facts.eta is None
            logs.clock.advance(10)
    for epoch in range(3, 6):  # with a bar of the epochs, which has a total
        show("Epochs", epoch, 8)
        for done in range(0, 101, 10):
            show(f"Epoch {epoch}", done, 100)
            facts = logs.facts()
            assert (facts.position, facts.expected) == (epoch, 8)
            logs.clock.advance(10)


@pytest.mark.parametrize(("is_late", "limit_s"), [(False, 2 * 10_800.0), (True, 7200.0)])
def test_the_second_item_may_take_twice_as_long_as_the_first(logs: Logs, is_late: bool, limit_s: float) -> None:
    """Unless the first was there before the sidecar, which then does not know when it came."""
    record_start(logs)
    logs.append("loading\n")
    if not is_late:
        logs.facts()
    logs.clock.advance(10_800)
    logs.append(items(1, total=20))
    assert logs.facts().stalled is False
    logs.clock.advance(limit_s)
    assert logs.facts().stalled is False
    logs.clock.advance(10)
    assert logs.facts().stalled is True


@pytest.mark.parametrize("half", ["Step 4/10", "\rStep 4/10", "\rStep 4/10,"])
def test_a_record_that_may_be_half_written_waits(logs: Logs, half: str) -> None:
    logs.append("starting\n" + half)
    assert logs.facts().position is None
    logs.append("000, loss 2.1\n")
    assert logs.facts().position == 4


def test_a_progress_file_takes_precedence_over_the_log(logs: Logs) -> None:
    logs.append(items(3))
    (logs.run_dir / run_files.PROGRESS_DIR).mkdir()
    logs.append('{"done": 10, "total": 50, "loss": 0.5}\nnot json\n', f"progress/{NODE}_worker_w0.jsonl")
    logs.facts()
    logs.append(items(4))
    facts = logs.facts()
    assert (facts.position, facts.expected) == (10, 50)
    assert facts.values == (("loss", 0.5, logs.clock.now),)
    assert any("1 line" in problem for problem in facts.problems)


def test_an_unmatched_log_is_reported_with_the_nearest_pack(logs: Logs) -> None:
    logs.append("training step number 3 of an unknown program done\n" * 40)
    assert logs.facts().unmatched is None
    logs.clock.advance(200)
    logs.append("training step number 4 of an unknown program done\n")
    facts = logs.facts()
    assert facts.unmatched is not None
    assert "training step number 4 of an unknown program done" in facts.unmatched
    assert samples_of(logs.page(), UNMATCHED) == {LABELS: 1}


def test_an_unmatched_log_is_compared_with_all_packs_once_a_minute(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr(PackDetector, "find_nearest", lambda _, text: compared.append(text))
    for number in range(200):
        logs.append(f"training step number {number} of an unknown program done\n")
        logs.facts()
        logs.clock.advance(1.0)
    assert len(compared) == 2
    assert "number 180 of" in (logs.facts().unmatched or "")
    logs.clock.advance(3600.0)
    logs.facts()
    logs.clock.advance(3600.0)
    logs.facts()
    assert len(compared) == 3  # nothing new since


def test_an_unmatched_log_of_a_service_is_not_reported(tmp_path: Path) -> None:
    logs = Logs(tmp_path, dataclasses.replace(TASK, service=True))
    for _ in range(2):
        logs.append("request number 3 was sent to the second worker\n")
        assert logs.facts().unmatched is None
        logs.clock.advance(200)
    assert samples_of(logs.page(), UNMATCHED) == {LABELS: 0}


def test_saving_a_checkpoint_is_the_phase_of_the_job(logs: Logs) -> None:
    steady_work(logs, 20)
    logs.append("Saving checkpoint\n")
    logs.facts()
    assert logs.published.value.phase == "checkpointing"
    logs.clock.advance(400)
    assert not logs.facts().stalled, "the log explains the silence"
    logs.append(items(101, total=1000))
    logs.facts()
    assert logs.published.value.phase is None


def test_a_pattern_that_backtracks_forever_times_out_and_is_counted(tmp_path: Path) -> None:
    logs = Logs(tmp_path, progress=(LogPattern("bad", r"(x+x+)+y"),))
    logs.append("x" * 5000 + "\n" + items(3))
    assert logs.facts().position == 3
    assert samples_of(logs.page(), TIMEOUTS) == {'pattern="bad"': 1}


def test_a_log_shared_by_all_runs_is_not_reread_after_a_restart(tmp_path: Path) -> None:
    logs = Logs(tmp_path, logs=PathGroup("log", "mylogs", "*.log"))
    (tmp_path / "mylogs").mkdir()
    logs.append(items(*range(1, 31)) + "Connection refused\n", "mylogs/worker_0.log")
    before = logs.facts()
    logs.record("start", 1)
    logs.clock.advance(5)
    after = logs.facts()
    for facts in (before, after):
        assert (facts.processed, facts.lines, facts.last_rise) == (30, 31, before.last_rise)
        assert ("connection", "warning", 1) in facts.errors
    assert after.bytes_read == before.bytes_read
    logs.append(items(1, 2), "mylogs/worker_0.log")
    assert logs.facts().processed == 32


def test_a_run_is_read_to_its_end_before_the_next_one(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs_reader, "POLL_BYTES", CHUNK_BYTES)
    logs.append(("x" * 99 + "\n") * (3 * CHUNK_BYTES // 100) + items(50) + "Connection refused\n")
    logs.record("start")
    logs.record("start", 1)
    logs.append(items(1, 2), f"{NODE}_worker_w0_r1.out")
    for _ in range(5):
        facts = logs.facts()
    assert (facts.position, facts.processed) == (2, 52)
    assert ("connection", "warning", 1) in facts.errors


@pytest.mark.parametrize("then", ["goes on", "ends", "is restarted"])
def test_a_line_after_a_long_silence_is_read_in_the_same_round(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Even if it arrives in the round that sees the end of its writer: no later round reads that log."""
    logs.append(items(1))
    os.utime(logs.run_dir / f"{NODE}_worker_w0.out", (1, 1))
    for _ in range(3):
        logs.facts()

    def write(*_: object) -> int:
        logs.append(items(2))
        return 1

    if then == "goes on":
        write()
    else:
        run_files.write_json(logs.run_dir / run_files.WORKERS_DIR / "news.json", {})
        monkeypatch.setattr(logs.collector, "_read_end" if then == "ends" else "_latest_restart", write)
    assert (facts := logs.facts()).position == 2
    assert facts.ended == (then == "ends")


def test_the_end_of_daylight_saving_time_causes_no_stall(logs: Logs) -> None:
    def line(number: int, shift: float) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(logs.clock.now + shift))
        return f"{stamp} Processed {number}/100 items loss: {number}\n"

    for number in range(1, 30):
        logs.append(line(number, 7200 if number < 15 else 3600))
        facts = logs.facts()
        assert facts.last_rise == pytest.approx(logs.clock.now, abs=1)
        assert facts.values[0][2] == pytest.approx(logs.clock.now, abs=1)
        assert not facts.stalled
        logs.clock.advance(30)


@pytest.mark.parametrize("backlog", [0, 100])
@pytest.mark.parametrize(
    ("stamp_offset", "moves"),
    [(-60e6, False), (-60e6, True), (0.0, False), (60e6, True)],
    ids=["old and standing", "old and moving", "the start of the program", "ahead"],
)
def test_a_stamp_that_stands_still_or_is_of_another_time_is_no_clock(
    logs: Logs, stamp_offset: float, moves: bool, backlog: int
) -> None:
    start = logs.clock.now
    logs.record("start", start=start)
    for second in range(1, 151):
        logs.clock.advance(1)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(start + stamp_offset + (second if moves else 0)))
        logs.append(f"{stamp} [INFO] {items(second, total=400)}")
        if second >= backlog and second % 5 == 0:
            facts = logs.facts()
            assert not facts.stalled
    assert facts.rate == pytest.approx(1.0, rel=0.02)
    assert facts.average_rate == pytest.approx(1.0, rel=0.02)
    assert facts.eta is not None
    assert facts.eta.seconds == pytest.approx(250, rel=0.02)
    assert facts.last_rise == logs.clock.now


def test_a_log_with_two_time_zones_causes_no_stall(logs: Logs) -> None:
    for number in range(1, 30):
        utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(logs.clock.now))
        local = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(logs.clock.now + 9 * 3600))
        logs.append(f"{local} loss: 2\n{utc} Processed {number}/100 items\n")
        facts = logs.facts()
        assert facts.last_rise == pytest.approx(logs.clock.now, abs=1)
        assert [name for name, _, _ in facts.values] == ["loss"]
        logs.clock.advance(30)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("version",), 1),
        (("lines",), "many"),
        (("values",), {"loss": {"null": [2.0, 0, "now"]}}),
        (("activities", 0), "x"),
        (("sources",), [[5, 0, False, None, []]]),
        (("track", 1), "many"),
        (("sources", 0, 4, 2), "far"),
        (("sources", 0, 4, 2), -1),
        (("estimator",), []),
    ],
)
def test_a_saved_state_with_one_wrong_value_is_not_used(
    logs: Logs, caplog: pytest.LogCaptureFixture, place: tuple[str | int, ...], value: object
) -> None:
    steady_work(logs, 10)
    save(logs)
    path = logs.saved_file()
    body = json.loads(path.read_text())
    names = [field.name for field in dataclasses.fields(worker_logs_reader.WorkerLogsState)]
    *above, last = (names.index(key) if isinstance(key, str) else key for key in place)
    at = body["logs"]["0"]
    for index in above:
        at = at[index]
    at[last] = value
    path.write_text(json.dumps(body))
    logs.collector = logs.fresh()
    assert (logs.facts().position, logs.facts().lines) == (50, 10)
    assert f"the saved state of {TASK.worker} is not used" in caplog.text


def test_the_number_of_kept_ranks_is_bounded(logs: Logs) -> None:
    (logs.run_dir / run_files.PROGRESS_DIR).mkdir()
    for reading in range(3):
        lines = "".join(f'{{"loss": 2, "rank": {reading * 700 + n}}}\n' for n in range(700))
        logs.append(lines, f"progress/{NODE}_worker_w0.jsonl")
        logs.facts()
        logs.clock.advance(SAVE_INTERVAL_S)
    logs.facts()
    assert len(logs.collector._workers[0].state().values["loss"]) == MOST_RANKS


def test_an_unmatched_log_is_an_event_with_a_next_step(logs: Logs) -> None:
    logs.append("hello\n" * 3)
    logs.facts()
    logs.clock.advance(200)
    (event,) = described(logs.collector, logs.collector.read()).events
    assert (event.event, event.worker, event.time) == (
        *("progress unknown", "worker_w0"),
        logs.clock.now - 200 + worker_logs_reader.UNMATCHED_AFTER_S,
    )
    assert "gpujob scan" in event.detail


def test_an_unmatched_log_is_one_event_whatever_its_newest_line_and_after_a_restart(logs: Logs) -> None:
    events, found = EventFilter(), []
    for number in range(10):
        logs.append(f"processing file number {number}\n")
        logs.facts()
        save(logs)
        logs.clock.advance(100)
        if number == 5:
            logs.collector = logs.fresh()
        found += events.find_new((NODE, event) for event in described(logs.collector, logs.collector.read()).events)
    assert [event.event for _, event in found] == ["progress unknown"]
    assert "number 9" in (logs.facts().unmatched or ""), "the status goes on changing"


def test_a_log_with_more_values_than_are_kept_is_still_read(tmp_path: Path) -> None:
    names = [
        *(f"v{number}" for number in range(MOST_VALUES)),
        worker_logs_reader.RUNNING,
        worker_logs_reader.WAITING,
    ]
    logs = Logs(tmp_path, progress=tuple(LogPattern(name, f"{name}=(\\d+)") for name in names))
    logs.append("".join(f"{name}=7\n" for name in names))
    assert len(logs.facts().values) == MOST_VALUES
    logs.append(f"{worker_logs_reader.RUNNING}=1 {worker_logs_reader.WAITING}=2\n")
    assert logs.facts().lines == len(names) + 1


def test_logs_are_read_while_the_history_hangs(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(collector, "read_run_history", lambda *_: answer.wait() or ())
    monkeypatch.setattr(collector, "HISTORY_TIMEOUT_S", 0.05)
    logs.append(items(3))
    try:
        assert logs.facts().position == 3
    finally:
        answer.set()
    assert "earlier runs of the job are unknown" in caplog.text


def test_the_state_is_saved_again_only_after_news(logs: Logs) -> None:
    place = logs.run_dir / STATE_DIR / f"{NODE}.logs.json"
    for text, is_saved in ((items(5), True), ("", False), (items(6), True)):
        logs.append(text)
        logs.facts()
        logs.clock.advance(SAVE_INTERVAL_S)
        logs.facts()
        assert place.exists() == is_saved
        place.unlink(missing_ok=True)


def test_a_failure_to_save_the_state_is_logged_once_and_so_is_its_end(
    logs: Logs, caplog: pytest.LogCaptureFixture
) -> None:
    logs.facts()
    place = logs.run_dir / STATE_DIR
    place.write_text("in the way")
    for _ in range(3):
        logs.clock.advance(SAVE_INTERVAL_S)
        logs.facts()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["log positions cannot be saved"]
    place.unlink()
    logs.clock.advance(SAVE_INTERVAL_S)
    logs.facts()
    assert caplog.messages[1:] == ["log positions are saved again"]


def record_start(logs: Logs, restart: int = 0, attempt: int = 0, ago: float = 0.0) -> None:
    """Write the start record of a run that started `ago` seconds ago."""
    logs.record("start", restart, attempt, start=logs.clock.now - ago)


def log_each_second(logs: Logs, numbers: Iterable[int], name: str, total: int = 400) -> None:
    """Log one line a second, and read after each."""
    for number in numbers:
        logs.append(items(number, total=total), name)
        logs.facts()
        logs.clock.advance(1)


LOG = f"{NODE}_worker_w0.out"


def test_a_silent_resume_after_a_restart_is_not_counted_as_work(logs: Logs) -> None:
    record_start(logs)
    log_each_second(logs, range(1, 142), LOG)
    logs.record("start", 1)
    record_start(logs, 1)
    logs.clock.advance(5)
    log_each_second(logs, range(121, 161), f"{NODE}_worker_w0_r1.out")
    facts = logs.facts()
    assert (facts.position, facts.processed, facts.first) == (160, 141 + 39, 1)


@pytest.mark.parametrize("source", ["report", "status"])
def test_the_next_attempt_counts_only_items_after_the_position_of_the_last(tmp_path: Path, source: str) -> None:
    logs = Logs(tmp_path)
    log_each_second(logs, range(1, 142), LOG)
    page = {"attempt": 0, "workers": [logs.status().to_json()]}
    (tmp_path / "status_a0").mkdir()
    run_files.write_json(tmp_path / ("report_a0.json" if source == "report" else f"status_a0/{NODE}.json"), page)
    logs.collector = logs.collector_of(make_context(logs.manifest, logs.clock, attempt=1))
    record_start(logs, attempt=1)
    logs.clock.advance(60)
    name = f"{NODE}_worker_w0_a1.out"
    log_each_second(logs, range(141, 151), name)
    facts = logs.facts()
    assert (facts.position, facts.processed, facts.first) == (150, 9, 1)
    assert facts.rate == pytest.approx(1.0, rel=0.1)
    assert facts.average_rate == pytest.approx(1.0, rel=0.1)
    assert facts.eta is not None
    assert facts.eta.seconds == pytest.approx(250, rel=0.2)


def test_an_unreachable_first_position_is_a_resume(logs: Logs) -> None:
    record_start(logs, ago=3.0)
    log_each_second(logs, range(5000, 5100, 10), LOG, total=10_000)
    assert (logs.facts().position, logs.facts().processed) == (5090, 90)


def test_start_records_are_read_only_after_a_change_of_the_workers_folder(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached jobs have no start records, so they are not looked up at each read."""
    opened, read_json = list[str](), run_files.read_json

    def read_and_record(path: str | os.PathLike[str]) -> dict[str, object] | None:
        opened.append(os.path.basename(path))
        return read_json(path)

    monkeypatch.setattr(run_files, "read_json", read_and_record)
    logs.facts()
    logs.clock.advance(RECENT_S + 1e6)
    before = opened.count("worker_w0_rank0_a0_r0.start.json")
    assert before == 1
    for _ in range(10 * FORCED_CHECK_EVERY):
        logs.facts()
    assert opened.count("worker_w0_rank0_a0_r0.start.json") - before == 10
    record_start(logs)
    log_each_second(logs, [300], LOG)
    assert logs.collector._workers[0].track.began is not None


def test_the_first_items_of_a_fast_worker_count(logs: Logs) -> None:
    record_start(logs)
    logs.clock.advance(5)
    log_each_second(logs, range(50, 401, 10), LOG)
    assert logs.facts().processed == 400


def test_the_only_position_of_an_ended_worker_counts(logs: Logs) -> None:
    record_start(logs)
    logs.clock.advance(5)
    log_each_second(logs, [200], LOG)
    assert logs.facts().processed == 0
    logs.record("exit")
    logs.clock.advance(5)
    assert logs.facts().processed == 200


def test_items_skipped_in_the_backlog_of_a_fast_writer_count(logs: Logs) -> None:
    record_start(logs)
    log_each_second(logs, range(1, 142), LOG, total=100_000)
    logs.record("start", 1)
    record_start(logs, 1)
    logs.append(items(*range(1, 30_000), total=100_000), f"{NODE}_worker_w0_r1.out")
    logs.clock.advance(5)
    facts = logs.facts()
    assert (facts.position, facts.processed) == (29_999, 141 + 29_999)


def test_gpus_that_were_busy_long_ago_do_not_hide_a_stall(logs: Logs) -> None:
    log_each_second(logs, range(1, 60), LOG)
    logs.clock.advance(1.5 * logs.manifest.stall_timeout_s)
    logs.gpu_use.publish(NodeGpuUse(busy={0: True}))
    assert logs.facts().stalled is False
    logs.clock.advance(RECENT_VALUE_S + 1)
    assert logs.facts().stalled is True


def test_the_eta_of_the_node_is_that_of_its_critical_workers(tmp_path: Path) -> None:
    """The only position of the other one gives no ETA."""
    helper = dataclasses.replace(make_task(1), critical=False)
    logs = Logs(tmp_path, TASK, helper)
    logs.append(items(5), f"{NODE}_worker_w1.out")
    steady_work(logs, 61)
    working, beside = logs.collector.read().workers
    assert (beside.position, beside.eta) == (5, None)
    assert logs.collector.read().outlook.job.eta == working.eta is not None


def test_workers_that_may_share_a_queue_give_the_node_no_eta(tmp_path: Path) -> None:
    logs = Logs(tmp_path, TASK, make_task(1), total_items=100)
    for done in range(1, 61):
        logs.append(items(done))
        logs.append(items(done // 2), f"{NODE}_worker_w1.out")
        outlook = logs.collector.read().outlook
        logs.clock.advance(1)
        assert (outlook.job.eta is None) == (done + done // 2 <= 100) or done < 4
