"""Judgement of attached jobs, where exit statuses may be unknown and workers may be missing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.events import Event
from exporter.contract.report import WorkerReport
from exporter.contract.status import NodeStatus, WorkerEnd
from exporter.progress.work import job_work
from launcher.report.attached import has_unknown_end, judge_ends, launch_report, missing_text
from launcher.verify.verify import FinishedJob, verify_results
from tests.support.exporter import make_manifest


def ended(reason: str = "completed", code: int | None = 0, signal: str | None = None) -> WorkerEnd:
    return WorkerEnd(reason=reason, code=code, signal=signal, time=5.0)


UNKNOWN = ended("killed_unknown", None)


def workers(*ends: tuple[WorkerEnd | None, int | None], **over: Any) -> list[WorkerReport]:
    """Workers with their ends and positions; one without an end was never found."""
    return [
        WorkerReport(worker=f"worker_w{n}", rank=n, exit=end, start=None if end is None else 1.0, items=items, **over)
        for n, (end, items) in enumerate(ends)
    ]


def steps(
    *ends: tuple[WorkerEnd | None, int | None], expected: int | None = 50, unit: str = "steps"
) -> list[WorkerReport]:
    return workers(*ends, items_expected=expected, unit=unit)


DECIDED = ("", "")
ERRORS = {"log_errors": {"cuda_oom": 2}}


@pytest.mark.parametrize(
    ("entries", "total", "state", "detail"),
    [
        (workers((ended(), 50), (ended(), 50)), 100, *DECIDED),
        (workers((ended(), 50), (ended(), None)), 100, *DECIDED),
        (workers((UNKNOWN, 50), (ended("app_error", 3), 20)), 100, *DECIDED),
        (workers((UNKNOWN, 50), (ended("killed_unknown", None, "SIGKILL"), 50)), 100, *DECIDED),
        (workers((UNKNOWN, 50), (ended("cuda_oom", None), 50)), 100, *DECIDED),
        (workers((UNKNOWN, 50), (UNKNOWN, 49)), 100, "COMPLETED", "99 of 100 items were done"),
        (workers((UNKNOWN, 50), (UNKNOWN, 48)), 100, "FAILED", "98 of 100 items were done; 99% are enough"),
        (workers((UNKNOWN, 50), (ended(), 20)), 100, "FAILED", "70 of 100 items were done"),
        (workers((UNKNOWN, 50), (UNKNOWN, 50), **ERRORS), 100, "FAILED", "the log of worker_w0 has cuda_oom"),
        (workers((UNKNOWN, 50), (UNKNOWN, 50), log_errors={"x": 2}), 100, "COMPLETED", "100 of 100"),
        (workers((UNKNOWN, None), (UNKNOWN, 50)), 100, "UNKNOWN", "it is unknown how every worker ended"),
        (workers((UNKNOWN, 50), (UNKNOWN, 50)), None, "UNKNOWN", "it is unknown how every worker ended"),
        (workers((ended(), 50), (None, None)), 100, "FAILED", "not found: worker_w1"),
        (workers((ended(), 50), (None, 20)), 100, "FAILED", "70 of 100 items were done"),
        (workers((ended(), 50), (None, 50)), 100, "COMPLETED", "not found: worker_w1; 100 of 100"),
        (workers((ended(), 50), (None, 50)), None, "FAILED", "not found: worker_w1"),
        (steps((ended(), 50), (ended(), 40)), 100, *DECIDED),
        (steps((UNKNOWN, 50), (UNKNOWN, 50)), 100, "COMPLETED", "50 of 50 steps were done"),
        (steps((UNKNOWN, 50), (UNKNOWN, 40)), 100, "FAILED", "40 of 50 steps were done; 99% are enough"),
        (steps((UNKNOWN, 50), (UNKNOWN, 50), expected=None), 100, "UNKNOWN", "it is unknown how"),
        (steps((UNKNOWN, 50), (UNKNOWN, 50), unit="tokens"), 100, "UNKNOWN", "it is unknown how"),
    ],
)
def test_the_work_decides_where_ends_are_unknown(
    tmp_path: Path, entries: list[WorkerReport], total: int | None, state: str, detail: str
) -> None:
    judgement = judge_ends(make_manifest(tmp_path, total_items=total), entries, {"cuda_oom"}, None)
    assert judgement.state == state
    assert detail in (judgement.check.detail if judgement.check else "")
    assert judgement.known == [entry for entry in entries if not has_unknown_end(entry)]


def test_the_judgement_says_how_many_statuses_are_unknown(tmp_path: Path) -> None:
    entries = workers((UNKNOWN, 50), (ended(), 50))
    check = judge_ends(make_manifest(tmp_path, total_items=100), entries, (), None).check
    assert check is not None
    assert (check.name, check.passed) == ("workers", True)
    assert check.detail == "the exit status of 1 of 2 workers is unknown; 100 of 100 items were done"


def test_the_share_that_is_enough_is_the_users(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, total_items=100)
    lenient = dataclasses.replace(manifest, verify=dataclasses.replace(manifest.verify, complete_share=0.5))
    assert judge_ends(lenient, workers((UNKNOWN, 30), (UNKNOWN, 20)), (), None).state == "COMPLETED"


def test_the_sidecar_says_which_workers_are_missing() -> None:
    events = tuple(
        Event(time=1.0, level="critical", event=event, detail=detail)
        for event, detail in (("pid file", "x"), ("launch incomplete", "found 0 of 2 workers"))
    )
    assert missing_text({"n1": NodeStatus(events=events), "n2": NodeStatus()}) == "found 0 of 2 workers"
    assert missing_text({"n1": NodeStatus()}) is None


def test_the_launch_checks_of_all_nodes_are_one() -> None:
    def status(*, verified: bool, final: bool = True) -> NodeStatus:
        check = {"name": "workers", "level": "issue", "passed": verified, "detail": "", "faults": []}
        return NodeStatus.from_json({"launch": {"verified": verified, "final": final, "checks": [check]}})

    both = {"n1": status(verified=True), "n2": status(verified=False)}
    found = launch_report(both)
    assert found is not None
    assert (found.verified, [check.passed for check in found.checks]) == (False, [True, False])
    assert launch_report({**both, "n3": status(verified=True, final=False)}) is None
    assert launch_report({}) is None


def test_the_verification_of_an_attached_job_knows_less(tmp_path: Path) -> None:
    def items(total: int | None, *, attached: bool) -> tuple[bool | None, str]:
        manifest = make_manifest(tmp_path, total_items=total, attached=attached, groups=())
        found = verify_results(FinishedJob(manifest, job_work([]), exit_reasons=["completed"]))
        return next((check.passed, check.detail) for check in found if check.name == "items")

    assert items(100, attached=False) == (False, "no log shows how many of 100 items were done")
    assert items(100, attached=True) == (None, "no log shows how many of 100 items were done")
    assert items(None, attached=True) == (None, "no total is given (--total-items)")
