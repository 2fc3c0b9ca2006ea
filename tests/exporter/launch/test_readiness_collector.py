"""Readiness of the services of a job, as published by its first node."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import IDLE_INTERVAL_S
from exporter.contract import run_files
from exporter.launch.readiness_collector import EXPECTED, READY, TIMEOUT, WORKERS, ReadinessCollector
from tests.support.exporter import make_context, make_manifest, page_of, samples_of
from tests.support.statuses import described

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


def make_collector(run_dir: Path, body: object, **identity: Any) -> ReadinessCollector:
    (run_dir / run_files.READINESS_FILE).write_text(body if isinstance(body, str) else json.dumps(body))
    return ReadinessCollector(make_context(make_manifest(run_dir), **identity))


def test_ready_and_expected_workers_are_published(tmp_path: Path) -> None:
    collector = make_collector(tmp_path, BODY)
    snapshot = collector.read()
    assert snapshot is not None
    page, readiness = page_of(collector, snapshot), described(collector, snapshot).readiness
    assert samples_of(page, READY) == {"": 0.0}
    assert samples_of(page, TIMEOUT) == {"": 1800.0}
    assert samples_of(page, WORKERS) == {'role="prefill"': 3.0, 'role="decode"': 2.0}
    assert samples_of(page, EXPECTED) == {'role="prefill"': 4.0, 'role="decode"': 1.0}
    assert readiness is not None
    assert readiness.to_json() == {
        "ready": False,
        "since": None,
        "waiting": "1 prefills and 0 decodes",
        "workers": {"prefill": {"ready": 3, "expected": 4}, "decode": {"ready": 2, "expected": 1}},
    }


def test_a_ready_job_has_the_time_since_when(tmp_path: Path) -> None:
    collector = make_collector(
        tmp_path, {**BODY, "ready": True, "since": 1_700_000_090.5, "waiting": "", "expected": {}}
    )
    snapshot = collector.read()
    assert snapshot is not None
    assert (snapshot.ready, snapshot.since, snapshot.roles) == (True, 1_700_000_090.5, {})
    assert samples_of(page_of(collector, snapshot), READY) == {"": 1.0}


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
def test_an_invalid_or_outdated_readiness_file_is_ignored(tmp_path: Path, body: object) -> None:
    assert make_collector(tmp_path, body).read() is None


def test_a_job_without_readiness_has_no_series(tmp_path: Path) -> None:
    assert ReadinessCollector(make_context(make_manifest(tmp_path))).read() is None


def test_only_the_first_node_publishes_readiness(tmp_path: Path) -> None:
    second = make_collector(tmp_path, BODY, node="node02", node_index=1)
    assert second.read() is None
    assert second.interval_s == IDLE_INTERVAL_S
