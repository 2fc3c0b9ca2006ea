"""Nodes that do not answer when they are asked for ports, and jobs that are to end meanwhile."""

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


def told_by(*argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


SAYS = f"printf '{DONE_LINE.decode()}'; "


def test_of_nodes_with_a_process_each_one_that_has_ended_is_not_waited_for(
    processes: list["subprocess.Popen[bytes]"],
) -> None:
    processes += [told_by("sh", "-c", f"{SAYS} sleep 300"), told_by("true"), told_by("sh", "-c", "read x; sleep 300")]
    reservation = PortReservation(processes)
    poll(lambda: reservation.have_answered(2), "two of three nodes")
    assert not reservation.have_answered(3)
    os.killpg(processes[2].pid, signal.SIGKILL)
    poll(lambda: reservation.have_answered(3), "the third")


def test_of_nodes_with_one_step_none_is_waited_for_once_it_has_ended(
    processes: list["subprocess.Popen[bytes]"],
) -> None:
    processes.append(told_by("sh", "-c", f"{SAYS} sleep 300"))
    reservation = PortReservation(processes)
    poll(lambda: reservation.have_answered(1), "one of two nodes")
    assert not reservation.have_answered(2)
    os.killpg(processes[0].pid, signal.SIGKILL)
    poll(lambda: reservation.have_answered(2), "the end of the step")


def test_what_has_to_be_ended_has_gone_before_the_nodes_look_again(
    tmp_path: Path, processes: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.before.nodes_survey.TERMINATE_S", 60.0)
    processes.append(told_by("sh", "-c", "trap 'sleep 0.3; exit 0' TERM; echo ready; while :; do sleep 0.1; done"))
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline() == b"ready\n"
    PortReservation(processes, tmp_path / "released_a0_0").release(0.1)
    assert processes[0].returncode == 0


def test_nodes_are_not_waited_for_once_the_job_is_to_end(
    tmp_path: Path, processes: list["subprocess.Popen[bytes]"]
) -> None:
    processes.append(told_by("sleep", "300"))
    begun = time.monotonic()
    PortReservation(processes, tmp_path / "released_a0_0").release(120.0, lambda: True)
    assert time.monotonic() - begun < 60.0
    assert (tmp_path / "released_a0_0").exists()
    assert processes[0].poll() is None


@pytest.mark.parametrize(
    ("interface", "ports", "silent", "words"),
    [
        ("ib0", False, ["cn03"], "cn03: its host name is used"),
        ("ib0", True, ["cn03"], "cn03: its host name is used, and the ports of the job are untested there"),
        (None, True, ["cn03", "cn04"], "cn03, cn04: the ports of the job are untested there"),
        ("ib0", False, ["cn03", "cn04"], "cn03, cn04: their host names are used"),
    ],
)
def test_a_job_says_what_it_goes_on_with(interface: str | None, ports: bool, silent: list[str], words: str) -> None:
    plan = plan_with(6100) if ports else plan_of(local=True)
    told = silence_text(dataclasses.replace(plan, network_interface=interface), silent)
    assert told == f"Nothing is known of {words}"


class Deaf:
    """Steps whose nodes hold the ports whatever they are told; the second has them with another offset."""

    def __init__(self, facts: RunFacts, processes: list["subprocess.Popen[bytes]"], *, tells: bool) -> None:
        self._facts, self._processes, self._tells = facts, processes, tells

    def start_survey(self, offsets: Sequence[int], number: int) -> list["subprocess.Popen[bytes]"]:
        folder = self._facts.run_dir / run_files.NODES_DIR
        folder.mkdir(exist_ok=True)
        for host, offset in zip(self._facts.hosts, offsets, strict=False) if self._tells else ():
            run_files.write_json(folder / f"{host}.json", {"attempt": 0, "round": number, "busy": [], "offset": offset})
        self._processes.append(told_by("sh", "-c", f"{SAYS * 2 if self._tells else ''} sleep 300"))
        return self._processes[-1:]


def test_a_node_that_the_plan_does_not_need_does_not_answer_for_another(
    tmp_path: Path, processes: list["subprocess.Popen[bytes]"], capfd: pytest.CaptureFixture[str]
) -> None:
    """The allocation has two nodes, and the one without ports is the first to have looked."""
    facts, plan = facts_in(tmp_path), plan_with(6100)
    (tmp_path / run_files.NODES_DIR).mkdir()
    told = json.dumps({"attempt": 0, "round": 0, "busy": [], "offset": 34})
    late = f"sleep 0.5; echo '{told}' > '{tmp_path}/{run_files.NODES_DIR}/cn00.json'; {SAYS}"

    def start(_offsets: Sequence[int], _number: int) -> list["subprocess.Popen[bytes]"]:
        processes.append(told_by("sh", "-c", f"{SAYS} {late} sleep 300"))
        return processes

    found, _ = run_node_survey(plan, facts, Mock(start_survey=start), OrchestratorSignals())
    assert found.port_offset == 34
    assert "Nothing is known" not in capfd.readouterr().out


@pytest.mark.parametrize("tells", [False, True])
def test_a_job_that_is_to_end_while_its_nodes_look_says_nothing_of_them(
    tells: bool,
    tmp_path: Path,
    processes: list["subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It comes while they look, or while they are waited for to look again."""
    for name in ("SURVEY_S", "END_S"):
        monkeypatch.setattr(f"launcher.run.before.nodes_survey.{name}", 120.0)
    facts, signals, begun = facts_in(tmp_path), OrchestratorSignals(), time.monotonic()
    steps: Any = Deaf(facts, processes, tells=tells)

    def end_it() -> None:
        poll(lambda: processes and (not tells or released_file(tmp_path, 0, 0).exists()), "the survey")
        signals.end_signal = signal.SIGTERM

    ending = threading.Thread(target=end_it)
    ending.start()
    found, _ = run_node_survey(plan_with(6100, 6100), facts, steps, signals)
    ending.join()
    assert time.monotonic() - begun < 60.0
    assert (found, len(processes), processes[0].poll()) == (facts, 1, None)
    assert capfd.readouterr().out == ""
