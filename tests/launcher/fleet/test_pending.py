"""What the reasons of waiting jobs mean."""

import pytest

from launcher.fleet.pending import advice_lines, pending_advice


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("Priority", "higher priority"),
        ("AssocGrpCPULimit", "limit of the account"),
        ("QOSMaxGRESPerUser", "quality of service"),
        ("ReqNodeNotAvail, UnavailableNodes:cn01", "gpujob fleet -v"),
        ("DependencyNeverSatisfied", "can never start"),
        ("JobHeldUser", "scontrol release"),
    ],
)
def test_reasons_have_advice(reason: str, word: str) -> None:
    assert word in (pending_advice(reason) or "")


def test_an_unknown_reason_stands_for_itself() -> None:
    assert pending_advice("Cleaning") is None
    assert advice_lines(["Cleaning", "Priority", "Priority"]) == ["Priority: jobs with a higher priority come first"]
