"""Logs of workers: every run told apart, followed through rotation and restarts, plain text only."""

import json
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.contract.manifest import read_manifest
from launcher.errors import LauncherError
from launcher.watch.log_lines import JobLogs, LogLine, select_tasks
from tests.support.builders import orchestrator_record
from tests.support.launcher import GPUJOB, LocalJob, clean_environment, gpujob, poll, settled_run_dir

JOB = {"name": "embed", "workers": [{"command": "true", "count": 2}]}
FEW = 40  # files that a process may have open
FAILS_ONCE = """
echo "began run $GPUJOB_RESTART of $GPUJOB_WORKER"
[ "$GPUJOB_RESTART" = 1 ] || { echo "RuntimeError: CUDA out of memory" >&2; exit 1; }
printf '\\033[31mred\\033[0m\\rstep 2\\n'
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory of two workers on gn1."""
    path = settled_run_dir(tmp_path, JOB)
    (path / "orchestrator.json").write_text(json.dumps(orchestrator_record(hosts=["gn1"])))
    return path


def reader(run_dir: Path, worker: str | None = None, last: int | None = None, *, errors: bool = False) -> JobLogs:
    manifest = read_manifest(run_dir)
    return JobLogs(manifest, select_tasks(manifest, worker), last, errors=errors)


def texts(logs: JobLogs, *, ended: bool = False) -> list[tuple[str, str]]:
    return [(f"{line.worker}{line.run}", line.text) for line in logs.read(ended=ended)]


def test_runs_are_in_order_and_told_apart(run_dir: Path) -> None:
    for name in ("w1", "w0_r10", "w0_r2", "w0_a1", "w0", "w0_a1_r1"):
        (run_dir / f"gn1_worker_{name}.out").write_text(f"{name}\n")
    (run_dir / "gn1_worker_w0.err").write_text("error\n")
    (run_dir / "gn1_worker_w00.out").write_text("no worker of this job\n")
    assert list(reader(run_dir, "0").read()) == [
        LogLine("worker_w0", 0, run, text)
        for run, text in (
            *(("", "error"), ("", "w0"), ("_r2", "w0_r2"), ("_r10", "w0_r10")),
            *(("_a1", "w0_a1"), ("_a1_r1", "w0_a1_r1")),
        )
    ]
    assert {line.worker for line in reader(run_dir).read()} == {"worker_w0", "worker_w1"}


def test_attempts_on_other_nodes_are_found(run_dir: Path) -> None:
    (run_dir / "orchestrator.json").write_text(json.dumps(orchestrator_record(hosts=["gn_7"], attempt=2)))
    for name in ("gn1_worker_w0", "gn-3.example.org_worker_w0_a1", "gn_7_worker_w0_a2", "gn1_my_worker_w0"):
        (run_dir / f"{name}.out").write_text(f"{name}\n")
    assert texts(reader(run_dir)) == [
        ("worker_w0", "gn1_worker_w0"),
        ("worker_w0_a1", "gn-3.example.org_worker_w0_a1"),
        ("worker_w0_a2", "gn_7_worker_w0_a2"),
    ]


def test_each_node_of_a_worker_has_its_own_rank(tmp_path: Path) -> None:
    """One process per node, and the second attempt runs on one node of the first and on a new one."""
    spec = {"backend": {"type": "torchrun"}, "resources": {"nodes": 2, "gpus_per_node": 1}}
    run_dir = settled_run_dir(tmp_path, {**spec, "workers": [{"command": "train.py", "gpus": 2}]})
    record = orchestrator_record(hosts=["gn2", "gn3"], attempt=1, local=False)
    (run_dir / "orchestrator.json").write_text(json.dumps(record))
    for rank, node in enumerate(("gn1", "gn2")):
        run_files.write_json(run_dir / f"workers/worker_w0_rank{rank}_a0_r0.start.json", {"node": node})
    for name in ("gn1_worker_w0", "gn2_worker_w0", "gn2_worker_w0_r1", "gn2_worker_w0_a1", "gn3_worker_w0_a1"):
        (run_dir / f"{name}.out").write_text(f"{name}\n")
    first = [("", "gn1_worker_w0"), ("_a1", "gn2_worker_w0_a1")]
    second = [("", "gn2_worker_w0"), ("_r1", "gn2_worker_w0_r1"), ("_a1", "gn3_worker_w0_a1")]
    lines = [LogLine("worker_w0", rank, run, text) for rank, runs in enumerate((first, second)) for run, text in runs]
    assert list(reader(run_dir).read()) == lines
    assert [list(reader(run_dir, rank).read()) for rank in "01"] == [lines[:2], lines[2:]]


def test_new_lines_follow_rotation_and_restarts(run_dir: Path) -> None:
    log = run_dir / "gn1_worker_w0.out"
    log.write_text("one\ntwo\nhalf")
    logs = reader(run_dir)
    assert texts(logs) == [("worker_w0", "one"), ("worker_w0", "two")]
    log.rename(f"{log}.1")
    log.write_text("three\n")
    assert [*texts(logs), *texts(logs)] == [("worker_w0", "half"), ("worker_w0", "three")]
    (run_dir / "gn1_worker_w0_r1.out").write_text("again\nlast")
    assert texts(logs) == [("worker_w0_r1", "again")]
    assert texts(logs, ended=True) == [("worker_w0_r1", "last")]


@pytest.mark.parametrize("count", [0, 1, 3, 1000, 200_000])
def test_the_last_lines_of_each_file_come_first(run_dir: Path, count: int) -> None:
    lines = [f"line {number}" for number in range(100_000)]
    log = run_dir / "gn1_worker_w0.out"
    log.write_text("\n".join(lines) + "\n")
    logs = reader(run_dir, last=count)
    assert [text for _, text in texts(logs)] == (lines[-count:] if count else [])
    with log.open("a") as out:
        out.write("new\n")
    (run_dir / "gn1_worker_w1.out").write_text("a\nb\nc\nd\ne\n")
    assert [text for _, text in texts(logs)] == ["new", *"abcde"]


def test_only_lines_with_errors(run_dir: Path) -> None:
    text = "Processed 1/2 items\nRuntimeError: CUDA out of memory\nProcessed 2/2 items\n"
    (run_dir / "gn1_worker_w0.out").write_text(text)
    (run_dir / "gn1_worker_w1.out").write_text("Processed 1/2 items\n")
    assert texts(reader(run_dir, errors=True)) == [("worker_w0", "RuntimeError: CUDA out of memory")]


@pytest.mark.parametrize("head", ["", "[rank1]: "])
def test_a_traceback_is_shown_to_its_error(head: str, run_dir: Path) -> None:
    first = [f"{head}Traceback (most recent call last):", f'{head}  File "train.py", line 3', f"{head}KeyError: 'x'"]
    second = [first[0], f"{head}    raise Flaky", f"{head}my.Flaky: no"]
    path = run_dir / "gn1_worker_w0.out"
    path.write_text("\n".join(["begin", *first[:2], ""]))
    logs = reader(run_dir, errors=True)
    found = texts(logs)
    with path.open("a") as out:
        out.write("\n".join([first[2], "During handling", *second, "  indented", "end", ""]))
    found += texts(logs)
    assert [text.strip() for _, text in found] == [line.strip() for line in (*first, *second)]


def test_a_file_that_cannot_be_read_is_reported_once(run_dir: Path) -> None:
    for rank in (0, 1):
        (run_dir / f"gn1_worker_w{rank}.out").mkdir()
    logs = reader(run_dir)
    assert (texts(logs), logs.pop_problems()) == ([], ["gn1_worker_w0.out, gn1_worker_w1.out: is a directory"])
    assert (texts(logs, ended=True), logs.pop_problems()) == ([], [])


@pytest.mark.parametrize(("follow", "hard"), [(False, FEW), (True, FEW), (True, 10 * FEW)])
def test_a_job_may_have_more_logs_than_a_process_may_open(follow: bool, hard: int, run_dir: Path) -> None:
    """The limit is raised as far as possible; files beyond it are open no longer than they are read."""
    names = [f"worker_w0_r{run}" for run in range(1, 2 * FEW)]
    for name in names:
        (run_dir / f"gn1_{name}.out").write_text("a line\n")
    printed, errors = run_dir / "printed", run_dir / "errors"
    with printed.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(
            [str(GPUJOB), "logs", str(run_dir), *(["-f"] if follow else [])],
            stdout=stdout,
            stderr=stderr,
            env=clean_environment(),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard)),
        )
    if follow:
        poll(lambda: f"{names[-1]} | " in printed.read_text(), "the first read")
        with (run_dir / f"gn1_{names[-1]}.out").open("a") as log:
            log.write("another line\n")
        poll(lambda: "another line" in printed.read_text(), "a later read")
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == (130 if follow else 0)
    found = [line.partition(" ")[0] for line in printed.read_text().splitlines()]
    assert (found, errors.read_text()) == ([*names, names[-1]] if follow else names, "")


def test_an_unknown_worker_is_named_with_those_there_are(run_dir: Path) -> None:
    with pytest.raises(LauncherError, match=r"no worker 'worker_w7'; did you mean .*\(known: worker_w0, worker_w1\)"):
        select_tasks(read_manifest(run_dir), "worker_w7")


def test_logs_of_a_real_job_end_with_it_and_have_no_escapes(tmp_path: Path) -> None:
    workers = [{"command": FAILS_ONCE, "shell": True, "count": 2, "restart": {"max": 1, "backoff": 0}}]
    spec = {"name": "again", "workers": workers, "patterns": {"output": None}, "monitoring": {"linger": 0}}
    with LocalJob(tmp_path / "work", spec, "--quiet") as job:
        followed = gpujob("logs", "-f", job.run_dir, cwd=tmp_path)
        job.wait()
        lines = set(followed.stdout.splitlines())
        for worker in ("worker_w0", "worker_w1"):
            assert f"{worker}_r1 | began run 1 of {worker}" in lines
            assert f"{worker}_r1 | step 2" in lines
        assert (followed.returncode, "\x1b" in followed.stdout, followed.stderr) == (0, False, "")
        printed = gpujob("logs", job.run_dir, "worker_w1", cwd=tmp_path).stdout.splitlines()
        assert sorted(printed[:2]) == ["RuntimeError: CUDA out of memory", "began run 0 of worker_w1"]
        assert printed[2:] == ["worker_w1_r1 | began run 1 of worker_w1", "worker_w1_r1 | step 2"]
        terminal, side = os.openpty()
        argv = [str(GPUJOB), "logs", str(job.run_dir)]
        subprocess.run(argv, stdout=side, env=clean_environment(TERM="xterm"), timeout=60, check=True)
        colored = os.read(terminal, 65536).decode().splitlines()
        for rank, color in ((0, 36), (1, 32)):
            assert f"\x1b[{color}mworker_w{rank}_r1 | \x1b[0mstep 2" in colored


def test_ctrl_c_ends_following_quietly(run_dir: Path) -> None:
    (run_dir / "orchestrator.json").write_text(json.dumps(orchestrator_record(hosts=["gn1"])))
    (run_dir / "gn1_worker_w0.out").write_text("one\n")
    out = run_dir / "followed"
    with out.open("w") as stdout:
        process = subprocess.Popen(
            [str(GPUJOB), "logs", str(run_dir), "-f"], stdout=stdout, stderr=subprocess.PIPE, env=clean_environment()
        )
    poll(lambda: "worker_w0 | one" in out.read_text(), "the first line")
    os.kill(process.pid, signal.SIGINT)
    assert (process.wait(20), process.communicate()[1]) == (130, b"")
