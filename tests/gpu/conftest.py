"""The GPU of this machine, jobs on it, and tables of what was measured."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.gpu import nvidia_smi
from tests.gpu.hardware import HardwareJob
from tests.gpu.nvidia_smi import Device

Begin = Callable[..., HardwareJob]
Show = Callable[[str, str], None]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Leave out here what needs a GPU, where ``nvidia-smi`` names none."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent and item.get_closest_marker("gpu")]
    if ours and not nvidia_smi.devices():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> Device:
    """The first GPU that this process is given."""
    found = nvidia_smi.devices()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return next((gpu for gpu in found if given and (gpu.index == given or gpu.uuid.startswith(given))), found[0])


@pytest.fixture
def job(tmp_path: Path, device: Device) -> Iterator[HardwareJob]:
    """A job of one worker with that GPU, its sidecar not yet started."""
    job = HardwareJob(tmp_path, device)
    yield job
    job.close()


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Prints a table although the test passes, and writes it into the folder of the environment's ``OUT``."""

    def show(name: str, text: str) -> None:
        with capsys.disabled():
            print(f"\n{name}\n{text}", flush=True)
        if folder := os.environ.get("OUT"):
            Path(folder, f"{name}.txt").write_text(text, encoding="utf-8")

    return show
