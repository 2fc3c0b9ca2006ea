"""Roles counted in `resources`: prefill, decode and agg, and reserved nodes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import JobSpec
from launcher.planner.topology import Topology, place_workers
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


def spec_of(text: str, workers: list[dict[str, Any]] | None = None) -> JobSpec:
    return job_spec(resources=resources_of(text), workers=workers or [])


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


CASES = [
    # one role, whole nodes
    ("n=8 A=1", None, "1n A0@0:0-7"),
    ("n=8 A=2", None, "2n A0@0:0-7 A1@1:0-7"),
    ("n=4 A=2 a=4", 2, "2n A0@0:0-3 A1@1:0-3"),
    ("n=8 A=1 a=16", None, "2n A0@0:0-7+1:0-7"),
    ("n=4 A=2 a=8", 4, "4n A0@0:0-3+1:0-3 A1@2:0-3+3:0-3"),
    ("n=1 P=2 p=2", None, "4n P0@0:0+1:0 P1@2:0+3:0"),
    # one role, parts of a node
    ("n=8 D=2 d=4", None, "1n D0@0:0-3 D1@0:4-7"),
    ("n=4 D=2 d=2", 2, "2n D0@0:0-1 D1@0:2-3"),
    ("n=4 P=1 p=1", 1, "1n P0@0:0"),
    ("n=4 D=4 d=1", None, "1n D0@0:0 D1@0:1 D2@0:2 D3@0:3"),
    ("n=8 A=5 a=2", None, "2n A0@0:0-1 A1@0:2-3 A2@0:4-5 A3@0:6-7 A4@1:0-1"),
    # what does not fit goes to the next node, the rest idles
    ("n=8 D=3 d=3", None, "2n D0@0:0-2 D1@0:3-5 D2@1:0-2"),
    ("n=4 A=2 a=3", None, "2n A0@0:0-2 A1@1:0-2"),
    ("n=8 A=3 a=5", None, "3n A0@0:0-4 A1@1:0-4 A2@2:0-4"),
    # prefill fills its nodes, decode starts on the next one
    ("n=8 P=4 D=1 Pn=4 Dn=8", None, "12n P0@0:0-7 P1@1:0-7 P2@2:0-7 P3@3:0-7 D0@4:0-7" + "".join(
        f"+{node}:0-7" for node in range(5, 12))),
    ("n=4 P=2 D=2 p=2 d=2", 2, "2n P0@0:0-1 P1@0:2-3 D0@1:0-1 D1@1:2-3"),
    ("n=4 P=2 D=2", None, "4n P0@0:0-3 P1@1:0-3 D0@2:0-3 D1@3:0-3"),
    ("n=4 P=1 D=1 p=8 d=8", 4, "4n P0@0:0-3+1:0-3 D0@2:0-3+3:0-3"),
    ("n=8 P=2 D=4 p=8 d=4", 4, "4n P0@0:0-7 P1@1:0-7 D0@2:0-3 D1@2:4-7 D2@3:0-3 D3@3:4-7"),
    # decode starts on an empty node if one exists and prefill only partly uses its last one
    ("n=4 P=1 D=1 p=2 d=4", 2, "2n P0@0:0-1 D0@1:0-3"),
    ("n=8 P=1 D=1 p=4 d=4", 2, "2n P0@0:0-3 D0@1:0-3"),
    ("n=8 P=1 D=1 p=4 d=4 nodes=5", None, "5n P0@0:0-3 D0@1:0-3"),
    ("n=4 P=3 D=1 p=2 d=16", 11, "11n P0@0:0-1 P1@0:2-3 P2@1:0-1 D0@2:0-3+3:0-3+4:0-3+5:0-3"),
    ("n=8 P=1 D=3 p=4 d=4", None, "3n P0@0:0-3 D0@1:0-3 D1@1:4-7 D2@2:0-3"),
    ("n=8 P=1 D=1 p=2 d=2 Pn=1 Dn=1", None, "2n P0@0:0-1 D0@1:0-1"),
    # otherwise it shares the node
    ("n=8 P=1 D=1 p=4 d=4", 1, "1n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=1 D=1 p=4 d=4", None, "1n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=3 D=2 p=2 d=1", 1, "1n P0@0:0-1 P1@0:2-3 P2@0:4-5 D0@0:6 D1@0:7"),
    ("n=8 P=3 D=1 p=4 d=4 nodes=2", None, "2n P0@0:0-3 P1@0:4-7 P2@1:0-3 D0@1:4-7"),
    # or when the job file colocates them
    ("n=8 P=1 D=1 p=4 d=4 together", 2, "2n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=1 D=3 p=4 d=4 together", 2, "2n P0@0:0-3 D0@0:4-7 D1@1:0-3 D2@1:4-7"),
    ("n=8 P=1 D=1 p=4 d=8 together", 2, "2n P0@0:0-3 D0@1:0-7"),
    ("n=8 P=1 D=1 p=4 d=4 together Pn=1 Dn=1", None, "1n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=1 D=1 p=4 d=4 together Pn=1 Dn=1 nodes=2", None, "2n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=1 D=3 p=4 d=4 together Pn=1 Dn=1", None, "2n P0@0:0-3 D0@0:4-7 D1@1:0-3 D2@1:4-7"),
    # spread: a small worker has a whole node
    ("n=4 P=1 D=2 p=1 d=2 spread", 3, "3n P0@0:0 D0@1:0-1 D1@2:0-1"),
    ("n=4 D=2 d=2 spread", None, "2n D0@0:0-1 D1@1:0-1"),
    ("n=8 A=3 a=8 spread", None, "3n A0@0:0-7 A1@1:0-7 A2@2:0-7"),
    ("n=8 P=1 D=1 p=4 d=4 spread together", None, "2n P0@0:0-3 D0@1:0-3"),
    # sizes from the nodes of a role
    ("n=8 A=2 An=4", None, "4n A0@0:0-7+1:0-7 A1@2:0-7+3:0-7"),
    ("n=8 A=4 An=1", None, "1n A0@0:0-1 A1@0:2-3 A2@0:4-5 A3@0:6-7"),
    ("n=8 P=2 Pn=1 D=1 Dn=2", None, "3n P0@0:0-3 P1@0:4-7 D0@1:0-7+2:0-7"),
    ("n=4 P=6 Pn=3 D=1 Dn=1", None, "4n P0@0:0-1 P1@0:2-3 P2@1:0-1 P3@1:2-3 P4@2:0-1 P5@2:2-3 D0@3:0-3"),
    # decode without its own nodes uses those of prefill, and its size
    ("n=8 P=1 D=1 Pn=1 Dn=0 p=4", None, "1n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=1 D=1 Pn=2 Dn=0 p=4", None, "2n P0@0:0-3 D0@1:0-3"),
    ("n=8 P=1 D=2 Pn=1 Dn=0 p=4 d=2", None, "1n P0@0:0-3 D0@0:4-5 D1@0:6-7"),
    ("n=8 P=6 D=2 Pn=2 Dn=0", None, "2n P0@0:0-1 P1@0:2-3 P2@0:4-5 P3@0:6-7 P4@1:0-1 P5@1:2-3 D0@1:4-5 D1@1:6-7"),
    ("n=8 P=1 D=1 Pn=1 Dn=0", None, "1n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=1 D=1 Pn=4 Dn=0", None, "4n P0@0:0-7+1:0-7 D0@2:0-7+3:0-7"),
    ("n=8 P=3 D=1 d=2 Pn=1 Dn=0", None, "1n P0@0:0-1 P1@0:2-3 P2@0:4-5 D0@0:6-7"),
    # and starts on an empty one of them only if there is room
    ("n=8 P=2 D=4 Pn=2 Dn=0 p=2", None, "2n P0@0:0-1 P1@0:2-3 D0@1:0-1 D1@1:2-3 D2@1:4-5 D3@1:6-7"),
    (
        "n=8 P=2 D=6 Pn=2 Dn=0",
        None,
        "2n P0@0:0-1 P1@0:2-3 D0@0:4-5 D1@0:6-7 D2@1:0-1 D3@1:2-3 D4@1:4-5 D5@1:6-7",
    ),
    # agg comes after both
    ("n=8 P=1 D=1 A=1", None, "3n P0@0:0-7 D0@1:0-7 A0@2:0-7"),
    ("n=8 P=1 A=2 p=4 a=4", None, "2n P0@0:0-3 A0@0:4-7 A1@1:0-3"),
    ("n=8 P=1 A=1 p=4 a=8", 2, "2n P0@0:0-3 A0@1:0-7"),
    # nodes of the job file have precedence over available nodes
    ("n=8 A=1 nodes=1", 4, "1n A0@0:0-7"),
    ("n=8 P=1 D=1 p=4 d=4 Pn=1 Dn=0", 4, "1n P0@0:0-3 D0@0:4-7"),
    ("n=8 A=1", 3, "3n A0@0:0-7"),
    # a role with 0 workers does not exist
    ("n=4 P=0 D=2 A=0 p=0 d=2 a=0", 2, "2n D0@0:0-1 D1@0:2-3"),
    ("n=8 P=0 D=1 A=0", None, "1n D0@0:0-7"),
    ("n=8 P=0 D=1 Pn=0 Dn=1", None, "1n D0@0:0-7"),
    # one task per GPU
    ("n=4 A=1 a=2 gpu", None, "1n A0@0:0+0:1"),
    ("n=2 P=1 D=1 p=4 d=1 gpu", None, "3n P0@0:0+0:1+1:0+1:1 D0@2:0"),
    ("n=0 A=2 gpu", None, "1n A0@0:- A1@0:-"),
    # reserved nodes: the first for infra and front ends, the last for the client
    ("n=8 A=2 infra", None, "3n A0@1:0-7 A1@2:0-7"),
    ("n=8 A=1 frontend client", None, "3n A0@1:0-7"),
    ("n=8 P=1 D=1 p=4 d=4 infra frontend client", None, "4n P0@2:0-3 D0@2:4-7"),
    ("n=8 P=1 D=1 p=4 d=4 client nodes=3", None, "3n P0@0:0-3 D0@1:0-3"),
    ("n=8 P=1 D=1 p=4 d=4 client nodes=2", None, "2n P0@0:0-3 D0@0:4-7"),
    ("n=8 P=2 Pn=1 D=1 Dn=1 infra", None, "3n P0@1:0-3 P1@1:4-7 D0@2:0-7"),
    # without GPUs
    ("n=0 P=1 D=3 Pn=1 Dn=1", None, "2n P0@0:- D0@0:- D1@0:- D2@1:-"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "available", "expected"), CASES, ids=[f"{text} on {have}" for text, have, _ in CASES])
def test_workers_counted_in_resources_are_placed(text: str, available: int | None, expected: str) -> None:
    assert placement_text(place_workers(spec_of(text), available)) == expected


PROBLEMS = [
    # sizes
    (
        "n=8 P=1 p=12",
        None,
        ("resources.gpus_per_prefill: 12 is neither at most gpus_per_node = 8 nor a multiple of it; use 8 or 16"),
    ),
    (
        "n=4 P=2 p=6 D=1 d=8",
        6,
        ("resources.gpus_per_prefill: 6 is neither at most gpus_per_node = 4 nor a multiple of it; use 4 or 8"),
    ),
    ("n=4 A=1 a=5", 2, "resources.gpus_per_agg: 5 is neither at most gpus_per_node = 4 nor a multiple of it; use 4 or"),
    ("n=0 A=1 a=2", None, "resources.gpus_per_agg: 2 GPUs for each agg and resources.gpus_per_node is 0; set"),
    (
        "P=1 D=1",
        None,
        (
            "resources.gpus_per_node: is missing, and the workers counted in `resources` "
            "use GPUs; set it to the GPUs of a node, here or in the cluster file, or to 0"
        ),
    ),
    # shares
    (
        "n=8 P=3 Pn=1 D=1 Dn=1",
        None,
        (
            "resources.prefill_workers: the 8 GPUs of prefill_nodes: 1 cannot be divided into "
            "3 equal workers of whole nodes or parts of one; use 2 or 4 workers, or set gpus_per_prefill: 2"
        ),
    ),
    (
        "n=8 A=2 An=3",
        None,
        (
            "resources.agg_workers: the 24 GPUs of agg_nodes: 3 cannot be divided into 2 equal workers of "
            "whole nodes or parts of one; use 1 or 3 workers, or set gpus_per_agg: 8"
        ),
    ),
    ("n=8 A=4 An=3", None, "use 3 or 6 workers, or set gpus_per_agg: 4"),
    (
        "n=2 A=9 An=2",
        None,
        (
            "resources.agg_workers: the 4 GPUs of agg_nodes: 2 cannot be divided into 9 equal workers of "
            "whole nodes or parts of one; use 4 workers"
        ),
    ),
    ("n=8 A=4 An=2 spread", None, "into 4 equal workers of whole nodes or parts of one; use 2 workers"),
    # nodes that would be used twice
    (
        "n=8 P=1 D=1 p=4 d=8",
        1,
        (
            "resources.nodes: 1 prefill x 4 GPUs, 1 decode x 8 GPUs need 2 nodes of 8 GPUs and the "
            "job has 1; name 1 more, or fewer or smaller workers"
        ),
    ),
    ("n=8 P=1 D=1 p=4 d=8 nodes=1 together", None, "need 2 nodes of 8 GPUs and the job has 1; set nodes: 2, or fewer"),
    # too few nodes
    (
        "n=4 P=2 D=2 p=8 d=8",
        2,
        ("2 prefill x 8 GPUs, 2 decode x 8 GPUs need 8 nodes of 4 GPUs and the job has 2; name 6 more"),
    ),
    (
        "n=8 P=1 D=3 p=4 d=4 nodes=2",
        None,
        (
            "need 3 nodes of 8 GPUs and the job has 2; set nodes: 3, or "
            "colocate_prefill_decode: true, or fewer or smaller workers"
        ),
    ),
    ("n=4 D=2 d=2 spread nodes=1", None, "2 decode x 2 GPUs need 2 nodes of 4 GPUs and the job has 1; set nodes: 2"),
    (
        "n=8 P=1 D=1 Pn=1 Dn=0 p=8",
        None,
        ("1 prefill x 8 GPUs, 1 decode x 8 GPUs need 2 nodes of 8 GPUs and the job has 1; set nodes: 2"),
    ),
    (
        "n=8 P=5 D=2 Pn=2 Dn=0",
        None,
        (
            "the 16 GPUs of prefill_nodes: 2, which 5 prefill and 2 decode workers share, cannot be divided "
            "into 7 equal workers of whole nodes or parts of one; use 4 or 8 workers in all, or set gpus_per_prefill: 2"
        ),
    ),
    (
        "n=8 P=2 D=1 d=3 Pn=1 Dn=0",
        None,
        (
            "resources.gpus_per_prefill: is missing, and the 5 GPUs that decode leaves of prefill_nodes: 1 cannot be "
            "divided into 2 equal workers of whole nodes or parts of one; set it to 2"
        ),
    ),
    (
        "n=1 P=1 D=1 Pn=1 Dn=0",
        None,
        (
            "the 1 GPUs of prefill_nodes: 1, which 1 prefill and 1 decode workers share, cannot be divided "
            "into 2 equal workers of whole nodes or parts of one; set prefill_nodes: 2"
        ),
    ),
    ("n=8 P=1 D=1 d=8 Pn=1 Dn=0", None, "leaves of prefill_nodes: 1 cannot be divided into 1 equal workers"),
    ("n=8 P=1 D=1 d=16 Pn=2 Dn=0", None, "of whole nodes or parts of one; set prefill_nodes: 3 or more"),
    ("n=8 P=1 D=3 d=2 Pn=3 Dn=0 spread", None, "the 0 GPUs that decode leaves of prefill_nodes: 3"),
    (
        "n=8 A=1 infra client nodes=2",
        None,
        ("1 agg x 8 GPUs need 1 nodes of 8 GPUs and 2 for infra and client alone and the job has 2; set nodes: 3"),
    ),
    (
        "n=8 P=2 Pn=1 p=8 D=1 Dn=2 d=8",
        None,
        (
            "resources.prefill_nodes: 2 prefill x 8 GPUs need 2 nodes of 8 GPUs and "
            "prefill_nodes is 1; set prefill_nodes: 2, or fewer or smaller workers"
        ),
    ),
    ("n=8 A=3 An=1 a=2 spread", None, "resources.agg_nodes: 3 agg x 2 GPUs need 3 nodes of 8 GPUs and agg_nodes is 1"),
    (
        "n=8 P=1 Pn=2 D=1 Dn=2 client nodes=4",
        None,
        (
            "resources.nodes: 4, and prefill_nodes + decode_nodes, and 1 for "
            "client alone, are 5; set nodes: 5, or leave it out"
        ),
    ),
    ("n=8 A=4 nodes=4", 3, "resources.nodes: 4 nodes for 4 agg x 8 GPUs, and there are 3; name 1 more, or ask for"),
    (
        "n=8 P=2 D=2 Pn=2 Dn=2 infra",
        4,
        (
            "resources.prefill_nodes + resources.decode_nodes: 4 nodes and 1 for infra alone for 2 prefill x 8 GPUs, "
            "2 decode x 8 GPUs, and there are 4; name 1 more"
        ),
    ),
    (
        "n=8 A=2 An=2",
        1,
        "resources.agg_nodes: 2 nodes for 2 agg x 8 GPUs, and there are 1; name 1 more, or ask for fewer",
    ),
    ("n=1 A=100000 a=5", None, "the workers need 500000 nodes; a job has at most 100000"),
    ("n=1 A=100000 a=5 nodes=9", None, "a job has at most 100000 nodes: use fewer or smaller workers"),
    # missing workers and nodes
    ("n=8", None, "workers: the job has none; set resources.agg_workers: 1, or name a role under `workers`"),
    ("n=8 A=1 a=0", None, "resources.gpus_per_agg: 0 GPUs for 1 agg workers; set it to 1 or more, or resources.agg"),
    ("n=8 P=0 D=0", None, "workers: all counts are 0; set resources.agg_workers: 1, or name a role under `workers`"),
    ("n=8 Pn=2 D=1", None, "resources.prefill_nodes: 2 nodes and no prefill worker on them; set prefill_workers, or"),
    ("n=8 P=2 Pn=0 D=1 Dn=1", None, "resources.prefill_nodes: 0 nodes for 2 prefill workers; set prefill_nodes: 1 or"),
    (
        "n=8 D=2 Dn=0",
        None,
        "resources.decode_nodes: 0 nodes for 2 decode workers, and no prefill nodes that they could share; ",
    ),
]


@pytest.mark.parametrize(
    ("text", "available", "problem"), PROBLEMS, ids=[f"{text} on {have}" for text, have, _ in PROBLEMS]
)
def test_a_problem_names_required_and_available_nodes_and_a_fix(text: str, available: int | None, problem: str) -> None:
    with pytest.raises(TopologyError) as caught:
        place_workers(spec_of(text), available)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


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
