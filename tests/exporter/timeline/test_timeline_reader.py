"""The timeline of a node: what it stores, and its file over restarts of the sidecar."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.detail import TIMELINE_FAMILIES
from exporter.collecting.families import Family, Samples
from exporter.contract import run_files
from exporter.contract.manifest import FULL
from exporter.timeline.timeline_reader import MOMENT_WRITE_S, WRITE_EVERY_S, NodeTimeline
from tests.support.exporter import NODE, FakeClock, declared_families, make_context, make_manifest

ROOT = Path(__file__).resolve().parents[3]
ITEMS, THREADS = Family("worker_items", "", ("worker",)), Family("worker_threads", "", ("worker",))


def make_timeline(run_dir: Path, clock: FakeClock, **identity: Any) -> NodeTimeline:
    (run_dir / run_files.STATUS_DIR).mkdir(exist_ok=True)
    timeline = NodeTimeline(make_context(make_manifest(run_dir), clock, **identity))
    timeline.take_up()
    return timeline


def record(timeline: NodeTimeline, items: float, *, is_moment: bool = False) -> None:
    page = Samples({"node": NODE})
    page.add(ITEMS, items, worker="w0")
    page.add(THREADS, 3, worker="w0")
    timeline.record(page.take, is_moment=is_moment)


def path_of(run_dir: Path) -> Path:
    return run_dir / run_files.STATUS_DIR / f"{NODE}.timeline.json.gz"


def stored(run_dir: Path) -> Any:
    return json.loads(gzip.decompress(path_of(run_dir).read_bytes()))


def test_it_stores_what_the_boards_of_jobs_and_nodes_draw() -> None:
    boards = [(ROOT / f"grafana/dashboards/gpujob-{name}.json").read_text("utf-8") for name in ("job", "node")]
    drawn = set(re.findall(r"gpujob_(\w+)", "".join(boards)))
    assert {family.name for family in declared_families() if family.detail != FULL} & drawn == TIMELINE_FAMILIES


def test_a_new_sidecar_continues_the_timeline(tmp_path: Path) -> None:
    clock = FakeClock()
    earlier = make_timeline(tmp_path, clock)
    record(earlier, 1)
    clock.advance(2)
    record(earlier, 2, is_moment=True)
    earlier.write(final=False)
    clock.advance(60)
    later = make_timeline(tmp_path, clock)
    assert later.is_due()
    record(later, 3)
    later.write(final=True)
    found = stored(tmp_path)
    assert [time - found["times"][0] for time in found["times"]] == [0, 2, 62]
    assert found["moments"] == found["times"][1:2]
    assert found["series"][1:] == [
        {"series": f'gpujob_worker_items{{node="{NODE}",worker="w0"}}', "points": [0, 1, 2], "values": [1, 2, 3]}
    ]


def test_nothing_is_recorded_before_the_earlier_timeline_is_read(tmp_path: Path) -> None:
    timeline = NodeTimeline(make_context(make_manifest(tmp_path), FakeClock()))
    assert not timeline.is_due()
    record(timeline, 1)
    timeline.take_up()
    assert timeline.is_due()


@pytest.mark.parametrize("identity", [{"attempt": 1}, {"job_id": "4460"}])
def test_another_attempt_or_job_begins_anew(identity: Any, tmp_path: Path) -> None:
    earlier = make_timeline(tmp_path, FakeClock())
    record(earlier, 1)
    earlier.write(final=True)
    later = make_timeline(tmp_path, FakeClock(), **identity)
    record(later, 5)
    later.write(final=True)
    assert [series["values"] for series in stored(tmp_path)["series"]] == [[1], [5]]


def test_a_damaged_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    earlier = make_timeline(tmp_path, FakeClock())
    record(earlier, 1)
    earlier.write(final=True)
    damaged = path_of(tmp_path).read_bytes()[:-9]
    path_of(tmp_path).write_bytes(damaged)
    later = make_timeline(tmp_path, FakeClock())
    record(later, 5)
    later.write(final=True)
    assert [series["values"] for series in stored(tmp_path)["series"]] == [[1], [5]]
    assert Path(f"{path_of(tmp_path)}.damaged").read_bytes() == damaged
    assert len(caplog.records) == 1


def test_it_is_written_seldom_sooner_after_a_moment_and_at_the_end(tmp_path: Path) -> None:
    clock = FakeClock()
    timeline = make_timeline(tmp_path, clock)

    def seconds_to_write(*, is_moment: bool) -> int:
        record(timeline, clock.now, is_moment=is_moment)
        before = path_of(tmp_path).stat().st_mtime_ns
        for seconds in range(1000):
            timeline.write(final=False)
            if path_of(tmp_path).stat().st_mtime_ns != before:
                return seconds
            clock.advance(1)
        return 1000

    record(timeline, 1)
    timeline.write(final=False)
    assert path_of(tmp_path).exists()
    timeline._pause_s = 0.0  # a test machine may be slow
    assert seconds_to_write(is_moment=False) == WRITE_EVERY_S
    timeline._pause_s = 0.0
    assert seconds_to_write(is_moment=True) == MOMENT_WRITE_S
    timeline._pause_s = 5000.0  # writing took long
    assert seconds_to_write(is_moment=True) == 1000
    record(timeline, 7)
    timeline.write(final=True)
    assert stored(tmp_path)["series"][1]["values"][-1] == 7


def test_a_full_disk_costs_one_message_and_the_earlier_file_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = make_timeline(tmp_path, FakeClock())
    record(timeline, 1)
    timeline.write(final=True)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_files, "replace_file", fail)
        timeline.write(final=True)
        timeline.write(final=True)
    assert len(caplog.records) == 1
    assert stored(tmp_path)["series"][1]["values"] == [1]


def test_a_point_that_cannot_be_added_now_is_not_rendered_and_can_be_added_later(tmp_path: Path) -> None:
    clock = FakeClock()
    timeline = make_timeline(tmp_path, clock)
    page = Samples({"node": NODE})

    def add() -> bool:
        return timeline.record(page.take, is_moment=True)

    def refuse() -> bool:
        return timeline.record(lambda: pytest.fail("it costs a page"), is_moment=True)

    assert add()
    clock.advance(-60)
    assert not refuse(), "the clock is set back"
    clock.advance(61)
    with timeline._lock:
        assert not refuse(), "the timeline is being packed"
    assert add()
    timeline.write(final=True)
    found = stored(tmp_path)
    assert found["moments"] == found["times"] == [clock.now - 1, clock.now]


def test_costly_points_are_farther_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    timeline = make_timeline(tmp_path, clock)
    for cost, step_s in ((0.001, 5), (0.1, 5), (0.1, 5), (0.1, 150)):  # one slow point is none
        used = iter((0.0, cost))
        monkeypatch.setattr("time.thread_time", lambda used=used: next(used))
        record(timeline, clock.now)
        before = clock.now
        while not timeline.is_due():
            clock.advance(1)
        assert clock.now - before == pytest.approx(step_s, abs=1)
