"""The real components work as other tests expect: Slurm with several nodes, Prometheus with a webhook."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.realstack.cluster import HERE, Cluster, ClusterError, slurm_root, slurm_unavailable
from tests.realstack.stack import Stack, StackError, prometheus_unavailable
from tests.realstack.waiting import readable, wait_for
from tests.support.ports import free_port

PREFIX = "proof"  # unlike other clusters, so that one may run at the same time

# GET answers `demo_value`, the number in the file given as an argument.
EXPORTER = """
import http.server, pathlib, socket, sys
class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        value = pathlib.Path(sys.argv[2]).read_text().strip()
        body = f'demo_value{{cluster="test",job_id="7",instance="chosen"}} {value}\\n'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Metrics).serve_forever()
"""

RULES = """
groups:
  - name: demo
    rules:
      - alert: DemoTooHigh
        expr: demo_value > 10
        for: 1s
        labels: {severity: warning}
        annotations: {summary: "{{ $labels.job_id }} is at {{ $value }}"}
"""


@contextmanager
def shared_folder(session: pytest.Session) -> Iterator[Path]:
    """A folder in /tmp for all users. After a failure it is kept for its logs."""
    failed = session.testsfailed
    path = Path(tempfile.mkdtemp(prefix="gpujob-realstack-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    if session.testsfailed > failed:
        print(f"kept for its logs: {path}")
    else:
        shutil.rmtree(path)


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with shared_folder(request.session) as path:
        yield path


@pytest.fixture(scope="class")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four nodes with accounting, for all tests of a class."""
    if reason := slurm_unavailable():
        pytest.skip(reason)
    with shared_folder(request.session) as path:
        cluster = Cluster(path, prefix=PREFIX)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


def submit(cluster: Cluster, script: str, *options: str) -> int:
    done = cluster.run(
        ["sbatch", "--parsable", "--output=/dev/null", *options], stdin=f"#!/bin/bash\n{script}\n", check=True
    )
    return int(done.stdout)


def namespace_processes(namespaces: set[str]) -> list[str]:
    """Command lines of all processes in these PID namespaces."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / "pid") in namespaces:
                found.append((entry / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def pid_namespaces(cluster: Cluster, held: ExitStack | None = None) -> set[str]:
    """Names of the PID namespaces of the nodes. While ``held``, no new namespace of other tests gets their names."""
    paths = [
        Path(f"/proc/{path.read_text().strip()}/ns/pid") for path in (cluster.directory / "run").glob("*.init.pid")
    ]
    if held is not None:
        for path in paths:
            held.callback(os.close, os.open(path, os.O_RDONLY))
    return {os.readlink(path) for path in paths}


def cgroups(prefix: str) -> list[Path]:
    return [Path(found) for found, _, _ in os.walk("/sys/fs/cgroup") if f"slurm_{prefix}" in found]


@pytest.mark.slurm
class TestFourNodes:
    def test_programs_come_from_another_tree_and_users_and_files_from_this_machine(
        self, cluster: Cluster, folder: Path
    ) -> None:
        (folder / "ours").touch()
        release = Path(slurm_root() or "/") / "etc" / "debian_version"
        commands = ["sh", "-c", f"cat /etc/debian_version; id -u; ls {folder}; echo $HOME; pwd"]
        user = pwd.getpwnam(cluster.user)
        in_root = cluster.run(commands, check=True).stdout.splitlines()
        assert in_root == [release.read_text().strip(), str(user.pw_uid), "ours", user.pw_dir, user.pw_dir]
        on_machine = cluster.run(commands, check=True, in_root=False).stdout.splitlines()
        assert on_machine == [Path("/etc/debian_version").read_text().strip(), *in_root[1:]]

    def test_processes_of_a_job_are_listed_until_it_is_cancelled(self, cluster: Cluster) -> None:
        assert [cluster.node_processes(node) for node in cluster.node_names] == [[], [], [], []]
        job = submit(cluster, "srun sleep 1234", "--nodes=2", "--ntasks-per-node=1")
        first, second = cluster.node_names[:2]

        def sleeping(node: str) -> list[int]:
            return [pid for pid, command in cluster.node_processes(node) if command.endswith("sleep 1234")]

        cluster.wait_for(lambda: sleeping(first) and sleeping(second), 60, "a task on each of two nodes")
        [pid] = sleeping(second)
        assert cluster.on(second, ["cat", f"/proc/{pid}/comm"]).stdout == "sleep\n"
        cluster.run(["scancel", str(job)], check=True)
        cluster.wait_for(
            lambda: not any(cluster.node_processes(node) for node in cluster.node_names),
            60,
            "the nodes to be empty",
        )

    def test_a_signal_reaches_the_command_and_its_status_is_returned(self, cluster: Cluster) -> None:
        process = cluster.popen(["bash", "-c", "trap 'exit 42' USR1; echo ready; while :; do sleep 0.05; done"])
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        cluster.signal(process, 10)
        try:
            assert process.wait(timeout=30) == 42
        finally:
            cluster.kill(process)

    def test_a_command_that_does_not_end_is_killed(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        original = cluster.popen

        def popen_and_read(*argv: Any, **options: Any) -> subprocess.Popen[str]:
            process = original(*argv, **options)
            assert process.stdout is not None
            readable(process.stdout, 60)  # wait for its first output
            return process

        monkeypatch.setattr(cluster, "popen", popen_and_read)
        with pytest.raises(ClusterError, match=r"did not end within 0\.5 s(.|\n)*first words"):
            cluster.run(["bash", "-c", "echo first words; sleep 4321"], timeout=0.5)
        assert not [c for c in namespace_processes(pid_namespaces(cluster)) if "4321" in c]

    def test_a_node_without_power_loses_its_processes_and_can_be_restarted(self, cluster: Cluster) -> None:
        node = cluster.node_names[3]
        process = cluster.popen(["sleep", "1000"], node=node)
        cluster.wait_for(lambda: cluster.node_processes(node), 30, "a process on the node")
        cluster.kill_node(node)
        assert process.wait(timeout=30) != 0
        with pytest.raises(ClusterError, match="is not running"):
            cluster.on(node, ["true"])
        cluster.start_node(node)
        assert cluster.on(node, ["hostname"]).stdout == f"{node}\n"
        cluster.run(["srun", "-w", node, "true"], timeout=120, check=True)

    def test_a_second_cluster_with_the_same_node_names_is_refused(self, cluster: Cluster, folder: Path) -> None:
        second = Cluster(folder, nodes=2, accounting=False, prefix=PREFIX)
        with pytest.raises(ClusterError, match=f"another cluster .* runs from {cluster.directory}"):
            second.up()
        second.down()
        assert len(cluster.node_states()) == 4

    def test_nothing_is_left_after_down(self, cluster: Cluster) -> None:
        submit(cluster, "srun sleep 1000", "--nodes=4")
        cluster.wait_for(lambda: cluster.node_processes(cluster.node_names[0]), 60, "the job to run")
        mounts = set(Path("/proc/mounts").read_text().splitlines())
        with ExitStack() as held:
            namespaces = pid_namespaces(cluster, held)
            assert namespace_processes(namespaces)
            assert cgroups(PREFIX)
            cluster.down()
            assert namespace_processes(namespaces) == []
        assert cgroups(PREFIX) == []
        more = set(Path("/proc/mounts").read_text().splitlines()) - mounts
        # other tests at the same time mount their own file systems
        assert [line for line in more if str(cluster.directory) in line or PREFIX in line] == []
        assert not cluster.is_up()
        cluster.down()


@pytest.mark.slurm
def test_a_start_that_takes_too_long_leaves_nothing(folder: Path) -> None:
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    cluster = Cluster(folder, nodes=16, accounting=False, prefix=PREFIX)
    with pytest.raises(ClusterError, match=r"up did not end within 0\.5 s"):
        cluster.up(timeout=0.5)
    assert not cluster.is_up()
    assert [c for c in command_lines() if str(folder) in c] == []
    assert cgroups(PREFIX) == []


@pytest.mark.slurm
def test_a_tree_without_slurm_is_refused(folder: Path) -> None:
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    (folder / "tree").mkdir()
    for tree, message in (("tree", "not installed: .*slurmd.*slurm-root.sh"), ("none", "no such folder")):
        with pytest.raises(ClusterError, match=message):
            Cluster(folder / "inside", nodes=1, accounting=False, prefix=PREFIX, root=folder / tree).up()


@pytest.mark.parametrize("script", ["slurm-root.sh", "versions.sh", "stack-versions.sh"])
def test_a_debian_suite_must_be_a_name(script: str, tmp_path: Path) -> None:
    for bad in ("../elsewhere", "a b", ""):
        argv = [str(HERE / script), bad, *([str(tmp_path / "tree")] if script == "slurm-root.sh" else [])]
        done = subprocess.run(
            argv, env={**os.environ, "GPUJOB_SLURM_CACHE": str(tmp_path)}, capture_output=True, text=True
        )
        assert (done.returncode, "name of a Debian suite" in done.stderr) == (1, True), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
def test_a_folder_that_users_cannot_enter_is_refused(folder: Path) -> None:
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    folder.chmod(0o700)
    with pytest.raises(ClusterError, match="ordinary users cannot read"):
        Cluster(folder / "inside", nodes=1, accounting=False, prefix=PREFIX).up()


@pytest.mark.prometheus
class TestStackOnLoopback:
    def test_a_rule_fires_and_nothing_is_left_after_down(self, folder: Path) -> None:
        if reason := prometheus_unavailable():
            pytest.skip(reason)
        value = folder / "value"
        value.write_text("1")
        (folder / "demo.yml").write_text(RULES)
        port = free_port()
        exporter = subprocess.Popen([sys.executable, "-c", EXPORTER, str(port), str(value)])
        try:
            with Stack(folder / "stack", rules=[folder / "*.yml"]) as stack:
                assert_scraped_and_fired(stack, f"127.0.0.1:{port}", value)
                stack.reload()
                pids = [int(path.read_text().split()[0]) for path in stack.directory.glob("*.pid")]
                assert len(pids) == 3
            assert [pid for pid in pids if running(pid)] == []
            stack.down()
        finally:
            exporter.kill()
            exporter.wait(timeout=30)

    def test_rules_that_prometheus_rejects_are_an_error_with_its_message(self, folder: Path) -> None:
        if reason := prometheus_unavailable():
            pytest.skip(reason)
        (folder / "bad.yml").write_text("groups: [{name: x, rules: [{alert: A, expr: 'sum('}]}]")
        with pytest.raises(StackError, match="could not parse expression"):
            Stack(folder / "stack", rules=[folder / "*.yml"]).up()


def test_a_failed_wait_has_its_subject_and_log_directory(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for rain; last value: \[\]; logs: .*") as info:
        wait_for(list, 0.2, "rain", logs=tmp_path)
    assert str(tmp_path) in str(info.value)


def test_a_wait_retries_only_the_given_errors() -> None:
    def broken() -> bool:
        raise KeyError("pump")

    with pytest.raises(KeyError):
        wait_for(broken, 5, "water")
    with pytest.raises(TimeoutError, match="last error: 'pump'"):
        wait_for(broken, 0.2, "water", retry=(KeyError,))


def assert_scraped_and_fired(stack: Stack, target: str, value: Path) -> None:
    """The target is scraped, its labels have precedence, and the alert reaches the webhook within 45 s."""
    stack.announce("demo", [target], {"cluster": "from-target"})
    series = stack.wait_for(lambda: stack.query("demo_value"), 60, f"{target} to be scraped")
    assert [s["metric"]["cluster"] for s in series] == ["from-target"]
    assert [s["metric"]["instance"] for s in series] == [target]
    assert [t["health"] for t in stack.targets()] == ["up"]
    start = time.time()
    value.write_text("11")
    [alert] = stack.wait_for(stack.alerts, 60, "the alert to reach the webhook")
    assert alert["received"] - start < 45
    assert alert["status"] == "firing"
    assert alert["labels"]["alertname"] == "DemoTooHigh"
    assert alert["annotations"]["summary"] == "7 is at 11"
    assert alert["groupKey"] == '{}:{cluster="from-target", job_id="7"}'
    now = time.time()
    values: list[Any] = stack.query_range("demo_value", now - 20, now)[0]["values"]
    assert values[-1][1] == "11"
    value.write_text("1")
    stack.wait_for(lambda: [a for a in stack.alerts() if a["status"] == "resolved"], 60, "the alert to be resolved")


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except FileNotFoundError:
        return False
