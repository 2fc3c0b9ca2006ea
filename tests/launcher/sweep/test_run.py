"""A sweep on this machine, with real processes."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from exporter.contract import run_files
from exporter.contract.status import JobStatus, NodeStatus
from launcher.cli.sweep import _continue_in_background, resume_points
from launcher.errors import LauncherError
from launcher.jobfile.jobfile import ClusterSpec
from launcher.registry.entries import read_own_entries
from launcher.report.report import build_report
from launcher.rundir import rundir
from launcher.rundir.job_records import ProcessRecord
from launcher.rundir.rundir import SWEEP_FILE
from launcher.steps.steps import ENDING_SIGNALS
from launcher.sweep import run as sweep_run
from launcher.sweep.directory import points_to_resume, read_point_states, read_record, with_runs, write_record
from launcher.sweep.plan import PlannedSweep, plan_sweep
from launcher.sweep.run import LocalSweep, begin_sweep, gpu_slots
from launcher.sweep.submit import settle_point
from tests.launcher.sweep.test_directory import ENDED
from tests.support.builders import orchestrator_record
from tests.support.launcher import LocalJob, gpujob, invocation_in, poll, read_json

PROGRAM = """\
import os, sys, time
time.sleep(0.5)
sys.exit(3 if sys.argv[1:] == ["0.2", "16"] and not os.path.exists("ok") else 0)
"""
JOB: dict[str, Any] = {
    "name": "points",
    "workers": [{"command": ["python3", "-c", PROGRAM, "{lr}", "{bs}"]}],
    "monitoring": {"enabled": False},
    "sweep": {"max_parallel": 2, "grid": {"lr": [0.1, 0.2], "bs": [8, 16, 32]}},
}


def most_at_once(run_dirs: list[Path]) -> int:
    """Most jobs that ran at the same time, from their records."""
    changes: list[tuple[float, int]] = []
    for run_dir in run_dirs:
        changes.append((float(read_json(run_dir / "orchestrator.json")["start"]), 1))
        changes.append((float(read_json(run_dir / "report.json")["end"]), -1))
    running = [0]
    for _, change in sorted(changes):
        running.append(running[-1] + change)
    return max(running)


def test_two_points_run_at_once_and_only_failed_ones_are_resumed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB, sort_keys=False))
    original = gpujob("run", "job.yaml", cwd=tmp_path, timeout=300)
    (home,) = (tmp_path / "logs").iterdir()
    assert original.returncode == 1, original.stderr
    lines = original.stdout.splitlines()
    assert lines[0] == f"6 of 6 points, at most 2 at once, logs in {home}"
    sweep_id = home.name.partition("_")[0]
    assert lines[1] == f"points_lr0.1_bs8 started as {sweep_id}_0, 0 of 6 ended"
    assert "points_lr0.2_bs16 FAILED, " in original.stdout
    assert lines[-1] == "6 points: 5 COMPLETED, 1 FAILED"
    runs = sorted(path for path in home.iterdir() if path.is_dir())
    assert [re.sub(r"_\d{8}_\d{6}$", "", run.name) for run in runs] == [
        f"{sweep_id}_{index}_points_lr{lr}_bs{bs}"
        for index, (lr, bs) in enumerate((lr, bs) for lr in (0.1, 0.2) for bs in (8, 16, 32))
    ]
    assert most_at_once(runs) == 2
    failed = gpujob("report", f"{sweep_id}_4", "--json", cwd=tmp_path)
    assert (failed.returncode, json.loads(failed.stdout)["job_id"]) == (1, f"{sweep_id}_4")
    cause = f"worker_w0 (rank 0) on {os.uname().nodename.partition('.')[0]}: app_error: exit status 3"
    states = json.loads(gpujob("sweep", home, "--json", cwd=tmp_path).stdout)["points"]
    assert states[4]["cause"].startswith(cause)
    assert f"  {cause}" in gpujob("sweep", home, cwd=tmp_path).stdout, "nothing is cut where no terminal is"
    for name in (home, sweep_id):
        table = gpujob("watch", name, "--once", cwd=tmp_path).stdout
        assert table == gpujob("sweep", home, cwd=tmp_path).stdout
        hint = gpujob("logs", name, cwd=tmp_path).stderr
        (point,) = re.findall(r"as in (\S+)$", hint.strip())
        assert gpujob("watch", point, "--once", cwd=tmp_path).returncode == 0

    (tmp_path / "ok").touch()
    original = gpujob("run", "job.yaml", "--resume", sweep_id, "--json", cwd=tmp_path, timeout=120)
    found = json.loads(original.stdout)
    assert (original.returncode, found["states"]) == (0, {"COMPLETED": 6})
    assert [point["runs"] for point in found["points"]] == [1, 1, 1, 1, 2, 1]
    assert found["points"][4]["job_id"].endswith("_4")
    assert runs[4].is_dir()
    for again in (["sweep", str(home), "--resume"], ["run", "job.yaml", "--resume", str(home)]):
        original = gpujob(*again, cwd=tmp_path)
        expected = "nothing to resume: all 6 points have completed\n"
        assert (original.returncode, original.stdout, original.stderr) == (0, expected, "")
        assert json.loads(gpujob(*again, "--json", cwd=tmp_path).stdout)["states"] == {"COMPLETED": 6}
    assert len(list(home.glob("*/manifest.json"))) == 7, "nothing was run again"
    assert gpujob("sweep", sweep_id, cwd=tmp_path).returncode == 0


def test_only_points_that_run_again_are_checked(tmp_path: Path) -> None:
    worker = {"command": ["sh", "-c", "echo 1 > out/$0/output_worker_0.json; test $0 = a", "{x}"]}
    job = {"name": "s", "workers": [worker], "paths": {"output_dir": "out/{x}"}, "sweep": {"grid": {"x": ["a", "b"]}}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert gpujob("run", "job.yaml", "--quiet", cwd=tmp_path, timeout=120).returncode == 1
    (home,) = (tmp_path / "logs").iterdir()
    again = gpujob("run", "job.yaml", "--resume", home, "--quiet", cwd=tmp_path, timeout=120)
    assert [line.split()[:1] for line in again.stdout.splitlines()] == [["point"], ["0"], ["1"], ["2"]], (
        "the table only"
    )
    assert "out/b" in again.stderr
    assert "out/a" not in again.stderr


def test_ctrl_c_ends_running_points_and_the_rest_can_be_resumed(tmp_path: Path) -> None:
    spec = {**JOB, "workers": [{"command": ["sleep", "{seconds}"]}]}
    spec["sweep"] = {"max_parallel": 2, "grid": {"seconds": [300, 301, 302]}}
    with LocalJob(tmp_path / "a", spec) as job:

        def started() -> list[Path]:
            # not the hidden directories, which are renamed meanwhile
            found = sorted((tmp_path / "a").glob("logs/local-*/local-*/workers/*.start.json"))
            return found if len(found) == 2 else []

        runs = [path.parents[1] for path in poll(started, "two points that run")]
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130
        reports = [read_json(run / "report.json") for run in runs]
        assert [report["state"] for report in reports] == ["CANCELLED", "CANCELLED"]
        assert {report["stopped"]["cause"] for report in reports} == {"SIGINT to `gpujob run`, by Ctrl-C"}
        assert job.output.splitlines()[-1] == "3 points: 2 CANCELLED, 1 MISSING"
        assert job.left_over() == {}
        home = runs[0].parent
        assert read_json(home / "sweep.json")["runner"] is None
        original = gpujob("sweep", home, "--json", cwd=tmp_path)
        assert (original.returncode, json.loads(original.stdout)["points"][2]["state"]) == (5, "MISSING")


def planned(max_parallel: int | None, gpus: int, here: Path = Path("/"), **more: Any) -> PlannedSweep:
    body: dict[str, Any] = {
        "name": "j",
        "resources": {"gpus_per_node": gpus},
        "workers": [{"gpus": gpus, "command": "true {x}"}],
        "sweep": {"grid": {"x": [1, 2, 3]}, "max_parallel": max_parallel},
        **more,
    }
    return plan_sweep(body, "job.yaml", ClusterSpec(), invocation_in(here, local=True))


def test_a_sweep_of_another_machine_is_neither_resumed_nor_stopped(tmp_path: Path) -> None:
    home, record = begin_sweep(planned(2, 0, tmp_path), b"")
    write_record(home, record.replace(runner=ProcessRecord(pid=os.getpid(), host="login1")))
    shown = gpujob("sweep", home, cwd=tmp_path)
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (10, "3 points: 3 PENDING")
    resumed = gpujob("sweep", home, "--resume", cwd=tmp_path)
    assert (resumed.returncode, resumed.stdout) == (2, "")
    assert f"{home} was started on login1, and this machine cannot see whether it still runs" in resumed.stderr
    stopped = gpujob("stop", home, cwd=tmp_path)
    assert (stopped.returncode, stopped.stdout) == (2, "")
    assert stopped.stderr.endswith(" was started on login1; stop it there\n")


def test_a_sweep_of_another_machine_runs_while_a_point_reports(tmp_path: Path) -> None:
    sweep = planned(2, 0, tmp_path)
    home, record = begin_sweep(sweep, b"")
    staged = rundir.stage_run_dir(sweep.points[0].plan, "", home)
    point = home / settle_point(sweep.points[0], "local-1_0", staged, record, home, "")
    run_files.write_json(point / run_files.ORCHESTRATOR_FILE, orchestrator_record(host="login1"))
    runner = ProcessRecord(pid=os.getpid(), host="login1")
    write_record(home, with_runs(record.replace(runner=runner), {0: point.name}))
    os.utime(home / SWEEP_FILE, (1000.0, 1000.0))

    def report(ago_s: float) -> None:
        status = NodeStatus(time=time.time() - ago_s, final=False, job=JobStatus())
        run_files.write_json(point / run_files.STATUS_DIR / "here.json", status.to_json())

    def states() -> list[str]:
        return [state.state for state in read_point_states(home, read_record(home))]

    report(0.0)
    assert states() == ["RUNNING", "PENDING", "PENDING"]
    assert "was started on login1" in gpujob("sweep", home, "--resume", cwd=tmp_path).stderr
    report(60.0)
    assert states() == ["UNKNOWN", "MISSING", "MISSING"], "its machine is gone"
    os.utime(home / SWEEP_FILE)
    assert states() == ["UNKNOWN", "PENDING", "PENDING"], "the next point has just been started"
    os.utime(home / SWEEP_FILE, (1000.0, 1000.0))
    ended = build_report(point, now=time.time(), ended=True)
    run_files.write_json(point / run_files.REPORT_FILE, ended.to_json())
    assert states()[1:] == ["PENDING", "PENDING"], "the next point is to be started"
    run_files.write_json(point / run_files.REPORT_FILE, ended.replace(end=2000.0).to_json())
    assert states()[1:] == ["MISSING", "MISSING"]


def test_a_sweep_of_a_machine_that_is_gone_can_be_resumed(tmp_path: Path) -> None:
    body = {**JOB, "workers": [{"command": "true {lr}"}], "sweep": {"grid": {"lr": [0.1]}}}
    sweep = plan_sweep(body, "job.yaml", ClusterSpec(), invocation_in(tmp_path, local=True))
    home, record = begin_sweep(sweep, yaml.safe_dump(body).encode())
    write_record(home, record.replace(runner=ProcessRecord(pid=os.getpid(), host="login1")))
    os.utime(home / SWEEP_FILE, (1000.0, 1000.0))
    shown = gpujob("sweep", home, cwd=tmp_path)
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (9, "1 points: 1 MISSING")
    resumed = gpujob("sweep", home, "--resume", cwd=tmp_path)
    assert (resumed.returncode, resumed.stdout.splitlines()[-1]) == (0, "1 points: 1 COMPLETED"), resumed.stderr


def test_parallel_points_have_their_own_gpus() -> None:
    assert gpu_slots(planned(2, 2), "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e") == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    assert gpu_slots(planned(None, 2), "0") == [None]
    assert gpu_slots(planned(3, 0), None) == [None, None, None]
    with pytest.raises(LauncherError, match=r"2 GPUs need 4 and this machine has 3; set max_parallel to 1$"):
        gpu_slots(planned(2, 2), "0,1,2")


def test_parallel_points_need_the_gpus_that_their_workers_use() -> None:
    assert gpu_slots(planned(3, 1, resources={"gpus_per_node": 8}), "4,5,6") == ["4", "5", "6"]
    assert gpu_slots(planned(8, 1), "4,5,6") == ["4", "5", "6"], "there are three points"
    assert gpu_slots(planned(3, 2), "4,5,6,7", 2) == ["4,5", "6,7"], "two are resumed"


@pytest.mark.parametrize(
    "names", [("nvidia2", "nvidia3", "nvidiactl", "dri/renderD128"), ("kfd", "dri/renderD129", "dri/renderD130")]
)
def test_gpus_are_numbered_from_0_in_a_container_with_some_of_them(tmp_path: Path, names: Sequence[str]) -> None:
    (tmp_path / "dri").mkdir()
    for name in names:
        (tmp_path / name).touch()
    assert gpu_slots(planned(2, 1), None, dev=tmp_path) == ["0", "1"]


def test_parallel_points_do_not_share_the_gpus_that_the_job_file_names() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    with pytest.raises(LauncherError, match=r"points would share GPUs, .* CUDA_VISIBLE_DEVICES=4,5,6,7 in each; set"):
        gpu_slots(planned(2, 1, env=env), "0,1")
    assert gpu_slots(planned(1, 1, env=env), "0,1") == [None]
    without = {"role": "cpu", "gpus": 0, "command": "true", "env": {"CUDA_VISIBLE_DEVICES": ""}}
    workers = [{"gpus": 1, "command": "true {x}"}, without]
    assert gpu_slots(planned(2, 1, workers=workers), "0,1") == ["0", "1"], "a role without GPUs hides them"
    assert gpu_slots(planned(2, 1, env={"CUDA_VISIBLE_DEVICES": "{x}"}), "0,1") == ["0", "1"], "each names its own"


STUBBORN = "trap ': > told' INT; : > ready; while :; do sleep 0.05; [ -e told ] && trap - INT && : > asked; done"
"""A point that ends at the second SIGINT. It creates files when it is ready and after the first."""


class Signalled:
    """A sweep in this process: three points, two at once, with stand-ins for orchestrators."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.command = ["sleep", "300"]
        self.folder = folder
        sweep = planned(2, 0, folder)
        home, record = begin_sweep(sweep, b"")
        self.local = LocalSweep(sweep, home, record, lambda _: None)
        monkeypatch.setattr(sweep_run, "LocalJob", self._start)

    def _start(self, *_: object) -> Mock:
        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

        self.started.append(subprocess.Popen(self.command, cwd=self.folder, preexec_fn=prepare))
        return Mock(process=self.started[-1], read_report=lambda: None)

    def run(self, indexes: Sequence[int] = (0, 1, 2)) -> list[int | None]:
        """Run points; return the exit statuses of those that were started."""
        self.local.run(indexes)
        return [process.returncode for process in self.started]

    def runs(self) -> list[int]:
        """Number of recorded runs of each point."""
        return [len(point.runs) for point in self.local.record.points]


@pytest.fixture
def signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Signalled]:
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    yield Signalled(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def send_sigint() -> None:
    """Send SIGINT to the main thread. While that blocks it, any other thread would take one to the process."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """Send SIGINT just before the ``call``-th call of a function."""
    original, counter = getattr(owner, name), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(counter) == call:
            send_sigint()
        return original(*args)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("point", [1, 2])
@pytest.mark.parametrize("name", ["rundir.stage_run_dir", "settle_point", "write_record"])
def test_ctrl_c_during_the_start_of_a_point_reaches_it(
    name: str, point: int, signalled: Signalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, function = name.rpartition(".")
    first = 1 if function == "write_record" else 0  # the runner of the sweep is recorded before
    interrupt_at(monkeypatch, getattr(sweep_run, owner) if owner else sweep_run, function, first + point)
    assert signalled.run() == [-signal.SIGINT] * point
    assert (signalled.local.received_signal, signalled.runs()) == (signal.SIGINT, [1] * point + [0] * (3 - point))


@pytest.mark.parametrize("point", [1, 2])
def test_no_point_is_started_after_a_signal(point: int, signalled: Signalled, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, signal, "pthread_sigmask", 2 * point - 1)
    assert signalled.run() == [-signal.SIGINT] * (point - 1)
    assert (signalled.local.received_signal, signalled.runs()) == (signal.SIGINT, [1] * (point - 1) + [0] * (4 - point))


def test_ctrl_c_after_the_end_of_all_points_is_no_error(signalled: Signalled, monkeypatch: pytest.MonkeyPatch) -> None:
    """All points ended before the signal is passed on to them."""
    signalled.command, waitid = ["true"], os.waitid

    def waitid_after_end(*args: int) -> object:
        for process in signalled.started:
            waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        send_sigint()
        return waitid(*args)

    monkeypatch.setattr(os, "waitid", waitid_after_end)
    assert signalled.run() == [0, 0]
    assert signalled.runs() == [1, 1, 0]


def test_an_ended_child_that_is_no_point_does_not_end_each_wait(signalled: Signalled) -> None:
    other = subprocess.Popen(["true"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    signalled.command = ["true"]
    assert signalled.run() == [0, 0, 0]
    with pytest.raises(ChildProcessError):
        os.waitpid(other.pid, os.WNOHANG)


def test_a_point_that_cannot_be_started_does_not_cost_the_running_ones(
    signalled: Signalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the second point is due, and has room again when the first one has ended."""
    signalled.command, stage, lines = ["sleep", "0.3"], rundir.stage_run_dir, list[str]()

    def stage_run_dir(*args: Any) -> Path:
        if len(signalled.started) == 1 and signalled.started[0].poll() is None:
            raise LauncherError("No space left on device")
        return stage(*args)

    monkeypatch.setattr(rundir, "stage_run_dir", stage_run_dir)
    monkeypatch.setattr(signalled.local, "_report", lines.append)
    assert signalled.run() == [0, 0, 0]
    assert signalled.runs() == [1, 1, 1]
    failed = [line for line in lines if "cannot be started" in line]
    assert failed == ["j_x2 cannot be started; it is tried again when another point ends: No space left on device"]


def test_lines_that_cannot_be_written_cost_no_point(signalled: Signalled, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `-d` they are written to the disk that is full."""
    signalled.command, stage, lines = ["sleep", "0.3"], rundir.stage_run_dir, list[str]()

    def stage_run_dir(*args: Any) -> Path:
        if len(signalled.started) == 1 and signalled.started[0].poll() is None:
            raise LauncherError("No space left on device")
        return stage(*args)

    def report(line: str) -> None:
        lines.append(line)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "stage_run_dir", stage_run_dir)
    local = signalled.local
    signalled.local = LocalSweep(local._planned, local._sweep_dir, local.record, report)
    assert signalled.run() == [0, 0, 0]
    assert signalled.runs() == [1, 1, 1]
    assert [line.split(",")[0].partition(" as ")[0] for line in lines if "start" in line] == [
        "j_x1 started",
        "j_x2 cannot be started; it is tried again when another point ends: No space left on device",
        "j_x3 started",
        "j_x2 started",
    ]


def test_a_point_that_can_never_start_keeps_no_other_one_waiting(
    signalled: Signalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled.command, lines = ["sleep", "0.3"], list[str]()

    def settle_others(planned_point: Any, *args: Any) -> Any:
        if planned_point.point.index == 1:
            raise LauncherError("its plan is wrong")
        return settle_point(planned_point, *args)

    monkeypatch.setattr(sweep_run, "settle_point", settle_others)
    monkeypatch.setattr(signalled.local, "_report", lines.append)
    assert signalled.run() == [0, 0]
    assert signalled.runs() == [1, 0, 1]
    assert lines[-1] == "j_x2 cannot be started; resume the sweep: its plan is wrong"


@pytest.mark.parametrize("name", ["settle_point", "write_record", "LocalJob"])
def test_a_point_that_could_not_be_started_is_missing(
    name: str, signalled: Signalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled.command, original, lines = ["true"], getattr(sweep_run, name), list[str]()

    def fails_for_the_first(*args: Any) -> Any:
        if not signalled.started and (name != "write_record" or any(point.runs for point in args[1].points)):
            signalled.started.append(subprocess.Popen("true"))
            raise OSError(28, "No space left on device")
        return original(*args)

    monkeypatch.setattr(sweep_run, name, fails_for_the_first)
    monkeypatch.setattr(signalled.local, "_report", lines.append)
    signalled.local.run([0, 1])
    assert signalled.runs() == [0, 1, 0]
    assert lines[0] == "j_x1 cannot be started; resume the sweep: [Errno 28] No space left on device"
    home = signalled.local._sweep_dir
    assert len([path for path in home.iterdir() if path.is_dir()]) == 1, "nothing of the first is left"
    states = read_point_states(home, read_record(home))
    assert [state.state for state in states][::2] == ["MISSING", "MISSING"]
    assert points_to_resume(states)[0] == 0


def test_a_sweep_that_is_being_resumed_has_not_ended(signalled: Signalled) -> None:
    home, seen = signalled.local._sweep_dir, list[list[str]]()

    def report_all() -> None:
        for run_dir in home.glob("local-*"):
            run_files.write_json(run_dir / run_files.REPORT_FILE, {**ENDED, "state": "FAILED"})

    def look(line: str) -> None:
        if line.endswith("3 of 3 ended"):
            report_all()
        seen.append([state.state for state in read_point_states(home, read_record(home))])
        with pytest.raises(LauncherError, match="its points still run; wait for them, or stop them first"):
            resume_points(home, as_json=False)

    signalled.command = ["true"]
    signalled.run()
    report_all()
    signalled.local = LocalSweep(signalled.local._planned, home, signalled.local.record, look)
    signalled.run()
    assert (seen[0], seen[-1]) == (["PENDING"] * 3, ["FAILED"] * 3)
    resumed, first = (entry for entry in read_own_entries(os.environ) if entry.run_dir == str(home))
    assert (first.job_id, resumed.submitted > first.submitted) == (signalled.local.record.submission["job_id"], True)


def test_a_sweep_that_cannot_start_in_the_background_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, record = begin_sweep(planned(2, 0, tmp_path), b"")
    fork = os.fork

    def fork_and_fail() -> int:
        if child := fork():
            return child
        (home / "log.out").write_text("3 of 3 points\ngpujob: no space left on device\n")
        os._exit(2)

    monkeypatch.setattr(os, "fork", fork_and_fail)
    with pytest.raises(SystemExit) as ended:
        _continue_in_background(home, str(record.submission["job_id"]), as_json=False)
    assert ended.value.code == 9
    shown = capsys.readouterr().err
    assert shown == "gpujob: the sweep could not start (status 2): gpujob: no space left on device\n"


def test_a_second_ctrl_c_reaches_the_points(signalled: Signalled) -> None:
    signalled.command = ["sh", "-c", STUBBORN]

    def interrupt() -> None:
        for seen in ("ready", "asked"):
            poll((signalled.folder / seen).exists, f"a point that is {seen}")
            send_sigint()

    sender = threading.Thread(target=interrupt, daemon=True)
    sender.start()
    assert signalled.run([0]) == [-signal.SIGINT]
    sender.join()
