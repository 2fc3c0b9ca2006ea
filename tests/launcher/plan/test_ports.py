"""Assignment of ports, and offsets that keep jobs on a node apart."""

import dataclasses
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import TopologyError
from launcher.plan.ports import (
    FIRST_EPHEMERAL_PORT,
    OFFSETS,
    TABLE,
    all_ports,
    assign_ports,
    assigned_ports,
    free_offsets,
    survey_request,
)
from tests.support.launcher import ROOT, facts_of, job_spec, plan_of

ONCE = ("public", "etcd", "etcd_peer", "nats")
EACH = tuple(name for name in TABLE if name not in ONCE)  # kinds of which each worker or front end may need one

requests = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.sampled_from(list(TABLE)), unique=True).map(tuple)), max_size=24
)


def test_first_ports_are_the_usual_ones() -> None:
    assert assign_ports([(0, ("public", "etcd", "etcd_peer", "nats", "http", "bootstrap"))], is_one_machine=False) == [
        {"public": 8000, "etcd": 2379, "etcd_peer": 2380, "nats": 4222, "http": 6100, "bootstrap": 7200}
    ]


def test_ports_count_up_on_each_node() -> None:
    workers = [(node, ("http", "system")) for node in (0, 0, 1)]
    assert assign_ports(workers, is_one_machine=False) == [
        {"http": 6100, "system": 7500},
        {"http": 6132, "system": 7501},
        {"http": 6100, "system": 7500},
    ]


def test_virtual_nodes_share_the_ports_of_one_machine() -> None:
    assert assign_ports([(0, ("http",)), (1, ("http",)), (2, ("http",))], is_one_machine=True) == [
        {"http": 6100},
        {"http": 6132},
        {"http": 6164},
    ]


@given(requests, st.booleans())
def test_no_port_is_assigned_twice(wanted: list[tuple[int, tuple[str, ...]]], one_machine: bool) -> None:
    found = assign_ports(wanted, is_one_machine=one_machine)
    assert [tuple(ports) for ports in found] == [names for _, names in wanted]
    used = [
        (0 if one_machine else node, port + index)
        for (node, _), ports in zip(wanted, found, strict=True)
        for name, port in ports.items()
        for index in range(TABLE[name].width)
    ]
    assert len(used) == len(set(used))


def test_a_kind_that_reaches_another_one_continues_after_it() -> None:
    found = assign_ports([(0, ("dp_rpc", "dist_init"))] * 20, is_one_machine=False)
    assert [ports["dp_rpc"] for ports in found] == [*range(8650, 8670)]
    assert [ports["dist_init"] for ports in found][-4:] == [8620, 8680, 8700, 8720]
    assert assign_ports([*([(0, ("dist_init",))] * 18), (0, ("dp_rpc",))], is_one_machine=False)[-1] == {"dp_rpc": 8660}


def test_nodes_with_the_same_tasks_have_the_same_ports_in_any_order() -> None:
    wanted = [(1, ("http",)), (0, ("http",)), (0, ("system",)), (1, ("http",)), (2, ("http",)), (2, ("system",))]
    assert assign_ports(wanted, is_one_machine=False) == [
        {"http": 6100},
        {"http": 6100},
        {"system": 7500},
        {"http": 6132},
        {"http": 6100},
        {"system": 7500},
    ]


def test_a_node_without_ports_left_is_an_error() -> None:
    with pytest.raises(
        TopologyError, match="node 3: its processes need more vllm ports than are available from 20000 on"
    ):
        assign_ports([(3, ("vllm",))] * 1000, is_one_machine=False)


@given(st.lists(st.sets(st.sampled_from(EACH)), max_size=16), st.lists(st.sets(st.sampled_from(EACH)), max_size=16))
def test_jobs_with_different_offsets_share_no_port(first: list[set[str]], second: list[set[str]]) -> None:
    kinds = [set(ONCE), set(ONCE)]
    jobs = []
    for workers, once in zip((first, second), kinds, strict=True):
        wanted = [(0, tuple(sorted(once))), *((0, tuple(sorted(names))) for names in workers)]
        jobs.append({port for ports in assign_ports(wanted, is_one_machine=False) for port in ports.values()})
    for one in OFFSETS:
        for other in OFFSETS:
            if one != other:
                assert {port + one for port in jobs[0]}.isdisjoint(port + other for port in jobs[1])


def test_sixteen_ports_of_each_kind_stay_below_ephemeral_ports() -> None:
    found = assign_ports([(0, ONCE), *([(0, EACH)] * 16)], is_one_machine=False)
    jobs = [{port + offset for ports in found for port in ports.values()} for offset in OFFSETS]
    assert len(set().union(*jobs)) == sum(map(len, jobs))
    assert max(set().union(*jobs)) < FIRST_EPHEMERAL_PORT


def test_ports_of_a_plan_are_grouped_by_node() -> None:
    plan = plan_of(job_spec(workers=[{"command": "true", "count": 3}], resources={"nodes": 3}))
    first, second, third = plan.tasks
    tasks = (
        dataclasses.replace(first, ports={"http": 6100, "system": 7500}),
        dataclasses.replace(second, task=dataclasses.replace(second.task, node_index=0), ports={"http": 6132}),
        third,
    )
    assert all_ports(dataclasses.replace(plan, tasks=tasks)) == {0: {6100, 6132, 7500}}


# -- the offset ----------------------------------------------------------------------------------


def first_offset(ports: Mapping[int, Collection[int]], busy: Mapping[int, Collection[int]], seed: int) -> int | None:
    """The first offset that a job tries."""
    return next(iter(free_offsets(ports, busy, seed)), None)


def test_the_first_offset_with_free_ports_on_all_nodes_is_used() -> None:
    ports = {0: {8000}, 1: {6100}}
    assert first_offset(ports, {}, 0) == OFFSETS[0] == 0
    assert first_offset(ports, {0: [6100], 1: [8000]}, 0) == 0
    assert first_offset(ports, {0: [8000], 1: [6100 + OFFSETS[1]]}, 0) == OFFSETS[2]


def test_the_seed_sets_the_first_offset_and_all_are_tried() -> None:
    assert [first_offset({0: {8000}}, {}, seed) for seed in range(len(OFFSETS))] == list(OFFSETS)
    assert first_offset({0: {8000}}, {0: {8000 + OFFSETS[-1]}}, len(OFFSETS) - 1) == OFFSETS[0]
    assert first_offset({0: {8000}}, {0: {8000 + offset for offset in OFFSETS}}, 4459) is None


@pytest.mark.parametrize("first", [0, 4448, 44590000])
@pytest.mark.parametrize("apart", [1, 16, 256])
def test_jobs_with_close_ids_start_with_different_offsets(first: int, apart: int) -> None:
    first_offsets = {first_offset({0: {8000}}, {}, first - first % 4096 + apart * number) for number in range(16)}
    assert first_offsets == set(OFFSETS)


def test_a_job_without_ports_needs_no_offset() -> None:
    assert first_offset({}, {0: range(65536)}, 0) == 0


def test_offsets_avoid_ephemeral_ports_if_possible() -> None:
    low, high = FIRST_EPHEMERAL_PORT - 1, FIRST_EPHEMERAL_PORT + 100
    assert {first_offset({0: {low}}, {}, seed) for seed in range(16)} == {0}
    assert first_offset({0: {high}}, {0: {high}}, 0) == OFFSETS[1]
    assert first_offset({0: {65535}}, {0: {65535}}, 0) is None


@given(
    st.dictionaries(st.integers(0, 3), st.sets(st.integers(2000, 22000), min_size=1), min_size=1),
    st.dictionaries(st.integers(0, 3), st.sets(st.integers(2000, 32767))),
    st.integers(0, 1 << 40),
)
def test_exactly_the_offsets_without_busy_ports_are_tried(
    ports: dict[int, set[int]], busy: dict[int, set[int]], seed: int
) -> None:
    free = [
        candidate
        for candidate in OFFSETS
        if all({port + candidate for port in ports[node]}.isdisjoint(busy.get(node, ())) for node in ports)
    ]
    assert sorted(free_offsets(ports, busy, seed)) == free


def test_nodes_with_the_same_ports_share_a_list_in_the_survey() -> None:
    plan = plan_of(job_spec(resources={"nodes": 4}, workers=[{"command": "x", "count": 4}]))
    ports: tuple[dict[str, int], ...] = ({"http": 6100}, {"http": 6100, "system": 7500}, {}, {"http": 6100})
    tasks = tuple(
        dataclasses.replace(planned, ports=ports_of_task, task=dataclasses.replace(planned.task, node_index=index))
        for index, (planned, ports_of_task) in enumerate(zip(plan.tasks, ports, strict=True))
    )
    plan = dataclasses.replace(plan, tasks=tasks)
    request = {"ports": [[6100], [6100, 7500], []], "nodes": [0, 1, 2, 0]}
    assert survey_request(plan) == {"schema": 1, "network_interface": None, **request}
    assert survey_request(dataclasses.replace(plan, tasks=())) is None


def test_assigned_ports_are_those_of_the_plan_plus_the_offset() -> None:
    plan = plan_of(job_spec(workers=[{"command": "x", "count": 2}]))
    ports_of_task = dataclasses.replace(plan.tasks[0], ports={"http": 6100, "system": 7500})
    plan = dataclasses.replace(plan, tasks=(ports_of_task, *plan.tasks[1:]))
    facts = dataclasses.replace(facts_of(plan), addresses=("10.0.0.1",), port_offset=17, attempt=2)
    process = {"worker": ports_of_task.task.worker, "rank": 0, "node": "cn00", "address": "10.0.0.1"}
    assert assigned_ports(plan, facts) == {
        "schema": 1,
        "attempt": 2,
        "port_offset": 17,
        "processes": [{**process, "ports": {"http": 6117, "system": 7517}}],
    }


def test_the_page_of_ports_has_the_table() -> None:
    rows = [f"| `{name}` | {kind.base} | {kind.width} | {kind.meaning} |" for name, kind in TABLE.items()]
    assert "\n".join(rows) in (ROOT / "docs" / "reference" / "ports.md").read_text(encoding="utf-8")
