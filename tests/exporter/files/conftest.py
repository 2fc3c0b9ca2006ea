"""Tests of files on a busy machine."""

import pytest

from exporter.files.checkpoints import checkpoints_reader
from exporter.files.checkpoints import collector as checkpoints_collector
from exporter.files.outputs import folder_reader, outputs_reader
from exporter.machine.file_host import FileWatchHost


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a poll end its work, however late it is served; tests of what is left for the next poll set limits.

    Nor does a poll wait because the one before took long: its time is real, while the clock of the tests is not.
    """
    for module, limits in {
        checkpoints_reader: ("POLL_S", "CHECK_S", "LIST_S"),
        checkpoints_collector: ("POLL_WAIT_S",),
        folder_reader: ("SCAN_S", "STAT_S"),
        outputs_reader: ("CHECK_S", "COUNT_S"),
    }.items():
        for limit in limits:
            monkeypatch.setattr(module, limit, 60.0)
    monkeypatch.setattr(FileWatchHost.poll, "__defaults__", (60.0,))
    for module, ratios in {
        checkpoints_reader: ("REST_RATIO", "LIST_REST_RATIO"),
        folder_reader: ("REST_RATIO",),
    }.items():
        for ratio in ratios:
            monkeypatch.setattr(module, ratio, 0.0)
