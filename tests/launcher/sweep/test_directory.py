"""The record of a sweep and the states of its points."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from exporter.contract import run_files
from launcher.cli.jobs.sweep_states import show_states
from launcher.errors import LauncherError
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import ProcessRecord
from launcher.sweep.directory import (
    MISSING,
    PointState,
    SweepArray,
    SweepPoint,
    SweepRecord,
    arrays_in_queue,
    points_to_resume,
    read_point_states,
    read_queue,
    read_record,
    render_states,
    sort_by_result,
    sweep_exit_status,
    with_runs,
    write_record,
)
from tests.support.fake_slurm import BIN, FakeSlurm
from tests.support.launcher import settled_run_dir

values = st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False))
points = st.builds(SweepPoint, st.integers(0), st.text(), values, st.lists(st.text(max_size=9), max_size=3).map(tuple))
arrays = st.builds(SweepArray, st.text(), st.text(), st.floats(0, 2e9), st.none() | st.text())
sweeps = st.builds(
    SweepRecord,
    submission=st.just({"job_id": "4459", "job_name": "embed"}),
    max_parallel=st.none() | st.integers(1),
    local=st.booleans(),
    points=st.lists(points, max_size=3).map(tuple),
    arrays=st.lists(arrays, max_size=2).map(tuple),
    runner=st.none() | st.just(ProcessRecord(pid=1, start_ticks=2, host="cn01")),
)


ENDED = {"job_id": "4459_0", "job_name": "embed", "exit_status": 0, "attempt": 0}  # keys that every report has


@given(sweeps)
def test_a_record_survives_writing_and_reading(record: SweepRecord) -> None:
    assert SweepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def record_of(*runs: tuple[str, ...], local: bool = False) -> SweepRecord:
    points = tuple(SweepPoint(index, f"p{index}", {"lr": index}, names) for index, names in enumerate(runs))
    submission = {"job_id": "4459", "job_name": "embed"}
    arrays = (SweepArray("4459", "0-3%2", time.time() - 60.0),)
    return SweepRecord(submission=submission, max_parallel=2, local=local, points=points, arrays=arrays)


def run_dir(home: Path, name: str, state: str | None = None, *, has_started: bool = True) -> None:
    """Write a run directory of a job in this state."""
    index = name.split("_")[1]
    path = settled_run_dir(home / "made", {"name": f"p{index}"}, job_id=f"4459_{index}")
    path.rename(home / name)
    if has_started:
        facts = {"job_id": f"4459_{index}", "attempt": 0, "hosts": ["cn01"], "start": 1.0, "pid": 1, "host": "x"}
        run_files.write_json(home / name / run_files.ORCHESTRATOR_FILE, facts)
    if state is not None:
        failed = {"worker": "worker_w0", "rank": 0, "node": "cn01", "reason": "app_error"}
        cause = {**failed, "evidence": ["exit status 3", "log: two\nlines"]} if state == "FAILED" else None
        logger = {"worker": "worker_w1", "rank": 1, "values": {"loss": 0.25 + len(state), "step": 7}}
        report = {**ENDED, "state": state, "workers": [logger], "items": 1e6, "nodes": ["cn01"], "duration_s": 3.2}
        run_files.write_json(home / name / run_files.REPORT_FILE, {**report, "items_expected": None, "cause": cause})


def test_point_states_come_from_reports_and_the_queue(tmp_path: Path, slurm: FakeSlurm) -> None:
    home = tmp_path / "4459_embed_20251122_041341"
    names = [f"4459_{index}_p{index}_20251122_041341" for index in range(6)]
    run_dir(home, names[0], "COMPLETED")
    run_dir(home, names[1], "FAILED")
    run_dir(home, names[2])
    run_dir(home, names[3], has_started=False)
    run_dir(home, names[4], has_started=False)
    run_dir(home, names[5])
    run_files.write_json(home / names[5] / run_files.STATE_FILE, {"time": 61.0})
    slurm.say("squeue", "out", "4459_2|RUNNING\n4459_3|PENDING\n")
    record = record_of(*((name,) for name in names), ())
    states = [read_point_states(home, record) for _ in range(50)][-1]  # fifty watchers
    assert [state.state for state in states] == [
        *("COMPLETED", "FAILED", "RUNNING", "PENDING", MISSING, "UNKNOWN", MISSING)
    ]
    cause = "worker_w0 (rank 0) on cn01: app_error: exit status 3; log: two\nlines"
    assert (states[0].items, states[1].cause) == (1e6, cause)
    assert states[5].duration_s == 60.0, "its last sign of life, however late one looks"
    (call,) = slurm.calls()
    assert call["argv"][:6] == ["--local", "-h", "-a", "-t", "all", "-u"]  # as all commands ask
    assert points_to_resume(states) == (1, 4, 5, 6)
    assert sweep_exit_status(states) == 10
    assert sweep_exit_status(states[:2]) == 1
    assert sweep_exit_status((states[5], states[1])) == 1, "of the first point, however they are sorted"
    assert sweep_exit_status(states[:1]) == 0
    lines = render_states(states)
    assert lines[2].split() == [
        "1",
        "p1",
        "FAILED",
        "1000000",
        "6.25",
        "3s",
        "4459_1",
        "cn01",
        *str(states[1].cause).split(),
    ]
    assert lines[-1] == "7 points: 1 COMPLETED, 1 FAILED, 1 RUNNING, 1 PENDING, 2 MISSING, 1 UNKNOWN"


def test_points_are_sorted_by_a_logged_value_and_those_without_it_are_last() -> None:
    results: tuple[dict[str, float], ...] = ({"loss": 2.0}, {}, {"loss": 0.5, "lr": 1.0})
    states = [
        PointState(n, f"p{n}", {}, "COMPLETED", None, None, 1, results=logged) for n, logged in enumerate(results)
    ]
    assert [state.index for state in sort_by_result(states, "loss")] == [2, 0, 1]
    with pytest.raises(LauncherError, match=r"--sort: no point has logged a value 'acc' \(known: loss, lr\)"):
        sort_by_result(states, "acc")


def test_the_table_shows_the_value_by_which_it_is_sorted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir(tmp_path, "4459_0_p0", "COMPLETED")
    show_states(tmp_path, record_of(("4459_0_p0",), local=True), as_json=False, sort="step")
    heading, row, _ = capsys.readouterr().out.splitlines()
    assert heading.split()[2:5] == ["items", "step", "loss"]
    assert row.split()[3:6] == ["1000000", "7", "9.25"]


def test_causes_are_cut_to_the_width_of_a_terminal() -> None:
    long = "worker_w0 (rank 0) on cn01: app_error: exit status 3; " + "x" * 90
    states = [PointState(0, "p0", {}, "FAILED", "4459_0", None, 1, cause=long, nodes=("cn01",))]
    full_line = render_states(states)[1]
    assert full_line.endswith(long)
    line = render_states(states, 80)[1]
    assert (len(line), line[:-3], line[-3:]) == (80, full_line[:77], "...")
    assert render_states(states, 10)[1].endswith("  worker_w0 (rank 0) on...")
    assert render_states(states, 400) == render_states(states)


def test_points_that_failed_or_run_come_first_in_a_low_terminal() -> None:
    kinds = ["COMPLETED"] * 8 + ["FAILED", "RUNNING", "RUNNING", "COMPLETED", "PENDING", "PENDING"]
    states = [PointState(n, f"p{n}", {}, state, None, None, 1) for n, state in enumerate(kinds)]
    assert render_states(states, 80, 16) == render_states(states, 80)
    lines = render_states(states, 80, 7)
    assert [line.split()[0] for line in lines[1:5]] == ["8", "9", "10", "12"]
    assert lines[5:] == [
        "and 10 more: 9 COMPLETED, 1 PENDING",
        "14 points: 9 COMPLETED, 1 FAILED, 2 RUNNING, 2 PENDING",
    ]
    assert [len(render_states(states, 80, height)) for height in (15, 7, 4, 1)] == [15, 7, 4, 4]


def test_wide_letters_count_twice() -> None:
    cause = "エラー: メモリが足りません " * 9
    states = [PointState(n, name, {}, "FAILED", None, None, 1, cause=cause) for n, name in enumerate(("p", "学習"))]
    lines = render_states(states, 80)
    assert [cell_len(line.partition("エラー")[0]) for line in lines[1:3]] == [
        cell_len(lines[0].partition("cause")[0])
    ] * 2
    assert all(77 <= cell_len(line) <= 80 and line.endswith("...") for line in lines[1:3])


def test_a_narrow_terminal_does_without_columns_so_that_no_line_wraps() -> None:
    values = "model=meta-llama/Llama-3.1-8B,tp=4,rate=16"
    states = [PointState(0, values, {}, "FAILED", "4459_0", None, 1, cause="exit status 3; " * 9, nodes=("cn01",))]
    assert render_states(states, 100)[0].split() == ["point", "state", "items", "took", "job", "cause"]
    assert render_states(states, 90)[0].split() == ["point", "state", "items", "cause"]
    assert render_states(states, 80)[0].split() == ["point", "state", "cause"]
    assert max(map(len, render_states(states, 80))) <= 80


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"state": "COMPLETED", "stopped": {"reason": "completed", "cause": "all have completed", "time": 2.0}}, None),
        ({"state": "CANCELLED", "stopped": {"reason": "cancelled", "cause": "SIGINT to the job", "time": 2.0}},
         "cancelled: SIGINT to the job"),
        ({"state": "INCOMPLETE", "verification": {"checks": [
            {"name": "items", "passed": True, "detail": "9 of 9"},
            {"name": "files", "passed": False, "detail": "3 of 4 files"}]}}, "files: 3 of 4 files"),
    ],
)  # fmt: skip
def test_a_point_without_a_failed_worker_has_its_stop_or_failed_check(
    report: dict[str, Any], expected: str | None, tmp_path: Path, slurm: FakeSlurm
) -> None:
    name = "4459_0_p0_20251122_041341"
    run_dir(tmp_path / "s", name, "COMPLETED")
    run_files.write_json(tmp_path / "s" / name / run_files.REPORT_FILE, {**ENDED, **report})
    (state,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert state.cause == expected


def test_a_requeued_point_is_pending_despite_its_report(tmp_path: Path, slurm: FakeSlurm) -> None:
    name = "4459_0_p0_20251122_041341"
    run_dir(tmp_path / "s", name, "PREEMPTED")
    run_dir(tmp_path / "s", "4459_1_p1_20251122_041341", has_started=False)
    slurm.say("squeue", "out", "4459_0|PENDING\n")
    states = read_point_states(tmp_path / "s", record_of((name,), ("4459_1_p1_20251122_041341",)))
    assert [state.state for state in states] == ["PENDING", MISSING]


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("PREEMPTED", "Slurm: preempted by another job"),
        ("NODE_FAIL", "Slurm: node cn01 has failed"),
        ("CANCELLED", "Slurm: requeued; the job will run again (SIGTERM to the job)"),  # scontrol requeue
    ],
)
def test_a_sweep_is_not_over_while_slurm_runs_its_last_point_again(
    tmp_path: Path, slurm: FakeSlurm, state: str, cause: str
) -> None:
    name = "4459_0_p0_20251122_041341"
    run_dir(tmp_path / "s", name, state)
    path = tmp_path / "s" / name / run_files.REPORT_FILE
    stopped = {"reason": "cancelled", "cause": cause, "time": 2.0}
    run_files.write_json(path, {**(run_files.read_json(path) or {}), "stopped": stopped})
    slurm.say("squeue", "out", "4459_0|PENDING\n")
    (point,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert (point.state, points_to_resume([point])) == ("PENDING", ())
    slurm.say("squeue", "out", "4459_0|RUNNING*1\n")  # the next attempt starts
    (point,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert (point.state, points_to_resume([point])) == ("RUNNING", ())
    slurm.say("squeue", "out", "4459_0|COMPLETING\n")  # the batch step of this one ends
    (point,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert point.state == state
    slurm.say("squeue", "out", "")
    (point,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert point.state == state
    slurm.say("squeue", "status", 1)
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    (point,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert point.state == state


@pytest.mark.parametrize(
    ("queue_state", "state"), [("PENDING", "PENDING"), ("COMPLETING", "RUNNING"), ("RUNNING", "RUNNING")]
)
def test_a_requeued_point_is_not_resumed_while_it_is_queued(
    tmp_path: Path, slurm: FakeSlurm, queue_state: str, state: str
) -> None:
    name = "4459_0_p0_20251122_041341"
    run_dir(tmp_path / "s", name, "TIMEOUT")
    path = tmp_path / "s" / name / run_files.REPORT_FILE
    run_files.write_json(path, {**(run_files.read_json(path) or {}), "requeued": True})
    slurm.say("squeue", "out", f"4459_0|{queue_state}\n")
    states = read_point_states(tmp_path / "s", record_of((name,)))
    assert [point.state for point in states] == [state]
    assert points_to_resume(states) == ()
    slurm.say("squeue", "out", "")
    assert points_to_resume(read_point_states(tmp_path / "s", record_of((name,)))) == (0,)


def test_a_point_that_ends_while_squeue_answers_has_its_report(tmp_path: Path, slurm: FakeSlurm) -> None:
    name = "4459_0_p0_20251122_041341"
    run_dir(tmp_path / "s", name, "COMPLETED")
    report = tmp_path / "s" / name / run_files.REPORT_FILE
    report.rename(tmp_path / "report")
    slurm.replace("squeue", f'cp "{tmp_path}/report" "{report}"; exec "{BIN}/squeue" "$@"')
    (point,) = read_point_states(tmp_path / "s", record_of((name,)))
    assert point.state == "COMPLETED"


def test_points_without_a_report_ended_as_accounting_says(tmp_path: Path, slurm: FakeSlurm) -> None:
    home, names = tmp_path / "s", [f"4459_{index}_p{index}_20251122_041341" for index in range(6)]
    for index, name in enumerate(names):
        run_dir(home, name, has_started=index == 1)
    (home / names[0] / "log.err").write_text("gpujob: the module cuda/12.9 cannot be loaded\n")
    now = int(time.time())
    rows = (
        f"4459_0|{now - 60}|{now}|FAILED",
        f"4459_1|{now - 60}|{now}|NODE_FAIL",
        f"4459_[2-3]|{now - 60}|{now}|CANCELLED by 1000",
        f"4459_4|{now - 60}|Unknown|RUNNING",
        f"4459_5|{now - 86400 * 300}|{now - 86400 * 299}|FAILED",  # an older job had the id
    )
    slurm.replace("sacct", f"cat <<'END'\n{chr(10).join(rows)}\nEND")
    states = read_point_states(home, record_of(*((name,) for name in names)))
    assert [(state.state, state.exit_status) for state in states] == [
        *(("FAILED", 1), ("NODE_FAIL", 6), ("CANCELLED", 5), ("CANCELLED", 5), (MISSING, 9), (MISSING, 9))
    ]
    lost = "the batch script ended before gpujob started: gpujob: the module cuda/12.9 cannot be loaded"
    assert [state.cause for state in states[::2]] == [
        f"terminated_peer: Slurm: FAILED; {lost}",
        "cancelled: Slurm: CANCELLED",
        None,
    ]


def test_arrays_with_remaining_tasks_are_in_the_queue() -> None:
    record = record_of().replace(arrays=tuple(SweepArray(job_id, "0", 1.0) for job_id in ("7", "70", "8")))
    assert arrays_in_queue(record, {"70_1": "RUNNING", "8_[2-4]": "PENDING"}) == ("70", "8")


def test_slurm_is_not_queried_when_all_points_have_ended(tmp_path: Path, slurm: FakeSlurm) -> None:
    run_dir(tmp_path / "s", "4459_0_p0_20251122_041341", "COMPLETED")
    read_point_states(tmp_path / "s", record_of(("4459_0_p0_20251122_041341",)))
    assert slurm.calls() == []


def test_the_last_run_of_a_point_counts(tmp_path: Path, slurm: FakeSlurm) -> None:
    first, last = "4459_0_p0_20251122_041341", "4459_0_p0_20251122_051341"
    run_dir(tmp_path / "s", first, "FAILED")
    run_dir(tmp_path / "s", last, "COMPLETED")
    record = with_runs(record_of((first,)), {0: last})
    (state,) = read_point_states(tmp_path / "s", record)
    assert (state.state, state.runs) == ("COMPLETED", 2)


def test_a_queue_without_an_answer_is_not_an_empty_queue(tmp_path: Path, slurm: FakeSlurm) -> None:
    run_dir(tmp_path / "s", "4459_0_p0_20251122_041341")
    slurm.say("squeue", "status", 1)
    slurm.say("squeue", "err", "slurm_load_jobs error: Invalid job id specified\n")
    assert read_queue((SweepArray("4459", "0", 1.0),)) == {}
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    assert read_queue((SweepArray("4459", "0", 1.0),)) is None
    (state,) = read_point_states(tmp_path / "s", record_of(("4459_0_p0_20251122_041341",)))
    assert state.state == "UNKNOWN"


def test_a_sweep_is_read_from_its_directory(tmp_path: Path) -> None:
    home = tmp_path / "4459_embed_20251122_041341"
    home.mkdir()
    record = record_of()
    write_record(home, record)
    assert read_record(home) == record
    (home / "sweep.json").write_text('{"schema": 2}')
    with pytest.raises(LauncherError, match="has schema 2, and this gpujob reads up to 1"):
        read_record(home)


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("4459_embed_20251122_041341", "4459", "4459"),
        ("4459_3_embed_20251122_041341", "4459_3", "4459_3"),
        ("4459_3_fast_20251122_041341", "4459", "4459"),
        ("local-1f2e_0_embed_20251122_041341", "local-1f2e_0", "local-1f2e_0"),
    ],
)
def test_the_job_id_comes_from_the_run_directory(tmp_path: Path, name: str, record: str, expected: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / f"{record}.json").touch()
    assert job_id_of(tmp_path / name) == expected
