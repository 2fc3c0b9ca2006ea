"""Mounts: parsing, the mount of a path, and remote file systems."""

import os
import subprocess
from pathlib import Path

import pytest

from exporter.machine.mounts import MountPoint, MountTable, has_remote_mount, mount_of, parse_mountinfo
from tests.support.exporter import until

TEXT = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
23 22 0:21 / /proc rw,nosuid shared:12 - proc proc rw
31 23 0:30 / /proc/sys/fs/binfmt_misc rw,relatime shared:14 - autofs systemd-1 rw,fd=29
40 22 0:45 / /scratch rw,relatime shared:22 master:3 propagate_from:2 - lustre 10.0.0.1@o2ib:/scratch rw,flock
41 22 0:46 /home/ada /home/a\040b\011c\134d rw,relatime - nfs4 server:/home rw,hard,addr=10.0.0.2
42 40 0:47 / /scratch/inner rw - fuse.sshfs host:/ rw,user_id=0
43 22 0:48 / /scratch/inner rw - tmpfs none rw
half a line
44 22 0:49 / /short rw -
"""
MOUNTS = parse_mountinfo(TEXT)


def test_mounts_are_in_order_with_unescaped_names() -> None:
    assert [mount.point for mount in MOUNTS] == [
        "/",
        "/proc",
        "/proc/sys/fs/binfmt_misc",
        "/scratch",
        "/home/a b\tc\\d",
        "/scratch/inner",
        "/scratch/inner",
    ]
    assert MOUNTS[3] == MountPoint("/scratch", "lustre", "10.0.0.1@o2ib:/scratch")
    assert MOUNTS[4].fstype == "nfs4"


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/", "ext4"),
        ("/home/ada", "ext4"),
        ("/scratch", "lustre"),
        ("/scratch/", "lustre"),
        ("/scratch/x/../y", "lustre"),
        ("/scratch2/x", "ext4"),
        ("/scratch/inner/out", "tmpfs"),
        ("/scratch/innermost", "lustre"),
        ("/home/a b\tc\\d/x", "nfs4"),
    ],
)
def test_a_path_belongs_to_the_mount_with_the_longest_prefix(path: str, fstype: str) -> None:
    found = mount_of(path, MOUNTS)
    assert found is not None
    assert found.fstype == fstype


def test_a_path_has_no_mount_in_an_empty_table() -> None:
    assert mount_of("/x", ()) is None


@pytest.mark.parametrize(
    ("fstype", "point", "remote"),
    [
        ("ext4", "/", False),
        ("overlay", "/", False),
        ("tmpfs", "/dev/shm", False),
        ("nfs4", "/home", True),
        ("lustre", "/scratch", True),
        ("fuse", "/mnt/x", True),
        ("fuse.gcsfuse", "/mnt/x", True),
        ("fusectl", "/sys/fs/fuse/connections", False),
        ("fuse.lxcfs", "/proc/meminfo", False),
        ("autofs", "/proc/sys/fs/binfmt_misc", False),
        ("autofs", "/home", True),
        ("nfs4", "/devel", True),
    ],
)
def test_network_and_fuse_mounts_with_files_are_remote(fstype: str, point: str, remote: bool) -> None:
    assert has_remote_mount([MountPoint("/", "ext4", "/dev/vda"), MountPoint(point, fstype, "x")]) is remote


def test_the_mounts_of_this_process_are_found(tmp_path: Path) -> None:
    table = MountTable()
    found = mount_of(os.path.realpath(tmp_path), table.current())
    assert found is not None
    assert os.stat(found.point).st_dev == os.stat(tmp_path).st_dev
    assert table.current() is table.current(), "an unchanged table is not read again"
    table.close()


def test_a_new_mount_is_found(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    table = MountTable()
    table.current()
    mount_point = tmp_path / "a b\n#ü"
    mount_point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mount_point)], check=True)
    mount = MountPoint(str(mount_point), "tmpfs", "none")
    try:
        assert mount_of(str(mount_point / "x"), table.current()) == mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
    until(lambda: mount_of(str(mount_point / "x"), table.current()) != mount, "its end")
    table.close()


def test_an_unreadable_mount_table_is_empty(tmp_path: Path) -> None:
    table = MountTable(str(tmp_path))
    assert table.current() == ()
    table.close()
