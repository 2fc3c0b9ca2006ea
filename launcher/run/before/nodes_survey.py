"""Node survey: ask each node for its address and reserve the job's ports on it."""

import dataclasses
import functools
import os
import random
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.records import RecordError
from launcher.plan.plan import Plan, RunFacts
from launcher.plan.ports import PORTS_FILE, all_ports, assigned_ports, free_offsets, survey_request
from launcher.run.before.node_facts import DONE_LINE, NodeAnswer, released_file
from launcher.run.job_log import log_line
from launcher.run.job_state import attempt_optional
from launcher.run.signals import OrchestratorSignals
from launcher.steps.steps import Steps

SURVEY_S = 20.0  # wait for the nodes; afterwards the job continues with what it knows
NODES_PER_S = 20  # large jobs get an extra second per this many nodes
PAUSE_S = 0.5  # longest random pause before another round, so that two competing jobs do not retry together
END_S = 5.0  # wait for the nodes to release their ports before the next round
TERMINATE_S = 2.0  # wait for the end of terminated processes

NodeAnswers = Mapping[str, NodeAnswer]  # by host name


class PortReservation:
    """Processes that hold the ports of a job on its nodes until a file exists."""

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"] = (), release_file: Path | None = None) -> None:
        self._processes = processes
        self._release_file = release_file
        self._output = [b""] * len(processes)
        for process in processes:
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)

    def have_answered(self, nodes: int) -> bool:
        """Whether this many nodes have answered, or no process can answer any more."""
        over = [process.poll() is not None for process in self._processes]
        for index, process in enumerate(self._processes):
            if process.stdout is not None:
                self._output[index] += process.stdout.read() or b""
        most = nodes if len(over) == 1 else 1  # one srun serves all nodes; locally each node has a process
        counts = [
            most if has_ended else output.count(DONE_LINE) for has_ended, output in zip(over, self._output, strict=True)
        ]
        return all(over) or sum(counts) >= nodes

    def release(self, wait_s: float = 0.0, is_ending: Callable[[], bool] = lambda: False) -> None:
        """Release the ports, and terminate processes that do not end within ``wait_s``. Safe to call twice.

        The file comes first: srun and slurmstepd write errors to the job's log when a step ends by a signal.
        With ``wait_s`` 0, or when the job is ending (``is_ending``), nothing is waited for.
        """
        if self._release_file is None:
            return
        try:
            self._release_file.touch(run_files.FILE_MODE)
        except OSError:
            self.terminate()
        if not self._have_ended(wait_s, is_ending) and wait_s and not is_ending():
            self.terminate()
            self._have_ended(TERMINATE_S, is_ending)
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()
        self._release_file = None

    def _have_ended(self, wait_s: float, is_ending: Callable[[], bool]) -> bool:
        """Whether all processes end within ``wait_s``."""
        end = time.monotonic() + wait_s
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() >= end or is_ending():
                return False
            time.sleep(0.02)
        return True

    def terminate(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # srun answers with SIGKILL to its tasks


def needs_survey(plan: Plan) -> bool:
    """Whether the plan needs ports or addresses from the nodes."""
    return survey_request(plan) is not None


def run_node_survey(
    plan: Plan, facts: RunFacts, steps: Steps, signals: OrchestratorSignals
) -> tuple[RunFacts, PortReservation]:
    """Return the facts with node addresses and port offset, as far as the nodes answered.

    Each node reserves its ports with the first offset that works there, usually the same everywhere. If other
    jobs cause a difference, all nodes release their ports and try offsets that were free on all. The
    reservation lasts until its ``end``.
    """
    end = time.monotonic() + SURVEY_S + plan.nodes / NODES_PER_S
    ports, number, reservation = all_ports(plan), 0, PortReservation()
    answers: NodeAnswers = {}
    while True:
        offsets = possible_offsets(plan, facts, answers)
        try:
            released = released_file(facts.run_dir, facts.attempt, number)
            reservation = PortReservation(steps.start_survey(offsets, number), released)
        except OSError as error:
            log_line(f"The node survey cannot be started: {error}; the job uses the ports and addresses of the plan")
            return facts, reservation
        while signals.end_signal is None and time.monotonic() < end and not reservation.have_answered(len(facts.hosts)):
            signals.sleep(0.05 if plan.nodes == 1 else 0.2)
        answers = read_node_answers(plan, facts, number)
        offset = agreed_offset(facts, ports, answers)
        if offset is not None or signals.end_signal is not None or time.monotonic() >= end:
            break
        if not ports or not answers or not possible_offsets(plan, facts, answers):
            break
        reservation.release(END_S, lambda: signals.end_signal is not None)
        signals.sleep(random.uniform(0.0, PAUSE_S))
        if signals.end_signal is not None:
            break
        number += 1
    if signals.end_signal is not None:
        return facts, reservation  # nothing more will be started
    if silent := [host for host in facts.hosts[: plan.nodes] if host not in answers]:
        log_line(silence_text(plan, silent))
    for problem in filter(None, (answer.problem for answer in answers.values())):
        log_line(f"{problem}; the job uses its host name")
    offset = port_offset(plan, facts, answers) if offset is None else offset
    if offset:
        log_line(f"Ports of the job: those of the plan + {offset}")
    found = node_addresses(facts, answers)
    addresses = facts.addresses if plan.network_interface is None else found
    facts = dataclasses.replace(facts, addresses=addresses, port_offset=offset, ip_addresses=found)
    if ports:
        write_ports = functools.partial(run_files.write_json, facts.run_dir / PORTS_FILE, assigned_ports(plan, facts))
        attempt_optional(f"write {PORTS_FILE}", write_ports)
    return facts, reservation


def silence_text(plan: Plan, silent_hosts: Sequence[str]) -> str:
    """Describe what the job does without the answers of these nodes."""
    names = "its host name is used" if len(silent_hosts) == 1 else "their host names are used"
    consequences = [
        *([names] if plan.network_interface is not None else []),
        *(["the ports of the job were not checked there"] if all_ports(plan) else []),
    ]
    return f"No answer to the node survey from {', '.join(silent_hosts)}: {', and '.join(consequences)}"


def read_node_answers(plan: Plan, facts: RunFacts, round_number: int) -> dict[str, NodeAnswer]:
    """Answers of the nodes in this round of this attempt, by host name."""
    found = {}
    for host in facts.hosts[: plan.nodes]:
        try:
            answer = NodeAnswer.from_json(run_files.read_json(facts.run_dir / run_files.NODES_DIR / f"{host}.json"))
        except RecordError:
            continue  # not written yet
        if (answer.attempt, answer.round) == (facts.attempt, round_number):
            found[host] = answer
    return found


def node_addresses(facts: RunFacts, answers: NodeAnswers) -> tuple[str, ...]:
    """Address of each node, or its host name if unknown."""
    addresses = {host: answer.address for host, answer in answers.items() if answer.address}
    return tuple(addresses.get(host, host) for host in facts.hosts)


def possible_offsets(plan: Plan, facts: RunFacts, answers: NodeAnswers) -> tuple[int, ...]:
    """Offsets with which all ports are free on the nodes that answered, in the order to try."""
    busy = {index: answers[host].busy for index, host in enumerate(facts.hosts) if host in answers}
    seed = int(facts.job_id) if facts.job_id.isdigit() else zlib.crc32(facts.job_id.encode())
    return free_offsets(all_ports(plan), busy, seed)


def agreed_offset(facts: RunFacts, nodes: Collection[int], answers: NodeAnswers) -> int | None:
    """Offset that all answering ``nodes`` reserved; None if they differ."""
    held = {answers[facts.hosts[node]].offset for node in nodes if facts.hosts[node] in answers}
    return held.pop() if len(held) == 1 else None


def port_offset(plan: Plan, facts: RunFacts, answers: NodeAnswers) -> int:
    """Offset for ports that are not reserved on all nodes: 0 when no offset is free."""
    if not all_ports(plan):
        return 0
    offsets = possible_offsets(plan, facts, answers)
    if not offsets:
        log_line("No port offset leaves all ports of the job free on its nodes; the job uses those of the plan")
        return 0
    if answers:
        log_line("The nodes did not reserve the same ports in time: another job may take some of them")
    return offsets[0]
