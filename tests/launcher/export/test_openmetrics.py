"""Timelines as OpenMetrics: labels of the target, attempts in a row, and samples between points far apart."""

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from exporter.contract.manifest import Manifest
from exporter.contract.timeline_file import TimelineHead, TimelineSeries, pack_timeline
from launcher.export.openmetrics import FILL_S, openmetrics_lines, read_timelines
from tests.support.exporter import make_manifest, write_manifest
from tests.support.launcher import GPUJOB, clean_environment

HEAD = TimelineHead(job_id="4459", attempt=0, node="n1", instance="n1:9410", step_s=5.0, times=(100.0, 105.0, 110.0))
ITEMS = TimelineSeries('gpujob_worker_items{worker="a\\"b"}', (0, 2), (3.0, None))
CPU = TimelineSeries('gpujob_worker_cpu_seconds_total{worker="w0"}', (0, 1), (10.0, 20.0))


def write(run_dir: Path, folder: str, *series: TimelineSeries, **changes: Any) -> None:
    head = HEAD.replace(**changes)
    path = run_dir / folder / f"{head.node}.timeline.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pack_timeline(head, series))


def text_of(run_dir: Path, manifest: Manifest | None = None) -> str:
    return "".join(openmetrics_lines(read_timelines(run_dir, manifest or make_manifest(run_dir))))


def samples(run_dir: Path, name: str) -> list[tuple[float, float]]:
    families: Any = text_string_to_metric_families(text_of(run_dir))  # type: ignore[no-untyped-call]
    return [
        (float(sample.timestamp), sample.value)
        for family in families
        for sample in family.samples
        if sample.name == name
    ]


def test_all_series_have_the_labels_of_their_target(tmp_path: Path) -> None:
    write(tmp_path, "status", ITEMS, CPU)
    write(tmp_path, "status", ITEMS, node="n2", instance="[fe80::1]:9410")
    text = text_of(tmp_path, make_manifest(tmp_path, notify="team"))
    first, second = (f'job="gpujob-sidecar",instance="{each}:9410",notify="team"' for each in ("n1", "[fe80::1]"))
    assert text.splitlines() == [
        "# TYPE gpujob_worker_cpu_seconds counter",
        f'gpujob_worker_cpu_seconds_total{{{first},worker="w0"}} 10 100.000',
        f'gpujob_worker_cpu_seconds_total{{{first},worker="w0"}} 20 105.000',
        f'gpujob_worker_cpu_seconds_total{{{first},worker="w0"}} 20 110.000',
        "# TYPE gpujob_worker_items gauge",
        f'gpujob_worker_items{{{first},worker="a\\"b"}} 3 100.000',
        f'gpujob_worker_items{{{first},worker="a\\"b"}} 3 105.000',
        f'gpujob_worker_items{{{second},worker="a\\"b"}} 3 100.000',
        f'gpujob_worker_items{{{second},worker="a\\"b"}} 3 105.000',
        "# EOF",
    ]


def test_attempts_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path, "status", ITEMS, attempt=1, times=(200.0, 205.0, 210.0))
    write(tmp_path, "status_a0", ITEMS)
    assert samples(tmp_path, "gpujob_worker_items") == [(100, 3), (105, 3), (200, 3), (205, 3)]


def test_points_far_apart_are_filled_so_that_a_query_finds_them(tmp_path: Path) -> None:
    times = (0.0, 1000.0, 2000.0, 9000.0)
    gauge = TimelineSeries("gpujob_worker_items" + '{worker="w0"}', (0, 1), (4.0, 8.0))
    write(tmp_path, "status", gauge, CPU, times=times, step_s=1000.0)
    items = samples(tmp_path, "gpujob_worker_items")
    assert items[:6] == [(0, 4), (240, 4), (480, 4), (720, 4), (960, 4), (1000, 8)]
    assert {later - earlier for (earlier, _), (later, _) in pairwise(items)} == {240, 40, 7000}
    cpu = samples(tmp_path, "gpujob_worker_cpu_seconds_total")
    assert cpu[:6] == [(0, 10), (240, 12.4), (480, 14.8), (720, 17.2), (960, 19.6), (1000, 20)]
    assert FILL_S < 300  # a query finds a sample for five minutes


def test_a_damaged_timeline_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write(tmp_path, "status", ITEMS)
    (tmp_path / "status/n2.timeline.json.gz").write_bytes(b"no gzip")
    found = read_timelines(tmp_path, make_manifest(tmp_path))
    assert len(found.heads) == 1
    assert len(found.problems) == 1
    assert "n2.timeline.json.gz" in found.problems[0]


@pytest.mark.parametrize("instance", ['n1"} 1\nup 1', "n1\\"])
def test_a_hostile_address_stays_one_label(instance: str, tmp_path: Path) -> None:
    write(tmp_path, "status", ITEMS, instance=instance)
    families: Any = text_string_to_metric_families(text_of(tmp_path))  # type: ignore[no-untyped-call]
    (family,) = families
    assert {sample.labels["instance"] for sample in family.samples} == {instance}


def timeline(run_dir: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    argv = [str(GPUJOB), "timeline", str(run_dir), *options]
    return subprocess.run(argv, cwd=run_dir, env=clean_environment(), capture_output=True, text=True, timeout=60)


def test_the_command_writes_all_timelines_and_names_damaged_ones(tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path))
    write(tmp_path, "status", ITEMS)
    (tmp_path / "status/n2.timeline.json.gz").write_bytes(b"no gzip")
    done = timeline(tmp_path, "-o", "job.om", "--json")
    assert json.loads(done.stdout) == {"schema": 1, "nodes": 1, "series": 1, "start": 100.0, "end": 110.0}
    assert "n2.timeline.json.gz" in done.stderr
    assert (tmp_path / "job.om").read_text() == timeline(tmp_path).stdout == text_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [((), "no sidecar has left a timeline"), (("-o", "none/job.om"), "--output: none/job.om: No such file")],
)
def test_the_command_says_what_is_wrong(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path))
    if options:
        write(tmp_path, "status", ITEMS)
    done = timeline(tmp_path, *options)
    assert done.returncode == 2
    assert words in done.stderr
