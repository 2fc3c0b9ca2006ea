"""A job that a script started, watched by the real sidecar to its report."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.contract.report import Report
from launcher.report.text import render_report
from launcher.watch.view import JobClient
from tests.exporter.sidecar.test_sidecar_process import EXPORTER, environment, refused, run
from tests.launcher.jobfile.test_monitor_config import EXAMPLE
from tests.support.exporter import until

WORKER = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
for flag in ("--worker-id", "--output-file", "--log-file", "--finish"):
    parser.add_argument(flag, required=True)
parser.add_argument("--name")
given = parser.parse_args()
with open(given.log_file, "w", buffering=1) as log, open(given.output_file, "w", buffering=1) as out:
    for item in range(1, 26):
        for place in (log, sys.stdout):
            print(f"Processed {item}/25 items", file=place, flush=True)
        out.write(json.dumps({"item": item}) + "\\n")
        while item == 5 and not pathlib.Path(given.finish).exists():
            time.sleep(0.05)
"""
LAUNCH_AND_MONITOR = """#!/bin/bash
JOB_NAME="embedding_generation"
NUM_WORKERS=4
GPU_IDS=(0 1 2 3)
mkdir -p "$OUTPUT_DIR" "$LOG_DIR"
for i in $(seq 0 $((NUM_WORKERS - 1))); do
    CUDA_VISIBLE_DEVICES=${GPU_IDS[$i]} \\
    "$PYTHON" worker.py \\
        --worker-id $i \\
        --output-file "$OUTPUT_DIR/output_worker_$i.json" \\
        --log-file "$LOG_DIR/worker_$i.log" \\
        --finish "$PWD/finish" $MORE \\
        > "$LOG_DIR/worker_${i}_stdout.log" \\
        2> "$LOG_DIR/worker_${i}_stderr.log" &
    WORKER_PIDS[$i]=$!
done
[ -n "$MORE" ] || echo "${WORKER_PIDS[@]}" > "$LOG_DIR/worker_pids.txt"
echo "${WORKER_PIDS[@]}"
"$PYTHON" -I -m exporter sidecar --web.listen-address 127.0.0.1:0 --state-dir "$PWD/state" --check-interval 1 "$@"
MONITOR_EXIT=$?
[ "$MONITOR_EXIT" -eq 130 ] && wait
exit $MONITOR_EXIT
"""


class Launched:
    """A job that a script started, with a sidecar in the foreground of the script."""

    def __init__(self, folder: Path, *options: str, more: str = "") -> None:
        self.folder, self.state = folder, folder / "state"
        (folder / "worker.py").write_text(WORKER, encoding="ascii")
        (folder / "launch_and_monitor.sh").write_text(LAUNCH_AND_MONITOR, encoding="ascii")
        directories = {"OUTPUT_DIR": str(folder / "out"), "LOG_DIR": str(folder / "log")}
        self.others: list[subprocess.Popen[bytes]] = []
        self.errors = (folder / "errors").open("w+", encoding="utf-8")
        self.script = subprocess.Popen(
            ["bash", "launch_and_monitor.sh", *options],
            env=environment(**directories, PYTHON=sys.executable, MORE=more),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        assert self.script.stdout is not None
        self.pids = [int(word) for word in self.script.stdout.readline().split()]

    def address(self) -> str:
        """Address at which the current sidecar listens."""

        def published() -> object:
            own = (run_files.read_json(self.state / run_files.ORCHESTRATOR_FILE) or {}).get("pid")
            found = [run_files.read_json(path) or {} for path in (self.state / run_files.SIDECARS_DIR).glob("*.json")]
            return own and found and self.sidecar_pid() and found[0].get("address")

        return str(until(published, "the sidecar's address"))

    def sidecar_pid(self) -> int:
        return int(str((run_files.read_json(self.state / run_files.ORCHESTRATOR_FILE) or {})["pid"]))

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.address(), timeout=20)
        token = {"Authorization": f"Bearer {run_files.read_token(self.state)}"}
        connection.request("GET", path, headers={"Accept-Encoding": "identity", **token})
        text = connection.getresponse().read().decode("utf-8")
        connection.close()
        return text

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.get("/status"))["workers"]
        return found

    def finish(self) -> None:
        """Let the workers process their remaining items."""
        (self.folder / "finish").touch()

    def end(self) -> tuple[int, str]:
        """Exit status of the script and standard output of the sidecar."""
        text, _ = self.script.communicate(timeout=60)
        return self.script.returncode, text

    def error_output(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def report(self) -> Report:
        report = Report.read(self.state / run_files.REPORT_FILE)
        assert report is not None
        return report

    def start_other(self, *words: str) -> None:
        """Start a process with these words that does not belong to the job."""
        program = "import time; time.sleep(600)"
        self.others.append(subprocess.Popen([sys.executable, "-c", program, *words]))

    def close(self) -> None:
        for other in self.others:
            other.kill()
            other.wait()
        try:
            os.killpg(self.script.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them have ended
        self.script.communicate()
        self.errors.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start_script(*options: str, more: str = "") -> Launched:
        started.append(Launched(tmp_path, *options, more=more))
        return started[-1]

    yield start_script
    for job in started:
        job.close()


def flags(folder: Path) -> list[str]:
    directories = ["--output-dir", f"{folder}/out", "--log-dir", f"{folder}/log", "--alert-email", "user@example.com"]
    workers = ["--num-workers", "4", "--gpu-ids", "0", "1", "2", "3", "--total-items", "100"]
    return ["--job-name", "embedding_generation", *workers, *directories]


def all_workers_at(job: Launched, items: int) -> Callable[[], bool]:
    """Condition: all workers are up and have processed this many items."""
    return lambda: [(worker["up"], worker.get("items")) for worker in job.workers()] == [(True, items)] * 4


def test_a_script_with_flags_reports_a_killed_worker(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    job = launch(*flags(tmp_path))
    until(all_workers_at(job, 5), "the items of all workers")
    page = job.get("/metrics")
    labels = 'job_name="embedding_generation"'
    assert page.count("gpujob_worker_up{") == 4
    assert all(
        line.endswith(" 1") and labels in line for line in page.splitlines() if line.startswith("gpujob_worker_up{")
    )
    assert [worker["pid"] for worker in job.workers()] == job.pids
    assert JobClient(job.state).read_view().state == "RUNNING"
    os.kill(job.pids[2], signal.SIGKILL)
    killed = until(lambda: job.workers()[2]["exit"], "the end of the killed worker")
    job.start_other("embedding_generation", "--worker-id", "2")
    assert (killed["reason"], killed["code"]) == ("killed_unknown", None)
    assert killed["signal"] in ("SIGKILL", None), "not reported by every kernel"
    assert 'reason="killed_unknown"} 1\n' in job.get("/metrics")
    job.finish()
    until(lambda: _has_ended(job), "the end", 40)
    code, text = job.end()
    assert code == 1
    assert text.startswith("# Job state embedding_generation: FAILED\n")
    assert "| 5/25 | 0 |" in text
    assert text == f"{render_report(job.report())}\nrun directory: {job.state}\n"
    assert "Alertmanager" in job.error_output()
    assert "worker_w2 ended: killed_unknown: " in job.error_output()
    assert list((job.state / run_files.WORKERS_DIR).glob("*_r1.start.json")) == []
    assert (job.state / "report.md").read_text() == render_report(job.report())
    assert "Traceback" not in job.error_output()
    view = JobClient(job.state).read_view()
    assert view.report is not None
    assert view.report.exit_status == 1


def _answers(job: Launched) -> bool:
    try:
        return bool(job.workers())
    except OSError:
        return False


def _has_ended(job: Launched) -> bool:
    """Whether the script has ended. Scrapes as Prometheus would, so that the sidecar need not linger."""
    try:
        job.get("/metrics")
    except OSError:
        return True
    return job.script.poll() is not None


def test_a_script_with_a_config_file_completes(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    config = EXAMPLE.replace("/scratch/outputs", f"{tmp_path}/out").replace("/scratch/logs", f"{tmp_path}/log")
    path = tmp_path / "monitor_config.yaml"
    path.write_text(config, encoding="utf-8")
    job = launch("--config", str(path), "--total-items", "100")
    until(all_workers_at(job, 5), "the items of all workers")
    job.finish()
    until(lambda: _has_ended(job), "the end", 40)
    code, text = job.end()
    assert text.startswith("# Job state embedding_generation_v2: COMPLETED and verified\n")
    assert text.count("| 25/25 | 0 |") == 4
    assert "- records: ok: 100 records for 100 items\n" in text
    assert code == 0
    events = [json.loads(line) for line in (job.state / run_files.EVENTS_FILE).read_text().splitlines()]
    assert [event["state"] for event in events if event["event"] == "job ended"] == ["COMPLETED"]
    assert "hooks.slack.com" not in job.error_output()
    assert "gpujob watch" in job.error_output()


@pytest.mark.parametrize(
    ("harm", "check"),
    [
        (lambda out: (out / "output_worker_3.json").write_text(""), "- outputs: FAILED: "),
        (lambda out: (out / "output_worker_3.json").write_text('{"item": 1}\n{"it'), "- valid: FAILED: "),
    ],
    ids=["empty", "damaged"],
)
def test_short_or_damaged_output_is_incomplete(
    tmp_path: Path, launch: Callable[..., Launched], harm: Callable[[Path], object], check: str
) -> None:
    job = launch(*flags(tmp_path))
    until(all_workers_at(job, 5), "the items of all workers")
    job.finish()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in job.pids), "the end of the workers", 20)
    harm(tmp_path / "out")
    code, text = job.end()
    assert (code, job.report().exit_status) == (8, 8)
    assert check in text


def test_a_script_that_ends_the_sidecar_with_its_job_gets_the_report(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    job = launch(*flags(tmp_path))
    until(all_workers_at(job, 5), "the items of all workers")
    job.finish()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in job.pids), "the end of the workers", 20)
    os.kill(job.sidecar_pid(), signal.SIGTERM)
    code, text = job.end()
    assert code == 0
    assert "COMPLETED and verified" in text
    assert (run_files.read_json(job.state / run_files.STATE_FILE) or {})["phase"] == "finished"


def test_a_sidecar_that_is_stopped_with_the_workers_waits_for_them(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    job = launch(*flags(tmp_path))
    until(all_workers_at(job, 5), "the items of all workers")
    os.kill(job.sidecar_pid(), signal.SIGTERM)
    time.sleep(1.0)
    for pid in job.pids:
        os.kill(pid, signal.SIGTERM)
    assert job.end()[0] == 1
    assert [worker.exit and worker.exit.signal for worker in job.report().workers] == ["SIGTERM"] * 4


def test_the_state_is_the_same_from_another_machine(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    job = launch(*flags(tmp_path))
    until(all_workers_at(job, 5), "the items of all workers")
    path = job.state / run_files.ORCHESTRATOR_FILE
    record = run_files.read_json(path) or {}
    run_files.write_json(path, {**record, "host": "elsewhere"})
    assert JobClient(job.state).read_view().state == "RUNNING"
    assert JobClient(job.state).report().exit_status == 10
    for status in (job.state / run_files.STATUS_DIR).glob("*.json"):
        status.unlink()
    assert JobClient(job.state).read_view().state == "UNKNOWN"


def test_workers_found_by_name_continue_without_the_sidecar(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    name = f"job{os.getpid()}x{time.monotonic_ns()}"
    options = [*flags(tmp_path), "--job-name", name]
    job = launch(*options, more=f"--name {name}")
    until(all_workers_at(job, 5), "the items of all workers")
    assert [worker["pid"] for worker in job.workers()] == job.pids
    os.kill(job.sidecar_pid(), signal.SIGINT)
    left = until(lambda: "the job itself was not touched" in job.error_output(), "the end of the sidecar")
    assert left
    report = JobClient(job.state).report()
    assert (report.state, report.exit_status, report.cause) == ("UNKNOWN", 9, None)
    assert [worker.up for worker in report.workers] == [True] * 4
    assert report.stopped is not None
    assert report.stopped.cause.endswith(", while 4 workers were running")
    assert "- stopped: the sidecar was stopped at" in render_report(report)
    assert all(Path(f"/proc/{pid}").exists() for pid in job.pids)
    argv = [*EXPORTER, "sidecar", "--state-dir", str(job.state), "--web.listen-address", "127.0.0.1:0", *options]
    second_sidecar = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=job.errors, text=True)
    try:
        until(lambda: job.sidecar_pid() == second_sidecar.pid and _answers(job), "the second sidecar")
        time.sleep(1.5)
        assert not (job.state / run_files.REPORT_FILE).exists(), "the job continues"
        assert list((job.state / run_files.WORKERS_DIR).glob("*_r1.start.json")) == []
        second_sidecar.terminate()
        assert second_sidecar.wait(timeout=20) == 0
    finally:
        second_sidecar.kill()
        second_sidecar.communicate()
    assert all(Path(f"/proc/{pid}").exists() for pid in job.pids)
    job.finish()
    assert job.end()[0] == 130


def test_the_sidecar_exits_with_1_if_no_worker_is_found(tmp_path: Path) -> None:
    options = [*flags(tmp_path), "--state-dir", str(tmp_path / "state"), "--web.listen-address", "127.0.0.1:0"]
    done = run("sidecar", *options, "--job-name", f"none{os.getpid()}", "--launch-timeout", "1")
    assert done.returncode == 1
    missing = "found 0 of 4 workers within 1 s; missing: worker_w0, worker_w1, worker_w2, worker_w3; write their pids"
    assert f"- workers: FAILED: {missing}" in done.stdout


def test_run_dir_and_job_name_exclude_each_other(tmp_path: Path) -> None:
    message = refused(run("sidecar", "--run-dir", str(tmp_path), "--job-name", "x", "--config", "c"))
    assert message == (
        "--run-dir is for a job that gpujob launched, --config, --job-name for any other job; use one or the other"
    )


def test_invalid_option_values_are_refused_together(tmp_path: Path) -> None:
    options = ("--num-workers", "0", "--check-interval", "nan", "--gpu-ids", "1", "-1", "--log-pattern", "a/*.log")
    done = run("sidecar", *flags(tmp_path), *options)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "gpujob-exporter: the command line: 4 problems",
        "  --num-workers: 0 must be greater than or equal to 1",
        "  --gpu-ids[1]: -1 must be greater than or equal to 0",
        "  --log-pattern: 'a/*.log' is not a pattern of file names; directories go into `paths`",
        "  --check-interval: nan must be greater than 0",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_can_be_checked(tmp_path: Path) -> None:
    path = tmp_path / "monitor_config.yaml"
    path.write_text(EXAMPLE, encoding="utf-8")
    done = run("check-config", str(path))
    assert done.returncode == 0
    assert done.stdout == (
        f"{path}: job 'embedding_generation_v2', 4 workers, 4 GPUs, 3 progress patterns, 3 error patterns\n"
    )
    assert "log_dir: /scratch/logs does not exist yet" in done.stderr
    assert "hooks" not in done.stderr
    path.write_text(EXAMPLE.replace("check_interval", "chek_interval"), encoding="utf-8")
    done = run("check-config", str(path))
    assert done.returncode == 2
    assert 'monitoring.chek_interval: unknown key "chek_interval"; did you mean "check_interval"?' in done.stderr
