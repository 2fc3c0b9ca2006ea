"""Nodes that do not answer the survey, and jobs that are stopped during it."""

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from launcher.plan.plan import RunFacts
from launcher.run.before.node_facts import DONE_LINE, released_file
from launcher.run.before.nodes_survey import PortReservation, run_node_survey, silence_text
from launcher.run.signals import OrchestratorSignals
from tests.launcher.run.before.test_nodes_survey import facts_in, plan_with
from tests.support.launcher import plan_of, poll


def start_process(*argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


PRINT_DONE = f"printf '{DONE_LINE.decode()}'; "


def test_a_node_whose_own_process_has_ended_is_not_awaited(
    processes: list["subprocess.Popen[bytes]"],
) -> None:
    processes += [
        start_process("sh", "-c", f"{PRINT_DONE} sleep 300"),
        start_process("true"),
        start_process("sh", "-c", "read x; sleep 300"),
    ]
    reservation = PortReservation(processes)
    poll(lambda: reservation.have_answered(2), "two of three nodes")
    assert not reservation.have_answered(3)
    os.killpg(processes[2].pid, signal.SIGKILL)
    poll(lambda: reservation.have_answered(3), "the third")


def test_no_node_is_awaited_after_the_end_of_the_common_step(
    processes: list["subprocess.Popen[bytes]"],
) -> None:
    processes.append(start_process("sh", "-c", f"{PRINT_DONE} sleep 300"))
    reservation = PortReservation(processes)
    poll(lambda: reservation.have_answered(1), "one of two nodes")
    assert not reservation.have_answered(2)
    os.killpg(processes[0].pid, signal.SIGKILL)
    poll(lambda: reservation.have_answered(2), "the end of the step")


def test_release_waits_for_the_end_of_the_processes(
    tmp_path: Path, processes: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.before.nodes_survey.TERMINATE_S", 60.0)
    processes.append(
        start_process("sh", "-c", "trap 'sleep 0.3; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    )
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline() == b"ready\n"
    PortReservation(processes, tmp_path / "released_a0_0").release(0.1)
    assert processes[0].returncode == 0


def test_release_does_not_wait_if_the_job_is_to_end(tmp_path: Path, processes: list["subprocess.Popen[bytes]"]) -> None:
    processes.append(start_process("sleep", "300"))
    start_s = time.monotonic()
    PortReservation(processes, tmp_path / "released_a0_0").release(120.0, lambda: True)
    assert time.monotonic() - start_s < 60.0
    assert (tmp_path / "released_a0_0").exists()
    assert processes[0].poll() is None


@pytest.mark.parametrize(
    ("interface", "ports", "silent", "text"),
    [
        ("ib0", False, ["cn03"], "cn03: its host name is used"),
        ("ib0", True, ["cn03"], "cn03: its host name is used, and the ports of the job were not checked there"),
        (None, True, ["cn03", "cn04"], "cn03, cn04: the ports of the job were not checked there"),
        ("ib0", False, ["cn03", "cn04"], "cn03, cn04: their host names are used"),
    ],
)
def test_the_message_about_silent_nodes_names_the_consequence(
    interface: str | None, ports: bool, silent: list[str], text: str
) -> None:
    plan = plan_with(6100) if ports else plan_of(local=True)
    message = silence_text(dataclasses.replace(plan, network_interface=interface), silent)
    assert message == f"No answer to the node survey from {text}"


class StepsThatKeepPorts:
    """Steps whose nodes never release their ports. The second node holds another offset."""

    def __init__(self, facts: RunFacts, processes: list["subprocess.Popen[bytes]"], *, answers: bool) -> None:
        self._facts, self._processes, self._answers = facts, processes, answers

    def start_survey(self, offsets: Sequence[int], number: int) -> list["subprocess.Popen[bytes]"]:
        folder = self._facts.run_dir / run_files.NODES_DIR
        folder.mkdir(exist_ok=True)
        for host, offset in zip(self._facts.hosts, offsets, strict=False) if self._answers else ():
            run_files.write_json(folder / f"{host}.json", {"attempt": 0, "round": number, "busy": [], "offset": offset})
        self._processes.append(start_process("sh", "-c", f"{PRINT_DONE * 2 if self._answers else ''} sleep 300"))
        return self._processes[-1:]


def test_the_answer_of_a_node_outside_the_plan_does_not_count(
    tmp_path: Path, processes: list["subprocess.Popen[bytes]"], capfd: pytest.CaptureFixture[str]
) -> None:
    """The allocation has two nodes, and the node without ports answers first."""
    facts, plan = facts_in(tmp_path), plan_with(6100)
    (tmp_path / run_files.NODES_DIR).mkdir()
    answer = json.dumps({"attempt": 0, "round": 0, "busy": [], "offset": 34})
    late = f"sleep 0.5; echo '{answer}' > '{tmp_path}/{run_files.NODES_DIR}/cn00.json'; {PRINT_DONE}"

    def start(_offsets: Sequence[int], _number: int) -> list["subprocess.Popen[bytes]"]:
        processes.append(start_process("sh", "-c", f"{PRINT_DONE} {late} sleep 300"))
        return processes

    new_facts, _ = run_node_survey(plan, facts, Mock(start_survey=start), OrchestratorSignals())
    assert new_facts.port_offset == 34
    assert "No answer to the node survey" not in capfd.readouterr().out


@pytest.mark.parametrize("answers", [False, True])
def test_a_job_that_is_stopped_during_the_survey_prints_nothing_about_it(
    answers: bool,
    tmp_path: Path,
    processes: list["subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The signal arrives during the first round, or before the second."""
    for name in ("SURVEY_S", "END_S"):
        monkeypatch.setattr(f"launcher.run.before.nodes_survey.{name}", 120.0)
    facts, signals, start_s = facts_in(tmp_path), OrchestratorSignals(), time.monotonic()
    steps: Any = StepsThatKeepPorts(facts, processes, answers=answers)

    def send_sigterm() -> None:
        poll(lambda: processes and (not answers or released_file(tmp_path, 0, 0).exists()), "the survey")
        signals.end_signal = signal.SIGTERM

    sender = threading.Thread(target=send_sigterm)
    sender.start()
    new_facts, _ = run_node_survey(plan_with(6100, 6100), facts, steps, signals)
    sender.join()
    assert time.monotonic() - start_s < 60.0
    assert (new_facts, len(processes), processes[0].poll()) == (facts, 1, None)
    assert capfd.readouterr().out == ""
