"""What the orchestrator makes of what the nodes have found, of nodes that are played by this machine."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.plan.plan import Plan, RunFacts
from launcher.plan.ports import OFFSETS
from launcher.programs.port_claims import RESERVATION_PREFIX, read_claimed_ports, try_reserve_ports
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
from tests.launcher.run.before.test_node_facts import free_port
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import ROOT, clean_environment, job_spec, plan_of


def plan_with(*ports: int) -> Plan:
    """One process on each node, with a port each."""
    count = len(ports)
    plan = plan_of(job_spec(resources={"nodes": count}, workers=[{"command": "x", "count": count}]), local=True)
    tasks = tuple(
        dataclasses.replace(planned, ports={"http": port}, task=dataclasses.replace(planned.task, node_index=index))
        for index, (planned, port) in enumerate(zip(plan.tasks, ports, strict=True))
    )
    return dataclasses.replace(plan, tasks=tasks)


class Job:
    """A job that looks for its ports with real processes."""

    def __init__(self, folder: Path, plan: Plan, job_id: str = "0") -> None:
        folder.mkdir()
        for name, text in plan_files(plan, "").items():
            (folder / name).write_text(text)
        hosts = tuple(f"{folder.name}-n{index}" for index in range(plan.nodes))
        self.plan, self.facts = plan, RunFacts(job_id, folder, hosts)
        self.reservation = PortReservation()
        python = dataclasses.replace(plan, python=sys.executable)
        self.steps = LocalSteps(python, self.facts)

    def look(self) -> RunFacts:
        self.facts, self.reservation = run_node_survey(self.plan, self.facts, self.steps, OrchestratorSignals())
        return self.facts


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are slow have the time that they need; a job that waits for nothing is seen to have waited."""
    monkeypatch.setattr("launcher.run.before.nodes_survey.SURVEY_S", 120.0)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(plan: Plan, job_id: str = "0") -> Job:
        made.append(Job(tmp_path / f"job{len(made)}", plan, job_id))
        return made[-1]

    yield make
    for job in made:
        job.reservation.terminate()
        job.reservation.release(30.0)


def test_two_jobs_of_one_seed_have_no_port_in_common(jobs: Any) -> None:
    port = free_port()
    plan = plan_with(port, port + 1)
    first, second = jobs(plan).look(), jobs(plan).look()
    assert {first.port_offset, second.port_offset} == {0, OFFSETS[1]}
    wanted = {port + first.port_offset + node for node in (0, 1)} | {port + OFFSETS[1] + node for node in (0, 1)}
    assert wanted <= read_claimed_ports((RESERVATION_PREFIX,))


def test_ports_are_let_go_at_the_end(jobs: Any) -> None:
    port = free_port()
    job = jobs(plan_with(port))
    job.look()
    assert port in read_claimed_ports((RESERVATION_PREFIX,))
    job.reservation.release(30.0)
    job.reservation.release(30.0)
    assert port not in read_claimed_ports()


def test_nodes_on_which_others_are_look_again_for_what_is_free_everywhere(jobs: Any) -> None:
    port = free_port()
    held = try_reserve_ports([port + OFFSETS[0]]), try_reserve_ports([port + 1 + OFFSETS[1]])
    job = jobs(plan_with(port, port + 1))
    assert job.look().port_offset == OFFSETS[2]  # the nodes begin with the second, and with the first
    assert {told["round"] for told in read_node_answers(job.plan, job.facts, 1).values()} == {1}
    assert port + OFFSETS[1] not in read_claimed_ports()
    assert all(held)


def test_ports_json_tells_the_real_ports(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    held = try_reserve_ports([port])
    job = jobs(plan_with(port))
    job.look()
    told = json.loads((job.facts.run_dir / "ports.json").read_text())
    assert held
    assert (told["port_offset"], told["processes"][0]["ports"]) == (17, {"http": port + 17})
    assert capfd.readouterr().out.endswith("Ports of the job: those of the plan + 17\n")


def test_without_a_free_offset_the_job_says_so_and_goes_on(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    held = [try_reserve_ports([port + offset]) for offset in OFFSETS]
    begun = time.monotonic()
    assert jobs(plan_with(port)).look().port_offset == 0
    assert "No offset leaves all ports of the job free on their nodes" in capfd.readouterr().out
    assert all(held)
    assert time.monotonic() - begun < 60.0  # it has not waited for what cannot come


def test_a_node_that_cannot_look_costs_the_others_no_time(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    held = try_reserve_ports([port])
    job = jobs(plan_with(port, port + 1))
    (job.facts.run_dir / run_files.NODES_DIR / "job0-n1.json").mkdir(parents=True)
    begun = time.monotonic()
    assert job.look().port_offset == 17
    assert time.monotonic() - begun < 60.0
    assert held
    assert [line.split(" ", 2)[2] for line in capfd.readouterr().out.splitlines()] == [
        "Nothing is known of job0-n1: the ports of the job are untested there",
        "Ports of the job: those of the plan + 17",
    ]


LOOKING = """
import sys
from pathlib import Path
import launcher.run.before.nodes_survey
from tests.launcher.run.before.test_nodes_survey import Job, plan_with
launcher.run.before.nodes_survey.SURVEY_S = 300.0
job = Job(Path(sys.argv[1]), plan_with(*map(int, sys.argv[2:])))
print(job.look().port_offset, flush=True)
sys.stdin.read()
"""


def test_jobs_of_several_nodes_that_look_at_once_come_to_ports_of_their_own(tmp_path: Path) -> None:
    """One seed, one machine, the same ports: the nodes of each get in the way of those of the others."""
    port = free_port()
    ports = [str(port + index) for index in range(3)]
    looking = [
        subprocess.Popen(
            [sys.executable, "-c", LOOKING, str(tmp_path / f"job{index}"), *ports],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    try:
        offsets = [offset_of(process) for process in looking]
        assert len(set(offsets)) == len(looking)
        wanted = {int(port) + offset for port in ports for offset in offsets}
        assert wanted <= read_claimed_ports((RESERVATION_PREFIX,))
    finally:
        for process in looking:
            process.kill()
            process.communicate(timeout=30)


def offset_of(process: "subprocess.Popen[str]") -> int:
    """What a job says last before it waits."""
    assert process.stdout is not None
    watchdog = threading.Timer(400.0, process.kill)
    watchdog.start()
    try:
        told = next((line for line in process.stdout if line.strip().isdigit()), None)
    finally:
        watchdog.cancel()
    assert told is not None, "it has ended"
    return int(told)


def test_nodes_of_slurm_are_asked_by_one_step(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environment(SLURM_JOB_ID="4459").items():
        monkeypatch.setenv(name, value)
    port = free_port()
    plan = dataclasses.replace(plan_with(port, port + 1), python=sys.executable, workdir=str(tmp_path))
    for name, text in plan_files(plan, "").items():
        (tmp_path / name).write_text(text)
    facts = RunFacts("4459", tmp_path, ("cn00", "cn01"))
    found, reservation = run_node_survey(plan, facts, SlurmSteps(plan, facts), OrchestratorSignals())
    try:
        assert {port + found.port_offset, port + 1 + found.port_offset} <= read_claimed_ports((RESERVATION_PREFIX,))
        (call,) = slurm.calls("srun")
        assert (call["options"]["nodelist"], call["options"]["job-name"]) == ("cn00,cn01", "nodes")
    finally:
        reservation.release(30.0)
    assert {port + found.port_offset, port + 1 + found.port_offset}.isdisjoint(
        read_claimed_ports((RESERVATION_PREFIX,))
    )
    assert (tmp_path / "log.err").read_text() == ""


# -- of what nodes have told ---------------------------------------------------------------------


def facts_in(folder: Path) -> RunFacts:
    return RunFacts("4459", folder, ("cn00", "cn01"))


def test_ports_that_are_taken_move_those_of_the_job(tmp_path: Path) -> None:
    plan, facts = plan_with(6100, 6100), facts_in(tmp_path)
    assert needs_survey(plan)
    first = possible_offsets(plan, facts, {})
    assert sorted(first) == sorted(OFFSETS)
    assert possible_offsets(plan, facts, {"cn01": {"busy": [6100 + first[0]]}}) == first[1:]
    assert port_offset(plan, facts, {}) == first[0]


@pytest.mark.parametrize(
    ("told", "offset"),
    [
        ({"cn00": {"offset": 17}, "cn01": {"offset": 17}}, 17),
        ({"cn00": {"offset": 0}, "cn01": {"offset": 0}}, 0),
        ({"cn00": {"offset": 17}, "cn01": {"offset": 0}}, None),
        ({"cn00": {"offset": None}, "cn01": {"offset": None}}, None),
        ({"cn00": {"offset": 17}}, 17),
        ({}, None),
    ],
)
def test_an_offset_is_that_of_the_job_when_all_nodes_hold_it(
    told: Mapping[str, Mapping[str, object]], offset: int | None, tmp_path: Path
) -> None:
    assert agreed_offset(facts_in(tmp_path), (0, 1), told) == offset


def test_a_node_that_has_told_nothing_keeps_its_name(tmp_path: Path) -> None:
    facts = RunFacts("4459", tmp_path, tuple(f"cn0{index}" for index in range(5)))
    plan = dataclasses.replace(plan_with(*[6100] * 5), network_interface="ib0")
    (tmp_path / run_files.NODES_DIR).mkdir()
    told = {
        "cn01": {"attempt": 0, "round": 1, "address": "10.0.0.1", "busy": []},
        "cn02": {"attempt": 1, "round": 1, "address": "10.0.0.2", "busy": []},
        "cn03": {"attempt": 0, "round": 1, "problem": "cn03: no ib0"},
        "cn04": {"attempt": 0, "round": 0, "address": "10.0.0.4"},
    }
    for name, entry in told.items():
        run_files.write_json(tmp_path / run_files.NODES_DIR / f"{name}.json", entry)
    found = read_node_answers(plan, facts, 1)
    assert node_addresses(plan, facts, found) == ("cn00", "10.0.0.1", "cn02", "cn03", "cn04")
