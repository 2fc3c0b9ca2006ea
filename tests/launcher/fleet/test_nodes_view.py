"""The table and the JSON of `gpujob fleet`."""

from typing import Any

import pytest

from exporter.contract.status import HealthReason
from exporter.slurm.nodes import parse_nodes
from exporter.slurm.prices import Prices
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from launcher.fleet.nodes_view import Node, known_nodes, nodes_json, render_nodes
from launcher.fleet.own_runs import NodeHealth, RunProgress
from tests.launcher.conftest import Golden

NOW = 1795395600.0
NODES = parse_nodes(
    """cpu1|mixed|cpu*|(null)|gpu:0|24/8/0/32|128000|none|
cn01|mixed-|gpu|gpu:h100:8(S:0-1)|gpu:h100:6(IDX:0-5)|48/80/0/128|2048000|none|
cn02|idle|gpu|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|0/128/0/128|2048000|none|
cn03|draining|gpu|gpu:h100:8(S:0-1)|gpu:h100:2(IDX:0-1)|16/0/112/128|2048000|fan | of row 3|
cn04|down*|gpu|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|0/0/128/128|2048000|Not responding|
cn02|idle|low|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|0/128/0/128|2048000|none|
"""
)
QUEUE = [
    QueueRow("7", AttemptSnapshot("RUNNING", 1.0, 2.0), "train", None, nodes="cn[01,03]"),
    QueueRow("8_1", AttemptSnapshot("RUNNING", 1.0, 2.0), "arr", None, nodes="cn01"),
    QueueRow("9", AttemptSnapshot("COMPLETED", 1.0, 2.0, 3.0), "old", None, nodes="cn01"),
    QueueRow("10", AttemptSnapshot("PENDING", 1.0), "next", None),
]
BAD = NodeHealth("failure", NOW - 3 * 3600, (HealthReason(gpu="3", severity="failure", words="fell off the bus"),))
RUNS = [
    RunProgress("a", health={"cn01": NodeHealth("warning", NOW - 5), "cn02": BAD, "cn03": NodeHealth("healthy", NOW)}),
    RunProgress("b", health={"cn01": NodeHealth("healthy", NOW), "cn04": NodeHealth("failure", NOW - 90000)}),
]
PRICES = Prices("EUR", {"h100": 2.4})


def nodes() -> list[Node]:
    return known_nodes(NODES, QUEUE, RUNS, NOW)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_that_of_the_golden_page(golden: Golden, width: int) -> None:
    short = render_nodes(nodes(), NOW, verbose=False, prices=PRICES, width=width)
    assert max(map(len, short)) <= width
    long = render_nodes(nodes(), NOW, verbose=True, width=width)
    golden(f"launcher/fleet-{width}.txt", "\n".join([*short, "", *long]) + "\n")


def test_status_says_what_is_known() -> None:
    found = [node.status(NOW) for node in nodes()]
    assert found == [
        "busy 24/32 CPUs",
        "busy 6/8 (warning)",
        "idle (seen 3h 00m ago: failure)",
        "draining",
        "down",  # a report of yesterday counts no more
        "idle (seen 3h 00m ago: failure)",
    ]
    assert {node.status(NOW) for node in known_nodes(NODES[1:2], QUEUE, [], NOW)} == {"busy 6/8"}


def test_jobs_are_those_that_run_on_the_node() -> None:
    assert [node.jobs for node in nodes()] == [(), ("7", "8_1"), (), ("7",), (), ()]
    assert {node.jobs for node in known_nodes(NODES, None, [], NOW)} == {None}


def test_commands_are_for_bad_gpus_and_nodes_out_of_service() -> None:
    assert [node.command() for node in nodes()] == [
        None,
        "scontrol update NodeName=cn01 State=DRAIN Reason='gpujob: warning'",
        "scontrol update NodeName=cn02 State=DRAIN Reason='gpujob: GPU 3: fell off the bus'",
        "scontrol update NodeName=cn03 State=RESUME",
        "scontrol update NodeName=cn04 State=RESUME",
        "scontrol update NodeName=cn02 State=DRAIN Reason='gpujob: GPU 3: fell off the bus'",
    ]


def test_json_has_every_node() -> None:
    body: Any = nodes_json(nodes(), NOW, PRICES)
    first, second = body["instances"][:2]
    assert (first["fleet"], first["resources"]["gpus"], first["price_per_hour"]) == ("cpu", [], None)
    assert second["resources"] == {
        "gpus": [{"name": "h100", "count": 8}],
        "gpus_used": 6,
        "cpus": 128,
        "cpus_used": 48,
        "memory_mib": 2048000,
    }
    assert (second["status"], second["health"], second["jobs"]) == ("busy 6/8 (warning)", "warning", ["7", "8_1"])
    assert second["price_per_hour"] == {"amount": 19.2, "currency": "EUR"}
