"""Lines of Slurm daemons and of srun about the end of a job."""

from datetime import datetime

import pytest

from exporter.workers.slurm_end_notice import (
    SlurmEndNotice,
    has_timed_out,
    parse_oom_kills,
    parse_preemption_end,
    parse_slurm_end_notice,
    parse_time_limit_end,
)

OOM_KILL = "error: Detected 1 oom_kill event in StepId=2.1. Some of the step tasks have been OOM Killed.\n"
AT = "slurmstepd-rs1: error: *** JOB 2 ON rs1 CANCELLED AT 2026-11-21T12:02:53"

AT_26_05 = "[2026-11-22T09:52:22.436] error: *** JOB 2 ON rs1 CANCELLED AT 2026-11-22T09:52:22"


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (f"{AT} ***", SlurmEndNotice("cancelled", "Slurm: cancelled")),
        (f"{AT} DUE TO TIME LIMIT ***", SlurmEndNotice("time_limit", "Slurm: the time limit was reached")),
        (f"{AT} DUE TO PREEMPTION ***", SlurmEndNotice("preempted", "Slurm: preempted by another job")),
        (f"{AT} DUE TO JOB REQUEUE ***", SlurmEndNotice("cancelled", "Slurm: requeued; the job will run again")),
        (
            f"{AT} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            SlurmEndNotice("node_failure", "Slurm: a node has failed"),
        ),
        (f"{AT} DUE TO LUNCH ***", SlurmEndNotice("cancelled", "Slurm: cancelled due to lunch")),
        (f"{AT_26_05} DUE to SIGNAL Terminated ***", SlurmEndNotice("cancelled", "Slurm: cancelled")),
        (f"{AT_26_05} DUE TO PREEMPTION ***", SlurmEndNotice("preempted", "Slurm: preempted by another job")),
        (f"{AT_26_05.replace('JOB 2', 'STEP 2.1')} DUE to SIGNAL Terminated ***", SlurmEndNotice()),
        ("slurmstepd: error: *** STEP 2.1 ON rs1 CANCELLED AT 2026-11-21T12:02:53 ***", SlurmEndNotice()),
        ("srun: error: rs1: task 0: Terminated", SlurmEndNotice()),
        ("", SlurmEndNotice()),
    ],
)
def test_the_line_of_the_batch_step_gives_the_reason(line: str, notice: SlurmEndNotice) -> None:
    assert parse_slurm_end_notice(f"noise\n{line}\nsrun: error: rs1: task 0: Terminated\n") == notice


@pytest.mark.parametrize("words", ["1 oom_kill event", "1 oom_kill events", "1 oom-kill event(s)"])
def test_kills_for_lack_of_memory_are_those_of_one_step(words: str) -> None:
    line = "slurmstepd-rs1: error: Detected {} in StepId={}. Some of the step tasks have been OOM Killed.\n"
    text = "".join(line.format(words, step) for step in ("2.1", "2.10", "12.1", "2.1"))
    assert [parse_oom_kills(text, step, "rs1", is_only_node=True) for step in ("2.1", "2.2")] == [2, 0]


@pytest.mark.parametrize(
    "text", [f"slurmstepd-rs1: {OOM_KILL}", f"slurmstepd: {OOM_KILL}srun: error: rs1: tasks 2-3: Out Of Memory\n"]
)
def test_kills_for_lack_of_memory_are_those_of_one_node(text: str) -> None:
    text += "srun: error: rs2: task 0: Killed\n"
    assert [parse_oom_kills(text, "2.1", node, is_only_node=False) for node in ("rs1", "rs2")] == [1, 0]


def test_kills_for_lack_of_memory_on_an_unknown_node_count_only_in_a_step_of_one_node() -> None:
    kills = [parse_oom_kills(f"slurmstepd: {OOM_KILL}", "2.1", "rs1", is_only_node=alone) for alone in (True, False)]
    assert kills == [1, 0]


def test_srun_names_the_nodes_that_have_failed() -> None:
    text = (
        "srun: error: Node failure on rs8\nsrun: error: Node failure on rs8\nsrun: error: Node failure on rs9\n"
        f"{AT} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
    )
    assert parse_slurm_end_notice(text) == SlurmEndNotice(
        "node_failure", "Slurm: node rs8, rs9 has failed", ("rs8", "rs9")
    )


def test_the_last_of_several_notices_counts() -> None:
    assert parse_slurm_end_notice(f"{AT} DUE TO PREEMPTION ***\n{AT} DUE TO TIME LIMIT ***\n").reason == "time_limit"


def job_text(start: str, end: str, preempted: str, suspended: str = "None") -> str:
    """Part of the output of `scontrol show job`."""
    times = f"   StartTime={start} EndTime={end} Deadline=N/A\n   PreemptTime={preempted} Secs=0\n"
    times += f"   SuspendTime={suspended} SecsPreSuspend=0\n"
    return f"   JobState=RUNNING Reason=None\n   RunTime=00:01:00\n{times}"


NOON, LATER, TOMORROW = "2026-11-21T12:00:00", "2026-11-21T12:02:08", "2026-11-22T12:00:00"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (job_text(NOON, LATER, "2026-11-21T12:02:00"), LATER),
        (job_text(NOON, TOMORROW, "None"), None),
        (job_text(NOON, TOMORROW, "2026-11-21T12:02:00"), None),
        (job_text(NOON, LATER, "2026-11-21T12:01:00", "2026-11-21T12:01:30"), None),
        (job_text(NOON, LATER, "2026-11-21T12:02:00", "2026-11-21T12:01:00"), LATER),
        (job_text(NOON, LATER, "2026-11-21T11:00:00"), None),
        (job_text(NOON, "Unknown", "2026-11-21T12:02:00"), None),
        ("JobState=RUNNING Reason=None", None),
    ],
    ids=[
        *("in its grace time", "not preempted", "suspended, and resumed", "the same near its limit"),
        *("suspended before it", "before a requeue", "requeued", "old Slurm"),
    ],
)
def test_the_end_of_the_grace_time_of_a_preemption_is_known(text: str, end: str | None) -> None:
    assert parse_preemption_end(text) == (None if end is None else datetime.fromisoformat(end).timestamp())


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (job_text(NOON, TOMORROW, "None"), TOMORROW),
        (job_text(NOON, TOMORROW, "None") + job_text(NOON, LATER, "None"), LATER),  # two components
        (job_text(NOON, LATER, "2026-11-21T12:01:00", "2026-11-21T12:01:30"), LATER),  # which the suspension moved
        (job_text(NOON, LATER, "2026-11-21T12:02:00"), None),  # when the grace time of a preemption ends
        (job_text(NOON, LATER, "None").replace("RUNNING", "COMPLETING"), None),
        (job_text(NOON, "Unknown", "None"), None),
        (job_text(NOON, "Unknown", "None").replace("RunTime", "TimeLimit=UNLIMITED RunTime"), "2027-11-21T12:00:00"),
        (job_text(NOON, "2026-11-31T12:00:00", "None"), None),
        ("", None),
    ],
)
def test_the_end_of_the_time_limit_is_known(text: str, end: str | None) -> None:
    assert parse_time_limit_end(text) == (None if end is None else datetime.fromisoformat(end).timestamp())


@pytest.mark.parametrize(
    ("text", "timed_out"),
    [
        ("   JobState=RUNNING Reason=None Dependency=(null)\n", False),
        ("   JobState=COMPLETING Reason=None Dependency=(null)\n", False),
        ("   JobState=COMPLETING Reason=TimeLimit Dependency=(null)\n", True),
        ("   JobState=TIMEOUT Reason=TimeLimit Dependency=(null)\n", True),
        ("   JobState=RUNNING Reason=TimeLimit Dependency=(null)\n", False),
    ],
    ids=["running", "cancelled", "being ended", "ended", "requeued, and running"],
)
def test_a_job_ended_at_its_time_limit_is_recognized(text: str, timed_out: bool) -> None:
    assert has_timed_out(text) is timed_out
