"""Placeholders for hosts and ports in arguments, shell commands and files of the run directory."""

import dataclasses
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.placeholders import (
    PlaceholderValues,
    fill_placeholders,
    fill_shell_text,
    fill_template,
    placeholder_values,
    task_argv,
)
from launcher.plan.plan import Plan, RunFacts
from tests.support.launcher import facts_of, job_spec, plan_of


def plan_with(command: str, *, text: bool = False) -> Plan:
    """A plan with one worker on two nodes."""
    workers = [{"role": "agg", "gpus": 8, "command": command, "shell": text}]
    return plan_of(job_spec(workers=workers, resources={"nodes": 3, "gpus_per_node": 4}))


def facts(plan: Plan, offset: int = 0) -> RunFacts:
    addresses = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    return dataclasses.replace(facts_of(plan), addresses=addresses, port_offset=offset)


def test_cached_values_are_not_used_for_other_jobs_or_attempts() -> None:
    one, other = plan_with("run {job_dir} {run_dir} {attempt}"), plan_of(job_spec(), job_dir="/home/eva")
    other = dataclasses.replace(other, tasks=one.tasks)
    first, again = facts_of(one), dataclasses.replace(facts_of(one), attempt=1)
    found = [task_argv(plan, one.tasks[0], known)[1:] for plan, known in ((one, first), (other, first), (other, again))]
    run_dir = str(first.run_dir)
    assert found == [["/home/ana/jobs", run_dir, "0"], ["/home/eva", run_dir, "0"], ["/home/eva", run_dir, "1"]]


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{host_0}:{port_6100}", "10.0.0.1:6117"),
        ("{host_2}", "10.0.0.3"),
        ("{host_3}", "{host_3}"),  # the job has three nodes
        ("{ip_2} {ip_3}", "10.0.0.3 {ip_3}"),
        ("{host_01} {host_} {port_x} {port_-1}", "{host_01} {host_} {port_x} {port_-1}"),
        ("{head} {leader} {worker_size} {worker_nodes}", "10.0.0.1 10.0.0.1 2 2"),
        ("{http_port}", "6117"),
        ("{nats_port}", "{nats_port}"),  # the task has no such port
        ("{{host_0}} {{http_port}}", "{host_0} {http_port}"),
    ],
)
def test_hosts_and_ports(word: str, filled: str) -> None:
    plan = plan_with("serve {http_port}")
    assert fill_placeholders(word, placeholder_values(plan, plan.tasks[0], facts(plan, 17))) == filled


def test_host_names_are_used_without_addresses() -> None:
    plan = plan_with("x {host_1} {leader}")
    known = dataclasses.replace(facts_of(plan), ip_addresses=("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    values = placeholder_values(plan, plan.tasks[0], known)
    assert fill_placeholders("{host_1} {ip_1}", values) == f"{known.hosts[1]} 10.0.0.2"
    assert task_argv(plan, plan.tasks[1], facts_of(plan)) == ["x", "cn01", "cn00"]


def test_shell_commands_contain_hosts_and_ports_and_variables_for_the_rest() -> None:
    text = """curl "http://{host_1}:{http_port}/{rank}" 'a {port_80} {job_id}' {{head}} {no_port}"""
    plan = plan_with(text, text=True)
    assert task_argv(plan, plan.tasks[0], facts(plan, 17))[2] == (
        "curl \"http://10.0.0.2:6117/${GPUJOB_RANK}\" 'a 97 '\"${GPUJOB_JOB_ID}\"'' {head} {no_port}"
    )


@given(st.text(max_size=20))
def test_a_host_with_shell_syntax_is_not_inserted_into_a_shell_command(name: str) -> None:
    values = PlaceholderValues({"head": name, "rank": "0"}, RunFacts.__new__(RunFacts))
    filled = fill_shell_text("echo {head}", values.hosts_and_ports())
    if filled != "echo {head}":
        done = subprocess.run(["sh", "-c", filled], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (f"{name}\n", "")


def test_a_template_file_gets_the_values_of_the_whole_job() -> None:
    plan = plan_with("true")
    text = "listen {port_8000};\nserver {host_2}:{port_1};\n{run_dir} {job_id} {head} {rank} {{x}} {\n"
    assert fill_template(plan, text, facts(plan, 17)) == (
        f"listen 8017;\nserver 10.0.0.3:18;\n{plan.run_dir('4459')} 4459 10.0.0.1 {{rank}} {{x}} {{\n"
    )
