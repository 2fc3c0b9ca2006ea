"""Fixtures for tests on real GPUs."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.gpu import nvidia_smi
from tests.gpu.hardware import HardwareJob
from tests.gpu.nvidia_smi import Device

Show = Callable[[str, str], None]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip tests in this directory that need a GPU when ``nvidia-smi`` lists none."""
    gpu_tests = [item for item in items if item.path.parent == Path(__file__).parent and item.get_closest_marker("gpu")]
    if gpu_tests and not nvidia_smi.devices():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> Device:
    """The first GPU in CUDA_VISIBLE_DEVICES, or the first of all."""
    found = nvidia_smi.devices()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return next((gpu for gpu in found if given and (gpu.index == given or gpu.uuid.startswith(given))), found[0])


@pytest.fixture
def job(tmp_path: Path, device: Device) -> Iterator[HardwareJob]:
    """A job of one worker with that GPU. Its sidecar is not started yet."""
    job = HardwareJob(tmp_path, device)
    yield job
    job.close()


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Prints a table even if the test passes. Also writes it to the directory in ``OUT``, if set."""

    def show(name: str, text: str) -> None:
        with capsys.disabled():
            print(f"\n{name}\n{text}", flush=True)
        if folder := os.environ.get("OUT"):
            Path(folder, f"{name}.txt").write_text(text, encoding="utf-8")

    return show
