"""Sums over the runs of a worker that restarts again and again."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collecting.published import NodeGpuUse, WorkerProcesses
from exporter.contract import run_files
from exporter.contract.status import LISTED_RUNS
from exporter.gpus.records import JobGpus
from exporter.workers.collector import EXITS, LAST_TIME, RESTARTS, WorkersCollector
from exporter.workers.run_totals import RunUsage
from tests.support.exporter import (
    FakeClock,
    make_context,
    make_manifest,
    make_task,
    page_of,
    publisher,
    samples_of,
)
from tests.support.statuses import described, worker_of

TASK = make_task(0)
START = 1_700_000_000.0
COUNT = st.none() | st.integers(0, 1000)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1, 3]), max_size=12), max_size=6))
def test_counters_never_fall_and_the_status_lists_the_last_runs_only(runs_between_reads: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = make_context(make_manifest(Path(folder), TASK), FakeClock())
        collector = WorkersCollector(
            context, publisher(WorkerProcesses()), publisher(JobGpus()), publisher(NodeGpuUse())
        )
        (Path(folder) / run_files.WORKERS_DIR).mkdir()
        codes: list[int] = []
        before: dict[str, float] = {}
        for new in runs_between_reads:
            for code in new:
                name = run_files.record_name(TASK.worker, TASK.rank, 0, len(codes))
                record = {"code": code, "signal": None, "start": START, "end": START + len(codes)}
                run_files.write_json(Path(folder, run_files.WORKERS_DIR, f"{name}.exit.json"), record, durable=False)
                codes.append(code)
            snapshot = collector.read()
            page, status = page_of(collector, snapshot), worker_of(described(collector, snapshot))
            counts = {**samples_of(page, EXITS), **samples_of(page, LAST_TIME), **samples_of(page, RESTARTS)}
            assert all(counts[name] >= value for name, value in before.items())
            before = counts
            assert sum(samples_of(page, EXITS).values()) == len(codes)
            assert [end.restart for end in status.exits] == list(range(len(codes)))[-LISTED_RUNS:]
            assert sum(status.exit_counts.values()) == len(codes)
            assert status.exit_counts.get("completed", 0) == codes.count(0)
            assert status.restarts == max(0, len(codes) - 1)


@given(st.tuples(COUNT, COUNT, COUNT, COUNT, COUNT), st.tuples(COUNT, COUNT, COUNT, COUNT, COUNT))
def test_usage_is_summed_where_it_is_known(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> None:
    total = RunUsage(*first).plus(RunUsage(*second))
    for a, b, both in zip(first, second, total, strict=True):
        assert both == (None if a is b is None else (a or 0) + (b or 0))
