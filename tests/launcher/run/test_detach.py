"""Jobs and sweeps in the background outlive the command and its terminal, and are found again by id."""

import contextlib
import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import yaml

from tests.support.launcher import GPUJOB, clean_environment, gpujob, kill_all_with, poll, read_json

WAITS = (
    "i=0; while [ $i -lt 5 ]; do i=$((i+1)); echo Processed $i/5 items; done; until [ -e finish ]; do sleep 0.1; done"
)
JOB = {
    "name": "behind",
    "workers": [{"command": WAITS, "shell": True}],
    "patterns": {"output": None},
    "monitoring": {"linger": 0},
}


def watch_on_a_terminal(job_id: str, cwd: Path) -> str:
    """What `gpujob watch` shows until the job has completed."""
    main, side = pty.openpty()
    argv = ["bash", "-c", f"{GPUJOB} watch {job_id}"]
    watching = subprocess.Popen(argv, cwd=cwd, stdin=side, stdout=side, env=clean_environment(TERM="xterm-256color"))
    os.close(side)
    shown = b""
    with contextlib.suppress(OSError):  # the end of its terminal
        while more := os.read(main, 4096):
            shown += more
    os.close(main)
    assert watching.wait(20) == 0
    return shown.decode()


def test_a_job_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.yaml").write_text(yaml.safe_dump(JOB))
    main, side = pty.openpty()
    argv = ["setsid", "--ctty", "bash", "-c", f"{GPUJOB} run -d job.yaml; sleep 60"]
    try:
        shell = subprocess.Popen(argv, cwd=work, stdin=side, stdout=side, stderr=side, env=clean_environment())
        os.close(side)
        shown = b""
        while b"Stop: gpujob stop local-" not in shown:
            shown += os.read(main, 4096)
        run_dir = poll(lambda: next(work.glob("logs/local-*"), None), "a run directory")
        poll(lambda: read_json(run_dir / "state.json").get("phase") == "running", "a running job")
        os.killpg(shell.pid, signal.SIGHUP)
        os.close(main)
        shell.wait(20)
        job_id = run_dir.name.partition("_")[0]
        assert gpujob("watch", "--once", job_id, cwd=tmp_path).returncode == 10
        (work / "finish").touch()
        summary = "\r\n1 completed: worker_w0\r\nfull report: work/logs/local-"
        assert summary in watch_on_a_terminal(job_id, tmp_path)
        assert read_json(run_dir / "report.json")["state"] == "COMPLETED"
    finally:
        kill_all_with(work)


def test_a_sweep_in_the_background_is_stopped_by_its_id(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.yaml").write_text(yaml.safe_dump({**JOB, "env": {"LR": "{lr}"}, "sweep": {"grid": {"lr": [1, 2]}}}))
    try:
        started = gpujob("run", "-d", "--json", "job.yaml", cwd=work)
        assert (started.returncode, started.stderr.count("\n")) == (0, 1), "a warning that no output is watched"
        answer = json.loads(started.stdout)
        assert gpujob("watch", "--until", "running", answer["job_id"], cwd=tmp_path).returncode == 0
        assert gpujob("stop", answer["job_id"], cwd=tmp_path).stdout == f"sweep {answer['job_id']} is being stopped\n"
        assert gpujob("watch", answer["job_id"], cwd=tmp_path).returncode == 5
        log = Path(answer["sweep_dir"], "log.out")
        poll(lambda: '{"CANCELLED": 1, "MISSING": 1}' in log.read_text(), "the end of the sweep")
    finally:
        kill_all_with(work)
