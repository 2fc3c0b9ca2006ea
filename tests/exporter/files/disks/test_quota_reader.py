"""Quotas as the kernel records them."""

import os
import struct
from pathlib import Path

import pytest

from exporter.files.disks import quota_reader
from exporter.files.disks.quota_reader import QuotaFacts, parse_dqblk, read_quota

KIB, GIB = 1 << 10, 1 << 30
ALL = 0x3F


def dqblk(hard: int, soft: int, used: int, valid: int = ALL) -> bytes:
    """``struct if_dqblk``: limits in KiB, use in bytes."""
    return struct.pack("=8QI4x", hard, soft, used, 100, 90, 7, 0, 0, valid)


def test_limits_are_in_kibibytes_and_use_in_bytes() -> None:
    assert parse_dqblk("user", dqblk(GIB // KIB, 0, 300)) == QuotaFacts("user", GIB, GIB - 300)


def test_a_soft_limit_applies_if_there_is_no_hard_limit() -> None:
    assert parse_dqblk("user", dqblk(0, 10, 1024)) == QuotaFacts("user", 10240, 9216)
    assert parse_dqblk("user", dqblk(20, 10, 1024)) == QuotaFacts("user", 20480, 19456)


def test_no_space_is_available_above_the_limit() -> None:
    assert parse_dqblk("group", dqblk(1, 0, 5000)) == QuotaFacts("group", 1024, 0)


@pytest.mark.parametrize("record", [dqblk(0, 0, 5000), dqblk(10, 0, 5000, valid=0), dqblk(10, 0, 5000, valid=4)])
def test_without_a_limit_there_is_no_quota(record: bytes) -> None:
    assert parse_dqblk("user", record) is None


def test_the_tightest_quota_applies(tmp_path: Path) -> None:
    queries = []

    def call(fd: int, kind: int, holder: int) -> bytes | None:
        queries.append((kind, holder))
        return {0: dqblk(1000, 0, 0), 1: dqblk(500, 0, 100 * KIB)}.get(kind)

    assert read_quota(tmp_path, call) == QuotaFacts("group", 500 * KIB, 400 * KIB)
    assert queries[:2] == [(0, os.geteuid()), (1, os.getegid())]


def test_the_project_quota_is_read_if_the_directory_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_reader, "_project_id", lambda _: 17)
    queries = []

    def call(fd: int, kind: int, holder: int) -> bytes | None:
        queries.append((kind, holder))
        return dqblk(2, 0, 0) if kind == 2 else None

    assert read_quota(tmp_path, call) == QuotaFacts("project", 2048, 2048)
    assert queries[2] == (2, 17)


def test_a_file_system_without_quotas_gives_none(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert read_quota(tmp_path, lambda *_: None) is None
    assert read_quota("/proc") is None, "this one asks the kernel"
    assert read_quota(tmp_path / "gone") is None
    assert len(os.listdir("/proc/self/fd")) == before
