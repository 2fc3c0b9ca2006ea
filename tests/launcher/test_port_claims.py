"""Claims on ports, held by real wrappers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from exporter import records
from launcher.node_facts import busy_ports
from launcher.port_claims import claim, claimed
from launcher.ports import OFFSETS
from tests.launcher.support import poll
from tests.launcher.test_node_facts import free_port


def holder(folder: Path, *ports: int) -> "subprocess.Popen[bytes]":
    """A wrapper over a worker that never listens, and which has been started."""
    (folder / records.WORKERS_DIR).mkdir(exist_ok=True)
    words = ["--run-dir", str(folder), "--worker", "w0", "--rank", "0", "--ports", ",".join(map(str, ports))]
    argv = [sys.executable, "-I", "-m", "launcher.wrap", *words, "--", "sleep", "60"]
    process = subprocess.Popen(argv, start_new_session=True)
    poll(lambda: (folder / records.WORKERS_DIR / "w0_rank0_a0_r0.start.json").exists(), "the worker's start")
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
    assert {first, second}.isdisjoint(claimed())


def test_a_worker_holds_nothing_itself(tmp_path: Path) -> None:
    """What it leaves in the background must not keep ports of a job that is over."""
    port = free_port()
    process = holder(tmp_path, port)
    try:
        assert port in claimed()
        process.kill()
        process.wait(10)
        assert port not in claimed()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_port_that_somebody_has_claimed_is_left_to_him() -> None:
    port, other = free_port(), free_port()
    held = claim([port])
    assert len(held) == 1
    assert len(claim([port, other])) == 1
    held.clear()
    assert port not in claimed()


def test_where_the_kernel_tells_nothing_nothing_is_claimed(tmp_path: Path) -> None:
    assert claimed(str(tmp_path / "missing")) == set()
    listing = tmp_path / "unix"
    listing.write_text("Num RefCount\n0: 2 0 0 2 1 5 @gpujob-port-6100\n0: 2 0 0 2 1 5 /run/@gpujob-port-x\n0: 2 0 1\n")
    assert claimed(str(listing)) == {6100}
