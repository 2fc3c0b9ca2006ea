import subprocess
import sys

HOLES = """
from exporter.machine.procfs import read_self_rss_bytes
from exporter.machine.threads import limit_reserved_memory

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
