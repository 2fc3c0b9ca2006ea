"""What sinfo of Slurm 22.05, 24.11 and 26.05 prints of nodes."""

from pathlib import Path

import pytest

from exporter.slurm.nodes import parse_nodes

SAMPLES = Path(__file__).parent / "samples"


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_nodes_of_every_version_are_read(version: str) -> None:
    busy, mixed, down = parse_nodes((SAMPLES / f"sinfo.{version}.txt").read_text())
    assert (busy.node, busy.state, busy.partition, busy.gpus, busy.gpus_used) == (
        "node1",
        "completing",
        "gpu",
        {"": 4},
        2,
    )
    assert (mixed.state, mixed.responds, mixed.reason, mixed.is_out_of_service) == ("mixed", True, None, False)
    assert (mixed.cpus, mixed.cpus_used, mixed.memory_mib) == (16, 8, 64000)
    assert (down.state, down.responds, down.reason, down.is_out_of_service) == ("down", False, "Not responding", True)


def test_types_of_gpus_and_odd_reasons_are_read() -> None:
    row = "n1|draining*|a|gpu:h100:6(S:0-1),gpu:h100:2,shard:64|gpu:h100:3(IDX:0,2,4)|N/A|N/A|fan | of row 3|"
    (node,) = parse_nodes(f"{row}\n\nslurm_load_node: error\n")
    assert (node.gpus, node.gpus_used, node.cpus, node.memory_mib) == ({"h100": 8}, 3, None, None)
    assert (node.reason, node.is_out_of_service) == ("fan | of row 3", True)
    (untyped,) = parse_nodes("n4|mixed|gpu|gpu:(null):8(S:0-1)|gpu:(null):3(IDX:0,2-3)|8/0/0/8|1000|none|\n")
    assert (untyped.gpus, untyped.gpus_used) == ({"": 8}, 3)
    (silent,) = parse_nodes("n3|idle*|gpu|gpu:4|gpu:0|0/8/0/8|1000|none|\n")
    assert (silent.state, silent.is_out_of_service) == ("idle", True)
    (plain,) = parse_nodes("n2|idle|cpu|(null)|gpu:0|0/8/0/8|1000|none|\n")
    assert (plain.gpus, plain.gpus_used) == ({}, None)
