"""The example workload with faults: it takes the options of ``embed.py`` and those below.

    faulty_embed.py --items 300 [--only-rank K] [--at DONE] [--once] --raise|--exit-code N|--signal NAME|...

A fault happens before the next item when DONE items of the shard are done, by default immediately after the start.
It imports the ``embed.py`` beside it, else the one of the example.
"""

import argparse
import functools
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "../../examples/embed"))
import embed

MIB = 1 << 20
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.21 GiB is "
    "free. Including non-PyTorch memory, this process has 77.93 GiB memory in use. Of the allocated memory 75.02 GiB "
    "is allocated by PyTorch, and 1.88 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


class Simulated(RuntimeError):
    """What ``--raise`` raises."""


class OutOfMemoryError(RuntimeError):
    """Stands for PyTorch's: the traceback has the same name."""

    __module__ = "torch.cuda"


def parse_faults() -> tuple[argparse.Namespace, list[str]]:
    """Faults, and the options of the workload."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("--only-rank", type=int, help="this shard alone has the faults")
    add("--at", type=int, default=0, help="items done before them")
    add("--once", action="store_true", help="not again after a restart; noted in the checkpoint folder")
    add("--slow-down", type=float, default=1.0, help="divides --rate")
    add("--checkpoint-seconds", type=float, default=0.0, help="time of each checkpoint but the last, of all shards")
    add("--leak", type=float, help="MiB of memory a second")
    add("--ignore-sigterm", action="store_true")
    add("--no-output", action="store_true", help="works and logs, but writes no more results")
    add("--cut-checkpoint", action="store_true", help="leaves half of each checkpoint")
    add("--stall", action="store_true", help="neither works nor logs, until a signal")
    add("--raise", dest="throw", action="store_true")
    add("--cuda-oom", action="store_true")
    add("--exit-code", type=int)
    add("--signal", type=lambda name: signal.Signals[f"SIG{name}"], help="dies by it")
    return parser.parse_known_args()


class FaultyWorker(embed.Worker):
    def __init__(self, faults: argparse.Namespace, options: argparse.Namespace) -> None:
        self.faults = faults
        self.options = options
        self.done = 0
        self.stop = None
        self._faulty = False
        self._break()
        super().__init__(options)

    def _pace(self) -> None:
        self._break()
        super()._pace()

    def _append(self, record: Mapping[str, Any]) -> None:
        if not (self._faulty and self.faults.no_output):
            super()._append(record)

    def _save(self) -> None:
        if self.faults.checkpoint_seconds and self.done < self.share:
            logging.info("Saving a checkpoint at item %d", self.done)
            time.sleep(self.faults.checkpoint_seconds)
        super()._save()
        if self._faulty and self.faults.cut_checkpoint:
            newest = self._checkpoints()[0]
            os.truncate(newest, newest.stat().st_size // 2)

    def _break(self) -> None:
        """Begin the faults once it is time. The last one may end the process."""
        faults, shard = self.faults, self.options.shard
        if self._faulty or self.done < faults.at or faults.only_rank not in (None, shard):
            return
        marker = self.options.checkpoint_dir / f"failed_once_worker_{shard}"
        if faults.once and marker.exists():
            return
        self._faulty = True
        if faults.once:
            marker.touch()
        if self.options.rate:
            self.options.rate /= faults.slow_down
        if faults.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if faults.leak:
            threading.Thread(target=leak, args=(faults.leak,), daemon=True).start()
        while faults.stall and self.stop is None:
            time.sleep(0.1)
        if faults.throw:
            raise Simulated(f"simulated failure of worker {shard} at item {self.done}")
        if faults.cuda_oom:
            raise OutOfMemoryError(CUDA_OOM)
        if faults.exit_code is not None:
            sys.exit(faults.exit_code)
        if faults.signal:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), faults.signal)


def leak(mib_per_second: float) -> None:
    """Use more and more memory."""
    leaked = []
    while True:
        leaked.append(b"\xa5" * int(mib_per_second * MIB / 10))  # written, since untouched pages cost nothing
        time.sleep(0.1)


if __name__ == "__main__":
    faults, options = parse_faults()
    embed.main(options, functools.partial(FaultyWorker, faults))
