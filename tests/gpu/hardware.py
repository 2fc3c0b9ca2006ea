"""A job on a real GPU: the real sidecar, and real programs that compute, under the real wrapper."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.exporter.gpus.collectors.gpu_job import GpuJob
from tests.gpu.nvidia_smi import Device
from tests.realstack.waiting import wait_for

FOLDER = Path(__file__).resolve().parent
CUDA_WORKER, TORCH_WORKER = (str(FOLDER / name) for name in ("cuda_worker.py", "torch_worker.py"))
SEEN_S = 40.0
"""Until a program that begins is on the driver's list and then on the page: PyTorch alone takes seconds to import."""


class HardwareJob(GpuJob):
    """A job of one worker on one GPU."""

    def __init__(self, run_dir: Path, device: Device, **manifest: Any) -> None:
        super().__init__(run_dir, None, 1, **manifest)
        self.device = device
        self.orders = run_dir / "orders"
        self.orders.mkdir()

    def start(self, *above: str) -> None:
        """``GpuJob.start``, with that GPU given to the job."""
        super().start("env", self._given, *above)

    @property
    def _given(self) -> str:
        return f"CUDA_VISIBLE_DEVICES={self.device.uuid}"

    def cuda(self, *options: str) -> list[str]:
        """The command of a program that uses the driver's library, and follows the orders."""
        return ["env", self._given, sys.executable, CUDA_WORKER, "--orders", str(self.orders), *options]

    def torch(self, *options: str) -> list[str]:
        """The command of a program that uses PyTorch."""
        return ["env", self._given, str(torch_python()), TORCH_WORKER, *options]

    def order(self, what: str) -> None:
        """Have the program do something."""
        (self.orders / what).touch()

    def output(self) -> str:
        """What the worker has printed."""
        return "".join(path.read_text() for path in self.run_dir.glob(f"*_{self.tasks[0].worker}*.out"))

    def until_printed(self, words: str) -> None:
        """Wait for a line of the worker."""
        wait_for(lambda: words in self.output(), SEEN_S, words, logs=self.run_dir)

    def until_seen(self) -> dict[str, Any]:
        """The first use of a GPU by the worker that is told, with its share of time."""
        return wait_for(
            lambda: next((use for use in self.of_worker(0)["gpu_use"] if use["sm_ratio"] is not None), None),
            SEEN_S,
            "the worker on the GPU",
            logs=self.log,
            retry=(KeyError, OSError),  # before the first look
        )

    def until_ended(self) -> dict[str, Any]:
        """How the worker has ended."""
        found: dict[str, Any] = wait_for(lambda: self.of_worker(0)["exit"], SEEN_S, "the end", logs=self.log)
        return found

    def close(self) -> None:
        """Leave nothing behind, children of workers neither."""
        self.order("end")
        super().close()


@cache
def torch_python() -> str | None:
    """An interpreter that has PyTorch; this one does not need to be it."""
    for python in dict.fromkeys((sys.executable, shutil.which("python3"))):
        if python is not None:
            done = subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=300, check=False)
            if done.returncode == 0:
                return python
    return None
