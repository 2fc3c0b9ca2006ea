"""Lines of ``log.out`` that show where the parts of a job run and how to reach them."""

import os
import time

from launcher.plan.plan import BALANCER, FRONTENDS, INFRA, WORKERS, Plan, RunFacts, TaskPlan

CLIENT_PORT_NAME = "http"  # name of the client port of a front end or balancer


def place_lines(plan: Plan, facts: RunFacts) -> list[str]:
    """List the nodes by index, and the places of everything but workers."""
    lines = [f"Node {index}: {host}" for index, host in enumerate(facts.hosts)]
    if plan.network_interface is not None or any(planned.ports for planned in plan.tasks):
        master = _first_node(plan, INFRA) or 0
        lines.append(f"Master IP address (node {master}): {facts.ip_address(master)}")
    balancer = _first_node(plan, BALANCER)
    if balancer is not None:
        lines.append(f"Nginx node (node {balancer}): {facts.hosts[balancer]}")
    frontends = [planned.task for planned in plan.tasks if planned.stage == FRONTENDS]
    for number, task in enumerate(frontends[1:], start=1):
        lines.append(f"Additional frontend {number} on node {task.node_index}: {_host_text(task.node_index, facts)}")
    return lines


def launch_lines(planned: TaskPlan, facts: RunFacts, restart: int = 0) -> list[str]:
    """Describe the start of a task. With ports or several processes, the leader's node comes first."""
    task = planned.task
    host, again = facts.hosts[task.node_index], f", run {restart + 1}" if restart else ""
    if planned.stage != WORKERS:
        return [f"Launching {task.worker}, node {task.node_index}: {host}{again}"]
    leads = task.local_rank == 0 and (planned.ports or planned.worker_size > 1)
    leader = f"{task.role.capitalize()} worker {task.index} leader: {_host_text(planned.leader_node, facts)}"
    place = f"node {task.node_index} (local_rank {task.local_rank})"
    return [
        *([leader] if leads else []),
        f"Launching {task.role} worker {task.index}, {place}: {host}{again}",
    ]


def access_lines(plan: Plan, facts: RunFacts, *, local: bool) -> list[str]:
    """Client URL and the commands that open a shell on its nodes; empty without front ends."""
    url = frontend_url(plan, facts, local=local)
    if url is None:
        return []
    lines = [f"Frontend available at: {url}"]
    if local:
        return lines
    named = {"nginx": _first_node(plan, BALANCER), "master": _first_node(plan, INFRA) or 0}
    for what, index in named.items():
        if index is not None:
            command = f"srun --jobid {facts.job_id} -w {facts.hosts[index]} --overlap --pty bash"
            lines.append(f"Connect to the {what} node: {command}")
    return lines


def frontend_url(plan: Plan, facts: RunFacts, *, local: bool) -> str | None:
    """Client URL: of the balancer, else of the first front end with a port.

    It has the node's host name, or an address for virtual nodes, whose names do not resolve.
    """
    for stage in (BALANCER, FRONTENDS):
        for planned in plan.tasks:
            if planned.stage == stage and planned.ports:
                port = planned.ports.get(CLIENT_PORT_NAME) or next(iter(planned.ports.values()))
                host = facts.address(planned.task.node_index) if local else facts.hosts[planned.task.node_index]
                return f"http://{host}:{port + facts.port_offset}"
    return None


def _first_node(plan: Plan, stage: str) -> int | None:
    """Node index of the first task of a stage."""
    return next((planned.task.node_index for planned in plan.tasks if planned.stage == stage), None)


def _host_text(index: int, facts: RunFacts) -> str:
    address = facts.ip_address(index)
    return facts.hosts[index] + (f" ({address})" if address != facts.hosts[index] else "")


def log_line(message: str) -> None:
    """Write a line with the time."""
    log_raw_line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}")


def log_raw_line(line: str) -> None:
    """Write a line as it is. A full disk loses the line and does not fail the job."""
    try:
        os.write(1, f"{line}\n".encode("utf-8", "surrogateescape"))
    except (OSError, UnicodeError):
        pass
