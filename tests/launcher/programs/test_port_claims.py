"""Port claims of real wrappers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import run_files
from launcher.plan.ports import OFFSETS
from launcher.programs.port_claims import (
    CLAIM_PREFIX,
    RESERVATION_PREFIX,
    claim_ports,
    read_claimed_ports,
    try_reserve_ports,
)
from launcher.run.before.node_facts import busy_ports
from tests.support.launcher import poll
from tests.support.ports import free_port


def holder(folder: Path, *ports: int) -> "subprocess.Popen[bytes]":
    """Start a wrapper with a worker that never listens."""
    (folder / run_files.WORKERS_DIR).mkdir(exist_ok=True)
    options = ["--run-dir", str(folder), "--worker", "w0", "--rank", "0", "--ports", ",".join(map(str, ports))]
    argv = [sys.executable, "-I", "-m", "launcher.programs.wrapper", *options, "--", "sleep", "60"]
    process = subprocess.Popen(argv, start_new_session=True)
    poll(lambda: (folder / run_files.WORKERS_DIR / "w0_rank0_a0_r0.start.json").exists(), "the worker's start")
    return process


def test_ports_of_a_worker_that_does_not_listen_yet_are_busy(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    assert {first, second}.isdisjoint(busy_ports([first, second]))
    process = holder(tmp_path, first, second)
    try:
        assert {first, second} <= set(busy_ports([first, second]))
        assert first in busy_ports([first - OFFSETS[1]])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    assert {first, second}.isdisjoint(read_claimed_ports())


def test_claims_end_with_the_wrapper(tmp_path: Path) -> None:
    """Background processes of a worker must not keep the ports of a finished job."""
    port = free_port()
    process = holder(tmp_path, port)
    try:
        assert port in read_claimed_ports()
        process.kill()
        process.wait(10)
        assert port not in read_claimed_ports()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_claimed_port_is_not_claimed_again() -> None:
    port, other = free_port(), free_port()
    held = claim_ports([port])
    assert len(held) == 1
    assert len(claim_ports([port, other])) == 1
    held.clear()
    assert port not in read_claimed_ports()


def test_no_ports_are_claimed_without_a_kernel_listing(tmp_path: Path) -> None:
    assert read_claimed_ports(listing=str(tmp_path / "missing")) == set()
    listing = tmp_path / "unix"
    listing.write_text(
        "Num RefCount\n0: 2 0 0 2 1 5 @gpujob-port-6100\n0: 2 0 0 2 1 5 /run/@gpujob-port-x\n0: 2 0 1\n"
        "0: 2 0 0 2 1 5 @gpujob-reserved-port-7200\n"
    )
    assert read_claimed_ports(listing=str(listing)) == {6100, 7200}
    assert read_claimed_ports((CLAIM_PREFIX,), str(listing)) == {6100}
    assert read_claimed_ports((RESERVATION_PREFIX,), str(listing)) == {7200}


def test_all_ports_are_reserved_or_none() -> None:
    first, second, third = free_port(), free_port(), free_port()
    held = try_reserve_ports([second])
    assert held
    assert try_reserve_ports([first, second, third]) is None
    assert {first, third}.isdisjoint(read_claimed_ports())
    held.clear()
    both = try_reserve_ports([first, second, third])
    assert both is not None
    assert {first, second, third} <= read_claimed_ports((RESERVATION_PREFIX,))
    both.clear()
    assert {first, second, third}.isdisjoint(read_claimed_ports())


def test_a_task_may_claim_a_port_that_its_job_has_reserved() -> None:
    """The port is claimed at all times."""
    port = free_port()
    reserved = try_reserve_ports([port])
    claimed = claim_ports([port])
    assert len(claimed) == 1
    reserved = None
    assert (port in read_claimed_ports((CLAIM_PREFIX,)), port in read_claimed_ports((RESERVATION_PREFIX,))) == (
        True,
        False,
    )
    assert reserved is None


@given(st.lists(st.sets(st.integers(1, 8), min_size=1), min_size=1, max_size=5))
def test_one_of_competing_jobs_gets_its_ports_and_no_port_is_shared(wanted: list[set[int]]) -> None:
    base = 1_000_000 + 10 * os.getpid()  # above all ports: these names belong to this process only
    held = [
        (ports, reservation)
        for ports in wanted
        if (reservation := try_reserve_ports(base + port for port in ports)) is not None
    ]
    assert held
    assert sum(len(ports) for ports, _ in held) == len(set().union(*(ports for ports, _ in held)))
    held.clear()
