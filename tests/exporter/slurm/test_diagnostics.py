"""Load of the controller and its clock in the output of sdiag of each version."""

from pathlib import Path

import pytest

from exporter.slurm.diagnostics import RpcUse, parse_diagnostics

SAMPLES = Path(__file__).parent / "samples"


@pytest.mark.parametrize(
    ("version", "time", "threads", "rpcs", "own"),
    [
        ("22.05.8", 1795395084.0, 3, RpcUse(110, 0.059076), RpcUse(37, 0.034158)),
        ("24.11.5", 1795395487.0, 1, RpcUse(98, 0.067511), RpcUse(37, 0.04441)),
        ("26.05.5", 1795395642.0, 1, RpcUse(94, 0.045219), RpcUse(37, 0.0299)),
    ],
)
def test_load_and_time_are_found_in_each_version(
    version: str, time: float, threads: int, rpcs: RpcUse, own: RpcUse
) -> None:
    found = parse_diagnostics((SAMPLES / f"sdiag.{version}.txt").read_text(encoding="utf-8"), 1000)
    assert found is not None
    assert (found.time, found.threads, found.agent_queue) == (time, threads, 0)
    assert found.accounting_queue == (2 if version == "22.05.8" else 0)
    assert (found.rpcs, found.own_rpcs) == (rpcs, own)


def test_without_a_time_nothing_is_known() -> None:
    assert parse_diagnostics("sdiag: error\n", 0) is None
