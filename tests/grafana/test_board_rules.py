"""The series that are recorded for the board of all jobs, by Prometheus' own engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).resolve().parents[2] / "alertmanager" / "rules" / "gpujob-boards.yml"
JOB = 'cluster="c1", job_id="42", job_name="train", user="ada", partition="gpu"'
A, B = (f'{JOB}, node="{node}", instance="{node}:9410"' for node in ("n1", "n2"))
OF_NODE = 'cluster="c1", node="n1", job_id="42", user="ada", partition="gpu"'

# A recorded series: what it is made of, its labels, its value after ten minutes, with one sample a minute.
CASES: dict[str, tuple[dict[str, str], str, float | None]] = {
    **{
        f"job:gpujob_phase:number {phase}": (
            {f'gpujob_phase{{{A}, phase="{phase}"}}': "1x20", f'gpujob_phase{{{B}, phase="finished"}}': "1x20"},
            JOB,
            number,
        )
        for number, phase in enumerate(
            ("launching", "running", "checkpointing", "evaluating", "completing", "finished"), start=1
        )
    },
    "job:gpujob_phase:number gone": ({f'gpujob_phase{{{A}, phase="running"}}': "0x20"}, JOB, None),
    "job:gpujob_progress:ratio": (
        {
            f'gpujob_worker_items{{{A}, worker="w0"}}': "30x20",
            f'gpujob_worker_items{{{B}, worker="w1"}}': "50x20",
            f'gpujob_worker_items_expected{{{A}, worker="w0"}}': "120x20",
        },
        JOB,
        0.25,
    ),
    "job:gpujob_eta:p50": (
        {
            f'gpujob_eta_seconds{{{A}, quantile="0.5"}}': "60x20",
            f'gpujob_eta_seconds{{{B}, quantile="0.5"}}': "90x20",
            f'gpujob_eta_seconds{{{B}, quantile="0.9"}}': "500x20",
        },
        JOB,
        90,
    ),
    "job:gpujob_limit_margin:seconds": (
        {
            f"gpujob_time_limit_timestamp_seconds{{{A}}}": "1000x20",
            f'gpujob_eta_seconds{{{A}, quantile="0.9"}}': "500x20",
            f'gpujob_eta_seconds{{{B}, quantile="0.5"}}': "700x20",
        },
        JOB,
        -100,
    ),
    "job:gpujob_rate:items_per_second": (
        {
            f'gpujob_worker_throughput_items_per_second{{{A}, worker="w0", window="current"}}': "2x20",
            f'gpujob_worker_throughput_items_per_second{{{B}, worker="w1", window="current"}}': "3x20",
            f'gpujob_worker_throughput_items_per_second{{{B}, worker="w1", window="average"}}': "9x20",
        },
        JOB,
        5,
    ),
    "job:gpujob_slowdown:ratio": (
        {f'gpujob_worker_slowdown_ratio{{{A}, worker="{w}"}}': f"{v}x20" for w, v in (("w0", 1), ("w1", 1.5))},
        JOB,
        1.5,
    ),
    "job:gpujob_gpus_allocated:sum": ({f"gpujob_gpus_allocated{{{each}}}": "4x20" for each in (A, B)}, JOB, 8),
    "job:gpujob_gpu_utilization:avg": (
        {f'gpujob_gpu_utilization_ratio{{{A}, gpu="{n}"}}': f"{v}x20" for n, v in enumerate((0.5, 1))},
        JOB,
        0.75,
    ),
    "job:gpujob_gpus_idle:count": (
        {f'gpujob_gpu_utilization_ratio{{{A}, gpu="{n}"}}': f"{v}x20" for n, v in enumerate((0.04, 0.05, 1))},
        JOB,
        1,
    ),
    "job:gpujob_gpus_idle:count none": ({f'gpujob_gpu_utilization_ratio{{{A}, gpu="0"}}': "0.9x20"}, JOB, 0),
    "job:gpujob_checkpoint_age:seconds": (
        {f"gpujob_checkpoint_last_timestamp_seconds{{{each}}}": f"{at}x20" for each, at in ((A, 100), (B, 400))},
        JOB,
        200,
    ),
    "job:gpujob_data_age:seconds": (
        {
            f'gpujob_collector_last_success_timestamp_seconds{{{each}, collector="{name}"}}': f"{at}x20"
            for each, name, at in ((A, "gpu", 100), (A, "log", 500), (B, "log", 590))
        },
        JOB,
        100,
    ),
    "job:gpujob_alerts:count": (
        {
            f'ALERTS{{{A}, alertname="X", alertstate="firing"}}': "1x20",
            f'ALERTS{{{B}, alertname="Y", alertstate="firing"}}': "1x20",
            f'ALERTS{{{B}, alertname="Z", alertstate="pending"}}': "1x20",
            'ALERTS{alertname="GpuJobWatchdog", alertstate="firing"}': "1x20",
        },
        JOB,
        2,
    ),
    "job:gpujob_filesystems_low:count": (
        {
            f'gpujob_filesystem_low{{{each}, group="{group}"}}': f"{low}x20"
            for each, group, low in ((A, "output", 1), (B, "output", 1), (A, "logs", 0))
        },
        JOB,
        1,
    ),
    **{
        f"node:gpujob_gpu_health:number {word}": (
            {
                f'gpujob_gpu_health{{{A}, health="{each}"}}': f"{int(each == word)}x20"
                for each in ("healthy", "warning", "failure")
            },
            OF_NODE,
            value,
        )
        for word, value in (("healthy", None), ("warning", 1), ("failure", 2))
    },
    "node:gpujob_gpu_xid_last:timestamp_seconds": (
        {
            f'gpujob_gpu_xid_last_timestamp_seconds{{{A}, gpu="{n}", xid="79"}}': f"{at}x20"
            for n, at in ((0, 5), (1, 9))
        },
        f'{OF_NODE}, xid="79"',
        9,
    ),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_recorded_series(tmp_path: Path) -> None:
    tests = []
    for case, (series, labels, value) in CASES.items():
        name = case.split()[0]
        samples = [] if value is None else [{"labels": f"{name}{{{labels}}}", "value": value}]
        tests.append(
            {
                "name": case,
                "interval": "1m",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [{"expr": name, "eval_time": "10m", "exp_samples": samples}],
            }
        )
    path = tmp_path / "boards.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case.split()[0] for case in CASES} == set(re.findall(r"record: (\S+)", RULES.read_text(encoding="utf-8")))
