"""Meaning of the Xid codes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.xid import (
    CONTAINED_XIDS,
    KNOWN_XIDS,
    PAGING_XIDS,
    PROGRAM_FAULT_XIDS,
    XIDS,
    fatal_xid_text,
    is_device_fault,
    xid_class,
    xid_code,
    xid_meaning,
)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (13, "application"),
        (31, "application"),
        (32, "application"),
        (39, "application"),
        (94, "hardware"),
        (43, "noise"),
        (45, "noise"),
        (63, "noise"),
        (92, "noise"),
        (154, "noise"),
        (46, "reset"),
        (62, "reset"),
        (119, "reset"),
        (120, "reset"),
        (48, "hardware"),
        (64, "hardware"),
        (74, "hardware"),
        (79, "hardware"),
        (95, "hardware"),
        (140, "hardware"),
    ],
)
def test_a_code_has_its_class(code: int, kind: str) -> None:
    assert xid_class(code) == kind


def test_a_code_has_a_description() -> None:
    assert xid_meaning(79) == "fallen off the bus"
    assert xid_meaning(31) == "invalid address"


@pytest.mark.parametrize("code", [0, -1, 1, 999, 10**9])
def test_an_unknown_code_is_assigned_to_no_worker(code: int) -> None:
    assert xid_code(code).kind == "noise"
    assert not is_device_fault(code)
    assert "unknown" in xid_meaning(code)


def test_known_xids_include_alerting_and_common_codes() -> None:
    assert KNOWN_XIDS == (13, 31, 43, 45, 46, 48, 62, 64, 74, 79, 94, 95, 119, 120)
    assert all(is_device_fault(code) for code in PAGING_XIDS)
    assert not set(PAGING_XIDS) & CONTAINED_XIDS


def test_errors_that_end_with_the_program_are_program_errors() -> None:
    assert {xid_class(code) for code in PROGRAM_FAULT_XIDS} == {"application"}
    assert {13, 31} <= PROGRAM_FAULT_XIDS
    assert not {43, 45} & PROGRAM_FAULT_XIDS


@pytest.mark.parametrize("code", [46, 48, 62, 79, 94, 95, 119, 120, 140])
def test_some_device_errors_end_every_program(code: int) -> None:
    assert fatal_xid_text(code)


@pytest.mark.parametrize("code", [54, 64, 74, 109, *range(144, 151), 155, 31, 43, 45, 999])
def test_a_program_may_continue_after_other_device_errors(code: int) -> None:
    assert not fatal_xid_text(code)


def test_every_code_has_a_short_text() -> None:
    for code, xid in XIDS.items():
        assert 0 < code < 1000
        assert 0 < len(xid.meaning) <= 80
        assert not xid.meaning.endswith(".")
        assert not xid.fatal_reason or is_device_fault(code)


@given(st.integers())
def test_any_code_has_a_class_and_a_text(code: int) -> None:
    assert xid_class(code) in ("hardware", "reset", "application", "noise")
    assert is_device_fault(code) == (xid_class(code) in ("hardware", "reset"))
    assert xid_meaning(code)
