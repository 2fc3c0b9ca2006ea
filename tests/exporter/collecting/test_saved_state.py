"""Saved state outlives a sidecar, for the same attempt of the same job."""

import errno
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.collecting.saved_state import STATE_DIR, load_saved_state, save_state

LOGS = {"worker_w0": {"tails": [{"offset": 1 << 60, "mark": "00ff"}], "rate": 0.5, "name": "Übung"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_saved_state_is_loaded_again(tmp_path: Path) -> None:
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") is None
    assert save_state(tmp_path, "n1", "7", 0, LOGS, kind="logs") is None
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") == LOGS
    assert save_state(tmp_path, "n1", "7", 0, {}, kind="logs") is None
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") == {}
    assert os.listdir(tmp_path / STATE_DIR) == ["n1.logs.json"]


@dataclass
class Part:
    name: str
    point: tuple[float, float] = (1.0, 2.0)
    numbers: Sequence[float] = field(default_factory=lambda: array("d", [3.0, 4.0]))
    cached: int = field(default=5, init=False)


def test_dataclasses_and_arrays_are_saved_as_lists(tmp_path: Path) -> None:
    save_state(tmp_path, "n1", "7", 0, {"0": Part("w0"), "by_rank": {None: Part("w1"), 2: 0}}, kind="logs")
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") == {
        "0": ["w0", [1.0, 2.0], [3.0, 4.0]],
        "by_rank": {"null": ["w1", [1.0, 2.0], [3.0, 4.0]], "2": 0},
    }


@pytest.mark.parametrize(("node", "job_id", "attempt"), [("n2", "7", 0), ("n1", "8", 0), ("n1", "7", 1)])
def test_another_node_job_or_attempt_has_no_saved_state(tmp_path: Path, node: str, job_id: str, attempt: int) -> None:
    save_state(tmp_path, "n1", "7", 0, LOGS, kind="logs")
    assert load_saved_state(tmp_path, node, job_id, attempt, kind="logs") is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"logs": []},
        {"logs": None},
        {"job_id": 7},
        {"attempt": "0"},
        {"attempt": False},
    ],
)
def test_saved_state_in_another_format_is_ignored(tmp_path: Path, change: dict[str, object]) -> None:
    save_state(tmp_path, "n1", "7", 0, LOGS, kind="logs")
    path = tmp_path / STATE_DIR / "n1.logs.json"
    body = json.loads(path.read_text())
    assert set(body) == {"schema", "job_id", "attempt", "time", "logs"}
    path.write_text(json.dumps(body | change))
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") is None


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 200_000, b'{"schema": 1}'])
def test_a_damaged_state_file_is_ignored(tmp_path: Path, text: bytes) -> None:
    (tmp_path / STATE_DIR).mkdir()
    (tmp_path / STATE_DIR / "n1.logs.json").write_bytes(text)
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") is None


@given(body=JSON)
def test_loading_never_raises(tmp_path_factory: pytest.TempPathFactory, body: object) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / STATE_DIR).mkdir(exist_ok=True)
    (folder / STATE_DIR / "n1.logs.json").write_text(
        json.dumps({"schema": 1, "job_id": "7", "attempt": 0, "logs": body})
    )
    assert load_saved_state(folder, "n1", "7", 0, kind="logs") == (body if isinstance(body, dict) else None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_failed_write_is_reported_and_keeps_the_earlier_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save_state(tmp_path, "n1", "7", 0, LOGS, kind="logs")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    assert save_state(tmp_path, "n1", "7", 0, {}, kind="logs") == os.strerror(number)
    assert load_saved_state(tmp_path, "n1", "7", 0, kind="logs") == LOGS
    assert os.listdir(tmp_path / STATE_DIR) == ["n1.logs.json"]


def test_a_missing_run_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    assert save_state(tmp_path / "run", "n1", "7", 0, LOGS, kind="logs") == os.strerror(errno.ENOTDIR)
    assert save_state(tmp_path, "n1", "7", 0, {"name": "\ud800"}, kind="logs") is not None, "not encodable in UTF-8"
