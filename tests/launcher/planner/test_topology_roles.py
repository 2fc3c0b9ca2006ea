"""Roles counted in `resources`: prefill, decode and agg, and reserved nodes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import JobSpec
from launcher.planner.topology import Topology, place_workers
from tests.launcher.conftest import Golden
from tests.support.cases import answered
from tests.support.launcher import job_spec

KEYS = {
    "n": "gpus_per_node",
    "P": "prefill_workers",
    "D": "decode_workers",
    "A": "agg_workers",
    "p": "gpus_per_prefill",
    "d": "gpus_per_decode",
    "a": "gpus_per_agg",
    "Pn": "prefill_nodes",
    "Dn": "decode_nodes",
    "An": "agg_nodes",
    "nodes": "nodes",
}
FLAGS: dict[str, dict[str, object]] = {
    "spread": {"spread_workers": True},
    "together": {"colocate_prefill_decode": True},
    "gpu": {"process_granularity": "gpu"},
    "infra": {"infra_node": True},
    "frontend": {"frontend_node": True},
    "client": {"client_node": True},
}


def resources_of(text: str) -> dict[str, Any]:
    """``n=8 P=1 d=4 spread`` as the keys of a job file."""
    found: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        found.update({KEYS[key]: int(value)} if equals else FLAGS[key])
    return found


def spec_of(text: str, workers: Sequence[dict[str, Any]] = ()) -> JobSpec:
    """The job; ``w=2x4`` are two workers of 4 GPUs of the next of the roles a, b, c, ..."""
    sizes = re.findall(r"w=(\d+)x(\d+)", text)
    own = [
        {"role": role, "count": int(count), "gpus": int(gpus), "command": "x"}
        for role, (count, gpus) in zip("abcdef", sizes, strict=False)
    ]
    return job_spec(resources=resources_of(re.sub(r"w=\S+", "", text)), workers=[*workers, *own])


def placement_text(layout: Topology) -> str:
    """``P0@0:0-3`` is worker 0 of prefill on node 0 with GPUs 0 to 3; ``+1:0-3`` is its next task."""
    texts: list[str] = []
    for task in layout.tasks:
        gpus = f"{task.gpus[0]}-{task.gpus[-1]}" if len(task.gpus) > 1 else "".join(map(str, task.gpus)) or "-"
        if task.local_rank:
            texts[-1] += f"+{task.node_index}:{gpus}"
        else:
            texts.append(f"{task.role[0].upper()}{task.index}@{task.node_index}:{gpus}")
    return " ".join([f"{layout.nodes}n", *texts])


def test_workers_are_placed_or_a_problem_names_a_fix(golden: Golden) -> None:
    def placement(case: str) -> Sequence[str]:
        text, _, have = case.strip().partition(" on ")
        try:
            return [placement_text(place_workers(spec_of(text), int(have) if have else None))]
        except TopologyError as error:
            return error.problems

    golden("launcher/placements.txt", answered("launcher/placements.txt", placement))


def test_all_problems_of_sizes_are_reported_together() -> None:
    with pytest.raises(TopologyError) as caught:
        place_workers(spec_of("n=8 P=1 D=1 p=12 d=9"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "resources.gpus_per_prefill",
        "resources.gpus_per_decode",
    ]


def test_a_role_gets_missing_keys_from_resources() -> None:
    workers: list[dict[str, Any]] = [
        {"role": "trainer", "gpus": 2, "command": "t"},
        {"role": "decode", "command": "d"},
        {"role": "prefill", "gpus": 4, "command": "p", "critical": False},
    ]
    layout = place_workers(spec_of("n=8 P=1 D=2 d=2 nodes=3", workers))
    assert placement_text(layout) == "3n P0@0:0-3 D0@1:0-1 D1@1:2-3 T0@1:4-5"
    assert [role.options.command for role in layout.roles] == ["p", "d", "t"]
    assert [task.critical for task in layout.tasks] == [False, True, True, True]


def test_an_entry_of_a_serving_role_may_set_everything_itself() -> None:
    workers: list[dict[str, Any]] = [
        {"role": "decode", "count": 2, "gpus": 4, "command": "d"},
        {"role": "prefill", "gpus": 8, "command": "p"},
    ]
    assert placement_text(place_workers(spec_of("n=8 nodes=2", workers))) == "2n P0@0:0-7 D0@1:0-3 D1@1:4-7"
    assert (
        placement_text(place_workers(spec_of("n=8", [{"role": "agg", "count": 2, "command": "a"}])))
        == "1n A0@0:- A1@0:-"
    )


def test_decode_without_gpus_needs_no_empty_node() -> None:
    workers: list[dict[str, Any]] = [
        {"role": "decode", "gpus": 0, "command": "d"},
        {"role": "trainer", "count": 3, "gpus": 4, "command": "t"},
    ]
    assert (
        placement_text(place_workers(spec_of("n=8 P=1 p=4", workers)))
        == "2n P0@0:0-3 D0@0:- T0@0:4-7 T1@1:0-3 T2@1:4-7"
    )


@pytest.mark.parametrize(
    ("text", "entry", "problem"),
    [
        ("n=8 D=2", {"count": 3}, "workers[0].count: 3, and resources.decode_workers is 2; leave one of them out"),
        ("n=8 D=2 d=4", {"gpus": 8}, "workers[0].gpus: 8, and resources.gpus_per_decode is 4; leave one of them out"),
        ("n=8 D=0", {"count": 3}, "workers[0].count: 3, and resources.decode_workers is 0; leave one of them out"),
        ("n=8 D=1", {"gpus": 9}, "workers[0].gpus: 9 is neither at most gpus_per_node = 8 nor a multiple of it; use 8"),
    ],
)
def test_an_entry_and_resources_that_differ_are_both_named(text: str, entry: dict[str, int], problem: str) -> None:
    with pytest.raises(TopologyError) as caught:
        place_workers(spec_of(text, [{"role": "decode", "command": "d", **entry}]))
    assert problem in str(caught.value)


def test_an_entry_and_resources_that_agree_are_one_role() -> None:
    spec = spec_of("n=8 D=2 d=4", [{"role": "decode", "count": 2, "gpus": 4, "command": "d"}])
    assert placement_text(place_workers(spec)) == "1n D0@0:0-3 D1@0:4-7"


@pytest.mark.parametrize(
    ("text", "infra", "frontends", "client"),
    [
        ("n=8 A=3", 0, (0, 1, 2), 0),
        ("n=8 A=3 infra", 0, (1, 2, 3), 1),
        ("n=8 A=3 frontend", 0, (0,), 0),
        ("n=8 A=3 infra frontend", 0, (1,), 1),
        ("n=8 A=3 client", 0, (0, 1, 2), 3),
        ("n=8 A=3 infra frontend client", 0, (1,), 5),
    ],
)
def test_services_run_on_their_own_nodes_or_with_the_first_workers(
    text: str, infra: int, frontends: tuple[int, ...], client: int
) -> None:
    layout = place_workers(spec_of(text))
    assert (layout.infra_node, layout.frontend_nodes, layout.client_node) == (infra, frontends, client)


def test_the_job_file_has_precedence_over_the_backend_granularity() -> None:
    def processes(**over: str) -> int:
        spec = job_spec(resources={**resources_of("n=4 A=1"), **over}, workers=[])
        return len(place_workers(spec, granularity="gpu").tasks)

    assert processes() == 4
    assert processes(process_granularity="node") == 1


def test_tasks_of_one_worker_on_one_node_have_their_own_logs() -> None:
    tasks = place_workers(spec_of("n=2 A=2 a=4 gpu")).tasks
    assert tasks[3].logs == ("{node}_agg_w0_p3{run}.out", "{node}_agg_w0_p3{run}.err")
    files = [(task.node_index, log) for task in tasks for log in task.logs]
    assert len(files) == len(set(files))
    assert place_workers(spec_of("n=1 A=1 a=2 gpu")).tasks[1].logs[0] == "{node}_agg_w0{run}.out"


counts = st.none() | st.integers(0, 5)
sizes = st.none() | st.integers(1, 20)
flag = st.booleans()
RESOURCES = st.fixed_dictionaries(
    {"gpus_per_node": st.integers(0, 9)},
    optional={
        **{f"{role}_workers": counts for role in ("prefill", "decode", "agg")},
        **{f"gpus_per_{role}": sizes for role in ("prefill", "decode", "agg")},
        **{f"{role}_nodes": st.none() | st.integers(0, 5) for role in ("prefill", "decode", "agg")},
        **dict.fromkeys(("spread_workers", "colocate_prefill_decode"), flag),
        **dict.fromkeys(("infra_node", "frontend_node", "client_node"), flag),
        "nodes": st.none() | st.integers(1, 9),
        "process_granularity": st.sampled_from([None, "node", "gpu"]),
    },
)
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["prefill", "decode", "agg", "trainer", "control"]), "command": st.just("x")},
        optional={"count": st.integers(0, 5), "gpus": st.integers(0, 20)},
    ),
    max_size=3,
    unique_by=lambda entry: str(entry["role"]),
)


@given(RESOURCES, ENTRIES, st.none() | st.integers(1, 9))
@example({"gpus_per_node": 8, "prefill_workers": 1, "gpus_per_prefill": 4, "decode_workers": 1}, [], 1)
@example({"gpus_per_node": 8, "prefill_workers": 1, "agg_workers": 1}, [], None)
def test_every_plan_satisfies_its_invariants_or_has_problems(
    resources: dict[str, Any], entries: list[dict[str, Any]], available: int | None
) -> None:
    spec = job_spec(resources=resources, workers=entries)
    try:
        layout = place_workers(spec, available)
    except TopologyError as error:
        problems = error.problems
    else:
        problems = ("resources.: nothing",)
        check_invariants(layout, resources, available)
    assert problems
    assert all(re.match(r"(resources\.|workers)[^ ]*( \+ resources\.\w+)*: \w", problem) for problem in problems)


def check_invariants(layout: Topology, resources: Mapping[str, Any], available: int | None) -> None:
    """Check every invariant of a plan against its tasks and the job file."""
    per_node = resources["gpus_per_node"]
    owned = [(task.node_index, gpu) for task in layout.tasks for gpu in task.gpus]
    assert len(owned) == len(set(owned))
    assert all(0 <= gpu < per_node for _, gpu in owned)
    assert all(list(task.gpus) == sorted(task.gpus) for task in layout.tasks)
    assert [task.rank for task in layout.tasks] == list(range(len(layout.tasks)))
    front_count = bool(resources.get("infra_node")) + bool(resources.get("frontend_node"))
    reserved = {*range(front_count)} | ({layout.nodes - 1} if resources.get("client_node") else set())
    assert {task.node_index for task in layout.tasks} <= set(range(layout.nodes)) - reserved
    assert resources.get("nodes") in (None, layout.nodes)
    assert available is None or layout.nodes <= available
    order = [role.name for role in layout.roles]
    assert order == sorted(order, key=lambda name: ("prefill", "decode", "agg", "trainer", "control").index(name)) or {
        "trainer",
        "control",
    } <= set(order)
    by_gpu = resources.get("process_granularity") == "gpu"
    seen: list[tuple[str, int]] = []
    for (name, index), parts in workers_of(layout):
        seen.append((name, index))
        role = next(role for role in layout.roles if role.name == name)
        nodes = sorted({task.node_index for task in parts})
        assert [task.local_rank for task in parts] == list(range(len(parts)))
        assert parts[0].node_index == nodes[0]
        assert sum(len(task.gpus) for task in parts) == role.gpus
        assert len(parts) == (max(1, role.gpus) if by_gpu else len(nodes))
        if role.gpus > per_node:
            assert len(nodes) * per_node == role.gpus
            assert nodes == list(range(nodes[0], nodes[0] + len(nodes)))
        else:
            assert len(nodes) == 1
        if resources.get("spread_workers") and role.gpus:
            assert {(task.role, task.index) for task in layout.tasks if task.gpus and task.node_index in nodes} == {
                (name, index)
            }
    assert seen == [(role.name, index) for role in layout.roles for index in range(role.count)]


def workers_of(layout: Topology) -> Iterator[tuple[tuple[str, int], list[Task]]]:
    """Tasks by worker, in order of rank."""
    found: dict[tuple[str, int], list[Task]] = {}
    for task in layout.tasks:
        found.setdefault((task.role, task.index), []).append(task)
    yield from found.items()


FIXABLE = st.fixed_dictionaries(
    {
        "gpus_per_node": st.integers(1, 9),
        "prefill_workers": st.integers(1, 5),
        "decode_workers": st.integers(1, 5),
    },
    optional={
        **{f"gpus_per_{role}": sizes for role in ("prefill", "decode")},
        **{f"{role}_nodes": st.none() | st.integers(0, 5) for role in ("prefill", "decode")},
        **dict.fromkeys(("spread_workers", "colocate_prefill_decode", "infra_node", "client_node"), flag),
        "nodes": st.none() | st.integers(1, 9),
    },
)


SHARED = {"gpus_per_node": 2, "decode_nodes": 0}


@given(FIXABLE, st.none() | st.integers(1, 9))
@example({**SHARED, "gpus_per_node": 1, "prefill_workers": 1, "decode_workers": 1, "prefill_nodes": 1}, None)
@example({**SHARED, "prefill_workers": 1, "decode_workers": 2, "prefill_nodes": 1}, None)
@example({**SHARED, "prefill_workers": 2, "decode_workers": 1, "gpus_per_decode": 1, "prefill_nodes": 2}, None)
def test_a_job_with_the_suggested_fixes_is_placed(resources: dict[str, Any], available: int | None) -> None:
    for _ in range(8):
        try:
            place_workers(job_spec(resources=resources, workers=[]), available)
        except TopologyError as error:
            problem = error.problems[0]
        else:
            return
        over, available = apply_fix(problem, available)
        resources = {**resources, **over}
    pytest.fail(f"the fixes do not help: {problem}")


def apply_fix(problem: str, available: int | None) -> tuple[dict[str, int], int | None]:
    """Changes of the job file by the first fix of a problem, and the nodes available then."""
    if more := re.search(r"name (\d+) more", problem):
        assert available is not None
        return {}, available + int(more[1])
    if setting := re.search(r"set (nodes|\w+_nodes|gpus_per_\w+): (\d+)", problem):
        return {setting[1]: int(setting[2])}, available
    if all_in_all := re.search(r"use (\d+).* workers in all", problem):
        return {"prefill_workers": 1, "decode_workers": int(all_in_all[1]) - 1}, available
    use = re.search(r"resources\.(\w+): .*(?:use|set it to) (\d+)", problem)
    assert use, problem
    return {use[1]: int(use[2])}, available


@given(
    st.integers(1, 12),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.integers(1, 40),
    st.booleans(),
)
def test_both_fixes_for_an_uneven_share_work(nodes: int, per_node: int, count: int, spread: bool) -> None:
    def resources(**over: int) -> dict[str, Any]:
        return {"gpus_per_node": per_node, "agg_nodes": nodes, "agg_workers": count, "spread_workers": spread} | over

    try:
        layout = place_workers(job_spec(resources=resources(), workers=[]))
    except TopologyError as error:
        text = str(error)
        fixes = [{"agg_workers": int(number)} for number in re.findall(r"(\d+)(?= or \d+ workers| workers)", text)]
        fixes += [{"gpus_per_agg": int(number)} for number in re.findall(r"gpus_per_agg: (\d+)", text)]
        assert fixes
        for fix in fixes:
            assert place_workers(job_spec(resources=resources(**fix), workers=[])).nodes == nodes
    else:
        assert sum(len(task.gpus) for task in layout.tasks) == nodes * per_node
