"""The node survey of the orchestrator, with real survey processes on this machine."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.plan.plan import Plan, RunFacts
from launcher.plan.ports import OFFSETS
from launcher.programs.port_claims import RESERVATION_PREFIX, read_claimed_ports, try_reserve_ports
from launcher.run.before.node_facts import NodeAnswer
from launcher.run.before.nodes_survey import (
    PortReservation,
    agreed_offset,
    needs_survey,
    node_addresses,
    port_offset,
    possible_offsets,
    read_node_answers,
    run_node_survey,
)
from launcher.run.signals import OrchestratorSignals
from launcher.rundir.files import plan_files
from launcher.steps.local_steps import LocalSteps
from launcher.steps.slurm_steps import SlurmSteps
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import ROOT, clean_environment, job_spec, plan_of
from tests.support.ports import free_port


def plan_with(*ports: int) -> Plan:
    """A plan with one process and one port on each node."""
    count = len(ports)
    plan = plan_of(job_spec(resources={"nodes": count}, workers=[{"command": "x", "count": count}]), local=True)
    tasks = tuple(
        dataclasses.replace(planned, ports={"http": port}, task=dataclasses.replace(planned.task, node_index=index))
        for index, (planned, port) in enumerate(zip(plan.tasks, ports, strict=True))
    )
    return dataclasses.replace(plan, tasks=tasks)


class Job:
    """A job that reserves its ports with real processes."""

    def __init__(self, folder: Path, plan: Plan, job_id: str = "0") -> None:
        folder.mkdir()
        for name, text in plan_files(plan, "").items():
            (folder / name).write_text(text)
        hosts = tuple(f"{folder.name}-n{index}" for index in range(plan.nodes))
        self.plan, self.facts = plan, RunFacts(job_id, folder, hosts)
        self.reservation = PortReservation()
        python = dataclasses.replace(plan, python=sys.executable)
        self.steps = LocalSteps(python, self.facts)

    def survey(self) -> RunFacts:
        self.facts, self.reservation = run_node_survey(self.plan, self.facts, self.steps, OrchestratorSignals())
        return self.facts


@pytest.fixture(autouse=True)
def long_survey_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slow nodes enough time, so that an unnecessary wait becomes visible."""
    monkeypatch.setattr("launcher.run.before.nodes_survey.SURVEY_S", 120.0)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    started: list[Job] = []

    def make_job(plan: Plan, job_id: str = "0") -> Job:
        started.append(Job(tmp_path / f"job{len(started)}", plan, job_id))
        return started[-1]

    yield make_job
    for job in started:
        job.reservation.terminate()
        job.reservation.release(30.0)


def test_ports_are_released_at_the_end(jobs: Any) -> None:
    port = free_port()
    job = jobs(plan_with(port))
    job.survey()
    assert port in read_claimed_ports((RESERVATION_PREFIX,))
    job.reservation.release(30.0)
    job.reservation.release(30.0)
    assert port not in read_claimed_ports()


def test_a_second_round_finds_an_offset_that_is_free_on_all_nodes(jobs: Any) -> None:
    port = free_port()
    held = try_reserve_ports([port + OFFSETS[0]]), try_reserve_ports([port + 1 + OFFSETS[1]])
    job = jobs(plan_with(port, port + 1))
    assert job.survey().port_offset == OFFSETS[2]  # the nodes first choose the second and the first offset
    assert {answer.round for answer in read_node_answers(job.plan, job.facts, 1).values()} == {1}
    assert port + OFFSETS[1] not in read_claimed_ports()
    assert all(held)


def test_ports_json_has_the_real_ports(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    held = try_reserve_ports([port])
    job = jobs(plan_with(port))
    job.survey()
    ports_file = json.loads((job.facts.run_dir / "ports.json").read_text())
    assert held
    assert (ports_file["port_offset"], ports_file["processes"][0]["ports"]) == (17, {"http": port + 17})
    assert capfd.readouterr().out.endswith("Ports of the job: those of the plan + 17\n")


def test_a_job_without_a_free_offset_continues_with_a_message(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    held = [try_reserve_ports([port + offset]) for offset in OFFSETS]
    start = time.monotonic()
    assert jobs(plan_with(port)).survey().port_offset == 0
    assert "No port offset leaves all ports of the job free on its nodes" in capfd.readouterr().out
    assert all(held)
    assert time.monotonic() - start < 60.0  # it has not waited for an impossible answer


def test_a_node_that_cannot_answer_does_not_delay_the_others(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    held = try_reserve_ports([port])
    job = jobs(plan_with(port, port + 1))
    (job.facts.run_dir / run_files.NODES_DIR / "job0-n1.json").mkdir(parents=True)
    start = time.monotonic()
    assert job.survey().port_offset == 17
    assert time.monotonic() - start < 60.0
    assert held
    assert [line.split(" ", 2)[2] for line in capfd.readouterr().out.splitlines()] == [
        "No answer to the node survey from job0-n1: the ports of the job were not checked there",
        "Ports of the job: those of the plan + 17",
    ]


SURVEY_PROGRAM = """
import sys
from pathlib import Path
import launcher.run.before.nodes_survey
from tests.launcher.run.before.test_nodes_survey import Job, plan_with
launcher.run.before.nodes_survey.SURVEY_S = 300.0
job = Job(Path(sys.argv[1]), plan_with(*map(int, sys.argv[2:])))
print(job.survey().port_offset, flush=True)
sys.stdin.read()
"""


def test_concurrent_jobs_on_several_nodes_get_different_ports(tmp_path: Path) -> None:
    """The jobs have the same seed, machine and ports, so their nodes compete."""
    port = free_port()
    ports = [str(port + index) for index in range(3)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SURVEY_PROGRAM, str(tmp_path / f"job{index}"), *ports],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    try:
        offsets = [offset_of(process) for process in processes]
        assert len(set(offsets)) == len(processes)
        wanted = {int(port) + offset for port in ports for offset in offsets}
        assert wanted <= read_claimed_ports((RESERVATION_PREFIX,))
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)


def offset_of(process: "subprocess.Popen[str]") -> int:
    """The offset that a job prints before it waits."""
    assert process.stdout is not None
    watchdog = threading.Timer(400.0, process.kill)
    watchdog.start()
    try:
        line = next((line for line in process.stdout if line.strip().isdigit()), None)
    finally:
        watchdog.cancel()
    assert line is not None, "the job has ended"
    return int(line)


def test_one_step_surveys_all_slurm_nodes(slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    port = free_port()
    plan = dataclasses.replace(plan_with(port, port + 1), python=sys.executable, workdir=str(tmp_path))
    for name, text in plan_files(plan, "").items():
        (tmp_path / name).write_text(text)
    facts = RunFacts("4459", tmp_path, ("cn00", "cn01"))
    new_facts, reservation = run_node_survey(plan, facts, SlurmSteps(plan, facts), OrchestratorSignals())
    try:
        assert {port + new_facts.port_offset, port + 1 + new_facts.port_offset} <= read_claimed_ports(
            (RESERVATION_PREFIX,)
        )
        (call,) = slurm.calls("srun")
        assert (call["options"]["nodelist"], call["options"]["job-name"]) == ("cn00,cn01", "nodes")
    finally:
        reservation.release(30.0)
    assert {port + new_facts.port_offset, port + 1 + new_facts.port_offset}.isdisjoint(
        read_claimed_ports((RESERVATION_PREFIX,))
    )
    assert (tmp_path / "log.err").read_text() == ""


# -- answers of the nodes ------------------------------------------------------------------------


def facts_in(folder: Path) -> RunFacts:
    return RunFacts("4459", folder, ("cn00", "cn01"))


def test_busy_ports_exclude_their_offset(tmp_path: Path) -> None:
    plan, facts = plan_with(6100, 6100), facts_in(tmp_path)
    assert needs_survey(plan)
    first = possible_offsets(plan, facts, {})
    assert sorted(first) == sorted(OFFSETS)
    assert possible_offsets(plan, facts, {"cn01": NodeAnswer(attempt=0, round=0, busy=(6100 + first[0],))}) == first[1:]
    assert port_offset(plan, facts, {}) == first[0]


@pytest.mark.parametrize(
    ("held", "offset"),
    [((17, 17), 17), ((0, 0), 0), ((17, 0), None), ((None, None), None), ((17,), 17), ((), None)],
)
def test_an_offset_is_agreed_if_all_nodes_hold_it(
    held: tuple[int | None, ...], offset: int | None, tmp_path: Path
) -> None:
    answers = {f"cn0{node}": NodeAnswer(attempt=0, round=0, offset=own) for node, own in enumerate(held)}
    assert agreed_offset(facts_in(tmp_path), (0, 1), answers) == offset


def test_a_node_without_an_answer_keeps_its_host_name(tmp_path: Path) -> None:
    facts = RunFacts("4459", tmp_path, tuple(f"cn0{index}" for index in range(5)))
    plan = plan_with(*[6100] * 5)
    (tmp_path / run_files.NODES_DIR).mkdir()
    answers = {
        "cn01": {"attempt": 0, "round": 1, "address": "10.0.0.1", "busy": []},
        "cn02": {"attempt": 1, "round": 1, "address": "10.0.0.2", "busy": []},
        "cn03": {"attempt": 0, "round": 1, "problem": "cn03: no ib0"},
        "cn04": {"attempt": 0, "round": 0, "address": "10.0.0.4"},
    }
    for name, entry in answers.items():
        run_files.write_json(tmp_path / run_files.NODES_DIR / f"{name}.json", entry)
    read_answers = read_node_answers(plan, facts, 1)
    assert node_addresses(facts, read_answers) == ("cn00", "10.0.0.1", "cn02", "cn03", "cn04")
