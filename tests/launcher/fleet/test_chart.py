"""The last hour of a job's GPUs."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import run_files
from exporter.gpus.collectors.csv_collector import HEADER
from launcher.fleet.chart import BARS, BLOCKS, bars, make_chart, parse_samples, render_chart
from tests.launcher.fleet.conftest import Gpujob
from tests.launcher.fleet.run_dirs import run_directory
from tests.support.fake_slurm import FakeSlurm

END = 1764000000


def line(second: float, gpu: int, percent: object, used: object = 40) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(END + second))
    return f"{moment},n1,{gpu},{percent},{used},80.00,300.0,50\n"


def test_each_bar_is_the_mean_of_its_time() -> None:
    text = HEADER + "\n" + "".join(line(10 * step, 0, 100 * (step >= 180), 80) for step in range(361))
    chart = make_chart(parse_samples(text))
    (gpu,) = chart.lines
    assert (chart.until - chart.since, len(gpu.utilization)) == (3600.0, BARS)
    assert gpu.utilization == (0.0,) * 30 + (1.0,) * 30
    shown, note = render_chart(chart, END + 3660.0)[1::2]
    assert shown == f"0    {'▁' * 30}{'█' * 30}  100%  {'█' * 60}  80.0 GiB/80.0 GiB"
    assert note == "1h 00m up to 1m 00s ago, from the sidecars; the numbers are those of the last bar"


def test_what_was_not_measured_has_no_bar() -> None:
    samples = parse_samples(line(0, 0, 50) + line(60, 0, "", "") + line(120, 0, 20) + "2025-11-24T16:00:00Z,n1,0,5")
    (gpu,) = make_chart(samples).lines
    assert bars(gpu.utilization, 1.0) == "▅ ▂"
    assert bars(gpu.memory_bytes, None) == "   "


@given(st.lists(st.none() | st.floats(0, 2), max_size=80), st.none() | st.floats(0, 1))
def test_every_value_has_one_character(values: list[float | None], most: float | None) -> None:
    shown = bars(values, most)
    assert len(shown) == len(values)
    assert set(shown) <= {*BLOCKS, " "}


def test_the_command_reads_the_files_of_all_nodes(slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "7_job")
    path = run_dir / "manifest.json"
    manifest = run_files.read_json(path) or {}
    status, _, err = gpujob("metrics", str(run_dir), "--chart")
    assert (status, "set `monitoring: {gpu_metrics: true}` in its job file" in err) == (2, True)
    out = tmp_path / "out"
    groups = [{"name": "output", "directory": str(out), "pattern": "*", "per_worker": False}]
    run_files.write_json(path, {**manifest, "gpu_metrics": True, "groups": groups})
    out.mkdir()
    status, _, err = gpujob("metrics", str(run_dir), "--chart")
    assert (status, "no sidecar has written GPU readings there yet" in err) == (2, True)
    (out / "gpu_metrics.csv").write_text(HEADER + "\n" + line(-9999, 0, 100) + line(0, 0, 100) + line(1, 0, 100))
    (out / "gpu_metrics_n2.csv").write_text(HEADER + "\n" + line(1, 0, 10).replace(",n1,", ",n2,"))
    status, shown, err = gpujob("metrics", str(run_dir), "--chart")
    assert (status, err) == (0, "")
    assert [row.split()[:2] for row in shown.splitlines()[1:3]] == [["n1:0", "██"], ["n2:0", "▁"]]
    body = json.loads(gpujob("metrics", str(run_dir), "--chart", "--json")[1])
    assert [gpu["utilization_ratio"] for gpu in body["gpus"]] == [[1.0, 1.0], [None, 0.1]]
    assert gpujob("metrics", "4459", "--chart")[0] == 2


@pytest.mark.parametrize("text", ["", "x", "time,node\n", "2025-11-24T16:00:00Z,n1,0,nan,1,2\n", "\0\n"])
def test_other_text_has_no_samples(text: str) -> None:
    assert parse_samples(text) == []
