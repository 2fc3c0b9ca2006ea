"""The plan as a picture of nodes and GPUs."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.plan.container import container_mounts
from launcher.plan.plan import BALANCER, BENCHMARK, FRONTENDS, Plan, TaskPlan
from launcher.show.json_view import planned_facts
from launcher.show.picture import WIDTH, draw_nodes, draw_plan
from launcher.steps.batch_script import render_sbatch
from launcher.steps.hostlist import parse_hostlist
from tests.support.launcher import job_spec, plan_of

SEED = {
    "4p-1d": {
        "gpus_per_node": 8,
        "prefill_workers": 4,
        "prefill_nodes": 4,
        "decode_workers": 1,
        "decode_nodes": 1,
    },
    "2d-one-node": {"gpus_per_node": 8, "decode_workers": 2, "gpus_per_decode": 4},
}  # four prefill workers and a decode worker with one node each; two decode workers with half a node


def picture_lines(resources: Mapping[str, Any], hosts: str, workers: list[dict[str, Any]] | None = None) -> list[str]:
    plan = plan_of(job_spec(resources=dict(resources), workers=workers or []))
    return "\n".join(draw_nodes(plan, parse_hostlist(hosts))).splitlines()


@pytest.mark.parametrize("name", SEED)
def test_the_plan_matches_the_golden_page(name: str, golden: Callable[[str, str], Path]) -> None:
    command = "python -m engine --rank {rank} --gpus {gpus}"
    roles = [role for role in ("prefill", "decode") if f"{role}_workers" in SEED[name]]
    workers = [{"role": role, "command": f"{command} --mode {role}"} for role in roles]
    plan = plan_of(job_spec(name=name, resources=SEED[name], workers=workers))
    golden(f"launcher/plan-{name}.txt", draw_plan(plan, render_sbatch(plan), planned_facts(plan, HOSTS)))


HOSTS = parse_hostlist("watchtower-aqua-cn[01-05]")


def test_equal_nodes_share_a_line() -> None:
    assert picture_lines({"gpus_per_node": 4, "agg_workers": 2, "gpus_per_agg": 12}, "cn[08-13]") == [
        "node       0  1  2  3",
        "cn[08-10]  A0 A0 A0 A0  agg_w0",
        "cn[11-13]  A1 A1 A1 A1  agg_w1",
    ]


def test_only_the_first_of_many_similar_rows_is_drawn() -> None:
    assert picture_lines({"gpus_per_node": 2, "agg_workers": 4999, "gpus_per_agg": 1}, "n[1-2500]") == [
        "node       0     1",
        "n1         A0    A1     agg_w0, agg_w1",
        "n[2-2499]  :     :      agg_w[2-4997]",
        "n2500      A4998 .      agg_w4998",
    ]


def test_rows_of_several_roles_are_folded_by_role() -> None:
    roles = {"p": (40, 1), "d": (40, 1), "mon": (20, 0)}
    workers: list[dict[str, Any]] = [
        {"role": role, "count": count, "gpus": gpus, "command": "x"} for role, (count, gpus) in roles.items()
    ]
    assert picture_lines({"gpus_per_node": 4}, "n[01-20]", workers) == [
        "node      0  1  2  3",
        "n01       P0 P1 P2 P3  p_w0, p_w1, p_w2, p_w3, mon_w0",
        "n[02-10]  :  :  :  :   p_w[4-39], mon_w[1-9]",
        "n11       D0 D1 D2 D3  d_w0, d_w1, d_w2, d_w3, mon_w10",
        "n[12-20]  :  :  :  :   d_w[4-39], mon_w[11-19]",
    ]


def test_idle_gpus_and_nodes_are_dots() -> None:
    assert picture_lines({"gpus_per_node": 4, "agg_workers": 1, "gpus_per_agg": 3, "nodes": 3}, "a,b,c") == [
        "node  0  1  2  3",
        "a     A0 A0 A0 .   agg_w0",
        "b,c   .  .  .  .",
    ]


def test_roles_with_the_same_first_letter_have_longer_labels() -> None:
    workers: list[dict[str, Any]] = [
        {"role": "prefill", "gpus": 1, "command": "x"},
        {"role": "post", "gpus": 1, "command": "x"},
        {"role": "probe", "command": "x"},
    ]
    assert picture_lines({"gpus_per_node": 2}, "a", workers) == [
        "node  0   1",
        "a     PR0 PO0  prefill_w0, post_w0, probe_w0",
    ]


def test_nodes_with_too_many_gpus_for_a_line_list_ranges() -> None:
    resources = {"gpus_per_node": 32, "decode_workers": 12, "gpus_per_decode": 3}
    assert picture_lines(resources, "gb200-rack1-[01-02]") == [
        "node",
        "gb200-rack1-01  0-2 D0, 3-5 D1, 6-8 D2, 9-11 D3, 12-14 D4, 15-17 D5, 18-20 D6,",
        "                21-23 D7, 24-26 D8, 27-29 D9, 30-31 .",
        "                decode_w[0-9]",
        "gb200-rack1-02  0-2 D10, 3-5 D11, 6-31 .",
        "                decode_w10, decode_w11",
    ]


def test_nodes_without_gpus_list_only_their_workers() -> None:
    assert picture_lines({"gpus_per_node": 0, "agg_workers": 40, "nodes": 2}, "a,b") == [
        "node",
        "a     agg_w[0-19]",
        "b     agg_w[20-39]",
    ]


def serving() -> Plan:
    """A plan with services around two workers."""
    plan = plan_of(job_spec(resources={"gpus_per_node": 1, "agg_workers": 2}, workers=[]))
    services = [("nginx", BALANCER, 0), ("frontend_0", FRONTENDS, 1), ("benchmark", BENCHMARK, 0)]
    tasks = [
        TaskPlan(Task(name, name.partition("_")[0], 0, 2 + rank, 0, node), ("run", name), {}, stage=stage)
        for rank, (name, stage, node) in enumerate(services)
    ]
    return dataclasses.replace(plan, tasks=(*plan.tasks, *tasks))


def test_services_are_shown_on_their_nodes_with_their_commands() -> None:
    plan = serving()
    text = draw_plan(plan, "#!script\n", planned_facts(plan))
    assert text.splitlines()[:3] == [
        "node   0",
        "node0  A0  agg_w0, nginx, benchmark",
        "node1  A1  agg_w1, frontend_0",
    ]
    assert "agg: 2 processes, here agg_w0 (rank 0)\n  no command yet: this plan shows only the topology\n" in text
    assert "nginx: 1 process, here nginx (balancer)\n  run nginx\n" in text
    assert text.endswith("\n\n#!script\n")


def test_a_role_in_a_container_is_marked() -> None:
    container = {"image": "/i/sgl.sqsh", "mounts": ["/data:/data"]}
    workers = [{"role": "in", "command": "x"}, {"role": "out", "command": "y", "container": False}]
    plan = plan_of(job_spec(container=container, workers=workers))
    text = draw_plan(plan, "#!script\n", planned_facts(plan))
    count = len(container_mounts(plan, plan.tasks[0], planned_facts(plan)))
    assert f"  x\n  in /i/sgl.sqsh by pyxis, {count} mounts\nout: 1 process" in text
    assert text.count("by pyxis") == 1


names = st.sampled_from(["cn[001-400]", "a-very-long-name-of-a-node-indeed[0-399]-ib0", "r[1-20]n[1-20]"])


@given(
    st.integers(0, 64),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 80)), min_size=1, max_size=3),
    names,
)
@example(18, [(5, 10)], "cn[001-400]")
def test_every_worker_and_host_is_shown_within_80_columns(
    per_node: int, roles: list[tuple[int, int]], hosts: str
) -> None:
    workers = [
        {"role": f"role{index}x", "count": count, "gpus": gpus, "command": "x"}
        for index, (count, gpus) in enumerate(roles)
    ]
    try:
        plan = plan_of(job_spec(resources={"gpus_per_node": per_node}, workers=workers))
    except TopologyError:
        return
    used = parse_hostlist(hosts)[: plan.nodes]
    lines = "\n".join(draw_nodes(plan, used)).splitlines()
    assert all(len(line) <= WIDTH or " " not in line.strip() for line in lines)
    parts = " ".join(lines).replace(", ", " ").split()
    shown = [name for part in parts if "role" in part for name in parse_hostlist(part)]
    assert set(shown) == {planned.task.worker for planned in plan.tasks}
    first = [line.split()[0] for line in lines[1:] if line[:1] != " "]
    assert [host for part in first for host in parse_hostlist(part)] == list(used)
