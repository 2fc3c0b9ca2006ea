"""Readiness of a job's services as its first node shows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import NodeStatus
from exporter.contract import run_files
from exporter.launch.readiness_collector import EXPECTED, READY, TIMEOUT, WORKERS, ReadinessCollector
from tests.support.exporter import make_context, make_manifest, page_of, samples_of

BODY: dict[str, Any] = {
    "schema": 1,
    "attempt": 0,
    "time": 1_700_000_100.0,
    "ready": False,
    "since": None,
    "timeout_s": 1800,
    "waiting": "1 prefills and 0 decodes",
    "seen": {"prefill": 3, "decode": 2},
    "expected": {"prefill": 4, "decode": 1},
    "rules": [],
}


def collector(run_dir: Path, body: object, **identity: Any) -> ReadinessCollector:
    (run_dir / run_files.READINESS_FILE).write_text(body if isinstance(body, str) else json.dumps(body))
    return ReadinessCollector(make_context(make_manifest(run_dir), **identity))


def test_workers_that_are_ready_stand_beside_those_that_are_expected(tmp_path: Path) -> None:
    made = collector(tmp_path, BODY)
    found = made.read()
    assert found is not None
    page, status = page_of(made, found), NodeStatus()
    made.describe(found, status)
    assert samples_of(page, READY) == {"": 0.0}
    assert samples_of(page, TIMEOUT) == {"": 1800.0}
    assert samples_of(page, WORKERS) == {'role="prefill"': 3.0, 'role="decode"': 2.0}
    assert samples_of(page, EXPECTED) == {'role="prefill"': 4.0, 'role="decode"': 1.0}
    assert status.job["readiness"] == {
        "ready": False,
        "since": None,
        "waiting": "1 prefills and 0 decodes",
        "workers": {"prefill": {"ready": 3, "expected": 4}, "decode": {"ready": 2, "expected": 1}},
    }


def test_a_job_that_is_ready_says_since_when(tmp_path: Path) -> None:
    made = collector(tmp_path, {**BODY, "ready": True, "since": 1_700_000_090.5, "waiting": "", "expected": {}})
    found = made.read()
    assert found is not None
    assert (found.ready, found.since, found.roles) == (True, 1_700_000_090.5, ())
    assert samples_of(page_of(made, found), READY) == {"": 1.0}


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "[]", "null", "{}", '{"attempt": 0}'),
        {**BODY, "attempt": 1},
        {**BODY, "expected": ["prefill"]},
        {**BODY, "seen": {"prefill": "many"}},
        {**BODY, "expected": {"prefill": None}},
        {**BODY, "since": "noon"},
    ],
)
def test_what_is_not_of_this_attempt_or_not_understood_is_not_shown(tmp_path: Path, body: object) -> None:
    assert collector(tmp_path, body).read() is None


def test_a_job_that_waits_for_nobody_has_no_series(tmp_path: Path) -> None:
    assert ReadinessCollector(make_context(make_manifest(tmp_path))).read() is None


def test_the_first_node_alone_shows_it(tmp_path: Path) -> None:
    second = collector(tmp_path, BODY, node="node02", node_index=1)
    assert second.read() is None
    assert second.interval_s > 1000
