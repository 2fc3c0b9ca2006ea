import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest

from exporter.machine import own_process

HOLES = """
from exporter.machine.procfs import read_self_rss_bytes
from exporter.machine.own_process import limit_reserved_memory

limit_reserved_memory()
del [bytearray(16 << 20)][:]  # glibc would now keep blocks up to this size in its heap
before = read_self_rss_bytes()
large, small = [], []
for _ in range(64):
    large.append(bytearray(b"x") * (1 << 20))
    small.append(bytearray(1000))
del large
print((read_self_rss_bytes() - before) >> 20)
"""


def test_freed_buffers_leave_no_holes_between_small_objects() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4


class Cycle:
    """Garbage as soon as nobody else holds it."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_at_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(own_process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    garbage, threshold = own_process.GarbageCollection(), gc.get_threshold()
    gc.set_threshold(0)
    try:
        for interval_s in (own_process.SETTLE_S, own_process.COLLECT_S, own_process.COLLECT_S):
            lost = weakref.ref(Cycle())
            now[0] += interval_s - 1
            garbage.poll()
            assert lost() is not None
            now[0] += 1
            garbage.poll()
            assert lost() is None
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
