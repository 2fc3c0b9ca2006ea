"""What only the nodes know: asked once, before anything else of a job with ports or a network interface."""

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
from launcher.plan.plan import Plan, RunFacts
from launcher.plan.ports import PORTS_FILE, all_ports, assigned_ports, free_offsets, survey_request
from launcher.run.before.node_facts import TOLD, released_file
from launcher.run.job_log import log_line
from launcher.run.job_state import attempt_optional
from launcher.run.signals import OrchestratorSignals
from launcher.steps.steps import Steps

SURVEY_S = 20.0  # how long the nodes may take; a job goes on without what is not known by then
NODES_PER_S = 20  # more nodes may take so much longer
PAUSE_S = 0.5
"""At most so long before another round, at random: two jobs that are in each other's way do not look together again."""
END_S = 5.0  # how long the nodes may take to let the ports go before they look again,
ENDED_S = 2.0  # and the end of those that had to be ended

Told = Mapping[str, Mapping[str, object]]  # what nodes have told, by name


class PortReservation:
    """The processes that hold the ports of a job on its nodes, until there is a file; with none nothing is held."""

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"] = (), released: Path | None = None) -> None:
        self._processes = processes
        self._released = released
        self._said = [b""] * len(processes)
        for process in processes:
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)

    def have_told(self, nodes: int) -> bool:
        """Whether so many nodes have told what they have found, or none of them can any more."""
        over = [process.poll() is not None for process in self._processes]
        for index, process in enumerate(self._processes):
            if process.stdout is not None:
                self._said[index] += process.stdout.read() or b""
        most = nodes if len(over) == 1 else 1  # srun is one for all nodes, else there is one for each
        told = [most if ended else said.count(TOLD) for ended, said in zip(over, self._said, strict=True)]
        return all(over) or sum(told) >= nodes

    def end(self, wait_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> None:
        """Let the ports go; those who are asked to in a file have so long until they are ended. Safe to call twice.

        Not by a signal at once: of a step that ends so srun and slurmstepd write errors into the job's log. Nobody is
        waited for with ``wait_s`` 0, nor once the job is to end (``hurried``).
        """
        if self._released is None:
            return
        try:
            self._released.touch()
        except OSError:
            self.terminate()
        if not self._have_ended(wait_s, hurried) and wait_s and not hurried():
            self.terminate()
            self._have_ended(ENDED_S, hurried)
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()
        self._released = None

    def _have_ended(self, wait_s: float, hurried: Callable[[], bool]) -> bool:
        """Whether all processes have ended, after so long at most."""
        end = time.monotonic() + wait_s
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() >= end or hurried():
                return False
            time.sleep(0.02)
        return True

    def terminate(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # srun answers this with SIGKILL to its tasks


def needs_survey(plan: Plan) -> bool:
    """Whether anything has to be asked of the nodes."""
    return survey_request(plan) is not None


def run_node_survey(
    plan: Plan, facts: RunFacts, steps: Steps, signals: OrchestratorSignals
) -> tuple[RunFacts, PortReservation]:
    """The facts with the addresses of the nodes and the offset of the ports, as far as the nodes have told.

    The ports are held until the end of what comes with them. Each node takes the first offset that it can have, mostly
    that of the others. Where it is not, because other jobs are on some of the nodes, all give back what they have
    and look again, for those that were free everywhere.
    """
    end = time.monotonic() + SURVEY_S + plan.nodes / NODES_PER_S
    ports, number, reservation = all_ports(plan), 0, PortReservation()
    told: Told = {}
    while True:
        offsets = possible_offsets(plan, facts, told)
        try:
            released = released_file(facts.run_dir, facts.attempt, number)
            reservation = PortReservation(steps.start_survey(offsets, number), released)
        except OSError as error:
            log_line(
                f"The nodes cannot be asked for ports and addresses: {error}; the job goes on with those of the plan"
            )
            return facts, reservation
        while signals.ending is None and time.monotonic() < end and not reservation.have_told(len(facts.hosts)):
            signals.sleep(0.05 if plan.nodes == 1 else 0.2)
        told = read_node_answers(plan, facts, number)
        offset = agreed_offset(facts, ports, told)
        if offset is not None or signals.ending is not None or time.monotonic() >= end:
            break
        if not ports or not told or not possible_offsets(plan, facts, told):
            break
        reservation.end(END_S, lambda: signals.ending is not None)
        signals.sleep(random.uniform(0.0, PAUSE_S))
        if signals.ending is not None:
            break
        number += 1
    if signals.ending is not None:
        return facts, reservation  # nothing is started any more, and nobody had the time to look
    if silent := [host for host in facts.hosts[: plan.nodes] if host not in told]:
        log_line(silence_text(plan, silent))
    for problem in filter(None, (entry.get("problem") for entry in told.values())):
        log_line(f"{problem}; the job goes on with its host name")
    offset = port_offset(plan, facts, told) if offset is None else offset
    if offset:
        log_line(f"Ports of the job: those of the plan + {offset}")
    facts = dataclasses.replace(facts, addresses=node_addresses(plan, facts, told), port_offset=offset)
    if ports:
        told_ports = functools.partial(run_files.write_json, facts.run_dir / PORTS_FILE, assigned_ports(plan, facts))
        attempt_optional(f"write {PORTS_FILE}", told_ports)
    return facts, reservation


def silence_text(plan: Plan, silent: Sequence[str]) -> str:
    """What it means for the job that these nodes have told nothing."""
    names = "its host name is used" if len(silent) == 1 else "their host names are used"
    consequences = [
        *([names] if plan.network_interface is not None else []),
        *(["the ports of the job are untested there"] if all_ports(plan) else []),
    ]
    return f"Nothing is known of {', '.join(silent)}: {', and '.join(consequences)}"


def read_node_answers(plan: Plan, facts: RunFacts, number: int) -> dict[str, dict[str, object]]:
    """What the nodes have told in this round of this attempt, by name."""
    found = {}
    for host in facts.hosts[: plan.nodes]:
        told = run_files.read_json(facts.run_dir / run_files.NODES_DIR / f"{host}.json") or {}
        if (told.get("attempt"), told.get("round")) == (facts.attempt, number):
            found[host] = told
    return found


def node_addresses(plan: Plan, facts: RunFacts, told: Told) -> tuple[str, ...]:
    """An address for each node, its host name where it has told none; those known before when none is asked for."""
    if plan.network_interface is None:
        return facts.addresses
    return tuple(str(told.get(host, {}).get("address") or host) for host in facts.hosts)


def possible_offsets(plan: Plan, facts: RunFacts, told: Told) -> tuple[int, ...]:
    """Offsets with which the ports are free on all nodes that have told, in the order in which this job tries them."""
    busy = {}
    for index, host in enumerate(facts.hosts):
        listed = told.get(host, {}).get("busy")
        busy[index] = [int(port) for port in listed] if isinstance(listed, list) else []
    seed = int(facts.job_id) if facts.job_id.isdigit() else zlib.crc32(facts.job_id.encode())
    return free_offsets(all_ports(plan), busy, seed)


def agreed_offset(facts: RunFacts, nodes: Collection[int], told: Told) -> int | None:
    """The offset that all of these nodes hold their ports with, of those that have told; None where they differ."""
    held = {told[facts.hosts[node]].get("offset") for node in nodes if facts.hosts[node] in told}
    offset = held.pop() if len(held) == 1 else None
    return offset if isinstance(offset, int) else None


def port_offset(plan: Plan, facts: RunFacts, told: Told) -> int:
    """What is added to every port of the plan where it is held on no node, or not on all: 0 when nothing is free."""
    if not all_ports(plan):
        return 0
    offsets = possible_offsets(plan, facts, told)
    if not offsets:
        log_line("No offset leaves all ports of the job free on their nodes; it goes on with those of the plan")
        return 0
    if told:
        log_line("The nodes have not come to hold the same ports in time: another job may take some of them")
    return offsets[0]
