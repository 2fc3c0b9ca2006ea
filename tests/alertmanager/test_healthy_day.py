"""Good jobs page nobody, whatever happens to them and around them on an ordinary day."""

import json
import subprocess
import tempfile
import time
from pathlib import Path

from tests.alertmanager.healthy_day import DAY_S, JOBS, STEP_S, promtool_case
from tests.alertmanager.promtool_cases import RULES
from tests.alertmanager.test_rules import needs_tools

# None of these pages. All others must not fire.
MEANT = {
    ("GpuJobWatchdog", ""): 1,
    **{("GpuJobCompleted", job.name): 1 for job in JOBS if job.state == "COMPLETED"},
    ("GpuJobPreempted", "preempted"): 1,
    ("GpuJobProgressUnknown", "no-steps"): 1,
    ("GpuJobProgressUnknown", "no-steps-with-gpus"): 1,
}


@needs_tools
def test_a_day_of_good_jobs_gives_no_alert_but_those_that_are_meant(tmp_path: Path) -> None:
    assert len(JOBS) >= 30
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        case = promtool_case(Path(folder), time.time() - DAY_S)
    expected = [
        {"labels": f'{{alertname="{alert}"{job and f",job_name={json.dumps(job)}"}}}', "value": count}
        for (alert, job), count in MEANT.items()
    ]
    fired = 'count by (alertname, job_name) (count_over_time(ALERTS{alertstate="firing"}[1d]))'
    row = {"expr": fired, "eval_time": f"{DAY_S:.0f}s", "exp_samples": expected}
    files = [str(path) for path in sorted(RULES.glob("*.yml"))]
    tests = [{**case, "promql_expr_test": [row]}]
    path = tmp_path / "day.yml"
    path.write_text(json.dumps({"rule_files": files, "evaluation_interval": f"{STEP_S:.0f}s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
