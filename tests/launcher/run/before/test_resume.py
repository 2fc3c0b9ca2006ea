"""The checkpoint that an attempt resumes from."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.plan.placeholders import task_environment
from launcher.plan.plan import RunFacts
from launcher.run.before.resume import find_checkpoint, may_resume
from launcher.run.orchestrator import load_plan
from tests.exporter.files.checkpoints.checkpoint_trees import START
from tests.launcher.verify.checkpoint_files import LAYOUTS
from tests.launcher.verify.test_checkpoint_damage import write_two
from tests.support.launcher import gpujob, settled_run_dir

DAMAGED = "WARNING checkpoint checkpoint_200.pt must not be resumed from: checkpoint_200.pt: "


def found(tmp_path: Path, attempt: int, **over: object) -> tuple[Path, str]:
    """The directory of a job with two checkpoints, the newer one damaged, and the path found in this attempt."""
    job = {"name": "job", "workers": [{"role": "w", "command": "x"}], **over}
    run_dir = settled_run_dir(tmp_path, job)
    write_two(run_dir, "one_file")
    run_files.write_json(run_dir / "local-1.json", {"submitted": START})
    (run_dir / "checkpoint_200.pt").write_bytes(LAYOUTS["one_file"](200)["checkpoint_200.pt"][:-9])
    plan, facts = load_plan(run_dir), RunFacts("1", run_dir, ("cn01",), attempt)
    return run_dir, find_checkpoint(plan, facts, lambda: False)


def test_a_later_attempt_gets_the_newest_whole_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, path = found(tmp_path, 1)
    assert path == str(run_dir / "checkpoint_100.pt")
    warning, named = [line[20:] for line in capfd.readouterr().out.splitlines()]
    assert warning.startswith(DAMAGED)
    assert named == "Checkpoint to resume from: checkpoint_100.pt"
    plan, facts = load_plan(run_dir), RunFacts("1", run_dir, ("cn01",), 1, checkpoint=path)
    assert task_environment(plan, plan.tasks[0], facts, 0)["GPUJOB_CHECKPOINT"] == path


@pytest.mark.parametrize(("over", "is_found"), [({}, False), ({"resume": True}, True)])
def test_a_first_attempt_resumes_only_if_the_job_file_says_so(
    over: dict[str, object], is_found: bool, tmp_path: Path
) -> None:
    assert bool(found(tmp_path, 0, **over)[1]) == is_found


def test_a_job_that_resumes_reads_the_placeholder(tmp_path: Path) -> None:
    write_two(tmp_path, "one_file")
    (tmp_path / "checkpoint_200.pt").write_bytes(b"")
    options = ("--quiet", "--set", "monitoring.linger=0", "--set", "resume=true", "--set", "paths.checkpoint_dir=.")
    done = gpujob("run", *options, "--", "echo", "from {checkpoint}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "logs").glob("local-*")
    (log,) = run_dir.glob("*_worker_w0.out")
    assert f"from {tmp_path.resolve()}/checkpoint_100.pt" in log.read_text()
    assert DAMAGED + "is empty" in (run_dir / "log.out").read_text()


SEARCH = """
import os, sys
from launcher.run import orchestrator

def search(plan, facts, is_ending):
    print(is_ending(), is_ending(), os.eventfd_read(signs))
    sys.exit(0)

signs = os.eventfd(0, os.EFD_NONBLOCK)
orchestrator.find_checkpoint = search
orchestrator.main([sys.argv[1], "--local", "--signs", str(signs)])
"""


def test_a_long_search_is_no_silence(tmp_path: Path) -> None:
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]})
    done = subprocess.run([sys.executable, "-c", SEARCH, run_dir], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("False False 2\n", 0), done.stderr


def test_a_restarted_worker_gets_what_the_job_has_saved_meanwhile(tmp_path: Path) -> None:
    write_two(tmp_path / "saved", "one_file")
    (tmp_path / "saved/checkpoint_200.pt").write_bytes(b"")
    job = {
        "name": "job",
        "workers": [
            {
                "role": "w",
                "command": [
                    "sh",
                    "-c",
                    "echo from {checkpoint}; cp saved/* new || exit 0; rm -r saved; exit 3",
                ],
                "restart": {"max": 1, "backoff": 0},
            }
        ],
        "paths": {"checkpoint_dir": "new"},
        "monitoring": {"linger": 0},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = gpujob("run", "--quiet", "job.yaml", cwd=tmp_path)
    (run_dir,) = (tmp_path / "logs").glob("local-*")
    logs = sorted(run_dir.glob("*_w_w0*.out"))
    good = tmp_path.resolve() / "new/checkpoint_100.pt"
    assert [log.read_text().splitlines()[0] for log in logs] == ["from ", f"from {good}"], done.stdout
    assert DAMAGED + "is empty" in (run_dir / "log.out").read_text()


@pytest.mark.parametrize(
    ("attempt", "start", "submitted", "over", "is_found"),
    [
        (0, -1.0, -2.0, {}, True),
        (0, 1.0, -2.0, {}, False),  # an earlier job has left it
        (0, 1.0, -2.0, {"resume": True}, True),
        (1, -1.0, -2.0, {}, True),
        (1, 1.0, -2.0, {}, False),
        (1, None, -2.0, {}, True),  # no worker is known to have started in the first attempt
        (1, None, 1.0, {}, False),
        (1, None, 1.0, {"resume": True}, True),
        (1, None, None, {}, True),  # nothing is known of the first attempt
    ],
)
def test_only_a_job_that_resumes_continues_from_a_checkpoint_of_another_one(
    attempt: int,
    start: float | None,
    submitted: float | None,
    over: dict[str, object],
    is_found: bool,
    tmp_path: Path,
) -> None:
    """The job begins ``start`` and is submitted ``submitted`` seconds after the checkpoint was saved."""
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"role": "w", "command": "x"}], **over})
    write_two(run_dir, "one_file")
    saved = (run_dir / "checkpoint_200.pt").stat().st_mtime
    submission = {} if submitted is None else {"submitted": saved + submitted}
    run_files.write_json(run_dir / "local-1.json", submission)
    if attempt and start is not None:
        stem = run_files.record_name("w_w0", 0, 0, 0)
        run_files.write_json(run_dir / run_files.WORKERS_DIR / f"{stem}.start.json", {"start": saved + start})
    facts = RunFacts("1", run_dir, ("cn01",), attempt, saved + (1000.0 if attempt else start or 0.0))
    assert bool(find_checkpoint(load_plan(run_dir), facts, lambda: False, is_restart=True)) == is_found
    if not attempt:  # the clock was set back since then
        assert find_checkpoint(load_plan(run_dir), facts, lambda: False, is_restart=True, began=saved - 1.0)


@pytest.mark.parametrize(
    ("over", "is_searched"),
    [
        ({}, True),  # its program may read the variable
        ({"service": True}, False),
        ({"service": True, "argv": ("serve", "--from={checkpoint}")}, True),
        ({"service": True, "argv": ("sh", "-c", "serve $GPUJOB_CHECKPOINT")}, True),
        ({"service": True, "argv": ("sh", "-c", "serve $GPUJOB_CHECKPOINT_DIR")}, False),
        ({"service": True, "env": {"MODEL": "{checkpoint}"}}, True),
    ],
)
def test_checkpoints_are_searched_before_a_restart_if_the_worker_may_use_them(
    over: dict[str, Any], is_searched: bool, tmp_path: Path
) -> None:
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"role": "w", "command": "x"}]})
    assert may_resume(dataclasses.replace(load_plan(run_dir).tasks[0], **over)) == is_searched


def test_the_restart_of_a_service_waits_for_no_search(tmp_path: Path) -> None:
    write_two(tmp_path / "saved", "one_file")
    serve = "test -e once && touch again && exec sleep 60; touch once; exit 3"
    restart = {"max": 1, "backoff": 0}
    job = {
        "name": "job",
        "workers": [
            {"role": "w", "command": ["sh", "-c", "until test -e again; do sleep 0.1; done"]},
            {"role": "s", "command": ["sh", "-c", serve], "service": True, "restart": restart},
        ],
        "paths": {"checkpoint_dir": "saved"},
        "monitoring": {"linger": 0},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = gpujob("run", "--quiet", "job.yaml", cwd=tmp_path)
    assert (tmp_path / "again").exists(), done.stdout
    (run_dir,) = (tmp_path / "logs").glob("local-*")
    assert "Checkpoint to resume from" not in (run_dir / "log.out").read_text()
