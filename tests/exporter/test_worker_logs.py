"""Where the logs of a run are, and their ends."""

from pathlib import Path

import pytest

from exporter.readers.worker_logs import log_paths, read_end, run_suffix
from tests.exporter.support import make_task


@pytest.mark.parametrize(
    ("attempt", "restart", "suffix"), [(0, 0, ""), (0, 1, "_r1"), (1, 0, "_a1"), (2, 10, "_a2_r10")]
)
def test_each_run_has_files_of_its_own(attempt: int, restart: int, suffix: str) -> None:
    assert run_suffix(attempt, restart) == suffix
    assert log_paths(make_task(3), Path("/runs/1"), "node02", attempt, restart) == (
        Path(f"/runs/1/node02_worker_w3{suffix}.out"),
        Path(f"/runs/1/node02_worker_w3{suffix}.err"),
    )


def test_the_end_of_a_log_is_its_last_bytes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_end(tmp_path / "log", 4) == b"6789"
    assert read_end(tmp_path / "log", 100) == b"0123456789"


def test_the_end_of_what_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    assert read_end(tmp_path / "gone", 4) == b""
    assert read_end(tmp_path, 4) == b""
