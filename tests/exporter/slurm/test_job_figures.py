"""Figures of ended jobs, from what sacct of Slurm 22.05 prints and seff calculates."""

from pathlib import Path

import pytest

from exporter.contract.slurm_accounting import GpuTime, SlurmAccounting
from exporter.slurm.job_figures import JobAttempt, is_complete, job_accounting, own_attempts, parse_job_accounting

TEXT = (Path(__file__).parent / "samples" / "sacct-figures.22.05.8.txt").read_text(encoding="utf-8")
SUBMITTED = 1795395079.0
FIRST = (
    "0:0||{energy}|00:01|12|ada|{state}|0:0|{submitted}|{submitted}|{end}|4|5|2|00:01|cpu=2,gres/gpu=3,gres/gpu:h100=2,mem=50M||job\n"
    "|1048576|{energy}|00:01|12.batch||CANCELLED|0:0|{submitted}|{submitted}|{end}|4||2|00:01||mem=2M|batch\n"
)


def attempts(
    job_id: str, text: str = TEXT, since: float = SUBMITTED, until: float = SUBMITTED
) -> tuple[JobAttempt, ...]:
    return own_attempts(parse_job_accounting(text), job_id, "ada", since, until)


def figures(job_id: str) -> SlurmAccounting:
    return job_accounting(attempts(job_id), has_nodes_alone=False)


def row(state: str = "COMPLETED", submitted: int = 100, end: int | str = 104, energy: int = 0) -> str:
    return FIRST.format(state=state, submitted=submitted, end=end, energy=energy)


def test_the_figures_are_those_of_sacct_and_seff() -> None:
    found = figures("2")  # seff: CPU 31.25%, memory 122.13 MB of 600.00 MB
    assert (found.state, found.exit_code, found.derived_exit_code) == ("COMPLETED", "0:0", "0:0")
    assert (found.cpu_ratio, found.cpu_s, found.cpus, found.elapsed_s, found.limit_s) == (0.3125, 10.481, 4, 8.0, 600.0)
    assert (found.memory_bytes, found.memory_requested_bytes) == (128061440, 600 * 1024**2)
    assert found.allocated == "billing=4,cpu=4,gres/gpu=4,mem=600M,node=2"
    assert found.gpu_time == (GpuTime(None, 32.0),)
    assert (found.complete, found.lower_bound, found.attempts) == (True, False, 1)


def test_what_was_not_measured_is_unknown() -> None:
    short, never = figures("3"), figures("9")
    assert (short.memory_bytes, short.max_rss_bytes, short.gpu_time, short.slurm_energy_j) == (None,) * 4
    assert (never.cpu_ratio, never.cpu_s, never.memory_requested_bytes, never.allocated) == (None,) * 4


def test_the_cpu_time_of_a_job_that_was_killed_is_a_lower_bound() -> None:
    assert figures("1").lower_bound
    assert figures("7").derived_exit_code == "0:125"  # a step ran out of memory, and the script went on


def test_components_of_a_job_are_added() -> None:
    found, (first, second) = figures("20"), attempts("20")
    assert (first.attempt.job_id, second.attempt.job_id, found.attempts) == ("20+0", "20+1", 1)
    assert found.cpus == first.attempt.cpus + second.attempt.cpus
    assert found.allocated == f"{first.attempt.resources} + {second.attempt.resources}"


def test_gpu_hours_are_of_all_attempts_and_by_type() -> None:
    text = row("NODE_FAIL") + row(submitted=110, end=114)
    found = job_accounting(attempts("12", text, 99, 120), has_nodes_alone=False)
    assert (found.state, found.attempts, found.max_rss_bytes) == ("COMPLETED", 2, 1048576.0)
    assert found.gpu_time == (GpuTime("h100", 16.0), GpuTime(None, 8.0))


@pytest.mark.parametrize(("since", "until"), [(101, 120), (50, 99)])
def test_another_job_with_this_id_is_left_out(since: float, until: float) -> None:
    assert attempts("12", row(), since, until) == ()
    assert attempts("12", row().replace("ada", "bob"), 0, 200) == ()
    assert attempts("1", row(), 0, 200) == ()


def test_accounting_is_complete_with_the_ends_of_all_steps() -> None:
    job, step, _ = row().split("\n")
    assert is_complete(attempts("12", f"{job}\n{step}\n", 0, 200))
    assert not is_complete(attempts("12", f"{job}\n{step.replace('|104|', '|Unknown|')}\n", 0, 200))
    assert not is_complete(attempts("12", row("RUNNING", end="Unknown"), 0, 200))
    assert not is_complete(())


@pytest.mark.parametrize(("energy", "alone", "shown"), [(5000, True, 5000.0), (5000, False, None), (0, True, None)])
def test_energy_of_nodes_is_shown_if_it_is_known_and_of_this_job(energy: int, alone: bool, shown: float | None) -> None:
    found = job_accounting(attempts("12", row(energy=energy), 0, 200), has_nodes_alone=alone)
    assert found.slurm_energy_j == shown
    unknown = job_accounting(attempts("12", row(energy=2**64 - 2), 0, 200), has_nodes_alone=True)
    assert unknown.slurm_energy_j is None
