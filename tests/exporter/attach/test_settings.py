"""Attached jobs: settings, run directory, search for workers, and end."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exporter import cli
from exporter.attach import outcome, settings
from exporter.attach.finder import RESTART_S, SETTLE_S, WorkerFinder
from exporter.attach.outcome import AttachedOutcome
from exporter.attach.settings import AttachSettings, gpus_of_workers, merge_settings, setting_notices
from exporter.attach.workers_reader import WorkerCandidate, WorkerSearchResult
from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.contract.manifest import read_manifest
from exporter.contract.status import NodeStatus
from launcher.report.report import build_report
from launcher.report.state import EXIT_STATUS
from launcher.watch.view import JobClient
from tests.exporter.attach.test_monitor_config import EXAMPLE
from tests.exporter.sidecar.test_sidecar_process import EXPORTER, environment, refused, run
from tests.support.builders import as_json, rendered
from tests.support.exporter import FakeClock, make_context, make_manifest, make_task, until, write_manifest
from tests.support.launcher import read_json

Start = Callable[..., "subprocess.Popen[str]"]

# -- settings --------------------------------------------------------------------------------------------


def status_of_node(status: dict[str, Any]) -> NodeStatus:
    workers = [
        {"rank": rank, **{key: value for key, value in worker.items() if value is not None}}
        for rank, worker in enumerate(status["workers"])
    ]
    return NodeStatus.from_json({**status, "workers": workers})


def find_outcome(status: dict[str, Any], critical: Collection[str], missing: str | None) -> AttachedOutcome:
    return outcome.find_outcome(status_of_node(status), critical, missing)


def end_summary(status: dict[str, Any], result: AttachedOutcome, run_dir: str) -> str:
    return outcome.end_summary(status_of_node(status), result, run_dir)


def build_attached_report(
    status: dict[str, Any],
    result: AttachedOutcome,
    run_dir: str,
    end: float,
    diagnoses: Mapping[str, outcome.DiagnosisRef],
) -> dict[str, Any]:
    return as_json(outcome.build_attached_report(status_of_node(status), result, run_dir, end, diagnoses))


@pytest.mark.parametrize(
    ("gpu_ids", "workers", "gpus"),
    [
        ((0, 1, 2, 3), 4, ((0,), (1,), (2,), (3,))),
        ((4, 5, 6, 7), 2, ((4, 5), (6, 7))),
        ((0, 1, 2), 2, ((0,), (1, 2))),
        ((0, 1), 4, ((0,), (0,), (1,), (1,))),
        ((), 2, ((), ())),
    ],
)
def test_gpus_are_spread_over_the_workers(
    gpu_ids: tuple[int, ...], workers: int, gpus: tuple[tuple[int, ...], ...]
) -> None:
    assert gpus_of_workers(gpu_ids, workers) == gpus


FLAGS: dict[str, Any] = {
    "job_name": "embed",
    "num_workers": 2,
    "gpu_ids": [0, 1],
    "output_dir": "/o",
    "log_dir": "/l",
}


def test_settings_have_the_defaults_of_the_flags() -> None:
    settings = merge_settings(FLAGS, {})
    assert settings == AttachSettings("embed", 2, "/o", "/l", (0, 1))
    assert merge_settings({**FLAGS, "gpu_ids": None}, {}).gpu_ids == ()
    assert (settings.check_interval, settings.launch_timeout, settings.stall_timeout) == (10, 60, 300)
    patterns = (settings.output_pattern, settings.log_pattern, settings.checkpoint_pattern)
    assert patterns == ("output_worker_*.json", "worker_*.log", "checkpoint_*.pt")


def test_paths_are_relative_to_the_working_directory_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    settings = merge_settings({**FLAGS, "output_dir": "out", "log_dir": "~/logs"}, {})
    assert (settings.output_dir, settings.log_dir) == (f"{tmp_path}/out", "/home/ada/logs")


def test_missing_settings_are_named_by_their_flags() -> None:
    with pytest.raises(ExporterError, match=r"^missing --num-workers, --log-dir; .*--config FILE.*--run-dir DIR"):
        merge_settings({**FLAGS, "num_workers": None, "log_dir": None}, {})


def test_alert_notices_do_not_show_the_webhook(tmp_path: Path) -> None:
    settings = merge_settings(
        {**FLAGS, "output_dir": str(tmp_path), "alert_email": "a@b.c", "alert_slack": "https://hooks/secret"}, {}
    )
    mail, slack, directory = setting_notices(settings)
    assert "a@b.c" in mail
    assert "alertmanager/alertmanager.yml" in mail
    assert "alertmanager/alertmanager.yml" in slack
    assert "secret" not in slack
    assert directory == "log_dir: /l does not exist yet"


def test_disabled_alerts_give_no_notice(tmp_path: Path) -> None:
    config = {"alert_email": "a@b.c", "email_enabled": False, "alert_slack": "given", "slack_enabled": False}
    flags = {**FLAGS, "output_dir": str(tmp_path), "log_dir": str(tmp_path)}
    assert setting_notices(merge_settings(flags, config)) == []
    assert len(setting_notices(merge_settings(flags, {**config, "terminal": True}))) == 1


# -- the run directory -----------------------------------------------------------------------------------


def attached(tmp_path: Path, environ: dict[str, str] | None = None, **more: Any) -> settings.AttachedJob:
    flags = {**FLAGS, "job_name": f"none{os.getpid()}", "log_dir": str(tmp_path), **more}
    return settings.attach_to_job(merge_settings(flags, {}), environ or {}, ":9410")


def test_the_run_directory_is_named_as_the_launcher_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = attached(tmp_path, {"SLURM_JOB_ID": "77"}, job_name="a b/c").manifest.run_dir
    assert run_dir.parent == tmp_path / "logs"
    assert run_dir.name.startswith("77_a_b_c_20")
    assert attached(tmp_path).identity.job_id == f"pid-{os.getpid()}"


def test_the_manifest_describes_the_job(tmp_path: Path) -> None:
    job = attached(tmp_path, state_dir=str(tmp_path / "state"), gpu_ids=[4, 5], total_items=10)
    manifest = read_manifest(tmp_path / "state")
    assert manifest == job.manifest
    assert manifest.attached
    assert [(t.worker, t.role, t.rank, t.gpus, t.logs) for t in manifest.tasks] == [
        ("worker_w0", "worker", 0, (4,), ()),
        ("worker_w1", "worker", 1, (5,), ()),
    ]
    assert [(g.name, g.directory, g.pattern) for g in manifest.groups] == [
        ("output", "/o", "output_worker_*.json"),
        ("checkpoint", "/o", "checkpoint_*.pt"),
    ]
    assert manifest.logs is not None
    assert (manifest.logs.directory, manifest.logs.pattern) == (str(tmp_path), "worker_*.log")
    assert (manifest.total_items, manifest.cluster, manifest.partition) == (10, "local", "local")
    assert job.identity.job_id == "state"
    assert job.identity.start == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(("argv", "expected"), [((), None), (("--gpu-metrics",), True), (("--no-gpu-metrics",), False)])
def test_gpu_metrics_have_a_flag(argv: tuple[str, ...], expected: bool | None) -> None:
    assert cli._parser().parse_args(["sidecar", *argv]).gpu_metrics is expected
    assert "gpu_metrics" in settings.FLAGS


def test_the_gpu_metrics_flag_is_written_to_the_manifest(tmp_path: Path) -> None:
    assert attached(tmp_path, state_dir=str(tmp_path / "a")).manifest.gpu_metrics is False
    assert attached(tmp_path, state_dir=str(tmp_path / "b"), gpu_metrics=True).manifest.gpu_metrics is True


def test_the_sidecar_of_an_attached_job_is_not_supervised(tmp_path: Path) -> None:
    environ = {"GPUJOB_SUPERVISED": "1", "GPUJOB_FIRST_GPU": "4"}  # from a job that runs this command
    identity = attached(tmp_path, environ, state_dir=str(tmp_path / "a")).identity
    assert (identity.supervised, identity.first_gpu) == (False, None)


def test_slurm_variables_describe_the_job_of_this_command(tmp_path: Path) -> None:
    environ = {
        "SLURM_JOB_ID": "77",
        "SLURM_CLUSTER_NAME": "hal",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_END_TIME": "1900000000",
        "SLURMD_NODENAME": "gn01",
    }
    identity = attached(tmp_path, environ, state_dir=str(tmp_path / "a")).identity
    assert (identity.job_id, identity.cluster, identity.partition) == ("77", "hal", "gpu")
    assert (identity.node, identity.end) == ("gn01", 1900000000.0)
    other = attached(tmp_path, environ, state_dir=str(tmp_path / "b"), slurm_job_id="78").identity
    assert (other.job_id, other.cluster, other.partition, other.end) == ("78", "slurm", "", None)


def test_a_restarted_sidecar_keeps_its_attempt_until_the_job_has_finished(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = attached(tmp_path, state_dir=str(state)).identity
    again = attached(tmp_path, state_dir=str(state)).identity
    assert (again.attempt, again.start, again.job_id) == (0, first.start, first.job_id)
    run_files.write_job_state(str(state), "finished")
    run_files.write_json(state / run_files.REPORT_FILE, {})
    assert attached(tmp_path, state_dir=str(state)).identity.attempt == 1
    assert not (state / run_files.REPORT_FILE).exists()


def test_directories_of_other_jobs_are_refused(tmp_path: Path) -> None:
    launched = tmp_path / "launched"
    launched.mkdir()
    write_manifest(make_manifest(launched))
    with pytest.raises(ExporterError, match="has launched; watch it with --run-dir"):
        attached(tmp_path, state_dir=str(launched))
    attached(tmp_path, state_dir=str(tmp_path / "state"), job_name="one")
    with pytest.raises(ExporterError, match="belongs to the job 'one'"):
        attached(tmp_path, state_dir=str(tmp_path / "state"), job_name="two")


def test_a_directory_has_one_sidecar(tmp_path: Path, start: Start) -> None:
    attached(tmp_path, state_dir=str(tmp_path / "state"))
    path = tmp_path / "state" / run_files.ORCHESTRATOR_FILE
    record = run_files.read_json(path) or {}
    other = start("sleep", "600")
    text = Path(f"/proc/{other.pid}/stat").read_text("ascii")
    ticks = int(text.rpartition(")")[2].split()[19])
    run_files.write_json(path, {**record, "pid": other.pid, "start_ticks": ticks + 1})
    attached(tmp_path, state_dir=str(tmp_path / "state"))
    run_files.write_json(path, {**record, "pid": other.pid, "start_ticks": ticks})
    with pytest.raises(ExporterError, match=f"is in use: process {other.pid} already watches this job"):
        attached(tmp_path, state_dir=str(tmp_path / "state"))


def test_the_run_directory_is_temporary_if_logs_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file", encoding="ascii")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    run_dir = attached(tmp_path).manifest.run_dir
    assert run_dir.parent == tmp_path / "tmp"
    assert f"the run directory is {run_dir}" in caplog.text


# -- finding and phases ----------------------------------------------------------------------------------


LAUNCH: dict[str, Any] = {"verified": False, "final": True, "checks": []}


class StatusJson(dict[str, Any]):
    """A status as JSON."""

    def to_json(self) -> dict[str, Any]:
        return self


class Job:
    """A worker finder with workers that the test starts and ends."""

    def __init__(self, run_dir: Path, workers: int = 2, **changes: Any) -> None:
        manifest = make_manifest(run_dir, *map(make_task, range(workers)), attached=True, **changes)
        self.clock = FakeClock()
        self.context = make_context(manifest, self.clock)
        self.final = False
        self.worker_reads = 0
        self.slots: list[Any] = [
            SimpleNamespace(collector=SimpleNamespace(name="workers"), request=self.request_worker_read)
        ]
        self.candidates: list[WorkerCandidate] = []
        self.worker_events: list[dict[str, Any]] = []
        self.gone: dict[int, str] = {}
        self.problems: tuple[str, ...] = ()
        self.ends: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(workers)}
        self.known: set[int] = set()
        self.by_name = True
        self.searches = 0
        for folder in (run_files.WORKERS_DIR,):
            (run_dir / folder).mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.finder = self.make_finder()

    def make_finder(self) -> WorkerFinder:
        search: Any = SimpleNamespace(find=self.find)
        sidecar: Any = self
        return WorkerFinder(sidecar, search)

    def request_worker_read(self) -> None:
        self.worker_reads += 1

    def find(self, known: set[int], *, by_name: bool) -> WorkerSearchResult:
        self.searches += 1
        self.known, self.by_name = set(known), by_name
        visible = [candidate for candidate in self.candidates if by_name or candidate.found_by != "name"]
        found = tuple(candidate for candidate in visible if candidate.pid not in known)
        return WorkerSearchResult(found, self.gone, self.problems)

    def status(self) -> "StatusJson":
        workers = [
            {
                "role": "worker",
                "node": "n",
                **dict.fromkeys(("start", "cpu_s", "items", "items_expected", "items_processed")),
                "worker": f"worker_w{rank}",
                "rank": rank,
                "gpus": [],
                "pid": None,
                "up": not ends,
                "state": "dead" if ends else "running",
                "restarts": 0,
                "exits": ends,
                "exit": ends[-1] if ends else None,
            }
            for rank, ends in self.ends.items()
        ]
        job = {"job_id": "1", "job_name": "embed", "start": 1.0, "total_items": None}
        facts = {"node": {"name": "n"}, "attempt": 0, "launch": dict(LAUNCH)}
        return StatusJson({"workers": workers, "job": job, "events": self.worker_events, **facts})

    def start_worker(
        self, pid: int, number: int | None, found_by: str = "name", *, age: float = 0.0, directory: str | None = "/a"
    ) -> None:
        self.candidates.append(
            WorkerCandidate(pid, pid, self.clock.now - age, found_by, number, directory, None, f"python {pid}.py")
        )

    def end_worker(self, rank: int, code: int = 0) -> None:
        self.candidates = [s for s in self.candidates if s.pid != self.record(rank)["pid"]]
        end = {"restart": len(self.ends[rank]), "time": self.clock.now, "code": code, "signal": None}
        self.ends[rank].append({**end, "reason": "app_error" if code else "completed", "evidence": []})

    def step(self, seconds: float = 1.0) -> str:
        """Advance the clock, read once, and return the published phase."""
        self.clock.advance(seconds)
        self.events = self.finder.read()
        state = run_files.read_json(self.run_dir / run_files.STATE_FILE) or {}
        return f"{state['phase']}{', ended' if state['workers_ended'] else ''}"

    def record(self, rank: int, restart: int | None = None) -> dict[str, Any]:
        restart = len(self.ends[rank]) if restart is None else restart
        name = run_files.record_name(f"worker_w{rank}", rank, 0, restart)
        return run_files.read_json(self.run_dir / run_files.WORKERS_DIR / f"{name}.start.json") or {}


def test_a_job_goes_from_launching_to_finished(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.step() == "launching"
    job.start_worker(101, 1, "pid_file")
    assert job.step() == "launching"
    assert job.record(1) == {
        "schema": 1,
        "worker": "worker_w1",
        "rank": 1,
        "attempt": 0,
        "restart": 0,
        "host": os.uname().nodename,
        "node": "node01",
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
        "pid": 101,
        "start_ticks": 101,
        "start": job.candidates[0].start,
        "found_by": "pid_file",
        "directory": "/a",
        "session": None,
    }
    job.start_worker(100, 0, "slurm_step")
    assert job.step() == "running"
    assert job.known == {101}
    assert job.worker_reads == 2, "new workers are read immediately"
    job.end_worker(0)
    assert job.step() == "running"
    job.end_worker(1)
    assert job.step() == "completing"
    assert job.step(RESTART_S) == "completing, ended"
    assert job.step() == "completing, ended"
    assert job.finder.outcome is None
    job.final = True
    assert job.step() == "finished, ended"
    assert job.finder.outcome == AttachedOutcome("COMPLETED", ())
    report = run_files.read_json(tmp_path / run_files.REPORT_FILE) or {}
    assert (report["state"], report["exit_status"], report["cause"]) == ("COMPLETED", 0, None)


def test_each_event_is_written_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    ended = {"time": 5.0, "level": "critical", "event": "worker ended", "worker": "worker_w1", "rank": 1, "detail": "x"}
    job.worker_events = [ended]
    job.finder.read()
    job.finder.read()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("phase"), line.get("happened")) for line in lines] == [
        ("worker ended", None, 5.0),
        ("phase", "running", None),
    ]


def test_a_restarted_worker_begins_its_next_run(tmp_path: Path) -> None:
    job = Job(tmp_path, check_interval_s=10)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    assert job.step() == "running"
    searches = job.searches
    job.end_worker(0, 1)
    job.step(5)
    assert job.searches == searches, "searched again before the check interval"
    job.start_worker(200, 0)
    job.step(6)
    assert (job.record(0, 1)["pid"], job.record(0, 1)["restart"]) == (200, 1)
    job.end_worker(0)
    job.end_worker(1)
    assert job.step() == "completing"
    job.start_worker(300, 1)
    assert job.step() == "running"
    assert job.record(1, 1)["pid"] == 300


@pytest.mark.parametrize(
    ("first_found_by", "then_found_by", "directory", "is_next_run"),
    [
        ("pid_file", "pid_file", "/b", True),
        ("pid_file", "slurm_step", "/a", False),
        ("pid_file", "name", "/a", False),
        ("slurm_step", "slurm_step", "/b", True),
        ("slurm_step", "pid_file", "/a", False),
        ("slurm_step", "name", "/a", False),
        ("name", "name", "/a", True),
        ("name", "name", "/b", False),
        ("name", "name", None, False),
        ("name", "pid_file", "/b", True),
        ("name", "slurm_step", "/b", True),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_restart_is_recognized_by_how_the_worker_was_found(
    tmp_path: Path, first_found_by: str, then_found_by: str, directory: str | None, is_next_run: bool, restarted: bool
) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0, "slurm_step")
    job.start_worker(101, 1, first_found_by)
    assert job.step() == "running"
    job.end_worker(1, 1)
    if restarted:
        job.finder = job.make_finder()
    job.step(20)
    job.start_worker(201, 1, then_found_by, directory=directory)
    job.step(20)
    assert job.record(1, 1).get("pid") == (201 if is_next_run else None)
    assert job.by_name == (first_found_by != "pid_file")


def test_worker_ends_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gpujob.finder")
    job = Job(tmp_path)
    common = {"time": 5.0, "level": "info", "rank": 1, "worker": "worker_w1"}
    detail = "killed_unknown: killed by SIGKILL; nobody knows by whom"
    job.worker_events = [
        {**common, "event": "worker ended", "detail": detail},
        {**common, "event": "worker daemonised", "detail": "pid 7 has ended, pid 8 goes on"},
        {**common, "event": "worker started", "detail": "pid 7"},
    ]
    job.step()
    job.step()
    assert [record.getMessage() for record in caplog.records] == [
        f"worker_w1 ended: {detail}",
        "worker_w1 daemonised: pid 7 has ended, pid 8 goes on",
    ]


def test_processes_left_behind_by_a_worker_are_not_its_next_run(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=1)
    job.start_worker(100, 0)
    job.step()
    job.step(60)
    job.end_worker(0)
    job.start_worker(105, 0, age=30)
    job.start_worker(106, None, age=30)
    assert job.step() == "completing"
    assert job.record(0, 1) == {}
    job.start_worker(107, 0, "pid_file", age=30)
    assert job.step() == "running"
    assert job.record(0, 1)["pid"] == 107


def test_unnumbered_processes_get_the_free_ranks_after_the_settling_time(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=3)
    job.start_worker(101, 1)
    job.start_worker(99, None)
    job.start_worker(98, None)
    job.step(SETTLE_S / 2)
    assert (job.record(0), job.record(2)) == ({}, {})
    assert job.step(SETTLE_S) == "running"
    assert (job.record(0)["pid"], job.record(2)["pid"]) == (99, 98)


def test_surplus_processes_are_reported_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for pid, number in ((100, 0), (101, 1), (102, 1), (103, 7)):
        job.start_worker(pid, number)
    job.step()
    assert [event.detail for event in job.events] == [
        "2 more than the 2 workers expected: pid 102 (python 102.py), 103 (python 103.py)"
    ]
    job.end_worker(0)
    job.step(20)
    assert len(job.events) == 1


def test_an_ended_worker_that_is_still_visible_is_not_surplus(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.step()
    candidates = list(job.candidates)
    job.step(60)
    job.end_worker(0)
    job.candidates = candidates
    assert job.step(60) == "running"
    assert job.events == ()


SUGGESTION = (
    "; write their pids to worker_pids.txt in the log directory, or to --pid-file, "
    "or put the job's name into their command lines"
)


def test_missing_workers_are_named_with_their_details(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=4, launch_timeout_s=60.0)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.gone = {3: "pid 1234 from worker_pids.txt is gone"}
    job.problems = ("worker_pids.txt: 'x' is not a process id",)
    assert job.step() == "launching"
    assert job.step(60) == "running"
    message = (
        "found 2 of 4 workers within 60 s; missing: worker_w2, worker_w3 (pid 1234 from worker_pids.txt is gone)"
        f"; worker_pids.txt: 'x' is not a process id{SUGGESTION}"
    )
    assert [event.detail for event in job.events] == [job.problems[0], message]
    job.end_worker(0)
    job.end_worker(1)
    assert job.step() == "completing"
    job.final = True
    job.step(RESTART_S)
    job.step()
    assert job.finder.outcome == AttachedOutcome("FAILED", (message,))


def test_a_worker_that_is_found_late_is_not_missing(tmp_path: Path) -> None:
    job = Job(tmp_path, launch_timeout_s=10.0)
    job.start_worker(100, 0)
    job.step()
    assert job.step(10) == "running"
    job.start_worker(101, 1)
    job.step(20)
    job.end_worker(0)
    job.end_worker(1)
    job.final = True
    job.step()
    job.step(RESTART_S)
    assert job.step() == "finished, ended"
    assert job.finder.outcome == AttachedOutcome("COMPLETED", ())


def test_a_job_without_workers_fails_after_the_launch_timeout(tmp_path: Path) -> None:
    job = Job(tmp_path, launch_timeout_s=10.0)
    assert job.step() == "launching"
    assert job.step(10) == "completing, ended"
    job.final = True
    assert job.step() == "finished, ended"
    message = f"found 0 of 2 workers within 10 s; missing: worker_w0, worker_w1{SUGGESTION}"
    assert job.finder.outcome == AttachedOutcome("FAILED", (message,))
    text = rendered(read_json(tmp_path / run_files.REPORT_FILE))
    assert f"- workers: FAILED: {message}\n" in text


def test_process_names_are_not_suggested_if_there_is_a_pid_file(tmp_path: Path) -> None:
    job = Job(tmp_path, launch_timeout_s=10.0)
    job.start_worker(100, 0, "pid_file")
    job.step()
    job.step(10)
    assert job.events[-1].detail.endswith(
        "; write their pids to worker_pids.txt in the log directory, or to --pid-file"
    )


def test_a_failed_attached_job_has_the_report_of_a_launched_job(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.step()
    (tmp_path / run_files.DIAGNOSTICS_DIR).mkdir()
    path = tmp_path / run_files.DIAGNOSTICS_DIR / "worker_w1.json"
    run_files.write_json(path, {"rank": 1, "restart": 0, "attempt": 0})
    path.with_suffix(".txt").write_text("why", encoding="ascii")
    job.end_worker(0)
    job.end_worker(1, 3)
    job.final = True
    job.step()
    job.step(RESTART_S)
    job.step()
    report = as_json(JobClient(write_manifest(job.context.manifest)).report())
    assert report["cause"] == {
        "worker": "worker_w1",
        "rank": 1,
        "node": "n",
        "run": None,
        "missing": [],
        "missing_total": 0,
        "reason": "app_error",
        "code": 3,
        "signal": None,
        "time": job.ends[1][0]["time"],
        "restart": 0,
        "evidence": [],
        "diagnosis": "diagnostics/worker_w1.txt",
    }
    assert report["launch"] == LAUNCH
    assert report["diagnoses"] == ["diagnostics/worker_w1.txt"]
    launched = as_json(build_report(tmp_path, now=2.0, ended=True))
    assert set(launched) - set(report) == set()
    assert {key for key in launched["workers"][0] if key not in report["workers"][0]} == set()
    text = rendered(report)
    assert "FAILED" in text
    assert f"- diagnosis: {tmp_path}/diagnostics/worker_w1.txt\n" in text
    run_files.write_json(path, {"rank": 1, "restart": 0, "attempt": 1})
    result = AttachedOutcome("FAILED", ())
    older = {"worker_w1": outcome.DiagnosisRef("diagnostics/worker_w1.txt", run_files.read_json(path) or {})}
    again = build_attached_report(job.status(), result, str(tmp_path), 5.0, older)
    assert again["cause"]["diagnosis"] is None
    assert "diagnosis:" not in rendered(again)
    early = build_attached_report(
        {**job.status(), "launch": {**LAUNCH, "final": False}}, result, str(tmp_path), 5.0, {}
    )
    assert early["launch"] is None


def test_the_report_counts_the_items_of_an_incomplete_job(tmp_path: Path) -> None:
    job_status = Job(tmp_path).status()
    job_status["workers"] = [{**worker, "exit": ended(), "items": 95} for worker in job_status["workers"]]
    job_status["job"]["total_items"] = 240
    result = find_outcome(job_status, (), None)
    assert result == AttachedOutcome("INCOMPLETE", ("190 of 240 items were done; 99 % are enough",))
    report = build_attached_report(job_status, result, str(tmp_path), 5.0, {})
    assert report["exit_status"] == EXIT_STATUS["INCOMPLETE"] == 8
    assert "- items: FAILED: 190 of 240 items were done; 99 % are enough\n" in rendered(report)


def test_a_status_from_before_the_first_worker_read_is_accepted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    before = StatusJson({**job.status(), "workers": [{"items": None}]})
    job.status = lambda: before  # type: ignore[method-assign]
    assert job.step() == "launching"
    job.finder.write_unfinished_report()
    report: Any = run_files.read_json(tmp_path / run_files.REPORT_FILE)
    assert report["workers"] == []
    assert report["stopped"]["cause"].endswith(", while 0 workers were running")


@pytest.mark.parametrize(("running", "text_of_count"), [(1, "1 worker was"), (2, "2 workers were")])
def test_a_sidecar_that_ends_early_leaves_an_unfinished_report(
    tmp_path: Path, running: int, text_of_count: str
) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.step()
    if running == 1:
        job.end_worker(1, 3)
    job.finder.write_unfinished_report()
    report = run_files.read_json(tmp_path / run_files.REPORT_FILE) or {}
    assert (report["state"], report["exit_status"], report["cause"]) == ("UNKNOWN", 9, None)
    clock = time.strftime("%H:%M:%S", time.localtime(job.clock.now))
    why = f"the sidecar was stopped at {clock}, while {text_of_count} running"
    assert report["stopped"] == {"reason": "unknown", "cause": why, "time": job.clock.now}
    text = rendered(report)
    assert f"- stopped: {why}\n" in text
    assert "| worker_w0 | 0 | n | running |" in text
    assert job.step() == "running", "the job continues"


def test_workers_that_ended_before_the_first_read_are_not_awaited(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0, "pid_file")
    job.gone = {1: "pid 101 from worker_pids.txt is gone"}
    assert job.step() == "launching"
    job.end_worker(0)
    assert job.step() == "launching"
    assert job.step(RESTART_S) == "completing, ended"


def test_a_restarted_finder_keeps_its_records(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start_worker(100, 0)
    job.start_worker(101, 1)
    job.step()
    job.finder = job.make_finder()
    assert job.step() == "running"
    assert job.record(0, 1) == job.record(1, 1) == {}


# -- the end ---------------------------------------------------------------------------------------------


def ended(reason: str = "completed", code: int | None = 0, number: str | None = None) -> dict[str, Any]:
    return {"reason": reason, "code": code, "signal": number, "time": 5.0, "evidence": []}


UNKNOWN = ended("killed_unknown", None)


def status(
    *workers: tuple[dict[str, Any] | None, int | None], total: int | None = 100, **errors: int
) -> dict[str, Any]:
    return {
        "workers": [
            {"worker": f"worker_w{n}", "exit": end, "items": items, "items_expected": None, "pid": 7}
            | {"log_errors": errors}
            for n, (end, items) in enumerate(workers)
        ],
        "job": {"total_items": total, "job_id": "7", "job_name": "a\x1bb"},
    }


@pytest.mark.parametrize(
    ("job_status", "missing", "state", "reason"),
    [
        (status((ended(), 50), (ended(), 50)), None, "COMPLETED", ""),
        (status((ended(), None), (ended(), None), total=None), None, "COMPLETED", ""),
        (status((ended(), 50), (ended("app_error", 3), 20)), None, "FAILED", "worker_w1 ended by app_error"),
        (status((ended(), 50), (ended("killed_unknown", None, "SIGKILL"), 50)), None, "FAILED", "killed_unknown"),
        (status((UNKNOWN, 50), (ended("cuda_oom", None), 50)), None, "FAILED", "worker_w1 ended by cuda_oom"),
        (status((ended(), 50), (ended(), 49)), None, "COMPLETED", ""),
        (status((ended(), 50), (ended(), 48)), None, "INCOMPLETE", "98 of 100 items were done; 99 % are enough"),
        (status((ended(), 50), (ended(), None)), None, "INCOMPLETE", "50 of 100 items"),
        (status((ended(), None), (ended(), None)), None, "COMPLETED", ""),
        (status((UNKNOWN, 50), (UNKNOWN, 49)), None, "COMPLETED", "99 of 100 items were done"),
        (status((UNKNOWN, 50), (UNKNOWN, 48)), None, "FAILED", "98 of 100 items were done"),
        (status((UNKNOWN, 50), (ended(), 20)), None, "FAILED", "70 of 100 items were done"),
        (status((UNKNOWN, 50), (UNKNOWN, 50), cuda_oom=2), None, "FAILED", "the log of worker_w0 has cuda_oom"),
        (status((UNKNOWN, 50), (UNKNOWN, 50), connection=2), None, "COMPLETED", "100 of 100"),
        (status((UNKNOWN, None), (UNKNOWN, 50)), None, "UNKNOWN", "it is unknown how"),
        (status((UNKNOWN, 50), (UNKNOWN, 50), total=None), None, "UNKNOWN", "it is unknown how"),
        (status((ended(), 50), (None, None)), "w1 is missing", "FAILED", "w1 is missing"),
        (status((ended(), 50), (None, 20)), "w1 is missing", "FAILED", "70 of 100 items were done"),
        (status((ended(), 50), (None, 50)), "w1 is missing", "COMPLETED", "100 of 100"),
        (status((ended(), 50), (None, 50), total=None), "w1 is missing", "FAILED", "w1 is missing"),
    ],
)
def test_the_job_state_follows_from_the_ends_of_its_workers(
    job_status: dict[str, Any], missing: str | None, state: str, reason: str
) -> None:
    result = find_outcome(job_status, {"cuda_oom"}, missing)
    assert result.state == state
    assert reason in "; ".join(result.reasons)
    assert result.exit_status == EXIT_STATUS[state]


@pytest.mark.parametrize(
    ("counts", "total", "warnings"),
    [
        (((160, 160), (10, 160)), None, ["worker_w1 exited with 0 after 10 of the 160 items that its log shows"]),
        (((160, 160), (160, 160)), None, []),
        (((100, 160), (60, 160)), None, []),  # each log contains the total of the job
        (((160, 160), (10, 160)), 170, []),
        (((160, 160), (10, None)), None, []),
        (((10, 160),), None, ["worker_w0 exited with 0 after 10 of the 160 items that its log shows"]),
    ],
)
def test_a_worker_short_of_its_own_total_gives_a_warning(
    counts: tuple[tuple[int, int | None], ...], total: int | None, warnings: list[str]
) -> None:
    job_status = status(*((ended(), items) for items, _ in counts), total=total)
    for worker, (_, expected) in zip(job_status["workers"], counts, strict=True):
        worker["items_expected"] = expected
    result = find_outcome(job_status, (), None)
    assert result == AttachedOutcome("COMPLETED", tuple(f"warning: {line}" for line in warnings))
    assert all(f"\nwarning: {line}\n" in end_summary(job_status, result, "/r") for line in warnings)


EARLY = "warning: worker_w1 exited with 0 after 40 of the 50 steps that its log shows"


def in_steps(job_status: dict[str, Any], expected: int | None = 50, unit: str = "steps") -> dict[str, Any]:
    """The same status with workers that count steps up to a total from their logs."""
    job_status["workers"] = [{**worker, "unit": unit, "items_expected": expected} for worker in job_status["workers"]]
    return job_status


@pytest.mark.parametrize(
    ("job_status", "state", "reason"),
    [
        (in_steps(status((ended(), 50), (ended(), 50))), "COMPLETED", ""),
        (in_steps(status((ended(), 50), (ended(), None))), "COMPLETED", ""),
        (in_steps(status((ended(), 50), (ended(), 40))), "COMPLETED", EARLY),
        (in_steps(status((ended(), 50), (ended(), 40), total=None)), "COMPLETED", EARLY),
        (in_steps(status((ended(), 30), (ended(), 40)), expected=None), "COMPLETED", ""),
        (in_steps(status((UNKNOWN, 50), (UNKNOWN, 50))), "COMPLETED", "50 of 50 steps were done"),
        (in_steps(status((UNKNOWN, 50), (UNKNOWN, 40))), "FAILED", "40 of 50 steps were done; 99 % are enough"),
        (in_steps(status((UNKNOWN, 50), (UNKNOWN, 50)), expected=None), "UNKNOWN", "it is unknown how"),
        (in_steps(status((UNKNOWN, 50), (UNKNOWN, 50)), unit="tokens"), "UNKNOWN", "it is unknown how"),
        (
            in_steps(status((ended(), 50), (ended(), 40)), unit="tokens"),
            *("COMPLETED", EARLY.replace("steps", "tokens")),
        ),
    ],
)
def test_steps_are_not_compared_with_the_total_items_of_the_job(
    job_status: dict[str, Any], state: str, reason: str
) -> None:
    result = find_outcome(job_status, (), None)
    assert (result.state, "; ".join(result.reasons)[: len(reason)]) == (state, reason)


def test_the_report_counts_steps_if_the_workers_count_steps(tmp_path: Path) -> None:
    job_status = Job(tmp_path).status()
    counted = {"exit": ended(), "unit": "steps", "items_expected": 100, "items_processed": 95}
    job_status["workers"] = [{**worker, **counted, "items": 95 - worker["rank"]} for worker in job_status["workers"]]
    job_status["job"]["total_items"] = 240
    result = find_outcome(job_status, (), None)
    report = build_attached_report(job_status, result, str(tmp_path), 6.0, {})
    assert [report[key] for key in ("unit", "items", "items_expected", "items_processed")] == ["steps", 94, 100, 95]
    text = rendered(report)
    assert "- steps: 94 of 100, 19.0 steps/s over the whole job\n" in text
    assert result.state == "COMPLETED"
    assert ", 95/100 steps\n" in end_summary(job_status, result, "/r")


def test_the_summary_has_a_line_for_each_worker() -> None:
    job_status = status(
        (ended(), 50), (ended("app_error", 3), 20), (ended("killed_unknown", None, "SIGKILL"), 7), (UNKNOWN, None)
    )
    job_status["workers"].append(
        {**job_status["workers"][0], "worker": "worker_w10", "exit": None, "pid": None, "items": None}
    )
    text = end_summary(job_status, AttachedOutcome("FAILED", ("why\x1b",)), "/r")
    assert text.splitlines() == [
        "job 7 a?b: FAILED",
        "  worker_w0   completed, exit status 0, 50 items",
        "  worker_w1   app_error, exit status 3, 20 items",
        "  worker_w2   killed_unknown, SIGKILL, 7 items",
        "  worker_w3   exit status unknown",
        "  worker_w10  not found",
        "why?",
        "run directory: /r",
    ]


# -- the real program ------------------------------------------------------------------------------------

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
        connection.request("GET", path, headers={"Accept-Encoding": "identity"})
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

    def close(self) -> None:
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


def test_a_script_with_flags_reports_a_killed_worker(
    tmp_path: Path, launch: Callable[..., Launched], start: Start
) -> None:
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
    other = "import time; time.sleep(600)"
    argv = [sys.executable, "-c", other, "embedding_generation", "--worker-id", "2"]
    start(*argv)  # it does not belong to the job
    assert (killed["reason"], killed["code"]) == ("killed_unknown", None)
    assert killed["signal"] in ("SIGKILL", None), "not reported by every kernel"
    assert 'reason="killed_unknown"} 1\n' in job.get("/metrics")
    job.finish()
    until(lambda: _has_ended(job), "the end", 40)
    code, text = job.end()
    assert code == 1
    lines = text.splitlines()
    assert lines[0] == "job state embedding_generation: FAILED"
    assert lines[3].startswith("  worker_w2  ")
    assert lines[3].endswith("5/25 items")
    assert lines[4] in (
        "  worker_w3  completed, exit status 0, 25/25 items",
        "  worker_w3  exit status unknown, 25/25 items",
    )
    assert "Alertmanager" in job.error_output()
    assert "worker_w2 ended: killed_unknown: " in job.error_output()
    assert list((job.state / run_files.WORKERS_DIR).glob("*_r1.start.json")) == []
    assert "by killed_unknown" in rendered(as_json(JobClient(job.state).report()))
    assert "Traceback" not in job.error_output()
    assert as_json(JobClient(job.state).read_view())["report"]["exit_status"] == 1


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
    assert text.splitlines()[0] == "job state embedding_generation_v2: COMPLETED"
    assert text.count("25/25 items") == 4
    assert code == 0
    assert "hooks.slack.com" not in job.error_output()
    assert "gpujob watch" in job.error_output()


def test_workers_found_by_name_continue_without_the_sidecar(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    name = f"job{os.getpid()}x{time.monotonic_ns()}"
    options = [*flags(tmp_path), "--job-name", name]
    job = launch(*options, more=f"--name {name}")
    until(all_workers_at(job, 5), "the items of all workers")
    assert [worker["pid"] for worker in job.workers()] == job.pids
    os.kill(job.sidecar_pid(), signal.SIGINT)
    left = until(lambda: "the job itself was not touched" in job.error_output(), "the end of the sidecar")
    assert left
    report = as_json(JobClient(job.state).report())
    assert (report["state"], report["exit_status"], report["cause"]) == ("UNKNOWN", 9, None)
    assert [worker["up"] for worker in report["workers"]] == [True] * 4
    assert report["stopped"]["cause"].endswith(", while 4 workers were running")
    assert "- stopped: the sidecar was stopped at" in rendered(report)
    assert all(Path(f"/proc/{pid}").exists() for pid in job.pids)
    argv = [*EXPORTER, "sidecar", "--state-dir", str(job.state), "--web.listen-address", "127.0.0.1:0", *options]
    second_sidecar = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=job.errors, text=True)
    try:
        until(lambda: job.sidecar_pid() == second_sidecar.pid, "the second sidecar")
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
    assert (
        f"found 0 of 4 workers within 1 s; missing: worker_w0, worker_w1, worker_w2, worker_w3{SUGGESTION}\n"
        in done.stdout
    )


def test_run_dir_and_job_name_exclude_each_other(tmp_path: Path) -> None:
    message = refused(run("sidecar", "--run-dir", str(tmp_path), "--job-name", "x", "--config", "c"))
    assert message == (
        "--run-dir is for a job that gpujob launched, --job-name, --config for any other job; use one or the other"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--num-workers", "0"], "must be 1 or more"),
        (["--gpu-ids", "a"], "'a' is not a whole number"),
        (["--check-interval", "0"], "'0' is not a number of seconds above 0"),
        (["--check-interval", "nan"], "'nan' is not a number of seconds above 0"),
        (["--log-pattern", "a/*.log"], "give the directory with its own flag"),
    ],
)
def test_invalid_option_values_are_refused(tmp_path: Path, option: list[str], message: str) -> None:
    done = run("sidecar", *flags(tmp_path), *option)
    assert done.returncode == 2
    assert message in done.stderr


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
