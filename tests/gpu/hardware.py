"""A job on a real GPU: the real sidecar, and real GPU programs under the real wrapper."""

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
"""Time from the start of a program to its series: PyTorch alone takes seconds to import."""


class HardwareJob(GpuJob):
    """A job of one worker on one GPU."""

    def __init__(self, run_dir: Path, device: Device, **manifest: Any) -> None:
        super().__init__(run_dir, None, 1, **manifest)
        self.device = device
        self.orders = run_dir / "orders"
        self.orders.mkdir()

    def start(self, *above: str) -> None:
        """``GpuJob.start`` with CUDA_VISIBLE_DEVICES set to the GPU."""
        super().start("env", self._visible_devices, *above)

    @property
    def _visible_devices(self) -> str:
        return f"CUDA_VISIBLE_DEVICES={self.device.uuid}"

    def cuda(self, *options: str) -> list[str]:
        """The command of a program that uses the driver library and follows orders."""
        return ["env", self._visible_devices, sys.executable, CUDA_WORKER, "--orders", str(self.orders), *options]

    def torch(self, *options: str) -> list[str]:
        """The command of a program that uses PyTorch."""
        return ["env", self._visible_devices, str(torch_python()), TORCH_WORKER, *options]

    def order(self, name: str) -> None:
        """Give the program an order."""
        (self.orders / name).touch()

    def output(self) -> str:
        """Output of the worker so far."""
        return "".join(path.read_text() for path in self.run_dir.glob(f"*_{self.tasks[0].worker}*.out"))

    def until_printed(self, text: str) -> None:
        """Wait for this text in the output of the worker."""
        wait_for(lambda: text in self.output(), SEEN_S, text, logs=self.run_dir)

    def until_seen(self) -> dict[str, Any]:
        """First reported GPU use of the worker with a known utilization."""
        return wait_for(
            lambda: next((use for use in self.of_worker(0)["gpu_use"] or () if use["sm_ratio"] is not None), None),
            SEEN_S,
            "the worker on the GPU",
            logs=self.log,
            retry=(KeyError, OSError),  # before the first read
        )

    def until_ended(self) -> dict[str, Any]:
        """Exit entry of the worker in the status."""
        found: dict[str, Any] = wait_for(lambda: self.of_worker(0)["exit"], SEEN_S, "the end", logs=self.log)
        return found

    def close(self) -> None:
        """Stop everything, including children of workers."""
        self.order("end")
        super().close()


@cache
def torch_python() -> str | None:
    """An interpreter with PyTorch, which may be another than this one, or None."""
    for python in dict.fromkeys((sys.executable, shutil.which("python3"))):
        if python is not None:
            result = subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=300, check=False)
            if result.returncode == 0:
                return python
    return None
