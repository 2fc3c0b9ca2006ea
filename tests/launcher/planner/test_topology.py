"""Placement of workers on nodes and GPUs."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import JobSpec
from launcher.planner import topology
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
