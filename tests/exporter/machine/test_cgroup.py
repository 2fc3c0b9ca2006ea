"""Memory cgroups of every layout, as directories and of the real kernel."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import oom_kills
from exporter.contract.status import CgroupMemory
from exporter.machine.cgroup import (
    MemoryCgroup,
    MemoryCgroupReader,
    common_ancestor,
    parse_cgroup_number,
    parse_memory_pressure,
    parse_memory_stat,
    read_memory_cgroup,
)
from tests.exporter.machine.cgroup_trees import (
    MIB,
    UNIFIED_MOUNT,
    V1_MOUNT,
    V1_UNLIMITED,
    V2_MOUNT,
    Machine,
    real_cgroup,
)
from tests.support.exporter import open_files

V1_STEP = "/slurm_node3/uid_1000/job_7/step_0/task_0"
V2_STEP = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
V2_DEBIAN = "/system.slice/node3_slurmstepd.scope/job_7/step_0/user/task_0"
SLUID = "/system.slice/slurmstepd.scope/s4H7XK2M9QZ1/step_0/user/task_special"
SESSION = "/user.slice/user-1000.slice/user@1000.service/app.slice/app-tmux.scope"
POD = "/kubepods/burstable/pod1f/c0ffee"


def v1_lines(path: str, unified: str | None = None) -> str:
    """``/proc/PID/cgroup`` with memory in v1. With ``unified``, in a hybrid layout."""
    end = "" if unified is None else f"0::{unified}\n"
    return f"11:cpu,cpuacct:/elsewhere\n5:memory:{path}\n1:name=systemd:/init.scope\n{end}"


@pytest.mark.parametrize(
    ("mountinfo", "cgroup", "created", "mount", "path"),
    [
        pytest.param(V1_MOUNT, v1_lines("/a"), "/a", "/sys/fs/cgroup/memory", "/a", id="v1"),
        pytest.param(
            V1_MOUNT.replace("rw,memory", "rw,cpu,memory").replace("/cgroup/memory ", "/cgroup/cpu,memory "),
            "3:cpu,memory:/a\n",
            "/a",
            "/sys/fs/cgroup/cpu,memory",
            "/a",
            id="v1 with another controller",
        ),
        pytest.param(V1_MOUNT, v1_lines(V1_STEP), V1_STEP, "/sys/fs/cgroup/memory", V1_STEP, id="Slurm 22.05 v1"),
        pytest.param(
            V1_MOUNT + UNIFIED_MOUNT,
            v1_lines(V1_STEP, "/system.slice/slurmd.service"),
            V1_STEP,
            "/sys/fs/cgroup/memory",
            V1_STEP,
            id="hybrid with memory in v1",
        ),
        pytest.param(
            UNIFIED_MOUNT,
            f"4:cpu:/a\n0::{V2_STEP}\n",
            V2_STEP,
            "/sys/fs/cgroup/unified",
            V2_STEP,
            id="hybrid with memory in v2",
        ),
        pytest.param(V2_MOUNT, f"0::{V2_STEP}\n", V2_STEP, "/sys/fs/cgroup", V2_STEP, id="Slurm v2"),
        pytest.param(V2_MOUNT, f"0::{V2_DEBIAN}\n", V2_DEBIAN, "/sys/fs/cgroup", V2_DEBIAN, id="scope by node name"),
        pytest.param(V2_MOUNT, f"0::{SLUID}\n", SLUID, "/sys/fs/cgroup", SLUID, id="SLUID"),
        pytest.param(V2_MOUNT, f"0::{SESSION}\n", SESSION, "/sys/fs/cgroup", SESSION, id="systemd session"),
        pytest.param(V2_MOUNT, "0::/a:b) (\n", "/a:b) (", "/sys/fs/cgroup", "/a:b) (", id="colon"),
        pytest.param(
            V2_MOUNT.replace("/sys/fs/cgroup", r"/mnt/c\040g\134x"),
            "0::/a b\n",
            "/a b",
            "/mnt/c g\\x",
            "/a b",
            id="mount point with a space and a backslash",
        ),
        pytest.param(V2_MOUNT, "0::/\n", "", "/sys/fs/cgroup", "", id="cgroup namespace"),
        pytest.param(V1_MOUNT, v1_lines("/"), "", "/sys/fs/cgroup/memory", "", id="cgroup namespace v1"),
        pytest.param(
            V1_MOUNT.replace(" / /sys", f" {POD} /sys"),
            v1_lines(f"{POD}/job"),
            "/job",
            "/sys/fs/cgroup/memory",
            "/job",
            id="container that is shown its own part",
        ),
        pytest.param(
            V1_MOUNT.replace(" / /sys", f" {POD} /sys"),
            v1_lines(POD),
            "",
            "/sys/fs/cgroup/memory",
            "",
            id="container at the top of its part",
        ),
        pytest.param(
            V2_MOUNT.replace(" / /sys", " /../.. /sys"),
            "0::/../../b/c\n",
            "/b/c",
            "/sys/fs/cgroup",
            "/b/c",
            id="namespace below the mount, process beside it",
        ),
        pytest.param(
            V2_MOUNT.replace(" / /sys/fs/cgroup ", " /a /mnt/part ") + V2_MOUNT,
            "0::/a/b\n",
            "/a/b",
            "/sys/fs/cgroup",
            "/a/b",
            id="two mounts, the one that shows more",
        ),
    ],
)
def test_a_memory_cgroup_is_found_in_every_layout(
    tmp_path: Path, mountinfo: str, cgroup: str, created: str, mount: str, path: str
) -> None:
    machine = Machine(tmp_path, mountinfo)
    machine.process("self", cgroup)
    version = 1 if "memory" in cgroup else 2
    (machine.v1 if version == 1 else machine.v2)(created, mount=mount, oom_kills=3)
    memory_cgroup = read_memory_cgroup("self", str(tmp_path))
    assert memory_cgroup == MemoryCgroup(version, f"{tmp_path}{mount}", path)
    assert oom_kills.read_oom_kills(str(tmp_path)) == 3
    facts = read_facts(MemoryCgroupReader(memory_cgroup))
    assert facts.oom_kills == 3


@pytest.mark.parametrize(
    ("mountinfo", "cgroup"),
    [
        pytest.param("", "0::/a\n", id="nothing mounted"),
        pytest.param(V2_MOUNT, v1_lines("/a"), id="memory in v1, which is not mounted"),
        pytest.param(V1_MOUNT, v1_lines("/gone"), id="removed"),
        pytest.param(V1_MOUNT.replace(" / /sys", f" {POD} /sys"), v1_lines("/kubepods"), id="above the mount"),
        pytest.param(V1_MOUNT.replace(" / /sys", " /pod /sys"), v1_lines("/pod2/a"), id="beside the mount"),
        pytest.param(V2_MOUNT.replace(" / /sys", " /../.. /sys"), "0::/\n", id="namespace without a mount of its own"),
        pytest.param(V2_MOUNT, "0::/../../b\n", id="outside of the namespace"),
        pytest.param(V2_MOUNT.replace(" / /sys", " /.. /sys"), "0::/../../b\n", id="outside of the mount"),
        pytest.param(V2_MOUNT, "", id="empty"),
        pytest.param(V2_MOUNT, "garbage\n:\n\n", id="garbage"),
        pytest.param("31 23 0:28\n - cgroup2\n \n", "0::/a\n", id="garbage among the mounts"),
    ],
)
def test_a_cgroup_that_is_not_visible_here_is_unknown(tmp_path: Path, mountinfo: str, cgroup: str) -> None:
    machine = Machine(tmp_path, mountinfo)
    machine.process("self", cgroup)
    machine.v1("/a")
    machine.v2("")
    assert read_memory_cgroup("self", str(tmp_path)) is None
    assert oom_kills.read_oom_kills(str(tmp_path)) is None


def test_a_machine_without_proc_has_no_known_cgroup(tmp_path: Path) -> None:
    assert read_memory_cgroup("self", str(tmp_path)) is None
    assert read_memory_cgroup(4242, str(tmp_path)) is None


def test_memory_counts_in_the_nearest_cgroup_with_the_memory_controller(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2_MOUNT)
    machine.process("self", f"0::{V2_STEP}\n")
    machine.v2("/system.slice/slurmstepd.scope/job_7", oom_kills=2)
    machine.v2_without_memory(V2_STEP)
    assert read_memory_cgroup("self", str(tmp_path)) == MemoryCgroup(
        2, f"{tmp_path}/sys/fs/cgroup", "/system.slice/slurmstepd.scope/job_7"
    )
    assert oom_kills.read_oom_kills(str(tmp_path)) == 2


def test_a_removed_v2_cgroup_counts_in_its_parent(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2_MOUNT)
    machine.process(5, "0::/job_7/step_0 (deleted)\n", flags=0x4)
    machine.v2("/job_7")
    assert read_memory_cgroup(5, str(tmp_path)) == MemoryCgroup(2, f"{tmp_path}/sys/fs/cgroup", "/job_7")


@pytest.mark.parametrize("version", [1, 2])
def test_the_root_of_a_hierarchy_has_no_facts(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, V1_MOUNT if version == 1 else V2_MOUNT)
    machine.process("self", v1_lines("/") if version == 1 else "0::/\n")
    if version == 1:
        machine.v1("")
        machine.write("sys/fs/cgroup/memory/release_agent", "")
    else:
        machine.v2_without_memory("")
    memory_cgroup = read_memory_cgroup("self", str(tmp_path))
    assert memory_cgroup is not None
    assert MemoryCgroupReader(memory_cgroup).read() is None
    assert oom_kills.read_oom_kills(str(tmp_path)) is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("path", "is_shared"),
    [
        ("/system.slice/slurmd.service", True),
        ("/system.slice/slurmd@node01.service", True),
        ("/system.slice/cron.service", True),
        ("/system.slice/slurmd.service/job_7", False),
        ("/system.slice/actions.runner.acme.service", False),
        ("/system.slice/docker-7.scope", False),
        ("/user.slice/user-1000.slice/user@1000.service", False),
    ],
)
def test_the_cgroup_of_a_shared_service_has_no_facts(tmp_path: Path, path: str, is_shared: bool, version: int) -> None:
    machine = Machine(tmp_path, V1_MOUNT if version == 1 else V2_MOUNT)
    machine.process("self", v1_lines(path) if version == 1 else f"0::{path}\n")
    (machine.v1 if version == 1 else machine.v2)(path, oom_kills=2)
    memory_cgroup = read_memory_cgroup("self", str(tmp_path))
    assert memory_cgroup is not None
    assert (MemoryCgroupReader(memory_cgroup).read() is None) == is_shared
    assert oom_kills.read_oom_kills(str(tmp_path)) == (None if is_shared else 2)


def test_an_exiting_process_has_a_cgroup_in_v2_but_not_in_v1(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_MOUNT)
    machine.v1("")
    machine.process(5, v1_lines("/"), flags=0x400004)
    assert read_memory_cgroup(5, str(tmp_path)) is None
    machine.process(5, v1_lines("/"))
    assert read_memory_cgroup(5, str(tmp_path)) is not None
    machine.write("proc/self/mountinfo", V2_MOUNT)
    machine.v2("/a")
    machine.process(5, "0::/a\n", flags=0x4)
    assert read_memory_cgroup(5, str(tmp_path)) == MemoryCgroup(2, f"{tmp_path}/sys/fs/cgroup", "/a")


def test_another_process_with_the_same_pid_is_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2_MOUNT)
    machine.v2("/a")
    machine.process(5, "0::/a\n", start_ticks=7700)
    assert read_memory_cgroup(5, str(tmp_path), 7700) is not None
    assert read_memory_cgroup(5, str(tmp_path), 7701) is None
    (tmp_path / "proc/5/stat").unlink()
    assert read_memory_cgroup(5, str(tmp_path)) is None


def read_facts(reader: MemoryCgroupReader) -> CgroupMemory:
    """The facts of a cgroup that is there."""
    facts = reader.read()
    assert facts is not None
    return facts


def v2_machine(root: Path) -> MemoryCgroupReader:
    machine = Machine(root, V2_MOUNT)
    machine.v2_without_memory("")
    machine.v2("/a", high=900 * MIB)
    machine.v2("/a/b", limit=700 * MIB)
    machine.v2("/a/b/c", limit=800 * MIB, oom_kills=1)
    return MemoryCgroupReader(MemoryCgroup(2, f"{root}/sys/fs/cgroup", "/a/b/c"))


def v1_machine(root: Path) -> MemoryCgroupReader:
    Machine(root, V1_MOUNT).v1("/a/b/c", limit=700 * MIB, oom_kills=1)
    return MemoryCgroupReader(MemoryCgroup(1, f"{root}/sys/fs/cgroup/memory", "/a/b/c"))


FACTS = CgroupMemory(
    used_bytes=100 * MIB, limit_bytes=700 * MIB, peak_bytes=200 * MIB, working_set_bytes=70 * MIB, oom_kills=1
)


def test_facts_of_v2(tmp_path: Path) -> None:
    assert v2_machine(tmp_path).read() == FACTS.replace(pressure_some_s=2.5, pressure_full_s=1.25)


def test_facts_of_v1(tmp_path: Path) -> None:
    assert v1_machine(tmp_path).read() == FACTS


@pytest.mark.parametrize("high", ["max", 600 * MIB])
def test_the_throttling_limit_counts_as_a_limit(tmp_path: Path, high: int | str) -> None:
    machine = Machine(tmp_path, V2_MOUNT)
    machine.v2("/a", high=high)
    facts = read_facts(MemoryCgroupReader(MemoryCgroup(2, f"{tmp_path}/sys/fs/cgroup", "/a")))
    assert facts.limit_bytes == (None if high == "max" else high)


def test_the_unlimited_value_of_v1_is_not_a_limit(tmp_path: Path) -> None:
    reader = v1_machine(tmp_path)
    Machine(tmp_path, V1_MOUNT).v1("/a/b/c", limit=V1_UNLIMITED)
    facts = read_facts(reader)
    assert facts.limit_bytes is None


@pytest.mark.parametrize("text", ["", "garbage\n", "\xff\x00", "12 34\n", "-5\n"])
@pytest.mark.parametrize("make", [v1_machine, v2_machine])
def test_values_of_garbled_files_are_unknown(
    tmp_path: Path, make: Callable[[Path], MemoryCgroupReader], text: str
) -> None:
    reader = make(tmp_path)
    for name in os.listdir(reader.cgroup.directory):
        if name not in ("memory.usage_in_bytes", "memory.current"):
            Path(reader.cgroup.directory, name).write_text(text, encoding="latin-1")
    facts = read_facts(reader)
    limit = 700 * MIB if reader.cgroup.version == 2 else None  # the limit of its parent
    assert facts == CgroupMemory(used_bytes=100 * MIB, limit_bytes=limit)
    for name in ("memory.usage_in_bytes", "memory.current"):
        Path(reader.cgroup.directory, name).write_text(text, encoding="latin-1")
    assert reader.read() is None


@pytest.mark.parametrize("make", [v1_machine, v2_machine])
def test_values_of_missing_files_are_unknown(tmp_path: Path, make: Callable[[Path], MemoryCgroupReader]) -> None:
    reader = make(tmp_path)
    for name in os.listdir(reader.cgroup.directory):
        if name not in ("memory.usage_in_bytes", "memory.current"):
            Path(reader.cgroup.directory, name).unlink()
    facts = read_facts(reader)
    assert facts.peak_bytes is facts.working_set_bytes is facts.oom_kills is facts.pressure_some_s is None


def test_a_working_set_is_never_negative(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_MOUNT)
    machine.v1("/a", used=1, total_active_file=MIB)
    facts = read_facts(MemoryCgroupReader(MemoryCgroup(1, f"{tmp_path}/sys/fs/cgroup/memory", "/a")))
    assert facts.working_set_bytes == 0


def test_descriptors_are_kept_open_until_close(tmp_path: Path) -> None:
    reader = v2_machine(tmp_path)
    reader.read()
    opened = open_files(str(tmp_path))
    # current, peak, stat, events, pressure, and two limits of each of three cgroups; the root has no limits
    assert len(opened) == 5 + 6
    reader.read()
    assert open_files(str(tmp_path)) == opened
    reader.close()
    assert open_files(str(tmp_path)) == []


PATHS = st.lists(st.sampled_from("abc"), max_size=4).map(lambda names: "".join(f"/{name}" for name in names))


@given(PATHS, PATHS)
def test_the_common_ancestor_is_the_nearest_that_contains_both(first: str, second: str) -> None:
    left, right = MemoryCgroup(2, "/m", first), MemoryCgroup(2, "/m", second)
    memory_cgroup = common_ancestor(left, right)
    assert memory_cgroup == common_ancestor(right, left)
    names, others = first.split("/"), second.split("/")
    depth = len(memory_cgroup.path.split("/"))
    assert names[:depth] == others[:depth] == memory_cgroup.path.split("/")
    assert min(len(names), len(others)) == depth or names[depth] != others[depth]


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("/job_7/step_0/task_0", "/job_7/step_1/task_0", "/job_7"),
        ("/job_7", "/job_7", "/job_7"),
        ("/job_7", "/job_7/step_0", "/job_7"),
        ("/job_7/step_1", "/job_7/step_10", "/job_7"),
        ("/job_7", "/job_70", ""),
        ("", "/job_7", ""),
    ],
)
def test_path_components_are_compared_as_whole_names(first: str, second: str, both: str) -> None:
    assert common_ancestor(MemoryCgroup(1, "/m", first), MemoryCgroup(1, "/m", second)).path == both


@pytest.mark.parametrize(
    ("text", "number"), [("42\n", 42), ("0", 0), ("max\n", None), ("", None), ("-1", None), ("4 2", None), ("٤", None)]
)
def test_only_a_nonnegative_decimal_is_a_number(text: str, number: int | None) -> None:
    assert parse_cgroup_number(text) == number


def test_garbage_in_memory_stat_affects_only_its_line() -> None:
    assert parse_memory_stat("a 1\nb\n\nc x\nd -1\ne 5 6\nf 7\n") == {"a": 1, "f": 7}


@pytest.mark.parametrize(
    ("text", "waited"),
    [
        (
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=787540\nfull avg10=0.00 total=5\n",
            {"some": 0.78754, "full": 5e-6},
        ),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n", {"some": 1e-6}),
        ("other total=1\nfull total=x\n\n", {}),
        ("", {}),
    ],
)
def test_pressure_is_in_seconds(text: str, waited: dict[str, float]) -> None:
    assert parse_memory_pressure(text) == pytest.approx(waited)


@pytest.mark.skipif(not Path("/proc/pressure/memory").exists(), reason="this kernel does not report pressure")
def test_pressure_of_this_kernel_is_read() -> None:
    assert parse_memory_pressure(Path("/proc/pressure/memory").read_text(encoding="ascii")).keys() == {"some", "full"}


# The real kernel


def test_an_oom_kill_is_counted_once_and_a_removed_cgroup_has_no_facts() -> None:
    with real_cgroup("oom") as real:
        real.limit(32 * MIB)
        waiting = real.start("input()")
        own = read_memory_cgroup(waiting.pid)
        while own is None or own.directory != str(real.directory):  # the shell enters the cgroup before it runs Python
            assert waiting.poll() is None
            own = read_memory_cgroup(waiting.pid)
        waiting.communicate(b"\n", timeout=30)
        reader = MemoryCgroupReader(own)
        before = reader.read()
        assert before is not None
        assert (before.oom_kills, before.limit_bytes) == (0, 32 * MIB)
        assert (before.used_bytes or 0) <= 32 * MIB
        real.exceed()
        after = reader.read()
        assert after is not None
        assert after.oom_kills == 1
        assert after.peak_bytes is not None
        assert 30 * MIB < after.peak_bytes <= 32 * MIB
        real.directory.rmdir()
        assert reader.read() is None
        reader.close()


def test_the_wrapper_counts_oom_kills_of_its_own_cgroup() -> None:
    with real_cgroup("wrapper") as real:
        real.limit(32 * MIB)
        program = (
            "import subprocess, sys; from exporter.contract import oom_kills; before = oom_kills.read_oom_kills();"
            "subprocess.run([sys.executable, '-c', 'bytearray(b\"x\" * (1 << 27))']);"
            "print(before, oom_kills.read_oom_kills())"
        )
        out, _ = real.start(program).communicate(timeout=60)
        assert out.split() == [b"0", b"1"]


def test_the_page_cache_is_not_part_of_the_working_set(tmp_path: Path) -> None:
    """Pages that were read again are active. The kernel drops them too before it kills a process."""
    data = tmp_path / "data"
    data.write_bytes(os.urandom(24 * MIB))
    with data.open("rb") as source:
        os.fsync(source.fileno())
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise they are charged to this process
    with real_cgroup("cache") as real:
        real.limit(64 * MIB)
        reading = real.start(
            "import os\n"
            f"data = os.open({str(data)!r}, os.O_RDONLY)\n"
            "for _ in range(4):\n"
            "    os.lseek(data, 0, os.SEEK_SET)\n"
            "    while os.read(data, 1 << 16): pass\n"
            "print('read', flush=True)\n"
            "input()"
        )
        assert reading.stdout is not None
        assert reading.stdout.readline() == b"read\n"
        own = read_memory_cgroup(reading.pid)
        assert own is not None
        facts = MemoryCgroupReader(own).read()
        reading.communicate(b"\n", timeout=30)
        assert facts is not None
        assert facts.working_set_bytes is not None
        if (facts.used_bytes or 0) < 20 * MIB:
            pytest.skip("the file system of the tests does not charge what it caches")
        assert facts.working_set_bytes < 12 * MIB


def test_a_zombie_has_no_v1_cgroup() -> None:
    with real_cgroup("zombie") as real:
        if real.version != 1:
            pytest.skip("v2 keeps the cgroup of a zombie")
        waiting = real.start("input()")
        assert waiting.stdin is not None
        waiting.stdin.close()
        os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
        assert "memory:/\n" in Path(f"/proc/{waiting.pid}/cgroup").read_text(encoding="ascii")
        assert read_memory_cgroup(waiting.pid) is None
        waiting.wait()


def test_the_cgroup_is_unknown_in_a_namespace_without_its_own_mount() -> None:
    program = (
        "from exporter.contract import oom_kills; from exporter.machine.cgroup import read_memory_cgroup;"
        "print(read_memory_cgroup(), oom_kills.read_oom_kills())"
    )
    script = 'echo $$ > "$1" && exec unshare -C "$2" -I -c "$3"'
    with real_cgroup("namespace") as real:
        result = subprocess.run(
            ["sh", "-c", script, "sh", str(real.procs), sys.executable, program],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if "unshare failed" in result.stderr:
            pytest.skip(result.stderr)
        assert result.stdout == "None None\n", result.stderr
