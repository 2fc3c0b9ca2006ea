"""Serving jobs of the tests: stand-in engines with the names of real ones, and readers of results."""

import http.client
import json
import shutil
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ENGINES = Path(__file__).resolve().parents[1] / "engines"
BENCHMARK = Path(__file__).resolve().parents[2] / "examples" / "serve" / "bench.py"
MODULES = {"sglang_worker": "sglang/launch_server", "router": "sglang_router/launch_router"}
"""Stand-ins and the module names under which ``python3 -m`` finds them."""
ISL, OSL = 32, 16
RESULTS = f"sa-bench_isl_{ISL}_osl_{OSL}"
ENOUGH = "enough"  # file that ends a benchmark that repeats until then
REPEATED_BENCHMARK = f"""
until [ -e {ENOUGH} ]; do
    python3 bench.py "$@" || exit
done
"""
RECORD_START = """
import json, os, sys
if "GPUJOB_WORKER" in os.environ:
    folder = os.path.join(os.environ["GPUJOB_RUN_DIR"], "seen")
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/{GPUJOB_WORKER}_{GPUJOB_LOCAL_RANK}.json".format_map(os.environ), "w") as out:
        json.dump({"argv": sys.orig_argv, "environment": dict(os.environ)}, out)
"""  # as `sitecustomize`: each program of the job records its arguments and environment


BACK = "back"  # file for which a restarted worker waits
WAIT_FOR_FILE = f"""
import os, time
ended = "{{GPUJOB_RUN_DIR}}/workers/{{GPUJOB_WORKER}}_rank{{GPUJOB_RANK}}_a0_r0.exit.json"
if "GPUJOB_WORKER" in os.environ and os.path.exists(ended.format_map(os.environ)):
    while not os.path.exists("{BACK}"):
        time.sleep(0.1)
"""  # as `sitecustomize`: a restarted worker waits until its absence was noticed


def place_stand_ins(folder: Path) -> None:
    """Write engines, benchmark and model folder into the working directory of a job."""
    for source, module in MODULES.items():
        path = folder / "engines" / f"{module}.py"
        path.parent.mkdir(parents=True)
        shutil.copy(ENGINES / f"{source}.py", path)
    shutil.copy(BENCHMARK, folder)
    (folder / "bench.sh").write_text(REPEATED_BENCHMARK)
    (folder / "model").mkdir()


def serving_job(folder: Path, *, prefill: int, decode: int, repeat: bool = False, **over: Any) -> dict[str, Any]:
    """A job file with one worker per node, two routers, nginx and a benchmark.

    A decode worker starts more slowly than a prefill worker, so that readiness takes time.
    """
    command = "bash bench.sh" if repeat else "python3 bench.py"
    return {
        "name": "serve",
        "model": {"path": str(folder / "model")},
        "resources": {"gpus_per_node": 1, "gpus_per_prefill": 1, "gpus_per_decode": 1}
        | {"prefill_workers": prefill, "decode_workers": decode},
        "backend": {"type": "sglang", "args": {"ready-after": 0.5}, "decode": {"args": {"ready-after": 2}}},
        "env": {"PYTHONPATH": str(folder / "engines")},
        "frontend": {"type": "sglang-router", "count": 2},
        "benchmark": {"type": "sa-bench", "command": command, "isl": ISL, "osl": OSL, "concurrencies": "2x4"}
        | {"args": {"requests-each": 4}},
        "readiness": {"interval": 0.5, "timeout": 120},
        "monitoring": {"check_interval": 1, "linger": 0},
        **over,
    }


def readiness_lines(run_dir: Path) -> list[str]:
    """Readiness lines in the log of the benchmark."""
    lines = (run_dir / "benchmark.out").read_text().splitlines()
    return [line for line in lines if line.startswith(("Polling http", "Model is"))]


def results(run_dir: Path) -> dict[str, int]:
    """Successful requests by the name of the result file."""
    return {path.name: int(json.loads(path.read_text())["completed"]) for path in (run_dir / RESULTS).glob("*.json")}


def series(page: str, prefix: str) -> dict[tuple[str, str], float]:
    """Values of series with this name prefix, by name and role."""
    return {
        (sample.name, sample.labels.get("role", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def fetch(address: str, path: str) -> tuple[int, str]:
    """Status and body of a response from a local server."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
