"""Facts of a node: busy ports and addresses of this machine."""

import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
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
    SurveyRequest,
    busy_ports,
    interface_address,
    is_free,
    node_ports,
    own_address,
    released_file,
)
from launcher.rundir.files import plan_files
from tests.support.launcher import clean_environment, plan_of
from tests.support.ports import free_port, listening


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("options", [{}, {"SO_REUSEADDR": True}, {"SO_REUSEADDR": True, "SO_REUSEPORT": True}])
def test_a_port_with_a_listener_is_busy(host: str, options: dict[str, bool]) -> None:
    with listening(host, **options) as port:
        assert not is_free(port)
    assert is_free(port)


def test_a_port_with_only_an_ipv6_listener_is_busy() -> None:
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
            accepted.close()  # the side that closes first enters TIME_WAIT
            assert client.recv(1) == b""
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert any(row[1].endswith(f":{port:04X}") and row[3] == "06" for row in table)
    assert is_free(port)


def test_a_port_that_is_only_bound_is_free() -> None:
    port = free_port()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", port))
        assert is_free(port)
        other.listen()
        assert not is_free(port)


def test_busy_ports_include_those_at_an_offset() -> None:
    with listening() as port:
        assert port in busy_ports([port])
        assert port in busy_ports([port - OFFSETS[3]])
        assert port not in busy_ports([port - OFFSETS[3] + 1])
    assert busy_ports([65535 + 1]) == []


# -- addresses -----------------------------------------------------------------------------------


def test_the_loopback_interface_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"


def test_the_error_for_an_unknown_interface_names_the_known_ones() -> None:
    with pytest.raises(NodeError, match=r'there is no network interface "ib7"; use one of .*\blo\b'):
        interface_address("ib7")


def test_an_interface_without_ipv4_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> bytes:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr("launcher.run.before.node_facts.fcntl.ioctl", none)
    with pytest.raises(NodeError, match=r'the network interface "lo" has no IPv4 address; use one of .*\blo\b'):
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


def survey_argv(run_dir: Path, node: str) -> list[str]:
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
    argv, environment = survey_argv(run_dir, node), {"GPUJOB_NODES": node, **environment}
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=30, check=False, env=clean_environment(**environment)
    )


def test_a_node_writes_its_facts(tmp_path: Path) -> None:
    with listening() as port:
        done = run(run_dir_of(tmp_path, port=port, network_interface="lo"), "cn01", SLURM_RESTART_COUNT="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, DONE_LINE.decode(), "")
    facts = json.loads((tmp_path / "nodes/cn01.json").read_text())
    assert port in facts.pop("busy")
    constants = {"schema": 1, "attempt": 2, "round": 0, "offset": None}
    assert facts == {**constants, "address": "127.0.0.1", "problem": None}


def test_a_node_without_the_network_interface_reports_it(tmp_path: Path) -> None:
    done = run(run_dir_of(tmp_path, network_interface="ib7"), "cn02")
    assert done.returncode == 2
    assert done.stderr.startswith('gpujob: cn02: network_interface: there is no network interface "ib7"; use one of ')
    facts = run_files.read_json(tmp_path / run_files.NODES_DIR / "cn02.json") or {}
    assert (facts["address"], facts["busy"]) == (None, [])
    assert f"gpujob: {facts['problem']}\n" == done.stderr


def test_a_node_that_cannot_read_the_run_directory_reports_it(tmp_path: Path) -> None:
    done = run(tmp_path, "cn03")
    assert (done.returncode, done.stdout) == (1, DONE_LINE.decode())  # the launcher need not wait for it
    assert done.stderr == f"gpujob: {tmp_path}/survey.json cannot be read on cn03: is it on a shared file system?\n"


def test_a_node_that_cannot_write_its_facts_still_prints_the_done_line(tmp_path: Path) -> None:
    (run_dir_of(tmp_path, port=free_port()) / run_files.NODES_DIR / "cn03.json").mkdir(parents=True)
    done = run(tmp_path, "cn03")
    assert (done.returncode, done.stdout) == (1, DONE_LINE.decode())
    assert "IsADirectoryError" in done.stderr


def test_a_node_ends_silently_if_its_standard_output_is_closed(tmp_path: Path) -> None:
    argv, environment = survey_argv(run_dir_of(tmp_path, port=free_port()), "cn03"), clean_environment()
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(argv, stdout=write_end, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_node_does_not_read_the_plan(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, port=free_port())
    (run_dir / "plan.json").unlink()
    (run_dir / "manifest.json").unlink()
    assert run(run_dir, "cn05").returncode == 0


def test_a_node_outside_the_plan_has_no_ports() -> None:
    survey = SurveyRequest(network_interface=None, ports=((6100,), ()), nodes=(0, 1, 0))
    assert [node_ports(survey, node, "a,b,c,d") for node in "abcde"] == [(6100,), (), (6100,), (), ()]
    assert [node_ports(survey, "a", "", str(index)) for index in range(4)] == [(6100,), (), (6100,), ()]


class PortSearch:
    """A real process that claims ports for a job of one node."""

    def __init__(self, folder: Path, port: int, *offsets: int) -> None:
        folder.mkdir()
        self.folder = folder
        variables = {"GPUJOB_NODES": "cn01", "GPUJOB_PORT_OFFSETS": ",".join(map(str, offsets))}
        self.process = subprocess.Popen(
            survey_argv(run_dir_of(folder, port=port), "cn01"),
            stdout=subprocess.PIPE,
            env=clean_environment(**variables),
        )

    def offset(self) -> int | None:
        """The offset that it has claimed, when it is known."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == DONE_LINE
        return (run_files.read_json(self.folder / "nodes/cn01.json") or {})["offset"]  # type: ignore[return-value]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def search_ports(tmp_path: Path) -> Iterator[Callable[..., PortSearch]]:
    searches: list[PortSearch] = []

    def start_search(port: int, *offsets: int) -> PortSearch:
        searches.append(PortSearch(tmp_path / f"job{len(searches)}", port, *offsets))
        return searches[-1]

    yield start_search
    for search in searches:
        search.end()


def test_a_killed_job_holds_no_ports(search_ports: Callable[..., PortSearch]) -> None:
    port = free_port()
    first, second = search_ports(port, 0), None
    assert first.offset() == 0
    second = search_ports(port, 0)
    assert second.offset() is None
    first.end()
    assert search_ports(port, 0).offset() == 0


def test_ports_are_held_until_the_release_file_exists(search_ports: Callable[..., PortSearch]) -> None:
    port = free_port()
    job = search_ports(port, 17)
    assert job.offset() == 17
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # warnings before a time limit concern only the workers
        job.process.send_signal(number)
    assert port + 17 in read_claimed_ports()
    released_file(job.folder, 0, 1).touch()  # from another round
    assert port + 17 in read_claimed_ports()
    released_file(job.folder, 0, 0).touch()
    assert job.process.wait(30) == 0
    assert port + 17 not in read_claimed_ports()


def test_the_release_file_is_found_on_nfs_with_cached_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: NFS, where a missing name stays missing until its folder is opened again."""
    released, cached_names = tmp_path / "released_a0_0", set(os.listdir(tmp_path))
    pauses: list[float] = []
    real_open, real_stat = os.open, os.stat

    def open_and_refresh(path: Any, *args: Any, **options: Any) -> int:
        cached_names.update(os.listdir(tmp_path))
        return real_open(path, *args, **options)

    def cached_stat(path: Any, **options: Any) -> os.stat_result:
        if Path(path).name == released.name and released.name not in cached_names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real_stat(path, **options)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 9, "the file is not found"
        if len(pauses) == 3:
            with open(released, "w"):
                pass

    monkeypatch.setattr("launcher.run.before.node_facts.os.open", open_and_refresh)
    monkeypatch.setattr("launcher.run.before.node_facts.os.stat", cached_stat)
    monkeypatch.setattr("launcher.run.before.node_facts.time.sleep", pause)
    node_facts.hold_ports_until(released)
    assert len(pauses) == 3


def test_a_file_in_a_missing_folder_does_not_exist(tmp_path: Path) -> None:
    assert not node_facts.file_exists(tmp_path / "gone" / "released_a0_0")


def test_offsets_with_busy_or_claimed_ports_are_skipped(search_ports: Callable[..., PortSearch]) -> None:
    with listening() as port:
        assert search_ports(port, 0, 17).offset() == 17
        held = claim_ports([port + OFFSETS[2]])
        assert search_ports(port, 0, 17, OFFSETS[2], OFFSETS[3]).offset() == OFFSETS[3]
        held.clear()


def test_ports_held_by_the_job_itself_are_not_busy(search_ports: Callable[..., PortSearch]) -> None:
    port = free_port()
    job = search_ports(port, 0)
    assert job.offset() == 0
    assert port not in json.loads((job.folder / "nodes/cn01.json").read_text())["busy"]


def test_port_probes_leave_no_socket_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    busy_ports(range(30000, 30010))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("addresses", "named", "own"),
    [
        (["127.0.0.1", "169.254.3.1", "10.1.0.7"], [], "10.1.0.7"),
        (["10.1.0.7", "192.0.2.9"], ["192.0.2.9"], "192.0.2.9"),
        (["10.1.0.7", "192.0.2.9"], ["127.0.1.1"], "10.1.0.7"),  # as Debian names itself
        (["127.0.0.1"], [], None),
    ],
)
def test_the_own_address_is_that_of_the_machines_name(
    addresses: list[str], named: list[str], own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(at, address) for at, address in enumerate(addresses)])
    monkeypatch.setattr(node_facts, "interface_address", lambda name: name)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0)) for address in named])
    assert own_address() == own
