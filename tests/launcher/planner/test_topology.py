"""Placement of workers on nodes and GPUs."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import JobSpec
from launcher.planner import topology
from launcher.planner.roles import merge_roles
from launcher.planner.topology import place_workers
from tests.support.launcher import job_spec

Roles = list[tuple[int, int]]  # (count, GPUs per worker) for each role


def spec_of(nodes: int, per_node: int, roles: Roles) -> JobSpec:
    """A job with the roles a, b, c, ..."""
    workers = [
        {"role": "abcdef"[index], "count": count, "gpus": gpus, "command": "x"}
        for index, (count, gpus) in enumerate(roles)
    ]
    return job_spec(resources={"nodes": nodes, "gpus_per_node": per_node}, workers=workers)


def placement_text(tasks: tuple[Task, ...]) -> str:
    """``a0@1:0,1`` is worker 0 of role a on node 1 with GPUs 0 and 1; ``a0.1@...`` is its second node."""
    parts = []
    for task in tasks:
        share = f".{task.local_rank}" if task.local_rank else ""
        gpus = ",".join(map(str, task.gpus)) or "-"
        parts.append(f"{task.role}{task.index}{share}@{task.node_index}:{gpus}")
    return " ".join(parts)


@pytest.mark.parametrize(
    ("nodes", "per_node", "roles", "expected"),
    [
        # whole nodes
        (1, 8, [(1, 8)], "a0@0:0,1,2,3,4,5,6,7"),
        (2, 2, [(2, 2)], "a0@0:0,1 a1@1:0,1"),
        (2, 2, [(1, 4)], "a0@0:0,1 a0.1@1:0,1"),
        (4, 1, [(2, 2)], "a0@0:0 a0.1@1:0 a1@2:0 a1.1@3:0"),
        (3, 2, [(1, 4), (1, 2)], "a0@0:0,1 a0.1@1:0,1 b0@2:0,1"),
        # packing
        (1, 4, [(4, 1)], "a0@0:0 a1@0:1 a2@0:2 a3@0:3"),
        (2, 4, [(4, 2)], "a0@0:0,1 a1@0:2,3 a2@1:0,1 a3@1:2,3"),
        (2, 2, [(3, 1)], "a0@0:0 a1@0:1 a2@1:0"),
        (3, 2, [(1, 1)], "a0@0:0"),
        # uneven sizes: what does not fit goes to the next node, the rest stays idle
        (2, 4, [(2, 3)], "a0@0:0,1,2 a1@1:0,1,2"),
        (2, 8, [(3, 3)], "a0@0:0,1,2 a1@0:3,4,5 a2@1:0,1,2"),
        (2, 4, [(1, 3), (1, 2)], "a0@0:0,1,2 b0@1:0,1"),
        (1, 4, [(1, 3), (1, 1)], "a0@0:0,1,2 b0@0:3"),
        # several roles share a node, in the order of the file
        (1, 8, [(1, 4), (1, 4)], "a0@0:0,1,2,3 b0@0:4,5,6,7"),
        (2, 4, [(1, 2), (3, 1)], "a0@0:0,1 b0@0:2 b1@0:3 b2@1:0"),
        (3, 4, [(2, 4), (1, 2), (2, 1)], "a0@0:0,1,2,3 a1@1:0,1,2,3 b0@2:0,1 c0@2:2 c1@2:3"),
        # a worker of whole nodes after a packed one starts on an empty node
        (2, 4, [(1, 1), (1, 4)], "a0@0:0 b0@1:0,1,2,3"),
        (3, 2, [(1, 1), (1, 4)], "a0@0:0 b0@1:0,1 b0.1@2:0,1"),
        (2, 4, [(4, 1), (1, 4)], "a0@0:0 a1@0:1 a2@0:2 a3@0:3 b0@1:0,1,2,3"),
        (3, 4, [(1, 4), (1, 1), (1, 4)], "a0@0:0,1,2,3 b0@1:0 c0@2:0,1,2,3"),
        # workers without GPUs are spread in even blocks
        (1, 0, [(3, 0)], "a0@0:- a1@0:- a2@0:-"),
        (2, 0, [(4, 0)], "a0@0:- a1@0:- a2@1:- a3@1:-"),
        (3, 0, [(4, 0)], "a0@0:- a1@0:- a2@1:- a3@2:-"),
        (4, 0, [(2, 0)], "a0@0:- a1@2:-"),
        (4, 8, [(1, 0)], "a0@0:-"),
        (2, 2, [(2, 0), (4, 1)], "a0@0:- a1@1:- b0@0:0 b1@0:1 b2@1:0 b3@1:1"),
        (2, 1, [(1, 1), (2, 0), (1, 1)], "a0@0:0 b0@0:- b1@1:- c0@1:0"),
    ],
)
def test_workers_are_placed(nodes: int, per_node: int, roles: Roles, expected: str) -> None:
    assert placement_text(place_workers(spec_of(nodes, per_node, roles)).tasks) == expected


@pytest.mark.parametrize(
    ("nodes", "per_node", "roles", "problems"),
    [
        (
            1,
            8,
            [(1, 12)],
            ["workers[0].gpus: 12 is neither at most gpus_per_node = 8 nor a multiple of it; use 8 or 16"],
        ),
        (9, 4, [(1, 6)], ["workers[0].gpus: 6 is neither at most gpus_per_node = 4 nor a multiple of it; use 4 or 8"]),
        (1, 0, [(1, 1)], ["workers[0].gpus: 1 GPUs for each a and resources.gpus_per_node is 0; set gpus_per_node to"]),
        (
            9,
            4,
            [(1, 5), (1, 4), (1, 9)],
            ["workers[0].gpus: 5 is neither", "workers[2].gpus: 9 is neither at most gpus_per_node = 4"],
        ),
        (1, 8, [(2, 8)], ["resources.nodes: 2 a x 8 GPUs need 2 nodes of 8 GPUs and the job has 1; set nodes: 2, or"]),
        (
            1,
            8,
            [(1, 4), (1, 8)],
            ["resources.nodes: 1 a x 4 GPUs, 1 b x 8 GPUs need 2 nodes of 8 GPUs and the job has"],
        ),
        (3, 4, [(1, 16)], ["need 4 nodes of 4 GPUs and the job has 3; set nodes: 4, or fewer or smaller workers"]),
        (1, 4, [(2, 3)], ["need 2 nodes of 4 GPUs and the job has 1"]),
        (1, 4, [(5, 1), (3, 0)], ["need 2 nodes of 4 GPUs and the job has 1"]),
    ],
)
def test_a_problem_names_required_and_available_nodes_and_a_fix(
    nodes: int, per_node: int, roles: Roles, problems: list[str]
) -> None:
    with pytest.raises(TopologyError) as caught:
        place_workers(spec_of(nodes, per_node, roles))
    assert len(caught.value.problems) == len(problems)
    for found, expected in zip(caught.value.problems, problems, strict=True):
        assert expected in found


def test_a_job_with_the_suggested_fix_fits() -> None:
    roles: Roles = [(3, 4), (5, 2), (1, 16)]
    with pytest.raises(TopologyError, match="set nodes: 5") as caught:
        place_workers(spec_of(1, 8, roles))
    assert "the job has 1" in str(caught.value)
    assert place_workers(spec_of(5, 8, roles)).tasks[-1].node_index == 4


@given(
    nodes=st.integers(1, 6),
    per_node=st.integers(0, 9),
    roles=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 20)), min_size=1, max_size=4),
)
@example(nodes=1, per_node=8, roles=[(1, 4), (1, 8)])
@example(nodes=2, per_node=4, roles=[(1, 6)])
def test_every_plan_uses_each_gpu_once_and_has_ranks_in_order(nodes: int, per_node: int, roles: Roles) -> None:
    spec = spec_of(nodes, per_node, roles)
    try:
        tasks = place_workers(spec).tasks
    except TopologyError as error:
        problems = error.problems
    else:
        problems = ()
        check_placement(tasks, nodes, per_node, roles)
    assert all(problem.startswith(("workers[", "resources.nodes: ")) for problem in problems)


def check_placement(tasks: tuple[Task, ...], nodes: int, per_node: int, roles: Roles) -> None:
    """No GPU twice or beyond a node, every worker complete, ranks from 0."""
    used = [(task.node_index, gpu) for task in tasks for gpu in task.gpus]
    assert len(used) == len(set(used))
    assert all(0 <= node < nodes and 0 <= gpu < per_node for node, gpu in used)
    assert all(0 <= task.node_index < nodes for task in tasks)
    assert [task.rank for task in tasks] == list(range(len(tasks)))
    for index, (count, gpus) in enumerate(roles):
        for worker in range(count):
            parts = [task for task in tasks if (task.role, task.index) == ("abcdef"[index], worker)]
            assert [task.local_rank for task in parts] == list(range(len(parts)))
            assert sum(len(task.gpus) for task in parts) == gpus
            assert len({task.node_index for task in parts}) == len(parts)
            assert len(parts) == 1 or all(len(task.gpus) == per_node for task in parts)


@given(nodes=st.integers(1, 9), count=st.integers(1, 40))
def test_workers_without_gpus_are_spread_evenly(nodes: int, count: int) -> None:
    tasks = place_workers(spec_of(nodes, 0, [(count, 0)])).tasks
    loads = [sum(task.node_index == node for task in tasks) for node in range(nodes)]
    assert max(loads) - min(loads) <= 1
    assert [task.node_index for task in tasks] == sorted(task.node_index for task in tasks)


def test_each_task_has_its_own_name_and_logs() -> None:
    tasks = place_workers(spec_of(2, 2, [(1, 4), (2, 0)])).tasks
    assert [task.worker for task in tasks] == ["a_w0", "a_w0", "b_w0", "b_w1"]
    assert tasks[0].logs == ("{node}_a_w0{run}.out", "{node}_a_w0{run}.err")
    files = [(task.node_index, log) for task in tasks for log in task.logs]
    assert len(files) == len(set(files))


BAD_PLANS: dict[str, tuple[list[tuple[int, int, int, tuple[int, ...]]], str]] = {
    "a GPU given twice": ([(0, 0, 0, (0, 1)), (1, 0, 0, (1, 2))], "GPU 1 of node 0 is assigned twice"),
    "a GPU that is not there": (
        [(0, 0, 0, (3, 4)), (1, 0, 1, (0, 1))],
        "GPU 4 of node 0 is assigned twice or does not",
    ),
    "a node that is not there": ([(0, 0, 0, (0, 1)), (1, 0, 2, (0, 1))], "a_w1: rank 1 on node 2 is out of place"),
    "a worker too few": ([(0, 0, 0, (0, 1))], "the workers of the plan are not those of the job"),
    "workers out of order": ([(1, 0, 0, (0, 1)), (0, 0, 0, (2, 3))], "the workers of the plan are not those of"),
    "a worker too small": (
        [(0, 0, 0, (0, 1)), (1, 0, 1, (0,))],
        "a_w1: its processes do not make up a worker of 2 GPUs",
    ),
    "a worker over two nodes": ([(0, 0, 0, (0, 1)), (1, 0, 0, (2,)), (1, 1, 1, (0,))], "a_w1: its processes do not"),
    "a leader that is not first": ([(0, 1, 0, (0,)), (0, 0, 0, (1,)), (1, 0, 0, (2, 3))], "a_w0: its processes do not"),
}  # processes of two workers of 2 GPUs each, as (index, local rank, node, GPUs), on two nodes of 4 GPUs


@pytest.mark.parametrize("kind", BAD_PLANS)
def test_a_plan_that_breaks_an_invariant_is_refused(kind: str) -> None:
    parts, problem = BAD_PLANS[kind]
    tasks = [
        Task(f"a_w{index}", "a", index, rank, local, node, gpus)
        for rank, (index, local, node, gpus) in enumerate(parts)
    ]
    spec = spec_of(2, 4, [(2, 2)])
    with pytest.raises(TopologyError, match=problem):
        topology._check_invariants(tasks, merge_roles(spec), spec.resources, range(2))
    topology._check_invariants(place_workers(spec).tasks, merge_roles(spec), spec.resources, range(2))


def test_ranks_out_of_order_are_refused() -> None:
    spec = spec_of(2, 4, [(2, 2)])
    with pytest.raises(TopologyError, match="rank 1 on node 0 is out of place"):
        topology._check_invariants(place_workers(spec).tasks[::-1], merge_roles(spec), spec.resources, range(2))


def test_huge_numbers_are_refused_without_millions_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    task_count = 0

    def task(*_: object) -> Task:
        nonlocal task_count
        task_count += 1
        assert task_count < 10_000, "one task more for each node that the job does not have"
        return Task("a_w0", "a", 0, 0, 0, 0)

    monkeypatch.setattr(topology, "Task", task)
    with pytest.raises(TopologyError, match="need 80000000 nodes of 1 GPUs and the job has 2"):
        place_workers(spec_of(2, 1, [(1, 80_000_000)]))
    with pytest.raises(TopologyError, match="the workers need 80000000 nodes; a job has at most 100000"):
        place_workers(job_spec(resources={"gpus_per_node": 1}, workers=[{"gpus": 80_000_000, "command": "x"}]))
