"""What squeue and sacct of Slurm 22.05, 24.11 and 26.05 print for the same jobs."""

from pathlib import Path

import pytest

from exporter.slurm.accounting import Attempt, parse_accounting, parse_history
from exporter.slurm.queue import AttemptSnapshot, GarbledAnswerError, QueueParser, QueueRow, parse_queue
from exporter.slurm.states import (
    MOST_TASKS,
    array_of,
    base_state,
    is_part_of,
    parse_duration,
    task_ids,
    tells_all_tasks,
)

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = ("22.05.8", "24.11.5", "26.05.5")


@pytest.fixture(params=VERSIONS)
def rows(request: pytest.FixtureRequest) -> dict[str, QueueRow]:
    text = (SAMPLES / f"squeue.{request.param}.txt").read_text(encoding="utf-8")
    return {row.job_id: row for row in parse_queue(text)}


@pytest.fixture(params=VERSIONS)
def attempts(request: pytest.FixtureRequest) -> dict[str, Attempt]:
    text = (SAMPLES / f"sacct.{request.param}.txt").read_text(encoding="utf-8")
    return {attempt.job_id: attempt for attempt in parse_accounting(text)}


def test_every_row_of_every_version_is_read(rows: dict[str, QueueRow]) -> None:
    assert {job_id: row.snapshot.state for job_id, row in rows.items()} == {
        "9": "CANCELLED",
        "10_4": "COMPLETED",
        "20+0": "COMPLETED",
        "14": "COMPLETED",
        **dict.fromkeys(("15", "16", "17", "33", "11_[1-3,7,10,13,16,19%2]"), "PENDING"),
        "12": "RUNNING",
        "1": "RUNNING",
        "13": "RUNNING",
        "19": "RUNNING",
        "25": "SUSPENDED",
        "4": "FAILED",
        "32": "NODE_FAIL",
        "6": "OUT_OF_MEMORY",
    }
    assert rows["13"].name == 'a|b"c d \\\\ $(id) {x}'
    assert rows["14"].name == "naïve→"
    assert rows["17"].snapshot.reason == "DependencyNeverSatisfied"
    assert rows["33"].snapshot.restarts == rows["12"].snapshot.restarts == 1
    assert (rows["1"].snapshot.limit_s, rows["19"].snapshot.limit_s) == (60.0, None)


def test_forecasts_and_limits_are_no_times_of_a_job(rows: dict[str, QueueRow]) -> None:
    waiting, running, cancelled = (rows[job_id].snapshot for job_id in ("15", "1", "9"))
    assert (waiting.started, waiting.ended) == (None, None)  # `--begin`: squeue prints when it could start
    assert running.started is not None
    assert running.ended is None
    assert cancelled.started is None
    assert cancelled.ended is not None


def test_a_waiting_job_tells_what_it_asks_for_and_waits_for(rows: dict[str, QueueRow]) -> None:
    waiting, never, running = rows["15"], rows["17"], rows["12"]
    assert waiting.expected_start is not None
    assert (waiting.node_count, waiting.nodes, waiting.dependency) == (1, "", "")
    assert never.dependency.startswith("afterok:")
    assert (never.expected_start, running.expected_start) == (None, None)
    assert (running.user, running.account, running.qos, running.nodes[:4]) == ("ada", "", "normal", "node")


def row(job_id: str = "7", state: str = "RUNNING", name: str = "job", output: str = "/dev/null") -> str:
    return f"{job_id}|{state}|None|100|110|N/A|5:00|0|n1|gpu|cpu=4|7|ada|lab|normal|1|(null)|{output}|{name}|\n"


@pytest.mark.parametrize(("text", "limit_s"), [("5:00", 300.0), ("UNLIMITED", None), ("365-00:00:00", None)])
def test_a_job_without_a_limit_has_none_also_after_its_start(text: str, limit_s: float | None) -> None:
    (found,) = parse_queue(row().replace("|5:00|", f"|{text}|"))
    assert found.snapshot.limit_s == limit_s


def test_a_name_may_have_lines_and_an_output_file_has_its_patterns_filled() -> None:
    found = parse_queue("CLUSTER: other\n" + row(name="two\nlines") + row("4459_3", output="/logs/%x-%A_%12a-%4j.%4u"))
    assert [entry.name for entry in found] == ["two\nlines", "job"]
    assert [entry.output for entry in found] == [None, "/logs/job-4459_0000000003-0007.ada"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (row().removesuffix("|\n"), "its last line is not complete"),
        (row() + row(job_id="9_[...]"), "1 of its 2 lines cannot be parsed"),
        ("oops\n" + row(), "1 of its 2 lines"),
        (row().replace("|0|n1", "|many|n1"), "1 of its 1 lines"),
        ("CLUSTER: a\nCLUSTER: b\n", "several clusters; set SLURM_CLUSTERS"),
    ],
)
def test_a_damaged_answer_is_no_answer(text: str, problem: str) -> None:
    with pytest.raises(GarbledAnswerError, match=problem):
        parse_queue(text)


@pytest.mark.parametrize("indexes", ["0-150000", "1,3,5-...%2"])
def test_an_array_with_tasks_that_cannot_be_told_is_no_damage(indexes: str) -> None:
    assert [found.job_id for found in parse_queue(row() + row(f"9_[{indexes}]"))] == ["7", f"9_[{indexes}]"]


def test_one_damaged_line_in_hundreds_is_left_out() -> None:
    assert len(parse_queue("oops\n" + row() * 200)) == 200


def test_a_line_that_is_the_same_gives_the_same_row() -> None:
    parser = QueueParser()
    (first, _), (again, other) = parser.parse(row() + row("2")), parser.parse(row() + row("2", "PENDING"))
    assert again is first
    assert other.snapshot.state == "PENDING"


def test_what_waits_for_a_job_that_can_never_start_can_never_start() -> None:
    def waiting(job_id: str, reason: str, dependency: str) -> str:
        return row(job_id, "PENDING").replace("|None|", f"|{reason}|", 1).replace("|(null)|", f"|{dependency}|", 1)

    text = (
        waiting("4", "Dependency", "afterany:3(unfulfilled)")
        + waiting("3", "Dependency", "afterok:1(unfulfilled),afterok:2_*(unfulfilled)")
        + waiting("2_[0-3]", "DependencyNeverSatisfied", "afterok:9(failed)")
        + waiting("5", "Dependency", "afterok:2_*(unfulfilled)?afterok:7(unfulfilled)")  # 7 will do
        + waiting("6", "Dependency", "afterok:23(unfulfilled)")
        + row("8", "RUNNING").replace("|(null)|", "|afterok:2(unfulfilled)|")
    )
    never = [entry.job_id for entry in parse_queue(text) if entry.snapshot.reason == "DependencyNeverSatisfied"]
    assert never == ["4", "3", "2_[0-3]"]


@pytest.mark.parametrize(("of_job", "of_step", "known"), [(0, 700, 700.0), (2**64 - 2, 0, None), (900, 700, 900.0)])
def test_energy_is_that_of_the_largest_step_where_slurm_knows_it(
    of_job: int, of_step: int, known: float | None
) -> None:
    line = "{id}|ada|COMPLETED|0:0|100|110|150|40|5|2|00:01|cpu=2,energy={energy}||job\n"
    (found,) = parse_accounting(line.format(id="7", energy=of_job) + line.format(id="7.batch", energy=of_step))
    assert found.figures().energy_j == known


def test_ended_jobs_of_accounting_are_rows_like_those_of_the_queue() -> None:
    text = "gpu|lab|normal|2|n[1-2]|7|ada|TIMEOUT|0:0|100|110|150|40|5|2|00:01|cpu=2,gres/gpu=4||a|b\n"
    ((row, _),) = parse_history("oops\n" + text)
    assert (row.job_id, row.user, row.partition, row.nodes, row.node_count) == ("7", "ada", "gpu", "n[1-2]", 2)
    assert (row.name, row.resources) == ("a|b", "cpu=2,gres/gpu=4")
    assert row.snapshot == AttemptSnapshot("TIMEOUT", 100.0, 110.0, 150.0, limit_s=300.0)


def test_figures_are_those_of_seff() -> None:
    text = (SAMPLES / "sacct.22.05.8.txt").read_text(encoding="utf-8")
    found = {attempt.job_id: attempt.figures() for attempt in parse_accounting(text)}
    figures = found["2"]  # seff: CPU 31.25%, memory 122.13 MB of 600.00 MB, wall clock 00:00:08
    assert (figures.elapsed_s, figures.limit_s, figures.cpu_ratio) == (8.0, 600.0, 0.3125)
    assert (figures.memory_bytes, figures.memory_requested_bytes) == (128061440, 600 * 1024**2)
    assert found["1"].cpu_ratio == 0.0  # measured: it slept
    short = found["3"]  # seff prints 0.00 MB for what was never sampled
    assert (short.memory_bytes, short.exit_code) == (None, "3:0")
    never = found["9"]  # seff prints 0.00% of a job that never ran
    assert (never.cpu_ratio, never.memory_bytes, never.memory_requested_bytes) == (None, None, None)


def test_attempts_have_their_ends_and_steps(attempts: dict[str, Attempt]) -> None:
    assert {job_id: attempt.snapshot.state for job_id, attempt in attempts.items()} == {
        "1": "TIMEOUT",
        "2": "COMPLETED",
        "3": "FAILED",
        "7": "COMPLETED",
        "9": "CANCELLED",
        "13": "COMPLETED",
        "15": "PENDING",
        "20+0": "COMPLETED",
        "10_5": "COMPLETED",
        "11_[1-3,7,10,13,16,19%2]": "PENDING",
    }
    assert {job_id: len(attempt.steps) for job_id, attempt in attempts.items()} == {
        "1": 2,
        "2": 3,
        "3": 1,
        "7": 2,
        "9": 0,
        "13": 1,
        "15": 0,
        "20+0": 2,
        "10_5": 1,
        "11_[1-3,7,10,13,16,19%2]": 0,
    }
    assert attempts["9"].snapshot.started is None
    assert [attempts[job_id].is_complete for job_id in ("1", "9", "15")] == [True, True, False]
    unfinished = attempts["1"]._replace(steps=(attempts["1"].steps[0]._replace(ended=None),))
    assert not unfinished.is_complete  # the job's row comes 1 to 2 s before those of its steps


def test_each_attempt_has_its_own_steps() -> None:
    first = (
        "12|ada|{}|0:0|100|100|104|4|5|1|00:01|mem=50M||job\n12.batch||CANCELLED|0:0|100|100|{}|4||1|00:01|||batch\n"
    )
    requeued, running = parse_accounting(first.format("REQUEUED", 105) + first.format("RUNNING", "Unknown"))
    assert (len(requeued.steps), len(running.steps)) == (1, 1)
    assert (requeued.steps[0].ended, running.steps[0].ended) == (105.0, None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4459_[1-3%2]", ("4459_1", "4459_2", "4459_3")),
        ("11_[1-3,7,10-19:3%2]", tuple(f"11_{index}" for index in (1, 2, 3, 7, 10, 13, 16, 19))),
        ("4459_3", ("4459_3",)),
        ("20+0", ("20+0",)),
    ],
)
def test_array_ids_name_their_tasks(text: str, found: tuple[str, ...]) -> None:
    assert task_ids(text) == found
    assert all(is_part_of(task, array_of(text)) for task in found)
    assert not is_part_of("44590", "4459")


@pytest.mark.parametrize(
    ("text", "count", "last"),
    [
        ("11_[1,3,41,4...%2]", 3, "11_41"),  # 4, 43 or 4000
        ("11_[1,3,41-4...]", 3, "11_41"),
        ("11_[0-98:...]", 1, "11_0"),
        ("11_[0-4000000]", MOST_TASKS, f"11_{MOST_TASKS - 1}"),
    ],
)
def test_tasks_that_an_id_does_not_tell_are_left_out(text: str, count: int, last: str) -> None:
    found = task_ids(text)
    assert (len(found), found[-1], tells_all_tasks(text)) == (count, last, False)
    assert tells_all_tasks("11_[0-99999]")
    assert tells_all_tasks("11")


@pytest.mark.parametrize("text", ["11_[...]", "11_[a]", "11_[]", "11_[1,]"])
def test_a_list_of_tasks_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="array indexes"):
        task_ids(text)


def test_states_and_times_are_read_in_slurms_words() -> None:
    words = ("CANCELLED by 1000", "COMPLETING", "REQUEUE_HOLD", "REVOKED", "SOMETHING_NEW")
    assert [*map(base_state, words)] == ["CANCELLED", "RUNNING", "PENDING", "REVOKED", "SOMETHING_NEW"]
    texts = ("5:00", "1-02:03:04", "00:10.481", "30", "UNLIMITED", "INVALID")
    assert [*map(parse_duration, texts)] == [300.0, 93784.0, 10.0, 30.0, None, None]
