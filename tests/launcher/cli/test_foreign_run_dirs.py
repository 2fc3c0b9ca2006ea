"""Run directories of another user: shown with their owner, and nobody is signalled on their word."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.contract.process_identity import read_start_ticks
from launcher.cli.parts import fail
from launcher.registry.search import find_job
from tests.support.builders import orchestrator_record
from tests.support.launcher import gpujob, settled_run_dir

NOBODY = 65534
JOB = {"name": "job", "workers": [{"command": "true"}]}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that somebody may want to end."""
    with subprocess.Popen(["sleep", "60"]) as found:
        yield found
        found.kill()


@pytest.fixture
def run_dir(tmp_path: Path, process: subprocess.Popen[bytes]) -> Path:
    """A run directory whose orchestrator is that process."""
    path = settled_run_dir(tmp_path, JOB)
    record = orchestrator_record(pid=process.pid, start_ticks=read_start_ticks(process.pid))
    (path / "orchestrator.json").write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("names", [["orchestrator.json"], ["."], [".", "orchestrator.json", "manifest.json"]])
def test_records_of_another_user_stop_no_process(
    run_dir: Path, process: subprocess.Popen[bytes], names: list[str]
) -> None:
    for name in names:
        os.chown(run_dir / name, NOBODY, NOBODY)
    done = gpujob("stop", run_dir, cwd=run_dir.parent)
    assert (done.returncode, done.stdout, process.poll()) == (2, "", None)
    assert "is not used: " in done.stderr
    assert "belongs to nobody; only its owner stops or enters a job with gpujob" in done.stderr
    for name in names:
        os.chown(run_dir / name, 0, 0)
    assert gpujob("stop", run_dir, cwd=run_dir.parent).returncode == 0
    assert process.wait(10) == -15


def test_a_run_directory_that_others_can_write_stops_no_process(
    run_dir: Path, process: subprocess.Popen[bytes]
) -> None:
    run_dir.chmod(0o777)
    done = gpujob("stop", run_dir, cwd=run_dir.parent)
    assert (done.returncode, process.poll()) == (2, None)
    assert f"can be written by everyone; run `chmod go-w {run_dir}`" in done.stderr


@pytest.mark.parametrize("command", [("watch", "--once"), ("report",)])
def test_a_look_at_the_run_directory_of_another_user_names_the_owner(run_dir: Path, command: tuple[str, ...]) -> None:
    notice = f"gpujob: notice: {run_dir} belongs to nobody\n"
    assert notice not in gpujob(*command, run_dir, cwd=run_dir.parent).stderr
    os.chown(run_dir, NOBODY, NOBODY)
    done = gpujob(*command, run_dir, cwd=run_dir.parent)
    assert done.stderr == notice
    assert "local-1" in done.stdout


def test_the_name_of_a_directory_of_another_user_does_not_command_the_terminal(run_dir: Path) -> None:
    hostile = run_dir.rename(run_dir.with_name("a\x1b]0;x\x07\u202e"))
    os.chown(hostile, NOBODY, NOBODY)
    done = gpujob("watch", "--once", hostile, cwd=hostile.parent)
    assert done.stderr == f"gpujob: notice: {hostile.parent}/a\\x1b]0;x\\x07\\u202e belongs to nobody\n"


def test_the_own_run_directory_is_found_before_a_newer_one_of_another_user(run_dir: Path) -> None:
    planted = run_dir.with_name(f"{run_dir.name}_9")
    shutil.copytree(run_dir, planted)
    os.chown(planted, NOBODY, NOBODY)
    os.utime(planted, (2e9, 2e9))
    assert find_job("local-1", {}, run_dir.parents[1]).directory == run_dir
    shutil.rmtree(run_dir)
    assert find_job("local-1", {}, run_dir.parents[1]).directory == planted


def test_no_name_in_an_error_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be from a file of another user."""
    with pytest.raises(SystemExit):
        fail("job 1\x1b]0;x\x07\u202e: unknown\n  job.yaml")
    assert capsys.readouterr().err == "gpujob: job 1\\x1b]0;x\\x07\\u202e: unknown\n  job.yaml\n"
