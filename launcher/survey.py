"""What only the nodes know: asked once, before anything else of a job with ports or a network interface."""

import dataclasses
import time
import zlib

from exporter import records
from launcher.plan import Plan, RunFacts
from launcher.ports import all_ports, asked_of_nodes, choose_offset
from launcher.say import say
from launcher.signals import Signals
from launcher.steps import Steps

SURVEY_S = 20.0
"""How long the nodes may take; a job goes on without what is not known by then."""
NODES_PER_S = 20
"""More nodes may take so much longer."""


def needs_survey(plan: Plan) -> bool:
    """Whether anything has to be asked of the nodes."""
    return asked_of_nodes(plan) is not None


def survey(plan: Plan, facts: RunFacts, steps: Steps, signals: Signals) -> RunFacts:
    """The facts with the addresses of the nodes and the offset of the ports, as far as the nodes have told."""
    try:
        processes = steps.start_survey()
    except OSError as error:
        say(f"The nodes cannot be asked for ports and addresses: {error}; the job goes on with those of the plan")
        return facts
    end = time.monotonic() + SURVEY_S + plan.nodes / NODES_PER_S
    while signals.ending is None and time.monotonic() < end:
        if all(process.poll() is not None for process in processes):
            break
        signals.sleep(0.05 if len(processes) == 1 else 0.2)
    for process in processes:
        if process.poll() is None:
            process.terminate()  # srun answers this with SIGKILL to its tasks
    told = read_nodes(plan, facts)
    if silent := [host for host in facts.hosts[: plan.nodes] if host not in told]:
        say(f"Nothing is known of the ports and addresses of {', '.join(silent)}; the job goes on with the plan's")
    offset = port_offset(plan, facts, told)
    return dataclasses.replace(facts, addresses=addresses(plan, facts, told), port_offset=offset)


def read_nodes(plan: Plan, facts: RunFacts) -> dict[str, dict[str, object]]:
    """What the nodes have told in this attempt, by name; problems are said."""
    found = {}
    for host in facts.hosts[: plan.nodes]:
        told = records.read_json(facts.run_dir / records.NODES_DIR / f"{host}.json")
        if told is not None and told.get("attempt") == facts.attempt:
            found[host] = told
            if told.get("problem"):
                say(f"{told['problem']}; the job goes on with its host name")
    return found


def addresses(plan: Plan, facts: RunFacts, told: dict[str, dict[str, object]]) -> tuple[str, ...]:
    """An address for each node, its host name where it has told none; those known before when none is asked for."""
    if plan.network_interface is None:
        return facts.addresses
    return tuple(str(told.get(host, {}).get("address") or host) for host in facts.hosts)


def port_offset(plan: Plan, facts: RunFacts, told: dict[str, dict[str, object]]) -> int:
    """What is added to every port of the plan: the first offset that is free on all nodes, 0 when there is none."""
    ports = all_ports(plan)
    if not ports:
        return 0
    busy: dict[int, list[int]] = {}
    for index, host in enumerate(facts.hosts):
        listed = told.get(host, {}).get("busy")
        busy[index] = [int(port) for port in listed] if isinstance(listed, list) else []
    seed = int(facts.job_id) if facts.job_id.isdigit() else zlib.crc32(facts.job_id.encode())
    offset = choose_offset(ports, busy, seed)
    if offset is None:
        say("No offset leaves all ports of the job free on their nodes; it goes on with those of the plan")
        return 0
    if offset:
        say(f"Ports of the job: those of the plan + {offset}")
    return offset
