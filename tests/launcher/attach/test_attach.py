"""Processes that already run are joined by their pid; everything else is found in /proc."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.machine.procfs import read_children
from launcher.attach.guess import Sought, guess_job
from launcher.errors import LauncherError
from tests.exporter.attach.test_workers_reader import Machine
from tests.exporter.gpus.fake_gpus import gpu, instance, mig_gpu
from tests.support.launcher import GPUJOB, clean_environment, gpujob, poll, read_json

TRAIN = """
import pathlib, sys, time
out = open("out/part.txt", "w")
for i in range(1, 31):
    print(f"Processed {i}/30 items", flush=True)
    while i == 5 and not pathlib.Path("finish").exists():
        time.sleep(0.05)
"""


class Training:
    """A script that waits after its fifth item for a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "out").mkdir(parents=True)
        (folder / "train.py").write_text(TRAIN)
        with (folder / "train.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "train.py", "--output_dir=out"],
                cwd=folder,
                stdout=log,
                stderr=log,
                env=clean_environment(CUDA_VISIBLE_DEVICES="2,3"),
            )
        poll(lambda: "5/30" in (folder / "train.log").read_text(), "the first items")

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def run_dir(self) -> Path:
        """The run directory of its watch, once the sidecar has found it."""
        pattern = "logs/pid-*/workers/*.start.json"
        return poll(lambda: next(self.folder.glob(pattern), None), "a worker that is found").parents[1]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path / "work")
    yield found
    found.process.kill()
    found.process.wait()


@contextlib.contextmanager
def running(*argv: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        list(map(str, argv)),
        cwd=cwd,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_says_its_name_logs_gpus_and_directories(training: Training) -> None:
    guess = guess_job(Sought((training.process.pid,)), os.environ)
    folder = training.folder
    assert guess.lines() == [
        "name: train.py",
        f"workers: 1 (pid {training.process.pid})",
        "GPUs: 2, 3",
        f"logs: {folder}/train.log",
        f"working directory: {folder}",
        f"output: {folder}/out",
    ]


UNITS = [mig_gpu(0), instance(0, 0), instance(0, 1), gpu(1), mig_gpu(2), instance(2, 0), gpu(3)]  # of the driver
MINORS = (0, 3, 2, 1)  # numbers of the device files of GPUs 0 to 3


@pytest.mark.parametrize(
    ("devices", "opened", "gpus"),
    [
        (None, ["nvidia1", "nvidia3", "nvidiactl", "null"], (2, 4)),
        (None, ["nvidia2"], (3,)),
        (None, ["nvidia0"], ()),
        (instance(0, 1).gpu.uuid, ["nvidia0", "nvidia1"], (1,)),
        ("GPU-3,GPU-1", ["nvidia0", "nvidia1", "nvidia3"], (4, 2)),
        ("0", ["nvidia0"], (0,)),
        ("", ["nvidia0"], ()),
    ],
    ids=["files", "file of the only instance", "file of two instances", "instance", "UUIDs", "number", "none"],
)
def test_gpus_are_positions_in_the_list_of_the_driver(
    devices: str | None, opened: list[str], gpus: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "launcher.attach.guess.read_gpu_units", lambda: tuple(unit.gpu for unit in UNITS if not unit.gpu.mig)
    )
    machine = Machine(tmp_path)
    environ: dict[str, Any] = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    machine.add(4000, "python train.py", **environ)
    (tmp_path / "4000/fd").mkdir()
    for number, name in enumerate(opened):
        (tmp_path / f"4000/fd/{number + 3}").symlink_to(f"/dev/{name}")
    for number, minor in enumerate(MINORS):
        folder = tmp_path / f"driver/nvidia/gpus/{gpu(number).gpu.pci_bus_id}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\n", encoding="ascii")
    assert guess_job(Sought((4000,)), {}, machine.proc).gpu_ids == gpus


@pytest.mark.parametrize(
    ("files", "output"),
    [
        (["work/out/a.json", "work/out/b.json", "work/c.txt"], "work/out"),
        (["work/.ipython/profile_default/history", "work/.lock"], None),
        (["work/history.sqlite", "work/history.sqlite-journal"], None),
        (["inductor/a.so", "inductor/b.so", "work/c.txt"], "work"),
    ],
    ids=["most files", "hidden", "databases", "temporary"],
)
def test_the_output_directory_has_most_open_files(
    files: list[str], output: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.attach.guess._TEMPORARY", (f"{tmp_path}/",))
    machine = Machine(tmp_path)
    machine.add(4000, "python train.py")
    for name in ("fd", "fdinfo"):
        (tmp_path / "4000" / name).mkdir()
    (tmp_path / "4000/cwd").symlink_to(tmp_path / "work")
    for number, name in enumerate(files, 3):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        (tmp_path / f"4000/fd/{number}").symlink_to(path)
        (tmp_path / f"4000/fdinfo/{number}").write_text("pos:\t0\nflags:\t0100001\n", encoding="ascii")
    guess = guess_job(Sought((4000,)), {}, machine.proc)
    assert guess.output_dir == (None if output is None else str(tmp_path / output))


def test_what_a_shell_has_started_are_the_workers(tmp_path: Path) -> None:
    works = f"{sys.executable} -c 'import time; time.sleep(60)'"
    script = f"cd {tmp_path}; exec >all.log; {works} & {works} 2>own.err & sleep 61 & wait"
    quiet = subprocess.DEVNULL
    shell = subprocess.Popen(["bash", "-c", script], stdout=quiet, stderr=quiet, start_new_session=True)
    logs = ((f"{tmp_path}/all.log",), (f"{tmp_path}/own.err",))
    try:
        guess = poll(  # the second one first has the output of the shell
            lambda: found if (found := guess_job(Sought((shell.pid,)), os.environ)).logs == logs else None, f"{logs}"
        )
        assert shell.pid not in guess.pids
        assert (guess.output_dir, guess.gpu_ids) == (None, ())
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_a_process_is_watched_to_its_verified_end(training: Training) -> None:
    with running(GPUJOB, "attach", str(training.process.pid), cwd=training.folder) as attach:
        run_dir = training.run_dir()
        assert read_json(run_dir / "manifest.json")["listen_address"] == "127.0.0.1:0"
        training.finish()
        training.process.wait()
        _, errors = attach.communicate(timeout=90)
    report = read_json(run_dir / "report.json")
    assert (report["items"], report["items_expected"]) == (30, 30), errors
    assert f"gpujob: logs: {training.folder}/train.log\n" in errors
    job_id = re.findall(r"`gpujob watch (\S+)` shows the job", errors)
    assert gpujob("report", *job_id, "--json", cwd=training.folder.parent).stdout == json.dumps(report) + "\n"


def attach_in_a_terminal(training: Training) -> tuple[subprocess.Popen[bytes], int]:
    """Attach to the script; return the command and the other end of its terminal."""
    main, side = pty.openpty()
    argv = [str(GPUJOB), "attach", str(training.process.pid), "--no-color"]
    attach = subprocess.Popen(argv, cwd=training.folder, stdin=side, stdout=side, stderr=side, env=clean_environment())
    os.close(side)
    return attach, main


def interrupt(attach: subprocess.Popen[bytes], main: int) -> bytes:
    """Send Ctrl-C and wait for the end; return what the terminal shows from then on."""
    shown = b""
    attach.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal is closed at the end
        while True:
            shown += os.read(main, 65536)
    os.close(main)
    attach.wait(30)
    return shown


def test_ctrl_c_ends_the_live_view_and_not_the_job(training: Training) -> None:
    attach, main = attach_in_a_terminal(training)
    shown = b""
    while b"5/30 items" not in shown:
        shown += os.read(main, 65536)
    shown += interrupt(attach, main)
    assert (attach.returncode, training.process.poll()) == (130, None)
    assert b"the sidecar was stopped" in shown


@pytest.mark.parametrize("begun", ["prepare", "sidecar"])
def test_ctrl_c_before_the_first_view_judges_no_job(begun: str, training: Training) -> None:
    attach, main = attach_in_a_terminal(training)
    if begun == "prepare":
        poll(lambda: read_children(attach.pid), "the child of the command")
    else:
        poll(lambda: list(training.folder.glob("logs/pid-*/sidecars.log")), "the run directory")
    shown = interrupt(attach, main)
    assert (attach.returncode, training.process.poll()) == (130, None)
    assert b"Traceback" not in shown
    assert b"gone without a report" not in shown


def test_the_seed_flags_read_a_single_log_without_a_number_and_need_no_fixed_port(training: Training) -> None:
    flags = (
        "--job-name train.py --num-workers 1 --output-dir out --log-dir . --log-pattern train.log --check-interval 1"
    )
    exporter = GPUJOB.with_name("gpujob-exporter")
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 9410)):  # or somebody else has it
        with running(exporter, "sidecar", *flags.split(), cwd=training.folder) as sidecar:
            run_dir = training.run_dir()
            training.finish()
            training.process.wait()
            _, errors = sidecar.communicate(timeout=90)
    assert "cannot listen on 127.0.0.1:9410: Address already in use" in errors
    assert "a free port is used instead" in errors
    assert read_json(run_dir / "report.json")["items"] == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to watch: PID..., --job ID, --job-name NAME or a monitor_config.yaml"),
        (["1.5"], "gpujob: '1.5' is neither a process id nor a monitor_config.yaml"),
        (["4194304", "--gpu-ids", "0,1"], "gpujob: there is no process 4194304 on this machine"),
        (["4194304"], "gpujob: there is no process 4194304 on this machine"),
        (["--job", "77", "12"], "gpujob: --job: give pids or a Slurm job, not both"),
        (["--job", "77"], "gpujob: this machine has no process of Slurm job 77 that is yours"),
        (["--job-name", "no-such-job"], "gpujob: this machine has no process of the job 'no-such-job' that is yours"),
        (["missing.yaml"], "cannot be read: No such file or directory"),
    ],
)
def test_mistakes_have_one_clear_message(words: list[str], message: str, tmp_path: Path) -> None:
    done = gpujob("attach", *words, cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_this_command_nor_its_shell_is_a_worker() -> None:
    with pytest.raises(LauncherError, match="is this command or has started it"):
        guess_job(Sought((os.getppid(),)), os.environ)
