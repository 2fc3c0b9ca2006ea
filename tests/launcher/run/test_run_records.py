"""Facts about a run of a task that left no record."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.contract import run_files
from launcher.plan.plan import RunFacts
from launcher.run.run_records import RunRecords
from launcher.steps.steps import RunningTask
from tests.support.launcher import job_spec, plan_of


def run_of(folder: Path) -> tuple[RunRecords, RunningTask]:
    """A run that has ended, and the still empty records of its attempt."""
    facts = RunFacts("4459", folder, ("n1",))
    (folder / run_files.WORKERS_DIR).mkdir()
    with subprocess.Popen(["true"]) as process:
        pass
    return RunRecords(facts), RunningTask(plan_of().tasks[0], 0, process)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("code", [-9, 0, 1, 137])
def test_a_step_on_a_lost_node_gives_no_exit_status(tmp_path: Path, code: int, started: bool, exact: bool) -> None:
    records, running_task = run_of(tmp_path)
    if started:
        run_files.write_json(records.path(running_task.planned, 0, "start"), {"schema": run_files.RECORD_SCHEMA})
    assert records.derive_exit(running_task, code, is_exact=exact, is_node_lost=True).keys() == {"end"}


def test_a_step_on_a_working_node_gives_the_exit_status_of_its_task(tmp_path: Path) -> None:
    records, running_task = run_of(tmp_path)
    error = records.derive_exit(running_task, 1, is_exact=False, is_node_lost=False)["error"]
    assert "did not start (status 1)" in str(error)
    run_files.write_json(records.path(running_task.planned, 0, "start"), {"schema": run_files.RECORD_SCHEMA})
    assert records.derive_exit(running_task, 1, is_exact=False, is_node_lost=False)["code"] == 1


@pytest.mark.parametrize(
    ("code", "exact", "known"),
    [
        (0, True, {"code": 0}),
        (0, False, {"code": 0}),
        (3, True, {"code": 3}),
        (139, True, {"code": 139}),  # of a shell, as the wrapper would have recorded it
        (139, False, {"signal": 11}),
        (-9, True, {"signal": 9}),
    ],
)
def test_the_status_is_what_is_known_of_a_run_whose_records_had_no_room(
    code: int, exact: bool, known: dict[str, int], tmp_path: Path
) -> None:
    records, running_task = run_of(tmp_path)
    found = records.derive_exit(running_task, code, is_exact=exact, is_node_lost=False, may_lack_records=True)
    assert {name: value for name, value in found.items() if name != "end"} == {"source": "step", **known}
    lost = records.derive_exit(running_task, code, is_exact=exact, is_node_lost=True, may_lack_records=True)
    assert lost.keys() == {"end"}


def test_tasks_have_started_when_each_has_a_record(tmp_path: Path) -> None:
    records, _ = run_of(tmp_path)
    tasks = plan_of(job_spec(workers=[{"count": 2, "command": "x"}])).tasks
    assert not records.have_started(tasks)
    run_files.write_json(records.path(tasks[0], 0, "start"), {})
    assert not records.have_started(tasks)
    records.path(tasks[0], 0, "start").unlink()
    run_files.write_json(records.path(tasks[1], 0, "exit"), {})
    assert records.have_started(tasks)
    records.path(tasks[1], 0, "exit").unlink()
    assert records.have_started(tasks)


def test_ended_runs_are_those_with_an_exit_record(tmp_path: Path) -> None:
    records, running = run_of(tmp_path)
    runs = {0: running, 1: replace(running, restart=1), 2: replace(running, restart=2)}
    run_files.write_json(records.path(running.planned, 0, "start"), {})
    for restart in (2, 1, 7):
        run_files.write_json(records.path(running.planned, restart, "exit"), {})
    assert records.find_ended(runs) == [1, 2]


@pytest.mark.parametrize(
    ("code", "exact", "wrapper"),
    [
        *((-9, True, "was killed by SIGKILL"), (137, False, "was killed by SIGKILL")),
        *((-11, True, None), (139, False, None), (-9, False, None), (0, False, None)),
    ],
    ids=[
        *("on this machine", "as srun says"),
        *("ended like its worker", "ended like its worker, as srun says"),
        *("of a killed srun", "of an srun whose node has failed"),
    ],
)
def test_a_started_run_without_an_exit_record_has_lost_its_wrapper(
    code: int, exact: bool, wrapper: str | None, tmp_path: Path
) -> None:
    records, running_task = run_of(tmp_path)
    assert "wrapper" not in records.derive_exit(running_task, code, is_exact=exact, is_node_lost=False)
    run_files.write_json(records.path(running_task.planned, 0, "start"), {"schema": run_files.RECORD_SCHEMA})
    assert records.derive_exit(running_task, code, is_exact=exact, is_node_lost=False).get("wrapper") == wrapper


def test_a_task_terminated_before_its_start_is_not_a_launch_failure(tmp_path: Path) -> None:
    records, running_task = run_of(tmp_path)
    assert records.derive_exit(running_task, 1, is_exact=False, is_node_lost=False, was_signalled=True).keys() == {
        "end"
    }
