"""What a node finds out about itself: busy ports and addresses, of this machine as it is."""

import dataclasses
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.plan.plan import Plan
from launcher.plan.ports import OFFSETS
from launcher.programs.port_claims import claim_ports, read_claimed_ports
from launcher.run.before import node_facts
from launcher.run.before.node_facts import (
    DONE_LINE,
    NodeError,
    busy_ports,
    interface_address,
    is_free,
    node_ports,
    released_file,
)
from launcher.rundir.files import plan_files
from tests.support.launcher import clean_environment, job_spec, plan_of


@contextmanager
def listening(host: str = "127.0.0.1", family: int = socket.AF_INET, **options: bool) -> Iterator[int]:
    """A port on which somebody listens, none of those that the kernel hands to clients."""
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            for name in options:
                server.setsockopt(socket.SOL_SOCKET, getattr(socket, name), 1)
            try:
                server.bind((host, random.randrange(21000, 32000)))
                server.listen()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield server.getsockname()[1]
            return


def free_port() -> int:
    with listening() as port:
        return port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("options", [{}, {"SO_REUSEADDR": True}, {"SO_REUSEADDR": True, "SO_REUSEPORT": True}])
def test_a_port_on_which_somebody_listens_is_busy(host: str, options: dict[str, bool]) -> None:
    with listening(host, **options) as port:
        assert not is_free(port)
    assert is_free(port)


def test_a_port_that_is_busy_on_ipv6_alone_is_busy() -> None:
    if not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6 address")
    with listening("::1", socket.AF_INET6) as port:
        assert not is_free(port)


def test_a_port_in_time_wait_is_free() -> None:
    with listening(SO_REUSEADDR=True) as port:
        pass
    with socket.create_server(("127.0.0.1", port)) as server:
        with closing(socket.create_connection(("127.0.0.1", port))) as client:
            accepted, _ = server.accept()
            accepted.close()  # who closes first waits
            assert client.recv(1) == b""
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert any(row[1].endswith(f":{port:04X}") and row[3] == "06" for row in table)
    assert is_free(port)


def test_those_who_only_look_do_not_see_each_other() -> None:
    port = free_port()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", port))
        assert is_free(port)
        other.listen()
        assert not is_free(port)


def test_busy_ports_are_told_with_their_offsets() -> None:
    with listening() as port:
        assert port in busy_ports([port])
        assert port in busy_ports([port - OFFSETS[3]])
        assert port not in busy_ports([port - OFFSETS[3] + 1])
    assert busy_ports([65535 + 1]) == []


# -- addresses -----------------------------------------------------------------------------------


def test_the_loopback_interface_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_an_error_that_names_the_others() -> None:
    with pytest.raises(NodeError, match=r'there is no network interface "ib7"; there are .*\blo\b'):
        interface_address("ib7")


def test_an_interface_without_ipv4_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> bytes:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr("launcher.run.before.node_facts.fcntl.ioctl", none)
    with pytest.raises(NodeError, match=r'the network interface "lo" has no IPv4 address; choose another of .*\blo\b'):
        interface_address("lo")


# -- the program ---------------------------------------------------------------------------------


def run_dir_of(tmp_path: Path, **changes: Any) -> Path:
    plan = plan_of()
    port = changes.pop("port", None)
    if port is not None:
        (planned,) = plan.tasks
        changes["tasks"] = (dataclasses.replace(planned, ports={"http": port}),)
    plan = dataclasses.replace(plan, **changes)
    write_plan(tmp_path, plan)
    return tmp_path


def write_plan(run_dir: Path, plan: Plan) -> None:
    for name, text in plan_files(plan, "").items():
        (run_dir / name).write_text(text)


def words(run_dir: Path, node: str) -> list[str]:
    return [
        sys.executable,
        "-I",
        "-B",
        "-m",
        "launcher.run.before.node_facts",
        "--run-dir",
        str(run_dir),
        "--node",
        node,
    ]


def run(run_dir: Path, node: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv, environment = words(run_dir, node), {"GPUJOB_NODES": node, **environment}
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=30, check=False, env=clean_environment(**environment)
    )


def test_a_node_writes_down_what_it_has_found(tmp_path: Path) -> None:
    with listening() as port:
        done = run(run_dir_of(tmp_path, port=port, network_interface="lo"), "cn01", SLURM_RESTART_COUNT="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, DONE_LINE.decode(), "")
    found = json.loads((tmp_path / "nodes/cn01.json").read_text())
    assert port in found.pop("busy")
    rest = {"schema": 1, "attempt": 2, "round": 0, "offset": None}
    assert found == {**rest, "address": "127.0.0.1", "problem": None}


def test_a_node_without_the_network_says_so(tmp_path: Path) -> None:
    done = run(run_dir_of(tmp_path, network_interface="ib7"), "cn02")
    assert done.returncode == 2
    assert done.stderr.startswith('gpujob: cn02: network_interface: there is no network interface "ib7"; there are ')
    found = run_files.read_json(tmp_path / run_files.NODES_DIR / "cn02.json") or {}
    assert (found["address"], found["busy"]) == (None, [])
    assert f"gpujob: {found['problem']}\n" == done.stderr


def test_a_node_that_does_not_see_the_run_directory_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "cn03")
    assert (done.returncode, done.stdout) == (1, DONE_LINE.decode())  # nobody is to wait for it
    assert done.stderr == f"gpujob: {tmp_path}/survey.json cannot be read on cn03: is it on a shared file system?\n"


def test_a_node_that_cannot_write_down_what_it_has_found_says_that_it_has_looked(tmp_path: Path) -> None:
    (run_dir_of(tmp_path, port=free_port()) / run_files.NODES_DIR / "cn03.json").mkdir(parents=True)
    done = run(tmp_path, "cn03")
    assert (done.returncode, done.stdout) == (1, DONE_LINE.decode())
    assert "IsADirectoryError" in done.stderr


def test_a_node_to_which_nobody_listens_any_more_says_nothing(tmp_path: Path) -> None:
    argv, environment = words(run_dir_of(tmp_path, port=free_port()), "cn03"), clean_environment()
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(argv, stdout=write_end, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_node_reads_a_small_file_and_not_the_plan(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, port=free_port())
    (run_dir / "plan.json").unlink()
    (run_dir / "manifest.json").unlink()
    assert run(run_dir, "cn05").returncode == 0


def test_a_node_that_the_plan_does_not_need_has_no_ports() -> None:
    asked = {"ports": [[6100], []], "nodes": [0, 1, 0]}
    assert [node_ports(asked, node, "a,b,c,d") for node in "abcde"] == [[6100], [], [6100], [], []]


class Looking:
    """A job of one node that looks for its ports, for real."""

    def __init__(self, folder: Path, port: int, *offsets: int) -> None:
        folder.mkdir()
        self.folder = folder
        told = {"GPUJOB_NODES": "cn01", "GPUJOB_PORT_OFFSETS": ",".join(map(str, offsets))}
        self.process = subprocess.Popen(
            words(run_dir_of(folder, port=port), "cn01"), stdout=subprocess.PIPE, env=clean_environment(**told)
        )

    def offset(self) -> int | None:
        """The one that it has taken, once it tells."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == DONE_LINE
        return (run_files.read_json(self.folder / "nodes/cn01.json") or {})["offset"]  # type: ignore[return-value]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Callable[..., Looking]]:
    made: list[Looking] = []

    def begin(port: int, *offsets: int) -> Looking:
        made.append(Looking(tmp_path / f"job{len(made)}", port, *offsets))
        return made[-1]

    yield begin
    for looking in made:
        looking.end()


def test_jobs_that_look_at_once_never_get_the_same_ports(look: Callable[..., Looking]) -> None:
    """All want the same ports by the same offsets, in the same order: no seed of theirs leads them apart."""
    port = free_port()
    jobs = [look(port, *OFFSETS[:6]) for _ in range(6)]
    offsets = [job.offset() for job in jobs]
    assert None not in offsets
    assert sorted(offset for offset in offsets if offset is not None) == sorted(OFFSETS[:6])
    assert look(port, *OFFSETS[:6]).offset() is None


def test_a_job_that_is_killed_holds_no_ports(look: Callable[..., Looking]) -> None:
    port = free_port()
    first, second = look(port, 0), None
    assert first.offset() == 0
    second = look(port, 0)
    assert second.offset() is None
    first.end()
    assert look(port, 0).offset() == 0


def test_ports_are_held_until_there_is_a_file(look: Callable[..., Looking]) -> None:
    port = free_port()
    job = look(port, 17)
    assert job.offset() == 17
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # warnings before a time limit are for the workers
        job.process.send_signal(number)
    assert port + 17 in read_claimed_ports()
    released_file(job.folder, 0, 1).touch()  # of another round
    assert port + 17 in read_claimed_ports()
    released_file(job.folder, 0, 0).touch()
    assert job.process.wait(30) == 0
    assert port + 17 not in read_claimed_ports()


def test_a_file_is_seen_on_a_network_that_remembers_what_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: a name that was missed once is missed until its folder is opened anew."""
    released, known = tmp_path / "released_a0_0", set(os.listdir(tmp_path))
    pauses: list[float] = []
    real_open, real_stat = os.open, os.stat

    def fresh(path: Any, *given: Any, **named: Any) -> int:
        known.update(os.listdir(tmp_path))
        return real_open(path, *given, **named)

    def remembered(path: Any, **named: Any) -> os.stat_result:
        if Path(path).name == released.name and released.name not in known:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real_stat(path, **named)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 9, "it does not see the file"
        if len(pauses) == 3:
            with open(released, "w"):
                pass

    monkeypatch.setattr("launcher.run.before.node_facts.os.open", fresh)
    monkeypatch.setattr("launcher.run.before.node_facts.os.stat", remembered)
    monkeypatch.setattr("launcher.run.before.node_facts.time.sleep", pause)
    node_facts.hold_ports_until(released)
    assert len(pauses) == 3


def test_a_folder_that_is_gone_has_no_file(tmp_path: Path) -> None:
    assert not node_facts.file_exists(tmp_path / "gone" / "released_a0_0")


def test_an_offset_with_a_port_that_is_in_use_or_given_to_a_task_is_passed_over(look: Callable[..., Looking]) -> None:
    with listening() as port:
        assert look(port, 0, 17).offset() == 17
        held = claim_ports([port + OFFSETS[2]])
        assert look(port, 0, 17, OFFSETS[2], OFFSETS[3]).offset() == OFFSETS[3]
        held.clear()


def test_what_a_job_holds_itself_is_not_busy_to_it(look: Callable[..., Looking]) -> None:
    port = free_port()
    job = look(port, 0)
    assert job.offset() == 0
    assert port not in json.loads((job.folder / "nodes/cn01.json").read_text())["busy"]


def test_virtual_nodes_hold_each_their_own(tmp_path: Path) -> None:
    plan = plan_of(job_spec(resources={"nodes": 3}, workers=[{"command": "x", "count": 3}]), local=True)
    first = free_port()
    tasks = tuple(
        dataclasses.replace(
            planned, ports={"http": first + index}, task=dataclasses.replace(planned.task, node_index=index)
        )
        for index, planned in enumerate(plan.tasks)
    )
    write_plan(tmp_path, dataclasses.replace(plan, tasks=tasks))
    environment = clean_environment(GPUJOB_NODES="n0,n1,n2", GPUJOB_PORT_OFFSETS=f"{OFFSETS[4]}")
    looking = [
        subprocess.Popen(words(tmp_path, f"n{index}"), env=environment, stdout=subprocess.PIPE) for index in range(3)
    ]
    try:
        assert all(process.stdout is not None and process.stdout.readline() == DONE_LINE for process in looking)
        found = [run_files.read_json(tmp_path / run_files.NODES_DIR / f"n{index}.json") or {} for index in range(3)]
        assert [facts["offset"] for facts in found] == [OFFSETS[4]] * 3
    finally:
        for process in looking:
            process.kill()
            process.communicate(timeout=30)


def test_probes_leave_no_socket_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    busy_ports(range(30000, 30010))
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_kind_of_network_does_not_matter_where_none_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_facts, "interface_address", lambda name: pytest.fail(f"looked for {name}"))
    assert node_facts.main(["--run-dir", str(run_dir_of(tmp_path, port=free_port())), "--node", "cn04"]) == 0
