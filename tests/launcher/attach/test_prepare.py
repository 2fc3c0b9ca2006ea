"""The run directory of an attached job, and the environment of its sidecar."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.contract.file_locks import lock_file
from exporter.contract.identity import Identity, identify
from exporter.contract.manifest import Manifest, read_manifest
from exporter.contract.process_identity import read_start_ticks
from launcher.attach.manifest import FoundJob, gpus_of_workers, make_tasks, shares, with_found
from launcher.attach.prepare import NodePlace, Preparation, find_place, notices
from launcher.errors import LauncherError
from launcher.jobfile.monitor_config import load_monitor_config
from tests.support.exporter import make_manifest, make_task, write_manifest

FLAGS: dict[str, Any] = {
    "job_name": "embed",
    "num_workers": 2,
    "gpu_ids": [0, 1],
    "output_dir": "/o",
    "log_dir": "/l",
}


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


@pytest.mark.parametrize(
    ("seen", "gpus"),
    [
        (((0, 1), (2,), ()), ((0, 1), (2,), ())),
        (((2, 3), (2, 3), (4,)), ((2,), (3,), (4,))),
        (((1,), (1,), (1,)), ((1,), (1,), (1,))),
        (((5,), (6,)), ((5,), (6,), (2,))),
    ],
    ids=["own", "some shared", "one for all", "a worker that was not found"],
)
def test_found_gpus_are_divided_among_the_workers_that_see_the_same(
    seen: tuple[tuple[int, ...], ...], gpus: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    manifest = make_manifest(tmp_path, *map(make_task, range(3)))
    assert tuple(task.gpus for task in with_found(manifest, FoundJob(gpus=seen)).tasks) == gpus


def test_workers_are_spread_over_the_nodes_and_each_node_has_the_gpus() -> None:
    tasks = make_tasks(load_monitor_config(None, {**FLAGS, "num_workers": 3}), 2)
    assert [(task.rank, task.node_index, task.local_rank, task.gpus) for task in tasks] == [
        (0, 0, 0, (0,)),
        (1, 0, 1, (1,)),
        (2, 1, 0, (0, 1)),
    ]
    assert shares(1, 3) == [1, 0, 0]


NOBODY = 65534  # owns nothing that a test needs
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gn[01-02]", "SLURMD_NODENAME": "gn02"}


@pytest.mark.parametrize(
    ("environ", "job", "place"),
    [
        (STEP, "77", NodePlace(("gn01", "gn02"), 1, "77.3.0")),
        ({**STEP, "SLURM_RESTART_COUNT": "2"}, "77", NodePlace(("gn01", "gn02"), 1, "77.3.2")),
        (STEP, "78", NodePlace(("gn02",))),
        ({**STEP, "SLURM_STEP_NODELIST": "gn02"}, "77", NodePlace(("gn02",))),
        ({}, None, NodePlace(("head",))),
    ],
    ids=["step", "requeued", "of another job", "on one node", "no job"],
)
def test_sidecars_of_one_step_belong_together(environ: dict[str, str], job: str | None, place: NodePlace) -> None:
    assert find_place(environ, "head.example.org", job) == place


def test_alert_notices_do_not_show_the_webhook(tmp_path: Path) -> None:
    flags = {**FLAGS, "output_dir": str(tmp_path), "alert_email": "a@b.c", "alert_slack": "https://hooks/secret"}
    mail, slack, directory = notices(load_monitor_config(None, flags))
    assert "a@b.c" in mail
    assert "gpujob alerts config --alert-email" in mail
    assert "gpujob alerts config --alert-slack FILE" in slack
    assert "secret" not in slack
    assert directory == "log_dir: /l does not exist yet"


def test_disabled_alerts_give_no_notice(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("alerts: {email: {enabled: false, address: a@b.c}, slack: {enabled: false, webhook: x}}")
    flags = {**FLAGS, "output_dir": str(tmp_path), "log_dir": str(tmp_path)}
    assert notices(load_monitor_config(str(path), flags)) == []
    path.write_text("alerts: {terminal: {enabled: true}}")
    assert len(notices(load_monitor_config(str(path), flags))) == 1


# -- the run directory -----------------------------------------------------------------------------------


def attach(tmp_path: Path, environ: dict[str, str] | None = None, **more: Any) -> tuple[Manifest, Identity]:
    """Manifest and identity of a prepared sidecar."""
    flags = {**FLAGS, "job_name": f"none{os.getpid()}", "log_dir": str(tmp_path), **more}
    preparation = Preparation(flags, environ or {})
    run_dir, found = preparation.run({"listen_address": ":9410"})
    if preparation.lock >= 0:
        os.close(preparation.lock)  # as at the end of its process
    manifest = read_manifest(run_dir)
    return manifest, identify(manifest, found, "host")


def test_the_run_directory_is_named_as_the_launcher_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = attach(tmp_path, {"SLURM_JOB_ID": "77"}, job_name="a b/c")[0].run_dir
    assert run_dir.parent == tmp_path / "logs"
    assert run_dir.name.startswith("77_a_b_c_20")
    assert attach(tmp_path)[1].job_id == f"pid-{os.getpid()}"


def test_the_manifest_describes_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    manifest, identity = attach(tmp_path, state_dir="state", gpu_ids=[4, 5], total_items=10, output_dir="~/o")
    assert manifest.run_dir == tmp_path / "state"
    assert manifest.attached
    assert [(t.worker, t.role, t.rank, t.gpus, t.logs) for t in manifest.tasks] == [
        ("worker_w0", "worker", 0, (4,), ()),
        ("worker_w1", "worker", 1, (5,), ()),
    ]
    assert [(g.name, g.directory, g.pattern) for g in manifest.groups] == [
        ("output", "/home/ada/o", "output_worker_*.json"),
        ("checkpoint", "/home/ada/o", "checkpoint_*.pt"),
    ]
    assert manifest.logs is not None
    assert (manifest.logs.directory, manifest.logs.pattern) == (str(tmp_path), "worker_*.log")
    assert (manifest.total_items, manifest.cluster, manifest.partition) == (10, "local", "local")
    assert manifest.search is not None
    assert manifest.search.pid_file == str(tmp_path / "worker_pids.txt")
    assert (identity.job_id, identity.node_index) == ("state", 0)
    assert identity.start == pytest.approx(time.time(), abs=60)


def test_the_sidecar_of_an_attached_job_is_not_supervised(tmp_path: Path) -> None:
    environ = {"GPUJOB_SUPERVISED": "1", "GPUJOB_FIRST_GPU": "4"}  # from a job that runs this command
    identity = attach(tmp_path, environ, state_dir=str(tmp_path / "a"))[1]
    assert (identity.supervised, identity.first_gpu) == (False, None)


def test_slurm_variables_describe_the_job_of_this_command(tmp_path: Path) -> None:
    environ = {
        "SLURM_JOB_ID": "77",
        "SLURM_CLUSTER_NAME": "hal",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_END_TIME": "1900000000",
        "SLURMD_NODENAME": "gn01",
    }
    identity = attach(tmp_path, environ, state_dir=str(tmp_path / "a"))[1]
    assert (identity.job_id, identity.cluster, identity.partition) == ("77", "hal", "gpu")
    assert (identity.node, identity.end) == ("gn01", 1900000000.0)
    other = attach(tmp_path, environ, state_dir=str(tmp_path / "b"), slurm_job_id="78")[1]
    assert (other.job_id, other.cluster, other.partition, other.end) == ("78", "slurm", "", None)


def test_the_cluster_file_names_the_cluster_of_attached_jobs(tmp_path: Path) -> None:
    (tmp_path / "gpujob.yaml").write_text("cluster: hal\n")
    environ = {"GPUJOB_CONFIG": str(tmp_path / "gpujob.yaml"), "SLURM_JOB_ID": "77", "SLURM_CLUSTER_NAME": "slurm"}
    assert attach(tmp_path, environ, state_dir=str(tmp_path / "a"))[1].cluster == "hal"


@pytest.mark.parametrize("state_dir", [True, False])
def test_the_nodes_of_a_step_share_the_run_directory_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_dir: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"state_dir": str(tmp_path / "state")} if state_dir else {}
    first, of_first = attach(tmp_path, {**STEP, "SLURMD_NODENAME": "gn01"}, **more)
    second, of_second = attach(tmp_path, STEP, **more)
    assert first == second
    assert (first.nodes, [task.node_index for task in first.tasks]) == (2, [0, 1])
    assert [(found.node, found.node_index, found.job_id) for found in (of_first, of_second)] == [
        ("gn01", 0, "77"),
        ("gn02", 1, "77"),
    ]
    assert of_second.start == of_first.start


def test_a_node_that_sees_no_run_directory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launcher.attach.prepare.FIRST_NODE_S", 0.0)
    with pytest.raises(LauncherError, match=r"gn02 sees no run directory from gn01.*the same --state-dir"):
        attach(tmp_path, STEP)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ({"state_dir": str(tmp_path / "state")}, {}):
        first, _ = attach(tmp_path, {**STEP, "SLURMD_NODENAME": "gn01"}, **more)
        os.chown(first.run_dir, NOBODY, NOBODY)
        monkeypatch.setattr("launcher.attach.prepare.FIRST_NODE_S", 0.1)
        with pytest.raises(LauncherError, match="gn02 sees no run directory from gn01"):
            attach(tmp_path, STEP, **more)
    with pytest.raises(LauncherError, match=r"--state-dir: .*/state belongs to nobody; give a directory of your own"):
        attach(tmp_path, state_dir=str(tmp_path / "state"))


def test_a_state_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(LauncherError, match=r"--state-dir: .* can be written by everyone; run `chmod go-w "):
        attach(tmp_path, state_dir=str(tmp_path / "state"))


def test_a_restarted_sidecar_keeps_its_attempt_until_the_job_has_finished(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = attach(tmp_path, state_dir=str(state))[1]
    again = attach(tmp_path, state_dir=str(state))[1]
    assert (again.attempt, again.start, again.job_id) == (0, first.start, first.job_id)
    run_files.write_job_state(str(state), "finished")
    run_files.write_json(state / run_files.REPORT_FILE, {})
    assert attach(tmp_path, state_dir=str(state))[1].attempt == 1
    assert (run_files.read_json(state / run_files.STATE_FILE) or {})["attempt"] == 1
    assert not (state / run_files.REPORT_FILE).exists()
    assert (state / "report_a0.json").exists()


def test_directories_of_other_jobs_are_refused(tmp_path: Path) -> None:
    launched = tmp_path / "launched"
    launched.mkdir()
    write_manifest(make_manifest(launched))
    with pytest.raises(LauncherError, match="has launched; watch it with --run-dir"):
        attach(tmp_path, state_dir=str(launched))
    attach(tmp_path, state_dir=str(tmp_path / "state"), job_name="one")
    with pytest.raises(LauncherError, match="belongs to the job 'one'"):
        attach(tmp_path, state_dir=str(tmp_path / "state"), job_name="two")


def test_a_directory_has_one_sidecar(tmp_path: Path) -> None:
    attach(tmp_path, state_dir=str(tmp_path / "state"))
    path = tmp_path / "state" / run_files.ORCHESTRATOR_FILE
    record, other = run_files.read_json(path) or {}, os.getppid()
    ticks = read_start_ticks(other) or 0
    run_files.write_json(path, {**record, "pid": other, "start_ticks": ticks + 1})
    attach(tmp_path, state_dir=str(tmp_path / "state"))
    run_files.write_json(path, {**record, "pid": other, "start_ticks": ticks})
    with pytest.raises(LauncherError, match=f"is in use: process {other} already watches this job"):
        attach(tmp_path, state_dir=str(tmp_path / "state"))


def test_a_directory_that_another_host_locks_is_refused(tmp_path: Path) -> None:
    attach(tmp_path, state_dir=str(tmp_path / "state"))
    path = tmp_path / "state" / run_files.LOCK_FILE
    lock = lock_file(path, {"pid": 4711, "host": "gn2", "since": time.mktime((2025, 11, 22, 4, 13, 41, 0, 0, -1))})
    try:
        with pytest.raises(LauncherError) as refused:
            attach(tmp_path, state_dir=str(tmp_path / "state"))
    finally:
        os.close(lock)
    assert str(refused.value) == (
        f"--state-dir: {tmp_path / 'state'} is in use: process 4711 on gn2 since 2025-11-22 04:13:41 already watches "
        "this job; end it, or give another directory"
    )


def test_the_run_directory_is_temporary_if_logs_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file", encoding="ascii")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    run_dir = attach(tmp_path)[0].run_dir
    assert run_dir.parent == tmp_path / "tmp"
    assert f"the run directory is {run_dir}" in capsys.readouterr().err
