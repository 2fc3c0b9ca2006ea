"""Serving jobs of the tests: stand-in engines under the names of the real ones, and what a job tells of itself."""

import http.client
import json
import shutil
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ENGINES = Path(__file__).resolve().parents[1] / "engines"
MODULES = {"sglang_worker": "sglang/launch_server", "router": "sglang_router/launch_router"}
"""Stand-ins by the modules that ``python3 -m`` finds them as."""
ISL, OSL = 32, 16
RESULTS = f"sa-bench_isl_{ISL}_osl_{OSL}"
ENOUGH = "enough"  # file that ends a benchmark which goes on until it is told
GOES_ON = f"""
until [ -e {ENOUGH} ]; do
    python3 sa_bench.py "$@" || exit
done
"""
RECORDS = """
import json, os, sys
if "GPUJOB_WORKER" in os.environ:
    folder = os.path.join(os.environ["GPUJOB_RUN_DIR"], "seen")
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/{GPUJOB_WORKER}_{LOCAL_RANK}.json".format_map(os.environ), "w") as out:
        json.dump({"argv": sys.orig_argv, "environment": dict(os.environ)}, out)
"""  # for `sitecustomize`, which Python imports at its start: each program of the job writes down how it was started


BACK = "back"  # file that a worker which has ended before waits for
WAITS = f"""
import os, time
ended = "{{GPUJOB_RUN_DIR}}/workers/{{GPUJOB_WORKER}}_rank{{RANK}}_a0_r0.exit.json"
if "GPUJOB_WORKER" in os.environ and os.path.exists(ended.format_map(os.environ)):
    while not os.path.exists("{BACK}"):
        time.sleep(0.1)
"""  # with this as `sitecustomize`: it stays away until all have seen that it is


def place_stand_ins(folder: Path) -> None:
    """The engines, the benchmark and a folder for the model, for a job whose working directory this is."""
    for source, module in MODULES.items():
        path = folder / "engines" / f"{module}.py"
        path.parent.mkdir(parents=True)
        shutil.copy(ENGINES / f"{source}.py", path)
    shutil.copy(ENGINES / "sa_bench.py", folder)
    (folder / "bench.sh").write_text(GOES_ON)
    (folder / "model").mkdir()


def serving_job(folder: Path, *, prefill: int, decode: int, until_told: bool = False, **over: Any) -> dict[str, Any]:
    """A job file: workers of a node each, behind two routers and nginx, used by a benchmark.

    A decode worker takes longer to come up than a prefill worker, so that there is something to wait for.
    """
    command = "bash bench.sh" if until_told else "python3 sa_bench.py"
    return {
        "name": "serve",
        "model": {"path": str(folder / "model")},
        "resources": {"gpus_per_node": 1, "gpus_per_prefill": 1, "gpus_per_decode": 1}
        | {"prefill_workers": prefill, "decode_workers": decode},
        "backend": {"type": "sglang", "args": {"ready-after": 0.5}, "decode": {"args": {"ready-after": 2}}},
        "env": {"PYTHONPATH": str(folder / "engines")},
        "frontend": {"type": "sglang-router", "count": 2},
        "benchmark": {"type": "sa-bench", "command": command, "isl": ISL, "osl": OSL, "concurrencies": "2x4"},
        "readiness": {"interval": 0.5, "timeout": 120},
        "monitoring": {"check_interval": 1, "linger": 0},
        **over,
    }


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    """Events of these kinds so far, oldest first; all kinds where none is named."""
    path = run_dir / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in found if not names or event["event"] in names]


def readiness_lines(run_dir: Path) -> list[str]:
    """What the benchmark's log says of readiness, in the words of a user's script."""
    lines = (run_dir / "benchmark.out").read_text().splitlines()
    return [line for line in lines if line.startswith(("Polling http", "Model is"))]


def results(run_dir: Path) -> dict[str, int]:
    """Requests that succeeded, by the names of the files of results."""
    return {path.name: int(json.loads(path.read_text())["completed"]) for path in (run_dir / RESULTS).glob("*.json")}


def series(page: str, prefix: str) -> dict[tuple[str, str], float]:
    """Values of the families whose names begin so, by name and role."""
    return {
        (sample.name, sample.labels.get("role", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def fetch(address: str, path: str) -> tuple[int, str]:
    """Status and body of what a server of this machine answers."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
